// Captures behind the traffic: order, slices, stand-ins, failures, limits, histogram, ranks.
// Recordings on a second thread: beside_test.cpp.
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "behind.hpp"
#include "gather.hpp"

namespace engine_tests {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

// Notes the recordings, and the eager runs as negative sizes.
struct Noted {
    std::vector<int> bodies;

    explicit Noted(Small& small) {
        small.trouble = [this](Recorder& recorder) {
            const auto size = static_cast<int>(recorder.bucket()[Axis::tokens]);
            bodies.push_back(recorder.recording() ? size : -size);
        };
    }
    std::vector<int> take() { return std::exchange(bodies, {}); }
};

// A folder, removed at the end.
struct Folder {
    fs::path path = fs::temp_directory_path() / ("vmmgraph_behind_" + std::to_string(::getpid()));
    Folder() { fs::create_directories(path); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { fs::remove_all(path); }
    [[nodiscard]] std::string file(const std::string& name) const { return (path / name).string(); }
};

TEST(Behind, StepsRunEagerlyUntilTheMostUsedGraphsAreCaptured) {
    Small small(behind());
    Noted noted(small);
    EXPECT_EQ(decode(small, 1), Reason::not_captured);
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(decode(small, 3), Reason::not_captured);
    }
    EXPECT_EQ(small.eager_steps, 4);
    EXPECT_EQ(noted.take(), std::vector<int>{}) << "a step captures nothing";
    EXPECT_EQ(small.executor->between_steps(0us), 0u)
        << "nothing is planned yet, and a slice of 0 does nothing";
    EXPECT_EQ(small.executor->between_steps(1us), 2u);
    EXPECT_EQ(noted.take(), std::vector<int>{4}) << "the most used one";
    EXPECT_EQ(decode(small, 3), Reason::being_captured) << "not published before its instantiation";
    EXPECT_EQ(until(small, 1), 1u);
    EXPECT_EQ(decode(small, 3), Reason::padded);
    EXPECT_EQ(decode(small, 2), Reason::stand_in) << "4 weighs at most twice as much";
    EXPECT_EQ(decode(small, 1), Reason::not_captured);
    noted.take();
    finish(small);
    EXPECT_EQ(decode(small, 1), Reason::hit);
    EXPECT_EQ(decode(small, 2), Reason::hit) << "a stand-in counts for the step's own graph";
    EXPECT_EQ(small.executor->stats().captures, 3u) << "8 was never needed";
    EXPECT_EQ(small.executor->between_steps(1s), 0u);
}

TEST(Behind, ALongSliceCapturesAllThatTrafficNeeded) {
    Small small(behind());
    for (const auto n : {8, 1, 2}) {
        decode(small, n);
    }
    EXPECT_EQ(small.executor->between_steps(10min), 0u);
    EXPECT_EQ(small.executor->stats().graphs, 3u);
}

TEST(Behind, AStepWaitsForASliceOrOneUnitOfWork) {
    auto options = behind({1, 2, 3, 4, 5, 6, 7, 8});
    options.stand_in = 1;
    Small small(options);
    std::size_t calls = 0;
    small.trouble = [&](Recorder&) {
        ++calls;
        std::this_thread::sleep_for(20ms);
    };
    for (int n = 1; n <= 8; ++n) {
        EXPECT_EQ(decode(small, n), Reason::not_captured);
    }
    EXPECT_EQ(calls, 0u);
    small.executor->between_steps(1us);
    EXPECT_EQ(calls, 1u) << "the first capture's duration was unknown";
    small.executor->between_steps(10ms);
    EXPECT_EQ(calls, 1u) << "an instantiation fits, and the next capture is expected not to";
    small.executor->between_steps(10ms);
    EXPECT_EQ(calls, 2u) << "one unit is done in any case";
    small.executor->between_steps(90ms);
    EXPECT_GE(calls, 3u);
    EXPECT_LE(calls, 6u) << "four captures of 20 ms fit";
}

// Eager runs before a capture are units of their own.
TEST(Behind, EagerRunsComeFirstOneAUnit) {
    auto options = behind();
    options.eager_runs = 2;
    Small small(options);
    Noted noted(small);
    decode(small, 4);
    for (const auto& expected : {std::vector{-4}, std::vector{-4}, std::vector{4}}) {
        EXPECT_EQ(small.executor->between_steps(1us), 1u);
        EXPECT_EQ(noted.take(), expected);
        EXPECT_NE(decode(small, 4), Reason::hit);
    }
    EXPECT_EQ(until(small, 0), 0u);
    EXPECT_EQ(decode(small, 4), Reason::hit);
}

TEST(Behind, PiecesAndSecondModesAreCapturedToo) {
    auto options = behind({4});
    options.piecewise = {Key::of(16), Key::of(64)};
    Small small(options);
    Ran ran;
    EXPECT_TRUE(small.run(11, Phase::prefill, ran, 0, 1.5F) && ran.mode == Mode::eager);
    finish(small);
    EXPECT_TRUE(small.run(11, Phase::prefill, ran, 0, 2.5F) && ran.mode == Mode::piecewise);
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode, 3.5F) &&
                ran.mode == Mode::piecewise)
        << "the second mode stands in";
    finish(small);
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode) && ran.mode == Mode::full)
        << "the first mode's graph was missing";
    EXPECT_EQ(small.executor->stats().captures, 2u);
}

TEST(Behind, AFailedCaptureLeavesItsStepsEagerAndTheOthersGoOn) {
    Small small(behind());
    small.trouble = [](Recorder& recorder) {
        if (recorder.bucket()[Axis::tokens] == 4) {
            throw std::runtime_error("planted");
        }
    };
    decode(small, 4);
    decode(small, 4);
    decode(small, 1);
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::capture_failed);
    EXPECT_EQ(decode(small, 1), Reason::hit);
    EXPECT_NE(small.executor->last_failure().find("planted"), std::string::npos);
    small.trouble = nullptr;
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::capture_failed) << "not tried again";
    small.executor->forgive();
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
}

TEST(Behind, AFailureThrowsIfItIsTo) {
    for (const std::uint32_t eager_runs : {0u, 1u}) {
        auto options = behind();
        options.on_failure = OnFailure::throws;
        options.eager_runs = eager_runs;
        Small small(options);
        small.trouble = [](Recorder&) { throw std::runtime_error("planted"); };
        decode(small, 4);
        EXPECT_THROW(small.executor->between_steps(1s), std::runtime_error);
        EXPECT_EQ(decode(small, 4), Reason::not_captured);
        small.trouble = nullptr;
        finish(small);
        EXPECT_EQ(decode(small, 4), Reason::hit);
    }
}

TEST(Behind, UnderALimitTheMostUsedGraphsStay) {
    auto options = behind();
    options.most_graphs = 1;
    options.stand_in = 1;
    Small small(options);
    for (int i = 0; i < 3; ++i) {
        decode(small, 1);
    }
    finish(small);
    EXPECT_EQ(decode(small, 1), Reason::hit);
    decode(small, 4);
    finish(small);
    EXPECT_EQ(decode(small, 1), Reason::hit) << "4 was used once";
    EXPECT_EQ(small.executor->stats().captures, 1u);
    for (int i = 0; i < 200; ++i) {
        decode(small, 4);
    }
    finish(small);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(decode(small, 1), Reason::not_captured);
    EXPECT_EQ(small.executor->stats().graphs, 1u);
    EXPECT_EQ(small.executor->stats().evictions, 1u);
}

// Traffic moves like that of a day: some shapes now, others later.
TEST(Behind, MovingTrafficUnderALimitIsServedByGraphs) {
    auto options = behind({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
    options.most_graphs = 8;
    Small small(options);
    int wrong = 0;
    int eager = 0;
    int steps = 0;
    const int each = most_steps(12'000) / 12;
    for (int hour = 0; hour < 12; ++hour) {
        for (int i = 0; i < each; ++i, ++steps) {
            Ran ran;
            wrong += !small.run(1 + (hour + i % 5) % 16, Phase::decode, ran, uniform_decode);
            eager += ran.mode == Mode::eager;
            small.executor->between_steps(1us);
        }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(eager <= steps / 20 || shortened())
        << eager << " of " << steps << " steps are eager: at most 5 % may be";
    EXPECT_LE(small.executor->stats().graphs, 8u);
    EXPECT_LT(small.executor->stats().evictions, 60u)
        << "no graph is captured to be evicted at once";
}

TEST(Behind, TheSecondStartCapturesWhatTheFirstUsed) {
    const Folder folder;
    auto options = behind();
    options.histogram = folder.file("traffic.json");
    {
        Small first(options);
        for (const auto n : {8, 2, 2, 2, 8, 1, 2}) {
            decode(first, n);
        }
        first.executor->save_histogram();
    }
    std::ifstream file(options.histogram);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_NE(
        text.find("{\"mode\": \"full\", \"variant\": 1, \"extents\": [2, 0, 0, 0], \"steps\": 4}"),
        std::string::npos)
        << text;
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 1)
        << "the temporary file is renamed";
    Small second(options);
    Noted noted(second);
    finish(second);
    EXPECT_EQ(noted.take(), (std::vector<int>{2, 8, 1})) << "before any step, most used first";
    EXPECT_EQ(decode(second, 8), Reason::hit);
    // Other buckets: each shape at the bucket which covers the shape.
    options.full = {Key::of(3, 0, uniform_decode), Key::of(16, 0, uniform_decode)};
    Small third(options);
    Noted others(third);
    finish(third);
    EXPECT_EQ(others.take(), (std::vector<int>{3, 16}));
}

TEST(Behind, AnUnreadableHistogramIsIgnored) {
    const Folder folder;
    auto options = behind();
    options.histogram = folder.file("traffic.json");
    for (const auto* const text :
         {"", "{}", "[]", "{\"vmmgraph_histogram\": 2, \"shapes\": []}",
          "{\"vmmgraph_histogram\": 1, \"shapes\": [{]}",
          "{\"vmmgraph_histogram\": 1, \"shapes\": [{\"mode\": \"full\", \"extents\": [1, 2, 3, 4, "
          "5]}]}",
          "{\"vmmgraph_histogram\": 1, \"shapes\": [{\"steps\": 99999999999999999999}]}",
          "{\"vmmgraph_histogram\": 1, \"shapes\": []} x"}) {
        std::ofstream(options.histogram) << text;
        Small small(options);
        EXPECT_EQ(small.executor->between_steps(1s), 0u) << text;
        decode(small, 4);
        finish(small);
        EXPECT_EQ(decode(small, 4), Reason::hit) << text;
    }
    options.histogram = folder.file("no/such/folder.json");
    Small small(options);
    const auto why = refusal([&] { small.executor->save_histogram(); });
    EXPECT_NE(why.find("No such file"), std::string::npos) << why;
}

TEST(Behind, OnlyBetweenSteps) {
    Small small(behind());
    const auto tokens = at::randint(0, vocabulary, {3}, at::kLong);
    small.executor->prepare({Key::of(3, 0, uniform_decode), Phase::decode},
                            {{names::tokens, tokens}});
    const auto prepared =
        refusal([&] { small.executor->between_steps(1s); }, VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(prepared.find("a step is prepared"), std::string::npos) << prepared;
    small.executor->launch([] {}, stream());
    EXPECT_EQ(small.executor->between_steps(1s), 0u);
    // The getters keep the step's bucket.
    EXPECT_EQ(decode(small, 4), Reason::hit);
    decode(small, 8);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    EXPECT_EQ(small.executor->between_steps(1s), 0u);
    EXPECT_EQ(small.inputs->bucket(), Key::of(4, 0, uniform_decode));
    Small lazy(both({4}));
    EXPECT_NE(refusal([&] { lazy.executor->between_steps(1s); }, VMMGRAPH_ERROR_WRONG_STATE), "");
    EXPECT_NE(refusal([&] { lazy.executor->save_histogram(); }, VMMGRAPH_ERROR_WRONG_STATE), "");
}

TEST(Behind, AnUnfinishedCaptureGivesWay) {
    auto options = behind();
    options.eager_runs = 1;
    Small small(options);
    const auto begun = [&] {
        decode(small, 4);
        EXPECT_EQ(small.executor->between_steps(1us), 1u);
        EXPECT_EQ(decode(small, 4), Reason::being_captured);
    };
    begun();
    small.executor->clear();
    EXPECT_EQ(decode(small, 4), Reason::not_captured);
    begun();
    EXPECT_EQ(small.executor->warm_up(), 4u);
    EXPECT_EQ(decode(small, 4), Reason::hit);
    small.executor->clear();
    begun();
    // Ranks may decide for the graph in work: this rank captures the graph in the step.
    const auto tokens = at::randint(0, vocabulary, {4}, at::kLong);
    const Step step{Key::of(4, 0, uniform_decode), Phase::decode};
    auto agreed = small.executor->decide(step);
    agreed.mode = Mode::full;
    agreed.bucket = step.key;
    small.executor->prepare(step, {{names::tokens, tokens}}, agreed);
    EXPECT_EQ(small.executor->launch([] { FAIL(); }, stream()).mode, Mode::full);
    wait();
    EXPECT_EQ(decode(small, 4), Reason::hit);
    // Unfinished at the end.
    small.executor->clear();
    begun();
}

// Ranks with different histories capture the same graphs in the same calls, and one that fails
// keeps its part in the eager runs, which may contain collectives.
TEST(Behind, RanksCaptureTheSameGraphsInTheSameCalls) {
    const Folder folder;
    std::ofstream(folder.file("a")) << R"({"vmmgraph_histogram": 1, "shapes": [
        {"mode": "full", "variant": 1, "extents": [8, 0, 0, 0], "steps": 500},
        {"mode": "full", "variant": 1, "extents": [1, 0, 0, 0], "steps": 200}]})";
    std::ofstream(folder.file("b")) << R"({"vmmgraph_histogram": 1, "shapes": [
        {"mode": "full", "variant": 1, "extents": [4, 0, 0, 0], "steps": 500}]})";
    Gather gather(2);
    auto options = behind();
    options.eager_runs = 1;
    options.stand_in = 1;
    options.exchange = [&](const Decision& mine) { return gather(mine); };
    options.histogram = folder.file("a");
    Small a(options);
    options.histogram = folder.file("b");
    Small b(options);
    constexpr int rounds = 40;
    std::array<std::vector<std::vector<int>>, 2> bodies;
    std::array<std::vector<Mode>, 2> modes;
    const auto rank = [&](Small& small, std::size_t number) {
        std::vector<int> seen;
        int calls = 0;
        small.trouble = [&](Recorder& recorder) {
            ++calls;
            const auto size = static_cast<int>(recorder.bucket()[Axis::tokens]);
            if (!recorder.recording()) {
                seen.push_back(-size);
            } else if (number == 1 && size == 8) {
                throw std::runtime_error("planted");
            }
        };
        for (int round = 0; round < rounds; ++round) {
            const std::int64_t n = std::array{1, 2, 4, 8}.at(static_cast<std::size_t>(round % 4));
            const auto tokens = at::randint(0, vocabulary, {n}, at::kLong);
            const Step step{Key::of(static_cast<std::uint32_t>(n), 0, uniform_decode),
                            Phase::decode};
            modes[number].push_back(
                small.executor->run(step, {{names::tokens, tokens}}, [] {}, stream()).mode);
            wait_for_stream();
            seen.clear();
            calls = 0;
            small.executor->between_steps(1s);
            EXPECT_LE(calls, 1) << "one unit a call, whatever the time";
            bodies[number].push_back(seen);
        }
        small.trouble = nullptr;
    };
    std::thread other([&] { rank(b, 1); });
    rank(a, 0);
    other.join();
    EXPECT_EQ(bodies[0], bodies[1]);
    EXPECT_EQ(modes[0], modes[1]);
    EXPECT_EQ(a.executor->stats().graphs, 4u);
    EXPECT_EQ(b.executor->stats().graphs, 3u);
    EXPECT_EQ(modes[0][rounds - 1], Mode::eager) << "one rank has no graph of 8";
    EXPECT_EQ(modes[0][rounds - 2], Mode::full);
}

}  // namespace
}  // namespace engine_tests
