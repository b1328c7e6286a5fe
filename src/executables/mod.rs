//! Executables: what a captured graph borrows to be launched.
//!
//! A captured graph is a *template*, in host memory. Its executable takes device memory outside every pool: a hundred KiB for being one,
//! and some KiB a node (docs/performance.md). So the graphs of a pool share a bounded number of them: hot graphs keep theirs, the others
//! wake by an update of one of equal topology (`cudaGraphExecUpdate`) or, where there is none, by making one anew.
//!
//! `policy` decides and keeps the books; this file carries it out. No call to the driver is made under the lock, and none of them waits
//! for the device: launches that are under way go on as they were (CUDA programming guide, "graph update").

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slotmap::SecondaryMap;

use crate::driver::{Executable, Graph, Graphs, SharedDriver};
use crate::error::{Error, Result};
use crate::sync::Monitor;

mod cost;
mod kinds;
mod metrics;
mod policy;

pub use cost::Size;
pub use policy::{Counts, Limits};

use policy::{MemberKey, Policy, SetKey, Step, Why};

type Set = Arc<[Executable]>;

#[derive(Debug, Default)]
struct Books {
    policy: Policy,
    sets: SecondaryMap<SetKey, Set>,
    /// What the driver would not destroy, to be tried again.
    pending: Vec<Executable>,
}

/// A [`Step`] with the executables that it names. What the policy forgets leaves the map under the same lock, since its key is used again.
enum Task {
    Ready(Set),
    Update(SetKey, Set),
    Make(Option<Set>),
    Nothing,
}

impl Books {
    /// What is to be done; `None` where another thread has to be waited for.
    fn task(&mut self, step: Step) -> Option<Task> {
        Some(match step {
            Step::Wait => return None,
            Step::Ready(set) => self.sets.get(set).cloned().map_or(Task::Nothing, Task::Ready),
            Step::Update(key) => {
                self.sets.get(key).cloned().map_or(Task::Nothing, |set| Task::Update(key, set))
            }
            Step::Make(dropped) => Task::Make(dropped.and_then(|set| self.sets.remove(set))),
            Step::None => Task::Nothing,
        })
    }
}

/// The executables of a device's graphs. Any thread.
#[derive(Debug)]
pub struct ExecutablePool {
    driver: SharedDriver,
    books: Monitor<Books>,
    /// A panic left the books in an unknown state.
    closed: AtomicBool,
}

/// What a pool has, and what happened in it so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutableStats {
    /// Captured graphs of the pool; a piecewise one counts once.
    pub graphs: u64,
    /// Those that have executables now.
    pub awake: u64,
    /// Executables and their nodes, now.
    pub now: Size,
    /// Nodes of all templates; each takes about a KiB of host memory.
    pub template_nodes: u64,
    /// Bytes of device memory that executables took, and that the driver keeps for them when they go: how much less was free after each
    /// was made, so what other threads took or gave in that moment is in it.
    pub bytes: u64,
    /// What happened.
    pub counts: Counts,
}

/// Graphs of one topology: nodes, edges, and the attributes of kernels. Between them an executable can be updated, as far as CUDA does not refuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutableClass {
    /// A hash of the topology: the same for the same graphs in any process.
    pub id: u64,
    /// Captured graphs of this class; a piecewise one counts once.
    pub graphs: u64,
    /// Those that have executables now.
    pub awake: u64,
    /// Executables and their nodes, now.
    pub now: Size,
    /// Bytes of device memory that those take, by what the pool's took as they were made. With all classes' at most
    /// [`ExecutableStats::bytes`], but for what was never measured.
    pub bytes: u64,
}

impl ExecutablePool {
    /// An empty pool of a device.
    ///
    /// # Errors
    /// [`Error::WrongState`] on a platform without graphs.
    pub fn new(driver: SharedDriver, limits: Limits) -> Result<Arc<Self>> {
        if driver.graphs().is_none() {
            return Err(Error::WrongState {
                what: "the device",
                expected: "one with graphs",
                found: "without",
            });
        }
        let pool = Self { driver, books: Monitor::default(), closed: AtomicBool::new(false) };
        pool.set_limits(limits);
        Ok(Arc::new(pool))
    }

    /// Changes the limits, which what is there may exceed: it shrinks to them as graphs are replayed.
    pub fn set_limits(&self, limits: Limits) {
        self.books.change(|books| books.policy.set_limits(limits));
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.read(|policy| policy.limits())
    }

    /// Counts as they are now.
    #[must_use]
    pub fn stats(&self) -> ExecutableStats {
        self.read(|policy| {
            let (graphs, awake, template_nodes) = policy.members();
            ExecutableStats {
                graphs: graphs as u64,
                awake: awake as u64,
                now: policy.ledger.now,
                template_nodes,
                bytes: policy.ledger.bytes(),
                counts: policy.counts,
            }
        })
    }

    /// What each class has now, that which takes most first.
    #[must_use]
    pub fn classes(&self) -> Vec<ExecutableClass> {
        self.read(Policy::classes)
    }

    /// Bytes of device memory that executables of that size would take, by what those of the pool took so far.
    #[must_use]
    pub fn expected_bytes(&self, size: Size) -> u64 {
        self.read(|policy| policy.ledger.share(size))
    }

    /// Takes in the graphs of one capture, which are launched together and in this order. Makes no executable. With `own` its executables
    /// are never another's; so are those of graphs that an update cannot handle, such as ones that allocate.
    ///
    /// # Errors
    /// What the driver says of the graphs.
    ///
    /// # Safety
    /// Live graphs of this device, which nobody changes and which outlive the template.
    pub unsafe fn add(self: &Arc<Self>, graphs: &[Graph], own: bool) -> Result<GraphTemplate> {
        let door = self.door()?;
        let (mut topology, mut functions, mut size, mut own) = (0_u64, 0_u64, Size::default(), own);
        let mix = |all: u64, one: u64| all.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ one;
        for graph in graphs {
            // SAFETY: the caller's contract.
            let shape = unsafe { door.graph_shape(*graph) }?;
            topology = mix(topology, shape.topology);
            functions = mix(functions, shape.functions);
            size.executables += 1;
            size.nodes += shape.nodes;
            own |= !shape.updatable;
        }
        let member = self.books.change(|books| books.policy.add(topology, functions, size, own));
        Ok(GraphTemplate { pool: Arc::clone(self), graphs: graphs.into(), member, size, frees: own })
    }

    /// After a panic: every later call but destruction is an error.
    #[cfg(feature = "bridge")]
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    fn door(&self) -> Result<&dyn Graphs> {
        let state = |found| Error::WrongState { what: "the pool of executables", expected: "open", found };
        if self.closed.load(Ordering::Relaxed) {
            return Err(state("closed after an internal error"));
        }
        self.driver.graphs().ok_or_else(|| state("of a device without graphs"))
    }

    fn read<R>(&self, read: impl FnOnce(&Policy) -> R) -> R {
        let mut read = Some(read);
        self.books.wait_for(|books| read.take().map(|read| read(&books.policy)))
    }

    /// Destroys executables, and those that the driver would not destroy before.
    fn destroy(&self, executables: impl IntoIterator<Item = Executable>) {
        let Some(door) = self.driver.graphs() else { return };
        let pending = self.books.change(|books| std::mem::take(&mut books.pending));
        let mut refused = Vec::new();
        for executable in pending.into_iter().chain(executables) {
            // SAFETY: one of ours, in no set any more; the driver keeps it until its last launch is done.
            if let Err(error) = unsafe { door.executable_destroy(executable) } {
                tracing::warn!(%error, "an executable is to be destroyed later");
                refused.push(executable);
            }
        }
        if !refused.is_empty() {
            self.books.change(|books| books.pending.append(&mut refused));
        }
    }

    fn destroy_set(&self, set: Option<Set>) {
        if let Some(set) = set {
            self.destroy(set.iter().copied());
        }
    }
}

impl Drop for ExecutablePool {
    fn drop(&mut self) {
        let left: Vec<Set> = self.books.change(|books| books.sets.drain().map(|(_, set)| set).collect());
        self.destroy(left.iter().flat_map(|set| set.iter().copied()));
    }
}

/// The graphs of one capture in a pool. It is launched by one thread at a time: replays of its arena have an order.
#[derive(Debug)]
pub struct GraphTemplate {
    pool: Arc<ExecutablePool>,
    graphs: Box<[Graph]>,
    member: MemberKey,
    size: Size,
    /// Its executables free what they allocated; never for those that are updated, which allocate nothing.
    frees: bool,
}

impl GraphTemplate {
    /// Its graphs, and their nodes.
    #[must_use]
    pub fn size(&self) -> Size {
        self.size
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<ExecutablePool> {
        &self.pool
    }

    /// Bytes of device memory that its executables take, by what those of the pool took so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pool.read(|policy| policy.bytes_of(self.member))
    }

    /// Whether it has executables now.
    #[must_use]
    pub fn is_awake(&self) -> bool {
        self.pool.read(|policy| policy.is_awake(self.member))
    }

    /// Notes that it may be launched soon, so that what it has is not lent before what was not expected; whether it has executables.
    pub fn expect(&self) -> bool {
        self.pool.books.change(|books| books.policy.expect(self.member))
    }

    /// From now on its executables are never another's: for who changes them.
    pub fn keep(&self) {
        self.pool.books.change(|books| books.policy.keep(self.member));
    }

    /// Calls `give` with the place and the executable of each graph, which are its own until [`leave`](Self::leave), to be launched. Where
    /// it has none, they are updated from those of the graph of its kind that was used longest ago, or made. With the launch behind it an
    /// update took half a microsecond to two of host time a node, and making four to seven (H200, docs/performance.md).
    ///
    /// # Errors
    /// What the driver says, out of memory among it; the template and the pool are as usable as before.
    pub fn enter(&self, mut give: impl FnMut(usize, Executable)) -> Result<()> {
        let set = loop {
            match self.ask(Why::Replay) {
                Task::Ready(set) => break set,
                task => {
                    if let Some(set) = self.carry_out(task, Why::Replay)? {
                        break set;
                    }
                }
            }
        };
        set.iter().enumerate().for_each(|(place, one)| give(place, *one));
        Ok(())
    }

    /// What has to be done before it has executables, once nobody else does that.
    fn ask(&self, why: Why) -> Task {
        self.pool.books.wait_for(|books| {
            let step = books.policy.enter(self.member, why);
            books.task(step)
        })
    }

    /// Ends what [`enter`](Self::enter) began: the graphs were launched.
    pub fn leave(&self) {
        let over = self.pool.books.change(|books| {
            let over = books.policy.leave(self.member);
            over.and_then(|set| books.sets.remove(set))
        });
        self.pool.destroy_set(over);
    }

    /// Sees that it has executables before it is launched, if that takes none from a graph that was used at the last replay or woken since.
    /// For another thread than the one that replays. Whether it has them.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn wake(&self) -> Result<bool> {
        loop {
            match self.ask(Why::Ahead) {
                Task::Ready(_) => return Ok(true),
                Task::Nothing => return Ok(false),
                task => {
                    if self.carry_out(task, Why::Ahead)?.is_some() {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// The executables; `None` if another task has to be asked for.
    fn carry_out(&self, task: Task, why: Why) -> Result<Option<Set>> {
        match task {
            Task::Update(key, set) => self.update(key, set, why),
            Task::Make(dropped) => {
                self.pool.destroy_set(dropped);
                match self.make() {
                    Ok(made) => Ok(Some(self.made(made, why))),
                    Err(Error::OutOfMemory { .. }) if why == Why::Replay => self.with_less_memory(),
                    Err(error) => Err(self.failed(None, error)),
                }
            }
            Task::Ready(set) => Ok(Some(set)),
            Task::Nothing => Ok(None),
        }
    }

    fn update(&self, key: SetKey, set: Set, why: Why) -> Result<Option<Set>> {
        let door = self.pool.door().map_err(|error| self.failed(Some(key), error))?;
        for (executable, graph) in set.iter().zip(&self.graphs) {
            // SAFETY: the set is this call's until it says how it went; the graph is live (contract of `add`).
            match unsafe { door.executable_update(*executable, *graph) } {
                Ok(true) => {}
                Ok(false) => {
                    self.pool.books.change(|books| books.policy.refused(self.member, key));
                    return Ok(None);
                }
                Err(error) => return Err(self.failed(Some(key), error)),
            }
        }
        self.pool.books.change(|books| books.policy.updated(self.member, key, why));
        Ok(Some(set))
    }

    /// New executables, and how many bytes less the device has since.
    fn make(&self) -> Result<(Vec<Executable>, u64)> {
        let door = self.pool.door()?;
        let before = self.pool.driver.free_bytes()?;
        let mut made = Vec::with_capacity(self.graphs.len());
        for graph in &self.graphs {
            // SAFETY: the graph is live (contract of `add`).
            match unsafe { door.instantiate(*graph, self.frees) } {
                Ok(executable) => made.push(executable),
                Err(error) => {
                    self.pool.destroy(made);
                    return Err(error);
                }
            }
        }
        // What it takes is worth knowing, and no reason to fail.
        let after = self.pool.driver.free_bytes().unwrap_or(before);
        Ok((made, before.saturating_sub(after)))
    }

    fn made(&self, (made, bytes): (Vec<Executable>, u64), why: Why) -> Set {
        let made: Set = made.into();
        self.pool.books.change(|books| {
            if let Some(key) = books.policy.made(self.member, why, bytes) {
                books.sets.insert(key, Arc::clone(&made));
            }
        });
        made
    }

    /// Shares where it would have made, or destroys what others have and tries again.
    fn with_less_memory(&self) -> Result<Option<Set>> {
        loop {
            let task = self.pool.books.change(|books| {
                let step = books.policy.without_memory(self.member);
                books.task(step)
            });
            let last = match task {
                Some(Task::Update(key, set)) => return self.update(key, set, Why::Replay),
                Some(Task::Make(dropped)) => {
                    self.pool.destroy_set(dropped);
                    false
                }
                // There is nothing left to give up: as the device says it.
                _ => true,
            };
            match self.make() {
                Ok(made) => return Ok(Some(self.made(made, Why::Replay))),
                Err(Error::OutOfMemory { .. }) if !last => {}
                Err(error) => return Err(self.failed(None, error)),
            }
        }
    }

    fn failed(&self, set: Option<SetKey>, error: Error) -> Error {
        self.pool.books.change(|books| books.policy.failed(self.member, set));
        error
    }
}

impl Drop for GraphTemplate {
    fn drop(&mut self) {
        let unused: Vec<Set> = self.pool.books.change(|books| {
            let unused = books.policy.remove(self.member);
            unused.into_iter().filter_map(|set| books.sets.remove(set)).collect()
        });
        self.pool.destroy(unused.iter().flat_map(|set| set.iter().copied()));
    }
}
