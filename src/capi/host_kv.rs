//! How much KV memory waits on the host: counts without memory, a clock or a thread.

use super::guard::{Failure, guard, out, pick};
use super::locked::{create, destroy, with};
use super::memory::write_number;
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::policy::{HostKv, SloChange, SloControl};
use crate::units::checked_bytes;

/// Never defined: a vmmgraph_host_kv_t is a key, not an address.
pub struct vmmgraph_host_kv {
    _private: (),
}

/// How much host memory the KV of waiting sequences may have, and has. It holds none itself. Calls with it are thread-safe.
pub type vmmgraph_host_kv_t = *mut vmmgraph_host_kv;

/// What KV on the host takes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_kv_stats_t {
    /// Set to sizeof(vmmgraph_host_kv_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes that there are.
    pub physical_bytes: u64,
    /// Of these, bytes that are used at most.
    pub logical_bytes: u64,
    /// Bytes that are used.
    pub held_bytes: u64,
    /// By so many sequences.
    pub sequences: u64,
}

/// Never defined: a vmmgraph_slo_control_t is a key, not an address.
pub struct vmmgraph_slo_control {
    _private: (),
}

/// A size that follows who is late. Calls with it are thread-safe.
pub type vmmgraph_slo_control_t = *mut vmmgraph_slo_control;

/// The size stays.
pub const VMMGRAPH_SLO_KEEP: i32 = 0;
/// It is twice as much now: first tokens were late.
pub const VMMGRAPH_SLO_RAISED: i32 = 1;
/// It is half as much now: later tokens were late.
pub const VMMGRAPH_SLO_LOWERED: i32 = 2;

/// Makes a count of so many bytes of host memory for KV, all of them to be used: a prompt whose KV memory has no room on the device yet is
/// prefilled all the same, its KV goes to the host, and comes back when there is room.
///
/// # Safety
/// `host_kv` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_create(
    physical_bytes: u64,
    host_kv: *mut vmmgraph_host_kv_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { create(host_kv, || Ok(HostKv::new(checked_bytes("host memory for KV", physical_bytes)?))) }
}

/// Ends a handle, and with it the count.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_kv_destroy(host_kv: vmmgraph_host_kv_t) -> vmmgraph_status_t {
    destroy::<HostKv, _>(host_kv)
}

/// It is used for so many bytes at most: the physical ones at most. What is there beyond stays until it is taken.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_kv_set_logical(host_kv: vmmgraph_host_kv_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| with(host_kv, |host_kv: &mut HostKv| host_kv.set_logical(bytes)))
}

/// Room for a sequence's bytes within the logical size. `there` is 1, or 0 if there is not so much, or if it is there already.
///
/// # Safety
/// `there` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_put(
    host_kv: vmmgraph_host_kv_t,
    sequence: u64,
    bytes: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(host_kv, there, |host_kv| host_kv.put(sequence, bytes)) })
}

/// As vmmgraph_host_kv_put, within the physical size only: for a sequence that would lose its KV memory otherwise.
///
/// # Safety
/// As vmmgraph_host_kv_put.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_rescue(
    host_kv: vmmgraph_host_kv_t,
    sequence: u64,
    bytes: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(host_kv, there, |host_kv| host_kv.rescue(sequence, bytes)) })
}

/// Says whether there was room.
///
/// # Safety
/// `there` is null or writable.
unsafe fn put(
    host_kv: vmmgraph_host_kv_t,
    there: *mut i32,
    act: impl FnOnce(&mut HostKv) -> bool,
) -> Result<(), Failure> {
    // SAFETY: the caller's contract.
    let there = unsafe { out(there, "there") }?;
    *there = i32::from(with(host_kv, act)?);
    Ok(())
}

/// A sequence's bytes are on the device again, or nobody's. `bytes`, which may be null, is how many. VMMGRAPH_ERROR_INVALID_ARGUMENT for
/// one that is not there.
///
/// # Safety
/// `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_take(
    host_kv: vmmgraph_host_kv_t,
    sequence: u64,
    bytes: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let taken = with(host_kv, |host_kv: &mut HostKv| host_kv.take(sequence))??;
        // SAFETY: the caller's contract.
        unsafe { write_number(bytes, taken) }
    })
}

/// What is there now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_stats(
    host_kv: vmmgraph_host_kv_t,
    stats: *mut vmmgraph_host_kv_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = with(host_kv, |host_kv: &mut HostKv| vmmgraph_host_kv_stats_t {
            struct_size: stats.struct_size,
            physical_bytes: host_kv.physical(),
            logical_bytes: host_kv.logical(),
            held_bytes: host_kv.held(),
            sequences: host_kv.sequences() as u64,
        })?;
        stats.write(now);
        Ok(())
    })
}

/// Makes a size between `least` and `most`, beginning at `value`, for vmmgraph_host_kv_set_logical: as eLLM does with the logical size of its
/// buffer. VMMGRAPH_ERROR_INVALID_ARGUMENT for a least of 0, from which nothing grows, and for a value out of these bounds.
///
/// # Safety
/// `control` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_slo_control_create(
    least: u64,
    value: u64,
    most: u64,
    control: *mut vmmgraph_slo_control_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { create(control, || SloControl::new(least, value, most)) }
}

/// Ends a handle, and with it the control.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_slo_control_destroy(control: vmmgraph_slo_control_t) -> vmmgraph_status_t {
    destroy::<SloControl, _>(control)
}

/// An iteration is over: whether a first token was late in it (1, else 0), or another one. The size doubles when first tokens were late in
/// three of the last five iterations, halves when later tokens were, and stays when both were; after a change only new iterations are looked
/// at. `change` is one of VMMGRAPH_SLO_*, `value` the size from now on; either may be null.
///
/// # Safety
/// `change` and `value` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_slo_control_step(
    control: vmmgraph_slo_control_t,
    first_late: i32,
    other_late: i32,
    change: *mut i32,
    value: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let first = pick("first_late", first_late, &[false, true])?;
        let other = pick("other_late", other_late, &[false, true])?;
        let (changed, now) =
            with(control, |control: &mut SloControl| (control.step(first, other), control.value()))?;
        // SAFETY: the caller's contract.
        unsafe {
            if let Some(change) = change.as_mut() {
                *change = match changed {
                    SloChange::Keep => VMMGRAPH_SLO_KEEP,
                    SloChange::Raised(_) => VMMGRAPH_SLO_RAISED,
                    SloChange::Lowered(_) => VMMGRAPH_SLO_LOWERED,
                };
            }
            write_number(value, now)
        }
    })
}
