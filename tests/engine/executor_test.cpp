// GraphExecutor over a small model: modes, reasons, eviction, failed captures.
#include <random>
#include <stdexcept>

#include "small.hpp"

namespace engine_tests {
namespace {

TEST(Executor, EveryModeRunsAndSaysWhy) {
    auto options = both({1, 2, 4, 8});
    options.most_tokens = 60;
    Small small(options);
    Ran ran;
    const auto is = [&](Mode mode, Reason reason) {
        return ran.mode == mode && ran.reason == reason;
    };
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode) &&
                is(Mode::full, Reason::captured));
    EXPECT_EQ(ran.bucket, Key::of(4, 0, uniform_decode));
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode) && is(Mode::full, Reason::padded));
    EXPECT_TRUE(small.run(4, Phase::decode, ran, uniform_decode) && is(Mode::full, Reason::hit));
    EXPECT_TRUE(small.run(11, Phase::prefill, ran, 0, 1.5F) &&
                is(Mode::piecewise, Reason::captured));
    EXPECT_TRUE(small.run(16, Phase::mixed, ran, 0, 2.5F) && is(Mode::piecewise, Reason::hit));
    EXPECT_TRUE(small.run(9, Phase::decode, ran, uniform_decode, 3.5F) &&
                is(Mode::piecewise, Reason::padded))
        << "no full graph is as large";
    EXPECT_TRUE(small.run(61, Phase::mixed, ran) && is(Mode::eager, Reason::above_threshold));
    EXPECT_TRUE(small.run(5, Phase::prefill, ran, 0, 0, false) &&
                is(Mode::eager, Reason::not_capturable));
    EXPECT_TRUE(small.run(5, Phase::mixed, ran, 2) && is(Mode::eager, Reason::too_large))
        << "another variant";
    EXPECT_EQ(small.eager_steps, 3);
    EXPECT_EQ(small.executor->stats().captures, 2u);
    EXPECT_EQ(small.executor->unplanned(), 0u);
    EXPECT_EQ(small.executor->steps(Mode::full, Reason::padded), 1u);
    EXPECT_EQ(small.executor->steps(Mode::eager, Reason::too_large), 1u);
    const auto text = small.executor->prometheus({{"model", "a\"b"}});
    EXPECT_NE(
        text.find(
            "vmmgraph_dispatch_steps_total{model=\"a\\\"b\",mode=\"full\",reason=\"padded\"} 1\n"),
        std::string::npos)
        << text;
    EXPECT_NE(text.find("\nvmmgraph_dispatch_captures_total{model=\"a\\\"b\"} 2\n"),
              std::string::npos)
        << text;
    EXPECT_NE(small.executor->prometheus().find("\nvmmgraph_dispatch_graphs 2\n"),
              std::string::npos);
}

// A piecewise graph may contain prefill attention.
TEST(Executor, ADecodeWithoutAFullGraphIsEagerUnlessTheEngineSaysMore) {
    const ExecutorOptions nothing_said;
    auto options = both({1, 4});
    options.modes = nothing_said.modes;
    Small small(options);
    small.trouble = [](Recorder& recorder) {
        if (recorder.mode() == Mode::full) {
            throw std::runtime_error("no full graph today");
        }
    };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode)) << small.executor->last_failure();
    EXPECT_EQ(ran.mode, Mode::eager);
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode) &&
                ran.reason == Reason::capture_failed)
        << "nor the next one";
    EXPECT_TRUE(small.run(9, Phase::decode, ran, uniform_decode) &&
                ran.reason == Reason::too_large);
    EXPECT_TRUE(small.run(9, Phase::prefill, ran, 0, 1.5F) && ran.mode == Mode::piecewise);
    EXPECT_EQ(small.eager_steps, 3);
}

TEST(Executor, AStepWithoutAPhaseIsNoDecode) {
    Small small(both({4}));
    Step step;
    step.key = Key::of(3, 0, uniform_decode);
    const auto ran =
        small.executor->run(step, {{names::tokens, at::zeros({3}, at::kLong)}}, [] {}, stream());
    wait();
    EXPECT_EQ(ran.mode, Mode::piecewise);
}

// For bodies with side effects.
TEST(Executor, TheBodyKnowsWhetherItIsRecorded) {
    auto options = both({4});
    options.eager_runs = 2;
    Small small(options);
    std::vector<bool> recorded;
    small.trouble = [&](Recorder& recorder) { recorded.push_back(recorder.recording()); };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    ASSERT_GE(recorded.size(), 3u);
    EXPECT_EQ(std::vector<bool>(recorded.begin(), recorded.begin() + 3),
              (std::vector<bool>{false, false, true}));
}

// Null in a warm-up.
TEST(Executor, TheBodySeesTheStepThatItIsRecordedFor) {
    GraphInputs inputs(
        {Input::host(names::tokens, at::kLong, {Extent::along(Axis::tokens)}),
         Input::output(names::hidden_states, at::kLong, {Extent::along(Axis::tokens)})},
        {Key::of(2), Key::of(4)}, {device(), 256});
    std::vector<std::pair<Key, const void*>> seen;
    ExecutorOptions options;
    options.full = {Key::of(2), Key::of(4)};
    options.eager_runs = 1;
    options.most_graphs = 1;
    auto arena = device().is_cuda() ? std::make_shared<vmmgraph::SharedVmmAllocator>(0) : nullptr;
    GraphExecutor executor(
        arena, inputs,
        [&](Recorder& recorder) {
            seen.emplace_back(recorder.step().key, recorder.step().params);
            inputs.hidden_states().copy_(inputs.tokens());
        },
        options);
    const int params = 7;
    const std::vector<std::int64_t> tokens{5, 6, 7};
    executor.run(
        {Key::of(3), Phase::decode, true, &params}, {{names::tokens, tokens}}, [] { FAIL(); },
        stream(0));
    wait();
    EXPECT_TRUE(at::equal(inputs.hidden_states(3).cpu(), at::tensor({5, 6, 7}, at::kLong)));
    ASSERT_GE(seen.size(), 2u);
    for (const auto& [key, of] : seen) {
        EXPECT_EQ(key, Key::of(3));
        EXPECT_EQ(of, &params);
    }
}

TEST(Executor, EagerStepsLieInTheArenaIfTheyAreToAndTheirResultsLast) {
    auto options = both({1, 2, 4, 8});
    options.most_tokens = 60;
    options.eager_in_arena = true;
    options.eager_runs = 1;
    Small small(options);
    Ran ran;
    for (int i = 0; i < 20; ++i) {
        EXPECT_TRUE(small.run(64 + i, Phase::mixed, ran, 0, 1.0F) && ran.mode == Mode::eager) << i;
        const auto result = small.eager_output;
        const auto copy = result.cpu();
        if (small.arena) {
            EXPECT_GE(small.arena->stats().live_bytes, result.nbytes()) << "it is torch's";
        }
        EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode) && ran.mode == Mode::full)
            << i;
        EXPECT_TRUE(small.run(11, Phase::prefill, ran, 0, 1.5F) && ran.mode == Mode::piecewise)
            << i;
        EXPECT_TRUE(at::equal(result.cpu(), copy)) << i << ": a graph wrote over it";
    }
    EXPECT_THROW(static_cast<void>(small.executor->run(
                     {Key::of(64), Phase::mixed}, {{names::tokens, at::zeros({64}, at::kLong)}},
                     [] { throw std::runtime_error("the model failed"); }, stream(small.index))),
                 std::runtime_error);
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
}

TEST(Executor, WarmUpCapturesAllAndTrafficIsRight) {
    Small small(both({1, 2, 4, 8}));
    EXPECT_EQ(small.executor->warm_up(), 6u);
    const auto bytes = small.arena ? small.arena->mapped_size() : 0;
    std::mt19937 random(3);
    Ran ran;
    int wrong = 0;
    for (int i = 0; i < most_steps(300); ++i) {
        const bool decode = random() % 2 == 0;
        const auto n = static_cast<std::int64_t>(1 + random() % (decode ? 8 : 64));
        wrong +=
            !small.run(n, decode ? Phase::decode : Phase::mixed, ran, decode ? uniform_decode : 0,
                       decode ? 0 : static_cast<float>(random() % 10));
        wrong += ran.mode == Mode::eager;
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(small.executor->stats().captures, 6u);
    EXPECT_EQ(small.arena ? small.arena->mapped_size() : 0, bytes) << "memory is flat";
    small.executor->clear();
    EXPECT_EQ(small.executor->stats().graphs, 0u);
    if (small.arena) {
        EXPECT_EQ(small.arena->stats().spaces, 0u);
        EXPECT_EQ(small.arena->stats().blocks, 0u) << "something of a capture is alive still";
    }
    EXPECT_TRUE(small.run(8, Phase::decode, ran, uniform_decode))
        << "and a graph can be captured again";
    EXPECT_EQ(ran.reason, Reason::captured);
}

TEST(Executor, AFailedCaptureRunsEagerlyAndSaysSo) {
    Small small(both({1, 2, 4, 8}));
    small.trouble = [](Recorder& recorder) {
        if (recorder.mode() == Mode::full) {
            throw std::runtime_error("this body cannot");
        }
    };
    Ran ran;
    EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.mode, Mode::eager);
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    EXPECT_NE(small.executor->last_failure().find("this body cannot"), std::string::npos);
    EXPECT_EQ(small.executor->unplanned(), 1u);
    EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode, 4.5F));
    EXPECT_EQ(ran.mode, Mode::piecewise);
    small.trouble = nullptr;
    small.executor->forgive();
    EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.mode, Mode::full);
    EXPECT_EQ(ran.reason, Reason::captured);
    EXPECT_EQ(small.executor->stats().failures, 1u);
}

// By an operation illegal in captures.
TEST(Executor, AFailureBetweenPiecesLeavesTheOthersUsable) {
    Small small(both({1, 2, 4, 8}));
    Ran ran;
    EXPECT_TRUE(small.run(60, Phase::mixed, ran, 0, 1.0F));
    small.trouble = [](Recorder& recorder) {
        const auto a = at::ones({512}, on_device(at::kFloat));
        recorder.eager({a}, [](const Step&, at::TensorList) {});
        if (has_gpu()) {
            static_cast<void>((a + 1).sum().item<float>());
        }
        throw std::runtime_error("late");
    };
    EXPECT_TRUE(small.run(10, Phase::mixed, ran));
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    small.trouble = nullptr;
    EXPECT_TRUE(small.run(60, Phase::mixed, ran, 0, 2.0F));
    EXPECT_EQ(ran.reason, Reason::padded);
    small.executor->forgive();
    EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 3.0F));
    EXPECT_EQ(ran.reason, Reason::captured);
}

TEST(Executor, BadValuesLeaveNoGraphBehindAndNoSlotTaken) {
    Small small(both({1, 2, 4, 8}));
    const Step step{Key::of(2, 0, uniform_decode), Phase::decode, true, nullptr};
    EXPECT_NE(refusal([&] {
                  small.executor->prepare(step, {{names::tokens, at::ones({2}, at::kInt)}});
              }).find("the dtype is Int"),
              std::string::npos);
    EXPECT_NE(refusal([&] { small.executor->launch([] {}, stream()); }, VMMGRAPH_ERROR_WRONG_STATE),
              "");
    small.executor->prepare(step, {{names::tokens, at::ones({2}, at::kLong)}});
    EXPECT_EQ(small.executor->prepare(step, {{names::tokens, at::ones({2}, at::kLong)}}).reason,
              Reason::captured);
    Ran ran;
    EXPECT_TRUE(small.run(2, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::captured);
}

TEST(Executor, AStepMayBePreparedWhileTheOneBeforeRuns) {
    Small small(both({1, 2, 4, 8}));
    small.executor->warm_up();
    std::vector<at::Tensor> tokens;
    std::vector<at::Tensor> outputs;
    const auto step = [](std::int64_t n) {
        return Step{Key::of(static_cast<std::uint32_t>(n), 0, uniform_decode), Phase::decode, true,
                    nullptr};
    };
    for (int i = 0; i < 40; ++i) {
        tokens.push_back(at::randint(0, vocabulary, {1 + i % 8}, at::kLong));
    }
    small.executor->prepare(step(1), {{names::tokens, tokens[0]}});
    const OnStream guard;
    for (int i = 0; i < 40; ++i) {
        const auto ran = small.executor->launch([] {}, stream());
        ASSERT_EQ(ran.mode, Mode::full);
        outputs.push_back(small.inputs->hidden_states(1 + i % 8).clone());
        if (i + 1 < 40) {
            small.executor->prepare(step(1 + (i + 1) % 8),
                                    {{names::tokens, tokens[static_cast<std::size_t>(i) + 1]}});
        }
    }
    wait();
    for (std::size_t i = 0; i < 40; ++i) {
        EXPECT_TRUE(at::allclose(outputs[i], small.table.index_select(0, tokens[i].to(device()))))
            << i;
    }
}

TEST(Executor, TheLeastRecentlyUsedGraphGoes) {
    auto options = both({1, 2, 4, 8});
    options.most_graphs = 2;
    Small small(options);
    Ran ran;
    const auto reason_of = [&](std::int64_t n) {
        EXPECT_TRUE(small.run(n, Phase::decode, ran, uniform_decode)) << n;
        return ran.reason;
    };
    EXPECT_EQ(reason_of(1), Reason::captured);
    EXPECT_EQ(reason_of(2), Reason::captured);
    EXPECT_EQ(reason_of(1), Reason::hit);
    EXPECT_EQ(reason_of(4), Reason::captured);
    EXPECT_EQ(reason_of(1), Reason::hit);
    EXPECT_EQ(reason_of(2), Reason::captured) << "2 was the least recently used";
    EXPECT_EQ(small.executor->stats().graphs, 2u);
    EXPECT_EQ(small.executor->stats().evictions, 2u);
}

// Other steps use a larger graph, or run eagerly if padding would be excessive.
TEST(Executor, AheadOfTrafficOnlyLargerGraphsStandIn) {
    auto options = both({1, 2, 4, 8});
    options.full.push_back(Key::of(3, 0, uniform_decode));
    options.most_graphs = 2;
    options.captures = Captures::ahead;
    Small small(options);
    EXPECT_EQ(small.executor->warm_up(), 2u);
    Ran ran;
    EXPECT_TRUE(small.run(8, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::hit);
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::stand_in);
    EXPECT_EQ(ran.bucket, Key::of(4, 0, uniform_decode));
    EXPECT_TRUE(small.run(1, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::not_captured) << "four times its weight";
    EXPECT_TRUE(small.run(30, Phase::mixed, ran));
    EXPECT_EQ(ran.reason, Reason::not_captured);
    EXPECT_EQ(small.executor->unplanned(), 2u);
    EXPECT_EQ(small.executor->steps(Mode::full, Reason::stand_in), 1u);
    EXPECT_EQ(small.executor->stats().captures, 2u);
}

TEST(Executor, BothRoutesAndPoliciesRunPiecewise) {
    using vmmgraph::Retain;
    using vmmgraph::torch::Route;
    for (const vmmgraph::torch::CaptureOptions& capture :
         {vmmgraph::torch::CaptureOptions{Route::blocks, Retain::shared_pages},
          vmmgraph::torch::CaptureOptions{Route::mempool, Retain::inherit}}) {
        auto options = both({1, 2, 4, 8});
        options.capture = capture;
        Small small(options);
        EXPECT_EQ(small.executor->warm_up(), 6u);
        std::mt19937 random(9);
        Ran ran;
        int wrong = 0;
        for (int i = 0; i < most_steps(50); ++i) {
            wrong += !small.run(1 + random() % 64, Phase::mixed, ran, 0,
                                static_cast<float>(random() % 5));
            wrong += ran.mode != Mode::piecewise;
            wrong += !small.run(1 + random() % 8, Phase::decode, ran, uniform_decode);
            wrong += ran.mode != Mode::full;
        }
        EXPECT_EQ(wrong, 0) << "route " << static_cast<int>(capture.route);
    }
}

// Otherwise one page per graph.
TEST(Executor, WhatRunnersKeepOfManyGraphsSharesPages) {
    auto options = both({1, 2, 4, 8});
    options.piecewise.clear();
    for (std::uint32_t size = 1; size <= 16; ++size) {
        options.piecewise.push_back(Key::of(size));
    }
    Small small(options);
    small.trouble = [](Recorder& recorder) {
        if (recorder.mode() != Mode::piecewise) {
            return;
        }
        const auto own = [] {
            const KeptScope kept;
            return at::zeros({16}, on_device(at::kFloat));
        }();
        recorder.eager({own}, [own](const Step&, at::TensorList) {});
    };
    EXPECT_EQ(small.executor->warm_up(), 20u);
    if (small.arena) {
        const auto stats = small.arena->stats();
        EXPECT_GT(stats.kept_bytes, 0u);
        EXPECT_LE(stats.kept_bytes, std::uint64_t{2} << 20);
        EXPECT_EQ(stats.retained_bytes, 0u);
    }
    Ran ran;
    for (std::int64_t n = 1; n <= 16; ++n) {
        EXPECT_TRUE(small.run(n, Phase::mixed, ran, 0, 2.5F)) << n;
        EXPECT_EQ(ran.mode, Mode::piecewise);
    }
    small.executor->clear();
    if (small.arena) {
        EXPECT_EQ(small.arena->mapped_size(), 0u);
    }
}

TEST(Executor, AGraphThatIsLargerThanTheLimitIsRefusedAndTheOthersComeBack) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    auto options = both({1, 2, 4, 8});
    options.piecewise.push_back(Key::of(1 << 17));
    options.most_bytes = std::uint64_t{64} << 20;
    Small small(options);
    Ran ran;
    EXPECT_TRUE(small.run(50, Phase::mixed, ran, 0, 1.0F));
    EXPECT_EQ(ran.mode, Mode::piecewise);
    EXPECT_TRUE(small.run((1 << 17) - 5, Phase::mixed, ran, 0, 1.0F));
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    EXPECT_NE(small.executor->last_failure().find("the limit is 67108864"), std::string::npos)
        << small.executor->last_failure();
    EXPECT_LE(small.arena->mapped_size(), options.most_bytes);
    EXPECT_TRUE(small.run(50, Phase::mixed, ran, 0, 2.0F));
    EXPECT_EQ(ran.mode, Mode::piecewise);
}

TEST(Executor, ACaptureThatIsShortOfMemoryEvictsAndGoesOn) {
    if (!has_gpu()) {
        GTEST_SKIP() << "needs a GPU";
    }
    constexpr std::uint64_t MiB = std::uint64_t{1} << 20;
    auto device = vmmgraph::Device::open();
    Small small(both({1, 2, 4, 8}));
    // Each graph owns 64 MiB; the budget has room for one and a half.
    small.trouble = [](Recorder& recorder) {
        const auto kept = at::zeros({std::int64_t{64} << 18}, on_device(at::kFloat));
        recorder.eager({kept},
                       [kept](const Step&, at::TensorList tensors) { tensors[0].fill_(1.0); });
    };
    device.set_budget(device.stats().physical_bytes + 110 * MiB);
    Ran ran;
    EXPECT_TRUE(small.run(10, Phase::mixed, ran, 0, 1.0F));
    EXPECT_EQ(ran.reason, Reason::captured) << small.executor->last_failure();
    EXPECT_TRUE(small.run(60, Phase::mixed, ran, 0, 2.0F));
    EXPECT_EQ(ran.reason, Reason::captured) << small.executor->last_failure();
    EXPECT_TRUE(small.run(60, Phase::mixed, ran, 0, 3.0F));
    EXPECT_EQ(ran.reason, Reason::padded);
    EXPECT_EQ(small.executor->stats().evictions, 1u);
    EXPECT_EQ(small.executor->stats().failures, 0u);
    device.set_budget(0);
}

}  // namespace
}  // namespace engine_tests
