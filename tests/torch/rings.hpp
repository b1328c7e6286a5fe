// Fixture of the tests of rings in captures: a streaming and a resident ring over host memory.
// Needs a GPU.
#pragma once

#include "fixture.hpp"

#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

namespace torch_tests {

using vmmgraph::Device;
using vmmgraph::HostBuffer;
using vmmgraph::HostRun;
using vmmgraph::Ring;
using vmmgraph::RingOptions;
using vmmgraph::RingUnit;
using vmmgraph::UnitScope;

// A tensor over a unit's memory.
inline at::Tensor numbers_at(void* address, std::uint64_t skip, at::IntArrayRef sizes) {
    return at::from_blob(static_cast<char*>(address) + skip, sizes, half());
}

inline std::vector<RingUnit> ring_units(std::size_t count, std::uint64_t bytes, bool resident) {
    return std::vector<RingUnit>(count, RingUnit{bytes, resident});
}

inline RingOptions slots(std::size_t count) {
    RingOptions options;
    options.slots = count;
    return options;
}

class Rings : public Torch {
protected:
    void SetUp() override {
        Torch::SetUp();
        device_.emplace(Device::open());
    }

    HostBuffer host_numbers(std::uint64_t bytes, double scale) {
        HostBuffer buffer(*device_, bytes);
        fill(buffer, bytes, scale);
        return buffer;
    }

    static void fill(HostBuffer& buffer, std::uint64_t bytes, double scale) {
        const auto numbers =
            (at::randn({static_cast<std::int64_t>(bytes / 2)}, half()) * scale).cpu();
        buffer.write(0, numbers.data_ptr(), bytes);
    }

    std::optional<Device> device_;
};

}  // namespace torch_tests
