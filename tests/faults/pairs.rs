//! Any two calls at once: before or after each driver call of the first, a second thread makes the
//! whole second call. The device has one object of every kind, some pending destruction. Contents
//! stay, tables match the driver, and without an injected failure no call returns a driver error or
//! logs a warning.
//!
//! If the second call blocks on a lock of the first, the first continues after a moment.

use std::env;
use std::fmt;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tracing::field::Field;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry;
use vmmgraph::pages::Fence;
use vmmgraph::{Borrower, Error, Result, SharedVmmAllocator};
use vmmgraph_testkit::{FaultyDriver, IdleBorrower, Random, child, seeds};

mod world;

use world::{A, B, KIB, NOW, PAGE, SIDE, World};

type Call = (&'static str, fn(&World) -> Result<()>);

fn capture(arena: &SharedVmmAllocator) -> Result<()> {
    let space = arena.open_space()?;
    let blocks = [50, 3, 20].map(|kib| space.allocate(kib * KIB, B));
    let [first, second, _] = blocks;
    space.free(first?)?;
    space.seal()?;
    space.replay(B, || ())?;
    space.free(second?)
}

const CALLS: &[Call] = &[
    ("a graph goes", |world| {
        drop(world.live.space.take());
        Ok(())
    }),
    ("the blocks of a graph go", |world| {
        world.live.drop_tensors();
        Ok(())
    }),
    ("a block goes", |world| world.live.free(&[])),
    ("a block of another graph goes, which is read", |world| world.second.free(&[B])),
    ("a block that outlived its graph goes", |world| world.outlived.free(&[])),
    ("what outlived a graph goes", |world| {
        world.outlived.drop_tensors();
        Ok(())
    }),
    ("replay", |world| world.live.replay(A)),
    ("replay of another graph", |world| world.second.replay(B)),
    ("the first replay of a graph", |world| world.unlaunched.replay(A)),
    ("a block goes before the first replay", |world| world.unlaunched.free(&[])),
    ("a graph that was never replayed goes", |world| {
        drop(world.unlaunched.space.take());
        Ok(())
    }),
    ("others are given a page", |world| {
        let (Some(space), Some(block)) = (world.second.space.get(), world.second.first()) else {
            return Ok(());
        };
        let extents = space.export(block.at, block.bytes)?;
        let exported = world.device.export_page(extents[0].page)?;
        let page = world.device.import(exported.fd.as_fd(), extents[0].page_bytes)?;
        *world.pin.0.lock().unwrap() = Some((exported.pin, page));
        Ok(())
    }),
    ("others let go of a page", |world| {
        drop(world.pin.take());
        Ok(())
    }),
    ("a switch and an allocation by the serial names", |world| {
        world.other.switch_to_new_virtual_space()?;
        let block = world.other.allocate(30 * KIB, A)?;
        world.other.deallocate(block)
    }),
    ("a bump space", |world| {
        let Some(arena) = world.arena.get() else { return Ok(()) };
        let space = arena.open_bump_space()?;
        let block = space.allocate(30 * KIB, A)?;
        space.free(block)?;
        space.seal().map(drop)
    }),
    ("blocks that peers use", |world| {
        let space = world.other.open_space()?;
        let block = space.allocate_remote(20 * KIB, A)?;
        space.free(block)?;
        space.seal().map(drop)
    }),
    ("a capture with something kept", |world| {
        let Some(arena) = world.arena.get() else { return Ok(()) };
        let space = arena.open_space()?;
        let block = space.allocate_kept(3 * KIB, A)?;
        space.seal()?;
        drop(space.clone());
        space.free(block)
    }),
    ("somebody who found no memory makes room", |world| {
        world.device.make_room(100 * KIB, NOW);
        Ok(())
    }),
    ("all leases are recalled", |world| {
        world.arena.get().map_or(Ok(()), |arena| arena.recall_all(Duration::from_secs(5)))
    }),
    ("capture", |world| world.arena.get().map_or(Ok(()), |arena| capture(&arena))),
    ("capture elsewhere", |world| capture(&world.other)),
    ("eager work", |world| {
        let Some(arena) = world.arena.get() else { return Ok(()) };
        let scope = arena.eager_scope(B)?;
        let block = scope.allocate(70 * KIB);
        let freed = block.and_then(|block| scope.free(block));
        scope.into_end().end().and(freed)
    }),
    ("a result of eager work goes", |world| {
        let (Some(arena), Some(block)) = (world.arena.get(), world.results.lock().unwrap().pop()) else {
            return Ok(());
        };
        arena.eager_blocks().free(block.at, &[])
    }),
    ("an exclusive block", |world| {
        let Some(arena) = world.arena.get() else { return Ok(()) };
        let block = arena.allocate_exclusive(8 * KIB, 0)?;
        arena.free_exclusive(block)
    }),
    ("a trim", |world| world.device.trim().map(drop)),
    ("a trim of the arena", |world| world.arena.get().map_or(Ok(()), |arena| arena.trim().map(drop))),
    ("giving back", |world| {
        world.device.give_back(NOW);
        Ok(())
    }),
    ("a mark", |world| world.device.mark(A)),
    (CAPTURE, |world| {
        world.device.mark(SIDE)?;
        world.faulty.set_capturing(SIDE, true);
        Ok(())
    }),
    ("an arena steps aside", |world| {
        world.arena.get().map_or(Ok(()), |arena| arena.pause(Fence::default()).map(drop))
    }),
    ("an arena steps aside and comes back", |world| {
        let Some(arena) = world.arena.get() else { return Ok(()) };
        arena.pause(Fence::default())?;
        arena.resume(NOW).map(drop)
    }),
    ("the regions step aside", |world| world.device.pause(&["aside"], Fence::default()).map(drop)),
    ("all steps aside, and contents are on their way back", |world| {
        world.device.pause(&[], Fence::default())?;
        world.device.resume_async(&[], NOW).map(drop)
    }),
    ("all comes back", |world| world.device.resume(&[], NOW).map(drop)),
    ("a block in a region", |world| {
        let Some(region) = world.region.get() else { return Ok(()) };
        let block = region.allocate(30 * KIB, A)?;
        region.free(block)
    }),
    ("a block of a region goes", |world| {
        let (Some(region), Some(block)) = (world.region.get(), world.in_region.lock().unwrap().pop()) else {
            return Ok(());
        };
        region.free(block.at)
    }),
    ("a region goes", |world| {
        world.in_region.lock().unwrap().clear();
        drop(world.region.take());
        Ok(())
    }),
    ("a commit", |world| world.buffer.get().map_or(Ok(()), |buffer| buffer.commit(PAGE..5 * PAGE).map(drop))),
    ("a decommit", |world| {
        world.buffer.get().map_or(Ok(()), |buffer| buffer.decommit(0..4 * PAGE, &Fence::default()).map(drop))
    }),
    ("a buffer goes", |world| {
        drop(world.buffer.take());
        Ok(())
    }),
    ("a cache grows", |world| world.cache.get().map_or(Ok(()), |cache| cache.grow_to(24).map(drop))),
    ("a cache shrinks", |world| {
        world.cache.get().map_or(Ok(()), |cache| cache.shrink_to(4, &[], &Fence::default()).map(drop))
    }),
    ("a cache goes", |world| {
        drop(world.cache.take());
        Ok(())
    }),
    ("a unit of a ring is used", |world| {
        let Some(ring) = world.ring.get() else { return Ok(()) };
        ring.acquire(3, A)?;
        ring.release(3, A)
    }),
    ("a ring goes", |world| {
        drop(world.ring.take());
        Ok(())
    }),
    ("a workspace on another stream", |world| {
        let workspace = world.workspaces[0].get();
        workspace.map_or(Ok(()), |workspace| workspace.use_on(Some(B), Fence::default).map(drop))
    }),
    ("a workspace goes", |world| {
        drop(world.workspaces[1].take());
        Ok(())
    }),
    ("a lease", |world| {
        let (Some(arena), Some(buffer)) = (world.arena.get(), world.buffer.get()) else { return Ok(()) };
        let borrower: Arc<dyn Borrower> = Arc::new(IdleBorrower);
        match arena.lend(&buffer, 10 * PAGE..11 * PAGE, &borrower) {
            Err(Error::InvalidArgument { .. }) => Ok(()),
            lease => lease?.recall(Duration::from_secs(5)).map(drop),
        }
    }),
    ("a recall", |world| {
        let lease = world.lease.take();
        lease.map_or(Ok(()), |lease| lease.recall(Duration::from_secs(5)).map(drop))
    }),
    ("an arena goes", |world| {
        world.results.lock().unwrap().clear();
        drop(world.arena.take());
        Ok(())
    }),
    ("a look at everything", |world| {
        drop((world.device.stats(), world.other.map()));
        let Some(arena) = world.arena.get() else { return Ok(()) };
        drop((arena.stats(), arena.snapshot(), arena.map()));
        arena.audit()?;
        world.device.pool().audit()
    }),
];

/// Only this call makes later calls fail with `StreamCapturing`.
const CAPTURE: &str = "the capture of a stream that has readers begins";

/// Checks the result: a call may come at a wrong time, but must not fail otherwise.
fn answered(what: &str, when: When, result: Result<()>) {
    match result {
        Err(Error::Driver { .. } | Error::OutOfMemory { .. }) if when == When::BeforeRefusal => {}
        Ok(()) | Err(Error::WrongState { .. } | Error::Lent { .. }) => {}
        Err(Error::StreamCapturing { .. }) if what.contains(CAPTURE) => {}
        Err(error) => panic!("{what}: {error}"),
    }
}

static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Log;

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() <= Level::WARN {
            event.record(&mut |field: &Field, value: &dyn fmt::Debug| {
                LOGGED.lock().unwrap().push(format!("{field}: {value:?}"));
            });
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Before,
    Behind,
    /// Before; until then the device is busy.
    BeforeBusy,
    /// Before; then the driver refuses the first call.
    BeforeRefusal,
}

#[derive(Clone, Copy)]
struct Second {
    call: Call,
    /// The driver call of the first call to interrupt.
    at: u64,
    /// The driver call of the second call at which it stops until the first call is over; 0: none.
    stops: u64,
}

/// Wait for a thread that may wait for this one.
const MOMENT: Duration = Duration::from_millis(2);

/// Makes a call, with a second one in the middle; returns the driver calls of the first.
fn both(first: Call, when: When, second: Option<Second>) -> u64 {
    let what = second.map_or(format!("{:?}", first.0), |Second { call, at, stops }| {
        format!("{:?}, and {when:?} its driver call {at} {:?}, which stops at {stops}", first.0, call.0)
    });
    let world = Arc::new(World::new());
    let faulty = world.faulty.clone();
    let (calls, own) = (Arc::new(AtomicU64::new(0)), thread::current().id());
    let (over, is_over) = channel::<()>();
    let (is_over, running) = (Mutex::new(is_over), Arc::new(Mutex::new(None)));
    let (stopped, stops) = channel();
    let stops = Mutex::new(stops);
    faulty.set_busy(when == When::BeforeBusy);
    let hook = {
        let (world, calls, running) = (Arc::downgrade(&world), calls.clone(), running.clone());
        let (driver, of_second) = (Arc::downgrade(&faulty), AtomicU64::new(0));
        move |name: &'static str| {
            let idle = || driver.upgrade().unwrap().set_busy(false);
            if name == "event_synchronize" {
                idle();
            }
            let Some(Second { call: (_, call), at, stops: stops_at }) = second else {
                calls.fetch_add(1, Relaxed);
                return;
            };
            if thread::current().id() != own {
                if of_second.fetch_add(1, Relaxed) + 1 == stops_at {
                    stopped.send(()).unwrap();
                    let _ = is_over.lock().unwrap().recv_timeout(MOMENT);
                }
            } else if calls.fetch_add(1, Relaxed) + 1 == at {
                let (world, stopped) = (world.upgrade().unwrap(), stopped.clone());
                *running.lock().unwrap() = Some(thread::spawn(move || {
                    let result = call(&world);
                    drop(world);
                    stopped.send(()).unwrap();
                    result
                }));
                let _ = stops.lock().unwrap().recv_timeout(MOMENT);
                idle();
                if when == When::BeforeRefusal {
                    driver.upgrade().unwrap().arm(&[1]);
                }
            }
        }
    };
    let set = if when == When::Behind { FaultyDriver::set_hook_behind } else { FaultyDriver::set_hook };
    set(&faulty, Some(Arc::new(hook)));
    let result = (first.1)(&world);
    let _ = over.send(());
    faulty.set_busy(false);
    let thread = running.lock().unwrap().take();
    if let Some(thread) = thread {
        answered(&what, when, thread.join().unwrap_or_else(|_| panic!("{what}: the second call panicked")));
    }
    answered(&what, when, result);
    set(&faulty, None);
    faulty.arm(&[]);
    drop(faulty);
    Arc::into_inner(world).unwrap().end(&what);
    let logged = std::mem::take(&mut *LOGGED.lock().unwrap());
    assert!(when == When::BeforeRefusal || logged.is_empty(), "{what}: {logged:?}");
    calls.load(Relaxed)
}

const PART: &str = "VMMGRAPH_TEST_PART";

/// One test, since logs are process-wide, with a process for each core.
#[test]
fn any_two_calls_may_be_made_at_once() {
    if let Ok(part) = env::var(PART) {
        let (number, of) = part.split_once('/').unwrap();
        return runs(number.parse().unwrap(), of.parse().unwrap());
    }
    let of = thread::available_parallelism().map_or(1, usize::from).min(8);
    let part = |number| {
        child!("any_two_calls_may_be_made_at_once")
            .env(PART, format!("{number}/{of}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let parts: Vec<_> = (0..of).map(part).collect();
    // A child with a full pipe waits until it is read.
    for child in parts {
        let output = child.wait_with_output().unwrap();
        print!("{}", String::from_utf8_lossy(&output.stdout));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Runs this part of a random sample, by seed, of all second calls at each driver call of all first
/// calls.
fn runs(part: u64, of: u64) {
    tracing::subscriber::set_global_default(registry().with(Log)).unwrap();
    for seed in seeds(1) {
        let mut random = Random::new(seed);
        let (mut whole, mut halves) = (0, 0);
        let of_part = |first, when, second, count: &mut u64| {
            *count += 1;
            if *count % of == part {
                both(first, when, Some(second));
            }
        };
        for (when, one_of) in
            [(When::Before, 3), (When::Behind, 3), (When::BeforeBusy, 8), (When::BeforeRefusal, 8)]
        {
            let counts = CALLS.iter().map(|call| both(*call, when, None)).collect::<Vec<_>>();
            for (first, count) in CALLS.iter().zip(&counts) {
                for (call, own) in CALLS.iter().zip(&counts) {
                    for at in 1..=*count {
                        if random.below(one_of) == 0 {
                            of_part(*first, when, Second { call: *call, at, stops: 0 }, &mut whole);
                        }
                        for stops in (1..=*own).filter(|_| random.below(150) == 0) {
                            of_part(*first, when, Second { call: *call, at, stops }, &mut halves);
                        }
                    }
                }
            }
        }
        println!("part {part} of {of}: of {whole} times two calls at once, and {halves} with both in halves");
        assert!(whole > 12_000 && halves > 2_000, "{whole}, {halves}: the calls ask nothing of the driver");
    }
}
