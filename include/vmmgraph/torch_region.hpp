// VmmGraph for libtorch: tensors in regions, whose memory can be paused while captured graphs stay
// valid. Link VmmGraph::torch.
//
//   vmmgraph::Region weights(device, "weights", {vmmgraph::Policy::backup});
//   vmmgraph::torch::install();
//   {
//       const vmmgraph::torch::RegionScope scope(weights);
//       model.load(path);
//   }
//   ...                                               // capture and replay
//   vmmgraph::pause(device, {"weights"}, {{stream}}); // other owners may use the memory now
//   vmmgraph::resume(device, {"weights"});            // the same tensors, the same graphs
//
// This header includes no torch header.

#ifndef VMMGRAPH_TORCH_REGION_HPP
#define VMMGRAPH_TORCH_REGION_HPP

#include <memory>

#include "region.hpp"

namespace vmmgraph::torch {

// A region scope: while alive, all CUDA storages made by its thread on the region's device are
// blocks of the region, on any current stream. The innermost scope counts. Destroy on the same
// thread, in reverse order.
//
// Not affected: storages made on a stream under capture; allocations of a CaptureScope itself;
// other devices; other threads (a backward pass has its own threads).
//
// A tensor keeps the region alive after the Region and the scope are gone, and is still paused and
// resumed by tag. Any thread may free a tensor at any time, paused or not. Its bytes are reused
// after the stream of creation, the streams of record_stream(), the default stream and torch's
// current stream. Record every other user stream, also the stream of a graph's replays, as with
// torch's own memory. A pause waits for the first two only; add others to its fence. While the
// region is paused, nothing may touch its tensors, and making one throws Error
// (VMMGRAPH_ERROR_WRONG_STATE).
//
// For long-lived tensors: a temporary costs one event, and its bytes are reused only after the
// device's work before the free. Memory which a library allocates in a scope and keeps is paused
// with the region, except torch's cuBLAS workspaces, which leave the region at the end of the
// scope. Initialize libraries before the scope, or in a DisableScope.
//
// Out of memory is torch's own error, after emptying torch's cache. Region::stats() counts region
// blocks; torch's statistics do not. Region tensors cannot be shared with another process. Without
// a scope on the thread, an allocation costs one extra load.
class VMMGRAPH_API RegionScope {
public:
    // `policy` applies to all blocks made in the scope. Throws Error: VMMGRAPH_ERROR_INVALID_HANDLE
    // for a moved-from region, VMMGRAPH_ERROR_INVALID_ARGUMENT for the host driver,
    // VMMGRAPH_ERROR_WRONG_STATE if install() was not called or would refuse.
    explicit RegionScope(const Region& region, Policy policy = Policy::inherit);
    RegionScope(const RegionScope&) = delete;
    RegionScope& operator=(const RegionScope&) = delete;
    ~RegionScope();

    // Returns true if storages made by this thread are currently blocks of a region.
    [[nodiscard]] static bool active() noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

// Suspends the enclosing RegionScopes of its thread while alive: storages are torch's own. A
// RegionScope inside counts again. Destroy on the same thread.
class VMMGRAPH_API DisableScope {
public:
    DisableScope() noexcept;
    DisableScope(const DisableScope&) = delete;
    DisableScope& operator=(const DisableScope&) = delete;
    ~DisableScope();

private:
    const void* around_;
};

}  // namespace vmmgraph::torch

#endif  // VMMGRAPH_TORCH_REGION_HPP
