// Writes of a step's device inputs to their places.
#pragma once

#include <cstddef>
#include <vector>

#include <vmmgraph/inputs.hpp>

namespace vmmgraph::engine {

struct DeviceWrite {
    // The input in its bucket, contiguous; only the step's rows if the rest is not padded.
    at::Tensor place;
    // Data for the corner, with any strides and no longer dimension; undefined: none.
    at::Tensor value;
    // Padding of the rest.
    Pad pad;
};

// Writes on torch's current stream: one launch for all zeros, one for all contiguous values as wide
// as their place, one per other value, and one per dimension of other padding.
void write(const std::vector<DeviceWrite>& writes);

// Copies bytes by a kernel on torch's current stream, not by a copy engine, whose copies run in
// order. Both addresses are device addresses, of device memory or pinned host memory.
void copy_by_kernel(void* to, const void* from, std::size_t bytes, c10::Device device);

}  // namespace vmmgraph::engine
