// Graphs that share executables: what that takes, what it costs, and that it is right. Needs a GPU; each RESULT line is one row of the
// performance document.
//
// VMMGRAPH_EXECUTABLE_STEPS says how many random steps are checked (100,000), VMMGRAPH_EXECUTABLE_CYCLES how many captures and evictions
// (2,000).
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

// Graphs of a model at many batch sizes, as engines capture them: largest first, for decoding.
struct Decoding {
    Model model{28, 512};
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> expected;
    std::vector<at::Tensor> outputs;
    std::vector<CapturedGraph> graphs;

    // `pieces` of about as many layers each.
    Decoding(SharedVmmAllocator& arena, Stream stream, int shapes, int pieces, const CaptureOptions& options) {
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
                if (static_cast<int>(layer + 1) * pieces / static_cast<int>(model.layers.size()) >= piece && piece < pieces) {
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

    // How many outputs are not what eager work makes of the same input, bit for bit.
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
    // Captures `shapes` of `pieces`, replays all within a limit and then without, and compares the bytes.
    void memory_of(int shapes, int pieces, std::size_t most) {
        SharedVmmAllocator arena;
        CaptureOptions options;
        options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{most, 0});
        double capture = 0;
        std::optional<Decoding> made;
        capture = microseconds([&] { made.emplace(arena, *stream_, shapes, pieces, options); }) / 1e3;
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
        std::uint64_t graphs = 0;
        std::uint64_t executables = 0;
        std::uint64_t bytes = 0;
        for (const auto& one : options.executables->classes()) {
            graphs += one.graphs;
            executables += one.executables;
            bytes += one.bytes;
            EXPECT_LE(one.awake, one.graphs);
        }
        EXPECT_EQ(graphs, stats.graphs);
        EXPECT_EQ(executables, stats.executables);
        EXPECT_LE(bytes, stats.bytes);
        EXPECT_GT(bytes, 0);
        // Of the first capture nothing was measured yet.
        for (const auto& graph : decoding.graphs) {
            EXPECT_GT(graph.report().executable_bytes, 0);
        }
        options.executables->set_limits({});
        const auto waking = microseconds([&] {
                                for (auto& graph : decoding.graphs) {
                                    EXPECT_TRUE(graph.wake());
                                }
                            }) /
                            1e3;
        const auto all = before - free_mib();
        const auto without = options.executables->stats();
        std::printf(
            "RESULT executables: %d shapes of %d pieces, %llu nodes: %.1f MiB for %llu executables with a limit of %zu graphs, %.1f MiB "
            "for %llu "
            "without; pool says %.1f and %.1f MiB\n",
            shapes, pieces, static_cast<unsigned long long>(stats.template_nodes), limited,
            static_cast<unsigned long long>(stats.executables), most, all, static_cast<unsigned long long>(without.executables),
            static_cast<double>(stats.bytes) / MiB, static_cast<double>(without.bytes) / MiB);
        std::printf(
            "RESULT executables: %llu made, %llu updated, %llu refused; capture %.1f ms without making any, making the rest %.1f ms\n",
            static_cast<unsigned long long>(stats.made), static_cast<unsigned long long>(stats.updated),
            static_cast<unsigned long long>(stats.refused), capture, waking);
        EXPECT_EQ(decoding.wrong(), 0);
        EXPECT_LE(limited, all / 8);
        time_of_changes(decoding, options, most);
    }

    // Host time of a replay of the same graph, and of one whose executable has to be updated first.
    void time_of_changes(Decoding& decoding, const CaptureOptions& options, std::size_t most) {
        const auto shapes = decoding.graphs.size();
        std::map<std::string, std::vector<double>> times;
        for (int round = 0; round < 300; ++round) {
            options.executables->set_limits({});
            for (const bool again : {false, true}) {
                C10_CUDA_CHECK(cudaDeviceSynchronize());
                const auto time = microseconds([&] { decoding.replay(0, *stream_); });
                if (again) {
                    times["the same graph again"].push_back(time);
                }
            }
        }
        options.executables->set_limits({most, 0});
        for (std::size_t i = 0; i < 4 * shapes; ++i) {
            decoding.replay(i % shapes, *stream_);
        }
        std::mt19937 random(5);
        for (int round = 0; round < 600; ++round) {
            const auto i = random() % shapes;
            const bool awake = decoding.graphs[i].awake();
            const auto before = options.executables->stats();
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            const auto time = microseconds([&] { decoding.replay(i, *stream_); });
            const auto after = options.executables->stats();
            const bool made = after.made != before.made;
            times[awake ? "one that is awake" : made ? "one that is made" : "one that is updated"].push_back(time);
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            if (!awake) {
                times["one that was just updated"].push_back(microseconds([&] { decoding.replay(i, *stream_); }));
            }
        }
        const auto nodes = static_cast<double>(options.executables->stats().template_nodes) / static_cast<double>(shapes);
        for (const auto& [name, of_one] : times) {
            std::printf(
                "RESULT executables: %zu pieces, %.0f nodes: host time of a replay of %s: %.1f us median, %.1f at the 95th, of %zu\n",
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

TEST_F(Executables, SixtyFiveShapesTakeAnEighth) { memory_of(65, 1, 8); }
TEST_F(Executables, FiftyOneShapesInPiecesTakeAnEighth) { memory_of(51, 29, 6); }

// What CUDA alone takes for the same work, captured by torch: one executable, updated to another graph and launched, and launched again.
struct Alone {
    double update = 0;
    double behind = 0;
    double again = 0;
};

template <class Graph = at::cuda::CUDAGraph>
Alone cuda_alone(const Model& model, const std::vector<at::Tensor>& inputs, Stream stream) {
    Alone medians;
    if constexpr (requires(Graph& graph) { graph.raw_cuda_graph(); }) {
        const c10::cuda::CUDAStreamGuard guard(stream);
        const auto pool = at::cuda::graph_pool_handle();
        std::vector<std::unique_ptr<Graph>> graphs;
        std::vector<at::Tensor> outputs;
        for (const auto& input : inputs) {
            graphs.push_back(std::make_unique<Graph>(true));
            graphs.back()->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
            outputs.push_back(model(input));
            graphs.back()->capture_end();
        }
        cudaGraphExec_t exec = nullptr;
        C10_CUDA_CHECK(cudaGraphInstantiate(&exec, graphs[0]->raw_cuda_graph(), 0));
        std::vector<double> update, behind, again;
        for (int round = 1; round < 200; ++round) {
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            cudaGraphExecUpdateResultInfo info{};
            update.push_back(microseconds([&] {
                C10_CUDA_CHECK(cudaGraphExecUpdate(exec, graphs[static_cast<std::size_t>(round) % graphs.size()]->raw_cuda_graph(), &info));
            }));
            behind.push_back(microseconds([&] { C10_CUDA_CHECK(cudaGraphLaunch(exec, stream.stream())); }));
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            again.push_back(microseconds([&] { C10_CUDA_CHECK(cudaGraphLaunch(exec, stream.stream())); }));
        }
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        C10_CUDA_CHECK(cudaGraphExecDestroy(exec));
        medians = {median(update), median(behind), median(again)};
    }
    return medians;
}

// An update by itself, and the launch behind it; beside it, where functions are equal, what CUDA alone takes.
TEST_F(Executables, WhatAnUpdateCosts) {
    SharedVmmAllocator arena;
    CaptureOptions options;
    options.executables = std::make_shared<ExecutablePool>(arena, ExecutableLimits{2, 0});
    for (const int layers : {1, 4, 28}) {
        for (const bool equal : {true, false}) {
            const Model model(layers, 512);
            std::vector<at::Tensor> inputs, outputs;
            std::vector<CapturedGraph> graphs;
            for (int i = 0; i < 6; ++i) {
                inputs.push_back(at::randn({equal ? 64 : 8 + 40 * i, 512}, half()));
                static_cast<void>(model(inputs.back()));
            }
            C10_CUDA_CHECK(cudaDeviceSynchronize());
            for (const auto& input : inputs) {
                graphs.push_back(capture(arena, raw(), [&] { outputs.push_back(model(input)); }, options));
            }
            // Woken, and then launched; or launched at once, which updates first; and launched again.
            std::vector<double> woken, behind, late, again;
            for (int round = 0; round < 400; ++round) {
                auto& graph = graphs[round % graphs.size()];
                C10_CUDA_CHECK(cudaDeviceSynchronize());
                // With other functions the graphs are of several topologies, and some stay awake.
                EXPECT_FALSE(equal && graph.awake() && round > 6);
                if (graph.awake()) {
                    graph.replay(raw());
                } else if (round / graphs.size() % 2 == 0) {
                    bool awake = false;
                    const auto time = microseconds([&] { awake = graph.wake(); });
                    C10_CUDA_CHECK(cudaDeviceSynchronize());
                    const auto launch = microseconds([&] { graph.replay(raw()); });
                    if (awake) {
                        woken.push_back(time);
                        behind.push_back(launch);
                    }
                } else {
                    late.push_back(microseconds([&] { graph.replay(raw()); }));
                }
                C10_CUDA_CHECK(cudaDeviceSynchronize());
                again.push_back(microseconds([&] { graph.replay(raw()); }));
            }
            EXPECT_GT(late.size(), 20u);
            EXPECT_TRUE(!equal || woken.size() > 20);
            if (late.empty() || woken.empty()) {
                graphs.clear();
                continue;
            }
            const auto nodes = static_cast<double>(options.executables->stats().template_nodes) / static_cast<double>(graphs.size());
            const auto added = median(late) - median(again);
            std::printf(
                "RESULT executables: %.0f nodes, %s: a launch that updates first takes %.1f us more (%.2f a node); waking %.1f us, "
                "the launch behind that %.1f, the next one %.1f\n",
                nodes, equal ? "equal functions" : "other functions", added, added / nodes, median(woken), median(behind), median(again));
            if (equal) {
                const auto alone = cuda_alone(model, inputs, *stream_);
                std::printf(
                    "RESULT executables: %.0f nodes, CUDA alone: an update %.1f us, the launch behind that %.1f, the next one %.1f: %.2f a "
                    "node\n",
                    nodes, alone.update, alone.behind, alone.again, (alone.update + alone.behind - alone.again) / nodes);
            }
            graphs.clear();
        }
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
                        fleet.graphs[random() % fleet.graphs.size()].wake_soon();
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
            "RESULT trust executables: %ld random replays of 75 graphs, 4 threads, 2 arenas: %lld wrong elements, %d outputs lost; %llu "
            "updated, %llu made, %llu refused, %llu woken, %llu ready, %llu late, %llu executables now\n",
            steps, static_cast<long long>(fleet.wrong_elements() + other.wrong_elements()), fleet.spoilt_outputs() + other.spoilt_outputs(),
            static_cast<unsigned long long>(stats.updated), static_cast<unsigned long long>(stats.made),
            static_cast<unsigned long long>(stats.refused), static_cast<unsigned long long>(stats.woken),
            static_cast<unsigned long long>(stats.ready), static_cast<unsigned long long>(stats.late),
            static_cast<unsigned long long>(stats.executables));
        EXPECT_EQ(fleet.wrong_elements() + other.wrong_elements(), 0);
        EXPECT_EQ(fleet.spoilt_outputs() + other.spoilt_outputs(), 0);
        EXPECT_GT(stats.updated, static_cast<std::uint64_t>(steps / 4));
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
    EXPECT_GT(options.executables->stats().updated, 5);
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
    // Of this process, without what torch has cached and what the arena holds.
    const auto others = [&] {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        const auto reserved = c10::cuda::CUDACachingAllocator::getDeviceStats(0)
                                  .reserved_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
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
        "RESULT executables: %ld captures and evictions, at most 8 executables: %d wrong, %.1f MiB more at most after the first quarter, "
        "%llu "
        "made, %llu updated, %llu refused\n",
        cycles, wrong, before - lowest, static_cast<unsigned long long>(stats.made), static_cast<unsigned long long>(stats.updated),
        static_cast<unsigned long long>(stats.refused));
    EXPECT_EQ(wrong, 0);
    EXPECT_LE(before - lowest, 4.0);
}

TEST_F(Executables, OnesThatAreSeenAreNeverAnothers) {
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
    EXPECT_NE(graphs[2].awake(), graphs[1].awake());
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(outputs[i][0].item<float>(), 1 + i);
    }
    EXPECT_GT(graphs[1].executable_bytes(), 0u);
    // Moved: the pool lives as long as a graph of it.
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
