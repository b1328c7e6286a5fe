//! The numbered pages that all spaces of one arena may map.

use std::sync::Arc;

use serde::Serialize;

use super::{Class, Owner, PageId, PageNo, PagePool, Pin};
use crate::error::Result;
use crate::sync::Mutex;
use crate::units::Geometry;

/// Pages shared by graphs that never run at the same time.
///
/// A number gets its page when a space first needs it and loses it only when no space maps it. Since every space takes the
/// lowest numbers that are free in it, low numbers are shared by many spaces and high ones by the hungriest only, which is
/// why [`trim`](Self::trim) finds something once the hungriest space is gone.
#[derive(Debug)]
pub struct SharedSet {
    pool: Arc<PagePool>,
    arena: u64,
    geometry: Geometry,
    numbers: Mutex<Numbers>,
}

#[derive(Debug, Default)]
struct Numbers {
    small: Vec<Option<PageId>>,
    large: Vec<Option<PageId>>,
    /// The pages of the arena's bump spaces, behind one another.
    tape: Vec<Piece>,
    /// Pages without a number: once retained, since freed, perhaps still mapped where they were.
    spare: Vec<(Class, PageId)>,
}

/// A page of the tape.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Byte of the tape at which it begins.
    start: u64,
    bytes: u64,
    id: PageId,
}

/// A shared page, pinned.
#[derive(Debug)]
pub struct Acquired {
    /// The claim on the page.
    pub pin: Pin,
    /// Whether the page was created by this call.
    pub created: bool,
}

/// What a shared set holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SharedStats {
    /// Bytes of all its pages.
    pub bytes: u64,
    /// Bytes of those that no space maps; `trim` gives them back.
    pub free_bytes: u64,
    /// Small pages.
    pub small_pages: u64,
    /// Large pages, and those of the tape that bump spaces show, whatever their size.
    pub large_pages: u64,
}

impl Numbers {
    fn slot(&mut self, no: PageNo) -> &mut Option<PageId> {
        let slots = match no.class {
            Class::Small => &mut self.small,
            Class::Large => &mut self.large,
        };
        let index = no.index as usize;
        if slots.len() <= index {
            slots.resize(index + 1, None);
        }
        &mut slots[index]
    }

    /// The last page of the tape that begins at or before a byte.
    fn piece(&self, at: u64) -> Option<Piece> {
        let behind = self.tape.partition_point(|piece| piece.start <= at);
        self.tape[..behind].last().copied()
    }

    fn all(&self) -> impl Iterator<Item = (Class, PageId)> {
        let small = self.small.iter().flatten().map(|id| (Class::Small, *id));
        let large = self.large.iter().flatten().map(|id| (Class::Large, *id));
        small.chain(large).chain(self.spare.iter().copied())
    }
}

impl SharedSet {
    /// An empty set for arena number `arena`.
    #[must_use]
    pub fn new(pool: &Arc<PagePool>, arena: u64, geometry: Geometry) -> Arc<Self> {
        Arc::new(Self { pool: Arc::clone(pool), arena, geometry, numbers: Mutex::default() })
    }

    /// The device's pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// The number of the arena whose set this is.
    #[must_use]
    pub fn arena(&self) -> u64 {
        self.arena
    }

    /// The page sizes.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of a page of this class.
    #[must_use]
    pub fn bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    /// The page with this number, pinned; a spare or a new one if the number has none yet.
    ///
    /// Before it gives up for lack of memory it gives back the pages that no space maps and tries once more.
    ///
    /// # Errors
    /// Those of [`PagePool::create`]; the set is as it was, less unmapped pages.
    pub fn acquire(&self, no: PageNo) -> Result<Acquired> {
        let mut numbers = self.numbers.lock();
        if let Some(id) = *numbers.slot(no) {
            return Ok(Acquired { pin: self.pool.pin(id)?, created: false });
        }
        let bytes = self.bytes(no.class);
        if let Some(spare) = numbers.spare.iter().position(|(class, _)| self.bytes(*class) == bytes) {
            let pin = self.pool.pin(numbers.spare[spare].1)?;
            numbers.spare.swap_remove(spare);
            *numbers.slot(no) = Some(pin.id());
            return Ok(Acquired { pin, created: false });
        }
        let pin = self.create_shared(&mut numbers, bytes)?;
        *numbers.slot(no) = Some(pin.id());
        Ok(Acquired { pin, created: true })
    }

    /// The lock is held across the driver's call: two spaces that need the same page must end up with one.
    fn create_shared(&self, numbers: &mut Numbers, bytes: u64) -> Result<Pin> {
        self.create(bytes, Owner::Shared { arena: self.arena }, || self.release_unmapped(numbers))
    }

    /// A page that is `space`'s own from the beginning, pinned.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn create_own(&self, bytes: u64, space: u64) -> Result<Pin> {
        let owner = Owner::Retained { arena: self.arena, space };
        self.create(bytes, owner, || self.release_unmapped(&mut self.numbers.lock()))
    }

    /// Whichever memory or budget ran out, pages of this arena count toward it.
    fn create(&self, bytes: u64, owner: Owner, release_unmapped: impl FnOnce() -> u64) -> Result<Pin> {
        self.pool.create(bytes, owner).or_else(|error| {
            if error.is_out_of_memory() && release_unmapped() > 0 {
                self.pool.create(bytes, owner)
            } else {
                Err(error)
            }
        })
    }

    /// Limits the bytes that the arena's pages may take, shared ones and those of its spaces; `None`: no limit. Pages that are being
    /// created or given back count, and so do those that nobody wants any more but the driver does not have yet. Nothing is taken away.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.pool.set_arena_budget(self.arena, bytes);
    }

    /// The bytes that count toward the arena's budget, and the budget.
    #[must_use]
    pub fn budget(&self) -> (u64, Option<u64>) {
        self.pool.arena_budget(self.arena)
    }

    /// Where the page begins that holds a byte of the tape; the byte itself if the tape ends there.
    #[must_use]
    pub fn tape_page(&self, at: u64) -> u64 {
        let numbers = self.numbers.lock();
        numbers.piece(at).filter(|piece| at < piece.start + piece.bytes).map_or(at, |piece| piece.start)
    }

    /// The page that begins at a byte of the tape, pinned; where the tape ends, a new one that reaches to `end` and is no shorter than
    /// a sixteenth of the tape or half a large page, whichever is less: spaces that each need a little more than the last would cut it into crumbs.
    /// The caller holds pins on every page before it.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_tape(&self, at: u64, end: u64) -> Result<Acquired> {
        let mut numbers = self.numbers.lock();
        if let Some(piece) = numbers.piece(at)
            && at < piece.start + piece.bytes
        {
            debug_assert_eq!(piece.start, at, "the tape was cut elsewhere");
            return Ok(Acquired { pin: self.pool.pin(piece.id)?, created: false });
        }
        let bytes =
            (end - at).max((at / 16).min(self.geometry.large() / 2)).next_multiple_of(self.geometry.small());
        let pin = self.create_shared(&mut numbers, bytes)?;
        numbers.tape.push(Piece { start: at, bytes, id: pin.id() });
        Ok(Acquired { pin, created: true })
    }

    /// Gives back the page at the tape's end, if it begins at this byte and no space maps it: the undo of an
    /// [`acquire_tape`](Self::acquire_tape) that created it.
    pub fn discard_tape(&self, at: u64) {
        let mut numbers = self.numbers.lock();
        if let Some(last) = numbers.tape.pop_if(|last| last.start == at && self.pool.pins(last.id) == 0) {
            self.pool.doom(last.id);
        }
    }

    /// Gives back the page of this number if no space maps it: the undo of an [`acquire`](Self::acquire) that created it.
    pub fn discard(&self, no: PageNo) {
        let mut numbers = self.numbers.lock();
        if let Some(id) = *numbers.slot(no)
            && self.pool.pins(id) == 0
        {
            *numbers.slot(no) = None;
            self.pool.doom(id);
        }
    }

    /// Makes the page of this number `space`'s own if the one pin on it is the caller's; its number is free for another
    /// page then. Whether it did.
    #[must_use]
    pub fn take(&self, no: PageNo, space: u64) -> bool {
        let mut numbers = self.numbers.lock();
        match *numbers.slot(no) {
            Some(id) if self.pool.pins(id) == 1 => {
                *numbers.slot(no) = None;
                self.pool.hand_over(id, Owner::Retained { arena: self.arena, space });
                true
            }
            _ => false,
        }
    }

    /// The undo of [`take`](Self::take).
    pub fn put_back(&self, no: PageNo, pin: &Pin) {
        let mut numbers = self.numbers.lock();
        if numbers.slot(no).is_some() {
            // Another space needed the number meanwhile and got another page for it.
            drop(numbers);
            return self.give(pin);
        }
        self.pool.hand_over(pin.id(), Owner::Shared { arena: self.arena });
        *numbers.slot(no) = Some(pin.id());
    }

    /// The way back of a retained page whose blocks were freed: every space may map it again, under whatever number needs a
    /// page next.
    pub fn give(&self, pin: &Pin) {
        let class = if pin.bytes() == self.geometry.small() { Class::Small } else { Class::Large };
        self.pool.hand_over(pin.id(), Owner::Shared { arena: self.arena });
        self.numbers.lock().spare.push((class, pin.id()));
    }

    /// Whether something waits for the arena's replays to be done.
    #[must_use]
    pub fn deferred(&self) -> bool {
        self.pool.deferred(self.arena)
    }

    /// Tears down what was deferred until the arena's replays are done. The caller has waited for them.
    pub fn settle(&self) {
        self.pool.settle(self.arena);
        // What is refused stays on the list and is reported by whoever tries next.
        let _ = self.pool.retry();
    }

    /// Gives every page back that no space maps; returns their bytes. The caller has waited for the arena's replays.
    pub fn trim(&self) -> u64 {
        self.settle();
        self.release_unmapped(&mut self.numbers.lock())
    }

    fn release_unmapped(&self, numbers: &mut Numbers) -> u64 {
        let mut released = 0;
        let mut unmapped = |class: Class, id: PageId| {
            let free = self.pool.pins(id) == 0;
            if free {
                self.pool.doom(id);
                released += self.bytes(class);
            }
            free
        };
        for slot in &mut numbers.small {
            *slot = slot.filter(|id| !unmapped(Class::Small, *id));
        }
        for slot in &mut numbers.large {
            *slot = slot.filter(|id| !unmapped(Class::Large, *id));
        }
        numbers.spare.retain(|(class, id)| !unmapped(*class, *id));
        // Every bump space maps the tape from its beginning on, so what nobody maps is at its end.
        while let Some(last) = numbers.tape.pop_if(|last| self.pool.pins(last.id) == 0) {
            self.pool.doom(last.id);
            released += last.bytes;
        }
        self.pool.check();
        released
    }

    /// The counts as they are now.
    #[must_use]
    pub fn stats(&self) -> SharedStats {
        let numbers = self.numbers.lock();
        let mut stats = SharedStats::default();
        for (class, id) in numbers.all() {
            stats.bytes += self.bytes(class);
            stats.free_bytes += u64::from(self.pool.pins(id) == 0) * self.bytes(class);
            match class {
                Class::Small => stats.small_pages += 1,
                Class::Large => stats.large_pages += 1,
            }
        }
        for piece in &numbers.tape {
            stats.bytes += piece.bytes;
            stats.free_bytes += u64::from(self.pool.pins(piece.id) == 0) * piece.bytes;
            stats.large_pages += 1;
        }
        stats
    }
}

impl Drop for SharedSet {
    fn drop(&mut self) {
        let numbers = std::mem::take(self.numbers.get_mut());
        for id in numbers.all().map(|(_, id)| id).chain(numbers.tape.iter().map(|piece| piece.id)) {
            self.pool.doom(id);
        }
        self.set_budget(None);
        // Nobody is left to wait for the replays: the next trim on the device takes what is still deferred.
        self.pool.settle(self.arena);
        self.pool.check();
    }
}
