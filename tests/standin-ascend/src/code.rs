//! ACL's numbers, as integers: a test may inject any.

use std::ffi::c_int;

/// `aclError`
pub(crate) type Code = c_int;

/// `ACL_ERROR_REPEAT_INITIALIZE`
pub(crate) const REPEAT_INITIALISE: Code = 100002;

standin::codes! {
    SUCCESS = 0, c"ACL_SUCCESS", c"success";
    NotInitialised = 100001, c"ACL_ERROR_UNINITIALIZE", c"not initialised";
    Invalid = 107000, c"ACL_ERROR_RT_PARAM_INVALID", c"parameter invalid";
    InvalidDevice = 107001, c"ACL_ERROR_RT_INVALID_DEVICEID", c"invalid device";
    NoContext = 107002, c"ACL_ERROR_RT_CONTEXT_NULL", c"no context";
    ContextGone = 107003, c"ACL_ERROR_RT_STREAM_CONTEXT", c"stream not in the current context";
    InvalidHandle = 107017, c"ACL_ERROR_RT_INVALID_HANDLE", c"invalid handle";
    CaptureIsolation = 107024, c"ACL_ERROR_RT_CAPTURE_DEPENDENCY", c"capture dependency failure";
    CaptureUnjoined = 107025, c"ACL_ERROR_RT_STREAM_UNJOINED", c"invalid capture model";
    CaptureUnsupported = 107027, c"ACL_ERROR_RT_STREAM_CAPTURED", c"stream is captured";
    CapturedEvent = 107028, c"ACL_ERROR_RT_EVENT_CAPTURED", c"event is captured";
    IllegalState = 107029, c"ACL_ERROR_RT_STREAM_NOT_CAPTURED", c"stream is not captured";
    NotPermitted = 107030, c"ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT", c"not supported in this capture mode";
    CaptureImplicit = 107031, c"ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT", c"the default stream in a capture";
    CaptureMerge = 107032, c"ACL_ERROR_STREAM_CAPTURE_CONFLICT", c"two captures";
    CaptureUnmatched = 107036, c"ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED", c"not the stream where it began";
    CaptureWrongThread = 107038, c"ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD", c"not the thread that began it";
    OutOfMemory = 207001, c"ACL_ERROR_RT_MEMORY_ALLOCATION", c"out of memory";
    NotSupported = 207000, c"ACL_ERROR_RT_FEATURE_NOT_SUPPORT", c"not supported";
    NoDevice = 207004, c"ACL_ERROR_RT_NO_DEVICE", c"no device";
    IllegalAddress = 507015, c"ACL_ERROR_RT_AICORE_EXCEPTION", c"AI core exception";
    CaptureInvalidated = 507903, c"ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED", c"the capture was lost";
    Unknown = 507899, c"ACL_ERROR_RT_DRV_INTERNAL_ERROR", c"driver internal error";
}
