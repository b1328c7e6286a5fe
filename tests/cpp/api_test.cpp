// vmmgraph.hpp on the host driver, where addresses are ordinary pointers and aliasing is visible.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "host.hpp"

using host::MiB;
using vmmgraph::Error;
using vmmgraph::OutOfMemory;
using vmmgraph::Retain;
using vmmgraph::SharedVmmAllocator;
using vmmgraph::Space;

namespace {

template <class F>
vmmgraph_status_t status_of(F&& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.status();
    }
    return VMMGRAPH_OK;
}

// The host driver accepts any stream handle.
void* stream(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

TEST(Version, IsTheHeaders) {
    const std::string header = std::to_string(VMMGRAPH_VERSION_MAJOR) + "." +
                               std::to_string(VMMGRAPH_VERSION_MINOR) + "." +
                               std::to_string(VMMGRAPH_VERSION_PATCH);
    EXPECT_EQ(vmmgraph::version(), header);
    EXPECT_EQ(vmmgraph_abi_version(), static_cast<std::uint32_t>(VMMGRAPH_ABI_VERSION));
}

TEST(Device, SaysWhatItIs) {
    const auto device = vmmgraph::Device::open(host::device_options(3));
    const auto info = device.info();
    EXPECT_EQ(info.driver, VMMGRAPH_DRIVER_HOST);
    EXPECT_EQ(info.device, 3);
    EXPECT_EQ(info.granularity_bytes, 4096u);
    EXPECT_EQ(info.total_bytes, 256 * MiB);
    EXPECT_STREQ(info.name, "host memory 3");
}

TEST(Device, OpenedTwiceIsOnePool) {
    auto first = vmmgraph::Device::open(host::device_options(0));
    const auto second = vmmgraph::Device::open(host::device_options(0));
    EXPECT_NE(first.handle(), second.handle());
    first.set_budget(50 * MiB);
    EXPECT_EQ(second.stats().budget_bytes, 50 * MiB);

    auto arena = SharedVmmAllocator(first);
    auto space = arena.open_space();
    static_cast<void>(space.allocate(MiB));
    EXPECT_GE(second.stats().physical_bytes, MiB);
    EXPECT_EQ(second.stats().physical_bytes, arena.stats().physical_bytes);
}

TEST(Device, RefusesOtherGeometryWhileOpen) {
    const auto first = vmmgraph::Device::open(host::device_options(0));
    auto other = host::device_options(0);
    other.host_granularity_bytes = 8192;
    EXPECT_EQ(status_of([&] { static_cast<void>(vmmgraph::Device::open(other)); }),
              VMMGRAPH_ERROR_DEVICE_IN_USE);
}

TEST(Device, ClosesWithItsLastUser) {
    {
        const SharedVmmAllocator arena = host::arena(0);
        auto other = host::device_options(0);
        other.host_granularity_bytes = 8192;
        EXPECT_EQ(status_of([&] { static_cast<void>(vmmgraph::Device::open(other)); }),
                  VMMGRAPH_ERROR_DEVICE_IN_USE);
    }
    auto other = host::device_options(0);
    other.host_granularity_bytes = 8192;
    EXPECT_EQ(vmmgraph::Device::open(other).info().granularity_bytes, 8192u);
}

TEST(Error, CarriesStatusNumbersAndWords) {
    try {
        static_cast<void>(vmmgraph::Device::open(host::device_options(99)));
        FAIL() << "device 99 was opened";
    } catch (const Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_DEVICE);
        EXPECT_EQ(error.info().device, 99);
        EXPECT_NE(std::string(error.what()).find("99"), std::string::npos) << error.what();
    }
    auto arena = host::arena();
    try {
        static_cast<void>(arena.allocate(0));
        FAIL() << "a block of nothing was allocated";
    } catch (const OutOfMemory&) {
        FAIL() << "a bad size is no lack of memory";
    } catch (const Error& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_INVALID_SIZE);
        EXPECT_EQ(error.info().requested, 0u);
        EXPECT_EQ(error.info().available, std::uint64_t{1} << 46);
    }
}

TEST(Options, ReachTheArena) {
    auto options = host::options();
    options.small_page_bytes = 3000;
    EXPECT_EQ(status_of([&] { SharedVmmAllocator(0, options); }), VMMGRAPH_ERROR_INVALID_SIZE);
    options = host::options();
    options.large_page_bytes = options.small_page_bytes + 1;
    EXPECT_EQ(status_of([&] { SharedVmmAllocator(0, options); }), VMMGRAPH_ERROR_INVALID_SIZE);
    options = host::options();
    options.retain = static_cast<Retain>(77);
    EXPECT_EQ(status_of([&] { SharedVmmAllocator(0, options); }), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    options = host::options();
    options.driver = static_cast<vmmgraph::DriverChoice>(-5);
    EXPECT_EQ(status_of([&] { SharedVmmAllocator(0, options); }), VMMGRAPH_ERROR_INVALID_ARGUMENT);

    options = host::options();
    options.small_page_bytes = options.large_page_bytes = 128 << 10;
    SharedVmmAllocator arena(0, options);
    static_cast<void>(arena.allocate(300 << 10));
    EXPECT_EQ(arena.stats().physical_bytes, 3u * (128 << 10));

    options = host::options();
    options.small_page_bytes = 64 << 10;
    options.large_page_bytes = 0;
    options.expected_bytes = 48 * (128 << 10);
    SharedVmmAllocator fitting(0, options);
    auto space = fitting.open_space();
    static_cast<void>(space.allocate(300 << 10));
    EXPECT_EQ(fitting.stats().physical_bytes, 3u * (128 << 10));

    options = host::options();
    options.peers = 0xff;
    EXPECT_NE(SharedVmmAllocator(0, options).open_space().allocate(1 << 20), nullptr);
    options.peers = 0x100;
    EXPECT_EQ(status_of([&] { SharedVmmAllocator(0, options); }), VMMGRAPH_ERROR_INVALID_ARGUMENT);
}

TEST(Options, ASerialArenaRefusesOtherStreams) {
    auto options = host::options();
    options.serial = true;
    SharedVmmAllocator arena(0, options);
    auto space = arena.open_space();
    const auto report = space.seal();
    EXPECT_EQ(report.layout_hash, arena.open_space().seal().layout_hash);
    int launched = 0;
    space.replay(nullptr, [&] { ++launched; });
    EXPECT_EQ(status_of([&] { space.replay(reinterpret_cast<void*>(0x20), [&] { ++launched; }); }),
              VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(launched, 1);
    EXPECT_EQ(arena.replay_seq(), 1u);
}

TEST(Options, ASerialArenaMovesWhenItIsLifted) {
    auto options = host::options();
    options.serial = true;
    SharedVmmAllocator arena(0, options);
    auto space = arena.open_space();
    space.seal();
    space.replay(nullptr, [&] { EXPECT_EQ(arena.replay_seq(), 1u); });
    auto* const other = reinterpret_cast<void*>(0x20);
    EXPECT_EQ(status_of([&] { space.replay(other, [] {}); }), VMMGRAPH_ERROR_WRONG_STATE);
    arena.lift_serial();
    space.replay(other, [&] {
        EXPECT_EQ(status_of([&] { arena.lift_serial(); }), VMMGRAPH_ERROR_WRONG_STATE);
    });
    EXPECT_EQ(status_of([&] { space.replay(nullptr, [] {}); }), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(arena.replay_seq(), 2u);
}

TEST(Space, BlocksAreMemoryOnWholeBoundaries) {
    auto arena = host::arena();
    auto space = arena.open_space();
    std::vector<std::pair<unsigned char*, std::size_t>> blocks;
    for (std::size_t bytes :
         {std::size_t{1}, std::size_t{511}, std::size_t{4096}, 3 * MiB + 5, std::size_t{70000}}) {
        void* const block = space.allocate(bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 512, 0u);
        host::fill(block, bytes, static_cast<int>(blocks.size() + 1));
        blocks.emplace_back(static_cast<unsigned char*>(block), bytes);
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        EXPECT_TRUE(host::holds(blocks[i].first, blocks[i].second, static_cast<int>(i + 1)))
            << "block " << i;
    }
    EXPECT_EQ(space.stats().blocks, blocks.size());
}

TEST(Space, FreedBlocksServeTheSameStream) {
    auto arena = host::arena();
    auto space = arena.open_space();
    void* const first = space.allocate(4 * MiB, stream(1));
    space.free(first);
    EXPECT_EQ(space.allocate(4 * MiB, stream(1)), first);
    space.free(first);
    EXPECT_NE(space.allocate(4 * MiB, stream(2)), first);
}

TEST(Space, BlocksOfTwoStreamsStayBusyUntilTheSeal) {
    auto arena = host::arena();
    auto space = arena.open_space();
    void* const block = space.allocate(4 * MiB, stream(1));
    space.record_stream(block, stream(2));
    space.free(block);
    EXPECT_NE(space.allocate(4 * MiB, stream(1)), block);
    EXPECT_EQ(status_of([&] { space.record_stream(block, stream(3)); }),
              VMMGRAPH_ERROR_DOUBLE_FREE);
}

TEST(Space, SpacesShareThePagesOfFreedBlocks) {
    auto arena = host::arena();
    auto one = arena.open_space();
    auto* const first = static_cast<unsigned char*>(one.allocate(8 * MiB));
    one.free(first);
    one.seal();
    auto two = arena.open_space();
    auto* const second = static_cast<unsigned char*>(two.allocate(8 * MiB));
    EXPECT_NE(first, second);
    EXPECT_EQ(arena.mapped_size(), 8 * MiB) << "one set of pages serves both";

    // Aliased pages, in some order.
    host::fill(first, 8 * MiB, 0);
    host::fill(second, 8 * MiB, 0x5a);
    EXPECT_TRUE(host::holds(first, 8 * MiB, 0x5a));
    first[5 * MiB] = 1;
    EXPECT_EQ(std::count(second, second + 8 * MiB, 1), 1);
}

TEST(Space, RetainedBlocksKeepTheirContents) {
    auto arena = host::arena();
    auto one = arena.open_space();
    void* const scratch = one.allocate(4 * MiB);
    void* const output = one.allocate(2 * MiB);
    void* const small = one.allocate(512);
    one.free(scratch);
    const auto report = one.seal();
    EXPECT_EQ(report.retained_blocks, 2u);
    EXPECT_GE(report.retained_bytes, 2 * MiB + 512);
    EXPECT_EQ(report.peak_live_bytes, 6 * MiB + 512);
    EXPECT_EQ(one.live_blocks().size(), 2u);

    auto two = arena.open_space();
    void* const overwriter = two.allocate(16 * MiB);
    void* const small_overwriter = two.allocate(512);
    two.free(overwriter);
    two.free(small_overwriter);
    two.seal();

    one.replay(stream(1), [&] {
        host::fill(output, 2 * MiB, 1);
        host::fill(small, 512, 2);
    });
    two.replay(stream(1), [&] {
        host::fill(overwriter, 16 * MiB, 9);
        host::fill(small_overwriter, 512, 9);
    });
    EXPECT_TRUE(host::holds(output, 2 * MiB, 1));
    EXPECT_TRUE(host::holds(small, 512, 2));
    EXPECT_EQ(arena.stats().retained_bytes, report.retained_bytes);

    one.free(output);
    one.free(small);
    EXPECT_EQ(arena.stats().retained_bytes, 0u);
    EXPECT_TRUE(one.live_blocks().empty());
}

TEST(Space, SharedPagesAreOverwrittenAsAskedFor) {
    auto arena = host::arena();
    auto one = arena.open_space();
    void* const output = one.allocate(2 * MiB);
    const auto report = one.seal(Retain::shared_pages);
    EXPECT_EQ(report.retained_bytes, 0u);
    EXPECT_EQ(report.retained_blocks, 1u);
    host::fill(output, 2 * MiB, 1);
    auto two = arena.open_space();
    host::fill(two.allocate(2 * MiB), 2 * MiB, 2);
    EXPECT_TRUE(host::holds(output, 2 * MiB, 2));
}

TEST(Space, LiveBlocksAreInAddressOrder) {
    auto arena = host::arena();
    auto space = arena.open_space();
    EXPECT_TRUE(space.live_blocks().empty());
    std::vector<void*> expected;
    for (int i = 0; i < 300; ++i) {
        expected.push_back(space.allocate(static_cast<std::size_t>(1 + i % 7) << 12));
    }
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(space.live_blocks(), expected);
}

TEST(Space, IsOpenThenSealed) {
    auto arena = host::arena();
    auto space = arena.open_space();
    EXPECT_EQ(space.stats().phase, VMMGRAPH_SPACE_OPEN);
    EXPECT_EQ(
        status_of([&] { space.replay(nullptr, [] { FAIL() << "an open space was replayed"; }); }),
        VMMGRAPH_ERROR_WRONG_STATE);
    space.seal();
    EXPECT_EQ(space.stats().phase, VMMGRAPH_SPACE_SEALED);
    EXPECT_EQ(status_of([&] { static_cast<void>(space.allocate(1)); }), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(status_of([&] { space.seal(); }), VMMGRAPH_ERROR_WRONG_STATE);
}

TEST(Replay, CallsLaunchOnceOnThisThreadAndMayTakeAnyCallable) {
    auto arena = host::arena();
    auto space = arena.open_space();
    space.seal();
    int calls = 0;
    const auto caller = std::this_thread::get_id();
    space.replay(stream(1), [&] {
        ++calls;
        EXPECT_EQ(std::this_thread::get_id(), caller);
        return 5;  // ignored
    });
    struct {
        int& calls;
        void operator()() { ++calls; }
    } named{calls};
    space.replay(stream(1), named);
    const std::function<void()> function = [&] { ++calls; };
    space.replay(nullptr, function);
    space.replay(stream(2), +[] {});
    EXPECT_EQ(calls, 3);
}

TEST(Replay, NeverOverlapsInOneArena) {
    auto arena = host::arena();
    std::vector<Space> spaces;
    for (int i = 0; i < 4; ++i) {
        spaces.push_back(arena.open_space());
        spaces.back().seal();
    }
    std::atomic<int> inside{0};
    std::atomic<int> calls{0};
    std::atomic<bool> overlapped{false};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < spaces.size(); ++i) {
        threads.emplace_back([&, i] {
            for (int round = 0; round < 200; ++round) {
                spaces[i].replay(stream(i + 1), [&] {
                    overlapped = overlapped || ++inside != 1;
                    ++calls;
                    std::this_thread::yield();
                    --inside;
                });
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_FALSE(overlapped);
    EXPECT_EQ(calls, 800);
}

TEST(Replay, CarriesExceptionsThrough) {
    auto arena = host::arena();
    auto space = arena.open_space();
    space.seal();
    struct Odd {
        int value;
    };
    try {
        space.replay(stream(1), [] { throw Odd{7}; });
        FAIL() << "the exception was lost";
    } catch (const Odd& odd) {
        EXPECT_EQ(odd.value, 7);
    }
    EXPECT_THROW(space.replay(stream(1), [] { throw std::runtime_error("launch"); }),
                 std::runtime_error);
    bool called = false;
    space.replay(stream(2), [&] { called = true; });
    EXPECT_TRUE(called);
    arena.mark();
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.open_space().allocate(MiB)); }), VMMGRAPH_OK);
}

TEST(Bump, BlocksLieBehindOneAnotherAndStayShared) {
    auto arena = host::arena();
    auto space = arena.open_bump_space();
    auto* const first = static_cast<char*>(space.allocate(3 * MiB));
    space.free(first);
    EXPECT_EQ(space.allocate(MiB), first + 3 * MiB);
    EXPECT_EQ(space.stats().retain, VMMGRAPH_RETAIN_SHARED_PAGES);
    EXPECT_EQ(arena.open_space().stats().retain, VMMGRAPH_RETAIN_OWN_PAGES);
    EXPECT_EQ(status_of([&] { static_cast<void>(space.seal(Retain::own_pages)); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const auto report = space.seal();
    EXPECT_EQ(report.retained_blocks, 1u);
    EXPECT_EQ(report.retained_bytes, 0u);
    auto other = arena.open_bump_space();
    auto* const again = static_cast<char*>(other.allocate(4 * MiB));
    first[0] = 1;
    again[0] = 2;
    EXPECT_EQ(first[0], 2);
    EXPECT_EQ(arena.mapped_size(), 4 * MiB);
}

TEST(Poison, AGraphThatReliesOnStaleMemoryIsFound) {
    auto options = host::options();
    options.trace_blocks = true;
    SharedVmmAllocator arena(0, options);
    auto space = arena.open_space();
    auto* const scratch = static_cast<int*>(space.allocate(MiB));
    auto* const output = static_cast<int*>(space.allocate(4096));
    space.free(scratch);
    EXPECT_EQ(space.seal().allocations, 2u);
    const std::string blocks = space.blocks_json();
    EXPECT_NE(blocks.find("\"allocation\":2"), std::string::npos) << blocks;
    EXPECT_NE(blocks.find("\"origin\":\""), std::string::npos) << blocks;
    const std::vector<vmmgraph::Output> outputs{{output, sizeof(int)}, {output + 1, sizeof(int)}};
    const auto right = space.verify(nullptr, outputs, [&] {
        *scratch = 1;
        output[0] = output[1] = *scratch;
    });
    EXPECT_EQ(right.found, 0u);
    const auto wrong = space.verify(nullptr, outputs, [&] {
        output[0] = 1;
        output[1] = *scratch;
    });
    EXPECT_EQ(wrong.found, 1u);
    EXPECT_EQ(wrong.space, space.stats().id);
    EXPECT_EQ(wrong.output, 1u);
    EXPECT_THROW(static_cast<void>(
                     space.verify(nullptr, {}, [] { throw std::runtime_error("from launch"); })),
                 std::runtime_error);
    options.poison = true;
    options.trace_blocks = false;
    SharedVmmAllocator poisoned(0, options);
    auto filled = poisoned.open_space();
    auto* const passing = static_cast<unsigned*>(filled.allocate(MiB));
    filled.free(passing);
    filled.seal();
    filled.replay(nullptr, [&] { EXPECT_EQ(*passing, 0xffffffffu); });
}

TEST(Serial, HasTheNamesEnginesKnow) {
    auto arena = host::arena();
    EXPECT_TRUE(arena.is_initialized());
    EXPECT_EQ(arena.mapped_size(), 0u);
    EXPECT_EQ(arena.current_offset(), 0u);

    arena.switch_to_new_virtual_space();
    void* const first = arena.allocate(4 * MiB);
    void* const kept = arena.allocate(MiB, nullptr);
    EXPECT_EQ(arena.current_offset(), 5 * MiB);
    EXPECT_EQ(arena.high_water_mark(), 5 * MiB);
    arena.deallocate(first);
    EXPECT_EQ(arena.current_offset(), 5 * MiB) << "the end of what was handed out, freed or not";
    host::fill(kept, MiB, 3);

    arena.switch_to_new_virtual_space();
    EXPECT_EQ(arena.current_offset(), 0u);
    void* const second = arena.allocate(4 * MiB);
    host::fill(second, 4 * MiB, 4);
    EXPECT_EQ(arena.high_water_mark(), 5 * MiB);
    EXPECT_GE(arena.mapped_size(), 5 * MiB);
    EXPECT_LT(arena.mapped_size(), 7 * MiB);
    EXPECT_GE(arena.reserved_size(), 9 * MiB);
    EXPECT_EQ(arena.stats().spaces, 2u);

    // Earlier blocks stay valid.
    arena.deallocate(kept);
    EXPECT_EQ(status_of([&] { arena.deallocate(kept); }), VMMGRAPH_ERROR_DOUBLE_FREE);
    EXPECT_EQ(status_of([&] { arena.deallocate(&arena); }), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(status_of([&] { arena.deallocate(nullptr); }), VMMGRAPH_ERROR_FOREIGN_POINTER);
}

TEST(Arena, RetainPolicyOfTheOptionsIsInherited) {
    auto options = host::options();
    options.retain = Retain::shared_pages;
    SharedVmmAllocator arena(0, options);
    auto space = arena.open_space();
    static_cast<void>(space.allocate(MiB));
    EXPECT_EQ(space.seal().retained_bytes, 0u);
    auto other = arena.open_space();
    static_cast<void>(other.allocate(MiB));
    EXPECT_GE(other.seal(Retain::own_pages).retained_bytes, MiB);
}

TEST(Arena, TrimGivesUnmappedPagesBack) {
    auto arena = host::arena();
    {
        auto space = arena.open_space();
        static_cast<void>(space.allocate(8 * MiB));
        EXPECT_EQ(arena.trim(), 0u) << "the pages are mapped";
    }
    EXPECT_EQ(arena.mapped_size(), 0u) << "what no space maps is the device's";
    EXPECT_EQ(arena.reserved_size(), 0u);
    EXPECT_EQ(arena.stats().free_bytes, 8 * MiB);
    EXPECT_EQ(arena.trim(), 8 * MiB);
    EXPECT_EQ(arena.stats().free_bytes, 0u);
}

TEST(Arena, ReservesAtOnceIfAsked) {
    auto options = host::options();
    options.reserve_bytes = 64 * MiB;
    SharedVmmAllocator arena(0, options);
    EXPECT_GE(arena.reserved_size(), 64 * MiB);
    EXPECT_EQ(arena.mapped_size(), 0u);
    static_cast<void>(arena.allocate(4 * MiB));
    const auto reserved = arena.reserved_size();
    static_cast<void>(arena.allocate(32 * MiB));
    EXPECT_EQ(arena.reserved_size(), reserved) << "there were enough";
    arena.switch_to_new_virtual_space();
    EXPECT_GE(arena.reserved_size(), 128 * MiB);
    EXPECT_EQ(arena.current_offset(), 0u);
    options.reserve_bytes = MiB + 1;
    EXPECT_GT(SharedVmmAllocator(1, options).reserved_size(), MiB)
        << "as many as the device reserves in, and not refused";
}

TEST(Device, FreePagesServeEveryArenaAndTrimGivesThemBack) {
    auto device = vmmgraph::Device::open(host::device_options(0));
    SharedVmmAllocator one(device, host::options()), other(device, host::options());
    {
        auto space = one.open_space();
        static_cast<void>(space.allocate(16 * MiB));
    }
    const auto before = device.stats();
    EXPECT_EQ(before.free_bytes, 16 * MiB);
    {
        auto space = other.open_space();
        static_cast<void>(space.allocate(16 * MiB));
        EXPECT_EQ(device.stats().free_bytes, 0u);
        EXPECT_EQ(device.stats().pages_created, before.pages_created);
        EXPECT_GT(device.stats().pages_reused, before.pages_reused);
        EXPECT_EQ(device.trim(), 0u);
    }
    EXPECT_EQ(device.trim(), 16 * MiB);
    EXPECT_EQ(device.stats().physical_bytes, 0u);
}

TEST(Space, KeptBlocksOfAllSpacesShareTheirPages) {
    auto arena = host::arena();
    std::vector<Space> spaces;
    std::vector<void*> outputs, passing;
    for (int i = 0; i < 40; ++i) {
        spaces.push_back(arena.open_space());
        passing.push_back(spaces.back().allocate(2 * MiB));
        outputs.push_back(spaces.back().allocate_kept(1000, stream(1)));
        spaces.back().free(passing.back());
        const auto report = spaces.back().seal();
        EXPECT_EQ(report.retained_bytes, 0u) << "no page of its own";
        EXPECT_EQ(report.retained_blocks, 1u);
        EXPECT_EQ(spaces.back().live_blocks(), std::vector<void*>{outputs.back()});
    }
    EXPECT_EQ(arena.stats().kept_bytes, 64u << 10) << "40 KiB on one small page";
    EXPECT_EQ(arena.stats().physical_bytes, 2 * MiB + (64 << 10));
    EXPECT_EQ(arena.stats().physical_bytes, arena.stats().shared_bytes + arena.stats().kept_bytes);
    for (std::size_t i = 0; i < spaces.size(); ++i) {
        spaces[i].replay(stream(1), [&] {
            host::fill(passing[i], 2 * MiB, 0xee);
            host::fill(outputs[i], 1000, static_cast<int>(i + 1));
        });
    }
    for (std::size_t i = 0; i < spaces.size(); ++i) {
        EXPECT_TRUE(host::holds(outputs[i], 1000, static_cast<int>(i + 1))) << i;
    }
    // Each replay writes the freed block.
    spaces[0].free(outputs[0]);
    EXPECT_EQ(status_of([&] { spaces[0].free(outputs[0]); }), VMMGRAPH_ERROR_DOUBLE_FREE);
    auto next = arena.open_space();
    EXPECT_NE(next.allocate_kept(1000), outputs[0]);
    spaces.erase(spaces.begin());
    EXPECT_EQ(next.allocate_kept(1000), outputs[0]);
    spaces.clear();
    next.seal();
    {
        const auto gone = std::move(next);
    }
    EXPECT_EQ(arena.stats().kept_bytes, 0u);
    static_cast<void>(arena.trim());
    EXPECT_EQ(vmmgraph::Device::open(host::device_options(0)).stats().physical_bytes, 0u);
}

TEST(Arena, StatsAndJsonAgree) {
    auto arena = host::arena();
    auto space = arena.open_space();
    for (int i = 0; i < 200; ++i) {
        static_cast<void>(space.allocate(5000));
    }
    std::vector<Space> more;
    for (int i = 0; i < 20; ++i) {
        more.push_back(arena.open_space());
    }
    const auto stats = arena.stats();
    EXPECT_EQ(stats.blocks, 200u);
    EXPECT_EQ(stats.live_bytes, 200u * 5120);
    EXPECT_EQ(stats.spaces, 21u);
    EXPECT_EQ(stats.physical_bytes, stats.shared_bytes + stats.retained_bytes + stats.kept_bytes);
    const auto in_space = space.stats();
    EXPECT_EQ(in_space.live_bytes, stats.live_bytes);
    EXPECT_EQ(in_space.reserved_bytes, stats.reserved_bytes);

    const std::string json = arena.stats_json();
    EXPECT_GT(json.size(), 1000u) << "longer than the first buffer";
    EXPECT_EQ(json.size(), std::strlen(json.c_str())) << "no terminator inside";
    EXPECT_EQ(json.front(), '{');
    EXPECT_EQ(json.back(), '}');
    EXPECT_EQ(std::count(json.begin(), json.end(), '{'), std::count(json.begin(), json.end(), '}'));
    for (const auto& [key, value] :
         {std::pair{"physical_bytes", stats.physical_bytes}, {"blocks", stats.blocks}}) {
        const std::string text = std::string("\"") + key + "\":" + std::to_string(value);
        EXPECT_NE(json.find(text), std::string::npos) << text << " is not in " << json;
    }
}

TEST(Map, IsDataATableAndAFileThatNeedsNothingElse) {
    SharedVmmAllocator arena(vmmgraph::Device::open(host::device_options(0)), host::options());
    arena.trace_events(true);
    Space space = arena.open_space();
    space.set_label("decode </script> 64");
    EXPECT_EQ(space.label(), "decode </script> 64");
    EXPECT_EQ(status_of([&] { space.set_label(std::string(1025, 'x')); }),
              VMMGRAPH_ERROR_INVALID_SIZE);
    space.free(space.allocate(40 << 20));
    space.seal();

    const std::string map = arena.map_json({"an engine's rank 0", 123456789});
    for (const char* part :
         {"\"format\":1,", "\"title\":\"an engine's rank 0\"", "\"executables_bytes\":123456789",
          "\"label\":\"decode </script> 64\"", "\"drop_gives_bytes\":", "\"events\":[{"}) {
        EXPECT_NE(map.find(part), std::string::npos) << part;
    }
    EXPECT_NE(map.find("\"held_bytes\":" + std::to_string(arena.mapped_size())), std::string::npos);
    EXPECT_NE(arena.map_json().find("\"executables_bytes\":null"), std::string::npos);
    EXPECT_NE(vmmgraph::map_report(map).find("executables 118 MiB"), std::string::npos)
        << vmmgraph::map_report(map);
    // As from an older header.
    auto older = vmmgraph::detail::sized<vmmgraph_map_options_t>();
    older.struct_size = offsetof(vmmgraph_map_options_t, title);
    std::size_t needed = 0;
    EXPECT_EQ(vmmgraph_arena_map_json(arena.handle(), &older, nullptr, 0, &needed), VMMGRAPH_OK);
    EXPECT_NE(vmmgraph::map_report(map).find("decode </script> 64"), std::string::npos);
    EXPECT_EQ(vmmgraph::map_perfetto(map).rfind("{", 0), 0u);
    EXPECT_EQ(status_of([] { static_cast<void>(vmmgraph::map_html("{}")); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);

    const std::string path = testing::TempDir() + "vmmgraph_map_test.html";
    arena.save_map(path, {"an engine's rank 0"});
    std::ifstream file(path, std::ios::binary);
    const std::string page((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
    EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
    EXPECT_EQ(page.substr(page.size() - 8), "</html>\n");
    EXPECT_EQ(page.find("decode </script>"), std::string::npos);
    EXPECT_NE(page.find("decode \\u003c/script> 64"), std::string::npos);
    EXPECT_EQ(std::remove(path.c_str()), 0);
    try {
        arena.save_map("/nowhere/at/all.html");
        ADD_FAILURE() << "nothing was thrown";
    } catch (const std::system_error& error) {
        EXPECT_EQ(error.code(), std::errc::no_such_file_or_directory) << error.what();
    }
}

TEST(Budget, EndsInOutOfMemoryAndTheNextCallWorks) {
    auto device = vmmgraph::Device::open(host::device_options(0));
    vmmgraph::ArenaOptions options = host::options();
    SharedVmmAllocator arena(device, options);
    device.set_budget(8 * MiB);
    auto space = arena.open_space();
    void* const first = space.allocate(6 * MiB);
    const auto before = arena.stats();
    try {
        static_cast<void>(space.allocate(4 * MiB));
        FAIL() << "10 MiB fitted in 8";
    } catch (const OutOfMemory& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_OVER_BUDGET);
        EXPECT_EQ(error.info().device, 0);
        EXPECT_GT(error.info().requested, error.info().available);
    }
    const auto after = arena.stats();
    EXPECT_EQ(std::memcmp(&before, &after, sizeof before), 0)
        << "a failed call has changed something";
    host::fill(space.allocate(2 * MiB), 2 * MiB, 1);
    space.free(first);
    device.set_budget(0);
    host::fill(space.allocate(16 * MiB), 16 * MiB, 2);
    EXPECT_EQ(device.stats().budget_bytes, 0u);
}

TEST(Budget, OfOneArenaLeavesTheOtherAloneAndIsMetAgainByEviction) {
    auto device = vmmgraph::Device::open(host::device_options(0));
    auto options = host::options();
    options.budget_bytes = 8 * MiB;
    SharedVmmAllocator arena(device, options);
    SharedVmmAllocator other(device, vmmgraph::ArenaOptions(host::options()));
    EXPECT_EQ(arena.stats().budget_bytes, 8 * MiB);
    EXPECT_EQ(other.stats().budget_bytes, 0u);
    EXPECT_EQ(device.stats().budget_bytes, 0u);

    auto capture = [&] {
        auto space = arena.open_space();
        host::fill(space.allocate(5 * MiB), 5 * MiB, 1);
        space.seal();
        return space;
    };
    auto graph = std::make_unique<vmmgraph::Space>(capture());
    const auto before = arena.stats();
    try {
        static_cast<void>(capture());
        FAIL() << "10 MiB fitted in 8";
    } catch (const OutOfMemory& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_OVER_BUDGET);
        EXPECT_EQ(error.info().requested, 2 * MiB);
        EXPECT_EQ(error.info().available, 0u);
        EXPECT_NE(std::strstr(error.what(), "over the budget of arena "), nullptr) << error.what();
    }
    const auto after = arena.stats();
    EXPECT_EQ(std::memcmp(&before, &after, sizeof before), 0)
        << "a failed capture has left something";
    auto beside = other.open_space();
    host::fill(beside.allocate(32 * MiB), 32 * MiB, 2);

    graph.reset();
    graph = std::make_unique<vmmgraph::Space>(capture());
    EXPECT_EQ(arena.stats().charged_bytes, 5 * MiB);
    device.set_budget(device.stats().physical_bytes);
    EXPECT_EQ(status_of([&] { static_cast<void>(capture()); }), VMMGRAPH_ERROR_OVER_BUDGET);
    device.set_budget(0);
    arena.set_budget(0);
    auto second = capture();
    EXPECT_EQ(arena.stats().charged_bytes, 10 * MiB);
    EXPECT_EQ(arena.stats().budget_bytes, 0u);
    EXPECT_EQ(second.stats().retained_bytes, 5 * MiB);
}

TEST(Budget, OfTheOptionsAndOfTheDeviceItself) {
    auto options = host::options();
    options.device_budget_bytes = MiB;
    SharedVmmAllocator arena(0, options);
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.allocate(2 * MiB)); }),
              VMMGRAPH_ERROR_OVER_BUDGET);
    auto device = vmmgraph::Device::open(host::device_options(0));
    device.set_budget(0);
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.allocate(257 * MiB)); }),
              VMMGRAPH_ERROR_OUT_OF_MEMORY);
    EXPECT_THROW(static_cast<void>(arena.allocate(257 * MiB)), OutOfMemory);
    host::fill(arena.allocate(MiB), MiB, 1);
}

TEST(Ownership, MovedFromObjectsAreEmptyAndHarmless) {
    auto arena = host::arena();
    const auto handle = arena.handle();
    SharedVmmAllocator moved(std::move(arena));
    EXPECT_EQ(moved.handle(), handle);
    EXPECT_FALSE(arena.is_initialized());  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(arena.handle(), nullptr);
    EXPECT_EQ(status_of([&] { arena.switch_to_new_virtual_space(); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.allocate(1)); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.open_space()); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.stats_json()); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { static_cast<void>(arena.mapped_size()); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    arena = std::move(moved);
    EXPECT_TRUE(arena.is_initialized());

    Space space = arena.open_space();
    Space other = std::move(space);
    EXPECT_EQ(space.handle(), nullptr);  // NOLINT(bugprone-use-after-move)
    EXPECT_EQ(status_of([&] { static_cast<void>(space.allocate(1)); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { space.seal(); }), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { static_cast<void>(space.live_blocks()); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { space.replay(nullptr, [] { FAIL(); }); }),
              VMMGRAPH_ERROR_INVALID_HANDLE);

    auto device = vmmgraph::Device::open(host::device_options(0));
    const auto taken = std::move(device);
    EXPECT_EQ(status_of([&] { static_cast<void>(device.info()); }), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { SharedVmmAllocator{device}; }), VMMGRAPH_ERROR_INVALID_HANDLE);
}

TEST(Ownership, MovingOverAnObjectDestroysWhatItHeld) {
    auto arena = host::arena();
    Space space = arena.open_space();
    static_cast<void>(space.allocate(MiB));
    const auto old = space.handle();
    space = arena.open_space();
    EXPECT_EQ(arena.stats().spaces, 1u);
    EXPECT_EQ(vmmgraph_space_seal(old, VMMGRAPH_RETAIN_DEFAULT, nullptr),
              VMMGRAPH_ERROR_INVALID_HANDLE);

    Space& same = space;
    space = std::move(same);
    EXPECT_EQ(arena.stats().spaces, 1u);
    space.seal();
}

TEST(Ownership, SpacesOutliveTheirArena) {
    auto device = vmmgraph::Device::open(host::device_options(0));
    std::vector<Space> spaces;
    void* block = nullptr;
    {
        SharedVmmAllocator arena(device, host::options());
        spaces.push_back(arena.open_space());
        block = spaces[0].allocate(MiB);
    }
    host::fill(block, MiB, 6);
    static_cast<void>(spaces[0].allocate(2 * MiB));
    spaces[0].seal();
    spaces[0].replay(nullptr, [&] { host::fill(block, MiB, 7); });
    EXPECT_TRUE(host::holds(block, MiB, 7));
    spaces.clear();
    EXPECT_EQ(device.stats().physical_bytes, 0u);
    EXPECT_EQ(device.stats().reservations, 0u);
    EXPECT_EQ(device.stats().pending, 0u);
}

TEST(Log, GoesToTheSinkAtItsLevelAndBelow) {
    std::mutex mutex;
    std::vector<std::pair<vmmgraph::LogLevel, std::string>> lines;
    const auto take = [&] {
        const std::lock_guard<std::mutex> lock(mutex);
        return std::exchange(lines, {});
    };
    auto alive = std::make_shared<int>(0);
    vmmgraph::set_log_sink(
        [&, alive](vmmgraph::LogLevel level, std::string_view text) {
            const std::lock_guard<std::mutex> lock(mutex);
            lines.emplace_back(level, text);
        },
        vmmgraph::LogLevel::debug);
    {
        auto arena = host::arena();
        arena.open_space().seal();
    }
    auto seen = take();
    const auto has = [&](vmmgraph::LogLevel level, const char* word) {
        return std::any_of(seen.begin(), seen.end(), [&](const auto& line) {
            return line.first == level && line.second.find(word) != std::string::npos;
        });
    };
    EXPECT_TRUE(has(vmmgraph::LogLevel::info, "arena created"));
    EXPECT_TRUE(has(vmmgraph::LogLevel::debug, "space sealed"));
    EXPECT_EQ(alive.use_count(), 2);

    // Replaces the first sink. Exceptions are discarded.
    std::atomic<int> calls{0};
    vmmgraph::set_log_sink(
        [&](vmmgraph::LogLevel, std::string_view) {
            ++calls;
            throw std::runtime_error("sink");
        },
        vmmgraph::LogLevel::info);
    EXPECT_EQ(alive.use_count(), 1);
    {
        auto arena = host::arena();
        arena.open_space().seal();
    }
    EXPECT_GE(calls, 1);
    EXPECT_TRUE(take().empty());
    vmmgraph::set_log_sink(nullptr);
}

}  // namespace
