//! Regions: memory that steps aside and comes back at the same addresses.

use std::ffi::{c_char, c_void};

use super::account::{vmmgraph_account_t, with_account};
use super::arena::stream_of;
use super::device::vmmgraph_device_t;
#[cfg(feature = "bridge")]
use super::guard::Failure;
use super::guard::{guard, items_mut, out, pick};
use super::handle::{get, register, remove};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::error::Error;
use crate::{Address, Device, Policy, Region, RegionOptions};

/// Never defined: a vmmgraph_region_t is a key, not an address.
pub struct vmmgraph_region {
    _private: (),
}

/// A region: memory with a tag that can step aside. Calls with it are thread-safe.
pub type vmmgraph_region_t = *mut vmmgraph_region;

/// In a block's policy: the region's. In a region's: VMMGRAPH_POLICY_DISCARD.
pub const VMMGRAPH_POLICY_DEFAULT: i32 = 0;
/// The contents are lost when memory steps aside: what comes back holds anything.
pub const VMMGRAPH_POLICY_DISCARD: i32 = 1;
/// What comes back is zero.
pub const VMMGRAPH_POLICY_ZERO: i32 = 2;
/// The contents go to host memory and come back.
pub const VMMGRAPH_POLICY_BACKUP: i32 = 3;
/// The memory stays.
pub const VMMGRAPH_POLICY_KEEP: i32 = 4;

/// The blocks are written once, before the first pause: the host keeps what it copied then, and later pauses copy nothing. What is
/// written later all the same is to be said by vmmgraph_region_mark_written.
pub const VMMGRAPH_REGION_READ_ONLY: i32 = 1;
/// For finding bugs: a pause copies all the same, and compares with what the host has. Costs the copy.
pub const VMMGRAPH_REGION_VERIFY_CLEAN: i32 = 2;

/// How to make a region. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_region_options_t {
    /// sizeof(vmmgraph_region_options_t).
    pub struct_size: usize,
    /// One of VMMGRAPH_POLICY_*: what becomes of its blocks, but for those that say otherwise.
    pub policy: i32,
    /// Any of VMMGRAPH_REGION_*, added up.
    pub flags: i32,
    /// The most bytes of physical memory it may hold; 0: no limit but the device's.
    pub budget_bytes: u64,
    /// Bytes of every page, a multiple of the device's granularity, for regions whose pages others shall borrow; 0: as fits, up to
    /// 1 GiB.
    pub page_bytes: u64,
    /// The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
    pub account: vmmgraph_account_t,
}

/// What a region holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_region_stats_t {
    /// Set to sizeof(vmmgraph_region_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes of pages that are there.
    pub resident_bytes: u64,
    /// Bytes of pages that stepped aside.
    pub paused_bytes: u64,
    /// Bytes of contents on the host.
    pub host_bytes: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// Bytes of places that no block has.
    pub free_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Pages, there or not.
    pub pages: u64,
    /// Counts its mappings, from 1 on: what was registered under one generation is not there under another.
    pub generation: u64,
    /// 1 if it is paused, else 0.
    pub paused: u64,
    /// Bytes that count toward its budget.
    pub charged_bytes: u64,
    /// Its byte budget; 0: none.
    pub budget_bytes: u64,
}

/// What C calls these policies, from VMMGRAPH_POLICY_DEFAULT on.
const POLICIES: [Option<Policy>; 5] =
    [None, Some(Policy::Discard), Some(Policy::Zero), Some(Policy::Backup), Some(Policy::Keep)];

/// The policy that C calls so, for the bridge; `None`: the region's.
#[cfg(feature = "bridge")]
pub(crate) fn policy_of(number: i32) -> crate::error::Result<Option<Policy>> {
    pick("policy", number, &POLICIES).map_err(|failure| match failure {
        Failure::Error(error) | Failure::Status(_, error) => error,
    })
}

/// Makes a region on a device, found by `tag`; several may have one tag. `options` may be null. The region keeps the device open.
///
/// # Safety
/// `tag` is null or a zero-terminated string; `options` is null or points to a struct whose struct_size is set; `region` is null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_create(
    device: vmmgraph_device_t,
    tag: *const c_char,
    options: *const vmmgraph_region_options_t,
    region: *mut vmmgraph_region_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (tag, region) = unsafe { (text(tag, "tag")?, out(region, "region")?) };
        let (mut made, mut above) = (RegionOptions::default(), std::ptr::null_mut());
        // SAFETY: the caller's contract.
        if let Some(given) = unsafe { self::options(options) }? {
            if given.flags & !(VMMGRAPH_REGION_READ_ONLY | VMMGRAPH_REGION_VERIFY_CLEAN) != 0 {
                let (value, expected) = (i128::from(given.flags), "a sum of VMMGRAPH_REGION_*");
                return Err(Error::InvalidArgument { what: "flags", value, expected }.into());
            }
            above = given.account;
            made = RegionOptions {
                policy: pick("policy", given.policy, &POLICIES)?.unwrap_or_default(),
                budget_bytes: limit(given.budget_bytes),
                page_bytes: given.page_bytes,
                read_only: given.flags & VMMGRAPH_REGION_READ_ONLY != 0,
                verify_clean: given.flags & VMMGRAPH_REGION_VERIFY_CLEAN != 0,
            };
        }
        *region = register(with_account(above, |above| Ok(Region::in_account(&device, &tag, made, above)?))?);
        Ok(())
    })
}

/// Ends a handle, and with it the region and all its blocks, paused or not. Their memory goes behind what was given to the streams
/// noted for them.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_destroy(region: vmmgraph_region_t) -> vmmgraph_status_t {
    guard(|| remove::<Region, _>(region).map(drop))
}

/// Allocates a block, used on `stream` first. Its address stays the same for as long as it lives. `policy` is one of
/// VMMGRAPH_POLICY_*. VMMGRAPH_ERROR_WRONG_STATE while the region is paused. The stream exists until the block is freed. Where contents of blocks that
/// are gone still come back (vmmgraph_device_resume_async), the stream's later work waits for them, or the call if the stream is being captured.
///
/// # Safety
/// `block` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_allocate(
    region: vmmgraph_region_t,
    bytes: u64,
    policy: i32,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: the caller's contract.
        let block = unsafe { out(block, "block") }?;
        let at = match pick("policy", policy, &POLICIES)? {
            Some(policy) => region.allocate_as(bytes, policy, stream_of(stream))?,
            None => region.allocate(bytes, stream_of(stream))?,
        };
        *block = at.0 as *mut c_void;
        Ok(())
    })
}

/// Frees a block, also while the region is paused. Its bytes are another's behind what its streams were given.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_free(region: vmmgraph_region_t, block: *mut c_void) -> vmmgraph_status_t {
    guard(|| Ok(get::<Region, _>(region)?.free(Address(block as u64))?))
}

/// Notes that a stream uses a block: a free and a pause wait for what it was given by then. The stream exists until the block is freed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_record_stream(
    region: vmmgraph_region_t,
    block: *mut c_void,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Region, _>(region)?.record_stream(Address(block as u64), stream_of(stream))?))
}

/// Says that a block was written since its backup, or (null) that all were: the next pause of a VMMGRAPH_REGION_READ_ONLY region
/// copies it again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_mark_written(
    region: vmmgraph_region_t,
    block: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let block = (!block.is_null()).then_some(Address(block as u64));
        Ok(get::<Region, _>(region)?.mark_written(block)?)
    })
}

/// Copies `bytes` bytes of a paused block's backup, from `skip` on, to `into`, without resuming: all of them, or it is an error and
/// `into` stays as it was.
///
/// # Safety
/// `into` is null or points to `bytes` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_get_backup(
    region: vmmgraph_region_t,
    block: *mut c_void,
    skip: u64,
    into: *mut c_void,
    bytes: usize,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: the caller's contract.
        let into = unsafe { items_mut(into.cast::<u8>(), bytes, "into") }?;
        Ok(region.get_backup(Address(block as u64), skip, into)?)
    })
}

/// Makes later work of a stream wait for contents that a resume without waiting still copies. Does not block. VMMGRAPH_ERROR_WRONG_STATE unless the
/// region is resident: what is paused, or on its way on another thread, must not be used.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_before(
    region: vmmgraph_region_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Region, _>(region)?.before(stream_of(stream))?))
}

/// Limits the bytes of physical memory that the region may hold; 0: no limit but the device's. Nothing is taken away.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_set_budget(region: vmmgraph_region_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| {
        get::<Region, _>(region)?.set_budget(limit(bytes));
        Ok(())
    })
}

/// What the region holds now. Pages go on which nothing is left, if what freed blocks waited for is over by now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_stats(
    region: vmmgraph_region_t,
    stats: *mut vmmgraph_region_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = region.stats();
        stats.write(vmmgraph_region_stats_t {
            struct_size: stats.struct_size,
            resident_bytes: now.resident_bytes,
            paused_bytes: now.paused_bytes,
            host_bytes: now.host_bytes,
            live_bytes: now.live_bytes,
            free_bytes: now.free_bytes,
            reserved_bytes: now.reserved_bytes,
            blocks: now.blocks,
            pages: now.pages,
            generation: now.generation,
            paused: u64::from(now.paused),
            charged_bytes: now.account.charged_bytes,
            budget_bytes: now.account.most_bytes.unwrap_or(0),
        });
        Ok(())
    })
}
