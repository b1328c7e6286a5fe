// Ring functions of the C interface: all caller errors.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t KiB = 1 << 10;
constexpr std::uint64_t MiB = 1 << 20;
constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t count = 6;

using Call = std::pair<std::string, std::function<vmmgraph_status_t()>>;

std::vector<vmmgraph_ring_unit_t> streamed(std::size_t units, std::uint64_t bytes = 8 * KiB) {
    return std::vector<vmmgraph_ring_unit_t>(units, {bytes, 0, 0});
}

class HostileRing : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_ring_t ring = nullptr;
    vmmgraph_host_buffer_t buffer = nullptr;

    void SetUp() override {
        device = open(6);
        const auto units = streamed(count);
        auto options = sized<vmmgraph_ring_options_t>();
        options.name = "layers";
        options.slots = 2;
        ASSERT_EQ(vmmgraph_ring_create(device, units.data(), units.size(), &options, &ring),
                  VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_host_buffer_create(device, 8 * KiB, VMMGRAPH_PINNING_REQUIRED, &buffer),
                  VMMGRAPH_OK);
    }

    void TearDown() override {
        if (ring != nullptr) {
            ASSERT_EQ(vmmgraph_ring_destroy(ring), VMMGRAPH_OK);
        }
        if (buffer != nullptr) {
            ASSERT_EQ(vmmgraph_host_buffer_destroy(buffer), VMMGRAPH_OK);
        }
        ASSERT_EQ(vmmgraph_device_trim(device, nullptr), VMMGRAPH_OK);
        auto stats = sized<vmmgraph_device_stats_t>();
        ASSERT_EQ(vmmgraph_device_stats(device, &stats), VMMGRAPH_OK);
        EXPECT_EQ(stats.physical_bytes, 0U);
        EXPECT_EQ(stats.reserved_bytes, 0U);
        auto host = sized<vmmgraph_host_stats_t>();
        ASSERT_EQ(vmmgraph_device_host_stats(device, &host), VMMGRAPH_OK);
        EXPECT_EQ(host.free_bytes, host.held_bytes);
        ASSERT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
    }

    static vmmgraph_device_t open(std::int32_t number) {
        const auto options = small_device(number);
        vmmgraph_device_t opened = nullptr;
        EXPECT_EQ(vmmgraph_device_open(&options, &opened), VMMGRAPH_OK);
        return opened;
    }

    void set_sources() const {
        const vmmgraph_host_run_t run{buffer, 0, 0, 8 * KiB};
        for (std::size_t unit = 0; unit < count; ++unit) {
            ASSERT_EQ(vmmgraph_ring_set_source(ring, unit, &run, 1), VMMGRAPH_OK);
        }
    }

    vmmgraph_ring_stats_t stats() const {
        auto stats = sized<vmmgraph_ring_stats_t>();
        EXPECT_EQ(vmmgraph_ring_stats(ring, &stats), VMMGRAPH_OK);
        return stats;
    }
};

std::vector<Call> ring_calls(vmmgraph_ring_t ring) {
    return {
        {"address",
         [=] {
             void* address = nullptr;
             return vmmgraph_ring_address(ring, 0, &address);
         }},
        {"places", [=] { return vmmgraph_ring_places(ring, nullptr, 0, nullptr); }},
        {"set_source", [=] { return vmmgraph_ring_set_source(ring, 0, nullptr, 0); }},
        {"acquire", [=] { return vmmgraph_ring_acquire(ring, 0, nullptr); }},
        {"release", [=] { return vmmgraph_ring_release(ring, 0, nullptr); }},
        {"prime", [=] { return vmmgraph_ring_prime(ring, nullptr); }},
        {"abort", [=] { return vmmgraph_ring_abort(ring); }},
        {"capture_begin", [=] { return vmmgraph_ring_capture_begin(ring, nullptr, nullptr); }},
        {"capture_end",
         [=] {
             vmmgraph_ring_graph_t graph = nullptr;
             return vmmgraph_ring_capture_end(ring, nullptr, &graph);
         }},
        {"capture_abandon", [=] { return vmmgraph_ring_capture_abandon(ring); }},
        {"stats",
         [=] {
             auto stats = sized<vmmgraph_ring_stats_t>();
             return vmmgraph_ring_stats(ring, &stats);
         }},
        {"destroy", [=] { return vmmgraph_ring_destroy(ring); }},
    };
}

std::vector<Call> buffer_calls(vmmgraph_host_buffer_t buffer) {
    return {
        {"info", [=] { return vmmgraph_host_buffer_info(buffer, nullptr, nullptr, nullptr); }},
        {"write", [=] { return vmmgraph_host_buffer_write(buffer, 0, nullptr, 0); }},
        {"read", [=] { return vmmgraph_host_buffer_read(buffer, 0, nullptr, 0); }},
        {"store", [=] { return vmmgraph_host_buffer_store(buffer, 0, nullptr, 0, nullptr); }},
        {"before", [=] { return vmmgraph_host_buffer_before(buffer, nullptr); }},
        {"changed", [=] { return vmmgraph_host_buffer_changed(buffer); }},
        {"wait", [=] { return vmmgraph_host_buffer_wait(buffer); }},
        {"destroy", [=] { return vmmgraph_host_buffer_destroy(buffer); }},
    };
}

std::vector<Call> graph_calls(vmmgraph_ring_graph_t graph) {
    return {
        {"copies", [=] { return vmmgraph_ring_graph_copies(graph, nullptr); }},
        {"forget executable", [=] { return vmmgraph_ring_graph_forget_executable(graph); }},
        {"enter", [=] { return vmmgraph_ring_graph_enter(graph, nullptr, nullptr); }},
        {"leave", [=] { return vmmgraph_ring_graph_leave(graph, nullptr, 1); }},
        {"destroy", [=] { return vmmgraph_ring_graph_destroy(graph); }},
    };
}

TEST_F(HostileRing, CapturesThatAreNone) {
    set_sources();
    // The host driver has no captures.
    auto options = sized<vmmgraph_ring_capture_options_t>();
    for (const std::size_t many :
         {std::size_t{0}, std::size_t{1}, std::numeric_limits<std::size_t>::max()}) {
        options.tail = many;
        options.most_runs = many;
        EXPECT_EQ(vmmgraph_ring_capture_begin(ring, nullptr, &options), VMMGRAPH_ERROR_WRONG_STATE);
    }
    options.struct_size = 1;
    EXPECT_EQ(vmmgraph_ring_capture_begin(ring, nullptr, &options), VMMGRAPH_ERROR_STRUCT_SIZE);
    auto* graph = garbage<vmmgraph_ring_graph_t>(7);
    EXPECT_EQ(vmmgraph_ring_capture_end(ring, nullptr, &graph), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_ring_capture_end(ring, nullptr, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_capture_abandon(ring), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_ring_acquire(ring, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_ring_capture_abandon(ring), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_ring_release(ring, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(stats().launches, 0U);
}

TEST_F(HostileRing, HandlesThatAreNone) {
    const auto destroyed = reinterpret_cast<std::uint64_t>(ring);
    const auto gone = reinterpret_cast<std::uint64_t>(buffer);
    set_sources();
    ASSERT_EQ(vmmgraph_ring_acquire(ring, 0, nullptr), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_host_buffer_destroy(buffer), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_ring_destroy(ring), VMMGRAPH_OK);
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{1}, huge, destroyed, gone,
                                      reinterpret_cast<std::uint64_t>(device)}) {
        for (const auto& [name, call] : ring_calls(garbage<vmmgraph_ring_t>(value))) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        for (const auto& [name, call] : buffer_calls(garbage<vmmgraph_host_buffer_t>(value))) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
        for (const auto& [name, call] : graph_calls(garbage<vmmgraph_ring_graph_t>(value))) {
            EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
        }
    }
    ring = nullptr;
    buffer = nullptr;
    const auto units = streamed(4);
    const auto none = garbage<vmmgraph_device_t>(destroyed);
    EXPECT_EQ(vmmgraph_ring_create(none, units.data(), units.size(), nullptr, &ring),
              VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(vmmgraph_host_buffer_create(none, 1, 0, &buffer), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_NE(last_message().find("a device handle"), std::string::npos) << last_message();
}

TEST_F(HostileRing, OnesHandleIsNotTheOthers) {
    for (const auto& [name, call] :
         ring_calls(garbage<vmmgraph_ring_t>(reinterpret_cast<std::uint64_t>(buffer)))) {
        EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
    }
    for (const auto& [name, call] :
         buffer_calls(garbage<vmmgraph_host_buffer_t>(reinterpret_cast<std::uint64_t>(ring)))) {
        EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name;
    }
    for (const auto source :
         {garbage<vmmgraph_host_buffer_t>(0),
          garbage<vmmgraph_host_buffer_t>(reinterpret_cast<std::uint64_t>(ring))}) {
        const vmmgraph_host_run_t runs[] = {{buffer, 0, 0, 1}, {source, 0, 1, 1}};
        EXPECT_EQ(vmmgraph_ring_set_source(ring, 0, runs, 2), VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    EXPECT_EQ(vmmgraph_ring_acquire(ring, 0, nullptr), VMMGRAPH_ERROR_WRONG_STATE)
        << "a source was set by half";
}

TEST_F(HostileRing, NullAndNonsenseMakeNoRing) {
    vmmgraph_ring_t made = nullptr;
    auto units = streamed(6);
    EXPECT_EQ(vmmgraph_ring_create(device, nullptr, 6, nullptr, &made),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 6, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_create(device, nullptr, 0, nullptr, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), ~std::size_t{0}, nullptr, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    for (const std::int32_t resident : {-1, 2}) {
        units[1].resident = resident;
        EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 6, nullptr, &made),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    units[1].resident = 0;
    for (const std::uint64_t bytes : {std::uint64_t{0}, huge, (std::uint64_t{1} << 46) + 1}) {
        units[1].bytes = bytes;
        EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 6, nullptr, &made),
                  VMMGRAPH_ERROR_INVALID_SIZE);
    }
    units[1].bytes = 40 * MiB;
    EXPECT_EQ(vmmgraph_ring_create(device, streamed(6, 40 * MiB).data(), 6, nullptr, &made),
              VMMGRAPH_ERROR_OUT_OF_MEMORY);
    units = streamed(7);
    auto options = sized<vmmgraph_ring_options_t>();
    options.slots = 3;
    options.remainder = VMMGRAPH_REMAINDER_REFUSE;
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    for (const std::int32_t remainder : {-1, 2}) {
        options.remainder = remainder;
        EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    options.remainder = VMMGRAPH_REMAINDER_KEEP_RESIDENT;
    options.flags = 2;
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    options.flags = VMMGRAPH_RING_WITHIN_STEP;
    options.page_bytes = 1000;
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
              VMMGRAPH_ERROR_INVALID_SIZE);
    options.page_bytes = 0;
    for (const double link : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
        options.link_gib_per_second = link;
        EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    options.link_gib_per_second = 50;
    options.compute_seconds = std::nan("");
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    options.link_gib_per_second = 0;
    options.budget_bytes = 4096;
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
              VMMGRAPH_ERROR_OVER_BUDGET);
    options.struct_size = 5;
    EXPECT_EQ(vmmgraph_ring_create(device, units.data(), 7, &options, &made),
              VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(made, nullptr);
    vmmgraph_host_buffer_t other = nullptr;
    EXPECT_EQ(vmmgraph_host_buffer_create(device, 1, VMMGRAPH_PINNING_REQUIRED, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (const std::int32_t pinning : {-1, 2}) {
        EXPECT_EQ(vmmgraph_host_buffer_create(device, 1, pinning, &other),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    for (const std::uint64_t bytes : {std::uint64_t{0}, (std::uint64_t{1} << 30) + 1, huge}) {
        EXPECT_EQ(vmmgraph_host_buffer_create(device, bytes, VMMGRAPH_PINNING_PREFERRED, &other),
                  VMMGRAPH_ERROR_INVALID_SIZE);
    }
    EXPECT_EQ(other, nullptr);
}

TEST_F(HostileRing, WhatIsRefusedLeavesTheRingAsItWas) {
    set_sources();
    void* address = nullptr;
    for (const std::size_t unit : {count, ~std::size_t{0}}) {
        EXPECT_EQ(vmmgraph_ring_address(ring, unit, &address), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_ring_set_source(ring, unit, nullptr, 0),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_ring_acquire(ring, unit, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_ring_release(ring, unit, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(address, nullptr);
    EXPECT_EQ(vmmgraph_ring_address(ring, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_stats(ring, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_places(ring, nullptr, 1, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_set_source(ring, 0, nullptr, 1), VMMGRAPH_ERROR_NULL_ARGUMENT);
    const vmmgraph_host_run_t any{buffer, 0, 0, 1};
    EXPECT_EQ(vmmgraph_ring_set_source(ring, 0, &any, ~std::size_t{0}),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    for (const vmmgraph_host_run_t& run : {vmmgraph_host_run_t{buffer, 0, 1, 8 * KiB},
                                           {buffer, 8 * KiB, 0, 1},
                                           {buffer, huge, 0, 2},
                                           {buffer, 0, huge, 2},
                                           {buffer, 0, 0, huge},
                                           {buffer, 1, 0, huge}}) {
        EXPECT_EQ(vmmgraph_ring_set_source(ring, 0, &run, 1), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    const vmmgraph_host_run_t overlap[] = {{buffer, 0, 0, 10}, {buffer, 20, 9, 10}};
    EXPECT_EQ(vmmgraph_ring_set_source(ring, 0, overlap, 2), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const auto elsewhere = open(5);
    vmmgraph_host_buffer_t foreign = nullptr;
    ASSERT_EQ(vmmgraph_host_buffer_create(elsewhere, 64, VMMGRAPH_PINNING_REQUIRED, &foreign),
              VMMGRAPH_OK);
    const vmmgraph_host_run_t strange{foreign, 0, 0, 64};
    EXPECT_EQ(vmmgraph_ring_set_source(ring, 0, &strange, 1), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    ASSERT_EQ(vmmgraph_host_buffer_destroy(foreign), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_device_close(elsewhere), VMMGRAPH_OK);

    EXPECT_EQ(vmmgraph_ring_release(ring, 0, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    ASSERT_EQ(vmmgraph_ring_acquire(ring, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_ring_acquire(ring, 0, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_ring_acquire(ring, 2, nullptr), VMMGRAPH_ERROR_WRONG_STATE)
        << "it has the same slot";
    EXPECT_EQ(vmmgraph_ring_release(ring, 2, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(stats().acquired, 1U);
    ASSERT_EQ(vmmgraph_ring_abort(ring), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_ring_abort(ring), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_ring_release(ring, 0, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(stats().acquired, 0U);
    std::uint64_t filled = 0;
    ASSERT_EQ(vmmgraph_ring_prime(ring, &filled), VMMGRAPH_OK);
    EXPECT_EQ(filled, 2U);
    for (std::size_t unit = 0; unit < count; ++unit) {
        ASSERT_EQ(vmmgraph_ring_acquire(ring, unit, nullptr), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_ring_release(ring, unit, nullptr), VMMGRAPH_OK);
    }
}

TEST_F(HostileRing, HostMemoryIsNotLeftByAnyRange) {
    char bytes[16] = "what was there";
    ASSERT_EQ(vmmgraph_host_buffer_write(buffer, 8 * KiB - 16, bytes, 16), VMMGRAPH_OK);
    for (const auto& [at, size] : {std::pair<std::uint64_t, std::size_t>{8 * KiB - 15, 16},
                                   {8 * KiB, 1},
                                   {huge, 1},
                                   {huge - 7, 16}}) {
        EXPECT_EQ(vmmgraph_host_buffer_write(buffer, at, bytes, size), VMMGRAPH_ERROR_INVALID_SIZE);
        EXPECT_EQ(vmmgraph_host_buffer_read(buffer, at, bytes, size), VMMGRAPH_ERROR_INVALID_SIZE);
    }
    EXPECT_EQ(vmmgraph_host_buffer_write(buffer, 0, nullptr, 1), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_buffer_read(buffer, 0, nullptr, 1), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_buffer_store(buffer, 0, nullptr, 1, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (const auto& [at, size] :
         std::vector<std::pair<std::uint64_t, std::uint64_t>>{{8 * KiB - 15, 16},
                                                              {8 * KiB, 1},
                                                              {~std::uint64_t{0}, 2},
                                                              {0, 8 * KiB + 1},
                                                              {0, ~std::uint64_t{0}}}) {
        EXPECT_EQ(vmmgraph_host_buffer_store(buffer, at, bytes, size, nullptr),
                  VMMGRAPH_ERROR_INVALID_SIZE);
    }
    EXPECT_EQ(vmmgraph_host_buffer_store(buffer, 8 * KiB, nullptr, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_host_buffer_before(buffer, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_host_buffer_write(buffer, 0, bytes, ~std::size_t{0}),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_host_buffer_read(buffer, 0, bytes, ~std::size_t{0}),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    char found[16] = {};
    ASSERT_EQ(vmmgraph_host_buffer_read(buffer, 8 * KiB - 16, found, 16), VMMGRAPH_OK);
    EXPECT_STREQ(found, "what was there");
    void* base = nullptr;
    std::uint64_t size = 0;
    std::int32_t registered = -1;
    ASSERT_EQ(vmmgraph_host_buffer_info(buffer, &base, &size, &registered), VMMGRAPH_OK);
    EXPECT_EQ(size, 8 * KiB);
    EXPECT_EQ(registered, 1);
    EXPECT_EQ(std::memcmp(static_cast<char*>(base) + 8 * KiB - 16, found, 16), 0);
}

TEST_F(HostileRing, ASourceOutlivesItsHandle) {
    ASSERT_EQ(vmmgraph_host_buffer_write(buffer, 0, "bytes", 6), VMMGRAPH_OK);
    set_sources();
    ASSERT_EQ(vmmgraph_host_buffer_destroy(buffer), VMMGRAPH_OK);
    buffer = nullptr;
    void* address = nullptr;
    ASSERT_EQ(vmmgraph_ring_address(ring, 5, &address), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_ring_acquire(ring, 5, nullptr), VMMGRAPH_OK);
    EXPECT_STREQ(static_cast<char*>(address), "bytes");
    ASSERT_EQ(vmmgraph_ring_release(ring, 5, nullptr), VMMGRAPH_OK);
}

TEST_F(HostileRing, ShorterStructsAreServedAndLongerOnesAreNotBelieved) {
    auto few = sized<vmmgraph_ring_stats_t>();
    few.struct_size = 24;
    few.streamed = 77;
    ASSERT_EQ(vmmgraph_ring_stats(ring, &few), VMMGRAPH_OK);
    EXPECT_EQ(few.units, count);
    EXPECT_EQ(few.streamed, 77U);
    vmmgraph_ring_place_t places[count + 1] = {};
    places[count].turn = 77;
    auto schedule = sized<vmmgraph_ring_schedule_t>();
    ASSERT_EQ(vmmgraph_ring_places(ring, places, count + 1, &schedule), VMMGRAPH_OK);
    EXPECT_EQ(schedule.units, count);
    EXPECT_EQ(schedule.places, 2U);
    EXPECT_EQ(places[count - 1].turn, count - 1);
    EXPECT_EQ(places[count].turn, 77U);
    ASSERT_EQ(vmmgraph_ring_places(ring, places + count, 1, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(places[count].turn, 0U);
    schedule.struct_size = 3;
    EXPECT_EQ(vmmgraph_ring_places(ring, places, 1, &schedule), VMMGRAPH_ERROR_STRUCT_SIZE);
}

TEST_F(HostileRing, PlansOfNonsense) {
    auto units = streamed(6, 100);
    auto demand = sized<vmmgraph_ring_demand_t>();
    demand.units = units.data();
    demand.unit_count = units.size();
    demand.link_gib_per_second = 50;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(nullptr, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&demand, nullptr, 0, nullptr), VMMGRAPH_OK);
    char text[8];
    std::size_t needed = 0;
    ASSERT_EQ(vmmgraph_ring_ceiling_text(&demand, text, sizeof text, &needed), VMMGRAPH_OK);
    EXPECT_STREQ(text, "6 of 6 ");
    EXPECT_GT(needed, 100U);
    const double none = std::numeric_limits<double>::quiet_NaN();
    const double endless = std::numeric_limits<double>::infinity();
    for (const double link : {0.0, -1.0, none, endless}) {
        auto wrong = demand;
        wrong.link_gib_per_second = link;
        EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    for (const double seconds : {-1.0, none, endless}) {
        auto wrong = demand;
        wrong.compute_seconds = seconds;
        EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    auto wrong = demand;
    wrong.page_bytes = huge;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr), VMMGRAPH_ERROR_INVALID_SIZE);
    // As many slots as a number holds, and a budget that fewer fit: counted from the units.
    auto many = demand;
    many.slots = ~std::size_t{0};
    many.budget_bytes = 250;
    ASSERT_EQ(vmmgraph_ring_ceiling_text(&many, nullptr, 0, nullptr), VMMGRAPH_OK);
    wrong = demand;
    wrong.remainder = 2;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    wrong = demand;
    wrong.budget_bytes = 1;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, text, sizeof text, &needed),
              VMMGRAPH_ERROR_INVALID_SIZE);
    wrong = demand;
    wrong.units = nullptr;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    wrong.unit_count = 0;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    wrong.struct_size = 1;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&wrong, nullptr, 0, nullptr), VMMGRAPH_ERROR_STRUCT_SIZE);
    units[0].bytes = 0;
    EXPECT_EQ(vmmgraph_ring_ceiling_text(&demand, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_INVALID_SIZE);
}

TEST_F(HostileRing, ManyThreadsOnOneRing) {
    set_sources();
    std::vector<std::thread> threads;
    std::atomic<int> bad{0};
    for (int thread = 0; thread < 6; ++thread) {
        threads.emplace_back([&, thread] {
            for (int round = 0; round < 100; ++round) {
                auto calls = ring_calls(ring);
                calls.pop_back();
                for (const auto& call : buffer_calls(buffer)) {
                    calls.push_back(call);
                }
                calls.pop_back();
                const auto& call =
                    calls[static_cast<std::size_t>(thread * 7 + round) % calls.size()];
                const auto status = call.second();
                bad += status == VMMGRAPH_OK || status == VMMGRAPH_ERROR_WRONG_STATE ? 0 : 1;
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(bad, 0);
}

TEST_F(HostileRing, AHandleThatGoesWhileOthersUseIt) {
    set_sources();
    std::vector<std::thread> threads;
    std::atomic<int> bad{0};
    std::atomic<bool> begin{false};
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            auto calls = ring_calls(ring);
            calls.pop_back();
            while (!begin) {
            }
            for (int round = 0; round < 400; ++round) {
                const auto status =
                    calls[static_cast<std::size_t>(thread + round) % calls.size()].second();
                const bool fine = status == VMMGRAPH_OK || status == VMMGRAPH_ERROR_WRONG_STATE ||
                                  status == VMMGRAPH_ERROR_INVALID_HANDLE;
                bad += fine ? 0 : 1;
            }
        });
    }
    begin = true;
    EXPECT_EQ(vmmgraph_ring_destroy(ring), VMMGRAPH_OK);
    for (auto& thread : threads) {
        thread.join();
    }
    ring = nullptr;
    EXPECT_EQ(bad, 0);
}

}  // namespace
