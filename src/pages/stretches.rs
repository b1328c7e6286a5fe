use std::collections::{BTreeMap, BTreeSet};

/// Free address ranges (stretches), found by address and by length in logarithmic time. Adjacent
/// ranges are merged, except across a wall.
#[derive(Debug, Default)]
pub(crate) struct Stretches {
    free: BTreeMap<u64, u64>,
    /// (bytes, address).
    by_bytes: BTreeSet<(u64, u64)>,
    walls: BTreeSet<u64>,
    bytes: u64,
}

impl Stretches {
    fn insert(&mut self, at: u64, bytes: u64) {
        self.free.insert(at, bytes);
        self.by_bytes.insert((bytes, at));
        self.bytes += bytes;
    }

    fn remove(&mut self, at: u64) -> Option<u64> {
        let bytes = self.free.remove(&at)?;
        self.by_bytes.remove(&(bytes, at));
        self.bytes -= bytes;
        Some(bytes)
    }

    /// Takes the start of the smallest fitting range; of equal ones, the lowest. Returns the
    /// address.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        self.take_where(bytes, |_| true)
    }

    /// Takes from ranges with an address accepted by `which`. Linear in the rejected ranges.
    pub(crate) fn take_where(&mut self, bytes: u64, which: impl Fn(u64) -> bool) -> Option<u64> {
        let mut fits = self.by_bytes.range((bytes, 0)..);
        let (_, at) = *fits.find(|(_, at)| which(*at))?;
        self.cut(at, bytes);
        Some(at)
    }

    /// Takes the longest range; of equal ones, the highest. Returns address and bytes.
    pub(crate) fn take_longest(&mut self) -> Option<(u64, u64)> {
        let (bytes, at) = *self.by_bytes.last()?;
        self.remove(at);
        Some((at, bytes))
    }

    pub(crate) fn add(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, free)) = self.around(at)
            && before + free == at
            && !self.walls.contains(&at)
        {
            self.remove(before);
            (at, bytes) = (before, free + bytes);
        }
        if !self.walls.contains(&(at + bytes))
            && let Some(free) = self.remove(at + bytes)
        {
            bytes += free;
        }
        self.insert(at, bytes);
    }

    /// Prevents merging across this address.
    pub(crate) fn add_wall(&mut self, at: u64) {
        self.walls.insert(at);
    }

    pub(crate) fn remove_wall(&mut self, at: u64) {
        self.walls.remove(&at);
    }

    /// The last range that begins at or before an address.
    fn around(&self, at: u64) -> Option<(u64, u64)> {
        self.free.range(..=at).next_back().map(|(at, free)| (*at, *free))
    }

    /// Bytes of the range that ends at `end`, or 0.
    pub(crate) fn before(&self, end: u64) -> u64 {
        let found = self.free.range(..end).next_back();
        found
            .filter(|(at, free)| *at + *free == end && !self.walls.contains(&end))
            .map_or(0, |(_, free)| *free)
    }

    /// Whether all bytes are free, in one range.
    pub(crate) fn covers(&self, at: u64, bytes: u64) -> bool {
        self.around(at).is_some_and(|(start, free)| start + free >= at + bytes)
    }

    /// No effect if a byte is not free.
    pub(crate) fn cut(&mut self, at: u64, bytes: u64) {
        let Some((start, free)) = self.around(at) else { return };
        let (end, free_end) = (at + bytes, start + free);
        if free_end < end {
            return;
        }
        self.remove(start);
        if start < at {
            self.insert(start, at - start);
        }
        if end < free_end {
            self.insert(end, free_end - end);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference model: one byte per address. 0: free, 255: not added.
    fn stretches(bytes: &[u8], walls: &BTreeSet<u64>) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        let mut start = None;
        for at in 0..=bytes.len() as u64 {
            let free = bytes.get(at as usize) == Some(&0);
            if let Some(from) = start
                && (!free || walls.contains(&at))
            {
                found.insert(from, at - from);
                start = None;
            }
            if free && start.is_none() {
                start = Some(at);
            }
        }
        found
    }

    proptest! {
        #[test]
        fn stretches_do_what_a_list_of_bytes_does(
            steps in prop::collection::vec((0_u8..4, 1_u64..40, 0_usize..64), 1..200)
        ) {
            let mut free = Stretches::default();
            let (mut bytes, mut walls) = (vec![255_u8; 400], BTreeSet::new());
            for wall in [100, 200] {
                free.add_wall(wall);
                walls.insert(wall);
            }
            let mut blocks: Vec<(u64, u64)> = Vec::new();
            let mut grown = 0;
            for (kind, size, pick) in steps {
                match kind {
                    0 if grown + size <= 400 && (grown / 100 == (grown + size - 1) / 100) => {
                        free.add(grown, size);
                        bytes[grown as usize..(grown + size) as usize].fill(0);
                        grown += size;
                    }
                    0 => grown = (grown / 100 + 1) * 100,
                    1 if !blocks.is_empty() => {
                        let (at, size) = blocks.swap_remove(pick % blocks.len());
                        free.add(at, size);
                        bytes[at as usize..(at + size) as usize].fill(0);
                    }
                    2 => {
                        let stretches = stretches(&bytes, &walls);
                        let best = stretches.iter().filter(|(_, free)| **free >= size);
                        let best = best.min_by_key(|(at, free)| (**free, **at)).map(|(at, _)| *at);
                        prop_assert_eq!(free.take(size), best);
                        if let Some(at) = best {
                            bytes[at as usize..(at + size) as usize].fill(1);
                            blocks.push((at, size));
                        }
                    }
                    _ => {
                        let at = pick as u64 * 6;
                        let inside = bytes.get(at as usize..(at + size) as usize).unwrap_or(&[1]);
                        let crosses = walls.iter().any(|wall| at < *wall && *wall < at + size);
                        let covers = inside.iter().all(|byte| *byte == 0) && !crosses;
                        prop_assert_eq!(free.covers(at, size), covers);
                        if covers {
                            free.cut(at, size);
                            bytes[at as usize..(at + size) as usize].fill(255);
                        }
                    }
                }
                prop_assert_eq!(&free.free, &stretches(&bytes, &walls));
                let by_bytes = free.free.iter().map(|(at, bytes)| (*bytes, *at)).collect();
                prop_assert_eq!(&free.by_bytes, &by_bytes);
                prop_assert_eq!(free.by_bytes.last().map(|(bytes, _)| *bytes), free.free.values().max().copied());
                prop_assert_eq!(free.bytes(), bytes.iter().filter(|byte| **byte == 0).count() as u64);
            }
        }
    }
}
