//! What stands around every C function: null checks, struct sizes, and the end of every panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::fork;
use super::status::{
    VMMGRAPH_ERROR_INTERNAL, VMMGRAPH_ERROR_NULL_ARGUMENT, VMMGRAPH_ERROR_STRUCT_SIZE, VMMGRAPH_OK, remember,
    remember_as, vmmgraph_status_t,
};
use crate::error::Error;

/// Why a C function fails: one of the crate's errors, or a mistake that only C can make.
pub(super) enum Failure {
    Error(Error),
    Status(vmmgraph_status_t, Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Runs a C function's body. Inside the function, not a macro around it, so that cbindgen sees the signature.
pub(super) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> vmmgraph_status_t {
    guard_closing(|| {}, body)
}

/// As [`guard`], for what takes no lock: also in a forked child, where it tells why everything else is refused.
pub(super) fn guard_anywhere(body: impl FnOnce() -> Result<(), Failure>) -> vmmgraph_status_t {
    run(|| {}, body)
}

/// [`guard_closing`] for the bridge, whose bodies fail with the crate's errors only.
#[cfg(feature = "bridge")]
pub(crate) fn guarded(
    close: impl FnOnce(),
    body: impl FnOnce() -> crate::error::Result<()>,
) -> vmmgraph_status_t {
    guard_closing(close, || Ok(body()?))
}

/// As [`guard`]; a panic also runs `close`, since the state it leaves behind is unknown (parking_lot's locks do not poison).
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
            // Neither the payload's destructor nor closing may end the process.
            let _ = catch_unwind(AssertUnwindSafe(move || drop(panic)));
            let _ = catch_unwind(AssertUnwindSafe(close));
            remember_as(VMMGRAPH_ERROR_INTERNAL, Error::Internal { what })
        }
    }
}

/// The place that the argument `what` points to.
///
/// # Safety
/// The pointer is null or good for reads and writes while the reference lives.
pub(super) unsafe fn out<'a, T>(pointer: *mut T, what: &'static str) -> Result<&'a mut T, Failure> {
    let null = || {
        let error = Error::InvalidArgument { what, value: 0, expected: "a pointer that is not null" };
        Failure::Status(VMMGRAPH_ERROR_NULL_ARGUMENT, error)
    };
    // SAFETY: the caller's contract.
    unsafe { pointer.as_mut() }.ok_or_else(null)
}

/// Whether a struct's size is the one this library knows.
pub(super) fn check_size<T>(struct_size: usize) -> Result<(), Failure> {
    if struct_size == size_of::<T>() {
        return Ok(());
    }
    let error = Error::InvalidArgument {
        what: "struct_size",
        value: struct_size as i128,
        expected: "the size of the struct in this version of vmmgraph.h",
    };
    Err(Failure::Status(VMMGRAPH_ERROR_STRUCT_SIZE, error))
}

/// The options a pointer points to, or the default ones for null.
///
/// # Safety
/// The pointer is null or points to a `T` that begins with its size.
pub(super) unsafe fn options<T: Copy>(pointer: *const T) -> Result<Option<T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: every options struct begins with its size, a usize, by the caller's contract; nothing else is read before the
    // size is known to be right.
    check_size::<T>(unsafe { *pointer.cast::<usize>() })?;
    // SAFETY: the struct is as long as a `T`.
    Ok(Some(unsafe { *pointer }))
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
