//! Which graphs to drop so that another one fits.

use std::collections::HashMap;
use std::hash::Hash;

use crate::error::{Error, Result};

/// Graphs by key with their bytes, under a limit of bytes and of graphs; the least recently used go first.
///
/// It holds no graph: it says which to drop. A use is one write; the search for the oldest is linear, and only happens when a graph
/// has to go.
#[derive(Clone, Debug)]
pub struct GraphCache<K> {
    entries: HashMap<K, Entry>,
    bytes: u64,
    most_bytes: u64,
    most_graphs: usize,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    bytes: u64,
    used: u64,
    pinned: bool,
}

impl<K: Copy + Eq + Hash> GraphCache<K> {
    /// Room for so many bytes and graphs; `None`: any number.
    #[must_use]
    pub fn new(most_bytes: Option<u64>, most_graphs: Option<usize>) -> Self {
        let (most_bytes, most_graphs) = (most_bytes.unwrap_or(u64::MAX), most_graphs.unwrap_or(usize::MAX));
        Self { entries: HashMap::new(), bytes: 0, most_bytes, most_graphs, clock: 0 }
    }

    /// Takes in a graph, the newest in use, and returns those that had to go, oldest first. They are gone from here; the caller
    /// drops them. A key that is there already gets the new size.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] if it cannot fit even with everything unpinned gone; nothing has changed then.
    pub fn admit(&mut self, key: K, bytes: u64) -> Result<Vec<K>> {
        let mut order: Vec<(K, Entry)> = self.entries.iter().map(|(key, entry)| (*key, *entry)).collect();
        order.retain(|(other, _)| *other != key);
        let (mut held, mut graphs) = (order.iter().map(|(_, entry)| entry.bytes).sum::<u64>(), order.len());
        let over = |held: u64, graphs: usize| {
            held.checked_add(bytes).is_none_or(|sum| sum > self.most_bytes) || graphs >= self.most_graphs
        };
        order.retain(|(_, entry)| !entry.pinned);
        order.sort_unstable_by_key(|(_, entry)| entry.used);
        let mut evicted = Vec::new();
        for (other, entry) in order {
            if !over(held, graphs) {
                break;
            }
            (held, graphs) = (held - entry.bytes, graphs - 1);
            evicted.push(other);
        }
        if over(held, graphs) {
            return Err(Error::InvalidSize {
                what: "graph",
                bytes,
                limit: self.most_bytes.saturating_sub(held),
            });
        }
        for other in &evicted {
            self.entries.remove(other);
        }
        self.clock += 1;
        let pinned = self.entries.get(&key).is_some_and(|entry| entry.pinned);
        self.entries.insert(key, Entry { bytes, used: self.clock, pinned });
        self.bytes = held + bytes;
        Ok(evicted)
    }

    /// Marks a graph as just used; false if it is not here. Allocates nothing.
    pub fn touch(&mut self, key: &K) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        self.clock += 1;
        entry.used = self.clock;
        true
    }

    /// Keeps a graph from being evicted, or no longer; false if it is not here.
    pub fn pin(&mut self, key: &K, pinned: bool) -> bool {
        self.entries.get_mut(key).map(|entry| entry.pinned = pinned).is_some()
    }

    /// Forgets a graph that the caller dropped; its bytes, if it was here.
    pub fn remove(&mut self, key: &K) -> Option<u64> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        Some(entry.bytes)
    }

    /// Bytes of all graphs.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many graphs there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a graph is here.
    #[must_use]
    pub fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_and_pinned_ones_stay() {
        let mut cache = GraphCache::new(Some(100), None);
        for key in 0..4 {
            assert!(cache.admit(key, 25).unwrap().is_empty());
        }
        assert!(cache.touch(&0) && cache.pin(&1, true));
        assert_eq!(cache.admit(4, 26).unwrap(), [2, 3]);
        assert_eq!(cache.bytes(), 76);
        assert!(cache.admit(5, 76).is_err());
        assert_eq!((cache.bytes(), cache.len()), (76, 3));
        assert!(!cache.touch(&2) && !cache.pin(&2, true));
        assert!(GraphCache::new(None, Some(0)).admit(0, 0).is_err());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Admit(u8, u64),
        Touch(u8),
        Pin(u8, bool),
        Remove(u8),
    }

    fn op() -> impl Strategy<Value = Op> {
        let key = 0..6_u8;
        prop_oneof![
            (key.clone(), prop_oneof![0..40_u64, Just(u64::MAX)])
                .prop_map(|(key, bytes)| Op::Admit(key, bytes)),
            key.clone().prop_map(Op::Touch),
            (key.clone(), any::<bool>()).prop_map(|(key, pinned)| Op::Pin(key, pinned)),
            key.prop_map(Op::Remove),
        ]
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_list_in_the_order_of_use(
            ops in prop::collection::vec(op(), 1..60), most_graphs in 1..5_usize, most_bytes in 20..100_u64,
        ) {
            let mut cache = GraphCache::new(Some(most_bytes), Some(most_graphs));
            // Oldest first: key, bytes, pinned.
            let mut twin: Vec<(u8, u64, bool)> = Vec::new();
            for op in ops {
                let find = |twin: &[(u8, u64, bool)], key| twin.iter().position(|entry| entry.0 == key);
                match op {
                    Op::Admit(key, bytes) => {
                        let mut next = twin.clone();
                        let pinned = find(&next, key).is_some_and(|place| next.remove(place).2);
                        let mut gone = Vec::new();
                        let fits = loop {
                            let held: u128 = next.iter().map(|entry| u128::from(entry.1)).sum();
                            if held + u128::from(bytes) <= u128::from(most_bytes) && next.len() < most_graphs {
                                break true;
                            }
                            let Some(oldest) = next.iter().position(|entry| !entry.2) else { break false };
                            gone.push(next.remove(oldest).0);
                        };
                        let found = cache.admit(key, bytes);
                        if fits {
                            next.push((key, bytes, pinned));
                            twin = next;
                            prop_assert_eq!(found.unwrap(), gone);
                        } else {
                            prop_assert!(found.is_err());
                        }
                    }
                    Op::Touch(key) => {
                        let place = find(&twin, key);
                        prop_assert_eq!(cache.touch(&key), place.is_some());
                        if let Some(place) = place {
                            let entry = twin.remove(place);
                            twin.push(entry);
                        }
                    }
                    Op::Pin(key, pinned) => {
                        let place = find(&twin, key);
                        prop_assert_eq!(cache.pin(&key, pinned), place.is_some());
                        if let Some(place) = place { twin[place].2 = pinned; }
                    }
                    Op::Remove(key) => {
                        let place = find(&twin, key);
                        prop_assert_eq!(cache.remove(&key), place.map(|place| twin.remove(place).1));
                    }
                }
                prop_assert_eq!(cache.bytes(), twin.iter().map(|entry| entry.1).sum::<u64>());
                prop_assert_eq!(cache.len(), twin.len());
                prop_assert!(twin.iter().all(|entry| cache.contains(&entry.0)));
            }
        }
    }
}
