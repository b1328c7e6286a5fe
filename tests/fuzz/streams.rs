//! Any valid use of streams keeps replays ordered, captures intact and memory mapped, on a driver
//! with asynchronous streams.
//!
//! The driver models streams as lists of work, with reused handles, default streams of threads and
//! contexts, and captures. Checks: a replay follows every earlier one of its arena; no capture
//! breaks; no memory is unmapped under running work; a side stream's block keeps its contents
//! during the read.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use crate::input::Input;
use parking_lot::Mutex;
use vmmgraph::driver::{
    Capabilities, DeviceInfo, Driver, Event, HostDriver, Memory, NotMapped, PageHandle, StreamState,
    Timeline, Transfer, Whole,
};
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, Peers, Result, SharedVmmAllocator, Space, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::alone;

const KIB: u64 = 1 << 10;
const SIZES: [u64; 6] = [512, 3000, 9000, 16 * KIB, 40 * KIB, 100 * KIB];

#[derive(Clone, Debug)]
struct Work {
    parts: Vec<(u64, u64)>,
    over: bool,
}

/// A stream, independent of its handle.
#[derive(Clone, Debug, Default)]
struct Queue {
    /// All work of the stream and all work it waits for.
    behind: BTreeSet<usize>,
    capturing: bool,
}

#[derive(Default)]
struct Timelines {
    work: Vec<Work>,
    queues: Vec<Queue>,
    handles: BTreeMap<u64, usize>,
    events: BTreeMap<u64, BTreeSet<usize>>,
    wrong: Vec<String>,
}

thread_local! {
    static CONTEXT: Cell<u64> = const { Cell::new(0) };
}

fn in_context<T>(context: u64, work: impl FnOnce() -> T) -> T {
    struct Back(u64);
    impl Drop for Back {
        fn drop(&mut self) {
            CONTEXT.set(self.0);
        }
    }
    let _back = Back(CONTEXT.replace(context));
    work()
}

impl Timelines {
    fn queue(&mut self, stream: Stream) -> &mut Queue {
        // Each thread and each context has its own default stream.
        let mut key = stream.raw();
        if stream.is_default() {
            key |= CONTEXT.get() << 50;
        }
        if stream == Stream::PER_THREAD {
            let thread = format!("{:?}", std::thread::current().id());
            let digits: String = thread.chars().filter(char::is_ascii_digit).collect();
            key |= 1 << 40 | digits.parse::<u64>().unwrap() << 8;
        }
        let new = self.queues.len();
        let index = *self.handles.entry(key).or_insert(new);
        if index == new {
            self.queues.push(Queue::default());
        }
        &mut self.queues[index]
    }

    fn touch(&mut self, what: &str, stream: Stream) {
        if self.queue(stream).capturing {
            self.wrong.push(format!("{what} broke the capture of {stream:?}"));
        }
    }

    fn launch(&mut self, stream: Stream, parts: Vec<(u64, u64)>) -> usize {
        self.touch("a launch", stream);
        let number = self.work.len();
        self.work.push(Work { parts, over: false });
        self.queue(stream).behind.insert(number);
        number
    }

    fn over(&self, behind: &BTreeSet<usize>) -> bool {
        behind.iter().all(|work| self.work[*work].over)
    }
}

struct Player {
    host: HostDriver,
    lines: Mutex<Timelines>,
}

impl fmt::Debug for Player {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Player").finish_non_exhaustive()
    }
}

impl Driver for Player {
    fn info(&self) -> &DeviceInfo {
        self.host.info()
    }
    fn capabilities(&self) -> &Capabilities {
        self.host.capabilities()
    }
}

// SAFETY: the host driver does the work under the callers' contracts.
unsafe impl Memory for Player {
    fn free_bytes(&self) -> Result<u64> {
        self.host.free_bytes()
    }
    fn reserve(&self, len: u64) -> Result<Address> {
        self.host.reserve(len)
    }
    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.free_addresses(base, len) }
    }
    fn create(&self, len: u64) -> Result<PageHandle> {
        self.host.create(len)
    }
    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.release(page) }
    }
    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        // SAFETY: the caller's contract.
        unsafe { self.host.map(at, pages, peers) }
    }
    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.grant(at, len, peers) }
    }
    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        let mut lines = self.lines.lock();
        let lies = |(from, to): &(u64, u64)| *from < at.0 + len && at.0 < *to;
        if let Some(work) = lines.work.iter().position(|work| !work.over && work.parts.iter().any(lies)) {
            lines.wrong.push(format!("{at:?} + {len} is unmapped under work {work}, which is not over"));
        }
        // SAFETY: the caller's contract.
        unsafe { self.host.unmap(at, len) }
    }
}

// SAFETY: as above; events are numbers of the host driver.
unsafe impl Timeline for Player {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        let capturing = self.lines.lock().queue(stream).capturing;
        Ok(if capturing { StreamState::Capturing } else { StreamState::Ready })
    }
    fn other_context(&self) -> Option<u64> {
        Some(CONTEXT.get()).filter(|context| *context != 0)
    }
    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        in_context(0, work);
        Ok(())
    }
    fn event_create(&self) -> Result<Event> {
        self.host.event_create()
    }
    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        self.lines.lock().events.remove(&event.raw());
        // SAFETY: the caller's contract.
        unsafe { self.host.event_destroy(event) }
    }
    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut lines = self.lines.lock();
        lines.touch("a record", stream);
        let behind = lines.queue(stream).behind.clone();
        lines.events.insert(event.raw(), behind);
        Ok(())
    }
    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        let mut lines = self.lines.lock();
        lines.touch("a wait", stream);
        let behind = lines.events.get(&event.raw()).cloned().unwrap_or_default();
        lines.queue(stream).behind.extend(behind);
        Ok(())
    }
    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        let lines = self.lines.lock();
        Ok(lines.events.get(&event.raw()).is_none_or(|behind| lines.over(behind)))
    }
    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        let mut lines = self.lines.lock();
        for work in lines.events.get(&event.raw()).cloned().unwrap_or_default() {
            lines.work[work].over = true;
        }
        Ok(())
    }
    fn stream_create(&self) -> Result<Stream> {
        self.host.stream_create()
    }
    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.stream_destroy(stream) }
    }
}

// SAFETY: as above.
unsafe impl Transfer for Player {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.fill(at, len, value, stream) }
    }
    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.read(at, into) }
    }
    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.write(at, from) }
    }
    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.host_register(at, len) }
    }
    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.host_unregister(at) }
    }
    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.copy_to_host(from, to, len, stream) }
    }
    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.host.copy_from_host(to, from, len, stream) }
    }
}

#[derive(Clone, Copy)]
struct Block {
    at: u64,
    bytes: u64,
    stamp: u8,
}

impl Block {
    fn probes(self) -> impl Iterator<Item = *mut u8> {
        (0..self.bytes).step_by(512).chain([self.bytes - 1]).map(move |offset| (self.at + offset) as *mut u8)
    }
    fn write(self) {
        // SAFETY: a block of the host driver, live or in a live graph, is mapped memory of this
        // process.
        self.probes().for_each(|at| unsafe { at.write_volatile(self.stamp) });
    }
    fn holds(self) -> bool {
        // SAFETY: as above, or a block still read by a side stream, which stays mapped.
        self.probes().all(|at| unsafe { at.read_volatile() } == self.stamp)
    }
}

struct Graph {
    /// `None` once dropped; blocks may remain.
    space: Option<Arc<Space>>,
    blocks: VmmTorchAllocator,
    arena: usize,
    live: Vec<Block>,
    parts: Vec<(u64, u64)>,
    sealed: bool,
    replayed: bool,
    /// Streams recorded for live blocks.
    noted: Vec<(u64, Stream)>,
}

struct World {
    player: Arc<Player>,
    device: Option<Arc<Device>>,
    arenas: Vec<Option<SharedVmmAllocator>>,
    graphs: Vec<Graph>,
    replays: Vec<Vec<usize>>,
    reads: Vec<(usize, Block)>,
    stamp: u8,
}

const HANDLES: [u64; 5] = [0, 2, 0x100, 0x200, 0x300];
/// Contexts; the primary one is more likely.
const CONTEXTS: [u64; 4] = [0, 0, 1, 2];

fn named(input: &mut Input) -> (Stream, u64) {
    let byte = usize::from(input.byte());
    (stream_of(HANDLES[byte % HANDLES.len()]), CONTEXTS[byte / HANDLES.len() % CONTEXTS.len()])
}

fn stream_of(handle: u64) -> Stream {
    // SAFETY: the driver under test looks up every handle.
    unsafe { Stream::from_raw(handle) }
}

impl World {
    fn new() -> Self {
        let options = HostOptions { granularity: 4096, ..HostOptions::default() };
        let host = HostDriver::new(0, options).unwrap();
        let player = Arc::new(Player { host, lines: Mutex::default() });
        let device = Device::with_driver(player.clone());
        let options = [(4096, 16 * KIB), (4096, 64 * KIB)].map(|(small_page_bytes, large_page_bytes)| {
            let options = Options { small_page_bytes, large_page_bytes, ..Options::default() };
            Some(SharedVmmAllocator::new(&device, &options).unwrap())
        });
        let (arenas, replays) = (options.into(), vec![Vec::new(), Vec::new()]);
        let (graphs, reads) = (Vec::new(), Vec::new());
        Self { player, device: Some(device), arenas, graphs, replays, reads, stamp: 0 }
    }

    fn lines(&self) -> parking_lot::MutexGuard<'_, Timelines> {
        self.player.lines.lock()
    }

    fn block(&mut self, at: Address, bytes: u64) -> Block {
        self.stamp = self.stamp.wrapping_add(1);
        Block { at: at.0, bytes, stamp: self.stamp }
    }

    fn capture(&mut self, input: &mut Input) {
        let arena = input.below(2);
        let Some(open) = &self.arenas[arena] else { return };
        let space = open.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        let (mut live, mut parts) = (Vec::new(), Vec::new());
        for _ in 0..2 + input.below(5) {
            let (bytes, what) = (input.pick(&SIZES), input.below(8));
            let at = blocks.allocate(bytes, stream_of(0x100), what == 7).unwrap();
            parts.push((at.0, at.0 + bytes));
            if what < 4 {
                blocks.free(at, &[]).unwrap();
            } else {
                live.push(self.block(at, bytes));
            }
        }
        if input.below(8) > 0 {
            space.seal().unwrap();
        }
        let sealed = space.phase() == vmmgraph::Phase::Sealed;
        let (space, noted, replayed) = (Some(space), Vec::new(), false);
        self.graphs.push(Graph { space, blocks, arena, live, parts, sealed, replayed, noted });
    }

    fn replay(&mut self, input: &mut Input) {
        let (number, (stream, context), elsewhere) =
            (input.below(self.graphs.len()), named(input), input.below(3) == 0);
        let Some(graph) = self.graphs.get(number) else { return };
        let Some(space) = graph.space.clone() else { return };
        let (player, parts, sealed) = (Arc::clone(&self.player), graph.parts.clone(), graph.sealed);
        let before = self.replays[graph.arena].clone();
        let live = graph.live.clone();
        let launch = move || {
            let launch = || {
                let mut lines = player.lines.lock();
                let missing = before.iter().find(|work| !lines.queue(stream).behind.contains(work)).copied();
                if let Some(work) = missing.filter(|work| !lines.work[*work].over) {
                    lines.wrong.push(format!("a replay on {stream:?} is not behind replay {work}"));
                }
                live.iter().for_each(|block| block.write());
                lines.launch(stream, parts)
            };
            in_context(context, || space.replay(stream, launch))
        };
        // On a new thread's default stream; the thread ends at once.
        let result = if elsewhere && stream == Stream::PER_THREAD {
            std::thread::scope(|scope| scope.spawn(launch).join().unwrap())
        } else {
            launch()
        };
        let arena = graph.arena;
        match result {
            Ok(work) => {
                assert!(sealed);
                self.replays[arena].push(work);
                self.graphs[number].replayed = true;
            }
            Err(Error::StreamCapturing { .. }) => {
                let captured = self.lines().queues.iter().any(|queue| queue.capturing);
                assert!(captured, "refused without a capture");
            }
            Err(Error::WrongState { .. }) => assert!(!sealed),
            Err(other) => panic!("{other}"),
        }
    }

    fn read(&mut self, input: &mut Input) {
        let (number, (stream, context), which) = (input.below(self.graphs.len()), named(input), input.byte());
        let Some(graph) = self.graphs.get_mut(number) else { return };
        if !graph.replayed || graph.live.is_empty() {
            return;
        }
        let block = graph.live[usize::from(which) % graph.live.len()];
        in_context(context, || {
            let mut lines = self.player.lines.lock();
            // As a valid caller: the read follows the replay and breaks no capture.
            let replays = self.replays[graph.arena].clone();
            if lines.queue(stream).capturing {
                return;
            }
            lines.queue(stream).behind.extend(replays);
            let work = lines.launch(stream, vec![(block.at, block.at + block.bytes)]);
            drop(lines);
            graph.blocks.record_stream(Address(block.at), stream).unwrap();
            graph.noted.push((block.at, stream));
            self.reads.push((work, block));
        });
    }

    fn free(&mut self, input: &mut Input) {
        let (number, which) = (input.below(self.graphs.len()), input.byte());
        let Some(graph) = self.graphs.get_mut(number) else { return };
        if graph.live.is_empty() || !graph.sealed {
            return;
        }
        let block = graph.live.swap_remove(usize::from(which) % graph.live.len());
        let free = || graph.blocks.free(Address(block.at), &[]).unwrap();
        if which >= 192 {
            std::thread::scope(|scope| scope.spawn(free).join().unwrap())
        } else {
            free()
        }
        graph.noted.retain(|(at, _)| *at != block.at);
    }

    /// Drops a graph (its blocks stay), blocks, an arena's handle or the device's handle.
    fn go(&mut self, input: &mut Input) {
        let number = input.below(self.graphs.len());
        match input.below(8) {
            0..4 if number < self.graphs.len() => {
                let graph = &mut self.graphs[number];
                (graph.space, graph.sealed) = (None, true);
                if graph.live.is_empty() {
                    drop(self.graphs.swap_remove(number));
                }
            }
            4..6 if number < self.graphs.len() => drop(self.graphs.swap_remove(number)),
            6 => drop(self.arenas[number % 2].take()),
            _ => self.device = None,
        }
    }

    fn pass(&mut self, input: &mut Input) {
        let mut lines = self.lines();
        let number = input.below(lines.queues.len());
        let Some(queue) = lines.queues.get(number) else { return };
        for work in queue.behind.clone() {
            lines.work[work].over = true;
        }
    }

    /// Destroys a stream and reuses its handle, if callers may do so.
    fn destroy(&mut self, input: &mut Input) {
        let handle = HANDLES[2 + input.below(3)];
        let stream = stream_of(handle);
        let noted = self.graphs.iter().any(|graph| graph.noted.iter().any(|(_, noted)| *noted == stream));
        // Captured streams, and streams with a record pending on a capture, must not be destroyed.
        if noted || self.lines().queues.iter().any(|queue| queue.capturing) {
            return;
        }
        let pending = self.player.lines.lock().handles.contains_key(&handle);
        for arena in self.arenas.iter().flatten() {
            arena.mark().unwrap();
        }
        if pending && self.arenas.iter().all(Option::is_some) {
            self.lines().handles.remove(&handle);
        }
    }

    fn act(&mut self, input: &mut Input) {
        match input.below(16) {
            0..3 => self.capture(input),
            3..7 => self.replay(input),
            7 | 8 => self.read(input),
            9 | 10 => self.free(input),
            11 => self.go(input),
            12 => self.pass(input),
            13 => self.destroy(input),
            14 => {
                let (stream, context) = named(input);
                let lines = &mut *self.player.lines.lock();
                let queue = in_context(context, || lines.queue(stream));
                queue.capturing = !queue.capturing;
            }
            _ => {
                if let Some(arena) = &self.arenas[input.below(2)] {
                    let trimmed = arena.trim();
                    let refused = matches!(trimmed, Err(Error::StreamCapturing { .. }));
                    assert!(trimmed.is_ok() || refused, "{trimmed:?}");
                }
            }
        }
    }

    fn check(&mut self) {
        let wrong = std::mem::take(&mut self.lines().wrong);
        assert!(wrong.is_empty(), "{wrong:#?}");
        let lines = self.player.lines.lock();
        self.reads.retain(|(work, _)| !lines.work[*work].over);
        for (work, block) in &self.reads {
            assert!(block.holds(), "{:#x} was overwritten while work {work} reads it", block.at);
        }
        drop(lines);
        for arena in self.arenas.iter().flatten() {
            assert_eq!(arena.audit(), Ok(()));
        }
    }

    fn end(mut self) {
        self.lines().queues.iter_mut().for_each(|queue| queue.capturing = false);
        self.graphs.clear();
        self.check();
        // In the primary context: other contexts need no further call.
        for arena in self.arenas.iter().flatten() {
            arena.trim().unwrap();
        }
        self.arenas.clear();
        self.device = None;
        self.check();
        self.lines().work.iter_mut().for_each(|work| work.over = true);
        drop(Device::with_driver(self.player.clone()));
        assert_eq!(self.player.host.leftovers(), [0; 4]);
    }
}

impl Drop for World {
    /// Also after a failure, so that no wait blocks.
    fn drop(&mut self) {
        let mut lines = self.lines();
        lines.queues.iter_mut().for_each(|queue| queue.capturing = false);
        lines.work.iter_mut().for_each(|work| work.over = true);
    }
}

#[test]
fn any_use_of_streams_is_in_order() {
    let _alone = alone();
    crate::input::fuzz("streams", |input| {
        let mut world = World::new();
        let mut turns = 0;
        while !input.is_empty() && turns < 200 {
            world.act(input);
            world.check();
            turns += 1;
        }
        world.end();
    });
}
