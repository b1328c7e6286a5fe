// VmmGraph's check that ranks replay alike, for C++17. Header-only over vmmgraph.h; conventions as in vmmgraph.hpp.
//
//   vmmgraph::Options options;
//   options.check_order = true;                                       // each replay is noted
//   ...
//   const auto gather = [&](const void* mine, std::size_t bytes, void* all) { group.all_gather(mine, bytes, all); };
//   vmmgraph::agree_on(arena, step_hash, {rank, ranks}, gather);       // throws on all ranks before anything is launched
//   vmmgraph::compare_order(arena, {rank, ranks}, gather);             // or every 100 steps: throws and names the first replay that differs

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

// What came of comparing the replays of several ranks.
using OrderReport = vmmgraph_order_report_t;

// Who compares.
struct RankOf {
    // This rank's number, below `ranks`.
    std::uint32_t rank = 0;
    // How many there are, 4096 at most.
    std::uint32_t ranks = 1;
};

// Ranks differ in what they replayed, or are about to.
class VMMGRAPH_API RanksDiffer : public Error {
public:
    RanksDiffer(const Error& error, const OrderReport& report) : Error(error), report_(report) {}

    // Where, and in what.
    [[nodiscard]] const OrderReport& report() const noexcept { return report_; }

private:
    OrderReport report_;
};

namespace detail {

// Gives `use` a C function and its argument that call `gather(mine, bytes, all)`, and a report to fill. What `gather` throws waits until
// `use` is done, since nothing may unwind through the library.
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

// Compares with the other ranks what was launched so far in an arena with check_order, by the engine's all-gather: `gather(mine, bytes, all)`
// writes the `bytes` bytes of each rank to `all`, in the order of their numbers. Any time, on any thread; all ranks call it. A rank that is
// merely behind is no difference: how far they agree is in what it returns. Throws RanksDiffer, on every rank with the first replay that is
// not the same; from then on replays and eager scopes of the arena throw (VMMGRAPH_ERROR_RANKS_DIFFER), rather than wait for each other for
// ever, until restart_order(). What `gather` throws arrives at the caller.
template <class Gather>
OrderReport compare_order(const SharedVmmAllocator& arena, RankOf who, Gather&& gather) {
    return detail::with_gather(gather, [&](vmmgraph_gather_fn trampoline, void* call, OrderReport* report) {
        return vmmgraph_arena_compare_order(arena.handle(), who.rank, who.ranks, trampoline, call, report);
    });
}

// As compare_order(), before a launch, or before anything else that all ranks must do alike: also `next` must be the same, and no rank may be
// behind. Any number: a hash of a step's mode and bucket, the layout_hash of what was just captured. Where nobody has launched what differs
// (launched is 0 in the report), nothing is refused afterwards: the ranks may decide anew.
template <class Gather>
OrderReport agree_on(const SharedVmmAllocator& arena, std::uint64_t next, RankOf who, Gather&& gather) {
    return detail::with_gather(gather, [&](vmmgraph_gather_fn trampoline, void* call, OrderReport* report) {
        return vmmgraph_arena_agree_on(arena.handle(), next, who.rank, who.ranks, trampoline, call, report);
    });
}

// Forgets what was launched and what differed: the check counts from 1 again. For all ranks at one point of their programs.
inline void restart_order(const SharedVmmAllocator& arena) { detail::check(vmmgraph_arena_restart_order(arena.handle())); }

}  // namespace vmmgraph

#endif  // VMMGRAPH_ORDER_HPP
