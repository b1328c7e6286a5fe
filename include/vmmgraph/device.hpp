// A device for C++17: its driver and its page pool. Conventions: vmmgraph.hpp.

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

// Constant properties of a device: driver, granularity, total bytes, name.
using DeviceInfo = vmmgraph_device_info_t;
// Exact counts of a device's page pool.
using DeviceStats = vmmgraph_device_stats_t;

// Driver of a device. Device::open() throws an Error naming the missing part of a driver.
enum class DriverChoice : std::int32_t {
    // VMMGRAPH_DRIVER (cuda, hip, ascend, mlu or host) if set; else the first with a usable device,
    // never the host.
    automatic = VMMGRAPH_DRIVER_AUTO,
    // CUDA.
    cuda = VMMGRAPH_DRIVER_CUDA,
    // Host memory; addresses are ordinary pointers of this process.
    host = VMMGRAPH_DRIVER_HOST,
    // HIP on AMD GPUs. Never run on a device.
    hip = VMMGRAPH_DRIVER_HIP,
    // Ascend NPUs. Never run on a device.
    ascend = VMMGRAPH_DRIVER_ASCEND,
    // Cambricon MLUs. Never run on a device.
    mlu = VMMGRAPH_DRIVER_MLU,
};

// Means by which other processes import a device's pages.
enum class Sharing : std::int32_t {
    // None: pages stay in this process.
    none = VMMGRAPH_SHARING_NONE,
    // POSIX file descriptors, one per page. Not on HIP, Ascend and MLU.
    fd = VMMGRAPH_SHARING_FD,
    // File descriptors, plus fabric handles for other hosts if the device supports fabric.
    // DeviceInfo reports the granted mode.
    fabric = VMMGRAPH_SHARING_FABRIC,
};

// Options of a device; 0 is the default of every number.
struct DeviceOptions {
    DriverChoice driver = DriverChoice::automatic;
    // The device's number with this driver.
    int device = 0;
    // Limit of the page pool's physical memory in bytes, as by set_budget(); 0: no limit, or
    // unchanged if the device is open.
    std::uint64_t budget_bytes = 0;
    // Host driver: mapping granularity in bytes, a power of two; 0: 2 MiB.
    std::uint64_t host_granularity_bytes = 0;
    // Host driver: bytes of the device; 0: this machine's memory.
    std::uint64_t host_memory_bytes = 0;
    // Sharing mode of all pages, fixed at the first open. See vmmgraph_device_options_t.
    Sharing sharing = Sharing::none;
    // Lets network cards access the pages. See vmmgraph_device_options_t.
    bool rdma = false;
    // Other devices with access to all pages: 1 << n for device n, added up. See
    // vmmgraph_device_options_t.
    std::uint64_t peers = 0;
};

// A device: its driver and its page pool. Opening a device again returns another handle to the same
// pool. The device closes after its last handle and arena.
class Device {
public:
    // Opens a device. Throws if the driver lacks the device, and if the device is open with other
    // host options, or without the requested sharing or RDMA.
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

    [[nodiscard]] DeviceInfo info() const {
        auto info = detail::sized<DeviceInfo>();
        detail::check(vmmgraph_device_info(handle(), &info));
        return info;
    }

    // Returns the current counts of the page pool, shared by all arenas of the device.
    [[nodiscard]] DeviceStats stats() const {
        auto stats = detail::sized<DeviceStats>();
        detail::check(vmmgraph_device_stats(handle(), &stats));
        return stats;
    }

    // Limits the page pool's physical memory in bytes; 0: no limit. Nothing is taken away.
    void set_budget(std::uint64_t bytes) {
        detail::check(vmmgraph_device_set_budget(handle(), bytes));
    }

    // Returns free pages to the driver, and their bytes. See vmmgraph_device_trim().
    std::size_t trim() {
        std::uint64_t released = 0;
        detail::check(vmmgraph_device_trim(handle(), &released));
        return static_cast<std::size_t>(released);
    }

    // Marks every arena with its last replay on `stream`. See vmmgraph_device_mark().
    void mark(void* stream) { detail::check(vmmgraph_device_mark(handle(), stream)); }

    // Reports a capture without a space. See vmmgraph_device_note_capture().
    void note_capture() { detail::check(vmmgraph_device_note_capture(handle())); }

    [[nodiscard]] vmmgraph_device_t handle() const noexcept { return handle_.get(); }

private:
    explicit Device(vmmgraph_device_t handle) noexcept : handle_(handle) {}

    detail::Owned<vmmgraph_device_t, vmmgraph_device_close> handle_;
};

// Limits of an account, in bytes.
struct AccountLimits {
    // Maximum charge; 0: only the limits of the accounts above.
    std::uint64_t budget_bytes = 0;
    // Guaranteed bytes, charged to the accounts above even if unused. Guaranteed only below an
    // account with a budget.
    std::uint64_t least_bytes = 0;
};

using AccountStats = vmmgraph_account_stats_t;

// An account: a budget in the device's tree, for a tenant or a model. Objects made with its handle
// are charged to this account and to those above, also after the handle is gone.
class Account {
public:
    // Creates an account below the device's. `label` appears in messages and need not be unique.
    // Throws OutOfMemory if the guaranteed bytes do not fit.
    Account(const Device& device, const std::string& label, const AccountLimits& limits = {})
        : Account(device, label, nullptr, limits) {}
    // Creates an account below another account of the device.
    Account(const Device& device, const std::string& label, const Account& above,
            const AccountLimits& limits = {})
        : Account(device, label, above.live(), limits) {}

    // Nothing is taken away: over the limit, new pages are refused until enough memory is given
    // back.
    void set_limits(const AccountLimits& limits) {
        detail::check(
            vmmgraph_account_set_limits(handle(), limits.budget_bytes, limits.least_bytes));
    }

    [[nodiscard]] AccountStats stats() const {
        auto stats = detail::sized<AccountStats>();
        detail::check(vmmgraph_account_stats(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_account_t handle() const noexcept { return handle_.get(); }

private:
    Account(const Device& device, const std::string& label, vmmgraph_account_t above,
            const AccountLimits& limits) {
        auto given = detail::sized<vmmgraph_account_options_t>();
        given.above = above;
        given.budget_bytes = limits.budget_bytes;
        given.least_bytes = limits.least_bytes;
        vmmgraph_account_t handle = nullptr;
        detail::check(vmmgraph_account_create(device.handle(), label.c_str(), &given, &handle));
        handle_ = detail::Owned<vmmgraph_account_t, vmmgraph_account_destroy>(handle);
    }

    // Returns the handle. Throws if moved from, since null would mean the device's account.
    [[nodiscard]] vmmgraph_account_t live() const {
        static_cast<void>(stats());
        return handle();
    }

    detail::Owned<vmmgraph_account_t, vmmgraph_account_destroy> handle_;
};

// A reclaim function, asked for memory before a call fails. Receives the missing bytes and returns
// the bytes given back; an exception counts as 0. Runs on the thread in need, also during a
// capture: do not synchronize with the device there. See vmmgraph_device_add_reclaimer().
class Reclaimer {
public:
    using Function = std::function<std::uint64_t(std::uint64_t bytes)>;

    // Throws if the device's handle is gone. A null function gives back nothing.
    Reclaimer(const Device& device, Function reclaim, std::uint64_t cost)
        : Reclaimer(vmmgraph_device_add_reclaimer, device.handle(), std::move(reclaim), cost) {}
    // Also asked if this account or one above is short. See vmmgraph_account_add_reclaimer().
    Reclaimer(const Account& account, Function reclaim, std::uint64_t cost)
        : Reclaimer(vmmgraph_account_add_reclaimer, account.handle(), std::move(reclaim), cost) {}

private:
    template <class Add, class Handle>
    Reclaimer(Add add, Handle of, Function&& reclaim, std::uint64_t cost)
        : function_(std::move(reclaim)) {
        vmmgraph_reclaimer_t handle = nullptr;
        detail::check(add(of, call, cost, function_.user(), &handle));
        handle_ = detail::Owned<vmmgraph_reclaimer_t, vmmgraph_reclaimer_destroy>(handle);
    }

    static std::uint64_t call(std::uint64_t bytes, void* user) noexcept {
        try {
            const auto function = detail::Callbacks<Function>::of(user);
            return function && *function ? (*function)(bytes) : 0;
        } catch (...) {
            // Exceptions must not unwind through C and Rust.
            return 0;
        }
    }

    detail::Callbacks<Function> function_;
    detail::Owned<vmmgraph_reclaimer_t, vmmgraph_reclaimer_destroy> handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_DEVICE_HPP
