//! Why something is refused, in no vendor's numbers.

use crate::memory::Refusal;

/// Why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// An argument is wrong.
    Invalid,
    /// Memory, addresses or descriptors are used up.
    OutOfMemory,
    /// The library was not started.
    NotInitialised,
    /// It was shut down.
    Deinitialised,
    /// There is no device.
    NoDevice,
    /// There is no such device.
    InvalidDevice,
    /// The thread has no context, or this is none.
    NoContext,
    /// The context is gone.
    ContextGone,
    /// There is no such stream, event, graph or executable.
    InvalidHandle,
    /// It is not in the state for that.
    IllegalState,
    /// It has not happened yet.
    NotReady,
    /// What ran touched what is not mapped.
    IllegalAddress,
    /// Part of the memory is registered already.
    AlreadyRegistered,
    /// The memory is not registered.
    NotRegistered,
    /// The work failed.
    LaunchFailed,
    /// It is not allowed.
    NotPermitted,
    /// The device cannot do it.
    NotSupported,
    /// It is not allowed while a stream is captured.
    CaptureUnsupported,
    /// The capture was lost before.
    CaptureInvalidated,
    /// Two captures would become one.
    CaptureMerge,
    /// The capture began on another stream.
    CaptureUnmatched,
    /// Work of the capture is not joined with the stream that it began on.
    CaptureUnjoined,
    /// It would depend on work that is not captured.
    CaptureIsolation,
    /// The legacy stream would depend on a captured one.
    CaptureImplicit,
    /// The event was recorded in a capture.
    CapturedEvent,
    /// The capture was begun by another thread.
    CaptureWrongThread,
    /// The executable cannot become that of this graph.
    NotUpdatable,
    /// Anything else.
    Unknown,
    /// A test wants this very number.
    Injected(i32),
}

/// What the body of an exported function comes to.
pub type Answer<T = ()> = Result<T, Why>;

/// Why the memory refused.
#[must_use]
pub fn refused(refusal: Refusal) -> Why {
    match refusal {
        Refusal::Invalid(_) => Why::Invalid,
        Refusal::NotSupported(_) => Why::NotSupported,
        Refusal::OutOfMemory | Refusal::OutOfAddresses | Refusal::OutOfDescriptors => Why::OutOfMemory,
    }
}

/// A vendor's numbers: `Variant = number, c"NAME", c"a sentence";` makes `code_of(Why)` and `describe(number)`. What is not listed is the number of
/// `Unknown`.
#[macro_export]
macro_rules! codes {
    (SUCCESS = $success:literal, $success_text:literal, $success_sentence:literal; $($why:ident = $code:literal, $text:literal, $sentence:literal;)*) => {
        /// The vendor's number for a refusal.
        pub(crate) fn code_of(why: $crate::Why) -> std::ffi::c_int {
            match why {
                $crate::Why::Injected(code) => code,
                $($crate::Why::$why => $code,)*
                #[allow(unreachable_patterns, reason = "a vendor may have a number for all of them")]
                _ => code_of($crate::Why::Unknown),
            }
        }

        /// The number's name and a sentence about it.
        pub(crate) fn describe(code: std::ffi::c_int) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr)> {
            match code {
                $success => Some(($success_text, $success_sentence)),
                $($code => Some(($text, $sentence)),)*
                _ => None,
            }
        }
    };
}
