//! The one platform door: everything the library asks of a driver.
//!
//! Preconditions, the same for every function and never checked twice above this door:
//!
//! * lengths are non-zero multiples of [`DeviceInfo::granularity`], and so are addresses;
//! * a page is mapped whole, at its beginning, and unmapped by exactly the range it was mapped to;
//! * addresses are returned with the base and length they were reserved with, after the last unmap inside them;
//! * a page is released once; it may still be mapped, and its memory goes back after the last unmap;
//! * whoever unmaps has made sure that the device no longer uses those addresses: unmapping does not wait.
//!
//! Every function may be called from any thread, with any CUDA context current, also while a stream of that thread is being
//! captured. A failed call has changed nothing. A driver that is already shut down answers the functions that give things
//! back (`free_addresses`, `release`, `unmap`, `event_destroy`) with success, since then there is nothing left to give.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::units::{Address, Stream};

mod cuda;
mod host;
mod select;

pub use cuda::CudaDriver;
pub use host::{HostDriver, HostOptions};
pub use select::{DriverChoice, open};

/// Which driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverKind {
    /// An NVIDIA GPU.
    Cuda,
    /// This machine's own memory: memfd pages mapped into the process.
    Host,
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
        })
    }
}

/// What does not change about a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The driver behind it.
    pub kind: DriverKind,
    /// The device's number with that driver.
    pub ordinal: i32,
    /// The device's name.
    pub name: String,
    /// What mapped lengths and addresses must be multiples of, in bytes.
    pub granularity: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
}

/// A physical page as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHandle(pub u64);

/// An event: a point in a stream's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// A device's memory and the few things needed to keep its users in order. See the module for the preconditions.
pub trait Driver: fmt::Debug + Send + Sync {
    /// What does not change about the device.
    fn info(&self) -> &DeviceInfo;

    /// Bytes free on the device now.
    fn free_bytes(&self) -> Result<u64>;

    /// Reserves addresses; no memory is behind them.
    fn reserve(&self, len: u64) -> Result<Address>;
    /// Gives a reservation back.
    fn free_addresses(&self, base: Address, len: u64) -> Result<()>;

    /// Creates a physical page. [`Error::OutOfMemory`](crate::error::Error::OutOfMemory) only when that is what happened.
    fn create(&self, len: u64) -> Result<PageHandle>;
    /// Gives a physical page back.
    fn release(&self, page: PageHandle) -> Result<()>;

    /// Puts a page behind `len` reserved addresses, `len` being the page's own size. Not yet accessible.
    fn map(&self, at: Address, len: u64, page: PageHandle) -> Result<()>;
    /// Lets the device read and write a mapped range.
    fn set_access(&self, at: Address, len: u64) -> Result<()>;
    /// Takes the page away from a range.
    fn unmap(&self, at: Address, len: u64) -> Result<()>;

    /// Creates an event that nothing has been recorded in.
    fn event_create(&self) -> Result<Event>;
    /// Destroys an event.
    fn event_destroy(&self, event: Event) -> Result<()>;
    /// Moves the event to the end of what has been given to `stream` so far.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;
    /// Makes later work of `stream` wait for the event. Does not block the caller.
    fn event_wait(&self, event: Event, stream: Stream) -> Result<()>;
    /// Blocks the caller until the event has happened.
    fn event_synchronize(&self, event: Event) -> Result<()>;
    /// Whether the stream is being captured into a graph.
    fn is_capturing(&self, stream: Stream) -> Result<bool>;
    /// Blocks the caller until the device has done everything given to it.
    fn synchronize(&self) -> Result<()>;

    /// Sets `len` bytes (a multiple of four) to a repeated 32-bit value, in the stream's order.
    fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()>;
    /// Copies device bytes to the host; returns when they are there.
    fn read(&self, at: Address, into: &mut [u8]) -> Result<()>;
    /// Copies host bytes to the device; returns when they are there.
    fn write(&self, at: Address, from: &[u8]) -> Result<()>;
}

/// A driver shared by everything on its device.
pub type SharedDriver = Arc<dyn Driver>;
