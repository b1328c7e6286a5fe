//! Spaces.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::arena::{self, policy_number, retain_of, stream_of, vmmgraph_arena_t};
use super::guard::{Failure, guard, guard_closing, null, out};
use super::handle::{get, register, remove};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use super::text::{copy_text, text};
use crate::{Address, Phase, Space};

/// Never defined: a vmmgraph_space_t is a key, not an address.
pub struct vmmgraph_space {
    _private: (),
}

/// A space: the addresses of one capture. Calls with it are thread-safe.
pub type vmmgraph_space_t = *mut vmmgraph_space;

/// Being captured: blocks may be allocated.
pub const VMMGRAPH_SPACE_OPEN: i32 = 0;
/// Captured: it may be replayed.
pub const VMMGRAPH_SPACE_SEALED: i32 = 1;
/// Undoing a failed driver call failed as well: it can only be destroyed.
pub const VMMGRAPH_SPACE_BROKEN: i32 = 2;
/// Its graph is gone; only what lies under live blocks is left.
pub const VMMGRAPH_SPACE_RETIRED: i32 = 3;

/// Launches a graph. Must not throw. No lock is held meanwhile: it may call any function, but replaying, marking, trimming and opening
/// spaces in the same arena, and a replay in another one that would wait for this one, is VMMGRAPH_ERROR_WRONG_STATE.
pub type vmmgraph_launch_fn = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// What a capture used.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_seal_report_t {
    /// Set to sizeof(vmmgraph_seal_report_t) before the call.
    pub struct_size: usize,
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Small shared pages the space shows.
    pub small_pages: u64,
    /// Large shared pages the space shows.
    pub large_pages: u64,
    /// Mappings made.
    pub maps: u64,
    /// Bytes of pages that became the space's own.
    pub retained_bytes: u64,
    /// Blocks that are still live.
    pub retained_blocks: u64,
    /// Calls made to the driver: to reserve, create, map, set access and unmap.
    pub driver_calls: u64,
    /// Nanoseconds spent in them, waiting for other spaces' calls included.
    pub driver_ns: u64,
    /// Blocks that were allocated in all.
    pub allocations: u64,
    /// A hash of the capture's plan: page sizes, which numbered page is where, every block's place and bytes in order, what is live at its
    /// end and the policy for that. In a stitched space the same for the same requests, in any process and whatever was captured before,
    /// so that ranks can compare what they captured. Places of kept blocks do not count; those of a bump space depend on the arena's tape
    /// too, from its second range of addresses on.
    pub layout_hash: u64,
    /// Of the live blocks, remote ones (vmmgraph_space_allocate_remote). With 0, this seal exchanged no page that remote blocks are or were on. Else, by
    /// VMMGRAPH_RETAIN_OWN_PAGES, those under them and under what lies beside may be others: peers are to be told after the seal. By other policies
    /// they are where they were.
    pub remote_blocks: u64,
    /// Their bytes.
    pub remote_bytes: u64,
    /// Bytes of device memory that executables of the capture's graphs take while they have some, by what others took: of what
    /// VmmGraph for libtorch captures, or torch in a shape whose graphs borrow, from torch 2.8 on. Else 0.
    pub executable_bytes: u64,
}

/// What a space uses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_space_stats_t {
    /// Set to sizeof(vmmgraph_space_stats_t) before the call.
    pub struct_size: usize,
    /// The space's number, unique in the process.
    pub id: u64,
    /// VMMGRAPH_SPACE_OPEN, _SEALED, _BROKEN or _RETIRED.
    pub phase: i32,
    /// What its seal does with live blocks unless it is told otherwise: VMMGRAPH_RETAIN_OWN_PAGES or _SHARED_PAGES.
    pub retain: i32,
    /// Live blocks.
    pub blocks: u64,
    /// Their bytes, rounded up to 512 each.
    pub live_bytes: u64,
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them.
    pub mapped_bytes: u64,
    /// Bytes of pages that are the space's own.
    pub retained_bytes: u64,
    /// Mappings made so far.
    pub maps: u64,
}

/// Runs a body with the space behind a handle; a panic closes its arena.
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
        space.check_books();
        result
    })
}

/// Opens a space for a capture. The arena's pages stay while the space does, also after the arena is destroyed. Replays so far are
/// marked, so that their stream may be captured; whatever state that stream is in, this does not fail because of it.
///
/// # Safety
/// `space` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_open(
    arena: vmmgraph_arena_t,
    space: *mut vmmgraph_space_t,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: the caller's contract.
        let space = unsafe { out(space, "space") }?;
        *space = register(arena.open_space()?);
        Ok(())
    })
}

/// Opens a bump space for a capture: its blocks lie behind one another and none of their addresses serves twice. For the segments
/// of a torch MemPool, which stay until the graph goes. Its seal leaves live blocks on shared pages.
///
/// # Safety
/// As [`vmmgraph_space_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_open_bump(
    arena: vmmgraph_arena_t,
    space: *mut vmmgraph_space_t,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: the caller's contract.
        let space = unsafe { out(space, "space") }?;
        *space = register(arena.open_bump_space()?);
        Ok(())
    })
}

/// Names a space after the shape that it is for ("decode 64"): in statistics, log lines, the message of what fails for lack of memory, and
/// on the page map. The text, UTF-8 of 1024 bytes at most, is copied; an empty one takes the name away.
///
/// # Safety
/// `label` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_set_label(
    space: vmmgraph_space_t,
    label: *const c_char,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        let label = unsafe { text(label, "label") }?;
        Ok(space.set_label(&label)?)
    })
}

/// Says where in the caller's program a space is captured ("model.cpp:120"), for the page map. The text, UTF-8 of 1024 bytes at most, is
/// copied; an empty one takes it away.
///
/// # Safety
/// `site` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_set_site(
    space: vmmgraph_space_t,
    site: *const c_char,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        let site = unsafe { text(site, "site") }?;
        Ok(space.set_site(&site)?)
    })
}

/// The label of a space; empty if it has none. Copies as vmmgraph_last_error_message does.
///
/// # Safety
/// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_label(
    space: vmmgraph_space_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        unsafe { copy_text(&space.label().unwrap_or_default(), buffer, capacity, needed) };
        Ok(())
    })
}

/// Destroys a space. Does not block: once its arena's replays so far are done, it is unmapped and its addresses go back, by whoever comes
/// by then: the end of something else, vmmgraph_arena_trim, vmmgraph_device_trim, or an allocation that is short of memory. Its graph must
/// be gone, or never be launched again. Pages under blocks that a torch tensor still owns stay until that is freed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_destroy(space: vmmgraph_space_t) -> vmmgraph_status_t {
    guard(|| remove::<Space, _>(space).map(drop))
}

/// Allocates a block of at least `bytes` for work on `stream` (a CUstream or cudaStream_t; null: the default stream), aligned to
/// 512 bytes, with undefined contents. May be called while the stream is captured. On failure nothing has changed.
///
/// # Safety
/// `block` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_allocate(
    space: vmmgraph_space_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        let block = unsafe { out(block, "block") }?;
        *block = space.allocate(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// As vmmgraph_space_allocate, for a block that the caller will keep when the capture ends: an output, a workspace. The kept blocks of
/// all spaces lie packed on common pages, each on bytes of its own until it is freed and its space is destroyed, so that a few KiB do
/// not cost a page.
///
/// # Safety
/// `block` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_allocate_kept(
    space: vmmgraph_space_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        let block = unsafe { out(block, "block") }?;
        *block = space.allocate_kept(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// As vmmgraph_space_allocate, for a block that peers use too: a buffer of a captured collective, which other devices or processes read and write by
/// what they were told of its page, by vmmgraph_space_export or by a library that registers what it meets in the capture. It lies on one page, or, if it
/// is longer than a large page, on whole ones (its bytes are rounded up to those); beside it lie remote blocks of the same stream only. So a seal, which
/// exchanges pages under local blocks that are retained, exchanges none that a peer knows, and such pages are neither lent nor given to eager work from
/// the seal on. Other graphs share them as any page: what peers do with it is over when the replay is. Free it before the seal: one that is live then
/// is treated as the policy says and counted in the report. VMMGRAPH_ERROR_WRONG_STATE in a bump space.
///
/// # Safety
/// `block` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_allocate_remote(
    space: vmmgraph_space_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        let block = unsafe { out(block, "block") }?;
        *block = space.allocate_remote(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// Frees a block. Before the seal its pages serve the next block of the same stream; afterwards a retained block's pages return
/// to the arena, once the streams noted for it have passed. Its addresses stay mapped, since the graph writes there.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_free(space: vmmgraph_space_t, block: *mut c_void) -> vmmgraph_status_t {
    with(space, |space| Ok(space.free(Address(block as u64))?))
}

/// Notes that `stream` uses the block as well. During the capture: once freed, it stays busy until the seal. After it: once freed, its
/// bytes are nobody else's before what `stream` was given until then is done.
///
/// # Safety
/// `stream` is a stream of the device that exists until the block is freed or its space destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_record_stream(
    space: vmmgraph_space_t,
    block: *mut c_void,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| Ok(space.record_stream(Address(block as u64), stream_of(stream))?))
}

/// Ends the capture. Blocks that are still live are treated as `retain` (one of VMMGRAPH_RETAIN_*) says. `report` may be null. On
/// failure the space is open as before, and the call can be repeated.
///
/// # Safety
/// `report` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_seal(
    space: vmmgraph_space_t,
    retain: i32,
    report: *mut vmmgraph_seal_report_t,
) -> vmmgraph_status_t {
    with(space, |space| {
        let policy = retain_of(retain)?;
        // SAFETY: the caller's contract.
        let report = if report.is_null() { None } else { Some(unsafe { OutStruct::new(report, "report") }?) };
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

/// Blocks the caller until the replays of the arena that were launched so far are done, this space's among them: afterwards what its
/// graph reads and writes may go. Destroying the space does not wait. VMMGRAPH_ERROR_STREAM_CAPTURING if the stream of the last replay is
/// being captured and was not marked before.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_wait(space: vmmgraph_space_t) -> vmmgraph_status_t {
    with(space, |space| Ok(space.wait()?))
}

/// Puts a mark behind the arena's replays so far, so that the stream of the last one may be destroyed: for whoever replays on streams that may not
/// last. Costs a record, and the next replay a wait, on that stream too. `vmmgraph_arena_mark` does what else waits for the end of a stream as well.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_mark(space: vmmgraph_space_t) -> vmmgraph_status_t {
    with(space, |space| Ok(space.mark()?))
}

/// Calls `launch(user)`, which gives the space's graph to `stream`, in order after every earlier replay of the arena: no two of
/// them overlap, whatever their streams and threads. The same stream as the last replay costs one question to the driver: a stream under
/// capture is VMMGRAPH_ERROR_STREAM_CAPTURING, and its capture goes on.
///
/// # Safety
/// `launch` is null or may be called with `user`; it must not throw.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_replay(
    space: vmmgraph_space_t,
    stream: *mut c_void,
    launch: vmmgraph_launch_fn,
    user: *mut c_void,
) -> vmmgraph_status_t {
    with(space, |space| {
        let launch = launch.ok_or_else(|| null("launch"))?;
        // SAFETY: the caller's contract.
        Ok(space.replay(stream_of(stream), || unsafe { launch(user) })?)
    })
}

/// vmmgraph_space_replay for whoever cannot launch from a callback, as a language with a lock of its own: what this thread gives to `stream`
/// until it calls vmmgraph_space_leave is in order after every earlier replay of the arena. Until then other replays of the arena wait, so
/// leave whatever happens. On failure there is nothing to leave. As the other one beyond that.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_enter(space: vmmgraph_space_t, stream: *mut c_void) -> vmmgraph_status_t {
    with(space, |space| Ok(space.enter(stream_of(stream))?))
}

/// Ends what vmmgraph_space_enter began on this thread. VMMGRAPH_ERROR_WRONG_STATE if it has not entered.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_leave(space: vmmgraph_space_t) -> vmmgraph_status_t {
    with(space, |space| Ok(space.leave()?))
}

/// The blocks that are live now, in address order: after the seal, those that were retained and not freed since. Copies at most
/// `capacity` pointers and writes how many there are to `count`. `blocks` may be null if capacity is 0.
///
/// # Safety
/// `blocks` points to `capacity` writable pointers; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_live_blocks(
    space: vmmgraph_space_t,
    blocks: *mut *mut c_void,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
        let count = unsafe { out(count, "count") }?;
        if capacity > 0 {
            // SAFETY: only tells null apart.
            unsafe { out(blocks, "blocks") }?;
        }
        let live = space.live_blocks();
        for (index, block) in live.iter().take(capacity).enumerate() {
            // SAFETY: `index` < `capacity`, which the caller has room for.
            unsafe { *blocks.add(index) = block.0 as *mut c_void };
        }
        *count = live.len();
        Ok(())
    })
}

/// What the space uses now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_stats(
    space: vmmgraph_space_t,
    stats: *mut vmmgraph_space_stats_t,
) -> vmmgraph_status_t {
    with(space, |space| {
        // SAFETY: the caller's contract.
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
