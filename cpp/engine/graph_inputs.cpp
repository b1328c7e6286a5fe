#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/StringUtil.h>

#include "../torch/on_device.hpp"
#include "inputs_state.hpp"

namespace vmmgraph::engine {

GraphInputs::GraphInputs(std::vector<Input> inputs, const std::vector<Key>& buckets,
                         const InputsOptions& options) {
    torch::require_release();
    if (!options.device.is_cuda() && !options.device.is_cpu()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot make persistent inputs: the device is " +
                                                    options.device.str() +
                                                    "; use a CUDA device or the CPU");
    }
    if (buckets.empty()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot make persistent inputs: the list of buckets is empty; pass at least one "
               "bucket");
    }
    auto device = options.device;
    if (device.is_cuda() && !device.has_index()) {
        device = c10::Device(c10::kCUDA, c10::cuda::current_device());
    }
    std::optional<c10::cuda::CUDAGuard> guard;
    std::optional<torch::Relaxed> relaxed;
    void* current = nullptr;
    if (device.is_cuda()) {
        guard.emplace(device);
        // Allocates memory while other threads may capture.
        relaxed.emplace();
        current = c10::cuda::getCurrentCUDAStream(device.index()).stream();
        refuse_captured(current);
        State::finish_left();
    }
    state_.reset(new State(std::move(inputs), buckets, device, options.alignment));
    auto& state = *state_;
    const std::int64_t alignment = options.alignment == 0 ? 512 : options.alignment;
    const auto bytes = static_cast<std::int64_t>(state.info.arena_bytes);
    // Zeros, so memory never written is finite.
    const auto whole =
        at::zeros({bytes + alignment}, at::TensorOptions().dtype(at::kByte).device(state.device));
    const auto start = reinterpret_cast<std::uintptr_t>(whole.const_data_ptr()) %
                       static_cast<std::uintptr_t>(alignment);
    state.arena =
        whole.narrow(0, (alignment - static_cast<std::int64_t>(start)) % alignment, bytes);
    state.bring = options.bring;
    state.staging = std::make_unique<Staging>(state.device, state.info.staging_bytes);
    if (device.is_cuda()) {
        // The first commit may use another stream than the zeros.
        C10_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(current)));
    }
    state.make_views(state.layouts.front());
}

GraphInputs::~GraphInputs() {
    if (!state_->device.is_cuda()) {
        return;
    }
    State::finish_left();
    // The arena's memory returns to torch, which does not know the commits' stream.
    if (!state_->finish()) {
        State::leave(std::move(state_));
    }
}

void GraphInputs::prepare(const Key& bucket, c10::ArrayRef<NamedValue> values) {
    prepare(bucket, bucket, values);
}

void GraphInputs::prepare(const Key& bucket, const Key& step, c10::ArrayRef<NamedValue> values) {
    static const Value nothing;
    auto& state = *state_;
    auto& prepared = state.prepared;
    prepared.valid = false;
    prepared.writes.clear();
    std::fill(prepared.host.begin(), prepared.host.end(), nullptr);
    const auto number = state.layout_of(bucket);
    const auto& layout = state.layouts[number];
    state.assign(values);
    state.step.clear();
    for (std::size_t i = 0; i < state.given.size(); ++i) {
        const auto& given = state.given[i];
        const auto& declared = state.inputs[given.number];
        const auto& value = state.values[i] != nullptr ? *state.values[i] : nothing;
        auto& shape = prepared.shapes[given.number];
        state.check(declared, layout.places[given.number], step, value, shape);
        if (state.on_device(declared, value)) {
            prepared.writes.push_back(state.write_of(layout, given.number, value));
        } else {
            state.step.push_back(State::step_of(given, value, shape));
        }
    }
    auto* const staging = state.staging->write();
    prepared.end = state.plan.pack(layout.key, state.step, staging, state.info.staging_bytes);
    for (const auto& one : state.step) {
        prepared.host[one.input] = staging + layout.places[one.input].offset;
        prepared.rows_on_host[one.input] = one.shape[0];
    }
    prepared.layout = number;
    prepared.valid = true;
}

void GraphInputs::commit(void* stream) {
    auto& state = *state_;
    std::optional<torch::OnStream> current;
    if (state.device.is_cuda()) {
        // First, since the default stream is the current device's.
        current.emplace(state.device, stream);
    }
    state.commit(stream);
}

void GraphInputs::mark() { state_->last.mark(); }

void GraphInputs::select(const Key& bucket) {
    auto& state = *state_;
    state.refuse_beside("select a bucket", "leave the selection to the executor");
    const auto number = state.layout_of(bucket);
    if (number != state.current) {
        state.current = number;
        state.shapes.assign(state.inputs.size(), Shape{});
    }
}

const Key& GraphInputs::bucket() const { return state_->layout_here().key; }

std::size_t GraphInputs::find(std::string_view name) const {
    const auto& inputs = state_->inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].name == name) {
            return i;
        }
    }
    const auto& late = state_->late;
    const auto found = std::find_if(late.begin(), late.end(),
                                    [&](const LateOutput& output) { return output.name == name; });
    if (found != late.end()) {
        return inputs.size() + static_cast<std::size_t>(found - late.begin());
    }
    refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
           "cannot find '" + std::string(name) +
               "': no input or output has this name; declare it first");
}

bool GraphInputs::has(std::string_view name) const noexcept {
    const auto same = [&](const auto& one) { return one.name == name; };
    return std::any_of(state_->inputs.begin(), state_->inputs.end(), same) ||
           std::any_of(state_->late.begin(), state_->late.end(), same);
}

const std::vector<Input>& GraphInputs::inputs() const noexcept { return state_->inputs; }

const at::Tensor& GraphInputs::get(std::size_t input, std::int64_t rows) const {
    const auto& layout = state_->layout_here();
    if (const auto late = input - layout.tensors.size();
        input >= layout.tensors.size() && late < state_->late.size()) {
        return state_->rows_of(state_->late_here(late), rows);
    }
    if (input >= layout.tensors.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot return input or output " +
                                                    std::to_string(input) + ": there are " +
                                                    std::to_string(layout.tensors.size()) +
                                                    ", counted from 0; pass one of these numbers");
    }
    const auto& whole = layout.tensors[input];
    const auto along = state_->rows_along[input];
    const auto most = whole.size(along);
    if (rows < 0 || rows == most) {
        return whole;
    }
    if (rows > most) {
        mismatch(state_->inputs[input], "the number of rows asked for", std::to_string(rows),
                 "at most " + std::to_string(most) + " in this bucket");
    }
    auto& [last, slice] = layout.slices[input];
    if (last != rows) {
        slice = whole.narrow(along, 0, rows);
        last = rows;
    }
    return slice;
}

void GraphInputs::set(std::size_t output, const at::Tensor& value) {
    auto& state = *state_;
    const auto late = output - state.inputs.size();
    const bool is_late = output >= state.inputs.size() && late < state.late.size();
    if (!is_late && output < state.inputs.size() && state.inputs[output].role != Role::output) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot set '" + state.inputs[output].name +
                   "': it is an input, and a body sets only outputs; pass an output");
    }
    if (!value.defined() || value.dim() == 0) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot set the output: the value is undefined or has no rows; pass a tensor with "
               "rows");
    }
    if (is_late && !state.late_here(late).whole.defined()) {
        state.refuse_beside("make output '" + state.late[late].name + "'",
                            "run the body eagerly before (ExecutorOptions::eager_runs)");
        state.late[late].whole = state.memory_like(value);
    }
    const auto along = is_late ? 0 : state.rows_along[output];
    const auto& place = get(output, along < value.dim() ? value.size(along) : all_rows);
    if (place.sizes() != value.sizes()) {
        const auto& name = is_late ? state.late[late].name : state.inputs[output].name;
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot set output '" + name + "': the value is " + c10::str(value.sizes()) +
                   "; the shape must be " + c10::str(place.sizes()));
    }
    place.copy_(value, true);
}

bool GraphInputs::is_set(std::string_view name) const {
    const auto number = find(name);
    return number < state_->inputs.size() ||
           state_->late_here(number - state_->inputs.size()).whole.defined();
}

at::Tensor GraphInputs::actual(std::size_t input) const {
    state_->refuse_beside("return an input in the step's size", "use get()");
    auto tensor = get(input);
    if (input >= state_->inputs.size() || state_->inputs[input].role == Role::output) {
        return tensor;
    }
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
        tensor = tensor.narrow(i, 0, state_->shapes[input][static_cast<std::size_t>(i)]);
    }
    return tensor;
}

at::Tensor GraphInputs::host(std::size_t input) const {
    state_->refuse_beside("return an input on the host",
                          "read the input in ExecutorOptions::before_launch");
    const auto& prepared = state_->prepared;
    if (input >= state_->inputs.size()) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot return input " + std::to_string(input) + " on the host: there are " +
                   std::to_string(state_->inputs.size()) +
                   " inputs, counted from 0; pass one of these numbers");
    }
    const auto& declared = state_->inputs[input];
    if (prepared.host[input] == nullptr) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE, "cannot return input '" + declared.name +
                                               "' on the host: the last prepare() had no host "
                                               "value; pass a host value to prepare()");
    }
    const auto& place = state_->layouts[prepared.layout].places[input];
    std::vector<std::int64_t> sizes(place.shape, place.shape + place.rank);
    if (declared.shape.front().kind == VMMGRAPH_EXTENT_UP_TO) {
        sizes.front() = prepared.rows_on_host[input];
    }
    return at::from_blob(const_cast<std::byte*>(prepared.host[input]), sizes,
                         at::TensorOptions().dtype(declared.dtype));
}

std::size_t GraphInputs::arena_bytes() const noexcept { return state_->info.arena_bytes; }
std::size_t GraphInputs::staging_bytes() const noexcept { return state_->info.staging_bytes; }
std::uint64_t GraphInputs::copies() const noexcept { return state_->copies; }
std::uint64_t GraphInputs::copies_by_kernel() const noexcept { return state_->copies_by_kernel; }
c10::Device GraphInputs::device() const noexcept { return state_->device; }

}  // namespace vmmgraph::engine
