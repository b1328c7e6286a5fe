//! Uses an arena while a resume is still copying its contents.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use vmmgraph::driver::{HostDriver, Transfer};
use vmmgraph::pages::Fence;
use vmmgraph::{
    Borrower, Device, ElasticBuffer, ElasticOptions, HostOptions, Lease, Policy, Ready, RegionOptions,
    SharedVmmAllocator, Space,
};
use vmmgraph_testkit::{Delay, FaultyDriver, IdleBorrower, LateDriver, MIB, ReorderingDriver, seeds};

use super::world::{Block, KIB, STREAMS, World, arena_options};

const PAGE: u64 = 16 * KIB;
const NOW: Duration = Duration::ZERO;

fn world(seed: u64) -> (World, SharedVmmAllocator) {
    let options = HostOptions { granularity: 4096, memory_bytes: 16 * MIB };
    let late = ReorderingDriver::new(Arc::new(HostDriver::new(0, options).unwrap()), seed);
    let world = World::new(&late);
    let arena = SharedVmmAllocator::new(&world.device, &arena_options("")).unwrap();
    (world, arena)
}

impl World {
    fn is_right(&self, seed: u64) {
        self.late.drain();
        assert_eq!((self.late.failed(), self.wrong.load(Relaxed)), (vec![], 0), "seed {seed}");
    }
}

#[test]
fn what_goes_while_its_arena_is_paused_goes_behind_the_contents_that_come_back_for_it() {
    for seed in seeds(200) {
        let (world, arena) = world(seed);
        let space = arena.open_space().unwrap();
        let outputs = [0; 2].map(|_| space.allocate(PAGE, STREAMS[0]).unwrap());
        space.seal().unwrap();
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        (0..2).for_each(|_| world.late.launch(STREAMS[1], |_| ()));
        space.record_stream(outputs[0], STREAMS[1]).unwrap();
        drop(space);
        let ready = world.device.resume_async(&[], NOW).unwrap();
        while world.late.step() {
            world.device.give_back(NOW);
        }
        drop((ready, arena));
        world.is_right(seed);
    }
}

#[test]
fn contents_come_back_where_their_holder_has_them_though_a_replay_moves_pages_meanwhile() {
    for seed in seeds(20) {
        let (world, arena) = world(seed);
        let space = arena.open_space().unwrap();
        let passing = space.allocate(3 * PAGE, STREAMS[0]).unwrap();
        space.free(passing).unwrap();
        space.seal().unwrap();
        let scope = arena.eager_scope(STREAMS[0]).unwrap();
        let mut result = Block::new(scope.allocate(PAGE).unwrap(), PAGE);
        world.use_on(&mut result, STREAMS[0], Some(7));
        drop(scope);
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        let (_, mut ready) = world.device.resume_async(&[], NOW).unwrap();
        let moved = arena.eager_stats().graph_maps;
        space.replay(STREAMS[1], || ()).unwrap();
        assert!(arena.eager_stats().graph_maps > moved, "no page moved");
        ready.iter_mut().for_each(|ready| ready.before(STREAMS[0]).unwrap());
        world.use_on(&mut result, STREAMS[0], None);
        arena.eager_blocks().free(result.at, &[STREAMS[0]]).unwrap();
        drop((space, ready, arena));
        world.is_right(seed);
    }
}

#[test]
fn whoever_resumes_what_is_mapped_already_is_behind_its_contents_as_well() {
    for (seed, waits) in seeds(20).flat_map(|seed| [true, false].map(|waits| (seed, waits))) {
        let (world, arena) = world(seed);
        let options = RegionOptions { policy: Policy::Backup, page_bytes: PAGE, ..RegionOptions::default() };
        let region = world.device.region("weights", options).unwrap();
        let space = arena.open_space().unwrap();
        let places = [space.allocate_kept(PAGE, STREAMS[0]), region.allocate(PAGE, STREAMS[0])];
        space.seal().unwrap();
        let mut blocks = places.map(|at| Block::new(at.unwrap(), PAGE));
        blocks.iter_mut().for_each(|block| world.use_on(block, STREAMS[0], Some(5)));
        world.late.drain();
        world.device.pause(&[], Fence::default()).unwrap().complete().unwrap();
        // A resume by a different caller, not yet complete.
        let ready = world.device.resume_async(&[], NOW).unwrap();
        if waits {
            arena.resume(NOW).unwrap();
            region.resume(NOW).unwrap();
            world.device.resume(&[], NOW).unwrap();
        } else {
            let (report, mut again) = world.device.resume_async(&[], NOW).unwrap();
            assert_eq!(report.regions, 0);
            again.iter_mut().for_each(|again| again.before(STREAMS[1]).unwrap());
        }
        for block in &mut blocks {
            block.mark = None;
            world.use_on(block, STREAMS[1], None);
        }
        world.late.drain();
        drop((ready, space, arena, region));
        world.is_right(seed);
    }
}

struct Lent {
    world: World,
    lease: Lease,
    buffer: Arc<ElasticBuffer>,
    arena: SharedVmmAllocator,
    spaces: [Arc<Space>; 2],
    ready: Vec<Ready>,
}

impl Lent {
    fn new(seed: u64) -> Self {
        let (world, arena) = world(seed);
        let space = arena.open_space().unwrap();
        let output = space.allocate(PAGE, STREAMS[0]).unwrap();
        space.seal().unwrap();
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        // The page is shared from now on.
        space.free(output).unwrap();
        let (_, ready) = world.device.resume_async(&[], NOW).unwrap();
        let other = arena.open_space().unwrap();
        let passing = other.allocate(PAGE, STREAMS[0]).unwrap();
        other.free(passing).unwrap();
        other.seal().unwrap();
        let options = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
        let buffer = Arc::new(world.device.elastic_buffer(PAGE, &options).unwrap());
        let borrower: Arc<dyn Borrower> = Arc::new(IdleBorrower);
        let lease = arena.lend(&buffer, 0..PAGE, &borrower).unwrap();
        Self { world, lease, buffer, arena, spaces: [space, other], ready }
    }
}

#[test]
fn a_lease_begins_behind_contents_that_come_back_for_a_block_that_was_freed() {
    for seed in seeds(20) {
        let Lent { world, lease, buffer, arena, spaces, ready } = Lent::new(seed);
        let mut block = Block::new(buffer.base(), PAGE);
        lease.before(STREAMS[1]).unwrap();
        world.use_on(&mut block, STREAMS[1], Some(9));
        (0..30).for_each(|_| world.late.launch(STREAMS[1], |_| ()));
        world.use_on(&mut block, STREAMS[1], None);
        world.is_right(seed);
        drop((spaces, ready, lease, buffer, arena));
    }
}

/// The buffer owns the page while it is mapped, even if its unmap was delayed before.
#[test]
fn a_borrower_that_wants_a_page_again_keeps_it_though_contents_came_to_it_meanwhile() {
    for seed in seeds(20) {
        let Lent { world, lease, buffer, arena, spaces, ready } = Lent::new(seed);
        buffer.decommit(0..PAGE, &Fence::default()).unwrap();
        let again = buffer.commit(0..PAGE).unwrap();
        world.late.drain();
        world.device.trim().unwrap();
        assert_eq!((buffer.audit(), buffer.stats().committed_bytes), (Ok(()), PAGE), "seed {seed}");
        assert_eq!(lease.bytes(), again.revived * PAGE);
        drop((spaces, ready, lease, buffer, arena));
        world.is_right(seed);
    }
}

/// Backup and zero-fill still write a block freed during the pause.
#[test]
fn a_new_block_of_a_region_is_behind_what_comes_back_to_its_place() {
    for (seed, policy) in
        seeds(20).flat_map(|seed| [Policy::Backup, Policy::Zero].map(|policy| (seed, policy)))
    {
        let (world, arena) = world(seed);
        let options = RegionOptions { policy, page_bytes: PAGE, ..RegionOptions::default() };
        let region = world.device.region("weights", options).unwrap();
        let mut blocks = [0; 2].map(|_| Block::new(region.allocate(PAGE / 2, STREAMS[0]).unwrap(), PAGE / 2));
        blocks.iter_mut().for_each(|block| world.use_on(block, STREAMS[0], Some(1)));
        region.pause(Fence::default()).unwrap().complete().unwrap();
        region.free(blocks[0].at).unwrap();
        world.late.drain();
        assert_eq!(region.stats().free_bytes, PAGE / 2);
        let (_, ready) = world.device.resume_async(&[], NOW).unwrap();
        let mut block = Block::new(region.allocate(PAGE / 2, STREAMS[1]).unwrap(), PAGE / 2);
        assert_eq!(block.at, blocks[0].at);
        world.use_on(&mut block, STREAMS[1], Some(2));
        (0..10).for_each(|_| world.late.launch(STREAMS[1], |_| ()));
        world.use_on(&mut block, STREAMS[1], None);
        let mut other = Block::new(region.allocate(PAGE, STREAMS[2]).unwrap(), PAGE);
        world.use_on(&mut other, STREAMS[2], Some(3));
        world.is_right(seed);
        drop((arena, region, ready));
    }
}

/// The backup must contain the restored bytes.
#[test]
fn a_pause_of_a_region_is_behind_the_contents_that_come_back() {
    for seed in seeds(20) {
        let (world, arena) = world(seed);
        let options = RegionOptions { policy: Policy::Backup, page_bytes: PAGE, ..RegionOptions::default() };
        let region = world.device.region("weights", options).unwrap();
        let mut blocks = [0; 3].map(|_| Block::new(region.allocate(PAGE, STREAMS[0]).unwrap(), PAGE));
        blocks.iter_mut().for_each(|block| world.use_on(block, STREAMS[0], Some(7)));
        region.pause(Fence::default()).unwrap().complete().unwrap();
        let (_, ready) = world.device.resume_async(&[], NOW).unwrap();
        region.pause(Fence::default()).unwrap().complete().unwrap();
        region.resume(NOW).unwrap();
        for block in &mut blocks {
            block.mark = None;
            world.use_on(block, STREAMS[1], None);
        }
        world.is_right(seed);
        drop((arena, region, ready));
    }
}

#[test]
fn a_new_kept_block_is_behind_what_comes_back_to_its_place() {
    for seed in seeds(20) {
        let (world, arena) = world(seed);
        let graphs = [0; 2].map(|_| {
            let space = arena.open_space().unwrap();
            let mut output = Block::new(space.allocate_kept(KIB, STREAMS[0]).unwrap(), KIB);
            space.seal().unwrap();
            world.use_on(&mut output, STREAMS[0], Some(1));
            (space, output.at)
        });
        world.late.drain();
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        let [(gone, place), (stays, _)] = graphs;
        gone.free(place).unwrap();
        drop(gone);
        let (_, ready) = world.device.resume_async(&[], NOW).unwrap();
        let space = arena.open_space().unwrap();
        let mut block = Block::new(space.allocate_kept(KIB, STREAMS[1]).unwrap(), KIB);
        assert_eq!(block.at, place);
        world.use_on(&mut block, STREAMS[1], Some(2));
        (0..10).for_each(|_| world.late.launch(STREAMS[1], |_| ()));
        world.use_on(&mut block, STREAMS[1], None);
        world.is_right(seed);
        drop((space, stays, arena, ready));
    }
}

#[test]
fn a_new_block_for_a_capture_finds_what_came_back_there() {
    let host = HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: 16 * MIB }).unwrap();
    let faulty = FaultyDriver::new(Arc::new(LateDriver::new(Arc::new(host), Delay::Right)));
    let device = Device::with_driver(faulty.clone());
    let options = RegionOptions { policy: Policy::Backup, page_bytes: PAGE, ..RegionOptions::default() };
    let region = device.region("weights", options).unwrap();
    let [gone, _stays] = [0; 2].map(|_| region.allocate(PAGE / 2, STREAMS[0]).unwrap());
    region.pause(Fence::default()).unwrap().complete().unwrap();
    region.free(gone).unwrap();
    while region.stats().free_bytes == 0 {}
    let (_, mut ready) = device.resume_async(&[], NOW).unwrap();
    // A captured stream accepts no wait.
    faulty.set_capturing(STREAMS[1], true);
    assert_eq!(region.allocate(PAGE / 2, STREAMS[1]).unwrap(), gone);
    let (written, mut found) = ([9_u8; PAGE as usize / 2], [0; PAGE as usize / 2]);
    // SAFETY: a live block without running work.
    unsafe { faulty.write(gone, &written) }.unwrap();
    ready[0].wait().unwrap();
    // SAFETY: as above.
    unsafe { faulty.read(gone, &mut found) }.unwrap();
    assert!(found == written, "what came back is there instead");
    assert_eq!(faulty.broken_captures(), Vec::<String>::new());
    faulty.set_capturing(STREAMS[1], false);
}
