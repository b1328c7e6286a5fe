//! Threads with a potential deadlock: reclaimers pausing each other's regions, hooks, launches.
//! Each finishes, or closing the cycle is an error.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::{Fence, Reclaimer};
use vmmgraph::pause::{Moved, PauseHooks};
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, Policy, Region, RegionOptions, Result, SharedVmmAllocator,
    Stream,
};
use vmmgraph_testkit::{MIB, stream};

const A: Stream = stream(0xa0);
const BYTES: u64 = 8 * MIB;

/// Runs a test with a timeout, on its own thread.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (ended, end) = channel();
    let running = thread::spawn(move || {
        test();
        let _ = ended.send(());
    });
    assert_ne!(end.recv_timeout(Duration::from_secs(30)), Err(RecvTimeoutError::Timeout), "it hangs");
    if let Err(panic) = running.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Returns when the condition was seen to hold; [`watched`] limits the wait. On a busy machine a
/// thread stays in a short section for seconds.
fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::sleep(Duration::from_millis(1));
    }
}

fn device() -> Arc<Device> {
    Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()))
}

fn model(device: &Arc<Device>, tag: &str, stamp: u64) -> (Arc<Region>, Address) {
    let options = RegionOptions { policy: Policy::Backup, ..RegionOptions::default() };
    let region = device.region(tag, options).unwrap();
    let block = region.allocate(BYTES, A).unwrap();
    // SAFETY: a live block of a resident region of the host driver.
    unsafe { (block.0 as *mut u64).write_volatile(stamp) };
    region.pause(Fence::default()).unwrap().complete().unwrap();
    (region, block)
}

thread_local! {
    /// The model not resumed by this thread.
    static OTHER: RefCell<Option<Arc<Region>>> = const { RefCell::new(None) };
}

struct PausesTheOther {
    together: u64,
    asked: AtomicU64,
}

impl Reclaimer for PausesTheOther {
    fn reclaim(&self, _bytes: u64) -> u64 {
        self.asked.fetch_add(1, SeqCst);
        wait_until(|| self.asked.load(SeqCst) >= self.together);
        let other = OTHER.with(|other| other.borrow().clone());
        other.map_or(0, |other| other.pause(Fence::default()).map_or(0, |report| report.bytes))
    }
    fn cost(&self) -> u64 {
        2
    }
}

/// Resumes two models on two threads; reclaimers pause the opposite model.
fn wake_two(budget: u64, together: u64, deadline: Duration) -> [Result<()>; 2] {
    let device = device();
    let models = [("a", 1), ("b", 2)].map(|(tag, stamp)| model(&device, tag, stamp));
    let reclaimer = Arc::new(PausesTheOther { together, asked: AtomicU64::new(0) });
    let known: Arc<dyn Reclaimer> = reclaimer.clone();
    device.add_reclaimer(&known);
    device.set_budget(Some(budget));
    let wakes = [(0, 1), (1, 0)].map(|(mine, its): (usize, usize)| {
        let (mine, its) = (models[mine].0.clone(), models[its].0.clone());
        thread::spawn(move || {
            OTHER.with(|other| *other.borrow_mut() = Some(its));
            mine.resume(deadline).map(drop)
        })
    });
    let woken = wakes.map(|wake| wake.join().unwrap());
    assert!(reclaimer.asked.load(SeqCst) >= together);
    device.set_budget(None);
    device.resume(&[], Duration::ZERO).unwrap();
    for ((_, block), stamp) in models.iter().zip(1_u64..) {
        // SAFETY: as in `model`.
        assert_eq!(unsafe { (block.0 as *const u64).read_volatile() }, stamp);
    }
    drop((models, known));
    device.trim().unwrap();
    assert_eq!(device.pool().audit_idle(), Ok(()));
    woken
}

/// Each thread held its region while its reclaimer waited for the other region, beyond both
/// deadlines.
#[test]
fn reclaimers_that_pause_each_others_models_end_with_the_deadline() {
    watched(|| {
        for woken in wake_two(BYTES / 2, 2, Duration::from_millis(100)) {
            assert!(matches!(woken, Err(Error::OverBudget { .. })), "{woken:?}");
        }
    });
}

#[test]
fn with_memory_for_one_two_models_wake_one_after_the_other() {
    watched(|| assert_eq!(wake_two(BYTES, 1, Duration::from_secs(20)), [Ok(()), Ok(())]));
}

#[test]
fn a_resume_that_waits_for_memory_keeps_nobody_from_its_region() {
    watched(|| {
        let device = device();
        let (region, block) = model(&device, "model", 7);
        device.set_budget(Some(BYTES / 2));
        thread::scope(|scope| {
            let resume = scope.spawn(|| region.resume(Duration::from_secs(60)));
            thread::sleep(Duration::from_millis(20));
            for _ in 0..20 {
                assert_eq!(region.pause(Fence::default()).unwrap().bytes, 0);
                let mut word = [0; 8];
                wait_until(|| region.stats().paused);
                if region.get_backup(block, 0, &mut word).is_ok() {
                    assert_eq!(u64::from_ne_bytes(word), 7);
                }
            }
            assert!(!resume.is_finished());
            device.set_budget(None);
            assert_eq!(resume.join().unwrap().unwrap().regions, 1);
        });
    });
}

struct Once(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Once {
    fn hooks(work: impl FnOnce() + Send + 'static) -> Arc<dyn PauseHooks> {
        Arc::new(Self(Mutex::new(Some(Box::new(work)))))
    }
}

impl PauseHooks for Once {
    fn before_unmap(&self, _moved: &Moved<'_>) {
        let work = self.0.lock().unwrap().take();
        work.into_iter().for_each(|work| work());
    }
    fn after_map(&self, _moved: &Moved<'_>) {}
}

/// A region's hook replays a graph while a launch of the graph's arena pauses the region.
#[test]
fn a_circle_over_a_region_and_an_arena_is_found() {
    watched(|| {
        let device = device();
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let space = arena.open_space().unwrap();
        space.seal().unwrap();
        let region = device.region("weights", RegionOptions::default()).unwrap();
        region.allocate(BYTES, A).unwrap();
        let (inside, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let both = {
            let inside = inside.clone();
            move || {
                inside.fetch_add(1, SeqCst);
                wait_until(|| inside.load(SeqCst) == 2);
            }
        };
        let count = {
            let refused = refused.clone();
            move |wrong: bool| refused.fetch_add(u64::from(wrong), SeqCst)
        };
        let hooks = {
            let (space, both, count) = (space.clone(), both.clone(), count.clone());
            Once::hooks(move || {
                both();
                let replayed = space.replay(A, || ());
                assert!(matches!(replayed, Ok(()) | Err(Error::WrongState { .. })), "{replayed:?}");
                count(replayed.is_err());
            })
        };
        device.add_pause_hooks("weights", &hooks);
        let paused = {
            let region = region.clone();
            thread::spawn(move || region.pause(Fence::default()).unwrap().complete())
        };
        let launch = || {
            both();
            let paused = region.pause(Fence::default()).map(drop);
            assert!(matches!(paused, Ok(()) | Err(Error::WrongState { .. })), "{paused:?}");
            count(paused.is_err());
        };
        space.replay(A, launch).unwrap();
        assert_eq!(paused.join().unwrap(), Ok(()));
        assert_eq!(refused.load(SeqCst), 1, "whoever closes the circle is told so, and nobody else");
        region.resume(Duration::ZERO).unwrap();
        space.replay(A, || ()).unwrap();
    });
}

/// Hooks of two regions pause each other's region: both are refused.
#[test]
fn hooks_of_two_threads_that_would_wait_for_each_other_are_both_refused() {
    watched(|| {
        let device = device();
        let regions = ["a", "b"].map(|tag| {
            let region = device.region(tag, RegionOptions::default()).unwrap();
            region.allocate(BYTES, A).unwrap();
            region
        });
        let (inside, answered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let hooks = [("a", 1), ("b", 0)].map(|(tag, its): (&str, usize)| {
            let (inside, answered) = (inside.clone(), answered.clone());
            let other = Arc::downgrade(&regions[its]);
            let hooks = Once::hooks(move || {
                inside.fetch_add(1, SeqCst);
                wait_until(|| inside.load(SeqCst) == 2);
                let paused = other.upgrade().unwrap().pause(Fence::default());
                assert!(matches!(paused, Err(Error::WrongState { .. })), "{paused:?}");
                answered.fetch_add(1, SeqCst);
                wait_until(|| answered.load(SeqCst) == 2);
            });
            device.add_pause_hooks(tag, &hooks);
            hooks
        });
        let pauses = regions
            .clone()
            .map(|region| thread::spawn(move || region.pause(Fence::default()).unwrap().complete()));
        assert_eq!(pauses.map(|pause| pause.join().unwrap()), [Ok(()), Ok(())]);
        assert_eq!(answered.load(SeqCst), 2);
        drop(hooks);
    });
}

/// Regions are entered in one order, whatever the order of the tags that a caller gives.
#[test]
fn two_threads_that_bring_regions_back_in_opposite_orders_get_on() {
    watched(|| {
        let device = device();
        let regions = ["one", "two", "three"].map(|tag| {
            let options = RegionOptions { policy: Policy::Discard, ..RegionOptions::default() };
            let region = device.region(tag, options).unwrap();
            region.allocate(MIB, A).unwrap();
            region.pause(Fence::default()).unwrap().complete().unwrap();
            region
        });
        for _ in 0..1500 {
            let start = Barrier::new(2);
            thread::scope(|scope| {
                for tags in [["one", "two", "three"], ["three", "two", "one"]] {
                    let (start, device) = (&start, &device);
                    scope.spawn(move || {
                        start.wait();
                        device.resume_async(&tags, Duration::from_secs(20)).map(drop).unwrap();
                    });
                }
            });
            regions.iter().for_each(|region| region.pause(Fence::default()).unwrap().complete().unwrap());
        }
    });
}
