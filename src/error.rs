//! Everything that can go wrong, with the numbers that explain it.
//!
//! Every failure is one of these values, up to the very edge: the library never aborts, exits or lets a panic cross into C. A
//! failed call has changed nothing that its documentation does not name.

use std::borrow::Cow;

use crate::units::Address;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size that is zero or beyond what any device can address.
    #[error("{what} of {bytes} bytes: must be between 1 and {limit}")]
    InvalidSize {
        /// What was to be sized.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// Most bytes allowed.
        limit: u64,
    },
    /// A page size the device cannot map.
    #[error(
        "{what} of {bytes} bytes does not fit the device's granularity of {granularity} bytes and the other page sizes"
    )]
    InvalidPageSize {
        /// Which of the sizes.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// The device's mapping granularity in bytes.
        granularity: u64,
    },
    /// An argument outside its domain.
    #[error("{what} is {value}: {expected}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What it was; wide enough for every integer of C.
        value: i128,
        /// What it may be.
        expected: &'static str,
    },
    /// A graph input that cannot be declared so, is not what was declared, or does not fit its bucket.
    #[error("input {input}: {problem}")]
    InputMismatch {
        /// The input's name.
        input: String,
        /// What is wrong, with what was found and what may be.
        problem: String,
    },
    /// A page map that cannot be read.
    #[error("not a page map: {problem}")]
    InvalidMap {
        /// What is wrong, with what was found and what may be.
        problem: String,
    },
    /// A device number the driver does not have.
    #[error("device {ordinal}: the {driver} driver has {count} device(s)")]
    InvalidDevice {
        /// The driver asked.
        driver: &'static str,
        /// The number asked for.
        ordinal: i32,
        /// How many devices there are.
        count: i32,
    },
    /// No platform has that name.
    #[error(
        "no platform is called {name:?}: see VMMGRAPH_DRIVER and the platforms that this library was built with"
    )]
    UnknownPlatform {
        /// The name given.
        name: String,
    },
    /// The device is open in this process with other settings.
    #[error("{driver} device {ordinal} is already open in this process with other settings")]
    DeviceInUse {
        /// The driver.
        driver: &'static str,
        /// The device's number.
        ordinal: i32,
    },
    /// An address that is not the start of a live block of this space.
    #[error("{address:?} is not the start of a live block of this space")]
    ForeignPointer {
        /// The address given.
        address: Address,
    },
    /// A block that was freed before.
    #[error("the block at {address:?} was already freed")]
    DoubleFree {
        /// The address given.
        address: Address,
    },
    /// The object is not in the state that the call needs.
    #[error("{sentence}")]
    WrongState {
        /// A sentence: *cannot do something: reason; remedy*.
        sentence: Cow<'static, str>,
    },
    /// The device has no memory left for a page.
    #[error(
        "out of memory on device {device}: {requested} bytes requested{}, {free} of {total} bytes free",
        wanted_by(space)
    )]
    OutOfMemory {
        /// Bytes that were missing: of the page that could not be created, and of those that were to follow it.
        requested: u64,
        /// Bytes the driver calls free.
        free: u64,
        /// Bytes of the device.
        total: u64,
        /// The device's number.
        device: i32,
        /// The label of the space that asked, if it has one.
        space: Option<String>,
    },
    /// A limit of the caller's own is reached: that of the device's page pool, or of an account in it, such as an arena's.
    #[error(
        "over the budget of {}device {device}: {requested} bytes requested{}, {held} of {budget} bytes held",
        account.as_ref().map_or(String::new(), |account| format!("{account} on ")),
        wanted_by(space)
    )]
    OverBudget {
        /// Bytes that were missing: of the page that was not to be had, and of those that were to follow it.
        requested: u64,
        /// Bytes that count toward the limit.
        held: u64,
        /// The limit.
        budget: u64,
        /// The device's number.
        device: i32,
        /// The label of the account whose limit it is ("arena 3"); `None`: the device's.
        account: Option<String>,
        /// The key of the lowest account that was short: what counts toward that makes room in all that were. `None`: the device's; 0: a limit that is no
        /// account's.
        lowest: Option<u64>,
        /// The label of the space that asked, if it has one.
        space: Option<String>,
    },
    /// No address range of that length is left.
    #[error("out of address space on device {device}: {requested} bytes requested")]
    OutOfAddresses {
        /// Bytes of the range.
        requested: u64,
        /// The device's number.
        device: i32,
    },
    /// The process has no file descriptor left for a page of the host driver.
    #[error(
        "out of file descriptors for a page of {requested} bytes on device {device}: the process may have {limit}, and the host \
         driver keeps one for each page"
    )]
    OutOfDescriptors {
        /// Bytes of the page that could not be created.
        requested: u64,
        /// Most descriptors the process may have (`ulimit -n`); 2^64 - 1: only the machine has a limit.
        limit: u64,
        /// The device's number.
        device: i32,
    },
    /// No host memory is left for the contents of pages: the pool's limit is reached, or the machine has no more.
    #[error(
        "out of host memory: {requested} bytes requested, {held} held{}{}",
        if *limit == 0 { String::new() } else { format!(", of at most {limit}") },
        available.map_or(String::new(), |bytes| format!(", {bytes} available on this machine; request less or free memory"))
    )]
    OutOfHostMemory {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that the host pool holds.
        held: u64,
        /// The most it may hold; 0: only the machine has a limit.
        limit: u64,
        /// Bytes that the machine has available, if it has fewer than the request.
        available: Option<u64>,
    },
    /// Host memory is there and could not be registered with the device (pinned), and whoever asked takes no other: copies of it would not run
    /// beside the caller.
    #[error(
        "host memory of {requested} bytes could not be registered with the device: {registered} of {held} bytes that the host pool holds are"
    )]
    HostNotRegistered {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that the host pool holds.
        held: u64,
        /// Those of them that are registered.
        registered: u64,
    },
    /// Pages that are needed are on lease ([`SharedVmmAllocator::lend`](crate::SharedVmmAllocator::lend)): recall them first.
    #[error("pages that are needed are on lease to somebody: leases {leases:?}")]
    Lent {
        /// The numbers of the leases.
        leases: Vec<u64>,
    },
    /// Ranks that compare their replays ([`SharedVmmAllocator::compare_order`](crate::SharedVmmAllocator::compare_order)) had different ones. All ranks find the same.
    #[error(
        "ranks differ first in replay {replay}{}: rank {rank} {}, rank {other} {}; {ranks} rank(s) are otherwise than most{}",
        if *exact { "" } else { " or before" },
        had_key(*exact, *had),
        had_key(*exact, *other_had),
        if *launched { ", and nothing more is launched" } else { "" }
    )]
    RanksDiffer {
        /// The number of the first replay that is not the same on all ranks, from 1 (or from the last restart of the check).
        replay: u64,
        /// Whether it is that one; else it is that one or one before, which are forgotten.
        exact: bool,
        /// The lowest rank that is otherwise than most.
        rank: u32,
        /// The key of its replay; `None`: it has none, or it is forgotten.
        had: Option<u64>,
        /// The lowest rank of most; of groups of one size, the one of the lowest rank is most.
        other: u32,
        /// The key of its replay; `None`: it has none, or it is forgotten.
        other_had: Option<u64>,
        /// Ranks that are otherwise than most.
        ranks: u32,
        /// Whether some rank has launched it: then this arena launches nothing more. Else the ranks may decide anew.
        launched: bool,
    },
    /// Other processes have pages that the call would give back, move or exchange ([`Device::export_page`](crate::Device::export_page)): they
    /// close them first.
    #[error("other processes have pages that are to stay what they are: pages {pages:?}")]
    Exported {
        /// The numbers of the pages, or of the first that was met.
        pages: Vec<u64>,
    },
    /// The stream is being captured (or, for a default stream, using it would break a capture), so nothing can be launched on it or
    /// ordered behind its work.
    #[error(
        "stream {stream:#x} is being captured: call mark() before the capture begins, or replay after it ends"
    )]
    StreamCapturing {
        /// The stream's handle.
        stream: u64,
    },
    /// On this platform nobody may wait for the device while something of it is being captured: that would break the capture.
    #[error(
        "device {device}: waiting would break a capture that is under way there; try again when its space is sealed"
    )]
    DeviceCapturing {
        /// The device's number.
        device: i32,
    },
    /// The driver's library cannot be loaded.
    #[error("the {driver} driver's library is not there (tried {tried})")]
    DriverMissing {
        /// The platform.
        driver: &'static str,
        /// The names that were tried, and who named them.
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
    /// The driver is there, and is not one that this library works with.
    #[error("the {driver} driver cannot be used: {problem}")]
    UnfitDriver {
        /// The platform.
        driver: &'static str,
        /// What is wrong, with the version found.
        problem: String,
    },
    /// The device cannot do what the library is built on.
    #[error("device {device} has no virtual memory management")]
    Unsupported {
        /// The device's number.
        device: i32,
    },
    /// What the device cannot do, or is not known to bear, a call would need
    /// ([`Capabilities`](crate::driver::Capabilities)).
    #[error("{platform} device {device} does not offer it: {what}")]
    NotOffered {
        /// The platform.
        platform: &'static str,
        /// The device's number.
        device: i32,
        /// What, and what to do.
        what: String,
    },
    /// The device failed the self-test at its first opening: what is written through one address of a page does not show at another,
    /// or a new mapping is not the page's.
    #[error(
        "{platform} device {device} (driver {}) cannot be used: {found}; VMMGRAPH_SELF_TEST=0 leaves the test out",
        if version.is_empty() { "of unknown version" } else { version }
    )]
    Incoherent {
        /// The platform.
        platform: &'static str,
        /// The device's number.
        device: i32,
        /// The driver's version, as it says.
        version: String,
        /// What was tried, and what was found.
        found: String,
    },
    /// The driver refused a call.
    #[error("{call} failed with {code} ({name})")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Its result.
        code: i32,
        /// The driver's name for that result.
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
        /// What went wrong.
        what: String,
    },
}

/// What a rank had, as a message says it.
fn had_key(exact: bool, key: Option<u64>) -> String {
    match key {
        Some(key) => format!("had {key:#018x}"),
        None if exact => "had none".to_owned(),
        None => "had one that is forgotten".to_owned(),
    }
}

/// The label of a space, as a message names it.
fn wanted_by(space: &Option<String>) -> String {
    space.as_ref().map_or(String::new(), |label| format!(" by {label:?}"))
}

impl Error {
    /// [`WrongState`](Self::WrongState) with its sentence: *cannot do something: reason; remedy*.
    #[must_use]
    pub fn wrong_state(sentence: impl Into<Cow<'static, str>>) -> Self {
        Self::WrongState { sentence: sentence.into() }
    }

    /// Says for which space memory was short.
    pub(crate) fn of_space(mut self, label: Option<&str>) -> Self {
        if let Self::OutOfMemory { space, .. } | Self::OverBudget { space, .. } = &mut self {
            *space = label.map(str::to_owned);
        }
        self
    }

    /// Says that memory was short for so many bytes at least.
    pub(crate) fn of_at_least(mut self, bytes: u64) -> Self {
        if let Self::OutOfMemory { requested, .. } | Self::OverBudget { requested, .. } = &mut self {
            *requested = bytes.max(*requested);
        }
        self
    }

    /// The key of the lowest account that was short, if one below the device's was.
    pub(crate) fn lowest(&self) -> Option<u64> {
        match self {
            Self::OverBudget { lowest, .. } => *lowest,
            _ => None,
        }
    }

    /// Whether more memory, a larger budget or a `trim` elsewhere would let the same call succeed.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OverBudget { .. } | Self::OutOfDescriptors { .. })
    }
    /// The bytes that were missing, for [`is_out_of_memory`](Self::is_out_of_memory); else 0.
    pub(crate) fn requested_bytes(&self) -> u64 {
        match self {
            Self::OutOfMemory { requested, .. }
            | Self::OverBudget { requested, .. }
            | Self::OutOfDescriptors { requested, .. } => *requested,
            _ => 0,
        }
    }
}
