//! Shapes and the choice of buckets.

use super::guard::{Failure, copy_items, guard, items, out, pick};
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use crate::dispatch::{
    AclGraphStreams, BucketSet, Budget, Costs, Histogram, Key, PlannedBucket, Waste, Weights, evaluate, plan,
    vllm_sizes, xllm_sizes,
};
use crate::error::Error;

/// A shape: of a step, or of the graph that runs it (a bucket). Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_key_t {
    /// What but size makes graphs differ; compared for equality.
    pub variant: u32,
    /// Sizes that padding may raise: tokens, batch, KV-cache pages, one of the caller's own. 0 where an axis plays no part.
    pub extents: [u32; 4],
}

impl From<Key> for vmmgraph_key_t {
    fn from(key: Key) -> Self {
        Self { variant: key.variant, extents: key.extents }
    }
}

impl From<vmmgraph_key_t> for Key {
    fn from(key: vmmgraph_key_t) -> Self {
        Self { variant: key.variant, extents: key.extents }
    }
}

/// The list of xLLM: 1, 2, 4, 8, then multiples of 16 up to the first that holds `max`.
pub const VMMGRAPH_SIZES_XLLM: i32 = 0;
/// The default list of vLLM: 1, 2, 4, multiples of 8 below 256, then multiples of 16 up to `max`.
pub const VMMGRAPH_SIZES_VLLM: i32 = 1;

/// Streams and layers of an Ascend deployment, for the number of ACL graphs that it can hold by vLLM-Ascend's formula. Zero
/// everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_acl_graph_streams_t {
    /// sizeof(vmmgraph_acl_graph_streams_t).
    pub struct_size: usize,
    /// Streams that captures may take; 0: 1800, which is a device's 2048 less what is kept back.
    pub streams: u32,
    /// The model's hidden layers.
    pub layers: u32,
    /// Layers of the draft model; 0: there is none.
    pub draft_layers: u32,
    /// The data-parallel and tensor-parallel sizes; each above 1 is a communication group.
    pub data_parallel: u32,
    /// See `data_parallel`.
    pub tensor_parallel: u32,
    /// 1: HCCL_OP_EXPANSION_MODE is AIV.
    pub aiv: i32,
    /// AIV: further concurrent streams (1 each for expert parallelism, an overlapped shared expert, data parallelism of a
    /// mixture-of-experts model).
    pub extra: u32,
    /// AIV: 1 keeps one graph's worth of streams back, as later versions do for dense models.
    pub reserve_one: i32,
    /// Without AIV: how many of the prefill and decode context-parallel sizes are above 1.
    pub context_groups: u32,
    /// 0.
    pub reserved: u32,
}

/// What graphs may take and cost. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_plan_options_t {
    /// sizeof(vmmgraph_plan_options_t).
    pub struct_size: usize,
    /// What one more along each axis costs; all 0: a token costs 1 and nothing else counts.
    pub weights: [u16; 4],
    /// Most graphs; 0: no limit.
    pub most_graphs: u32,
    /// 0.
    pub reserved: u32,
    /// Most bytes that graphs add by themselves; 0: no limit.
    pub most_graph_bytes: u64,
    /// Bytes that one more graph adds (executable graph, retained blocks).
    pub graph_bytes: u64,
    /// Most bytes of shared pages; 0: no limit.
    pub most_pool_bytes: u64,
    /// Bytes of shared pages that the smallest graph needs.
    pub pool_base_bytes: u64,
    /// Bytes of shared pages for each unit of a bucket's weight.
    pub pool_unit_bytes: u64,
    /// What an eager step costs in the unit of padding; 0: more than any padding.
    pub eager_step: u64,
    /// Streams of an Ascend device; null: no limit by streams.
    pub streams: *const vmmgraph_acl_graph_streams_t,
}

/// What a set of buckets does with given traffic. Numbers beyond 64 bits are UINT64_MAX, here and below.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_waste_t {
    /// Set to sizeof(vmmgraph_waste_t) before the call.
    pub struct_size: usize,
    /// Weight of what graphs compute and nobody asked for.
    pub padding: u64,
    /// Steps that graphs run.
    pub graph_steps: u64,
    /// Steps that no bucket covers.
    pub eager_steps: u64,
}

impl vmmgraph_waste_t {
    fn of(waste: &Waste) -> Self {
        let [padding, graph_steps, eager_steps] =
            [waste.padding, waste.graph_steps, waste.eager_steps].map(narrow);
        Self { struct_size: size_of::<Self>(), padding, graph_steps, eager_steps }
    }
}

/// A bucket of a plan and what it buys. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_planned_bucket_t {
    /// The bucket.
    pub key: vmmgraph_key_t,
    /// 0.
    pub reserved: u32,
    /// Steps that it runs.
    pub steps: u64,
    /// Weight of the padding in those.
    pub padding: u64,
    /// What those steps would cost more without it, in the unit of padding.
    pub saves: u64,
}

/// Of VMMGRAPH_LIMITED_BY: no part of the budget limits the number of graphs.
pub const VMMGRAPH_LIMITED_BY_NOTHING: i32 = 0;
/// most_graphs does.
pub const VMMGRAPH_LIMITED_BY_GRAPHS: i32 = 1;
/// streams does.
pub const VMMGRAPH_LIMITED_BY_STREAMS: i32 = 2;
/// most_graph_bytes does.
pub const VMMGRAPH_LIMITED_BY_GRAPH_BYTES: i32 = 3;

/// What became of a plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_plan_result_t {
    /// Set to sizeof(vmmgraph_plan_result_t) before the call.
    pub struct_size: usize,
    /// Set before the call: where the cost curve goes, and how many numbers there is room for; null and 0: nowhere. The k-th, from 0,
    /// is what the best choice of at most k graphs costs, in the unit of padding.
    pub curve: *mut u64,
    /// See `curve`.
    pub curve_capacity: usize,
    /// Numbers of the curve: one more than the graphs that were worth having.
    pub curve_count: usize,
    /// Buckets chosen.
    pub buckets: usize,
    /// The most graphs that the budget allows; UINT32_MAX: any number.
    pub most_graphs: u32,
    /// The part of the budget that says so, a VMMGRAPH_LIMITED_BY.
    pub limited_by: i32,
    /// Weight of the heaviest bucket that the pool has room for; UINT64_MAX: any; 0: none.
    pub heaviest: u64,
    /// What the buckets do with the traffic planned for.
    pub waste: vmmgraph_waste_t,
}

fn narrow(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// The keys that a pointer points to.
///
/// # Safety
/// As [`items`].
pub(super) unsafe fn keys(keys: *const vmmgraph_key_t, count: usize) -> Result<Vec<Key>, Failure> {
    // SAFETY: the caller's contract.
    Ok(unsafe { items(keys, count, "keys") }?.iter().map(|key| (*key).into()).collect())
}

/// The key that a pointer points to.
///
/// # Safety
/// Null or readable.
pub(super) unsafe fn key_of(key: *const vmmgraph_key_t) -> Result<Key, Failure> {
    // SAFETY: the caller's contract.
    Ok(unsafe { items(key, 1, "key") }?.first().copied().unwrap_or_default().into())
}

pub(super) fn weights_of(weights: [u16; 4]) -> Result<Weights, Failure> {
    if weights == [0; 4] { Ok(Weights::default()) } else { Ok(Weights::new(weights)?) }
}

/// The sizes of a VMMGRAPH_SIZES list up to `max`, at most 2^20, ascending. Writes at most `capacity` of them and how many there are.
///
/// # Safety
/// `sizes` points to `capacity` writable numbers, or `capacity` is 0; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_sizes(
    list: i32,
    max: u32,
    sizes: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let count = unsafe { out(count, "count") }?;
        let rule = pick::<fn(u32) -> Vec<u32>>("the list", list, &[xllm_sizes, vllm_sizes])?;
        if max > MOST_TOKENS {
            let expected = "at most 2^20";
            return Err(Error::InvalidArgument { what: "the size", value: max.into(), expected }.into());
        }
        let found = rule(max);
        // SAFETY: the caller's contract.
        unsafe { copy_items(&found, sizes, capacity) }?;
        *count = found.len();
        Ok(())
    })
}

/// The longest list that is written out.
const MOST_TOKENS: u32 = 1 << 20;

/// The most ACL graphs that fit the streams of an Ascend device, by the formula of vLLM-Ascend's `update_aclgraph_sizes`; 0 if none does.
///
/// # Safety
/// `streams` is null (the default: no layers, no groups) or points to a struct whose struct_size is set; `graphs` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_acl_graph_limit(
    streams: *const vmmgraph_acl_graph_streams_t,
    graphs: *mut u32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (streams, graphs) = (unsafe { streams_of(streams) }?, unsafe { out(graphs, "graphs") }?);
        *graphs = streams.unwrap_or_else(|| AclGraphStreams::new(0, 1, 1, false)).max_graphs();
        Ok(())
    })
}

/// The streams that a pointer points to; none for null.
///
/// # Safety
/// As [`options`].
unsafe fn streams_of(
    streams: *const vmmgraph_acl_graph_streams_t,
) -> Result<Option<AclGraphStreams>, Failure> {
    // SAFETY: the caller's contract.
    let Some(given) = unsafe { options(streams) }? else { return Ok(None) };
    let aiv = pick("aiv", given.aiv, &[false, true])?;
    let streams = AclGraphStreams::new(given.layers, given.data_parallel, given.tensor_parallel, aiv);
    Ok(Some(AclGraphStreams {
        streams: if given.streams == 0 { streams.streams } else { given.streams },
        draft_layers: (given.draft_layers > 0).then_some(given.draft_layers),
        extra: given.extra,
        reserve_one: pick("reserve_one", given.reserve_one, &[false, true])?,
        context_groups: given.context_groups,
        ..streams
    }))
}

/// The traffic that two arrays describe.
///
/// # Safety
/// Both point to `count` items, or that is 0.
unsafe fn traffic_of(
    shapes: *const vmmgraph_key_t,
    steps: *const u64,
    count: usize,
) -> Result<Histogram, Failure> {
    // SAFETY: the caller's contract.
    let (shapes, steps) = (unsafe { keys(shapes, count) }?, unsafe { items(steps, count, "steps") }?);
    let mut traffic = Histogram::default();
    for (shape, steps) in shapes.into_iter().zip(steps) {
        traffic.record(shape, *steps);
    }
    Ok(traffic)
}

/// Chooses the buckets that pad least for steps of these shapes, so many of each, within the limits: exactly along one axis, soundly along
/// several. VMMGRAPH_ERROR_INVALID_ARGUMENT beyond 2^24 shapes times graphs of a variant, beyond 2^14 shapes of one that differ along several axes, and
/// where there are too many variants for so many graphs. Writes at most `capacity` of them with what each buys, ascending; there are no more of them than shapes. `result` may be null.
///
/// # Safety
/// `shapes` and `steps` point to `shape_count` items, or that is 0; `options` points to a struct whose struct_size is set, as `streams`
/// in it does; `buckets` points to `capacity` writable buckets, or that is 0; `result` is null or points to a struct whose struct_size,
/// curve and curve_capacity are set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_plan(
    shapes: *const vmmgraph_key_t,
    steps: *const u64,
    shape_count: usize,
    options: *const vmmgraph_plan_options_t,
    buckets: *mut vmmgraph_planned_bucket_t,
    capacity: usize,
    result: *mut vmmgraph_plan_result_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let given = unsafe { self::options(options) }?;
        // SAFETY: the caller's contract.
        let traffic = unsafe { traffic_of(shapes, steps, shape_count) }?;
        // SAFETY: the caller's contract.
        let result = if result.is_null() { None } else { Some(unsafe { OutStruct::new(result, "result") }?) };
        let (mut budget, mut costs, mut weights) = (Budget::default(), Costs::default(), Weights::default());
        if let Some(given) = given {
            weights = weights_of(given.weights)?;
            budget.graphs = (given.most_graphs > 0).then_some(given.most_graphs);
            budget.graph_bytes = (given.most_graph_bytes > 0).then_some(given.most_graph_bytes);
            budget.pool_bytes = (given.most_pool_bytes > 0).then_some(given.most_pool_bytes);
            // SAFETY: the caller's contract.
            budget.streams = unsafe { streams_of(given.streams) }?;
            costs.graph_bytes = given.graph_bytes;
            costs.pool_base_bytes = given.pool_base_bytes;
            costs.pool_unit_bytes = given.pool_unit_bytes;
            if given.eager_step > 0 {
                costs.eager_step = given.eager_step;
            }
        }
        let plan = plan(&traffic, weights, &budget, &costs)?;
        let bought = |bucket: &PlannedBucket| vmmgraph_planned_bucket_t {
            key: bucket.key.into(),
            reserved: 0,
            steps: narrow(bucket.steps),
            padding: narrow(bucket.padding),
            saves: narrow(bucket.saves),
        };
        let found: Vec<_> = plan.bought.iter().map(bought).collect();
        // SAFETY: the caller's contract.
        unsafe { copy_items(&found, buckets, capacity) }?;
        let Some(result) = result else { return Ok(()) };
        let asked = result.read();
        let curve: Vec<u64> = plan.curve.iter().copied().map(narrow).collect();
        // SAFETY: the caller's contract.
        unsafe { copy_items(&curve, asked.curve, asked.curve_capacity) }?;
        result.write(vmmgraph_plan_result_t {
            curve_count: curve.len(),
            buckets: found.len(),
            most_graphs: plan.limit.graphs,
            limited_by: plan.limit.by as i32,
            heaviest: plan.limit.weight.unwrap_or(0),
            waste: vmmgraph_waste_t::of(&plan.waste),
            ..asked
        });
        Ok(())
    })
}

/// What these buckets do with that traffic, to compare an engine's list with a plan. `weights` is null or has a weight for each axis; null
/// and all 0: a token costs 1 and nothing else counts.
///
/// # Safety
/// `buckets` points to `bucket_count` keys, `shapes` and `steps` to `shape_count` items, or those are 0; `weights` is null or points to
/// four numbers; `waste` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_plan_evaluate(
    buckets: *const vmmgraph_key_t,
    bucket_count: usize,
    weights: *const u16,
    shapes: *const vmmgraph_key_t,
    steps: *const u64,
    shape_count: usize,
    waste: *mut vmmgraph_waste_t,
) -> vmmgraph_status_t {
    guard(|| {
        let mut given = [0; 4];
        if !weights.is_null() {
            // SAFETY: the caller's contract.
            given.copy_from_slice(unsafe { items(weights, 4, "weights") }?);
        }
        // SAFETY: the caller's contract.
        let buckets = BucketSet::new(unsafe { keys(buckets, bucket_count) }?, weights_of(given)?)?;
        // SAFETY: the caller's contract.
        let traffic = unsafe { traffic_of(shapes, steps, shape_count) }?;
        // SAFETY: the caller's contract.
        let waste = unsafe { OutStruct::new(waste, "waste") }?;
        waste.write(vmmgraph_waste_t::of(&evaluate(&buckets, &traffic)));
        Ok(())
    })
}
