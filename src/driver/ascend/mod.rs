//! The Ascend driver: CANN's ACL runtime, `aclrt*` over the device's default context. Never run on hardware.
//!
//! Every call makes that context current if another one is, and relaxes the thread's capture mode, as the CUDA driver does. Where a thread had
//! no context before, it keeps ours: ACL has no way back to none. Rules marked "source" are those of the open runtime
//! (hicann/runtime 681ef76, 2026-08), "documentation" those of its `docs/zh`.
//!
//! *Waiting.* The documentation forbids to wait for or to ask for events, streams and devices "in any capture mode" while something is captured
//! (04-01); the source refuses it only for events that are in the capture. This driver keeps to the documentation, as far as it can know of captures:
//! [`capture_begins`](Timeline::capture_begins).

use std::cell::Cell;
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{Alias, Capabilities, DeviceInfo, Driver, Platform};
use crate::error::{Error, Result};
use crate::units::{MAX_BYTES, Peers, Stream};

mod api;
mod errors;
mod memory;
mod work;

use api::{AclStream, Api, Code, Context, Granularity, MemAttr};
use errors::check;
use work::Patterns;

const NAME: &str = "ascend";

pub(super) const PLATFORM: Platform = Platform {
    name: NAME,
    number: 4,
    count: AscendDriver::count,
    open: |ordinal, _| Ok(Arc::new(AscendDriver::new(ordinal)?)),
    abi: api::abi,
};

/// The longest reservation of the devices up to 910_93, by the HAL's documentation.
const SHORT_RESERVATION: u64 = 128 << 30;

thread_local! {
    /// How many waits this thread is in the middle of.
    static WAITING: Cell<u32> = const { Cell::new(0) };
}

/// An Ascend NPU.
#[derive(Debug)]
pub struct AscendDriver {
    api: &'static Api,
    info: DeviceInfo,
    capabilities: Capabilities,
    /// The device's default context, which torch_npu uses too. It is the process's and stays.
    context: Context,
    patterns: Patterns,
    /// Streams of the library's own that nobody uses now. Destroying one would wait for what it was given (documentation), and there are some thousand
    /// of them a device, for all processes: they are used again, once that is done.
    spare: Mutex<Vec<u64>>,
    /// Captures under way, as far as this driver was told.
    captures: AtomicU64,
}

// SAFETY: a context may be current on any thread (documentation of aclrtSetCurrentContext); nothing else is shared.
unsafe impl Send for AscendDriver {}
// SAFETY: as above; the runtime's functions are thread-safe.
unsafe impl Sync for AscendDriver {}

impl AscendDriver {
    /// How many usable NPUs there are.
    ///
    /// # Errors
    /// [`Error::DriverMissing`], [`Error::SymbolMissing`], or the runtime's own refusal to start.
    pub fn count() -> Result<i32> {
        static STARTED: OnceLock<()> = OnceLock::new();
        let api = Api::get()?;
        if STARTED.get().is_none() {
            // SAFETY: null is "no configuration". It is never ended: that is for the process, and would end torch_npu's too.
            let code = unsafe { (api.aclInit)(ptr::null()) };
            if code != Code(errors::REPEAT_INITIALISE) {
                check(api, "aclInit", code)?;
            }
            STARTED.get_or_init(|| ());
        }
        let mut count = 0;
        // SAFETY: the out pointer is good.
        let code = unsafe { (api.aclrtGetDeviceCount)(&raw mut count) };
        if code == Code(errors::NO_DEVICE) {
            return Ok(0);
        }
        check(api, "aclrtGetDeviceCount", code)?;
        Ok(i32::try_from(count).unwrap_or(i32::MAX))
    }

    /// Opens NPU `ordinal`, with its default context, the one that torch_npu uses.
    ///
    /// # Errors
    /// As [`count`](Self::count); [`Error::InvalidDevice`]; [`Error::UnfitDriver`] where operators may go around the level-2 cache.
    pub fn new(ordinal: i32) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: NAME, ordinal, count });
        }
        let api = Api::get()?;
        // SAFETY: no preconditions; the text is static.
        let name = unsafe { (api.aclrtGetSocName)() };
        let name = if name.is_null() {
            "Ascend".to_owned()
        } else {
            // SAFETY: not null, and then zero-terminated.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        cached(&name, std::env::var("AUTO_USE_UC_MEMORY").ok().as_deref())?;
        let before = current(api)?;
        // SAFETY: the device is there. It starts the device's memory management, which the maps need (source).
        check(api, "aclrtSetDevice", unsafe { (api.aclrtSetDevice)(ordinal) })?;
        let opened = Self::in_context(api, ordinal, name);
        if let Some(before) = before {
            // SAFETY: the context that was current.
            unsafe { (api.aclrtSetCurrentContext)(before) };
        }
        opened
    }

    /// With the device's default context current.
    fn in_context(api: &'static Api, ordinal: i32, name: String) -> Result<Self> {
        let context = current(api)?.ok_or(Error::Unsupported { device: ordinal })?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are good.
        let code = unsafe { (api.aclrtGetMemInfo)(MemAttr(api::HBM), &raw mut free, &raw mut total) };
        check(api, "aclrtGetMemInfo", code)?;
        let (mut prop, mut granularity) = (api::allocation(ordinal), 0);
        // SAFETY: both pointers are good.
        let code = unsafe {
            (api.aclrtMemGetAllocationGranularity)(
                &raw mut prop,
                Granularity(api::MINIMUM),
                &raw mut granularity,
            )
        };
        check(api, "aclrtMemGetAllocationGranularity", code)?;
        let capabilities = Capabilities {
            granularity: granularity as u64,
            largest_page: MAX_BYTES,
            largest_reservation: longest_reservation(&name),
            // Not documented. The driver counts references to a page and asks nothing of other addresses of it (source); xLLM's
            // SharedVMMAllocator does it on NPUs.
            alias: Alias::AtBoundaries,
            alias_proven: false,
            // No function of these looks at captures (source).
            map_in_any_order: true,
            map_while_capturing: true,
            // A captured task holds addresses. vllm-ascend's sleep mode puts other pages behind those of its graphs.
            replace_under_graph: true,
            // torch_npu synchronises the device before it unmaps.
            unmap_waits: false,
            // A map goes by its head alone.
            unmap_each: true,
            descriptors_per_page: 0,
            register_host: api.aclrtHostRegisterV2.is_some() && api.aclrtHostUnregister.is_some(),
            // The pages that other devices may reach are of another kind, and the rules of aclrtMemSetAccess are not published.
            peers: Peers::NONE,
            restores_no_context: false,
        };
        let info = DeviceInfo { platform: NAME, ordinal, name, total_bytes: total as u64, options: None };
        Ok(Self {
            api,
            info,
            capabilities,
            context,
            patterns: Patterns::default(),
            spare: Mutex::default(),
            captures: AtomicU64::new(0),
        })
    }

    /// Runs one call with our context current and capture restrictions off, and restores both.
    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        let api = self.api;
        let before = current(api)?;
        let foreign = before != Some(self.context);
        if foreign {
            // SAFETY: the device's default context, which stays.
            let code = unsafe { (api.aclrtSetCurrentContext)(self.context) };
            check(api, "aclrtSetCurrentContext", code)?;
        }
        let mut mode = api::CaptureMode(api::CAPTURE_RELAXED);
        // SAFETY: the pointer is good; the runtime writes the previous mode there. Without the exchange, which chips without captures
        // refuse, the call below is merely refused during a capture, so its result needs no check.
        unsafe { (api.aclmdlRICaptureThreadExchangeMode)(&raw mut mode) };
        let code = call(api);
        // SAFETY: as above, giving the thread back the mode it had.
        unsafe { (api.aclmdlRICaptureThreadExchangeMode)(&raw mut mode) };
        let result = check(api, name, code);
        if foreign && let Some(before) = before {
            // SAFETY: the context that was current.
            unsafe { (api.aclrtSetCurrentContext)(before) };
        }
        result
    }

    /// As [`call`](Self::call), for giving things back: a runtime that is shutting down has taken them already.
    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            Err(Error::Driver { code, .. }) if errors::gone(code) => Ok(()),
            result => result,
        }
    }

    /// Whether a capture of somebody who told us is under way, and this thread is not in the middle of a wait that began before it.
    fn must_not_wait(&self) -> bool {
        self.captures.load(SeqCst) > 0 && WAITING.get() == 0
    }

    /// The stream, as ACL has it. Null is the context's default stream; there is none for each thread.
    fn stream(&self, stream: Stream) -> Result<AclStream> {
        if stream == Stream::PER_THREAD {
            let expected =
                "a created stream or the default one: Ascend has no default stream for each thread";
            return Err(Error::InvalidArgument { what: "a stream", value: stream.raw().into(), expected });
        }
        Ok(AclStream(stream.raw() as *mut _))
    }
}

impl Driver for AscendDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        let Some(ask) = self.api.aclrtGetVersion else { return String::new() };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the out pointers are good.
        match unsafe { ask(&raw mut major, &raw mut minor, &raw mut patch) } {
            Code(0) => format!("{major}.{minor}.{patch}"),
            _ => String::new(),
        }
    }
}

impl Drop for AscendDriver {
    fn drop(&mut self) {
        let spare = std::mem::take(self.spare.get_mut().unwrap_or_else(PoisonError::into_inner));
        for stream in spare {
            // SAFETY: a stream of ours that nobody uses; it waits for what it was given.
            let destroyed = self.give_back("aclrtDestroyStream", |api| unsafe {
                (api.aclrtDestroyStream)(AclStream(stream as *mut _))
            });
            if let Err(error) = destroyed {
                tracing::warn!(%error, "the driver would not destroy a stream");
            }
        }
    }
}

/// The thread's context, if it has one.
fn current(api: &Api) -> Result<Option<Context>> {
    let mut context = Context(ptr::null_mut());
    // SAFETY: the out pointer is good.
    let code = unsafe { (api.aclrtGetCurrentContext)(&raw mut context) };
    if code == Code(errors::CONTEXT_NULL) {
        return Ok(None);
    }
    check(api, "aclrtGetCurrentContext", code)?;
    Ok((!context.0.is_null()).then_some(context))
}

/// The longest range that a device reserves.
fn longest_reservation(soc: &str) -> u64 {
    let later = soc.starts_with("Ascend910_95");
    let short = !later && ["Ascend310", "Ascend910"].iter().any(|name| soc.starts_with(name));
    if short { SHORT_RESERVATION } else { MAX_BYTES }
}

/// Refuses a device whose operators may move data around the level-2 cache (AUTO_USE_UC_MEMORY of CANN, on unless it is switched off before `aclInit`):
/// what two addresses of a page show of each other is then unknown, and no test from outside can tell.
fn cached(soc: &str, setting: Option<&str>) -> Result<()> {
    let later = soc.starts_with("Ascend910_95");
    let may = !later && ["Ascend310P", "Ascend910B", "Ascend910_93"].iter().any(|name| soc.starts_with(name));
    // As the runtime reads it (source).
    let on = setting.is_none_or(|word| word.is_empty() || word.starts_with('1'));
    if may && on {
        return Err(Error::UnfitDriver {
            driver: NAME,
            problem: format!(
                "on {soc}, operators may move data around the level-2 cache: set AUTO_USE_UC_MEMORY=0 before the process starts"
            ),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_may_go_around_the_cache_are_refused_unless_that_is_switched_off() {
        let refused = |soc, setting| cached(soc, setting).is_err();
        for soc in ["Ascend910B4", "Ascend910_9391", "Ascend310P3"] {
            assert!(refused(soc, None) && refused(soc, Some("")) && refused(soc, Some("1")), "{soc}");
            assert!(!refused(soc, Some("0")), "{soc}");
        }
        for soc in ["Ascend910_9589", "Ascend950PR", "Ascend910A"] {
            assert!(!refused(soc, None), "{soc}");
        }
    }

    #[test]
    fn a_reservation_is_as_long_as_the_device_allows() {
        assert_eq!(longest_reservation("Ascend910B4"), 128 << 30);
        assert_eq!(longest_reservation("Ascend310P3"), 128 << 30);
        assert_eq!(longest_reservation("Ascend910_9589"), MAX_BYTES);
    }
}
