// A small model: hidden = 3 * table[token] + bias, where eager work adds the step's bias.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "devices.hpp"

namespace engine_tests {

inline constexpr std::int64_t vocabulary = 100;
inline constexpr std::int64_t width = 256;

inline ExecutorOptions both(const std::vector<std::uint32_t>& full) {
    ExecutorOptions options;
    for (const auto size : full) {
        options.full.push_back(Key::of(size, 0, uniform_decode));
    }
    options.piecewise = {Key::of(16), Key::of(64)};
    // Both kinds have the same body.
    options.modes[static_cast<std::size_t>(Phase::decode)] = {Mode::full, Mode::piecewise};
    return options;
}

struct Small {
    c10::DeviceIndex index;
    bool records_beside;
    at::Tensor table = at::randn({vocabulary, width}, on_device(at::kFloat, index));
    std::shared_ptr<vmmgraph::SharedVmmAllocator> arena;
    std::unique_ptr<GraphInputs> inputs;
    std::unique_ptr<GraphExecutor> executor;
    // Called in every recording, before the model.
    std::function<void(Recorder&)> trouble;
    int eager_steps = 0;
    at::Tensor eager_output;

    explicit Small(ExecutorOptions options, c10::DeviceIndex index = 0)
        : index(index), records_beside(options.record_beside) {
        if (has_gpu()) {
            vmmgraph::torch::install();
            arena = std::make_shared<vmmgraph::SharedVmmAllocator>(index);
        }
        auto buckets = options.full;
        buckets.insert(buckets.end(), options.piecewise.begin(), options.piecewise.end());
        const auto tokens = Extent::along(Axis::tokens);
        inputs = std::make_unique<GraphInputs>(
            std::vector<Input>{
                Input::host(names::tokens, at::kLong, {tokens}),
                Input::output(names::hidden_states, at::kFloat, {tokens, Extent::fixed(width)})},
            buckets, InputsOptions{device(index), 512});
        wait(index);
        executor = std::make_unique<GraphExecutor>(
            arena, *inputs, [this](Recorder& recorder) { body(recorder); }, options);
    }

    void body(Recorder& recorder) {
        if (trouble) {
            trouble(recorder);
        }
        const auto embedded = table.index_select(0, inputs->tokens());
        // Long enough to reuse memory.
        auto sum = embedded;
        for (int i = 0; i < 4; ++i) {
            const auto doubled = sum * 2;
            auto attended = at::empty_like(doubled);
            recorder.eager({doubled, attended}, [i](const Step& step, at::TensorList tensors) {
                const auto* const bias = static_cast<const float*>(step.params);
                const auto rows = step.params == nullptr ? tensors[0].size(0)
                                                         : std::int64_t{step.key[Axis::tokens]};
                auto out = tensors[1].narrow(0, 0, rows);
                out.copy_(tensors[0].narrow(0, 0, rows) +
                          (bias == nullptr || i != 3 ? 0.0 : double{*bias}));
            });
            sum = attended - doubled * 0.5;
        }
        inputs->hidden_states().copy_(sum);
    }

    // Waits for the device, or for the step's streams if a device wait would break a recording.
    void wait_for_step(void* on) const {
        if (!records_beside) {
            wait(index);
        } else if (has_gpu()) {
            for (auto* const one :
                 {on != nullptr ? on : stream(index), static_cast<void*>(nullptr)}) {
                ASSERT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(one)), cudaSuccess);
            }
        }
    }

    // Returns whether the output is correct.
    bool run(std::int64_t n, Phase phase, Ran& ran, std::uint32_t variant = 0, float bias = 0,
             bool capturable = true, void* on = nullptr) {
        const auto tokens = at::randint(0, vocabulary, {n}, at::kLong);
        const auto expected = table.index_select(0, tokens.to(table.device())) + bias;
        Step step{Key::of(static_cast<std::uint32_t>(n), 0, variant), phase, capturable, &bias};
        wait_for_step(on);
        ran = executor->run(
            step, {{names::tokens, tokens}},
            [&] {
                ++eager_steps;
                eager_output = expected.clone();
            },
            on != nullptr ? on : stream(index));
        wait_for_step(on);
        const auto& output = ran.mode == Mode::eager ? eager_output : inputs->hidden_states(n);
        return at::allclose(output, expected);
    }
};

}  // namespace engine_tests
