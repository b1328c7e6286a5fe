//! A driver that counts its calls and fails the ones it is told to.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use vmmgraph::driver::{DeviceInfo, Driver, Event, PageHandle, SharedDriver};
use vmmgraph::{Address, Error, Result, Stream};

#[derive(Debug, Default)]
struct Plan {
    calls: u64,
    by_name: BTreeMap<&'static str, u64>,
    /// Functions of which a call was made to fail, and how often.
    failed: BTreeMap<&'static str, u64>,
    /// Call numbers, counted from 1 since the last `arm`, that fail.
    fail: Vec<u64>,
    log: Option<Vec<String>>,
}

/// Passes everything on to another driver, except the calls that are to fail.
#[derive(Debug)]
pub struct FaultyDriver {
    inner: SharedDriver,
    plan: Mutex<Plan>,
}

impl FaultyDriver {
    /// Fails nothing yet.
    #[must_use]
    pub fn new(inner: SharedDriver) -> Arc<Self> {
        Arc::new(Self { inner, plan: Mutex::default() })
    }

    /// From now on the calls with these numbers fail, the next call being number 1; none: nothing fails.
    pub fn arm(&self, fail: &[u64]) {
        let mut plan = self.plan.lock();
        plan.calls = 0;
        plan.fail = fail.to_vec();
    }

    /// Calls since the last [`arm`](Self::arm).
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.plan.lock().calls
    }

    /// Calls of one function since the driver was made.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        self.plan.lock().by_name.get(name).copied().unwrap_or(0)
    }

    /// The functions of which a call was made to fail, and how often, since the driver was made.
    #[must_use]
    pub fn failed(&self) -> BTreeMap<&'static str, u64> {
        self.plan.lock().failed.clone()
    }

    /// Starts to write down what is called with what.
    pub fn start_log(&self) {
        self.plan.lock().log = Some(Vec::new());
    }

    /// What was written down since the last look.
    #[must_use]
    pub fn take_log(&self) -> Vec<String> {
        self.plan.lock().log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn called(&self, name: &'static str, with: String) -> Result<()> {
        let mut plan = self.plan.lock();
        plan.calls += 1;
        *plan.by_name.entry(name).or_default() += 1;
        if let Some(log) = &mut plan.log {
            log.push(format!("{name}{with}"));
        }
        if !plan.fail.contains(&plan.calls) {
            return Ok(());
        }
        *plan.failed.entry(name).or_default() += 1;
        let info = self.inner.info();
        Err(if name == "create" {
            Error::OutOfMemory { requested: 0, free: 0, total: info.total_bytes, device: info.ordinal }
        } else {
            Error::Driver { call: name, code: 999, name: "planted".to_owned() }
        })
    }
}

macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $name(&self, $($arg: $type),*) -> $result {
            #[allow(unused_mut, reason = "functions without arguments add nothing")]
            let mut with = String::new();
            $(with += &format!(" {:?}", $arg);)*
            self.called(stringify!($name), with)?;
            self.inner.$name($($arg),*)
        }
    )*};
}

impl Driver for FaultyDriver {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    forward! {
        free_bytes() -> Result<u64>;
        reserve(len: u64) -> Result<Address>;
        free_addresses(base: Address, len: u64) -> Result<()>;
        create(len: u64) -> Result<PageHandle>;
        release(page: PageHandle) -> Result<()>;
        map(at: Address, len: u64, page: PageHandle) -> Result<()>;
        set_access(at: Address, len: u64) -> Result<()>;
        unmap(at: Address, len: u64) -> Result<()>;
        event_create() -> Result<Event>;
        event_destroy(event: Event) -> Result<()>;
        event_record(event: Event, stream: Stream) -> Result<()>;
        event_wait(event: Event, stream: Stream) -> Result<()>;
        event_synchronize(event: Event) -> Result<()>;
        is_capturing(stream: Stream) -> Result<bool>;
        synchronize() -> Result<()>;
        fill(at: Address, len: u64, value: u32, stream: Stream) -> Result<()>;
    }

    fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        self.called("read", format!(" {at:?} {}", into.len()))?;
        self.inner.read(at, into)
    }

    fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        self.inner.write(at, from)
    }
}
