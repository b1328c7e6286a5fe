// State of GraphInputs: the layout of each bucket, the prepared step, and tensors still read by the
// device.
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

// By dimension; 0 beyond the rank.
using Shape = std::array<std::uint32_t, 4>;

// Throws Error for an input whose value does not fit.
[[noreturn]] void mismatch(const Input& input, const std::string& what, const std::string& found,
                           const std::string& expected);

// An input given by steps, with the fields equal in all steps.
struct Given {
    std::size_t number = 0;
    std::size_t element_bytes = 0;
    vmmgraph_step_input_t step{};
};

// Views of all inputs and outputs in a bucket.
struct Layout {
    Key key;
    std::vector<vmmgraph_input_view_t> places;
    std::vector<at::Tensor> tensors;
    // The last slice returned.
    mutable std::vector<std::pair<std::int64_t, at::Tensor>> slices;
};

// Device tensors read by running copies.
struct Held {
    cudaEvent_t read = nullptr;
    std::vector<at::Tensor> values;
};

// An output declared by name alone; its rows lie along the tokens.
struct LateOutput {
    std::string name;
    // Sized for the largest bucket; undefined before the first value.
    at::Tensor whole;
    // The last slice returned.
    mutable std::pair<std::int64_t, at::Tensor> slice{GraphInputs::all_rows, {}};
};

// Bucket and memory of the getters on a thread which records a graph while steps go on.
struct Beside {
    Layout layout;
    std::vector<LateOutput> late;
};

struct GraphInputs::State {
    // All except those in `late`.
    std::vector<Input> inputs;
    // Numbered after `inputs`.
    std::vector<LateOutput> late;
    c10::Device device;
    dispatch::InputPlan plan;
    vmmgraph_input_plan_info_t info{};
    // Without outputs.
    std::vector<Given> given;
    std::vector<Layout> layouts;
    // By input: the dimension of its rows.
    std::vector<std::int64_t> rows_along;
    // Aligned; part of a tensor which may begin earlier.
    at::Tensor arena;
    std::unique_ptr<Staging> staging;
    std::size_t current = 0;
    std::vector<Shape> shapes;
    Bring bring = Bring::automatic;
    std::uint64_t copies = 0;
    std::uint64_t copies_by_kernel = 0;
    // The last commit, and its stream's work since.
    StreamOrder last;
    std::vector<Held> held;

    // Of the last prepare(); reused to avoid allocation.
    std::vector<const Value*> values;
    std::vector<vmmgraph_step_input_t> step;

    struct Prepared {
        std::size_t layout = 0;
        std::size_t end = 0;
        // By input.
        std::vector<Shape> shapes;
        std::vector<DeviceWrite> writes;
        // By input: the address of the padded values on the host (null if not on the host), and the
        // step's rows. Valid until the next prepare().
        std::vector<const std::byte*> host;
        std::vector<std::int64_t> rows_on_host;
        // True until the commit.
        bool valid = false;
    } prepared;

    // Declares the inputs and lays out every bucket; allocates no device memory. Throws Error.
    State(std::vector<Input> declared, const std::vector<Key>& buckets, c10::Device on,
          std::uint32_t alignment);
    ~State();

    // Waits for the device; returns false, without waiting, while the last commit's stream is under
    // capture.
    bool finish() noexcept;
    // Keeps an unfinished state until finish() succeeds; forever if its stream may be gone by then.
    struct Left;
    static void leave(std::unique_ptr<State> unfinished) noexcept;
    // Finishes kept states where possible.
    static void finish_left() noexcept;

    // Makes the getters of this thread, and of no other, use `beside` during its lifetime.
    class GettersBeside {
    public:
        GettersBeside(const State& inputs, const Beside& beside) noexcept;
        GettersBeside(const GettersBeside&) = delete;
        GettersBeside& operator=(const GettersBeside&) = delete;
        ~GettersBeside();
    };
    // Returns the getters' state for a recording of a bucket on a different thread. On a CPU a
    // recording runs the body, so its memory is separate.
    Beside beside(const Key& bucket);
    // Returns the state set by a GettersBeside of this thread; null if none.
    const Beside* beside_here() const noexcept;
    // Throws Error on a thread with a GettersBeside.
    void refuse_beside(const std::string& operation, const char* remedy) const;
    // Returns the getters' bucket of this thread.
    const Layout& layout_here() const {
        const auto* const beside = beside_here();
        return beside != nullptr ? beside->layout : layouts[current];
    }
    const LateOutput& late_here(std::size_t number) const {
        const auto* const beside = beside_here();
        return (beside != nullptr ? beside->late : late)[number];
    }

    // Returns rows of an output declared by name alone, in the getters' bucket.
    const at::Tensor& rows_of(const LateOutput& output, std::int64_t rows) const;
    // Allocates memory for an output declared by name alone, outside the value's graph.
    at::Tensor memory_like(const at::Tensor& value) const;

    // Returns the number of a bucket's layout, with its views made; throws Error for an unknown
    // bucket.
    std::size_t layout_of(const Key& bucket);
    void make_views(Layout& layout) const;

    // Finds each input's value; null if the step has none. Throws Error for unknown and repeated
    // names.
    void assign(c10::ArrayRef<NamedValue> named);

    // Throws Error unless the value fits a step of this shape; writes the value's shape.
    void check(const Input& input, const vmmgraph_input_view_t& place, const Key& step,
               const Value& value, Shape& shape) const;

    // Returns true if the value is written on the device, false if in staging memory.
    bool on_device(const Input& input, const Value& value) const;

    // Returns a host value in the plan's form; valid as long as the value.
    static vmmgraph_step_input_t step_of(const Given& given, const Value& value,
                                         const Shape& shape);

    // Returns the write of a device value.
    DeviceWrite write_of(const Layout& layout, std::size_t input, const Value& value) const;

    // Returns true if a kernel transfers staging memory now.
    bool by_kernel() const;

    // Copies the prepared inputs to the device, as GraphInputs::commit; `stream` is torch's current
    // stream.
    void commit(void* stream);

    // Holds the values of writes on `stream` until done, and releases those of earlier, done
    // writes.
    void hold(std::vector<DeviceWrite>& writes, void* stream);
};

}  // namespace vmmgraph::engine
