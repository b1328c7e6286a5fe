//! Inputs and outputs of a graph, as an engine declares them once.

use std::fmt::Display;

use crate::error::{Error, Result};

use super::key::{Axis, Key};

/// Most dimensions of an input.
pub const MAX_RANK: usize = 4;

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are torch's")]
pub enum Dtype {
    Bool = 0,
    U8 = 1,
    I8 = 2,
    I16 = 3,
    I32 = 4,
    I64 = 5,
    F16 = 6,
    BF16 = 7,
    F32 = 8,
    F64 = 9,
    F8 = 10,
}

impl Dtype {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Self; 11] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
        Self::F8,
    ];

    /// Bytes of an element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8 => 1,
            Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }
}

/// How long a dimension is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Always so long.
    Fixed(u32),
    /// `times` the bucket's size along an axis, plus `plus`: one row for each token, batch + 1 offsets.
    Along {
        /// The axis.
        axis: Axis,
        /// Factor.
        times: u32,
        /// Summand.
        plus: u32,
    },
    /// At most so long, as each step needs it; first dimension only. Kernels learn the length from another input (page indices from
    /// their offsets), so the rest is neither padded nor copied.
    UpTo(u32),
}

impl Extent {
    /// One for each unit along an axis.
    #[must_use]
    pub fn along(axis: Axis) -> Self {
        Self::Along { axis, times: 1, plus: 0 }
    }

    /// One more than the size along an axis: offsets of so many rows.
    #[must_use]
    pub fn offsets(axis: Axis) -> Self {
        Self::Along { axis, times: 1, plus: 1 }
    }

    /// The length in a bucket; `None` beyond 32 bits, or along an axis that the bucket does not have.
    pub(super) fn resolve(self, bucket: &Key) -> Option<u32> {
        match self {
            Self::Fixed(extent) | Self::UpTo(extent) => Some(extent),
            Self::Along { axis, times, plus } => match bucket.extent(axis) {
                0 => None,
                extent => extent.checked_mul(times)?.checked_add(plus),
            },
        }
    }
}

/// Who writes an input, and whether it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Written by the host before every step; travels with the others in one copy.
    HostInput = 0,
    /// Written by the device before the graph runs.
    DeviceInput = 1,
    /// Written by the graph.
    Output = 2,
}

impl Role {
    /// All of them, in the order of their numbers, which is that of their regions.
    pub(crate) const ALL: [Self; 3] = [Self::HostInput, Self::DeviceInput, Self::Output];
}

/// What stands where a step is smaller than its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PadRule {
    /// Zero.
    Zero,
    /// The nearest element that the step has, in every dimension: offsets go on as empty rows. Zero if the step has none.
    RepeatLast,
    /// An element of the input's dtype, as its little-endian bits.
    Value(u64),
}

/// An input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its name, unique in a plan.
    pub name: String,
    /// Its elements.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; elements are contiguous.
    pub shape: Vec<Extent>,
    /// Who writes it.
    pub role: Role,
    /// How a smaller step is padded; host inputs only.
    pub pad: PadRule,
}

impl Input {
    /// A host input, padded with zeros.
    #[must_use]
    pub fn host(name: &str, dtype: Dtype, shape: &[Extent]) -> Self {
        let role = Role::HostInput;
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), role, pad: PadRule::Zero }
    }

    /// An output.
    #[must_use]
    pub fn output(name: &str, dtype: Dtype, shape: &[Extent]) -> Self {
        Self { role: Role::Output, ..Self::host(name, dtype, shape) }
    }

    /// The same with another pad rule.
    #[must_use]
    pub fn padded_with(mut self, pad: PadRule) -> Self {
        self.pad = pad;
        self
    }

    pub(super) fn is_step_sized(&self) -> bool {
        matches!(self.shape.first(), Some(Extent::UpTo(_)))
    }

    pub(super) fn mismatch(&self, what: &'static str, found: impl Display, expected: impl Display) -> Error {
        let problem = format!("{what} is {found}, must be {expected}");
        Error::InputMismatch { input: self.name.clone(), problem }
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.name.is_empty() {
            return Err(self.mismatch("the name", "empty", "some text"));
        }
        if self.shape.is_empty() || self.shape.len() > MAX_RANK {
            return Err(self.mismatch("the number of dimensions", self.shape.len(), "1 to 4"));
        }
        if self.shape[1..].iter().any(|extent| matches!(extent, Extent::UpTo(_))) {
            return Err(self.mismatch(
                "a dimension behind the first",
                "sized by the step",
                "sized by the bucket",
            ));
        }
        Ok(())
    }
}
