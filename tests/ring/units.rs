//! Rings on the host driver and on late streams, where a missing wait shows as wrong bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::pages::{Limits, Owner};
use vmmgraph::ring::{Adjustment, HostRun, Pace, Remainder};
use vmmgraph::{
    Address, Device, ElasticOptions, Error, HostBuffer, HostOptions, Pinning, Ring, RingOptions, RingUnit,
    Stream,
};
use vmmgraph_testkit::{FaultyDriver, ReorderingDriver, stream};

const PAGE: u64 = 4096;
const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);

fn host() -> Arc<HostDriver> {
    Arc::new(HostDriver::new(0, HostOptions { granularity: PAGE, memory_bytes: 64 << 20 }).unwrap())
}

fn whole(source: &Arc<HostBuffer>, bytes: u64) -> Vec<HostRun> {
    vec![HostRun { source: Arc::clone(source), from: 0, to: 0, bytes }]
}

fn pattern(unit: usize, version: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(7) ^ (unit as u64 * 31) ^ (version * 101)) as u8).collect()
}

struct Model {
    device: Arc<Device>,
    ring: Ring,
    units: Vec<RingUnit>,
    buffers: Vec<Arc<HostBuffer>>,
    versions: Vec<u64>,
}

impl Model {
    fn new(driver: SharedDriver, units: &[RingUnit], options: &RingOptions<'_>) -> Self {
        let device = Device::with_driver(driver);
        let ring = device.ring(units, options).unwrap();
        let mut buffers = Vec::new();
        for (unit, RingUnit { bytes, .. }) in units.iter().enumerate() {
            let buffer = device.host_buffer(*bytes, Pinning::Preferred).unwrap();
            buffer.write(0, &pattern(unit, 0, *bytes)).unwrap();
            ring.set_source(unit, &whole(&buffer, *bytes)).unwrap();
            buffers.push(buffer);
        }
        Self { device, ring, units: units.to_vec(), buffers, versions: vec![0; units.len()] }
    }

    fn expected(&self, unit: usize) -> Vec<u8> {
        pattern(unit, self.versions[unit], self.units[unit].bytes)
    }
}

fn read(driver: &SharedDriver, at: Address, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    // SAFETY: a unit's mapped addresses.
    unsafe { driver.read(at, &mut found) }.unwrap();
    found
}

fn mixed(count: usize) -> Vec<RingUnit> {
    let unit = |number: usize| {
        let bytes = PAGE * (1 + number as u64 % 3) - number as u64 * 11;
        if number % 5 == 3 { RingUnit::resident(bytes) } else { RingUnit::streamed(bytes) }
    };
    (0..count).map(unit).collect()
}

#[test]
fn pages_are_as_long_as_a_unit_where_that_costs_no_memory() {
    let streamed = RingUnit::streamed;
    let made = |units: &[RingUnit], slots: usize| {
        let host = host();
        let device = Device::with_driver(host.clone());
        let ring = device.ring(units, &RingOptions { slots, ..RingOptions::default() }).unwrap();
        assert_eq!(ring.audit(), Ok(()));
        let stats = ring.stats();
        (stats.page_bytes / PAGE, stats.device_bytes / PAGE)
    };
    assert_eq!(made(&[streamed(2 * PAGE); 6], 2), (2, 4));
    // Neither a power of two nor whole pages.
    assert_eq!(made(&[streamed(17 * PAGE - 5); 6], 3), (17, 51));
    // A slot fits its longest unit.
    assert_eq!(made(&[streamed(40 * PAGE), streamed(3 * PAGE)], 1), (40, 40));
    // For a resident short unit, an eighth of the longest unit instead, as a power of two.
    assert_eq!(made(&[streamed(40 * PAGE), streamed(40 * PAGE), RingUnit::resident(3 * PAGE)], 1), (4, 44));
    assert_eq!(made(&[streamed(3 * PAGE), streamed(2 * PAGE)], 2), (1, 5));
}

#[test]
fn units_have_addresses_of_their_own_over_the_pages_of_their_slots() {
    let (host, units) = (host(), [RingUnit::streamed(2 * PAGE); 6]);
    let device = Device::with_driver(host.clone());
    let tenant = device.account("tenant", None, Limits { most: Some(20 * PAGE), least: 0 }).unwrap();
    let options = RingOptions {
        name: "kv",
        slots: 2,
        page_bytes: PAGE,
        account: Some(&tenant),
        ..RingOptions::default()
    };
    let ring = device.ring(&units, &options).unwrap();
    assert_eq!(ring.audit(), Ok(()));
    let stats = ring.stats();
    assert_eq!((stats.units, stats.streamed, stats.slots, stats.page_bytes), (6, 6, 2, PAGE));
    assert_eq!((stats.device_bytes, stats.reserved_bytes), (4 * PAGE, 12 * PAGE));
    assert_eq!(stats.account.charged_bytes, 4 * PAGE);
    assert_eq!(tenant.stats().charged_bytes, 4 * PAGE);
    let owned_pages = device.pool().owned_pages();
    let own = owned_pages.iter().find(|owned| owned.owner == Owner::Ring { ring: stats.id }).unwrap();
    assert_eq!((own.pages, own.bytes, own.mappings), (4, 4 * PAGE, 12));
    let at = |unit| ring.address(unit).unwrap();
    let driver: SharedDriver = host.clone();
    for (unit, value) in [(0, 1_u8), (1, 2)] {
        // SAFETY: mapped, and used only here.
        unsafe { driver.write(at(unit), &[value; 64]) }.unwrap();
    }
    for unit in 0..6 {
        assert_eq!(read(&driver, at(unit), 64), [1 + unit as u8 % 2; 64], "unit {unit}");
        assert!(unit == 0 || at(unit).0 >= at(unit - 1).0 + 2 * PAGE);
    }
    drop(ring);
    assert_eq!((tenant.stats().charged_bytes, device.pool().audit_idle()), (0, Ok(())));
    drop((tenant, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn what_the_slots_do_not_divide_stays_resident_and_says_so() {
    let device = Device::with_driver(host());
    let units = [RingUnit::streamed(PAGE); 7];
    let ring = device.ring(&units, &RingOptions::default()).unwrap();
    assert_eq!(ring.schedule().adjustments(), [Adjustment::KeptResident { units: vec![3] }]);
    assert_eq!((ring.stats().streamed, ring.stats().device_bytes), (6, 4 * PAGE));
    let refuse = RingOptions { remainder: Remainder::Refuse, ..RingOptions::default() };
    assert!(matches!(device.ring(&units, &refuse), Err(Error::InvalidArgument { value: 7, .. })));
    assert_eq!(ring.audit(), Ok(()));
}

#[test]
fn a_ring_that_does_not_fit_changes_nothing() {
    let host = host();
    let device = Device::with_driver(host.clone());
    let units = [RingUnit::streamed(2 * PAGE); 6];
    let over = RingOptions { budget_bytes: Some(5 * PAGE), ..RingOptions::default() };
    let before = (host.leftovers(), device.pool().owned_pages());
    let refused = device.ring(&units, &over);
    assert!(matches!(refused, Err(Error::OverBudget { budget, .. }) if budget == 5 * PAGE), "{refused:?}");
    let long = [RingUnit::streamed(40 << 20); 6];
    assert!(matches!(device.ring(&long, &RingOptions::default()), Err(Error::OutOfMemory { .. })));
    device.trim().unwrap();
    assert_eq!((host.leftovers(), device.pool().owned_pages()), before);
    for (units, options) in [
        (&units[..], RingOptions { page_bytes: PAGE + 1, ..RingOptions::default() }),
        (&[RingUnit::streamed(0)], RingOptions::default()),
        (&[RingUnit::streamed(u64::MAX)], RingOptions::default()),
        (&[RingUnit::streamed(1 << 46); 4], RingOptions::default()),
        (&[], RingOptions::default()),
        (&units[..], RingOptions { pace: pace(0.0, 1e-3), ..RingOptions::default() }),
        (&units[..], RingOptions { pace: pace(50.0, f64::NAN), ..RingOptions::default() }),
    ] {
        assert!(device.ring(units, &options).is_err());
    }
    assert_eq!(host.leftovers(), before.0);
}

fn pace(link_gib_per_second: f64, compute_seconds: f64) -> Option<Pace> {
    Some(Pace { link_gib_per_second, compute_seconds, tokens: 1 })
}

#[test]
fn a_device_knows_how_many_rings_stream() {
    let device = Device::with_driver(host());
    let ring = |count: usize, resident: bool| {
        let units = vec![RingUnit { bytes: PAGE, resident }; count];
        device.ring(&units, &RingOptions { pace: pace(50.0, 1e-3), ..RingOptions::default() }).unwrap()
    };
    let (streams, all_resident, all_fit) = (ring(6, false), ring(6, true), ring(2, false));
    assert_eq!(device.streaming_rings(), 1);
    let another = ring(9, false);
    assert_eq!(device.streaming_rings(), 2);
    drop((streams, all_resident, all_fit));
    assert_eq!(device.streaming_rings(), 1);
    drop(another);
    assert_eq!(device.streaming_rings(), 0);
}

/// Runs steps on a late driver with changing sources; returns wrong reads and dropped waits.
fn run_late(seed: u64, units: &[RingUnit], slots: usize, losing: Option<fn(Stream) -> bool>) -> (u64, u64) {
    let host = host();
    let late = ReorderingDriver::new(host.clone(), seed);
    let options = RingOptions { slots, within_step: seed % 4 == 3, ..RingOptions::default() };
    let mut model = Model::new(late.clone(), units, &options);
    if let Some(losing) = losing {
        late.lose_waits(losing);
    }
    if seed.is_multiple_of(3) {
        model.ring.prime().unwrap();
    }
    let wrong = Arc::new(AtomicU64::new(0));
    for step in 0..3_u64 {
        let main = if (seed + step) % 5 == 4 { B } else { A };
        if main == B {
            let mark = model.device.pool().events().record(A).unwrap();
            mark.before(B).unwrap();
        }
        for unit in 0..units.len() {
            model.ring.acquire(unit, main).unwrap();
            let (at, expected) = (model.ring.address(unit).unwrap(), model.expected(unit));
            let count = Arc::clone(&wrong);
            // Two checks simulate a slow kernel.
            for _ in 0..2 {
                let (expected, count) = (expected.clone(), Arc::clone(&count));
                late.launch(main, move |driver| {
                    let found = read(driver, at, expected.len());
                    count.fetch_add(u64::from(found != expected), Relaxed);
                });
            }
            model.ring.release(unit, main).unwrap();
        }
        if main == B {
            let mark = model.device.pool().events().record(B).unwrap();
            mark.before(A).unwrap();
        }
        for (unit, RingUnit { bytes, .. }) in units.iter().enumerate() {
            let bytes = *bytes;
            match (seed + step + unit as u64 * 3) % 7 {
                0 if losing.is_none() => {
                    model.versions[unit] += 1;
                    model.buffers[unit].write(0, &model.expected(unit)).unwrap();
                }
                1 => {
                    model.versions[unit] += 1;
                    let buffer = model.device.host_buffer(bytes, Pinning::Required).unwrap();
                    buffer.write(0, &model.expected(unit)).unwrap();
                    model.ring.set_source(unit, &whole(&buffer, bytes)).unwrap();
                    model.buffers[unit] = buffer;
                }
                _ => {}
            }
        }
    }
    let stats = model.ring.stats();
    assert_eq!((stats.acquired, stats.ahead_failed), (0, 0));
    assert_eq!(stats.acquires, 3 * units.len() as u64);
    assert_eq!(model.ring.audit(), Ok(()));
    // Dropped without a wait: pending work must complete first.
    let Model { device, ring, buffers, .. } = model;
    drop((ring, buffers));
    if losing.is_none() {
        late.drain();
        device.trim().unwrap();
        device.host_pool().trim().unwrap();
        assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
        drop(device);
        assert_eq!((host.leftovers(), host.host_leftovers()[1]), ([0; 4], 0));
    } else {
        late.drain();
    }
    (wrong.load(Relaxed), late.lost())
}

#[test]
fn every_unit_finds_its_bytes_in_whatever_order_streams_work() {
    for seed in 0..120 {
        for (count, slots) in [(9, 2), (10, 3), (6, 1)] {
            assert_eq!(run_late(seed, &mixed(count), slots, None).0, 0, "seed {seed}, {count} over {slots}");
        }
    }
}

#[test]
fn a_wait_that_is_missing_is_wrong_bytes() {
    let wrong = |losing: fn(Stream) -> bool| {
        let found = (0..20).map(|seed| run_late(seed, &mixed(9), 2, Some(losing)));
        found.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    };
    // The reader's wait for the copy, and the copy's wait for the last reader.
    let of_readers = wrong(|stream| stream == A || stream == B);
    let of_copies = wrong(|stream| stream != A && stream != B);
    assert!(of_readers.0 > 0 && of_readers.1 > 0, "{of_readers:?}");
    assert!(of_copies.0 > 0 && of_copies.1 > 0, "{of_copies:?}");
}

#[test]
fn bytes_moved_are_bytes_planned() {
    let units = mixed(10);
    let mut model = Model::new(host(), &units, &RingOptions { within_step: true, ..RingOptions::default() });
    let streamed: u64 = model.ring.schedule().streamed().iter().map(|unit| units[*unit].bytes).sum();
    let resident: u64 = units.iter().map(|unit| unit.bytes).sum::<u64>() - streamed;
    let step = |model: &Model| {
        for (unit, RingUnit { bytes, .. }) in units.iter().enumerate() {
            model.ring.acquire(unit, A).unwrap();
            let found = read(model.device.driver(), model.ring.address(unit).unwrap(), *bytes as usize);
            assert_eq!(found, model.expected(unit), "unit {unit}");
            model.ring.release(unit, A).unwrap();
        }
    };
    for steps in 1..=4 {
        step(&model);
        let stats = model.ring.stats();
        assert_eq!(stats.copied_bytes, resident + steps * streamed, "after {steps} steps");
        // Only the first unit of a step, and a resident unit once, start their copy at the acquire.
        let copies = stats.filled_ahead + stats.filled_late;
        assert_eq!(copies, model.ring.schedule().residents().len() as u64 + steps * stats.streamed);
        assert_eq!(stats.filled_late, model.ring.schedule().residents().len() as u64 + steps);
        assert_eq!(stats.copies, copies);
    }
    let before = model.ring.stats().copied_bytes;
    let unit = model.ring.schedule().residents()[0];
    model.versions[unit] = 1;
    model.buffers[unit].write(0, &model.expected(unit)).unwrap();
    step(&model);
    step(&model);
    assert_eq!(model.ring.stats().copied_bytes - before, 2 * streamed + units[unit].bytes);
    // Across steps, all copies but the first are prefetched.
    let model = Model::new(host(), &units, &RingOptions::default());
    assert_eq!(model.ring.prime(), Ok(3 + model.ring.schedule().residents().len() as u64));
    assert_eq!(model.ring.prime(), Ok(0));
    (0..3).for_each(|_| step(&model));
    assert_eq!(model.ring.stats().filled_late, 0);
}

#[test]
fn runs_that_lie_together_are_one_copy() {
    let device = Device::with_driver(host());
    let ring = device
        .ring(&[RingUnit::streamed(PAGE); 4], &RingOptions { slots: 2, ..RingOptions::default() })
        .unwrap();
    let buffer = device.host_buffer(4 * PAGE, Pinning::Required).unwrap();
    buffer.write(0, &pattern(1, 2, 4 * PAGE)).unwrap();
    let run = |from, to, bytes| HostRun { source: Arc::clone(&buffer), from, to, bytes };
    ring.set_source(0, &[run(100, 100, 50), run(0, 0, 100), run(7, 150, 0), run(150, 150, 10)]).unwrap();
    ring.set_source(1, &[run(100, 0, 50), run(0, 50, 100)]).unwrap();
    for (unit, copies) in [(0, 1 + 2), (1, 0)] {
        let before = ring.stats().copies;
        ring.acquire(unit, A).unwrap();
        assert_eq!(ring.stats().copies - before, copies);
        ring.release(unit, A).unwrap();
    }
    let bytes = pattern(1, 2, 160);
    assert_eq!(read(device.driver(), ring.address(0).unwrap(), 160), bytes);
    assert_eq!(
        read(device.driver(), ring.address(1).unwrap(), 150),
        [&bytes[100..150], &bytes[..100]].concat()
    );
    ring.set_source(2, &[]).unwrap();
    let before = ring.stats().copied_bytes;
    ring.acquire(2, A).unwrap();
    ring.release(2, A).unwrap();
    assert_eq!(ring.stats().copied_bytes, before);
}

#[test]
fn what_is_wrong_is_said_and_the_ring_goes_on() {
    let model = Model::new(host(), &mixed(8), &RingOptions { slots: 2, ..RingOptions::default() });
    let (ring, buffer) = (&model.ring, &model.buffers[0]);
    assert_eq!(ring.schedule().place_of(0), ring.schedule().place_of(2));
    let none = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}")
    };
    none(ring.acquire(8, A));
    none(ring.release(usize::MAX, A));
    none(ring.set_source(8, &[]));
    none(ring.address(8).map(drop));
    let state = |result: Result<(), Error>, wanted: &str| match result {
        Err(Error::WrongState { sentence }) => assert!(sentence.contains(wanted), "{sentence}"),
        other => panic!("{other:?}"),
    };
    state(ring.release(0, A), "not acquired");
    ring.acquire(0, A).unwrap();
    state(ring.acquire(0, B), "acquired");
    state(ring.acquire(2, A), "another unit of its slot");
    state(ring.release(2, A), "not acquired");
    assert_eq!(ring.stats().acquired, 1);
    ring.release(0, A).unwrap();
    ring.acquire(2, A).unwrap();
    ring.release(2, A).unwrap();
    let run = |from, to, bytes| HostRun { source: Arc::clone(buffer), from, to, bytes };
    for runs in [
        vec![run(0, 1, PAGE)],
        vec![run(buffer.bytes(), 0, 1)],
        vec![run(u64::MAX, 0, 2)],
        vec![run(0, u64::MAX, 2)],
        vec![run(0, 0, 10), run(20, 9, 10)],
    ] {
        none(ring.set_source(0, &runs));
    }
    let other = Device::with_driver(host());
    let foreign = other.host_buffer(PAGE, Pinning::Required).unwrap();
    none(ring.set_source(0, &whole(&foreign, 10)));
    ring.acquire(0, A).unwrap();
    let bytes = model.units[0].bytes as usize;
    assert_eq!(read(model.device.driver(), ring.address(0).unwrap(), bytes), model.expected(0));
    ring.release(0, A).unwrap();
    let fresh = model
        .device
        .ring(&[RingUnit::streamed(PAGE); 4], &RingOptions { slots: 2, ..RingOptions::default() })
        .unwrap();
    state(fresh.acquire(0, A), "has no source");
    state(fresh.prime().map(drop), "has no source");
    fresh.set_source(0, &whole(buffer, 10)).unwrap();
    fresh.acquire(0, A).unwrap();
    fresh.release(0, A).unwrap();
    for bytes in [0, (1 << 30) + 1, u64::MAX] {
        let refused = model.device.host_buffer(bytes, Pinning::Preferred).map(drop);
        assert!(matches!(refused, Err(Error::InvalidSize { .. })), "{refused:?}");
    }
    for (at, len) in [(PAGE, 1), (u64::MAX, 1), (PAGE - 1, 2)] {
        assert!(foreign.write(at, &vec![0; len]).is_err() && foreign.read(at, &mut vec![0; len]).is_err());
    }
    assert_eq!((ring.audit(), fresh.audit()), (Ok(()), Ok(())));
}

#[test]
fn a_stream_under_capture_is_refused_and_its_capture_intact() {
    let faulty = FaultyDriver::new(host());
    let model = Model::new(faulty.clone(), &mixed(8), &RingOptions::default());
    let refused = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::StreamCapturing { .. })), "{result:?}")
    };
    faulty.set_capturing(A, true);
    refused(model.ring.acquire(0, A));
    model.ring.acquire(0, B).unwrap();
    refused(model.ring.release(0, A));
    model.ring.release(0, B).unwrap();
    faulty.set_capturing(A, false);
    model.ring.acquire(0, A).unwrap();
    faulty.set_capturing(A, true);
    refused(model.ring.release(0, A));
    // An abort waits for the end of the capture, and so does the slot's next user.
    model.ring.abort();
    refused(model.ring.acquire(0, B));
    faulty.set_capturing(A, false);
    model.ring.acquire(0, B).unwrap();
    model.ring.release(0, B).unwrap();
    assert_eq!(faulty.broken_captures(), Vec::<String>::new());
    assert_eq!(model.ring.audit(), Ok(()));
}

#[test]
fn a_step_that_ends_early_leaves_a_ring_that_knows_nothing_and_works() {
    for seed in 0..30 {
        let host = host();
        let late = ReorderingDriver::new(host.clone(), seed);
        let model = Model::new(late.clone(), &mixed(9), &RingOptions { slots: 2, ..RingOptions::default() });
        let wrong = Arc::new(AtomicU64::new(0));
        let expect = |unit: usize| {
            let (at, expected) = (model.ring.address(unit).unwrap(), model.expected(unit));
            let count = Arc::clone(&wrong);
            late.launch(A, move |driver| {
                count.fetch_add(u64::from(read(driver, at, expected.len()) != expected), Relaxed);
            });
        };
        for unit in [0, 1] {
            model.ring.acquire(unit, A).unwrap();
            expect(unit);
        }
        assert_eq!(model.ring.stats().acquired, 2);
        model.ring.abort();
        assert_eq!((model.ring.stats().acquired, model.ring.stats().aborts), (0, 1));
        let before = model.ring.stats().copied_bytes;
        for unit in 0..9 {
            model.ring.acquire(unit, A).unwrap();
            expect(unit);
            model.ring.release(unit, A).unwrap();
        }
        assert!(model.ring.stats().copied_bytes - before >= model.units.iter().map(|unit| unit.bytes).sum());
        late.drain();
        assert_eq!((wrong.load(Relaxed), late.failed()), (0, vec![]), "seed {seed}");
    }
}

#[test]
fn a_source_that_changes_while_its_copy_is_under_way_is_copied_again() {
    for seed in 0..30 {
        let host = host();
        let late = ReorderingDriver::new(host.clone(), seed);
        let mut model = Model::new(
            late.clone(),
            &[RingUnit::streamed(PAGE); 8],
            &RingOptions { slots: 4, ..RingOptions::default() },
        );
        assert_eq!(model.ring.prime(), Ok(4));
        let busy = late.done();
        let free = model.device.host_pool().stats().free_bytes;
        // In place, the writer waits for the copy; a new buffer needs no wait.
        model.versions[0] = 1;
        model.buffers[0].write(0, &model.expected(0)).unwrap();
        assert!(late.done() > busy, "the copy was over before it was written");
        model.versions[3] = 1;
        let buffer = model.device.host_buffer(PAGE, Pinning::Required).unwrap();
        buffer.write(0, &model.expected(3)).unwrap();
        model.ring.set_source(3, &whole(&buffer, PAGE)).unwrap();
        let old = std::mem::replace(&mut model.buffers[3], buffer);
        drop(old);
        let wrong = Arc::new(AtomicU64::new(0));
        for unit in 0..8 {
            model.ring.acquire(unit, A).unwrap();
            let (at, expected, count) =
                (model.ring.address(unit).unwrap(), model.expected(unit), Arc::clone(&wrong));
            late.launch(A, move |driver| {
                count.fetch_add(u64::from(read(driver, at, expected.len()) != expected), Relaxed);
            });
            model.ring.release(unit, A).unwrap();
        }
        late.drain();
        assert_eq!((wrong.load(Relaxed), late.failed()), (0, vec![]), "seed {seed}");
        let one = model.device.host_buffer(PAGE, Pinning::Required).unwrap();
        assert_eq!(model.device.host_pool().stats().free_bytes, free - PAGE);
        drop(one);
    }
}

#[test]
fn dropping_a_ring_in_use_waits_for_nobody_and_takes_nothing_away() {
    for seed in 0..30 {
        let host = host();
        let late = ReorderingDriver::new(host.clone(), seed);
        let model = Model::new(late.clone(), &mixed(8), &RingOptions::default());
        let wrong = Arc::new(AtomicU64::new(0));
        for unit in 0..3 {
            model.ring.acquire(unit, A).unwrap();
            let (at, expected, count) =
                (model.ring.address(unit).unwrap(), model.expected(unit), Arc::clone(&wrong));
            late.launch(A, move |driver| {
                count.fetch_add(u64::from(read(driver, at, expected.len()) != expected), Relaxed);
            });
            if unit < 2 {
                model.ring.release(unit, A).unwrap();
            }
        }
        // Unit 2 is acquired and copies run; everything is dropped, sources first.
        let Model { device, ring, buffers, .. } = model;
        drop(buffers);
        drop(ring);
        late.drain();
        assert_eq!((wrong.load(Relaxed), late.failed()), (0, vec![]), "seed {seed}");
        device.trim().unwrap();
        device.host_pool().trim().unwrap();
        assert_eq!(device.stats().physical_bytes, 0);
        drop(device);
        assert_eq!((host.leftovers(), host.host_leftovers()[1]), ([0; 4], 0));
    }
}

#[test]
fn host_memory_that_cannot_be_pinned_is_an_error_unless_it_was_said_to_do() {
    let host = host();
    let faulty = FaultyDriver::new(host.clone());
    faulty.refuse("host_register", true);
    let device = Device::with_driver(faulty.clone());
    let required = || device.host_buffer(3 * PAGE, Pinning::Required);
    let held = 2 << 20;
    for _ in 0..3 {
        let expected = Error::HostNotRegistered { requested: 3 * PAGE, held, registered: 0 };
        assert_eq!(required().map(drop), Err(expected));
        assert_eq!(device.host_pool().stats().held_bytes, held);
    }
    // Optional pinning works over staging buffers, or as a pageable copy.
    let mut model = Model::new(faulty.clone(), &mixed(8), &RingOptions::default());
    assert!(model.buffers.iter().all(|buffer| !buffer.registered()));
    for step in 0..2 {
        for unit in 0..8 {
            model.ring.acquire(unit, A).unwrap();
            let found = read(
                model.device.driver(),
                model.ring.address(unit).unwrap(),
                model.units[unit].bytes as usize,
            );
            assert_eq!(found, model.expected(unit));
            model.ring.release(unit, A).unwrap();
        }
        if step == 0 {
            model.versions[5] += 1;
            model.buffers[5].write(0, &model.expected(5)).unwrap();
        }
    }
    faulty.refuse("host_register", false);
    let buffer = required().unwrap();
    assert!(buffer.registered());
    assert_eq!(device.host_pool().stats().held_bytes, held);
    device.host_pool().set_limit(Some(held));
    let refused = device.host_buffer(4 << 20, Pinning::Required).map(drop);
    assert!(matches!(refused, Err(Error::OutOfHostMemory { .. })), "{refused:?}");
}

#[test]
fn a_thread_that_changes_sources_never_shows_half_of_one() {
    let units = [RingUnit::streamed(8 * PAGE); 6];
    let model = Model::new(host(), &units, &RingOptions { slots: 2, ..RingOptions::default() });
    /// Ends the second thread in any case.
    struct Stop<'a>(&'a AtomicU64);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(1, Relaxed);
        }
    }
    let (stop, steps) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            let mut version = 1;
            while stop.load(Relaxed) == 0 {
                let unit = version as usize % units.len();
                let bytes = vec![version as u8; 8 * PAGE as usize];
                if version % 3 == 0 {
                    let buffer = model.device.host_buffer(8 * PAGE, Pinning::Required).unwrap();
                    buffer.write(0, &bytes).unwrap();
                    model.ring.set_source(unit, &whole(&buffer, 8 * PAGE)).unwrap();
                } else {
                    model.buffers[unit].write(0, &bytes).unwrap();
                }
                version += 1;
            }
        });
        for _ in 0..40 {
            for unit in 0..units.len() {
                model.ring.acquire(unit, A).unwrap();
                let found = read(model.device.driver(), model.ring.address(unit).unwrap(), 8 * PAGE as usize);
                let first = pattern(unit, 0, 8 * PAGE);
                assert!(found == first || found.iter().all(|byte| *byte == found[0]), "unit {unit} is torn");
                model.ring.release(unit, A).unwrap();
            }
            steps.fetch_add(1, Relaxed);
        }
    });
    assert_eq!((steps.load(Relaxed), model.ring.audit()), (40, Ok(())));
}

/// One of several copies of a unit fails: the slot holds bytes of two units.
#[test]
fn a_place_whose_copy_failed_half_way_is_copied_again() {
    const RUN: u64 = PAGE / 2;
    const RUNS: u8 = 4;
    let bytes_of = |unit: usize, run: u8| vec![unit as u8 * 10 + run + 1; RUN as usize];
    for failing in 1..40 {
        let host = host();
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        let units = [RingUnit::streamed(u64::from(RUNS) * RUN); 6];
        let ring = device.ring(&units, &RingOptions { slots: 2, ..RingOptions::default() }).unwrap();
        for unit in 0..units.len() {
            let run = |run: u8| {
                let source = device.host_buffer(RUN, Pinning::Preferred).unwrap();
                source.write(0, &bytes_of(unit, run)).unwrap();
                HostRun { source, from: 0, to: u64::from(run) * RUN, bytes: RUN }
            };
            ring.set_source(unit, &(0..RUNS).map(run).collect::<Vec<_>>()).unwrap();
        }
        ring.acquire(0, A).unwrap();
        // The release prefetches.
        faulty.arm(&[failing]);
        let released = ring.release(0, A);
        faulty.arm(&[]);
        if released.is_err() {
            ring.release(0, A).unwrap();
        }
        let driver: SharedDriver = host;
        for unit in [0, 2, 0, 1, 3, 5] {
            ring.acquire(unit, A).unwrap();
            let found = read(&driver, ring.address(unit).unwrap(), units[unit].bytes as usize);
            let expected: Vec<u8> = (0..RUNS).flat_map(|run| bytes_of(unit, run)).collect();
            assert!(found == expected, "unit {unit} after call {failing} failed");
            ring.release(unit, A).unwrap();
        }
    }
}

/// A ring of two units that share one slot, each copied from a buffer.
fn of_one_slot(faulty: &Arc<FaultyDriver>) -> (Arc<Device>, Ring, Vec<Arc<HostBuffer>>) {
    let device = Device::with_driver(faulty.clone());
    let options = RingOptions { slots: 1, ..RingOptions::default() };
    let ring = device.ring(&[RingUnit::streamed(PAGE); 2], &options).unwrap();
    let buffers: Vec<_> = (0..2).map(|_| device.host_buffer(PAGE, Pinning::Required).unwrap()).collect();
    for (unit, buffer) in buffers.iter().enumerate() {
        buffer.write(0, &pattern(unit, 0, PAGE)).unwrap();
        ring.set_source(unit, &whole(buffer, PAGE)).unwrap();
    }
    (device, ring, buffers)
}

/// The pages of a ring that is dropped while the device is busy stay mapped until the device is
/// done.
fn goes_behind_the_device(faulty: &FaultyDriver, device: &Device, ring: Ring, what: &str) {
    let unmaps = faulty.count("unmap");
    drop(ring);
    device.give_back(Duration::ZERO);
    assert_eq!(faulty.count("unmap"), unmaps, "{what}: unmapped while the device uses the pages");
    faulty.set_busy(false);
    device.trim().unwrap();
    assert_eq!((device.stats().physical_bytes, device.stats().pending), (0, 0), "{what}");
}

/// Filling a unit that needs no copy gives nothing to the copy stream, so nothing there is behind
/// the last reader of its slot.
#[test]
fn a_unit_without_runs_keeps_the_readers_of_its_slot() {
    let faulty = FaultyDriver::new(host());
    let (device, ring, _buffers) = of_one_slot(&faulty);
    ring.set_source(1, &[]).unwrap();
    ring.acquire(0, A).unwrap();
    faulty.set_busy(true);
    // The release fills unit 1, which takes no copy.
    ring.release(0, A).unwrap();
    goes_behind_the_device(&faulty, &device, ring, "a reader");
}

#[test]
fn a_copy_of_which_a_part_failed_is_waited_for_before_its_pages_go() {
    let faulty = FaultyDriver::new(host());
    let (device, ring, buffers) = of_one_slot(&faulty);
    let half =
        |buffer: usize, to| HostRun { source: Arc::clone(&buffers[buffer]), from: 0, to, bytes: PAGE / 2 };
    ring.set_source(0, &[half(0, 0), half(1, PAGE / 2)]).unwrap();
    faulty.set_busy(true);
    let (copies, refusing) = (AtomicU64::new(0), Arc::downgrade(&faulty));
    faulty.set_hook(Some(Arc::new(move |call| {
        if call == "copy_from_host" {
            refusing.upgrade().unwrap().refuse(call, copies.fetch_add(1, Relaxed) == 1);
        }
    })));
    assert!(ring.acquire(0, A).is_err());
    faulty.set_hook(None);
    faulty.refuse("copy_from_host", false);
    goes_behind_the_device(&faulty, &device, ring, "the first of two copies");
    drop(buffers);
}

/// The buffer cannot be asked whether it is stored to, so the fill gives nothing to the device.
/// What was under way to the slot still is.
#[test]
fn a_fill_that_fails_before_its_first_copy_keeps_the_copies_under_way() {
    let faulty = FaultyDriver::new(host());
    let (device, ring, buffers) = of_one_slot(&faulty);
    let hot = device.elastic_buffer(PAGE, &ElasticOptions { page_bytes: PAGE, ..ElasticOptions::default() });
    let hot = hot.unwrap();
    hot.commit(0..PAGE).unwrap();
    faulty.set_busy(true);
    assert_eq!(ring.prime(), Ok(1));
    // SAFETY: committed until the end of the test.
    unsafe { buffers[1].store(0, hot.base(), PAGE, A) }.unwrap();
    faulty.refuse("event_query", true);
    assert!(ring.acquire(1, A).is_err());
    faulty.refuse("event_query", false);
    drop(buffers);
    let unmaps = faulty.count("unmap");
    drop(ring);
    device.give_back(Duration::ZERO);
    assert_eq!(faulty.count("unmap"), unmaps, "unmapped under a copy");
    faulty.set_busy(false);
    drop(hot);
    device.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
}

#[test]
fn priming_leaves_the_slots_of_acquired_units_alone() {
    let host = host();
    let model = Model::new(
        host.clone(),
        &[RingUnit::streamed(PAGE); 4],
        &RingOptions { slots: 2, ..RingOptions::default() },
    );
    model.ring.acquire(2, A).unwrap();
    // Unit 0 is the first of that slot, and unit 1 of the other.
    model.ring.prime().unwrap();
    let driver: SharedDriver = host;
    let found = read(&driver, model.ring.address(2).unwrap(), PAGE as usize);
    assert_eq!(found, model.expected(2), "another unit was copied over one in use");
    model.ring.release(2, A).unwrap();
}
