// VmmGraph for libtorch: tensors in regions, memory that steps aside while captured graphs stay valid. Link VmmGraph::torch.
//
//   vmmgraph::Region weights(device, "weights", {vmmgraph::Policy::backup});
//   vmmgraph::torch::install();
//   {
//       const vmmgraph::torch::RegionScope scope(weights);
//       model.load(path);
//   }
//   ...                                                             // capture and replay
//   vmmgraph::pause(device, {"weights"}, {{stream}});              // the memory is others' now
//   vmmgraph::resume(device, {"weights"});                         // the same tensors, the same graphs
//
// This header includes no torch header.

#ifndef VMMGRAPH_TORCH_REGION_HPP
#define VMMGRAPH_TORCH_REGION_HPP

#include <memory>

#include "region.hpp"

namespace vmmgraph::torch {

// While it lives, CUDA storages that its thread makes on the region's device are blocks of the region, big and small, whatever stream is
// torch's current one. May be nested, the innermost counts; to be destroyed on its thread, in the reverse order.
//
// Not so: what is made on a stream under capture, which is the capture's, and what a CaptureScope needs for itself; storages on other
// devices; what other threads make (a backward pass has its own threads).
//
// A tensor keeps the region, also when the Region and the scope are gone: it can be freed by any thread at any time, paused or not, and is
// paused and resumed by its tag as before. Freed, its bytes serve others once the stream it was made on, those of its record_stream(),
// the default stream and torch's current one have passed: note there every other one that uses it, also that of a graph's replays, as for
// torch's own memory. A pause waits for the stream a tensor was made on and for those of its record_stream(); others belong into its fence.
// While the region is paused, nothing may touch its tensors, and making one throws Error (VMMGRAPH_ERROR_WRONG_STATE).
//
// For what stays. What passes costs an event each, and its bytes serve nobody before the device has done what is before its end. What
// libraries allocate in a scope and keep is the region's too and steps aside with it: but for torch's cuBLAS workspaces, which
// leave it when the scope ends, let them set themselves up before, or in a DisableScope.
//
// Out of memory is torch's own error, after torch's cache was emptied. Torch's statistics do not count blocks of regions; Region::stats()
// does. They cannot be shared with another process. When there is no scope on a thread, an allocation costs it one load.
class VMMGRAPH_API RegionScope {
public:
    // `policy`: of all blocks made in it. Throws Error: VMMGRAPH_ERROR_INVALID_HANDLE for a region that was moved from,
    // VMMGRAPH_ERROR_INVALID_ARGUMENT for one of the host driver, VMMGRAPH_ERROR_WRONG_STATE before install() or for what that refuses.
    explicit RegionScope(const Region& region, Policy policy = Policy::inherit);
    RegionScope(const RegionScope&) = delete;
    RegionScope& operator=(const RegionScope&) = delete;
    ~RegionScope();

    // Whether storages that this thread makes are blocks of a region now.
    [[nodiscard]] static bool active() noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

// While it lives, the RegionScopes around it on its thread do nothing: storages are torch's own. One inside it counts again. To be
// destroyed on its thread.
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
