//! Pause and resume of regions and arenas.

mod arena_pause;
mod deadlocks;
mod poison;
mod regions;
