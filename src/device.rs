//! Device: root object of the library, kept open by all objects on the device.

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

/// A device of this process: its driver, and the page pool of all its physical memory.
///
/// Arenas, spaces and blocks keep the device open, and the last one closes it. Memory then refused
/// by the driver or in use by the device is retried at the next opening of the same device. Opening
/// a device never waits for the driver of a different device.
#[derive(Debug)]
pub struct Device {
    pool: Arc<PagePool>,
    pausables: Pausables,
    /// Number of rings with streamed units.
    streaming: AtomicU64,
}

type Opened = HashMap<(&'static str, i32), (Weak<Device>, HostOptions)>;

/// Process-wide devices, by platform and number.
fn opened() -> &'static Mutex<Opened> {
    static OPENED: OnceLock<Mutex<Opened>> = OnceLock::new();
    OPENED.get_or_init(Mutex::default)
}

/// Peers admitted to process-wide devices, open or not.
fn admitted() -> &'static Mutex<HashMap<(&'static str, i32), Peers>> {
    static ADMITTED: OnceLock<Mutex<HashMap<(&'static str, i32), Peers>>> = OnceLock::new();
    ADMITTED.get_or_init(Mutex::default)
}

impl Device {
    /// Creates a device over the caller's driver, apart from process-wide devices. For tests and
    /// other platforms.
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
    /// As [`open`]. [`Error::DeviceInUse`] if the device is open with other host options, or
    /// without the requested [sharing](Self::sharing) or [RDMA access](Self::rdma). These are fixed
    /// at the first opening; a request for none accepts the device as opened.
    pub fn open(choice: DriverChoice, ordinal: i32, options: impl Into<DeviceOptions>) -> Result<Arc<Self>> {
        let options @ DeviceOptions { host, sharing, rdma, peers } = options.into();
        let asked = peers.without(Peers::one(ordinal));
        let driver = open(choice, ordinal, options)?;
        let platform = driver.info().platform;
        let granted = Handles::of(&*driver);
        let device = Self::with_driver(driver);
        // Requested before the device was open, so peer access was not checked then.
        let peers = admitted().lock().get(&(platform, ordinal)).copied().unwrap_or_default();
        device.admit(peers.among(device.driver().capabilities().peers).and(asked))?;
        let mut opened = opened().lock();
        if let Some((known, options)) = opened.get(&(platform, ordinal))
            && let Some(known) = known.upgrade()
        {
            // Only platforms with options compare options.
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

    /// Grants other devices of the platform access to all current and future mappings of this
    /// device. An arena's own option ([`Options::peers`](crate::Options::peers)) adds cost only to
    /// maps of the arena.
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

    /// Returns the kind of handles for sharing pages with other processes, as requested at the
    /// opening.
    #[must_use]
    pub fn sharing(&self) -> Handles {
        Handles::of(&**self.driver())
    }

    /// Returns true if network cards may access the pages, as requested at the opening.
    #[must_use]
    pub fn rdma(&self) -> bool {
        self.driver().rdma()
    }

    /// Returns the devices with access to all pages.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.pool.peers()
    }

    /// Returns the host pool, for contents of paused pages. Can be prepared ahead, limited and
    /// trimmed.
    #[must_use]
    pub fn host_pool(&self) -> &HostPool {
        self.pausables.host_pool()
    }

    pub(crate) fn pausables(&self) -> &Pausables {
        &self.pausables
    }

    /// Limits the physical bytes of the device's pool. `None`: no limit. No memory is released.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.pool.set_budget(bytes);
    }

    /// Creates an account below a second account or below the device: a budget for a tenant, a
    /// model or a kind of memory.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if an ancestor has no room for the guarantee;
    /// [`Error::InvalidArgument`] for a parent on a different device.
    pub fn account(&self, label: &str, below: Option<&Account>, limits: Limits) -> Result<Account> {
        Account::new(&self.pool, below, label.to_owned(), limits)
    }

    /// Registers a reclaimer, until dropped by its owner. Before an allocation fails, the reclaimer
    /// is asked if the device, its budget, or the budget of the reclaimer's
    /// [account](Reclaimer::account) is short.
    pub fn add_reclaimer(&self, reclaimer: &Arc<dyn Reclaimer>) {
        self.pool.add_reclaimer(reclaimer);
    }

    /// Releases free pages to the driver, and returns their bytes. Waits for freed memory still in
    /// use by the device, and retries calls refused earlier.
    ///
    /// # Errors
    /// Driver errors of the retry.
    pub fn trim(&self) -> Result<u64> {
        for known in self.pausables().tagged(&[]) {
            known.give_up(Duration::ZERO);
        }
        self.pool.trim()
    }

    /// Marks all arenas with a last replay on this stream, as [`Space::mark`](crate::Space::mark).
    /// Call before the stream is captured or destroyed, so other threads may replay in these arenas
    /// meanwhile.
    ///
    /// # Errors
    /// First error of [`ReplayOrder::mark`](crate::ReplayOrder::mark). All arenas are tried.
    pub fn mark(&self, stream: Stream) -> Result<()> {
        let all = self.pausables().tagged(&[]);
        all.iter().map(|known| known.mark_on(stream)).fold(Ok(()), Result::and)
    }

    /// Announces a capture without a space on this device. Its graph may read blocks of sealed
    /// spaces. So blocks freed from now on are treated as for spaces captured meanwhile. As long as
    /// the graph that writes the block lives, earlier graphs, eager work and leases do not use its
    /// memory.
    pub fn note_capture(&self) {
        self.pool.note_capture();
    }

    /// Releases free pages to the driver, and returns their bytes. Waits at most `limit` for freed
    /// memory still in use by the device. Without either, makes no driver call.
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

    /// Releases free pages to the driver if they exceed `bytes`, and returns their bytes. First
    /// polls blocks freed while in use by a stream. Does not wait.
    pub fn give_back_above(&self, bytes: u64) -> u64 {
        self.pausables().tagged(&[]).iter().for_each(|known| known.poll_pending());
        self.pool.reap();
        if self.pool.stats().free_bytes > bytes { self.pool.release_free(u64::MAX) } else { 0 }
    }

    /// Makes room for `bytes` of a caller whose own driver allocation failed. Returns true if a
    /// retry is useful. As [`give_back`](Self::give_back). If the device is still short, asks
    /// reclaimers for the missing bytes. The caller has no lock.
    pub fn make_room(&self, bytes: u64, limit: Duration) -> bool {
        let given = self.give_back(limit);
        let free = self.pool.driver().free_bytes().unwrap_or(u64::MAX);
        // The caller has its own limit, or asks for more than the device has: no reclaimer can
        // help.
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

    /// Returns the number of rings with streamed units, including rings kept alive by captured
    /// steps. A small copy to the device may wait for all copies of these rings.
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
