// Persistent graph inputs over libtorch: checks a step's values, pads to a graph's shape, and
// copies to fixed addresses. Link VmmGraph::torch. engine.hpp builds on this header.
//
//   using namespace vmmgraph::engine;
//   GraphInputs inputs({Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)}), ...},
//                      buckets, {at::kCUDA});
//   inputs.update(bucket, {{names::tokens, tokens}, {names::positions, positions}}, stream);
//
// Errors are vmmgraph::Error, thrown before any change unless noted. One thread at a time per
// object.

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

// Shapes of dispatch.hpp.
using dispatch::Axis;
using dispatch::bucket_sizes;
using dispatch::Key;
using dispatch::uniform_decode;

// Length of an input's dimension.
struct Extent {
    std::int32_t kind = VMMGRAPH_EXTENT_FIXED;
    Axis axis = Axis::tokens;
    std::uint32_t times = 1;
    std::uint32_t plus = 0;

    [[nodiscard]] static Extent fixed(std::uint32_t length) {
        return {VMMGRAPH_EXTENT_FIXED, Axis::tokens, length, 0};
    }
    // `times` the bucket's size along the axis, plus `plus`.
    [[nodiscard]] static Extent along(Axis axis, std::uint32_t times = 1, std::uint32_t plus = 0) {
        return {VMMGRAPH_EXTENT_ALONG, axis, times, plus};
    }
    // At most `length`, as given by each step; first dimension only. The rest is undefined, not
    // padded.
    [[nodiscard]] static Extent up_to(std::uint32_t length) {
        return {VMMGRAPH_EXTENT_UP_TO, Axis::tokens, length, 0};
    }
};

// Writer of an input; or an output.
enum class Role : std::int32_t {
    // Host memory, in one copy for all host inputs. A device tensor is accepted too, as its own
    // copy.
    host_input = VMMGRAPH_ROLE_HOST_INPUT,
    // Device memory.
    device_input = VMMGRAPH_ROLE_DEVICE_INPUT,
    // Output, written by the graph.
    output = VMMGRAPH_ROLE_OUTPUT,
};

// Padding for steps smaller than their bucket.
struct Pad {
    std::int32_t rule = VMMGRAPH_PAD_ZERO;
    c10::Scalar element = 0;
    // Whether the engine chose the rule. GraphInputs() refuses default zeros where often wrong.
    bool chosen = false;

    [[nodiscard]] static Pad zero() { return {VMMGRAPH_PAD_ZERO, 0, true}; }
    // The step's nearest element; 0 if none.
    [[nodiscard]] static Pad repeat_last() { return {VMMGRAPH_PAD_REPEAT_LAST, 0, true}; }
    [[nodiscard]] static Pad value(c10::Scalar element) {
        return {VMMGRAPH_PAD_VALUE, element, true};
    }
};

// Declaration of an input or output. The largest bucket determines its largest shape.
struct Input {
    std::string name;
    c10::ScalarType dtype = c10::ScalarType::Int;
    std::vector<Extent> shape;
    Role role = Role::host_input;
    Pad pad;

    [[nodiscard]] static Input host(std::string_view name, c10::ScalarType dtype,
                                    std::vector<Extent> shape, Pad pad = {}) {
        return {std::string(name), dtype, std::move(shape), Role::host_input, pad};
    }
    [[nodiscard]] static Input device(std::string_view name, c10::ScalarType dtype,
                                      std::vector<Extent> shape, Pad pad = {}) {
        return {std::string(name), dtype, std::move(shape), Role::device_input, pad};
    }
    [[nodiscard]] static Input output(std::string_view name, c10::ScalarType dtype,
                                      std::vector<Extent> shape) {
        return {std::string(name), dtype, std::move(shape), Role::output, {}};
    }
    // An output whose dtype and width come from the first GraphInputs::set(). Rows lie along the
    // tokens. Its memory is allocated then, outside the arena.
    [[nodiscard]] static Input output(std::string_view name) {
        return {std::string(name), c10::ScalarType::Undefined, {}, Role::output, {}};
    }
};

// Names with getters in GraphInputs; use get() for all other names.
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

// A step's data for one input: a tensor or host memory. Host memory must live until prepare() or
// update() returns. A device tensor is held until its copy has run, so the caller may release the
// tensor at once. Host data must be contiguous; device tensors may have any strides.
class Value {
public:
    // No data: the whole input is padding, as for an unnamed input.
    Value() = default;
    // An undefined tensor is refused: a named input is meant to have data.
    Value(const at::Tensor& tensor)
        : tensor_(tensor),
          is_tensor_(true) {}  // NOLINT: an argument list of tensors is the usual case
    template <class T>
    Value(const std::vector<T>& elements)  // NOLINT
        : data_(elements.data()),
          dtype_(c10::CppTypeToScalarType<T>::value),
          rank_(1),
          shape_{static_cast<std::uint32_t>(elements.size())} {}
    // At most four dimensions.
    template <class T>
    Value(const T* elements, std::initializer_list<std::uint32_t> shape)
        : data_(elements),
          dtype_(c10::CppTypeToScalarType<T>::value),
          rank_(static_cast<int>(shape.size())) {
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

// A step's data for the input `name`. The name must live until the call returns.
struct NamedValue {
    std::string_view name;
    Value value;
};

// Transfer of host inputs to the device.
enum class Bring : std::int32_t {
    // A copy; or a kernel while a ring of the device streams units (ring.hpp), as a copy would
    // queue after the ring's.
    automatic,
    copy,
    // A torch kernel which reads pinned memory.
    kernel,
};

// Options of persistent inputs.
struct InputsOptions {
    // Device of the arena. A CPU device serves tests: same checks, padding and views, with memory
    // copies.
    c10::Device device{c10::DeviceType::CUDA, 0};
    // Alignment of every input in bytes, a power of two from 256 to 2 MiB.
    std::uint32_t alignment = 512;
    Bring bring = Bring::automatic;
};

// Named graph inputs and outputs at fixed addresses in one arena, sized for the largest bucket.
// Every bucket packs its own sizes, so a view belongs to a bucket. The getters use the bucket of
// the last commit() or select().
class VMMGRAPH_API GraphInputs {
public:
    static constexpr std::int64_t all_rows = -1;

    // Throws Error for an invalid declaration (repeated name, axis missing in a bucket, ...);
    // torch's memory errors propagate. Throws Error if no padding is chosen for `new_cache_slots`,
    // since slot 0 may belong to a sequence, or for inputs with an element more than sequences,
    // such as cumulative lengths, since lengths must not decrease.
    GraphInputs(std::vector<Input> inputs, const std::vector<Key>& buckets,
                const InputsOptions& options = {});
    GraphInputs(const GraphInputs&) = delete;
    GraphInputs& operator=(const GraphInputs&) = delete;
    // Waits for the work on the last commit's stream, which must still exist, unless marked. While
    // the stream is under capture, no wait is possible: the memory is kept until a later
    // construction or destruction of inputs can wait, or forever for a stream not known as torch's,
    // which may be destroyed by then.
    ~GraphInputs();

    // Checks a step's values and packs the host ones into staging memory, padded to the bucket in
    // every dimension. Unnamed inputs are padding; names in declaration order are found fastest.
    // Host work only: the previous step may still run. A second prepare() replaces the first.
    // Throws Error for an unknown or repeated name, a wrong dtype, device or rank, a value larger
    // than the bucket, a value empty along an axis on which the step (or the bucket, if no executor
    // knows the step) is not, an undefined tensor, and an unknown bucket.
    void prepare(const Key& bucket, c10::ArrayRef<NamedValue> values);
    // Copies the prepared inputs to the device, in order on `stream` (a cudaStream_t). Host inputs
    // take one copy (InputsOptions::bring). Device inputs take one launch for all zeros, one for
    // all values as wide as their place, and one per other value; they must be ready on `stream`.
    // Waits for a commit on another stream and its work since; the other stream must still exist,
    // unless marked. Throws Error if nothing was prepared or if either stream is under capture; the
    // prepared inputs stay for a later commit().
    void commit(void* stream);
    // Marks all work on the last commit's stream, which may then be captured or destroyed. A
    // GraphExecutor does so after each step on a stream not torch's own. Throws Error during a
    // capture of the stream.
    void mark();
    // prepare() and commit().
    void update(const Key& bucket, c10::ArrayRef<NamedValue> values, void* stream) {
        prepare(bucket, values);
        commit(stream);
    }
    // Sets the getters' bucket, whose contents are then undefined; for a capture.
    void select(const Key& bucket);
    // The getters' bucket.
    [[nodiscard]] const Key& bucket() const;

    // Returns the number of an input or output; throws Error for an unknown name. Outputs declared
    // by name alone come last.
    [[nodiscard]] std::size_t find(std::string_view name) const;
    [[nodiscard]] bool has(std::string_view name) const noexcept;
    // All declarations except outputs declared by name alone.
    [[nodiscard]] const std::vector<Input>& inputs() const noexcept;

    // Returns the leading `rows` of an input or output in the getters' bucket; negative: all. Rows
    // lie along the first dimension not fixed: columns of positions [3, tokens]. Allocates no
    // memory, and makes no tensor if `rows` is the last call's. Throws Error for too many rows, and
    // for an output declared by name alone before its first set().
    [[nodiscard]] const at::Tensor& get(std::size_t input, std::int64_t rows = all_rows) const;
    [[nodiscard]] const at::Tensor& get(std::string_view name, std::int64_t rows = all_rows) const {
        return get(find(name), rows);
    }
    // Copies a body's result to the leading rows of an output, on torch's current stream. Throws
    // Error for an input, and for another shape than the output's.
    void set(std::size_t output, const at::Tensor& value);
    void set(std::string_view name, const at::Tensor& value) { set(find(name), value); }
    // Returns false for an output declared by name alone which no body has set yet; else true.
    [[nodiscard]] bool is_set(std::string_view name) const;
    // Returns an input in the last step's size.
    [[nodiscard]] at::Tensor actual(std::size_t input) const;
    [[nodiscard]] at::Tensor actual(std::string_view name) const { return actual(find(name)); }
    // Returns a host input as padded by the last prepare(), in host memory: for planning kernels.
    // Has the bucket's shape; an up_to() dimension has the step's length. Read-only, until the next
    // prepare(). Throws Error before the first prepare(), after a failed one, and for values given
    // on the device.
    [[nodiscard]] at::Tensor host(std::size_t input) const;
    [[nodiscard]] at::Tensor host(std::string_view name) const { return host(find(name)); }

    [[nodiscard]] const at::Tensor& tokens(std::int64_t n = all_rows) const {
        return get(names::tokens, n);
    }
    [[nodiscard]] const at::Tensor& positions(std::int64_t n = all_rows) const {
        return get(names::positions, n);
    }
    [[nodiscard]] const at::Tensor& new_cache_slots(std::int64_t n = all_rows) const {
        return get(names::new_cache_slots, n);
    }
    [[nodiscard]] const at::Tensor& block_tables(std::int64_t b = all_rows) const {
        return get(names::block_tables, b);
    }
    // If cumulative, one row more than sequences, also in `n`.
    [[nodiscard]] const at::Tensor& q_seq_lens(std::int64_t n = all_rows) const {
        return get(names::q_seq_lens, n);
    }
    [[nodiscard]] const at::Tensor& kv_seq_lens(std::int64_t n = all_rows) const {
        return get(names::kv_seq_lens, n);
    }
    // For `b` sequences: b + 1 rows.
    [[nodiscard]] const at::Tensor& paged_kv_indptr(std::int64_t b = all_rows) const {
        return get(names::paged_kv_indptr, b < 0 ? b : b + 1);
    }
    [[nodiscard]] const at::Tensor& paged_kv_indices(std::int64_t n = all_rows) const {
        return get(names::paged_kv_indices, n);
    }
    [[nodiscard]] const at::Tensor& paged_kv_last_page_len(std::int64_t b = all_rows) const {
        return get(names::paged_kv_last_page_len, b);
    }
    [[nodiscard]] const at::Tensor& embeddings(std::int64_t n = all_rows) const {
        return get(names::embeddings, n);
    }
    [[nodiscard]] const at::Tensor& hidden_states(std::int64_t n = all_rows) const {
        return get(names::hidden_states, n);
    }
    [[nodiscard]] const at::Tensor& aux_hidden_states(std::int64_t n = all_rows) const {
        return get(names::aux_hidden_states, n);
    }

    // Bytes of the device arena; bytes of each of the two staging buffers; host-to-device copies so
    // far.
    [[nodiscard]] std::size_t arena_bytes() const noexcept;
    [[nodiscard]] std::size_t staging_bytes() const noexcept;
    [[nodiscard]] std::uint64_t copies() const noexcept;
    // Copies made by a kernel.
    [[nodiscard]] std::uint64_t copies_by_kernel() const noexcept;
    // The device of the arena.
    [[nodiscard]] c10::Device device() const noexcept;

private:
    // Makes the stream current once per step.
    friend class GraphExecutor;
    // Prepares a step smaller than its bucket.
    void prepare(const Key& bucket, const Key& step, c10::ArrayRef<NamedValue> values);
    struct State;
    std::unique_ptr<State> state_;
};

// The name in xLLM.
using CudaGraphPersistentParam = GraphInputs;

}  // namespace vmmgraph::engine

#endif  // VMMGRAPH_INPUTS_HPP
