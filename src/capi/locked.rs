//! Handles of plain objects behind a lock.

use std::sync::Arc;

use super::guard::{Failure, guard, out};
use super::handle::{Handled, get, register, remove};
use super::status::vmmgraph_status_t;
use crate::error::Result as Made;
use crate::sync::Mutex;

pub(super) unsafe fn create<T, P>(place: *mut *mut P, make: impl FnOnce() -> Made<T>) -> vmmgraph_status_t
where
    Mutex<T>: Handled,
{
    guard(|| {
        // SAFETY: contract.
        let place = unsafe { out(place, "the new handle") }?;
        *place = register(Arc::new(Mutex::new(make()?)));
        Ok(())
    })
}

pub(super) fn destroy<T, P>(handle: *mut P) -> vmmgraph_status_t
where
    Mutex<T>: Handled,
{
    guard(|| remove::<Mutex<T>, _>(handle).map(drop))
}

pub(super) fn with<T, P, R>(handle: *mut P, act: impl FnOnce(&mut T) -> R) -> Result<R, Failure>
where
    Mutex<T>: Handled,
{
    Ok(act(&mut get::<Mutex<T>, _>(handle)?.lock()))
}
