// State of a GraphExecutor, and the capture, replay and eviction of one graph.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <vmmgraph/engine.hpp>

#include "ahead.hpp"
#include "declare.hpp"
#include "stream_order.hpp"

namespace vmmgraph::engine {

using dispatch::Dispatcher;
using dispatch::Slot;

// Acquires a ring's unit on torch's current stream of the device; throws Error without a ring.
[[nodiscard]] UnitScope take_unit(Ring* ring, std::size_t unit, c10::Device device);

struct GraphExecutor::State {
    // One per bucket and mode.
    struct Graph {
        Mode mode = Mode::eager;
        Key bucket;
        bool there = false;
        bool failed = false;
        // Bytes of its own pages, and growth of the persistent (kept) pages, at its last capture:
        // the estimate for its next capture.
        std::uint64_t own_bytes = 0;
        // Declared before the graph, so destroyed after the graph: a runner may own memory which
        // the graph uses.
        std::vector<Recorder::Piece> pieces;
        // Empty on a CPU.
        std::optional<torch::CapturedGraph> captured;
        // Its last replay, for updates on a separate stream.
        std::unique_ptr<StreamOrder> replayed;
    };

    std::shared_ptr<SharedVmmAllocator> arena;
    GraphInputs& inputs;
    Body body;
    ExecutorOptions options;
    Dispatcher dispatcher;
    // By slot.
    std::vector<Graph> graphs;
    // In the order of warm_up().
    std::vector<Slot> order;
    std::string last_failure;
    StreamOrder streams;
    std::optional<Ahead> ahead;

    // The step between decide() and launch().
    std::optional<Step> step;
    Decision decision{};
    // Whether the executor must report on the slot, whether the values are prepared, and whether
    // other ranks made the decision.
    bool claimed = false;
    bool prepared = false;
    bool imposed = false;

    State(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body, const ExecutorOptions& options);

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
    // Replaces the decision by an agreed one.
    void impose(const Step& current, const Decision& agreed);
    // Checks and packs the step's values; gives the decision up on failure.
    void pack(c10::ArrayRef<NamedValue> values);
    // Gives up the step's decision and the claimed slot.
    void give_up();

    // Calls the engine's guard.
    std::shared_ptr<void> enter(Work work) const { return options.guard ? options.guard(work) : nullptr; }
    // Copies the inputs and calls before_launch; `stream` is torch's current stream.
    void commit(const Graph& graph, const Step& current, void* stream);

    // Destroys a graph; its memory is freed after the arena's replays.
    void forget(Slot slot);

    // Evicts the least recently used graph except `kept`, and frees its pages. Returns false if
    // none.
    bool evict(Slot kept);

    // Evicts graphs until another one of this slot is likely to fit.
    void make_room(Slot slot);

    // Runs a body eagerly before its capture, ordered between earlier and later work of `stream`.
    void run_ahead(const Graph& graph, const Step& current, void* stream);

    // Captures a graph; on a CPU, runs the body.
    void record(Graph& graph, const Step& current);

    // Captures the graph of a slot claimed from the dispatcher. Returns true on success. A failure
    // is logged, and thrown if `throws`. Without `may_evict`, a graph which lacks memory is left to
    // a later step.
    bool capture(Slot slot, const Step& current, void* stream, bool may_evict, bool throws);

    void replay(Slot slot, const Step& current, void* stream);
    // Calls the engine's update before the replay, on its stream.
    void update(Graph& graph, const Step& current, void* stream);
    // Instantiates the graphs which may follow a slot's graph.
    void look_ahead(Slot slot);
};

}  // namespace vmmgraph::engine
