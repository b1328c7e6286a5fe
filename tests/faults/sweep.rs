//! Every driver call fails once, in every scenario, on the host driver and on vendors' stand-ins.
//!
//! A dry run counts the calls. Run `n` fails call `n`: the step returns an error, tables match the
//! driver, the repeated step succeeds, and nothing remains. Pairs also fail a call of the undo:
//! then only a step may be lost.
//!
//! The same with a second thread in the arena, which works before each call near the fault and must
//! always succeed. If it blocks on a lock of the first thread, the first continues after a moment.

#![allow(clippy::single_range_in_vec_init, reason = "one span of many, not its numbers")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;
use libloading::os::unix::Library;
use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver, platform};
use vmmgraph::pages::Fence;
use vmmgraph::ring::HostRun;
use vmmgraph::{
    Address, BlockBorrower, Borrower, Committed, Device, DriverChoice, ElasticOptions, Error, HostBuffer,
    HostOptions, KvLayout, KvOptions, Options, Peers, Pinning, Policy, Region, RegionOptions, Result,
    RetainPolicy, RingOptions, RingUnit, SharedVmmAllocator, Space, Stream, VacateBlocks, Vacated, Workspace,
};
use vmmgraph_testkit::{FaultyDriver, IdleBorrower, Stamps, alone, stream};

/// Unit of the scenarios, in place of 1 MiB: the same calls, with less host memory to touch.
const M: u64 = 32 << 10;
const GRANULARITY: u64 = 2 * M;

trait Injector {
    fn driver(&self) -> SharedDriver;
    fn arm(&self, fail: &[u64]);
    fn calls(&self) -> u64;
    /// Pages, reservations, mappings and events in the driver.
    fn held(&self) -> [u64; 4];
    /// Streams and host registrations in the driver.
    fn host_held(&self) -> [u64; 2];
    fn failed(&self) -> BTreeMap<String, u64>;
    fn stream(&self) -> Stream;
    /// Answers the next event queries with "not ready", if supported.
    fn keep_busy(&self, questions: u64);
}

struct Host {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
}

impl Host {
    fn new() -> Self {
        let host = Arc::new(
            HostDriver::new(0, HostOptions { granularity: GRANULARITY, ..HostOptions::default() }).unwrap(),
        );
        Self { faulty: FaultyDriver::new(host.clone()), host }
    }
}

impl Injector for Host {
    fn driver(&self) -> SharedDriver {
        self.faulty.clone()
    }
    fn arm(&self, fail: &[u64]) {
        self.faulty.arm(fail);
    }
    fn calls(&self) -> u64 {
        self.faulty.calls()
    }
    fn held(&self) -> [u64; 4] {
        self.host.leftovers().map(|n| n as u64)
    }
    fn host_held(&self) -> [u64; 2] {
        self.host.host_leftovers().map(|n| n as u64)
    }
    fn failed(&self) -> BTreeMap<String, u64> {
        let failed = self.faulty.failed();
        driver_functions()
            .into_iter()
            .map(|name| (name.clone(), failed.get(&*name).copied().unwrap_or(0)))
            .collect()
    }
    fn stream(&self) -> Stream {
        vmmgraph_testkit::stream(0xb0)
    }
    fn keep_busy(&self, questions: u64) {
        self.faulty.set_busy_for(questions);
    }
}

/// Functions of the driver interface, from its source, without infallible ones, `read` and `write`
/// (tests and self-test only), and graph functions (tests/arena/executables.rs,
/// tests/ring/graphs.rs).
fn driver_functions() -> Vec<String> {
    let text = include_str!("../../src/driver/mod.rs");
    let text = text.split("pub unsafe trait Memory").nth(1).unwrap();
    let functions = text.split("pub unsafe trait Graphs").next().unwrap().split(" fn ").skip(1);
    let names = functions.map(|rest| rest.split('(').next().unwrap().to_owned());
    let told = ["capture_begins", "capture_ends", "may_wait", "wait_begins", "wait_ends"];
    names
        .filter(|name| {
            !["info", "capabilities", "read", "write", "other_context", "in_primary"].contains(&name.as_str())
                && !told.contains(&name.as_str())
        })
        .collect()
}

/// A driver over its stand-in. Serializes tests, since faults are process-wide.
struct StandIn {
    driver: SharedDriver,
    stream: Stream,
    controls: Library,
    /// The injected code: out of memory, valid for every call.
    code: i32,
    _alone: MutexGuard<'static, ()>,
}

type Fail = unsafe extern "C" fn(u64, i32);
type Calls = unsafe extern "C" fn() -> u64;
type Failed = unsafe extern "C" fn(usize, *mut u64) -> *const c_char;
type KeepBusy = unsafe extern "C" fn(u64);
type Leftovers = unsafe extern "C" fn(*mut u64);

impl StandIn {
    /// Loads the library; the driver finds it by its soname. Under a sanitizer, scripts/asan.sh
    /// provides a plain library under the second name.
    fn library(files: [&str; 2]) -> Library {
        for name in ["CUDA", "HIP", "ASCEND", "MLU"] {
            // SAFETY: only stand-ins read these variables, at their start, which is serialized;
            // other readers use this standard library.
            unsafe { std::env::set_var(format!("STANDIN_{name}_GRANULARITY"), GRANULARITY.to_string()) };
        }
        // SAFETY: the stand-in's initialisers do nothing.
        let found = files.iter().find_map(|file| unsafe { Library::new(*file) }.ok());
        found.expect("not on LD_LIBRARY_PATH: use `cargo test`")
    }

    fn control<T: Copy>(&self, name: &[u8]) -> T {
        // SAFETY: signatures of tests/standin/src/control.rs.
        unsafe { *self.controls.get::<T>(name).expect("not the stand-in") }
    }

    fn of(name: &'static str, files: [&str; 2], code: i32) -> Self {
        let (alone, controls) = (alone(), Self::library(files));
        let driver = platform::open(DriverChoice::Named(name), 0, HostOptions::default()).unwrap();
        let streams: Vec<Stream> = (0..8).map(|_| driver.stream_create().unwrap()).collect();
        // Some drivers reuse streams.
        // SAFETY: streams of this driver, no longer used.
        streams[1..].iter().for_each(|stream| unsafe { driver.stream_destroy(*stream) }.unwrap());
        Self { driver, stream: streams[0], controls, code, _alone: alone }
    }

    fn cuda() -> Self {
        let (alone, controls) = (alone(), Self::library(["libcuda.so", "libcuda.so.1"]));
        let driver = Arc::new(CudaDriver::new(0).unwrap());
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: out pointers on this stack; the driver keeps the context; the stream is never
        // destroyed.
        unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, 0).result().unwrap();
            sys::cuCtxPushCurrent_v2(context).result().unwrap();
            sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
            sys::cuCtxPopCurrent_v2(&raw mut context).result().unwrap();
            sys::cuDevicePrimaryCtxRelease_v2(0).result().unwrap();
        }
        let stream = vmmgraph_testkit::stream(stream as u64);
        Self { driver, stream, controls, code: 2, _alone: alone }
    }
}

impl Injector for StandIn {
    fn driver(&self) -> SharedDriver {
        self.driver.clone()
    }
    fn arm(&self, fail: &[u64]) {
        let nth = |index: usize| fail.get(index).copied().unwrap_or(0);
        // SAFETY: the signatures as above.
        unsafe {
            self.control::<Calls>(b"standin_reset_counters\0")();
            self.control::<Fail>(b"standin_fail\0")(nth(0), self.code);
            self.control::<Fail>(b"standin_fail_second\0")(nth(1), self.code);
        }
    }
    fn calls(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.control::<Calls>(b"standin_calls\0")() }
    }
    fn held(&self) -> [u64; 4] {
        let mut held = [0; 4];
        // SAFETY: as above; room for four numbers.
        unsafe { self.control::<Leftovers>(b"standin_leftovers\0")(held.as_mut_ptr()) };
        held
    }
    fn host_held(&self) -> [u64; 2] {
        let mut held = [0; 2];
        // SAFETY: as above; room for two numbers.
        unsafe { self.control::<Leftovers>(b"standin_host_leftovers\0")(held.as_mut_ptr()) };
        held
    }
    fn failed(&self) -> BTreeMap<String, u64> {
        let name = |index| {
            let mut times = 0;
            // SAFETY: as above; names are static and zero-terminated.
            let name = unsafe { self.control::<Failed>(b"standin_failed\0")(index, &raw mut times) };
            // SAFETY: as above.
            (!name.is_null()).then(|| (unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned(), times))
        };
        (0..).map_while(name).collect()
    }
    fn stream(&self) -> Stream {
        self.stream
    }
    fn keep_busy(&self, questions: u64) {
        // SAFETY: as above.
        unsafe { self.control::<KeepBusy>(b"standin_keep_busy\0")(questions) }
    }
}

struct Run<'a> {
    injector: &'a dyn Injector,
    device: Arc<Device>,
    errors: u64,
    single: bool,
    host_held: [u64; 2],
    arena: Weak<SharedVmmAllocator>,
    beside: Option<&'a Beside>,
}

impl Run<'_> {
    fn arena(&mut self, options: &Options) -> Result<Arc<SharedVmmAllocator>> {
        let device = Arc::clone(&self.device);
        let arena = Arc::new(self.step("create", || SharedVmmAllocator::new(&device, options))?);
        self.arena = Arc::downgrade(&arena);
        if let Some(beside) = self.beside {
            *beside.arena.lock().unwrap() = self.arena.clone();
        }
        Ok(arena)
    }

    fn step<T>(&mut self, what: &str, mut step: impl FnMut() -> Result<T>) -> Result<T> {
        let result = step();
        self.balance(what);
        let Err(error) = result else { return result };
        self.errors += 1;
        assert!(!error.to_string().is_empty());
        let again = step();
        if self.single {
            assert!(again.is_ok(), "{what}: a repeated step fails: {:?}", again.err());
        }
        self.balance(what);
        again
    }

    fn balance(&self, what: &str) {
        if let Some(beside) = self.beside {
            beside.settle();
        }
        let (stats, held) = (self.device.stats(), self.injector.held());
        let books = [stats.pages, stats.reservations, stats.mappings];
        assert_eq!(books, held[..3], "{what}: the tables do not agree");
        assert_eq!(self.device.pool().audit_idle(), Ok(()), "{what}");
        if let Some(arena) = self.arena.upgrade() {
            assert_eq!(arena.audit(), Ok(()), "{what}");
        }
    }
}

struct Beside {
    turns: Mutex<(Sender<Turn>, Receiver<()>)>,
    working: AtomicBool,
    arena: Mutex<Weak<SharedVmmAllocator>>,
    taken: AtomicU64,
    blocked: AtomicU64,
}

enum Turn {
    Work(Weak<SharedVmmAllocator>),
    Rest,
}

/// Wait for second-thread work that may be blocked by the first thread.
const MOMENT: Duration = Duration::from_millis(2);

impl Beside {
    fn start(driver: SharedDriver) -> Self {
        let (turns, asked) = channel();
        let (answer, answered) = channel();
        thread::spawn(move || {
            let mut colleague = Colleague { stamps: Stamps::new(&driver, C), spaces: Vec::new(), turn: 0 };
            for turn in asked {
                match turn {
                    Turn::Work(arena) => arena.upgrade().into_iter().for_each(|arena| colleague.work(&arena)),
                    Turn::Rest => colleague.spaces.clear(),
                }
                if answer.send(()).is_err() {
                    return;
                }
            }
        });
        Self {
            turns: Mutex::new((turns, answered)),
            working: AtomicBool::new(false),
            arena: Mutex::default(),
            taken: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
        }
    }

    /// Runs before a call of the first thread: lets the second thread work, unless it still works.
    fn turn(&self) {
        let turns = self.turns.lock().unwrap();
        if self.working.load(Relaxed) && turns.1.try_recv().is_err() {
            return;
        }
        let arena = self.arena.lock().unwrap().clone();
        turns.0.send(Turn::Work(arena)).expect("the second thread failed");
        self.taken.fetch_add(1, Relaxed);
        let waits = turns.1.recv_timeout(MOMENT).is_err();
        self.blocked.fetch_add(u64::from(waits), Relaxed);
        self.working.store(waits, Relaxed);
    }

    /// Waits until the second thread is idle. The caller holds no lock.
    fn settle(&self) {
        let turns = self.turns.lock().unwrap();
        if self.working.swap(false, Relaxed) {
            turns.1.recv_timeout(Duration::from_secs(30)).expect("the second thread hangs or failed");
        }
    }

    fn rest(&self) {
        self.settle();
        let turns = self.turns.lock().unwrap();
        turns.0.send(Turn::Rest).expect("the second thread failed");
        turns.1.recv_timeout(Duration::from_secs(30)).expect("the second thread hangs or failed");
    }
}

const C: Stream = stream(0xc0);

type Captured = (Arc<Space>, Vec<(Address, u64)>, u32);

struct Colleague {
    stamps: Stamps,
    spaces: Vec<Captured>,
    turn: u32,
}

impl Colleague {
    fn work(&mut self, arena: &SharedVmmAllocator) {
        self.turn += 1;
        match self.turn % 7 {
            1 | 4 => self.capture(arena),
            2 | 5 => self.replay(),
            3 => self.free(),
            6 => drop(arena.trim().unwrap()),
            _ if self.spaces.len() > 2 => drop(self.spaces.remove(0)),
            _ => {}
        }
        for (space, ..) in &self.spaces {
            assert_eq!(space.audit(), Ok(()));
        }
    }

    fn capture(&mut self, arena: &SharedVmmAllocator) {
        let space = arena.open_space().unwrap();
        let passing = space.allocate(36 * M, C).unwrap();
        let mut blocks = Vec::new();
        for bytes in [4000, 5 * M] {
            blocks.push((space.allocate(bytes, C).unwrap(), bytes));
        }
        space.free(passing).unwrap();
        blocks.push((space.allocate(33 * M, C).unwrap(), 33 * M));
        blocks.push((space.allocate_kept(3000, C).unwrap(), 3000));
        space.seal().unwrap();
        self.spaces.push((space, blocks, 0));
        self.replay();
    }

    fn replay(&mut self) {
        let turn = self.turn;
        let Some((space, blocks, stamp)) = self.spaces.last_mut() else { return };
        let write = || blocks.iter().try_for_each(|(at, bytes)| self.stamps.write(*at, *bytes, turn));
        space.replay(C, write).unwrap().unwrap();
        *stamp = turn;
        for (_, blocks, stamp) in &self.spaces {
            for (at, bytes) in blocks {
                assert!(self.stamps.holds(*at, *bytes, *stamp).unwrap(), "{at:?} was overwritten");
            }
        }
    }

    fn free(&mut self) {
        if let Some((space, blocks, _)) = self.spaces.first_mut()
            && let Some((block, _)) = blocks.pop()
        {
            space.record_stream(block, C).unwrap();
            space.free(block).unwrap();
        }
    }
}

/// Large page size where contents are written: small, since the stand-in really copies and fills.
const PAGE: u64 = 4 * M;

fn plain() -> Options {
    Options { small_page_bytes: GRANULARITY, large_page_bytes: 16 * M, ..Options::default() }
}
const A: Stream = Stream::LEGACY;

/// Create an arena, capture one shape with large, odd and packed blocks, replay it, drop it.
fn capture(run: &mut Run) -> Result<()> {
    let arena = run.arena(&plain())?;
    let space = run.step("open", || arena.open_space())?;
    let mut blocks = Vec::new();
    for bytes in [40 * M, 3 * M, 700, M / 10, 17 * M + 1] {
        blocks.push(run.step("allocate", || space.allocate(bytes, A))?);
    }
    for block in blocks {
        run.step("free", || space.free(block))?;
    }
    run.step("allocate again", || space.allocate(30 * M, A)).map(|block| space.free(block))??;
    run.step("seal", || space.seal())?;
    run.step("replay", || space.replay(A, || ()))?;
    Ok(())
}

fn grow(run: &mut Run) -> Result<()> {
    let other = run.injector.stream();
    let arena = run.arena(&plain())?;
    let mut spaces = Vec::new();
    for bytes in [20 * M, 60 * M, 45 * M] {
        let space = run.step("open", || arena.open_space())?;
        let first = run.step("allocate", || space.allocate(bytes, A))?;
        let second = run.step("allocate", || space.allocate(bytes / 3, other))?;
        space.record_stream(first, other)?;
        space.free(first)?;
        space.free(second)?;
        run.step("seal", || space.seal())?;
        spaces.push(space);
    }
    for (space, stream) in spaces.iter().zip([A, other, A]) {
        run.step("replay", || space.replay(stream, || ()))?;
    }
    run.step("mark", || arena.mark())
}

/// Live-out blocks on private, shared and partly covered pages, freed and reused by a later space.
fn retain(run: &mut Run) -> Result<()> {
    let arena = run.arena(&plain())?;
    let mut spaces = Vec::new();
    for round in 0..3 {
        let space = run.step("open", || arena.open_space())?;
        let passing = run.step("allocate", || space.allocate(36 * M, A))?;
        let output = run.step("allocate", || space.allocate(4000, A))?;
        let partial = run.step("allocate", || space.allocate(10 * M, A))?;
        space.free(passing)?;
        let several = run.step("allocate", || space.allocate(35 * M, A))?;
        let report = run.step("seal", || space.seal())?;
        assert_eq!(report.retained.len(), 3);
        assert_eq!(space.stats().retained_bytes, report.retained_bytes);
        spaces.push((space, [output, partial, several]));
        if round == 1 {
            for block in spaces[0].1 {
                let space = &spaces[0].0;
                run.step("free retained", || space.free(block))?;
            }
        }
    }
    drop(spaces.remove(1));
    run.step("trim", || arena.trim())?;
    let space = run.step("open", || arena.open_space())?;
    run.step("allocate", || space.allocate(90 * M, A))?;
    run.step("seal", || space.seal_with(RetainPolicy::Share))?;
    drop(space);
    Ok(())
}

fn remote(run: &mut Run) -> Result<()> {
    let other = run.injector.stream();
    let arena = run.arena(&Options { large_page_bytes: PAGE, ..plain() })?;
    let mut spaces = Vec::new();
    for policy in [RetainPolicy::Retain, RetainPolicy::ShareRemote, RetainPolicy::Retain] {
        let space = run.step("open", || arena.open_space())?;
        let mut told = Vec::new();
        for bytes in [4000, 3 * M, 20 * M] {
            let block = run.step("remote", || space.allocate_remote(bytes, A))?;
            run.step("allocate", || space.allocate(bytes, A))?;
            told.push((block, bytes, space.export(block, bytes)?));
            space.free(block)?;
        }
        let lives = run.step("remote", || space.allocate_remote(M, other))?;
        let report = run.step("seal", || space.seal_with(policy))?;
        assert_eq!((report.remote_blocks, report.retained.len()), (1, 4));
        for (block, bytes, pages) in told {
            assert_eq!(space.export(block, bytes)?, pages, "a seal exchanged what peers know");
        }
        spaces.push((space, lives));
    }
    for (space, lives) in &spaces {
        run.step("free retained", || space.free(*lives))?;
    }
    drop(spaces);
    run.step("trim", || arena.trim())?;
    Ok(())
}

fn trim(run: &mut Run) -> Result<()> {
    let other = run.injector.stream();
    let arena = run.arena(&plain())?;
    let hungry = run.step("open", || arena.open_space())?;
    run.step("allocate", || hungry.allocate(100 * M, A)).map(|block| hungry.free(block))??;
    run.step("seal", || hungry.seal())?;
    let modest = run.step("open", || arena.open_space())?;
    run.step("allocate", || modest.allocate(20 * M, A)).map(|block| modest.free(block))??;
    run.step("seal", || modest.seal())?;
    run.step("replay", || hungry.replay(A, || ()))?;
    run.step("replay", || modest.replay(other, || ()))?;
    drop(hungry);
    let before = run.device.stats();
    run.step("trim", || arena.trim())?;
    let after = run.device.stats();
    assert!(after.physical_bytes < before.physical_bytes || !run.single || run.beside.is_some());
    run.step("the names of the published design", || arena.switch_to_new_virtual_space())?;
    let block = run.step("allocate", || arena.allocate(9 * M, A))?;
    run.step("switch", || arena.switch_to_new_virtual_space())?;
    run.step("deallocate", || arena.deallocate(block))
}

fn bump(run: &mut Run) -> Result<()> {
    let arena = run.arena(&plain())?;
    for blocks in [&[2, 20][..], &[20, 2, 1000, 70, 20], &[2, 20, 30]] {
        let space = run.step("open", || arena.open_bump_space())?;
        for size in blocks {
            run.step("allocate", || space.allocate(size * M, A))?;
        }
        run.step("seal", || space.seal())?;
        run.step("replay", || space.replay(A, || ()))?;
    }
    run.step("trim", || arena.trim()).map(drop)
}

fn poison(run: &mut Run) -> Result<()> {
    let other = run.injector.stream();
    let arena = run.arena(&Options { poison: true, ..plain() })?;
    let space = run.step("open", || arena.open_space())?;
    let passing = run.step("allocate", || space.allocate(40 * M, A))?;
    let kept = run.step("allocate", || space.allocate(M, A))?;
    space.free(passing)?;
    run.step("seal", || space.seal())?;
    let mut launched = 0;
    run.step("replay", || space.replay(A, || launched += 1))?;
    run.step("replay", || space.replay(other, || launched += 1))?;
    assert_eq!(launched, 2, "a replay that could not be poisoned was launched, or one was not");
    // SAFETY: a live block.
    run.step("verify", || unsafe { space.verify(other, &[(kept, M)], || ()) }).map(drop)
}

fn hopeless(run: &mut Run) -> Result<()> {
    let arena = run.arena(&plain())?;
    let space = run.step("open", || arena.open_space())?;
    run.step("allocate", || space.allocate(3 * M, A))?;
    let refused = || match space.allocate(1 << 45, A) {
        Err(Error::OutOfMemory { requested, .. }) => Ok(requested),
        other => other.map(|block| block.0),
    };
    assert_eq!(run.step("allocate too much", refused)?, 1 << 45);
    run.step("allocate again", || space.allocate(20 * M, A))?;
    run.step("seal", || space.seal()).map(drop)
}

fn busy(run: &mut Run) -> Result<()> {
    let other = run.injector.stream();
    let arena = run.arena(&plain())?;
    let space = run.step("open", || arena.open_space())?;
    let kept = run.step("allocate", || space.allocate(3 * M, A))?;
    let heap = run.step("allocate kept", || space.allocate_kept(5000, A))?;
    run.step("seal", || space.seal())?;
    run.step("replay", || space.replay(other, || ()))?;
    space.record_stream(kept, other)?;
    space.record_stream(heap, A)?;
    run.injector.keep_busy(12);
    space.free(kept)?;
    space.free(heap)?;
    run.balance("free");
    drop(space);
    run.injector.keep_busy(2);
    run.step("trim", || arena.trim())?;
    let next = run.step("open", || arena.open_space())?;
    run.step("allocate", || next.allocate(20 * M, A))?;
    run.step("seal", || next.seal()).map(drop)
}

fn close(run: &mut Run) -> Result<()> {
    let device = Device::with_driver(run.injector.driver());
    let arena = SharedVmmAllocator::new(&device, &plain())?;
    let space = arena.open_space()?;
    let captured = (|| {
        space.allocate(20 * M, A)?;
        space.seal()?;
        space.replay(run.injector.stream(), || ())?;
        arena.mark()?;
        let region =
            device.region("weights", RegionOptions { policy: Policy::Backup, ..Default::default() })?;
        region.allocate(M, run.injector.stream())?;
        region.pause(Fence::default())?.complete()
    })();
    drop((space, arena, device));
    run.errors += u64::from(captured.is_err());
    drop(Device::with_driver(run.injector.driver()));
    Ok(())
}

/// Repeats a step until it succeeds: earlier faults must not block it forever.
fn insist<T>(run: &mut Run, what: &str, mut step: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..2 {
        if let Ok(done) = run.step(what, &mut step) {
            return Ok(done);
        }
    }
    Ok(run.step(what, step).unwrap_or_else(|error| panic!("{what} fails again and again: {error}")))
}

type Stamped = (Address, u64, Policy, u32);

/// Reads every backup: complete, or refused without a write. With `all`, the whole region is paused
/// and none is refused.
fn read_backups(region: &Region, blocks: &[Stamped], all: bool) {
    let paused = region.stats().paused;
    for (block, bytes, policy, stamp) in blocks {
        let mut into = vec![0xee; *bytes as usize];
        match region.get_backup(*block, 0, &mut into) {
            Ok(()) => {
                assert!(paused && *policy == Policy::Backup, "{policy:?} block {stamp} has a backup");
                let holds = |at: usize| into[at..at + 4] == stamp.to_ne_bytes();
                let right = (0..into.len()).step_by(512).chain([into.len() - 4]).all(holds);
                assert!(right, "the backup of block {stamp} is not what it holds");
            }
            Err(Error::WrongState { .. }) => {
                assert!(!all || *policy != Policy::Backup, "block {stamp} has no backup");
                assert!(into == vec![0xee; into.len()], "a refused read wrote");
            }
            Err(error) => panic!("block {stamp}: {error}"),
        }
    }
}

fn pause_and_read(run: &mut Run, region: &Region, blocks: &[Stamped]) -> Result<()> {
    let device = Arc::clone(&run.device);
    insist(run, "pause", || {
        let paused = device.pause(&["weights"], Fence::default()).and_then(|report| report.complete());
        read_backups(region, blocks, paused.is_ok());
        paused
    })
}

fn resume_and_read(run: &mut Run, region: &Region, blocks: &[Stamped]) -> Result<()> {
    let device = Arc::clone(&run.device);
    insist(run, "resume", || {
        let resumed = device.resume(&["weights"], Duration::ZERO);
        read_backups(region, blocks, resumed.is_err());
        resumed.map(drop)
    })
}

/// Blocks across page boundaries: after a resume, a page's bytes come from several backups.
fn join_places(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let options = RegionOptions { policy: Policy::Backup, read_only: true, ..RegionOptions::default() };
    let region = insist(run, "region", || device.region("weights", options))?;
    let mut blocks = Vec::new();
    let bytes = GRANULARITY / 4 * 3;
    for number in 1..=22 {
        let block = insist(run, "allocate", || region.allocate(bytes, other))?;
        insist(run, "write", || stamps.write(block, bytes, number))?;
        blocks.push((block, bytes, Policy::Backup, number));
    }
    let pages = region.stats().pages;
    for _ in 0..2 {
        pause_and_read(run, &region, &blocks)?;
        resume_and_read(run, &region, &blocks)?;
    }
    assert!(region.stats().pages < pages, "nothing was joined");
    for (block, bytes, _, stamp) in &blocks {
        let holds = insist(run, "read", || stamps.holds(*block, *bytes, *stamp))?;
        assert!(holds, "block {stamp} was lost");
    }
    drop(region);
    insist(run, "trim host", || device.host_pool().trim()).map(drop)
}

/// Pauses and resumes a region with every policy twice, the second time with clean blocks, and
/// drops it while paused.
fn step_aside(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let options = RegionOptions { policy: Policy::Backup, read_only: true, ..RegionOptions::default() };
    let region = insist(run, "region", || device.region("weights", options))?;
    let mut blocks = Vec::new();
    let mut number = 0;
    for (bytes, policy) in
        [(5, Policy::Backup), (3, Policy::Keep), (1, Policy::Zero), (4, Policy::Discard), (7, Policy::Backup)]
    {
        let block = insist(run, "allocate", || region.allocate_as(bytes * M, policy, other))?;
        number += 1;
        insist(run, "write", || stamps.write(block, bytes * M, number))?;
        blocks.push((block, bytes * M, policy, number));
    }
    for round in 0..2 {
        pause_and_read(run, &region, &blocks)?;
        if round == 1 {
            insist(run, "free", || region.free(blocks[0].0))?;
            blocks.remove(0);
        }
        resume_and_read(run, &region, &blocks)?;
        for (block, bytes, policy, stamp) in &blocks {
            if matches!(policy, Policy::Backup | Policy::Keep) {
                let holds = insist(run, "read", || stamps.holds(*block, *bytes, *stamp))?;
                assert!(holds, "{policy:?} block {stamp} was lost");
            }
        }
        if round == 0 {
            region.mark_written(Some(blocks[0].0))?;
        }
    }
    insist(run, "trim host", || device.host_pool().trim())?;
    let _ = device.pause(&[], Fence::default());
    Ok(())
}

/// Two regions resume together or not at all.
fn come_back(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let region = |tag, policy| device.region(tag, RegionOptions { policy, ..RegionOptions::default() });
    let (weights, kv) = (region("weights", Policy::Backup)?, region("kv", Policy::Zero)?);
    let block = insist(run, "allocate", || weights.allocate(6 * M, other))?;
    insist(run, "allocate", || kv.allocate(2 * M, other))?;
    insist(run, "write", || stamps.write(block, 6 * M, 3))?;
    insist(run, "prepare", || device.host_pool().prepare(8 * M))?;
    insist(run, "pause", || device.pause(&[], Fence::default())?.complete())?;
    run.injector.keep_busy(4);
    let resumed = insist(run, "resume", || device.resume_async(&["kv", "weights"], Duration::ZERO))?;
    for mut ready in resumed.1 {
        insist(run, "order", || ready.before(other))?;
        insist(run, "wait", || ready.wait())?;
    }
    assert_eq!((weights.stats().paused, kv.stats().paused), (false, false));
    assert!(insist(run, "read", || stamps.holds(block, 6 * M, 3))?, "the contents were lost");
    insist(run, "trim host", || device.host_pool().trim()).map(drop)
}

/// Pauses and resumes an arena by its tag, with frees and a dropped space while paused. Without the
/// second thread, which would be refused.
fn arena_aside(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let options = Options { tag: "graphs".to_owned(), large_page_bytes: PAGE, ..plain() };
    let arena = Arc::new(run.step("create", || SharedVmmAllocator::new(&device, &options))?);
    run.arena = Arc::downgrade(&arena);
    let (mut spaces, mut blocks) = (Vec::new(), Vec::new());
    for number in 1..=2 {
        let space = run.step("open", || arena.open_space())?;
        let passing = run.step("allocate", || space.allocate(5 * M, other))?;
        for bytes in [4000, 3 * M] {
            blocks.push((number, run.step("allocate", || space.allocate(bytes, other))?, bytes));
        }
        blocks.push((number, run.step("allocate kept", || space.allocate_kept(5000, other))?, 5000));
        space.free(passing)?;
        run.step("seal", || space.seal())?;
        let mine = blocks.iter().filter(|(of, ..)| *of == number);
        let write = || mine.clone().try_for_each(|(of, at, bytes)| stamps.write(*at, *bytes, *of));
        run.step("replay", || space.replay(other, write)?)?;
        spaces.push(space);
    }
    for round in 0..2 {
        run.step("pause", || device.pause(&["graphs"], Fence::default())?.complete())?;
        assert!(space_is_shut(&spaces[0], other));
        if round == 1 {
            let (_, block, _) = blocks.remove(1);
            run.step("free", || spaces[0].free(block))?;
            drop(spaces.pop());
            blocks.retain(|(of, ..)| *of == 1);
            run.balance("drop a space");
        }
        run.step("resume", || device.resume(&["graphs"], Duration::ZERO))?;
        for (of, at, bytes) in &blocks {
            assert!(run.step("read", || stamps.holds(*at, *bytes, *of))?, "a block of {of} was lost");
        }
        run.step("replay", || spaces[0].replay(other, || ()))?;
    }
    run.step("trim host", || device.host_pool().trim())?;
    let _ = arena.pause(Fence::default());
    Ok(())
}

/// Sparse large pages are replaced by small ones; live-out contents remain. Without the second
/// thread, which would be refused.
fn shrink(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let arena = Arc::new(run.step("create", || SharedVmmAllocator::new(&device, &plain()))?);
    run.arena = Arc::downgrade(&arena);
    let (mut spaces, mut blocks) = (Vec::new(), Vec::new());
    for number in 1..=2 {
        let space = run.step("open", || arena.open_space())?;
        let passing = run.step("allocate", || space.allocate(18 * M, other))?;
        let more = run.step("allocate", || space.allocate(u64::from(number) * 3 * M, other))?;
        blocks.push((number, run.step("allocate kept", || space.allocate_kept(5000, other))?, 5000));
        blocks.push((number, run.step("allocate", || space.allocate(4000, other))?, 4000));
        space.free(passing)?;
        space.free(more)?;
        run.step("seal", || space.seal())?;
        let mine = blocks.iter().filter(|(of, ..)| *of == number);
        let write = || mine.clone().try_for_each(|(of, at, bytes)| stamps.write(*at, *bytes, *of));
        run.step("replay", || space.replay(other, write)?)?;
        spaces.push(space);
    }
    let shrinks = device.driver().capabilities().replace_under_graph;
    if shrinks {
        run.step("shrink", || arena.shrink_to_fit(Fence::default()))?;
    }
    run.step("trim", || arena.trim())?;
    if shrinks && run.single {
        let held = run.device.stats().physical_bytes;
        assert!(held <= 32 * M, "{held} bytes");
    }
    for (of, at, bytes) in &blocks {
        assert!(run.step("read", || stamps.holds(*at, *bytes, *of))?, "a block of {of} was lost");
    }
    for space in &spaces {
        run.step("replay", || space.replay(other, || ()))?;
    }
    Ok(())
}

/// Eager work between replays, with live results, a reader and a trim. Without the second thread,
/// whose replays would wait for the scopes.
fn eager(run: &mut Run) -> Result<()> {
    let other = run.injector.stream();
    let device = Arc::clone(&run.device);
    let stamps = Stamps::new(device.driver(), other);
    let options = Options { large_page_bytes: PAGE, ..plain() };
    let arena = Arc::new(run.step("create", || SharedVmmAllocator::new(&device, &options))?);
    run.arena = Arc::downgrade(&arena);
    let space = run.step("open", || arena.open_space())?;
    let passing = run.step("allocate", || space.allocate(5 * M, other))?;
    let stays = run.step("allocate", || space.allocate(3 * M, other))?;
    space.free(passing)?;
    run.step("seal", || space.seal())?;
    let write = || {
        run.injector.keep_busy(1);
        stamps.write(passing, 5 * M, 1).and_then(|()| stamps.write(stays, 3 * M, 2))
    };
    let mut results = Vec::new();
    for round in 0..4 {
        run.step("replay", || space.replay(other, write)?)?;
        let scope = run.step("scope", || arena.eager_scope(other))?;
        let bytes = (2 + 3 * u64::from(round)) * M;
        let (first, read) =
            (run.step("work", || scope.allocate(bytes))?, run.step("work", || scope.allocate(M))?);
        let last = run.step("work", || scope.allocate(2 * M))?;
        let kept = run.step("keep", || scope.allocate_kept(3000))?;
        run.step("write", || stamps.write(last, 2 * M, 10 + round))?;
        run.step("write", || stamps.write(kept, 3000, 20 + round))?;
        scope.free(first)?;
        scope.record_stream(read, A)?;
        scope.free(read)?;
        drop(scope);
        run.balance("the end of a scope");
        results.push((last, 2 * M, 10 + round));
        results.push((kept, 3000, 20 + round));
        run.step("replay", || space.replay(other, write)?)?;
        for (at, bytes, stamp) in &results {
            assert!(
                run.step("read", || stamps.holds(*at, *bytes, *stamp))?,
                "a result of round {round} was lost"
            );
        }
        assert!(run.step("read", || stamps.holds(stays, 3 * M, 2))?, "a retained block was lost");
        if round == 1 {
            run.step("free", || arena.eager_blocks().free(results[0].0, &[A]))?;
            results.remove(0);
        }
        if round == 2 {
            run.step("trim", || arena.trim())?;
        }
    }
    drop(space);
    run.balance("drop the graph");
    for (at, bytes, stamp) in &results {
        assert!(run.step("read", || stamps.holds(*at, *bytes, *stamp))?, "a result was lost with the graph");
    }
    let blocks = arena.eager_blocks();
    drop(arena);
    for (at, ..) in results.drain(2..) {
        run.step("free", || blocks.free(at, &[]))?;
    }
    Ok(())
}

/// Private blocks in a pause and at the arena's end. Without the second thread, whose captures a
/// paused arena refuses.
fn exclusive(run: &mut Run) -> Result<()> {
    let (other, options) = (run.injector.stream(), Options { large_page_bytes: PAGE, ..plain() });
    let stamps = Stamps::new(run.device.driver(), other);
    let device = Arc::clone(&run.device);
    let arena = Arc::new(run.step("create", || SharedVmmAllocator::new(&device, &options))?);
    run.arena = Arc::downgrade(&arena);
    let space = run.step("open", || arena.open_space())?;
    run.step("allocate", || space.allocate(M, other))?;
    run.step("seal", || space.seal())?;
    let first = run.step("exclusive", || arena.allocate_exclusive(3 * M, 0))?;
    let second = run.step("exclusive, aligned", || arena.allocate_exclusive(M, 8 * M))?;
    run.step("replay", || space.replay(other, || stamps.write(second, 8 * M, 5))?)?;
    arena.free_exclusive(first)?;
    run.balance("free");
    if run.device.driver().capabilities().replace_under_graph {
        run.step("pause", || arena.pause(Fence::default())?.complete())?;
        assert!(run.step("read", || stamps.holds(second, 8 * M, 5))?, "it did not stay");
        run.step("resume", || arena.resume(Duration::ZERO))?;
    }
    let third = run.step("exclusive, a free page", || arena.allocate_exclusive(3 * M, 0))?;
    assert!(arena.stats().exclusive_bytes >= 12 * M);
    arena.free_exclusive(third)?;
    run.step("trim host", || arena.device().host_pool().trim())?;
    Ok(())
}

fn space_is_shut(space: &Space, stream: Stream) -> bool {
    let mut launched = false;
    let refused = space.replay(stream, || launched = true);
    matches!(refused, Err(Error::WrongState { sentence }) if sentence.contains("paused")) && !launched
}

/// A peer is added to an arena that lists it, and to one that does not.
fn peers(run: &mut Run) -> Result<()> {
    let listed = Options { peers: Peers::one(1), ..plain() };
    for options in [listed, plain()] {
        let arena = run.arena(&options)?;
        let space = run.step("open", || arena.open_space())?;
        let block = run.step("allocate", || space.allocate(20 * M, A))?;
        let device = Arc::clone(&run.device);
        run.step("admit", || device.admit(Peers::one(1)))?;
        run.step("allocate", || space.allocate(40 * M, A))?;
        run.step("free", || space.free(block))?;
        run.step("seal", || space.seal())?;
    }
    Ok(())
}

/// Commits and decommits a buffer with a pending fence; an arena takes free pages.
fn elastic(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let options = ElasticOptions { name: "kv", page_bytes: 4 * M, ..ElasticOptions::default() };
    let buffer = run.step("reserve", || device.elastic_buffer(64 * M, &options))?;
    run.step("commit", || buffer.commit(0..10 * M))?;
    run.step("write", || stamps.write(buffer.base(), 4 * M, 7))?;
    let ahead = || buffer.commit_async(20 * M..30 * M)?.wait();
    run.step("commit ahead", ahead)?;
    run.step("commit more", || buffer.commit(6 * M..24 * M))?;
    run.injector.keep_busy(2);
    let mut fence = Fence::default();
    fence.add(device.pool().events(), other);
    run.step("decommit", || buffer.decommit(8 * M..64 * M, &fence))?;
    run.step("commit again", || buffer.commit(8 * M..12 * M))?;
    run.step("order", || buffer.before(other))?;
    buffer.reap();
    run.balance("reap");
    let arena = run.arena(&Options { large_page_bytes: 4 * M, ..plain() })?;
    let space = run.step("open", || arena.open_space())?;
    run.step("allocate", || space.allocate(8 * M, A))?;
    assert!(run.step("read", || stamps.holds(buffer.base(), 4 * M, 7))?, "the contents were lost");
    run.step("audit", || buffer.audit())?;
    run.step("decommit all", || buffer.decommit(0..64 * M, &Fence::default())).map(drop)
}

/// Leases pages of a graph to a buffer. Without the second thread, whose captures would be refused.
fn lending(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let options = Options { large_page_bytes: PAGE, ..plain() };
    let arena = Arc::new(run.step("create", || SharedVmmAllocator::new(&device, &options))?);
    run.arena = Arc::downgrade(&arena);
    let space = run.step("open", || arena.open_space())?;
    let block = run.step("allocate", || space.allocate(12 * M, other))?;
    space.free(block)?;
    run.step("seal", || space.seal())?;
    let options = ElasticOptions { name: "kv", page_bytes: 4 * M, ..ElasticOptions::default() };
    let buffer = Arc::new(run.step("reserve", || device.elastic_buffer(64 * M, &options))?);
    let idle: Arc<dyn Borrower> = Arc::new(IdleBorrower);
    run.step("commit", || buffer.commit(0..4 * M))?;
    for round in 0..2 {
        run.step("replay", || space.replay(other, || ()))?;
        let lease = run.step("lend", || arena.lend(&buffer, 8 * M..16 * M, &idle))?;
        run.step("order", || lease.before(other))?;
        let at = Address(buffer.base().0 + 8 * M);
        run.step("write", || stamps.write(at, 8 * M, 30 + round))?;
        let mut launched = false;
        let refused = space.replay(other, || launched = true);
        assert!(refused.is_err() && !launched, "a graph ran over pages on lease");
        let scope = run.step("scope", || arena.eager_scope_of(other, 4 * M))?;
        let mine = run.step("allocate", || scope.allocate(4 * M))?;
        run.step("write", || stamps.write(mine, 4 * M, 40 + round))?;
        assert!(scope.allocate(4 * M).is_err(), "eager work got pages on lease");
        assert!(run.step("read", || stamps.holds(mine, 4 * M, 40 + round))?, "eager work lost its block");
        scope.free(mine)?;
        drop(scope);
        assert!(run.step("read", || stamps.holds(at, 8 * M, 30 + round))?, "what was lent was lost");
        run.step("audit", || buffer.audit())?;
        run.step("recall", || lease.recall(Duration::from_millis(20)))?;
    }
    let scope = run.step("scope", || arena.eager_scope(other))?;
    let all = run.step("allocate", || scope.allocate(12 * M))?;
    scope.free(all)?;
    drop(scope);
    run.step("replay", || space.replay(other, || ()))
}

struct Vacant;

impl BlockBorrower for Vacant {
    fn vacate(&self, asked: &VacateBlocks) -> Result<Vacated> {
        Ok(Vacated { blocks: asked.blocks.clone(), fence: Fence::default() })
    }
}

/// Leases pages of a graph to cache blocks; a replay waits for the recall. Captures of the second
/// thread wait for recalls, too.
fn lending_blocks(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let arena = run.arena(&Options { large_page_bytes: PAGE, least_bytes: PAGE, ..plain() })?;
    arena.set_recall(Some(Duration::from_secs(10)));
    let space = run.step("open", || arena.open_space())?;
    let block = run.step("allocate", || space.allocate(20 * M, other))?;
    space.free(block)?;
    run.step("seal", || space.seal())?;
    let memory = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
    let planes = [PAGE / 2, PAGE / 2];
    let options = KvOptions { planes: &planes, blocks_most: 16, layout: KvLayout::ByPlane, memory };
    let cache = run.step("reserve", || device.kv_cache(&options))?;
    let vacant: Arc<dyn BlockBorrower> = Arc::new(Vacant);
    for _ in 0..2 {
        let lease = run.step("lend", || arena.lend_blocks(&cache, 2..5, &vacant))?;
        run.step("order", || lease.before(other))?;
        run.step("back a neighbour", || match cache.commit(5..6) {
            // The second thread has begun to recall the page.
            Err(Error::WrongState { .. }) => Ok(Committed::default()),
            result => result,
        })?;
        let launched = run.step("replay", || space.replay(other, || space.leases()))?;
        assert!(launched.is_empty(), "a graph ran over pages on lease");
        run.step("recall", || lease.recall(Duration::from_secs(10)))?;
        run.step("release", || cache.release(0..16, &Fence::default()))?;
    }
    run.step("reap", || Ok(cache.reap()))?;
    run.step("audit", || cache.audit())
}

/// A cache of three planes grows in all or none, shrinks around a busy block, and fills a hole.
fn cache(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let memory = ElasticOptions { name: "kv", page_bytes: 2 * M, ..ElasticOptions::default() };
    let options =
        KvOptions { planes: &[M, 3 * M, 512 << 10], blocks_most: 40, layout: KvLayout::ByPlane, memory };
    let cache = run.step("reserve", || device.kv_cache(&options))?;
    run.step("grow", || cache.grow_to(3))?;
    run.step("grow ahead", || cache.grow_async(6)?.wait())?;
    run.step("audit", || cache.audit())?;
    run.step("shrink", || cache.shrink_to(2, &[4..5], &Fence::default()))?;
    run.step("fill a hole", || cache.commit(2..4))?;
    run.step("release", || cache.release(0..5, &Fence::default()))?;
    run.step("grow again", || cache.grow_to(2))?;
    run.step("audit", || cache.audit())
}

/// A ring with two streams, changed and replaced sources, an abort, and a drop with an acquired
/// unit.
fn ring(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let mut units = [RingUnit::streamed(UNIT); 5];
    units[3].resident = true;
    let options = RingOptions { name: "weights", slots: 2, ..RingOptions::default() };
    let ring = run.step("ring", || device.ring(&units, &options))?;
    let buffer = run.step("host buffer", || device.host_buffer(5 * UNIT, Pinning::Required))?;
    let contents = |stamp: u32| stamp.to_le_bytes().repeat(UNIT as usize / 4);
    let source =
        |source: &Arc<HostBuffer>, from| [HostRun { source: Arc::clone(source), from, to: 0, bytes: UNIT }];
    let made = run.step("elastic", || device.elastic_buffer(UNIT, &ElasticOptions::default()))?;
    run.step("commit", || made.commit(0..UNIT))?;
    let mut numbers = [0; 5];
    for (unit, number) in numbers.iter_mut().enumerate() {
        *number = 100 + unit as u32;
        run.step("write", || buffer.write(unit as u64 * UNIT, &contents(*number)))?;
        ring.set_source(unit, &source(&buffer, unit as u64 * UNIT))?;
    }
    run.step("prime", || ring.prime())?;
    for round in 0..2 {
        for (unit, number) in numbers.iter().enumerate() {
            let stream = if unit == 1 { A } else { other };
            run.step("acquire", || ring.acquire(unit, stream))?;
            let at = ring.address(unit)?;
            let holds = run.step("read", || stamps.holds(at, UNIT, *number))?;
            assert!(holds, "unit {unit} is not there in round {round}");
            run.injector.keep_busy(2);
            run.step("release", || ring.release(unit, stream))?;
        }
        run.step("audit", || ring.audit())?;
        if round == 0 {
            numbers[1] = 201;
            run.step("write", || buffer.write(UNIT, &contents(201)))?;
            numbers[0] = 202;
            run.step("fill", || stamps.write(made.base(), UNIT, 202))?;
            // SAFETY: committed until the end.
            run.step("store", || unsafe { buffer.store(0, made.base(), UNIT, other) })?;
            run.step("behind the store", || buffer.before(A))?;
            let more = run.step("host buffer", || device.host_buffer(UNIT, Pinning::Required))?;
            numbers[4] = 204;
            run.step("write", || more.write(0, &contents(204)))?;
            ring.set_source(4, &source(&more, 0))?;
            run.step("acquire", || ring.acquire(2, other))?;
            ring.abort();
        }
    }
    run.step("acquire", || ring.acquire(0, other))?;
    run.injector.keep_busy(3);
    drop(ring);
    run.balance("drop the ring");
    drop((buffer, made));
    run.step("trim host", || device.host_pool().trim()).map(drop)
}

/// Three workspaces on one page, and new pages after a change of stream.
fn workspaces(run: &mut Run) -> Result<()> {
    let (device, other) = (Arc::clone(&run.device), run.injector.stream());
    let stamps = Stamps::new(device.driver(), other);
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(run.step("make", || Workspace::new(&device, UNIT))?);
    }
    let behind = |stream| {
        let mut fence = Fence::default();
        fence.add(device.pool().events(), stream);
        fence
    };
    let uses = [(0, Some(A)), (1, Some(other)), (2, Some(A)), (2, Some(other)), (0, None)];
    for (number, (chosen, stream)) in uses.into_iter().enumerate() {
        let one: &Workspace = &all[chosen];
        run.step("use", || one.use_on(stream, || behind(A)))?;
        let (at, stamp) = (one.address(), number as u32);
        run.step("write", || stamps.write(at, UNIT, stamp))?;
        let holds = run.step("read", || stamps.holds(at, UNIT, stamp))?;
        assert!(holds, "workspace {chosen} is not there");
    }
    run.injector.keep_busy(2);
    for one in all {
        one.leave(behind(other));
        drop(one);
        run.balance("drop a workspace");
    }
    Ok(())
}

const UNIT: u64 = 16 << 10;

type Scenario = fn(&mut Run) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("capture", capture),
    ("grow", grow),
    ("retain", retain),
    ("trim", trim),
    ("bump", bump),
    ("poison", poison),
    ("busy", busy),
    ("close", close),
    ("hopeless", hopeless),
    ("step aside", step_aside),
    ("join places", join_places),
    ("come back", come_back),
    ("arena aside", arena_aside),
    ("shrink", shrink),
    ("eager", eager),
    ("exclusive", exclusive),
    ("remote", remote),
    ("peers", peers),
    ("elastic", elastic),
    ("lending", lending),
    ("lending blocks", lending_blocks),
    ("cache", cache),
    ("ring", ring),
    ("workspaces", workspaces),
];

#[derive(Default)]
struct Swept {
    calls: u64,
    runs: u64,
    /// Single faults returned by a step; destructors met the rest and keep refused work for a
    /// retry.
    errors: u64,
}

fn start<'a>(injector: &'a dyn Injector, beside: Option<&'a Beside>, fail: &[u64]) -> Run<'a> {
    let device = Device::with_driver(injector.driver());
    let host_held = injector.host_held();
    injector.arm(fail);
    let single = fail.len() <= 1;
    Run { injector, device, errors: 0, single, host_held, arena: Weak::new(), beside }
}

fn end(run: Run, what: &str) {
    let injector = run.injector;
    injector.arm(&[]);
    if let Some(beside) = run.beside {
        beside.rest();
    }
    assert!(run.device.trim().is_ok(), "{what}");
    assert_eq!(run.device.pool().audit_idle(), Ok(()), "{what}");
    let stats = run.device.stats();
    assert_eq!((stats.physical_bytes, stats.pages, stats.mappings, stats.pending), (0, 0, 0, 0), "{what}");
    assert_eq!((stats.pages_created, stats.maps), (stats.pages_released, stats.unmaps), "{what}");
    assert_eq!((stats.reserved_bytes, stats.reservations), (0, 0), "{what}");
    let host_held = run.host_held;
    drop(run);
    drop(Device::with_driver(injector.driver()));
    assert_eq!(injector.held(), [0; 4], "{what}");
    assert_eq!(injector.host_held(), host_held, "{what}");
}

/// Returns `asked`, or VMMGRAPH_FAULT_PAIRS if smaller. The address sanitizer runs no pairs.
fn pairs(asked: u64) -> u64 {
    let most = std::env::var("VMMGRAPH_FAULT_PAIRS").ok().and_then(|pairs| pairs.parse().ok());
    asked.min(most.unwrap_or(asked))
}

/// Fails each call alone and in `pairs` pairs with a later call.
fn sweep(injector: &dyn Injector, name: &str, scenario: Scenario, pairs: u64) -> Swept {
    let start = |fail: &[u64]| start(injector, None, fail);
    let mut run = start(&[]);
    scenario(&mut run).unwrap();
    let mut swept = Swept { calls: injector.calls(), runs: 1, errors: 0 };
    assert_eq!(run.errors, 0);
    end(run, name);
    for nth in 1..=swept.calls {
        let mut run = start(&[nth]);
        let result = scenario(&mut run);
        assert!(result.is_ok(), "{name}: call {nth} fails: {result:?}");
        swept.errors += run.errors;
        end(run, &format!("{name}, fail [{nth}]"));
        for gap in 1..=pairs {
            let fail = [nth, nth + gap];
            let mut run = start(&fail);
            // A fault during the undo may cost the space, but nothing else.
            let _ = scenario(&mut run);
            end(run, &format!("{name}, fail {fail:?}"));
        }
        swept.runs += 1 + pairs;
    }
    swept
}

/// Covered by tests/platforms/ascend.rs (streams exist already here; patterns are bytes) and
/// tests/ring/graphs.rs (captures).
const ELSEWHERE: [&str; 5] = [
    "aclrtCreateStream",
    "aclrtDestroyStream",
    "aclrtMemsetD32Async",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies_v2",
];

/// Sweeps every scenario; then every driver function must have failed.
fn sweep_all(injector: &dyn Injector, driver: &str, asked: u64) {
    let pairs = pairs(asked);
    let mut all = Swept::default();
    let capabilities = *injector.driver().capabilities();
    let offered = |name: &str| match name {
        "peers" => !capabilities.peers.is_empty(),
        "ring" => capabilities.register_host,
        // These replace pages under graphs.
        "retain" | "arena aside" | "remote" => capabilities.replace_under_graph,
        _ => true,
    };
    for (name, scenario) in SCENARIOS.iter().filter(|(name, _)| offered(name)) {
        let swept = sweep(injector, name, *scenario, pairs);
        let Swept { calls, runs, errors } = swept;
        println!(
            "{driver}, {name}: {calls} calls, {runs} runs, {errors} single faults were errors of a step"
        );
        assert!(errors >= 3 && errors <= calls, "{name}: {errors} of {calls}");
        all = Swept { calls: all.calls + calls, runs: all.runs + runs, errors: all.errors + errors };
    }
    let mut failed = injector.failed();
    // Graph functions fail in tests/arena/executables.rs and tests/ring/graphs.rs.
    failed.retain(|name, _| !name.starts_with("cuGraph") && !ELSEWHERE.contains(&name.as_str()));
    let times: u64 = failed.values().sum();
    let Swept { calls, runs, errors } = all;
    println!(
        "{driver}: {calls} calls of {} functions, each call failed alone and in {pairs} pairs: {runs} runs, {times} faults, {errors} \
         errors of a step: {failed:?}",
        failed.len()
    );
    assert!(failed.len() >= 14, "only {} functions: has the form of the source changed?", failed.len());
    let never: Vec<_> = failed.iter().filter(|(_, times)| **times == 0).map(|(name, _)| name).collect();
    assert!(never.is_empty(), "never made to fail: {never:?}");
}

/// Calls around a fault with second-thread work before each.
const AROUND: u64 = 5;

fn beside(
    host: &Host,
    beside: &Arc<Beside>,
    scenario: Scenario,
    fail: &[u64],
    turns: Range<u64>,
    what: &str,
) -> u64 {
    let mut run = start(host, Some(beside), fail);
    host.faulty.watch_only(Some(thread::current().id()));
    let (calls, with) = (AtomicU64::new(0), Arc::clone(beside));
    host.faulty.set_hook(Some(Arc::new(move |_| {
        if turns.contains(&(calls.fetch_add(1, Relaxed) + 1)) {
            with.turn();
        }
    })));
    let result = scenario(&mut run);
    host.faulty.set_hook(None);
    if run.single {
        assert!(result.is_ok(), "{what}: {result:?}");
    }
    let calls = host.calls();
    host.faulty.watch_only(None);
    end(run, what);
    calls
}

/// Each call fails alone and with the next one, while the second thread works around the fault;
/// once it works before every call.
#[test]
fn host_with_a_second_thread() {
    let host = Host::new();
    let colleague = Arc::new(Beside::start(host.driver()));
    let mut runs = 0;
    for (name, scenario) in SCENARIOS {
        if *name == "close" {
            continue;
        }
        let calls = beside(&host, &colleague, *scenario, &[], 1..u64::MAX, name);
        for nth in 1..=calls {
            let turns = nth.saturating_sub(AROUND)..nth + AROUND;
            let what = format!("{name} with a second thread, fail {nth}");
            beside(&host, &colleague, *scenario, &[nth], turns.clone(), &what);
            runs += 1;
            if pairs(1) > 0 {
                beside(&host, &colleague, *scenario, &[nth, nth + 1], turns, &format!("{what} and the next"));
                runs += 1;
            }
        }
    }
    let (taken, blocked) = (colleague.taken.load(Relaxed), colleague.blocked.load(Relaxed));
    println!(
        "host with a second thread: {runs} runs, {taken} turns, {blocked} of them waited for the first thread"
    );
    assert!(taken > 2000, "only {taken} turns");
}

#[test]
fn host() {
    sweep_all(&Host::new(), "host", 3);
}

#[test]
fn stand_in() {
    sweep_all(&StandIn::cuda(), "stand-in", 3);
}

// Undo code is shared with CUDA, whose sweep includes pairs.

#[test]
fn stand_in_of_hip() {
    sweep_all(&StandIn::of("hip", ["libstandin_hip.so", "libamdhip64.so.7"], 2), "HIP's stand-in", 0);
}

#[test]
fn stand_in_of_ascend() {
    // ACL_ERROR_RT_MEMORY_ALLOCATION
    sweep_all(
        &StandIn::of("ascend", ["libstandin_ascend.so", "libascendcl.so"], 207_001),
        "Ascend's stand-in",
        0,
    );
}

#[test]
fn stand_in_of_mlu() {
    // CN_MEMORY_ERROR_OUT_OF_MEMORY
    sweep_all(&StandIn::of("mlu", ["libstandin_mlu.so", "libcndrv.so"], 100_100), "MLU's stand-in", 0);
}
