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

pub struct vmmgraph_dispatcher {
    _private: (),
}

/// Dispatcher: selects the graph of each step and counts the reasons. Owns no graph.
pub type vmmgraph_dispatcher_t = *mut vmmgraph_dispatcher;

/// Decode: full graphs, then piecewise graphs. Other phases: piecewise graphs.
pub const VMMGRAPH_MODE_DEFAULT: i32 = 0;
/// No graph.
pub const VMMGRAPH_MODE_EAGER: i32 = 1;
/// One graph per piece between attention calls.
pub const VMMGRAPH_MODE_PIECEWISE: i32 = 2;
/// One graph for the whole step.
pub const VMMGRAPH_MODE_FULL: i32 = 3;

/// All sequences decode.
pub const VMMGRAPH_PHASE_DECODE: i32 = 0;
/// All sequences prefill.
pub const VMMGRAPH_PHASE_PREFILL: i32 = 1;
/// Sequences of both kinds.
pub const VMMGRAPH_PHASE_MIXED: i32 = 2;

/// A graph with the exact shape exists.
pub const VMMGRAPH_REASON_HIT: i32 = 0;
pub const VMMGRAPH_REASON_PADDED: i32 = 1;
/// A graph is captured for this step.
pub const VMMGRAPH_REASON_CAPTURED: i32 = 2;
/// Eager: the options choose eager for this phase.
pub const VMMGRAPH_REASON_MODE_EAGER: i32 = 3;
/// Eager: more tokens than most_tokens.
pub const VMMGRAPH_REASON_ABOVE_THRESHOLD: i32 = 4;
/// Eager: no bucket covers the step.
pub const VMMGRAPH_REASON_TOO_LARGE: i32 = 5;
/// Eager: the caller declared the step not capturable.
pub const VMMGRAPH_REASON_NOT_CAPTURABLE: i32 = 6;
/// Eager: the graph is missing, and captures during serving are off.
pub const VMMGRAPH_REASON_NOT_CAPTURED: i32 = 7;
/// Eager: the graph is being captured elsewhere.
pub const VMMGRAPH_REASON_BEING_CAPTURED: i32 = 8;
/// Eager: most_graphs graphs exist.
pub const VMMGRAPH_REASON_BUDGET: i32 = 9;
/// Eager: a capture of this bucket failed, now or before.
pub const VMMGRAPH_REASON_CAPTURE_FAILED: i32 = 10;
/// The graph of the nearest bucket is missing; a larger existing graph runs the step.
pub const VMMGRAPH_REASON_STAND_IN: i32 = 11;

/// Begins a capture ahead of traffic. The caller owns the slot until it reports _CAPTURED, _FAILED
/// or _ABANDONED.
pub const VMMGRAPH_GRAPH_BEGIN: i32 = 0;
pub const VMMGRAPH_GRAPH_CAPTURED: i32 = 1;
/// The step runs eagerly, and the bucket has no graph until VMMGRAPH_GRAPH_FORGIVEN.
pub const VMMGRAPH_GRAPH_FAILED: i32 = 2;
/// The graph was destroyed and may be captured again.
pub const VMMGRAPH_GRAPH_EVICTED: i32 = 3;
/// Permits a new attempt for a failed bucket.
pub const VMMGRAPH_GRAPH_FORGIVEN: i32 = 4;
/// The capture was not attempted: the slot returns to its previous state; the step is counted when
/// dispatched again.
pub const VMMGRAPH_GRAPH_ABANDONED: i32 = 5;
/// Another rank decided that a step runs with this graph, or eagerly (slot UINT32_MAX). Counted in
/// addition to the local decision.
pub const VMMGRAPH_GRAPH_IMPOSED: i32 = 6;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_dispatcher_options_t {
    pub struct_size: usize,
    /// Full graphs, in any order.
    pub full: *const vmmgraph_key_t,
    pub full_count: usize,
    /// Piecewise graphs, in any order.
    pub piecewise: *const vmmgraph_key_t,
    pub piecewise_count: usize,
    /// Cost of one unit along each axis. All 0: a token costs 1, other axes nothing.
    pub weights: [u16; 4],
    /// Bits of a step's variant ignored for piecewise graphs.
    pub piecewise_ignores: u32,
    /// Steps with more tokens run eagerly; 0: no limit.
    pub most_tokens: u32,
    /// Graphs, including captures in progress; 0: no limit.
    pub most_graphs: u32,
    /// 1: a step never captures its missing graph.
    pub ahead_only: i32,
    /// Modes tried for each VMMGRAPH_PHASE.
    pub modes: [[i32; 2]; 3],
    /// Maximum weight of a stand-in for a missing graph, as a multiple of its weight. 0: 2; 1: no
    /// heavier graph.
    pub stand_in: u32,
    /// Must be 0.
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_dispatcher_stats_t {
    pub struct_size: usize,
    pub graphs: u64,
    pub captures: u64,
    pub failures: u64,
    /// Evicted graphs.
    pub evictions: u64,
    /// Weight of the steps run by graphs, without padding.
    pub requested: u64,
    /// Weight of the padding in those steps.
    pub padding: u64,
    /// Steps run by the decision of another rank (VMMGRAPH_GRAPH_IMPOSED).
    pub imposed: u64,
    /// Eager steps in `imposed`.
    pub imposed_eager: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_decision_t {
    pub struct_size: usize,
    /// VMMGRAPH_MODE_EAGER, _PIECEWISE or _FULL.
    pub mode: i32,
    /// One of VMMGRAPH_REASON_*.
    pub reason: i32,
    /// 1: capture the graph, then report VMMGRAPH_GRAPH_CAPTURED, _FAILED or _ABANDONED.
    pub capture: i32,
    /// Number of the graph, from 0; UINT32_MAX for an eager step.
    pub slot: u32,
    /// Shape to pad to; all 0 for an eager step.
    pub bucket: vmmgraph_key_t,
    /// Always 0.
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

/// Creates a dispatcher without graphs. Null options: no buckets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_create(
    options: *const vmmgraph_dispatcher_options_t,
    dispatcher: *mut vmmgraph_dispatcher_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
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
        // SAFETY: contract.
        let full = BucketSet::new(unsafe { keys(given.full, given.full_count) }?, weights)?;
        // SAFETY: contract.
        let piecewise = unsafe { keys(given.piecewise, given.piecewise_count) }?;
        let piecewise = BucketSet::new(piecewise, weights)?.ignoring_variant_bits(given.piecewise_ignores);
        *dispatcher = register(Arc::new(Dispatcher::new(full, piecewise, options)));
        Ok(())
    })
}

/// Destroys a dispatcher.
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

/// Decides one step and counts the decision; a capture counts when reported. `capturable` is 0 if
/// the step cannot run in a graph.
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
        // SAFETY: contract.
        let (key, decision) = (unsafe { key_of(step) }?, unsafe { OutStruct::new(decision, "decision") }?);
        let phase = pick("the phase", phase, &[Phase::Decode, Phase::Prefill, Phase::Mixed])?;
        let capturable = pick("capturable", capturable, &[false, true])?;
        write(&dispatcher.dispatch(&Step { key, phase, capturable }), &decision);
        Ok(())
    })
}

/// Writes mode, slot and bucket of graph number `index`, largest first in each mode.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT beyond the last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_slot(
    dispatcher: vmmgraph_dispatcher_t,
    index: usize,
    decision: *mut vmmgraph_decision_t,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: contract.
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

/// Reports an event of a graph, VMMGRAPH_GRAPH_*. VMMGRAPH_ERROR_WRONG_STATE if the slot's state
/// does not permit the event.
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

/// Finds the graph to evict first: the least recently used, except `kept`; UINT32_MAX: none. Report
/// VMMGRAPH_GRAPH_EVICTED after the graph is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_least_recently_used(
    dispatcher: vmmgraph_dispatcher_t,
    kept: u32,
    slot: *mut u32,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: contract.
        let slot = unsafe { out(slot, "slot") }?;
        *slot = dispatcher.least_recently_used(Some(Slot(kept))).map_or(u32::MAX, |slot| slot.0);
        Ok(())
    })
}

/// Writes the statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_stats(
    dispatcher: vmmgraph_dispatcher_t,
    stats: *mut vmmgraph_dispatcher_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: contract.
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

/// Writes the number of steps run in `mode` for `reason`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_dispatcher_steps(
    dispatcher: vmmgraph_dispatcher_t,
    mode: i32,
    reason: i32,
    steps: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let dispatcher = get::<Dispatcher, _>(dispatcher)?;
        // SAFETY: contract.
        let steps = unsafe { out(steps, "steps") }?;
        let mode = pick("the mode", mode.saturating_sub(VMMGRAPH_MODE_EAGER), &GraphMode::ALL)?;
        *steps = dispatcher.counters().steps(mode, pick("the reason", reason, &Reason::ALL)?);
        Ok(())
    })
}

/// Copies all counters in Prometheus text format. `labels` has `count` names, then `count` values,
/// added to every sample.
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
        // SAFETY: contract.
        let labels = unsafe { items(labels, count.saturating_mul(2), "labels") }?;
        let mut texts = Vec::with_capacity(labels.len());
        for label in labels {
            if label.is_null() {
                return Err(null("label"));
            }
            // SAFETY: not null, so zero-terminated.
            texts.push(unsafe { CStr::from_ptr(*label) }.to_string_lossy());
        }
        let (names, values) = texts.split_at(count);
        let pairs: Vec<_> = names.iter().zip(values).map(|(name, value)| (&**name, &**value)).collect();
        let text = dispatcher.prometheus(&pairs);
        // SAFETY: contract.
        unsafe { copy_text(&text, buffer, capacity, needed) };
        Ok(())
    })
}
