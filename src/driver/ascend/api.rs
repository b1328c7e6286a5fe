//! From CANN's `acl_rt.h`, equal from 8.5.0 to 9.1.0.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::driver::abi::{Abi, c_constants, c_structs, c_types};
use crate::driver::library::{Vendor, c_functions};

/// torch_npu loads the first name; newer documentation names the second.
pub(super) const LIBRARY: Vendor = Vendor {
    driver: super::NAME,
    variable: "VMMGRAPH_ASCEND_LIBRARY",
    names: &["libascendcl.so", "libacl_rt.so"],
    refused: &[],
};

c_types! {
    Code(c_int) = "aclError";
    /// Null: the default stream of the current context.
    AclStream(*mut c_void) = "aclrtStream";
    AclEvent(*mut c_void) = "aclrtEvent";
    Context(*mut c_void) = "aclrtContext";
    Model(*mut c_void) = "aclmdlRI";
    Handle(*mut c_void) = "aclrtDrvMemHandle";
    MemAttr(c_uint) = "aclrtMemAttr";
    Granularity(c_uint) = "aclrtMemGranularityOptions";
    HandleType(c_uint) = "aclrtMemHandleType";
    AllocationType(c_uint) = "aclrtMemAllocationType";
    LocationType(c_uint) = "aclrtMemLocationType";
    CopyKind(c_uint) = "aclrtMemcpyKind";
    EventStatus(c_uint) = "aclrtEventRecordedStatus";
    StreamStatus(c_uint) = "aclrtStreamStatus";
    CaptureStatus(c_uint) = "aclmdlRICaptureStatus";
    CaptureMode(c_uint) = "aclmdlRICaptureMode";
}

c_structs! {
    structs:
    /// Unlike in CUDA, the device number comes first.
    Location = "aclrtMemLocation", 8 {
        id: c_uint = "id" @ 0,
        kind: LocationType = "type" @ 4,
    }
    PhysicalMemProp = "aclrtPhysicalMemProp", 32 {
        /// The runtime refuses all other values (CANN runtime 681ef76).
        handle_type: HandleType = "handleType" @ 0,
        allocation_type: AllocationType = "allocationType" @ 4,
        attribute: MemAttr = "memAttr" @ 8,
        location: Location = "location" @ 12,
        reserve: u64 = "reserve" @ 24,
    }
}

c_constants! {
    numbers:
    /// Of any page size.
    HBM: c_uint = 1, "ACL_HBM_MEM";
    /// In pages of 2 MiB.
    HBM_HUGE: c_uint = 4, "ACL_HBM_MEM_HUGE";
    NO_HANDLE: c_uint = 0, "ACL_MEM_HANDLE_TYPE_NONE";
    PINNED: c_uint = 0, "ACL_MEM_ALLOCATION_TYPE_PINNED";
    DEVICE: c_uint = 1, "ACL_MEM_LOCATION_TYPE_DEVICE";
    MINIMUM: c_uint = 0, "ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM";
    HOST_TO_DEVICE: c_uint = 1, "ACL_MEMCPY_HOST_TO_DEVICE";
    DEVICE_TO_HOST: c_uint = 2, "ACL_MEMCPY_DEVICE_TO_HOST";
    DEVICE_TO_DEVICE: c_uint = 3, "ACL_MEMCPY_DEVICE_TO_DEVICE";
    /// As in CUDA: recorded repeatedly, awaited by the latest record.
    EVENT_SYNC: c_uint = 1, "ACL_EVENT_SYNC";
    EVENT_COMPLETE: c_uint = 1, "ACL_EVENT_RECORDED_STATUS_COMPLETE";
    STREAM_COMPLETE: c_uint = 0, "ACL_STREAM_STATUS_COMPLETE";
    CAPTURE_NONE: c_uint = 0, "ACL_MODEL_RI_CAPTURE_STATUS_NONE";
    CAPTURE_RELAXED: c_uint = 2, "ACL_MODEL_RI_CAPTURE_MODE_RELAXED";
    REGISTER_PINNED: c_uint = 0x1000_0000, "ACL_HOST_REG_PINNED";
}

c_functions! {
    Api of LIBRARY {
        required {
            aclInit(*const c_char) -> Code;
            aclGetRecentErrMsg() -> *const c_char;
            aclrtGetSocName() -> *const c_char;
            aclrtGetDeviceCount(*mut c_uint) -> Code;
            aclrtSetDevice(c_int) -> Code;
            aclrtGetCurrentContext(*mut Context) -> Code;
            aclrtSetCurrentContext(Context) -> Code;
            aclrtGetMemInfo(MemAttr, *mut usize, *mut usize) -> Code;
            aclrtMemGetAllocationGranularity(*mut PhysicalMemProp, Granularity, *mut usize) -> Code;
            aclrtReserveMemAddress(*mut *mut c_void, usize, usize, *mut c_void, u64) -> Code;
            aclrtReleaseMemAddress(*mut c_void) -> Code;
            aclrtMallocPhysical(*mut Handle, usize, *const PhysicalMemProp, u64) -> Code;
            aclrtFreePhysical(Handle) -> Code;
            aclrtMapMem(*mut c_void, usize, usize, Handle, u64) -> Code;
            aclrtUnmapMem(*mut c_void) -> Code;
            aclrtCreateEventExWithFlag(*mut AclEvent, c_uint) -> Code;
            aclrtDestroyEvent(AclEvent) -> Code;
            aclrtRecordEvent(AclEvent, AclStream) -> Code;
            aclrtStreamWaitEvent(AclStream, AclEvent) -> Code;
            aclrtQueryEventStatus(AclEvent, *mut EventStatus) -> Code;
            aclrtSynchronizeEvent(AclEvent) -> Code;
            aclrtCreateStream(*mut AclStream) -> Code;
            aclrtDestroyStream(AclStream) -> Code;
            aclrtStreamQuery(AclStream, *mut StreamStatus) -> Code;
            aclmdlRICaptureGetInfo(AclStream, *mut CaptureStatus, *mut Model) -> Code;
            aclmdlRICaptureThreadExchangeMode(*mut CaptureMode) -> Code;
            aclrtMemcpy(*mut c_void, usize, *const c_void, usize, CopyKind) -> Code;
            aclrtMemcpyAsync(*mut c_void, usize, *const c_void, usize, CopyKind, AclStream) -> Code;
            aclrtMemsetAsync(*mut c_void, usize, c_int, usize, AclStream) -> Code;
        }
        optional {
            aclrtGetVersion(*mut c_int, *mut c_int, *mut c_int) -> Code;
            aclrtMemsetD32Async(*mut c_void, usize, c_uint, usize, AclStream) -> Code;
            aclrtHostRegisterV2(*mut c_void, u64, c_uint) -> Code;
            aclrtHostUnregister(*mut c_void) -> Code;
        }
    }
}

pub(super) fn allocation(ordinal: i32) -> PhysicalMemProp {
    PhysicalMemProp {
        handle_type: HandleType(NO_HANDLE),
        allocation_type: AllocationType(PINNED),
        attribute: MemAttr(HBM_HUGE),
        location: Location { id: ordinal.cast_unsigned(), kind: LocationType(DEVICE) },
        reserve: 0,
    }
}

pub(super) fn abi() -> Abi {
    let mut constants = numbers();
    constants.extend(super::errors::codes());
    Abi {
        platform: super::NAME,
        preamble: "#include <acl/acl.h>",
        functions: Api::functions(),
        structs: structs(),
        constants,
    }
}
