//! Driver with counted calls, chosen failures, hooks and a simulated busy device.

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::Mutex;
use vmmgraph::driver::{
    Capabilities, DeviceInfo, Driver, Event, Handles, Memory, NotMapped, PageHandle, SharedDriver, Sharing,
    StreamState, Timeline, Transfer, Whole,
};
use vmmgraph::{Address, Error, Peers, Result, Stream};

#[derive(Debug, Default)]
struct Plan {
    calls: u64,
    by_name: BTreeMap<&'static str, u64>,
    failed: BTreeMap<&'static str, u64>,
    /// Numbers of the calls to fail, counted from 1 since the last `arm`.
    fail: Vec<u64>,
    /// Functions of which every call fails.
    refused: HashSet<&'static str>,
    log: Option<Vec<String>>,
    capturing: HashSet<Stream>,
    captured: HashSet<Event>,
    /// Calls during a capture that broke the capture.
    broken: Vec<String>,
    busy: bool,
    /// The same for this many queries.
    busy_for: u64,
    /// Waits during a capture are refused.
    waits_forbidden: bool,
    captures: u64,
}

/// Called before each driver call, with the function's name.
type Hook = Arc<dyn Fn(&'static str) + Send + Sync>;

/// Passes every call to the inner driver, except the calls to fail.
pub struct FaultyDriver {
    inner: SharedDriver,
    plan: Mutex<Plan>,
    hook: Mutex<Option<Hook>>,
    hook_behind: Mutex<Option<Hook>>,
    only: Mutex<Option<ThreadId>>,
}

/// A call in progress; calls the second hook when dropped.
struct End<'a> {
    driver: &'a FaultyDriver,
    name: &'static str,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        if self.driver.is_watched() {
            announce(&self.driver.hook_behind, self.name);
        }
    }
}

fn announce(hook: &Mutex<Option<Hook>>, name: &'static str) {
    let hook = hook.lock().clone();
    if let Some(hook) = hook
        && !HOOKED.replace(true)
    {
        hook(name);
        HOOKED.set(false);
    }
}

thread_local! {
    /// True inside a hook: driver calls of a hook have no hooks.
    static HOOKED: Cell<bool> = const { Cell::new(false) };
    static WAITING: Cell<u32> = const { Cell::new(0) };
}

impl fmt::Debug for FaultyDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyDriver").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl FaultyDriver {
    /// Creates a driver that fails no call.
    #[must_use]
    pub fn new(inner: SharedDriver) -> Arc<Self> {
        let hook_behind = Mutex::default();
        Arc::new(Self {
            inner,
            plan: Mutex::default(),
            hook: Mutex::default(),
            hook_behind,
            only: Mutex::default(),
        })
    }

    /// Makes the calls with these numbers fail; the next call is number 1.
    pub fn arm(&self, fail: &[u64]) {
        let mut plan = self.plan.lock();
        plan.calls = 0;
        plan.fail = fail.to_vec();
    }

    /// Makes every call of a function fail, or stops doing so.
    pub fn refuse(&self, name: &'static str, refused: bool) {
        let mut plan = self.plan.lock();
        if refused {
            plan.refused.insert(name)
        } else {
            plan.refused.remove(name)
        };
    }

    /// Calls since the last [`arm`](Self::arm).
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.plan.lock().calls
    }

    /// Calls of one function since creation.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        self.plan.lock().by_name.get(name).copied().unwrap_or(0)
    }

    /// Returns the failed calls since creation, by function.
    #[must_use]
    pub fn failed(&self) -> BTreeMap<&'static str, u64> {
        self.plan.lock().failed.clone()
    }

    /// Starts the log of calls and their arguments.
    pub fn start_log(&self) {
        self.plan.lock().log = Some(Vec::new());
    }

    /// Takes the log, without the queries of a stream's state, which every replay makes.
    #[must_use]
    pub fn take_log(&self) -> Vec<String> {
        let log = self.plan.lock().log.as_mut().map(std::mem::take).unwrap_or_default();
        log.into_iter().filter(|line| !line.starts_with("stream_state")).collect()
    }

    /// Takes the log and returns the bytes of its unmap calls.
    ///
    /// # Panics
    /// If the log has an unexpected form.
    #[must_use]
    pub fn take_unmapped(&self) -> u64 {
        let log = self.take_log();
        let lengths = log.iter().filter_map(|line| line.strip_prefix("unmap ")?.rsplit(' ').next());
        lengths.map(|bytes| bytes.parse::<u64>().expect("a length")).sum()
    }

    /// Calls `hook` before each call, on the calling thread and without a lock. Calls made by the
    /// hook have no hook.
    pub fn set_hook(&self, hook: Option<Hook>) {
        *self.hook.lock() = hook;
    }

    /// As [`set_hook`](Self::set_hook), after each call that was not made to fail, before it
    /// returns.
    pub fn set_hook_behind(&self, hook: Option<Hook>) {
        *self.hook_behind.lock() = hook;
    }

    /// Counts, fails, logs and announces only the calls of this thread; `None`: of all threads.
    pub fn watch_only(&self, thread: Option<ThreadId>) {
        *self.only.lock() = thread;
    }

    /// Sets whether a stream is under capture. Recording or waiting on a captured stream breaks the
    /// capture.
    pub fn set_capturing(&self, stream: Stream, capturing: bool) {
        let mut plan = self.plan.lock();
        if capturing {
            plan.capturing.insert(stream)
        } else {
            plan.capturing.remove(&stream)
        };
    }

    /// Returns the calls that broke a capture.
    #[must_use]
    pub fn broken_captures(&self) -> Vec<String> {
        self.plan.lock().broken.clone()
    }

    /// While set, no event has happened.
    pub fn set_busy(&self, busy: bool) {
        self.plan.lock().busy = busy;
    }

    /// Simulates a busy device for the next `questions` queries.
    pub fn set_busy_for(&self, questions: u64) {
        self.plan.lock().busy_for = questions;
    }

    /// Forbids waits during announced captures, as some platforms do: waits fail, and queries find
    /// no event happened.
    pub fn forbid_waits(&self, forbidden: bool) {
        self.plan.lock().waits_forbidden = forbidden;
    }

    /// Announced captures that have not ended.
    #[must_use]
    pub fn captures(&self) -> u64 {
        self.plan.lock().captures
    }

    fn must_not_wait(&self) -> bool {
        let plan = self.plan.lock();
        plan.waits_forbidden && plan.captures > 0 && WAITING.get() == 0
    }

    fn is_watched(&self) -> bool {
        self.only.lock().is_none_or(|thread| thread == std::thread::current().id())
    }

    /// Begins a call; the returned value ends the call.
    fn called(&self, name: &'static str, with: String) -> Result<End<'_>> {
        self.begins(name, with)?;
        Ok(End { driver: self, name })
    }

    fn begins(&self, name: &'static str, with: String) -> Result<()> {
        if !self.is_watched() {
            return Ok(());
        }
        announce(&self.hook, name);
        let mut plan = self.plan.lock();
        plan.calls += 1;
        *plan.by_name.entry(name).or_default() += 1;
        if let Some(log) = &mut plan.log {
            log.push(format!("{name}{with}"));
        }
        if !plan.fail.contains(&plan.calls) && !plan.refused.contains(name) {
            return Ok(());
        }
        *plan.failed.entry(name).or_default() += 1;
        Err(Error::Driver { call: name, code: 999, name: "planted".to_owned() })
    }

    fn touches(&self, name: &'static str, stream: Stream) {
        let mut plan = self.plan.lock();
        if plan.capturing.contains(&stream) {
            plan.broken.push(format!("{name} {stream:?}"));
        }
    }

    fn asks(&self, name: &'static str, event: Event) -> Result<()> {
        let mut plan = self.plan.lock();
        if plan.captured.contains(&event) {
            plan.broken.push(format!("{name} of a captured event"));
            return Err(Error::Driver {
                call: name,
                code: 907,
                name: "CUDA_ERROR_CAPTURED_EVENT".to_owned(),
            });
        }
        Ok(())
    }
}

impl Driver for FaultyDriver {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn version(&self) -> String {
        self.inner.version()
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        self.inner.sharing().map(|_| self as &dyn Sharing)
    }
}

// SAFETY: the inner driver does the work under the callers' contracts.
unsafe impl Sharing for FaultyDriver {
    fn granted(&self) -> Handles {
        Handles::of(&*self.inner)
    }

    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd> {
        let _end = self.called("export", format!(" {page:?}"))?;
        let below = self.inner.sharing().ok_or(Error::Unsupported { device: self.inner.info().ordinal })?;
        // SAFETY: the caller's contract.
        unsafe { below.export(page) }
    }

    fn import(&self, fd: BorrowedFd<'_>, len: u64) -> Result<PageHandle> {
        let _end = self.called("import", format!(" {len}"))?;
        let below = self.inner.sharing().ok_or(Error::Unsupported { device: self.inner.info().ordinal })?;
        below.import(fd, len)
    }
}

// SAFETY: the inner driver does the work under the callers' contracts.
unsafe impl Memory for FaultyDriver {
    fn free_bytes(&self) -> Result<u64> {
        let _end = self.called("free_bytes", String::new())?;
        self.inner.free_bytes()
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        let _end = self.called("reserve", format!(" {len}"))?;
        self.inner.reserve(len)
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        let _end = self.called("free_addresses", format!(" {base:?} {len}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.free_addresses(base, len) }
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        let info = self.inner.info();
        let (requested, total, device) = (len, info.total_bytes, info.ordinal);
        let _end = self.called("create", format!(" {len}")).map_err(|_| Error::OutOfMemory {
            requested,
            free: 0,
            total,
            device,
            space: None,
        })?;
        self.inner.create(len)
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        let _end = self.called("release", format!(" {page:?}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.release(page) }
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        // One fault for each page, and one after the last, where access is set.
        for number in 0..=pages.len() {
            if let Err(error) = self.begins("map", format!(" {at:?} {number} of {}", pages.len())) {
                return Err(NotMapped { error, mapped: 0 });
            }
        }
        let _end = End { driver: self, name: "map" };
        // SAFETY: the caller's contract.
        unsafe { self.inner.map(at, pages, peers) }
    }

    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        let _end = self.called("grant", format!(" {at:?} {len}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.grant(at, len, peers) }
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        let _end = self.called("unmap", format!(" {at:?} {len}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.unmap(at, len) }
    }
}

// SAFETY: as above.
unsafe impl Timeline for FaultyDriver {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        let _end = self.called("stream_state", format!(" {stream:?}"))?;
        if self.plan.lock().capturing.contains(&stream) {
            return Ok(StreamState::Capturing);
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.stream_state(stream) }
    }

    fn other_context(&self) -> Option<u64> {
        self.inner.other_context()
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        self.inner.in_primary(work)
    }

    fn event_create(&self) -> Result<Event> {
        let _end = self.called("event_create", String::new())?;
        self.inner.event_create()
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        let _end = self.called("event_destroy", format!(" {event:?}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_destroy(event) }
    }

    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let _end = self.called("event_record", format!(" {event:?} {stream:?}"))?;
        self.touches("event_record", stream);
        let mut plan = self.plan.lock();
        if plan.capturing.contains(&stream) {
            plan.captured.insert(event)
        } else {
            plan.captured.remove(&event)
        };
        drop(plan);
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_record(event, stream) }
    }

    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        let _end = self.called("event_wait", format!(" {event:?} {stream:?}"))?;
        self.touches("event_wait", stream);
        self.asks("event_wait", event)?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_wait(event, stream) }
    }

    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        let _end = self.called("event_query", format!(" {event:?}"))?;
        self.asks("event_query", event)?;
        if self.must_not_wait() {
            return Ok(false);
        }
        // SAFETY: the caller's contract.
        let happened = unsafe { self.inner.event_query(event) }?;
        let mut plan = self.plan.lock();
        let busy = plan.busy || plan.busy_for > 0;
        plan.busy_for = plan.busy_for.saturating_sub(1);
        Ok(happened && !busy)
    }

    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        self.may_wait()?;
        let _end = self.called("event_synchronize", format!(" {event:?}"))?;
        self.asks("event_synchronize", event)?;
        while self.plan.lock().busy {
            std::thread::yield_now();
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_synchronize(event) }
    }

    fn stream_create(&self) -> Result<Stream> {
        let _end = self.called("stream_create", String::new())?;
        self.inner.stream_create()
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        let _end = self.called("stream_destroy", format!(" {stream:?}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.stream_destroy(stream) }
    }

    fn capture_begins(&self) {
        self.plan.lock().captures += 1;
        self.inner.capture_begins();
    }

    fn capture_ends(&self) {
        self.plan.lock().captures -= 1;
        self.inner.capture_ends();
    }

    fn may_wait(&self) -> Result<()> {
        if self.must_not_wait() {
            return Err(Error::DeviceCapturing { device: self.inner.info().ordinal });
        }
        self.inner.may_wait()
    }

    fn wait_begins(&self) {
        WAITING.set(WAITING.get() + 1);
        self.inner.wait_begins();
    }

    fn wait_ends(&self) {
        WAITING.set(WAITING.get() - 1);
        self.inner.wait_ends();
    }
}

// SAFETY: as above.
unsafe impl Transfer for FaultyDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        let _end = self.called("fill", format!(" {at:?} {len} {value} {stream:?}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.fill(at, len, value, stream) }
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        let _end = self.called("read", format!(" {at:?} {}", into.len()))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.read(at, into) }
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.write(at, from) }
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        let _end = self.called("host_register", format!(" {len}"))?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.host_register(at, len) }
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        let _end = self.called("host_unregister", String::new())?;
        // SAFETY: the caller's contract.
        unsafe { self.inner.host_unregister(at) }
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        let _end = self.called("copy_to_host", format!(" {from:?} {len} {stream:?}"))?;
        self.touches("copy_to_host", stream);
        // SAFETY: the caller's contract.
        unsafe { self.inner.copy_to_host(from, to, len, stream) }
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        let _end = self.called("copy_from_host", format!(" {to:?} {len} {stream:?}"))?;
        self.touches("copy_from_host", stream);
        // SAFETY: the caller's contract.
        unsafe { self.inner.copy_from_host(to, from, len, stream) }
    }
}
