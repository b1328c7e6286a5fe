// order.hpp: ranks compare their replays through the C++ wrappers.
#include <gtest/gtest.h>
#include <vmmgraph/order.hpp>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "host.hpp"

namespace {

using namespace vmmgraph;

vmmgraph::Options checked() {
    auto options = host::options();
    options.check_order = true;
    return options;
}

// The lower ranks gave these bytes.
auto behind(std::vector<unsigned char>& others, std::vector<unsigned char>* mine = nullptr) {
    return [&others, mine](const void* given, std::size_t bytes, void* all) {
        EXPECT_EQ(bytes, static_cast<std::size_t>(VMMGRAPH_ORDER_DIGEST_BYTES));
        if (!others.empty()) {
            std::memcpy(all, others.data(), others.size());
        }
        std::memcpy(static_cast<unsigned char*>(all) + others.size(), given, bytes);
        if (mine != nullptr) {
            const auto* const from = static_cast<const unsigned char*>(given);
            mine->assign(from, from + bytes);
        }
    };
}

TEST(Order, RanksThatDifferThrowWithTheFirstReplayThatDoes) {
    std::vector<unsigned char> none;
    std::vector<unsigned char> theirs;
    std::uint64_t key = 0;
    {
        SharedVmmAllocator first(0, checked());
        auto graph = first.open_space();
        key = graph.seal().layout_hash;
        graph.replay(nullptr, [] {});
        graph.replay(nullptr, [] {});
        const auto report = compare_order(first, {0, 1}, behind(none, &theirs));
        EXPECT_EQ(report.same, 2u);
        EXPECT_EQ(report.replay, 0u);
    }
    SharedVmmAllocator second(0, checked());
    auto graph = second.open_space();
    EXPECT_EQ(graph.seal().layout_hash, key);
    graph.replay(nullptr, [] {});
    // Behind is not different.
    const auto report = compare_order(second, {1, 2}, behind(theirs));
    EXPECT_EQ(report.same, 1u);
    EXPECT_EQ(report.most, 2u);
    graph.set_order_key(64);
    graph.replay(nullptr, [] {});
    try {
        static_cast<void>(compare_order(second, {1, 2}, behind(theirs)));
        FAIL() << "the ranks do not differ";
    } catch (const RanksDiffer& error) {
        EXPECT_EQ(error.status(), VMMGRAPH_ERROR_RANKS_DIFFER);
        EXPECT_EQ(error.report().replay, 2u);
        EXPECT_EQ(error.report().rank, 1u);
        EXPECT_EQ(error.report().had, 64u);
        EXPECT_EQ(error.report().other_had, key);
        EXPECT_NE(std::string(error.what()).find("replay 2"), std::string::npos) << error.what();
    }
    bool launched = false;
    EXPECT_THROW(graph.replay(nullptr, [&] { launched = true; }), vmmgraph::Error);
    EXPECT_FALSE(launched);
    EXPECT_EQ(second.replay_seq(), 2u);
    restart_order(second);
    graph.replay(nullptr, [&] { launched = true; });
    EXPECT_TRUE(launched);
}

TEST(Order, RanksAgreeBeforeALaunchOrNobodyLaunches) {
    std::vector<unsigned char> none;
    std::vector<unsigned char> theirs;
    {
        SharedVmmAllocator first(0, checked());
        EXPECT_EQ(agree_on(first, 7, {0, 1}, behind(none, &theirs)).same, 1u);
    }
    SharedVmmAllocator second(0, checked());
    try {
        static_cast<void>(agree_on(second, 8, {1, 2}, behind(theirs)));
        FAIL() << "the ranks do not differ";
    } catch (const RanksDiffer& error) {
        EXPECT_EQ(error.report().launched, 0);
        EXPECT_EQ(error.report().had, 8u);
        EXPECT_EQ(error.report().other_had, 7u);
    }
    // No rank has launched.
    EXPECT_EQ(agree_on(second, 7, {1, 2}, behind(theirs)).same, 1u);
}

TEST(Order, WhatAGatherThrowsArrives) {
    SharedVmmAllocator arena(0, checked());
    const auto throws = [](const void*, std::size_t, void*) { throw std::range_error("the group is gone"); };
    EXPECT_THROW(compare_order(arena, {0, 2}, throws), std::range_error);
    EXPECT_THROW(agree_on(arena, 1, {0, 2}, throws), std::range_error);
    SharedVmmAllocator plain(1, host::options());
    EXPECT_THROW(compare_order(plain, {0, 2}, throws), vmmgraph::Error);
}

}  // namespace
