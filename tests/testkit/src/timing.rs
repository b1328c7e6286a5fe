//! Medians of short operations.

use std::time::{Duration, Instant};

/// The median over `samples` batches of the time one `body` takes in a batch of `turns`.
pub fn median(samples: usize, turns: u32, mut body: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..samples)
        .map(|_| {
            let start = Instant::now();
            (0..turns).for_each(|_| body());
            start.elapsed() / turns
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}
