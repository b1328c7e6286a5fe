//! Simulation of elastic memory under traffic: a serving engine in virtual time over the library's
//! host driver, with measured call costs. Compares a static split, commit on demand, the library's
//! policies, and an oracle with knowledge of the future.
//!
//! ```text
//!   main       runs all; progress, table, chart          report.rs
//!   run        one traffic through one policy            run.rs
//!   Engine     steps, queues, preemption                 engine.rs
//!   Memory     through the library, or only counted      memory/
//!   traffic    generated, or read from public traces     traffic.rs  readers.rs
//!   Model      durations of steps; Costs: of calls       model.rs
//! ```

pub mod engine;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod readers;
pub mod report;
pub mod run;
pub mod traffic;
