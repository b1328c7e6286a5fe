// Median of measurements.
#pragma once

#include <algorithm>
#include <vector>

// Returns the upper of two middle values.
inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.at(values.size() / 2);
}
