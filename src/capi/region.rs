use std::ffi::{c_char, c_void};

use super::account::{vmmgraph_account_t, with_account};
use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::Failure;
use super::guard::{guard, items_mut, out, pick};
use super::handle::{get, register, remove};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::error::Error;
use crate::{Address, Device, Policy, Region, RegionOptions};

pub struct vmmgraph_region {
    _private: (),
}

/// Region: memory with a tag which can be paused.
pub type vmmgraph_region_t = *mut vmmgraph_region;

/// In a block's policy: the region's; in a region's: VMMGRAPH_POLICY_DISCARD.
pub const VMMGRAPH_POLICY_DEFAULT: i32 = 0;
/// A pause discards the contents: undefined after a resume.
pub const VMMGRAPH_POLICY_DISCARD: i32 = 1;
/// The contents are zero after a resume.
pub const VMMGRAPH_POLICY_ZERO: i32 = 2;
/// A pause copies the contents to host memory, and a resume restores them.
pub const VMMGRAPH_POLICY_BACKUP: i32 = 3;
/// A pause leaves the memory resident.
pub const VMMGRAPH_POLICY_KEEP: i32 = 4;

/// Blocks are written once, before the first pause: the host keeps that backup, and later pauses
/// copy nothing. Report other writes by vmmgraph_region_mark_written.
pub const VMMGRAPH_REGION_READ_ONLY: i32 = 1;
/// For debugging: a pause copies anyway and compares with the backup.
pub const VMMGRAPH_REGION_VERIFY_CLEAN: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_region_options_t {
    pub struct_size: usize,
    /// Default policy of the region's blocks.
    pub policy: i32,
    /// Sum of VMMGRAPH_REGION_* flags.
    pub flags: i32,
    /// Limit in bytes of the region's physical memory.
    pub budget_bytes: u64,
    /// A multiple of the device's granularity, for regions with pages to be lent; 0: automatic, up
    /// to 1 GiB.
    pub page_bytes: u64,
    /// Parent of the region's account; null: the device's account.
    pub account: vmmgraph_account_t,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_region_stats_t {
    pub struct_size: usize,
    pub resident_bytes: u64,
    /// Paused (non-resident) pages.
    pub paused_bytes: u64,
    /// Contents on the host.
    pub host_bytes: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// Bytes without a block.
    pub free_bytes: u64,
    pub reserved_bytes: u64,
    pub blocks: u64,
    /// Resident or not.
    pub pages: u64,
    /// Counts the mappings of the region, from 1; a registration is valid for one generation.
    pub generation: u64,
    pub paused: u64,
    /// Bytes charged to the budget.
    pub charged_bytes: u64,
    pub budget_bytes: u64,
}

/// From VMMGRAPH_POLICY_DEFAULT.
const POLICIES: [Option<Policy>; 5] =
    [None, Some(Policy::Discard), Some(Policy::Zero), Some(Policy::Backup), Some(Policy::Keep)];

/// Converts a policy number, for the bridge; `None`: the region's policy.
pub fn policy_of(number: i32) -> crate::error::Result<Option<Policy>> {
    pick("policy", number, &POLICIES).map_err(|failure| match failure {
        Failure::Error(error) | Failure::Status(_, error) => error,
    })
}

/// Creates a region. Several regions may have the same `tag`. `options` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_create(
    device: vmmgraph_device_t,
    tag: *const c_char,
    options: *const vmmgraph_region_options_t,
    region: *mut vmmgraph_region_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (tag, region) = unsafe { (text(tag, "tag")?, out(region, "region")?) };
        let (mut made, mut above) = (RegionOptions::default(), std::ptr::null_mut());
        // SAFETY: contract.
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

/// Destroys the region and all its blocks, paused or not, after the work on their recorded streams.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_destroy(region: vmmgraph_region_t) -> vmmgraph_status_t {
    guard(|| remove::<Region, _>(region).map(drop))
}

/// Allocates a block of at least `bytes` bytes for work on `stream`, which must exist until the
/// block is freed; the address never changes. VMMGRAPH_ERROR_WRONG_STATE while the region is
/// paused. If vmmgraph_device_resume_async is still restoring bytes of the block, later work of
/// `stream` waits for the copy, or the call waits if `stream` is under capture.
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
        // SAFETY: contract.
        let block = unsafe { out(block, "block") }?;
        let at = match pick("policy", policy, &POLICIES)? {
            Some(policy) => region.allocate_as(bytes, policy, stream_of(stream))?,
            None => region.allocate(bytes, stream_of(stream))?,
        };
        *block = at.0 as *mut c_void;
        Ok(())
    })
}

/// Frees a block, also in a paused region. Its bytes are reused after the work on its recorded
/// streams.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_free(region: vmmgraph_region_t, block: *mut c_void) -> vmmgraph_status_t {
    guard(|| Ok(get::<Region, _>(region)?.free(Address(block as u64))?))
}

/// Records use of a block on a stream, which must exist until the block is freed: a free and a
/// pause wait for the work submitted by then.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_record_stream(
    region: vmmgraph_region_t,
    block: *mut c_void,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Region, _>(region)?.record_stream(Address(block as u64), stream_of(stream))?))
}

/// Reports a write to a block since its backup; null: to all blocks. The next pause of a
/// VMMGRAPH_REGION_READ_ONLY region copies them again. VMMGRAPH_ERROR_WRONG_STATE unless the region
/// is resident.
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

/// Copies `bytes` bytes of a paused block's backup, from offset `skip`, to `into`.
/// VMMGRAPH_ERROR_WRONG_STATE unless the region is paused and the host has these bytes;
/// VMMGRAPH_ERROR_INVALID_SIZE beyond the block's end.
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
        // SAFETY: contract.
        let into = unsafe { items_mut(into.cast::<u8>(), bytes, "into") }?;
        Ok(region.get_backup(Address(block as u64), skip, into)?)
    })
}

/// Makes later work of `stream` wait for contents which vmmgraph_device_resume_async is still
/// restoring. Does not block. VMMGRAPH_ERROR_WRONG_STATE unless the region is resident: its memory
/// must not be used.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_before(
    region: vmmgraph_region_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Region, _>(region)?.before(stream_of(stream))?))
}

#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_region_set_budget(region: vmmgraph_region_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| {
        get::<Region, _>(region)?.set_budget(limit(bytes));
        Ok(())
    })
}

/// Writes the statistics, after freeing pages without blocks whose work is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_stats(
    region: vmmgraph_region_t,
    stats: *mut vmmgraph_region_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: contract.
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
