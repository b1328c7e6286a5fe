#include "inputs_state.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../torch/on_device.hpp"
#include "vmmgraph-bridge/src/device.rs.h"

namespace vmmgraph::engine {
namespace {

using dispatch::InputPlan;

std::string text_of(const std::uint32_t* shape, int rank) {
    std::string text = "[";
    for (int i = 0; i < rank; ++i) {
        text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
    }
    return text + "]";
}

InputPlan make_plan(const std::vector<Input>& inputs, const std::vector<Key>& buckets,
                    std::uint32_t alignment) {
    std::vector<vmmgraph_input_t> declared;
    for (const auto& input : inputs) {
        auto& one = declared.emplace_back(detail::sized<vmmgraph_input_t>());
        one.name = input.name.c_str();
        one.dtype = to_c(input.dtype);
        one.role = static_cast<std::int32_t>(input.role);
        one.pad = input.pad.rule;
        one.pad_bits =
            input.pad.rule == VMMGRAPH_PAD_VALUE ? bits_of(input.pad.element, input.dtype) : 0;
        one.rank = static_cast<std::int32_t>(input.shape.size());
        for (std::size_t i = 0; i < std::min<std::size_t>(input.shape.size(), 4); ++i) {
            const auto& extent = input.shape[i];
            one.shape[i] = {extent.kind, static_cast<std::int32_t>(extent.axis), extent.times,
                            extent.plus};
        }
    }
    return InputPlan(declared, buckets, alignment);
}

bool step_sized(const Input& input) { return input.shape.front().kind == VMMGRAPH_EXTENT_UP_TO; }

}  // namespace

void mismatch(const Input& input, const std::string& what, const std::string& found,
              const std::string& expected) {
    refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT, "cannot take input '" + input.name + "': " + what +
                                                " is " + found + "; it must be " + expected);
}

namespace {

// Removes and returns the outputs declared by name alone.
std::vector<LateOutput> take_late(std::vector<Input>& inputs) {
    std::vector<LateOutput> late;
    for (auto input = inputs.begin(); input != inputs.end();) {
        if (input->role != Role::output || !input->shape.empty()) {
            ++input;
            continue;
        }
        const auto same = [&](const auto& other) { return other.name == input->name; };
        if (std::count_if(inputs.begin(), inputs.end(), same) > 1 ||
            std::any_of(late.begin(), late.end(), same)) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   "cannot declare output '" + input->name +
                       "': another input or output has this name; choose a name of its own");
        }
        late.push_back(LateOutput{input->name, {}});
        input = inputs.erase(input);
    }
    return late;
}

// Throws Error for default padding with zeros where zeros are often wrong.
void require_chosen_padding(const std::vector<Input>& inputs) {
    for (const auto& input : inputs) {
        const bool cumulative = std::any_of(input.shape.begin(), input.shape.end(),
                                            [](const Extent& extent) { return extent.plus > 0; });
        if (input.role == Role::output || input.pad.chosen ||
            !(cumulative || input.name == names::new_cache_slots)) {
            continue;
        }
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot pad input '" + input.name + "' with zeros that the engine did not choose: " +
                   (cumulative
                        ? "cumulative lengths would fall; declare Pad::repeat_last()"
                        : "slot 0 may belong to a sequence; declare Pad::value(-1) if the kernels "
                          "skip negative slots, or Pad::zero() if slot 0 is nobody's"));
    }
}

}  // namespace

GraphInputs::State::State(std::vector<Input> declared, const std::vector<Key>& buckets,
                          c10::Device on, std::uint32_t alignment)
    : inputs(std::move(declared)),
      late(take_late(inputs)),
      device(on),
      plan(make_plan(inputs, buckets, alignment)),
      info(plan.info()),
      last(on) {
    require_chosen_padding(inputs);
    for (const auto& bucket : buckets) {
        auto& layout = layouts.emplace_back(Layout{bucket, {}, {}, {}});
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            layout.places.push_back(plan.view(bucket, i));
        }
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto& input = inputs[i];
        const auto varies =
            std::find_if(input.shape.begin(), input.shape.end(),
                         [](const Extent& extent) { return extent.kind != VMMGRAPH_EXTENT_FIXED; });
        rows_along.push_back(varies == input.shape.end() ? 0 : varies - input.shape.begin());
        if (input.role == Role::output) {
            continue;
        }
        auto& one = given.emplace_back(
            Given{i, c10::elementSize(input.dtype), detail::sized<vmmgraph_step_input_t>()});
        one.step.input = i;
        one.step.rank = static_cast<std::int32_t>(input.shape.size());
        one.step.dtype = to_c(input.dtype);
    }
    shapes.resize(inputs.size());
    prepared.shapes.resize(inputs.size());
    prepared.host.resize(inputs.size());
    prepared.rows_on_host.resize(inputs.size());
}

GraphInputs::State::~State() {
    for (const auto& one : held) {
        C10_CUDA_IGNORE_ERROR(one.read != nullptr ? cudaEventDestroy(one.read) : cudaSuccess);
    }
}

bool GraphInputs::State::finish() noexcept {
    try {
        last.wait();
    } catch (const Error&) {
        return false;
    } catch (...) {
        // The driver is gone, and no work runs.
    }
    return true;
}

// Never destroyed: torch may be destroyed before.
struct GraphInputs::State::Left {
    std::mutex mutex;
    std::vector<std::unique_ptr<State>> all;

    static Left& of_process() {
        static auto* const left = new Left;
        return *left;
    }
};

void GraphInputs::State::leave(std::unique_ptr<State> unfinished) noexcept {
    if (!unfinished->last.may_be_named_later()) {
        // The end of its use can never be known: leaked.
        static_cast<void>(unfinished.release());
        return;
    }
    auto& left = Left::of_process();
    const std::lock_guard lock(left.mutex);
    try {
        left.all.push_back(nullptr);
    } catch (...) {
        // No memory to track the state: leaked.
        static_cast<void>(unfinished.release());
        return;
    }
    left.all.back() = std::move(unfinished);
}

void GraphInputs::State::finish_left() noexcept {
    auto& left = Left::of_process();
    std::vector<std::unique_ptr<State>> all;
    {
        const std::lock_guard lock(left.mutex);
        all.swap(left.all);
    }
    for (auto& one : all) {
        if (!one->finish()) {
            leave(std::move(one));
        }
    }
}

std::size_t GraphInputs::State::layout_of(const Key& bucket) {
    if (layouts[current].key == bucket) {
        return current;
    }
    for (std::size_t i = 0; i < layouts.size(); ++i) {
        if (layouts[i].key == bucket) {
            make_views(layouts[i]);
            return i;
        }
    }
    refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
           "cannot select a bucket: no bucket of the persistent inputs has " +
               engine::text_of(bucket) + "; pass a declared bucket");
}

void GraphInputs::State::make_views(Layout& layout) const {
    if (!layout.tensors.empty()) {
        return;
    }
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto& place = layout.places[i];
        const std::vector<std::int64_t> sizes(place.shape, place.shape + place.rank);
        tensors.push_back(arena
                              .narrow(0, static_cast<std::int64_t>(place.offset),
                                      static_cast<std::int64_t>(place.bytes))
                              .view(inputs[i].dtype)
                              .view(sizes));
    }
    layout.slices.resize(inputs.size(), {GraphInputs::all_rows, {}});
    layout.tensors = std::move(tensors);
}

void GraphInputs::State::assign(c10::ArrayRef<NamedValue> named) {
    values.assign(given.size(), nullptr);
    // Names in declaration order are found at the first try.
    std::size_t next = 0;
    for (const auto& [name, value] : named) {
        std::size_t tried = 0;
        for (; tried < given.size() && inputs[given[next % given.size()].number].name != name;
             ++tried) {
            ++next;
        }
        if (tried == given.size()) {
            const bool known =
                std::any_of(inputs.begin(), inputs.end(),
                            [wanted = name](const Input& input) { return input.name == wanted; });
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   "cannot take '" + std::string(name) +
                       (known ? "': it is an output; pass inputs only"
                              : "': no input has this name; declare the input first"));
        }
        next %= given.size();
        if (values[next] != nullptr) {
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   "cannot take input '" + std::string(name) +
                       "': it is given twice; pass each input once");
        }
        values[next++] = &value;
    }
}

void GraphInputs::State::check(const Input& input, const vmmgraph_input_view_t& place,
                               const Key& step, const Value& value, Shape& shape) const {
    const auto& tensor = value.tensor_;
    const bool is_tensor = value.rank_ < 0;
    shape = {};
    if (is_tensor && !tensor.defined()) {
        if (value.is_tensor_) {
            refuse(
                VMMGRAPH_ERROR_INVALID_ARGUMENT,
                "cannot take input '" + input.name +
                    "': the tensor is undefined; do not name the input where all of it is padding");
        }
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
        mismatch(input, "the device", where.str(),
                 (input.role == Role::host_input ? "cpu or " : "") + device.str());
    }
    const auto rank = is_tensor ? tensor.dim() : value.rank_;
    if (rank != place.rank) {
        mismatch(input, "the number of dimensions", std::to_string(rank),
                 std::to_string(place.rank));
    }
    bool fits = true;
    for (std::int32_t i = 0; i < place.rank; ++i) {
        const auto extent = is_tensor ? tensor.size(i) : std::int64_t{value.shape_[i]};
        const auto& declared = input.shape[static_cast<std::size_t>(i)];
        if (extent == 0 && declared.kind == VMMGRAPH_EXTENT_ALONG && step[declared.axis] > 0) {
            // For example, a host vector which the engine filled only on the device: padding would
            // be taken for the step's data.
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   "cannot take input '" + input.name + "': dimension " + std::to_string(i) +
                       " of the value has no elements; do not name the input where all of it is "
                       "padding");
        }
        shape[i] = static_cast<std::uint32_t>(
            std::min<std::int64_t>(extent, std::numeric_limits<std::uint32_t>::max()));
        fits = fits && extent <= place.shape[i];
    }
    if (!fits) {
        mismatch(input, "the shape", text_of(shape.data(), place.rank),
                 "at most " + text_of(place.shape, place.rank) + " in this bucket");
    }
    if (is_tensor && !on_device(input, value) && !tensor.is_contiguous()) {
        mismatch(input, "the tensor", "not contiguous", "contiguous on the host");
    }
}

namespace {

// The inputs, and their getters' state, of a GettersBeside.
thread_local const void* inputs_here = nullptr;
thread_local const Beside* of_inputs_here = nullptr;

}  // namespace

GraphInputs::State::GettersBeside::GettersBeside(const State& inputs,
                                                 const Beside& beside) noexcept {
    inputs_here = &inputs;
    of_inputs_here = &beside;
}

GraphInputs::State::GettersBeside::~GettersBeside() {
    inputs_here = nullptr;
    of_inputs_here = nullptr;
}

Beside GraphInputs::State::beside(const Key& bucket) {
    Beside made{layouts[layout_of(bucket)], late};
    if (device.is_cpu()) {
        for (auto& tensor : made.layout.tensors) {
            tensor = tensor.clone();
        }
        for (auto& output : made.late) {
            output.whole = output.whole.defined() ? output.whole.clone() : output.whole;
        }
    }
    // Slices of the memory above.
    for (auto& slice : made.layout.slices) {
        slice = {all_rows, {}};
    }
    for (auto& output : made.late) {
        output.slice = {all_rows, {}};
    }
    return made;
}

const Beside* GraphInputs::State::beside_here() const noexcept {
    return inputs_here == this ? of_inputs_here : nullptr;
}

void GraphInputs::State::refuse_beside(const std::string& operation, const char* remedy) const {
    if (beside_here() != nullptr) {
        refuse(
            VMMGRAPH_ERROR_WRONG_STATE,
            "cannot " + operation + ": this thread records a graph while steps go on; " + remedy);
    }
}

const at::Tensor& GraphInputs::State::rows_of(const LateOutput& output, std::int64_t rows) const {
    if (!output.whole.defined()) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot read output '" + output.name +
                   "': no body has set it yet; run a step that sets it first");
    }
    const std::int64_t most = layout_here().key[Axis::tokens];
    if (rows > most) {
        refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
               "cannot read output '" + output.name + "': " + std::to_string(rows) +
                   " rows are requested; the bucket has at most " + std::to_string(most) + " rows");
    }
    const auto wanted = rows < 0 ? most : rows;
    auto& [last, slice] = output.slice;
    if (last != wanted) {
        slice = output.whole.narrow(0, 0, wanted);
        last = wanted;
    }
    return slice;
}

at::Tensor GraphInputs::State::memory_like(const at::Tensor& value) const {
    auto sizes = value.sizes().vec();
    sizes.front() = 0;
    for (const auto& layout : layouts) {
        sizes.front() = std::max<std::int64_t>(sizes.front(), layout.key[Axis::tokens]);
    }
    if (!device.is_cuda()) {
        return at::empty(sizes, value.options());
    }
    // The current stream may be under capture or in an EagerScope, and this memory outlives both:
    // use an unrelated stream.
    const torch::Relaxed relaxed;
    const c10::cuda::CUDAStreamGuard beside(c10::cuda::getStreamFromPool(false, device.index()));
    return at::empty(sizes, value.options());
}

bool GraphInputs::State::on_device(const Input& input, const Value& value) const {
    const bool tensor = value.rank_ < 0 && value.tensor_.defined();
    return input.role == Role::device_input ||
           (tensor && device.is_cuda() && value.tensor_.is_cuda());
}

vmmgraph_step_input_t GraphInputs::State::step_of(const Given& given, const Value& value,
                                                  const Shape& shape) {
    auto step = given.step;
    const bool is_tensor = value.rank_ < 0;
    step.data = !is_tensor                ? value.data_
                : value.tensor_.defined() ? value.tensor_.const_data_ptr()
                                          : nullptr;
    step.bytes = given.element_bytes;
    for (std::int32_t i = 0; i < step.rank; ++i) {
        step.shape[i] = shape[i];
        step.bytes *= shape[i];
    }
    return step;
}

DeviceWrite GraphInputs::State::write_of(const Layout& layout, std::size_t input,
                                         const Value& value) const {
    const auto& place = layout.tensors[input];
    const auto& declared = inputs[input];
    const auto rows = value.tensor_.defined() ? value.tensor_.size(0) : 0;
    return {step_sized(declared) && rows < place.size(0) ? place.narrow(0, 0, rows) : place,
            value.tensor_, declared.pad};
}

bool GraphInputs::State::by_kernel() const {
    // Without a GPU, the rings are the host driver's.
    return bring == Bring::kernel ||
           (bring == Bring::automatic &&
            bridge::streaming_rings(device.is_cuda() ? device.index() : -1) > 0);
}

void GraphInputs::State::commit(void* stream) {
    if (!prepared.valid) {
        refuse(VMMGRAPH_ERROR_WRONG_STATE,
               "cannot commit the inputs: nothing is prepared; call prepare() first");
    }
    if (device.is_cuda()) {
        refuse_captured(stream);
        last.before(stream);
        last.note(stream, torch::lasts(c10::cuda::getCurrentCUDAStream(device.index())));
    }
    prepared.valid = false;
    if (prepared.end > 0) {
        const bool kernel = by_kernel();
        staging->send(arena.mutable_data_ptr(), prepared.end, stream, kernel);
        ++copies;
        copies_by_kernel += kernel ? 1 : 0;
    }
    write(prepared.writes);
    if (device.is_cuda()) {
        hold(prepared.writes, stream);
    }
    prepared.writes.clear();
    current = prepared.layout;
    shapes.swap(prepared.shapes);
}

void GraphInputs::State::hold(std::vector<DeviceWrite>& writes, void* stream) {
    Held* free = nullptr;
    std::optional<torch::Relaxed> relaxed;
    for (auto& one : held) {
        if (!one.values.empty()) {
            if (!relaxed) {
                relaxed.emplace();
            }
            const auto status = cudaEventQuery(one.read);
            if (status == cudaErrorNotReady) {
                // Clears the runtime's last error, which the next caller would take for its own.
                static_cast<void>(cudaGetLastError());
            } else {
                C10_CUDA_CHECK(status);
                one.values.clear();
            }
        }
        free = one.values.empty() ? &one : free;
    }
    if (std::none_of(writes.begin(), writes.end(),
                     [](const DeviceWrite& write) { return write.value.defined(); })) {
        return;
    }
    if (free == nullptr) {
        free = &held.emplace_back();
    }
    if (free->read == nullptr) {
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&free->read, cudaEventDisableTiming));
    }
    for (auto& write : writes) {
        free->values.push_back(std::move(write.value));
    }
    C10_CUDA_CHECK(cudaEventRecord(free->read, static_cast<cudaStream_t>(stream)));
}

}  // namespace vmmgraph::engine
