//! Rings: units that stream from the host through a few slots, each at addresses of its own.

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

/// Never defined: a vmmgraph_ring_t is a key, not an address.
pub struct vmmgraph_ring {
    _private: (),
}

/// Units that are read in one order, again and again, and are not all on the device. Calls with it are thread-safe; one step is under way at a
/// time, as a slot has one user at a time.
pub type vmmgraph_ring_t = *mut vmmgraph_ring;

/// Nothing is copied ahead for the next step, since its sources will be others.
pub const VMMGRAPH_RING_WITHIN_STEP: i32 = 1;

/// How to make a ring. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_options_t {
    /// sizeof(vmmgraph_ring_options_t).
    pub struct_size: usize,
    /// Its name in messages, zero-terminated; null: none.
    pub name: *const c_char,
    /// Slots that the streamed units share; 0: three, of which one is read, one is filled and one is ready.
    pub slots: usize,
    /// What to do with units that the slots do not divide, one of VMMGRAPH_REMAINDER_*.
    pub remainder: i32,
    /// Any of VMMGRAPH_RING_*, added up.
    pub flags: i32,
    /// Bytes of every page, a multiple of the device's granularity; 0: the longest unit, if all places together are no longer then; else
    /// about an eighth of it, 16 MiB at most. Calls cost per page and not per byte; a place is as long as whole pages.
    pub page_bytes: u64,
    /// The most bytes of physical memory it may hold; 0: no limit but the device's.
    pub budget_bytes: u64,
    /// GiB a second that the link brings from pinned host memory, measured. What vmmgraph_ring_ceiling_text says is logged then before anything is
    /// built, without the budget. 0: it is not known.
    pub link_gib_per_second: f64,
    /// Seconds that a step takes with everything resident; only beside the link's speed.
    pub compute_seconds: f64,
    /// Tokens of a step, all sequences together; 0: one.
    pub tokens: u64,
    /// The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
    pub account: vmmgraph_account_t,
}

/// Bytes of host memory that go to a place in a unit. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_run_t {
    /// The host memory, of the ring's device.
    pub source: vmmgraph_host_buffer_t,
    /// From its beginning, in bytes.
    pub from: u64,
    /// From the unit's beginning, in bytes.
    pub to: u64,
    /// How many; 0: nothing is to be copied.
    pub bytes: u64,
}

/// What a ring holds, and what it did since it was made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_stats_t {
    /// Set to sizeof(vmmgraph_ring_stats_t) before the call.
    pub struct_size: usize,
    /// Its number, unique in the process.
    pub id: u64,
    /// Its units.
    pub units: u64,
    /// Those of them that stream.
    pub streamed: u64,
    /// The slots they share.
    pub slots: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Bytes of the device: slots and resident units.
    pub device_bytes: u64,
    /// Units that are acquired now.
    pub acquired: u64,
    /// Copies that were given.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Units that were acquired.
    pub acquires: u64,
    /// Units that were filled ahead of their acquire.
    pub filled_ahead: u64,
    /// Units that were filled by their acquire, whose stream then waits for the copy.
    pub filled_late: u64,
    /// Fillings ahead that failed. The acquire tries again, and says so if that fails too.
    pub ahead_failed: u64,
    /// How often it was aborted.
    pub aborts: u64,
    /// Bytes that count toward its budget.
    pub charged_bytes: u64,
    /// Its byte budget; 0: none.
    pub budget_bytes: u64,
    /// Captured steps that were launched. Their copies are among the copies, their units among nothing else.
    pub launches: u64,
}

/// Makes a ring over these units, in the order of use: addresses for each, pages for the slots and for the resident ones. Nothing is copied
/// yet. What it comes to at best, where the link's speed is given, and what is otherwise than asked are logged, and said by vmmgraph_ring_places. `options` may be null. The ring keeps the device open. Out of
/// memory, budget or addresses leaves everything as it was; VMMGRAPH_ERROR_INVALID_ARGUMENT on a platform where a page shows once.
///
/// # Safety
/// `units` points to `unit_count` units, or that is 0; `options` is null or points to a struct whose struct_size is set, and whose name is
/// null or a zero-terminated string; `ring` is null or writable.
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
        // SAFETY: the caller's contract.
        let (units, ring) = unsafe { (units_of(units, unit_count)?, out(ring, "ring")?) };
        let (mut made, mut name, mut above) = (RingOptions::default(), String::new(), std::ptr::null_mut());
        // SAFETY: the caller's contract.
        if let Some(given) = unsafe { self::options(options) }? {
            if given.flags & !VMMGRAPH_RING_WITHIN_STEP != 0 {
                let (value, expected) = (i128::from(given.flags), "a sum of VMMGRAPH_RING_*");
                return Err(Error::InvalidArgument { what: "flags", value, expected }.into());
            }
            if !given.name.is_null() {
                // SAFETY: the caller's contract.
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

/// Ends a handle, and with it the ring, in use or not. Waits for nobody: addresses and pages go behind the copies and the readers there are, a unit
/// that is still acquired behind everything that its stream has been given by now. That stream exists until then.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_destroy(ring: vmmgraph_ring_t) -> vmmgraph_status_t {
    guard(|| remove::<Ring, _>(ring).map(drop))
}

/// The first address of a unit, counted from 0. It never changes, resident or streamed; its contents are there from the unit's acquire to its
/// release only.
///
/// # Safety
/// `address` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_address(
    ring: vmmgraph_ring_t,
    unit: usize,
    address: *mut *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: the caller's contract.
        *unsafe { out(address, "address") }? = ring.address(unit)?.0 as *mut c_void;
        Ok(())
    })
}

/// Where each unit's contents are. Writes the places of at most `capacity` units, by unit, and to `result` what they come to, as
/// vmmgraph_ring_schedule does; either may be null.
///
/// # Safety
/// `places` points to `capacity` writable places, or that is 0; `result` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_places(
    ring: vmmgraph_ring_t,
    places: *mut vmmgraph_ring_place_t,
    capacity: usize,
    result: *mut vmmgraph_ring_schedule_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: the caller's contract.
        unsafe { write_schedule(ring.schedule(), places, capacity, result) }
    })
}

/// Says what a unit is copied from, from its next acquire on; no runs: that it needs no copy, and finds whatever its slot holds. Runs that lie behind
/// one another on both sides are one copy. The ring keeps the buffers. What reads the unit now goes on with what it has; a copy of the old
/// source that is under way is finished, and done again from the new one before the unit is read. Does not block.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT for a run beyond the unit's end or its source's, one on another's bytes, and a source of another device; the
/// source is as before then.
///
/// # Safety
/// `runs` points to `run_count` runs, or that is 0.
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
        // SAFETY: the caller's contract.
        let runs = unsafe { items(runs, run_count, "runs") }?.iter().map(run);
        let runs = runs.collect::<Result<Vec<_>, Failure>>()?;
        Ok(ring.set_source(unit, &runs)?)
    })
}

/// Makes later work of a stream find a unit's bytes at its addresses, until vmmgraph_ring_release. Does not block, unless a source is not registered.
/// The units behind it are copied ahead, as far as their slots are free: any order of units is right, the order of use is fast. Work reads the
/// unit only; what it writes there is lost. VMMGRAPH_ERROR_WRONG_STATE if the unit has no source, is acquired, or another of its slot is;
/// VMMGRAPH_ERROR_STREAM_CAPTURING while the stream is captured. It is not acquired then, and the call can be repeated. The stream exists
/// until the release.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_acquire(
    ring: vmmgraph_ring_t,
    unit: usize,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Ring, _>(ring)?.acquire(unit, stream_of(stream))?))
}

/// Says that what a stream was given so far is the last that reads a unit's bytes: its slot is filled again behind that. A stream other than that of the
/// acquire is one whose work is behind all that read the unit. VMMGRAPH_ERROR_WRONG_STATE unless it is acquired;
/// VMMGRAPH_ERROR_STREAM_CAPTURING while the stream is captured. It is still acquired then, and the call can be repeated. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_release(
    ring: vmmgraph_ring_t,
    unit: usize,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Ring, _>(ring)?.release(unit, stream_of(stream))?))
}

/// Copies the resident units and the first ones that stream, where their places do not hold what they are to: before the first step, after an
/// abort, when sources have changed. Places that are read now are left as they are. `filled`, which may be null, is how many units were.
/// VMMGRAPH_ERROR_WRONG_STATE for a unit without a source; those before it are filled then.
///
/// # Safety
/// `filled` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_prime(ring: vmmgraph_ring_t, filled: *mut u64) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { write_number(filled, get::<Ring, _>(ring)?.prime()?) })
}

/// A step ends before its end: every unit that is acquired is released behind all that its stream was given, and what places hold counts no more, so
/// that the next use of a unit copies it again. Sources stay. Does not fail; a stream that is captured is asked again later.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_abort(ring: vmmgraph_ring_t) -> vmmgraph_status_t {
    guard(|| {
        get::<Ring, _>(ring)?.abort();
        Ok(())
    })
}

/// What a ring holds now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_stats(
    ring: vmmgraph_ring_t,
    stats: *mut vmmgraph_ring_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: the caller's contract.
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
