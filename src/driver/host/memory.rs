//! Memory of a simulated device: one memfd a page, mapped by the rules of the CUDA driver (measured
//! on an H200, driver 580; `tests/gpu/conformance.rs` checks both): aliases share contents,
//! unmapped addresses fault.
//!
//! One mutex (`state`) guards all tables, also during system calls. Imports nothing of the crate:
//! test stand-ins compile this file too.

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

/// Reason of a refused request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Violates this rule.
    Invalid(&'static str),
    /// Unsupported by the device.
    NotSupported(&'static str),
    OutOfMemory,
    OutOfAddresses,
    OutOfDescriptors,
}

struct Page {
    memory: OwnedFd,
    len: u64,
    handles: u32,
    mappings: u32,
    /// Takes no memory of this device.
    imported: bool,
}

struct Mapping {
    len: u64,
    page: u64,
    accessible: bool,
    /// One bit each.
    peers: u64,
}

#[derive(Default)]
struct State {
    last_handle: u64,
    used: u64,
    pages: HashMap<u64, Page>,
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
}

/// Remaining objects, for leak tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    pub pages: usize,
    pub reservations: usize,
    pub mappings: usize,
}

/// Memory of one simulated device.
pub struct Memory {
    granularity: u64,
    total: u64,
    state: Mutex<State>,
}

impl Memory {
    /// Creates a device of `total` bytes. `granularity` is a power of two, at least 4096.
    pub fn new(granularity: u64, total: u64) -> Self {
        Self { granularity, total, state: Mutex::default() }
    }

    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes without a page.
    pub fn free(&self) -> u64 {
        self.total - self.state.lock().used
    }

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

    pub fn reserve(&self, len: u64) -> Result<u64, Refusal> {
        self.granular(&[len])?;
        if len == 0 {
            return Err(Refusal::Invalid("a reservation of nothing"));
        }
        // The kernel aligns to 4 KiB only: trim one granule more.
        let padded = len.checked_add(self.granularity).ok_or(Refusal::OutOfAddresses)?;
        let padded = usize::try_from(padded).map_err(|_| Refusal::OutOfAddresses)?;
        // SAFETY: a new anonymous mapping replaces no memory.
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
                // SAFETY: inside the unused mapping above; a failed trim only wastes addresses.
                let _ = unsafe { munmap(start as *mut c_void, (end - start) as usize) };
            }
        }
        self.state.lock().reservations.insert(base, len);
        Ok(base)
    }

    /// Frees a whole reservation without mappings.
    pub fn free_addresses(&self, base: u64, len: u64) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        if state.reservations.get(&base) != Some(&len) {
            return Err(Refusal::Invalid("not a reservation"));
        }
        if state.mappings.range(base..base + len).next().is_some() {
            return Err(Refusal::Invalid("still mapped"));
        }
        // SAFETY: our range without pages, as checked above.
        unsafe { munmap(base as *mut c_void, len as usize) }.map_err(|_| Refusal::OutOfAddresses)?;
        state.reservations.remove(&base);
        Ok(())
    }

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

    /// Releases a handle. The memory is freed after the last handle and mapping.
    pub fn release(&self, handle: u64) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let page =
            state.pages.get_mut(&handle).filter(|p| p.handles > 0).ok_or(Refusal::Invalid("not a page"))?;
        page.handles -= 1;
        state.collect(handle);
        Ok(())
    }

    /// One more handle of the page at an address.
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

    /// Maps a whole page at a free place, without access.
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
        // SAFETY: unmapped addresses of our reservation.
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

    /// Enables access to whole, adjacent mappings.
    pub fn set_access(&self, at: u64, len: u64) -> Result<(), Refusal> {
        self.granular(&[at, len])?;
        let mut state = self.state.lock();
        let end = state.whole_mappings(at, len)?;
        // SAFETY: our mappings, as checked above.
        unsafe { mprotect(at as *mut c_void, len as usize, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|_| Refusal::OutOfAddresses)?;
        state.mappings.range_mut(at..end).for_each(|(_, m)| m.accessible = true);
        Ok(())
    }

    /// Grants peers access to whole, adjacent mappings. All peers are this process.
    pub fn grant(&self, at: u64, len: u64, peers: u64) -> Result<(), Refusal> {
        self.granular(&[at, len])?;
        let mut state = self.state.lock();
        let end = state.whole_mappings(at, len)?;
        state.mappings.range_mut(at..end).for_each(|(_, m)| m.peers |= peers);
        Ok(())
    }

    /// Peers with access, one bit each.
    pub fn granted(&self, at: u64) -> u64 {
        self.state.lock().mapping_over(at).map_or(0, |(_, mapping)| mapping.peers)
    }

    /// Unmaps whole, adjacent mappings.
    pub fn unmap(&self, at: u64, len: u64) -> Result<(), Refusal> {
        self.granular(&[at, len])?;
        let mut state = self.state.lock();
        let end = state.whole_mappings(at, len)?;
        // SAFETY: our mappings, unused as guaranteed by the caller.
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

    /// Start and length of the mapping at an address.
    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn mapping_at(&self, at: u64) -> Option<(u64, u64)> {
        self.state.lock().mapping_over(at).map(|(start, mapping)| (start, mapping.len))
    }

    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn first_mapping(&self, at: u64) -> Option<u64> {
        let state = self.state.lock();
        let (base, len) = state.reservations.range(..=at).next_back()?;
        state.mappings.range(base..&(base + len)).next().map(|(start, _)| *start)
    }

    /// Whether every byte is readable and writable.
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

    #[allow(dead_code, reason = "only stand-ins ask")]
    pub fn reserved(&self, at: u64, len: u64) -> bool {
        let state = self.state.lock();
        let Some(end) = at.checked_add(len) else { return false };
        state.reservations.range(..=at).next_back().is_some_and(|(base, n)| end <= base + n)
    }

    pub fn fill(&self, at: u64, len: u64, value: u32) -> Result<(), Refusal> {
        if !at.is_multiple_of(4) || !len.is_multiple_of(4) || !self.accessible(at, len) {
            return Err(Refusal::Invalid("not accessible"));
        }
        // SAFETY: mapped, aligned to four, and outside every Rust object.
        unsafe { std::slice::from_raw_parts_mut(at as *mut u32, (len / 4) as usize) }.fill(value);
        Ok(())
    }

    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Refusal> {
        if !self.accessible(at, into.len() as u64) {
            return Err(Refusal::Invalid("not accessible"));
        }
        // SAFETY: the source is mapped; the destination is a separate slice of this length.
        unsafe { ptr::copy_nonoverlapping(at as *const u8, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    pub fn write(&self, at: u64, from: &[u8]) -> Result<(), Refusal> {
        if !self.accessible(at, from.len() as u64) {
            return Err(Refusal::Invalid("not accessible"));
        }
        // SAFETY: the destination is mapped, outside every Rust object.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len()) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (base, len) in &self.state.get_mut().reservations {
            // SAFETY: users drop their objects before the device.
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

    /// End of a range of whole mappings without a gap.
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
