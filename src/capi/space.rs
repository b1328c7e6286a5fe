use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::arena::{self, policy_number, retain_of, stream_of, vmmgraph_arena_t};
use super::guard::{Failure, guard, guard_closing, null, out};
use super::handle::{get, register, remove};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use super::text::{copy_text, text};
use crate::{Address, Phase, Space};

pub struct vmmgraph_space {
    _private: (),
}

/// Space: the addresses of one capture.
pub type vmmgraph_space_t = *mut vmmgraph_space;

/// Capture in progress: blocks may be allocated.
pub const VMMGRAPH_SPACE_OPEN: i32 = 0;
/// Capture complete: the graph may be replayed.
pub const VMMGRAPH_SPACE_SEALED: i32 = 1;
/// A failed driver call could not be undone: the space can only be destroyed.
pub const VMMGRAPH_SPACE_BROKEN: i32 = 2;
/// The graph is destroyed; only mappings under live blocks are left.
pub const VMMGRAPH_SPACE_RETIRED: i32 = 3;

/// Launches a graph. May call any function, except (VMMGRAPH_ERROR_WRONG_STATE) a replay, mark,
/// trim or opening of a space in the same arena, and a replay in another arena which would wait for
/// this one.
pub type vmmgraph_launch_fn = Option<unsafe extern "C" fn(user: *mut c_void)>;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_seal_report_t {
    pub struct_size: usize,
    pub peak_live_bytes: u64,
    /// Shared pages mapped in the space.
    pub small_pages: u64,
    pub large_pages: u64,
    pub maps: u64,
    /// Pages which became private to the space.
    pub retained_bytes: u64,
    /// Blocks live after the seal.
    pub retained_blocks: u64,
    /// Reserve, create, map, set access and unmap.
    pub driver_calls: u64,
    /// Nanoseconds spent in driver calls, including waits for other spaces.
    pub driver_ns: u64,
    /// Blocks allocated in total.
    pub allocations: u64,
    /// Hash of page sizes, page numbers by address, place and bytes of every block in order,
    /// live-out blocks, policy. Equal requests give equal hashes in any process and after any
    /// earlier captures, so ranks can compare captures. Places of persistent (kept) blocks do not
    /// count. In a bump space, the arena's earlier bump pages count from the second address range
    /// on.
    pub layout_hash: u64,
    /// Live peer-visible (remote) blocks. If 0, the seal replaced no page which such a block uses
    /// or used. Otherwise, with VMMGRAPH_RETAIN_OWN_PAGES, their pages and neighbours may be new:
    /// tell peers the pages after the seal.
    pub remote_blocks: u64,
    pub remote_bytes: u64,
    /// Estimated device memory of the executables of the capture's graphs. Set for captures by
    /// VmmGraph for libtorch, or by torch 2.8 and later in a graph group with borrowing graphs;
    /// else 0.
    pub executable_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_space_stats_t {
    pub struct_size: usize,
    /// Unique in the process.
    pub id: u64,
    /// One of VMMGRAPH_SPACE_*.
    pub phase: i32,
    /// Default policy of the seal, VMMGRAPH_RETAIN_*.
    pub retain: i32,
    pub blocks: u64,
    /// Each block is rounded up to 512.
    pub live_bytes: u64,
    pub peak_live_bytes: u64,
    pub reserved_bytes: u64,
    /// A page mapped n times counts n times.
    pub mapped_bytes: u64,
    /// Pages private to the space.
    pub retained_bytes: u64,
    pub maps: u64,
}

/// A panic closes the space's arena.
pub(super) fn with(
    space: vmmgraph_space_t,
    body: impl FnOnce(&Arc<Space>) -> Result<(), Failure>,
) -> vmmgraph_status_t {
    let close = || {
        if let Ok(space) = get::<Space, _>(space) {
            space.close_arena();
        }
    };
    guard_closing(close, || {
        let space = get(space)?;
        let result = body(&space);
        space.check_page_tables();
        result
    })
}

/// Opens a space for a capture. The space keeps the arena's pages, also after the arena is
/// destroyed. Records an event after the arena's replays so far, so their stream may be captured; a
/// stream already under capture is no error. VMMGRAPH_ERROR_WRONG_STATE while the arena is paused
/// and inside a launch of the arena.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_open(
    arena: vmmgraph_arena_t,
    space: *mut vmmgraph_space_t,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: contract.
        let space = unsafe { out(space, "space") }?;
        *space = register(arena.open_space()?);
        Ok(())
    })
}

/// Opens a bump space for a capture: blocks are placed one after another, and no address is reused,
/// as for the segments of a torch MemPool. The seal leaves live blocks on shared pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_open_bump(
    arena: vmmgraph_arena_t,
    space: *mut vmmgraph_space_t,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: contract.
        let space = unsafe { out(space, "space") }?;
        *space = register(arena.open_bump_space()?);
        Ok(())
    })
}

/// Sets the label of a space ("decode 64") for statistics, log lines, out-of-memory messages and
/// the page map. Empty: none. VMMGRAPH_ERROR_INVALID_SIZE beyond 1024 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_set_label(
    space: vmmgraph_space_t,
    label: *const c_char,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let label = unsafe { text(label, "label") }?;
        Ok(space.set_label(&label)?)
    })
}

/// As vmmgraph_space_set_label, the source location of a capture ("model.cpp:120") for the page
/// map.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_set_site(
    space: vmmgraph_space_t,
    site: *const c_char,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let site = unsafe { text(site, "site") }?;
        Ok(space.set_site(&site)?)
    })
}

/// Copies the label of a space; empty if none is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_label(
    space: vmmgraph_space_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        unsafe { copy_text(&space.label().unwrap_or_default(), buffer, capacity, needed) };
        Ok(())
    })
}

/// Destroys the space without blocking. The graph must be destroyed, or never launched again. Work
/// launched other than through vmmgraph_space_replay or vmmgraph_space_enter must be complete. The
/// space is unmapped after the arena's replays so far: by a later destroy or trim, or an allocation
/// short of memory. Pages under blocks still owned by torch tensors stay until the tensors are
/// freed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_destroy(space: vmmgraph_space_t) -> vmmgraph_status_t {
    guard(|| remove::<Space, _>(space).map(drop))
}

/// Allocates a block of at least `bytes` bytes for work on `stream`, aligned to 512 bytes, with
/// undefined contents. `stream` may be under capture. VMMGRAPH_ERROR_WRONG_STATE unless the space
/// is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_allocate(
    space: vmmgraph_space_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let block = unsafe { out(block, "block") }?;
        *block = space.allocate(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// As vmmgraph_space_allocate, for a persistent (kept) block, used after the capture: an output or
/// a workspace. Such blocks share pages, so a few KiB do not cost a page. No other block gets their
/// bytes before the block is freed and its space destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_allocate_kept(
    space: vmmgraph_space_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let block = unsafe { out(block, "block") }?;
        *block = space.allocate_kept(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// As vmmgraph_space_allocate, for a peer-visible (remote) block: a buffer of a captured
/// collective, read and written by other devices or processes. Peers learn its page from
/// vmmgraph_space_export, or from a library which registers the buffers of a capture. The block
/// lies on one page; a longer block is rounded up to whole large pages. Only peer-visible blocks of
/// the same stream share these pages. A seal which replaces pages under local live-out blocks
/// replaces none of these. After the seal, the pages are neither lent nor given to eager work.
/// Other graphs share them: peer access must end with the replay. Free the block before the seal: a
/// live block is treated by the policy and counted in the report. VMMGRAPH_ERROR_WRONG_STATE in a
/// bump space.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_allocate_remote(
    space: vmmgraph_space_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let block = unsafe { out(block, "block") }?;
        *block = space.allocate_remote(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// Frees a block. Before the seal, the next block of the same stream reuses its pages. After the
/// seal, pages of a live-out block return to the arena once the work on its recorded streams is
/// complete. The addresses stay mapped, since the graph writes there.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_free(space: vmmgraph_space_t, block: *mut c_void) -> vmmgraph_status_t {
    with(space, |space| Ok(space.free(Address(block as u64))?))
}

/// Records use of the block on another stream, which must exist until the block is freed or its
/// space destroyed. If freed before the seal, the block stays unavailable until the seal; if later,
/// its bytes are reused only after the work submitted to `stream` by then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_record_stream(
    space: vmmgraph_space_t,
    block: *mut c_void,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| Ok(space.record_stream(Address(block as u64), stream_of(stream))?))
}

/// Ends the capture. `retain`, VMMGRAPH_RETAIN_*, decides about live blocks; a bump space accepts
/// only _DEFAULT and _SHARED_PAGES. VMMGRAPH_ERROR_WRONG_STATE if a page pinned for other processes
/// would be replaced. After a failure the space is still open, and the call can be repeated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_seal(
    space: vmmgraph_space_t,
    retain: i32,
    report: *mut vmmgraph_seal_report_t,
) -> vmmgraph_status_t {
    with(space, |space| {
        let policy = retain_of(retain)?;
        // SAFETY: contract.
        let report = unsafe { OutStruct::optional(report, "report") }?;
        let sealed = match policy {
            Some(policy) => space.seal_with(policy)?,
            None => space.seal()?,
        };
        if let Some(report) = report {
            report.write(vmmgraph_seal_report_t {
                struct_size: report.struct_size,
                peak_live_bytes: sealed.peak_live_bytes,
                small_pages: sealed.small_pages,
                large_pages: sealed.large_pages,
                maps: sealed.maps,
                retained_bytes: sealed.retained_bytes,
                retained_blocks: sealed.retained.len() as u64,
                driver_calls: sealed.driver_calls,
                driver_ns: sealed.driver_time.as_nanos() as u64,
                allocations: sealed.allocations,
                layout_hash: sealed.layout_hash,
                remote_blocks: sealed.remote_blocks,
                remote_bytes: sealed.remote_bytes,
                executable_bytes: 0,
            });
        }
        Ok(())
    })
}

/// Blocks until the arena's replays launched so far are complete: memory used by the graph may then
/// be freed. Destroying the space does not wait. VMMGRAPH_ERROR_STREAM_CAPTURING if the unmarked
/// stream of the last replay is under capture.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_wait(space: vmmgraph_space_t) -> vmmgraph_status_t {
    with(space, |space| Ok(space.wait()?))
}

/// Records an event after the arena's replays so far: the stream of the last replay may be
/// destroyed afterwards. Costs one event record, and an event wait in the next replay even on this
/// stream. vmmgraph_arena_mark also covers streams recorded for freed blocks.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_mark(space: vmmgraph_space_t) -> vmmgraph_status_t {
    with(space, |space| Ok(space.mark()?))
}

/// Calls `launch(user)`, which submits the space's graph to `stream`, ordered after every earlier
/// replay of the arena, on any stream and thread. On the stream of the last replay the call costs
/// one driver query; on another, also an event wait. VMMGRAPH_ERROR_WRONG_STATE unless the space is
/// sealed, while the arena is paused, and while pages of the space are on lease (see
/// vmmgraph_arena_set_recall). VMMGRAPH_ERROR_STREAM_CAPTURING if `stream` is under capture; the
/// capture continues. After a failure `launch` was not called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_replay(
    space: vmmgraph_space_t,
    stream: *mut c_void,
    launch: vmmgraph_launch_fn,
    user: *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        let launch = launch.ok_or_else(|| null("launch"))?;
        // SAFETY: contract.
        Ok(space.replay(stream_of(stream), || unsafe { launch(user) })?)
    })
}

/// Begins a replay without a callback, for callers with a lock of their own, such as language
/// runtimes: work which this thread submits to `stream` until vmmgraph_space_leave is ordered as in
/// vmmgraph_space_replay. Other replays of the arena wait until then, so always leave, except after
/// a failure. Errors as vmmgraph_space_replay.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_enter(space: vmmgraph_space_t, stream: *mut c_void) -> vmmgraph_status_t {
    with(space, |space| Ok(space.enter(stream_of(stream))?))
}

/// Ends this thread's replay. VMMGRAPH_ERROR_WRONG_STATE without vmmgraph_space_enter.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_leave(space: vmmgraph_space_t) -> vmmgraph_status_t {
    with(space, |space| Ok(space.leave()?))
}

/// Copies the addresses of live blocks in address order; after the seal, of live-out blocks not yet
/// freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_live_blocks(
    space: vmmgraph_space_t,
    blocks: *mut *mut c_void,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let count = unsafe { out(count, "count") }?;
        if capacity > 0 {
            // SAFETY: null, or writable, since `capacity` is not 0.
            unsafe { out(blocks, "blocks") }?;
        }
        let live = space.live_blocks();
        for (index, block) in live.iter().take(capacity).enumerate() {
            // SAFETY: `index` < `capacity`, the caller's room.
            unsafe { *blocks.add(index) = block.0 as *mut c_void };
        }
        *count = live.len();
        Ok(())
    })
}

/// Writes the space's statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_stats(
    space: vmmgraph_space_t,
    stats: *mut vmmgraph_space_stats_t,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = space.stats();
        stats.write(vmmgraph_space_stats_t {
            struct_size: stats.struct_size,
            id: now.id,
            phase: match now.phase {
                Phase::Open => VMMGRAPH_SPACE_OPEN,
                Phase::Sealed => VMMGRAPH_SPACE_SEALED,
                Phase::Broken => VMMGRAPH_SPACE_BROKEN,
                Phase::Retired => VMMGRAPH_SPACE_RETIRED,
            },
            retain: policy_number(now.retain),
            blocks: now.blocks,
            live_bytes: now.live_bytes,
            peak_live_bytes: now.peak_live_bytes,
            reserved_bytes: now.reserved_bytes,
            mapped_bytes: now.mapped_bytes,
            retained_bytes: now.retained_bytes,
            maps: now.maps,
        });
        Ok(())
    })
}
