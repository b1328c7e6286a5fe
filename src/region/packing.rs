//! Where a region's free bytes are: plain code over addresses, no driver.

use std::collections::{BTreeMap, BTreeSet};

/// Stretches of addresses that no block has. Neighbours are one, but for those on two sides of a wall.
#[derive(Debug, Default)]
pub(super) struct Packing {
    /// Address to bytes.
    free: BTreeMap<u64, u64>,
    /// Where ranges begin: a block lies in one range.
    walls: BTreeSet<u64>,
}

impl Packing {
    /// The smallest stretch that `bytes` fit in, the first of several; takes its beginning.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let fits = self.free.iter().filter(|(_, free)| **free >= bytes);
        let (at, free) = fits.min_by_key(|(at, free)| (**free, **at)).map(|(at, free)| (*at, *free))?;
        self.free.remove(&at);
        if free > bytes {
            self.free.insert(at + bytes, free - bytes);
        }
        Some(at)
    }

    /// Adds a stretch.
    pub(super) fn add(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, free)) = self.free.range(..at).next_back().map(|(at, free)| (*at, *free))
            && before + free == at
            && !self.walls.contains(&at)
        {
            self.free.remove(&before);
            (at, bytes) = (before, free + bytes);
        }
        if !self.walls.contains(&(at + bytes))
            && let Some(free) = self.free.remove(&(at + bytes))
        {
            bytes += free;
        }
        self.free.insert(at, bytes);
    }

    /// Nothing that begins at this address is joined with what is before it.
    pub(super) fn add_wall(&mut self, at: u64) {
        self.walls.insert(at);
    }

    pub(super) fn remove_wall(&mut self, at: u64) {
        self.walls.remove(&at);
    }

    /// Bytes of the stretch that ends at an address.
    pub(super) fn before(&self, end: u64) -> u64 {
        let found = self.free.range(..end).next_back();
        found
            .filter(|(at, free)| *at + *free == end && !self.walls.contains(&end))
            .map_or(0, |(_, free)| *free)
    }

    /// Whether all of it is free.
    pub(super) fn covers(&self, at: u64, bytes: u64) -> bool {
        self.free.range(..=at).next_back().is_some_and(|(start, free)| start + free >= at + bytes)
    }

    /// Takes a part of one stretch away.
    pub(super) fn cut(&mut self, at: u64, bytes: u64) {
        let Some((start, free)) = self.free.range(..=at).next_back().map(|(at, free)| (*at, *free)) else {
            return;
        };
        let (end, free_end) = (at + bytes, start + free);
        if free_end < end {
            return;
        }
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at - start);
        }
        if end < free_end {
            self.free.insert(end, free_end - end);
        }
    }

    /// Free bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The twin: a letter a byte. 0 is free, 255 is not there.
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
        fn packing_does_what_a_list_of_bytes_does(
            steps in prop::collection::vec((0_u8..4, 1_u64..40, 0_usize..64), 1..200)
        ) {
            let mut packing = Packing::default();
            let (mut bytes, mut walls) = (vec![255_u8; 400], BTreeSet::new());
            for wall in [100, 200] {
                packing.add_wall(wall);
                walls.insert(wall);
            }
            let mut blocks: Vec<(u64, u64)> = Vec::new();
            let mut grown = 0;
            for (kind, size, pick) in steps {
                match kind {
                    0 if grown + size <= 400 && (grown / 100 == (grown + size - 1) / 100) => {
                        packing.add(grown, size);
                        bytes[grown as usize..(grown + size) as usize].fill(0);
                        grown += size;
                    }
                    0 => grown = (grown / 100 + 1) * 100,
                    1 if !blocks.is_empty() => {
                        let (at, size) = blocks.swap_remove(pick % blocks.len());
                        packing.add(at, size);
                        bytes[at as usize..(at + size) as usize].fill(0);
                    }
                    2 => {
                        let stretches = stretches(&bytes, &walls);
                        let best = stretches.iter().filter(|(_, free)| **free >= size);
                        let best = best.min_by_key(|(at, free)| (**free, **at)).map(|(at, _)| *at);
                        prop_assert_eq!(packing.take(size), best);
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
                        prop_assert_eq!(packing.covers(at, size), covers);
                        if covers {
                            packing.cut(at, size);
                            bytes[at as usize..(at + size) as usize].fill(255);
                        }
                    }
                }
                prop_assert_eq!(&packing.free, &stretches(&bytes, &walls));
                prop_assert_eq!(packing.bytes(), bytes.iter().filter(|byte| **byte == 0).count() as u64);
            }
        }
    }
}
