//! Graphs and stream work.

use std::sync::Arc;

use crate::capture::{Executable, Node, Nodes, Target, table};
use crate::state::device_at;
use crate::{Answer, Why, faults, host, refused};

/// Instantiates a graph. Work captured over unmapped addresses must be mapped by now (measured on
/// CUDA).
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
    table.execs.insert(exec, Executable { nodes, of: graph });
    Ok(exec)
}

/// Runs a graph on the current mappings, or adds its nodes to the stream's capture.
///
/// # Errors
/// [`Why::IllegalAddress`] where a device would fault and lose the context; [`Why::InvalidHandle`].
pub fn launch(exec: u64, target: Target) -> Answer {
    let mut table = table();
    let nodes = table.execs.get(&exec).map(|exec| Arc::clone(&exec.nodes)).ok_or(Why::InvalidHandle)?;
    if let Some(capture) = table.enter(target)? {
        table.push(capture, target, &nodes);
        return Ok(());
    }
    drop(table);
    nodes.run(faults::shuffled()).map_err(|_| Why::IllegalAddress)
}

/// Updates an executable from a graph with equal kinds of nodes, edges and lengths of copies: a
/// stand-in for the driver's own criteria.
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
    if before.nodes.after != nodes.after || !before.nodes.all.iter().zip(&nodes.all).all(alike) {
        return Err(Why::NotUpdatable);
    }
    if !nodes.mapped() {
        return Err(Why::Invalid);
    }
    *before = Executable { nodes, of: graph };
    Ok(())
}

/// Changes a host copy of an executable of the node's graph. Submitted launches keep the old copy.
fn change(exec: u64, (graph, place): (u64, usize), change: impl FnOnce(&mut Nodes) -> Answer) -> Answer {
    let mut table = table();
    if !table.graphs.contains_key(&graph) {
        return Err(Why::InvalidHandle);
    }
    let exec = table.execs.get_mut(&exec).ok_or(Why::InvalidHandle)?;
    if exec.of != graph || !matches!(exec.nodes.all.get(place), Some(Node::Load { .. })) {
        return Err(Why::Invalid);
    }
    change(Arc::make_mut(&mut exec.nodes))
}

/// Changes a host copy: from registered memory to mapped addresses, not empty.
///
/// # Errors
/// [`Why::Invalid`], [`Why::InvalidHandle`].
///
/// # Safety
/// As [`load`].
pub unsafe fn set_load(exec: u64, node: (u64, usize), to: u64, from: *const u8, len: usize) -> Answer {
    let taken = len > 0
        && host::registered(from as usize, len)?
        && device_at(to)?.1.memory.accessible(to, len as u64);
    change(exec, node, |nodes| {
        if !taken {
            return Err(Why::Invalid);
        }
        nodes.all[node.1] = Node::Load { to, from: from as usize, len: len as u64 };
        Ok(())
    })
}

/// Enables or disables a copy in later launches.
///
/// # Errors
/// [`Why::Invalid`], [`Why::InvalidHandle`].
pub fn enable(exec: u64, node: (u64, usize), enabled: bool) -> Answer {
    change(exec, node, |nodes| {
        if enabled {
            nodes.off.remove(&node.1);
        } else {
            nodes.off.insert(node.1);
        }
        Ok(())
    })
}

/// Does work at once, or captures it if `recordable` allows.
///
/// # Errors
/// The errors of the work, the capture or `recordable`.
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

/// Repeats a 32-bit value in stream order. A capture accepts any reserved addresses, mapped or not
/// (measured on CUDA).
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

/// Copies within device memory in stream order. A capture accepts mapped addresses only (measured
/// on CUDA).
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

/// Copies from host memory in stream order. A capture accepts registered memory and mapped
/// addresses only; other host memory was not measured.
///
/// # Errors
/// As [`submit`] and [`host::registered`].
///
/// # Safety
/// `from` is null or has `len` bytes, valid as long as a graph with this copy may run.
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
    // SAFETY: not null; room for `len` bytes by the caller's contract.
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
    // SAFETY: not null; `len` bytes by the caller's contract.
    let bytes = unsafe { std::slice::from_raw_parts(from, len) };
    device_at(to)?.1.memory.write(to, bytes).map_err(refused)
}
