// What is checked before torch is used: the release that is loaded, an allocator that captures can be made over, and the device.
#pragma once

#include <string>

#include <c10/core/Device.h>

#include <vmmgraph/vmmgraph.hpp>

namespace vmmgraph::torch {

[[noreturn]] void refuse(vmmgraph_status_t status, const std::string& why);

// Throws VMMGRAPH_ERROR_WRONG_STATE if another library with the core is loaded too, which CMake cannot see where a shared library links
// it PRIVATE.
void require_one_core();

// Throws VMMGRAPH_ERROR_WRONG_STATE unless the torch that is loaded is the release this was built for. Torch's own objects must
// not be touched before: their layout changes from release to release.
void require_release();

// Throws VMMGRAPH_ERROR_WRONG_STATE unless torch's installed allocator is the native one (or ours over it), with caching on.
void require_native_allocator();

// Throws VMMGRAPH_ERROR_WRONG_STATE if expandable segments are on in a release where they keep a MemPool from its allocator.
void require_pools_with_allocators();

// The device of an arena. Throws VMMGRAPH_ERROR_INVALID_ARGUMENT if it is none of CUDA's, and VMMGRAPH_ERROR_INVALID_HANDLE for an arena
// that was moved from.
c10::Device device_of(const SharedVmmAllocator& arena);

// Throws VMMGRAPH_ERROR_INVALID_ARGUMENT unless the stream, which is not under capture, is one of the device.
void require_stream_of(c10::Device device, void* stream);

}  // namespace vmmgraph::torch
