// Elastic memory through the C++ interface, on the host driver.
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include <vmmgraph/blocks.hpp>
#include <vmmgraph/elastic.hpp>
#include <vmmgraph/lease.hpp>

#include "host.hpp"

namespace {

using host::MiB;
using vmmgraph::BlockPool;
using vmmgraph::Device;
using vmmgraph::ElasticBuffer;
using vmmgraph::KvCache;
using vmmgraph::KvLayout;
using vmmgraph::LimitChange;

constexpr std::uint64_t KiB = 1 << 10;

Device open_device() { return Device::open(host::device_options(2)); }

vmmgraph::ElasticOptions pages_of(std::uint64_t bytes) {
    vmmgraph::ElasticOptions options;
    options.name = "kv";
    options.page_bytes = bytes;
    return options;
}

// Distinct bytes per block and plane.
struct Written {
    explicit Written(const KvCache& cache) {
        for (std::size_t plane = 0; plane < cache.stats().planes; ++plane) {
            planes.push_back(cache.plane(plane));
        }
    }

    void* at(std::size_t plane, std::uint64_t block) const {
        return reinterpret_cast<void*>(planes[plane].address + block * planes[plane].stride_bytes);
    }
    void write(std::uint64_t block, int stamp) const {
        for (std::size_t plane = 0; plane < planes.size(); ++plane) {
            host::fill(at(plane, block), planes[plane].block_bytes,
                       stamp + static_cast<int>(plane));
        }
    }
    bool holds(std::uint64_t block, int stamp) const {
        for (std::size_t plane = 0; plane < planes.size(); ++plane) {
            if (!host::holds(at(plane, block), planes[plane].block_bytes,
                             (stamp + static_cast<int>(plane)) & 0xff)) {
                return false;
            }
        }
        return true;
    }

    std::vector<vmmgraph::KvPlace> planes;
};

TEST(Elastic, ABufferGrowsAndShrinksAndItsAddressesStay) {
    const Device device = open_device();
    ElasticBuffer buffer(device, 8 * MiB, pages_of(64 * KiB));
    auto* const base = static_cast<char*>(buffer.base());
    EXPECT_EQ(buffer.stats().committed_bytes, 0U);
    auto done = buffer.commit(100 * KiB, MiB);
    EXPECT_EQ(done.bytes, MiB + 64 * KiB);
    EXPECT_EQ(done.pages, 17U);
    host::fill(base + 64 * KiB, MiB, 3);
    EXPECT_EQ(buffer.commit_async(4 * MiB, MiB).wait().pages, 16U);
    host::fill(base + 4 * MiB, MiB, 4);
    const auto parts = buffer.committed();
    ASSERT_EQ(parts.size(), 2U);
    EXPECT_EQ(parts[1].address, reinterpret_cast<std::uint64_t>(base) + 4 * MiB);
    EXPECT_EQ(parts[1].bytes, MiB);
    EXPECT_EQ(buffer.decommit(4 * MiB + 1, MiB - 1), MiB - 64 * KiB);
    EXPECT_EQ(buffer.reap(), 0U);
    EXPECT_TRUE(host::holds(base + 64 * KiB, MiB, 3));
    EXPECT_TRUE(host::holds(base + 4 * MiB, 64 * KiB, 4));
    EXPECT_EQ(buffer.base(), base);
    buffer.before(nullptr);
    // The device kept the freed pages.
    done = buffer.commit(4 * MiB, MiB);
    EXPECT_EQ(done.pages, 15U);
    EXPECT_EQ(done.created, 0U);
    const auto stats = buffer.stats();
    EXPECT_EQ(stats.committed_bytes, 2 * MiB + 64 * KiB);
    EXPECT_EQ(stats.charged_bytes, stats.committed_bytes);
    EXPECT_EQ(stats.page_bytes, 64 * KiB);
}

TEST(Elastic, MoreThan16PartsAreAllTold) {
    const Device device = open_device();
    ElasticBuffer buffer(device, 8 * MiB, pages_of(64 * KiB));
    for (std::uint64_t page = 0; page < 120; page += 3) {
        buffer.commit(page * 64 * KiB, 1);
    }
    EXPECT_EQ(buffer.committed().size(), 40U);
}

TEST(Elastic, OutOfMemoryLeavesEverythingAndABudgetIsOne) {
    Device device = open_device();
    ElasticBuffer buffer(device, 8 * MiB, pages_of(64 * KiB));
    buffer.commit(0, MiB);
    device.set_budget(2 * MiB);
    EXPECT_THROW(buffer.commit(0, 4 * MiB), vmmgraph::OutOfMemory);
    EXPECT_THROW(static_cast<void>(buffer.commit_async(0, 4 * MiB).wait()), vmmgraph::OutOfMemory);
    EXPECT_EQ(buffer.stats().committed_bytes, MiB);
    EXPECT_EQ(buffer.stats().refused, 2U);
    device.set_budget(0);
    buffer.set_budget(MiB + 64 * KiB);
    try {
        buffer.commit(0, 2 * MiB);
        FAIL() << "beyond the budget";
    } catch (const vmmgraph::OutOfMemory& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_OVER_BUDGET);
    }
    buffer.commit(MiB, 64 * KiB);
    buffer.set_budget(0);
    buffer.commit(0, 2 * MiB);
}

TEST(Elastic, ObserversSeeMemoryComeAndGoAndMayThrow) {
    const Device device = open_device();
    ElasticBuffer buffer(device, MiB, pages_of(64 * KiB));
    KvCache cache(device, {{64 * KiB, 64 * KiB}, 4, KvLayout::by_plane, pages_of(64 * KiB)});
    std::vector<std::pair<bool, std::size_t>> heard;
    {
        const auto came = [&](const vmmgraph::Shown& shown) {
            EXPECT_STREQ(shown.name, "kv");
            heard.emplace_back(true, shown.range_count);
            throw std::runtime_error("lost");
        };
        const auto goes = [&](const vmmgraph::Shown& shown) {
            heard.emplace_back(false, shown.range_count);
        };
        const vmmgraph::ElasticObserver one(buffer, came, goes);
        const vmmgraph::ElasticObserver two(cache, came, {});
        buffer.commit(0, 128 * KiB);
        buffer.decommit(0, 128 * KiB);
        cache.grow_to(2);
        cache.shrink_to(0);
    }
    buffer.commit(0, 128 * KiB);
    EXPECT_EQ(heard, (std::vector<std::pair<bool, std::size_t>>{{true, 1}, {false, 1}, {true, 2}}));
}

TEST(Elastic, ObserversMayEndWhileTheyAreCalled) {
    const Device device = open_device();
    ElasticBuffer buffer(device, MiB, pages_of(64 * KiB));
    std::atomic<int> calls{0};
    std::atomic<int> wrong{0};
    const auto observer = [&] {
        const auto value = std::make_shared<int>(7);
        const auto called = [value, &calls, &wrong](const vmmgraph::Shown&) {
            ++calls;
            std::this_thread::yield();
            wrong += *value == 7 ? 0 : 1;
        };
        return vmmgraph::ElasticObserver(buffer, called, called);
    };
    std::atomic<bool> stop{false};
    std::thread commits([&] {
        while (!stop) {
            buffer.commit(0, 64 * KiB);
            buffer.decommit(0, 64 * KiB);
        }
    });
    auto current = observer();
    for (int i = 0; i < 2000 || calls < 50; ++i) {
        current = observer();
    }
    stop = true;
    commits.join();
    EXPECT_GT(calls, 0);
    EXPECT_EQ(wrong, 0);
}

class Caches : public testing::TestWithParam<KvLayout> {};

TEST_P(Caches, GrowAndShrinkAroundLiveBlocks) {
    const Device device = open_device();
    KvCache cache(device, {{16 * KiB, 48 * KiB, 32 * KiB}, 60, GetParam(), pages_of(64 * KiB)});
    const Written written(cache);
    EXPECT_EQ(cache.plane(1).block_bytes, 48 * KiB);
    EXPECT_EQ(cache.plane(1).stride_bytes, GetParam() == KvLayout::by_plane ? 48 * KiB : 96 * KiB);
    EXPECT_THROW(static_cast<void>(cache.plane(3)), vmmgraph::Error);
    cache.grow_to(10);
    cache.grow_async(40).wait();
    for (std::uint64_t block = 0; block < 40; ++block) {
        written.write(block, static_cast<int>(block));
    }
    EXPECT_EQ(cache.stats().blocks, 40U);
    EXPECT_EQ(cache.shrink_to(20, {{25, 27}, {39, 40}}, {{nullptr}}), 3U);
    EXPECT_EQ(cache.stats().beyond_blocks, 3U);
    const auto beyond = cache.beyond();
    ASSERT_EQ(beyond.size(), 2U);
    EXPECT_EQ(std::pair(beyond[0].first, beyond[0].end),
              std::pair(std::uint64_t{25}, std::uint64_t{27}));
    for (const std::uint64_t block : {0, 19, 25, 26, 39}) {
        EXPECT_TRUE(written.holds(block, static_cast<int>(block))) << block;
    }
    cache.release({25, 27});
    cache.release({39, 40});
    EXPECT_EQ(cache.beyond().size(), 0U);
    EXPECT_EQ(cache.backed().size(), 1U);
    cache.grow_to(60);
    for (std::uint64_t block = 0; block < 20; ++block) {
        EXPECT_TRUE(written.holds(block, static_cast<int>(block))) << block;
    }
    cache.before(nullptr);
    cache.release({0, 60});
    cache.reap();
    EXPECT_EQ(cache.memory().committed_bytes, 0U);
    EXPECT_EQ(cache.memory().charged_bytes, 0U);
}

TEST_P(Caches, LimitsFromOutsideHaveRevisions) {
    const Device device = open_device();
    KvCache cache(device, {{64 * KiB}, 60, GetParam(), pages_of(64 * KiB)});
    cache.grow_to(30);
    EXPECT_EQ(cache.set_limit(40, 5), LimitChange::applied);
    EXPECT_EQ(cache.set_limit(10, 4), LimitChange::stale);
    EXPECT_EQ(cache.set_limit(10, 5), LimitChange::conflict);
    EXPECT_EQ(cache.set_limit(40, 5), LimitChange::applied);
    EXPECT_THROW(cache.grow_to(41), vmmgraph::OutOfMemory);
    EXPECT_EQ(cache.set_limit(10, 6), LimitChange::deferred);
    EXPECT_EQ(cache.stats().blocks, 10U);
    EXPECT_EQ(cache.stats().beyond_blocks, 20U);
    EXPECT_EQ(cache.stats().revision, 6U);
    cache.release({10, 30});
    EXPECT_EQ(cache.set_limit(10, 6), LimitChange::applied);
    cache.set_budget(64 * KiB);
    EXPECT_EQ(cache.set_limit(1000, 7), LimitChange::applied);
    EXPECT_EQ(cache.stats().limit_blocks, 60U);
    EXPECT_THROW(cache.commit({10, 12}), vmmgraph::OutOfMemory);
}

// Rounded outward to whole pages.
std::vector<vmmgraph::BlockRange> rounded(std::vector<vmmgraph::BlockRange> ranges,
                                          std::uint64_t a_page) {
    for (auto& range : ranges) {
        range = {range.first / a_page * a_page, (range.end + a_page - 1) / a_page * a_page};
    }
    return ranges;
}

// Compared with a std::map for 1,000 steps.
TEST_P(Caches, APoolAndItsCacheDoWhatAMapDoes) {
    const Device device = open_device();
    KvCache cache(device, {{16 * KiB, 16 * KiB}, 64, GetParam(), pages_of(64 * KiB)});
    const Written written(cache);
    BlockPool pool(cache);
    std::map<std::uint64_t, int> twin;
    std::mt19937 random(5);
    for (int step = 0; step < 1000; ++step) {
        const std::size_t count = 1 + random() % 6;
        if (random() % 2 == 0) {
            auto blocks = pool.allocate(count);
            if (!blocks) {
                if (const auto missing = pool.shortfall(count)) {
                    for (const auto range : *missing) {
                        cache.commit(range);
                        pool.back(range);
                    }
                    blocks = pool.allocate(count);
                    ASSERT_TRUE(blocks);
                }
            }
            if (blocks) {
                for (const auto block : *blocks) {
                    ASSERT_TRUE(twin.emplace(block, step & 0x7f).second);
                    written.write(block, step & 0x7f);
                }
            }
        } else if (!twin.empty()) {
            std::vector<std::uint64_t> gone;
            for (std::size_t i = 0; i < count && !twin.empty(); ++i) {
                auto at = twin.begin();
                std::advance(at, static_cast<std::ptrdiff_t>(random() % twin.size()));
                ASSERT_TRUE(written.holds(at->first, at->second)) << step;
                gone.push_back(at->first);
                twin.erase(at);
            }
            pool.free(gone);
        }
        if (random() % 8 == 0) {
            for (const auto range : pool.surplus(random() % 8)) {
                ASSERT_EQ(pool.unback(range), 0U);
                cache.release(range);
            }
        }
        if (random() % 50 == 0) {
            // In whole pages.
            const std::uint64_t limit = 32 + 8 * (random() % 5);
            pool.set_limit(limit);
            for (const auto range : pool.surplus(~std::uint64_t{0})) {
                ASSERT_GE(range.first, limit);
                pool.unback(range);
            }
            cache.shrink_to(limit, rounded(pool.used({limit, 64}), cache.stats().blocks_a_page));
            pool.set_limit(64);
        }
    }
    for (const auto& [block, stamp] : twin) {
        EXPECT_TRUE(written.holds(block, stamp)) << block;
    }
    EXPECT_EQ(pool.stats().in_use, twin.size());
}

INSTANTIATE_TEST_SUITE_P(Elastic, Caches, testing::Values(KvLayout::by_plane, KvLayout::by_block),
                         [](const auto& info) {
                             return info.param == KvLayout::by_plane ? "ByPlane" : "ByBlock";
                         });

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// A separate process with limited memory.
TEST(Blocks, ThatTheHostHasNoMemoryForAreAnError) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto pool_of = [](std::uint64_t blocks) {
        const rlimit little{4ULL << 30, 4ULL << 30};
        setrlimit(RLIMIT_AS, &little);
        try {
            const BlockPool pool(blocks, 1, 4096);
        } catch (const vmmgraph::Error& error) {
            std::_Exit(error.status() == VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY ? 7 : 8);
        }
        std::_Exit(0);
    };
    EXPECT_EXIT(pool_of(1ULL << 31), testing::ExitedWithCode(7), "");
    EXPECT_EXIT(pool_of(1ULL << 10), testing::ExitedWithCode(0), "");
}
#endif

TEST(Elastic, APoolReservesAndMissesAndAsks) {
    BlockPool pool(40, 4, 1000);
    EXPECT_FALSE(pool.allocate(1));
    pool.back({0, 20});
    EXPECT_TRUE(pool.reserve(15));
    EXPECT_FALSE(pool.allocate(6));
    EXPECT_TRUE(pool.allocate_reserved(15));
    EXPECT_FALSE(pool.allocate_reserved(1));
    const auto five = pool.allocate(5);
    ASSERT_TRUE(five);
    EXPECT_FALSE(pool.allocate(1));
    EXPECT_EQ(pool.shortfall(3)->size(), 1U);
    pool.set_limit(20);
    EXPECT_FALSE(pool.shortfall(3));
    pool.free({(*five)[0]});
    EXPECT_TRUE(pool.reserve(1));
    pool.unreserve(1);
    EXPECT_EQ(pool.stats().available, 1U);
    EXPECT_EQ(pool.used({0, 40}).size(), 2U);
    EXPECT_THROW(pool.free({(*five)[0]}), vmmgraph::Error);

    std::uint64_t asked = 0;
    const auto empty = pool.ask(
        7000, 3, [](std::uint64_t block) { return block < 12; },
        [&](const vmmgraph::EvictionRequest& request) {
            EXPECT_EQ(request.by, 3U);
            asked = request.page_count;
            for (std::size_t i = 0; i < request.page_count; ++i) {
                const auto& page = request.pages[i];
                pool.free({page.blocks, page.blocks + page.block_count});
            }
        });
    EXPECT_EQ(asked, 2U);
    EXPECT_EQ(empty, 8000U);
    EXPECT_EQ(pool.surplus(0).size(), 1U);
    EXPECT_THROW(
        pool.ask(100'000, 0, {}, [](const auto&) { throw std::runtime_error("the engine's"); }),
        std::runtime_error);
    EXPECT_THROW(
        pool.ask(100'000, 0, [](std::uint64_t) -> bool { throw std::logic_error("the engine's"); },
                 {}),
        std::logic_error);
}

TEST(Elastic, HandlesMove) {
    const Device device = open_device();
    ElasticBuffer buffer(device, MiB);
    ElasticBuffer moved = std::move(buffer);
    EXPECT_EQ(buffer.handle(), nullptr);           // NOLINT: moved from on purpose
    EXPECT_THROW(buffer.reap(), vmmgraph::Error);  // NOLINT
    moved.commit(0, MiB);
    auto pending = moved.commit_async(0, MiB);
    auto other = std::move(pending);
    other.wait();
    EXPECT_TRUE(other.done());
}

TEST(Leases, BlocksAreLentAndTheReplayRecallsThem) {
    using namespace std::chrono_literals;
    const Device device = open_device();
    vmmgraph::ArenaOptions options;
    options.small_page_bytes = 4 * KiB;
    options.large_page_bytes = 64 * KiB;
    options.least_bytes = 128 * KiB;
    vmmgraph::SharedVmmAllocator arena(device, options);
    vmmgraph::Space space = arena.open_space();
    space.free(space.allocate(512 * KiB));
    space.seal();
    KvCache cache(device, {{16 * KiB, 16 * KiB}, 100, KvLayout::by_plane, pages_of(64 * KiB)});
    BlockPool pool(cache);
    bool needed = false;
    vmmgraph::Borrower engine(
        [&](const vmmgraph::Vacate& asked) -> std::optional<vmmgraph::Vacated> {
            if (needed) {
                throw std::runtime_error("the engine's");
            }
            pool.ask_of(asked.blocks, asked.bytes, {}, [&](const vmmgraph::EvictionRequest& ask) {
                for (std::size_t page = 0; page < ask.page_count; ++page) {
                    pool.free({ask.pages[page].blocks,
                               ask.pages[page].blocks + ask.pages[page].block_count});
                }
            });
            vmmgraph::Vacated gone;
            gone.blocks = pool.unused_of(asked.blocks);
            for (const auto& range : gone.blocks) {
                pool.unback(range);
            }
            return gone;
        });
    EXPECT_EQ(vmmgraph::lendable(arena).first, 384 * KiB);
    vmmgraph::Lease lease = vmmgraph::lend(arena, cache, {0, 8}, engine);
    pool.back({0, 8});
    ASSERT_TRUE(pool.allocate(6).has_value());
    lease.before(nullptr);
    Written(cache).write(5, 7);
    EXPECT_TRUE(Written(cache).holds(5, 7));
    EXPECT_EQ(lease.bytes(), 256 * KiB);
    EXPECT_EQ(arena.stats().lent_bytes, 256 * KiB);
    EXPECT_EQ(vmmgraph::leases(space), std::vector<std::uint64_t>{lease.number()});
    int launched = 0;
    EXPECT_THROW(space.replay(nullptr, [&] { ++launched; }), vmmgraph::Error);
    lease.recall(1s, 1);
    EXPECT_EQ(lease.bytes(), 128 * KiB);
    EXPECT_EQ(pool.stats().in_use, 4U);
    needed = true;
    EXPECT_THROW(vmmgraph::recall(arena, space, 1s), vmmgraph::Error);
    needed = false;
    vmmgraph::set_recall(arena, 1s);
    space.replay(nullptr, [&] { ++launched; });
    EXPECT_EQ(launched, 1);
    EXPECT_EQ(lease.bytes(), 0U);
    EXPECT_TRUE(cache.backed().empty());
    ElasticBuffer buffer(device, MiB, pages_of(64 * KiB));
    const vmmgraph::Lease other = vmmgraph::lend(arena, buffer, 0, 128 * KiB, engine);
    EXPECT_EQ(vmmgraph::lendable(arena), std::pair(256 * KiB, 128 * KiB));
    vmmgraph::recall(arena, 1s);
    EXPECT_EQ(other.bytes(), 0U);
}

TEST(Elastic, AnEnginesCacheMakesRoomForACapture) {
    Device device = open_device();
    KvCache cache(device, {{64 * KiB, 64 * KiB}, 64, KvLayout::by_plane, pages_of(64 * KiB)});
    cache.grow_to(64);
    device.set_budget(8 * MiB);
    vmmgraph::ArenaOptions pages;
    pages.small_page_bytes = pages.large_page_bytes = 64 * KiB;
    vmmgraph::SharedVmmAllocator arena(device, pages);
    std::vector<std::uint64_t> asked;
    std::uint64_t blocks = 64;
    {
        const vmmgraph::Reclaimer throws(
            device, [](std::uint64_t) -> std::uint64_t { throw std::runtime_error("lost"); }, 5);
        const vmmgraph::Reclaimer nothing(device, {}, 6);
        const vmmgraph::Reclaimer engine(
            device,
            [&](std::uint64_t bytes) {
                asked.push_back(bytes);
                const auto fewer = (bytes + 128 * KiB - 1) / (128 * KiB);
                blocks -= fewer;
                cache.shrink_to(blocks);
                return fewer * 128 * KiB;
            },
            7);
        auto space = arena.open_space();
        void* const block = space.allocate(3 * MiB, nullptr);
        // Once, for all 48 pages.
        EXPECT_EQ(asked, (std::vector<std::uint64_t>{3 * MiB}));
        EXPECT_EQ(cache.stats().blocks, 40U);
        space.free(block);
    }
    // The cache's memory would not help.
    {
        const vmmgraph::Reclaimer engine(
            device, [&](std::uint64_t bytes) { return asked.push_back(bytes), bytes; }, 7);
        arena.set_budget(MiB);
        auto space = arena.open_space();
        EXPECT_THROW(static_cast<void>(space.allocate(4 * MiB, nullptr)), vmmgraph::OutOfMemory);
        arena.set_budget(0);
    }
    auto space = arena.open_space();
    EXPECT_THROW(static_cast<void>(space.allocate(8 * MiB, nullptr)), vmmgraph::OutOfMemory);
    EXPECT_EQ(asked.size(), 1U);
}

}  // namespace
