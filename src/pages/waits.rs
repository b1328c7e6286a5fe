//! Captures and waits: which captures there are, since a graph may read what lived during its capture; and on some platforms the one forbids the
//! other ([`Timeline::may_wait`](crate::driver::Timeline::may_wait)).

use std::fmt;
use std::sync::Arc;

use super::PagePool;
use crate::driver::SharedDriver;
use crate::error::Result;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The captures of a device.
#[derive(Debug, Default)]
pub(super) struct Captures {
    begun: AtomicU64,
    over: AtomicU64,
}

/// Something of a device is being captured as long as this lives.
pub(crate) struct Capturing(Arc<PagePool>);

impl PagePool {
    /// A capture begins.
    pub(crate) fn capture(self: &Arc<Self>) -> Capturing {
        self.captures.begun.fetch_add(1, Ordering::SeqCst);
        self.driver().capture_begins();
        Capturing(Arc::clone(self))
    }

    /// A capture of somebody else's begins. Nobody says when it ends, so a space that is sealed while it goes on is taken for alone.
    pub(crate) fn note_capture(&self) {
        self.captures.begun.fetch_add(1, Ordering::SeqCst);
        self.captures.over.fetch_add(1, Ordering::SeqCst);
    }

    /// How many captures have begun.
    pub(crate) fn captures(&self) -> u64 {
        self.captures.begun.load(Ordering::SeqCst)
    }

    /// As many, unless one is under way.
    pub(crate) fn captures_if_over(&self) -> Option<u64> {
        // In this order: one that begins and ends in between is under way.
        let over = self.captures.over.load(Ordering::SeqCst);
        Some(self.captures()).filter(|begun| *begun == over)
    }

    /// Begins something that has to be waited for in the end: its waits go on if a capture begins meanwhile.
    ///
    /// # Errors
    /// [`Error::DeviceCapturing`](crate::Error::DeviceCapturing).
    pub(crate) fn begin_waits(&self) -> Result<Wait<'_>> {
        self.driver().may_wait()?;
        Ok(Wait::begin(self.driver()))
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        self.0.driver().capture_ends();
        self.0.captures.over.fetch_add(1, Ordering::SeqCst);
    }
}

impl fmt::Debug for Capturing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Capturing")
    }
}

/// This thread waits for what it gave to the device when it might.
pub(crate) struct Wait<'a>(&'a SharedDriver);

impl<'a> Wait<'a> {
    pub(super) fn begin(driver: &'a SharedDriver) -> Self {
        driver.wait_begins();
        Self(driver)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.wait_ends();
    }
}
