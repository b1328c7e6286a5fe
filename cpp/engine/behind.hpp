// Queue of captures behind the traffic.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <vmmgraph/dispatch.hpp>

#include "ahead.hpp"
#include "histogram.hpp"

namespace vmmgraph::engine {

// Returns true if each size of `bucket` is at least the size of `other`, of the same variant.
[[nodiscard]] bool covers(const dispatch::Key& bucket, const dispatch::Key& other);

// Counts the steps of each graph, and plans which missing graph to capture next.
class Behind {
public:
    // The constructor takes all possible graphs, by ascending size within a mode and variant.
    explicit Behind(std::vector<Ahead::Place> places);

    // Counts a step whose own graph this is.
    void count(dispatch::Slot slot, bool missing);
    // Returns the graph to capture next: of the graphs planned for the traffic within `limits`, the
    // most used one for which `missing` returns true; no_slot if none.
    [[nodiscard]] dispatch::Slot next(const std::function<dispatch::PlanOptions()>& limits,
                                      const std::function<bool(dispatch::Slot)>& missing);
    // Returns the number of missing graphs in the last plan.
    [[nodiscard]] std::size_t waiting(const std::function<bool(dispatch::Slot)>& missing) const;
    // Plans again, after a graph was destroyed.
    void replan() noexcept { changed_ = true; }
    // Keeps a graph without room out of the queue until its recent steps have doubled.
    void put_off(dispatch::Slot slot);
    // Returns true if `first` ran clearly more of the recent steps than `second`. Small differences
    // would make two graphs evict each other by turns.
    [[nodiscard]] bool prefers(dispatch::Slot first, dispatch::Slot second) const {
        return recent_[first] > recent_[second] + recent_[second] / 4;
    }

    // Adds the steps of a histogram, each shape at the smallest graph of its mode which covers the
    // shape. In the recent counts, the sum of a long history is about `window`.
    void add(const std::vector<ShapeSteps>& histogram);
    // Returns the steps of every graph.
    [[nodiscard]] std::vector<ShapeSteps> histogram() const;

    // Recent counts are halved every `window` steps.
    static constexpr std::uint64_t window = 512;

private:
    void plan(const dispatch::PlanOptions& limits);
    [[nodiscard]] dispatch::Slot covering(dispatch::Mode mode, const dispatch::Key& key) const;

    std::vector<Ahead::Place> places_;
    // By slot: all steps, recent steps, and recent steps when there was no room.
    std::vector<std::uint64_t> steps_;
    std::vector<std::uint64_t> recent_;
    std::vector<std::uint64_t> put_off_;
    std::uint64_t counted_ = 0;
    // Planned graphs, most used first. `changed_`: the plan is older than a step without its graph.
    std::vector<dispatch::Slot> planned_;
    bool changed_ = false;
};

}  // namespace vmmgraph::engine
