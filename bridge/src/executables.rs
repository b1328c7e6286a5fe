//! Pools of executables and their graphs, for `cpp/torch/executables.cpp`. Functions without
//! another result return a status.

use std::sync::Arc;

use vmmgraph::capi::{GuardedDrop, arena_of, guarded, vmmgraph_arena_t};
use vmmgraph::driver::{Executable, Graph};
use vmmgraph::executables::{self, Limits};
use vmmgraph::{Error, Result};

#[allow(unreachable_pub, reason = "cxx makes the structs public")]
#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        type ExecutablePool;

        /// Empty before `add_graphs`.
        type GraphTemplate;
        /// Creates a pool. A limit of 0 is no limit.
        fn executable_pool(arena: usize, max_graphs: usize, max_bytes: u64) -> Result<Box<ExecutablePool>>;
        fn set_executable_limits(pool: &ExecutablePool, max_graphs: usize, max_bytes: u64);
        fn executable_stats(pool: &ExecutablePool) -> ExecutableStats;
        /// Estimated bytes of `executables` executables with `nodes` nodes in total.
        fn expected_executable_bytes(pool: &ExecutablePool, executables: u64, nodes: u64) -> u64;
        /// `labels` alternates names and values.
        fn executable_prometheus(pool: &ExecutablePool, labels: &[&str]) -> String;
        fn no_template() -> Box<GraphTemplate>;
        /// Adds graphs, each a cudaGraph_t, which must outlive the template.
        fn add_graphs(
            captured: &mut GraphTemplate,
            pool: &ExecutablePool,
            graphs: &[usize],
            pinned: bool,
        ) -> i32;
        /// Gives the executables, each a cudaGraphExec_t, to launch before `launched`.
        fn acquire(captured: &GraphTemplate, executables: &mut [usize]) -> i32;
        fn launched(captured: &GraphTemplate);
        /// Instantiates ahead of a replay, if the limits permit.
        fn instantiate(captured: &GraphTemplate, instantiated: &mut bool) -> i32;
        /// Never evicts the executables from now on.
        fn pin(captured: &GraphTemplate);
        fn evict_executables(pool: &ExecutablePool);
        /// Hints at an imminent launch. Returns whether executables exist.
        fn touch(captured: &GraphTemplate) -> bool;
        fn is_instantiated(captured: &GraphTemplate) -> bool;
        fn executable_bytes(captured: &GraphTemplate) -> u64;
        fn template_nodes(captured: &GraphTemplate) -> u64;
    }

    /// Limits (0: none), contents and event counts of a pool.
    struct ExecutableStats {
        max_graphs: usize,
        max_bytes: u64,
        graphs: u64,
        instantiated: u64,
        executables: u64,
        nodes: u64,
        template_nodes: u64,
        bytes: u64,
        instantiations: u64,
        ahead: u64,
        evictions: u64,
        hits: u64,
        misses: u64,
    }
}

/// The drop destroys executables, so it is guarded like a call.
struct ExecutablePool(GuardedDrop<Arc<executables::ExecutablePool>>);

/// Template whose pool is closed after a panic.
struct GraphTemplate(Option<GuardedDrop<executables::GraphTemplate>>);

fn limits(max_graphs: usize, max_bytes: u64) -> Limits {
    Limits { graphs: (max_graphs > 0).then_some(max_graphs), bytes: (max_bytes > 0).then_some(max_bytes) }
}

fn executable_pool(arena: usize, max_graphs: usize, max_bytes: u64) -> Result<Box<ExecutablePool>> {
    let arena = arena_of(arena as vmmgraph_arena_t)?;
    let driver = Arc::clone(arena.device().driver());
    let pool = executables::ExecutablePool::new(driver, limits(max_graphs, max_bytes))?;
    Ok(Box::new(ExecutablePool(GuardedDrop::new(pool))))
}

fn set_executable_limits(pool: &ExecutablePool, max_graphs: usize, max_bytes: u64) {
    guarded(
        || pool.0.close(),
        || {
            pool.0.set_limits(limits(max_graphs, max_bytes));
            Ok(())
        },
    );
}

fn evict_executables(pool: &ExecutablePool) {
    guarded(
        || pool.0.close(),
        || {
            pool.0.evict_all();
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
    let executables::ExecutableStats { graphs, instantiated, now, template_nodes, bytes, counts } = stats;
    ffi::ExecutableStats {
        max_graphs: limits.graphs.unwrap_or(0),
        max_bytes: limits.bytes.unwrap_or(0),
        graphs,
        instantiated,
        executables: now.executables,
        nodes: now.nodes,
        template_nodes,
        bytes,
        instantiations: counts.instantiated,
        ahead: counts.ahead,
        evictions: counts.evicted,
        hits: counts.hits,
        misses: counts.misses,
    }
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

fn add_graphs(captured: &mut GraphTemplate, pool: &ExecutablePool, graphs: &[usize], pinned: bool) -> i32 {
    guarded(
        || pool.0.close(),
        || {
            // SAFETY: graphs of finished captures, kept by cpp/torch longer than the template.
            let graphs: Vec<Graph> =
                graphs.iter().map(|graph| unsafe { Graph::from_raw(*graph as u64) }).collect();
            // SAFETY: as above.
            captured.0 = Some(GuardedDrop::new(unsafe { pool.0.add(&graphs, pinned) }?));
            Ok(())
        },
    )
}

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
        let sentence = "cannot use the captured graphs: none were added; add them first";
        let template = captured.0.as_ref().ok_or_else(|| Error::wrong_state(sentence))?;
        result = Some(call(template)?);
        Ok(())
    });
    (status, result)
}

fn acquire(captured: &GraphTemplate, executables: &mut [usize]) -> i32 {
    with_template(captured, |template| {
        template.acquire(|place, executable: Executable| {
            if let Some(to) = executables.get_mut(place) {
                *to = executable.raw() as usize;
            }
        })
    })
    .0
}

fn launched(captured: &GraphTemplate) {
    with_template(captured, |template| {
        template.launched();
        Ok(())
    });
}

fn instantiate(captured: &GraphTemplate, instantiated: &mut bool) -> i32 {
    let (status, has) = with_template(captured, |template| template.instantiate());
    *instantiated = has.unwrap_or(false);
    status
}

fn pin(captured: &GraphTemplate) {
    with_template(captured, |template| {
        template.pin();
        Ok(())
    });
}

fn touch(captured: &GraphTemplate) -> bool {
    with_template(captured, |template| Ok(template.touch())).1.unwrap_or(false)
}

fn is_instantiated(captured: &GraphTemplate) -> bool {
    with_template(captured, |template| Ok(template.is_instantiated())).1.unwrap_or(false)
}

fn executable_bytes(captured: &GraphTemplate) -> u64 {
    with_template(captured, |template| Ok(template.bytes())).1.unwrap_or(0)
}

fn template_nodes(captured: &GraphTemplate) -> u64 {
    with_template(captured, |template| Ok(template.size().nodes)).1.unwrap_or(0)
}
