// Executables instantiated before their steps.
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>

#include "../../cpp/engine/ahead.hpp"
#include "small.hpp"

namespace engine_tests {
namespace {

using vmmgraph::dispatch::no_slot;
using vmmgraph::dispatch::Slot;
using vmmgraph::engine::Ahead;

TEST(Ahead, NeighboursAndWhatFollowedLastTime) {
    Ahead ahead({{4, Mode::full, Key::of(1)},
                 {2, Mode::full, Key::of(2)},
                 {7, Mode::piecewise, Key::of(2)},
                 {3, Mode::full, Key::of(4, 0, 1)},
                 {1, Mode::full, Key::of(8)}});
    using Slots = std::vector<Slot>;
    EXPECT_EQ(ahead.after(2), (Slots{4, 1}));
    EXPECT_EQ(ahead.after(2), Slots{}) << "nothing new";
    EXPECT_EQ(ahead.after(7), Slots{}) << "another mode has no neighbours";
    EXPECT_EQ(ahead.after(2), (Slots{7, 4, 1})) << "it followed last time";
    EXPECT_EQ(ahead.after(3), Slots{}) << "another variant";
    EXPECT_EQ(ahead.after(4), Slots{2});
    EXPECT_EQ(ahead.after(2), (Slots{3, 4, 1})) << "followed by 3 when it was there last";
    EXPECT_EQ(ahead.after(no_slot), Slots{});
    EXPECT_EQ(ahead.after(100), Slots{});
}

// Batches grow and shrink by a few, with occasional jumps.
TEST(Ahead, OnOrdinaryTrafficFewStepsWaitForTheirExecutable) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    for (const bool instantiate_ahead : {true, false}) {
        ExecutorOptions options;
        for (std::uint32_t i = 1; i <= 32; ++i) {
            options.full.push_back(Key::of(4 * i, 0, uniform_decode));
        }
        options.executables = {8, 0};
        options.instantiate_ahead = instantiate_ahead;
        Small small(options);
        EXPECT_EQ(small.executor->warm_up(), 32u);
        const auto before = small.executor->executables();
        EXPECT_EQ(before.instantiated, 8u);
        const auto text = small.executor->prometheus({{"model", "small"}});
        EXPECT_NE(
            text.find("\nvmmgraph_executable_graphs{model=\"small\",state=\"template_only\"} 24\n"),
            std::string::npos)
            << text;
        std::mt19937 random(17);
        Ran ran;
        int at = 40, wrong = 0;
        const int steps = most_steps(4000);
        for (int i = 0; i < steps; ++i) {
            const auto dice = random() % 100;
            at = dice == 0    ? 1 + static_cast<int>(random() % 128)
                 : dice <= 30 ? at + 1
                 : dice <= 60 ? at - 1
                              : at;
            at = std::clamp(at, 1, 128);
            wrong += !small.run(at, Phase::decode, ran, uniform_decode) || ran.mode != Mode::full;
        }
        const auto after = small.executor->executables();
        std::printf(
            "RESULT executables: 32 graphs, 8 executables, %d steps of a random walk, %s: %llu "
            "steps had to instantiate, %llu were "
            "instantiated ahead, %d "
            "wrong\n",
            steps, instantiate_ahead ? "instantiated ahead" : "not instantiated ahead",
            static_cast<unsigned long long>(after.misses - before.misses),
            static_cast<unsigned long long>(after.ahead - before.ahead), wrong);
        EXPECT_EQ(wrong, 0);
        EXPECT_LE(after.executables, 9u);
        if (instantiate_ahead && steps == 4000) {
            EXPECT_LE((after.misses - before.misses) * 20, static_cast<std::uint64_t>(steps));
        }
        small.executor->expect({Key::of(128, 0, uniform_decode), Phase::decode});
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const auto misses = small.executor->executables().misses;
        EXPECT_TRUE(small.run(128, Phase::decode, ran, uniform_decode));
        EXPECT_EQ(small.executor->executables().misses, misses);
    }
}

}  // namespace
}  // namespace engine_tests
