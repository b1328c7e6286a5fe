//! Runs the suite on every platform's stand-in, through the driver for real devices.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vmmgraph::driver::platform::PLATFORMS;
use vmmgraph::driver::{DeviceOptions, Handles, HostDriver, SharedDriver};
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator, Stream};
use vmmgraph_conformance::captures::Captures;
use vmmgraph_conformance::{Outcome, Plug, Subject, run};
use vmmgraph_testkit::{Captured, Trace, capture_with};

/// Platform, file of its stand-in, and cases the driver does not offer. All other cases pass.
type Row = (&'static str, &'static str, &'static [&'static str]);

const STAND_INS: &[Row] = &[
    ("cuda", "libcuda.so", &["unmap-waits"]),
    (
        "ascend",
        "libstandin_ascend.so",
        &[
            "peers",
            "export-import",
            "export-outlives",
            "unmap-waits",
            "capture-events",
            "capture-copies",
            "graph-executables",
            "graph-copies",
        ],
    ),
    (
        "hip",
        "libstandin_hip.so",
        &["export-import", "export-outlives", "replay-after-replace", "graph-executables", "graph-copies"],
    ),
    (
        "mlu",
        "libstandin_mlu.so",
        &[
            "peers",
            "export-import",
            "export-outlives",
            "unmap-waits",
            "copies-registered",
            "replay-after-replace",
            "graph-executables",
            "graph-copies",
        ],
    ),
];

/// Serialises the tests, which compare free memory.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(name: &str, file: &str, ordinal: i32) -> SharedDriver {
    // SAFETY: a stand-in without initialisers, never unloaded. Drivers use loaded libraries.
    let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
    std::mem::forget(library.unwrap_or_else(|error| panic!("{file}: {error}")));
    let platform = PLATFORMS.iter().find(|platform| platform.name == name);
    let platform = platform.unwrap_or_else(|| panic!("there is no platform {name}"));
    // `Platform::open` ignores unsupported sharing; `driver::platform::open` refuses.
    let options = DeviceOptions { sharing: Handles::Fd, ..DeviceOptions::default() };
    (platform.open)(ordinal, options).unwrap()
}

#[test]
fn every_stand_in_passes_what_its_driver_offers() {
    let _turn = turn();
    for (name, file, not_offered) in STAND_INS {
        let [driver, other] = [0, 1].map(|ordinal| open(name, file, ordinal));
        let captures = Captures::of(name).unwrap_or_else(|| panic!("no captures of {name}"));
        let plug: Option<&dyn Plug> = Some(&captures);
        let report = run(&Subject { driver, other: Some(other), plug });
        println!("{report}");
        assert_eq!(report.names(Outcome::Failed), [""; 0], "{name}");
        assert_eq!(report.names(Outcome::NotOffered), *not_offered, "{name}");
    }
}

/// Every platform has a row above, or is the host.
#[test]
fn no_platform_is_left_out() {
    let named = STAND_INS.iter().map(|(name, ..)| *name).chain(["host"]);
    let there = PLATFORMS.iter().map(|platform| platform.name);
    let (mut named, mut there): (Vec<_>, Vec<_>) = (named.collect(), there.collect());
    named.sort_unstable();
    there.sort_unstable();
    assert_eq!(there, named);
}

/// Platform differences belong in the capabilities.
#[test]
fn the_suite_names_no_platform() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let cases = std::fs::read_dir(source.join("cases")).unwrap().map(|entry| entry.unwrap().path());
    let others = ["ground.rs", "lib.rs", "plug.rs", "report.rs"].map(|file| source.join(file));
    let (mut words, mut files) = (0, 0);
    for path in cases.chain(others) {
        let text = std::fs::read_to_string(&path).unwrap().to_lowercase();
        for word in text.split(|c: char| !c.is_ascii_alphanumeric()) {
            let named = word != "host" && PLATFORMS.iter().any(|platform| platform.name == word);
            assert!(!named, "{} names {word}", path.display());
            words += 1;
        }
        files += 1;
    }
    assert!(files > 10 && words > 5_000, "{files} files, {words} words");
}

/// Per captured graph: small pages, large pages, maps, maps after each event; then the device's
/// counts.
type Counts = (Vec<(u64, u64, u64, Vec<u64>)>, [u64; 4]);

fn counts(driver: SharedDriver, trace: &Trace, mark: bool) -> Counts {
    let device = Device::with_driver(driver);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let captured: Vec<Captured> =
        trace.shapes.iter().map(|shape| capture_with(&arena, shape, Stream::LEGACY, mark).unwrap()).collect();
    let of = |captured: &Captured| {
        let report = &captured.report;
        (report.small_pages, report.large_pages, report.maps, captured.maps_after.clone())
    };
    let each = captured.iter().map(of).collect();
    let stats = device.stats();
    (each, [stats.pages_created, stats.maps, stats.physical_bytes, stats.reserved_bytes])
}

#[test]
fn every_platform_takes_the_pages_and_maps_of_the_host() {
    let _turn = turn();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data");
    let load = |name: &str| Trace::load(&folder, name).unwrap();
    let all = load("capture-trace-65");
    let names = ["capture-trace-llama-70b-tp8", "capture-trace-qwen3-0.6b", "capture-trace-vision"];
    let passing = [all.decode_only(), all].into_iter().chain(names.map(load)).map(|trace| (trace, false));
    // Retained blocks are marked in advance, since not every platform replaces pages.
    for (trace, mark) in passing.chain([(load("capture-trace-65-retained"), true)]) {
        let host = counts(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()), &trace, mark);
        assert!(host.1.iter().all(|count| *count > 0), "{}: {:?}", trace.name, host.1);
        println!("{}: pages, maps, bytes, addresses {:?}", trace.name, host.1);
        for (name, file, ..) in STAND_INS {
            assert!(counts(open(name, file, 0), &trace, mark) == host, "{name}: {}", trace.name);
        }
    }
}
