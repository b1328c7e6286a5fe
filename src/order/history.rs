//! Launch history of a rank in a fixed size: keys of the last replays and a hash over earlier ones.
//!
//! Plain code: no driver, lock or clock.

use std::collections::VecDeque;

use crate::units::mix;

/// Number of replays stored by key. Ranks which compare at least as often learn the exact
/// difference.
pub(super) const RING: usize = 256;

/// Bytes of a [digest](History::digest), equal on all ranks: the size per rank of a gather.
pub(crate) const DIGEST_BYTES: usize = 32 + 8 * RING;

/// First eight bytes of a digest; identifies library and version.
const MAGIC: u64 = u64::from_le_bytes(*b"vmmgord1");

/// Upper bound of the launches in a process.
const COUNT_MOST: u64 = 1 << 62;

/// Replays of a rank: count, last keys, hash over earlier keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct History {
    /// Hash over the keys dropped from `keys`, in order.
    before: u64,
    /// Keys of the last replays.
    keys: VecDeque<u64>,
    /// Number of replays; replays are numbered from 1.
    count: u64,
    /// Whether the last replay is not launched yet.
    ahead: bool,
}

impl History {
    pub(super) fn new() -> Self {
        Self { before: 0, keys: VecDeque::with_capacity(RING), count: 0, ahead: false }
    }

    /// Records a replay. Never allocates.
    pub(super) fn note(&mut self, key: u64) {
        if self.keys.len() == RING
            && let Some(oldest) = self.keys.pop_front()
        {
            self.before = mix(self.before, oldest);
        }
        self.keys.push_back(key);
        self.count += 1;
    }

    /// Returns the history as if a replay with this key were launched now.
    pub(super) fn ahead(&self, key: u64) -> Self {
        let mut ahead = self.clone();
        ahead.note(key);
        ahead.ahead = true;
        ahead
    }

    /// Returns whether the last replay is not launched yet.
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead
    }

    pub(super) fn launched(&self, number: u64) -> bool {
        number <= self.count - u64::from(self.ahead)
    }

    /// Returns the number of the last replay; 0 without replays.
    pub(super) fn last(&self) -> u64 {
        self.count
    }

    /// Returns the number of the first replay with a stored key; the last number plus one if none
    /// is stored.
    pub(super) fn first_known(&self) -> u64 {
        self.count - self.keys.len() as u64 + 1
    }

    /// Returns the key of a replay, if stored.
    pub(super) fn key(&self, number: u64) -> Option<u64> {
        let place = number.checked_sub(self.first_known())?;
        self.keys.get(usize::try_from(place).ok()?).copied()
    }

    /// Returns a hash over all keys up to this number; `None` if not computable.
    pub(super) fn hash_to(&self, number: u64) -> Option<u64> {
        if number > self.count {
            return None;
        }
        let known = number.checked_sub(self.first_known() - 1)?;
        Some(
            self.keys
                .iter()
                .take(usize::try_from(known).ok()?)
                .fold(self.before, |hash, key| mix(hash, *key)),
        )
    }

    /// Encodes the history as little-endian 64-bit numbers: magic, count, ahead flag, hash, keys,
    /// then zeros.
    pub(super) fn digest(&self) -> [u8; DIGEST_BYTES] {
        let mut bytes = [0; DIGEST_BYTES];
        let head = [MAGIC, self.count, u64::from(self.ahead), self.before];
        let numbers = head.iter().chain(&self.keys);
        bytes.chunks_exact_mut(8).zip(numbers).for_each(|(place, number)| {
            place.copy_from_slice(&number.to_le_bytes());
        });
        bytes
    }

    /// Decodes a digest; `None` for invalid bytes.
    pub(super) fn of_digest(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != DIGEST_BYTES {
            return None;
        }
        let (words, _) = bytes.as_chunks::<8>();
        let mut numbers = words.iter().map(|word| u64::from_le_bytes(*word));
        let mut next = || numbers.next();
        let (magic, count, ahead, before) = (next()?, next()?, next()?, next()?);
        if magic != MAGIC || ahead > count.min(1) || count > COUNT_MOST {
            return None;
        }
        let known = usize::try_from(count).map_or(RING, |count| count.min(RING));
        let keys: VecDeque<u64> = numbers.by_ref().take(known).collect();
        // Unused keys must be 0, and the hash over no keys is 0.
        let clean = numbers.all(|number| number == 0) && (count > RING as u64 || before == 0);
        clean.then_some(Self { before, keys, count, ahead: ahead == 1 })
    }
}
