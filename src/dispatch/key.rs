//! Shape of a step or a graph.
//!
//! ```text
//!   batch
//!     8 ┤         ■ bucket (16 tokens, batch 8) covers every step in the box under it
//!       │ ········┐
//!     5 ┤     x   ·   step (9 tokens, batch 5); other variants are other planes
//!       └─────┴───┴── tokens
//!             9   16
//! ```

use crate::error::{Error, Result};

/// Number of axes of a key.
pub const AXES: usize = 4;

/// A size of a step which padding may raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Compared with the dispatcher's threshold.
    Tokens = 0,
    /// Sequences of the step.
    Batch = 1,
    /// KV-cache pages of all sequences or of the longest.
    Pages = 2,
    /// Free for the engine.
    Other = 3,
}

impl Axis {
    pub(crate) const ALL: [Self; AXES] = [Self::Tokens, Self::Batch, Self::Pages, Self::Other];
}

/// Bit of [`Key::variant`]: every sequence has the same number of tokens.
pub const UNIFORM_DECODE: u32 = 1;

/// A shape: sizes, which may be padded, and a variant, which must be equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Properties other than size which change the graph. Bit 0 is [`UNIFORM_DECODE`].
    pub variant: u32,
    /// Along each [`Axis`]; 0 on an unused axis.
    pub extents: [u32; AXES],
}

impl Key {
    /// Returns a shape with this number of tokens.
    #[must_use]
    pub fn tokens(tokens: u32) -> Self {
        Self::default().with(Axis::Tokens, tokens)
    }

    /// Sets the size along one axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, extent: u32) -> Self {
        self.extents[axis as usize] = extent;
        self
    }

    /// Sets the variant.
    #[must_use]
    pub fn of_variant(mut self, variant: u32) -> Self {
        self.variant = variant;
        self
    }

    /// Returns the size along an axis.
    #[must_use]
    pub fn extent(&self, axis: Axis) -> u32 {
        self.extents[axis as usize]
    }

    /// Whether a graph of this shape can run a step of shape `other`.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.variant == other.variant
            && self.extents.iter().zip(other.extents).all(|(mine, its)| *mine >= its)
    }

    /// Returns the smallest shape covering both, in the variant of `self`.
    #[must_use]
    pub fn join(mut self, other: &Self) -> Self {
        for (mine, its) in self.extents.iter_mut().zip(other.extents) {
            *mine = (*mine).max(its);
        }
        self
    }
}

/// Cost of one unit along each axis, in any unit; not all zero. Default: a token costs 1, other
/// axes nothing. 16 bits each, so that no sum overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights([u16; AXES]);

impl Weights {
    /// Creates weights, in the order of [`Key::extents`]; fails if all are zero.
    pub fn new(weights: [u16; AXES]) -> Result<Self> {
        if weights == [0; AXES] {
            let expected = "at least one weight above zero";
            return Err(Error::InvalidArgument { what: "the sum of the weights", value: 0, expected });
        }
        Ok(Self(weights))
    }

    /// Returns the weight of a shape.
    #[must_use]
    pub fn of(&self, key: &Key) -> u64 {
        self.0.iter().zip(key.extents).map(|(weight, extent)| u64::from(*weight) * u64::from(extent)).sum()
    }
}

impl Default for Weights {
    fn default() -> Self {
        Self([1, 0, 0, 0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_is_by_size_within_one_variant() {
        let bucket = Key::tokens(16).with(Axis::Batch, 8);
        assert!(bucket.covers(&Key::tokens(9).with(Axis::Batch, 5)));
        assert!(bucket.covers(&bucket));
        assert!(!bucket.covers(&Key::tokens(9).with(Axis::Batch, 9)));
        assert!(!bucket.covers(&Key::tokens(9).of_variant(UNIFORM_DECODE)));
        assert_eq!(
            Key::tokens(4).join(&Key::tokens(2).with(Axis::Batch, 3)),
            Key::tokens(4).with(Axis::Batch, 3)
        );
    }

    #[test]
    fn the_largest_key_has_a_weight() {
        assert!(Weights::new([0; 4]).is_err());
        let most = Weights::new([u16::MAX; 4]).unwrap();
        let key = Key { variant: 0, extents: [u32::MAX; 4] };
        assert_eq!(u128::from(most.of(&key)), 4 * u128::from(u16::MAX) * u128::from(u32::MAX));
        assert_eq!(Weights::default().of(&Key::tokens(7).with(Axis::Batch, 3)), 7);
    }
}
