// Device time and memory of the engine layer on a GPU. Each RESULT line is a row of the performance
// document.
#include <algorithm>
#include <cstdio>
#include <random>

#include "measure.hpp"
#include "small.hpp"

namespace engine_tests {
namespace {

TEST_F(Measure, StepTimeIsThatOfAPrivatePool) {
    for (const std::int32_t batch : {1, 8, 64}) {
        const auto input = decode(batch);
        const auto bucket = Key::of(static_cast<std::uint32_t>(batch),
                                    static_cast<std::uint32_t>(batch), uniform_decode);
        at::cuda::CUDAGraph graph;
        capture_privately(graph, input, bucket);
        const auto ours = [&] { ASSERT_EQ(run(input).ran.mode, Mode::full); };
        const auto privately = [&] {
            executor->inputs().update(bucket, values_of(input), stream());
            graph.replay();
        };
        const auto on_device = input.to(device());
        const auto run_eagerly = [&] {
            return executor->eager(on_device.token_ids, on_device.positions, caches,
                                   on_device.input_params);
        };
        const auto eager = [&] { static_cast<void>(run_eagerly()); };
        ours();
        wait();
        const auto by_graph = executor->inputs().hidden_states().clone();
        const auto by_eager = run_eagerly();
        wait();
        EXPECT_TRUE(at::equal(by_graph, by_eager))
            << "of the same rows, eager products are the same";
        std::vector<double> a;
        std::vector<double> b;
        std::vector<double> c;
        static_cast<void>(step_time(20, ours));
        static_cast<void>(step_time(20, privately));
        for (int round = 0; round < 11; ++round) {
            a.push_back(step_time(100, ours));
            b.push_back(step_time(100, privately));
        }
        for (int round = 0; round < 5; ++round) {
            c.push_back(step_time(10, eager));
        }
        std::printf(
            "RESULT step: batch %d: graph %.4f ms, private pool %.4f ms (%.4f x), eager %.4f ms "
            "(%.2f x)\n",
            batch, median(a), median(b), median(a) / median(b), median(c), median(c) / median(a));
        EXPECT_LE(median(a), 1.01 * median(b));
        EXPECT_LT(median(a), median(c));
    }
}

// Every graph owns 4 MiB.
TEST(Eviction, UnderALimitOfHalfTheGraphsMemoryStaysAndNothingIsWrong) {
    ExecutorOptions options;
    for (std::uint32_t tokens = 16; tokens <= 256; tokens += 16) {
        options.piecewise.push_back(Key::of(tokens));
    }
    // Peak of the arena, captures included.
    std::uint64_t most = 0;
    const vmmgraph::SharedVmmAllocator* watched = nullptr;
    const auto look = [&] {
        most =
            std::max<std::uint64_t>(most, watched == nullptr ? 0 : watched->stats().charged_bytes);
    };
    const auto own = [&look](Recorder& recorder) {
        look();
        const auto kept = at::zeros({1 << 20}, on_device(at::kFloat));
        recorder.eager({}, [kept](const Step& step, at::TensorList) {
            kept.fill_(static_cast<double>(step.key[Axis::tokens]));
        });
        const auto mark = kept.narrow(0, 7, 1) * 0;
        look();
        recorder.eager({mark}, [kept](const Step& step, at::TensorList) {
            // Sampled: waits for the device.
            if (step.key[Axis::tokens] % 16 == 5) {
                EXPECT_EQ(kept[(1 << 20) - 1].item<float>(),
                          static_cast<float>(step.key[Axis::tokens]));
            }
        });
    };
    std::uint64_t all = 0;
    if (has_gpu()) {
        Small small(options);
        small.trouble = own;
        EXPECT_EQ(small.executor->warm_up(), 16u);
        all = small.arena->mapped_size();
        EXPECT_GE(small.arena->stats().retained_bytes, std::uint64_t{16} * (4 << 20));
        options.most_bytes = all / 2;
    } else {
        options.most_graphs = 8;
    }
    Small small(options);
    small.trouble = own;
    std::mt19937 random(21);
    Ran ran;
    watched = small.arena.get();
    int wrong = 0;
    int eager = 0;
    const int steps = most_steps(has_gpu() ? 10'000 : 500);
    for (int step = 0; step < steps; ++step) {
        wrong += !small.run(1 + static_cast<std::int64_t>(random() % 256), Phase::mixed, ran, 0,
                            static_cast<float>(random() % 10));
        eager += ran.mode == Mode::eager;
        look();
        if (step == steps / 10 || step == steps - 1) {
            std::size_t free = 0;
            std::size_t total = 0;
            static_cast<void>(has_gpu() && cudaMemGetInfo(&free, &total) == cudaSuccess);
            std::printf("RESULT eviction: step %d: device %zu MiB used\n", step,
                        (total - free) >> 20);
        }
    }
    const auto stats = small.executor->stats();
    std::printf(
        "RESULT eviction: %d steps, %llu captures, %llu evictions, %d wrong, %d eager; all graphs "
        "%llu MiB, limit %llu MiB, most %llu "
        "MiB\n",
        steps, static_cast<unsigned long long>(stats.captures),
        static_cast<unsigned long long>(stats.evictions), wrong, eager,
        static_cast<unsigned long long>(all >> 20),
        static_cast<unsigned long long>(options.most_bytes >> 20),
        static_cast<unsigned long long>(most >> 20));
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(eager, 0);
    EXPECT_TRUE(stats.evictions > 100 || shortened());
    EXPECT_LT(stats.graphs, 16u);
    if (has_gpu()) {
        EXPECT_LE(most, options.most_bytes);
    }
}

}  // namespace
}  // namespace engine_tests
