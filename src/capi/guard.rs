//! Wrapper of every C function: checks pointers, catches panics, and delivers log lines after all
//! locks are released.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::fork;
use super::log::Call;
use super::status::{
    VMMGRAPH_ERROR_INTERNAL, VMMGRAPH_ERROR_NULL_ARGUMENT, VMMGRAPH_OK, remember, remember_as,
    vmmgraph_status_t,
};
use crate::error::Error;

/// An error of the crate, or a mistake only possible in C.
pub(super) enum Failure {
    Error(Error),
    Status(vmmgraph_status_t, Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Runs the body of a C function. A closure, not a macro around the function, as cbindgen must see
/// the signature.
pub(super) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> vmmgraph_status_t {
    guard_closing(|| {}, body)
}

/// For functions without locks; also runs in a forked child, to explain refusals.
pub(super) fn guard_anywhere(body: impl FnOnce() -> Result<(), Failure>) -> vmmgraph_status_t {
    run(|| {}, body)
}

/// `guard_closing` for the bridge: bodies fail only with the crate's errors.
pub fn guarded(close: impl FnOnce(), body: impl FnOnce() -> crate::error::Result<()>) -> vmmgraph_status_t {
    guard_closing(close, || Ok(body()?))
}

/// Value owned by C++ through the bridge, dropped like a C function runs. In a forked child the
/// destructor does nothing: the resources belong to the parent.
pub struct GuardedDrop<T>(std::mem::ManuallyDrop<T>);

impl<T> GuardedDrop<T> {
    /// Takes the value.
    pub fn new(value: T) -> Self {
        Self(std::mem::ManuallyDrop::new(value))
    }
}

impl<T> std::ops::Deref for GuardedDrop<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for GuardedDrop<T> {
    fn drop(&mut self) {
        guard(|| {
            // SAFETY: runs once; the value is not used afterwards.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.0) };
            Ok(())
        });
    }
}

/// A panic also runs `close`, since it may leave inconsistent state (parking_lot's locks do not
/// poison).
pub(super) fn guard_closing(
    close: impl FnOnce(),
    body: impl FnOnce() -> Result<(), Failure>,
) -> vmmgraph_status_t {
    match fork::usable() {
        Ok(()) => run(close, body),
        Err(error) => remember(error),
    }
}

fn run(close: impl FnOnce(), body: impl FnOnce() -> Result<(), Failure>) -> vmmgraph_status_t {
    // First, so dropped last: all log lines of the body are delivered then.
    let _call = Call::begin();
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => VMMGRAPH_OK,
        Ok(Err(Failure::Error(error))) => remember(error),
        Ok(Err(Failure::Status(status, error))) => remember_as(status, error),
        Err(panic) => {
            let what = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a panic without a message".to_owned());
            // Neither the payload's destructor nor `close` may end the process.
            let _ = catch_unwind(AssertUnwindSafe(move || drop(panic)));
            let _ = catch_unwind(AssertUnwindSafe(close));
            remember_as(VMMGRAPH_ERROR_INTERNAL, Error::Internal { what })
        }
    }
}

pub(super) fn null(what: &'static str) -> Failure {
    let error = Error::InvalidArgument { what, value: 0, expected: "a pointer that is not null" };
    Failure::Status(VMMGRAPH_ERROR_NULL_ARGUMENT, error)
}

pub(super) fn not_null<T>(pointer: *const T, what: &'static str) -> Result<(), Failure> {
    if pointer.is_null() { Err(null(what)) } else { Ok(()) }
}

/// # Safety
/// The pointer is null, or valid for reads and writes while the reference lives.
pub(super) unsafe fn out<'a, T>(pointer: *mut T, what: &'static str) -> Result<&'a mut T, Failure> {
    // SAFETY: contract.
    unsafe { pointer.as_mut() }.ok_or_else(|| null(what))
}

/// # Safety
/// The pointer is null, or valid for reads of `count` items while the slice lives.
pub(super) unsafe fn items<'a, T>(
    pointer: *const T,
    count: usize,
    what: &'static str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    check_items(pointer, count, size_of::<T>(), what)?;
    // SAFETY: the caller's contract, within the size limit of a slice.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// # Safety
/// The pointer is null, or valid for exclusive reads and writes of `count` items while the slice
/// lives.
pub(super) unsafe fn items_mut<'a, T>(
    pointer: *mut T,
    count: usize,
    what: &'static str,
) -> Result<&'a mut [T], Failure> {
    if count == 0 {
        return Ok(&mut []);
    }
    check_items(pointer, count, size_of::<T>(), what)?;
    // SAFETY: as in `items`.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, count) })
}

/// Not null, and a possible size.
pub(super) fn check_items<T>(
    pointer: *const T,
    count: usize,
    each: usize,
    what: &'static str,
) -> Result<(), Failure> {
    if count.checked_mul(each).is_none_or(|bytes| bytes > isize::MAX as usize) {
        let expected = "within the address space";
        return Err(Error::InvalidArgument { what: "a count", value: count as i128, expected }.into());
    }
    not_null(pointer, what)
}

/// Copies at most `capacity` items.
pub(super) unsafe fn copy_items<T: Copy>(from: &[T], to: *mut T, capacity: usize) -> Result<(), Failure> {
    if capacity > 0 {
        not_null(to, "the place for the items")?;
        // SAFETY: `capacity` items by the caller's contract; the copy exceeds neither length.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len().min(capacity)) };
    }
    Ok(())
}

pub(super) fn pick<T: Copy>(what: &'static str, number: i32, all: &[T]) -> Result<T, Failure> {
    let found = usize::try_from(number).ok().and_then(|number| all.get(number).copied());
    let expected = "one of its constants in vmmgraph.h";
    found.ok_or_else(|| Error::InvalidArgument { what, value: number.into(), expected }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_status_and_closes_what_it_may_have_left_half_done() {
        let mut closed = false;
        let status = guard_closing(|| closed = true, || panic!("planted {}", 1));
        assert_eq!((status, closed), (VMMGRAPH_ERROR_INTERNAL, true));

        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("planted in a payload's destructor");
            }
        }
        let status = guard_closing(|| panic!("planted in close"), || std::panic::panic_any(Bomb));
        assert_eq!(status, VMMGRAPH_ERROR_INTERNAL);
    }
}
