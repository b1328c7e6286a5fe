//! Reads, writes, fills and copies.

use vmmgraph::{Address, Error, Stream};

use crate::ground::{Ground, same};
use crate::{Stop, Subject, Verdict};

pub(super) fn read_write(_: &Subject, ground: &Ground) -> Verdict {
    let (at, _) = ground.single_pages(3)?;
    let mut all = ground.noise(3 * ground.granule);
    ground.write(at, &all)?;
    let edge = ground.granule;
    for (from, len) in [(0, 1), (1, 3), (511, 514), (edge - 5, 11), (edge + 1, edge - 1), (3 * edge - 7, 7)] {
        let bytes = ground.noise(len);
        ground.write(at.plus(from), &bytes)?;
        all[from as usize..(from + len) as usize].copy_from_slice(&bytes);
        ground.expect(at.plus(from), &bytes, &format!("{len} bytes at offset {from}"))?;
    }
    ground.expect(at, &all, "three pages, written in parts")
}

fn filled(ground: &Ground, value: u32) -> Result<(Address, Vec<u8>), Stop> {
    let (at, _) = ground.single_pages(3)?;
    let stream = ground.stream()?;
    let mut all = ground.noise(3 * ground.granule);
    ground.write(at, &all)?;
    let edge = ground.granule;
    for (from, len) in [(0, 4), (12, 20), (edge - 8, 16), (2 * edge, edge - 4)] {
        ground.fill_words(at.plus(from), len, value, stream)?;
        for word in all[from as usize..(from + len) as usize].chunks_exact_mut(4) {
            word.copy_from_slice(&value.to_ne_bytes());
        }
    }
    ground.settle(stream)?;
    Ok((at, all))
}

pub(super) fn fill_bytes(_: &Subject, ground: &Ground) -> Verdict {
    let (at, all) = filled(ground, 0x5a5a_5a5a)?;
    ground.expect(at, &all, "parts of three pages, filled with bytes")
}

pub(super) fn fill_words(_: &Subject, ground: &Ground) -> Verdict {
    match probe_words(ground)? {
        Some(why) => Err(Stop::NotOffered(why)),
        None => {
            let (at, all) = filled(ground, 0x0102_0304)?;
            ground.expect(at, &all, "parts of three pages, filled with words")
        }
    }
}

/// Returns the error if the platform has no fill of 32-bit words.
fn probe_words(ground: &Ground) -> Result<Option<String>, Stop> {
    let (at, _) = ground.single_pages(1)?;
    let stream = ground.stream()?;
    match ground.fill_words(at, 4, 0x0102_0304, stream) {
        Err(error @ (Error::Unsupported { .. } | Error::SymbolMissing { .. })) => Ok(Some(error.to_string())),
        other => Ok(other.map(|()| None)?),
    }
}

/// Copies to the device, fills a part, and copies back, on one stream.
fn round_trip(ground: &Ground, from: &[u8], to: &mut [u8], stream: Stream) -> Verdict {
    let len = from.len() as u64;
    let granules = len.div_ceil(ground.granule);
    let (at, _) = ground.single_pages(granules)?;
    ground.copy_from_host(at, from, stream)?;
    ground.fill(at.plus(4), 8, 0x77, stream)?;
    ground.copy_to_host(at, to, stream)?;
    ground.settle(stream)?;
    let mut expected = from.to_vec();
    expected[4..12].fill(0x77);
    same(to, &expected, "bytes that went to the device and came back")?;
    ground.expect(at, &expected, "bytes that were copied to the device")
}

pub(super) fn copies(_: &Subject, ground: &Ground) -> Verdict {
    let stream = ground.stream()?;
    for len in [12, 513, 2 * ground.granule] {
        let bytes = ground.noise(len);
        round_trip(ground, &bytes, &mut vec![0; len as usize], stream)?;
    }
    Ok(())
}

/// Host memory, aligned to host pages and registered during its lifetime.
pub(super) struct Registered<'g> {
    ground: &'g Ground<'g>,
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl<'g> Registered<'g> {
    const HOST_PAGE: usize = 4096;

    /// Registers zeroed memory; `None` if the operating system refuses.
    pub(super) fn new(ground: &'g Ground<'g>, len: usize) -> Option<Self> {
        let mut memory = vec![0; len + Self::HOST_PAGE];
        let start = memory.as_ptr().align_offset(Self::HOST_PAGE);
        // SAFETY: memory of this object, unregistered before it is freed.
        unsafe { ground.driver.host_register(memory.as_mut_ptr().wrapping_add(start), len) }.ok()?;
        Some(Self { ground, memory, start, len })
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }

    pub(super) fn end(mut self) -> Result<Vec<u8>, Error> {
        let at = self.bytes().as_mut_ptr();
        let memory = std::mem::take(&mut self.memory);
        // SAFETY: registered in `new`, and every copy of it was waited for.
        unsafe { self.ground.driver.host_unregister(at) }?;
        Ok(memory[self.start..self.start + self.len].to_vec())
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        if !self.memory.is_empty() {
            let at = self.bytes().as_mut_ptr();
            // SAFETY: as in `end`; reached only in failed cases.
            let _ = unsafe { self.ground.driver.host_unregister(at) };
        }
    }
}

pub(super) fn copies_registered(_: &Subject, ground: &Ground) -> Verdict {
    if !ground.driver.capabilities().register_host {
        return Err(Stop::NotOffered("host memory cannot be registered".to_owned()));
    }
    let len = 2 * ground.granule as usize;
    let refused = || Stop::NotOffered("the operating system registers no memory here".to_owned());
    let mut from = Registered::new(ground, len).ok_or_else(refused)?;
    let mut to = Registered::new(ground, len).ok_or_else(refused)?;
    let stream = ground.stream()?;
    from.bytes().copy_from_slice(&ground.noise(len as u64));
    for (start, end) in [(0, len), (512, len - 100), (4, 40)] {
        let bytes = from.bytes()[start..end].to_vec();
        let target = &mut to.bytes()[start..end];
        target.fill(0);
        let source = &from.bytes()[start..end];
        round_trip(ground, source, target, stream)?;
        same(&from.bytes()[start..end], &bytes, "registered bytes that were only read")?;
    }
    let (before, after) = (from.bytes().to_vec(), from.end()?);
    same(&after, &before, "bytes whose registration has ended")?;
    let bytes = to.end()?;
    round_trip(ground, &bytes, &mut vec![0; len], stream)
}
