// Engines with MemPools and graphs of their own.
#include "fixture.hpp"

namespace torch_tests {
namespace {

struct OwnCapture {
    at::Tensor input;
    at::Tensor expected;
    at::Tensor output;
    std::unique_ptr<at::cuda::MemPool> pool;
    std::unique_ptr<at::cuda::CUDAGraph> graph;

    OwnCapture(const std::shared_ptr<vmmgraph::torch::TorchAllocator>& allocator,
               c10::cuda::CUDAStream stream, const Model& model, int batch)
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
    auto arena = std::make_shared<SharedVmmAllocator>();
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
    std::printf("RESULT serial: physical %zu MiB, sum of segments %zu MiB\n",
                arena->mapped_size() / MiB, sum / MiB);
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
    EXPECT_THROW(
        static_cast<void>(vmmgraph::torch::make_allocator(std::shared_ptr<SharedVmmAllocator>())),
        vmmgraph::Error);
}

TEST_F(Torch, AnAllocatorForASpaceServesAnEnginesOwnPool) {
    auto device = vmmgraph::Device::open();
    SharedVmmAllocator arena(device);
    const Model model(2, 512);
    std::vector<OwnCapture> all;
    std::vector<vmmgraph::Space> spaces;
    for (const int batch : {256, 64}) {
        spaces.push_back(arena.open_bump_space());
        all.emplace_back(vmmgraph::torch::make_allocator(spaces.back()), *stream_, model, batch);
        EXPECT_GT(spaces.back().seal().peak_live_bytes, 0u);
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
        const auto last = arena.open_bump_space();
        device.set_budget(device.stats().physical_bytes);
        EXPECT_THROW(
            OwnCapture(vmmgraph::torch::make_allocator(last), *stream_, Model(1, 4096), 2048),
            c10::OutOfMemoryError);
        device.set_budget(0);
    }
    all.clear();
    spaces.clear();
    c10::cuda::CUDACachingAllocator::emptyCache();
    arena.trim();
    EXPECT_EQ(arena.mapped_size(), 0u);
}

}  // namespace
}  // namespace torch_tests
