//! What a space costs the host: opening one, and a block on addresses that are mapped already; alone and among 10,000 spaces.
//!
//! `cargo bench --bench space`. The limits are checked at the end, on medians: an allocation with its free within 150 ns, an opened
//! space within 5 us, and neither more than 20 % dearer among 10,000 spaces than alone.

use std::sync::Arc;
use std::time::Duration;

use criterion::Criterion;
use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator, Space, Stream};
use vmmgraph_testkit::{MIB, median};

const STREAM: Stream = Stream(0);

fn arena() -> SharedVmmAllocator {
    let driver = Arc::new(HostDriver::new(0, HostOptions::default()).expect("the host driver opens"));
    SharedVmmAllocator::new(&Device::with_driver(driver), &Options::default())
        .expect("the default options fit")
}

/// A space in which blocks of the benchmarked sizes have been allocated before.
fn warm(arena: &SharedVmmAllocator) -> Arc<Space> {
    let space = arena.open_space().expect("the arena is usable");
    for bytes in [4096, 24 * MIB] {
        let block = space.allocate(bytes, STREAM).expect("memory is there");
        space.free(block).expect("a live block");
    }
    space
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut rows = Vec::new();
    for spaces in [1usize, 10_000] {
        let arena = arena();
        let others: Vec<_> = (1..spaces).map(|_| arena.open_space().expect("the arena is usable")).collect();
        let space = warm(&arena);
        for (what, bytes) in [("packed block", 4096), ("block of two pages", 24 * MIB)] {
            let mut turn = || {
                let block = space.allocate(std::hint::black_box(bytes), STREAM).expect("mapped already");
                space.free(block).expect("a live block");
            };
            criterion.bench_function(&format!("allocate and free a {what}, {spaces} spaces"), |b| {
                b.iter(&mut turn)
            });
            rows.push((what, spaces, median(301, 2_000, turn)));
        }
        let open = || drop(arena.open_space().expect("the arena is usable"));
        criterion.bench_function(&format!("open and drop a space, {spaces} spaces"), |b| b.iter(open));
        rows.push(("opened space", spaces, median(301, 2_000, open)));
        drop(others);
    }
    criterion.final_summary();

    let mut ok = true;
    for (what, _, alone) in rows.iter().filter(|row| row.1 == 1) {
        let among = rows.iter().find(|row| row.0 == *what && row.1 > 1).map_or(*alone, |row| row.2);
        let limit = Duration::from_nanos(if *what == "opened space" { 5_000 } else { 150 });
        let ratio = among.as_secs_f64() / alone.as_secs_f64();
        // Medians of some tens of nanoseconds jitter by a few on a shared machine.
        let slack = among.saturating_sub(*alone) <= Duration::from_nanos(5);
        let good = *alone <= limit && among <= limit && (ratio <= 1.2 || slack);
        println!(
            "{what}: {alone:?} alone, {among:?} among 10,000 ({ratio:.2} x), limit {limit:?}: {}",
            if good { "ok" } else { "MISSED" }
        );
        ok &= good;
    }
    if !ok {
        std::process::exit(1);
    }
}
