// Replay order across ranks in the C interface: all caller errors.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

constexpr std::uint64_t MiB = 1 << 20;
constexpr std::size_t digest = VMMGRAPH_ORDER_DIGEST_BYTES;

struct Gather {
    std::uint32_t rank = 0;
    std::uint32_t ranks = 1;
    // Digests of lower ranks; higher ranks repeat this rank's.
    std::vector<unsigned char> others;
    std::int32_t status = 0;
    // This rank's digest.
    std::vector<unsigned char> mine;
    std::function<void()> meanwhile;
};

std::int32_t gather(const void* mine, std::size_t bytes, void* all, void* user) {
    auto* const self = static_cast<Gather*>(user);
    EXPECT_EQ(bytes, digest);
    self->mine.assign(static_cast<const unsigned char*>(mine), static_cast<const unsigned char*>(mine) + bytes);
    for (std::uint32_t rank = 0; rank < self->ranks; ++rank) {
        const bool other = rank < self->rank && !self->others.empty();
        std::memcpy(static_cast<unsigned char*>(all) + rank * bytes, other ? self->others.data() : self->mine.data(), bytes);
    }
    if (self->meanwhile) {
        self->meanwhile();
    }
    return self->status;
}

void nothing(void*) {}

class HostileOrder : public testing::Test {
protected:
    vmmgraph_device_t device = nullptr;
    vmmgraph_arena_t arena = nullptr;
    vmmgraph_space_t space = nullptr;

    void SetUp() override {
        const auto options = small_device(6);
        ASSERT_EQ(vmmgraph_device_open(&options, &device), VMMGRAPH_OK);
        arena = make(VMMGRAPH_ARENA_CHECK_ORDER);
        space = capture(arena, MiB);
    }

    void TearDown() override {
        ASSERT_EQ(vmmgraph_space_destroy(space), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_device_close(device), VMMGRAPH_OK);
    }

    vmmgraph_arena_t make(std::int32_t flags) {
        auto options = sized<vmmgraph_arena_options_t>();
        options.flags = flags;
        vmmgraph_arena_t made = nullptr;
        EXPECT_EQ(vmmgraph_arena_create(device, &options, &made), VMMGRAPH_OK);
        return made;
    }

    static vmmgraph_space_t capture(vmmgraph_arena_t arena, std::uint64_t bytes) {
        vmmgraph_space_t made = nullptr;
        void* block = nullptr;
        EXPECT_EQ(vmmgraph_space_open(arena, &made), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_allocate(made, bytes, nullptr, &block), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_free(made, block), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_seal(made, VMMGRAPH_RETAIN_DEFAULT, nullptr), VMMGRAPH_OK);
        return made;
    }

    // This rank replayed its space, rank 0 another key.
    vmmgraph_status_t differ(vmmgraph_order_report_t* report) {
        vmmgraph_arena_t const other = make(VMMGRAPH_ARENA_CHECK_ORDER);
        vmmgraph_space_t const there = capture(other, 3 * MiB);
        Gather first;
        EXPECT_EQ(vmmgraph_space_replay(there, nullptr, nothing, nullptr), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_arena_compare_order(other, 0, 1, gather, &first, nullptr), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_replay(space, nullptr, nothing, nullptr), VMMGRAPH_OK);
        Gather second;
        second.rank = 1;
        second.ranks = 2;
        second.others = first.mine;
        const auto status = vmmgraph_arena_compare_order(arena, 1, 2, gather, &second, report);
        EXPECT_EQ(vmmgraph_space_destroy(there), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_arena_destroy(other), VMMGRAPH_OK);
        return status;
    }
};

TEST_F(HostileOrder, NullAndHandlesOfAnotherKindOrNone) {
    std::uint64_t replays = 77;
    Gather same;
    EXPECT_EQ(vmmgraph_arena_replay_seq(arena, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_compare_order(arena, 0, 1, nullptr, &same, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    EXPECT_EQ(vmmgraph_arena_agree_on(arena, 1, 0, 1, nullptr, &same, nullptr), VMMGRAPH_ERROR_NULL_ARGUMENT);
    for (const auto handle : {vmmgraph_arena_t{}, garbage<vmmgraph_arena_t>(7), reinterpret_cast<vmmgraph_arena_t>(space)}) {
        EXPECT_EQ(vmmgraph_arena_replay_seq(handle, &replays), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_lift_serial(handle), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_compare_order(handle, 0, 1, gather, &same, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_agree_on(handle, 1, 0, 1, gather, &same, nullptr), VMMGRAPH_ERROR_INVALID_HANDLE);
        EXPECT_EQ(vmmgraph_arena_restart_order(handle), VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    for (const auto handle : {vmmgraph_space_t{}, garbage<vmmgraph_space_t>(7), reinterpret_cast<vmmgraph_space_t>(arena)}) {
        EXPECT_EQ(vmmgraph_space_set_order_key(handle, 1), VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    EXPECT_TRUE(same.mine.empty()) << "gathered for a call that is refused";
    EXPECT_EQ(replays, 77u);
}

TEST_F(HostileOrder, StructsOfEverySize) {
    for (const std::size_t size : {std::size_t{0}, std::size_t{15}, sizeof(vmmgraph_order_report_t) + 1, SIZE_MAX}) {
        auto report = std::make_unique<vmmgraph_order_report_t>();
        std::memset(report.get(), 0xc5, sizeof *report);
        report->struct_size = size;
        Gather same;
        EXPECT_EQ(vmmgraph_arena_compare_order(arena, 0, 1, gather, &same, report.get()), VMMGRAPH_ERROR_STRUCT_SIZE);
        EXPECT_TRUE(same.mine.empty());
        EXPECT_EQ(report->most, 0xc5c5c5c5c5c5c5c5);
    }
    for (std::size_t size = 16; size <= sizeof(vmmgraph_order_report_t) + 24; size += 8) {
        auto memory = std::make_unique<unsigned char[]>(size);
        std::memset(memory.get(), 0xc5, size);
        std::memcpy(memory.get(), &size, sizeof size);
        Gather same;
        auto* const report = reinterpret_cast<vmmgraph_order_report_t*>(memory.get());
        EXPECT_EQ(vmmgraph_arena_agree_on(arena, 1, 0, 1, gather, &same, report), VMMGRAPH_OK);
        EXPECT_EQ(report->struct_size, size);
        EXPECT_EQ(report->same, 1u);
        for (std::size_t i = sizeof(vmmgraph_order_report_t); i < size; ++i) {
            EXPECT_EQ(memory[i], 0xc5) << size;
        }
    }
}

TEST_F(HostileOrder, RanksThatCannotBeAndGathersThatFailOrLie) {
    Gather same;
    for (const auto& [rank, ranks] :
         std::vector<std::pair<std::uint32_t, std::uint32_t>>{{0, 0}, {1, 1}, {5, 2}, {0, 4097}, {UINT32_MAX, UINT32_MAX}}) {
        EXPECT_EQ(vmmgraph_arena_compare_order(arena, rank, ranks, gather, &same, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_arena_agree_on(arena, 1, rank, ranks, gather, &same, nullptr), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_TRUE(same.mine.empty());
    auto report = sized<vmmgraph_order_report_t>();
    report.most = 77;
    same.status = -1;
    EXPECT_EQ(vmmgraph_arena_compare_order(arena, 0, 1, gather, &same, &report), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message().find("gather"), std::string::npos) << last_message();
    Gather liar;
    liar.rank = 1;
    liar.ranks = 2;
    liar.others.assign(digest, 0);
    EXPECT_EQ(vmmgraph_arena_compare_order(arena, 1, 2, gather, &liar, &report), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    // The gather overwrote rank 0's own digest.
    EXPECT_EQ(vmmgraph_arena_compare_order(arena, 0, 2, gather, &liar, &report), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(report.most, 77u) << "an output was written by a call that failed";
    EXPECT_EQ(vmmgraph_space_replay(space, nullptr, nothing, nullptr), VMMGRAPH_OK);
}

TEST_F(HostileOrder, ADifferenceIsReportedAndRefusesReplaysUntilTheCheckBeginsAnew) {
    auto report = sized<vmmgraph_order_report_t>();
    EXPECT_EQ(differ(&report), VMMGRAPH_ERROR_RANKS_DIFFER);
    EXPECT_EQ(report.replay, 1u);
    EXPECT_EQ(report.exact, 1);
    EXPECT_EQ(report.launched, 1);
    EXPECT_EQ(report.rank, 1u);
    EXPECT_EQ(report.other, 0u);
    EXPECT_EQ(report.ranks, 1u);
    EXPECT_EQ(report.has, 1);
    EXPECT_EQ(report.other_has, 1);
    EXPECT_NE(report.had, report.other_had);
    EXPECT_EQ(report.same, 0u);
    EXPECT_EQ(report.most, 0u);
    EXPECT_EQ(vmmgraph_space_replay(space, nullptr, nothing, nullptr), VMMGRAPH_ERROR_RANKS_DIFFER);
    EXPECT_NE(last_message().find("rank 1"), std::string::npos) << last_message();
    EXPECT_EQ(vmmgraph_space_enter(space, nullptr), VMMGRAPH_ERROR_RANKS_DIFFER);
    EXPECT_EQ(vmmgraph_space_leave(space), VMMGRAPH_ERROR_WRONG_STATE);
    std::uint64_t replays = 0;
    EXPECT_EQ(vmmgraph_arena_replay_seq(arena, &replays), VMMGRAPH_OK);
    EXPECT_EQ(replays, 1u);
    EXPECT_EQ(vmmgraph_arena_restart_order(arena), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_space_replay(space, nullptr, nothing, nullptr), VMMGRAPH_OK);
}

TEST_F(HostileOrder, AGatherMayCallAnythingAndAnArenaThatGoesMeanwhileStays) {
    Gather busy;
    vmmgraph_arena_t const passing = make(VMMGRAPH_ARENA_CHECK_ORDER | VMMGRAPH_ARENA_SERIAL);
    vmmgraph_space_t const there = capture(passing, MiB);
    busy.meanwhile = [&] {
        // No lock is held.
        Gather nested;
        EXPECT_EQ(vmmgraph_arena_compare_order(passing, 0, 1, gather, &nested, nullptr), VMMGRAPH_OK);
        std::thread([&] { EXPECT_EQ(vmmgraph_space_replay(there, nullptr, nothing, nullptr), VMMGRAPH_OK); }).join();
        EXPECT_EQ(vmmgraph_space_replay(there, nullptr, nothing, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
        EXPECT_EQ(vmmgraph_arena_lift_serial(passing), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_replay(there, nullptr, nothing, nullptr), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_space_destroy(there), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_arena_destroy(passing), VMMGRAPH_OK);
        EXPECT_EQ(vmmgraph_arena_restart_order(passing), VMMGRAPH_ERROR_INVALID_HANDLE);
    };
    auto report = sized<vmmgraph_order_report_t>();
    EXPECT_EQ(vmmgraph_arena_compare_order(passing, 0, 1, gather, &busy, &report), VMMGRAPH_OK);
    // Counted in the next comparison.
    EXPECT_EQ(report.most, 0u);
}

TEST_F(HostileOrder, AnArenaWithoutTheCheckSaysSo) {
    vmmgraph_arena_t const plain = make(0);
    Gather same;
    EXPECT_EQ(vmmgraph_arena_compare_order(plain, 0, 1, gather, &same, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_arena_agree_on(plain, 1, 0, 1, gather, &same, nullptr), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(vmmgraph_arena_restart_order(plain), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_NE(last_message().find("check_order"), std::string::npos) << last_message();
    EXPECT_TRUE(same.mine.empty());
    EXPECT_EQ(vmmgraph_arena_lift_serial(plain), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_arena_destroy(plain), VMMGRAPH_OK);
}

}  // namespace
