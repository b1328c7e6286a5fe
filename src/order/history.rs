//! What a rank launched, short enough to be sent to others: the last replays by key, and a hash over those before.
//!
//! Plain code: no driver, no lock, no clock.

use std::collections::VecDeque;

use crate::units::mix;

/// So many replays are remembered by key. Ranks that compare no less often than that learn which replay it was.
pub(super) const RING: usize = 256;

/// Bytes of a [digest](History::digest), the same on all ranks: what a gather moves for each of them.
pub(crate) const DIGEST_BYTES: usize = 32 + 8 * RING;

/// The first eight bytes of a digest: another library's, or another version's, is told apart.
const MAGIC: u64 = u64::from_le_bytes(*b"vmmgord1");

/// No process launches more.
const COUNT_MOST: u64 = 1 << 62;

/// The replays of a rank: how many, the keys of the last ones, a hash over the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct History {
    /// Over the keys that the ring has no room for, in order.
    before: u64,
    /// Of the last ones.
    keys: VecDeque<u64>,
    /// Replays so far; the last one has this number.
    count: u64,
    /// Whether the last one is only about to be launched.
    ahead: bool,
}

impl History {
    /// Nothing launched.
    pub(super) fn new() -> Self {
        Self { before: 0, keys: VecDeque::with_capacity(RING), count: 0, ahead: false }
    }

    /// One more replay. Allocates nothing.
    pub(super) fn note(&mut self, key: u64) {
        if self.keys.len() == RING
            && let Some(oldest) = self.keys.pop_front()
        {
            self.before = mix(self.before, oldest);
        }
        self.keys.push_back(key);
        self.count += 1;
    }

    /// As it will be if a replay of this key is launched now.
    pub(super) fn ahead(&self, key: u64) -> Self {
        let mut ahead = self.clone();
        ahead.note(key);
        ahead.ahead = true;
        ahead
    }

    /// Whether its last replay is only about to be launched.
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead
    }

    /// Whether a replay of this number was launched.
    pub(super) fn launched(&self, number: u64) -> bool {
        number <= self.count - u64::from(self.ahead)
    }

    /// The number of its last replay; 0: there is none.
    pub(super) fn last(&self) -> u64 {
        self.count
    }

    /// The number of the first replay whose key is known; one more than the last if none is.
    pub(super) fn first_known(&self) -> u64 {
        self.count - self.keys.len() as u64 + 1
    }

    /// The key of a replay, if it was launched and is known.
    pub(super) fn key(&self, number: u64) -> Option<u64> {
        let place = number.checked_sub(self.first_known())?;
        self.keys.get(usize::try_from(place).ok()?).copied()
    }

    /// A hash over all keys up to this number; `None` if that is not known (any more).
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

    /// As bytes: little-endian numbers of eight bytes; magic, count, whether the last is ahead, the hash, and the keys, behind them zeros.
    pub(super) fn digest(&self) -> [u8; DIGEST_BYTES] {
        let mut bytes = [0; DIGEST_BYTES];
        let head = [MAGIC, self.count, u64::from(self.ahead), self.before];
        let numbers = head.iter().chain(&self.keys);
        bytes.chunks_exact_mut(8).zip(numbers).for_each(|(place, number)| {
            place.copy_from_slice(&number.to_le_bytes());
        });
        bytes
    }

    /// Of a digest's bytes; `None`: they are none.
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
        // Zeros where no key is, and no hash over nothing.
        let clean = numbers.all(|number| number == 0) && (count > RING as u64 || before == 0);
        clean.then_some(Self { before, keys, count, ahead: ahead == 1 })
    }
}
