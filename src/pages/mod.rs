//! Physical pages: every one of a device, who holds it, where it is mapped, whose budget it counts toward.
//!
//! ```text
//!   SharedSet (one an arena)      numbered pages                                                 shared.rs
//!   Change                        a journal of steps that commits or is undone in reverse        change.rs
//!   Reservation                   a range of addresses                                           reservation.rs
//!   PagePool (one a device)       pages, mappings, free lists, accounts                          pool.rs  mappings.rs
//!      accounts                   a tree of budgets                                              account.rs
//!      ledger                     who holds what; the audit                                      ledger.rs
//!      lent                       pages on lease, and what of an account is never lent               lent.rs
//!      exports                    pages that other processes have too                           exports.rs
//!      peer                       pages of other processes, which are not of the pool           peer.rs
//!      absent                     pages that keep their place and have no memory                 absent.rs
//!      teardown                   what is left of something goes, a part by one thread at a time    teardown.rs
//!      deferred                   what waits for a fence, and what the driver refused            deferred.rs
//!      reclaimers                 who is asked when memory is short                              reclaim.rs
//!   HostPool                      host memory for contents, and copies of it                     host_pool.rs  host_piece.rs  copier.rs  copies.rs
//!   Pausable                      what can step aside, found by tag; the way back                pausable.rs  resume.rs
//!   Fence, Mark                   points in streams' work                                        fence.rs
//!   Stretches                     free stretches of addresses, by address and by length          stretches.rs
//!   NamedStream                   a stream, and where its handle means it                        stream.rs
//!   Capturing                     captures, which forbid to wait for them on some platforms       waits.rs
//! ```
//!
//! A page that nobody maps and nobody has pinned is *free*: it belongs to the device, lies on the list of its size, and goes to
//! whoever asks next, without a call to the driver. Free pages go back to the driver when another size is needed, at a trim, and
//! at the end of an arena.
//!
//! The pool's lock is a leaf: it is never held across the driver, a reclaimer or a log line.

mod absent;
mod account;
mod branch;
mod change;
mod copier;
mod copies;
mod deferred;
mod events;
mod exports;
mod fence;
mod host_memory;
mod host_piece;
mod host_pool;
mod host_room;
mod ledger;
mod lent;
mod mappings;
mod pausable;
mod peer;
mod pool;
mod reclaim;
mod reservation;
mod resume;
mod shared;
mod stream;
mod stretches;
mod survey;
mod teardown;
#[cfg(test)]
mod tests;
mod waits;

pub(crate) use absent::{Hold, Standing};
pub use account::{Account, AccountStats, Limits};
pub(crate) use branch::{Branch, Part, ToldCopy, tell};
pub use change::{Calls, Change};
pub(crate) use copies::{Copied, HostCopy, Run, behind_copies};
pub(crate) use deferred::retry_orphans;
pub use events::{Events, Look, Mark};
pub use exports::Extent;
pub use fence::{Fence, Promise};
pub use host_piece::HostPiece;
pub use host_pool::{CopyPath, HostPool, HostStats};
pub(crate) use host_room::check_host_room;
pub use ledger::{Holder, Holding};
pub(crate) use lent::LentPlace;
pub use mappings::Mapping;
pub(crate) use pausable::{HookGuard, MoveTurn, Pausables, next_number};
pub use pausable::{Moved, Pausable, PauseHooks, PauseReport, ResumeReport, Resuming};
pub(crate) use peer::{PeerId, PeerSpan};
pub use pool::{PagePool, PoolStats};
pub use reclaim::Reclaimer;
pub use reservation::Reservation;
pub(crate) use resume::{resume, resume_into};
pub use shared::{SetPeers, SharedSet};
pub use stream::NamedStream;
pub(crate) use stretches::Stretches;
pub(crate) use survey::{Other, PageName, SurveyedPage};
pub use teardown::Remains;
pub(crate) use waits::Capturing;

slotmap::new_key_type! {
    /// A page of the pool. Never used for another page; a page that was free has another one afterwards.
    pub struct PageId;
    /// A range of addresses.
    pub struct RangeId;
    /// A budget.
    pub struct AccountId;
}

/// The size class of a numbered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Slabs, retained blocks, and what fills the addresses between those.
    Small,
    /// All other blocks: few driver calls.
    Large,
}

/// A numbered page of an arena's shared set.
///
/// Numbers, not handles, are what placement deals in: a space that behaves the same uses the same numbers, whatever was captured
/// before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo {
    /// The size class.
    pub class: Class,
    /// The number within the class, from 0.
    pub index: u32,
}
