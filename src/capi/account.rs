use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, out};
use super::handle::{get, register, remove};
use super::reclaimer::{asked, vmmgraph_reclaim_fn, vmmgraph_reclaimer_t};
use super::sized::{OutStruct, limit, options};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::Device;
use crate::pages::{Account, Limits};

pub struct vmmgraph_account {
    _private: (),
}

/// Account: a budget for a tenant or a model. Memory is charged to its account and all accounts
/// above.
pub type vmmgraph_account_t = *mut vmmgraph_account;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_account_options_t {
    pub struct_size: usize,
    /// Parent account on the same device; null: the device's account.
    pub above: vmmgraph_account_t,
    /// Limit in bytes.
    pub budget_bytes: u64,
    /// Guaranteed bytes, charged to the accounts above even if unused; needs an account with a
    /// limit above.
    pub least_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_account_stats_t {
    pub struct_size: usize,
    /// Bytes of this account and accounts below, each at least its guarantee, and memory being
    /// requested from the driver.
    pub charged_bytes: u64,
    pub budget_bytes: u64,
    pub least_bytes: u64,
}

/// Keeps the device open.
pub(super) struct Budget {
    account: Account,
    device: Arc<Device>,
}

/// `None` for null, the device's account.
pub(super) fn with_account<R>(
    handle: vmmgraph_account_t,
    then: impl FnOnce(Option<&Account>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let budget = if handle.is_null() { None } else { Some(get::<Budget, _>(handle)?) };
    then(budget.as_ref().map(|budget| &budget.account))
}

/// Creates an account; messages name it by `label`, which need not be unique. `options` may be
/// null. VMMGRAPH_ERROR_OVER_BUDGET if the accounts above have no room for the guarantee.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_account_create(
    device: vmmgraph_device_t,
    label: *const c_char,
    options: *const vmmgraph_account_options_t,
    account: *mut vmmgraph_account_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (label, to) = (unsafe { text(label, "label") }?, unsafe { out(account, "account") }?);
        let (mut above, mut limits) = (std::ptr::null_mut(), Limits::default());
        // SAFETY: contract.
        if let Some(given) = unsafe { self::options(options) }? {
            above = given.above;
            limits = Limits { most: limit(given.budget_bytes), least: given.least_bytes };
        }
        let account = with_account(above, |above| Ok(device.account(&label, above, limits)?))?;
        *to = register(Arc::new(Budget { account, device }));
        Ok(())
    })
}

/// Destroys the handle. Objects below the account keep it, with its current limits.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_account_destroy(account: vmmgraph_account_t) -> vmmgraph_status_t {
    guard(|| remove::<Budget, _>(account).map(drop))
}

/// Sets limit and guarantee. A guarantee beyond the room above also takes effect: other accounts
/// are then refused memory.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_account_set_limits(
    account: vmmgraph_account_t,
    budget_bytes: u64,
    least_bytes: u64,
) -> vmmgraph_status_t {
    guard(|| {
        let limits = Limits { most: limit(budget_bytes), least: least_bytes };
        get::<Budget, _>(account)?.account.set_limits(limits);
        Ok(())
    })
}

/// Writes the account's statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_account_stats(
    account: vmmgraph_account_t,
    stats: *mut vmmgraph_account_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let budget = get::<Budget, _>(account)?;
        // SAFETY: contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = budget.account.stats();
        stats.write(vmmgraph_account_stats_t {
            struct_size: stats.struct_size,
            charged_bytes: now.charged_bytes,
            budget_bytes: now.most_bytes.unwrap_or(0),
            least_bytes: now.least_bytes,
        });
        Ok(())
    })
}

/// As vmmgraph_device_add_reclaimer: called if the budget of this account, an account above or the
/// device is short.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_account_add_reclaimer(
    account: vmmgraph_account_t,
    reclaim: vmmgraph_reclaim_fn,
    cost: u64,
    user: *mut c_void,
    reclaimer: *mut vmmgraph_reclaimer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let budget = get::<Budget, _>(account)?;
        // SAFETY: contract.
        unsafe { asked(&budget.device, Some(budget.account.id()), (reclaim, cost, user), reclaimer) }
    })
}
