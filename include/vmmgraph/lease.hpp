// Leases for C++17: elastic memory uses pages of idle graphs of an arena. Header-only over
// vmmgraph.h. Conventions: vmmgraph.hpp.
//
//   vmmgraph::Borrower engine(
//       [&](const vmmgraph::Vacate& asked) { return give_up(asked.blocks, asked.bytes); });
//   // blocks of a KV cache, on pages of the prefill graphs
//   vmmgraph::Lease lease = vmmgraph::lend(arena, cache, {1'000, 2'000}, engine);
//   lease.before(stream);
//   // a prefill recalls its pages, instead of throwing
//   vmmgraph::set_recall(arena, std::chrono::milliseconds(15));

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

// Request to a borrower: which blocks, how many bytes, how much time.
struct Vacate {
    // The lease's number.
    std::uint64_t lease = 0;
    // Cache: the blocks with memory on leased pages. Buffer: one range of bytes from its base, all
    // to be given up.
    std::vector<BlockRange> blocks;
    // Other memory of the borrower, not on lease.
    std::vector<BlockRange> instead;
    // Requested bytes of pages. BlockPool::ask_of finds the cheapest pages.
    std::uint64_t bytes = 0;
    std::chrono::microseconds left{0};
};

// A borrower's answer.
struct Vacated {
    // Cache: blocks no longer used. Buffer: empty, since the whole range is given up.
    std::vector<BlockRange> blocks;
    // After this fence, no device work uses the blocks. Its events are needed only until the
    // request is answered.
    PauseFence fence = {};
};

// User of leased pages. Must outlive its leases and all recalls in progress.
class Borrower {
public:
    // Stops using the requested memory and returns the blocks given up. Without a value, or on an
    // exception, the recall fails. Runs on the recalling thread, with no lock of the library held.
    using Function = std::function<std::optional<Vacated>(const Vacate&)>;

    explicit Borrower(Function vacate) : vacate_(std::move(vacate)) {}
    Borrower(const Borrower&) = delete;
    Borrower& operator=(const Borrower&) = delete;

    // The C callback; `user` is a Borrower.
    static std::int32_t call(const vmmgraph_vacate_t* asked, vmmgraph_vacating_t vacating,
                             void* user) noexcept {
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
            // Exceptions must not unwind through C and Rust.
            return 1;
        }
    }

private:
    Function vacate_;
};

// A lease: pages of an arena which are mapped in elastic memory too. Destruction does not end the
// lease; see vmmgraph_lease_destroy().
class Lease {
public:
    explicit Lease(vmmgraph_lease_t handle) noexcept : handle_(handle) {}

    // Returns the lease's number, unique in the process.
    [[nodiscard]] std::uint64_t number() const {
        std::uint64_t number = 0;
        detail::check(vmmgraph_lease_bytes(handle(), &number, nullptr));
        return number;
    }

    // Returns the bytes still on lease; 0: the lease is over.
    [[nodiscard]] std::uint64_t bytes() const {
        std::uint64_t bytes = 0;
        detail::check(vmmgraph_lease_bytes(handle(), nullptr, &bytes));
        return bytes;
    }

    // Makes later work of `stream`, the borrower's first on these pages, wait for earlier graphs.
    void before(void* stream) const { detail::check(vmmgraph_lease_before(handle(), stream)); }

    // Recalls `bytes` bytes of pages (0: all) by the deadline. See vmmgraph_lease_recall().
    void recall(std::chrono::microseconds deadline, std::uint64_t bytes = 0) {
        detail::check(
            vmmgraph_lease_recall(handle(), bytes, static_cast<std::uint64_t>(deadline.count())));
    }

    [[nodiscard]] vmmgraph_lease_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_lease_t, vmmgraph_lease_destroy> handle_;
};

// Lends pages of an arena to `bytes` uncommitted bytes of a buffer from `offset`. See
// vmmgraph_arena_lend().
[[nodiscard]] inline Lease lend(const SharedVmmAllocator& arena, const ElasticBuffer& buffer,
                                std::uint64_t offset, std::uint64_t bytes, Borrower& borrower) {
    vmmgraph_lease_t lease = nullptr;
    detail::check(vmmgraph_arena_lend(arena.handle(), buffer.handle(), offset, bytes,
                                      Borrower::call, &borrower, &lease));
    return Lease(lease);
}

// Lends pages of an arena to blocks of a cache without memory.
[[nodiscard]] inline Lease lend(const SharedVmmAllocator& arena, const KvCache& cache,
                                BlockRange blocks, Borrower& borrower) {
    vmmgraph_lease_t lease = nullptr;
    detail::check(vmmgraph_arena_lend_blocks(arena.handle(), cache.handle(), blocks.first,
                                             blocks.end, Borrower::call, &borrower, &lease));
    return Lease(lease);
}

// Lets replays, eager work and captures recall the leases they need. See
// vmmgraph_arena_set_recall().
inline void set_recall(const SharedVmmAllocator& arena, std::chrono::microseconds wait) {
    detail::check(
        vmmgraph_arena_set_recall(arena.handle(), static_cast<std::uint64_t>(wait.count())));
}

// Recalls all leases which block a space's replay, or all of the arena's.
inline void recall(const SharedVmmAllocator& arena, const Space& space,
                   std::chrono::microseconds deadline) {
    detail::check(vmmgraph_arena_recall(arena.handle(), space.handle(),
                                        static_cast<std::uint64_t>(deadline.count())));
}
inline void recall(const SharedVmmAllocator& arena, std::chrono::microseconds deadline) {
    detail::check(vmmgraph_arena_recall(arena.handle(), nullptr,
                                        static_cast<std::uint64_t>(deadline.count())));
}

// Returns the bytes lendable now to a borrower outside the arena's accounts, and the bytes lent.
[[nodiscard]] inline std::pair<std::uint64_t, std::uint64_t> lendable(
    const SharedVmmAllocator& arena) {
    std::uint64_t lendable = 0;
    std::uint64_t lent = 0;
    detail::check(vmmgraph_arena_lendable(arena.handle(), &lendable, &lent));
    return {lendable, lent};
}

// Returns the numbers of the leases on a space's pages.
[[nodiscard]] inline std::vector<std::uint64_t> leases(const Space& space) {
    return detail::read_items<std::uint64_t>(
        [&](std::uint64_t* leases, std::size_t capacity, std::size_t* count) {
            return vmmgraph_space_leases(space.handle(), leases, capacity, count);
        });
}

}  // namespace vmmgraph

#endif  // VMMGRAPH_LEASE_HPP
