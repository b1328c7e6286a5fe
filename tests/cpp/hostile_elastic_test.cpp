// Elastic memory in the C interface: all caller errors.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t KiB = 1 << 10;
constexpr std::uint64_t MiB = 1 << 20;

using Call = std::pair<std::string, std::function<vmmgraph_status_t()>>;

class HostileElastic : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_elastic_buffer_t buffer = nullptr;
    vmmgraph_kv_cache_t cache = nullptr;
    vmmgraph_block_pool_t pool = nullptr;

    void SetUp() override {
        const auto options = small_device(7);
        ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
        auto memory = sized<vmmgraph_elastic_options_t>();
        memory.name = "kv";
        memory.page_bytes = 64 * KiB;
        ASSERT_EQ(vmmgraph_elastic_buffer_create(device, 16 * MiB, &memory, &buffer), VMMGRAPH_OK);
        const std::uint64_t planes[] = {16 * KiB, 16 * KiB};
        auto given = sized<vmmgraph_kv_options_t>();
        given.planes = planes;
        given.plane_count = 2;
        given.blocks_most = 100;
        given.memory = &memory;
        ASSERT_EQ(vmmgraph_kv_cache_create(device, &given, &cache), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_block_pool_create(100, 4, 32 * KiB, &pool), VMMGRAPH_OK);
    }

    void TearDown() override {
        if (buffer != nullptr) {
            ASSERT_EQ(vmmgraph_elastic_buffer_destroy(buffer), VMMGRAPH_OK);
            ASSERT_EQ(vmmgraph_kv_cache_destroy(cache), VMMGRAPH_OK);
            ASSERT_EQ(vmmgraph_block_pool_destroy(pool), VMMGRAPH_OK);
        }
        close_empty(device);
    }
};

void end(vmmgraph_pending_t pending) {
    if (pending != nullptr) {
        static_cast<void>(vmmgraph_pending_wait(pending, nullptr));
        EXPECT_EQ(vmmgraph_pending_destroy(pending), VMMGRAPH_OK);
    }
}

std::vector<Call> buffer_calls(vmmgraph_elastic_buffer_t buffer) {
    return {
        {"base",
         [=] {
             void* base = nullptr;
             return vmmgraph_elastic_buffer_base(buffer, &base);
         }},
        {"commit", [=] { return vmmgraph_elastic_buffer_commit(buffer, 0, MiB, nullptr); }},
        {"commit_async",
         [=] {
             vmmgraph_pending_t pending = nullptr;
             const auto status = vmmgraph_elastic_buffer_commit_async(buffer, MiB, MiB, &pending);
             end(pending);
             return status;
         }},
        {"decommit",
         [=] { return vmmgraph_elastic_buffer_decommit(buffer, 0, 2 * MiB, nullptr, nullptr); }},
        {"reap", [=] { return vmmgraph_elastic_buffer_reap(buffer, nullptr); }},
        {"before", [=] { return vmmgraph_elastic_buffer_before(buffer, nullptr); }},
        {"set_budget", [=] { return vmmgraph_elastic_buffer_set_budget(buffer, 0); }},
        {"committed",
         [=] {
             std::size_t count = 0;
             return vmmgraph_elastic_buffer_committed(buffer, nullptr, 0, &count);
         }},
        {"stats",
         [=] {
             auto stats = sized<vmmgraph_elastic_stats_t>();
             return vmmgraph_elastic_buffer_stats(buffer, &stats);
         }},
        {"observe",
         [=] {
             vmmgraph_elastic_observer_t observer = nullptr;
             const auto status =
                 vmmgraph_elastic_buffer_observe(buffer, nullptr, nullptr, nullptr, &observer);
             if (observer != nullptr) {
                 EXPECT_EQ(vmmgraph_elastic_observer_destroy(observer), VMMGRAPH_OK);
             }
             return status;
         }},
        {"destroy", [=] { return vmmgraph_elastic_buffer_destroy(buffer); }},
    };
}

std::vector<Call> cache_calls(vmmgraph_kv_cache_t cache) {
    return {
        {"plane",
         [=] {
             auto place = sized<vmmgraph_kv_plane_t>();
             return vmmgraph_kv_cache_plane(cache, 1, &place);
         }},
        {"grow_to", [=] { return vmmgraph_kv_cache_grow_to(cache, 10, nullptr); }},
        {"commit", [=] { return vmmgraph_kv_cache_commit(cache, 20, 30, nullptr); }},
        {"commit_async",
         [=] {
             vmmgraph_pending_t pending = nullptr;
             const auto status = vmmgraph_kv_cache_commit_async(cache, 5, 15, &pending);
             end(pending);
             return status;
         }},
        {"shrink_to",
         [=] { return vmmgraph_kv_cache_shrink_to(cache, 7, nullptr, 0, nullptr, nullptr); }},
        {"release", [=] { return vmmgraph_kv_cache_release(cache, 3, 9, nullptr); }},
        {"set_limit", [=] { return vmmgraph_kv_cache_set_limit(cache, 100, 1, nullptr); }},
        {"backed",
         [=] {
             std::size_t count = 0;
             return vmmgraph_kv_cache_backed(cache, nullptr, 0, &count);
         }},
        {"beyond",
         [=] {
             std::size_t count = 0;
             return vmmgraph_kv_cache_beyond(cache, nullptr, 0, &count);
         }},
        {"reap", [=] { return vmmgraph_kv_cache_reap(cache, nullptr); }},
        {"before", [=] { return vmmgraph_kv_cache_before(cache, nullptr); }},
        {"set_budget", [=] { return vmmgraph_kv_cache_set_budget(cache, 0); }},
        {"stats",
         [=] {
             auto stats = sized<vmmgraph_kv_stats_t>();
             return vmmgraph_kv_cache_stats(cache, &stats);
         }},
        {"memory",
         [=] {
             auto stats = sized<vmmgraph_elastic_stats_t>();
             return vmmgraph_kv_cache_memory(cache, &stats);
         }},
        {"observe",
         [=] {
             vmmgraph_elastic_observer_t observer = nullptr;
             const auto status =
                 vmmgraph_kv_cache_observe(cache, nullptr, nullptr, nullptr, &observer);
             if (observer != nullptr) {
                 EXPECT_EQ(vmmgraph_elastic_observer_destroy(observer), VMMGRAPH_OK);
             }
             return status;
         }},
        {"destroy", [=] { return vmmgraph_kv_cache_destroy(cache); }},
    };
}

std::vector<Call> pool_calls(vmmgraph_block_pool_t pool) {
    return {
        {"back", [=] { return vmmgraph_block_pool_back(pool, 0, 40); }},
        {"unback", [=] { return vmmgraph_block_pool_unback(pool, 20, 40, nullptr); }},
        {"allocate",
         [=] {
             std::uint64_t block = 0;
             std::int32_t there = 0;
             const auto status = vmmgraph_block_pool_allocate(pool, 1, &block, &there);
             return there != 0 ? vmmgraph_block_pool_free(pool, &block, 1, nullptr) : status;
         }},
        {"reserve",
         [=] {
             std::int32_t there = 0;
             return vmmgraph_block_pool_reserve(pool, 2, &there);
         }},
        {"unreserve", [=] { return vmmgraph_block_pool_unreserve(pool, 1); }},
        {"allocate_reserved",
         [=] {
             std::uint64_t block = 0;
             std::int32_t there = 0;
             const auto status = vmmgraph_block_pool_allocate_reserved(pool, 1, &block, &there);
             return there != 0 ? vmmgraph_block_pool_free(pool, &block, 1, nullptr) : status;
         }},
        {"free", [=] { return vmmgraph_block_pool_free(pool, nullptr, 0, nullptr); }},
        {"set_limit", [=] { return vmmgraph_block_pool_set_limit(pool, 60, nullptr); }},
        {"used",
         [=] {
             std::size_t count = 0;
             return vmmgraph_block_pool_used(pool, 0, ~std::uint64_t{0}, nullptr, 0, &count);
         }},
        {"shortfall",
         [=] {
             std::size_t count = 0;
             std::int32_t there = 0;
             return vmmgraph_block_pool_shortfall(pool, 50, nullptr, 0, &count, &there);
         }},
        {"surplus",
         [=] {
             std::size_t count = 0;
             return vmmgraph_block_pool_surplus(pool, 0, nullptr, 0, &count);
         }},
        {"ask",
         [=] {
             return vmmgraph_block_pool_ask(
                 pool, MiB, 0, nullptr, [](const vmmgraph_ask_t*, void*) {}, nullptr, nullptr);
         }},
        {"stats",
         [=] {
             auto stats = sized<vmmgraph_block_pool_stats_t>();
             return vmmgraph_block_pool_stats(pool, &stats);
         }},
        {"destroy", [=] { return vmmgraph_block_pool_destroy(pool); }},
    };
}

TEST_F(HostileElastic, HandlesThatAreNone) {
    const auto destroyed = buffer;
    ASSERT_EQ(vmmgraph_elastic_buffer_destroy(buffer), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_kv_cache_destroy(cache), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_block_pool_destroy(pool), VMMGRAPH_OK);
    buffer = nullptr;
    for (const std::uint64_t value :
         {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0},
          reinterpret_cast<std::uint64_t>(destroyed), reinterpret_cast<std::uint64_t>(device)}) {
        for (const auto& [name, call] : buffer_calls(garbage<vmmgraph_elastic_buffer_t>(value))) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        for (const auto& [name, call] : cache_calls(garbage<vmmgraph_kv_cache_t>(value))) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        for (const auto& [name, call] : pool_calls(garbage<vmmgraph_block_pool_t>(value))) {
            // Zero blocks still need a valid pool.
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        std::int32_t number = 0;
        const auto pending = garbage<vmmgraph_pending_t>(value);
        EXPECT_EQ(vmmgraph_pending_done(pending, &number), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_pending_wait(pending, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_pending_destroy(pending), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_elastic_observer_destroy(garbage<vmmgraph_elastic_observer_t>(value)),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    vmmgraph_kv_cache_t made = nullptr;
    auto given = sized<vmmgraph_kv_options_t>();
    EXPECT_EQ(vmmgraph_elastic_buffer_create(garbage<vmmgraph_device_t>(8), MiB, nullptr, &buffer),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(vmmgraph_kv_cache_create(garbage<vmmgraph_device_t>(8), &given, &made),
              VMMGRAPH_ERROR_INVALID_HANDLE);
}

TEST_F(HostileElastic, NullAndNonsenseOfBuffers) {
    vmmgraph_elastic_buffer_t made = nullptr;
    EXPECT_EQ(vmmgraph_elastic_buffer_create(device, MiB, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_elastic_buffer_create(device, 0, nullptr, &made),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_elastic_buffer_create(device, ~std::uint64_t{0}, nullptr, &made),
              VMMGRAPH_ERROR_INVALID_SIZE);
    auto options = sized<vmmgraph_elastic_options_t>();
    options.page_bytes = 1000;
    EXPECT_EQ(vmmgraph_elastic_buffer_create(device, MiB, &options, &made),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_NE(last_message().find("1000"), std::string::npos);
    options.struct_size = 4;
    EXPECT_EQ(vmmgraph_elastic_buffer_create(device, MiB, &options, &made),
              VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(made, nullptr);

    EXPECT_EQ(vmmgraph_elastic_buffer_base(buffer, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_elastic_buffer_stats(buffer, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_elastic_buffer_committed(buffer, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_elastic_buffer_observe(buffer, nullptr, nullptr, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    const std::uint64_t huge = ~std::uint64_t{0};
    for (const auto& [offset, bytes] : {std::pair{std::uint64_t{0}, 16 * MiB + 1},
                                        {16 * MiB, std::uint64_t{1}},
                                        {huge, huge},
                                        {std::uint64_t{1}, huge}}) {
        EXPECT_EQ(vmmgraph_elastic_buffer_commit(buffer, offset, bytes, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        vmmgraph_pending_t pending = nullptr;
        EXPECT_EQ(vmmgraph_elastic_buffer_commit_async(buffer, offset, bytes, &pending),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(pending, nullptr);
        EXPECT_EQ(vmmgraph_elastic_buffer_decommit(buffer, offset, bytes, nullptr, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    auto done = sized<vmmgraph_committed_t>();
    done.struct_size = 8;
    EXPECT_EQ(vmmgraph_elastic_buffer_commit(buffer, 0, MiB, &done), VMMGRAPH_ERROR_STRUCT_SIZE);
    auto fence = sized<vmmgraph_fence_t>();
    fence.stream_count = 1;
    EXPECT_EQ(vmmgraph_elastic_buffer_decommit(buffer, 0, MiB, &fence, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    void* events[] = {nullptr};
    fence = sized<vmmgraph_fence_t>();
    fence.events = events;
    fence.event_count = 1;
    EXPECT_EQ(vmmgraph_elastic_buffer_decommit(buffer, 0, MiB, &fence, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    events[0] = garbage<void*>(0x77770);
    ASSERT_EQ(vmmgraph_elastic_buffer_commit(buffer, 0, MiB, nullptr), VMMGRAPH_OK);
    EXPECT_NE(vmmgraph_elastic_buffer_decommit(buffer, 0, MiB, &fence, nullptr), VMMGRAPH_OK);
    auto stats = sized<vmmgraph_elastic_stats_t>();
    ASSERT_EQ(vmmgraph_elastic_buffer_stats(buffer, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.committed_bytes, MiB);
    EXPECT_EQ(stats.pending_unmap_bytes, 0U);
}

TEST_F(HostileElastic, NullAndNonsenseOfCaches) {
    vmmgraph_kv_cache_t made = nullptr;
    const std::uint64_t planes[] = {4096, 0};
    auto options = sized<vmmgraph_kv_options_t>();
    EXPECT_EQ(vmmgraph_kv_cache_create(device, nullptr, &made), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_create(device, &options, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_create(device, &options, &made), VMMGRAPH_ERROR_INVALID_SIZE);
    options.plane_count = 1;
    options.blocks_most = 10;
    EXPECT_EQ(vmmgraph_kv_cache_create(device, &options, &made), VMMGRAPH_ERROR_NULL_ARGUMENT);
    options.planes = planes;
    options.layout = 2;
    EXPECT_EQ(vmmgraph_kv_cache_create(device, &options, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    options.layout = VMMGRAPH_KV_BY_BLOCK;
    options.plane_count = 2;
    EXPECT_EQ(vmmgraph_kv_cache_create(device, &options, &made), VMMGRAPH_ERROR_INVALID_SIZE);
    options.plane_count = 1;
    options.blocks_most = ~std::uint64_t{0};
    EXPECT_EQ(vmmgraph_kv_cache_create(device, &options, &made), VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(made, nullptr);

    auto place = sized<vmmgraph_kv_plane_t>();
    EXPECT_EQ(vmmgraph_kv_cache_plane(cache, 2, &place), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_plane(cache, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_stats(cache, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_memory(cache, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_backed(cache, nullptr, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_beyond(cache, nullptr, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_observe(cache, nullptr, nullptr, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (const auto& [first, end] : {std::pair{0, 101}, {7, 6}}) {
        const auto from = static_cast<std::uint64_t>(first), to = static_cast<std::uint64_t>(end);
        EXPECT_EQ(vmmgraph_kv_cache_commit(cache, from, to, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_kv_cache_commit_async(cache, from, to, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_kv_cache_release(cache, from, to, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(vmmgraph_kv_cache_grow_to(cache, 101, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_shrink_to(cache, 101, nullptr, 0, nullptr, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_kv_cache_shrink_to(cache, 1, nullptr, 1, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    // Invalid ranges protect no blocks.
    ASSERT_EQ(vmmgraph_kv_cache_grow_to(cache, 50, nullptr), VMMGRAPH_OK);
    const vmmgraph_block_range_t backwards[] = {{40, 30}, {~std::uint64_t{0}, 0}, {200, 300}};
    std::uint64_t left = 77;
    EXPECT_EQ(vmmgraph_kv_cache_shrink_to(cache, 10, backwards, 3, nullptr, &left), VMMGRAPH_OK);
    EXPECT_EQ(left, 0U);
    auto stats = sized<vmmgraph_kv_stats_t>();
    stats.struct_size = 16;
    stats.blocks = 99;
    ASSERT_EQ(vmmgraph_kv_cache_stats(cache, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.planes, 2U);
    EXPECT_EQ(stats.blocks, 99U);
}

TEST_F(HostileElastic, NullAndNonsenseOfPoolsAndPolicies) {
    vmmgraph_block_pool_t made = nullptr;
    EXPECT_EQ(vmmgraph_block_pool_create(10, 1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_create(0, 1, 1, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_create(10, 0, 1, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_create(10, 1, 0, &made), VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_block_pool_create(10, 1, std::uint64_t{1} << 63, &made),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_block_pool_create(1 << 20, 16, std::uint64_t{1} << 44, &made),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_block_pool_create(~std::uint64_t{0}, 1, 1, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    std::uint64_t blocks[4] = {0};
    std::int32_t there = 7;
    EXPECT_EQ(vmmgraph_block_pool_allocate(pool, 4, nullptr, &there), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_allocate(pool, 4, blocks, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_allocate(pool, ~std::uint64_t{0}, blocks, &there),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_allocate_reserved(pool, 4, nullptr, &there),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_reserve(pool, 4, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(there, 7);
    EXPECT_EQ(vmmgraph_block_pool_allocate(pool, 4, blocks, &there), VMMGRAPH_OK);
    EXPECT_EQ(there, 0);
    ASSERT_EQ(vmmgraph_block_pool_back(pool, 0, 100), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_block_pool_back(pool, ~std::uint64_t{0}, ~std::uint64_t{0}), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_block_pool_unback(pool, 50, 20, nullptr), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_block_pool_allocate(pool, 4, blocks, &there), VMMGRAPH_OK);
    ASSERT_EQ(there, 1);
    const std::uint64_t twice[] = {blocks[0], blocks[1], blocks[0]};
    EXPECT_EQ(vmmgraph_block_pool_free(pool, twice, 3, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const std::uint64_t foreign[] = {blocks[0], ~std::uint64_t{0}};
    EXPECT_EQ(vmmgraph_block_pool_free(pool, foreign, 2, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_free(pool, nullptr, 2, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_free(pool, blocks, 4, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_block_pool_ask(pool, 1, 0, nullptr, nullptr, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_shortfall(pool, 1, nullptr, 0, nullptr, &there),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    std::size_t count = 0;
    EXPECT_EQ(vmmgraph_block_pool_shortfall(pool, 1, nullptr, 0, &count, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_surplus(pool, 0, nullptr, 3, &count),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_used(pool, 0, 100, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_stats(pool, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
}

struct Called {
    vmmgraph_elastic_buffer_t buffer = nullptr;
    std::atomic<int> times{0};
};

void call_back(const vmmgraph_shown_t* shown, void* user) {
    auto* const called = static_cast<Called*>(user);
    ++called->times;
    EXPECT_STREQ(shown->name, "kv");
    // The calling operation is moving these pages.
    EXPECT_EQ(vmmgraph_elastic_buffer_commit(called->buffer, 0, MiB, nullptr),
              VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_elastic_buffer_decommit(called->buffer, 0, MiB, nullptr, nullptr),
              VMMGRAPH_ERROR_WRONG_STATE);
    auto stats = sized<vmmgraph_elastic_stats_t>();
    EXPECT_EQ(vmmgraph_elastic_buffer_stats(called->buffer, &stats), VMMGRAPH_OK);
}

TEST_F(HostileElastic, ObserversThatCallBackAreToldSo) {
    Called called;
    called.buffer = buffer;
    vmmgraph_elastic_observer_t observer = nullptr;
    ASSERT_EQ(vmmgraph_elastic_buffer_observe(buffer, call_back, call_back, &called, &observer),
              VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_elastic_buffer_commit(buffer, 0, MiB, nullptr), VMMGRAPH_OK);
    std::uint64_t gone = 0;
    ASSERT_EQ(vmmgraph_elastic_buffer_decommit(buffer, 0, MiB, nullptr, &gone), VMMGRAPH_OK);
    EXPECT_EQ(gone, MiB);
    EXPECT_EQ(called.times, 2);
    ASSERT_EQ(vmmgraph_elastic_observer_destroy(observer), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_elastic_observer_destroy(observer), VMMGRAPH_ERROR_INVALID_HANDLE);
    ASSERT_EQ(vmmgraph_elastic_buffer_commit(buffer, 0, MiB, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(called.times, 2);
}

TEST_F(HostileElastic, AnEngineThatIsAskedMayCallEverything) {
    ASSERT_EQ(vmmgraph_block_pool_back(pool, 0, 100), VMMGRAPH_OK);
    std::vector<std::uint64_t> blocks(100);
    std::int32_t there = 0;
    ASSERT_EQ(vmmgraph_block_pool_allocate(pool, 100, blocks.data(), &there), VMMGRAPH_OK);
    const auto may = [](std::uint64_t block, void* user) {
        auto stats = sized<vmmgraph_block_pool_stats_t>();
        EXPECT_EQ(vmmgraph_block_pool_stats(static_cast<vmmgraph_block_pool_t>(user), &stats),
                  VMMGRAPH_OK);
        return std::int32_t{block >= 8};
    };
    const auto vacate = [](const vmmgraph_ask_t* ask, void* user) {
        EXPECT_EQ(ask->bytes, 200 * KiB);
        EXPECT_EQ(ask->by, 12U);
        EXPECT_EQ(ask->page_count, 2U);
        for (std::size_t i = 0; i < ask->page_count; ++i) {
            EXPECT_GE(ask->pages[i].page, 2U);
            EXPECT_EQ(
                vmmgraph_block_pool_free(static_cast<vmmgraph_block_pool_t>(user),
                                         ask->pages[i].blocks, ask->pages[i].block_count, nullptr),
                VMMGRAPH_OK);
        }
    };
    std::uint64_t empty = 0;
    ASSERT_EQ(vmmgraph_block_pool_ask(pool, 200 * KiB, 12, may, vacate, pool, &empty), VMMGRAPH_OK);
    EXPECT_EQ(empty, 2 * 4 * 32 * KiB);
}

TEST_F(HostileElastic, AHandleMayGoWhileItsCommitIsUnderWay) {
    vmmgraph_pending_t pending = nullptr;
    ASSERT_EQ(vmmgraph_kv_cache_commit_async(cache, 0, 100, &pending), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_kv_cache_destroy(cache), VMMGRAPH_OK);
    auto done = sized<vmmgraph_committed_t>();
    ASSERT_EQ(vmmgraph_pending_wait(pending, &done), VMMGRAPH_OK);
    EXPECT_EQ(done.bytes, 2 * 25 * 64 * KiB);
    ASSERT_EQ(vmmgraph_pending_wait(pending, nullptr), VMMGRAPH_OK);
    std::int32_t over = 0;
    ASSERT_EQ(vmmgraph_pending_done(pending, &over), VMMGRAPH_OK);
    EXPECT_EQ(over, 1);
    EXPECT_EQ(vmmgraph_pending_done(pending, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    ASSERT_EQ(vmmgraph_pending_destroy(pending), VMMGRAPH_OK);
    const std::uint64_t plane = 4096;
    auto given = sized<vmmgraph_kv_options_t>();
    given.planes = &plane;
    given.plane_count = 1;
    given.blocks_most = 10;
    ASSERT_EQ(vmmgraph_kv_cache_create(device, &given, &cache), VMMGRAPH_OK);
}

TEST_F(HostileElastic, ManyThreadsOnOneHandle) {
    std::vector<std::thread> threads;
    std::atomic<int> bad{0};
    for (int thread = 0; thread < 6; ++thread) {
        threads.emplace_back([&, thread] {
            for (int round = 0; round < 100; ++round) {
                const auto calls = thread % 3 == 0   ? buffer_calls(buffer)
                                   : thread % 3 == 1 ? cache_calls(cache)
                                                     : pool_calls(pool);
                const auto& call =
                    calls[static_cast<std::size_t>(thread * 7 + round) % (calls.size() - 1)];
                const auto status = call.second();
                bad += status == VMMGRAPH_OK || status == VMMGRAPH_ERROR_OVER_BUDGET ? 0 : 1;
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(bad, 0);
}

class HostileLease : public HostileElastic {
protected:
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;

    void SetUp() override {
        HostileElastic::SetUp();
        auto options = sized<vmmgraph_arena_options_t>();
        options.small_page_bytes = 4 * KiB;
        options.large_page_bytes = 64 * KiB;
        options.least_bytes = 128 * KiB;
        ASSERT_EQ(vmmgraph_arena_create(device, &options, &arena), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_open(arena, &space), VMMGRAPH_OK);
        void* block = nullptr;
        ASSERT_EQ(vmmgraph_space_allocate(space, 512 * KiB, nullptr, &block), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_free(space, block), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_seal(space, 0, nullptr), VMMGRAPH_OK);
    }

    void TearDown() override {
        ASSERT_EQ(vmmgraph_space_destroy(space), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
        HostileElastic::TearDown();
    }

    // Leaves the replay slot at once.
    vmmgraph_status_t replay() const {
        const auto status = vmmgraph_space_enter(space, nullptr);
        return status == VMMGRAPH_OK ? vmmgraph_space_leave(space) : status;
    }
};

// Vacates all requested blocks.
struct Giving {
    vmmgraph_lease_t lease = nullptr;
    std::int32_t refuses = 0;
    vmmgraph_vacating_t last = nullptr;
    std::uint64_t bytes = 0;
    int times = 0;
};

std::int32_t give(const vmmgraph_vacate_t* asked, vmmgraph_vacating_t vacating, void* user) {
    auto& giving = *static_cast<Giving*>(user);
    ++giving.times;
    giving.last = vacating;
    giving.bytes = asked->bytes;
    EXPECT_EQ(asked->struct_size, sizeof(vmmgraph_vacate_t));
    EXPECT_LE(asked->micros, 1'000'000U);
    std::uint64_t number = 0;
    EXPECT_EQ(vmmgraph_lease_bytes(giving.lease, &number, nullptr), VMMGRAPH_OK);
    if (number == asked->lease) {
        // Would deadlock.
        EXPECT_EQ(vmmgraph_lease_recall(giving.lease, 0, 1000), VMMGRAPH_ERROR_WRONG_STATE);
    }
    EXPECT_EQ(vmmgraph_vacating_add(vacating, 9, 8), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_vacating_add(vacating, 1'000'000, ~std::uint64_t{0}), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_vacating_behind(vacating, nullptr), VMMGRAPH_OK);
    auto fence = sized<vmmgraph_fence_t>();
    fence.stream_count = 1;
    EXPECT_EQ(vmmgraph_vacating_behind(vacating, &fence), VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (std::size_t i = 0; i < asked->range_count; ++i) {
        EXPECT_EQ(vmmgraph_vacating_add(vacating, asked->ranges[i].first, asked->ranges[i].end),
                  VMMGRAPH_OK);
    }
    return giving.refuses;
}

TEST_F(HostileLease, HandlesThatAreNoneAndNulls) {
    Giving giving;
    vmmgraph_lease_t lease = nullptr;
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0},
                                      reinterpret_cast<std::uint64_t>(device)}) {
        const auto none = garbage<vmmgraph_lease_t>(value);
        EXPECT_EQ(vmmgraph_lease_bytes(none, nullptr, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_lease_before(none, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_lease_recall(none, 0, 0), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_lease_destroy(none), VMMGRAPH_ERROR_INVALID_HANDLE);
        const auto vacating = garbage<vmmgraph_vacating_t>(value);
        EXPECT_EQ(vmmgraph_vacating_add(vacating, 0, 1), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_vacating_behind(vacating, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        const auto no_arena = garbage<vmmgraph_arena_t>(value);
        EXPECT_EQ(vmmgraph_arena_lend(no_arena, buffer, 0, 64 * KiB, give, &giving, &lease),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_lend_blocks(no_arena, cache, 0, 4, give, &giving, &lease),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_set_recall(no_arena, 5), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_recall(no_arena, nullptr, 5), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_lendable(no_arena, nullptr, nullptr),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        std::size_t count = 0;
        EXPECT_EQ(vmmgraph_space_leases(garbage<vmmgraph_space_t>(value), nullptr, 0, &count),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_lend(arena, garbage<vmmgraph_elastic_buffer_t>(value), 0, 64 * KiB,
                                      give, &giving, &lease),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_lend_blocks(arena, garbage<vmmgraph_kv_cache_t>(value), 0, 4, give,
                                             &giving, &lease),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        if (value != 0) {
            // Null means all leases.
            EXPECT_EQ(vmmgraph_arena_recall(arena, garbage<vmmgraph_space_t>(value), 5),
                      VMMGRAPH_ERROR_INVALID_HANDLE);
        }
        const auto no_pool = garbage<vmmgraph_block_pool_t>(value);
        EXPECT_EQ(vmmgraph_block_pool_unused(no_pool, nullptr, 0, nullptr, 0, &count),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(
            vmmgraph_block_pool_ask_of(
                no_pool, nullptr, 0, 0, nullptr, [](const vmmgraph_ask_t*, void*) {}, nullptr),
            VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    EXPECT_EQ(vmmgraph_arena_lend(arena, buffer, 0, 64 * KiB, nullptr, nullptr, &lease),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_lend(arena, buffer, 0, 64 * KiB, give, &giving, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_lend_blocks(arena, cache, 0, 4, nullptr, nullptr, &lease),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_lend_blocks(arena, cache, 0, 4, give, &giving, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_leases(space, nullptr, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_lendable(arena, nullptr, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_block_pool_ask_of(pool, nullptr, 0, 0, nullptr, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_block_pool_unused(pool, nullptr, 3, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    const auto huge = ~std::uint64_t{0};
    for (const auto& [offset, bytes] : {std::pair<std::uint64_t, std::uint64_t>{0, 0},
                                        {0, KiB},
                                        {KiB, 64 * KiB},
                                        {huge, huge},
                                        {0, huge},
                                        {16 * MiB, 64 * KiB},
                                        {0, 448 * KiB}}) {
        EXPECT_NE(vmmgraph_arena_lend(arena, buffer, offset, bytes, give, &giving, &lease),
                  VMMGRAPH_OK)
            << offset << " " << bytes;
    }
    for (const auto& [first, end] : {std::pair<std::uint64_t, std::uint64_t>{4, 4},
                                     {4, 0},
                                     {96, 101},
                                     {huge, huge},
                                     {0, huge},
                                     {0, 13}}) {
        EXPECT_NE(vmmgraph_arena_lend_blocks(arena, cache, first, end, give, &giving, &lease),
                  VMMGRAPH_OK)
            << first << " " << end;
    }
    EXPECT_EQ(lease, nullptr);
    EXPECT_EQ(giving.times, 0);
    EXPECT_EQ(replay(), VMMGRAPH_OK);
}

TEST_F(HostileLease, ABorrowerMaySayAndCallAnything) {
    Giving giving;
    std::uint64_t lendable = 0;
    std::uint64_t lent = 0;
    ASSERT_EQ(vmmgraph_arena_lendable(arena, &lendable, &lent), VMMGRAPH_OK);
    EXPECT_EQ(lendable, 384 * KiB);
    ASSERT_EQ(vmmgraph_arena_lend_blocks(arena, cache, 0, 8, give, &giving, &giving.lease),
              VMMGRAPH_OK);
    vmmgraph_lease_t second = nullptr;
    ASSERT_EQ(vmmgraph_arena_lend(arena, buffer, 0, 128 * KiB, give, &giving, &second),
              VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_arena_lendable(arena, &lendable, &lent), VMMGRAPH_OK);
    EXPECT_EQ(lendable, 0U);
    EXPECT_EQ(lent, 384 * KiB);
    std::uint64_t numbers[2] = {};
    std::size_t count = 0;
    ASSERT_EQ(vmmgraph_space_leases(space, numbers, 2, &count), VMMGRAPH_OK);
    EXPECT_EQ(count, 2U);
    EXPECT_EQ(replay(), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_lease_before(giving.lease, nullptr), VMMGRAPH_OK);
    giving.refuses = 1;
    EXPECT_EQ(vmmgraph_arena_recall(arena, space, 1'000'000), VMMGRAPH_ERROR_WRONG_STATE);
    std::uint64_t number = 0;
    std::uint64_t bytes = 0;
    ASSERT_EQ(vmmgraph_lease_bytes(giving.lease, &number, &bytes), VMMGRAPH_OK);
    EXPECT_EQ(number, numbers[0]);
    EXPECT_EQ(bytes, 256 * KiB);
    giving.refuses = 0;
    // Valid during the callback only.
    EXPECT_EQ(vmmgraph_vacating_add(giving.last, 0, 1), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(vmmgraph_vacating_behind(giving.last, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
    // Also the destroyed handle's lease.
    ASSERT_EQ(vmmgraph_lease_destroy(second), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_lease_destroy(second), VMMGRAPH_ERROR_INVALID_HANDLE);
    ASSERT_EQ(vmmgraph_arena_set_recall(arena, 1'000'000), VMMGRAPH_OK);
    EXPECT_EQ(replay(), VMMGRAPH_OK);
    EXPECT_EQ(giving.times, 4);
    ASSERT_EQ(vmmgraph_arena_lendable(arena, &lendable, &lent), VMMGRAPH_OK);
    EXPECT_EQ(lent, 0U);
    ASSERT_EQ(vmmgraph_lease_recall(giving.lease, 0, 0), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_arena_recall(arena, nullptr, 0), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_lease_destroy(giving.lease), VMMGRAPH_OK);
}

TEST_F(HostileLease, APoolIsAskedForSomePagesOnly) {
    ASSERT_EQ(vmmgraph_block_pool_back(pool, 0, 100), VMMGRAPH_OK);
    std::vector<std::uint64_t> blocks(12);
    std::int32_t there = 0;
    ASSERT_EQ(vmmgraph_block_pool_allocate(pool, 12, blocks.data(), &there), VMMGRAPH_OK);
    // The ranges need one page more than is free.
    const vmmgraph_block_range_t among[] = {{5, 6}, {12, 16}, {200, ~std::uint64_t{0}}};
    vmmgraph_block_range_t unused[2] = {};
    std::size_t count = 0;
    ASSERT_EQ(vmmgraph_block_pool_unused(pool, among, 3, unused, 2, &count), VMMGRAPH_OK);
    ASSERT_EQ(count, 1U);
    EXPECT_EQ(unused[0].first, 12U);
    const auto evict = [](const vmmgraph_ask_t* ask, void* user) {
        ASSERT_EQ(ask->page_count, 1U);
        EXPECT_EQ(ask->pages[0].page, 1U);
        EXPECT_EQ(
            vmmgraph_block_pool_free(static_cast<vmmgraph_block_pool_t>(user), ask->pages[0].blocks,
                                     ask->pages[0].block_count, nullptr),
            VMMGRAPH_OK);
    };
    ASSERT_EQ(vmmgraph_block_pool_ask_of(pool, among, 3, 200 * KiB, nullptr, evict, pool),
              VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_block_pool_unused(pool, among, 3, unused, 2, &count), VMMGRAPH_OK);
    EXPECT_EQ(count, 2U);
    EXPECT_EQ(unused[0].first, 4U);
}

}  // namespace
