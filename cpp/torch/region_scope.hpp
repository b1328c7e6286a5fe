// Thread state behind RegionScope, EagerScope and DisableScope.
#pragma once

#include <memory>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include "eager_ending.hpp"
#include "eager_memory.hpp"
#include "on_device.hpp"
#include "region_memory.hpp"
#include "segments.hpp"

namespace vmmgraph::torch {

// Destination of a thread's storages: a region, or an arena for one stream.
struct ActiveScope {
    std::shared_ptr<RegionMemory> memory;
    Policy policy;
    c10::DeviceIndex device;
    const ActiveScope* around;
    std::shared_ptr<EagerMemory> eager = nullptr;
    std::shared_ptr<EagerEnding> ending = nullptr;
    cudaStream_t stream = nullptr;
    mutable bool used = false;

    // Possibly ended by another thread.
    [[nodiscard]] bool over() const noexcept { return ending && ending->over(); }
};

// Innermost scope of this thread; null if none. Set only by the scope classes.
extern constinit thread_local const ActiveScope* active_scope;

inline const ActiveScope* innermost_scope() noexcept {
    const auto* active = active_scope;
    while (active != nullptr && active->over()) {
        active = active->around;
    }
    return active;
}

// Returns the scope of a storage; null if none, and while this thread captures: torch's storages on
// other streams then belong to the graph (generator states, 2.14 and later). Costs one load without
// a scope.
inline const ActiveScope* scope_for(c10::DeviceIndex device, cudaStream_t stream) {
    const auto* const active = innermost_scope();
    const bool here = active != nullptr && active->device == device &&
                      (active->eager == nullptr || active->stream == stream);
    return here && !CaptureUnderWay::by_this_thread() && !is_capturing(stream) ? active : nullptr;
}

// Allocates a block of the scope; throws torch's out-of-memory error after emptying its cache.
// Returns null if another thread has ended the scope.
void* allocate_in(const ActiveScope& scope, std::size_t bytes, cudaStream_t stream);

}  // namespace vmmgraph::torch
