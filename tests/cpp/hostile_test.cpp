// All caller errors through the C interface give a status, never a crash. Also built with
// sanitizers.
//
// The test abi.coverage requires a call of every function of vmmgraph.h in the hostile tests.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <vmmgraph/vmmgraph.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t KiB = 1 << 10;
constexpr std::uint64_t MiB = 1 << 20;

vmmgraph_device_options_t device_options(std::int32_t device = 0) { return small_device(device); }

vmmgraph_arena_options_t arena_options() {
    auto options = sized<vmmgraph_arena_options_t>();
    options.small_page_bytes = 16 * KiB;
    options.large_page_bytes = 128 * KiB;
    return options;
}

void* address(std::uint64_t value) { return reinterpret_cast<void*>(value); }

bool known(vmmgraph_status_t status) {
    return std::strcmp(vmmgraph_status_name(status), "unknown status") != 0;
}

// One call per function with such a handle, otherwise valid.
using Call = std::pair<const char*, std::function<vmmgraph_status_t()>>;

std::vector<Call> device_calls(vmmgraph_device_t device) {
    return {
        {"device_info",
         [=] {
             auto info = sized<vmmgraph_device_info_t>();
             return vmmgraph_device_info(device, &info);
         }},
        {"device_set_budget", [=] { return vmmgraph_device_set_budget(device, 0); }},
        {"device_add_reclaimer",
         [=] {
             vmmgraph_reclaimer_t reclaimer = nullptr;
             const auto none = [](std::uint64_t, void*) { return std::uint64_t{0}; };
             const auto status =
                 vmmgraph_device_add_reclaimer(device, none, 0, nullptr, &reclaimer);
             if (reclaimer != nullptr) {
                 EXPECT_EQ(vmmgraph_reclaimer_destroy(reclaimer), VMMGRAPH_OK);
                 EXPECT_EQ(vmmgraph_reclaimer_destroy(reclaimer), VMMGRAPH_ERROR_INVALID_HANDLE);
             }
             return status;
         }},
        {"device_stats",
         [=] {
             auto stats = sized<vmmgraph_device_stats_t>();
             return vmmgraph_device_stats(device, &stats);
         }},
        {"device_trim", [=] { return vmmgraph_device_trim(device, nullptr); }},
        {"device_mark", [=] { return vmmgraph_device_mark(device, nullptr); }},
        {"device_note_capture", [=] { return vmmgraph_device_note_capture(device); }},
        {"arena_create",
         [=] {
             vmmgraph_arena_t arena = nullptr;
             return vmmgraph_arena_create(device, nullptr, &arena);
         }},
        {"device_close", [=] { return vmmgraph_device_close(device); }},
    };
}

std::vector<Call> arena_calls(vmmgraph_arena_t arena) {
    return {
        {"arena_trim", [=] { return vmmgraph_arena_trim(arena, nullptr); }},
        {"arena_mark", [=] { return vmmgraph_arena_mark(arena); }},
        {"arena_replay_seq",
         [=] {
             std::uint64_t replays = 0;
             return vmmgraph_arena_replay_seq(arena, &replays);
         }},
        {"arena_lift_serial", [=] { return vmmgraph_arena_lift_serial(arena); }},
        {"arena_pause", [=] { return vmmgraph_arena_pause(arena, nullptr, nullptr); }},
        {"arena_resume", [=] { return vmmgraph_arena_resume(arena, 0, nullptr); }},
        {"arena_shrink_to_fit",
         [=] { return vmmgraph_arena_shrink_to_fit(arena, nullptr, nullptr); }},
        {"arena_set_budget", [=] { return vmmgraph_arena_set_budget(arena, 0); }},
        {"arena_stats",
         [=] {
             auto stats = sized<vmmgraph_arena_stats_t>();
             return vmmgraph_arena_stats(arena, &stats);
         }},
        {"arena_stats_json", [=] { return vmmgraph_arena_stats_json(arena, nullptr, 0, nullptr); }},
        {"arena_map_json",
         [=] { return vmmgraph_arena_map_json(arena, nullptr, nullptr, 0, nullptr); }},
        {"arena_trace_events", [=] { return vmmgraph_arena_trace_events(arena, 1); }},
        {"arena_switch", [=] { return vmmgraph_arena_switch_to_new_virtual_space(arena); }},
        {"arena_allocate",
         [=] {
             void* block = nullptr;
             return vmmgraph_arena_allocate(arena, 1, nullptr, &block);
         }},
        {"arena_deallocate", [=] { return vmmgraph_arena_deallocate(arena, address(512)); }},
        {"space_open",
         [=] {
             vmmgraph_space_t space = nullptr;
             return vmmgraph_space_open(arena, &space);
         }},
        {"space_open_bump",
         [=] {
             vmmgraph_space_t space = nullptr;
             return vmmgraph_space_open_bump(arena, &space);
         }},
        {"arena_destroy", [=] { return vmmgraph_arena_destroy(arena); }},
    };
}

void nothing(void*) {}

std::vector<Call> space_calls(vmmgraph_space_t space) {
    return {
        {"space_allocate",
         [=] {
             void* block = nullptr;
             return vmmgraph_space_allocate(space, 1, nullptr, &block);
         }},
        {"space_allocate_kept",
         [=] {
             void* block = nullptr;
             return vmmgraph_space_allocate_kept(space, 1, nullptr, &block);
         }},
        {"space_free", [=] { return vmmgraph_space_free(space, address(512)); }},
        {"space_record_stream",
         [=] { return vmmgraph_space_record_stream(space, address(512), nullptr); }},
        {"space_wait", [=] { return vmmgraph_space_wait(space); }},
        {"space_mark", [=] { return vmmgraph_space_mark(space); }},
        {"space_set_label", [=] { return vmmgraph_space_set_label(space, "a shape"); }},
        {"space_set_site", [=] { return vmmgraph_space_set_site(space, "a.cpp:1"); }},
        {"space_label", [=] { return vmmgraph_space_label(space, nullptr, 0, nullptr); }},
        {"space_seal",
         [=] { return vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, nullptr); }},
        {"space_replay", [=] { return vmmgraph_space_replay(space, nullptr, nothing, nullptr); }},
        {"space_enter", [=] { return vmmgraph_space_enter(space, nullptr); }},
        {"space_leave", [=] { return vmmgraph_space_leave(space); }},
        {"space_live_blocks",
         [=] {
             std::size_t count = 0;
             return vmmgraph_space_live_blocks(space, nullptr, 0, &count);
         }},
        {"space_stats",
         [=] {
             auto stats = sized<vmmgraph_space_stats_t>();
             return vmmgraph_space_stats(space, &stats);
         }},
        {"space_blocks_json",
         [=] { return vmmgraph_space_blocks_json(space, nullptr, 0, nullptr); }},
        {"space_verify",
         [=] {
             auto difference = sized<vmmgraph_difference_t>();
             return vmmgraph_space_verify(space, nullptr, nullptr, 0, nothing, nullptr,
                                          &difference);
         }},
        {"space_destroy", [=] { return vmmgraph_space_destroy(space); }},
    };
}

void all_refused(const std::vector<Call>& calls, const std::string& what) {
    for (const auto& [name, call] : calls) {
        EXPECT_EQ(call(), VMMGRAPH_ERROR_INVALID_HANDLE) << name << " of " << what;
    }
}

class Hostile : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;

    void SetUp() override {
        const auto options = device_options();
        ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
        const auto pages = arena_options();
        ASSERT_EQ(vmmgraph_arena_create(device, &pages, &arena), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_open(arena, &space), VMMGRAPH_OK);
    }

    // The objects still work, and no memory remains.
    void TearDown() override {
        ASSERT_EQ(vmmgraph_device_set_budget(device, 0), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_arena_set_budget(arena, 0), VMMGRAPH_OK);
        vmmgraph_space_t fresh = nullptr;
        ASSERT_EQ(vmmgraph_space_open(arena, &fresh), VMMGRAPH_OK);
        void* block = nullptr;
        ASSERT_EQ(vmmgraph_space_allocate(fresh, MiB, nullptr, &block), VMMGRAPH_OK);
        std::memset(block, 1, MiB);
        ASSERT_EQ(vmmgraph_space_free(fresh, block), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_seal(fresh, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_replay(fresh, nullptr, nothing, nullptr), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_space_destroy(fresh), VMMGRAPH_OK);
        if (space != nullptr) {
            ASSERT_EQ(vmmgraph_space_destroy(space), VMMGRAPH_OK);
        }
        ASSERT_EQ(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
        auto stats = sized<vmmgraph_device_stats_t>();
        ASSERT_EQ(vmmgraph_device_stats(device, &stats), VMMGRAPH_OK);
        EXPECT_EQ(stats.physical_bytes, 0u);
        EXPECT_EQ(stats.mappings, 0u);
        EXPECT_EQ(stats.reservations, 0u);
        EXPECT_EQ(stats.pending, 0u);
        ASSERT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
    }

    void* allocate(std::uint64_t bytes) {
        void* block = nullptr;
        EXPECT_EQ(vmmgraph_space_allocate(space, bytes, nullptr, &block), VMMGRAPH_OK);
        return block;
    }
};

TEST_F(Hostile, NullForEveryPointer) {
    const auto options = device_options();
    vmmgraph_device_t opened = nullptr;
    vmmgraph_arena_t made = nullptr;
    vmmgraph_space_t other = nullptr;
    EXPECT_EQ(vmmgraph_last_error(nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_last_error_message(nullptr, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_last_error_message(nullptr, SIZE_MAX, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_device_open(nullptr, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_open(&options, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    // Null options mean the defaults, which conflict with the open device.
    EXPECT_EQ(vmmgraph_device_open(nullptr, &opened), VMMGRAPH_ERROR_DEVICE_IN_USE);
    EXPECT_EQ(opened, nullptr);
    EXPECT_EQ(vmmgraph_device_info(device, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_device_stats(device, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_create(device, nullptr, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_create(device, nullptr, &made), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_destroy(made), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_trim(arena, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_device_trim(device, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_stats(arena, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_replay_seq(arena, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_stats_json(arena, nullptr, 0, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_stats_json(arena, nullptr, SIZE_MAX, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_map_json(arena, nullptr, nullptr, SIZE_MAX, nullptr), VMMGRAPH_OK);
    for (const auto render : {vmmgraph_map_html, vmmgraph_map_report, vmmgraph_map_perfetto}) {
        std::size_t untouched = 77;
        EXPECT_EQ(render(nullptr, nullptr, 0, &untouched), VMMGRAPH_ERROR_NULL_ARGUMENT);
        for (const char* text :
             {"", "{", "[]", "{\"format\": 1}", "{\"format\": 2}", "{\"format\": -1}", "\xff"}) {
            EXPECT_EQ(render(text, nullptr, 0, &untouched), VMMGRAPH_ERROR_INVALID_ARGUMENT)
                << text;
        }
        EXPECT_EQ(untouched, 77u);
    }
    EXPECT_EQ(vmmgraph_arena_allocate(arena, 1, nullptr, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_deallocate(arena, nullptr), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_space_open(arena, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_allocate(space, 1, nullptr, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_allocate_kept(space, 1, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_free(space, nullptr), VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_space_record_stream(space, nullptr, nullptr),
              VMMGRAPH_ERROR_FOREIGN_POINTER);
    EXPECT_EQ(vmmgraph_space_live_blocks(space, nullptr, 0, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_set_label(space, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_set_label(space, std::string(1025, 'x').c_str()),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_space_set_site(space, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_set_site(space, std::string(1025, 'x').c_str()),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_space_label(space, nullptr, SIZE_MAX, nullptr), VMMGRAPH_OK);
    std::size_t count = 77;
    EXPECT_EQ(vmmgraph_space_live_blocks(space, nullptr, 3, &count), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(count, 77u) << "an output was written by a call that failed";
    EXPECT_EQ(vmmgraph_space_stats(space, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_open(arena, &other), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_seal(other, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_replay(other, nullptr, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    auto difference = sized<vmmgraph_difference_t>();
    EXPECT_EQ(vmmgraph_space_verify(other, nullptr, nullptr, 0, nullptr, nullptr, &difference),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_verify(other, nullptr, nullptr, 1, nothing, nullptr, &difference),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_verify(other, nullptr, nullptr, 0, nothing, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_space_verify(other, nullptr, nullptr, 0, nothing, nullptr, &difference),
              VMMGRAPH_OK);
    const vmmgraph_output_t endless{address(512), UINT64_MAX};
    EXPECT_EQ(vmmgraph_space_verify(other, nullptr, &endless, 1, nothing, nullptr, &difference),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(vmmgraph_space_blocks_json(other, nullptr, SIZE_MAX, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_destroy(other), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_set_log_sink(nullptr, nullptr, nullptr, VMMGRAPH_LOG_TRACE), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_torch_set_arena(0, nullptr), VMMGRAPH_OK);
    vmmgraph_torch_free(nullptr, 0, 0, nullptr);
}

TEST_F(Hostile, NullGarbageAndForeignHandles) {
    auto heap = std::make_unique<std::uint64_t[]>(8);
    const std::uint64_t values[] = {
        0,
        1,
        2,
        0x0000000100000000,
        0x0000000200000000,
        0x00000001ffffffff,
        0x7fffffffffffffff,
        0x8000000000000000,
        UINT64_MAX,
        UINT64_MAX - 1,
        reinterpret_cast<std::uint64_t>(heap.get()),
        reinterpret_cast<std::uint64_t>(&heap),
        reinterpret_cast<std::uint64_t>(device) + 1,
        reinterpret_cast<std::uint64_t>(device) ^ (std::uint64_t{1} << 33),
        reinterpret_cast<std::uint64_t>(space) + 16,
    };
    for (const std::uint64_t value : values) {
        const auto handle = reinterpret_cast<std::uint64_t>(device);
        if (value == handle || value == reinterpret_cast<std::uint64_t>(arena) ||
            value == reinterpret_cast<std::uint64_t>(space)) {
            continue;
        }
        const std::string what = "handle " + std::to_string(value);
        all_refused(device_calls(garbage<vmmgraph_device_t>(value)), what);
        all_refused(arena_calls(garbage<vmmgraph_arena_t>(value)), what);
        all_refused(space_calls(garbage<vmmgraph_space_t>(value)), what);
        if (value != 0) {
            EXPECT_EQ(vmmgraph_torch_set_arena(0, garbage<vmmgraph_arena_t>(value)),
                      VMMGRAPH_ERROR_INVALID_HANDLE);
        }
    }
}

TEST_F(Hostile, HandlesOfAnotherKind) {
    all_refused(device_calls(reinterpret_cast<vmmgraph_device_t>(arena)), "an arena");
    all_refused(device_calls(reinterpret_cast<vmmgraph_device_t>(space)), "a space");
    all_refused(arena_calls(reinterpret_cast<vmmgraph_arena_t>(device)), "a device");
    all_refused(arena_calls(reinterpret_cast<vmmgraph_arena_t>(space)), "a space");
    all_refused(space_calls(reinterpret_cast<vmmgraph_space_t>(device)), "a device");
    all_refused(space_calls(reinterpret_cast<vmmgraph_space_t>(arena)), "an arena");
}

TEST_F(Hostile, UseAfterDestroy) {
    vmmgraph_device_t gone_device = nullptr;
    vmmgraph_arena_t gone_arena = nullptr;
    vmmgraph_space_t gone_space = nullptr;
    const auto options = device_options(1);
    ASSERT_EQ(vmmgraph_device_open(&options, &gone_device), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_arena_create(gone_device, nullptr, &gone_arena), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_space_open(gone_arena, &gone_space), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_device_close(gone_device), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_arena_destroy(gone_arena), VMMGRAPH_OK);
    all_refused(device_calls(gone_device), "a closed device");
    all_refused(arena_calls(gone_arena), "a destroyed arena");
    // The space keeps its arena and device.
    void* block = nullptr;
    EXPECT_EQ(vmmgraph_space_allocate(gone_space, 100, nullptr, &block), VMMGRAPH_OK);
    std::memset(block, 1, 100);
    ASSERT_EQ(vmmgraph_space_destroy(gone_space), VMMGRAPH_OK);
    all_refused(space_calls(gone_space), "a destroyed space");

    for (int i = 0; i < 100; ++i) {
        ASSERT_EQ(vmmgraph_device_open(&options, &gone_device), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_device_close(gone_device), VMMGRAPH_OK);
    }
    all_refused(space_calls(gone_space), "a destroyed space");
    all_refused(arena_calls(gone_arena), "a destroyed arena");
    all_refused(device_calls(gone_device), "a closed device");
}

TEST_F(Hostile, SizesFromZeroToTheMost) {
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, (std::uint64_t{1} << 46) + 1, std::uint64_t{1} << 63, UINT64_MAX - 511,
          static_cast<std::uint64_t>(SIZE_MAX)}) {
        void* block = this;
        EXPECT_EQ(vmmgraph_space_allocate(space, bytes, nullptr, &block),
                  VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
        EXPECT_EQ(vmmgraph_space_allocate_kept(space, bytes, nullptr, &block),
                  VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
        EXPECT_EQ(vmmgraph_arena_allocate(arena, bytes, nullptr, &block),
                  VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
        EXPECT_EQ(block, this) << "an output was written by a call that failed";
        auto info = sized<vmmgraph_error_info_t>();
        ASSERT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
        EXPECT_EQ(info.status, VMMGRAPH_ERROR_INVALID_SIZE);
        EXPECT_EQ(info.requested, bytes);
        EXPECT_EQ(info.available, std::uint64_t{1} << 46);
    }
    for (const std::uint64_t bytes :
         {std::uint64_t{1} << 46, (std::uint64_t{1} << 36) - 1, std::uint64_t{1} << 34, 65 * MiB}) {
        void* block = this;
        for (const auto allocate : {vmmgraph_space_allocate, vmmgraph_space_allocate_kept}) {
            const auto status = allocate(space, bytes, nullptr, &block);
            EXPECT_GE(status, VMMGRAPH_ERROR_OUT_OF_MEMORY) << bytes;
            EXPECT_LE(status, VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS) << bytes;
        }
        EXPECT_EQ(block, this);
    }
    auto stats = sized<vmmgraph_arena_stats_t>();
    ASSERT_EQ(vmmgraph_arena_stats(arena, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.physical_bytes, 0u) << "a failed call has kept pages";
    EXPECT_EQ(stats.blocks, 0u);
    EXPECT_EQ(stats.reserved_bytes, 0u);
}

TEST_F(Hostile, DevicesThatDoNotExist) {
    for (const std::int32_t number : {-1, 99, INT_MIN, INT_MAX}) {
        const auto options = device_options(number);
        vmmgraph_device_t opened = device;
        EXPECT_EQ(vmmgraph_device_open(&options, &opened), VMMGRAPH_ERROR_INVALID_DEVICE) << number;
        EXPECT_EQ(opened, device);
        auto info = sized<vmmgraph_error_info_t>();
        ASSERT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
        EXPECT_EQ(info.device, number);
        EXPECT_EQ(vmmgraph_torch_set_arena(number, arena), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_torch_set_arena(number, nullptr), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_torch_alloc(512, number, nullptr), nullptr);
        ASSERT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
        EXPECT_EQ(info.status, VMMGRAPH_ERROR_INVALID_DEVICE);
        vmmgraph_torch_free(&info, 512, number, nullptr);
        ASSERT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
        EXPECT_EQ(info.status, VMMGRAPH_ERROR_FOREIGN_POINTER);
    }
}

TEST_F(Hostile, PointersThatAreNoBlocks) {
    auto* const block = static_cast<char*>(allocate(MiB));
    auto* const small = static_cast<char*>(allocate(700));
    int on_stack = 0;
    auto heap = std::make_unique<char[]>(4096);
    vmmgraph_space_t other = nullptr;
    ASSERT_EQ(vmmgraph_space_open(arena, &other), VMMGRAPH_OK);
    void* elsewhere = nullptr;
    ASSERT_EQ(vmmgraph_space_allocate(other, 700, nullptr, &elsewhere), VMMGRAPH_OK);
    void* const foreign[] = {
        nullptr,     address(1), address(UINT64_MAX), address(UINT64_MAX - 511),
        &on_stack,   heap.get(), block + 1,           block + 512,
        small + 511, elsewhere};
    for (void* const pointer : foreign) {
        EXPECT_EQ(vmmgraph_space_free(space, pointer), VMMGRAPH_ERROR_FOREIGN_POINTER) << pointer;
        EXPECT_EQ(vmmgraph_space_record_stream(space, pointer, address(7)),
                  VMMGRAPH_ERROR_FOREIGN_POINTER)
            << pointer;
        EXPECT_EQ(vmmgraph_arena_deallocate(arena, pointer), VMMGRAPH_ERROR_FOREIGN_POINTER)
            << pointer;
        auto info = sized<vmmgraph_error_info_t>();
        ASSERT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
        EXPECT_EQ(info.requested, reinterpret_cast<std::uint64_t>(pointer));
    }
    // In a slab's gap, freed and never allocated blocks are indistinguishable.
    for (void* const pointer : {small + 512, small + 1024, small - 512, block + MiB, block - 512}) {
        for (const auto status : {vmmgraph_space_free(space, pointer),
                                  vmmgraph_space_record_stream(space, pointer, address(7))}) {
            EXPECT_TRUE(status == VMMGRAPH_ERROR_FOREIGN_POINTER ||
                        status == VMMGRAPH_ERROR_DOUBLE_FREE)
                << status;
        }
    }
    ASSERT_EQ(vmmgraph_space_destroy(other), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_free(space, elsewhere), VMMGRAPH_ERROR_FOREIGN_POINTER);

    std::memset(block, 1, MiB);
    std::memset(small, 1, 700);
    for (char* const pointer : {block, small}) {
        EXPECT_EQ(vmmgraph_space_free(space, pointer), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_free(space, pointer), VMMGRAPH_ERROR_DOUBLE_FREE);
        EXPECT_EQ(vmmgraph_space_record_stream(space, pointer, nullptr),
                  VMMGRAPH_ERROR_DOUBLE_FREE);
    }
    void* const retained = allocate(MiB);
    void* kept = nullptr;
    ASSERT_EQ(vmmgraph_space_allocate_kept(space, 700, nullptr, &kept), VMMGRAPH_OK);
    std::memset(kept, 1, 700);
    EXPECT_EQ(vmmgraph_space_free(space, static_cast<char*>(kept) + 512),
              VMMGRAPH_ERROR_FOREIGN_POINTER);
    ASSERT_EQ(vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_record_stream(space, kept, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_free(space, kept), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_free(space, kept), VMMGRAPH_ERROR_DOUBLE_FREE);
    EXPECT_EQ(vmmgraph_space_record_stream(space, kept, nullptr), VMMGRAPH_ERROR_DOUBLE_FREE);
    EXPECT_EQ(vmmgraph_space_free(space, retained), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_free(space, retained), VMMGRAPH_ERROR_DOUBLE_FREE);
    EXPECT_EQ(vmmgraph_space_free(space, small + 1), VMMGRAPH_ERROR_FOREIGN_POINTER);
}

// Every wrong struct size, at the end of a heap block, so a sanitizer detects overreads.
template <class Struct, class F>
void wrong_sizes(const char* name, F&& call) {
    const std::size_t right = sizeof(Struct);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, sizeof(std::size_t), right - 1,
                                   right + 1, std::size_t{4104}, std::size_t{1} << 40, SIZE_MAX}) {
        auto value = std::make_unique<Struct>();
        std::memset(value.get(), 0, sizeof(Struct));
        value->struct_size = size;
        const Struct before = *value;
        EXPECT_EQ(call(value.get()), VMMGRAPH_ERROR_STRUCT_SIZE) << name << " of size " << size;
        EXPECT_EQ(std::memcmp(&before, value.get(), sizeof before), 0) << name << " was written";
    }
}

TEST_F(Hostile, StructSizes) {
    vmmgraph_device_t opened = nullptr;
    vmmgraph_arena_t made = nullptr;
    wrong_sizes<vmmgraph_error_info_t>("error_info",
                                       [](auto* value) { return vmmgraph_last_error(value); });
    wrong_sizes<vmmgraph_device_options_t>(
        "device_options", [&](auto* value) { return vmmgraph_device_open(value, &opened); });
    wrong_sizes<vmmgraph_device_info_t>(
        "device_info", [&](auto* value) { return vmmgraph_device_info(device, value); });
    wrong_sizes<vmmgraph_device_stats_t>(
        "device_stats", [&](auto* value) { return vmmgraph_device_stats(device, value); });
    wrong_sizes<vmmgraph_arena_options_t>(
        "arena_options", [&](auto* value) { return vmmgraph_arena_create(device, value, &made); });
    wrong_sizes<vmmgraph_arena_stats_t>(
        "arena_stats", [&](auto* value) { return vmmgraph_arena_stats(arena, value); });
    wrong_sizes<vmmgraph_space_stats_t>(
        "space_stats", [&](auto* value) { return vmmgraph_space_stats(space, value); });
    wrong_sizes<vmmgraph_seal_report_t>("seal_report", [&](auto* value) {
        return vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, value);
    });
    vmmgraph_space_t sealed = nullptr;
    ASSERT_EQ(vmmgraph_space_open(arena, &sealed), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_space_seal(sealed, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
    wrong_sizes<vmmgraph_difference_t>("difference", [&](auto* value) {
        return vmmgraph_space_verify(sealed, nullptr, nullptr, 0, nothing, nullptr, value);
    });
    EXPECT_EQ(vmmgraph_space_destroy(sealed), VMMGRAPH_OK);
    EXPECT_EQ(opened, nullptr);
    EXPECT_EQ(made, nullptr);
    auto stats = sized<vmmgraph_space_stats_t>();
    ASSERT_EQ(vmmgraph_space_stats(space, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.phase, VMMGRAPH_SPACE_OPEN) << "a seal that failed has sealed";
}

// Struct sizes of other versions: only fields known to the library and within the block are
// written.
template <class Struct, class F>
void other_sizes(const char* name, F&& call) {
    for (std::size_t size = 16; size <= sizeof(Struct) + 24; size += 8) {
        auto memory = std::make_unique<unsigned char[]>(size);
        std::memset(memory.get(), 0xc5, size);
        std::memcpy(memory.get(), &size, sizeof size);
        EXPECT_EQ(call(reinterpret_cast<Struct*>(memory.get())), VMMGRAPH_OK)
            << name << " of size " << size;
        EXPECT_EQ(std::memcmp(memory.get(), &size, sizeof size), 0) << name << " of size " << size;
        for (std::size_t i = sizeof(Struct); i < size; ++i) {
            EXPECT_EQ(memory[i], 0xc5) << name << " of size " << size << " at " << i;
        }
        EXPECT_NE(memory[std::min(size, sizeof(Struct)) - 1], 0xc5) << name << " of size " << size;
    }
}

TEST_F(Hostile, StructsOfOtherVersions) {
    other_sizes<vmmgraph_error_info_t>("error_info",
                                       [](auto* value) { return vmmgraph_last_error(value); });
    other_sizes<vmmgraph_device_info_t>(
        "device_info", [&](auto* value) { return vmmgraph_device_info(device, value); });
    other_sizes<vmmgraph_device_stats_t>(
        "device_stats", [&](auto* value) { return vmmgraph_device_stats(device, value); });
    other_sizes<vmmgraph_arena_stats_t>(
        "arena_stats", [&](auto* value) { return vmmgraph_arena_stats(arena, value); });
    other_sizes<vmmgraph_space_stats_t>(
        "space_stats", [&](auto* value) { return vmmgraph_space_stats(space, value); });
    other_sizes<vmmgraph_seal_report_t>("seal_report", [&](auto* value) {
        vmmgraph_space_t sealed = nullptr;
        EXPECT_EQ(vmmgraph_space_open(arena, &sealed), VMMGRAPH_OK);
        const auto status = vmmgraph_space_seal(sealed, VMMGRAPH_RETAIN_DEFAULT, value);
        EXPECT_EQ(vmmgraph_space_destroy(sealed), VMMGRAPH_OK);
        return status;
    });

    // Missing fields of shorter structs get defaults; extra fields of longer structs must be 0.
    auto right = arena_options();
    right.budget_bytes = 64 << 20;
    for (std::size_t size = 16; size <= sizeof right + 24; size += 8) {
        auto memory = std::make_unique<unsigned char[]>(size);
        std::memset(memory.get(), 0, size);
        std::memcpy(memory.get(), &right, std::min(size, sizeof right));
        std::memcpy(memory.get(), &size, sizeof size);
        const auto create = [&](vmmgraph_arena_t* made) {
            return vmmgraph_arena_create(
                device, reinterpret_cast<vmmgraph_arena_options_t*>(memory.get()), made);
        };
        vmmgraph_arena_t made = nullptr;
        ASSERT_EQ(create(&made), VMMGRAPH_OK) << size << ": " << last_message();
        auto stats = sized<vmmgraph_arena_stats_t>();
        EXPECT_EQ(vmmgraph_arena_stats(made, &stats), VMMGRAPH_OK);
        const std::size_t known =
            offsetof(vmmgraph_arena_options_t, budget_bytes) + sizeof right.budget_bytes;
        EXPECT_EQ(stats.budget_bytes, size < known ? 0 : right.budget_bytes) << size;
        EXPECT_EQ(vmmgraph_arena_destroy(made), VMMGRAPH_OK);
        if (size > sizeof right) {
            made = nullptr;
            memory[size - 1] = 1;
            EXPECT_EQ(create(&made), VMMGRAPH_ERROR_STRUCT_SIZE) << size;
            EXPECT_NE(last_message().find(std::to_string(size)), std::string::npos)
                << last_message();
            EXPECT_NE(last_message().find(std::to_string(sizeof right)), std::string::npos)
                << last_message();
            EXPECT_EQ(made, nullptr);
        }
    }
}

TEST_F(Hostile, NumbersThatMeanNothing) {
    for (const std::int32_t number : {-1, 3, 77, INT_MIN, INT_MAX}) {
        auto options = device_options(1);
        // 3 is a valid platform.
        options.driver = number == 3 ? 99 : number;
        vmmgraph_device_t opened = nullptr;
        EXPECT_EQ(vmmgraph_device_open(&options, &opened), VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
        auto pages = arena_options();
        pages.retain = number == 3 ? 5 : number;
        vmmgraph_arena_t made = nullptr;
        EXPECT_EQ(vmmgraph_arena_create(device, &pages, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
        pages.retain = VMMGRAPH_RETAIN_DEFAULT;
        pages.flags = number == 3 ? 16 : number;
        EXPECT_EQ(vmmgraph_arena_create(device, &pages, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
        auto report = sized<vmmgraph_seal_report_t>();
        EXPECT_EQ(vmmgraph_space_seal(space, number == 3 ? 5 : number, &report),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT)
            << number;
        EXPECT_STREQ(vmmgraph_status_name(number == 3 ? 10 : number), "unknown status");
        const auto sink = [](std::int32_t, const char*, std::size_t, void*) {};
        EXPECT_EQ(vmmgraph_set_log_sink(sink, nullptr, nullptr, number), VMMGRAPH_OK)
            << "levels are clamped";
        vmmgraph_space_t logged = nullptr;
        EXPECT_EQ(vmmgraph_space_open(arena, &logged), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_destroy(logged), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_set_log_sink(nullptr, nullptr, nullptr, number), VMMGRAPH_OK);
    }
    EXPECT_NE(vmmgraph_version(), nullptr);
    EXPECT_EQ(vmmgraph_abi_version(), 1u);
}

TEST_F(Hostile, GeometryThatFitsNoDevice) {
    const std::uint64_t odd[] = {
        1, 2, 3, 4095, 4097, 12 * KiB, std::uint64_t{1} << 31, std::uint64_t{1} << 63, UINT64_MAX};
    for (const std::uint64_t bytes : odd) {
        auto options = device_options(1);
        options.host_granularity_bytes = bytes;
        vmmgraph_device_t opened = nullptr;
        EXPECT_EQ(vmmgraph_device_open(&options, &opened), VMMGRAPH_ERROR_INVALID_SIZE) << bytes;
        auto pages = arena_options();
        vmmgraph_arena_t made = nullptr;
        pages.small_page_bytes = bytes;
        EXPECT_EQ(vmmgraph_arena_create(device, &pages, &made), VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
    }
    for (const std::uint64_t bytes : {std::uint64_t{1}, 16 * KiB + 1, 8 * KiB,
                                      (std::uint64_t{1} << 46) + 16 * KiB, UINT64_MAX}) {
        auto pages = arena_options();
        vmmgraph_arena_t made = nullptr;
        pages.large_page_bytes = bytes;
        EXPECT_EQ(vmmgraph_arena_create(device, &pages, &made), VMMGRAPH_ERROR_INVALID_SIZE)
            << bytes;
    }
    auto options = device_options(1);
    options.host_memory_bytes = UINT64_MAX;
    vmmgraph_device_t opened = nullptr;
    EXPECT_EQ(vmmgraph_device_open(&options, &opened), VMMGRAPH_ERROR_INVALID_SIZE);

    // The largest valid page size.
    auto pages = arena_options();
    pages.large_page_bytes = std::uint64_t{1} << 46;
    vmmgraph_arena_t made = nullptr;
    ASSERT_EQ(vmmgraph_arena_create(device, &pages, &made), VMMGRAPH_OK);
    void* block = nullptr;
    const auto status = vmmgraph_arena_allocate(made, std::uint64_t{1} << 46, nullptr, &block);
    EXPECT_GE(status, VMMGRAPH_ERROR_OUT_OF_MEMORY);
    EXPECT_LE(status, VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS);
    EXPECT_EQ(vmmgraph_arena_destroy(made), VMMGRAPH_OK);
}

TEST_F(Hostile, BuffersOfEverySize) {
    void* block = nullptr;
    EXPECT_EQ(vmmgraph_space_allocate(space, 0, nullptr, &block), VMMGRAPH_ERROR_INVALID_SIZE);
    const auto texts = {std::function<vmmgraph_status_t(char*, std::size_t, std::size_t*)>(
                            vmmgraph_last_error_message),
                        std::function<vmmgraph_status_t(char*, std::size_t, std::size_t*)>(
                            [this](char* buffer, std::size_t capacity, std::size_t* needed) {
                                return vmmgraph_arena_stats_json(arena, buffer, capacity, needed);
                            })};
    for (const auto& text : texts) {
        std::size_t needed = 0;
        ASSERT_EQ(text(nullptr, 0, &needed), VMMGRAPH_OK);
        ASSERT_GT(needed, 10u);
        std::string whole(needed, '#');
        ASSERT_EQ(text(whole.data(), needed, nullptr), VMMGRAPH_OK);
        ASSERT_EQ(whole.back(), '\0');
        for (std::size_t capacity = 0; capacity < needed + 2; capacity += 1 + capacity / 7) {
            // Markers detect overruns without a sanitizer.
            const auto buffer = std::make_unique<char[]>(capacity + 4);
            std::memset(buffer.get(), '#', capacity + 4);
            std::size_t again = 0;
            ASSERT_EQ(text(buffer.get(), capacity, &again), VMMGRAPH_OK);
            EXPECT_EQ(again, needed);
            EXPECT_EQ(std::memcmp(buffer.get() + capacity, "####", 4), 0) << capacity;
            if (capacity > 0) {
                const std::size_t length = std::strlen(buffer.get());
                EXPECT_EQ(length, std::min(capacity, needed) - 1);
                EXPECT_EQ(std::memcmp(buffer.get(), whole.data(), length), 0);
            }
        }
    }
    std::vector<void*> expected = {allocate(512), allocate(512), allocate(512)};
    for (std::size_t capacity = 0; capacity < 6; ++capacity) {
        std::vector<void*> blocks(capacity + 1, this);
        std::size_t count = 0;
        ASSERT_EQ(vmmgraph_space_live_blocks(space, blocks.data(), capacity, &count), VMMGRAPH_OK);
        EXPECT_EQ(count, 3u);
        for (std::size_t i = 0; i <= capacity; ++i) {
            EXPECT_EQ(blocks[i] == this, i >= std::min<std::size_t>(capacity, 3))
                << i << " of " << capacity;
        }
    }
}

TEST_F(Hostile, ErrorsBelongToTheirThread) {
    void* block = nullptr;
    EXPECT_EQ(vmmgraph_space_allocate(space, 0, nullptr, &block), VMMGRAPH_ERROR_INVALID_SIZE);
    std::thread([&] {
        auto info = sized<vmmgraph_error_info_t>();
        EXPECT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
        EXPECT_EQ(info.status, VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_free(space, nullptr), VMMGRAPH_ERROR_FOREIGN_POINTER);
    }).join();
    auto info = sized<vmmgraph_error_info_t>();
    EXPECT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
    EXPECT_EQ(info.status, VMMGRAPH_ERROR_INVALID_SIZE);
}

TEST_F(Hostile, NoFileDescriptorsLeft) {
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit few = before;
    few.rlim_cur = 40;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    void* block = nullptr;
    EXPECT_EQ(vmmgraph_space_allocate(space, 32 * MiB, nullptr, &block),
              VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS);
    auto stats = sized<vmmgraph_arena_stats_t>();
    EXPECT_EQ(vmmgraph_arena_stats(arena, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.physical_bytes, 0u);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_EQ(vmmgraph_space_allocate(space, 32 * MiB, nullptr, &block), VMMGRAPH_OK);
    std::memset(block, 1, 32 * MiB);
}

TEST_F(Hostile, TorchCalls) {
    ASSERT_EQ(vmmgraph_torch_set_arena(0, arena), VMMGRAPH_OK);
    for (const std::ptrdiff_t size :
         {std::ptrdiff_t{0}, std::ptrdiff_t{-1}, PTRDIFF_MIN, PTRDIFF_MAX}) {
        EXPECT_EQ(vmmgraph_torch_alloc(size, 0, nullptr), nullptr) << size;
    }
    EXPECT_EQ(vmmgraph_torch_alloc(static_cast<std::ptrdiff_t>(65 * MiB), 0, nullptr), nullptr);
    void* const block = vmmgraph_torch_alloc(static_cast<std::ptrdiff_t>(MiB), 0, nullptr);
    ASSERT_NE(block, nullptr);
    std::memset(block, 1, MiB);
    int on_stack = 0;
    for (void* const pointer : {static_cast<void*>(&on_stack), address(1), address(UINT64_MAX)}) {
        vmmgraph_torch_free(pointer, 512, 0, nullptr);
        vmmgraph_torch_free(pointer, -1, -1, address(3));
    }
    vmmgraph_torch_free(block, 0, 0, nullptr);
    vmmgraph_torch_free(block, 0, 0, nullptr);
    auto info = sized<vmmgraph_error_info_t>();
    ASSERT_EQ(vmmgraph_last_error(&info), VMMGRAPH_OK);
    EXPECT_EQ(info.status, VMMGRAPH_ERROR_DOUBLE_FREE);
    ASSERT_EQ(vmmgraph_torch_set_arena(0, nullptr), VMMGRAPH_OK);
}

// Random calls on shared handles and blocks, many destroyed concurrently. Block memory is not
// accessed, because its space may be destroyed.
class Crowd {
public:
    explicit Crowd(vmmgraph_device_t device) : device_(device) {}

    void run(std::uint32_t seed, int calls) {
        std::mt19937 random(seed);
        for (int i = 0; i < calls; ++i) {
            const auto status = step(random);
            if (!known(status) || status == VMMGRAPH_ERROR_INTERNAL ||
                status == VMMGRAPH_ERROR_CLOSED) {
                ++bad;
                char message[300];
                static_cast<void>(vmmgraph_last_error_message(message, sizeof message, nullptr));
                ADD_FAILURE() << "status " << status << ": " << message;
                return;
            }
            ++(status == VMMGRAPH_OK ? succeeded : refused);
        }
    }

    void destroy_all() {
        for (auto* const space : spaces_) {
            static_cast<void>(vmmgraph_space_destroy(space));
        }
        for (auto* const arena : arenas_) {
            static_cast<void>(vmmgraph_arena_destroy(arena));
        }
        for (auto* const reclaimer : reclaimers_) {
            static_cast<void>(vmmgraph_reclaimer_destroy(reclaimer));
        }
        for (auto* const account : accounts_) {
            static_cast<void>(vmmgraph_account_destroy(account));
        }
    }

    std::atomic<int> bad{0};
    std::atomic<int> succeeded{0};
    std::atomic<int> refused{0};
    std::atomic<int> asked{0};

private:
    template <class T>
    T pick(std::mt19937& random, std::vector<T>& from) {
        const std::lock_guard<std::mutex> lock(mutex_);
        // Most old ones are destroyed.
        const std::size_t window = std::min<std::size_t>(from.size(), 24);
        return from.empty() ? T{} : from[from.size() - 1 - random() % window];
    }

    template <class T>
    vmmgraph_status_t keep(std::vector<T>& in, T value, vmmgraph_status_t status) {
        if (status == VMMGRAPH_OK) {
            const std::lock_guard<std::mutex> lock(mutex_);
            in.push_back(value);
        }
        return status;
    }

    vmmgraph_status_t step(std::mt19937& random) {
        void* const stream = address(random() % 3);
        switch (random() % 36) {
            case 0: {
                auto options = arena_options();
                options.account = random() % 2 == 0 ? nullptr : pick(random, accounts_);
                vmmgraph_arena_t arena = nullptr;
                const auto status = vmmgraph_arena_create(device_, &options, &arena);
                return keep(arenas_, arena, status);
            }
            case 1:
                return random() % 8 == 0 ? vmmgraph_arena_destroy(pick(random, arenas_))
                                         : VMMGRAPH_OK;
            case 2:
            case 3:
            case 4: {
                vmmgraph_space_t space = nullptr;
                const auto status = vmmgraph_space_open(pick(random, arenas_), &space);
                return keep(spaces_, space, status);
            }
            case 5:
                return vmmgraph_space_destroy(pick(random, spaces_));
            case 6:
            case 7: {
                auto report = sized<vmmgraph_seal_report_t>();
                return vmmgraph_space_seal(pick(random, spaces_),
                                           static_cast<std::int32_t>(random() % 3), &report);
            }
            case 8:
            case 9:
                return vmmgraph_space_replay(
                    pick(random, spaces_), stream,
                    [](void* user) { ++*static_cast<std::atomic<int>*>(user); }, &launches_);
            case 10:
                return vmmgraph_arena_switch_to_new_virtual_space(pick(random, arenas_));
            case 11:
            case 12: {
                void* block = nullptr;
                const auto status = vmmgraph_arena_allocate(pick(random, arenas_),
                                                            random() % (256 * KiB), stream, &block);
                return keep(blocks_, block, status);
            }
            case 13:
                return vmmgraph_arena_deallocate(pick(random, arenas_), pick(random, blocks_));
            case 14:
                return random() % 2 == 0 ? vmmgraph_device_trim(device_, nullptr)
                                         : vmmgraph_arena_trim(pick(random, arenas_), nullptr);
            case 15:
                return random() % 2 == 0 ? vmmgraph_device_mark(device_, stream)
                                         : vmmgraph_arena_mark(pick(random, arenas_));
            case 16: {
                auto stats = sized<vmmgraph_arena_stats_t>();
                return vmmgraph_arena_stats(pick(random, arenas_), &stats);
            }
            case 17: {
                char text[200];
                std::size_t needed = 0;
                return vmmgraph_arena_stats_json(pick(random, arenas_), text, sizeof text, &needed);
            }
            case 18: {
                auto stats = sized<vmmgraph_space_stats_t>();
                return vmmgraph_space_stats(pick(random, spaces_), &stats);
            }
            case 19: {
                void* blocks[8];
                std::size_t count = 0;
                return vmmgraph_space_live_blocks(pick(random, spaces_), blocks, 8, &count);
            }
            case 20:
                return vmmgraph_space_record_stream(pick(random, spaces_), pick(random, blocks_),
                                                    stream);
            case 21:
                return random() % 2 == 0
                           ? vmmgraph_device_set_budget(device_, (random() % 4) * 16 * MiB)
                           : vmmgraph_arena_set_budget(pick(random, arenas_),
                                                       (random() % 4) * 4 * MiB);
            case 22: {
                auto stats = sized<vmmgraph_device_stats_t>();
                return vmmgraph_device_stats(device_, &stats);
            }
            case 23: {
                const auto options = device_options();
                vmmgraph_device_t again = nullptr;
                const auto status = vmmgraph_device_open(&options, &again);
                return status == VMMGRAPH_OK ? vmmgraph_device_close(again) : status;
            }
            case 24: {
                const auto sink = [](std::int32_t, const char* text, std::size_t length,
                                     void* user) {
                    *static_cast<std::atomic<std::size_t>*>(user) += length > 0 && text[0] != '\0';
                };
                return vmmgraph_set_log_sink(random() % 2 ? sink : vmmgraph_log_fn{}, &lines_,
                                             nullptr, random() % 6);
            }
            case 25: {
                const auto status = vmmgraph_torch_set_arena(0, pick(random, arenas_));
                void* const block = vmmgraph_torch_alloc(
                    static_cast<std::ptrdiff_t>(random() % (64 * KiB)), 0, stream);
                if (block != nullptr) {
                    keep(blocks_, block, VMMGRAPH_OK);
                }
                vmmgraph_torch_free(pick(random, blocks_), 0, 0, stream);
                return status;
            }
            case 26:
            case 27:
                return vmmgraph_space_free(pick(random, spaces_), pick(random, blocks_));
            case 28: {
                auto options = sized<vmmgraph_account_options_t>();
                options.above = random() % 2 == 0 ? nullptr : pick(random, accounts_);
                options.budget_bytes = random() % 3 == 0 ? 0 : random() % (64 * MiB);
                options.least_bytes = random() % 3 == 0 ? random() % (4 * MiB) : 0;
                vmmgraph_account_t account = nullptr;
                const auto status = vmmgraph_account_create(
                    device_, random() % 2 == 0 ? "tenant" : nullptr, &options, &account);
                return keep(accounts_, account, status);
            }
            case 29:
                return vmmgraph_account_set_limits(pick(random, accounts_), random() % (128 * MiB),
                                                   random() % (2 * MiB));
            case 30: {
                if (random() % 8 == 0) {
                    return vmmgraph_account_destroy(pick(random, accounts_));
                }
                auto stats = sized<vmmgraph_account_stats_t>();
                return vmmgraph_account_stats(pick(random, accounts_), &stats);
            }
            case 31: {
                // Few suffice: all are asked at each shortage.
                if (random() % 64 != 0) {
                    return vmmgraph_reclaimer_destroy(pick(random, reclaimers_));
                }
                vmmgraph_reclaimer_t reclaimer = nullptr;
                const auto status = vmmgraph_account_add_reclaimer(
                    pick(random, accounts_), give, random() % 100, this, &reclaimer);
                return keep(reclaimers_, reclaimer, status);
            }
            default: {
                void* block = nullptr;
                const auto allocate =
                    random() % 4 == 0 ? vmmgraph_space_allocate_kept : vmmgraph_space_allocate;
                const auto status =
                    allocate(pick(random, spaces_), random() % (512 * KiB), stream, &block);
                return keep(blocks_, block, status);
            }
        }
    }

    static std::uint64_t give(std::uint64_t bytes, void* user) {
        auto& crowd = *static_cast<Crowd*>(user);
        std::mt19937 random(static_cast<std::uint32_t>(++crowd.asked + bytes));
        static_cast<void>(vmmgraph_space_destroy(crowd.pick(random, crowd.spaces_)));
        std::uint64_t released = 0;
        static_cast<void>(vmmgraph_arena_trim(crowd.pick(random, crowd.arenas_), &released));
        return released;
    }

    vmmgraph_device_t device_;
    std::mutex mutex_;
    std::vector<vmmgraph_account_t> accounts_;
    std::vector<vmmgraph_reclaimer_t> reclaimers_;
    std::vector<vmmgraph_arena_t> arenas_;
    std::vector<vmmgraph_space_t> spaces_;
    std::vector<void*> blocks_;
    std::atomic<int> launches_{0};
    std::atomic<std::size_t> lines_{0};
};

TEST_F(Hostile, SixteenThreadsOnSharedHandles) {
    Crowd crowd(device);
    std::vector<std::thread> threads;
    for (std::uint32_t seed = 0; seed < 16; ++seed) {
        threads.emplace_back([&crowd, seed] { crowd.run(seed, 5000); });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(vmmgraph_set_log_sink(nullptr, nullptr, nullptr, 0), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_torch_set_arena(0, nullptr), VMMGRAPH_OK);
    crowd.destroy_all();
    EXPECT_EQ(crowd.bad, 0);
    EXPECT_GT(crowd.succeeded, 20000);
    EXPECT_GT(crowd.refused, 5000);
    EXPECT_GT(crowd.asked, 0);
    std::printf("%d calls succeeded, %d were refused, reclaimers were asked %d times\n",
                crowd.succeeded.load(), crowd.refused.load(), crowd.asked.load());
}

struct Calls {
    vmmgraph_device_t device = nullptr;
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;
    vmmgraph_reclaimer_t self = nullptr;
    std::vector<std::uint64_t> asked;
};

// Calls every function, causes a nested shortage, and destroys itself.
std::uint64_t call_everything(std::uint64_t bytes, void* user) {
    auto& calls = *static_cast<Calls*>(user);
    calls.asked.push_back(bytes);
    void* block = nullptr;
    EXPECT_EQ(vmmgraph_space_allocate(calls.space, 8 * MiB, nullptr, &block),
              VMMGRAPH_ERROR_OVER_BUDGET);
    vmmgraph_space_t space = nullptr;
    EXPECT_EQ(vmmgraph_space_open(calls.arena, &space), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_allocate(space, 16 * MiB, nullptr, &block),
              VMMGRAPH_ERROR_OVER_BUDGET);
    EXPECT_EQ(vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_destroy(space), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_trim(calls.arena, nullptr), VMMGRAPH_OK);
    auto stats = sized<vmmgraph_device_stats_t>();
    EXPECT_EQ(vmmgraph_device_stats(calls.device, &stats), VMMGRAPH_OK);
    if (calls.asked.size() == 2) {
        EXPECT_EQ(vmmgraph_reclaimer_destroy(calls.self), VMMGRAPH_OK);
    }
    // A false claim; attempts are bounded.
    return bytes;
}

TEST_F(Hostile, AReclaimerMayCallEverythingRunShortAndEndItself) {
    EXPECT_EQ(vmmgraph_device_add_reclaimer(device, nullptr, 0, nullptr, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    Calls calls;
    calls.device = device;
    calls.arena = arena;
    calls.space = space;
    EXPECT_EQ(vmmgraph_device_add_reclaimer(device, call_everything, 9, &calls, nullptr),
              VMMGRAPH_ERROR_NULL_ARGUMENT);
    ASSERT_EQ(vmmgraph_device_add_reclaimer(device, call_everything, 9, &calls, &calls.self),
              VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_device_set_budget(device, 2 * MiB), VMMGRAPH_OK);
    void* block = nullptr;
    EXPECT_EQ(vmmgraph_space_allocate(space, 6 * MiB, nullptr, &block), VMMGRAPH_ERROR_OVER_BUDGET);
    EXPECT_EQ(calls.asked, (std::vector<std::uint64_t>{4 * MiB, 4 * MiB}));
    EXPECT_EQ(vmmgraph_reclaimer_destroy(calls.self), VMMGRAPH_ERROR_INVALID_HANDLE);
}

}  // namespace
