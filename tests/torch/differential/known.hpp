#pragma once

#include <vector>

#include "harness.hpp"

namespace differential {

// Every difference from torch's own captures that is meant. A row of docs/guarantees.md for each scenario.
std::vector<Known> known_differences();

}  // namespace differential
