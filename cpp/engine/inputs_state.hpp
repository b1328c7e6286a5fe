// What a GraphInputs holds: where everything lies in each bucket, the step that was prepared, and what the device may still read.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <vmmgraph/inputs.hpp>

#include "declare.hpp"
#include "device_writes.hpp"
#include "staging.hpp"
#include "stream_order.hpp"

namespace vmmgraph::engine {

// By dimension; 0 behind the last.
using Shape = std::array<std::uint32_t, 4>;

// Throws the Error of an input whose value does not fit.
[[noreturn]] void mismatch(const Input& input, const std::string& what, const std::string& found, const std::string& expected);

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

// Tensors of the device that copies under way read.
struct Held {
    cudaEvent_t read = nullptr;
    std::vector<at::Tensor> values;
};

// An output declared by its name alone: its rows lie along the tokens.
struct LateOutput {
    std::string name;
    // As long as the largest bucket; undefined before the first value.
    at::Tensor whole;
    // The last slice that was asked for.
    mutable std::pair<std::int64_t, at::Tensor> slice{GraphInputs::all_rows, {}};
};

struct GraphInputs::State {
    // All but those in `late`.
    std::vector<Input> inputs;
    // Numbered behind them.
    std::vector<LateOutput> late;
    c10::Device device;
    dispatch::InputPlan plan;
    vmmgraph_input_plan_info_t info{};
    // Outputs left out.
    std::vector<Given> given;
    std::vector<Layout> layouts;
    // By input: the dimension along which its rows lie.
    std::vector<std::int64_t> rows_along;
    // Aligned, in a tensor that may begin earlier.
    at::Tensor arena;
    std::unique_ptr<Staging> staging;
    std::size_t current = 0;
    std::vector<Shape> shapes;
    Bring bring = Bring::automatic;
    std::uint64_t copies = 0;
    std::uint64_t copies_by_kernel = 0;
    // The last commit, and what its stream was given since.
    StreamOrder last;
    std::vector<Held> held;

    // Of the last prepare(); kept for their memory.
    std::vector<const Value*> values;
    std::vector<vmmgraph_step_input_t> step;

    struct Prepared {
        std::size_t layout = 0;
        std::size_t end = 0;
        // By input.
        std::vector<Shape> shapes;
        std::vector<DeviceWrite> writes;
        // By input: where its padded values are on the host, null if they are not there, and how many rows the step has. Good until the
        // next prepare().
        std::vector<const std::byte*> host;
        std::vector<std::int64_t> rows_on_host;
        // Until the commit.
        bool valid = false;
    } prepared;

    // Declares the inputs and lays every bucket out; makes no memory. Throws Error.
    State(std::vector<Input> declared, const std::vector<Key>& buckets, c10::Device on, std::uint32_t alignment);
    ~State();

    // Waits until the device uses none of it; false, without a wait, while the stream of the last commit is captured.
    bool finish() noexcept;
    // Keeps one that cannot be finished until it can; for good if its stream may be gone by then.
    struct Left;
    static void leave(std::unique_ptr<State> unfinished) noexcept;
    // Finishes those that were left, where that is possible now.
    static void finish_left() noexcept;

    // Rows of an output declared by its name alone, in the current bucket.
    const at::Tensor& rows_of(const LateOutput& output, std::int64_t rows) const;
    // Memory for such an output, that the value's graph does not own.
    at::Tensor memory_like(const at::Tensor& value) const;

    // The number of a bucket's layout, with its views made; throws Error if there is no such bucket.
    std::size_t layout_of(const Key& bucket);
    void make_views(Layout& layout) const;

    // Finds each given input's value, null where the step has none. Throws Error for a name that no input has, and for one twice.
    void assign(c10::ArrayRef<NamedValue> named);

    // Throws Error unless the value fits a step of that shape; writes the value's own.
    void check(const Input& input, const vmmgraph_input_view_t& place, const Key& step, const Value& value, Shape& shape) const;

    // Whether the value goes to its place on the device, and not into staging memory.
    bool on_device(const Input& input, const Value& value) const;

    // A value of the host as the plan takes it; good as long as the value is.
    static vmmgraph_step_input_t step_of(const Given& given, const Value& value, const Shape& shape);

    // A value of the device and where it goes.
    DeviceWrite write_of(const Layout& layout, std::size_t input, const Value& value) const;

    // Whether a kernel brings what is copied now.
    bool by_kernel() const;

    // Brings what was prepared to the device, as GraphInputs::commit; `stream` is torch's current one.
    void commit(void* stream);

    // Keeps the values of writes on `stream` until these are done, and lets those of earlier ones go that are.
    void hold(std::vector<DeviceWrite>& writes, void* stream);
};

}  // namespace vmmgraph::engine
