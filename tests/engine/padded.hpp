// Padding as the declarations say, made with torch.
#pragma once

#include "devices.hpp"

namespace engine_tests {

// What an input has to be: the value, then the padding.
inline at::Tensor padded(const Input& input, const at::Tensor& value, at::IntArrayRef shape) {
    const auto zero = input.pad.rule == VMMGRAPH_PAD_ZERO;
    auto whole = at::full(shape, zero ? c10::Scalar(0) : input.pad.element, value.options());
    if (input.pad.rule == VMMGRAPH_PAD_REPEAT_LAST) {
        whole.copy_(value.narrow(0, value.size(0) - 1, 1).expand(shape));
    }
    auto corner = whole;
    for (std::int64_t i = 0; i < value.dim(); ++i) {
        corner = corner.narrow(i, 0, value.size(i));
    }
    corner.copy_(value);
    return whole;
}

}  // namespace engine_tests
