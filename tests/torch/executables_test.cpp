// Executables within limits: device memory, host time, GPU time compared with torch's own graphs,
// and results. Needs a GPU. Each RESULT line is a row of the performance document.
//
// `VMMGRAPH_EXECUTABLE_STEPS` (default 100,000) and `VMMGRAPH_EXECUTABLE_CYCLES` (default 2,000)
// set the length.
#include "median.hpp"
#include "trust.hpp"

#include <future>
#include <map>
#include <optional>
#include <string>

namespace torch_tests {
namespace {

using vmmgraph::torch::CaptureScope;
using vmmgraph::torch::ExecutableLimits;
using vmmgraph::torch::ExecutablePool;

double free_mib() {
    std::size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<double>(free) / MiB;
}

template <class F>
double microseconds(F&& work) {
    const auto start = Clock::now();
    work();
    return 1e6 * since(start);
}

// Decode graphs of a model at many batch sizes, largest first, as in engines.
struct Decoding {
    Model model{28, 512};
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> expected;
    std::vector<at::Tensor> outputs;
    std::vector<CapturedGraph> graphs;

    // Each graph has `pieces` with about equal numbers of layers.
    Decoding(SharedVmmAllocator& arena, Stream stream, int shapes, int pieces,
             const CaptureOptions& options) {
        for (int i = shapes; i > 0; --i) {
            inputs.push_back(at::randn({4 * i, 512}, half()));
            expected.push_back(model(inputs.back()) * 2);
        }
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        for (const auto& input : inputs) {
            CaptureScope scope(arena, stream.stream(), options);
            at::Tensor x = input;
            int piece = 1;
            for (std::size_t layer = 0; layer < model.layers.size(); ++layer) {
                x = one_layer(x, layer);
                if (static_cast<int>(layer + 1) * pieces / static_cast<int>(model.layers.size()) >=
                        piece &&
                    piece < pieces) {
                    scope.next_piece();
                    ++piece;
                }
            }
            // The last piece may have no layer.
            outputs.push_back(x * 2);
            x.reset();
            graphs.push_back(scope.end());
        }
    }

    at::Tensor one_layer(const at::Tensor& x, std::size_t layer) const {
        Model one(0);
        one.layers.push_back(model.layers[layer]);
        return one(x);
    }

    void replay(std::size_t i, Stream stream) { graphs[i].replay(stream.stream()); }

    // Returns how many outputs differ from eager results.
    int wrong() const {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        int wrong = 0;
        for (std::size_t i = 0; i < graphs.size(); ++i) {
            wrong += !at::equal(outputs[i], expected[i]);
        }
        return wrong;
    }
};

class Executables : public Torch {
protected:
    // Compares the bytes within the limit and without one.
    void memory_of(int shapes, int pieces, std::size_t limit) {
        SharedVmmAllocator arena;
        CaptureOptions options;
        options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{limit, 0});
        double capture = 0;
        std::optional<Decoding> made;
        capture =
            microseconds([&] { made.emplace(arena, *stream_, shapes, pieces, options); }) / 1e3;
        auto& decoding = *made;
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto before = free_mib();
        for (int round = 0; round < 2; ++round) {
            for (int i = 0; i < shapes; ++i) {
                decoding.replay(static_cast<std::size_t>(i), *stream_);
            }
        }
        EXPECT_EQ(decoding.wrong(), 0);
        const auto limited = before - free_mib();
        const auto stats = options.executables->stats();
        EXPECT_EQ(stats.instantiated, limit);
        EXPECT_EQ(stats.executables, limit * static_cast<std::uint64_t>(pieces));
        // The first capture has no measured size yet.
        for (const auto& graph : decoding.graphs) {
            EXPECT_GT(graph.report().executable_bytes, 0);
        }
        options.executables->set_limits({});
        const auto instantiating = microseconds([&] {
                                       for (auto& graph : decoding.graphs) {
                                           EXPECT_TRUE(graph.instantiate());
                                       }
                                   }) /
                                   1e3;
        const auto all = before - free_mib();
        const auto without = options.executables->stats();
        std::printf(
            "RESULT executables: %d shapes of %d pieces, %llu nodes: %.1f MiB for %llu executables "
            "with a limit of %zu graphs, %.1f MiB "
            "for %llu without; pool says %.1f and %.1f MiB\n",
            shapes, pieces, static_cast<unsigned long long>(stats.template_nodes), limited,
            static_cast<unsigned long long>(stats.executables), limit, all,
            static_cast<unsigned long long>(without.executables),
            static_cast<double>(stats.bytes) / MiB, static_cast<double>(without.bytes) / MiB);
        std::printf(
            "RESULT executables: %llu instantiations, %llu evictions; capture %.1f ms without "
            "instantiating, the rest %.1f ms\n",
            static_cast<unsigned long long>(stats.instantiations),
            static_cast<unsigned long long>(stats.evictions), capture, instantiating);
        EXPECT_EQ(decoding.wrong(), 0);
        EXPECT_LE(limited, all / 4);
        host_time_of_misses(decoding, options, limit);
    }

    // Host time of a replay without and with an eviction and instantiation.
    void host_time_of_misses(Decoding& decoding, const CaptureOptions& options, std::size_t limit) {
        const auto shapes = decoding.graphs.size();
        std::map<std::string, std::vector<double>> times;
        options.executables->set_limits({limit, 0});
        std::mt19937 random(5);
        for (int round = 0; round < 600; ++round) {
            const auto i = random() % shapes;
            const bool hit = decoding.graphs[i].is_instantiated();
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            times[hit ? "hit" : "miss"].push_back(
                microseconds([&] { decoding.replay(i, *stream_); }));
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            times["replay again"].push_back(microseconds([&] { decoding.replay(i, *stream_); }));
        }
        const auto nodes = static_cast<double>(options.executables->stats().template_nodes) /
                           static_cast<double>(shapes);
        for (const auto& [name, of_one] : times) {
            std::printf(
                "RESULT executables: %zu pieces, %.0f nodes: host time of a %s: %.1f us median, "
                "%.1f at the 95th percentile, of %zu\n",
                decoding.graphs[0].pieces(), nodes, name.c_str(), median(of_one),
                [sorted = of_one]() mutable {
                    std::sort(sorted.begin(), sorted.end());
                    return sorted[sorted.size() * 95 / 100];
                }(),
                of_one.size());
        }
        EXPECT_EQ(decoding.wrong(), 0);
    }
};

TEST_F(Executables, ALimitOfEightOf65ShapesSavesMostOfTheirMemory) { memory_of(65, 1, 8); }
TEST_F(Executables, ALimitOfSixOf51PiecewiseShapesSavesMostOfTheirMemory) { memory_of(51, 29, 6); }

// Alternates with torch's own graphs of the same work. From about 220 nodes on, an executable
// changed to another grid by cudaGraphExecUpdate stays 10 to 20 % slower.
TEST_F(Executables, AReplayBehindAnEvictionIsAsFastOnTheGpuAsTorchsOwn) {
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{2, 0});
    // About 80, 340 and 700 nodes.
    for (const int layers : {6, 24, 54}) {
        const Model model(layers, 512);
        constexpr int shapes = 6;
        std::vector<at::Tensor> inputs, outputs, of_torch;
        std::vector<CapturedGraph> graphs;
        std::vector<std::unique_ptr<at::cuda::CUDAGraph>> torchs;
        for (int i = 0; i < shapes; ++i) {
            inputs.push_back(at::randn({8 + 40 * i, 512}, half()));
            static_cast<void>(model(inputs.back()));
        }
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        for (const auto& input : inputs) {
            graphs.push_back(
                capture(arena, raw(), [&] { outputs.push_back(model(input)); }, options));
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            torchs.push_back(std::make_unique<at::cuda::CUDAGraph>());
            torchs.back()->capture_begin();
            of_torch.push_back(model(input));
            torchs.back()->capture_end();
        }
        cudaEvent_t begin = nullptr, end = nullptr;
        C10_CUDA_CHECK(cudaEventCreate(&begin));
        C10_CUDA_CHECK(cudaEventCreate(&end));
        // Two launches hide the host time of the first measured one.
        const auto gpu_time = [&](const std::function<void()>& launch) {
            launch();
            C10_CUDA_CHECK(cudaStreamSynchronize(stream_->stream()));
            launch();
            C10_CUDA_CHECK(cudaEventRecord(begin, stream_->stream()));
            for (int n = 0; n < 5; ++n) {
                launch();
            }
            C10_CUDA_CHECK(cudaEventRecord(end, stream_->stream()));
            C10_CUDA_CHECK(cudaStreamSynchronize(stream_->stream()));
            float ms = 0;
            C10_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
            return static_cast<double>(ms) * 200;
        };
        double worst = 0, ours_sum = 0, torch_sum = 0;
        std::vector<std::vector<double>> ours(shapes), stock(shapes);
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        for (int round = 0; round < 15; ++round) {
            for (int i = 0; i < shapes; ++i) {
                ours[i].push_back(gpu_time([&] { graphs[i].replay(raw()); }));
                stock[i].push_back(gpu_time([&] { torchs[i]->replay(); }));
            }
        }
        for (int i = 0; i < shapes; ++i) {
            ours_sum += median(ours[i]);
            torch_sum += median(stock[i]);
            worst = std::max(worst, median(ours[i]) / median(stock[i]));
            EXPECT_TRUE(at::equal(outputs[i], of_torch[i]));
        }
        const auto stats = options.executables->stats();
        std::printf(
            "RESULT executables: %d layers, %llu nodes a graph: GPU time of 6 shapes %.1f us, "
            "torch's own %.1f, worst ratio %.4f; %llu "
            "evictions\n",
            layers, static_cast<unsigned long long>(stats.template_nodes / stats.graphs), ours_sum,
            torch_sum, worst, static_cast<unsigned long long>(stats.evictions));
        EXPECT_GE(stats.evictions, 80u);
        EXPECT_LE(worst, 1.01);
        EXPECT_LE(ours_sum / torch_sum, 1.005);
        C10_CUDA_CHECK(cudaEventDestroy(begin));
        C10_CUDA_CHECK(cudaEventDestroy(end));
        graphs.clear();
    }
}

TEST_F(Executables, RandomShapesFromFourThreadsAreRight) {
    SharedVmmAllocator arena, second;
    const auto pool = ExecutablePool::of(arena);
    ASSERT_EQ(pool, ExecutablePool::of(second));
    pool->set_limits({16, 0});
    {
        Fleet fleet(arena, *stream_, 65), other(second, *stream_, 10);
        const auto steps = setting("VMMGRAPH_EXECUTABLE_STEPS", 100'000);
        std::vector<std::future<void>> threads;
        for (unsigned seed = 1; seed <= 4; ++seed) {
            threads.push_back(std::async(std::launch::async, [&, seed] {
                const auto stream = c10::cuda::getStreamFromPool();
                std::mt19937 random(seed);
                for (long n = 0; n < steps / 4; ++n) {
                    auto& from = seed == 4 ? other : fleet;
                    from.graphs[random() % from.graphs.size()].replay(stream.stream());
                    if (n % 7 == 0) {
                        fleet.graphs[random() % fleet.graphs.size()].instantiate_soon();
                    }
                    if (n % 256 == 0) {
                        C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
                    }
                }
                C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
            }));
        }
        for (auto& thread : threads) {
            thread.get();
        }
        const auto stats = pool->stats();
        std::printf(
            "RESULT trust executables: %ld random replays of 75 graphs, 4 threads, 2 arenas: %lld "
            "wrong elements, %d outputs lost; %llu "
            "instantiations, %llu ahead, %llu evictions, %llu hits, %llu misses, %llu executables "
            "now\n",
            steps, static_cast<long long>(fleet.wrong_elements() + other.wrong_elements()),
            fleet.spoilt_outputs() + other.spoilt_outputs(),
            static_cast<unsigned long long>(stats.instantiations),
            static_cast<unsigned long long>(stats.ahead),
            static_cast<unsigned long long>(stats.evictions),
            static_cast<unsigned long long>(stats.hits),
            static_cast<unsigned long long>(stats.misses),
            static_cast<unsigned long long>(stats.executables));
        EXPECT_EQ(fleet.wrong_elements() + other.wrong_elements(), 0);
        EXPECT_EQ(fleet.spoilt_outputs() + other.spoilt_outputs(), 0);
        EXPECT_GT(stats.evictions, static_cast<std::uint64_t>(steps / 4));
        EXPECT_LE(stats.executables, 18);
    }
    EXPECT_EQ(pool->stats().executables, 0);
}

TEST_F(Executables, RandomNumbersGoOnAsTorchsOwn) {
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{1, 0});
    const auto ask = [](const at::Tensor& to, bool twice) {
        to.copy_(at::rand_like(to));
        if (twice) {
            to.add_(at::rand_like(to));
        } else {
            to.add_(at::dropout(to, 0.5, true));
        }
    };
    std::vector<at::Tensor> into, of_torch;
    std::vector<CapturedGraph> graphs;
    std::vector<std::unique_ptr<at::cuda::CUDAGraph>> torchs;
    for (int i = 0; i < 4; ++i) {
        into.push_back(at::zeros({1000}, at::TensorOptions().device(at::kCUDA)));
        of_torch.push_back(at::zeros_like(into.back()));
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        graphs.push_back(capture(arena, raw(), [&] { ask(into.back(), i % 2 == 0); }, options));
        const c10::cuda::CUDAStreamGuard on(*stream_);
        torchs.push_back(std::make_unique<at::cuda::CUDAGraph>());
        torchs.back()->capture_begin();
        ask(of_torch.back(), i % 2 == 0);
        torchs.back()->capture_end();
    }
    const c10::cuda::CUDAStreamGuard on(*stream_);
    const auto sequence = [&](bool ours) {
        at::manual_seed(7);
        std::vector<at::Tensor> found;
        for (const int i : {0, 2, 1, 3, 0, 1, 2, 2, 3, 0}) {
            if (ours) {
                graphs[i].replay(raw());
            } else {
                torchs[i]->replay();
            }
            found.push_back((ours ? into : of_torch)[i].clone());
        }
        found.push_back(at::rand({100}, into[0].options()));
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        return at::cat(found);
    };
    const auto expected = sequence(false);
    EXPECT_TRUE(at::equal(sequence(true), expected));
    EXPECT_TRUE(at::equal(sequence(true), expected));
    EXPECT_GT(options.executables->stats().evictions, 5);
}

TEST_F(Executables, ThousandsOfCapturesStayAtTheBudget) {
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{8, 0});
    const Model model(8, 256);
    const auto cycles = setting("VMMGRAPH_EXECUTABLE_CYCLES", 2000);
    std::vector<at::Tensor> inputs;
    for (int i = 1; i <= 24; ++i) {
        inputs.push_back(at::randn({8 * i, 256}, half()));
        static_cast<void>(model(inputs.back()));
    }
    std::mt19937 random(11);
    std::vector<CapturedGraph> graphs;
    // Memory without torch's cache and the arena's pages.
    const auto others = [&] {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto reserved = c10::cuda::CUDACachingAllocator::getDeviceStats(0)
                                  .reserved_bytes[static_cast<std::size_t>(
                                      c10::CachingAllocator::StatType::AGGREGATE)]
                                  .current;
        const auto ours = static_cast<double>(vmmgraph::Device::open().stats().physical_bytes);
        return free_mib() + (static_cast<double>(reserved) + ours) / MiB;
    };
    double before = 0, lowest = 1e9;
    int wrong = 0;
    for (long cycle = 0; cycle < cycles; ++cycle) {
        if (cycle == cycles / 4) {
            before = lowest = others();
        }
        const auto& input = inputs[random() % inputs.size()];
        at::Tensor output;
        graphs.push_back(capture(
            arena, raw(),
            [&] {
                const vmmgraph::torch::KeptScope kept;
                output = at::empty_like(input);
                output.copy_(model(input));
            },
            options));
        graphs.back().replay(raw());
        graphs[random() % graphs.size()].replay(raw());
        if (cycle % 50 == 0) {
            const auto expected = model(input);
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            wrong += !at::equal(output, expected);
            lowest = std::min(lowest, others());
        }
        if (graphs.size() > 20) {
            graphs.erase(graphs.begin() + static_cast<std::ptrdiff_t>(random() % graphs.size()));
        }
    }
    const auto stats = options.executables->stats();
    std::printf(
        "RESULT executables: %ld captures and evictions, at most 8 executables: %d wrong, %.1f MiB "
        "more at most after the first quarter, "
        "%llu instantiations, %llu evictions\n",
        cycles, wrong, before - lowest, static_cast<unsigned long long>(stats.instantiations),
        static_cast<unsigned long long>(stats.evictions));
    EXPECT_EQ(wrong, 0);
    EXPECT_LE(before - lowest, 4.0);
}

TEST_F(Executables, OnesWhoseHandleTheCallerHasAreNeverEvicted) {
    SharedVmmAllocator arena, other;
    CaptureOptions options;
    options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{1, 0});
    auto input = at::ones({1000}, at::TensorOptions().device(at::kCUDA));
    std::vector<at::Tensor> outputs(3);
    std::vector<CapturedGraph> graphs;
    for (int i = 0; i < 3; ++i) {
        graphs.push_back(capture(arena, raw(), [&] { outputs[i] = input + i; }, options));
    }
    auto* const seen = graphs[0].exec();
    ASSERT_NE(seen, nullptr);
    for (int round = 0; round < 3; ++round) {
        for (auto& graph : graphs) {
            graph.replay(raw());
        }
    }
    EXPECT_EQ(graphs[0].exec(), seen);
    EXPECT_TRUE(graphs[0].is_instantiated());
    EXPECT_FALSE(graphs[1].is_instantiated());
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(outputs[i][0].item<float>(), 1 + i);
    }
    EXPECT_GT(graphs[1].executable_bytes(), 0u);
    // A graph keeps its pool alive, also after a move.
    const auto pool = std::weak_ptr(std::exchange(options.executables, nullptr));
    auto last = std::move(graphs[1]);
    graphs.clear();
    EXPECT_FALSE(pool.expired());
    last.replay(raw());
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_EQ(outputs[1][0].item<float>(), 2);
}

}  // namespace
}  // namespace torch_tests
