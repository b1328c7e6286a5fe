//! The two plain functions that torch's `CUDAPluggableAllocator` can load by name from the shared library.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::arena::{stream_of, vmmgraph_arena_t};
use super::guard::{guard, guard_closing};
use super::handle::get;
use super::log::start;
use super::status::vmmgraph_status_t;
use crate::error::{Error, Result};
use crate::{Address, Device, DriverChoice, HostOptions, Options, SharedVmmAllocator};

type Arenas = Mutex<HashMap<i32, Arc<SharedVmmAllocator>>>;

fn arenas() -> &'static Arenas {
    static ARENAS: OnceLock<Arenas> = OnceLock::new();
    ARENAS.get_or_init(Arenas::default)
}

/// The arena of a device, made with default options at the first need.
fn arena_of(device: i32) -> Result<Arc<SharedVmmAllocator>> {
    if let Some(arena) = arenas().lock().get(&device) {
        return Ok(Arc::clone(arena));
    }
    start();
    // Outside the lock: opening a device starts a driver. If two threads do it, the first to finish is kept.
    let opened = Device::open(DriverChoice::Auto, device, HostOptions::default())?;
    let arena = Arc::new(SharedVmmAllocator::new(&opened, &Options::default())?);
    Ok(Arc::clone(arenas().lock().entry(device).or_insert(arena)))
}

/// Closes a device's arena after a panic.
fn close(device: i32) {
    if let Some(arena) = arenas().lock().get(&device) {
        arena.close();
    }
}

/// Makes `arena` the one that vmmgraph_torch_alloc uses on its device, in place of a default one. It stays so, also after its
/// handle is destroyed, until another takes its place. Null: the next call makes a default one on device `device` again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_torch_set_arena(device: i32, arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    guard(|| {
        let replaced = if arena.is_null() {
            arenas().lock().remove(&device)
        } else {
            let arena = get::<SharedVmmAllocator, _>(arena)?;
            let ordinal = arena.device().driver().info().ordinal;
            if ordinal != device {
                let expected = "the device of the arena";
                return Err(
                    Error::InvalidArgument { what: "device", value: i128::from(device), expected }.into()
                );
            }
            arenas().lock().insert(device, arena)
        };
        // Here, not under the lock: the last reference unmaps.
        drop(replaced);
        Ok(())
    })
}

/// Allocates in the current space of the device's arena: the `alloc_fn` of torch's CUDAPluggableAllocator. Null, with
/// vmmgraph_last_error set, if that fails; torch makes its own out-of-memory error of it.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_torch_alloc(size: isize, device: i32, stream: *mut c_void) -> *mut c_void {
    let mut block = std::ptr::null_mut();
    guard_closing(
        || close(device),
        || {
            // A negative size becomes one beyond every limit.
            block = arena_of(device)?.allocate(size as u64, stream_of(stream))?.0 as *mut c_void;
            Ok(())
        },
    );
    block
}

/// Frees such a block: the `free_fn` of torch's CUDAPluggableAllocator. A failure is kept for vmmgraph_last_error and logged.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_torch_free(block: *mut c_void, _size: isize, device: i32, _stream: *mut c_void) {
    if block.is_null() {
        return;
    }
    let body = || {
        let found = arenas().lock().get(&device).cloned();
        let freed = found
            .ok_or(Error::ForeignPointer { address: Address(block as u64) })
            .and_then(|arena| arena.deallocate(Address(block as u64)));
        freed
            .inspect_err(|error| tracing::warn!(%error, device, "torch freed something that is not ours"))?;
        Ok(())
    };
    guard_closing(|| close(device), body);
}
