//! Calls whose cost must not grow with the number of things there are: each takes the median time of a
//! call among `count` of them.

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
/// Calls that are timed.
const CALLS: usize = 201;

fn device() -> Arc<Device> {
    let options = HostOptions { granularity: 4096, memory_bytes: 1 << 40 };
    Device::with_driver(Arc::new(HostDriver::new(0, options).expect("the host driver opens")))
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    let options = Options { small_page_bytes: 4096, large_page_bytes: 8192, ..Options::default() };
    SharedVmmAllocator::new(device, &options).expect("the sizes fit the device")
}

/// The median of what single calls take.
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

/// Sizes that differ, in the same order every time.
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

/// A lease of one page beside so many leases.
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

/// A kept block among the holes that so many left.
#[must_use]
pub fn kept_block(count: usize) -> Duration {
    // Pages of the default sizes: few of them, as each is a file descriptor of the host driver.
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

/// A block of a region among the holes that so many left.
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

/// A stream that is noted for a retained block beside so many, and the end of that block.
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

/// A plan of 16 graphs for so many lengths.
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
