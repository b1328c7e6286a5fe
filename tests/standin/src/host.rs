//! Registered host memory and the checks of its copies.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::capture::{Target, table};
use crate::{Answer, Why};

static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Returns the number of registrations.
#[must_use]
pub fn registrations() -> u64 {
    REGISTERED.lock().len() as u64
}

/// Registers host memory.
///
/// # Errors
/// [`Why::Invalid`], [`Why::AlreadyRegistered`].
pub fn register(start: usize, len: usize) -> Answer {
    if start == 0 || len == 0 || start.checked_add(len).is_none() {
        return Err(Why::Invalid);
    }
    let mut registered = REGISTERED.lock();
    let before = registered.range(..start + len).next_back();
    if before.is_some_and(|(other, bytes)| other + bytes > start) {
        return Err(Why::AlreadyRegistered);
    }
    registered.insert(start, len);
    Ok(())
}

/// Ends a registration.
///
/// # Errors
/// [`Why::NotRegistered`].
pub fn unregister(start: usize) -> Answer {
    REGISTERED.lock().remove(&start).map(drop).ok_or(Why::NotRegistered)
}

/// Checks an asynchronous copy that this stand-in cannot capture.
///
/// # Errors
/// [`Why::CaptureUnsupported`] on a captured stream; as [`registered`].
pub fn check(start: usize, len: usize, target: Target) -> Answer {
    if table().enter(target)?.is_some() {
        return Err(Why::CaptureUnsupported);
    }
    registered(start, len).map(drop)
}

/// Returns true if the whole range is registered.
///
/// # Errors
/// [`Why::Invalid`] for null, and for a range across the end of a registration.
pub fn registered(start: usize, len: usize) -> Answer<bool> {
    let end = start.checked_add(len).filter(|_| start != 0).ok_or(Why::Invalid)?;
    let registered = REGISTERED.lock();
    let crosses = registered
        .iter()
        .any(|(at, bytes)| *at < end && at + bytes > start && !(*at <= start && end <= at + bytes));
    if crosses || len > isize::MAX as usize {
        return Err(Why::Invalid);
    }
    Ok(registered.range(..=start).next_back().is_some_and(|(at, bytes)| end <= at + bytes))
}
