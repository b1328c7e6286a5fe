use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use super::guard::{Failure, guard, items, items_mut, null, out, pick};
use super::handle::{get, register, remove};
use super::plan::{key_of, keys, vmmgraph_key_t};
use super::sized::{OutStruct, sized_items};
use super::status::vmmgraph_status_t;
use crate::dispatch::{
    Axis, BucketLayout, BucketSet, Dtype, Extent, Input, InputPlan, Key, PadRule, Role, StepInput, Weights,
};
use crate::error::Error;

pub struct vmmgraph_input_plan {
    _private: (),
}

/// Input plan: layout of a graph's inputs and outputs in one device arena, packed separately for
/// each bucket. Owns no memory.
pub type vmmgraph_input_plan_t = *mut vmmgraph_input_plan;

/// Written by the host before every step; one copy transfers all host inputs.
pub const VMMGRAPH_ROLE_HOST_INPUT: i32 = 0;
/// Written by the device before the graph runs.
pub const VMMGRAPH_ROLE_DEVICE_INPUT: i32 = 1;
/// Written by the graph.
pub const VMMGRAPH_ROLE_OUTPUT: i32 = 2;

pub const VMMGRAPH_PAD_ZERO: i32 = 0;
/// Missing elements repeat the nearest element of the step, in every dimension.
pub const VMMGRAPH_PAD_REPEAT_LAST: i32 = 1;
/// Missing elements are pad_bits.
pub const VMMGRAPH_PAD_VALUE: i32 = 2;

/// The length is `times`.
pub const VMMGRAPH_EXTENT_FIXED: i32 = 0;
/// The bucket's size along `axis`, multiplied by `times`, plus `plus`.
pub const VMMGRAPH_EXTENT_ALONG: i32 = 1;
/// Set by each step, at most `times`; first dimension only. The rest is neither padded nor copied.
pub const VMMGRAPH_EXTENT_UP_TO: i32 = 2;

pub const VMMGRAPH_DTYPE_BOOL: i32 = 0;
pub const VMMGRAPH_DTYPE_U8: i32 = 1;
pub const VMMGRAPH_DTYPE_I8: i32 = 2;
pub const VMMGRAPH_DTYPE_I16: i32 = 3;
pub const VMMGRAPH_DTYPE_I32: i32 = 4;
pub const VMMGRAPH_DTYPE_I64: i32 = 5;
pub const VMMGRAPH_DTYPE_F16: i32 = 6;
pub const VMMGRAPH_DTYPE_BF16: i32 = 7;
pub const VMMGRAPH_DTYPE_F32: i32 = 8;
pub const VMMGRAPH_DTYPE_F64: i32 = 9;
/// Any float of 8 bits.
pub const VMMGRAPH_DTYPE_F8: i32 = 10;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_extent_t {
    /// VMMGRAPH_EXTENT_FIXED, _ALONG or _UP_TO.
    pub kind: i32,
    /// Index of a key's extent; _ALONG only.
    pub axis: i32,
    /// Length, limit or factor.
    pub times: u32,
    /// Summand; _ALONG only.
    pub plus: u32,
}

/// Declaration of an input or output.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_input_t {
    pub struct_size: usize,
    /// Unique in the plan.
    pub name: *const c_char,
    /// One of VMMGRAPH_DTYPE_*.
    pub dtype: i32,
    /// One of VMMGRAPH_ROLE_*.
    pub role: i32,
    /// One of VMMGRAPH_PAD_*.
    pub pad: i32,
    /// Number of dimensions, 1 to 4.
    pub rank: i32,
    /// Fill element for VMMGRAPH_PAD_VALUE, little-endian.
    pub pad_bits: u64,
    /// Outermost first.
    pub shape: [vmmgraph_extent_t; 4],
}

/// Memory requirements of an input plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_input_plan_info_t {
    pub struct_size: usize,
    /// Bytes of the device arena, whose base must have the plan's alignment.
    pub arena_bytes: u64,
    /// Host staging memory for every bucket.
    pub staging_bytes: u64,
    /// Equal for all buckets.
    pub outputs_offset: u64,
}

/// Location of an input or output in one bucket.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_input_view_t {
    pub struct_size: usize,
    /// Offset from the start of the arena; for a host input, also from the start of staging memory.
    pub offset: u64,
    pub bytes: u64,
    /// Outermost dimension first; unused entries are 0.
    pub shape: [u32; 4],
    pub rank: i32,
    /// Always 0.
    pub reserved: i32,
}

/// Data of one host input for one step.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_step_input_t {
    pub struct_size: usize,
    /// Index of the input in the declaration.
    pub input: usize,
    /// Elements, contiguous.
    pub data: *const c_void,
    pub bytes: usize,
    /// Outermost dimension first. With a 0, the whole input is padding.
    pub shape: [u32; 4],
    pub rank: i32,
    /// One of VMMGRAPH_DTYPE_*.
    pub dtype: i32,
}

pub(super) struct PlannedInputs {
    plan: InputPlan,
    buckets: BucketSet,
}

impl PlannedInputs {
    fn layout(&self, key: &Key) -> Result<&BucketLayout, Failure> {
        let found = self.buckets.find(key).and_then(|number| self.plan.layout(number));
        let (value, expected) = (i128::from(key.extents[0]), "the tokens of a bucket that was planned for");
        found.ok_or_else(|| Error::InvalidArgument { what: "the bucket", value, expected }.into())
    }
}

fn extent_of(given: &vmmgraph_extent_t) -> Result<Extent, Failure> {
    let vmmgraph_extent_t { kind, axis, times, plus } = *given;
    let axis = pick("an axis", axis, &Axis::ALL)?;
    pick(
        "an extent's kind",
        kind,
        &[Extent::Fixed(times), Extent::Along { axis, times, plus }, Extent::UpTo(times)],
    )
}

unsafe fn input_of(given: &vmmgraph_input_t) -> Result<Input, Failure> {
    if given.name.is_null() {
        return Err(null("name"));
    }
    // SAFETY: not null, so zero-terminated.
    let name = unsafe { CStr::from_ptr(given.name) }.to_string_lossy().into_owned();
    let shape = given.shape.get(..given.rank.max(0) as usize).ok_or(Error::InvalidArgument {
        what: "the number of dimensions",
        value: given.rank.into(),
        expected: "1 to 4",
    })?;
    Ok(Input {
        name,
        dtype: pick("the dtype", given.dtype, &Dtype::ALL)?,
        shape: shape.iter().map(extent_of).collect::<Result<_, _>>()?,
        role: pick("the role", given.role, &Role::ALL)?,
        pad: pick(
            "the pad rule",
            given.pad,
            &[PadRule::Zero, PadRule::RepeatLast, PadRule::Value(given.pad_bits)],
        )?,
    })
}

/// Creates a layout for every bucket. Inputs and outputs start at multiples of `alignment` bytes: a
/// power of two from 256 to 2 MiB; 0: 512.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_input_plan_create(
    inputs: *const vmmgraph_input_t,
    input_count: usize,
    buckets: *const vmmgraph_key_t,
    bucket_count: usize,
    alignment: u64,
    plan: *mut vmmgraph_input_plan_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let (given, plan) =
            (unsafe { sized_items(inputs, input_count, "inputs") }?, unsafe { out(plan, "plan") }?);
        let mut inputs = Vec::with_capacity(given.len());
        for input in given.iter() {
            // SAFETY: contract.
            inputs.push(unsafe { input_of(input) }?);
        }
        // SAFETY: contract.
        let buckets = BucketSet::new(unsafe { keys(buckets, bucket_count) }?, Weights::default())?;
        let alignment = if alignment == 0 { 512 } else { alignment };
        let planned = InputPlan::new(inputs, &buckets, alignment)?;
        *plan = register(Arc::new(PlannedInputs { plan: planned, buckets }));
        Ok(())
    })
}

/// Destroys an input plan.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_input_plan_destroy(plan: vmmgraph_input_plan_t) -> vmmgraph_status_t {
    guard(|| remove::<PlannedInputs, _>(plan).map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_input_plan_info(
    plan: vmmgraph_input_plan_t,
    info: *mut vmmgraph_input_plan_info_t,
) -> vmmgraph_status_t {
    guard(|| {
        let planned = get::<PlannedInputs, _>(plan)?;
        // SAFETY: contract.
        let info = unsafe { OutStruct::new(info, "info") }?;
        info.write(vmmgraph_input_plan_info_t {
            struct_size: info.struct_size,
            arena_bytes: planned.plan.arena_bytes(),
            staging_bytes: planned.plan.staging_bytes(),
            outputs_offset: planned.plan.region(Role::Output).0,
        });
        Ok(())
    })
}

/// Writes the location of input or output number `input` in a bucket.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT if either is unknown.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_input_plan_view(
    plan: vmmgraph_input_plan_t,
    bucket: *const vmmgraph_key_t,
    input: usize,
    view: *mut vmmgraph_input_view_t,
) -> vmmgraph_status_t {
    guard(|| {
        let planned = get::<PlannedInputs, _>(plan)?;
        // SAFETY: contract.
        let (bucket, view) = (unsafe { key_of(bucket) }?, unsafe { OutStruct::new(view, "view") }?);
        let expected = "below the number of inputs";
        let refused = Error::InvalidArgument { what: "an input's number", value: input as i128, expected };
        let found = planned.layout(&bucket)?.views().get(input).ok_or(refused)?;
        let (mut shape, rank) = ([0; 4], found.shape().len() as i32);
        shape[..found.shape().len()].copy_from_slice(found.shape());
        view.write(vmmgraph_input_view_t {
            struct_size: view.struct_size,
            offset: found.offset,
            bytes: found.bytes,
            shape,
            rank,
            reserved: 0,
        });
        Ok(())
    })
}

#[inline]
unsafe fn step_input_of(given: &vmmgraph_step_input_t) -> Result<StepInput<'_>, Failure> {
    let Some(shape) = given.shape.get(..given.rank.max(0) as usize) else {
        let (what, value) = ("the number of dimensions", given.rank.into());
        return Err(Error::InvalidArgument { what, value, expected: "1 to 4" }.into());
    };
    let dtype = pick("the dtype", given.dtype, &Dtype::ALL)?;
    // SAFETY: contract.
    let data = unsafe { items(given.data.cast::<u8>(), given.bytes, "data") }?;
    Ok(StepInput { input: given.input, dtype, shape, data })
}

/// Writes the host inputs of a step into staging memory, padded to the bucket. One copy of `end`
/// bytes from the start of staging memory to the start of the arena transfers the step. List inputs
/// in the order of declaration, each at most once. Memory of unlisted inputs is unchanged. A failed
/// call writes nothing.
///
/// # Safety
/// `staging` overlaps no data.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_input_plan_pack(
    plan: vmmgraph_input_plan_t,
    bucket: *const vmmgraph_key_t,
    inputs: *const vmmgraph_step_input_t,
    input_count: usize,
    staging: *mut c_void,
    staging_bytes: usize,
    end: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let planned = get::<PlannedInputs, _>(plan)?;
        // SAFETY: contract.
        let (bucket, end) = (unsafe { key_of(bucket) }?, unsafe { out(end, "end") }?);
        // SAFETY: contract.
        let given = unsafe { sized_items(inputs, input_count, "inputs") }?;
        // SAFETY: contract.
        let staging = unsafe { items_mut(staging.cast::<u8>(), staging_bytes, "staging") }?;
        // SAFETY: contract.
        let step = given.iter().map(|input| unsafe { step_input_of(input) });
        *end = planned.plan.pack_each(planned.layout(&bucket)?, step, staging)?;
        Ok(())
    })
}
