//! Elastic memory: virtual extents for the maximum size, with pages for the committed part. See
//! docs/design/elastic.md.
//!
//! ```text
//!   absent ─ commit ─> committing ─> committed ─ decommit ─> decommitted ─> unmapping ─> absent
//!     ^                  │        ^                   │                       │
//!     └── commit failed ─┘        └─ committed again ─┘                       └─> free page
//! ```
//!
//! Invariants:
//!
//! * A commit is one transaction over all its ranges: all pages are mapped, or none.
//! * A decommitted page is unmapped only after its fence, and after the work of earlier users.
//! * A lender's page returns without a wait for the lender's own work, which uses other addresses.
//! * A block of a KV cache has memory in all planes, or in none.
//!
//! The monitor of `Backing` guards the table, and is not held during maps, unmaps, observers and
//! waits. Instead, the states committing and unmapping reserve a page for one thread; other threads
//! wait for this page only.

mod backing;
mod blocks;
mod buffer;
mod cache;
mod limits;
mod observer;
mod planes;
pub mod policy;
mod spans;
mod table;
mod transit;
mod users;
mod worker;

pub(crate) use backing::Lender;
pub use blocks::{Ask, BlockPool, Candidate};
pub use buffer::ElasticBuffer;
pub use cache::{KvCache, KvOptions, KvStats};
pub use limits::LimitChange;
pub use observer::{ElasticObserver, Shown};
pub use planes::KvLayout;
pub use policy::{Ahead, PreCommit, Watermarks};
pub use worker::Pending;

use crate::pages::{Account, AccountStats};

/// Options of elastic memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct ElasticOptions<'a> {
    /// Name for messages and observers.
    pub name: &'a str,
    /// Bytes of a page; 0: derived: `vmmgraph_elastic_options_t`. Free pages are reused for the
    /// same size only (arenas: 2 and 16 MiB).
    pub page_bytes: u64,
    /// Limit of physical bytes. `None`: only the limits of the ancestors.
    pub budget_bytes: Option<u64>,
    /// Guaranteed bytes.
    pub least_bytes: u64,
    /// Parent account. `None`: the device's.
    pub account: Option<&'a Account>,
}

/// Result of a commit, without pages mapped before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Bytes mapped.
    pub bytes: u64,
    /// Pages mapped.
    pub pages: u64,
    /// Part of `pages` created by the driver.
    pub created: u64,
    /// Decommitted pages kept while still mapped: earlier work may use them, see
    /// [`ElasticBuffer::before`].
    pub revived: u64,
}

/// Current state and counters of elastic memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElasticStats {
    /// Number in the process; also in the [`Owner`](crate::pages::Owner).
    pub id: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Committed bytes.
    pub committed_bytes: u64,
    /// Peak of `committed_bytes`.
    pub peak_committed_bytes: u64,
    /// Bytes of running commits.
    pub coming_bytes: u64,
    /// Bytes decommitted and still mapped.
    pub pending_unmap_bytes: u64,
    /// Commits, also without effect.
    pub commits: u64,
    /// Failed commits, all undone.
    pub refused: u64,
    /// Decommits with effect.
    pub decommits: u64,
    /// Pages mapped.
    pub pages_mapped: u64,
    /// Part of `pages_mapped` created by the driver.
    pub pages_created: u64,
    /// Pages committed again before their unmap.
    pub pages_revived: u64,
    /// Pages unmapped.
    pub pages_unmapped: u64,
    /// Account of the buffer or cache.
    pub account: AccountStats,
}
