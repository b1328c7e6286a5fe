//! From hip_runtime_api.h of HIP 6.2 and 7.1, equal here. HIP 5 has a different
//! `hipMemAllocationProp`.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::driver::abi::{Abi, c_constants, c_structs, c_types};
use crate::driver::library::{Vendor, c_functions};

/// The last name is in development packages and wheels; the version is checked.
const LIBRARY: Vendor = Vendor {
    driver: "hip",
    variable: "VMMGRAPH_HIP_LIBRARY",
    names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
    refused: &[(
        "libamdhip64.so.5",
        "HIP 5 has other structures and no virtual memory management: 6.2 is needed",
    )],
};

c_types! {
    /// 0 is success; any integer is possible.
    Code(c_int) = "hipError_t";
    Handle(*mut c_void) = "hipMemGenericAllocationHandle_t";
    StreamHandle(*mut c_void) = "hipStream_t";
    EventHandle(*mut c_void) = "hipEvent_t";
    DevicePointer(*mut c_void) = "hipDeviceptr_t";
    /// Always zero.
    Flags(c_ulonglong) = "unsigned long long";
    Attribute(c_int) = "hipDeviceAttribute_t";
    AllocationType(c_int) = "hipMemAllocationType";
    HandleType(c_int) = "hipMemAllocationHandleType";
    LocationType(c_int) = "hipMemLocationType";
    GranularityKind(c_int) = "hipMemAllocationGranularity_flags";
    AccessFlags(c_int) = "hipMemAccessFlags";
    CopyKind(c_int) = "hipMemcpyKind";
    CaptureMode(c_int) = "hipStreamCaptureMode";
    CaptureStatus(c_int) = "hipStreamCaptureStatus";
}

c_structs! { structs:
    Location = "hipMemLocation", 8 {
        kind: LocationType = "type" @ 0,
        id: c_int = "id" @ 4,
    }

    /// Unnamed fields are zero.
    AllocationProp = "hipMemAllocationProp", 32 {
        kind: AllocationType = "type" @ 0,
        requested: HandleType = "requestedHandleType" @ 4,
        location: Location = "location" @ 8,
        win32: *mut c_void = "win32HandleMetaData" @ 16,
        flags: [u8; 8] = "allocFlags" @ 24,
    }

    AccessDesc = "hipMemAccessDesc", 12 {
        location: Location = "location" @ 0,
        flags: AccessFlags = "flags" @ 8,
    }
}

c_constants! { constants:
    OUT_OF_MEMORY: c_int = 2, "hipErrorOutOfMemory";
    DEINITIALIZED: c_int = 4, "hipErrorDeinitialized";
    NO_DEVICE: c_int = 100, "hipErrorNoDevice";
    INVALID_DEVICE: c_int = 101, "hipErrorInvalidDevice";
    NOT_READY: c_int = 600, "hipErrorNotReady";
    CONTEXT_IS_DESTROYED: c_int = 709, "hipErrorContextIsDestroyed";
    CAPTURE_IMPLICIT: c_int = 906, "hipErrorStreamCaptureImplicit";
    ATTRIBUTE_VMM: c_int = 89, "hipDeviceAttributeVirtualMemoryManagementSupported";
    PINNED: c_int = 1, "hipMemAllocationTypePinned";
    HANDLE_NONE: c_int = 0, "hipMemHandleTypeNone";
    LOCATION_DEVICE: c_int = 1, "hipMemLocationTypeDevice";
    READ_WRITE: c_int = 3, "hipMemAccessFlagsProtReadWrite";
    GRANULARITY_MINIMUM: c_int = 0, "hipMemAllocationGranularityMinimum";
    CAPTURE_RELAXED: c_int = 2, "hipStreamCaptureModeRelaxed";
    CAPTURE_NONE: c_int = 0, "hipStreamCaptureStatusNone";
    HOST_TO_DEVICE: c_int = 1, "hipMemcpyHostToDevice";
    DEVICE_TO_HOST: c_int = 2, "hipMemcpyDeviceToHost";
    EVENT_DISABLE_TIMING: c_uint = 2, "hipEventDisableTiming";
    STREAM_NON_BLOCKING: c_uint = 1, "hipStreamNonBlocking";
    REGISTER_PORTABLE: c_uint = 1, "hipHostRegisterPortable";
}

c_functions! {
    Api of LIBRARY {
        required {
            hipInit(c_uint) -> Code;
            hipDriverGetVersion(*mut c_int) -> Code;
            hipGetErrorName(Code) -> *const c_char;
            hipGetDeviceCount(*mut c_int) -> Code;
            hipSetDevice(c_int) -> Code;
            hipGetDevice(*mut c_int) -> Code;
            hipDeviceGetName(*mut c_char, c_int, c_int) -> Code;
            hipDeviceTotalMem(*mut usize, c_int) -> Code;
            hipDeviceGetAttribute(*mut c_int, Attribute, c_int) -> Code;
            hipDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> Code;
            hipMemGetInfo(*mut usize, *mut usize) -> Code;
            hipMemGetAllocationGranularity(*mut usize, *const AllocationProp, GranularityKind) -> Code;
            hipMemAddressReserve(*mut *mut c_void, usize, usize, *mut c_void, Flags) -> Code;
            hipMemAddressFree(*mut c_void, usize) -> Code;
            hipMemCreate(*mut Handle, usize, *const AllocationProp, Flags) -> Code;
            hipMemRelease(Handle) -> Code;
            hipMemMap(*mut c_void, usize, usize, Handle, Flags) -> Code;
            hipMemUnmap(*mut c_void, usize) -> Code;
            hipMemSetAccess(*mut c_void, usize, *const AccessDesc, usize) -> Code;
            hipEventCreateWithFlags(*mut EventHandle, c_uint) -> Code;
            hipEventDestroy(EventHandle) -> Code;
            hipEventRecord(EventHandle, StreamHandle) -> Code;
            hipEventQuery(EventHandle) -> Code;
            hipEventSynchronize(EventHandle) -> Code;
            hipStreamWaitEvent(StreamHandle, EventHandle, c_uint) -> Code;
            hipStreamIsCapturing(StreamHandle, *mut CaptureStatus) -> Code;
            hipThreadExchangeStreamCaptureMode(*mut CaptureMode) -> Code;
            hipStreamCreateWithFlags(*mut StreamHandle, c_uint) -> Code;
            hipStreamDestroy(StreamHandle) -> Code;
            hipStreamSynchronize(StreamHandle) -> Code;
            hipMemsetD32Async(DevicePointer, c_int, usize, StreamHandle) -> Code;
            hipMemcpyAsync(*mut c_void, *const c_void, usize, CopyKind, StreamHandle) -> Code;
            hipHostRegister(*mut c_void, usize, c_uint) -> Code;
            hipHostUnregister(*mut c_void) -> Code;
        }
        optional { }
    }
}

pub(super) fn abi() -> Abi {
    Abi {
        platform: LIBRARY.driver,
        preamble: "#define __HIP_PLATFORM_AMD__ 1\n#include <hip/hip_runtime_api.h>\n",
        functions: Api::functions(),
        structs: structs(),
        constants: constants(),
    }
}
