// A step's inputs that are on the device already, to their places.
#pragma once

#include <cstddef>
#include <vector>

#include <vmmgraph/inputs.hpp>

namespace vmmgraph::engine {

struct DeviceWrite {
    // The input in its bucket, or as many of its rows as the step has where the rest is not padded; contiguous.
    at::Tensor place;
    // What goes into its corner, with any strides and no dimension longer; undefined: nothing.
    at::Tensor value;
    // What goes into the rest.
    Pad pad;
};

// On torch's current stream: one launch for all zeros, one for the data of all values that are as wide as their place and lie in one piece,
// one for each other value, and one for each dimension of other padding.
void write(const std::vector<DeviceWrite>& writes);

// The same bytes somewhere else, by one kernel on torch's current stream: not by one of the device's copy engines, which take what they are given in
// order. Both addresses are the device's, of its own memory or of pinned memory of the host.
void copy_by_kernel(void* to, const void* from, std::size_t bytes, c10::Device device);

}  // namespace vmmgraph::engine
