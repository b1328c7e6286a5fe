//! Schedule: slot of each streaming unit, and the dependencies of a step.
//!
//! A **position** is the index of a unit among the streaming units. Position `q` uses slot `q %
//! slots`. With `s` streaming units, position `s + k` is position `k` of the next step. The slots
//! divide `s`, so a unit has the same slot in every step. The **tail** of a step copies the first
//! units of the next step.
//!
//! ```text
//!   main    begin ─> use 0 ─> use 1 ─> use 2 ─> use 3 ─> ...               ─> end
//!             │        ↑  ╲     ↑  ╲                                            ↑
//!   copies    '─> copy 0 ─> copy 1 ─> copy 2 (after use 0) ─> copy 3 ... tail ─'
//! ```

use crate::error::{Error, Result};

#[cfg(test)]
mod tests;

/// Handling of streaming units which the slots do not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remainder {
    /// The remainder stays resident, evenly spread.
    #[default]
    KeepResident,
    /// Return an error.
    Refuse,
}

/// A difference from the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adjustment {
    /// More slots than half of the streaming units: some would never be reused.
    FewerSlots {
        /// Requested slots.
        asked: usize,
        /// Slots of the schedule.
        given: usize,
    },
    /// The slots do not divide the streaming units, so these stay resident.
    KeptResident {
        /// Numbers of the units.
        units: Vec<usize>,
    },
    /// Every streaming unit would have its own slot, so all are resident.
    NothingStreams {
        /// Units requested to stream.
        units: usize,
        /// Requested slots.
        slots: usize,
    },
}

/// A node of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// Fork point.
    Begin,
    /// Copy of a position, perhaps of the next step.
    Copy {
        /// The position.
        position: usize,
    },
    /// Work reading a unit.
    Use {
        /// The unit.
        unit: usize,
    },
    /// End of the step.
    End,
}

/// Reason for a dependency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// Order of the model.
    Program,
    /// Start of the copies, before the first reader.
    Fork,
    /// Copies form one chain in the order of use.
    Chain,
    /// A unit is read after its copy.
    Filled,
    /// A slot is filled after its last reader.
    Read,
    /// Copies join the captured stream.
    Join,
}

/// A dependency between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// Earlier node.
    pub before: Node,
    /// Later node.
    pub after: Node,
    /// Reason.
    pub why: Why,
}

/// Contents of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The unit.
    pub unit: usize,
    /// Stamp of the source.
    pub stamp: u64,
}

/// Streaming units and their slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    positions: Vec<Option<usize>>,
    streamed: Vec<usize>,
    residents: Vec<usize>,
    slots: usize,
    adjustments: Vec<Adjustment>,
}

impl Schedule {
    /// Creates a schedule for units in the order of use; see its [adjustments](Self::adjustments).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without units or slots, and with [`Remainder::Refuse`] if the
    /// slots do not divide the streaming units.
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
            // Otherwise the remainder could leave one unit for each slot.
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
        let mut positions = vec![None; streams.len()];
        streamed.iter().enumerate().for_each(|(position, unit)| positions[*unit] = Some(position));
        Ok(Self { positions, streamed, residents, slots: given, adjustments })
    }

    /// Returns the number of units.
    #[must_use]
    pub fn units(&self) -> usize {
        self.positions.len()
    }

    /// Returns the number of slots. 0: no unit streams.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of slots and resident units.
    #[must_use]
    pub fn places(&self) -> usize {
        self.slots + self.residents.len()
    }

    /// Returns the streaming units, by position.
    #[must_use]
    pub fn streamed(&self) -> &[usize] {
        &self.streamed
    }

    /// Returns the resident units, in the order of use.
    #[must_use]
    pub fn residents(&self) -> &[usize] {
        &self.residents
    }

    /// Returns the differences from the request.
    #[must_use]
    pub fn adjustments(&self) -> &[Adjustment] {
        &self.adjustments
    }

    /// Returns the position of a streaming unit.
    #[must_use]
    pub fn position_of(&self, unit: usize) -> Option<usize> {
        self.positions.get(unit).copied().flatten()
    }

    /// Returns the place of a unit.
    #[must_use]
    pub fn place_of(&self, unit: usize) -> Option<usize> {
        match self.positions.get(unit)? {
            Some(position) => Some(position % self.slots),
            None => self.residents.binary_search(&unit).ok().map(|at| self.slots + at),
        }
    }

    /// Returns the unit of a position, in this or a later step.
    #[must_use]
    pub fn unit_at(&self, position: usize) -> Option<usize> {
        (!self.streamed.is_empty()).then(|| self.streamed[position % self.streamed.len()])
    }

    /// Returns the positions copied by one captured step. The first `tail` (at most the slots) were
    /// copied by the previous step or [primed](Self::primes), and the first `tail` of the next step
    /// are added.
    #[must_use]
    pub fn copies(&self, tail: usize) -> std::ops::Range<usize> {
        let tail = tail.min(self.slots);
        tail..self.streamed.len() + tail
    }

    /// Returns all dependencies within a captured step. A launch follows the last launch.
    #[must_use]
    pub fn edges(&self, tail: usize) -> Vec<Edge> {
        let (positions, streamed) = (self.copies(tail), self.streamed.len());
        let (first, last) = (positions.start, positions.end);
        let mut edges = Vec::new();
        let mut add = |before, after, why| edges.push(Edge { before, after, why });
        let mut previous = Node::Begin;
        for unit in 0..self.units() {
            add(previous, Node::Use { unit }, Why::Program);
            previous = Node::Use { unit };
        }
        add(previous, Node::End, Why::Program);
        for position in positions {
            let copy = Node::Copy { position };
            // The first readers belong to the previous step.
            let reader = position.checked_sub(self.slots);
            if position > first {
                add(Node::Copy { position: position - 1 }, copy, Why::Chain);
            } else if reader.is_none() {
                add(Node::Begin, copy, Why::Fork);
            }
            if let Some(reader) = reader {
                add(Node::Use { unit: self.streamed[reader] }, copy, Why::Read);
            }
            if position < streamed {
                add(copy, Node::Use { unit: self.streamed[position] }, Why::Filled);
            } else if position + 1 == last {
                add(copy, Node::End, Why::Join);
            }
        }
        edges
    }

    /// Returns the units to copy before a launch: resident units and the first `tail` units whose
    /// places have other contents. `held`: by place; `wanted`: stamp of each unit's source.
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

    /// Updates the contents for a launch, which copies each unit at its stamp in `wanted`.
    pub fn advance(&self, tail: usize, held: &mut [Option<Held>], wanted: &[u64]) {
        for position in self.copies(tail) {
            let Some(unit) = self.unit_at(position) else { continue };
            if let Some(place) = held.get_mut(position % self.slots) {
                *place = Some(Held { unit, stamp: wanted.get(unit).copied().unwrap_or(0) });
            }
        }
    }
}

pub(super) fn spread(streams: &[bool], count: usize) -> Vec<usize> {
    let all: Vec<usize> = (0..streams.len()).filter(|unit| streams[*unit]).collect();
    (0..count.min(all.len())).map(|k| all[(2 * k + 1) * all.len() / (2 * count)]).collect()
}
