// Bucket plans for C++17, without torch or a driver: chooses the buckets worth capturing for given
// traffic. Header-only over vmmgraph.h. Conventions: vmmgraph.hpp. dispatch.hpp builds on this
// header.
//
//   using namespace vmmgraph::dispatch;
//   PlanOptions limits;
//   limits.most_graphs = 32;
//   const Plan plan = make_plan(traffic, limits);        // plan.buckets: the savings of each

#ifndef VMMGRAPH_PLAN_HPP
#define VMMGRAPH_PLAN_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "vmmgraph.hpp"

namespace vmmgraph::dispatch {

// A step size which padding may raise.
enum class Axis : std::int32_t { tokens = 0, batch = 1, pages = 2, other = 3 };

// Shape of a step, or of the graph which runs the step (a bucket). An extent of 0: the axis plays
// no part.
struct Key {
    // Differences other than size; compared for equality.
    std::uint32_t variant = 0;
    // By Axis.
    std::array<std::uint32_t, 4> extents{};

    [[nodiscard]] static Key of(std::uint32_t tokens, std::uint32_t batch = 0,
                                std::uint32_t variant = 0) {
        return {variant, {tokens, batch, 0, 0}};
    }
    [[nodiscard]] std::uint32_t operator[](Axis axis) const {
        return extents[static_cast<std::size_t>(axis)];
    }
    friend bool operator==(const Key& a, const Key& b) {
        return a.variant == b.variant && a.extents == b.extents;
    }
    friend bool operator!=(const Key& a, const Key& b) { return !(a == b); }
};

// Key::variant of steps with equal token counts in all sequences.
inline constexpr std::uint32_t uniform_decode = 1;

// Cost of one more unit, by Axis. All 0: only tokens count, each 1.
using Weights = std::array<std::uint16_t, 4>;

// Histogram of step shapes.
using Traffic = std::vector<std::pair<Key, std::uint64_t>>;

namespace detail {

using vmmgraph::detail::check;
using vmmgraph::detail::sized;

[[nodiscard]] inline vmmgraph_key_t to_c(const Key& key) {
    return {key.variant, {key.extents[0], key.extents[1], key.extents[2], key.extents[3]}};
}

[[nodiscard]] inline Key from_c(const vmmgraph_key_t& key) {
    return {key.variant, {key.extents[0], key.extents[1], key.extents[2], key.extents[3]}};
}

[[nodiscard]] inline std::vector<vmmgraph_key_t> to_c(const std::vector<Key>& keys) {
    std::vector<vmmgraph_key_t> all;
    all.reserve(keys.size());
    for (const auto& key : keys) {
        all.push_back(to_c(key));
    }
    return all;
}

struct Shapes {
    std::vector<vmmgraph_key_t> keys;
    std::vector<std::uint64_t> steps;

    explicit Shapes(const Traffic& traffic) {
        for (const auto& [key, count] : traffic) {
            keys.push_back(to_c(key));
            steps.push_back(count);
        }
    }
};

}  // namespace detail

// Returns a list of sizes as used by engines: VMMGRAPH_SIZES_XLLM or _VLLM, up to `max`.
[[nodiscard]] inline std::vector<std::uint32_t> bucket_sizes(std::int32_t list, std::uint32_t max) {
    std::vector<std::uint32_t> sizes;
    std::size_t count = 0;
    detail::check(vmmgraph_sizes(list, max, nullptr, 0, &count));
    sizes.resize(count);
    detail::check(vmmgraph_sizes(list, max, sizes.data(), sizes.size(), &count));
    return sizes;
}

// Streams and layers of an Ascend deployment, for vLLM-Ascend's limit of ACL graphs. Fields: see
// vmmgraph_acl_graph_streams_t.
struct AclGraphStreams {
    std::uint32_t layers = 0;
    std::uint32_t data_parallel = 1;
    std::uint32_t tensor_parallel = 1;
    bool aiv = false;
    // 0: 1800.
    std::uint32_t streams = 0;
    std::uint32_t draft_layers = 0;
    std::uint32_t extra = 0;
    bool reserve_one = false;
    std::uint32_t context_groups = 0;

    [[nodiscard]] vmmgraph_acl_graph_streams_t to_c() const {
        auto given = detail::sized<vmmgraph_acl_graph_streams_t>();
        given.streams = streams;
        given.layers = layers;
        given.draft_layers = draft_layers;
        given.data_parallel = data_parallel;
        given.tensor_parallel = tensor_parallel;
        given.aiv = aiv ? 1 : 0;
        given.extra = extra;
        given.reserve_one = reserve_one ? 1 : 0;
        given.context_groups = context_groups;
        return given;
    }
    // Returns the maximum number of graphs; 0 if none fits.
    [[nodiscard]] std::uint32_t most_graphs() const {
        const auto given = to_c();
        std::uint32_t graphs = 0;
        detail::check(vmmgraph_acl_graph_limit(&given, &graphs));
        return graphs;
    }
};

// Limits and costs of graphs; 0 is no limit and no cost. A limit in bytes needs its cost.
struct PlanOptions {
    Weights weights{};
    std::uint32_t most_graphs = 0;
    std::optional<AclGraphStreams> streams;
    // Graphs' own bytes: limit of all, and cost of one (executable graph, retained blocks).
    std::uint64_t most_graph_bytes = 0;
    std::uint64_t graph_bytes = 0;
    // Bytes of shared pages: limit, smallest graph, and per unit of a bucket's weight.
    std::uint64_t most_pool_bytes = 0;
    std::uint64_t pool_base_bytes = 0;
    std::uint64_t pool_unit_bytes = 0;
    // Cost of an eager step in units of padding; 0: more than any padding.
    std::uint64_t eager_step = 0;
};

// Effect of a set of buckets on given traffic.
struct Waste {
    // Weight of the padding computed by graphs.
    std::uint64_t padding = 0;
    // Steps run by graphs, and steps without a bucket.
    std::uint64_t graph_steps = 0;
    std::uint64_t eager_steps = 0;
};

// A bucket of a plan and its savings.
struct PlannedBucket {
    Key key;
    // Steps run by the bucket, and the weight of their padding.
    std::uint64_t steps = 0;
    std::uint64_t padding = 0;
    // Extra cost of these steps without the bucket, in units of padding.
    std::uint64_t saves = 0;
};

// A choice of buckets.
struct Plan {
    // Ascending.
    std::vector<PlannedBucket> buckets;
    Waste waste;
    // Cost of the best choice of at most k graphs, for k from 0 to the useful number.
    std::vector<std::uint64_t> curve;
    // Maximum number of graphs (UINT32_MAX: any), and the limiting option, a VMMGRAPH_LIMITED_BY.
    std::uint32_t most_graphs = std::numeric_limits<std::uint32_t>::max();
    std::int32_t limited_by = VMMGRAPH_LIMITED_BY_NOTHING;
    // Weight of the heaviest bucket which fits the pool; UINT64_MAX: any; 0: none.
    std::uint64_t heaviest = std::numeric_limits<std::uint64_t>::max();

    [[nodiscard]] std::vector<Key> keys() const {
        std::vector<Key> keys;
        for (const auto& bucket : buckets) {
            keys.push_back(bucket.key);
        }
        return keys;
    }
};

// Chooses the buckets with the least padding for this traffic: optimal along one axis, sound along
// several.
[[nodiscard]] inline Plan make_plan(const Traffic& traffic, const PlanOptions& options = {}) {
    vmmgraph::detail::require_abi();
    auto given = detail::sized<vmmgraph_plan_options_t>();
    for (std::size_t axis = 0; axis < options.weights.size(); ++axis) {
        given.weights[axis] = options.weights[axis];
    }
    const auto streams = options.streams.value_or(AclGraphStreams{}).to_c();
    given.streams = options.streams ? &streams : nullptr;
    given.most_graphs = options.most_graphs;
    given.most_graph_bytes = options.most_graph_bytes;
    given.graph_bytes = options.graph_bytes;
    given.most_pool_bytes = options.most_pool_bytes;
    given.pool_base_bytes = options.pool_base_bytes;
    given.pool_unit_bytes = options.pool_unit_bytes;
    given.eager_step = options.eager_step;
    const detail::Shapes shapes(traffic);
    std::vector<vmmgraph_planned_bucket_t> buckets(shapes.keys.size());
    std::vector<std::uint64_t> curve(shapes.keys.size() + 1);
    auto result = detail::sized<vmmgraph_plan_result_t>();
    result.curve = curve.data();
    result.curve_capacity = curve.size();
    detail::check(vmmgraph_plan(shapes.keys.data(), shapes.steps.data(), shapes.keys.size(), &given,
                                buckets.data(), buckets.size(), &result));
    curve.resize(result.curve_count);
    Plan plan;
    for (std::size_t i = 0; i < result.buckets; ++i) {
        plan.buckets.push_back({detail::from_c(buckets[i].key), buckets[i].steps,
                                buckets[i].padding, buckets[i].saves});
    }
    plan.waste = {result.waste.padding, result.waste.graph_steps, result.waste.eager_steps};
    plan.curve = std::move(curve);
    plan.most_graphs = result.most_graphs;
    plan.limited_by = result.limited_by;
    plan.heaviest = result.heaviest;
    return plan;
}

// Returns the effect of given buckets on this traffic, to compare an engine's list with a plan.
[[nodiscard]] inline Waste evaluate(const std::vector<Key>& buckets, const Traffic& traffic,
                                    const Weights& weights = {}) {
    const auto keys = detail::to_c(buckets);
    const detail::Shapes shapes(traffic);
    auto waste = detail::sized<vmmgraph_waste_t>();
    detail::check(vmmgraph_plan_evaluate(keys.data(), keys.size(), weights.data(),
                                         shapes.keys.data(), shapes.steps.data(),
                                         shapes.keys.size(), &waste));
    return {waste.padding, waste.graph_steps, waste.eager_steps};
}

}  // namespace vmmgraph::dispatch

#endif  // VMMGRAPH_PLAN_HPP
