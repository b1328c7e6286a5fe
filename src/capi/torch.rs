//! Functions for torch's `CUDAPluggableAllocator`, loaded by name from the shared library.

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

/// The first call creates one with default options.
fn arena_of(device: i32) -> Result<Arc<SharedVmmAllocator>> {
    if let Some(arena) = arenas().lock().get(&device) {
        return Ok(Arc::clone(arena));
    }
    start();
    // Outside the lock: opening a device starts a driver. The first thread to finish wins.
    let opened = Device::open(DriverChoice::Auto, device, HostOptions::default())?;
    let arena = Arc::new(SharedVmmAllocator::new(&opened, &Options::default())?);
    Ok(Arc::clone(arenas().lock().entry(device).or_insert(arena)))
}

fn close(device: i32) {
    if let Some(arena) = arenas().lock().get(&device) {
        arena.close();
    }
}

/// Sets the arena that vmmgraph_torch_alloc uses on device `device`, which must be the arena's
/// device, and keeps the arena alive. Null: the next allocation creates an arena with default
/// options.
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
        // Outside the lock: dropping the last reference unmaps memory.
        drop(replaced);
        Ok(())
    })
}

/// Allocates `size` bytes in the current space of the device's arena: the `alloc_fn` of torch's
/// CUDAPluggableAllocator. Returns null on failure, with vmmgraph_last_error set; torch then
/// reports out of memory.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_torch_alloc(size: isize, device: i32, stream: *mut c_void) -> *mut c_void {
    let mut block = std::ptr::null_mut();
    guard_closing(
        || close(device),
        || {
            // A negative size becomes a number beyond every limit.
            block = arena_of(device)?.allocate(size as u64, stream_of(stream))?.0 as *mut c_void;
            Ok(())
        },
    );
    block
}

/// Frees a block of vmmgraph_torch_alloc: the `free_fn` of torch's CUDAPluggableAllocator. A
/// failure is logged and kept for vmmgraph_last_error.
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
        freed.inspect_err(
            |error| tracing::warn!(%error, device, "torch freed an address without a block of this library"),
        )?;
        Ok(())
    };
    guard_closing(|| close(device), body);
}
