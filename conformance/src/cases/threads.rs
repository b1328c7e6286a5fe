//! Calling threads, and the current context or device of each.

use std::sync::Barrier;

use vmmgraph::driver::Driver;

use crate::ground::{Ground, ensure, same};
use crate::{Stop, Subject, Verdict};

/// Calls most functions of the driver interface on separate memory.
fn everything(driver: &dyn Driver, seed: u8) -> Verdict {
    let ground = Ground::new(driver);
    let (at, pages) = ground.single_pages(2)?;
    let (stream, event) = (ground.stream()?, ground.event()?);
    let byte = 0x80 + seed;
    ground.fill(at, ground.granule, byte, stream)?;
    ground.record(event, stream)?;
    ground.wait(event, stream)?;
    let bytes = ground.noise(ground.granule);
    ground.write(at.plus(ground.granule), &bytes)?;
    ground.settle(stream)?;
    ensure(ground.happened(event)?, || {
        "an event before one that was waited for has not happened".to_owned()
    })?;
    let filled = vec![byte; ground.granule as usize];
    ground.expect(at, &filled, "memory of this thread, filled")?;
    ground.expect(at.plus(ground.granule), &bytes, "memory of this thread, written")?;
    ground.unmap(at, 2)?;
    ground.map(at, &[pages[1], pages[0]])?;
    let mut found = vec![0; ground.granule as usize];
    ground.copy_to_host(at.plus(ground.granule), &mut found, stream)?;
    ground.settle(stream)?;
    same(&found, &filled, "memory of this thread after its pages changed places")?;
    driver.free_bytes()?;
    // SAFETY: a stream of this thread.
    unsafe { driver.stream_state(stream) }?;
    Ok(ground.give_back()?)
}

fn joined(thread: std::thread::ScopedJoinHandle<Verdict>) -> Verdict {
    thread.join().unwrap_or_else(|_| Err(Stop::Failed("a thread panicked".to_owned())))
}

pub(super) fn fresh_thread(_: &Subject, ground: &Ground) -> Verdict {
    let (at, pages) = ground.single_pages(1)?;
    let bytes = ground.noise(ground.granule);
    let (driver, granule) = (ground.driver, ground.granule);
    ground.write(at, &bytes)?;
    std::thread::scope(|scope| {
        joined(scope.spawn(|| {
            let mut found = vec![0; bytes.len()];
            // SAFETY: mapped by the thread waiting for this one.
            unsafe { driver.read(at, &mut found) }?;
            same(&found, &bytes, "memory that another thread mapped")?;
            // SAFETY: one whole mapping.
            Ok(unsafe { driver.unmap(at, granule) }?)
        }))?;
        joined(scope.spawn(|| everything(driver, 0)))
    })?;
    ground.gone(at);
    ground.map(at, &pages)?;
    ground.expect(at, &bytes, "a page that another thread unmapped")
}

pub(super) fn many_threads(_: &Subject, ground: &Ground) -> Verdict {
    const THREADS: u8 = 8;
    let driver = ground.driver;
    let together = Barrier::new(usize::from(THREADS));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let together = &together;
                scope.spawn(move || {
                    together.wait();
                    (0..4).try_for_each(|round| everything(driver, number * 4 + round))
                })
            })
            .collect();
        threads.into_iter().map(joined).fold(Ok(()), Verdict::and)
    })
}

pub(super) fn two_devices(subject: &Subject, ground: &Ground) -> Verdict {
    let Some(other) = &subject.other else {
        return Err(Stop::NotOffered("there is one device".to_owned()));
    };
    let theirs = Ground::new(&**other);
    let mut held = Vec::new();
    for _ in 0..2 {
        for ground in [ground, &theirs] {
            let before = ground.driver.free_bytes()?;
            let (at, _) = ground.single_pages(64)?;
            let took = before.saturating_sub(ground.driver.free_bytes()?);
            let least = 48 * ground.granule;
            ensure(took >= least, || format!("64 granules took {took} bytes of their device"))?;
            let bytes = ground.noise(2 * ground.granule);
            ground.write(at, &bytes)?;
            held.push((at, bytes));
        }
    }
    for (number, (at, bytes)) in held.iter().enumerate() {
        let ground = if number % 2 == 0 { ground } else { &theirs };
        ground.expect(*at, bytes, "memory of one of two devices")?;
        let stream = ground.stream()?;
        ground.fill(*at, ground.granule, number as u8, stream)?;
        ground.settle(stream)?;
        let filled = vec![number as u8; ground.granule as usize];
        ground.expect(*at, &filled, "memory of one of two devices, filled")?;
    }
    Ok(theirs.give_back()?)
}

pub(super) fn thread_state(subject: &Subject, ground: &Ground) -> Verdict {
    let Some(plug) = subject.plug else {
        return Err(Stop::NotOffered("nobody can ask here what is current on a thread".to_owned()));
    };
    let driver = ground.driver;
    let calls = || {
        everything(driver, 1)?;
        subject.other.as_ref().map_or(Ok(()), |other| everything(&**other, 2))
    };
    let look = |when: &str| {
        let before = plug.thread_state().map_err(Stop::Failed)?;
        calls()?;
        let after = plug.thread_state().map_err(Stop::Failed)?;
        ensure(before == after, || format!("{when}, {before:x?} was current before, {after:x?} afterwards"))
    };
    look("on this thread")?;
    let fresh = || {
        if !driver.capabilities().restores_no_context {
            // The first call may leave a context current; later calls must not change it.
            calls()?;
        }
        look("on a fresh thread")
    };
    std::thread::scope(|scope| joined(scope.spawn(fresh)))
}
