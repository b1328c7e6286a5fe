// Real captures through libtorch: both routes, outputs, random numbers, streams, failures and destruction. Needs a GPU.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <vmmgraph/torch.hpp>

namespace at::cuda {
TORCH_CUDA_CPP_API void clearCublasWorkspaces();
}  // namespace at::cuda

namespace {

using vmmgraph::Retain;
using vmmgraph::SharedVmmAllocator;
using vmmgraph::torch::capture;
using vmmgraph::torch::CapturedGraph;
using vmmgraph::torch::CaptureOptions;
using vmmgraph::torch::Route;

constexpr std::size_t MiB = std::size_t{1} << 20;

at::TensorOptions half() { return at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA); }

// A stack of gated layers, wide enough for split-K kernels.
struct Model {
    std::vector<std::array<at::Tensor, 3>> layers;

    explicit Model(int depth = 4, std::int64_t width = 2048) {
        for (int i = 0; i < depth; ++i) {
            const auto make = [&](std::int64_t rows, std::int64_t columns) {
                return at::randn({rows, columns}, half()) * (1.0 / 64);
            };
            layers.push_back({make(width, 3 * width), make(width, 3 * width), make(3 * width, width)});
        }
    }

    at::Tensor operator()(at::Tensor x) const {
        for (const auto& [gate, up, down] : layers) {
            x = x + at::mm(at::silu(at::mm(x, gate)) * at::mm(x, up), down);
            x = x / x.to(at::kFloat).pow(2).mean(-1, true).sqrt().to(at::kBFloat16);
        }
        return x;
    }
};

struct Shape {
    at::Tensor input;
    at::Tensor expected;
    at::Tensor output;
    CapturedGraph graph;
};

class Torch : public testing::Test {
protected:
    static void SetUpTestSuite() { at::manual_seed(1); }

    void SetUp() override {
        ASSERT_STREQ(vmmgraph::torch::built_for(), "2.11.0");
        vmmgraph::torch::install();
        stream_ = c10::cuda::getStreamFromPool(true);
    }
    void TearDown() override {
        cudaDeviceSynchronize();
        vmmgraph::torch::uninstall();
        ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    }

    // Captures y = model(x) for each batch; outputs are the tensors of the captures themselves.
    std::vector<Shape> shapes(SharedVmmAllocator& arena, const Model& model, const std::vector<int>& batches,
                              const CaptureOptions& options = {}, bool warm = false) {
        std::vector<Shape> shapes;
        for (const int batch : batches) {
            auto input = at::randn({batch, model.layers[0][0].size(0)}, half());
            at::Tensor expected;
            // The input comes from another stream.
            cudaDeviceSynchronize();
            {
                const c10::cuda::CUDAStreamGuard guard(warm ? *stream_ : c10::cuda::getStreamFromPool());
                expected = model(input);
                cudaDeviceSynchronize();
            }
            at::Tensor output;
            auto graph = capture(arena, raw(), [&] { output = model(input); }, options);
            shapes.push_back({input, expected, output, std::move(graph)});
        }
        return shapes;
    }

    int wrong(std::vector<Shape>& shapes, int rounds = 2, bool eager_between = false) {
        std::mt19937 random(7);
        std::vector<std::size_t> order(shapes.size());
        int wrong = 0;
        for (int round = 0; round < rounds; ++round) {
            for (std::size_t i = 0; i < order.size(); ++i) {
                order[i] = i;
            }
            std::shuffle(order.begin(), order.end(), random);
            for (const auto i : order) {
                shapes[i].graph.replay(raw());
                if (eager_between) {
                    const c10::cuda::CUDAStreamGuard guard(*stream_);
                    const auto a = at::randn({777, 4096}, half());
                    static_cast<void>(at::mm(a, a.t()).sum());
                }
                cudaDeviceSynchronize();
                wrong += !same(shapes[i]);
            }
        }
        return wrong;
    }

    static bool same(const Shape& shape) { return at::equal(shape.output, shape.expected); }

    void* raw() const { return stream_->stream(); }

    std::optional<c10::cuda::CUDAStream> stream_;
};

TEST_F(Torch, BlocksRouteReplaysAsEagerWithoutWarmUp) {
    SharedVmmAllocator arena;
    const Model model;
    auto all = shapes(arena, model, {1, 7, 64, 256, 1024, 33, 512});
    EXPECT_EQ(wrong(all), 0);
    EXPECT_EQ(wrong(all, 1, true), 0) << "with eager products on the capture stream between replays";
}

TEST_F(Torch, BlocksRouteHoldsNearTheHungriestShape) {
    // Pages of one size, so that rounding is out of the way: what is left is the stitching itself.
    vmmgraph::Options options;
    options.large_page_bytes = 2 * MiB;
    SharedVmmAllocator arena(0, options);
    const Model model;
    auto all = shapes(arena, model, {2048, 1024, 512, 256, 128}, {Route::blocks, Retain::inherit}, true);
    std::size_t peak = 0, sum = 0;
    for (const auto& shape : all) {
        peak = std::max<std::size_t>(peak, shape.graph.report().peak_live_bytes);
        sum += shape.graph.report().peak_live_bytes;
    }
    const auto stats = arena.stats();
    std::printf("RESULT blocks: physical %zu MiB (retained %zu), peak live %zu MiB, sum %zu MiB\n", stats.physical_bytes / MiB,
                stats.retained_bytes / MiB, peak / MiB, sum / MiB);
    EXPECT_LE(stats.physical_bytes - stats.retained_bytes, peak + 4 * MiB);
    EXPECT_EQ(wrong(all), 0);
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
    // Alike, so that they use the same pages in the same way.
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
    std::size_t sum = 0;
    for (const auto& shape : all) {
        sum += shape.graph.report().peak_live_bytes;
    }
    std::printf("RESULT mempool: physical %zu MiB, sum of segments %zu MiB\n", physical / MiB, sum / MiB);
    EXPECT_LT(physical, sum / 2);
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
    const auto body = [&] { return at::dropout(input, 0.5, true) + at::rand({64, 1024}, half()); };
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

TEST_F(Torch, ForkedStreamsShareNothing) {
    SharedVmmAllocator arena;
    std::mt19937 random(3);
    const auto side = c10::cuda::getStreamFromPool();
    const auto side2 = c10::cuda::getStreamFromPool();
    const auto run = [&](const at::Tensor& x, c10::cuda::CUDAStream main) {
        cudaEvent_t forked = nullptr, joined = nullptr, joined2 = nullptr;
        for (auto* event : {&forked, &joined, &joined2}) {
            cudaEventCreateWithFlags(event, cudaEventDisableTiming);
        }
        auto a = x * 2;
        cudaEventRecord(forked, main.stream());
        cudaStreamWaitEvent(side.stream(), forked, 0);
        cudaStreamWaitEvent(side2.stream(), forked, 0);
        at::Tensor b, c;
        {
            const c10::cuda::CUDAStreamGuard guard(side);
            a.record_stream(side);
            b = (a + 1) * (a + 2);
        }
        {
            const c10::cuda::CUDAStreamGuard guard(side2);
            a.record_stream(side2);
            c = (a - 1) * (a - 2);
        }
        auto d = (x + 3) * (x + 4);
        a = at::Tensor();
        d = d * 2 + (x - 5);
        cudaEventRecord(joined, side.stream());
        cudaEventRecord(joined2, side2.stream());
        cudaStreamWaitEvent(main.stream(), joined, 0);
        cudaStreamWaitEvent(main.stream(), joined2, 0);
        b.record_stream(main);
        c.record_stream(main);
        auto result = b + c + d;
        for (auto* event : {forked, joined, joined2}) {
            cudaEventDestroy(event);
        }
        return result;
    };
    int wrong = 0;
    std::vector<std::pair<CapturedGraph, std::array<at::Tensor, 3>>> graphs;
    for (int n = 0; n < 200; ++n) {
        const auto x = at::randn({1 + static_cast<int>(random() % 4096), 1 + static_cast<int>(random() % 512)},
                                 at::TensorOptions().device(at::kCUDA));
        cudaDeviceSynchronize();
        at::Tensor expected, output;
        {
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            expected = run(x, *stream_);
        }
        cudaDeviceSynchronize();
        auto graph = capture(arena, raw(), [&] { output = run(x, *stream_); });
        graphs.emplace_back(std::move(graph), std::array{x, expected, output});
        auto& some = graphs[random() % graphs.size()];
        some.first.replay(raw());
        cudaDeviceSynchronize();
        wrong += !at::equal(some.second[1], some.second[2]);
    }
    for (auto& [graph, tensors] : graphs) {
        graph.replay(raw());
        cudaDeviceSynchronize();
        wrong += !at::equal(tensors[1], tensors[2]);
    }
    EXPECT_EQ(wrong, 0);
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
    // What cuBLAS keeps was allocated in the first capture without a warm-up, and keeps that space alive.
    EXPECT_GT(arena.mapped_size(), 0u);
    at::cuda::clearCublasWorkspaces();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

TEST_F(Torch, AnExceptionInTheBodyLeavesEverythingUsable) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        const CaptureOptions options{route, Retain::inherit};
        const auto x = at::randn({64, 512}, half());
        for (int turn = 0; turn < 3; ++turn) {
            EXPECT_THROW(static_cast<void>(capture(
                             arena, raw(),
                             [&] {
                                 static_cast<void>(model(x));
                                 static_cast<void>(at::rand({4}, half()));
                                 throw std::runtime_error("planted");
                             },
                             options)),
                         std::runtime_error);
        }
        static_cast<void>(at::rand({4}, half()));
        auto all = shapes(arena, model, {64, 32}, options);
        EXPECT_EQ(wrong(all), 0);
        all.clear();
        at::cuda::clearCublasWorkspaces();
        c10::cuda::CUDACachingAllocator::emptyCache();
        arena.trim();
        EXPECT_EQ(arena.mapped_size(), 0u) << "a failed capture kept memory";
    }
}

TEST_F(Torch, OutOfMemoryInACaptureIsTorchsOwnErrorAndTheNextCaptureWorks) {
    auto device = vmmgraph::Device::open();
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena(device);
        device.set_budget(device.stats().physical_bytes + 64 * MiB);
        const CaptureOptions options{route, Retain::inherit};
        for (int turn = 0; turn < 2; ++turn) {
            EXPECT_THROW(static_cast<void>(capture(
                             arena, raw(), [&] { static_cast<void>(at::empty({256 << 20}, half())); }, options)),
                         c10::OutOfMemoryError);
        }
        const Model model(1, 512);
        auto all = shapes(arena, model, {64}, options);
        EXPECT_EQ(wrong(all), 0);
        device.set_budget(0);
    }
}

TEST_F(Torch, InstallingIsForwardingOutsideCaptures) {
    const auto* const ours = c10::cuda::CUDACachingAllocator::get();
    EXPECT_TRUE(vmmgraph::torch::installed());
    EXPECT_EQ(c10::cuda::CUDACachingAllocator::get()->name(), "native");
    auto tensor = at::empty({MiB}, half());
    void* const raw_memory = c10::cuda::CUDACachingAllocator::raw_alloc(4096);
    vmmgraph::torch::uninstall();
    EXPECT_FALSE(vmmgraph::torch::installed());
    EXPECT_NE(c10::cuda::CUDACachingAllocator::get(), ours);
    tensor = at::Tensor();
    c10::cuda::CUDACachingAllocator::raw_delete(raw_memory);
    EXPECT_THROW(vmmgraph::torch::CaptureScope(*std::make_unique<SharedVmmAllocator>(), raw()), vmmgraph::Error);
    vmmgraph::torch::install();
    EXPECT_EQ(c10::cuda::CUDACachingAllocator::get(), ours);
    auto pool_stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    EXPECT_GT(pool_stats.allocated_bytes[0].peak, 0);
}

TEST_F(Torch, ACaptureScopeThatIsNeverEndedIsAbandoned) {
    SharedVmmAllocator arena;
    {
        vmmgraph::torch::CaptureScope scope(arena, raw());
        static_cast<void>(at::ones({1024}, half()) * 2);
    }
    EXPECT_THROW(vmmgraph::torch::CaptureScope(arena, nullptr), vmmgraph::Error);
    const Model model(1, 512);
    auto all = shapes(arena, model, {8});
    EXPECT_EQ(wrong(all), 0);
}

TEST_F(Torch, ABrokenCaptureLeavesEverythingUsable) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        const CaptureOptions options{route, Retain::inherit};
        for (int turn = 0; turn < 3; ++turn) {
            EXPECT_THROW(static_cast<void>(capture(
                             arena, raw(),
                             [&] {
                                 static_cast<void>(at::rand({4}, half()));
                                 // Not permitted under capture, and breaks it.
                                 EXPECT_NE(cudaStreamSynchronize(stream_->stream()), cudaSuccess);
                                 static_cast<void>(cudaGetLastError());
                             },
                             options)),
                         c10::Error);
        }
        // The generator is out of the capture too.
        at::manual_seed(9);
        const auto first = at::rand({64}, half());
        at::manual_seed(9);
        EXPECT_TRUE(at::equal(first, at::rand({64}, half())));
        const auto pinned = at::empty({1024}, at::TensorOptions().pinned_memory(true));
        EXPECT_NE(pinned.data_ptr(), nullptr);
        auto all = shapes(arena, model, {64, 32}, options);
        EXPECT_EQ(wrong(all), 0);
        all.clear();
        at::cuda::clearCublasWorkspaces();
        c10::cuda::CUDACachingAllocator::emptyCache();
        arena.trim();
        EXPECT_EQ(arena.mapped_size(), 0u) << "a broken capture kept memory";
    }
}

TEST_F(Torch, SomebodyElsesCaptureIsRefusedAndGoesOn) {
    SharedVmmAllocator arena;
    ASSERT_EQ(cudaStreamBeginCapture(stream_->stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (const auto route : {Route::blocks, Route::mempool}) {
        try {
            vmmgraph::torch::CaptureScope scope(arena, raw(), {route, Retain::inherit});
            ADD_FAILURE() << "captured twice";
        } catch (const vmmgraph::Error& error) {
            EXPECT_EQ(error.status(), VMMGRAPH_ERROR_STREAM_CAPTURING);
        }
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    ASSERT_EQ(cudaStreamIsCapturing(stream_->stream(), &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream_->stream(), &graph), cudaSuccess);
    cudaGraphDestroy(graph);
}

TEST_F(Torch, WithoutCachingBothRoutesAreRefused) {
    auto* const allocator = c10::cuda::CUDACachingAllocator::get();
    SharedVmmAllocator arena;
    allocator->enable(false);
    EXPECT_THROW(vmmgraph::torch::CaptureScope(arena, raw(), {Route::mempool, Retain::inherit}), vmmgraph::Error);
    vmmgraph::torch::uninstall();
    EXPECT_THROW(vmmgraph::torch::install(), vmmgraph::Error);
    allocator->enable(true);
    vmmgraph::torch::install();
}

TEST_F(Torch, ExpandableSegmentsMakeNoDifference) {
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        auto all = shapes(arena, model, {256, 64}, {route, Retain::inherit});
        EXPECT_EQ(wrong(all), 0);
        EXPECT_GT(all[0].graph.report().peak_live_bytes, 0u);
    }
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
}

TEST_F(Torch, QuestionsAboutACapturesPoolAreAnswered) {
    SharedVmmAllocator arena;
    auto* const allocator = c10::cuda::CUDACachingAllocator::get();
    const auto last = at::cuda::graph_pool_handle();
    // Torch numbers them.
    const c10::MempoolId_t pool{last.first, last.second + 1};
    std::optional<CapturedGraph> graph;
    at::Tensor output;
    {
        vmmgraph::torch::CaptureScope scope(arena, raw());
        output = at::ones({1024}, half());
        EXPECT_EQ(allocator->getPoolUseCount(0, pool), 1);
        EXPECT_TRUE(allocator->checkPoolLiveAllocations(0, pool, {output.data_ptr()}));
        EXPECT_FALSE(allocator->checkPoolLiveAllocations(0, pool, {}));
        EXPECT_THROW(allocator->getCheckpointState(0, pool), c10::Error);
        EXPECT_THROW(allocator->beginAllocateToPool(0, pool, [](cudaStream_t) { return false; }), c10::Error);
        EXPECT_THROW(allocator->setUseOnOOM(0, pool, true), c10::Error);
        EXPECT_THROW(allocator->shareIpcHandle(output.data_ptr()), c10::Error);
        std::size_t bytes = 0;
        EXPECT_EQ(allocator->getBaseAllocation(output.data_ptr(), &bytes), output.data_ptr());
        EXPECT_GE(bytes, 2048u);
        graph.emplace(scope.end());
    }
    EXPECT_EQ(allocator->getPoolUseCount(0, pool), 1);
    graph.reset();
    EXPECT_THROW(static_cast<void>(allocator->checkPoolLiveAllocations(0, pool, {})), c10::Error) << "the pool is gone";
}

// What an engine does that keeps its own pools and graphs.
struct OwnCapture {
    at::Tensor input;
    at::Tensor expected;
    at::Tensor output;
    std::unique_ptr<at::cuda::MemPool> pool;
    std::unique_ptr<at::cuda::CUDAGraph> graph;

    OwnCapture(const std::shared_ptr<vmmgraph::torch::TorchAllocator>& allocator, c10::cuda::CUDAStream stream, const Model& model,
               int batch)
        : input(at::randn({batch, model.layers[0][0].size(0)}, half())), expected(model(input)) {
        cudaDeviceSynchronize();
        at::cuda::clearCublasWorkspaces();
        const c10::cuda::CUDAStreamGuard guard(stream);
        pool = std::make_unique<at::cuda::MemPool>(allocator);
        graph = std::make_unique<at::cuda::CUDAGraph>();
        graph->capture_begin(pool->id(), cudaStreamCaptureModeThreadLocal);
        try {
            output = model(input);
        } catch (...) {
            graph->capture_end();
            at::cuda::clearCublasWorkspaces();
            throw;
        }
        graph->capture_end();
        at::cuda::clearCublasWorkspaces();
    }
};

TEST_F(Torch, OneAllocatorServesAllCapturesOfASerialEngine) {
    vmmgraph::Options options;
    options.retain = Retain::shared_pages;
    auto arena = std::make_shared<SharedVmmAllocator>(0, options);
    auto allocator = vmmgraph::torch::make_allocator(arena);
    const Model model;
    std::vector<OwnCapture> all;
    std::size_t sum = 0;
    for (const int batch : {1024, 512, 256, 64, 2}) {
        arena->switch_to_new_virtual_space();
        all.emplace_back(allocator, *stream_, model, batch);
        EXPECT_GT(arena->current_offset(), 0u);
        sum += arena->current_offset();
    }
    std::printf("RESULT serial: physical %zu MiB, sum of segments %zu MiB\n", arena->mapped_size() / MiB, sum / MiB);
    EXPECT_LT(arena->mapped_size(), sum / 2);
    std::mt19937 random(5);
    for (int turn = 0; turn < 20; ++turn) {
        auto& one = all[random() % all.size()];
        const c10::cuda::CUDAStreamGuard guard(*stream_);
        one.graph->replay();
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::equal(one.output, one.expected)) << turn;
    }
    const std::weak_ptr<SharedVmmAllocator> watched = arena;
    arena.reset();
    allocator.reset();
    EXPECT_FALSE(watched.expired()) << "pools hold the allocator, and that the arena";
    all.clear();
    c10::cuda::CUDACachingAllocator::emptyCache();
    EXPECT_TRUE(watched.expired());
    EXPECT_THROW(static_cast<void>(vmmgraph::torch::make_allocator(std::shared_ptr<SharedVmmAllocator>())), vmmgraph::Error);
}

TEST_F(Torch, AnAllocatorForASpaceServesAnEnginesOwnPool) {
    auto device = vmmgraph::Device::open();
    SharedVmmAllocator arena(device);
    const Model model(2, 512);
    std::vector<OwnCapture> all;
    std::vector<vmmgraph::Space> spaces;
    for (const int batch : {256, 64}) {
        spaces.push_back(arena.open_space());
        all.emplace_back(vmmgraph::torch::make_allocator(spaces.back()), *stream_, model, batch);
        EXPECT_GT(spaces.back().seal(Retain::shared_pages).peak_live_bytes, 0u);
    }
    for (int turn = 0; turn < 6; ++turn) {
        auto& one = all[turn % 2];
        spaces[turn % 2].replay(raw(), [&] {
            const c10::cuda::CUDAStreamGuard guard(*stream_);
            one.graph->replay();
        });
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::equal(one.output, one.expected)) << turn;
    }
    {
        const auto last = arena.open_space();
        device.set_budget(device.stats().physical_bytes);
        EXPECT_THROW(OwnCapture(vmmgraph::torch::make_allocator(last), *stream_, Model(1, 4096), 2048), c10::OutOfMemoryError);
        device.set_budget(0);
    }
    all.clear();
    spaces.clear();
    c10::cuda::CUDACachingAllocator::emptyCache();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

}  // namespace
