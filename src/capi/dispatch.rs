//! Dispatchers.

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use super::guard::{Failure, guard, items, null, out, pick};
use super::handle::{get, register, remove};
use super::plan::{key_of, keys, vmmgraph_key_t, weights_of};
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::dispatch::{
    Action, BucketSet, Decision, Dispatcher, DispatcherOptions, Event, GraphMode, Modes, Phase, Reason, Slot,
    Step,
};
use crate::error::Error;

/// Never defined: a vmmgraph_dispatcher_t is a key, not an address.
pub struct vmmgraph_dispatcher {
    _private: (),
}

/// A dispatcher: decides which graph runs a step, and counts why. It holds no graph. Calls with it are thread-safe.
pub type vmmgraph_dispatcher_t = *mut vmmgraph_dispatcher;

/// Options only: decode tries full graphs, then piecewise ones; the other phases piecewise ones.
pub const VMMGRAPH_MODE_DEFAULT: i32 = 0;
/// No graph.
pub const VMMGRAPH_MODE_EAGER: i32 = 1;
/// Graphs between the attention calls.
pub const VMMGRAPH_MODE_PIECEWISE: i32 = 2;
/// One graph.
pub const VMMGRAPH_MODE_FULL: i32 = 3;

/// All sequences decode.
pub const VMMGRAPH_PHASE_DECODE: i32 = 0;
/// All sequences prefill.
pub const VMMGRAPH_PHASE_PREFILL: i32 = 1;
/// Some of each.
pub const VMMGRAPH_PHASE_MIXED: i32 = 2;

/// A graph of exactly this shape is there.
pub const VMMGRAPH_REASON_HIT: i32 = 0;
/// A graph of a larger shape is there.
pub const VMMGRAPH_REASON_PADDED: i32 = 1;
/// A graph was captured for this step, or is to be.
pub const VMMGRAPH_REASON_CAPTURED: i32 = 2;
/// Eager: the options say so for this phase.
pub const VMMGRAPH_REASON_MODE_EAGER: i32 = 3;
/// Eager: more tokens than most_tokens.
pub const VMMGRAPH_REASON_ABOVE_THRESHOLD: i32 = 4;
/// Eager: no bucket covers the step.
pub const VMMGRAPH_REASON_TOO_LARGE: i32 = 5;
/// Eager: the caller says that this step cannot be in a graph.
pub const VMMGRAPH_REASON_NOT_CAPTURABLE: i32 = 6;
/// Eager: the graph is not there, and graphs are not captured while serving.
pub const VMMGRAPH_REASON_NOT_CAPTURED: i32 = 7;
/// Eager: the graph is being captured elsewhere.
pub const VMMGRAPH_REASON_BEING_CAPTURED: i32 = 8;
/// Eager: most_graphs are there.
pub const VMMGRAPH_REASON_BUDGET: i32 = 9;
/// Eager: capturing this bucket failed, now or before.
pub const VMMGRAPH_REASON_CAPTURE_FAILED: i32 = 10;
/// The graph of this shape is not there, and a larger one that is runs the step.
pub const VMMGRAPH_REASON_STAND_IN: i32 = 11;

/// A capture ahead of traffic begins. The slot is the caller's until the capture is reported as done, failed or abandoned.
pub const VMMGRAPH_GRAPH_BEGIN: i32 = 0;
/// The graph is there.
pub const VMMGRAPH_GRAPH_CAPTURED: i32 = 1;
/// The capture failed: its step runs eagerly, and the bucket has no graph until it is forgiven.
pub const VMMGRAPH_GRAPH_FAILED: i32 = 2;
/// The graph was dropped; it may be captured again.
pub const VMMGRAPH_GRAPH_EVICTED: i32 = 3;
/// A failed bucket may be tried again.
pub const VMMGRAPH_GRAPH_FORGIVEN: i32 = 4;
/// The capture did not come about: all is as before it, and its step is counted when it comes again.
pub const VMMGRAPH_GRAPH_ABANDONED: i32 = 5;
/// A step runs by this graph, or with UINT32_MAX for a slot eagerly, because others decided so: ranks that have to run it the same way.
/// Counted beside what was decided for it here; the graph counts as used.
pub const VMMGRAPH_GRAPH_IMPOSED: i32 = 6;

/// How a dispatcher decides. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_dispatcher_options_t {
    /// sizeof(vmmgraph_dispatcher_options_t).
    pub struct_size: usize,
    /// Buckets of full graphs, in any order.
    pub full: *const vmmgraph_key_t,
    /// How many.
    pub full_count: usize,
    /// Buckets of piecewise graphs, in any order.
    pub piecewise: *const vmmgraph_key_t,
    /// How many.
    pub piecewise_count: usize,
    /// What one more along each axis costs; all 0: a token costs 1 and nothing else counts.
    pub weights: [u16; 4],
    /// Bits of a step's variant that do not count for piecewise graphs.
    pub piecewise_ignores: u32,
    /// Steps of more tokens run eagerly; 0: no limit.
    pub most_tokens: u32,
    /// Most graphs that are there or being captured at once; 0: no limit.
    pub most_graphs: u32,
    /// 1: a graph that is not there is not captured by the step that needs it.
    pub ahead_only: i32,
    /// The modes that steps of each VMMGRAPH_PHASE try, first and second.
    pub modes: [[i32; 2]; 3],
    /// A graph that is not there may be stood in for by one that weighs at most so many times as much; 0: twice, 1: by none heavier.
    pub stand_in: u32,
    /// 0.
    pub reserved: u32,
}

/// What became of a dispatcher's graphs and steps so far.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_dispatcher_stats_t {
    /// Set to sizeof(vmmgraph_dispatcher_stats_t) before the call.
    pub struct_size: usize,
    /// Graphs that are there or being captured.
    pub graphs: u64,
    /// Captures that succeeded.
    pub captures: u64,
    /// Captures that failed.
    pub failures: u64,
    /// Graphs that were dropped.
    pub evictions: u64,
    /// Weight of the steps that graphs ran, and what padding added to it.
    pub requested: u64,
    /// See `requested`.
    pub padding: u64,
    /// Steps that ran as others decided (VMMGRAPH_GRAPH_IMPOSED), beside what was decided, and counted, for them here.
    pub imposed: u64,
    /// Of those, the eager ones.
    pub imposed_eager: u64,
}

/// What to do with a step, and why.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_decision_t {
    /// Set to sizeof(vmmgraph_decision_t) before the call.
    pub struct_size: usize,
    /// VMMGRAPH_MODE_EAGER, _PIECEWISE or _FULL.
    pub mode: i32,
    /// A VMMGRAPH_REASON.
    pub reason: i32,
    /// 1: capture the graph, and report VMMGRAPH_GRAPH_CAPTURED, _FAILED or _ABANDONED; 0: replay it, or run eagerly.
    pub capture: i32,
    /// The graph's number, from 0; UINT32_MAX for an eager step.
    pub slot: u32,
    /// The shape to pad to; zeros for an eager step.
    pub bucket: vmmgraph_key_t,
    /// 0.
    pub reserved: u32,
}

fn modes_of(given: [[i32; 2]; 3]) -> Result<Modes, Failure> {
    let known = Modes::default();
    let pair = |[first, second]: [i32; 2], default: [GraphMode; 2]| {
        let all = [None, Some(GraphMode::Eager), Some(GraphMode::Piecewise), Some(GraphMode::Full)];
        let first = pick("a mode", first, &all)?;
        let second = pick("a mode", second, &all)?;
        Ok::<_, Failure>(match (first, second) {
            (None, None) => default,
            (None, Some(second)) => [default[0], second],
            (Some(first), second) => [first, second.unwrap_or(GraphMode::Eager)],
        })
    };
    Ok(Modes {
        decode: pair(given[0], known.decode)?,
        prefill: pair(given[1], known.prefill)?,
        mixed: pair(given[2], known.mixed)?,
    })
}

/// Makes a dispatcher without any graph.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set and whose arrays have as many keys as it says; `dispatcher` is
/// null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_create(
    options: *const vmmgraph_dispatcher_options_t,
    dispatcher: *mut vmmgraph_dispatcher_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (given, dispatcher) =
            (unsafe { self::options(options) }?, unsafe { out(dispatcher, "dispatcher") }?);
        let Some(given) = given else {
            let empty = || BucketSet::of_tokens([]);
            *dispatcher =
                register(Arc::new(Dispatcher::new(empty()?, empty()?, DispatcherOptions::default())));
            return Ok(());
        };
        let weights = weights_of(given.weights)?;
        let limit = |number: u32| if number == 0 { u32::MAX } else { number };
        let options = DispatcherOptions {
            modes: modes_of(given.modes)?,
            most_tokens: limit(given.most_tokens),
            lazy: !pick("ahead_only", given.ahead_only, &[false, true])?,
            most_graphs: limit(given.most_graphs),
            stand_in: if given.stand_in == 0 {
                DispatcherOptions::default().stand_in
            } else {
                given.stand_in
            },
        };
        // SAFETY: the caller's contract.
        let full = BucketSet::new(unsafe { keys(given.full, given.full_count) }?, weights)?;
        // SAFETY: the caller's contract.
        let piecewise = unsafe { keys(given.piecewise, given.piecewise_count) }?;
        let piecewise = BucketSet::new(piecewise, weights)?.ignoring_variant_bits(given.piecewise_ignores);
        *dispatcher = register(Arc::new(Dispatcher::new(full, piecewise, options)));
        Ok(())
    })
}

/// Ends a dispatcher.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_dispatcher_destroy(dispatcher: vmmgraph_dispatcher_t) -> vmmgraph_status_t {
    guard(|| remove::<Dispatcher, _>(dispatcher).map(drop))
}

fn write(decision: &Decision, to: &OutStruct<vmmgraph_decision_t>) {
    let (capture, slot, bucket) = match decision.action {
        Action::Eager => (0, u32::MAX, vmmgraph_key_t::default()),
        Action::Replay(slot, bucket) => (0, slot.0, bucket.into()),
        Action::Capture(slot, bucket) => (1, slot.0, bucket.into()),
    };
    let (mode, reason) = (decision.mode as i32 + VMMGRAPH_MODE_EAGER, decision.reason as i32);
    let struct_size = to.struct_size;
    to.write(vmmgraph_decision_t { struct_size, mode, reason, capture, slot, bucket, reserved: 0 });
}

/// Decides for one step and counts the decision, one to capture when it is reported. `capturable` is 0 if the caller knows that the step cannot be in a graph, else 1.
///
/// # Safety
/// `step` is null or readable; `decision` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatch(
    dispatcher: vmmgraph_dispatcher_t,
    step: *const vmmgraph_key_t,
    phase: i32,
    capturable: i32,
    decision: *mut vmmgraph_decision_t,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: the caller's contract.
        let (key, decision) = (unsafe { key_of(step) }?, unsafe { OutStruct::new(decision, "decision") }?);
        let phase = pick("the phase", phase, &[Phase::Decode, Phase::Prefill, Phase::Mixed])?;
        let capturable = pick("capturable", capturable, &[false, true])?;
        write(&dispatcher.dispatch(&Step { key, phase, capturable }), &decision);
        Ok(())
    })
}

/// The index-th graph to capture ahead of traffic, from 0, largest first in each mode: its mode, slot and bucket. Counts nothing.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT behind the last.
///
/// # Safety
/// `decision` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_slot(
    dispatcher: vmmgraph_dispatcher_t,
    index: usize,
    decision: *mut vmmgraph_decision_t,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: the caller's contract.
        let decision = unsafe { OutStruct::new(decision, "decision") }?;
        let expected = "below the number of graphs";
        let (slot, mode, bucket) = dispatcher.slots().nth(index).ok_or(Error::InvalidArgument {
            what: "the index",
            value: index as i128,
            expected,
        })?;
        write(&Decision { mode, action: Action::Capture(slot, bucket), reason: Reason::Captured }, &decision);
        Ok(())
    })
}

/// Tells a dispatcher what became of a graph: one of VMMGRAPH_GRAPH. VMMGRAPH_ERROR_WRONG_STATE if that cannot be.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_dispatcher_report(
    dispatcher: vmmgraph_dispatcher_t,
    slot: u32,
    event: i32,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        let reports: [fn(&Dispatcher, Slot) -> crate::error::Result<()>; 7] = [
            Dispatcher::begin_capture,
            Dispatcher::captured,
            Dispatcher::capture_failed,
            Dispatcher::evicted,
            Dispatcher::forgive,
            Dispatcher::abandoned,
            |dispatcher, slot| dispatcher.imposed((slot.0 != u32::MAX).then_some(slot)),
        ];
        Ok(pick("the event", event, &reports)?(&dispatcher, Slot(slot))?)
    })
}

/// The graph to drop first when room is needed: of those that are there, the one whose last use is the longest ago, but never `kept`
/// (UINT32_MAX: any). Writes UINT32_MAX if there is none. Report VMMGRAPH_GRAPH_EVICTED once it is gone.
///
/// # Safety
/// `slot` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_least_recently_used(
    dispatcher: vmmgraph_dispatcher_t,
    kept: u32,
    slot: *mut u32,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: the caller's contract.
        let slot = unsafe { out(slot, "slot") }?;
        *slot = dispatcher.least_recently_used(Some(Slot(kept))).map_or(u32::MAX, |slot| slot.0);
        Ok(())
    })
}

/// The counts as they are now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_stats(
    dispatcher: vmmgraph_dispatcher_t,
    stats: *mut vmmgraph_dispatcher_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let counters = dispatcher.counters();
        stats.write(vmmgraph_dispatcher_stats_t {
            struct_size: stats.struct_size,
            graphs: dispatcher.graphs().into(),
            captures: counters.events(Event::Captured),
            failures: counters.events(Event::Failed),
            evictions: counters.events(Event::Evicted),
            requested: counters.requested(),
            padding: counters.padding(),
            imposed: GraphMode::ALL.map(|mode| counters.imposed(mode)).iter().sum(),
            imposed_eager: counters.imposed(GraphMode::Eager),
        });
        Ok(())
    })
}

/// Steps that ran in that mode for that reason.
///
/// # Safety
/// `steps` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_steps(
    dispatcher: vmmgraph_dispatcher_t,
    mode: i32,
    reason: i32,
    steps: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: the caller's contract.
        let steps = unsafe { out(steps, "steps") }?;
        let mode = pick("the mode", mode.saturating_sub(VMMGRAPH_MODE_EAGER), &GraphMode::ALL)?;
        *steps = dispatcher.counters().steps(mode, pick("the reason", reason, &Reason::ALL)?);
        Ok(())
    })
}

/// All counters in Prometheus's text exposition format, with `count` labels on every sample: their names, then as many values, UTF-8.
/// Copies at most `capacity` bytes, zero-terminated if capacity is not 0, and writes the bytes needed (terminator included) to `needed`;
/// either may be null.
///
/// # Safety
/// `labels` points to 2 * `count` zero-terminated texts, or `count` is 0; `buffer` is null or points to `capacity` writable bytes;
/// `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_prometheus(
    dispatcher: vmmgraph_dispatcher_t,
    labels: *const *const c_char,
    count: usize,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: the caller's contract.
        let labels = unsafe { items(labels, count.saturating_mul(2), "labels") }?;
        let mut texts = Vec::with_capacity(labels.len());
        for label in labels {
            if label.is_null() {
                return Err(null("label"));
            }
            // SAFETY: not null, so zero-terminated by the caller's contract.
            texts.push(unsafe { CStr::from_ptr(*label) }.to_string_lossy());
        }
        let (names, values) = texts.split_at(count);
        let pairs: Vec<_> = names.iter().zip(values).map(|(name, value)| (&**name, &**value)).collect();
        let text = dispatcher.prometheus(&pairs);
        // SAFETY: the caller's contract.
        unsafe { copy_text(&text, buffer, capacity, needed) };
        Ok(())
    })
}
