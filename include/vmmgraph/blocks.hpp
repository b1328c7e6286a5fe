// Which blocks of a KV cache to use, so that whole pages come free, for C++17. Bookkeeping without memory: the cache of elastic.hpp has that.
// Header-only over vmmgraph.h; conventions as in vmmgraph.hpp. When to commit ahead, and who may begin: policies.hpp.
//
//   vmmgraph::BlockPool pool(cache);
//   vmmgraph::PreCommit ahead({low, high}, 2, 100);
//   ...                                                           // before each step:
//   const auto [action, count] = ahead.step(step, pool.stats().available, coming, granted);
//   if (action == vmmgraph::Ahead::commit) { ... pool.shortfall(available + count) ... cache.commit_async(range) ... pool.back(range) ... }
//   if (action == vmmgraph::Ahead::give_back) { ... pool.surplus(high) ... pool.unback(range); cache.release(range, {{stream}}) ... }
//   const auto blocks = pool.allocate(3);                         // none: a miss, and no error

#ifndef VMMGRAPH_BLOCKS_HPP
#define VMMGRAPH_BLOCKS_HPP

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "elastic.hpp"

namespace vmmgraph {

// What a block pool has.
using BlockPoolStats = vmmgraph_block_pool_stats_t;
// What an engine is asked to vacate; valid while it is asked.
using EvictionRequest = vmmgraph_ask_t;

// The blocks of a cache: which are used, and which to use next. Blocks that share pages are one page here; it is backed or not, as the
// caller commits and releases it. New blocks go to the page with the least room that has enough, so that other pages run empty.
class BlockPool {
public:
    // So many blocks, none backed, of which `blocks_a_page` behind one another share pages; `block_bytes` is a block's of all planes.
    BlockPool(std::uint64_t blocks, std::uint64_t blocks_a_page, std::uint64_t block_bytes) {
        detail::require_abi();
        vmmgraph_block_pool_t handle = nullptr;
        detail::check(vmmgraph_block_pool_create(blocks, blocks_a_page, block_bytes, &handle));
        handle_ = detail::Owned<vmmgraph_block_pool_t, vmmgraph_block_pool_destroy>(handle);
    }

    // Of the blocks of a cache.
    explicit BlockPool(const KvCache& cache) : BlockPool(cache.stats()) {}

    // The pages that these blocks cover have memory now.
    void back(BlockRange blocks) { detail::check(vmmgraph_block_pool_back(handle(), blocks.first, blocks.end)); }

    // The pages that these blocks cover, and on which none is used, have no memory any more: to be said before it goes. How many reserved
    // blocks that costs; what is surplus() costs none.
    std::uint64_t unback(BlockRange blocks) {
        std::uint64_t lost = 0;
        detail::check(vmmgraph_block_pool_unback(handle(), blocks.first, blocks.end, &lost));
        return lost;
    }

    // Hands out so many blocks, or none.
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> allocate(std::size_t count) {
        return take(count, vmmgraph_block_pool_allocate);
    }

    // Sets so many blocks aside for allocate_reserved(); whether there were.
    [[nodiscard]] bool reserve(std::uint64_t count) {
        std::int32_t there = 0;
        detail::check(vmmgraph_block_pool_reserve(handle(), count, &there));
        return there != 0;
    }

    // Gives up so many reserved blocks, or as many as there are.
    void unreserve(std::uint64_t count) { detail::check(vmmgraph_block_pool_unreserve(handle(), count)); }

    // Hands out so many of the reserved blocks, or none.
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> allocate_reserved(std::size_t count) {
        return take(count, vmmgraph_block_pool_allocate_reserved);
    }

    // Blocks are not used any more; how many pages came empty by that. Throws for one that is not in use or is named twice, with nothing
    // changed.
    std::uint64_t free(const std::vector<std::uint64_t>& blocks) {
        std::uint64_t emptied = 0;
        detail::check(vmmgraph_block_pool_free(handle(), blocks.data(), blocks.size(), &emptied));
        return emptied;
    }

    // Only blocks below `blocks` are handed out from now on; how many reserved ones that costs. Used ones stay used.
    std::uint64_t set_limit(std::uint64_t blocks) {
        std::uint64_t lost = 0;
        detail::check(vmmgraph_block_pool_set_limit(handle(), blocks, &lost));
        return lost;
    }

    // The blocks of a range that are in use, in order: those beyond a new limit are what KvCache::shrink_to() is to leave.
    [[nodiscard]] std::vector<BlockRange> used(BlockRange blocks) const {
        return detail::read_items<BlockRange>([&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
            return vmmgraph_block_pool_used(handle(), blocks.first, blocks.end, ranges, capacity, count);
        });
    }

    // What is to be backed so that `count` blocks are available, in whole pages, the lowest first; none: the limit leaves too few.
    [[nodiscard]] std::optional<std::vector<BlockRange>> shortfall(std::uint64_t count) const {
        std::int32_t there = 0;
        auto ranges = detail::read_items<BlockRange>([&](BlockRange* into, std::size_t capacity, std::size_t* number) {
            return vmmgraph_block_pool_shortfall(handle(), count, into, capacity, number, &there);
        });
        return there != 0 ? std::optional(std::move(ranges)) : std::nullopt;
    }

    // Backed pages on which nothing is used: those beyond the limit, and the highest others as long as `keep` blocks and the reserved ones
    // are free without them. In whole pages, in order.
    [[nodiscard]] std::vector<BlockRange> surplus(std::uint64_t keep) const {
        return detail::read_items<BlockRange>([&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
            return vmmgraph_block_pool_surplus(handle(), keep, ranges, capacity, count);
        });
    }

    // Asks the engine to vacate pages so that `bytes` bytes can be given back until `by`, in units of its own: pages all of whose used blocks
    // are `evictable` (empty: all are). `evict` is called once, unless no page is to be had or needed, and frees what it can of what it
    // still has there. Returns the bytes that are empty afterwards. Both are called without a lock; what they throw is thrown on.
    std::uint64_t ask(std::uint64_t bytes, std::uint64_t by, const std::function<bool(std::uint64_t)>& evictable,
                      const std::function<void(const EvictionRequest&)>& evict) {
        std::uint64_t empty = 0;
        ask_by(evictable, evict,
               [&](auto may, auto vacate, void* user) { return vmmgraph_block_pool_ask(handle(), bytes, by, may, vacate, user, &empty); });
        return empty;
    }

    // The same, of the pages only that these blocks lie on: what a recall of a lease (lease.hpp) wants back. What can be given back afterwards
    // says unused_of().
    void ask_of(const std::vector<BlockRange>& among, std::uint64_t bytes, const std::function<bool(std::uint64_t)>& evictable,
                const std::function<void(const EvictionRequest&)>& evict) {
        ask_by(evictable, evict, [&](auto may, auto vacate, void* user) {
            return vmmgraph_block_pool_ask_of(handle(), among.data(), among.size(), bytes, may, vacate, user);
        });
    }

    // The pages on which no block is used, of those that these blocks lie on, as ranges of blocks.
    [[nodiscard]] std::vector<BlockRange> unused_of(const std::vector<BlockRange>& among) const {
        return detail::read_items<BlockRange>([&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
            return vmmgraph_block_pool_unused(handle(), among.data(), among.size(), ranges, capacity, count);
        });
    }

    // What it has now.
    [[nodiscard]] BlockPoolStats stats() const {
        auto stats = detail::sized<BlockPoolStats>();
        detail::check(vmmgraph_block_pool_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_block_pool_t handle() const noexcept { return handle_.get(); }

private:
    explicit BlockPool(const KvStats& stats) : BlockPool(stats.most_blocks, stats.blocks_a_page, stats.block_bytes) {}

    template <class Ask>
    static void ask_by(const std::function<bool(std::uint64_t)>& evictable, const std::function<void(const EvictionRequest&)>& evict,
                       Ask&& ask) {
        Asking asking{evictable, evict, nullptr};
        const auto status = ask(evictable ? Asking::may : nullptr, Asking::vacate, &asking);
        if (asking.thrown) {
            std::rethrow_exception(asking.thrown);
        }
        detail::check(status);
    }

    // Functions of the engine's, behind C and Rust: nothing may be thrown through those.
    struct Asking {
        const std::function<bool(std::uint64_t)>& evictable;
        const std::function<void(const EvictionRequest&)>& evict;
        std::exception_ptr thrown;

        static std::int32_t may(std::uint64_t block, void* user) noexcept {
            auto& asking = *static_cast<Asking*>(user);
            try {
                return !asking.thrown && asking.evictable(block) ? 1 : 0;
            } catch (...) {
                asking.thrown = std::current_exception();
                return 0;
            }
        }

        static void vacate(const vmmgraph_ask_t* ask, void* user) noexcept {
            auto& asking = *static_cast<Asking*>(user);
            try {
                if (!asking.thrown && asking.evict) {
                    asking.evict(*ask);
                }
            } catch (...) {
                asking.thrown = std::current_exception();
            }
        }
    };

    template <class Take>
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> take(std::size_t count, Take from) {
        std::vector<std::uint64_t> blocks(count);
        std::int32_t there = 0;
        detail::check(from(handle(), count, blocks.data(), &there));
        return there != 0 ? std::optional(std::move(blocks)) : std::nullopt;
    }

    detail::Owned<vmmgraph_block_pool_t, vmmgraph_block_pool_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_BLOCKS_HPP
