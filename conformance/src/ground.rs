//! Driver objects of a case, released even if the case fails.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use vmmgraph::driver::{Driver, Event, PageHandle, Whole};
use vmmgraph::{Address, Peers, Result, Stream};

use crate::{Stop, Verdict};

/// Driver objects of one case. Lengths are in granules.
pub(crate) struct Ground<'d> {
    pub(crate) driver: &'d dyn Driver,
    /// Bytes of a granule.
    pub(crate) granule: u64,
    reservations: RefCell<BTreeMap<Address, u64>>,
    pages: RefCell<Vec<PageHandle>>,
    mapped: RefCell<BTreeMap<Address, u64>>,
    streams: RefCell<Vec<Stream>>,
    events: RefCell<Vec<Event>>,
    last: Cell<u32>,
}

impl<'d> Ground<'d> {
    pub(crate) fn new(driver: &'d dyn Driver) -> Self {
        Self {
            driver,
            granule: driver.capabilities().granularity,
            reservations: RefCell::default(),
            pages: RefCell::default(),
            mapped: RefCell::default(),
            streams: RefCell::default(),
            events: RefCell::default(),
            last: Cell::new(0x2545_f491),
        }
    }

    pub(crate) fn reserve(&self, granules: u64) -> Result<Address> {
        self.reserve_bytes(granules * self.granule)
    }

    pub(crate) fn reserve_bytes(&self, len: u64) -> Result<Address> {
        let base = self.driver.reserve(len)?;
        self.reservations.borrow_mut().insert(base, len);
        Ok(base)
    }

    pub(crate) fn free(&self, base: Address) -> Result<()> {
        let Some(len) = self.reservations.borrow_mut().remove(&base) else { return Ok(()) };
        // SAFETY: a reservation of this case, without mappings.
        unsafe { self.driver.free_addresses(base, len) }
    }

    pub(crate) fn create(&self, granules: u64) -> Result<Whole> {
        self.create_bytes(granules * self.granule)
    }

    pub(crate) fn create_bytes(&self, bytes: u64) -> Result<Whole> {
        let page = self.driver.create(bytes)?;
        self.pages.borrow_mut().push(page);
        Ok(Whole { page, bytes })
    }

    pub(crate) fn adopt(&self, whole: Whole) -> Whole {
        self.pages.borrow_mut().push(whole.page);
        whole
    }

    pub(crate) fn release(&self, whole: Whole) -> Result<()> {
        self.pages.borrow_mut().retain(|page| *page != whole.page);
        // SAFETY: a page of this case, released once.
        unsafe { self.driver.release(whole.page) }
    }

    pub(crate) fn map(&self, at: Address, pages: &[Whole]) -> Verdict {
        self.map_for(at, pages, Peers::NONE)
    }

    pub(crate) fn map_for(&self, at: Address, pages: &[Whole], peers: Peers) -> Verdict {
        // SAFETY: every case maps its own pages at free places in its own reservations.
        let result = unsafe { self.driver.map(at, pages, peers) };
        let count = result.as_ref().map_or_else(|stopped| stopped.mapped, |()| pages.len());
        let mut next = at;
        for whole in &pages[..count] {
            self.mapped.borrow_mut().insert(next, whole.bytes);
            next = next.plus(whole.bytes);
        }
        result.map_err(|stopped| Stop::Failed(format!("map: {}", stopped.error)))
    }

    pub(crate) fn unmap(&self, at: Address, granules: u64) -> Result<()> {
        let len = granules * self.granule;
        let each: Vec<(Address, u64)> = if self.driver.capabilities().unmap_each {
            self.mapped.borrow().range(at..at.plus(len)).map(|(at, len)| (*at, *len)).collect()
        } else {
            vec![(at, len)]
        };
        for (at, len) in each {
            // SAFETY: whole mappings of this case, unused by running work; a single mapping if
            // `unmap_each`.
            unsafe { self.driver.unmap(at, len) }?;
            self.mapped.borrow_mut().retain(|start, _| *start < at || start.0 >= at.0 + len);
        }
        Ok(())
    }

    /// Forgets a mapping unmapped elsewhere.
    pub(crate) fn gone(&self, at: Address) {
        self.mapped.borrow_mut().remove(&at);
    }

    pub(crate) fn single_pages(&self, granules: u64) -> Result<(Address, Vec<Whole>), Stop> {
        let base = self.reserve(granules)?;
        let mut pages = Vec::new();
        for _ in 0..granules {
            pages.push(self.create(1)?);
        }
        self.map(base, &pages)?;
        Ok((base, pages))
    }

    pub(crate) fn stream(&self) -> Result<Stream> {
        let stream = self.driver.stream_create()?;
        self.streams.borrow_mut().push(stream);
        Ok(stream)
    }

    pub(crate) fn destroy_stream(&self, stream: Stream) -> Result<()> {
        self.streams.borrow_mut().retain(|known| *known != stream);
        // SAFETY: a stream of this case, destroyed once.
        unsafe { self.driver.stream_destroy(stream) }
    }

    pub(crate) fn event(&self) -> Result<Event> {
        let event = self.driver.event_create()?;
        self.events.borrow_mut().push(event);
        Ok(event)
    }

    pub(crate) fn destroy_event(&self, event: Event) -> Result<()> {
        self.events.borrow_mut().retain(|known| *known != event);
        // SAFETY: an event of this case, destroyed once.
        unsafe { self.driver.event_destroy(event) }
    }

    pub(crate) fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: both are live, and no case records in a stream under its own capture.
        unsafe { self.driver.event_record(event, stream) }
    }

    pub(crate) fn wait(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.event_wait(event, stream) }
    }

    pub(crate) fn happened(&self, event: Event) -> Result<bool> {
        // SAFETY: a live event.
        unsafe { self.driver.event_query(event) }
    }

    pub(crate) fn synchronise(&self, event: Event) -> Result<()> {
        // SAFETY: a live event.
        unsafe { self.driver.event_synchronize(event) }
    }

    /// Waits for all work on a stream.
    pub(crate) fn settle(&self, stream: Stream) -> Result<()> {
        let event = self.event()?;
        self.record(event, stream)?;
        self.synchronise(event)?;
        self.destroy_event(event)
    }

    pub(crate) fn fill(&self, at: Address, len: u64, byte: u8, stream: Stream) -> Result<()> {
        self.fill_words(at, len, u32::from_ne_bytes([byte; 4]), stream)
    }

    pub(crate) fn fill_words(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        // SAFETY: mapped memory and a stream of this case.
        unsafe { self.driver.fill(at, len, value, stream) }
    }

    pub(crate) fn write(&self, at: Address, bytes: &[u8]) -> Result<()> {
        // SAFETY: mapped memory of this case.
        unsafe { self.driver.write(at, bytes) }
    }

    pub(crate) fn read(&self, at: Address, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0xee; len as usize];
        // SAFETY: mapped memory of this case.
        unsafe { self.driver.read(at, &mut bytes) }?;
        Ok(bytes)
    }

    pub(crate) fn copy_to_host(&self, from: Address, to: &mut [u8], stream: Stream) -> Result<()> {
        // SAFETY: mapped memory of this case; every case waits for its copies before using or
        // freeing the bytes.
        unsafe { self.driver.copy_to_host(from, to.as_mut_ptr(), to.len(), stream) }
    }

    pub(crate) fn copy_from_host(&self, to: Address, from: &[u8], stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.copy_from_host(to, from.as_ptr(), from.len(), stream) }
    }

    pub(crate) fn noise(&self, len: u64) -> Vec<u8> {
        let mut word = self.last.get();
        let mut bytes = Vec::with_capacity(len as usize + 3);
        while bytes.len() < len as usize {
            word = word.wrapping_mul(0x9e37_79b1).wrapping_add(0x7f4a_7c15);
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        self.last.set(word);
        bytes.truncate(len as usize);
        bytes
    }

    pub(crate) fn expect(&self, at: Address, bytes: &[u8], what: &str) -> Verdict {
        same(&self.read(at, bytes.len() as u64)?, bytes, what)
    }

    /// Releases all remaining objects; returns the first error.
    pub(crate) fn give_back(&self) -> Result<()> {
        let mut result = Ok(());
        let (streams, mapped) = (self.streams.borrow().clone(), self.mapped.borrow().clone());
        for stream in &streams {
            result = result.and(self.settle(*stream));
        }
        for (at, len) in mapped {
            result = result.and(self.unmap(at, len / self.granule));
        }
        let pages = self.pages.borrow().clone();
        for page in pages {
            result = result.and(self.release(Whole { page, bytes: 0 }));
        }
        let bases: Vec<Address> = self.reservations.borrow().keys().copied().collect();
        for base in bases {
            result = result.and(self.free(base));
        }
        let events = self.events.borrow().clone();
        for event in events {
            result = result.and(self.destroy_event(event));
        }
        for stream in streams {
            result = result.and(self.destroy_stream(stream));
        }
        result
    }
}

impl Drop for Ground<'_> {
    fn drop(&mut self) {
        // After early returns; the case has already failed with the driver's error.
        let _ = self.give_back();
    }
}

pub(crate) fn same(found: &[u8], expected: &[u8], what: &str) -> Verdict {
    ensure(found == expected, || {
        let wrong = found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
        format!("{what}: {wrong} of {} bytes are wrong", expected.len())
    })
}

pub(crate) fn ensure(holds: bool, wrong: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(Stop::Failed(wrong())) }
}
