// The end of an eager scope, to which its own thread or another one may come first. Whoever holds it does not hold the scope.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "guards.hpp"
#include "rust/cxx.h"
#include "vmmgraph/src/bridge/eager.rs.h"

namespace vmmgraph::torch {

class EagerScope;

class EagerEnding {
public:
    // Of a scope that has begun.
    static std::shared_ptr<EagerEnding> of(const EagerScope& scope);

    // Takes the arena's turn for this thread; `lasts`: the stream is there as long as the process. Throws Error.
    void begin(vmmgraph_arena_t arena, void* stream, bool lasts, std::optional<std::uint64_t> bytes) {
        detail::check(bridge::begin_eager(*turn_, reinterpret_cast<std::size_t>(arena), reinterpret_cast<std::size_t>(stream),
                                          bytes.has_value(), bytes.value_or(0)));
        marks_ = lasts ? nullptr : arena;
    }
    // Gives it back; nothing if that was done. Throws Error where it is refused, and nothing has changed then.
    void end() {
        const bool before = over_.exchange(true, std::memory_order_acq_rel);
        if (const auto status = bridge::end_eager(*turn_); status != VMMGRAPH_OK) {
            over_.store(before, std::memory_order_release);
            detail::check(status);
        }
        mark();
    }
    // On its thread, where it is not refused.
    void end_here() noexcept {
        over_.store(true, std::memory_order_release);
        static_cast<void>(bridge::end_eager(*turn_));
        mark();
    }
    [[nodiscard]] bool over() const noexcept { return over_.load(std::memory_order_acquire); }

private:
    // The next replay is not to name a stream that may be gone.
    void mark() const noexcept {
        if (marks_ != nullptr) {
            static_cast<void>(vmmgraph_arena_mark(marks_));
        }
    }

    std::atomic<bool> over_ = false;
    // Where a mark is put behind the scope.
    vmmgraph_arena_t marks_ = nullptr;
    rust::Box<bridge::EagerTurn> turn_ = bridge::no_turn();
};

}  // namespace vmmgraph::torch
