//! A device: the root that everything alive holds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::driver::{DeviceOptions, DriverChoice, Handles, HostOptions, SharedDriver, open};
use crate::error::{Error, Result};
use crate::gate::CaptureGate;
use crate::pages::{Account, HostPool, Limits, PagePool, Pausables, PoolStats, Reclaimer, retry_orphans};
use crate::sync::Mutex;
use crate::units::{Peers, Stream};

mod exports;
mod peers;
mod sockets;

pub use exports::{ExportedPage, PagePin};
pub use peers::{PeerExtent, PeerMap, PeerPage};
pub use sockets::{MOST_DESCRIPTORS, receive_descriptors, send_descriptors};

/// One device of this process: its driver, and the one pool that all its physical pages come from.
///
/// Arenas, spaces and blocks hold it. When the last of them is gone it closes, and what the driver would not take back then, or what
/// the device may still use, is tried again when it is opened again. No other device's opening waits for its driver.
#[derive(Debug)]
pub struct Device {
    pool: Arc<PagePool>,
    gate: CaptureGate,
    host: HostPool,
    pausables: Pausables,
    /// Rings with units that stream.
    streaming: AtomicU64,
}

type Opened = HashMap<(&'static str, i32), (Weak<Device>, HostOptions)>;

/// The process-wide devices, by platform and number.
fn opened() -> &'static Mutex<Opened> {
    static OPENED: OnceLock<Mutex<Opened>> = OnceLock::new();
    OPENED.get_or_init(Mutex::default)
}

/// Who was admitted to the process-wide devices, open or not.
fn admitted() -> &'static Mutex<HashMap<(&'static str, i32), Peers>> {
    static ADMITTED: OnceLock<Mutex<HashMap<(&'static str, i32), Peers>>> = OnceLock::new();
    ADMITTED.get_or_init(Mutex::default)
}

impl Device {
    /// A device over a driver of the caller's own, apart from the process-wide ones: for tests and other platforms.
    #[must_use]
    pub fn with_driver(driver: SharedDriver) -> Arc<Self> {
        retry_orphans(&driver);
        let pool = PagePool::new(driver);
        let host = HostPool::new(&pool);
        let (gate, pausables) = (CaptureGate::default(), Pausables::default());
        Arc::new(Self { pool, gate, host, pausables, streaming: AtomicU64::new(0) })
    }

    /// The process-wide device `ordinal`, opened if it is not open. It closes when nothing of it is alive any more.
    ///
    /// # Errors
    /// Those of [`open`]; [`Error::DeviceInUse`] if the host device is open with other options, or any without the [sharing](Self::sharing) or the
    /// [reach for network cards](Self::rdma) that is asked for now, which are its pages' for good. (Asking for none takes it as it is.)
    pub fn open(choice: DriverChoice, ordinal: i32, options: impl Into<DeviceOptions>) -> Result<Arc<Self>> {
        let options @ DeviceOptions { host, sharing, rdma, peers } = options.into();
        let asked = peers.without(Peers::one(ordinal));
        let driver = open(choice, ordinal, options)?;
        let platform = driver.info().platform;
        let granted = Handles::of(&*driver);
        let device = Self::with_driver(driver);
        // Nobody could say then whether they can be peers.
        let peers = admitted().lock().get(&(platform, ordinal)).copied().unwrap_or_default();
        device.admit(peers.among(device.driver().capabilities().peers).and(asked))?;
        let mut opened = opened().lock();
        if let Some((known, options)) = opened.get(&(platform, ordinal))
            && let Some(known) = known.upgrade()
        {
            // Where a platform takes options.
            let same = (*options == host || known.driver().info().options.is_none())
                && (sharing == Handles::None || known.sharing() >= granted)
                && (known.rdma() || !rdma);
            // Neither goes under the lock.
            drop(opened);
            if !same {
                return Err(Error::DeviceInUse { driver: platform, ordinal });
            }
            return known.admit(asked).map(|()| known);
        }
        opened.insert((platform, ordinal), (Arc::downgrade(&device), host));
        Ok(device)
    }

    /// The process-wide device of a platform if it is open.
    #[cfg(feature = "bridge")]
    pub(crate) fn opened(platform: &'static str, ordinal: i32) -> Option<Arc<Self>> {
        opened().lock().get(&(platform, ordinal)).and_then(|(device, _)| device.upgrade())
    }

    /// Lets other devices of the platform read and write all pages of this one, those that are mapped already and all that will be. An
    /// arena's own option ([`Options::peers`](crate::Options::peers)) costs the maps of that arena only.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a device that cannot, with nothing changed; what the driver says of a page that is mapped already:
    /// then what is mapped later has them all the same.
    pub fn admit(&self, peers: Peers) -> Result<()> {
        if peers.is_empty() { Ok(()) } else { self.pool.admit(peers) }
    }

    /// As [`admit`](Self::admit), for the process-wide device of a platform: at once if it is open, else when it is opened.
    #[cfg(feature = "bridge")]
    pub(crate) fn admit_to(platform: &'static str, ordinal: i32, peers: Peers) -> Result<()> {
        let device = Self::opened(platform, ordinal);
        if let Some(device) = &device {
            device.driver().capabilities().require_peers(peers)?;
        }
        {
            let mut admitted = admitted().lock();
            let known = admitted.entry((platform, ordinal)).or_default();
            *known = known.and(peers);
        }
        // Also one that was opened meanwhile.
        Self::opened(platform, ordinal).map_or(Ok(()), |device| device.admit(peers))
    }

    /// The page pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        self.pool.driver()
    }

    /// What other processes can be given its pages by, as was asked for when it was opened.
    #[must_use]
    pub fn sharing(&self) -> Handles {
        Handles::of(&**self.driver())
    }

    /// Whether network cards may read and write its pages, as was asked for when it was opened.
    #[must_use]
    pub fn rdma(&self) -> bool {
        self.driver().rdma()
    }

    /// The other devices that may read and write all its pages.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.pool.peers()
    }

    /// The host memory that contents wait in while their pages are gone: prepare it ahead, bound it, give it back.
    #[must_use]
    pub fn host_pool(&self) -> &HostPool {
        &self.host
    }

    /// What of this device can step aside, and who wants to know.
    pub(crate) fn pausables(&self) -> &Pausables {
        &self.pausables
    }

    /// Keeps captures and replays of this device apart, if an engine wants that: see [`CaptureGate`].
    #[must_use]
    pub fn gate(&self) -> &CaptureGate {
        &self.gate
    }

    /// Limits the bytes of physical memory the device's pool may hold; `None`: no limit. Nothing is taken away.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.pool.set_budget(bytes);
    }

    /// A new account below another one of this device, or below the device: a budget for a tenant, a model, a kind of memory.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if the accounts above have no room for its least; [`Error::InvalidArgument`] for one of another device.
    pub fn account(&self, label: &str, below: Option<&Account>, limits: Limits) -> Result<Account> {
        Account::new(&self.pool, below, label.to_owned(), limits)
    }

    /// Asks `reclaimer` for memory when the device is short, its budget, or that of the [account](Reclaimer::account) that it names, before any allocation
    /// fails; as long as it lives.
    pub fn add_reclaimer(&self, reclaimer: &Arc<dyn Reclaimer>) {
        self.pool.add_reclaimer(reclaimer);
    }

    /// Gives the free pages back to the driver, after waiting for what the device still uses of what is gone; their bytes. Tries again
    /// what the driver refused to take back earlier.
    ///
    /// # Errors
    /// What the driver refuses again.
    pub fn trim(&self) -> Result<u64> {
        for known in self.pausables().tagged(&[]) {
            known.give_up(Duration::ZERO);
        }
        self.pool.trim()
    }

    /// Before a stream is captured or destroyed, by whomever: arenas whose last replay was there are marked behind it, so that other threads may replay
    /// in them meanwhile. As [`Space::mark`](crate::Space::mark) in each of those; nothing for the others.
    ///
    /// # Errors
    /// Those of [`ReplayOrder::mark`](crate::ReplayOrder::mark), the first one; all were tried.
    pub fn mark(&self, stream: Stream) -> Result<()> {
        let all = self.pausables().tagged(&[]);
        all.iter().map(|known| known.mark_on(stream)).fold(Ok(()), Result::and)
    }

    /// A capture begins on this device for which no space was opened, by whomever: its graph may read blocks of spaces that are sealed already. What is
    /// freed from now on is there for it as for the graphs of spaces captured meanwhile: neither graphs captured before, nor eager work, nor leases come to lie
    /// there as long as the graph lives that writes it.
    pub fn note_capture(&self) {
        self.pool.note_capture();
    }

    /// Gives the free pages back to the driver, and what is gone once the device is done with it, which is waited for no longer than
    /// `limit`; their bytes. Asks nothing of the driver if there is neither.
    pub fn give_back(&self, limit: Duration) -> u64 {
        let start = Instant::now();
        for known in self.pausables().tagged(&[]) {
            known.give_up(limit.saturating_sub(start.elapsed()));
        }
        if limit.is_zero() {
            self.pool.finish_done();
        } else {
            self.pool.finish_waiting(limit);
        }
        self.pool.release_free(u64::MAX)
    }

    /// Gives the free pages back to the driver if they come to more than `bytes` bytes; their bytes. Blocks
    /// that were freed while a stream could still read them are looked at again before. Waits for nothing.
    pub fn give_back_above(&self, bytes: u64) -> u64 {
        self.pausables().tagged(&[]).iter().for_each(|known| known.look_again());
        self.pool.finish_done();
        if self.pool.stats().free_bytes > bytes { self.pool.release_free(u64::MAX) } else { 0 }
    }

    /// Room for `bytes` of somebody who takes memory from the driver himself and found none; whether it is worth trying again. As
    /// [`give_back`](Self::give_back), and where the device is short of it still, the reclaimers are asked, with what is missing. The caller holds no lock.
    pub fn make_room(&self, bytes: u64, limit: Duration) -> bool {
        let given = self.give_back(limit);
        let free = self.pool.driver().free_bytes().unwrap_or(u64::MAX);
        // A limit of his own, or more than there is: nobody could help.
        if free >= bytes || self.pool.refuse_hopeless(bytes).is_err() {
            return given > 0;
        }
        let relieved = self.pool.ask(bytes - free, None);
        self.pool.release_free(u64::MAX) > 0 || relieved || given > 0
    }

    /// The pool's counts as they are now.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    /// Rings with units that stream, those that only captured steps keep included. A small copy to the device may have to wait for all that they copy.
    #[must_use]
    pub fn streaming_rings(&self) -> u64 {
        self.streaming.load(Ordering::Relaxed)
    }

    /// The count of them.
    pub(crate) fn streaming(&self) -> &AtomicU64 {
        &self.streaming
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        Arc::clone(&self.pool).retire();
    }
}
