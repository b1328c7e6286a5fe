//! Accounts: budgets in a tree, for tenants and models.

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

/// Never defined: a vmmgraph_account_t is a key, not an address.
pub struct vmmgraph_account {
    _private: (),
}

/// A budget in the device's tree, for a tenant or a model: what arenas, regions, elastic memory and rings below it hold counts toward it and toward
/// those above it. Calls with it are thread-safe.
pub type vmmgraph_account_t = *mut vmmgraph_account;

/// How to make an account. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_account_options_t {
    /// sizeof(vmmgraph_account_options_t).
    pub struct_size: usize,
    /// The account that it is below, of the same device; null: the device's.
    pub above: vmmgraph_account_t,
    /// The most that may count toward it; 0: no limit but those above.
    pub budget_bytes: u64,
    /// What it is sure to get, which counts toward those above whether it is used or not. Guaranteed only below one that has a budget.
    pub least_bytes: u64,
}

/// What counts toward an account now.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_account_stats_t {
    /// Set to sizeof(vmmgraph_account_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes of what is below it, of each at least what that is sure to get, and of what the driver is being asked for.
    pub charged_bytes: u64,
    /// Its byte budget; 0: none.
    pub budget_bytes: u64,
    /// Bytes that it is sure to get.
    pub least_bytes: u64,
}

/// An account, and the device that it keeps open.
pub(super) struct Budget {
    account: Account,
    device: Arc<Device>,
}

/// Runs `then` with the account behind a handle; null: with none, which is the device's.
pub(super) fn with_account<R>(
    handle: vmmgraph_account_t,
    then: impl FnOnce(Option<&Account>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let budget = if handle.is_null() { None } else { Some(get::<Budget, _>(handle)?) };
    then(budget.as_ref().map(|budget| &budget.account))
}

/// Makes an account, named by `label` in messages; others may have the same. `options` may be null. VMMGRAPH_ERROR_OVER_BUDGET if those above have no room
/// for its least. The account keeps the device open.
///
/// # Safety
/// `label` is null or a zero-terminated string; `options` is null or points to a struct whose struct_size is set; `account` is null or writable.
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

/// Ends the handle. What is below the account keeps it, with its limits as they are then.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_account_destroy(account: vmmgraph_account_t) -> vmmgraph_status_t {
    guard(|| remove::<Budget, _>(account).map(drop))
}

/// Sets its limits, as in its options. Nothing is taken away: with less than is held, every page that is missing is refused until enough
/// is given back; a least for which there is no room above holds too, and refuses others.
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

/// What counts toward it now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
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

/// As vmmgraph_device_add_reclaimer, for memory that counts toward this account: asked where its own budget is short, one above it or the device, and
/// not where only one below it is.
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
