//! One page at several addresses, and several pages at one address.

use vmmgraph::driver::{self, Alias};

use crate::ground::{Ground, ensure, same};
use crate::{Stop, Subject, Verdict};

fn offered(ground: &Ground) -> Verdict {
    match ground.driver.capabilities().alias {
        Alias::None => Err(Stop::NotOffered("a page can be mapped once".to_owned())),
        Alias::AtBoundaries | Alias::Coherent => Ok(()),
    }
}

pub(super) fn self_test(_: &Subject, ground: &Ground) -> Verdict {
    offered(ground)?;
    Ok(driver::self_test(ground.driver)?)
}

pub(super) fn copies(_: &Subject, ground: &Ground) -> Verdict {
    offered(ground)?;
    let page = ground.create(2)?;
    // In one reservation, with a gap if allowed, and in a second one.
    let at = ground.reserve(5)?;
    let second = if ground.driver.capabilities().map_in_any_order { 3 } else { 2 };
    let addresses = [at, at.plus(second * ground.granule), ground.reserve(2)?];
    for address in addresses {
        ground.map(address, &[page])?;
    }
    for from in addresses {
        let bytes = ground.noise(page.bytes);
        ground.write(from, &bytes)?;
        for to in addresses {
            ground.expect(to, &bytes, "a copy through one address of a page, read through another")?;
        }
    }
    Ok(())
}

pub(super) fn fills(_: &Subject, ground: &Ground) -> Verdict {
    offered(ground)?;
    let page = ground.create(2)?;
    let addresses = [ground.reserve(2)?, ground.reserve(2)?];
    let stream = ground.stream()?;
    for address in addresses {
        ground.map(address, &[page])?;
    }
    for (round, (from, to)) in [(0, 1), (1, 0), (0, 1)].into_iter().enumerate() {
        let byte = 0x21 + round as u8;
        ground.fill(addresses[from], page.bytes, byte, stream)?;
        ground.settle(stream)?;
        let bytes = vec![byte; page.bytes as usize];
        ground.expect(addresses[to], &bytes, "a fill through one address of a page, read through another")?;
    }
    Ok(())
}

pub(super) fn across_streams(_: &Subject, ground: &Ground) -> Verdict {
    offered(ground)?;
    let page = ground.create(1)?;
    let addresses = [ground.reserve(1)?, ground.reserve(1)?];
    let streams = [ground.stream()?, ground.stream()?];
    let event = ground.event()?;
    for address in addresses {
        ground.map(address, &[page])?;
    }
    for round in 0..8_u8 {
        let (here, there) = (usize::from(round % 2), usize::from(1 - round % 2));
        ground.fill(addresses[here], page.bytes, 0x40 + round, streams[here])?;
        ground.record(event, streams[here])?;
        ground.wait(event, streams[there])?;
        let mut found = vec![0; page.bytes as usize];
        ground.copy_to_host(addresses[there], &mut found, streams[there])?;
        ground.settle(streams[there])?;
        let bytes = vec![0x40 + round; page.bytes as usize];
        same(&found, &bytes, "a fill through one address, copied through another on a stream that waited")?;
    }
    Ok(())
}

pub(super) fn many(_: &Subject, ground: &Ground) -> Verdict {
    const ADDRESSES: u64 = 64;
    offered(ground)?;
    let page = ground.create(1)?;
    let mut addresses = Vec::new();
    for _ in 0..4 {
        let base = ground.reserve(ADDRESSES / 4)?;
        addresses.extend((0..ADDRESSES / 4).map(|place| base.plus(place * ground.granule)));
    }
    for address in &addresses {
        ground.map(*address, &[page])?;
    }
    let bytes = ground.noise(ground.granule);
    ground.write(addresses[ADDRESSES as usize / 2], &bytes)?;
    for address in &addresses {
        ground.expect(*address, &bytes, "a page at 64 addresses")?;
    }
    for address in &addresses[1..] {
        ground.unmap(*address, 1)?;
    }
    ground.expect(addresses[0], &bytes, "a page at the last of 64 addresses")
}

pub(super) fn replace_page(_: &Subject, ground: &Ground) -> Verdict {
    let (at, pages) = ground.single_pages(2)?;
    let [first, second] = [pages[0], pages[1]];
    let there = at.plus(ground.granule);
    let (mine, theirs) = (ground.noise(ground.granule), ground.noise(ground.granule));
    ground.write(at, &mine)?;
    ground.write(there, &theirs)?;
    for (here, elsewhere) in [(second, first), (first, second)] {
        ground.unmap(at, 2)?;
        ground.map(at, &[here, elsewhere])?;
        let expected = if here == second { [&theirs, &mine] } else { [&mine, &theirs] };
        ground.expect(at, expected[0], "a page that took another one's place")?;
        ground.expect(there, expected[1], "a page that took another one's place")?;
    }
    // A third page in place of the first: writes must not reach the first.
    let third = ground.create(1)?;
    ground.unmap(at, 1)?;
    ground.map(at, &[third])?;
    let new = ground.noise(ground.granule);
    ground.write(at, &new)?;
    ground.unmap(there, 1)?;
    ground.map(there, &[first])?;
    ground.expect(there, &mine, "a page whose place was taken, at another address")?;
    ground.expect(at, &new, "a page that took another one's place")
}

pub(super) fn fresh_map(_: &Subject, ground: &Ground) -> Verdict {
    const ROUNDS: u8 = 16;
    let stream = ground.stream()?;
    let at = ground.reserve(2)?;
    for round in 0..ROUNDS {
        let page = ground.create(1)?;
        let here = at.plus(u64::from(round % 2) * ground.granule);
        ground.map(here, &[page])?;
        if round % 4 < 2 {
            let bytes = ground.noise(ground.granule);
            ground.write(here, &bytes)?;
            ground.expect(here, &bytes, "a page written and read as soon as it is mapped")?;
        } else {
            ground.fill(here, ground.granule, round, stream)?;
            ground.settle(stream)?;
            let bytes = vec![round; ground.granule as usize];
            ground.expect(here, &bytes, "a page filled and read as soon as it is mapped")?;
        }
        ground.unmap(here, 1)?;
        ground.release(page)?;
    }
    Ok(())
}

pub(super) fn contents_stay(_: &Subject, ground: &Ground) -> Verdict {
    let (at, pages) = ground.single_pages(3)?;
    let bytes = ground.noise(3 * ground.granule);
    ground.write(at, &bytes)?;
    ground.unmap(at, 3)?;
    ground.free(at)?;
    let elsewhere = ground.reserve(4)?.plus(ground.granule);
    ground.map(elsewhere, &pages)?;
    ground.expect(elsewhere, &bytes, "pages that were mapped nowhere for a while")?;
    ensure(elsewhere.0.is_multiple_of(ground.granule), || format!("a reservation at {elsewhere:?}"))
}
