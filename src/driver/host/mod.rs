//! Host driver: real aliasing on any Linux machine, without GPU. Streams run their work at once, so
//! every event is reached: tests of `order` check the calls, not the timing.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit};
use rustix::system::{sysinfo, uname};

use super::{
    Alias, Capabilities, DeviceInfo, Driver, Event, Handles, NotMapped, PageHandle, Platform, Sharing,
    StreamState, Timeline, Transfer, Whole,
};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, MAX_BYTES, Peers, Stream};

#[allow(unreachable_pub, reason = "the stand-in libcuda.so compiles the same file as its own module")]
mod memory;
mod sharing;

use memory::{Memory, Refusal};

const DEVICES: i32 = 8;

pub(super) const PLATFORM: Platform = Platform {
    name: "host",
    number: 2,
    count: || Ok(DEVICES),
    open: |ordinal, options| {
        Ok(Arc::new(HostDriver::new(ordinal, options.host)?.with_sharing(options.sharing)))
    },
    abi: super::abi::Abi::default,
};

/// Options of a host device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Mapping granularity in bytes, a power of two, at least 4096; default 2 MiB.
    pub granularity: u64,
    /// Bytes of the device; default: the machine's memory, used only where written.
    pub memory_bytes: u64,
}

impl Default for HostOptions {
    fn default() -> Self {
        let info = sysinfo();
        Self { granularity: 2 << 20, memory_bytes: info.totalram as u64 * u64::from(info.mem_unit) }
    }
}

/// A simulated device in this process's memory.
pub struct HostDriver {
    info: DeviceInfo,
    capabilities: Capabilities,
    sharing: Handles,
    memory: Memory,
    events: Mutex<Events>,
}

#[derive(Default)]
struct Events {
    last: u64,
    live: HashSet<u64>,
    streams: HashSet<u64>,
    registered: BTreeMap<usize, usize>,
}

/// Tests use lower numbers.
const FIRST_STREAM: u64 = 1 << 40;

impl HostDriver {
    /// Opens simulated device `ordinal`.
    ///
    /// # Errors
    /// [`Error::InvalidDevice`] beyond the eighth; [`Error::InvalidPageSize`] and
    /// [`Error::InvalidSize`] for invalid options.
    pub fn new(ordinal: i32, options: HostOptions) -> Result<Self> {
        let HostOptions { granularity, memory_bytes } = options;
        if !(0..DEVICES).contains(&ordinal) {
            return Err(Error::InvalidDevice { driver: PLATFORM.name, ordinal, count: DEVICES });
        }
        if !granularity.is_power_of_two() || !(4096..=1 << 30).contains(&granularity) {
            return Err(Error::InvalidPageSize {
                what: "granularity",
                bytes: granularity,
                granularity: 4096,
            });
        }
        if memory_bytes == 0 || memory_bytes > MAX_BYTES {
            return Err(Error::InvalidSize { what: "host device", bytes: memory_bytes, limit: MAX_BYTES });
        }
        Ok(Self {
            info: DeviceInfo {
                platform: PLATFORM.name,
                ordinal,
                name: format!("host memory {ordinal}"),
                total_bytes: memory_bytes,
                options: Some(options),
            },
            capabilities: Capabilities {
                granularity,
                largest_page: MAX_BYTES,
                largest_reservation: MAX_BYTES,
                alias: Alias::Coherent,
                alias_proven: true,
                map_in_any_order: true,
                map_while_capturing: true,
                replace_under_graph: true,
                unmap_waits: false,
                unmap_each: false,
                descriptors_per_page: 1,
                register_host: true,
                peers: Peers::of_bits((1 << DEVICES) - 1).without(Peers::one(ordinal)),
                restores_no_context: true,
            },
            sharing: Handles::None,
            memory: Memory::new(granularity, memory_bytes),
            events: Mutex::default(),
        })
    }

    /// Pages, reservations, mappings and events not freed.
    #[must_use]
    pub fn leftovers(&self) -> [usize; 4] {
        let left = self.memory.leftovers();
        [left.pages, left.reservations, left.mappings, self.events.lock().live.len()]
    }

    /// Streams and registrations not freed.
    #[must_use]
    pub fn host_leftovers(&self) -> [usize; 2] {
        let events = self.events.lock();
        [events.streams.len(), events.registered.len()]
    }

    /// Peers with access at an address.
    #[must_use]
    pub fn peers_at(&self, at: Address) -> Peers {
        Peers::of_bits(self.memory.granted(at.0))
    }

    fn refused(&self, call: &'static str, requested: u64, refusal: Refusal) -> Error {
        let device = self.info.ordinal;
        let driver = |code, name: &str| Error::Driver { call, code, name: name.to_owned() };
        match refusal {
            Refusal::Invalid(why) => driver(1, why),
            Refusal::NotSupported(why) => driver(801, why),
            Refusal::OutOfMemory => {
                let (free, total) = (self.memory.free(), self.memory.total());
                Error::OutOfMemory { requested, free, total, device, space: None }
            }
            Refusal::OutOfAddresses => Error::OutOfAddresses { requested, device },
            Refusal::OutOfDescriptors => {
                let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
                Error::OutOfDescriptors { requested, limit, device }
            }
        }
    }

    fn known(&self, call: &'static str, event: Event) -> Result<()> {
        if self.events.lock().live.contains(&event.0) {
            Ok(())
        } else {
            Err(self.refused(call, 0, Refusal::Invalid("not an event")))
        }
    }
}

impl HostDriver {
    /// Fails if a copy is only partly inside a registration, or if its stream does not exist.
    fn crosses_no_registration(
        &self,
        call: &'static str,
        start: usize,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        let events = self.events.lock();
        let end = start.saturating_add(len);
        let meets = |(at, bytes): (&usize, &usize)| *at < end && at + bytes > start;
        let inside = |(at, bytes): (&usize, &usize)| *at <= start && end <= at + bytes;
        let crosses = events.registered.iter().any(|found| meets(found) && !inside(found));
        let gone = stream.raw() > FIRST_STREAM && !events.streams.contains(&stream.raw());
        drop(events);
        if crosses || gone {
            let why = if gone { "not a stream" } else { "across the end of a registration" };
            return Err(self.refused(call, len as u64, Refusal::Invalid(why)));
        }
        Ok(())
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostDriver").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Driver for HostDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        let system = uname();
        format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy())
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        (self.sharing != Handles::None).then_some(self as &dyn Sharing)
    }
}

// SAFETY: `Memory` checks every rule of the contract.
unsafe impl super::Memory for HostDriver {
    fn free_bytes(&self) -> Result<u64> {
        Ok(self.memory.free())
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        self.memory.reserve(len).map(Address).map_err(|r| self.refused("reserve", len, r))
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        self.memory.free_addresses(base.0, len).map_err(|r| self.refused("free_addresses", len, r))
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        self.memory.create(len).map(PageHandle).map_err(|r| self.refused("create", len, r))
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        self.memory.release(page.0).map_err(|r| self.refused("release", 0, r))
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let mut end = at.0;
        for (index, Whole { page, bytes }) in pages.iter().enumerate() {
            let mapped = self.memory.map(end, *bytes, 0, page.0).and_then(|()| {
                let access = self.memory.set_access(end, *bytes).and_then(|()| {
                    if peers.is_empty() { Ok(()) } else { self.memory.grant(end, *bytes, peers.bits()) }
                });
                if access.is_err() {
                    let _ = self.memory.unmap(end, *bytes);
                }
                access
            });
            if let Err(refusal) = mapped {
                let error = self.refused("map", *bytes, refusal);
                // SAFETY: mapped above and not used yet.
                let undone = index == 0 || unsafe { self.unmap(at, end - at.0) }.is_ok();
                return Err(NotMapped { error, mapped: if undone { 0 } else { index } });
            }
            end += bytes;
        }
        Ok(())
    }

    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        self.memory.grant(at.0, len, peers.bits()).map_err(|r| self.refused("grant", len, r))
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        self.memory.unmap(at.0, len).map_err(|r| self.refused("unmap", len, r))
    }
}

// SAFETY: events are numbers in a table, and streams are ignored.
unsafe impl Timeline for HostDriver {
    unsafe fn stream_state(&self, _stream: Stream) -> Result<StreamState> {
        Ok(StreamState::Ready)
    }

    fn other_context(&self) -> Option<u64> {
        None
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }

    fn event_create(&self) -> Result<Event> {
        let mut events = self.events.lock();
        events.last += 1;
        let event = events.last;
        events.live.insert(event);
        Ok(Event(event))
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        if self.events.lock().live.remove(&event.0) {
            Ok(())
        } else {
            Err(self.refused("event_destroy", 0, Refusal::Invalid("not an event")))
        }
    }

    unsafe fn event_record(&self, event: Event, _stream: Stream) -> Result<()> {
        self.known("event_record", event)
    }

    unsafe fn event_wait(&self, event: Event, _stream: Stream) -> Result<()> {
        self.known("event_wait", event)
    }

    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        self.known("event_query", event).map(|()| true)
    }

    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        self.known("event_synchronize", event)
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut events = self.events.lock();
        events.last += 1;
        let number = FIRST_STREAM + events.last;
        events.streams.insert(number);
        // SAFETY: a number in a table.
        Ok(unsafe { Stream::from_raw(number) })
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        if self.events.lock().streams.remove(&stream.raw()) {
            Ok(())
        } else {
            Err(self.refused("stream_destroy", 0, Refusal::Invalid("not a stream")))
        }
    }
}

// SAFETY: `Memory` refuses unmapped addresses.
unsafe impl Transfer for HostDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, _stream: Stream) -> Result<()> {
        self.memory.fill(at.0, len, value).map_err(|r| self.refused("fill", len, r))
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        self.memory.read(at.0, into).map_err(|r| self.refused("read", into.len() as u64, r))
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        self.memory.write(at.0, from).map_err(|r| self.refused("write", from.len() as u64, r))
    }
    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        let (start, registered) = (at as usize, &mut self.events.lock().registered);
        let before = registered.range(..start.saturating_add(len)).next_back();
        if len == 0 || before.is_some_and(|(other, bytes)| other + bytes > start) {
            return Err(self.refused("host_register", len as u64, Refusal::Invalid("registered already")));
        }
        registered.insert(start, len);
        Ok(())
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        match self.events.lock().registered.remove(&(at as usize)) {
            Some(_) => Ok(()),
            None => Err(self.refused("host_unregister", 0, Refusal::Invalid("not registered"))),
        }
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        self.crosses_no_registration("copy_to_host", to as usize, len, stream)?;
        // SAFETY: memory of the caller.
        let into = unsafe { std::slice::from_raw_parts_mut(to, len) };
        self.memory.read(from.0, into).map_err(|r| self.refused("copy_to_host", len as u64, r))
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        self.crosses_no_registration("copy_from_host", from as usize, len, stream)?;
        // SAFETY: memory unchanged during the call.
        let bytes = unsafe { std::slice::from_raw_parts(from, len) };
        self.memory.write(to.0, bytes).map_err(|r| self.refused("copy_from_host", len as u64, r))
    }
}
