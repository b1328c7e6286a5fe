// End of an eager scope, by its own or a different thread. Does not keep the scope alive.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "guards.hpp"
#include "rust/cxx.h"
#include "vmmgraph-bridge/src/eager.rs.h"

namespace vmmgraph::torch {

class EagerScope;

class EagerEnding {
public:
    static std::shared_ptr<EagerEnding> of(const EagerScope& scope);

    // Takes the arena's replay slot for this thread. `lasts`: the stream exists as long as the
    // process. Throws Error.
    void begin(vmmgraph_arena_t arena, void* stream, bool lasts,
               std::optional<std::uint64_t> bytes) {
        detail::check(bridge::begin_eager(*scope_, reinterpret_cast<std::size_t>(arena),
                                          reinterpret_cast<std::size_t>(stream), bytes.has_value(),
                                          bytes.value_or(0)));
        marks_ = lasts ? nullptr : arena;
    }
    // Releases the replay slot once. Throws Error if refused, without effect.
    void end() {
        const bool before = over_.exchange(true, std::memory_order_acq_rel);
        if (const auto status = bridge::end_eager(*scope_); status != VMMGRAPH_OK) {
            over_.store(before, std::memory_order_release);
            detail::check(status);
        }
        mark();
    }
    // Ends on the scope's own thread, where the end is never refused.
    void end_here() noexcept {
        over_.store(true, std::memory_order_release);
        static_cast<void>(bridge::end_eager(*scope_));
        mark();
    }
    [[nodiscard]] bool over() const noexcept { return over_.load(std::memory_order_acquire); }

private:
    // Records a mark, so the next replay does not use a possibly destroyed stream.
    void mark() const noexcept {
        if (marks_ != nullptr) {
            static_cast<void>(vmmgraph_arena_mark(marks_));
        }
    }

    std::atomic<bool> over_ = false;
    // Arena to mark after the scope; null if no mark is needed.
    vmmgraph_arena_t marks_ = nullptr;
    rust::Box<bridge::EagerScopeHandle> scope_ = bridge::no_eager_scope();
};

}  // namespace vmmgraph::torch
