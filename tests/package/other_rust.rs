//! Independent Rust static library, linked by an engine together with libvmmgraph.so.

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::catch_unwind;

thread_local! {
    static SEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Uses the parts in which two copies of Rust's library could conflict: allocator, threads,
/// thread-local data, unwinding.
#[unsafe(no_mangle)]
pub extern "C" fn other_rust_sum(up_to: u64) -> u64 {
    std::panic::set_hook(Box::new(|_| {}));
    let caught = catch_unwind(|| if up_to > 3 { panic!("planted") }).is_err();
    let threads: Vec<_> = (0..4)
        .map(|part| {
            std::thread::spawn(move || {
                SEEN.with_borrow_mut(|seen| seen.push(format!("part {part}")));
                let numbers: HashMap<u64, u64> = (0..=up_to).filter(|n| n % 4 == part).map(|n| (n, n)).collect();
                numbers.values().sum::<u64>()
            })
        })
        .collect();
    let sum: u64 = threads.into_iter().map(|thread| thread.join().unwrap_or(0)).sum();
    if caught == (up_to > 3) { sum } else { 0 }
}
