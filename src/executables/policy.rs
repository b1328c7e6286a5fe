//! Who has executables: plain code, which knows no driver and no clock but the count of replays.

use std::collections::HashMap;

use slotmap::{SlotMap, new_key_type};

use super::cost::{Ledger, Size};
use super::kinds::{Kind, Kinds};

new_key_type! {
    /// A captured graph, or the graphs of one.
    pub(super) struct MemberKey;
    /// A set of executables, one for each graph of a member.
    pub(super) struct SetKey;
}

/// How many executables there may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most captured graphs that have executables at a time; a piecewise one has as many as pieces. `None`: no limit.
    pub most: Option<usize>,
    /// Most bytes of device memory that executables take. `None`: no limit.
    pub most_bytes: Option<u64>,
}

/// What happened in a pool so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sets of executables that were made.
    pub made: u64,
    /// Sets that were updated from one graph to another.
    pub updated: u64,
    /// Updates that the driver refused.
    pub refused: u64,
    /// Sets that were destroyed while their graph, or others that could have used them, lived.
    pub dropped: u64,
    /// Of those made and updated: ahead of a replay, by `wake`.
    pub woken: u64,
    /// Replays that found their executables ready.
    pub ready: u64,
    /// Replays that had to make or update them first.
    pub late: u64,
}

/// Why a member wants executables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// To be launched: there is no way around it.
    Replay,
    /// It may be launched soon.
    Ahead,
}

/// What is to be done first. Whatever it names is the caller's until it says how that went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing.
    Ready(SetKey),
    /// Wait until something has changed: another thread has the member or its set.
    Wait,
    /// Update this set, then [`Policy::updated`], [`Policy::refused`] or [`Policy::failed`].
    Update(SetKey),
    /// Destroy this set if there is one, make a new one, then [`Policy::made`] or [`Policy::failed`].
    Make(Option<SetKey>),
    /// Only ahead: nothing can be had without taking it from somebody who needs it more.
    None,
}

#[derive(Debug)]
struct Member {
    topology: u64,
    functions: u64,
    size: Size,
    /// Its executables are never another's.
    own: bool,
    /// Unknown as long as it never had executables.
    kind: Option<Kind>,
    set: Option<SetKey>,
    /// Executables are being made or updated for it.
    preparing: bool,
}

#[derive(Debug)]
struct Set {
    topology: u64,
    /// Those of the graph that it was updated to last.
    functions: u64,
    size: Size,
    kind: Kind,
    own: bool,
    /// Nobody's: its graph is gone, or an update was refused half way.
    member: Option<MemberKey>,
    /// Being launched, made or updated.
    in_use: bool,
    /// The replay at which it was last used or expected to be.
    wanted: u64,
}

#[derive(Debug, Default)]
struct Topology {
    members: usize,
    kinds: Kinds,
}

/// The books of a pool.
#[derive(Debug, Default)]
pub(super) struct Policy {
    limits: Limits,
    members: SlotMap<MemberKey, Member>,
    sets: SlotMap<SetKey, Set>,
    topologies: HashMap<u64, Topology>,
    pub(super) ledger: Ledger,
    pub(super) counts: Counts,
    /// Nodes of all members.
    nodes: u64,
    replays: u64,
}

impl Policy {
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Members, those that have executables, and the nodes of all.
    pub(super) fn members(&self) -> (usize, usize, u64) {
        let awake = self.sets.values().filter(|set| set.member.is_some()).count();
        (self.members.len(), awake, self.nodes)
    }

    pub(super) fn add(&mut self, topology: u64, functions: u64, size: Size, own: bool) -> MemberKey {
        self.topologies.entry(topology).or_default().members += 1;
        self.nodes += size.nodes;
        self.members.insert(Member {
            topology,
            functions,
            size,
            own,
            kind: None,
            set: None,
            preparing: false,
        })
    }

    /// Ends a member, which nobody launches or prepares. Sets to destroy: all of its topology that nobody can use any more.
    pub(super) fn remove(&mut self, member: MemberKey) -> Vec<SetKey> {
        let Some(gone) = self.members.remove(member) else { return Vec::new() };
        self.nodes -= gone.size.nodes;
        if let Some(set) = gone.set.and_then(|set| self.sets.get_mut(set)) {
            set.member = None;
        }
        let last = self.topologies.get_mut(&gone.topology).is_none_or(|topology| {
            topology.members -= 1;
            topology.members == 0
        });
        if last {
            self.topologies.remove(&gone.topology);
        }
        let over = self.over();
        let unused = self.sets.iter().filter(|(_, set)| {
            set.member.is_none() && !set.in_use && set.topology == gone.topology && (last || set.own || over)
        });
        let unused: Vec<SetKey> = unused.map(|(key, _)| key).collect();
        for set in &unused {
            self.forget(*set);
        }
        unused
    }

    /// What a member's executables take, in bytes, by what others took.
    pub(super) fn bytes_of(&self, member: MemberKey) -> u64 {
        self.members.get(member).map_or(0, |member| self.ledger.share(member.size))
    }

    /// Notes that a member may be launched soon; whether it has executables.
    pub(super) fn expect(&mut self, member: MemberKey) -> bool {
        let set = self.members.get(member).and_then(|member| member.set);
        set.and_then(|set| self.sets.get_mut(set)).map(|set| set.wanted = self.replays).is_some()
    }

    pub(super) fn is_awake(&self, member: MemberKey) -> bool {
        self.members.get(member).is_some_and(|member| member.set.is_some())
    }

    /// From now on the member's executables, those it has or the next ones, are never another's.
    pub(super) fn keep(&mut self, member: MemberKey) {
        if let Some(member) = self.members.get_mut(member) {
            member.own = true;
            if let Some(set) = member.set.and_then(|set| self.sets.get_mut(set)) {
                set.own = true;
            }
        }
    }

    /// What a member that wants executables must do first.
    pub(super) fn enter(&mut self, key: MemberKey, why: Why) -> Step {
        let Some(member) = self.members.get_mut(key) else { return Step::None };
        if member.preparing {
            return Step::Wait;
        }
        if let Some(at) = member.set
            && let Some(set) = self.sets.get_mut(at)
        {
            if why == Why::Ahead {
                set.wanted = self.replays;
                return Step::Ready(at);
            }
            if set.in_use {
                return Step::Wait;
            }
            self.replays += 1;
            self.counts.ready += 1;
            set.wanted = self.replays;
            set.in_use = true;
            return Step::Ready(at);
        }
        let step = self.choose(key, why);
        if step != Step::None {
            self.take(key, &step);
        }
        step
    }

    fn choose(&self, key: MemberKey, why: Why) -> Step {
        let Some(member) = self.members.get(key) else { return Step::None };
        let idle = || self.sets.iter().filter(|(_, set)| !set.in_use && !set.own);
        let of_kind = || idle().filter(|(_, set)| self.may_serve(set, member));
        let room = self.has_room(member.size);
        if !member.own {
            if let Some((set, _)) = of_kind().find(|(_, set)| set.member.is_none()) {
                return Step::Update(set);
            }
            // Ahead of time nothing goes that was wanted at the last replay.
            let mut spare: Vec<_> =
                of_kind().filter(|(_, set)| why == Why::Replay || set.wanted < self.replays).collect();
            spare.sort_unstable_by_key(|(_, set)| set.wanted);
            // Of the older half, one of the same functions: its update takes less than half as long.
            let older = &spare[..spare.len().div_ceil(2)];
            let same = older.iter().find(|(_, set)| set.functions == member.functions);
            if !room && let Some((set, _)) = same.or(spare.first()) {
                return Step::Update(*set);
            }
        }
        if room {
            return Step::Make(None);
        }
        if why == Why::Ahead {
            return Step::None;
        }
        // One more than the limit rather than none; and nothing of a kind that has no other.
        let surplus = idle().filter(|(key, _)| self.is_surplus(*key));
        Step::Make(surplus.min_by_key(|(_, set)| set.wanted).map(|(key, _)| key))
    }

    /// Whether an update from what the set is to what the member is may work, as far as is known.
    fn may_serve(&self, set: &Set, member: &Member) -> bool {
        set.topology == member.topology
            && set.size == member.size
            && member.kind.is_none_or(|kind| {
                self.topologies
                    .get(&set.topology)
                    .is_some_and(|topology| !topology.kinds.apart(kind, set.kind))
            })
    }

    fn has_room(&self, size: Size) -> bool {
        self.limits.most.is_none_or(|most| self.sets.len() < most)
            && self.limits.most_bytes.is_none_or(|most| self.ledger.bytes_with(size) <= most)
    }

    fn over(&self) -> bool {
        self.limits.most.is_some_and(|most| self.sets.len() > most)
            || self.limits.most_bytes.is_some_and(|most| self.ledger.bytes_in_use() > most)
    }

    /// Whether there is another one that may do as well, as far as is known.
    fn is_surplus(&self, key: SetKey) -> bool {
        let Some(set) = self.sets.get(key) else { return false };
        self.sets.iter().any(|(other, found)| {
            other != key
                && !found.own
                && found.topology == set.topology
                && self
                    .topologies
                    .get(&set.topology)
                    .is_some_and(|topology| !topology.kinds.apart(set.kind, found.kind))
        })
    }

    fn take(&mut self, key: MemberKey, step: &Step) {
        let set = match step {
            Step::Update(set) => Some(*set),
            Step::Make(dropped) => *dropped,
            Step::Ready(_) | Step::Wait | Step::None => None,
        };
        if let Some(member) = self.members.get_mut(key) {
            member.preparing = true;
        }
        let Some(at) = set else { return };
        if let Some(set) = self.sets.get_mut(at) {
            set.in_use = true;
            let before = set.member.take();
            if let Some(before) = before.and_then(|before| self.members.get_mut(before)) {
                before.set = None;
            }
        }
        if matches!(step, Step::Make(_)) {
            self.forget(at);
            self.counts.dropped += 1;
        }
    }

    fn forget(&mut self, key: SetKey) {
        if let Some(set) = self.sets.remove(key) {
            self.ledger.dropped(set.size);
        }
    }

    /// The kind of a member, of which nothing may be known yet.
    fn kind_of(&mut self, key: MemberKey) -> Option<Kind> {
        let member = self.members.get_mut(key)?;
        let topology = self.topologies.get_mut(&member.topology)?;
        Some(*member.kind.get_or_insert_with(|| topology.kinds.fresh()))
    }

    /// A set was made, for which the device had so many bytes less; used by the member's replay if that is why.
    pub(super) fn made(&mut self, key: MemberKey, why: Why, bytes: u64) -> Option<SetKey> {
        let kind = self.kind_of(key)?;
        let member = self.members.get(key)?;
        let Member { topology, functions, size, own, .. } = *member;
        self.ledger.made(size, bytes);
        self.counts.made += 1;
        let set = Set { topology, functions, size, kind, own, member: None, in_use: false, wanted: 0 };
        let set = self.sets.insert(set);
        self.give(key, set, why);
        Some(set)
    }

    /// The update was done.
    pub(super) fn updated(&mut self, key: MemberKey, set: SetKey, why: Why) {
        self.counts.updated += 1;
        if let Some(found) = self.sets.get(set) {
            let kind = found.kind;
            if let Some(member) = self.members.get_mut(key)
                && let Some(topology) = self.topologies.get_mut(&member.topology)
            {
                let mine = *member.kind.get_or_insert(kind);
                topology.kinds.join(mine, kind);
            }
        }
        self.give(key, set, why);
    }

    fn give(&mut self, key: MemberKey, set: SetKey, why: Why) {
        match why {
            Why::Replay => {
                self.replays += 1;
                self.counts.late += 1;
            }
            Why::Ahead => self.counts.woken += 1,
        }
        let functions = self.members.get(key).map(|member| member.functions);
        if let Some(found) = self.sets.get_mut(set) {
            found.functions = functions.unwrap_or(found.functions);
            found.member = Some(key);
            found.in_use = why == Why::Replay;
            found.wanted = self.replays;
        }
        if let Some(member) = self.members.get_mut(key) {
            member.set = Some(set);
            member.preparing = false;
        }
    }

    /// The driver refused the update. The set is nobody's now, as some of its executables may be updated.
    pub(super) fn refused(&mut self, key: MemberKey, set: SetKey) {
        self.counts.refused += 1;
        if let (Some(mine), Some(theirs)) = (self.kind_of(key), self.sets.get(set).map(|set| set.kind))
            && let Some(topology) = self.members.get(key).and_then(|m| self.topologies.get_mut(&m.topology))
        {
            if topology.kinds.same(mine, theirs) {
                // What was one kind so far is not: this member stands alone from now on.
                let alone = topology.kinds.fresh();
                topology.kinds.part(alone, theirs);
                if let Some(member) = self.members.get_mut(key) {
                    member.kind = Some(alone);
                }
            } else {
                topology.kinds.part(mine, theirs);
            }
        }
        self.failed(key, Some(set));
    }

    /// Nothing came of it.
    pub(super) fn failed(&mut self, key: MemberKey, set: Option<SetKey>) {
        if let Some(set) = set.and_then(|set| self.sets.get_mut(set)) {
            set.in_use = false;
        }
        if let Some(member) = self.members.get_mut(key) {
            member.preparing = false;
        }
    }

    /// The device has no memory for executables that this member is to have: what else to do. `Make` names a set to destroy first.
    pub(super) fn without_memory(&mut self, key: MemberKey) -> Step {
        let Some(member) = self.members.get(key) else { return Step::None };
        let idle = || self.sets.iter().filter(|(_, set)| !set.in_use && !set.own);
        let shared = idle().filter(|(_, set)| !member.own && self.may_serve(set, member));
        let step = match shared.min_by_key(|(_, set)| set.wanted) {
            Some((set, _)) => Step::Update(set),
            None => match idle().min_by_key(|(_, set)| set.wanted) {
                Some((set, _)) => Step::Make(Some(set)),
                None => Step::None,
            },
        };
        if step != Step::None {
            self.take(key, &step);
        }
        step
    }

    /// The replay was launched. A set to destroy, if there are more than there may be.
    pub(super) fn leave(&mut self, key: MemberKey) -> Option<SetKey> {
        let at = self.members.get(key)?.set?;
        self.sets.get_mut(at)?.in_use = false;
        if !self.over() {
            return None;
        }
        let idle = self.sets.iter().filter(|(key, set)| !set.in_use && !set.own && self.is_surplus(*key));
        let (victim, _) = idle.min_by_key(|(_, set)| set.wanted)?;
        if let Some(member) = self.sets.get(victim).and_then(|set| set.member)
            && let Some(member) = self.members.get_mut(member)
        {
            member.set = None;
        }
        self.forget(victim);
        self.counts.dropped += 1;
        Some(victim)
    }
}

mod classes;
#[cfg(test)]
mod tests;
