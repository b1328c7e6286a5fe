// Executors of several ranks in one process: a step runs alike on all ranks or throws.
#include <array>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "gather.hpp"
#include "small.hpp"

namespace engine_tests {
namespace {

Step decode(std::uint32_t n) {
    return {Key::of(n, 0, uniform_decode), Phase::decode, true, nullptr};
}

TEST(Ranks, DoTheLeastOfWhatAllCanDo) {
    Small a(both({4, 8}));
    Small b(both({4, 8}));
    b.trouble = [](Recorder& recorder) {
        if (recorder.mode() == Mode::full) {
            throw std::runtime_error("planted");
        }
    };
    Ran ran;
    EXPECT_TRUE(b.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    const auto tokens = at::randint(0, vocabulary, {3}, at::kLong);
    for (int turn = 0; turn < 2; ++turn) {
        const std::array decisions{a.executor->decide(decode(3)), b.executor->decide(decode(3))};
        EXPECT_EQ(decisions[0].mode, Mode::full);
        EXPECT_EQ(decisions[1].mode, Mode::piecewise);
        const auto agreed = GraphExecutor::agree(decisions);
        EXPECT_EQ(agreed.mode, Mode::piecewise);
        EXPECT_EQ(agreed.bucket, Key::of(16));
        EXPECT_TRUE(agreed.capture);
        for (auto* const rank : {&a, &b}) {
            const auto planned =
                rank->executor->prepare(decode(3), {{names::tokens, tokens}}, agreed);
            EXPECT_EQ(planned.mode, Mode::piecewise);
            const auto did = rank->executor->launch([] { FAIL() << "a rank alone"; }, stream());
            wait();
            EXPECT_EQ(did.mode, Mode::piecewise);
            EXPECT_EQ(did.bucket, Key::of(16));
            EXPECT_TRUE(at::allclose(rank->inputs->hidden_states(3),
                                     rank->table.index_select(0, tokens.to(device()))));
        }
    }
    EXPECT_EQ(a.executor->stats().graphs, 1u) << "what it decided for itself was given back";
    EXPECT_EQ(a.executor->stats().imposed, 2u);
    EXPECT_EQ(a.executor->stats().imposed_eager, 0u);
    EXPECT_EQ(b.executor->stats().imposed, 0u) << "it did as it decided";
    EXPECT_NE(a.executor->prometheus().find("imposed_steps_total{mode=\"piecewise\"} 2\n"),
              std::string::npos);
    EXPECT_TRUE(a.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::captured);
}

TEST(Ranks, AgreeByThemselvesBeforeEachStep) {
    Gather gather(2);
    auto options = both({4, 8});
    options.exchange = [&](const Decision& mine) { return gather(mine); };
    Small a(options);
    Small b(options);
    b.trouble = [](Recorder& recorder) {
        if (recorder.mode() == Mode::full) {
            throw std::runtime_error("planted");
        }
    };
    const std::array steps{3, 3, 7, 3, 60, 3};
    std::array<std::vector<Mode>, 2> ran;
    std::array<int, 2> thrown{};
    const auto rank = [&](Small& small, std::size_t number) {
        for (const auto n : steps) {
            const auto tokens = at::randint(0, vocabulary, {n}, at::kLong);
            const Step step{Key::of(static_cast<std::uint32_t>(n), 0, n < 9 ? uniform_decode : 0),
                            n < 9 ? Phase::decode : Phase::mixed, true, nullptr};
            try {
                const auto did = small.executor->run(
                    step, {{names::tokens, tokens}}, [] { FAIL() << "a rank alone"; }, stream());
                // The other rank may be capturing.
                wait_for_stream();
                ran[number].push_back(did.mode);
                EXPECT_TRUE(at::allclose(small.inputs->hidden_states(n),
                                         small.table.index_select(0, tokens.to(device()))));
            } catch (const std::runtime_error&) {
                ++thrown[number];
                ran[number].push_back(Mode::eager);
            }
        }
    };
    std::thread other([&] { rank(b, 1); });
    rank(a, 0);
    other.join();
    EXPECT_EQ(thrown[0], 0);
    EXPECT_GE(thrown[1], 1) << "it was agreed, and could not be done";
    for (std::size_t i = 0; i < steps.size(); ++i) {
        EXPECT_TRUE(ran[0][i] == ran[1][i] || ran[1][i] == Mode::eager) << i;
    }
    EXPECT_EQ(ran[0][4], Mode::piecewise);
    EXPECT_EQ(a.eager_steps + b.eager_steps, 0);
}

TEST(Ranks, ThatCannotAgreeThrowAndGoOn) {
    auto options = both({4, 8});
    bool trouble = true;
    options.exchange = [&](const Decision& mine) {
        if (trouble) {
            throw std::runtime_error("no word from the others");
        }
        return std::vector{mine, mine};
    };
    Small small(options);
    Ran ran;
    EXPECT_THROW(small.run(3, Phase::decode, ran, uniform_decode), std::runtime_error);
    EXPECT_NE(refusal([&] { small.executor->launch([] {}, stream()); }, VMMGRAPH_ERROR_WRONG_STATE),
              "");
    trouble = false;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::captured) << "the slot was given back";
}

TEST(Ranks, AreEagerIfOneMustBeAndCoverWhatAllHave) {
    const auto of = [](Mode mode, Key bucket, bool capture = false) {
        return Decision{mode, mode == Mode::eager ? Reason::capture_failed : Reason::hit, capture,
                        0, bucket};
    };
    const auto full4 = of(Mode::full, Key::of(4, 4, uniform_decode));
    const auto full8 = of(Mode::full, Key::of(8, 8, uniform_decode), true);
    const auto eager = of(Mode::eager, {});
    EXPECT_EQ(GraphExecutor::agree({full4, eager, full8}).mode, Mode::eager);
    EXPECT_EQ(GraphExecutor::agree({full4, eager, full8}).reason, Reason::capture_failed);
    EXPECT_FALSE(GraphExecutor::agree({full4, eager, full8}).capture);
    EXPECT_EQ(GraphExecutor::agree({full4, full8}).bucket, full8.bucket);
    EXPECT_TRUE(GraphExecutor::agree({full4, full8}).capture);
    EXPECT_FALSE(GraphExecutor::agree({full4, full4}).capture);
    const auto wide = of(Mode::piecewise, Key::of(64, 4));
    const auto deep = of(Mode::piecewise, Key::of(16, 16));
    EXPECT_EQ(GraphExecutor::agree({wide, deep}).mode, Mode::eager);
    EXPECT_EQ(GraphExecutor::agree({wide, deep}).reason, Reason::too_large);
    EXPECT_NE(refusal([] { static_cast<void>(GraphExecutor::agree({})); }), "");
}

TEST(Ranks, CarryOutWhatWasAgreedOrThrow) {
    Small small(both({4, 8}));
    const auto tokens = at::randint(0, vocabulary, {3}, at::kLong);
    auto agreed = small.executor->decide(decode(3));
    agreed.bucket = Key::of(5, 0, uniform_decode);
    const auto why =
        refusal([&] { small.executor->prepare(decode(3), {{names::tokens, tokens}}, agreed); });
    EXPECT_NE(why.find("5 tokens"), std::string::npos) << why;
    // An imposed bucket is tried again.
    agreed.bucket = Key::of(4, 0, uniform_decode);
    small.trouble = [](Recorder&) { throw std::runtime_error("planted"); };
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    const auto run = [&] {
        small.executor->prepare(decode(3), {{names::tokens, tokens}}, agreed);
        return small.executor->launch([] { FAIL() << "a rank alone"; }, stream());
    };
    EXPECT_THROW(run(), std::runtime_error);
    small.trouble = nullptr;
    EXPECT_EQ(run().mode, Mode::full);
    wait();
    EXPECT_TRUE(at::allclose(small.inputs->hidden_states(3),
                             small.table.index_select(0, tokens.to(device()))));
    small.executor->prepare(decode(3), {{names::tokens, tokens}},
                            {Mode::eager, Reason::capture_failed, false, 0, {}});
    int eager = 0;
    EXPECT_EQ(small.executor->launch([&] { ++eager; }, stream()).reason, Reason::capture_failed);
    EXPECT_EQ(eager, 1);
    EXPECT_EQ(small.executor->stats().imposed, 3u) << "two tries of a graph and an eager step";
    EXPECT_EQ(small.executor->stats().imposed_eager, 1u);
}

// Eager runs may contain collectives.
TEST(Ranks, AllMakeTheEagerRunsOfACapture) {
    auto options = both({4, 8});
    options.eager_runs = 1;
    Small small(options);
    Ran ran;
    EXPECT_TRUE(small.run(3, Phase::decode, ran, uniform_decode));
    int calls = 0;
    small.trouble = [&](Recorder&) { ++calls; };
    const int replay = has_gpu() ? 0 : 1;
    const auto tokens = at::randint(0, vocabulary, {3}, at::kLong);
    for (const bool elsewhere : {false, true}) {
        auto agreed = small.executor->decide(decode(3));
        EXPECT_FALSE(agreed.capture);
        agreed.capture = elsewhere;
        small.executor->prepare(decode(3), {{names::tokens, tokens}}, agreed);
        small.executor->launch([] {}, stream());
        wait();
        EXPECT_EQ(std::exchange(calls, 0), replay + (elsewhere ? 1 : 0));
        EXPECT_TRUE(at::allclose(small.inputs->hidden_states(3),
                                 small.table.index_select(0, tokens.to(device()))));
    }
    EXPECT_EQ(small.executor->stats().captures, 1u);
}

// Even without work.
TEST(Ranks, MayPadToWhatAnotherHas) {
    Small small(both({4, 8}));
    for (const std::int64_t n : {3, 0}) {
        const auto tokens = at::randint(0, vocabulary, {n}, at::kLong);
        const auto values =
            n > 0 ? std::vector<NamedValue>{{names::tokens, tokens}} : std::vector<NamedValue>{};
        const auto ran = small.executor->run(decode(7), values, [] { FAIL(); }, stream());
        wait();
        EXPECT_EQ(ran.bucket, Key::of(8, 0, uniform_decode));
        EXPECT_EQ(small.inputs->actual(names::tokens).numel(), n);
        EXPECT_EQ(small.inputs->tokens().narrow(0, n, 8 - n).count_nonzero().item<std::int64_t>(),
                  0);
        if (n > 0) {
            EXPECT_TRUE(at::allclose(small.inputs->hidden_states(n),
                                     small.table.index_select(0, tokens.to(device()))));
        }
    }
}

}  // namespace
}  // namespace engine_tests
