use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use super::account::with_account;
use super::elastic::{
    vmmgraph_committed_t, vmmgraph_elastic_observer_t, vmmgraph_elastic_options_t, vmmgraph_elastic_stats_t,
    vmmgraph_pending_t, vmmgraph_shown_fn, vmmgraph_shown_t,
};
use super::guard::{Failure, copy_items, items, out};
use super::handle::register;
use super::kv::vmmgraph_block_range_t;
use super::pause::{fence_with, vmmgraph_fence_t};
use super::pause_hooks::vmmgraph_range_t;
use super::sized::{OutStruct, limit, options};
use super::text::text;
use crate::error;
use crate::pages::{Account, Fence, Limits};
use crate::{Address, Committed, Device, ElasticObserver, ElasticOptions, ElasticStats, Pending, Shown};

/// Null: the defaults.
pub(super) unsafe fn with_options<R>(
    given: *const vmmgraph_elastic_options_t,
    then: impl FnOnce(&ElasticOptions<'_>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    // SAFETY: contract.
    let Some(given) = (unsafe { options(given) })? else { return then(&ElasticOptions::default()) };
    // SAFETY: contract.
    let name = if given.name.is_null() { String::new() } else { unsafe { text(given.name, "name") }? };
    with_account(given.account, |account| {
        then(&ElasticOptions {
            name: &name,
            page_bytes: given.page_bytes,
            budget_bytes: limit(given.budget_bytes),
            least_bytes: given.least_bytes,
            account,
        })
    })
}

/// Events may be destroyed after the call. Null: an empty fence.
pub(super) unsafe fn fence_of(device: &Device, fence: *const vmmgraph_fence_t) -> Result<Fence, Failure> {
    // SAFETY: the caller's contract; the events exist during the call.
    unsafe {
        fence_with(device, fence, |events, made, event| {
            if let Some(mark) = events.follow(event)? {
                made.add_mark(mark);
            }
            Ok(())
        })
    }
}

pub(super) unsafe fn read_ranges(
    ranges: *const vmmgraph_block_range_t,
    count: usize,
) -> Result<Vec<Range<u64>>, Failure> {
    // SAFETY: contract.
    Ok(unsafe { items(ranges, count, "ranges") }?.iter().map(|range| range.first..range.end).collect())
}

pub(super) unsafe fn committed(
    done: *mut vmmgraph_committed_t,
    commit: impl FnOnce() -> error::Result<Committed>,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let to = unsafe { OutStruct::optional(done, "done") }?;
    let Committed { bytes, pages, created, revived } = commit()?;
    if let Some(to) = to {
        to.write(vmmgraph_committed_t { struct_size: to.struct_size, bytes, pages, created, revived });
    }
    Ok(())
}

pub(super) unsafe fn write_number(to: *mut u64, value: u64) -> Result<(), Failure> {
    // SAFETY: contract.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = value;
    }
    Ok(())
}

pub(super) unsafe fn copy_counted<T: Copy>(
    from: &[T],
    to: *mut T,
    capacity: usize,
    count: *mut usize,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let count = unsafe { out(count, "count") }?;
    // SAFETY: contract.
    unsafe { copy_items(from, to, capacity) }?;
    *count = from.len();
    Ok(())
}

pub(super) unsafe fn write_stats(
    to: *mut vmmgraph_elastic_stats_t,
    stats: impl FnOnce() -> ElasticStats,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let (to, stats) = (unsafe { OutStruct::new(to, "stats") }?, stats());
    to.write(vmmgraph_elastic_stats_t {
        struct_size: to.struct_size,
        id: stats.id,
        page_bytes: stats.page_bytes,
        reserved_bytes: stats.reserved_bytes,
        committed_bytes: stats.committed_bytes,
        peak_committed_bytes: stats.peak_committed_bytes,
        coming_bytes: stats.coming_bytes,
        pending_unmap_bytes: stats.pending_unmap_bytes,
        commits: stats.commits,
        refused: stats.refused,
        decommits: stats.decommits,
        pages_mapped: stats.pages_mapped,
        pages_created: stats.pages_created,
        pages_revived: stats.pages_revived,
        pages_unmapped: stats.pages_unmapped,
        charged_bytes: stats.account.charged_bytes,
        budget_bytes: stats.account.most_bytes.unwrap_or(0),
    });
    Ok(())
}

pub(super) unsafe fn write_ranges(
    found: &[Range<u64>],
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    count: *mut usize,
) -> Result<(), Failure> {
    let found: Vec<_> = found.iter().map(vmmgraph_block_range_t::of).collect();
    // SAFETY: contract.
    unsafe { copy_counted(&found, ranges, capacity, count) }
}

pub(super) fn set_budget(account: &Account, bytes: u64) -> Result<(), Failure> {
    account.set_limits(Limits { most: limit(bytes), least: account.stats().least_bytes });
    Ok(())
}

/// # Safety
/// The functions may be called with the pointer from any thread until the observer is destroyed.
pub(super) unsafe fn observed(
    (after_map, before_unmap, user): (vmmgraph_shown_fn, vmmgraph_shown_fn, *mut c_void),
    observer: *mut vmmgraph_elastic_observer_t,
    observe: impl FnOnce(&Arc<dyn ElasticObserver>),
) -> Result<(), Failure> {
    // SAFETY: contract.
    let observer = unsafe { out(observer, "observer") }?;
    let made = Arc::new(Observer { after_map, before_unmap, user });
    let told: Arc<dyn ElasticObserver> = made.clone();
    observe(&told);
    *observer = register(made);
    Ok(())
}

pub(super) unsafe fn hand_over(pending: Pending, to: *mut vmmgraph_pending_t) {
    // SAFETY: contract.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = register(Arc::new(pending));
    }
}

pub(super) struct Observer {
    after_map: vmmgraph_shown_fn,
    before_unmap: vmmgraph_shown_fn,
    user: *mut c_void,
}

// SAFETY: the caller of an observe function permits calls with `user` from any thread.
unsafe impl Send for Observer {}
// SAFETY: as above.
unsafe impl Sync for Observer {}

impl Observer {
    fn tell(&self, function: vmmgraph_shown_fn, shown: &Shown<'_>) {
        let Some(function) = function else { return };
        let mut name: Vec<u8> = shown.name.bytes().filter(|byte| *byte != 0).collect();
        name.push(0);
        let range = |(at, bytes): &(Address, u64)| vmmgraph_range_t { address: at.0, bytes: *bytes };
        let ranges: Vec<_> = shown.ranges.iter().map(range).collect();
        let told = vmmgraph_shown_t {
            struct_size: size_of::<vmmgraph_shown_t>(),
            name: name.as_ptr().cast(),
            buffer: shown.buffer,
            ranges: ranges.as_ptr(),
            range_count: ranges.len(),
        };
        // SAFETY: the caller of an observe function permits this call.
        unsafe { function(&raw const told, self.user) };
    }
}

impl ElasticObserver for Observer {
    fn after_map(&self, shown: &Shown<'_>) {
        self.tell(self.after_map, shown);
    }
    fn before_unmap(&self, shown: &Shown<'_>) {
        self.tell(self.before_unmap, shown);
    }
}
