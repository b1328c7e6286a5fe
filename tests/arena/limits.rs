//! Each exhausted resource returns its own status with numbers, without effect, and later calls
//! work.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the C functions' contracts are kept: every pointer is a local's"
)]

use std::ffi::{CStr, c_char};
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;
use std::sync::Arc;

use rustix::process::{Resource, Rlimit, setrlimit};
use vmmgraph::capi::*;
use vmmgraph::driver::{CudaDriver, Driver as _, HostDriver, Memory as _};
use vmmgraph::{Device, Error, HostOptions, Options, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{MIB, child};

const GIB: u64 = 1 << 30;
const A: Stream = Stream::LEGACY;

/// Runs one test of this file in a child process, which may change its limits.
fn in_a_child(test: &str) {
    let output = child!(test).env("VMMGRAPH_TEST_CHILD", "1").output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("service went on") && output.status.success(), "{text}");
}

fn is_child() -> bool {
    std::env::var_os("VMMGRAPH_TEST_CHILD").is_some()
}

struct C {
    device: vmmgraph_device_t,
    arena: vmmgraph_arena_t,
    space: vmmgraph_space_t,
}

impl C {
    fn new(driver: i32, ordinal: i32) -> Self {
        let mut options: vmmgraph_device_options_t = unsafe { zeroed() };
        options.struct_size = size_of::<vmmgraph_device_options_t>();
        (options.driver, options.device) = (driver, ordinal);
        let mut pages: vmmgraph_arena_options_t = unsafe { zeroed() };
        pages.struct_size = size_of::<vmmgraph_arena_options_t>();
        pages.large_page_bytes = 16 * MIB;
        let (mut device, mut arena, mut space) = (null_mut(), null_mut(), null_mut());
        unsafe {
            assert_eq!(vmmgraph_device_open(&raw const options, &raw mut device), VMMGRAPH_OK);
            assert_eq!(vmmgraph_arena_create(device, &raw const pages, &raw mut arena), VMMGRAPH_OK);
            assert_eq!(vmmgraph_space_open(arena, &raw mut space), VMMGRAPH_OK);
        }
        Self { device, arena, space }
    }

    fn allocate(&self, bytes: u64) -> i32 {
        let mut block = std::ptr::dangling_mut();
        let status = unsafe { vmmgraph_space_allocate(self.space, bytes, null_mut(), &raw mut block) };
        assert_eq!(block == std::ptr::dangling_mut(), status != VMMGRAPH_OK);
        status
    }

    fn refused(&self, bytes: u64, status: i32, requested: u64, available: u64, named: &[u64]) {
        let before = self.stats();
        assert_eq!(self.allocate(bytes), status);
        let mut info: vmmgraph_error_info_t = unsafe { zeroed() };
        info.struct_size = size_of::<vmmgraph_error_info_t>();
        let mut text = [0 as c_char; 256];
        unsafe {
            assert_eq!(vmmgraph_last_error(&raw mut info), VMMGRAPH_OK);
            assert_eq!(vmmgraph_last_error_message(text.as_mut_ptr(), text.len(), null_mut()), VMMGRAPH_OK);
        }
        assert_eq!(
            (info.status, info.requested, info.available, info.device),
            (status, requested, available, 0)
        );
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap();
        for number in named {
            assert!(text.contains(&number.to_string()), "no {number} in: {text}");
        }
        assert_eq!(self.stats(), before, "a refused call changed something");
    }

    fn stats(&self) -> [u64; 4] {
        let mut device: vmmgraph_device_stats_t = unsafe { zeroed() };
        device.struct_size = size_of::<vmmgraph_device_stats_t>();
        let mut arena: vmmgraph_arena_stats_t = unsafe { zeroed() };
        arena.struct_size = size_of::<vmmgraph_arena_stats_t>();
        unsafe {
            assert_eq!(vmmgraph_device_stats(self.device, &raw mut device), VMMGRAPH_OK);
            assert_eq!(vmmgraph_arena_stats(self.arena, &raw mut arena), VMMGRAPH_OK);
        }
        [device.pages, device.mappings, device.reserved_bytes, arena.live_bytes]
    }
}

impl Drop for C {
    fn drop(&mut self) {
        vmmgraph_space_destroy(self.space);
        vmmgraph_arena_destroy(self.arena);
        vmmgraph_device_close(self.device);
    }
}

#[test]
fn the_budget() {
    if !is_child() {
        return in_a_child("the_budget");
    }
    let c = C::new(VMMGRAPH_DRIVER_HOST, 0);
    assert_eq!(vmmgraph_device_set_budget(c.device, 40 * MIB), VMMGRAPH_OK);
    assert_eq!(c.allocate(20 * MIB), VMMGRAPH_OK);
    c.refused(34 * MIB, VMMGRAPH_ERROR_OVER_BUDGET, 32 * MIB, 8 * MIB, &[32 * MIB, 40 * MIB]);
    assert_eq!(c.allocate(8 * MIB), VMMGRAPH_OK);
    assert_eq!(vmmgraph_device_set_budget(c.device, 0), VMMGRAPH_OK);
    assert_eq!(vmmgraph_arena_set_budget(c.arena, 50 * MIB), VMMGRAPH_OK);
    c.refused(34 * MIB, VMMGRAPH_ERROR_OVER_BUDGET, 16 * MIB, 2 * MIB, &[16 * MIB, 48 * MIB, 50 * MIB]);
    assert_eq!(vmmgraph_arena_set_budget(c.arena, 0), VMMGRAPH_OK);
    assert_eq!(c.allocate(34 * MIB), VMMGRAPH_OK);
    println!("service went on");
}

#[test]
fn memory_that_another_process_takes_meanwhile() {
    if !is_child() {
        return in_a_child("memory_that_another_process_takes_meanwhile");
    }
    // The stand-in's memory is process-wide: a second driver plays the other process.
    let c = C::new(VMMGRAPH_DRIVER_CUDA, 0);
    let other = CudaDriver::new(0).unwrap();
    assert_eq!(c.allocate(20 * MIB), VMMGRAPH_OK);
    let (free, total) = (other.free_bytes().unwrap(), other.info().total_bytes);
    let taken = other.create(free - 20 * MIB).unwrap();
    c.refused(50 * MIB, VMMGRAPH_ERROR_OUT_OF_MEMORY, 32 * MIB, 4 * MIB, &[32 * MIB, 4 * MIB, total]);
    assert_eq!(c.allocate(4 * MIB), VMMGRAPH_OK);
    // SAFETY: created above.
    unsafe { other.release(taken) }.unwrap();
    assert_eq!(c.allocate(50 * MIB), VMMGRAPH_OK);
    println!("service went on");
}

#[test]
fn descriptors() {
    if !is_child() {
        return in_a_child("descriptors");
    }
    let c = C::new(VMMGRAPH_DRIVER_HOST, 0);
    assert_eq!(c.allocate(3 * MIB), VMMGRAPH_OK);
    setrlimit(Resource::Nofile, Rlimit { current: Some(60), maximum: Some(60) }).unwrap();
    c.refused(GIB, VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS, 16 * MIB, 0, &[16 * MIB, 60]);
    assert_eq!(c.allocate(40 * MIB), VMMGRAPH_OK);
    println!("service went on");
}

#[test]
fn addresses_that_the_process_may_have() {
    if !is_child() {
        return in_a_child("addresses_that_the_process_may_have");
    }
    let c = C::new(VMMGRAPH_DRIVER_HOST, 0);
    let pages: u64 =
        std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    let limit = |bytes| setrlimit(Resource::As, Rlimit { current: bytes, maximum: None }).unwrap();
    limit(Some(pages * 4096 + 400 * MIB));
    c.refused(3 * MIB, VMMGRAPH_ERROR_OUT_OF_ADDRESSES, GIB, 0, &[GIB]);
    assert_eq!(c.allocate(1000), VMMGRAPH_OK);
    limit(None);
    assert_eq!(c.allocate(3 * MIB), VMMGRAPH_OK);
    println!("service went on");
}

#[test]
fn host_memory_for_backups() {
    if !is_child() {
        return in_a_child("host_memory_for_backups");
    }
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let (host, held) = (device.host_pool(), || device.host_pool().stats().held_bytes);
    for bytes in [u64::MAX, u64::MAX - GIB, 1 << 63, (1 << 46) + 1] {
        let refused = Err(Error::InvalidSize { what: "host memory", bytes, limit: 1 << 46 });
        assert_eq!(host.prepare(bytes), refused);
    }
    let refused = host.prepare(1 << 46).unwrap_err();
    let Error::OutOfHostMemory { requested, held: 0, limit: 0, available: Some(left) } = refused else {
        panic!("{refused:?}")
    };
    assert!(requested == 1 << 46 && left < requested && refused.to_string().contains(&left.to_string()));
    // Memory is registered by the GiB: one GiB fits the limit, two do not, and none is kept.
    host.prepare(8 * MIB).unwrap();
    host.set_limit(Some(GIB + 64 * MIB));
    let refused = host.prepare(GIB + 128 * MIB);
    assert!(matches!(refused, Err(Error::OutOfHostMemory { held, .. }) if held == 8 * MIB), "{refused:?}");
    assert_eq!(held(), 8 * MIB);
    host.set_limit(None);
    // The operating system grants one and refuses the second.
    let pages: u64 =
        std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    let limit = |bytes| setrlimit(Resource::As, Rlimit { current: bytes, maximum: None }).unwrap();
    limit(Some(pages * 4096 + 1500 * MIB));
    let refused = host.prepare(2 * GIB);
    assert!(matches!(refused, Err(Error::OutOfHostMemory { .. })), "{refused:?}");
    assert_eq!((held(), host.trim()), (8 * MIB, Ok(8 * MIB)));
    limit(None);
    host.prepare(16 * MIB).unwrap();
    assert_eq!(held(), 16 * MIB);
    println!("service went on");
}

#[test]
fn every_address_there_is() {
    if !is_child() {
        return in_a_child("every_address_there_is");
    }
    let host =
        Arc::new(HostDriver::new(0, HostOptions { granularity: 2 * MIB, memory_bytes: 8 * GIB }).unwrap());
    let device = Device::with_driver(host.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let mut taken = Vec::new();
    let mut bytes = 1u64 << 46;
    while bytes >= 2 * GIB {
        match host.reserve(bytes) {
            Ok(base) => taken.push((base, bytes)),
            Err(_) => bytes /= 2,
        }
    }
    assert!(taken.iter().map(|(_, bytes)| bytes).sum::<u64>() > 1 << 46);
    let refused = Err(Error::OutOfAddresses { requested: 5 * GIB, device: 0 });
    assert_eq!(space.allocate(5 * GIB, A), refused);
    assert_eq!((device.stats().pages, device.stats().reservations), (0, 0));
    let (base, bytes) = *taken.iter().find(|(_, bytes)| *bytes > 5 * GIB).unwrap();
    // SAFETY: reserved above, without mappings.
    unsafe { host.free_addresses(base, bytes) }.unwrap();
    let block = space.allocate(5 * GIB, A).unwrap();
    assert!(block >= base && block.0 < base.0 + bytes);
    println!("service went on");
}

#[test]
fn a_granularity_that_pages_do_not_fit() {
    for (granularity, small, fits) in [
        (4 * MIB, 0, true),
        (4 * MIB, 2 * MIB, false),
        (4 * MIB, 8 * MIB, true),
        (32 * MIB, 0, false),
        (4096, 0, true),
    ] {
        let host = HostDriver::new(0, HostOptions { granularity, memory_bytes: GIB }).unwrap();
        let device = Device::with_driver(Arc::new(host));
        let options = Options { small_page_bytes: small, ..Options::default() };
        match SharedVmmAllocator::new(&device, &options) {
            Ok(arena) => {
                assert!(fits, "{granularity} {small}");
                assert!(arena.open_space().unwrap().allocate(5 * MIB, A).is_ok());
            }
            Err(error) => {
                let bytes = if small == 0 { granularity } else { small };
                assert_eq!(error, Error::InvalidPageSize { what: "small page", bytes, granularity });
                let text = error.to_string();
                assert!(
                    !fits && text.contains(&bytes.to_string()) && text.contains(&granularity.to_string())
                );
            }
        }
    }
}
