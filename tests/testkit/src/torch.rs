//! Bytes that torch's caching allocator reserves for a shape, by the segment and best-fit rules of
//! its native backend.
//!
//! Sizes are rounded to 512 bytes. Blocks up to 1 MiB come from segments of 2 MiB, below 10 MiB
//! from segments of 20 MiB; larger ones have a segment rounded up to 2 MiB. The smallest free block
//! that fits is split if the rest is useful (512 bytes in a small segment, more than 1 MiB in a
//! large one). Freed neighbours merge. Segments live as long as the graph
//! (c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.11).

use std::collections::HashMap;

use crate::MIB;
use crate::trace::{Event, Shape, Trace};

#[derive(Clone, Copy)]
struct Piece {
    segment: usize,
    start: u64,
    bytes: u64,
    free: bool,
}

fn reserved_bytes(shape: &Shape) -> u64 {
    // Small and large segments never mix.
    let mut pieces: [Vec<Piece>; 2] = [Vec::new(), Vec::new()];
    let mut live: HashMap<usize, (usize, usize, u64)> = HashMap::new();
    let (mut reserved, mut segments) = (0, 0);
    for event in &shape.events {
        match *event {
            Event::Allocate { id, bytes } => {
                let bytes = bytes.next_multiple_of(512).max(512);
                let pool = usize::from(bytes > MIB);
                let fit = |p: &&Piece| p.free && p.bytes >= bytes;
                let best =
                    pieces[pool].iter().filter(fit).min_by_key(|p| (p.bytes, p.segment, p.start)).copied();
                let found = best.unwrap_or_else(|| {
                    let size = match bytes {
                        _ if pool == 0 => 2 * MIB,
                        b if b < 10 * MIB => 20 * MIB,
                        b => b.next_multiple_of(2 * MIB),
                    };
                    reserved += size;
                    segments += 1;
                    let piece = Piece { segment: segments, start: 0, bytes: size, free: true };
                    pieces[pool].push(piece);
                    piece
                });
                let same = |p: &Piece| (p.segment, p.start) == (found.segment, found.start);
                let at = pieces[pool].iter().position(same).unwrap_or(0);
                let rest = found.bytes - bytes;
                let split = if pool == 0 { rest >= 512 } else { rest > MIB };
                pieces[pool][at].free = false;
                if split {
                    pieces[pool][at].bytes = bytes;
                    pieces[pool].push(Piece {
                        segment: found.segment,
                        start: found.start + bytes,
                        bytes: rest,
                        free: true,
                    });
                }
                live.insert(id, (pool, found.segment, found.start));
            }
            Event::Free { id } => {
                let Some((pool, segment, start)) = live.remove(&id) else { continue };
                let pieces = &mut pieces[pool];
                for piece in pieces.iter_mut().filter(|p| (p.segment, p.start) == (segment, start)) {
                    piece.free = true;
                }
                pieces.sort_by_key(|p| (p.segment, p.start));
                pieces.dedup_by(|next, before| {
                    let merge = before.free && next.free && before.segment == next.segment;
                    if merge {
                        before.bytes += next.bytes;
                    }
                    merge
                });
            }
        }
    }
    reserved
}

/// Returns the bytes with one private pool for each graph.
#[must_use]
pub fn private_pools_bytes(trace: &Trace) -> u64 {
    trace.shapes.iter().map(reserved_bytes).sum()
}

/// Returns bytes and map calls of the published design: every shape maps all shared 2 MiB pages, as
/// many as the largest shape reserves.
#[must_use]
pub fn published_design(trace: &Trace) -> (u64, u64) {
    let bytes = trace.shapes.iter().map(reserved_bytes).max().unwrap_or(0);
    (bytes, bytes / (2 * MIB) * trace.shapes.len() as u64)
}
