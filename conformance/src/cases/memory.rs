//! Addresses and pages.

use vmmgraph::driver::{NotMapped, Whole};
use vmmgraph::{Error, Peers};

use crate::ground::{Ground, ensure};
use crate::{Stop, Subject, Verdict};

/// Granules by which the driver itself may change the free memory.
const SLACK: u64 = 16;

pub(super) fn device(subject: &Subject, ground: &Ground) -> Verdict {
    let (info, can) = (ground.driver.info(), ground.driver.capabilities());
    let (total, free) = (info.total_bytes, ground.driver.free_bytes()?);
    ensure(!info.name.is_empty() && !info.platform.is_empty(), || "no name".to_owned())?;
    ensure(free <= total && total > 0, || format!("{free} of {total} bytes are free"))?;
    ensure(can.granularity.is_power_of_two() && can.granularity >= 4096, || {
        format!("a granularity of {} bytes", can.granularity)
    })?;
    for (what, len) in [("page", can.largest_page), ("reservation", can.largest_reservation)] {
        ensure(len >= can.granularity, || format!("a largest {what} of {len} bytes"))?;
    }
    if let Some(other) = &subject.other {
        let same = (other.info().platform, other.info().ordinal) == (info.platform, info.ordinal);
        ensure(!same, || format!("two devices are both {} {}", info.platform, info.ordinal))?;
    }
    let at = ground.reserve(1)?;
    let page = ground.create(1)?;
    ground.map(at, &[page])
}

pub(super) fn reserve_free(_: &Subject, ground: &Ground) -> Verdict {
    let before = ground.driver.free_bytes()?;
    let mut ranges = Vec::new();
    for granules in [1, 1, 4, 4, 64, 1024] {
        let at = ground.reserve(granules)?;
        ensure(at.0 != 0 && at.0.is_multiple_of(ground.granule), || format!("a reservation at {at:?}"))?;
        ranges.push((at.0, at.0 + granules * ground.granule));
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        ensure(pair[0].1 <= pair[1].0, || format!("two reservations meet: {pair:x?}"))?;
    }
    let taken = before.saturating_sub(ground.driver.free_bytes()?);
    ensure(taken <= SLACK * ground.granule, || format!("reservations took {taken} bytes of memory"))
}

pub(super) fn reserve_beyond_memory(_: &Subject, ground: &Ground) -> Verdict {
    let can = ground.driver.capabilities();
    let wanted = ground.driver.info().total_bytes.next_multiple_of(ground.granule) + ground.granule;
    let each = wanted.min(can.largest_reservation / ground.granule * ground.granule);
    for _ in 0..wanted.div_ceil(each) {
        ground.reserve_bytes(each)?;
    }
    Ok(())
}

pub(super) fn addresses_exhausted(_: &Subject, ground: &Ground) -> Verdict {
    const MOST: usize = 256;
    let device = ground.driver.info().ordinal;
    let len = ground.driver.capabilities().largest_reservation / ground.granule * ground.granule;
    let mut found = None;
    for _ in 0..MOST {
        if let Err(error) = ground.reserve_bytes(len) {
            found = Some(error);
            break;
        }
    }
    let Some(error) = found else {
        return Err(Stop::NotOffered(format!("{MOST} reservations of the longest length can be had")));
    };
    ensure(error == Error::OutOfAddresses { requested: len, device }, || format!("the error is: {error}"))?;
    ground.give_back()?;
    ground.reserve(1)?;
    Ok(())
}

pub(super) fn create_release(_: &Subject, ground: &Ground) -> Verdict {
    const PAGES: u64 = 64;
    let free = || ground.driver.free_bytes();
    let before = free()?;
    let pages = (0..PAGES).map(|_| ground.create(1)).collect::<Result<Vec<_>, _>>()?;
    let held = free()?;
    for page in pages {
        ground.release(page)?;
    }
    let after = free()?;
    let (bytes, slack) = (PAGES * ground.granule, SLACK * ground.granule);
    let words =
        || format!("{before} bytes were free, {held} beside {bytes} bytes of pages, {after} afterwards");
    let took = before.saturating_sub(held);
    ensure((bytes - slack..=bytes + slack).contains(&took) && after + slack >= before, words)
}

pub(super) fn release_while_mapped(_: &Subject, ground: &Ground) -> Verdict {
    const GRANULES: u64 = 32;
    let before = ground.driver.free_bytes()?;
    let at = ground.reserve(GRANULES)?;
    let page = ground.create(GRANULES)?;
    ground.map(at, &[page])?;
    let bytes = ground.noise(ground.granule);
    ground.write(at, &bytes)?;
    ground.release(page)?;
    ground.expect(at, &bytes, "a page that was released while it is mapped")?;
    ground.unmap(at, GRANULES)?;
    let after = ground.driver.free_bytes()?;
    ensure(after + SLACK * ground.granule >= before, || {
        format!("{before} bytes were free, {after} after the page was unmapped")
    })
}

/// Pages of 1, 2 and 1 granules, each written while mapped alone.
fn three_pages(ground: &Ground) -> Result<(Vec<Whole>, Vec<u8>), Stop> {
    let (mut pages, mut contents) = (Vec::new(), Vec::new());
    let at = ground.reserve(2)?;
    for granules in [1, 2, 1] {
        let page = ground.create(granules)?;
        let bytes = ground.noise(page.bytes);
        ground.map(at, &[page])?;
        ground.write(at, &bytes)?;
        ground.unmap(at, granules)?;
        pages.push(page);
        contents.extend_from_slice(&bytes);
    }
    Ok((pages, contents))
}

pub(super) fn map_several(_: &Subject, ground: &Ground) -> Verdict {
    let (pages, contents) = three_pages(ground)?;
    let at = ground.reserve(6)?;
    ground.map(at.plus(ground.granule), &pages)?;
    ground.expect(at.plus(ground.granule), &contents, "three pages mapped in one call")?;
    ground.map(at, &[])
}

/// Checks the error for a page after a gap: `UnfitDriver`, with nothing mapped.
fn refused_behind_a_gap(ground: &Ground) -> Result<Stop, Stop> {
    let at = ground.reserve(3)?;
    let pages = [ground.create(1)?, ground.create(1)?];
    ground.map(at, &pages[..1])?;
    let far = at.plus(2 * ground.granule);
    // SAFETY: a free place of a reservation of this case, and a page of this case.
    match unsafe { ground.driver.map(far, &pages[1..], Peers::NONE) } {
        Err(NotMapped { error: error @ Error::UnfitDriver { .. }, mapped: 0 }) => {
            Ok(Stop::NotOffered(error.to_string()))
        }
        other => Err(Stop::Failed(format!("a page behind a gap, where that cannot be: {other:?}"))),
    }
}

pub(super) fn map_in_any_order(_: &Subject, ground: &Ground) -> Verdict {
    if !ground.driver.capabilities().map_in_any_order {
        return Err(refused_behind_a_gap(ground)?);
    }
    let at = ground.reserve(5)?;
    let mut written = Vec::new();
    for place in [3, 0, 4, 1, 2] {
        let here = at.plus(place * ground.granule);
        let page = ground.create(1)?;
        ground.map(here, &[page])?;
        let bytes = ground.noise(ground.granule);
        ground.write(here, &bytes)?;
        written.push((here, bytes));
    }
    for (here, bytes) in written {
        ground.expect(here, &bytes, "five pages mapped in an order of their own")?;
    }
    Ok(())
}

pub(super) fn unmap_several(_: &Subject, ground: &Ground) -> Verdict {
    let (pages, contents) = three_pages(ground)?;
    let at = ground.reserve(4)?;
    let one = ground.granule;
    ground.map(at, &pages)?;
    ground.unmap(at.plus(one), 2)?;
    ground.expect(at, &contents[..one as usize], "the page before one that was unmapped")?;
    ground.expect(
        at.plus(3 * one),
        &contents[3 * one as usize..],
        "the page behind one that was unmapped",
    )?;
    ground.map(at.plus(one), &pages[1..2])?;
    ground.unmap(at, 4)?;
    let order = [pages[1], pages[0], pages[2]];
    ground.map(at, &order)?;
    ground.expect(at, &contents[one as usize..3 * one as usize], "a page mapped where two others were")
}

pub(super) fn large_page(_: &Subject, ground: &Ground) -> Verdict {
    const GRANULES: u64 = 16;
    let bytes = GRANULES * ground.granule;
    if ground.driver.capabilities().largest_page < bytes {
        return Err(Stop::NotOffered(format!("a page of {GRANULES} granules is too large")));
    }
    let at = ground.reserve(GRANULES + 3)?.plus(3 * ground.granule);
    let page = ground.create(GRANULES)?;
    ground.map(at, &[page])?;
    let contents = ground.noise(bytes);
    ground.write(at, &contents)?;
    ground.expect(at, &contents, "a page of 16 granules")
}

pub(super) fn out_of_memory(_: &Subject, ground: &Ground) -> Verdict {
    let (info, can) = (ground.driver.info(), ground.driver.capabilities());
    let free = || ground.driver.free_bytes();
    let before = free()?;
    let check = |error: Error, requested: u64| {
        let (total, device) = (info.total_bytes, info.ordinal);
        let typed = matches!(&error, Error::OutOfMemory { requested: r, total: t, device: d, .. }
            if (*r, *t, *d) == (requested, total, device));
        ensure(typed, || format!("the error for {requested} bytes is: {error}"))
    };
    let beyond = info.total_bytes.next_multiple_of(ground.granule) + ground.granule;
    if beyond <= can.largest_page {
        match ground.create_bytes(beyond) {
            Ok(_) => return Err(Stop::Failed(format!("a page of {beyond} bytes was created"))),
            Err(error) => check(error, beyond)?,
        }
    }
    let part = (info.total_bytes / 8).next_multiple_of(ground.granule).min(can.largest_page);
    let mut pages = Vec::new();
    let error = loop {
        match ground.create_bytes(part) {
            Ok(page) => pages.push(page),
            Err(error) => break error,
        }
        let held = part * pages.len() as u64;
        ensure(held <= info.total_bytes, || format!("{held} of {} bytes were created", info.total_bytes))?;
    };
    check(error, part)?;
    for page in pages {
        ground.release(page)?;
    }
    ground.create(1)?;
    let after = free()?;
    ensure(after + SLACK * ground.granule >= before, || {
        format!("{before} bytes were free, {after} afterwards")
    })
}

pub(super) fn descriptors(_: &Subject, ground: &Ground) -> Verdict {
    const PAGES: u64 = 32;
    // Without a device, pages are memfds of this name, which do not count.
    let real = |entry: std::io::Result<std::fs::DirEntry>| {
        let target = entry.and_then(|entry| std::fs::read_link(entry.path())).unwrap_or_default();
        !target.to_string_lossy().starts_with("/memfd:vmmgraph-page")
    };
    let open = || Some(std::fs::read_dir("/proc/self/fd").ok()?.map(real).filter(|real| *real).count());
    let Some(before) = open() else {
        return Err(Stop::NotOffered("the process's descriptors cannot be counted here".to_owned()));
    };
    let at = ground.reserve(PAGES)?;
    for number in 0..PAGES {
        let page = ground.create(1)?;
        ground.map(at.plus(number * ground.granule), &[page])?;
    }
    let taken = open().unwrap_or(before).saturating_sub(before) as u64;
    let said = u64::from(ground.driver.capabilities().descriptors_per_page) * PAGES;
    // Allow for descriptors of the driver or a concurrent thread.
    ensure(taken <= said + 8, || format!("{PAGES} pages took {taken} descriptors, and {said} were said"))
}

pub(super) fn peers(_: &Subject, ground: &Ground) -> Verdict {
    let peers = ground.driver.capabilities().peers;
    if peers.is_empty() {
        return Err(Stop::NotOffered("no device is a peer of this one".to_owned()));
    }
    let at = ground.reserve(2)?;
    let (first, second) = (ground.create(1)?, ground.create(1)?);
    ground.map_for(at, &[first], peers)?;
    ground.map(at.plus(ground.granule), &[second])?;
    // SAFETY: one whole mapping of this case.
    unsafe { ground.driver.grant(at.plus(ground.granule), ground.granule, peers) }?;
    let bytes = ground.noise(2 * ground.granule);
    ground.write(at, &bytes)?;
    ground.expect(at, &bytes, "pages that peers have too")
}
