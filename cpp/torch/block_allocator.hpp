// The blocks route: a CUDAAllocator over the installed one that keeps the tensors of captures in their spaces.
#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "compat.hpp"
#include "memory.hpp"

namespace vmmgraph::torch {

// Announces that the next pool this thread begins to allocate to is the capture of `memory`; taken back when it goes.
class Announcement {
public:
    explicit Announcement(std::shared_ptr<Memory> memory);
    Announcement(const Announcement&) = delete;
    Announcement& operator=(const Announcement&) = delete;
    ~Announcement();
};

// Forgets a capture that was begun and will not end, here and in the native allocator; whether torch had not released its pool. The
// capture's graph must still exist: until here other threads may ask its filter.
bool abandon(c10::DeviceIndex device, compat::PoolId pool);

}  // namespace vmmgraph::torch
