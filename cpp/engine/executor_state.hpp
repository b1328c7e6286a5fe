// What a GraphExecutor holds, and how one graph comes, runs and goes.
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

// A unit of a ring, with torch's current stream of the device; throws Error without a ring.
[[nodiscard]] UnitScope take_unit(Ring* ring, std::size_t unit, c10::Device device);

struct GraphExecutor::State {
    // One for each bucket of each mode.
    struct Graph {
        Mode mode = Mode::eager;
        Key bucket;
        bool there = false;
        bool failed = false;
        // Bytes of pages of its own when it was there last, and by how much the pages for kept blocks grew: what the next capture is
        // going to need.
        std::uint64_t own_bytes = 0;
        // Before the graph, so that they go behind it: a runner may own memory that the graph uses.
        std::vector<Recorder::Piece> pieces;
        // Nothing on a CPU device.
        std::optional<torch::CapturedGraph> captured;
        // Its last replay, for updates on a stream of their own.
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

    // The step from decide() to launch().
    std::optional<Step> step;
    Decision decision{};
    // Whether its slot is ours to report on, whether its values are prepared, and whether the decision is another's.
    bool claimed = false;
    bool prepared = false;
    bool imposed = false;

    State(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body, const ExecutorOptions& options);

    Recorder recorder(const Graph& graph, const Step& step) const {
        return {graph.mode, graph.bucket, step, options.ring, inputs.device()};
    }

    Ran planned() const { return {decision.mode, decision.reason, decision.bucket}; }

    bool on_cpu() const { return inputs.device().is_cpu(); }

    // Runs what no graph does, with `stream` as torch's current one: a step's own work, or that before a capture (null).
    void run_eagerly(const std::function<void()>& eager, void* stream, const Step* step) const;

    std::size_t there() const;
    // Whether there are as many graphs as may be.
    bool full() const { return options.most_graphs > 0 && there() >= options.most_graphs; }

    // Decides, and takes the slot of a graph to capture.
    void decide(const Step& current);
    // Takes another's decision in the place of what was decided.
    void impose(const Step& current, const Decision& agreed);
    // Checks and packs the values of what was decided; on failure it is given up.
    void pack(c10::ArrayRef<NamedValue> values);
    // Gives back what decide() took.
    void give_up();

    // What the engine's guard returns.
    std::shared_ptr<void> enter(Work work) const { return options.guard ? options.guard(work) : nullptr; }
    // The copy of inputs, and the engine's hook behind it; `stream` is torch's current one.
    void commit(const Graph& graph, const Step& current, void* stream);

    // Destroys a graph; its memory goes behind the arena's replays.
    void forget(Slot slot);

    // Drops the least recently used graph but `kept`, and gives its pages back; false if there is none.
    bool evict(Slot kept);

    // Drops graphs until another one of this slot is likely to fit.
    void make_room(Slot slot);

    // The eager runs of a body before its capture, behind what `stream` has and before what it gets.
    void run_ahead(const Graph& graph, const Step& current, void* stream);

    // Captures; on a CPU it runs the body.
    void record(Graph& graph, const Step& current);

    // Captures the graph of a slot that the dispatcher holds for it; whether it is there then. A failure is said, and thrown if so wished.
    // Where no other graph may go for it, one that lacks memory is left for a step that needs it.
    bool capture(Slot slot, const Step& current, void* stream, bool may_evict, bool throws);

    void replay(Slot slot, const Step& current, void* stream);
    // The engine's hook before it, on its stream.
    void update(Graph& graph, const Step& current, void* stream);
    // Sees to the executables of the graphs that may be next after that of a slot.
    void look_ahead(Slot slot);
};

}  // namespace vmmgraph::engine
