//! CUDA driver: `cuMem*` over the device's primary context, made current by every call, in the
//! thread's relaxed capture mode, so memory can grow during a capture. Lock-free: all state is
//! constant.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    Alias, Capabilities, DeviceInfo, DeviceOptions, Driver, Event, Graphs, Handles, Memory, NotMapped,
    PageHandle, Platform, Sharing, StreamState, Timeline, Transfer, Whole,
};
use crate::error::{Error, Result};
use crate::units::{Address, MAX_BYTES, Peers, Stream};

mod api;
mod graphs;
mod sharing;

use api::{Api, Code, GraphApi};
use sharing::PageKind;

pub(super) const PLATFORM: Platform = Platform {
    name: "cuda",
    number: 1,
    count: CudaDriver::count,
    open: |ordinal, options| Ok(Arc::new(CudaDriver::with_options(ordinal, options)?)),
    abi: super::abi::Abi::default,
};

const ERROR_OUT_OF_MEMORY: Code = 2;
const ERROR_NOT_READY: Code = 600;
/// The legacy default stream, queried while a synchronizing stream is captured.
const ERROR_CAPTURE_IMPLICIT: Code = 906;
const ERROR_NO_DEVICE: Code = 100;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`
const ATTRIBUTE_VMM: c_int = 102;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const CAPTURE_RELAXED: c_int = 2;
/// `CU_EVENT_DISABLE_TIMING`
const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_STREAM_NON_BLOCKING`
const STREAM_NON_BLOCKING: u32 = 1;
const REGISTER_PORTABLE: u32 = 1;

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct CudaDriver {
    api: &'static Api,
    info: DeviceInfo,
    capabilities: Capabilities,
    pages: PageKind,
    device: sys::CUdevice,
    /// Retained by this object.
    context: sys::CUcontext,
}

// SAFETY: any thread may use the context (CUDA driver API, "Context Management").
unsafe impl Send for CudaDriver {}
// SAFETY: as above; the driver's functions are thread-safe.
unsafe impl Sync for CudaDriver {}

impl CudaDriver {
    /// Number of usable GPUs; 0, not an error, without GPUs.
    ///
    /// # Errors
    /// [`Error::DriverMissing`], [`Error::SymbolMissing`]; errors of the initialization.
    pub fn count() -> Result<i32> {
        let api = Api::get()?;
        // SAFETY: no preconditions.
        let code = unsafe { (api.cuInit)(0) };
        if code == ERROR_NO_DEVICE {
            return Ok(0);
        }
        check(api, "cuInit", code)?;
        let mut count = 0;
        // SAFETY: valid out pointer.
        check(api, "cuDeviceGetCount", unsafe { (api.cuDeviceGetCount)(&raw mut count) })?;
        Ok(count)
    }

    /// Opens GPU `ordinal` and retains its primary context, shared with torch and the CUDA runtime.
    ///
    /// # Errors
    /// As [`count`](Self::count); [`Error::InvalidDevice`]; [`Error::Unsupported`] without virtual
    /// memory management.
    pub fn new(ordinal: i32) -> Result<Self> {
        Self::with_options(ordinal, DeviceOptions::default())
    }

    /// As [`new`](Self::new); [`Error::InvalidArgument`] for an unavailable option.
    pub fn with_options(ordinal: i32, options: DeviceOptions) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: PLATFORM.name, ordinal, count });
        }
        let api = Api::get()?;
        let mut device = 0;
        // SAFETY: valid out pointer.
        check(api, "cuDeviceGet", unsafe { (api.cuDeviceGet)(&raw mut device, ordinal) })?;
        let mut supported = 0;
        // SAFETY: valid out pointer.
        let code = unsafe { (api.cuDeviceGetAttribute)(&raw mut supported, ATTRIBUTE_VMM, device) };
        check(api, "cuDeviceGetAttribute", code)?;
        if supported == 0 {
            return Err(Error::Unsupported { device: ordinal });
        }
        let mut name = [0; 128];
        // SAFETY: a buffer of this length; its last byte stays zero.
        let code = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, device) };
        check(api, "cuDeviceGetName", code)?;
        // SAFETY: a zero-terminated buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut total = 0;
        // SAFETY: valid out pointer.
        check(api, "cuDeviceTotalMem", unsafe { (api.cuDeviceTotalMem_v2)(&raw mut total, device) })?;
        let pages = PageKind::for_device(api, device, options)?;
        let mut granularity = 0;
        let prop = pages.of(ordinal);
        // SAFETY: valid pointers.
        let code = unsafe { (api.cuMemGetAllocationGranularity)(&raw mut granularity, &raw const prop, 0) };
        check(api, "cuMemGetAllocationGranularity", code)?;
        let peers = Self::peers_of(api, device, count)?;
        let mut context = ptr::null_mut();
        // SAFETY: valid out pointer. Last fallible call, so no reference leaks.
        let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        check(api, "cuDevicePrimaryCtxRetain", code)?;
        let info =
            DeviceInfo { platform: PLATFORM.name, ordinal, name, total_bytes: total as u64, options: None };
        let capabilities = Capabilities {
            granularity: granularity as u64,
            largest_page: MAX_BYTES,
            largest_reservation: MAX_BYTES,
            alias: Alias::AtBoundaries,
            alias_proven: true,
            map_in_any_order: true,
            map_while_capturing: true,
            replace_under_graph: true,
            unmap_waits: false,
            unmap_each: false,
            descriptors_per_page: 0,
            register_host: true,
            peers,
            restores_no_context: true,
        };
        let mut driver = Self { api, info, capabilities, pages, device, context };
        driver.try_fabric();
        Ok(driver)
    }

    fn peers_of(api: &Api, device: sys::CUdevice, count: i32) -> Result<Peers> {
        let mut peers = Peers::NONE;
        for ordinal in (0..count).filter(|ordinal| *ordinal != device) {
            let (mut other, mut can) = (0, 0);
            // SAFETY: valid out pointer.
            check(api, "cuDeviceGet", unsafe { (api.cuDeviceGet)(&raw mut other, ordinal) })?;
            // SAFETY: as above, and both devices exist.
            let code = unsafe { (api.cuDeviceCanAccessPeer)(&raw mut can, other, device) };
            check(api, "cuDeviceCanAccessPeer", code)?;
            if can != 0 {
                peers = peers.and(Peers::one(ordinal));
            }
        }
        Ok(peers)
    }

    /// Restores the context and the capture mode.
    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        self.in_context(name, |api| relaxed(api, call))
    }

    /// For stream work: default streams belong to the thread's other context, if any.
    fn call_on(&self, on: Stream, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        if on.is_default() && self.other_context().is_some() {
            return check(self.api, name, relaxed(self.api, call));
        }
        self.call(name, call)
    }

    fn in_context(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        let api = self.api;
        let mut current = self.current()?;
        let foreign = current != self.context;
        if foreign {
            // SAFETY: this object retains the context.
            check(api, "cuCtxPushCurrent", unsafe { (api.cuCtxPushCurrent_v2)(self.context) })?;
        }
        let code = call(api);
        if foreign {
            // SAFETY: pops the context pushed above.
            unsafe { (api.cuCtxPopCurrent_v2)(&raw mut current) };
        }
        check(api, name, code)
    }

    fn current(&self) -> Result<sys::CUcontext> {
        let mut current = ptr::null_mut();
        // SAFETY: valid out pointer.
        check(self.api, "cuCtxGetCurrent", unsafe { (self.api.cuCtxGetCurrent)(&raw mut current) })?;
        Ok(current)
    }

    /// Succeeds after the driver's shutdown.
    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            // DEINITIALIZED, CONTEXT_IS_DESTROYED
            Err(Error::Driver { code: 4 | 709, .. }) => Ok(()),
            result => result,
        }
    }

    fn out_of_memory(&self, requested: u64, error: Error) -> Error {
        match error {
            Error::Driver { code: ERROR_OUT_OF_MEMORY, .. } => Error::OutOfMemory {
                requested,
                free: self.free_bytes().unwrap_or(0),
                total: self.info.total_bytes,
                device: self.info.ordinal,
                space: None,
            },
            other => other,
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // SAFETY: our reference; after the driver's shutdown without effect.
        unsafe { (self.api.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

fn check(api: &Api, call: &'static str, code: Code) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: valid out pointer; any code is allowed.
    let known = unsafe { (api.cuGetErrorName)(code, &raw mut text) } == 0 && !text.is_null();
    let name = if known {
        // SAFETY: a static C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown result".to_owned()
    };
    Err(Error::Driver { call, code, name })
}

fn relaxed(api: &Api, call: impl FnOnce(&Api) -> Code) -> Code {
    let mut mode = CAPTURE_RELAXED;
    // SAFETY: valid pointer. After a failed exchange, the call is at worst refused.
    unsafe { (api.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
    let code = call(api);
    // SAFETY: as above.
    unsafe { (api.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
    code
}

fn location(ordinal: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}

fn access_by(ordinal: i32) -> sys::CUmemAccessDesc {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    sys::CUmemAccessDesc { location: location(ordinal), flags }
}

fn stream(stream: Stream) -> sys::CUstream {
    stream.raw() as sys::CUstream
}

fn event(event: Event) -> sys::CUevent {
    event.0 as sys::CUevent
}

impl CudaDriver {
    fn map_one(&self, at: Address, page: Whole) -> Result<()> {
        // SAFETY: a free place of our reservation, a live page.
        self.call("cuMemMap", |api| unsafe { (api.cuMemMap)(at.0, page.bytes as usize, 0, page.page.0, 0) })
            .map_err(|error| self.out_of_memory(page.bytes, error))
    }

    fn set_access(&self, at: Address, len: u64, devices: impl Iterator<Item = i32>) -> Result<()> {
        // 64 peers and this device, without allocation: every map calls this.
        let mut access = [access_by(self.info.ordinal); 65];
        let mut count = 0;
        for (place, device) in access.iter_mut().zip(devices) {
            *place = access_by(device);
            count += 1;
        }
        // SAFETY: valid for `count` elements; an unmapped range is an error.
        self.call("cuMemSetAccess", |api| unsafe {
            (api.cuMemSetAccess)(at.0, len as usize, access.as_ptr(), count)
        })
        .map_err(|error| self.out_of_memory(len, error))
    }
}

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: valid out pointer; needs no device.
        let known = unsafe { (self.api.cuDriverGetVersion)(&raw mut version) } == 0;
        // cuda.h: 1000 x major + 10 x minor.
        if known { format!("{}.{}", version / 1000, version % 1000 / 10) } else { String::new() }
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        GraphApi::get().is_ok().then_some(self as &dyn Graphs)
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        (self.pages.handles != Handles::None).then_some(self as &dyn Sharing)
    }

    fn rdma(&self) -> bool {
        self.pages.rdma
    }
}

// SAFETY: the driver follows the contract (tests/gpu/conformance.rs, H200).
unsafe impl Memory for CudaDriver {
    fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers.
        self.call("cuMemGetInfo", |api| unsafe { (api.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        let mut base = 0;
        // SAFETY: valid out pointer; alignment 0 is the default.
        self.call("cuMemAddressReserve", |api| unsafe {
            (api.cuMemAddressReserve)(&raw mut base, len as usize, 0, 0, 0)
        })
        .map_err(|error| match error {
            Error::Driver { code: ERROR_OUT_OF_MEMORY, .. } => {
                Error::OutOfAddresses { requested: len, device: self.info.ordinal }
            }
            other => other,
        })?;
        Ok(Address(base))
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        // SAFETY: our reservation without mappings.
        self.give_back("cuMemAddressFree", |api| unsafe { (api.cuMemAddressFree)(base.0, len as usize) })
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        let mut handle = 0;
        let prop = self.pages.of(self.info.ordinal);
        // SAFETY: valid pointers.
        self.call("cuMemCreate", |api| unsafe {
            (api.cuMemCreate)(&raw mut handle, len as usize, &raw const prop, 0)
        })
        .map_err(|error| self.out_of_memory(len, error))?;
        Ok(PageHandle(handle))
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        // SAFETY: our handle, released once.
        self.give_back("cuMemRelease", |api| unsafe { (api.cuMemRelease)(page.0) })
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let mut starts = Vec::with_capacity(pages.len());
        let mut end = at;
        let mut result = Ok(());
        for page in pages {
            result = self.map_one(end, *page);
            if result.is_err() {
                break;
            }
            starts.push((end, page.bytes));
            end = end.plus(page.bytes);
        }
        if result.is_ok() && end != at {
            let devices = std::iter::once(self.info.ordinal).chain(peers.iter());
            result = self.set_access(at, end.0 - at.0, devices);
        }
        result.map_err(|error| {
            // In reverse, so the first pages remain.
            let undone = starts.iter().rev().take_while(|(at, bytes)| {
                // SAFETY: mapped above and never used.
                unsafe { self.unmap(*at, *bytes) }.is_ok()
            });
            NotMapped { error, mapped: starts.len() - undone.count() }
        })
    }

    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        self.set_access(at, len, peers.iter())
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        // SAFETY: our whole mappings, unused by the device.
        self.give_back("cuMemUnmap", |api| unsafe { (api.cuMemUnmap)(at.0, len as usize) })
    }
}

// SAFETY: as above.
unsafe impl Timeline for CudaDriver {
    unsafe fn stream_state(&self, asked: Stream) -> Result<StreamState> {
        let mut status = 0;
        // SAFETY: valid out pointer, existing stream.
        let mut ask = |api: &Api| unsafe { (api.cuStreamIsCapturing)(stream(asked), &raw mut status) };
        // Allowed in every capture mode. Created streams know their context; default streams need
        // ours.
        let asked = if !asked.is_default() || self.other_context().is_some() {
            check(self.api, "cuStreamIsCapturing", ask(self.api))
        } else {
            self.in_context("cuStreamIsCapturing", ask)
        };
        match asked {
            Ok(()) if status == 0 => Ok(StreamState::Ready),
            Ok(()) | Err(Error::Driver { code: ERROR_CAPTURE_IMPLICIT, .. }) => Ok(StreamState::Capturing),
            Err(error) => Err(error),
        }
    }

    fn other_context(&self) -> Option<u64> {
        let current = self.current().ok().filter(|current| !current.is_null() && *current != self.context)?;
        let mut device = 0;
        // SAFETY: valid out pointer.
        let code = unsafe { (self.api.cuCtxGetDevice)(&raw mut device) };
        (code == 0 && device == self.device).then_some(current as u64)
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        self.in_context("cuCtxPushCurrent", |_| {
            work();
            0
        })
    }

    fn event_create(&self) -> Result<Event> {
        let mut created = ptr::null_mut();
        // SAFETY: valid out pointer.
        self.call("cuEventCreate", |api| unsafe {
            (api.cuEventCreate)(&raw mut created, EVENT_DISABLE_TIMING)
        })?;
        Ok(Event(created as u64))
    }

    unsafe fn event_destroy(&self, destroyed: Event) -> Result<()> {
        // SAFETY: our event, destroyed once.
        self.give_back("cuEventDestroy", |api| unsafe { (api.cuEventDestroy_v2)(event(destroyed)) })
    }

    unsafe fn event_record(&self, recorded: Event, on: Stream) -> Result<()> {
        // SAFETY: our event, an existing stream.
        self.call_on(on, "cuEventRecord", |api| unsafe { (api.cuEventRecord)(event(recorded), stream(on)) })
    }

    unsafe fn event_wait(&self, awaited: Event, by: Stream) -> Result<()> {
        // SAFETY: as above.
        self.call_on(by, "cuStreamWaitEvent", |api| unsafe {
            (api.cuStreamWaitEvent)(stream(by), event(awaited), 0)
        })
    }

    unsafe fn event_query(&self, asked: Event) -> Result<bool> {
        // SAFETY: our event.
        match self.call("cuEventQuery", |api| unsafe { (api.cuEventQuery)(event(asked)) }) {
            Ok(()) => Ok(true),
            Err(Error::Driver { code: ERROR_NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    unsafe fn event_synchronize(&self, awaited: Event) -> Result<()> {
        // SAFETY: our event.
        self.call("cuEventSynchronize", |api| unsafe { (api.cuEventSynchronize)(event(awaited)) })
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut created = ptr::null_mut();
        // SAFETY: valid out pointer.
        self.call("cuStreamCreate", |api| unsafe {
            (api.cuStreamCreate)(&raw mut created, STREAM_NON_BLOCKING)
        })?;
        // SAFETY: a new stream.
        Ok(unsafe { Stream::from_raw(created as u64) })
    }

    unsafe fn stream_destroy(&self, destroyed: Stream) -> Result<()> {
        // SAFETY: our stream, destroyed once.
        self.give_back("cuStreamDestroy", |api| unsafe { (api.cuStreamDestroy_v2)(stream(destroyed)) })
    }
}

// SAFETY: as above.
unsafe impl Transfer for CudaDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, on: Stream) -> Result<()> {
        // SAFETY: the range is mapped and accessible.
        self.call_on(on, "cuMemsetD32Async", |api| unsafe {
            (api.cuMemsetD32Async)(at.0, value, len as usize / 4, stream(on))
        })
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: a slice of this length; mapped memory.
        self.call("cuMemcpyDtoH", |api| unsafe {
            (api.cuMemcpyDtoH_v2)(into.as_mut_ptr().cast::<c_void>(), at.0, into.len())
        })
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: a slice of this length; mapped memory.
        self.call("cuMemcpyHtoD", |api| unsafe {
            (api.cuMemcpyHtoD_v2)(at.0, from.as_ptr().cast::<c_void>(), from.len())
        })?;
        // The copy may return before writing, and unmapping the destination then ended the context
        // (H200, driver 580). SAFETY: our context's default stream.
        self.call("cuStreamSynchronize", |api| unsafe { (api.cuStreamSynchronize)(ptr::null_mut()) })
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: process memory, mapped until unregistered.
        self.call("cuMemHostRegister", |api| unsafe {
            (api.cuMemHostRegister_v2)(at.cast::<c_void>(), len, REGISTER_PORTABLE)
        })
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: our registration, without a running copy.
        self.give_back("cuMemHostUnregister", |api| unsafe { (api.cuMemHostUnregister)(at.cast::<c_void>()) })
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: both mapped until the copy ends.
        self.call_on(on, "cuMemcpyDtoHAsync", |api| unsafe {
            (api.cuMemcpyDtoHAsync_v2)(to.cast::<c_void>(), from.0, len, stream(on))
        })
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: as above.
        self.call_on(on, "cuMemcpyHtoDAsync", |api| unsafe {
            (api.cuMemcpyHtoDAsync_v2)(to.0, from.cast::<c_void>(), len, stream(on))
        })
    }
}
