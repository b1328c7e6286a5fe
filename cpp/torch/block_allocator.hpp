// The blocks route: a CUDAAllocator over the installed one that keeps the tensors of captures in their spaces.
#pragma once

#include <functional>
#include <memory>

#include <c10/cuda/CUDACachingAllocator.h>

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

// Forgets a capture that was begun and will not end.
void abandon(c10::DeviceIndex device, c10::MempoolId_t pool);

// Whether a capture of the blocks route is under way.
bool capturing() noexcept;

}  // namespace vmmgraph::torch
