// Captures behind the traffic: units of work between the steps.
#include <algorithm>
#include <exception>
#include <utility>

#include <c10/util/Exception.h>

#include "../torch/on_device.hpp"
#include "executor_state.hpp"
#include "inputs_state.hpp"

namespace vmmgraph::engine {

void GraphExecutor::State::begin_behind(const std::vector<Ahead::Place>& places) {
    behind.emplace(places);
    several_ranks = options.exchange != nullptr;
    auto missing = options;
    missing.captures = Captures::lazily;
    all_missing.emplace(make_dispatcher(missing));
    if (options.histogram.empty()) {
        return;
    }
    try {
        behind->add(read_histogram(options.histogram));
    } catch (const Error& error) {
        TORCH_WARN("vmmgraph: ", error.what());
    }
}

dispatch::PlanOptions GraphExecutor::State::plan_limits() const {
    dispatch::PlanOptions limits;
    limits.weights = options.weights;
    limits.most_graphs = options.most_graphs;
    std::uint64_t own = 0;
    std::uint64_t measured = 0;
    std::uint64_t there = 0;
    for (const auto& graph : graphs) {
        own += graph.own_bytes;
        measured += graph.own_bytes > 0 ? 1 : 0;
        there += graph.there ? graph.own_bytes : 0;
    }
    // The common pages of all graphs are in the arena already, up to a page for the largest.
    if (arena && options.most_bytes > 0 && measured > 0) {
        const auto common = arena->stats().charged_bytes -
                            std::min<std::uint64_t>(there, arena->stats().charged_bytes);
        limits.graph_bytes = std::max<std::uint64_t>(1, own / measured);
        limits.most_graph_bytes =
            std::max<std::uint64_t>(1, options.most_bytes - std::min(common, options.most_bytes));
    }
    return limits;
}

Slot GraphExecutor::State::next_behind() {
    if (!behind) {
        return dispatch::no_slot;
    }
    if (unfinished) {
        return unfinished->slot;
    }
    return behind->next([this] { return plan_limits(); },
                        [this](Slot slot) { return missing(slot); });
}

bool GraphExecutor::State::begin_next() {
    while (!unfinished) {
        const auto slot =
            several_ranks ? std::exchange(agreed_next, dispatch::no_slot) : next_behind();
        if (slot == dispatch::no_slot) {
            return false;
        }
        const bool room = missing(slot) && make_room(slot, CaptureFor::later);
        if (room) {
            dispatcher.begin(slot);
        } else {
            behind->put_off(slot);
        }
        // With several ranks, each rank takes part in the eager runs.
        if (room || several_ranks) {
            unfinished.emplace(Unfinished{slot, 0, room});
        }
    }
    return true;
}

GraphExecutor::State::Unit GraphExecutor::State::next_unit() const {
    const auto done = unfinished ? unfinished->units : 0;
    return done < options.eager_runs    ? Unit::eager_run
           : done == options.eager_runs ? Unit::capture
                                        : Unit::instantiation;
}

void GraphExecutor::State::do_unit() {
    const auto slot = unfinished->slot;
    auto& graph = graphs[slot];
    const auto unit = next_unit();
    const Step padding{graph.bucket, graph.mode == Mode::full ? Phase::decode : Phase::mixed, true,
                       nullptr};
    auto* const stream = options.capture_stream;
    const bool throws = options.on_failure == OnFailure::throws;
    std::optional<torch::OnStream> current;
    if (!on_cpu()) {
        current.emplace(inputs.device(), stream);
    }
    // Afterwards the engine may destroy the capture stream, or capture on the stream.
    auto* const last = on_cpu() ? nullptr : &inputs.state_->last;
    const MarkWhenLeft marks(last);
    std::shared_ptr<void> held;
    if (unit == Unit::eager_run || (unit == Unit::capture && unfinished->wanted)) {
        try {
            held = enter(Work::capture);
            inputs.prepare(graph.bucket, {});
            commit(graph, padding, stream);
        } catch (...) {
            drop_unfinished();
            throw;
        }
    }
    if (is_beside(unit)) {
        // The thread captures on the stream, and calls the guard itself.
        held.reset();
        if (last != nullptr) {
            last->try_mark();
        }
        begin_beside(unit, padding);
        return;
    }
    std::exception_ptr thrown;
    try {
        if (unit == Unit::eager_run && options.record_beside && !several_ranks) {
            thread.begin([&] { run_ahead(graph, padding, stream, 1); });
            thread.finish();
        } else if (unit == Unit::eager_run) {
            run_ahead(graph, padding, stream, 1);
        } else if (unit == Unit::capture && unfinished->wanted) {
            unfinished->wanted = capture(slot, padding, stream, CaptureFor::later, throws);
        } else if (unfinished->wanted && graph.captured) {
            static_cast<void>(graph.captured->instantiate());
        }
    } catch (...) {
        if (unit == Unit::capture) {
            // Reported by capture().
            unfinished.reset();
            throw;
        }
        thrown = std::current_exception();
    }
    end_unit(unit, thrown);
}

void GraphExecutor::State::begin_beside(Unit unit, const Step& padding) {
    const auto slot = unfinished->slot;
    auto& graph = graphs[slot];
    if (unit == Unit::instantiation) {
        thread.begin([&graph] {
            if (graph.captured) {
                static_cast<void>(graph.captured->instantiate());
            }
        });
        return;
    }
    thread.begin([this, &graph, padding, getters = inputs.state_->beside(graph.bucket)] {
        const auto held = enter(Work::capture);
        const GraphInputs::State::GettersBeside here(*inputs.state_, getters);
        recorded = record(graph, padding);
    });
}

bool GraphExecutor::State::finish_beside(WorkThread::Clock::time_point end) {
    const auto unit = next_unit();
    auto& last = last_units.at(static_cast<std::size_t>(unit));
    const auto now = WorkThread::Clock::now();
    // After its usual duration, a unit may take as long again.
    const bool soon = now + std::max(last, thread.elapsed()) <= end;
    if (!thread.wait_until(soon ? end : now)) {
        return false;
    }
    std::exception_ptr thrown;
    try {
        last = thread.finish();
    } catch (...) {
        thrown = std::current_exception();
    }
    const auto slot = unfinished->slot;
    if (unit == Unit::capture && !thrown) {
        take(graphs[slot], std::exchange(recorded, {}));
    } else if (unit == Unit::capture &&
               relieve(slot, thrown, CaptureFor::later, unfinished->cache_emptied)) {
        // The next call tries again.
        return true;
    }
    end_unit(unit, thrown);
    return true;
}

void GraphExecutor::State::end_unit(Unit unit, const std::exception_ptr& thrown) {
    const auto slot = unfinished->slot;
    if (thrown) {
        const bool wanted = std::exchange(unfinished->wanted, false);
        try {
            if (!wanted) {
                std::rethrow_exception(thrown);
            }
            fail(slot, thrown, CaptureFor::later, options.on_failure == OnFailure::throws);
        } catch (...) {
            unfinished.reset();
            throw;
        }
    } else if (unit == Unit::instantiation && unfinished->wanted) {
        publish(slot);
    }
    ++unfinished->units;
    // Other ranks go on with the units of this graph.
    if (unit == Unit::instantiation || (!unfinished->wanted && !several_ranks)) {
        unfinished.reset();
    }
}

void GraphExecutor::State::drop_unfinished() {
    if (thread.has_work()) {
        try {
            thread.finish();
        } catch (...) {
            // Its graph is given up in any case.
        }
        recorded = {};
    }
    if (unfinished && unfinished->wanted) {
        auto& graph = graphs[unfinished->slot];
        graph.captured.reset();
        graph.pieces.clear();
        dispatcher.abandoned(unfinished->slot);
    }
    unfinished.reset();
}

}  // namespace vmmgraph::engine
