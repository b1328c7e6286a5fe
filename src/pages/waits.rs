//! Counts captures, because a graph may read blocks live during its capture. On some platforms a
//! capture also forbids waits ([`Timeline::may_wait`](crate::driver::Timeline::may_wait)).

use std::fmt;
use std::sync::Arc;

use super::PagePool;
use crate::driver::SharedDriver;
use crate::error::Result;
use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct Captures {
    begun: AtomicU64,
    over: AtomicU64,
}

pub(crate) struct Capturing(Arc<PagePool>);

impl PagePool {
    pub(crate) fn capture(self: &Arc<Self>) -> Capturing {
        self.captures.begun.fetch_add(1, Ordering::SeqCst);
        self.driver().capture_begins();
        Capturing(Arc::clone(self))
    }

    /// Counts a capture outside the library, of unknown end: a space sealed meanwhile counts as
    /// captured alone.
    pub(crate) fn note_capture(&self) {
        self.captures.begun.fetch_add(1, Ordering::SeqCst);
        self.captures.over.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn captures(&self) -> u64 {
        self.captures.begun.load(Ordering::SeqCst)
    }

    /// Captures begun; `None` during a capture.
    pub(crate) fn captures_if_over(&self) -> Option<u64> {
        // Read first: a capture within the two reads counts as active.
        let over = self.captures.over.load(Ordering::SeqCst);
        Some(self.captures()).filter(|begun| *begun == over)
    }

    /// Begins work with a later wait, allowed even if a capture begins meanwhile.
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
