// After a kernel assertion every CUDA call fails.
#include "small.hpp"

namespace engine_tests {
namespace {

[[noreturn]] void everything_goes(bool eager_in_arena) {
    {
        ExecutorOptions options;
        options.full = {Key::of(4), Key::of(8)};
        options.piecewise = {Key::of(16), Key::of(64)};
        options.most_tokens = 60;
        options.eager_in_arena = eager_in_arena;
        Small small(options);
        Ran ran;
        for (const std::int64_t tokens : {3, 7, 11, 30, 61}) {
            if (!small.run(tokens, tokens < 8 ? Phase::decode : Phase::mixed, ran)) {
                std::_Exit(2);
            }
        }
        // An out-of-range token in a graph.
        const auto step = [&](std::int64_t token, std::int64_t tokens) {
            static_cast<void>(small.executor->run(
                {Key::of(static_cast<std::uint32_t>(tokens)), Phase::mixed},
                {{names::tokens, at::full({tokens}, token, at::kLong)}}, [] {},
                stream(small.index)));
        };
        int refused = 0;
        for (const std::int64_t tokens : {30, 11, 3, 61, 61}) {
            try {
                step(std::int64_t{1} << 24, tokens);
                refused += cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
            } catch (const std::exception&) {
                ++refused;
            }
        }
        if (refused < 5) {
            std::_Exit(3);
        }
    }
    std::exit(0);
}

TEST(BrokenDevice, StepsFailAndTheProcessLives) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    // Threads of CUDA's libraries do not survive a fork.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(everything_goes(false), testing::ExitedWithCode(0), "");
    EXPECT_EXIT(everything_goes(true), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace engine_tests
