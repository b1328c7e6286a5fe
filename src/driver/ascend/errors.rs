//! Names of ACL's results, by `rt_error_codes.h` and `acl_base.h`: ACL has no function for these.

use std::ffi::{CStr, c_int};

use super::api::{Api, Code};
use crate::driver::abi::c_constants;
use crate::error::{Error, Result};

c_constants! {
    codes:
    INVALID_PARAM: c_int = 100_000, "ACL_ERROR_INVALID_PARAM";
    /// Before `aclInit`, and after `aclFinalize`.
    UNINITIALISED: c_int = 100_001, "ACL_ERROR_UNINITIALIZE";
    REPEAT_INITIALISE: c_int = 100_002, "ACL_ERROR_REPEAT_INITIALIZE";
    PARAM_INVALID: c_int = 107_000, "ACL_ERROR_RT_PARAM_INVALID";
    INVALID_DEVICE_ID: c_int = 107_001, "ACL_ERROR_RT_INVALID_DEVICEID";
    /// The thread has no live context.
    CONTEXT_NULL: c_int = 107_002, "ACL_ERROR_RT_CONTEXT_NULL";
    STREAM_CONTEXT: c_int = 107_003, "ACL_ERROR_RT_STREAM_CONTEXT";
    ADDRESS_UNALIGNED: c_int = 107_008, "ACL_ERROR_RT_ADDR_UNALIGNED";
    INVALID_HANDLE: c_int = 107_017, "ACL_ERROR_RT_INVALID_HANDLE";
    DEVICE_TASK_ABORT: c_int = 107_022, "ACL_ERROR_RT_DEVICE_TASK_ABORT";
    STREAM_ABORT: c_int = 107_023, "ACL_ERROR_RT_STREAM_ABORT";
    CAPTURE_DEPENDENCY: c_int = 107_024, "ACL_ERROR_RT_CAPTURE_DEPENDENCY";
    STREAM_UNJOINED: c_int = 107_025, "ACL_ERROR_RT_STREAM_UNJOINED";
    STREAM_CAPTURED: c_int = 107_027, "ACL_ERROR_RT_STREAM_CAPTURED";
    EVENT_CAPTURED: c_int = 107_028, "ACL_ERROR_RT_EVENT_CAPTURED";
    STREAM_NOT_CAPTURED: c_int = 107_029, "ACL_ERROR_RT_STREAM_NOT_CAPTURED";
    CAPTURE_MODE_NOT_SUPPORTED: c_int = 107_030, "ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT";
    CAPTURE_IMPLICIT: c_int = 107_031, "ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT";
    CAPTURE_CONFLICT: c_int = 107_032, "ACL_ERROR_STREAM_CAPTURE_CONFLICT";
    CAPTURE_UNMATCHED: c_int = 107_036, "ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED";
    CAPTURE_WRONG_THREAD: c_int = 107_038, "ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD";
    BAD_ALLOC: c_int = 200_000, "ACL_ERROR_BAD_ALLOC";
    API_NOT_SUPPORTED: c_int = 200_001, "ACL_ERROR_API_NOT_SUPPORT";
    FEATURE_NOT_SUPPORTED: c_int = 207_000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT";
    /// "Only used by out of memory" (`rt_error_codes.h`).
    MEMORY_ALLOCATION: c_int = 207_001, "ACL_ERROR_RT_MEMORY_ALLOCATION";
    NO_DEVICE: c_int = 207_004, "ACL_ERROR_RT_NO_DEVICE";
    RESOURCE_ALLOC_FAIL: c_int = 207_005, "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL";
    NO_EVENT_RESOURCE: c_int = 207_007, "ACL_ERROR_RT_NO_EVENT_RESOURCE";
    NO_STREAM_RESOURCE: c_int = 207_008, "ACL_ERROR_RT_NO_STREAM_RESOURCE";
    DEVICE_OUT_OF_MEMORY: c_int = 207_018, "ACL_ERROR_RT_DEVICE_OOM";
    INTERNAL_ERROR: c_int = 500_000, "ACL_ERROR_INTERNAL_ERROR";
    FAILURE: c_int = 500_001, "ACL_ERROR_FAILURE";
    DRIVER_FAILURE: c_int = 500_004, "ACL_ERROR_DRV_FAILURE";
    RUNTIME_INTERNAL: c_int = 507_000, "ACL_ERROR_RT_INTERNAL_ERROR";
    DRIVER_INTERNAL: c_int = 507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR";
    CAPTURE_INVALIDATED: c_int = 507_903, "ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED";
}

/// Limit of characters from the runtime.
const WORDS: usize = 400;

pub(super) fn out_of_memory(code: c_int) -> bool {
    matches!(code, MEMORY_ALLOCATION | DEVICE_OUT_OF_MEMORY | BAD_ALLOC)
}

/// Whether the driver or the device's context, and so every object, is gone.
pub(super) fn gone(code: c_int) -> bool {
    matches!(code, UNINITIALISED | CONTEXT_NULL)
}

/// Whether the driver never supports the call, so a fallback is tried.
pub(super) fn unsupported(code: c_int) -> bool {
    matches!(code, INVALID_PARAM | PARAM_INVALID | API_NOT_SUPPORTED | FEATURE_NOT_SUPPORTED)
}

pub(super) fn check(api: &Api, call: &'static str, code: Code) -> Result<()> {
    let Code(code) = code;
    if code == 0 {
        return Ok(());
    }
    let mut name = name(code).to_owned();
    // Reading the text would remove it for other callers.
    if !out_of_memory(code) {
        // SAFETY: valid until the thread's next call.
        let words = unsafe { (api.aclGetRecentErrMsg)() };
        if !words.is_null() {
            // SAFETY: not null, so zero-terminated.
            let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
            let words: Vec<&str> = words.split_whitespace().collect();
            let words: String = words.join(" ").chars().take(WORDS).collect();
            if !words.is_empty() {
                name = format!("{name}: {words}");
            }
        }
    }
    Err(Error::Driver { call, code, name })
}

fn name(code: c_int) -> &'static str {
    let known = codes().into_iter().find(|known| known.value == i64::from(code));
    known.map_or("unknown result", |known| known.name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn results_have_names_and_belong_to_one_set_at_most() {
        assert_eq!(name(207_001), "ACL_ERROR_RT_MEMORY_ALLOCATION");
        assert_eq!(name(1), "unknown result");
        let all = codes();
        let values: HashSet<i64> = all.iter().map(|known| known.value).collect();
        let names: HashSet<&str> = all.iter().map(|known| known.name).collect();
        assert_eq!((values.len(), names.len()), (all.len(), all.len()));
        let sets = |code: i64| {
            let code = code as c_int;
            [out_of_memory(code), gone(code), unsupported(code)].into_iter().filter(|is| *is).count()
        };
        assert!(values.iter().all(|code| sets(*code) <= 1));
        assert_eq!(values.iter().map(|code| sets(*code)).sum::<usize>(), 3 + 2 + 4);
    }
}
