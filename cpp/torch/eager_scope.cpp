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
    const ActiveScope* around;
    OnStream current;
    rust::Box<bridge::EagerTurn> turn;
};

EagerScope::EagerScope(SharedVmmAllocator& arena, void* stream, std::optional<std::uint64_t> bytes) {
    const auto device = device_of(arena);
    require_release();
    if (!installed()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "call vmmgraph::torch::install() before an EagerScope");
    }
    offer_idle_pages();
    {
        const OnDevice current(device);
        if (is_capturing(static_cast<cudaStream_t>(stream))) {
            refuse(VMMGRAPH_ERROR_STREAM_CAPTURING, "the stream is under capture");
        }
        // Torch's current one is: an executor's step asks nothing more.
        if (c10::cuda::getCurrentCUDAStream(device.index()).stream() != stream) {
            require_stream_of(device, stream);
        }
    }
    auto memory = std::make_shared<EagerMemory>(arena);
    state_.reset(new State{{nullptr, Policy::inherit, device.index(), std::move(memory), static_cast<cudaStream_t>(stream)},
                           active_scope,
                           OnStream(device, stream),
                           bridge::no_turn()});
    detail::check(bridge::begin_eager(*state_->turn, reinterpret_cast<std::size_t>(arena.handle()), reinterpret_cast<std::size_t>(stream),
                                      bytes.has_value(), bytes.value_or(0)));
    active_scope = &state_->active;
}

EagerScope::~EagerScope() {
    active_scope = state_->around;
    if (state_->active.used) {
        // Within the turn, so that their bytes are the arena's again at once.
        forget_scoped_workspaces();
    }
    bridge::end_eager(*state_->turn);
}

bool EagerScope::active() noexcept { return active_scope != nullptr && active_scope->eager != nullptr; }

}  // namespace vmmgraph::torch
