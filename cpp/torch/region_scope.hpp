// What a thread's RegionScopes, EagerScopes and DisableScopes come down to.
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

// Where a thread's storages are made: in a region, or, of one stream, in an arena.
struct ActiveScope {
    // Null for an arena.
    std::shared_ptr<RegionMemory> memory;
    Policy policy;
    c10::DeviceIndex device;
    // The one that it is in; null: none.
    const ActiveScope* around;
    // Null for a region.
    std::shared_ptr<EagerMemory> eager = nullptr;
    std::shared_ptr<EagerEnding> ending = nullptr;
    cudaStream_t stream = nullptr;
    // Whether anything was made in it.
    mutable bool used = false;

    // Whether somebody, perhaps another thread, has ended it before its scope goes.
    [[nodiscard]] bool over() const noexcept { return ending && ending->over(); }
};

// Of this thread, null: none. Never set by anything but the scopes.
extern constinit thread_local const ActiveScope* active_scope;

// The innermost that is not over; null: none.
inline const ActiveScope* innermost_scope() noexcept {
    const auto* active = active_scope;
    while (active != nullptr && active->over()) {
        active = active->around;
    }
    return active;
}

// The one for a storage on the device and the stream; none while this thread captures, since what torch makes then on another stream is what it
// keeps for the graph (the states of its generators, from 2.14 on). Costs one load where there is none.
inline const ActiveScope* scope_for(c10::DeviceIndex device, cudaStream_t stream) {
    const auto* const active = innermost_scope();
    const bool here = active != nullptr && active->device == device && (active->eager == nullptr || active->stream == stream);
    return here && !CaptureUnderWay::by_this_thread() && !is_capturing(stream) ? active : nullptr;
}

// A block of it, or torch's own out-of-memory error after its cache was emptied. Null if another thread has ended it meanwhile.
void* allocate_in(const ActiveScope& scope, std::size_t bytes, cudaStream_t stream);

}  // namespace vmmgraph::torch
