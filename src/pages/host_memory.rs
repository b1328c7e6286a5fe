//! Host memory of the library's own: mapped, faulted in by threads, registered with the device where it may be.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::driver::SharedDriver;
use crate::error::{Error, Result};

/// Threads that fault memory in or copy it. On a machine of 16 cores huge pages came at 6.1 to 7.2 GiB/s by 8 and at 10.1 to 11.9 by 16.
const THREADS: usize = 16;
/// What is worth a thread of its own, in bytes.
const SHARE: usize = 4 << 20;
/// How often a registration is ended before the memory is left to the process.
const TRIES: u32 = 3;
/// The smallest page of the machine.
const FRAME: usize = 4096;
/// A huge page of the machine: a five-hundredth of the faults, and of the pages that a registration pins.
const HUGE: usize = 2 << 20;

/// Mapped host memory. Dropping it ends its registration and gives it back; the device does not use it then.
pub(super) struct HostMemory {
    driver: SharedDriver,
    base: usize,
    bytes: usize,
    registered: bool,
}

impl HostMemory {
    /// Maps memory and faults it in. Not registered yet.
    ///
    /// # Errors
    /// [`Error::OutOfHostMemory`], with nothing left mapped.
    pub(super) fn new(driver: &SharedDriver, bytes: usize) -> Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // Where huge pages can lie: what is too much goes back at once.
        let all = bytes + if bytes >= HUGE { HUGE } else { 0 };
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nobody else's memory.
        let found =
            unsafe { mmap_anonymous(ptr::null_mut(), all, prot, flags) }.map_err(|_| short(bytes))? as usize;
        let base = if bytes >= HUGE { found.next_multiple_of(HUGE) } else { found };
        for (at, bytes) in [(found, base - found), (base + bytes, found + all - base - bytes)] {
            // SAFETY: a part of the mapping that nobody knows yet. If it stays it is addresses only.
            if bytes > 0 && unsafe { munmap(at as *mut c_void, bytes) }.is_err() {
                tracing::debug!(bytes, "addresses stay with the process");
            }
        }
        // SAFETY: as above. Where the machine has no huge pages to give, small ones do.
        let _ = unsafe { madvise(base as *mut c_void, bytes, Advice::LinuxHugepage) };
        let memory = Self { driver: SharedDriver::clone(driver), base, bytes, registered: false };
        let failed = AtomicBool::new(false);
        in_shares(bytes, |start, len| {
            if !fault_in(base + start, len) {
                failed.store(true, Ordering::Relaxed);
            }
        });
        if failed.into_inner() { Err(short(bytes)) } else { Ok(memory) }
    }

    pub(super) fn base(&self) -> usize {
        self.base
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn registered(&self) -> bool {
        self.registered
    }

    /// Registers it, unless it is.
    pub(super) fn register(&mut self) -> Result<()> {
        if !self.registered {
            // SAFETY: mapped until this object is dropped, which ends the registration first.
            unsafe { self.driver.host_register(self.base as *mut u8, self.bytes) }?;
            self.registered = true;
        }
        Ok(())
    }

    /// Ends the registration, if there is one. No copy is under way.
    pub(super) fn unregister(&mut self) -> Result<()> {
        if self.registered {
            // SAFETY: registered by this object, once; its user says that no copy is under way.
            unsafe { self.driver.host_unregister(self.base as *mut u8) }?;
            self.registered = false;
        }
        Ok(())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let mut ended = self.unregister();
        for _ in 1..TRIES {
            if ended.is_err() {
                ended = self.unregister();
            }
        }
        if let Err(error) = ended {
            // What the driver believes to be there must stay there.
            tracing::error!(%error, bytes = self.bytes, "the driver does not end a registration; the memory stays with the process");
            return;
        }
        // SAFETY: mapped by this object, which nobody uses any more.
        if unsafe { munmap(self.base as *mut c_void, self.bytes) }.is_err() {
            tracing::error!(bytes = self.bytes, "host memory could not be unmapped");
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({:#x} + {:#x}, registered: {})", self.base, self.bytes, self.registered)
    }
}

fn short(bytes: usize) -> Error {
    Error::OutOfHostMemory { requested: bytes as u64, held: 0, limit: 0, available: None }
}

/// Makes the kernel put memory behind a part of a fresh mapping; whether it had that much.
fn fault_in(at: usize, bytes: usize) -> bool {
    // SAFETY: inside a private mapping of ours that nobody knows yet.
    match unsafe { madvise(at as *mut c_void, bytes, Advice::LinuxPopulateWrite) } {
        Ok(()) => true,
        // Kernels before 5.14 do not know the advice: a write to every frame.
        Err(Errno::INVAL) => {
            for frame in (at..at + bytes).step_by(FRAME) {
                // SAFETY: as above.
                unsafe { ptr::write_volatile(frame as *mut u8, 0) };
            }
            true
        }
        Err(_) => false,
    }
}

/// Calls `work` for parts of `bytes`, by several threads if that is worth it; parts are multiples of a huge page but for the last.
pub(super) fn in_shares(bytes: usize, work: impl Fn(usize, usize) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let shares = (bytes / SHARE).clamp(1, threads);
    // No two threads fault in one huge page.
    let share = bytes.div_ceil(shares).next_multiple_of(HUGE);
    let work = &work;
    std::thread::scope(|scope| {
        for start in (share..bytes).step_by(share) {
            let len = share.min(bytes - start);
            let started = std::thread::Builder::new().spawn_scoped(scope, move || work(start, len));
            if started.is_err() {
                work(start, len);
            }
        }
        work(0, share.min(bytes));
    });
}

/// Copies host bytes, by several threads if that is worth it.
///
/// # Safety
/// Both ranges are memory of this process that nobody else writes meanwhile, and do not overlap.
pub(super) unsafe fn copy_bytes(from: usize, to: usize, bytes: usize) {
    in_shares(bytes, |start, len| {
        // SAFETY: the caller's contract; the parts of two threads do not overlap.
        unsafe { ptr::copy_nonoverlapping((from + start) as *const u8, (to + start) as *mut u8, len) };
    });
}
