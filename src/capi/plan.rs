use super::guard::{Failure, copy_items, guard, items, out, pick};
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use crate::dispatch::{
    AclGraphStreams, BucketSet, Budget, Costs, Histogram, Key, PlannedBucket, Waste, Weights, evaluate, plan,
    vllm_sizes, xllm_sizes,
};
use crate::error::Error;

/// Shape of a step, or of a graph (a bucket).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_key_t {
    /// Properties other than size which change the graph, compared for equality.
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

/// xLLM's: 1, 2, 4, 8, then multiples of 16 up to the first size of at least `max`.
pub const VMMGRAPH_SIZES_XLLM: i32 = 0;
/// vLLM's default: 1, 2, 4, multiples of 8 below 256, then multiples of 16 up to `max`.
pub const VMMGRAPH_SIZES_VLLM: i32 = 1;

/// Parameters of an Ascend deployment for vLLM-Ascend's limit of ACL graphs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_acl_graph_streams_t {
    pub struct_size: usize,
    /// Streams available to captures; 0: 1800, a device's 2048 less a reserve.
    pub streams: u32,
    /// Hidden layers of the model.
    pub layers: u32,
    /// 0: no draft model.
    pub draft_layers: u32,
    /// Each of data_parallel and tensor_parallel above 1 adds a communication group.
    pub data_parallel: u32,
    pub tensor_parallel: u32,
    /// 1 if HCCL_OP_EXPANSION_MODE is AIV.
    pub aiv: i32,
    /// AIV: further concurrent streams: 1 each for expert parallelism, an overlapped shared expert,
    /// data parallelism of a mixture of experts.
    pub extra: u32,
    /// AIV: 1 reserves the streams of one graph, as later versions do for dense models.
    pub reserve_one: i32,
    /// Without AIV: how many of the prefill and decode context-parallel sizes exceed 1.
    pub context_groups: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// Limits and costs of graphs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_plan_options_t {
    pub struct_size: usize,
    /// Cost of one unit along each axis. All 0: a token costs 1.
    pub weights: [u16; 4],
    /// 0: no limit.
    pub most_graphs: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Bytes private to graphs.
    pub most_graph_bytes: u64,
    /// Bytes added by each graph (executable graph, live-out blocks).
    pub graph_bytes: u64,
    /// Bytes of shared pages.
    pub most_pool_bytes: u64,
    /// Bytes of shared pages of the smallest graph.
    pub pool_base_bytes: u64,
    /// Bytes of shared pages per unit of bucket weight.
    pub pool_unit_bytes: u64,
    /// In the unit of padding; 0: more than any padding.
    pub eager_step: u64,
    /// Null: no limit by streams of an Ascend device.
    pub streams: *const vmmgraph_acl_graph_streams_t,
}

/// Waste of a set of buckets. Numbers beyond 64 bits are UINT64_MAX, also below.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_waste_t {
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

/// A bucket of a plan and its savings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_planned_bucket_t {
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

pub const VMMGRAPH_LIMITED_BY_NOTHING: i32 = 0;
pub const VMMGRAPH_LIMITED_BY_GRAPHS: i32 = 1;
pub const VMMGRAPH_LIMITED_BY_STREAMS: i32 = 2;
pub const VMMGRAPH_LIMITED_BY_GRAPH_BYTES: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_plan_result_t {
    pub struct_size: usize,
    /// Input: destination of the cost curve, or null. Entry k is the cost of the best choice of at
    /// most k graphs, in the unit of padding.
    pub curve: *mut u64,
    /// Input: numbers in `curve`.
    pub curve_capacity: usize,
    /// The useful graphs plus one.
    pub curve_count: usize,
    pub buckets: usize,
    /// UINT32_MAX: no limit.
    pub most_graphs: u32,
    /// One of VMMGRAPH_LIMITED_BY_*.
    pub limited_by: i32,
    /// Heaviest bucket which fits the pool; UINT64_MAX: no limit; 0: none fits.
    pub heaviest: u64,
    /// For the planned traffic.
    pub waste: vmmgraph_waste_t,
}

fn narrow(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

pub(super) unsafe fn keys(keys: *const vmmgraph_key_t, count: usize) -> Result<Vec<Key>, Failure> {
    // SAFETY: contract.
    Ok(unsafe { items(keys, count, "keys") }?.iter().map(|key| (*key).into()).collect())
}

pub(super) unsafe fn key_of(key: *const vmmgraph_key_t) -> Result<Key, Failure> {
    // SAFETY: contract.
    Ok(unsafe { items(key, 1, "key") }?.first().copied().unwrap_or_default().into())
}

pub(super) fn weights_of(weights: [u16; 4]) -> Result<Weights, Failure> {
    if weights == [0; 4] { Ok(Weights::default()) } else { Ok(Weights::new(weights)?) }
}

/// Writes the sizes of a VMMGRAPH_SIZES list up to `max` (at most 2^20), ascending.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_sizes(
    list: i32,
    max: u32,
    sizes: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let count = unsafe { out(count, "count") }?;
        let rule = pick::<fn(u32) -> Vec<u32>>("the list", list, &[xllm_sizes, vllm_sizes])?;
        if max > MOST_TOKENS {
            let expected = "at most 2^20";
            return Err(Error::InvalidArgument { what: "the size", value: max.into(), expected }.into());
        }
        let found = rule(max);
        // SAFETY: contract.
        unsafe { copy_items(&found, sizes, capacity) }?;
        *count = found.len();
        Ok(())
    })
}

const MOST_TOKENS: u32 = 1 << 20;

/// Writes the maximum number of ACL graphs in the streams of an Ascend device, by the formula of
/// vLLM-Ascend's `update_aclgraph_sizes`; 0 if none fits. Null `streams`: no layers, no groups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_acl_graph_limit(
    streams: *const vmmgraph_acl_graph_streams_t,
    graphs: *mut u32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let (streams, graphs) = (unsafe { streams_of(streams) }?, unsafe { out(graphs, "graphs") }?);
        *graphs = streams.unwrap_or_else(|| AclGraphStreams::new(0, 1, 1, false)).max_graphs();
        Ok(())
    })
}

/// None for null.
unsafe fn streams_of(
    streams: *const vmmgraph_acl_graph_streams_t,
) -> Result<Option<AclGraphStreams>, Failure> {
    // SAFETY: contract.
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

unsafe fn traffic_of(
    shapes: *const vmmgraph_key_t,
    steps: *const u64,
    count: usize,
) -> Result<Histogram, Failure> {
    // SAFETY: contract.
    let (shapes, steps) = (unsafe { keys(shapes, count) }?, unsafe { items(steps, count, "steps") }?);
    let mut traffic = Histogram::default();
    for (shape, steps) in shapes.into_iter().zip(steps) {
        traffic.record(shape, *steps);
    }
    Ok(traffic)
}

/// Chooses the buckets with the least padding for the given steps (`steps[i]` of `shapes[i]`),
/// within the limits: optimal along one axis, a good approximation along several. Writes the
/// buckets with their savings, ascending, never more than shapes. `result` may be null.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT if too large: shapes times graphs of one variant beyond 2^24;
/// shapes of one variant beyond 2^14 if several axes differ; too many variants times graphs.
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
        // SAFETY: contract.
        let given = unsafe { self::options(options) }?;
        // SAFETY: contract.
        let traffic = unsafe { traffic_of(shapes, steps, shape_count) }?;
        // SAFETY: contract.
        let result = unsafe { OutStruct::optional(result, "result") }?;
        let (mut budget, mut costs, mut weights) = (Budget::default(), Costs::default(), Weights::default());
        if let Some(given) = given {
            weights = weights_of(given.weights)?;
            budget.graphs = (given.most_graphs > 0).then_some(given.most_graphs);
            budget.graph_bytes = (given.most_graph_bytes > 0).then_some(given.most_graph_bytes);
            budget.pool_bytes = (given.most_pool_bytes > 0).then_some(given.most_pool_bytes);
            // SAFETY: contract.
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
        // SAFETY: contract.
        unsafe { copy_items(&found, buckets, capacity) }?;
        let Some(result) = result else { return Ok(()) };
        let asked = result.read();
        let curve: Vec<u64> = plan.curve.iter().copied().map(narrow).collect();
        // SAFETY: contract.
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

/// Computes the waste of buckets for given traffic, to compare an engine's list with a plan.
/// `weights` has one weight per axis. Null or all 0: a token costs 1, other axes nothing.
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
            // SAFETY: contract.
            given.copy_from_slice(unsafe { items(weights, 4, "weights") }?);
        }
        // SAFETY: contract.
        let buckets = BucketSet::new(unsafe { keys(buckets, bucket_count) }?, weights_of(given)?)?;
        // SAFETY: contract.
        let traffic = unsafe { traffic_of(shapes, steps, shape_count) }?;
        // SAFETY: contract.
        let waste = unsafe { OutStruct::new(waste, "waste") }?;
        waste.write(vmmgraph_waste_t::of(&evaluate(&buckets, &traffic)));
        Ok(())
    })
}
