use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, items, not_null};
use super::handle::get;
use super::ready::{hand_out, vmmgraph_ready_t};
use super::region::vmmgraph_region_t;
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::driver::Event;
use crate::error;
use crate::pages::{CopyPath, Events, Fence};
use crate::pause::{PauseReport, ResumeReport};
use crate::{Device, Region};

/// Nothing was copied.
pub const VMMGRAPH_COPY_NONE: i32 = 0;
/// Through registered (pinned) host memory, at the link's speed.
pub const VMMGRAPH_COPY_REGISTERED: i32 = 1;
/// Through a ring of small registered buffers: registration was refused.
pub const VMMGRAPH_COPY_RING: i32 = 2;
/// As pageable memory by the driver: no buffer could be registered.
pub const VMMGRAPH_COPY_PAGEABLE: i32 = 3;

/// Fence: work to complete before memory is unmapped.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_fence_t {
    pub struct_size: usize,
    /// All work submitted so far.
    pub streams: *const *mut c_void,
    pub stream_count: usize,
    /// Recorded events (CUevent or cudaEvent_t), which must exist until the call returns.
    pub events: *const *mut c_void,
    pub event_count: usize,
}

/// Report of a pause.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_pause_report_t {
    pub struct_size: usize,
    /// Regions and arenas paused by this call.
    pub regions: u64,
    pub pages: u64,
    pub bytes: u64,
    pub copied_bytes: u64,
    /// Bytes not copied: the host holds the contents of an earlier pause.
    pub clean_bytes: u64,
    /// Bytes resident by policy, or as private (exclusive) blocks.
    pub kept_bytes: u64,
    /// Bytes resident because of a failure.
    pub left_bytes: u64,
    /// Pages reported as unwritten but changed (VMMGRAPH_REGION_VERIFY_CLEAN).
    pub stale_pages: u64,
    pub calls: u64,
    /// The call returns the status of the first.
    pub failures: u64,
    pub micros: u64,
    /// From the start of the first copy to the end of the last.
    pub copy_micros: u64,
    /// 0: nothing was copied.
    pub copy_gib_per_second: f64,
    /// One of VMMGRAPH_COPY_*.
    pub path: i32,
    /// Always 0.
    pub reserved: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_resume_report_t {
    pub struct_size: usize,
    pub regions: u64,
    pub pages: u64,
    pub bytes: u64,
    pub copied_bytes: u64,
    pub zeroed_bytes: u64,
    pub calls: u64,
    pub micros: u64,
    /// Part of micros before all memory was available.
    pub waited_micros: u64,
    /// From the start of the first copy to the end of the last; 0: the call did not wait.
    pub copy_micros: u64,
    pub copy_gib_per_second: f64,
    /// One of VMMGRAPH_COPY_*.
    pub path: i32,
    /// Always 0.
    pub reserved: i32,
}

fn path_number(path: CopyPath) -> i32 {
    match path {
        CopyPath::None => VMMGRAPH_COPY_NONE,
        CopyPath::Registered => VMMGRAPH_COPY_REGISTERED,
        CopyPath::Ring => VMMGRAPH_COPY_RING,
        CopyPath::Pageable => VMMGRAPH_COPY_PAGEABLE,
    }
}

unsafe fn with_tags(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    count: usize,
    act: impl FnOnce(&Arc<Device>, &[&str]) -> Result<(), Failure>,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let tags = unsafe { items(tags, count, "tags")?.iter().map(|tag| text(*tag, "a tag")) };
        let tags: Vec<String> = tags.collect::<Result<_, _>>()?;
        act(&device, &tags.iter().map(String::as_str).collect::<Vec<_>>())
    })
}

/// `add` adds each recorded event.
pub(super) unsafe fn fence_with(
    device: &Device,
    fence: *const vmmgraph_fence_t,
    add: impl Fn(&Arc<Events>, &mut Fence, Event) -> error::Result<()>,
) -> Result<Fence, Failure> {
    let mut made = Fence::default();
    // SAFETY: contract.
    let Some(given) = (unsafe { options(fence) })? else { return Ok(made) };
    let events = device.pool().events();
    // SAFETY: contract.
    for stream in unsafe { items(given.streams, given.stream_count, "streams") }? {
        made.add(events, stream_of(*stream));
    }
    // SAFETY: contract.
    for event in unsafe { items(given.events, given.event_count, "events") }? {
        not_null(*event, "an event")?;
        // SAFETY: not null, so a recorded event.
        add(events, &mut made, unsafe { Event::from_raw(*event as u64) })?;
    }
    Ok(made)
}

/// For a call which waits for the fence.
pub(super) unsafe fn fence_of(device: &Device, fence: *const vmmgraph_fence_t) -> Result<Fence, Failure> {
    // SAFETY: the caller's contract; the events exist until the call returns.
    unsafe {
        fence_with(device, fence, |events, made, event| {
            made.add_event(events, event);
            Ok(())
        })
    }
}

/// Fails with the report's first failure.
pub(super) unsafe fn pause_with(
    device: &Device,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
    pause: impl FnOnce(Fence) -> error::Result<PauseReport>,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let (fence, to) = unsafe { (fence_of(device, fence)?, OutStruct::optional(report, "report")?) };
    let report = pause(fence)?;
    if let Some(to) = to {
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
    Ok(report.complete()?)
}

pub(super) unsafe fn resume_with(
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
    resume: impl FnOnce(Duration) -> error::Result<ResumeReport>,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let to = unsafe { OutStruct::optional(report, "report") }?;
    let report = resume(Duration::from_micros(deadline_micros))?;
    if let Some(to) = to {
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
    Ok(())
}

/// As vmmgraph_device_pause, for one region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_pause(
    region: vmmgraph_region_t,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: contract.
        unsafe { pause_with(region.device(), fence, report, |fence| region.pause(fence)) }
    })
}

/// As vmmgraph_device_resume, for one region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_region_resume(
    region: vmmgraph_region_t,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let region = get::<Region, _>(region)?;
        // SAFETY: contract.
        unsafe { resume_with(deadline_micros, report, |deadline| region.resume(deadline)) }
    })
}

/// Pauses all regions and arenas with one of the tags; without tags, all of the device. Waits for
/// the fence and the streams recorded for blocks, then releases pages by policy, and the device's
/// free pages. The caller must not submit work with this memory meanwhile. Continues after a
/// failure: the call returns the status of the first, and writes `report` anyway. Failed memory
/// stays resident with its contents, and the next pause retries. VMMGRAPH_ERROR_STREAM_CAPTURING
/// while a stream of the fence or of a block is under capture, and VMMGRAPH_ERROR_WRONG_STATE while
/// an arena has an open space: the call then pauses nothing more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_pause(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe {
        with_tags(device, tags, tag_count, |device, tags| {
            pause_with(device, fence, report, |fence| device.pause(tags, fence))
        })
    }
}

/// Resumes all regions and arenas with one of the tags, all or none; without tags, all of the
/// device. Returns after the contents are restored. If memory is short, retries until the deadline,
/// in microseconds from now; 0: as often as an allocation. After a failure everything is paused as
/// before, and the call can be repeated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_resume(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe {
        with_tags(device, tags, tag_count, |device, tags| {
            resume_with(deadline_micros, report, |deadline| device.resume(tags, deadline))
        })
    }
}

/// As vmmgraph_device_resume, but returns once everything is mapped; contents are then restored in
/// the order of the tags. `ready` (may be null) receives a handle per tag, destroyed by the caller.
/// Streams wait for contents by vmmgraph_ready_before or vmmgraph_region_before. Copies from
/// unregistered host memory complete before the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_resume_async(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    deadline_micros: u64,
    ready: *mut vmmgraph_ready_t,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe {
        with_tags(device, tags, tag_count, |device, tags| {
            resume_with(deadline_micros, report, |deadline| {
                let (done, coming) = device.resume_async(tags, deadline)?;
                hand_out(&coming, tags, ready);
                Ok(done)
            })
        })
    }
}
