// State of a GraphExecutor, and the capture, replay and eviction of one graph.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <vmmgraph/engine.hpp>

#include "ahead.hpp"
#include "behind.hpp"
#include "declare.hpp"
#include "inputs_state.hpp"
#include "stream_order.hpp"
#include "work_thread.hpp"

namespace vmmgraph::engine {

using dispatch::Dispatcher;
using dispatch::Slot;

// Acquires a ring's unit on torch's current stream of the device; throws Error without a ring.
[[nodiscard]] UnitScope take_unit(Ring* ring, std::size_t unit, c10::Device device);

// Returns a dispatcher which refuses no graph: the executor evicts graphs instead.
[[nodiscard]] Dispatcher make_dispatcher(const ExecutorOptions& options);

// Reason of a capture.
enum class CaptureFor {
    // The current step: evicts any graph for room, and instantiates the graph.
    step,
    // warm_up(): a graph without room is left to a later step.
    warm_up,
    // between_steps(): evicts less used graphs. Eager runs and instantiation are separate units.
    later,
};

struct GraphExecutor::State {
    // Result of a recording.
    struct Recorded {
        // Bytes of its own pages, and growth of the persistent (kept) pages.
        std::uint64_t own_bytes = 0;
        // Declared before the graph, so destroyed after the graph: a runner may own memory which
        // the graph uses.
        std::vector<Recorder::Piece> pieces;
        // Empty on a CPU.
        std::optional<torch::CapturedGraph> captured;
    };
    // One per bucket and mode.
    struct Graph {
        Mode mode = Mode::eager;
        Key bucket;
        bool there = false;
        bool failed = false;
        // Of its last capture: the estimate for its next capture.
        std::uint64_t own_bytes = 0;
        // As in Recorded.
        std::vector<Recorder::Piece> pieces;
        std::optional<torch::CapturedGraph> captured;
        // Its last replay, for updates on a separate stream.
        std::unique_ptr<StreamOrder> replayed;
    };

    std::shared_ptr<SharedVmmAllocator> arena;
    GraphInputs& inputs;
    Body body;
    ExecutorOptions options;
    // The capture stream of `record_beside`, unless given by the engine. Outlives the graphs.
    std::shared_ptr<void> own_stream;
    Dispatcher dispatcher;
    // By slot.
    std::vector<Graph> graphs;
    // In the order of warm_up().
    std::vector<Slot> order;
    std::string last_failure;
    StreamOrder streams;
    std::optional<Ahead> ahead;
    // Captures::behind: the queue, the dispatcher of `own_slot`, and the graph in work.
    std::optional<Behind> behind;
    std::optional<Dispatcher> all_missing;
    struct Unfinished {
        Slot slot;
        // Finished units: eager runs, then the capture.
        std::uint32_t units = 0;
        // Whether this rank still wants the graph; other ranks may go on.
        bool wanted = true;
        // Whether a capture has emptied torch's cache.
        bool cache_emptied = false;
    };
    std::optional<Unfinished> unfinished;
    // The graph agreed on by the ranks for the next between_steps().
    Slot agreed_next = dispatch::no_slot;
    // True if this executor decides together with others.
    bool several_ranks = false;
    // Unit of work behind the traffic, and the last duration of each.
    enum class Unit { eager_run, capture, instantiation };
    std::array<WorkThread::Clock::duration, 3> last_units{};

    // The step between decide() and launch().
    std::optional<Step> step;
    Decision decision{};
    // Whether the executor must report on the slot, whether the values are prepared, and whether
    // other ranks made the decision.
    bool claimed = false;
    bool prepared = false;
    bool imposed = false;

    State(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body,
          const ExecutorOptions& options);

    Recorder recorder(const Graph& graph, const Step& step) const {
        return {graph.mode, graph.bucket, step, options.ring, inputs.device()};
    }

    Ran planned() const { return {decision.mode, decision.reason, decision.bucket}; }

    bool on_cpu() const { return inputs.device().is_cpu(); }

    // Runs eager work with `stream` as torch's current stream: a step's own, or the runs before a
    // capture (`step` is null).
    void run_eagerly(const std::function<void()>& eager, void* stream, const Step* step) const;

    std::size_t there() const;
    // Returns true at the limit of graphs.
    bool full() const { return options.most_graphs > 0 && there() >= options.most_graphs; }

    // Decides, and claims the slot of a graph to capture.
    void decide(const Step& current);
    // Returns the slot of the step's own graph, existing or not; no_slot if none.
    [[nodiscard]] Slot own_slot(const Step& current);
    // Replaces the decision by an agreed one.
    void impose(const Step& current, const Decision& agreed);
    // Checks and packs the step's values; gives the decision up on failure.
    void pack(c10::ArrayRef<NamedValue> values);
    // Gives up the step's decision and the claimed slot.
    void give_up();

    // Calls the engine's guard.
    std::shared_ptr<void> enter(Work work) const {
        return options.guard ? options.guard(work) : nullptr;
    }
    // Copies the inputs and calls before_launch; `stream` is torch's current stream.
    void commit(const Graph& graph, const Step& current, void* stream);

    // Destroys a graph; its memory is freed after the arena's replays.
    void forget(Slot slot);

    // Evicts the least recently used graph except `kept`, and frees its pages. Returns false if
    // none, and for a later capture if the graph is used more than `kept`.
    bool evict(Slot kept, CaptureFor reason);

    // Evicts graphs until another one of this slot is likely to fit. Returns false if not possible.
    bool make_room(Slot slot, CaptureFor reason);

    // Runs a body eagerly before its capture, ordered between earlier and later work of `stream`.
    void run_ahead(const Graph& graph, const Step& current, void* stream, std::uint32_t runs);

    // Captures a graph; on a CPU, runs the body.
    [[nodiscard]] Recorded record(const Graph& graph, const Step& current) const;
    // Gives a graph the result of its capture.
    static void take(Graph& graph, Recorded recorded);
    // Frees memory for another try of a failed capture. Returns false if there will be none.
    bool relieve(Slot slot, const std::exception_ptr& thrown, CaptureFor reason,
                 bool& cache_emptied);

    // Captures the graph of a slot claimed from the dispatcher. Returns true on success. A failure
    // is logged, and thrown if `throws`. Except for a step, a graph which lacks memory is left to a
    // later step. A later capture is published by the caller.
    bool capture(Slot slot, const Step& current, void* stream, CaptureFor reason, bool throws);
    // Handles the failure of a claimed slot, thrown by the capture or by work around the capture.
    void fail(Slot slot, const std::exception_ptr& thrown, CaptureFor reason, bool throws);
    // The graph runs later steps.
    void publish(Slot slot);

    // Captures::behind: makes the queue, and reads the histogram's file.
    void begin_behind(const std::vector<Ahead::Place>& places);
    // Returns the limits of a plan behind the traffic.
    [[nodiscard]] dispatch::PlanOptions plan_limits() const;
    // Returns true for a graph which may be captured between steps.
    [[nodiscard]] bool missing(Slot slot) const {
        return !graphs[slot].there && !graphs[slot].failed;
    }
    // Returns the graph which this rank would capture next.
    [[nodiscard]] Slot next_behind();
    // Begins the next graph, unless one is in work. Returns false if there is none.
    bool begin_next();
    // Returns the next unit of the graph in work, or of a new graph.
    [[nodiscard]] Unit next_unit() const;
    // Returns true for a unit done on `thread` while steps go on.
    [[nodiscard]] bool is_beside(Unit unit) const {
        return !several_ranks && unfinished && unfinished->wanted &&
               (unit == Unit::instantiation || (unit == Unit::capture && options.record_beside));
    }
    // Does the next unit of the graph in work, with padding as the step, or begins the unit on
    // `thread`.
    void do_unit();
    void begin_beside(Unit unit, const Step& padding);
    // Ends a unit of `thread` which is done, or which is expected to be done until `end` and is.
    // Returns false if the unit goes on.
    bool finish_beside(WorkThread::Clock::time_point end);
    // Notes the end of a unit, or its failure.
    void end_unit(Unit unit, const std::exception_ptr& thrown);
    // Gives up the graph in work, after its unit on `thread`.
    void drop_unfinished();

    void replay(Slot slot, const Step& current, void* stream);
    // Calls the engine's update before the replay, on its stream.
    void update(Graph& graph, const Step& current, void* stream);
    // Instantiates the graphs which may follow a slot's graph.
    void look_ahead(Slot slot);

    // Result of the recording on `thread`.
    Recorded recorded;
    // Declared last, so that its work ends before all else.
    WorkThread thread;
};

}  // namespace vmmgraph::engine
