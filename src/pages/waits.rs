//! Captures and waits, for platforms where the one forbids the other ([`Timeline::may_wait`](crate::driver::Timeline::may_wait)).

use std::fmt;

use super::PagePool;
use crate::driver::SharedDriver;
use crate::error::Result;

/// Something of a device is being captured as long as this lives.
pub(crate) struct Capturing(SharedDriver);

impl PagePool {
    /// A capture begins.
    pub(crate) fn capture(&self) -> Capturing {
        self.driver().capture_begins();
        Capturing(SharedDriver::clone(self.driver()))
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
        self.0.capture_ends();
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
