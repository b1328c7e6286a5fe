//! Green contexts: contexts with own streams over a part of a device's multiprocessors. The
//! partition itself is not modelled.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use standin::capture::table;
use standin::state::device;
use standin::{Answer, Why, give};

use crate::answer;
use crate::code::Code;
use crate::state::{Context, context_of, context_with, greens};

/// `CU_DEV_RESOURCE_TYPE_SM`
const MULTIPROCESSORS: c_int = 1;
/// `CU_GREEN_CTX_DEFAULT_STREAM`
const DEFAULT_STREAM: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: c_uint = 1;

/// `CUdevResource`, with its length in CUDA 12.4 to 13.0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Resource {
    kind: c_int,
    rest: [c_int; 35],
}

/// Returns the device's multiprocessors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDevResource(dev: c_int, resource: *mut Resource, kind: c_int) -> Code {
    answer(|| {
        device(dev)?;
        if kind != MULTIPROCESSORS {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(resource, Resource { kind, rest: [0; 35] }) }
    })
}

/// Returns the requested number of parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevSmResourceSplitByCount(
    parts: *mut Resource,
    count: *mut c_uint,
    input: *const Resource,
    _remaining: *mut Resource,
    _flags: c_uint,
    _least: c_uint,
) -> Code {
    answer(|| {
        if count.is_null() || input.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null and valid by the caller's contract, with room for `count` parts.
        unsafe { (0..*count as usize).try_for_each(|part| give(parts.add(part), *input)) }
    })
}

/// Creates the description of a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevResourceGenerateDesc(
    out: *mut *mut c_void,
    resources: *const Resource,
    count: c_uint,
) -> Code {
    answer(|| {
        if resources.is_null() || count == 0 {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(out, ptr::without_provenance_mut(1)) }
    })
}

/// Creates a green context of a device with a live primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGreenCtxCreate(
    out: *mut *mut c_void,
    desc: *mut c_void,
    dev: c_int,
    flags: c_uint,
) -> Code {
    answer(|| {
        let (device, _) = device(dev)?;
        if desc.is_null() || flags != DEFAULT_STREAM {
            return Err(Why::Invalid);
        }
        let stream = table().add_stream(device, false);
        let mut greens = greens().lock();
        greens.push(Some((device, stream)));
        // SAFETY: the caller's contract.
        unsafe { give(out, context_of(Context { device, green: greens.len() })) }
    })
}

/// Destroys a green context and its default stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuGreenCtxDestroy(green: *mut c_void) -> Code {
    answer(|| {
        let (context, (_, stream)) = (context_with(green)?, green_of(green)?);
        greens().lock()[context.green - 1] = None;
        table().remove_stream(stream)
    })
}

/// Returns the context of a green context; both have the same handle here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxFromGreenCtx(out: *mut *mut c_void, green: *mut c_void) -> Code {
    answer(|| {
        green_of(green)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, green) }
    })
}

/// Creates a stream of a green context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGreenCtxStreamCreate(
    out: *mut *mut c_void,
    green: *mut c_void,
    flags: c_uint,
    _priority: c_int,
) -> Code {
    answer(|| {
        let (device, _) = green_of(green)?;
        if flags != NON_BLOCKING {
            return Err(Why::Invalid);
        }
        let stream = table().add_stream(device, false);
        // SAFETY: the caller's contract.
        unsafe { give(out, stream as *mut c_void) }
    })
}

fn green_of(handle: *mut c_void) -> Answer<(usize, u64)> {
    context_with(handle)?.green_of().ok_or(Why::NoContext)
}
