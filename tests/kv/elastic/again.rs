//! Pages and blocks revived before their previous users are done: new users wait, and the unmap
//! follows both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmmgraph::pages::Fence;
use vmmgraph::{Error, KvLayout};
use vmmgraph_testkit::{MIB, stream};

use super::{A, bench, cache, now};

/// The user in [`super::Bench::fence`]. During its capture, no event can mark its end.
const USER: vmmgraph::Stream = stream(0x50);

#[test]
fn a_page_that_came_back_unused_goes_behind_those_who_had_it_before() {
    let bench = bench();
    let buffer = bench.buffer(16 * MIB);
    buffer.commit(0..4 * MIB).unwrap();
    bench.faulty.set_capturing(USER, true);
    let unmaps = bench.faulty.count("unmap");
    buffer.decommit(0..2 * MIB, &bench.fence()).unwrap();
    assert_eq!(buffer.commit(0..2 * MIB).unwrap().revived, 1);
    buffer.decommit(0..2 * MIB, &now()).unwrap();
    assert_eq!((buffer.reap(), bench.faulty.count("unmap")), (0, unmaps), "unmapped under its user");
    bench.faulty.set_capturing(USER, false);
    assert_eq!((buffer.reap(), buffer.stats().pending_unmap_bytes), (2 * MIB, 0));
    assert_eq!((buffer.audit(), bench.faulty.broken_captures()), (Ok(()), vec![]));
    drop(buffer);
    bench.end();
}

/// New pages need not wait for users of revived neighbours.
#[test]
fn pages_that_went_with_others_are_behind_their_own_users_only() {
    let bench = bench();
    let buffer = bench.buffer(16 * MIB);
    buffer.commit(0..2 * MIB).unwrap();
    bench.faulty.set_capturing(USER, true);
    buffer.decommit(0..2 * MIB, &bench.fence()).unwrap();
    buffer.commit(0..8 * MIB).unwrap();
    buffer.decommit(0..8 * MIB, &now()).unwrap();
    assert_eq!((buffer.stats().pending_unmap_bytes, buffer.stats().pages_unmapped), (2 * MIB, 3));
    assert_eq!(buffer.before(A), Ok(()), "nobody has what he had");
    buffer.commit(0..4 * MIB).unwrap();
    buffer.decommit(0..4 * MIB, &now()).unwrap();
    assert_eq!((buffer.stats().pending_unmap_bytes, buffer.stats().pages_unmapped), (2 * MIB, 4));
    let cache = cache(&bench.device, KvLayout::ByPlane, &[MIB / 4], 64);
    cache.commit(0..2).unwrap();
    cache.release(1..2, &bench.fence()).unwrap();
    cache.commit(1..64).unwrap();
    // The neighbour kept the first page, and the previous user of the second block may still run.
    cache.release(0..64, &now()).unwrap();
    let memory = cache.stats().memory;
    assert_eq!((memory.pending_unmap_bytes, memory.pages_unmapped), (2 * MIB, 7));
    bench.faulty.set_capturing(USER, false);
    assert_eq!((buffer.reap(), cache.reap()), (2 * MIB, 2 * MIB));
    assert_eq!((buffer.audit(), cache.audit(), cache.before(A)), (Ok(()), Ok(()), Ok(())));
    drop((buffer, cache));
    bench.end();
}

/// Driver calls are slow during a commit: releasing calls leave unmaps to the committing thread.
#[test]
fn a_release_during_a_commit_leaves_the_unmap_to_the_thread_that_commits() {
    let bench = bench();
    let cache = cache(&bench.device, KvLayout::ByPlane, &[2 * MIB], 64);
    cache.commit(0..2).unwrap();
    let (there, released, faulty) =
        (Arc::clone(&cache), AtomicBool::new(false), Arc::downgrade(&bench.faulty));
    bench.faulty.set_hook(Some(Arc::new(move |_: &str| {
        if !released.swap(true, Ordering::SeqCst) {
            let faulty = faulty.upgrade().unwrap();
            let unmaps = faulty.count("unmap");
            there.release(0..2, &now()).unwrap();
            assert_eq!((there.backed(), faulty.count("unmap")), (vec![], unmaps));
        }
    })));
    cache.commit(8..10).unwrap();
    bench.faulty.set_hook(None);
    let memory = cache.stats().memory;
    assert_eq!((cache.backed(), memory.pending_unmap_bytes, memory.pages_unmapped), (vec![8..10], 0, 2));
    assert_eq!(cache.audit(), Ok(()));
    drop(cache);
    bench.end();
}

/// Releases during a commit by a library thread.
#[test]
fn blocks_that_are_released_twice_while_others_come_go_behind_the_first_fence() {
    let bench = bench();
    let cache = cache(&bench.device, KvLayout::ByPlane, &[2 * MIB], 64);
    cache.commit(0..2).unwrap();
    bench.faulty.set_capturing(USER, true);
    let (there, fence, released) = (Arc::clone(&cache), bench.fence(), AtomicBool::new(false));
    bench.faulty.set_hook(Some(Arc::new(move |_: &str| {
        if !released.swap(true, Ordering::SeqCst) {
            there.release(0..2, &fence).unwrap();
            there.shrink_to(0, &[], &now()).unwrap();
        }
    })));
    cache.commit_async(8..10).unwrap().wait().unwrap();
    bench.faulty.set_hook(None);
    cache.reap();
    let memory = cache.stats().memory;
    assert_eq!((memory.committed_bytes, memory.pending_unmap_bytes), (0, 4 * MIB), "unmapped under its user");
    bench.faulty.set_capturing(USER, false);
    assert_eq!((cache.reap(), cache.audit()), (4 * MIB, Ok(())));
    drop(cache);
    bench.end();
}

#[test]
fn what_is_dropped_goes_behind_those_whose_pages_and_blocks_had_been_given_back() {
    for caches in [false, true] {
        let bench = bench();
        bench.faulty.set_capturing(USER, true);
        let unmaps = bench.faulty.count("unmap");
        if caches {
            let cache = cache(&bench.device, KvLayout::ByBlock, &[MIB / 4], 64);
            cache.commit(0..2).unwrap();
            cache.release(1..2, &bench.fence()).unwrap();
        } else {
            let buffer = bench.buffer(4 * MIB);
            buffer.commit(0..2 * MIB).unwrap();
            buffer.decommit(0..2 * MIB, &bench.fence()).unwrap();
            assert_eq!(buffer.commit(0..2 * MIB).unwrap().revived, 1);
        }
        bench.device.give_back(Duration::ZERO);
        assert_eq!((bench.faulty.count("unmap"), bench.device.stats().pending), (unmaps, 1), "{caches}");
        bench.faulty.set_capturing(USER, false);
        bench.end();
    }
}

#[test]
fn a_decommit_waits_for_an_event_of_the_callers() {
    let bench = bench();
    let buffer = bench.buffer(4 * MIB);
    buffer.commit(0..4 * MIB).unwrap();
    let driver = bench.device.driver();
    let (event, mut fence) = (driver.event_create().unwrap(), Fence::default());
    // SAFETY: an event of this driver that outlives the fence; the driver treats streams as
    // numbers.
    unsafe {
        driver.event_record(event, USER).unwrap();
        fence.add_event(bench.device.pool().events(), event);
    }
    bench.faulty.set_busy(true);
    buffer.decommit(0..4 * MIB, &fence).unwrap();
    assert_eq!((buffer.reap(), buffer.stats().pending_unmap_bytes), (0, 4 * MIB));
    bench.faulty.set_busy(false);
    assert_eq!(buffer.reap(), 4 * MIB);
    drop(fence);
    // SAFETY: created above.
    unsafe { driver.event_destroy(event) }.unwrap();
    drop(buffer);
    bench.end();
}

#[test]
fn a_block_that_came_back_on_a_page_that_stayed_waits_for_those_who_had_it_before() {
    for layout in [KvLayout::ByPlane, KvLayout::ByBlock] {
        let bench = bench();
        let cache = cache(&bench.device, layout, &[MIB / 4, MIB / 4], 64);
        cache.commit(0..2).unwrap();
        bench.faulty.set_capturing(USER, true);
        let unmaps = bench.faulty.count("unmap");
        cache.release(1..2, &bench.fence()).unwrap();
        assert_eq!(cache.before(A), Ok(()), "nobody has it");
        assert_eq!(cache.commit(1..2).unwrap().pages, 0);
        let waits = cache.before(A);
        assert_eq!(waits, Err(Error::StreamCapturing { stream: USER.raw() }), "{layout:?}");
        cache.release(0..2, &now()).unwrap();
        assert_eq!((cache.reap(), bench.faulty.count("unmap")), (0, unmaps), "unmapped under its user");
        bench.faulty.set_capturing(USER, false);
        assert!(cache.reap() > 0);
        assert_eq!((cache.before(A), cache.audit()), (Ok(()), Ok(())));
        drop(cache);
        bench.end();
    }
}
