// VmmGraph's regions for C++17: memory that steps aside and comes back at the same addresses, so that captured graphs stay valid.
// Header-only over vmmgraph.h; conventions as in vmmgraph.hpp.
//
//   vmmgraph::Region weights(device, "weights", {vmmgraph::Policy::backup});
//   void* block = weights.allocate(bytes, stream);
//   vmmgraph::pause(device, {"weights", "kv"}, {{stream}});              // behind the stream's work; the memory is others' now
//   vmmgraph::resume(device, {"weights", "kv"}, std::chrono::seconds(5));  // all of it or none

#ifndef VMMGRAPH_REGION_HPP
#define VMMGRAPH_REGION_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "callback.hpp"
#include "vmmgraph.hpp"

namespace vmmgraph {

// What a pause did.
using PauseReport = vmmgraph_pause_report_t;
// What a resume did.
using ResumeReport = vmmgraph_resume_report_t;
// What a region holds.
using RegionStats = vmmgraph_region_stats_t;
// What the host pool of a device holds.
using HostStats = vmmgraph_host_stats_t;
// Memory that goes or has come; valid while a hook runs.
using Moved = vmmgraph_moved_t;

// What becomes of memory when it steps aside.
enum class Policy : std::int32_t {
    // For a block: as its region. For a region: discard.
    inherit = VMMGRAPH_POLICY_DEFAULT,
    // The contents are lost: what comes back holds anything.
    discard = VMMGRAPH_POLICY_DISCARD,
    // What comes back is zero.
    zero = VMMGRAPH_POLICY_ZERO,
    // The contents go to host memory and come back.
    backup = VMMGRAPH_POLICY_BACKUP,
    // The memory stays.
    keep = VMMGRAPH_POLICY_KEEP,
};

// How to make a region. 0 is the default of every number.
struct RegionOptions {
    // What becomes of its blocks, but for those that say otherwise.
    Policy policy = Policy::inherit;
    // The most bytes of physical memory it may hold; 0: no limit but the device's.
    std::uint64_t budget_bytes = 0;
    // Bytes of every page, a multiple of the device's granularity, for regions whose pages others shall borrow; 0: as fits, up to 1 GiB.
    std::uint64_t page_bytes = 0;
    // Its blocks are written once, before the first pause: later pauses copy nothing but what mark_written() names.
    bool read_only = false;
    // For finding bugs: a pause copies all the same, and compares with what the host has.
    bool verify_clean = false;
    // The account that its own is below: Account::handle() of the same device; null: the device's.
    vmmgraph_account_t account = nullptr;
};

// What must be over before memory steps aside.
struct PauseFence {
    // Everything given to these so far; null is the default stream.
    std::vector<void*> streams;
    // Events (CUevent or cudaEvent_t) that were recorded and stay until the call returns.
    std::vector<void*> events;
};

namespace detail {

// A fence as C wants it; lives as long as what it was made of.
[[nodiscard]] inline vmmgraph_fence_t to_c(const PauseFence& fence) noexcept {
    auto given = sized<vmmgraph_fence_t>();
    given.streams = fence.streams.data();
    given.stream_count = fence.streams.size();
    given.events = fence.events.data();
    given.event_count = fence.events.size();
    return given;
}

[[nodiscard]] inline std::vector<const char*> to_c(const std::vector<std::string>& tags) {
    std::vector<const char*> given;
    given.reserve(tags.size());
    for (const std::string& tag : tags) {
        given.push_back(tag.c_str());
    }
    return given;
}

[[nodiscard]] inline std::uint64_t to_c(std::chrono::microseconds time) noexcept {
    return time.count() < 0 ? 0 : static_cast<std::uint64_t>(time.count());
}

}  // namespace detail

// A pause could not take everything away: report() says what it did. What failed stays as it was; the next pause tries it again.
class VMMGRAPH_API PauseIncomplete : public Error {
public:
    PauseIncomplete(const Error& error, const PauseReport& report) : Error(error), report_(report) {}

    [[nodiscard]] const PauseReport& report() const noexcept { return report_; }

private:
    PauseReport report_;
};

namespace detail {

// Runs a pause that writes `report`, and tells a refused one from one that went on past failures.
template <class Pause>
[[nodiscard]] PauseReport pause_with(Pause&& run) {
    auto report = sized<PauseReport>();
    const vmmgraph_status_t status = run(&report);
    if (status == VMMGRAPH_OK) {
        return report;
    }
    try {
        fail(status);
    } catch (const Error& error) {
        if (report.failures == 0) {
            throw;
        }
        throw PauseIncomplete(error, report);
    }
}

}  // namespace detail

// Memory with a tag that can step aside: blocks at fixed addresses, whose pages go and come. Destroying it ends its blocks, paused or
// not, behind what was given to their streams.
class Region {
public:
    // Throws for a page size that the device cannot map. The region keeps the device open.
    Region(const Device& device, const std::string& tag, const RegionOptions& options = {}) {
        detail::require_abi();
        auto given = detail::sized<vmmgraph_region_options_t>();
        given.policy = static_cast<std::int32_t>(options.policy);
        given.flags = (options.read_only ? VMMGRAPH_REGION_READ_ONLY : 0) | (options.verify_clean ? VMMGRAPH_REGION_VERIFY_CLEAN : 0);
        given.budget_bytes = options.budget_bytes;
        given.page_bytes = options.page_bytes;
        given.account = options.account;
        vmmgraph_region_t handle = nullptr;
        detail::check(vmmgraph_region_create(device.handle(), tag.c_str(), &given, &handle));
        handle_ = detail::Owned<vmmgraph_region_t, vmmgraph_region_destroy>(handle);
    }

    // Allocates a block, used on `stream` first; the stream exists until the block is freed. Throws while the region is paused. Where contents of blocks
    // that are gone still come back (resume_async()), the stream's later work waits for them, or the call if the stream is being captured.
    [[nodiscard]] void* allocate(std::size_t bytes, void* stream = nullptr, Policy policy = Policy::inherit) {
        void* block = nullptr;
        detail::check(vmmgraph_region_allocate(handle(), bytes, static_cast<std::int32_t>(policy), stream, &block));
        return block;
    }

    // Frees a block, also while the region is paused. Its bytes are another's behind what its streams were given.
    void free(void* block) { detail::check(vmmgraph_region_free(handle(), block)); }

    // Notes that a stream uses a block: a free and a pause wait for what it was given by then.
    void record_stream(void* block, void* stream) { detail::check(vmmgraph_region_record_stream(handle(), block, stream)); }

    // Says that a block was written since its backup, or (null) that all were. For regions that are read_only.
    void mark_written(void* block = nullptr) { detail::check(vmmgraph_region_mark_written(handle(), block)); }

    // Copies `bytes` bytes of a paused block's backup, from `skip` on, without resuming.
    void get_backup(void* block, std::size_t skip, void* into, std::size_t bytes) const {
        detail::check(vmmgraph_region_get_backup(handle(), block, skip, into, bytes));
    }

    // Makes later work of a stream wait for contents that resume_async() still copies. Throws unless the region is resident.
    void before(void* stream) const { detail::check(vmmgraph_region_before(handle(), stream)); }

    // Limits the bytes of physical memory it may hold; 0: no limit but the device's. Nothing is taken away.
    void set_budget(std::uint64_t bytes) { detail::check(vmmgraph_region_set_budget(handle(), bytes)); }

    // As vmmgraph::pause, for this region.
    PauseReport pause(const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        return detail::pause_with([&](PauseReport* report) { return vmmgraph_region_pause(handle(), &given, report); });
    }

    // As vmmgraph::resume, for this region.
    ResumeReport resume(std::chrono::microseconds deadline = {}) {
        auto report = detail::sized<ResumeReport>();
        detail::check(vmmgraph_region_resume(handle(), detail::to_c(deadline), &report));
        return report;
    }

    // What it holds now.
    [[nodiscard]] RegionStats stats() const {
        auto stats = detail::sized<RegionStats>();
        detail::check(vmmgraph_region_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_region_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_region_t, vmmgraph_region_destroy> handle_;
};

// Pauses the regions and arenas with one of these tags; none: all. Waits for the fence and for what was given to the streams noted for
// their blocks; then pages go as their policy says, and an arena's as below. Throws PauseIncomplete if something failed, after the rest; Error if it was refused, as
// in a capture. What is paused already stays so.
inline PauseReport pause(const Device& device, const std::vector<std::string>& tags = {}, const PauseFence& fence = {}) {
    const auto names = detail::to_c(tags);
    const vmmgraph_fence_t given = detail::to_c(fence);
    return detail::pause_with(
        [&](PauseReport* report) { return vmmgraph_device_pause(device.handle(), names.data(), names.size(), &given, report); });
}

// Resumes the regions and arenas with one of these tags, all or none; no tag: all. Returns when the contents are there. While there is no memory it
// asks again until the deadline. Throws OutOfMemory then: everything is paused as before, the host has the contents, and the call can be
// repeated.
inline ResumeReport resume(const Device& device, const std::vector<std::string>& tags = {}, std::chrono::microseconds deadline = {}) {
    const auto names = detail::to_c(tags);
    auto report = detail::sized<ResumeReport>();
    detail::check(vmmgraph_device_resume(device.handle(), names.data(), names.size(), detail::to_c(deadline), &report));
    return report;
}

// Gives all of an arena's memory back to the driver; addresses stay, and graphs over them stay instantiated. Bytes of retained and kept
// blocks go to the host and come back with resume(); what lies on shared pages is lost, as it is between replays. Waits for the fence,
// the arena's replays and what was given to the streams noted for blocks. Until then replays and new spaces throw; blocks may be freed,
// spaces and the arena destroyed. Throws as above, and while a space is open.
inline PauseReport pause(SharedVmmAllocator& arena, const PauseFence& fence = {}) {
    const vmmgraph_fence_t given = detail::to_c(fence);
    return detail::pause_with([&](PauseReport* report) { return vmmgraph_arena_pause(arena.handle(), &given, report); });
}

// Brings an arena's memory back, to the same addresses; throws as above, and can be repeated then.
inline ResumeReport resume(SharedVmmAllocator& arena, std::chrono::microseconds deadline = {}) {
    auto report = detail::sized<ResumeReport>();
    detail::check(vmmgraph_arena_resume(arena.handle(), detail::to_c(deadline), &report));
    return report;
}

// Replaces large pages of which an arena's graphs use little by small ones; how many bytes fewer it holds. For arenas whose page size nobody chose
// (ArenaOptions::expected_bytes), once when all captures are made. See vmmgraph_arena_shrink_to_fit. Throws as pause() does.
inline std::uint64_t shrink_to_fit(SharedVmmAllocator& arena, const PauseFence& fence = {}) {
    const vmmgraph_fence_t given = detail::to_c(fence);
    std::uint64_t saved = 0;
    detail::check(vmmgraph_arena_shrink_to_fit(arena.handle(), &given, &saved));
    return saved;
}

// The contents of one tag, on their way after resume_async().
class Ready {
public:
    // Whether they are there.
    [[nodiscard]] bool done() const {
        std::int32_t done = 0;
        detail::check(vmmgraph_ready_done(ready_.get(), &done));
        return done != 0;
    }
    // Makes later work of a stream (a cudaStream_t) wait for them. Does not block. Throws for a stream under capture.
    void before(void* stream) const { detail::check(vmmgraph_ready_before(ready_.get(), stream)); }
    // Blocks until they are there.
    void wait() const { detail::check(vmmgraph_ready_wait(ready_.get())); }

private:
    friend struct Resumed resume_async(const Device&, const std::vector<std::string>&, std::chrono::microseconds);
    explicit Ready(vmmgraph_ready_t ready) noexcept : ready_(ready) {}
    detail::Owned<vmmgraph_ready_t, vmmgraph_ready_destroy> ready_;
};

// What resume_async() did, and the contents of each tag, in the order of the tags.
struct Resumed {
    ResumeReport report;
    std::vector<Ready> ready;
};

// As resume(), but returns as soon as everything is mapped. The contents are copied in the order of the tags; a stream that needs some
// waits for them by Ready::before or Region::before.
inline Resumed resume_async(const Device& device, const std::vector<std::string>& tags = {}, std::chrono::microseconds deadline = {}) {
    const auto names = detail::to_c(tags);
    std::vector<vmmgraph_ready_t> handles(tags.size());
    Resumed resumed{detail::sized<ResumeReport>(), {}};
    resumed.ready.reserve(tags.size());
    detail::check(vmmgraph_device_resume_async(device.handle(), names.data(), names.size(), detail::to_c(deadline),
                                               handles.empty() ? nullptr : handles.data(), &resumed.report));
    for (auto* const handle : handles) {
        resumed.ready.push_back(Ready(handle));
    }
    return resumed;
}

// Makes sure that the device's host pool holds `bytes` at least, so that a pause need not map and register memory.
inline void prepare_backup(const Device& device, std::uint64_t bytes) {
    detail::check(vmmgraph_device_prepare_backup(device.handle(), bytes));
}

// Limits the bytes that the device's host pool may hold; 0: no limit. Nothing is taken away.
inline void set_host_budget(const Device& device, std::uint64_t bytes) {
    detail::check(vmmgraph_device_set_host_budget(device.handle(), bytes));
}

// Gives back to the operating system what no contents are in; its bytes.
inline std::size_t trim_host(const Device& device) {
    std::uint64_t released = 0;
    detail::check(vmmgraph_device_trim_host(device.handle(), &released));
    return static_cast<std::size_t>(released);
}

// What the device's host pool holds now.
[[nodiscard]] inline HostStats host_stats(const Device& device) {
    auto stats = detail::sized<HostStats>();
    detail::check(vmmgraph_device_host_stats(device.handle(), &stats));
    return stats;
}

// While it lives, its functions are called when memory with a tag goes and comes; an empty tag: all memory. For registrations that hold
// pages. The functions may be called from any thread that pauses or resumes, with no lock of the library held; what they throw is lost.
// It may end at any time, also within one of them; one that is under way on another thread then is not waited for.
class PauseHooks {
public:
    using Function = std::function<void(const Moved&)>;

    PauseHooks(const Device& device, const std::string& tag, Function before_unmap, Function after_map)
        : functions_(Functions{std::move(before_unmap), std::move(after_map)}) {
        vmmgraph_pause_hooks_t handle = nullptr;
        detail::check(vmmgraph_device_add_pause_hooks(device.handle(), tag.c_str(), call<&Functions::before_unmap>,
                                                      call<&Functions::after_map>, functions_.user(), &handle));
        handle_ = detail::Owned<vmmgraph_pause_hooks_t, vmmgraph_pause_hooks_destroy>(handle);
    }

private:
    struct Functions {
        Function before_unmap;
        Function after_map;
    };

    template <Function Functions::* Which>
    static void call(const vmmgraph_moved_t* moved, void* user) noexcept {
        try {
            if (const auto functions = detail::Callbacks<Functions>::of(user); functions && (*functions).*Which) {
                ((*functions).*Which)(*moved);
            }
        } catch (...) {
            // C and Rust are in between: nothing may be thrown through them.
        }
    }

    detail::Callbacks<Functions> functions_;
    detail::Owned<vmmgraph_pause_hooks_t, vmmgraph_pause_hooks_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_REGION_HPP
