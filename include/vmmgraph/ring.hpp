// VmmGraph's rings for C++17: units, mostly layers, that stream from the host through a few slots, each at addresses of its own, so that no
// kernel sees a rotation. Header-only over vmmgraph.h; conventions as in vmmgraph.hpp.
//
//   vmmgraph::Ring ring(device, std::vector<vmmgraph::RingUnit>(36, {layer_bytes}));   // 36 layers over three slots
//   vmmgraph::HostBuffer weights(device, layer_bytes);                                 // pinned, or an Error
//   weights.write(0, from, layer_bytes);
//   ring.set_source(layer, weights);
//   {
//       vmmgraph::UnitScope unit(ring, layer, stream);          // the stream's work is behind the copy; the next layers are copied ahead
//       kernel<<<grid, block, 0, stream>>>(unit.address());
//   }                                                           // the slot is another layer's, behind the kernel

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

// What a ring holds, and what it did since it was made.
using RingStats = vmmgraph_ring_stats_t;
// Where a unit's contents are: its place, and its turn among those that stream (RingSchedule::resident: it stays on the device).
using RingPlace = vmmgraph_ring_place_t;
// What a step comes to with so many units resident.
using Residency = vmmgraph_ring_residency_t;

// A piece of what a step reads, mostly a layer.
struct RingUnit {
    std::uint64_t bytes = 0;
    // It is to stay on the device: it is copied once, and again when its source changes.
    bool resident = false;
};

// What to do with units that the slots do not divide.
enum class Remainder : std::int32_t {
    // As many as are too many stay resident, spread evenly.
    keep_resident = VMMGRAPH_REMAINDER_KEEP_RESIDENT,
    // It is an Error.
    refuse = VMMGRAPH_REMAINDER_REFUSE,
};

// Whether memory that could not be registered with the device will do.
enum class Pinning : std::int32_t {
    // No: it is an Error. Never falls back silently.
    required = VMMGRAPH_PINNING_REQUIRED,
    // Yes: copies go over small registered buffers then, and the caller waits for each.
    preferred = VMMGRAPH_PINNING_PREFERRED,
};

// How to make a ring. 0 is the default of every number.
struct RingOptions {
    // For messages.
    std::string name;
    // Slots that the streamed units share; 0: three.
    std::size_t slots = 0;
    Remainder remainder = Remainder::keep_resident;
    // Bytes of every page, a multiple of the device's granularity; 0: the longest unit, if all places together are no longer then; else about an
    // eighth of it, 16 MiB at most.
    std::uint64_t page_bytes = 0;
    // The most bytes of physical memory it may hold; 0: no limit but the device's.
    std::uint64_t budget_bytes = 0;
    // Nothing is copied ahead for the next step, since its sources will be others.
    bool within_step = false;
    // GiB a second that the link brings from pinned host memory, as measured: what ring_ceiling_text() says is logged then (set_log_sink, at the
    // level info) before anything is built, without the budget; 0: it is not known.
    double link_gib_per_second = 0;
    // Seconds that a step takes with everything resident, and its tokens, all sequences together (0: one); only beside the link's speed.
    double compute_seconds = 0;
    std::uint64_t tokens = 0;
    // The account that its own is below: Account::handle() of the same device; null: the device's.
    vmmgraph_account_t account = nullptr;
};

// Which units stream, and through which slots.
struct RingSchedule {
    // The turn of a unit that is resident.
    static constexpr std::uint64_t resident = std::numeric_limits<std::uint64_t>::max();

    // By unit.
    std::vector<RingPlace> places;
    std::size_t streamed = 0;
    // Slots that they share; 0: nothing streams.
    std::size_t slots = 0;
    // Units that were to stream and are resident all the same.
    std::size_t kept_resident = 0;
};

// What a step has to do and what there is for it. 0 is the default of every number but the link's.
struct RingDemand {
    // In the order of use.
    std::vector<RingUnit> units;
    // Slots that are wanted; 0: three.
    std::size_t slots = 0;
    Remainder remainder = Remainder::keep_resident;
    // Bytes of a page: places are as long as whole ones; 0: no matter.
    std::uint64_t page_bytes = 0;
    // The most bytes of the device that slots and resident units may take; 0: no limit.
    std::uint64_t budget_bytes = 0;
    // Tokens of a step, all sequences together; 0: one.
    std::uint64_t tokens = 0;
    // GiB a second that the link brings from pinned host memory; measure it.
    double link_gib_per_second = 0;
    // Seconds that a step takes with everything resident.
    double compute_seconds = 0;
};

// The best that can be had. No arrangement of copies is faster; how near a ring comes is to be measured.
struct RingCeiling {
    // With the units that stream as asked, or as near to that as slots and budget allow.
    Residency asked{};
    // What more residency would buy, from the next more up to all, as far as the budget holds it.
    std::vector<Residency> more;
    // Seconds of the copies alone and of the work alone.
    double link_seconds = 0;
    double compute_seconds = 0;
    // Bytes of the device if everything were resident.
    std::uint64_t all_resident_bytes = 0;
    std::size_t streamed = 0;
    // Slots that they share: fewer than asked for where the budget holds no more; 0: nothing streams.
    std::size_t slots = 0;
    // Units that were to stream and are resident all the same.
    std::size_t kept_resident = 0;
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

// The demand as C wants it; lives as long as `units`.
[[nodiscard]] inline vmmgraph_ring_demand_t to_c(const RingDemand& demand, const std::vector<vmmgraph_ring_unit_t>& units) noexcept {
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

[[nodiscard]] inline RingSchedule from_c(const vmmgraph_ring_schedule_t& schedule, std::vector<RingPlace> places) {
    return {std::move(places), static_cast<std::size_t>(schedule.streamed), static_cast<std::size_t>(schedule.slots),
            static_cast<std::size_t>(schedule.kept_resident)};
}

}  // namespace detail

// Which of these units would stream, and through which slots (0: three): arithmetic, without a device. Throws for no units, and with
// Remainder::refuse if the slots do not divide them.
[[nodiscard]] inline RingSchedule ring_schedule(const std::vector<RingUnit>& units, std::size_t slots = 0,
                                                Remainder remainder = Remainder::keep_resident) {
    detail::require_abi();
    const auto given = detail::to_c(units);
    std::vector<RingPlace> places(units.size());
    auto result = detail::sized<vmmgraph_ring_schedule_t>();
    detail::check(vmmgraph_ring_schedule(given.data(), given.size(), slots, static_cast<std::int32_t>(remainder), places.data(),
                                         places.size(), &result));
    return detail::from_c(result, std::move(places));
}

// The best that a ring can do for such a step, before anything is built: arithmetic, without a device. Throws for what is no step, and if
// the budget does not hold one slot and what is to be resident.
[[nodiscard]] inline RingCeiling ring_ceiling(const RingDemand& demand) {
    detail::require_abi();
    const auto units = detail::to_c(demand.units);
    const auto given = detail::to_c(demand, units);
    // A row for each unit at most.
    std::vector<Residency> more(units.size());
    auto found = detail::sized<vmmgraph_ring_ceiling_t>();
    detail::check(vmmgraph_ring_ceiling(&given, more.data(), more.size(), &found));
    more.resize(found.residency_count);
    return {found.asked,
            std::move(more),
            found.link_seconds,
            found.compute_seconds,
            found.all_resident_bytes,
            static_cast<std::size_t>(found.streamed),
            static_cast<std::size_t>(found.slots),
            static_cast<std::size_t>(found.kept_resident)};
}

// The same in words, a line each: what bounds a step, everything that is otherwise than asked, and what residency would buy.
[[nodiscard]] inline std::string ring_ceiling_text(const RingDemand& demand) {
    detail::require_abi();
    const auto units = detail::to_c(demand.units);
    const auto given = detail::to_c(demand, units);
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_ring_ceiling_text(&given, buffer, capacity, needed));
    });
}

// Host memory that units are copied from, in one piece at one address. Rings keep what they have as a source, so this may go first.
class HostBuffer {
public:
    // At most 1 GiB, of the device's host pool. Throws VMMGRAPH_ERROR_HOST_NOT_REGISTERED if it cannot be pinned and has to be.
    explicit HostBuffer(const Device& device, std::uint64_t bytes, Pinning pinning = Pinning::required) {
        vmmgraph_host_buffer_t handle = nullptr;
        detail::check(vmmgraph_host_buffer_create(device.handle(), bytes, static_cast<std::int32_t>(pinning), &handle));
        handle_ = detail::Owned<vmmgraph_host_buffer_t, vmmgraph_host_buffer_destroy>(handle);
    }

    // Where it begins in this process. Who writes there waits first (wait()), lets no ring copy meanwhile, and says so afterwards (changed()).
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

    // Whether it is registered with the device.
    [[nodiscard]] bool registered() const {
        std::int32_t registered = 0;
        detail::check(vmmgraph_host_buffer_info(handle(), nullptr, nullptr, &registered));
        return registered != 0;
    }

    // Writes `bytes` bytes from `at` on, when the copies from it and to it that were given are over. Rings copy it again before the next use.
    void write(std::uint64_t at, const void* from, std::size_t bytes) {
        detail::check(vmmgraph_host_buffer_write(handle(), at, from, bytes));
    }

    // Copies `bytes` mapped bytes of the device to `at`: behind what `stream` was given so far and what reads the buffer by now, beside whatever comes later, by the
    // engine of the other direction. Does not block. Rings copy it again before the next use, behind this. Who writes those bytes of the device again
    // does so on a stream that waits (before()). Throws VMMGRAPH_ERROR_HOST_NOT_REGISTERED, and VMMGRAPH_ERROR_WRONG_STATE while a captured step that reads it is launched.
    void store(std::uint64_t at, const void* from, std::uint64_t bytes, void* stream) {
        detail::check(vmmgraph_host_buffer_store(handle(), at, from, bytes, stream));
    }

    // Makes later work of a stream wait for the stores that were given.
    void before(void* stream) const { detail::check(vmmgraph_host_buffer_before(handle(), stream)); }

    // Reads `bytes` bytes from `at` on, when the copies to it that were given are over.
    void read(std::uint64_t at, void* into, std::size_t bytes) const {
        detail::check(vmmgraph_host_buffer_read(handle(), at, into, bytes));
    }

    // Says that the contents were changed otherwise than by write().
    void changed() { detail::check(vmmgraph_host_buffer_changed(handle())); }

    // Blocks until the copies from it and to it that were given are over.
    void wait() const { detail::check(vmmgraph_host_buffer_wait(handle())); }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_host_buffer_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_host_buffer_t, vmmgraph_host_buffer_destroy> handle_;
};

// Bytes of host memory that go to a place in a unit.
struct HostRun {
    std::reference_wrapper<const HostBuffer> source;
    // From its beginning, and from the unit's.
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    // 0: nothing is to be copied.
    std::uint64_t bytes = 0;
};

// How a step is captured.
struct RingCaptureOptions {
    // Units of the next step that are copied at this one's end; 0: one, or none in a ring that copies nothing ahead of a step
    // (RingOptions::within_step). One keeps the link busy between two steps; the end of a step waits for more.
    std::size_t tail = 0;
    // The most runs that the source of a unit will have: each is a node, which costs the host a microsecond a launch while it copies; 0: as
    // many as the sources have now.
    std::size_t most_runs = 0;
};

// A step of a ring that was captured into a graph. It keeps what it needs of the ring, and stays as long as the graph may be launched.
// vmmgraph::torch::CapturedGraph does by itself what is here.
class RingGraph {
public:
    // Takes over a C handle.
    explicit RingGraph(vmmgraph_ring_graph_t handle) noexcept : handle_(handle) {}

    // How many copies the graph has, those that have nothing to copy included.
    [[nodiscard]] std::uint64_t copies() const {
        std::uint64_t copies = 0;
        detail::check(vmmgraph_ring_graph_copies(handle_.get(), &copies));
        return copies;
    }

    // The executable that was launched last is gone, or was updated otherwise: the next one is told everything, also where it has the same handle.
    void forget_executable() { detail::check(vmmgraph_ring_graph_forget_executable(handle_.get())); }

    // Brings what the graph expects, tells its executable (a CUgraphExec of the graph, which nobody else uses meanwhile) what has changed in the
    // sources, calls `launch`, which gives it to `stream`, and notes what it left. What `launch` throws passes, and counts as not launched. Throws
    // VMMGRAPH_ERROR_WRONG_STATE beside another launch of the ring and while a unit is acquired; nothing was launched then.
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

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_ring_graph_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_ring_graph_t, vmmgraph_ring_graph_destroy> handle_;
};

// Units that are read in one order, again and again, and are not all on the device. One step is under way at a time. Destroying it, in use
// or not, waits for nobody: addresses and pages go behind the copies and the readers there are.
class Ring {
public:
    // Addresses for each unit, pages for the slots and for the resident ones; nothing is copied yet. Throws what it was refused for, with nothing
    // changed.
    Ring(const Device& device, const std::vector<RingUnit>& units, const RingOptions& options = {}) {
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
        detail::check(vmmgraph_ring_create(device.handle(), given.data(), given.size(), &made, &handle));
        handle_ = detail::Owned<vmmgraph_ring_t, vmmgraph_ring_destroy>(handle);
    }

    // The first address of a unit. It never changes, resident or streamed; its bytes are there from its acquire to its release.
    [[nodiscard]] void* address(std::size_t unit) const {
        void* address = nullptr;
        detail::check(vmmgraph_ring_address(handle(), unit, &address));
        return address;
    }

    // Which units stream, and through which slots.
    [[nodiscard]] RingSchedule schedule() const {
        auto result = detail::sized<vmmgraph_ring_schedule_t>();
        detail::check(vmmgraph_ring_places(handle(), nullptr, 0, &result));
        std::vector<RingPlace> places(static_cast<std::size_t>(result.units));
        detail::check(vmmgraph_ring_places(handle(), places.data(), places.size(), nullptr));
        return detail::from_c(result, std::move(places));
    }

    // Says what a unit is copied from, from its next acquire on; no runs: it needs no copy, and finds whatever its slot holds. What reads the unit
    // now goes on with what it has. Throws if a run leaves the unit or its source or lies on another's bytes; the source is as before then.
    void set_source(std::size_t unit, const std::vector<HostRun>& runs) {
        std::vector<vmmgraph_host_run_t> given;
        given.reserve(runs.size());
        for (const HostRun& run : runs) {
            given.push_back({run.source.get().handle(), run.from, run.to, run.bytes});
        }
        detail::check(vmmgraph_ring_set_source(handle(), unit, given.data(), given.size()));
    }

    // The same, with all of a buffer, from the unit's beginning on.
    void set_source(std::size_t unit, const HostBuffer& source) { set_source(unit, {HostRun{source, 0, 0, source.bytes()}}); }

    // Makes later work of a stream find a unit's bytes, until release(); the units behind it are copied ahead. Does not block, unless a source is
    // not registered. Throws VMMGRAPH_ERROR_WRONG_STATE while its slot is in use; the call can be repeated then. UnitScope does both.
    void acquire(std::size_t unit, void* stream) { detail::check(vmmgraph_ring_acquire(handle(), unit, stream)); }

    // What a stream was given so far is the last that reads the unit: its slot is filled again behind that.
    void release(std::size_t unit, void* stream) { detail::check(vmmgraph_ring_release(handle(), unit, stream)); }

    // Copies the resident units and the first ones that stream, where they are not there: before the first step. Returns how many.
    std::uint64_t prime() {
        std::uint64_t filled = 0;
        detail::check(vmmgraph_ring_prime(handle(), &filled));
        return filled;
    }

    // A step is being captured on `stream`, which is under capture, from here on: acquire() and release() with a stream under capture are part of
    // it, and no bytes move. Every unit that streams is acquired once, in the order of use, and released in that order. One capture at a time.
    void capture_begin(void* stream, const RingCaptureOptions& options = {}) {
        auto given = detail::sized<vmmgraph_ring_capture_options_t>();
        given.tail = options.tail;
        given.most_runs = options.most_runs;
        detail::check(vmmgraph_ring_capture_begin(handle(), stream, &given));
    }

    // The end of the step, before that of the stream's capture. Throws VMMGRAPH_ERROR_WRONG_STATE if units were not acquired or not released, or if a
    // call of the capture failed; it is given up then.
    [[nodiscard]] RingGraph capture_end(void* stream) {
        vmmgraph_ring_graph_t graph = nullptr;
        detail::check(vmmgraph_ring_capture_end(handle(), stream, &graph));
        return RingGraph(graph);
    }

    // Gives a capture up: the graph, if there is one, is not to be launched. Nothing if none is under way.
    void capture_abandon() noexcept { static_cast<void>(vmmgraph_ring_capture_abandon(handle())); }

    // A step ends before its end: every unit is released behind all that its stream was given, and is copied again at its next use.
    void abort() { detail::check(vmmgraph_ring_abort(handle())); }

    [[nodiscard]] RingStats stats() const {
        auto stats = detail::sized<RingStats>();
        detail::check(vmmgraph_ring_stats(handle(), &stats));
        return stats;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_ring_t handle() const noexcept { return handle_.get(); }

private:
    detail::Owned<vmmgraph_ring_t, vmmgraph_ring_destroy> handle_;
};

// A unit from its acquire to its release, which comes behind all that its stream was given when this is destroyed, by an exception too. If it
// cannot be released then, the ring is aborted. Ends before the next acquire behind an abort().
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
        // Of a unit that an abort released there is nothing left to say.
        if (status != VMMGRAPH_OK && status != VMMGRAPH_ERROR_WRONG_STATE) {
            static_cast<void>(vmmgraph_ring_abort(ring_));
        }
    }

    // Releases it now. Throws if that fails; it is still acquired then, and the end tries again.
    void release() {
        detail::check(vmmgraph_ring_release(ring_, unit_, stream_));
        ring_ = nullptr;
    }

    // The unit's first address.
    [[nodiscard]] void* address() const noexcept { return address_; }

private:
    vmmgraph_ring_t ring_;
    std::size_t unit_;
    void* stream_;
    void* address_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_RING_HPP
