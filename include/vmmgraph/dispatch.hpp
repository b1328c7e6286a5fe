// VmmGraph's policy for C++17, without torch and without a driver: which graph runs a step, and where inputs lie. Header-only over
// vmmgraph.h; conventions as in vmmgraph.hpp. engine.hpp builds on it.
//
//   using namespace vmmgraph::dispatch;
//   DispatcherOptions options;
//   options.full = plan.keys();                                              // or a list; see plan.hpp
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

// How a step runs.
enum class Mode : std::int32_t {
    eager = VMMGRAPH_MODE_EAGER,
    // Graphs with eager work between them.
    piecewise = VMMGRAPH_MODE_PIECEWISE,
    // One graph.
    full = VMMGRAPH_MODE_FULL,
};

// What the sequences of a step are doing.
enum class Phase : std::int32_t { decode = VMMGRAPH_PHASE_DECODE, prefill = VMMGRAPH_PHASE_PREFILL, mixed = VMMGRAPH_PHASE_MIXED };

// Why a step runs the way it does.
enum class Reason : std::int32_t {
    // By a graph of exactly this shape, by one of a larger shape, or by one that was captured for it.
    hit = VMMGRAPH_REASON_HIT,
    padded = VMMGRAPH_REASON_PADDED,
    captured = VMMGRAPH_REASON_CAPTURED,
    // By a larger graph than its own, which is not there and may not be captured now.
    stand_in = VMMGRAPH_REASON_STAND_IN,
    // Eagerly: as the modes say, by the threshold, since no bucket covers it, since the engine says that it cannot be in a graph.
    mode_eager = VMMGRAPH_REASON_MODE_EAGER,
    above_threshold = VMMGRAPH_REASON_ABOVE_THRESHOLD,
    too_large = VMMGRAPH_REASON_TOO_LARGE,
    not_capturable = VMMGRAPH_REASON_NOT_CAPTURABLE,
    // Eagerly, though a graph could run it: it is not there and may not be captured now, it is being captured, there is no room, or
    // capturing it failed.
    not_captured = VMMGRAPH_REASON_NOT_CAPTURED,
    being_captured = VMMGRAPH_REASON_BEING_CAPTURED,
    budget = VMMGRAPH_REASON_BUDGET,
    capture_failed = VMMGRAPH_REASON_CAPTURE_FAILED,
};

// The number of a graph: one for each bucket of each mode, from 0.
using Slot = std::uint32_t;
inline constexpr Slot no_slot = std::numeric_limits<Slot>::max();

// What to do with a step, and why.
struct Decision {
    Mode mode = Mode::eager;
    Reason reason = Reason::mode_eager;
    // Capture the graph and report captured(), failed() or abandoned(); else replay it, or run eagerly.
    bool capture = false;
    Slot slot = no_slot;
    // The shape to pad to; zeros for an eager step.
    Key bucket;
};

// How a dispatcher decides. 0 is no limit.
struct DispatcherOptions {
    // Buckets of full and of piecewise graphs, in any order.
    std::vector<Key> full;
    std::vector<Key> piecewise;
    Weights weights{};
    // Bits of a step's variant that do not count for piecewise graphs.
    std::uint32_t piecewise_ignores = uniform_decode;
    // The modes that each phase tries, first and second; by default full for decode, and piecewise for what has a prefill in it and
    // where there is no full graph.
    std::array<std::array<Mode, 2>, 3> modes{
        {{Mode::full, Mode::piecewise}, {Mode::piecewise, Mode::eager}, {Mode::piecewise, Mode::eager}}};
    // Steps of more tokens run eagerly.
    std::uint32_t most_tokens = 0;
    // Most graphs that are there or being captured at once.
    std::uint32_t most_graphs = 0;
    // Whether a graph that is not there is left to a capture ahead of traffic.
    bool ahead_only = false;
    // A graph that is not there and may not be captured may be stood in for by one that weighs at most so many times as much; 1: by none
    // heavier.
    std::uint32_t stand_in = 2;
};

using DispatcherStats = vmmgraph_dispatcher_stats_t;

// Decides for every step which graph runs it and counts why. It holds no graph. Thread-safe, and without locks.
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
        given.ahead_only = options.ahead_only ? 1 : 0;
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

    // Decides for one step and counts the decision, one to capture when it is reported. `capturable`: whether the engine could put the step
    // into a graph at all.
    [[nodiscard]] Decision dispatch(const Key& step, Phase phase, bool capturable = true) {
        const auto key = detail::to_c(step);
        auto decision = detail::sized<vmmgraph_decision_t>();
        detail::check(vmmgraph_dispatch(handle_.get(), &key, static_cast<std::int32_t>(phase), capturable ? 1 : 0, &decision));
        return from_c(decision);
    }
    // Every graph to capture ahead of traffic, largest first in each mode.
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

    // A capture ahead of traffic begins; as after a decision to capture, the slot is the caller's until one of the next three.
    void begin(Slot slot) { report(slot, VMMGRAPH_GRAPH_BEGIN); }
    // The graph is there.
    void captured(Slot slot) { report(slot, VMMGRAPH_GRAPH_CAPTURED); }
    // The capture failed: its step runs eagerly, and the bucket has no graph until forgive().
    void failed(Slot slot) { report(slot, VMMGRAPH_GRAPH_FAILED); }
    // The capture did not come about: all is as before it.
    void abandoned(Slot slot) { report(slot, VMMGRAPH_GRAPH_ABANDONED); }
    // The graph was dropped; it may be captured again.
    void evicted(Slot slot) { report(slot, VMMGRAPH_GRAPH_EVICTED); }
    // A failed bucket may be tried again.
    void forgive(Slot slot) { report(slot, VMMGRAPH_GRAPH_FORGIVEN); }
    // A step runs by this graph, or with no_slot eagerly, because others decided so: counted beside what was decided for it here.
    void imposed(Slot slot) { report(slot, VMMGRAPH_GRAPH_IMPOSED); }

    // The graph to drop first when room is needed, never `kept`; no_slot if there is none.
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
    // Steps that ran in that mode for that reason.
    [[nodiscard]] std::uint64_t steps(Mode mode, Reason reason) const {
        std::uint64_t steps = 0;
        detail::check(vmmgraph_dispatcher_steps(handle_.get(), static_cast<std::int32_t>(mode), static_cast<std::int32_t>(reason), &steps));
        return steps;
    }
    // All counters in Prometheus's text format, with these labels on every sample.
    [[nodiscard]] std::string prometheus(const std::vector<std::pair<std::string, std::string>>& labels = {}) const {
        std::vector<const char*> texts;
        for (const auto& [name, value] : labels) {
            texts.push_back(name.c_str());
        }
        for (const auto& [name, value] : labels) {
            texts.push_back(value.c_str());
        }
        return vmmgraph::detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_dispatcher_prometheus(handle_.get(), texts.data(), labels.size(), buffer, capacity, needed));
        });
    }

private:
    using Handle = vmmgraph::detail::Owned<vmmgraph_dispatcher_t, vmmgraph_dispatcher_destroy>;

    [[nodiscard]] static Decision from_c(const vmmgraph_decision_t& decision) {
        return {static_cast<Mode>(decision.mode), static_cast<Reason>(decision.reason), decision.capture != 0, decision.slot,
                detail::from_c(decision.bucket)};
    }
    void report(Slot slot, std::int32_t event) { detail::check(vmmgraph_dispatcher_report(handle_.get(), slot, event)); }

    Handle handle_;
};

// Where the inputs and outputs of graphs lie in one device arena and one staging buffer, for every bucket. Immutable and thread-safe.
// Structs are those of vmmgraph.h, which documents their fields.
class InputPlan {
public:
    InputPlan() = default;
    // `alignment` of every input, in bytes: a power of two from 256 to 2 MiB; 0: 512.
    InputPlan(const std::vector<vmmgraph_input_t>& inputs, const std::vector<Key>& buckets, std::uint64_t alignment = 0) {
        vmmgraph::detail::require_abi();
        const auto keys = detail::to_c(buckets);
        vmmgraph_input_plan_t handle = nullptr;
        detail::check(vmmgraph_input_plan_create(inputs.data(), inputs.size(), keys.data(), keys.size(), alignment, &handle));
        handle_ = Handle(handle);
    }

    [[nodiscard]] vmmgraph_input_plan_info_t info() const {
        auto info = detail::sized<vmmgraph_input_plan_info_t>();
        detail::check(vmmgraph_input_plan_info(handle_.get(), &info));
        return info;
    }
    // Where an input, by its number in the order of declaration, lies in a bucket.
    [[nodiscard]] vmmgraph_input_view_t view(const Key& bucket, std::size_t input) const {
        const auto key = detail::to_c(bucket);
        auto view = detail::sized<vmmgraph_input_view_t>();
        detail::check(vmmgraph_input_plan_view(handle_.get(), &key, input, &view));
        return view;
    }
    // Writes the host inputs of a step into staging memory, padded to the bucket; the byte behind the last of them, which the copy must
    // reach. They come in the order of declaration, each once. All are checked first: if it throws, staging memory is as it was.
    std::uint64_t pack(const Key& bucket, const std::vector<vmmgraph_step_input_t>& inputs, void* staging,
                       std::size_t staging_bytes) const {
        const auto key = detail::to_c(bucket);
        std::uint64_t end = 0;
        detail::check(vmmgraph_input_plan_pack(handle_.get(), &key, inputs.data(), inputs.size(), staging, staging_bytes, &end));
        return end;
    }

private:
    using Handle = vmmgraph::detail::Owned<vmmgraph_input_plan_t, vmmgraph_input_plan_destroy>;
    Handle handle_;
};

}  // namespace vmmgraph::dispatch

#endif  // VMMGRAPH_DISPATCH_HPP
