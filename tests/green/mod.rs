//! Green contexts of the first device, for tests on a GPU and on the stand-in.

use std::ptr;

use cudarc::driver::sys;

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// A context over some of the device's multiprocessors.
pub(crate) struct GreenContext {
    green: sys::CUgreenCtx,
    context: sys::CUcontext,
}

impl GreenContext {
    /// So many of them, which share no multiprocessor. The device's primary context is there.
    pub(crate) fn several(count: usize) -> Vec<Self> {
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: plain data, for which all zeros are allowed; the out pointers are good, and there is room for so many parts.
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
        // SAFETY: a part that the driver made; the out pointers are good.
        unsafe {
            ok(sys::cuDevResourceGenerateDesc(&raw mut desc, part, 1));
            ok(sys::cuGreenCtxCreate(&raw mut green, desc, 0, flags));
            ok(sys::cuCtxFromGreenCtx(&raw mut context, green));
        }
        Self { green, context }
    }

    /// Does something with it current.
    pub(crate) fn current<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Pop;
        impl Drop for Pop {
            fn drop(&mut self) {
                let mut popped = ptr::null_mut();
                // SAFETY: pops what was pushed below.
                unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
            }
        }
        // SAFETY: the context is there as long as this.
        ok(unsafe { sys::cuCtxPushCurrent_v2(self.context) });
        let _pop = Pop;
        work()
    }

    /// A stream of it, which is not destroyed.
    pub(crate) fn stream(&self) -> sys::CUstream {
        let mut stream = ptr::null_mut();
        // SAFETY: as above.
        ok(unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, self.green, NON_BLOCKING, 0) });
        stream
    }
}

impl Drop for GreenContext {
    fn drop(&mut self) {
        // SAFETY: made by `of`, and current nowhere.
        unsafe { sys::cuGreenCtxDestroy(self.green) };
    }
}
