// Conversions of engine types to those of vmmgraph.h.
#pragma once

#include <cstdint>
#include <string>

#include <vmmgraph/inputs.hpp>

#include "../torch/guards.hpp"

namespace vmmgraph::engine {

using torch::refuse;

// Returns the VMMGRAPH_DTYPE; throws Error for a dtype no input can have.
std::int32_t to_c(c10::ScalarType dtype);

// Returns an element's bits, little-endian. Throws Error for an unsupported dtype, and c10::Error
// for an element outside its range.
std::uint64_t bits_of(const c10::Scalar& element, c10::ScalarType dtype);

// Returns text like "4 tokens, batch 2, pages 0, variant 1".
std::string text_of(const Key& key);

}  // namespace vmmgraph::engine
