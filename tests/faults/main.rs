//! Failures of driver calls, pairs of concurrent calls, and random operations on late streams.

mod any_order;
mod pairs;
mod sweep;
