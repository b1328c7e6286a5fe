//! Arenas.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::account::{vmmgraph_account_t, with_account};
use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, guard_closing, out};
use super::handle::{get, register, remove};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::{copy_text, text};
use crate::error::Error;
use crate::{Address, Device, Options, Peers, RetainPolicy, SharedVmmAllocator, Stream};

/// Never defined: a vmmgraph_arena_t is a key, not an address.
pub struct vmmgraph_arena {
    _private: (),
}

/// An arena: physical pages shared by graphs that never run at the same time. Calls with it are thread-safe.
pub type vmmgraph_arena_t = *mut vmmgraph_arena;

/// The arena's policy; in an arena's options: VMMGRAPH_RETAIN_OWN_PAGES.
pub const VMMGRAPH_RETAIN_DEFAULT: i32 = 0;
/// Blocks that are live at the seal move to pages of their own: other graphs never touch them.
pub const VMMGRAPH_RETAIN_OWN_PAGES: i32 = 1;
/// Blocks that are live at the seal stay on shared pages: the next replay of another graph may overwrite them.
pub const VMMGRAPH_RETAIN_SHARED_PAGES: i32 = 2;
/// The pages of blocks that are live at the seal become the space's own as they are, and none is exchanged for another; where another
/// space, or another part of this one, shows such a page, the seal is VMMGRAPH_ERROR_WRONG_STATE. For captures of whose pages somebody
/// else has taken hold, as NCCL does when it registers the buffers of captured collectives.
pub const VMMGRAPH_RETAIN_IN_PLACE: i32 = 3;
/// As VMMGRAPH_RETAIN_OWN_PAGES, but for remote blocks, which stay where they are, on shared pages: the next replay of another graph may overwrite
/// them. For peers that were told of their pages during the capture.
pub const VMMGRAPH_RETAIN_SHARED_REMOTE: i32 = 4;

/// Fills the shared pages of a space before each of its replays, so that a graph which relies on what is left there shows. Also on
/// with VMMGRAPH_POISON=1 in the environment.
pub const VMMGRAPH_ARENA_POISON: i32 = 1;
/// Blocks remember when and by which call stack they were allocated, for vmmgraph_space_blocks_json. Also on with
/// VMMGRAPH_TRACE_BLOCKS=1 in the environment.
pub const VMMGRAPH_ARENA_TRACE_BLOCKS: i32 = 2;
/// Replays and eager scopes on another stream or another thread than the first one's are VMMGRAPH_ERROR_WRONG_STATE before anything of them is
/// prepared or recorded, until vmmgraph_arena_lift_serial. For ranks that work together: the waits between streams that order an arena's
/// replays can deadlock ranks that replay in different orders.
pub const VMMGRAPH_ARENA_SERIAL: i32 = 4;
/// Each replay is noted, for ranks to compare what they launched by vmmgraph_arena_compare_order. Also on with VMMGRAPH_CHECK_ORDER=1 in the
/// environment.
pub const VMMGRAPH_ARENA_CHECK_ORDER: i32 = 8;

/// How to make an arena. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_arena_options_t {
    /// sizeof(vmmgraph_arena_options_t).
    pub struct_size: usize,
    /// Bytes of a small page, a power of two; 0: 2 MiB, or the device's granularity if that is larger.
    pub small_page_bytes: u64,
    /// Bytes of a large page, a multiple of the small one; 0: as expected_bytes says.
    pub large_page_bytes: u64,
    /// One of VMMGRAPH_RETAIN_*.
    pub retain: i32,
    /// Any of VMMGRAPH_ARENA_*, added up.
    pub flags: i32,
    /// The most bytes of physical memory the arena may hold; 0: no limit but the device's. See vmmgraph_arena_set_budget.
    pub budget_bytes: u64,
    /// Bytes of addresses that the current space (vmmgraph_arena_allocate) has from its beginning on; 0: addresses are reserved as they
    /// are needed. Rounded up to what the device reserves in.
    pub reserve_bytes: u64,
    /// About how many bytes the hungriest graph has live at once, which says how large the large pages are: the largest power of two
    /// that is at most a forty-eighth of it, but no less than a small page and no more than 16 MiB; 32 MiB from 8 GiB on. 0: not known,
    /// 16 MiB or the small page's bytes, whichever is larger.
    pub expected_bytes: u64,
    /// Other devices of the platform that may read and write the arena's pages, added up: 1 << n for device n, below 64. Every map
    /// costs more for each. The arena's own counts for nothing; one without peer access is VMMGRAPH_ERROR_INVALID_ARGUMENT.
    pub peers: u64,
    /// What vmmgraph_device_pause and vmmgraph_device_resume find the arena by, zero-terminated; null: only when they are asked for
    /// everything.
    pub tag: *const c_char,
    /// Bytes that it is sure to get, out of the device's budget: so much of what it has is never lent either.
    pub least_bytes: u64,
    /// As peers, for the pages of remote and exclusive blocks only: all that other devices read of a collective. What else the arena maps costs no more
    /// then.
    pub remote_peers: u64,
    /// The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
    pub account: vmmgraph_account_t,
}

/// What an arena holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_arena_stats_t {
    /// Set to sizeof(vmmgraph_arena_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes of physical memory: shared, retained, kept and exclusive pages.
    pub physical_bytes: u64,
    /// Bytes of shared pages.
    pub shared_bytes: u64,
    /// Bytes of the device's free pages, which no space maps and whoever asks next gets; trim gives them back.
    pub free_bytes: u64,
    /// Bytes of pages that belong to single spaces.
    pub retained_bytes: u64,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them; a page that shows n times counts n times.
    pub mapped_bytes: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// The most bytes that any one space has needed: live at once, or handed out in a current space.
    pub high_water_bytes: u64,
    /// Where the next block of the current space (vmmgraph_arena_allocate) goes, in bytes from its beginning.
    pub current_offset_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Spaces.
    pub spaces: u64,
    /// Shared pages.
    pub shared_pages: u64,
    /// Bytes of pages for kept blocks.
    pub kept_bytes: u64,
    /// 1 if an internal error closed the arena, which can only be destroyed then; else 0.
    pub closed: u64,
    /// Bytes that count toward the budget: physical_bytes, and what the driver is being asked for.
    pub charged_bytes: u64,
    /// The byte budget; 0: none.
    pub budget_bytes: u64,
    /// Replays that were launched.
    pub replays: u64,
    /// 1 if it is paused, else 0.
    pub paused: u64,
    /// Bytes of exclusive blocks (vmmgraph_arena_allocate_exclusive), which are no blocks of a space.
    pub exclusive_bytes: u64,
    /// Of the shared bytes, those that are on lease (vmmgraph_arena_lend).
    pub lent_bytes: u64,
}

/// The policy of a number; `None`: the one that holds anyway.
pub(crate) fn retain_of(retain: i32) -> crate::error::Result<Option<RetainPolicy>> {
    match retain {
        VMMGRAPH_RETAIN_DEFAULT => Ok(None),
        VMMGRAPH_RETAIN_OWN_PAGES => Ok(Some(RetainPolicy::Retain)),
        VMMGRAPH_RETAIN_SHARED_PAGES => Ok(Some(RetainPolicy::Share)),
        VMMGRAPH_RETAIN_IN_PLACE => Ok(Some(RetainPolicy::InPlace)),
        VMMGRAPH_RETAIN_SHARED_REMOTE => Ok(Some(RetainPolicy::ShareRemote)),
        other => {
            let expected = "one of VMMGRAPH_RETAIN_*";
            Err(Error::InvalidArgument { what: "retain", value: i128::from(other), expected })
        }
    }
}

fn flags(given: i32) -> Result<i32, Failure> {
    let known = VMMGRAPH_ARENA_POISON
        | VMMGRAPH_ARENA_TRACE_BLOCKS
        | VMMGRAPH_ARENA_SERIAL
        | VMMGRAPH_ARENA_CHECK_ORDER;
    if given & !known == 0 {
        return Ok(given);
    }
    let expected = "a sum of VMMGRAPH_ARENA_*";
    Err(Error::InvalidArgument { what: "flags", value: i128::from(given), expected }.into())
}

/// The stream that C names.
///
/// The functions that use it ask their callers that it exists; those that only note it, for as long as they say.
pub(crate) fn stream_of(handle: *mut c_void) -> Stream {
    // SAFETY: the contract of every C function that takes a stream: `vmmgraph_space_replay`, `vmmgraph_space_record_stream`.
    unsafe { Stream::from_raw(handle as u64) }
}

/// What C calls a policy.
pub(super) fn policy_number(policy: RetainPolicy) -> i32 {
    match policy {
        RetainPolicy::Retain => VMMGRAPH_RETAIN_OWN_PAGES,
        RetainPolicy::Share => VMMGRAPH_RETAIN_SHARED_PAGES,
        RetainPolicy::InPlace => VMMGRAPH_RETAIN_IN_PLACE,
        RetainPolicy::ShareRemote => VMMGRAPH_RETAIN_SHARED_REMOTE,
    }
}

/// Runs a body with the arena behind a handle; a panic closes that arena.
pub(super) fn with(
    arena: vmmgraph_arena_t,
    body: impl FnOnce(&Arc<SharedVmmAllocator>) -> Result<(), Failure>,
) -> vmmgraph_status_t {
    let close = || {
        if let Ok(arena) = get::<SharedVmmAllocator, _>(arena) {
            arena.close();
        }
    };
    guard_closing(close, || {
        let arena = get(arena)?;
        let result = body(&arena);
        arena.device().pool().check();
        result
    })
}

/// Makes an arena on a device. `options` may be null. The arena keeps the device open.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set, its tag null or a zero-terminated string; `arena` is null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_create(
    device: vmmgraph_device_t,
    options: *const vmmgraph_arena_options_t,
    arena: *mut vmmgraph_arena_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (given, arena) = (unsafe { self::options(options) }?, unsafe { out(arena, "arena") }?);
        let above = given.map_or(std::ptr::null_mut(), |given| given.account);
        let options = match given {
            Some(given) => Options {
                small_page_bytes: given.small_page_bytes,
                large_page_bytes: given.large_page_bytes,
                retain: retain_of(given.retain)?.unwrap_or_default(),
                poison: flags(given.flags)? & VMMGRAPH_ARENA_POISON != 0,
                trace_blocks: given.flags & VMMGRAPH_ARENA_TRACE_BLOCKS != 0,
                budget_bytes: limit(given.budget_bytes),
                least_bytes: given.least_bytes,
                reserve_bytes: given.reserve_bytes,
                expected_bytes: given.expected_bytes,
                serial: given.flags & VMMGRAPH_ARENA_SERIAL != 0,
                check_order: given.flags & VMMGRAPH_ARENA_CHECK_ORDER != 0,
                peers: Peers::of_bits(given.peers),
                remote_peers: Peers::of_bits(given.remote_peers),
                // SAFETY: the caller's contract.
                tag: if given.tag.is_null() { String::new() } else { unsafe { text(given.tag, "tag") }? },
            },
            None => Options::default(),
        };
        let made =
            with_account(above, |above| Ok(SharedVmmAllocator::in_account(&device, &options, above)?))?;
        *arena = register(Arc::new(made));
        Ok(())
    })
}

/// Ends a handle. The arena's spaces stay until they are destroyed; its pages go when no space needs them.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_destroy(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    guard(|| remove::<SharedVmmAllocator, _>(arena).map(drop))
}

/// Gives back to the driver what nobody uses, on the whole device: waits for the arena's replays launched so far and for what was
/// unmapped behind others, and gives back the device's free pages. `released` (may be null) receives their bytes.
///
/// # Safety
/// `released` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_trim(
    arena: vmmgraph_arena_t,
    released: *mut u64,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        let bytes = arena.trim()?;
        if !released.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { *released = bytes };
        }
        Ok(())
    })
}

/// Limits the bytes of physical memory that the arena's pages take: shared ones, those of its spaces, and those of kept and exclusive blocks; 0: no
/// limit but the device's. Nothing is taken away: with less than is held, every page that is missing is refused with
/// VMMGRAPH_ERROR_OVER_BUDGET until enough spaces were destroyed. Exact with any number of threads. Pages that no space maps do not count:
/// they are the device's. Before an allocation or a seal fails, it waits a moment for what only waits for the device.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_set_budget(arena: vmmgraph_arena_t, bytes: u64) -> vmmgraph_status_t {
    with(arena, |arena| {
        arena.set_budget(limit(bytes));
        Ok(())
    })
}

/// Orders everything replayed so far for good: the stream of the last replay may be captured or destroyed afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_mark(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.mark()?))
}

/// What the arena holds now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_stats(
    arena: vmmgraph_arena_t,
    stats: *mut vmmgraph_arena_stats_t,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = arena.stats();
        stats.write(vmmgraph_arena_stats_t {
            struct_size: stats.struct_size,
            physical_bytes: now.physical_bytes,
            shared_bytes: now.shared_bytes,
            free_bytes: arena.device().stats().free_bytes,
            retained_bytes: now.retained_bytes,
            reserved_bytes: now.reserved_bytes,
            mapped_bytes: now.mapped_bytes,
            live_bytes: now.live_bytes,
            high_water_bytes: now.high_water_bytes,
            current_offset_bytes: arena.current_offset(),
            blocks: now.blocks,
            spaces: now.spaces,
            shared_pages: now.shared_pages,
            kept_bytes: now.kept_bytes,
            closed: u64::from(!arena.is_initialized()),
            charged_bytes: now.account.charged_bytes,
            budget_bytes: now.account.most_bytes.unwrap_or(0),
            replays: now.replays,
            paused: u64::from(now.paused),
            exclusive_bytes: now.exclusive_bytes,
            lent_bytes: now.lent_bytes,
        });
        Ok(())
    })
}

/// The arena, its spaces, their blocks and the device's pages as one JSON object. Copies as vmmgraph_last_error_message does.
///
/// # Safety
/// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_stats_json(
    arena: vmmgraph_arena_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        unsafe { copy_text(&arena.snapshot().to_json(), buffer, capacity, needed) };
        Ok(())
    })
}

/// Seals the current space, if there is one, and opens the next: for engines whose captures are strictly serial. Blocks of
/// earlier spaces stay valid until the arena is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_switch_to_new_virtual_space(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.switch_to_new_virtual_space()?))
}

/// Allocates in the current space, opening one if there is none. As vmmgraph_space_allocate.
///
/// # Safety
/// `block` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_allocate(
    arena: vmmgraph_arena_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let block = unsafe { out(block, "block") }?;
        *block = arena.allocate(bytes, stream_of(stream))?.0 as *mut c_void;
        Ok(())
    })
}

/// Frees a block of the current space or of one before it.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_deallocate(
    arena: vmmgraph_arena_t,
    block: *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.deallocate(Address(block as u64))?))
}
