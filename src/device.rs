//! A device: its driver and its one page pool.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use crate::driver::{DriverChoice, DriverKind, HostOptions, SharedDriver, open};
use crate::error::{Error, Result};
use crate::gate::CaptureGate;
use crate::pages::{PagePool, PoolStats};
use crate::sync::Mutex;

/// One device of this process. All its physical pages come from one pool, so that they can change hands.
#[derive(Debug)]
pub struct Device {
    pool: Arc<PagePool>,
    gate: CaptureGate,
}

type Opened = HashMap<(DriverKind, i32), (Weak<Device>, HostOptions)>;

impl Device {
    /// A device over a driver of the caller's own, apart from the process-wide ones: for tests and other platforms.
    #[must_use]
    pub fn with_driver(driver: SharedDriver) -> Arc<Self> {
        Arc::new(Self { pool: PagePool::new(driver), gate: CaptureGate::default() })
    }

    /// The process-wide device `ordinal`, opened if it is not open. It closes when its last user drops it.
    ///
    /// # Errors
    /// Those of [`open`]; [`Error::DeviceInUse`] if the host device is open with other options.
    pub fn open(choice: DriverChoice, ordinal: i32, host: HostOptions) -> Result<Arc<Self>> {
        static OPENED: OnceLock<Mutex<Opened>> = OnceLock::new();
        let driver = open(choice, ordinal, host)?;
        let kind = driver.info().kind;
        let mut opened = OPENED.get_or_init(Mutex::default).lock();
        if let Some((device, options)) = opened.get(&(kind, ordinal))
            && let Some(device) = device.upgrade()
        {
            if kind == DriverKind::Host && *options != host {
                return Err(Error::DeviceInUse { driver: kind, ordinal });
            }
            return Ok(device);
        }
        let device = Self::with_driver(driver);
        opened.insert((kind, ordinal), (Arc::downgrade(&device), host));
        Ok(device)
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

    /// Keeps captures and replays of this device apart, if an engine wants that: see [`CaptureGate`].
    #[must_use]
    pub fn gate(&self) -> &CaptureGate {
        &self.gate
    }

    /// Limits the bytes of physical memory the device's pool may hold; `None`: no limit. Nothing is taken away.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.pool.set_budget(bytes);
    }

    /// The pool's counts as they are now.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}
