#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/engine.hpp>

#include "declare.hpp"
#include "executor_state.hpp"

namespace vmmgraph::engine {
namespace {

Dispatcher make_dispatcher(const ExecutorOptions& options) {
    dispatch::DispatcherOptions given = options;
    // Where the dispatcher would refuse another graph, the executor evicts one.
    given.most_graphs = 0;
    return Dispatcher(given);
}

}  // namespace

GraphExecutor::GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body,
                             const ExecutorOptions& options)
    : state_(new State{std::move(arena), inputs, std::move(body), options, make_dispatcher(options), {}, {}, {}, std::nullopt, {}}) {
    auto& state = *state_;
    if (!state.on_cpu() && !state.arena) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT, "graphs on a GPU need an arena");
    }
    if (!state.body) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT, "a graph needs a body");
    }
    if (!state.on_cpu()) {
        if (const auto device = torch::device_of(*state.arena); device != inputs.device()) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "the arena is on " + device.str() + ", and the inputs are on " + inputs.device().str());
        }
        if (options.capture_stream != nullptr) {
            torch::require_stream_of(inputs.device(), options.capture_stream);
        }
    }
    for (const auto* set : {&options.full, &options.piecewise}) {
        for (const auto& key : *set) {
            inputs.select(key);
        }
    }
    if (state.arena && options.most_bytes > 0) {
        state.arena->set_budget(options.most_bytes);
    }
    for (const auto& slot : state.dispatcher.slots()) {
        state.graphs.resize(std::max<std::size_t>(state.graphs.size(), slot.slot + 1));
        state.graphs[slot.slot].mode = slot.mode;
        state.graphs[slot.slot].bucket = slot.bucket;
        state.order.push_back(slot.slot);
    }
    if (!state.on_cpu() && state.options.capture_stream == nullptr) {
        state.options.capture_stream = c10::cuda::getStreamFromPool(true, inputs.device().index()).stream();
    }
}

GraphExecutor::~GraphExecutor() = default;

std::size_t GraphExecutor::warm_up() {
    auto& state = *state_;
    state.give_up();
    for (const auto slot : state.order) {
        const auto& graph = state.graphs[slot];
        if (graph.there || graph.failed) {
            continue;
        }
        if (state.full()) {
            break;
        }
        state.dispatcher.begin(slot);
        // Padding only; on a CPU the body runs on it.
        try {
            state.inputs.update(graph.bucket, {}, state.options.capture_stream);
        } catch (...) {
            state.dispatcher.abandoned(slot);
            throw;
        }
        state.capture(slot, Step{graph.bucket, Phase::decode, true, nullptr}, false);
    }
    return stats().graphs;
}

Ran GraphExecutor::prepare(const Step& step, c10::ArrayRef<NamedValue> values) {
    auto& state = *state_;
    state.give_up();
    state.decision = state.dispatcher.dispatch(step.key, step.phase, step.capturable);
    state.step = step;
    if (state.decision.mode == Mode::eager) {
        return state.planned();
    }
    try {
        state.inputs.prepare(state.decision.bucket, values);
    } catch (...) {
        state.give_up();
        throw;
    }
    return state.planned();
}

Ran GraphExecutor::launch(const std::function<void()>& eager, void* stream) {
    auto& state = *state_;
    if (!state.step) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "launch() without a prepare() before it");
    }
    auto ran = state.planned();
    if (ran.mode != Mode::eager) {
        try {
            state.inputs.commit(stream);
        } catch (...) {
            state.give_up();
            throw;
        }
    }
    const auto step = *std::exchange(state.step, std::nullopt);
    if (state.decision.capture && !state.capture(state.decision.slot, step, true)) {
        ran = {Mode::eager, Reason::capture_failed, {}};
    }
    if (ran.mode != Mode::eager) {
        state.replay(state.graphs[state.decision.slot], step, stream);
        return ran;
    }
    c10::cuda::OptionalCUDAStreamGuard guard;
    if (!state.on_cpu()) {
        guard.reset_stream(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), state.inputs.device().index()));
    }
    eager();
    return ran;
}

void GraphExecutor::clear() {
    auto& state = *state_;
    state.give_up();
    for (Slot slot = 0; slot < state.graphs.size(); ++slot) {
        if (state.graphs[slot].there) {
            state.forget(slot);
        }
    }
    if (state.arena) {
        state.arena->trim();
    }
}

void GraphExecutor::forgive() {
    for (Slot slot = 0; slot < state_->graphs.size(); ++slot) {
        if (std::exchange(state_->graphs[slot].failed, false)) {
            state_->dispatcher.forgive(slot);
        }
    }
}

const std::string& GraphExecutor::last_failure() const noexcept { return state_->last_failure; }
ExecutorStats GraphExecutor::stats() const {
    auto stats = state_->dispatcher.stats();
    stats.graphs = state_->there();
    return stats;
}

std::uint64_t GraphExecutor::steps(Mode mode, Reason reason) const { return state_->dispatcher.steps(mode, reason); }

std::uint64_t GraphExecutor::unplanned() const {
    std::uint64_t steps = 0;
    for (const auto reason : {Reason::not_captured, Reason::being_captured, Reason::budget, Reason::capture_failed}) {
        steps += this->steps(Mode::eager, reason);
    }
    return steps;
}

std::string GraphExecutor::prometheus(const std::vector<std::pair<std::string, std::string>>& labels) const {
    return state_->dispatcher.prometheus(labels);
}

}  // namespace vmmgraph::engine
