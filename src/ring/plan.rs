//! Upper bound of a ring's speed, before a ring is built.

use std::fmt;

use super::schedule::{Adjustment, Remainder, Schedule, spread};
use crate::error::{Error, Result};
use crate::units::{MAX_BYTES, checked_size};

const MIB: f64 = (1_u64 << 20) as f64;
const GIB: f64 = (1_u64 << 30) as f64;
/// Each row needs a schedule.
const ROWS: usize = 256;

/// Data read by a step, mostly one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingUnit {
    /// Size in bytes.
    pub bytes: u64,
    /// Stays on the device: copied once, and again after a change of its source.
    pub resident: bool,
}

impl RingUnit {
    /// Creates a streaming unit.
    #[must_use]
    pub const fn streamed(bytes: u64) -> Self {
        Self { bytes, resident: false }
    }

    /// Creates a resident unit.
    #[must_use]
    pub const fn resident(bytes: u64) -> Self {
        Self { bytes, resident: true }
    }
}

/// Work of a step and available resources.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// Units in the order of use.
    pub units: &'a [RingUnit],
    /// Slots asked for.
    pub slots: usize,
    /// Handling of streaming units which the slots do not divide.
    pub remainder: Remainder,
    /// Bytes of a page: places are whole pages. 1: no rounding.
    pub page_bytes: u64,
    /// Limit of device memory for slots and resident units.
    pub budget_bytes: Option<u64>,
    /// GiB a second from pinned host memory.
    pub link_gib_per_second: f64,
    /// Seconds of a step with all units resident.
    pub compute_seconds: f64,
    /// Tokens of a step, over all sequences.
    pub tokens: u64,
}

/// Bottleneck of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The copies take longer.
    Link,
    /// The work takes longer: streaming is free.
    Compute,
}

/// Best case of a step at one number of resident units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residency {
    /// Resident units.
    pub resident: usize,
    /// Bytes of slots and resident units.
    pub device_bytes: u64,
    /// Bytes over the link in a step.
    pub link_bytes: u64,
    /// Minimum seconds of a step.
    pub step_seconds: f64,
    /// Maximum tokens a second.
    pub tokens_per_second: f64,
    /// Bottleneck.
    pub bound: Bound,
}

/// Upper bound: no arrangement of copies is faster. Measure the real ring.
#[derive(Clone, Debug, PartialEq)]
pub struct Ceiling {
    /// Streaming units and slots.
    pub schedule: Schedule,
    /// Best case of this schedule.
    pub asked: Residency,
    /// Seconds of the copies alone, at the link's speed.
    pub link_seconds: f64,
    /// Seconds of the work alone.
    pub compute_seconds: f64,
    /// Gain of more resident units within the budget: one more unit for each slot a row, at most
    /// about 256 rows.
    pub residency: Vec<Residency>,
    /// Differences from the request.
    pub adjustments: Vec<Adjustment>,
    /// Bytes of device memory with all units resident.
    pub all_resident_bytes: u64,
}

/// Computes the upper bound: `vmmgraph_ring_ceiling_text`.
pub fn ceiling(demand: &Demand<'_>) -> Result<Ceiling> {
    check(demand)?;
    let resident: Vec<bool> = demand.units.iter().map(|unit| unit.resident).collect();
    let limit = demand.budget_bytes.unwrap_or(u64::MAX);
    Schedule::new(&resident, demand.slots, demand.remainder)?;
    let mut slots = demand.slots.min(most_slots(demand, limit));
    let schedule = loop {
        let schedule = Schedule::new(&resident, slots, demand.remainder);
        let bytes = schedule.as_ref().map(|schedule| device_bytes(schedule, demand)).unwrap_or(0);
        match schedule {
            Ok(schedule) if bytes <= limit => break schedule,
            // Fewer slots may fit, or leave a smaller remainder.
            _ if slots > 1 => slots -= 1,
            Ok(_) => {
                return Err(Error::InvalidSize { what: "a ring's slots and resident units", bytes, limit });
            }
            Err(error) => return Err(error),
        }
    };
    let mut adjustments = Vec::new();
    if slots < demand.slots {
        // One adjustment for the reduction by the budget.
        let given = if schedule.slots() == 0 { slots } else { schedule.slots() };
        adjustments.push(Adjustment::FewerSlots { asked: demand.slots, given });
    }
    let own = schedule.adjustments().iter();
    let again = |one: &&Adjustment| slots < demand.slots && matches!(one, Adjustment::FewerSlots { .. });
    adjustments.extend(own.filter(|one| !again(one)).cloned());
    let asked = residency_of(&schedule, demand);
    let residency = more_resident(&schedule, demand).into_iter().filter(|row| row.device_bytes <= limit);
    Ok(Ceiling {
        asked,
        link_seconds: asked.link_bytes as f64 / (demand.link_gib_per_second * GIB),
        compute_seconds: demand.compute_seconds,
        residency: residency.collect(),
        adjustments,
        all_resident_bytes: demand.units.iter().map(|unit| paged(unit.bytes, demand)).sum(),
        schedule,
    })
}

impl Ceiling {
    /// Returns the smallest residency that hides the link, if any.
    #[must_use]
    pub fn link_hidden_from(&self) -> Option<&Residency> {
        std::iter::once(&self.asked).chain(&self.residency).find(|row| row.bound == Bound::Compute)
    }
}

fn check(demand: &Demand<'_>) -> Result<()> {
    let wrong = |what, value: i128, expected| Err(Error::InvalidArgument { what, value, expected });
    for unit in demand.units {
        checked_size("a ring's unit", unit.bytes)?;
    }
    let link = demand.link_gib_per_second;
    if !link.is_finite() || link <= 0.0 {
        return wrong("GiB a second of the link", link as i128, "a number above 0");
    }
    if !demand.compute_seconds.is_finite() || demand.compute_seconds < 0.0 {
        return wrong("seconds of a step's work", demand.compute_seconds as i128, "a number from 0 on");
    }
    if demand.tokens == 0 {
        return wrong("the tokens of a step", 0, "at least 1");
    }
    checked_size("a ring's page", demand.page_bytes)?;
    let sum = demand.units.iter().try_fold(0_u64, |sum, unit| sum.checked_add(paged(unit.bytes, demand)));
    if sum.is_none_or(|sum| sum > MAX_BYTES) {
        return wrong("the bytes of all units", sum.unwrap_or(u64::MAX).into(), "at most 2^46");
    }
    Ok(())
}

/// Counts the shortest units, although a slot is as long as its longest.
fn most_slots(demand: &Demand<'_>, limit: u64) -> usize {
    let mut bytes = 0;
    let mut lengths = Vec::with_capacity(demand.units.len());
    for unit in demand.units {
        let length = paged(unit.bytes, demand);
        if unit.resident { bytes += length } else { lengths.push(length) }
    }
    lengths.sort_unstable();
    let fitting = lengths.iter().take_while(|length| {
        bytes = bytes.saturating_add(**length);
        bytes <= limit
    });
    let fitting = fitting.count();
    // Without streaming units, the resident units may exceed the limit.
    if fitting == lengths.len() && bytes <= limit { usize::MAX } else { fitting.max(1) }
}

fn paged(bytes: u64, demand: &Demand<'_>) -> u64 {
    bytes.next_multiple_of(demand.page_bytes)
}

pub(super) fn place_bytes(schedule: &Schedule, units: &[RingUnit], page: u64) -> Vec<u64> {
    let mut places = vec![0; schedule.places()];
    for (unit, RingUnit { bytes, .. }) in units.iter().enumerate() {
        if let Some(bytes_of) = schedule.place_of(unit).and_then(|place| places.get_mut(place)) {
            *bytes_of = (*bytes_of).max(bytes.next_multiple_of(page));
        }
    }
    places
}

fn device_bytes(schedule: &Schedule, demand: &Demand<'_>) -> u64 {
    place_bytes(schedule, demand.units, demand.page_bytes).iter().sum()
}

fn residency_of(schedule: &Schedule, demand: &Demand<'_>) -> Residency {
    let link_bytes = schedule.streamed().iter().map(|unit| demand.units[*unit].bytes).sum::<u64>();
    let link = link_bytes as f64 / (demand.link_gib_per_second * GIB);
    let step_seconds = link.max(demand.compute_seconds);
    Residency {
        resident: schedule.residents().len(),
        device_bytes: device_bytes(schedule, demand),
        link_bytes,
        step_seconds,
        tokens_per_second: if step_seconds > 0.0 {
            demand.tokens as f64 / step_seconds
        } else {
            f64::INFINITY
        },
        bound: if link > demand.compute_seconds { Bound::Link } else { Bound::Compute },
    }
}

/// Adds resident units, one for each slot a row, evenly spread, until no unit streams.
fn more_resident(schedule: &Schedule, demand: &Demand<'_>) -> Vec<Residency> {
    let slots = schedule.slots();
    let mut rows = Vec::new();
    let most = schedule.streamed().len().checked_div(slots).unwrap_or(0);
    let stride = most.div_ceil(ROWS).max(1);
    // The last row is always all units.
    for times in (1..=most).filter(|times| (most - times).is_multiple_of(stride)) {
        let mut streams = vec![false; schedule.units()];
        schedule.streamed().iter().for_each(|unit| streams[*unit] = true);
        spread(&streams, times * slots).into_iter().for_each(|unit| streams[unit] = false);
        let resident: Vec<bool> = streams.iter().map(|streams| !streams).collect();
        // A single unit for each slot would make all units resident.
        if let Ok(next) = Schedule::new(&resident, slots, Remainder::Refuse) {
            let row = residency_of(&next, demand);
            if rows.last() != Some(&row) {
                rows.push(row);
            }
        }
    }
    rows
}

impl fmt::Display for Ceiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, row: &Residency| {
            writeln!(
                f,
                "{:>5} resident: {:>10.1} MiB on the device, {:>10.1} MiB a step, {:>9.2} ms, {:>9.2} tokens/s at best, bound by the {}",
                row.resident,
                row.device_bytes as f64 / MIB,
                row.link_bytes as f64 / MIB,
                row.step_seconds * 1e3,
                row.tokens_per_second,
                if row.bound == Bound::Link { "link" } else { "work" },
            )
        };
        let (streamed, slots) = (self.schedule.streamed().len(), self.schedule.slots());
        writeln!(
            f,
            "{streamed} of {} units stream through {slots} slots: link alone {:.2} ms, work alone {:.2} ms; {:.1} MiB if all were resident",
            self.schedule.units(),
            self.link_seconds * 1e3,
            self.compute_seconds * 1e3,
            self.all_resident_bytes as f64 / MIB
        )?;
        for adjustment in &self.adjustments {
            writeln!(f, "  not as asked: {adjustment}")?;
        }
        line(f, &self.asked)?;
        self.residency.iter().try_for_each(|row| line(f, row))?;
        match self.link_hidden_from() {
            Some(row) if row.resident == self.asked.resident => writeln!(f, "the work hides the link"),
            Some(row) => writeln!(f, "the work hides the link from {} resident units on", row.resident),
            None => writeln!(f, "no residency within the budget hides the link"),
        }
    }
}

impl fmt::Display for Adjustment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FewerSlots { asked, given } => write!(f, "{given} slots instead of {asked}"),
            Self::KeptResident { units } => {
                write!(f, "units {units:?} stay resident, since the slots do not divide those that stream")
            }
            Self::NothingStreams { units, slots } => {
                write!(f, "nothing streams: {slots} slots hold all {units} units that were to")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: u64 = 128 << 20;

    /// Reference case: 36 layers of a context of 32K, batch 1.
    fn demand(units: &[RingUnit]) -> Demand<'_> {
        Demand {
            units,
            slots: 3,
            remainder: Remainder::KeepResident,
            page_bytes: 2 << 20,
            budget_bytes: None,
            link_gib_per_second: 51.5,
            compute_seconds: 5.4e-3,
            tokens: 1,
        }
    }

    #[test]
    fn resident_units_over_the_budget_are_refused_at_once_however_many_slots_are_asked_for() {
        let units = [RingUnit { resident: true, ..RingUnit::streamed(LAYER) }; 6];
        let found = ceiling(&Demand { slots: usize::MAX, budget_bytes: Some(LAYER), ..demand(&units) });
        assert!(matches!(found, Err(Error::InvalidSize { .. })), "{found:?}");
    }

    #[test]
    fn the_link_bounds_a_long_context_and_batches_share_it() {
        let units = [RingUnit::streamed(LAYER); 36];
        let found = ceiling(&demand(&units)).unwrap();
        assert_eq!((found.asked.link_bytes, found.asked.bound), (36 * LAYER, Bound::Link));
        assert!((found.asked.step_seconds * 1e3 - 87.4).abs() < 0.1, "{found}");
        assert!((found.asked.tokens_per_second - 11.4).abs() < 0.1, "{found}");
        assert_eq!((found.asked.device_bytes, found.all_resident_bytes), (3 * LAYER, 36 * LAYER));
        assert_eq!(found.adjustments, []);
        // The last row has all units and is bound by the work.
        let rows = &found.residency;
        assert_eq!(rows.len(), 11, "{found}");
        assert!(rows.windows(2).all(|pair| pair[0].link_bytes > pair[1].link_bytes), "{found}");
        assert!(rows.windows(2).all(|pair| pair[0].tokens_per_second <= pair[1].tokens_per_second));
        let last = rows.last().unwrap();
        assert_eq!((last.resident, last.link_bytes, last.device_bytes), (36, 0, 36 * LAYER));
        assert_eq!(last.bound, Bound::Compute);
        // 5.4 ms hide two layers, but rows have steps of three: so only the row with all.
        assert_eq!(found.link_hidden_from().map(|row| row.resident), Some(36));
        let text = found.to_string();
        assert!(text.ends_with("the work hides the link from 36 resident units on\n"), "{text}");
        assert_eq!(text.lines().count(), 1 + 12 + 1, "{text}");
        assert!(
            text.lines().next().is_some_and(|line| line.ends_with("4608.0 MiB if all were resident")),
            "{text}"
        );
        let short = [RingUnit::streamed(4 << 20); 36];
        let found = ceiling(&demand(&short)).unwrap();
        assert_eq!(
            (found.asked.bound, found.link_hidden_from().map(|row| row.resident)),
            (Bound::Compute, Some(0))
        );
        assert_eq!(found.asked.step_seconds, 5.4e-3);
        assert!(found.to_string().ends_with("\nthe work hides the link\n"), "{found}");
    }

    #[test]
    fn any_number_of_units_has_few_rows_and_the_last_is_all_of_them() {
        for count in [256, 257, 5_000] {
            let units = vec![RingUnit::streamed(4); count];
            let found = ceiling(&Demand { slots: 1, ..demand(&units) }).unwrap();
            let rows = &found.residency;
            assert!(rows.len() <= 256 && rows.len() > 100, "{count} units, {} rows", rows.len());
            assert!(rows.windows(2).all(|pair| pair[0].resident < pair[1].resident));
            assert_eq!(rows.last().map(|row| row.resident), Some(count));
        }
    }

    #[test]
    fn what_a_budget_takes_away_is_named() {
        let units = [RingUnit::streamed(LAYER); 36];
        let with = |bytes| ceiling(&Demand { budget_bytes: Some(bytes), ..demand(&units) });
        let found = with(2 * LAYER).unwrap();
        assert_eq!(found.schedule.slots(), 2);
        assert_eq!(found.adjustments, [Adjustment::FewerSlots { asked: 3, given: 2 }]);
        assert!(found.to_string().contains("not as asked: 2 slots instead of 3"), "{found}");
        assert_eq!(found.residency, [], "none of them fits");
        assert!(found.to_string().ends_with("\nno residency within the budget hides the link\n"), "{found}");
        // Room for some residency: rows up to the budget.
        let found = with(10 * LAYER).unwrap();
        assert!(found.residency.iter().all(|row| row.device_bytes <= 10 * LAYER));
        assert_eq!(found.residency.iter().map(|row| row.resident).collect::<Vec<_>>(), [3, 6]);
        let refused = Err(Error::InvalidSize {
            what: "a ring's slots and resident units",
            bytes: LAYER,
            limit: LAYER - 1,
        });
        assert_eq!(with(LAYER - 1), refused);
    }

    #[test]
    fn what_the_slots_do_not_divide_is_named_with_what_it_costs() {
        let units = [RingUnit::streamed(LAYER); 61];
        let found = ceiling(&Demand { slots: 4, ..demand(&units) }).unwrap();
        assert_eq!(found.adjustments, [Adjustment::KeptResident { units: vec![30] }]);
        assert_eq!(found.asked.device_bytes, 5 * LAYER);
        assert_eq!(found.asked.link_bytes, 60 * LAYER);
        assert!(ceiling(&Demand { slots: 4, remainder: Remainder::Refuse, ..demand(&units) }).is_err());
        let few = ceiling(&Demand { slots: 4, ..demand(&units[..4]) }).unwrap();
        assert_eq!(few.adjustments, [Adjustment::NothingStreams { units: 4, slots: 4 }]);
        assert_eq!((few.asked.link_bytes, few.asked.bound), (0, Bound::Compute));
        // Places are as long as their longest unit, in whole pages.
        let uneven = [1, 5, 3, 2].map(RingUnit::streamed);
        let found = ceiling(&Demand { slots: 2, page_bytes: 4, ..demand(&uneven) }).unwrap();
        assert_eq!((found.asked.device_bytes, found.all_resident_bytes), (4 + 8, 4 + 8 + 4 + 4));
    }

    #[test]
    fn nonsense_is_refused() {
        let units = [RingUnit::streamed(LAYER); 6];
        let good = demand(&units);
        for link_gib_per_second in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(ceiling(&Demand { link_gib_per_second, ..good }).is_err());
        }
        for compute_seconds in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(ceiling(&Demand { compute_seconds, ..good }).is_err());
        }
        assert!(ceiling(&Demand { tokens: 0, ..good }).is_err());
        assert!(ceiling(&Demand { page_bytes: 0, ..good }).is_err());
        assert!(ceiling(&Demand { slots: 0, ..good }).is_err());
        for bytes in [0, MAX_BYTES + 1, u64::MAX, MAX_BYTES] {
            assert!(ceiling(&Demand { units: &[RingUnit::streamed(bytes); 2], ..good }).is_err());
        }
        // Zero seconds of work are valid.
        let nothing =
            ceiling(&Demand { units: &[RingUnit::resident(1)], compute_seconds: 0.0, ..good }).unwrap();
        assert!(nothing.asked.tokens_per_second.is_infinite());
    }

    #[test]
    fn slots_beyond_the_units_cost_nothing_to_count_down() {
        let units: Vec<RingUnit> = (1..=500).map(|bytes| RingUnit::streamed(bytes << 20)).collect();
        for remainder in [Remainder::KeepResident, Remainder::Refuse] {
            // 500 needs a slot of this size.
            let budget_bytes = Some(1500 << 20);
            let asked =
                Demand { slots: usize::MAX, remainder, budget_bytes, page_bytes: 1, ..demand(&units) };
            let found = ceiling(&asked).unwrap();
            assert!(found.asked.device_bytes <= 1500 << 20);
            assert_eq!(found.adjustments[0], Adjustment::FewerSlots { asked: usize::MAX, given: 2 });
        }
    }
}
