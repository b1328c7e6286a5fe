// Named values of steps, and reference padding made with torch.
#pragma once

#include "devices.hpp"

namespace engine_tests {

// In declaration order, without outputs.
inline std::vector<NamedValue> named(const std::vector<Input>& inputs,
                                     const std::vector<at::Tensor>& values) {
    std::vector<NamedValue> all;
    for (std::size_t i = 0; i < values.size(); ++i) {
        all.push_back({inputs[i].name, values[i]});
    }
    return all;
}

// The expected input: value, then padding.
inline at::Tensor padded(const Input& input, const at::Tensor& value, at::IntArrayRef shape) {
    const auto zero = input.pad.rule == VMMGRAPH_PAD_ZERO;
    auto whole = at::full(shape, zero ? c10::Scalar(0) : input.pad.element, value.options());
    if (input.pad.rule == VMMGRAPH_PAD_REPEAT_LAST) {
        // The nearest element along each dimension.
        whole = value;
        for (std::int64_t i = 0; i < value.dim(); ++i) {
            const auto nearest =
                at::arange(shape[static_cast<std::size_t>(i)]).clamp_max(value.size(i) - 1);
            whole = whole.index_select(i, nearest);
        }
        return whole;
    }
    auto corner = whole;
    for (std::int64_t i = 0; i < value.dim(); ++i) {
        corner = corner.narrow(i, 0, value.size(i));
    }
    corner.copy_(value);
    return whole;
}

}  // namespace engine_tests
