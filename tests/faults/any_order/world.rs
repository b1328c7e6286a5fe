//! Work on late streams in any order that events allow, and blocks with known contents.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vmmgraph::driver::SharedDriver;
use vmmgraph::pages::{Events, Mark};
use vmmgraph::{
    Address, Device, EagerScope, Error, Options, Result, SharedVmmAllocator, Space, Stream, VmmTorchAllocator,
};
use vmmgraph_testkit::{FaultyDriver, Random, ReorderingDriver, stream};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const STREAMS: [Stream; 3] = [stream(0xa0), stream(0xb0), stream(0xd0)];

/// Small pages: little memory gives many pages.
pub(crate) fn arena_options(tag: &str) -> Options {
    Options { small_page_bytes: 4096, large_page_bytes: 16 * KIB, tag: tag.to_owned(), ..Options::default() }
}

pub(crate) struct Block {
    pub(crate) at: Address,
    pub(crate) bytes: u64,
    /// Contents after all submitted work; `None`: undefined.
    pub(crate) byte: Option<u8>,
    /// Completion of all submitted work.
    pub(crate) mark: Option<Mark>,
}

impl Block {
    pub(crate) fn new(at: Address, bytes: u64) -> Self {
        Self { at, bytes, byte: None, mark: None }
    }
}

pub(crate) struct Graph {
    pub(crate) space: Arc<Space>,
    pub(crate) passing: Vec<(Address, u64)>,
    pub(crate) output: Block,
    /// True if the output is freed; the graph still writes it.
    pub(crate) freed: bool,
}

pub(crate) struct World {
    pub(crate) late: Arc<ReorderingDriver>,
    pub(crate) device: Arc<Device>,
    events: Arc<Events>,
    /// Number of checks with wrong bytes, and of work on freed memory.
    pub(crate) wrong: Arc<AtomicU64>,
    pub(crate) beside: Beside,
    pub(crate) streams: Vec<Stream>,
    /// True if [`STREAMS`] are shared with other programs.
    pub(crate) shared: bool,
    /// The stream under capture; the program uses the rest.
    pub(crate) captured: Option<Stream>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    Nothing,
    Refusals,
    Captures,
    /// Half of the work is on default streams of several contexts.
    Contexts,
}

impl World {
    pub(crate) fn new(late: &Arc<ReorderingDriver>) -> Self {
        Self::over(late, late.clone(), Beside::Nothing)
    }

    pub(crate) fn over(late: &Arc<ReorderingDriver>, driver: SharedDriver, beside: Beside) -> Self {
        let (own, device): (SharedDriver, _) = (late.clone(), Device::with_driver(driver));
        let mut streams = STREAMS.to_vec();
        if beside == Beside::Contexts {
            streams.extend([Stream::LEGACY; 3]);
        }
        let events = Events::new(&own);
        Self {
            late: late.clone(),
            device,
            events,
            wrong: Arc::default(),
            beside,
            streams,
            shared: false,
            captured: None,
        }
    }

    /// Returns the world of a second program on the same device.
    pub(crate) fn again(&self) -> Self {
        let (late, device) = (self.late.clone(), self.device.clone());
        let (events, wrong) = (self.events.clone(), self.wrong.clone());
        Self {
            late,
            device,
            events,
            wrong,
            beside: self.beside,
            streams: self.streams.clone(),
            shared: self.shared,
            captured: None,
        }
    }

    pub(crate) fn stream(&mut self, random: &mut Random) -> Stream {
        if self.captured.is_some() && random.below(8) == 0 {
            self.end_capture();
        }
        let stream = random.choose(&self.streams);
        // The legacy stream of a random context.
        ReorderingDriver::make_current(if stream == Stream::LEGACY { random.below(3) } else { 0 });
        if Some(stream) == self.captured { STREAMS[usize::from(stream == STREAMS[0])] } else { stream }
    }

    pub(crate) fn may_be_captured(&mut self, stream: Stream, random: &mut Random) {
        let others = self.shared && stream != Stream::PER_THREAD;
        if self.beside == Beside::Captures && !others && self.captured.is_none() && random.below(3) == 0 {
            if random.below(2) == 0 {
                drop(self.device.mark(stream));
            }
            self.late.set_captured(stream, true);
            self.captured = Some(stream);
        }
    }

    pub(crate) fn end_capture(&mut self) {
        if let Some(stream) = self.captured.take() {
            self.late.set_captured(stream, false);
        }
    }

    /// Runs `work` in each context: a refused record on a context's default stream can be repeated
    /// only there.
    pub(crate) fn in_each_context(&self, mut work: impl FnMut()) {
        if self.beside == Beside::Refusals {
            for context in [1, 2, 0] {
                let before = ReorderingDriver::make_current(context);
                work();
                ReorderingDriver::make_current(before);
            }
        }
    }

    /// Frees everything; returns the number of wrong checks.
    pub(crate) fn end(mut self) -> u64 {
        ReorderingDriver::make_current(0);
        self.late.drain();
        self.end_capture();
        self.in_each_context(|| drop(self.device.trim()));
        self.device.trim().unwrap();
        self.device.host_pool().trim().unwrap();
        assert_eq!((self.late.failed(), self.device.pool().audit_idle()), (vec![], Ok(())));
        self.wrong.load(Relaxed)
    }

    fn write(&self, at: Address, bytes: u64, byte: u8, stream: Stream) {
        let wrong = Arc::clone(&self.wrong);
        self.late.launch(stream, move |driver| {
            // SAFETY: a live block.
            let written = unsafe { driver.write(at, &vec![byte; bytes as usize]) };
            wrong.fetch_add(u64::from(written.is_err()), Relaxed);
        });
    }

    fn check(&self, at: Address, bytes: u64, byte: u8, stream: Stream) {
        let wrong = Arc::clone(&self.wrong);
        self.late.launch(stream, move |driver| {
            let mut found = vec![0; bytes as usize];
            // SAFETY: a live block.
            let read = unsafe { driver.read(at, &mut found) };
            let other = found.iter().any(|found| *found != byte);
            wrong.fetch_add(u64::from(read.is_err() || other), Relaxed);
        });
    }

    /// Checks and writes a block after its last use, as a program must.
    pub(crate) fn use_on(&self, block: &mut Block, stream: Stream, byte: Option<u8>) {
        if let Some(mark) = &block.mark {
            mark.before(stream).unwrap();
        }
        if let Some(byte) = block.byte {
            self.check(block.at, block.bytes, byte, stream);
        }
        if let Some(byte) = byte {
            self.write(block.at, block.bytes, byte, stream);
            block.byte = Some(byte);
        }
        block.mark = Some(self.events.record(stream).unwrap());
    }

    pub(crate) fn capture(&self, arena: &SharedVmmAllocator, random: &mut Random) -> Result<Graph> {
        let bump = random.below(4) == 0;
        let space = if bump { arena.open_bump_space()? } else { arena.open_space()? };
        let stream = STREAMS[0];
        if !bump && random.below(2) == 0 {
            VmmTorchAllocator::new(&space).predict_retained();
        }
        let mut passing = Vec::new();
        for bytes in [random.choose(&[40, 70, 100]) * KIB, 3 * KIB] {
            passing.push((space.allocate(bytes, stream)?, bytes));
        }
        VmmTorchAllocator::new(&space).launch_by_replay_only(passing[0].1 > 40 * KIB);
        let bytes = random.choose(&[2, 20]) * KIB;
        // In a bump space, live-out blocks that are not persistent share pages.
        let kept = bump || random.below(3) == 0;
        let output =
            if kept { space.allocate_kept(bytes, stream)? } else { space.allocate(bytes, stream)? };
        passing.iter().for_each(|(at, _)| space.free(*at).unwrap());
        space.seal()?;
        Ok(Graph { space, passing, output: Block::new(output, bytes), freed: false })
    }

    pub(crate) fn replay(&self, graph: &mut Graph, stream: Stream, byte: u8) -> Result<()> {
        if let Some(mark) = &graph.output.mark {
            mark.before(stream).unwrap();
        }
        let launch = || {
            if let Some(byte) = graph.output.byte {
                self.check(graph.output.at, graph.output.bytes, byte, stream);
            }
            for (at, bytes) in &graph.passing {
                self.write(*at, *bytes, byte, stream);
            }
            for (at, bytes) in &graph.passing {
                self.check(*at, *bytes, byte, stream);
            }
            self.write(graph.output.at, graph.output.bytes, byte, stream);
        };
        graph.space.replay(stream, launch)?;
        graph.output.byte = (!graph.freed).then_some(byte);
        graph.output.mark = Some(self.events.record(stream).unwrap());
        Ok(())
    }

    /// Runs eager work in its scope. Most blocks are freed; returns the rest.
    pub(crate) fn eager(
        &self,
        scope: &EagerScope,
        random: &mut Random,
        stream: Stream,
        byte: u8,
    ) -> Result<Vec<Block>> {
        let mut blocks = Vec::new();
        for _ in 0..=random.below(3) {
            let bytes = random.choose(&[1, 9, 40, 90]) * KIB;
            let mut block = match scope.allocate(bytes) {
                Ok(at) => Block::new(at, bytes),
                Err(error) => {
                    blocks.iter().for_each(|block: &Block| scope.free(block.at).unwrap());
                    return Err(error);
                }
            };
            self.use_on(&mut block, stream, Some(byte));
            if random.below(3) == 0 {
                self.use_on(&mut block, stream, None);
                scope.free(block.at).unwrap();
            } else {
                blocks.push(block);
            }
        }
        let stays = random.below(3) as usize;
        for mut block in blocks.drain(stays.min(blocks.len())..) {
            self.use_on(&mut block, stream, None);
            scope.free(block.at).unwrap();
        }
        Ok(blocks)
    }
}

/// Returns the value, or `None` if memory is short: the program continues.
pub(crate) fn done<T>(result: vmmgraph::Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(
            Error::OutOfMemory { .. }
            | Error::OverBudget { .. }
            | Error::Lent { .. }
            | Error::WrongState { .. }
            | Error::InvalidArgument { .. }
            | Error::StreamCapturing { .. }
            | Error::HostNotRegistered { .. },
        ) => None,
        Err(Error::Driver { name, .. }) if name == "planted" || name.contains(" refused") => None,
        Err(error) => panic!("{error}"),
    }
}

/// Failing driver calls, until dropped.
pub(crate) struct Refused(Arc<FaultyDriver>, Option<&'static str>);

impl Refused {
    /// Now and then: fails every call of one memory function, or two calls of any function.
    pub(crate) fn some(beside: Beside, faulty: &Arc<FaultyDriver>, random: &mut Random) -> Option<Self> {
        const CALLS: [&str; 6] = ["create", "release", "reserve", "free_addresses", "map", "unmap"];
        (beside == Beside::Refusals && random.below(4) == 0).then(|| {
            let call = (random.below(2) == 0).then(|| random.choose(&CALLS));
            match call {
                Some(call) => faulty.refuse(call, true),
                None => faulty.arm(&[1 + random.below(8), 1 + random.below(24)]),
            }
            Self(faulty.clone(), call)
        })
    }
}

impl Drop for Refused {
    fn drop(&mut self) {
        match self.1 {
            Some(call) => self.0.refuse(call, false),
            None => self.0.arm(&[]),
        }
    }
}
