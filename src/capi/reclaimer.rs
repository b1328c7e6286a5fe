use std::ffi::c_void;
use std::sync::Arc;

use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, null, out};
use super::handle::{get, register, remove};
use super::status::vmmgraph_status_t;
use crate::Device;
use crate::pages::{AccountId, Reclaimer};

pub struct vmmgraph_reclaimer {
    _private: (),
}

/// Reclaimer: a function called when memory is short, until destroyed.
pub type vmmgraph_reclaimer_t = *mut vmmgraph_reclaimer;

/// Releases as many of the `bytes` bytes missing as possible, and returns the number released.
pub type vmmgraph_reclaim_fn = Option<unsafe extern "C" fn(bytes: u64, user: *mut c_void) -> u64>;

pub(super) struct Asked {
    reclaim: unsafe extern "C" fn(u64, *mut c_void) -> u64,
    user: *mut c_void,
    account: Option<AccountId>,
    cost: u64,
}

// SAFETY: the caller of vmmgraph_device_add_reclaimer permits calls from any thread.
unsafe impl Send for Asked {}
// SAFETY: as above.
unsafe impl Sync for Asked {}

impl Reclaimer for Asked {
    fn reclaim(&self, bytes: u64) -> u64 {
        // SAFETY: the caller of vmmgraph_device_add_reclaimer permits this call.
        unsafe { (self.reclaim)(bytes, self.user) }
    }

    fn account(&self) -> Option<AccountId> {
        self.account
    }

    fn cost(&self) -> u64 {
        self.cost
    }
}

pub(super) unsafe fn asked(
    device: &Arc<Device>,
    account: Option<AccountId>,
    (reclaim, cost, user): (vmmgraph_reclaim_fn, u64, *mut c_void),
    reclaimer: *mut vmmgraph_reclaimer_t,
) -> Result<(), Failure> {
    let reclaim = reclaim.ok_or_else(|| null("reclaim"))?;
    // SAFETY: contract.
    let reclaimer = unsafe { out(reclaimer, "reclaimer") }?;
    let asked = Arc::new(Asked { reclaim, user, account, cost });
    let known: Arc<dyn Reclaimer> = asked.clone();
    device.add_reclaimer(&known);
    *reclaimer = register(asked);
    Ok(())
}

/// Adds a reclaimer, for an engine with a cache, prompt prefixes or idle models to drop. Before a
/// call fails, `reclaim` is called with all the memory missing if the device or its budget is
/// short; for the budget of an account below, see vmmgraph_account_add_reclaimer. For one call it
/// runs at most eight times while memory is released; for a resume, until the deadline. Any thread
/// short of memory calls the function, several at once, also during a capture: it must not
/// synchronize with the device then. It may shrink a cache, free blocks, destroy spaces and
/// regions, and pause other models, even one which another thread is resuming (still paused while
/// short of memory). A shortage on the thread meanwhile calls no reclaimer. Memory of torch or
/// cudaMalloc counts once returned to the driver. Reclaimers run by `cost`, lowest first, until
/// enough is released. Cost 0 is unused memory of regions and elastic memory; cost 1 is addresses
/// kept for eager work.
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
        // SAFETY: contract.
        unsafe { asked(&device, None, (reclaim, cost, user), reclaimer) }
    })
}

/// Destroys the reclaimer.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_reclaimer_destroy(reclaimer: vmmgraph_reclaimer_t) -> vmmgraph_status_t {
    guard(|| remove::<Asked, _>(reclaimer).map(drop))
}
