//! What a ring can come to at best, before anything is built: no device, no memory.

use std::ffi::c_char;

use super::guard::{Failure, copy_items, guard, items, null, pick};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::ring::{
    Adjustment, Bound, Ceiling, Demand, Remainder, Residency, RingUnit, SLOTS, Schedule, ceiling,
};

/// Of a ring's units that its slots do not divide, as many as are too many stay on the device, evenly spread.
pub const VMMGRAPH_REMAINDER_KEEP_RESIDENT: i32 = 0;
/// They are VMMGRAPH_ERROR_INVALID_ARGUMENT.
pub const VMMGRAPH_REMAINDER_REFUSE: i32 = 1;

/// The copies take longer than the work.
pub const VMMGRAPH_BOUND_LINK: i32 = 0;
/// The work takes longer: streaming costs nothing.
pub const VMMGRAPH_BOUND_COMPUTE: i32 = 1;

/// A piece of what a step reads, mostly a layer; an array of them is in the order of use. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_ring_unit_t {
    /// Its bytes.
    pub bytes: u64,
    /// 1: it is to stay on the device, copied once and again when its source changes. 0: it streams.
    pub resident: i32,
    /// 0.
    pub reserved: i32,
}

/// Where a unit's contents are. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_ring_place_t {
    /// The place: a slot, counted from 0, or behind the slots one of its own. Units of one place show the same memory.
    pub place: u64,
    /// Which of the units that stream it is in a step, counted from 0; UINT64_MAX: it is resident.
    pub turn: u64,
}

/// Which units stream, and through how many slots.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_schedule_t {
    /// Set to sizeof(vmmgraph_ring_schedule_t) before the call.
    pub struct_size: usize,
    /// Units.
    pub units: u64,
    /// Those of them that stream.
    pub streamed: u64,
    /// Slots that these share: fewer than asked for where some would never be used twice; 0: nothing streams.
    pub slots: u64,
    /// Slots and resident units.
    pub places: u64,
    /// Units that were to stream and are resident all the same: the slots do not divide the others, or hold all of them.
    pub kept_resident: u64,
}

/// What a step has to do and what there is for it. Zero everything, then set struct_size and what there is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_demand_t {
    /// sizeof(vmmgraph_ring_demand_t).
    pub struct_size: usize,
    /// The units, in the order of use.
    pub units: *const vmmgraph_ring_unit_t,
    /// How many.
    pub unit_count: usize,
    /// Slots that are wanted; 0: three.
    pub slots: usize,
    /// One of VMMGRAPH_REMAINDER_*.
    pub remainder: i32,
    /// 0.
    pub reserved: i32,
    /// Bytes of a page: places are as long as whole ones; 0: no matter.
    pub page_bytes: u64,
    /// The most bytes of the device that slots and resident units may take; 0: no limit.
    pub budget_bytes: u64,
    /// Tokens of a step, all sequences together; 0: one.
    pub tokens: u64,
    /// GiB a second that the link brings from pinned host memory; above 0. Measure it: the library has no number for it.
    pub link_gib_per_second: f64,
    /// Seconds that a step takes with everything resident; from 0 on.
    pub compute_seconds: f64,
}

/// What a step comes to with so many units resident. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_residency_t {
    /// Units that are resident.
    pub resident: u64,
    /// Bytes of the device: slots and resident units.
    pub device_bytes: u64,
    /// Bytes that go over the link in a step.
    pub link_bytes: u64,
    /// Seconds of a step at best.
    pub step_seconds: f64,
    /// Tokens a second at best; infinity for a step that takes no time.
    pub tokens_per_second: f64,
    /// What bounds it, one of VMMGRAPH_BOUND_*.
    pub bound: i32,
    /// 0.
    pub reserved: i32,
}

/// The best that can be had. No arrangement of copies is faster; how near a ring comes is to be measured.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_ceiling_t {
    /// Set to sizeof(vmmgraph_ring_ceiling_t) before the call.
    pub struct_size: usize,
    /// With the units that stream as asked, or as near to that as slots and budget allow.
    pub asked: vmmgraph_ring_residency_t,
    /// Seconds of the copies alone, at the link's speed.
    pub link_seconds: f64,
    /// Seconds of the work alone.
    pub compute_seconds: f64,
    /// Bytes of the device if everything were resident.
    pub all_resident_bytes: u64,
    /// Units.
    pub units: u64,
    /// Those of them that stream.
    pub streamed: u64,
    /// Slots that these share: fewer than asked for where the budget holds no more or some would never be used twice; 0: nothing streams.
    pub slots: u64,
    /// Units that were to stream and are resident all the same.
    pub kept_resident: u64,
    /// Rows of more residency that fit the budget.
    pub residency_count: usize,
}

impl vmmgraph_ring_residency_t {
    fn of(row: &Residency) -> Self {
        let bound = match row.bound {
            Bound::Link => VMMGRAPH_BOUND_LINK,
            Bound::Compute => VMMGRAPH_BOUND_COMPUTE,
        };
        Self {
            resident: row.resident as u64,
            device_bytes: row.device_bytes,
            link_bytes: row.link_bytes,
            step_seconds: row.step_seconds,
            tokens_per_second: row.tokens_per_second,
            bound,
            reserved: 0,
        }
    }
}

pub(super) fn remainder_of(number: i32) -> Result<Remainder, Failure> {
    pick("remainder", number, &[Remainder::KeepResident, Remainder::Refuse])
}

/// The units that C describes.
///
/// # Safety
/// `units` points to `count` units, or that is 0.
pub(super) unsafe fn units_of(
    units: *const vmmgraph_ring_unit_t,
    count: usize,
) -> Result<Vec<RingUnit>, Failure> {
    let unit = |unit: &vmmgraph_ring_unit_t| {
        Ok(RingUnit { bytes: unit.bytes, resident: pick("resident", unit.resident, &[false, true])? })
    };
    // SAFETY: the caller's contract.
    unsafe { items(units, count, "units") }?.iter().map(unit).collect()
}

/// How many units were to stream and do not.
fn kept_resident(schedule: &Schedule) -> u64 {
    let kept = |adjustment: &Adjustment| match adjustment {
        Adjustment::KeptResident { units } => units.len() as u64,
        Adjustment::NothingStreams { units, .. } => *units as u64,
        Adjustment::FewerSlots { .. } => 0,
    };
    schedule.adjustments().iter().map(kept).sum()
}

/// Copies as many places as there is room for, and says the rest if somebody wants it.
///
/// # Safety
/// `places` points to `capacity` writable places, or that is 0; `result` is null or points to a struct whose struct_size is set.
pub(super) unsafe fn write_schedule(
    schedule: &Schedule,
    places: *mut vmmgraph_ring_place_t,
    capacity: usize,
    result: *mut vmmgraph_ring_schedule_t,
) -> Result<(), Failure> {
    // SAFETY: the caller's contract.
    let result = if result.is_null() { None } else { Some(unsafe { OutStruct::new(result, "result") }?) };
    let place = |unit: usize| vmmgraph_ring_place_t {
        place: schedule.place_of(unit).map_or(u64::MAX, |place| place as u64),
        turn: schedule.turn_of(unit).map_or(u64::MAX, |turn| turn as u64),
    };
    let found: Vec<_> = (0..schedule.units()).map(place).collect();
    // SAFETY: the caller's contract.
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

/// The ceiling of what C describes.
///
/// # Safety
/// `demand` is null or points to a struct whose struct_size is set, with as many units as it says.
unsafe fn ceiling_of(demand: *const vmmgraph_ring_demand_t) -> Result<Ceiling, Failure> {
    // SAFETY: the caller's contract.
    let given = unsafe { options(demand) }?.ok_or_else(|| null("demand"))?;
    // SAFETY: the caller's contract.
    let units = unsafe { units_of(given.units, given.unit_count) }?;
    Ok(ceiling(&Demand {
        units: &units,
        slots: if given.slots == 0 { SLOTS } else { given.slots },
        remainder: remainder_of(given.remainder)?,
        page_bytes: given.page_bytes.max(1),
        budget_bytes: limit(given.budget_bytes),
        link_gib_per_second: given.link_gib_per_second,
        compute_seconds: given.compute_seconds,
        tokens: given.tokens.max(1),
    })?)
}

/// Which of these units would stream, through which of so many slots (0: three). Plain arithmetic: nothing is made, no device is asked, and any
/// thread may call it. Writes the places of at most `capacity` units, by unit, and to `result` what they come to; either may be null.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT without units, and with VMMGRAPH_REMAINDER_REFUSE if the slots do not divide those that stream.
///
/// # Safety
/// `units` points to `unit_count` units, or that is 0; `places` points to `capacity` writable places, or that is 0; `result` is null or
/// points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_schedule(
    units: *const vmmgraph_ring_unit_t,
    unit_count: usize,
    slots: usize,
    remainder: i32,
    places: *mut vmmgraph_ring_place_t,
    capacity: usize,
    result: *mut vmmgraph_ring_schedule_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let units = unsafe { units_of(units, unit_count) }?;
        let resident: Vec<bool> = units.iter().map(|unit| unit.resident).collect();
        let slots = if slots == 0 { SLOTS } else { slots };
        let schedule = Schedule::new(&resident, slots, remainder_of(remainder)?)?;
        // SAFETY: the caller's contract.
        unsafe { write_schedule(&schedule, places, capacity, result) }
    })
}

/// The best that a ring can do for such a step: bytes over the link, seconds, tokens a second, and what bounds them. Plain arithmetic, as
/// vmmgraph_ring_schedule. Slots that do not fit the budget become fewer. Writes at most `capacity` rows of what more residency
/// would buy, from the next more up to all and 256 at most, as far as the budget holds them. VMMGRAPH_ERROR_INVALID_SIZE for a unit that is empty or too long, and
/// if the budget does not hold one slot and what is to be resident; VMMGRAPH_ERROR_INVALID_ARGUMENT for a link without speed and for times that are none.
///
/// # Safety
/// `demand` is null or points to a struct whose struct_size is set, with as many units as it says; `rows` points to `capacity` writable
/// rows, or that is 0; `result` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_ceiling(
    demand: *const vmmgraph_ring_demand_t,
    rows: *mut vmmgraph_ring_residency_t,
    capacity: usize,
    result: *mut vmmgraph_ring_ceiling_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (found, result) = unsafe { (ceiling_of(demand)?, OutStruct::new(result, "result")?) };
        let more: Vec<_> = found.residency.iter().map(vmmgraph_ring_residency_t::of).collect();
        // SAFETY: the caller's contract.
        unsafe { copy_items(&more, rows, capacity) }?;
        result.write(vmmgraph_ring_ceiling_t {
            struct_size: result.struct_size,
            asked: vmmgraph_ring_residency_t::of(&found.asked),
            link_seconds: found.link_seconds,
            compute_seconds: found.compute_seconds,
            all_resident_bytes: found.all_resident_bytes,
            units: found.schedule.units() as u64,
            streamed: found.schedule.streamed().len() as u64,
            slots: found.schedule.slots() as u64,
            kept_resident: kept_resident(&found.schedule),
            residency_count: more.len(),
        });
        Ok(())
    })
}

/// The same in words, for people and logs, a line each: what bounds a step, everything that is otherwise than asked, what residency would buy, and from
/// where on the work hides the link.
/// Copies as vmmgraph_last_error_message does.
///
/// # Safety
/// `demand` as in vmmgraph_ring_ceiling; `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_ceiling_text(
    demand: *const vmmgraph_ring_demand_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let text = unsafe { ceiling_of(demand) }?.to_string();
        // SAFETY: the caller's contract.
        unsafe { copy_text(&text, buffer, capacity, needed) };
        Ok(())
    })
}
