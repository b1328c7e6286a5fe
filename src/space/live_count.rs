//! Live blocks of an arena, counted by who has them: without an atomic addition for each block that comes and goes, and in one pass for who asks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

/// How many counts lie together.
const CHUNK: usize = 256;

/// Live blocks in the upper 24 bits of each, their granules of 512 bytes below, so that both are read at once.
type Chunk = [AtomicU64; CHUNK];

const BLOCK: u64 = 1 << 40;

/// All counts of an arena. Their lock is a leaf.
#[derive(Default)]
pub(crate) struct LiveCounts(Mutex<Places>);

#[derive(Default)]
struct Places {
    chunks: Vec<Arc<Chunk>>,
    /// Those that nobody has.
    free: Vec<(Arc<Chunk>, u8)>,
}

/// The live blocks of one space. Whoever changes it has the space's lock.
#[derive(Debug)]
pub(super) struct LiveCount {
    chunk: Arc<Chunk>,
    place: u8,
}

impl LiveCounts {
    /// One more, of no blocks.
    pub(super) fn take(&self) -> LiveCount {
        let places = &mut *self.0.lock();
        let (chunk, place) = places.free.pop().unwrap_or_else(|| {
            let chunk: Arc<Chunk> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
            places.chunks.push(Arc::clone(&chunk));
            // The lowest serve first, so that what is read lies close together.
            places.free.extend((1..=u8::MAX).rev().map(|place| (Arc::clone(&chunk), place)));
            (chunk, 0)
        });
        LiveCount { chunk, place }
    }

    /// Its blocks are gone, or count no more.
    pub(super) fn give(&self, count: &LiveCount) {
        count.cell().store(0, Ordering::Relaxed);
        self.0.lock().free.push((Arc::clone(&count.chunk), count.place));
    }

    /// Live blocks of all, and their bytes.
    pub(crate) fn sum(&self) -> (u64, u64) {
        let places = self.0.lock();
        let all = places.chunks.iter().flat_map(|chunk| chunk.iter());
        all.map(|cell| cell.load(Ordering::Relaxed))
            .fold((0, 0), |(blocks, bytes), one| (blocks + one / BLOCK, bytes + one % BLOCK * 512))
    }
}

impl LiveCount {
    fn cell(&self) -> &AtomicU64 {
        &self.chunk[usize::from(self.place)]
    }

    pub(super) fn add(&self, bytes: u64) {
        let cell = self.cell();
        cell.store(cell.load(Ordering::Relaxed) + BLOCK + bytes / 512, Ordering::Relaxed);
    }

    pub(super) fn remove(&self, blocks: u64, bytes: u64) {
        let cell = self.cell();
        cell.store(cell.load(Ordering::Relaxed) - blocks * BLOCK - bytes / 512, Ordering::Relaxed);
    }
}

impl fmt::Debug for LiveCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LiveCounts").field(&self.sum()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_serve_again_and_the_sum_is_of_those_who_count() {
        let counts = LiveCounts::default();
        let mut all: Vec<LiveCount> = (0..3 * CHUNK).map(|_| counts.take()).collect();
        all.iter().for_each(|count| count.add(1024));
        assert_eq!(counts.sum(), (768, 768 * 1024));
        all[5].add(512);
        all[5].remove(2, 1536);
        assert_eq!(counts.sum(), (767, 767 * 1024));
        // What goes with blocks in it counts no more.
        all.drain(100..).for_each(|count| counts.give(&count));
        assert_eq!(counts.sum(), (99, 99 * 1024));
        all.extend((0..2 * CHUNK).map(|_| counts.take()));
        assert_eq!(counts.sum(), (99, 99 * 1024));
        all.drain(..).for_each(|count| counts.give(&count));
        assert_eq!(counts.sum(), (0, 0));
        // No two have one place.
        let all: Vec<LiveCount> = (0..3 * CHUNK).map(|_| counts.take()).collect();
        all.iter().for_each(|count| count.add(512));
        assert_eq!(counts.0.lock().chunks.len(), 3);
        assert!(all.iter().all(|count| count.cell().load(Ordering::Relaxed) == BLOCK + 1));
    }
}
