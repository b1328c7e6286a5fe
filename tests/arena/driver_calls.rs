//! While the device is busy, the driver calls of each operation do not depend on the number of
//! pending ones.

use std::sync::Arc;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{
    Device, ElasticOptions, HostOptions, Options, RegionOptions, SharedVmmAllocator, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{FaultyDriver, MIB, stream};

const A: Stream = Stream::LEGACY;

fn calls<T>(
    many: u64,
    make: impl Fn(&Arc<Device>, u64) -> T,
    work: impl Fn(&Arc<Device>, T, u64) -> T,
) -> u64 {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let made = make(&device, many);
    faulty.set_busy(true);
    let before = faulty.calls();
    let left = work(&device, made, many);
    let calls = faulty.calls() - before;
    faulty.set_busy(false);
    drop(left);
    device.trim().unwrap();
    assert_eq!(device.pool().audit_idle(), Ok(()));
    drop(device);
    assert_eq!(host.leftovers(), [0; 4]);
    calls
}

/// Four times the objects may take at most five times the calls.
fn linear<T>(what: &str, make: impl Fn(&Arc<Device>, u64) -> T, work: impl Fn(&Arc<Device>, T, u64) -> T) {
    let [few, many] = [50, 200].map(|many| calls(many, &make, &work));
    assert!(few >= 50 && many <= 5 * few, "{what}: {few} calls of 50, {many} of 200");
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    SharedVmmAllocator::new(device, &Options::default()).unwrap()
}

#[test]
fn blocks_of_graphs() {
    for (kept, gone) in [(false, false), (false, true), (true, false), (true, true)] {
        let make = |device: &Arc<Device>, many| {
            let arena = arena(device);
            let space = arena.open_space().unwrap();
            let tensors = VmmTorchAllocator::new(&space);
            let blocks: Vec<_> = (0..many).map(|_| tensors.allocate(MIB, A, kept).unwrap()).collect();
            space.seal().unwrap();
            space.replay(A, || ()).unwrap();
            (arena, (!gone).then_some(space), tensors, blocks)
        };
        linear(&format!("kept {kept}, the graph is gone {gone}"), make, |_, made, _| {
            for block in &made.3 {
                made.2.record_stream(*block, stream(0x31)).unwrap();
                made.2.free(*block, &[]).unwrap();
            }
            made
        });
    }
}

#[test]
fn graphs_and_arenas() {
    let make = |device: &Arc<Device>, many| {
        let arena = arena(device);
        let all = (0..many).map(|_| {
            let space = arena.open_space().unwrap();
            let block = space.allocate_kept(4096, A).unwrap();
            space.seal().unwrap();
            (space, block)
        });
        (all.collect::<Vec<_>>(), arena)
    };
    linear("graphs with a kept output each", make, |_, (all, arena), _| {
        for (space, block) in all {
            space.replay(A, || ()).unwrap();
            space.free(block).unwrap();
        }
        (Vec::new(), arena)
    });
    linear(
        "arenas",
        |_, _| (),
        |device, (), many| {
            for _ in 0..many {
                let space = arena(device).open_space().unwrap();
                space.allocate(MIB, A).unwrap();
                space.seal().unwrap();
                space.replay(A, || ()).unwrap();
            }
        },
    );
}

#[test]
fn blocks_of_regions() {
    let make = |device: &Arc<Device>, many| {
        let options = RegionOptions { page_bytes: 2 * MIB, ..RegionOptions::default() };
        let region = device.region("weights", options).unwrap();
        let blocks: Vec<_> = (0..many).map(|_| region.allocate(MIB, A).unwrap()).collect();
        (region, blocks)
    };
    linear("freed, and others allocated", make, |_, (region, blocks), many| {
        for block in blocks {
            region.free(block).unwrap();
        }
        let blocks = (0..many).map(|_| region.allocate(MIB, A).unwrap()).collect();
        (region, blocks)
    });
}

#[test]
fn pages_of_elastic_buffers() {
    let page = |number: u64| number * 2 * MIB..(number + 1) * 2 * MIB;
    let make = |device: &Arc<Device>, many| {
        let options = ElasticOptions { page_bytes: 2 * MIB, ..ElasticOptions::default() };
        let buffers = [0; 2].map(|_| device.elastic_buffer(many * 2 * MIB, &options).unwrap());
        buffers[0].commit(0..many * 2 * MIB).unwrap();
        buffers
    };
    linear("from one to another", make, |device, buffers, many| {
        for number in 0..many {
            let mut fence = Fence::default();
            fence.add(device.pool().events(), stream(0x50));
            buffers[0].decommit(page(number), &fence).unwrap();
            buffers[1].commit(page(number)).unwrap();
        }
        buffers
    });
}
