// Eager work in an arena's memory, on a GPU: results equal plain eager work, and memory is the
// larger of both peaks.
#include "fixture.hpp"

#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <thread>
#include <vmmgraph/torch_c.h>
#include <vmmgraph/torch_eager.hpp>
#include <vmmgraph/torch_region.hpp>

namespace torch_tests {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using vmmgraph::Device;
using vmmgraph::torch::DisableScope;
using vmmgraph::torch::EagerScope;
using vmmgraph::torch::KeptScope;

vmmgraph_status_t status_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const vmmgraph::Error& error) {
        return error.status();
    }
    return VMMGRAPH_OK;
}

class Eager : public Torch {
protected:
    void SetUp() override {
        Torch::SetUp();
        device_.emplace(Device::open());
    }

    // Returns the output for the last token, for a sampler.
    static at::Tensor prefill(const Model& model, const at::Tensor& prompt) {
        const auto out = model(prompt);
        return out.narrow(0, out.size(0) - 1, 1).clone();
    }

    struct Prompt {
        at::Tensor input, expected;
    };

    // Random prompts with results of plain eager work.
    std::vector<Prompt> prompts(const Model& model, const std::vector<std::int64_t>& lengths) {
        std::vector<Prompt> prompts;
        for (const auto length : lengths) {
            auto input = at::randn({length, model.layers[0][0].size(0)}, half());
            cudaDeviceSynchronize();
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            auto expected = prefill(model, input);
            cudaDeviceSynchronize();
            prompts.push_back({std::move(input), std::move(expected)});
        }
        caching::emptyCache();
        return prompts;
    }

    std::uint64_t calls() const {
        const auto stats = device_->stats();
        return stats.maps + stats.unmaps + stats.pages_created;
    }

    std::optional<Device> device_;
};

TEST_F(Eager, PrefillsBetweenReplaysAreThoseOfPlainEagerWorkInTheGraphsMemory) {
    const Model model;
    const auto prompts = this->prompts(model, {8192, 333, 4096, 77, 6001, 1024});
    SharedVmmAllocator arena(0), eager_only(0);
    auto shapes = this->shapes(arena, model, {4096, 256, 64, 8, 1});
    const auto graphs = arena.mapped_size();
    const auto outputs = arena.stats().retained_bytes;
    for (const auto& prompt : prompts) {
        const EagerScope scope(eager_only, raw());
        static_cast<void>(prefill(model, prompt.input));
    }
    const auto eager = eager_only.mapped_size();
    cudaDeviceSynchronize();

    const long rounds = setting("VMMGRAPH_EAGER_ROUNDS", 200);
    std::mt19937 random(11);
    std::deque<std::pair<std::size_t, at::Tensor>> alive;
    int wrong = 0, lost = 0;
    std::size_t most = 0;
    for (long round = 0; round < rounds; ++round) {
        const auto which = random() % prompts.size();
        const auto before = torchs_bytes();
        {
            const EagerScope scope(arena, raw());
            alive.emplace_back(which, prefill(model, prompts[which].input));
        }
        EXPECT_EQ(torchs_bytes(), before) << "a tensor of the scope is torch's";
        const auto replays = random() % 4;
        for (std::size_t i = 0; i < replays; ++i) {
            auto& shape = shapes[random() % shapes.size()];
            shape.output.zero_();
            shape.graph.replay(raw());
            cudaDeviceSynchronize();
            wrong += !same(shape);
        }
        cudaDeviceSynchronize();
        for (const auto& [prompt, tensor] : alive) {
            lost += !at::equal(tensor, prompts[prompt].expected);
        }
        most = std::max(most, arena.mapped_size());
        while (alive.size() > 3) {
            alive.pop_front();
        }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(lost, 0);
    const auto hungrier = std::max(graphs, eager + outputs);
    EXPECT_LE(static_cast<double>(most), 1.03 * static_cast<double>(hungrier) + 3.0 * 2 * MiB);
    std::printf(
        "RESULT eager: %ld prefills, %d wrong replays, %d lost results, %.1f MiB at most: graphs "
        "%.1f (outputs %.1f), eager %.1f, ratio "
        "%.3f\n",
        rounds, wrong, lost, static_cast<double>(most) / MiB, static_cast<double>(graphs) / MiB,
        static_cast<double>(outputs) / MiB, static_cast<double>(eager) / MiB,
        static_cast<double>(most) / static_cast<double>(hungrier));
}

// Results are copied outside, as in engines. Baseline: torch's own memory, warmed up.
TEST_F(Eager, ActivationsOfBothTakeTheMostOfTheTwo) {
    const Model model;
    const std::vector<std::int64_t> lengths{8192, 333, 4096, 77, 6001, 1024},
        batches{4096, 256, 64, 8, 1};
    const auto width = model.layers[0][0].size(0);
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    std::vector<at::Tensor> prompts, inputs, outputs, expected;
    for (const auto length : lengths) {
        prompts.push_back(at::randn({length, width}, half()));
        expected.push_back(prefill(model, prompts.back()));
    }
    auto result = at::empty({1, width}, half());
    for (const auto batch : batches) {
        inputs.push_back(at::randn({batch, width}, half()));
        outputs.push_back(model(inputs.back()).clone());
        expected.push_back(outputs.back().clone());
    }
    cudaDeviceSynchronize();
    caching::emptyCache();
    const auto capture_all = [&](SharedVmmAllocator& arena) {
        std::vector<CapturedGraph> graphs;
        for (std::size_t i = 0; i < batches.size(); ++i) {
            graphs.push_back(capture(arena, raw(), [&] { outputs[i].copy_(model(inputs[i])); }));
        }
        return graphs;
    };
    int wrong = 0;
    const auto prefills = [&](SharedVmmAllocator& arena, std::size_t which) {
        {
            const EagerScope scope(arena, raw());
            const auto out = model(prompts[which]);
            result.copy_(out.narrow(0, out.size(0) - 1, 1));
        }
        wrong += !at::equal(result, expected[which]);
    };
    SharedVmmAllocator graphs_only(0), eager_only(0), arena(0);
    std::size_t graphs = 0, eager = 0, most = 0;
    {
        const auto captured = capture_all(graphs_only);
        graphs = graphs_only.mapped_size();
    }
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        prefills(eager_only, i);
    }
    eager = eager_only.mapped_size();
    auto captured = capture_all(arena);
    std::mt19937 random(13);
    for (int round = 0; round < 100; ++round) {
        prefills(arena, random() % prompts.size());
        const auto i = random() % captured.size();
        outputs[i].zero_();
        captured[i].replay(raw());
        wrong += !at::equal(outputs[i], expected[lengths.size() + i]);
        most = std::max(most, arena.mapped_size());
    }
    EXPECT_EQ(wrong, 0);
    const auto ratio = static_cast<double>(most) / static_cast<double>(std::max(graphs, eager));
    EXPECT_LE(ratio, 1.03);
    const auto before = caching::getDeviceStats(0).reserved_bytes[0].current;
    {
        const auto pool = at::cuda::graph_pool_handle();
        std::vector<std::unique_ptr<at::cuda::CUDAGraph>> stock;
        for (std::size_t i = 0; i < batches.size(); ++i) {
            auto& graph = stock.emplace_back(std::make_unique<at::cuda::CUDAGraph>());
            graph->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
            outputs[i].copy_(model(inputs[i]));
            graph->capture_end();
        }
        for (const auto& prompt : prompts) {
            const auto out = model(prompt);
            result.copy_(out.narrow(0, out.size(0) - 1, 1));
        }
        cudaDeviceSynchronize();
        const auto torchs = caching::getDeviceStats(0).reserved_bytes[0].current - before;
        std::printf(
            "RESULT eager: activations alone %.1f MiB at most: graphs %.1f, eager %.1f, ratio "
            "%.3f; torch's own %.1f MiB; %d wrong\n",
            static_cast<double>(most) / MiB, static_cast<double>(graphs) / MiB,
            static_cast<double>(eager) / MiB, ratio, static_cast<double>(torchs) / MiB, wrong);
    }
    caching::emptyCache();
}

TEST_F(Eager, ASteadyStateMovesNoMemory) {
    const Model model;
    const auto prompts = this->prompts(model, {2048, 1024});
    SharedVmmAllocator arena(0);
    auto shapes = this->shapes(arena, model, {1024, 64});
    at::Tensor last;
    std::uint64_t settled = 0;
    for (int round = 0; round < 40; ++round) {
        if (round == 8) {
            settled = calls();
        }
        {
            const EagerScope scope(arena, raw());
            last = prefill(model, prompts[static_cast<std::size_t>(round) % 2].input);
        }
        for (auto& shape : shapes) {
            shape.graph.replay(raw());
        }
    }
    EXPECT_EQ(calls(), settled);
    cudaDeviceSynchronize();
    std::printf(
        "RESULT eager: %llu calls that move memory in 32 rounds of a prefill and two replays\n",
        static_cast<unsigned long long>(calls() - settled));
}

TEST_F(Eager, WhatIsAliveOutlastsReplaysScopesPausesAndTheArena) {
    const Model model(2, 1024);
    const auto prompts = this->prompts(model, {512});
    std::vector<at::Tensor> whole, kept;
    {
        SharedVmmAllocator arena(0);
        auto shapes = this->shapes(arena, model, {1024, 16});
        for (int round = 0; round < 6; ++round) {
            {
                const EagerScope scope(arena, raw());
                EXPECT_TRUE(EagerScope::active());
                whole.push_back(at::full({3 << 20}, round, half()));
                {
                    const KeptScope lasting;
                    kept.push_back(at::full({1000}, round, half()));
                }
                static_cast<void>(prefill(model, prompts[0].input));
            }
            EXPECT_FALSE(EagerScope::active());
            EXPECT_EQ(wrong(shapes, 1), 0) << round;
            if (round == 3) {
                static_cast<void>(vmmgraph::pause(*device_, {}, {{raw()}, {}}));
                static_cast<void>(vmmgraph::resume(*device_, {}));
            }
            if (round == 4) {
                arena.trim();
            }
        }
    }
    cudaDeviceSynchronize();
    for (std::size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(at::all(whole[i] == static_cast<double>(i)).item<bool>()) << i;
        EXPECT_TRUE(at::all(kept[i] == static_cast<double>(i)).item<bool>()) << i;
    }
    std::thread([&] { whole.clear(); }).join();
    kept.clear();
    cudaDeviceSynchronize();
    device_->trim();
}

TEST_F(Eager, BytesStayUntilTheStreamsThatReadThemHavePassed) {
    SharedVmmAllocator arena(0);
    constexpr std::int64_t count = 8 << 20;
    const auto a = at::randn({4096, 4096}, half());
    cudaDeviceSynchronize();
    for (int round = 0; round < 20; ++round) {
        const auto side = c10::cuda::getStreamFromPool();
        at::Tensor read;
        {
            const EagerScope scope(arena, raw());
            auto source = at::full({count}, round, half());
            cudaStreamSynchronize(stream_->stream());
            {
                const c10::cuda::CUDAStreamGuard guard(side);
                for (int i = 0; i < 30; ++i) {
                    static_cast<void>(at::mm(a, a));
                }
                read = source.clone();
            }
            source.record_stream(side);
            source.reset();
            static_cast<void>(at::full({count}, -1, half()));
        }
        const EagerScope next(arena, raw());
        static_cast<void>(at::full({count}, -2, half()));
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::all(read == static_cast<double>(round)).item<bool>()) << round;
    }
}

// For example, a garbage collector ends the scope. Later tensors are torch's; earlier ones stay
// valid.
TEST_F(Eager, AnotherThreadEndsAScope) {
    const Model model(2, 1024);
    SharedVmmAllocator arena(0);
    auto shapes = this->shapes(arena, model, {16});
    const auto ended = [&](const std::function<void()>& end) {
        const auto before = torchs_bytes();
        const auto ours = at::full({1 << 20}, 3.0, half());
        EXPECT_EQ(torchs_bytes(), before);
        EXPECT_TRUE(EagerScope::active());
        cudaStreamSynchronize(stream_->stream());
        std::thread([&] {
            end();
            shapes[0].graph.replay(raw());
            cudaStreamSynchronize(stream_->stream());
        }).join();
        EXPECT_FALSE(EagerScope::active());
        const auto torchs = at::full({1 << 20}, 4.0, half());
        EXPECT_GT(torchs_bytes(), before);
        EXPECT_EQ(wrong(shapes, 2), 0);
        EXPECT_TRUE(at::all(ours == 3.0).item<bool>());
    };
    {
        EagerScope scope(arena, raw());
        ended([&] { scope.end(); });
        // The end of the first scope must not end this one.
        const EagerScope inner(arena, raw());
        scope.end();
        EXPECT_TRUE(EagerScope::active());
    }
    EXPECT_FALSE(EagerScope::active());
    const c10::cuda::CUDAStreamGuard guard(*stream_);
    EXPECT_EQ(vmmgraph_torch_eager_end(arena.handle()), VMMGRAPH_ERROR_WRONG_STATE);
    ASSERT_EQ(vmmgraph_torch_eager_enter_of(arena.handle(), 64 << 20), VMMGRAPH_OK);
    ended([&] { EXPECT_EQ(vmmgraph_torch_eager_end(arena.handle()), VMMGRAPH_OK); });
    EXPECT_EQ(vmmgraph_torch_eager_end(arena.handle()), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_torch_eager_leave(), VMMGRAPH_ERROR_WRONG_STATE);
    SharedVmmAllocator inner(0);
    ASSERT_EQ(vmmgraph_torch_eager_enter(arena.handle()), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_torch_eager_enter(inner.handle()), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_torch_eager_leave_of(arena.handle()), VMMGRAPH_OK);
    EXPECT_TRUE(EagerScope::active());
    std::thread([&] {
        EXPECT_EQ(vmmgraph_torch_eager_leave_of(inner.handle()), VMMGRAPH_OK);
        shapes[0].graph.replay(raw());
        cudaStreamSynchronize(stream_->stream());
    }).join();
    EXPECT_TRUE(EagerScope::active());
    for (int time = 0; time < 2; ++time) {
        EXPECT_EQ(vmmgraph_torch_eager_leave_of(inner.handle()), VMMGRAPH_OK);
        EXPECT_FALSE(EagerScope::active());
        EXPECT_EQ(vmmgraph_torch_eager_leave_of(arena.handle()), VMMGRAPH_OK);
    }
    EXPECT_EQ(vmmgraph_torch_eager_leave(), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(wrong(shapes, 2), 0);
    ASSERT_EQ(vmmgraph_torch_eager_enter(arena.handle()), VMMGRAPH_OK);
    EXPECT_TRUE(EagerScope::active());
    EXPECT_EQ(vmmgraph_torch_eager_end(arena.handle()), VMMGRAPH_OK);
    EXPECT_FALSE(EagerScope::active());
    EXPECT_EQ(c10::cuda::getCurrentCUDAStream(0).stream(), stream_->stream());
    // The end may fall between the check for a scope and the allocation.
    for (int round = 0; round < 200; ++round) {
        ASSERT_EQ(vmmgraph_torch_eager_enter(arena.handle()), VMMGRAPH_OK);
        std::thread ender(
            [&] { EXPECT_EQ(vmmgraph_torch_eager_end(arena.handle()), VMMGRAPH_OK); });
        std::vector<at::Tensor> made;
        for (int i = 0; i < 50; ++i) {
            made.push_back(at::full({1 << 14}, static_cast<double>(i), half()));
        }
        ender.join();
        for (int i = 0; i < 50; ++i) {
            ASSERT_TRUE(
                at::all(made[static_cast<std::size_t>(i)] == static_cast<double>(i)).item<bool>())
                << round << ' ' << i;
        }
    }
    EXPECT_EQ(wrong(shapes, 2), 0);
}

TEST_F(Eager, WhatItExcludesIsRefusedAndTheScopeGoesOn) {
    const Model model(2, 1024);
    SharedVmmAllocator arena(0), other(0);
    auto shapes = this->shapes(arena, model, {16});
    auto others = this->shapes(other, model, {16});
    {
        const EagerScope scope(arena, raw());
        EXPECT_EQ(status_of([&] { const EagerScope inner(arena, raw()); }),
                  VMMGRAPH_ERROR_WRONG_STATE);
        EXPECT_EQ(status_of([&] { shapes[0].graph.replay(raw()); }), VMMGRAPH_ERROR_WRONG_STATE);
        const auto side = c10::cuda::getStreamFromPool();
        EXPECT_EQ(status_of([&] { static_cast<void>(capture(arena, side.stream(), [] {})); }),
                  VMMGRAPH_ERROR_WRONG_STATE);
        EXPECT_TRUE(EagerScope::active());
        EXPECT_EQ(wrong(others, 1), 0);
        const auto before = torchs_bytes();
        const auto ours = at::zeros({1 << 20}, half());
        EXPECT_EQ(torchs_bytes(), before);
        const DisableScope torchs_own;
        const auto torchs = at::zeros({1 << 20}, half());
        EXPECT_GT(torchs_bytes(), before);
        EXPECT_FALSE(EagerScope::active());
    }
    EXPECT_THROW(
        {
            const EagerScope scope(arena, raw());
            static_cast<void>(at::zeros({1 << 20}, half()));
            throw std::runtime_error("the model failed");
        },
        std::runtime_error);
    EXPECT_EQ(wrong(shapes, 2), 0);
}

}  // namespace
}  // namespace torch_tests
