//! One arena on the host driver, which can be made to fail, and the books behind it.

use std::sync::Arc;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator, Stream};

use crate::{FaultyDriver, Stamps};

/// What a test of one arena needs.
pub struct Bench {
    /// The memory.
    pub host: Arc<HostDriver>,
    /// What the device is opened over.
    pub faulty: Arc<FaultyDriver>,
    /// The device.
    pub device: Arc<Device>,
    /// The arena.
    pub arena: SharedVmmAllocator,
    /// What is written to its blocks.
    pub stamps: Stamps,
}

impl Bench {
    /// With defaults; stamps are written on a stream.
    ///
    /// # Panics
    /// If the host has no room.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self::over(HostDriver::new(0, HostOptions::default()).unwrap(), stream, &Options::default())
    }

    /// As [`new`](Self::new), over a driver of the caller's and with options of his own.
    ///
    /// # Panics
    /// If the arena cannot be had.
    #[must_use]
    pub fn over(host: HostDriver, stream: Stream, options: &Options) -> Self {
        let host = Arc::new(host);
        let faulty = FaultyDriver::new(host.clone());
        let driver: SharedDriver = faulty.clone();
        let stamps = Stamps::new(&driver, stream);
        let device = Device::with_driver(driver);
        let arena = SharedVmmAllocator::new(&device, options).unwrap();
        Self { host, faulty, device, arena, stamps }
    }

    /// All who used it are gone.
    ///
    /// # Panics
    /// If something is left.
    pub fn end(self) {
        let Self { host, faulty, device, arena, stamps } = self;
        assert_eq!(arena.audit(), Ok(()));
        drop((arena, stamps));
        device.trim().unwrap();
        assert_eq!(device.pool().audit_idle(), Ok(()));
        let stats = device.stats();
        assert_eq!((stats.physical_bytes, stats.exported_bytes, stats.pending), (0, 0, 0));
        drop((device, faulty));
        assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]));
    }
}
