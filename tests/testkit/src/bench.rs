//! Fixture: one arena on the host driver, with its device and memory.

use std::sync::Arc;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator, Stream};

use crate::{FaultyDriver, Stamps};

/// Fixture of a test of one arena.
pub struct Bench {
    /// The host driver with its memory.
    pub host: Arc<HostDriver>,
    /// The device's driver, over `host`.
    pub faulty: Arc<FaultyDriver>,
    /// The device.
    pub device: Arc<Device>,
    /// The arena.
    pub arena: SharedVmmAllocator,
    /// Contents of blocks.
    pub stamps: Stamps,
}

impl Bench {
    /// Creates the fixture with default options; stamps are written on `stream`.
    ///
    /// # Panics
    /// If the host has no room.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self::over(HostDriver::new(0, HostOptions::default()).unwrap(), stream, &Options::default())
    }

    /// As [`new`](Self::new), over the given driver and with the given options.
    ///
    /// # Panics
    /// If the arena cannot be created.
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

    /// Checks that no memory, address or event remains.
    ///
    /// # Panics
    /// If something remains.
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
