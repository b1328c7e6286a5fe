//! What can step aside: memory with a tag that gives its pages back and comes back at the same addresses.
//!
//! Whoever holds such memory is found here by its tag, and those who want to know hear of it. What is common to all of them is the
//! reports and the two phases of coming back, so that several come back together or not at all.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::host_pool::CopyPath;
use super::{Change, Fence, PageId};
use crate::error::{Error, Result};
use crate::sync::{ExclusiveSection, Mutex, thread_token};
use crate::units::{Address, Stream};

/// Bytes of a GiB.
const GIB: f64 = (1_u64 << 30) as f64;

/// What a pause did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PauseReport {
    /// Regions and arenas that were paused by this call; those that were before are not counted.
    pub regions: u64,
    /// Pages that went.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes copied to the host.
    pub copied_bytes: u64,
    /// Bytes that were not copied, because the host has them from an earlier pause.
    pub clean_bytes: u64,
    /// Bytes that stay by their policy, keep, and as exclusive blocks of an arena.
    pub kept_bytes: u64,
    /// Bytes that stay because something failed.
    pub left_bytes: u64,
    /// Pages that were said to be unwritten and were not. They were copied.
    pub stale_pages: u64,
    /// Calls to the driver: copies, fills, unmaps, releases.
    pub calls: u64,
    /// All of it, in microseconds.
    pub micros: u64,
    /// From the first copy to the end of the last, in microseconds.
    pub copy_micros: u64,
    /// How the bytes went.
    pub path: CopyPath,
    /// Everything that failed, in order. What failed stays as it was and is tried again by the next pause.
    pub failures: Vec<Error>,
}

/// What a resume did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResumeReport {
    /// Regions and arenas that came back by this call; those that were there are not counted.
    pub regions: u64,
    /// Pages that came.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes copied from the host.
    pub copied_bytes: u64,
    /// Bytes set to zero.
    pub zeroed_bytes: u64,
    /// Calls to the driver: creates, maps, accesses, copies, fills.
    pub calls: u64,
    /// All of it, in microseconds.
    pub micros: u64,
    /// Of these, spent waiting for memory, in microseconds.
    pub waited_micros: u64,
    /// From the first copy to the end of the last, in microseconds; 0 if nobody waited for that.
    pub copy_micros: u64,
    /// How the bytes went.
    pub path: CopyPath,
}

fn rate(bytes: u64, micros: u64) -> f64 {
    if micros == 0 { 0.0 } else { bytes as f64 / GIB / (micros as f64 / 1e6) }
}

impl PauseReport {
    /// Copied bytes in GiB a second of the copies' time; 0: nothing was copied.
    #[must_use]
    pub fn copy_gib_per_second(&self) -> f64 {
        rate(self.copied_bytes, self.copy_micros)
    }

    /// The first failure, if there was one.
    ///
    /// # Errors
    /// That failure.
    pub fn complete(&self) -> Result<()> {
        self.failures.first().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Adds what another one did.
    pub fn join(&mut self, other: Self) {
        self.regions += other.regions;
        self.pages += other.pages;
        self.bytes += other.bytes;
        self.copied_bytes += other.copied_bytes;
        self.clean_bytes += other.clean_bytes;
        self.kept_bytes += other.kept_bytes;
        self.left_bytes += other.left_bytes;
        self.stale_pages += other.stale_pages;
        self.calls += other.calls;
        self.micros += other.micros;
        self.copy_micros += other.copy_micros;
        self.path = self.path.max(other.path);
        self.failures.extend(other.failures);
    }
}

impl ResumeReport {
    /// Copied bytes in GiB a second of the copies' time; 0: nothing was copied, or nobody waited.
    #[must_use]
    pub fn copy_gib_per_second(&self) -> f64 {
        rate(self.copied_bytes, self.copy_micros)
    }
}

/// A number that nothing else in the process has that can step aside: a region or an arena.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory that can step aside.
pub trait Pausable: Send + Sync + fmt::Debug {
    /// What it is found by; empty: by nothing but being all.
    fn tag(&self) -> &str;

    /// Its number, unique in the process: several are taken in the order of these.
    fn id(&self) -> u64;

    /// Gives its pages back behind a fence; see [`PauseReport`].
    ///
    /// # Errors
    /// Nothing has changed: the fence cannot be waited for, or the call comes from a hook.
    fn pause(&self, fence: Fence) -> Result<PauseReport>;

    /// Begins to come back; `None`: it is there.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the call comes from a hook and would wait for itself.
    fn resuming(&self) -> Result<Option<Box<dyn Resuming + '_>>>;

    /// What is behind the contents that the last resume copies.
    fn contents(&self) -> Fence;

    /// Others are about to have one of its pages, which is pinned: it stays what it is from now on.
    ///
    /// # Errors
    /// Why it cannot; then the pin is taken away.
    fn stay(&self, page: PageId) -> Result<()> {
        let (value, expected) = (page.number().into(), "that of a page of an arena");
        Err(Error::InvalidArgument { what: "a page's number", value, expected })
    }

    /// A mark behind its last replay, if that was on this stream.
    ///
    /// # Errors
    /// What the driver says; that the stream is captured.
    fn mark_on(&self, stream: Stream) -> Result<()> {
        // Nothing, for what is not replayed.
        let _ = stream;
        Ok(())
    }

    /// Looks again at memory that was freed while a stream could still use it. Waits for nothing.
    fn look_again(&self) {
        // Nothing, for what keeps nothing so.
    }

    /// Gives up what it has and nobody uses, after waiting for streams no longer than `limit`; its bytes.
    fn give_up(&self, limit: Duration) -> u64 {
        // Nothing, for what keeps nothing so.
        let _ = limit;
        0
    }
}

/// Memory on its way back. Dropped before it is [finished](Self::finish), it stays paused.
pub trait Resuming {
    /// Bytes of the pages that it takes.
    fn missing(&self) -> u64;

    /// Takes its pages; may be called again after the change was undone.
    ///
    /// # Errors
    /// No memory, or what the driver says.
    fn take(&mut self, change: &mut Change<'_>) -> Result<()>;

    /// Maps them.
    ///
    /// # Errors
    /// What the driver says.
    fn map(&mut self, change: &mut Change<'_>, report: &mut ResumeReport) -> Result<()>;

    /// Begins to bring the contents back.
    ///
    /// # Errors
    /// What the driver says; [`contents`](Self::contents) is behind what was begun all the same.
    fn fill(&mut self, report: &mut ResumeReport) -> Result<()>;

    /// What is behind the contents.
    fn contents(&self) -> Fence;

    /// The change is committed: it is there, its contents behind that fence.
    fn finish(self: Box<Self>);
}

/// Memory that goes or has come.
#[derive(Clone, Copy, Debug)]
pub struct Moved<'a> {
    /// Its tag.
    pub tag: &'a str,
    /// The region's number, or the arena's.
    pub region: u64,
    /// Counts the mappings of the region or arena from 1 on: what was registered under one generation is not there under another.
    pub generation: u64,
    /// The addresses and their bytes, in order.
    pub ranges: &'a [(Address, u64)],
}

/// Who wants to know that memory goes and comes: registrations of NCCL or RDMA end before and are made again after.
pub trait PauseHooks: Send + Sync {
    /// The device is done with the memory, which is unmapped next. No lock is held; pausing or resuming the same region here is an
    /// error.
    fn before_unmap(&self, moved: &Moved<'_>);

    /// The memory is there again, on other pages, and usable by the device's own access. Its contents are there, but after an
    /// asynchronous resume, where they are behind its event. May be called more than once for a generation.
    fn after_map(&self, moved: &Moved<'_>);
}

/// A tag, and who wants to know of it.
type Hooked = (String, Weak<dyn PauseHooks>);

/// What can step aside on one device, and who wants to know.
#[derive(Default)]
pub(crate) struct Pausables {
    all: Mutex<Vec<Weak<dyn Pausable>>>,
    hooks: Mutex<Vec<Hooked>>,
}

impl Pausables {
    pub(crate) fn add(&self, pausable: Weak<dyn Pausable>) {
        let mut all = self.all.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(pausable);
    }

    /// Those with one of these tags, in the order of their numbers; no tags: all.
    pub(crate) fn tagged(&self, tags: &[&str]) -> Vec<Arc<dyn Pausable>> {
        let all: Vec<_> = self.all.lock().iter().filter_map(Weak::upgrade).collect();
        let mut found: Vec<_> =
            all.into_iter().filter(|known| tags.is_empty() || tags.contains(&known.tag())).collect();
        found.sort_by_key(|known| known.id());
        found
    }

    pub(crate) fn add_hooks(&self, tag: &str, hooks: &Arc<dyn PauseHooks>) {
        let mut all = self.hooks.lock();
        all.retain(|(_, known)| known.strong_count() > 0);
        all.push((tag.to_owned(), Arc::downgrade(hooks)));
    }

    fn hooks(&self, tag: &str) -> Vec<Arc<dyn PauseHooks>> {
        let hooks = self.hooks.lock();
        hooks
            .iter()
            .filter(|(of, _)| of.is_empty() || of == tag)
            .filter_map(|(_, hooks)| hooks.upgrade())
            .collect()
    }

    /// Tells those who want to know. The caller holds no lock.
    pub(crate) fn tell(&self, moved: &Moved<'_>, gone: bool) {
        let hooks = self.hooks(moved.tag);
        let _inside = HookGuard::enter();
        for hooks in hooks {
            if gone { hooks.before_unmap(moved) } else { hooks.after_map(moved) }
        }
    }
}

impl fmt::Debug for Pausables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pausables", self.all.lock().len())
    }
}

thread_local! {
    /// How many hooks this thread is inside of.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, this thread is inside a hook.
pub(crate) struct HookGuard(());

impl HookGuard {
    pub(crate) fn enter() -> Self {
        INSIDE.with(|inside| inside.set(inside.get() + 1));
        Self(())
    }

    /// Refuses what would wait, inside a hook: whoever is waited for may wait for this one.
    pub(crate) fn refuse(what: &'static str) -> Result<()> {
        if INSIDE.with(Cell::get) == 0 {
            return Ok(());
        }
        Err(Error::wrong_state(format!(
            "cannot wait for {what} here: this thread is in a hook of a pause or resume that may wait for it; call it outside"
        )))
    }
}

/// The exclusive section of the thread that moves the pages of something that can step aside.
#[derive(Debug, Default)]
pub(crate) struct MoveTurn(ExclusiveSection);

impl MoveTurn {
    /// Waits until nobody moves the pages of `what`, and keeps others from it until [`give`](Self::give).
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread moves them, if the thread that does waits for this one in
    /// the end, or if it would wait inside a hook.
    pub(crate) fn take(&self, what: &'static str) -> Result<()> {
        if self.try_take(what)? {
            return Ok(());
        }
        HookGuard::refuse(what)?;
        self.0.enter().map_err(|_| {
            Error::wrong_state(format!(
                "cannot pause or resume {what}: a thread that waits for this one is doing so; let that thread finish first"
            ))
        })
    }

    /// As [`take`](Self::take), but `false` where it would wait.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread moves them.
    pub(crate) fn try_take(&self, what: &'static str) -> Result<bool> {
        if self.0.is_of(thread_token()) {
            return Err(Error::wrong_state(format!(
                "cannot pause or resume {what}: this thread is doing so already; do it when that call has returned"
            )));
        }
        Ok(self.0.try_enter())
    }

    /// Waits until nobody moves the pages of `what`.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(crate) fn wait(&self, what: &'static str) -> Result<()> {
        self.take(what)?;
        self.give();
        Ok(())
    }

    pub(crate) fn give(&self) {
        self.0.leave();
    }
}

impl Drop for HookGuard {
    fn drop(&mut self) {
        INSIDE.with(|inside| inside.set(inside.get().saturating_sub(1)));
    }
}
