//! From the published text of `cn_api.h` in CNDrv 2.15.5. `scripts/abi.sh` compares both where
//! CNToolkit is installed.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::driver::abi::{Abi, c_constants, c_structs, c_types};
use crate::driver::library::{Vendor, c_functions};

pub(super) const LIBRARY: Vendor =
    Vendor { driver: super::NAME, variable: "VMMGRAPH_MLU_LIBRARY", names: &["libcndrv.so"], refused: &[] };

c_types! {
    /// 0 is success.
    Code(c_int) = "CNresult";
    Device(u64) = "CNdev";
    CnAddress(u64) = "CNaddr";
    Context(*mut c_void) = "CNcontext";
    /// Null: the default queue.
    Queue(*mut c_void) = "CNqueue";
    Notifier(*mut c_void) = "CNnotifier";
    Handle(u64) = "CNmemGenericAllocationHandle";
    Attribute(c_uint) = "CNdevice_attribute";
    AllocationType(c_uint) = "CNmemAllocationType";
    HandleType(c_uint) = "CNmemAllocationHandleType";
    LocationType(c_uint) = "CNmemLocationType";
    AccessFlags(c_uint) = "CNMemoryAccessFlags";
    CacheType(c_uint) = "CNMemoryCachingType";
    PinnedType(c_uint) = "CNMemoryCachePinnedType";
    Granularity(c_uint) = "CNmemAllocationGranularity";
    CaptureStatus(c_uint) = "CNqueueCaptureStatus";
    CaptureMode(c_uint) = "CNqueueCaptureMode";
}

c_structs! {
    structs:
    Location = "CNmemLocation", 8 {
        kind: LocationType = "type" @ 0,
        id: c_uint = "id" @ 4,
    }
    AllocationProp = "CNmemAllocationProp", 20 {
        kind: AllocationType = "type" @ 0,
        handle_types: HandleType = "requestedHandleTypes" @ 4,
        location: Location = "location" @ 8,
        compression: u8 = "allocFlags.compressionType" @ 16,
        security: u8 = "allocFlags.securityType" @ 17,
    }
    AccessDesc = "CNmemAccessDesc", 20 {
        location: Location = "location" @ 0,
        /// Always read and write.
        access: AccessFlags = "accessFlags" @ 8,
        cache: CacheType = "cacheType" @ 12,
        pinned: PinnedType = "pinnedType" @ 16,
    }
}

c_constants! {
    numbers:
    NOT_READY: c_int = 1, "CN_ERROR_NOT_READY";
    NOT_INITIALISED: c_int = 100_002, "CN_ERROR_NOT_INITIALIZED";
    DEINITIALISED: c_int = 100_003, "CN_ERROR_DEINITIALIZED";
    NO_DEVICE: c_int = 100_004, "CN_ERROR_NO_DEVICE";
    INVALID_VALUE: c_int = 100_006, "CN_ERROR_INVALID_VALUE";
    NOT_SUPPORTED: c_int = 100_050, "CN_OPS_ERROR_NOT_SUPPORTED";
    OUT_OF_MEMORY: c_int = 100_100, "CN_MEMORY_ERROR_OUT_OF_MEMORY";
    /// Limit set by the process's environment.
    OUT_OF_PROCESS_MEMORY: c_int = 100_101, "CN_MEMORY_ERROR_OUT_OF_PROCESS_MAX_MEMORY";
    CONTEXT_INVALID: c_int = 100_201, "CN_CONTEXT_ERROR_INVALID";
    VIRTUAL_ADDRESSES: c_uint = 0x30B, "CN_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED";
    DEFAULT: c_uint = 1, "CN_MEM_ALLOCATION_TYPE_DEFAULT";
    NO_HANDLE: c_uint = 0, "CN_MEM_HANDLE_TYPE_NONE";
    DEVICE: c_uint = 1, "CN_MEM_LOCATION_TYPE_DEVICE";
    READ_WRITE: c_uint = 0, "CN_MEM_ACCESS_FLAGS_PROT_READWRITE";
    NOT_CACHED: c_uint = 0, "CN_MEM_NON_CACHEABLE";
    NOT_PINNED: c_uint = 0, "CN_MEM_CACHE_NON_PINNED";
    MINIMUM: c_uint = 0, "CN_MEM_ALLOC_GRANULARITY_MINIMUM";
    /// The only notifiers of unlimited number.
    NO_TIMING: c_uint = 4, "CN_NOTIFIER_DISABLE_TIMING_ALL";
    CAPTURE_NONE: c_uint = 0, "CN_QUEUE_CAPTURE_STATUS_NONE";
    CAPTURE_RELAXED: c_uint = 2, "CN_QUEUE_CAPTURE_MODE_RELAXED";
}

c_functions! {
    Api of LIBRARY {
        required {
            cnInit(c_uint) -> Code;
            cnGetLibVersion(*mut c_int, *mut c_int, *mut c_int) -> Code;
            cnGetErrorName(Code, *mut *const c_char) -> Code;
            cnDeviceGetCount(*mut c_int) -> Code;
            cnDeviceGet(*mut Device, c_int) -> Code;
            cnDeviceGetName(*mut c_char, c_uint, Device) -> Code;
            cnDeviceTotalMem(*mut u64, Device) -> Code;
            cnDeviceGetAttribute(*mut c_int, Attribute, Device) -> Code;
            cnSharedContextAcquire(*mut Context, Device) -> Code;
            cnSharedContextRelease(Device) -> Code;
            cnCtxGetCurrent(*mut Context) -> Code;
            cnCtxSetCurrent(Context) -> Code;
            cnMemGetInfo(*mut u64, *mut u64) -> Code;
            cnMemGetAllocationGranularity(*mut u64, *mut AllocationProp, Granularity) -> Code;
            cnMemAddressReserve(*mut CnAddress, u64, u64, CnAddress, u64) -> Code;
            cnMemAddressFree(CnAddress, u64) -> Code;
            cnMemCreate(*mut Handle, u64, *mut AllocationProp, u64) -> Code;
            cnMemRelease(Handle) -> Code;
            cnMemMap(CnAddress, u64, u64, Handle, u64) -> Code;
            cnMemSetAccess(CnAddress, u64, *mut AccessDesc, u64) -> Code;
            cnMemUnmap(CnAddress, u64) -> Code;
            cnCreateNotifier(*mut Notifier, c_uint) -> Code;
            cnDestroyNotifier(Notifier) -> Code;
            cnPlaceNotifier(Notifier, Queue) -> Code;
            cnQueueWaitNotifier(Queue, Notifier) -> Code;
            cnQueryNotifier(Notifier) -> Code;
            cnWaitNotifier(Notifier) -> Code;
            cnCreateQueue(*mut Queue, c_uint) -> Code;
            cnDestroyQueue(Queue) -> Code;
            cnQueueIsCapturing(Queue, *mut CaptureStatus) -> Code;
            cnThreadExchangeQueueCaptureMode(*mut CaptureMode) -> Code;
            cnMemsetD32Async(CnAddress, c_uint, u64, Queue) -> Code;
            cnMemcpyDtoH(*mut c_void, CnAddress, u64) -> Code;
            cnMemcpyHtoD(CnAddress, *const c_void, u64) -> Code;
            cnMemcpyDtoHAsync_V2(*mut c_void, CnAddress, u64, Queue) -> Code;
            cnMemcpyHtoDAsync_V2(CnAddress, *const c_void, u64, Queue) -> Code;
        }
        optional {}
    }
}

fn location(ordinal: i32) -> Location {
    Location { kind: LocationType(DEVICE), id: ordinal.cast_unsigned() }
}

pub(super) fn allocation(ordinal: i32) -> AllocationProp {
    AllocationProp {
        kind: AllocationType(DEFAULT),
        handle_types: HandleType(NO_HANDLE),
        location: location(ordinal),
        compression: 0,
        security: 0,
    }
}

/// Not cached, as in the vendor's example: cache coherence between aliases is undocumented.
pub(super) fn access(ordinal: i32) -> AccessDesc {
    AccessDesc {
        location: location(ordinal),
        access: AccessFlags(READ_WRITE),
        cache: CacheType(NOT_CACHED),
        pinned: PinnedType(NOT_PINNED),
    }
}

pub(super) fn abi() -> Abi {
    Abi {
        platform: super::NAME,
        preamble: "#include <cn_api.h>",
        functions: Api::functions(),
        structs: structs(),
        constants: numbers(),
    }
}
