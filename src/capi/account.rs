//! Accounts in C: a tree of budgets for tenants and models.

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

/// Opaque; never defined.
pub struct vmmgraph_account {
    _private: (),
}

/// Account: a budget in the device's account tree, for a tenant or a model. Memory of arenas,
/// regions, elastic memory and rings is charged to their account and to all accounts above.
pub type vmmgraph_account_t = *mut vmmgraph_account;

/// Options of vmmgraph_account_create.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_account_options_t {
    /// sizeof(vmmgraph_account_options_t).
    pub struct_size: usize,
    /// Parent account on the same device; null: the device's account.
    pub above: vmmgraph_account_t,
    /// Limit in bytes; 0: none.
    pub budget_bytes: u64,
    /// Guaranteed bytes, charged to the accounts above whether used or not. The guarantee holds
    /// only below an account with a limit.
    pub least_bytes: u64,
}

/// Statistics of an account.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_account_stats_t {
    /// Set to sizeof(vmmgraph_account_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes charged: memory of the account and of accounts below, each at least its guaranteed
    /// bytes, and memory being requested from the driver.
    pub charged_bytes: u64,
    /// Byte budget; 0: none.
    pub budget_bytes: u64,
    /// Guaranteed bytes.
    pub least_bytes: u64,
}

/// An account, and a reference which keeps the device open.
pub(super) struct Budget {
    account: Account,
    device: Arc<Device>,
}

/// Runs `then` with the account of a handle; `None` for null, which is the device's account.
pub(super) fn with_account<R>(
    handle: vmmgraph_account_t,
    then: impl FnOnce(Option<&Account>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let budget = if handle.is_null() { None } else { Some(get::<Budget, _>(handle)?) };
    then(budget.as_ref().map(|budget| &budget.account))
}

/// Creates an account. Messages name the account by `label`, which need not be unique. `options`
/// may be null. VMMGRAPH_ERROR_OVER_BUDGET if the accounts above have no room for the guaranteed
/// bytes.
///
/// # Safety
/// `label` is null or a zero-terminated string; `options` is null or points to a struct with
/// struct_size set; `account` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_account_create(
    device: vmmgraph_device_t,
    label: *const c_char,
    options: *const vmmgraph_account_options_t,
    account: *mut vmmgraph_account_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (label, to) = (unsafe { text(label, "label") }?, unsafe { out(account, "account") }?);
        let (mut above, mut limits) = (std::ptr::null_mut(), Limits::default());
        // SAFETY: the caller's contract.
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

/// Sets the limit and the guaranteed bytes, as in vmmgraph_account_options_t. A guarantee beyond
/// the room of the accounts above also takes effect: other accounts are then refused memory.
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

/// Writes the account's current statistics.
///
/// # Safety
/// `stats` is null or points to a struct with struct_size set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_account_stats(
    account: vmmgraph_account_t,
    stats: *mut vmmgraph_account_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let budget = get::<Budget, _>(account)?;
        // SAFETY: the caller's contract.
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

/// As vmmgraph_device_add_reclaimer, for memory charged to this account. Called if the budget of
/// this account, of an account above or of the device is short, and not if only a budget below is.
///
/// # Safety
/// As vmmgraph_device_add_reclaimer.
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
        // SAFETY: the caller's contract.
        unsafe { asked(&budget.device, Some(budget.account.id()), (reclaim, cost, user), reclaimer) }
    })
}
