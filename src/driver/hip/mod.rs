//! HIP driver: `hipMem*` of AMD's ROCm 6.2 and newer. Tested on a stand-in with ROCm's rules
//! (sources of CLR 6.0 to 6.3 and rocm-systems of 2026, or the cited issue), never on a device.
//!
//! * Calls act on the thread's current device: every call sets ours and restores the previous one.
//! * VMM and event calls work during captures in mode RELAXED. Synchronous copies and device-wide
//!   waits break **every** capture of the process: copies use a separate stream. No call waits for
//!   a device.
//! * Each mapping needs its own `hipMemSetAccess` and `hipMemUnmap` (see `access`).
//! * `hipMemUnmap` waits for the device or for its null stream.
//! * No graphs: the effect of `hipGraphExecUpdate` on similar nodes is unknown.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::{Alias, Capabilities, DeviceInfo, Driver, Platform};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, MAX_BYTES, Peers};

mod access;
mod api;
mod memory;
mod work;

use access::Ranges;
use api::{Api, Attribute, CaptureMode, Code, GranularityKind, StreamHandle};

pub(super) const PLATFORM: Platform = Platform {
    name: "hip",
    number: 3,
    count: HipDriver::count,
    open: |ordinal, _| Ok(Arc::new(HipDriver::new(ordinal)?)),
    abi: api::abi,
};

/// First version with these declarations.
const FIRST_VERSION: i32 = 60_200_000;

/// An AMD GPU.
#[derive(Debug)]
pub struct HipDriver {
    api: &'static Api,
    info: DeviceInfo,
    capabilities: Capabilities,
    /// For versions with the defect of `access`.
    ranges: Option<Mutex<Ranges>>,
    /// For `read` and `write`.
    copies: StreamHandle,
}

// SAFETY: any thread may use a stream (HIP programming guide).
unsafe impl Send for HipDriver {}
// SAFETY: as above; the runtime's functions are thread-safe.
unsafe impl Sync for HipDriver {}

impl HipDriver {
    /// As [`CudaDriver::count`](super::CudaDriver::count); [`Error::UnfitDriver`] before HIP 6.2.
    pub fn count() -> Result<i32> {
        let api = Api::get()?;
        version(api)?;
        // SAFETY: no preconditions.
        let code = unsafe { (api.hipInit)(0) };
        // The code depends on the version.
        if [api::NO_DEVICE, api::INVALID_DEVICE].contains(&code.0) {
            return Ok(0);
        }
        check(api, "hipInit", code)?;
        let mut count = 0;
        // SAFETY: valid out pointer.
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
    /// As [`CudaDriver::new`](super::CudaDriver::new).
    pub fn new(ordinal: i32) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: PLATFORM.name, ordinal, count });
        }
        let api = Api::get()?;
        let version = version(api)?;
        let mut supported = 0;
        // SAFETY: valid out pointer.
        let code = unsafe {
            (api.hipDeviceGetAttribute)(&raw mut supported, Attribute(api::ATTRIBUTE_VMM), ordinal)
        };
        check(api, "hipDeviceGetAttribute", code)?;
        if supported == 0 {
            return Err(Error::Unsupported { device: ordinal });
        }
        let mut name = [0; 128];
        // SAFETY: a buffer of this length; its last byte stays zero.
        let code = unsafe { (api.hipDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, ordinal) };
        check(api, "hipDeviceGetName", code)?;
        // SAFETY: a zero-terminated buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut total = 0;
        // SAFETY: valid out pointer.
        check(api, "hipDeviceTotalMem", unsafe { (api.hipDeviceTotalMem)(&raw mut total, ordinal) })?;
        let prop = memory::allocation(ordinal);
        let mut granularity = 0;
        // SAFETY: valid pointers.
        with_device(api, ordinal, "hipMemGetAllocationGranularity", |api| unsafe {
            let minimum = GranularityKind(api::GRANULARITY_MINIMUM);
            (api.hipMemGetAllocationGranularity)(&raw mut granularity, &raw const prop, minimum)
        })?;
        let defective = access::counts_from_first(version);
        let capabilities = Capabilities {
            granularity: granularity as u64,
            largest_page: MAX_BYTES,
            largest_reservation: MAX_BYTES,
            // As CUDA, with a caveat for RDNA.
            alias: Alias::AtBoundaries,
            alias_proven: false,
            map_in_any_order: !defective,
            map_while_capturing: true,
            // Kernel nodes store addresses; the effect on copy nodes is unknown.
            replace_under_graph: false,
            unmap_waits: true,
            unmap_each: true,
            // In several releases (ROCm/rocm-systems #10604).
            descriptors_per_page: 1,
            register_host: true,
            // Peers would also access all earlier mappings.
            peers: if defective { Peers::NONE } else { peers_of(api, ordinal, count)? },
            restores_no_context: true,
        };
        let info = DeviceInfo {
            platform: PLATFORM.name,
            ordinal,
            name: format!("{name} (HIP {}.{})", version / 10_000_000, version / 100_000 % 100),
            total_bytes: total as u64,
            options: None,
        };
        let mut copies = StreamHandle(ptr::null_mut());
        // SAFETY: valid out pointer. Last fallible call, so no stream leaks.
        with_device(api, ordinal, "hipStreamCreateWithFlags", |api| unsafe {
            (api.hipStreamCreateWithFlags)(&raw mut copies, api::STREAM_NON_BLOCKING)
        })?;
        Ok(Self { api, info, capabilities, ranges: defective.then(Mutex::default), copies })
    }

    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        with_device(self.api, self.info.ordinal, name, |api| relaxed(api, || call(api)))
    }

    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            Err(Error::Driver { code: api::DEINITIALIZED | api::CONTEXT_IS_DESTROYED, .. }) => Ok(()),
            Err(Error::Driver { code: api::INVALID_DEVICE, .. }) if Self::count() == Ok(0) => Ok(()),
            result => result,
        }
    }
}

impl Drop for HipDriver {
    fn drop(&mut self) {
        // SAFETY: our stream, no longer used.
        let destroyed =
            self.give_back("hipStreamDestroy", |api| unsafe { (api.hipStreamDestroy)(self.copies) });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "the stream for copies was not destroyed");
        }
    }
}

fn version(api: &Api) -> Result<i32> {
    let mut version = 0;
    // SAFETY: valid out pointer; allowed before `hipInit`.
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

fn with_device(
    api: &'static Api,
    ordinal: i32,
    name: &'static str,
    call: impl FnOnce(&Api) -> Code,
) -> Result<()> {
    let mut before = 0;
    // SAFETY: valid out pointer.
    check(api, "hipGetDevice", unsafe { (api.hipGetDevice)(&raw mut before) })?;
    let foreign = before != ordinal;
    if foreign {
        // SAFETY: the device exists.
        check(api, "hipSetDevice", unsafe { (api.hipSetDevice)(ordinal) })?;
    }
    let code = call(api);
    if foreign {
        // SAFETY: the previous device.
        unsafe { (api.hipSetDevice)(before) };
    }
    check(api, name, code)
}

fn relaxed(api: &Api, call: impl FnOnce() -> Code) -> Code {
    let mut mode = CaptureMode(api::CAPTURE_RELAXED);
    // SAFETY: valid pointer. Without relaxed captures, the call might break one.
    let code = unsafe { (api.hipThreadExchangeStreamCaptureMode)(&raw mut mode) };
    if code.0 != 0 {
        return code;
    }
    let code = call();
    // SAFETY: as above.
    unsafe { (api.hipThreadExchangeStreamCaptureMode)(&raw mut mode) };
    code
}

fn peers_of(api: &Api, ordinal: i32, count: i32) -> Result<Peers> {
    let mut peers = Peers::NONE;
    for other in (0..count).filter(|other| *other != ordinal) {
        let mut can = 0;
        // SAFETY: valid out pointer, existing devices.
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
    // SAFETY: any integer is allowed.
    let text = unsafe { (api.hipGetErrorName)(code) };
    let name = if text.is_null() {
        "unknown result".to_owned()
    } else {
        // SAFETY: a static C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Driver { call, code: code.0, name })
}

fn pointer(at: Address) -> *mut c_void {
    at.0 as *mut c_void
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
