//! Input layout: inputs and outputs in one device arena, packed separately for each bucket, as
//! replay needs fixed addresses only within one graph:
//!
//! ```text
//!   arena     | host inputs          | device inputs | outputs            |
//!   bucket 4  |tok|pos|slots|ind..   |emb            |hid                 |
//!   bucket 64 |tok  |pos  |slots|ind.|emb            |hidden states       |
//!             0^^^^^^^^^^^^^^^^^^^^ one copy from staging memory of the same layout
//! ```
//!
//! Fixed offsets for all buckets would need a copy of the gaps, a copy per input, or a scatter
//! kernel in every graph.
//!
//! Inputs with a length set by the step ([`Extent::UpTo`](super::Extent::UpTo)) come last, the
//! largest at the very end, so that the copy stops at the end of its data. Any other is copied at
//! full length.
//!
//! The three regions start at the same offsets for every bucket, so outputs of the last step stay
//! until a graph writes there.

use crate::error::{Error, Result};
use crate::units::checked_bytes;

use super::bucket::BucketSet;
use super::input::{Input, MAX_RANK, Role};
use super::key::Key;

/// Smallest alignment, assumed by kernels with vector loads and by torch.
pub const MIN_ALIGNMENT: u64 = 256;

/// Largest alignment: a small page.
pub const MAX_ALIGNMENT: u64 = 2 << 20;

/// Location of an input or output in one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Offset from the start of the arena; for a host input, also of staging memory.
    pub offset: u64,
    /// Bytes of the full shape.
    pub bytes: u64,
    pub(super) shape: [u32; MAX_RANK],
    pub(super) rank: usize,
}

impl View {
    /// Returns the shape in this bucket.
    #[must_use]
    pub fn shape(&self) -> &[u32] {
        &self.shape[..self.rank]
    }

    /// Returns the end offset.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// Layout of one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketLayout {
    pub(super) key: Key,
    pub(super) views: Vec<View>,
    host_bytes: u64,
}

impl BucketLayout {
    /// Returns the bucket.
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }

    /// Returns the views of all inputs and outputs, in the order of their declaration.
    #[must_use]
    pub fn views(&self) -> &[View] {
        &self.views
    }

    /// Returns the bytes of all host inputs: the maximum length of a copy.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }
}

/// Layouts of all buckets over one arena.
#[derive(Clone, Debug)]
pub struct InputPlan {
    inputs: Vec<Input>,
    layouts: Vec<BucketLayout>,
    regions: [(u64, u64); 3],
    alignment: u64,
}

impl InputPlan {
    /// Creates the layout for every bucket. Each input starts at a multiple of `alignment`, a power
    /// of two from [`MIN_ALIGNMENT`] to [`MAX_ALIGNMENT`].
    ///
    /// # Errors
    /// [`Error::InputMismatch`] for a duplicate or empty name, no or too many dimensions, a
    /// dimension of 0 or along an axis unused by a bucket. [`Error::InvalidSize`] for an arena
    /// beyond [`MAX_BYTES`](crate::units::MAX_BYTES).
    pub fn new(inputs: Vec<Input>, buckets: &BucketSet, alignment: u64) -> Result<Self> {
        if !alignment.is_power_of_two() || !(MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&alignment) {
            let expected = "a power of two from 256 to 2 MiB";
            return Err(Error::InvalidArgument { what: "the alignment", value: alignment.into(), expected });
        }
        for (place, input) in inputs.iter().enumerate() {
            input.check()?;
            if inputs[..place].iter().any(|earlier| earlier.name == input.name) {
                return Err(input.mismatch("the name", "given twice", "unique"));
            }
        }
        let order = order(&inputs);
        let mut layouts = Vec::with_capacity(buckets.len());
        let mut most = [0_u64; 3];
        for key in buckets.iter() {
            let (views, lengths) = pack(&inputs, &order, &key, alignment)?;
            for (most, length) in most.iter_mut().zip(lengths) {
                *most = (*most).max(length);
            }
            let host_bytes = lengths[Role::HostInput as usize];
            layouts.push(BucketLayout { key, views, host_bytes });
        }
        let mut regions = [(0, 0); 3];
        let mut start = 0_u64;
        for (region, most) in regions.iter_mut().zip(most) {
            *region = (start, most);
            // Each is below 2^46, so the sum cannot overflow.
            start = (start + most).next_multiple_of(alignment);
        }
        checked_bytes("input arena", start)?;
        for layout in &mut layouts {
            for (view, input) in layout.views.iter_mut().zip(&inputs) {
                view.offset += regions[input.role as usize].0;
            }
        }
        Ok(Self { inputs, layouts, regions, alignment })
    }

    /// Returns the declarations.
    #[must_use]
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// Returns the index of an input, by name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        self.inputs.iter().position(|input| input.name == name)
    }

    /// Returns the layout of a bucket, by number.
    #[must_use]
    pub fn layout(&self, bucket: usize) -> Option<&BucketLayout> {
        self.layouts.get(bucket)
    }

    /// Returns the bytes of the arena, whose base has the plan's alignment.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.regions.map(|(start, bytes)| start + bytes).into_iter().max().unwrap_or(0)
    }

    /// Returns the bytes of staging memory for every bucket.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.regions[Role::HostInput as usize].1
    }

    /// Returns start and length of a role's region.
    #[must_use]
    pub fn region(&self, role: Role) -> (u64, u64) {
        self.regions[role as usize]
    }

    /// Returns the alignment of every offset.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }
}

/// Packing order: bucket-sized inputs as declared, then step-sized inputs by size.
fn order(inputs: &[Input]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..inputs.len()).collect();
    let weight = |input: &Input| {
        let fixed = input.shape.iter().map(|extent| match *extent {
            super::Extent::Fixed(extent) | super::Extent::UpTo(extent) => u128::from(extent),
            super::Extent::Along { times, plus, .. } => u128::from(times) + u128::from(plus),
        });
        fixed.fold(input.dtype.size() as u128, u128::saturating_mul)
    };
    order.sort_by_key(|number| {
        let input = &inputs[*number];
        if input.is_step_sized() { (true, weight(input)) } else { (false, 0) }
    });
    order
}

/// Returns the views, with offsets relative to their regions, and the regions' lengths.
fn pack(inputs: &[Input], order: &[usize], key: &Key, alignment: u64) -> Result<(Vec<View>, [u64; 3])> {
    let mut views = vec![View { offset: 0, bytes: 0, shape: [0; MAX_RANK], rank: 0 }; inputs.len()];
    let mut lengths = [0_u64; 3];
    for number in order {
        let (input, view) = (&inputs[*number], &mut views[*number]);
        let mut bytes = input.dtype.size() as u64;
        view.rank = input.shape.len();
        for (extent, place) in input.shape.iter().zip(&mut view.shape) {
            *place = extent.resolve(key).filter(|extent| *extent > 0).ok_or_else(|| {
                input.mismatch(
                    "a dimension",
                    format!("{extent:?}"),
                    format!("1 to 2^32 - 1 in bucket {:?}", key.extents),
                )
            })?;
            bytes = bytes.saturating_mul(u64::from(*place));
        }
        let end = &mut lengths[input.role as usize];
        view.offset = end.next_multiple_of(alignment);
        view.bytes = bytes;
        checked_bytes("input", bytes)?;
        *end = checked_bytes("input", view.end())?;
    }
    Ok((views, lengths))
}

#[cfg(test)]
mod tests;
