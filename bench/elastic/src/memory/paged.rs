//! Memory through the library: a KV cache and a buffer for activations in one account, on the host
//! driver, with a virtual clock. The background thread is simulated: its work takes effect when the
//! thread would finish.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use vmmgraph::driver::SharedDriver;
use vmmgraph::pages::{Account, Fence, Limits, Owner};
use vmmgraph::policy::{Answer, Grants, Need, Standing};
use vmmgraph::{
    Ahead, BlockPool, Device, ElasticBuffer, ElasticOptions, Error, KvCache, KvLayout, KvOptions, PreCommit,
    Result, Watermarks,
};

use super::{Hint, Memory, Moves};
use crate::model::{Calls, Costs, Model, Ns};

/// A page mapped again within this many steps counts as moved twice.
const TWICE: u64 = 16;
/// Number of blocks, besides one step of decoding, for which recently used activations are given
/// up.
const SOON: u64 = 32;

/// Policy of a memory.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// A fixed split: this many bytes for activations, the rest for KV.
    Static(u64),
    /// Maps on demand and unmaps after use, on the engine's thread.
    OnDemand,
    /// The library's policies.
    Policies(Settings),
}

/// Settings of the policies.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Watermarks of free blocks.
    pub marks: Watermarks,
    /// Steps a commit may take.
    pub lead: u64,
    /// Steps a surplus must last before pages are given up.
    pub residence: u64,
    /// Limit on how often a step waiting for memory is overtaken.
    pub overtakes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { marks: Watermarks { low: 64, high: 256 }, lead: 4, residence: 256, overtakes: 16 }
    }
}

#[derive(Clone, Debug)]
struct Coming {
    at: Ns,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// Blocks available on completion.
    Blocks(Range<u64>),
    /// Number of activation pages ready on completion, counted from the first.
    Activations(u64),
}

/// See the module.
pub struct Paged {
    device: Arc<Device>,
    tenant: Account,
    cache: Arc<KvCache>,
    activations: ElasticBuffer,
    pool: BlockPool,
    way: Way,
    costs: Costs,
    page: u64,
    /// All pages.
    budget: u64,
    /// Blocks committed and released together, and their pages.
    unit: u64,
    unit_pages: u64,
    /// Number of used blocks per unit.
    used: BTreeMap<u64, u64>,
    grants: Grants,
    precommit: PreCommit,
    lead: u64,
    standing: Standing,
    /// Pages of activations from the first on: committed; ready; in use by the running step.
    committed: u64,
    ready: u64,
    in_use: u64,
    coming: VecDeque<Coming>,
    /// Completion times of the background thread: of all work, and of releases.
    thread: Ns,
    giving: Ns,
    /// Time of calls on the engine's thread since the last step started.
    owed: Ns,
    step: u64,
    granted: u64,
    /// Pages recently given up by KV and by activations: step and pages.
    gone: [VecDeque<(u64, u64)>; 2],
    moves: Moves,
    /// Driver calls at the last audit.
    audited: Cell<u64>,
}

fn internal<T>(what: String) -> Result<T> {
    Err(Error::Internal { what })
}

impl Paged {
    /// `budget` bytes on a device of this size. A static split is committed before the clock
    /// starts.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn new(driver: SharedDriver, model: &Model, budget: u64, layout: KvLayout, way: Way) -> Result<Self> {
        let device = Device::with_driver(driver);
        let unit_bytes = match layout {
            // Page size divisible by the block size.
            KvLayout::ByBlock => 8 * model.block_bytes(),
            KvLayout::ByPlane => 2 << 20,
        };
        let page = unit_bytes;
        let total = budget / page;
        let limits = Limits { most: Some(total * page), least: 0 };
        let tenant = device.account("engine", None, limits)?;
        let memory = ElasticOptions {
            name: "kv",
            page_bytes: page,
            account: Some(&tenant),
            ..ElasticOptions::default()
        };
        let planes = vec![model.block_tokens * model.plane_token_bytes; 2 * model.layers as usize];
        let cache = device.kv_cache(&KvOptions {
            planes: &planes,
            blocks_most: total * page / model.block_bytes(),
            layout,
            memory,
        })?;
        let activations =
            device.elastic_buffer(total * page, &ElasticOptions { name: "activations", ..memory })?;
        let unit = cache.blocks_a_page();
        let unit_pages = unit * model.block_bytes() / page;
        let blocks = total / unit_pages * unit;
        let (marks, lead, residence, overtakes) = match way {
            Way::Policies(set) => (set.marks, set.lead, set.residence, set.overtakes),
            Way::Static(_) | Way::OnDemand => (Watermarks::default(), 0, 0, u64::MAX),
        };
        let mut made = Self {
            pool: BlockPool::new(blocks, unit, model.block_bytes())?,
            costs: Costs::of_pages(page),
            grants: Grants::new(total, overtakes),
            precommit: PreCommit::new(marks, lead, residence)?,
            lead,
            standing: Standing::new(residence, 8)?,
            budget: total,
            used: BTreeMap::new(),
            committed: 0,
            ready: 0,
            in_use: 0,
            coming: VecDeque::new(),
            thread: 0,
            giving: 0,
            owed: 0,
            step: 0,
            granted: 0,
            gone: [VecDeque::new(), VecDeque::new()],
            moves: Moves::default(),
            audited: Cell::new(u64::MAX),
            device,
            tenant,
            cache,
            activations,
            way,
            page,
            unit,
            unit_pages,
        };
        if let Way::Static(bytes) = way {
            let pages = bytes.div_ceil(page).min(total);
            made.commit_activations(pages)?;
            let blocks = (total - pages) / unit_pages * unit;
            made.cache.commit(0..blocks)?;
            made.pool.back(&(0..blocks));
            made.ready = pages;
            made.moves = Moves { peak_bytes: made.moves.peak_bytes, ..Moves::default() };
        }
        Ok(made)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn pages_of(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.page)
    }

    fn kv_pages(&self) -> u64 {
        self.cache.stats().memory.committed_bytes / self.page
    }

    fn free_pages(&self) -> u64 {
        self.budget.saturating_sub(self.kv_pages()).saturating_sub(self.committed)
    }

    /// Returns the pages needed for more used blocks, beyond the free blocks on used pages.
    fn new_pages(&self, blocks: u64) -> u64 {
        let units = self.used.len() as u64;
        let in_units = units * self.unit - self.pool.in_use();
        blocks.saturating_sub(in_units).div_ceil(self.unit) * self.unit_pages
    }

    /// `whose`: KV (0) or activations (1).
    fn charge(&mut self, whose: usize, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Ns> {
        let before = self.device.stats();
        let done = work(self);
        let after = self.device.stats();
        let calls = Calls {
            maps: after.maps - before.maps,
            creates: after.pages_created - before.pages_created,
            unmaps: after.unmaps - before.unmaps,
            releases: after.pages_released - before.pages_released,
        };
        self.moves.maps += calls.maps;
        self.moves.unmaps += calls.unmaps;
        let held = (after.physical_bytes - after.free_bytes).max(self.moves.peak_bytes);
        self.moves.peak_bytes = held;
        let step = self.step;
        let gone = &mut self.gone[whose];
        gone.retain(|(at, _)| step - at <= TWICE);
        let mut again = calls.maps;
        while let Some((_, pages)) = gone.back_mut().filter(|_| again > 0) {
            let same = again.min(*pages);
            self.moves.twice += same;
            (again, *pages) = (again - same, *pages - same);
            if *pages == 0 {
                gone.pop_back();
            }
        }
        if calls.unmaps > 0 {
            gone.push_back((step, calls.unmaps));
        }
        done.map(|()| self.costs.of(calls))
    }

    fn commit_activations(&mut self, pages: u64) -> Result<Ns> {
        let cost = self.charge(1, |me| me.activations.commit(0..pages * me.page).map(drop))?;
        self.committed = self.committed.max(pages);
        Ok(cost)
    }

    fn drop_activations(&mut self, keep: u64) -> Result<Ns> {
        let range = keep * self.page..self.committed * self.page;
        if range.is_empty() {
            return Ok(0);
        }
        let cost = self.charge(1, |me| me.activations.decommit(range, &Fence::default()).map(drop))?;
        self.committed = keep;
        self.ready = self.ready.min(keep);
        self.coming.retain(|coming| !matches!(coming.what, What::Activations(_)));
        Ok(cost)
    }

    fn drop_units(&mut self, pages: u64, keep: u64) -> Result<Ns> {
        let mut left = pages.div_ceil(self.unit_pages);
        let (mut cost, mut ranges) = (0, self.pool.surplus(keep));
        while let Some(range) = ranges.pop().filter(|_| left > 0) {
            let units = ((range.end - range.start) / self.unit).min(left);
            let going = range.end - units * self.unit..range.end;
            left -= units;
            self.pool.unback(&going);
            let cache = Arc::clone(&self.cache);
            cost += self.charge(0, |_| cache.release(going, &Fence::default()))?;
        }
        Ok(cost)
    }

    fn arrived(&mut self, now: Ns) {
        while let Some(coming) = self.coming.pop_front() {
            if coming.at > now {
                self.coming.push_front(coming);
                return;
            }
            match coming.what {
                What::Blocks(blocks) => self.pool.back(&blocks),
                What::Activations(pages) => self.ready = self.ready.max(pages),
            }
        }
    }

    fn coming_blocks(&self) -> u64 {
        let blocks = |coming: &Coming| match &coming.what {
            What::Blocks(blocks) => blocks.end - blocks.start,
            What::Activations(_) => 0,
        };
        self.coming.iter().map(blocks).sum()
    }

    fn missing(&self, blocks: u64) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let wanted = blocks + self.coming_blocks();
        let backed = self.cache.backed();
        for range in self.pool.shortfall(wanted).unwrap_or_default() {
            for start in (range.start..range.end).step_by(self.unit as usize) {
                let there = backed.iter().any(|span| span.start <= start && start < span.end);
                if !there {
                    found.push(start..(start + self.unit).min(range.end));
                }
            }
        }
        let short = blocks.saturating_sub(self.pool.available() + self.coming_blocks());
        found.truncate(short.div_ceil(self.unit) as usize);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in found {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        joined
    }

    fn ensure(&mut self, now: Ns, pages: u64, blocks: u64) -> Result<Ns> {
        self.arrived(now);
        let mut at = now;
        // Wait for operations in progress.
        while let Some(next) = self.coming.iter().position(|coming| match coming.what {
            What::Blocks(_) => self.pool.available() < blocks,
            What::Activations(_) => self.ready < pages,
        }) {
            at = at.max(self.coming.get(next).map_or(at, |coming| coming.at));
            self.arrived(at);
        }
        let missing = self.missing(blocks);
        let units: u64 = missing.iter().map(|range| (range.end - range.start).div_ceil(self.unit)).sum();
        let needed = units * self.unit_pages + pages.saturating_sub(self.committed);
        if needed == 0 {
            self.ready = self.ready.max(pages);
            return Ok(at - now);
        }
        // Pages given up by the background thread are free only after its release.
        at = at.max(self.giving);
        let mut cost = 0;
        let short = needed.saturating_sub(self.free_pages());
        if short > 0 {
            let idle = self.committed.saturating_sub(pages.max(self.in_use)).min(short);
            cost += self.drop_activations(self.committed - idle)?;
            let short = needed.saturating_sub(self.free_pages());
            if short > 0 {
                let last = self.coming.back().map_or(at, |coming| coming.at);
                if self.pool.available() < blocks + short / self.unit_pages * self.unit {
                    at = at.max(last);
                    self.arrived(at);
                }
                cost += self.drop_units(short, blocks)?;
            }
        }
        if pages > self.committed {
            cost += self.commit_activations(pages)?;
        }
        self.ready = self.ready.max(pages);
        for range in missing {
            let cache = Arc::clone(&self.cache);
            let blocks = range.clone();
            cost += self.charge(0, |_| cache.commit(blocks).map(drop))?;
            self.pool.back(&range);
        }
        Ok(at - now + cost)
    }

    /// Prepares granted memory; on failure returns the grant.
    fn begin(&mut self, now: Ns, need: Need, blocks: u64) -> Option<Ns> {
        match self.ensure(now, need.activations, blocks) {
            Ok(wait) => {
                self.in_use += need.activations;
                Some(wait + std::mem::take(&mut self.owed))
            }
            // The driver refused: the engine retries later.
            Err(_) => {
                self.grants.give(need);
                None
            }
        }
    }

    /// Charges the cost to the background thread (policies), or to the engine between steps.
    fn aside(&mut self, now: Ns, cost: Ns) {
        match self.way {
            Way::Policies(_) => self.thread = self.thread.max(now) + cost,
            Way::Static(_) | Way::OnDemand => self.owed += cost,
        }
    }

    fn plan(&mut self, now: Ns, hint: &Hint) -> Result<()> {
        self.arrived(now);
        self.step += 1;
        let next = self.pages_of(hint.activations).min(self.budget);
        let keep = next.max(self.in_use);
        let mut free = self.pool.available();
        let coming = self.coming_blocks();
        let granted = std::mem::take(&mut self.granted);
        let wish = match self.precommit.step(self.step, free, coming, granted) {
            Ahead::Commit(blocks) => blocks,
            Ahead::GiveBack(blocks) => {
                let pages = blocks / self.unit * self.unit_pages;
                let cost = self.drop_units(pages, free - blocks)?;
                self.aside(now, cost);
                self.giving = self.thread;
                free = self.pool.available();
                0
            }
            Ahead::Nothing => 0,
        };
        // Priorities: the next prefill and near decoding, recently used activations, predictions.
        self.standing.used(self.step, keep);
        let stays = self.standing.wanted(self.step).max(keep).min(self.committed);
        let soon = hint.blocks.max(SOON + granted * self.lead);
        let blocks = (free + coming + wish).max(soon);
        let mut missing = self.missing(blocks);
        let pages = |missing: &[Range<u64>], me: &Self| {
            missing.iter().map(|range| (range.end - range.start).div_ceil(me.unit)).sum::<u64>()
                * me.unit_pages
        };
        let activations = next.saturating_sub(self.committed);
        let wanted = pages(&missing, self) + activations;
        let needed = pages(&self.missing(soon), self) + activations;
        let idle = |wanted: u64, keep: u64, me: &Self| {
            wanted.saturating_sub(me.free_pages()).min(me.committed.saturating_sub(keep))
        };
        let going = idle(wanted, stays, self).max(idle(needed, keep, self));
        if going > 0 {
            let cost = self.drop_activations(self.committed - going)?;
            self.aside(now, cost);
            self.giving = self.thread;
        }
        let short = needed.saturating_sub(self.free_pages());
        if short > 0 && activations > 0 {
            let cost = self.drop_units(short, soon)?;
            self.aside(now, cost);
            self.giving = self.thread;
        }
        if next > self.committed {
            let pages = next.min(self.committed + self.free_pages());
            let cost = self.commit_activations(pages)?;
            self.aside(now, cost);
            self.coming.push_back(Coming { at: self.thread, what: What::Activations(pages) });
        }
        let mut room = self.free_pages() / self.unit_pages;
        missing.retain_mut(|range| {
            let units = ((range.end - range.start).div_ceil(self.unit)).min(room);
            room -= units;
            range.end = range.end.min(range.start + units * self.unit);
            !range.is_empty()
        });
        for range in missing {
            let cache = Arc::clone(&self.cache);
            let blocks = range.clone();
            let cost = self.charge(0, |_| cache.commit(blocks).map(drop))?;
            self.aside(now, cost);
            self.coming.push_back(Coming { at: self.thread, what: What::Blocks(range) });
        }
        if let Some(spare) = self.standing.too_much(self.step, self.committed) {
            let cost = self.drop_activations(self.committed - spare)?;
            self.aside(now, cost);
            self.giving = self.thread;
        }
        Ok(())
    }
}

impl Memory for Paged {
    fn grant(&mut self, now: Ns, who: u64, activations: u64, blocks: u64) -> Option<Ns> {
        let need = Need { kv: self.new_pages(blocks), activations: self.pages_of(activations) };
        if let Way::Static(_) = self.way
            && (self.committed < need.activations || self.pool.available() < blocks)
        {
            return None;
        }
        (self.grants.ask(who, need) == Answer::Granted).then_some(())?;
        self.begin(now, need, blocks)
    }

    fn extend(&mut self, now: Ns, blocks: u64) -> Option<Ns> {
        if let Way::Static(_) = self.way
            && self.pool.available() < blocks
        {
            return None;
        }
        let need = Need { kv: self.new_pages(blocks), activations: 0 };
        self.grants.extend(need.kv).then_some(())?;
        let wait = self.begin(now, need, blocks)?;
        // A waiting prompt's need is known; decoding is predicted from recent grants.
        self.granted += blocks;
        Some(wait)
    }

    fn allocate(&mut self, blocks: u64) -> Vec<u64> {
        let taken = self.pool.allocate(blocks).unwrap_or_default();
        for block in &taken {
            *self.used.entry(block / self.unit).or_default() += 1;
        }
        taken
    }

    fn free(&mut self, now: Ns, blocks: &[u64]) {
        let Ok(empty) = self.pool.free(blocks) else { return };
        for block in blocks {
            let unit = block / self.unit;
            if let Some(used) = self.used.get_mut(&unit) {
                *used -= 1;
                if *used == 0 {
                    self.used.remove(&unit);
                }
            }
        }
        self.grants.give(Need { kv: empty.len() as u64 * self.unit_pages, activations: 0 });
        if let Way::OnDemand = self.way
            && let Ok(cost) = self.drop_units(empty.len() as u64 * self.unit_pages, 0)
        {
            self.aside(now, cost);
        }
    }

    fn step_over(&mut self, now: Ns) {
        let pages = std::mem::take(&mut self.in_use);
        self.grants.give(Need { kv: 0, activations: pages });
        if let Way::OnDemand = self.way
            && let Ok(cost) = self.drop_activations(0)
        {
            self.aside(now, cost);
        }
    }

    fn ahead(&mut self, now: Ns, hint: &Hint) {
        if let Way::Policies(_) = self.way {
            let _ = self.plan(now, hint);
        } else {
            self.step += 1;
        }
    }

    fn room(&self, activations: u64) -> u64 {
        if let Way::Static(_) = self.way {
            let fits = self.pages_of(activations) <= self.committed;
            return if fits { self.pool.available() } else { 0 };
        }
        let Some(free) = self.grants.free().checked_sub(self.pages_of(activations)) else { return 0 };
        let in_units = self.used.len() as u64 * self.unit - self.pool.in_use();
        in_units + free / self.unit_pages * self.unit
    }

    fn capacity(&self) -> u64 {
        let pages = if let Way::Static(_) = self.way { self.kv_pages() } else { self.budget };
        pages / self.unit_pages * self.unit
    }

    fn possible(&self, activations: u64, blocks: u64) -> bool {
        let pages = self.pages_of(activations);
        if let Way::Static(_) = self.way {
            return pages <= self.committed && blocks <= self.capacity();
        }
        pages + blocks.div_ceil(self.unit) * self.unit_pages <= self.budget
    }

    fn longest(&self) -> u64 {
        if let Way::Static(_) = self.way { self.committed * self.page } else { self.budget * self.page }
    }

    fn forget(&mut self, who: u64) {
        self.grants.forget(who);
    }

    fn moves(&self) -> Moves {
        self.moves
    }

    fn check(&self, used: &mut dyn Iterator<Item = u64>) -> Result<()> {
        // The library's audits, only after driver calls.
        let stats = self.device.stats();
        let moved = stats.maps + stats.unmaps + stats.pages_created + stats.pages_released;
        if self.audited.replace(moved) != moved {
            self.device.pool().audit_idle()?;
            self.cache.audit()?;
            self.activations.audit()?;
        }
        let (kv, activations) = (self.cache.stats().memory, self.activations.stats());
        let (charged, free) = (self.tenant.stats().charged_bytes, stats.free_bytes);
        let held = kv.committed_bytes + activations.committed_bytes;
        if held + kv.pending_unmap_bytes + activations.pending_unmap_bytes != charged {
            return internal(format!("{held} bytes committed, {charged} charged"));
        }
        if charged + free != stats.physical_bytes {
            return internal(format!("{charged} bytes charged, {free} free, {} held", stats.physical_bytes));
        }
        if charged > self.budget * self.page {
            return internal(format!("{charged} bytes of {} pages", self.budget));
        }
        let owned_pages = self.device.pool().owned_pages();
        let nobodys =
            owned_pages.iter().filter(|one| one.owner == Owner::Free).map(|one| one.mappings).sum::<u64>();
        let mapped: u64 = owned_pages.iter().map(|one| one.mappings).sum();
        if nobodys != 0 || mapped != charged / self.page {
            return internal(format!("{nobodys} mappings of free pages, {mapped} of {charged} bytes"));
        }
        // Granted memory exists once per owner.
        if self.grants.kv() + self.grants.activations() > self.budget || self.in_use > self.committed {
            return internal(format!("{:?} of {} pages", self.grants, self.budget));
        }
        let mut there = vec![false; (self.budget / self.unit_pages * self.unit) as usize];
        let mut set = |blocks: &Range<u64>, value: bool| {
            let end = (blocks.end as usize).min(there.len());
            there.get_mut(blocks.start as usize..end).into_iter().flatten().for_each(|there| *there = value);
        };
        self.cache.backed().iter().for_each(|blocks| set(blocks, true));
        for coming in &self.coming {
            if let What::Blocks(blocks) = &coming.what {
                set(blocks, false);
            }
        }
        let (mut units, mut count) = (vec![0_u64; there.len() / self.unit as usize], 0);
        for block in used {
            count += 1;
            // Take the block: a second user fails the check.
            let there = there.get_mut(block as usize).is_some_and(std::mem::take);
            if !there || !self.pool.is_used(block) {
                return internal(format!("block {block} is used, and is not there or is another's"));
            }
            units[(block / self.unit) as usize] += 1;
        }
        let same = self.used.iter().all(|(unit, used)| units.get(*unit as usize) == Some(used));
        let pages = units.iter().filter(|used| **used > 0).count() as u64;
        let granted = pages * self.unit_pages <= self.grants.kv();
        if count != self.pool.in_use() || !same || pages != self.used.len() as u64 || !granted {
            return internal(format!("{count} blocks on {pages} pages, {:?}", self.grants));
        }
        Ok(())
    }
}
