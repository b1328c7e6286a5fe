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
#include "vmmgraph-bridge/src/executables.rs.h"
#include "instantiator.hpp"

namespace vmmgraph::torch {

struct ExecutablePool::State {
    c10::Device device;
    rust::Box<bridge::ExecutablePool> pool;
    Instantiator instantiator;

    // Returns `named`, or the device's pool. Throws Error for a pool of a different device.
    static std::shared_ptr<ExecutablePool> of(const SharedVmmAllocator& arena,
                                              const std::shared_ptr<ExecutablePool>& named);
};

// The graphs of one capture, in an executable pool.
class Template {
public:
    // Adds graphs, which must not change and must live until close(). Pinned executables are never
    // evicted. Throws Error.
    Template(std::shared_ptr<ExecutablePool> pool, const std::vector<cudaGraph_t>& graphs,
             bool pinned);

    static std::uint64_t expected_bytes(const ExecutablePool& pool,
                                        const std::vector<cudaGraph_t>& graphs);

    // Executables for one launch of all graphs. One thread at a time.
    class Launch {
    public:
        // Instantiates the graphs if needed. Throws Error.
        explicit Launch(Template& from);
        Launch(const Launch&) = delete;
        Launch& operator=(const Launch&) = delete;
        ~Launch() { bridge::launched(*from_.held_); }
        [[nodiscard]] cudaGraphExec_t at(std::size_t piece) const {
            return reinterpret_cast<cudaGraphExec_t>(from_.executables_[piece]);
        }

    private:
        Template& from_;
    };

    // Instantiates ahead of a launch if the limits leave room. Returns whether executables exist.
    // Thread-safe, also during a launch and close(). Throws Error.
    bool instantiate();
    // Call before the graphs are destroyed. Waits for a running instantiate().
    void close() noexcept;

    // Hints that this graph launches soon: its executable is evicted last. Returns whether it has
    // one.
    [[nodiscard]] bool touch() const { return bridge::touch(*held_); }
    void pin() const { bridge::pin(*held_); }
    [[nodiscard]] bool is_instantiated() const { return bridge::is_instantiated(*held_); }
    [[nodiscard]] std::uint64_t bytes() const { return bridge::executable_bytes(*held_); }
    [[nodiscard]] std::uint64_t nodes() const { return bridge::template_nodes(*held_); }
    [[nodiscard]] const std::shared_ptr<ExecutablePool>& pool() const noexcept { return pool_; }

private:
    std::shared_ptr<ExecutablePool> pool_;
    rust::Box<bridge::GraphTemplate> held_;
    std::vector<std::size_t> executables_;
    // Serialises instantiate() and close().
    std::mutex mutex_;
    bool closed_ = false;
};

}  // namespace vmmgraph::torch
