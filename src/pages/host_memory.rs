//! Host memory: mapped, faulted in by several threads, and registered with the device if possible.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::driver::SharedDriver;
use crate::error::{Error, Result};

/// On a 16-core machine, huge pages were faulted in at 6.1 to 7.2 GiB/s by 8 threads and at 10.1 to
/// 11.9 by 16.
const THREADS: usize = 16;
/// Smallest share of a thread in bytes.
const SHARE: usize = 4 << 20;
/// Attempts to end a registration before the memory is leaked.
const TRIES: u32 = 3;
/// Smallest page of the machine in bytes.
const FRAME: usize = 4096;
/// A five-hundredth of the faults and of the pages pinned by a registration.
const HUGE: usize = 2 << 20;

/// Drop unregisters and unmaps; the device must not use the memory then.
pub(super) struct HostMemory {
    driver: SharedDriver,
    base: usize,
    bytes: usize,
    registered: bool,
}

impl HostMemory {
    /// Maps memory and faults it in, without registration. Maps nothing on error.
    pub(super) fn new(driver: &SharedDriver, bytes: usize) -> Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // Aligned to a huge page; the surplus is unmapped below.
        let all = bytes + if bytes >= HUGE { HUGE } else { 0 };
        // SAFETY: a new anonymous mapping, at an address chosen by the kernel.
        let found =
            unsafe { mmap_anonymous(ptr::null_mut(), all, prot, flags) }.map_err(|_| short(bytes))? as usize;
        let base = if bytes >= HUGE { found.next_multiple_of(HUGE) } else { found };
        for (at, bytes) in [(found, base - found), (base + bytes, found + all - base - bytes)] {
            // SAFETY: a part of the mapping without users; a failure leaks addresses only.
            if bytes > 0 && unsafe { munmap(at as *mut c_void, bytes) }.is_err() {
                tracing::debug!(bytes, "addresses stay with the process");
            }
        }
        // SAFETY: as above; without huge pages the kernel uses small pages.
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

    pub(super) fn register(&mut self) -> Result<()> {
        if !self.registered {
            // SAFETY: mapped until the drop, which unregisters first.
            unsafe { self.driver.host_register(self.base as *mut u8, self.bytes) }?;
            self.registered = true;
        }
        Ok(())
    }

    /// No copy may use the memory.
    pub(super) fn unregister(&mut self) -> Result<()> {
        if self.registered {
            // SAFETY: registered once, by this object; the caller has no running copies.
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
            tracing::error!(%error, bytes = self.bytes, "the driver does not end a registration; the memory stays with the process");
            return;
        }
        // SAFETY: mapped by this object, which has no users.
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

/// Returns false if the machine lacks memory.
fn fault_in(at: usize, bytes: usize) -> bool {
    // SAFETY: a part of this object's mapping, without users.
    match unsafe { madvise(at as *mut c_void, bytes, Advice::LinuxPopulateWrite) } {
        Ok(()) => true,
        // Kernels before 5.14 lack `MADV_POPULATE_WRITE`.
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

/// Calls `work` for parts of `bytes`, on several threads for long ranges. Parts are multiples of a
/// huge page.
pub(super) fn in_shares(bytes: usize, work: impl Fn(usize, usize) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let shares = (bytes / SHARE).clamp(1, threads);
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

/// Copies host bytes, on several threads for long ranges.
///
/// # Safety
/// Both ranges are memory of this process, do not overlap, and are not written meanwhile.
pub(super) unsafe fn copy_bytes(from: usize, to: usize, bytes: usize) {
    in_shares(bytes, |start, len| {
        // SAFETY: the caller's contract; parts of two threads do not overlap.
        unsafe { ptr::copy_nonoverlapping((from + start) as *const u8, (to + start) as *mut u8, len) };
    });
}
