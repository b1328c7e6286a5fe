// VmmGraph for engines over libtorch: an executor that captures, caches and replays graphs by shape, over the persistent inputs of
// inputs.hpp. Link VmmGraph::torch. Unlike torch.hpp this header includes torch's own (tensors).
//
//   using namespace vmmgraph::engine;
//   GraphInputs inputs({Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)}), ...}, buckets, {at::kCUDA});
//   GraphExecutor executor(arena, inputs, body, options);            // body(Recorder&): the model on inputs.tokens(), ...
//   executor.warm_up();
//   each step: executor.run({key, phase}, {{names::tokens, tokens}, ...}, eager, stream);       // eager(): the step without a graph
//
// Errors are vmmgraph::Error, thrown before anything has changed unless a function says otherwise. An object is for one thread at a time.

#ifndef VMMGRAPH_ENGINE_HPP
#define VMMGRAPH_ENGINE_HPP

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "inputs.hpp"
#include "torch.hpp"

namespace vmmgraph::engine {

// Modes, phases, reasons and decisions are those of dispatch.hpp.
using dispatch::Decision;
using dispatch::Mode;
using dispatch::Phase;
using dispatch::Reason;
// For what a body makes and a runner keeps: see Recorder::eager.
using torch::KeptScope;

// A step to run.
struct Step {
    Key key;
    Phase phase = Phase::decode;
    // Whether the engine could put it into a graph at all (sequence lengths, features, sampling).
    bool capturable = true;
    // The engine's own, for eager work between pieces; must live until the step was launched.
    const void* params = nullptr;
};

// What became of a step.
struct Ran {
    Mode mode = Mode::eager;
    Reason reason = Reason::mode_eager;
    // The shape it was padded to; zeros for an eager step.
    Key bucket;
};

// What the body of a graph sees while it is recorded.
class VMMGRAPH_API Recorder {
public:
    // Eager work of a step, on torch's current stream. The tensors are those given to eager(), at the same addresses.
    using Runner = std::function<void(const Step& step, at::TensorList tensors)>;

    // Work that no graph can hold, such as attention over lengths that the host must know. Piecewise, the graph ends here and another begins,
    // and `runner` is called between them at every replay. It gets `tensors`, which may go when the body lets them go: their memory
    // serves what is recorded after the runner. Another tensor of the recording that it owns stays its own until the graph goes, on pages
    // that no other graph has; allocated in a KeptScope, on pages common to all graphs, which costs no more than its bytes. The executor
    // cannot know such tensors when they are made, so the body says so. What a runner allocates is torch's own memory. In a full graph the runner is recorded, without params.
    void eager(at::TensorList tensors, Runner runner);
    // Full or piecewise.
    [[nodiscard]] Mode mode() const noexcept { return mode_; }
    // The shape that is recorded; the inputs' getters are of this bucket.
    [[nodiscard]] const Key& bucket() const noexcept { return bucket_; }

private:
    friend class GraphExecutor;
    Recorder(Mode mode, const Key& bucket) : mode_(mode), bucket_(bucket) {}
    struct Piece {
        Runner runner;
        std::vector<at::Tensor> tensors;
    };

    Mode mode_;
    Key bucket_;
    torch::CaptureScope* scope_ = nullptr;
    // On a CPU device, where the body itself is the replay.
    const Step* step_ = nullptr;
    std::vector<Piece> pieces_;
};

// How an executor decides (all of dispatch.hpp's options but their order: 0 is no limit), captures and evicts. Its buckets are
// buckets of the inputs; for a new graph beyond most_graphs the least recently used one goes.
struct ExecutorOptions : dispatch::DispatcherOptions {
    // Most bytes of physical memory of the arena, at any time: set as its budget. Where a capture needs more, graphs go, the least
    // recently used first, and it is tried again. The end of a capture may need some pages more than what it comes to.
    std::uint64_t most_bytes = 0;
    // The stream of every capture (a cudaStream_t, not the default one); null: one of torch's.
    void* capture_stream = nullptr;
    torch::CaptureOptions capture;
};

// What an executor did so far: `graphs` are those that are there; those that clear() drops count as evictions.
using ExecutorStats = dispatch::DispatcherStats;

// Runs steps by graphs: decides which, captures on demand or ahead, caches by shape, evicts, and runs eagerly what no graph can, saying why.
class VMMGRAPH_API GraphExecutor {
public:
    // The body of every graph: reads the inputs' getters, writes outputs, keeps no tensor. Called while a graph is recorded.
    using Body = std::function<void(Recorder& recorder)>;

    // `inputs` must outlive the executor. `arena` is null for inputs on a CPU, where nothing is captured and a replay is a call of `body`.
    // Throws Error for a bucket that the inputs lack, and for an arena or a capture stream of another device than theirs.
    GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body, const ExecutorOptions& options);
    GraphExecutor(const GraphExecutor&) = delete;
    GraphExecutor& operator=(const GraphExecutor&) = delete;
    ~GraphExecutor();

    // Captures every bucket, largest first, while limits allow; how many graphs are there then. What fails is as in run().
    std::size_t warm_up();

    // Runs a step on `stream`: pads it to a bucket and replays its graph, capturing it first if need be; or calls `eager`, with that
    // stream as torch's current one. Outputs of a graph are those of the inputs' getters. A failed capture is logged, counted, and the
    // bucket runs eagerly until forgive(). Throws Error for values that do not fit, and what the runners, `eager` and replays throw.
    Ran run(const Step& step, c10::ArrayRef<NamedValue> values, const std::function<void()>& eager, void* stream) {
        prepare(step, values);
        return launch(eager, stream);
    }
    // The two halves of run(): the first is host work only, may be done while the step before runs, and returns what the second will do
    // unless its capture fails.
    Ran prepare(const Step& step, c10::ArrayRef<NamedValue> values);
    Ran launch(const std::function<void()>& eager, void* stream);

    // Drops all graphs, waits for their replays and gives their pages back.
    void clear();
    // Lets buckets whose capture failed be tried again.
    void forgive();
    // Why the last capture failed; empty if none did.
    [[nodiscard]] const std::string& last_failure() const noexcept;

    [[nodiscard]] ExecutorStats stats() const;
    // Steps that ran in that mode for that reason.
    [[nodiscard]] std::uint64_t steps(Mode mode, Reason reason) const;
    // Steps that ran eagerly though a graph should have run them: not captured, being captured, no room, failed.
    [[nodiscard]] std::uint64_t unplanned() const;
    // All counters in Prometheus's text format, with these labels on every sample.
    [[nodiscard]] std::string prometheus(const std::vector<std::pair<std::string, std::string>>& labels = {}) const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace vmmgraph::engine

#endif  // VMMGRAPH_ENGINE_HPP
