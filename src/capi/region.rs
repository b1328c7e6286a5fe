//! Regions: memory that steps aside and comes back at the same addresses.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, items, items_mut, not_null, out, pick};
use super::handle::{get, register, remove};
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use crate::driver::Event;
use crate::error::Error;
use crate::pages::{CopyPath, Fence, Moved, PauseHooks, PauseReport, ResumeReport};
use crate::{Address, Device, Policy, Region, RegionOptions};

/// Never defined: a vmmgraph_region_t is a key, not an address.
pub struct vmmgraph_region {
    _private: (),
}

/// A region: memory with a tag that can step aside. Calls with it are thread-safe.
pub type vmmgraph_region_t = *mut vmmgraph_region;

/// Never defined: a vmmgraph_pause_hooks_t is a key, not an address.
pub struct vmmgraph_pause_hooks {
    _private: (),
}

/// Hooks that are told when memory goes and comes, until they are destroyed.
pub type vmmgraph_pause_hooks_t = *mut vmmgraph_pause_hooks;

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

/// Nothing was copied.
pub const VMMGRAPH_COPY_NONE: i32 = 0;
/// From and to registered host memory, at the link's speed.
pub const VMMGRAPH_COPY_REGISTERED: i32 = 1;
/// Registration was refused: over a ring of small registered buffers.
pub const VMMGRAPH_COPY_RING: i32 = 2;
/// Not even those: as the driver copies pageable memory.
pub const VMMGRAPH_COPY_PAGEABLE: i32 = 3;

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

/// What must be over before memory steps aside. Zero everything, then set struct_size and what there is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_fence_t {
    /// sizeof(vmmgraph_fence_t).
    pub struct_size: usize,
    /// Streams: everything given to them so far.
    pub streams: *const *mut c_void,
    /// How many.
    pub stream_count: usize,
    /// Events (CUevent or cudaEvent_t) that were recorded and stay until the call returns.
    pub events: *const *mut c_void,
    /// How many.
    pub event_count: usize,
}

/// What a pause did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_pause_report_t {
    /// Set to sizeof(vmmgraph_pause_report_t) before the call.
    pub struct_size: usize,
    /// Regions paused by this call; those that were before are not counted.
    pub regions: u64,
    /// Pages that went.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes copied to the host.
    pub copied_bytes: u64,
    /// Bytes that were not copied, because the host has them from an earlier pause.
    pub clean_bytes: u64,
    /// Bytes that stay by their policy.
    pub kept_bytes: u64,
    /// Bytes that stay because something failed.
    pub left_bytes: u64,
    /// Pages that were said to be unwritten and were not (VMMGRAPH_REGION_VERIFY_CLEAN).
    pub stale_pages: u64,
    /// Calls to the driver.
    pub calls: u64,
    /// Failures; the call returns the status of the first.
    pub failures: u64,
    /// All of it, in microseconds.
    pub micros: u64,
    /// From the first copy to the end of the last, in microseconds.
    pub copy_micros: u64,
    /// Copied bytes in GiB a second of that time; 0: nothing was copied.
    pub copy_gib_per_second: f64,
    /// One of VMMGRAPH_COPY_*.
    pub path: i32,
    /// 0.
    pub reserved: i32,
}

/// What a resume did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_resume_report_t {
    /// Set to sizeof(vmmgraph_resume_report_t) before the call.
    pub struct_size: usize,
    /// Regions that came back by this call.
    pub regions: u64,
    /// Pages that came.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes copied from the host.
    pub copied_bytes: u64,
    /// Bytes set to zero.
    pub zeroed_bytes: u64,
    /// Calls to the driver.
    pub calls: u64,
    /// All of it, in microseconds.
    pub micros: u64,
    /// Of these, until the memory was had, in microseconds.
    pub waited_micros: u64,
    /// From the first copy to the end of the last, in microseconds; 0: nobody waited for that.
    pub copy_micros: u64,
    /// Copied bytes in GiB a second of that time.
    pub copy_gib_per_second: f64,
    /// One of VMMGRAPH_COPY_*.
    pub path: i32,
    /// 0.
    pub reserved: i32,
}

/// What the host pool of a device holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_stats_t {
    /// Set to sizeof(vmmgraph_host_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes held from the operating system.
    pub held_bytes: u64,
    /// Those of them that are registered with the device.
    pub registered_bytes: u64,
    /// Bytes that no contents are in.
    pub free_bytes: u64,
    /// The most it may hold; 0: no limit.
    pub limit_bytes: u64,
}

/// A stretch of device addresses. It never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_range_t {
    /// Where it begins.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// Memory that goes or has come.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_moved_t {
    /// sizeof(vmmgraph_moved_t) of the library.
    pub struct_size: usize,
    /// The region's tag, zero-terminated.
    pub tag: *const c_char,
    /// The region's number, unique in the process.
    pub region: u64,
    /// Counts the region's mappings.
    pub generation: u64,
    /// The addresses, in order.
    pub ranges: *const vmmgraph_range_t,
    /// How many.
    pub range_count: usize,
}

/// Told that memory goes or has come; `moved` is valid during the call. Must not throw. No lock of the library's is held; pausing or
/// resuming the same region there is VMMGRAPH_ERROR_WRONG_STATE.
pub type vmmgraph_moved_fn = Option<unsafe extern "C" fn(moved: *const vmmgraph_moved_t, user: *mut c_void)>;

/// What C calls these policies, from VMMGRAPH_POLICY_DEFAULT on.
const POLICIES: [Option<Policy>; 5] =
    [None, Some(Policy::Discard), Some(Policy::Zero), Some(Policy::Backup), Some(Policy::Keep)];

fn path_number(path: CopyPath) -> i32 {
    match path {
        CopyPath::None => VMMGRAPH_COPY_NONE,
        CopyPath::Registered => VMMGRAPH_COPY_REGISTERED,
        CopyPath::Ring => VMMGRAPH_COPY_RING,
        CopyPath::Pageable => VMMGRAPH_COPY_PAGEABLE,
    }
}

fn limit(bytes: u64) -> Option<u64> {
    (bytes > 0).then_some(bytes)
}

/// The text of the argument `what`.
///
/// # Safety
/// The pointer is null or points to a zero-terminated string.
unsafe fn text(pointer: *const c_char, what: &'static str) -> Result<String, Failure> {
    not_null(pointer, what)?;
    // SAFETY: not null, so a string by the caller's contract.
    Ok(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// The tags that C names.
///
/// # Safety
/// `tags` is null or points to `count` pointers as [`text`] wants them.
unsafe fn tags_of(tags: *const *const c_char, count: usize) -> Result<Vec<String>, Failure> {
    // SAFETY: the caller's contract.
    unsafe { items(tags, count, "tags")?.iter().map(|tag| text(*tag, "a tag")).collect() }
}

/// The fence that C describes; null: nothing.
///
/// # Safety
/// As vmmgraph_device_pause asks.
unsafe fn fence_of(device: &Device, fence: *const vmmgraph_fence_t) -> Result<Fence, Failure> {
    let mut made = Fence::default();
    // SAFETY: the caller's contract.
    let given = unsafe { options(fence) }?;
    let Some(given) = given else { return Ok(made) };
    let events = device.pool().events();
    // SAFETY: the caller's contract.
    for stream in unsafe { items(given.streams, given.stream_count, "streams") }? {
        made.add(events, stream_of(*stream));
    }
    // SAFETY: the caller's contract.
    for event in unsafe { items(given.events, given.event_count, "events") }? {
        not_null(*event, "an event")?;
        // SAFETY: recorded events of the caller's that stay, by the caller's contract.
        unsafe { made.add_event(events, Event::from_raw(*event as u64)) };
    }
    Ok(made)
}

/// Where a report goes, if somebody wants it.
///
/// # Safety
/// The pointer is null or points to a struct whose struct_size is set.
unsafe fn wanted<T: Copy>(report: *mut T) -> Result<Option<OutStruct<T>>, Failure> {
    if report.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    unsafe { OutStruct::new(report, "report") }.map(Some)
}

fn write_pause(to: Option<&OutStruct<vmmgraph_pause_report_t>>, report: &PauseReport) {
    let Some(to) = to else { return };
    to.write(vmmgraph_pause_report_t {
        struct_size: to.struct_size,
        regions: report.regions,
        pages: report.pages,
        bytes: report.bytes,
        copied_bytes: report.copied_bytes,
        clean_bytes: report.clean_bytes,
        kept_bytes: report.kept_bytes,
        left_bytes: report.left_bytes,
        stale_pages: report.stale_pages,
        calls: report.calls,
        failures: report.failures.len() as u64,
        micros: report.micros,
        copy_micros: report.copy_micros,
        copy_gib_per_second: report.copy_gib_per_second(),
        path: path_number(report.path),
        reserved: 0,
    });
}

fn write_resume(to: Option<&OutStruct<vmmgraph_resume_report_t>>, report: &ResumeReport) {
    let Some(to) = to else { return };
    to.write(vmmgraph_resume_report_t {
        struct_size: to.struct_size,
        regions: report.regions,
        pages: report.pages,
        bytes: report.bytes,
        copied_bytes: report.copied_bytes,
        zeroed_bytes: report.zeroed_bytes,
        calls: report.calls,
        micros: report.micros,
        waited_micros: report.waited_micros,
        copy_micros: report.copy_micros,
        copy_gib_per_second: report.copy_gib_per_second(),
        path: path_number(report.path),
        reserved: 0,
    });
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
        let mut made = RegionOptions::default();
        // SAFETY: the caller's contract.
        if let Some(given) = unsafe { self::options(options) }? {
            if given.flags & !(VMMGRAPH_REGION_READ_ONLY | VMMGRAPH_REGION_VERIFY_CLEAN) != 0 {
                let (value, expected) = (i128::from(given.flags), "a sum of VMMGRAPH_REGION_*");
                return Err(Error::InvalidArgument { what: "flags", value, expected }.into());
            }
            made = RegionOptions {
                policy: pick("policy", given.policy, &POLICIES)?.unwrap_or_default(),
                budget_bytes: limit(given.budget_bytes),
                page_bytes: given.page_bytes,
                read_only: given.flags & VMMGRAPH_REGION_READ_ONLY != 0,
                verify_clean: given.flags & VMMGRAPH_REGION_VERIFY_CLEAN != 0,
            };
        }
        *region = register(device.region(&tag, made)?);
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
/// VMMGRAPH_POLICY_*. VMMGRAPH_ERROR_WRONG_STATE while the region is paused. The stream exists until the block is freed.
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

/// Copies `bytes` bytes of a paused block's backup, from `skip` on, to `into`, without resuming.
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

/// Makes later work of a stream wait for contents that a resume without waiting still copies. Does not block.
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

/// What the region holds now.
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

/// As vmmgraph_device_pause, for one region.
///
/// # Safety
/// As vmmgraph_device_pause.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_pause(
    region: vmmgraph_region_t,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: the caller's contract.
        let (fence, to) = unsafe { (fence_of(region.device(), fence)?, wanted(report)?) };
        let report = region.pause(fence)?;
        write_pause(to.as_ref(), &report);
        Ok(report.complete()?)
    })
}

/// As vmmgraph_device_resume, for one region.
///
/// # Safety
/// As vmmgraph_device_resume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_resume(
    region: vmmgraph_region_t,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: the caller's contract.
        let to = unsafe { wanted(report) }?;
        write_resume(to.as_ref(), &region.resume(Duration::from_micros(deadline_micros))?);
        Ok(())
    })
}

/// Pauses the regions with one of these tags; none: all regions. Waits for the fence (null: nothing) and for what was given to the
/// streams noted for their blocks; then pages go as their policy says. The caller submits nothing that uses them meanwhile.
///
/// Goes on past failures: then the status is that of the first, `report` (may be null) is written all the same, what failed stays with
/// its contents, and the next pause tries it again. What is paused already stays so. While a stream of the fence or of a block is
/// being captured, it is VMMGRAPH_ERROR_STREAM_CAPTURING and nothing more is paused. The device's free pages go back to the driver too.
///
/// # Safety
/// `tags` is null or points to `tag_count` zero-terminated strings; `fence` is null or points to a struct whose struct_size is set, with
/// as many streams and recorded events as it says; `report` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_pause(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (tags, fence, to) =
            unsafe { (tags_of(tags, tag_count)?, fence_of(&device, fence)?, wanted(report)?) };
        let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
        let report = device.pause(&tags, fence)?;
        write_pause(to.as_ref(), &report);
        Ok(report.complete()?)
    })
}

/// Resumes the regions with one of these tags, all or none; no tag: all regions. Returns when the contents are there. While there is no
/// memory it asks again until the deadline, in microseconds from now; 0: as an allocation does. On failure everything is paused as
/// before, the host has the contents, and the call can be repeated. What is there already stays. `report` may be null.
///
/// # Safety
/// `tags` and `report` as in vmmgraph_device_pause.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_resume(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (tags, to) = unsafe { (tags_of(tags, tag_count)?, wanted(report)?) };
        let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
        write_resume(to.as_ref(), &device.resume(&tags, Duration::from_micros(deadline_micros))?);
        Ok(())
    })
}

/// As vmmgraph_device_resume, but returns as soon as everything is mapped. The contents are copied in the order of the tags; a stream
/// that needs a region's waits for them by vmmgraph_region_before.
///
/// # Safety
/// As vmmgraph_device_resume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_resume_async(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (tags, to) = unsafe { (tags_of(tags, tag_count)?, wanted(report)?) };
        let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
        let (report, _) = device.resume_async(&tags, Duration::from_micros(deadline_micros))?;
        write_resume(to.as_ref(), &report);
        Ok(())
    })
}

/// Makes sure that the device's host pool holds `bytes` at least, in use or not: mapped, faulted in, and registered where that is
/// granted, so that a pause need not do it.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_prepare_backup(device: vmmgraph_device_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.host_pool().prepare(bytes)?))
}

/// Limits the bytes that the device's host pool may hold; 0: no limit. Nothing is taken away.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_set_host_budget(
    device: vmmgraph_device_t,
    bytes: u64,
) -> vmmgraph_status_t {
    guard(|| {
        get::<Device, _>(device)?.host_pool().set_limit(limit(bytes));
        Ok(())
    })
}

/// Gives back to the operating system what no contents are in. `released` (may be null) receives the bytes.
///
/// # Safety
/// `released` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_trim_host(
    device: vmmgraph_device_t,
    released: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let bytes = get::<Device, _>(device)?.host_pool().trim()?;
        if !released.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { *released = bytes };
        }
        Ok(())
    })
}

/// What the device's host pool holds now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_host_stats(
    device: vmmgraph_device_t,
    stats: *mut vmmgraph_host_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = device.host_pool().stats();
        stats.write(vmmgraph_host_stats_t {
            struct_size: stats.struct_size,
            held_bytes: now.held_bytes,
            registered_bytes: now.registered_bytes,
            free_bytes: now.free_bytes,
            limit_bytes: now.limit_bytes.unwrap_or(0),
        });
        Ok(())
    })
}

/// C functions that are told.
pub(super) struct Hooks {
    before_unmap: vmmgraph_moved_fn,
    after_map: vmmgraph_moved_fn,
    user: *mut c_void,
}

// SAFETY: the caller of vmmgraph_device_add_pause_hooks promises that the functions may be called with `user` from any thread.
unsafe impl Send for Hooks {}
// SAFETY: as above.
unsafe impl Sync for Hooks {}

impl Hooks {
    fn tell(&self, function: vmmgraph_moved_fn, moved: &Moved<'_>) {
        let Some(function) = function else { return };
        let mut tag: Vec<u8> = moved.tag.bytes().filter(|byte| *byte != 0).collect();
        tag.push(0);
        let range = |(at, bytes): &(Address, u64)| vmmgraph_range_t { address: at.0, bytes: *bytes };
        let ranges: Vec<_> = moved.ranges.iter().map(range).collect();
        let told = vmmgraph_moved_t {
            struct_size: size_of::<vmmgraph_moved_t>(),
            tag: tag.as_ptr().cast(),
            region: moved.region,
            generation: moved.generation,
            ranges: ranges.as_ptr(),
            range_count: ranges.len(),
        };
        // SAFETY: the caller of vmmgraph_device_add_pause_hooks promised that it may be called so.
        unsafe { function(&raw const told, self.user) };
    }
}

impl PauseHooks for Hooks {
    fn before_unmap(&self, moved: &Moved<'_>) {
        self.tell(self.before_unmap, moved);
    }
    fn after_map(&self, moved: &Moved<'_>) {
        self.tell(self.after_map, moved);
    }
}

/// Calls `before_unmap` when memory with this tag is not used any more and is unmapped next, and `after_map` when it is there again, on
/// other pages; an empty tag: of all regions. Either may be null. For registrations that hold pages: NCCL's, RDMA's.
///
/// # Safety
/// `tag` is null or a zero-terminated string; the functions may be called with `user` from any thread until vmmgraph_pause_hooks_destroy
/// and the pauses and resumes that were under way then have returned; `hooks` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_add_pause_hooks(
    device: vmmgraph_device_t,
    tag: *const c_char,
    before_unmap: vmmgraph_moved_fn,
    after_map: vmmgraph_moved_fn,
    user: *mut c_void,
    hooks: *mut vmmgraph_pause_hooks_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (tag, hooks) = unsafe { (text(tag, "tag")?, out(hooks, "hooks")?) };
        let made = Arc::new(Hooks { before_unmap, after_map, user });
        let told: Arc<dyn PauseHooks> = made.clone();
        device.add_pause_hooks(&tag, &told);
        *hooks = register(made);
        Ok(())
    })
}

/// The hooks are called no more, but by pauses and resumes that are under way.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pause_hooks_destroy(hooks: vmmgraph_pause_hooks_t) -> vmmgraph_status_t {
    guard(|| remove::<Hooks, _>(hooks).map(drop))
}
