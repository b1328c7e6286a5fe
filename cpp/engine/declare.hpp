// Engine types as vmmgraph.h has them.
#pragma once

#include <cstdint>
#include <string>

#include <vmmgraph/inputs.hpp>

#include "../torch/guards.hpp"

namespace vmmgraph::engine {

using torch::refuse;

// A VMMGRAPH_DTYPE; throws Error for a dtype that no input can have.
std::int32_t to_c(c10::ScalarType dtype);

// An element's bits, little-endian; throws Error for a dtype that has no such element.
std::uint64_t bits_of(const c10::Scalar& element, c10::ScalarType dtype);

// "4 tokens, batch 2, variant 1".
std::string text_of(const Key& key);

}  // namespace vmmgraph::engine
