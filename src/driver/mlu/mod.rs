//! MLU driver: Cambricon's CNDrv, `cn*` over the device's shared context, also used by CNRT and
//! torch_mlu. Every call makes the context current, in relaxed capture mode, and restores both.
//! Never run on hardware, nor compiled against the vendor's header. Undocumented behaviour is not
//! used:
//!
//! * *Default queues.* CNDrv's numbers of the thread's and the legacy queue (1 and 2) are reversed
//!   against CUDA's. The null queue is accepted outside captures; [`Stream::PER_THREAD`] is
//!   refused.
//! * *Notifiers* never placed are not awaited or queried. Their mutex `unplaced` is not held during
//!   CNDrv calls.
//! * *Host memory* is not registered: CNDrv has no function for foreign memory.
//! * *Peers*: access descriptors name the memory's own device.
//! * *Graphs*: the effects of a replaced page on copy nodes, and of an update, are unknown.

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
    context: Context,
    captures: AtomicU64,
    unplaced: Mutex<HashSet<u64>>,
}

// SAFETY: any thread may bind a context (header, cnCtxSetCurrent).
unsafe impl Send for MluDriver {}
// SAFETY: as above; CNRT calls the driver from any thread.
unsafe impl Sync for MluDriver {}

impl MluDriver {
    /// As [`CudaDriver::count`](super::CudaDriver::count), of MLUs. Afterwards the process must not
    /// fork (header, cnInit).
    pub fn count() -> Result<i32> {
        let api = Api::get()?;
        // SAFETY: no preconditions.
        let code = unsafe { (api.cnInit)(0) };
        if code == Code(api::NO_DEVICE) {
            return Ok(0);
        }
        check(api, "cnInit", code)?;
        let mut count = 0;
        // SAFETY: valid out pointer.
        check(api, "cnDeviceGetCount", unsafe { (api.cnDeviceGetCount)(&raw mut count) })?;
        Ok(count)
    }

    /// Opens MLU `ordinal` and retains its shared context.
    ///
    /// # Errors
    /// As [`CudaDriver::new`](super::CudaDriver::new).
    pub fn new(ordinal: i32) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: NAME, ordinal, count });
        }
        let api = Api::get()?;
        let mut device = Device(0);
        // SAFETY: valid out pointer.
        check(api, "cnDeviceGet", unsafe { (api.cnDeviceGet)(&raw mut device, ordinal) })?;
        let mut supported = 0;
        let attribute = Attribute(api::VIRTUAL_ADDRESSES);
        // SAFETY: valid out pointer.
        let code = unsafe { (api.cnDeviceGetAttribute)(&raw mut supported, attribute, device) };
        // These codes mean no virtual memory management.
        if !matches!(code, Code(api::INVALID_VALUE | api::NOT_SUPPORTED)) {
            check(api, "cnDeviceGetAttribute", code)?;
        }
        if code != Code(0) || supported == 0 {
            return Err(Error::Unsupported { device: ordinal });
        }
        // Longer names are an error (header).
        let mut name = [0; 256];
        // SAFETY: a buffer of this length; its last byte stays zero.
        let code = unsafe { (api.cnDeviceGetName)(name.as_mut_ptr(), name.len() as c_uint - 1, device) };
        check(api, "cnDeviceGetName", code)?;
        // SAFETY: a zero-terminated buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut total_bytes = 0;
        // SAFETY: valid out pointer.
        check(api, "cnDeviceTotalMem", unsafe { (api.cnDeviceTotalMem)(&raw mut total_bytes, device) })?;
        let (mut granularity, mut prop) = (0, api::allocation(ordinal));
        // SAFETY: valid pointers.
        let code = unsafe {
            (api.cnMemGetAllocationGranularity)(
                &raw mut granularity,
                &raw mut prop,
                Granularity(api::MINIMUM),
            )
        };
        check(api, "cnMemGetAllocationGranularity", code)?;
        let mut context = Context(ptr::null_mut());
        // SAFETY: valid out pointer. Last fallible call, so no reference leaks.
        let code = unsafe { (api.cnSharedContextAcquire)(&raw mut context, device) };
        check(api, "cnSharedContextAcquire", code)?;
        let info = DeviceInfo { platform: NAME, ordinal, name, total_bytes, options: None };
        let capabilities = Capabilities {
            granularity,
            largest_page: MAX_BYTES,
            largest_reservation: MAX_BYTES,
            // CNToolkit's guide, 6.5.8.4, in CUDA's words.
            alias: Alias::AtBoundaries,
            alias_proven: false,
            // Header, cnThreadExchangeQueueCaptureMode.
            map_in_any_order: true,
            map_while_capturing: true,
            replace_under_graph: false,
            // Undocumented.
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

    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        let api = self.api;
        let mut before = Context(ptr::null_mut());
        // SAFETY: valid out pointer.
        check(api, "cnCtxGetCurrent", unsafe { (api.cnCtxGetCurrent)(&raw mut before) })?;
        let foreign = before != self.context;
        if foreign {
            // SAFETY: this object retains the context.
            check(api, "cnCtxSetCurrent", unsafe { (api.cnCtxSetCurrent)(self.context) })?;
        }
        let mut mode = api::CaptureMode(api::CAPTURE_RELAXED);
        // SAFETY: valid pointer. After a failed exchange, the call is at worst refused.
        unsafe { (api.cnThreadExchangeQueueCaptureMode)(&raw mut mode) };
        let code = call(api);
        // SAFETY: as above.
        unsafe { (api.cnThreadExchangeQueueCaptureMode)(&raw mut mode) };
        if foreign {
            // SAFETY: the previous context, or null for none.
            unsafe { (api.cnCtxSetCurrent)(before) };
        }
        check(api, name, code)
    }

    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            Err(Error::Driver {
                code: api::NOT_INITIALISED | api::DEINITIALISED | api::CONTEXT_INVALID,
                ..
            }) => Ok(()),
            result => result,
        }
    }

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
        // SAFETY: valid out pointers.
        match unsafe { (self.api.cnGetLibVersion)(&raw mut major, &raw mut minor, &raw mut patch) } {
            Code(0) => format!("{major}.{minor}.{patch}"),
            _ => String::new(),
        }
    }
}

impl Drop for MluDriver {
    fn drop(&mut self) {
        // SAFETY: our reference; after the driver's shutdown without effect.
        unsafe { (self.api.cnSharedContextRelease)(self.device) };
    }
}

fn out_of_memory(code: c_int) -> bool {
    matches!(code, api::OUT_OF_MEMORY | api::OUT_OF_PROCESS_MEMORY)
}

fn check(api: &Api, call: &'static str, code: Code) -> Result<()> {
    let Code(number) = code;
    if number == 0 {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: valid out pointer; any code is allowed (header).
    let known = unsafe { (api.cnGetErrorName)(code, &raw mut text) } == Code(0) && !text.is_null();
    let name = if known {
        // SAFETY: a static C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown result".to_owned()
    };
    Err(Error::Driver { call, code: number, name })
}
