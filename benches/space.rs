//! Host time of spaces, alone and among 10,000, and scaling with their number.
//!
//! `make bench`. The limits on medians are checked at the end.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use criterion::Criterion;
use vmmgraph::driver::HostDriver;
use vmmgraph::pages::{Owner, Transaction};
use vmmgraph::{Address, Device, HostOptions, Options, SharedVmmAllocator, Space, Stream};
use vmmgraph_testkit::{MIB, growth, median};

const STREAM: Stream = Stream::LEGACY;

/// Counts the bytes this process has allocated.
struct Counting;

static HELD: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards to the system allocator under the caller's promises.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn device() -> Arc<Device> {
    let options = HostOptions { memory_bytes: 1 << 40, ..HostOptions::default() };
    Device::with_driver(Arc::new(HostDriver::new(0, options).expect("the host driver opens")))
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    SharedVmmAllocator::new(device, &Options::default()).expect("the default options fit")
}

/// Opens a space after one allocation of each benchmarked size.
fn warm(arena: &SharedVmmAllocator) -> Arc<Space> {
    let space = arena.open_space().expect("the arena is usable");
    for bytes in [4096, 24 * MIB] {
        let block = space.allocate(bytes, STREAM).expect("memory is there");
        space.free(block).expect("a live block");
    }
    space
}

struct Row {
    what: String,
    seen: Duration,
    limit: Duration,
}

fn row(rows: &mut Vec<Row>, what: &str, limit: Duration, seen: Duration) {
    rows.push(Row { what: what.to_owned(), seen, limit });
}

/// Allocates, opens and replays, alone and among 10,000 spaces.
fn common(criterion: &mut Criterion, rows: &mut Vec<Row>) {
    for spaces in [1usize, 10_000] {
        let device = device();
        let arena = arena(&device);
        let others: Vec<_> = (1..spaces).map(|_| arena.open_space().expect("the arena is usable")).collect();
        let space = warm(&arena);
        for (what, bytes) in [("packed block", 4096), ("block of two pages", 24 * MIB)] {
            let mut turn = || {
                let block = space.allocate(black_box(bytes), STREAM).expect("mapped already");
                space.free(block).expect("a live block");
            };
            let name = format!("allocate and free a {what}, {spaces} spaces");
            criterion.bench_function(&name, |b| b.iter(&mut turn));
            row(rows, &name, Duration::from_nanos(150), median(301, 2_000, turn));
        }
        let open = || drop(arena.open_space().expect("the arena is usable"));
        let name = format!("open and drop a space, {spaces} spaces");
        criterion.bench_function(&name, |b| b.iter(open));
        row(rows, &name, Duration::from_micros(5), median(301, 2_000, open));
        let sealed = warm(&arena);
        sealed.seal().expect("an open space");
        let replay = || sealed.replay(STREAM, || ()).expect("a sealed space");
        let name = format!("replay on the same stream, {spaces} spaces");
        criterion.bench_function(&name, |b| b.iter(replay));
        row(rows, &name, Duration::from_nanos(100), median(301, 2_000, replay));
        drop(others);
    }
}

/// Operations that must not slow down with the number of spaces.
fn among_many(rows: &mut Vec<Row>) {
    const SPACES: usize = 10_000;
    let device = device();
    let arena = arena(&device);
    let mut blocks: Vec<Address> = Vec::with_capacity(SPACES);
    let before = HELD.load(Relaxed);
    for _ in 0..SPACES {
        arena.switch_to_new_virtual_space().expect("addresses are there");
        blocks.push(arena.allocate(4096, STREAM).expect("memory is there"));
    }
    let each = (HELD.load(Relaxed) - before) / SPACES as u64;
    println!("host memory of a sealed current space with a block of 4 KiB: {each} bytes");
    let limit = Duration::from_micros(20);
    row(
        rows,
        "mapped_size() at 10,000 spaces",
        limit,
        median(101, 20, || {
            black_box(arena.mapped_size());
        }),
    );
    row(
        rows,
        "statistics of the arena at 10,000 spaces",
        limit,
        median(101, 20, || {
            black_box(arena.stats());
        }),
    );
    row(
        rows,
        "statistics of the device at 10,000 spaces",
        limit,
        median(101, 20, || {
            black_box(device.stats());
        }),
    );
    let mut next = blocks.into_iter();
    row(
        rows,
        "deallocate among 10,000 spaces",
        Duration::from_micros(1),
        median(101, 50, || {
            arena.deallocate(next.next().expect("as many blocks as turns")).expect("a live block");
        }),
    );
}

/// Finding free addresses among many blocks, and a free page among many pages.
fn among_blocks(rows: &mut Vec<Row>) {
    let device = device();
    for (blocks, bytes) in [(16_000, 2 * MIB), (4_000, 24 * MIB)] {
        let arena = arena(&device);
        let space = arena.open_space().expect("the arena is usable");
        let mut live: Vec<_> =
            (0..blocks).map(|_| space.allocate(bytes, STREAM).expect("addresses")).collect();
        let mut at = 0;
        row(
            rows,
            &format!("reuse of a block of {} MiB beside {blocks} live ones", bytes / MIB),
            Duration::from_micros(1),
            median(101, 100, || {
                at = (at + 7_919) % blocks;
                space.free(live[at]).expect("a live block");
                live[at] = space.allocate(bytes, STREAM).expect("mapped already");
            }),
        );
    }

    let account = device.account("free pages", None, Default::default()).expect("no limits");
    let owner = Owner::Shared { arena: u64::MAX };
    let bytes = 2 * MIB;
    let take = || {
        let mut transaction = Transaction::on(device.pool());
        transaction.take(bytes, owner, account.id()).expect("memory is there");
        transaction
    };
    // All pages are taken, then freed: a transaction committed without a mapping returns its pages
    // to the device.
    let held: Vec<_> = (0..15_000).map(|_| take()).collect();
    held.into_iter().for_each(|transaction| drop(transaction.commit()));
    assert_eq!(device.stats().free_bytes, 15_000 * bytes);
    row(
        rows,
        "a page from 15,000 free ones, and back",
        Duration::from_nanos(500),
        median(301, 200, || {
            drop(take().commit());
        }),
    );
}

/// Operations that must not slow down with the number of leases, holes, noted streams and shapes.
fn among_others(rows: &mut Vec<Row>) {
    let micros = Duration::from_micros;
    let (noted, freed) = growth::noted_stream(10_000);
    // A lease maps its page, which costs the driver most of the time.
    row(rows, "a lease beside 10,000 leases", micros(20), growth::lease(10_000));
    row(rows, "a kept block among 10,000 holes", micros(2), growth::kept_block(10_000));
    row(rows, "a block of a region among 10,000 holes", micros(2), growth::region_block(10_000));
    row(rows, "a stream noted for a retained block beside 10,000", micros(2), noted);
    row(rows, "the end of a block with a noted stream, beside 10,000", micros(2), freed);
    row(rows, "a plan of 16 graphs for 100,000 shapes", Duration::from_secs(2), growth::plan_of(100_000));
}

/// Host memory in bytes of a sealed space with one small output.
fn memory() -> u64 {
    const SPACES: u64 = 1000;
    let device = device();
    let arena = arena(&device);
    let open = || {
        let space = arena.open_space().expect("the arena is usable");
        space.allocate(4096, STREAM).expect("memory is there");
        space.seal().expect("an open space");
        space
    };
    let mut spaces = Vec::with_capacity(SPACES as usize + 1);
    spaces.push(open());
    let before = HELD.load(Relaxed);
    spaces.extend((0..SPACES).map(|_| open()));
    (HELD.load(Relaxed) - before) / SPACES
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut rows = Vec::new();
    common(&mut criterion, &mut rows);
    criterion.final_summary();
    among_many(&mut rows);
    among_blocks(&mut rows);
    among_others(&mut rows);
    let bytes = memory();

    let mut ok = bytes <= 3 << 10;
    println!("host memory of a sealed space with one output of 4 KiB: {bytes} bytes, limit 3072");
    for Row { what, seen, limit } in &rows {
        let good = seen <= limit;
        println!("{what}: {seen:?}, limit {limit:?}: {}", if good { "ok" } else { "MISSED" });
        ok &= good;
    }
    let find = |name: &str| rows.iter().find(|row| row.what.starts_with(name)).map(|row| row.seen);
    for what in [
        "allocate and free a packed block",
        "allocate and free a block of two pages",
        "open and drop a space",
        "replay on the same stream",
    ] {
        let (alone, among) = (find(&format!("{what}, 1 ")), find(&format!("{what}, 10000 ")));
        let (Some(alone), Some(among)) = (alone, among) else { continue };
        // Medians of tens of nanoseconds vary by a few on a shared machine.
        let good =
            among.as_secs_f64() <= 1.2 * alone.as_secs_f64() || among.saturating_sub(alone).as_nanos() <= 8;
        println!(
            "{what}: {:.2} x among 10,000 spaces: {}",
            among.as_secs_f64() / alone.as_secs_f64(),
            if good { "ok" } else { "MISSED" }
        );
        ok &= good;
    }
    if !ok {
        std::process::exit(1);
    }
}
