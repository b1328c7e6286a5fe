// Rings through the C++ interface, on the driver of VMMGRAPH_DRIVER: ctest runs the host driver and
// the stand-in libcuda.so.
#include <vmmgraph/ring.hpp>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "host.hpp"

namespace {

using vmmgraph::Device;
using vmmgraph::HostBuffer;
using vmmgraph::HostRun;
using vmmgraph::Pinning;
using vmmgraph::Ring;
using vmmgraph::RingOptions;
using vmmgraph::RingUnit;
using vmmgraph::UnitScope;
using Bytes = std::vector<unsigned char>;

template <class T>
constexpr bool owner =
    !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
    std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T> &&
    std::is_nothrow_destructible_v<T> && sizeof(T) == sizeof(void*);
static_assert(owner<Ring> && owner<HostBuffer>);
static_assert(!std::is_move_constructible_v<UnitScope> && std::is_nothrow_destructible_v<UnitScope>,
              "it ends where it began");

// A device with two streams. Links no CUDA symbol, because CUDA may be missing.
class Machine {
public:
    Machine() : device(Device::open(options())) {
        if (!cuda()) {
            return;
        }
        library_ = dlopen("libcuda.so", RTLD_NOW);
        library_ = library_ == nullptr ? dlopen("libcuda.so.1", RTLD_NOW) : library_;
        EXPECT_NE(library_, nullptr) << dlerror();
        void* context = nullptr;
        EXPECT_EQ(call<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0), 0);
        EXPECT_EQ(call<int(void*)>("cuCtxSetCurrent")(context), 0);
        for (void*& stream : streams_) {
            EXPECT_EQ(call<int(void**, unsigned)>("cuStreamCreate")(&stream, 1), 0);
        }
    }
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;
    ~Machine() {
        for (void* const stream : streams_) {
            if (cuda()) {
                EXPECT_EQ(call<int(void*)>("cuStreamSynchronize")(stream), 0);
            }
        }
        device.trim();
        EXPECT_EQ(device.stats().physical_bytes, 0U);
        EXPECT_EQ(device.stats().reserved_bytes, 0U);
        if (cuda()) {
            for (void* const stream : streams_) {
                EXPECT_EQ(call<int(void*)>("cuStreamDestroy_v2")(stream), 0);
            }
            EXPECT_EQ(call<int(int)>("cuDevicePrimaryCtxRelease_v2")(0), 0);
        }
    }

    [[nodiscard]] bool cuda() const { return device.info().driver == VMMGRAPH_DRIVER_CUDA; }
    [[nodiscard]] std::uint64_t page() const { return device.info().granularity_bytes; }
    [[nodiscard]] void* stream(std::size_t which) const { return streams_[which]; }

    // Reads memory in stream order. The host driver is synchronous.
    [[nodiscard]] Bytes read(const void* at, std::size_t bytes, void* stream) const {
        Bytes found(bytes);
        if (cuda()) {
            const auto address = reinterpret_cast<std::uint64_t>(at);
            EXPECT_EQ((call<int(void*, std::uint64_t, std::size_t, void*)>("cuMemcpyDtoHAsync_v2")(
                          found.data(), address, bytes, stream)),
                      0);
            EXPECT_EQ(call<int(void*)>("cuStreamSynchronize")(stream), 0);
        } else {
            std::memcpy(found.data(), at, bytes);
        }
        return found;
    }

    void begin_capture(void* stream) const {
        EXPECT_EQ((call<int(void*, int)>("cuStreamBeginCapture_v2")(stream, 2)), 0);
    }
    void end_capture(void* stream) const {
        void* graph = nullptr;
        EXPECT_EQ((call<int(void*, void**)>("cuStreamEndCapture")(stream, &graph)), 0)
            << "the capture was spoilt";
        EXPECT_EQ(call<int(void*)>("cuGraphDestroy")(graph), 0);
    }

    // The stream's work since its capture began.
    struct Graph {
        explicit Graph(const Machine& on, void* stream) : machine(on) {
            EXPECT_EQ((machine.call<int(void*, void**)>("cuStreamEndCapture")(stream, &graph)), 0);
            EXPECT_EQ((machine.call<int(void**, void*, std::uint64_t)>(
                          "cuGraphInstantiateWithFlags")(&executable, graph, 0)),
                      0);
        }
        Graph(const Graph&) = delete;
        Graph& operator=(const Graph&) = delete;
        ~Graph() {
            EXPECT_EQ(machine.call<int(void*)>("cuGraphExecDestroy")(executable), 0);
            EXPECT_EQ(machine.call<int(void*)>("cuGraphDestroy")(graph), 0);
        }
        void launch(void* stream) const {
            EXPECT_EQ((machine.call<int(void*, void*)>("cuGraphLaunch")(executable, stream)), 0);
        }

        const Machine& machine;
        void* graph = nullptr;
        void* executable = nullptr;
    };

    void copy(void* to, const void* from, std::size_t bytes, void* stream) const {
        const auto number = [](const void* at) { return reinterpret_cast<std::uint64_t>(at); };
        EXPECT_EQ((call<int(std::uint64_t, std::uint64_t, std::size_t, void*)>(
                      "cuMemcpyDtoDAsync_v2")(number(to), number(from), bytes, stream)),
                  0);
    }

    Device device;

    template <class Function>
    [[nodiscard]] Function* call(const char* name) const {
        void* const found = dlsym(library_, name);
        EXPECT_NE(found, nullptr) << name;
        return reinterpret_cast<Function*>(found);
    }

private:
    static vmmgraph::DeviceOptions options() {
        const char* const wanted = std::getenv("VMMGRAPH_DRIVER");
        return wanted != nullptr && std::strcmp(wanted, "cuda") == 0
                   ? vmmgraph::DeviceOptions{vmmgraph::DriverChoice::cuda, 0, 0, 0, 0}
                   : host::device_options(3);
    }

    void* library_ = nullptr;
    std::array<void*, 2> streams_{reinterpret_cast<void*>(0xa0), reinterpret_cast<void*>(0xb0)};
};

Bytes pattern(std::size_t unit, int version, std::size_t bytes) {
    Bytes made(bytes);
    for (std::size_t at = 0; at < bytes; ++at) {
        made[at] = static_cast<unsigned char>(at * 7 ^ unit * 31 ^
                                              static_cast<std::size_t>(version) * 101);
    }
    return made;
}

// A ring, a source per unit, and the sources' contents.
struct Model {
    Model(const Machine& on, const std::vector<RingUnit>& of, const RingOptions& options)
        : machine(on), units(of), ring(on.device, of, options) {
        for (std::size_t unit = 0; unit < units.size(); ++unit) {
            sources.emplace_back(machine.device, units[unit].bytes);
            versions.push_back(0);
            write(unit);
            ring.set_source(unit, sources[unit]);
        }
    }

    [[nodiscard]] Bytes expected(std::size_t unit) const {
        return pattern(unit, versions[unit], static_cast<std::size_t>(units[unit].bytes));
    }
    void write(std::size_t unit) {
        const Bytes bytes = expected(unit);
        sources[unit].write(0, bytes.data(), bytes.size());
    }
    [[nodiscard]] Bytes use(std::size_t unit, void* stream) {
        const UnitScope scope(ring, unit, stream);
        EXPECT_EQ(scope.address(), ring.address(unit));
        return machine.read(scope.address(), static_cast<std::size_t>(units[unit].bytes), stream);
    }
    void step(void* stream) {
        for (std::size_t unit = 0; unit < units.size(); ++unit) {
            EXPECT_EQ(use(unit, stream), expected(unit)) << "unit " << unit;
        }
    }

    const Machine& machine;
    std::vector<RingUnit> units;
    Ring ring;
    std::vector<HostBuffer> sources;
    std::vector<int> versions;
};

std::vector<RingUnit> mixed(std::uint64_t page, std::size_t count = 9) {
    std::vector<RingUnit> units;
    for (std::size_t unit = 0; unit < count; ++unit) {
        units.push_back({page * (1 + unit % 2) - unit * 11, unit == 3});
    }
    return units;
}

RingOptions slots(std::size_t count) {
    RingOptions options;
    options.name = "layers";
    options.slots = count;
    return options;
}

template <class Body>
vmmgraph_status_t status_of(Body&& body) {
    try {
        body();
    } catch (const vmmgraph::Error& error) {
        return error.status();
    }
    return VMMGRAPH_OK;
}

TEST(Ring, StepsOnTwoStreamsFindEveryUnitAtItsOwnAddress) {
    const Machine machine;
    Model model(machine, mixed(machine.page()), slots(2));
    std::vector<void*> addresses;
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
        addresses.push_back(model.ring.address(unit));
        for (std::size_t other = 0; other < unit; ++other) {
            EXPECT_NE(addresses[unit], addresses[other]);
        }
    }
    EXPECT_EQ(model.ring.prime(), 3U);
    EXPECT_EQ(model.ring.prime(), 0U);
    for (int step = 0; step < 4; ++step) {
        // Ordered by the ring's own marks only.
        model.step(machine.stream(static_cast<std::size_t>(step) % 2));
    }
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
        EXPECT_EQ(model.ring.address(unit), addresses[unit]);
    }
    const auto stats = model.ring.stats();
    EXPECT_EQ(stats.acquires, 36U);
    EXPECT_EQ(stats.acquired + stats.filled_late + stats.ahead_failed + stats.aborts, 0U);
    EXPECT_EQ(stats.device_bytes, 6 * machine.page())
        << "two slots of two pages, and the resident unit";
    EXPECT_EQ(stats.charged_bytes, stats.device_bytes);
    // Streamed units per step, two ahead, the resident unit once.
    EXPECT_EQ(stats.copies, 4 * 8 + 2 + 1U);
    EXPECT_EQ(stats.filled_ahead, stats.copies);
    EXPECT_EQ(stats.units, 9U);
    EXPECT_EQ(stats.streamed, 8U);
    EXPECT_EQ(stats.slots, 2U);
    EXPECT_EQ(stats.page_bytes, 2 * machine.page())
        << "as long as the longest unit: that takes no more";
    EXPECT_EQ(stats.reserved_bytes, 18 * machine.page()) << "a page a unit";
    EXPECT_EQ(stats.budget_bytes, 0U);
}

TEST(Ring, AUnitsMemoryIsThatOfItsSlot) {
    const Machine machine;
    Model model(machine, std::vector<RingUnit>(6, {machine.page()}), slots(2));
    const auto schedule = model.ring.schedule();
    EXPECT_EQ(schedule.slots, 2U);
    EXPECT_EQ(schedule.streamed, 6U);
    EXPECT_EQ(model.ring.stats().device_bytes, 2 * machine.page());
    void* const stream = machine.stream(0);
    for (std::size_t unit = 0; unit < 6; ++unit) {
        EXPECT_EQ(schedule.places[unit].place, unit % 2);
        EXPECT_EQ(schedule.places[unit].turn, unit);
        EXPECT_EQ(model.use(unit, stream), model.expected(unit));
    }
    const UnitScope scope(model.ring, 2, stream);
    for (const std::size_t other : {0U, 4U}) {
        EXPECT_EQ(machine.read(model.ring.address(other), 64, stream),
                  machine.read(scope.address(), 64, stream));
        EXPECT_EQ(status_of([&] { const UnitScope refused(model.ring, other, machine.stream(1)); }),
                  VMMGRAPH_ERROR_WRONG_STATE);
    }
    EXPECT_EQ(model.ring.stats().acquired, 1U)
        << "a scope that never began has released another's unit";
}

TEST(Ring, AStepThatAnExceptionEndsLeavesARingThatWorks) {
    const Machine machine;
    Model model(machine, mixed(machine.page()), slots(2));
    void* const stream = machine.stream(0);
    try {
        const UnitScope first(model.ring, 0, stream);
        const UnitScope second(model.ring, 1, stream);
        EXPECT_EQ(model.ring.stats().acquired, 2U);
        throw std::runtime_error("in the step");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(model.ring.stats().acquired, 0U);
    EXPECT_EQ(model.ring.stats().aborts, 0U);
    model.step(machine.stream(1));
    {
        // Code with only the ring may abort it.
        const UnitScope lost(model.ring, 4, stream);
        const auto before = model.ring.stats();
        model.ring.abort();
        EXPECT_EQ(model.ring.stats().acquired, 0U);
        EXPECT_EQ(model.ring.stats().aborts, before.aborts + 1);
    }
    EXPECT_EQ(model.ring.stats().aborts, 1U);
    {
        UnitScope early(model.ring, 0, stream);
        early.release();
        model.ring.acquire(0, stream);
    }
    EXPECT_EQ(model.ring.stats().acquired, 1U) << "a scope that was over has released another's";
    model.ring.abort();
    const auto copied = model.ring.stats().copied_bytes;
    model.step(stream);
    std::uint64_t all = 0;
    for (const RingUnit& unit : model.units) {
        all += unit.bytes;
    }
    EXPECT_GE(model.ring.stats().copied_bytes - copied, all)
        << "nothing that was held counts any more";
}

TEST(Ring, ASourceThatChangesIsReadFromTheNextAcquireOn) {
    const Machine machine;
    Model model(machine, mixed(machine.page()), slots(2));
    void* const stream = machine.stream(0);
    model.step(stream);
    for (const std::size_t unit : {1U, 3U}) {
        ++model.versions[unit];
        model.write(unit);
    }
    // Pointer writes must be reported.
    ++model.versions[5];
    const Bytes bytes = model.expected(5);
    model.sources[5].wait();
    std::memcpy(model.sources[5].data(), bytes.data(), bytes.size());
    model.sources[5].changed();
    model.step(machine.stream(1));
    // A replaced buffer is freed at once.
    {
        const UnitScope scope(model.ring, 0, stream);
        const Bytes before = model.expected(0);
        ++model.versions[0];
        HostBuffer other(machine.device, model.units[0].bytes);
        std::swap(model.sources[0], other);
        model.write(0);
        model.ring.set_source(0, model.sources[0]);
        EXPECT_EQ(machine.read(scope.address(), before.size(), stream), before);
    }
    model.step(stream);
    model.sources.clear();
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
        EXPECT_EQ(model.use(unit, stream), model.expected(unit));
    }
}

TEST(Ring, RunsThatLieTogetherAreOneCopy) {
    const Machine machine;
    Ring ring(machine.device, std::vector<RingUnit>(4, {machine.page()}), slots(2));
    HostBuffer buffer(machine.device, machine.page());
    const Bytes bytes = pattern(1, 2, 400);
    buffer.write(0, bytes.data(), bytes.size());
    ring.set_source(
        0, {HostRun{buffer, 100, 100, 50}, HostRun{buffer, 0, 0, 100}, HostRun{buffer, 7, 150, 0}});
    ring.set_source(1, {HostRun{buffer, 200, 0, 50}, HostRun{buffer, 0, 50, 100}});
    EXPECT_EQ(ring.stats().copies, 0U);
    void* const stream = machine.stream(0);
    {
        const UnitScope scope(ring, 0, stream);
        EXPECT_EQ(ring.stats().copies, 1 + 2U) << "the next unit is copied ahead";
        EXPECT_EQ(machine.read(scope.address(), 150, stream),
                  Bytes(bytes.begin(), bytes.begin() + 150));
    }
    const UnitScope scope(ring, 1, stream);
    EXPECT_EQ(machine.read(scope.address(), 50, stream),
              Bytes(bytes.begin() + 200, bytes.begin() + 250));
    Bytes found(50);
    buffer.read(200, found.data(), found.size());
    EXPECT_EQ(found, Bytes(bytes.begin() + 200, bytes.begin() + 250));
    // An empty source leaves the slot's contents.
    ring.set_source(2, std::vector<HostRun>{});
    EXPECT_EQ(ring.stats().copied_bytes, 150U + 150U);
}

TEST(Ring, ARingInUseGoesWithoutAWait) {
    const Machine machine;
    auto model = std::make_unique<Model>(machine, mixed(machine.page()), slots(2));
    void* const stream = machine.stream(0);
    model->step(stream);
    model->ring.acquire(0, stream);
    model->sources.clear();
    model.reset();
    Model next(machine, mixed(machine.page()), slots(2));
    next.step(machine.stream(1));
}

TEST(Ring, AStreamUnderCaptureIsRefusedAndItsCaptureGoesOn) {
    const Machine machine;
    if (!machine.cuda()) {
        return;
    }
    Model model(machine, mixed(machine.page()), slots(2));
    void* const captured = machine.stream(0);
    machine.begin_capture(captured);
    EXPECT_EQ(status_of([&] { model.ring.acquire(0, captured); }), VMMGRAPH_ERROR_STREAM_CAPTURING);
    EXPECT_EQ(model.use(0, machine.stream(1)), model.expected(0));
    machine.end_capture(captured);
    {
        UnitScope scope(model.ring, 0, captured);
        machine.begin_capture(captured);
        EXPECT_EQ(status_of([&] { scope.release(); }), VMMGRAPH_ERROR_STREAM_CAPTURING);
        EXPECT_EQ(model.ring.stats().acquired, 1U);
        // Aborts the ring. The slot stays blocked until the stream can be queried.
    }
    EXPECT_EQ(model.ring.stats().aborts, 1U);
    EXPECT_EQ(status_of([&] { model.ring.acquire(0, machine.stream(1)); }),
              VMMGRAPH_ERROR_STREAM_CAPTURING);
    machine.end_capture(captured);
    model.step(machine.stream(1));
    UnitScope scope(model.ring, 0, captured);
    scope.release();
    EXPECT_EQ(model.ring.stats().acquired, 0U);
}

TEST(Ring, AStepInAGraphReadsWhatItsSourcesAreThen) {
    const Machine machine;
    if (!machine.cuda()) {
        return;
    }
    Model model(machine, mixed(machine.page()), slots(2));
    // Receives the reads.
    const Ring found(machine.device,
                     std::vector<RingUnit>(model.units.size(), {2 * machine.page(), true}));
    void* const stream = machine.stream(0);
    EXPECT_EQ(status_of([&] { model.ring.capture_begin(stream); }), VMMGRAPH_ERROR_WRONG_STATE);
    machine.begin_capture(stream);
    model.ring.capture_begin(stream, {1, 2});
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
        const UnitScope scope(model.ring, unit, stream);
        machine.copy(found.address(unit), scope.address(),
                     static_cast<std::size_t>(model.units[unit].bytes), stream);
    }
    std::optional<vmmgraph::RingGraph> step(model.ring.capture_end(stream));
    EXPECT_EQ(status_of([&] { static_cast<void>(model.ring.capture_end(stream)); }),
              VMMGRAPH_ERROR_WRONG_STATE);
    {
        const Machine::Graph graph(machine, stream);
        EXPECT_EQ(step->copies(), 16U) << "two for each unit that streams";
        const auto right = [&] {
            step->launch(graph.executable, stream, [&] { graph.launch(stream); });
            for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
                EXPECT_EQ(machine.read(found.address(unit),
                                       static_cast<std::size_t>(model.units[unit].bytes), stream),
                          model.expected(unit));
            }
        };
        right();
        model.versions[4] = 1;
        model.write(4);
        right();
        model.step(machine.stream(1));
        right();
        // An exception cancels the launch and propagates.
        EXPECT_THROW(
            step->launch(graph.executable, stream, [&] { throw std::runtime_error("launch"); }),
            std::runtime_error);
        EXPECT_EQ(model.ring.stats().launches, 3U);
        EXPECT_EQ(status_of([&] {
                      step->launch(graph.executable, stream,
                                   [&] { model.sources[0].write(0, "x", 1); });
                  }),
                  VMMGRAPH_ERROR_WRONG_STATE)
            << "host memory is not written while a launch that reads it is given";
        EXPECT_EQ(status_of([&] { step->launch(nullptr, stream, [] {}); }),
                  VMMGRAPH_ERROR_NULL_ARGUMENT);
        EXPECT_EQ(vmmgraph_ring_graph_leave(step->handle(), stream, 1), VMMGRAPH_ERROR_WRONG_STATE);
        right();
        step.reset();
    }
    machine.begin_capture(stream);
    model.ring.capture_begin(stream);
    model.ring.capture_abandon();
    EXPECT_EQ(status_of([&] { model.ring.acquire(0, stream); }), VMMGRAPH_ERROR_STREAM_CAPTURING);
    void* graph = nullptr;
    static_cast<void>((machine.call<int(void*, void**)>("cuStreamEndCapture")(stream, &graph)));
    model.step(stream);
}

TEST(Ring, WhatIsRefusedChangesNothing) {
    const Machine machine;
    const std::vector<RingUnit> units(7, {machine.page()});
    auto options = slots(3);
    options.budget_bytes = 3 * machine.page();
    EXPECT_THROW(Ring(machine.device, units, options), vmmgraph::OutOfMemory);
    const std::vector<RingUnit> long_ones(6, {machine.device.info().total_bytes});
    EXPECT_EQ(status_of([&] { const Ring refused(machine.device, long_ones); }),
              VMMGRAPH_ERROR_OUT_OF_MEMORY);
    options.remainder = vmmgraph::Remainder::refuse;
    options.budget_bytes = 0;
    EXPECT_EQ(status_of([&] { const Ring refused(machine.device, units, options); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(machine.device.stats().reserved_bytes, 0U);
    options.remainder = vmmgraph::Remainder::keep_resident;
    options.budget_bytes = 4 * machine.page();
    options.page_bytes = machine.page();
    options.within_step = true;
    Model model(machine, units, options);
    EXPECT_EQ(model.ring.schedule().kept_resident, 1U);
    EXPECT_EQ(model.ring.schedule().places[3].turn, vmmgraph::RingSchedule::resident);
    EXPECT_EQ(model.ring.stats().budget_bytes, 4 * machine.page());
    const HostBuffer& source = model.sources[0];
    for (const HostRun& run :
         {HostRun{source, 1, 0, machine.page()}, HostRun{source, 0, 1, machine.page()},
          HostRun{source, ~std::uint64_t{0}, 0, 2}, HostRun{source, 0, ~std::uint64_t{0}, 2}}) {
        EXPECT_EQ(status_of([&] { model.ring.set_source(0, {run}); }),
                  VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    EXPECT_EQ(status_of([&] { model.ring.release(0, nullptr); }), VMMGRAPH_ERROR_WRONG_STATE);
    EXPECT_EQ(status_of([&] { static_cast<void>(model.ring.address(7)); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    model.step(machine.stream(0));
    model.step(machine.stream(0));
    EXPECT_EQ(model.ring.stats().filled_late, 2 + 1U)
        << "within a step the first one is always late, and the resident one once";
}

TEST(Ring, HostBuffersSayWhatTheyAreAndOwnersMove) {
    const Machine machine;
    HostBuffer buffer(machine.device, 1000, Pinning::preferred);
    EXPECT_EQ(buffer.bytes(), 1000U);
    EXPECT_TRUE(buffer.registered());
    void* const at = buffer.data();
    HostBuffer moved(std::move(buffer));
    EXPECT_EQ(moved.data(), at);
    EXPECT_EQ(status_of([&] { buffer.changed(); }), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { moved.write(999, "ab", 2); }), VMMGRAPH_ERROR_INVALID_SIZE);
    Ring ring(machine.device, {{100}, {100}, {100}, {100}}, slots(2));
    Ring other(std::move(ring));
    EXPECT_EQ(status_of([&] { ring.abort(); }), VMMGRAPH_ERROR_INVALID_HANDLE);
    EXPECT_EQ(status_of([&] { other.acquire(0, nullptr); }), VMMGRAPH_ERROR_WRONG_STATE)
        << "it has no source";
    ring = std::move(other);
    ring.abort();
    EXPECT_EQ(ring.stats().aborts, 1U);
}

constexpr std::uint64_t layer = std::uint64_t{128} << 20;

vmmgraph::RingDemand demand(std::size_t count) {
    vmmgraph::RingDemand demand;
    demand.units.assign(count, {layer});
    demand.link_gib_per_second = 51.5;
    demand.compute_seconds = 5.4e-3;
    return demand;
}

TEST(Rings, WhatIsOnTheDeviceBecomesASource) {
    const Machine machine;
    Model model(machine, mixed(machine.page(), 6), slots(2));
    const std::size_t unit = 2;
    const auto bytes = static_cast<std::size_t>(model.units[unit].bytes);
    // Device memory at a fixed address.
    Ring made(machine.device, {{model.units[unit].bytes, true}});
    HostBuffer contents(machine.device, bytes);
    const Bytes other = pattern(unit, 5, bytes);
    contents.write(0, other.data(), bytes);
    made.set_source(0, contents);
    model.step(machine.stream(0));
    {
        const UnitScope scope(made, 0, machine.stream(0));
        model.sources[unit].store(0, scope.address(), bytes, machine.stream(0));
    }
    model.sources[unit].before(machine.stream(1));
    model.versions[unit] = 5;
    model.step(machine.stream(0));
    Bytes found(bytes);
    model.sources[unit].read(0, found.data(), bytes);
    EXPECT_EQ(found, other);
    if (machine.cuda()) {
        machine.begin_capture(machine.stream(1));
        EXPECT_EQ(status_of([&] {
                      model.sources[unit].store(0, made.address(0), bytes, machine.stream(1));
                  }),
                  VMMGRAPH_ERROR_STREAM_CAPTURING);
        EXPECT_EQ(status_of([&] { model.sources[unit].before(machine.stream(1)); }),
                  VMMGRAPH_ERROR_STREAM_CAPTURING);
        machine.end_capture(machine.stream(1));
    }
    for (void* const stream : {machine.stream(0), machine.stream(1)}) {
        EXPECT_EQ(model.use(unit, stream), other);
    }
}

// Nothing is logged if the link speed is unknown.
TEST(RingPlan, TheCeilingIsLoggedBeforeARingIsBuilt) {
    const Machine machine;
    std::vector<std::string> lines;
    vmmgraph::set_log_sink(
        [&](vmmgraph::LogLevel, std::string_view line) { lines.emplace_back(line); });
    const auto with = [&](const char* word) {
        std::vector<std::size_t> found;
        for (std::size_t i = 0; i < lines.size(); ++i) {
            if (lines[i].find(word) != std::string::npos) {
                found.push_back(i);
            }
        }
        return found;
    };
    const std::vector<RingUnit> units(7, {machine.page()});
    RingOptions options;
    {
        const Ring unknown(machine.device, units, options);
    }
    EXPECT_TRUE(with("at best").empty());
    EXPECT_EQ(with("step_bytes").size(), 1U) << "what a step copies is known all the same";
    lines.clear();
    options.link_gib_per_second = 50;
    options.compute_seconds = 1e-3;
    {
        const Ring ring(machine.device, units, options);
    }
    const auto said = with("at best: ");
    const auto made = with("ring made");
    vmmgraph::RingDemand demand;
    demand.units = units;
    demand.page_bytes = machine.page();
    demand.link_gib_per_second = 50;
    demand.compute_seconds = 1e-3;
    const auto text = vmmgraph::ring_ceiling_text(demand);
    EXPECT_EQ(said.size(), static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')))
        << text;
    ASSERT_EQ(made.size(), 1U);
    EXPECT_LT(said.back(), made.front());
    EXPECT_NE(lines[said[1]].find("not as asked: units [3] stay resident"), std::string::npos)
        << lines[said[1]];
    lines.clear();
    options.compute_seconds = -1;
    EXPECT_EQ(status_of([&] { static_cast<void>(Ring(machine.device, units, options)); }),
              VMMGRAPH_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(with("ring made").empty());
    vmmgraph::set_log_sink({});
}

TEST(RingPlan, WhatIsOtherwiseThanAskedIsInTheNumbersAndInTheText) {
    auto few = demand(36);
    few.budget_bytes = 2 * layer;
    const std::string text = vmmgraph::ring_ceiling_text(few);
    EXPECT_NE(text.find("not as asked: 2 slots instead of 3"), std::string::npos) << text;
    EXPECT_NE(text.find("tokens/s at best, bound by the link"), std::string::npos) << text;
    few.budget_bytes = layer - 1;
    EXPECT_EQ(status_of([&] { static_cast<void>(vmmgraph::ring_ceiling_text(few)); }),
              VMMGRAPH_ERROR_INVALID_SIZE);
    auto prime = demand(61);
    prime.slots = 4;
    EXPECT_GT(vmmgraph::ring_ceiling_text(prime).size(), 1000U)
        << "a text longer than the first buffer";
}

}  // namespace
