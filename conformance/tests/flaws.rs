//! Runs the suite on the host driver, and on drivers with one flaw each: the named cases must fail.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmmgraph::driver::{CudaDriver, Graph, Handles, HostDriver, SharedDriver};
use vmmgraph::{HostOptions, Stream};
use vmmgraph_conformance::captures::Captures;
use vmmgraph_conformance::{CASES, Launch, Outcome, Plug, Row, Subject, run};
use vmmgraph_testkit::{BrokenDriver, Delay, Flaw, LateDriver};

/// Serialises the tests: descriptors are per process, free memory per device.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn host(ordinal: i32) -> Arc<HostDriver> {
    let options = HostOptions { granularity: 16 << 10, memory_bytes: 256 << 20 };
    Arc::new(HostDriver::new(ordinal, options).unwrap().with_sharing(Handles::Fd))
}

struct Pretended(Arc<BrokenDriver>);

impl Plug for Pretended {
    fn begin(&self, stream: Stream) -> Result<(), String> {
        self.0.begin_capture(stream);
        Ok(())
    }

    fn end(&self, _: Stream) -> Result<Graph, String> {
        // SAFETY: no driver dereferences this graph.
        if self.0.end_capture() { Ok(unsafe { Graph::from_raw(1) }) } else { Err("it is invalid".to_owned()) }
    }

    fn destroy(&self, _: Graph) {}

    fn launch(&self, _: Launch, stream: Stream) -> Result<(), String> {
        self.0.launch(stream).map_err(|error| error.to_string())
    }

    fn thread_state(&self) -> Result<Vec<u64>, String> {
        Ok(vec![BrokenDriver::thread_state()])
    }
}

/// Each flaw, and the cases required to fail.
const FLAWS: &[(Flaw, &[&str])] = &[
    (Flaw::GranularityTooSmall, &["device"]),
    (Flaw::FreeBeyondTotal, &["device"]),
    (Flaw::FreeNeverChanges, &["create-release", "two-devices"]),
    (Flaw::Misaligned, &["reserve-free"]),
    (Flaw::OverlappingAddresses, &["reserve-free"]),
    (Flaw::AddressesAsMemory, &["reserve-beyond-memory"]),
    (Flaw::UntypedExhaustion, &["out-of-memory", "addresses-exhausted"]),
    (Flaw::ExhaustionLeaks, &["out-of-memory"]),
    (Flaw::HiddenDescriptors, &["descriptors"]),
    (
        Flaw::AliasIsAnotherPage,
        &["self-test", "alias-copies", "alias-fills", "alias-across-streams", "alias-many"],
    ),
    (Flaw::StaleMapping, &["replace-page", "self-test"]),
    (Flaw::FreshMapReadsZero, &["fresh-map", "self-test"]),
    (Flaw::ReleaseClears, &["release-while-mapped", "export-outlives"]),
    (Flaw::ImportsAnotherPage, &["export-import"]),
    (Flaw::UnmapClears, &["contents-stay", "replace-page", "self-test"]),
    (Flaw::MapsBackwards, &["map-several"]),
    (Flaw::UnmapsFirstOnly, &["unmap-several"]),
    (Flaw::FirstMappingOnly, &["map-in-any-order"]),
    (Flaw::SmallPagesOnly, &["large-page"]),
    (Flaw::RefusesPeers, &["peers"]),
    (Flaw::WrongDevice, &["two-devices"]),
    (Flaw::OneThreadOnly, &["fresh-thread", "many-threads"]),
    (Flaw::LeavesThreadState, &["thread-state"]),
    (Flaw::FillsBytes, &["fill-words"]),
    (Flaw::FillsTooFar, &["fill-bytes"]),
    (Flaw::ReadsWords, &["read-write"]),
    (Flaw::WritesWords, &["read-write"]),
    (Flaw::LosesRegisteredCopies, &["copies-registered"]),
    (Flaw::LosesCopiesToHost, &["copies"]),
    (Flaw::LosesCopiesFromHost, &["copies", "copies-registered"]),
    (Flaw::NeverRecordedIsAnError, &["event-never-recorded"]),
    (Flaw::CaptureUnseen, &["capture-seen"]),
    (Flaw::MapBreaksCapture, &["capture-memory"]),
    (Flaw::WaitBreaksCapture, &["capture-events"]),
    (Flaw::CopyBreaksCapture, &["capture-copies"]),
    (Flaw::GraphKeepsPage, &["replay-after-replace"]),
];

const DELAYS: &[(Delay, &[&str])] = &[
    (Delay::IgnoresWaits, &["event-orders-streams", "alias-across-streams"]),
    (Delay::LastFirst, &["stream-order"]),
    (Delay::QueryHopes, &["event-query"]),
    (Delay::SynchronizeHopes, &["event-synchronize"]),
    (Delay::KeepsFirstRecord, &["event-recorded-again"]),
    (Delay::DestroyForgets, &["stream-destroyed-early"]),
    (Delay::DestroyReleases, &["event-destroyed-early"]),
    (Delay::DefaultForgets, &["default-stream"]),
    (Delay::UnmapHopes, &["unmap-waits"]),
];

/// Flaws of graphs, on the stand-in's driver.
const GRAPH_FLAWS: &[(Flaw, &[&str])] = &[
    (Flaw::GraphUncounted, &["graph-executables"]),
    (Flaw::CopyKept, &["graph-copies"]),
    (Flaw::CopyAlwaysOn, &["graph-copies"]),
];

fn broken(flaw: Flaw) -> (Arc<BrokenDriver>, SharedDriver) {
    let other: SharedDriver = host(1);
    (Arc::new(BrokenDriver::new(host(0), flaw, true).beside(&other)), other)
}

fn case(name: &str, subject: &Subject) -> Row {
    CASES.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}")).run(subject)
}

#[test]
fn the_host_passes_what_it_offers() {
    let _turn = turn();
    let (driver, other) = broken(Flaw::None);
    let plug = Pretended(driver.clone());
    let report = run(&Subject { driver, other: Some(other), plug: Some(&plug) });
    println!("{report}");
    assert_eq!(report.names(Outcome::Failed), [""; 0]);
    assert_eq!(report.names(Outcome::NotOffered), ["unmap-waits", "graph-executables", "graph-copies"]);

    let host = host(2);
    let report = run(&Subject { driver: host.clone(), other: None, plug: None });
    assert_eq!(report.names(Outcome::Failed), [""; 0]);
    let not: Vec<&str> = report.names(Outcome::NotOffered);
    let without = ["two-devices", "thread-state", "capture-seen", "capture-memory", "capture-events"];
    assert_eq!(not[..1], ["unmap-waits"]);
    assert_eq!(not[1..6], without);
    assert_eq!(not[6..], ["capture-copies", "replay-after-replace", "graph-executables", "graph-copies"]);
    assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]));
}

#[test]
fn a_device_that_is_late_and_right_passes_too() {
    let _turn = turn();
    let late = LateDriver::new(host(0), Delay::Right);
    let report = run(&Subject { driver: Arc::new(late), other: None, plug: None });
    println!("{report}");
    assert_eq!(report.names(Outcome::Failed), [""; 0]);
}

#[test]
fn every_broken_rule_is_caught_by_the_name_of_its_case() {
    let _turn = turn();
    let mut caught = HashSet::new();
    let mut missed = Vec::new();
    let mut note = |flaw: &dyn std::fmt::Debug, name: &'static str, row: Row| {
        println!("{flaw:?}: {name}: {}", row.note);
        caught.insert(name);
        if row.outcome != Outcome::Failed {
            missed.push(format!("{flaw:?} passes {name}: {:?}", row.outcome));
        }
    };
    for (flaw, names) in FLAWS {
        for name in *names {
            let (driver, other) = broken(*flaw);
            let plug = Pretended(driver.clone());
            let row = case(name, &Subject { driver, other: Some(other), plug: Some(&plug) });
            note(flaw, name, row);
        }
    }
    for (delay, names) in DELAYS {
        for name in *names {
            let driver = Arc::new(LateDriver::new(host(0), *delay));
            note(delay, name, case(name, &Subject { driver, other: None, plug: None }));
        }
    }
    for (flaw, names) in GRAPH_FLAWS {
        for name in *names {
            let driver = Arc::new(BrokenDriver::new(Arc::new(CudaDriver::new(0).unwrap()), *flaw, true));
            let captures = Captures::of("cuda").unwrap();
            note(flaw, name, case(name, &Subject { driver, other: None, plug: Some(&captures) }));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
    let unable: Vec<&str> =
        CASES.iter().map(|case| case.name).filter(|name| !caught.contains(name)).collect();
    assert!(unable.is_empty(), "nobody has seen these fail: {unable:?}");
}
