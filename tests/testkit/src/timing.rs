//! Medians of short operations.

use std::time::{Duration, Instant};

/// Returns the median time of one `body`, over `samples` batches of `turns` calls.
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
