// Which graphs are likely to run next.
#pragma once

#include <vector>

#include <vmmgraph/dispatch.hpp>

namespace vmmgraph::engine {

// Beside the graph of a step those that steps moved on to from there, and its neighbours by size: batches grow and shrink.
class Ahead {
public:
    // Notes the graph of a step. What may be next, the likeliest first; empty while the same graph runs again and again.
    const std::vector<dispatch::Slot>& after(dispatch::Slot slot);

    // All graphs that there can be, in ascending order of size within a mode and variant.
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
