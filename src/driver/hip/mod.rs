//! The HIP driver: `hipMem*` of AMD's ROCm 6.2 and newer.
//!
//! Built against the headers of HIP 6.2 and 7.1 and against a stand-in that keeps ROCm's rules; never run on a device. Where a rule is cited, its
//! source is ROCm's own (CLR 6.0 to 6.3, rocm-systems of 2026) or an issue there.
//!
//! * Calls act on the thread's current device (newer `hipMemCreate` whatever the location says), so every call has ours current.
//! * VMM and event calls pass while a stream is captured if the thread's mode is RELAXED. Synchronous copies and device-wide waits spoil **every** capture
//!   of the process in any mode: bytes go by an own stream that does not wait for the null stream, and nothing here waits for a device.
//! * One `hipMemSetAccess` and one `hipMemUnmap` for each mapping; what ROCm 7.0 to 7.13 want instead is in `access`.
//! * `hipMemUnmap` waits for the device, or for its null stream, by the version.
//! * No graphs: what `hipGraphExecUpdate` takes over from nodes that look alike is not known for any version.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::{
    Alias, Capabilities, DeviceInfo, Driver, Event, Memory, NotMapped, PageHandle, Platform, StreamState,
    Timeline, Transfer, Whole,
};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, MAX_BYTES, Peers, Stream};

mod access;
mod api;

use access::Ranges;
use api::{
    AccessDesc, AccessFlags, AllocationProp, AllocationType, Api, Attribute, CaptureMode, CaptureStatus,
    Code, CopyKind, DevicePointer, EventHandle, Flags, GranularityKind, Handle, HandleType, Location,
    LocationType, StreamHandle,
};

pub(super) const PLATFORM: Platform = Platform {
    name: "hip",
    number: 3,
    count: HipDriver::count,
    open: |ordinal, _| Ok(Arc::new(HipDriver::new(ordinal)?)),
    abi: api::abi,
};

/// The first version whose structures and calls are those declared here, as `hipDriverGetVersion` has it.
const FIRST_VERSION: i32 = 60_200_000;

/// An AMD GPU.
#[derive(Debug)]
pub struct HipDriver {
    api: &'static Api,
    info: DeviceInfo,
    capabilities: Capabilities,
    /// For versions that count mappings from a reservation's first one.
    ranges: Option<Mutex<Ranges>>,
    /// Copies of `read` and `write` go here.
    copies: StreamHandle,
}

// SAFETY: a stream may be used from any thread (HIP programming guide); nothing else is shared.
unsafe impl Send for HipDriver {}
// SAFETY: as above; the runtime's functions are thread-safe.
unsafe impl Sync for HipDriver {}

impl HipDriver {
    /// How many usable GPUs there are; zero, not an error, where the runtime finds none.
    ///
    /// # Errors
    /// [`Error::DriverMissing`], [`Error::SymbolMissing`], [`Error::UnfitDriver`] before HIP 6.2, or the runtime's own refusal to start.
    pub fn count() -> Result<i32> {
        let api = Api::get()?;
        version(api)?;
        // SAFETY: no preconditions.
        let code = unsafe { (api.hipInit)(0) };
        // Without a device some versions say the one, some the other.
        if [api::NO_DEVICE, api::INVALID_DEVICE].contains(&code.0) {
            return Ok(0);
        }
        check(api, "hipInit", code)?;
        let mut count = 0;
        // SAFETY: the out pointer is good.
        let code = unsafe { (api.hipGetDeviceCount)(&raw mut count) };
        if code.0 == api::NO_DEVICE {
            return Ok(0);
        }
        check(api, "hipGetDeviceCount", code)?;
        Ok(count)
    }

    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// As [`count`](Self::count); [`Error::InvalidDevice`]; [`Error::Unsupported`] without virtual memory management.
    pub fn new(ordinal: i32) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: PLATFORM.name, ordinal, count });
        }
        let api = Api::get()?;
        let version = version(api)?;
        let mut supported = 0;
        // SAFETY: the out pointer is good.
        let code = unsafe {
            (api.hipDeviceGetAttribute)(&raw mut supported, Attribute(api::ATTRIBUTE_VMM), ordinal)
        };
        check(api, "hipDeviceGetAttribute", code)?;
        if supported == 0 {
            return Err(Error::Unsupported { device: ordinal });
        }
        let mut name = [0; 128];
        // SAFETY: the buffer has the length given, one byte of which stays zero.
        let code = unsafe { (api.hipDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, ordinal) };
        check(api, "hipDeviceGetName", code)?;
        // SAFETY: the buffer ends in a zero byte and lives on this stack.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut total = 0;
        // SAFETY: the out pointer is good.
        check(api, "hipDeviceTotalMem", unsafe { (api.hipDeviceTotalMem)(&raw mut total, ordinal) })?;
        let prop = allocation(ordinal);
        let mut granularity = 0;
        // SAFETY: both pointers are good.
        with_device(api, ordinal, "hipMemGetAllocationGranularity", |api| unsafe {
            let minimum = GranularityKind(api::GRANULARITY_MINIMUM);
            (api.hipMemGetAllocationGranularity)(&raw mut granularity, &raw const prop, minimum)
        })?;
        let defective = access::counts_from_first(version);
        let capabilities = Capabilities {
            granularity: granularity as u64,
            largest_page: MAX_BYTES,
            largest_reservation: MAX_BYTES,
            // The programming guide has CUDA's contract, with a caveat for RDNA.
            alias: Alias::AtBoundaries,
            alias_proven: false,
            map_while_capturing: true,
            // Kernel nodes hold addresses. What copy nodes keep of a page that is replaced is not known.
            replace_under_graph: false,
            unmap_waits: true,
            unmap_each: true,
            // In several releases (ROCm/rocm-systems #10604).
            descriptors_per_page: 1,
            register_host: true,
            // Peers would be given all mappings before theirs too where access counts from the first one.
            peers: if defective { Peers::NONE } else { peers_of(api, ordinal, count)? },
        };
        let info = DeviceInfo {
            platform: PLATFORM.name,
            ordinal,
            name: format!("{name} (HIP {}.{})", version / 10_000_000, version / 100_000 % 100),
            total_bytes: total as u64,
            options: None,
        };
        let mut copies = StreamHandle(ptr::null_mut());
        // SAFETY: the out pointer is good. Last, so that nothing after it can fail and lose the stream.
        with_device(api, ordinal, "hipStreamCreateWithFlags", |api| unsafe {
            (api.hipStreamCreateWithFlags)(&raw mut copies, api::STREAM_NON_BLOCKING)
        })?;
        Ok(Self { api, info, capabilities, ranges: defective.then(Mutex::default), copies })
    }

    /// Runs one call with our device current and capture restrictions off, and restores both.
    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        with_device(self.api, self.info.ordinal, name, |api| relaxed(api, || call(api)))
    }

    /// As [`call`](Self::call), for giving things back: a runtime that is shutting down has taken them already.
    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            Err(Error::Driver { code: api::DEINITIALIZED | api::CONTEXT_IS_DESTROYED, .. }) => Ok(()),
            // What it says of any device once none is left.
            Err(Error::Driver { code: api::INVALID_DEVICE, .. }) if Self::count() == Ok(0) => Ok(()),
            result => result,
        }
    }

    fn out_of_memory(&self, requested: u64, error: Error) -> Error {
        match error {
            Error::Driver { code: api::OUT_OF_MEMORY, .. } => Error::OutOfMemory {
                requested,
                free: self.free_bytes().unwrap_or(0),
                total: self.info.total_bytes,
                device: self.info.ordinal,
                space: None,
            },
            other => other,
        }
    }

    fn map_one(&self, at: Address, page: Whole) -> Result<()> {
        // SAFETY: a free place of a reservation of ours and a live page (preconditions of the door).
        self.call("hipMemMap", |api| unsafe {
            (api.hipMemMap)(pointer(at), page.bytes as usize, 0, handle(page.page), Flags(0))
        })
        .map_err(|error| self.out_of_memory(page.bytes, error))
    }

    /// Makes whole mappings readable and writable by these devices and ours. Ours is last: 7.14 spoils a mapping whose own device had access before
    /// the others (openxla/xla #46576).
    fn set_access(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        let mut access = [access_by(self.info.ordinal); 65];
        let mut count = 1;
        for (place, device) in access.iter_mut().zip(peers.iter()) {
            *place = access_by(device);
            count += 1;
        }
        // SAFETY: the pointer is good for `count` of them; for a range that is not mapped any more the runtime has an error.
        self.call("hipMemSetAccess", |api| unsafe {
            (api.hipMemSetAccess)(pointer(at), len as usize, access.as_ptr(), count)
        })
        .map_err(|error| self.out_of_memory(len, error))
    }

    /// Maps a page and gives access to it; if that fails, says whether it is mapped all the same.
    fn map_with_access(&self, at: Address, page: Whole, peers: Peers) -> Result<(), (Error, bool)> {
        let Some(ranges) = &self.ranges else {
            self.map_one(at, page).map_err(|error| (error, false))?;
            return self.set_access(at, page.bytes, peers).map_err(|error| (error, !self.undo_map(at, page)));
        };
        // Across all calls: whoever took a mapping before this one away meanwhile would make the range wrong.
        let mut ranges = ranges.lock();
        let first = ranges.begin(at).ok_or_else(|| {
            let problem = "this version of ROCm gives access only to mappings that follow a reservation's first one without a gap; 6.2 to 6.4 \
                           and 7.14 have no such defect"
                .to_owned();
            (Error::UnfitDriver { driver: PLATFORM.name, problem }, false)
        })?;
        self.map_one(at, page).map_err(|error| (error, false))?;
        match self.set_access(first, at.plus(page.bytes).0 - first.0, Peers::NONE) {
            Ok(()) => {
                ranges.map(at, page.bytes);
                Ok(())
            }
            Err(error) => {
                let undone = self.undo_map(at, page);
                if !undone {
                    ranges.map(at, page.bytes);
                }
                Err((error, !undone))
            }
        }
    }

    fn undo_map(&self, at: Address, page: Whole) -> bool {
        // SAFETY: mapped just now and never used.
        self.give_back("hipMemUnmap", |api| unsafe { (api.hipMemUnmap)(pointer(at), page.bytes as usize) })
            .is_ok()
    }

    /// A copy on the own stream, and waiting for it.
    fn copy_and_wait(&self, to: *mut c_void, from: *const c_void, len: usize, kind: c_int) -> Result<()> {
        // SAFETY: both are good for `len` bytes until the wait below is over (the callers' contract).
        self.call("hipMemcpyAsync", |api| unsafe {
            (api.hipMemcpyAsync)(to, from, len, CopyKind(kind), self.copies)
        })?;
        // SAFETY: our own stream, which nobody captures.
        self.call("hipStreamSynchronize", |api| unsafe { (api.hipStreamSynchronize)(self.copies) })
    }
}

impl Drop for HipDriver {
    fn drop(&mut self) {
        // SAFETY: our own stream, used no more.
        let destroyed =
            self.give_back("hipStreamDestroy", |api| unsafe { (api.hipStreamDestroy)(self.copies) });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "the stream for copies was not destroyed");
        }
    }
}

/// The runtime's version, if it is one that the declarations are for.
fn version(api: &Api) -> Result<i32> {
    let mut version = 0;
    // SAFETY: the out pointer is good; allowed before `hipInit`.
    check(api, "hipDriverGetVersion", unsafe { (api.hipDriverGetVersion)(&raw mut version) })?;
    if version < FIRST_VERSION {
        let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
        let problem = format!(
            "it is HIP {major}.{minor} ({version}), which has other structures or no virtual memory management: 6.2 is needed"
        );
        return Err(Error::UnfitDriver { driver: PLATFORM.name, problem });
    }
    Ok(version)
}

/// Runs one call with a device current, and makes the one current again that was.
fn with_device(
    api: &'static Api,
    ordinal: i32,
    name: &'static str,
    call: impl FnOnce(&Api) -> Code,
) -> Result<()> {
    let mut before = 0;
    // SAFETY: the out pointer is good.
    check(api, "hipGetDevice", unsafe { (api.hipGetDevice)(&raw mut before) })?;
    let foreign = before != ordinal;
    if foreign {
        // SAFETY: a device that exists.
        check(api, "hipSetDevice", unsafe { (api.hipSetDevice)(ordinal) })?;
    }
    let code = call(api);
    if foreign {
        // SAFETY: the device that was current.
        unsafe { (api.hipSetDevice)(before) };
    }
    check(api, name, code)
}

/// Runs one call with the thread's capture restrictions off.
fn relaxed(api: &Api, call: impl FnOnce() -> Code) -> Code {
    let mut mode = CaptureMode(api::CAPTURE_RELAXED);
    // SAFETY: the pointer is good; the runtime writes the previous mode there. It has no reason to fail, and no mode but RELAXED is safe to call in:
    // in another one some calls spoil captures instead of being refused.
    let code = unsafe { (api.hipThreadExchangeStreamCaptureMode)(&raw mut mode) };
    if code.0 != 0 {
        return code;
    }
    let code = call();
    // SAFETY: as above, giving the thread back the mode it had.
    unsafe { (api.hipThreadExchangeStreamCaptureMode)(&raw mut mode) };
    code
}

/// The other devices that can use this one's memory.
fn peers_of(api: &Api, ordinal: i32, count: i32) -> Result<Peers> {
    let mut peers = Peers::NONE;
    for other in (0..count).filter(|other| *other != ordinal) {
        let mut can = 0;
        // SAFETY: the out pointer is good, and both devices are there.
        let code = unsafe { (api.hipDeviceCanAccessPeer)(&raw mut can, other, ordinal) };
        check(api, "hipDeviceCanAccessPeer", code)?;
        if can != 0 {
            peers = peers.and(Peers::one(other));
        }
    }
    Ok(peers)
}

fn check(api: &Api, call: &'static str, code: Code) -> Result<()> {
    if code.0 == 0 {
        return Ok(());
    }
    // SAFETY: any integer is allowed as a code.
    let text = unsafe { (api.hipGetErrorName)(code) };
    let name = if text.is_null() {
        "unknown result".to_owned()
    } else {
        // SAFETY: the runtime returns a static, zero-terminated string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Driver { call, code: code.0, name })
}

fn location(ordinal: i32) -> Location {
    Location { kind: LocationType(api::LOCATION_DEVICE), id: ordinal }
}

/// Plain device memory of one GPU.
fn allocation(ordinal: i32) -> AllocationProp {
    AllocationProp {
        kind: AllocationType(api::PINNED),
        requested: HandleType(api::HANDLE_NONE),
        location: location(ordinal),
        win32: ptr::null_mut(),
        flags: [0; 8],
    }
}

fn access_by(ordinal: i32) -> AccessDesc {
    AccessDesc { location: location(ordinal), flags: AccessFlags(api::READ_WRITE) }
}

fn pointer(at: Address) -> *mut c_void {
    at.0 as *mut c_void
}

fn handle(page: PageHandle) -> Handle {
    Handle(page.0 as *mut c_void)
}

fn stream(stream: Stream) -> StreamHandle {
    StreamHandle(stream.raw() as *mut c_void)
}

fn event(event: Event) -> EventHandle {
    EventHandle(event.0 as *mut c_void)
}

impl Driver for HipDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        version(self.api).map_or_else(
            |_| String::new(),
            |found| format!("{}.{}", found / 10_000_000, found / 100_000 % 100),
        )
    }
}

// SAFETY: the runtime's functions do what the module says, by its sources and documents; tests/hip.rs holds the driver to its rules.
unsafe impl Memory for HipDriver {
    fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are good.
        self.call("hipMemGetInfo", |api| unsafe { (api.hipMemGetInfo)(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        let mut base = ptr::null_mut();
        // SAFETY: the out pointer is good; alignment 0 is the default and a null hint leaves the choice to the runtime.
        self.call("hipMemAddressReserve", |api| unsafe {
            (api.hipMemAddressReserve)(&raw mut base, len as usize, 0, ptr::null_mut(), Flags(0))
        })
        .map_err(|error| match error {
            Error::Driver { code: api::OUT_OF_MEMORY, .. } => {
                Error::OutOfAddresses { requested: len, device: self.info.ordinal }
            }
            other => other,
        })?;
        let base = Address(base as u64);
        if let Some(ranges) = &self.ranges {
            ranges.lock().reserve(base, len);
        }
        Ok(base)
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        // Under the lock: once the runtime has them, another thread may be given them.
        let mut ranges = self.ranges.as_ref().map(Mutex::lock);
        // SAFETY: a reservation of ours with nothing mapped in it (precondition of the door).
        self.give_back("hipMemAddressFree", |api| unsafe {
            (api.hipMemAddressFree)(pointer(base), len as usize)
        })?;
        if let Some(ranges) = &mut ranges {
            ranges.free(base);
        }
        Ok(())
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        let mut made = Handle(ptr::null_mut());
        let prop = allocation(self.info.ordinal);
        // SAFETY: both pointers are good.
        self.call("hipMemCreate", |api| unsafe {
            (api.hipMemCreate)(&raw mut made, len as usize, &raw const prop, Flags(0))
        })
        .map_err(|error| self.out_of_memory(len, error))?;
        Ok(PageHandle(made.0 as u64))
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        // SAFETY: a handle of ours, released once (precondition of the door).
        self.give_back("hipMemRelease", |api| unsafe { (api.hipMemRelease)(handle(page)) })
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let mut starts = Vec::with_capacity(pages.len());
        let mut end = at;
        for page in pages {
            if let Err((error, stays)) = self.map_with_access(end, *page, peers) {
                if stays {
                    return Err(NotMapped { error, mapped: starts.len() + 1 });
                }
                // Last first, so that what stays is a beginning of the range.
                let undone = starts.iter().rev().take_while(|(at, bytes)| {
                    // SAFETY: mapped just now and never used.
                    unsafe { self.unmap(*at, *bytes) }.is_ok()
                });
                return Err(NotMapped { error, mapped: starts.len() - undone.count() });
            }
            starts.push((end, page.bytes));
            end = end.plus(page.bytes);
        }
        Ok(())
    }

    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        self.set_access(at, len, peers)
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        let mut ranges = self.ranges.as_ref().map(Mutex::lock);
        // SAFETY: a whole mapping of ours that the device no longer uses (preconditions of the door).
        self.give_back("hipMemUnmap", |api| unsafe { (api.hipMemUnmap)(pointer(at), len as usize) })?;
        if let Some(ranges) = &mut ranges {
            ranges.unmap(at, len);
        }
        Ok(())
    }
}

// SAFETY: as above.
unsafe impl Timeline for HipDriver {
    unsafe fn stream_state(&self, asked: Stream) -> Result<StreamState> {
        let mut status = CaptureStatus(api::CAPTURE_NONE);
        // SAFETY: the out pointer is good and the stream exists (precondition of the door).
        let mut ask = |api: &Api| unsafe { (api.hipStreamIsCapturing)(stream(asked), &raw mut status) };
        let answer = if asked == Stream::LEGACY || asked == Stream::PER_THREAD {
            // They are those of the current device.
            with_device(self.api, self.info.ordinal, "hipStreamIsCapturing", ask)
        } else {
            // A created stream knows its device, and asking is allowed in every capture mode.
            let code = ask(self.api);
            check(self.api, "hipStreamIsCapturing", code)
        };
        match answer {
            // An invalidated capture is one too: the stream is of no use before it ends.
            Ok(()) if status.0 == api::CAPTURE_NONE => Ok(StreamState::Ready),
            // The null stream, while one that it waits for is captured.
            Ok(()) | Err(Error::Driver { code: api::CAPTURE_IMPLICIT, .. }) => Ok(StreamState::Capturing),
            Err(error) => Err(error),
        }
    }

    fn event_create(&self) -> Result<Event> {
        let mut created = EventHandle(ptr::null_mut());
        // SAFETY: the out pointer is good.
        self.call("hipEventCreate", |api| unsafe {
            (api.hipEventCreateWithFlags)(&raw mut created, api::EVENT_DISABLE_TIMING)
        })?;
        Ok(Event(created.0 as u64))
    }

    unsafe fn event_destroy(&self, destroyed: Event) -> Result<()> {
        // SAFETY: an event of ours, destroyed once (precondition of the door).
        self.give_back("hipEventDestroy", |api| unsafe { (api.hipEventDestroy)(event(destroyed)) })
    }

    unsafe fn event_record(&self, recorded: Event, on: Stream) -> Result<()> {
        // SAFETY: an event of ours and a stream that exists (precondition of the door).
        self.call("hipEventRecord", |api| unsafe { (api.hipEventRecord)(event(recorded), stream(on)) })
    }

    unsafe fn event_wait(&self, awaited: Event, by: Stream) -> Result<()> {
        // SAFETY: as above.
        self.call("hipStreamWaitEvent", |api| unsafe {
            (api.hipStreamWaitEvent)(stream(by), event(awaited), 0)
        })
    }

    unsafe fn event_query(&self, asked: Event) -> Result<bool> {
        // SAFETY: an event of ours (precondition of the door).
        match self.call("hipEventQuery", |api| unsafe { (api.hipEventQuery)(event(asked)) }) {
            Ok(()) => Ok(true),
            Err(Error::Driver { code: api::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    unsafe fn event_synchronize(&self, awaited: Event) -> Result<()> {
        // SAFETY: an event of ours (precondition of the door).
        self.call("hipEventSynchronize", |api| unsafe { (api.hipEventSynchronize)(event(awaited)) })
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut created = StreamHandle(ptr::null_mut());
        // SAFETY: the out pointer is good.
        self.call("hipStreamCreate", |api| unsafe {
            (api.hipStreamCreateWithFlags)(&raw mut created, api::STREAM_NON_BLOCKING)
        })?;
        // SAFETY: the runtime gave it out just now; whoever asked keeps it until it is destroyed.
        Ok(unsafe { Stream::from_raw(created.0 as u64) })
    }

    unsafe fn stream_destroy(&self, destroyed: Stream) -> Result<()> {
        // SAFETY: a stream of ours, destroyed once (precondition of the door).
        self.give_back("hipStreamDestroy", |api| unsafe { (api.hipStreamDestroy)(stream(destroyed)) })
    }
}

// SAFETY: as above.
unsafe impl Transfer for HipDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, on: Stream) -> Result<()> {
        // SAFETY: the range is mapped and accessible (precondition of the door).
        self.call("hipMemsetD32Async", |api| unsafe {
            (api.hipMemsetD32Async)(
                DevicePointer(pointer(at)),
                value.cast_signed(),
                len as usize / 4,
                stream(on),
            )
        })
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        self.copy_and_wait(into.as_mut_ptr().cast(), pointer(at), into.len(), api::DEVICE_TO_HOST)
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        self.copy_and_wait(pointer(at), from.as_ptr().cast(), from.len(), api::HOST_TO_DEVICE)
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: memory of this process that stays mapped (precondition of the door).
        self.call("hipHostRegister", |api| unsafe {
            (api.hipHostRegister)(at.cast::<c_void>(), len, api::REGISTER_PORTABLE)
        })
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: registered by us, and no copy of it is under way (precondition of the door).
        self.give_back("hipHostUnregister", |api| unsafe { (api.hipHostUnregister)(at.cast::<c_void>()) })
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: both are mapped and stay so until the stream has done it (precondition of the door).
        self.call("hipMemcpyAsync", |api| unsafe {
            let kind = CopyKind(api::DEVICE_TO_HOST);
            (api.hipMemcpyAsync)(to.cast::<c_void>(), pointer(from), len, kind, stream(on))
        })
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: as above.
        self.call("hipMemcpyAsync", |api| unsafe {
            let kind = CopyKind(api::HOST_TO_DEVICE);
            (api.hipMemcpyAsync)(pointer(to), from.cast::<c_void>(), len, kind, stream(on))
        })
    }
}
