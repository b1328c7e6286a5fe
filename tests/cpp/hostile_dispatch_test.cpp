// Dispatch functions of the C interface: results and all caller errors.
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "hostile.hpp"

namespace {

vmmgraph_key_t tokens(std::uint32_t count, std::uint32_t variant = 0) {
    return {variant, {count, 0, 0, 0}};
}

std::vector<vmmgraph_key_t> xllm_buckets(std::uint32_t max) {
    std::size_t count = 0;
    EXPECT_EQ(vmmgraph_sizes(VMMGRAPH_SIZES_XLLM, max, nullptr, 0, &count), VMMGRAPH_OK);
    std::vector<std::uint32_t> sizes(count);
    EXPECT_EQ(vmmgraph_sizes(VMMGRAPH_SIZES_XLLM, max, sizes.data(), sizes.size(), &count),
              VMMGRAPH_OK);
    std::vector<vmmgraph_key_t> keys;
    for (const auto size : sizes) {
        keys.push_back(tokens(size));
    }
    return keys;
}

vmmgraph_extent_t extent(std::int32_t kind, std::uint32_t times, std::int32_t axis = 0,
                         std::uint32_t plus = 0) {
    return {kind, axis, times, plus};
}

vmmgraph_input_t input(const char* name, std::int32_t dtype, std::vector<vmmgraph_extent_t> shape,
                       std::int32_t pad = VMMGRAPH_PAD_ZERO) {
    auto value = sized<vmmgraph_input_t>();
    value.name = name;
    value.dtype = dtype;
    value.pad = pad;
    value.rank = static_cast<std::int32_t>(shape.size());
    for (std::size_t i = 0; i < shape.size() && i < 4; ++i) {
        value.shape[i] = shape[i];
    }
    return value;
}

class HostileDispatch : public testing::Test {
protected:
    std::vector<vmmgraph_key_t> buckets = xllm_buckets(64);
    vmmgraph_dispatcher_t dispatcher = nullptr;
    vmmgraph_input_plan_t plan = nullptr;
    vmmgraph_decision_t decision = sized<vmmgraph_decision_t>();

    vmmgraph_dispatcher_options_t options() const {
        auto value = sized<vmmgraph_dispatcher_options_t>();
        value.full = buckets.data();
        value.full_count = buckets.size();
        value.most_tokens = 100;
        value.most_graphs = 2;
        return value;
    }

    std::vector<vmmgraph_input_t> inputs() const {
        const auto rows = extent(VMMGRAPH_EXTENT_ALONG, 1);
        auto hidden =
            input("hidden", VMMGRAPH_DTYPE_BF16, {rows, extent(VMMGRAPH_EXTENT_FIXED, 128)});
        hidden.role = VMMGRAPH_ROLE_OUTPUT;
        return {input("indices", VMMGRAPH_DTYPE_I32, {extent(VMMGRAPH_EXTENT_UP_TO, 1000)}),
                input("tokens", VMMGRAPH_DTYPE_I32, {rows}),
                input("offsets", VMMGRAPH_DTYPE_I32, {extent(VMMGRAPH_EXTENT_ALONG, 1, 0, 1)},
                      VMMGRAPH_PAD_REPEAT_LAST),
                hidden};
    }

    void SetUp() override {
        const auto given = options();
        ASSERT_EQ(vmmgraph_dispatcher_create(&given, &dispatcher), VMMGRAPH_OK);
        const auto declared = inputs();
        ASSERT_EQ(vmmgraph_input_plan_create(declared.data(), declared.size(), buckets.data(),
                                             buckets.size(), 0, &plan),
                  VMMGRAPH_OK);
    }

    void TearDown() override {
        ASSERT_EQ(vmmgraph_dispatcher_destroy(dispatcher), VMMGRAPH_OK);
        ASSERT_EQ(vmmgraph_input_plan_destroy(plan), VMMGRAPH_OK);
    }

    vmmgraph_status_t dispatch(std::uint32_t count, std::int32_t phase = VMMGRAPH_PHASE_DECODE,
                               std::int32_t capturable = 1) {
        const auto step = tokens(count);
        return vmmgraph_dispatch(dispatcher, &step, phase, capturable, &decision);
    }

    static vmmgraph_step_input_t given(std::size_t number, const std::vector<std::int32_t>& data,
                                       std::int32_t dtype = VMMGRAPH_DTYPE_I32) {
        auto step = sized<vmmgraph_step_input_t>();
        step.input = number;
        step.data = data.data();
        step.bytes = data.size() * 4;
        step.shape[0] = static_cast<std::uint32_t>(data.size());
        step.rank = 1;
        step.dtype = dtype;
        return step;
    }

    vmmgraph_status_t pack(const std::vector<vmmgraph_step_input_t>& step,
                           std::vector<std::int32_t>& staging, std::uint64_t* end) {
        const auto bucket = tokens(4);
        return vmmgraph_input_plan_pack(plan, &bucket, step.data(), step.size(), staging.data(),
                                        staging.size() * 4, end);
    }
};

TEST_F(HostileDispatch, AStepIsCapturedThenReplayedThenEvicted) {
    ASSERT_EQ(dispatch(13), VMMGRAPH_OK);
    EXPECT_EQ(decision.mode, VMMGRAPH_MODE_FULL);
    EXPECT_EQ(decision.reason, VMMGRAPH_REASON_CAPTURED);
    EXPECT_EQ(decision.capture, 1);
    EXPECT_EQ(decision.bucket.extents[0], 16u);
    const auto slot = decision.slot;
    ASSERT_EQ(vmmgraph_dispatcher_report(dispatcher, slot, VMMGRAPH_GRAPH_CAPTURED), VMMGRAPH_OK);
    ASSERT_EQ(dispatch(16), VMMGRAPH_OK);
    EXPECT_EQ(decision.reason, VMMGRAPH_REASON_HIT);
    EXPECT_EQ(decision.slot, slot);
    EXPECT_EQ(decision.capture, 0);
    EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, slot, VMMGRAPH_GRAPH_FORGIVEN),
              VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(last_message(), "cannot change the slot: it is ready; it must be failed");
    EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, slot, VMMGRAPH_GRAPH_EVICTED), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, slot, VMMGRAPH_GRAPH_BEGIN), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, slot, VMMGRAPH_GRAPH_FAILED), VMMGRAPH_OK);

    const std::pair<std::uint32_t, std::int32_t> eager[] = {{13, VMMGRAPH_REASON_CAPTURE_FAILED},
                                                            {65, VMMGRAPH_REASON_TOO_LARGE},
                                                            {101, VMMGRAPH_REASON_ABOVE_THRESHOLD}};
    for (const auto& [count, reason] : eager) {
        ASSERT_EQ(dispatch(count), VMMGRAPH_OK);
        EXPECT_EQ(decision.mode, VMMGRAPH_MODE_EAGER);
        EXPECT_EQ(decision.reason, reason) << count;
        EXPECT_EQ(decision.slot, UINT32_MAX);
    }
    std::uint64_t steps = 0;
    ASSERT_EQ(vmmgraph_dispatcher_steps(dispatcher, VMMGRAPH_MODE_EAGER, VMMGRAPH_REASON_TOO_LARGE,
                                        &steps),
              VMMGRAPH_OK);
    EXPECT_EQ(steps, 1u);

    const char* labels[] = {"model", "q\"w"};
    std::size_t needed = 0;
    ASSERT_EQ(vmmgraph_dispatcher_prometheus(dispatcher, labels, 1, nullptr, 0, &needed),
              VMMGRAPH_OK);
    std::string text(needed, '?');
    ASSERT_EQ(
        vmmgraph_dispatcher_prometheus(dispatcher, labels, 1, text.data(), text.size(), nullptr),
        VMMGRAPH_OK);
    EXPECT_NE(
        text.find(
            "vmmgraph_dispatch_steps_total{model=\"q\\\"w\",mode=\"full\",reason=\"hit\"} 1\n"),
        std::string::npos)
        << text;

    ASSERT_EQ(vmmgraph_dispatcher_slot(dispatcher, 0, &decision), VMMGRAPH_OK);
    EXPECT_EQ(decision.bucket.extents[0], 64u);
    EXPECT_EQ(vmmgraph_dispatcher_slot(dispatcher, buckets.size(), &decision),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
}

TEST_F(HostileDispatch, InputsArePackedForOneCopy) {
    auto info = sized<vmmgraph_input_plan_info_t>();
    ASSERT_EQ(vmmgraph_input_plan_info(plan, &info), VMMGRAPH_OK);
    // 64 tokens, 65 offsets, 1000 indices; 64 rows of 256 bytes.
    EXPECT_EQ(info.staging_bytes, 512u + 512u + 4000u);
    EXPECT_EQ(info.outputs_offset, 5120u);
    EXPECT_EQ(info.arena_bytes, 5120u + 64u * 256u);

    std::vector<std::int32_t> staging(info.staging_bytes / 4, 77);
    const std::vector<std::int32_t> indices{1, 2};
    const std::vector<std::int32_t> offsets{0, 5, 9};
    std::uint64_t end = 0;
    ASSERT_EQ(pack({given(2, offsets)}, staging, &end), VMMGRAPH_OK);
    EXPECT_EQ(end, 512u + 5 * 4);
    EXPECT_EQ(std::vector<std::int32_t>(&staging[128], &staging[134]),
              (std::vector<std::int32_t>{0, 5, 9, 9, 9, 77}));
    EXPECT_EQ(staging[0], 77) << "tokens, which were not given";
    // An input without data is all padding. The last input does not end last.
    auto nothing = given(1, {});
    nothing.data = nullptr;
    ASSERT_EQ(pack({given(0, indices), nothing, given(2, {})}, staging, &end), VMMGRAPH_OK);
    EXPECT_EQ(end, 1024u + 8);
    EXPECT_EQ(std::vector<std::int32_t>(&staging[0], &staging[5]),
              (std::vector<std::int32_t>{0, 0, 0, 0, 77}));
    EXPECT_EQ(std::vector<std::int32_t>(&staging[128], &staging[134]),
              (std::vector<std::int32_t>{0, 0, 0, 0, 0, 77}));
    EXPECT_EQ(std::vector<std::int32_t>(&staging[256], &staging[259]),
              (std::vector<std::int32_t>{1, 2, 77}));
    ASSERT_EQ(pack({}, staging, &end), VMMGRAPH_OK);
    EXPECT_EQ(end, 0u);

    auto view = sized<vmmgraph_input_view_t>();
    const auto bucket = tokens(4);
    ASSERT_EQ(vmmgraph_input_plan_view(plan, &bucket, 3, &view), VMMGRAPH_OK);
    EXPECT_EQ(view.offset, info.outputs_offset);
    EXPECT_EQ(view.rank, 2);
    EXPECT_EQ(view.shape[0], 4u);
    EXPECT_EQ(view.shape[1], 128u);
    EXPECT_EQ(view.bytes, 4u * 128 * 2);
}

TEST_F(HostileDispatch, AStepWithOneWrongInputLeavesStagingMemoryAsItWas) {
    std::vector<std::int32_t> staging(1256, 77);
    const auto before = staging;
    const std::vector<std::int32_t> data{1, 2, 3, 4, 5, 6};
    const std::vector<std::int32_t> four(data.begin(), data.begin() + 4);
    std::uint64_t end = 99;
    const auto refused = [&](const vmmgraph_step_input_t& last,
                             vmmgraph_status_t expected = VMMGRAPH_ERROR_INVALID_ARGUMENT) {
        EXPECT_EQ(pack({given(0, data), given(1, four), last}, staging, &end), expected);
        EXPECT_EQ(staging, before) << last_message();
        return last_message();
    };
    EXPECT_EQ(refused(given(2, data)),
              "input offsets: the shape is [6], must be at most [5] in this bucket");
    EXPECT_EQ(refused(given(2, four, VMMGRAPH_DTYPE_F32)),
              "input offsets: the dtype is F32, must be I32");
    EXPECT_EQ(refused(given(3, four, VMMGRAPH_DTYPE_BF16)),
              "input hidden: the role is Output, must be HostInput");
    EXPECT_EQ(refused(given(4, four)),
              "an input's number is 4: must be below the number of inputs");
    EXPECT_EQ(refused(given(1, four)), "an input's number is 1: must be above the one before it");
    EXPECT_EQ(refused(given(0, data)), "an input's number is 0: must be above the one before it");
    static_cast<void>(refused(given(SIZE_MAX, four)));
    const std::pair<std::function<void(vmmgraph_step_input_t&)>, vmmgraph_status_t> mistakes[] = {
        {[](auto& it) { it.struct_size = 48; }, VMMGRAPH_ERROR_STRUCT_SIZE},
        {[](auto& it) { it.data = nullptr; }, VMMGRAPH_ERROR_NULL_ARGUMENT},
        {[](auto& it) { it.bytes = 12; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.bytes = SIZE_MAX; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.shape[0] = UINT32_MAX; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.rank = 0; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.rank = -1; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.rank = 5; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.dtype = 11; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
        {[](auto& it) { it.dtype = -1; }, VMMGRAPH_ERROR_INVALID_ARGUMENT},
    };
    for (const auto& [mistake, expected] : mistakes) {
        auto last = given(2, four);
        mistake(last);
        static_cast<void>(refused(last, expected));
    }
    const auto bucket = tokens(4);
    const vmmgraph_step_input_t step[] = {given(1, four), given(2, four)};
    EXPECT_EQ(vmmgraph_input_plan_pack(plan, &bucket, step, 2, staging.data(), 512 + 19, &end),
              VMMGRAPH_ERROR_INVALID_SIZE);
    EXPECT_EQ(
        vmmgraph_input_plan_pack(plan, &bucket, step, SIZE_MAX, staging.data(), 512 + 20, &end),
        VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const auto stranger = tokens(5);
    EXPECT_EQ(vmmgraph_input_plan_pack(plan, &stranger, step, 2, staging.data(), 512 + 20, &end),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(staging, before);
    EXPECT_EQ(end, 99u) << "an output was written by a call that failed";
    EXPECT_EQ(vmmgraph_input_plan_pack(plan, &bucket, step, 2, staging.data(), 512 + 20, &end),
              VMMGRAPH_OK);
    EXPECT_EQ(end, 512u + 20);
}

TEST_F(HostileDispatch, APlanOfThreeShapesUnderALimitOfTwo) {
    const vmmgraph_key_t shapes[] = {tokens(1), tokens(7), tokens(8)};
    const std::uint64_t steps[] = {10, 5, 4};
    auto limits = sized<vmmgraph_plan_options_t>();
    limits.most_graphs = 2;
    limits.eager_step = 1000;
    vmmgraph_planned_bucket_t found[2] = {};
    std::uint64_t curve[4] = {77, 77, 77, 77};
    auto result = sized<vmmgraph_plan_result_t>();
    result.curve = curve;
    result.curve_capacity = 4;
    ASSERT_EQ(vmmgraph_plan(shapes, steps, 3, &limits, found, 2, &result), VMMGRAPH_OK);
    ASSERT_EQ(result.buckets, 2u);
    EXPECT_EQ(found[0].key.extents[0], 1u);
    EXPECT_EQ(found[0].steps, 10u);
    EXPECT_EQ(found[0].saves, 70u);
    EXPECT_EQ(found[1].key.extents[0], 8u);
    EXPECT_EQ(found[1].padding, 5u);
    EXPECT_EQ(result.most_graphs, 2u);
    EXPECT_EQ(result.limited_by, VMMGRAPH_LIMITED_BY_GRAPHS);
    EXPECT_EQ(result.heaviest, UINT64_MAX);
    EXPECT_EQ(result.waste.padding, 5u);
    EXPECT_EQ(result.waste.graph_steps, 19u);
    EXPECT_EQ(result.curve_count, 3u);
    EXPECT_EQ(std::vector<std::uint64_t>(curve, curve + 4),
              (std::vector<std::uint64_t>{19000, 75, 5, 77}));

    // Evaluated separately.
    auto waste = sized<vmmgraph_waste_t>();
    const vmmgraph_key_t chosen[] = {found[0].key, found[1].key};
    ASSERT_EQ(vmmgraph_plan_evaluate(chosen, 2, nullptr, shapes, steps, 3, &waste), VMMGRAPH_OK);
    EXPECT_EQ(waste.padding, 5u);
    const std::uint16_t weights[] = {3, 0, 0, 0};
    ASSERT_EQ(vmmgraph_plan_evaluate(chosen, 1, weights, shapes, steps, 3, &waste), VMMGRAPH_OK);
    EXPECT_EQ(waste.padding, 0u);
    EXPECT_EQ(waste.eager_steps, 9u);

    // All outputs are optional.
    ASSERT_EQ(vmmgraph_plan(shapes, steps, 3, nullptr, nullptr, 0, nullptr), VMMGRAPH_OK);
    result.curve_capacity = 0;
    ASSERT_EQ(vmmgraph_plan(shapes, steps, 3, nullptr, nullptr, 0, &result), VMMGRAPH_OK);
    EXPECT_EQ(result.buckets, 3u);
    EXPECT_EQ(result.curve_count, 4u);
    EXPECT_EQ(result.limited_by, VMMGRAPH_LIMITED_BY_NOTHING);
    ASSERT_EQ(vmmgraph_plan(nullptr, nullptr, 0, nullptr, nullptr, 0, &result), VMMGRAPH_OK);
    EXPECT_EQ(result.buckets, 0u);
    // Saturates at UINT64_MAX.
    const std::uint64_t many[] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
    limits.eager_step = UINT64_MAX;
    ASSERT_EQ(vmmgraph_plan(shapes, many, 3, &limits, found, 2, &result), VMMGRAPH_OK);
    EXPECT_EQ(result.waste.graph_steps, UINT64_MAX);

    result.buckets = 99;
    limits.most_graph_bytes = 1;
    EXPECT_EQ(vmmgraph_plan(shapes, steps, 3, &limits, found, 2, &result),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    limits.struct_size = 8;
    EXPECT_EQ(vmmgraph_plan(shapes, steps, 3, &limits, found, 2, &result),
              VMMGRAPH_ERROR_STRUCT_SIZE);
    result.struct_size = 8;
    EXPECT_EQ(vmmgraph_plan(shapes, steps, 3, nullptr, found, 2, &result),
              VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(result.buckets, 99u) << "an output was written by a call that failed";
    waste.struct_size = 0;
    EXPECT_EQ(vmmgraph_plan_evaluate(chosen, 2, nullptr, shapes, steps, 3, &waste),
              VMMGRAPH_ERROR_STRUCT_SIZE);
}

// The vendor's example: 48 layers, data parallel 1, tensor parallel 4, 1920 streams.
TEST_F(HostileDispatch, AclGraphsByStreams) {
    auto streams = sized<vmmgraph_acl_graph_streams_t>();
    streams.layers = 48;
    streams.data_parallel = 1;
    streams.tensor_parallel = 4;
    const auto graphs = [&] {
        std::uint32_t graphs = 77;
        EXPECT_EQ(vmmgraph_acl_graph_limit(&streams, &graphs), VMMGRAPH_OK);
        return graphs;
    };
    EXPECT_EQ(graphs(), 11u);
    streams.streams = 1920;
    EXPECT_EQ(graphs(), 12u);
    streams.aiv = 1;
    EXPECT_EQ(graphs(), 19u);
    streams.reserve_one = 1;
    EXPECT_EQ(graphs(), 18u);
    streams.draft_layers = 1;
    EXPECT_EQ(graphs(), 17u);
    streams.extra = 1;
    EXPECT_EQ(graphs(), 11u);

    std::vector<vmmgraph_key_t> shapes;
    for (std::uint32_t i = 1; i <= 40; ++i) {
        shapes.push_back(tokens(i));
    }
    const std::vector<std::uint64_t> steps(shapes.size(), 1);
    auto limits = sized<vmmgraph_plan_options_t>();
    limits.streams = &streams;
    auto result = sized<vmmgraph_plan_result_t>();
    ASSERT_EQ(
        vmmgraph_plan(shapes.data(), steps.data(), shapes.size(), &limits, nullptr, 0, &result),
        VMMGRAPH_OK);
    EXPECT_EQ(result.buckets, 11u);
    EXPECT_EQ(result.most_graphs, 11u);
    EXPECT_EQ(result.limited_by, VMMGRAPH_LIMITED_BY_STREAMS);

    std::uint32_t none = 77;
    EXPECT_EQ(vmmgraph_acl_graph_limit(nullptr, &none), VMMGRAPH_OK);
    EXPECT_EQ(none, 1800u);
    streams.aiv = 2;
    EXPECT_EQ(vmmgraph_acl_graph_limit(&streams, &none), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(
        vmmgraph_plan(shapes.data(), steps.data(), shapes.size(), &limits, nullptr, 0, &result),
        VMMGRAPH_ERROR_INVALID_ARGUMENT);
    streams.struct_size = 1;
    EXPECT_EQ(vmmgraph_acl_graph_limit(&streams, &none), VMMGRAPH_ERROR_STRUCT_SIZE);
    EXPECT_EQ(none, 1800u);
}

TEST_F(HostileDispatch, ACaptureIsCountedByWhatBecameOfItAndTheOldestGraphGoesFirst) {
    const auto capture = [&](std::uint32_t count, std::int32_t event) {
        EXPECT_EQ(dispatch(count), VMMGRAPH_OK);
        EXPECT_EQ(decision.capture, 1) << count;
        EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, decision.slot, event), VMMGRAPH_OK);
        return decision.slot;
    };
    const auto oldest = [&](std::uint32_t kept) {
        std::uint32_t slot = 77;
        EXPECT_EQ(vmmgraph_dispatcher_least_recently_used(dispatcher, kept, &slot), VMMGRAPH_OK);
        return slot;
    };
    EXPECT_EQ(oldest(UINT32_MAX), UINT32_MAX);
    static_cast<void>(capture(13, VMMGRAPH_GRAPH_ABANDONED));
    const auto first = capture(13, VMMGRAPH_GRAPH_CAPTURED);
    const auto second = capture(30, VMMGRAPH_GRAPH_CAPTURED);
    EXPECT_EQ(oldest(UINT32_MAX), first);
    EXPECT_EQ(oldest(first), second);
    ASSERT_EQ(dispatch(16), VMMGRAPH_OK);
    EXPECT_EQ(oldest(UINT32_MAX), second);

    // Stand-ins have at most twice the weight.
    ASSERT_EQ(dispatch(7), VMMGRAPH_OK);
    EXPECT_EQ(decision.reason, VMMGRAPH_REASON_STAND_IN);
    EXPECT_EQ(decision.slot, first);
    ASSERT_EQ(dispatch(3), VMMGRAPH_OK);
    EXPECT_EQ(decision.reason, VMMGRAPH_REASON_BUDGET);

    ASSERT_EQ(vmmgraph_dispatcher_report(dispatcher, second, VMMGRAPH_GRAPH_EVICTED), VMMGRAPH_OK);
    static_cast<void>(capture(40, VMMGRAPH_GRAPH_FAILED));
    auto stats = sized<vmmgraph_dispatcher_stats_t>();
    ASSERT_EQ(vmmgraph_dispatcher_stats(dispatcher, &stats), VMMGRAPH_OK);
    EXPECT_EQ(stats.graphs, 1u);
    EXPECT_EQ(stats.captures, 2u);
    EXPECT_EQ(stats.failures, 1u);
    EXPECT_EQ(stats.evictions, 1u);
    EXPECT_EQ(stats.requested, 13u + 30 + 16 + 7);
    EXPECT_EQ(stats.padding, 3u + 2 + 0 + 9);
    std::uint64_t steps = 0;
    ASSERT_EQ(vmmgraph_dispatcher_steps(dispatcher, VMMGRAPH_MODE_EAGER,
                                        VMMGRAPH_REASON_CAPTURE_FAILED, &steps),
              VMMGRAPH_OK);
    EXPECT_EQ(steps, 1u);
    stats.struct_size = 0;
    EXPECT_EQ(vmmgraph_dispatcher_stats(dispatcher, &stats), VMMGRAPH_ERROR_STRUCT_SIZE);
}

TEST_F(HostileDispatch, NullForEveryPointer) {
    const auto bucket = tokens(4);
    const auto step = sized<vmmgraph_step_input_t>();
    auto view = sized<vmmgraph_input_view_t>();
    std::size_t count = 77;
    std::uint64_t end = 77;
    const std::uint64_t steps = 1;
    vmmgraph_planned_bucket_t key{};
    auto result = sized<vmmgraph_plan_result_t>();
    result.curve_capacity = 1;
    auto waste = sized<vmmgraph_waste_t>();
    vmmgraph_dispatcher_t made = nullptr;
    vmmgraph_input_plan_t planned = nullptr;
    auto holes = options();
    holes.full = nullptr;
    auto nameless = input(nullptr, 0, {extent(VMMGRAPH_EXTENT_FIXED, 1)});
    const char* labels[] = {"name", nullptr};
    const vmmgraph_status_t refused[] = {
        vmmgraph_sizes(VMMGRAPH_SIZES_VLLM, 4, nullptr, 0, nullptr),
        vmmgraph_sizes(VMMGRAPH_SIZES_VLLM, 4, nullptr, 1, &count),
        vmmgraph_plan(nullptr, &steps, 1, nullptr, &key, 1, nullptr),
        vmmgraph_plan(&bucket, nullptr, 1, nullptr, &key, 1, nullptr),
        vmmgraph_plan(&bucket, &steps, 1, nullptr, nullptr, 1, nullptr),
        vmmgraph_plan(&bucket, &steps, 1, nullptr, &key, 1, &result),
        vmmgraph_plan_evaluate(nullptr, 1, nullptr, &bucket, &steps, 1, &waste),
        vmmgraph_plan_evaluate(&bucket, 1, nullptr, nullptr, &steps, 1, &waste),
        vmmgraph_plan_evaluate(&bucket, 1, nullptr, &bucket, nullptr, 1, &waste),
        vmmgraph_plan_evaluate(&bucket, 1, nullptr, &bucket, &steps, 1, nullptr),
        vmmgraph_acl_graph_limit(nullptr, nullptr),
        vmmgraph_dispatcher_least_recently_used(dispatcher, 0, nullptr),
        vmmgraph_dispatcher_stats(dispatcher, nullptr),
        vmmgraph_dispatcher_create(nullptr, nullptr),
        vmmgraph_dispatcher_create(&holes, &made),
        vmmgraph_dispatch(dispatcher, nullptr, VMMGRAPH_PHASE_DECODE, 1, &decision),
        vmmgraph_dispatch(dispatcher, &bucket, VMMGRAPH_PHASE_DECODE, 1, nullptr),
        vmmgraph_dispatcher_slot(dispatcher, 0, nullptr),
        vmmgraph_dispatcher_steps(dispatcher, VMMGRAPH_MODE_FULL, VMMGRAPH_REASON_HIT, nullptr),
        vmmgraph_dispatcher_prometheus(dispatcher, nullptr, 1, nullptr, 0, nullptr),
        vmmgraph_dispatcher_prometheus(dispatcher, labels, 1, nullptr, 0, nullptr),
        vmmgraph_input_plan_create(nullptr, 1, &bucket, 1, 0, &planned),
        vmmgraph_input_plan_create(&nameless, 1, &bucket, 1, 0, &planned),
        vmmgraph_input_plan_create(nullptr, 0, nullptr, 1, 0, &planned),
        vmmgraph_input_plan_create(nullptr, 0, nullptr, 0, 0, nullptr),
        vmmgraph_input_plan_info(plan, nullptr),
        vmmgraph_input_plan_view(plan, nullptr, 0, &view),
        vmmgraph_input_plan_view(plan, &bucket, 0, nullptr),
        vmmgraph_input_plan_pack(plan, nullptr, &step, 1, nullptr, 0, &end),
        vmmgraph_input_plan_pack(plan, &bucket, nullptr, 1, nullptr, 0, &end),
        vmmgraph_input_plan_pack(plan, &bucket, &step, 1, nullptr, 1, &end),
        vmmgraph_input_plan_pack(plan, &bucket, &step, 1, nullptr, 0, nullptr),
    };
    for (std::size_t i = 0; i < std::size(refused); ++i) {
        EXPECT_EQ(refused[i], VMMGRAPH_ERROR_NULL_ARGUMENT) << "call " << i;
    }
    EXPECT_EQ(count, 77u);
    EXPECT_EQ(end, 77u);
    EXPECT_EQ(made, nullptr);
    EXPECT_EQ(planned, nullptr);
    EXPECT_EQ(vmmgraph_dispatcher_create(nullptr, &made), VMMGRAPH_OK);
    EXPECT_EQ(vmmgraph_dispatcher_destroy(made), VMMGRAPH_OK);
}

TEST_F(HostileDispatch, HandlesThatAreNone) {
    const auto refused = [&](vmmgraph_dispatcher_t no_dispatcher, vmmgraph_input_plan_t no_plan) {
        const auto bucket = tokens(4);
        const auto step = sized<vmmgraph_step_input_t>();
        auto info = sized<vmmgraph_input_plan_info_t>();
        auto view = sized<vmmgraph_input_view_t>();
        std::uint64_t number = 0;
        std::uint32_t slot = 0;
        auto stats = sized<vmmgraph_dispatcher_stats_t>();
        for (const auto status : {
                 vmmgraph_dispatcher_least_recently_used(no_dispatcher, 0, &slot),
                 vmmgraph_dispatcher_stats(no_dispatcher, &stats),
                 vmmgraph_dispatch(no_dispatcher, &bucket, VMMGRAPH_PHASE_DECODE, 1, &decision),
                 vmmgraph_dispatcher_slot(no_dispatcher, 0, &decision),
                 vmmgraph_dispatcher_report(no_dispatcher, 0, VMMGRAPH_GRAPH_BEGIN),
                 vmmgraph_dispatcher_steps(no_dispatcher, VMMGRAPH_MODE_FULL, VMMGRAPH_REASON_HIT,
                                           &number),
                 vmmgraph_dispatcher_prometheus(no_dispatcher, nullptr, 0, nullptr, 0, nullptr),
                 vmmgraph_dispatcher_destroy(no_dispatcher),
                 vmmgraph_input_plan_info(no_plan, &info),
                 vmmgraph_input_plan_view(no_plan, &bucket, 0, &view),
                 vmmgraph_input_plan_pack(no_plan, &bucket, &step, 1, nullptr, 0, &number),
                 vmmgraph_input_plan_destroy(no_plan),
             }) {
            EXPECT_EQ(status, VMMGRAPH_ERROR_INVALID_HANDLE);
        }
    };
    for (const std::uint64_t value :
         {std::uint64_t{0}, std::uint64_t{1}, UINT64_MAX, std::uint64_t{0x100000000}}) {
        refused(garbage<vmmgraph_dispatcher_t>(value), garbage<vmmgraph_input_plan_t>(value));
    }
    refused(reinterpret_cast<vmmgraph_dispatcher_t>(plan),
            reinterpret_cast<vmmgraph_input_plan_t>(dispatcher));
    vmmgraph_dispatcher_t gone = nullptr;
    vmmgraph_input_plan_t gone_plan = nullptr;
    ASSERT_EQ(vmmgraph_dispatcher_create(nullptr, &gone), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_input_plan_create(nullptr, 0, nullptr, 0, 0, &gone_plan), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_dispatcher_destroy(gone), VMMGRAPH_OK);
    ASSERT_EQ(vmmgraph_input_plan_destroy(gone_plan), VMMGRAPH_OK);
    refused(gone, gone_plan);
}

TEST_F(HostileDispatch, NumbersOutsideTheirDomain) {
    std::size_t count = 0;
    std::uint64_t steps = 0;
    EXPECT_EQ(vmmgraph_sizes(2, 4, nullptr, 0, &count), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_sizes(VMMGRAPH_SIZES_XLLM, UINT32_MAX, nullptr, 0, &count),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    for (const std::int32_t wrong : {-1, 3, INT32_MAX, INT32_MIN}) {
        EXPECT_EQ(dispatch(1, wrong), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(dispatch(1, VMMGRAPH_PHASE_DECODE, wrong), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, 0, wrong == 3 ? 7 : wrong),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_dispatcher_steps(dispatcher, wrong == 3 ? VMMGRAPH_MODE_DEFAULT : wrong,
                                            0, &steps),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(vmmgraph_dispatcher_steps(dispatcher, VMMGRAPH_MODE_FULL, wrong == 3 ? 12 : wrong,
                                            &steps),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
        auto given = options();
        given.ahead_only = wrong;
        vmmgraph_dispatcher_t made = nullptr;
        EXPECT_EQ(vmmgraph_dispatcher_create(&given, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);
        given = options();
        given.modes[2][1] = wrong == 3 ? 4 : wrong;
        EXPECT_EQ(vmmgraph_dispatcher_create(&given, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, UINT32_MAX, VMMGRAPH_GRAPH_BEGIN),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_dispatcher_report(dispatcher, UINT32_MAX - 1, VMMGRAPH_GRAPH_IMPOSED),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_dispatcher_slot(dispatcher, SIZE_MAX, &decision),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    decision.struct_size = 0;
    EXPECT_EQ(dispatch(1), VMMGRAPH_ERROR_STRUCT_SIZE);

    // Refused before any read.
    vmmgraph_dispatcher_t made = nullptr;
    auto given = options();
    given.full_count = SIZE_MAX;
    EXPECT_EQ(vmmgraph_dispatcher_create(&given, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const char* label = "x";
    EXPECT_EQ(vmmgraph_dispatcher_prometheus(dispatcher, &label, SIZE_MAX, nullptr, 0, nullptr),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    const vmmgraph_key_t twice[] = {tokens(1), tokens(1)};
    given = options();
    given.full = twice;
    given.full_count = 2;
    EXPECT_EQ(vmmgraph_dispatcher_create(&given, &made), VMMGRAPH_ERROR_INVALID_ARGUMENT);

    vmmgraph_input_plan_t planned = nullptr;
    const std::function<void(vmmgraph_input_t&)> mistakes[] = {
        [](auto& it) { it.dtype = 11; },         [](auto& it) { it.role = 3; },
        [](auto& it) { it.pad = -1; },           [](auto& it) { it.rank = 5; },
        [](auto& it) { it.rank = INT32_MIN; },   [](auto& it) { it.rank = 0; },
        [](auto& it) { it.shape[0].kind = 3; },  [](auto& it) { it.shape[0].axis = 4; },
        [](auto& it) { it.shape[0].axis = 1; },  [](auto& it) { it.name = ""; },
        [](auto& it) { it.shape[0].times = 0; },
    };
    for (const auto& mistake : mistakes) {
        auto declared = input("x", VMMGRAPH_DTYPE_F64, {extent(VMMGRAPH_EXTENT_ALONG, 1)});
        mistake(declared);
        EXPECT_EQ(vmmgraph_input_plan_create(&declared, 1, buckets.data(), 1, 0, &planned),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(vmmgraph_input_plan_create(nullptr, 0, nullptr, 0, 3, &planned),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    auto view = sized<vmmgraph_input_view_t>();
    const auto stranger = tokens(5);
    EXPECT_EQ(vmmgraph_input_plan_view(plan, &stranger, 0, &view), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(vmmgraph_input_plan_view(plan, &buckets[0], 4, &view),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(planned, nullptr);
}

}  // namespace
