//! Every driver call fails once, in every scenario, on the host driver and on the stand-in libcuda.so.
//!
//! A dry run counts a scenario's calls. Then run `n` fails call `n`: the step that met the fault answers with an error, the books
//! balance with what the driver really holds, the same step succeeds when it is repeated, and at the end nothing is left. Pairs
//! fail a second call right after the first, in the middle of its undoing: then a step may be lost, but nothing else.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::culib;
use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver};
use vmmgraph::{Device, Error, HostOptions, Options, Result, RetainPolicy, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{FaultyDriver, MIB};

/// A driver whose calls can be made to fail.
trait Injector {
    fn driver(&self) -> SharedDriver;
    /// The calls with these numbers fail from now on, the next one being 1.
    fn arm(&self, fail: &[u64]);
    /// Calls since the last `arm`.
    fn calls(&self) -> u64;
    /// Pages, reservations, mappings and events that the driver holds.
    fn held(&self) -> [u64; 4];
    /// Every function whose calls can be made to fail, and how many were.
    fn failed(&self) -> BTreeMap<String, u64>;
}

struct Host {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
}

impl Host {
    fn new() -> Self {
        let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
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
    fn failed(&self) -> BTreeMap<String, u64> {
        let failed = self.faulty.failed();
        driver_functions()
            .into_iter()
            .map(|name| (name.clone(), failed.get(&*name).copied().unwrap_or(0)))
            .collect()
    }
}

/// The functions of the trait `Driver` by its source, less `info`, which cannot fail, and `write`, which only tests call.
fn driver_functions() -> Vec<String> {
    let text = include_str!("../src/driver/mod.rs");
    let functions = text.split("pub trait Driver").nth(1).unwrap().split("    fn ").skip(1);
    let names = functions.map(|rest| rest.split('(').next().unwrap().to_owned());
    names.filter(|name| !["info", "write"].contains(&name.as_str())).collect()
}

/// The CUDA driver over the stand-in. Faults are process-wide there, so one test at a time.
struct StandIn {
    driver: SharedDriver,
    _alone: MutexGuard<'static, ()>,
}

type Fail = unsafe extern "C" fn(u64, i32);
type Calls = unsafe extern "C" fn() -> u64;
type Failed = unsafe extern "C" fn(usize, *mut u64) -> *const c_char;
type Leftovers = unsafe extern "C" fn(*mut u64);

fn control<T: Copy>(name: &[u8]) -> T {
    // SAFETY: the driver is open, so the library is there; the signatures are those of tests/standin-cuda/src/control.rs.
    unsafe { *culib().get::<T>(name).expect("not the stand-in") }
}

impl StandIn {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { driver: Arc::new(CudaDriver::new(0).unwrap()), _alone: alone }
    }
}

impl Injector for StandIn {
    fn driver(&self) -> SharedDriver {
        self.driver.clone()
    }
    fn arm(&self, fail: &[u64]) {
        let nth = |index: usize| fail.get(index).copied().unwrap_or(0);
        // SAFETY: the signatures as above; 2 is CUDA_ERROR_OUT_OF_MEMORY, a code every counted call may return.
        unsafe {
            control::<Calls>(b"standin_reset_counters\0")();
            control::<Fail>(b"standin_fail\0")(nth(0), 2);
            control::<Fail>(b"standin_fail_second\0")(nth(1), 2);
        }
    }
    fn calls(&self) -> u64 {
        // SAFETY: as above.
        unsafe { control::<Calls>(b"standin_calls\0")() }
    }
    fn held(&self) -> [u64; 4] {
        let mut held = [0; 4];
        // SAFETY: as above; the array has room for the four numbers.
        unsafe { control::<Leftovers>(b"standin_leftovers\0")(held.as_mut_ptr()) };
        held
    }
    fn failed(&self) -> BTreeMap<String, u64> {
        let name = |index| {
            let mut times = 0;
            // SAFETY: as above; a name is a static string that ends with a zero.
            let name = unsafe { control::<Failed>(b"standin_failed\0")(index, &raw mut times) };
            // SAFETY: as above.
            (!name.is_null()).then(|| (unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned(), times))
        };
        (0..).map_while(name).collect()
    }
}

/// One run of a scenario: repeats a step that met the fault.
struct Run<'a> {
    injector: &'a dyn Injector,
    device: Arc<Device>,
    errors: u64,
    single: bool,
}

impl Run<'_> {
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

    /// What the pool believes is what the driver holds.
    fn balance(&self, what: &str) {
        let (stats, held) = (self.device.stats(), self.injector.held());
        let books = [stats.pages, stats.reservations, stats.mappings];
        assert_eq!(books, held[..3], "{what}: the books do not balance");
        assert_eq!(self.device.pool().audit_idle(), Ok(()), "{what}");
    }
}

const A: Stream = Stream(0);
const B: Stream = Stream(1);

/// Create an arena, capture one shape with large, odd and packed blocks, replay it, drop it.
fn capture(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &Options::default()))?;
    let space = run.step("open", || arena.open_space())?;
    let mut blocks = Vec::new();
    for bytes in [40 * MIB, 3 * MIB, 700, 100_000, 17 * MIB + 1] {
        blocks.push(run.step("allocate", || space.allocate(bytes, A))?);
    }
    for block in blocks {
        run.step("free", || space.free(block))?;
    }
    run.step("allocate again", || space.allocate(30 * MIB, A)).map(|block| space.free(block))??;
    run.step("seal", || space.seal())?;
    run.step("replay", || space.replay(A, || ()))?;
    Ok(())
}

/// A second shape makes the arena grow, a third fits; replays from two streams.
fn grow(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &Options::default()))?;
    let mut spaces = Vec::new();
    for bytes in [20 * MIB, 60 * MIB, 45 * MIB] {
        let space = run.step("open", || arena.open_space())?;
        let first = run.step("allocate", || space.allocate(bytes, A))?;
        let second = run.step("allocate", || space.allocate(bytes / 3, B))?;
        space.record_stream(first, B)?;
        space.free(first)?;
        space.free(second)?;
        run.step("seal", || space.seal())?;
        spaces.push(space);
    }
    for (space, stream) in spaces.iter().zip([A, B, A]) {
        run.step("replay", || space.replay(stream, || ()))?;
    }
    run.step("mark", || arena.mark())
}

/// Blocks that outlive their captures: a page that only this space shows, pages that others show too, a large page that is
/// covered in part, a block over several pages; freed afterwards, so that a later space gets their pages.
fn retain(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &Options::default()))?;
    let mut spaces = Vec::new();
    for round in 0..3 {
        let space = run.step("open", || arena.open_space())?;
        let passing = run.step("allocate", || space.allocate(36 * MIB, A))?;
        let output = run.step("allocate", || space.allocate(4000, A))?;
        let partial = run.step("allocate", || space.allocate(10 * MIB, A))?;
        space.free(passing)?;
        let several = run.step("allocate", || space.allocate(35 * MIB, A))?;
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
    // The middle one goes first.
    drop(spaces.remove(1));
    run.step("trim", || arena.trim())?;
    let space = run.step("open", || arena.open_space())?;
    run.step("allocate", || space.allocate(90 * MIB, A))?;
    run.step("seal", || space.seal_with(RetainPolicy::Share))?;
    drop(space);
    Ok(())
}

/// The hungriest shape goes, and a trim takes what only it needed.
fn trim(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &Options::default()))?;
    let hungry = run.step("open", || arena.open_space())?;
    run.step("allocate", || hungry.allocate(100 * MIB, A)).map(|block| hungry.free(block))??;
    run.step("seal", || hungry.seal())?;
    let modest = run.step("open", || arena.open_space())?;
    run.step("allocate", || modest.allocate(20 * MIB, A)).map(|block| modest.free(block))??;
    run.step("seal", || modest.seal())?;
    run.step("replay", || hungry.replay(A, || ()))?;
    run.step("replay", || modest.replay(B, || ()))?;
    drop(hungry);
    let before = run.device.stats();
    run.step("trim", || arena.trim())?;
    let after = run.device.stats();
    assert!(after.physical_bytes < before.physical_bytes || !run.single);
    run.step("the names of the published design", || arena.switch_to_new_virtual_space())?;
    let block = run.step("allocate", || arena.allocate(9 * MIB, A))?;
    run.step("switch", || arena.switch_to_new_virtual_space())?;
    run.step("deallocate", || arena.deallocate(block))
}

/// Bump spaces over one tape: a short one first, then one that lengthens it and needs a second range.
fn bump(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &Options::default()))?;
    for blocks in [&[2, 20][..], &[20, 2, 1000, 70, 20], &[2, 20, 30]] {
        let space = run.step("open", || arena.open_bump_space())?;
        for size in blocks {
            run.step("allocate", || space.allocate(size * MIB, A))?;
        }
        run.step("seal", || space.seal())?;
        run.step("replay", || space.replay(A, || ()))?;
    }
    run.step("trim", || arena.trim()).map(drop)
}

/// Replays over poison, and a verified one.
fn poison(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let options = Options { poison: true, ..Options::default() };
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &options))?;
    let space = run.step("open", || arena.open_space())?;
    let passing = run.step("allocate", || space.allocate(40 * MIB, A))?;
    let kept = run.step("allocate", || space.allocate(MIB, A))?;
    space.free(passing)?;
    run.step("seal", || space.seal())?;
    let mut launched = 0;
    run.step("replay", || space.replay(A, || launched += 1))?;
    run.step("replay", || space.replay(B, || launched += 1))?;
    assert_eq!(launched, 2, "a replay that could not be poisoned was launched, or one was not");
    run.step("verify", || space.verify(B, &[(kept, MIB)], || ())).map(drop)
}

/// A request beyond the device's memory.
fn hopeless(run: &mut Run) -> Result<()> {
    let device = Arc::clone(&run.device);
    let arena = run.step("create", || SharedVmmAllocator::new(&device, &Options::default()))?;
    let space = run.step("open", || arena.open_space())?;
    run.step("allocate", || space.allocate(3 * MIB, A))?;
    let refused = || match space.allocate(1 << 45, A) {
        Err(Error::OutOfMemory { requested, .. }) => Ok(requested),
        other => other.map(|block| block.0),
    };
    assert_eq!(run.step("allocate too much", refused)?, 1 << 45);
    run.step("allocate again", || space.allocate(20 * MIB, A))?;
    run.step("seal", || space.seal()).map(drop)
}

type Scenario = fn(&mut Run) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("capture", capture),
    ("grow", grow),
    ("retain", retain),
    ("trim", trim),
    ("bump", bump),
    ("poison", poison),
    ("hopeless", hopeless),
];

/// What a scenario's sweep came to.
#[derive(Default)]
struct Swept {
    /// Driver calls without a fault; each failed once alone and thrice in pairs.
    calls: u64,
    runs: u64,
    /// Single faults that were errors of a step. The others were met by destructors, which keep what was refused for another try.
    errors: u64,
}

fn sweep(injector: &dyn Injector, name: &str, scenario: Scenario) -> Swept {
    let start = |fail: &[u64]| {
        let device = Device::with_driver(injector.driver());
        injector.arm(fail);
        Run { injector, device, errors: 0, single: fail.len() <= 1 }
    };
    let end = |run: Run, what: &str| {
        injector.arm(&[]);
        assert_eq!(run.device.pool().retry(), Ok(()), "{what}");
        assert_eq!(run.device.pool().audit_idle(), Ok(()), "{what}");
        let stats = run.device.stats();
        assert_eq!(
            (stats.physical_bytes, stats.pages, stats.mappings, stats.pending),
            (0, 0, 0, 0),
            "{what}"
        );
        assert_eq!((stats.pages_created, stats.maps), (stats.pages_released, stats.unmaps), "{what}");
        assert_eq!((stats.reserved_bytes, stats.reservations), (0, 0), "{what}");
        drop(run);
        assert_eq!(injector.held(), [0; 4], "{what}");
    };

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
        for gap in 1..=3 {
            let fail = [nth, nth + gap];
            let mut run = start(&fail);
            // A fault during the undoing may cost the space. Nothing else.
            let _ = scenario(&mut run);
            end(run, &format!("{name}, fail {fail:?}"));
        }
        swept.runs += 4;
    }
    swept
}

/// Every scenario; then every function of the driver must have failed somewhere.
fn sweep_all(injector: &dyn Injector, driver: &str) {
    let mut all = Swept::default();
    for (name, scenario) in SCENARIOS {
        let swept = sweep(injector, name, *scenario);
        let Swept { calls, runs, errors } = swept;
        println!(
            "{driver}, {name}: {calls} calls, {runs} runs, {errors} single faults were errors of a step"
        );
        assert!(errors >= 3 && errors <= calls, "{name}: {errors} of {calls}");
        all = Swept { calls: all.calls + calls, runs: all.runs + runs, errors: all.errors + errors };
    }
    let failed = injector.failed();
    let times: u64 = failed.values().sum();
    let Swept { calls, runs, errors } = all;
    println!(
        "{driver}: {calls} calls of {} functions, each call failed alone and in 3 pairs: {runs} runs, {times} faults, {errors} \
         errors of a step: {failed:?}",
        failed.len()
    );
    assert!(failed.len() >= 14, "only {} functions: has the form of the source changed?", failed.len());
    let never: Vec<_> = failed.iter().filter(|(_, times)| **times == 0).map(|(name, _)| name).collect();
    assert!(never.is_empty(), "never made to fail: {never:?}");
}

#[test]
fn host() {
    sweep_all(&Host::new(), "host");
}

#[test]
fn stand_in() {
    sweep_all(&StandIn::new(), "stand-in");
}
