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
        let prop = memory::allocation(ordinal);
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
            map_in_any_order: !defective,
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
