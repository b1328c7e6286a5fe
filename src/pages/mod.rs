//! Page pool of a device: owns every physical page, and records its owner, mappings and account.
//!
//! # Terms
//!
//! * **Page**: one physical allocation of the driver, small or large, mapped as a whole.
//! * **Range** ([`Reservation`]): reserved addresses.
//! * **Mapping**: a page at an offset of a range, recorded in both.
//! * **Owner** ([`Owner`]): the user of a page; the device for a free page.
//! * **Account** ([`Account`]): the budget charged for a page.
//! * **Pin**: a running transaction needs the page. An **export pin**: other processes map it.
//! * **Transaction** ([`Transaction`]): driver calls and table updates that commit together or are
//!   undone.
//! * **Fence** ([`Fence`]): points in stream work after which memory is reused or unmapped.
//! * **Pending unmap** ([`PendingUnmap`]): ranges or parts to unmap after a fence.
//! * **Non-resident page**: a page of a paused arena, without memory.
//!
//! # Life of a page
//!
//! ```text
//!  driver.create ─> taken (pinned by a transaction) ─> mapped 1..n times ─> unmapped and unpinned
//!                     ^                                                        │
//!                     └─────── next allocation, new PageId ────── free <───────┘
//!                                                                  └─> driver.release
//! ```
//!
//! The last unmap or unpin makes a resident page *free*, unless it is exported or goes to the
//! driver at once. Free pages are released when an allocation of a different size is refused (even
//! if only an account below the device lacks room), at a trim, and at the end of an arena.
//!
//! # Invariants
//!
//! [`PagePool::audit`] checks:
//!
//! * A page has exactly one owner, and one account, except free pages and pages refused by the
//!   driver (`Owner::Leaving`).
//! * An owned page is mapped or pinned, except one used only by other processes
//!   (`Owner::Exported`).
//! * A free page has no mapping and no pin, and is in the free list of its size. Its old `PageId`
//!   finds nothing.
//! * Mappings of a range do not overlap.
//! * All counters equal the sums over the tables.
//!
//! The code also guarantees:
//!
//! * A pending unmap runs after its fence, and after the resume copies of each arena with pages in
//!   its parts. One thread at a time tears down a part of a range.
//! * A transaction pins the pages it unmaps until its end, so an undo maps the same pages again.
//! * Memory refused by the driver stays in the tables until `trim`, or the device's close or next
//!   opening, releases it.
//!
//! # Locks
//!
//! One mutex guards all tables of a pool (`State` in `pool.rs`). Nothing else is locked, called or
//! waited for under it: no driver call, reclaimer or log line. Between an operation's reads and its
//! result, pins, held ranges, the table of running teardowns, and the counters of bytes in creation
//! and release protect its objects.
//!
//! [`SharedSet`], [`HostPool`], [`Events`] and the reclaimers have their own locks. [`SharedSet`]
//! keeps its lock across calls into the pool, never the reverse.

mod account;
mod branch;
mod copier;
mod events;
mod exports;
mod fence;
mod free;
mod host_memory;
mod host_piece;
mod host_pool;
mod host_room;
mod lent;
mod mappings;
mod non_resident;
mod owner;
mod page;
mod peer;
mod pending_unmaps;
mod pool;
mod pool_stats;
mod reclaim;
mod reservation;
mod shared;
mod stream;
mod stretches;
mod survey;
mod teardown;
#[cfg(test)]
mod tests;
mod transaction;
mod waits;

pub use account::{Account, AccountStats, Limits};
pub(crate) use branch::{Branch, CopyNodeState, Part, update_copy_node};
pub use events::{Events, Mark, Poll};
pub use exports::Extent;
pub use fence::{DeferredMark, Fence};
pub use host_piece::HostPiece;
pub use host_pool::{CopyPath, HostPool, HostStats};
pub(crate) use host_room::check_host_room;
pub(crate) use lent::LentPlace;
pub use mappings::Mapping;
pub(crate) use non_resident::{ArenaPage, Hold};
pub(crate) use owner::next_number;
pub use owner::{OwnedPages, Owner};
pub(crate) use peer::{PeerId, PeerSpan};
pub(crate) use pending_unmaps::retry_orphans;
pub use pool::PagePool;
pub use pool_stats::PoolStats;
pub(crate) use reclaim::MemoryRetry;
pub use reclaim::Reclaimer;
pub use reservation::Reservation;
pub use shared::{SetPeers, SharedSet};
pub use stream::NamedStream;
pub(crate) use stretches::Stretches;
pub(crate) use survey::{Other, PageName, SurveyedPage};
pub use teardown::PendingUnmap;
pub use transaction::{Calls, Transaction};
pub(crate) use waits::Capturing;

slotmap::new_key_type! {
    /// Key of a page, never reused: a page gets a new key when it becomes free and when it is
    /// taken.
    pub struct PageId;
    /// Key of a range of addresses.
    pub struct RangeId;
    /// Key of an account.
    pub struct AccountId;
}

/// Size class of a numbered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Slabs, live-out blocks, and fillers of addresses between live-out blocks.
    Small,
    /// All other blocks, since large pages need fewer driver calls.
    Large,
}

/// Number of a page in the shared set of an arena. Spaces with the same requests use the same
/// numbers, whatever was captured before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo {
    /// Size class.
    pub class: Class,
    /// Number within the class, from 0.
    pub index: u32,
}
