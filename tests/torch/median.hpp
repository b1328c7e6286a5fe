// Of measurements.
#pragma once

#include <algorithm>
#include <vector>

// The upper one of the two in the middle where there are two.
inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.at(values.size() / 2);
}
