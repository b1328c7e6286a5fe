//! Listed peer devices have access to every mapped page. On the stand-in with two devices and the
//! host driver with eight.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use vmmgraph::driver::{CudaDriver, HostDriver};
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, Peers, SharedVmmAllocator, Space, Stream, VmmTorchAllocator,
};
use vmmgraph_testkit::{FaultyDriver, MIB};

const READ_WRITE: u64 = 3;

fn access(device: i32, at: Address) -> u64 {
    let mut flags = u64::MAX;
    let location =
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    // SAFETY: good pointers.
    let code = unsafe { sys::cuMemGetAccess(ptr::from_mut(&mut flags).cast(), &raw const location, at.0) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "nothing is mapped at {at:?}");
    flags
}

fn looks(blocks: &[(Address, u64)]) -> impl Iterator<Item = Address> {
    blocks.iter().flat_map(|(at, bytes)| (0..*bytes).step_by(MIB as usize).map(|offset| at.plus(offset)))
}

/// Captures slabs, blocks of several pages and persistent blocks, some of them live-out on private
/// pages.
fn capture(arena: &SharedVmmAllocator) -> (Arc<Space>, Vec<(Address, u64)>) {
    let space = arena.open_space().unwrap();
    let mut blocks = Vec::new();
    for bytes in [4096, 40 * MIB, 100 * 1024, 24 * MIB, 5 * MIB] {
        blocks.push((space.allocate(bytes, Stream::LEGACY).unwrap(), bytes));
    }
    blocks.push((space.allocate_kept(3000, Stream::LEGACY).unwrap(), 3000));
    // The live-out block shares pages with a freed one: the seal replaces both.
    space.free(blocks[3].0).unwrap();
    (space, blocks)
}

#[test]
fn every_mapped_page_is_the_peers_too() {
    let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
    let options = Options { peers: Peers::one(0).and(Peers::one(1)), ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let alone = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (space, blocks) = capture(&arena);
    let (others, others_blocks) = capture(&alone);
    for turn in ["captured", "sealed"] {
        for at in looks(&blocks) {
            assert_eq!((access(0, at), access(1, at)), (READ_WRITE, READ_WRITE), "{turn}: {at:?}");
        }
        for at in looks(&others_blocks) {
            assert_eq!(
                (access(0, at), access(1, at)),
                (READ_WRITE, 0),
                "{turn}: nobody asked for it: {at:?}"
            );
        }
        if turn == "captured" {
            space.seal().unwrap();
            others.seal().unwrap();
        }
    }
    let bump = arena.open_bump_space().unwrap();
    let segment = bump.allocate(30 * MIB, Stream::LEGACY).unwrap();
    assert!(looks(&[(segment, 30 * MIB)]).all(|at| access(1, at) == READ_WRITE));
}

#[test]
fn peers_of_remote_blocks_have_nothing_else() {
    let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
    let options = Options { remote_peers: Peers::one(1), ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let (space, local) = capture(&arena);
    let remote: Vec<_> = [4096, 24 * MIB, 100 * 1024, 5 * MIB]
        .into_iter()
        .map(|bytes| (space.allocate_remote(bytes, Stream::LEGACY).unwrap(), bytes))
        .collect();
    let exclusive = (arena.allocate_exclusive(MIB, 0).unwrap(), MIB);
    let look = |turn: &str| {
        for at in looks(&remote).chain(looks(&[exclusive])) {
            assert_eq!((access(0, at), access(1, at)), (READ_WRITE, READ_WRITE), "{turn}: {at:?}");
        }
        for at in looks(&local) {
            assert_eq!((access(0, at), access(1, at)), (READ_WRITE, 0), "{turn}: {at:?}");
        }
    };
    look("captured");
    space.free(remote[1].0).unwrap();
    space.seal().unwrap();
    look("sealed");
    arena.pause(vmmgraph::pages::Fence::default()).unwrap();
    arena.resume(std::time::Duration::ZERO).unwrap();
    look("paused and resumed");
    let refused =
        SharedVmmAllocator::new(&device, &Options { remote_peers: Peers::one(5), ..Options::default() });
    assert!(matches!(refused.map(drop), Err(Error::InvalidArgument { what: "a peer", value: 5, .. })));
}

#[test]
fn a_peer_that_is_admitted_later_gets_what_is_there_and_what_comes() {
    let device = Device::with_driver(Arc::new(CudaDriver::new(1).unwrap()));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (space, blocks) = capture(&arena);
    assert!(looks(&blocks).all(|at| access(0, at) == 0));
    device.admit(Peers::one(0)).unwrap();
    assert!(looks(&blocks).all(|at| access(0, at) == READ_WRITE));
    space.seal().unwrap();
    let (_next, more) = capture(&arena);
    assert!(looks(&blocks).chain(looks(&more)).all(|at| access(0, at) == READ_WRITE));
}

#[test]
fn who_cannot_be_a_peer_is_refused_with_nothing_changed() {
    let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
    for (peers, first) in [(Peers::one(2), 2), (Peers::of_bits(u64::MAX), 2)] {
        let options = Options { peers, ..Options::default() };
        let refused = SharedVmmAllocator::new(&device, &options).map(drop).unwrap_err();
        assert!(
            matches!(refused, Error::InvalidArgument { what: "a peer", value, .. } if value == first),
            "{refused}"
        );
        assert!(matches!(device.admit(peers), Err(Error::InvalidArgument { .. })));
    }
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (_space, blocks) = capture(&arena);
    assert!(looks(&blocks).all(|at| access(1, at) == 0));
}

/// An undo maps pages as before, peers included.
#[test]
fn an_undone_seal_leaves_the_peers_their_access() {
    let peers = Peers::one(3).and(Peers::one(7));
    for failing in 1..200 {
        let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        let arena = SharedVmmAllocator::new(&device, &Options { peers, ..Options::default() }).unwrap();
        let (space, blocks) = capture(&arena);
        faulty.arm(&[failing]);
        let sealed = space.seal().is_ok();
        faulty.arm(&[]);
        for at in looks(&blocks) {
            assert_eq!(host.peers_at(at), peers, "{failing}: {at:?}");
        }
        if sealed {
            assert!(failing > 3, "a seal takes more calls than that");
            return;
        }
    }
    panic!("the seal never came to its end");
}

/// The running map has read the old peers, and `admit` grants mapped pages before it lists the
/// peer.
#[test]
fn a_peer_that_is_admitted_while_pages_are_mapped_has_them_too() {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let admitting = Arc::downgrade(&device);
    faulty.set_hook(Some(Arc::new(move |call| {
        if let ("map", Some(device)) = (call, admitting.upgrade()) {
            device.admit(Peers::one(5)).unwrap();
        }
    })));
    let space = arena.open_space().unwrap();
    let block = space.allocate(24 * MIB, Stream::LEGACY).unwrap();
    faulty.set_hook(None);
    assert!(looks(&[(block, 24 * MIB)]).all(|at| host.peers_at(at) == Peers::one(5)));
    // After a refused grant, later mappings still include the peer.
    faulty.arm(&[1]);
    assert!(matches!(device.admit(Peers::one(6)), Err(Error::Driver { call: "grant", .. })));
    faulty.arm(&[]);
    let more = space.allocate(48 * MIB, Stream::LEGACY).unwrap();
    assert!(looks(&[(more, 48 * MIB)]).all(|at| host.peers_at(at) == Peers::one(5).and(Peers::one(6))));
}

/// As above, of pages that come back with their arena.
#[test]
fn a_peer_that_is_admitted_while_an_arena_comes_back_has_its_pages_too() {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (space, blocks) = capture(&arena);
    space.seal().unwrap();
    arena.pause(vmmgraph::pages::Fence::default()).unwrap();
    let admitting = std::sync::Mutex::new(Some(Arc::downgrade(&device)));
    faulty.set_hook(Some(Arc::new(move |call| {
        // Once, as the first page is mapped: a later look would find it.
        if call == "map"
            && let Some(device) = admitting.lock().unwrap().take()
        {
            device.upgrade().unwrap().admit(Peers::one(5)).unwrap();
        }
    })));
    arena.resume(std::time::Duration::ZERO).unwrap();
    faulty.set_hook(None);
    assert!(looks(&blocks).all(|at| host.peers_at(at) == Peers::one(5)));
}

/// A small graph's addresses serve the next one. A remote block does not begin in addresses that
/// only local ones had.
#[test]
fn a_remote_block_has_its_peers_where_a_small_graph_was_before() {
    let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
    let options = Options { remote_peers: Peers::one(1), ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let space = arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    blocks.launch_by_replay_only(true);
    let passing = blocks.allocate(5 * MIB, Stream::LEGACY, false).unwrap();
    blocks.free(passing, &[]).unwrap();
    space.seal().unwrap();
    drop((blocks, space));
    let space = arena.open_space().unwrap();
    let remote = space.allocate_remote(5 * MIB, Stream::LEGACY).unwrap();
    assert!(looks(&[(remote, 5 * MIB)]).all(|at| access(1, at) == READ_WRITE));
    drop(space);
    // The control: a local one begins there.
    let space = arena.open_space().unwrap();
    assert_eq!(space.allocate(5 * MIB, Stream::LEGACY), Ok(passing));
}
