use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::driver::{DeviceOptions, DriverChoice, Handles, HostOptions, SharedDriver, open};
use crate::error::{Error, Result};
use crate::pages::{Account, HostPool, Limits, PagePool, PoolStats, Reclaimer, retry_orphans};
use crate::pause::Pausables;
use crate::sync::Mutex;
use crate::units::{Peers, Stream};

mod exports;
mod pause;
mod peers;
mod sockets;

pub use exports::{ExportedPage, PagePin};
pub use pause::Ready;
pub use peers::{PeerExtent, PeerMap, PeerPage};
pub use sockets::{MOST_DESCRIPTORS, receive_descriptors, send_descriptors};

/// Root object of a device in this process: its driver, and the page pool of all its physical
/// memory. Arenas, spaces and blocks keep it open, and the last one closes it. Memory then refused
/// by the driver or in use is retried at the next opening. Opening never waits for the driver of a
/// different device.
#[derive(Debug)]
pub struct Device {
    pool: Arc<PagePool>,
    pausables: Pausables,
    streaming: AtomicU64,
}

type Opened = HashMap<(&'static str, i32), (Weak<Device>, HostOptions)>;

/// Process-wide devices, by platform and number.
fn opened() -> &'static Mutex<Opened> {
    static OPENED: OnceLock<Mutex<Opened>> = OnceLock::new();
    OPENED.get_or_init(Mutex::default)
}

/// Peers of process-wide devices, open or not.
fn admitted() -> &'static Mutex<HashMap<(&'static str, i32), Peers>> {
    static ADMITTED: OnceLock<Mutex<HashMap<(&'static str, i32), Peers>>> = OnceLock::new();
    ADMITTED.get_or_init(Mutex::default)
}

impl Device {
    /// Creates a device over the caller's driver, apart from process-wide devices.
    #[must_use]
    pub fn with_driver(driver: SharedDriver) -> Arc<Self> {
        retry_orphans(&driver);
        let pool = PagePool::new(driver);
        let pausables = Pausables::new(&pool);
        Arc::new(Self { pool, pausables, streaming: AtomicU64::new(0) })
    }

    /// Returns the process-wide device `ordinal`, opened if necessary.
    ///
    /// # Errors
    /// As [`open`]; [`Error::DeviceInUse`] if the device is open with other host options, or
    /// without the requested [sharing](Self::sharing) or [RDMA access](Self::rdma).
    pub fn open(choice: DriverChoice, ordinal: i32, options: impl Into<DeviceOptions>) -> Result<Arc<Self>> {
        let options @ DeviceOptions { host, sharing, rdma, peers } = options.into();
        let asked = peers.without(Peers::one(ordinal));
        let driver = open(choice, ordinal, options)?;
        let platform = driver.info().platform;
        let granted = Handles::of(&*driver);
        let device = Self::with_driver(driver);
        // Requested before the device was open, so unchecked.
        let peers = admitted().lock().get(&(platform, ordinal)).copied().unwrap_or_default();
        device.admit(peers.among(device.driver().capabilities().peers).and(asked))?;
        let mut opened = opened().lock();
        if let Some((known, options)) = opened.get(&(platform, ordinal))
            && let Some(known) = known.upgrade()
        {
            let same = (*options == host || known.driver().info().options.is_none())
                && (sharing == Handles::None || known.sharing() >= granted)
                && (known.rdma() || !rdma);
            // Devices are dropped without the lock.
            drop(opened);
            if !same {
                return Err(Error::DeviceInUse { driver: platform, ordinal });
            }
            return known.admit(asked).map(|()| known);
        }
        opened.insert((platform, ordinal), (Arc::downgrade(&device), host));
        Ok(device)
    }

    #[doc(hidden)]
    pub fn opened(platform: &'static str, ordinal: i32) -> Option<Arc<Self>> {
        opened().lock().get(&(platform, ordinal)).and_then(|(device, _)| device.upgrade())
    }

    /// Grants other devices of the platform access to all current and future mappings. An arena's
    /// own option ([`Options::peers`](crate::Options::peers)) adds cost only to its own maps.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a device without peer access: nothing changed. Driver errors
    /// for current mappings: future mappings still grant access.
    pub fn admit(&self, peers: Peers) -> Result<()> {
        if peers.is_empty() { Ok(()) } else { self.pool.admit(peers) }
    }

    /// As [`admit`](Self::admit), for a process-wide device: now if open, else at its opening.
    #[doc(hidden)]
    pub fn admit_to(platform: &'static str, ordinal: i32, peers: Peers) -> Result<()> {
        let device = Self::opened(platform, ordinal);
        if let Some(device) = &device {
            device.driver().capabilities().require_peers(peers)?;
        }
        {
            let mut admitted = admitted().lock();
            let known = admitted.entry((platform, ordinal)).or_default();
            *known = known.and(peers);
        }
        // Includes a device opened meanwhile.
        Self::opened(platform, ordinal).map_or(Ok(()), |device| device.admit(peers))
    }

    /// Returns the page pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        self.pool.driver()
    }

    /// Returns the handle types granted for sharing pages with other processes.
    #[must_use]
    pub fn sharing(&self) -> Handles {
        Handles::of(&**self.driver())
    }

    /// Whether network cards may access the pages.
    #[must_use]
    pub fn rdma(&self) -> bool {
        self.driver().rdma()
    }

    /// Returns the devices with access to all pages.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.pool.peers()
    }

    /// Returns the host pool, for contents of paused pages.
    #[must_use]
    pub fn host_pool(&self) -> &HostPool {
        self.pausables.host_pool()
    }

    pub(crate) fn pausables(&self) -> &Pausables {
        &self.pausables
    }

    /// Limits the physical bytes of the device's pool. Frees nothing.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.pool.set_budget(bytes);
    }

    /// Creates an account below another or below the device: a budget for a tenant, a model or a
    /// kind of memory.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if an ancestor has no room for the guarantee;
    /// [`Error::InvalidArgument`] for a parent on a different device.
    pub fn account(&self, label: &str, below: Option<&Account>, limits: Limits) -> Result<Account> {
        Account::new(&self.pool, below, label.to_owned(), limits)
    }

    /// Registers a reclaimer, until dropped by its owner: `vmmgraph_device_add_reclaimer`, or for
    /// the reclaimer's [account](Reclaimer::account).
    pub fn add_reclaimer(&self, reclaimer: &Arc<dyn Reclaimer>) {
        self.pool.add_reclaimer(reclaimer);
    }

    /// Waits for freed memory in use by the device, releases free pages, and retries refused calls.
    /// Returns the bytes.
    pub fn trim(&self) -> Result<u64> {
        for known in self.pausables().tagged(&[]) {
            known.give_up(Duration::ZERO);
        }
        self.pool.trim()
    }

    /// Marks all arenas with a last replay on this stream: `vmmgraph_device_mark`.
    pub fn mark(&self, stream: Stream) -> Result<()> {
        let all = self.pausables().tagged(&[]);
        all.iter().map(|known| known.mark_on(stream)).fold(Ok(()), Result::and)
    }

    /// Announces a capture without a space on this device: `vmmgraph_device_note_capture`.
    pub fn note_capture(&self) {
        self.pool.note_capture();
    }

    /// Releases free pages, and returns their bytes. Waits at most `limit` for freed memory in use
    /// by the device.
    pub fn give_back(&self, limit: Duration) -> u64 {
        let start = Instant::now();
        for known in self.pausables().tagged(&[]) {
            known.give_up(limit.saturating_sub(start.elapsed()));
        }
        if limit.is_zero() {
            self.pool.reap();
        } else {
            self.pool.wait_and_reap(limit);
        }
        self.pool.release_free(u64::MAX)
    }

    /// Releases free pages if they exceed `bytes`, and returns their bytes. Does not wait.
    pub fn give_back_above(&self, bytes: u64) -> u64 {
        self.pausables().tagged(&[]).iter().for_each(|known| known.poll_pending());
        self.pool.reap();
        if self.pool.stats().free_bytes > bytes { self.pool.release_free(u64::MAX) } else { 0 }
    }

    /// Makes room for `bytes` of a caller whose own driver allocation failed: [gives
    /// back](Self::give_back) pages, then asks reclaimers. Returns whether a retry is useful. The
    /// caller has no lock.
    pub fn make_room(&self, bytes: u64, limit: Duration) -> bool {
        let given = self.give_back(limit);
        let free = self.pool.driver().free_bytes().unwrap_or(u64::MAX);
        // No reclaimer can help a caller with its own limit, or beyond the device's memory.
        if free >= bytes || self.pool.refuse_hopeless(bytes).is_err() {
            return given > 0;
        }
        let helped = self.pool.ask_reclaimers(bytes - free, None);
        self.pool.release_free(u64::MAX) > 0 || helped || given > 0
    }

    /// Returns the current counts of the pool.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Returns the number of rings with streamed units, also in captured steps: a small copy to the
    /// device may wait for all their copies.
    #[must_use]
    pub fn streaming_rings(&self) -> u64 {
        self.streaming.load(Ordering::Relaxed)
    }

    pub(crate) fn streaming(&self) -> &AtomicU64 {
        &self.streaming
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        Arc::clone(&self.pool).retire();
    }
}
