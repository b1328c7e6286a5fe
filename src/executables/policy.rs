//! Decides which captured graphs have executables: plain code without a driver. Its clock counts replays.

use slotmap::{SlotMap, new_key_type};

use super::cost::{Ledger, Size};

new_key_type! {
    /// One captured graph; a piecewise capture is one entry.
    pub(super) struct GraphKey;
}

/// Bounds on the executables of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Captured graphs that may have executables at a time; a piecewise capture counts once. `None`: no bound.
    pub graphs: Option<usize>,
    /// Bytes of device memory that executables may take. `None`: no bound.
    pub bytes: Option<u64>,
}

/// Events since the pool was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Graphs that were instantiated; a piecewise capture counts once.
    pub instantiated: u64,
    /// Those of `instantiated` that were instantiated ahead of a replay.
    pub ahead: u64,
    /// Graphs whose executables were destroyed to stay within the limits or to make room on the device.
    pub evicted: u64,
    /// Replays that found their executables ready.
    pub hits: u64,
    /// Replays that had to instantiate first.
    pub misses: u64,
}

/// Why a graph wants executables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// It is launched now.
    Replay,
    /// It may be launched soon.
    Ahead,
}

/// The next step of a caller that wants executables.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The graph has executables.
    Ready,
    /// Another thread launches or instantiates this graph: ask again when something has changed.
    Wait,
    /// Destroy the executables of these graphs, instantiate this one, then report with [`Policy::made`] or [`Policy::failed`].
    Instantiate(Vec<GraphKey>),
    /// Only ahead of a replay: the limits leave no room without evicting a graph that was wanted more recently.
    Refuse,
}

/// Whether an entry has executables, and who uses the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Empty,
    Instantiating,
    Idle,
    Launching,
}

#[derive(Debug)]
struct Entry {
    size: Size,
    /// Its executables are never evicted.
    pinned: bool,
    state: State,
    /// The replay at which it was last launched or expected.
    last_wanted: u64,
}

impl Entry {
    fn has_executables(&self) -> bool {
        matches!(self.state, State::Idle | State::Launching)
    }
}

/// The graphs of a pool and which of them have executables.
#[derive(Debug, Default)]
pub(super) struct Policy {
    limits: Limits,
    graphs: SlotMap<GraphKey, Entry>,
    pub(super) ledger: Ledger,
    pub(super) counts: Counts,
    /// Nodes of all graphs.
    nodes: u64,
    /// Graphs that have executables.
    instantiated: usize,
    replays: u64,
}

impl Policy {
    /// Changes the limits. Returns the graphs whose executables are to be destroyed.
    pub(super) fn set_limits(&mut self, limits: Limits) -> Vec<GraphKey> {
        self.limits = limits;
        self.shrink()
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Graphs, those that have executables, and the nodes of all graphs.
    pub(super) fn totals(&self) -> (usize, usize, u64) {
        (self.graphs.len(), self.instantiated, self.nodes)
    }

    pub(super) fn add(&mut self, size: Size, pinned: bool) -> GraphKey {
        self.nodes += size.nodes;
        self.graphs.insert(Entry { size, pinned, state: State::Empty, last_wanted: 0 })
    }

    /// Forgets a graph that no thread launches or instantiates.
    pub(super) fn remove(&mut self, key: GraphKey) {
        if let Some(gone) = self.graphs.remove(key) {
            self.nodes -= gone.size.nodes;
            if gone.has_executables() {
                self.instantiated -= 1;
                self.ledger.dropped(gone.size);
            }
        }
    }

    /// Bytes that a graph's executables take, estimated from those measured so far.
    pub(super) fn bytes_of(&self, key: GraphKey) -> u64 {
        self.graphs.get(key).map_or(0, |graph| self.ledger.share(graph.size))
    }

    /// Marks a graph as wanted soon, so that it is evicted last. Returns whether it has executables.
    pub(super) fn touch(&mut self, key: GraphKey) -> bool {
        let replays = self.replays;
        self.graphs.get_mut(key).is_some_and(|graph| {
            graph.last_wanted = replays;
            graph.has_executables()
        })
    }

    pub(super) fn has_executables(&self, key: GraphKey) -> bool {
        self.graphs.get(key).is_some_and(Entry::has_executables)
    }

    /// From now on the graph's executables, present or future, are never evicted.
    pub(super) fn pin(&mut self, key: GraphKey) {
        if let Some(graph) = self.graphs.get_mut(key) {
            graph.pinned = true;
        }
    }

    /// The first step towards executables for a graph.
    pub(super) fn acquire(&mut self, key: GraphKey, why: Why) -> Step {
        let Some(graph) = self.graphs.get_mut(key) else { return Step::Refuse };
        match (graph.state, why) {
            (State::Instantiating, _) | (State::Launching, Why::Replay) => Step::Wait,
            (State::Launching | State::Idle, Why::Ahead) => {
                graph.last_wanted = self.replays;
                Step::Ready
            }
            (State::Idle, Why::Replay) => {
                self.replays += 1;
                self.counts.hits += 1;
                (graph.state, graph.last_wanted) = (State::Launching, self.replays);
                Step::Ready
            }
            (State::Empty, _) => {
                let size = graph.size;
                match self.make_room(size, why) {
                    Some(evicted) => {
                        self.set_state(key, State::Instantiating);
                        Step::Instantiate(evicted)
                    }
                    None => Step::Refuse,
                }
            }
        }
    }

    /// The graph was instantiated, which left the device with so many bytes less, where that was measured.
    pub(super) fn made(&mut self, key: GraphKey, why: Why, bytes: Option<u64>) {
        let Some(graph) = self.graphs.get_mut(key) else { return };
        self.counts.instantiated += 1;
        graph.state = match why {
            Why::Replay => {
                self.replays += 1;
                self.counts.misses += 1;
                State::Launching
            }
            Why::Ahead => {
                self.counts.ahead += 1;
                State::Idle
            }
        };
        graph.last_wanted = self.replays;
        self.instantiated += 1;
        self.ledger.made(graph.size, bytes);
    }

    /// The graph could not be instantiated.
    pub(super) fn failed(&mut self, key: GraphKey) {
        self.set_state(key, State::Empty);
    }

    /// Evicts the least recently wanted graph, for a device that has no memory left. Returns that graph.
    pub(super) fn evict_one(&mut self) -> Option<GraphKey> {
        let (victim, _) = *self.evictable(self.replays + 1).first()?;
        self.evict(&[victim]);
        Some(victim)
    }

    /// The replay was launched. Returns the graphs whose executables are to be destroyed.
    pub(super) fn launched(&mut self, key: GraphKey) -> Vec<GraphKey> {
        self.set_state(key, State::Idle);
        self.shrink()
    }

    fn set_state(&mut self, key: GraphKey, state: State) {
        if let Some(graph) = self.graphs.get_mut(key) {
            graph.state = state;
        }
    }

    /// Whether the limits hold if some graphs are instantiated and some are evicted: how many of each, and their sizes in all.
    fn fits(&self, added: (usize, Size), evicted: (usize, Size)) -> bool {
        self.limits.graphs.is_none_or(|limit| self.instantiated + added.0 <= limit + evicted.0)
            && self.limits.bytes.is_none_or(|limit| self.ledger.bytes_after(added.1, evicted.1) <= limit)
    }

    /// Graphs that may be evicted and were last wanted before a replay, the least recently wanted first.
    fn evictable(&self, before: u64) -> Vec<(GraphKey, Size)> {
        let idle = |graph: &Entry| graph.state == State::Idle && !graph.pinned && graph.last_wanted < before;
        let mut idle: Vec<_> = self.graphs.iter().filter(|(_, graph)| idle(graph)).collect();
        idle.sort_unstable_by_key(|(_, graph)| graph.last_wanted);
        idle.into_iter().map(|(key, graph)| (key, graph.size)).collect()
    }

    /// The graphs to evict until the limits hold with `added`, and whether they hold then. Only graphs that were last wanted before a replay.
    fn victims(&self, added: (usize, Size), before: u64) -> (Vec<GraphKey>, bool) {
        let (mut victims, mut freed) = (Vec::new(), Size::default());
        if self.fits(added, (0, freed)) {
            return (victims, true);
        }
        for (key, size) in self.evictable(before) {
            victims.push(key);
            freed.executables += size.executables;
            freed.nodes += size.nodes;
            if self.fits(added, (victims.len(), freed)) {
                return (victims, true);
            }
        }
        (victims, false)
    }

    fn evict(&mut self, keys: &[GraphKey]) {
        for key in keys {
            if let Some(graph) = self.graphs.get_mut(*key) {
                graph.state = State::Empty;
                self.instantiated -= 1;
                self.counts.evicted += 1;
                self.ledger.dropped(graph.size);
            }
        }
    }

    /// Evicts until a graph of this size fits. A replay may evict every idle graph, and exceeds the limits where that is not enough. Ahead
    /// of a replay, a graph that was wanted at the last one stays; `None` where nothing else makes enough room.
    fn make_room(&mut self, size: Size, why: Why) -> Option<Vec<GraphKey>> {
        let before = if why == Why::Ahead { self.replays } else { self.replays + 1 };
        let (victims, fits) = self.victims((1, size), before);
        if !fits && why == Why::Ahead {
            return None;
        }
        self.evict(&victims);
        Some(victims)
    }

    /// Evicts until the limits hold, but never the graph that was wanted last.
    fn shrink(&mut self) -> Vec<GraphKey> {
        let (victims, _) = self.victims((0, Size::default()), self.replays);
        self.evict(&victims);
        victims
    }
}

#[cfg(test)]
mod tests;
