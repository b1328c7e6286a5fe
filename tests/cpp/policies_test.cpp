// Wiring of the memory policies in the C++ header. src/elastic/policy tests the policies against
// naive twins.
#include <gtest/gtest.h>
#include <vmmgraph/policies.hpp>

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace {

using namespace vmmgraph;

TEST(Policies, WatermarksSayWhen) {
    PreCommit ahead({4, 8}, 2, 3);
    EXPECT_EQ(ahead.step(0, 2, 0, 0), std::pair(Ahead::commit, std::uint64_t{6}));
    EXPECT_EQ(ahead.step(1, 2, 6, 0), std::pair(Ahead::nothing, std::uint64_t{0}));
    EXPECT_EQ(ahead.step(2, 12, 0, 0), std::pair(Ahead::nothing, std::uint64_t{0}));
    EXPECT_EQ(ahead.step(5, 12, 0, 0), std::pair(Ahead::give_back, std::uint64_t{4}));
    EXPECT_THROW(PreCommit({2, 1}, 0, 0), Error);
}

TEST(Policies, WhatStaysIsTheMostOfTheLastSteps) {
    Standing standing(3, 4);
    standing.used(0, 100);
    standing.used(1, 40);
    EXPECT_EQ(standing.wanted(3), 100U);
    // A surplus below one fourth moves no memory.
    EXPECT_EQ(standing.too_much(3, 130), 0U);
    EXPECT_EQ(standing.too_much(3, 140), 40U);
    EXPECT_EQ(standing.wanted(4), 40U);
    EXPECT_EQ(standing.wanted(5), 0U);
    EXPECT_THROW(Standing(1, 0), Error);
}

TEST(Policies, AStepGetsBothOrNeither) {
    Grants grants(10, 0);
    EXPECT_EQ(grants.ask(1, {5, 1}), Grant::granted);
    EXPECT_EQ(grants.ask(2, {4, 4}), Grant::not_now);
    EXPECT_EQ(grants.ask(3, {3, 0}), Grant::not_now);
    EXPECT_EQ(grants.ask(4, {2, 9}), Grant::never);
    auto stats = grants.stats();
    EXPECT_EQ(stats.pages, 10U);
    EXPECT_EQ(stats.free, 4U);
    EXPECT_EQ(stats.kv, 5U);
    EXPECT_EQ(stats.activations, 1U);
    EXPECT_EQ(stats.waiting, 2U);
    EXPECT_TRUE(grants.extend(2));
    EXPECT_FALSE(grants.extend(3));
    grants.forget(3);
    grants.give({7, 1});
    EXPECT_EQ(grants.ask(2, {4, 4}), Grant::granted);
    grants.set_pages(7);
    stats = grants.stats();
    EXPECT_EQ(stats.pages, 7U);
    EXPECT_EQ(stats.free, 0U);
    EXPECT_EQ(stats.activations, 4U);
    EXPECT_EQ(stats.waiting, 0U);
}

TEST(Policies, OneMoreIsAdmittedIfAllStayWithinWhatThereIs) {
    // 16 tokens per block: the first ends with 3 blocks while the second has 2; the second then
    // grows to 4.
    const std::vector<Growing> running = {{32, 16}, {16, 48}};
    const auto peak = admission_peak(16, running);
    EXPECT_GE(peak, 5U);
    EXPECT_LE(peak, 7U);
    EXPECT_EQ(admission_peak(16, {}), 0U);
    EXPECT_EQ(admission_peak(1, {{10, 5}}), 16U);
    EXPECT_THROW(static_cast<void>(admission_peak(0, running)), Error);
}

TEST(Policies, LengthsAreToldByThoseThatBecameLonger) {
    Lengths lengths(4, 500, 7);
    EXPECT_EQ(lengths.total(3), 10U);
    for (const std::uint64_t tokens : {1, 10, 20, 30, 40}) {
        lengths.ended(tokens);
    }
    // The 1 is forgotten; the lower median of 10, 20, 30 and 40.
    EXPECT_EQ(lengths.total(0), 20U);
    EXPECT_EQ(lengths.total(20), 30U);
    EXPECT_EQ(lengths.total(40), 47U);
    EXPECT_THROW(Lengths(0, 500, 1), Error);
    EXPECT_THROW(Lengths(1, 1001, 1), Error);
}

TEST(Policies, TurnsLeaveTheLongestForLater) {
    // Two of three items due at 12 can be timely; the last is out of patience.
    const auto turns = in_turn(0, {{10, 8, 100}, {4, 3, 90}, {9, 4, 80}, {1, 1, 0}});
    EXPECT_EQ(turns.order, (std::vector<std::size_t>{3, 1, 2, 0}));
    EXPECT_EQ(turns.timely, 3U);
    EXPECT_TRUE(in_turn(5, {}).order.empty());
}

TEST(Policies, PromptsWaitForThoseThatDecode) {
    // Arrived at 100, must begin by 1100.
    const Prompt prompt{100, 1200, 100, 5000};
    EXPECT_FALSE(to_host(599, prompt));
    EXPECT_TRUE(to_host(600, prompt));
    const Decoding late{0, 2, 100};
    EXPECT_TRUE(prefill_waits(150, 60, {prompt}, {late}));
    EXPECT_FALSE(prefill_waits(150, 50, {prompt}, {late})) << "just in time";
    EXPECT_FALSE(prefill_waits(1000, 60, {prompt}, {late})) << "it presses";
    EXPECT_TRUE(prefill_waits(1101, 60, {prompt}, {late})) << "it is late anyway";
    EXPECT_FALSE(prefill_waits(5000, 60, {prompt}, {late})) << "it has waited long enough";
    EXPECT_FALSE(prefill_waits(150, 60, {prompt}, {}));
}

TEST(Policies, TheHostHasALogicalSize) {
    HostKv host(100);
    EXPECT_TRUE(host.put(1, 60));
    EXPECT_FALSE(host.put(1, 10));
    EXPECT_FALSE(host.put(2, 50));
    host.set_logical(70);
    EXPECT_FALSE(host.put(3, 20));
    EXPECT_TRUE(host.rescue(3, 20));
    const auto stats = host.stats();
    EXPECT_EQ(stats.physical_bytes, 100U);
    EXPECT_EQ(stats.logical_bytes, 70U);
    EXPECT_EQ(stats.held_bytes, 80U);
    EXPECT_EQ(stats.sequences, 2U);
    EXPECT_EQ(host.take(3), 20U);
    EXPECT_THROW(host.take(3), Error);
}

TEST(Policies, ThreeOfFiveChangeTheSize) {
    SloControl control(10, 40, 100);
    EXPECT_EQ(control.step(true, false), std::pair(SloChange::keep, std::uint64_t{40}));
    EXPECT_EQ(control.step(true, false), std::pair(SloChange::keep, std::uint64_t{40}));
    EXPECT_EQ(control.step(true, false), std::pair(SloChange::raised, std::uint64_t{80}));
    control.step(false, true);
    control.step(false, true);
    EXPECT_EQ(control.step(false, true), std::pair(SloChange::lowered, std::uint64_t{40}));
    EXPECT_THROW(SloControl(0, 1, 2), Error);
    EXPECT_THROW(SloControl(1, 3, 2), Error);
}

TEST(Policies, ThreadsShareGrants) {
    constexpr std::uint64_t pages = 64;
    Grants grants(pages, 2);
    std::atomic<std::uint64_t> held{0};
    std::atomic<std::uint64_t> granted{0};
    std::atomic<bool> too_much{false};
    std::vector<std::thread> threads;
    for (std::uint64_t id = 0; id < 4; ++id) {
        threads.emplace_back([&, id] {
            std::mt19937_64 random(id);
            for (int i = 0; i < 2'000; ++i) {
                const Need need{random() % 24, random() % 24};
                if (grants.ask(id, need) != Grant::granted) {
                    continue;
                }
                ++granted;
                too_much =
                    too_much ||
                    held.fetch_add(need.kv + need.activations) + need.kv + need.activations > pages;
                std::this_thread::yield();
                held -= need.kv + need.activations;
                grants.give(need);
            }
            grants.forget(id);
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    EXPECT_FALSE(too_much);
    EXPECT_GT(granted, 100U);
    EXPECT_EQ(grants.stats().free, pages);
    EXPECT_EQ(grants.stats().waiting, 0U);
}

TEST(Policies, HandlesMove) {
    Grants grants(1, 0);
    Grants moved = std::move(grants);
    EXPECT_EQ(grants.handle(), nullptr);  // NOLINT: moved from on purpose
    EXPECT_THROW(static_cast<void>(grants.stats()), vmmgraph::Error);  // NOLINT
    EXPECT_EQ(moved.ask(1, {1, 0}), Grant::granted);
}

}  // namespace
