//! Which unit streams through which slot, and what has to be over before what. Plain code: it knows no driver and no memory.
//!
//! A **turn** is a streamed unit's place among the streamed ones of a step, counted from 0; turn `q` uses slot `q % slots`. Turns go on
//! into the next step: with `s` streamed units, turn `s + k` is the next step's turn `k`. Because the slots divide `s`, that is the
//! same slot in every step, wherever a step begins.
//!
//! ```text
//!   main    begin ─> use 0 ─> use 1 ─> use 2 ─> use 3 ─> ...            ─> end
//!             │        ↑  ╲     ↑  ╲                                        ↑
//!   copies    '─> copy 0 ─> copy 1 ─> copy 2 (behind use 0) ─> copy 3 ...  ─'  (tail: turns of the next step)
//! ```

use crate::error::{Error, Result};

#[cfg(test)]
mod tests;

/// What to do with units that the slots do not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remainder {
    /// As many more units as are too many stay resident, spread evenly.
    #[default]
    KeepResident,
    /// It is an error.
    Refuse,
}

/// Something that is otherwise than it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adjustment {
    /// More slots than half the streamed units: some would never be used twice.
    FewerSlots {
        /// Slots that were asked for.
        asked: usize,
        /// Slots there are.
        given: usize,
    },
    /// The slots do not divide the streamed units, so these stay resident as well, in the order of use.
    KeptResident {
        /// Their numbers.
        units: Vec<usize>,
    },
    /// Every unit that was to stream has a slot of its own, so all are resident.
    NothingStreams {
        /// How many were to stream.
        units: usize,
        /// Slots that were asked for.
        slots: usize,
    },
}

/// A piece of a step's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// What the step waits for, and what it forks from.
    Begin,
    /// The copy of a turn: of this step, or (from the number of streamed units on) of the next one.
    Copy {
        /// Which.
        turn: usize,
    },
    /// The work that reads a unit.
    Use {
        /// Which.
        unit: usize,
    },
    /// What waits for all of the step.
    End,
}

/// Why one thing is behind another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// The model's own order.
    Program,
    /// The copies leave the captured stream here, where the first of them waits for no reader.
    Fork,
    /// Copies are one chain, so that one engine works on them in the order of use.
    Chain,
    /// A unit is read behind its copy.
    Filled,
    /// A slot is filled behind its last reader.
    Read,
    /// The copies come back to the captured stream.
    Join,
}

/// One thing behind another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// What is first.
    pub before: Node,
    /// What is behind it.
    pub after: Node,
    /// Why.
    pub why: Why,
}

/// What a slot holds: a unit, as it was at a stamp of its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The unit.
    pub unit: usize,
    /// Of its source, in the words of whoever changes that.
    pub stamp: u64,
}

/// A ring's plan: which units stream, and through which slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// By unit: its turn, if it streams.
    turns: Vec<Option<usize>>,
    /// By turn: its unit.
    streamed: Vec<usize>,
    /// Resident units, in the order of use.
    residents: Vec<usize>,
    slots: usize,
    adjustments: Vec<Adjustment>,
}

impl Schedule {
    /// A plan for units in the order of use, of which some are to be resident. What is done otherwise than asked is among its
    /// [adjustments](Self::adjustments).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without units or slots, and with [`Remainder::Refuse`] if the slots do not divide the units that stream.
    pub fn new(resident: &[bool], slots: usize, remainder: Remainder) -> Result<Self> {
        let invalid =
            |what, value: usize, expected| Error::InvalidArgument { what, value: value as i128, expected };
        if resident.is_empty() {
            return Err(invalid("the number of units", 0, "at least 1"));
        }
        let mut streams: Vec<bool> = resident.iter().map(|resident| !resident).collect();
        let asked = streams.iter().filter(|streams| **streams).count();
        if slots == 0 && asked > 0 {
            return Err(invalid("the number of slots", 0, "at least 1"));
        }
        let (mut given, mut adjustments) = (slots, Vec::new());
        if asked <= slots {
            if asked > 0 {
                adjustments.push(Adjustment::NothingStreams { units: asked, slots });
            }
            streams.fill(false);
            given = 0;
        } else {
            // Otherwise keeping the remainder resident would leave a turn for each slot.
            if slots > asked / 2 {
                given = asked / 2;
                adjustments.push(Adjustment::FewerSlots { asked: slots, given });
            }
            let too_many = asked % given;
            if too_many > 0 && remainder == Remainder::Refuse {
                return Err(invalid("the number of streamed units", asked, "a multiple of the slots"));
            }
            let units = spread(&streams, too_many);
            units.iter().for_each(|unit| streams[*unit] = false);
            if !units.is_empty() {
                adjustments.push(Adjustment::KeptResident { units });
            }
        }
        let streamed: Vec<usize> = (0..streams.len()).filter(|unit| streams[*unit]).collect();
        let residents = (0..streams.len()).filter(|unit| !streams[*unit]).collect();
        let mut turns = vec![None; streams.len()];
        streamed.iter().enumerate().for_each(|(turn, unit)| turns[*unit] = Some(turn));
        Ok(Self { turns, streamed, residents, slots: given, adjustments })
    }

    /// How many units there are.
    #[must_use]
    pub fn units(&self) -> usize {
        self.turns.len()
    }

    /// How many slots streamed units share; 0: nothing streams.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// How many places for contents there are: the slots, and behind them one for each resident unit.
    #[must_use]
    pub fn places(&self) -> usize {
        self.slots + self.residents.len()
    }

    /// The streamed units, by turn.
    #[must_use]
    pub fn streamed(&self) -> &[usize] {
        &self.streamed
    }

    /// The resident units, in the order of use.
    #[must_use]
    pub fn residents(&self) -> &[usize] {
        &self.residents
    }

    /// What is otherwise than it was asked for.
    #[must_use]
    pub fn adjustments(&self) -> &[Adjustment] {
        &self.adjustments
    }

    /// A unit's turn in a step; `None`: it is resident, or there is no such unit.
    #[must_use]
    pub fn turn_of(&self, unit: usize) -> Option<usize> {
        self.turns.get(unit).copied().flatten()
    }

    /// Where a unit's contents are; `None`: there is no such unit.
    #[must_use]
    pub fn place_of(&self, unit: usize) -> Option<usize> {
        match self.turns.get(unit)? {
            Some(turn) => Some(turn % self.slots),
            None => self.residents.binary_search(&unit).ok().map(|at| self.slots + at),
        }
    }

    /// The unit of a turn, of any step from this one on; `None`: nothing streams.
    #[must_use]
    pub fn unit_at(&self, turn: usize) -> Option<usize> {
        (!self.streamed.is_empty()).then(|| self.streamed[turn % self.streamed.len()])
    }

    /// The units that a step of one graph copies, in order, as turns: behind the first `tail`, which the step before has copied or
    /// somebody has [primed](Self::primes), and with the next step's first `tail` at the end. At most as long as there are slots.
    #[must_use]
    pub fn copies(&self, tail: usize) -> std::ops::Range<usize> {
        let tail = tail.min(self.slots);
        tail..self.streamed.len() + tail
    }

    /// Everything that is behind something in a step of one graph with such a tail. What is behind the step before need not be said: a
    /// graph is launched behind the last launch.
    #[must_use]
    pub fn edges(&self, tail: usize) -> Vec<Edge> {
        let (turns, streamed) = (self.copies(tail), self.streamed.len());
        let (first, last) = (turns.start, turns.end);
        let mut edges = Vec::new();
        let mut add = |before, after, why| edges.push(Edge { before, after, why });
        let mut previous = Node::Begin;
        for unit in 0..self.units() {
            add(previous, Node::Use { unit }, Why::Program);
            previous = Node::Use { unit };
        }
        add(previous, Node::End, Why::Program);
        for turn in turns {
            let copy = Node::Copy { turn };
            // The slot's last reader; that of the first ones is in the step before.
            let reader = turn.checked_sub(self.slots);
            if turn > first {
                add(Node::Copy { turn: turn - 1 }, copy, Why::Chain);
            } else if reader.is_none() {
                add(Node::Begin, copy, Why::Fork);
            }
            if let Some(reader) = reader {
                add(Node::Use { unit: self.streamed[reader] }, copy, Why::Read);
            }
            if turn < streamed {
                add(copy, Node::Use { unit: self.streamed[turn] }, Why::Filled);
            } else if turn + 1 == last {
                add(copy, Node::End, Why::Join);
            }
        }
        edges
    }

    /// The units to be copied before a graph with such a tail is launched, in the order of use: residents, and the first of the streamed
    /// ones, where their place does not hold what the graph expects. `held`: by place; `wanted`: by unit, its source's stamp.
    #[must_use]
    pub fn primes(&self, tail: usize, held: &[Option<Held>], wanted: &[u64]) -> Vec<usize> {
        let early = self.streamed.iter().take(tail.min(self.slots));
        let mut units: Vec<usize> = self.residents.iter().chain(early).copied().collect();
        units.sort_unstable();
        units.retain(|unit| {
            let held = self.place_of(*unit).and_then(|place| held.get(place).copied().flatten());
            let stamp = wanted.get(*unit).copied().unwrap_or(0);
            held != Some(Held { unit: *unit, stamp })
        });
        units
    }

    /// What the places hold behind a launch of such a graph, which copies each unit at the stamp that it wants.
    pub fn advance(&self, tail: usize, held: &mut [Option<Held>], wanted: &[u64]) {
        for turn in self.copies(tail) {
            let Some(unit) = self.unit_at(turn) else { continue };
            if let Some(place) = held.get_mut(turn % self.slots) {
                *place = Some(Held { unit, stamp: wanted.get(unit).copied().unwrap_or(0) });
            }
        }
    }
}

/// So many of those that stream, evenly spread.
pub(super) fn spread(streams: &[bool], count: usize) -> Vec<usize> {
    let all: Vec<usize> = (0..streams.len()).filter(|unit| streams[*unit]).collect();
    (0..count.min(all.len())).map(|k| all[(2 * k + 1) * all.len() / (2 * count)]).collect()
}
