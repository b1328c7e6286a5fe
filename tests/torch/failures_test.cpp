// Failed captures and refused calls leave torch and the arena usable.
#include "fixture.hpp"

namespace torch_tests {
namespace {

class Failures : public Torch {
protected:
    void expect_usable(SharedVmmAllocator& arena, const Model& model,
                       const CaptureOptions& options) {
        static_cast<void>(at::rand({4}, half()));
        auto all = shapes(arena, model, {64, 32}, options);
        EXPECT_EQ(wrong(all), 0);
        all.clear();
        at::cuda::clearCublasWorkspaces();
        c10::cuda::CUDACachingAllocator::emptyCache();
        arena.trim();
        EXPECT_EQ(arena.mapped_size(), 0u) << "a failed capture kept memory";
    }
};

TEST_F(Failures, AnExceptionInTheBodyLeavesEverythingUsable) {
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
        expect_usable(arena, model, options);
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
                             arena, raw(),
                             [&] { static_cast<void>(at::empty({256 << 20}, half())); }, options)),
                         c10::OutOfMemoryError);
        }
        const Model model(1, 512);
        auto all = shapes(arena, model, {64}, options);
        EXPECT_EQ(wrong(all), 0);
        device.set_budget(0);
    }
}

// CUDA captures a memset of unbacked addresses but refuses to instantiate the graph.
TEST_F(Failures, AGraphThatCannotBeInstantiatedLeavesEverythingUsable) {
    const auto driver = [](const char* name) {
        void* function = nullptr;
        auto found = cudaDriverEntryPointSymbolNotFound;
        EXPECT_EQ(
            cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
            cudaSuccess);
        EXPECT_EQ(found, cudaDriverEntryPointSuccess);
        return function;
    };
    const auto reserve =
        reinterpret_cast<int (*)(void**, std::size_t, std::size_t, void*, unsigned long long)>(
            driver("cuMemAddressReserve"));
    const auto release = reinterpret_cast<int (*)(void*, std::size_t)>(driver("cuMemAddressFree"));
    void* nothing = nullptr;
    ASSERT_EQ(reserve(&nothing, 2 * MiB, 0, nullptr, 0), 0);
    const Model model(2, 512);
    const auto x = at::randn({64, 512}, half());
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        CaptureOptions options{route};
        options.memset_kernels = false;
        for (const bool second_piece : {false, true}) {
            const auto body = [&] {
                vmmgraph::torch::CaptureScope scope(arena, raw(), options);
                static_cast<void>(model(x));
                if (second_piece) {
                    scope.next_piece();
                }
                ASSERT_EQ(cudaMemsetAsync(nothing, 0, 4096, static_cast<cudaStream_t>(raw())),
                          cudaSuccess);
                auto graph = scope.end();
                // Up to torch 2.7 the end of the capture instantiates and fails. Later releases
                // fail at each instantiation.
                EXPECT_THROW(static_cast<void>(graph.instantiate()), vmmgraph::Error);
                EXPECT_THROW(static_cast<void>(graph.exec()), vmmgraph::Error);
                EXPECT_FALSE(graph.is_instantiated());
                graph.replay(raw());
            };
            EXPECT_ANY_THROW(body())
                << "route " << static_cast<int>(route) << ", second piece " << second_piece;
        }
        expect_usable(arena, model, options);
    }
    EXPECT_EQ(release(nothing, 2 * MiB), 0);
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
    EXPECT_THROW(vmmgraph::torch::CaptureScope(*std::make_unique<SharedVmmAllocator>(), raw()),
                 vmmgraph::Error);
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

TEST_F(Failures, ABrokenCaptureLeavesEverythingUsable) {
    for (const auto route : {Route::blocks, Route::mempool}) {
        SharedVmmAllocator arena;
        const Model model(2, 512);
        const CaptureOptions options{route, Retain::inherit};
        for (int turn = 0; turn < 3; ++turn) {
            EXPECT_THROW(static_cast<void>(capture(
                             arena, raw(),
                             [&] {
                                 static_cast<void>(at::rand({4}, half()));
                                 // Illegal during capture; invalidates the capture.
                                 EXPECT_NE(cudaStreamSynchronize(stream_->stream()), cudaSuccess);
                                 static_cast<void>(cudaGetLastError());
                             },
                             options)),
                         c10::Error);
        }
        // The generator left the capture state.
        at::manual_seed(9);
        const auto first = at::rand({64}, half());
        at::manual_seed(9);
        EXPECT_TRUE(at::equal(first, at::rand({64}, half())));
        const auto pinned = at::empty({1024}, at::TensorOptions().pinned_memory(true));
        EXPECT_NE(pinned.data_ptr(), nullptr);
        expect_usable(arena, model, options);
    }
}

TEST_F(Torch, SomebodyElsesCaptureIsRefusedAndGoesOn) {
    SharedVmmAllocator arena;
    ASSERT_EQ(cudaStreamBeginCapture(stream_->stream(), cudaStreamCaptureModeThreadLocal),
              cudaSuccess);
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
    EXPECT_THROW(vmmgraph::torch::CaptureScope(arena, raw(), {Route::mempool, Retain::inherit}),
                 vmmgraph::Error);
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
        EXPECT_THROW(allocator->beginAllocateToPool(0, pool, [](cudaStream_t) { return false; }),
                     c10::Error);
        EXPECT_THROW(allocator->setUseOnOOM(0, pool, true), c10::Error);
        try {
            static_cast<void>(allocator->shareIpcHandle(output.data_ptr()));
            ADD_FAILURE() << "memory of a capture was shared";
        } catch (const c10::Error& error) {
            const std::string why = error.what_without_backtrace();
            EXPECT_NE(why.find("send a copy that is made outside captures"), std::string::npos)
                << why;
        }
        std::size_t bytes = 0;
        EXPECT_EQ(allocator->getBaseAllocation(output.data_ptr(), &bytes), output.data_ptr());
        EXPECT_GE(bytes, 2048u);
        graph.emplace(scope.end());
    }
    EXPECT_EQ(allocator->getPoolUseCount(0, pool), 1);
    graph.reset();
    EXPECT_EQ(allocator->getPoolUseCount(0, pool), 0);
    output = at::Tensor();
    c10::cuda::CUDACachingAllocator::emptyCache();
    EXPECT_THROW(static_cast<void>(allocator->checkPoolLiveAllocations(0, pool, {})), c10::Error)
        << "the pool is gone";
}

}  // namespace
}  // namespace torch_tests
