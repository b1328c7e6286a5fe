//! Graphs, and the work that a stream can be given: filling and copying.

use std::ffi::{c_uchar, c_uint, c_void};
use std::sync::Arc;

use crate::capture::{Node, Target, table, target};
use crate::code::{Answer, Code, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, refused};
use crate::state::{current, device_at, devices};
use crate::{answer, give};

/// The legacy stream, on which calls without a stream work.
const LEGACY: *mut c_void = std::ptr::null_mut();

/// Makes a graph executable; its memsets must be over mapped addresses by then (measured).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    out: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> Code {
    answer(|| {
        current()?;
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut table = table();
        let nodes = table.graphs.get(&(graph as u64)).map(Arc::clone).ok_or(INVALID_HANDLE)?;
        // What a capture took over unmapped addresses must be mapped by now (measured).
        if !nodes.iter().all(|node| node.mapped()) {
            return Err(INVALID_VALUE);
        }
        let exec = table.next();
        table.execs.insert(exec, nodes);
        // SAFETY: the caller's contract.
        unsafe { give(out, exec as *mut c_void) }
    })
}

/// Runs a graph on what is mapped now, or adds its nodes to the stream's capture.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| {
        let target = target(stream)?;
        let mut table = table();
        let nodes = table.execs.get(&(exec as u64)).map(Arc::clone).ok_or(INVALID_HANDLE)?;
        if let Some(capture) = table.enter(target)? {
            table.push(capture, target, &nodes);
            return Ok(());
        }
        drop(table);
        // A GPU would fault here and lose the context; the stand-in only says so.
        nodes.iter().try_for_each(|node| node.run().map_err(|_| ILLEGAL_ADDRESS))
    })
}

/// Destroys a graph; executables made of it live on.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: *mut c_void) -> Code {
    answer(|| {
        devices()?;
        table().graphs.remove(&(graph as u64)).map(drop).ok_or(INVALID_HANDLE)
    })
}

/// Destroys an executable graph.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(exec: *mut c_void) -> Code {
    answer(|| {
        devices()?;
        table().execs.remove(&(exec as u64)).map(drop).ok_or(INVALID_HANDLE)
    })
}

/// Does work at once, or records it if the stream is captured and `recordable` allows that.
fn submit(stream: *mut c_void, node: Node, recordable: impl FnOnce() -> Answer) -> Answer {
    current()?;
    let target = target(stream)?;
    let mut table = table();
    match table.enter(target)? {
        Some(capture) => {
            recordable()?;
            table.push(capture, target, &[node]);
            Ok(())
        }
        None => {
            drop(table);
            node.run()
        }
    }
}

/// Repeats a 32-bit value, in the stream's order. A capture takes it over any reserved addresses, mapped or not (measured).
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: *mut c_void) -> Code {
    answer(|| {
        let len = (count as u64).checked_mul(4).ok_or(INVALID_VALUE)?;
        submit(stream, Node::Fill { at, len, value }, || {
            let reserved = at.is_multiple_of(4) && device_at(at)?.1.memory.reserved(at, len);
            if reserved { Ok(()) } else { Err(INVALID_VALUE) }
        })
    })
}

/// Copies within device memory, in the stream's order. A capture takes it over mapped addresses only (measured).
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) -> Code {
    answer(|| {
        let len = len as u64;
        submit(stream, Node::Copy { to, from, len }, || {
            let both = [to, from].into_iter().try_fold(true, |both, at| {
                Ok::<_, Code>(both && device_at(at)?.1.memory.accessible(at, len))
            })?;
            if both { Ok(()) } else { Err(INVALID_VALUE) }
        })
    })
}

/// Refuses what works on the legacy stream while that is not to be used.
fn legacy() -> Answer {
    let target: Target = target(LEGACY)?;
    table().enter(target).map(drop)
}

/// Repeats a 32-bit value.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(at: u64, value: c_uint, count: usize) -> Code {
    cuMemsetD32Async(at, value, count, LEGACY)
}

/// Repeats a byte.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(at: u64, value: c_uchar, count: usize) -> Code {
    answer(|| {
        legacy()?;
        let memory = &device_at(at)?.1.memory;
        if !memory.accessible(at, count as u64) {
            return Err(INVALID_VALUE);
        }
        const STEP: usize = 1 << 20;
        let bytes = vec![value; STEP.min(count)];
        (0..count).step_by(STEP).try_for_each(|done| {
            memory.write(at + done as u64, &bytes[..STEP.min(count - done)]).map_err(refused)
        })
    })
}

/// Copies to host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> Code {
    answer(|| {
        legacy()?;
        if len == 0 {
            return Ok(());
        }
        if to.is_null() || len > isize::MAX as usize {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and then room for `len` bytes by the caller's contract.
        let into = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), len) };
        device_at(from)?.1.memory.read(from, into).map_err(refused)
    })
}

/// Copies from host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> Code {
    answer(|| {
        legacy()?;
        if len == 0 {
            return Ok(());
        }
        if from.is_null() || len > isize::MAX as usize {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and then `len` bytes by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
        device_at(to)?.1.memory.write(to, bytes).map_err(refused)
    })
}

/// Copies within device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) -> Code {
    cuMemcpyDtoDAsync_v2(to, from, len, LEGACY)
}
