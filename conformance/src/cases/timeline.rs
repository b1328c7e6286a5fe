//! Streams and events.

use std::time::{Duration, Instant};

use vmmgraph::driver::{Alias, StreamState};
use vmmgraph::{Address, Stream};

use crate::ground::{Ground, ensure, same};
use crate::{Stop, Subject, Verdict};

/// Granules: enough to keep a device busy for a moment while filling.
const MANY: u64 = 8;

/// A mapped page of `MANY` granules, its length in bytes, and a stream.
fn large(ground: &Ground) -> Result<(Address, u64, Stream), Stop> {
    let at = ground.reserve(MANY)?;
    let page = ground.create(MANY)?;
    ground.map(at, &[page])?;
    let stream = ground.stream()?;
    ground.fill(at, page.bytes, 0, stream)?;
    ground.settle(stream)?;
    Ok((at, page.bytes, stream))
}

pub(super) fn never_recorded(_: &Subject, ground: &Ground) -> Verdict {
    let event = ground.event()?;
    ensure(ground.happened(event)?, || "an event that was never recorded has not happened".to_owned())?;
    ground.synchronise(event)?;
    let stream = ground.stream()?;
    ground.wait(event, stream)?;
    ground.settle(stream)?;
    Ok(())
}

pub(super) fn query(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, stream) = large(ground)?;
    let event = ground.event()?;
    for byte in 1..=4 {
        ground.fill(at, len, byte, stream)?;
        ground.record(event, stream)?;
        let start = Instant::now();
        while !ground.happened(event)? {
            ensure(start.elapsed() < Duration::from_secs(20), || {
                "an event has not happened after 20 s".to_owned()
            })?;
            std::thread::yield_now();
        }
        ground.expect(at, &vec![byte; len as usize], "memory filled before an event that has happened")?;
    }
    Ok(())
}

pub(super) fn synchronise(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, stream) = large(ground)?;
    for byte in 1..=4 {
        ground.fill(at, len, byte, stream)?;
        ground.settle(stream)?;
        ground.expect(at, &vec![byte; len as usize], "memory filled before an event that was waited for")?;
    }
    Ok(())
}

pub(super) fn orders_streams(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, first) = large(ground)?;
    let (second, there, back) = (ground.stream()?, ground.event()?, ground.event()?);
    let mut found = vec![0; len as usize];
    for byte in 1..=4 {
        ground.fill(at, len, byte, first)?;
        ground.record(there, first)?;
        ground.wait(there, second)?;
        ground.copy_to_host(at, &mut found, second)?;
        ground.record(back, second)?;
        ground.wait(back, first)?;
        ground.fill(at, len, 0xf0 + byte, first)?;
        ground.settle(first)?;
        ground.settle(second)?;
        same(&found, &vec![byte; len as usize], "a copy between two fills of another stream")?;
        ground.expect(at, &vec![0xf0 + byte; len as usize], "a fill behind a copy of another stream")?;
    }
    Ok(())
}

pub(super) fn recorded_again(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, stream) = large(ground)?;
    let (second, event) = (ground.stream()?, ground.event()?);
    ground.record(event, second)?;
    ground.synchronise(event)?;
    ground.fill(at, len, 1, stream)?;
    ground.record(event, stream)?;
    ground.fill(at, len, 2, stream)?;
    ground.record(event, stream)?;
    ground.synchronise(event)?;
    ground.expect(at, &vec![2; len as usize], "memory filled before the last record of an event")
}

pub(super) fn destroyed_early(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, stream) = large(ground)?;
    let second = ground.stream()?;
    let event = ground.event()?;
    let mut found = vec![0; len as usize];
    ground.fill(at, len, 7, stream)?;
    ground.record(event, stream)?;
    ground.wait(event, second)?;
    ground.copy_to_host(at, &mut found, second)?;
    ground.destroy_event(event)?;
    ground.settle(second)?;
    same(&found, &vec![7; len as usize], "a copy behind an event that is destroyed")
}

pub(super) fn stream_order(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, stream) = large(ground)?;
    let half = len / 2;
    let mut found = vec![0; len as usize];
    ground.fill(at, len, 1, stream)?;
    ground.fill(at.plus(half), half, 2, stream)?;
    ground.copy_to_host(at, &mut found, stream)?;
    ground.fill(at, len, 3, stream)?;
    ground.settle(stream)?;
    same(&found[..half as usize], &vec![1; half as usize], "a copy behind one fill and before another")?;
    same(&found[half as usize..], &vec![2; half as usize], "a copy behind two fills and before another")?;
    ground.expect(at, &vec![3; len as usize], "the last of three fills")
}

pub(super) fn stream_destroyed_early(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, _) = large(ground)?;
    let stream = ground.stream()?;
    let event = ground.event()?;
    ground.fill(at, len, 9, stream)?;
    ground.record(event, stream)?;
    ground.destroy_stream(stream)?;
    ground.synchronise(event)?;
    ground.expect(at, &vec![9; len as usize], "memory filled by a stream that is destroyed")
}

pub(super) fn default_stream(_: &Subject, ground: &Ground) -> Verdict {
    let (at, len, stream) = large(ground)?;
    // SAFETY: the default stream always exists.
    let state = unsafe { ground.driver.stream_state(Stream::LEGACY) }?;
    ensure(state == StreamState::Ready, || format!("the default stream is {state:?}"))?;
    let event = ground.event()?;
    ground.fill(at, len, 4, stream)?;
    ground.record(event, stream)?;
    ground.wait(event, Stream::LEGACY)?;
    ground.fill(at, len / 2, 5, Stream::LEGACY)?;
    ground.record(event, Stream::LEGACY)?;
    ground.synchronise(event)?;
    let (half, rest) = (vec![5; len as usize / 2], vec![4; len as usize / 2]);
    ground.expect(at, &half, "memory filled by the default stream")?;
    ground.expect(at.plus(len / 2), &rest, "memory filled by a stream that the default stream waited for")
}

pub(super) fn unmap_waits(_: &Subject, ground: &Ground) -> Verdict {
    let can = ground.driver.capabilities();
    if !can.unmap_waits {
        return Err(Stop::NotOffered("unmapping does not wait, and is not said to".to_owned()));
    }
    if can.alias == Alias::None {
        return Err(Stop::NotOffered("a page can be mapped once".to_owned()));
    }
    let (at, len, stream) = large(ground)?;
    let event = ground.event()?;
    for byte in 0..16 {
        ground.fill(at, len, byte, stream)?;
    }
    ground.record(event, stream)?;
    ground.unmap(at, MANY)?;
    let happened = ground.happened(event)?;
    ensure(happened, || "what uses an address goes on after it was unmapped".to_owned())
}
