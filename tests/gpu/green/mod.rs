//! Green contexts of the first device, on a GPU and on the stand-in.

use std::ptr;

use cudarc::driver::sys;

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

pub(crate) struct GreenContext {
    green: sys::CUgreenCtx,
    context: sys::CUcontext,
}

impl GreenContext {
    /// Returns `count` contexts over disjoint parts. Requires the device's primary context.
    pub(crate) fn several(count: usize) -> Vec<Self> {
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: plain data, valid as zeros; good out pointers; room for `count` parts.
        unsafe {
            let (mut all, mut rest) = (std::mem::zeroed(), std::mem::zeroed());
            ok(sys::cuDeviceGetDevResource(0, &raw mut all, kind));
            let mut parts = vec![std::mem::zeroed::<sys::CUdevResource>(); count];
            let mut there = count as u32;
            let (parts_at, there_at) = (parts.as_mut_ptr(), &raw mut there);
            ok(sys::cuDevSmResourceSplitByCount(parts_at, there_at, &raw const all, &raw mut rest, 0, 16));
            assert_eq!(there as usize, count);
            parts.iter_mut().map(Self::of).collect()
        }
    }

    fn of(part: &mut sys::CUdevResource) -> Self {
        let (mut desc, mut green, mut context) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: a part from the driver; good out pointers.
        unsafe {
            ok(sys::cuDevResourceGenerateDesc(&raw mut desc, part, 1));
            ok(sys::cuGreenCtxCreate(&raw mut green, desc, 0, flags));
            ok(sys::cuCtxFromGreenCtx(&raw mut context, green));
        }
        Self { green, context }
    }

    pub(crate) fn current<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Pop;
        impl Drop for Pop {
            fn drop(&mut self) {
                let mut popped = ptr::null_mut();
                // SAFETY: pops the context pushed below.
                unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
            }
        }
        // SAFETY: `self` keeps the context alive.
        ok(unsafe { sys::cuCtxPushCurrent_v2(self.context) });
        let _pop = Pop;
        work()
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        let mut stream = ptr::null_mut();
        // SAFETY: as above.
        ok(unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, self.green, NON_BLOCKING, 0) });
        stream
    }
}

impl Drop for GreenContext {
    fn drop(&mut self) {
        // SAFETY: created by `of`, and not current.
        unsafe { sys::cuGreenCtxDestroy(self.green) };
    }
}
