// File of a traffic histogram, shared with `vmmgraph plan` and the Python plugins:
//
//   {"vmmgraph_histogram": 1, "shapes": [
//     {"mode": "full", "variant": 1, "extents": [8, 8, 0, 0], "steps": 1200}]}
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <vmmgraph/dispatch.hpp>

namespace vmmgraph::engine {

// Steps of a graph.
struct ShapeSteps {
    dispatch::Mode mode = dispatch::Mode::full;
    dispatch::Key key;
    std::uint64_t steps = 0;
};

// Reads a file; empty if the file does not exist. Throws Error for an unreadable file, other
// contents and another version.
[[nodiscard]] std::vector<ShapeSteps> read_histogram(const std::string& path);
// Replaces a file atomically. Throws Error.
void write_histogram(const std::string& path, const std::vector<ShapeSteps>& shapes);

}  // namespace vmmgraph::engine
