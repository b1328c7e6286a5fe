// What a thread's RegionScopes and DisableScopes come down to.
#pragma once

#include <memory>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include "on_device.hpp"
#include "region_memory.hpp"

namespace vmmgraph::torch {

// The region that a thread's storages are made in.
struct ActiveRegion {
    std::shared_ptr<RegionMemory> memory;
    Policy policy;
    c10::DeviceIndex device;
    // Whether anything was made in it.
    mutable bool used = false;
};

// Of this thread, null: none. Never set by anything but the scopes.
extern constinit thread_local const ActiveRegion* active_region;

// The one for a storage on the device and the stream. Costs one load where there is none.
inline const ActiveRegion* region_for(c10::DeviceIndex device, cudaStream_t stream) {
    const auto* const active = active_region;
    return active != nullptr && active->device == device && !is_capturing(stream) ? active : nullptr;
}

// A block of it, or torch's own out-of-memory error after its cache was emptied.
void* allocate_in(const ActiveRegion& region, std::size_t bytes, cudaStream_t stream);

}  // namespace vmmgraph::torch
