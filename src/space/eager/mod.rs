//! Eager work on the pages of an arena, ordered as one replay of it.
//!
//! ```text
//!   begin     the arena's turn; shared pages that left their numbers are replaced, behind the last scope   -> no driver call, mostly
//!   allocate  the layout of a capture, over the shared numbers; addresses and mappings stay from scope to scope
//!   end       pages under live blocks *leave* the shared set: they are the eager space's own, as they are, where they are
//!   later     whoever showed such a page gets another one before it is replayed next (refresh.rs)
//! ```
//!
//! A page that left stays the eager space's own as long as it holds a block where a scope ends: so work that leaves its results in the
//! same places every time moves no page. What is left of the page is for the next scope's blocks. Then it is shared again.
//!
//! Layout numbers are not shared numbers: own pages have none, and the others take the lowest that are free (`slots.rs`), so that an
//! arena has as many pages as the graphs need beside those that left, or eager work in all, whichever is more.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use serde::Serialize;

use super::layout::Layout;
use super::live_count::LiveCount;
use super::users::Users;
use super::{Common, next_space};
use crate::error::{Error, Result};
use crate::pages::{AccountId, Events, Fence, Holder, Mark, NamedStream, PageNo, Reclaimer};
use crate::sync::{Mutex, thread_token};
use crate::units::{Address, BlockBytes, Stream};

mod blocks;
mod generation;
mod slots;
mod turns;

use blocks::Waiting;
use generation::Generation;

/// The layout keeps streams apart. The work of one scope is on one stream, and scopes are in order, so that there is one.
const ANY: Stream = Stream::LEGACY;

/// What the eager work of an arena uses, and what it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EagerStats {
    /// Scopes begun so far.
    pub scopes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Their bytes, rounded up to 512 each.
    pub live_bytes: u64,
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Bytes of pages that are eager work's own: something was live on them when a scope ended.
    pub own_bytes: u64,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them.
    pub mapped_bytes: u64,
    /// Mappings made so far.
    pub maps: u64,
    /// Pages that left the shared set so far.
    pub pages_left: u64,
    /// Pages that came back to it.
    pub pages_returned: u64,
    /// Mappings made in graphs because pages left.
    pub graph_maps: u64,
    /// How often it began anew with other addresses.
    pub renewals: u64,
}

/// The addresses of an arena's eager work, and its blocks.
pub(crate) struct EagerSpace {
    id: u64,
    common: Arc<Common>,
    state: Mutex<State>,
}

struct State {
    /// Where the scope under way works, and what is behind everything before it.
    scope: Option<(NamedStream, Mark)>,
    current: Generation,
    /// Addresses that only live blocks keep.
    old: Vec<Generation>,
    /// Streams that use a live block besides its own.
    users: Users,
    /// Blocks that were live when a scope ended, and the stream they were made for.
    outlived: HashMap<Address, NamedStream>,
    /// Freed, and perhaps still in use.
    waiting: Vec<Waiting>,
    kept: BTreeMap<Address, u64>,
    live_count: LiveCount,
    /// Behind the last scope; `None`: nobody could say.
    last: Option<Mark>,
    /// The version of the shared set at the last look.
    seen: u64,
    /// A slot is to have another page than it shows.
    moved: bool,
    /// Numbers of large pages that were on lease when the scope under way began, or at a later look: it takes none of them.
    lent: BTreeSet<u32>,
    /// The layout's numbers that show them, out of use until it ends.
    aside: Vec<PageNo>,
    /// Undoing failed: nothing more is mapped here.
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
            aside: Vec::new(),
            broken: false,
            counts: EagerStats::default(),
        };
        let space = Arc::new(Self { id: next_space(), common: Arc::clone(common), state: Mutex::new(state) });
        *common.eager.lock() = Arc::downgrade(&space);
        let reclaimer: Arc<dyn Reclaimer> = space.clone();
        common.device.add_reclaimer(&reclaimer);
        space
    }

    /// Who has the pages that left the shared set.
    pub(super) fn own(&self) -> Holder {
        Holder::Retained { arena: self.common.shared.arena(), space: self.id }
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
            graph_maps: self.common.totals.replaced.load(Ordering::Relaxed),
            ..state.counts
        }
    }

    /// Behind what everybody was given who is known to use its blocks.
    pub(crate) fn users(&self) -> Fence {
        self.state.lock().users(self.common.pool().events())
    }

    /// Whether every live block has bytes of its own: no number is behind two slots, each tile shows what its slot says, and what
    /// outlived a scope is on pages that are nobody else's.
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
            blocks.filter(|(no, _)| state.current.layout.holds(*no) && !state.aside.contains(no));
        match blocks.find(|(_, slot)| !self.common.pool().leases([slot.page].iter()).is_empty()) {
            Some((no, slot)) => Err(Error::Internal {
                what: format!("{self:?}: {no:?} has blocks on {:?}, which is on lease", slot.page),
            }),
            None => Ok(()),
        }
    }

    /// Gives back all memory but that under live blocks; the bytes of addresses that had some. Nothing while a scope is under way.
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
    /// Addresses and mappings kept for the next scope cost that scope some calls if they go.
    fn reclaim(&self, bytes: u64) -> u64 {
        let free = |pool: &crate::pages::PagePool| pool.stats().free_bytes;
        let before = free(self.common.pool());
        if bytes > 0 && self.release() > 0 {
            // Behind the arena's replays, which whoever asks may wait for.
            self.common.pool().finish_waiting(std::time::Duration::from_secs(2));
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
            // It does not count any more.
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
        common.presence.forget(common.pool(), common.device.host_pool());
        // Only now: a pause waits until its fences are where they can be found.
        *common.eager.lock() = Weak::new();
        common.pool().check();
    }
}

impl fmt::Debug for EagerSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EagerSpace({})", self.id)
    }
}

/// The blocks of an arena's eager work: what frees those that outlive their scope. Holds them and not the arena.
///
/// Thread-safe. No call waits for anything.
#[derive(Clone, Debug)]
pub struct EagerBlocks {
    space: Arc<EagerSpace>,
}

impl EagerBlocks {
    pub(crate) fn new(space: Arc<EagerSpace>) -> Self {
        Self { space }
    }

    /// Frees a block. Within a scope on the stream that it was made for, its bytes serve the scope's next block; else they are nobody
    /// else's until that stream and those in `readers` have passed. In either case those [noted](Self::record_stream) for it have
    /// to pass.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] or [`Error::DoubleFree`], with nothing changed; [`Error::Closed`].
    pub fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.space.free(address, readers)
    }

    /// Notes that `stream` uses the block as well: once it is freed, its bytes are nobody else's before what `stream` was given until
    /// then is done.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.space.record_stream(address, stream)
    }

    /// Closes the arena after a bug was caught.
    #[cfg(feature = "bridge")]
    pub(crate) fn close_arena(&self) {
        self.space.common.closed.store(true, Ordering::Relaxed);
    }

    /// Allocates in the scope that is under way; see [`EagerScope::allocate`] and [`EagerScope::allocate_kept`].
    ///
    /// # Errors
    /// Those of [`EagerScope::allocate`]; [`Error::WrongState`] if none is under way on this stream.
    pub fn allocate(&self, size: u64, stream: Stream, kept: bool) -> Result<Address> {
        self.space.allocate(size, stream, kept)
    }
}

/// Eager work of one stream whose blocks lie on the arena's shared pages. It is in the order of the arena's replays, as one of them: from
/// [`SharedVmmAllocator::eager_scope`](crate::SharedVmmAllocator::eager_scope) until it is dropped no replay of the arena is launched. So the memory of what no graph
/// covers is that of the graphs.
///
/// Contents are real: a block that is live when the scope ends keeps its address, its pages and its bytes until it is freed
/// ([`EagerBlocks`]), whatever is replayed. Its pages are not the arena's meanwhile, so what is small and lasts is better
/// [kept](Self::allocate_kept).
///
/// For one thread, which may do anything meanwhile but replay, capture, pause or begin another scope in this arena. Work is given to
/// the scope's stream only, or to streams that are joined with it before its end.
pub struct EagerScope {
    end: EagerEnd,
    /// Its thread has the arena's turn.
    thread: PhantomData<*const ()>,
}

/// What ends an [`EagerScope`], for a program that may come to the end on another thread than the scope's: one whose scopes are collected or cancelled.
/// Dropping it is the end.
pub struct EagerEnd {
    space: Arc<EagerSpace>,
    stream: NamedStream,
    /// Which of the arena's scopes it is.
    number: u64,
    /// Whose turn it is, by token.
    thread: u64,
}

impl EagerScope {
    /// Its stream.
    #[must_use]
    pub fn stream(&self) -> Stream {
        self.end.stream.stream()
    }

    /// A block of at least `size` bytes (rounded up to 512), aligned to 512 bytes, with undefined contents, for work on the scope's stream.
    /// As [`Space::allocate`](crate::Space::allocate); no driver call once scopes have needed what this one needs.
    ///
    /// # Errors
    /// Those of [`Space::allocate`](crate::Space::allocate).
    pub fn allocate(&self, size: u64) -> Result<Address> {
        self.end.space.allocate(size, self.stream(), false)
    }

    /// A block that will outlive the scope: it lies packed with the arena's other kept blocks on pages that no graph uses, so that none
    /// is exchanged for it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_kept(&self, size: u64) -> Result<Address> {
        self.end.space.allocate(size, self.stream(), true)
    }

    /// Frees a block; its bytes serve the next one.
    ///
    /// # Errors
    /// Those of [`EagerBlocks::free`].
    pub fn free(&self, address: Address) -> Result<()> {
        self.end.space.free(address, &[])
    }

    /// See [`EagerBlocks::record_stream`].
    ///
    /// # Errors
    /// Those of [`EagerBlocks::record_stream`].
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.end.space.record_stream(address, stream)
    }

    /// What frees blocks after the scope.
    #[must_use]
    pub fn blocks(&self) -> EagerBlocks {
        EagerBlocks { space: Arc::clone(&self.end.space) }
    }

    /// What ends it, on any thread; blocks come from [`EagerBlocks::allocate`] until then.
    #[must_use]
    pub fn into_end(self) -> EagerEnd {
        self.end
    }
}

impl EagerEnd {
    /// Ends the scope; nothing if it has ended. Its work has been given to the stream.
    ///
    /// # Errors
    /// [`Error::WrongState`] where its stream cannot be named, a default one of another thread or of a context that is not current: it is
    /// under way as before.
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
    /// Begins a scope; with a number of bytes, beside pages on lease that so much does not need.
    pub(crate) fn begin(self: &Arc<Self>, stream: Stream, bytes: Option<u64>) -> Result<EagerScope> {
        let number = self.enter(stream, bytes)?;
        let stream = self.common.pool().events().name(stream);
        let end = EagerEnd { space: Arc::clone(self), stream, number, thread: thread_token() };
        Ok(EagerScope { end, thread: PhantomData })
    }

    fn allocate(&self, size: u64, stream: Stream, kept: bool) -> Result<Address> {
        let bytes = BlockBytes::round_up(size)?;
        self.common.usable()?;
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
        self.common.recalled(|| self.common.relieved(place))
    }
}
