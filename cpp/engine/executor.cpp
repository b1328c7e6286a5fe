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

DispatcherHandle make_dispatcher(const ExecutorOptions& options) {
    auto given = detail::sized<vmmgraph_dispatcher_options_t>();
    std::vector<vmmgraph_key_t> keys;
    for (const auto* set : {&options.full, &options.piecewise}) {
        for (const auto& key : *set) {
            keys.push_back(to_c(key));
        }
    }
    given.full = keys.data();
    given.full_count = options.full.size();
    given.piecewise = keys.data() + options.full.size();
    given.piecewise_count = options.piecewise.size();
    given.piecewise_ignores = options.piecewise_ignores;
    given.most_tokens = options.most_tokens;
    // Not most_graphs: where the dispatcher would refuse another graph, the executor evicts one.
    given.ahead_only = options.ahead_only ? 1 : 0;
    for (std::size_t phase = 0; phase < 3; ++phase) {
        for (std::size_t turn = 0; turn < 2; ++turn) {
            given.modes[phase][turn] = static_cast<std::int32_t>(options.modes[phase][turn]);
        }
    }
    vmmgraph_dispatcher_t dispatcher = nullptr;
    detail::check(vmmgraph_dispatcher_create(&given, &dispatcher));
    return DispatcherHandle(dispatcher);
}

}  // namespace

GraphExecutor::GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, CudaGraphPersistentParam& inputs, Body body,
                             const ExecutorOptions& options)
    : state_(new State{std::move(arena), inputs, std::move(body), options, make_dispatcher(options), {}, {}, 0, {}, {}, 0, std::nullopt, {}}) {
    auto& state = *state_;
    if (!state.on_cpu() && !state.arena) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT, "graphs on a GPU need an arena");
    }
    if (!state.body) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT, "a graph needs a body");
    }
    for (const auto* set : {&options.full, &options.piecewise}) {
        for (const auto& key : *set) {
            inputs.select(key);
        }
    }
    for (std::size_t index = 0;; ++index) {
        auto slot = detail::sized<Decision>();
        const auto status = vmmgraph_dispatcher_slot(state.dispatcher.get(), index, &slot);
        if (status == VMMGRAPH_ERROR_INVALID_ARGUMENT) {
            break;
        }
        detail::check(status);
        if (slot.slot >= state.graphs.size()) {
            state.graphs.resize(slot.slot + 1);
        }
        state.graphs[slot.slot].mode = static_cast<Mode>(slot.mode);
        state.graphs[slot.slot].bucket = from_c(slot.bucket);
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
        if ((state.options.most_graphs > 0 && state.stats.graphs >= state.options.most_graphs) || state.over_bytes()) {
            break;
        }
        state.report(slot, VMMGRAPH_GRAPH_BEGIN);
        // Padding only; on a CPU the body runs on it.
        try {
            state.inputs.update(graph.bucket, {}, state.options.capture_stream);
        } catch (...) {
            state.report(slot, VMMGRAPH_GRAPH_FAILED);
            state.report(slot, VMMGRAPH_GRAPH_FORGIVEN);
            throw;
        }
        if (!state.capture(slot, Step{graph.bucket, Phase::decode, true, nullptr}, false) && !graph.failed) {
            break;
        }
    }
    return state.stats.graphs;
}

Ran GraphExecutor::prepare(const Step& step, c10::ArrayRef<Value> values) {
    auto& state = *state_;
    state.give_up();
    const auto key = to_c(step.key);
    state.decision = detail::sized<Decision>();
    detail::check(vmmgraph_dispatch(state.dispatcher.get(), &key, static_cast<std::int32_t>(step.phase), step.capturable ? 1 : 0, &state.decision));
    state.step = step;
    if (static_cast<Mode>(state.decision.mode) == Mode::eager) {
        return state.planned();
    }
    try {
        state.inputs.prepare(from_c(state.decision.bucket), values);
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
    if (state.decision.capture != 0 && !state.capture(state.decision.slot, step, true)) {
        ran = {Mode::eager, Reason::capture_failed, {}};
        ++state.failed_steps;
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
    for (std::uint32_t slot = 0; slot < state.graphs.size(); ++slot) {
        if (state.graphs[slot].there) {
            state.forget(slot);
        }
    }
    if (state.arena) {
        state.arena->trim();
    }
}

void GraphExecutor::forgive() {
    for (std::uint32_t slot = 0; slot < state_->graphs.size(); ++slot) {
        if (std::exchange(state_->graphs[slot].failed, false)) {
            state_->report(slot, VMMGRAPH_GRAPH_FORGIVEN);
        }
    }
}

const std::string& GraphExecutor::last_failure() const noexcept { return state_->last_failure; }
ExecutorStats GraphExecutor::stats() const noexcept { return state_->stats; }

std::uint64_t GraphExecutor::steps(Mode mode, Reason reason) const {
    std::uint64_t steps = 0;
    detail::check(vmmgraph_dispatcher_steps(state_->dispatcher.get(), static_cast<std::int32_t>(mode), static_cast<std::int32_t>(reason), &steps));
    return steps;
}

std::uint64_t GraphExecutor::unplanned() const {
    std::uint64_t steps = state_->failed_steps;
    for (const auto reason : {Reason::not_captured, Reason::being_captured, Reason::budget, Reason::capture_failed}) {
        steps += this->steps(Mode::eager, reason);
    }
    return steps;
}

std::string GraphExecutor::prometheus(const std::vector<std::pair<std::string, std::string>>& labels) const {
    std::vector<const char*> texts;
    for (const auto& [name, value] : labels) {
        texts.push_back(name.c_str());
    }
    for (const auto& [name, value] : labels) {
        texts.push_back(value.c_str());
    }
    auto text = detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_dispatcher_prometheus(state_->dispatcher.get(), texts.data(), labels.size(), buffer, capacity, needed));
    });
    // The labels as the library wrote them, escaped and checked, from the last sample, which has no others.
    const auto line = text.rfind('\n', text.size() - 2) + 1;
    const auto brace = text.find('{', line);
    const auto common = brace == std::string::npos ? std::string() : text.substr(brace, text.rfind(' ') - brace);
    const auto add = [&](const std::string& name, const char* kind, const char* help, std::uint64_t value) {
        text += "# HELP " + name + " " + help + "\n# TYPE " + name + " " + kind + "\n" + name + common + " " + std::to_string(value) + "\n";
    };
    const auto& stats = state_->stats;
    add("vmmgraph_executor_graphs", "gauge", "Graphs that are there.", stats.graphs);
    add("vmmgraph_executor_captures_total", "counter", "Captures that succeeded.", stats.captures);
    add("vmmgraph_executor_capture_failures_total", "counter", "Captures that failed; their step ran eagerly.", stats.failures);
    add("vmmgraph_executor_evictions_total", "counter", "Graphs that made room for others.", stats.evictions);
    return text;
}

}  // namespace vmmgraph::engine
