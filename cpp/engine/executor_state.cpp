#include "executor_state.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <vmmgraph/torch_eager.hpp>

#include "../torch/on_device.hpp"
#include "../torch/registry.hpp"
#include "inputs_state.hpp"

namespace vmmgraph::engine {
namespace {

// Reason of a failed capture.
struct Failure {
    std::string why;
    // Out of memory, and of memory which torch could give back.
    bool no_room = false;
    bool of_device = false;
};

Failure failure_of(const std::exception_ptr& thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (const OutOfMemory& error) {
        return {error.what(), true, error.status() != VMMGRAPH_ERROR_OVER_BUDGET};
    } catch (const torch::registry::OutOfBlocks& error) {
        return {error.what_without_backtrace(), true, error.status() != VMMGRAPH_ERROR_OVER_BUDGET};
    } catch (const c10::OutOfMemoryError& error) {
        return {error.what_without_backtrace(), true, true};
    } catch (const std::exception& error) {
        return {error.what()};
    } catch (...) {
        return {"the body threw what is no std::exception"};
    }
}

void empty_cache(bool on_cpu) {
    try {
        if (!on_cpu) {
            const torch::Relaxed relaxed;
            c10::cuda::CUDACachingAllocator::emptyCache();
        }
    } catch (const c10::Error&) {
        // Some torch releases refuse while another thread captures. Graphs are evicted then.
    }
}

}  // namespace

Dispatcher make_dispatcher(const ExecutorOptions& options) {
    dispatch::DispatcherOptions given = options;
    // The executor evicts a graph where the dispatcher would refuse a new one.
    given.most_graphs = 0;
    return Dispatcher(given);
}

GraphExecutor::State::State(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs,
                            Body body, const ExecutorOptions& options)
    : arena(std::move(arena)),
      inputs(inputs),
      body(std::move(body)),
      options(options),
      dispatcher(make_dispatcher(options)),
      streams(inputs.device()) {}

void GraphExecutor::State::decide(const Step& current) {
    give_up();
    decision = dispatcher.dispatch(current.key, current.phase, current.capturable);
    claimed = decision.capture;
    step = current;
    if (const auto own = behind ? own_slot(current) : dispatch::no_slot; own != dispatch::no_slot) {
        behind->count(own, missing(own));
    }
}

Slot GraphExecutor::State::own_slot(const Step& current) {
    const bool own = decision.reason == Reason::hit || decision.reason == Reason::padded;
    if (own && decision.mode == options.modes[static_cast<std::size_t>(current.phase)][0]) {
        return decision.slot;
    }
    // Without any graph, the dispatcher asks for the capture of the own one.
    const auto asked = all_missing->dispatch(current.key, current.phase, current.capturable);
    if (asked.capture) {
        all_missing->abandoned(asked.slot);
    }
    return asked.slot;
}

void GraphExecutor::State::impose(const Step& current, const Decision& agreed) {
    const auto own = std::exchange(step, std::nullopt);
    const bool same = own && agreed.mode == decision.mode && agreed.bucket == decision.bucket;
    if (!same) {
        give_up();
        auto slot = dispatch::no_slot;
        for (Slot i = 0; i < graphs.size() && agreed.mode != Mode::eager; ++i) {
            slot = graphs[i].mode == agreed.mode && graphs[i].bucket == agreed.bucket ? i : slot;
        }
        if (agreed.mode != Mode::eager && slot == dispatch::no_slot) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   "cannot follow the agreed decision: this executor has no graph of " +
                       text_of(agreed.bucket) + "; give all ranks the same buckets");
        }
        decision = {agreed.mode, agreed.reason, false, slot, agreed.bucket};
        dispatcher.imposed(slot);
        if (unfinished && unfinished->slot == slot) {
            drop_unfinished();
        }
        if (slot != dispatch::no_slot && !graphs[slot].there) {
            if (std::exchange(graphs[slot].failed, false)) {
                dispatcher.forgive(slot);
            }
            dispatcher.begin(slot);
            claimed = true;
            decision.reason = Reason::captured;
        }
    }
    decision.capture = claimed || agreed.capture;
    imposed = several_ranks = true;
    agreed_next = agreed.next;
    step = current;
}

void GraphExecutor::State::pack(c10::ArrayRef<NamedValue> values) {
    if (decision.mode != Mode::eager) {
        try {
            inputs.prepare(decision.bucket, step->key, values);
        } catch (...) {
            give_up();
            throw;
        }
    }
    prepared = true;
}

void GraphExecutor::State::give_up() {
    if (std::exchange(claimed, false)) {
        dispatcher.abandoned(decision.slot);
    }
    step.reset();
    prepared = imposed = false;
}

void GraphExecutor::State::commit(const Graph& graph, const Step& current, void* stream) {
    inputs.state_->commit(stream);
    if (options.before_launch) {
        options.before_launch(graph.bucket, current);
    }
}

void GraphExecutor::State::run_eagerly(const std::function<void()>& eager, void* stream,
                                       const Step* step) const {
    if (!options.eager_in_arena || on_cpu()) {
        return eager();
    }
    const auto bytes = step != nullptr && options.eager_bytes
                           ? std::optional(options.eager_bytes(*step))
                           : std::nullopt;
    const torch::EagerScope scope(*arena, stream, bytes);
    eager();
}

std::size_t GraphExecutor::State::there() const {
    return static_cast<std::size_t>(std::count_if(graphs.begin(), graphs.end(),
                                                  [](const Graph& graph) { return graph.there; }));
}

void GraphExecutor::State::forget(Slot slot) {
    auto& graph = graphs[slot];
    graph.there = false;
    // In the order of the members' destruction.
    graph.captured.reset();
    graph.pieces.clear();
    dispatcher.evicted(slot);
    if (behind) {
        behind->replan();
    }
}

bool GraphExecutor::State::evict(Slot kept, CaptureFor reason) {
    const auto oldest = dispatcher.least_recently_used(kept);
    if (oldest == dispatch::no_slot ||
        (reason == CaptureFor::later && !behind->prefers(kept, oldest))) {
        return false;
    }
    forget(oldest);
    if (arena) {
        arena->trim();
    }
    return true;
}

bool GraphExecutor::State::make_room(Slot slot, CaptureFor reason) {
    while (full() && evict(slot, reason)) {
    }
    // A failed capture costs as much as a successful one, so make room before the first try.
    const auto short_of_bytes = [&] {
        return arena->stats().charged_bytes + graphs[slot].own_bytes > options.most_bytes;
    };
    if (!arena || options.most_bytes == 0 || !short_of_bytes()) {
        return !full();
    }
    arena->trim();
    while (short_of_bytes() && evict(slot, reason)) {
    }
    return !full() && !short_of_bytes();
}

void GraphExecutor::State::run_ahead(const Graph& graph, const Step& current, void* stream,
                                     std::uint32_t runs) {
    const auto run = [&] {
        for (std::uint32_t i = 0; i < runs; ++i) {
            auto recorder = this->recorder(graph, current);
            recorder.call(body);
        }
    };
    if (runs == 0 || on_cpu()) {
        run();
        return;
    }
    // On the capture stream: libraries keep state for each stream.
    const torch::OnStream capturing(inputs.device(), options.capture_stream);
    refuse_captured(options.capture_stream);
    streams.behind(stream, options.capture_stream);
    try {
        run_eagerly(run, options.capture_stream, nullptr);
    } catch (...) {
        streams.behind(options.capture_stream, stream);
        throw;
    }
    streams.behind(options.capture_stream, stream);
}

GraphExecutor::State::Recorded GraphExecutor::State::record(const Graph& graph,
                                                            const Step& current) const {
    auto recorder = this->recorder(graph, current);
    recorder.recording_ = true;
    Recorded recorded;
    if (on_cpu()) {
        recorder.call(body);
        return recorded;
    }
    const c10::cuda::CUDAGuard device(inputs.device());
    const auto kept_before = arena->stats().kept_bytes;
    auto capture = options.capture;
    // A ring's step is captured in one piece; the runners of several pieces take units eagerly.
    capture.ring = graph.mode == Mode::full ? options.ring : nullptr;
    if (capture.label.empty()) {
        capture.label =
            (graph.mode == Mode::piecewise ? "piecewise " : "full ") + text_of(graph.bucket);
    }
    torch::CaptureScope scope(*arena, options.capture_stream, capture);
    recorder.scope_ = &scope;
    recorder.call(body);
    recorded.captured.emplace(scope.end());
    recorded.pieces = std::move(recorder.pieces_);
    const auto kept = arena->stats().kept_bytes;
    recorded.own_bytes =
        recorded.captured->report().retained_bytes + (kept > kept_before ? kept - kept_before : 0);
    return recorded;
}

void GraphExecutor::State::take(Graph& graph, Recorded recorded) {
    graph.own_bytes = recorded.own_bytes;
    graph.pieces = std::move(recorded.pieces);
    graph.captured = std::move(recorded.captured);
}

bool GraphExecutor::State::relieve(Slot slot, const std::exception_ptr& thrown, CaptureFor reason,
                                   bool& cache_emptied) {
    auto& graph = graphs[slot];
    const auto failure = failure_of(thrown);
    graph.captured.reset();
    graph.pieces.clear();
    if (failure.no_room && failure.of_device && !std::exchange(cache_emptied, true)) {
        // Empty torch's cache, which has no users, before evicting a graph.
        empty_cache(on_cpu());
        return true;
    }
    return failure.no_room && reason != CaptureFor::warm_up && evict(slot, reason);
}

bool GraphExecutor::State::capture(Slot slot, const Step& current, void* stream, CaptureFor reason,
                                   bool throws) {
    auto& graph = graphs[slot];
    // Both would capture on the same stream.
    thread.wait();
    if (reason == CaptureFor::step) {
        // Without enough room, the try itself decides.
        static_cast<void>(make_room(slot, reason));
    }
    std::exception_ptr thrown;
    bool ran_ahead = reason == CaptureFor::later;
    bool cache_emptied = false;
    bool again = true;
    while (again) {
        try {
            inputs.select(graph.bucket);
            if (!ran_ahead) {
                run_ahead(graph, current, stream, options.eager_runs);
                ran_ahead = true;
            }
            take(graph, record(graph, current));
            if (reason == CaptureFor::step && graph.captured) {
                // For the following replay: a failed instantiation is a failed capture too.
                static_cast<void>(graph.captured->instantiate());
            }
            if (reason != CaptureFor::later) {
                publish(slot);
            }
            return true;
        } catch (...) {
            thrown = std::current_exception();
        }
        again = relieve(slot, thrown, reason, cache_emptied);
    }
    fail(slot, thrown, reason, throws);
    return false;
}

void GraphExecutor::State::publish(Slot slot) {
    graphs[slot].there = true;
    dispatcher.captured(slot);
}

void GraphExecutor::State::fail(Slot slot, const std::exception_ptr& thrown, CaptureFor reason,
                                bool throws) {
    auto& graph = graphs[slot];
    const auto failure = failure_of(thrown);
    graph.captured.reset();
    graph.pieces.clear();
    if (failure.no_room && reason != CaptureFor::step && !throws) {
        if (behind) {
            behind->put_off(slot);
        }
        dispatcher.abandoned(slot);
        return;
    }
    dispatcher.failed(slot);
    last_failure = "graph of " + text_of(graph.bucket) + ": " + failure.why;
    if (failure.no_room && arena) {
        last_failure +=
            "; the arena holds " + std::to_string(arena->stats().charged_bytes) + " bytes";
        last_failure += options.most_bytes > 0
                            ? ", and the limit is " + std::to_string(options.most_bytes)
                            : "";
    }
    if (throws) {
        dispatcher.forgive(slot);
        std::rethrow_exception(thrown);
    }
    graph.failed = true;
    TORCH_WARN("vmmgraph: no ", last_failure, "; its steps do without");
}

void GraphExecutor::State::look_ahead(Slot slot) {
    if (!options.instantiate_ahead || !ahead) {
        return;
    }
    for (const auto next : ahead->after(slot)) {
        if (auto& graph = graphs[next]; graph.captured) {
            graph.captured->instantiate_soon();
        }
    }
}

void GraphExecutor::State::update(Graph& graph, const Step& current, void* stream) {
    auto* const captured = graph.captured ? &*graph.captured : nullptr;
    if (captured == nullptr || options.update_stream == nullptr ||
        options.update_stream == stream) {
        options.update(graph.bucket, current, captured);
        return;
    }
    const torch::OnStream updating(inputs.device(), options.update_stream);
    refuse_captured(options.update_stream);
    graph.replayed->before(options.update_stream);
    try {
        options.update(graph.bucket, current, captured);
    } catch (...) {
        // Work already on the update stream may still change the graph.
        streams.behind(options.update_stream, stream);
        throw;
    }
    streams.behind(options.update_stream, stream);
}

void GraphExecutor::State::replay(Slot slot, const Step& current, void* stream) {
    auto& graph = graphs[slot];
    if (options.update) {
        update(graph, current, stream);
    }
    if (on_cpu()) {
        inputs.select(graph.bucket);
        take(graph, record(graph, current));
        return;
    }
    // Also after a replay which a runner ended: some of its pieces may run.
    const auto mark = [&] {
        if (graph.replayed) {
            graph.replayed->note(stream);
            graph.replayed->try_mark();
        }
    };
    try {
        if (graph.pieces.empty()) {
            graph.captured->replay(stream);
        } else {
            graph.captured->replay(stream, [&](std::size_t n) {
                graph.pieces[n].runner(current, graph.pieces[n].tensors);
            });
        }
    } catch (...) {
        mark();
        throw;
    }
    mark();
}

}  // namespace vmmgraph::engine
