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

pub struct vmmgraph_arena {
    _private: (),
}

/// Arena: physical pages shared by graphs which never run at the same time.
pub type vmmgraph_arena_t = *mut vmmgraph_arena;

/// The arena's policy; in arena options VMMGRAPH_RETAIN_OWN_PAGES.
pub const VMMGRAPH_RETAIN_DEFAULT: i32 = 0;
/// Blocks live at the seal (live-out) get pages private to the space.
pub const VMMGRAPH_RETAIN_OWN_PAGES: i32 = 1;
/// Live-out blocks stay on shared pages: the next replay of another graph may overwrite them.
pub const VMMGRAPH_RETAIN_SHARED_PAGES: i32 = 2;
/// Pages of live-out blocks become private to the space, and none is replaced, as for pages
/// registered by NCCL in captured collectives; VMMGRAPH_ERROR_WRONG_STATE if such a page is also
/// mapped elsewhere.
pub const VMMGRAPH_RETAIN_IN_PLACE: i32 = 3;
/// As VMMGRAPH_RETAIN_OWN_PAGES, but peer-visible (remote) blocks stay on shared pages, for peers
/// which learned the pages during the capture.
pub const VMMGRAPH_RETAIN_SHARED_REMOTE: i32 = 4;

/// Fills the shared pages of a space before each replay, to expose graphs depending on leftover
/// contents. Also VMMGRAPH_POISON=1 in the environment.
pub const VMMGRAPH_ARENA_POISON: i32 = 1;
/// Records the age and call stack of every block for vmmgraph_space_blocks_json. Also
/// VMMGRAPH_TRACE_BLOCKS=1 in the environment.
pub const VMMGRAPH_ARENA_TRACE_BLOCKS: i32 = 2;
/// Refuses replays and eager scopes on any stream or thread but the first
/// (VMMGRAPH_ERROR_WRONG_STATE), until vmmgraph_arena_lift_serial. For cooperating ranks: waits
/// between replays can deadlock ranks replaying in different orders.
pub const VMMGRAPH_ARENA_SERIAL: i32 = 4;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_arena_options_t {
    pub struct_size: usize,
    /// A power of two; 0: 2 MiB or the device's granularity, whichever is larger.
    pub small_page_bytes: u64,
    /// A multiple of the small page; 0: derived from expected_bytes.
    pub large_page_bytes: u64,
    /// One of VMMGRAPH_RETAIN_*.
    pub retain: i32,
    /// Sum of VMMGRAPH_ARENA_* flags.
    pub flags: i32,
    /// See vmmgraph_arena_set_budget.
    pub budget_bytes: u64,
    /// Addresses reserved at creation for the current space (vmmgraph_arena_allocate); 0: on
    /// demand.
    pub reserve_bytes: u64,
    /// Approximate peak of live bytes of the largest graph. The large page is the largest power of
    /// two up to 1/48 of this, from a small page to 16 MiB; 32 MiB from 8 GiB on. 0: unknown; 16
    /// MiB or a small page, whichever is larger.
    pub expected_bytes: u64,
    /// Devices with read and write access to the pages: sum of 1 << n for each device n < 64. Each
    /// makes every map slower. VMMGRAPH_ERROR_INVALID_ARGUMENT for a device without peer access.
    pub peers: u64,
    /// For vmmgraph_device_pause and vmmgraph_device_resume. Null: only calls without tags include
    /// the arena.
    pub tag: *const c_char,
    /// Guaranteed bytes (see vmmgraph_account_options_t), never lent.
    pub least_bytes: u64,
    /// As peers, only for pages of peer-visible (remote) and private (exclusive) blocks: enough for
    /// collectives, and slows no other map.
    pub remote_peers: u64,
    /// Parent of the arena's account; null: the device's account.
    pub account: vmmgraph_account_t,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_arena_stats_t {
    pub struct_size: usize,
    /// Shared pages, and pages of live-out (retained), persistent (kept) and private (exclusive)
    /// blocks.
    pub physical_bytes: u64,
    pub shared_bytes: u64,
    /// The device's free pages, used by the next allocation or released by a trim.
    pub free_bytes: u64,
    /// Pages private to single spaces.
    pub retained_bytes: u64,
    pub reserved_bytes: u64,
    /// Bytes of mapped addresses.
    pub mapped_bytes: u64,
    pub live_bytes: u64,
    /// Largest demand of one space: peak of live bytes, or bytes handed out in a current space.
    pub high_water_bytes: u64,
    /// Offset of the next block in the current space.
    pub current_offset_bytes: u64,
    pub blocks: u64,
    pub spaces: u64,
    pub shared_pages: u64,
    /// Pages of persistent (kept) blocks.
    pub kept_bytes: u64,
    /// 1 after an internal error: the arena can only be destroyed.
    pub closed: u64,
    /// physical_bytes, and memory being requested from the driver.
    pub charged_bytes: u64,
    pub budget_bytes: u64,
    pub replays: u64,
    pub paused: u64,
    /// Private (exclusive) blocks, which belong to no space.
    pub exclusive_bytes: u64,
    /// Shared pages on lease (vmmgraph_arena_lend).
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

/// The C functions document how long their stream must exist.
pub fn stream_of(handle: *mut c_void) -> Stream {
    // SAFETY: the contract of every C function with a stream argument.
    unsafe { Stream::from_raw(handle as u64) }
}

pub(super) fn policy_number(policy: RetainPolicy) -> i32 {
    match policy {
        RetainPolicy::Retain => VMMGRAPH_RETAIN_OWN_PAGES,
        RetainPolicy::Share => VMMGRAPH_RETAIN_SHARED_PAGES,
        RetainPolicy::InPlace => VMMGRAPH_RETAIN_IN_PLACE,
        RetainPolicy::ShareRemote => VMMGRAPH_RETAIN_SHARED_REMOTE,
    }
}

/// A panic closes the arena.
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

/// Creates an arena. `options` may be null. VMMGRAPH_ERROR_INVALID_SIZE if a page size does not fit
/// the device; VMMGRAPH_ERROR_OVER_BUDGET if the accounts above have no room for the guarantee.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_create(
    device: vmmgraph_device_t,
    options: *const vmmgraph_arena_options_t,
    arena: *mut vmmgraph_arena_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
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
                // SAFETY: contract.
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

/// Destroys the arena. Its spaces stay until destroyed, and its pages until no space needs them.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_destroy(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    guard(|| remove::<SharedVmmAllocator, _>(arena).map(drop))
}

/// Waits for the arena's replays and pending unmaps, then releases all free pages of the device.
/// `released` receives their bytes.
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

/// Limits the arena's physical memory: shared pages, and pages of spaces, kept and private
/// (exclusive) blocks. Exact with any number of threads.
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

/// Writes the arena's statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_stats(
    arena: vmmgraph_arena_t,
    stats: *mut vmmgraph_arena_stats_t,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: contract.
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

/// Copies the statistics of the arena, its spaces and blocks and the device's pages as JSON.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_stats_json(
    arena: vmmgraph_arena_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: contract.
        unsafe { copy_text(&arena.snapshot().to_json(), buffer, capacity, needed) };
        Ok(())
    })
}

/// Seals the current space, if any, and opens the next, for engines with strictly serial captures.
/// Earlier blocks stay valid until the arena is destroyed. Call before a pause too: only a current
/// space without blocks permits a pause.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_switch_to_new_virtual_space(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.switch_to_new_virtual_space()?))
}

/// As vmmgraph_space_allocate, in the current space, opened if needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_allocate(
    arena: vmmgraph_arena_t,
    bytes: u64,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: contract.
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
