//! The cost of calls does not grow with the number of objects. `benches/` measures times.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, ElasticOptions, HostOptions};
use vmmgraph_testkit::growth;

/// Ten times the objects may cost three times as much, and a little: colder caches, deeper trees.
fn grows_little(what: &str, few: Duration, many: Duration) {
    println!("{what}: {few:?} among few, {many:?} among many");
    assert!(many < 3 * few + Duration::from_micros(5), "{what}: {few:?} among few, {many:?} among many");
}

#[test]
fn a_lease_costs_the_same_beside_many() {
    // Below 1,000 mappings, debug builds audit all mappings at every call.
    // Each page is a file descriptor of the host driver.
    let own = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: own.maximum, maximum: own.maximum }).unwrap();
    grows_little("a lease", growth::lease(300), growth::lease(3_000));
}

#[test]
fn a_kept_block_costs_the_same_among_many_holes() {
    grows_little("a kept block", growth::kept_block(1_000), growth::kept_block(10_000));
}

#[test]
fn a_block_of_a_region_costs_the_same_among_many_holes() {
    grows_little("a block of a region", growth::region_block(1_000), growth::region_block(10_000));
}

#[test]
fn a_stream_is_noted_for_a_block_and_forgotten_with_it_at_the_same_cost_beside_many() {
    let ((noted, freed), (noted_many, freed_many)) =
        (growth::noted_stream(4_000), growth::noted_stream(40_000));
    grows_little("a noted stream", noted, noted_many);
    grows_little("the end of its block", freed, freed_many);
}

#[test]
fn a_plan_of_twenty_times_the_shapes_does_not_take_four_hundred_times_as_long() {
    let best = |shapes| (0..3).map(|_| growth::plan_of(shapes)).min().unwrap();
    let (few, many) = (best(1_000), best(20_000));
    println!("a plan: {few:?} for 1,000 shapes, {many:?} for 20,000");
    assert!(many < 200 * few, "{few:?} for 1,000 shapes, {many:?} for 20,000");
}

/// A buffer of which memory is asked for ahead has a thread of the library's, until the buffer
/// goes.
#[test]
fn buffers_that_are_gone_leave_no_thread() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.starts_with("vmmgraph-elasti")).count()
    };
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    for _ in 0..10 {
        let buffer = device.elastic_buffer(1 << 20, &ElasticOptions::default()).unwrap();
        buffer.commit_async(0..1 << 20).unwrap().wait().unwrap();
        assert!(threads() > 0);
    }
    let start = Instant::now();
    while threads() > 0 {
        assert!(start.elapsed() < Duration::from_secs(10), "{} threads of no buffer", threads());
        std::thread::yield_now();
    }
}
