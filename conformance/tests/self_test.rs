//! The self-test of unproven platforms: finds broken aliases and mappings, and leaks nothing.

use std::process::Command;
use std::sync::Arc;

use vmmgraph::driver::{CudaDriver, Driver, HostDriver, SharedDriver, self_test, self_test_once};
use vmmgraph::{Error, HostOptions};
use vmmgraph_testkit::{BrokenDriver, FaultyDriver, Flaw};

const SMALL: u64 = 64 << 10;

fn host(ordinal: i32) -> Arc<HostDriver> {
    let options = HostOptions { granularity: SMALL, memory_bytes: 1 << 30 };
    Arc::new(HostDriver::new(ordinal, options).unwrap())
}

fn broken(ordinal: i32, flaw: Flaw) -> SharedDriver {
    Arc::new(BrokenDriver::new(host(ordinal), flaw, false))
}

#[test]
fn a_device_that_shows_what_it_claims_passes_and_nothing_is_left() {
    let host = host(0);
    self_test(&*host).unwrap();
    assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]));
    self_test(&CudaDriver::new(0).unwrap()).unwrap();
}

#[test]
fn every_way_in_which_a_page_can_be_wrong_is_refused_with_device_and_version() {
    let wrong = [
        (Flaw::AliasIsAnotherPage, "through another"),
        (Flaw::StaleMapping, "after one that took its place"),
        (Flaw::FreshMapReadsZero, "through another"),
        (Flaw::UnmapClears, "after one that took its place"),
        (Flaw::WritesWords, ""),
    ];
    for (flaw, tried) in wrong {
        let driver = broken(3, flaw);
        let result = self_test(&*driver);
        if flaw == Flaw::WritesWords {
            assert_eq!(result, Ok(()), "whole pages are whole words");
            continue;
        }
        let Err(Error::Incoherent { platform, device, version, found }) = result else {
            panic!("{flaw:?}: {result:?}");
        };
        assert_eq!((platform, device, version), ("host", 3, driver.version()), "{flaw:?}");
        assert!(found.contains(tried), "{flaw:?}: {found}");
    }
}

#[test]
fn whatever_call_fails_the_self_test_gives_everything_back() {
    let below = host(0);
    let driver = FaultyDriver::new(below.clone());
    driver.arm(&[]);
    self_test(&*driver).unwrap();
    let calls = driver.calls();
    assert!(calls > 60, "{calls}");
    for number in 1..=calls {
        driver.arm(&[number]);
        let result = self_test(&*driver);
        // A refused release is retried; only a second refusal is reported.
        assert!(!matches!(result, Err(Error::Incoherent { .. })), "call {number}: {result:?}");
        assert_eq!(
            (below.leftovers(), below.host_leftovers()),
            ([0; 4], [0; 2]),
            "call {number}: {result:?}"
        );
    }
    driver.arm(&[]);
    let failed = driver.failed();
    for name in ["reserve", "create", "map", "unmap", "read", "fill", "release", "free_addresses"] {
        assert!(failed.contains_key(name), "{name} never failed: {failed:?}");
    }
    for name in ["stream_create", "event_create", "event_record", "event_synchronize", "event_destroy"] {
        assert!(failed.contains_key(name), "{name} never failed: {failed:?}");
    }
}

fn next_page(driver: &dyn Driver) -> u64 {
    let page = driver.create(SMALL).unwrap();
    // SAFETY: created just now.
    unsafe { driver.release(page) }.unwrap();
    page.raw()
}

#[test]
fn a_device_is_tested_once_in_a_process_and_what_failed_stays_refused() {
    let first = broken(4, Flaw::None);
    self_test_once(&first).unwrap();
    assert!(next_page(&*first) > 1, "it was tested");
    let again = broken(4, Flaw::AliasIsAnotherPage);
    self_test_once(&again).unwrap();
    assert_eq!(next_page(&*again), 1, "the device is known");

    let refused = self_test_once(&broken(5, Flaw::AliasIsAnotherPage));
    assert!(matches!(refused, Err(Error::Incoherent { device: 5, .. })), "{refused:?}");
    assert_eq!(self_test_once(&broken(5, Flaw::None)), refused);

    // A driver error is no verdict about aliases: the test is repeated.
    let faulty = FaultyDriver::new(broken(6, Flaw::None));
    faulty.refuse("stream_create", true);
    let shared: SharedDriver = faulty.clone();
    assert!(matches!(self_test_once(&shared), Err(Error::Driver { .. })));
    faulty.refuse("stream_create", false);
    self_test_once(&shared).unwrap();

    // Platforms with proven aliases are not tested.
    let proven: SharedDriver = Arc::new(BrokenDriver::new(host(7), Flaw::AliasIsAnotherPage, true));
    self_test_once(&proven).unwrap();
    assert_eq!(next_page(&*proven), 1);
    let event = first.event_create().unwrap();
    // SAFETY: created just now.
    unsafe { first.event_destroy(event) }.unwrap();
}

#[test]
fn the_environment_leaves_the_test_out() {
    if std::env::var_os("VMMGRAPH_TEST_CHILD").is_some() {
        let driver = broken(1, Flaw::AliasIsAnotherPage);
        println!("{:?}, next page {}", self_test_once(&driver), next_page(&*driver));
        return;
    }
    let child = |value: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_environment_leaves_the_test_out", "--nocapture"])
            .env("VMMGRAPH_TEST_CHILD", "1")
            .env("VMMGRAPH_SELF_TEST", value)
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let (without, with) = (child("0"), child("1"));
    assert!(without.contains("Ok(()), next page 1"), "{without}");
    assert!(with.contains("Err(Incoherent"), "{with}");
}
