//! Who gets memory, and when. Arithmetic over pages, blocks and steps: no driver, no clock, no thread.
//!
//! ```text
//!   PreCommit     commit ahead of need between two watermarks, give back late        ahead.rs
//!   Standing      how much of what steps used stays, though none uses it now         standing.rs
//!   Limit         falls at once for grants, later for what is held                   limit.rs
//!   Grants        a step's KV and activations: both or neither, in turn              grants.rs
//!   Lengths       how long sequences will be, from those that ended                  lengths.rs
//!   Admission     whether one more sequence will fit until it ends                   admission.rs
//!   in_turn       whose turn it is, so that most are in time                         turns.rs
//!   prefill_waits, Prompt::to_host   whether prompts wait for those that decode      pace.rs
//!   HostKv        KV of prompts that wait in host memory, within a logical size      host_kv.rs
//!   SloControl    that size: up where first tokens are late, down where others are   slo.rs
//! ```

mod admission;
mod ahead;
mod grants;
mod host_kv;
mod lengths;
mod limit;
mod pace;
mod slo;
mod standing;
mod turns;

pub use admission::{Admission, Growing};
pub use ahead::{Ahead, PreCommit, Watermarks};
pub use grants::{Answer, Grants, Need};
pub use host_kv::HostKv;
pub use lengths::Lengths;
pub use limit::Limit;
pub use pace::{Decoding, Prompt, prefill_waits};
pub use slo::{SloChange, SloControl};
pub use standing::Standing;
pub use turns::{Due, in_turn};
