//! The end of a capture: what is still live is retained.
//!
//! A block that outlives its capture (a graph's output, a library's cached workspace, a constant made lazily) must not share
//! pages with other graphs, or their replays destroy it. By default the addresses such a block covers get pages that belong to
//! this space alone, so that the program behaves as if the graph had a private pool. Nothing is copied: a capture has
//! recorded work, not done it, so the first contents come with the first replay.
//!
//! ```text
//!   before   | large page 3                                     |      a retained block among others, long freed
//!   blocks   [ passing  ][ retained ][ passing             ]
//!   after    | small 7 | own | own | small 8 | small 9 | .. |   |      fillers are shared small pages; a page is never cut
//! ```

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::layout::{Layout, Unit};
use super::{Block, Core, Events, Phase, Placement, Space, State};
use crate::error::{Error, Result};
use crate::pages::{Change, Class, Mapping, PageId, PageNo, RangeId};

/// What becomes of blocks that are live when their capture ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RetainPolicy {
    /// They move to pages of their own: other graphs never touch them.
    #[default]
    Retain,
    /// They stay on shared pages: the next replay of another graph may overwrite them. For callers that copy their outputs out.
    Share,
    /// Their pages become the space's own as they are, passing blocks on them included, and none is exchanged for another; where another
    /// space, or another part of this one, shows such a page, the seal fails. For captures of whose pages somebody else has taken hold:
    /// NCCL registers buffers of captured collectives, and keeps the page that was there then.
    #[serde(rename = "in_place")]
    InPlace,
    /// As [`Retain`](Self::Retain), but for remote blocks, which stay where they are, on shared pages: the next replay of another graph may overwrite
    /// them. For peers that were told of their pages during the capture.
    #[serde(rename = "share_remote")]
    ShareRemote,
}

/// What a capture used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SealReport {
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Small shared pages this space shows.
    pub small_pages: u64,
    /// Large shared pages this space shows.
    pub large_pages: u64,
    /// Mappings made, each a map and a set-access call.
    pub maps: u64,
    /// Calls made to the driver: to reserve, create, map, set access and unmap.
    pub driver_calls: u64,
    /// Time spent in them, waiting for other spaces' calls included.
    pub driver_time: Duration,
    /// Bytes of pages that became this space's own.
    pub retained_bytes: u64,
    /// Blocks that were allocated in all.
    pub allocations: u64,
    /// A hash of the capture's plan: page sizes, which numbered page is where, every block's place and bytes in order, what is live at
    /// its end and the policy for that. In a stitched space the same for the same requests, in any process and whatever was captured before; so ranks can compare what
    /// they captured. (Places of kept blocks do not count; where [blocks are kept as before](crate::VmmTorchAllocator::keep_as_before), which ones are does, and so what was captured
    /// before. Those of a bump space depend on the arena's tape too, from its second range of
    /// addresses on.)
    pub layout_hash: u64,
    /// Blocks that are still live, by address.
    pub retained: Vec<Block>,
    /// Of these, [remote](Space::allocate_remote) ones. With 0, this seal exchanged no page that remote blocks are or were on. Else, by
    /// [`RetainPolicy::Retain`], those under them and under what lies beside may be others: peers are to be told after the seal. By other policies
    /// they are where they were.
    pub remote_blocks: u64,
    /// Their bytes.
    pub remote_bytes: u64,
}

impl Space {
    /// Ends the capture: no further blocks can be allocated, and the space can be replayed. Blocks that are still live are
    /// treated as the arena's policy says; those of a bump space stay on shared pages, kept ones where they are.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) unless the space is open. Out of memory or budget, also
    /// after everybody was asked to give some back, or what else the driver says: the space is open as before, and the
    /// call can be repeated. [`Error::WrongState`] also where [`RetainPolicy::InPlace`] fails; [`Error::Exported`] where a page would be exchanged that
    /// others have, by what [`export`](Self::export) said of this space: seal it in place, share its blocks, or take the pins away first; and
    /// [`Error::NotOffered`] where a page would be exchanged and graphs may not bear it
    /// ([`Capabilities::replace_under_graph`](crate::driver::Capabilities::replace_under_graph)): keep or share the block; and
    /// [`Error::WrongState`] where eager work has a page of a remote block, or could be about to take it. (If undoing fails as well the space can only be dropped.)
    pub fn seal(&self) -> Result<SealReport> {
        let policy = self.core.policy(&self.core.state.lock());
        self.seal_with(policy)
    }

    /// As [`seal`](Self::seal), with a policy of its own.
    ///
    /// # Errors
    /// As [`seal`](Self::seal); [`Error::InvalidArgument`] for a bump space and another policy than [`RetainPolicy::Share`].
    pub fn seal_with(&self, policy: RetainPolicy) -> Result<SealReport> {
        // Whoever seals says that the capture is over: memory may be waited for again, also by the seal itself.
        drop(self.core.state.lock().capture.take());
        // What this capture did not begin in: pages that only this space shows may change hands.
        self.core.common.spare_ranges.clear(self.core.common.pool());
        let report = self.core.relieved(|| self.core.seal(policy));
        // Blocks that this capture freed of other spaces: the events behind their streams can be recorded now.
        self.core.common.exchange_back();
        self.core.common.shared.settle_returning();
        self.core.common.pool().check();
        if let Ok(report) = &report {
            tracing::debug!(
                space = self.id(),
                label = self.label(),
                peak_live_bytes = report.peak_live_bytes,
                maps = report.maps,
                driver_us = report.driver_time.as_micros() as u64,
                retained = report.retained.len(),
                retained_bytes = report.retained_bytes,
                // Captures with collectives are sealed in place, or by what their program promised of their buffers.
                policy = ?policy,
                remote_blocks = report.remote_blocks,
                "space sealed"
            );
        }
        report
    }
}

impl Core {
    /// What a seal does unless it is told otherwise.
    pub(super) fn policy(&self, state: &State) -> RetainPolicy {
        match state.placement {
            Placement::Bump(_) => RetainPolicy::Share,
            _ => self.common.retain,
        }
    }

    fn seal(&self, policy: RetainPolicy) -> Result<SealReport> {
        self.common.usable()?;
        let mut state = self.state.lock();
        state.require(Phase::Open)?;
        let remote = state.live_remote();
        let start = Instant::now();
        let fillers = if policy == RetainPolicy::Share {
            self.common.shared.fix(&state.shown_remote()).map(|()| 0)
        } else {
            self.retain(&mut state, policy)
        };
        state.work.time += start.elapsed();
        let fillers = fillers?;
        if policy != RetainPolicy::Share {
            self.end_course(&state);
        }
        state.end_layout_hash(policy);
        state.end_placement();
        state.phase = Phase::Sealed;
        state.alone_since = self.common.pool().captures_if_over();
        state.captures_at_seal = Some(self.common.captures());
        self.sealed.store(true, Ordering::Release);
        state.opened = None;
        state.told = HashSet::new();
        state.ranges.shrink_to_fit();
        state.events.iter_mut().for_each(Events::end);
        let usage = state.usage();
        let (small_pages, large_pages) = state.placement.pages();
        let kept = state.kept.usage();
        Ok(SealReport {
            peak_live_bytes: usage.peak_bytes + kept.peak_bytes,
            small_pages: (small_pages + fillers) as u64,
            large_pages: large_pages as u64,
            maps: state.work.maps,
            driver_calls: state.work.calls,
            driver_time: state.work.time,
            retained_bytes: self.common.pool().held(self.own()).0,
            allocations: usage.allocations + kept.allocations,
            layout_hash: state.layout_hash.get(),
            retained: state.blocks(),
            remote_blocks: remote.0,
            remote_bytes: remote.1,
        })
    }

    /// Puts pages of the space's own under every small page's worth of addresses that live blocks cover; how many numbers of small
    /// pages were needed behind those that the slabs have. Nothing has changed if that fails.
    fn retain(&self, state: &mut State, policy: RetainPolicy) -> Result<usize> {
        let Placement::Stitched(layout) = &state.placement else {
            let expected = "a bump space's blocks stay on shared pages";
            return Err(Error::InvalidArgument { what: "the retain policy", value: 1, expected });
        };
        let Some(layout) = layout else { return Ok(0) };
        let small = self.common.shared.geometry().small();
        let slabs = layout.pages().0;
        let shown = state.shown();
        let stay = if policy == RetainPolicy::InPlace { shown.clone() } else { state.shown_remote() };
        self.common.shared.fix(&stay)?;
        let (change, told) = (Change::on(self.common.pool()), state.told.clone());
        let mut exchange =
            Exchange { core: self, change, policy, next: slabs, shown, told, fillers: HashSet::new() };
        let remote = layout.remote_tiles();
        let units: Vec<_> = (0..state.ranges.len()).map(|number| layout.units(number)).collect();
        let done = (|| {
            let mut tiles = Vec::new();
            for (number, range) in state.ranges.iter().enumerate() {
                let units = &units[number];
                for mapped in range.mapped() {
                    let unit = |at: u64| ((at / small) as usize).min(units.len());
                    let units = &units[unit(mapped.offset)..unit(mapped.offset + mapped.bytes)];
                    let remote = remote.contains(&(number, mapped.offset));
                    let tile = Tile { number, range: range.id(), mapped, units, remote };
                    if !exchange.keeps_its_page(&tile)? {
                        tiles.push(tile);
                    }
                }
            }
            let fresh = tiles.iter().flat_map(|tile| tile.units).filter(|unit| **unit != Unit::Idle).count();
            exchange.change.announce(fresh as u64 * small);
            tiles.iter().try_for_each(|tile| exchange.exchange(tile))?;
            Ok(tiles.iter().filter(|tile| !tile.remote).map(|tile| (tile.number, tile.mapped)).collect())
        })();
        let Exchange { change, next, fillers, .. } = exchange;
        // Those that peers are told of after this stay as well.
        let done = done.and_then(|exchanged: Vec<(usize, Mapping)>| {
            self.common.shared.fix(&fillers)?;
            Ok(exchanged)
        });
        let exchanged = match done {
            Ok(exchanged) => exchanged,
            Err(error) => {
                state.undo(change);
                return Err(error);
            }
        };
        let (calls, reserved) = change.commit();
        state.adopt(&self.common, calls, reserved);
        if !self.launched.load(Ordering::Acquire) {
            state.note_exchanged(&exchanged);
        }
        Ok(next - slabs)
    }
}

impl State {
    /// Remote blocks that are live, and their bytes.
    fn live_remote(&self) -> (u64, u64) {
        self.placement.layout().map_or((0, 0), Layout::live_remote)
    }

    /// The pages that it shows for remote blocks.
    fn shown_remote(&self) -> HashSet<PageId> {
        let Some(layout) = self.placement.layout() else { return HashSet::new() };
        let remote = layout.remote_tiles();
        if remote.is_empty() {
            return HashSet::new();
        }
        let ranges = self.ranges.iter().enumerate();
        let mapped =
            ranges.flat_map(|(number, range)| range.mapped().into_iter().map(move |at| (number, at)));
        mapped.filter(|(number, at)| remote.contains(&(*number, at.offset))).map(|(_, at)| at.page).collect()
    }

    /// The capture ends: what is live now gets other pages than what passed.
    fn end_layout_hash(&mut self, policy: RetainPolicy) {
        let mut placed: Vec<u64> = self.placement.blocks().iter().map(|live| live.serial).collect();
        let mut kept: Vec<u64> = self.kept.live().map(|(.., serial)| serial).collect();
        placed.sort_unstable();
        kept.sort_unstable();
        let policy = match policy {
            RetainPolicy::Retain => 0,
            RetainPolicy::Share => 1,
            RetainPolicy::InPlace => 2,
            RetainPolicy::ShareRemote => 3,
        };
        self.layout_hash.end(policy, &placed, &kept);
    }
}

/// The exchange of shared pages under retained blocks for pages of the space's own.
struct Exchange<'a> {
    core: &'a Core,
    change: Change<'a>,
    policy: RetainPolicy,
    /// The next number of a small page that nothing else in this space is on.
    next: usize,
    /// The pages that the space shows.
    shown: HashSet<PageId>,
    /// Those of them that others were told of.
    told: HashSet<PageId>,
    /// Fillers on which remote blocks lie now.
    fillers: HashSet<PageId>,
}

/// Where a page shows, and how its addresses are used.
struct Tile<'a> {
    /// The range's index.
    number: usize,
    range: RangeId,
    mapped: Mapping,
    units: &'a [Unit],
    remote: bool,
}

impl Tile<'_> {
    /// Whether all of it is retained, by units of so many bytes.
    fn is_wholly_retained(&self, small: u64) -> bool {
        let covered = self.units.len() as u64 * small >= self.mapped.bytes;
        covered && self.units.iter().all(|unit| *unit == Unit::Retained)
    }
}

impl Exchange<'_> {
    /// Whether its page may stay there: no retained block is on it, or it is the space's own now.
    fn keeps_its_page(&mut self, tile: &Tile) -> Result<bool> {
        let page = tile.mapped.page;
        let shared = &self.core.common.shared;
        if !tile.units.contains(&Unit::Retained) || tile.remote && self.policy == RetainPolicy::ShareRemote {
            return Ok(true);
        }
        let driver = self.core.common.pool().driver();
        let exchanges = self.policy != RetainPolicy::InPlace && driver.capabilities().replace_under_graph;
        let wholly = tile.is_wholly_retained(shared.geometry().small());
        // A page that only this space shows, all of it retained, changes hands: no call to the driver. Its number is for another.
        if (wholly || !exchanges) && self.change.hand_over(page, shared.holder(), self.core.own(), true) {
            return Ok(true);
        }
        if self.policy == RetainPolicy::InPlace {
            return Err(Error::wrong_state(
                "cannot seal in place: another space shows a page under a retained block; seal with another policy, or keep the block",
            ));
        }
        let instead =
            "a block that outlives its capture is to be a kept one, or on pages that only its space shows";
        driver.capabilities().require_replacing(driver.info(), instead)?;
        if self.told.contains(&page) && self.core.common.pool().is_exported(page) {
            return Err(Error::Exported { pages: vec![page.number()] });
        }
        Ok(false)
    }

    /// Gives a tile pages of the space's own under what is retained, and other small pages under what passed.
    fn exchange(&mut self, tile: &Tile) -> Result<()> {
        let Tile { range, mapped: Mapping { offset, bytes, .. }, units, remote, .. } = *tile;
        let shared = &self.core.common.shared;
        let small = shared.geometry().small();
        let wholly = tile.is_wholly_retained(small);
        // New pages first: that may fail, and then there is nothing to undo at the driver.
        let mut parts = Vec::new();
        let mut at = 0;
        for run in units.chunk_by(|a, b| a == b) {
            let length = run.len() as u64 * small;
            match run[0] {
                Unit::Idle => {}
                Unit::Retained => {
                    // Small ones, which any number of small pages can use once their blocks are freed.
                    let each = if wholly { length } else { small };
                    let own = (0..length / each)
                        .map(|_| self.change.take(each, self.core.own(), shared.account().id()));
                    parts.push((offset + at, own.collect::<Result<Vec<_>>>()?));
                }
                Unit::Passing => {
                    let mut pages = Vec::with_capacity(run.len());
                    for _ in run {
                        let no = PageNo { class: Class::Small, index: self.next as u32 };
                        // One that left and came back may be shown here under another number.
                        let page = shared.page_apart(&mut self.change, no, &self.shown, self.core.id)?;
                        self.shown.insert(page);
                        pages.push(page);
                        self.next += 1;
                    }
                    if remote {
                        self.fillers.extend(&pages);
                    }
                    parts.push((offset + at, pages));
                }
            }
            at += length;
        }
        self.change.unmap(range, offset, bytes)?;
        parts.iter().try_for_each(|(at, pages)| self.change.map(range, *at, pages))
    }
}
