// Executables of captured graphs: see src/executables.
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
#include "instantiator.hpp"

namespace vmmgraph::torch {

struct ExecutablePool::State {
    c10::Device device;
    rust::Box<bridge::ExecutablePool> pool;
    Instantiator instantiator;

    // What a capture in the arena uses that names a pool or none; null where graphs do not share. Throws Error for a pool of another device.
    static std::shared_ptr<ExecutablePool> of(const SharedVmmAllocator& arena, const std::shared_ptr<ExecutablePool>& named);
};

// The graphs of one capture, in a pool.
class Template {
public:
    // Adds graphs, which stay as they are and live until close(). Pinned executables are never evicted. Throws Error.
    Template(std::shared_ptr<ExecutablePool> pool, const std::vector<cudaGraph_t>& graphs, bool pinned);

    // Bytes that executables of these graphs would take, estimated from those measured so far.
    static std::uint64_t expected_bytes(const ExecutablePool& pool, const std::vector<cudaGraph_t>& graphs);

    // Executables for one launch of all graphs; by one thread at a time.
    class Launch {
    public:
        // Instantiates first, if there are none. Throws Error.
        explicit Launch(Template& from);
        Launch(const Launch&) = delete;
        Launch& operator=(const Launch&) = delete;
        ~Launch() { bridge::launched(*from_.held_); }
        [[nodiscard]] cudaGraphExec_t at(std::size_t piece) const { return reinterpret_cast<cudaGraphExec_t>(from_.executables_[piece]); }

    private:
        Template& from_;
    };

    // Instantiates ahead of a launch, if the limits leave room; whether there are executables now. Any thread, also beside a launch and
    // close(). Throws Error.
    bool instantiate();
    // Before the graphs go. Waits for an instantiate() that is under way.
    void close() noexcept;

    // Hints that it launches soon; whether it has executables.
    [[nodiscard]] bool touch() const { return bridge::touch(*held_); }
    // Its executables are never evicted from now on.
    void pin() const { bridge::pin(*held_); }
    [[nodiscard]] bool is_instantiated() const { return bridge::is_instantiated(*held_); }
    [[nodiscard]] std::uint64_t bytes() const { return bridge::executable_bytes(*held_); }
    [[nodiscard]] std::uint64_t nodes() const { return bridge::template_nodes(*held_); }
    [[nodiscard]] const std::shared_ptr<ExecutablePool>& pool() const noexcept { return pool_; }

private:
    std::shared_ptr<ExecutablePool> pool_;
    rust::Box<bridge::GraphTemplate> held_;
    // Of the launch that is under way.
    std::vector<std::size_t> executables_;
    // Between instantiate() and close().
    std::mutex mutex_;
    bool closed_ = false;
};

}  // namespace vmmgraph::torch
