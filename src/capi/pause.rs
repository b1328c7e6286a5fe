//! Pause and resume in C: fences, reports, hooks.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, items, not_null, out};
use super::handle::{get, register, remove};
use super::ready::{hand_out, vmmgraph_ready_t};
use super::region::vmmgraph_region_t;
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::driver::Event;
use crate::pages::{CopyPath, Fence};
use crate::pause::{Moved, PauseHooks, PauseReport, ResumeReport};
use crate::{Address, Device, Region};

/// Opaque; never defined.
pub struct vmmgraph_pause_hooks {
    _private: (),
}

/// Hooks called before a pause unmaps memory and after a resume maps memory, until destroyed.
pub type vmmgraph_pause_hooks_t = *mut vmmgraph_pause_hooks;

/// Nothing was copied.
pub const VMMGRAPH_COPY_NONE: i32 = 0;
/// Copied through registered (pinned) host memory, at the link's speed.
pub const VMMGRAPH_COPY_REGISTERED: i32 = 1;
/// Copied through a ring of small registered buffers: registration of the host memory was refused.
pub const VMMGRAPH_COPY_RING: i32 = 2;
/// Copied as pageable memory by the driver: no buffer could be registered.
pub const VMMGRAPH_COPY_PAGEABLE: i32 = 3;

/// Fence: work to complete before memory is unmapped.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_fence_t {
    /// sizeof(vmmgraph_fence_t).
    pub struct_size: usize,
    /// Streams: all work submitted so far.
    pub streams: *const *mut c_void,
    /// Number of streams.
    pub stream_count: usize,
    /// Recorded events (CUevent or cudaEvent_t), which must exist until the call returns.
    pub events: *const *mut c_void,
    /// Number of events.
    pub event_count: usize,
}

/// Report of a pause.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_pause_report_t {
    /// Set to sizeof(vmmgraph_pause_report_t) before the call.
    pub struct_size: usize,
    /// Regions and arenas paused by this call, without those already paused.
    pub regions: u64,
    /// Pages released.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Bytes copied to the host.
    pub copied_bytes: u64,
    /// Bytes not copied, since the host holds the contents of an earlier pause.
    pub clean_bytes: u64,
    /// Bytes resident by policy, or as private (exclusive) blocks.
    pub kept_bytes: u64,
    /// Bytes resident because of a failure.
    pub left_bytes: u64,
    /// Pages reported as unwritten but changed (VMMGRAPH_REGION_VERIFY_CLEAN).
    pub stale_pages: u64,
    /// Driver calls.
    pub calls: u64,
    /// Failures; the call returns the status of the first.
    pub failures: u64,
    /// Total duration in microseconds.
    pub micros: u64,
    /// Microseconds from the start of the first copy to the end of the last.
    pub copy_micros: u64,
    /// Copied GiB per second of copy_micros; 0: nothing was copied.
    pub copy_gib_per_second: f64,
    /// One of VMMGRAPH_COPY_*.
    pub path: i32,
    /// Always 0.
    pub reserved: i32,
}

/// Report of a resume.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_resume_report_t {
    /// Set to sizeof(vmmgraph_resume_report_t) before the call.
    pub struct_size: usize,
    /// Regions and arenas resumed by this call.
    pub regions: u64,
    /// Pages mapped.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Bytes copied from the host.
    pub copied_bytes: u64,
    /// Bytes set to zero.
    pub zeroed_bytes: u64,
    /// Driver calls.
    pub calls: u64,
    /// Total duration in microseconds.
    pub micros: u64,
    /// Part of micros before all memory was available.
    pub waited_micros: u64,
    /// Microseconds from the start of the first copy to the end of the last; 0: the call did not
    /// wait.
    pub copy_micros: u64,
    /// Copied GiB per second of copy_micros.
    pub copy_gib_per_second: f64,
    /// One of VMMGRAPH_COPY_*.
    pub path: i32,
    /// Always 0.
    pub reserved: i32,
}

/// Range of device addresses. Never grows; no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_range_t {
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Memory about to be unmapped, or mapped again.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_moved_t {
    /// sizeof(vmmgraph_moved_t) of the library.
    pub struct_size: usize,
    /// Tag of the region or arena, zero-terminated.
    pub tag: *const c_char,
    /// Number of the region or arena, unique in the process.
    pub region: u64,
    /// Counts the mappings of the memory; a registration is valid for one generation.
    pub generation: u64,
    /// Address ranges in order.
    pub ranges: *const vmmgraph_range_t,
    /// Number of ranges.
    pub range_count: usize,
}

/// Receives memory about to be unmapped, or mapped again; `moved` is valid during the call. Must
/// not throw. Pausing or resuming the same region inside is VMMGRAPH_ERROR_WRONG_STATE.
pub type vmmgraph_moved_fn = Option<unsafe extern "C" fn(moved: *const vmmgraph_moved_t, user: *mut c_void)>;

fn path_number(path: CopyPath) -> i32 {
    match path {
        CopyPath::None => VMMGRAPH_COPY_NONE,
        CopyPath::Registered => VMMGRAPH_COPY_REGISTERED,
        CopyPath::Ring => VMMGRAPH_COPY_RING,
        CopyPath::Pageable => VMMGRAPH_COPY_PAGEABLE,
    }
}

/// Reads tags from C.
///
/// # Safety
/// `tags` is null or points to `count` pointers as for [`text`].
unsafe fn tags_of(tags: *const *const c_char, count: usize) -> Result<Vec<String>, Failure> {
    // SAFETY: the caller's contract.
    unsafe { items(tags, count, "tags")?.iter().map(|tag| text(*tag, "a tag")).collect() }
}

/// Builds the fence described in C; null: an empty fence.
///
/// # Safety
/// As for vmmgraph_device_pause.
pub(super) unsafe fn fence_of(device: &Device, fence: *const vmmgraph_fence_t) -> Result<Fence, Failure> {
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
        // SAFETY: recorded events, existing until the call returns by the caller's contract.
        unsafe { made.add_event(events, Event::from_raw(*event as u64)) };
    }
    Ok(made)
}

/// Wraps the caller's report, unless null.
///
/// # Safety
/// The pointer is null or points to a struct with struct_size set.
pub(super) unsafe fn wanted<T: Copy>(report: *mut T) -> Result<Option<OutStruct<T>>, Failure> {
    if report.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    unsafe { OutStruct::new(report, "report") }.map(Some)
}

pub(super) fn write_pause(to: Option<&OutStruct<vmmgraph_pause_report_t>>, report: &PauseReport) {
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

pub(super) fn write_resume(to: Option<&OutStruct<vmmgraph_resume_report_t>>, report: &ResumeReport) {
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

/// Pauses all regions and arenas with one of the tags; without tags, all of the device. Waits for
/// the fence (null: empty) and for the work on streams recorded for blocks. Then releases pages by
/// policy, and the device's free pages. The caller must not submit work with this memory meanwhile.
///
/// Continues after a failure: the call returns the status of the first failure, and `report` (may
/// be null) is written anyway. Failed memory stays resident with its contents, and the next pause
/// retries. Memory already paused stays paused. VMMGRAPH_ERROR_STREAM_CAPTURING while a stream of
/// the fence or of a block is under capture, and VMMGRAPH_ERROR_WRONG_STATE while an arena has an
/// open space: the call then pauses nothing more.
///
/// # Safety
/// `tags` is null or points to `tag_count` zero-terminated strings; `fence` is null or points to a
/// struct with struct_size set and valid arrays of streams and recorded events; `report` is null or
/// points to a struct with struct_size set.
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

/// Resumes all regions and arenas with one of the tags, all or none; without tags, all of the
/// device. Returns after the contents are restored. Without enough memory, retries until the
/// deadline, in microseconds from now; 0: as often as an allocation. After a failure everything is
/// paused as before, the host holds the contents, and the call can be repeated. Resident memory is
/// skipped. `report` may be null.
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

/// As vmmgraph_device_resume, but returns once everything is mapped. Contents are then restored in
/// the order of the tags. `ready` (may be null) receives a handle per tag, destroyed by the caller.
/// A stream which needs a region's contents waits by vmmgraph_ready_before or
/// vmmgraph_region_before. Copies from unregistered host memory complete before the call returns.
///
/// # Safety
/// As vmmgraph_device_resume; `ready` is null or points to `tag_count` handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_resume_async(
    device: vmmgraph_device_t,
    tags: *const *const c_char,
    tag_count: usize,
    deadline_micros: u64,
    ready: *mut vmmgraph_ready_t,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (tags, to) = unsafe { (tags_of(tags, tag_count)?, wanted(report)?) };
        let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
        let (done, coming) = device.resume_async(&tags, Duration::from_micros(deadline_micros))?;
        // SAFETY: the caller's contract.
        unsafe { hand_out(&coming, &tags, ready) };
        write_resume(to.as_ref(), &done);
        Ok(())
    })
}

/// Pause hooks implemented by C functions.
pub(super) struct Hooks {
    before_unmap: vmmgraph_moved_fn,
    after_map: vmmgraph_moved_fn,
    user: *mut c_void,
}

// SAFETY: the caller of vmmgraph_device_add_pause_hooks allowed calls with `user` from any thread.
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
        // SAFETY: the caller of vmmgraph_device_add_pause_hooks allowed this call.
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

/// Adds hooks for memory with the tag; an empty tag: for all memory. `before_unmap` is called when
/// no work uses the memory any more, just before the unmap. `after_map` is called after the memory
/// is mapped again, on other pages. Either may be null. For registrations of pages, by NCCL or for
/// RDMA.
///
/// # Safety
/// `tag` is null or a zero-terminated string. The functions may be called with `user` from any
/// thread until vmmgraph_pause_hooks_destroy and all pauses and resumes then in progress have
/// returned. `hooks` is null or writable.
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

/// Destroys the hooks. Pauses and resumes in progress may still call the functions.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pause_hooks_destroy(hooks: vmmgraph_pause_hooks_t) -> vmmgraph_status_t {
    guard(|| remove::<Hooks, _>(hooks).map(drop))
}
