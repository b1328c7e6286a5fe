// Block pool of a KV cache for C++17: chooses blocks so that whole pages become empty. Holds no
// memory; the memory is the cache's (elastic.hpp). Header-only over vmmgraph.h. Conventions:
// vmmgraph.hpp. Early commits and admission: policies.hpp.
//
//   vmmgraph::BlockPool pool(cache);
//   vmmgraph::PreCommit ahead({low, high}, 2, 100);
//   ...                                               // before each step:
//   const auto [action, count] = ahead.step(step, pool.stats().available, coming, granted);
//   if (action == vmmgraph::Ahead::commit) {
//       ... pool.shortfall(available + count) ... cache.commit_async(range) ... pool.back(range)
//   }
//   if (action == vmmgraph::Ahead::give_back) {
//       ... pool.surplus(high) ... pool.unback(range); cache.release(range, {{stream}}) ...
//   }
//   const auto blocks = pool.allocate(3);             // none: a miss, not an error

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

// Statistics of a block pool.
using BlockPoolStats = vmmgraph_block_pool_stats_t;
// Pages for an engine to vacate; valid during the callback.
using EvictionRequest = vmmgraph_ask_t;

// The blocks of a cache: tracks use and chooses the next blocks. Blocks with common pages count as
// one page, which is backed or not, as reported by the caller. New blocks go to the fullest page
// with enough room, so other pages become empty.
class BlockPool {
public:
    // Creates a pool of unbacked blocks, of which `blocks_a_page` consecutive ones share pages.
    // `block_bytes` counts all planes.
    BlockPool(std::uint64_t blocks, std::uint64_t blocks_a_page, std::uint64_t block_bytes) {
        detail::require_abi();
        vmmgraph_block_pool_t handle = nullptr;
        detail::check(vmmgraph_block_pool_create(blocks, blocks_a_page, block_bytes, &handle));
        handle_ = detail::Owned<vmmgraph_block_pool_t, vmmgraph_block_pool_destroy>(handle);
    }

    // Creates a pool for the blocks of a cache.
    explicit BlockPool(const KvCache& cache) : BlockPool(cache.stats()) {}

    // Reports memory under the pages of these blocks.
    void back(BlockRange blocks) {
        detail::check(vmmgraph_block_pool_back(handle(), blocks.first, blocks.end));
    }

    // Reports the loss of memory under the unused pages of these blocks, before the release.
    // Returns the number of lost reserved blocks; a range of surplus() costs none.
    std::uint64_t unback(BlockRange blocks) {
        std::uint64_t lost = 0;
        detail::check(vmmgraph_block_pool_unback(handle(), blocks.first, blocks.end, &lost));
        return lost;
    }

    // Hands out `count` blocks, or none.
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> allocate(std::size_t count) {
        return take(count, vmmgraph_block_pool_allocate);
    }

    // Reserves `count` blocks for allocate_reserved(); returns false if too few are available.
    [[nodiscard]] bool reserve(std::uint64_t count) {
        std::int32_t there = 0;
        detail::check(vmmgraph_block_pool_reserve(handle(), count, &there));
        return there != 0;
    }

    // Releases up to `count` reserved blocks.
    void unreserve(std::uint64_t count) {
        detail::check(vmmgraph_block_pool_unreserve(handle(), count));
    }

    // Hands out `count` reserved blocks, or none.
    [[nodiscard]] std::optional<std::vector<std::uint64_t>> allocate_reserved(std::size_t count) {
        return take(count, vmmgraph_block_pool_allocate_reserved);
    }

    // Frees blocks and returns the number of emptied pages. Throws, with nothing changed, for a
    // block not in use or named twice.
    std::uint64_t free(const std::vector<std::uint64_t>& blocks) {
        std::uint64_t emptied = 0;
        detail::check(vmmgraph_block_pool_free(handle(), blocks.data(), blocks.size(), &emptied));
        return emptied;
    }

    // Hands out only blocks below `blocks` from now on; used ones stay used. Returns the number of
    // lost reserved blocks.
    std::uint64_t set_limit(std::uint64_t blocks) {
        std::uint64_t lost = 0;
        detail::check(vmmgraph_block_pool_set_limit(handle(), blocks, &lost));
        return lost;
    }

    // Returns the used blocks of a range, in order. Beyond a new limit: the `busy` blocks of
    // KvCache::shrink_to().
    [[nodiscard]] std::vector<BlockRange> used(BlockRange blocks) const {
        return detail::read_items<BlockRange>(
            [&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
                return vmmgraph_block_pool_used(handle(), blocks.first, blocks.end, ranges,
                                                capacity, count);
            });
    }

    // Returns the ranges to back for `count` available blocks, in whole pages, lowest first; none
    // if the limit leaves too few.
    [[nodiscard]] std::optional<std::vector<BlockRange>> shortfall(std::uint64_t count) const {
        std::int32_t there = 0;
        auto ranges = detail::read_items<BlockRange>([&](BlockRange* into, std::size_t capacity,
                                                         std::size_t* number) {
            return vmmgraph_block_pool_shortfall(handle(), count, into, capacity, number, &there);
        });
        return there != 0 ? std::optional(std::move(ranges)) : std::nullopt;
    }

    // Returns backed pages without used blocks, in order. See vmmgraph_block_pool_surplus().
    [[nodiscard]] std::vector<BlockRange> surplus(std::uint64_t keep) const {
        return detail::read_items<BlockRange>(
            [&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
                return vmmgraph_block_pool_surplus(handle(), keep, ranges, capacity, count);
            });
    }

    // Asks the engine to vacate pages, and returns the empty bytes. Both functions run without a
    // lock; their exceptions propagate. See vmmgraph_block_pool_ask().
    std::uint64_t ask(std::uint64_t bytes, std::uint64_t by,
                      const std::function<bool(std::uint64_t)>& evictable,
                      const std::function<void(const EvictionRequest&)>& evict) {
        std::uint64_t empty = 0;
        ask_by(evictable, evict, [&](auto may, auto vacate, void* user) {
            return vmmgraph_block_pool_ask(handle(), bytes, by, may, vacate, user, &empty);
        });
        return empty;
    }

    // As ask(), only for the pages of these blocks: for a lease's recall (lease.hpp). unused_of()
    // then returns the releasable pages.
    void ask_of(const std::vector<BlockRange>& among, std::uint64_t bytes,
                const std::function<bool(std::uint64_t)>& evictable,
                const std::function<void(const EvictionRequest&)>& evict) {
        ask_by(evictable, evict, [&](auto may, auto vacate, void* user) {
            return vmmgraph_block_pool_ask_of(handle(), among.data(), among.size(), bytes, may,
                                              vacate, user);
        });
    }

    // Returns the pages of these blocks without a used block, as ranges of blocks.
    [[nodiscard]] std::vector<BlockRange> unused_of(const std::vector<BlockRange>& among) const {
        return detail::read_items<BlockRange>(
            [&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
                return vmmgraph_block_pool_unused(handle(), among.data(), among.size(), ranges,
                                                  capacity, count);
            });
    }

    [[nodiscard]] BlockPoolStats stats() const {
        auto stats = detail::sized<BlockPoolStats>();
        detail::check(vmmgraph_block_pool_stats(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_block_pool_t handle() const noexcept { return handle_.get(); }

private:
    explicit BlockPool(const KvStats& stats)
        : BlockPool(stats.most_blocks, stats.blocks_a_page, stats.block_bytes) {}

    template <class Ask>
    static void ask_by(const std::function<bool(std::uint64_t)>& evictable,
                       const std::function<void(const EvictionRequest&)>& evict, Ask&& ask) {
        Asking asking{evictable, evict, nullptr};
        const auto status = ask(evictable ? Asking::may : nullptr, Asking::vacate, &asking);
        if (asking.thrown) {
            std::rethrow_exception(asking.thrown);
        }
        detail::check(status);
    }

    // Adapters for the engine's functions: exceptions must not unwind through C and Rust.
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
