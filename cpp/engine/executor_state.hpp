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

using DispatcherHandle = detail::Owned<vmmgraph_dispatcher_t, vmmgraph_dispatcher_destroy>;
using Decision = vmmgraph_decision_t;

struct GraphExecutor::State {
    // One for each bucket of each mode.
    struct Graph {
        Mode mode = Mode::eager;
        Key bucket;
        bool there = false;
        bool failed = false;
        std::uint64_t used = 0;
        // Nothing on a CPU device.
        std::optional<torch::CapturedGraph> captured;
        std::vector<Recorder::Piece> pieces;
    };

    std::shared_ptr<SharedVmmAllocator> arena;
    CudaGraphPersistentParam& inputs;
    Body body;
    ExecutorOptions options;
    DispatcherHandle dispatcher;
    std::vector<Graph> graphs;
    // In the order of warm_up().
    std::vector<std::uint32_t> order;
    std::uint64_t clock = 0;
    ExecutorStats stats;
    std::string last_failure;
    // Steps that ran eagerly because their capture failed just then; the dispatcher counted them as captured.
    std::uint64_t failed_steps = 0;

    // The step between prepare() and launch().
    std::optional<Step> step;
    Decision decision{};

    Ran planned() const {
        return {static_cast<Mode>(decision.mode), static_cast<Reason>(decision.reason), from_c(decision.bucket)};
    }

    bool on_cpu() const { return inputs.device().is_cpu(); }

    void report(std::uint32_t slot, std::int32_t event) { detail::check(vmmgraph_dispatcher_report(dispatcher.get(), slot, event)); }

    // Destroys a graph, which waits for the arena's replays.
    void forget(std::uint32_t slot);

    // Drops the least recently used graph but `kept`, and gives its pages back; false if there is none.
    bool evict(std::uint32_t kept);

    std::uint64_t bytes() const { return arena ? arena->stats().physical_bytes : 0; }
    // Pages that no graph maps are given back before anybody is told to go.
    bool over_bytes();

    // Torch keeps the workspace that cuBLAS gets at the first product of a thread on a stream. In a capture it would be memory of that
    // graph's, which would stay when the graph goes.
    void warm_up_products() const;

    // Captures; on a CPU it runs the body.
    void record(Graph& graph, const Step& current);

    // Captures the graph of a slot that the dispatcher holds for it; whether it is there then. A failure is said, not thrown. Where no other
    // graph may go for it, one that is over the limit leaves its slot as it was.
    bool capture(std::uint32_t slot, const Step& current, bool may_evict);

    void replay(Graph& graph, const Step& current, void* stream);

    // Gives back what dispatch promised to capture.
    void give_up();
};

}  // namespace vmmgraph::engine
