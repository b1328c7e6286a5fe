//! Launches of a captured step beside eager work, stores and writes, on late streams: a missing
//! wait shows as wrong bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use vmmgraph::driver::{Executable, HostDriver};
use vmmgraph::ring::HostRun;
use vmmgraph::{
    Device, ElasticBuffer, ElasticOptions, Error, HostBuffer, HostOptions, Pinning, Ring, RingCaptureOptions,
    RingGraph, RingOptions, RingUnit, Stream,
};
use vmmgraph_testkit::{CopyingDriver, FaultyDriver, Losing, Random, ReorderingDriver, lossy, stream};

const PAGE: u64 = 4096;
const UNITS: usize = 5;
const CAPTURED: Stream = stream(0xc0);
const STREAMS: [Stream; 3] = [stream(0xa0), stream(0xb0), stream(0xd0)];

struct Step {
    graph: RingGraph,
    executable: Executable,
    before: Vec<usize>,
}

struct Bench {
    late: Arc<ReorderingDriver>,
    copying: Arc<CopyingDriver>,
    device: Arc<Device>,
    ring: Arc<Ring>,
    buffers: Vec<Arc<HostBuffer>>,
    sources: Vec<(usize, u64)>,
    contents: Vec<[u8; 2]>,
    /// Device memory for stores, a page for each stream.
    hot: ElasticBuffer,
    wrong: Arc<AtomicU64>,
}

impl Bench {
    fn new(host: Arc<HostDriver>, seed: u64) -> Self {
        let late = ReorderingDriver::new(host, seed);
        let copying = CopyingDriver::new(late.clone());
        let device = Device::with_driver(copying.clone());
        let options = RingOptions { slots: 2, within_step: seed % 3 == 2, ..RingOptions::default() };
        let mut units = [RingUnit::streamed(PAGE); UNITS];
        units[seed as usize % UNITS] = RingUnit { resident: true, ..units[0] };
        let ring = Arc::new(device.ring(&units, &options).unwrap());
        let buffer = |_| device.host_buffer(2 * PAGE, Pinning::Required).unwrap();
        let buffers: Vec<_> = (0..UNITS.div_ceil(2)).map(buffer).collect();
        let hot = device.elastic_buffer(3 * PAGE, &ElasticOptions::default()).unwrap();
        hot.commit(0..3 * PAGE).unwrap();
        let sources = (0..UNITS).map(|unit| (unit / 2, unit as u64 % 2)).collect();
        let contents = vec![[0; 2]; buffers.len()];
        let wrong = Arc::default();
        let mut bench = Self { late, copying, device, ring, buffers, sources, contents, hot, wrong };
        for unit in 0..UNITS {
            let (buffer, half) = bench.sources[unit];
            bench.write(buffer, half, unit as u8 + 1);
            bench.set_source(unit, buffer, half);
        }
        bench
    }

    fn write(&mut self, buffer: usize, half: u64, byte: u8) {
        self.buffers[buffer].write(half * PAGE, &[byte; PAGE as usize]).unwrap();
        self.contents[buffer][half as usize] = byte;
    }

    fn set_source(&mut self, unit: usize, buffer: usize, half: u64) {
        let source = Arc::clone(&self.buffers[buffer]);
        self.ring.set_source(unit, &[HostRun { source, from: half * PAGE, to: 0, bytes: PAGE }]).unwrap();
        self.sources[unit] = (buffer, half);
    }

    fn store(&mut self, lane: usize, buffer: usize, half: u64, byte: u8) {
        let (at, stream) = (self.hot.base().plus(lane as u64 * PAGE), STREAMS[lane]);
        // The previous bytes must be stored before they are overwritten.
        self.buffers.iter().for_each(|buffer| buffer.before(stream).unwrap());
        // SAFETY: committed.
        self.late.launch(stream, move |driver| unsafe { driver.write(at, &[byte; PAGE as usize]) }.unwrap());
        // SAFETY: committed until all work is done.
        unsafe { self.buffers[buffer].store(half * PAGE, at, PAGE, stream) }.unwrap();
        self.contents[buffer][half as usize] = byte;
    }

    fn expect(&self, unit: usize, stream: Stream) {
        let (buffer, half) = self.sources[unit];
        let (at, byte) = (self.ring.address(unit).unwrap(), self.contents[buffer][half as usize]);
        let wrong = Arc::clone(&self.wrong);
        self.late.launch(stream, move |driver| {
            let mut found = vec![0; PAGE as usize];
            // SAFETY: a unit's mapped addresses.
            unsafe { driver.read(at, &mut found) }.unwrap();
            wrong.fetch_add(u64::from(found != [byte; PAGE as usize]), Relaxed);
        });
    }

    fn eager(&self, unit: usize, stream: Stream) {
        self.ring.acquire(unit, stream).unwrap();
        self.expect(unit, stream);
        self.ring.release(unit, stream).unwrap();
    }

    fn capture(&self, tail: usize) -> Step {
        self.copying.begin(CAPTURED);
        self.ring.capture_begin(CAPTURED, &RingCaptureOptions { tail, most_runs: 1 }).unwrap();
        let mut before = Vec::new();
        for unit in 0..UNITS {
            self.ring.acquire(unit, CAPTURED).unwrap();
            before.push(self.copying.copies() as usize);
            self.ring.release(unit, CAPTURED).unwrap();
        }
        let graph = self.ring.capture_end(CAPTURED).unwrap();
        Step { graph, executable: self.copying.end(), before }
    }

    /// Submits the launch in pieces, so that work of other streams comes between.
    fn launch(&self, step: &Step, stream: Stream) {
        let pieces = || {
            let copies = self.copying.told();
            let mut done = 0;
            for (unit, before) in step.before.iter().copied().chain([copies.len()]).enumerate() {
                for (to, from, bytes) in copies[done..before].iter().flatten().copied() {
                    self.late.launch(stream, move |driver| {
                        // SAFETY: a source lives as long as a launch that reads it.
                        let from = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
                        // SAFETY: a unit's mapped addresses.
                        unsafe { driver.write(to, from) }.unwrap();
                    });
                }
                done = before;
                if unit < UNITS {
                    self.expect(unit, stream);
                }
            }
            Ok::<_, Error>(())
        };
        // SAFETY: the executable of the captured step, launched by one thread at a time.
        unsafe { step.graph.launch(step.executable, stream, pieces) }.unwrap().unwrap();
    }
}

/// Returns wrong reads and dropped waits.
fn run(seed: u64, losing: Option<Losing>) -> (u64, u64) {
    let host =
        Arc::new(HostDriver::new(0, HostOptions { granularity: PAGE, memory_bytes: 64 << 20 }).unwrap());
    let mut bench = Bench::new(host.clone(), seed);
    let mut random = Random::new(seed);
    let step = bench.capture(seed as usize % 2);
    if let Some(losing) = losing {
        bench.late.lose_waits(losing);
    }
    for number in 0..60 {
        let lane = random.below(3) as usize;
        let (unit, buffer, half) = (
            random.below(UNITS as u64) as usize,
            random.below(bench.buffers.len() as u64) as usize,
            random.below(2),
        );
        let byte = 10 + number;
        match random.below(16) {
            0..5 => bench.launch(&step, STREAMS[lane]),
            5..9 => bench.eager(unit, STREAMS[lane]),
            9..12 => bench.store(lane, buffer, half, byte),
            12 => bench.write(buffer, half, byte),
            13 => bench.set_source(unit, buffer, half),
            14 => drop(bench.ring.prime().unwrap()),
            _ => bench.ring.abort(),
        }
    }
    assert_eq!(bench.ring.audit(), Ok(()));
    let Bench { late, copying, device, ring, buffers, hot, wrong, .. } = bench;
    if losing.is_some() {
        late.drain();
    }
    drop((step, ring, buffers));
    late.drain();
    drop(hot);
    if losing.is_none() {
        device.trim().unwrap();
        device.host_pool().trim().unwrap();
        assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
        drop((device, copying));
        assert_eq!((host.leftovers(), host.host_leftovers()[1]), ([0; 4], 0));
    }
    (wrong.load(Relaxed), late.lost())
}

#[test]
fn a_step_finds_what_its_sources_have_in_whatever_order_streams_work() {
    for seed in 0..300 {
        assert_eq!(run(seed, None), (0, 0), "seed {seed}");
    }
}

#[test]
fn a_wait_that_is_missing_is_wrong_bytes() {
    lossy(|stream| STREAMS.contains(&stream), run);
    lossy(|stream| !STREAMS.contains(&stream), run);
}

/// A captured step of a ring on a driver that can be made to fail, nothing of which is filled
/// before its launch.
fn step_within() -> (Arc<FaultyDriver>, Arc<Device>, Arc<Ring>, RingGraph, Executable) {
    let host = HostDriver::new(0, HostOptions { granularity: PAGE, ..HostOptions::default() }).unwrap();
    let faulty = FaultyDriver::new(Arc::new(host));
    let copying = CopyingDriver::new(faulty.clone());
    let device = Device::with_driver(copying.clone());
    let options = RingOptions { slots: 2, within_step: true, ..RingOptions::default() };
    let ring = Arc::new(device.ring(&[RingUnit::streamed(PAGE); 4], &options).unwrap());
    for unit in 0..4 {
        let source = device.host_buffer(PAGE, Pinning::Required).unwrap();
        source.write(0, &[unit as u8 + 1; PAGE as usize]).unwrap();
        ring.set_source(unit, &[HostRun { source, from: 0, to: 0, bytes: PAGE }]).unwrap();
    }
    copying.begin(CAPTURED);
    ring.capture_begin(CAPTURED, &RingCaptureOptions { tail: 0, most_runs: 1 }).unwrap();
    for unit in 0..4 {
        ring.acquire(unit, CAPTURED).unwrap();
        ring.release(unit, CAPTURED).unwrap();
    }
    let graph = ring.capture_end(CAPTURED).unwrap();
    let executable = copying.end();
    (faulty, device, ring, graph, executable)
}

/// A launch that is refused leaves the ring behind what was under way before.
#[test]
fn a_refused_launch_forgets_no_reader() {
    let (faulty, device, ring, graph, executable) = step_within();
    ring.acquire(0, STREAMS[0]).unwrap();
    faulty.set_busy(true);
    ring.release(0, STREAMS[0]).unwrap();
    faulty.refuse("event_wait", true);
    // SAFETY: the executable of the captured step.
    assert!(unsafe { graph.enter(executable, STREAMS[1]) }.is_err());
    faulty.refuse("event_wait", false);
    let unmaps = faulty.count("unmap");
    drop((graph, ring));
    device.give_back(Duration::ZERO);
    assert_eq!(faulty.count("unmap"), unmaps, "unmapped while the device reads it");
    faulty.set_busy(false);
    device.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
}

/// Nobody knows which copies of a launch that failed were made.
#[test]
fn a_launch_that_failed_leaves_slots_that_are_filled_again() {
    let (_faulty, _device, ring, graph, executable) = step_within();
    ring.acquire(0, STREAMS[0]).unwrap();
    ring.release(0, STREAMS[0]).unwrap();
    let failed = || Err::<(), _>("a launch that failed");
    // SAFETY: the executable of the captured step.
    assert!(unsafe { graph.launch(executable, STREAMS[0], failed) }.unwrap().is_err());
    // The release filled it ahead.
    let late = ring.stats().filled_late;
    ring.acquire(2, STREAMS[0]).unwrap();
    assert_eq!(ring.stats().filled_late, late + 1, "a slot is taken for filled");
}
