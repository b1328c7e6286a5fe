// Prediction of the graphs likely to run next.
#pragma once

#include <vector>

#include <vmmgraph/dispatch.hpp>

namespace vmmgraph::engine {

// Predicts the graph after the current one: its last successor, or a neighbour by size, since
// batches grow and shrink.
class Ahead {
public:
    // Records the graph of a step. Returns likely successors, the likeliest first; empty while the
    // same graph repeats.
    const std::vector<dispatch::Slot>& after(dispatch::Slot slot);

    // A possible graph. The constructor takes all, by ascending size within a mode and variant.
    struct Place {
        dispatch::Slot slot;
        dispatch::Mode mode;
        dispatch::Key bucket;
    };
    explicit Ahead(const std::vector<Place>& places);

private:
    struct Known {
        dispatch::Slot smaller = dispatch::no_slot;
        dispatch::Slot larger = dispatch::no_slot;
        dispatch::Slot followed = dispatch::no_slot;
    };
    // By slot.
    std::vector<Known> known_;
    dispatch::Slot last_ = dispatch::no_slot;
    std::vector<dispatch::Slot> next_;
};

}  // namespace vmmgraph::engine
