//! Peer-visible blocks: pages exported during a capture stay the same after its seal. `export`
//! simulates the peer.

use std::collections::HashSet;
use std::sync::Arc;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::pages::PageId;
use vmmgraph::{
    Address, Device, Error, Handles, HostOptions, Options, RetainPolicy, SharedVmmAllocator, Space, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{MIB, Stamps, stream};

const A: Stream = Stream::LEGACY;
const B: Stream = stream(0xb0);
const PAGE: u64 = 16 * MIB;
const KIB: u64 = 1 << 10;

struct Bench {
    host: Arc<HostDriver>,
    device: Arc<Device>,
    arena: SharedVmmAllocator,
}

fn bench() -> Bench {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap().with_sharing(Handles::Fd));
    let device = Device::with_driver(host.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    Bench { host, device, arena }
}

impl Bench {
    fn open(&self) -> Arc<Space> {
        self.arena.open_space().unwrap()
    }

    fn stamps(&self) -> Stamps {
        let driver: SharedDriver = self.host.clone();
        Stamps::new(&driver, A)
    }

    fn end(self) {
        assert_eq!(self.arena.audit(), Ok(()));
        drop(self.arena);
        self.device.trim().unwrap();
        assert_eq!(self.device.pool().audit_idle(), Ok(()));
        assert_eq!(self.device.stats().physical_bytes, 0);
        drop(self.device);
        assert_eq!(self.host.leftovers(), [0; 4]);
    }
}

fn pages(space: &Space, at: Address, bytes: u64) -> Vec<PageId> {
    space.export(at, bytes).unwrap().iter().map(|extent| extent.page).collect()
}

fn stays(bench: &Bench, bytes: u64, remote: bool, policy: RetainPolicy) -> bool {
    let space = bench.open();
    let buffer = if remote { space.allocate_remote(bytes, A) } else { space.allocate(bytes, A) }.unwrap();
    let output = space.allocate(bytes, A).unwrap();
    let before = pages(&space, buffer, bytes);
    space.free(buffer).unwrap();
    let report = space.seal_with(policy).unwrap();
    assert_eq!((report.retained.len(), report.retained[0].address), (1, output.0));
    assert_eq!((report.remote_blocks, report.remote_bytes), (0, 0));
    assert_eq!(bench.arena.audit(), Ok(()));
    pages(&space, buffer, bytes) == before
}

#[test]
fn beside_a_retained_block_a_remote_ones_page_is_the_same_after_the_seal_and_anothers_is_not() {
    for bytes in [4 * KIB, 256 * KIB, 512 * KIB, 5 * MIB] {
        let bench = bench();
        // Otherwise pages of this space alone would become private without a move.
        let another = bench.open();
        let theirs = [another.allocate(4 * KIB, A).unwrap(), another.allocate(5 * MIB, A).unwrap()];
        for policy in [RetainPolicy::Retain, RetainPolicy::ShareRemote] {
            assert!(stays(&bench, bytes, true, policy), "{bytes} {policy:?}");
            assert!(!stays(&bench, bytes, false, policy), "the control shows nothing: {bytes} {policy:?}");
        }
        assert!(stays(&bench, bytes, false, RetainPolicy::Share));
        theirs.into_iter().for_each(|block| another.free(block).unwrap());
        drop(another);
        bench.end();
    }
}

#[test]
fn it_lies_on_one_page_or_on_whole_ones_and_beside_its_like_only() {
    let bench = bench();
    let space = bench.open();
    let local: Vec<_> =
        [3 * MIB, 20 * MIB, 4 * KIB].map(|bytes| (space.allocate(bytes, A).unwrap(), bytes)).into();
    // A local block may begin at the free end of a page.
    let over = space.export(local[1].0, local[1].1).unwrap();
    assert!(over[0].offset > 0 && over.len() == 2, "the control lies over no seam");
    let mut seen = HashSet::new();
    seen.extend(local.iter().flat_map(|(at, bytes)| pages(&space, *at, *bytes)));
    let mut remote = Vec::new();
    for bytes in [12 * MIB, 15 * MIB, PAGE, 3 * MIB, 4 * KIB, 17 * MIB, 40 * MIB] {
        let at = space.allocate_remote(bytes, A).unwrap();
        let extents = space.export(at, bytes).unwrap();
        assert!(bytes > PAGE || extents.len() == 1, "{bytes} over a seam");
        if bytes > PAGE {
            assert!(extents.iter().all(|extent| extent.offset == 0), "{bytes} not on whole pages");
            let end = at.plus(bytes.next_multiple_of(PAGE) - 512);
            assert_eq!(space.export(end, 512).unwrap()[0].page, extents.last().unwrap().page);
        }
        remote.push((at, extents.iter().map(|extent| extent.page).collect::<HashSet<_>>()));
    }
    let theirs = space.allocate_remote(MIB, B).unwrap();
    let of_b: HashSet<PageId> = pages(&space, theirs, MIB).into_iter().collect();
    for (_, pages) in &remote {
        assert!(pages.is_disjoint(&seen) && pages.is_disjoint(&of_b), "beside a block of another lane");
    }
    let stats = space.stats();
    let (first, pages_of_first) = &remote[0];
    space.free(*first).unwrap();
    let again = space.allocate_remote(12 * MIB, A).unwrap();
    assert_eq!(again, *first);
    assert_eq!(space.stats().maps, stats.maps);
    space.free(again).unwrap();
    let beside = space.allocate(12 * MIB, A).unwrap();
    assert!(pages(&space, beside, 12 * MIB).iter().all(|page| !pages_of_first.contains(page)));
    drop(space);

    let bump = bench.arena.open_bump_space().unwrap();
    let refused = bump.allocate_remote(MIB, A);
    assert!(
        matches!(refused, Err(Error::WrongState { ref sentence }) if sentence.contains("bump space")),
        "{refused:?}"
    );
    drop(bump);
    bench.end();
}

#[test]
fn torchs_tensors_can_be_remote_too() {
    let bench = bench();
    let space = bench.open();
    let tensors = VmmTorchAllocator::new(&space);
    assert!(tensors.is_shareable());
    let buffer = tensors.allocate_remote(5 * MIB, A).unwrap();
    let output = tensors.allocate(5 * MIB, A, false).unwrap();
    let before = pages(&space, buffer, 5 * MIB);
    tensors.free(buffer, &[A]).unwrap();
    let report = space.seal().unwrap();
    assert_eq!((report.retained[0].address, report.remote_blocks), (output.0, 0));
    assert_eq!(pages(&space, buffer, 5 * MIB), before);
    drop((tensors, space));
    bench.end();

    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    assert!(!VmmTorchAllocator::new(&space).is_shareable());
}

#[test]
fn graphs_share_its_page_as_any_other() {
    let bench = bench();
    let capture = |remote: bool| {
        let space = bench.open();
        let block =
            if remote { space.allocate_remote(8 * MIB, A) } else { space.allocate(8 * MIB, A) }.unwrap();
        let page = pages(&space, block, 8 * MIB);
        space.free(block).unwrap();
        let report = space.seal().unwrap();
        (space, page, report.layout_hash)
    };
    let graphs = [capture(true), capture(false), capture(true)];
    assert!(graphs.iter().all(|(_, page, _)| *page == graphs[0].1));
    assert_eq!(bench.arena.mapped_size(), PAGE);
    // The layout hash shows different marks on ranks.
    assert_eq!(graphs[0].2, graphs[2].2);
    assert_ne!(graphs[0].2, graphs[1].2);
    drop(graphs);
    bench.end();
}

#[test]
fn one_that_is_live_at_the_seal_is_named_and_moves_or_stays_as_the_policy_says() {
    for (policy, moves) in
        [(RetainPolicy::Retain, true), (RetainPolicy::Share, false), (RetainPolicy::ShareRemote, false)]
    {
        let bench = bench();
        let another = bench.open();
        another.free(another.allocate_remote(5 * MIB, A).unwrap()).unwrap();
        another.seal().unwrap();
        let space = bench.open();
        let result = space.allocate_remote(3 * MIB, A).unwrap();
        let small = space.allocate_remote(600, A).unwrap();
        let output = space.allocate(MIB, A).unwrap();
        let before = pages(&space, result, 3 * MIB);
        let report = space.seal_with(policy).unwrap();
        assert_eq!((report.remote_blocks, report.remote_bytes), (2, 3 * MIB + KIB), "{policy:?}");
        assert_eq!(report.retained.len(), 3);
        assert_eq!(pages(&space, result, 3 * MIB) != before, moves, "{policy:?}");
        // The local block has private bytes unless all are shared.
        assert_eq!(report.retained_bytes > 0, policy != RetainPolicy::Share);
        assert_eq!(bench.arena.audit(), Ok(()));
        [small, output, result].into_iter().for_each(|block| space.free(block).unwrap());
        drop((space, another));
        bench.end();
    }
}

#[test]
fn a_seal_that_would_move_one_that_a_peer_has_is_refused_and_one_that_does_not_is_not() {
    let bench = bench();
    let another = bench.open();
    another.free(another.allocate_remote(5 * MIB, A).unwrap()).unwrap();
    another.seal().unwrap();
    let space = bench.open();
    let result = space.allocate_remote(3 * MIB, A).unwrap();
    let page = pages(&space, result, 3 * MIB)[0];
    let exported = bench.device.export_page(page).unwrap();
    assert_eq!(space.seal(), Err(Error::Exported { pages: vec![page.number()] }));
    let report = space.seal_with(RetainPolicy::ShareRemote).unwrap();
    assert_eq!((report.remote_blocks, pages(&space, result, 3 * MIB)), (1, vec![page]));
    drop((exported, space, another));
    bench.end();
}

#[test]
fn after_the_seal_neither_eager_work_nor_a_lease_takes_its_page() {
    // Without the mark, eager work takes the page, and the next replay writes a different one.
    for remote in [true, false] {
        let bench = bench();
        let stamps = bench.stamps();
        let space = bench.open();
        let block =
            if remote { space.allocate_remote(8 * MIB, A) } else { space.allocate(8 * MIB, A) }.unwrap();
        space.free(block).unwrap();
        let lendable = bench.arena.lendable_bytes();
        space.seal().unwrap();
        let before = pages(&space, block, 8 * MIB);
        assert_eq!(lendable, PAGE);
        assert_eq!(bench.arena.lendable_bytes(), if remote { 0 } else { PAGE });
        let scope = bench.arena.eager_scope(A).unwrap();
        let result = scope.allocate(8 * MIB).unwrap();
        stamps.write(result, 8 * MIB, 5).unwrap();
        drop(scope);
        space.replay(A, || stamps.write(block, 8 * MIB, 6)).unwrap().unwrap();
        assert!(stamps.holds(result, 8 * MIB, 5).unwrap());
        assert_eq!(pages(&space, block, 8 * MIB) == before, remote);
        bench.arena.eager_blocks().free(result, &[]).unwrap();
        drop((space, stamps));
        bench.end();
    }
}

#[test]
fn a_seal_while_eager_work_may_take_its_page_is_refused_and_can_be_repeated() {
    let bench = bench();
    let space = bench.open();
    space.free(space.allocate_remote(8 * MIB, A).unwrap()).unwrap();
    let scope = bench.arena.eager_scope(B).unwrap();
    for policy in [RetainPolicy::Retain, RetainPolicy::Share] {
        let refused = space.seal_with(policy);
        assert!(
            matches!(refused, Err(Error::WrongState { ref sentence }) if sentence.contains("the arena")),
            "{refused:?}"
        );
    }
    drop(scope);
    space.seal().unwrap();
    drop(space);
    bench.end();
}

#[test]
fn fillers_that_come_beside_a_live_one_stay_too() {
    let bench = bench();
    let (stamps, another) = (bench.stamps(), bench.open());
    another.free(another.allocate_remote(12 * MIB, A).unwrap()).unwrap();
    another.seal().unwrap();
    let space = bench.open();
    let passing = space.allocate_remote(6 * MIB, A).unwrap();
    space.allocate_remote(2 * MIB, A).unwrap();
    space.free(passing).unwrap();
    let report = space.seal().unwrap();
    assert_eq!(report.remote_blocks, 1);
    let before = pages(&space, passing, 6 * MIB);
    for bytes in [2 * MIB, 200 * KIB, 200 * KIB] {
        let scope = bench.arena.eager_scope(A).unwrap();
        let result = scope.allocate(bytes).unwrap();
        stamps.write(result, bytes, 5).unwrap();
    }
    space.replay(A, || ()).unwrap();
    assert_eq!(pages(&space, passing, 6 * MIB), before);
    drop((space, another, stamps));
    bench.end();
}
