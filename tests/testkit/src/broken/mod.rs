//! Driver with one broken rule of the driver interface: conformance tests must notice.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::Mutex;
use vmmgraph::driver::{
    Capabilities, DeviceInfo, Driver, Graphs, Memory, NotMapped, PageHandle, SharedDriver, Sharing, Whole,
};
use vmmgraph::{Address, Error, Peers, Result, Stream};

mod flaw;
mod graphs;
mod sharing;
mod work;

pub use flaw::Flaw;

#[derive(Debug, Default)]
struct State {
    mapped: BTreeMap<u64, (u64, u64)>,
    /// Pages mapped in place of the requested ones, by address.
    instead: HashMap<u64, PageHandle>,
    /// Mappings kept after their unmap, by address.
    stale: BTreeMap<u64, u64>,
    fresh: HashSet<u64>,
    reservations: Vec<(u64, u64)>,
    leaked: Vec<PageHandle>,
    descriptors: HashMap<u64, Vec<std::fs::File>>,
    registered: Vec<(usize, usize)>,
    recorded: HashSet<u64>,
    capturing: Option<Stream>,
    capture_broken: bool,
    /// Fills of the last captured graph: address, length, value.
    nodes: Vec<(u64, u64, u32)>,
}

/// Passes every call to the inner driver, except for its [`Flaw`].
#[derive(Debug)]
pub struct BrokenDriver {
    inner: SharedDriver,
    other: Option<SharedDriver>,
    flaw: Flaw,
    capabilities: Capabilities,
    opener: ThreadId,
    state: Mutex<State>,
}

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

fn refused(call: &'static str, name: &str) -> Error {
    Error::Driver { call, code: 999, name: name.to_owned() }
}

impl BrokenDriver {
    /// Creates the driver over `inner`. `alias_proven`: the library skips its self-test.
    #[must_use]
    pub fn new(inner: SharedDriver, flaw: Flaw, alias_proven: bool) -> Self {
        let mut capabilities = *inner.capabilities();
        capabilities.alias_proven = alias_proven;
        if flaw == Flaw::GranularityTooSmall {
            capabilities.granularity /= 2;
        }
        let opener = std::thread::current().id();
        Self { inner, other: None, flaw, capabilities, opener, state: Mutex::default() }
    }

    /// Adds a second device, for [`Flaw::WrongDevice`].
    #[must_use]
    pub fn beside(mut self, other: &SharedDriver) -> Self {
        self.other = Some(Arc::clone(other));
        self
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn enter(&self, call: &'static str) -> Result<()> {
        if self.is(Flaw::LeavesThreadState) {
            CURRENT.set(CURRENT.get() + 1);
        }
        if self.is(Flaw::OneThreadOnly) && std::thread::current().id() != self.opener {
            return Err(refused(call, "no context"));
        }
        Ok(())
    }

    /// Returns the simulated current context of the calling thread.
    #[must_use]
    pub fn thread_state() -> u64 {
        CURRENT.get()
    }

    /// Begins a simulated capture: fills on this stream become nodes of a graph.
    pub fn begin_capture(&self, stream: Stream) {
        let mut state = self.state.lock();
        state.capturing = Some(stream);
        state.capture_broken = false;
        state.nodes.clear();
    }

    /// Ends the capture; returns true if the capture is intact.
    pub fn end_capture(&self) -> bool {
        let mut state = self.state.lock();
        state.capturing = None;
        !state.capture_broken
    }

    /// Launches the captured graph.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn launch(&self, stream: Stream) -> Result<()> {
        let nodes = self.state.lock().nodes.clone();
        for (at, len, value) in nodes {
            if !self.is(Flaw::GraphKeepsPage) {
                // SAFETY: the caller keeps the memory of the graph mapped.
                unsafe { self.inner.fill(Address(at), len, value, stream) }?;
            }
        }
        Ok(())
    }

    fn disturbs(&self, flaw: Flaw) {
        let mut state = self.state.lock();
        if self.is(flaw) && state.capturing.is_some() {
            state.capture_broken = true;
        }
    }

    fn typed(&self, error: Error) -> Error {
        if self.is(Flaw::UntypedExhaustion) { refused("exhausted", &error.to_string()) } else { error }
    }
}

impl Driver for BrokenDriver {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        self.inner.version()
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        self.inner.graphs().map(|_| self as &dyn Graphs)
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        self.inner.sharing().map(|_| self as &dyn Sharing)
    }
}

// SAFETY: the inner driver does the work under the callers' contracts; flaws touch only memory of
// this driver.
unsafe impl Memory for BrokenDriver {
    fn free_bytes(&self) -> Result<u64> {
        self.enter("free_bytes")?;
        match self.flaw {
            Flaw::FreeNeverChanges => Ok(self.info().total_bytes / 2),
            Flaw::FreeBeyondTotal => Ok(self.info().total_bytes + 1),
            _ => self.inner.free_bytes(),
        }
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        self.enter("reserve")?;
        if self.is(Flaw::AddressesAsMemory) && len > self.info().total_bytes {
            return Err(refused("reserve", "more than there is memory"));
        }
        let mut state = self.state.lock();
        let same = state.reservations.iter().find(|(_, bytes)| *bytes == len).copied();
        if let (Flaw::OverlappingAddresses, Some((base, _))) = (self.flaw, same) {
            return Ok(Address(base));
        }
        let base = self.inner.reserve(len).map_err(|error| self.typed(error))?.0;
        let base = if self.is(Flaw::Misaligned) { base + 4096 } else { base };
        state.reservations.push((base, len));
        Ok(Address(base))
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        let mut state = self.state.lock();
        let stale: Vec<(u64, u64)> =
            state.stale.range(base.0..base.0 + len).map(|(at, len)| (*at, *len)).collect();
        for (at, bytes) in stale {
            state.stale.remove(&at);
            // SAFETY: one whole mapping, already unmapped for the caller.
            unsafe { self.inner.unmap(Address(at), bytes) }?;
        }
        let before = state.reservations.len();
        state.reservations.retain(|known| *known != (base.0, len));
        if before == state.reservations.len() && self.is(Flaw::OverlappingAddresses) {
            return Ok(());
        }
        let base = if self.is(Flaw::Misaligned) { base.0 - 4096 } else { base.0 };
        // SAFETY: the caller's contract.
        unsafe { self.inner.free_addresses(Address(base), len) }
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        self.enter("create")?;
        if let (Flaw::WrongDevice, Some(other)) = (self.flaw, &self.other) {
            return other.create(len);
        }
        if self.is(Flaw::SmallPagesOnly) && len > 4 * self.capabilities.granularity {
            return Err(refused("create", "too large"));
        }
        let created = self.inner.create(len);
        if self.is(Flaw::ExhaustionLeaks) && created.is_err() {
            let leaked = self.inner.create(64 * self.capabilities.granularity);
            self.state.lock().leaked.extend(leaked);
        }
        let page = created.map_err(|error| self.typed(error))?;
        let mut state = self.state.lock();
        if self.is(Flaw::HiddenDescriptors) {
            let files = [(); 2].iter().filter_map(|()| std::fs::File::open("/dev/null").ok()).collect();
            state.descriptors.insert(page.raw(), files);
        }
        Ok(page)
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        let shown: Vec<(u64, u64)> = {
            let mut state = self.state.lock();
            state.descriptors.remove(&page.raw());
            let here = state.mapped.iter().filter(|(_, (of, _))| *of == page.raw());
            here.map(|(at, (_, len))| (*at, *len)).collect()
        };
        if self.is(Flaw::ReleaseClears)
            && let Some((at, len)) = shown.first()
        {
            // SAFETY: still mapped.
            unsafe { self.inner.write(Address(*at), &vec![0; *len as usize]) }?;
        }
        if let (Flaw::WrongDevice, Some(other)) = (self.flaw, &self.other) {
            // SAFETY: a page of the second device.
            return unsafe { other.release(page) };
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.release(page) }
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let stop = |error| NotMapped { error, mapped: 0 };
        self.enter("map").map_err(stop)?;
        self.disturbs(Flaw::MapBreaksCapture);
        if self.is(Flaw::RefusesPeers) && !peers.is_empty() {
            return Err(stop(refused("map", "no access for peers")));
        }
        let mut wanted = pages.to_vec();
        if self.is(Flaw::MapsBackwards) {
            wanted.reverse();
        }
        let mut state = self.state.lock();
        let inside = |base: &u64, len: &u64, at: u64| *base <= at && at < base + len;
        let reservation = state.reservations.iter().find(|(base, len)| inside(base, len, at.0)).copied();
        if let (Flaw::FirstMappingOnly, Some((base, _))) = (self.flaw, reservation)
            && state.mapped.range(base..at.0).next().is_some()
        {
            return Err(stop(refused("set_access", "invalid value")));
        }
        let mut next = at.0;
        for (whole, asked) in wanted.iter_mut().zip(pages) {
            if state.stale.remove(&next).is_some() {
                state.mapped.insert(next, (asked.page.raw(), asked.bytes));
                return Ok(());
            }
            let elsewhere = state.mapped.values().any(|(page, _)| *page == whole.page.raw());
            if self.is(Flaw::AliasIsAnotherPage) && elsewhere {
                let own = self.inner.create(whole.bytes).map_err(stop)?;
                whole.page = own;
                state.instead.insert(next, own);
            }
            state.mapped.insert(next, (asked.page.raw(), asked.bytes));
            state.fresh.insert(next);
            next += whole.bytes;
        }
        // SAFETY: the caller's contract, or pages of the same lengths.
        let mapped = unsafe { self.inner.map(at, &wanted, peers) };
        if mapped.is_err() {
            state.mapped.retain(|known, _| !(at.0..next).contains(known));
        }
        mapped
    }

    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.grant(at, len, peers) }
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        self.enter("unmap")?;
        let mut state = self.state.lock();
        let mut here: Vec<(u64, u64)> =
            state.mapped.range(at.0..at.0 + len).map(|(at, (_, bytes))| (*at, *bytes)).collect();
        if self.is(Flaw::UnmapsFirstOnly) {
            here.truncate(1);
        }
        for (at, bytes) in here {
            state.mapped.remove(&at);
            state.fresh.remove(&at);
            if self.is(Flaw::StaleMapping) {
                state.stale.insert(at, bytes);
                continue;
            }
            if self.is(Flaw::UnmapClears) {
                // SAFETY: still mapped.
                unsafe { self.inner.write(Address(at), &vec![0; bytes as usize]) }?;
            }
            // SAFETY: one whole mapping in the caller's range.
            unsafe { self.inner.unmap(Address(at), bytes) }?;
            if let Some(own) = state.instead.remove(&at) {
                // SAFETY: created above and no longer mapped.
                unsafe { self.inner.release(own) }?;
            }
        }
        Ok(())
    }
}
