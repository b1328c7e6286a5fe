//! Policies: when memory is granted and freed. Arithmetic over pages, blocks and steps, without
//! driver, clock, threads or locks.

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
