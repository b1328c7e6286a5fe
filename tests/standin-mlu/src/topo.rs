//! Graphs, called TaskTopo, and their executables, called entities.

use std::ffi::{c_char, c_void};

use standin::capture::{Target, table};
use standin::{Why, give, graph};

use crate::answer;
use crate::code::Code;
use crate::state::target;

/// Instantiates a graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnTaskTopoInstantiate(
    entity: *mut *mut c_void,
    topo: *mut c_void,
    error_node: *mut *mut c_void,
    log: *mut c_char,
    log_bytes: usize,
) -> Code {
    answer(|| {
        if entity.is_null() || (log.is_null() && log_bytes > 0) {
            return Err(Why::Invalid);
        }
        if !error_node.is_null() {
            // SAFETY: not null; writable by the caller's contract.
            unsafe { error_node.write(std::ptr::null_mut()) };
        }
        let made = graph::instantiate(topo as u64)?;
        // SAFETY: the caller's contract.
        unsafe { give(entity, made as *mut c_void) }
    })
}

/// Runs an entity on the current mappings; a queue knows its context.
#[unsafe(no_mangle)]
pub extern "C" fn cnTaskTopoEntityInvoke(entity: *mut c_void, queue: *mut c_void) -> Code {
    answer(|| {
        let target = if queue.is_null() { target(queue)? } else { Target::Created(queue as u64) };
        graph::launch(entity as u64, target)
    })
}

/// Destroys a graph; its entities live on.
#[unsafe(no_mangle)]
pub extern "C" fn cnTaskTopoDestroy(topo: *mut c_void) -> Code {
    answer(|| table().graphs.remove(&(topo as u64)).map(drop).ok_or(Why::InvalidHandle))
}

/// Destroys an entity.
#[unsafe(no_mangle)]
pub extern "C" fn cnTaskTopoEntityDestroy(entity: *mut c_void) -> Code {
    answer(|| table().execs.remove(&(entity as u64)).map(drop).ok_or(Why::InvalidHandle))
}
