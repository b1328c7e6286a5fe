// The libtorch component without a GPU: the MemPool allocator over the host driver, and refused
// calls. Torch's libraries load with stand-ins (standins.py).
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <torch/version.h>
#include <vmmgraph/torch.hpp>
#include <vmmgraph/torch_elastic.hpp>
#include <vmmgraph/torch_eager.hpp>
#include <vmmgraph/torch_region.hpp>

#include "../../cpp/torch/collectives.hpp"
#include "../../cpp/torch/release.hpp"
#include "../cpp/host.hpp"

namespace {

using host::fill;
using host::holds;
using host::MiB;
using vmmgraph::SharedVmmAllocator;
using vmmgraph::torch::make_allocator;

constexpr auto no_stream = cudaStream_t{};

// A device closes with its last arena, so the next test may choose other options. The host driver
// has eight.
int next_device() {
    static int device = 0;
    return device++ % 8;
}

bool has_gpu() { return c10::cuda::device_count() > 0; }

vmmgraph::Options shared(std::uint64_t budget = 0) {
    auto options = host::options();
    options.device_budget_bytes = budget;
    options.retain = vmmgraph::Retain::shared_pages;
    return options;
}

template <class F>
vmmgraph_status_t status_of(F&& body) {
    try {
        body();
    } catch (const vmmgraph::Error& error) {
        EXPECT_NE(std::string(error.what()), "");
        return error.status();
    }
    return VMMGRAPH_OK;
}

TEST(Allocator, GivesMemoryThatCanBeWritten) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    EXPECT_EQ(allocator->name(), "vmmgraph");
    void* const first = allocator->raw_alloc_with_stream(3 * MiB, no_stream);
    void* const second = allocator->raw_alloc_with_stream(5 * MiB, no_stream);
    ASSERT_NE(first, nullptr);
    ASSERT_NE(second, nullptr);
    fill(first, 3 * MiB, 0x11);
    fill(second, 5 * MiB, 0x22);
    EXPECT_TRUE(holds(first, 3 * MiB, 0x11));
    EXPECT_TRUE(holds(second, 5 * MiB, 0x22));
    EXPECT_EQ(space.live_blocks().size(), 2u);
    allocator->raw_delete(first);
    allocator->raw_delete(second);
    EXPECT_EQ(space.live_blocks().size(), 0u);
}

// Torch's MemPool passes no stream. Torch's current stream exists only with a GPU.
TEST(Allocator, WithoutAStreamAsksTorchForTheCurrentOne) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    if (!has_gpu()) {
        EXPECT_THROW(allocator->raw_alloc(2 * MiB), c10::Error);
        EXPECT_EQ(space.live_blocks().size(), 0u);
        return;
    }
    void* const segment = allocator->raw_alloc(2 * MiB);
    ASSERT_NE(segment, nullptr);
    fill(segment, 2 * MiB, 0x33);
    EXPECT_TRUE(holds(segment, 2 * MiB, 0x33));
    allocator->raw_delete(segment);
    EXPECT_EQ(space.live_blocks().size(), 0u);
}

TEST(Allocator, SpacesOfAnArenaShareTheirPages) {
    SharedVmmAllocator arena(next_device(), shared());
    std::vector<std::shared_ptr<vmmgraph::torch::TorchAllocator>> allocators;
    std::vector<vmmgraph::Space> spaces;
    for (int i = 0; i < 4; ++i) {
        spaces.push_back(arena.open_space());
        allocators.push_back(make_allocator(spaces.back()));
        ASSERT_NE(allocators.back()->raw_alloc_with_stream(8 * MiB, no_stream), nullptr);
        static_cast<void>(spaces.back().seal(vmmgraph::Retain::shared_pages));
    }
    EXPECT_EQ(arena.stats().physical_bytes, 8 * MiB);
}

// Torch calls raw_delete in destructors: bad input must neither throw nor abort.
TEST(Allocator, BadFreesAreHarmless) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    void* const segment = allocator->raw_alloc_with_stream(MiB, no_stream);
    ASSERT_NE(segment, nullptr);
    int foreign = 7;
    EXPECT_NO_THROW(allocator->raw_delete(&foreign));
    EXPECT_NO_THROW(allocator->raw_delete(nullptr));
    EXPECT_NO_THROW(allocator->raw_delete(static_cast<char*>(segment) + 4096));
    EXPECT_EQ(space.live_blocks().size(), 1u);
    EXPECT_NO_THROW(allocator->raw_delete(segment));
    EXPECT_NO_THROW(allocator->raw_delete(segment));
    EXPECT_EQ(space.live_blocks().size(), 0u);
    EXPECT_EQ(foreign, 7);
    EXPECT_NE(allocator->raw_alloc_with_stream(MiB, no_stream), nullptr);
}

TEST(Allocator, OutOfBudgetIsNullAndTheNextCallWorks) {
    SharedVmmAllocator arena(next_device(), shared(4 * MiB));
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    void* const kept = allocator->raw_alloc_with_stream(3 * MiB, no_stream);
    ASSERT_NE(kept, nullptr);
    EXPECT_EQ(allocator->raw_alloc_with_stream(2 * MiB, no_stream), nullptr);
    allocator->raw_delete(kept);
    void* const next = allocator->raw_alloc_with_stream(4 * MiB, no_stream);
    ASSERT_NE(next, nullptr);
    fill(next, 4 * MiB, 0x44);
    EXPECT_TRUE(holds(next, 4 * MiB, 0x44));
}

TEST(Allocator, OutOfMemoryIsNull) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    EXPECT_EQ(allocator->raw_alloc_with_stream(512 * MiB, no_stream), nullptr);
    EXPECT_NE(allocator->raw_alloc_with_stream(MiB, no_stream), nullptr);
}

TEST(Allocator, OutlivesTheSpaceAndTheArenaHandles) {
    std::optional<SharedVmmAllocator> arena(std::in_place, next_device(), shared());
    std::optional<vmmgraph::Space> space(arena->open_space());
    const auto allocator = make_allocator(*space);
    void* const segment = allocator->raw_alloc_with_stream(2 * MiB, no_stream);
    ASSERT_NE(segment, nullptr);
    fill(segment, 2 * MiB, 0x55);
    space.reset();
    arena.reset();
    EXPECT_TRUE(holds(segment, 2 * MiB, 0x55));
    EXPECT_NO_THROW(allocator->raw_delete(segment));
    EXPECT_NO_THROW(allocator->raw_delete(segment));
}

// Like a tensor that outlives its graph.
TEST(Allocator, ASegmentThatOutlivesItsSpaceKeepsItsOwnPagesOnly) {
    const int number = next_device();
    for (const auto retain : {vmmgraph::Retain::own_pages, vmmgraph::Retain::shared_pages}) {
        auto device = vmmgraph::Device::open(host::device_options(number));
        SharedVmmAllocator arena(device, host::options());
        std::optional<vmmgraph::Space> space(arena.open_space());
        auto allocator = make_allocator(*space);
        void* const passing = allocator->raw_alloc_with_stream(32 * MiB, no_stream);
        void* const segment = allocator->raw_alloc_with_stream(MiB, no_stream);
        ASSERT_NE(segment, nullptr);
        allocator->raw_delete(passing);
        static_cast<void>(space->seal(retain));
        space->replay(nullptr, [&] { fill(segment, MiB, 0x5c); });
        space.reset();
        EXPECT_EQ(arena.stats().blocks, 1u);
        EXPECT_EQ(arena.stats().spaces, 0u);
        EXPECT_GE(device.trim(), 31 * MiB);
        EXPECT_EQ(arena.mapped_size(), MiB);
        EXPECT_EQ(device.stats().physical_bytes, MiB);
        EXPECT_TRUE(holds(segment, MiB, 0x5c));
        EXPECT_EQ(
            status_of([&] { static_cast<void>(allocator->raw_alloc_with_stream(MiB, no_stream)); }),
            VMMGRAPH_ERROR_WRONG_STATE)
            << "the capture is long over";
        allocator->raw_delete(segment);
        EXPECT_EQ(arena.mapped_size(), 0u);
        allocator.reset();
        device.trim();
        EXPECT_EQ(arena.reserved_size(), 0u);
        EXPECT_EQ(device.stats().physical_bytes, 0u);
        EXPECT_EQ(device.stats().reservations, 0u);
        EXPECT_EQ(device.stats().pending, 0u);
    }
}

TEST(Allocator, OverAnArenaFollowsItsCurrentSpace) {
    const auto arena = std::make_shared<SharedVmmAllocator>(next_device(), shared());
    const auto allocator = make_allocator(arena);
    arena->switch_to_new_virtual_space();
    void* const first = allocator->raw_alloc_with_stream(4 * MiB, no_stream);
    ASSERT_NE(first, nullptr);
    arena->switch_to_new_virtual_space();
    void* const second = allocator->raw_alloc_with_stream(4 * MiB, no_stream);
    ASSERT_NE(second, nullptr);
    EXPECT_NE(first, second);
    fill(second, 4 * MiB, 0x66);
    EXPECT_TRUE(holds(first, 4 * MiB, 0x66)) << "two captures of an arena lie on the same pages";
    EXPECT_EQ(arena->stats().physical_bytes, 4 * MiB);
    allocator->raw_delete(first);
    allocator->raw_delete(second);
    EXPECT_NO_THROW(allocator->raw_delete(second));
}

TEST(Allocator, OverAnArenaKeepsItAlive) {
    auto arena = std::make_shared<SharedVmmAllocator>(next_device(), shared(4 * MiB));
    const auto allocator = make_allocator(arena);
    arena->switch_to_new_virtual_space();
    arena.reset();
    void* const segment = allocator->raw_alloc_with_stream(2 * MiB, no_stream);
    ASSERT_NE(segment, nullptr);
    fill(segment, 2 * MiB, 0x77);
    EXPECT_EQ(allocator->raw_alloc_with_stream(8 * MiB, no_stream), nullptr);
    EXPECT_NO_THROW(allocator->raw_delete(segment));
}

TEST(Allocator, FromSeveralThreads) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    std::vector<std::thread> threads;
    std::vector<int> wrong(8, 0);
    for (int id = 0; id < 8; ++id) {
        threads.emplace_back([&, id] {
            // One stream each, so threads share no page.
            const auto stream =
                reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(64 + id));
            for (int round = 0; round < 200; ++round) {
                const std::size_t bytes = (1 + (id + round) % 5) * (MiB / 4);
                void* const segment = allocator->raw_alloc_with_stream(bytes, stream);
                if (segment == nullptr) {
                    ++wrong[id];
                    continue;
                }
                fill(segment, bytes, id + 1);
                wrong[id] += !holds(segment, bytes, id + 1);
                allocator->raw_delete(segment);
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(wrong, std::vector<int>(8, 0));
    EXPECT_EQ(space.live_blocks().size(), 0u);
}

TEST(Allocator, RefusesWhatIsNoSpace) {
    SharedVmmAllocator arena(next_device(), shared());
    auto space = arena.open_space();
    const auto taken = std::move(space);
    EXPECT_NE(status_of([&] { static_cast<void>(make_allocator(space)); }), VMMGRAPH_OK);
    EXPECT_EQ(
        status_of([] { static_cast<void>(make_allocator(std::shared_ptr<SharedVmmAllocator>())); }),
        VMMGRAPH_ERROR_NULL_ARGUMENT);
}

TEST(Install, ForwardsAndGoesAgainWithoutADevice) {
    auto* const before = c10::cuda::CUDACachingAllocator::get();
    ASSERT_NE(before, nullptr);
    EXPECT_FALSE(vmmgraph::torch::installed());
    EXPECT_NO_THROW(vmmgraph::torch::uninstall());
    vmmgraph::torch::install();
    EXPECT_TRUE(vmmgraph::torch::installed());
    EXPECT_NE(c10::cuda::CUDACachingAllocator::get(), before);
    vmmgraph::torch::install();
    vmmgraph::torch::uninstall();
    EXPECT_FALSE(vmmgraph::torch::installed());
    EXPECT_EQ(c10::cuda::CUDACachingAllocator::get(), before);
}

TEST(Install, RefusesAForeignAllocatorBelowAndAbove) {
    auto* const native = c10::cuda::CUDACachingAllocator::get();
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto foreign = make_allocator(space);
    c10::cuda::CUDACachingAllocator::allocator.store(foreign.get());
    EXPECT_EQ(status_of([] { vmmgraph::torch::install(); }), VMMGRAPH_ERROR_WRONG_STATE);
    c10::cuda::CUDACachingAllocator::allocator.store(native);
    vmmgraph::torch::install();
    auto* const ours = c10::cuda::CUDACachingAllocator::get();
    c10::cuda::CUDACachingAllocator::allocator.store(foreign.get());
    EXPECT_FALSE(vmmgraph::torch::installed());
    EXPECT_EQ(status_of([] { vmmgraph::torch::uninstall(); }), VMMGRAPH_ERROR_WRONG_STATE);
    c10::cuda::CUDACachingAllocator::allocator.store(ours);
    vmmgraph::torch::uninstall();
    EXPECT_EQ(c10::cuda::CUDACachingAllocator::get(), native);
}

TEST(Capture, OverTheHostDriverIsRefusedAndLeavesTheArenaUsable) {
    SharedVmmAllocator arena(next_device(), shared());
    vmmgraph::torch::install();
    int stream = 0;
    EXPECT_EQ(status_of([&] { vmmgraph::torch::CaptureScope scope(arena, nullptr); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of([&] { const vmmgraph::torch::ExecutablePool pool(arena); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of([&] { static_cast<void>(vmmgraph::torch::ExecutablePool::of(arena)); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    try {
        vmmgraph::torch::CaptureScope scope(arena, &stream);
        ADD_FAILURE() << "was not refused";
    } catch (const vmmgraph::Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(error.what()).find("host driver"), std::string::npos) << error.what();
    }
    auto other = SharedVmmAllocator(next_device(), shared());
    const auto taken = std::move(other);
    EXPECT_EQ(status_of([&] { vmmgraph::torch::CaptureScope scope(other, &stream); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    vmmgraph::torch::uninstall();
    EXPECT_NE(make_allocator(arena.open_space())->raw_alloc_with_stream(MiB, no_stream), nullptr);
}

TEST(Capture, AGeneratorOfAnotherKindIsRefused) {
    SharedVmmAllocator arena(next_device(), shared());
    int stream = 0;
    for (const auto& generator :
         {std::shared_ptr<at::Generator>(), std::make_shared<at::Generator>(),
          std::make_shared<at::Generator>(at::detail::createCPUGenerator())}) {
        vmmgraph::torch::CaptureOptions options;
        options.generators.push_back(generator);
        try {
            vmmgraph::torch::CaptureScope scope(arena, &stream, options);
            ADD_FAILURE() << "was not refused";
        } catch (const vmmgraph::Error& error) {
            EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_ARGUMENT);
            EXPECT_NE(std::string(error.what()).find("generators on CUDA devices"),
                      std::string::npos)
                << error.what();
        }
    }
}

TEST(KeptScope, IsOfItsThreadAndNests) {
    using vmmgraph::torch::KeptScope;
    EXPECT_FALSE(KeptScope::active());
    {
        const KeptScope outer;
        EXPECT_TRUE(KeptScope::active());
        {
            const KeptScope inner;
            EXPECT_TRUE(KeptScope::active());
        }
        EXPECT_TRUE(KeptScope::active());
        bool elsewhere = true;
        std::thread([&] { elsewhere = KeptScope::active(); }).join();
        EXPECT_FALSE(elsewhere);
    }
    EXPECT_FALSE(KeptScope::active());
}

TEST(RemoteScope, IsOfItsThreadAndTheInnermostCounts) {
    using vmmgraph::torch::KeptScope;
    using vmmgraph::torch::RemoteScope;
    EXPECT_FALSE(RemoteScope::active());
    {
        const RemoteScope outer;
        EXPECT_TRUE(RemoteScope::active());
        {
            const KeptScope kept;
            EXPECT_FALSE(RemoteScope::active());
            {
                const RemoteScope inner;
                EXPECT_TRUE(RemoteScope::active());
                EXPECT_TRUE(KeptScope::active());
                const RemoteScope again;
                EXPECT_TRUE(RemoteScope::active());
            }
            EXPECT_FALSE(RemoteScope::active());
        }
        EXPECT_TRUE(RemoteScope::active());
        bool elsewhere = true;
        std::thread([&] { elsewhere = RemoteScope::active(); }).join();
        EXPECT_FALSE(elsewhere);
    }
    EXPECT_FALSE(RemoteScope::active());
}

TEST(RemoteScope, LeavesSegmentsAlone) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_bump_space();
    const auto allocator = make_allocator(space);
    const vmmgraph::torch::RemoteScope remote;
    ASSERT_NE(allocator->raw_alloc_with_stream(2 * MiB, no_stream), nullptr)
        << "a bump space has no remote blocks";
}

TEST(Collectives, AreSealedInPlaceUnlessTheirBuffersAreMarkedAndTheProgramSaysThatAllAre) {
    using vmmgraph::Retain;
    using vmmgraph::torch::with_collectives;
    for (const bool marked : {false, true}) {
        EXPECT_EQ(with_collectives(Retain::own_pages, marked), Retain::in_place);
        // These modes exchange no pages.
        EXPECT_EQ(with_collectives(Retain::shared_pages, marked), Retain::shared_pages);
        EXPECT_EQ(with_collectives(Retain::in_place, marked), Retain::in_place);
    }
    EXPECT_EQ(with_collectives(Retain::shared_remote, true), Retain::shared_remote);
    EXPECT_EQ(with_collectives(Retain::shared_remote, false), Retain::in_place);
}

TEST(KeptScope, LeavesSegmentsAlone) {
    SharedVmmAllocator arena(next_device(), shared());
    const auto space = arena.open_space();
    const auto allocator = make_allocator(space);
    const vmmgraph::torch::KeptScope kept;
    void* const segment = allocator->raw_alloc_with_stream(2 * MiB, no_stream);
    ASSERT_NE(segment, nullptr);
    EXPECT_EQ(arena.stats().kept_bytes, 0u);
    allocator->raw_delete(segment);
    EXPECT_EQ(allocator->raw_alloc_with_stream(2 * MiB, no_stream), segment)
        << "its bytes serve again";
}

TEST(RegionScope, IsRefusedWhereTorchCannotUseTheRegion) {
    using vmmgraph::torch::RegionScope;
    const auto device = vmmgraph::Device::open(host::device_options(next_device()));
    vmmgraph::Region region(device, "weights");
    vmmgraph::torch::install();
    try {
        const RegionScope scope(region);
        ADD_FAILURE() << "was not refused";
    } catch (const vmmgraph::Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(error.what()).find("host driver"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(RegionScope::active());
    const auto taken = std::move(region);
    EXPECT_EQ(status_of([&] { const RegionScope scope(region); }), VMMGRAPH_ERROR_INVALID_HANDLE);
    {
        const vmmgraph::torch::DisableScope disabled;
        EXPECT_FALSE(RegionScope::active());
    }
    EXPECT_FALSE(RegionScope::active());
    vmmgraph::torch::uninstall();
    EXPECT_EQ(taken.stats().blocks, 0u);
}

TEST(EagerScope, IsRefusedWhereTorchCannotUseTheArena) {
    using vmmgraph::torch::EagerScope;
    SharedVmmAllocator arena(next_device(), shared());
    vmmgraph::torch::install();
    try {
        const EagerScope scope(arena, nullptr);
        ADD_FAILURE() << "was not refused";
    } catch (const vmmgraph::Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(error.what()).find("host driver"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(EagerScope::active());
    const auto taken = std::move(arena);
    EXPECT_EQ(status_of([&] { const EagerScope scope(arena, nullptr); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    vmmgraph::torch::uninstall();
}

TEST(BuiltFor, NamesTheTorchOfTheHeaders) {
    EXPECT_STREQ(vmmgraph::torch::built_for(), TORCH_VERSION);
}

TEST(BuiltFor, ServesPatchReleasesWithEqualHeadersOnly) {
    using vmmgraph::torch::serves;
    EXPECT_TRUE(serves("2.11.0", "2.11.0"));
    EXPECT_TRUE(serves("2.14.1", "2.14.0"));
    EXPECT_TRUE(serves("2.14.0", "2.14.1"));
    EXPECT_FALSE(serves("2.9.0", "2.9.1"));
    EXPECT_FALSE(serves("2.14.1", "2.12.1"));
    EXPECT_FALSE(serves("2.14.1", "2.14"));
    EXPECT_FALSE(serves("2.14.1", ""));
}

TEST(KvTensors, ArePlanesThatGrowWhereTheyAreAndOwnTheirCache) {
    using vmmgraph::KvLayout;
    using vmmgraph::torch::KvPlane;
    for (const auto layout : {KvLayout::by_plane, KvLayout::by_block}) {
        const auto device = vmmgraph::Device::open(host::device_options(next_device()));
        const auto before = device.stats().physical_bytes;
        at::Tensor view;
        {
            vmmgraph::torch::KvTensorOptions options{
                {KvPlane{{4, 2, 8}, at::kFloat}, KvPlane{{4, 3}, at::kLong},
                 KvPlane{{}, at::kDouble}},
                10'000,
                layout,
                {"kv", 64 << 10, 0, 0}};
            vmmgraph::torch::KvTensors kv(device, options);
            ASSERT_EQ(kv.planes().size(), 3U);
            EXPECT_EQ(kv.planes()[0].sizes(), (at::IntArrayRef{10'000, 4, 2, 8}));
            EXPECT_EQ(kv.planes()[1].scalar_type(), at::kLong);
            EXPECT_EQ(kv.planes()[2].sizes(), (at::IntArrayRef{10'000}));
            EXPECT_TRUE(kv.planes()[0][9'999].is_contiguous());
            EXPECT_EQ(kv.planes()[0].is_contiguous(), layout == KvLayout::by_plane);
            EXPECT_EQ(device.stats().physical_bytes, before);
            auto* const at = kv.planes()[0].data_ptr();
            kv.grow_to(100);
            for (const auto& plane : kv.planes()) {
                plane.narrow(0, 0, 100).fill_(3);
            }
            EXPECT_EQ(kv.cache().grow_async(2'000).wait().revived, 0U);
            kv.before(nullptr);
            kv.record_stream(nullptr);
            for (const auto& plane : kv.planes()) {
                plane.narrow(0, 100, 1'900).fill_(4);
                EXPECT_EQ(plane.narrow(0, 0, 2'000).sum().to(at::kLong).item<std::int64_t>(),
                          (100 * 3 + 1'900 * 4) * plane[0].numel());
            }
            EXPECT_EQ(kv.planes()[0].data_ptr(), at);
            EXPECT_EQ(kv.cache().shrink_to(50, {{1'000, 1'001}}), 1U);
            EXPECT_EQ(kv.planes()[0][1'000].sum().item<float>(), 4 * 64);
            EXPECT_EQ(kv.planes()[0][49].sum().item<float>(), 3 * 64);
            EXPECT_EQ(status_of([&] { kv.grow_to(10'001); }), VMMGRAPH_ERROR_INVALID_ARGUMENT);
            kv.cache().set_budget(64 << 10);
            EXPECT_EQ(status_of([&] { kv.grow_to(10'000); }), VMMGRAPH_ERROR_OVER_BUDGET);
            auto moved = std::move(kv);
            EXPECT_EQ(moved.planes().size(), 3U);
            view = moved.planes()[1].narrow(0, 10, 20).select(1, 2);
        }
        EXPECT_GT(device.stats().physical_bytes, before);
        EXPECT_EQ(view.sum().item<std::int64_t>(), 3 * 60);
        std::thread([&] { view.reset(); }).join();
        EXPECT_EQ(device.stats().mappings, 0U);
    }
}

TEST(KvTensors, RefuseWhatIsNoPlane) {
    using vmmgraph::torch::KvPlane;
    using vmmgraph::torch::KvTensors;
    const auto device = vmmgraph::Device::open(host::device_options(next_device()));
    const auto make = [&](std::vector<KvPlane> planes, std::uint64_t blocks,
                          vmmgraph::KvLayout layout = vmmgraph::KvLayout::by_plane) {
        return status_of(
            [&] { const KvTensors kv(device, {std::move(planes), blocks, layout, {}}); });
    };
    EXPECT_EQ(make({}, 10), VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(make({KvPlane{{4}, at::kByte}}, 0), VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(make({KvPlane{{4, 0}, at::kByte}}, 10), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(make({KvPlane{{-4}, at::kByte}}, 10), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(make({KvPlane{{std::int64_t{1} << 60, std::int64_t{1} << 60}, at::kByte}}, 10),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(make({KvPlane{{1 << 30, 1 << 10}, at::kByte}}, ~std::uint64_t{0}),
              VMMGRAPH_ERROR_INVALID_SIZE);
    // Bytes misalign the floats of the same block.
    const std::vector<KvPlane> unaligned{{{3}, at::kByte}, {{4}, at::kFloat}};
    EXPECT_EQ(make(unaligned, 10, vmmgraph::KvLayout::by_block), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(make(unaligned, 10), VMMGRAPH_OK);
    EXPECT_EQ(device.stats().reserved_bytes, 0U);
}

}  // namespace
