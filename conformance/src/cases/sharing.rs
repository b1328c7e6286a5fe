//! Pages shared with other processes. One process plays both sides: an imported page is a separate
//! page to the driver.

use std::os::fd::AsFd;

use vmmgraph::driver::{Sharing, Whole};

use crate::ground::{Ground, ensure};
use crate::{Stop, Subject, Verdict};

fn offered<'d>(ground: &Ground<'d>) -> Result<&'d dyn Sharing, Stop> {
    let lacks = || Stop::NotOffered("the device was opened without handles for other processes".to_owned());
    ground.driver.sharing().ok_or_else(lacks)
}

/// Exports a page and imports it; closes the descriptor.
fn imported(ground: &Ground, sharing: &dyn Sharing, page: Whole) -> Result<Whole, Stop> {
    // SAFETY: a live page of this case, created by the driver.
    let fd = unsafe { sharing.export(page.page) }?;
    Ok(ground.adopt(Whole { page: sharing.import(fd.as_fd(), page.bytes)?, bytes: page.bytes }))
}

pub(super) fn export_import(_: &Subject, ground: &Ground) -> Verdict {
    let sharing = offered(ground)?;
    let at = ground.reserve(3)?;
    let (first, second) = (ground.create(1)?, ground.create(2)?);
    ground.map(at, &[first, second])?;
    let free = ground.driver.free_bytes()?;
    let theirs = [imported(ground, sharing, first)?, imported(ground, sharing, second)?];
    let there = ground.reserve(3)?;
    ground.map(there, &[theirs[1], theirs[0]])?;
    let taken = free.saturating_sub(ground.driver.free_bytes()?);
    ensure(taken < 3 * ground.granule, || format!("imported pages took {taken} bytes of memory"))?;
    for round in 0..2 {
        let bytes = ground.noise(3 * ground.granule);
        let (head, tail) = bytes.split_at(ground.granule as usize);
        if round == 0 {
            ground.write(at, &bytes)?;
            ground.expect(there, tail, "an exported page, read where it was imported")?;
            ground.expect(there.plus(2 * ground.granule), head, "another one")?;
        } else {
            ground.write(there, tail)?;
            ground.write(there.plus(2 * ground.granule), head)?;
            ground.expect(at, &bytes, "exported pages that were written where they were imported")?;
        }
    }
    Ok(())
}

pub(super) fn export_outlives(_: &Subject, ground: &Ground) -> Verdict {
    let sharing = offered(ground)?;
    let (at, there) = (ground.reserve(1)?, ground.reserve(1)?);
    let page = ground.create(1)?;
    ground.map(at, &[page])?;
    let bytes = ground.noise(page.bytes);
    ground.write(at, &bytes)?;
    let theirs = imported(ground, sharing, page)?;
    ground.map(there, &[theirs])?;
    ground.release(page)?;
    ground.unmap(at, 1)?;
    let other = ground.create(1)?;
    ground.map(at, &[other])?;
    let noise = ground.noise(other.bytes);
    ground.write(at, &noise)?;
    ground.expect(there, &bytes, "an imported page whose exporter has released it")?;
    ground.release(theirs)?;
    ground.expect(there, &bytes, "an imported page that is released and still mapped")
}
