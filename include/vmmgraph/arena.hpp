// Arenas and spaces for C++17. Conventions as in vmmgraph.hpp.

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

// What an arena holds.
using ArenaStats = vmmgraph_arena_stats_t;
// What a space uses.
using SpaceStats = vmmgraph_space_stats_t;
// What a capture used.
using SealReport = vmmgraph_seal_report_t;
using Output = vmmgraph_output_t;
using Difference = vmmgraph_difference_t;

// What becomes of blocks that are live when their capture ends.
enum class Retain : std::int32_t {
    // As the arena's options say; in those: own_pages.
    inherit = VMMGRAPH_RETAIN_DEFAULT,
    // They move to pages of their own: other graphs never touch them.
    own_pages = VMMGRAPH_RETAIN_OWN_PAGES,
    // They stay on shared pages: the next replay of another graph may overwrite them.
    shared_pages = VMMGRAPH_RETAIN_SHARED_PAGES,
    // Their pages become the space's own as they are, and none is exchanged for another; where another space, or another part of this one,
    // shows such a page, the seal throws (VMMGRAPH_ERROR_WRONG_STATE). For captures of whose pages somebody else has taken hold.
    in_place = VMMGRAPH_RETAIN_IN_PLACE,
    // As own_pages, but for remote blocks, which stay where they are, on shared pages: the next replay of another graph may overwrite them. For
    // peers that were told of their pages during the capture.
    shared_remote = VMMGRAPH_RETAIN_SHARED_REMOTE,
};

// How to make an arena. 0 is the default of every number.
struct ArenaOptions {
    // Bytes of a small page, a power of two; 0: 2 MiB, or the device's granularity if that is larger.
    std::uint64_t small_page_bytes = 0;
    // Bytes of a large page, a multiple of the small one; 0: as expected_bytes says.
    std::uint64_t large_page_bytes = 0;
    // What seal() does with live blocks unless it is told otherwise.
    Retain retain = Retain::inherit;
    // Fills the shared pages of a space before each of its replays, so that a graph which relies on what is left there shows. Also on
    // with VMMGRAPH_POISON=1 in the environment. For finding bugs: it costs time.
    bool poison = false;
    // Blocks remember when and by which call stack they were allocated (Space::blocks_json). Also on with VMMGRAPH_TRACE_BLOCKS=1.
    bool trace_blocks = false;
    // Replays and eager scopes on another stream or another thread than the first one's are refused (VMMGRAPH_ERROR_WRONG_STATE) before
    // anything of them is prepared or recorded, until SharedVmmAllocator::lift_serial(). For ranks that work together: the waits between
    // streams that order an arena's replays can deadlock ranks that replay in different orders.
    bool serial = false;
    // Each replay is noted, for ranks to compare what they launched (order.hpp). Also on with VMMGRAPH_CHECK_ORDER=1 in the environment.
    bool check_order = false;
    // The most bytes of physical memory the arena may hold; 0: no limit but the device's. See SharedVmmAllocator::set_budget.
    std::uint64_t arena_budget_bytes = 0;
    // Bytes of addresses that the current space (SharedVmmAllocator::allocate) has from its beginning on; 0: addresses are reserved as
    // they are needed. Rounded up to what the device reserves in; more is reserved when those are used up.
    std::uint64_t reserve_bytes = 0;
    // About how many bytes the hungriest graph has live at once, which says how large the large pages are: the largest power of two
    // that is at most a forty-eighth of it, but no less than a small page and no more than 16 MiB; 32 MiB from 8 GiB on. 0: not known,
    // 16 MiB or the small page's bytes, whichever is larger. Larger pages take fewer driver calls, smaller ones waste less where they end.
    std::uint64_t expected_bytes = 0;
    // Other devices that may read and write the arena's pages, added up: 1 << n for device n, below 64; the arena's own counts for nothing.
    // Every map costs more for each. For programs that use several devices in one process. Throws for a device without peer access.
    std::uint64_t peers = 0;
    // As peers, for the pages of remote and exclusive blocks only: all that other devices read of a collective. What else the arena maps costs no more
    // then.
    std::uint64_t remote_peers = 0;
    // Bytes that it is sure to get, out of the device's budget: so much of what it has is never lent (lease.hpp) either.
    std::uint64_t least_bytes = 0;
    // What vmmgraph::pause and vmmgraph::resume (region.hpp) find the arena by; empty: only when they are asked for everything.
    std::string tag;
    // The account that its own is below: Account::handle() of the same device; null: the device's.
    vmmgraph_account_t account = nullptr;
};

// How to make an arena together with its device. 0 is the default of every number.
struct Options : ArenaOptions {
    DriverChoice driver = DriverChoice::automatic;
    // As in DeviceOptions: this budget is the device's, arena_budget_bytes the arena's.
    std::uint64_t budget_bytes = 0;
    std::uint64_t host_granularity_bytes = 0;
    std::uint64_t host_memory_bytes = 0;
};

// What a page map says that the library does not know.
struct MapOptions {
    // A line for people: which engine, which rank.
    std::string title;
    // What the graphs' executables took of the device, which is outside every pool; 0: not known.
    std::uint64_t executables_bytes = 0;
};

// A web page of a map, given as the text of SharedVmmAllocator::map_json(): one file that fetches nothing. Needs no device. Throws for
// what is no map, or one of another format.
[[nodiscard]] inline std::string map_html(const std::string& map) {
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_map_html(map.c_str(), buffer, capacity, needed));
    });
}

// A map as a table of plain text that fits a log. As map_html() beyond that.
[[nodiscard]] inline std::string map_report(const std::string& map) {
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_map_report(map.c_str(), buffer, capacity, needed));
    });
}

// The captures of a map as a timeline that Perfetto opens. As map_html() beyond that.
[[nodiscard]] inline std::string map_perfetto(const std::string& map) {
    return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
        detail::check(vmmgraph_map_perfetto(map.c_str(), buffer, capacity, needed));
    });
}

namespace detail {

// Gives `use` a C function and its argument that call `launch()`; what `launch` throws waits until `use` is done, since nothing may
// unwind through the library.
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

// A space: the addresses of one capture over the pages of its arena, which stay while the space does.
//
// The destructor does not block: what no live block of a torch allocator lies on (vmmgraph/torch.hpp) is unmapped once the arena's
// replays so far are done. Its graph must be gone by then, or never be launched again, and work that was launched in any other way than
// by replay() must be done.
class Space {
public:
    // Allocates a block of at least `bytes` for work on `stream`, aligned to 512 bytes, with undefined contents. The stream may be
    // under capture. The space owns the block; free it or let it be retained.
    [[nodiscard]] void* allocate(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_space_allocate(handle(), bytes, stream, &block));
        return block;
    }

    // As allocate(), for a block that the caller will keep when the capture ends: an output, a workspace. The kept blocks of all spaces
    // of the arena lie packed on common pages, each on bytes of its own that no other block has until it is freed and the space is
    // gone; so a few KiB do not cost a page. Not for what passes: its bytes would serve nobody else.
    [[nodiscard]] void* allocate_kept(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_space_allocate_kept(handle(), bytes, stream, &block));
        return block;
    }

    // As allocate(), for a block that peers use too: a buffer of a captured collective, which other devices or processes read and write by what they were
    // told of its page, by export_range (share.hpp) or by a library that registers what it meets in the capture. It lies on one page, or, if it is longer
    // than a large page, on whole ones (its bytes are rounded up to those); beside it lie remote blocks of the same stream only. So a seal exchanges no
    // page that a peer knows, and eager work and leases take none of them from the seal on. Other graphs share them as any page. Free it before the
    // seal: one that is live then is treated as the policy says and counted in the report's remote_blocks. Throws in a bump space.
    [[nodiscard]] void* allocate_remote(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_space_allocate_remote(handle(), bytes, stream, &block));
        return block;
    }

    // Frees a block. Before the seal its pages serve the next block of the same stream; afterwards a retained block's pages return
    // to the arena, once the streams noted for it have passed. Throws for null, for what is no live block of this space, and for a
    // second free.
    void free(void* block) { detail::check(vmmgraph_space_free(handle(), block)); }

    // Notes that `stream` uses the block as well. During the capture: once freed, it stays busy until the seal. After it: once freed,
    // its bytes are nobody else's before what `stream` was given until then is done; the stream must exist until the block is freed
    // or the space is gone.
    void record_stream(void* block, void* stream) { detail::check(vmmgraph_space_record_stream(handle(), block, stream)); }

    // Ends the capture; what it used. Blocks that are still live are treated as `retain` says. On failure the space is open as
    // before, and the call can be repeated.
    SealReport seal(Retain retain = Retain::inherit) {
        auto report = detail::sized<SealReport>();
        detail::check(vmmgraph_space_seal(handle(), static_cast<std::int32_t>(retain), &report));
        return report;
    }

    // Calls `launch()`, which gives the space's graph to `stream`, on this thread and in order after every earlier replay of the
    // arena. An exception of `launch` arrives at the caller; the stream counts as used then. No lock is held meanwhile: `launch` may
    // call the library, but a replay, a mark, a trim or a new space of this arena throws. A stream under capture is refused
    // (VMMGRAPH_ERROR_STREAM_CAPTURING), the one of the last replay too.
    template <class F>
    void replay(void* stream, F&& launch) {
        detail::with_launch(
            launch, [&](vmmgraph_launch_fn trampoline, void* call) { return vmmgraph_space_replay(handle(), stream, trampoline, call); });
    }

    // Replays twice over shared pages filled with one pattern and then another, and compares the outputs to the bit: found is 1 in what
    // it returns if one depends on what was there before. `launch` must give the same work to `stream` both times, over inputs that it
    // leaves as they were, without random numbers; the outputs are device memory of the caller. Waits for the device.
    template <class F>
    [[nodiscard]] Difference verify(void* stream, const std::vector<Output>& outputs, F&& launch) {
        auto difference = detail::sized<Difference>();
        detail::with_launch(launch, [&](vmmgraph_launch_fn trampoline, void* call) {
            return vmmgraph_space_verify(handle(), stream, outputs.data(), outputs.size(), trampoline, call, &difference);
        });
        return difference;
    }

    // Names the space after the shape that it is for ("decode 64"): in statistics, log lines, the message of what fails for lack of
    // memory, and on the page map. The text, 1024 bytes at most, is copied; an empty one takes the name away.
    void set_label(const std::string& label) const { detail::check(vmmgraph_space_set_label(handle(), label.c_str())); }

    // Says where in the program the capture is ("model.cpp:120"), for the page map. The text, 1024 bytes at most, is copied; an empty one
    // takes it away.
    void set_site(const std::string& site) const { detail::check(vmmgraph_space_set_site(handle(), site.c_str())); }

    // What ranks know the space's replays by where they compare them (order.hpp); 0, as at first: its layout_hash. For spaces whose ranks
    // differ in their blocks and not in what they run, for bump spaces, and for several graphs over one space, each with a key of its own
    // set before it is replayed.
    void set_order_key(std::uint64_t key) { detail::check(vmmgraph_space_set_order_key(handle(), key)); }

    // What set_label() was given last; empty if nothing.
    [[nodiscard]] std::string label() const {
        return detail::read_text([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_space_label(handle(), buffer, capacity, needed));
        });
    }

    // What the space uses now.
    [[nodiscard]] SpaceStats stats() const {
        auto stats = detail::sized<SpaceStats>();
        detail::check(vmmgraph_space_stats(handle(), &stats));
        return stats;
    }

    // The blocks that are live now as a JSON array, by address: address, bytes, which allocation of the space it was, and with
    // trace_blocks its age and call stack.
    [[nodiscard]] std::string blocks_json() const {
        return detail::read_text([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_space_blocks_json(handle(), buffer, capacity, needed));
        });
    }

    // Blocks until the arena's replays so far are done, this space's among them. Destroying a space does not wait.
    void wait() { detail::check(vmmgraph_space_wait(handle())); }

    // Puts a mark behind the arena's replays so far, so that the stream of the last one may be destroyed. Costs a record, and the next
    // replay a wait, on that stream too.
    void mark() { detail::check(vmmgraph_space_mark(handle())); }

    // The blocks that are live now, in address order: after the seal, those that were retained and not freed since.
    [[nodiscard]] std::vector<void*> live_blocks() const {
        std::vector<void*> blocks;
        std::size_t count = 0;
        do {
            blocks.resize(count);
            detail::check(vmmgraph_space_live_blocks(handle(), blocks.data(), blocks.size(), &count));
        } while (count > blocks.size());
        blocks.resize(count);
        return blocks;
    }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_space_t handle() const noexcept { return handle_.get(); }

private:
    friend class SharedVmmAllocator;
    explicit Space(vmmgraph_space_t handle) noexcept : handle_(handle) {}

    detail::Owned<vmmgraph_space_t, vmmgraph_space_destroy> handle_;
};

// An arena: physical pages on one device, shared by graphs that never run at the same time.
//
// New code opens a Space for each capture. Engines whose captures are strictly serial may call switch_to_new_virtual_space,
// allocate and deallocate instead, which work on one current space. Spaces may outlive the arena.
class SharedVmmAllocator {
public:
    // Opens device `device` and makes an arena on it, which keeps the device open.
    explicit SharedVmmAllocator(int device = 0, const Options& options = {})
        : SharedVmmAllocator(
              Device::open({options.driver, device, options.budget_bytes, options.host_granularity_bytes, options.host_memory_bytes}),
              options) {}

    // Makes an arena on a device, which it keeps open. Throws for page sizes that do not fit the device.
    explicit SharedVmmAllocator(const Device& device, const ArenaOptions& options = {}) {
        auto given = detail::sized<vmmgraph_arena_options_t>();
        given.small_page_bytes = options.small_page_bytes;
        given.large_page_bytes = options.large_page_bytes;
        given.retain = static_cast<std::int32_t>(options.retain);
        given.flags = (options.poison ? VMMGRAPH_ARENA_POISON : 0) | (options.trace_blocks ? VMMGRAPH_ARENA_TRACE_BLOCKS : 0) |
                      (options.serial ? VMMGRAPH_ARENA_SERIAL : 0) | (options.check_order ? VMMGRAPH_ARENA_CHECK_ORDER : 0);
        given.budget_bytes = options.arena_budget_bytes;
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

    // Takes over an arena's C handle, which the object destroys from now on.
    [[nodiscard]] static SharedVmmAllocator adopt(vmmgraph_arena_t handle) noexcept { return SharedVmmAllocator(Owned(handle)); }
    // Gives the C handle up to the caller, who destroys it; the object is one that was moved from.
    [[nodiscard]] vmmgraph_arena_t release() noexcept { return handle_.release(); }

    // Opens a space for a capture. No memory is taken before its first block. If replays came since the last mark, this marks them,
    // so that the stream of the last replay may be captured; whatever that stream's state is, it does not fail because of it.
    [[nodiscard]] Space open_space() {
        vmmgraph_space_t space = nullptr;
        detail::check(vmmgraph_space_open(handle(), &space));
        return Space(space);
    }

    // Opens a bump space for a capture: its blocks lie behind one another and none of their addresses serves twice. For the
    // segments of a torch MemPool. Its seal leaves live blocks on shared pages; sealing it with Retain::own_pages throws.
    [[nodiscard]] Space open_bump_space() {
        vmmgraph_space_t space = nullptr;
        detail::check(vmmgraph_space_open_bump(handle(), &space));
        return Space(space);
    }

    // Gives back to the driver what nobody uses, on the whole device: waits for the arena's replays launched so far and for what is gone
    // but was still used, and gives back the device's free pages; their bytes. As Device::trim beyond that.
    std::size_t trim() {
        std::uint64_t released = 0;
        detail::check(vmmgraph_arena_trim(handle(), &released));
        return static_cast<std::size_t>(released);
    }

    // Limits the bytes of physical memory that the arena's pages take: shared ones, those of its spaces, and those of kept and exclusive blocks; 0:
    // no limit but the device's. Nothing is taken away: with less than is held, every page that is missing throws OutOfMemory until
    // enough spaces went. Exact with any number of threads. Pages that no space maps do not count: they are the device's, and whoever
    // asks next gets them. Before an allocation or a seal fails it waits a moment for what only waits for the device.
    void set_budget(std::uint64_t bytes) { detail::check(vmmgraph_arena_set_budget(handle(), bytes)); }

    // Orders everything replayed so far for good: the stream of the last replay may be captured or destroyed afterwards.
    void mark() { detail::check(vmmgraph_arena_mark(handle())); }

    // Seals the current space, if there is one, and opens the next. Blocks of earlier spaces stay valid as long as the arena.
    void switch_to_new_virtual_space() { detail::check(vmmgraph_arena_switch_to_new_virtual_space(handle())); }

    // Allocates in the current space, opening one if there is none. As Space::allocate.
    [[nodiscard]] void* allocate(std::size_t bytes, void* stream = nullptr) {
        void* block = nullptr;
        detail::check(vmmgraph_arena_allocate(handle(), bytes, stream, &block));
        return block;
    }

    // Frees a block of the current space or of one before it. As Space::free.
    void deallocate(void* block) { detail::check(vmmgraph_arena_deallocate(handle(), block)); }

    // Allocates an exclusive block: one page of its own, mapped at addresses of its own until it is freed or the arena and all its spaces are gone. No graph
    // shares it, nothing else lies on it, poison does not fill it, and no seal, lending, eager work or pause moves it. For what peers write without
    // waiting for this device, and for what keeps its contents from replay to replay: workspaces, signal pads, windows that a library registers. It is
    // zero when this returns, for any stream and any peer: waits for one fill. Address and bytes, rounded up, are multiples of `granularity`, a power of
    // two (0: a small page). Before a capture, rather than in one. It counts toward the arena's budget.
    [[nodiscard]] void* allocate_exclusive(std::size_t bytes, std::uint64_t granularity = 0) {
        void* block = nullptr;
        detail::check(vmmgraph_arena_allocate_exclusive(handle(), bytes, granularity, &block));
        return block;
    }

    // Frees an exclusive block. Its memory goes behind the arena's replays so far; other work that uses it is over by now, and peers have closed it, or it
    // stays theirs. Throws for what is none, or none any more.
    void free_exclusive(void* block) { detail::check(vmmgraph_arena_free_exclusive(handle(), block)); }

    // The most bytes that any one space has needed: handed out in one of these, live at once in one of open_space().
    [[nodiscard]] std::size_t high_water_mark() const { return static_cast<std::size_t>(stats().high_water_bytes); }

    // Where the next block of the current space goes, in bytes from its beginning: what was allocated there, freed or not; 0 behind
    // a switch.
    [[nodiscard]] std::size_t current_offset() const { return static_cast<std::size_t>(stats().current_offset_bytes); }

    // Bytes of physical memory the arena holds: shared, retained, kept and exclusive pages.
    [[nodiscard]] std::size_t mapped_size() const { return static_cast<std::size_t>(stats().physical_bytes); }

    // Bytes of addresses reserved in all spaces; reserve_bytes at least, if those were asked for.
    [[nodiscard]] std::size_t reserved_size() const { return static_cast<std::size_t>(stats().reserved_bytes); }

    // Whether there is an arena behind this object that can be used: not if it was moved from, and not if an internal error of the
    // library closed it.
    [[nodiscard]] bool is_initialized() const noexcept {
        auto stats = detail::sized<ArenaStats>();
        return vmmgraph_arena_stats(handle(), &stats) == VMMGRAPH_OK && stats.closed == 0;
    }

    // What the arena holds now.
    [[nodiscard]] ArenaStats stats() const {
        auto stats = detail::sized<ArenaStats>();
        detail::check(vmmgraph_arena_stats(handle(), &stats));
        return stats;
    }

    // How many replays of the arena were launched, eager scopes among them: the same on ranks that replay alike. Inside a launch it is the
    // number of that replay.
    [[nodiscard]] std::uint64_t replay_seq() const {
        std::uint64_t replays = 0;
        detail::check(vmmgraph_arena_replay_seq(handle(), &replays));
        return replays;
    }

    // Lets the next replay of an arena with `serial` say anew on which stream and thread all later ones have to be: when a warm-up is over,
    // or the thread that launches hands over to another. Waits for the end of a replay or scope that another thread is at; throws inside
    // one of this thread. Without effect in an arena that is not serial.
    void lift_serial() { detail::check(vmmgraph_arena_lift_serial(handle())); }

    // The arena, its spaces, their blocks and the device's pages as one JSON object.
    [[nodiscard]] std::string stats_json() const {
        return detail::read_text([this](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_arena_stats_json(handle(), buffer, capacity, needed));
        });
    }

    // Which space shows which page, what blocks covered at each one's peak, what dropping one gives back, and who else has memory of the
    // device, as one JSON object (docs/map.md). Asks every space and walks the device's pages; nothing is stopped for it.
    [[nodiscard]] std::string map_json(const MapOptions& options = {}) const {
        auto given = detail::sized<vmmgraph_map_options_t>();
        given.executables_bytes = options.executables_bytes;
        given.title = options.title.c_str();
        return detail::read_text([&](char* buffer, std::size_t capacity, std::size_t* needed) {
            detail::check(vmmgraph_arena_map_json(handle(), &given, buffer, capacity, needed));
        });
    }

    // Writes the map as a web page: one file that fetches nothing, to be opened in any browser. Throws std::system_error if the file
    // cannot be written.
    void save_map(const std::string& path, const MapOptions& options = {}) const {
        const std::string page = vmmgraph::map_html(map_json(options));
        // What the system says of it, where the standard library leaves that.
        errno = 0;
        std::ofstream file(path, std::ios::binary | std::ios::trunc);
        file.write(page.data(), static_cast<std::streamsize>(page.size())).flush();
        if (!file) {
            throw std::system_error(errno != 0 ? errno : EIO, std::generic_category(), "vmmgraph: cannot write " + path);
        }
    }

    // Spaces that are opened from now on note every block that comes and goes, or do not, for the map's view of one capture. Costs host
    // memory for every block, as long as the space is there.
    void trace_events(bool on) { detail::check(vmmgraph_arena_trace_events(handle(), on ? 1 : 0)); }

    // The C handle, still owned by this object; null if moved from.
    [[nodiscard]] vmmgraph_arena_t handle() const noexcept { return handle_.get(); }

private:
    using Owned = detail::Owned<vmmgraph_arena_t, vmmgraph_arena_destroy>;
    explicit SharedVmmAllocator(Owned handle) noexcept : handle_(std::move(handle)) {}

    Owned handle_;
};

}  // namespace vmmgraph

#endif  // VMMGRAPH_ARENA_HPP
