//! Step results are stored to the host between steps and become ring sources, on late streams: a
//! missing wait shows as wrong bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vmmgraph::driver::HostDriver;
use vmmgraph::ring::HostRun;
use vmmgraph::{
    Address, Device, ElasticOptions, Error, HostBuffer, HostOptions, Pinning, RingOptions, RingUnit, Stream,
};
use vmmgraph_testkit::{FaultyDriver, Losing, ReorderingDriver, lossy, stream};

const PAGE: u64 = 4096;
const UNITS: usize = 6;
const GRANULE: u64 = PAGE / 4;
const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);

fn host() -> Arc<HostDriver> {
    Arc::new(HostDriver::new(0, HostOptions { granularity: PAGE, memory_bytes: 64 << 20 }).unwrap())
}

fn pattern(unit: usize, granule: usize, version: u8) -> Vec<u8> {
    (0..GRANULE).map(|at| (at as u8).wrapping_mul(7) ^ (unit * 31 + granule * 57) as u8 ^ version).collect()
}

/// Runs steps that read all units, then make and store some granules from one place; returns wrong
/// reads and dropped waits.
fn run(seed: u64, losing: Option<Losing>) -> (u64, u64) {
    let host = host();
    let late = ReorderingDriver::new(host.clone(), seed);
    let device = Device::with_driver(late.clone());
    let options = RingOptions { slots: 2, within_step: seed % 3 == 2, ..RingOptions::default() };
    let ring = device.ring(&[RingUnit::streamed(PAGE); UNITS], &options).unwrap();
    let buffers: Vec<Arc<HostBuffer>> =
        (0..UNITS / 2).map(|_| device.host_buffer(2 * PAGE, Pinning::Required).unwrap()).collect();
    let of_unit = |unit: usize| (&buffers[unit / 2], unit as u64 % 2 * PAGE);
    let mut versions = [[1_u8; 4]; UNITS];
    let expected = |versions: &[[u8; 4]; UNITS], unit: usize| -> Vec<u8> {
        (0..4).flat_map(|granule| pattern(unit, granule, versions[unit][granule])).collect()
    };
    for unit in 0..UNITS {
        let (buffer, from) = of_unit(unit);
        buffer.write(from, &expected(&versions, unit)).unwrap();
        ring.set_source(unit, &[HostRun { source: Arc::clone(buffer), from, to: 0, bytes: PAGE }]).unwrap();
    }
    let hot = device.elastic_buffer(PAGE, &ElasticOptions::default()).unwrap();
    hot.commit(0..PAGE).unwrap();
    if let Some(losing) = losing {
        late.lose_waits(losing);
    }
    let wrong = Arc::new(AtomicU64::new(0));
    for step in 0..5_usize {
        for unit in 0..UNITS {
            ring.acquire(unit, A).unwrap();
            let (at, expected) = (ring.address(unit).unwrap(), expected(&versions, unit));
            let count = Arc::clone(&wrong);
            late.launch(A, move |driver| {
                let mut found = vec![0; expected.len()];
                // SAFETY: a unit's mapped addresses.
                unsafe { driver.read(at, &mut found) }.unwrap();
                count.fetch_add(u64::from(found != expected), Relaxed);
            });
            ring.release(unit, A).unwrap();
        }
        for made in 0..3 {
            let unit = (seed as usize + step * 5 + made) % UNITS;
            let granule = (step + made) % 4;
            versions[unit][granule] += 1;
            let (bytes, at) = (pattern(unit, granule, versions[unit][granule]), hot.base());
            // The previous bytes must be stored before they are overwritten.
            buffers.iter().for_each(|buffer| buffer.before(A).unwrap());
            // SAFETY: committed.
            late.launch(A, move |driver| unsafe { driver.write(at, &bytes) }.unwrap());
            let (buffer, from) = of_unit(unit);
            // SAFETY: committed until all work is done.
            unsafe { buffer.store(from + granule as u64 * GRANULE, at, GRANULE, A) }.unwrap();
        }
    }
    if losing.is_none() {
        for unit in 0..UNITS {
            let (buffer, from) = of_unit(unit);
            let mut found = vec![0; PAGE as usize];
            buffer.read(from, &mut found).unwrap();
            assert_eq!(found, expected(&versions, unit), "unit {unit}, seed {seed}");
        }
    }
    assert_eq!(ring.audit(), Ok(()));
    if losing.is_some() {
        late.drain();
    }
    drop((ring, buffers));
    late.drain();
    if losing.is_none() {
        drop(hot);
        device.trim().unwrap();
        device.host_pool().trim().unwrap();
        assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
        drop(device);
        assert_eq!((host.leftovers(), host.host_leftovers()[1]), ([0; 4], 0));
    }
    (wrong.load(Relaxed), late.lost())
}

#[test]
fn what_a_step_makes_is_a_source_in_whatever_order_streams_work() {
    for seed in 0..150 {
        assert_eq!(run(seed, None), (0, 0), "seed {seed}");
    }
}

#[test]
fn a_wait_that_is_missing_is_wrong_bytes() {
    // The producer's wait for its last store; then waits of copies.
    lossy(|stream| stream == A, run);
    lossy(|stream| stream != A, run);
}

#[test]
fn a_copy_that_was_given_before_a_store_reads_what_was_there() {
    for seed in 0..40 {
        let host = host();
        let late = ReorderingDriver::new(host.clone(), seed);
        let device = Device::with_driver(late.clone());
        let options = RingOptions { slots: 2, ..RingOptions::default() };
        let ring = device.ring(&[RingUnit::streamed(PAGE); 4], &options).unwrap();
        let buffer = device.host_buffer(PAGE, Pinning::Required).unwrap();
        buffer.write(0, &[1; PAGE as usize]).unwrap();
        for unit in 0..4 {
            let run = HostRun { source: Arc::clone(&buffer), from: 0, to: 0, bytes: PAGE };
            ring.set_source(unit, &[run]).unwrap();
        }
        let hot = device.elastic_buffer(PAGE, &ElasticOptions::default()).unwrap();
        hot.commit(0..PAGE).unwrap();
        let at = hot.base();
        // SAFETY: committed.
        late.launch(A, move |driver| unsafe { driver.write(at, &[2; PAGE as usize]) }.unwrap());
        let wrong = Arc::new(AtomicU64::new(0));
        let expect = |byte: u8| {
            let (at, count) = (ring.address(0).unwrap(), Arc::clone(&wrong));
            late.launch(B, move |driver| {
                let mut found = vec![0; PAGE as usize];
                // SAFETY: a unit's mapped addresses.
                unsafe { driver.read(at, &mut found) }.unwrap();
                count.fetch_add(u64::from(found != [byte; PAGE as usize]), Relaxed);
            });
        };
        ring.acquire(0, B).unwrap();
        // SAFETY: committed until all work is done.
        unsafe { buffer.store(0, at, PAGE, A) }.unwrap();
        expect(1);
        ring.release(0, B).unwrap();
        ring.acquire(0, B).unwrap();
        expect(2);
        ring.release(0, B).unwrap();
        late.drain();
        assert_eq!((wrong.load(Relaxed), late.failed()), (0, vec![]), "seed {seed}");
    }
}

#[test]
fn a_buffer_that_goes_with_a_store_under_way_takes_nothing_away() {
    for seed in 0..20 {
        let host = host();
        let late = ReorderingDriver::new(host.clone(), seed);
        let device = Device::with_driver(late.clone());
        let hot = device.elastic_buffer(PAGE, &ElasticOptions::default()).unwrap();
        hot.commit(0..PAGE).unwrap();
        let buffer = device.host_buffer(PAGE, Pinning::Required).unwrap();
        let at = hot.base();
        // SAFETY: committed.
        late.launch(A, move |driver| unsafe { driver.write(at, &[5; PAGE as usize]) }.unwrap());
        // SAFETY: committed until all work is done.
        unsafe { buffer.store(0, at, PAGE, A) }.unwrap();
        drop(buffer);
        // The next user's memory follows the copy.
        let next = device.host_buffer(PAGE, Pinning::Required).unwrap();
        next.write(0, &[9; PAGE as usize]).unwrap();
        late.drain();
        let mut found = vec![0; PAGE as usize];
        next.read(0, &mut found).unwrap();
        assert_eq!(found, [9; PAGE as usize], "seed {seed}");
        drop((next, hot));
        device.trim().unwrap();
        device.host_pool().trim().unwrap();
        assert_eq!(late.failed(), Vec::<String>::new());
    }
}

#[test]
fn what_cannot_be_stored_changes_nothing() {
    let faulty = FaultyDriver::new(host());
    let device = Device::with_driver(faulty.clone());
    let hot = device.elastic_buffer(PAGE, &ElasticOptions::default()).unwrap();
    hot.commit(0..PAGE).unwrap();
    let buffer = device.host_buffer(PAGE, Pinning::Required).unwrap();
    buffer.write(0, &[3; PAGE as usize]).unwrap();
    // SAFETY: committed.
    let store =
        |at: u64, from: Address, bytes: u64, stream: Stream| unsafe { buffer.store(at, from, bytes, stream) };
    for (at, bytes) in [(1, PAGE), (PAGE, 1), (u64::MAX, 2), (0, u64::MAX)] {
        assert!(matches!(store(at, hot.base(), bytes, A), Err(Error::InvalidSize { .. })));
    }
    assert_eq!(store(PAGE, hot.base(), 0, A), Ok(()));
    faulty.set_capturing(B, true);
    assert!(matches!(store(0, hot.base(), PAGE, B), Err(Error::StreamCapturing { .. })));
    assert!(matches!(buffer.before(B), Err(Error::StreamCapturing { .. })));
    faulty.set_capturing(B, false);
    assert_eq!(faulty.broken_captures(), Vec::<String>::new());
    let mut found = vec![0; PAGE as usize];
    buffer.read(0, &mut found).unwrap();
    assert_eq!(found, [3; PAGE as usize]);
    // SAFETY: committed.
    unsafe { device.driver().write(hot.base(), &[4; PAGE as usize]) }.unwrap();
    store(0, hot.base(), PAGE, A).unwrap();
    buffer.read(0, &mut found).unwrap();
    assert_eq!(found, [4; PAGE as usize]);
}
