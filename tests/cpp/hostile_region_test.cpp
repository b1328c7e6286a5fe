// Region functions of the C interface: all caller errors.
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

constexpr std::uint64_t MiB = 1 << 20;

using Call = std::pair<std::string, std::function<vmmgraph_status_t()>>;

class HostileRegion : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_region_t region = nullptr;

    void SetUp() override {
        const auto options = small_device(4);
        ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_region_create(device, "weights", nullptr, &region), VMMGRAPH_OK);
    }

    void TearDown() override {
        if (region != nullptr) {
            ASSERT_EQ(vmmgraph_region_destroy(region), VMMGRAPH_OK);
        }
        close_empty(device);
    }

    void* allocate(std::uint64_t bytes, std::int32_t policy = VMMGRAPH_POLICY_DEFAULT) {
        void* block = nullptr;
        EXPECT_EQ(vmmgraph_region_allocate(region, bytes, policy, nullptr, &block), VMMGRAPH_OK);
        return block;
    }
};

std::vector<Call> region_calls(vmmgraph_region_t region) {
    return {
        {"allocate",
         [=] {
             void* block = nullptr;
             return vmmgraph_region_allocate(region, 512, VMMGRAPH_POLICY_DEFAULT, nullptr, &block);
         }},
        {"free", [=] { return vmmgraph_region_free(region, nullptr); }},
        {"record_stream", [=] { return vmmgraph_region_record_stream(region, nullptr, nullptr); }},
        {"mark_written", [=] { return vmmgraph_region_mark_written(region, nullptr); }},
        {"get_backup", [=] { return vmmgraph_region_get_backup(region, nullptr, 0, nullptr, 0); }},
        {"before", [=] { return vmmgraph_region_before(region, nullptr); }},
        {"set_budget", [=] { return vmmgraph_region_set_budget(region, 0); }},
        {"stats",
         [=] {
             auto stats = sized<vmmgraph_region_stats_t>();
             return vmmgraph_region_stats(region, &stats);
         }},
        {"pause", [=] { return vmmgraph_region_pause(region, nullptr, nullptr); }},
        {"resume", [=] { return vmmgraph_region_resume(region, 0, nullptr); }},
        {"destroy", [=] { return vmmgraph_region_destroy(region); }},
    };
}

std::vector<Call> device_calls(vmmgraph_device_t device) {
    return {
        {"create",
         [=] {
             vmmgraph_region_t region = nullptr;
             return vmmgraph_region_create(device, "tag", nullptr, &region);
         }},
        {"pause", [=] { return vmmgraph_device_pause(device, nullptr, 0, nullptr, nullptr); }},
        {"resume", [=] { return vmmgraph_device_resume(device, nullptr, 0, 0, nullptr); }},
        {"resume_async",
         [=] { return vmmgraph_device_resume_async(device, nullptr, 0, 0, nullptr, nullptr); }},
        {"prepare_backup", [=] { return vmmgraph_device_prepare_backup(device, 0); }},
        {"set_host_budget", [=] { return vmmgraph_device_set_host_budget(device, 0); }},
        {"trim_host", [=] { return vmmgraph_device_trim_host(device, nullptr); }},
        {"host_stats",
         [=] {
             auto stats = sized<vmmgraph_host_stats_t>();
             return vmmgraph_device_host_stats(device, &stats);
         }},
        {"add_pause_hooks",
         [=] {
             vmmgraph_pause_hooks_t hooks = nullptr;
             return vmmgraph_device_add_pause_hooks(device, "", nullptr, nullptr, nullptr, &hooks);
         }},
    };
}

TEST_F(HostileRegion, HandlesThatAreNone) {
    const auto destroyed = region;
    ASSERT_EQ(vmmgraph_region_destroy(region), VMMGRAPH_OK);
    region = nullptr;
    for (const std::uint64_t value :
         {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0},
          reinterpret_cast<std::uint64_t>(destroyed), reinterpret_cast<std::uint64_t>(device)}) {
        for (const auto& [name, call] : region_calls(garbage<vmmgraph_region_t>(value))) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        EXPECT_EQ(vmmgraph_pause_hooks_destroy(garbage<vmmgraph_pause_hooks_t>(value)),
                  VMMGRAPH_ERROR_INVALID_HANDLE);
        const auto ready = garbage<vmmgraph_ready_t>(value);
        std::int32_t done = 0;
        EXPECT_EQ(vmmgraph_ready_done(ready, &done), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_ready_before(ready, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_ready_wait(ready), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_ready_destroy(ready), VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    for (const auto& [name, call] :
         device_calls(garbage<vmmgraph_device_t>(reinterpret_cast<std::uint64_t>(destroyed)))) {
        EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
    }
}

TEST_F(HostileRegion, NullAndNonsense) {
    vmmgraph_region_t made = nullptr;
    EXPECT_EQ(vmmgraph_region_create(device, nullptr, nullptr, &made),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_region_create(device, "tag", nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    auto options = sized<vmmgraph_region_options_t>();
    options.policy = 5;
    EXPECT_EQ(vmmgraph_region_create(device, "tag", &options, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    options = sized<vmmgraph_region_options_t>();
    options.flags = 4;
    EXPECT_EQ(vmmgraph_region_create(device, "tag", &options, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    options = sized<vmmgraph_region_options_t>();
    options.page_bytes = 1000;
    EXPECT_EQ(vmmgraph_region_create(device, "tag", &options, &made), VMMGRAPH_ERROR_INVALID_SIZE);
    options.struct_size = 3;
    EXPECT_EQ(vmmgraph_region_create(device, "tag", &options, &made), VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(made, nullptr);

    void* block = nullptr;
    EXPECT_EQ(vmmgraph_region_allocate(region, 512, 0, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_region_allocate(region, 512, -1, nullptr, &block),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_region_allocate(region, 0, 0, nullptr, &block), VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_region_allocate(region, ~std::uint64_t{0}, 0, nullptr, &block),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_region_allocate(region, std::uint64_t{1} << 45, 0, nullptr, &block),
              VMMGRAPH_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(block, nullptr);
    EXPECT_EQ(vmmgraph_region_stats(region, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_host_stats(device, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    const std::uint64_t most = std::uint64_t{1} << 46;
    for (const std::uint64_t bytes :
         {~std::uint64_t{0}, ~std::uint64_t{0} - 4096, std::uint64_t{1} << 63, most + 1}) {
        EXPECT_EQ(vmmgraph_device_prepare_backup(device, bytes), VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
    }
    EXPECT_EQ(vmmgraph_device_prepare_backup(device, most), VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY);
    EXPECT_NE(last_message().find("available on this machine"), std::string::npos)
        << last_message();

    const char* const tags[] = {"weights", nullptr};
    EXPECT_EQ(vmmgraph_device_pause(device, tags, 2, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_pause(device, nullptr, 1, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_resume(device, tags, ~std::size_t{0}, 0, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    auto fence = sized<vmmgraph_fence_t>();
    fence.stream_count = 1;
    EXPECT_EQ(vmmgraph_region_pause(region, &fence, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    void* const events[] = {nullptr};
    fence = sized<vmmgraph_fence_t>();
    fence.events = events;
    fence.event_count = 1;
    EXPECT_EQ(vmmgraph_region_pause(region, &fence, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    auto report = sized<vmmgraph_pause_report_t>();
    report.struct_size = 8;
    EXPECT_EQ(vmmgraph_region_pause(region, nullptr, &report), VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(vmmgraph_device_add_pause_hooks(device, nullptr, nullptr, nullptr, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);

    auto stats = sized<vmmgraph_region_stats_t>();
    ASSERT_EQ(vmmgraph_region_stats(region, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.paused, 0U);
    EXPECT_EQ(stats.pages, 0U);
}

TEST_F(HostileRegion, BlocksThatAreNone) {
    void* const block = allocate(5000, VMMGRAPH_POLICY_BACKUP);
    char byte = 0;
    for (void* const foreign : {static_cast<void*>(nullptr), static_cast<void*>(&byte),
                                static_cast<void*>(static_cast<char*>(block) + 512)}) {
        EXPECT_EQ(vmmgraph_region_free(region, foreign), VMMGRAPH_ERROR_FOREIGN_POINTER);
        EXPECT_EQ(vmmgraph_region_record_stream(region, foreign, nullptr),
                  VMMGRAPH_ERROR_FOREIGN_POINTER);
        EXPECT_EQ(vmmgraph_region_get_backup(region, foreign, 0, &byte, 1),
                  VMMGRAPH_ERROR_FOREIGN_POINTER);
    }
    EXPECT_EQ(vmmgraph_region_mark_written(region, &byte), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_region_get_backup(region, block, 0, &byte, 1), VMMGRAPH_ERROR_WRONG_STATE);
    ASSERT_EQ(vmmgraph_region_pause(region, nullptr, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_region_get_backup(region, block, 0, &byte, 1), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_region_get_backup(region, block, 0, nullptr, 1),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_region_get_backup(region, block, 5120, &byte, 1),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_region_get_backup(region, block, ~std::uint64_t{0}, &byte, 1),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_region_mark_written(region, block), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_region_free(region, block), VMMGRAPH_OK);
    EXPECT_NE(vmmgraph_region_free(region, block), VMMGRAPH_OK);
}

TEST_F(HostileRegion, ShorterStructsAreServed) {
    allocate(MiB);
    auto report = sized<vmmgraph_pause_report_t>();
    report.struct_size = 16;
    report.pages = 77;
    ASSERT_EQ(vmmgraph_region_pause(region, nullptr, &report), VMMGRAPH_OK);
    EXPECT_EQ(report.regions, 1U);
    EXPECT_EQ(report.pages, 77U);
}

struct Called {
    vmmgraph_region_t region = nullptr;
    std::atomic<int> times{0};
};

void call_back(const vmmgraph_moved_t*, void* user) {
    auto* const called = static_cast<Called*>(user);
    ++called->times;
    EXPECT_EQ(vmmgraph_region_pause(called->region, nullptr, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_region_resume(called->region, 0, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    auto stats = sized<vmmgraph_region_stats_t>();
    EXPECT_EQ(vmmgraph_region_stats(called->region, &stats), VMMGRAPH_OK);
}

TEST_F(HostileRegion, HooksThatCallBackAreToldSo) {
    allocate(MiB);
    Called called;
    called.region = region;
    vmmgraph_pause_hooks_t hooks = nullptr;
    ASSERT_EQ(
        vmmgraph_device_add_pause_hooks(device, "weights", call_back, call_back, &called, &hooks),
        VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_region_pause(region, nullptr, nullptr), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_region_resume(region, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(called.times, 2);
    ASSERT_EQ(vmmgraph_pause_hooks_destroy(hooks), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_pause_hooks_destroy(hooks), VMMGRAPH_ERROR_INVALID_HANDLE);
    ASSERT_EQ(vmmgraph_region_pause(region, nullptr, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(called.times, 2);
}

TEST_F(HostileRegion, ManyThreadsOnOneHandle) {
    std::vector<std::thread> threads;
    std::atomic<int> bad{0};
    for (int thread = 0; thread < 6; ++thread) {
        threads.emplace_back([&, thread] {
            for (int round = 0; round < 100; ++round) {
                const auto calls = region_calls(region);
                const auto& call =
                    calls[static_cast<std::size_t>(thread * 7 + round) % (calls.size() - 1)];
                const auto status = call.second();
                const bool fine = status == VMMGRAPH_OK || status == VMMGRAPH_ERROR_WRONG_STATE ||
                                  status == VMMGRAPH_ERROR_FOREIGN_POINTER ||
                                  status == VMMGRAPH_ERROR_OUT_OF_MEMORY;
                bad += fine ? 0 : 1;
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(bad, 0);
}

}  // namespace
