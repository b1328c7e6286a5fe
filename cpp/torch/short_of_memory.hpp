// What torch gets of the arenas' idle pages when a device is short of memory.
#pragma once

#include <cstdint>

#include <c10/core/Device.h>

namespace vmmgraph::torch {

// From now on torch's allocator takes idle pages when its cache has no room and little else is free.
void offer_idle_pages();

// Gives the device's idle pages back to the driver, after waiting a little for what is on its way there; their bytes. The caller holds
// no lock.
std::uint64_t give_back(c10::DeviceIndex device) noexcept;

}  // namespace vmmgraph::torch
