#include "ahead.hpp"

#include <algorithm>
#include <utility>

namespace vmmgraph::engine {

using dispatch::no_slot;
using dispatch::Slot;

Ahead::Ahead(const std::vector<Place>& places) {
    for (std::size_t i = 0; i < places.size(); ++i) {
        const auto& place = places[i];
        known_.resize(std::max<std::size_t>(known_.size(), place.slot + 1));
        const auto same = [&](const Place& other) {
            return other.mode == place.mode && other.bucket.variant == place.bucket.variant;
        };
        const auto larger =
            std::find_if(places.begin() + static_cast<std::ptrdiff_t>(i) + 1, places.end(), same);
        if (larger != places.end()) {
            known_.resize(std::max<std::size_t>(known_.size(), larger->slot + 1));
            known_[place.slot].larger = larger->slot;
            known_[larger->slot].smaller = place.slot;
        }
    }
    next_.reserve(3);
}

const std::vector<Slot>& Ahead::after(Slot slot) {
    next_.clear();
    if (slot == last_ || slot >= known_.size()) {
        return next_;
    }
    if (last_ != no_slot) {
        known_[last_].followed = slot;
    }
    last_ = slot;
    const auto& now = known_[slot];
    for (const auto next : {now.followed, now.smaller, now.larger}) {
        if (next != no_slot && std::find(next_.begin(), next_.end(), next) == next_.end()) {
            next_.push_back(next);
        }
    }
    return next_;
}

}  // namespace vmmgraph::engine
