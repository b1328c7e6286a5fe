//! Reasons of refusals, without a vendor's numbers.

use crate::memory::Refusal;

/// The reason why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A wrong argument.
    Invalid,
    /// Memory, addresses or descriptors are used up.
    OutOfMemory,
    /// The library is not initialised.
    NotInitialised,
    /// The library was shut down.
    Deinitialised,
    /// No device exists.
    NoDevice,
    /// No device has this ordinal.
    InvalidDevice,
    /// The thread has no context, or the handle is not a context.
    NoContext,
    /// The context is destroyed.
    ContextGone,
    /// No stream, event, graph or executable has this handle.
    InvalidHandle,
    /// The object is in the wrong state.
    IllegalState,
    /// The event has not happened.
    NotReady,
    /// The work used an unmapped address.
    IllegalAddress,
    /// Part of the memory is registered already.
    AlreadyRegistered,
    /// The memory is not registered.
    NotRegistered,
    /// The work failed.
    LaunchFailed,
    /// Not permitted.
    NotPermitted,
    /// The device lacks the feature.
    NotSupported,
    /// Not allowed during a capture.
    CaptureUnsupported,
    /// The capture is invalidated.
    CaptureInvalidated,
    /// Two captures would merge.
    CaptureMerge,
    /// The capture began on another stream.
    CaptureUnmatched,
    /// Work of the capture is not joined with its origin.
    CaptureUnjoined,
    /// The capture would depend on uncaptured work.
    CaptureIsolation,
    /// The legacy stream would depend on a captured one.
    CaptureImplicit,
    /// The event was recorded in a capture.
    CapturedEvent,
    /// A different thread began the capture.
    CaptureWrongThread,
    /// The executable cannot be updated from this graph.
    NotUpdatable,
    /// Any other reason.
    Unknown,
    /// A failure with the code chosen by a test.
    Injected(i32),
}

/// The result of an exported function's body.
pub type Answer<T = ()> = Result<T, Why>;

/// Converts a refusal of the memory.
#[must_use]
pub fn refused(refusal: Refusal) -> Why {
    match refusal {
        Refusal::Invalid(_) => Why::Invalid,
        Refusal::NotSupported(_) => Why::NotSupported,
        Refusal::OutOfMemory | Refusal::OutOfAddresses | Refusal::OutOfDescriptors => Why::OutOfMemory,
    }
}

/// Declares a vendor's numbers: `Variant = number, c"NAME", c"a sentence";` defines `code_of(Why)`
/// and `describe(number)`. Missing variants use the number of `Unknown`.
#[macro_export]
macro_rules! codes {
    (SUCCESS = $success:literal, $success_text:literal, $success_sentence:literal; $($why:ident = $code:literal, $text:literal, $sentence:literal;)*) => {
        pub(crate) fn code_of(why: $crate::Why) -> std::ffi::c_int {
            match why {
                $crate::Why::Injected(code) => code,
                $($crate::Why::$why => $code,)*
                #[allow(unreachable_patterns, reason = "a vendor may have a number for all of them")]
                _ => code_of($crate::Why::Unknown),
            }
        }

        /// Returns the name and the sentence of a number.
        pub(crate) fn describe(code: std::ffi::c_int) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr)> {
            match code {
                $success => Some(($success_text, $success_sentence)),
                $($code => Some(($text, $sentence)),)*
                _ => None,
            }
        }
    };
}
