//! Pause of one object. A failed page stays mapped, and the rest continues.

use std::time::{Duration, Instant};

use super::copies::behind_copies;
use super::page::Left;
use super::state::PauseGuard;
use super::{Moved, Pausable, PausePage, PauseReport, Phase};
use crate::error::Result;
use crate::pages::Fence;
use crate::units::Address;

/// Frees its pages, as far as possible. Fails, with nothing changed, if the fence cannot be waited
/// for, the object refuses, or the caller is a hook.
pub(crate) fn pause(object: &dyn Pausable, fence: Fence) -> Result<PauseReport> {
    let (start, mut report) = (Instant::now(), PauseReport::default());
    if !object.usable() {
        return Ok(report);
    }
    let pool = object.pausables().pool();
    let _go_on = pool.begin_waits()?;
    let Some(mut guard) = PauseGuard::begin_pause(object)? else { return Ok(report) };
    report.regions = u64::from(guard.was_resident());
    wait_for_users(object, fence)?;
    report.kept_bytes = object.kept_bytes();
    let hold = object.hold();
    let pages: Vec<_> = object.pages().into_iter().filter(PausePage::present).collect();
    if !pages.is_empty() {
        let ranges = object.moved_ranges(true);
        call_hooks(object, object.pause_state().generation(), &ranges, true);
        move_out(object, pages, &mut report);
    }
    guard.set(Phase::Paused);
    drop(hold);
    drop(guard);
    report.micros = start.elapsed().as_micros() as u64;
    let (id, tag, failures) = (object.id(), object.tag(), report.failures.len());
    let PauseReport { bytes, copied_bytes: copied, micros, .. } = report;
    tracing::info!(id, tag, bytes, copied, failures, micros, "paused {}", object.pause_state().what());
    pool.check();
    Ok(report)
}

/// Excludes users of a resident object until the result is dropped, after waiting for them. `None`:
/// the object is paused.
pub(crate) fn exclude_users(object: &dyn Pausable, fence: Fence) -> Result<Option<PauseGuard<'_>>> {
    let guard = PauseGuard::begin_pause(object)?.filter(PauseGuard::was_resident);
    if guard.is_some() {
        wait_for_users(object, fence)?;
    }
    Ok(guard)
}

/// Waits for the caller's fence, the last resume and the object's own users.
fn wait_for_users(object: &dyn Pausable, mut fence: Fence) -> Result<()> {
    fence.join(object.pause_state().contents());
    object.add_users(&mut fence);
    fence.block(object.pausables().pool().events(), Duration::MAX).map(drop)
}

/// Calls hooks, unless no address moves. The caller has no lock.
pub(super) fn call_hooks(object: &dyn Pausable, generation: u64, ranges: &[(Address, u64)], gone: bool) {
    if !ranges.is_empty() {
        let moved = Moved { tag: object.tag(), region: object.id(), generation, ranges };
        object.pausables().call_hooks(&moved, gone);
    }
}

fn move_out(object: &dyn Pausable, mut pages: Vec<PausePage>, report: &mut PauseReport) {
    let (device, state) = (object.pausables(), object.pause_state());
    let bytes: u64 =
        state.with_copies(|copies| pages.iter_mut().map(|page| page.plan(copies.get(&page.key()))).sum());
    if bytes > 0
        && let Err(error) = device.host_pool().make_room(bytes)
    {
        // Each page without room is reported.
        tracing::warn!(%error, bytes, "the host has no room for all contents");
    }
    let start = Instant::now();
    let left = if bytes > 0 {
        let copy = |page: &PausePage| page.save(device, report);
        behind_copies(pages, copy, |page, copied| page.release(device, copied))
    } else {
        pages.into_iter().map(|page| page.release(device, None)).collect()
    };
    let last = left.iter().filter_map(Left::copied).max();
    report.copy_micros = last.map_or(0, |last| last.duration_since(start).as_micros() as u64);
    let moved: Vec<_> = left.iter().filter_map(Left::moved).collect();
    state.add_copies(device.host_pool(), left.into_iter().filter_map(|left| left.count(report)));
    object.record(&moved, &Fence::default());
}
