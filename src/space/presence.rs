//! Whether an arena's pages are there, and which of its spaces are open: the two exclude each other.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pages::{Events, Fence, HostCopy, HostPool, MoveTurn, PageId, PagePool};
use crate::sync::Mutex;

/// Where an arena stands.
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

/// What is known of an arena that can step aside.
#[derive(Debug, Default)]
pub(super) struct Aside {
    pub(super) stage: Stage,
    /// Spaces that are being captured.
    pub(super) open: u64,
    /// How often it came back.
    pub(super) returns: u64,
    /// What the host has of pages with blocks that outlive replays. It counts as long as it is here, whatever the page holds.
    pub(super) copies: HashMap<PageId, HostCopy>,
    /// Behind what the last resume copies.
    pub(super) contents: Fence,
}

/// Whether an arena's pages are there.
#[derive(Default)]
pub(crate) struct Presence {
    pub(super) turn: MoveTurn,
    aside: Arc<Mutex<Aside>>,
}

/// A space is being captured: as long as this lives the arena is not paused.
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

    /// Does something while no pause begins or ends; `None`, and nothing, unless the arena is resident and all that the last resume copies is there.
    pub(super) fn while_there<T>(&self, events: &Arc<Events>, work: impl FnOnce() -> T) -> Option<T> {
        let mut aside = self.aside.lock();
        let there = aside.require_resident().is_ok() && aside.contents.done(events).unwrap_or(false);
        there.then(work)
    }

    /// A leaf among the locks, but for the host pool's and that of the pages.
    pub(super) fn with<T>(&self, look: impl FnOnce(&mut Aside) -> T) -> T {
        look(&mut self.aside.lock())
    }

    /// A space is opened.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the arena is resident.
    pub(super) fn open(&self) -> Result<Opened> {
        let mut aside = self.aside.lock();
        aside.require_resident()?;
        aside.open += 1;
        Ok(Opened(Arc::clone(&self.aside)))
    }

    /// Whether its pages stepped aside.
    pub(crate) fn paused(&self) -> bool {
        self.aside.lock().stage == Stage::Paused
    }

    /// What is behind the contents that the last resume copies.
    pub(super) fn contents(&self, events: &Arc<Events>) -> Fence {
        let mut aside = self.aside.lock();
        // Forgets what is over; what cannot be asked is not.
        let _ = aside.contents.done(events);
        aside.contents.clone()
    }

    /// Gives up what the host has of pages that are gone.
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
