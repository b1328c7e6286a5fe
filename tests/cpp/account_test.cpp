// Accounts: a common budget for several kinds of memory, through the C++ interface.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <vmmgraph/elastic.hpp>
#include <vmmgraph/region.hpp>

#include "host.hpp"

namespace {

using host::MiB;
using vmmgraph::Account;
using vmmgraph::Device;
using vmmgraph::OutOfMemory;

Device open_device() { return Device::open(host::device_options(3)); }

struct Model {
    Model(const Device& device, const Account& account)
        : arena(device, arena_options(account)),
          weights(device, "weights", region_options(account)),
          kv(device, kv_options(account)) {}

    static vmmgraph::ArenaOptions arena_options(const Account& account) {
        vmmgraph::ArenaOptions options = host::options();
        options.account = account.handle();
        return options;
    }
    static vmmgraph::RegionOptions region_options(const Account& account) {
        vmmgraph::RegionOptions options;
        options.page_bytes = MiB;
        options.account = account.handle();
        return options;
    }
    static vmmgraph::KvOptions kv_options(const Account& account) {
        vmmgraph::KvOptions options{{MiB}, 64};
        options.memory.page_bytes = MiB;
        options.memory.account = account.handle();
        return options;
    }

    vmmgraph::SharedVmmAllocator arena;
    vmmgraph::Region weights;
    vmmgraph::KvCache kv;
};

TEST(Account, IsWhatSeveralKindsOfMemoryMayHaveTogether) {
    const Device device = open_device();
    Account tenant(device, "tenant a", {16 * MiB, 0});
    Account account(device, "chat", tenant);
    std::optional<Model> model(std::in_place, device, account);
    auto space = model->arena.open_space();
    static_cast<void>(space.allocate(4 * MiB, nullptr));
    void* const weights = model->weights.allocate(8 * MiB);
    model->kv.grow_to(4);
    EXPECT_EQ(account.stats().charged_bytes, 16 * MiB);
    EXPECT_EQ(tenant.stats().charged_bytes, 16 * MiB);
    EXPECT_EQ(tenant.stats().budget_bytes, 16 * MiB);
    for (const auto& more : std::vector<std::function<void()>>{
             [&] { static_cast<void>(space.allocate(4 * MiB, nullptr)); },
             [&] { static_cast<void>(model->weights.allocate(MiB)); },
             [&] { model->kv.grow_to(5); }}) {
        try {
            more();
            ADD_FAILURE() << "there was room";
        } catch (const OutOfMemory& error) {
            EXPECT_NE(std::string(error.what()).find("tenant a"), std::string::npos)
                << error.what();
        }
    }
    // Some platforms do not unmap during a capture.
    space.seal();
    model->weights.free(weights);
    model->kv.grow_to(12);
    EXPECT_EQ(tenant.stats().charged_bytes, 16 * MiB);
    Account other(device, "tenant b");
    Model beside(device, other);
    beside.kv.grow_to(20);
    EXPECT_EQ(other.stats().charged_bytes, 20 * MiB);
    tenant.set_limits({17 * MiB, 0});
    model->kv.grow_to(13);
    EXPECT_EQ(tenant.stats().charged_bytes, 17 * MiB);
}

TEST(Account, WhatItIsSureToGetNobodyElseHas) {
    Device device = open_device();
    device.set_budget(32 * MiB);
    Account sure(device, "sure", {0, 12 * MiB});
    Account other(device, "other");
    Model model(device, other);
    EXPECT_THROW(model.kv.grow_to(21), OutOfMemory);
    model.kv.grow_to(20);
    EXPECT_THROW(Account(device, "more", {0, MiB}), OutOfMemory);
    EXPECT_THROW(Account(device, "more", sure, {0, 13 * MiB}), OutOfMemory);
    Model with(device, sure);
    with.kv.grow_to(12);
    EXPECT_THROW(with.kv.grow_to(13), OutOfMemory);
    sure.set_limits({12 * MiB, 0});
    with.kv.shrink_to(10);
    model.kv.grow_to(22);
    EXPECT_THROW(with.kv.grow_to(11), OutOfMemory) << "no least any more";
}

TEST(Account, ItsReclaimersAreAskedWhereItIsShort) {
    Device device = open_device();
    std::optional<Account> tenant(std::in_place, device, "tenant",
                                  vmmgraph::AccountLimits{8 * MiB, 0});
    Account other(device, "tenant", {8 * MiB, 0});
    Model model(device, *tenant);
    std::vector<std::string> asked;
    const auto says = [&](const char* who) {
        return [&asked, who](std::uint64_t) {
            asked.emplace_back(who);
            return std::uint64_t{0};
        };
    };
    const vmmgraph::Reclaimer engine(device, says("engine"), 8);
    const vmmgraph::Reclaimer stranger(other, says("stranger"), 9);
    vmmgraph::Reclaimer own(
        *tenant,
        [&](std::uint64_t bytes) {
            asked.emplace_back("own");
            model.kv.shrink_to(2);
            return bytes;
        },
        10);
    model.kv.grow_to(8);
    auto space = model.arena.open_space();
    void* const block = space.allocate(6 * MiB, nullptr);
    EXPECT_EQ(asked, std::vector<std::string>{"own"});
    // An arena's own limit asks none.
    model.arena.set_budget(6 * MiB);
    EXPECT_THROW(static_cast<void>(space.allocate(2 * MiB, nullptr)), OutOfMemory);
    EXPECT_EQ(asked, std::vector<std::string>{"own"});
    model.arena.set_budget(0);
    space.free(block);
    // The device's limit asks all, the cheapest first.
    asked.clear();
    own = vmmgraph::Reclaimer(*tenant, says("own"), 10);
    device.set_budget(device.stats().physical_bytes);
    EXPECT_THROW(static_cast<void>(Model(device, other).weights.allocate(MiB)), OutOfMemory);
    EXPECT_EQ(asked, (std::vector<std::string>{"engine", "stranger", "own"}));
}

TEST(Account, OutlivesItsHandleWithWhatIsBelowIt) {
    std::optional<Account> tenant;
    std::optional<Model> model;
    {
        const Device device = open_device();
        tenant.emplace(device, "tenant", vmmgraph::AccountLimits{8 * MiB, 0});
    }
    // The account keeps the device open.
    const Device device = open_device();
    model.emplace(device, *tenant);
    tenant.reset();
    model->kv.grow_to(8);
    EXPECT_THROW(model->kv.grow_to(9), OutOfMemory);
    Account next(device, "tenant", {8 * MiB, 0});
    Model beside(device, next);
    beside.kv.grow_to(8);
    Account moved(std::move(next));
    EXPECT_EQ(moved.stats().charged_bytes, 8 * MiB);
    EXPECT_EQ(next.handle(), nullptr);  // NOLINT(bugprone-use-after-move)
    EXPECT_THROW(Account(device, "below", next),
                 vmmgraph::Error);  // NOLINT(bugprone-use-after-move)
    EXPECT_THROW(static_cast<void>(next.stats()),
                 vmmgraph::Error);  // NOLINT(bugprone-use-after-move)
}

}  // namespace
