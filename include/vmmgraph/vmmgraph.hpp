// VmmGraph for C++17: move-only owners and exceptions over vmmgraph.h. Header-only; link
// VmmGraph::vmmgraph.
//
//   vmmgraph::SharedVmmAllocator arena;                  // pages on device 0, shared by its spaces
//   vmmgraph::Space space = arena.open_space();          // one capture
//   void* hidden = space.allocate(bytes, stream);
//   space.free(hidden);
//   space.seal();                                        // the capture ends
//   space.replay(stream, [&] { cudaGraphLaunch(exec, stream); });
//
// Conventions
//   - Sizes are bytes. A stream is a CUstream or cudaStream_t. Null is the default stream, or the
//     current green context's. The host driver ignores streams and copies at once.
//   - A failed call throws Error, or OutOfMemory if memory, budget, addresses or file descriptors
//     ran out; nothing has changed then. Destructors and noexcept calls never throw.
//   - All calls are thread-safe, except moving or destroying an object in use by another thread.
//     Several spaces of an arena may be open at once.
//   - Devices, arenas, spaces, regions and caches may be destroyed in any order.
//   - A moved-from object can be destroyed or assigned to; other calls throw
//     VMMGRAPH_ERROR_INVALID_HANDLE.
//   - handle() returns the C handle, still owned by the object; null if moved from.
//   - stats() returns current values; vmmgraph.h documents the fields.
//
// Includes base.hpp (errors, owners, log lines), device.hpp (devices) and arena.hpp (arenas,
// spaces).

#ifndef VMMGRAPH_HPP
#define VMMGRAPH_HPP

#include "arena.hpp"
#include "base.hpp"
#include "device.hpp"

#endif  // VMMGRAPH_HPP
