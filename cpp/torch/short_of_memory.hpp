// What torch gets of the library when a device is short of memory.
#pragma once

#include <cstddef>

#include <c10/core/Device.h>

namespace vmmgraph::torch {

// From now on torch's allocator takes idle pages when its cache has no room and little else is free.
void offer_idle_pages();

// Torch's cache is emptied: gives the idle pages of all open devices back to the driver. A few idle pages stay, since torch.cuda.graph()
// empties the cache before each capture, which takes them then. Waits for nothing.
void give_back_idle_pages() noexcept;

// Torch found no room for a tensor: gives the device's idle pages back to the driver, after waiting a little for what is on its way there, and asks
// reclaimers for what is missing still; whether it is worth trying again. The caller holds no lock.
bool make_room(c10::DeviceIndex device, std::size_t bytes) noexcept;

}  // namespace vmmgraph::torch
