#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <vmmgraph/engine.hpp>

#include "../torch/compat.hpp"
#include "../torch/on_device.hpp"
#include "../torch/workspace.hpp"
#include "declare.hpp"
#include "executor_state.hpp"
#include "inputs_state.hpp"

namespace vmmgraph::engine {
namespace {

// Returns the graph which most ranks would capture next, of several the first; no_slot if none.
Slot agree_on_next(c10::ArrayRef<Decision> ranks) {
    std::map<Slot, std::size_t> votes;
    Slot most = dispatch::no_slot;
    for (const auto& rank : ranks) {
        if (rank.next != dispatch::no_slot) {
            ++votes[rank.next];
        }
    }
    for (const auto& [slot, count] : votes) {
        most = most == dispatch::no_slot || count > votes[most] ? slot : most;
    }
    return most;
}

// Returns a stream of one executor, to be used again after the last owner. Torch gives each stream
// of its pool to several users, whose work would become part of a recording. Never destroyed.
std::shared_ptr<void> own_stream(c10::Device device) {
    static std::mutex mutex;
    static auto* const free = new std::map<c10::DeviceIndex, std::vector<void*>>;
    const auto give_back = [device](void* stream) {
        const std::lock_guard lock(mutex);
        (*free)[device.index()].push_back(stream);
    };
    {
        const std::lock_guard lock(mutex);
        if (auto& streams = (*free)[device.index()]; !streams.empty()) {
            auto* const stream = streams.back();
            streams.pop_back();
            return {stream, give_back};
        }
    }
    const torch::OnDevice current(device);
    const torch::Relaxed relaxed;
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(
        &stream, cudaStreamNonBlocking, std::get<1>(c10::cuda::CUDAStream::priority_range())));
    return {static_cast<void*>(stream), give_back};
}

}  // namespace

GraphExecutor::GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs,
                             Body body, const ExecutorOptions& options)
    : state_(new State(std::move(arena), inputs, std::move(body), options)) {
    auto& state = *state_;
    if (!state.on_cpu() && !state.arena) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT,
               "cannot make the executor: the inputs are on a GPU and the arena is null; pass an "
               "arena");
    }
    if (!state.body) {
        refuse(VMMGRAPH_ERROR_NULL_ARGUMENT,
               "cannot make the executor: the body is empty; pass a body");
    }
    if (options.record_beside && options.ring != nullptr) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot make the executor: a ring serves one capture or step at a time, and "
               "record_beside records while steps go on; leave record_beside off");
    }
    if (options.capture.ring != nullptr) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot make the executor: CaptureOptions::ring is set, and eager steps use the "
               "ring too; set ExecutorOptions::ring instead");
    }
    if (!state.on_cpu()) {
        if (const auto device = torch::device_of(*state.arena); device != inputs.device()) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot make the executor: the arena is on " +
                                                        device.str() + " and the inputs on " +
                                                        inputs.device().str() + "; use one device");
        }
        if (cudaPointerAttributes where{}; options.ring != nullptr) {
            C10_CUDA_CHECK(cudaPointerGetAttributes(&where, options.ring->address(0)));
            if (where.type != cudaMemoryTypeDevice || where.device != inputs.device().index()) {
                refuse(
                    VMMGRAPH_ERROR_INVALID_ARGUMENT,
                    "cannot make the executor: the ring is on another device; make the ring on " +
                        inputs.device().str());
            }
        }
        if (options.capture_stream != nullptr) {
            torch::require_stream_of(inputs.device(), options.capture_stream);
        }
        if (options.record_beside && !torch::compat::workspaces_have_mutex) {
            refuse(VMMGRAPH_ERROR_WRONG_STATE,
                   "cannot make the executor: record_beside needs torch 2.10 or later, whose table "
                   "of workspaces may be used by several threads; leave record_beside off");
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
    if (auto& capturing = state.options.capture_stream; !state.on_cpu() && capturing == nullptr) {
        state.own_stream = options.record_beside ? own_stream(inputs.device()) : nullptr;
        capturing = state.own_stream
                        ? state.own_stream.get()
                        : c10::cuda::getStreamFromPool(true, inputs.device().index()).stream();
    }
    std::vector<Ahead::Place> places;
    for (auto slot = state.order.rbegin(); slot != state.order.rend(); ++slot) {
        places.push_back({*slot, state.graphs[*slot].mode, state.graphs[*slot].bucket});
    }
    if (options.captures == Captures::behind) {
        state.begin_behind(places);
        if (options.record_beside && !state.on_cpu()) {
            // Ahead of the first recording, as this takes longer than a step.
            state.thread.start([device = inputs.device(), stream = state.options.capture_stream] {
                torch::make_handles(device, stream);
            });
        }
    }
    if (!state.on_cpu()) {
        if (auto& pool = state.options.capture.executables; !pool) {
            pool = std::make_shared<torch::ExecutablePool>(*state.arena, options.executables);
        }
        state.ahead.emplace(places);
    }
}

GraphExecutor::~GraphExecutor() {
    if (!state_->behind || state_->options.histogram.empty()) {
        return;
    }
    try {
        save_histogram();
    } catch (const std::exception& error) {
        TORCH_WARN("vmmgraph: ", error.what());
    }
}

std::size_t GraphExecutor::warm_up() {
    auto& state = *state_;
    state.give_up();
    state.drop_unfinished();
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
        const Step padding{graph.bucket, graph.mode == Mode::full ? Phase::decode : Phase::mixed,
                           true, nullptr};
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
        state.capture(slot, padding, stream, CaptureFor::warm_up,
                      state.options.on_failure == OnFailure::throws);
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

std::size_t GraphExecutor::between_steps(std::chrono::microseconds slice) {
    using Clock = WorkThread::Clock;
    auto& state = *state_;
    if (!state.behind) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot capture between steps: the captures are not behind the traffic; set "
               "ExecutorOptions::captures to Captures::behind");
    }
    if (state.step) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot capture between steps: a step is prepared; call between_steps() before "
               "prepare()");
    }
    // The getters keep the bucket of the last step.
    struct Back {
        GraphInputs& inputs;
        std::optional<Key> bucket;
        ~Back() {
            if (bucket) {
                inputs.select(*bucket);
            }
        }
    } back{state.inputs, std::nullopt};
    const auto begin = Clock::now();
    for (bool any = false; slice.count() > 0; any = true) {
        if (any && Clock::now() - begin > slice) {
            break;
        }
        if (state.thread.has_work()) {
            if (!state.finish_beside(begin + slice)) {
                break;
            }
            continue;
        }
        const auto start = Clock::now();
        const auto unit = state.next_unit();
        auto& last = state.last_units.at(static_cast<std::size_t>(unit));
        const bool waits = !state.is_beside(unit);
        if (any && (state.several_ranks || (waits && start - begin + last > slice))) {
            break;
        }
        if (!state.begin_next()) {
            break;
        }
        if (!back.bucket) {
            back.bucket = state.inputs.bucket();
        }
        state.do_unit();
        if (!state.thread.has_work()) {
            last = Clock::now() - start;
        }
    }
    // Agreed on by a step before this unit.
    state.agreed_next = dispatch::no_slot;
    const auto waiting = state.behind->waiting([&](Slot slot) { return state.missing(slot); });
    return std::max<std::size_t>(waiting, state.unfinished ? 1 : 0);
}

void GraphExecutor::save_histogram() const {
    if (!state_->behind || state_->options.histogram.empty()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot write the histogram: no file is named; set ExecutorOptions::histogram and "
               "Captures::behind");
    }
    write_histogram(state_->options.histogram, state_->behind->histogram());
}

UnitScope GraphExecutor::streamed(std::size_t unit) {
    return take_unit(state_->options.ring, unit, state_->inputs.device());
}

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
    state_->decision.next = state_->next_behind();
    return state_->decision;
}

Decision GraphExecutor::agree(c10::ArrayRef<Decision> ranks) {
    if (ranks.empty()) {
        refuse(
            VMMGRAPH_ERROR_INVALID_ARGUMENT,
            "cannot agree on a step: the list of ranks is empty; pass the decision of each rank");
    }
    const auto less = [](const Decision& a, const Decision& b) { return a.mode < b.mode; };
    const auto mode = std::min_element(ranks.begin(), ranks.end(), less)->mode;
    const auto next = agree_on_next(ranks);
    Decision agreed{mode, Reason::too_large, false, dispatch::no_slot, {}};
    for (const auto& candidate : ranks) {
        if (candidate.mode == mode &&
            std::all_of(ranks.begin(), ranks.end(), [&](const Decision& other) {
                return other.mode != mode || covers(candidate.bucket, other.bucket);
            })) {
            agreed = candidate;
            break;
        }
    }
    if (agreed.reason == Reason::too_large) {
        return {Mode::eager, Reason::too_large, false, dispatch::no_slot, {}, next};
    }
    agreed.next = next;
    agreed.capture =
        mode != Mode::eager && std::any_of(ranks.begin(), ranks.end(), [&](const Decision& other) {
            return other.capture || other.mode != mode || other.bucket != agreed.bucket;
        });
    return agreed;
}

Ran GraphExecutor::prepare(const Step& step, c10::ArrayRef<NamedValue> values) {
    auto& state = *state_;
    state.decide(step);
    if (state.options.exchange) {
        std::optional<Decision> agreed;
        state.decision.next = state.next_behind();
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

Ran GraphExecutor::prepare(const Step& step, c10::ArrayRef<NamedValue> values,
                           const Decision& agreed) {
    state_->impose(step, agreed);
    state_->pack(values);
    return state_->planned();
}

Ran GraphExecutor::launch(const std::function<void()>& eager, void* stream) {
    auto& state = *state_;
    if (!state.step || !state.prepared) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot launch the step: nothing is prepared; call prepare() first");
    }
    if (state.options.record_beside && !state.on_cpu() && stream == state.options.capture_stream) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot launch the step: its stream is the capture stream, on which a thread "
               "records graphs; launch on a different stream");
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
    const MarkWhenLeft marks(
        current && !torch::lasts(current->stream()) ? &state.inputs.state_->last : nullptr);
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
        state.thread.wait();
        state.run_ahead(graph, step, stream, state.options.eager_runs);
    } else if (capture) {
        const bool there = state.capture(slot, step, stream, CaptureFor::step, throws);
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
    state.drop_unfinished();
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
    if (state_->behind) {
        state_->behind->replan();
    }
}

const std::string& GraphExecutor::last_failure() const noexcept { return state_->last_failure; }
ExecutorStats GraphExecutor::stats() const {
    auto stats = state_->dispatcher.stats();
    stats.graphs = state_->there();
    return stats;
}

std::uint64_t GraphExecutor::steps(Mode mode, Reason reason) const {
    return state_->dispatcher.steps(mode, reason);
}

std::uint64_t GraphExecutor::unplanned() const {
    std::uint64_t steps = 0;
    for (const auto reason :
         {Reason::not_captured, Reason::being_captured, Reason::budget, Reason::capture_failed}) {
        steps += this->steps(Mode::eager, reason);
    }
    return steps;
}

std::string GraphExecutor::prometheus(
    const std::vector<std::pair<std::string, std::string>>& labels) const {
    const auto& pool = state_->options.capture.executables;
    return state_->dispatcher.prometheus(labels) +
           (pool && !state_->on_cpu() ? pool->prometheus(labels) : "");
}

}  // namespace vmmgraph::engine
