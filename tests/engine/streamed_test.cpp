// A ring as an executor option: graphs, warm-up runs and eager steps share its slots.
#include <deque>
#include <map>
#include <random>
#include <stdexcept>

#include "small.hpp"

namespace engine_tests {
namespace {

using vmmgraph::HostBuffer;

constexpr std::size_t layers = 6;
constexpr std::uint64_t layer_bytes = width * sizeof(float);

// hidden = table[token], then per layer times streamed weights, plus 1.
struct Layered {
    vmmgraph::Device device = vmmgraph::Device::open();
    std::deque<HostBuffer> host;
    std::vector<at::Tensor> contents;
    std::vector<std::size_t> source;
    Ring ring;
    at::Tensor table = at::randn({vocabulary, width}, on_device(at::kFloat));
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena;
    std::unique_ptr<GraphInputs> inputs;
    std::unique_ptr<GraphExecutor> executor;
    // Called within every layer.
    std::function<void(std::size_t)> trouble;
    bool pieces;
    at::Tensor eager_output;

    static vmmgraph::RingOptions two_slots() {
        vmmgraph::RingOptions options;
        options.slots = 2;
        return options;
    }

    explicit Layered(ExecutorOptions options = {}, bool pieces = false)
        : ring(device, std::vector<vmmgraph::RingUnit>(layers, {layer_bytes}), two_slots()),
          pieces(pieces) {
        if (has_gpu()) {
            vmmgraph::torch::install();
            arena = std::make_shared<vmmgraph::SharedVmmAllocator>(0);
        }
        for (std::size_t layer = 0; layer < layers; ++layer) {
            host.emplace_back(device, layer_bytes);
            contents.emplace_back();
            source.push_back(layer);
            write(layer);
            ring.set_source(layer, host[layer]);
        }
        for (const auto size : {2U, 4U, 8U}) {
            options.full.push_back(Key::of(size, 0, uniform_decode));
        }
        auto buckets = options.full;
        for (const auto size : {2U, 4U, 8U}) {
            buckets.push_back(Key::of(size));
            if (pieces) {
                options.piecewise.push_back(Key::of(size));
            }
        }
        options.ring = &ring;
        const auto tokens = Extent::along(Axis::tokens);
        inputs = std::make_unique<GraphInputs>(
            std::vector<Input>{
                Input::host(names::tokens, at::kLong, {tokens}),
                Input::output(names::hidden_states, at::kFloat, {tokens, Extent::fixed(width)})},
            buckets, InputsOptions{engine_tests::device()});
        wait();
        executor = std::make_unique<GraphExecutor>(
            arena, *inputs,
            [this](Recorder& recorder) {
                const auto streamed = [&](std::size_t layer) { return recorder.streamed(layer); };
                inputs->hidden_states().copy_(this->pieces ? in_pieces(recorder)
                                                           : model(inputs->tokens(), streamed));
            },
            options);
    }

    void write(std::size_t buffer) {
        contents[buffer] = at::randn({width}, at::kFloat);
        host[buffer].write(0, contents[buffer].const_data_ptr(), layer_bytes);
    }

    template <class Streamed>
    at::Tensor model(const at::Tensor& tokens, Streamed&& streamed) {
        auto x = table.index_select(0, tokens);
        for (std::size_t layer = 0; layer < layers; ++layer) {
            const auto unit = streamed(layer);
            if (trouble) {
                trouble(layer);
            }
            x = x * at::from_blob(unit.address(), {width}, on_device(at::kFloat)) + 1;
        }
        return x;
    }

    // A runner per layer.
    at::Tensor in_pieces(Recorder& recorder) {
        auto x = table.index_select(0, inputs->tokens());
        for (std::size_t layer = 0; layer < layers; ++layer) {
            auto y = at::empty_like(x);
            recorder.eager({x, y}, [this, layer](const Step&, at::TensorList tensors) {
                const auto unit = executor->streamed(layer);
                if (trouble) {
                    trouble(layer);
                }
                tensors[1].copy_(
                    tensors[0] * at::from_blob(unit.address(), {width}, on_device(at::kFloat)) + 1);
            });
            x = y * 1;
        }
        return x;
    }

    // Returns whether the output is bit-exact.
    bool run(std::int64_t n, Ran& ran, bool capturable = true, Phase phase = Phase::decode) {
        const auto tokens = at::randint(0, vocabulary, {n}, at::kLong);
        auto expected = table.index_select(0, tokens.to(table.device()));
        for (const auto buffer : source) {
            expected = expected * contents[buffer].to(table.device()) + 1;
        }
        wait();
        const auto key =
            Key::of(static_cast<std::uint32_t>(n), 0, phase == Phase::decode ? uniform_decode : 0);
        ran = executor->run(
            {key, phase, capturable}, {{names::tokens, tokens}},
            [&] {
                eager_output = model(tokens.to(table.device()),
                                     [&](std::size_t layer) { return executor->streamed(layer); });
            },
            stream());
        wait();
        return at::equal(ran.mode == Mode::eager ? eager_output : inputs->hidden_states(n),
                         expected);
    }
};

TEST(Streamed, GraphsEagerStepsAndTheRunsBeforeCapturesShareTheSlots) {
    for (const bool in_arena : {false, true}) {
        ExecutorOptions options;
        options.eager_runs = 2;
        options.eager_in_arena = in_arena;
        options.most_graphs = 2;
        Layered model(options);
        std::mt19937 random(11);
        int wrong = 0;
        std::uint64_t by_graphs = 0;
        std::uint64_t eager = 0;
        const int steps = most_steps(200);
        for (int step = 0; step < steps; ++step) {
            switch (random() % 6) {
                case 0:
                    model.write(random() % layers);
                    break;
                case 1: {
                    const auto a = random() % layers;
                    const auto b = random() % layers;
                    std::swap(model.source[a], model.source[b]);
                    model.ring.set_source(a, model.host[model.source[a]]);
                    model.ring.set_source(b, model.host[model.source[b]]);
                    break;
                }
                default:
                    break;
            }
            Ran ran;
            wrong += !model.run(1 + static_cast<std::int64_t>(random() % 8), ran, random() % 4 > 0);
            ++(ran.mode == Mode::full ? by_graphs : eager);
        }
        EXPECT_EQ(wrong, 0);
        const auto stats = model.ring.stats();
        EXPECT_EQ(stats.launches, has_gpu() ? by_graphs : 0U);
        EXPECT_EQ(stats.acquired, 0U);
        EXPECT_EQ(stats.aborts, 0U);
        // Two of six layers may be resident at the start.
        EXPECT_GE(stats.copied_bytes, (by_graphs + eager) * (layers - 2) * layer_bytes);
        if (!shortened()) {
            EXPECT_GT(by_graphs, 50U);
            EXPECT_GT(eager, 20U);
            EXPECT_GT(model.executor->stats().evictions, 0U);
        }
        EXPECT_EQ(model.inputs->copies_by_kernel(), model.inputs->copies()) << "a ring streams";
    }
}

TEST(Streamed, RunnersBetweenPiecesTakeTheirUnitsAsEagerStepsDo) {
    for (const std::uint32_t eager_runs : {0, 1}) {
        ExecutorOptions options;
        options.eager_runs = eager_runs;
        options.most_graphs = 4;
        Layered model(options, true);
        std::mt19937 random(13);
        int wrong = 0;
        std::map<Mode, std::uint64_t> by_mode;
        const int steps = most_steps(200);
        for (int step = 0; step < steps; ++step) {
            if (random() % 4 == 0) {
                model.write(random() % layers);
            }
            const bool decodes = random() % 2 == 0;
            Ran ran;
            wrong += !model.run(1 + static_cast<std::int64_t>(random() % 8), ran, random() % 6 > 0,
                                decodes ? Phase::decode : Phase::prefill);
            ++by_mode[ran.mode];
        }
        EXPECT_EQ(wrong, 0);
        const auto stats = model.ring.stats();
        EXPECT_EQ(stats.launches, has_gpu() ? by_mode[Mode::full] : 0U);
        EXPECT_EQ(stats.acquired, 0U);
        EXPECT_EQ(stats.aborts, 0U);
        EXPECT_GE(stats.copied_bytes,
                  static_cast<std::uint64_t>(steps) * (layers - 2) * layer_bytes);
        if (!shortened()) {
            for (const auto mode : {Mode::full, Mode::piecewise, Mode::eager}) {
                EXPECT_GT(by_mode[mode], 10U);
            }
        }
        Ran ran;
        EXPECT_TRUE(model.run(3, ran, true, Phase::prefill));
        model.trouble = [](std::size_t layer) {
            if (layer == 3) {
                throw std::runtime_error("planted");
            }
        };
        EXPECT_THROW(model.run(3, ran, true, Phase::prefill), std::runtime_error);
        EXPECT_EQ(model.ring.stats().acquired, 0U);
        model.trouble = nullptr;
        for (const auto phase : {Phase::prefill, Phase::decode}) {
            EXPECT_TRUE(model.run(3, ran, true, phase));
        }
    }
}

TEST(Streamed, APieceTakesNoUnit) {
    Layered model;
    ExecutorOptions options;
    options.piecewise = {Key::of(4)};
    options.ring = &model.ring;
    std::string within;
    GraphExecutor executor(
        model.arena, *model.inputs,
        [&](Recorder& recorder) {
            within = refusal([&] { static_cast<void>(recorder.streamed(0)); },
                             VMMGRAPH_ERROR_WRONG_STATE);
            model.inputs->hidden_states().zero_();
        },
        options);
    static_cast<void>(executor.run({Key::of(4), Phase::prefill, true}, {}, [] {}, stream()));
    EXPECT_EQ(within.find("GraphExecutor::streamed()") != std::string::npos, has_gpu()) << within;
    wait();
}

TEST(Streamed, ABodyThatThrowsWithAUnitInItsHandsLeavesTheRingUsable) {
    Layered model;
    int runs = 0;
    model.trouble = [&](std::size_t layer) {
        if (layer == 3 && runs++ == 0) {
            throw std::runtime_error("planted");
        }
    };
    Ran ran;
    EXPECT_TRUE(model.run(3, ran)) << "eagerly";
    EXPECT_EQ(ran.reason, Reason::capture_failed);
    EXPECT_NE(model.executor->last_failure().find("planted"), std::string::npos);
    EXPECT_EQ(model.ring.stats().acquired, 0U);
    model.executor->forgive();
    EXPECT_TRUE(model.run(3, ran));
    EXPECT_EQ(ran.mode, Mode::full);
    runs = 0;
    EXPECT_THROW(model.run(3, ran, false), std::runtime_error);
    EXPECT_EQ(model.ring.stats().acquired, 0U);
    EXPECT_TRUE(model.run(3, ran, false));
    EXPECT_TRUE(model.run(3, ran));
}

TEST(Streamed, ABodyThatLeavesAUnitOutIsNoGraph) {
    Layered model;
    bool whole = false;
    const Key bucket = Key::of(2, 0, uniform_decode);
    ExecutorOptions options;
    options.full = {bucket};
    options.ring = &model.ring;
    options.on_failure = OnFailure::throws;
    GraphExecutor executor(
        model.arena, *model.inputs,
        [&](Recorder& recorder) {
            for (std::size_t layer = 0; layer < (whole ? layers : layers - 1); ++layer) {
                const auto unit = recorder.streamed(layer);
            }
        },
        options);
    const auto step = [&] {
        static_cast<void>(executor.run({bucket, Phase::decode}, {}, [] {}, stream()));
    };
    if (has_gpu()) {
        EXPECT_NE(refusal(step, VMMGRAPH_ERROR_WRONG_STATE), "");
    } else {
        EXPECT_NO_THROW(step()) << "any order is right where nothing is captured";
    }
    whole = true;
    EXPECT_NO_THROW(step());
    wait();
}

TEST(Streamed, WhatCannotStreamIsRefusedInWords) {
    Layered model;
    const auto made = [&](const ExecutorOptions& options) {
        return refusal(
            [&] { GraphExecutor(model.arena, *model.inputs, [](Recorder&) {}, options); });
    };
    ExecutorOptions options;
    options.full = {Key::of(2, 0, uniform_decode)};
    options.capture.ring = &model.ring;
    EXPECT_NE(made(options).find("ExecutorOptions::ring"), std::string::npos);
    options.capture.ring = nullptr;
    options.ring = &model.ring;
    EXPECT_EQ(made(options), "");
    if (has_gpu()) {
        vmmgraph::DeviceOptions of_host;
        of_host.driver = vmmgraph::DriverChoice::host;
        const auto other = vmmgraph::Device::open(of_host);
        Ring elsewhere(other, std::vector<vmmgraph::RingUnit>(layers, {layer_bytes}));
        options.ring = &elsewhere;
        EXPECT_NE(made(options).find("another device"), std::string::npos);
    }
    options.ring = nullptr;
    std::string within;
    GraphExecutor without(
        model.arena, *model.inputs,
        [&](Recorder& recorder) {
            within = refusal([&] { static_cast<void>(recorder.streamed(0)); },
                             VMMGRAPH_ERROR_WRONG_STATE);
            model.inputs->hidden_states().zero_();
        },
        options);
    static_cast<void>(without.run({options.full.front(), Phase::decode}, {}, [] {}, stream()));
    EXPECT_NE(within.find("ExecutorOptions::ring"), std::string::npos);
    EXPECT_NE(refusal([&] { static_cast<void>(without.streamed(0)); }, VMMGRAPH_ERROR_WRONG_STATE),
              "");
    wait();
}

TEST(Streamed, AKernelBringsWhatACopyBrings) {
    for (const auto dtype : {at::kByte, at::kShort, at::kInt, at::kLong}) {
        std::vector<std::unique_ptr<GraphInputs>> both;
        for (const auto bring : {Bring::copy, Bring::kernel}) {
            both.push_back(std::make_unique<GraphInputs>(
                std::vector<Input>{
                    Input::host("a", at::kFloat, {Extent::along(Axis::tokens)}),
                    Input::host("b", dtype, {Extent::along(Axis::tokens), Extent::fixed(3)})},
                std::vector<Key>{Key::of(5), Key::of(4096), Key::of(300'001)},
                InputsOptions{device(), 256, bring}));
        }
        for (const std::int64_t n : {1, 5, 300'001, 4, 4096, 17, 200'000}) {
            const auto a = at::randn({n}, at::kFloat);
            const auto b = at::randint(0, 100, {n, 3}, dtype);
            const auto bucket = Key::of(n <= 5 ? 5 : n <= 4096 ? 4096 : 300'001);
            for (const auto& one : both) {
                one->update(bucket, {{"a", a}, {"b", b}}, stream());
            }
            wait();
            EXPECT_TRUE(at::equal(both[1]->get("a", n).cpu(), a));
            EXPECT_TRUE(at::equal(both[1]->get("b", n).cpu(), b));
            EXPECT_TRUE(at::equal(both[1]->get("a"), both[0]->get("a"))) << "padding";
            EXPECT_TRUE(at::equal(both[1]->get("b"), both[0]->get("b"))) << "padding";
        }
        EXPECT_EQ(both[0]->copies_by_kernel(), 0U);
        EXPECT_EQ(both[1]->copies_by_kernel(), both[1]->copies());
    }
}

TEST(Streamed, InputsTakeTheKernelWhileARingStreamsAndNoLonger) {
    const auto device = vmmgraph::Device::open();
    GraphInputs inputs({Input::host(names::tokens, at::kLong, {Extent::along(Axis::tokens)})},
                       {Key::of(8)}, InputsOptions{engine_tests::device()});
    const auto by_kernel = [&] {
        const auto before = inputs.copies_by_kernel();
        const auto tokens = at::randint(0, 100, {8}, at::kLong);
        inputs.update(Key::of(8), {{names::tokens, tokens}}, stream());
        wait();
        EXPECT_TRUE(at::equal(inputs.tokens().cpu(), tokens));
        return inputs.copies_by_kernel() > before;
    };
    EXPECT_FALSE(by_kernel());
    {
        const Ring resident(device, std::vector<vmmgraph::RingUnit>(layers, {layer_bytes, true}));
        EXPECT_FALSE(by_kernel()) << "nothing of it streams";
        const Ring streams(device, std::vector<vmmgraph::RingUnit>(layers, {layer_bytes}));
        EXPECT_TRUE(by_kernel());
    }
    EXPECT_FALSE(by_kernel());
}

}  // namespace
}  // namespace engine_tests
