// VmmGraph's leases for C++17: pages that only some graphs of an arena need, used by elastic memory while those graphs are not replayed.
// Header-only over vmmgraph.h; conventions as in vmmgraph.hpp.
//
//   vmmgraph::Borrower engine([&](const vmmgraph::Vacate& asked) { return give_up(asked.blocks, asked.bytes); });
//   vmmgraph::Lease lease = vmmgraph::lend(arena, cache, {1'000, 2'000}, engine);   // blocks of a KV cache, on pages of the prefill graphs
//   lease.before(stream);
//   vmmgraph::set_recall(arena, std::chrono::milliseconds(15));                     // a prefill recalls them itself; else it throws

#ifndef VMMGRAPH_LEASE_HPP
#define VMMGRAPH_LEASE_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "elastic.hpp"

namespace vmmgraph {

// What a borrower is asked for: which of these, so many bytes, by then.
struct Vacate {
    // The lease's number.
    std::uint64_t lease = 0;
    // Of a cache: its blocks with memory that lie on the lease's pages. Of a buffer: bytes from its base, one range, all of which are to go.
    std::vector<BlockRange> blocks;
    // What else has memory there and is not on lease.
    std::vector<BlockRange> instead;
    // Bytes of pages that are wanted. BlockPool::ask_of finds the pages that cost least.
    std::uint64_t bytes = 0;
    // How much time is left.
    std::chrono::microseconds left{0};
};

// What a borrower gave up.
struct Vacated {
    // Of a cache: blocks that it does not use any more. Of a buffer: nothing, since all of the range is.
    std::vector<BlockRange> blocks;
    // Behind this, no work of the device uses them. Its events may go when the borrower has been asked.
    PauseFence fence;
};

// Who uses pages on lease. It stays until its leases are over and no recall of them is under way.
class Borrower {
public:
    // Stops using what it is asked for and says what it gave up; nothing: it needs it all, and the recall fails, as it does if this throws.
    // Called on whichever thread recalls, with no lock of the library's held.
    using Function = std::function<std::optional<Vacated>(const Vacate&)>;

    explicit Borrower(Function vacate) : vacate_(std::move(vacate)) {}
    Borrower(const Borrower&) = delete;
    Borrower& operator=(const Borrower&) = delete;

    // What C calls, with a borrower as `user`.
    static std::int32_t call(const vmmgraph_vacate_t* asked, vmmgraph_vacating_t vacating, void* user) noexcept {
        try {
            Vacate told;
            told.lease = asked->lease;
            told.blocks.assign(asked->ranges, asked->ranges + asked->range_count);
            told.instead.assign(asked->instead, asked->instead + asked->instead_count);
            told.bytes = asked->bytes;
            told.left = std::chrono::microseconds(static_cast<std::int64_t>(asked->micros));
            const std::optional<Vacated> said = static_cast<Borrower*>(user)->vacate_(told);
            if (!said) {
                return 1;
            }
            for (const BlockRange& range : said->blocks) {
                detail::check(vmmgraph_vacating_add(vacating, range.first, range.end));
            }
            const vmmgraph_fence_t fence = detail::to_c(said->fence);
            detail::check(vmmgraph_vacating_behind(vacating, &fence));
            return 0;
        } catch (...) {
            // C and Rust are in between: nothing may be thrown through them.
            return 1;
        }
    }

private:
    Function vacate_;
};

// Pages of an arena that show in elastic memory as well. Destroying it changes nothing: they are on lease until the borrower has them no more.
class Lease {
public:
    explicit Lease(vmmgraph_lease_t handle) noexcept : handle_(handle) {}

    // Its number, unique in the process.
    [[nodiscard]] std::uint64_t number() const {
        std::uint64_t number = 0;
        detail::check(vmmgraph_lease_bytes(handle(), &number, nullptr));
        return number;
    }

    // Bytes that are still on lease; 0: it is over.
    [[nodiscard]] std::uint64_t bytes() const {
        std::uint64_t bytes = 0;
        detail::check(vmmgraph_lease_bytes(handle(), nullptr, &bytes));
        return bytes;
    }

    // Makes later work of a stream, the borrower's first on these pages, wait for the graphs that used them before.
    void before(void* stream) const { detail::check(vmmgraph_lease_before(handle(), stream)); }

    // Has `bytes` bytes of pages given back, or all if 0, until the deadline. Throws WrongState if the borrower gave up too little or its fence
    // is not over by then; the pages it gave up come all the same when somebody looks again.
    void recall(std::chrono::microseconds deadline, std::uint64_t bytes = 0) {
        detail::check(vmmgraph_lease_recall(handle(), bytes, static_cast<std::uint64_t>(deadline.count())));
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_lease_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_lease_t, vmmgraph_lease_destroy> handle_;
};

// Lends pages of an arena to `bytes` bytes of a buffer from `offset` on, whole pages where nothing is committed. Graphs that show one are not
// replayed until a recall. Throws what it was refused for, with nothing changed.
[[nodiscard]] inline Lease lend(const SharedVmmAllocator& arena, const ElasticBuffer& buffer, std::uint64_t offset, std::uint64_t bytes,
                                Borrower& borrower) {
    vmmgraph_lease_t lease = nullptr;
    detail::check(vmmgraph_arena_lend(arena.handle(), buffer.handle(), offset, bytes, Borrower::call, &borrower, &lease));
    return Lease(lease);
}

// The same, to blocks of a cache of which none has memory.
[[nodiscard]] inline Lease lend(const SharedVmmAllocator& arena, const KvCache& cache, BlockRange blocks, Borrower& borrower) {
    vmmgraph_lease_t lease = nullptr;
    detail::check(vmmgraph_arena_lend_blocks(arena.handle(), cache.handle(), blocks.first, blocks.end, Borrower::call, &borrower, &lease));
    return Lease(lease);
}

// Replays, eager work and captures that need pages on lease recall them from now on and wait so long at most; 0, as at first: they throw.
inline void set_recall(const SharedVmmAllocator& arena, std::chrono::microseconds wait) {
    detail::check(vmmgraph_arena_set_recall(arena.handle(), static_cast<std::uint64_t>(wait.count())));
}

// Recalls every lease in the way of a space's replay, or all of the arena's.
inline void recall(const SharedVmmAllocator& arena, const Space& space, std::chrono::microseconds deadline) {
    detail::check(vmmgraph_arena_recall(arena.handle(), space.handle(), static_cast<std::uint64_t>(deadline.count())));
}
inline void recall(const SharedVmmAllocator& arena, std::chrono::microseconds deadline) {
    detail::check(vmmgraph_arena_recall(arena.handle(), nullptr, static_cast<std::uint64_t>(deadline.count())));
}

// Bytes that an arena could lend now to somebody who shares none of its accounts, and bytes that it has lent.
[[nodiscard]] inline std::pair<std::uint64_t, std::uint64_t> lendable(const SharedVmmAllocator& arena) {
    std::uint64_t lendable = 0;
    std::uint64_t lent = 0;
    detail::check(vmmgraph_arena_lendable(arena.handle(), &lendable, &lent));
    return {lendable, lent};
}

// The leases on pages that a space shows.
[[nodiscard]] inline std::vector<std::uint64_t> leases(const Space& space) {
    return detail::read_items<std::uint64_t>([&](std::uint64_t* leases, std::size_t capacity, std::size_t* count) {
        return vmmgraph_space_leases(space.handle(), leases, capacity, count);
    });
}

}  // namespace vmmgraph

#endif  // VMMGRAPH_LEASE_HPP
