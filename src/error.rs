//! All errors of the library, as values with the numbers to explain them. No error aborts or exits,
//! and no panic crosses into C. A failed call has no effect, unless documented.

use std::borrow::Cow;

use crate::units::Address;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size of zero or beyond the address space.
    #[error("{what} of {bytes} bytes: must be between 1 and {limit}")]
    InvalidSize {
        /// Object of the size.
        what: &'static str,
        /// Requested bytes.
        bytes: u64,
        /// Maximum bytes.
        limit: u64,
    },
    /// A page size the device cannot map.
    #[error(
        "{what} of {bytes} bytes does not fit the device's granularity of {granularity} bytes and the other page sizes"
    )]
    InvalidPageSize {
        /// Name of the page size.
        what: &'static str,
        /// Requested bytes.
        bytes: u64,
        /// Mapping granularity of the device, in bytes.
        granularity: u64,
    },
    /// An argument outside its domain.
    #[error("{what} is {value}: must be {expected}")]
    InvalidArgument {
        /// Name of the argument.
        what: &'static str,
        /// Any integer of C.
        value: i128,
        /// Valid values.
        expected: &'static str,
    },
    /// A graph input with an invalid declaration, or not matching its declaration or bucket.
    #[error("input {input}: {problem}")]
    InputMismatch {
        /// Name of the input.
        input: String,
        /// With actual and valid values.
        problem: String,
    },
    /// An unreadable page map.
    #[error("not a page map: {problem}")]
    InvalidMap {
        /// With actual and valid values.
        problem: String,
    },
    /// A device number unknown to the driver.
    #[error("device {ordinal}: the {driver} driver has {count} device(s)")]
    InvalidDevice {
        /// Name of the driver.
        driver: &'static str,
        /// Requested number.
        ordinal: i32,
        /// Number of devices.
        count: i32,
    },
    /// An unknown platform name.
    #[error(
        "cannot open a device of platform {name:?}: this library has no such platform; use one of {}, as the driver option or in VMMGRAPH_DRIVER",
        crate::driver::platform::names()
    )]
    UnknownPlatform {
        /// Requested name.
        name: String,
    },
    /// No platform was requested, and none has a usable device; host memory must be requested.
    #[error(
        "cannot open device {ordinal}: no platform has a usable device ({reasons}); set VMMGRAPH_DRIVER=host to use host memory instead"
    )]
    NoUsableDevice {
        /// Requested number.
        ordinal: i32,
        /// Each platform's reason.
        reasons: String,
    },
    /// The device is open in this process with different settings.
    #[error(
        "{driver} device {ordinal} is already open in this process with other settings; open it once and share it"
    )]
    DeviceInUse {
        /// Name of the driver.
        driver: &'static str,
        /// Number of the device.
        ordinal: i32,
    },
    /// An address which is not the start of a live block of this space.
    #[error("{address:?} is not the start of a live block of this space")]
    ForeignPointer {
        /// The address.
        address: Address,
    },
    /// A block freed before.
    #[error("the block at {address:?} was already freed")]
    DoubleFree {
        /// The address.
        address: Address,
    },
    /// The object is in the wrong state for the call.
    #[error("{sentence}")]
    WrongState {
        /// Sentence: *cannot do something: reason; remedy*.
        sentence: Cow<'static, str>,
    },
    /// The device has no memory for a page.
    #[error(
        "out of memory on device {device}: {requested} bytes requested{}, {free} of {total} bytes free",
        wanted_by(space)
    )]
    OutOfMemory {
        /// Missing bytes: the page, and all pages planned after it.
        requested: u64,
        /// Free bytes reported by the driver.
        free: u64,
        /// Bytes of the device.
        total: u64,
        /// Number of the device.
        device: i32,
        /// Label of the requesting space.
        space: Option<String>,
    },
    /// A limit is reached: of the device's page pool or of an account.
    #[error(
        "over the budget of {}device {device}: {requested} bytes requested{}, {held} of {budget} bytes held",
        account.as_ref().map_or(String::new(), |account| format!("{account} on ")),
        wanted_by(space)
    )]
    OverBudget {
        /// Missing bytes, as for `OutOfMemory`.
        requested: u64,
        /// Bytes charged to the limit.
        held: u64,
        /// The limit in bytes.
        budget: u64,
        /// Number of the device.
        device: i32,
        /// Label of the account with the limit. `None`: the device.
        account: Option<String>,
        /// Key of the lowest account over its limit. `None`: the device. 0: a limit outside
        /// accounts.
        lowest: Option<u64>,
        /// Label of the requesting space.
        space: Option<String>,
    },
    /// No address range of this length is free.
    #[error("out of address space on device {device}: {requested} bytes requested")]
    OutOfAddresses {
        /// Bytes of the range.
        requested: u64,
        /// Number of the device.
        device: i32,
    },
    /// The process has no file descriptor for a page of the host driver.
    #[error(
        "out of file descriptors for a page of {requested} bytes on device {device}: the process may have {limit}, and the host \
         driver keeps one for each page"
    )]
    OutOfDescriptors {
        /// Bytes of the page.
        requested: u64,
        /// Limit of the process (`ulimit -n`). 2^64 - 1: limited by the machine only.
        limit: u64,
        /// Number of the device.
        device: i32,
    },
    /// No host memory for contents of pages.
    #[error(
        "out of host memory: {requested} bytes requested, {held} held{}{}",
        if *limit == 0 { String::new() } else { format!(", of at most {limit}") },
        available.map_or(String::new(), |bytes| format!(", {bytes} available on this machine; request less or free memory"))
    )]
    OutOfHostMemory {
        /// Requested bytes.
        requested: u64,
        /// Bytes in the host pool.
        held: u64,
        /// Limit of the pool. 0: limited by the machine only.
        limit: u64,
        /// Bytes available on the machine, if fewer than requested.
        available: Option<u64>,
    },
    /// Host memory could not be registered with the device (pinned), as the caller requires.
    #[error(
        "host memory of {requested} bytes could not be registered with the device: {registered} of {held} bytes that the host pool holds are"
    )]
    HostNotRegistered {
        /// Requested bytes.
        requested: u64,
        /// Bytes in the host pool.
        held: u64,
        /// Registered part of `held`.
        registered: u64,
    },
    /// Needed pages are on lease ([`SharedVmmAllocator::lend`](crate::SharedVmmAllocator::lend)):
    /// recall them first.
    #[error("cannot use pages on lease: leases {leases:?} are outstanding; recall them first")]
    Lent {
        /// Numbers of the leases.
        leases: Vec<u64>,
    },
    /// Other processes use pages that the call would release, move or replace
    /// ([`Device::export_page`](crate::Device::export_page)).
    #[error("cannot change pages pinned for other processes: pages {pages:?}; remove their pins first")]
    Exported {
        /// The pages, or the first one found.
        pages: Vec<u64>,
    },
    /// The stream is under capture, or is a default stream whose use would break a capture.
    #[error(
        "stream {stream:#x} is being captured: call mark() before the capture begins, or replay after it ends"
    )]
    StreamCapturing {
        /// Handle of the stream.
        stream: u64,
    },
    /// The platform forbids waits for the device during a capture.
    #[error(
        "device {device}: waiting would break a capture that is under way there; try again when its space is sealed"
    )]
    DeviceCapturing {
        /// Number of the device.
        device: i32,
    },
    /// The driver's library cannot be loaded.
    #[error("the {driver} driver's library is not there (tried {tried})")]
    DriverMissing {
        /// The platform.
        driver: &'static str,
        /// Library names tried, and their origin.
        tried: String,
    },
    /// The driver's library lacks a function.
    #[error("the {driver} driver's library has no {name}: a newer driver is needed")]
    SymbolMissing {
        /// The platform.
        driver: &'static str,
        /// The missing function.
        name: &'static str,
    },
    /// The driver is present but unsupported.
    #[error("the {driver} driver cannot be used: {problem}")]
    UnfitDriver {
        /// The platform.
        driver: &'static str,
        /// With the version found.
        problem: String,
    },
    /// The device has no virtual memory management.
    #[error("device {device} has no virtual memory management")]
    Unsupported {
        /// Number of the device.
        device: i32,
    },
    /// The device does not offer a feature ([`Capabilities`](crate::driver::Capabilities)).
    #[error("{platform} device {device} does not offer it: {what}")]
    NotOffered {
        /// The platform.
        platform: &'static str,
        /// Number of the device.
        device: i32,
        /// Missing feature and remedy.
        what: String,
    },
    /// The self-test failed: a write through one address of a page is not visible at another, or a
    /// new mapping has a different page.
    #[error(
        "{platform} device {device} (driver {}) cannot be used: {found}; VMMGRAPH_SELF_TEST=0 leaves the test out",
        if version.is_empty() { "of unknown version" } else { version }
    )]
    Incoherent {
        /// The platform.
        platform: &'static str,
        /// Number of the device.
        device: i32,
        /// Version reported by the driver.
        version: String,
        /// Failed step and result.
        found: String,
    },
    /// The driver refused a call.
    #[error("{call} failed with {code} ({name})")]
    Driver {
        /// Driver function.
        call: &'static str,
        /// Result code.
        code: i32,
        /// The driver's name of the result.
        name: String,
    },
    /// An earlier internal failure closed the object.
    #[error("{what} was closed by an earlier failure")]
    Closed {
        /// The object.
        what: &'static str,
    },
    /// A bug in this library.
    #[error("internal error: {what}")]
    Internal {
        /// Description.
        what: String,
    },
}

fn wanted_by(space: &Option<String>) -> String {
    space.as_ref().map_or(String::new(), |label| format!(" by {label:?}"))
}

impl Error {
    /// Creates [`WrongState`](Self::WrongState) with a sentence: *cannot do something: reason;
    /// remedy*.
    #[must_use]
    pub fn wrong_state(sentence: impl Into<Cow<'static, str>>) -> Self {
        Self::WrongState { sentence: sentence.into() }
    }

    pub(crate) fn of_space(mut self, label: Option<&str>) -> Self {
        if let Self::OutOfMemory { space, .. } | Self::OverBudget { space, .. } = &mut self {
            *space = label.map(str::to_owned);
        }
        self
    }

    /// Raises the missing bytes to at least `bytes`.
    pub(crate) fn of_at_least(mut self, bytes: u64) -> Self {
        if let Self::OutOfMemory { requested, .. } | Self::OverBudget { requested, .. } = &mut self {
            *requested = bytes.max(*requested);
        }
        self
    }

    /// The lowest account over its limit, below the device.
    pub(crate) fn lowest(&self) -> Option<u64> {
        match self {
            Self::OverBudget { lowest, .. } => *lowest,
            _ => None,
        }
    }

    /// Whether more memory, a larger budget or a `trim` elsewhere could make the call succeed.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OverBudget { .. } | Self::OutOfDescriptors { .. })
    }
    /// Missing bytes of an [`is_out_of_memory`](Self::is_out_of_memory) error; else 0.
    pub(crate) fn requested_bytes(&self) -> u64 {
        match self {
            Self::OutOfMemory { requested, .. }
            | Self::OverBudget { requested, .. }
            | Self::OutOfDescriptors { requested, .. } => *requested,
            _ => 0,
        }
    }
}
