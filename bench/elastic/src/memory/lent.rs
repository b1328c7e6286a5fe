//! Memory with leases: prefill graphs of many lengths in an arena, and a KV cache that borrows
//! pages of graphs not running. A lease maps the pages and its recall unmaps them.
//!
//! The background thread is simulated as in `paged.rs`. Blocks move on the device if a prompt needs
//! their pages, so callers name them.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use vmmgraph::driver::SharedDriver;
use vmmgraph::pages::Fence;
use vmmgraph::policy::{Answer, Grants, Need};
use vmmgraph::{
    Ahead, BlockBorrower, BlockPool, Device, ElasticOptions, Error, KvCache, KvLayout, KvOptions, Lease,
    Options, PreCommit, Result, SharedVmmAllocator, Space, Stream, VacateBlocks, Vacated,
};

use super::paged::Settings;
use super::{Hint, Memory, Moves};
use crate::model::{Calls, Costs, Model, Ns};

/// Number of prompt lengths with a graph.
const GRAPHS: u64 = 32;
/// A page lent again within this many steps counts as moved twice.
const TWICE: u64 = 16;

/// Never called: pages are vacated before their recall.
struct Nobody;

impl BlockBorrower for Nobody {
    fn vacate(&self, _: &VacateBlocks) -> Result<Vacated> {
        Err(Error::wrong_state("cannot vacate: the simulated engine was asked; it vacates before"))
    }
}

/// See the module.
pub struct Lent {
    device: Arc<Device>,
    cache: Arc<KvCache>,
    arena: SharedVmmAllocator,
    /// Prefill graphs and their page counts, ascending.
    graphs: Vec<(u64, Arc<Space>)>,
    borrower: Arc<dyn BlockBorrower>,
    pool: BlockPool,
    costs: Costs,
    /// Bytes per nanosecond read and written by a device copy.
    bandwidth: f64,
    page: u64,
    /// All pages; `own`: pages owned by the cache.
    budget: u64,
    own: u64,
    /// Blocks per page.
    unit: u64,
    block_bytes: u64,
    /// `leaving`: leased pages the pool may no longer use.
    leases: BTreeMap<u64, Lease>,
    leaving: Vec<u64>,
    /// Place of each block by name; `names` is the inverse.
    places: BTreeMap<u64, u64>,
    names: BTreeMap<u64, u64>,
    next: u64,
    grants: Grants,
    precommit: PreCommit,
    in_use: u64,
    /// Pages being mapped by the background thread, with completion times.
    coming: VecDeque<(Ns, u64)>,
    thread: Ns,
    step: u64,
    granted: u64,
    gone: VecDeque<(u64, u64)>,
    moves: Moves,
    audited: Cell<u64>,
}

fn internal<T>(what: String) -> Result<T> {
    Err(Error::Internal { what })
}

impl Lent {
    /// `budget` bytes on `driver`. Graphs for up to `longest` bytes of activations get their pages
    /// before the clock starts.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn new(
        driver: SharedDriver,
        model: &Model,
        budget: u64,
        longest: u64,
        set: Settings,
    ) -> Result<Self> {
        let device = Device::with_driver(driver);
        let page = 8 * model.block_bytes();
        let total = budget / page;
        device.set_budget(Some(total * page));
        let arena =
            SharedVmmAllocator::new(&device, &Options { large_page_bytes: page, ..Options::default() })?;
        let most = longest.div_ceil(page).min(total);
        let each = most.div_ceil(GRAPHS).max(1);
        let mut graphs = Vec::new();
        for pages in (1..=most.div_ceil(each)).map(|count| (count * each).min(most)) {
            let space = arena.open_space()?;
            space.free(space.allocate(pages * page, Stream::LEGACY)?)?;
            space.seal()?;
            graphs.push((pages, space));
        }
        let planes = vec![model.block_tokens * model.plane_token_bytes; 2 * model.layers as usize];
        let unit = page / model.block_bytes();
        let memory = ElasticOptions { name: "kv", page_bytes: page, ..ElasticOptions::default() };
        let blocks_most = total * unit;
        let cache = device.kv_cache(&KvOptions {
            planes: &planes,
            blocks_most,
            layout: KvLayout::ByBlock,
            memory,
        })?;
        let own = total - most;
        let mut pool = BlockPool::new(blocks_most, unit, model.block_bytes())?;
        if own > 0 {
            cache.commit(0..own * unit)?;
            pool.back(&(0..own * unit));
        }
        Ok(Self {
            pool,
            costs: Costs::of_pages(page),
            bandwidth: model.bandwidth / 1e9,
            grants: Grants::new(total, set.overtakes),
            precommit: PreCommit::new(set.marks, set.lead, set.residence)?,
            moves: Moves { peak_bytes: total * page, ..Moves::default() },
            budget: total,
            block_bytes: model.block_bytes(),
            borrower: Arc::new(Nobody),
            leases: BTreeMap::new(),
            leaving: Vec::new(),
            places: BTreeMap::new(),
            names: BTreeMap::new(),
            next: 0,
            in_use: 0,
            coming: VecDeque::new(),
            thread: 0,
            step: 0,
            granted: 0,
            gone: VecDeque::new(),
            audited: Cell::new(u64::MAX),
            device,
            cache,
            arena,
            graphs,
            page,
            own,
            unit,
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the graph of a prefill with this many bytes of activations: its pages and its index.
    fn graph(&self, activations: u64) -> Option<(u64, usize)> {
        if activations == 0 {
            return Some((0, 0));
        }
        let pages = activations.div_ceil(self.page);
        let index = self.graphs.partition_point(|(there, _)| *there < pages);
        self.graphs.get(index).map(|(there, _)| (*there, index))
    }

    fn graph_pages(&self) -> u64 {
        self.budget - self.own
    }

    fn used_pages(&self) -> u64 {
        let mut pages: Vec<u64> = self.names.keys().map(|block| block / self.unit).collect();
        pages.dedup();
        pages.len() as u64
    }

    fn new_pages(&self, blocks: u64) -> u64 {
        let room = self.used_pages() * self.unit - self.pool.in_use();
        blocks.saturating_sub(room).div_ceil(self.unit)
    }

    fn blocks_of(&self, page: u64) -> Range<u64> {
        page * self.unit..(page + 1) * self.unit
    }

    fn charge<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, Ns)> {
        let before = self.device.stats();
        let done = work(self);
        let after = self.device.stats();
        let (maps, unmaps) = (after.maps - before.maps, after.unmaps - before.unmaps);
        self.moves.maps += maps;
        self.moves.unmaps += unmaps;
        let step = self.step;
        self.gone.retain(|(at, _)| step - at <= TWICE);
        let mut again = maps;
        while let Some((_, pages)) = self.gone.back_mut().filter(|_| again > 0) {
            let same = again.min(*pages);
            self.moves.twice += same;
            (again, *pages) = (again - same, *pages - same);
            if *pages == 0 {
                self.gone.pop_back();
            }
        }
        if unmaps > 0 {
            self.gone.push_back((step, unmaps));
        }
        let calls = Calls { maps, unmaps, ..Calls::default() };
        done.map(|done| (done, self.costs.of(calls)))
    }

    fn lendable(&self, beside: u64) -> u64 {
        self.graph_pages().saturating_sub(beside).saturating_sub(self.leases.len() as u64)
    }

    fn borrow(&mut self) -> Result<(u64, Ns)> {
        let free = (self.own..self.budget).find(|page| !self.leases.contains_key(page));
        let Some(page) = free else { return internal("more leases than pages".to_owned()) };
        let blocks = self.blocks_of(page);
        let (lease, cost) = self.charge(|me| me.arena.lend_blocks(&me.cache, blocks, &me.borrower))?;
        self.leases.insert(page, lease);
        Ok((page, cost))
    }

    fn give_back(&mut self, pages: &[u64]) -> Result<Ns> {
        for page in pages {
            if !self.leaving.contains(page) {
                self.pool.unback(&self.blocks_of(*page));
                self.leaving.push(*page);
            }
        }
        self.reap()
    }

    /// Releases pages in `leaving`, including those refused before.
    fn reap(&mut self) -> Result<Ns> {
        let ((), cost) = self.charge(|me| {
            for page in me.leaving.clone() {
                me.cache.release(me.blocks_of(page), &Fence::default())?;
            }
            me.cache.reap();
            Ok(())
        })?;
        let leases = &mut self.leases;
        self.leaving.retain(|page| leases.get(page).is_some_and(|lease| lease.bytes() > 0));
        let leaving = &self.leaving;
        leases.retain(|page, lease| lease.bytes() > 0 || leaving.contains(page));
        Ok(cost)
    }

    fn in_the_way(&self, graph: usize) -> Vec<u64> {
        let needed = self.graphs.get(graph).map(|(_, space)| space.leases()).unwrap_or_default();
        let on = self.leases.iter().filter(|(_, lease)| needed.contains(&lease.id()));
        on.map(|(page, _)| *page).collect()
    }

    /// Moves used blocks off pages to be returned; returns the time. `beside`: pages needed by a
    /// graph.
    fn clear(&mut self, pages: &[u64], beside: u64) -> Result<Ns> {
        let used: Vec<u64> =
            self.names.keys().copied().filter(|block| pages.contains(&(block / self.unit))).collect();
        let most = self.graph_pages().saturating_sub(beside) as usize + pages.len();
        let (mut aside, mut cost, mut moved) = (Vec::new(), 0, 0);
        let mut done = Ok(());
        for from in used {
            let to = loop {
                match self.pool.allocate(1).and_then(|blocks| blocks.first().copied()) {
                    Some(block) if pages.contains(&(block / self.unit)) => aside.push(block),
                    Some(block) => break Some(block),
                    None if self.leases.len() < most => match self.borrow() {
                        Ok((page, more)) => {
                            cost += more;
                            self.pool.back(&self.blocks_of(page));
                        }
                        Err(error) => {
                            done = Err(error);
                            break None;
                        }
                    },
                    None => break None,
                }
            };
            let Some(to) = to else {
                done = done.and(internal("no room for a block that is to move".to_owned()));
                break;
            };
            if let Some(name) = self.names.remove(&from) {
                self.names.insert(to, name);
                self.places.insert(name, to);
            }
            aside.push(from);
            moved += self.block_bytes;
        }
        self.pool.free(&aside)?;
        done.map(|()| cost + (2.0 * moved as f64 / self.bandwidth) as Ns)
    }

    fn arrived(&mut self, now: Ns) {
        while let Some((_, page)) = self.coming.front().copied().filter(|(at, _)| *at <= now) {
            self.coming.pop_front();
            self.pool.back(&self.blocks_of(page));
        }
    }

    /// Makes blocks available and recalls a graph's pages; returns the waiting time.
    fn ensure(&mut self, now: Ns, (pages, graph): (u64, usize), blocks: u64) -> Result<Ns> {
        self.arrived(now);
        let mut at = now;
        let mut cost = 0;
        if pages > 0 {
            let waits = self.in_the_way(graph);
            if !waits.is_empty() {
                // A page still being mapped may be one of these.
                at = at.max(self.thread);
                self.arrived(at);
                cost += self.clear(&waits, pages)?;
                cost += self.give_back(&waits)?;
            }
            // Runs the library's own check.
            let Some((_, space)) = self.graphs.get(graph) else {
                return internal("no such graph".to_owned());
            };
            space.replay(Stream::LEGACY, || ())?;
        }
        while self.pool.available() < blocks
            && let Some((then, _)) = self.coming.front()
        {
            at = at.max(*then);
            self.arrived(at);
        }
        while self.pool.available() < blocks {
            if self.lendable(pages) == 0 {
                return internal("what was granted is not there".to_owned());
            }
            let (page, more) = self.borrow()?;
            cost += more;
            self.pool.back(&self.blocks_of(page));
        }
        Ok(at - now + cost)
    }

    fn begin(&mut self, now: Ns, need: Need, graph: (u64, usize), blocks: u64) -> Option<Ns> {
        let done = self.ensure(now, graph, blocks);
        // Moved blocks may occupy fewer pages.
        let more = if done.is_ok() { blocks } else { 0 };
        let kv = self.used_pages() + self.new_pages(more);
        let back = Need { kv: self.grants.kv().saturating_sub(kv), activations: 0 };
        self.grants.give(back);
        match done {
            Ok(wait) => {
                self.in_use += need.activations;
                Some(wait)
            }
            // The driver refused: the engine retries later.
            Err(_) => {
                self.grants.give(Need { kv: 0, activations: need.activations });
                None
            }
        }
    }

    fn plan(&mut self, now: Ns, hint: &Hint) -> Result<()> {
        self.arrived(now);
        self.step += 1;
        let next = self.graph(hint.activations);
        let beside = next.map_or(0, |(pages, _)| pages).max(self.in_use);
        let (free, coming) = (self.pool.available(), self.coming.len() as u64 * self.unit);
        let granted = std::mem::take(&mut self.granted);
        let wish = match self.precommit.step(self.step, free, coming, granted) {
            Ahead::Commit(blocks) => blocks,
            Ahead::GiveBack(_) | Ahead::Nothing => 0,
        };
        // Recalls empty pages now; used ones move between two steps.
        if let Some((pages, graph)) = next.filter(|(pages, _)| *pages > 0) {
            let busy = |page: &u64| {
                !self.pool.used(&self.blocks_of(*page)).is_empty()
                    || self.coming.iter().any(|(_, other)| other == page)
            };
            let idle: Vec<u64> = self.in_the_way(graph).into_iter().filter(|page| !busy(page)).collect();
            let spare = self.pool.available().saturating_sub(hint.blocks) / self.unit + self.lendable(pages);
            let idle = idle.get(..idle.len().min(spare as usize)).unwrap_or_default().to_vec();
            if !idle.is_empty() {
                let cost = self.give_back(&idle)?;
                self.thread = self.thread.max(now) + cost;
            }
        }
        let wanted = wish.max(hint.blocks.saturating_sub(self.pool.available() + coming)).div_ceil(self.unit);
        for _ in 0..wanted.min(self.lendable(beside)) {
            let (page, cost) = self.borrow()?;
            self.thread = self.thread.max(now) + cost;
            self.coming.push_back((self.thread, page));
        }
        Ok(())
    }
}

impl Memory for Lent {
    fn grant(&mut self, now: Ns, who: u64, activations: u64, blocks: u64) -> Option<Ns> {
        let graph = self.graph(activations)?;
        let need = Need { kv: self.new_pages(blocks), activations: graph.0 };
        (self.grants.ask(who, need) == Answer::Granted).then_some(())?;
        self.begin(now, need, graph, blocks)
    }

    fn extend(&mut self, now: Ns, blocks: u64) -> Option<Ns> {
        let need = Need { kv: self.new_pages(blocks), activations: 0 };
        self.grants.extend(need.kv).then_some(())?;
        let wait = self.begin(now, need, (0, 0), blocks)?;
        self.granted += blocks;
        Some(wait)
    }

    fn allocate(&mut self, blocks: u64) -> Vec<u64> {
        let taken = self.pool.allocate(blocks).unwrap_or_default();
        let mut names = Vec::with_capacity(taken.len());
        for place in taken {
            self.names.insert(place, self.next);
            self.places.insert(self.next, place);
            names.push(self.next);
            self.next += 1;
        }
        names
    }

    fn free(&mut self, _: Ns, blocks: &[u64]) {
        let before = self.used_pages();
        let places: Vec<u64> = blocks.iter().filter_map(|name| self.places.remove(name)).collect();
        for place in &places {
            self.names.remove(place);
        }
        if self.pool.free(&places).is_ok() {
            self.grants.give(Need { kv: before - self.used_pages(), activations: 0 });
        }
    }

    fn step_over(&mut self, _: Ns) {
        let pages = std::mem::take(&mut self.in_use);
        self.grants.give(Need { kv: 0, activations: pages });
    }

    fn ahead(&mut self, now: Ns, hint: &Hint) {
        let _ = self.plan(now, hint);
    }

    fn room(&self, activations: u64) -> u64 {
        let Some((pages, _)) = self.graph(activations) else { return 0 };
        let Some(free) = self.grants.free().checked_sub(pages) else { return 0 };
        self.used_pages() * self.unit - self.pool.in_use() + free * self.unit
    }

    fn capacity(&self) -> u64 {
        self.budget * self.unit
    }

    fn possible(&self, activations: u64, blocks: u64) -> bool {
        self.graph(activations).is_some_and(|(pages, _)| pages + blocks.div_ceil(self.unit) <= self.budget)
    }

    fn longest(&self) -> u64 {
        self.graph_pages() * self.page
    }

    fn forget(&mut self, who: u64) {
        self.grants.forget(who);
    }

    fn moves(&self) -> Moves {
        self.moves
    }

    fn check(&self, used: &mut dyn Iterator<Item = u64>) -> Result<()> {
        let stats = self.device.stats();
        let moved = stats.maps + stats.unmaps + stats.pages_created + stats.pages_released;
        if self.audited.replace(moved) != moved {
            self.device.pool().audit()?;
            self.cache.audit()?;
            self.arena.audit()?;
        }
        // Leases change no owner, and no page is free.
        let (arena, kv) = (self.arena.stats(), self.cache.stats().memory);
        let lent: u64 = self.leases.values().map(Lease::bytes).sum();
        if arena.physical_bytes != self.graph_pages() * self.page
            || arena.lent_bytes != lent
            || arena.physical_bytes + self.own * self.page != stats.physical_bytes
            || kv.committed_bytes + kv.pending_unmap_bytes != self.own * self.page + lent
        {
            return internal(format!("{arena:?} and {kv:?} with {lent} bytes on lease"));
        }
        if self.grants.kv() + self.grants.activations() > self.budget {
            return internal(format!("{:?} of {} pages", self.grants, self.budget));
        }
        // A running graph must have no page on lease.
        if self.in_use > 0
            && let Some((_, index)) = self.graph(self.in_use * self.page)
            && !self.in_the_way(index).is_empty()
        {
            return internal(format!("pages on lease under a graph of {} pages", self.in_use));
        }
        let mut seen = Vec::new();
        for name in used {
            let Some(place) = self.places.get(&name).copied() else {
                return internal(format!("block {name} is nowhere"));
            };
            let page = place / self.unit;
            let there = page < self.own || self.leases.contains_key(&page) && !self.leaving.contains(&page);
            if !there || !self.pool.is_used(place) || self.coming.iter().any(|(_, other)| *other == page) {
                return internal(format!("block {name} is used, and is not there"));
            }
            seen.push(place);
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        if seen.len() != count || count as u64 != self.pool.in_use() || count != self.names.len() {
            return internal(format!("{count} blocks in {} places", seen.len()));
        }
        if self.used_pages() > self.grants.kv() {
            return internal(format!("{} pages used of {} granted", self.used_pages(), self.grants.kv()));
        }
        Ok(())
    }
}
