// Memory handed out by torch's own allocator.
#pragma once

#include <cstdint>

#include <c10/cuda/CUDACachingAllocator.h>

// Allocated bytes on the first device.
inline std::int64_t torchs_bytes() {
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
}
