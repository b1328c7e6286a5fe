// Torch releases which one build of this library serves.
#pragma once

#include <array>
#include <string_view>
#include <utility>

namespace vmmgraph::torch {

// Patch releases with equal headers, apart from version numbers. tests/torch/patches.sh compares
// the headers. 2.9.0 and 2.9.1 differ (ATen/Context.h).
inline constexpr std::array<std::pair<std::string_view, std::string_view>, 2> equal_releases{{
    {"2.12.0", "2.12.1"},
    {"2.14.0", "2.14.1"},
}};

// Whether a library built for one release works with the loaded one.
constexpr bool serves(std::string_view built, std::string_view loaded) {
    if (built == loaded) {
        return true;
    }
    for (const auto& [one, other] : equal_releases) {
        if ((built == one && loaded == other) || (built == other && loaded == one)) {
            return true;
        }
    }
    return false;
}

}  // namespace vmmgraph::torch
