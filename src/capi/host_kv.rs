use super::guard::{Failure, guard, out, pick};
use super::locked::{create, destroy, with};
use super::memory::write_number;
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::policy::{HostKv, SloChange, SloControl};
use crate::units::checked_bytes;

pub struct vmmgraph_host_kv {
    _private: (),
}

/// Counter of host memory for the KV of waiting sequences, without memory.
pub type vmmgraph_host_kv_t = *mut vmmgraph_host_kv;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_kv_stats_t {
    pub struct_size: usize,
    pub physical_bytes: u64,
    /// Bytes usable by vmmgraph_host_kv_put.
    pub logical_bytes: u64,
    pub held_bytes: u64,
    pub sequences: u64,
}

pub struct vmmgraph_slo_control {
    _private: (),
}

/// Controller of a size in bytes, driven by latency violations.
pub type vmmgraph_slo_control_t = *mut vmmgraph_slo_control;

/// The size is unchanged.
pub const VMMGRAPH_SLO_KEEP: i32 = 0;
/// The size was raised, at most doubled: first tokens were late.
pub const VMMGRAPH_SLO_RAISED: i32 = 1;
/// The size was lowered, at most halved: later tokens were late.
pub const VMMGRAPH_SLO_LOWERED: i32 = 2;

/// Creates a counter of `physical_bytes` of host memory, all usable at first, for engines which
/// prefill before the device has room for the KV.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_create(
    physical_bytes: u64,
    host_kv: *mut vmmgraph_host_kv_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { create(host_kv, || Ok(HostKv::new(checked_bytes("host memory for KV", physical_bytes)?))) }
}

/// Destroys the counter.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_kv_destroy(host_kv: vmmgraph_host_kv_t) -> vmmgraph_status_t {
    destroy::<HostKv, _>(host_kv)
}

/// Sets the limit of vmmgraph_host_kv_put, at most the physical size. Bytes in use stay until
/// taken.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_kv_set_logical(host_kv: vmmgraph_host_kv_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| with(host_kv, |host_kv: &mut HostKv| host_kv.set_logical(bytes)))
}

/// Reserves `bytes` for `sequence` within the logical size (`there` is 1), or nothing (`there` is
/// 0) if they do not fit or the sequence has a reservation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_put(
    host_kv: vmmgraph_host_kv_t,
    sequence: u64,
    bytes: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { put(host_kv, there, |host_kv| host_kv.put(sequence, bytes)) })
}

/// Like vmmgraph_host_kv_put, within the physical size, for a sequence about to lose its KV memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_rescue(
    host_kv: vmmgraph_host_kv_t,
    sequence: u64,
    bytes: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { put(host_kv, there, |host_kv| host_kv.rescue(sequence, bytes)) })
}

unsafe fn put(
    host_kv: vmmgraph_host_kv_t,
    there: *mut i32,
    act: impl FnOnce(&mut HostKv) -> bool,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let there = unsafe { out(there, "there") }?;
    *there = i32::from(with(host_kv, act)?);
    Ok(())
}

/// Ends a reservation. `bytes` (may be null) receives its bytes. VMMGRAPH_ERROR_INVALID_ARGUMENT if
/// `sequence` has none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_take(
    host_kv: vmmgraph_host_kv_t,
    sequence: u64,
    bytes: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let taken = with(host_kv, |host_kv: &mut HostKv| host_kv.take(sequence))??;
        // SAFETY: contract.
        unsafe { write_number(bytes, taken) }
    })
}

/// Writes the statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_kv_stats(
    host_kv: vmmgraph_host_kv_t,
    stats: *mut vmmgraph_host_kv_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
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

/// Creates a controller of a size in bytes from `least` to `most`, initially `value`, for
/// vmmgraph_host_kv_set_logical, by eLLM's rule. VMMGRAPH_ERROR_INVALID_ARGUMENT if `least` is 0 or
/// `value` is out of bounds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_slo_control_create(
    least: u64,
    value: u64,
    most: u64,
    control: *mut vmmgraph_slo_control_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { create(control, || SloControl::new(least, value, most)) }
}

/// Destroys the controller.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_slo_control_destroy(control: vmmgraph_slo_control_t) -> vmmgraph_status_t {
    destroy::<SloControl, _>(control)
}

/// Reports whether a first token (`first_late`) or a later one (`other_late`) of an iteration was
/// late. The size doubles if first tokens were late in three of the last five iterations since the
/// last decision, halves if later tokens were, and stays if both were. `change` receives
/// VMMGRAPH_SLO_*, `value` the new size; either may be null.
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
        // SAFETY: contract.
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
