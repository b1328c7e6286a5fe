//! Where inputs and outputs lie: one device arena, laid out anew for each bucket.
//!
//! Replay needs fixed addresses, but only those of its own graph, and each bucket has its own graph. So inputs need not stand at
//! the offsets that their maximum shapes would take. Each bucket packs its inputs to **its** sizes at the start of the arena:
//!
//! ```text
//!   arena     | host inputs          | device inputs | outputs            |
//!   bucket 4  |tok|pos|slots|ind..   |emb            |hid                 |
//!   bucket 64 |tok  |pos  |slots|ind.|emb            |hidden states       |
//!             0^^^^^^^^^^^^^^^^^^^^ one copy from staging memory of the same layout
//! ```
//!
//! One host-to-device copy then covers a step's host inputs, and what it moves in vain is alignment and the bucket's padding, never
//! the maximum of an input. (Fixed offsets for all buckets would make it move the gaps between maxima, or need a copy for each input,
//! or a scatter kernel in every graph.) The arena is no larger than the maximum shapes one behind another, since buckets lie over each
//! other.
//!
//! Inputs whose length only the step knows ([`Extent::UpTo`](super::Extent::UpTo)) stand last, the largest of them at the very end, so that the copy
//! can stop where that one's data does. A second one is copied at its full length: make it an axis of the key
//! ([`Axis::Pages`](super::Axis::Pages)) if that is much.
//!
//! The three regions start at the same offsets for every bucket. Preparing the next step of another bucket overwrites inputs only;
//! outputs of the last step stay until a graph writes them. Staging memory may be written again when its copy is done: an engine
//! that prepares ahead keeps two.

use crate::error::{Error, Result};
use crate::units::checked_bytes;

use super::bucket::BucketSet;
use super::input::{Input, MAX_RANK, Role};
use super::key::Key;

/// Smallest alignment of an input, in bytes: what kernels that load vectors, and torch itself, take for granted.
pub const MIN_ALIGNMENT: u64 = 256;

/// Largest alignment, in bytes: a small page.
pub const MAX_ALIGNMENT: u64 = 2 << 20;

/// An input's or output's place in one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Bytes from the start of the arena; for a host input, also from the start of staging memory.
    pub offset: u64,
    /// Bytes of the whole shape.
    pub bytes: u64,
    pub(super) shape: [u32; MAX_RANK],
    pub(super) rank: usize,
}

impl View {
    /// The shape in this bucket.
    #[must_use]
    pub fn shape(&self) -> &[u32] {
        &self.shape[..self.rank]
    }

    /// The first byte behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// The layout of one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketLayout {
    pub(super) key: Key,
    pub(super) views: Vec<View>,
    host_bytes: u64,
}

impl BucketLayout {
    /// The bucket.
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }

    /// The views of all inputs and outputs, in the order of their declaration.
    #[must_use]
    pub fn views(&self) -> &[View] {
        &self.views
    }

    /// Bytes that the host inputs span, from offset 0; the most that a copy moves.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }
}

/// The layouts of all buckets over one arena.
#[derive(Clone, Debug)]
pub struct InputPlan {
    inputs: Vec<Input>,
    layouts: Vec<BucketLayout>,
    regions: [(u64, u64); 3],
    alignment: u64,
}

impl InputPlan {
    /// Lays the inputs out for every bucket, each at a multiple of `alignment` bytes (a power of two from [`MIN_ALIGNMENT`]
    /// to [`MAX_ALIGNMENT`]; 512 is what torch's own allocator gives).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an alignment that is none; [`Error::InputMismatch`] for an input that cannot be declared so:
    /// a name twice or empty, no or too many dimensions, a dimension of zero or along an axis that a bucket does not have;
    /// [`Error::InvalidSize`] if the arena would be beyond [`MAX_BYTES`](crate::units::MAX_BYTES).
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
            // Each below 2^46, so no sum wraps.
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

    /// The inputs and outputs as declared.
    #[must_use]
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// The number of an input, by name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        self.inputs.iter().position(|input| input.name == name)
    }

    /// The layout of a bucket, by its number in the bucket set.
    #[must_use]
    pub fn layout(&self, bucket: usize) -> Option<&BucketLayout> {
        self.layouts.get(bucket)
    }

    /// Bytes of the arena; its start must be aligned as the inputs are.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.regions.map(|(start, bytes)| start + bytes).into_iter().max().unwrap_or(0)
    }

    /// Bytes of staging memory that every bucket's host inputs fit.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.regions[Role::HostInput as usize].1
    }

    /// Start and length of a role's region, in bytes.
    #[must_use]
    pub fn region(&self, role: Role) -> (u64, u64) {
        self.regions[role as usize]
    }

    /// What every view's offset is a multiple of.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }
}

/// Bucket-sized inputs as declared, then step-sized ones, shortest first.
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

/// The views of one bucket, offsets from the start of their regions, and the regions' lengths.
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
