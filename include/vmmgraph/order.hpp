// Replay order check for C++17: compares the replays of several ranks. Header-only over vmmgraph.h.
// Conventions: vmmgraph.hpp.
//
//   vmmgraph::Options options;
//   options.check_order = true;                                 // records each replay
//   ...
//   const auto gather = [&](const void* mine, std::size_t bytes, void* all) {
//       group.all_gather(mine, bytes, all);
//   };
//   // throws on all ranks before anything is launched
//   vmmgraph::agree_on(arena, step_hash, {rank, ranks}, gather);
//   // or every 100 steps: throws and names the first differing replay
//   vmmgraph::compare_order(arena, {rank, ranks}, gather);

#ifndef VMMGRAPH_ORDER_HPP
#define VMMGRAPH_ORDER_HPP

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "arena.hpp"

namespace vmmgraph {

// Result of a comparison between ranks.
using OrderReport = vmmgraph_order_report_t;

// This rank in the comparison.
struct RankOf {
    // This rank's number, below `ranks`.
    std::uint32_t rank = 0;
    // Number of ranks, at most 4096.
    std::uint32_t ranks = 1;
};

// Ranks replayed different graphs, or are about to.
class VMMGRAPH_API RanksDiffer : public Error {
public:
    RanksDiffer(const Error& error, const OrderReport& report) : Error(error), report_(report) {}

    // The first difference: replay, ranks and keys.
    [[nodiscard]] const OrderReport& report() const noexcept { return report_; }

private:
    OrderReport report_;
};

namespace detail {

// Passes `use` a C function and its argument, which call `gather(mine, bytes, all)`, and a report
// to fill. Rethrows an exception of `gather` after `use`, since nothing may unwind through the
// library.
template <class Gather, class Use>
OrderReport with_gather(Gather& gather, Use&& use) {
    static_assert(std::is_invocable_v<Gather&, const void*, std::size_t, void*>, "gather is called with (mine, bytes, all)");
    struct Call {
        Gather* gather;
        std::exception_ptr thrown;
    } call{std::addressof(gather), nullptr};
    const vmmgraph_gather_fn trampoline = [](const void* mine, std::size_t bytes, void* all, void* user) noexcept -> std::int32_t {
        auto* const self = static_cast<Call*>(user);
        try {
            static_cast<void>(std::invoke(*self->gather, mine, bytes, all));
            return 0;
        } catch (...) {
            self->thrown = std::current_exception();
            return 1;
        }
    };
    auto report = sized<OrderReport>();
    const vmmgraph_status_t status = use(trampoline, &call, &report);
    if (call.thrown) {
        std::rethrow_exception(std::move(call.thrown));
    }
    try {
        check(status);
    } catch (const Error& error) {
        if (status == VMMGRAPH_ERROR_RANKS_DIFFER) {
            throw RanksDiffer(error, report);
        }
        throw;
    }
    return report;
}

}  // namespace detail

// Compares the launched replays of all ranks, in an arena with check_order. `gather(mine, bytes,
// all)` is an all-gather: writes the `bytes` bytes of each rank to `all`, in rank order. All ranks
// must call, at any time and on any thread. A rank merely behind is no difference. Throws
// RanksDiffer on every rank; then replays and eager scopes throw VMMGRAPH_ERROR_RANKS_DIFFER until
// restart_order(). Exceptions of `gather` propagate. See vmmgraph_arena_compare_order().
template <class Gather>
OrderReport compare_order(const SharedVmmAllocator& arena, RankOf who, Gather&& gather) {
    return detail::with_gather(gather, [&](vmmgraph_gather_fn trampoline, void* call, OrderReport* report) {
        return vmmgraph_arena_compare_order(arena.handle(), who.rank, who.ranks, trampoline, call, report);
    });
}

// As compare_order(), before a launch or another common action: `next` must be equal too, and no
// rank may be behind. If no rank launched a differing replay (`launched` is 0), nothing is refused
// afterwards. See vmmgraph_arena_agree_on().
template <class Gather>
OrderReport agree_on(const SharedVmmAllocator& arena, std::uint64_t next, RankOf who, Gather&& gather) {
    return detail::with_gather(gather, [&](vmmgraph_gather_fn trampoline, void* call, OrderReport* report) {
        return vmmgraph_arena_agree_on(arena.handle(), next, who.rank, who.ranks, trampoline, call, report);
    });
}

// Clears the recorded replays and differences; counting restarts at 1. Call on all ranks at the
// same point of the program.
inline void restart_order(const SharedVmmAllocator& arena) { detail::check(vmmgraph_arena_restart_order(arena.handle())); }

}  // namespace vmmgraph

#endif  // VMMGRAPH_ORDER_HPP
