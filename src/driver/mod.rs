//! The one platform door: everything the library asks of a driver.
//!
//! Three traits, since a platform's answers to them differ independently: [`Memory`] (addresses and pages), [`Timeline`] (streams
//! and events) and [`Transfer`] (bytes); and [`Graphs`] and [`Sharing`], which not every platform has. What a platform can and cannot do is data, [`Capabilities`]; above this door nobody asks
//! which platform it is. Platforms are rows of a table and are opened by name ([`platform`]). Only CUDA was ever run on hardware; `hip` was built
//! against AMD's declarations and is tested on a stand-in.
//!
//! The traits are `unsafe`, as are the functions that take handles, addresses or streams: what the callers promise is stated
//! here once, and only `pages/` calls them.
//!
//! * Lengths are non-zero multiples of [`Capabilities::granularity`], and so are addresses.
//! * A page is mapped whole. What is unmapped is one or more whole mappings without a gap between them; one, if [`Capabilities::unmap_each`].
//! * Addresses are returned with the base and length they were reserved with, after the last unmap inside them.
//! * A page is released once; it may still be mapped, and its memory goes back after the last unmap.
//! * Whoever unmaps has made sure that the device no longer uses those addresses, unless [`Capabilities::unmap_waits`].
//!
//! Every function may be called from any thread, with any context current, also while a stream of that thread is being captured
//! (where a platform cannot wait then, it says so: [`Timeline::may_wait`]), and none waits for a device or a context. A failed call has changed nothing, unless it says otherwise. A driver that is already
//! shut down answers the functions that give things back (`free_addresses`, `release`, `unmap`, `event_destroy`, `executable_destroy`) with success,
//! since then there is nothing left to give.

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

/// What does not change about a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The name of the [`Platform`] behind it.
    pub platform: &'static str,
    /// The device's number on that platform.
    pub ordinal: i32,
    /// The device's name.
    pub name: String,
    /// Bytes of the device.
    pub total_bytes: u64,
    /// What it was opened with, on a platform that takes options.
    pub options: Option<HostOptions>,
}

/// Whether, and when, one address of a page shows what was written through another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alias {
    /// A page can be mapped once.
    None,
    /// Once the operation that wrote (launch, copy, fill) is complete (CUDA programming guide, "virtual aliasing").
    AtBoundaries,
    /// At once.
    Coherent,
}

/// What a platform can do, as data. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// What mapped lengths and addresses must be multiples of.
    pub granularity: u64,
    /// The longest page that can be created.
    pub largest_page: u64,
    /// The longest range that can be reserved.
    pub largest_reservation: u64,
    /// What two addresses of one page show of each other.
    pub alias: Alias,
    /// That has been seen on hardware by the project's own tests. Where it has not, the first opening of a device asks for proof
    /// ([`self_test()`]).
    pub alias_proven: bool,
    /// Pages are mapped at any place of a reservation that is free. Else only behind what is mapped from the reservation's first mapping on, without
    /// a gap; [`Memory::map`] refuses the rest ([`Error::UnfitDriver`]).
    pub map_in_any_order: bool,
    /// Pages can be mapped while a stream is captured.
    pub map_while_capturing: bool,
    /// Another page may take the place of one under an instantiated graph that does not run. Where that is not known a seal keeps pages where
    /// they are and an arena is not paused ([`Error::NotOffered`]); a graph over a region or an elastic buffer is captured anew after its pages changed.
    pub replace_under_graph: bool,
    /// `unmap` waits until the device no longer uses the addresses.
    pub unmap_waits: bool,
    /// `unmap` takes one mapping at a time, as it was mapped.
    pub unmap_each: bool,
    /// File descriptors of the process that a page takes.
    pub descriptors_per_page: u32,
    /// Host memory can be registered, so that copies run at the link's speed and beside the caller. Where it can, the operating system
    /// may still refuse it.
    pub register_host: bool,
    /// Other devices of the platform that can be given access to this one's pages.
    pub peers: Peers,
    /// A thread on which no context was current has none after a call, either. Else the device's own stays current there; a thread that had one
    /// has it back on every platform.
    pub restores_no_context: bool,
}

impl Capabilities {
    /// That all of these can be given access to the device's pages.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the first that cannot.
    pub fn require_peers(&self, peers: Peers) -> Result<()> {
        let expected = "another device of the platform that can reach this one's memory (peer access)";
        match peers.without(self.peers).iter().next() {
            Some(device) => Err(Error::InvalidArgument { what: "a peer", value: device.into(), expected }),
            None => Ok(()),
        }
    }

    /// That graphs of a device bear what exchanges the pages under them; `instead` says what to do.
    ///
    /// # Errors
    /// [`Error::NotOffered`] unless [`replace_under_graph`](Self::replace_under_graph).
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
            /// The driver's own value for it.
            ///
            /// # Safety
            /// The value is one that the driver gave out for such an object, which still exists.
            #[must_use]
            pub const unsafe fn from_raw(value: u64) -> Self {
                Self(value)
            }

            /// The driver's own value.
            #[must_use]
            pub fn raw(self) -> u64 {
                self.0
            }
        }
    };
}

handle! {
    /// A physical page as the driver knows it. Safe code cannot make one up:
    ///
    /// ```compile_fail
    /// let forged = vmmgraph::driver::PageHandle(5);
    /// ```
    PageHandle
}
handle! {
    /// An event: a point in a stream's work. Safe code cannot make one up:
    ///
    /// ```compile_fail
    /// let forged = vmmgraph::driver::Event(5);
    /// ```
    Event
}

handle! {
    /// A captured graph: a template of work, in host memory.
    Graph
}
handle! {
    /// An executable graph.
    Executable
}
handle! {
    /// A copy from the host in a captured graph.
    CopyNode
}

/// A copy from registered host memory to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphCopy {
    /// The destination.
    pub to: Address,
    /// The source.
    pub from: *const u8,
    /// Bytes; more than 0.
    pub bytes: usize,
}

/// A page to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// The page.
    pub page: PageHandle,
    /// Its bytes.
    pub bytes: u64,
}

/// A [`Memory::map`] that stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotMapped {
    /// Why.
    pub error: Error,
    /// How many of the pages, from the first, are mapped all the same, because undoing that failed as well; mostly 0.
    pub mapped: usize,
}

/// Addresses and pages.
///
/// # Safety
/// An implementation does what the module says, so that callers who keep the module's promises never touch memory that is not
/// theirs.
pub unsafe trait Memory {
    /// Bytes free on the device now.
    fn free_bytes(&self) -> Result<u64>;

    /// Reserves addresses; no memory is behind them.
    fn reserve(&self, len: u64) -> Result<Address>;

    /// Gives a reservation back.
    ///
    /// # Safety
    /// A reservation of this driver, with nothing mapped in it and nobody using it.
    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()>;

    /// Creates a physical page. [`Error::OutOfMemory`] only when that is what happened.
    fn create(&self, len: u64) -> Result<PageHandle>;

    /// Gives a physical page back.
    ///
    /// # Safety
    /// A page of this driver that was not released before.
    unsafe fn release(&self, page: PageHandle) -> Result<()>;

    /// Puts pages behind reserved addresses, one behind the other from `at` on, readable and writable by the device and these peers of
    /// it, which are among its [`Capabilities::peers`].
    ///
    /// # Errors
    /// What the driver says, with the pages that are mapped all the same.
    ///
    /// # Safety
    /// The addresses are reserved, nothing is mapped there, and the pages are live and as long as said.
    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped>;

    /// Lets peers read and write a range too, as [`map`](Self::map) does. The device may use it meanwhile.
    ///
    /// # Errors
    /// What the driver says; also if somebody has unmapped the range since.
    ///
    /// # Safety
    /// Whole mappings without a gap, or such as were there.
    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()>;

    /// Takes away all pages of a range.
    ///
    /// # Safety
    /// Whole mappings without a gap, which the device no longer uses.
    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()>;
}

/// What a stream is doing, as far as recording in it and launching on it go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamState {
    /// Nothing stands in the way.
    Ready,
    /// It is being captured, or (the legacy default stream) using it would break a capture that is under way elsewhere.
    Capturing,
}

/// Streams and events.
///
/// # Safety
/// As [`Memory`].
pub unsafe trait Timeline {
    /// Whether a stream may be used without breaking a capture. Breaks none itself, and is cheap: every replay asks.
    ///
    /// # Safety
    /// The stream exists.
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState>;

    /// The calling thread's current context, if it is one of this device and not the device's primary one, such as a green context: the
    /// [default streams](Stream::is_default) that this thread names are those of it, here as in every other call of the platform.
    fn other_context(&self) -> Option<u64>;

    /// Calls `work` with no other context current, so that default streams are the device's.
    ///
    /// # Errors
    /// What the driver says; `work` was not called then.
    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()>;

    /// Creates an event that nothing has been recorded in.
    fn event_create(&self) -> Result<Event>;

    /// Destroys an event.
    ///
    /// # Safety
    /// An event of this driver, destroyed once.
    unsafe fn event_destroy(&self, event: Event) -> Result<()>;

    /// Moves the event to the end of what has been given to `stream` so far.
    ///
    /// # Safety
    /// A live event of this driver and a stream that exists and is [`Ready`](StreamState::Ready), or in a capture that the caller
    /// [may add to](Graphs::capture_copy).
    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes later work of `stream` wait for the event. Does not block the caller.
    ///
    /// # Safety
    /// As [`event_record`](Self::event_record).
    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()>;

    /// Whether the event has happened.
    ///
    /// # Safety
    /// A live event of this driver.
    unsafe fn event_query(&self, event: Event) -> Result<bool>;

    /// Blocks the caller until the event has happened.
    ///
    /// # Safety
    /// A live event of this driver.
    unsafe fn event_synchronize(&self, event: Event) -> Result<()>;

    /// Creates a stream for the library's own work, which does not wait for the legacy default stream, nor that for it.
    fn stream_create(&self) -> Result<Stream>;

    /// Destroys a stream. What was given to it is still done.
    ///
    /// # Safety
    /// A stream of [`stream_create`](Self::stream_create), destroyed once and not used afterwards.
    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()>;

    /// Somebody is about to capture work of the device. No platform can be asked whether anybody does, and some forbid to wait meanwhile.
    fn capture_begins(&self) {}

    /// A capture that was told of is over.
    fn capture_ends(&self) {}

    /// Whether the calling thread may be blocked until the device has done something: asked before anything is begun whose end has to be
    /// waited for. [`event_synchronize`](Self::event_synchronize) asks by itself, and [`event_query`](Self::event_query) answers no where it cannot ask.
    ///
    /// # Errors
    /// [`Error::DeviceCapturing`]; the driver's library was not called.
    fn may_wait(&self) -> Result<()> {
        Ok(())
    }

    /// From here to [`wait_ends`](Self::wait_ends) this thread waits for what it gave to the device while it [might](Self::may_wait) wait: the
    /// wait goes on if a capture begins meanwhile, as one does that is inside the driver just then.
    fn wait_begins(&self) {}

    /// Such a wait is over.
    fn wait_ends(&self) {}
}

/// Bytes.
///
/// # Safety
/// As [`Memory`].
pub unsafe trait Transfer {
    /// Sets `len` bytes (a multiple of four) to a repeated 32-bit value, in the stream's order.
    ///
    /// # Safety
    /// The range is mapped and the caller's to write; the stream exists.
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()>;

    /// Copies device bytes to the host; returns when they are there.
    ///
    /// # Safety
    /// The range is memory of the device, mapped.
    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()>;

    /// Copies host bytes to the device; returns when they are there.
    ///
    /// # Safety
    /// As [`fill`](Self::fill).
    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()>;

    /// Registers host memory with the device, so that copies of it run beside the caller. No part of it is registered already.
    ///
    /// # Safety
    /// Memory of this process, mapped until it is unregistered.
    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()>;

    /// Ends a registration.
    ///
    /// # Safety
    /// As it was registered, once, with no copy of it under way.
    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()>;

    /// Copies device bytes to the host, in the stream's order. Returns before they are there if the host memory is registered, else
    /// perhaps; a copy does not cross the end of a registration.
    ///
    /// # Safety
    /// The source is memory of the device, mapped; the destination is the caller's to write until the stream has done it.
    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()>;

    /// Copies host bytes to the device, in the stream's order. Otherwise as [`copy_to_host`](Self::copy_to_host).
    ///
    /// # Safety
    /// The destination is mapped and the caller's to write; the source stays as it is until the stream has done it.
    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()>;
}

/// The nodes of a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphNodes {
    /// Number of nodes; those of child graphs are not counted.
    pub count: u64,
    /// Some node allocates or frees memory, or is a child graph or condition, whose own nodes may.
    pub may_allocate: bool,
}

/// Graphs, which some platforms have.
///
/// # Safety
/// As [`Memory`].
pub unsafe trait Graphs {
    /// Counts and classifies the nodes of a graph.
    ///
    /// # Safety
    /// The graph exists, and no other thread uses it.
    unsafe fn graph_nodes(&self, graph: Graph) -> Result<GraphNodes>;

    /// Instantiates a graph as libtorch 2.11 does: nodes keep the priorities of the streams they were captured on, and memory that the graph
    /// allocates and leaves is freed at its next launch. [`Error::OutOfMemory`] only when that is what happened.
    ///
    /// # Safety
    /// As [`graph_nodes`](Self::graph_nodes).
    unsafe fn instantiate(&self, graph: Graph) -> Result<Executable>;

    /// Destroys an executable, behind its last launch.
    ///
    /// # Safety
    /// An executable of this driver, destroyed once and launched no more.
    unsafe fn executable_destroy(&self, executable: Executable) -> Result<()>;

    /// Captures a copy from the host, behind what the stream was given. Within a capture, events may be recorded on its streams and waited for by
    /// other streams, which are in it from then on.
    ///
    /// # Safety
    /// The stream is in a capture that the caller may add to. The destination is mapped when the graph is launched, and the source is
    /// registered and stays as it is, as long as an executable of the graph has this copy.
    unsafe fn capture_copy(&self, copy: GraphCopy, stream: Stream) -> Result<CopyNode>;

    /// A stream of a capture goes on behind an event of it, whose work comes first among what the stream's next node is behind. That changes nothing
    /// of what a graph does, and the time it takes: CUDA launches 36 branches that do nothing with 1 % more time for the kernels beside
    /// them instead of 24 (docs/performance.md, Rings).
    ///
    /// # Safety
    /// The stream is in a capture that the caller may add to, and the event was recorded in it.
    unsafe fn capture_wait(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes a copy of an executable another one, for the launches to come.
    ///
    /// # Safety
    /// A live executable of this driver, used by no other thread, made of the graph that the node is in, which is there; the copy as above.
    unsafe fn executable_set_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        copy: GraphCopy,
    ) -> Result<()>;

    /// Whether launches to come do a copy of an executable. What is behind it runs either way.
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
    /// What does not change about the device.
    fn info(&self) -> &DeviceInfo;

    /// What the platform can do.
    fn capabilities(&self) -> &Capabilities;

    /// The version of the driver below, in its own way of counting; empty if it does not say.
    fn version(&self) -> String {
        String::new()
    }

    /// Its graphs, if it has any.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// Its pages for other processes, if it can and was opened so.
    fn sharing(&self) -> Option<&dyn Sharing> {
        None
    }

    /// Whether network cards may read and write its pages: it can and was opened so.
    fn rdma(&self) -> bool {
        false
    }
}

/// A driver shared by everything on its device.
pub type SharedDriver = Arc<dyn Driver>;

/// Whether two drivers have the same memory behind them. A platform with options makes the device itself, anew for each driver.
pub(crate) fn same_device(one: &SharedDriver, other: &SharedDriver) -> bool {
    let device = |driver: &SharedDriver| {
        let info = driver.info();
        info.options.is_none().then_some((info.platform, info.ordinal))
    };
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
        || device(one).is_some_and(|known| device(other) == Some(known))
}
