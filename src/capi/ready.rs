//! Contents of a tag that a resume without waiting still copies.

use std::sync::Arc;

use super::arena::stream_of;
use super::guard::{Failure, guard, out};
use super::handle::{get, register, remove};
use super::status::vmmgraph_status_t;
use crate::Ready;
use crate::sync::Mutex;

/// Never defined: a vmmgraph_ready_t is a key, not an address.
pub struct vmmgraph_ready {
    _private: (),
}

/// The contents of one tag on their way after vmmgraph_device_resume_async, until it is destroyed. Calls with it are thread-safe.
pub type vmmgraph_ready_t = *mut vmmgraph_ready;

/// What a handle stands for.
pub(super) struct Shared(Mutex<Ready>);

/// Gives out one handle for each of `tags`, the same contents for the same tag.
///
/// # Safety
/// `to` is null or points to as many handles as there are tags.
pub(super) unsafe fn hand_out(ready: &[Ready], tags: &[&str], to: *mut vmmgraph_ready_t) {
    if to.is_null() {
        return;
    }
    for (index, tag) in tags.iter().enumerate() {
        let found = ready.iter().find(|ready| ready.tag() == *tag).cloned();
        let handle =
            found.map_or(std::ptr::null_mut(), |ready| register(Arc::new(Shared(Mutex::new(ready)))));
        // SAFETY: the caller's contract.
        unsafe { *to.add(index) = handle };
    }
}

fn with<T>(
    ready: vmmgraph_ready_t,
    act: impl FnOnce(&mut Ready) -> crate::error::Result<T>,
) -> Result<T, Failure> {
    let shared = get::<Shared, _>(ready)?;
    // On a copy: a call that waits keeps no other from asking.
    let mut ready = shared.0.lock().clone();
    Ok(act(&mut ready)?)
}

/// Whether the contents are there: 1, or 0.
///
/// # Safety
/// `done` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ready_done(ready: vmmgraph_ready_t, done: *mut i32) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let done = unsafe { out(done, "done") }?;
        *done = i32::from(with(ready, Ready::done)?);
        Ok(())
    })
}

/// Makes later work of a stream (CUstream or cudaStream_t) wait for the contents. Does not block. VMMGRAPH_ERROR_STREAM_CAPTURING while
/// the stream is being captured.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ready_before(
    ready: vmmgraph_ready_t,
    stream: *mut std::ffi::c_void,
) -> vmmgraph_status_t {
    guard(|| with(ready, |ready| ready.before(stream_of(stream))))
}

/// Blocks the caller until the contents are there.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ready_wait(ready: vmmgraph_ready_t) -> vmmgraph_status_t {
    guard(|| with(ready, Ready::wait))
}

/// Forgets the handle; the contents come all the same.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ready_destroy(ready: vmmgraph_ready_t) -> vmmgraph_status_t {
    guard(|| remove::<Shared, _>(ready).map(drop))
}
