// Tensors in regions, on a GPU.
#include "regions.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

namespace torch_tests {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using namespace std::chrono_literals;

// Keeps a stream busy for milliseconds.
void keep_busy() {
    static const auto a = at::randn({4096, 4096}, half());
    for (int i = 0; i < 30; ++i) {
        static_cast<void>(at::mm(a, a));
    }
}

TEST_F(Regions, StoragesOfEverySizeAreBlocks) {
    Region region(*device_, "weights", {Policy::backup});
    const auto before = torchs_bytes();
    std::vector<at::Tensor> tensors;
    {
        const RegionScope scope(region);
        EXPECT_TRUE(RegionScope::active());
        for (const std::int64_t size :
             {1, 511, 512, 513, 100'000, 1 << 20, (2 << 20) + 1, 20 << 20, 300 << 20}) {
            tensors.push_back(
                at::empty({size}, bytes()).fill_(static_cast<std::int64_t>(tensors.size()) + 1));
        }
        EXPECT_EQ(at::empty({0}, bytes()).numel(), 0);
        EXPECT_EQ(region.stats().blocks, tensors.size());
        const auto view = tensors.back().narrow(0, 5, 1000).view({10, 100}).t();
        EXPECT_EQ(view.sum().item<std::int64_t>(), 9000);
    }
    EXPECT_FALSE(RegionScope::active());
    EXPECT_EQ(region.stats().blocks, tensors.size());
    EXPECT_EQ(torchs_bytes(), before);
    EXPECT_EQ(vmmgraph::pause(*device_, {"weights"}).copied_bytes > std::uint64_t{300 << 20}, true);
    vmmgraph::resume(*device_, {"weights"});
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(at::all(tensors[i] == static_cast<std::int64_t>(i) + 1).item<bool>()) << i;
    }
    tensors.clear();
    EXPECT_EQ(region.stats().blocks, 0U);
    cudaDeviceSynchronize();
    // A pause reclaims freed memory.
    region.pause();
    EXPECT_EQ(region.stats().pages, 0U);
}

TEST_F(Regions, AStorageMovesWhereItIsResized) {
    Region region(*device_, "weights");
    at::Tensor tensor;
    {
        const RegionScope scope(region);
        tensor = at::arange(1000, whole());
        tensor.resize_({4 << 20});
        EXPECT_EQ(region.stats().blocks, 1U);
        EXPECT_EQ(region.stats().live_bytes, std::uint64_t{16 << 20});
    }
    EXPECT_TRUE(at::equal(tensor.narrow(0, 0, 1000), at::arange(1000, whole())));
    const auto before = torchs_bytes();
    tensor.resize_({8 << 20});
    EXPECT_EQ(region.stats().blocks, 0U);
    EXPECT_GE(torchs_bytes() - before, 32 << 20);
    EXPECT_TRUE(at::equal(tensor.narrow(0, 0, 1000), at::arange(1000, whole())));
}

TEST_F(Regions, TheAllocatorsOtherCallsKnowThem) {
    Region region(*device_, "weights");
    at::Tensor tensor;
    void* raw_block = nullptr;
    {
        const RegionScope scope(region);
        tensor = at::zeros({1000}, bytes());
        raw_block = caching::raw_alloc(5000);
        auto* const again = caching::get()->raw_allocate(3000);
        EXPECT_EQ(region.stats().blocks, 3U);
        caching::get()->raw_deallocate(again);
        EXPECT_EQ(region.stats().blocks, 2U);
    }
    std::size_t size = 0;
    EXPECT_EQ(caching::getBaseAllocation(tensor.data_ptr(), &size), tensor.data_ptr());
    EXPECT_EQ(size, 1000U);
    EXPECT_THROW(static_cast<void>(caching::shareIpcHandle(tensor.data_ptr())), c10::Error);
    EXPECT_NO_THROW(caching::emptyCache());
    for (const auto& segment : caching::snapshot().segments) {
        const auto base = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
        EXPECT_FALSE(base >= segment.address && base < segment.address + segment.total_size);
    }
    caching::raw_delete(raw_block);
    EXPECT_EQ(region.stats().blocks, 1U);
}

TEST_F(Regions, BytesStayUntilTheStreamsThatReadThemHavePassed) {
    Region region(*device_, "passing");
    constexpr std::int64_t count = 4 << 20;
    keep_busy();
    for (int round = 0; round < 20; ++round) {
        const auto side = c10::cuda::getStreamFromPool();
        at::Tensor read;
        const RegionScope scope(region);
        auto source = at::full({count}, round, whole());
        cudaDeviceSynchronize();
        {
            const c10::cuda::CUDAStreamGuard guard(side);
            const DisableScope torchs_own;
            keep_busy();
            read = source.clone();
        }
        source.record_stream(side);
        source.reset();
        // On a stream without dependencies.
        const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(true));
        const auto other = at::full({count}, -1, whole());
        cudaDeviceSynchronize();
        EXPECT_TRUE(at::all(read == round).item<bool>()) << round;
        EXPECT_TRUE(at::all(other == -1).item<bool>()) << round;
    }
}

TEST_F(Regions, ATensorKeepsItsRegionAndIsFreedByAnyThreadAtAnyTime) {
    cudaDeviceSynchronize();
    device_->trim();
    const auto before = device_->stats().physical_bytes;
    at::Tensor kept, other;
    {
        const Region region(*device_, "orphan", {Policy::backup});
        const RegionScope scope(region);
        kept = at::arange(5 << 20, whole());
        other = at::ones({100}, whole());
    }
    EXPECT_EQ(vmmgraph::pause(*device_, {"orphan"}).regions, 1U);
    EXPECT_EQ(device_->stats().physical_bytes, before);
    std::thread([&] { other.reset(); }).join();
    EXPECT_EQ(vmmgraph::resume(*device_, {"orphan"}, 1s).regions, 1U);
    EXPECT_TRUE(at::equal(kept, at::arange(5 << 20, whole())));
    EXPECT_EQ(vmmgraph::pause(*device_, {"orphan"}).regions, 1U);
    // Dropping the last tensor destroys the paused region.
    std::thread([&] { kept.reset(); }).join();
    EXPECT_EQ(vmmgraph::resume(*device_, {"orphan"}).regions, 0U);
    cudaDeviceSynchronize();
    device_->trim();
    EXPECT_EQ(device_->stats().physical_bytes, before);
}

TEST_F(Regions, WhatIsFreedWhilePausedDoesNotComeBack) {
    Region region(*device_, "weights", {Policy::backup});
    at::Tensor stays, goes;
    {
        const RegionScope scope(region);
        goes = at::zeros({64 << 20}, bytes());
        stays = at::arange(5 << 20, whole());
    }
    const auto gone = region.pause();
    goes.reset();
    EXPECT_EQ(region.stats().blocks, 1U);
    const auto back = region.resume(1s);
    EXPECT_LT(back.copied_bytes, gone.copied_bytes - (60 << 20));
    EXPECT_TRUE(at::equal(stays, at::arange(5 << 20, whole())));
}

TEST_F(Regions, ScopesNestAndAreOfTheirThread) {
    Region outer(*device_, "outer", {Policy::backup});
    Region inner(*device_, "inner");
    const auto make = [] { return at::ones({1000}, whole()); };
    std::vector<at::Tensor> tensors;
    const RegionScope scope(outer);
    tensors.push_back(make());
    {
        const RegionScope nested(inner, Policy::zero);
        tensors.push_back(make());
        const auto before = torchs_bytes();
        {
            const DisableScope disabled;
            EXPECT_FALSE(RegionScope::active());
            tensors.push_back(make());
            EXPECT_GT(torchs_bytes(), before);
            const RegionScope again(outer, Policy::keep);
            tensors.push_back(make());
        }
        EXPECT_TRUE(RegionScope::active());
        std::thread([&] { tensors.push_back(make()); }).join();
        tensors.push_back(make());
    }
    tensors.push_back(make());
    EXPECT_EQ(outer.stats().blocks, 3U);
    EXPECT_EQ(inner.stats().blocks, 2U);
    cudaDeviceSynchronize();
    const auto gone = vmmgraph::pause(*device_, {"outer", "inner"});
    EXPECT_GT(gone.kept_bytes, 0U);
    vmmgraph::resume(*device_, {"outer", "inner"});
    const DisableScope disabled;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const bool zeroed = i == 1 || i == 5;
        EXPECT_TRUE(at::all(tensors[i] == (zeroed ? 0 : 1)).item<bool>()) << i;
    }
}

TEST_F(Regions, AllocatingWhilePausedAndWithoutMemoryAreErrorsOfTheirKinds) {
    vmmgraph::RegionOptions options;
    options.budget_bytes = 64 << 20;
    Region region(*device_, "small", options);
    const RegionScope scope(region);
    auto tensor = at::empty({40 << 20}, bytes());
    EXPECT_THROW(static_cast<void>(at::empty({40 << 20}, bytes())), c10::OutOfMemoryError);
    region.pause();
    try {
        static_cast<void>(at::empty({10}, bytes()));
        ADD_FAILURE() << "a paused region gave memory";
    } catch (const vmmgraph::Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_WRONG_STATE);
        EXPECT_NE(std::string(error.what()).find("paused"), std::string::npos) << error.what();
    }
    region.resume();
    tensor.reset();
    EXPECT_NO_THROW(static_cast<void>(at::empty({60 << 20}, bytes())));
}

TEST_F(Regions, TakeWhatTorchOnlyKeepsForLater) {
    Region region(*device_, "large");
    caching::emptyCache();
    std::size_t free = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    const auto most = static_cast<std::int64_t>(free / 10 * 6);
    static_cast<void>(at::empty({most}, bytes()));
    {
        const RegionScope scope(region);
        EXPECT_NO_THROW(static_cast<void>(at::empty({most}, bytes())));
    }
    EXPECT_NO_THROW(static_cast<void>(at::empty({most}, bytes())));
    caching::emptyCache();
}

}  // namespace
}  // namespace torch_tests
