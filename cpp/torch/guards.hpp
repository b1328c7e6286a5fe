// Checks before torch is used: the loaded release, the installed allocator, and the device.
#pragma once

#include <c10/core/Device.h>

#include <vmmgraph/vmmgraph.hpp>

#include "undo.hpp"

namespace vmmgraph::torch {

// Throws VMMGRAPH_ERROR_WRONG_STATE if a second library with the core is loaded, linked PRIVATE
// where CMake cannot see it.
void require_one_core();

// Throws VMMGRAPH_ERROR_WRONG_STATE unless the loaded torch is the release of built_for(). Call
// before touching torch's objects, whose layout differs between releases.
void require_release();

// Throws VMMGRAPH_ERROR_WRONG_STATE unless torch's native allocator is installed, also under this
// library's, with caching on.
void require_native_allocator();

// Throws VMMGRAPH_ERROR_WRONG_STATE if expandable segments are on in a release where they bypass a
// MemPool's allocator.
void require_pools_with_allocators();

// Returns the device of an arena. Throws VMMGRAPH_ERROR_INVALID_ARGUMENT for an arena of the host
// driver, and VMMGRAPH_ERROR_INVALID_HANDLE for a moved-from arena.
c10::Device device_of(const SharedVmmAllocator& arena);

// Throws VMMGRAPH_ERROR_STREAM_CAPTURING for a stream under capture. Otherwise a failed capture
// would end the stream's own capture.
void require_not_capturing(void* stream);

// Throws VMMGRAPH_ERROR_INVALID_ARGUMENT unless the stream belongs to the device. The stream must
// not be under capture.
void require_stream_of(c10::Device device, void* stream);

}  // namespace vmmgraph::torch
