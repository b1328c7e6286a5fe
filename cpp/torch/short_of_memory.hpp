// Gives memory of the library to torch when a device is short of memory.
#pragma once

#include <cstddef>

#include <c10/core/Device.h>

namespace vmmgraph::torch {

// Registers a callback with torch's allocator: frees idle pages when torch's cache has no room and
// little memory is free.
void offer_idle_pages();

// Returns idle pages of all open devices to the driver, except a few: torch.cuda.graph() empties
// the cache before each capture, which reuses them. Never waits.
void give_back_idle_pages() noexcept;

// Returns idle pages to the driver, waits briefly for pending unmaps, and asks reclaimers for the
// rest of `bytes`. Returns whether a retry is worthwhile. The caller must hold no lock.
bool make_room(c10::DeviceIndex device, std::size_t bytes) noexcept;

}  // namespace vmmgraph::torch
