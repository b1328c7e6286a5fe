// What torch's own allocator has given out.
#pragma once

#include <cstdint>

#include <c10/cuda/CUDACachingAllocator.h>

// Bytes of the first device that tensors have.
inline std::int64_t torchs_bytes() { return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current; }
