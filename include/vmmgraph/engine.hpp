// VmmGraph for engines over libtorch: persistent inputs of graphs, and an executor that captures, caches and replays graphs by shape.
// Link VmmGraph::torch. Unlike torch.hpp this header includes torch's own (tensors).
//
//   using namespace vmmgraph::engine;
//   CudaGraphPersistentParam inputs({Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)}), ...}, buckets, {at::kCUDA});
//   GraphExecutor executor(arena, inputs, record, options);          // record(Recorder&, bucket): the model on inputs.tokens(), ...
//   executor.warm_up();
//   each step: executor.run({key, phase}, {tokens, positions, ...}, eager, stream);       // eager(): the step without a graph
//
// Errors are vmmgraph::Error, thrown before anything has changed unless a function says otherwise. An object is for one thread at a time.

#ifndef VMMGRAPH_ENGINE_HPP
#define VMMGRAPH_ENGINE_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "dispatch.hpp"
#include "torch.hpp"

namespace vmmgraph::engine {

// Shapes, modes and reasons are those of dispatch.hpp.
using dispatch::Axis;
using dispatch::bucket_sizes;
using dispatch::Key;
using dispatch::Mode;
using dispatch::Phase;
using dispatch::Reason;
using dispatch::uniform_decode;
// For what a body makes and a runner keeps: see Recorder::eager.
using torch::KeptScope;

// How long a dimension of an input is.
struct Extent {
    std::int32_t kind = VMMGRAPH_EXTENT_FIXED;
    Axis axis = Axis::tokens;
    std::uint32_t times = 1;
    std::uint32_t plus = 0;

    [[nodiscard]] static Extent fixed(std::uint32_t length) { return {VMMGRAPH_EXTENT_FIXED, Axis::tokens, length, 0}; }
    // `times` the bucket's size along the axis, plus `plus`.
    [[nodiscard]] static Extent along(Axis axis, std::uint32_t times = 1, std::uint32_t plus = 0) {
        return {VMMGRAPH_EXTENT_ALONG, axis, times, plus};
    }
    // At most so long, as each step needs it; the first dimension only. The rest is neither padded nor copied.
    [[nodiscard]] static Extent up_to(std::uint32_t length) { return {VMMGRAPH_EXTENT_UP_TO, Axis::tokens, length, 0}; }
};

// Who writes an input, and whether it is one.
enum class Role : std::int32_t {
    // From host memory: travels with the others in one copy. A tensor of the device is taken too, by a copy of its own kind.
    host_input = VMMGRAPH_ROLE_HOST_INPUT,
    // From the device.
    device_input = VMMGRAPH_ROLE_DEVICE_INPUT,
    // Written by the graph.
    output = VMMGRAPH_ROLE_OUTPUT,
};

// What stands where a step is smaller than its bucket.
struct Pad {
    std::int32_t rule = VMMGRAPH_PAD_ZERO;
    c10::Scalar element = 0;

    [[nodiscard]] static Pad zero() { return {}; }
    // The nearest element that the step has; 0 if it has none.
    [[nodiscard]] static Pad repeat_last() { return {VMMGRAPH_PAD_REPEAT_LAST, 0}; }
    [[nodiscard]] static Pad value(c10::Scalar element) { return {VMMGRAPH_PAD_VALUE, element}; }
};

// An input or output, declared once. Its largest shape is the one in the largest bucket.
struct Input {
    std::string name;
    c10::ScalarType dtype = c10::ScalarType::Int;
    std::vector<Extent> shape;
    Role role = Role::host_input;
    Pad pad;

    [[nodiscard]] static Input host(std::string_view name, c10::ScalarType dtype, std::vector<Extent> shape, Pad pad = {}) {
        return {std::string(name), dtype, std::move(shape), Role::host_input, pad};
    }
    [[nodiscard]] static Input device(std::string_view name, c10::ScalarType dtype, std::vector<Extent> shape, Pad pad = {}) {
        return {std::string(name), dtype, std::move(shape), Role::device_input, pad};
    }
    [[nodiscard]] static Input output(std::string_view name, c10::ScalarType dtype, std::vector<Extent> shape) {
        return {std::string(name), dtype, std::move(shape), Role::output, {}};
    }
};

// The names that CudaGraphPersistentParam has getters for; any other is reached by get().
namespace names {
inline constexpr std::string_view tokens = "tokens";
inline constexpr std::string_view positions = "positions";
inline constexpr std::string_view new_cache_slots = "new_cache_slots";
inline constexpr std::string_view block_tables = "block_tables";
inline constexpr std::string_view q_seq_lens = "q_seq_lens";
inline constexpr std::string_view kv_seq_lens = "kv_seq_lens";
inline constexpr std::string_view paged_kv_indptr = "paged_kv_indptr";
inline constexpr std::string_view paged_kv_indices = "paged_kv_indices";
inline constexpr std::string_view paged_kv_last_page_len = "paged_kv_last_page_len";
inline constexpr std::string_view embeddings = "embeddings";
inline constexpr std::string_view hidden_states = "hidden_states";
inline constexpr std::string_view aux_hidden_states = "aux_hidden_states";
}  // namespace names

// A step's data for one input: a tensor, or host memory, which must live until prepare() or update() returns. Contiguous.
class Value {
public:
    // Nothing: the whole input is padding.
    Value() = default;
    Value(const at::Tensor& tensor) : tensor_(tensor) {}  // NOLINT: an argument list of tensors is the usual case
    template <class T>
    Value(const std::vector<T>& elements)  // NOLINT
        : data_(elements.data()), dtype_(c10::CppTypeToScalarType<T>::value), rank_(1), shape_{static_cast<std::uint32_t>(elements.size())} {}
    // At most four dimensions.
    template <class T>
    Value(const T* elements, std::initializer_list<std::uint32_t> shape)
        : data_(elements), dtype_(c10::CppTypeToScalarType<T>::value), rank_(static_cast<int>(shape.size())) {
        std::copy_n(shape.begin(), std::min(shape.size(), shape_.size()), shape_.begin());
    }

private:
    friend class CudaGraphPersistentParam;
    at::Tensor tensor_;
    const void* data_ = nullptr;
    c10::ScalarType dtype_ = c10::ScalarType::Undefined;
    // -1: a tensor, or nothing.
    int rank_ = -1;
    std::array<std::uint32_t, 4> shape_{};
};

// Where the inputs of graphs live.
struct ParamOptions {
    // Of the arena. A CPU device serves tests: the same checks, padding and views, with memory copies.
    c10::Device device{c10::DeviceType::CUDA, 0};
    // Of every input, in bytes: a power of two from 256 to 2 MiB.
    std::uint32_t alignment = 512;
};

// Named inputs and outputs of graphs at fixed addresses in one arena, which is as large as the largest bucket's. Every bucket packs its
// own sizes, so a view belongs to its bucket: the getters' is the one of the last commit() or select().
class VMMGRAPH_API CudaGraphPersistentParam {
public:
    // Throws Error for a declaration that cannot be (a name twice, an axis that a bucket lacks, ...), and what torch throws for memory.
    CudaGraphPersistentParam(std::vector<Input> inputs, const std::vector<Key>& buckets, const ParamOptions& options = {});
    CudaGraphPersistentParam(const CudaGraphPersistentParam&) = delete;
    CudaGraphPersistentParam& operator=(const CudaGraphPersistentParam&) = delete;
    // Waits for what the stream of the last commit holds.
    ~CudaGraphPersistentParam();

    // Checks a step's values, in the order of the declared inputs (outputs left out; fewer: the last are padding), and packs those of the
    // host into staging memory, padded to the bucket. Host work only: the step before may still run. A second prepare() replaces the first.
    // Throws Error for another dtype, device or rank, for more than the bucket holds, and for no bucket.
    void prepare(const Key& bucket, c10::ArrayRef<Value> values);
    // Brings what was prepared to the device, in order on `stream` (a cudaStream_t): one copy for all host inputs; for inputs on the
    // device one launch for their data and one for their zeros. They must be ready on the stream. Behind a commit on another stream it
    // waits, so that stream must still exist. Throws Error if nothing was prepared or the stream is under capture.
    void commit(void* stream);
    // Both.
    void update(const Key& bucket, c10::ArrayRef<Value> values, void* stream) {
        prepare(bucket, values);
        commit(stream);
    }
    // Lets the getters speak of a bucket, whose contents are undefined; for a capture.
    void select(const Key& bucket);
    // The bucket of the getters.
    [[nodiscard]] const Key& bucket() const;

    // The number of an input or output, by name; throws Error if there is none.
    [[nodiscard]] std::size_t find(std::string_view name) const;
    [[nodiscard]] bool has(std::string_view name) const noexcept;
    [[nodiscard]] const std::vector<Input>& inputs() const noexcept;

    // The leading `rows` of an input or output in the getters' bucket, 0: all. No memory is allocated, and where `rows` are those of
    // the last call no tensor is made. Throws Error for more rows than there are.
    [[nodiscard]] const at::Tensor& get(std::size_t input, std::int64_t rows = 0) const;
    [[nodiscard]] const at::Tensor& get(std::string_view name, std::int64_t rows = 0) const { return get(find(name), rows); }
    // An input as large as the last step gave it.
    [[nodiscard]] at::Tensor actual(std::size_t input) const;
    [[nodiscard]] at::Tensor actual(std::string_view name) const { return actual(find(name)); }

    [[nodiscard]] const at::Tensor& tokens(std::int64_t n = 0) const { return get(names::tokens, n); }
    [[nodiscard]] const at::Tensor& positions(std::int64_t n = 0) const { return get(names::positions, n); }
    [[nodiscard]] const at::Tensor& new_cache_slots(std::int64_t n = 0) const { return get(names::new_cache_slots, n); }
    [[nodiscard]] const at::Tensor& block_tables(std::int64_t b = 0) const { return get(names::block_tables, b); }
    [[nodiscard]] const at::Tensor& q_seq_lens(std::int64_t n = 0) const { return get(names::q_seq_lens, n); }
    [[nodiscard]] const at::Tensor& kv_seq_lens(std::int64_t n = 0) const { return get(names::kv_seq_lens, n); }
    // Of so many sequences: one row more.
    [[nodiscard]] const at::Tensor& paged_kv_indptr(std::int64_t b = 0) const { return get(names::paged_kv_indptr, b > 0 ? b + 1 : 0); }
    [[nodiscard]] const at::Tensor& paged_kv_indices(std::int64_t n = 0) const { return get(names::paged_kv_indices, n); }
    [[nodiscard]] const at::Tensor& paged_kv_last_page_len(std::int64_t b = 0) const { return get(names::paged_kv_last_page_len, b); }
    [[nodiscard]] const at::Tensor& embeddings(std::int64_t n = 0) const { return get(names::embeddings, n); }
    [[nodiscard]] const at::Tensor& hidden_states(std::int64_t n = 0) const { return get(names::hidden_states, n); }
    [[nodiscard]] const at::Tensor& aux_hidden_states(std::int64_t n = 0) const { return get(names::aux_hidden_states, n); }

    // Bytes of the device arena, of each of the two staging buffers, and host-to-device copies so far.
    [[nodiscard]] std::size_t arena_bytes() const noexcept;
    [[nodiscard]] std::size_t staging_bytes() const noexcept;
    [[nodiscard]] std::uint64_t copies() const noexcept;
    // The device of the arena.
    [[nodiscard]] c10::Device device() const noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

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
    GraphExecutor(std::shared_ptr<SharedVmmAllocator> arena, CudaGraphPersistentParam& inputs, Body body, const ExecutorOptions& options);
    GraphExecutor(const GraphExecutor&) = delete;
    GraphExecutor& operator=(const GraphExecutor&) = delete;
    ~GraphExecutor();

    // Captures every bucket, largest first, while limits allow; how many graphs are there then. What fails is as in run().
    std::size_t warm_up();

    // Runs a step on `stream`: pads it to a bucket and replays its graph, capturing it first if need be; or calls `eager`, with that
    // stream as torch's current one. Outputs of a graph are those of the inputs' getters. A failed capture is logged, counted, and the
    // bucket runs eagerly until forgive(). Throws Error for values that do not fit, and what the runners, `eager` and replays throw.
    Ran run(const Step& step, c10::ArrayRef<Value> values, const std::function<void()>& eager, void* stream) {
        prepare(step, values);
        return launch(eager, stream);
    }
    // The two halves of run(): the first is host work only, may be done while the step before runs, and returns what the second will do
    // unless its capture fails.
    Ran prepare(const Step& step, c10::ArrayRef<Value> values);
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
