//! Graph selection, graph planning and input layout: plain code without a driver. A graph is
//! captured for one [`Key`] (a **bucket**) and runs every step covered by the bucket, padded:
//!
//! ```text
//!   step: 13 tokens ──> Dispatcher ──> bucket of 16, replay (reason: padded) ──> counters
//!                           │ no bucket, above the threshold, over budget, failed before ...
//!                           └────────> eager, with the reason
//!
//!   plan:     Histogram of real steps + Budget ──> BucketSet, and the savings of each bucket
//!   inputs:   declared once + BucketSet        ──> InputPlan: one arena, one copy a step
//! ```

pub mod bucket;
pub mod budget;
pub mod counters;
pub mod dispatcher;
pub(crate) mod exposition;
pub mod histogram;
pub mod input;
pub mod key;
pub mod layout;
pub mod pack;
mod partition;
pub mod plan;
mod slots;

pub use bucket::{BucketSet, vllm_sizes, xllm_sizes};
pub use budget::{AclGraphStreams, Budget, Costs, Limit, LimitedBy};
pub use counters::{Counters, Event, Reason};
pub use dispatcher::{Action, Decision, Dispatcher, DispatcherOptions, GraphMode, Modes, Phase, Slot, Step};
pub use histogram::Histogram;
pub use input::{Dtype, Extent, Input, PadRule, Role};
pub use key::{Axis, Key, UNIFORM_DECODE, Weights};
pub use layout::{BucketLayout, InputPlan, View};
pub use pack::StepInput;
pub use plan::{Plan, PlannedBucket, Waste, evaluate, plan};
