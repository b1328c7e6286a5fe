// Arenas and spaces for C++17. Conventions: vmmgraph.hpp.

#ifndef VMMGRAPH_ARENA_HPP
#define VMMGRAPH_ARENA_HPP

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "device.hpp"

namespace vmmgraph {

// Statistics of an arena.
using ArenaStats = vmmgraph_arena_stats_t;
// Statistics of a space.
using SpaceStats = vmmgraph_space_stats_t;
// Memory and driver calls of one capture.
using SealReport = vmmgraph_seal_report_t;
using Output = vmmgraph_output_t;
using Difference = vmmgraph_difference_t;

// Policy for live-out (retained) blocks: blocks still live at the seal.
enum class Retain : std::int32_t {
    // The arena's policy. In ArenaOptions: own_pages.
    inherit = VMMGRAPH_RETAIN_DEFAULT,
    // Moves the blocks to pages which no other graph touches.
    own_pages = VMMGRAPH_RETAIN_OWN_PAGES,
    // Leaves the blocks on shared pages.
    shared_pages = VMMGRAPH_RETAIN_SHARED_PAGES,
    // See VMMGRAPH_RETAIN_IN_PLACE.
    in_place = VMMGRAPH_RETAIN_IN_PLACE,
    // See VMMGRAPH_RETAIN_SHARED_REMOTE.
    shared_remote = VMMGRAPH_RETAIN_SHARED_REMOTE,
};

// Options of an arena; 0 is the default of every number. See vmmgraph_arena_options_t.
struct ArenaOptions {
    // Bytes of a small page, a power of two; 0: 2 MiB, or the device's granularity if larger.
    std::uint64_t small_page_bytes = 0;
    // Bytes of a large page, a multiple of the small page; 0: chosen from expected_bytes, 16 MiB if
    // unknown. A budget below one large page refuses all but small blocks.
    std::uint64_t large_page_bytes = 0;
    // Default policy of seal().
    Retain retain = Retain::inherit;
    // Fills shared pages before each replay, to expose graphs which read leftover bytes. Also on
    // with VMMGRAPH_POISON=1.
    bool poison = false;
    // Records time and call stack of each allocation (Space::blocks_json). Also on with
    // VMMGRAPH_TRACE_BLOCKS=1.
    bool trace_blocks = false;
    // See VMMGRAPH_ARENA_SERIAL.
    bool serial = false;
    // See SharedVmmAllocator::set_budget.
    std::uint64_t budget_bytes = 0;
    // Bytes of addresses reserved for the current space (SharedVmmAllocator::allocate); 0: on
    // demand.
    std::uint64_t reserve_bytes = 0;
    // Estimated peak of live bytes in the largest graph, which selects the large page size; 0:
    // unknown.
    std::uint64_t expected_bytes = 0;
    // Devices with access to the arena's pages: 1 << n for device n, added up. See
    // vmmgraph_arena_options_t.
    std::uint64_t peers = 0;
    // As peers, only for pages of peer-visible (remote) and private (exclusive) blocks.
    std::uint64_t remote_peers = 0;
    // Guaranteed bytes out of the device's budget, which the arena never lends (lease.hpp).
    std::uint64_t least_bytes = 0;
    // For vmmgraph::pause and vmmgraph::resume (region.hpp).
    std::string tag;
    // Parent account, Account::handle() of the same device; null: the device's account.
    vmmgraph_account_t account = nullptr;
};

// Options of an arena together with its device; 0 is the default of every number.
struct Options : ArenaOptions {
    DriverChoice driver = DriverChoice::automatic;
    // Limit of the device's physical memory, over all its arenas: DeviceOptions::budget_bytes.
    std::uint64_t device_budget_bytes = 0;
    std::uint64_t host_granularity_bytes = 0;
    std::uint64_t host_memory_bytes = 0;
};

// Facts for a page map which the library does not know.
struct MapOptions {
    // Title line: engine, rank.
    std::string title;
    // Device memory of the graphs' executables, outside every pool, in bytes; 0: unknown.
    std::uint64_t executables_bytes = 0;
};

// Renders a map, the text of SharedVmmAllocator::map_json(), as one self-contained web page.
[[nodiscard]] inline std::string map_html(const std::string& map) {
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_map_html(map.c_str(), buffer, capacity, needed));
    });
}

// As map_html(), but a plain-text table for logs.
[[nodiscard]] inline std::string map_report(const std::string& map) {
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_map_report(map.c_str(), buffer, capacity, needed));
    });
}

// As map_html(), but a timeline of the captures for Perfetto.
[[nodiscard]] inline std::string map_perfetto(const std::string& map) {
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_map_perfetto(map.c_str(), buffer, capacity, needed));
    });
}

namespace detail {

// Passes `use` a C function and its argument, which call `launch()`. Rethrows an exception of
// `launch` after `use`.
template <class Launch, class Use>
void with_launch(Launch& launch, Use&& use) {
    static_assert(std::is_invocable_v<Launch&>, "launch is called without arguments");
    struct Call {
        Launch* launch;
        std::exception_ptr thrown;
    } call{std::addressof(launch), nullptr};
    const vmmgraph_launch_fn trampoline = [](void* user) noexcept {
        auto* const self = static_cast<Call*>(user);
        try {
            static_cast<void>(std::invoke(*self->launch));
        } catch (...) {
            self->thrown = std::current_exception();
        }
    };
    const vmmgraph_status_t status = use(trampoline, &call);
    if (call.thrown) {
        std::rethrow_exception(std::move(call.thrown));
    }
    check(status);
}

}  // namespace detail

// A space: the addresses of one capture over pages of its arena, which the space keeps alive. The
// destructor does not block: see vmmgraph_space_destroy().
class Space {
public:
    // Allocates at least `bytes` for work on `stream`. See vmmgraph_space_allocate().
    [[nodiscard]] void* allocate(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_space_allocate(handle(), bytes, stream, &block));
        return block;
    }

    // As allocate(), for a persistent (kept) block, which outlives the capture. See
    // vmmgraph_space_allocate_kept().
    [[nodiscard]] void* allocate_kept(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_space_allocate_kept(handle(), bytes, stream, &block));
        return block;
    }

    // As allocate(), for a peer-visible (remote) block. See vmmgraph_space_allocate_remote().
    [[nodiscard]] void* allocate_remote(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_space_allocate_remote(handle(), bytes, stream, &block));
        return block;
    }

    // Frees a block. See vmmgraph_space_free().
    void free(void* block) { detail::check(vmmgraph_space_free(handle(), block)); }

    // Records that `stream` uses the block. See vmmgraph_space_record_stream().
    void record_stream(void* block, void* stream) {
        detail::check(vmmgraph_space_record_stream(handle(), block, stream));
    }

    // Ends the capture. See vmmgraph_space_seal().
    SealReport seal(Retain retain = Retain::inherit) {
        auto report = detail::sized<SealReport>();
        detail::check(vmmgraph_space_seal(handle(), static_cast<std::int32_t>(retain), &report));
        return report;
    }

    // Calls `launch()` on this thread to launch the graph on `stream`, ordered after every earlier
    // replay of the arena. An exception of `launch` reaches the caller; the stream then counts as
    // used. See vmmgraph_space_replay().
    template <class F>
    void replay(void* stream, F&& launch) {
        detail::with_launch(launch, [&](vmmgraph_launch_fn trampoline, void* call) {
            return vmmgraph_space_replay(handle(), stream, trampoline, call);
        });
    }

    // Replays twice over differently filled shared pages; `found` is 1 if an output depends on
    // leftover bytes. See vmmgraph_space_verify().
    template <class F>
    [[nodiscard]] Difference verify(void* stream, const std::vector<Output>& outputs, F&& launch) {
        auto difference = detail::sized<Difference>();
        detail::with_launch(launch, [&](vmmgraph_launch_fn trampoline, void* call) {
            return vmmgraph_space_verify(handle(), stream, outputs.data(), outputs.size(),
                                         trampoline, call, &difference);
        });
        return difference;
    }

    // Names the space ("decode 64"). See vmmgraph_space_set_label().
    void set_label(const std::string& label) const {
        detail::check(vmmgraph_space_set_label(handle(), label.c_str()));
    }

    // Sets the capture's place in the program ("model.cpp:120"). See vmmgraph_space_set_site().
    void set_site(const std::string& site) const {
        detail::check(vmmgraph_space_set_site(handle(), site.c_str()));
    }

    // Returns the label; empty if none.
    [[nodiscard]] std::string label() const {
        return detail::read_text([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_space_label(handle(), buffer, capacity, needed));
        });
    }

    [[nodiscard]] SpaceStats stats() const {
        auto stats = detail::sized<SpaceStats>();
        detail::check(vmmgraph_space_stats(handle(), &stats));
        return stats;
    }

    // Returns the live blocks as a JSON array in address order. See vmmgraph_space_blocks_json().
    [[nodiscard]] std::string blocks_json() const {
        return detail::read_text([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_space_blocks_json(handle(), buffer, capacity, needed));
        });
    }

    // Blocks until the arena's replays so far are done.
    void wait() { detail::check(vmmgraph_space_wait(handle())); }

    // Marks the arena's replays so far. See vmmgraph_space_mark().
    void mark() { detail::check(vmmgraph_space_mark(handle())); }

    // Returns the live blocks in address order; after the seal, the retained ones.
    [[nodiscard]] std::vector<void*> live_blocks() const {
        std::vector<void*> blocks;
        std::size_t count = 0;
        do {
            blocks.resize(count);
            detail::check(
                vmmgraph_space_live_blocks(handle(), blocks.data(), blocks.size(), &count));
        } while (count > blocks.size());
        blocks.resize(count);
        return blocks;
    }

    [[nodiscard]] vmmgraph_space_t handle() const noexcept { return handle_.get(); }

private:
    friend class SharedVmmAllocator;
    explicit Space(vmmgraph_space_t handle) noexcept : handle_(handle) {}

    detail::Owned<vmmgraph_space_t, vmmgraph_space_destroy> handle_;
};

// An arena: physical pages of one device, shared by graphs which never run at the same time. Open a
// Space for each capture, or use one current space with strictly serial captures:
// switch_to_new_virtual_space(), allocate() and deallocate(). Spaces may outlive the arena.
class SharedVmmAllocator {
public:
    // Opens device `device` and creates an arena, which keeps the device open.
    explicit SharedVmmAllocator(int device = 0, const Options& options = {})
        : SharedVmmAllocator(
              Device::open({options.driver, device, options.device_budget_bytes,
                            options.host_granularity_bytes, options.host_memory_bytes}),
              options) {}

    // Creates an arena, which keeps the device open. Throws for page sizes the device cannot map.
    explicit SharedVmmAllocator(const Device& device, const ArenaOptions& options = {}) {
        auto given = detail::sized<vmmgraph_arena_options_t>();
        given.small_page_bytes = options.small_page_bytes;
        given.large_page_bytes = options.large_page_bytes;
        given.retain = static_cast<std::int32_t>(options.retain);
        given.flags = (options.poison ? VMMGRAPH_ARENA_POISON : 0) |
                      (options.trace_blocks ? VMMGRAPH_ARENA_TRACE_BLOCKS : 0) |
                      (options.serial ? VMMGRAPH_ARENA_SERIAL : 0);
        given.budget_bytes = options.budget_bytes;
        given.reserve_bytes = options.reserve_bytes;
        given.expected_bytes = options.expected_bytes;
        given.peers = options.peers;
        given.remote_peers = options.remote_peers;
        given.least_bytes = options.least_bytes;
        given.tag = options.tag.empty() ? nullptr : options.tag.c_str();
        given.account = options.account;
        vmmgraph_arena_t handle = nullptr;
        detail::check(vmmgraph_arena_create(device.handle(), &given, &handle));
        handle_ = Owned(handle);
    }

    // Takes ownership of an arena's C handle.
    [[nodiscard]] static SharedVmmAllocator adopt(vmmgraph_arena_t handle) noexcept {
        return SharedVmmAllocator(Owned(handle));
    }
    // Releases the C handle, which the caller must destroy. This object counts as moved from.
    [[nodiscard]] vmmgraph_arena_t release() noexcept { return handle_.release(); }

    // Opens a space for a capture. See vmmgraph_space_open().
    [[nodiscard]] Space open_space() {
        vmmgraph_space_t space = nullptr;
        detail::check(vmmgraph_space_open(handle(), &space));
        return Space(space);
    }

    // Opens a bump space, for the segments of a torch MemPool. See vmmgraph_space_open_bump().
    [[nodiscard]] Space open_bump_space() {
        vmmgraph_space_t space = nullptr;
        detail::check(vmmgraph_space_open_bump(handle(), &space));
        return Space(space);
    }

    // Returns unused memory to the driver, and its bytes. See vmmgraph_arena_trim().
    std::size_t trim() {
        std::uint64_t released = 0;
        detail::check(vmmgraph_arena_trim(handle(), &released));
        return static_cast<std::size_t>(released);
    }

    // Limits the arena's physical memory; 0: only the device's limit. See
    // vmmgraph_arena_set_budget().
    void set_budget(std::uint64_t bytes) {
        detail::check(vmmgraph_arena_set_budget(handle(), bytes));
    }

    // Marks all replays so far: the last replay's stream may then be captured or destroyed.
    void mark() { detail::check(vmmgraph_arena_mark(handle())); }

    // Seals the current space, if any, and opens the next. See
    // vmmgraph_arena_switch_to_new_virtual_space().
    void switch_to_new_virtual_space() {
        detail::check(vmmgraph_arena_switch_to_new_virtual_space(handle()));
    }

    // As Space::allocate, in the current space; opens one if none is open.
    [[nodiscard]] void* allocate(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_arena_allocate(handle(), bytes, stream, &block));
        return block;
    }

    // As Space::free, for a block of the current or an earlier space.
    void deallocate(void* block) { detail::check(vmmgraph_arena_deallocate(handle(), block)); }

    // Allocates a private (exclusive) block. See vmmgraph_arena_allocate_exclusive().
    [[nodiscard]] void* allocate_exclusive(std::size_t bytes, std::uint64_t granularity = 0) {
        void* block = nullptr;
        detail::check(vmmgraph_arena_allocate_exclusive(handle(), bytes, granularity, &block));
        return block;
    }

    // Frees a private (exclusive) block. See vmmgraph_arena_free_exclusive().
    void free_exclusive(void* block) {
        detail::check(vmmgraph_arena_free_exclusive(handle(), block));
    }

    // Returns the peak bytes of any one space: live at once, or handed out by a current space.
    [[nodiscard]] std::size_t high_water_mark() const {
        return static_cast<std::size_t>(stats().high_water_bytes);
    }

    // Returns the offset of the next block in the current space, in bytes; 0 after a switch.
    [[nodiscard]] std::size_t current_offset() const {
        return static_cast<std::size_t>(stats().current_offset_bytes);
    }

    // Returns the arena's physical memory in bytes: a page counts once, at however many addresses.
    [[nodiscard]] std::size_t mapped_size() const {
        return static_cast<std::size_t>(stats().physical_bytes);
    }

    // Returns the bytes of addresses reserved in all spaces; at least reserve_bytes.
    [[nodiscard]] std::size_t reserved_size() const {
        return static_cast<std::size_t>(stats().reserved_bytes);
    }

    // Returns false if the arena was moved from, or closed by an internal error.
    [[nodiscard]] bool is_initialized() const noexcept {
        auto stats = detail::sized<ArenaStats>();
        return vmmgraph_arena_stats(handle(), &stats) == VMMGRAPH_OK && stats.closed == 0;
    }

    [[nodiscard]] ArenaStats stats() const {
        auto stats = detail::sized<ArenaStats>();
        detail::check(vmmgraph_arena_stats(handle(), &stats));
        return stats;
    }

    // Returns the number of launched replays, eager scopes included. Inside a launch: the number of
    // this replay.
    [[nodiscard]] std::uint64_t replay_seq() const {
        std::uint64_t replays = 0;
        detail::check(vmmgraph_arena_replay_seq(handle(), &replays));
        return replays;
    }

    // Lets the next replay of a `serial` arena choose the stream and thread of all later ones. See
    // vmmgraph_arena_lift_serial().
    void lift_serial() { detail::check(vmmgraph_arena_lift_serial(handle())); }

    // Returns the arena, its spaces and blocks, and the device's pages as one JSON object.
    [[nodiscard]] std::string stats_json() const {
        return detail::read_text([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_arena_stats_json(handle(), buffer, capacity, needed));
        });
    }

    // Returns the page map as one JSON object (docs/map.md), without stopping other work. See
    // vmmgraph_arena_map_json().
    [[nodiscard]] std::string map_json(const MapOptions& options = {}) const {
        auto given = detail::sized<vmmgraph_map_options_t>();
        given.executables_bytes = options.executables_bytes;
        given.title = options.title.c_str();
        return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_arena_map_json(handle(), &given, buffer, capacity, needed));
        });
    }

    // Writes the map as one self-contained web page. Throws std::system_error if the file cannot be
    // written.
    void save_map(const std::string& path, const MapOptions& options = {}) const {
        const std::string page = vmmgraph::map_html(map_json(options));
        // Lets the error below carry the system's errno, if the standard library preserves one.
        errno = 0;
        std::ofstream file(path, std::ios::binary | std::ios::trunc);
        file.write(page.data(), static_cast<std::streamsize>(page.size())).flush();
        if (!file) {
            throw std::system_error(errno != 0 ? errno : EIO, std::generic_category(),
                                    "vmmgraph: cannot write " + path);
        }
    }

    // Turns on the recording of allocations and frees. See vmmgraph_arena_trace_events().
    void trace_events(bool on) { detail::check(vmmgraph_arena_trace_events(handle(), on ? 1 : 0)); }

    [[nodiscard]] vmmgraph_arena_t handle() const noexcept { return handle_.get(); }

private:
    using Owned = detail::Owned<vmmgraph_arena_t, vmmgraph_arena_destroy>;
    explicit SharedVmmAllocator(Owned handle) noexcept : handle_(std::move(handle)) {}

    Owned handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_ARENA_HPP
