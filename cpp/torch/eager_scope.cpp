#include <utility>

#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_eager.hpp>

#include "eager_memory.hpp"
#include "guards.hpp"
#include "on_device.hpp"
#include "region_scope.hpp"
#include "registry.hpp"
#include "short_of_memory.hpp"
#include "workspace.hpp"

namespace vmmgraph::torch {

struct EagerScope::State {
    ActiveScope active;
    OnStream current;
};

EagerScope::EagerScope(SharedVmmAllocator& arena, void* on, std::optional<std::uint64_t> bytes) {
    const auto device = device_of(arena);
    // Storages of the scope are recognised by this stream handle.
    auto* const stream = handle_of(on);
    require_release();
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot begin an EagerScope: the allocator is not installed; call "
               "vmmgraph::torch::install() first");
    }
    offer_idle_pages();
    {
        const OnDevice current(device);
        require_not_capturing(stream);
        // torch's current stream needs no further check.
        if (c10::cuda::getCurrentCUDAStream(device.index()).stream() != stream) {
            require_stream_of(device, stream);
        }
    }
    auto memory = std::make_shared<EagerMemory>(arena);
    auto ending = std::make_shared<EagerEnding>();
    state_.reset(new State{
        {nullptr, Policy::inherit, device.index(), active_scope, std::move(memory), ending, stream},
        OnStream(device, stream)});
    ending->begin(arena.handle(), stream, lasts(state_->current.stream()), bytes);
    active_scope = &state_->active;
}

EagerScope::~EagerScope() {
    active_scope = state_->active.around;
    if (state_->active.used) {
        // Inside the replay slot, so the arena can reuse the workspaces' bytes at once.
        forget_scoped_workspaces();
    }
    state_->active.ending->end_here();
}

void EagerScope::end() { state_->active.ending->end(); }

std::shared_ptr<EagerEnding> EagerEnding::of(const EagerScope& scope) {
    return scope.state_->active.ending;
}

bool EagerScope::active() noexcept {
    const auto* const active = innermost_scope();
    return active != nullptr && active->eager != nullptr;
}

}  // namespace vmmgraph::torch
