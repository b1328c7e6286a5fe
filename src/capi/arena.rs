//! Arenas in C: options, budget, statistics, current space.

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

/// Opaque; never defined.
pub struct vmmgraph_arena {
    _private: (),
}

/// Arena: physical pages shared by graphs which never run at the same time.
pub type vmmgraph_arena_t = *mut vmmgraph_arena;

/// The arena's policy. In arena options: VMMGRAPH_RETAIN_OWN_PAGES.
pub const VMMGRAPH_RETAIN_DEFAULT: i32 = 0;
/// Live-out blocks (live at the seal) get pages private to the space: other graphs never overwrite
/// the contents.
pub const VMMGRAPH_RETAIN_OWN_PAGES: i32 = 1;
/// Live-out blocks stay on shared pages: the next replay of another graph may overwrite the
/// contents.
pub const VMMGRAPH_RETAIN_SHARED_PAGES: i32 = 2;
/// Pages of live-out blocks become private to the space, and no page is replaced. The seal fails
/// with VMMGRAPH_ERROR_WRONG_STATE if another space, or another part of this space, maps one of
/// these pages. For captures with pages registered elsewhere: NCCL registers the buffers of
/// captured collectives.
pub const VMMGRAPH_RETAIN_IN_PLACE: i32 = 3;
/// As VMMGRAPH_RETAIN_OWN_PAGES, except for peer-visible (remote) blocks. These stay on shared
/// pages: the next replay of another graph may overwrite the contents. For peers which learned the
/// pages during the capture.
pub const VMMGRAPH_RETAIN_SHARED_REMOTE: i32 = 4;

/// Fills the shared pages of a space before each replay, which exposes graphs depending on leftover
/// contents. Also enabled by VMMGRAPH_POISON=1 in the environment.
pub const VMMGRAPH_ARENA_POISON: i32 = 1;
/// Records the age and the allocating call stack of every block for vmmgraph_space_blocks_json.
/// Also enabled by VMMGRAPH_TRACE_BLOCKS=1 in the environment.
pub const VMMGRAPH_ARENA_TRACE_BLOCKS: i32 = 2;
/// Refuses replays and eager scopes on any stream or thread other than the first one's with
/// VMMGRAPH_ERROR_WRONG_STATE, before preparing or recording any work, until
/// vmmgraph_arena_lift_serial. For ranks which work together: the stream waits between an arena's
/// replays can deadlock ranks replaying in different orders.
pub const VMMGRAPH_ARENA_SERIAL: i32 = 4;

/// Options of vmmgraph_arena_create.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_arena_options_t {
    /// sizeof(vmmgraph_arena_options_t).
    pub struct_size: usize,
    /// Bytes of a small page, a power of two; 0: 2 MiB or the device's granularity, whichever is
    /// larger.
    pub small_page_bytes: u64,
    /// Bytes of a large page, a multiple of the small page; 0: derived from expected_bytes.
    pub large_page_bytes: u64,
    /// One of VMMGRAPH_RETAIN_*.
    pub retain: i32,
    /// Sum of VMMGRAPH_ARENA_* flags.
    pub flags: i32,
    /// Limit in bytes of the arena's physical memory; 0: none. See vmmgraph_arena_set_budget.
    pub budget_bytes: u64,
    /// Bytes of addresses reserved at creation for the current space (vmmgraph_arena_allocate),
    /// rounded up to the device's granularity; 0: reserved on demand.
    pub reserve_bytes: u64,
    /// Approximate peak of live bytes of the largest graph; sets the size of large pages. A large
    /// page has the largest power of two up to 1/48 of expected_bytes, at least a small page and at
    /// most 16 MiB; 32 MiB if expected_bytes is 8 GiB or more. 0: unknown; 16 MiB or a small page,
    /// whichever is larger.
    pub expected_bytes: u64,
    /// Other devices of the platform with read and write access to the arena's pages: sum of 1 << n
    /// for each device n, n < 64. Each makes every map slower. The arena's own device is ignored. A
    /// device without peer access is VMMGRAPH_ERROR_INVALID_ARGUMENT.
    pub peers: u64,
    /// Tag for vmmgraph_device_pause and vmmgraph_device_resume. Null: only calls without tags
    /// include the arena.
    pub tag: *const c_char,
    /// Guaranteed bytes (see vmmgraph_account_options_t). This many bytes of the arena are never
    /// lent.
    pub least_bytes: u64,
    /// As peers, but only for pages of peer-visible (remote) and private (exclusive) blocks, which
    /// is enough for collectives. Maps of other pages do not become slower.
    pub remote_peers: u64,
    /// Parent of the arena's own account, on the same device; null: the device's account.
    pub account: vmmgraph_account_t,
}

/// Statistics of an arena.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_arena_stats_t {
    /// Set to sizeof(vmmgraph_arena_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes of physical memory: shared pages, and pages of live-out (retained), persistent (kept)
    /// and private (exclusive) blocks.
    pub physical_bytes: u64,
    /// Bytes of shared pages.
    pub shared_bytes: u64,
    /// Bytes of the device's free pages: mapped nowhere, used by the next allocation, released by a
    /// trim.
    pub free_bytes: u64,
    /// Bytes of pages private to single spaces.
    pub retained_bytes: u64,
    /// Bytes of reserved addresses.
    pub reserved_bytes: u64,
    /// Bytes of mapped addresses; a page mapped n times counts n times.
    pub mapped_bytes: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// Largest demand of any one space in bytes: peak of live bytes, or bytes handed out in a
    /// current space.
    pub high_water_bytes: u64,
    /// Offset in bytes of the next block in the current space (vmmgraph_arena_allocate).
    pub current_offset_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Spaces.
    pub spaces: u64,
    /// Shared pages.
    pub shared_pages: u64,
    /// Bytes of pages for persistent (kept) blocks.
    pub kept_bytes: u64,
    /// 1 if an internal error closed the arena, else 0. A closed arena can only be destroyed.
    pub closed: u64,
    /// Bytes charged to the budget: physical_bytes, and memory being requested from the driver.
    pub charged_bytes: u64,
    /// Byte budget; 0: none.
    pub budget_bytes: u64,
    /// Replays launched so far.
    pub replays: u64,
    /// 1 if the arena is paused, else 0.
    pub paused: u64,
    /// Bytes of private (exclusive) blocks (vmmgraph_arena_allocate_exclusive), which belong to no
    /// space.
    pub exclusive_bytes: u64,
    /// Bytes of shared pages on lease (vmmgraph_arena_lend), part of shared_bytes.
    pub lent_bytes: u64,
}

/// Converts a policy number; `None` for VMMGRAPH_RETAIN_DEFAULT.
pub fn retain_of(retain: i32) -> crate::error::Result<Option<RetainPolicy>> {
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
    let known = VMMGRAPH_ARENA_POISON | VMMGRAPH_ARENA_TRACE_BLOCKS | VMMGRAPH_ARENA_SERIAL;
    if given & !known == 0 {
        return Ok(given);
    }
    let expected = "a sum of VMMGRAPH_ARENA_*";
    Err(Error::InvalidArgument { what: "flags", value: i128::from(given), expected }.into())
}

/// Converts a stream from C.
///
/// The C functions document how long their stream must exist: during the call, or longer for a
/// recorded stream.
pub fn stream_of(handle: *mut c_void) -> Stream {
    // SAFETY: the contract of every C function with a stream argument: `vmmgraph_space_replay`,
    // `vmmgraph_space_record_stream`.
    unsafe { Stream::from_raw(handle as u64) }
}

/// Returns the C number of a policy.
pub(super) fn policy_number(policy: RetainPolicy) -> i32 {
    match policy {
        RetainPolicy::Retain => VMMGRAPH_RETAIN_OWN_PAGES,
        RetainPolicy::Share => VMMGRAPH_RETAIN_SHARED_PAGES,
        RetainPolicy::InPlace => VMMGRAPH_RETAIN_IN_PLACE,
        RetainPolicy::ShareRemote => VMMGRAPH_RETAIN_SHARED_REMOTE,
    }
}

/// Runs a body with the arena of a handle. A panic closes the arena.
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

/// Creates an arena on a device. `options` may be null. VMMGRAPH_ERROR_INVALID_SIZE if a page size
/// does not fit the device. VMMGRAPH_ERROR_OVER_BUDGET if the accounts above have no room for the
/// guaranteed bytes.
///
/// # Safety
/// `options` is null or points to a struct with struct_size set and a null or zero-terminated tag;
/// `arena` is null or writable.
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

/// Destroys the arena. Its spaces stay until destroyed; its pages are freed once no space needs
/// any.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_destroy(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    guard(|| remove::<SharedVmmAllocator, _>(arena).map(drop))
}

/// Waits for the arena's replays and for pending unmaps, then releases all free pages of the device
/// to the driver. `released` (may be null) receives their bytes.
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

/// Limits the arena's physical memory in bytes; 0: no limit. Exact with any number of threads.
/// Covers shared pages, pages of the arena's spaces, and pages of persistent (kept) and private
/// (exclusive) blocks. Free pages count for the device only.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_set_budget(arena: vmmgraph_arena_t, bytes: u64) -> vmmgraph_status_t {
    with(arena, |arena| {
        arena.set_budget(limit(bytes));
        Ok(())
    })
}

/// Records an event after all replays so far: the stream of the last replay, and streams recorded
/// for freed blocks, may be captured or destroyed afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_mark(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.mark()?))
}

/// Writes the arena's current statistics.
///
/// # Safety
/// `stats` is null or points to a struct with struct_size set.
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

/// Copies the statistics of the arena, its spaces, their blocks and the device's pages as one JSON
/// object.
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

/// Seals the current space, if any, and opens the next. For engines whose captures are strictly
/// serial. Blocks of earlier spaces stay valid until the arena is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_switch_to_new_virtual_space(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.switch_to_new_virtual_space()?))
}

/// Allocates a block in the current space, opening a space if needed. As vmmgraph_space_allocate.
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

/// Frees a block of the current space or of an earlier one.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_deallocate(
    arena: vmmgraph_arena_t,
    block: *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.deallocate(Address(block as u64))?))
}
