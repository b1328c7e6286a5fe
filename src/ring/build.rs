//! Construction: one address range, in which the units of a slot map the same pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::state::RingState;
use super::{Demand, Pace, Remainder, Ring, RingOptions, RingUnit, Schedule, ceiling, plan};
use crate::device::Device;
use crate::driver::Alias;
use crate::error::{Error, Result};
use crate::pages::{Account, Limits, Owner, Reservation, Transaction};
use crate::sync::Mutex;
use crate::units::{Peers, checked_size};

pub(crate) const SLOTS: usize = 3;
/// For units of different lengths: the default large page of an arena.
const LONGEST: u64 = 16 << 20;
/// Pages of the longest unit at this page size, if the granularity permits.
const PAGES: u64 = 8;

impl Device {
    /// Creates a ring over units in the order of use: `vmmgraph_ring_create`.
    ///
    /// # Errors
    /// Errors of [`Schedule::new`], and of [`ceiling`] with a [pace](RingOptions::pace);
    /// [`Error::InvalidSize`] for an empty or too long unit.
    pub fn ring(self: &Arc<Self>, units: &[RingUnit], options: &RingOptions<'_>) -> Result<Ring> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let capabilities = self.driver().capabilities();
        if capabilities.alias == Alias::None {
            let expected = "on a platform that maps a page at several addresses";
            return Err(Error::InvalidArgument { what: "a ring", value: 0, expected });
        }
        let resident: Vec<bool> = units.iter().map(|unit| unit.resident).collect();
        let slots = if options.slots == 0 { SLOTS } else { options.slots };
        let schedule = Schedule::new(&resident, slots, options.remainder)?;
        let page = page_bytes(self, units, &schedule, options.page_bytes)?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        if let Some(pace) = options.pace {
            say_ceiling(id, units, slots, page, options.remainder, &pace)?;
        }
        let mut offsets = Vec::with_capacity(units.len());
        let mut end = 0_u64;
        for unit in units {
            offsets.push(end);
            end = checked_size("a ring", end + unit.bytes.next_multiple_of(page))?;
        }
        let limits = Limits { most: options.budget_bytes, least: 0 };
        let account = self.account(&format!("ring {id} {:?}", options.name), options.account, limits)?;
        let wanted = Wanted { id, units, page, schedule: &schedule, offsets: &offsets, account: &account };
        let mut memory_retry = self.pool().memory_retry();
        let range = loop {
            match wanted.build(self, end) {
                Err(error) if memory_retry.helps(&error) => {}
                result => break result?,
            }
        };
        for adjustment in schedule.adjustments() {
            tracing::warn!(ring = id, name = options.name, %adjustment, "a ring is not as it was asked for");
        }
        let (places, streamed) = (schedule.places(), schedule.streamed().len());
        let step_bytes: u64 = schedule.streamed().iter().map(|unit| units[*unit].bytes).sum();
        tracing::info!(
            ring = id,
            name = options.name,
            units = units.len(),
            streamed,
            step_bytes,
            places,
            page,
            "ring made"
        );
        self.pool().check();
        if schedule.slots() > 0 {
            self.streaming().fetch_add(1, Ordering::Relaxed);
        }
        let state = Mutex::new(RingState::new(&schedule));
        let (name, across_steps) = (options.name.to_owned(), !options.within_step);
        let (units, device) = (units.to_vec(), Arc::clone(self));
        let range = Some(range);
        Ok(Ring { id, name, schedule, units, page, offsets, across_steps, range, account, state, device })
    }
}

/// Logs the ceiling, one record a line, without the budget: a ring over budget is refused.
fn say_ceiling(
    id: u64,
    units: &[RingUnit],
    slots: usize,
    page: u64,
    remainder: Remainder,
    pace: &Pace,
) -> Result<()> {
    let Pace { link_gib_per_second, compute_seconds, tokens } = *pace;
    let found = ceiling(&Demand {
        units,
        slots,
        remainder,
        page_bytes: page,
        budget_bytes: None,
        link_gib_per_second,
        compute_seconds,
        tokens,
    })?;
    for line in found.to_string().lines() {
        tracing::info!(ring = id, "at best: {}", line.trim());
    }
    Ok(())
}

struct Wanted<'a> {
    id: u64,
    units: &'a [RingUnit],
    page: u64,
    schedule: &'a Schedule,
    offsets: &'a [u64],
    account: &'a Account,
}

impl Wanted<'_> {
    /// Reserves and maps in one transaction.
    fn build(&self, device: &Arc<Device>, bytes: u64) -> Result<Reservation> {
        let mut transaction = Transaction::on(device.pool());
        let range = transaction.reserve(bytes, self.id, Peers::NONE)?;
        let mut places = Vec::new();
        let place_bytes = plan::place_bytes(self.schedule, self.units, self.page);
        transaction.expect_bytes(place_bytes.iter().sum());
        for bytes in place_bytes {
            let mut pages = Vec::new();
            for _ in 0..bytes / self.page {
                pages.push(transaction.take(self.page, Owner::Ring { ring: self.id }, self.account.id())?);
            }
            places.push(pages);
        }
        for (unit, (offset, RingUnit { bytes, .. })) in self.offsets.iter().zip(self.units).enumerate() {
            let count = usize::try_from(bytes.div_ceil(self.page)).unwrap_or(usize::MAX);
            let pages = self.schedule.place_of(unit).and_then(|place| places.get(place)?.get(..count));
            let pages =
                pages.ok_or_else(|| Error::Internal { what: "a ring's unit lacks pages".to_owned() })?;
            transaction.map(range, *offset, pages)?;
        }
        let (_, mut reserved) = transaction.commit();
        reserved.pop().ok_or_else(super::gone)
    }
}

/// The requested page size; else the longest unit, if this costs no more memory. Submitting a copy
/// to a single page takes half the time (docs/performance.md, Rings).
fn page_bytes(device: &Device, units: &[RingUnit], schedule: &Schedule, asked: u64) -> Result<u64> {
    let capabilities = device.driver().capabilities();
    let granularity = capabilities.granularity;
    if !asked.is_multiple_of(granularity) || asked > capabilities.largest_page {
        return Err(Error::InvalidPageSize { what: "ring page", bytes: asked, granularity });
    }
    for RingUnit { bytes, .. } in units {
        checked_size("a ring's unit", *bytes)?;
    }
    if asked > 0 {
        return Ok(asked);
    }
    let longest = units.iter().map(|unit| unit.bytes).max().unwrap_or(0);
    let mut page = granularity;
    while page * 2 <= LONGEST.min(capabilities.largest_page) && page * 2 * PAGES <= longest {
        page *= 2;
    }
    let whole = longest.next_multiple_of(granularity);
    let takes = |page| plan::place_bytes(schedule, units, page).into_iter().fold(0, u64::saturating_add);
    Ok(if whole <= capabilities.largest_page && takes(whole) <= takes(page) { whole } else { page })
}
