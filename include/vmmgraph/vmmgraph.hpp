// VmmGraph for C++17: move-only owners and exceptions over vmmgraph.h. Header-only; link VmmGraph::vmmgraph.
//
//   vmmgraph::SharedVmmAllocator arena;                  // pages on device 0, shared by all of its spaces
//   vmmgraph::Space space = arena.open_space();          // one capture
//   void* hidden = space.allocate(bytes, stream);
//   space.free(hidden);
//   space.seal();                                        // the capture ends
//   space.replay(stream, [&] { cudaGraphLaunch(exec, stream); });
//
// Conventions
//   - Sizes are bytes. A stream is a CUstream or cudaStream_t; null is the default stream, while a green context of the device is
//     current that context's.
//   - Every call that fails throws Error, and OutOfMemory when memory, budget, addresses or file descriptors ran out; nothing has
//     changed then. Calls marked noexcept and destructors never throw.
//   - All calls are thread-safe, except moving or destroying an object that another thread uses.
//   - A moved-from object owns nothing: it can be destroyed or assigned to; any other call throws VMMGRAPH_ERROR_INVALID_HANDLE.
//   - Stats structs are those of vmmgraph.h, which documents their fields.
//
// This is all of them: base.hpp (failures, owners, log lines), device.hpp (a device) and arena.hpp (arenas, spaces).

#ifndef VMMGRAPH_HPP
#define VMMGRAPH_HPP

#include "arena.hpp"
#include "base.hpp"
#include "device.hpp"

#endif  // VMMGRAPH_HPP
