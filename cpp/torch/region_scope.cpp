#include "region_scope.hpp"

#include <utility>

#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_region.hpp>

#include "guards.hpp"
#include "on_device.hpp"
#include "registry.hpp"
#include "short_of_memory.hpp"
#include "workspace.hpp"

namespace vmmgraph::torch {

constinit thread_local const ActiveRegion* active_region = nullptr;

void* allocate_in(const ActiveRegion& region, std::size_t bytes, cudaStream_t stream) {
    void* block = region.memory->allocate(bytes, region.policy, stream);
    if (block == nullptr) {
        {
            // What torch keeps for later is free memory to everybody else. This thread may capture on another device.
            const Relaxed relaxed;
            registry::native()->emptyCache();
        }
        block = region.memory->allocate(bytes, region.policy, stream);
    }
    if (block == nullptr) {
        registry::out_of_memory(bytes, region.device, "in a region");
    }
    region.used = true;
    registry::adopt(block, region.memory, bytes, region.device);
    return block;
}

struct RegionScope::State {
    ActiveRegion active;
    const ActiveRegion* around;
};

RegionScope::RegionScope(const Region& region, Policy policy) {
    auto memory = std::make_shared<RegionMemory>(region);
    const int device = memory->cuda_device();
    if (device < 0) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "the region is on a device of the host driver, and torch's tensors are on one of CUDA's");
    }
    require_release();
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "call vmmgraph::torch::install() before a RegionScope");
    }
    offer_idle_pages();
    state_.reset(new State{{std::move(memory), policy, static_cast<c10::DeviceIndex>(device)}, active_region});
    active_region = &state_->active;
}

RegionScope::~RegionScope() {
    active_region = state_->around;
    if (state_->active.used) {
        forget_region_workspaces();
    }
}

bool RegionScope::active() noexcept { return active_region != nullptr; }

DisableScope::DisableScope() noexcept : around_(std::exchange(active_region, nullptr)) {}
DisableScope::~DisableScope() { active_region = static_cast<const ActiveRegion*>(around_); }

}  // namespace vmmgraph::torch
