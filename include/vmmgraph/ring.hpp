// Rings for C++17: units, mostly layers, streamed from the host through a few slots. Each unit
// keeps its own addresses, so kernels see no rotation. Header-only over vmmgraph.h. Conventions:
// vmmgraph.hpp.
//
//   // 36 layers over three slots
//   vmmgraph::Ring ring(device, std::vector<vmmgraph::RingUnit>(36, {layer_bytes}));
//   vmmgraph::HostBuffer weights(device, layer_bytes);     // pinned, or an Error
//   weights.write(0, from, layer_bytes);
//   ring.set_source(layer, weights);
//   {
//       // the stream waits for the copy; the next layers are copied ahead
//       vmmgraph::UnitScope unit(ring, layer, stream);
//       kernel<<<grid, block, 0, stream>>>(unit.address());
//   }                                                      // slot reused after the kernel

#ifndef VMMGRAPH_RING_HPP
#define VMMGRAPH_RING_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "vmmgraph.hpp"

namespace vmmgraph {

// Statistics of a ring.
using RingStats = vmmgraph_ring_stats_t;
// A unit's slot, and its position among the streamed units (RingSchedule::resident: stays on the
// device).
using RingPlace = vmmgraph_ring_place_t;

// A part of a step's data, mostly a layer.
struct RingUnit {
    std::uint64_t bytes = 0;
    // Stays on the device; copied once, and again when its source changes.
    bool resident = false;
};

// Handling of streamed units which the slots do not divide.
enum class Remainder : std::int32_t {
    // The surplus stays resident, evenly spread.
    keep_resident = VMMGRAPH_REMAINDER_KEEP_RESIDENT,
    // An Error.
    refuse = VMMGRAPH_REMAINDER_REFUSE,
};

// Whether unregistered host memory is acceptable.
enum class Pinning : std::int32_t {
    // No: an Error, never a silent fallback.
    required = VMMGRAPH_PINNING_REQUIRED,
    // Yes: copies go through small registered buffers, and the caller waits for each.
    preferred = VMMGRAPH_PINNING_PREFERRED,
};

// Options of a ring; 0 is the default of every number.
struct RingOptions {
    // For messages.
    std::string name;
    // Slots shared by the streamed units; 0: three.
    std::size_t slots = 0;
    Remainder remainder = Remainder::keep_resident;
    // Bytes of every page, a multiple of the device's granularity; 0: chosen from the longest unit.
    // See vmmgraph_ring_options_t.
    std::uint64_t page_bytes = 0;
    // Limit of physical memory in bytes; 0: only the device's limit.
    std::uint64_t budget_bytes = 0;
    // Copies nothing ahead for the next step, whose sources will differ.
    bool within_step = false;
    // Measured speed of the link from pinned host memory, in GiB per second; 0: unknown. If known,
    // ring_ceiling_text() is logged at level info before the ring is built.
    double link_gib_per_second = 0;
    // Seconds of a step with everything resident, and its tokens (0: one). Only with a known link.
    double compute_seconds = 0;
    std::uint64_t tokens = 0;
    // Parent account, Account::handle() of the same device; null: the device's account.
    vmmgraph_account_t account = nullptr;
};

// Assignment of streamed units to slots.
struct RingSchedule {
    // Position of a resident unit.
    static constexpr std::uint64_t resident = std::numeric_limits<std::uint64_t>::max();

    // By unit.
    std::vector<RingPlace> places;
    std::size_t streamed = 0;
    // Slots shared by the streamed units; 0: nothing streams.
    std::size_t slots = 0;
    // Resident units which were meant to stream.
    std::size_t kept_resident = 0;
};

// Demand of a step and available resources; 0 is the default of every number but the link's.
struct RingDemand {
    // In order of use.
    std::vector<RingUnit> units;
    // Requested slots; 0: three.
    std::size_t slots = 0;
    Remainder remainder = Remainder::keep_resident;
    // Bytes of a page, to which slots are rounded up; 0: no rounding.
    std::uint64_t page_bytes = 0;
    // Limit of device bytes for slots and resident units; 0: no limit.
    std::uint64_t budget_bytes = 0;
    // Tokens of a step over all sequences; 0: one.
    std::uint64_t tokens = 0;
    // Measured speed of the link from pinned host memory, in GiB per second.
    double link_gib_per_second = 0;
    // Seconds of a step with everything resident.
    double compute_seconds = 0;
};

namespace detail {

[[nodiscard]] inline std::vector<vmmgraph_ring_unit_t> to_c(const std::vector<RingUnit>& units) {
    std::vector<vmmgraph_ring_unit_t> given;
    given.reserve(units.size());
    for (const RingUnit& unit : units) {
        given.push_back({unit.bytes, unit.resident ? 1 : 0, 0});
    }
    return given;
}

// Converts a demand to C; the result points into `units`.
[[nodiscard]] inline vmmgraph_ring_demand_t to_c(
    const RingDemand& demand, const std::vector<vmmgraph_ring_unit_t>& units) noexcept {
    auto given = sized<vmmgraph_ring_demand_t>();
    given.units = units.data();
    given.unit_count = units.size();
    given.slots = demand.slots;
    given.remainder = static_cast<std::int32_t>(demand.remainder);
    given.page_bytes = demand.page_bytes;
    given.budget_bytes = demand.budget_bytes;
    given.tokens = demand.tokens;
    given.link_gib_per_second = demand.link_gib_per_second;
    given.compute_seconds = demand.compute_seconds;
    return given;
}

[[nodiscard]] inline RingSchedule from_c(const vmmgraph_ring_schedule_t& schedule,
                                         std::vector<RingPlace> places) {
    return {std::move(places), static_cast<std::size_t>(schedule.streamed),
            static_cast<std::size_t>(schedule.slots),
            static_cast<std::size_t>(schedule.kept_resident)};
}

}  // namespace detail

// Describes a ring's upper bound for a step, without a device. Throws if the budget is too small.
// See vmmgraph_ring_ceiling_text().
[[nodiscard]] inline std::string ring_ceiling_text(const RingDemand& demand) {
    detail::require_abi();
    const auto units = detail::to_c(demand.units);
    const auto given = detail::to_c(demand, units);
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_ring_ceiling_text(&given, buffer, capacity, needed));
    });
}

// Contiguous host memory, the source of ring units. Rings keep their sources alive.
class HostBuffer {
public:
    // Takes at most 1 GiB from the device's host pool. Throws VMMGRAPH_ERROR_HOST_NOT_REGISTERED if
    // required pinning fails.
    explicit HostBuffer(const Device& device, std::uint64_t bytes,
                        Pinning pinning = Pinning::required) {
        vmmgraph_host_buffer_t handle = nullptr;
        detail::check(vmmgraph_host_buffer_create(device.handle(), bytes,
                                                  static_cast<std::int32_t>(pinning), &handle));
        handle_ = detail::Owned<vmmgraph_host_buffer_t, vmmgraph_host_buffer_destroy>(handle);
    }

    // Returns the address. Before direct writes, call wait() and let no ring copy; afterwards, call
    // changed().
    [[nodiscard]] void* data() const {
        void* base = nullptr;
        detail::check(vmmgraph_host_buffer_info(handle(), &base, nullptr, nullptr));
        return base;
    }

    [[nodiscard]] std::uint64_t bytes() const {
        std::uint64_t bytes = 0;
        detail::check(vmmgraph_host_buffer_info(handle(), nullptr, &bytes, nullptr));
        return bytes;
    }

    // Returns true if registered with the device.
    [[nodiscard]] bool registered() const {
        std::int32_t registered = 0;
        detail::check(vmmgraph_host_buffer_info(handle(), nullptr, nullptr, &registered));
        return registered != 0;
    }

    // Writes at `at`, after all pending copies. Rings copy again before the next use.
    void write(std::uint64_t at, const void* from, std::size_t bytes) {
        detail::check(vmmgraph_host_buffer_write(handle(), at, from, bytes));
    }

    // Copies mapped device bytes to `at`. See vmmgraph_host_buffer_store().
    void store(std::uint64_t at, const void* from, std::uint64_t bytes, void* stream) {
        detail::check(vmmgraph_host_buffer_store(handle(), at, from, bytes, stream));
    }

    // Makes later work of `stream` wait for earlier stores.
    void before(void* stream) const {
        detail::check(vmmgraph_host_buffer_before(handle(), stream));
    }

    // Reads from `at`, after all pending copies to the buffer.
    void read(std::uint64_t at, void* into, std::size_t bytes) const {
        detail::check(vmmgraph_host_buffer_read(handle(), at, into, bytes));
    }

    // Reports a change of contents other than by write().
    void changed() { detail::check(vmmgraph_host_buffer_changed(handle())); }

    // Blocks until all pending copies are done.
    void wait() const { detail::check(vmmgraph_host_buffer_wait(handle())); }

    [[nodiscard]] vmmgraph_host_buffer_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_host_buffer_t, vmmgraph_host_buffer_destroy> handle_;
};

// A run of host bytes for a unit.
struct HostRun {
    std::reference_wrapper<const HostBuffer> source;
    // Offsets in the source and in the unit.
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    // 0: nothing to copy.
    std::uint64_t bytes = 0;
};

// Options of a captured step.
struct RingCaptureOptions {
    // See vmmgraph_ring_capture_options_t.
    std::size_t tail = 0;
    // See vmmgraph_ring_capture_options_t.
    std::size_t most_runs = 0;
};

// A captured step of a ring; must live while the graph may be launched. Keeps its part of the ring
// alive. vmmgraph::torch::CapturedGraph manages its own.
class RingGraph {
public:
    // Takes ownership of a C handle.
    explicit RingGraph(vmmgraph_ring_graph_t handle) noexcept : handle_(handle) {}

    // Returns the number of copies in the graph, empty ones included.
    [[nodiscard]] std::uint64_t copies() const {
        std::uint64_t copies = 0;
        detail::check(vmmgraph_ring_graph_copies(handle_.get(), &copies));
        return copies;
    }

    // Call after the executable was destroyed or updated elsewhere: the next launch updates all
    // nodes.
    void forget_executable() {
        detail::check(vmmgraph_ring_graph_forget_executable(handle_.get()));
    }

    // Updates `executable` (a CUgraphExec of the graph, used by no other thread), and calls
    // `launch` to launch it on `stream`. Exceptions of `launch` propagate and mean "not launched".
    // See vmmgraph_ring_graph_enter().
    template <class Launch>
    void launch(void* executable, void* stream, Launch&& launch) {
        detail::check(vmmgraph_ring_graph_enter(handle_.get(), executable, stream));
        try {
            std::forward<Launch>(launch)();
        } catch (...) {
            static_cast<void>(vmmgraph_ring_graph_leave(handle_.get(), stream, 0));
            throw;
        }
        detail::check(vmmgraph_ring_graph_leave(handle_.get(), stream, 1));
    }

    [[nodiscard]] vmmgraph_ring_graph_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_ring_graph_t, vmmgraph_ring_graph_destroy> handle_;
};

// A ring: units read in a fixed, repeated order, not all of which fit the device. One step at a
// time. See vmmgraph_ring_destroy().
class Ring {
public:
    // Reserves addresses and takes pages; copies nothing. On an exception nothing has changed.
    Ring(const Device& device, const std::vector<RingUnit>& units,
         const RingOptions& options = {}) {
        const auto given = detail::to_c(units);
        auto made = detail::sized<vmmgraph_ring_options_t>();
        made.name = options.name.c_str();
        made.slots = options.slots;
        made.remainder = static_cast<std::int32_t>(options.remainder);
        made.flags = options.within_step ? VMMGRAPH_RING_WITHIN_STEP : 0;
        made.page_bytes = options.page_bytes;
        made.budget_bytes = options.budget_bytes;
        made.link_gib_per_second = options.link_gib_per_second;
        made.compute_seconds = options.compute_seconds;
        made.tokens = options.tokens;
        made.account = options.account;
        vmmgraph_ring_t handle = nullptr;
        detail::check(
            vmmgraph_ring_create(device.handle(), given.data(), given.size(), &made, &handle));
        handle_ = detail::Owned<vmmgraph_ring_t, vmmgraph_ring_destroy>(handle);
    }

    // Returns a unit's first address, which never changes.
    [[nodiscard]] void* address(std::size_t unit) const {
        void* address = nullptr;
        detail::check(vmmgraph_ring_address(handle(), unit, &address));
        return address;
    }

    // Returns the assignment of units to slots.
    [[nodiscard]] RingSchedule schedule() const {
        auto result = detail::sized<vmmgraph_ring_schedule_t>();
        detail::check(vmmgraph_ring_places(handle(), nullptr, 0, &result));
        std::vector<RingPlace> places(static_cast<std::size_t>(result.units));
        detail::check(vmmgraph_ring_places(handle(), places.data(), places.size(), nullptr));
        return detail::from_c(result, std::move(places));
    }

    // Sets a unit's source from its next acquire on. See vmmgraph_ring_set_source().
    void set_source(std::size_t unit, const std::vector<HostRun>& runs) {
        std::vector<vmmgraph_host_run_t> given;
        given.reserve(runs.size());
        for (const HostRun& run : runs) {
            given.push_back({run.source.get().handle(), run.from, run.to, run.bytes});
        }
        detail::check(vmmgraph_ring_set_source(handle(), unit, given.data(), given.size()));
    }

    // Sets a whole buffer as the source, from the unit's beginning.
    void set_source(std::size_t unit, const HostBuffer& source) {
        set_source(unit, {HostRun{source, 0, 0, source.bytes()}});
    }

    // Makes later work of `stream` find the unit's bytes until release(). UnitScope does both. See
    // vmmgraph_ring_acquire().
    void acquire(std::size_t unit, void* stream) {
        detail::check(vmmgraph_ring_acquire(handle(), unit, stream));
    }

    // Ends the unit's use after the stream's work so far; its slot is refilled afterwards.
    void release(std::size_t unit, void* stream) {
        detail::check(vmmgraph_ring_release(handle(), unit, stream));
    }

    // Copies resident and first streamed units into place, before the first step. Returns their
    // number.
    std::uint64_t prime() {
        std::uint64_t filled = 0;
        detail::check(vmmgraph_ring_prime(handle(), &filled));
        return filled;
    }

    // Begins the capture of a step on `stream`. See vmmgraph_ring_capture_begin().
    void capture_begin(void* stream, const RingCaptureOptions& options = {}) {
        auto given = detail::sized<vmmgraph_ring_capture_options_t>();
        given.tail = options.tail;
        given.most_runs = options.most_runs;
        detail::check(vmmgraph_ring_capture_begin(handle(), stream, &given));
    }

    // Ends the step. See vmmgraph_ring_capture_end().
    [[nodiscard]] RingGraph capture_end(void* stream) {
        vmmgraph_ring_graph_t graph = nullptr;
        detail::check(vmmgraph_ring_capture_end(handle(), stream, &graph));
        return RingGraph(graph);
    }

    // Abandons the capture, if any; its graph must not be launched.
    void capture_abandon() noexcept { static_cast<void>(vmmgraph_ring_capture_abandon(handle())); }

    // Ends a step early. See vmmgraph_ring_abort().
    void abort() { detail::check(vmmgraph_ring_abort(handle())); }

    [[nodiscard]] RingStats stats() const {
        auto stats = detail::sized<RingStats>();
        detail::check(vmmgraph_ring_stats(handle(), &stats));
        return stats;
    }

    [[nodiscard]] vmmgraph_ring_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_ring_t, vmmgraph_ring_destroy> handle_;
};

// A unit from acquire to release, which follows the stream's work at destruction. A failed release
// aborts the ring. Must end before the next acquire after an abort().
class UnitScope {
public:
    UnitScope(Ring& ring, std::size_t unit, void* stream)
        : ring_(ring.handle()), unit_(unit), stream_(stream), address_(ring.address(unit)) {
        ring.acquire(unit, stream);
    }
    UnitScope(const UnitScope&) = delete;
    UnitScope& operator=(const UnitScope&) = delete;
    ~UnitScope() {
        if (ring_ == nullptr) {
            return;
        }
        const vmmgraph_status_t status = vmmgraph_ring_release(ring_, unit_, stream_);
        // After an abort the unit is already released.
        if (status != VMMGRAPH_OK && status != VMMGRAPH_ERROR_WRONG_STATE) {
            static_cast<void>(vmmgraph_ring_abort(ring_));
        }
    }

    // Releases the unit now. On an exception the unit stays acquired, and the destructor retries.
    void release() {
        detail::check(vmmgraph_ring_release(ring_, unit_, stream_));
        ring_ = nullptr;
    }

    [[nodiscard]] void* address() const noexcept { return address_; }

private:
    vmmgraph_ring_t ring_;
    std::size_t unit_;
    void* stream_;
    void* address_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_RING_HPP
