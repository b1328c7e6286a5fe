#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <vmmgraph/engine.hpp>

#include "../torch/on_device.hpp"
#include "declare.hpp"
#include "device_writes.hpp"
#include "staging.hpp"

namespace vmmgraph::engine {
namespace {

using dispatch::InputPlan;
using Shape = std::array<std::uint32_t, 4>;

[[noreturn]] void mismatch(const Input& input, const std::string& what, const std::string& found, const std::string& expected) {
    refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "input '" + input.name + "': " + what + " is " + found + ", must be " + expected);
}

std::string text_of(const std::uint32_t* shape, int rank) {
    std::string text = "[";
    for (int i = 0; i < rank; ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
    }
    return text + "]";
}

InputPlan make_plan(const std::vector<Input>& inputs, const std::vector<Key>& buckets, std::uint32_t alignment) {
    std::vector<vmmgraph_input_t> declared;
    for (const auto& input : inputs) {
        auto& one = declared.emplace_back(detail::sized<vmmgraph_input_t>());
        one.name = input.name.c_str();
        one.dtype = to_c(input.dtype);
        one.role = static_cast<std::int32_t>(input.role);
        one.pad = input.pad.rule;
        one.pad_bits = input.pad.rule == VMMGRAPH_PAD_VALUE ? bits_of(input.pad.element, input.dtype) : 0;
        one.rank = static_cast<std::int32_t>(input.shape.size());
        for (std::size_t i = 0; i < std::min<std::size_t>(input.shape.size(), 4); ++i) {
            const auto& extent = input.shape[i];
            one.shape[i] = {extent.kind, static_cast<std::int32_t>(extent.axis), extent.times, extent.plus};
        }
    }
    return InputPlan(declared, buckets, alignment);
}

// An input that steps give, and what is the same in each of them.
struct Given {
    std::size_t number = 0;
    std::size_t element_bytes = 0;
    vmmgraph_step_input_t step{};
};

// A bucket's views of all inputs and outputs.
struct Layout {
    Key key;
    std::vector<vmmgraph_input_view_t> places;
    std::vector<at::Tensor> tensors;
    // The last slice that was asked for.
    mutable std::vector<std::pair<std::int64_t, at::Tensor>> slices;
};

}  // namespace

struct CudaGraphPersistentParam::State {
    std::vector<Input> inputs;
    // Outputs left out.
    std::vector<Given> given;
    c10::Device device;
    InputPlan plan;
    vmmgraph_input_plan_info_t info{};
    std::vector<Layout> layouts;
    // Aligned, in a tensor that may begin earlier.
    at::Tensor arena;
    std::unique_ptr<Staging> staging;
    std::size_t current = 0;
    std::vector<Shape> shapes;
    std::uint64_t copies = 0;
    // Of the last prepare(); kept for its memory.
    std::vector<vmmgraph_step_input_t> step;
    // The stream of the last commit, and what orders the next one behind it on another.
    std::optional<void*> last_stream;
    cudaEvent_t order = nullptr;

    struct Prepared {
        std::size_t layout = 0;
        std::size_t end = 0;
        std::vector<Shape> shapes;
        std::vector<DeviceWrite> writes;
        bool valid = false;
    } prepared;

    std::size_t layout_of(const Key& bucket) {
        if (layouts[current].key == bucket) {
            return current;
        }
        for (std::size_t i = 0; i < layouts.size(); ++i) {
            if (layouts[i].key == bucket) {
                make_views(layouts[i]);
                return i;
            }
        }
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "no bucket of the persistent inputs has " + engine::text_of(bucket));
    }

    void make_views(Layout& layout) {
        if (!layout.tensors.empty()) {
            return;
        }
        std::vector<at::Tensor> tensors;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            const auto& place = layout.places[i];
            const std::vector<std::int64_t> sizes(place.shape, place.shape + place.rank);
            tensors.push_back(arena.narrow(0, static_cast<std::int64_t>(place.offset), static_cast<std::int64_t>(place.bytes))
                                  .view(inputs[i].dtype)
                                  .view(sizes));
        }
        layout.slices.resize(inputs.size());
        layout.tensors = std::move(tensors);
    }

    // Throws Error unless the value fits; writes its shape.
    void check(const Input& input, const vmmgraph_input_view_t& place, const Value& value, Shape& shape) const {
        const auto& tensor = value.tensor_;
        const bool is_tensor = value.rank_ < 0;
        shape = {};
        if (is_tensor && !tensor.defined()) {
            return;
        }
        if (!is_tensor && input.role == Role::device_input) {
            mismatch(input, "the value", "memory of the host", "a tensor on " + device.str());
        }
        const auto dtype = is_tensor ? tensor.scalar_type() : value.dtype_;
        if (dtype != input.dtype) {
            mismatch(input, "the dtype", c10::toString(dtype), c10::toString(input.dtype));
        }
        const auto where = is_tensor ? tensor.device() : c10::Device(c10::kCPU);
        if (where != device && (!where.is_cpu() || input.role == Role::device_input)) {
            mismatch(input, "the device", where.str(), (input.role == Role::host_input ? "cpu or " : "") + device.str());
        }
        const auto rank = is_tensor ? tensor.dim() : value.rank_;
        if (rank != place.rank) {
            mismatch(input, "the number of dimensions", std::to_string(rank), std::to_string(place.rank));
        }
        bool fits = true;
        for (std::int32_t i = 0; i < place.rank; ++i) {
            const auto extent = is_tensor ? tensor.size(i) : std::int64_t{value.shape_[i]};
            shape[i] = static_cast<std::uint32_t>(std::min<std::int64_t>(extent, std::numeric_limits<std::uint32_t>::max()));
            fits = fits && extent <= place.shape[i];
        }
        if (!fits) {
            mismatch(input, "the shape", text_of(shape.data(), place.rank), "at most " + text_of(place.shape, place.rank) + " in this bucket");
        }
        if (is_tensor && !tensor.is_contiguous()) {
            mismatch(input, "the tensor", "not contiguous", "contiguous");
        }
        if (on_device(input, value) && !std::equal(shape.begin() + 1, shape.begin() + place.rank, place.shape + 1)) {
            mismatch(input, "the shape", text_of(shape.data(), place.rank),
                     "that of the bucket in all but the first dimension, " + text_of(place.shape, place.rank) + ", for a tensor of the device");
        }
    }

    // Whether the value goes to its place on the device, and not into staging memory.
    bool on_device(const Input& input, const Value& value) const {
        const bool tensor = value.rank_ < 0 && value.tensor_.defined();
        return input.role == Role::device_input || (tensor && device.is_cuda() && value.tensor_.is_cuda());
    }

    // A value of the host as the plan takes it; good as long as the value is.
    static vmmgraph_step_input_t step_of(const Given& given, const Value& value, const Shape& shape) {
        auto step = given.step;
        const bool is_tensor = value.rank_ < 0;
        step.data = !is_tensor ? value.data_ : value.tensor_.defined() ? value.tensor_.const_data_ptr() : nullptr;
        step.bytes = given.element_bytes;
        for (std::int32_t i = 0; i < step.rank; ++i) {
            step.shape[i] = shape[i];
            step.bytes *= shape[i];
        }
        return step;
    }
};

CudaGraphPersistentParam::CudaGraphPersistentParam(std::vector<Input> inputs, const std::vector<Key>& buckets, const ParamOptions& options)
    : state_(new State{std::move(inputs), {}, options.device, {}, {}, {}, {}, nullptr, 0, {}, 0, {}, std::nullopt, nullptr, {}}) {
    torch::require_release();
    if (!options.device.is_cuda() && !options.device.is_cpu()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "persistent inputs cannot live on " + options.device.str());
    }
    if (buckets.empty()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "persistent inputs need at least one bucket");
    }
    auto& state = *state_;
    if (state.device.is_cuda() && !state.device.has_index()) {
        state.device = c10::Device(c10::kCUDA, c10::cuda::current_device());
    }
    state.plan = make_plan(state.inputs, buckets, options.alignment);
    state.info = state.plan.info();
    for (const auto& bucket : buckets) {
        auto& layout = state.layouts.emplace_back(Layout{bucket, {}, {}, {}});
        for (std::size_t i = 0; i < state.inputs.size(); ++i) {
            layout.places.push_back(state.plan.view(bucket, i));
        }
    }
    for (std::size_t i = 0; i < state.inputs.size(); ++i) {
        const auto& input = state.inputs[i];
        if (input.role == Role::output) {
            continue;
        }
        auto& given = state.given.emplace_back(Given{i, c10::elementSize(input.dtype), detail::sized<vmmgraph_step_input_t>()});
        given.step.input = i;
        given.step.rank = static_cast<std::int32_t>(input.shape.size());
        given.step.dtype = to_c(input.dtype);
    }
    state.shapes.resize(state.inputs.size());
    state.prepared.shapes.resize(state.inputs.size());
    const std::int64_t alignment = options.alignment == 0 ? 512 : options.alignment;
    const auto bytes = static_cast<std::int64_t>(state.info.arena_bytes);
    // Zeros, so that what nobody has written yet is finite.
    const auto whole = at::zeros({bytes + alignment}, at::TensorOptions().dtype(at::kByte).device(state.device));
    const auto start = reinterpret_cast<std::uintptr_t>(whole.const_data_ptr()) % static_cast<std::uintptr_t>(alignment);
    state.arena = whole.narrow(0, (alignment - static_cast<std::int64_t>(start)) % alignment, bytes);
    state.staging = std::make_unique<Staging>(state.device, state.info.staging_bytes);
    if (state.device.is_cuda()) {
        const c10::cuda::CUDAGuard guard(state.device);
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&state.order, cudaEventDisableTiming));
        // The first commit may come on another stream than the zeros.
        C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(state.device.index()).stream()));
    }
    state.make_views(state.layouts.front());
}

CudaGraphPersistentParam::~CudaGraphPersistentParam() {
    const auto& state = *state_;
    if (state.order == nullptr) {
        return;
    }
    // The default stream is that of the current device.
    const torch::OnDevice current(state.device);
    // The arena goes back to torch, which knows nothing of the stream that used it.
    if (state.last_stream) {
        C10_CUDA_IGNORE_ERROR(cudaEventRecord(state.order, static_cast<cudaStream_t>(*state.last_stream)));
        C10_CUDA_IGNORE_ERROR(cudaEventSynchronize(state.order));
    }
    C10_CUDA_IGNORE_ERROR(cudaEventDestroy(state.order));
}

void CudaGraphPersistentParam::prepare(const Key& bucket, c10::ArrayRef<Value> values) {
    auto& state = *state_;
    const auto number = state.layout_of(bucket);
    const auto& layout = state.layouts[number];
    if (values.size() > state.given.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, std::to_string(values.size()) + " values for " + std::to_string(state.given.size()) + " inputs");
    }
    static const Value nothing;
    auto& prepared = state.prepared;
    prepared.valid = false;
    state.step.clear();
    for (std::size_t i = 0; i < state.given.size(); ++i) {
        const auto& given = state.given[i];
        const auto& declared = state.inputs[given.number];
        const auto& value = i < values.size() ? values[i] : nothing;
        auto& shape = prepared.shapes[given.number];
        state.check(declared, layout.places[given.number], value, shape);
        if (!state.on_device(declared, value)) {
            state.step.push_back(State::step_of(given, value, shape));
        }
    }
    prepared.writes.clear();
    // Those that are left; none, usually.
    for (std::size_t i = 0; i < state.given.size() && state.step.size() + prepared.writes.size() < state.given.size(); ++i) {
        const auto input = state.given[i].number;
        const auto& value = i < values.size() ? values[i] : nothing;
        const auto& declared = state.inputs[input];
        if (state.on_device(declared, value)) {
            const bool step_sized = declared.shape.front().kind == VMMGRAPH_EXTENT_UP_TO;
            prepared.writes.push_back({layout.tensors[input], value.tensor_, step_sized ? std::nullopt : std::optional(declared.pad)});
        }
    }
    prepared.end = state.plan.pack(layout.key, state.step, state.staging->write(), state.info.staging_bytes);
    prepared.layout = number;
    prepared.valid = true;
}

void CudaGraphPersistentParam::commit(void* stream) {
    auto& state = *state_;
    auto& prepared = state.prepared;
    if (!prepared.valid) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "commit() without a prepare() before it");
    }
    c10::cuda::OptionalCUDAStreamGuard guard;
    if (state.device.is_cuda()) {
        const auto on = static_cast<cudaStream_t>(stream);
        // First, since the default stream is that of the current device.
        guard.reset_stream(c10::cuda::getStreamFromExternal(on, state.device.index()));
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        C10_CUDA_CHECK(cudaStreamIsCapturing(on, &status));
        if (status != cudaStreamCaptureStatusNone) {
            refuse(VMMGRAPH_ERROR_STREAM_CAPTURING, "inputs cannot be written on a stream under capture");
        }
        if (state.last_stream && *state.last_stream != stream) {
            C10_CUDA_CHECK(cudaEventRecord(state.order, static_cast<cudaStream_t>(*state.last_stream)));
            C10_CUDA_CHECK(cudaStreamWaitEvent(on, state.order, 0));
        }
        state.last_stream = stream;
    }
    prepared.valid = false;
    if (prepared.end > 0) {
        state.staging->send(state.arena.mutable_data_ptr(), prepared.end, stream);
        ++state.copies;
    }
    write(prepared.writes);
    prepared.writes.clear();
    state.current = prepared.layout;
    state.shapes.swap(prepared.shapes);
}

void CudaGraphPersistentParam::select(const Key& bucket) {
    auto& state = *state_;
    const auto number = state.layout_of(bucket);
    if (number != state.current) {
        state.current = number;
        state.shapes.assign(state.inputs.size(), Shape{});
    }
}

const Key& CudaGraphPersistentParam::bucket() const { return state_->layouts[state_->current].key; }

std::size_t CudaGraphPersistentParam::find(std::string_view name) const {
    const auto& inputs = state_->inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].name == name) {
            return i;
        }
    }
    refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "no input or output is called '" + std::string(name) + "'");
}

bool CudaGraphPersistentParam::has(std::string_view name) const noexcept {
    return std::any_of(state_->inputs.begin(), state_->inputs.end(), [&](const Input& input) { return input.name == name; });
}

const std::vector<Input>& CudaGraphPersistentParam::inputs() const noexcept { return state_->inputs; }

const at::Tensor& CudaGraphPersistentParam::get(std::size_t input, std::int64_t rows) const {
    const auto& layout = state_->layouts[state_->current];
    if (input >= layout.tensors.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "there are " + std::to_string(layout.tensors.size()) + " inputs and outputs, no number " +
                                                    std::to_string(input));
    }
    const auto& whole = layout.tensors[input];
    if (rows == 0 || rows == whole.size(0)) {
        return whole;
    }
    if (rows < 0 || rows > whole.size(0)) {
        mismatch(state_->inputs[input], "the number of rows asked for", std::to_string(rows),
                 "at most " + std::to_string(whole.size(0)) + " in this bucket");
    }
    auto& [last, slice] = layout.slices[input];
    if (last != rows) {
        slice = whole.narrow(0, 0, rows);
        last = rows;
    }
    return slice;
}

at::Tensor CudaGraphPersistentParam::actual(std::size_t input) const {
    auto tensor = get(input);
    if (state_->inputs[input].role == Role::output) {
        return tensor;
    }
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
        tensor = tensor.narrow(i, 0, state_->shapes[input][static_cast<std::size_t>(i)]);
    }
    return tensor;
}

std::size_t CudaGraphPersistentParam::arena_bytes() const noexcept { return state_->info.arena_bytes; }
std::size_t CudaGraphPersistentParam::staging_bytes() const noexcept { return state_->info.staging_bytes; }
std::uint64_t CudaGraphPersistentParam::copies() const noexcept { return state_->copies; }
c10::Device CudaGraphPersistentParam::device() const noexcept { return state_->device; }

}  // namespace vmmgraph::engine
