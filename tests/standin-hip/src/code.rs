//! HIP's numbers.

use std::ffi::c_int;

/// `hipError_t`
pub(crate) type Code = c_int;

standin::codes! {
    SUCCESS = 0, c"hipSuccess", c"no error";
    Invalid = 1, c"hipErrorInvalidValue", c"invalid argument";
    OutOfMemory = 2, c"hipErrorOutOfMemory", c"out of memory";
    NotInitialised = 3, c"hipErrorNotInitialized", c"initialization error";
    Deinitialised = 4, c"hipErrorDeinitialized", c"driver shutting down";
    NoDevice = 100, c"hipErrorNoDevice", c"no ROCm-capable device is detected";
    InvalidDevice = 101, c"hipErrorInvalidDevice", c"invalid device ordinal";
    NoContext = 201, c"hipErrorInvalidContext", c"invalid device context";
    InvalidHandle = 400, c"hipErrorInvalidHandle", c"invalid resource handle";
    IllegalState = 401, c"hipErrorIllegalState", c"the operation cannot be performed in the present state";
    NotReady = 600, c"hipErrorNotReady", c"device not ready";
    IllegalAddress = 700, c"hipErrorIllegalAddress", c"an illegal memory access was encountered";
    ContextGone = 709, c"hipErrorContextIsDestroyed", c"context is destroyed";
    AlreadyRegistered = 712, c"hipErrorHostMemoryAlreadyRegistered", c"part or all of the requested memory range is already mapped";
    NotRegistered = 713, c"hipErrorHostMemoryNotRegistered", c"pointer does not correspond to a registered memory region";
    NotSupported = 801, c"hipErrorNotSupported", c"operation not supported";
    CaptureUnsupported = 900, c"hipErrorStreamCaptureUnsupported", c"operation not permitted when stream is capturing";
    CaptureInvalidated = 901, c"hipErrorStreamCaptureInvalidated", c"operation failed due to a previous error during capture";
    CaptureMerge = 902, c"hipErrorStreamCaptureMerge", c"operation would result in a merge of separate capture sequences";
    CaptureUnmatched = 903, c"hipErrorStreamCaptureUnmatched", c"capture was not initiated in this stream";
    CaptureUnjoined = 904, c"hipErrorStreamCaptureUnjoined", c"capturing stream has unjoined work";
    CaptureIsolation = 905, c"hipErrorStreamCaptureIsolation", c"dependency created on uncaptured work in another stream";
    CaptureImplicit = 906, c"hipErrorStreamCaptureImplicit", c"operation would make the legacy stream depend on a capturing blocking stream";
    CapturedEvent = 907, c"hipErrorCapturedEvent", c"operation not permitted on an event last recorded in a capturing stream";
    CaptureWrongThread = 908, c"hipErrorStreamCaptureWrongThread", c"attempt to terminate a thread-local capture sequence from another thread";
    NotUpdatable = 910, c"hipErrorGraphExecUpdateFailure", c"the graph update was not performed";
    Unknown = 999, c"hipErrorUnknown", c"unknown error";
}
