// What a GraphExecutor holds, and how one graph comes, runs and goes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <vmmgraph/engine.hpp>

#include "declare.hpp"

namespace vmmgraph::engine {

using dispatch::Decision;
using dispatch::Dispatcher;
using dispatch::Slot;

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
        // Nothing on a CPU device.
        std::optional<torch::CapturedGraph> captured;
        std::vector<Recorder::Piece> pieces;
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

    // The step between prepare() and launch().
    std::optional<Step> step;
    Decision decision{};

    Ran planned() const { return {decision.mode, decision.reason, decision.bucket}; }

    bool on_cpu() const { return inputs.device().is_cpu(); }

    std::size_t there() const;
    // Whether there are as many graphs as may be.
    bool full() const { return options.most_graphs > 0 && there() >= options.most_graphs; }

    // Destroys a graph; its memory goes behind the arena's replays.
    void forget(Slot slot);

    // Drops the least recently used graph but `kept`, and gives its pages back; false if there is none.
    bool evict(Slot kept);

    // Drops graphs until another one of this slot is likely to fit.
    void make_room(Slot slot);

    // Torch keeps the workspace that cuBLAS gets at the first product of a thread on a stream. In a capture it would be memory of that
    // graph's, which would stay when the graph goes.
    void warm_up_products() const;

    // Captures; on a CPU it runs the body.
    void record(Graph& graph, const Step& current);

    // Captures the graph of a slot that the dispatcher holds for it; whether it is there then. A failure is said, not thrown. Where no other
    // graph may go for it, one that lacks memory is left for a step that needs it.
    bool capture(Slot slot, const Step& current, bool may_evict);

    void replay(Graph& graph, const Step& current, void* stream);

    // Gives back what dispatch promised to capture.
    void give_up();
};

}  // namespace vmmgraph::engine
