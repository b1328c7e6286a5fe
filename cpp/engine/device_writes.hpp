// A step's inputs that are on the device already, to their places.
#pragma once

#include <optional>
#include <vector>

#include <vmmgraph/engine.hpp>

namespace vmmgraph::engine {

struct DeviceWrite {
    // The whole input in its bucket, contiguous.
    at::Tensor place;
    // Its leading rows, contiguous; undefined: none.
    at::Tensor value;
    // Nothing: the rest stays as it is.
    std::optional<Pad> pad;
};

// On torch's current stream: one launch for the data of all, one for their zeros, and one for each other padding.
void write(const std::vector<DeviceWrite>& writes);

}  // namespace vmmgraph::engine
