//! Which graph runs a step, which graphs are worth having, and where their inputs lie: plain code, no driver.
//!
//! A graph is captured for one [`Key`] (a **bucket**) and runs every step that the bucket covers, padded:
//!
//! ```text
//!   step: 13 tokens ──> Dispatcher ──> bucket of 16, replay (reason: padded) ──> counters
//!                           │ no bucket, above the threshold, over budget, failed before ...
//!                           └────────> eager, and why
//!
//!   plan:     Histogram of real steps + Budget ──> BucketSet, and what each bucket buys
//!   inputs:   declared once + BucketSet        ──> InputPlan: one arena, one copy a step
//! ```
//!
//! | module | decides |
//! |---|---|
//! | [`key`] | when a bucket covers a step, and how much bigger it is |
//! | [`bucket`] | the nearest bucket; the lists of xLLM and vLLM |
//! | [`budget`] | how many graphs may exist, with vLLM-Ascend's stream formula |
//! | [`plan`](mod@plan) | the buckets that waste least |
//! | [`dispatcher`] | replay, capture or eager, and why |
//! | `slots` | which graphs are there, and which goes first |
//! | [`counters`], `exposition` | how often, as numbers and for Prometheus |
//! | [`input`], [`layout`], [`pack`] | addresses of inputs and outputs; a step's bytes for one copy |

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
