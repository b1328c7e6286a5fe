//! Eager work on the shared pages of an arena, ordered as one replay.
//!
//! [`EagerSpace`] owns the addresses and blocks. A *scope* occupies the arena's replay slot, so
//! eager work never overlaps graphs and may use the same pages. See docs/design/capture.md.
//!
//! ```text
//!   begin     take the replay slot; remap slots with outdated pages, after the last scope
//!   allocate  layout as in a capture; addresses and mappings persist between scopes
//!   end       pages under live blocks *leave* the shared set: own pages now, in place
//!   later     a space which maps such a page replaces it before its next replay (refresh.rs)
//! ```
//!
//! A *shared* page has a number in the shared set. An *own* page held a live block when a scope
//! ended; it becomes shared when a scope ends without a live or waiting block on the page. Layout
//! numbers are not numbers of the shared set (`slots.rs`).
//!
//! A new generation of addresses (`generation.rs`) begins if the addresses sprawl, an undo failed
//! or memory is short. Old generations keep only live blocks.
//!
//! [`EagerSpace::state`] ranks as a space's lock. It is released before any wait for the device.
//!
//! Invariants, checked by [`EagerSpace::audit`]:
//!
//! * Between scopes, every page under a live block is owned by the eager space.
//! * No two layout numbers have the same page or the same shared number.
//! * Every slot under a live block maps the page of its number.
//! * No block lies on a leased page.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;

use super::layout::Layout;
use super::live_count::LiveCount;
use super::users::Users;
use super::{Common, next_space};
use crate::error::{Error, Result};
use crate::pages::{AccountId, Events, Fence, Mark, NamedStream, Owner, PageNo, Reclaimer};
use crate::sync::{Mutex, thread_token};
use crate::units::{Address, BlockBytes, Stream};

mod blocks;
mod generation;
mod scope;
mod slots;

use blocks::Waiting;
use generation::Generation;

/// One stream for the layout: a scope uses one stream, and scopes are ordered.
const ANY: Stream = Stream::LEGACY;

/// Statistics of an arena's eager work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EagerStats {
    /// Scopes so far.
    pub scopes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Bytes of live blocks, each rounded up to 512.
    pub live_bytes: u64,
    /// Peak of `live_bytes`.
    pub peak_live_bytes: u64,
    /// Bytes of pages owned by eager work.
    pub own_bytes: u64,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of mapped addresses.
    pub mapped_bytes: u64,
    /// Mappings made so far.
    pub maps: u64,
    /// Pages that left the shared set.
    pub pages_left: u64,
    /// Pages returned to the shared set.
    pub pages_returned: u64,
    /// Mappings replaced in graphs because their page left.
    pub graph_maps: u64,
    /// Restarts with new addresses.
    pub renewals: u64,
}

pub(crate) struct EagerSpace {
    id: u64,
    common: Arc<Common>,
    state: Mutex<State>,
}

struct State {
    /// Stream of the active scope, and a mark after earlier replays.
    scope: Option<(NamedStream, Mark)>,
    current: Generation,
    old: Vec<Generation>,
    users: Users,
    /// Blocks live at the end of a scope, with the scope's stream.
    outlived: HashMap<Address, NamedStream>,
    waiting: Vec<Waiting>,
    kept: BTreeMap<Address, u64>,
    live_count: LiveCount,
    /// Mark after the last scope; `None` if recording failed.
    last: Option<Mark>,
    seen: u64,
    /// Whether a slot must map a different page.
    moved: bool,
    /// Leased shared numbers, which the scope does not use.
    lent: BTreeSet<u32>,
    /// Layout numbers out of use until the scope ends.
    excluded: Vec<PageNo>,
    /// After a failed undo, nothing more is mapped here.
    broken: bool,
    counts: EagerStats,
}

impl State {
    fn users(&self, events: &Arc<Events>) -> Fence {
        let mut fence = Fence::default();
        let streams = self.users.all().chain(self.outlived.values());
        streams.for_each(|stream| fence.add_kept(events, *stream));
        self.waiting.iter().for_each(|waiting| fence.join(waiting.all()));
        self.old.iter().for_each(|old| fence.join(old.readers.clone()));
        fence
    }
}

impl EagerSpace {
    pub(crate) fn new(common: &Arc<Common>) -> Arc<Self> {
        let layout = Layout::new(common.shared.geometry());
        let state = State {
            scope: None,
            current: Generation::new(layout),
            old: Vec::new(),
            users: Users::default(),
            outlived: HashMap::new(),
            waiting: Vec::new(),
            kept: BTreeMap::new(),
            live_count: common.live_counts.take(),
            last: None,
            seen: common.shared.version(),
            moved: false,
            lent: BTreeSet::new(),
            excluded: Vec::new(),
            broken: false,
            counts: EagerStats::default(),
        };
        let space = Arc::new(Self { id: next_space(), common: Arc::clone(common), state: Mutex::new(state) });
        common.registry.set_eager(&space);
        let reclaimer: Arc<dyn Reclaimer> = space.clone();
        common.device.add_reclaimer(&reclaimer);
        space
    }

    pub(super) fn own(&self) -> Owner {
        Owner::Retained { arena: self.common.shared.arena(), space: self.id }
    }

    pub(crate) fn stats(&self) -> EagerStats {
        let state = self.state.lock();
        let all = || state.old.iter().chain([&state.current]);
        let kept: u64 = state.kept.values().sum();
        let waiting: u64 = state.waiting.iter().map(|waiting| waiting.bytes).sum();
        EagerStats {
            blocks: all().map(|made| made.layout.usage().blocks).sum::<u64>() + state.kept.len() as u64
                - state.waiting.len() as u64,
            live_bytes: all().map(|made| made.layout.usage().bytes).sum::<u64>() + kept - waiting,
            own_bytes: self.common.pool().held(self.own()).0,
            reserved_bytes: all().map(Generation::reserved).sum(),
            mapped_bytes: all().map(|made| made.mapped).sum(),
            graph_maps: self.common.totals.refreshed(),
            ..state.counts
        }
    }

    pub(crate) fn users(&self) -> Fence {
        self.state.lock().users(self.common.pool().events())
    }

    pub(crate) fn audit(&self) -> Result<()> {
        let state = self.state.lock();
        if state.broken {
            return Ok(());
        }
        let scope = state.scope.is_some();
        state.old.iter().try_for_each(|old| old.audit(self, false))?;
        state.current.audit(self, scope)?;
        let blocks = state.current.slots.all().into_iter();
        let mut blocks =
            blocks.filter(|(no, _)| state.current.layout.holds(*no) && !state.excluded.contains(no));
        match blocks.find(|(_, slot)| !self.common.pool().leases([slot.page].iter()).is_empty()) {
            Some((no, slot)) => Err(Error::Internal {
                what: format!("{self:?}: {no:?} has blocks on {:?}, which is on lease", slot.page),
            }),
            None => Ok(()),
        }
    }

    /// Frees all memory except under live blocks. Returns the bytes of addresses freed; 0 in an
    /// active scope.
    pub(crate) fn release(&self) -> u64 {
        let state = &mut *self.state.lock();
        if state.scope.is_some() || state.current.ranges.is_empty() {
            return 0;
        }
        let mapped =
            |state: &State| state.current.mapped + state.old.iter().map(|old| old.mapped).sum::<u64>();
        let before = mapped(state);
        self.renew(state);
        before.saturating_sub(mapped(state))
    }
}

impl Reclaimer for EagerSpace {
    fn reclaim(&self, bytes: u64) -> u64 {
        let free = |pool: &crate::pages::PagePool| pool.stats().free_bytes;
        let before = free(self.common.pool());
        if bytes > 0 && self.release() > 0 {
            // The pages are free after the arena's replays.
            self.common.pool().wait_and_reap(std::time::Duration::from_secs(2));
        }
        free(self.common.pool()).saturating_sub(before)
    }

    fn account(&self) -> Option<AccountId> {
        Some(self.common.shared.account().id())
    }

    fn cost(&self) -> u64 {
        1
    }
}

impl Drop for EagerSpace {
    fn drop(&mut self) {
        let common = &self.common;
        let state = self.state.get_mut();
        let mut fence = common.order.fence();
        fence.join(state.users(common.pool().events()));
        for waiting in state.waiting.drain(..) {
            let _ = state.current.layout.free(waiting.place);
        }
        common.live_counts.give(&state.live_count);
        let kept: Vec<_> = std::mem::take(&mut state.kept).into_iter().collect();
        common.heap.free_all(common.pool(), kept, &fence);
        let layout = || Layout::new(common.shared.geometry());
        let current = std::mem::replace(&mut state.current, Generation::new(layout()));
        for made in state.old.drain(..).chain([current]) {
            made.leave(common, fence.clone());
        }
        common.shared.forget();
        common.forget_copies();
        // Cleared last, so a concurrent pause finds the fences here or in the heap and pool.
        common.registry.clear_eager();
        common.pool().check();
    }
}

impl fmt::Debug for EagerSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EagerSpace({})", self.id)
    }
}

/// Frees blocks which outlive their [`EagerScope`]. Holds the blocks, not the arena.
///
/// Thread-safe. Only [`allocate`](Self::allocate) may wait.
#[derive(Clone, Debug)]
pub struct EagerBlocks {
    space: Arc<EagerSpace>,
}

impl EagerBlocks {
    pub(crate) fn new(space: Arc<EagerSpace>) -> Self {
        Self { space }
    }

    /// Frees a block. In a scope on the block's stream, the next block may use the bytes at once;
    /// otherwise after the block's stream and `readers`. In both cases after the
    /// [recorded](Self::record_stream) streams.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] or [`Error::DoubleFree`], with nothing changed; [`Error::Closed`].
    pub fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.space.free(address, readers)
    }

    /// Records a use of the block on `stream`: its bytes are reused only after the work submitted
    /// there before the free. Fails like [`free`](Self::free).
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.space.record_stream(address, stream)
    }

    #[doc(hidden)]
    pub fn close_arena(&self) {
        self.space.common.close();
    }

    /// Allocates in the active scope like [`EagerScope::allocate`] or
    /// [`EagerScope::allocate_kept`].
    ///
    /// # Errors
    /// [`Error::WrongState`] if no scope is active on this stream.
    pub fn allocate(&self, size: u64, stream: Stream, kept: bool) -> Result<Address> {
        self.space.allocate(size, stream, kept)
    }
}

/// Eager work of one stream on the arena's shared pages. The scope counts as one replay: no other
/// replay of the arena is launched until the scope is dropped.
///
/// A block live at the end keeps its address, pages and bytes until freed ([`EagerBlocks`]), and
/// the arena cannot use its pages. So allocate small long-lived blocks as
/// [persistent](Self::allocate_kept).
///
/// For one thread, which must not replay, capture, pause or begin a second scope in this arena
/// before the end. Submit work only to the scope's stream, or to streams joined with it before the
/// end.
pub struct EagerScope {
    end: EagerEnd,
    thread: PhantomData<*const ()>,
}

/// Ends an [`EagerScope`] when dropped, on any thread.
pub struct EagerEnd {
    space: Arc<EagerSpace>,
    stream: NamedStream,
    number: u64,
    thread: u64,
}

impl EagerScope {
    /// Returns the scope's stream.
    #[must_use]
    pub fn stream(&self) -> Stream {
        self.end.stream.stream()
    }

    /// Allocates at least `size` bytes like [`Space::allocate`](crate::Space::allocate), for work
    /// on the scope's stream. Makes no driver call once earlier scopes needed as much.
    pub fn allocate(&self, size: u64) -> Result<Address> {
        self.end.space.allocate(size, self.stream(), false)
    }

    /// Allocates a persistent (kept) block, which outlives the scope. The block is packed on pages
    /// used by no graph. Fails like [`allocate`](Self::allocate).
    pub fn allocate_kept(&self, size: u64) -> Result<Address> {
        self.end.space.allocate(size, self.stream(), true)
    }

    /// Frees a block. The next block may use the bytes, unless the block is persistent, from a
    /// scope on another stream, or recorded on another stream. Fails like [`EagerBlocks::free`].
    pub fn free(&self, address: Address) -> Result<()> {
        self.end.space.free(address, &[])
    }

    /// See [`EagerBlocks::record_stream`].
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.end.space.record_stream(address, stream)
    }

    /// Returns the handle which frees blocks after the scope.
    #[must_use]
    pub fn blocks(&self) -> EagerBlocks {
        EagerBlocks { space: Arc::clone(&self.end.space) }
    }

    /// Returns the handle which ends the scope. Until then, use [`EagerBlocks::allocate`].
    #[must_use]
    pub fn into_end(self) -> EagerEnd {
        self.end
    }
}

impl EagerEnd {
    /// Ends the scope, after all its work was submitted; no effect if it has ended.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread cannot name the stream (a default stream of a different
    /// thread or context): the scope stays active.
    pub fn end(&self) -> Result<()> {
        if !self.space.common.pool().events().can_name(self.stream) {
            return Err(Error::wrong_state(
                "cannot end the eager scope here: it is on the default stream of another thread or context; end it there",
            ));
        }
        if self.space.end(self.number) { self.space.common.order.leave_of(self.thread) } else { Ok(()) }
    }
}

impl fmt::Debug for EagerScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EagerScope({:?} on {:?})", self.end.space, self.end.stream)
    }
}

impl fmt::Debug for EagerEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EagerEnd({:?} on {:?})", self.space, self.stream)
    }
}

impl Drop for EagerEnd {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(scope = ?self, %error, "an eager scope has not ended: the arena's replays wait for its thread");
        }
    }
}

impl EagerSpace {
    /// Begins a scope. With `bytes`, leaves leased pages alone which work of this size does not
    /// need.
    pub(crate) fn begin(self: &Arc<Self>, stream: Stream, bytes: Option<u64>) -> Result<EagerScope> {
        let number = self.enter(stream, bytes)?;
        let stream = self.common.pool().events().name(stream);
        let end = EagerEnd { space: Arc::clone(self), stream, number, thread: thread_token() };
        Ok(EagerScope { end, thread: PhantomData })
    }

    fn allocate(&self, size: u64, stream: Stream, kept: bool) -> Result<Address> {
        let bytes = BlockBytes::round_up(size)?;
        self.common.require_usable()?;
        let place = || {
            let state = &mut *self.state.lock();
            if state.scope.as_ref().is_none_or(|(on, _)| on.stream() != stream) {
                return Err(Error::wrong_state(format!(
                    "cannot allocate eager memory: no eager scope is active on stream {:#x}; begin one there",
                    stream.raw()
                )));
            }
            let address = if kept {
                self.common.refuse_hopeless(bytes)?;
                let address = self.common.heap.allocate(&self.common.shared, bytes.get())?;
                state.kept.insert(address, bytes.get());
                address
            } else {
                self.place(state, bytes)?
            };
            state.live_count.add(bytes.get());
            Ok(address)
        };
        self.common.recalled(|| self.common.with_memory_retry(place))
    }
}
