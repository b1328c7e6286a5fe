use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::copies::HostCopy;
use super::{HookGuard, PageKey, Pausable, PausePage};
use crate::error::{Error, Result};
use crate::pages::{Events, Fence, HostPool};
use crate::sync::{ExclusiveSection, Mutex, thread_token};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Resident,
    Pausing,
    Paused,
    Resuming,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Pausing => "being paused",
            Self::Paused => "paused",
            Self::Resuming => "being resumed",
        }
    }
}

/// Valid while in this table.
pub(crate) type Copies = HashMap<PageKey, HostCopy>;

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Tokens which exclude a pause.
    open: u64,
    /// Counts the mappings, from 1.
    generation: u64,
    /// After the copies of the last resume.
    contents: Fence,
    copies: Copies,
}

pub(crate) struct PauseState {
    /// "the region" or "the arena".
    what: &'static str,
    section: ExclusiveSection,
    inner: Arc<Mutex<Inner>>,
}

/// Excludes a pause until dropped.
#[derive(Debug)]
pub(crate) struct Opened(Arc<Mutex<Inner>>);

impl PauseState {
    /// State of a resident object, named `what` in errors.
    pub(crate) fn new(what: &'static str) -> Self {
        let (contents, copies) = (Fence::default(), Copies::new());
        let inner = Inner { phase: Phase::Resident, open: 0, generation: 1, contents, copies };
        Self { what, section: ExclusiveSection::default(), inner: Arc::new(Mutex::new(inner)) }
    }

    pub(super) fn what(&self) -> &'static str {
        self.what
    }

    pub(crate) fn phase(&self) -> Phase {
        self.inner.lock().phase
    }

    pub(crate) fn generation(&self) -> u64 {
        self.inner.lock().generation
    }

    pub(crate) fn require(&self, expected: Phase) -> Result<()> {
        self.inner.lock().require(self.what, expected)
    }

    /// Runs `work` while no pause begins or ends. `None`, without a call, unless the object is
    /// resident with all contents.
    pub(crate) fn while_resident<T>(&self, events: &Arc<Events>, work: impl FnOnce() -> T) -> Option<T> {
        let mut inner = self.inner.lock();
        let there = inner.phase == Phase::Resident && inner.contents.done(events).unwrap_or(false);
        there.then(work)
    }

    /// Excludes pauses while the result exists; fails unless resident.
    pub(crate) fn open(&self) -> Result<Opened> {
        let mut inner = self.inner.lock();
        inner.require(self.what, Phase::Resident)?;
        inner.open += 1;
        Ok(Opened(Arc::clone(&self.inner)))
    }

    /// Fence after the copies of the last resume, without finished parts.
    pub(crate) fn unfinished_contents(&self, events: &Arc<Events>) -> Fence {
        let mut inner = self.inner.lock();
        let _ = inner.contents.done(events);
        inner.contents.clone()
    }

    /// Fence as above, without a driver call.
    pub(crate) fn contents(&self) -> Fence {
        self.inner.lock().contents.clone()
    }

    pub(crate) fn with_copies<T>(&self, access: impl FnOnce(&mut Copies) -> T) -> T {
        access(&mut self.inner.lock().copies)
    }

    pub(crate) fn forget(&self, host: &HostPool, pages: impl IntoIterator<Item = PageKey>) {
        let Inner { copies, contents, .. } = &mut *self.inner.lock();
        host.give_copies(pages.into_iter().filter_map(|page| copies.remove(&page)), contents);
    }

    /// Frees copies of pages for which `gone` returns true.
    pub(crate) fn forget_if(&self, host: &HostPool, gone: impl Fn(PageKey) -> bool) {
        let Inner { copies, contents, .. } = &mut *self.inner.lock();
        host.give_copies(copies.extract_if(|page, _| gone(*page)).map(|(_, copy)| copy), contents);
    }

    /// Enters the section, after waiting for its current thread. Fails if this thread is inside, if
    /// the wait would be a deadlock, or inside a hook.
    fn enter(&self) -> Result<()> {
        if self.try_enter()? {
            return Ok(());
        }
        HookGuard::refuse(self.what)?;
        let circle = "a thread that waits for this one is doing so";
        self.section.enter().map_err(|_| self.refusal(circle, "let that thread finish first"))
    }

    /// Returns `false` instead of waiting.
    fn try_enter(&self) -> Result<bool> {
        if self.section.is_of(thread_token()) {
            return Err(self.refusal("this thread is doing so already", "do it when that call has returned"));
        }
        Ok(self.section.try_enter())
    }

    fn refusal(&self, reason: &str, remedy: &str) -> Error {
        Error::wrong_state(format!("cannot pause or resume {}: {reason}; {remedy}", self.what))
    }

    /// Returns the phase before.
    fn begin_pause(&self, object: &dyn Pausable) -> Result<Phase> {
        let inner = &mut *self.inner.lock();
        if inner.phase == Phase::Resident {
            object.may_pause(inner.open)?;
        }
        Ok(std::mem::replace(&mut inner.phase, Phase::Pausing))
    }

    /// Frees earlier copies of the pages.
    pub(super) fn add_copies(&self, host: &HostPool, made: impl IntoIterator<Item = (PageKey, HostCopy)>) {
        let Inner { copies, contents, .. } = &mut *self.inner.lock();
        let replaced = made.into_iter().filter_map(|(page, copy)| copies.insert(page, copy));
        host.give_copies(replaced, contents);
    }

    /// Ends a resume, complete after `contents`, and returns the generation. Keeps or frees all
    /// host copies.
    pub(super) fn arrive(
        &self,
        object: &dyn Pausable,
        used: Vec<(PageKey, HostCopy)>,
        contents: Fence,
        moved: bool,
    ) -> u64 {
        let inner = &mut *self.inner.lock();
        inner.contents = contents;
        inner.generation += u64::from(moved);
        inner.copies.extend(used);
        if !object.keeps_copies() {
            let copies = std::mem::take(&mut inner.copies).into_values();
            object.pausables().host_pool().give_copies(copies, &inner.contents);
        }
        if object.resident_in_hooks() {
            inner.phase = Phase::Resident;
        }
        inner.generation
    }
}

impl Inner {
    fn require(&self, what: &str, expected: Phase) -> Result<()> {
        if self.phase == expected {
            return Ok(());
        }
        let remedy = if expected == Phase::Resident { "resume it first" } else { "pause it first" };
        let found = self.phase.name();
        Err(Error::wrong_state(format!("cannot use {what}: it is {found}; {remedy}")))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
    }
}

impl fmt::Debug for PauseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.inner.lock().phase)
    }
}

/// Exclusive section for moving pages. Sets its phase when dropped.
pub(crate) struct PauseGuard<'a> {
    object: &'a dyn Pausable,
    back: Phase,
}

impl<'a> PauseGuard<'a> {
    /// Enters the section for a pause; `None`: all pages are paused already.
    pub(super) fn begin_pause(object: &'a dyn Pausable) -> Result<Option<Self>> {
        let state = object.pause_state();
        loop {
            let (mut entered, mut begun) = (Ok(false), Ok(None));
            object.between(&mut || {
                entered = state.try_enter();
                if entered == Ok(true) {
                    begun = Self::entered(object);
                }
            })?;
            if entered? {
                return begun;
            }
            // Not between two uses, so no cycle of waits can form.
            state.enter()?;
            state.section.leave();
        }
    }

    /// Begins the pause, or leaves the section.
    fn entered(object: &'a dyn Pausable) -> Result<Option<Self>> {
        let state = object.pause_state();
        let paused = state.phase() == Phase::Paused && !object.pages().iter().any(PausePage::present);
        let back = if paused { Ok(None) } else { state.begin_pause(object).map(Some) };
        match &back {
            Ok(Some(_)) => object.pages_move(),
            _ => state.section.leave(),
        }
        back.map(|back| back.map(|back| Self { object, back }))
    }

    /// Enters the section for a resume; `None`: not paused.
    pub(super) fn begin_resume(object: &'a dyn Pausable) -> Result<Option<Self>> {
        let state = object.pause_state();
        state.enter()?;
        let inner = &mut *state.inner.lock();
        if inner.phase != Phase::Paused {
            state.section.leave();
            return Ok(None);
        }
        inner.phase = Phase::Resuming;
        Ok(Some(Self { object, back: Phase::Paused }))
    }

    /// Whether the object was resident at the begin of the section.
    pub(super) fn was_resident(&self) -> bool {
        self.back == Phase::Resident
    }

    /// Sets the phase after the section.
    pub(super) fn set(&mut self, back: Phase) {
        self.back = back;
    }
}

impl Drop for PauseGuard<'_> {
    fn drop(&mut self) {
        let state = self.object.pause_state();
        state.inner.lock().phase = self.back;
        self.object.pages_stay();
        state.section.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_one_threads_and_comes_back() {
        let state = PauseState::new("the region");
        state.enter().unwrap();
        assert!(matches!(state.enter(), Err(Error::WrongState { .. })));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| state.enter().map(|()| state.section.leave()));
            state.section.leave();
            assert_eq!(other.join().unwrap(), Ok(()));
        });
        assert!(state.enter().is_ok());
    }
}
