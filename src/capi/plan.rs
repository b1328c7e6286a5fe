//! Shapes and the choice of buckets.

use super::guard::{Failure, copy_items, guard, items, options, out, pick};
use super::status::vmmgraph_status_t;
use crate::dispatch::{Budget, Costs, Histogram, Key, Weights, plan, vllm_sizes, xllm_sizes};
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
        let rule = pick("the list", list, &[xllm_sizes, vllm_sizes])?;
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

/// Chooses the buckets that pad least for steps of these shapes, so many of each, within the limits: exactly along one axis, soundly along
/// several. Writes at most `capacity` of them, ascending, and how many there are.
///
/// # Safety
/// `shapes` and `steps` point to `shape_count` items, or that is 0; `options` points to a struct whose struct_size is set; `buckets`
/// points to `capacity` writable keys, or that is 0; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_plan(
    shapes: *const vmmgraph_key_t,
    steps: *const u64,
    shape_count: usize,
    options: *const vmmgraph_plan_options_t,
    buckets: *mut vmmgraph_key_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let given = unsafe { self::options(options) }?;
        // SAFETY: the caller's contract.
        let (shapes, steps) =
            (unsafe { keys(shapes, shape_count) }?, unsafe { items(steps, shape_count, "steps") }?);
        // SAFETY: the caller's contract.
        let count = unsafe { out(count, "count") }?;
        let (mut budget, mut costs, mut weights) = (Budget::default(), Costs::default(), Weights::default());
        if let Some(given) = given {
            weights = weights_of(given.weights)?;
            budget.graphs = (given.most_graphs > 0).then_some(given.most_graphs);
            budget.graph_bytes = (given.most_graph_bytes > 0).then_some(given.most_graph_bytes);
            budget.pool_bytes = (given.most_pool_bytes > 0).then_some(given.most_pool_bytes);
            costs.graph_bytes = given.graph_bytes;
            costs.pool_base_bytes = given.pool_base_bytes;
            costs.pool_unit_bytes = given.pool_unit_bytes;
            if given.eager_step > 0 {
                costs.eager_step = given.eager_step;
            }
        }
        let mut traffic = Histogram::default();
        for (shape, steps) in shapes.into_iter().zip(steps) {
            traffic.record(shape, *steps);
        }
        let found: Vec<vmmgraph_key_t> =
            plan(&traffic, weights, &budget, &costs)?.buckets.iter().map(Into::into).collect();
        // SAFETY: the caller's contract.
        unsafe { copy_items(&found, buckets, capacity) }?;
        *count = found.len();
        Ok(())
    })
}
