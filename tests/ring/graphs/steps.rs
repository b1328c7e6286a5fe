//! Captured steps made and launched by the library: `Ring::capture_begin` to `RingGraph::leave`.

use std::ffi::{CStr, c_char, c_int};

use vmmgraph::driver::Executable;
use vmmgraph::ring::HostRun;
use vmmgraph::{Error, RingCaptureOptions, RingGraph};

use super::*;

/// A ring with units of `WORDS` words; each step copies the units to readable memory.
struct Steps {
    ring: Arc<Ring>,
    found: ElasticBuffer,
    /// One host buffer for all units, and its contents.
    host: Arc<HostBuffer>,
    bytes: Vec<u8>,
    /// Runs of each unit; bytes outside runs are undefined.
    runs: Vec<Vec<(u64, u64, u64)>>,
    next: u8,
}

struct Ready {
    step: Option<RingGraph>,
    graph: CUgraph,
    exec: CUgraphExec,
}

impl Ready {
    fn step(&self) -> &RingGraph {
        self.step.as_ref().unwrap()
    }

    fn executable(&self) -> Executable {
        // SAFETY: an executable graph of this test.
        unsafe { Executable::from_raw(self.exec as u64) }
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        self.step = None;
        code!(cuGraphExecDestroy(self.exec));
        code!(cuGraphDestroy(self.graph));
    }
}

fn main_stream(gpu: &Gpu) -> Stream {
    // SAFETY: a stream of the test that outlives the ring.
    unsafe { Stream::from_raw(gpu.main as u64) }
}

fn begin(gpu: &Gpu) {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    assert_eq!(code!(cuStreamBeginCapture_v2(gpu.main, mode)), 0);
}

fn end(gpu: &Gpu) -> Result<CUgraph, i32> {
    let mut graph: CUgraph = ptr::null_mut();
    match code!(cuStreamEndCapture(gpu.main, &raw mut graph)) {
        0 => Ok(graph),
        code => Err(code),
    }
}

impl Steps {
    fn new(gpu: &Gpu, units: &[RingUnit], slots: usize) -> Self {
        Self::with(gpu, units, &RingOptions { slots, ..RingOptions::default() })
    }

    fn with(gpu: &Gpu, units: &[RingUnit], options: &RingOptions<'_>) -> Self {
        let ring = Arc::new(gpu.device.ring(units, options).unwrap());
        let found = gpu.device.elastic_buffer(units.len() as u64 * UNIT, &ElasticOptions::default()).unwrap();
        found.commit(0..units.len() as u64 * UNIT).unwrap();
        let host = gpu.device.host_buffer(units.len() as u64 * UNIT, Pinning::Required).unwrap();
        let mut steps = Self {
            ring,
            found,
            host,
            bytes: vec![0; units.len() * UNIT as usize],
            runs: vec![Vec::new(); units.len()],
            next: 0,
        };
        for unit in 0..units.len() as u64 {
            steps.source(unit as usize, &[(unit * UNIT, 0, UNIT)]);
        }
        steps.change();
        steps
    }

    fn change(&mut self) {
        self.next = self.next.wrapping_add(1);
        let next = self.next;
        self.bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_mul(7) ^ next);
        self.host.write(0, &self.bytes).unwrap();
    }

    fn source(&mut self, unit: usize, runs: &[(u64, u64, u64)]) {
        let source = runs.iter().map(|(from, to, bytes)| HostRun {
            source: Arc::clone(&self.host),
            from: *from,
            to: *to,
            bytes: *bytes,
        });
        self.ring.set_source(unit, &source.collect::<Vec<_>>()).unwrap();
        self.runs[unit] = runs.to_vec();
    }

    fn use_unit(&self, gpu: &Gpu, unit: usize) {
        let to = self.found.base().0 + unit as u64 * UNIT;
        let from = self.ring.address(unit).unwrap().0;
        assert_eq!(code!(cuMemcpyDtoDAsync_v2(to, from, UNIT as usize, gpu.main)), 0);
    }

    fn body(&self, gpu: &Gpu) -> Result<(), Error> {
        for unit in 0..self.ring.schedule().units() {
            self.ring.acquire(unit, main_stream(gpu))?;
            self.use_unit(gpu, unit);
            self.ring.release(unit, main_stream(gpu))?;
        }
        Ok(())
    }

    fn try_capture(&self, gpu: &Gpu, options: &RingCaptureOptions) -> Result<Ready, Error> {
        begin(gpu);
        let captured = self.ring.capture_begin(main_stream(gpu), options).and_then(|()| {
            self.body(gpu)?;
            self.ring.capture_end(main_stream(gpu))
        });
        let step = match captured {
            Ok(step) => step,
            Err(error) => {
                self.ring.capture_abandon();
                if let Ok(graph) = end(gpu) {
                    code!(cuGraphDestroy(graph));
                }
                return Err(error);
            }
        };
        let graph = end(gpu).unwrap();
        let mut exec: CUgraphExec = ptr::null_mut();
        // Retry: the injected failure may hit this call.
        if code!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)) != 0 {
            assert_eq!(code!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)), 0);
        }
        Ok(Ready { step: Some(step), graph, exec })
    }

    fn capture(&self, gpu: &Gpu, options: &RingCaptureOptions) -> Ready {
        self.try_capture(gpu, options).unwrap()
    }

    fn launch(&self, gpu: &Gpu, ready: &Ready) -> Result<(), Error> {
        let give = || match code!(cuGraphLaunch(ready.exec, gpu.main)) {
            0 => Ok(()),
            code => Err(code),
        };
        // SAFETY: an executable of the captured graph.
        let launched = unsafe { ready.step().launch(ready.executable(), main_stream(gpu), give) }?;
        assert_eq!(launched, Ok(()));
        Ok(())
    }

    fn wrong(&self, gpu: &Gpu) -> usize {
        let mut found = vec![0; self.bytes.len()];
        // SAFETY: committed, and streams of the stand-in work at once.
        unsafe { gpu.device.driver().read(self.found.base(), &mut found) }.unwrap();
        let units = found.chunks(UNIT as usize).zip(&self.runs);
        let right = |(found, runs): &(&[u8], &Vec<(u64, u64, u64)>)| {
            runs.iter().all(|(from, to, bytes)| {
                let (from, to, bytes) = (*from as usize, *to as usize, *bytes as usize);
                found[to..to + bytes] == self.bytes[from..from + bytes]
            })
        };
        units.filter(|unit| !right(unit)).count()
    }
}

#[test]
fn a_captured_step_reads_what_its_sources_are_then() {
    let gpu = Gpu::open();
    for (count, slots, tail) in RINGS {
        let options = RingOptions { slots: *slots, within_step: *tail == 0, ..RingOptions::default() };
        let mut steps = Steps::with(&gpu, &units(*count), &options);
        let streamed = steps.ring.schedule().streamed().to_vec();
        let options = RingCaptureOptions { tail: *tail, most_runs: 3 };
        let ready = steps.capture(&gpu, &options);
        assert_eq!(ready.step().copies(), 3 * streamed.len());
        for seed in 0..80_u64 {
            gpu.shuffle(seed);
            let before = steps.ring.stats();
            steps.launch(&gpu, &ready).unwrap();
            assert_eq!(steps.wrong(&gpu), 0, "{count} units over {slots} with {tail}, seed {seed}");
            let after = steps.ring.stats();
            if seed > 0 && *tail == 0 && streamed.len() == *count {
                let planned: u64 = streamed.iter().flat_map(|unit| &steps.runs[*unit]).map(|run| run.2).sum();
                assert_eq!(after.copied_bytes - before.copied_bytes, planned);
                assert_eq!(after.launches - before.launches, 1);
            }
            // Between launches: no change, new contents, new runs of one unit, or eager work that
            // leaves other units in the slots.
            let unit = (seed / 4) as usize % count;
            match seed % 4 {
                1 => steps.change(),
                2 => {
                    let at = (unit as u64 * 31 + seed) % (*count as u64 - 1) * UNIT;
                    let runs: &[_] = &[(at, 0, 64), (at + 100, 64, 32), (at + 7, 128, UNIT - 128)];
                    steps.source(unit, &runs[..seed as usize / 4 % 4]);
                }
                3 => steps.body(&gpu).unwrap(),
                _ => {}
            }
            assert_eq!(steps.ring.audit(), Ok(()));
        }
    }
}

fn behind(gpu: &Gpu) -> Vec<usize> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph, mut nodes, mut edges, mut count) =
        (0, ptr::null_mut(), ptr::null(), ptr::null(), 0);
    let (at, to) = (&raw mut nodes, &raw mut edges);
    assert_eq!(
        code!(cuStreamGetCaptureInfo_v3(
            gpu.main,
            &raw mut status,
            &raw mut id,
            &raw mut graph,
            at,
            to,
            &raw mut count
        )),
        0
    );
    // SAFETY: the stand-in's array, valid until the thread's next query.
    (0..count).map(|place| unsafe { *nodes.add(place) } as usize).collect()
}

#[test]
fn a_units_copy_comes_first_among_what_its_reader_is_behind() {
    let gpu = Gpu::open();
    let steps = Steps::new(&gpu, &units(6), 2);
    let main = main_stream(&gpu);
    begin(&gpu);
    steps.ring.capture_begin(main, &RingCaptureOptions::default()).unwrap();
    let mut last = Vec::new();
    for unit in 0..6 {
        steps.ring.acquire(unit, main).unwrap();
        let now = behind(&gpu);
        // The first unit is resident from the previous step.
        assert_eq!(now.len(), if unit == 0 { 0 } else { 2 });
        assert!(unit == 0 || now[1..] == last[..], "{unit}: {now:?} after {last:?}");
        steps.use_unit(&gpu, unit);
        steps.ring.release(unit, main).unwrap();
        last = behind(&gpu);
    }
    let step = steps.ring.capture_end(main).unwrap();
    let now = behind(&gpu);
    assert!(now.len() == 2 && now[1..] == last[..], "the end: {now:?} after {last:?}");
    drop(step);
    code!(cuGraphDestroy(end(&gpu).unwrap()));
}

#[test]
fn graphs_of_one_ring_may_alternate() {
    let gpu = Gpu::open();
    let mut steps = Steps::new(&gpu, &units(9), 3);
    let ready = [0, 1, 3].map(|tail| steps.capture(&gpu, &RingCaptureOptions { tail, most_runs: 0 }));
    for seed in 0..120 {
        gpu.shuffle(seed);
        steps.launch(&gpu, &ready[(seed * 7 % 11) as usize % 3]).unwrap();
        assert_eq!(steps.wrong(&gpu), 0, "seed {seed}");
        if seed % 5 == 0 {
            steps.change();
        }
    }
}

#[test]
fn a_captured_step_is_whole_or_none() {
    let gpu = Gpu::open();
    let steps = Steps::new(&gpu, &units(6), 2);
    let main = main_stream(&gpu);
    let options = RingCaptureOptions::default();
    let wrong_state = |result: Result<(), Error>| matches!(result, Err(Error::WrongState { .. }));
    assert!(wrong_state(steps.ring.capture_begin(main, &options)), "nothing is captured");
    assert!(wrong_state(steps.ring.capture_end(main).map(drop)), "nothing was begun");

    // Ends the capture of the ring in each case; the stream's capture continues.
    let attempt = |body: &dyn Fn() -> Result<(), Error>| {
        begin(&gpu);
        steps.ring.capture_begin(main, &options).unwrap();
        let result = body().and_then(|()| steps.ring.capture_end(main).map(drop));
        steps.ring.capture_abandon();
        if let Ok(graph) = end(&gpu) {
            code!(cuGraphDestroy(graph));
        }
        result
    };
    let (acquire, release) = (|unit| steps.ring.acquire(unit, main), |unit| steps.ring.release(unit, main));
    assert!(wrong_state(attempt(&|| Ok(()))), "no unit was acquired");
    assert!(wrong_state(attempt(&|| (0..6).try_for_each(acquire))), "more units than slots");
    assert!(
        attempt(&|| acquire(1)).is_err_and(|error| matches!(error, Error::InvalidArgument { value: 1, .. }))
    );
    assert!(wrong_state(attempt(&|| release(0))));
    assert!(wrong_state(attempt(&|| acquire(0).and_then(|()| acquire(1)).and_then(|()| release(1)))));
    assert!(wrong_state(attempt(&|| acquire(0).and_then(|()| release(0)).and_then(|()| release(0)))));
    assert!(wrong_state(attempt(&|| steps.ring.capture_begin(main, &options))), "two at once");
    begin(&gpu);
    for most_runs in [4097, usize::MAX] {
        let refused = steps.ring.capture_begin(main, &RingCaptureOptions { tail: usize::MAX, most_runs });
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    assert!(end(&gpu).is_ok_and(|graph| code!(cuGraphDestroy(graph)) == 0));
    assert!(attempt(&|| acquire(6)).is_err());
    assert!(wrong_state(attempt(&|| {
        assert!(release(3).is_err());
        steps.body(&gpu)
    })));
    let gpu_copies = gpu.copies as u64;
    // SAFETY: a stream of the test.
    let other = unsafe { Stream::from_raw(gpu_copies) };
    let beside = attempt(&|| {
        steps.ring.acquire(3, other)?;
        steps.ring.release(3, other)?;
        steps.body(&gpu)
    });
    assert_eq!(beside, Ok(()));
    begin(&gpu);
    let refused = acquire(0);
    assert!(matches!(refused, Err(Error::StreamCapturing { .. })), "{refused:?}");
    assert!(matches!(release(0), Err(Error::StreamCapturing { .. })));
    assert!(end(&gpu).is_ok_and(|graph| code!(cuGraphDestroy(graph)) == 0));

    let ready = steps.capture(&gpu, &options);
    assert_eq!((steps.launch(&gpu, &ready), steps.wrong(&gpu)), (Ok(()), 0));
    assert_eq!(steps.ring.audit(), Ok(()));
}

#[test]
fn a_launch_has_the_ring_and_its_host_memory_for_itself() {
    let gpu = Gpu::open();
    let mut steps = Steps::new(&gpu, &units(6), 2);
    let (ready, other) = (
        steps.capture(&gpu, &RingCaptureOptions::default()),
        steps.capture(&gpu, &RingCaptureOptions::default()),
    );
    let main = main_stream(&gpu);
    let wrong_state = |result: Result<(), Error>| matches!(result, Err(Error::WrongState { .. }));
    // SAFETY: executables of this test's graphs, used by this thread only.
    let enter = |ready: &Ready| unsafe { ready.step().enter(ready.executable(), main) };
    enter(&ready).unwrap();
    assert!(wrong_state(enter(&ready)) && wrong_state(enter(&other)));
    assert!(wrong_state(steps.ring.acquire(0, main)) && wrong_state(steps.ring.prime().map(drop)));
    assert!(wrong_state(steps.host.write(0, &[1])) && wrong_state(steps.host.wait()));
    let old = steps.runs[2].clone();
    steps.source(2, &[(0, 0, UNIT)]);
    assert_eq!(code!(cuGraphLaunch(ready.exec, gpu.main)), 0);
    ready.step().leave(main, true).unwrap();
    let new = std::mem::replace(&mut steps.runs[2], old);
    assert_eq!(steps.wrong(&gpu), 0);
    steps.runs[2] = new;
    steps.change();
    for ready in [&ready, &other, &ready] {
        assert_eq!((steps.launch(&gpu, ready), steps.wrong(&gpu)), (Ok(()), 0));
    }
    enter(&ready).unwrap();
    ready.step().leave(main, false).unwrap();
    assert!(wrong_state(ready.step().leave(main, true)));
    steps.body(&gpu).unwrap();
    assert_eq!(steps.wrong(&gpu), 0);

    // Refused: a launch while a unit is acquired, with more runs than nodes, from unregistered
    // memory, or into a capture.
    steps.ring.acquire(1, main).unwrap();
    assert!(wrong_state(enter(&ready)));
    steps.ring.release(1, main).unwrap();
    let runs = [(0, 0, 10), (20, 20, 10)];
    let before = steps.runs[1].clone();
    steps.source(1, &runs);
    assert!(enter(&ready).is_err_and(|error| matches!(error, Error::InvalidArgument { value: 2, .. })));
    steps.source(1, &before);
    begin(&gpu);
    assert!(enter(&ready).is_err_and(|error| matches!(error, Error::StreamCapturing { .. })));
    assert!(end(&gpu).is_ok_and(|graph| code!(cuGraphDestroy(graph)) == 0));
    assert_eq!((steps.launch(&gpu, &ready), steps.wrong(&gpu)), (Ok(()), 0));

    // Graphs keep their ring and its host memory alive.
    let (ring, host) = (Arc::downgrade(&steps.ring), Arc::downgrade(&steps.host));
    drop(steps);
    assert!(ring.upgrade().is_some() && host.upgrade().is_some());
    drop((ready, other));
    assert!(ring.upgrade().is_none() && host.upgrade().is_none());
}

/// Each call costs host time, and a crossed granule would change every unit at once.
#[test]
fn an_executable_is_told_what_has_changed_and_no_more() {
    let gpu = Gpu::open();
    // SAFETY: the driver is open, so the library is loaded; the signature is in
    // tests/standin/src/control.rs.
    let count =
        unsafe { *culib().get::<unsafe extern "C" fn(*const c_char) -> u64>(b"standin_count\0").unwrap() };
    let calls = || {
        // SAFETY: zero-terminated names.
        let of = |name: &CStr| unsafe { count(name.as_ptr()) };
        [of(c"cuGraphExecMemcpyNodeSetParams"), of(c"cuGraphNodeSetEnabled")]
    };
    let mut steps = Steps::new(&gpu, &units(9), 3);
    let streamed = steps.ring.schedule().streamed().len() as u64;
    let ready = steps.capture(&gpu, &RingCaptureOptions { tail: 1, most_runs: 2 });
    let mut last = calls();
    let mut told = |steps: &mut Steps, bytes: u64, runs: usize| {
        for unit in 0..9 {
            let at = unit as u64 * UNIT;
            let all = [(at, 0, bytes), (at + UNIT - 8, UNIT - 8, 8)];
            steps.source(unit, &all[..runs]);
        }
        steps.launch(&gpu, &ready).unwrap();
        assert_eq!(steps.wrong(&gpu), 0);
        let now = calls();
        let new = [now[0] - last[0], now[1] - last[1]];
        last = now;
        new
    };
    let mut tells = |bytes, runs, each: [u64; 2]| {
        assert_eq!(told(&mut steps, bytes, runs), each.map(|calls| calls * streamed));
    };
    // First everything; then a longer copy; then no change.
    tells(64, 1, [1, 2]);
    tells(96, 1, [1, 0]);
    tells(96, 1, [0, 0]);
    // Without copies, no source is read; the next source counts as new.
    tells(96, 0, [0, 2]);
    tells(96, 2, [2, 2]);
    tells(128, 2, [1, 0]);
}

/// Its handle may be reused, or a different graph's copies may be in it; the caller reports this.
#[test]
fn an_executable_that_was_updated_otherwise_is_told_everything() {
    let gpu = Gpu::open();
    let mut steps = Steps::new(&gpu, &units(6), 2);
    let from = |steps: &mut Steps, skip: u64| {
        (0..6).for_each(|unit| steps.source(unit, &[(unit as u64 * UNIT + skip, 0, 64)]));
    };
    from(&mut steps, 0);
    let ready = steps.capture(&gpu, &RingCaptureOptions { tail: 1, most_runs: 1 });
    from(&mut steps, 100);
    assert_eq!((steps.launch(&gpu, &ready), steps.wrong(&gpu)), (Ok(()), 0));
    let update = || {
        let mut info = sys::CUgraphExecUpdateResultInfo_st {
            result: sys::CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
            errorNode: ptr::null_mut(),
            errorFromNode: ptr::null_mut(),
        };
        assert_eq!(code!(cuGraphExecUpdate_v2(ready.exec, ready.graph, &raw mut info)), 0);
    };
    update();
    steps.launch(&gpu, &ready).unwrap();
    assert!(steps.wrong(&gpu) > 0, "nobody said so");
    // Slots hold results of the wrong launch.
    steps.ring.abort();
    update();
    ready.step().forget_executable();
    assert_eq!((steps.launch(&gpu, &ready), steps.wrong(&gpu)), (Ok(()), 0));
}

#[test]
fn each_call_of_a_capture_and_a_launch_may_fail() {
    let gpu = Gpu::open();
    let control = |name: &'static [u8]| {
        // SAFETY: the driver is open, so the library is loaded; signatures are in
        // tests/standin/src/control.rs.
        unsafe { *culib().get::<unsafe extern "C" fn(u64, c_int)>(name).expect("not the stand-in") }
    };
    let fail = control(b"standin_fail\0");
    // SAFETY: as above.
    let reset = unsafe { *culib().get::<unsafe extern "C" fn()>(b"standin_reset_counters\0").unwrap() };
    // SAFETY: as above.
    let calls = unsafe { *culib().get::<unsafe extern "C" fn() -> u64>(b"standin_calls\0").unwrap() };
    let (mut captures, mut launches, mut nth) = (0, 0, 0);
    loop {
        nth += 1;
        let mut steps = Steps::new(&gpu, &units(9), 3);
        // SAFETY: functions of the stand-in.
        unsafe {
            reset();
            fail(nth, 999);
        }
        let captured = steps.try_capture(&gpu, &RingCaptureOptions { tail: 1, most_runs: 2 });
        let mut over = false;
        if let Ok(ready) = &captured {
            for round in 0..3 {
                let result = steps.launch(&gpu, ready);
                if result.is_err() {
                    launches += 1;
                    // The retry succeeds, as documented.
                    steps.launch(&gpu, ready).unwrap();
                }
                assert_eq!(steps.wrong(&gpu), 0, "call {nth}, round {round}");
                steps.source(round + 1, &[(round as u64 * 9, 3, 60), (40, 100, 90)]);
            }
            // SAFETY: a function of the stand-in.
            over = unsafe { calls() } < nth;
        } else {
            captures += 1;
        }
        // SAFETY: a function of the stand-in.
        unsafe { fail(0, 0) };
        drop(captured);
        let ready = steps.capture(&gpu, &RingCaptureOptions::default());
        steps.source(1, &[(5, 5, 50)]);
        steps.source(2, &[(6, 5, 50)]);
        steps.source(3, &[(7, 5, 50)]);
        assert_eq!(
            (steps.launch(&gpu, &ready), steps.wrong(&gpu), steps.ring.audit()),
            (Ok(()), 0, Ok(())),
            "call {nth}"
        );
        if over {
            break;
        }
    }
    println!("{nth} calls: {captures} captures and {launches} launches failed, and everything went on");
    assert!(captures > 30 && launches > 10, "{captures} and {launches}");
}

#[test]
fn what_is_stored_between_two_launches_is_what_the_next_one_reads() {
    let gpu = Gpu::open();
    for (count, slots, tail) in RINGS {
        let options = RingOptions { slots: *slots, within_step: *tail == 0, ..RingOptions::default() };
        let mut steps = Steps::with(&gpu, &units(*count), &options);
        let ready = steps.capture(&gpu, &RingCaptureOptions { tail: *tail, most_runs: 0 });
        let made = gpu.device.elastic_buffer(UNIT, &ElasticOptions::default()).unwrap();
        made.commit(0..UNIT).unwrap();
        // SAFETY: committed until the end of the round.
        let store =
            |steps: &Steps, at: u64| unsafe { steps.host.store(at, made.base(), UNIT, main_stream(&gpu)) };
        for seed in 0..40_u64 {
            gpu.shuffle(seed);
            for more in 0..seed % 3 {
                let at = (seed * 7 + more) % *count as u64 * UNIT;
                let byte = (seed * 3 + more) as u8;
                let value = u32::from_ne_bytes([byte; 4]);
                // SAFETY: committed.
                unsafe { gpu.device.driver().fill(made.base(), UNIT, value, main_stream(&gpu)) }.unwrap();
                store(&steps, at).unwrap();
                steps.host.before(main_stream(&gpu)).unwrap();
                steps.bytes[at as usize..(at + UNIT) as usize].fill(byte);
            }
            steps.launch(&gpu, &ready).unwrap();
            assert_eq!(steps.wrong(&gpu), 0, "{count} units over {slots} with {tail}, seed {seed}");
        }
        // Refused while a launch that reads the source is being submitted.
        let give = || {
            let refused = store(&steps, 0);
            assert!(matches!(refused, Err(Error::WrongState { .. })), "{refused:?}");
            match code!(cuGraphLaunch(ready.exec, gpu.main)) {
                0 => Ok(()),
                code => Err(code),
            }
        };
        // SAFETY: an executable of the captured graph.
        let launched = unsafe { ready.step().launch(ready.executable(), main_stream(&gpu), give) };
        assert_eq!(launched, Ok(Ok(())));
        assert_eq!(steps.wrong(&gpu), 0);
        let mut found = vec![0; steps.bytes.len()];
        steps.host.read(0, &mut found).unwrap();
        assert_eq!(found, steps.bytes);
        drop(ready);
        assert_eq!(steps.ring.audit(), Ok(()));
    }
}

/// An executable copies what it was captured with until it is told, whatever another one of the
/// same graph was told.
#[test]
fn two_executables_of_one_step_are_told_each_for_itself() {
    let gpu = Gpu::open();
    let mut steps = Steps::new(&gpu, &units(6), 2);
    let mut ready = steps.capture(&gpu, &RingCaptureOptions { tail: 1, most_runs: 1 });
    let mut other: CUgraphExec = ptr::null_mut();
    assert_eq!(code!(cuGraphInstantiateWithFlags(&raw mut other, ready.graph, 0)), 0);
    (0..6).for_each(|unit| steps.source(unit, &[(unit as u64 * UNIT / 2 + 32, 0, 64)]));
    for round in 0..4 {
        assert_eq!((steps.launch(&gpu, &ready), steps.wrong(&gpu)), (Ok(()), 0), "round {round}");
        // Contents of slots are not to hide what the next executable copies.
        steps.ring.abort();
        std::mem::swap(&mut ready.exec, &mut other);
        // SAFETY: committed, and the stand-in's streams do their work at once.
        unsafe { gpu.device.driver().write(steps.found.base(), &[0xee; 6 * UNIT as usize]) }.unwrap();
    }
    code!(cuGraphExecDestroy(other));
}

/// A driver that refuses some of what an executable is told leaves copies of the old memory in it.
#[test]
fn host_memory_stays_while_an_executable_may_read_it() {
    let gpu = Gpu::open();
    let control = |name: &'static [u8]| {
        // SAFETY: the driver is open, so the library is there; signatures are those of
        // tests/standin/src/control.rs.
        unsafe { *culib().get::<unsafe extern "C" fn(u64, c_int)>(name).expect("not the stand-in") }
    };
    let fail = control(b"standin_fail\0");
    // SAFETY: as above.
    let reset = unsafe { *culib().get::<unsafe extern "C" fn()>(b"standin_reset_counters\0").unwrap() };
    for nth in 1..200 {
        let steps = Steps::new(&gpu, &units(6), 2);
        let unit = steps.ring.schedule().streamed()[3];
        let buffer = |_| gpu.device.host_buffer(UNIT, Pinning::Required).unwrap();
        let [old, new] = [0, 1].map(buffer);
        let run =
            |source: &Arc<HostBuffer>| HostRun { source: Arc::clone(source), from: 0, to: 0, bytes: UNIT };
        steps.ring.set_source(unit, &[run(&old)]).unwrap();
        let ready = steps.capture(&gpu, &RingCaptureOptions { tail: 1, most_runs: 1 });
        steps.launch(&gpu, &ready).unwrap();
        let known = Arc::downgrade(&old);
        steps.ring.set_source(unit, &[run(&new)]).unwrap();
        drop(old);
        assert!(known.strong_count() > 0, "the graph was not told yet");
        // SAFETY: the stand-in's.
        unsafe {
            reset();
            fail(nth, 999);
        }
        let launched = steps.launch(&gpu, &ready);
        // SAFETY: the stand-in's.
        unsafe { fail(0, 0) };
        if launched.is_ok() {
            assert_eq!(
                known.strong_count(),
                0,
                "told otherwise, the graph keeps memory that it does not read"
            );
            assert!(nth > 2, "no launch was refused");
            return;
        }
        assert!(known.strong_count() > 0, "call {nth}: the memory is gone that the executable may read");
        steps.launch(&gpu, &ready).unwrap();
        assert_eq!(known.strong_count(), 0);
    }
    panic!("a launch never came to its end");
}

/// The branch of a ring's capture is in the stream's capture until that ends.
#[test]
fn two_captures_of_one_ring_may_overlap() {
    let gpu = Gpu::open();
    let steps = Steps::new(&gpu, &units(6), 2);
    // SAFETY: a stream of the test, which stays until the ring is gone.
    let second = unsafe { Stream::from_raw(gpu.copies as u64) };
    let options = RingCaptureOptions::default();
    begin(&gpu);
    steps.ring.capture_begin(main_stream(&gpu), &options).unwrap();
    steps.body(&gpu).unwrap();
    let first = steps.ring.capture_end(main_stream(&gpu)).unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    assert_eq!(code!(cuStreamBeginCapture_v2(gpu.copies, mode)), 0);
    steps.ring.capture_begin(second, &options).unwrap();
    for unit in 0..6 {
        steps.ring.acquire(unit, second).unwrap();
        steps.ring.release(unit, second).unwrap();
    }
    let other = steps.ring.capture_end(second).unwrap();
    let mut graph: CUgraph = ptr::null_mut();
    assert_eq!(code!(cuStreamEndCapture(gpu.copies, &raw mut graph)), 0);
    code!(cuGraphDestroy(graph));
    let graph = end(&gpu).unwrap();
    let mut exec: CUgraphExec = ptr::null_mut();
    assert_eq!(code!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)), 0);
    drop(other);
    let ready = Ready { step: Some(first), graph, exec };
    assert_eq!((steps.launch(&gpu, &ready), steps.wrong(&gpu)), (Ok(()), 0));
}
