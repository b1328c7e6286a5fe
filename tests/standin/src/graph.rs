//! Graphs, and the work that a stream can be given.

use std::sync::Arc;

use crate::capture::{Node, Nodes, Target, table};
use crate::state::device_at;
use crate::{Answer, Why, faults, host, refused};

/// Makes a graph executable; what a capture took over unmapped addresses must be mapped by now (measured on CUDA).
///
/// # Errors
/// [`Why::InvalidHandle`], [`Why::Invalid`].
pub fn instantiate(graph: u64) -> Answer<u64> {
    let mut table = table();
    let nodes = table.graphs.get(&graph).map(Arc::clone).ok_or(Why::InvalidHandle)?;
    if !nodes.mapped() {
        return Err(Why::Invalid);
    }
    let exec = table.next_handle();
    table.execs.insert(exec, nodes);
    Ok(exec)
}

/// Runs a graph on what is mapped now, or adds its nodes to the stream's capture.
///
/// # Errors
/// [`Why::IllegalAddress`] where a device would fault and lose the context; [`Why::InvalidHandle`].
pub fn launch(exec: u64, target: Target) -> Answer {
    let mut table = table();
    let nodes = table.execs.get(&exec).map(Arc::clone).ok_or(Why::InvalidHandle)?;
    if let Some(capture) = table.enter(target)? {
        table.push(capture, target, &nodes);
        return Ok(());
    }
    drop(table);
    nodes.run(faults::shuffled()).map_err(|_| Why::IllegalAddress)
}

/// Makes an executable that of another graph, if its nodes are of the same kinds with the same edges and its copies as long, which stands for
/// what a driver finds different in graphs that look alike.
///
/// # Errors
/// [`Why::NotUpdatable`], [`Why::Invalid`], [`Why::InvalidHandle`].
pub fn update(exec: u64, graph: u64) -> Answer {
    let mut table = table();
    let nodes = table.graphs.get(&graph).map(Arc::clone).ok_or(Why::InvalidHandle)?;
    let before = table.execs.get_mut(&exec).ok_or(Why::InvalidHandle)?;
    let alike = |pair: (&Node, &Node)| match pair {
        (Node::Copy { len: a, .. }, Node::Copy { len: b, .. })
        | (Node::Load { len: a, .. }, Node::Load { len: b, .. }) => a == b,
        (Node::Fill { .. }, Node::Fill { .. }) => true,
        _ => false,
    };
    if before.after != nodes.after || !before.all.iter().zip(&nodes.all).all(alike) {
        return Err(Why::NotUpdatable);
    }
    if !nodes.mapped() {
        return Err(Why::Invalid);
    }
    *before = nodes;
    Ok(())
}

/// Does work at once, or records it if the stream is captured and `recordable` allows that.
///
/// # Errors
/// What the work, the capture or `recordable` say.
pub fn submit(target: Target, node: Node, recordable: impl FnOnce() -> Answer) -> Answer {
    let mut table = table();
    match table.enter(target)? {
        Some(capture) => {
            recordable()?;
            table.push(capture, target, &Nodes::one(node));
            Ok(())
        }
        None => {
            drop(table);
            node.run()
        }
    }
}

/// Repeats a 32-bit value, in the stream's order. A capture takes it over any reserved addresses, mapped or not (measured on CUDA).
///
/// # Errors
/// As [`submit`].
pub fn fill(target: Target, at: u64, count: u64, value: u32) -> Answer {
    let len = count.checked_mul(4).ok_or(Why::Invalid)?;
    submit(target, Node::Fill { at, len, value }, || {
        let reserved = at.is_multiple_of(4) && device_at(at)?.1.memory.reserved(at, len);
        if reserved { Ok(()) } else { Err(Why::Invalid) }
    })
}

/// Copies within device memory, in the stream's order. A capture takes it over mapped addresses only (measured on CUDA).
///
/// # Errors
/// As [`submit`].
pub fn copy(target: Target, to: u64, from: u64, len: u64) -> Answer {
    submit(target, Node::Copy { to, from, len }, || {
        let both = [to, from]
            .into_iter()
            .try_fold(true, |both, at| Ok::<_, Why>(both && device_at(at)?.1.memory.accessible(at, len)))?;
        if both { Ok(()) } else { Err(Why::Invalid) }
    })
}

/// Copies from host memory, in the stream's order. A capture takes it from registered memory to mapped addresses only; what a driver does with
/// other host memory there was not measured.
///
/// # Errors
/// As [`submit`] and [`host::registered`].
///
/// # Safety
/// `from` is null or has `len` bytes, and keeps them as long as a graph that this was captured into may run.
pub unsafe fn load(target: Target, to: u64, from: *const u8, len: usize) -> Answer {
    let registered = host::registered(from as usize, len)?;
    let len = len as u64;
    submit(target, Node::Load { to, from: from as usize, len }, || {
        let taken = registered && device_at(to)?.1.memory.accessible(to, len);
        if taken { Ok(()) } else { Err(Why::Invalid) }
    })
}

/// Copies device bytes to the host, at once.
///
/// # Errors
/// [`Why::Invalid`].
///
/// # Safety
/// `to` is null or has room for `len` bytes.
pub unsafe fn read(to: *mut u8, from: u64, len: usize) -> Answer {
    if len == 0 {
        return Ok(());
    }
    if to.is_null() || len > isize::MAX as usize {
        return Err(Why::Invalid);
    }
    // SAFETY: not null, and then room for `len` bytes by the caller's contract.
    let into = unsafe { std::slice::from_raw_parts_mut(to, len) };
    device_at(from)?.1.memory.read(from, into).map_err(refused)
}

/// Copies host bytes to the device, at once.
///
/// # Errors
/// [`Why::Invalid`].
///
/// # Safety
/// `from` is null or has `len` bytes.
pub unsafe fn write(to: u64, from: *const u8, len: usize) -> Answer {
    if len == 0 {
        return Ok(());
    }
    if from.is_null() || len > isize::MAX as usize {
        return Err(Why::Invalid);
    }
    // SAFETY: not null, and then `len` bytes by the caller's contract.
    let bytes = unsafe { std::slice::from_raw_parts(from, len) };
    device_at(to)?.1.memory.write(to, bytes).map_err(refused)
}
