//! Elastic memory under simulated traffic: a serving engine in virtual time, over the library on its host driver, where calls cost what they
//! were measured to cost; a static split, commit on demand, the library's policies, and an oracle that knows the future.
//!
//! ```text
//!   main       runs all, shows progress, a table, a picture      report.rs
//!   run        one traffic through one way                       run.rs
//!   Engine     steps, queues, what waits and who is preempted    engine.rs
//!   Memory     the library, or only counted                      memory/
//!   traffic    made up by seed, or read from public traces       traffic.rs  readers.rs
//!   Model      what steps take; Costs: what calls cost           model.rs
//! ```

pub mod engine;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod readers;
pub mod report;
pub mod run;
pub mod traffic;
