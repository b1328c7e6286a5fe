// dispatch.hpp: plans, the dispatcher and input plans through the C++ wrappers.
#include <gtest/gtest.h>
#include <vmmgraph/dispatch.hpp>

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using namespace vmmgraph::dispatch;

// Up to 512 tokens per step: short, bell-shaped and long-tailed traffic.
std::vector<Traffic> histograms() {
    std::vector<Traffic> all(3);
    for (std::uint32_t n = 1; n <= 512; ++n) {
        if (n <= 64) {
            all[0].emplace_back(Key::of(n), 100'000 / (n * n) + 1);
        }
        const double distance = (static_cast<double>(n) - 200.0) / 60.0;
        all[1].emplace_back(
            Key::of(n), static_cast<std::uint64_t>(5000 * std::exp(-distance * distance)) + n % 7);
        all[2].emplace_back(Key::of(n), 1 + 5000 / n);
    }
    return all;
}

std::vector<Key> keys_of(std::int32_t list, std::uint32_t max) {
    std::vector<Key> keys;
    for (const auto size : bucket_sizes(list, max)) {
        keys.push_back(Key::of(size));
    }
    return keys;
}

TEST(Dispatch, APlanWastesLessThanTheUsualListsWithAsManyGraphs) {
    for (const auto& traffic : histograms()) {
        const auto top = traffic.back().first[Axis::tokens];
        for (const auto list : {VMMGRAPH_SIZES_XLLM, VMMGRAPH_SIZES_VLLM}) {
            const auto theirs = keys_of(list, top);
            const auto waste = evaluate(theirs, traffic);
            EXPECT_EQ(waste.eager_steps, 0u);
            PlanOptions options;
            options.most_graphs = static_cast<std::uint32_t>(theirs.size());
            const auto plan = make_plan(traffic, options);
            EXPECT_EQ(plan.waste.eager_steps, 0u);
            EXPECT_LT(plan.waste.padding, waste.padding);
            EXPECT_EQ(plan.waste.padding, evaluate(plan.keys(), traffic).padding);
            ASSERT_EQ(plan.curve.size(), plan.buckets.size() + 1);
            EXPECT_EQ(plan.curve.back(), plan.waste.padding);
            std::uint64_t steps = 0;
            for (const auto& bucket : plan.buckets) {
                EXPECT_GT(bucket.saves, 0u);
                steps += bucket.steps;
            }
            EXPECT_EQ(steps, plan.waste.graph_steps);
        }
    }
}

TEST(Dispatch, EveryLimitOfAPlanBindsAndIsNamed) {
    Traffic traffic;
    for (std::uint32_t n = 1; n <= 64; ++n) {
        traffic.emplace_back(Key::of(n, n), 1);
    }
    EXPECT_EQ(make_plan(traffic).limited_by, VMMGRAPH_LIMITED_BY_NOTHING);
    EXPECT_EQ(make_plan(traffic).buckets.size(), 64u);
    PlanOptions options;
    options.streams = AclGraphStreams{48, 1, 4, true, 1920};
    EXPECT_EQ(options.streams->most_graphs(), 19u);
    EXPECT_EQ((AclGraphStreams{48, 1, 4, false, 1920}.most_graphs()), 12u);
    EXPECT_EQ(make_plan(traffic, options).limited_by, VMMGRAPH_LIMITED_BY_STREAMS);
    EXPECT_EQ(make_plan(traffic, options).buckets.size(), 19u);
    options.graph_bytes = 10;
    options.most_graph_bytes = 59;
    EXPECT_EQ(make_plan(traffic, options).limited_by, VMMGRAPH_LIMITED_BY_GRAPH_BYTES);
    EXPECT_EQ(make_plan(traffic, options).buckets.size(), 5u);
    options.most_graphs = 3;
    options.pool_unit_bytes = 2;
    options.pool_base_bytes = 20;
    options.most_pool_bytes = 100;
    const auto plan = make_plan(traffic, options);
    EXPECT_EQ(plan.limited_by, VMMGRAPH_LIMITED_BY_GRAPHS);
    EXPECT_EQ(plan.most_graphs, 3u);
    EXPECT_EQ(plan.heaviest, 40u);
    ASSERT_EQ(plan.buckets.size(), 3u);
    EXPECT_EQ(plan.buckets.back().key, Key::of(40, 40));
    EXPECT_EQ(plan.waste.eager_steps, 24u);
    options.most_pool_bytes = 1;
    EXPECT_EQ(make_plan(traffic, options).heaviest, 0u);
    EXPECT_TRUE(make_plan({}).buckets.empty());
    options.graph_bytes = 0;
    EXPECT_THROW(static_cast<void>(make_plan(traffic, options)), vmmgraph::Error);
}

TEST(Dispatch, ADispatcherIsMovedAndSaysWhatItDoes) {
    DispatcherOptions options;
    options.full = {Key::of(4, 4, uniform_decode), Key::of(8, 8, uniform_decode)};
    options.piecewise = {Key::of(64)};
    options.most_tokens = 60;
    Dispatcher first(options);
    ASSERT_EQ(first.slots().size(), 3u);
    EXPECT_EQ(first.slots()[0].bucket, Key::of(8, 8, uniform_decode));
    Dispatcher dispatcher(std::move(first));
    EXPECT_THROW(static_cast<void>(first.slots()),
                 vmmgraph::Error);  // NOLINT: what a moved-from object does

    const auto decision = dispatcher.dispatch(Key::of(3, 3, uniform_decode), Phase::decode);
    EXPECT_TRUE(decision.capture);
    EXPECT_EQ(decision.mode, Mode::full);
    EXPECT_EQ(decision.bucket, Key::of(4, 4, uniform_decode));
    dispatcher.captured(decision.slot);
    EXPECT_EQ(dispatcher.dispatch(Key::of(4, 4, uniform_decode), Phase::decode).reason,
              Reason::hit);
    const auto mixed = dispatcher.dispatch(Key::of(30, 3), Phase::mixed);
    EXPECT_EQ(mixed.mode, Mode::piecewise);
    dispatcher.abandoned(mixed.slot);
    dispatcher.begin(mixed.slot);
    dispatcher.failed(mixed.slot);
    EXPECT_EQ(dispatcher.dispatch(Key::of(30, 3), Phase::mixed).reason, Reason::capture_failed);
    dispatcher.forgive(mixed.slot);
    EXPECT_EQ(dispatcher.dispatch(Key::of(61), Phase::mixed).reason, Reason::above_threshold);
    EXPECT_EQ(dispatcher.dispatch(Key::of(3), Phase::mixed, false).reason, Reason::not_capturable);
    EXPECT_EQ(dispatcher.least_recently_used(), decision.slot);
    EXPECT_EQ(dispatcher.least_recently_used(decision.slot), no_slot);
    dispatcher.imposed(decision.slot);
    dispatcher.imposed(no_slot);
    EXPECT_EQ(dispatcher.stats().imposed, 2u);
    EXPECT_EQ(dispatcher.stats().imposed_eager, 1u);
    EXPECT_THROW(dispatcher.imposed(99), vmmgraph::Error);
    dispatcher.evicted(decision.slot);
    EXPECT_EQ(dispatcher.stats().graphs, 0u);
    EXPECT_EQ(dispatcher.stats().evictions, 1u);
    EXPECT_EQ(dispatcher.steps(Mode::full, Reason::hit), 1u);
    EXPECT_NE(dispatcher.prometheus({{"model", "m"}})
                  .find("vmmgraph_dispatch_evictions_total{model=\"m\"} 1\n"),
              std::string::npos);
    EXPECT_THROW(dispatcher.evicted(99), vmmgraph::Error);
    options.full.push_back(options.full.front());
    EXPECT_THROW(Dispatcher{options}, vmmgraph::Error);
}

TEST(Dispatch, AnInputPlanPacksAStep) {
    auto tokens = vmmgraph::detail::sized<vmmgraph_input_t>();
    tokens.name = "tokens";
    tokens.dtype = VMMGRAPH_DTYPE_I32;
    tokens.rank = 1;
    tokens.shape[0] = {VMMGRAPH_EXTENT_ALONG, 0, 1, 0};
    tokens.pad = VMMGRAPH_PAD_REPEAT_LAST;
    auto slots = tokens;
    slots.name = "slots";
    slots.pad = VMMGRAPH_PAD_VALUE;
    slots.pad_bits = 9;
    const InputPlan plan({tokens, slots}, {Key::of(4), Key::of(8)}, 256);
    EXPECT_EQ(plan.info().staging_bytes, 256u + 32);
    EXPECT_EQ(plan.view(Key::of(4), 0).bytes, 16u);
    const std::vector<std::int32_t> data{5, 6};
    auto one = vmmgraph::detail::sized<vmmgraph_step_input_t>();
    one.data = data.data();
    one.bytes = 8;
    one.shape[0] = 2;
    one.rank = 1;
    one.dtype = VMMGRAPH_DTYPE_I32;
    auto other = one;
    other.input = 1;
    std::vector<std::int32_t> staging(64 + 8, 77);
    const auto before = staging;
    const auto bytes = staging.size() * 4;
    EXPECT_EQ(plan.pack(Key::of(4), {one, other}, staging.data(), bytes), 256u + 16);
    EXPECT_EQ(std::vector<std::int32_t>(&staging[0], &staging[5]),
              (std::vector<std::int32_t>{5, 6, 6, 6, 77}));
    EXPECT_EQ(std::vector<std::int32_t>(&staging[64], &staging[69]),
              (std::vector<std::int32_t>{5, 6, 9, 9, 77}));
    staging = before;
    EXPECT_THROW(static_cast<void>(plan.pack(Key::of(4), {one, one}, staging.data(), bytes)),
                 vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(plan.pack(Key::of(4), {one, other}, staging.data(), 256 + 15)),
                 vmmgraph::Error);
    EXPECT_EQ(staging, before);
    EXPECT_EQ(plan.pack(Key::of(4), {}, staging.data(), bytes), 0u);
    EXPECT_THROW(static_cast<void>(plan.view(Key::of(5), 0)), vmmgraph::Error);
    EXPECT_THROW(static_cast<void>(InputPlan().info()), vmmgraph::Error);
}

}  // namespace
