// Elastic memory for C++17: reserved addresses for the maximum size, and pages for the used part,
// so captured graphs stay valid while memory grows and shrinks. Header-only over vmmgraph.h.
// Conventions: vmmgraph.hpp. Choice of blocks: blocks.hpp.
//
//   // keys and values of 36 layers: addresses only
//   vmmgraph::KvCache cache(device, {std::vector<std::uint64_t>(72, 32 << 10), 100'000});
//   cache.grow_to(2'000);                     // or grow_async(), ahead of need
//   launch(cache.plane(0).address, cache.plane(0).stride_bytes);
//   // two blocks stay until released; the rest is unmapped after the stream's work
//   cache.shrink_to(1'000, {{1'500, 1'502}}, {{stream}});
//
// Uncommitted parts have no memory: device access faults. Before a buffer or cache is destroyed,
// decommit everything with a fence, or finish all device work.

#ifndef VMMGRAPH_ELASTIC_HPP
#define VMMGRAPH_ELASTIC_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "region.hpp"

namespace vmmgraph {

// Result of a commit.
using Committed = vmmgraph_committed_t;
// Statistics of elastic memory.
using ElasticStats = vmmgraph_elastic_stats_t;
// Elastic memory just mapped or about to be unmapped; valid during an observer call.
using Shown = vmmgraph_shown_t;
// Statistics of a KV cache.
using KvStats = vmmgraph_kv_stats_t;
// Address and strides of a KV cache plane.
using KvPlace = vmmgraph_kv_plane_t;
// Blocks from `first` up to, excluding, `end`.
using BlockRange = vmmgraph_block_range_t;
// A range of device addresses.
using AddressRange = vmmgraph_range_t;

// Options of elastic memory; 0 is the default of every number.
struct ElasticOptions {
    // Name in messages.
    std::string name;
    // Bytes of every page, a multiple of the device's granularity; 0: chosen from the reserved
    // range. See vmmgraph_elastic_options_t.
    std::uint64_t page_bytes = 0;
    // Limit of physical memory in bytes; 0: only the device's limit.
    std::uint64_t budget_bytes = 0;
    // Guaranteed bytes, out of the device's budget.
    std::uint64_t least_bytes = 0;
    // Parent account, Account::handle() of the same device; null: the device's account.
    vmmgraph_account_t account = nullptr;
};

namespace detail {

// Converts options to C; the result points into `options`.
[[nodiscard]] inline vmmgraph_elastic_options_t to_c(const ElasticOptions& options) noexcept {
    auto given = sized<vmmgraph_elastic_options_t>();
    given.name = options.name.c_str();
    given.page_bytes = options.page_bytes;
    given.budget_bytes = options.budget_bytes;
    given.least_bytes = options.least_bytes;
    given.account = options.account;
    return given;
}

// Returns the items of a function which writes (items, capacity, count), with retries while the
// number grows.
template <class Item, class Read>
[[nodiscard]] std::vector<Item> read_items(Read&& read) {
    std::vector<Item> items(16);
    for (;;) {
        std::size_t count = 0;
        check(read(items.data(), items.size(), &count));
        const bool fits = count <= items.size();
        items.resize(count);
        if (fits) {
            return items;
        }
    }
}

}  // namespace detail

// An asynchronous commit on a thread of the library. Destruction does not stop the commit.
class Pending {
public:
    explicit Pending(vmmgraph_pending_t handle) noexcept : handle_(handle) {}

    // Returns true if the commit is over.
    [[nodiscard]] bool done() const {
        std::int32_t over = 0;
        detail::check(vmmgraph_pending_done(handle(), &over));
        return over != 0;
    }

    // Blocks for driver calls only, never for device work. Throws the commit's error. Repeatable.
    Committed wait() const {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_pending_wait(handle(), &done));
        return done;
    }

    [[nodiscard]] vmmgraph_pending_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_pending_t, vmmgraph_pending_destroy> handle_;
};

// Elastic buffer: reserved addresses for the maximum size, and pages for the used part.
class ElasticBuffer {
public:
    // Reserves `bytes` of addresses, without memory. The buffer keeps the device open.
    ElasticBuffer(const Device& device, std::uint64_t bytes, const ElasticOptions& options = {}) {
        detail::require_abi();
        const vmmgraph_elastic_options_t given = detail::to_c(options);
        vmmgraph_elastic_buffer_t handle = nullptr;
        detail::check(vmmgraph_elastic_buffer_create(device.handle(), bytes, &given, &handle));
        handle_ = detail::Owned<vmmgraph_elastic_buffer_t, vmmgraph_elastic_buffer_destroy>(handle);
    }

    // Returns the first address, which never changes.
    [[nodiscard]] void* base() const {
        void* base = nullptr;
        detail::check(vmmgraph_elastic_buffer_base(handle(), &base));
        return base;
    }

    // Maps the missing pages of `bytes` bytes from `offset`, rounded outward. Throws OutOfMemory
    // with nothing changed. See vmmgraph_elastic_buffer_commit().
    Committed commit(std::uint64_t offset, std::uint64_t bytes) {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_elastic_buffer_commit(handle(), offset, bytes, &done));
        return done;
    }

    // As commit(), on a thread of the library, without asking reclaimers for memory.
    [[nodiscard]] Pending commit_async(std::uint64_t offset, std::uint64_t bytes) {
        vmmgraph_pending_t pending = nullptr;
        detail::check(vmmgraph_elastic_buffer_commit_async(handle(), offset, bytes, &pending));
        return Pending(pending);
    }

    // Unmaps the pages of `bytes` bytes from `offset`, rounded inward, after the fence. Returns
    // their bytes. See vmmgraph_elastic_buffer_decommit().
    std::uint64_t decommit(std::uint64_t offset, std::uint64_t bytes,
                           const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        std::uint64_t gone = 0;
        detail::check(vmmgraph_elastic_buffer_decommit(handle(), offset, bytes, &given, &gone));
        return gone;
    }

    // Reaps pending unmaps whose fence is over, without waiting. Returns their bytes.
    std::uint64_t reap() {
        std::uint64_t gone = 0;
        detail::check(vmmgraph_elastic_buffer_reap(handle(), &gone));
        return gone;
    }

    // Makes later work of `stream` wait for earlier users of recommitted pages.
    void before(void* stream) const {
        detail::check(vmmgraph_elastic_buffer_before(handle(), stream));
    }

    // Limits physical memory in bytes; 0: only the device's limit. Nothing is taken away.
    void set_budget(std::uint64_t bytes) {
        detail::check(vmmgraph_elastic_buffer_set_budget(handle(), bytes));
    }

    // Returns the committed ranges in order, in whole pages.
    [[nodiscard]] std::vector<AddressRange> committed() const {
        return detail::read_items<AddressRange>(
            [&](AddressRange* ranges, std::size_t capacity, std::size_t* count) {
                return vmmgraph_elastic_buffer_committed(handle(), ranges, capacity, count);
            });
    }

    [[nodiscard]] ElasticStats stats() const {
        auto stats = detail::sized<ElasticStats>();
        detail::check(vmmgraph_elastic_buffer_stats(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_elastic_buffer_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_elastic_buffer_t, vmmgraph_elastic_buffer_destroy> handle_;
};

// Address layout of the planes of a KV cache.
enum class KvLayout : std::int32_t {
    // A range of addresses per plane, with consecutive blocks.
    by_plane = VMMGRAPH_KV_BY_PLANE,
    // One range of blocks, each with consecutive planes. Takes the fewest mappings.
    by_block = VMMGRAPH_KV_BY_BLOCK,
};

// Effect of an external limit.
enum class LimitChange : std::int32_t {
    // In force; no block beyond the limit has memory.
    applied = VMMGRAPH_LIMIT_APPLIED,
    // In force for new grants; blocks beyond the limit keep memory until released.
    deferred = VMMGRAPH_LIMIT_DEFERRED,
    // Ignored: a later revision is known.
    stale = VMMGRAPH_LIMIT_STALE,
    // Ignored: this revision had another value before.
    conflict = VMMGRAPH_LIMIT_CONFLICT,
};

// Options of a KV cache.
struct KvOptions {
    // Bytes of a block in each plane (a layer's keys, a layer's values); any number of planes.
    std::vector<std::uint64_t> planes;
    // Maximum number of blocks, for which addresses are reserved.
    std::uint64_t blocks_most = 0;
    KvLayout layout = KvLayout::by_plane;
    ElasticOptions memory = {};
};

// KV cache: planes of blocks over elastic memory. A block has memory in all planes or in none.
// Addresses never change, so captured graphs stay valid.
class KvCache {
public:
    // Reserves addresses, without memory. The cache keeps the device open.
    KvCache(const Device& device, const KvOptions& options) {
        detail::require_abi();
        const vmmgraph_elastic_options_t memory = detail::to_c(options.memory);
        auto given = detail::sized<vmmgraph_kv_options_t>();
        given.planes = options.planes.data();
        given.plane_count = options.planes.size();
        given.blocks_most = options.blocks_most;
        given.memory = &memory;
        given.layout = static_cast<std::int32_t>(options.layout);
        vmmgraph_kv_cache_t handle = nullptr;
        detail::check(vmmgraph_kv_cache_create(device.handle(), &given, &handle));
        handle_ = detail::Owned<vmmgraph_kv_cache_t, vmmgraph_kv_cache_destroy>(handle);
    }

    // Returns the place of a plane, backed or not.
    [[nodiscard]] KvPlace plane(std::size_t plane) const {
        auto place = detail::sized<KvPlace>();
        detail::check(vmmgraph_kv_cache_plane(handle(), plane, &place));
        return place;
    }

    // Backs the blocks below `blocks` in all planes, or in none; never shrinks. See
    // vmmgraph_kv_cache_grow_to().
    Committed grow_to(std::uint64_t blocks) {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_kv_cache_grow_to(handle(), blocks, &done));
        return done;
    }

    // As grow_to(), on a thread of the library. See vmmgraph_kv_cache_commit_async().
    [[nodiscard]] Pending grow_async(std::uint64_t blocks) { return commit_async({0, blocks}); }

    // Backs a range of blocks. See vmmgraph_kv_cache_commit().
    Committed commit(BlockRange blocks) {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_kv_cache_commit(handle(), blocks.first, blocks.end, &done));
        return done;
    }

    // As commit(), on a thread of the library.
    [[nodiscard]] Pending commit_async(BlockRange blocks) {
        vmmgraph_pending_t pending = nullptr;
        detail::check(vmmgraph_kv_cache_commit_async(handle(), blocks.first, blocks.end, &pending));
        return Pending(pending);
    }

    // Limits use to the blocks below `blocks`. Returns the number of busy blocks beyond. See
    // vmmgraph_kv_cache_shrink_to().
    std::uint64_t shrink_to(std::uint64_t blocks, const std::vector<BlockRange>& busy = {},
                            const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        std::uint64_t left = 0;
        detail::check(
            vmmgraph_kv_cache_shrink_to(handle(), blocks, busy.data(), busy.size(), &given, &left));
        return left;
    }

    // Releases blocks. See vmmgraph_kv_cache_release().
    void release(BlockRange blocks, const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        detail::check(vmmgraph_kv_cache_release(handle(), blocks.first, blocks.end, &given));
    }

    // Sets an external limit of blocks for later grants. Revisions increase; an older one is
    // ignored.
    LimitChange set_limit(std::uint64_t blocks, std::uint64_t revision) {
        std::int32_t change = 0;
        detail::check(vmmgraph_kv_cache_set_limit(handle(), blocks, revision, &change));
        return static_cast<LimitChange>(change);
    }

    // Returns the blocks with memory, in order.
    [[nodiscard]] std::vector<BlockRange> backed() const {
        return detail::read_items<BlockRange>(
            [&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
                return vmmgraph_kv_cache_backed(handle(), ranges, capacity, count);
            });
    }

    // Returns the blocks with memory beyond the usable ones, for release().
    [[nodiscard]] std::vector<BlockRange> beyond() const {
        return detail::read_items<BlockRange>(
            [&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
                return vmmgraph_kv_cache_beyond(handle(), ranges, capacity, count);
            });
    }

    // Reaps pending unmaps whose fence is over, without waiting. Returns their bytes.
    std::uint64_t reap() {
        std::uint64_t gone = 0;
        detail::check(vmmgraph_kv_cache_reap(handle(), &gone));
        return gone;
    }

    // Makes later work of `stream` wait for earlier users of recommitted blocks.
    void before(void* stream) const { detail::check(vmmgraph_kv_cache_before(handle(), stream)); }

    // Limits physical memory in bytes; 0: only the device's limit. Nothing is taken away.
    void set_budget(std::uint64_t bytes) {
        detail::check(vmmgraph_kv_cache_set_budget(handle(), bytes));
    }

    [[nodiscard]] KvStats stats() const {
        auto stats = detail::sized<KvStats>();
        detail::check(vmmgraph_kv_cache_stats(handle(), &stats));
        return stats;
    }

    // Returns the current statistics of the cache's memory.
    [[nodiscard]] ElasticStats memory() const {
        auto stats = detail::sized<ElasticStats>();
        detail::check(vmmgraph_kv_cache_memory(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_kv_cache_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_kv_cache_t, vmmgraph_kv_cache_destroy> handle_;
};

// Observer of a buffer or cache, for registrations which hold pages. Runs on any thread, with no
// lock of the library held; exceptions are lost. Calls which would wait for another thread's pages
// throw. May be destroyed at any time, also inside a call; calls on other threads are not waited
// for.
class ElasticObserver {
public:
    using Function = std::function<void(const Shown&)>;

    ElasticObserver(const ElasticBuffer& buffer, Function after_map, Function before_unmap)
        : functions_(Functions{std::move(after_map), std::move(before_unmap)}) {
        vmmgraph_elastic_observer_t handle = nullptr;
        detail::check(vmmgraph_elastic_buffer_observe(buffer.handle(), call<&Functions::after_map>,
                                                      call<&Functions::before_unmap>,
                                                      functions_.user(), &handle));
        handle_ =
            detail::Owned<vmmgraph_elastic_observer_t, vmmgraph_elastic_observer_destroy>(handle);
    }

    ElasticObserver(const KvCache& cache, Function after_map, Function before_unmap)
        : functions_(Functions{std::move(after_map), std::move(before_unmap)}) {
        vmmgraph_elastic_observer_t handle = nullptr;
        detail::check(vmmgraph_kv_cache_observe(cache.handle(), call<&Functions::after_map>,
                                                call<&Functions::before_unmap>, functions_.user(),
                                                &handle));
        handle_ =
            detail::Owned<vmmgraph_elastic_observer_t, vmmgraph_elastic_observer_destroy>(handle);
    }

private:
    struct Functions {
        Function after_map;
        Function before_unmap;
    };

    template <Function Functions::* Which>
    static void call(const vmmgraph_shown_t* shown, void* user) noexcept {
        try {
            if (const auto functions = detail::Callbacks<Functions>::of(user);
                functions && (*functions).*Which) {
                ((*functions).*Which)(*shown);
            }
        } catch (...) {
            // Exceptions must not unwind through C and Rust.
        }
    }

    detail::Callbacks<Functions> functions_;
    detail::Owned<vmmgraph_elastic_observer_t, vmmgraph_elastic_observer_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_ELASTIC_HPP
