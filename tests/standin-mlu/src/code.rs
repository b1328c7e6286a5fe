//! CNDrv's numbers, as integers: a test may inject any.

use std::ffi::c_int;

/// `CNresult`
pub(crate) type Code = c_int;

standin::codes! {
    SUCCESS = 0, c"CN_SUCCESS", c"success";
    NotReady = 1, c"CN_ERROR_NOT_READY", c"not ready";
    NotInitialised = 100002, c"CN_ERROR_NOT_INITIALIZED", c"not initialised";
    Deinitialised = 100003, c"CN_ERROR_DEINITIALIZED", c"deinitialised";
    NoDevice = 100004, c"CN_ERROR_NO_DEVICE", c"no device";
    InvalidDevice = 100005, c"CN_ERROR_INVALID_DEVICE", c"invalid device";
    Invalid = 100006, c"CN_ERROR_INVALID_VALUE", c"invalid value";
    InvalidHandle = 100014, c"CN_ERROR_INVALID_HANDLE", c"invalid handle";
    IllegalState = 100015, c"CN_ERROR_ILLEGAL_STATE", c"illegal state";
    NotSupported = 100050, c"CN_OPS_ERROR_NOT_SUPPORTED", c"not supported";
    NotPermitted = 100051, c"CN_OPS_ERROR_NOT_PERMITTED", c"not permitted";
    CapturedEvent = 100080, c"CN_NOTIFIER_ERROR_INVALID", c"invalid notifier";
    OutOfMemory = 100100, c"CN_MEMORY_ERROR_OUT_OF_MEMORY", c"out of memory";
    IllegalAddress = 100131, c"CN_INVOKE_ERROR_MEMORY_ILLEGAL_ADDRESS", c"illegal address";
    NoContext = 100201, c"CN_CONTEXT_ERROR_INVALID", c"invalid context";
    CaptureUnsupported = 100360, c"CN_ERROR_QUEUE_CAPTURE_UNSUPPORTED", c"not permitted when a queue is captured";
    CaptureInvalidated = 100361, c"CN_ERROR_QUEUE_CAPTURE_INVALIDATED", c"the capture was lost";
    CaptureWrongThread = 100362, c"CN_ERROR_QUEUE_CAPTURE_WRONG_THREAD", c"not the thread that began it";
    CaptureMerge = 100363, c"CN_ERROR_QUEUE_CAPTURE_MERGED", c"two captures";
    CaptureUnjoined = 100364, c"CN_ERROR_QUEUE_CAPTURE_UNJOINED", c"work that is not joined";
    CaptureIsolation = 100365, c"CN_ERROR_QUEUE_CAPTURE_ISOLATION", c"a dependency across the capture";
    CaptureUnmatched = 100366, c"CN_ERROR_QUEUE_CAPTURE_UNMATCHED", c"not the queue where it began";
    Unknown = 200000, c"CN_ERROR_UNKNOWN", c"unknown";
}
