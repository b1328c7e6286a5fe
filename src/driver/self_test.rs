//! Self-test of a device without verified aliases: writes through one address of a page and reads
//! through another, after mapping and mapping again. Takes milliseconds. Cannot test caches of
//! kernels.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::{Alias, Driver, Event, PageHandle, SharedDriver, Whole};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, Peers, Stream};

const VARIABLE: &str = "VMMGRAPH_SELF_TEST";
const ROUNDS: u32 = 8;

/// `None`: passed.
type Tested = HashMap<(&'static str, i32), Option<Error>>;

/// Runs [`self_test`] once a process for a device without [verified
/// aliases](super::Capabilities::alias_proven), and keeps the result. `VMMGRAPH_SELF_TEST=0`
/// disables the test.
///
/// # Errors
/// As [`self_test`]: [`Error::Incoherent`] is final; after driver errors, the next opening tests
/// again.
pub fn self_test_once(driver: &SharedDriver) -> Result<()> {
    static TESTED: OnceLock<Mutex<Tested>> = OnceLock::new();
    let (info, can) = (driver.info(), driver.capabilities());
    if can.alias_proven || can.alias == Alias::None {
        return Ok(());
    }
    if std::env::var(VARIABLE).is_ok_and(|word| word == "0") {
        tracing::warn!(driver = info.platform, device = info.ordinal, "the self-test is left out");
        return Ok(());
    }
    // Held during the test, so concurrent openings test once.
    let mut tested = TESTED.get_or_init(Mutex::default).lock();
    if let Some(known) = tested.get(&(info.platform, info.ordinal)) {
        return known.clone().map_or(Ok(()), Err);
    }
    let result = self_test(&**driver);
    match &result {
        Ok(()) => tested.insert((info.platform, info.ordinal), None),
        Err(error @ Error::Incoherent { .. }) => {
            tested.insert((info.platform, info.ordinal), Some(error.clone()))
        }
        Err(_) => None,
    };
    result
}

/// Tests aliases and new mappings with two pages of the smallest size.
///
/// # Errors
/// [`Error::Incoherent`] if a read differs from the write; driver errors.
pub fn self_test(driver: &dyn Driver) -> Result<()> {
    let mut ground = Ground {
        driver,
        granule: driver.capabilities().granularity,
        base: None,
        shown: [None; 2],
        pages: Vec::new(),
        stream: None,
        event: None,
        unsettled: false,
        last: 0x1357_9bdf,
    };
    let result = ground.prepare().and_then(|()| ground.aliases()).and_then(|first| ground.mappings(first));
    result.and(ground.give_back())
}

fn prepared<T>(made: Option<T>) -> Result<T> {
    made.ok_or_else(|| Error::Internal { what: "a self-test without its ground".to_owned() })
}

struct Ground<'d> {
    driver: &'d dyn Driver,
    granule: u64,
    base: Option<Address>,
    shown: [Option<PageHandle>; 2],
    pages: Vec<PageHandle>,
    stream: Option<Stream>,
    event: Option<Event>,
    unsettled: bool,
    last: u32,
}

impl Ground<'_> {
    fn prepare(&mut self) -> Result<()> {
        self.base = Some(self.driver.reserve(2 * self.granule)?);
        self.stream = Some(self.driver.stream_create()?);
        self.event = Some(self.driver.event_create()?);
        Ok(())
    }

    fn create(&mut self) -> Result<PageHandle> {
        let page = self.driver.create(self.granule)?;
        self.pages.push(page);
        Ok(page)
    }

    fn at(&self, place: usize) -> Result<Address> {
        Ok(prepared(self.base)?.plus(place as u64 * self.granule))
    }

    fn show(&mut self, place: usize, page: PageHandle) -> Result<()> {
        let whole = Whole { page, bytes: self.granule };
        // SAFETY: a free place of our reservation, and a live page.
        let mapped = unsafe { self.driver.map(self.at(place)?, &[whole], Peers::NONE) };
        if let Err(stopped) = mapped {
            self.shown[place] = (stopped.mapped > 0).then_some(page);
            return Err(stopped.error);
        }
        self.shown[place] = Some(page);
        Ok(())
    }

    fn hide(&mut self, place: usize) -> Result<()> {
        // SAFETY: one whole mapping, without pending work.
        unsafe { self.driver.unmap(self.at(place)?, self.granule) }?;
        self.shown[place] = None;
        Ok(())
    }

    fn write(&mut self, place: usize) -> Result<Vec<u8>> {
        let mut word = self.last;
        let mut bytes = Vec::with_capacity(self.granule as usize);
        for _ in 0..self.granule / 4 {
            word = word.wrapping_mul(0x9e37_79b1).wrapping_add(0x7f4a_7c15);
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        self.last = word;
        // SAFETY: mapped, and ours.
        unsafe { self.driver.write(self.at(place)?, &bytes) }?;
        Ok(bytes)
    }

    /// Equal bytes, as every platform can fill.
    fn fill(&mut self, place: usize, byte: u8) -> Result<Vec<u8>> {
        let (at, stream, event) = (self.at(place)?, prepared(self.stream)?, prepared(self.event)?);
        self.unsettled = true;
        // SAFETY: mapped, and ours; our own stream and event.
        unsafe {
            self.driver.fill(at, self.granule, u32::from_ne_bytes([byte; 4]), stream)?;
            self.driver.event_record(event, stream)?;
            self.driver.event_synchronize(event)?;
        }
        self.unsettled = false;
        Ok(vec![byte; self.granule as usize])
    }

    fn expect(&self, place: usize, expected: &[u8], tried: &str) -> Result<()> {
        let mut found = vec![0xee; expected.len()];
        // SAFETY: mapped memory.
        unsafe { self.driver.read(self.at(place)?, &mut found) }?;
        if found == expected {
            return Ok(());
        }
        let wrong = expected.iter().zip(&found).filter(|(expected, found)| expected != found).count();
        let info = self.driver.info();
        Err(Error::Incoherent {
            platform: info.platform,
            device: info.ordinal,
            version: self.driver.version(),
            found: format!("{tried}: {wrong} of {} bytes are wrong", expected.len()),
        })
    }

    fn aliases(&mut self) -> Result<PageHandle> {
        let page = self.create()?;
        self.show(0, page)?;
        self.show(1, page)?;
        for (from, to) in [(0, 1), (1, 0)] {
            let copied = self.write(from)?;
            self.expect(to, &copied, "a copy through one address of a page, read through another")?;
            let filled = self.fill(from, 0x3c + from as u8)?;
            self.expect(to, &filled, "a fill through one address of a page, read through another")?;
        }
        Ok(page)
    }

    fn mappings(&mut self, first: PageHandle) -> Result<()> {
        let kept = self.write(0)?;
        let second = self.create()?;
        let mut theirs = Vec::new();
        for round in 0..ROUNDS {
            self.hide(1)?;
            self.show(1, second)?;
            if round == 0 {
                let filled = self.fill(1, 0x69)?;
                self.expect(1, &filled, "a new page, filled and read as soon as it is mapped")?;
            } else {
                self.expect(1, &theirs, "a page that was unmapped and mapped again")?;
            }
            theirs = self.write(1)?;
            self.expect(1, &theirs, "a page that is written and read as soon as it is mapped")?;
            self.expect(0, &kept, "a page at another address, after one that took its place was written")?;
            self.hide(1)?;
            self.show(1, first)?;
            self.expect(1, &kept, "a page that came back to an address, read at once")?;
        }
        self.hide(0)?;
        self.show(0, second)?;
        self.expect(0, &theirs, "a page that moved to another address")
    }

    /// Repeats each refused call once.
    fn give_back(&mut self) -> Result<()> {
        let driver = self.driver;
        let twice = |call: &mut dyn FnMut() -> Result<()>| call().or_else(|_| call());
        let mut result = Ok(());
        if let (true, Some(stream), Some(event)) = (self.unsettled, self.stream, self.event) {
            // SAFETY: our own stream and event.
            result = result.and(twice(&mut || unsafe {
                driver.event_record(event, stream)?;
                driver.event_synchronize(event)
            }));
        }
        for place in 0..2 {
            if self.shown[place].is_some() {
                result = result.and(twice(&mut || self.hide(place)));
            }
        }
        for page in self.pages.drain(..) {
            // SAFETY: our page, released once: a refused call has no effect.
            result = result.and(twice(&mut || unsafe { driver.release(page) }));
        }
        if let Some(base) = self.base.take() {
            // SAFETY: our reservation; refused with mappings.
            result = result.and(twice(&mut || unsafe { driver.free_addresses(base, 2 * self.granule) }));
        }
        if let Some(event) = self.event.take() {
            // SAFETY: our event, destroyed once.
            result = result.and(twice(&mut || unsafe { driver.event_destroy(event) }));
        }
        if let Some(stream) = self.stream.take() {
            // SAFETY: our stream, destroyed once.
            result = result.and(twice(&mut || unsafe { driver.stream_destroy(stream) }));
        }
        result
    }
}
