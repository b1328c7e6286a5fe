//! Residency of an arena: whether its pages have memory, and how many of its spaces are open. An
//! arena with open spaces cannot be paused.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pages::{Events, Fence, HostCopy, HostPool, PageId, PagePool, PauseSection};
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
pub(super) struct ResidencyState {
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
pub(crate) struct Residency {
    pub(super) pause_section: PauseSection,
    state: Arc<Mutex<ResidencyState>>,
}

/// Token of a space under capture: the arena is not paused while the token lives.
#[derive(Debug)]
pub(super) struct Opened(Arc<Mutex<ResidencyState>>);

impl ResidencyState {
    fn require_resident(&self) -> Result<()> {
        if self.stage == Stage::Resident {
            return Ok(());
        }
        let found = self.stage.name();
        Err(Error::wrong_state(format!("cannot use the arena: it is {found}; resume it first")))
    }
}

impl Residency {
    /// # Errors
    /// [`Error::WrongState`] unless the arena is resident.
    pub(super) fn require_resident(&self) -> Result<()> {
        self.state.lock().require_resident()
    }

    /// Runs `work` while no pause begins or ends. Returns `None` without a call unless the arena is
    /// resident and all contents are restored.
    pub(super) fn while_resident<T>(&self, events: &Arc<Events>, work: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.state.lock();
        let there = state.require_resident().is_ok() && state.contents.done(events).unwrap_or(false);
        there.then(work)
    }

    /// A leaf lock, except for the locks of the host pool and the page pool.
    pub(super) fn with<T>(&self, access: impl FnOnce(&mut ResidencyState) -> T) -> T {
        access(&mut self.state.lock())
    }

    /// Registers an open space.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the arena is resident.
    pub(super) fn open(&self) -> Result<Opened> {
        let mut state = self.state.lock();
        state.require_resident()?;
        state.open += 1;
        Ok(Opened(Arc::clone(&self.state)))
    }

    pub(crate) fn paused(&self) -> bool {
        self.state.lock().stage == Stage::Paused
    }

    /// Returns a fence after the copies of the last resume.
    pub(super) fn contents(&self, events: &Arc<Events>) -> Fence {
        let mut state = self.state.lock();
        // Drops finished parts. A failed query leaves the fence unfinished.
        let _ = state.contents.done(events);
        state.contents.clone()
    }

    /// Frees host copies of pages which no longer exist.
    pub(super) fn forget(&self, pool: &PagePool, host: &HostPool) {
        let mut state = self.state.lock();
        if state.copies.is_empty() {
            return;
        }
        let contents = state.contents.clone();
        let gone = state.copies.extract_if(|page, _| pool.owner(*page).is_none());
        host.give_copies(gone.map(|(_, copy)| copy), &contents);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
    }
}

impl fmt::Debug for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.state.lock().stage)
    }
}
