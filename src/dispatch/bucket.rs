//! Buckets: the shapes for which graphs are captured.

use crate::error::{Error, Result};

use super::key::{AXES, Key, Weights};

/// Maximum number of buckets in a set.
pub const MAX_BUCKETS: usize = 1 << 16;

/// Returns xLLM's sizes (`CudaGraphExecutorImpl::get_bucket_num_tokens`, jd-opensource/xllm): 1, 2,
/// 4, 8, then multiples of 16, up to the first size of at least `max`.
#[must_use]
pub fn xllm_sizes(max: u32) -> Vec<u32> {
    let mut sizes = Vec::new();
    // In 64 bits: the last multiple of 16 may exceed 2^32.
    let rule =
        [1, 2, 4, 8].into_iter().chain((16..).step_by(16)).map_while(|size: u64| u32::try_from(size).ok());
    for size in rule {
        if sizes.last().is_some_and(|last| *last >= max) || max == 0 {
            break;
        }
        sizes.push(size);
    }
    sizes
}

/// Returns vLLM's default sizes (`VllmConfig._set_cudagraph_sizes`, vllm-project/vllm): 1, 2, 4,
/// multiples of 8 below 256, then multiples of 16 up to `max`: `min(2 * max_num_seqs * tokens a
/// decode, 512)` in vLLM unless set. Newer releases add `max_num_batched_tokens` if within `max`.
#[must_use]
pub fn vllm_sizes(max: u32) -> Vec<u32> {
    let small = [1, 2, 4].into_iter().filter(|size| *size <= max);
    let eights = (8..max.saturating_add(1).min(256)).step_by(8);
    let sixteens = (256..=max).step_by(16);
    small.chain(eights).chain(sixteens).collect()
}

/// Set of distinct buckets, numbered in the order of variant, weight, sizes.
#[derive(Clone, Debug)]
pub struct BucketSet {
    entries: Vec<Entry>,
    weights: Weights,
    /// All ones along axes used by a bucket.
    used: [u32; AXES],
    /// Buckets using each axis.
    users: [usize; AXES],
    /// Variant bits which must match.
    variant_bits: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    variant: u32,
    weight: u64,
    key: Key,
}

impl BucketSet {
    /// Creates a set from buckets in any order. An axis on which all buckets are 0 does not affect
    /// the choice.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a duplicate bucket, a bucket of size 0 on all axes, and too
    /// many buckets.
    pub fn new(buckets: impl IntoIterator<Item = Key>, weights: Weights) -> Result<Self> {
        let refuse = |what, value, expected| Err(Error::InvalidArgument { what, value, expected });
        let mut entries = Vec::new();
        let (mut used, mut users) = ([0; AXES], [0; AXES]);
        for key in buckets {
            if key.extents == [0; AXES] {
                return refuse("a bucket's size", 0, "above zero along some axis");
            }
            if entries.len() == MAX_BUCKETS {
                return refuse("the number of buckets", MAX_BUCKETS as i128 + 1, "at most 65536");
            }
            for ((used, users), extent) in used.iter_mut().zip(&mut users).zip(key.extents) {
                *used |= if extent > 0 { u32::MAX } else { 0 };
                *users += usize::from(extent > 0);
            }
            entries.push(Entry { variant: key.variant, weight: weights.of(&key), key });
        }
        entries.sort_unstable();
        if let Some(pair) = entries.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse("a bucket's weight", i128::from(pair[0].weight), "of a bucket listed once");
        }
        Ok(Self { entries, weights, used, users, variant_bits: u32::MAX })
    }

    /// Creates one bucket for each number of tokens, in variant 0.
    pub fn of_tokens(sizes: impl IntoIterator<Item = u32>) -> Result<Self> {
        Self::new(sizes.into_iter().map(Key::tokens), Weights::default())
    }

    /// Ignores these bits of a step's variant: a piecewise graph runs uniform and mixed steps
    /// alike. Buckets with one of these bits never match.
    #[must_use]
    pub fn ignoring_variant_bits(mut self, bits: u32) -> Self {
        self.variant_bits = !bits;
        self
    }

    /// Returns the number of the lightest bucket covering a step. Logarithmic along one axis; with
    /// several, scans the buckets between the weights of the step and the result.
    #[must_use]
    pub fn nearest(&self, step: &Key) -> Option<usize> {
        self.covering(step).next()
    }

    /// Returns all buckets covering a step, lightest first.
    pub fn covering(&self, step: &Key) -> impl Iterator<Item = usize> + '_ {
        let step = self.relevant(step);
        let start = (step.variant, self.weights.of(&step));
        let first = self.entries.partition_point(|entry| (entry.variant, entry.weight) < start);
        let candidates = self.entries[first..].iter().take_while(move |entry| entry.variant == step.variant);
        let covering = candidates.enumerate().filter(move |(_, entry)| entry.key.covers(&step));
        covering.map(move |(offset, _)| first + offset)
    }

    /// Returns the part of a step's shape which affects the choice.
    #[must_use]
    pub fn relevant(&self, step: &Key) -> Key {
        let mut key = Key { variant: step.variant & self.variant_bits, extents: step.extents };
        for (extent, used) in key.extents.iter_mut().zip(self.used) {
            *extent &= used;
        }
        key
    }

    pub(super) fn is_alone_along_an_axis(&self, number: usize) -> bool {
        let Some(key) = self.get(number) else { return false };
        (0..AXES).any(|axis| key.extents[axis] > 0 && self.users[axis] == 1)
    }

    /// Returns the number of the bucket with exactly this shape.
    #[must_use]
    pub fn find(&self, bucket: &Key) -> Option<usize> {
        let entry = Entry { variant: bucket.variant, weight: self.weights.of(bucket), key: *bucket };
        self.entries.binary_search(&entry).ok()
    }

    /// Returns a bucket by number.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<Key> {
        self.entries.get(number).map(|entry| entry.key)
    }

    /// Returns all buckets in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Key> + '_ {
        self.entries.iter().map(|entry| entry.key)
    }

    /// Returns the number of buckets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the weights which measure padding.
    #[must_use]
    pub fn weights(&self) -> Weights {
        self.weights
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dispatch::key::{Axis, UNIFORM_DECODE};

    #[test]
    fn the_lists_of_xllm_and_vllm() {
        assert_eq!(xllm_sizes(50), [1, 2, 4, 8, 16, 32, 48, 64]);
        assert_eq!(xllm_sizes(8), [1, 2, 4, 8]);
        assert_eq!(xllm_sizes(3), [1, 2, 4]);
        assert!(xllm_sizes(0).is_empty());

        assert_eq!(vllm_sizes(5), [1, 2, 4]);
        assert_eq!(vllm_sizes(20), [1, 2, 4, 8, 16]);
        let sizes = vllm_sizes(512);
        assert_eq!(sizes.len(), 51);
        assert_eq!(sizes[..6], [1, 2, 4, 8, 16, 24]);
        assert_eq!(sizes[32..36], [240, 248, 256, 272]);
        assert_eq!(sizes[50], 512);
        assert!(vllm_sizes(0).is_empty());
    }

    #[test]
    fn xllm_pads_as_its_function_does() {
        let set = BucketSet::of_tokens(xllm_sizes(512)).unwrap();
        for tokens in 0..=512_u32 {
            let expected = match tokens {
                0..=1 => 1,
                2 => 2,
                3..=4 => 4,
                5..=8 => 8,
                _ => tokens.next_multiple_of(16),
            };
            assert_eq!(set.get(set.nearest(&Key::tokens(tokens)).unwrap()), Some(Key::tokens(expected)));
        }
        assert_eq!(set.nearest(&Key::tokens(513)), None);
    }

    #[test]
    fn sets_without_sense_are_refused() {
        assert!(BucketSet::of_tokens([1, 2, 1]).is_err());
        assert!(BucketSet::of_tokens([1, 0]).is_err());
        assert!(BucketSet::of_tokens(1..=MAX_BUCKETS as u32).is_ok());
        assert!(BucketSet::of_tokens(1..=MAX_BUCKETS as u32 + 1).is_err());
        assert_eq!(BucketSet::of_tokens([]).unwrap().nearest(&Key::tokens(1)), None);
    }

    #[test]
    fn axes_and_bits_that_no_bucket_has_do_not_count() {
        let step = Key::tokens(9).with(Axis::Batch, 5).of_variant(UNIFORM_DECODE);
        let piecewise = BucketSet::of_tokens([8, 16]).unwrap();
        assert_eq!(piecewise.nearest(&step), None);
        assert_eq!(piecewise.ignoring_variant_bits(UNIFORM_DECODE).nearest(&step), Some(1));
    }

    fn key() -> impl Strategy<Value = Key> {
        (0..2_u32, prop::array::uniform4(0..6_u32)).prop_map(|(variant, extents)| Key { variant, extents })
    }

    proptest! {
        #[test]
        fn the_nearest_bucket_is_the_lightest_that_covers(
            buckets in prop::collection::btree_set(key(), 1..20),
            steps in prop::collection::vec(key(), 20),
            weights in prop::array::uniform4(0..4_u16),
        ) {
            let buckets: Vec<Key> = buckets.into_iter().filter(|key| key.extents != [0; AXES]).collect();
            let weights = Weights::new(weights).unwrap_or_default();
            let used = |axis: usize| buckets.iter().any(|bucket| bucket.extents[axis] > 0);
            let set = BucketSet::new(buckets.iter().copied(), weights).unwrap();
            for mut step in steps {
                let found = set.nearest(&step).map(|number| set.get(number).unwrap());
                for (axis, extent) in step.extents.iter_mut().enumerate() {
                    *extent *= u32::from(used(axis));
                }
                let naive = buckets.iter().filter(|bucket| bucket.covers(&step)).map(|key| weights.of(key)).min();
                prop_assert_eq!(found.map(|key| weights.of(&key)), naive);
                prop_assert!(found.is_none_or(|key| key.covers(&step)));
            }
        }

        #[test]
        fn a_bucket_is_found_by_its_shape_and_nothing_else_is(
            buckets in prop::collection::btree_set(key(), 1..40),
            strangers in prop::collection::vec(key(), 40),
            weights in prop::array::uniform4(0..4_u16),
        ) {
            let buckets = buckets.into_iter().filter(|key| key.extents != [0; AXES]);
            let set = BucketSet::new(buckets, Weights::new(weights).unwrap_or_default()).unwrap();
            for (number, bucket) in set.iter().enumerate() {
                prop_assert_eq!(set.find(&bucket), Some(number));
            }
            for stranger in strangers {
                prop_assert_eq!(set.find(&stranger), set.iter().position(|bucket| bucket == stranger));
            }
        }
    }
}
