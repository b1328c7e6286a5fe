// Regions for C++17: memory which can be paused and resumed at the same addresses, so captured
// graphs stay valid. Header-only over vmmgraph.h. Conventions: vmmgraph.hpp.
//
//   vmmgraph::Region weights(device, "weights", {vmmgraph::Policy::backup});
//   void* block = weights.allocate(bytes, stream);
//   // after the stream's work; other owners may use the memory then
//   vmmgraph::pause(device, {"weights", "kv"}, {{stream}});
//   // all or nothing
//   vmmgraph::resume(device, {"weights", "kv"}, std::chrono::seconds(5));

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

// Result of a pause.
using PauseReport = vmmgraph_pause_report_t;
// Result of a resume.
using ResumeReport = vmmgraph_resume_report_t;
// Statistics of a region.
using RegionStats = vmmgraph_region_stats_t;
// Statistics of a device's host pool.
using HostStats = vmmgraph_host_stats_t;
// Memory about to be unmapped or just mapped again; valid during a hook.
using Moved = vmmgraph_moved_t;

// Policy for the contents of paused memory.
enum class Policy : std::int32_t {
    // Block: the region's policy. Region: discard.
    inherit = VMMGRAPH_POLICY_DEFAULT,
    // Contents are lost; resumed memory is undefined.
    discard = VMMGRAPH_POLICY_DISCARD,
    // Resumed memory is zero.
    zero = VMMGRAPH_POLICY_ZERO,
    // Contents are copied to host memory and restored.
    backup = VMMGRAPH_POLICY_BACKUP,
    // The memory is not paused.
    keep = VMMGRAPH_POLICY_KEEP,
};

// Options of a region; 0 is the default of every number.
struct RegionOptions {
    // Default policy of its blocks.
    Policy policy = Policy::inherit;
    // Limit of physical memory in bytes; 0: only the device's limit.
    std::uint64_t budget_bytes = 0;
    // Bytes of every page, a multiple of the device's granularity, for regions which lend pages; 0:
    // as fits, up to 1 GiB.
    std::uint64_t page_bytes = 0;
    // Blocks are written once, before the first pause: later pauses copy only blocks reported by
    // mark_written().
    bool read_only = false;
    // Debugging aid: a pause copies anyway, and compares with the host's contents.
    bool verify_clean = false;
    // Parent account, Account::handle() of the same device; null: the device's account.
    vmmgraph_account_t account = nullptr;
};

// Work to finish before memory is paused.
struct PauseFence {
    // All work given to these streams so far; null is the default stream.
    std::vector<void*> streams = {};
    // Recorded events (CUevent or cudaEvent_t), needed until the call returns.
    std::vector<void*> events = {};
};

namespace detail {

// Converts a fence to C; the result points into `fence`.
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

// A pause went on past failures; see report(). Failed parts are unchanged, and the next pause
// retries.
class VMMGRAPH_API PauseIncomplete : public Error {
public:
    PauseIncomplete(const Error& error, const PauseReport& report)
        : Error(error), report_(report) {}

    [[nodiscard]] const PauseReport& report() const noexcept { return report_; }

private:
    PauseReport report_;
};

namespace detail {

// Runs a pause which fills `report`; tells a refused pause from one with failures.
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

// A region: blocks at fixed addresses, whose memory is paused and resumed by tag. Destruction ends
// all blocks, paused or not, after the work given to their streams.
class Region {
public:
    // Throws for page sizes the device cannot map. The region keeps the device open.
    Region(const Device& device, const std::string& tag, const RegionOptions& options = {}) {
        detail::require_abi();
        auto given = detail::sized<vmmgraph_region_options_t>();
        given.policy = static_cast<std::int32_t>(options.policy);
        given.flags = (options.read_only ? VMMGRAPH_REGION_READ_ONLY : 0) |
                      (options.verify_clean ? VMMGRAPH_REGION_VERIFY_CLEAN : 0);
        given.budget_bytes = options.budget_bytes;
        given.page_bytes = options.page_bytes;
        given.account = options.account;
        vmmgraph_region_t handle = nullptr;
        detail::check(vmmgraph_region_create(device.handle(), tag.c_str(), &given, &handle));
        handle_ = detail::Owned<vmmgraph_region_t, vmmgraph_region_destroy>(handle);
    }

    // Allocates a block, first used on `stream`. See vmmgraph_region_allocate().
    [[nodiscard]] void* allocate(std::size_t bytes, void* stream = nullptr,
                                 Policy policy = Policy::inherit) {
        void* block = nullptr;
        detail::check(vmmgraph_region_allocate(handle(), bytes, static_cast<std::int32_t>(policy),
                                               stream, &block));
        return block;
    }

    // Frees a block, paused or not. Its bytes are reused after the work given to its streams.
    void free(void* block) { detail::check(vmmgraph_region_free(handle(), block)); }

    // Records a user stream: the free and each pause wait for its work by then.
    void record_stream(void* block, void* stream) {
        detail::check(vmmgraph_region_record_stream(handle(), block, stream));
    }

    // Reports a write since the backup to a block, or to all (null). For read_only regions.
    void mark_written(void* block = nullptr) {
        detail::check(vmmgraph_region_mark_written(handle(), block));
    }

    // Copies `bytes` bytes of a paused block's backup, from `skip` on, without a resume.
    void get_backup(void* block, std::size_t skip, void* into, std::size_t bytes) const {
        detail::check(vmmgraph_region_get_backup(handle(), block, skip, into, bytes));
    }

    // Makes later work of `stream` wait for restored contents. Throws unless the region is
    // resident.
    void before(void* stream) const { detail::check(vmmgraph_region_before(handle(), stream)); }

    // Limits physical memory in bytes; 0: only the device's limit. Nothing is taken away.
    void set_budget(std::uint64_t bytes) {
        detail::check(vmmgraph_region_set_budget(handle(), bytes));
    }

    // As vmmgraph::pause, for this region.
    PauseReport pause(const PauseFence& fence = {}) {
        const vmmgraph_fence_t given = detail::to_c(fence);
        return detail::pause_with(
            [&](PauseReport* report) { return vmmgraph_region_pause(handle(), &given, report); });
    }

    // As vmmgraph::resume, for this region.
    ResumeReport resume(std::chrono::microseconds deadline = {}) {
        auto report = detail::sized<ResumeReport>();
        detail::check(vmmgraph_region_resume(handle(), detail::to_c(deadline), &report));
        return report;
    }

    [[nodiscard]] RegionStats stats() const {
        auto stats = detail::sized<RegionStats>();
        detail::check(vmmgraph_region_stats(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_region_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_region_t, vmmgraph_region_destroy> handle_;
};

// Pauses the regions and arenas with one of these tags (none: all). A tag without any is no error:
// see PauseReport::regions. Throws PauseIncomplete after partial failures, Error if refused. See
// vmmgraph_device_pause().
inline PauseReport pause(const Device& device, const std::vector<std::string>& tags = {},
                         const PauseFence& fence = {}) {
    const auto names = detail::to_c(tags);
    const vmmgraph_fence_t given = detail::to_c(fence);
    return detail::pause_with([&](PauseReport* report) {
        return vmmgraph_device_pause(device.handle(), names.data(), names.size(), &given, report);
    });
}

// Resumes the regions and arenas with one of these tags (none: all), all or nothing. Throws
// OutOfMemory after the deadline. See vmmgraph_device_resume().
inline ResumeReport resume(const Device& device, const std::vector<std::string>& tags = {},
                           std::chrono::microseconds deadline = {}) {
    const auto names = detail::to_c(tags);
    auto report = detail::sized<ResumeReport>();
    detail::check(vmmgraph_device_resume(device.handle(), names.data(), names.size(),
                                         detail::to_c(deadline), &report));
    return report;
}

// Returns an arena's memory to the driver until resume(). Throws as above, and while a space is
// open. See vmmgraph_arena_pause().
inline PauseReport pause(SharedVmmAllocator& arena, const PauseFence& fence = {}) {
    const vmmgraph_fence_t given = detail::to_c(fence);
    return detail::pause_with(
        [&](PauseReport* report) { return vmmgraph_arena_pause(arena.handle(), &given, report); });
}

// Resumes an arena at the same addresses. Throws as above; repeatable.
inline ResumeReport resume(SharedVmmAllocator& arena, std::chrono::microseconds deadline = {}) {
    auto report = detail::sized<ResumeReport>();
    detail::check(vmmgraph_arena_resume(arena.handle(), detail::to_c(deadline), &report));
    return report;
}

// Replaces large, mostly unused pages of an arena by small ones and returns the saved bytes. See
// vmmgraph_arena_shrink_to_fit().
inline std::uint64_t shrink_to_fit(SharedVmmAllocator& arena, const PauseFence& fence = {}) {
    const vmmgraph_fence_t given = detail::to_c(fence);
    std::uint64_t saved = 0;
    detail::check(vmmgraph_arena_shrink_to_fit(arena.handle(), &given, &saved));
    return saved;
}

// Pending restore of one tag's contents, after resume_async().
class Ready {
public:
    // Returns true if the contents are restored.
    [[nodiscard]] bool done() const {
        std::int32_t done = 0;
        detail::check(vmmgraph_ready_done(ready_.get(), &done));
        return done != 0;
    }
    // Makes later work of `stream` (a cudaStream_t) wait for the contents. Throws for a stream
    // under capture.
    void before(void* stream) const { detail::check(vmmgraph_ready_before(ready_.get(), stream)); }
    // Blocks until the contents are restored.
    void wait() const { detail::check(vmmgraph_ready_wait(ready_.get())); }

private:
    friend struct Resumed resume_async(const Device&, const std::vector<std::string>&,
                                       std::chrono::microseconds);
    explicit Ready(vmmgraph_ready_t ready) noexcept : ready_(ready) {}
    detail::Owned<vmmgraph_ready_t, vmmgraph_ready_destroy> ready_;
};

// Report of resume_async(), and the pending restore of each tag, in tag order.
struct Resumed {
    ResumeReport report;
    std::vector<Ready> ready;
};

// As resume(), but returns once all is mapped. Streams wait by Ready::before or Region::before.
inline Resumed resume_async(const Device& device, const std::vector<std::string>& tags = {},
                            std::chrono::microseconds deadline = {}) {
    const auto names = detail::to_c(tags);
    std::vector<vmmgraph_ready_t> handles(tags.size());
    Resumed resumed{detail::sized<ResumeReport>(), {}};
    resumed.ready.reserve(tags.size());
    detail::check(vmmgraph_device_resume_async(
        device.handle(), names.data(), names.size(), detail::to_c(deadline),
        handles.empty() ? nullptr : handles.data(), &resumed.report));
    for (auto* const handle : handles) {
        resumed.ready.push_back(Ready(handle));
    }
    return resumed;
}

// Makes the device's host pool hold at least `bytes`, to speed up a pause.
inline void prepare_backup(const Device& device, std::uint64_t bytes) {
    detail::check(vmmgraph_device_prepare_backup(device.handle(), bytes));
}

// Limits the device's host pool in bytes; 0: no limit.
inline void set_host_budget(const Device& device, std::uint64_t bytes) {
    detail::check(vmmgraph_device_set_host_budget(device.handle(), bytes));
}

// Returns unused host memory to the operating system; returns its bytes.
inline std::size_t trim_host(const Device& device) {
    std::uint64_t released = 0;
    detail::check(vmmgraph_device_trim_host(device.handle(), &released));
    return static_cast<std::size_t>(released);
}

// Returns the current statistics of the device's host pool.
[[nodiscard]] inline HostStats host_stats(const Device& device) {
    auto stats = detail::sized<HostStats>();
    detail::check(vmmgraph_device_host_stats(device.handle(), &stats));
    return stats;
}

// Hooks before the unmap and after the map of memory with a tag (empty: all). Exceptions are lost.
// May be destroyed at any time, also inside a hook; hooks on other threads are not waited for. See
// vmmgraph_device_add_pause_hooks().
class PauseHooks {
public:
    using Function = std::function<void(const Moved&)>;

    PauseHooks(const Device& device, const std::string& tag, Function before_unmap,
               Function after_map)
        : functions_(Functions{std::move(before_unmap), std::move(after_map)}) {
        vmmgraph_pause_hooks_t handle = nullptr;
        detail::check(vmmgraph_device_add_pause_hooks(
            device.handle(), tag.c_str(), call<&Functions::before_unmap>,
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
            if (const auto functions = detail::Callbacks<Functions>::of(user);
                functions && (*functions).*Which) {
                ((*functions).*Which)(*moved);
            }
        } catch (...) {
            // Exceptions must not unwind through C and Rust.
        }
    }

    detail::Callbacks<Functions> functions_;
    detail::Owned<vmmgraph_pause_hooks_t, vmmgraph_pause_hooks_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_REGION_HPP
