// Policies in the C interface: all caller errors.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();

using Call = std::pair<std::string, std::function<vmmgraph_status_t()>>;

class HostilePolicies : public testing::Test {
protected:
    vmmgraph_pre_commit_t ahead = nullptr;
    vmmgraph_standing_t standing = nullptr;
    vmmgraph_grants_t grants = nullptr;
    vmmgraph_lengths_t lengths = nullptr;
    vmmgraph_host_kv_t host = nullptr;
    vmmgraph_slo_control_t control = nullptr;
    std::int32_t number = 0;
    std::uint64_t value = 0;
    vmmgraph_grants_stats_t granted = sized<vmmgraph_grants_stats_t>();
    vmmgraph_host_kv_stats_t held = sized<vmmgraph_host_kv_stats_t>();

    void SetUp() override {
        ASSERT_EQ(vmmgraph_pre_commit_create(4, 8, 1, 2, &ahead), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_standing_create(4, 8, &standing), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_grants_create(10, 1, &grants), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_lengths_create(4, 900, 16, &lengths), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_host_kv_create(100, &host), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_slo_control_create(1, 2, 4, &control), VMMGRAPH_OK);
    }

    void TearDown() override {
        if (control != nullptr) {
            EXPECT_EQ(end(), std::vector<vmmgraph_status_t>(6, VMMGRAPH_OK));
        }
    }

    std::vector<vmmgraph_status_t> end() {
        return {vmmgraph_pre_commit_destroy(ahead), vmmgraph_standing_destroy(standing),
                vmmgraph_grants_destroy(grants),    vmmgraph_lengths_destroy(lengths),
                vmmgraph_host_kv_destroy(host),     vmmgraph_slo_control_destroy(control)};
    }

    // Otherwise valid.
    std::vector<Call> calls(void* handle) {
        const auto of = [handle](auto* kind) { return static_cast<decltype(kind)>(handle); };
        auto* const a = of(ahead);
        auto* const s = of(standing);
        auto* const g = of(grants);
        auto* const l = of(lengths);
        auto* const h = of(host);
        auto* const c = of(control);
        return {
            {"pre_commit_step",
             [=] { return vmmgraph_pre_commit_step(a, 0, 0, 0, 0, &number, &value); }},
            {"pre_commit_destroy", [=] { return vmmgraph_pre_commit_destroy(a); }},
            {"standing_used", [=] { return vmmgraph_standing_used(s, 0, 1); }},
            {"standing_at", [=] { return vmmgraph_standing_at(s, 0, 1, &value, &value); }},
            {"standing_destroy", [=] { return vmmgraph_standing_destroy(s); }},
            {"grants_set_pages", [=] { return vmmgraph_grants_set_pages(g, 1); }},
            {"grants_ask", [=] { return vmmgraph_grants_ask(g, 1, 1, 1, &number); }},
            {"grants_extend", [=] { return vmmgraph_grants_extend(g, 1, &number); }},
            {"grants_forget", [=] { return vmmgraph_grants_forget(g, 1); }},
            {"grants_give", [=] { return vmmgraph_grants_give(g, 1, 1); }},
            {"grants_stats", [=] { return vmmgraph_grants_stats(g, &granted); }},
            {"grants_destroy", [=] { return vmmgraph_grants_destroy(g); }},
            {"lengths_ended", [=] { return vmmgraph_lengths_ended(l, 1); }},
            {"lengths_total", [=] { return vmmgraph_lengths_total(l, 1, &value); }},
            {"lengths_destroy", [=] { return vmmgraph_lengths_destroy(l); }},
            {"host_kv_set_logical", [=] { return vmmgraph_host_kv_set_logical(h, 1); }},
            {"host_kv_put", [=] { return vmmgraph_host_kv_put(h, 1, 1, &number); }},
            {"host_kv_rescue", [=] { return vmmgraph_host_kv_rescue(h, 1, 1, &number); }},
            {"host_kv_take", [=] { return vmmgraph_host_kv_take(h, 1, &value); }},
            {"host_kv_stats", [=] { return vmmgraph_host_kv_stats(h, &held); }},
            {"host_kv_destroy", [=] { return vmmgraph_host_kv_destroy(h); }},
            {"slo_control_step",
             [=] { return vmmgraph_slo_control_step(c, 1, 0, &number, &value); }},
            {"slo_control_destroy", [=] { return vmmgraph_slo_control_destroy(c); }},
        };
    }
};

TEST_F(HostilePolicies, DeadForeignAndGarbageHandles) {
    vmmgraph_block_pool_t foreign = nullptr;
    ASSERT_EQ(vmmgraph_block_pool_create(4, 1, 1, &foreign), VMMGRAPH_OK);
    auto* const dead = grants;
    ASSERT_EQ(end(), std::vector<vmmgraph_status_t>(6, VMMGRAPH_OK));
    EXPECT_EQ(end(), std::vector<vmmgraph_status_t>(6, VMMGRAPH_ERROR_INVALID_HANDLE));
    control = nullptr;
    for (void* const handle :
         {static_cast<void*>(nullptr), static_cast<void*>(dead), static_cast<void*>(foreign),
          static_cast<void*>(&value), reinterpret_cast<void*>(huge), reinterpret_cast<void*>(1)}) {
        for (const auto& [name, call] : calls(handle)) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name << ' ' << handle;
        }
    }
    EXPECT_EQ(vmmgraph_block_pool_destroy(foreign), VMMGRAPH_OK);
}

TEST_F(HostilePolicies, OnesHandleIsNotAnothers) {
    const std::vector<std::pair<void*, std::string>> own = {
        {ahead, "pre_commit"}, {standing, "standing"}, {grants, "grants"},
        {lengths, "lengths"},  {host, "host_kv"},      {control, "slo_control"}};
    for (const auto& [handle, kind] : own) {
        for (const auto& [name, call] : calls(handle)) {
            if (name.rfind(kind, 0) != 0) {
                EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name << " of " << kind;
            }
        }
    }
}

TEST_F(HostilePolicies, Nulls) {
    EXPECT_EQ(vmmgraph_pre_commit_create(1, 2, 0, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_pre_commit_step(ahead, 0, 0, 0, 0, nullptr, &value),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_pre_commit_step(ahead, 0, 0, 0, 0, &number, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_standing_create(1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_grants_create(1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_lengths_create(1, 1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_kv_create(1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_slo_control_create(1, 1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_grants_ask(grants, 1, 1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_grants_extend(grants, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_grants_stats(grants, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    // No grant without an output pointer.
    ASSERT_EQ(vmmgraph_grants_stats(grants, &granted), VMMGRAPH_OK);
    EXPECT_EQ(granted.free, 10U);
    EXPECT_EQ(vmmgraph_lengths_total(lengths, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_kv_put(host, 1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_kv_rescue(host, 1, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_kv_stats(host, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    ASSERT_EQ(vmmgraph_host_kv_stats(host, &held), VMMGRAPH_OK);
    EXPECT_EQ(held.sequences, 0U);
    EXPECT_EQ(vmmgraph_admission_peak(16, nullptr, 1, &value), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_admission_peak(16, nullptr, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    const vmmgraph_due_t due{};
    std::size_t order = 7;
    EXPECT_EQ(vmmgraph_in_turn(0, nullptr, 1, &order, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_in_turn(0, &due, 1, nullptr, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    const vmmgraph_prompt_t prompt{};
    EXPECT_EQ(vmmgraph_prompt_to_host(0, nullptr, &number), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_prompt_to_host(0, &prompt, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_prefill_waits(0, 0, nullptr, 1, nullptr, 0, &number),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_prefill_waits(0, 0, &prompt, 1, nullptr, 1, &number),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_prefill_waits(0, 0, nullptr, 0, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    // Optional pointers.
    EXPECT_EQ(vmmgraph_prefill_waits(0, 0, nullptr, 0, nullptr, 0, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, 0);
    EXPECT_EQ(vmmgraph_standing_at(standing, 0, 0, nullptr, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_slo_control_step(control, 0, 0, nullptr, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_in_turn(0, &due, 1, &order, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(order, 0U);
    EXPECT_EQ(vmmgraph_in_turn(0, nullptr, 0, nullptr, nullptr), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_host_kv_put(host, 1, 1, &number), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_host_kv_take(host, 1, nullptr), VMMGRAPH_OK);
}

TEST_F(HostilePolicies, NumbersThatMakeNoSense) {
    vmmgraph_pre_commit_t marks = nullptr;
    EXPECT_EQ(vmmgraph_pre_commit_create(2, 1, 0, 0, &marks), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    vmmgraph_standing_t other = nullptr;
    EXPECT_EQ(vmmgraph_standing_create(1, 0, &other), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    vmmgraph_lengths_t long_ones = nullptr;
    EXPECT_EQ(vmmgraph_lengths_create(0, 1, 1, &long_ones), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_lengths_create(1, 1001, 1, &long_ones), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    vmmgraph_slo_control_t bounds = nullptr;
    EXPECT_EQ(vmmgraph_slo_control_create(0, 1, 1, &bounds), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_slo_control_create(2, 1, 3, &bounds), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_slo_control_create(1, 4, 3, &bounds), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_slo_control_step(control, 2, 0, &number, &value),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_slo_control_step(control, 0, -1, &number, &value),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_kv_take(host, 5, &value), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_admission_peak(0, nullptr, 0, &value), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const vmmgraph_growing_t growing{1, 1};
    EXPECT_NE(vmmgraph_admission_peak(1, &growing, std::numeric_limits<std::size_t>::max(), &value),
              VMMGRAPH_OK);
    const vmmgraph_due_t due{1, 1, 1};
    std::size_t order = 0;
    EXPECT_NE(vmmgraph_in_turn(0, &due, std::numeric_limits<std::size_t>::max(), &order, nullptr),
              VMMGRAPH_OK);
    const vmmgraph_prompt_t prompt{1, 1, 1, 1};
    EXPECT_NE(vmmgraph_prefill_waits(0, 0, &prompt, std::numeric_limits<std::size_t>::max(),
                                     nullptr, 0, &number),
              VMMGRAPH_OK);
    granted.struct_size = 8;
    EXPECT_EQ(vmmgraph_grants_stats(grants, &granted), VMMGRAPH_ERROR_STRUCT_SIZE);
    held.struct_size = 12;
    EXPECT_EQ(vmmgraph_host_kv_stats(host, &held), VMMGRAPH_ERROR_STRUCT_SIZE);
}

TEST_F(HostilePolicies, NumbersBeyondAll) {
    EXPECT_EQ(vmmgraph_pre_commit_step(ahead, huge, huge, huge, huge, &number, &value),
              VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_pre_commit_step(ahead, 0, 0, 0, huge, &number, &value), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_standing_used(standing, huge, huge), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_standing_used(standing, 0, 1), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_standing_at(standing, huge, huge, &value, nullptr), VMMGRAPH_OK);

    EXPECT_EQ(vmmgraph_grants_set_pages(grants, huge), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_grants_ask(grants, huge, huge, huge, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, VMMGRAPH_GRANT_NEVER);
    EXPECT_EQ(vmmgraph_grants_ask(grants, 1, huge, 0, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, VMMGRAPH_GRANT_GRANTED);
    EXPECT_EQ(vmmgraph_grants_extend(grants, 1, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, 0);
    // Capped.
    EXPECT_EQ(vmmgraph_grants_give(grants, huge, huge), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_grants_stats(grants, &granted), VMMGRAPH_OK);
    EXPECT_EQ(granted.free, huge);

    EXPECT_EQ(vmmgraph_lengths_ended(lengths, huge), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_lengths_total(lengths, huge, &value), VMMGRAPH_OK);
    EXPECT_EQ(value, huge);

    EXPECT_EQ(vmmgraph_host_kv_put(host, 1, huge, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, 0);
    EXPECT_EQ(vmmgraph_host_kv_set_logical(host, huge), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_host_kv_stats(host, &held), VMMGRAPH_OK);
    EXPECT_EQ(held.logical_bytes, 100U);

    const vmmgraph_growing_t growing[] = {{huge, huge}, {huge, 0}, {0, huge}};
    EXPECT_EQ(vmmgraph_admission_peak(1, growing, 3, &value), VMMGRAPH_OK);
    EXPECT_EQ(value, huge);
    const vmmgraph_due_t due[] = {{0, huge, huge}, {huge, huge, 0}, {huge, huge, huge}};
    std::size_t order[] = {9, 9, 9};
    std::size_t timely = 9;
    EXPECT_EQ(vmmgraph_in_turn(huge, due, 3, order, &timely), VMMGRAPH_OK);
    EXPECT_LE(timely, 3U);
    EXPECT_EQ(order[0] + order[1] + order[2], 3U);

    const vmmgraph_prompt_t prompts[] = {{huge, 0, huge, huge}, {0, huge, 0, huge}};
    const vmmgraph_decoding_t decoding[] = {{0, huge, huge}, {huge, 0, 0}};
    EXPECT_EQ(vmmgraph_prompt_to_host(huge, prompts, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, 1);
    EXPECT_EQ(vmmgraph_prefill_waits(0, huge, prompts, 1, decoding, 2, &number), VMMGRAPH_OK);
    EXPECT_EQ(number, 0);
}

}  // namespace
