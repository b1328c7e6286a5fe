//! An engine that is asked for memory.

use std::ffi::c_void;
use std::sync::Arc;

use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, null, out};
use super::handle::{get, register, remove};
use super::status::vmmgraph_status_t;
use crate::Device;
use crate::pages::{AccountId, Reclaimer};

/// Never defined: a vmmgraph_reclaimer_t is a key, not an address.
pub struct vmmgraph_reclaimer {
    _private: (),
}

/// A function that is asked for memory, until it is destroyed.
pub type vmmgraph_reclaimer_t = *mut vmmgraph_reclaimer;

/// Gives back what it can of `bytes` that are missing, and returns how many bytes that was. Must not throw.
pub type vmmgraph_reclaim_fn = Option<unsafe extern "C" fn(bytes: u64, user: *mut c_void) -> u64>;

/// A C function that is asked.
pub(super) struct Asked {
    reclaim: unsafe extern "C" fn(u64, *mut c_void) -> u64,
    user: *mut c_void,
    account: Option<AccountId>,
    cost: u64,
}

// SAFETY: the caller of vmmgraph_device_add_reclaimer promises that the function may be called with `user` from any thread.
unsafe impl Send for Asked {}
// SAFETY: as above.
unsafe impl Sync for Asked {}

impl Reclaimer for Asked {
    fn reclaim(&self, bytes: u64) -> u64 {
        // SAFETY: the caller of vmmgraph_device_add_reclaimer promised that it may be called so.
        unsafe { (self.reclaim)(bytes, self.user) }
    }

    fn account(&self) -> Option<AccountId> {
        self.account
    }

    fn cost(&self) -> u64 {
        self.cost
    }
}

/// Has a C function asked for memory, of an account or of any of the device.
///
/// # Safety
/// That of vmmgraph_device_add_reclaimer.
pub(super) unsafe fn asked(
    device: &Arc<Device>,
    account: Option<AccountId>,
    (reclaim, cost, user): (vmmgraph_reclaim_fn, u64, *mut c_void),
    reclaimer: *mut vmmgraph_reclaimer_t,
) -> Result<(), Failure> {
    let reclaim = reclaim.ok_or_else(|| null("reclaim"))?;
    // SAFETY: the caller's contract.
    let reclaimer = unsafe { out(reclaimer, "reclaimer") }?;
    let asked = Arc::new(Asked { reclaim, user, account, cost });
    let known: Arc<dyn Reclaimer> = asked.clone();
    device.add_reclaimer(&known);
    *reclaimer = register(asked);
    Ok(())
}

/// Asks `reclaim` for memory when the device or its budget is short, before a call fails: for an engine's caches, prefixes of prompts, idle models. Not
/// where the budget of an account below it, an arena's, a region's, is, since only memory of that would help: see vmmgraph_account_add_reclaimer. It is told of all that the call lacks, in bytes,
/// and may be called again for the same call as long as somebody gave something: eight times at most, and for a resume until its deadline.
///
/// It is called from whichever thread runs short, by several at once, with no lock of the library's held, also while that thread captures: so it must not
/// synchronize with the device there. It may call every function: shrink a cache, free blocks, destroy spaces and regions, pause other models, also one
/// that another thread is resuming (it is paused while that thread is short of memory); what runs short on its thread meanwhile asks nobody. What it gives back must have come to the library's device: memory of torch's or of cudaMalloc counts where it went
/// back to the driver.
///
/// Those that cost least are asked first, until one gave enough: 0 are what regions and elastic memory do not use any more, 1 are addresses kept for eager work.
///
/// # Safety
/// The function may be called with `user` from any thread until vmmgraph_reclaimer_destroy and the calls that were under way then have
/// returned; `reclaimer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_add_reclaimer(
    device: vmmgraph_device_t,
    reclaim: vmmgraph_reclaim_fn,
    cost: u64,
    user: *mut c_void,
    reclaimer: *mut vmmgraph_reclaimer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        unsafe { asked(&device, None, (reclaim, cost, user), reclaimer) }
    })
}

/// The function is asked no more, but by calls that are under way.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_reclaimer_destroy(reclaimer: vmmgraph_reclaimer_t) -> vmmgraph_status_t {
    guard(|| remove::<Asked, _>(reclaimer).map(drop))
}
