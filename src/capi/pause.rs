//! Regions step aside and come back: fences, reports, hooks.

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
use crate::pages::{CopyPath, Fence, Moved, PauseHooks, PauseReport, ResumeReport};
use crate::{Address, Device, Region};

/// Never defined: a vmmgraph_pause_hooks_t is a key, not an address.
pub struct vmmgraph_pause_hooks {
    _private: (),
}

/// Hooks that are told when memory goes and comes, until they are destroyed.
pub type vmmgraph_pause_hooks_t = *mut vmmgraph_pause_hooks;

/// Nothing was copied.
pub const VMMGRAPH_COPY_NONE: i32 = 0;
/// From and to registered host memory, at the link's speed.
pub const VMMGRAPH_COPY_REGISTERED: i32 = 1;
/// Registration was refused: over a ring of small registered buffers.
pub const VMMGRAPH_COPY_RING: i32 = 2;
/// Not even those: as the driver copies pageable memory.
pub const VMMGRAPH_COPY_PAGEABLE: i32 = 3;

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
    /// Regions and arenas paused by this call; those that were before are not counted.
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
    /// Regions and arenas that came back by this call.
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
    /// The region's number, or the arena's, unique in the process.
    pub region: u64,
    /// Counts its mappings.
    pub generation: u64,
    /// The addresses, in order.
    pub ranges: *const vmmgraph_range_t,
    /// How many.
    pub range_count: usize,
}

/// Told that memory goes or has come; `moved` is valid during the call. Must not throw. No lock of the library's is held; pausing or
/// resuming the same region there is VMMGRAPH_ERROR_WRONG_STATE.
pub type vmmgraph_moved_fn = Option<unsafe extern "C" fn(moved: *const vmmgraph_moved_t, user: *mut c_void)>;

fn path_number(path: CopyPath) -> i32 {
    match path {
        CopyPath::None => VMMGRAPH_COPY_NONE,
        CopyPath::Registered => VMMGRAPH_COPY_REGISTERED,
        CopyPath::Ring => VMMGRAPH_COPY_RING,
        CopyPath::Pageable => VMMGRAPH_COPY_PAGEABLE,
    }
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
        // SAFETY: recorded events of the caller's that stay, by the caller's contract.
        unsafe { made.add_event(events, Event::from_raw(*event as u64)) };
    }
    Ok(made)
}

/// Where a report goes, if somebody wants it.
///
/// # Safety
/// The pointer is null or points to a struct whose struct_size is set.
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

/// Pauses the regions and arenas with one of these tags; none: all of the device. Waits for the fence (null: nothing) and for what was given to the
/// streams noted for their blocks; then pages go as their policy says. The caller submits nothing that uses them meanwhile.
///
/// Goes on past failures: then the status is that of the first, `report` (may be null) is written all the same, what failed stays with
/// its contents, and the next pause tries it again. What is paused already stays so. While a stream of the fence or of a block is
/// being captured, it is VMMGRAPH_ERROR_STREAM_CAPTURING and nothing more is paused; while an arena has an open space, VMMGRAPH_ERROR_WRONG_STATE. The device's free pages go back to the driver too.
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

/// Resumes the regions and arenas with one of these tags, all or none; no tag: all of the device. Returns when the contents are there. While there is no
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

/// As vmmgraph_device_resume, but returns as soon as everything is mapped. The contents are copied in the order of the tags; `ready` (may be
/// null) receives a handle for the contents of each, which the caller destroys. A stream that needs a region's contents waits for
/// them by vmmgraph_ready_before or vmmgraph_region_before.
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
