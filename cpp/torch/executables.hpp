// The executables that captured graphs borrow: see src/executables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>
#include <vmmgraph/torch.hpp>

#include "rust/cxx.h"
#include "vmmgraph/src/bridge/executables.rs.h"
#include "waker.hpp"

namespace vmmgraph::torch {

struct ExecutablePool::State {
    c10::Device device;
    rust::Box<bridge::ExecutablePool> pool;
    Waker waker;

    // What a capture in the arena uses that names a pool or none; null where graphs do not share. Throws Error for a pool of another device.
    static std::shared_ptr<ExecutablePool> of(const SharedVmmAllocator& arena, const std::shared_ptr<ExecutablePool>& named);
};

// The graphs of one capture, in a pool.
class Template {
public:
    // Takes in graphs, which stay as they are and live until close(). With `own`, their executables are never another's. Throws Error.
    Template(std::shared_ptr<ExecutablePool> pool, const std::vector<cudaGraph_t>& graphs, bool own);

    // Bytes that executables of these graphs would take, by what those of the pool took so far.
    static std::uint64_t expected_bytes(const ExecutablePool& pool, const std::vector<cudaGraph_t>& graphs);

    // Executables for one launch of all graphs; by one thread at a time.
    class Lent {
    public:
        // Makes or updates them first, if there are none. Throws Error.
        explicit Lent(Template& from);
        Lent(const Lent&) = delete;
        Lent& operator=(const Lent&) = delete;
        ~Lent() { bridge::leave(*from_.held_); }
        [[nodiscard]] cudaGraphExec_t at(std::size_t piece) const { return reinterpret_cast<cudaGraphExec_t>(from_.executables_[piece]); }

    private:
        Template& from_;
    };

    // Makes or updates them ahead, if there are some to spare; whether there are some now. Any thread, also beside a launch and close().
    // Throws Error.
    bool wake();
    // Before the graphs go. Waits for a wake() that is under way.
    void close() noexcept;

    // It may be launched soon; whether it has executables.
    [[nodiscard]] bool expect() const { return bridge::expect(*held_); }
    void keep() const { bridge::keep_executables(*held_); }
    [[nodiscard]] bool is_awake() const { return bridge::is_awake(*held_); }
    [[nodiscard]] std::uint64_t bytes() const { return bridge::executable_bytes(*held_); }
    [[nodiscard]] std::uint64_t nodes() const { return bridge::template_nodes(*held_); }
    [[nodiscard]] const std::shared_ptr<ExecutablePool>& pool() const noexcept { return pool_; }

private:
    std::shared_ptr<ExecutablePool> pool_;
    rust::Box<bridge::GraphTemplate> held_;
    // Of the launch that is under way.
    std::vector<std::size_t> executables_;
    // Between wake() and close().
    std::mutex mutex_;
    bool closed_ = false;
};

}  // namespace vmmgraph::torch
