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

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "inputs.hpp"
#include "ring.hpp"
#include "torch.hpp"

namespace vmmgraph::engine {

// Modes, phases, reasons and decisions are those of dispatch.hpp.
using dispatch::Decision;
using dispatch::Mode;
using dispatch::Phase;
using dispatch::Reason;
// For what a body makes and a runner keeps: see Recorder::eager.
using torch::KeptScope;
// What streams: see ExecutorOptions::ring.
using vmmgraph::Ring;
using vmmgraph::UnitScope;

// A step to run.
struct Step {
    // What graph it needs. More than its values have where ranks pad to the largest of them: the rest is padding.
    Key key;
    // What the sequences are doing. A step that does not say is never taken for a decode: no full graph runs it by default.
    Phase phase = Phase::mixed;
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
    // and `runner` is called between them at every replay. It gets `tensors`. Those of the recording may go when the body lets them go: their
    // memory serves what is recorded after the runner. All others (of the host, of general memory) are held until the graph goes; one that
    // is undefined is passed as it is. Another tensor of the recording that the runner owns stays its own until the graph goes, on pages
    // that no other graph has; allocated in a KeptScope, on pages common to all graphs, which costs no more than its bytes. The executor
    // cannot know such tensors when they are made, so the body says so. What a runner allocates is torch's own memory. In a full graph the
    // runner is recorded, without params. In an eager run before the capture it is called at once.
    void eager(at::TensorList tensors, Runner runner);
    // What this thread records just now, or runs as a body before it records it; null elsewhere. So that attention deep in a model finds
    // its capture though nobody handed it down.
    [[nodiscard]] static Recorder* current() noexcept;
    // A unit of ExecutorOptions::ring from its acquire to its release, with torch's current stream, which is to be the same at its end: the kernels of a
    // layer lie between. Captured, each unit that streams is taken once, in the order of use, and its copies are the graph's; in an eager run,
    // and on a CPU, it waits for its copy by events, in any order. Throws Error (VMMGRAPH_ERROR_WRONG_STATE) without a ring and in a piecewise graph, of which
    // only the runners take units, by GraphExecutor::streamed(); and what UnitScope throws.
    [[nodiscard]] UnitScope streamed(std::size_t unit);
    // As torch::CaptureScope::last_kernel(), for ExecutorOptions::update; null where nothing is captured.
    [[nodiscard]] void* last_kernel();
    // The step that this graph is recorded for, or whose eager run this is: what the body reads of it on the host is fixed in the graph. In
    // warm_up() a step of padding, without params.
    [[nodiscard]] const Step& step() const noexcept { return *step_; }
    // Whether this call of the body is the recording; false in an eager run before it (ExecutorOptions::eager_runs). On a CPU every replay is one.
    [[nodiscard]] bool recording() const noexcept { return recording_; }
    // Full or piecewise.
    [[nodiscard]] Mode mode() const noexcept { return mode_; }
    // The shape that is recorded; the inputs' getters are of this bucket.
    [[nodiscard]] const Key& bucket() const noexcept { return bucket_; }

private:
    friend class GraphExecutor;
    Recorder(Mode mode, const Key& bucket, const Step& step, Ring* ring, c10::Device device)
        : mode_(mode), bucket_(bucket), step_(&step), ring_(ring), device_(device) {}
    struct Piece {
        Runner runner;
        std::vector<at::Tensor> tensors;
    };
    // Runs a body with this as current().
    void call(const std::function<void(Recorder&)>& body);

    Mode mode_;
    Key bucket_;
    const Step* step_;
    Ring* ring_;
    c10::Device device_;
    // Null where nothing is captured: in an eager run, and on a CPU device, where the body itself is the replay.
    torch::CaptureScope* scope_ = nullptr;
    bool recording_ = false;
    std::vector<Piece> pieces_;
};

// What becomes of a step whose graph cannot be captured.
enum class OnFailure : std::int32_t {
    // It runs eagerly, and so do all steps of its bucket until forgive().
    eager,
    // The step throws what the capture threw, and the next one of its bucket tries again: no rank of several ever runs another way than
    // its decision said, where the others would wait in a collective for what it does not call.
    throws,
};

// What an executor does under an engine's guard.
enum class Work : std::int32_t {
    // The copy of inputs, eager runs and a capture.
    capture,
    // The copy of inputs and a replay.
    replay,
};

// How an executor decides (all of dispatch.hpp's options but their order: 0 is no limit), captures and evicts. Its buckets are
// buckets of the inputs; for a new graph beyond most_graphs the least recently used one goes.
struct ExecutorOptions : dispatch::DispatcherOptions {
    // Unlike a dispatcher alone, a decode that no full graph can run is eager by default: attention between the pieces of a piecewise graph
    // is often that of a prefill. An engine whose piecewise graphs run decodes too adds Mode::piecewise here as the second mode.
    ExecutorOptions() { modes[static_cast<std::size_t>(Phase::decode)] = {Mode::full, Mode::eager}; }

    // Most bytes of physical memory of the arena, at any time: set as its budget. Where a capture needs more, graphs go, the least
    // recently used first, and it is tried again. The end of a capture may need some pages more than what it comes to.
    std::uint64_t most_bytes = 0;
    // The stream of every capture (a cudaStream_t, not the default one); null: one of torch's.
    void* capture_stream = nullptr;
    torch::CaptureOptions capture;
    // Units that stream from the host in every full graph (ring.hpp), which the body takes with Recorder::streamed(), and eager steps and the runners of
    // piecewise graphs with GraphExecutor::streamed(): all go through the same slots, in any order of steps. Of the inputs' device; it must outlive the
    // executor. `capture.ring_capture` says how they are captured; `capture.ring` is the executor's to set.
    Ring* ring = nullptr;
    // Limits of the pool of executables that the executor makes for itself, if `capture` names none; 0: no limit, as with torch's own graphs.
    // Beyond them the least recently used graph is destroyed, and instantiated again for its next step (docs/performance.md).
    torch::ExecutableLimits executables{};
    // Whether a thread instantiates the graphs that are likely to be next: the neighbours of the one that runs, and the one that came after
    // it last time.
    bool instantiate_ahead = true;
    OnFailure on_failure = OnFailure::eager;
    // How often the body runs on the capture stream, without a capture, over the step's inputs, before its graph is captured: what kernels,
    // cuDNN and NCCL set up at their first call is there then. The body must bear being run more than once for a step. In warm_up() the
    // inputs are padding, and runners see no params.
    std::uint32_t eager_runs = 0;
    // Whether steps without a graph, and the eager runs before captures, lie in the arena's memory, as a torch::EagerScope each: a replay of
    // the arena while they last, for which launch() refuses what that refuses. What they leave alive keeps its pages from the graphs. Work
    // between pieces is not: the graph around it has the arena's turn.
    bool eager_in_arena = false;
    // Bytes that the tensors of a step without a graph come to at most, for arenas that lend pages: see torch::EagerScope. Empty, and for the
    // runs before captures: every page that eager work ever used.
    std::function<std::uint64_t(const Step& step)> eager_bytes;
    // For ranks that must run every step the same way: prepare() calls it once a step with what this rank would do, and carries out what agree()
    // says of what it returns: the decisions of all ranks, this one's too, in any order. An all-gather of the engine's own; a Decision is plain
    // data. No rank runs a step another way than was agreed: launch() throws instead, whatever on_failure says. Not called by warm_up(), which all
    // ranks are to do alike, nor for a decision that prepare() is given.
    std::function<std::vector<Decision>(const Decision& mine)> exchange;
    // Called once for every step that a graph runs, behind the copy of its inputs and before its capture or replay, with the launch's stream
    // as torch's current one: where kernels are planned from the padded values (GraphInputs::host). What it gives to that stream is done
    // before the graph runs. In warm_up() the step has no params, and Phase::decode for full, Phase::mixed for piecewise graphs.
    std::function<void(const Key& bucket, const Step& step)> before_launch;
    // Called once for every step that a graph runs, just before its replay, with `update_stream` as torch's current one: what was captured with
    // the values of one step is given those of this one, such as parameters of kernels (Recorder::last_kernel(), and
    // cudaGraphExecKernelNodeSetParams on graph->exec(piece)). The graph is null on a CPU, where nothing is captured. It must not replay.
    std::function<void(const Key& bucket, const Step& step, torch::CapturedGraph* graph)> update;
    // Another stream than the step's for what `update` gives to a device (a cudaStream_t): behind the graph's replay before, beside everything
    // else, and the replay is behind it. Null: the step's own. What the graph itself waits for (an event recorded with
    // cudaEventRecordExternal semantics) may go to any stream of the engine's instead.
    void* update_stream = nullptr;
    // Asked before that, and what it returns is held as long as the work goes on, such as a lock: a capture may want the device for itself,
    // and replays beside each other. A capture's is dropped before its replay's is asked for. None for eager steps.
    std::function<std::shared_ptr<void>(Work work)> guard;
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

    // Captures every bucket, largest first, while limits allow; how many graphs are there then. What fails is as in run(), but that a
    // graph which lacks memory is left for a step that needs it (with OnFailure::throws: throws, too).
    std::size_t warm_up();

    // Runs a step on `stream`: pads it to a bucket and replays its graph, capturing it first if need be; or calls `eager`, with that
    // stream as torch's current one. Outputs of a graph are those of the inputs' getters. A failed capture is logged and counted, and goes
    // on as on_failure says. Throws Error for values that do not fit, and what the hooks, the runners, `eager` and replays throw.
    Ran run(const Step& step, c10::ArrayRef<NamedValue> values, const std::function<void()>& eager, void* stream) {
        prepare(step, values);
        return launch(eager, stream);
    }
    // The two halves of run(): the first is host work only, may be done while the step before runs, and returns what the second will do
    // unless its capture fails.
    Ran prepare(const Step& step, c10::ArrayRef<NamedValue> values);
    Ran launch(const std::function<void()>& eager, void* stream);

    // For ranks that must run a step the same way, where ExecutorOptions::exchange is not enough: decide() on each, agree() on all decisions,
    // prepare() with what was agreed, launch().
    // What this executor would do with a step; plain data. Held for the prepare() of the same step. The counters count this decision; one
    // that is imposed instead counts beside it (ExecutorStats::imposed, and by mode in prometheus()).
    Decision decide(const Step& step);
    // What all ranks can do: the least of their modes, in the largest bucket of that mode; eagerly, if no bucket covers the others. Where a
    // rank would capture or decided otherwise, all say `capture`: those that have the graph make its eager runs too, which may hold
    // collectives.
    [[nodiscard]] static Decision agree(c10::ArrayRef<Decision> ranks);
    // prepare() with the decision of others. It is carried out, or launch() throws what the capture threw, whatever on_failure says. Throws
    // Error for a mode and bucket that this executor has no graph of, and if the bucket is too small for the values.
    Ran prepare(const Step& step, c10::ArrayRef<NamedValue> values, const Decision& agreed);

    // As Recorder::streamed(), for the `eager` of a step: between eager steps, graphs and the runs before their captures there is nothing to be done.
    [[nodiscard]] UnitScope streamed(std::size_t unit);

    // Announces a step, such as a prompt that was admitted just now: a thread instantiates its graph, if it was captured, by then.
    void expect(const Step& step);
    // Executables of the graphs; zeros on a CPU and up to torch 2.7.
    [[nodiscard]] torch::ExecutableStats executables() const;

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
