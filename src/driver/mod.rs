//! Driver interface: all operations the library needs of a platform; see docs/design/drivers.md.
//! Traits: [`Memory`], [`Timeline`] (streams and events), [`Transfer`] (bytes), and the optional
//! [`Graphs`] and [`Sharing`]. Differences between platforms are data ([`Capabilities`]).
//!
//! # Contract
//!
//! Callers (mostly `pages/`) guarantee, as the `unsafe` functions need:
//!
//! * Lengths and addresses are multiples of [`Capabilities::granularity`], and lengths non-zero.
//! * A page is mapped whole. An unmap covers whole mappings without a gap; exactly one, with
//!   [`Capabilities::unmap_each`].
//! * Addresses are freed with the base and length of their reservation, after the last unmap
//!   inside.
//! * A page is released once. If still mapped, its memory is freed at the last unmap.
//! * The device no longer uses addresses being unmapped, unless [`Capabilities::unmap_waits`].
//!
//! Drivers guarantee:
//!
//! * Any thread may call any function, with any current context, also while a stream of the thread
//!   is under capture. [`Timeline::may_wait`] reports platforms which cannot wait then.
//! * No function waits for a whole device or context.
//! * A failed call has no effect, unless documented.
//! * After the platform's shutdown, functions which free (`free_addresses`, `release`, `unmap`,
//!   `event_destroy`, `executable_destroy`) succeed.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::units::{Address, Peers, Stream};

pub mod abi;
mod ascend;
mod cuda;
mod hip;
mod host;
mod library;
mod mlu;
pub mod platform;
mod self_test;
mod sharing;

pub use ascend::AscendDriver;
pub use cuda::CudaDriver;
pub use hip::HipDriver;
pub use host::{HostDriver, HostOptions};
pub use mlu::MluDriver;
pub use platform::{DriverChoice, Platform, open};
pub use self_test::{self_test, self_test_once};
pub use sharing::{DeviceOptions, FabricHandle, Handles, Sharing};

/// Constant properties of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name of its [`Platform`].
    pub platform: &'static str,
    /// Device number on the platform.
    pub ordinal: i32,
    /// Name of the device.
    pub name: String,
    /// Bytes of the device.
    pub total_bytes: u64,
    /// Options at its opening, if the platform has any.
    pub options: Option<HostOptions>,
}

/// When a write through one address of a page is visible at another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alias {
    /// A page can be mapped only once.
    None,
    /// After the writing operation completes (CUDA programming guide, "virtual aliasing").
    AtBoundaries,
    /// At once.
    Coherent,
}

/// Properties of a platform; sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Granularity of mapped lengths and addresses.
    pub granularity: u64,
    /// Maximum page size.
    pub largest_page: u64,
    /// Maximum length of a reservation.
    pub largest_reservation: u64,
    /// Visibility between two addresses of a page.
    pub alias: Alias,
    /// `alias` was verified on hardware. Otherwise the first opening of a device runs
    /// [`self_test()`].
    pub alias_proven: bool,
    /// Pages can be mapped at any free place of a reservation; otherwise only directly after the
    /// mapped ones, and [`Memory::map`] refuses all else ([`Error::UnfitDriver`]).
    pub map_in_any_order: bool,
    /// Pages can be mapped during a capture.
    pub map_while_capturing: bool,
    /// A page under an instantiated, idle graph can be replaced. Otherwise a seal keeps pages in
    /// place, arenas cannot be paused ([`Error::NotOffered`]), and graphs over regions or elastic
    /// buffers must be captured again after a change.
    pub replace_under_graph: bool,
    /// `unmap` waits for the device.
    pub unmap_waits: bool,
    /// `unmap` takes exactly one mapping, as mapped.
    pub unmap_each: bool,
    /// File descriptors for each page.
    pub descriptors_per_page: u32,
    /// Host memory can be registered, so copies run asynchronously at full speed, unless the
    /// operating system refuses.
    pub register_host: bool,
    /// Devices which can be granted access to this device's pages.
    pub peers: Peers,
    /// A thread without a current context has none after a call; otherwise the device's context
    /// stays current. A previous context is always restored.
    pub restores_no_context: bool,
}

impl Capabilities {
    /// Fails for the first peer which cannot be granted access ([`Error::InvalidArgument`]).
    pub fn require_peers(&self, peers: Peers) -> Result<()> {
        let expected = "another device of the platform that can reach this one's memory (peer access)";
        match peers.without(self.peers).iter().next() {
            Some(device) => Err(Error::InvalidArgument { what: "a peer", value: device.into(), expected }),
            None => Ok(()),
        }
    }

    /// Fails if pages under graphs cannot be replaced; `instead` names the remedy.
    pub(crate) fn require_replacing(&self, info: &DeviceInfo, instead: &str) -> Result<()> {
        if self.replace_under_graph {
            return Ok(());
        }
        let what = format!("what graphs keep of a page that another one replaces is not known; {instead}");
        Err(Error::NotOffered { platform: info.platform, device: info.ordinal, what })
    }
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(u64);

        impl $name {
            /// Creates a handle from the driver's value.
            ///
            /// # Safety
            /// The driver returned the value for an existing object of this kind.
            #[must_use]
            pub const unsafe fn from_raw(value: u64) -> Self {
                Self(value)
            }

            /// Returns the driver's value.
            #[must_use]
            pub fn raw(self) -> u64 {
                self.0
            }
        }
    };
}

handle! {
    /// A physical page of the driver. Safe code cannot create a handle:
    ///
    /// ```compile_fail
    /// let forged = vmmgraph::driver::PageHandle(5);
    /// ```
    PageHandle
}
handle! {
    /// An event: a point in a stream's work. Safe code cannot create a handle:
    ///
    /// ```compile_fail
    /// let forged = vmmgraph::driver::Event(5);
    /// ```
    Event
}

handle! {
    /// A captured graph, in host memory.
    Graph
}
handle! {
    /// An executable graph.
    Executable
}
handle! {
    /// A copy node of a captured graph, from the host.
    CopyNode
}

/// A copy from registered host memory to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphCopy {
    /// Destination.
    pub to: Address,
    /// Source.
    pub from: *const u8,
    /// Number of bytes; not 0.
    pub bytes: usize,
}

/// A page to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// The page.
    pub page: PageHandle,
    /// Bytes of the page.
    pub bytes: u64,
}

/// Failure of [`Memory::map`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotMapped {
    /// The error.
    pub error: Error,
    /// Pages, from the first, still mapped because the undo failed too; usually 0.
    pub mapped: usize,
}

/// Addresses and pages.
///
/// # Safety
/// An implementation follows the contract of this module.
pub unsafe trait Memory {
    /// Returns the free bytes of the device.
    fn free_bytes(&self) -> Result<u64>;

    /// Reserves addresses without memory.
    fn reserve(&self, len: u64) -> Result<Address>;

    /// Frees a reservation.
    ///
    /// # Safety
    /// A reservation of this driver, unused and without mappings.
    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()>;

    /// Creates a physical page. [`Error::OutOfMemory`] means only short memory.
    fn create(&self, len: u64) -> Result<PageHandle>;

    /// Releases a physical page.
    ///
    /// # Safety
    /// A page of this driver, not released before.
    unsafe fn release(&self, page: PageHandle) -> Result<()>;

    /// Maps pages one after the other from `at`, readable and writable by the device and these
    /// peers, of its [`Capabilities::peers`]. An error has the number of pages still mapped.
    ///
    /// # Safety
    /// The addresses are reserved and unmapped; the pages are live and have these lengths.
    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped>;

    /// Grants peers access to a range, also while the device uses it. Fails if the range was
    /// unmapped meanwhile.
    ///
    /// # Safety
    /// Whole mappings without a gap, present now or earlier.
    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()>;

    /// Unmaps all pages of a range.
    ///
    /// # Safety
    /// Whole mappings without a gap, no longer used by the device.
    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()>;
}

/// Whether a stream accepts records and launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamState {
    /// Accepted.
    Ready,
    /// Under capture, or the legacy default stream while its use would break another capture.
    Capturing,
}

/// Streams and events.
///
/// # Safety
/// As [`Memory`].
pub unsafe trait Timeline {
    /// Returns whether a stream can be used without breaking a capture. Breaks no capture itself,
    /// and is cheap: called for every replay.
    ///
    /// # Safety
    /// The stream exists.
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState>;

    /// Returns the thread's current context of this device other than the primary (for example a
    /// green context), which then has the [default streams](Stream::is_default).
    fn other_context(&self) -> Option<u64>;

    /// Calls `work` with the primary context current, or fails without calling it.
    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()>;

    /// Creates an unrecorded event.
    fn event_create(&self) -> Result<Event>;

    /// Destroys an event.
    ///
    /// # Safety
    /// An event of this driver, destroyed once.
    unsafe fn event_destroy(&self, event: Event) -> Result<()>;

    /// Records the event after all work submitted to `stream`.
    ///
    /// # Safety
    /// A live event of this driver, and an existing stream which is [`Ready`](StreamState::Ready)
    /// or in a capture the caller [may extend](Graphs::capture_copy).
    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes later work of `stream` wait for the event. Does not block.
    ///
    /// # Safety
    /// As [`event_record`](Self::event_record).
    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()>;

    /// Whether the event is reached.
    ///
    /// # Safety
    /// A live event of this driver.
    unsafe fn event_query(&self, event: Event) -> Result<bool>;

    /// Blocks until the event is reached.
    ///
    /// # Safety
    /// A live event of this driver.
    unsafe fn event_synchronize(&self, event: Event) -> Result<()>;

    /// Creates a stream not synchronized with the legacy default stream.
    fn stream_create(&self) -> Result<Stream>;

    /// Destroys a stream. Submitted work still runs.
    ///
    /// # Safety
    /// A stream of [`stream_create`](Self::stream_create), destroyed once and not used afterwards.
    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()>;

    /// Reports the beginning of a capture: no platform can list captures, and some forbid waits
    /// meanwhile.
    fn capture_begins(&self) {}

    /// Reports the end of a capture.
    fn capture_ends(&self) {}

    /// Checks that the thread may wait for the device, before operations which end in a wait.
    /// [`event_synchronize`](Self::event_synchronize) checks too; a forbidden
    /// [`event_query`](Self::event_query) returns false.
    ///
    /// # Errors
    /// [`Error::DeviceCapturing`].
    fn may_wait(&self) -> Result<()> {
        Ok(())
    }

    /// Begins a wait permitted by [`may_wait`](Self::may_wait), until
    /// [`wait_ends`](Self::wait_ends); it continues if a capture begins meanwhile.
    fn wait_begins(&self) {}

    /// Ends such a wait.
    fn wait_ends(&self) {}
}

/// Copies and fills.
///
/// # Safety
/// As [`Memory`].
pub unsafe trait Transfer {
    /// Fills `len` bytes (a multiple of four) with a 32-bit value, in stream order.
    ///
    /// # Safety
    /// The range is mapped and writable by the caller; the stream exists.
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()>;

    /// Copies device bytes to the host and waits.
    ///
    /// # Safety
    /// The range is mapped memory of the device.
    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()>;

    /// Copies host bytes to the device and waits.
    ///
    /// # Safety
    /// As [`fill`](Self::fill).
    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()>;

    /// Registers host memory, for asynchronous copies. No part may be registered already.
    ///
    /// # Safety
    /// Memory of this process, mapped until unregistered.
    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()>;

    /// Ends a registration.
    ///
    /// # Safety
    /// As registered, once, without a running copy.
    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()>;

    /// Copies device bytes to the host in stream order; asynchronously if the host memory is
    /// registered. A copy does not cross the end of a registration.
    ///
    /// # Safety
    /// The source is mapped memory of the device; the destination is writable by the caller until
    /// the copy ends.
    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()>;

    /// Copies host bytes to the device like [`copy_to_host`](Self::copy_to_host).
    ///
    /// # Safety
    /// The destination is mapped and writable by the caller; the source is unchanged until the copy
    /// ends.
    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()>;
}

/// Nodes of a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphNodes {
    /// Number of nodes, without nodes of child graphs.
    pub count: u64,
    /// A node allocates or frees memory, or its child nodes may.
    pub may_allocate: bool,
}

/// Graphs; not on every platform.
///
/// # Safety
/// As [`Memory`].
pub unsafe trait Graphs {
    /// Counts and classifies the nodes of a graph.
    ///
    /// # Safety
    /// The graph exists, and no other thread uses it.
    unsafe fn graph_nodes(&self, graph: Graph) -> Result<GraphNodes>;

    /// Instantiates a graph as libtorch 2.11: nodes keep the priorities of their captured streams,
    /// and memory allocated by the graph and not freed is freed at its next launch.
    ///
    /// # Safety
    /// As [`graph_nodes`](Self::graph_nodes).
    unsafe fn instantiate(&self, graph: Graph) -> Result<Executable>;

    /// Destroys an executable after its last launch.
    ///
    /// # Safety
    /// An executable of this driver, destroyed once.
    unsafe fn executable_destroy(&self, executable: Executable) -> Result<()>;

    /// Captures a copy from the host, after the stream's captured work. Within a capture, events
    /// may be recorded on its streams and awaited by other streams, which then join it.
    ///
    /// # Safety
    /// The caller may extend the stream's capture. At each launch with this copy, the destination
    /// is mapped, and the source is registered and unchanged.
    unsafe fn capture_copy(&self, copy: GraphCopy, stream: Stream) -> Result<CopyNode>;

    /// Makes a capturing stream wait for an event of the capture, as the first dependency of the
    /// stream's next node. Changes launch time only: on CUDA, 36 idle branches cost 1 % for
    /// concurrent kernels instead of 24 (docs/performance.md, Rings).
    ///
    /// # Safety
    /// The caller may extend the capture, in which the event was recorded.
    unsafe fn capture_wait(&self, event: Event, stream: Stream) -> Result<()>;

    /// Replaces a copy of an executable, for later launches.
    ///
    /// # Safety
    /// A live executable of this driver, used by no other thread, of the existing graph with this
    /// node; the copy as above.
    unsafe fn executable_set_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        copy: GraphCopy,
    ) -> Result<()>;

    /// Enables or disables a copy of an executable, for later launches. Dependent nodes run either
    /// way.
    ///
    /// # Safety
    /// As [`executable_set_copy`](Self::executable_set_copy).
    unsafe fn executable_enable_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        enabled: bool,
    ) -> Result<()>;
}

/// One device of a platform.
pub trait Driver: Memory + Timeline + Transfer + fmt::Debug + Send + Sync {
    /// Returns the constant properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Returns the platform's properties.
    fn capabilities(&self) -> &Capabilities;

    /// Returns the driver's version; empty if unknown.
    fn version(&self) -> String {
        String::new()
    }

    /// Returns the graph functions, if any.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// Returns the functions for other processes, if requested at the opening.
    fn sharing(&self) -> Option<&dyn Sharing> {
        None
    }

    /// Whether network cards can access the pages.
    fn rdma(&self) -> bool {
        false
    }
}

/// A driver shared by all objects of a device.
pub type SharedDriver = Arc<dyn Driver>;

/// A platform with options creates a new device for each driver.
pub(crate) fn same_device(one: &SharedDriver, other: &SharedDriver) -> bool {
    let device = |driver: &SharedDriver| {
        let info = driver.info();
        info.options.is_none().then_some((info.platform, info.ordinal))
    };
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
        || device(one).is_some_and(|known| device(other) == Some(known))
}
