//! A ring's schedule as one captured graph on the stand-in libcuda.so, with random node orders and
//! late reads. The schedule gives right bytes in all orders; without any single edge, some are
//! wrong.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::ptr;
use std::sync::{Arc, MutexGuard};

use cudarc::driver::sys::{self, CUevent, CUgraph, CUgraphExec, CUstream, culib};
use vmmgraph::driver::{CudaDriver, SharedDriver};
use vmmgraph::ring::{Edge, Held, Node, Remainder, Why};
use vmmgraph::{
    Device, ElasticBuffer, ElasticOptions, HostBuffer, Pinning, Ring, RingOptions, RingUnit, Stream,
};
use vmmgraph_testkit::alone;

macro_rules! code {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: live handles and pointers of this test.
        unsafe { sys::$name($($arg),*) as i32 }
    };
}

mod steps;

const UNIT: u64 = 256;
/// Codes of a refused capture: an uncaptured or unjoined stream.
const REFUSED: RangeInclusive<i32> = 900..=907;

/// The stand-in with its context current. Serializes tests.
struct Gpu {
    device: Arc<Device>,
    main: CUstream,
    copies: CUstream,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    fn open() -> Self {
        let turn = alone();
        let driver: SharedDriver = Arc::new(CudaDriver::new(0).unwrap());
        let mut context = ptr::null_mut();
        assert_eq!(code!(cuDevicePrimaryCtxRetain(&raw mut context, 0)), 0);
        assert_eq!(code!(cuCtxSetCurrent(context)), 0);
        let stream = || {
            let mut stream = ptr::null_mut();
            assert_eq!(code!(cuStreamCreate(&raw mut stream, 1)), 0);
            stream
        };
        Self { device: Device::with_driver(driver), main: stream(), copies: stream(), _turn: turn }
    }

    fn shuffle(&self, seed: u64) {
        // SAFETY: the driver is open, so the library is loaded; the signature is in
        // tests/standin/src/control.rs.
        unsafe {
            culib().get::<unsafe extern "C" fn(u64)>(b"standin_shuffle\0").expect("not the stand-in")(seed)
        };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.shuffle(0);
        // A capture left open by a failed test would fail later tests.
        let mut graph: CUgraph = ptr::null_mut();
        code!(cuStreamEndCapture(self.main, &raw mut graph));
        code!(cuStreamDestroy_v2(self.main));
        code!(cuStreamDestroy_v2(self.copies));
        code!(cuDevicePrimaryCtxRelease_v2(0));
    }
}

struct Model {
    ring: Ring,
    sources: Vec<Arc<HostBuffer>>,
    found: ElasticBuffer,
    tail: usize,
    stamps: Vec<u64>,
    held: Vec<Option<Held>>,
}

fn pattern(unit: usize, stamp: u64) -> Vec<u8> {
    (0..UNIT).map(|at| ((at * 5) ^ (unit as u64 * 37) ^ (stamp * 11)) as u8).collect()
}

impl Model {
    fn new(gpu: &Gpu, units: &[RingUnit], slots: usize, tail: usize) -> Self {
        let options = RingOptions { slots, remainder: Remainder::KeepResident, ..RingOptions::default() };
        let ring = gpu.device.ring(units, &options).unwrap();
        let found = gpu.device.elastic_buffer(units.len() as u64 * UNIT, &ElasticOptions::default()).unwrap();
        found.commit(0..units.len() as u64 * UNIT).unwrap();
        let source = |unit| {
            let buffer = gpu.device.host_buffer(UNIT, Pinning::Required).unwrap();
            buffer.write(0, &pattern(unit, 0)).unwrap();
            buffer
        };
        let (sources, stamps) = ((0..units.len()).map(source).collect(), vec![0; units.len()]);
        let held = vec![None; ring.schedule().places()];
        Self { ring, sources, found, tail, stamps, held }
    }

    /// Captures a step with these edges, in replay order; returns the code of a refusal.
    fn capture(&self, gpu: &Gpu, edges: &[Edge]) -> Result<CUgraphExec, i32> {
        let schedule = self.ring.schedule();
        let (mut nodes, mut coming) = (vec![Node::Begin], schedule.copies(self.tail).peekable());
        let streamed = schedule.streamed().len();
        for unit in 0..schedule.units() {
            // As far ahead as slots are free: copies come before independent uses.
            let position = schedule.position_of(unit).unwrap_or(0);
            while let Some(next) =
                coming.next_if(|next| *next < position + schedule.slots() && *next < streamed)
            {
                nodes.push(Node::Copy { position: next });
            }
            nodes.push(Node::Use { unit });
        }
        nodes.extend(coming.map(|position| Node::Copy { position }));
        nodes.push(Node::End);
        assert_eq!(
            code!(cuStreamBeginCapture_v2(
                gpu.main,
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED
            )),
            0
        );
        let mut events: BTreeMap<Node, CUevent> = BTreeMap::new();
        let mut result = 0;
        for node in nodes {
            let stream = if matches!(node, Node::Copy { .. }) { gpu.copies } else { gpu.main };
            // Work on one stream is ordered anyway.
            let crossing = |edge: &&Edge| !matches!(edge.why, Why::Program | Why::Chain);
            for edge in edges.iter().filter(|edge| edge.after == node).filter(crossing) {
                result = result.max(code!(cuStreamWaitEvent(stream, events[&edge.before], 0)));
            }
            result = result.max(self.give(node, stream));
            let mut event = ptr::null_mut();
            assert_eq!(code!(cuEventCreate(&raw mut event, 2)), 0);
            result = result.max(code!(cuEventRecord(event, stream)));
            events.insert(node, event);
        }
        let mut graph: CUgraph = ptr::null_mut();
        let ended = code!(cuStreamEndCapture(gpu.main, &raw mut graph));
        events.into_values().for_each(|event| assert_eq!(code!(cuEventDestroy_v2(event)), 0));
        let mut exec: CUgraphExec = ptr::null_mut();
        if ended == 0 {
            assert_eq!(code!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)), 0);
            assert_eq!(code!(cuGraphDestroy(graph)), 0);
        }
        if result.max(ended) == 0 { Ok(exec) } else { Err(result.max(ended)) }
    }

    /// Submits a copy, or the use of a unit, which stores the seen bytes.
    fn give(&self, node: Node, stream: CUstream) -> i32 {
        let schedule = self.ring.schedule();
        match node {
            Node::Begin | Node::End => 0,
            Node::Copy { position } => {
                let unit = schedule.unit_at(position).unwrap();
                let (to, from) = (self.ring.address(unit).unwrap().0, self.sources[unit].as_ptr());
                code!(cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), UNIT as usize, stream))
            }
            Node::Use { unit } => {
                let to = self.found.base().0 + unit as u64 * UNIT;
                code!(cuMemcpyDtoDAsync_v2(to, self.ring.address(unit).unwrap().0, UNIT as usize, stream))
            }
        }
    }

    fn step(&mut self, gpu: &Gpu, exec: CUgraphExec) -> usize {
        let schedule = self.ring.schedule();
        for unit in schedule.primes(self.tail, &self.held, &self.stamps) {
            let at = self.ring.address(unit).unwrap();
            // SAFETY: a unit's addresses; no launch is running.
            unsafe { gpu.device.driver().write(at, &pattern(unit, self.stamps[unit])) }.unwrap();
            let held = Held { unit, stamp: self.stamps[unit] };
            self.held[schedule.place_of(unit).unwrap()] = Some(held);
        }
        assert_eq!(code!(cuGraphLaunch(exec, gpu.main)), 0);
        schedule.advance(self.tail, &mut self.held, &self.stamps);
        let mut found = vec![0; schedule.units() * UNIT as usize];
        // SAFETY: committed; the launch is done.
        unsafe { gpu.device.driver().read(self.found.base(), &mut found) }.unwrap();
        let units = found.chunks(UNIT as usize).enumerate();
        units.filter(|(unit, found)| *found != pattern(*unit, self.stamps[*unit])).count()
    }

    fn change(&mut self, unit: usize) {
        self.stamps[unit] += 1;
        self.sources[unit].write(0, &pattern(unit, self.stamps[unit])).unwrap();
    }
}

/// Units, slots, tail.
const RINGS: &[(usize, usize, usize)] =
    &[(6, 2, 0), (6, 2, 1), (8, 2, 2), (9, 3, 0), (9, 3, 1), (4, 1, 0), (10, 3, 3)];

fn units(count: usize) -> Vec<RingUnit> {
    let mut units = vec![RingUnit::streamed(UNIT); count];
    if count > 8 {
        units[4].resident = true;
    }
    units
}

#[test]
fn the_schedule_is_right_in_any_order_that_its_edges_allow() {
    let gpu = Gpu::open();
    for (count, slots, tail) in RINGS {
        let mut model = Model::new(&gpu, &units(*count), *slots, *tail);
        let exec = model.capture(&gpu, &model.ring.schedule().edges(*tail)).unwrap();
        for seed in 0..60 {
            gpu.shuffle(seed);
            let wrong = model.step(&gpu, exec);
            assert_eq!(wrong, 0, "{count} units over {slots} with {tail}, seed {seed}");
            model.change(seed as usize % count);
        }
        assert_eq!(code!(cuGraphExecDestroy(exec)), 0);
    }
}

#[test]
fn an_edge_that_is_dropped_is_wrong_bytes_or_no_graph() {
    let gpu = Gpu::open();
    let mut dropped = BTreeMap::new();
    for (count, slots, tail) in RINGS {
        let edges = Model::new(&gpu, &units(*count), *slots, *tail).ring.schedule().edges(*tail);
        for (at, edge) in edges.iter().enumerate() {
            // These are implied by streams.
            if matches!(edge.why, Why::Program | Why::Chain) {
                continue;
            }
            let mut model = Model::new(&gpu, &units(*count), *slots, *tail);
            let mut fewer = edges.clone();
            fewer.remove(at);
            gpu.shuffle(0);
            let noticed = match model.capture(&gpu, &fewer) {
                Err(code) => {
                    assert!(REFUSED.contains(&code), "{edge:?}: {code}");
                    true
                }
                Ok(exec) => {
                    let mut seeds = 1..400;
                    let noticed = seeds.any(|seed| {
                        gpu.shuffle(seed);
                        model.change(seed as usize % count);
                        model.step(&gpu, exec) > 0
                    });
                    assert_eq!(code!(cuGraphExecDestroy(exec)), 0);
                    noticed
                }
            };
            assert!(
                noticed,
                "{edge:?} of {count} units over {slots} with {tail} was dropped, and nothing was wrong"
            );
            *dropped.entry(edge.why).or_insert(0) += 1;
        }
    }
    assert_eq!(dropped.keys().copied().collect::<Vec<_>>(), [Why::Fork, Why::Filled, Why::Read, Why::Join]);
}

#[test]
fn eager_work_and_graphs_use_the_same_addresses() {
    let gpu = Gpu::open();
    let mut model = Model::new(&gpu, &units(6), 2, 0);
    let exec = model.capture(&gpu, &model.ring.schedule().edges(0)).unwrap();
    // SAFETY: a stream of this test that outlives the ring.
    let main = unsafe { Stream::from_raw(gpu.main as u64) };
    for unit in 0..6 {
        let run =
            vmmgraph::ring::HostRun { source: Arc::clone(&model.sources[unit]), from: 0, to: 0, bytes: UNIT };
        model.ring.set_source(unit, &[run]).unwrap();
    }
    for round in 0..3 {
        gpu.shuffle(round + 7);
        assert_eq!(model.step(&gpu, exec), 0);
        // Eager work must not trust slots filled by a graph.
        model.ring.abort();
        for unit in 0..6 {
            model.ring.acquire(unit, main).unwrap();
            let mut found = vec![0; UNIT as usize];
            // SAFETY: acquired, on a driver with synchronous streams.
            unsafe { gpu.device.driver().read(model.ring.address(unit).unwrap(), &mut found) }.unwrap();
            assert_eq!(found, pattern(unit, model.stamps[unit]));
            model.ring.release(unit, main).unwrap();
        }
        model.change(round as usize);
    }
    assert_eq!((model.ring.audit(), code!(cuGraphExecDestroy(exec))), (Ok(()), 0));
}
