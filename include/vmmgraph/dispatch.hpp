// Dispatch policy for C++17, without torch or a driver: chooses the graph for each step and lays
// out inputs. Header-only over vmmgraph.h. Conventions: vmmgraph.hpp. engine.hpp builds on this
// header.
//
//   using namespace vmmgraph::dispatch;
//   DispatcherOptions options;
//   options.full = plan.keys();                              // or a list; see plan.hpp
//   Dispatcher dispatcher(options);
//   Decision decision = dispatcher.dispatch(Key::of(13, 13, uniform_decode), Phase::decode);
//   if (decision.capture) { capture(decision.bucket); dispatcher.captured(decision.slot); }

#ifndef VMMGRAPH_DISPATCH_HPP
#define VMMGRAPH_DISPATCH_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "plan.hpp"

namespace vmmgraph::dispatch {

// Way to run a step.
enum class Mode : std::int32_t {
    eager = VMMGRAPH_MODE_EAGER,
    // Graphs with eager work between them.
    piecewise = VMMGRAPH_MODE_PIECEWISE,
    full = VMMGRAPH_MODE_FULL,
};

// Work of a step's sequences.
enum class Phase : std::int32_t {
    decode = VMMGRAPH_PHASE_DECODE,
    prefill = VMMGRAPH_PHASE_PREFILL,
    mixed = VMMGRAPH_PHASE_MIXED
};

// Reason for the mode of a step.
enum class Reason : std::int32_t {
    // A graph runs the step: of exactly this shape, of a larger shape, or captured for this step.
    hit = VMMGRAPH_REASON_HIT,
    padded = VMMGRAPH_REASON_PADDED,
    captured = VMMGRAPH_REASON_CAPTURED,
    // A larger graph stands in for the step's own, which is missing and may not be captured now.
    stand_in = VMMGRAPH_REASON_STAND_IN,
    // Eager: by the modes, above the token threshold, without a bucket, or not capturable.
    mode_eager = VMMGRAPH_REASON_MODE_EAGER,
    above_threshold = VMMGRAPH_REASON_ABOVE_THRESHOLD,
    too_large = VMMGRAPH_REASON_TOO_LARGE,
    not_capturable = VMMGRAPH_REASON_NOT_CAPTURABLE,
    // Eager despite a bucket: the graph is missing and may not be captured now, is being captured,
    // has no room, or failed to capture.
    not_captured = VMMGRAPH_REASON_NOT_CAPTURED,
    being_captured = VMMGRAPH_REASON_BEING_CAPTURED,
    budget = VMMGRAPH_REASON_BUDGET,
    capture_failed = VMMGRAPH_REASON_CAPTURE_FAILED,
};

// Number of a graph, from 0: one per bucket and mode.
using Slot = std::uint32_t;
inline constexpr Slot no_slot = std::numeric_limits<Slot>::max();

// Time of the captures of missing graphs.
enum class Captures : std::int32_t {
    // By the first step which needs the graph.
    lazily,
    // Ahead of traffic; a step captures nothing.
    ahead,
    // Between steps, in order of use; a step captures nothing. A plain dispatcher treats this value
    // as `ahead`.
    behind,
};

// Decision for a step, with its reason.
struct Decision {
    Mode mode = Mode::eager;
    Reason reason = Reason::mode_eager;
    // Capture the graph and report captured(), failed() or abandoned(). Else replay or run eagerly.
    bool capture = false;
    Slot slot = no_slot;
    // The shape to pad to; zeros for an eager step.
    Key bucket;
    // Captures::behind, with several ranks: the graph to capture after this step (engine.hpp).
    Slot next = no_slot;
};

// Options of a dispatcher; 0 is no limit.
struct DispatcherOptions {
    // Buckets of full and piecewise graphs, in any order.
    std::vector<Key> full;
    std::vector<Key> piecewise;
    Weights weights{};
    // Bits of a step's variant which piecewise graphs ignore.
    std::uint32_t piecewise_ignores = uniform_decode;
    // First and second mode of each phase. Default: full for decode; piecewise for steps with a
    // prefill and where no full graph exists.
    std::array<std::array<Mode, 2>, 3> modes{{{Mode::full, Mode::piecewise},
                                              {Mode::piecewise, Mode::eager},
                                              {Mode::piecewise, Mode::eager}}};
    // Steps with more tokens run eagerly.
    std::uint32_t most_tokens = 0;
    // Maximum number of graphs, captures in progress included.
    std::uint32_t most_graphs = 0;
    Captures captures = Captures::lazily;
    // See vmmgraph_dispatcher_options_t.
    std::uint32_t stand_in = 2;
};

using DispatcherStats = vmmgraph_dispatcher_stats_t;

// Chooses the graph of each step and counts the reasons. Holds no graph. Thread-safe and lock-free.
class Dispatcher {
public:
    explicit Dispatcher(const DispatcherOptions& options) {
        vmmgraph::detail::require_abi();
        const auto full = detail::to_c(options.full);
        const auto piecewise = detail::to_c(options.piecewise);
        auto given = detail::sized<vmmgraph_dispatcher_options_t>();
        given.full = full.data();
        given.full_count = full.size();
        given.piecewise = piecewise.data();
        given.piecewise_count = piecewise.size();
        given.piecewise_ignores = options.piecewise_ignores;
        given.most_tokens = options.most_tokens;
        given.most_graphs = options.most_graphs;
        given.ahead_only = options.captures == Captures::lazily ? 0 : 1;
        given.stand_in = options.stand_in;
        for (std::size_t axis = 0; axis < options.weights.size(); ++axis) {
            given.weights[axis] = options.weights[axis];
        }
        for (std::size_t phase = 0; phase < 3; ++phase) {
            for (std::size_t turn = 0; turn < 2; ++turn) {
                given.modes[phase][turn] = static_cast<std::int32_t>(options.modes[phase][turn]);
            }
        }
        vmmgraph_dispatcher_t handle = nullptr;
        detail::check(vmmgraph_dispatcher_create(&given, &handle));
        handle_ = Handle(handle);
    }

    // Decides for one step. Counts the decision; a decision to capture counts when reported.
    // `capturable`: whether a graph could hold the step.
    [[nodiscard]] Decision dispatch(const Key& step, Phase phase, bool capturable = true) {
        const auto key = detail::to_c(step);
        auto decision = detail::sized<vmmgraph_decision_t>();
        detail::check(vmmgraph_dispatch(handle_.get(), &key, static_cast<std::int32_t>(phase),
                                        capturable ? 1 : 0, &decision));
        return from_c(decision);
    }
    // Returns every graph to capture ahead of traffic, largest first in each mode.
    [[nodiscard]] std::vector<Decision> slots() const {
        std::vector<Decision> slots;
        for (std::size_t index = 0;; ++index) {
            auto slot = detail::sized<vmmgraph_decision_t>();
            const auto status = vmmgraph_dispatcher_slot(handle_.get(), index, &slot);
            if (status == VMMGRAPH_ERROR_INVALID_ARGUMENT) {
                return slots;
            }
            detail::check(status);
            slots.push_back(from_c(slot));
        }
    }

    // Begins a capture ahead of traffic. As after a decision to capture, the slot is the caller's
    // until one of the next three calls.
    void begin(Slot slot) { report(slot, VMMGRAPH_GRAPH_BEGIN); }
    // The graph exists.
    void captured(Slot slot) { report(slot, VMMGRAPH_GRAPH_CAPTURED); }
    // The capture failed: its step runs eagerly, and the bucket has no graph until forgive().
    void failed(Slot slot) { report(slot, VMMGRAPH_GRAPH_FAILED); }
    // The capture did not happen: restores the earlier state.
    void abandoned(Slot slot) { report(slot, VMMGRAPH_GRAPH_ABANDONED); }
    // The graph was destroyed and may be captured again.
    void evicted(Slot slot) { report(slot, VMMGRAPH_GRAPH_EVICTED); }
    // Lets a failed bucket be captured again.
    void forgive(Slot slot) { report(slot, VMMGRAPH_GRAPH_FORGIVEN); }
    // Counts a step run by this graph (no_slot: eagerly). See VMMGRAPH_GRAPH_IMPOSED.
    void imposed(Slot slot) { report(slot, VMMGRAPH_GRAPH_IMPOSED); }

    // Returns the graph to destroy first for room, never `kept`; no_slot if none.
    [[nodiscard]] Slot least_recently_used(Slot kept = no_slot) const {
        Slot slot = no_slot;
        detail::check(vmmgraph_dispatcher_least_recently_used(handle_.get(), kept, &slot));
        return slot;
    }

    [[nodiscard]] DispatcherStats stats() const {
        auto stats = detail::sized<DispatcherStats>();
        detail::check(vmmgraph_dispatcher_stats(handle_.get(), &stats));
        return stats;
    }
    // Returns the number of steps with this mode and reason.
    [[nodiscard]] std::uint64_t steps(Mode mode, Reason reason) const {
        std::uint64_t steps = 0;
        detail::check(vmmgraph_dispatcher_steps(handle_.get(), static_cast<std::int32_t>(mode),
                                                static_cast<std::int32_t>(reason), &steps));
        return steps;
    }
    // Returns all counters in Prometheus's text format, with these labels on every sample.
    [[nodiscard]] std::string prometheus(
        const std::vector<std::pair<std::string, std::string>>& labels = {}) const {
        std::vector<const char*> texts;
        for (const auto& [name, value] : labels) {
            texts.push_back(name.c_str());
        }
        for (const auto& [name, value] : labels) {
            texts.push_back(value.c_str());
        }
        return vmmgraph::detail::read_text(
            [&](char* buffer, std::size_t capacity, std::size_t* needed) {
                detail::check(vmmgraph_dispatcher_prometheus(
                    handle_.get(), texts.data(), labels.size(), buffer, capacity, needed));
            });
    }

private:
    using Handle = vmmgraph::detail::Owned<vmmgraph_dispatcher_t, vmmgraph_dispatcher_destroy>;

    [[nodiscard]] static Decision from_c(const vmmgraph_decision_t& decision) {
        return {static_cast<Mode>(decision.mode),
                static_cast<Reason>(decision.reason),
                decision.capture != 0,
                decision.slot,
                detail::from_c(decision.bucket),
                no_slot};
    }
    void report(Slot slot, std::int32_t event) {
        detail::check(vmmgraph_dispatcher_report(handle_.get(), slot, event));
    }

    Handle handle_;
};

// Offsets of graph inputs and outputs in one device arena and one staging buffer, for every bucket.
// Immutable and thread-safe. vmmgraph.h documents the structs.
class InputPlan {
public:
    InputPlan() = default;
    // `alignment` of every input in bytes, a power of two from 256 to 2 MiB; 0: 512.
    InputPlan(const std::vector<vmmgraph_input_t>& inputs, const std::vector<Key>& buckets,
              std::uint64_t alignment = 0) {
        vmmgraph::detail::require_abi();
        const auto keys = detail::to_c(buckets);
        vmmgraph_input_plan_t handle = nullptr;
        detail::check(vmmgraph_input_plan_create(inputs.data(), inputs.size(), keys.data(),
                                                 keys.size(), alignment, &handle));
        handle_ = Handle(handle);
    }

    [[nodiscard]] vmmgraph_input_plan_info_t info() const {
        auto info = detail::sized<vmmgraph_input_plan_info_t>();
        detail::check(vmmgraph_input_plan_info(handle_.get(), &info));
        return info;
    }
    // Returns the place of an input, by declaration number, in a bucket.
    [[nodiscard]] vmmgraph_input_view_t view(const Key& bucket, std::size_t input) const {
        const auto key = detail::to_c(bucket);
        auto view = detail::sized<vmmgraph_input_view_t>();
        detail::check(vmmgraph_input_plan_view(handle_.get(), &key, input, &view));
        return view;
    }
    // Writes a step's host inputs to staging memory, padded to the bucket. Inputs come in
    // declaration order, each once. Returns the end of the last input, up to which the copy must
    // reach. All inputs are checked first: on an exception staging memory is unchanged.
    std::uint64_t pack(const Key& bucket, const std::vector<vmmgraph_step_input_t>& inputs,
                       void* staging, std::size_t staging_bytes) const {
        const auto key = detail::to_c(bucket);
        std::uint64_t end = 0;
        detail::check(vmmgraph_input_plan_pack(handle_.get(), &key, inputs.data(), inputs.size(),
                                               staging, staging_bytes, &end));
        return end;
    }

private:
    using Handle = vmmgraph::detail::Owned<vmmgraph_input_plan_t, vmmgraph_input_plan_destroy>;
    Handle handle_;
};

}  // namespace vmmgraph::dispatch

#endif  // VMMGRAPH_DISPATCH_HPP
