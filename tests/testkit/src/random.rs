//! Random numbers for tests.

/// Generator with the same numbers from the same seed on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator; any seed will do.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % limit
    }

    /// Returns one element of a non-empty slice.
    pub fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Returns the seeds of a test: `0..few`, or the range in VMMGRAPH_TEST_SEEDS as "from..to" for
/// longer searches.
///
/// # Panics
/// If VMMGRAPH_TEST_SEEDS is not a range.
#[must_use]
pub fn seeds(few: u64) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("VMMGRAPH_TEST_SEEDS") else { return 0..few };
    let range = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or_else(|| panic!("VMMGRAPH_TEST_SEEDS is {text:?}: it must be \"from..to\""))
}
