//! Spaces that die while their arena's last replay may still run: torn down later, but neither too early nor never.

use std::sync::Arc;

use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator, Space, Stream};
use vmmgraph_testkit::{FaultyDriver, MIB};

const A: Stream = Stream(0);

fn sealed(arena: &SharedVmmAllocator) -> Arc<Space> {
    let space = arena.open_space().unwrap();
    space.allocate(20 * MIB, A).unwrap();
    space.seal().unwrap();
    space
}

#[test]
fn what_was_deferred_goes_with_the_arena() {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let device = Device::with_driver(host.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (running, dying) = (sealed(&arena), sealed(&arena));
    running.replay(A, || drop(dying)).unwrap();
    drop((running, arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn another_arenas_trim_does_not_tear_down_what_may_still_run() {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let [arena, other] = [0, 1].map(|_| SharedVmmAllocator::new(&device, &Options::default()).unwrap());
    let (running, dying) = (sealed(&arena), sealed(&arena));
    let launch = || {
        drop(dying);
        let before = faulty.count("unmap");
        other.trim().unwrap();
        assert_eq!(faulty.count("unmap"), before, "unmapped while a replay of its arena runs");
    };
    running.replay(A, launch).unwrap();
    arena.trim().unwrap();
    drop((running, arena, other, device));
    assert_eq!(host.leftovers(), [0; 4]);
}
