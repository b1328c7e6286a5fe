// Account functions of the C interface, and accounts in creation options.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t MiB = 1 << 20;

using Call = std::pair<std::string, std::function<vmmgraph_status_t()>>;

vmmgraph_status_t make(vmmgraph_device_t device, vmmgraph_account_t above, std::uint64_t budget,
                       std::uint64_t least, vmmgraph_account_t* account) {
    auto options = sized<vmmgraph_account_options_t>();
    options.above = above;
    options.budget_bytes = budget;
    options.least_bytes = least;
    return vmmgraph_account_create(device, "tenant", &options, account);
}

class HostileAccount : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_account_t account = nullptr;

    void SetUp() override {
        const auto options = small_device(2);
        ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
        ASSERT_EQ(make(device, nullptr, 4 * MiB, MiB, &account), VMMGRAPH_OK);
    }

    void TearDown() override {
        if (account != nullptr) {
            ASSERT_EQ(vmmgraph_account_destroy(account), VMMGRAPH_OK);
        }
        close_empty(device);
    }

    [[nodiscard]] vmmgraph_account_stats_t stats() const {
        auto stats = sized<vmmgraph_account_stats_t>();
        EXPECT_EQ(vmmgraph_account_stats(account, &stats), VMMGRAPH_OK);
        return stats;
    }
};

std::uint64_t gives_nothing(std::uint64_t, void*) { return 0; }

// Otherwise valid.
std::vector<Call> account_calls(vmmgraph_account_t account) {
    return {
        {"set_limits", [=] { return vmmgraph_account_set_limits(account, 0, 0); }},
        {"stats",
         [=] {
             auto stats = sized<vmmgraph_account_stats_t>();
             return vmmgraph_account_stats(account, &stats);
         }},
        {"add_reclaimer",
         [=] {
             vmmgraph_reclaimer_t reclaimer = nullptr;
             return vmmgraph_account_add_reclaimer(account, gives_nothing, 0, nullptr, &reclaimer);
         }},
        {"destroy", [=] { return vmmgraph_account_destroy(account); }},
    };
}

// Destroys the new object, if any.
template <class Handle>
vmmgraph_status_t ended(vmmgraph_status_t status, const Handle& made,
                        vmmgraph_status_t (*destroy)(Handle)) {
    return status == VMMGRAPH_OK ? destroy(made) : status;
}

std::vector<Call> below(vmmgraph_device_t device, vmmgraph_account_t account) {
    return {
        {"an account",
         [=] {
             vmmgraph_account_t made = nullptr;
             return ended(make(device, account, 0, 0, &made), made, vmmgraph_account_destroy);
         }},
        {"an arena",
         [=] {
             auto options = sized<vmmgraph_arena_options_t>();
             options.account = account;
             vmmgraph_arena_t made = nullptr;
             return ended(vmmgraph_arena_create(device, &options, &made), made,
                          vmmgraph_arena_destroy);
         }},
        {"a region",
         [=] {
             auto options = sized<vmmgraph_region_options_t>();
             options.account = account;
             vmmgraph_region_t made = nullptr;
             return ended(vmmgraph_region_create(device, "weights", &options, &made), made,
                          vmmgraph_region_destroy);
         }},
        {"a buffer",
         [=] {
             auto options = sized<vmmgraph_elastic_options_t>();
             options.account = account;
             vmmgraph_elastic_buffer_t made = nullptr;
             return ended(vmmgraph_elastic_buffer_create(device, MiB, &options, &made), made,
                          vmmgraph_elastic_buffer_destroy);
         }},
        {"a cache",
         [=] {
             auto memory = sized<vmmgraph_elastic_options_t>();
             memory.account = account;
             const std::uint64_t plane = MiB;
             auto options = sized<vmmgraph_kv_options_t>();
             options.planes = &plane;
             options.plane_count = options.blocks_most = 1;
             options.memory = &memory;
             vmmgraph_kv_cache_t made = nullptr;
             return ended(vmmgraph_kv_cache_create(device, &options, &made), made,
                          vmmgraph_kv_cache_destroy);
         }},
        {"a ring",
         [=] {
             vmmgraph_ring_unit_t unit{MiB, 0, 0};
             auto options = sized<vmmgraph_ring_options_t>();
             options.account = account;
             vmmgraph_ring_t made = nullptr;
             return ended(vmmgraph_ring_create(device, &unit, 1, &options, &made), made,
                          vmmgraph_ring_destroy);
         }},
    };
}

TEST_F(HostileAccount, NoCallTakesWhatIsNoAccount) {
    auto* const dead = account;
    ASSERT_EQ(vmmgraph_account_destroy(account), VMMGRAPH_OK);
    account = nullptr;
    for (auto* const handle : {dead, garbage<vmmgraph_account_t>(~std::uint64_t{0}),
                               reinterpret_cast<vmmgraph_account_t>(device)}) {
        for (const auto& [name, call] : account_calls(handle)) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        for (const auto& [name, call] : below(device, handle)) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
    }
    for (const auto& [name, call] : account_calls(nullptr)) {
        EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
    }
}

TEST_F(HostileAccount, EverythingIsBelowOneOfItsOwnDevice) {
    const auto options = small_device(3);
    vmmgraph_device_t other = nullptr;
    ASSERT_EQ(vmmgraph_device_open(&options, &other), VMMGRAPH_OK);
    for (const auto& [name, call] : below(device, account)) {
        EXPECT_EQ(call(), VMMGRAPH_OK) << name;
    }
    for (const auto& [name, call] : below(other, account)) {
        EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_ARGUMENT) << name;
    }
    ASSERT_EQ(vmmgraph_device_close(other), VMMGRAPH_OK);
    EXPECT_EQ(stats().charged_bytes, 0U);
}

TEST_F(HostileAccount, WrongArguments) {
    vmmgraph_account_t made = nullptr;
    EXPECT_EQ(vmmgraph_account_create(device, nullptr, nullptr, &made),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_account_create(device, "model", nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_account_create(nullptr, "model", nullptr, &made),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    auto short_options = sized<vmmgraph_account_options_t>();
    short_options.struct_size = 8;
    EXPECT_EQ(vmmgraph_account_create(device, "model", &short_options, &made),
              VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(vmmgraph_account_stats(account, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    auto short_stats = sized<vmmgraph_account_stats_t>();
    short_stats.struct_size = 8;
    EXPECT_EQ(vmmgraph_account_stats(account, &short_stats), VMMGRAPH_ERROR_STRUCT_SIZE);
    vmmgraph_reclaimer_t reclaimer = nullptr;
    EXPECT_EQ(vmmgraph_account_add_reclaimer(account, nullptr, 0, nullptr, &reclaimer),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_account_add_reclaimer(account, gives_nothing, 0, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    // Guaranteed bytes above the parent's limit.
    for (const std::uint64_t least : {5 * MiB, ~std::uint64_t{0}}) {
        EXPECT_EQ(make(device, account, 0, least, &made), VMMGRAPH_ERROR_OVER_BUDGET) << least;
        EXPECT_NE(last_message().find("tenant"), std::string::npos) << last_message();
    }
    EXPECT_EQ(made, nullptr);
    EXPECT_EQ(stats().charged_bytes, 0U);
}

TEST_F(HostileAccount, LimitsOfAnySizeOverflowNothing) {
    vmmgraph_account_t model = nullptr;
    ASSERT_EQ(make(device, account, 0, 0, &model), VMMGRAPH_OK);
    auto options = sized<vmmgraph_region_options_t>();
    options.account = model;
    vmmgraph_region_t region = nullptr;
    ASSERT_EQ(vmmgraph_region_create(device, "weights", &options, &region), VMMGRAPH_OK);
    void* block = nullptr;
    ASSERT_EQ(vmmgraph_region_allocate(region, MiB, VMMGRAPH_POLICY_DEFAULT, nullptr, &block),
              VMMGRAPH_OK);
    const auto most = ~std::uint64_t{0};
    for (const auto& [budget, least] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
             {most, most}, {1, most}, {most, 1}, {1, 1}, {0, 0}}) {
        for (auto* const handle : {account, model}) {
            EXPECT_EQ(vmmgraph_account_set_limits(handle, budget, least), VMMGRAPH_OK);
            void* more = nullptr;
            const auto status =
                vmmgraph_region_allocate(region, MiB, VMMGRAPH_POLICY_DEFAULT, nullptr, &more);
            EXPECT_TRUE(status == VMMGRAPH_OK || status == VMMGRAPH_ERROR_OVER_BUDGET) << status;
            if (status == VMMGRAPH_OK) {
                EXPECT_EQ(vmmgraph_region_free(region, more), VMMGRAPH_OK);
            }
        }
    }
    ASSERT_EQ(vmmgraph_region_destroy(region), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_account_destroy(model), VMMGRAPH_OK);
    EXPECT_EQ(stats().charged_bytes, 0U);
}

}  // namespace
