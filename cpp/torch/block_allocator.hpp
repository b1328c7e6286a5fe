// Blocks route: a CUDAAllocator over the installed one, which places the tensors of captures in
// spaces.
#pragma once

#include <memory>
#include <utility>

#include <c10/core/Device.h>

#include "compat.hpp"
#include "memory.hpp"

namespace vmmgraph::torch {

// Binds `memory` to the next pool this thread begins to allocate to, which is its capture.
void announce(std::shared_ptr<Memory> memory);
// Undoes announce(). Returns true if no pool had begun.
bool withdraw() noexcept;

class Announcement {
public:
    explicit Announcement(std::shared_ptr<Memory> memory) { announce(std::move(memory)); }
    Announcement(const Announcement&) = delete;
    Announcement& operator=(const Announcement&) = delete;
    ~Announcement() { static_cast<void>(withdraw()); }
};

// Forgets an unfinished capture, here and in the native allocator. Returns true if torch had not
// released its pool. The capture's graph must still exist: other threads may call its filter.
bool abandon(c10::DeviceIndex device, compat::PoolId pool);
// Like abandon(), for one of several captures into a pool. Returns true if the capture was
// unfinished and torch's graph will not clean up; otherwise the graph still releases the pool.
bool abandon_one(c10::DeviceIndex device, compat::PoolId pool, const Memory* memory);

}  // namespace vmmgraph::torch
