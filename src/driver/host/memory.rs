//! A pretend device's memory: one memfd a page, mapped into this process by the rules of the CUDA driver.
//!
//! Aliasing, contents and use after unmap are real: a page mapped at two addresses shows one contents, and an unmapped
//! address faults. The rules are checked, not assumed: what CUDA refuses is refused here (design measured on an H200, driver
//! 580; `tests/conformance.rs` holds both to them).
//!
//! This file names nothing of the crate, because the stand-ins of the tests are built on the very same source.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

#[path = "exports.rs"]
mod exports;

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It breaks a rule; the text says which.
    Invalid(&'static str),
    /// The device cannot do it.
    NotSupported(&'static str),
    /// The device's memory is used up.
    OutOfMemory,
    /// No addresses, or no further mappings, are to be had from the operating system.
    OutOfAddresses,
    /// The process may not open another file descriptor.
    OutOfDescriptors,
}

struct Page {
    memory: OwnedFd,
    len: u64,
    /// Handles given out and not yet released.
    handles: u32,
    mappings: u32,
    /// Its memory is another's: it takes none of this device.
    imported: bool,
}

struct Mapping {
    len: u64,
    page: u64,
    accessible: bool,
    /// Other devices that may read and write it, a bit for each.
    peers: u64,
}

#[derive(Default)]
struct State {
    last_handle: u64,
    used: u64,
    pages: HashMap<u64, Page>,
    /// Base to length.
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
}

/// What is left, for tests that must find nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Pages whose memory is held.
    pub pages: usize,
    /// Reservations.
    pub reservations: usize,
    /// Mappings.
    pub mappings: usize,
}

/// The memory of one pretend device.
pub struct Memory {
    granularity: u64,
    total: u64,
    state: Mutex<State>,
}

impl Memory {
    /// A device of `total` bytes whose pages and addresses are multiples of `granularity`, a power of two of at least 4096.
    pub fn new(granularity: u64, total: u64) -> Self {
        Self { granularity, total, state: Mutex::default() }
    }

    /// What mapped lengths and addresses are multiples of.
    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Bytes of the device.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes not held by any page.
    pub fn free(&self) -> u64 {
        self.total - self.state.lock().used
    }

    /// What has not been given back.
    pub fn leftovers(&self) -> Leftovers {
        let state = self.state.lock();
        Leftovers {
            pages: state.pages.len(),
            reservations: state.reservations.len(),
            mappings: state.mappings.len(),
        }
    }

    fn granular(&self, values: &[u64]) -> Result<(), Refusal> {
        if values.iter().all(|v| v.is_multiple_of(self.granularity)) {
            Ok(())
        } else {
            Err(Refusal::Invalid("not a multiple of the granularity"))
        }
    }

    /// Reserves addresses at a multiple of the granularity.
    pub fn reserve(&self, len: u64) -> Result<u64, Refusal> {
        self.granular(&[len])?;
        if len == 0 {
            return Err(Refusal::Invalid("a reservation of nothing"));
        }
        // The kernel aligns to 4 KiB only: take one granule more and give the ends back.
        let padded = len.checked_add(self.granularity).ok_or(Refusal::OutOfAddresses)?;
        let padded = usize::try_from(padded).map_err(|_| Refusal::OutOfAddresses)?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nobody else's memory.
        let raw = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                padded,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|_| Refusal::OutOfAddresses)? as u64;
        let base = raw.next_multiple_of(self.granularity);
        for (start, end) in [(raw, base), (base + len, raw + padded as u64)] {
            if start < end {
                // SAFETY: the range lies inside the mapping made above, which nobody else knows yet. Failing to trim it
                // only wastes addresses.
                let _ = unsafe { munmap(start as *mut c_void, (end - start) as usize) };
            }
        }
        self.state.lock().reservations.insert(base, len);
        Ok(base)
    }

    /// Gives a whole reservation back; nothing may be mapped in it.
    pub fn free_addresses(&self, base: u64, len: u64) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        if state.reservations.get(&base) != Some(&len) {
            return Err(Refusal::Invalid("not a reservation"));
        }
        if state.mappings.range(base..base + len).next().is_some() {
            return Err(Refusal::Invalid("still mapped"));
        }
        // SAFETY: the range is ours by the check above and holds no page.
        unsafe { munmap(base as *mut c_void, len as usize) }.map_err(|_| Refusal::OutOfAddresses)?;
        state.reservations.remove(&base);
        Ok(())
    }

    /// Creates a page and returns its handle.
    pub fn create(&self, len: u64) -> Result<u64, Refusal> {
        self.granular(&[len])?;
        let mut state = self.state.lock();
        if len == 0 {
            return Err(Refusal::Invalid("a page of nothing"));
        }
        if len > self.total - state.used {
            return Err(Refusal::OutOfMemory);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("vmmgraph-page", flags).map_err(|e| match e {
            Errno::MFILE | Errno::NFILE => Refusal::OutOfDescriptors,
            _ => Refusal::OutOfMemory,
        })?;
        ftruncate(&memory, len).map_err(|_| Refusal::OutOfMemory)?;
        state.used += len;
        Ok(state.enter(Page { memory, len, handles: 1, mappings: 0, imported: false }))
    }

    /// Gives one handle back. The memory stays until the last mapping is gone too.
    pub fn release(&self, handle: u64) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let page =
            state.pages.get_mut(&handle).filter(|p| p.handles > 0).ok_or(Refusal::Invalid("not a page"))?;
        page.handles -= 1;
        state.collect(handle);
        Ok(())
    }

    /// Another handle to the page mapped at an address; it must be released as well.
    #[allow(dead_code, reason = "only stand-ins offer this")]
    pub fn retain_at(&self, at: u64) -> Result<u64, Refusal> {
        let mut state = self.state.lock();
        let (_, mapping) = state.mapping_over(at).ok_or(Refusal::Invalid("nothing is mapped there"))?;
        let handle = mapping.page;
        if let Some(page) = state.pages.get_mut(&handle) {
            page.handles += 1;
        }
        Ok(handle)
    }

    /// Maps a whole page at a free place of a reservation, not yet accessible.
    pub fn map(&self, at: u64, len: u64, offset: u64, handle: u64) -> Result<(), Refusal> {
        self.granular(&[at, len, offset])?;
        let mut state = self.state.lock();
        let end = at.checked_add(len).ok_or(Refusal::Invalid("beyond the address space"))?;
        let page =
            state.pages.get(&handle).filter(|p| p.handles > 0).ok_or(Refusal::Invalid("not a page"))?;
        if len == 0 || offset.checked_add(len).is_none_or(|e| e > page.len) {
            return Err(Refusal::Invalid("beyond the page"));
        }
        if offset != 0 || len != page.len {
            return Err(Refusal::NotSupported("a page is mapped whole"));
        }
        let inside = state.reservations.range(..=at).next_back().is_some_and(|(base, n)| end <= base + n);
        if !inside {
            return Err(Refusal::Invalid("not reserved"));
        }
        if state.overlapping(at, end) {
            return Err(Refusal::Invalid("already mapped"));
        }
        // SAFETY: the range lies inside a reservation of ours in which nothing is mapped, so no live memory is replaced.
        unsafe {
            mmap(
                at as *mut c_void,
                len as usize,
                ProtFlags::empty(),
                MapFlags::SHARED | MapFlags::FIXED,
                &page.memory,
                0,
            )
        }
        .map_err(|_| Refusal::OutOfAddresses)?;
        state.mappings.insert(at, Mapping { len, page: handle, accessible: false, peers: 0 });
        if let Some(page) = state.pages.get_mut(&handle) {
            page.mappings += 1;
        }
        Ok(())
    }

    /// Makes a range of whole, adjoining mappings readable and writable.
    pub fn set_access(&self, at: u64, len: u64) -> Result<(), Refusal> {
        self.granular(&[at, len])?;
        let mut state = self.state.lock();
        let end = state.whole_mappings(at, len)?;
        // SAFETY: the range consists of mappings of ours, by the check above.
        unsafe { mprotect(at as *mut c_void, len as usize, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|_| Refusal::OutOfAddresses)?;
        state.mappings.range_mut(at..end).for_each(|(_, m)| m.accessible = true);
        Ok(())
    }

    /// Lets other devices, a bit for each, read and write a range of whole, adjoining mappings too. They are all this process.
    pub fn grant(&self, at: u64, len: u64, peers: u64) -> Result<(), Refusal> {
        self.granular(&[at, len])?;
        let mut state = self.state.lock();
        let end = state.whole_mappings(at, len)?;
        state.mappings.range_mut(at..end).for_each(|(_, m)| m.peers |= peers);
        Ok(())
    }

    /// The other devices that may read and write what is mapped at an address, a bit for each.
    pub fn granted(&self, at: u64) -> u64 {
        self.state.lock().mapping_over(at).map_or(0, |(_, mapping)| mapping.peers)
    }

    /// Unmaps a range of whole, adjoining mappings.
    pub fn unmap(&self, at: u64, len: u64) -> Result<(), Refusal> {
        self.granular(&[at, len])?;
        let mut state = self.state.lock();
        let end = state.whole_mappings(at, len)?;
        // SAFETY: the range consists of mappings of ours; the caller says that nobody uses them any more.
        unsafe {
            mmap_anonymous(
                at as *mut c_void,
                len as usize,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
            )
        }
        .map_err(|_| Refusal::OutOfAddresses)?;
        let starts: Vec<u64> = state.mappings.range(at..end).map(|(start, _)| *start).collect();
        for start in starts {
            if let Some(mapping) = state.mappings.remove(&start) {
                if let Some(page) = state.pages.get_mut(&mapping.page) {
                    page.mappings -= 1;
                }
                state.collect(mapping.page);
            }
        }
        Ok(())
    }

    /// Where the mapping over an address begins, and its length.
    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn mapping_at(&self, at: u64) -> Option<(u64, u64)> {
        self.state.lock().mapping_over(at).map(|(start, mapping)| (start, mapping.len))
    }

    /// Where the first mapping of the reservation around an address begins.
    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn first_mapping(&self, at: u64) -> Option<u64> {
        let state = self.state.lock();
        let (base, len) = state.reservations.range(..=at).next_back()?;
        state.mappings.range(base..&(base + len)).next().map(|(start, _)| *start)
    }

    /// Whether every byte of the range may be read and written.
    pub fn accessible(&self, at: u64, len: u64) -> bool {
        let state = self.state.lock();
        let Some(end) = at.checked_add(len) else { return false };
        let mut next = at;
        while next < end {
            match state.mapping_over(next) {
                Some((start, m)) if m.accessible => next = start + m.len,
                _ => return false,
            }
        }
        true
    }

    /// Whether every byte of the range is reserved, mapped or not.
    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn reserved(&self, at: u64, len: u64) -> bool {
        let state = self.state.lock();
        let Some(end) = at.checked_add(len) else { return false };
        state.reservations.range(..=at).next_back().is_some_and(|(base, n)| end <= base + n)
    }

    /// Repeats a 32-bit value over a range.
    pub fn fill(&self, at: u64, len: u64, value: u32) -> Result<(), Refusal> {
        if !at.is_multiple_of(4) || !len.is_multiple_of(4) || !self.accessible(at, len) {
            return Err(Refusal::Invalid("not accessible"));
        }
        // SAFETY: the range is mapped readable and writable, aligned to four, and outside every Rust object.
        unsafe { std::slice::from_raw_parts_mut(at as *mut u32, (len / 4) as usize) }.fill(value);
        Ok(())
    }

    /// Copies a range out.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Refusal> {
        if !self.accessible(at, into.len() as u64) {
            return Err(Refusal::Invalid("not accessible"));
        }
        // SAFETY: the source is mapped readable; the destination is a slice of that length, elsewhere.
        unsafe { ptr::copy_nonoverlapping(at as *const u8, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in.
    pub fn write(&self, at: u64, from: &[u8]) -> Result<(), Refusal> {
        if !self.accessible(at, from.len() as u64) {
            return Err(Refusal::Invalid("not accessible"));
        }
        // SAFETY: the destination is mapped writable and outside every Rust object.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len()) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (base, len) in &self.state.get_mut().reservations {
            // SAFETY: whoever still held an address of this device has dropped the device first.
            let _ = unsafe { munmap(*base as *mut c_void, *len as usize) };
        }
    }
}

impl State {
    fn enter(&mut self, page: Page) -> u64 {
        self.last_handle += 1;
        self.pages.insert(self.last_handle, page);
        self.last_handle
    }

    /// Gives the memory back once neither a handle nor a mapping needs it.
    fn collect(&mut self, handle: u64) {
        if let Some(page) = self.pages.get(&handle)
            && page.handles == 0
            && page.mappings == 0
        {
            self.used -= if page.imported { 0 } else { page.len };
            self.pages.remove(&handle);
        }
    }

    fn mapping_over(&self, at: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=at).next_back()?;
        (at < start + mapping.len).then_some((*start, mapping))
    }

    fn overlapping(&self, at: u64, end: u64) -> bool {
        self.mapping_over(at).is_some() || self.mappings.range(at..end).next().is_some()
    }

    /// The end of `[at, at + len)` if that range is one or more whole mappings without a gap.
    fn whole_mappings(&self, at: u64, len: u64) -> Result<u64, Refusal> {
        let end = at.checked_add(len).ok_or(Refusal::Invalid("beyond the address space"))?;
        let mut next = at;
        for (start, mapping) in self.mappings.range(at..end) {
            if *start != next {
                break;
            }
            next += mapping.len;
        }
        if len > 0 && next == end { Ok(end) } else { Err(Refusal::Invalid("not whole mappings")) }
    }
}
