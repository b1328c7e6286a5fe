// The blocks route: a CUDAAllocator over the installed one that keeps the tensors of captures in their spaces.
#pragma once

#include <memory>
#include <utility>

#include <c10/core/Device.h>

#include "compat.hpp"
#include "memory.hpp"

namespace vmmgraph::torch {

// Announces that the next pool this thread begins to allocate to is the capture of `memory`.
void announce(std::shared_ptr<Memory> memory);
// Takes that back; whether no pool had begun.
bool withdraw() noexcept;

// The same, taken back when it goes.
class Announcement {
public:
    explicit Announcement(std::shared_ptr<Memory> memory) { announce(std::move(memory)); }
    Announcement(const Announcement&) = delete;
    Announcement& operator=(const Announcement&) = delete;
    ~Announcement() { static_cast<void>(withdraw()); }
};

// Forgets a capture that was begun and will not end, here and in the native allocator; whether torch had not released its pool. The
// capture's graph must still exist: until here other threads may ask its filter.
bool abandon(c10::DeviceIndex device, compat::PoolId pool);
// The same for one of several captures into one pool, which stays the others'. Where torch's graphs clean up after themselves, its graph still
// releases the pool. Whether there is more to be cleaned up: it had been begun, torch had not ended it, and will not.
bool abandon_one(c10::DeviceIndex device, compat::PoolId pool, const Memory* memory);

}  // namespace vmmgraph::torch
