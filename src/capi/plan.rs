//! Bucket planning in C.

use super::guard::{Failure, copy_items, guard, items, out, pick};
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use crate::dispatch::{
    AclGraphStreams, BucketSet, Budget, Costs, Histogram, Key, PlannedBucket, Waste, Weights, evaluate, plan,
    vllm_sizes, xllm_sizes,
};
use crate::error::Error;

/// Shape of a step, or of a graph (a bucket). Never grows, so without struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_key_t {
    /// Properties other than size which change the graph; compared for equality.
    pub variant: u32,
    /// Sizes which padding may raise: tokens, batch, KV-cache pages, and one for the caller. 0 on
    /// an unused axis.
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

/// List of xLLM: 1, 2, 4, 8, then multiples of 16 up to the first size of at least `max`.
pub const VMMGRAPH_SIZES_XLLM: i32 = 0;
/// Default list of vLLM: 1, 2, 4, multiples of 8 below 256, then multiples of 16 up to `max`.
pub const VMMGRAPH_SIZES_VLLM: i32 = 1;

/// Parameters of an Ascend deployment for vLLM-Ascend's limit of ACL graphs. Zero the struct, set
/// struct_size, then the fields which differ from the default 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_acl_graph_streams_t {
    /// sizeof(vmmgraph_acl_graph_streams_t).
    pub struct_size: usize,
    /// Streams available to captures; 0: 1800, a device's 2048 less a reserve.
    pub streams: u32,
    /// Hidden layers of the model.
    pub layers: u32,
    /// Layers of the draft model; 0: none.
    pub draft_layers: u32,
    /// Data-parallel size. Each of data_parallel and tensor_parallel above 1 adds a communication
    /// group.
    pub data_parallel: u32,
    /// Tensor-parallel size.
    pub tensor_parallel: u32,
    /// 1: HCCL_OP_EXPANSION_MODE is AIV; else 0.
    pub aiv: i32,
    /// AIV: further concurrent streams (1 each for expert parallelism, an overlapped shared expert,
    /// data parallelism of a mixture-of-experts model).
    pub extra: u32,
    /// AIV: 1 reserves the streams of one graph, as later versions do for dense models.
    pub reserve_one: i32,
    /// Without AIV: how many of the prefill and decode context-parallel sizes exceed 1.
    pub context_groups: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// Limits and costs of graphs. Zero the struct, set struct_size, then the fields which differ from
/// the default 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_plan_options_t {
    /// sizeof(vmmgraph_plan_options_t).
    pub struct_size: usize,
    /// Cost of one unit along each axis. All 0: a token costs 1, other axes nothing.
    pub weights: [u16; 4],
    /// Maximum number of graphs; 0: no limit.
    pub most_graphs: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Maximum of bytes private to graphs; 0: no limit.
    pub most_graph_bytes: u64,
    /// Bytes added by each graph (executable graph, live-out blocks).
    pub graph_bytes: u64,
    /// Maximum of bytes of shared pages; 0: no limit.
    pub most_pool_bytes: u64,
    /// Bytes of shared pages of the smallest graph.
    pub pool_base_bytes: u64,
    /// Bytes of shared pages per unit of bucket weight.
    pub pool_unit_bytes: u64,
    /// Cost of an eager step in the unit of padding; 0: more than any padding.
    pub eager_step: u64,
    /// Streams of an Ascend device; null: no limit by streams.
    pub streams: *const vmmgraph_acl_graph_streams_t,
}

/// Waste of a set of buckets for given traffic. Numbers beyond 64 bits are UINT64_MAX, also below.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_waste_t {
    /// Set to sizeof(vmmgraph_waste_t) before the call.
    pub struct_size: usize,
    /// Weight of the padding in graphs.
    pub padding: u64,
    /// Steps run by graphs.
    pub graph_steps: u64,
    /// Steps not covered by a bucket.
    pub eager_steps: u64,
}

impl vmmgraph_waste_t {
    fn of(waste: &Waste) -> Self {
        let [padding, graph_steps, eager_steps] =
            [waste.padding, waste.graph_steps, waste.eager_steps].map(narrow);
        Self { struct_size: size_of::<Self>(), padding, graph_steps, eager_steps }
    }
}

/// A bucket of a plan and its savings. Never grows, so without struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_planned_bucket_t {
    /// The bucket.
    pub key: vmmgraph_key_t,
    /// Always 0.
    pub reserved: u32,
    /// Steps run by the bucket.
    pub steps: u64,
    /// Weight of the padding in those steps.
    pub padding: u64,
    /// Additional cost of those steps without the bucket, in the unit of padding.
    pub saves: u64,
}

/// The number of graphs is not limited.
pub const VMMGRAPH_LIMITED_BY_NOTHING: i32 = 0;
/// most_graphs limits the number of graphs.
pub const VMMGRAPH_LIMITED_BY_GRAPHS: i32 = 1;
/// streams limits the number of graphs.
pub const VMMGRAPH_LIMITED_BY_STREAMS: i32 = 2;
/// most_graph_bytes limits the number of graphs.
pub const VMMGRAPH_LIMITED_BY_GRAPH_BYTES: i32 = 3;

/// Result of a plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_plan_result_t {
    /// Set to sizeof(vmmgraph_plan_result_t) before the call.
    pub struct_size: usize,
    /// Input: destination of the cost curve, or null. Entry k, from 0, is the cost of the best
    /// choice of at most k graphs, in the unit of padding.
    pub curve: *mut u64,
    /// Input: capacity of `curve` in numbers.
    pub curve_capacity: usize,
    /// Numbers in the curve: the useful graphs plus one.
    pub curve_count: usize,
    /// Number of chosen buckets.
    pub buckets: usize,
    /// Maximum number of graphs in the budget; UINT32_MAX: no limit.
    pub most_graphs: u32,
    /// Limiting part of the budget, one of VMMGRAPH_LIMITED_BY_*.
    pub limited_by: i32,
    /// Weight of the heaviest bucket which fits the pool; UINT64_MAX: no limit; 0: no bucket fits.
    pub heaviest: u64,
    /// Waste of the buckets for the planned traffic.
    pub waste: vmmgraph_waste_t,
}

fn narrow(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// Reads an array of keys.
///
/// # Safety
/// As [`items`].
pub(super) unsafe fn keys(keys: *const vmmgraph_key_t, count: usize) -> Result<Vec<Key>, Failure> {
    // SAFETY: the caller's contract.
    Ok(unsafe { items(keys, count, "keys") }?.iter().map(|key| (*key).into()).collect())
}

/// Reads one key.
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

/// Writes the sizes of a VMMGRAPH_SIZES list up to `max` (at most 2^20), ascending: at most
/// `capacity` sizes. `count` receives their total.
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

/// Bound on `max`, and so on the length of a list.
const MOST_TOKENS: u32 = 1 << 20;

/// Writes the maximum number of ACL graphs in the streams of an Ascend device, by the formula of
/// vLLM-Ascend's `update_aclgraph_sizes`; 0 if none fits.
///
/// # Safety
/// `streams` is null (the default: no layers, no groups) or points to a struct with struct_size
/// set; `graphs` is null or writable.
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

/// Reads the stream parameters; none for null.
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

/// Reads the traffic from two arrays.
///
/// # Safety
/// Both point to `count` items, or `count` is 0.
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

/// Chooses the buckets with the least padding for the given steps, within the limits. `steps[i]` is
/// the number of steps of `shapes[i]`. The choice is optimal along one axis, and a good
/// approximation along several. Writes at most `capacity` buckets with their savings, ascending; a
/// plan never has more buckets than shapes. `result` may be null. VMMGRAPH_ERROR_INVALID_ARGUMENT
/// for too large a plan: shapes times graphs of one variant beyond 2^24; shapes of one variant
/// beyond 2^14 if several axes differ; too many variants times graphs.
///
/// # Safety
/// `shapes` and `steps` point to `shape_count` items, or the count is 0. `options` is null or
/// points to a struct with struct_size set, as does its `streams`. `buckets` points to `capacity`
/// writable buckets, or the capacity is 0. `result` is null or points to a struct with struct_size,
/// curve and curve_capacity set.
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
        let result = unsafe { OutStruct::optional(result, "result") }?;
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

/// Computes the waste of a set of buckets for given traffic, to compare an engine's list with a
/// plan. `weights` is null or has one weight per axis. Null or all 0: a token costs 1, other axes
/// nothing.
///
/// # Safety
/// `buckets` points to `bucket_count` keys, `shapes` and `steps` to `shape_count` items, or the
/// counts are
/// 0. `weights` is null or points to four numbers. `waste` is null or points to a struct with
///    struct_size set.
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
