// VmmGraph's elastic memory for C++17: addresses for the most it may ever be, pages for what is used, so that captured graphs stay valid
// while memory comes and goes. Header-only over vmmgraph.h; conventions as in vmmgraph.hpp. Which blocks to use: blocks.hpp.
//
//   vmmgraph::KvCache cache(device, {std::vector<std::uint64_t>(72, 32 << 10), 100'000});   // 36 layers' keys and values: addresses only
//   cache.grow_to(2'000);                                   // or grow_async(), ahead of need, on a thread of the library
//   launch(cache.plane(0).address, cache.plane(0).stride_bytes);
//   cache.shrink_to(1'000, {{1'500, 1'502}}, {{stream}});   // these two stay until they are released; the rest goes behind the stream
//
// What is not committed has no memory: a device that uses it faults. Before the last owner of a buffer or a cache goes, everything is
// decommitted behind a fence, or the device is done with it.

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

// What a commit did.
using Committed = vmmgraph_committed_t;
// What elastic memory holds.
using ElasticStats = vmmgraph_elastic_stats_t;
// Elastic memory that has come or goes; valid while an observer runs.
using Shown = vmmgraph_shown_t;
// What a KV cache has.
using KvStats = vmmgraph_kv_stats_t;
// Where a plane of a KV cache lies.
using KvPlace = vmmgraph_kv_plane_t;
// Blocks from `first` to below `end`.
using BlockRange = vmmgraph_block_range_t;
// Device addresses.
using AddressRange = vmmgraph_range_t;

// How to make elastic memory. 0 is the default of every number.
struct ElasticOptions {
    // Its name in messages.
    std::string name;
    // Bytes of every page, a multiple of the device's granularity; 0: about a sixty-fourth of the longest range of addresses, 16 MiB at most.
    std::uint64_t page_bytes = 0;
    // The most bytes of physical memory it may hold; 0: no limit but the device's.
    std::uint64_t budget_bytes = 0;
    // Bytes that it is sure to get, out of the device's budget.
    std::uint64_t least_bytes = 0;
    // The account that its own is below: Account::handle() of the same device; null: the device's.
    vmmgraph_account_t account = nullptr;
};

namespace detail {

// Options as C wants them; they live as long as what they were made of.
[[nodiscard]] inline vmmgraph_elastic_options_t to_c(const ElasticOptions& options) noexcept {
    auto given = sized<vmmgraph_elastic_options_t>();
    given.name = options.name.c_str();
    given.page_bytes = options.page_bytes;
    given.budget_bytes = options.budget_bytes;
    given.least_bytes = options.least_bytes;
    given.account = options.account;
    return given;
}

// Items of a function that writes (items, capacity, count). There may be more at the second call.
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

// A commit under way on a thread of the library. Destroying it does not stop that.
class Pending {
public:
    explicit Pending(vmmgraph_pending_t handle) noexcept : handle_(handle) {}

    // Whether it is over.
    [[nodiscard]] bool done() const {
        std::int32_t over = 0;
        detail::check(vmmgraph_pending_done(handle(), &over));
        return over != 0;
    }

    // Blocks until it is over, for the driver's calls and never for work of the device; throws what the commit would have. May be called again.
    Committed wait() const {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_pending_wait(handle(), &done));
        return done;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_pending_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_pending_t, vmmgraph_pending_destroy> handle_;
};

// Addresses for the most that something may ever be, and pages for what is used of it.
class ElasticBuffer {
public:
    // `bytes` of addresses, without memory yet. Throws for a page size that the device cannot map. The buffer keeps the device open.
    ElasticBuffer(const Device& device, std::uint64_t bytes, const ElasticOptions& options = {}) {
        detail::require_abi();
        const vmmgraph_elastic_options_t given = detail::to_c(options);
        vmmgraph_elastic_buffer_t handle = nullptr;
        detail::check(vmmgraph_elastic_buffer_create(device.handle(), bytes, &given, &handle));
        handle_ = detail::Owned<vmmgraph_elastic_buffer_t, vmmgraph_elastic_buffer_destroy>(handle);
    }

    // The first address, which never changes.
    [[nodiscard]] void* base() const {
        void* base = nullptr;
        detail::check(vmmgraph_elastic_buffer_base(handle(), &base));
        return base;
    }

    // Makes `bytes` bytes from `offset` on usable: maps those of their pages, rounded outward, that are not there; all of them or none. Their
    // contents are anything, but pages that a decommit has not let go yet keep theirs: see before(). Throws OutOfMemory, with everything as
    // it was.
    Committed commit(std::uint64_t offset, std::uint64_t bytes) {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_elastic_buffer_commit(handle(), offset, bytes, &done));
        return done;
    }

    // The same, on a thread of the library. Nobody is asked to give memory up for it.
    [[nodiscard]] Pending commit_async(std::uint64_t offset, std::uint64_t bytes) {
        vmmgraph_pending_t pending = nullptr;
        detail::check(vmmgraph_elastic_buffer_commit_async(handle(), offset, bytes, &pending));
        return Pending(pending);
    }

    // Gives back the pages of `bytes` bytes from `offset` on, rounded inward, behind the fence; nobody waits for the device. Returns the
    // bytes of what was there. The fence's events may go when the call has returned.
    std::uint64_t decommit(std::uint64_t offset, std::uint64_t bytes, const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        std::uint64_t gone = 0;
        detail::check(vmmgraph_elastic_buffer_decommit(handle(), offset, bytes, &given, &gone));
        return gone;
    }

    // Unmaps what was decommitted and is no longer in use; its bytes. Does not wait.
    std::uint64_t settle() {
        std::uint64_t gone = 0;
        detail::check(vmmgraph_elastic_buffer_settle(handle(), &gone));
        return gone;
    }

    // Makes later work of a stream wait for what may still use pages that were committed again before they went.
    void before(void* stream) const { detail::check(vmmgraph_elastic_buffer_before(handle(), stream)); }

    // Limits the bytes of physical memory it may hold; 0: no limit but the device's. Nothing is taken away.
    void set_budget(std::uint64_t bytes) { detail::check(vmmgraph_elastic_buffer_set_budget(handle(), bytes)); }

    // The parts that are committed, in order, in whole pages.
    [[nodiscard]] std::vector<AddressRange> committed() const {
        return detail::read_items<AddressRange>([&](AddressRange* ranges, std::size_t capacity, std::size_t* count) {
            return vmmgraph_elastic_buffer_committed(handle(), ranges, capacity, count);
        });
    }

    // What it holds now.
    [[nodiscard]] ElasticStats stats() const {
        auto stats = detail::sized<ElasticStats>();
        detail::check(vmmgraph_elastic_buffer_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_elastic_buffer_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_elastic_buffer_t, vmmgraph_elastic_buffer_destroy> handle_;
};

// How the planes of a KV cache lie.
enum class KvLayout : std::int32_t {
    // Each plane has addresses of its own, its blocks behind one another.
    by_plane = VMMGRAPH_KV_BY_PLANE,
    // One range of addresses, block after block, in each the planes behind one another: a range of blocks takes the fewest mappings.
    by_block = VMMGRAPH_KV_BY_BLOCK,
};

// What became of a limit that was set from outside.
enum class LimitChange : std::int32_t {
    // It holds, and no block beyond it has memory.
    applied = VMMGRAPH_LIMIT_APPLIED,
    // It holds for all that is granted from now on; blocks beyond it have memory until they are released.
    deferred = VMMGRAPH_LIMIT_DEFERRED,
    // A later revision is known: ignored.
    stale = VMMGRAPH_LIMIT_STALE,
    // This revision said something else before: ignored.
    conflict = VMMGRAPH_LIMIT_CONFLICT,
};

// How to make a KV cache.
struct KvOptions {
    // Bytes of a block in each plane: a layer's keys, a layer's values. Any number of planes, each of any bytes.
    std::vector<std::uint64_t> planes;
    // The most blocks it may ever have: addresses for them are reserved.
    std::uint64_t blocks_most = 0;
    KvLayout layout = KvLayout::by_plane;
    ElasticOptions memory = {};
};

// Planes of blocks over elastic memory. All planes of a block have memory, or none. Addresses never change, so graphs captured over them
// stay valid however it grows and shrinks.
class KvCache {
public:
    // Without memory yet. Throws for no plane, no block, and more than can be addressed. The cache keeps the device open.
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

    // Where a plane lies, backed or not.
    [[nodiscard]] KvPlace plane(std::size_t plane) const {
        auto place = detail::sized<KvPlace>();
        detail::check(vmmgraph_kv_cache_plane(handle(), plane, &place));
        return place;
    }

    // Backs the blocks below `blocks` in all planes, or in none. What is backed stays as it is; fewer than it has: nothing is taken away.
    // Throws OutOfMemory, also beyond the limit, with everything as it was.
    Committed grow_to(std::uint64_t blocks) {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_kv_cache_grow_to(handle(), blocks, &done));
        return done;
    }

    // The same, on a thread of the library. Nobody is asked to give memory up for it. Its order with other calls is that of its beginning
    // there; but what a shrink_to() took away meanwhile it does not bring back.
    [[nodiscard]] Pending grow_async(std::uint64_t blocks) { return commit_async({0, blocks}); }

    // Backs a range of blocks, as grow_to. Contents of what comes are anything, but blocks that were released and had not gone yet keep
    // theirs: see before().
    Committed commit(BlockRange blocks) {
        auto done = detail::sized<Committed>();
        detail::check(vmmgraph_kv_cache_commit(handle(), blocks.first, blocks.end, &done));
        return done;
    }

    // The same, on a thread of the library.
    [[nodiscard]] Pending commit_async(BlockRange blocks) {
        vmmgraph_pending_t pending = nullptr;
        detail::check(vmmgraph_kv_cache_commit_async(handle(), blocks.first, blocks.end, &pending));
        return Pending(pending);
    }

    // Lets the cache be used with so many blocks at most, from now on. Blocks beyond that which are not `busy` go behind the fence; the busy
    // ones keep their memory until release(). How many those are.
    std::uint64_t shrink_to(std::uint64_t blocks, const std::vector<BlockRange>& busy = {}, const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        std::uint64_t left = 0;
        detail::check(vmmgraph_kv_cache_shrink_to(handle(), blocks, busy.data(), busy.size(), &given, &left));
        return left;
    }

    // Blocks are not used any more: their pages go behind the fence once no other block on them is backed. Does not wait.
    void release(BlockRange blocks, const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        detail::check(vmmgraph_kv_cache_release(handle(), blocks.first, blocks.end, &given));
    }

    // Sets the most blocks from outside: nothing beyond is granted from now on. Revisions grow; one that is not the latest is ignored.
    LimitChange set_limit(std::uint64_t blocks, std::uint64_t revision) {
        std::int32_t change = 0;
        detail::check(vmmgraph_kv_cache_set_limit(handle(), blocks, revision, &change));
        return static_cast<LimitChange>(change);
    }

    // Blocks that have memory, in order.
    [[nodiscard]] std::vector<BlockRange> backed() const {
        return detail::read_items<BlockRange>([&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
            return vmmgraph_kv_cache_backed(handle(), ranges, capacity, count);
        });
    }

    // Blocks that have memory beyond what the cache may be used with: they are to be released.
    [[nodiscard]] std::vector<BlockRange> beyond() const {
        return detail::read_items<BlockRange>([&](BlockRange* ranges, std::size_t capacity, std::size_t* count) {
            return vmmgraph_kv_cache_beyond(handle(), ranges, capacity, count);
        });
    }

    // Unmaps what was released and is no longer in use; its bytes. Does not wait.
    std::uint64_t settle() {
        std::uint64_t gone = 0;
        detail::check(vmmgraph_kv_cache_settle(handle(), &gone));
        return gone;
    }

    // Makes later work of a stream wait for what may still use blocks that were backed again before they went.
    void before(void* stream) const { detail::check(vmmgraph_kv_cache_before(handle(), stream)); }

    // Limits the bytes of physical memory it may hold; 0: no limit but the device's. Nothing is taken away.
    void set_budget(std::uint64_t bytes) { detail::check(vmmgraph_kv_cache_set_budget(handle(), bytes)); }

    // What it has now.
    [[nodiscard]] KvStats stats() const {
        auto stats = detail::sized<KvStats>();
        detail::check(vmmgraph_kv_cache_stats(handle(), &stats));
        return stats;
    }

    // What its memory holds now.
    [[nodiscard]] ElasticStats memory() const {
        auto stats = detail::sized<ElasticStats>();
        detail::check(vmmgraph_kv_cache_memory(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_kv_cache_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_kv_cache_t, vmmgraph_kv_cache_destroy> handle_;
};

// While it lives, its functions are called when memory of a buffer or a cache comes, before the commit returns, and before it is unmapped.
// For registrations that hold pages. They may be called from any thread, with no lock of the library held; what they throw is lost, and
// what would wait there for pages that another thread moves throws. It may end at any time, also within one of them; one that is under way on
// another thread then is not waited for.
class ElasticObserver {
public:
    using Function = std::function<void(const Shown&)>;

    ElasticObserver(const ElasticBuffer& buffer, Function after_map, Function before_unmap)
        : functions_(Functions{std::move(after_map), std::move(before_unmap)}) {
        vmmgraph_elastic_observer_t handle = nullptr;
        detail::check(vmmgraph_elastic_buffer_observe(buffer.handle(), call<&Functions::after_map>, call<&Functions::before_unmap>,
                                                      functions_.user(), &handle));
        handle_ = detail::Owned<vmmgraph_elastic_observer_t, vmmgraph_elastic_observer_destroy>(handle);
    }

    ElasticObserver(const KvCache& cache, Function after_map, Function before_unmap)
        : functions_(Functions{std::move(after_map), std::move(before_unmap)}) {
        vmmgraph_elastic_observer_t handle = nullptr;
        detail::check(vmmgraph_kv_cache_observe(cache.handle(), call<&Functions::after_map>, call<&Functions::before_unmap>,
                                                functions_.user(), &handle));
        handle_ = detail::Owned<vmmgraph_elastic_observer_t, vmmgraph_elastic_observer_destroy>(handle);
    }

private:
    struct Functions {
        Function after_map;
        Function before_unmap;
    };

    template <Function Functions::* Which>
    static void call(const vmmgraph_shown_t* shown, void* user) noexcept {
        try {
            if (const auto functions = detail::Callbacks<Functions>::of(user); functions && (*functions).*Which) {
                ((*functions).*Which)(*shown);
            }
        } catch (...) {
            // C and Rust are in between: nothing may be thrown through them.
        }
    }

    detail::Callbacks<Functions> functions_;
    detail::Owned<vmmgraph_elastic_observer_t, vmmgraph_elastic_observer_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_ELASTIC_HPP
