//! Executables within limits on the stand-in libcuda: driver failures, threads, leaks. Real graphs:
//! tests/torch/executables_test.cpp.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys;
use vmmgraph::driver::{CudaDriver, Driver, Graph, Memory, Transfer};
use vmmgraph::executables::Limits;
use vmmgraph::units::Address;
use vmmgraph::{Error, ExecutablePool, GraphTemplate};
use vmmgraph_testkit::alone;

const PAGE: u64 = 2 << 20;
const PART: u64 = 4096;

fn control<T: Copy>(name: &[u8]) -> T {
    // SAFETY: the driver is open, so the library is loaded; signatures are in
    // tests/standin/src/control.rs.
    unsafe { *sys::culib().get::<T>(name).expect("not the stand-in") }
}

fn executables() -> u64 {
    // SAFETY: the signature matches.
    unsafe { control::<unsafe extern "C" fn() -> u64>(b"standin_executables\0")() }
}

fn overlapping_calls() -> u64 {
    // SAFETY: as above.
    unsafe { control::<unsafe extern "C" fn() -> u64>(b"standin_overlapping_executable_calls\0")() }
}

fn calls() -> u64 {
    // SAFETY: as above.
    unsafe { control::<unsafe extern "C" fn() -> u64>(b"standin_calls\0")() }
}

fn fail(nth: u64, code: i32, second: u64) {
    // SAFETY: as above.
    unsafe {
        control::<unsafe extern "C" fn(u64, i32)>(b"standin_fail\0")(nth, code);
        control::<unsafe extern "C" fn(u64, i32)>(b"standin_fail_second\0")(second, code);
    }
}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// A page of device memory, a stream and the driver. Serializes tests, which count executables and
/// inject failures.
struct Device {
    driver: Arc<CudaDriver>,
    context: sys::CUcontext,
    stream: sys::CUstream,
    page: vmmgraph::driver::PageHandle,
    base: Address,
    _alone: MutexGuard<'static, ()>,
}

// SAFETY: driver handles work on any thread; the guard stays on its thread.
unsafe impl Sync for Device {}

impl Device {
    fn new() -> Self {
        let alone = alone();
        let driver = Arc::new(CudaDriver::new(0).unwrap());
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: out pointers on this stack; the driver keeps the context.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
            ok(sys::cuCtxPushCurrent_v2(context));
            ok(sys::cuStreamCreate(&raw mut stream, 1));
        }
        let base = driver.reserve(PAGE).unwrap();
        let page = driver.create(PAGE).unwrap();
        // SAFETY: newly reserved and created.
        unsafe {
            driver
                .map(base, &[vmmgraph::driver::Whole { page, bytes: PAGE }], vmmgraph::units::Peers::NONE)
                .unwrap()
        };
        assert_eq!(executables(), 0);
        Self { driver, context, stream, page, base, _alone: alone }
    }

    fn pool(&self, limit: usize) -> Arc<ExecutablePool> {
        let driver: Arc<dyn Driver> = Arc::clone(&self.driver) as _;
        ExecutablePool::new(driver, Limits { graphs: Some(limit), bytes: None }).unwrap()
    }

    fn at(&self, place: u64) -> Address {
        Address(self.base.0 + place * PART)
    }

    fn capture(&self, place: u64, value: u32, fills: u64, copied: usize) -> sys::CUgraph {
        let mut graph = ptr::null_mut();
        // SAFETY: a stream of this thread's context, and mapped memory.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(
                self.stream,
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            ));
            for left in (0..fills).rev() {
                let value = value.wrapping_sub(left as u32);
                ok(sys::cuMemsetD32Async(self.at(place).0, value, PART as usize / 4, self.stream));
            }
            if copied > 0 {
                ok(sys::cuMemcpyDtoDAsync_v2(self.at(place).0, self.at(place).0, copied, self.stream));
            }
            ok(sys::cuStreamEndCapture(self.stream, &raw mut graph));
        }
        graph
    }

    fn value(&self, place: u64) -> u32 {
        let mut bytes = [0; PART as usize];
        // SAFETY: mapped memory.
        unsafe { self.driver.read(self.at(place), &mut bytes).unwrap() };
        assert!(bytes.chunks(4).all(|word| word == &bytes[..4]));
        u32::from_le_bytes(bytes[..4].try_into().unwrap())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: owned by this object; no launch follows.
        unsafe {
            self.driver.unmap(self.base, PAGE).unwrap();
            self.driver.release(self.page).unwrap();
            self.driver.free_addresses(self.base, PAGE).unwrap();
            ok(sys::cuStreamDestroy_v2(self.stream));
            ok(sys::cuCtxPopCurrent_v2(&raw mut self.context));
            ok(sys::cuDevicePrimaryCtxRelease_v2(0));
        }
    }
}

struct Captured {
    first: u64,
    values: Vec<u32>,
    template: Option<GraphTemplate>,
    graphs: Vec<sys::CUgraph>,
}

// SAFETY: the stand-in's graphs work on any thread.
unsafe impl Send for Captured {}
// SAFETY: as above.
unsafe impl Sync for Captured {}

impl Captured {
    fn new(device: &Device, pool: &Arc<ExecutablePool>, first: u64, pieces: u64, kind: u64) -> Self {
        let values: Vec<u32> = (0..pieces).map(|piece| (100 * (first + piece) + 7) as u32).collect();
        let graphs: Vec<_> = values
            .iter()
            .zip(first..)
            .map(|(value, place)| device.capture(place, *value, 1 + kind % 2, 256 * kind as usize))
            .collect();
        // SAFETY: newly captured; destroyed after the template.
        let template = unsafe {
            let graphs: Vec<_> = graphs.iter().map(|graph| Graph::from_raw(*graph as u64)).collect();
            pool.add(&graphs, false).unwrap()
        };
        Self { first, values, template: Some(template), graphs }
    }

    fn template(&self) -> &GraphTemplate {
        self.template.as_ref().unwrap()
    }

    fn replay(&self, device: &Device) -> Result<(), Error> {
        let mut execs = vec![0; self.graphs.len()];
        self.template().acquire(|place, exec| execs[place] = exec.raw())?;
        // SAFETY: a live context; executables acquired by this thread.
        unsafe {
            ok(sys::cuCtxPushCurrent_v2(device.context));
            for exec in execs {
                ok(sys::cuGraphLaunch(exec as sys::CUgraphExec, device.stream));
            }
            let mut popped = ptr::null_mut();
            ok(sys::cuCtxPopCurrent_v2(&raw mut popped));
        }
        self.template().launched();
        Ok(())
    }

    fn assert_right(&self, device: &Device) {
        for (value, place) in self.values.iter().zip(self.first..) {
            assert_eq!(device.value(place), *value, "part {place}");
        }
    }

    fn spoil(&self, device: &Device) {
        for place in (self.first..).take(self.values.len()) {
            // SAFETY: mapped memory.
            unsafe { device.driver.write(device.at(place), &[0xEE; PART as usize]).unwrap() };
        }
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        self.template.take();
        for graph in self.graphs.drain(..) {
            // SAFETY: its template is dropped.
            ok(unsafe { sys::cuGraphDestroy(graph) });
        }
    }
}

#[test]
fn evicted_graphs_are_instantiated_again_and_launch_their_own_work() {
    let device = Device::new();
    let pool = device.pool(3);
    let graphs: Vec<_> =
        (0..24).map(|i| Captured::new(&device, &pool, 4 * i, 1 + i / 4 % 2, i % 4)).collect();
    assert_eq!(executables(), 0, "a capture makes none");
    let mut random = 1_u64;
    for _ in 0..3000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let graph = &graphs[(random >> 33) as usize % graphs.len()];
        graph.spoil(&device);
        graph.replay(&device).unwrap();
        graph.assert_right(&device);
    }
    let stats = pool.stats();
    assert_eq!(stats.now.executables, executables());
    assert!(stats.counts.evicted > 100 && stats.instantiated == 3, "{stats:?}");
    assert_eq!(stats.counts.hits + stats.counts.misses, 3000);
    drop(graphs);
    assert_eq!((executables(), pool.stats().graphs), (0, 0));
}

#[test]
fn lower_limits_destroy_executables_at_once() {
    let device = Device::new();
    let pool = device.pool(6);
    let graphs: Vec<_> = (0..6).map(|i| Captured::new(&device, &pool, i, 1, i % 3)).collect();
    graphs.iter().for_each(|graph| graph.replay(&device).unwrap());
    assert_eq!(executables(), 6);
    pool.set_limits(Limits { graphs: Some(2), bytes: None });
    assert_eq!((executables(), pool.stats().counts.evicted), (2, 4));
    graphs.iter().for_each(|graph| graph.assert_right(&device));
}

#[test]
fn all_executables_go_on_request_and_come_back() {
    let device = Device::new();
    let pool = device.pool(8);
    let graphs: Vec<_> = (0..3).map(|number| Captured::new(&device, &pool, 4 * number, 2, number)).collect();
    for graph in &graphs {
        assert!(graph.template().instantiate().unwrap(), "ahead of any replay");
    }
    assert_eq!(executables(), 6);
    pool.evict_all();
    assert_eq!((executables(), pool.stats().instantiated, pool.stats().counts.evicted), (0, 0, 3));
    for graph in &graphs {
        graph.spoil(&device);
        graph.replay(&device).unwrap();
        graph.assert_right(&device);
    }
    pool.evict_all();
    assert_eq!(executables(), 0, "the graph replayed last, too");
    assert!(graphs[2].template().instantiate().unwrap());
}

#[test]
fn instantiating_ahead_makes_a_replay_a_hit_and_evicts_no_recent_graph() {
    let device = Device::new();
    let pool = device.pool(2);
    let graphs: Vec<_> = (0..4).map(|i| Captured::new(&device, &pool, i, 2, 0)).collect();
    assert!(graphs[0].template().instantiate().unwrap());
    assert!(graphs[0].template().is_instantiated());
    graphs[0].replay(&device).unwrap();
    assert!(graphs[1].template().instantiate().unwrap());
    assert!(!graphs[2].template().instantiate().unwrap(), "both were wanted at the last replay");
    graphs[1].replay(&device).unwrap();
    assert!(graphs[2].template().instantiate().unwrap());
    assert!(!graphs[0].template().is_instantiated());
    assert!(graphs[1].template().touch() && !graphs[0].template().touch());
    assert_eq!(pool.stats().counts.misses, 0);
    graphs.iter().for_each(|graph| graph.spoil(&device));
    for graph in &graphs {
        graph.replay(&device).unwrap();
        graph.assert_right(&device);
    }
}

#[test]
fn any_thread_may_replay_instantiate_and_drop() {
    let device = Device::new();
    let pool = device.pool(3);
    // Each thread has its own graphs, captured here.
    let of_threads: Vec<Vec<_>> = (0..4)
        .map(|thread| (0..5).map(|i| Captured::new(&device, &pool, 40 * thread + 2 * i, 2, i % 2)).collect())
        .collect();
    let over = AtomicBool::new(false);
    // The stand-in works in call order.
    let turn = Mutex::new(());
    std::thread::scope(|scope| {
        for graphs in &of_threads {
            let (device, turn) = (&device, &turn);
            scope.spawn(move || {
                let mut random = graphs[0].first + 1;
                for _ in 0..1500 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let graph = &graphs[(random >> 33) as usize % graphs.len()];
                    graph.replay(device).unwrap();
                    let _turn = turn.lock();
                    graph.assert_right(device);
                }
            });
        }
        let (of_threads, over) = (&of_threads, &over);
        let waking = scope.spawn(move || {
            let mut woken = 0_u64;
            for graph in of_threads.iter().flatten().cycle() {
                woken += u64::from(graph.template().instantiate().unwrap());
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
            woken
        });
        let stats = || pool.stats().counts;
        while stats().hits + stats().misses < 6000 {
            std::thread::yield_now();
        }
        over.store(true, Ordering::Relaxed);
        assert!(waking.join().unwrap() > 0);
    });
    drop(of_threads);
    assert_eq!(executables(), 0);
    assert_eq!(overlapping_calls(), 0, "two threads instantiated or destroyed executables at once");
}

fn scenario(device: &Device, pool: &Arc<ExecutablePool>, graphs: &[Captured]) -> u64 {
    let mut errors = 0;
    for round in 0..2 {
        for (i, graph) in graphs.iter().enumerate() {
            errors += u64::from(graph.replay(device).is_err());
            errors += u64::from(graphs[(i + 2) % graphs.len()].template().instantiate().is_err());
        }
        pool.set_limits(Limits { graphs: Some(1 + round), bytes: None });
    }
    errors
}

#[test]
fn whatever_the_driver_refuses_is_a_value_and_all_goes_on() {
    let device = Device::new();
    let mut swept = (0, 0);
    for code in [2, 999] {
        let mut total = u64::MAX;
        for nth in 0.. {
            if nth > total {
                break;
            }
            for gap in [0, 1, 3] {
                let pool = device.pool(3);
                let graphs: Vec<_> =
                    (0..7).map(|i| Captured::new(&device, &pool, 3 * i, 1 + i % 2, i % 3)).collect();
                let before = calls();
                fail(nth, code, if nth > 0 && gap > 0 { nth + gap } else { 0 });
                let errors = scenario(&device, &pool, &graphs);
                fail(0, 0, 0);
                if nth == 0 {
                    total = calls() - before;
                    assert_eq!(errors, 0);
                }
                swept = (swept.0 + 1, swept.1 + errors);
                for graph in graphs.iter().chain(&graphs) {
                    graph.spoil(&device);
                    graph.replay(&device).unwrap();
                    graph.assert_right(&device);
                }
                drop(graphs);
                assert_eq!(pool.stats().now.executables, 0);
                drop(pool);
                assert_eq!(executables(), 0, "{code}, {nth} and {gap} later");
            }
        }
    }
    println!("{} runs, {} errors of a step", swept.0, swept.1);
    assert!(swept.1 > 20 && swept.0 > 200, "{swept:?}");
}

#[test]
fn a_platform_without_graphs_has_no_pool() {
    let host = vmmgraph::driver::HostDriver::new(0, vmmgraph::HostOptions::default()).unwrap();
    assert!(matches!(
        ExecutablePool::new(Arc::new(host), Limits::default()),
        Err(Error::WrongState { sentence }) if sentence.contains("no graphs")
    ));
}
