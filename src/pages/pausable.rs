//! Pausable memory: regions and arenas, which release their pages at a pause and get memory at the
//! same addresses at a resume.
//!
//! [`Pausables`] is the registry of a device: finds pausable memory by tag, and calls the hooks.
//! The traits split a resume into steps, so several objects resume together or not at all.
//!
//! [`Pausables`] has one lock per list, not held during calls. [`PauseSection`] is the exclusive
//! section of a pause or resume of one object.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::host_pool::CopyPath;
use super::{Fence, PageId, Transaction};
use crate::error::{Error, Result};
use crate::sync::{ExclusiveSection, Mutex, thread_token};
use crate::units::{Address, Stream};

const GIB: f64 = (1_u64 << 30) as f64;

/// Result of a pause.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PauseReport {
    /// Regions and arenas paused by this call, without those paused before.
    pub regions: u64,
    /// Pages released.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Bytes copied to the host.
    pub copied_bytes: u64,
    /// Bytes already on the host from an earlier pause, not copied again.
    pub clean_bytes: u64,
    /// Bytes kept resident by policy `keep`, and as private blocks of an arena.
    pub kept_bytes: u64,
    /// Bytes kept resident because of a failure.
    pub left_bytes: u64,
    /// Pages declared unwritten, but found written, and copied.
    pub stale_pages: u64,
    /// Driver calls: copies, fills, unmaps, releases.
    pub calls: u64,
    /// Duration of the call in microseconds.
    pub micros: u64,
    /// Time from the first copy to the end of the last, in microseconds.
    pub copy_micros: u64,
    /// Slowest copy path used.
    pub path: CopyPath,
    /// All failures, in order. Failed pages keep their state and are retried by the next pause.
    pub failures: Vec<Error>,
}

/// Result of a resume.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResumeReport {
    /// Regions and arenas resumed by this call, without resident ones.
    pub regions: u64,
    /// Pages made resident.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Bytes copied from the host.
    pub copied_bytes: u64,
    /// Bytes set to zero.
    pub zeroed_bytes: u64,
    /// Driver calls: creates, maps, accesses, copies, fills.
    pub calls: u64,
    /// Duration of the call in microseconds.
    pub micros: u64,
    /// Part of `micros` spent waiting for memory.
    pub waited_micros: u64,
    /// Time from the first copy to the end of the last, in microseconds. 0 for a resume that does
    /// not wait for copies.
    pub copy_micros: u64,
    /// Slowest copy path used.
    pub path: CopyPath,
}

fn rate(bytes: u64, micros: u64) -> f64 {
    if micros == 0 { 0.0 } else { bytes as f64 / GIB / (micros as f64 / 1e6) }
}

impl PauseReport {
    /// Returns the copy speed in GiB/s, or 0 without copies.
    #[must_use]
    pub fn copy_gib_per_second(&self) -> f64 {
        rate(self.copied_bytes, self.copy_micros)
    }

    /// Returns the first failure, if any.
    ///
    /// # Errors
    /// The first failure.
    pub fn complete(&self) -> Result<()> {
        self.failures.first().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Adds a second report.
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
    /// Returns the copy speed in GiB/s, or 0 without copies or without a wait.
    #[must_use]
    pub fn copy_gib_per_second(&self) -> f64 {
        rate(self.copied_bytes, self.copy_micros)
    }
}

/// Returns a number for a region, an arena or a lease, unique in the process.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory with pause and resume.
pub trait Pausable: Send + Sync + fmt::Debug {
    /// Tag for lookup. An object with an empty tag is found only by a lookup of all.
    fn tag(&self) -> &str;

    /// Number, unique in the process. Several objects are locked in this order.
    fn id(&self) -> u64;

    /// Releases its pages after a fence. See [`PauseReport`].
    ///
    /// # Errors
    /// Nothing changed: the fence cannot be waited for, or the caller is a hook.
    fn pause(&self, fence: Fence) -> Result<PauseReport>;

    /// Begins a resume. `None`: already resident.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the caller is a hook and would wait for itself.
    fn resuming(&self) -> Result<Option<Box<dyn Resuming + '_>>>;

    /// Returns the fence of the copies of the last resume.
    fn contents(&self) -> Fence;

    /// Called before a pinned page is exported: from now on the page keeps addresses and contents.
    ///
    /// # Errors
    /// The reason of a refusal. The caller then removes the pin.
    fn pin_page(&self, page: PageId) -> Result<()> {
        let (value, expected) = (page.number().into(), "that of a page of an arena");
        Err(Error::InvalidArgument { what: "a page's number", value, expected })
    }

    /// Marks the last replay, if the replay ran on this stream.
    ///
    /// # Errors
    /// Driver errors; the stream is under capture.
    fn mark_on(&self, stream: Stream) -> Result<()> {
        // Default: no replays.
        let _ = stream;
        Ok(())
    }

    /// Polls memory freed while in use by a stream. Does not wait.
    fn poll_pending(&self) {
        // Default: no such memory.
    }

    /// Frees unused memory, after waiting for streams for at most `limit`. Returns the bytes.
    fn give_up(&self, limit: Duration) -> u64 {
        // Default: no such memory.
        let _ = limit;
        0
    }
}

/// A resume in progress. If dropped before [`finish`](Self::finish), the memory stays paused.
pub trait Resuming {
    /// Returns the bytes of pages to be taken.
    fn missing(&self) -> u64;

    /// Takes the pages. May be called again after an undo of the transaction.
    ///
    /// # Errors
    /// Out of memory; driver errors.
    fn take(&mut self, transaction: &mut Transaction<'_>) -> Result<()>;

    /// Maps the pages.
    ///
    /// # Errors
    /// Driver errors.
    fn map(&mut self, transaction: &mut Transaction<'_>, report: &mut ResumeReport) -> Result<()>;

    /// Submits the copies and fills of the contents.
    ///
    /// # Errors
    /// Driver errors; [`contents`](Self::contents) includes already submitted work.
    fn fill(&mut self, report: &mut ResumeReport) -> Result<()>;

    /// Returns the fence of the contents.
    fn contents(&self) -> Fence;

    /// Called after the commit: the memory is resident, and its contents are complete after the
    /// fence.
    fn finish(self: Box<Self>);
}

/// Memory paused or resumed, as told to hooks.
#[derive(Clone, Copy, Debug)]
pub struct Moved<'a> {
    /// Tag of the memory.
    pub tag: &'a str,
    /// Number of the region or arena.
    pub region: u64,
    /// Counts the residencies of the region or arena, from 1. Registrations of one generation are
    /// invalid in the next.
    pub generation: u64,
    /// Addresses and bytes, in order.
    pub ranges: &'a [(Address, u64)],
}

/// Callbacks at pause and resume, for example to renew NCCL or RDMA registrations.
pub trait PauseHooks: Send + Sync {
    /// Called before the unmap, after the device's last use. No lock is held. Must not pause or
    /// resume the same region (returns an error).
    fn before_unmap(&self, moved: &Moved<'_>);

    /// Called after the memory is mapped on new pages and accessible by the device itself. Contents
    /// are complete, except after an asynchronous resume: then after its event. May be called more
    /// than once per generation.
    fn after_map(&self, moved: &Moved<'_>);
}

type Hooked = (String, Weak<dyn PauseHooks>);

/// Registry of pausable memory and hooks of one device.
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

    /// Returns the objects with one of these tags, by number. Without tags: all objects.
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

    /// Calls the hooks. The caller has no lock.
    pub(crate) fn call_hooks(&self, moved: &Moved<'_>, gone: bool) {
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
    /// Number of nested hooks on this thread.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// Marks this thread as inside a hook, until dropped.
pub(crate) struct HookGuard(());

impl HookGuard {
    pub(crate) fn enter() -> Self {
        INSIDE.with(|inside| inside.set(inside.get() + 1));
        Self(())
    }

    /// Refuses a wait inside a hook, since the other thread may wait for this hook.
    pub(crate) fn refuse(what: &'static str) -> Result<()> {
        if INSIDE.with(Cell::get) == 0 {
            return Ok(());
        }
        Err(Error::wrong_state(format!(
            "cannot wait for {what} here: this thread is in a hook of a pause or resume that may wait for it; call it outside"
        )))
    }
}

/// Exclusive section of one object's pause or resume.
#[derive(Debug, Default)]
pub(crate) struct PauseSection(ExclusiveSection);

impl PauseSection {
    /// Enters the section, after waiting for its current thread. Ends with [`give`](Self::give).
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread is in the section, if the wait would be a deadlock, or
    /// for a wait inside a hook.
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

    /// As [`take`](Self::take), but returns `false` instead of waiting.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread is in the section.
    pub(crate) fn try_take(&self, what: &'static str) -> Result<bool> {
        if self.0.is_of(thread_token()) {
            return Err(Error::wrong_state(format!(
                "cannot pause or resume {what}: this thread is doing so already; do it when that call has returned"
            )));
        }
        Ok(self.0.try_enter())
    }

    /// Waits until no thread is in the section.
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
