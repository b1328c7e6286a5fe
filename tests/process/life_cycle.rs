//! No order of destruction leaks a page, mapping, address, descriptor, event or handle.
//!
//! One test, since the counts are process-wide.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the C functions' contracts are kept: every pointer is a local's"
)]

use std::collections::VecDeque;
use std::ffi::{c_char, c_void};
use std::fs;
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vmmgraph::capi::*;
use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator};
use vmmgraph_testkit::{FaultyDriver, alone, stream};

static DROPPED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn dropped(_: *mut c_void) {
    DROPPED.fetch_add(1, Relaxed);
}

unsafe extern "C" fn sink(_: i32, _: *const c_char, _: usize, _: *mut c_void) {}

unsafe extern "C" fn nothing(_: *mut c_void) {}

fn descriptors_and_pages() -> (usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    (fs::read_dir("/proc/self/fd").unwrap().count(), maps.matches("vmmgraph-page").count())
}

fn addresses_and_memory() -> (u64, u64) {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let mut pages = pages.split_whitespace().map(|text| text.parse::<u64>().unwrap() * 4096);
    (pages.next().unwrap(), pages.next().unwrap())
}

fn orders(n: usize) -> Vec<Vec<usize>> {
    fn heap(k: usize, order: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
        if k <= 1 {
            return all.push(order.clone());
        }
        for i in 0..k {
            heap(k - 1, order, all);
            if i < k - 1 {
                order.swap(if k.is_multiple_of(2) { i } else { 0 }, k - 1);
            }
        }
    }
    let mut all = Vec::new();
    heap(n, &mut (0..n).collect(), &mut all);
    all
}

fn in_this_order(order: &[usize]) {
    let (mut device, mut arena) = (null_mut(), null_mut());
    let (mut open, mut sealed) = (null_mut(), null_mut());
    let mut block = null_mut();
    let mut options: vmmgraph_device_options_t = unsafe { zeroed() };
    options.struct_size = size_of::<vmmgraph_device_options_t>();
    (options.driver, options.host_granularity_bytes) = (VMMGRAPH_DRIVER_HOST, 4096);
    unsafe {
        assert_eq!(
            vmmgraph_set_log_sink(Some(sink), null_mut(), Some(dropped), VMMGRAPH_LOG_TRACE),
            VMMGRAPH_OK
        );
        assert_eq!(vmmgraph_device_open(&raw const options, &raw mut device), VMMGRAPH_OK);
        assert_eq!(vmmgraph_arena_create(device, null(), &raw mut arena), VMMGRAPH_OK);
        assert_eq!(vmmgraph_torch_set_arena(0, arena), VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_open(arena, &raw mut sealed), VMMGRAPH_OK);
        for bytes in [40 << 20, 700, 3 << 20] {
            assert_eq!(vmmgraph_space_allocate(sealed, bytes, null_mut(), &raw mut block), VMMGRAPH_OK);
        }
        assert_eq!(vmmgraph_space_seal(sealed, VMMGRAPH_RETAIN_DEFAULT, null_mut()), VMMGRAPH_OK);
        for stream in [1, 2] {
            let stream = stream as *mut c_void;
            assert_eq!(vmmgraph_space_replay(sealed, stream, Some(nothing), null_mut()), VMMGRAPH_OK);
        }
        assert_eq!(vmmgraph_space_open(arena, &raw mut open), VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_allocate(open, 20 << 20, null_mut(), &raw mut block), VMMGRAPH_OK);
        assert!(!vmmgraph_torch_alloc(5 << 20, 0, null_mut()).is_null());
    }
    assert!(descriptors_and_pages().1 > 0);
    let sinks = DROPPED.load(Relaxed);
    for what in order {
        let status = match what {
            0 => vmmgraph_device_close(device),
            1 => vmmgraph_arena_destroy(arena),
            2 => vmmgraph_space_destroy(open),
            3 => vmmgraph_space_destroy(sealed),
            4 => vmmgraph_torch_set_arena(0, null_mut()),
            _ => unsafe { vmmgraph_set_log_sink(None, null_mut(), None, VMMGRAPH_LOG_OFF) },
        };
        assert_eq!(status, VMMGRAPH_OK, "{what} in {order:?}");
    }
    assert_eq!(DROPPED.load(Relaxed), sinks + 1);
}

fn every_order() {
    let before = descriptors_and_pages();
    let orders = orders(6);
    assert_eq!(orders.len(), 720);
    for order in &orders {
        in_this_order(order);
        assert_eq!(descriptors_and_pages(), before, "{order:?}");
    }
}

/// Captures random shapes and drops the oldest ten thousand times; resources must stay constant.
fn capture_and_evict() {
    const CYCLES: u32 = 10_000;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 13) % n
    };
    let host =
        Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: 64 << 20 }).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let options = Options { small_page_bytes: 16 << 10, large_page_bytes: 128 << 10, ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let mut alive = VecDeque::new();
    let mut settled = None;
    let mut most = [0; 4];
    for cycle in 0..CYCLES {
        let space = arena.open_space().unwrap();
        let mut blocks = Vec::new();
        for _ in 0..random(12) + 1 {
            let class = random(4) as usize;
            let bytes = 1 + random(1 << [9, 14, 17, 19][class]);
            let block = space.allocate(bytes, stream(random(2))).unwrap();
            // SAFETY: a live block of at least one byte.
            unsafe { (block.0 as *mut u8).write_volatile(cycle as u8) };
            blocks.push(block);
            if random(3) > 0 {
                let pick = random(blocks.len() as u64) as usize;
                space.free(blocks.swap_remove(pick)).unwrap();
            }
        }
        blocks.truncate(2);
        let live = space.live_blocks();
        for block in live.iter().filter(|block| !blocks.contains(block)) {
            space.free(*block).unwrap();
        }
        space.seal().unwrap();
        space.replay(stream(random(3)), || ()).unwrap();
        alive.push_back(space);
        if alive.len() > 8 {
            drop(alive.pop_front());
        }
        if random(50) == 0 {
            arena.trim().unwrap();
        }
        if cycle % 500 == 499 {
            assert_eq!(device.pool().audit_idle(), Ok(()));
            let (descriptors, _) = descriptors_and_pages();
            let (addresses, memory) = addresses_and_memory();
            let [pages, _, _, events] = host.leftovers();
            // One for the arena's last mark and a few recycled ones.
            assert!(events <= 4, "{events} events");
            assert!(descriptors <= pages + 40, "{descriptors} descriptors for {pages} pages");
            let now =
                [descriptors as u64, addresses >> 20, memory >> 20, device.stats().physical_bytes >> 20];
            most = std::array::from_fn(|i| most[i].max(now[i]));
            if cycle + 1 == CYCLES / 5 {
                settled = Some(most);
            }
        }
    }
    let settled = settled.unwrap();
    println!(
        "descriptors, MiB of addresses, of memory, of pages: at most {settled:?} up to cycle 2000, {most:?} in all"
    );
    for (settled, most) in settled.into_iter().zip(most) {
        assert!(most <= settled + settled / 4 + 16, "grew from {settled} to {most}");
    }
    drop(alive);
    arena.trim().unwrap();
    let stats = device.stats();
    assert_eq!((stats.physical_bytes, stats.mappings, stats.reservations, stats.pending), (0, 0, 0, 0));
    assert_eq!(faulty.count("create"), stats.pages_released);
    assert_eq!(faulty.count("reserve"), faulty.count("free_addresses"));
    assert_eq!(stats.maps, stats.unmaps);
    drop((arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
    assert_eq!(faulty.count("event_create"), faulty.count("event_destroy"));
}

#[test]
fn nothing_stays_behind() {
    let _alone = alone();
    every_order();
    let before = descriptors_and_pages();
    capture_and_evict();
    assert_eq!(descriptors_and_pages(), before);
}
