//! Registry of a device: pausable memory by tag, hooks, and the host memory for contents. One lock
//! per list, not held during calls.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Weak};

use super::Pausable;
use crate::error::{Error, Result};
use crate::pages::{HostPool, PagePool};
use crate::sync::Mutex;
use crate::units::Address;

/// Memory paused or resumed, as told to hooks.
#[derive(Clone, Copy, Debug)]
pub struct Moved<'a> {
    /// Tag of the memory.
    pub tag: &'a str,
    /// Number of the region or arena.
    pub region: u64,
    /// Counts the residencies, from 1: registrations of one generation are invalid in the next.
    pub generation: u64,
    /// Addresses and bytes, in order.
    pub ranges: &'a [(Address, u64)],
}

/// Callbacks at pause and resume, for example to renew NCCL or RDMA registrations.
pub trait PauseHooks: Send + Sync {
    /// Called before the unmap, after the device's last use, without a lock. Must not pause or
    /// resume the same region (an error).
    fn before_unmap(&self, moved: &Moved<'_>);

    /// Called after the memory is mapped on new pages. Contents are complete, except after an
    /// asynchronous resume: then after its event. May be called more than once per generation.
    fn after_map(&self, moved: &Moved<'_>);
}

type Hooked = (String, Weak<dyn PauseHooks>);

pub(crate) struct Pausables {
    pool: Arc<PagePool>,
    host: HostPool,
    all: Mutex<Vec<Weak<dyn Pausable>>>,
    hooks: Mutex<Vec<Hooked>>,
}

impl Pausables {
    pub(crate) fn new(pool: &Arc<PagePool>) -> Self {
        let (all, hooks) = (Mutex::default(), Mutex::default());
        Self { pool: Arc::clone(pool), host: HostPool::new(pool), all, hooks }
    }

    pub(crate) fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    pub(crate) fn host_pool(&self) -> &HostPool {
        &self.host
    }

    pub(crate) fn add(&self, pausable: Weak<dyn Pausable>) {
        let mut all = self.all.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(pausable);
    }

    /// Objects with one of these tags, by number. Without tags: all objects.
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

    /// The caller has no lock.
    pub(super) fn call_hooks(&self, moved: &Moved<'_>, gone: bool) {
        let all = self.hooks.lock().clone();
        let _inside = HookGuard::enter();
        for (_, hooks) in all.iter().filter(|(tag, _)| tag.is_empty() || tag == moved.tag) {
            if let Some(hooks) = hooks.upgrade() {
                if gone { hooks.before_unmap(moved) } else { hooks.after_map(moved) }
            }
        }
    }
}

impl fmt::Debug for Pausables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pausables", self.all.lock().len())
    }
}

thread_local! {
    /// Nested hooks on this thread.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

pub(crate) struct HookGuard(());

impl HookGuard {
    pub(crate) fn enter() -> Self {
        INSIDE.with(|inside| inside.set(inside.get() + 1));
        Self(())
    }

    /// Refuses a wait inside a hook, for which the other thread may wait.
    pub(crate) fn refuse(what: &'static str) -> Result<()> {
        if INSIDE.with(Cell::get) == 0 {
            return Ok(());
        }
        Err(Error::wrong_state(format!(
            "cannot wait for {what} here: this thread is in a hook of a pause or resume that may wait for it; call it outside"
        )))
    }
}

impl Drop for HookGuard {
    fn drop(&mut self) {
        INSIDE.with(|inside| inside.set(inside.get().saturating_sub(1)));
    }
}
