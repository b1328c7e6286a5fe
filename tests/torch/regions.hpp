// Fixture of the tests of tensors in regions. Needs a GPU.
#pragma once

#include "fixture.hpp"

#include <optional>
#include <vmmgraph/torch_region.hpp>

namespace torch_tests {

using vmmgraph::Device;
using vmmgraph::PauseFence;
using vmmgraph::Policy;
using vmmgraph::Region;
using vmmgraph::torch::DisableScope;
using vmmgraph::torch::RegionScope;

inline at::TensorOptions bytes() { return at::TensorOptions().dtype(at::kByte).device(at::kCUDA); }
inline at::TensorOptions whole() { return at::TensorOptions().dtype(at::kInt).device(at::kCUDA); }

class Regions : public Torch {
protected:
    void SetUp() override {
        Torch::SetUp();
        device_.emplace(Device::open());
    }

    PauseFence fence() const { return {{raw()}, {}}; }

    std::optional<Device> device_;
};

}  // namespace torch_tests
