//! Rings: layers streamed from the host.

mod graphs;
mod launches;
mod stores;
mod units;
