//! Policies: when memory is granted and freed. Arithmetic over pages, blocks and steps, without
//! driver, clock, threads or locks.
//!
//! ```text
//!   PreCommit     commit ahead of need between two watermarks, give back late        ahead.rs
//!   Standing      memory kept between the steps which use it                         standing.rs
//!   Limit         falls at once for grants, later for amounts in use                 limit.rs
//!   Grants        KV and activations of a step: both or neither                      grants.rs
//!   Lengths       predicted lengths of sequences                                     lengths.rs
//!   Admission     whether one more sequence fits until its end                       admission.rs
//!   deadline_order deadline order, with the most in time                             deadlines.rs
//!   prefill_waits, Prompt::to_host   prompts against decoding sequences              pace.rs
//!   HostKv        KV of waiting prompts in host memory, within a logical size        host_kv.rs
//!   SloControl    logical size, by late tokens                                       slo.rs
//! ```

mod admission;
mod ahead;
mod deadlines;
mod grants;
mod host_kv;
mod lengths;
mod limit;
mod pace;
mod slo;
mod standing;

pub use admission::{Admission, Growing};
pub use ahead::{Ahead, PreCommit, Watermarks};
pub use deadlines::{Due, deadline_order};
pub use grants::{Answer, Grants, Need};
pub use host_kv::HostKv;
pub use lengths::Lengths;
pub use limit::Limit;
pub use pace::{Decoding, Prompt, prefill_waits};
pub use slo::{SloChange, SloControl};
pub use standing::Standing;
