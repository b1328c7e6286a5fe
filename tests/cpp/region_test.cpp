// Regions through the C++ interface, on the host driver.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include <vmmgraph/region.hpp>

#include "host.hpp"

namespace {

using host::MiB;
using vmmgraph::Device;
using vmmgraph::Policy;
using vmmgraph::Region;
using namespace std::chrono_literals;

Device open_device(int number) { return Device::open(host::device_options(number)); }

TEST(Arenas, PagesAreMadeToFitWhatGraphsUse) {
    auto arena = host::arena(6);
    auto space = arena.open_space();
    void* const block = space.allocate(MiB + (64 << 10));
    space.free(block);
    space.seal();
    ASSERT_EQ(arena.stats().physical_bytes, 2 * MiB);
    try {
        EXPECT_EQ(vmmgraph::shrink_to_fit(arena), 2 * MiB - 17 * (64 << 10));
    } catch (const vmmgraph::Error& error) {
        // Platforms without replaced mappings.
        ASSERT_EQ(error.status(), VMMGRAPH_ERROR_UNSUPPORTED);
        return;
    }
    EXPECT_EQ(vmmgraph::shrink_to_fit(arena), 0u);
    int launched = 0;
    space.replay(nullptr, [&] { ++launched; });
    EXPECT_EQ(launched, 1);
}

TEST(Regions, StepAsideAndComeBackAtTheSameAddresses) {
    const Device device = open_device(5);
    Region weights(device, "weights", {Policy::backup});
    Region kv(device, "kv");
    void* const block = weights.allocate(3 * MiB);
    void* const small = weights.allocate(1000);
    void* const zeros = kv.allocate(MiB, nullptr, Policy::zero);
    static_cast<void>(kv.allocate(2 * MiB));
    host::fill(block, 3 * MiB, 7);
    host::fill(small, 1000, 8);
    host::fill(zeros, MiB, 9);
    const auto before = device.stats().physical_bytes;

    const auto gone = vmmgraph::pause(device, {"weights", "kv"});
    EXPECT_EQ(gone.regions, 2U);
    EXPECT_EQ(gone.bytes, before);
    EXPECT_EQ(gone.failures, 0U);
    EXPECT_EQ(gone.path, VMMGRAPH_COPY_REGISTERED);
    EXPECT_EQ(device.stats().physical_bytes, 0U);
    EXPECT_EQ(weights.stats().paused, 1U);
    EXPECT_EQ(vmmgraph::pause(device).regions, 0U);
    std::vector<unsigned char> bytes(1000);
    weights.get_backup(small, 0, bytes.data(), bytes.size());
    EXPECT_TRUE(host::holds(bytes.data(), bytes.size(), 8));
    EXPECT_THROW(static_cast<void>(weights.allocate(512)), vmmgraph::Error);

    const auto back = vmmgraph::resume(device, {}, 1s);
    EXPECT_EQ(back.regions, 2U);
    EXPECT_EQ(back.bytes, gone.bytes);
    EXPECT_TRUE(host::holds(block, 3 * MiB, 7));
    EXPECT_TRUE(host::holds(small, 1000, 8));
    EXPECT_TRUE(host::holds(zeros, MiB, 0));
    EXPECT_EQ(weights.stats().generation, 2U);
    EXPECT_EQ(vmmgraph::resume(device).regions, 0U);
    weights.free(block);
    EXPECT_THROW(weights.free(block), vmmgraph::Error);
}

TEST(Regions, OneAtATimeBehindStreamsAndEvents) {
    const Device device = open_device(5);
    vmmgraph::RegionOptions options;
    options.policy = Policy::backup;
    options.read_only = true;
    Region region(device, "weights", options);
    void* const block = region.allocate(2 * MiB);
    region.record_stream(block, reinterpret_cast<void*>(0x1230));
    host::fill(block, 2 * MiB, 3);
    EXPECT_EQ(region.pause({{nullptr, reinterpret_cast<void*>(0x1230)}, {}}).copied_bytes, 2 * MiB);
    EXPECT_EQ(region.resume().copied_bytes, 2 * MiB);
    EXPECT_EQ(region.pause().clean_bytes, 2 * MiB);
    EXPECT_THROW(region.before(nullptr), vmmgraph::Error);
    region.free(block);
    EXPECT_EQ(vmmgraph::resume_async(device, {"weights"}).report.bytes, 0U);
    region.before(nullptr);
    EXPECT_THROW(region.pause({{}, {reinterpret_cast<void*>(0x77770)}}), vmmgraph::Error);
    EXPECT_EQ(region.stats().paused, 0U);
}

TEST(Regions, ContentsOfEachTagAreKnownByThemselves) {
    const Device device = open_device(5);
    Region weights(device, "weights", {Policy::backup});
    Region kv(device, "kv", {Policy::backup});
    void* const first = weights.allocate(2 * MiB);
    void* const second = kv.allocate(2 * MiB);
    host::fill(first, 2 * MiB, 6);
    host::fill(second, 2 * MiB, 7);
    vmmgraph::pause(device);
    auto resumed = vmmgraph::resume_async(device, {"kv", "weights", "kv", "nobody"});
    EXPECT_EQ(resumed.report.bytes, 4 * MiB);
    ASSERT_EQ(resumed.ready.size(), 4U);
    for (const auto& ready : resumed.ready) {
        ready.wait();
        EXPECT_TRUE(ready.done());
        ready.before(nullptr);
    }
    EXPECT_TRUE(host::holds(first, 2 * MiB, 6) && host::holds(second, 2 * MiB, 7));
    // Destroyed handles and handles of another kind are refused.
    vmmgraph_ready_t ready = nullptr;
    const char* const tag = "kv";
    ASSERT_EQ(vmmgraph_device_resume_async(device.handle(), &tag, 1, 0, &ready, nullptr),
              VMMGRAPH_OK);
    std::int32_t done = -1;
    EXPECT_EQ(vmmgraph_ready_done(ready, &done), VMMGRAPH_OK);
    EXPECT_EQ(done, 1);
    EXPECT_EQ(vmmgraph_ready_done(ready, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ready_destroy(ready), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_ready_wait(ready), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(vmmgraph_ready_before(nullptr, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
}

TEST(Regions, WithoutMemoryAResumeThrowsAndIsRepeated) {
    Device device = open_device(5);
    Region region(device, "weights", {Policy::backup});
    void* const block = region.allocate(4 * MiB);
    host::fill(block, 4 * MiB, 5);
    region.pause();
    device.set_budget(MiB);
    EXPECT_THROW(vmmgraph::resume(device, {}, 20ms), vmmgraph::OutOfMemory);
    EXPECT_EQ(region.stats().paused, 1U);
    device.set_budget(0);
    EXPECT_EQ(region.resume().bytes, 4 * MiB);
    EXPECT_TRUE(host::holds(block, 4 * MiB, 5));
}

TEST(Regions, APauseThatFailsInPartSaysSo) {
    const Device device = open_device(6);
    Region region(device, "weights", {Policy::backup});
    void* const block = region.allocate(4 * MiB);
    host::fill(block, 4 * MiB, 6);
    vmmgraph::trim_host(device);
    vmmgraph::set_host_budget(device, 2 * MiB);
    try {
        region.pause();
        FAIL() << "there was no room on the host";
    } catch (const vmmgraph::PauseIncomplete& incomplete) {
        EXPECT_EQ(incomplete.status(), VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY);
        EXPECT_GT(incomplete.report().left_bytes, 0U);
    }
    vmmgraph::set_host_budget(device, 0);
    vmmgraph::prepare_backup(device, 8 * MiB);
    EXPECT_GE(vmmgraph::host_stats(device).held_bytes, 8 * MiB);
    region.pause();
    region.resume();
    EXPECT_TRUE(host::holds(block, 4 * MiB, 6));
    EXPECT_GE(vmmgraph::trim_host(device), 8 * MiB);
}

TEST(Arenas, StepAsideAndTheirGraphsAreLaunchedAgain) {
    const Device device = open_device(5);
    vmmgraph::ArenaOptions options;
    options.tag = "graphs";
    vmmgraph::SharedVmmAllocator arena(device, options);
    auto space = arena.open_space();
    void* const passing = space.allocate(20 * MiB);
    void* const output = space.allocate(3 * MiB);
    void* const kept = space.allocate_kept(1000);
    space.free(passing);
    EXPECT_THROW(vmmgraph::pause(arena), vmmgraph::Error) << "a space is open";
    static_cast<void>(space.seal());
    const auto launch = [&] {
        host::fill(passing, 20 * MiB, 1);
        host::fill(output, 3 * MiB, 2);
        host::fill(kept, 1000, 3);
    };
    space.replay(nullptr, launch);
    const auto held = arena.stats().physical_bytes;

    const auto gone = vmmgraph::pause(device, {"graphs"});
    EXPECT_EQ(gone.regions, 1U);
    EXPECT_EQ(gone.bytes, held);
    EXPECT_EQ(arena.stats().paused, 1U);
    EXPECT_EQ(device.stats().physical_bytes, 0U);
    EXPECT_EQ(vmmgraph::pause(arena).regions, 0U);
    bool launched = false;
    EXPECT_THROW(space.replay(nullptr, [&] { launched = true; }), vmmgraph::Error);
    EXPECT_FALSE(launched);
    EXPECT_THROW(static_cast<void>(arena.open_space()), vmmgraph::Error);

    EXPECT_EQ(vmmgraph::resume(arena, 1s).bytes, gone.bytes);
    EXPECT_EQ(arena.stats().paused, 0U);
    EXPECT_TRUE(host::holds(output, 3 * MiB, 2));
    EXPECT_TRUE(host::holds(kept, 1000, 3));
    space.replay(nullptr, launch);
    vmmgraph::pause(arena);
    space.free(output);
}

TEST(Regions, HooksHearOfTheirTagAndMayThrow) {
    const Device device = open_device(5);
    Region region(device, "kv");
    static_cast<void>(region.allocate(MiB));
    std::vector<std::pair<bool, std::uint64_t>> heard;
    {
        const vmmgraph::PauseHooks hooks(
            device, "kv",
            [&](const vmmgraph::Moved& moved) {
                EXPECT_STREQ(moved.tag, "kv");
                EXPECT_EQ(moved.range_count, 1U);
                EXPECT_GE(moved.ranges[0].bytes, MiB);
                heard.emplace_back(true, moved.generation);
                throw std::runtime_error("lost");
            },
            [&](const vmmgraph::Moved& moved) { heard.emplace_back(false, moved.generation); });
        region.pause();
        region.resume();
    }
    region.pause();
    region.resume();
    EXPECT_EQ(heard, (std::vector<std::pair<bool, std::uint64_t>>{{true, 1}, {false, 2}}));
}

// The function's captures live until it returns.
TEST(Regions, HooksMayEndWhileTheyAreCalled) {
    const Device device = open_device(5);
    Region region(device, "kv");
    static_cast<void>(region.allocate(MiB));
    std::atomic<int> calls{0};
    std::atomic<int> wrong{0};
    const auto hooks = [&] {
        const auto value = std::make_shared<int>(7);
        const auto called = [value, &calls, &wrong](const vmmgraph::Moved&) {
            ++calls;
            std::this_thread::yield();
            wrong += *value == 7 ? 0 : 1;
        };
        return vmmgraph::PauseHooks(device, "kv", called, called);
    };
    std::atomic<bool> stop{false};
    std::thread pauses([&] {
        while (!stop) {
            region.pause();
            region.resume();
        }
    });
    auto current = hooks();
    for (int i = 0; i < 2000 || calls < 50; ++i) {
        current = hooks();
    }
    stop = true;
    pauses.join();
    EXPECT_GT(calls, 0);
    EXPECT_EQ(wrong, 0);

    std::optional<vmmgraph::PauseHooks> self;
    const auto value = std::make_shared<int>(7);
    self.emplace(
        device, "kv",
        [&self, value, &wrong](const vmmgraph::Moved&) {
            self.reset();
            wrong += *value == 7 ? 0 : 1;
        },
        nullptr);
    region.pause();
    EXPECT_FALSE(self);
    EXPECT_EQ(wrong, 0);
    region.resume();
}

TEST(Regions, AreMovedAndMayGoWhilePaused) {
    const Device device = open_device(5);
    Region region(device, "weights", {Policy::backup});
    static_cast<void>(region.allocate(MiB));
    region.pause();
    Region moved = std::move(region);
    EXPECT_EQ(region.handle(), nullptr);  // NOLINT: moved from on purpose
    EXPECT_EQ(moved.stats().paused, 1U);
}

}  // namespace
