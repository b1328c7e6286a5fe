//! Workspaces of graphs of many arenas: they share pages while one stream orders their replays.

use std::sync::Arc;

use vmmgraph::driver::HostDriver;
use vmmgraph::{HostOptions, SharedVmmAllocator, VmmTorchAllocator, Workspace};
use vmmgraph_testkit::{FaultyDriver, MIB, Random, ReorderingDriver, seeds};

use super::world::{Beside, Block, Graph, KIB, Refused, STREAMS, World, arena_options, done};

struct One {
    arena: SharedVmmAllocator,
    graph: Graph,
    blocks: VmmTorchAllocator,
    workspace: Workspace,
}

struct Program {
    world: World,
    all: Vec<One>,
    random: Random,
}

impl Program {
    fn capture(&mut self) -> vmmgraph::Result<()> {
        let arena = SharedVmmAllocator::new(&self.world.device, &arena_options(""))?;
        let graph = self.world.capture(&arena, &mut self.random)?;
        let blocks = VmmTorchAllocator::new(&graph.space);
        let workspace = blocks.workspace(self.random.choose(&[5, 8, 12]) * KIB)?;
        self.all.push(One { arena, graph, blocks, workspace });
        Ok(())
    }

    fn replay(&mut self, number: u8) {
        let anywhere = self.random.below(12) == 0;
        let home = STREAMS[self.random.below(2) as usize];
        let Self { world, all, random } = self;
        let chosen = random.below(all.len() as u64) as usize;
        let One { graph, blocks, workspace, .. } = &mut all[chosen];
        let stays = world.beside != Beside::Contexts && random.below(4) > 0 && world.captured != Some(home);
        let stream = if stays { home } else { world.stream(random) };
        let mut used = Block::new(workspace.address(), workspace.bytes());
        let space = Arc::clone(&graph.space);
        let given = space.replay(stream, || {
            blocks.use_workspace(workspace, (!anywhere).then_some(stream))?;
            world.use_on(&mut used, stream, Some(number));
            world.use_on(&mut used, stream, None);
            Ok(())
        });
        if done(given.and_then(|result: vmmgraph::Result<()>| result)).is_some() {
            done(world.replay(graph, stream, number));
        }
        world.may_be_captured(stream, random);
    }

    fn step(&mut self, number: u8) {
        let count = self.all.len() as u64;
        match self.random.below(20) {
            0..3 if count < 6 => drop(done(self.capture())),
            3 if count > 1 => {
                let One { arena, graph, blocks, workspace } =
                    self.all.swap_remove(self.random.below(count) as usize);
                blocks.leave_workspace(&workspace);
                drop((workspace, blocks, graph, arena));
            }
            4 if count > 0 => drop(self.all[self.random.below(count) as usize].workspace.keep()),
            5 => drop(done(self.world.device.trim())),
            6 => self.world.late.drain(),
            _ if count > 0 => self.replay(number),
            _ => {}
        }
    }
}

/// Returns the number of wrong checks.
fn run(seed: u64, beside: Beside) -> u64 {
    let options = HostOptions { granularity: 4096, memory_bytes: 256 * MIB };
    let late = ReorderingDriver::new(Arc::new(HostDriver::new(0, options).unwrap()), seed);
    let faulty = FaultyDriver::new(late.clone());
    let world = World::over(&late, faulty.clone(), beside);
    let mut program = Program { world, all: Vec::new(), random: Random::new(seed) };
    for number in 0..160 {
        let refused = Refused::some(beside, &faulty, &mut program.random);
        program.step(number);
        drop(refused);
        assert_eq!(program.world.device.pool().audit(), Ok(()), "seed {seed}");
    }
    let Program { mut world, all, .. } = program;
    world.end_capture();
    for One { arena, graph, blocks, workspace } in all {
        blocks.leave_workspace(&workspace);
        drop((workspace, blocks, graph, arena));
    }
    world.end()
}

#[test]
fn those_of_one_stream_share_a_page_and_no_others() {
    for seed in seeds(120) {
        assert_eq!(run(seed, Beside::Nothing), 0, "seed {seed}");
    }
}

#[test]
fn the_same_while_the_driver_refuses_calls_now_and_then() {
    for seed in seeds(120) {
        assert_eq!(run(seed, Beside::Refusals), 0, "seed {seed}");
    }
}

#[test]
fn the_same_while_streams_are_captured_now_and_then() {
    for seed in seeds(120) {
        assert_eq!(run(seed, Beside::Captures), 0, "seed {seed}");
    }
}

#[test]
fn the_same_on_default_streams_of_several_contexts() {
    for seed in seeds(120) {
        assert_eq!(run(seed, Beside::Contexts), 0, "seed {seed}");
    }
}
