#include "behind.hpp"

#include <algorithm>
#include <utility>

namespace vmmgraph::engine {

using dispatch::Key;
using dispatch::Mode;
using dispatch::no_slot;
using dispatch::Slot;

namespace {

// Marks keys of piecewise graphs in a plan, which knows variants and no modes.
constexpr std::uint32_t piecewise_bit = std::uint32_t{1} << 31;

Key planned_key(const Ahead::Place& place) {
    auto key = place.bucket;
    key.variant ^= place.mode == Mode::piecewise ? piecewise_bit : 0;
    return key;
}

}  // namespace

bool covers(const Key& bucket, const Key& other) {
    return bucket.variant == other.variant &&
           std::equal(bucket.extents.begin(), bucket.extents.end(), other.extents.begin(),
                      [](std::uint32_t most, std::uint32_t size) { return most >= size; });
}

Behind::Behind(std::vector<Ahead::Place> places) : places_(std::move(places)) {
    std::size_t slots = 0;
    for (const auto& place : places_) {
        slots = std::max<std::size_t>(slots, place.slot + 1);
    }
    steps_.resize(slots);
    recent_.resize(slots);
    put_off_.resize(slots);
}

void Behind::count(Slot slot, bool missing) {
    ++steps_[slot];
    ++recent_[slot];
    changed_ = changed_ || missing;
    if (++counted_ % window == 0) {
        for (auto* const counts : {&recent_, &put_off_}) {
            std::for_each(counts->begin(), counts->end(), [](std::uint64_t& steps) { steps /= 2; });
        }
    }
}

Slot Behind::next(const std::function<dispatch::PlanOptions()>& limits,
                  const std::function<bool(Slot)>& missing) {
    if (std::exchange(changed_, false)) {
        plan(limits());
    }
    const auto found = std::find_if(planned_.begin(), planned_.end(), missing);
    return found == planned_.end() ? no_slot : *found;
}

std::size_t Behind::waiting(const std::function<bool(Slot)>& missing) const {
    return static_cast<std::size_t>(std::count_if(planned_.begin(), planned_.end(), missing));
}

void Behind::put_off(Slot slot) {
    put_off_[slot] = recent_[slot];
    planned_.erase(std::remove(planned_.begin(), planned_.end(), slot), planned_.end());
}

void Behind::plan(const dispatch::PlanOptions& limits) {
    dispatch::Traffic traffic;
    for (const auto& place : places_) {
        if (recent_[place.slot] > 0) {
            traffic.emplace_back(planned_key(place), recent_[place.slot]);
        }
    }
    auto buckets = dispatch::make_plan(traffic, limits).buckets;
    std::stable_sort(buckets.begin(), buckets.end(),
                     [](const auto& a, const auto& b) { return a.steps > b.steps; });
    planned_.clear();
    for (auto& bucket : buckets) {
        const auto mode = (bucket.key.variant & piecewise_bit) != 0 ? Mode::piecewise : Mode::full;
        bucket.key.variant &= ~piecewise_bit;
        // Along several axes a planned bucket may lie between two graphs.
        const auto slot = covering(mode, bucket.key);
        const bool again = std::find(planned_.begin(), planned_.end(), slot) != planned_.end();
        if (slot != no_slot && !again && recent_[slot] >= 2 * put_off_[slot]) {
            planned_.push_back(slot);
        }
    }
}

Slot Behind::covering(Mode mode, const Key& key) const {
    const auto found = std::find_if(places_.begin(), places_.end(), [&](const auto& place) {
        return place.mode == mode && covers(place.bucket, key);
    });
    return found == places_.end() ? no_slot : found->slot;
}

void Behind::add(const std::vector<ShapeSteps>& histogram) {
    std::uint64_t sum = 0;
    for (const auto& shape : histogram) {
        sum += shape.steps;
    }
    for (const auto& shape : histogram) {
        if (const auto slot = covering(shape.mode, shape.key); slot != no_slot && shape.steps > 0) {
            const auto share = static_cast<double>(shape.steps) / static_cast<double>(sum) *
                               static_cast<double>(window);
            steps_[slot] += shape.steps;
            recent_[slot] += std::min(
                shape.steps, std::max<std::uint64_t>(1, static_cast<std::uint64_t>(share)));
            changed_ = true;
        }
    }
}

std::vector<ShapeSteps> Behind::histogram() const {
    std::vector<ShapeSteps> shapes;
    for (const auto& place : places_) {
        if (steps_[place.slot] > 0) {
            shapes.push_back({place.mode, place.bucket, steps_[place.slot]});
        }
    }
    return shapes;
}

}  // namespace vmmgraph::engine
