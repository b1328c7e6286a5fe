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

constinit thread_local const ActiveScope* active_scope = nullptr;

void* allocate_in(const ActiveScope& scope, std::size_t bytes, cudaStream_t stream) {
    const auto allocate = [&]() -> void* {
        try {
            return scope.eager ? scope.eager->allocate(bytes, stream, KeptScope::active())
                               : scope.memory->allocate(bytes, scope.policy, stream);
        } catch (const Error&) {
            if (scope.over()) {
                return nullptr;
            }
            throw;
        }
    };
    void* block = allocate();
    if (block == nullptr && !scope.over()) {
        {
            // Torch's cached memory is reclaimable. This thread may capture on a second device.
            const Relaxed relaxed;
            registry::native()->emptyCache();
        }
        block = allocate();
    }
    if (block == nullptr && scope.over()) {
        return nullptr;
    }
    if (block == nullptr) {
        registry::out_of_memory(bytes, scope.device,
                                scope.eager ? "for eager work in an arena" : "in a region");
    }
    scope.used = true;
    std::shared_ptr<BlockOwner> owner = scope.memory;
    if (scope.eager) {
        owner = scope.eager;
    }
    registry::adopt(block, std::move(owner), bytes, scope.device);
    return block;
}

struct RegionScope::State {
    ActiveScope active;
};

RegionScope::RegionScope(const Region& region, Policy policy) {
    auto memory = std::make_shared<RegionMemory>(region);
    const int device = memory->cuda_device();
    if (device < 0) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot begin a RegionScope: the region is on the host driver, and torch's memory "
               "on CUDA; make the region on a CUDA device");
    }
    require_release();
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot begin a RegionScope: the allocator is not installed; call "
               "vmmgraph::torch::install() first");
    }
    offer_idle_pages();
    state_.reset(new State{
        {std::move(memory), policy, static_cast<c10::DeviceIndex>(device), active_scope}});
    active_scope = &state_->active;
}

RegionScope::~RegionScope() {
    active_scope = state_->active.around;
    if (state_->active.used) {
        forget_scoped_workspaces();
    }
}

bool RegionScope::active() noexcept {
    const auto* const active = innermost_scope();
    return active != nullptr && active->memory != nullptr;
}

DisableScope::DisableScope() noexcept : around_(std::exchange(active_scope, nullptr)) {}
DisableScope::~DisableScope() { active_scope = static_cast<const ActiveScope*>(around_); }

}  // namespace vmmgraph::torch
