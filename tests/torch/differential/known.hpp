#pragma once

#include <vector>

#include "harness.hpp"

namespace differential {

// Every intended difference from torch's own captures. docs/guarantees.md has a row per scenario.
std::vector<Known> known_differences();

}  // namespace differential
