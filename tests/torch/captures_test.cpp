// Real captures through libtorch: both routes, outputs, random numbers and destruction.
#include "fixture.hpp"

namespace torch_tests {
namespace {

TEST_F(Torch, BlocksRouteReplaysAsEagerWithoutWarmUp) {
    SharedVmmAllocator arena;
    const Model model;
    auto all = shapes(arena, model, {1, 7, 64, 256, 1024, 33, 512});
    EXPECT_EQ(wrong(all), 0);
    EXPECT_EQ(wrong(all, 1, true), 0)
        << "with eager products on the capture stream between replays";
}

TEST_F(Torch, BlocksRouteHoldsNearTheHungriestShape) {
    const Model model;
    // Large pages add rounding: the last page, and the rest of the retained output's page.
    for (const std::size_t large : {2 * MiB, 32 * MiB}) {
        vmmgraph::Options options;
        options.large_page_bytes = large;
        SharedVmmAllocator arena(0, options);
        auto all = shapes(arena, model, {2048, 1024, 512, 256, 128},
                          {Route::blocks, Retain::inherit}, true);
        std::size_t peak = 0, sum = 0;
        for (const auto& shape : all) {
            peak = std::max<std::size_t>(peak, shape.graph.report().peak_live_bytes);
            sum += shape.graph.report().peak_live_bytes;
        }
        const auto stats = arena.stats();
        std::printf(
            "RESULT blocks, pages of %zu MiB: physical %zu MiB (retained %zu), peak live %zu MiB, "
            "sum %zu MiB\n",
            large / MiB, stats.physical_bytes / MiB, stats.retained_bytes / MiB, peak / MiB,
            sum / MiB);
        EXPECT_LE(stats.physical_bytes - stats.retained_bytes,
                  peak + 4 * MiB + (large > 2 * MiB ? 3 * large : 0));
        EXPECT_EQ(wrong(all), 0);
    }
}

TEST_F(Torch, AKeptOutputOutlivesEveryOtherReplay) {
    SharedVmmAllocator arena;
    const Model model;
    auto all = shapes(arena, model, {256, 512, 1024, 128});
    for (auto& shape : all) {
        shape.graph.replay(raw());
    }
    for (int turn = 0; turn < 20; ++turn) {
        all[1 + turn % 3].graph.replay(raw());
    }
    cudaDeviceSynchronize();
    for (const auto& shape : all) {
        EXPECT_TRUE(same(shape));
    }
}

TEST_F(Torch, WithTheSharePolicyOutputsAreOverwrittenByOthers) {
    SharedVmmAllocator arena;
    const Model model;
    // Equal sizes, so both use the same pages in the same way.
    auto all = shapes(arena, model, {512, 512}, {Route::blocks, Retain::shared_pages});
    EXPECT_EQ(wrong(all), 0) << "right behind its own replay an output is whole";
    all[0].graph.replay(raw());
    all[1].graph.replay(raw());
    cudaDeviceSynchronize();
    EXPECT_FALSE(same(all[0])) << "the shapes share no page: the test shows nothing";
    EXPECT_EQ(arena.stats().retained_bytes, 0u);
}

TEST_F(Torch, MemPoolRouteReplaysAsEagerAndSharesSegments) {
    SharedVmmAllocator arena;
    const Model model;
    auto all = shapes(arena, model, {1024, 512, 256, 64, 2}, {Route::mempool});
    const auto physical = arena.mapped_size();
    std::size_t sum = 0, hungriest = 0;
    for (const auto& shape : all) {
        sum += shape.graph.report().peak_live_bytes;
        hungriest = std::max<std::size_t>(hungriest, shape.graph.report().peak_live_bytes);
    }
    std::printf(
        "RESULT mempool: physical %zu MiB, hungriest capture's segments %zu MiB, sum of segments "
        "%zu MiB\n",
        physical / MiB, hungriest / MiB, sum / MiB);
    EXPECT_LE(physical, hungriest + hungriest / 16 + 2 * MiB);
    EXPECT_EQ(wrong(all), 0);
    EXPECT_EQ(wrong(all, 1, true), 0);
    all.clear();
    c10::cuda::CUDACachingAllocator::emptyCache();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

TEST_F(Torch, RandomNumbersAreThoseOfEager) {
    SharedVmmAllocator arena;
    const auto input = at::ones({64, 1024}, half());
    const auto weights = at::arange(1, 513, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA))
                             .expand({64, 512});
    const auto body = [&] {
        const auto noise = at::dropout(input, 0.5, true) + at::rand({64, 1024}, half());
        return at::cat({noise, at::multinomial(weights, 32, true).to(at::kBFloat16)}, 1);
    };
    std::array<at::Tensor, 2> outputs;
    std::vector<CapturedGraph> graphs;
    for (auto& output : outputs) {
        graphs.push_back(capture(arena, raw(), [&] { output = body(); }));
    }
    at::manual_seed(42);
    std::vector<at::Tensor> eager;
    for (int turn = 0; turn < 6; ++turn) {
        eager.push_back(body());
    }
    cudaDeviceSynchronize();
    at::manual_seed(42);
    for (int turn = 0; turn < 6; ++turn) {
        graphs[turn % 2].replay(raw());
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::equal(outputs[turn % 2], eager[turn])) << turn;
    }
}

TEST_F(Torch, DestroyingHalfGivesTheirPagesBackAndTheOthersGoOn) {
    SharedVmmAllocator arena;
    const Model model;
    auto all = shapes(arena, model, {64, 1536, 128, 2048, 256, 1024}, {}, true);
    const auto before = arena.stats();
    std::vector<Shape> kept;
    for (std::size_t i = 0; i < all.size(); i += 2) {
        kept.push_back(std::move(all[i]));
    }
    all.clear();
    const auto after = arena.stats();
    EXPECT_LT(after.retained_bytes, before.retained_bytes);
    EXPECT_LT(after.reserved_bytes, before.reserved_bytes);
    EXPECT_EQ(after.spaces, 3u);
    EXPECT_GT(arena.trim(), 16 * MiB);
    EXPECT_EQ(wrong(kept), 0);
}

TEST_F(Torch, ATensorMayOutliveItsGraph) {
    SharedVmmAllocator arena;
    const Model model(2, 512);
    at::Tensor output, expected;
    {
        auto all = shapes(arena, model, {64});
        all[0].graph.replay(raw());
        cudaDeviceSynchronize();
        output = all[0].output;
        expected = all[0].expected;
    }
    auto others = shapes(arena, model, {64, 128});
    EXPECT_EQ(wrong(others), 0);
    EXPECT_TRUE(at::equal(output, expected));
    others.clear();
    output = at::Tensor();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

TEST_F(Torch, ATensorThatOutlivesItsGraphKeepsItsOwnPagesOnly) {
    auto device = vmmgraph::Device::open();
    device.trim();
    const auto before = device.stats().physical_bytes;
    SharedVmmAllocator arena(device);
    const auto elements = static_cast<std::int64_t>(2 * MiB);
    const auto input = at::randn({elements}, half());
    const auto body = [&](int summand) {
        auto passing = at::empty({256 * elements}, half());
        passing.fill_(summand);
        return input + passing.slice(0, 255 * elements);
    };
    const auto expected = body(3);
    cudaDeviceSynchronize();
    at::Tensor output;
    {
        auto graph = capture(arena, raw(), [&] { output = body(3); });
        EXPECT_GT(arena.mapped_size(), 1024 * MiB);
        graph.replay(raw());
    }
    // The graph was destroyed during its replay without a wait. `trim` waits.
    arena.trim();
    EXPECT_EQ(arena.stats().spaces, 0u);
    EXPECT_EQ(arena.stats().blocks, 1u);
    EXPECT_LE(arena.mapped_size(), 8 * MiB);
    EXPECT_LE(device.stats().physical_bytes, before + 8 * MiB);
    EXPECT_TRUE(at::equal(output, expected));
    {
        at::Tensor another;
        auto graph = capture(arena, raw(), [&] { another = body(9); });
        graph.replay(raw());
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::equal(another, body(9)));
    }
    EXPECT_TRUE(at::equal(output, expected));
    output = at::Tensor();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
    EXPECT_EQ(arena.reserved_size(), 0u);
    EXPECT_LE(device.stats().physical_bytes, before);
    EXPECT_EQ(device.stats().pending, 0u);
}

TEST_F(Torch, KeptOutputsOfManyGraphsShareTheirPages) {
    using vmmgraph::torch::KeptScope;
    constexpr int count = 40;
    SharedVmmAllocator arena;
    const auto input = at::randn({1 << 20}, half());
    std::vector<CapturedGraph> graphs;
    std::vector<at::Tensor> outputs, expected;
    for (int i = 0; i < count; ++i) {
        expected.push_back((input * (i + 2)).slice(0, 0, 1024).clone());
    }
    cudaDeviceSynchronize();
    for (int i = 0; i < count; ++i) {
        graphs.push_back(capture(arena, raw(), [&] {
            const auto passing = input * (i + 2);
            const KeptScope kept;
            {
                const KeptScope nested;
            }
            outputs.push_back(passing.slice(0, 0, 1024).clone());
        }));
        EXPECT_EQ(graphs.back().report().retained_blocks, 1u);
        EXPECT_EQ(graphs.back().report().retained_bytes, 0u);
    }
    const auto stats = arena.stats();
    std::printf("RESULT kept: %d outputs of 2 KiB on %zu KiB of kept pages, %zu MiB in all\n",
                count, std::size_t{stats.kept_bytes} >> 10,
                std::size_t{stats.physical_bytes} / MiB);
    EXPECT_GT(stats.kept_bytes, 0u);
    EXPECT_LE(stats.kept_bytes, 2 * MiB);
    EXPECT_EQ(stats.retained_bytes, 0u);
    const auto right = [&] {
        cudaDeviceSynchronize();
        int right = 0;
        for (int i = 0; i < count; ++i) {
            right += at::equal(outputs[i], expected[i]);
        }
        return right;
    };
    for (auto& graph : graphs) {
        graph.replay(raw());
    }
    EXPECT_EQ(right(), count);
    for (int i = 0; i < count; i += 3) {
        outputs[i].zero_();
    }
    cudaDeviceSynchronize();
    for (int i = 0; i < count; i += 3) {
        graphs[i].replay(raw());
    }
    EXPECT_EQ(right(), count);
    graphs.clear();
    arena.trim();
    EXPECT_LE(arena.mapped_size(), 2 * MiB);
    EXPECT_EQ(right(), count);
    outputs.clear();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

TEST_F(Torch, GraphsMayGoWhileAnotherIsCaptured) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        const CaptureOptions options{route, Retain::inherit};
        auto all = shapes(arena, model, {256, 64, 512, 128}, options);
        EXPECT_EQ(wrong(all), 0);
        // The last replays may still run on a second stream.
        const auto other = c10::cuda::getStreamFromPool();
        for (auto& shape : all) {
            shape.graph.replay(other.stream());
        }
        const auto input = at::randn({96, 512}, half());
        const auto expected = model(input);
        cudaDeviceSynchronize();
        at::Tensor output;
        auto graph = capture(
            arena, raw(),
            [&] {
                output = model(input);
                all.erase(all.begin(), all.begin() + 2);
                output = output + model(input);
            },
            options);
        for (int turn = 0; turn < 3; ++turn) {
            EXPECT_EQ(wrong(all, 1), 0);
            graph.replay(raw());
            cudaDeviceSynchronize();
            EXPECT_TRUE(at::equal(output, expected + expected)) << turn;
        }
        all.clear();
        output = at::Tensor();
        {
            const auto gone = std::move(graph);
        }
        at::cuda::clearCublasWorkspaces();
        // Frees torch's pools whose release was postponed.
        static_cast<void>(
            capture(arena, raw(), [&] { static_cast<void>(at::ones({1}, half())); }, options));
        c10::cuda::CUDACachingAllocator::emptyCache();
        arena.trim();
        EXPECT_EQ(arena.mapped_size(), 0u);
    }
}

TEST_F(Torch, AGraphThatReliesOnStaleMemoryIsFoundAndRightOnesAreNot) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        const CaptureOptions options{route, Retain::inherit};
        auto all = shapes(arena, model, {256, 64}, options);
        for (auto& shape : all) {
            const std::vector<vmmgraph::Output> outputs{
                {shape.output.data_ptr(), shape.output.nbytes()}};
            EXPECT_EQ(shape.graph.verify(raw(), outputs).found, 0u);
        }
        // Later work does not name the stream, which may be destroyed.
        cudaStream_t theirs = nullptr;
        ASSERT_EQ(cudaStreamCreateWithFlags(&theirs, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(
            all[0].graph.verify(theirs, {{all[0].output.data_ptr(), all[0].output.nbytes()}}).found,
            0u);
        ASSERT_EQ(cudaStreamDestroy(theirs), cudaSuccess);
        EXPECT_EQ(wrong(all), 0);
        const auto output = at::zeros({1024}, half());
        cudaDeviceSynchronize();
        // The output is copied from uninitialized memory.
        auto graph = capture(
            arena, raw(),
            [&] {
                static_cast<void>(output.copy_(at::empty({1 << 20}, half()).slice(0, 0, 1024) * 1));
            },
            options);
        const auto difference = graph.verify(raw(), {{output.data_ptr(), output.nbytes()}});
        EXPECT_EQ(difference.found, 1u);
        EXPECT_EQ(difference.space, graph.space().stats().id);
        EXPECT_EQ(wrong(all), 0);
    }
}

}  // namespace
}  // namespace torch_tests
