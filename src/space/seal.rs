//! Seal: ends a capture and gives blocks still live pages of their own.
//!
//! A *live-out* (retained) block outlives its capture: a graph's output, a library's cached
//! workspace, a lazily created constant. Replays of other graphs overwrite shared pages, so by
//! default a live-out block moves to pages owned by its space. The program then behaves as if the
//! graph had a private pool. Nothing is copied: a capture records work without running the work, so
//! the first replay writes the first contents.
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
//! * Each small-page unit of the slot contains live-out bytes, and the page is mapped nowhere else:
//!   the page changes owner without a driver call. A page mapped elsewhere, too, is replaced by one
//!   own page of the same size.
//! * Otherwise the page is replaced: by small pages of the space under live-out blocks, by shared
//!   *filler* pages under freed blocks, and by nothing under unused addresses.
//!
//! On a platform which cannot replace pages under a graph (HIP, MLU), any page with a live-out
//! block and one mapping changes owner whole.
//!
//! The module owns the change from [`Phase::Open`] to [`Phase::Sealed`]. The space's lock is held
//! for the whole change, across its driver calls. The out-of-memory retry around a seal holds no
//! lock. Invariants:
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
    /// Moves the blocks to pages of the space, which other graphs never touch.
    #[default]
    Retain,
    /// Leaves the blocks on shared pages: the next replay of another graph may overwrite them. For
    /// callers which copy their outputs.
    Share,
    /// The pages under the blocks become the space's own, freed neighbours included; none is
    /// replaced. Fails if such a page is also mapped elsewhere in this space or by another space.
    /// For pages already registered by a library: NCCL registers buffers of captured collectives by
    /// page.
    #[serde(rename = "in_place")]
    InPlace,
    /// Like [`Retain`](Self::Retain), except for peer-visible (remote) blocks. These stay on shared
    /// pages, which the next replay of another graph may overwrite. For peers which received the
    /// pages during the capture.
    #[serde(rename = "share_remote")]
    ShareRemote,
}

/// Resources used by a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SealReport {
    /// Peak bytes of live blocks.
    pub peak_live_bytes: u64,
    /// Small page numbers used: slabs, and fillers added by the seal.
    pub small_pages: u64,
    /// Large page numbers used during the capture.
    pub large_pages: u64,
    /// Mappings made; each is a map and a set-access call.
    pub maps: u64,
    /// Driver calls: reserve, create, map, set access and unmap.
    pub driver_calls: u64,
    /// Time spent in the driver calls, waits for calls of other spaces included.
    pub driver_time: Duration,
    /// Bytes of pages owned by this space.
    pub retained_bytes: u64,
    /// Blocks allocated in total.
    pub allocations: u64,
    /// Hash of the capture's plan: page sizes, the numbered page of each slot, place and bytes of
    /// each block in order, the live-out blocks and their policy. In a stitched space, equal
    /// requests give equal hashes in any process and after any earlier captures, so ranks can
    /// compare captures.
    ///
    /// Places of persistent (kept) blocks do not count. If [persistent blocks are
    /// predicted](crate::VmmTorchAllocator::predict_retained), the choice of blocks counts, and
    /// with the choice the earlier captures. In a bump space, the arena's tape also counts from the
    /// second range of addresses on.
    pub layout_hash: u64,
    /// Blocks still live, by address.
    pub retained: Vec<Block>,
    /// Live [peer-visible](Space::allocate_remote) blocks. If 0, this seal replaced no page of a
    /// peer-visible block, live or freed. Otherwise [`RetainPolicy::Retain`] may have replaced the
    /// pages of these blocks and of their neighbours: export the pages to peers after the seal.
    /// Other policies leave the pages in place.
    pub remote_blocks: u64,
    /// Bytes of these blocks.
    pub remote_bytes: u64,
}

impl Space {
    /// Ends the capture: no further blocks can be allocated, and the space can be replayed. Blocks
    /// still live follow the arena's policy. In a bump space they stay on shared pages; persistent
    /// blocks stay in place.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) unless the space is open, if
    /// [`RetainPolicy::InPlace`] fails, or if eager work uses the page of a peer-visible block or
    /// may take the page. Out of memory or budget, also after calling all reclaimers; driver
    /// errors.
    ///
    /// [`Error::Exported`] if a pinned page [exported](Self::export) from this space would be
    /// replaced: seal in place, share the blocks, or remove the pins first. [`Error::NotOffered`]
    /// if a page would be replaced and captured graphs do not permit replacement
    /// ([`Capabilities::replace_under_graph`](crate::driver::Capabilities::replace_under_graph)):
    /// make the block persistent or share the block.
    ///
    /// After an error the space is open as before, and the call can be repeated. If the driver
    /// refuses the undo, the space can only be dropped.
    pub fn seal(&self) -> Result<SealReport> {
        let policy = self.core.policy(&self.core.state.lock());
        self.seal_with(policy)
    }

    /// Like [`seal`](Self::seal), with the given policy.
    ///
    /// # Errors
    /// As [`seal`](Self::seal); [`Error::InvalidArgument`] for a bump space and any policy except
    /// [`RetainPolicy::Share`].
    pub fn seal_with(&self, policy: RetainPolicy) -> Result<SealReport> {
        // The capture is over: calls may wait for memory again, this seal included.
        self.core.state.lock().stage.end_capture();
        // Spare ranges not used by this capture are freed, so pages mapped only in this space can
        // change owner.
        self.core.common.spare_ranges.clear(self.core.common.pool());
        let report = self.core.with_memory_retry(|| self.core.seal(policy));
        // Events of blocks which this capture freed in other spaces can be recorded now.
        self.core.common.restore_replaced();
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
                // Shows whether a capture with collectives was sealed in place.
                policy = ?policy,
                remote_blocks = report.remote_blocks,
                "space sealed"
            );
        }
        report
    }
}

impl Core {
    /// Returns the default policy of a seal.
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

    /// Gives each small-page unit with a live-out block pages of the space. Returns the number of
    /// small page numbers used beyond the slabs. Nothing has changed after an error.
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
        // Peers may receive the fillers later, so the fillers are pinned, too.
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
    /// Returns the number and bytes of live peer-visible blocks.
    fn live_remote(&self) -> (u64, u64) {
        self.placement.layout().map_or((0, 0), Layout::live_remote)
    }

    /// Returns the mapped pages of peer-visible blocks.
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

    /// Adds the end of the capture: live-out blocks get different pages than freed ones.
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

/// Replacement of shared pages under live-out blocks by pages of the space.
struct Replacement<'a> {
    core: &'a Core,
    transaction: Transaction<'a>,
    policy: RetainPolicy,
    /// Next small page number not used by this space.
    next: usize,
    /// All pages mapped by the space.
    shown: HashSet<PageId>,
    /// Pages exported before the seal.
    exported: HashSet<PageId>,
    /// Fillers which now hold freed peer-visible blocks.
    fillers: HashSet<PageId>,
}

/// A slot: one mapped page, and the use of its addresses.
struct SealedSlot<'a> {
    /// Index of the range.
    number: usize,
    range: RangeId,
    mapped: Mapping,
    units: &'a [Unit],
    remote: bool,
}

impl SealedSlot<'_> {
    /// Returns whether live-out blocks cover all units, of `small` bytes each.
    fn is_wholly_retained(&self, small: u64) -> bool {
        let covered = self.units.len() as u64 * small >= self.mapped.bytes;
        covered && self.units.iter().all(|unit| *unit == Unit::Retained)
    }
}

impl Replacement<'_> {
    /// Returns whether the slot keeps its page, because no live-out block is on the page, or
    /// because the page is the space's own now.
    fn keeps_its_page(&mut self, slot: &SealedSlot) -> Result<bool> {
        let page = slot.mapped.page;
        let shared = &self.core.common.shared;
        if !slot.units.contains(&Unit::Retained) || slot.remote && self.policy == RetainPolicy::ShareRemote {
            return Ok(true);
        }
        let driver = self.core.common.pool().driver();
        let replaces = self.policy != RetainPolicy::InPlace && driver.capabilities().replace_under_graph;
        let wholly = slot.is_wholly_retained(shared.geometry().small());
        // Change of owner without a driver call. The page's number in the shared set is free for a
        // new page.
        if (wholly || !replaces) && self.transaction.hand_over(page, shared.owner(), self.core.own(), true) {
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
        if self.exported.contains(&page) && self.core.common.pool().is_exported(page) {
            return Err(Error::Exported { pages: vec![page.number()] });
        }
        Ok(false)
    }

    /// Maps pages of the space under live-out units, and fillers under units of freed blocks.
    fn replace(&mut self, slot: &SealedSlot) -> Result<()> {
        let SealedSlot { range, mapped: Mapping { offset, bytes, .. }, units, remote, .. } = *slot;
        let shared = &self.core.common.shared;
        let small = shared.geometry().small();
        let wholly = slot.is_wholly_retained(small);
        // Taking pages may fail, so pages are taken before the first driver call on the slot.
        let mut parts = Vec::new();
        let mut at = 0;
        for run in units.chunk_by(|a, b| a == b) {
            let length = run.len() as u64 * small;
            match run[0] {
                Unit::Idle => {}
                Unit::Retained => {
                    // Small pages fit any later use after their blocks are freed.
                    let each = if wholly { length } else { small };
                    let own = (0..length / each)
                        .map(|_| self.transaction.take(each, self.core.own(), shared.account().id()));
                    parts.push((offset + at, own.collect::<Result<Vec<_>>>()?));
                }
                Unit::Passing => {
                    let mut pages = Vec::with_capacity(run.len());
                    for _ in run {
                        let no = PageNo { class: Class::Small, index: self.next as u32 };
                        // A page which left the shared set and returned may have a new number, but
                        // be mapped in this space already.
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
