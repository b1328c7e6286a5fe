//! Numbers with invariants, as types.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use crate::error::{Error, Result};

/// Granule of block sizes in bytes, as torch's for tensor storage.
pub const BLOCK_GRANULE: u64 = 512;

/// Maximum bytes of a block or page: half of a 47-bit address space.
pub const MAX_BYTES: u64 = 1 << 46;

/// Checks a caller's size: from 1 to [`MAX_BYTES`] bytes. The sum of two valid sizes cannot
/// overflow.
pub fn checked_size(what: &'static str, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        Err(Error::InvalidSize { what, bytes, limit: MAX_BYTES })
    } else {
        checked_bytes(what, bytes)
    }
}

/// Like [`checked_size`], but accepts 0.
pub fn checked_bytes(what: &'static str, bytes: u64) -> Result<u64> {
    if bytes > MAX_BYTES { Err(Error::InvalidSize { what, bytes, limit: MAX_BYTES }) } else { Ok(bytes) }
}

/// Checks the product of `count` and `each`, like [`checked_size`].
pub fn checked_product(what: &'static str, count: u64, each: u64) -> Result<u64> {
    checked_size(what, count.saturating_mul(each))
}

/// Maximum small page: a length inside a slab fits 16 bits.
pub const MAX_SMALL_PAGE: u64 = BLOCK_GRANULE << 15;

/// Hashes as FxHash: the same in every process and build.
pub(crate) fn mix(hash: u64, number: u64) -> u64 {
    (hash.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95)
}

#[derive(Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mix(self.0, number);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Map by numbers created by this library: callers cannot choose colliding ones. The standard
/// library's hash takes a tenth of opening a space.
pub(crate) type ByNumber<T> = HashMap<u64, T, BuildHasherDefault<NumberHasher>>;

/// An address on the device (on the host driver: in this process).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// Returns the address plus `bytes`, inside one reservation.
    #[must_use]
    pub fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream, by the driver's handle (`CUstream` as an integer). [`PER_THREAD`](Self::PER_THREAD)
/// depends on the calling thread, both default streams on a current green context, and the handle
/// of a destroyed stream may be reused. Safe code cannot create a stream:
///
/// ```compile_fail
/// let forged = vmmgraph::Stream(5);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(u64);

impl Stream {
    /// Legacy default stream (`CU_STREAM_LEGACY`, and the handle 0).
    pub const LEGACY: Self = Self(0);
    /// Default stream of the calling thread (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: Self = Self(2);

    /// Whether this is a default stream.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.0 == Self::LEGACY.0 || self.0 == Self::PER_THREAD.0
    }

    /// Creates a stream from a handle.
    ///
    /// # Safety
    /// On a CUDA device the handle is a stream of the device. It must exist at each use: until the
    /// last replay on the stream is [marked](crate::ReplayOrder::mark), and until blocks recorded
    /// for it are freed; if it is then under capture, until a
    /// [mark](crate::SharedVmmAllocator::mark) after the capture.
    #[must_use]
    pub const unsafe fn from_raw(handle: u64) -> Self {
        // CU_STREAM_LEGACY.
        Self(if handle == 1 { 0 } else { handle })
    }

    /// Returns the driver's handle.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.0
    }
}

/// Bytes of a block: a multiple of [`BLOCK_GRANULE`], at least one granule and at most
/// [`MAX_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockBytes(u64);

impl BlockBytes {
    /// Rounds a request up to whole granules; fails for zero and for more than [`MAX_BYTES`].
    pub fn round_up(requested: u64) -> Result<Self> {
        Ok(Self(checked_size("block", requested)?.next_multiple_of(BLOCK_GRANULE)))
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// Page sizes of an arena: `small` is a power of two from 4096 bytes to [`MAX_SMALL_PAGE`], `large`
/// a multiple of `small`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    small: u64,
    large: u64,
}

impl Geometry {
    /// Checks the two sizes; [`Error::InvalidPageSize`] names the first invalid one.
    pub fn new(small: u64, large: u64, granularity: u64) -> Result<Self> {
        let refuse = |what, bytes| Err(Error::InvalidPageSize { what, bytes, granularity });
        if !small.is_power_of_two()
            || small < 4096
            || !small.is_multiple_of(granularity)
            || small > MAX_SMALL_PAGE
        {
            return refuse("small page", small);
        }
        if large < small || !large.is_multiple_of(small) || large > MAX_BYTES {
            return refuse("large page", large);
        }
        Ok(Self { small, large })
    }

    /// Returns the bytes of a small page.
    #[must_use]
    pub fn small(self) -> u64 {
        self.small
    }

    /// Returns the bytes of a large page.
    #[must_use]
    pub fn large(self) -> u64 {
        self.large
    }
}

/// Set of peer devices: device numbers of a platform, below 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peers(u64);

impl Peers {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Creates a set with device n for every bit n.
    #[must_use]
    pub const fn of_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Creates a set of one device; empty for an invalid number.
    #[must_use]
    pub fn one(device: i32) -> Self {
        Self(u32::try_from(device).ok().and_then(|device| 1_u64.checked_shl(device)).unwrap_or(0))
    }

    /// Returns the union.
    #[must_use]
    pub fn and(self, more: Self) -> Self {
        Self(self.0 | more.0)
    }

    /// Returns the difference.
    #[must_use]
    pub fn without(self, some: Self) -> Self {
        Self(self.0 & !some.0)
    }

    /// Returns the intersection.
    #[must_use]
    pub fn among(self, those: Self) -> Self {
        Self(self.0 & those.0)
    }

    /// Returns true for the empty set.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns one bit for each device.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the device numbers in order.
    pub fn iter(self) -> impl Iterator<Item = i32> {
        (0..64).filter(move |device| self.0 >> device & 1 == 1)
    }
}

#[cfg(test)]
impl Stream {
    pub(crate) const fn numbered(number: u64) -> Self {
        Self(0x100 + number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_end_at_2_to_the_46_and_products_do_not_wrap() {
        let refused = |bytes| Err(Error::InvalidSize { what: "a size", bytes, limit: MAX_BYTES });
        for bytes in [MAX_BYTES + 1, 1 << 63, u64::MAX] {
            assert_eq!(
                (checked_size("a size", bytes), checked_bytes("a size", bytes)),
                (refused(bytes), refused(bytes))
            );
        }
        assert_eq!((checked_size("a size", 0), checked_bytes("a size", 0)), (refused(0), Ok(0)));
        assert_eq!((checked_size("a size", 1), checked_size("a size", MAX_BYTES)), (Ok(1), Ok(MAX_BYTES)));
        assert_eq!(checked_product("a size", 3, 7), Ok(21));
        for (count, each) in [(2, 1 << 63), (1 << 32, 1 << 32), (u64::MAX, u64::MAX)] {
            assert_eq!(checked_product("a size", count, each), refused(u64::MAX), "{count} {each}");
        }
        assert_eq!(checked_product("a size", 2, MAX_BYTES), refused(2 * MAX_BYTES));
    }

    #[test]
    fn block_sizes_are_whole_granules_within_the_limit() {
        for (asked, got) in [(1, 512), (512, 512), (513, 1024), (MAX_BYTES, MAX_BYTES)] {
            assert_eq!(BlockBytes::round_up(asked).unwrap().get(), got);
        }
        for asked in [0, MAX_BYTES + 1, u64::MAX] {
            assert!(
                matches!(BlockBytes::round_up(asked), Err(Error::InvalidSize { bytes, .. }) if bytes == asked)
            );
        }
    }

    #[test]
    fn peers_are_a_set_of_numbers_below_64() {
        let some = Peers::one(1).and(Peers::one(63));
        assert_eq!(some.iter().collect::<Vec<_>>(), [1, 63]);
        assert_eq!(some.without(Peers::one(63)), Peers::of_bits(2));
        assert_eq!(some.among(Peers::of_bits(6)), Peers::of_bits(2));
        assert!([-1, 64, i32::MAX].into_iter().all(|device| Peers::one(device).is_empty()));
    }

    #[test]
    fn a_geometry_that_no_device_can_map_is_refused() {
        const MIB: u64 = 1 << 20;
        assert!(Geometry::new(2 * MIB, 16 * MIB, 2 * MIB).is_ok());
        assert!(Geometry::new(2 * MIB, 2 * MIB, 2 * MIB).is_ok());
        for (small, large) in
            [(0, 16 * MIB), (MIB, 16 * MIB), (3 * MIB, 15 * MIB), (2 * MIB, 17 * MIB), (4 * MIB, 2 * MIB)]
        {
            assert!(Geometry::new(small, large, 2 * MIB).is_err(), "{small} {large}");
        }
    }
}
