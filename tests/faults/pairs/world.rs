//! A process with one object of every kind, some of them pending destruction.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::ring::HostRun;
use vmmgraph::{
    Address, Borrower, Device, ElasticBuffer, ElasticOptions, HostOptions, KvCache, KvLayout, KvOptions,
    Lease, Options, PagePin, PeerPage, Pinning, Policy, Region, RegionOptions, Result, Ring, RingOptions,
    RingUnit, SharedVmmAllocator, Space, Stream, VmmTorchAllocator, Workspace,
};
use vmmgraph_testkit::{FaultyDriver, IdleBorrower, stream};

pub(super) const A: Stream = Stream::LEGACY;
pub(super) const B: Stream = stream(0xb0);
/// Stream of readers. During its capture, no event can mark their end.
pub(super) const SIDE: Stream = stream(7);
pub(super) const KIB: u64 = 1 << 10;
pub(super) const PAGE: u64 = 16 * KIB;
pub(super) const NOW: Duration = Duration::ZERO;

#[derive(Clone, Copy)]
pub(super) struct Written {
    pub(super) at: Address,
    pub(super) bytes: u64,
    byte: u8,
}

impl Written {
    pub(super) fn new(at: Address, bytes: u64, byte: u8) -> Self {
        // SAFETY: a live block of the host driver, memory of this process.
        unsafe { std::ptr::write_bytes(at.0 as *mut u8, byte, bytes as usize) };
        Self { at, bytes, byte }
    }

    pub(super) fn is_there(&self) -> bool {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(self.at.0 as *const u8, self.bytes as usize) };
        bytes.iter().all(|byte| *byte == self.byte)
    }
}

pub(super) struct May<T>(pub(super) Mutex<Option<T>>);

impl<T> May<T> {
    pub(super) fn some(value: T) -> Self {
        Self(Mutex::new(Some(value)))
    }

    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().unwrap().take()
    }
}

impl<T: Clone> May<T> {
    pub(super) fn get(&self) -> Option<T> {
        self.0.lock().unwrap().clone()
    }
}

pub(super) struct Graph {
    pub(super) space: May<Arc<Space>>,
    pub(super) tensors: May<Arc<VmmTorchAllocator>>,
    pub(super) blocks: Mutex<Vec<Written>>,
}

pub(super) fn graph(arena: &SharedVmmAllocator, byte: u8) -> Graph {
    let space = arena.open_space().unwrap();
    let tensors = Arc::new(VmmTorchAllocator::new(&space));
    let passing = tensors.allocate(40 * KIB, A, false).unwrap();
    let mut blocks = [(20, false), (3, false), (2, true), (5, false)].map(|(kib, kept)| Written {
        at: tensors.allocate(kib * KIB, A, kept).unwrap(),
        bytes: kib * KIB,
        byte,
    });
    tensors.free(passing, &[]).unwrap();
    space.seal().unwrap();
    space
        .replay(A, || blocks.iter_mut().for_each(|block| *block = Written::new(block.at, block.bytes, byte)))
        .unwrap();
    let blocks = Mutex::new(blocks.to_vec());
    Graph { space: May::some(space), tensors: May::some(tensors), blocks }
}

/// A graph without a first replay, launched by replays only: freed blocks need no fence.
fn unlaunched(arena: &SharedVmmAllocator) -> Graph {
    let space = arena.open_space().unwrap();
    let tensors = Arc::new(VmmTorchAllocator::new(&space));
    tensors.launch_by_replay_only(true);
    tensors.captured_on(A);
    let blocks = [20, 3].map(|kib| Written {
        at: tensors.allocate(kib * KIB, A, false).unwrap(),
        bytes: kib * KIB,
        byte: 0,
    });
    space.seal().unwrap();
    Graph { space: May::some(space), tensors: May::some(tensors), blocks: Mutex::new(blocks.to_vec()) }
}

impl Graph {
    pub(super) fn free(&self, readers: &[Stream]) -> Result<()> {
        let (Some(tensors), Some(block)) = (self.tensors.get(), self.blocks.lock().unwrap().pop()) else {
            return Ok(());
        };
        tensors.free(block.at, readers)
    }

    pub(super) fn first(&self) -> Option<Written> {
        self.blocks.lock().unwrap().first().copied()
    }

    pub(super) fn drop_tensors(&self) {
        self.blocks.lock().unwrap().clear();
        drop(self.tensors.take());
    }

    pub(super) fn replay(&self, stream: Stream) -> Result<()> {
        let space = self.space.get();
        space.map_or(Ok(()), |space| space.replay(stream, || ()))
    }
}

pub(super) struct World {
    host: Arc<HostDriver>,
    pub(super) faulty: Arc<FaultyDriver>,
    pub(super) device: Arc<Device>,
    pub(super) arena: May<Arc<SharedVmmAllocator>>,
    pub(super) other: Arc<SharedVmmAllocator>,
    pub(super) live: Graph,
    pub(super) second: Graph,
    pub(super) unlaunched: Graph,
    /// The graph is destroyed; some blocks remain.
    pub(super) outlived: Graph,
    pub(super) pin: May<(PagePin, PeerPage)>,
    pub(super) region: May<Arc<Region>>,
    pub(super) in_region: Mutex<Vec<Written>>,
    pub(super) buffer: May<Arc<ElasticBuffer>>,
    pub(super) cache: May<Arc<KvCache>>,
    pub(super) lease: May<Lease>,
    pub(super) ring: May<Arc<Ring>>,
    pub(super) workspaces: [May<Arc<Workspace>>; 2],
    pub(super) results: Mutex<Vec<Written>>,
}

impl World {
    pub(super) fn new() -> Self {
        let options = HostOptions { granularity: 4096, memory_bytes: 64 << 20 };
        let host = Arc::new(HostDriver::new(0, options).unwrap());
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        let options = Options { small_page_bytes: 4096, large_page_bytes: PAGE, ..Options::default() };
        let [arena, other] = [0, 1].map(|_| Arc::new(SharedVmmAllocator::new(&device, &options).unwrap()));
        let [live, second, outlived, gone] = [1, 2, 3, 4].map(|byte| graph(&arena, byte));
        let of_region =
            RegionOptions { policy: Policy::Backup, page_bytes: 8 * KIB, ..RegionOptions::default() };
        let region = device.region("aside", of_region).unwrap();
        let in_region =
            [6, 20, 3].map(|kib| Written::new(region.allocate(kib * KIB, B).unwrap(), kib * KIB, kib as u8));
        let of_buffer = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
        let buffer = Arc::new(device.elastic_buffer(16 * PAGE, &of_buffer).unwrap());
        buffer.commit(0..6 * PAGE).unwrap();
        let options = KvOptions {
            planes: &[KIB, 4 * KIB],
            blocks_most: 64,
            layout: KvLayout::ByPlane,
            memory: of_buffer,
        };
        let cache = device.kv_cache(&options).unwrap();
        cache.grow_to(20).unwrap();
        let ring = device
            .ring(&[RingUnit::streamed(6 * KIB); 4], &RingOptions { slots: 2, ..RingOptions::default() })
            .unwrap();
        let source = device.host_buffer(6 * KIB, Pinning::Preferred).unwrap();
        for unit in 0..4 {
            ring.set_source(unit, &[HostRun { source: source.clone(), from: 0, to: 0, bytes: 6 * KIB }])
                .unwrap();
        }
        let workspaces = [A, B].map(|stream| {
            let workspace = Workspace::new(&device, 32 * KIB).unwrap();
            workspace.use_on(Some(stream), Fence::default).unwrap();
            May::some(Arc::new(workspace))
        });
        let scope = arena.eager_scope(B).unwrap();
        let results = [9, 2].map(|kib| Written::new(scope.allocate(kib * KIB).unwrap(), kib * KIB, 9));
        scope.into_end().end().unwrap();

        // Objects pending destruction, after a captured reader.
        faulty.set_capturing(SIDE, true);
        drop(outlived.space.take());
        outlived.free(&[SIDE]).unwrap();
        outlived.free(&[SIDE]).unwrap();
        live.free(&[SIDE]).unwrap();
        drop(gone.space.take());
        gone.free(&[SIDE]).unwrap();
        drop(gone);
        region.record_stream(in_region[2].at, SIDE).unwrap();
        region.free(in_region[2].at).unwrap();
        let mut fence = Fence::default();
        fence.add(device.pool().events(), SIDE);
        buffer.decommit(PAGE..3 * PAGE, &fence).unwrap();
        cache.shrink_to(12, &[], &fence).unwrap();
        arena.eager_blocks().free(results[1].at, &[SIDE]).unwrap();
        faulty.set_capturing(SIDE, false);

        let borrower: Arc<dyn Borrower> = Arc::new(IdleBorrower);
        let unlaunched = unlaunched(&arena);
        let lease = arena.lend(&buffer, 8 * PAGE..9 * PAGE, &borrower).unwrap();
        Self {
            host,
            faulty,
            device,
            arena: May::some(arena),
            other,
            live,
            second,
            unlaunched,
            outlived,
            pin: May(Mutex::new(None)),
            region: May::some(region),
            in_region: Mutex::new(in_region[..2].to_vec()),
            buffer: May::some(buffer),
            cache: May::some(cache),
            lease: May::some(lease),
            ring: May::some(Arc::new(ring)),
            workspaces,
            results: Mutex::new(vec![results[0]]),
        }
    }

    pub(super) fn end(self, what: &str) {
        self.faulty.set_capturing(SIDE, false);
        self.device.resume(&[], NOW).unwrap();
        if let Some(arena) = self.arena.get() {
            arena.resume(NOW).unwrap();
            assert_eq!(arena.audit(), Ok(()), "{what}");
        }
        for (name, blocks) in [
            ("live", &self.live.blocks),
            ("second", &self.second.blocks),
            ("outlived", &self.outlived.blocks),
            ("region", &self.in_region),
            ("eager", &self.results),
        ] {
            for block in blocks.lock().unwrap().iter() {
                assert!(block.is_there(), "{what}: {name}: {} bytes at {:?}", block.bytes, block.at);
            }
        }
        if let Some(buffer) = self.buffer.get() {
            assert_eq!(buffer.audit(), Ok(()), "{what}");
        }
        let (stats, held) = (self.device.stats(), self.host.leftovers());
        let books = [stats.pages, stats.reservations, stats.mappings].map(|count| count as usize);
        assert_eq!(books, held[..3], "{what}: the books are not what the driver has");
        assert_eq!(self.device.pool().audit_idle(), Ok(()), "{what}");
        let Self { host, faulty, device, live, second, outlived, .. } = self;
        drop((
            live,
            second,
            outlived,
            self.region,
            self.lease,
            self.buffer,
            self.cache,
            self.ring,
            self.workspaces,
        ));
        drop((self.pin, self.unlaunched, self.arena, self.other));
        device.trim().unwrap();
        let stats = device.stats();
        assert_eq!((stats.physical_bytes, stats.reservations, stats.pending), (0, 0, 0), "{what}");
        device.host_pool().trim().unwrap();
        // A record may hit a capture that has just begun; no query follows.
        let mut broken = faulty.broken_captures();
        broken.retain(|touched| !touched.starts_with("event_record"));
        assert_eq!(broken, [""; 0], "{what}");
        drop((device, faulty));
        assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]), "{what}");
    }
}
