//! Eviction policy of executables: plain code, whose clock counts replays.

use slotmap::{SlotMap, new_key_type};

use super::cost::{Ledger, Size};

new_key_type! {
    /// A piecewise capture is one entry.
    pub(super) struct GraphKey;
}

/// Limits of the executables of a pool; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Captured graphs with executables; a piecewise capture counts once.
    pub graphs: Option<usize>,
    /// Bytes of device memory.
    pub bytes: Option<u64>,
}

/// Event counts of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instantiations of captured graphs.
    pub instantiated: u64,
    /// Part of `instantiated` ahead of a replay.
    pub ahead: u64,
    /// Graphs evicted for the limits or for lack of device memory.
    pub evicted: u64,
    /// Replays with existing executables.
    pub hits: u64,
    /// Replays which had to instantiate first.
    pub misses: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Launch now.
    Replay,
    /// A launch may follow soon.
    Ahead,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The executables exist.
    Ready,
    /// Another thread launches or instantiates this graph: retry after a change.
    Wait,
    /// Destroy these, instantiate the requested graph, then report with [`Policy::made`] or
    /// [`Policy::failed`].
    Instantiate(Vec<GraphKey>),
    /// Only ahead of a replay: the limits would require evicting a more recently wanted graph.
    Refuse,
}

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
    pinned: bool,
    state: State,
    /// Clock of the last launch or hint.
    last_wanted: u64,
}

impl Entry {
    fn has_executables(&self) -> bool {
        matches!(self.state, State::Idle | State::Launching)
    }
}

#[derive(Debug, Default)]
pub(super) struct Policy {
    limits: Limits,
    graphs: SlotMap<GraphKey, Entry>,
    pub(super) ledger: Ledger,
    pub(super) counts: Counts,
    nodes: u64,
    instantiated: usize,
    replays: u64,
}

impl Policy {
    /// Returns the graphs whose executables the caller must destroy.
    pub(super) fn set_limits(&mut self, limits: Limits) -> Vec<GraphKey> {
        self.limits = limits;
        self.shrink()
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Graphs, graphs with executables, nodes.
    pub(super) fn totals(&self) -> (usize, usize, u64) {
        (self.graphs.len(), self.instantiated, self.nodes)
    }

    pub(super) fn add(&mut self, size: Size, pinned: bool) -> GraphKey {
        self.nodes += size.nodes;
        self.graphs.insert(Entry { size, pinned, state: State::Empty, last_wanted: 0 })
    }

    /// Removes a graph, which no thread launches or instantiates.
    pub(super) fn remove(&mut self, key: GraphKey) {
        if let Some(gone) = self.graphs.remove(key) {
            self.nodes -= gone.size.nodes;
            if gone.has_executables() {
                self.instantiated -= 1;
                self.ledger.dropped(gone.size);
            }
        }
    }

    pub(super) fn bytes_of(&self, key: GraphKey) -> u64 {
        self.graphs.get(key).map_or(0, |graph| self.ledger.share(graph.size))
    }

    /// Marks a graph to be evicted last. Returns whether executables exist.
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

    /// Pins present and future executables.
    pub(super) fn pin(&mut self, key: GraphKey) {
        if let Some(graph) = self.graphs.get_mut(key) {
            graph.pinned = true;
        }
    }

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

    /// `bytes`: measured decrease of free device memory.
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

    pub(super) fn failed(&mut self, key: GraphKey) {
        self.set_state(key, State::Empty);
    }

    /// Evicts the least recently wanted, for a device without free memory.
    pub(super) fn evict_one(&mut self) -> Option<GraphKey> {
        let (victim, _) = *self.evictable(self.replays + 1).first()?;
        self.evict(&[victim]);
        Some(victim)
    }

    /// Returns the graphs whose executables the caller must destroy.
    pub(super) fn launched(&mut self, key: GraphKey) -> Vec<GraphKey> {
        self.set_state(key, State::Idle);
        self.shrink()
    }

    /// Evicts every graph, except pinned and launching ones.
    pub(super) fn evict_all(&mut self) -> Vec<GraphKey> {
        let victims: Vec<_> = self.evictable(self.replays + 1).into_iter().map(|(key, _)| key).collect();
        self.evict(&victims);
        victims
    }

    fn set_state(&mut self, key: GraphKey, state: State) {
        if let Some(graph) = self.graphs.get_mut(key) {
            graph.state = state;
        }
    }

    /// Whether the limits hold then; each is given by count and total size.
    fn fits(&self, added: (usize, Size), evicted: (usize, Size)) -> bool {
        self.limits.graphs.is_none_or(|limit| self.instantiated + added.0 <= limit + evicted.0)
            && self.limits.bytes.is_none_or(|limit| self.ledger.bytes_after(added.1, evicted.1) <= limit)
    }

    /// Graphs last wanted before a replay, least recently wanted first.
    fn evictable(&self, before: u64) -> Vec<(GraphKey, Size)> {
        let idle = |graph: &Entry| graph.state == State::Idle && !graph.pinned && graph.last_wanted < before;
        let mut idle: Vec<_> = self.graphs.iter().filter(|(_, graph)| idle(graph)).collect();
        idle.sort_unstable_by_key(|(_, graph)| graph.last_wanted);
        idle.into_iter().map(|(key, graph)| (key, graph.size)).collect()
    }

    /// Selects graphs to evict until the limits hold with `added`; also whether they then hold.
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

    /// A replay may evict every idle graph, and exceeds the limits if insufficient. Ahead of a
    /// replay, a graph wanted at the last replay stays; `None` if the rest is insufficient.
    fn make_room(&mut self, size: Size, why: Why) -> Option<Vec<GraphKey>> {
        let before = if why == Why::Ahead { self.replays } else { self.replays + 1 };
        let (victims, fits) = self.victims((1, size), before);
        if !fits && why == Why::Ahead {
            return None;
        }
        self.evict(&victims);
        Some(victims)
    }

    /// Evicts until the limits hold, except the last wanted graph.
    fn shrink(&mut self) -> Vec<GraphKey> {
        let (victims, _) = self.victims((0, Size::default()), self.replays);
        self.evict(&victims);
        victims
    }
}

#[cfg(test)]
mod tests;
