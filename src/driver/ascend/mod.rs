//! Ascend driver: CANN's ACL runtime, `aclrt*` over the device's default context. Never run on
//! hardware. "Source" means the open runtime (hicann/runtime 681ef76, 2026-08), "documentation" its
//! `docs/zh`.
//!
//! Every call makes the default context current and relaxes the thread's capture mode, and restores
//! both. ACL cannot restore "no context".
//!
//! During [reported](crate::driver::Timeline::capture_begins) captures, nothing is awaited or
//! queried, by the documentation (04-01); the source refuses only events of the capture.

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

/// Maximum of devices up to 910_93, by the HAL's documentation.
const SHORT_RESERVATION: u64 = 128 << 30;

thread_local! {
    /// Nested waits of this thread.
    static WAITING: Cell<u32> = const { Cell::new(0) };
}

/// An Ascend NPU.
#[derive(Debug)]
pub struct AscendDriver {
    api: &'static Api,
    info: DeviceInfo,
    capabilities: Capabilities,
    /// Also used by torch_npu; never destroyed.
    context: Context,
    patterns: Patterns,
    /// Reused once idle: destroying a stream waits for its work (documentation), and all processes
    /// share a few thousand.
    spare: Mutex<Vec<u64>>,
    captures: AtomicU64,
}

// SAFETY: any thread may set a context (documentation of aclrtSetCurrentContext).
unsafe impl Send for AscendDriver {}
// SAFETY: as above; the runtime's functions are thread-safe.
unsafe impl Sync for AscendDriver {}

impl AscendDriver {
    /// As [`CudaDriver::count`](super::CudaDriver::count), of NPUs.
    pub fn count() -> Result<i32> {
        static STARTED: OnceLock<()> = OnceLock::new();
        let api = Api::get()?;
        if STARTED.get().is_none() {
            // SAFETY: null means no configuration. Never finalized, for torch_npu's sake.
            let code = unsafe { (api.aclInit)(ptr::null()) };
            if code != Code(errors::REPEAT_INITIALISE) {
                check(api, "aclInit", code)?;
            }
            STARTED.get_or_init(|| ());
        }
        let mut count = 0;
        // SAFETY: valid out pointer.
        let code = unsafe { (api.aclrtGetDeviceCount)(&raw mut count) };
        if code == Code(errors::NO_DEVICE) {
            return Ok(0);
        }
        check(api, "aclrtGetDeviceCount", code)?;
        Ok(i32::try_from(count).unwrap_or(i32::MAX))
    }

    /// Opens NPU `ordinal`.
    ///
    /// # Errors
    /// As [`count`](Self::count); [`Error::InvalidDevice`]; [`Error::UnfitDriver`] if operators may
    /// bypass the level-2 cache.
    pub fn new(ordinal: i32) -> Result<Self> {
        let count = Self::count()?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: NAME, ordinal, count });
        }
        let api = Api::get()?;
        // SAFETY: no preconditions.
        let name = unsafe { (api.aclrtGetSocName)() };
        let name = if name.is_null() {
            "Ascend".to_owned()
        } else {
            // SAFETY: not null, so zero-terminated.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        cached(&name, std::env::var("AUTO_USE_UC_MEMORY").ok().as_deref())?;
        let before = current(api)?;
        // SAFETY: an existing device. Starts the memory management (source).
        check(api, "aclrtSetDevice", unsafe { (api.aclrtSetDevice)(ordinal) })?;
        let opened = Self::in_context(api, ordinal, name);
        if let Some(before) = before {
            // SAFETY: the previous context.
            unsafe { (api.aclrtSetCurrentContext)(before) };
        }
        opened
    }

    fn in_context(api: &'static Api, ordinal: i32, name: String) -> Result<Self> {
        let context = current(api)?.ok_or(Error::Unsupported { device: ordinal })?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers.
        let code = unsafe { (api.aclrtGetMemInfo)(MemAttr(api::HBM), &raw mut free, &raw mut total) };
        check(api, "aclrtGetMemInfo", code)?;
        let (mut prop, mut granularity) = (api::allocation(ordinal), 0);
        // SAFETY: valid pointers.
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
            // Undocumented. Addresses are independent in the driver (source); xLLM uses aliases on
            // NPUs.
            alias: Alias::AtBoundaries,
            alias_proven: false,
            // These functions ignore captures (source).
            map_in_any_order: true,
            map_while_capturing: true,
            // Captured tasks store addresses, and vllm-ascend's sleep mode replaces pages.
            replace_under_graph: true,
            // torch_npu synchronizes the device before an unmap.
            unmap_waits: false,
            // An unmap names the start of one mapping.
            unmap_each: true,
            descriptors_per_page: 0,
            register_host: api.aclrtHostRegisterV2.is_some() && api.aclrtHostUnregister.is_some(),
            // Pages for peers are of another kind, with unpublished rules (aclrtMemSetAccess).
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

    fn call(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        let api = self.api;
        let before = current(api)?;
        let foreign = before != Some(self.context);
        if foreign {
            // SAFETY: the default context, never destroyed.
            let code = unsafe { (api.aclrtSetCurrentContext)(self.context) };
            check(api, "aclrtSetCurrentContext", code)?;
        }
        let mut mode = api::CaptureMode(api::CAPTURE_RELAXED);
        // SAFETY: valid pointer. After a failed exchange, the call is at worst refused.
        unsafe { (api.aclmdlRICaptureThreadExchangeMode)(&raw mut mode) };
        let code = call(api);
        // SAFETY: as above.
        unsafe { (api.aclmdlRICaptureThreadExchangeMode)(&raw mut mode) };
        let result = check(api, name, code);
        if foreign && let Some(before) = before {
            // SAFETY: the previous context.
            unsafe { (api.aclrtSetCurrentContext)(before) };
        }
        result
    }

    fn give_back(&self, name: &'static str, call: impl FnOnce(&Api) -> Code) -> Result<()> {
        match self.call(name, call) {
            Err(Error::Driver { code, .. }) if errors::gone(code) => Ok(()),
            result => result,
        }
    }

    /// Whether a capture is reported, and this thread is not inside an earlier wait.
    fn must_not_wait(&self) -> bool {
        self.captures.load(SeqCst) > 0 && WAITING.get() == 0
    }

    /// ACL has no per-thread default streams.
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
        // SAFETY: valid out pointers.
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
            // SAFETY: our unused stream. Waits for its work.
            let destroyed = self.give_back("aclrtDestroyStream", |api| unsafe {
                (api.aclrtDestroyStream)(AclStream(stream as *mut _))
            });
            if let Err(error) = destroyed {
                tracing::warn!(%error, "the driver would not destroy a stream");
            }
        }
    }
}

fn current(api: &Api) -> Result<Option<Context>> {
    let mut context = Context(ptr::null_mut());
    // SAFETY: valid out pointer.
    let code = unsafe { (api.aclrtGetCurrentContext)(&raw mut context) };
    if code == Code(errors::CONTEXT_NULL) {
        return Ok(None);
    }
    check(api, "aclrtGetCurrentContext", code)?;
    Ok((!context.0.is_null()).then_some(context))
}

fn longest_reservation(soc: &str) -> u64 {
    let later = soc.starts_with("Ascend910_95");
    let short = !later && ["Ascend310", "Ascend910"].iter().any(|name| soc.starts_with(name));
    if short { SHORT_RESERVATION } else { MAX_BYTES }
}

/// With CANN's AUTO_USE_UC_MEMORY (default), operators may bypass the level-2 cache: coherence
/// between addresses of a page is then unknown. Read by `aclInit`.
fn cached(soc: &str, setting: Option<&str>) -> Result<()> {
    let later = soc.starts_with("Ascend910_95");
    let may = !later && ["Ascend310P", "Ascend910B", "Ascend910_93"].iter().any(|name| soc.starts_with(name));
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
