//! Elastic memory: addresses for the most it may ever be, pages for what is used.
//!
//! ```text
//!   ElasticBuffer     commit, decommit behind a fence, ahead on a thread         buffer.rs
//!   KvCache           planes that grow and shrink together by blocks             cache.rs  cache/books.rs  cache/lent.rs  planes.rs
//!   BlockPool         which blocks to use, so that pages come free               blocks.rs      plain code
//!   policy            who gets memory, and when: see there                       policy/         plain code
//!   backing           ranges of addresses, and the pages behind them             backing.rs  backing/moving.rs  backing/borrowed.rs  observer.rs
//!   books  worker     which page is there, coming, to go; the thread             books.rs       plain code;  worker.rs
//! ```
//!
//! ```text
//!   absent ── commit ──> coming ──> here ── decommit ──> leaving ── fence over ──> going ──> absent
//!      ^ failed: as before '          ^ committed again: stays mapped '  the page is free: whoever asks next gets it
//! ```
//!
//! A commit is one change, over all ranges it is about. No lock is held while pages move: what several threads want at once is mapped
//! by the first, and the others wait for that.

mod backing;
mod blocks;
mod books;
mod buffer;
mod cache;
mod observer;
mod planes;
pub mod policy;
mod spans;
mod worker;

pub(crate) use backing::Lender;
pub use blocks::{Ask, BlockPool, Candidate};
pub use buffer::ElasticBuffer;
pub use cache::{KvCache, KvOptions, KvStats, LimitChange};
pub use observer::{ElasticObserver, Shown};
pub use planes::KvLayout;
pub use policy::{Ahead, PreCommit, Watermarks};
pub use worker::Pending;

use crate::pages::{Account, AccountStats};

/// What elastic memory is made like.
#[derive(Clone, Copy, Debug, Default)]
pub struct ElasticOptions<'a> {
    /// Its name, for messages and observers.
    pub name: &'a str,
    /// Bytes of every page, a multiple of the device's granularity; 0: about a sixty-fourth of the longest range of addresses, a power of
    /// two times the granularity, 16 MiB at most. Calls cost per page and not per byte; memory comes and goes by the page; and only
    /// pages of one size serve each other's holders without a call (an arena's are of 2 and 16 MiB).
    pub page_bytes: u64,
    /// The most bytes of physical memory it may hold; `None`: no limit but those above.
    pub budget_bytes: Option<u64>,
    /// Bytes that it is sure to get, among accounts with a limit above them.
    pub least_bytes: u64,
    /// The account that its own is below; `None`: the device's.
    pub account: Option<&'a Account>,
}

/// What a commit did. Pages that were there already are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Bytes that were mapped.
    pub bytes: u64,
    /// Pages that were mapped.
    pub pages: u64,
    /// Of these, created by the driver. The others were free ones of the device.
    pub created: u64,
    /// Pages that were decommitted before and had not gone yet: they stay, without a call. Work behind whose fence they were to go may
    /// still use them: see [`ElasticBuffer::before`].
    pub revived: u64,
}

/// What elastic memory holds, and what it did since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElasticStats {
    /// Its number, unique in the process: that of its [`Holder`](crate::pages::Holder).
    pub id: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Bytes that are there to be used.
    pub committed_bytes: u64,
    /// The most there ever were.
    pub peak_committed_bytes: u64,
    /// Bytes that commits under way are mapping.
    pub coming_bytes: u64,
    /// Bytes that were decommitted and are still mapped: their fence is not over, or nobody has looked since.
    pub leaving_bytes: u64,
    /// Commits that succeeded, also those with nothing to do.
    pub commits: u64,
    /// Attempts of commits that failed and were undone.
    pub refused: u64,
    /// Decommits of anything that was there.
    pub decommits: u64,
    /// Pages mapped.
    pub pages_mapped: u64,
    /// Of these, created by the driver.
    pub pages_created: u64,
    /// Pages that were committed again before they went.
    pub pages_revived: u64,
    /// Pages unmapped.
    pub pages_unmapped: u64,
    /// What counts toward its budget.
    pub account: AccountStats,
}
