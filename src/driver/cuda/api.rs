//! Functions of libcuda.so, all looked up at once. cudarc's wrappers panic on a missing symbol, and
//! a newer result code is undefined behaviour in their enum.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result};

/// 0 is success.
pub(super) type Code = c_int;

macro_rules! driver_functions {
    ($(#[$doc:meta])* $api:ident { $($name:ident($($arg:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the driver's own names")]
        #[derive(Debug)]
        pub(super) struct $api { $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> Code,)* }

        impl $api {
            pub(super) fn get() -> Result<&'static Self> {
                static API: OnceLock<Result<$api>> = OnceLock::new();
                API.get_or_init(Self::load).as_ref().map_err(Clone::clone)
            }

            fn load() -> Result<Self> {
                // SAFETY: only tries to load the library.
                if !unsafe { sys::is_culib_present() } {
                    return Err(Error::DriverMissing { driver: "cuda", tried: "libcuda.so.1".to_owned() });
                }
                // SAFETY: the library can be loaded.
                let library = unsafe { sys::culib() };
                Ok(Self { $($name: {
                    let symbol = concat!(stringify!($name), "\0");
                    // SAFETY: the signature is checked against cuda.h 13.0; never unloaded.
                    *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>(symbol.as_bytes()) }
                        .map_err(|_| Error::SymbolMissing { driver: "cuda", name: stringify!($name) })?
                },)* })
            }
        }
    };
}

driver_functions! {
    /// By exported (versioned) name.
    Api {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuGetErrorName(Code, *mut *const c_char);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut sys::CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
        cuDeviceGetAttribute(*mut c_int, c_int, sys::CUdevice);
        cuDeviceTotalMem_v2(*mut usize, sys::CUdevice);
        cuDeviceCanAccessPeer(*mut c_int, sys::CUdevice, sys::CUdevice);
        cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
        cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
        cuCtxGetCurrent(*mut sys::CUcontext);
        cuCtxGetDevice(*mut sys::CUdevice);
        cuCtxPushCurrent_v2(sys::CUcontext);
        cuCtxPopCurrent_v2(*mut sys::CUcontext);
        cuThreadExchangeStreamCaptureMode(*mut c_int);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemGetAllocationGranularity(*mut usize, *const AllocationProp, c_int);
        cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, c_ulonglong);
        cuMemAddressFree(sys::CUdeviceptr, usize);
        cuMemCreate(*mut c_ulonglong, usize, *const AllocationProp, c_ulonglong);
        cuMemRelease(c_ulonglong);
        cuMemMap(sys::CUdeviceptr, usize, usize, c_ulonglong, c_ulonglong);
        cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
        cuMemUnmap(sys::CUdeviceptr, usize);
        cuEventCreate(*mut sys::CUevent, c_uint);
        cuEventDestroy_v2(sys::CUevent);
        cuEventRecord(sys::CUevent, sys::CUstream);
        cuEventQuery(sys::CUevent);
        cuEventSynchronize(sys::CUevent);
        cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
        cuStreamIsCapturing(sys::CUstream, *mut c_int);
        cuStreamSynchronize(sys::CUstream);
        cuMemsetD32Async(sys::CUdeviceptr, c_uint, usize, sys::CUstream);
        cuMemcpyDtoH_v2(*mut c_void, sys::CUdeviceptr, usize);
        cuMemcpyHtoD_v2(sys::CUdeviceptr, *const c_void, usize);
        cuStreamCreate(*mut sys::CUstream, c_uint);
        cuStreamDestroy_v2(sys::CUstream);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream);
        cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
    }
}

driver_functions! {
    /// Drivers before CUDA 12.3 lack some.
    GraphApi {
        cuGraphGetNodes(sys::CUgraph, *mut sys::CUgraphNode, *mut usize);
        cuGraphNodeGetType(sys::CUgraphNode, *mut c_int);
        cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong);
        cuGraphExecDestroy(sys::CUgraphExec);
        cuStreamGetCaptureInfo_v3(sys::CUstream, *mut c_int, *mut u64, *mut sys::CUgraph, *mut *const sys::CUgraphNode, *mut *const EdgeData, *mut usize);
        cuStreamUpdateCaptureDependencies_v2(sys::CUstream, *mut sys::CUgraphNode, *const EdgeData, usize, c_uint);
        cuGraphExecMemcpyNodeSetParams(sys::CUgraphExec, sys::CUgraphNode, *const sys::CUDA_MEMCPY3D, sys::CUcontext);
        cuGraphNodeSetEnabled(sys::CUgraphExec, sys::CUgraphNode, c_uint);
    }
}

driver_functions! {
    ShareApi {
        cuMemExportToShareableHandle(*mut c_void, c_ulonglong, c_int, c_ulonglong);
        cuMemImportFromShareableHandle(*mut c_ulonglong, *mut c_void, c_int);
    }
}

/// `CUmemAllocationProp`, with handle types as an integer, as the enum lacks two flags.
#[repr(C)]
#[derive(Debug)]
pub(super) struct AllocationProp {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: sys::CUmemLocation,
    pub(super) win32_handle_meta_data: *mut c_void,
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

const _: () = assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());

/// `CUgraphEdgeData`.
pub(super) type EdgeData = [u8; 8];
