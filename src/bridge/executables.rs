//! Pools of executables and the graphs that borrow from them, as `cpp/torch/executables.cpp` holds them.

use std::sync::Arc;

use crate::capi::{GuardedDrop, arena_of, guarded, vmmgraph_arena_t};
use crate::driver::{Executable, Graph};
use crate::error::{Error, Result};
use crate::executables::{self, Limits};

#[allow(unreachable_pub, reason = "cxx makes the structs public")]
#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// A pool of executables, as C++ holds it.
        type ExecutablePool;

        /// The graphs of one capture in it; empty before `add_graphs`.
        type GraphTemplate;
        /// A pool of the device of the arena behind a C handle. Limits of 0 are none.
        fn executable_pool(arena: usize, most: usize, most_bytes: u64) -> Result<Box<ExecutablePool>>;
        /// Changes its limits.
        fn set_executable_limits(pool: &ExecutablePool, most: usize, most_bytes: u64);
        /// Its limits and counts.
        fn executable_stats(pool: &ExecutablePool) -> ExecutableStats;
        /// What each class of it has, that which takes most first.
        fn executable_classes(pool: &ExecutablePool) -> Vec<ExecutableClass>;
        /// Bytes that so many executables of so many nodes in all would take on the device, by what others took.
        fn expected_executable_bytes(pool: &ExecutablePool, executables: u64, nodes: u64) -> u64;
        /// All of it in Prometheus's text format; labels are names and values in turn.
        fn executable_prometheus(pool: &ExecutablePool, labels: &[&str]) -> String;
        /// No graphs yet.
        fn no_template() -> Box<GraphTemplate>;
        /// Takes graphs (each a cudaGraph_t) into the pool; the status. They outlive the template.
        fn add_graphs(
            captured: &mut GraphTemplate,
            pool: &ExecutablePool,
            graphs: &[usize],
            own: bool,
        ) -> i32;
        /// The executables (each a cudaGraphExec_t) to launch, until `leave`; the status.
        fn enter(captured: &GraphTemplate, executables: &mut [usize]) -> i32;
        /// They were launched.
        fn leave(captured: &GraphTemplate);
        /// Makes or updates executables ahead of a replay, if there is one to spare; the status.
        fn wake(captured: &GraphTemplate, awake: &mut bool) -> i32;
        /// Its executables are never another's from now on.
        fn keep_executables(captured: &GraphTemplate);
        /// Notes that it may be launched soon; whether it has executables.
        fn expect(captured: &GraphTemplate) -> bool;
        /// Whether it has executables.
        fn is_awake(captured: &GraphTemplate) -> bool;
        /// Bytes that its executables take on the device, by what others took.
        fn executable_bytes(captured: &GraphTemplate) -> u64;
        /// Nodes of its graphs.
        fn template_nodes(captured: &GraphTemplate) -> u64;
    }

    /// Graphs whose executables can be updated to one another.
    struct ExecutableClass {
        id: u64,
        graphs: u64,
        awake: u64,
        executables: u64,
        nodes: u64,
        bytes: u64,
    }

    /// Of a pool of executables: limits, where 0 is none, and counts.
    struct ExecutableStats {
        most: usize,
        most_bytes: u64,
        graphs: u64,
        awake: u64,
        executables: u64,
        nodes: u64,
        template_nodes: u64,
        bytes: u64,
        made: u64,
        updated: u64,
        refused: u64,
        dropped: u64,
        woken: u64,
        ready: u64,
        late: u64,
    }
}

/// Its end destroys executables, which is a call too.
struct ExecutablePool(GuardedDrop<Arc<executables::ExecutablePool>>);

/// What closes a template's pool after a panic, and the template.
struct GraphTemplate(Option<GuardedDrop<executables::GraphTemplate>>);

fn limits(most: usize, most_bytes: u64) -> Limits {
    Limits { most: (most > 0).then_some(most), most_bytes: (most_bytes > 0).then_some(most_bytes) }
}

fn executable_pool(arena: usize, most: usize, most_bytes: u64) -> Result<Box<ExecutablePool>> {
    let arena = arena_of(arena as vmmgraph_arena_t)?;
    let driver = Arc::clone(arena.device().driver());
    let pool = executables::ExecutablePool::new(driver, limits(most, most_bytes))?;
    Ok(Box::new(ExecutablePool(GuardedDrop::new(pool))))
}

fn set_executable_limits(pool: &ExecutablePool, most: usize, most_bytes: u64) {
    guarded(
        || pool.0.close(),
        || {
            pool.0.set_limits(limits(most, most_bytes));
            Ok(())
        },
    );
}

fn executable_stats(pool: &ExecutablePool) -> ffi::ExecutableStats {
    let (mut stats, mut limits) = (executables::ExecutableStats::default(), Limits::default());
    guarded(
        || pool.0.close(),
        || {
            (stats, limits) = (pool.0.stats(), pool.0.limits());
            Ok(())
        },
    );
    let executables::ExecutableStats { graphs, awake, now, template_nodes, bytes, counts } = stats;
    ffi::ExecutableStats {
        most: limits.most.unwrap_or(0),
        most_bytes: limits.most_bytes.unwrap_or(0),
        graphs,
        awake,
        executables: now.executables,
        nodes: now.nodes,
        template_nodes,
        bytes,
        made: counts.made,
        updated: counts.updated,
        refused: counts.refused,
        dropped: counts.dropped,
        woken: counts.woken,
        ready: counts.ready,
        late: counts.late,
    }
}

fn executable_classes(pool: &ExecutablePool) -> Vec<ffi::ExecutableClass> {
    let mut classes = Vec::new();
    guarded(
        || pool.0.close(),
        || {
            classes = pool.0.classes();
            Ok(())
        },
    );
    let class = |class: executables::ExecutableClass| {
        let executables::ExecutableClass { id, graphs, awake, now, bytes } = class;
        ffi::ExecutableClass { id, graphs, awake, executables: now.executables, nodes: now.nodes, bytes }
    };
    classes.into_iter().map(class).collect()
}

fn expected_executable_bytes(pool: &ExecutablePool, executables: u64, nodes: u64) -> u64 {
    let mut bytes = 0;
    guarded(
        || pool.0.close(),
        || {
            bytes = pool.0.expected_bytes(executables::Size { executables, nodes });
            Ok(())
        },
    );
    bytes
}

fn executable_prometheus(pool: &ExecutablePool, labels: &[&str]) -> String {
    let mut text = String::new();
    let pairs: Vec<_> = labels.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    guarded(
        || pool.0.close(),
        || {
            text = pool.0.prometheus(&pairs);
            Ok(())
        },
    );
    text
}

fn no_template() -> Box<GraphTemplate> {
    Box::new(GraphTemplate(None))
}

fn add_graphs(captured: &mut GraphTemplate, pool: &ExecutablePool, graphs: &[usize], own: bool) -> i32 {
    guarded(
        || pool.0.close(),
        || {
            // SAFETY: cpp/torch gives the graphs of captures that have ended, which it keeps longer than the template.
            let graphs: Vec<Graph> =
                graphs.iter().map(|graph| unsafe { Graph::from_raw(*graph as u64) }).collect();
            // SAFETY: as above.
            captured.0 = Some(GuardedDrop::new(unsafe { pool.0.add(&graphs, own) }?));
            Ok(())
        },
    )
}

/// A call with what is behind a template, if there is something.
fn with_template<T>(
    captured: &GraphTemplate,
    call: impl FnOnce(&executables::GraphTemplate) -> Result<T>,
) -> (i32, Option<T>) {
    let mut result = None;
    let close = || {
        if let Some(template) = &captured.0 {
            template.pool().close()
        }
    };
    let status = guarded(close, || {
        let state = |found| Error::WrongState { what: "the template", expected: "one with graphs", found };
        let template = captured.0.as_ref().ok_or_else(|| state("empty"))?;
        result = Some(call(template)?);
        Ok(())
    });
    (status, result)
}

fn enter(captured: &GraphTemplate, executables: &mut [usize]) -> i32 {
    with_template(captured, |template| {
        template.enter(|place, executable: Executable| {
            if let Some(to) = executables.get_mut(place) {
                *to = executable.raw() as usize;
            }
        })
    })
    .0
}

fn leave(captured: &GraphTemplate) {
    with_template(captured, |template| {
        template.leave();
        Ok(())
    });
}

fn wake(captured: &GraphTemplate, awake: &mut bool) -> i32 {
    let (status, woken) = with_template(captured, |template| template.wake());
    *awake = woken.unwrap_or(false);
    status
}

fn keep_executables(captured: &GraphTemplate) {
    with_template(captured, |template| {
        template.keep();
        Ok(())
    });
}

fn expect(captured: &GraphTemplate) -> bool {
    with_template(captured, |template| Ok(template.expect())).1.unwrap_or(false)
}

fn is_awake(captured: &GraphTemplate) -> bool {
    with_template(captured, |template| Ok(template.is_awake())).1.unwrap_or(false)
}

fn executable_bytes(captured: &GraphTemplate) -> u64 {
    with_template(captured, |template| Ok(template.bytes())).1.unwrap_or(0)
}

fn template_nodes(captured: &GraphTemplate) -> u64 {
    with_template(captured, |template| Ok(template.size().nodes)).1.unwrap_or(0)
}
