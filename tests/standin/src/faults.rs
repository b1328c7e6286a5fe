//! Counts calls and injects failures.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::{Answer, Why};

static BUSY: AtomicU64 = AtomicU64::new(0);

/// Answers the next `questions` event queries with "not ready".
pub fn keep_busy(questions: u64) {
    BUSY.store(questions, Relaxed);
}

/// Consumes one of these queries, if any.
pub fn busy() -> bool {
    BUSY.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok()
}

static SHUFFLE: AtomicU64 = AtomicU64::new(0);

/// Sets the seed of graph orders; 0: capture order.
pub fn shuffle(seed: u64) {
    SHUFFLE.store(seed, Relaxed);
}

/// Returns random numbers for one launch, if graphs are shuffled.
pub fn shuffled() -> Option<impl FnMut() -> u64> {
    let mut state = match SHUFFLE.load(Relaxed) {
        0 => return None,
        seed => SHUFFLE.fetch_add(2, Relaxed).wrapping_add(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
    };
    Some(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

struct Fault {
    calls_left: u64,
    code: i32,
}

/// The counted functions of a stand-in, created by `counted_calls!`.
pub struct Faults<const N: usize> {
    /// Zero-terminated, for C.
    names: [&'static str; N],
    counts: [AtomicU64; N],
    failed: [AtomicU64; N],
    faults: Mutex<[Option<Fault>; 2]>,
}

impl<const N: usize> Faults<N> {
    /// Creates the counters without armed failures. Names end in a zero.
    #[must_use]
    pub const fn new(names: [&'static str; N]) -> Self {
        Self {
            names,
            counts: [const { AtomicU64::new(0) }; N],
            failed: [const { AtomicU64::new(0) }; N],
            faults: Mutex::new([const { None }; 2]),
        }
    }

    /// Counts a call of the `index`-th function, before any effect.
    ///
    /// # Errors
    /// If this call is armed to fail.
    pub fn counted(&self, index: usize) -> Answer {
        self.counts[index].fetch_add(1, Relaxed);
        let mut result = Ok(());
        for slot in self.faults.lock().iter_mut() {
            let Some(fault) = slot else { continue };
            fault.calls_left -= 1;
            if fault.calls_left == 0 {
                result = Err(Why::Injected(fault.code));
                self.failed[index].fetch_add(1, Relaxed);
                *slot = None;
            }
        }
        result
    }

    /// Makes the `nth` counted call from now fail, in one of two independent slots; zero disarms.
    pub fn arm(&self, slot: usize, nth: u64, code: i32) {
        self.faults.lock()[slot] = (nth > 0).then_some(Fault { calls_left: nth, code });
    }

    /// Returns the calls of one name since the last reset, or all calls.
    pub fn count(&self, name: Option<&str>) -> u64 {
        self.names
            .iter()
            .zip(&self.counts)
            .filter(|(n, _)| name.is_none_or(|name| name == n.trim_end_matches('\0')))
            .map(|(_, c)| c.load(Relaxed))
            .sum()
    }

    /// Returns the name of the `index`-th counted function and the number of its injected failures.
    pub fn failed(&self, index: usize) -> Option<(&'static str, u64)> {
        Some((*self.names.get(index)?, self.failed[index].load(Relaxed)))
    }

    /// Resets the counters.
    pub fn reset(&self) {
        self.counts.iter().for_each(|c| c.store(0, Relaxed));
    }
}

/// Declares the counted calls of a library: `Call` with a variant for each, the static `FAULTS` and
/// `counted(Call)`.
#[macro_export]
macro_rules! counted_calls {
    ($($name:ident),* $(,)?) => {
        #[derive(Clone, Copy)]
        #[allow(clippy::enum_variant_names, reason = "the functions' own names")]
        #[allow(non_camel_case_types, reason = "the functions' own names")]
        pub(crate) enum Call { $($name),* }

        pub(crate) static FAULTS: $crate::faults::Faults<{ [$(stringify!($name)),*].len() }> =
            $crate::faults::Faults::new([$(concat!(stringify!($name), "\0")),*]);

        /// Counts a call; returns the armed failure.
        pub(crate) fn counted(call: Call) -> $crate::Answer {
            FAULTS.counted(call as usize)
        }
    };
}
