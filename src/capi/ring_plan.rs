use std::ffi::c_char;

use super::guard::{Failure, copy_items, guard, items, null, pick};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::ring::{Adjustment, Demand, Remainder, RingUnit, SLOTS, Schedule, ceiling};

/// Units in excess of a multiple of the slots become resident, evenly spread.
pub const VMMGRAPH_REMAINDER_KEEP_RESIDENT: i32 = 0;
/// A surplus is VMMGRAPH_ERROR_INVALID_ARGUMENT.
pub const VMMGRAPH_REMAINDER_REFUSE: i32 = 1;

/// A unit of a step's data, usually a layer. Arrays of units are in the order of use.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_ring_unit_t {
    pub bytes: u64,
    /// 1: stays on the device, copied once and again when its source changes. 0: streams.
    pub resident: i32,
    /// Must be 0.
    pub reserved: i32,
}

/// Location of a unit's contents.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_ring_place_t {
    /// A slot, from 0, or above the slots a place private to one resident unit. Units of one place
    /// share memory.
    pub place: u64,
    /// Position in the sequence of streamed units, from 0; UINT64_MAX: resident.
    pub turn: u64,
}

/// Schedule of a ring: streamed units and their slots.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_schedule_t {
    pub struct_size: usize,
    pub units: u64,
    pub streamed: u64,
    /// Fewer than requested if a slot would never be used twice; 0: no unit streams.
    pub slots: u64,
    /// Slots plus resident units.
    pub places: u64,
    /// Units to be streamed which are resident: a surplus over a multiple of the slots, or all if
    /// the slots hold all.
    pub kept_resident: u64,
}

/// Demand of a step and the available resources.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_demand_t {
    pub struct_size: usize,
    /// In the order of use.
    pub units: *const vmmgraph_ring_unit_t,
    pub unit_count: usize,
    /// 0: three.
    pub slots: usize,
    /// One of VMMGRAPH_REMAINDER_*.
    pub remainder: i32,
    /// Must be 0.
    pub reserved: i32,
    /// Places are a whole number of pages; 0: any size.
    pub page_bytes: u64,
    /// Limit of device bytes for slots and resident units.
    pub budget_bytes: u64,
    /// Tokens per step over all sequences; 0: one.
    pub tokens: u64,
    /// Measured copy bandwidth from pinned host memory; must be above 0.
    pub link_gib_per_second: f64,
    /// Seconds per step with all units resident; at least 0.
    pub compute_seconds: f64,
}

pub(super) fn remainder_of(number: i32) -> Result<Remainder, Failure> {
    pick("remainder", number, &[Remainder::KeepResident, Remainder::Refuse])
}

pub(super) unsafe fn units_of(
    units: *const vmmgraph_ring_unit_t,
    count: usize,
) -> Result<Vec<RingUnit>, Failure> {
    let unit = |unit: &vmmgraph_ring_unit_t| {
        Ok(RingUnit { bytes: unit.bytes, resident: pick("resident", unit.resident, &[false, true])? })
    };
    // SAFETY: contract.
    unsafe { items(units, count, "units") }?.iter().map(unit).collect()
}

fn kept_resident(schedule: &Schedule) -> u64 {
    let kept = |adjustment: &Adjustment| match adjustment {
        Adjustment::KeptResident { units } => units.len() as u64,
        Adjustment::NothingStreams { units, .. } => *units as u64,
        Adjustment::FewerSlots { .. } => 0,
    };
    schedule.adjustments().iter().map(kept).sum()
}

pub(super) unsafe fn write_schedule(
    schedule: &Schedule,
    places: *mut vmmgraph_ring_place_t,
    capacity: usize,
    result: *mut vmmgraph_ring_schedule_t,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let result = unsafe { OutStruct::optional(result, "result") }?;
    let place = |unit: usize| vmmgraph_ring_place_t {
        place: schedule.place_of(unit).map_or(u64::MAX, |place| place as u64),
        turn: schedule.position_of(unit).map_or(u64::MAX, |position| position as u64),
    };
    let found: Vec<_> = (0..schedule.units()).map(place).collect();
    // SAFETY: contract.
    unsafe { copy_items(&found, places, capacity) }?;
    if let Some(result) = result {
        result.write(vmmgraph_ring_schedule_t {
            struct_size: result.struct_size,
            units: found.len() as u64,
            streamed: schedule.streamed().len() as u64,
            slots: schedule.slots() as u64,
            places: schedule.places() as u64,
            kept_resident: kept_resident(schedule),
        });
    }
    Ok(())
}

/// Describes an upper bound of a ring's performance, one item per line: bytes over the link, tokens
/// per second, the bottleneck, deviations from the demand, and the effect of more resident units.
/// Measure the real ring. Needs no device. Uses fewer slots if the budget requires.
/// VMMGRAPH_ERROR_INVALID_SIZE for a unit of 0 or too many bytes, or if the budget is too small for
/// one slot and the resident units. VMMGRAPH_ERROR_INVALID_ARGUMENT without units, for an invalid
/// bandwidth or time, or for a surplus with VMMGRAPH_REMAINDER_REFUSE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_ceiling_text(
    demand: *const vmmgraph_ring_demand_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let given = unsafe { options(demand) }?.ok_or_else(|| null("demand"))?;
        // SAFETY: contract.
        let units = unsafe { units_of(given.units, given.unit_count) }?;
        let found = ceiling(&Demand {
            units: &units,
            slots: if given.slots == 0 { SLOTS } else { given.slots },
            remainder: remainder_of(given.remainder)?,
            page_bytes: given.page_bytes.max(1),
            budget_bytes: limit(given.budget_bytes),
            link_gib_per_second: given.link_gib_per_second,
            compute_seconds: given.compute_seconds,
            tokens: given.tokens.max(1),
        })?;
        // SAFETY: contract.
        unsafe { copy_text(&found.to_string(), buffer, capacity, needed) };
        Ok(())
    })
}
