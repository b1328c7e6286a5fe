// VmmGraph's persistent inputs of graphs over libtorch: what a step brings, checked, padded to a graph's shape, at addresses that stay.
// Link VmmGraph::torch. engine.hpp builds on it.
//
//   using namespace vmmgraph::engine;
//   GraphInputs inputs({Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)}), ...}, buckets, {at::kCUDA});
//   inputs.update(bucket, {{names::tokens, tokens}, {names::positions, positions}}, stream);
//
// Errors are vmmgraph::Error, thrown before anything has changed unless a function says otherwise. An object is for one thread at a time.

#ifndef VMMGRAPH_INPUTS_HPP
#define VMMGRAPH_INPUTS_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
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

namespace vmmgraph::engine {

// Shapes are those of dispatch.hpp.
using dispatch::Axis;
using dispatch::bucket_sizes;
using dispatch::Key;
using dispatch::uniform_decode;

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
    // At most so long, as each step needs it; the first dimension only. The rest is not padded: what stands there is undefined.
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
    // Whether the engine chose the rule. Zeros that nobody chose are refused where they are often wrong: GraphInputs().
    bool chosen = false;

    [[nodiscard]] static Pad zero() { return {VMMGRAPH_PAD_ZERO, 0, true}; }
    // The nearest element that the step has; 0 if it has none.
    [[nodiscard]] static Pad repeat_last() { return {VMMGRAPH_PAD_REPEAT_LAST, 0, true}; }
    [[nodiscard]] static Pad value(c10::Scalar element) { return {VMMGRAPH_PAD_VALUE, element, true}; }
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
    // An output whose dtype and width only the first step shows: its rows lie along the tokens, and all else is as in the first tensor that
    // GraphInputs::set() gets for it. Its memory is made then, beside the arena.
    [[nodiscard]] static Input output(std::string_view name) {
        return {std::string(name), c10::ScalarType::Undefined, {}, Role::output, {}};
    }
};

// The names that GraphInputs has getters for; any other is reached by get().
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

// A step's data for one input: a tensor, or host memory. Host memory must live until prepare() or update() returns; a tensor of the device
// is held until its copy has run at least, so the caller may drop it at once. On the host contiguous; on the device with any strides.
class Value {
public:
    // Nothing: the whole input is padding, as for an input that a step does not name.
    Value() = default;
    // An undefined tensor is refused: an engine that named the input meant to give it something.
    Value(const at::Tensor& tensor) : tensor_(tensor), is_tensor_(true) {}  // NOLINT: an argument list of tensors is the usual case
    template <class T>
    Value(const std::vector<T>& elements)  // NOLINT
        : data_(elements.data()),
          dtype_(c10::CppTypeToScalarType<T>::value),
          rank_(1),
          shape_{static_cast<std::uint32_t>(elements.size())} {}
    // At most four dimensions.
    template <class T>
    Value(const T* elements, std::initializer_list<std::uint32_t> shape)
        : data_(elements), dtype_(c10::CppTypeToScalarType<T>::value), rank_(static_cast<int>(shape.size())) {
        std::copy_n(shape.begin(), std::min(shape.size(), shape_.size()), shape_.begin());
    }

private:
    friend class GraphInputs;
    at::Tensor tensor_;
    bool is_tensor_ = false;
    const void* data_ = nullptr;
    c10::ScalarType dtype_ = c10::ScalarType::Undefined;
    // -1: a tensor, or nothing.
    int rank_ = -1;
    std::array<std::uint32_t, 4> shape_{};
};

// A step's data for the input of that name. The name must live as long as the call that gets it.
struct NamedValue {
    std::string_view name;
    Value value;
};

// How inputs of the host come to the device.
enum class Bring : std::int32_t {
    // By a copy, and by a kernel while a ring of the device has units that stream (ring.hpp): a copy would wait behind all that it copies.
    automatic,
    copy,
    // By a kernel of torch's that reads pinned memory.
    kernel,
};

// Where the inputs of graphs live.
struct InputsOptions {
    // Of the arena. A CPU device serves tests: the same checks, padding and views, with memory copies.
    c10::Device device{c10::DeviceType::CUDA, 0};
    // Of every input, in bytes: a power of two from 256 to 2 MiB.
    std::uint32_t alignment = 512;
    Bring bring = Bring::automatic;
};

// Named inputs and outputs of graphs at fixed addresses in one arena, which is as large as the largest bucket's. Every bucket packs its
// own sizes, so a view belongs to its bucket: the getters' is the one of the last commit() or select().
class VMMGRAPH_API GraphInputs {
public:
    static constexpr std::int64_t all_rows = -1;

    // Throws Error for a declaration that cannot be (a name twice, an axis that a bucket lacks, ...), and what torch throws for memory. Throws
    // Error too for `new_cache_slots`, and for an input with an element more than there are sequences, such as cumulative lengths, whose
    // declaration chooses no padding: slot 0 may be a sequence's, and lengths that fall are none.
    GraphInputs(std::vector<Input> inputs, const std::vector<Key>& buckets, const InputsOptions& options = {});
    GraphInputs(const GraphInputs&) = delete;
    GraphInputs& operator=(const GraphInputs&) = delete;
    // Waits for what the stream of the last commit holds; it must still exist, unless it was marked. While it is captured nobody can wait: the
    // memory stays then until other inputs are made or go and it can be asked, and for good if the stream is not one of torch's by name, which
    // may be gone by then.
    ~GraphInputs();

    // Checks a step's values and packs those of the host into staging memory, padded to the bucket along every dimension. An input that is
    // not among them is padding; they are found fastest in the order of the declaration. Host work only: the step before may still run. A
    // second prepare() replaces the first. Throws Error for a name that no input has or that comes twice, for another dtype, device or
    // rank, for more than the bucket holds, for a value that is empty along an axis on which the step has some (the bucket, if no executor knows the step), for an undefined tensor, and for no bucket.
    void prepare(const Key& bucket, c10::ArrayRef<NamedValue> values);
    // Brings what was prepared to the device, in order on `stream` (a cudaStream_t): one copy for all host inputs (InputsOptions::bring); for inputs on the device
    // one launch for their zeros and one for the data of all that are as wide as their place; one for each other. They must be ready on the
    // stream. Behind a commit on another stream, and all that was given to that since, it waits: that stream must still exist, unless it was
    // marked. Throws Error if nothing was prepared or if either stream is under capture; what was prepared may be committed later.
    void commit(void* stream);
    // Puts a mark behind all that the stream of the last commit has: it is not needed any more, and may be captured or destroyed. A GraphExecutor
    // does so behind each step on a stream that is not torch's own. Throws Error while it is captured.
    void mark();
    // Both.
    void update(const Key& bucket, c10::ArrayRef<NamedValue> values, void* stream) {
        prepare(bucket, values);
        commit(stream);
    }
    // Lets the getters speak of a bucket, whose contents are undefined; for a capture.
    void select(const Key& bucket);
    // The bucket of the getters.
    [[nodiscard]] const Key& bucket() const;

    // The number of an input or output, by name; throws Error if there is none. Outputs declared by their names alone come last.
    [[nodiscard]] std::size_t find(std::string_view name) const;
    [[nodiscard]] bool has(std::string_view name) const noexcept;
    // Outputs declared by their names alone left out.
    [[nodiscard]] const std::vector<Input>& inputs() const noexcept;

    // The leading `rows` of an input or output in the getters' bucket; negative: all. Rows lie along the first dimension that is not fixed:
    // of positions [3, tokens] they are columns. No memory is allocated, and where `rows` are those of the last call no tensor is made.
    // Throws Error for more rows than there are, and for an output of which nothing is known before the first set().
    [[nodiscard]] const at::Tensor& get(std::size_t input, std::int64_t rows = all_rows) const;
    [[nodiscard]] const at::Tensor& get(std::string_view name, std::int64_t rows = all_rows) const { return get(find(name), rows); }
    // Copies a body's result into the leading rows of an output, on torch's current stream. Throws Error for an input, and for another shape
    // than the output's.
    void set(std::size_t output, const at::Tensor& value);
    void set(std::string_view name, const at::Tensor& value) { set(find(name), value); }
    // Whether an output declared by its name alone has memory, that is, whether a body has set it; true for every other.
    [[nodiscard]] bool is_set(std::string_view name) const;
    // An input as large as the last step gave it.
    [[nodiscard]] at::Tensor actual(std::size_t input) const;
    [[nodiscard]] at::Tensor actual(std::string_view name) const { return actual(find(name)); }
    // A host input as the last prepare() padded it, on the host: what kernels are planned from. In the shape of its bucket; one that is
    // up_to() a length, as long as the step has it. To be read, until the next prepare(). Throws Error before the first prepare(), behind
    // one that threw, and for what was given on the device.
    [[nodiscard]] at::Tensor host(std::size_t input) const;
    [[nodiscard]] at::Tensor host(std::string_view name) const { return host(find(name)); }

    [[nodiscard]] const at::Tensor& tokens(std::int64_t n = all_rows) const { return get(names::tokens, n); }
    [[nodiscard]] const at::Tensor& positions(std::int64_t n = all_rows) const { return get(names::positions, n); }
    [[nodiscard]] const at::Tensor& new_cache_slots(std::int64_t n = all_rows) const { return get(names::new_cache_slots, n); }
    [[nodiscard]] const at::Tensor& block_tables(std::int64_t b = all_rows) const { return get(names::block_tables, b); }
    // Where they are cumulative, they have a row more than there are sequences, and so has what is asked for.
    [[nodiscard]] const at::Tensor& q_seq_lens(std::int64_t n = all_rows) const { return get(names::q_seq_lens, n); }
    [[nodiscard]] const at::Tensor& kv_seq_lens(std::int64_t n = all_rows) const { return get(names::kv_seq_lens, n); }
    // Of so many sequences: one row more.
    [[nodiscard]] const at::Tensor& paged_kv_indptr(std::int64_t b = all_rows) const {
        return get(names::paged_kv_indptr, b < 0 ? b : b + 1);
    }
    [[nodiscard]] const at::Tensor& paged_kv_indices(std::int64_t n = all_rows) const { return get(names::paged_kv_indices, n); }
    [[nodiscard]] const at::Tensor& paged_kv_last_page_len(std::int64_t b = all_rows) const {
        return get(names::paged_kv_last_page_len, b);
    }
    [[nodiscard]] const at::Tensor& embeddings(std::int64_t n = all_rows) const { return get(names::embeddings, n); }
    [[nodiscard]] const at::Tensor& hidden_states(std::int64_t n = all_rows) const { return get(names::hidden_states, n); }
    [[nodiscard]] const at::Tensor& aux_hidden_states(std::int64_t n = all_rows) const { return get(names::aux_hidden_states, n); }

    // Bytes of the device arena, of each of the two staging buffers, and host-to-device copies so far.
    [[nodiscard]] std::size_t arena_bytes() const noexcept;
    [[nodiscard]] std::size_t staging_bytes() const noexcept;
    [[nodiscard]] std::uint64_t copies() const noexcept;
    // How many of those a kernel made.
    [[nodiscard]] std::uint64_t copies_by_kernel() const noexcept;
    // The device of the arena.
    [[nodiscard]] c10::Device device() const noexcept;

private:
    // Makes the stream current once for a whole step.
    friend class GraphExecutor;
    // For a step that is smaller than its bucket.
    void prepare(const Key& bucket, const Key& step, c10::ArrayRef<NamedValue> values);
    struct State;
    std::unique_ptr<State> state_;
};

// As xLLM calls it.
using CudaGraphPersistentParam = GraphInputs;

}  // namespace vmmgraph::engine

#endif  // VMMGRAPH_INPUTS_HPP
