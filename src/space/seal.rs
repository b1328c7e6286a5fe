//! Seal: ends a capture and gives *live-out* (retained) blocks pages of their own, as replays of
//! other graphs overwrite shared pages. Nothing is copied: the first replay writes the first
//! contents.
//!
//! ```text
//!   before   | large page 3                                     |
//!   blocks   [ freed    ][ live-out ][ freed               ]
//!   after    | small 7 | own | own | small 8 | small 9 | .. |   |   fillers: small 7, 8, 9
//! ```
//!
//! With [`RetainPolicy::Retain`], each slot (addresses of one mapped page) has one of three
//! outcomes:
//!
//! * No live-out block: the slot keeps its shared page.
//! * Live-out bytes in each small-page unit: a page mapped nowhere else changes owner without a
//!   driver call, another is replaced by one own page of the same size.
//! * Otherwise the page is replaced: by small pages of the space under live-out blocks, by shared
//!   *filler* pages under freed blocks, and by nothing under unused addresses.
//!
//! On a platform which cannot replace pages under a graph (HIP, MLU), any page with a live-out
//! block and one mapping changes owner whole.
//!
//! The space's lock is held across the driver calls of a seal, not during the out-of-memory retry.
//! Invariants:
//!
//! * All replacements of a seal are one transaction. After an error the space is open as before, or
//!   broken if the driver refuses the undo.
//! * Except with [`RetainPolicy::Share`], each page under a live-out local block is owned by the
//!   space and mapped in no other space.
//! * A filler is a shared page which the space maps nowhere else.
//! * A page exported from this space and still pinned is never replaced.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::layout::{Layout, Unit};
use super::{Block, Core, Phase, Placement, Space, State};
use crate::error::{Error, Result};
use crate::pages::{Class, Mapping, PageId, PageNo, RangeId, Transaction};

/// Policy for live-out blocks: blocks still live at the end of their capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RetainPolicy {
    /// Maps pages of the space under the blocks.
    #[default]
    Retain,
    /// Leaves the blocks on shared pages, for callers which copy their outputs: replays of other
    /// graphs may overwrite them.
    Share,
    /// The pages under the blocks become the space's own, freed neighbours included; none is
    /// replaced. Fails if such a page is mapped elsewhere. For pages already registered by a
    /// library, such as NCCL's captured collectives.
    #[serde(rename = "in_place")]
    InPlace,
    /// Like [`Retain`](Self::Retain), but peer-visible (remote) blocks stay on shared pages. For
    /// peers which received the pages during the capture.
    #[serde(rename = "share_remote")]
    ShareRemote,
}

/// Resources used by a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SealReport {
    /// Peak bytes of live blocks.
    pub peak_live_bytes: u64,
    /// Small page numbers used, fillers included.
    pub small_pages: u64,
    /// Large page numbers used.
    pub large_pages: u64,
    /// Mappings made.
    pub maps: u64,
    /// Driver calls: reserve, create, map, set access and unmap.
    pub driver_calls: u64,
    /// Time of driver calls, waits for other spaces included.
    pub driver_time: Duration,
    /// Bytes of pages owned by this space.
    pub retained_bytes: u64,
    /// Blocks allocated in total.
    pub allocations: u64,
    /// Hash of the capture's layout: `vmmgraph_seal_report_t`.
    /// [Predictions](crate::VmmTorchAllocator::predict_retained), and so earlier captures, count.
    pub layout_hash: u64,
    /// Blocks still live, by address.
    pub retained: Vec<Block>,
    /// Live [peer-visible](Space::allocate_remote) blocks: see `vmmgraph_seal_report_t`.
    pub remote_blocks: u64,
    /// Bytes of these blocks.
    pub remote_bytes: u64,
}

impl Space {
    /// Ends the capture by the arena's policy: `vmmgraph_space_seal`.
    ///
    /// # Errors
    /// [`Error::WrongState`] also if eager work may take the page of a peer-visible block.
    /// [`Error::Exported`] if a pinned page [exported](Self::export) from this space would be
    /// replaced: seal in place, share the blocks, or remove the pins. [`Error::NotOffered`] if
    /// captured graphs do not permit a replacement
    /// ([`Capabilities::replace_under_graph`](crate::driver::Capabilities::replace_under_graph)):
    /// make the block persistent or share it. If the driver refuses the undo, the space can only be
    /// dropped.
    pub fn seal(&self) -> Result<SealReport> {
        let policy = self.core.policy(&self.core.state.lock());
        self.seal_with(policy)
    }

    /// [Seals](Self::seal) with the given policy; a bump space permits only [`RetainPolicy::Share`]
    /// ([`Error::InvalidArgument`]).
    pub fn seal_with(&self, policy: RetainPolicy) -> Result<SealReport> {
        // Calls may wait for memory again.
        self.core.state.lock().stage.end_capture();
        // Pages mapped only in this space can then change owner.
        self.core.common.spare_ranges.clear(self.core.common.pool());
        let report = self.core.with_memory_retry(|| self.core.seal(policy));
        // Events of blocks freed in other spaces can be recorded now.
        self.core.common.restore_replaced();
        self.core.common.shared.reap_returning();
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
                policy = ?policy,
                remote_blocks = report.remote_blocks,
                "space sealed"
            );
        }
        report
    }
}

impl Core {
    pub(super) fn policy(&self, state: &State) -> RetainPolicy {
        match state.placement {
            Placement::Bump(_) => RetainPolicy::Share,
            _ => self.common.retain,
        }
    }

    fn seal(&self, policy: RetainPolicy) -> Result<SealReport> {
        self.common.require_usable()?;
        let mut state = self.state.lock();
        state.require(Phase::Open)?;
        let remote = state.live_remote();
        let start = Instant::now();
        let fillers = if policy == RetainPolicy::Share {
            self.common.shared.pin_pages(&state.shown_remote()).map(|()| 0)
        } else {
            self.retain(&mut state, policy)
        };
        state.work.add_time(start.elapsed());
        let fillers = fillers?;
        if policy != RetainPolicy::Share {
            self.end_lifetime_trace(&state);
        }
        state.end_layout_hash(policy);
        state.end_placement();
        state.replaced.seal(&self.common);
        self.sealed.store(true, Ordering::Release);
        state.stage.seal();
        state.exported = HashSet::new();
        state.ranges.shrink_to_fit();
        state.observed.end();
        let usage = state.usage();
        let (small_pages, large_pages) = state.placement.pages();
        let kept = state.kept.usage();
        Ok(SealReport {
            peak_live_bytes: usage.peak_bytes + kept.peak_bytes,
            small_pages: (small_pages + fillers) as u64,
            large_pages: large_pages as u64,
            maps: state.work.maps(),
            driver_calls: state.work.calls(),
            driver_time: state.work.time(),
            retained_bytes: self.common.pool().held(self.own()).0,
            allocations: usage.allocations + kept.allocations,
            layout_hash: state.layout_hash.get(),
            retained: state.blocks(),
            remote_blocks: remote.0,
            remote_bytes: remote.1,
        })
    }

    /// Gives each small-page unit with a live-out block pages of the space. Returns the small page
    /// numbers used beyond the slabs. Changes nothing on error.
    fn retain(&self, state: &mut State, policy: RetainPolicy) -> Result<usize> {
        let Placement::Stitched(layout) = &state.placement else {
            let expected = "shared_pages in a bump space";
            return Err(Error::InvalidArgument { what: "the retain policy", value: 1, expected });
        };
        let Some(layout) = layout else { return Ok(0) };
        let small = self.common.shared.geometry().small();
        let slabs = layout.pages().0;
        let shown = state.shown();
        let stay = if policy == RetainPolicy::InPlace { shown.clone() } else { state.shown_remote() };
        self.common.shared.pin_pages(&stay)?;
        let (transaction, exported) = (Transaction::on(self.common.pool()), state.exported.clone());
        let mut replacement = Replacement {
            core: self,
            transaction,
            policy,
            next: slabs,
            shown,
            exported,
            fillers: HashSet::new(),
        };
        let remote = layout.remote_slots();
        let units: Vec<_> = (0..state.ranges.len()).map(|number| layout.units(number)).collect();
        let done = (|| {
            let mut slots = Vec::new();
            for (number, range) in state.ranges.iter().enumerate() {
                let units = &units[number];
                for mapped in range.mapped() {
                    let unit = |at: u64| ((at / small) as usize).min(units.len());
                    let units = &units[unit(mapped.offset)..unit(mapped.offset + mapped.bytes)];
                    let remote = remote.contains(&(number, mapped.offset));
                    let slot = SealedSlot { number, range: range.id(), mapped, units, remote };
                    if !replacement.keeps_its_page(&slot)? {
                        slots.push(slot);
                    }
                }
            }
            let fresh = slots.iter().flat_map(|slot| slot.units).filter(|unit| **unit != Unit::Idle).count();
            replacement.transaction.expect_bytes(fresh as u64 * small);
            slots.iter().try_for_each(|slot| replacement.replace(slot))?;
            Ok(slots.iter().filter(|slot| !slot.remote).map(|slot| (slot.number, slot.mapped)).collect())
        })();
        let Replacement { transaction, next, fillers, .. } = replacement;
        // Peers may receive the fillers later.
        let done = done.and_then(|replaced: Vec<(usize, Mapping)>| {
            self.common.shared.pin_pages(&fillers)?;
            Ok(replaced)
        });
        let replaced = match done {
            Ok(replaced) => replaced,
            Err(error) => {
                state.undo(transaction);
                return Err(error);
            }
        };
        let (calls, reserved) = transaction.commit();
        state.adopt(&self.common, calls, reserved);
        if !self.launched.load(Ordering::Acquire) {
            state.note_replaced(&replaced);
        }
        Ok(next - slabs)
    }
}

impl State {
    fn live_remote(&self) -> (u64, u64) {
        self.placement.layout().map_or((0, 0), Layout::live_remote)
    }

    fn shown_remote(&self) -> HashSet<PageId> {
        let Some(layout) = self.placement.layout() else { return HashSet::new() };
        let remote = layout.remote_slots();
        if remote.is_empty() {
            return HashSet::new();
        }
        let ranges = self.ranges.iter().enumerate();
        let mapped =
            ranges.flat_map(|(number, range)| range.mapped().into_iter().map(move |at| (number, at)));
        mapped.filter(|(number, at)| remote.contains(&(*number, at.offset))).map(|(_, at)| at.page).collect()
    }

    /// Ends the hash: live-out blocks get different pages than freed ones.
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

struct Replacement<'a> {
    core: &'a Core,
    transaction: Transaction<'a>,
    policy: RetainPolicy,
    next: usize,
    shown: HashSet<PageId>,
    exported: HashSet<PageId>,
    /// Fillers under freed peer-visible blocks.
    fillers: HashSet<PageId>,
}

struct SealedSlot<'a> {
    number: usize,
    range: RangeId,
    mapped: Mapping,
    units: &'a [Unit],
    remote: bool,
}

impl SealedSlot<'_> {
    fn is_wholly_retained(&self, small: u64) -> bool {
        let covered = self.units.len() as u64 * small >= self.mapped.bytes;
        covered && self.units.iter().all(|unit| *unit == Unit::Retained)
    }
}

impl Replacement<'_> {
    /// Whether no live-out block is on the page, or the page is the space's own now.
    fn keeps_its_page(&mut self, slot: &SealedSlot) -> Result<bool> {
        let page = slot.mapped.page;
        let shared = &self.core.common.shared;
        if !slot.units.contains(&Unit::Retained) || slot.remote && self.policy == RetainPolicy::ShareRemote {
            return Ok(true);
        }
        let driver = self.core.common.pool().driver();
        let replaces = self.policy != RetainPolicy::InPlace && driver.capabilities().replace_under_graph;
        let wholly = slot.is_wholly_retained(shared.geometry().small());
        // Change of owner without a driver call. The page's number is free for a new page.
        if (wholly || !replaces) && self.transaction.hand_over(page, shared.owner(), self.core.own(), true) {
            return Ok(true);
        }
        if self.policy == RetainPolicy::InPlace {
            return Err(Error::wrong_state(
                "cannot seal in place: another space maps a page under a retained block; seal with another policy, or keep the block",
            ));
        }
        let instead =
            "a block that outlives its capture is to be a kept one, or on pages that only its space shows";
        driver.capabilities().require_replacing(driver.info(), instead)?;
        if self.exported.contains(&page) && self.core.common.pool().is_exported(page) {
            return Err(Error::Exported { pages: vec![page.number()] });
        }
        Ok(false)
    }

    fn replace(&mut self, slot: &SealedSlot) -> Result<()> {
        let SealedSlot { range, mapped: Mapping { offset, bytes, .. }, units, remote, .. } = *slot;
        let shared = &self.core.common.shared;
        let small = shared.geometry().small();
        let wholly = slot.is_wholly_retained(small);
        // Taking pages may fail: before the first driver call on the slot.
        let mut parts = Vec::new();
        let mut at = 0;
        for run in units.chunk_by(|a, b| a == b) {
            let length = run.len() as u64 * small;
            match run[0] {
                Unit::Idle => {}
                Unit::Retained => {
                    // Small pages fit any later use.
                    let each = if wholly { length } else { small };
                    let own = (0..length / each)
                        .map(|_| self.transaction.take(each, self.core.own(), shared.account().id()));
                    parts.push((offset + at, own.collect::<Result<Vec<_>>>()?));
                }
                Unit::Passing => {
                    let mut pages = Vec::with_capacity(run.len());
                    for _ in run {
                        let no = PageNo { class: Class::Small, index: self.next as u32 };
                        // A page which left and returned may have a new number, but be mapped here
                        // already.
                        let page = shared.page_apart(&mut self.transaction, no, &self.shown, self.core.id)?;
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
        self.transaction.unmap(range, offset, bytes)?;
        parts.iter().try_for_each(|(at, pages)| self.transaction.map(range, *at, pages))
    }
}
