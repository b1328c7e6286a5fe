use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::account::{vmmgraph_account_t, with_account};
use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, items, out};
use super::handle::{get, register, remove};
use super::host_buffer::vmmgraph_host_buffer_t;
use super::memory::write_number;
use super::ring_plan::{
    remainder_of, units_of, vmmgraph_ring_place_t, vmmgraph_ring_schedule_t, vmmgraph_ring_unit_t,
    write_schedule,
};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::error::Error;
use crate::ring::{HostRun, Pace};
use crate::{Device, HostBuffer, Ring, RingOptions};

pub struct vmmgraph_ring {
    _private: (),
}

/// Ring: units read in the same order in every step, only some of them on the device at a time. One
/// step at a time.
pub type vmmgraph_ring_t = *mut vmmgraph_ring;

/// Copies nothing ahead for the next step, whose sources will differ.
pub const VMMGRAPH_RING_WITHIN_STEP: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_options_t {
    pub struct_size: usize,
    /// Name for messages, zero-terminated; null: none.
    pub name: *const c_char,
    /// Slots shared by the streamed units. 0: three (read, filled, ready).
    pub slots: usize,
    /// Treatment of units in excess of a multiple of the slots, one of VMMGRAPH_REMAINDER_*.
    pub remainder: i32,
    /// Sum of VMMGRAPH_RING_* flags.
    pub flags: i32,
    /// Bytes of every page, a multiple of the device's granularity. 0: the longest unit, if this
    /// does not lengthen all places together, else about 1/8 of it, at most 16 MiB. A place is a
    /// whole number of pages; driver calls cost time per page.
    pub page_bytes: u64,
    /// Limit of physical bytes.
    pub budget_bytes: u64,
    /// Measured copy bandwidth from pinned host memory; 0: unknown. If set, the text of
    /// vmmgraph_ring_ceiling_text (without the budget) is logged first.
    pub link_gib_per_second: f64,
    /// Seconds per step with all units resident; needs link_gib_per_second.
    pub compute_seconds: f64,
    /// Tokens per step over all sequences; 0: one.
    pub tokens: u64,
    /// Parent account on the same device; null: the device's.
    pub account: vmmgraph_account_t,
}

/// A part of a unit's source in host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_run_t {
    /// Host buffer, on the ring's device.
    pub source: vmmgraph_host_buffer_t,
    /// In the host buffer.
    pub from: u64,
    /// In the unit.
    pub to: u64,
    pub bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_stats_t {
    pub struct_size: usize,
    pub id: u64,
    pub units: u64,
    /// Streamed units.
    pub streamed: u64,
    pub slots: u64,
    pub page_bytes: u64,
    pub reserved_bytes: u64,
    /// Device bytes of slots and resident units.
    pub device_bytes: u64,
    /// Units acquired at present.
    pub acquired: u64,
    /// Submitted copies.
    pub copies: u64,
    pub copied_bytes: u64,
    pub acquires: u64,
    /// Units filled ahead of their acquire.
    pub filled_ahead: u64,
    /// Units filled by their acquire; the acquiring stream waits for the copy.
    pub filled_late: u64,
    /// Failures to fill ahead; the acquire tries again.
    pub ahead_failed: u64,
    pub aborts: u64,
    /// Bytes charged to the budget.
    pub charged_bytes: u64,
    pub budget_bytes: u64,
    /// Launches of captured steps, whose copies count in `copies`.
    pub launches: u64,
}

/// Creates a ring over `units`, in the order of use: addresses for each unit, pages for slots and
/// resident units. Copies nothing yet. Logs deviations from the request (see vmmgraph_ring_places).
/// `options` may be null. A failed call changes nothing. VMMGRAPH_ERROR_INVALID_ARGUMENT on a
/// platform without aliased mappings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_create(
    device: vmmgraph_device_t,
    units: *const vmmgraph_ring_unit_t,
    unit_count: usize,
    options: *const vmmgraph_ring_options_t,
    ring: *mut vmmgraph_ring_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (units, ring) = unsafe { (units_of(units, unit_count)?, out(ring, "ring")?) };
        let (mut made, mut name, mut above) = (RingOptions::default(), String::new(), std::ptr::null_mut());
        // SAFETY: contract.
        if let Some(given) = unsafe { self::options(options) }? {
            if given.flags & !VMMGRAPH_RING_WITHIN_STEP != 0 {
                let (value, expected) = (i128::from(given.flags), "a sum of VMMGRAPH_RING_*");
                return Err(Error::InvalidArgument { what: "flags", value, expected }.into());
            }
            if !given.name.is_null() {
                // SAFETY: contract.
                name = unsafe { text(given.name, "name") }?;
            }
            above = given.account;
            made = RingOptions {
                name: &name,
                slots: given.slots,
                remainder: remainder_of(given.remainder)?,
                page_bytes: given.page_bytes,
                budget_bytes: limit(given.budget_bytes),
                account: None,
                within_step: given.flags & VMMGRAPH_RING_WITHIN_STEP != 0,
                pace: (given.link_gib_per_second != 0.0).then_some(Pace {
                    link_gib_per_second: given.link_gib_per_second,
                    compute_seconds: given.compute_seconds,
                    tokens: given.tokens.max(1),
                }),
            };
        }
        let built =
            with_account(above, |account| Ok(device.ring(&units, &RingOptions { account, ..made })?))?;
        *ring = register(Arc::new(built));
        Ok(())
    })
}

/// Destroys the ring, in use or not, without waiting: addresses and pages are freed after all
/// copies and readers, for a unit still acquired after all work submitted to its stream so far.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_destroy(ring: vmmgraph_ring_t) -> vmmgraph_status_t {
    guard(|| remove::<Ring, _>(ring).map(drop))
}

/// Writes the first address of unit number `unit`, which never changes. The contents are valid only
/// between acquire and release of the unit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_address(
    ring: vmmgraph_ring_t,
    unit: usize,
    address: *mut *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: contract.
        *unsafe { out(address, "address") }? = ring.address(unit)?.0 as *mut c_void;
        Ok(())
    })
}

/// Writes the places of the units, and the summary to `result`. Either may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_places(
    ring: vmmgraph_ring_t,
    places: *mut vmmgraph_ring_place_t,
    capacity: usize,
    result: *mut vmmgraph_ring_schedule_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: contract.
        unsafe { write_schedule(ring.schedule(), places, capacity, result) }
    })
}

/// Sets the source of a unit from its next acquire on; without runs, the unit has the slot's
/// current contents. Runs adjacent in buffer and unit become one copy. The ring keeps the buffers
/// alive. Current readers are unaffected; a copy of the old source completes first. Does not block.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT for a run beyond the end of the unit or its source, overlapping
/// runs, or a source on another device; the old source then stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_set_source(
    ring: vmmgraph_ring_t,
    unit: usize,
    runs: *const vmmgraph_host_run_t,
    run_count: usize,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        let run = |run: &vmmgraph_host_run_t| {
            let source = get::<HostBuffer, _>(run.source)?;
            Ok(HostRun { source, from: run.from, to: run.to, bytes: run.bytes })
        };
        // SAFETY: contract.
        let runs = unsafe { items(runs, run_count, "runs") }?.iter().map(run);
        let runs = runs.collect::<Result<Vec<_>, Failure>>()?;
        Ok(ring.set_source(unit, &runs)?)
    })
}

/// Makes later work of `stream` see the contents of a unit at its addresses, until
/// vmmgraph_ring_release. Does not block if the source is registered. Copies the following units
/// ahead into free slots: any order of acquires is correct, the order of use is fast. Work may only
/// read the unit; writes are lost. The stream must exist until the release.
/// VMMGRAPH_ERROR_WRONG_STATE if the unit has no source, or if this or another unit of its slot is
/// acquired. VMMGRAPH_ERROR_STREAM_CAPTURING if the stream is captured outside
/// vmmgraph_ring_capture_begin. After a failure the unit is not acquired.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_acquire(
    ring: vmmgraph_ring_t,
    unit: usize,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Ring, _>(ring)?.acquire(unit, stream_of(stream))?))
}

/// Ends the use of a unit: work submitted to `stream` so far is its last reader; then the slot is
/// refilled. On a stream other than the acquiring one, order the stream after all readers first.
/// Does not block. VMMGRAPH_ERROR_WRONG_STATE if the unit is not acquired.
/// VMMGRAPH_ERROR_STREAM_CAPTURING as for vmmgraph_ring_acquire. After a failure the unit is still
/// acquired.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_release(
    ring: vmmgraph_ring_t,
    unit: usize,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Ring, _>(ring)?.release(unit, stream_of(stream))?))
}

/// Copies resident units and the first streamed units into empty or stale places, except those
/// being read. Call before the first step, after an abort, or after a change of sources. `filled`
/// receives the number of copied units. VMMGRAPH_ERROR_WRONG_STATE for a unit without source;
/// earlier units are then already filled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_prime(ring: vmmgraph_ring_t, filled: *mut u64) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { write_number(filled, get::<Ring, _>(ring)?.prime()?) })
}

/// Aborts a step: releases every acquired unit after all work submitted to its stream so far, and
/// marks all places as empty. Sources stay. Never fails; a stream under capture is tracked once the
/// capture ends.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_abort(ring: vmmgraph_ring_t) -> vmmgraph_status_t {
    guard(|| {
        get::<Ring, _>(ring)?.abort();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_stats(
    ring: vmmgraph_ring_t,
    stats: *mut vmmgraph_ring_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = ring.stats();
        stats.write(vmmgraph_ring_stats_t {
            struct_size: stats.struct_size,
            id: now.id,
            units: now.units,
            streamed: now.streamed,
            slots: now.slots,
            page_bytes: now.page_bytes,
            reserved_bytes: now.reserved_bytes,
            device_bytes: now.device_bytes,
            acquired: now.acquired,
            copies: now.copies,
            copied_bytes: now.copied_bytes,
            acquires: now.acquires,
            filled_ahead: now.filled_ahead,
            filled_late: now.filled_late,
            ahead_failed: now.ahead_failed,
            aborts: now.aborts,
            charged_bytes: now.account.charged_bytes,
            budget_bytes: now.account.most_bytes.unwrap_or(0),
            launches: now.launches,
        });
        Ok(())
    })
}
