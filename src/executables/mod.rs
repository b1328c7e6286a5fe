//! Pools of executable graphs: instantiated at the first replay or ahead, evicted by least recent
//! use. See docs/design/replays.md.
//!
//! A captured graph is a *template* in host memory. Its executable (`cudaGraphExec_t`) takes device
//! memory outside every allocator: about 100 KiB and some KiB per node. Executables are never
//! updated to another graph, which slows replays (docs/performance.md).
//!
//! `policy` decides; this file executes. No driver call is made under the lock, and none waits for
//! the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slotmap::SecondaryMap;

use crate::driver::{Executable, Graph, Graphs, SharedDriver};
use crate::error::{Error, Result};
use crate::sync::Monitor;

mod cost;
mod metrics;
mod policy;

pub use cost::Size;
pub use policy::{Counts, Limits};

use policy::{GraphKey, Policy, Step, Why};

/// One executable per graph of a template.
type Set = Arc<[Executable]>;

#[derive(Debug, Default)]
struct State {
    policy: Policy,
    sets: SecondaryMap<GraphKey, Set>,
    /// Refused by the driver; tried again at the next destruction.
    undestroyed: Vec<Executable>,
}

impl State {
    /// Removes the executables of evicted graphs, for the caller to destroy.
    fn take(&mut self, evicted: Vec<GraphKey>) -> Vec<Set> {
        evicted.into_iter().filter_map(|key| self.sets.remove(key)).collect()
    }
}

/// Pool of the executables of a device's graphs. Thread-safe.
#[derive(Debug)]
pub struct ExecutablePool {
    driver: SharedDriver,
    state: Monitor<State>,
    /// A panic left the state unknown.
    closed: AtomicBool,
}

/// Contents of a pool, and event counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutableStats {
    /// Captured graphs; a piecewise capture counts once.
    pub graphs: u64,
    /// Graphs with executables.
    pub instantiated: u64,
    /// Current executables and their nodes.
    pub now: Size,
    /// Each takes about 1 KiB of host memory.
    pub template_nodes: u64,
    /// Device memory taken by executables. The first 32 instantiations are measured as the decrease
    /// of free device memory, which includes allocations of other threads; later ones are
    /// estimated.
    pub bytes: u64,
    /// Event counts.
    pub counts: Counts,
}

impl ExecutablePool {
    /// Creates an empty pool for a device; fails on a platform without graphs.
    pub fn new(driver: SharedDriver, limits: Limits) -> Result<Arc<Self>> {
        if driver.graphs().is_none() {
            return Err(Error::wrong_state(
                "cannot make a pool of executables: the platform of this device has no graphs; use a device of a platform that has them",
            ));
        }
        let pool = Self { driver, state: Monitor::default(), closed: AtomicBool::new(false) };
        pool.set_limits(limits);
        Ok(Arc::new(pool))
    }

    /// Sets the limits. Executables beyond are destroyed, except during a launch.
    pub fn set_limits(&self, limits: Limits) {
        let evicted = self.state.change(|state| {
            let evicted = state.policy.set_limits(limits);
            state.take(evicted)
        });
        self.destroy_sets(evicted);
    }

    /// Destroys all executables, except pinned ones and during a launch.
    pub fn evict_all(&self) {
        let evicted = self.state.change(|state| {
            let evicted = state.policy.evict_all();
            state.take(evicted)
        });
        self.destroy_sets(evicted);
    }

    /// Returns the limits.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.read(|policy| policy.limits())
    }

    /// Returns the current counts.
    #[must_use]
    pub fn stats(&self) -> ExecutableStats {
        self.read(|policy| {
            let (graphs, instantiated, template_nodes) = policy.totals();
            ExecutableStats {
                graphs: graphs as u64,
                instantiated: instantiated as u64,
                now: policy.ledger.now,
                template_nodes,
                bytes: policy.ledger.bytes(),
                counts: policy.counts,
            }
        })
    }

    /// Estimates the device bytes of executables of this size.
    #[must_use]
    pub fn expected_bytes(&self, size: Size) -> u64 {
        self.read(|policy| policy.ledger.share(size))
    }

    /// Adds the graphs of one capture, launched together and in this order. `pinned` executables,
    /// and those of graphs which may allocate, are never evicted.
    ///
    /// # Errors
    /// Driver errors.
    ///
    /// # Safety
    /// The graphs belong to this device, outlive the template, and never change.
    pub unsafe fn add(self: &Arc<Self>, graphs: &[Graph], pinned: bool) -> Result<GraphTemplate> {
        let graph_driver = self.graph_driver()?;
        let (mut size, mut pinned) = (Size::default(), pinned);
        for graph in graphs {
            // SAFETY: the caller's contract.
            let nodes = unsafe { graph_driver.graph_nodes(*graph) }?;
            size.executables += 1;
            size.nodes += nodes.count;
            pinned |= nodes.may_allocate;
        }
        let key = self.state.change(|state| state.policy.add(size, pinned));
        Ok(GraphTemplate { pool: Arc::clone(self), graphs: graphs.into(), key, size })
    }

    /// Makes every later call fail after a panic, except destruction.
    #[doc(hidden)]
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    fn graph_driver(&self) -> Result<&dyn Graphs> {
        if self.closed.load(Ordering::Relaxed) {
            let sentence = "cannot use the pool of executables: an internal error closed it; make a pool and capture again";
            return Err(Error::wrong_state(sentence));
        }
        let sentence = "cannot use the pool of executables: its device has no graphs; use a device of a platform that has them";
        self.driver.graphs().ok_or_else(|| Error::wrong_state(sentence))
    }

    fn read<R>(&self, read: impl FnOnce(&Policy) -> R) -> R {
        let mut read = Some(read);
        self.state.wait_for(|state| read.take().map(|read| read(&state.policy)))
    }

    fn destroy(&self, executables: impl IntoIterator<Item = Executable>) {
        let Some(graph_driver) = self.driver.graphs() else { return };
        let undestroyed = self.state.change(|state| std::mem::take(&mut state.undestroyed));
        let mut refused = Vec::new();
        for executable in undestroyed.into_iter().chain(executables) {
            // SAFETY: removed from the pool; the driver keeps it until its last launch is done.
            if let Err(error) = unsafe { graph_driver.executable_destroy(executable) } {
                tracing::warn!(%error, "cannot destroy an executable now: trying again later");
                refused.push(executable);
            }
        }
        if !refused.is_empty() {
            self.state.change(|state| state.undestroyed.append(&mut refused));
        }
    }

    fn destroy_sets(&self, sets: Vec<Set>) {
        if !sets.is_empty() {
            self.destroy(sets.iter().flat_map(|set| set.iter().copied()));
        }
    }
}

impl Drop for ExecutablePool {
    fn drop(&mut self) {
        let left: Vec<Set> = self.state.change(|state| state.sets.drain().map(|(_, set)| set).collect());
        // Also retries executables refused before.
        self.destroy(left.iter().flat_map(|set| set.iter().copied()));
    }
}

/// Graphs of one capture in a pool, launched by one thread at a time.
#[derive(Debug)]
pub struct GraphTemplate {
    pool: Arc<ExecutablePool>,
    graphs: Box<[Graph]>,
    key: GraphKey,
    size: Size,
}

impl GraphTemplate {
    /// Returns the number of graphs and of their nodes.
    #[must_use]
    pub fn size(&self) -> Size {
        self.size
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<ExecutablePool> {
        &self.pool
    }

    /// Estimates the device bytes of its executables.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pool.read(|policy| policy.bytes_of(self.key))
    }

    /// Whether executables exist.
    #[must_use]
    pub fn is_instantiated(&self) -> bool {
        self.pool.read(|policy| policy.has_executables(self.key))
    }

    /// Hints that this graph launches soon: its executables are evicted last. Returns whether they
    /// exist.
    pub fn touch(&self) -> bool {
        self.pool.state.change(|state| state.policy.touch(self.key))
    }

    /// Never evicts the executables from now on: for callers which modify them or keep their
    /// handles.
    pub fn pin(&self) {
        self.pool.state.change(|state| state.policy.pin(self.key));
    }

    /// Calls `give` with position and executable of each graph, to be launched before
    /// [`launched`](Self::launched). Instantiates missing executables first, and evicts others if
    /// required. After driver errors, template and pool stay usable.
    pub fn acquire(&self, mut give: impl FnMut(usize, Executable)) -> Result<()> {
        let set = self.set_for(Why::Replay)?;
        set.iter().flat_map(|set| set.iter().enumerate()).for_each(|(place, one)| give(place, *one));
        Ok(())
    }

    /// Ends [`acquire`](Self::acquire) after the launch.
    pub fn launched(&self) {
        let evicted = self.pool.state.change(|state| {
            let evicted = state.policy.launched(self.key);
            state.take(evicted)
        });
        self.pool.destroy_sets(evicted);
    }

    /// Instantiates ahead of a replay, if the limits permit without evicting a graph wanted at or
    /// after the last replay. Returns whether executables exist.
    pub fn instantiate(&self) -> Result<bool> {
        Ok(self.set_for(Why::Ahead)?.is_some())
    }

    /// Executables of the template; `None` only ahead of a replay.
    fn set_for(&self, why: Why) -> Result<Option<Set>> {
        enum Next {
            Ready(Option<Set>),
            Instantiate(Vec<Set>),
        }
        let next = self.pool.state.wait_for(|state| match state.policy.acquire(self.key, why) {
            Step::Wait => None,
            Step::Ready => Some(Next::Ready(state.sets.get(self.key).cloned())),
            Step::Refuse => Some(Next::Ready(None)),
            Step::Instantiate(evicted) => Some(Next::Instantiate(state.take(evicted))),
        });
        match next {
            Next::Ready(set) => Ok(set),
            Next::Instantiate(evicted) => {
                self.pool.destroy_sets(evicted);
                self.instantiate_for(why).map(Some).inspect_err(|_| {
                    self.pool.state.change(|state| state.policy.failed(self.key));
                })
            }
        }
    }

    fn instantiate_for(&self, why: Why) -> Result<Set> {
        loop {
            match self.try_instantiate() {
                Ok((made, bytes)) => {
                    let made: Set = made.into();
                    self.pool.state.change(|state| {
                        state.policy.made(self.key, why, bytes);
                        state.sets.insert(self.key, Arc::clone(&made));
                    });
                    return Ok(made);
                }
                Err(error @ Error::OutOfMemory { .. }) if why == Why::Replay => {
                    let evicted = self.pool.state.change(|state| {
                        let evicted = state.policy.evict_one();
                        state.take(evicted.into_iter().collect())
                    });
                    if evicted.is_empty() {
                        return Err(error);
                    }
                    self.pool.destroy_sets(evicted);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Instantiates all graphs. Also returns the decrease of free device memory, if measured.
    fn try_instantiate(&self) -> Result<(Vec<Executable>, Option<u64>)> {
        let graph_driver = self.pool.graph_driver()?;
        let measure = self.pool.read(|policy| policy.ledger.wants_measure());
        // For statistics only.
        let free = || measure.then(|| self.pool.driver.free_bytes().ok()).flatten();
        let before = free();
        let mut made = Vec::with_capacity(self.graphs.len());
        for graph in &self.graphs {
            // SAFETY: the graph is live (contract of `add`).
            match unsafe { graph_driver.instantiate(*graph) } {
                Ok(executable) => made.push(executable),
                Err(error) => {
                    self.pool.destroy(made);
                    return Err(error);
                }
            }
        }
        Ok((made, before.zip(free()).map(|(before, after)| before.saturating_sub(after))))
    }
}

impl Drop for GraphTemplate {
    fn drop(&mut self) {
        let set = self.pool.state.change(|state| {
            state.policy.remove(self.key);
            state.sets.remove(self.key)
        });
        self.pool.destroy_sets(set.into_iter().collect());
    }
}
