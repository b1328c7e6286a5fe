//! The MLU driver: Cambricon's CNDrv, `cn*` over the device's shared context, the one that CNRT and torch_mlu use. Never run on hardware, and never
//! compiled against the vendor's header, which nothing to be had carries: it is built from the published text of CNDrv 2.15.5's.
//!
//! Every call makes that context current if another one is, or none, and relaxes the thread's capture mode, as the CUDA driver does. What the text leaves
//! open is not done:
//!
//! * *Default queues.* Its numbers for the thread's and the legacy one (1 and 2) are the other way round than CUDA's, and whether one of them waits for
//!   other queues is not said. The null queue is taken while nothing is captured; [`Stream::PER_THREAD`] is refused.
//! * *Notifiers* that were never placed are not waited for and not asked about.
//! * *Host memory* that is not its own is not registered: there is no function for that.
//! * *Peers*: an access description names one device, which is the memory's own in all that is written.
//! * *Graphs*: what copy nodes keep of a page that is replaced is not said, nor what an update takes over.

use std::collections::HashSet;
use std::ffi::{CStr, c_int, c_uint};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::{Alias, Capabilities, DeviceInfo, Driver, Platform};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{MAX_BYTES, Peers, Stream};

mod api;
mod memory;
mod work;

use api::{Api, Attribute, Code, Context, Device, Granularity, Queue};

const NAME: &str = "mlu";

pub(super) const PLATFORM: Platform = Platform {
    name: NAME,
    number: 5,
    count: MluDriver::count,
    open: |ordinal, _| Ok(Arc::new(MluDriver::new(ordinal)?)),
    abi: api::abi,
};

/// A Cambricon MLU.
#[derive(Debug)]
pub struct MluDriver {
    api: &'static Api,
    info: DeviceInfo,
    capabilities: Capabilities,
    device: Device,
    /// The device's shared context, held while this object lives.
    context: Context,
    /// Captures under way, as far as this driver was told.
    captures: AtomicU64,
    /// Notifiers of ours that were never placed.
    unplaced: Mutex<HashSet<u64>>,
}

// SAFETY: a context may be bound to any thread (header, cnCtxSetCurrent); nothing else is shared.
unsafe impl Send for MluDriver {}
// SAFETY: as above; the driver's functions are called from any thread by CNRT itself.
unsafe impl Sync for MluDriver {}

impl MluDriver {
    /// How many usable MLUs there are; zero, not an error, where the driver finds none. A process that has asked must not fork (header, cnInit).
    ///
    /// # Errors
    /// [`Error::DriverMissing`], [`Error::SymbolMissing`], or the driver's own refusal to start.
    pub fn count() -> Result<i32> {
        let api = Api::get()?;
        // SAFETY: no preconditions.
        let code = unsafe { (api.cnInit)(0) };
        if code == Code(api::NO_DEVICE) {
            return Ok(0);
        }
        check(api, "cnInit", code)?;
        let mut count = 0;
        // SAFETY: the out pointer is good.
        check(api, "cnDeviceGetCount", unsafe { (api.cnDeviceGetCount)(&raw mut count) })?;
        Ok(count)
    }

    /// Opens MLU `ordinal` and holds its shared context.
    ///
    /// # Errors
    /// As [`count`](Self::count); [`Error::InvalidDevice`]; [`Error::Unsupported`] without virtual memory management.
    pub fn new(ordinal: i32) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: NAME, ordinal, count });
        }
        let api = Api::get()?;
        let mut device = Device(0);
        // SAFETY: the out pointer is good.
        check(api, "cnDeviceGet", unsafe { (api.cnDeviceGet)(&raw mut device, ordinal) })?;
        let mut supported = 0;
        let attribute = Attribute(api::VIRTUAL_ADDRESSES);
        // SAFETY: the out pointer is good.
        let code = unsafe { (api.cnDeviceGetAttribute)(&raw mut supported, attribute, device) };
        // A driver that does not know the question has none either.
        if !matches!(code, Code(api::INVALID_VALUE | api::NOT_SUPPORTED)) {
            check(api, "cnDeviceGetAttribute", code)?;
        }
        if code != Code(0) || supported == 0 {
            return Err(Error::Unsupported { device: ordinal });
        }
        // A name that is longer is an error (header).
        let mut name = [0; 256];
        // SAFETY: the buffer has the length given, one byte of which stays zero.
        let code = unsafe { (api.cnDeviceGetName)(name.as_mut_ptr(), name.len() as c_uint - 1, device) };
        check(api, "cnDeviceGetName", code)?;
        // SAFETY: the buffer ends in a zero byte and lives on this stack.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut total_bytes = 0;
        // SAFETY: the out pointer is good.
        check(api, "cnDeviceTotalMem", unsafe { (api.cnDeviceTotalMem)(&raw mut total_bytes, device) })?;
        let (mut granularity, mut prop) = (0, api::allocation(ordinal));
        // SAFETY: both pointers are good.
        let code = unsafe {
            (api.cnMemGetAllocationGranularity)(
                &raw mut granularity,
                &raw mut prop,
                Granularity(api::MINIMUM),
            )
        };
        check(api, "cnMemGetAllocationGranularity", code)?;
        let mut context = Context(ptr::null_mut());
        // SAFETY: the out pointer is good. Last, so that nothing after it can fail and lose the reference.
        let code = unsafe { (api.cnSharedContextAcquire)(&raw mut context, device) };
        check(api, "cnSharedContextAcquire", code)?;
        let info = DeviceInfo { platform: NAME, ordinal, name, total_bytes, options: None };
        let capabilities = Capabilities {
            granularity,
            largest_page: MAX_BYTES,
            largest_reservation: MAX_BYTES,
            // CNToolkit's guide, 6.5.8.4, in the words of CUDA's.
            alias: Alias::AtBoundaries,
            alias_proven: false,
            // A relaxed thread may call what allocates (header, cnThreadExchangeQueueCaptureMode).
            map_in_any_order: true,
            map_while_capturing: true,
            replace_under_graph: false,
            // Not said.
            unmap_waits: false,
            // "the entire contiguous address range that was mapped to"
            unmap_each: true,
            descriptors_per_page: 0,
            register_host: false,
            peers: Peers::NONE,
            restores_no_context: true,
        };
        Ok(Self {
            api,
            info,
            capabilities,
            device,
            context,
            captures: AtomicU64::new(0),
            unplaced: Mutex::default(),
        })
    }

    /// Runs one driver call with our context current and capture restrictions off, and restores both.
    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        let api = self.api;
        let mut before = Context(ptr::null_mut());
        // SAFETY: the out pointer is good.
        check(api, "cnCtxGetCurrent", unsafe { (api.cnCtxGetCurrent)(&raw mut before) })?;
        let foreign = before != self.context;
        if foreign {
            // SAFETY: we hold a reference to the context.
            check(api, "cnCtxSetCurrent", unsafe { (api.cnCtxSetCurrent)(self.context) })?;
        }
        let mut mode = api::CaptureMode(api::CAPTURE_RELAXED);
        // SAFETY: the pointer is good; the driver writes the previous mode there. Without the exchange the call below is merely refused during a
        // capture, so its result needs no check.
        unsafe { (api.cnThreadExchangeQueueCaptureMode)(&raw mut mode) };
        let code = call(api);
        // SAFETY: as above, giving the thread back the mode it had.
        unsafe { (api.cnThreadExchangeQueueCaptureMode)(&raw mut mode) };
        if foreign {
            // SAFETY: the context that was current, or null, which is none.
            unsafe { (api.cnCtxSetCurrent)(before) };
        }
        check(api, name, code)
    }

    /// As [`call`](Self::call), for giving things back: a driver that is shutting down has taken them already.
    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            Err(Error::Driver {
                code: api::NOT_INITIALISED | api::DEINITIALISED | api::CONTEXT_INVALID,
                ..
            }) => Ok(()),
            result => result,
        }
    }

    /// The queue, as CNDrv has it.
    fn queue(&self, stream: Stream) -> Result<Queue> {
        if stream == Stream::PER_THREAD {
            let expected = "a created queue or the default one: what CNDrv's own queue of each thread waits for is not documented";
            return Err(Error::InvalidArgument { what: "a stream", value: stream.raw().into(), expected });
        }
        Ok(Queue(stream.raw() as *mut _))
    }
}

impl Driver for MluDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the out pointers are good.
        match unsafe { (self.api.cnGetLibVersion)(&raw mut major, &raw mut minor, &raw mut patch) } {
            Code(0) => format!("{major}.{minor}.{patch}"),
            _ => String::new(),
        }
    }
}

impl Drop for MluDriver {
    fn drop(&mut self) {
        // SAFETY: gives back the reference taken in `new`. A driver that is gone already refuses, which changes nothing.
        unsafe { (self.api.cnSharedContextRelease)(self.device) };
    }
}

/// No memory of the device is left, or none that this process may have.
fn out_of_memory(code: c_int) -> bool {
    matches!(code, api::OUT_OF_MEMORY | api::OUT_OF_PROCESS_MEMORY)
}

/// A result as an error, with its name.
fn check(api: &Api, call: &'static str, code: Code) -> Result<()> {
    let Code(number) = code;
    if number == 0 {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the out pointer is good; any integer is allowed as a code (header).
    let known = unsafe { (api.cnGetErrorName)(code, &raw mut text) } == Code(0) && !text.is_null();
    let name = if known {
        // SAFETY: the driver returns a static, zero-terminated string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown result".to_owned()
    };
    Err(Error::Driver { call, code: number, name })
}
