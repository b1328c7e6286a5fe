//! Declarations of a graph's inputs and outputs.

use std::fmt::Display;

use crate::error::{Error, Result};

use super::key::{Axis, Key};

/// Maximum number of dimensions of an input.
pub const MAX_RANK: usize = 4;

/// Element type.
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

    /// Returns the bytes of an element.
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

/// Length of a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Fixed length.
    Fixed(u32),
    /// `times` the bucket's size along an axis, plus `plus`.
    Along {
        /// The axis.
        axis: Axis,
        /// Factor.
        times: u32,
        /// Summand.
        plus: u32,
    },
    /// Length set by each step, at most this value; first dimension only. The rest is neither
    /// padded nor copied: kernels learn the length from another input.
    UpTo(u32),
}

impl Extent {
    /// Returns one element per unit along an axis.
    #[must_use]
    pub fn along(axis: Axis) -> Self {
        Self::Along { axis, times: 1, plus: 0 }
    }

    /// Returns the size along an axis plus one: an offset array.
    #[must_use]
    pub fn offsets(axis: Axis) -> Self {
        Self::Along { axis, times: 1, plus: 1 }
    }

    /// `None` beyond 32 bits, or if the bucket's size along the axis is 0.
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

/// Writer of an input or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Written by the host before every step, in one copy.
    HostInput = 0,
    /// Written by the device before the graph runs.
    DeviceInput = 1,
    /// Written by the graph.
    Output = 2,
}

impl Role {
    pub(crate) const ALL: [Self; 3] = [Self::HostInput, Self::DeviceInput, Self::Output];
}

/// Fill value where a step is smaller than its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PadRule {
    /// Zero.
    Zero,
    /// The nearest element of the step, in every dimension: offsets continue as empty rows. Zero
    /// for an empty step.
    RepeatLast,
    /// An element of the input's dtype, as little-endian bits.
    Value(u64),
}

/// An input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Name, unique in a plan.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Outermost first; elements are contiguous.
    pub shape: Vec<Extent>,
    /// Writer.
    pub role: Role,
    /// Host inputs only.
    pub pad: PadRule,
}

impl Input {
    /// Declares a host input, padded with zeros.
    #[must_use]
    pub fn host(name: &str, dtype: Dtype, shape: &[Extent]) -> Self {
        let role = Role::HostInput;
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), role, pad: PadRule::Zero }
    }

    /// Declares an output.
    #[must_use]
    pub fn output(name: &str, dtype: Dtype, shape: &[Extent]) -> Self {
        Self { role: Role::Output, ..Self::host(name, dtype, shape) }
    }

    /// Sets the pad rule.
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
