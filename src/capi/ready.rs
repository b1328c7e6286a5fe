use std::sync::Arc;

use super::arena::stream_of;
use super::guard::{Failure, guard, out};
use super::handle::{get, register, remove};
use super::status::vmmgraph_status_t;
use crate::Ready;
use crate::sync::Mutex;

pub struct vmmgraph_ready {
    _private: (),
}

/// Restored contents of one tag after vmmgraph_device_resume_async.
pub type vmmgraph_ready_t = *mut vmmgraph_ready;

pub(super) struct Shared(Mutex<Ready>);

/// Equal tags get the same contents.
pub(super) unsafe fn hand_out(ready: &[Ready], tags: &[&str], to: *mut vmmgraph_ready_t) {
    if to.is_null() {
        return;
    }
    for (index, tag) in tags.iter().enumerate() {
        let found = ready.iter().find(|ready| ready.tag() == *tag).cloned();
        let handle =
            found.map_or(std::ptr::null_mut(), |ready| register(Arc::new(Shared(Mutex::new(ready)))));
        // SAFETY: contract.
        unsafe { *to.add(index) = handle };
    }
}

fn with<T>(
    ready: vmmgraph_ready_t,
    act: impl FnOnce(&mut Ready) -> crate::error::Result<T>,
) -> Result<T, Failure> {
    let shared = get::<Shared, _>(ready)?;
    // On a copy: a waiting call must not block other callers.
    let mut ready = shared.0.lock().clone();
    Ok(act(&mut ready)?)
}

/// Sets `done` to 1 if the contents are restored, else 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ready_done(ready: vmmgraph_ready_t, done: *mut i32) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let done = unsafe { out(done, "done") }?;
        *done = i32::from(with(ready, Ready::done)?);
        Ok(())
    })
}

/// Makes later work of `stream` wait for the contents. Does not block.
/// VMMGRAPH_ERROR_STREAM_CAPTURING if the stream is under capture.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ready_before(
    ready: vmmgraph_ready_t,
    stream: *mut std::ffi::c_void,
) -> vmmgraph_status_t {
    guard(|| with(ready, |ready| ready.before(stream_of(stream))))
}

/// Blocks until the contents are restored.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ready_wait(ready: vmmgraph_ready_t) -> vmmgraph_status_t {
    guard(|| with(ready, Ready::wait))
}

/// Destroys the handle. The restore continues.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ready_destroy(ready: vmmgraph_ready_t) -> vmmgraph_status_t {
    guard(|| remove::<Shared, _>(ready).map(drop))
}
