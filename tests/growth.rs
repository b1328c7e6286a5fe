//! The cost of calls does not grow with the number of objects. `benches/` measures times.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
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
