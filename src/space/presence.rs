//! Residency of an arena: whether its pages have memory, and how many of its spaces are open. An
//! arena with open spaces cannot be paused.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pages::{Events, Fence, HostCopy, HostPool, MoveTurn, PageId, PagePool};
use crate::sync::Mutex;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Resident,
    Pausing,
    Paused,
    Resuming,
}

impl Stage {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Pausing => "being paused",
            Self::Paused => "paused",
            Self::Resuming => "being resumed",
        }
    }
}

/// State of pause and resume.
#[derive(Debug, Default)]
pub(super) struct Aside {
    pub(super) stage: Stage,
    /// Spaces under capture.
    pub(super) open: u64,
    /// Resumes so far.
    pub(super) returns: u64,
    /// Host copies of pages with persistent contents. A copy is valid while it is in this table.
    pub(super) copies: HashMap<PageId, HostCopy>,
    /// Fence after the copies of the last resume.
    pub(super) contents: Fence,
}

#[derive(Default)]
pub(crate) struct Presence {
    pub(super) turn: MoveTurn,
    aside: Arc<Mutex<Aside>>,
}

/// Token of a space under capture: the arena is not paused while the token lives.
#[derive(Debug)]
pub(super) struct Opened(Arc<Mutex<Aside>>);

impl Aside {
    fn require_resident(&self) -> Result<()> {
        if self.stage == Stage::Resident {
            return Ok(());
        }
        let found = self.stage.name();
        Err(Error::wrong_state(format!("cannot use the arena: it is {found}; resume it first")))
    }
}

impl Presence {
    /// # Errors
    /// [`Error::WrongState`] unless the arena is resident.
    pub(super) fn require_resident(&self) -> Result<()> {
        self.aside.lock().require_resident()
    }

    /// Runs `work` while no pause begins or ends. Returns `None` without a call unless the arena is
    /// resident and all contents are restored.
    pub(super) fn while_there<T>(&self, events: &Arc<Events>, work: impl FnOnce() -> T) -> Option<T> {
        let mut aside = self.aside.lock();
        let there = aside.require_resident().is_ok() && aside.contents.done(events).unwrap_or(false);
        there.then(work)
    }

    /// A leaf lock, except for the locks of the host pool and the page pool.
    pub(super) fn with<T>(&self, look: impl FnOnce(&mut Aside) -> T) -> T {
        look(&mut self.aside.lock())
    }

    /// Registers an open space.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the arena is resident.
    pub(super) fn open(&self) -> Result<Opened> {
        let mut aside = self.aside.lock();
        aside.require_resident()?;
        aside.open += 1;
        Ok(Opened(Arc::clone(&self.aside)))
    }

    pub(crate) fn paused(&self) -> bool {
        self.aside.lock().stage == Stage::Paused
    }

    /// Returns a fence after the copies of the last resume.
    pub(super) fn contents(&self, events: &Arc<Events>) -> Fence {
        let mut aside = self.aside.lock();
        // Drops finished parts. A failed query leaves the fence unfinished.
        let _ = aside.contents.done(events);
        aside.contents.clone()
    }

    /// Frees host copies of pages which no longer exist.
    pub(super) fn forget(&self, pool: &PagePool, host: &HostPool) {
        let mut aside = self.aside.lock();
        if aside.copies.is_empty() {
            return;
        }
        let contents = aside.contents.clone();
        let gone = aside.copies.extract_if(|page, _| pool.holder(*page).is_none());
        host.give_copies(gone.map(|(_, copy)| copy), &contents);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
    }
}

impl fmt::Debug for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.aside.lock().stage)
    }
}
