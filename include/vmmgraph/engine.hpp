// Graph executor for engines over libtorch: captures, caches and replays graphs by shape, over the
// persistent inputs of inputs.hpp. Link VmmGraph::torch. Unlike torch.hpp, this header includes
// torch's headers (tensors).
//
//   using namespace vmmgraph::engine;
//   GraphInputs inputs({Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)}), ...},
//                      buckets, {at::kCUDA});
//   // body(Recorder&): the model on inputs.tokens(), ...
//   GraphExecutor executor(arena, inputs, body, options);
//   executor.warm_up();
//   // each step; eager(): the step without a graph
//   executor.run({key, phase}, {{names::tokens, tokens}, ...}, eager, stream);
//
// Errors are vmmgraph::Error, thrown before any change unless noted. One thread at a time per
// object.

#ifndef VMMGRAPH_ENGINE_HPP
#define VMMGRAPH_ENGINE_HPP

#include <chrono>
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

// Modes, phases, reasons and decisions of dispatch.hpp.
using dispatch::Captures;
using dispatch::Decision;
using dispatch::Mode;
using dispatch::Phase;
using dispatch::Reason;
// For tensors which a body makes and a runner keeps: see Recorder::eager.
using torch::KeptScope;
// Streamed units: see ExecutorOptions::ring.
using vmmgraph::Ring;
using vmmgraph::UnitScope;

// A step to run.
struct Step {
    // The required shape. Exceeds the values if ranks pad to their largest: the rest is padding.
    Key key;
    // Work of the sequences. The default is never a decode: by default no full graph runs the step.
    Phase phase = Phase::mixed;
    // Whether a graph could hold the step (sequence lengths, features, sampling).
    bool capturable = true;
    // Parameters of the engine for eager work between pieces; must live until the launch.
    const void* params = nullptr;
};

// Outcome of a step.
struct Ran {
    Mode mode = Mode::eager;
    Reason reason = Reason::mode_eager;
    // The padded shape; zeros for an eager step.
    Key bucket;
};

// Passed to the body of a graph while the graph is recorded.
class VMMGRAPH_API Recorder {
public:
    // Eager work of a step, on torch's current stream. `tensors` are those passed to eager(), at
    // the same addresses.
    using Runner = std::function<void(const Step& step, at::TensorList tensors)>;

    // Runs work which no graph can hold, such as attention over lengths known on the host. A
    // piecewise graph ends here and another begins; each replay calls `runner(step, tensors)` in
    // between. A full graph records the runner, without params. An eager run before the capture
    // calls the runner at once.
    //
    // Tensors of the recording are released with the body's last reference, and their memory is
    // reused after the runner. Other tensors (host, general memory) are held until the graph is
    // destroyed; undefined ones are passed as they are. A recorded tensor owned by the runner keeps
    // private pages until then; if allocated in a KeptScope, only its bytes of common pages. Only
    // the body can mark such a tensor. A runner's own allocations are torch's memory.
    void eager(at::TensorList tensors, Runner runner);
    // Returns the recorder of this thread's current recording, or of an eager run before a
    // recording; else null. Lets attention deep in a model find its capture.
    [[nodiscard]] static Recorder* current() noexcept;
    // Acquires a unit of ExecutorOptions::ring until the end of the scope, on torch's current
    // stream, which must be the same at the end; a layer's kernels lie between. A capture takes
    // each streamed unit once, in order of use, and its copies belong to the graph. In an eager run
    // and on a CPU, units come in any order, and events wait for copies. Throws Error
    // (VMMGRAPH_ERROR_WRONG_STATE) without a ring and in a piecewise graph, whose runners use
    // GraphExecutor::streamed(); otherwise as UnitScope.
    [[nodiscard]] UnitScope streamed(std::size_t unit);
    // As torch::CaptureScope::last_kernel(), for ExecutorOptions::update; null without a capture.
    [[nodiscard]] void* last_kernel();
    // The step of this recording or eager run; host values read by the body are fixed in the graph.
    // In warm_up() and between_steps(): a step of padding, without params.
    [[nodiscard]] const Step& step() const noexcept { return *step_; }
    // Returns true during the recording, false in an eager run before
    // (ExecutorOptions::eager_runs). On a CPU every replay is a recording.
    [[nodiscard]] bool recording() const noexcept { return recording_; }
    // Full or piecewise.
    [[nodiscard]] Mode mode() const noexcept { return mode_; }
    // The recorded shape, which is the bucket of the inputs' getters.
    [[nodiscard]] const Key& bucket() const noexcept { return bucket_; }

private:
    friend class GraphExecutor;
    Recorder(Mode mode, const Key& bucket, const Step& step, Ring* ring, c10::Device device)
        : mode_(mode), bucket_(bucket), step_(&step), ring_(ring), device_(device) {}
    struct Piece {
        Runner runner;
        std::vector<at::Tensor> tensors;
    };
    // Runs a body with this recorder as current().
    void call(const std::function<void(Recorder&)>& body);

    Mode mode_;
    Key bucket_;
    const Step* step_;
    Ring* ring_;
    c10::Device device_;
    // Null without a capture: in an eager run, and on a CPU, where the body itself is the replay.
    torch::CaptureScope* scope_ = nullptr;
    bool recording_ = false;
    std::vector<Piece> pieces_;
};

// Handling of failed captures.
enum class OnFailure : std::int32_t {
    // The step and all later steps of its bucket run eagerly, until forgive().
    eager,
    // The step throws the capture's error, and the next one of its bucket tries again. So no rank
    // departs from its decision while others wait in a collective.
    throws,
};

// Work of an executor under the engine's guard.
enum class Work : std::int32_t {
    // Copy of inputs, eager runs and a capture.
    capture,
    // Copy of inputs and a replay.
    replay,
};

// Options of an executor: decisions (all of DispatcherOptions; 0 is no limit), captures and
// eviction. Its buckets must be buckets of the inputs. Beyond most_graphs, the least recently used
// graph is evicted for a new one.
struct ExecutorOptions : dispatch::DispatcherOptions {
    // Unlike with a plain dispatcher, a decode without a full graph is eager by default: attention
    // between the pieces of a piecewise graph often supports prefills only. If piecewise graphs run
    // decodes too, add Mode::piecewise as the second mode.
    ExecutorOptions() {
        modes[static_cast<std::size_t>(Phase::decode)] = {Mode::full, Mode::eager};
    }

    // Budget of the arena's physical memory in bytes. If a capture needs more, the least recently
    // used graphs are evicted and the capture is retried. The end of a capture may need a few extra
    // pages.
    std::uint64_t most_bytes = 0;
    // Captures::behind: file with the histogram of the traffic. The executor reads the file when
    // created, so that graphs of earlier traffic are captured first, and replaces the file
    // atomically when destroyed. An unreadable file is logged and ignored. Empty: no file.
    // `vmmgraph plan FILE` prints a plan for the file.
    std::string histogram{};
    // Captures::behind: records graphs on a thread of the executor while steps go on, so that no
    // step waits for a recording. The body is then called on this thread too, under these rules:
    //  - The body changes no state which a step, `eager` or a hook uses, and takes no lock which a
    //    step holds for long. It reads inputs and outputs by GraphInputs::get() and its shorthands,
    //    which return the recorded bucket on this thread; actual() and host() throw Error there.
    //  - `before_launch` is called on the thread of the steps, before the recording, and its
    //    results for one bucket are not overwritten by a step of a different bucket.
    //  - `guard` is called on this thread, for the recording.
    //  - No graph draws random numbers: torch resets its generator at the begin of a capture.
    //  - Steps use other streams than `capture_stream`; launch() throws Error otherwise.
    //  - The engine waits for streams and events, never for the whole device: a device wait
    //    (cudaDeviceSynchronize) breaks the recording, which counts as a failed capture.
    // The thread begins with its own cuBLAS and cuDNN handles, which a capture cannot make. If the
    // body uses other libraries with state for each thread, set `eager_runs`: these runs are on the
    // thread too, and the thread of the steps waits for each. A failure is reported by a later
    // between_steps(). With several ranks, graphs are recorded on the thread of the steps. Throws
    // Error with `ring`, and up to torch 2.9.
    bool record_beside = false;
    // Stream of every capture (a cudaStream_t, not the default stream); null: one of torch's;
    // with `record_beside` a stream which torch gives to nobody.
    void* capture_stream = nullptr;
    torch::CaptureOptions capture;
    // Ring of units streamed from the host in every full graph (ring.hpp). Bodies use
    // Recorder::streamed(); eager steps and runners of piecewise graphs use
    // GraphExecutor::streamed(). All share the same slots, in any order of steps. Must be on the
    // inputs' device and outlive the executor. `capture.ring_capture` holds the capture options;
    // `capture.ring` must stay null.
    Ring* ring = nullptr;
    // Limits of the executor's own pool of executables, used if `capture` names none; 0: no limit.
    // Beyond the limits, the executable of the least recently used graph is destroyed, and
    // instantiated again for its next step (docs/performance.md).
    torch::ExecutableLimits executables{};
    // Instantiates likely next graphs on a thread: the neighbours of the running one, and its last
    // successor.
    bool instantiate_ahead = true;
    OnFailure on_failure = OnFailure::eager;
    // Number of runs of the body on the capture stream before its capture, over the step's inputs,
    // to initialize kernels, cuDNN and NCCL. The body must tolerate several runs per step. In
    // warm_up() and between_steps() the inputs are padding, and runners see no params.
    std::uint32_t eager_runs = 0;
    // Places eager steps and the runs before captures in the arena's memory, each in a
    // torch::EagerScope: a replay of the arena, with the scope's refusals thrown by launch().
    // Tensors left alive keep their pages from the graphs. Work between pieces is excluded, since
    // its graph holds the replay slot.
    bool eager_in_arena = false;
    // Peak bytes of an eager step's tensors, for arenas which lend pages: see torch::EagerScope. If
    // empty, and for runs before captures: every page ever used by eager work.
    std::function<std::uint64_t(const Step& step)> eager_bytes;
    // For ranks which must run every step the same way: an all-gather of the engine. prepare()
    // calls it once per step with this rank's decision; the result, all ranks' decisions in any
    // order, goes to agree(). The agreed decision is carried out, or launch() throws, whatever
    // on_failure says. Not called by warm_up(), which all ranks must call alike, nor for a decision
    // passed to prepare(). With Captures::behind the decisions also agree on the graph of the next
    // between_steps(), so an engine's all-gather must carry all fields.
    std::function<std::vector<Decision>(const Decision& mine)> exchange;
    // Called once for every step run by a graph, after the copy of its inputs and before its
    // capture or replay, with the launch's stream as torch's current stream. For planning kernels
    // from the padded values (GraphInputs::host). Work given to the stream is done before the graph
    // runs. In warm_up() and between_steps() the step has no params; its phase is Phase::decode for
    // full and Phase::mixed for piecewise graphs.
    std::function<void(const Key& bucket, const Step& step)> before_launch;
    // Called once for every step run by a graph, just before its replay, with `update_stream` as
    // torch's current stream. Replaces captured values by this step's, such as kernel parameters
    // (Recorder::last_kernel(), and cudaGraphExecKernelNodeSetParams on graph->exec(piece)). The
    // graph is null on a CPU. Must not replay.
    std::function<void(const Key& bucket, const Step& step, torch::CapturedGraph* graph)> update;
    // Separate stream (a cudaStream_t) for device work of `update`: after the graph's previous
    // replay, before this one, concurrent with all other work. Null: the step's stream. Work which
    // the graph itself awaits (an event recorded with cudaEventRecordExternal semantics) may go to
    // any stream of the engine instead.
    void* update_stream = nullptr;
    // Called before the work; the result, such as a lock, is held while the work goes on. For
    // engines whose captures need the device alone, while replays may overlap. A capture's result
    // is released before its replay's is requested. Not called for eager steps.
    std::function<std::shared_ptr<void>(Work work)> guard;
};

// Counters of an executor. `graphs` counts existing graphs; `evictions` includes clear().
using ExecutorStats = dispatch::DispatcherStats;

// Graph executor: chooses the graph of each step, captures on demand or ahead, caches by shape,
// evicts, and runs other steps eagerly, with a reason.
class VMMGRAPH_API GraphExecutor {
public:
    // Body of every graph: reads the inputs' getters, writes outputs, keeps no tensor. Called while
    // a graph is recorded.
    using Body = std::function<void(Recorder& recorder)>;

    // `inputs` must outlive the executor. `arena` is null for inputs on a CPU, where nothing is
    // captured and a replay calls `body`. Throws Error for a bucket missing in the inputs, and for
    // an arena or a capture stream of another device.
    GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, GraphInputs& inputs, Body body,
                  const ExecutorOptions& options);
    GraphExecutor(const GraphExecutor&) = delete;
    GraphExecutor& operator=(const GraphExecutor&) = delete;
    ~GraphExecutor();

    // Captures every bucket within the limits, largest first. Returns the number of graphs.
    // Failures are handled as in run(), except that a graph without memory is left to a later step
    // (with OnFailure::throws: throws).
    std::size_t warm_up();

    // Captures::behind: works on missing graphs for about `slice`, and returns the number of graphs
    // still to capture. The graphs are those of past steps and of the histogram's file. Their order
    // is a plan's for this traffic and the limits (plan.hpp), most used first; most_graphs and
    // most_bytes evict only graphs used less. A finished graph runs later steps. Until then a
    // larger graph stands in (`stand_in`), or steps run eagerly. After a failed capture the bucket
    // stays eager, as by on_failure.
    //
    // Call between launch() and the next prepare(), on the thread of the steps, best while the
    // device still runs the step: a capture is host work. Kernels that read the step's outputs must
    // already be on the step's stream. Afterwards the outputs, actual() and host() are undefined.
    //
    // A call does one unit of work: an eager run of the body (`eager_runs`), or a capture with all
    // its pieces. Further units follow while they are expected to end within `slice`. So a step
    // waits for at most the longer of `slice` and one unit. A slice of 0 does nothing. A thread
    // instantiates the graphs, and records them too with `record_beside`. A call returns while the
    // thread works, unless the work is expected to end within `slice`. So with `record_beside` a
    // step waits for at most `slice`, except for eager runs. clear(), warm_up() and the destructor
    // wait for the thread.
    //
    // With several ranks (`exchange`, or agree()), all ranks must call alike, with a slice above 0:
    // each call then does one unit of the graph agreed on by the last step. Throws Error
    // (VMMGRAPH_ERROR_WRONG_STATE) without Captures::behind and while a step is prepared; with
    // OnFailure::throws, the capture's error. Errors of hooks propagate.
    std::size_t between_steps(std::chrono::microseconds slice);
    // Writes the histogram's file now. Throws Error if the file cannot be written, and
    // (VMMGRAPH_ERROR_WRONG_STATE) without `histogram`.
    void save_histogram() const;

    // Runs a step on `stream`: pads to a bucket and replays its graph, captured first if necessary;
    // or calls `eager`, with `stream` as torch's current stream. Outputs of a graph are the inputs'
    // getters. A failed capture is logged and counted, and follows on_failure. Throws Error for
    // values which do not fit; errors of hooks, runners, `eager` and replays propagate.
    Ran run(const Step& step, c10::ArrayRef<NamedValue> values, const std::function<void()>& eager,
            void* stream) {
        prepare(step, values);
        return launch(eager, stream);
    }
    // The two halves of run(). prepare() is host work only, may overlap the previous step, and
    // returns the plan of launch(), which holds unless its capture fails.
    Ran prepare(const Step& step, c10::ArrayRef<NamedValue> values);
    Ran launch(const std::function<void()>& eager, void* stream);

    // For ranks which must run a step the same way, if ExecutorOptions::exchange is not enough:
    // decide() on each, agree() on all decisions, prepare() with the result, launch().
    //
    // Returns this executor's decision for a step, as plain data, and keeps the decision for the
    // step's prepare(). The counters include this decision; an imposed one counts in addition
    // (ExecutorStats::imposed, and by mode in prometheus()).
    Decision decide(const Step& step);
    // Returns the decision which all ranks can carry out: the least of their modes, in the largest
    // bucket of this mode; eager if no bucket covers the others. `capture` is set if any rank would
    // capture or decided otherwise: ranks which have the graph then repeat its eager runs, for
    // collectives inside.
    [[nodiscard]] static Decision agree(c10::ArrayRef<Decision> ranks);
    // prepare() with an agreed decision, which is carried out, or launch() throws the capture's
    // error, whatever on_failure says. Throws Error for a mode and bucket without a graph here, and
    // for a bucket too small for the values.
    Ran prepare(const Step& step, c10::ArrayRef<NamedValue> values, const Decision& agreed);

    // As Recorder::streamed(), for the `eager` of a step. Switching between eager steps, graphs and
    // the runs before captures needs no further call.
    [[nodiscard]] UnitScope streamed(std::size_t unit);

    // Announces a step, such as a newly admitted prompt: a thread instantiates its captured graph.
    void expect(const Step& step);
    // Statistics of the graphs' executables; zeros on a CPU and up to torch 2.7.
    [[nodiscard]] torch::ExecutableStats executables() const;

    // Destroys all graphs after their replays and frees their pages.
    void clear();
    // Lets buckets with failed captures be captured again.
    void forgive();
    // Reason of the last failed capture; empty if none failed.
    [[nodiscard]] const std::string& last_failure() const noexcept;

    [[nodiscard]] ExecutorStats stats() const;
    // Returns the number of steps with this mode and reason.
    [[nodiscard]] std::uint64_t steps(Mode mode, Reason reason) const;
    // Returns the number of eager steps which a graph should have run: not captured, being
    // captured, no room, failed.
    [[nodiscard]] std::uint64_t unplanned() const;
    // Returns all counters in Prometheus's text format, with these labels on every sample.
    [[nodiscard]] std::string prometheus(
        const std::vector<std::pair<std::string, std::string>>& labels = {}) const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace vmmgraph::engine

#endif  // VMMGRAPH_ENGINE_HPP
