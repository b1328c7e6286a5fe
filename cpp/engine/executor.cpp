#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/engine.hpp>

#include "../torch/on_device.hpp"
#include "declare.hpp"
#include "executor_state.hpp"
#include "inputs_state.hpp"

namespace vmmgraph::engine {
namespace {

bool covers(const Key& bucket, const Key& other) {
    return bucket.variant == other.variant && std::equal(bucket.extents.begin(), bucket.extents.end(), other.extents.begin(),
                                                         [](std::uint32_t most, std::uint32_t size) { return most >= size; });
}

}  // namespace

GraphExecutor::GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body, const ExecutorOptions& options)
    : state_(new State(std::move(arena), inputs, std::move(body), options)) {
    auto& state = *state_;
    if (!state.on_cpu() && !state.arena) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT, "cannot make the executor: the inputs are on a GPU and the arena is null; pass an arena");
    }
    if (!state.body) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT, "cannot make the executor: the body is empty; pass a body");
    }
    if (options.capture.ring != nullptr) {
        refuse(
            VMMGRAPH_ERROR_INVALID_ARGUMENT,
            "cannot make the executor: CaptureOptions::ring is set, and eager steps use the ring too; set ExecutorOptions::ring instead");
    }
    if (!state.on_cpu()) {
        if (const auto device = torch::device_of(*state.arena); device != inputs.device()) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot make the executor: the arena is on " + device.str() + " and the inputs on " +
                                                        inputs.device().str() + "; use one device");
        }
        if (cudaPointerAttributes where{}; options.ring != nullptr) {
            C10_CUDA_CHECK(cudaPointerGetAttributes(&where, options.ring->address(0)));
            if (where.type != cudaMemoryTypeDevice || where.device != inputs.device().index()) {
                refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                       "cannot make the executor: the ring is on another device; make the ring on " + inputs.device().str());
            }
        }
        if (options.capture_stream != nullptr) {
            torch::require_stream_of(inputs.device(), options.capture_stream);
        }
        if (options.update_stream != nullptr) {
            torch::require_stream_of(inputs.device(), options.update_stream);
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
        if (options.update && options.update_stream != nullptr && !state.on_cpu()) {
            state.graphs[slot.slot].replayed = std::make_unique<StreamOrder>(inputs.device());
        }
        state.order.push_back(slot.slot);
    }
    if (!state.on_cpu() && state.options.capture_stream == nullptr) {
        state.options.capture_stream = c10::cuda::getStreamFromPool(true, inputs.device().index()).stream();
    }
    if (!state.on_cpu()) {
        if (auto& pool = state.options.capture.executables; !pool) {
            pool = std::make_shared<torch::ExecutablePool>(*state.arena, options.executables);
        }
        std::vector<Ahead::Place> places;
        for (auto slot = state.order.rbegin(); slot != state.order.rend(); ++slot) {
            places.push_back({*slot, state.graphs[*slot].mode, state.graphs[*slot].bucket});
        }
        state.ahead.emplace(places);
    }
}

GraphExecutor::~GraphExecutor() = default;

std::size_t GraphExecutor::warm_up() {
    auto& state = *state_;
    state.give_up();
    // Afterwards the engine may destroy the capture stream, or capture on the stream.
    const MarkWhenLeft marks(state.on_cpu() ? nullptr : &state.inputs.state_->last);
    for (const auto slot : state.order) {
        const auto& graph = state.graphs[slot];
        if (graph.there || graph.failed) {
            continue;
        }
        if (state.full()) {
            break;
        }
        state.dispatcher.begin(slot);
        const Step padding{graph.bucket, graph.mode == Mode::full ? Phase::decode : Phase::mixed, true, nullptr};
        auto* const stream = state.options.capture_stream;
        std::shared_ptr<void> held;
        try {
            // Only padding; on a CPU the body runs on the padding.
            std::optional<torch::OnStream> current;
            if (!state.on_cpu()) {
                current.emplace(state.inputs.device(), stream);
            }
            held = state.enter(Work::capture);
            state.inputs.prepare(graph.bucket, {});
            state.commit(graph, padding, stream);
        } catch (...) {
            state.dispatcher.abandoned(slot);
            throw;
        }
        state.capture(slot, padding, stream, false, state.options.on_failure == OnFailure::throws);
    }
    // Smallest first: decodes are the most sensitive to latency.
    for (auto slot = state.order.rbegin(); slot != state.order.rend(); ++slot) {
        auto& graph = state.graphs[*slot];
        try {
            if (graph.captured && !graph.captured->instantiate()) {
                break;
            }
        } catch (const Error& error) {
            if (state.options.on_failure == OnFailure::throws) {
                throw;
            }
            state.last_failure = "graph of " + text_of(graph.bucket) + ": " + error.what();
            state.forget(*slot);
        }
    }
    return stats().graphs;
}

UnitScope GraphExecutor::streamed(std::size_t unit) { return take_unit(state_->options.ring, unit, state_->inputs.device()); }

void GraphExecutor::expect(const Step& step) {
    auto& state = *state_;
    for (auto slot = state.order.rbegin(); slot != state.order.rend(); ++slot) {
        auto& graph = state.graphs[*slot];
        const bool may = graph.mode == Mode::full ? step.phase == Phase::decode : true;
        if (graph.captured && may && covers(graph.bucket, step.key)) {
            graph.captured->instantiate_soon();
            return;
        }
    }
}

torch::ExecutableStats GraphExecutor::executables() const {
    const auto& pool = state_->options.capture.executables;
    return pool && !state_->on_cpu() ? pool->stats() : torch::ExecutableStats{};
}

Decision GraphExecutor::decide(const Step& step) {
    state_->decide(step);
    return state_->decision;
}

Decision GraphExecutor::agree(c10::ArrayRef<Decision> ranks) {
    if (ranks.empty()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot agree on a step: the list of ranks is empty; pass the decision of each rank");
    }
    const auto less = [](const Decision& a, const Decision& b) { return a.mode < b.mode; };
    const auto mode = std::min_element(ranks.begin(), ranks.end(), less)->mode;
    Decision agreed{mode, Reason::too_large, false, dispatch::no_slot, {}};
    for (const auto& candidate : ranks) {
        if (candidate.mode == mode && std::all_of(ranks.begin(), ranks.end(), [&](const Decision& other) {
                return other.mode != mode || covers(candidate.bucket, other.bucket);
            })) {
            agreed = candidate;
            break;
        }
    }
    if (agreed.reason == Reason::too_large) {
        return {Mode::eager, Reason::too_large, false, dispatch::no_slot, {}};
    }
    agreed.capture = mode != Mode::eager && std::any_of(ranks.begin(), ranks.end(), [&](const Decision& other) {
                         return other.capture || other.mode != mode || other.bucket != agreed.bucket;
                     });
    return agreed;
}

Ran GraphExecutor::prepare(const Step& step, c10::ArrayRef<NamedValue> values) {
    auto& state = *state_;
    state.decide(step);
    if (state.options.exchange) {
        std::optional<Decision> agreed;
        try {
            agreed = agree(state.options.exchange(state.decision));
        } catch (...) {
            state.give_up();
            throw;
        }
        return prepare(step, values, *agreed);
    }
    state.pack(values);
    return state.planned();
}

Ran GraphExecutor::prepare(const Step& step, c10::ArrayRef<NamedValue> values, const Decision& agreed) {
    state_->impose(step, agreed);
    state_->pack(values);
    return state_->planned();
}

Ran GraphExecutor::launch(const std::function<void()>& eager, void* stream) {
    auto& state = *state_;
    if (!state.step || !state.prepared) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "cannot launch the step: nothing is prepared; call prepare() first");
    }
    const auto step = *state.step;
    std::optional<torch::OnStream> current;
    if (!state.on_cpu()) {
        current.emplace(state.inputs.device(), stream);
    }
    auto ran = state.planned();
    if (ran.mode == Mode::eager) {
        state.give_up();
        state.run_eagerly(eager, stream, &step);
        return ran;
    }
    const auto slot = state.decision.slot;
    auto& graph = state.graphs[slot];
    // A stream which may be destroyed is marked now: at the next step its handle may name a new
    // stream.
    const MarkWhenLeft marks(current && !torch::lasts(current->stream()) ? &state.inputs.state_->last : nullptr);
    std::shared_ptr<void> held;
    try {
        held = state.enter(graph.there ? Work::replay : Work::capture);
        state.commit(graph, step, stream);
    } catch (...) {
        state.give_up();
        throw;
    }
    const bool throws = state.imposed || state.options.on_failure == OnFailure::throws;
    const bool capture = std::exchange(state.claimed, false);
    const bool ahead = state.decision.capture && !capture;
    state.give_up();
    if (ahead) {
        // A different rank captures.
        state.run_ahead(graph, step, stream);
    } else if (capture) {
        const bool there = state.capture(slot, step, stream, true, throws);
        held.reset();
        if (!there) {
            state.run_eagerly(eager, stream, &step);
            return {Mode::eager, Reason::capture_failed, {}};
        }
        held = state.enter(Work::replay);
    }
    state.replay(slot, step, stream);
    state.look_ahead(slot);
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
    const auto& pool = state_->options.capture.executables;
    return state_->dispatcher.prometheus(labels) + (pool && !state_->on_cpu() ? pool->prometheus(labels) : "");
}

}  // namespace vmmgraph::engine
