// Inputs and steps next to other threads' captures in global mode.
#include <cstdint>
#include <memory>
#include <vector>

#include "../torch/other_capture.hpp"
#include "small.hpp"

namespace engine_tests {
namespace {

TEST(OthersCaptures, GoOnBesideInputs) {
    NEEDS_A_GPU();
    const OnStream current;
    const auto on_gpu = at::ones({64}, on_device(at::kInt));
    const std::vector<std::int64_t> on_host(64, 1);
    const auto second = c10::cuda::getStreamFromPool(false, 0);
    for (const auto bring : {Bring::copy, Bring::kernel}) {
        std::unique_ptr<GraphInputs> inputs;
        const auto make = [&] {
            inputs = std::make_unique<GraphInputs>(
                std::vector{Input::host("a", at::kLong, {Extent::along(Axis::tokens)}),
                            Input::device("b", at::kInt, {Extent::along(Axis::tokens)})},
                std::vector{Key::of(64), Key::of(128)}, InputsOptions{device(), 512, bring});
        };
        const auto step = [&] {
            inputs->update(Key::of(128), {{"a", on_host}, {"b", on_gpu}}, stream());
        };
        const auto on_another = [&] {
            inputs->update(Key::of(64), {{"a", on_host}, {"b", on_gpu}}, second.stream());
        };
        // Torch allocates and loads kernels first.
        make();
        step();
        on_another();
        inputs.reset();
        wait();
        other::expect_untouched("inputs are made", [&] { inputs.reset(); }, make);
        other::expect_untouched("a step", step);
        // Waits for the staging memory of an earlier step.
        other::expect_untouched("many steps", [&] {
            for (int turn = 0; turn < 6; ++turn) {
                step();
            }
        });
        other::expect_untouched("a step on another stream", on_another);
        other::expect_untouched("a mark", [&] { inputs->mark(); });
        const auto used = [&] {
            make();
            step();
        };
        other::expect_untouched("inputs go", used, [&] { inputs.reset(); });
        wait();
    }
}

TEST(OthersCaptures, GoOnBesideSteps) {
    NEEDS_A_GPU();
    for (const bool eager_in_arena : {false, true}) {
        ExecutorOptions options;
        options.full = {Key::of(4), Key::of(8)};
        options.piecewise = {Key::of(16), Key::of(64)};
        options.most_tokens = 60;
        options.most_graphs = 3;
        options.eager_in_arena = eager_in_arena;
        const auto updating = c10::cuda::getStreamFromPool(false, 0);
        int updates = 0;
        options.update = [&](const Key&, const Step&, vmmgraph::torch::CapturedGraph*) {
            ++updates;
        };
        options.update_stream = updating.stream();
        auto small = std::make_unique<Small>(options);
        const auto tokens = at::randint(0, vocabulary, {61}, at::kLong);
        const auto read = small->table.index_select(0, tokens.to(small->table.device()));
        std::vector<at::Tensor> outputs(62);
        const float none = 0;
        int eager = 0;
        const auto run = [&](std::int64_t n, void* on) {
            const c10::cuda::CUDAStreamGuard guard(
                c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(on), 0));
            auto& output = outputs[static_cast<std::size_t>(n)];
            const auto ran = small->executor->run(
                {Key::of(static_cast<std::uint32_t>(n)), n < 8 ? Phase::decode : Phase::mixed, true,
                 &none},
                {{names::tokens, tokens.narrow(0, 0, n)}},
                [&] {
                    ++eager;
                    output = read.narrow(0, 0, n).clone();
                },
                on);
            if (ran.mode != Mode::eager) {
                output = small->inputs->hidden_states(n).clone();
            }
        };
        int rounds = 0;
        const auto all = [&](void* on) {
            ++rounds;
            for (const std::int64_t n : {3, 7, 11, 30, 61, 3}) {
                run(n, on);
            }
        };
        const auto another = c10::cuda::getStreamFromPool(false, 0);
        // The second round fills torch's cache.
        for (int turn = 0; turn < 2; ++turn) {
            all(stream());
            all(another.stream());
            small->executor->clear();
            wait();
        }
        const auto steps = [&] { all(stream()); };
        const auto clear = [&] { small->executor->clear(); };
        other::expect_untouched("the first steps, which capture", clear, steps);
        other::expect_untouched("steps", steps);
        other::expect_untouched("steps on another stream", [&] { all(another.stream()); });
        other::expect_untouched("an executable ahead of its step",
                                [&] { small->executor->expect({Key::of(7), Phase::decode}); });
        other::expect_untouched("an end of all graphs", steps, clear);
        other::expect_untouched("another executor", [&] {
            GraphExecutor executor(
                small->arena, *small->inputs, [&](Recorder& recorder) { small->body(recorder); },
                options);
            EXPECT_EQ(executor.warm_up(), 3U);
        });
        wait();
        EXPECT_EQ(eager, rounds);
        EXPECT_GT(updates, 0);
        for (const std::int64_t n : {3, 7, 11, 30, 61}) {
            EXPECT_TRUE(at::allclose(outputs[static_cast<std::size_t>(n)], read.narrow(0, 0, n)))
                << n;
        }
        const auto used = [&] {
            small = std::make_unique<Small>(options);
            steps();
        };
        other::expect_untouched("the end of it all", used, [&] {
            small->executor.reset();
            small->inputs.reset();
            small->arena.reset();
        });
        wait();
    }
}

// Refused as a whole.
TEST(OthersCaptures, AStepIsRefusedWhileTheStreamOfTheLastOneIsCaptured) {
    NEEDS_A_GPU();
    ExecutorOptions options;
    options.full = {Key::of(4)};
    Small small(options);
    const auto first = c10::cuda::getStreamFromPool(false, 0);
    const auto second = c10::cuda::getStreamFromPool(false, 0);
    Ran ran;
    // As torch's stream, and by raw handle with a mark per step.
    for (const bool by_name : {true, false}) {
        {
            const c10::cuda::CUDAStreamGuard guard(by_name ? first : second);
            EXPECT_TRUE(small.run(3, Phase::decode, ran, 0, 0, true, first.stream()));
        }
        other::Capture capture(first.stream());
        for (int turn = 0; turn < 2; ++turn) {
            small.executor->prepare({Key::of(3), Phase::decode},
                                    {{names::tokens, at::zeros({3}, at::kLong)}});
            const auto refused = refusal([&] { small.executor->launch([] {}, second.stream()); },
                                         VMMGRAPH_ERROR_STREAM_CAPTURING);
            EXPECT_EQ(refused.empty(), !by_name) << refused;
        }
        EXPECT_TRUE(capture.end());
        EXPECT_TRUE(small.run(2, Phase::decode, ran));
        EXPECT_EQ(ran.mode, Mode::full);
    }
}

}  // namespace
}  // namespace engine_tests
