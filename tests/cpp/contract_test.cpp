// Type guarantees, and every member of vmmgraph.hpp instantiated once. Built as C++17 and C++20,
// with and without RTTI.
#include <type_traits>
#include <vmmgraph/vmmgraph.hpp>

namespace {

template <class T>
constexpr bool owner =
    !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
    std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T> &&
    std::is_nothrow_destructible_v<T> && sizeof(T) == sizeof(void*);

static_assert(owner<vmmgraph::Device>);
static_assert(owner<vmmgraph::SharedVmmAllocator>);
static_assert(owner<vmmgraph::Space>);
static_assert(!std::is_default_constructible_v<vmmgraph::Space> &&
              !std::is_default_constructible_v<vmmgraph::Device>);
static_assert(!std::is_convertible_v<int, vmmgraph::SharedVmmAllocator>, "a number is no arena");
static_assert(std::is_base_of_v<vmmgraph::Error, vmmgraph::OutOfMemory>);
static_assert(std::is_base_of_v<std::runtime_error, vmmgraph::Error>);
static_assert(std::is_nothrow_copy_constructible_v<vmmgraph::Error>, "it is thrown");

static_assert(static_cast<int>(vmmgraph::LogLevel::trace) == VMMGRAPH_LOG_TRACE);
static_assert(static_cast<int>(vmmgraph::Retain::shared_pages) == VMMGRAPH_RETAIN_SHARED_PAGES);
static_assert(static_cast<int>(vmmgraph::Retain::in_place) == VMMGRAPH_RETAIN_IN_PLACE);
static_assert(static_cast<int>(vmmgraph::DriverChoice::host) == VMMGRAPH_DRIVER_HOST);

int failures = 0;
void expect(bool holds) { failures += holds ? 0 : 1; }

}  // namespace

int main() {
    vmmgraph::Options options;
    options.driver = vmmgraph::DriverChoice::host;
    auto device = vmmgraph::Device::open({vmmgraph::DriverChoice::host, 1, 0, 0, 0});
    expect(device.info().device == 1);
    device.set_budget(64 << 20);
    expect(device.stats().budget_bytes == 64 << 20);
    expect(device.handle() != nullptr);
    expect(!vmmgraph::version().empty());

    vmmgraph::set_log_sink([](vmmgraph::LogLevel, std::string_view) {});
    vmmgraph::set_log_sink({}, vmmgraph::LogLevel::off);

    vmmgraph::SharedVmmAllocator first(0, options);
    vmmgraph::SharedVmmAllocator arena(device);
    expect(arena.is_initialized() && arena.handle() != nullptr);
    arena.switch_to_new_virtual_space();
    void* block = arena.allocate(1000);
    expect(arena.current_offset() == 1024 && arena.high_water_mark() == 1024);
    expect(arena.mapped_size() > 0 && arena.reserved_size() > 0 && arena.stats().blocks == 1);
    arena.deallocate(block);
    expect(!arena.stats_json().empty());
    arena.mark();
    expect(arena.current_offset() == 1024);
    expect(arena.trim() == 0 && device.trim() == 0);

    vmmgraph::Space space = arena.open_space();
    block = space.allocate(2000);
    space.record_stream(block, nullptr);
    arena.trace_events(true);
    const std::string map = arena.map_json({"contract", 1 << 20});
    expect(!vmmgraph::map_html(map).empty() && !vmmgraph::map_report(map).empty() &&
           !vmmgraph::map_perfetto(map).empty());
    space.set_label("decode 64");
    expect(space.label() == "decode 64");
    expect(space.live_blocks().size() == 1 && space.stats().blocks == 1 &&
           space.handle() != nullptr);
    space.free(block);
    block = space.allocate_kept(3000, nullptr);
    expect(arena.stats().kept_bytes >= 3072);
    space.free(block);
    expect(space.seal(vmmgraph::Retain::own_pages).retained_blocks == 0);
    int launched = 0;
    space.replay(nullptr, [&] { ++launched; });
    expect(launched == 1);

    bool caught = false;
    try {
        static_cast<void>(space.allocate(1));
    } catch (const vmmgraph::OutOfMemory&) {
        expect(false);
    } catch (const vmmgraph::Error& error) {
        caught =
            error.status() == VMMGRAPH_ERROR_WRONG_STATE && error.info().status == error.status();
    }
    expect(caught);
    return failures;
}
