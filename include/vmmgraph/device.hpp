// A device for C++17: its driver and its page pool. Conventions as in vmmgraph.hpp.

#ifndef VMMGRAPH_DEVICE_HPP
#define VMMGRAPH_DEVICE_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "base.hpp"
#include "callback.hpp"

namespace vmmgraph {

// What does not change about a device: driver, granularity, total bytes, name.
using DeviceInfo = vmmgraph_device_info_t;
// Exact counts of a device's page pool.
using DeviceStats = vmmgraph_device_stats_t;

// Which driver a device is opened with.
enum class DriverChoice : std::int32_t {
    // By the environment variable VMMGRAPH_DRIVER (cuda, hip, ascend, mlu or host) if set; else the first of these with a usable device.
    automatic = VMMGRAPH_DRIVER_AUTO,
    // CUDA, or an Error that says what is missing.
    cuda = VMMGRAPH_DRIVER_CUDA,
    // This machine's memory; addresses are ordinary pointers of this process.
    host = VMMGRAPH_DRIVER_HOST,
    // HIP on AMD GPUs, or an Error that says what is missing. Never run on a device.
    hip = VMMGRAPH_DRIVER_HIP,
    // Ascend NPUs, or an Error that says what is missing. Never run on a device.
    ascend = VMMGRAPH_DRIVER_ASCEND,
    // Cambricon MLUs, or an Error that says what is missing. Never run on a device.
    mlu = VMMGRAPH_DRIVER_MLU,
};

// What other processes can be given a device's pages by.
enum class Sharing : std::int32_t {
    // By nothing: pages stay in this process.
    none = VMMGRAPH_SHARING_NONE,
    // By POSIX file descriptors, one a page. Not on HIP, Ascend and MLU.
    fd = VMMGRAPH_SHARING_FD,
    // By those, and by handles of the fabric, which reach other hosts, where the device makes one when it is opened: DeviceInfo says so.
    fabric = VMMGRAPH_SHARING_FABRIC,
};

// How to open a device. 0 is the default of every number.
struct DeviceOptions {
    DriverChoice driver = DriverChoice::automatic;
    // The device's number with that driver.
    int device = 0;
    // Bytes of physical memory the device's page pool may hold; 0: no limit.
    std::uint64_t budget_bytes = 0;
    // Host driver: mapping granularity in bytes, a power of two; 0: 2 MiB.
    std::uint64_t host_granularity_bytes = 0;
    // Host driver: bytes of the device; 0: this machine's memory.
    std::uint64_t host_memory_bytes = 0;
    // Of all its pages, for good. Opening throws where it cannot be, and if the device is open without it. With none it is fd all the same where that can be
    // and NCCL_GRAPH_REGISTER=0 is in the environment, which promises that NCCL takes no hold of captured buffers: DeviceInfo says so.
    Sharing sharing = Sharing::none;
    // Whether network cards may read and write its pages, which makes every map dearer. Throws as sharing does.
    bool rdma = false;
    // Other devices that may read and write all its pages, added up: 1 << n for device n, below 64; at once if the device is open. Every map costs more for
    // each. Throws for one without peer access.
    std::uint64_t peers = 0;
};

// A device: its driver and its page pool. Opening one again gives another handle to the same pool; the device closes when its
// handles and arenas are gone.
class Device {
public:
    // Opens a device. Throws if the driver lacks it, or if it is open with another host geometry.
    [[nodiscard]] static Device open(const DeviceOptions& options = {}) {
        detail::require_abi();
        auto given = detail::sized<vmmgraph_device_options_t>();
        given.driver = static_cast<std::int32_t>(options.driver);
        given.device = options.device;
        given.budget_bytes = options.budget_bytes;
        given.host_granularity_bytes = options.host_granularity_bytes;
        given.host_memory_bytes = options.host_memory_bytes;
        given.sharing = static_cast<std::int32_t>(options.sharing);
        given.rdma = options.rdma ? 1 : 0;
        given.peers = options.peers;
        vmmgraph_device_t handle = nullptr;
        detail::check(vmmgraph_device_open(&given, &handle));
        return Device(handle);
    }

    // What does not change about the device.
    [[nodiscard]] DeviceInfo info() const {
        auto info = detail::sized<DeviceInfo>();
        detail::check(vmmgraph_device_info(handle(), &info));
        return info;
    }

    // The counts of the page pool as they are now; every arena of the device draws from it.
    [[nodiscard]] DeviceStats stats() const {
        auto stats = detail::sized<DeviceStats>();
        detail::check(vmmgraph_device_stats(handle(), &stats));
        return stats;
    }

    // Limits the bytes of physical memory the page pool may hold; 0: no limit. Nothing is taken away.
    void set_budget(std::uint64_t bytes) { detail::check(vmmgraph_device_set_budget(handle(), bytes)); }

    // Gives the device's free pages back to the driver, after waiting for what the device still uses of spaces and blocks that are gone;
    // their bytes. Tries again what the driver refused to take back earlier.
    std::size_t trim() {
        std::uint64_t released = 0;
        detail::check(vmmgraph_device_trim(handle(), &released));
        return static_cast<std::size_t>(released);
    }

    // Before a stream is captured or destroyed, by whomever: arenas whose last replay was there are marked behind it, so that other threads may
    // replay in them meanwhile. Throws the first error, after all were tried.
    void mark(void* stream) { detail::check(vmmgraph_device_mark(handle(), stream)); }

    // A capture begins on this device for which no space was opened, by whomever: its graph may read blocks of spaces that are sealed already.
    // What is freed from now on is there for it as for the graphs of spaces captured meanwhile. Where the blocks route into libtorch is
    // installed, captures through libtorch say so by themselves, torch's own too.
    void note_capture() { detail::check(vmmgraph_device_note_capture(handle())); }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_device_t handle() const noexcept { return handle_.get(); }

private:
    explicit Device(vmmgraph_device_t handle) noexcept : handle_(handle) {}

    detail::Owned<vmmgraph_device_t, vmmgraph_device_close> handle_;
};

// What an account may and is sure to have, in bytes.
struct AccountLimits {
    // The most that may count toward it; 0: no limit but those above.
    std::uint64_t budget_bytes = 0;
    // What it is sure to get: counts toward those above whether it is used or not. Guaranteed only below one that has a budget.
    std::uint64_t least_bytes = 0;
};

using AccountStats = vmmgraph_account_stats_t;

// A budget in the device's tree, for a tenant or a model: what the arenas, regions, elastic memory and rings hold that were made with its handle in
// their options counts toward it and toward those above it. They keep it, with its limits, when this is gone. It keeps the device open.
class Account {
public:
    // Below the device. `label` names it in messages; others may have the same. Throws OutOfMemory if there is no room for its least.
    Account(const Device& device, const std::string& label, const AccountLimits& limits = {}) : Account(device, label, nullptr, limits) {}
    // Below another account of the device.
    Account(const Device& device, const std::string& label, const Account& above, const AccountLimits& limits = {})
        : Account(device, label, above.live(), limits) {}

    // Nothing is taken away: with less than is held, every page that is missing is refused until enough is given back.
    void set_limits(const AccountLimits& limits) {
        detail::check(vmmgraph_account_set_limits(handle(), limits.budget_bytes, limits.least_bytes));
    }

    // What counts toward it now.
    [[nodiscard]] AccountStats stats() const {
        auto stats = detail::sized<AccountStats>();
        detail::check(vmmgraph_account_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_account_t handle() const noexcept { return handle_.get(); }

private:
    Account(const Device& device, const std::string& label, vmmgraph_account_t above, const AccountLimits& limits) {
        auto given = detail::sized<vmmgraph_account_options_t>();
        given.above = above;
        given.budget_bytes = limits.budget_bytes;
        given.least_bytes = limits.least_bytes;
        vmmgraph_account_t handle = nullptr;
        detail::check(vmmgraph_account_create(device.handle(), label.c_str(), &given, &handle));
        handle_ = detail::Owned<vmmgraph_account_t, vmmgraph_account_destroy>(handle);
    }

    // The handle; throws for one that was moved from, as null would be the device's account.
    [[nodiscard]] vmmgraph_account_t live() const {
        static_cast<void>(stats());
        return handle();
    }

    detail::Owned<vmmgraph_account_t, vmmgraph_account_destroy> handle_;
};

// A function that is asked for memory when a device or its budget is short, before a call fails, as long as this lives; not where the budget of an
// account below it, an arena's or a buffer's, is, since only memory of that would help. With an account: also where that is short, or one above it. It is told how many bytes are missing and returns how many it gave back; what it throws counts
// as 0. It is called from whichever thread runs short, by several at once, with no lock of the library's held, also while that thread captures (so it
// must not synchronize there), and may call everything. Those that cost least are asked first: 0 is what the library's regions and elastic memory do
// not use any more, 1 what is kept for eager work.
class Reclaimer {
public:
    using Function = std::function<std::uint64_t(std::uint64_t bytes)>;

    // Throws if the device's handle is gone. A null function gives nothing.
    Reclaimer(const Device& device, Function reclaim, std::uint64_t cost)
        : Reclaimer(vmmgraph_device_add_reclaimer, device.handle(), std::move(reclaim), cost) {}
    // For memory that counts toward an account.
    Reclaimer(const Account& account, Function reclaim, std::uint64_t cost)
        : Reclaimer(vmmgraph_account_add_reclaimer, account.handle(), std::move(reclaim), cost) {}

private:
    template <class Add, class Handle>
    Reclaimer(Add add, Handle of, Function&& reclaim, std::uint64_t cost) : function_(std::move(reclaim)) {
        vmmgraph_reclaimer_t handle = nullptr;
        detail::check(add(of, call, cost, function_.user(), &handle));
        handle_ = detail::Owned<vmmgraph_reclaimer_t, vmmgraph_reclaimer_destroy>(handle);
    }

    static std::uint64_t call(std::uint64_t bytes, void* user) noexcept {
        try {
            const auto function = detail::Callbacks<Function>::of(user);
            return function && *function ? (*function)(bytes) : 0;
        } catch (...) {
            // C and Rust are in between: nothing may be thrown through them.
            return 0;
        }
    }

    detail::Callbacks<Function> function_;
    detail::Owned<vmmgraph_reclaimer_t, vmmgraph_reclaimer_destroy> handle_;
};

// Keeps replays of a device out while it lives, for engines that want none while they capture; nothing of the library needs it. Take
// both locks by this class and ReplayLock on one thread, and end them there. Throws if this thread is in either already.
class CaptureLock {
public:
    explicit CaptureLock(const Device& device) : device_(device.handle()) { detail::check(vmmgraph_device_begin_capture(device_)); }
    CaptureLock(const CaptureLock&) = delete;
    CaptureLock& operator=(const CaptureLock&) = delete;
    ~CaptureLock() { static_cast<void>(vmmgraph_device_end_capture(device_)); }

private:
    vmmgraph_device_t device_;
};

// Keeps captures of a device out while it lives. Any number of threads may have one, each any number of times. Throws if this thread
// has the CaptureLock.
class ReplayLock {
public:
    explicit ReplayLock(const Device& device) : device_(device.handle()) { detail::check(vmmgraph_device_begin_replay(device_)); }
    ReplayLock(const ReplayLock&) = delete;
    ReplayLock& operator=(const ReplayLock&) = delete;
    ~ReplayLock() { static_cast<void>(vmmgraph_device_end_replay(device_)); }

private:
    vmmgraph_device_t device_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_DEVICE_HPP
