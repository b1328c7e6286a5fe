// Helpers for tests of captures behind the traffic.
#pragma once

#include <chrono>
#include <thread>
#include <vector>

#include "small.hpp"

namespace engine_tests {

inline ExecutorOptions behind(const std::vector<std::uint32_t>& full = {1, 2, 4, 8}) {
    auto options = both(full);
    options.piecewise.clear();
    options.captures = Captures::behind;
    return options;
}

inline Reason decode(Small& small, std::int64_t n) {
    Ran ran;
    EXPECT_TRUE(small.run(n, Phase::decode, ran, uniform_decode)) << n;
    return ran.reason;
}

// Calls between_steps() until `left` graphs are left, for at most ten seconds. Returns the last
// call's result.
inline std::size_t until(Small& small, std::size_t left) {
    using namespace std::chrono_literals;
    const auto end = std::chrono::steady_clock::now() + 10s;
    auto waiting = small.executor->between_steps(1us);
    while (waiting != left && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(50us);
        waiting = small.executor->between_steps(1us);
    }
    return waiting;
}

inline void finish(Small& small) { EXPECT_EQ(until(small, 0), 0u); }

}  // namespace engine_tests
