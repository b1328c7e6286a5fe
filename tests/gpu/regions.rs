//! Regions on a real GPU: contents and speed of pauses. Ignored in `cargo test`; `scripts/gpu.sh`
//! runs these tests.
//!
//! `VMMGRAPH_REGION_GIB` sets the paused GiB, by default 16.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use vmmgraph::driver::CudaDriver;
use vmmgraph::pages::{CopyPath, Fence};
use vmmgraph::{
    Address, Device, ElasticOptions, Options, Policy, Region, RegionOptions, SharedVmmAllocator, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{MIB, child};

const GIB: u64 = 1 << 30;
const NOW: Duration = Duration::ZERO;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

fn device() -> Arc<Device> {
    // SAFETY: looks up a symbol of the stand-in.
    let standin = unsafe { sys::culib().get::<unsafe extern "C" fn() -> u64>(b"standin_calls\0") }.is_ok();
    assert!(!standin, "this is the stand-in, not a GPU");
    Device::with_driver(Arc::new(CudaDriver::new(0).expect("a GPU")))
}

fn all_bytes() -> u64 {
    std::env::var("VMMGRAPH_REGION_GIB").ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(16) * GIB
}

/// Measures copies between 1 GiB of pinned host memory and device memory, in GiB/s: out, in.
fn link(bytes: u64) -> [f64; 2] {
    let (mut context, mut stream, mut host, mut at) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0);
    // SAFETY: out pointers on this stack; all freed below.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuStreamCreate(&raw mut stream, 1));
        ok(sys::cuMemHostAlloc(&raw mut host, GIB as usize, 1));
        ok(sys::cuMemAlloc_v2(&raw mut at, GIB as usize));
    }
    let mut rates = [0.0; 2];
    for (out, rate) in rates.iter_mut().enumerate() {
        let start = Instant::now();
        for _ in 0..bytes / GIB {
            // SAFETY: both are 1 GiB long.
            unsafe {
                ok(if out == 0 {
                    sys::cuMemcpyDtoHAsync_v2(host, at, GIB as usize, stream)
                } else {
                    sys::cuMemcpyHtoDAsync_v2(at, host, GIB as usize, stream)
                });
            }
        }
        // SAFETY: a stream of this function.
        ok(unsafe { sys::cuStreamSynchronize(stream) });
        *rate = (bytes / GIB) as f64 / start.elapsed().as_secs_f64();
    }
    // SAFETY: created above.
    unsafe {
        ok(sys::cuMemFree_v2(at));
        ok(sys::cuMemFreeHost(host));
        ok(sys::cuStreamDestroy_v2(stream));
        ok(sys::cuCtxPopCurrent_v2(&raw mut context));
        ok(sys::cuDevicePrimaryCtxRelease_v2(0));
    }
    rates
}

/// Measures the driver alone in milliseconds: unmapping and releasing written pages of 1 GiB, then
/// creating and mapping as many: the lower bound of a pause and a resume.
fn driver_alone(bytes: u64) -> [f64; 2] {
    let (mut context, mut base) = (ptr::null_mut(), 0);
    // SAFETY: out pointers on this stack; all freed below.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuMemAddressReserve(&raw mut base, bytes as usize, 0, 0, 0));
    }
    let make = || {
        let mut pages = Vec::new();
        // SAFETY: plain data; addresses reserved above and unmapped.
        unsafe {
            let mut made: sys::CUmemAllocationProp = std::mem::zeroed();
            made.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            made.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.location = made.location;
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            for offset in (0..bytes).step_by(GIB as usize) {
                let mut page = 0;
                ok(sys::cuMemCreate(&raw mut page, GIB as usize, &raw const made, 0));
                ok(sys::cuMemMap(base + offset, GIB as usize, 0, page, 0));
                ok(sys::cuMemSetAccess(base + offset, GIB as usize, &raw const access, 1));
                pages.push((base + offset, page));
            }
        }
        pages
    };
    let give_back = |pages: Vec<_>| {
        for (at, page) in pages {
            // SAFETY: created above, no longer used.
            unsafe {
                ok(sys::cuMemUnmap(at, GIB as usize));
                ok(sys::cuMemRelease(page));
            }
        }
    };
    let pages = make();
    // SAFETY: mapped above.
    unsafe {
        ok(sys::cuMemsetD8_v2(base, 1, bytes as usize));
        ok(sys::cuCtxSynchronize());
    }
    let start = Instant::now();
    give_back(pages);
    let gave = start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let pages = make();
    let took = start.elapsed().as_secs_f64() * 1e3;
    give_back(pages);
    // SAFETY: reserved above, without mappings.
    unsafe {
        ok(sys::cuMemAddressFree(base, bytes as usize));
        ok(sys::cuCtxPopCurrent_v2(&raw mut context));
        ok(sys::cuDevicePrimaryCtxRelease_v2(0));
    }
    [gave, took]
}

fn say_driver_alone(bytes: u64) {
    let [gave, took] = driver_alone(bytes);
    println!(
        "RESULT the driver alone gives {} GiB back in {gave:.2} ms and takes them again in {took:.2}",
        bytes / GIB
    );
}

/// Measures the commit of a page in microseconds: without copies, during copies from the host,
/// during copies to the host.
fn say_mapping_beside_copies(device: &Arc<Device>) {
    const PAGES: u64 = 16;
    let (driver, bytes) = (device.driver(), GIB as usize);
    let stream = driver.stream_create().unwrap();
    let options = ElasticOptions { page_bytes: 2 * MIB, ..ElasticOptions::default() };
    let pages = device.elastic_buffer(PAGES * 2 * MIB, &options).unwrap();
    let other =
        device.elastic_buffer(GIB, &ElasticOptions { page_bytes: GIB, ..ElasticOptions::default() }).unwrap();
    other.commit(0..GIB).unwrap();
    let (mut context, mut host) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: out pointers on this stack; all freed below.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuMemHostAlloc(&raw mut host, bytes, 1));
    }
    let seen = ["nothing", "host to device", "device to host"].map(|beside| {
        let (raw, at) = (stream.raw() as sys::CUstream, other.base().0);
        // SAFETY: both are 1 GiB long; the stream belongs to this function.
        ok(unsafe {
            match beside {
                "host to device" => sys::cuMemcpyHtoDAsync_v2(at, host, bytes, raw),
                "device to host" => sys::cuMemcpyDtoHAsync_v2(host, at, bytes, raw),
                _ => sys::CUresult::CUDA_SUCCESS,
            }
        });
        let start = Instant::now();
        for page in 0..PAGES {
            pages.commit(page * 2 * MIB..(page + 1) * 2 * MIB).unwrap();
        }
        let each = start.elapsed().as_micros() as u64 / PAGES;
        // SAFETY: the same stream.
        ok(unsafe { sys::cuStreamSynchronize(raw) });
        pages.decommit(0..PAGES * 2 * MIB, &Fence::default()).unwrap();
        pages.reap();
        format!("{each} us beside {beside}")
    });
    println!("RESULT a page is made and mapped in {}", seen.join(", "));
    drop((pages, other));
    // SAFETY: created above, no longer used.
    unsafe {
        ok(sys::cuMemFreeHost(host));
        ok(sys::cuCtxPopCurrent_v2(&raw mut context));
        ok(sys::cuDevicePrimaryCtxRelease_v2(0));
        driver.stream_destroy(stream).unwrap();
    }
}

struct Tensors {
    region: Arc<Region>,
    blocks: Vec<(Address, u64, u32)>,
}

impl Tensors {
    fn new(device: &Arc<Device>, options: RegionOptions, count: u64, bytes: u64) -> Self {
        let region = device.region("tensors", options).unwrap();
        let each = bytes / count;
        let blocks = (0..count).map(|number| {
            let at = region.allocate(each, Stream::LEGACY).unwrap();
            // SAFETY: a live block of a resident region.
            unsafe { device.driver().fill(at, each, number as u32 + 7, Stream::LEGACY) }.unwrap();
            (at, each, number as u32 + 7)
        });
        Self { blocks: blocks.collect(), region }
    }

    fn write(&self) {
        let driver = self.region.device().driver();
        for (at, bytes, word) in &self.blocks {
            // SAFETY: a live block of a resident region.
            unsafe { driver.fill(*at, *bytes, *word, Stream::LEGACY) }.unwrap();
        }
        self.check();
    }

    fn check(&self) {
        let driver = self.region.device().driver();
        for (at, bytes, word) in self.blocks.iter().step_by(self.blocks.len().div_ceil(64)) {
            for offset in (0..*bytes).step_by((bytes / 16).next_multiple_of(512) as usize).chain([bytes - 4])
            {
                let mut found = [0; 4];
                // SAFETY: inside a live block of a resident region.
                unsafe { driver.read(at.plus(offset), &mut found) }.unwrap();
                assert_eq!(u32::from_le_bytes(found), *word, "{at:?} + {offset:#x}");
            }
        }
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn backup_goes_at_the_speed_of_the_link() {
    let (device, bytes) = (device(), all_bytes());
    let start = Instant::now();
    device.host_pool().prepare(bytes + GIB).unwrap();
    let prepared = (bytes + GIB) as f64 / GIB as f64 / start.elapsed().as_secs_f64();
    let stats = device.host_pool().stats();
    println!(
        "RESULT prepare_backup: {prepared:.1} GiB/s, {} of {} bytes registered",
        stats.registered_bytes, stats.held_bytes
    );
    let [out, back] = link(bytes);
    println!("RESULT plain pinned copy: out {out:.1}, in {back:.1} GiB/s");
    for count in [1, 512, 8192] {
        say_driver_alone(bytes);
        for read_only in [false, true] {
            let options = RegionOptions { policy: Policy::Backup, read_only, ..RegionOptions::default() };
            let tensors = Tensors::new(&device, options, count, bytes);
            for round in 0..3 {
                let gone = tensors.region.pause(Fence::default()).unwrap();
                assert_eq!((gone.complete(), gone.left_bytes), (Ok(()), 0));
                assert!(gone.path <= CopyPath::Registered, "{gone:?}");
                let come = tensors.region.resume(NOW).unwrap();
                tensors.check();
                let rate = |micros: u64| bytes as f64 / GIB as f64 / (micros as f64 / 1e6);
                println!(
                    "RESULT backup of {} GiB, {count} tensors, {} pages, clean {read_only}, round {round}: pause {:.2} ms \
                     ({:.1} GiB/s, {:.2} of the link), resume {:.2} ms ({:.1} GiB/s, {:.2} of the link)",
                    bytes / GIB,
                    gone.pages,
                    gone.micros as f64 / 1e3,
                    rate(gone.micros),
                    rate(gone.micros) / out,
                    come.micros as f64 / 1e3,
                    rate(come.micros),
                    rate(come.micros) / back
                );
            }
        }
        device.trim().unwrap();
    }
}

/// Mapping during copies takes a millisecond per page. Mapping each page just before its copy would
/// triple the time.
#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn contents_of_small_pages_come_back_almost_as_fast() {
    const BYTES: u64 = 4 * GIB;
    let device = device();
    say_mapping_beside_copies(&device);
    device.host_pool().prepare(BYTES + GIB).unwrap();
    let [_, back] = link(BYTES);
    let options = RegionOptions { policy: Policy::Backup, page_bytes: 16 * MIB, ..RegionOptions::default() };
    let tensors = Tensors::new(&device, options, 512, BYTES);
    for _ in 0..3 {
        tensors.region.pause(Fence::default()).unwrap().complete().unwrap();
        let start = Instant::now();
        let (report, mut ready) = device.resume_async(&[], NOW).unwrap();
        let mapped = start.elapsed();
        ready[0].wait().unwrap();
        let all = start.elapsed();
        tensors.check();
        let of_the_link = BYTES as f64 / GIB as f64 / all.as_secs_f64() / back;
        println!(
            "RESULT backup of 4 GiB, {} pages of 16 MiB: made in {:.2} ms, mapped after {:.2}, there after {:.2} ({of_the_link:.2} of the link)",
            report.pages,
            report.waited_micros as f64 / 1e3,
            mapped.as_secs_f64() * 1e3,
            all.as_secs_f64() * 1e3
        );
        assert!(of_the_link > 0.6, "{of_the_link:.2} of the link");
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn discarding_takes_milliseconds_and_the_memory_is_the_drivers() {
    let (device, bytes) = (device(), all_bytes());
    let before = device.driver().free_bytes().unwrap();
    for count in [8192, 1, 512, 8192] {
        say_driver_alone(bytes);
        let tensors = Tensors::new(&device, RegionOptions::default(), count, bytes);
        // After a release, the driver is busy for some 100 ms, and creating pages takes ten times
        // as long.
        for (round, between) in [0, 0, 0, 100, 300, 300].into_iter().enumerate() {
            // Written pages take longer to release, and a pause waits for running work.
            tensors.write();
            let gone = device.pause(&["tensors"], Fence::default()).unwrap();
            let left = before.saturating_sub(device.driver().free_bytes().unwrap());
            std::thread::sleep(Duration::from_millis(between));
            let come = device.resume(&["tensors"], NOW).unwrap();
            println!(
                "RESULT discard of {} GiB, {count} tensors, {} pages, round {round}: pause {:.2} ms, {between} ms later resume {:.2} ms ({:.2} to make pages), {} MiB stay",
                bytes / GIB,
                gone.pages,
                gone.micros as f64 / 1e3,
                come.micros as f64 / 1e3,
                come.waited_micros as f64 / 1e3,
                left / MIB
            );
        }
        drop(tensors);
        device.trim().unwrap();
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn contents_serve_by_tag_while_others_are_copied() {
    let device = device();
    let options = RegionOptions { policy: Policy::Backup, ..RegionOptions::default() };
    let (weights, kv) = (device.region("weights", options).unwrap(), device.region("kv", options).unwrap());
    let mut blocks = Vec::new();
    for (region, word) in [(&weights, 11_u32), (&kv, 12)] {
        let at = region.allocate(GIB, Stream::LEGACY).unwrap();
        // SAFETY: a live block of a resident region.
        unsafe { device.driver().fill(at, GIB, word, Stream::LEGACY) }.unwrap();
        blocks.push((at, word));
    }
    for _ in 0..20 {
        device.pause(&[], Fence::default()).unwrap().complete().unwrap();
        let (_, mut ready) = device.resume_async(&["weights", "kv"], NOW).unwrap();
        for (ready, (at, word)) in ready.iter_mut().zip(&blocks) {
            ready.wait().unwrap();
            let mut found = [0; 4];
            // SAFETY: a live block of a region with restored contents.
            unsafe { device.driver().read(at.plus(GIB - 4), &mut found) }.unwrap();
            assert_eq!(u32::from_le_bytes(found), *word);
        }
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn a_pause_waits_for_who_uses_blocks_that_are_gone() {
    const BYTES: u64 = 64 * MIB;
    let device = device();
    let driver = device.driver();
    let [side, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let last = arena.open_space().unwrap();
    last.allocate_kept(MIB, other).unwrap();
    last.seal().unwrap();
    for kept in [false, true] {
        let space = arena.open_space().unwrap();
        let tensors = VmmTorchAllocator::new(&space);
        let block =
            if kept { space.allocate_kept(BYTES, side) } else { space.allocate(BYTES, side) }.unwrap();
        space.seal().unwrap();
        space.replay(side, || ()).unwrap();
        last.replay(other, || ()).unwrap();
        // Some 60 ms of work outside any replay; fills, since copies would delay the pause in the
        // copy engine.
        for _ in 0..3000 {
            // SAFETY: a live block and a stream of this test.
            unsafe { driver.fill(block, BYTES, 0x5a5a_5a5a, side) }.unwrap();
        }
        tensors.record_stream(block, side).unwrap();
        tensors.free(block, &[]).unwrap();
        drop((tensors, space));
        let done = device.pool().events().record(side).unwrap();
        assert!(!done.done().unwrap(), "too little work to tell");
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        assert_eq!(done.done(), Ok(true), "kept: {kept}: memory went while it was used");
        arena.resume(NOW).unwrap();
    }
    drop((last, arena));
    // SAFETY: created above, no longer used.
    [side, other].into_iter().for_each(|stream| unsafe { driver.stream_destroy(stream) }.unwrap());
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn elastic_memory_that_came_back_unused_goes_behind_those_who_had_it_before() {
    const BYTES: u64 = 64 * MIB;
    let device = device();
    let driver = device.driver();
    let side = driver.stream_create().unwrap();
    let options = ElasticOptions { page_bytes: BYTES, ..ElasticOptions::default() };
    let buffer = device.elastic_buffer(BYTES, &options).unwrap();
    buffer.commit(0..BYTES).unwrap();
    for _ in 0..3000 {
        // SAFETY: committed; a stream of this test.
        unsafe { driver.fill(buffer.base(), BYTES, 0x5a5a_5a5a, side) }.unwrap();
    }
    let mut fence = Fence::default();
    fence.add(device.pool().events(), side);
    let done = device.pool().events().record(side).unwrap();
    buffer.decommit(0..BYTES, &fence).unwrap();
    assert_eq!(buffer.commit(0..BYTES).unwrap().revived, 1);
    buffer.decommit(0..BYTES, &Fence::default()).unwrap();
    assert_eq!(
        (buffer.reap(), done.done()),
        (0, Ok(false)),
        "memory went while it was used, or that was too little work to tell"
    );
    done.block().unwrap();
    assert_eq!((buffer.reap(), buffer.stats().pending_unmap_bytes), (BYTES, 0));
    drop(buffer);
    // SAFETY: created above, no longer used.
    unsafe { driver.stream_destroy(side) }.unwrap();
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn contents_come_back_though_a_replay_moves_their_pages_meanwhile() {
    const BYTES: u64 = 2 * GIB;
    const PAGE: u64 = 256 * MIB;
    let device = device();
    let driver = device.driver();
    let [side, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    let options = Options { large_page_bytes: PAGE, ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let space = arena.open_space().unwrap();
    let passing = space.allocate(BYTES, side).unwrap();
    space.free(passing).unwrap();
    space.seal().unwrap();
    let scope = arena.eager_scope(side).unwrap();
    let result = scope.allocate(BYTES).unwrap();
    // SAFETY: a live block and the scope's stream.
    unsafe { driver.fill(result, BYTES, 0x1234_5678, side) }.unwrap();
    drop(scope);
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    // Free pages for resume and replay, so that neither waits for the driver.
    let options = ElasticOptions { page_bytes: PAGE, ..ElasticOptions::default() };
    let buffer = device.elastic_buffer(2 * BYTES, &options).unwrap();
    buffer.commit(0..2 * BYTES).unwrap();
    drop(buffer);
    let (_, mut ready) = device.resume_async(&[], NOW).unwrap();
    space.replay(other, || ()).unwrap();
    assert!(!ready[0].done().unwrap(), "copied too soon to tell");
    assert!(arena.eager_stats().graph_maps > 0, "no page moved");
    ready.iter_mut().for_each(|ready| ready.wait().unwrap());
    for at in (0..BYTES).step_by(MIB as usize) {
        let mut found = [0; 4];
        // SAFETY: a live block with restored contents.
        unsafe { driver.read(result.plus(at), &mut found) }.unwrap();
        assert_eq!(u32::from_le_bytes(found), 0x1234_5678, "at {at}");
    }
    arena.eager_blocks().free(result, &[]).unwrap();
    drop((space, arena));
    // SAFETY: created above, no longer used.
    [side, other].into_iter().for_each(|stream| unsafe { driver.stream_destroy(stream) }.unwrap());
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn a_new_block_is_behind_what_comes_back_to_its_place() {
    // Two blocks on one page; the second one keeps the page.
    const BYTES: u64 = GIB / 2;
    let device = device();
    let driver = device.driver();
    let [side, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    let options = RegionOptions { policy: Policy::Backup, page_bytes: GIB, ..RegionOptions::default() };
    let region = device.region("weights", options).unwrap();
    let [gone, stays] = [0; 2].map(|_| region.allocate(BYTES, side).unwrap());
    for at in [gone, stays] {
        // SAFETY: a live block and its stream.
        unsafe { driver.fill(at, BYTES, 1, side) }.unwrap();
    }
    region.pause(Fence::default()).unwrap().complete().unwrap();
    region.free(gone).unwrap();
    while region.stats().free_bytes < BYTES {}
    let (_, mut ready) = device.resume_async(&[], NOW).unwrap();
    let block = region.allocate(BYTES, other).unwrap();
    assert_eq!(block, gone);
    // SAFETY: as above.
    unsafe { driver.fill(block, BYTES, 2, other) }.unwrap();
    assert!(!ready[0].done().unwrap(), "copied too soon to tell");
    ready[0].wait().unwrap();
    let written = device.pool().events().record(other).unwrap();
    written.block().unwrap();
    for (block, value) in [(block, 2), (stays, 1)] {
        for at in (0..BYTES).step_by(MIB as usize) {
            let mut found = [0; 4];
            // SAFETY: a live block with restored contents.
            unsafe { driver.read(block.plus(at), &mut found) }.unwrap();
            assert_eq!(u32::from_le_bytes(found), value, "at {at}");
        }
    }
    drop((region, written));
    // SAFETY: created above, no longer used.
    [side, other].into_iter().for_each(|stream| unsafe { driver.stream_destroy(stream) }.unwrap());
}

/// A resume by a second caller is in progress.
#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn whoever_resumes_what_is_mapped_already_finds_the_contents() {
    const BYTES: u64 = 4 * GIB;
    let device = device();
    let driver = device.driver();
    let stream = driver.stream_create().unwrap();
    let options = RegionOptions { policy: Policy::Backup, ..RegionOptions::default() };
    let region = device.region("weights", options).unwrap();
    let block = region.allocate(BYTES, stream).unwrap();
    // SAFETY: a live block and its stream.
    unsafe { driver.fill(block, BYTES, 7, stream) }.unwrap();
    region.pause(Fence::default()).unwrap().complete().unwrap();
    let (_, mut ready) = device.resume_async(&[], NOW).unwrap();
    assert!(!ready[0].done().unwrap(), "copied too soon to tell");
    region.resume(NOW).unwrap();
    let mut found = [0; 4];
    // On a stream without any wait.
    // SAFETY: a live block with restored contents; stack memory, used until the wait below.
    unsafe { driver.copy_to_host(block.plus(BYTES - 4), found.as_mut_ptr(), 4, stream) }.unwrap();
    device.pool().events().record(stream).unwrap().block().unwrap();
    assert_eq!((u32::from_le_bytes(found), ready[0].done()), (7, Ok(true)));
    drop((region, ready));
    // SAFETY: created above, no longer used.
    unsafe { driver.stream_destroy(stream) }.unwrap();
}

/// Child process of `another_process_takes_the_memory_meanwhile`: takes all free memory until its
/// input ends.
#[test]
#[ignore = "SKIPPED: needs a GPU, and is another test's second process"]
fn hog() {
    if std::env::var_os("VMMGRAPH_HOG").is_none() {
        return;
    }
    let (mut context, mut free, mut total) = (ptr::null_mut(), 0, 0);
    // SAFETY: out pointers on this stack; memory is freed with the process.
    unsafe {
        ok(sys::cuInit(0));
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuMemGetInfo_v2(&raw mut free, &raw mut total));
    }
    let mut taken = Vec::new();
    let mut piece = 8 * GIB as usize;
    while piece >= 64 * MIB as usize {
        let mut at = 0;
        // SAFETY: as above.
        match unsafe { sys::cuMemAlloc_v2(&raw mut at, piece) } {
            sys::CUresult::CUDA_SUCCESS => {
                // SAFETY: newly allocated.
                ok(unsafe { sys::cuMemsetD8_v2(at, 0xff, piece) });
                taken.push(at);
            }
            _ => piece /= 2,
        }
    }
    // SAFETY: no arguments.
    ok(unsafe { sys::cuCtxSynchronize() });
    println!("TAKEN {} pieces of {free} bytes", taken.len());
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn another_process_takes_the_memory_meanwhile() {
    let device = device();
    let options = RegionOptions { policy: Policy::Backup, ..RegionOptions::default() };
    let tensors = Tensors::new(&device, options, 64, all_bytes());
    device.pause(&[], Fence::default()).unwrap().complete().unwrap();
    let mut other = child!("hog")
        .arg("--ignored")
        .env("VMMGRAPH_HOG", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("TAKEN")));
    let error = device.resume(&[], NOW).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let start = Instant::now();
    let error = device.resume(&[], Duration::from_millis(300)).unwrap_err();
    assert!(error.is_out_of_memory() && start.elapsed() >= Duration::from_millis(300), "{error}");
    assert!(tensors.region.stats().paused);
    let stdin = other.stdin.take().unwrap();
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(stdin);
    });
    let come = device.resume(&[], Duration::from_secs(60)).unwrap();
    ends.join().unwrap();
    assert!(other.wait().unwrap().success());
    tensors.check();
    println!(
        "RESULT another process had the memory: 2 resumes refused, the third waited {:.0} ms, contents right",
        come.waited_micros as f64 / 1e3
    );
}
