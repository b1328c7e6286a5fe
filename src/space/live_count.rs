//! Live blocks of an arena, counted per space: no atomic addition per block, and one pass to read
//! the sum.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

/// Counts per chunk.
const CHUNK: usize = 256;

/// Live blocks in the upper 24 bits, granules of 512 bytes in the lower 40: one load reads both.
type Chunk = [AtomicU64; CHUNK];

const BLOCK: u64 = 1 << 40;

/// Under a leaf lock.
#[derive(Default)]
pub(crate) struct LiveCounts(Mutex<Places>);

#[derive(Default)]
struct Places {
    chunks: Vec<Arc<Chunk>>,
    free: Vec<(Arc<Chunk>, u8)>,
}

/// Written only under the space's lock.
#[derive(Debug)]
pub(super) struct LiveCount {
    chunk: Arc<Chunk>,
    place: u8,
}

impl LiveCounts {
    pub(super) fn take(&self) -> LiveCount {
        let places = &mut *self.0.lock();
        let (chunk, place) = places.free.pop().unwrap_or_else(|| {
            let chunk: Arc<Chunk> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
            places.chunks.push(Arc::clone(&chunk));
            // Lowest first, so counts in use are close together.
            places.free.extend((1..=u8::MAX).rev().map(|place| (Arc::clone(&chunk), place)));
            (chunk, 0)
        });
        LiveCount { chunk, place }
    }

    pub(super) fn give(&self, count: &LiveCount) {
        count.cell().store(0, Ordering::Relaxed);
        self.0.lock().free.push((Arc::clone(&count.chunk), count.place));
    }

    /// Returns blocks and bytes.
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
        all.drain(100..).for_each(|count| counts.give(&count));
        assert_eq!(counts.sum(), (99, 99 * 1024));
        all.extend((0..2 * CHUNK).map(|_| counts.take()));
        assert_eq!(counts.sum(), (99, 99 * 1024));
        all.drain(..).for_each(|count| counts.give(&count));
        assert_eq!(counts.sum(), (0, 0));
        let all: Vec<LiveCount> = (0..3 * CHUNK).map(|_| counts.take()).collect();
        all.iter().for_each(|count| count.add(512));
        assert_eq!(counts.0.lock().chunks.len(), 3);
        assert!(all.iter().all(|count| count.cell().load(Ordering::Relaxed) == BLOCK + 1));
    }
}
