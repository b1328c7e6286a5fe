//! Calls with a cost independent of the number of objects: each function returns the median time of
//! a call among `count` objects.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmmgraph::dispatch::{Budget, Costs, Histogram, Weights, plan};
use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{
    Borrower, Device, ElasticOptions, HostOptions, Options, RegionOptions, Result, SharedVmmAllocator,
    Stream, Vacate,
};

use crate::stream;

const A: Stream = Stream::LEGACY;
const CALLS: usize = 201;

fn device() -> Arc<Device> {
    let options = HostOptions { granularity: 4096, memory_bytes: 1 << 40 };
    Device::with_driver(Arc::new(HostDriver::new(0, options).expect("the host driver opens")))
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    let options = Options { small_page_bytes: 4096, large_page_bytes: 8192, ..Options::default() };
    SharedVmmAllocator::new(device, &options).expect("the sizes fit the device")
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn timed<T>(times: &mut Vec<Duration>, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    times.push(start.elapsed());
    result
}

fn sizes(most: u64) -> impl FnMut() -> u64 {
    let mut state = 1_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        512 + (state >> 33) % most
    }
}

struct Obliging;

impl Borrower for Obliging {
    fn vacate(&self, _: &Vacate) -> Result<Fence> {
        Ok(Fence::default())
    }
}

/// Times a lease of one page among `count` leases.
#[must_use]
pub fn lease(count: usize) -> Duration {
    let device = device();
    let (arena, page) = (arena(&device), 8192_u64);
    let space = arena.open_space().expect("the arena is usable");
    let blocks: Vec<_> =
        (0..count + CALLS).map(|_| space.allocate(page, A).expect("memory is there")).collect();
    blocks.into_iter().for_each(|block| space.free(block).expect("a live block"));
    space.seal().expect("an open space");
    let options = ElasticOptions { page_bytes: page, ..ElasticOptions::default() };
    let bytes = (count + CALLS) as u64 * page;
    let buffer = Arc::new(device.elastic_buffer(bytes, &options).expect("addresses are there"));
    let borrower: Arc<dyn Borrower> = Arc::new(Obliging);
    let lend = |at: usize| {
        let at = at as u64 * page;
        arena.lend(&buffer, at..at + page, &borrower).expect("a page that is not on lease")
    };
    (0..count).for_each(|at| drop(lend(at)));
    let mut times = Vec::new();
    for at in count..count + CALLS {
        drop(timed(&mut times, || lend(at)));
    }
    arena.recall_all(Duration::from_secs(60)).expect("the borrower obliges");
    median(times)
}

/// Times the allocation of a persistent block among the holes of `count` blocks.
#[must_use]
pub fn kept_block(count: usize) -> Duration {
    // Default page sizes give few pages; each page is a file descriptor of the host driver.
    let arena = SharedVmmAllocator::new(&device(), &Options::default()).expect("the sizes fit the device");
    let open = || arena.open_space().expect("the arena is usable");
    let (stays, goes, next) = (open(), open(), open());
    let mut size = sizes(8192);
    for _ in 0..count {
        stays.allocate_kept(size(), A).expect("memory is there");
        goes.allocate_kept(size(), A).expect("memory is there");
    }
    goes.seal().expect("an open space");
    drop(goes);
    let mut times = Vec::new();
    for _ in 0..CALLS {
        let bytes = size();
        timed(&mut times, || next.allocate_kept(bytes, A).expect("memory is there"));
    }
    median(times)
}

/// Times the allocation of a block of a region among `count` holes.
#[must_use]
pub fn region_block(count: usize) -> Duration {
    let device = device();
    let region = device.region("growth", RegionOptions::default()).expect("the options fit");
    let mut size = sizes(65536);
    let blocks: Vec<_> =
        (0..2 * count).map(|_| region.allocate(size(), A).expect("memory is there")).collect();
    for block in blocks.iter().step_by(2) {
        region.free(*block).expect("a live block");
    }
    let mut times = Vec::new();
    for _ in 0..CALLS {
        let bytes = size();
        timed(&mut times, || region.allocate(bytes, A).expect("memory is there"));
    }
    median(times)
}

/// Times the record of a stream for a live-out block among `count` blocks, and the free of that
/// block.
#[must_use]
pub fn noted_stream(count: usize) -> (Duration, Duration) {
    let arena = arena(&device());
    let space = arena.open_space().expect("the arena is usable");
    let blocks: Vec<_> =
        (0..count + CALLS).map(|_| space.allocate(512, A).expect("memory is there")).collect();
    space.seal().expect("an open space");
    let (mut noted, mut freed) = (Vec::new(), Vec::new());
    for (number, block) in blocks.iter().enumerate() {
        let call = || space.record_stream(*block, stream(7)).expect("a live block");
        if number < count { call() } else { timed(&mut noted, call) }
    }
    for block in &blocks[count..] {
        timed(&mut freed, || space.free(*block).expect("a live block"));
    }
    (median(noted), median(freed))
}

/// Times a plan of 16 graphs for `count` lengths.
#[must_use]
pub fn plan_of(count: usize) -> Duration {
    let mut size = sizes(1000);
    let traffic: Histogram = (1..=count as u32).map(|tokens| (tokens, size())).collect();
    let budget = Budget { graphs: Some(16), ..Budget::default() };
    let start = Instant::now();
    let made = plan(&traffic, Weights::default(), &budget, &Costs::default()).expect("within the limits");
    assert_eq!(made.buckets.len(), 16);
    start.elapsed()
}
