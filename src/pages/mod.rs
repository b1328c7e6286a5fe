//! Physical pages: who owns each, who maps it, and when it goes back to the device.
//!
//! ```text
//!   PagePool (one a device)      every page: handle, bytes, owner, pins
//!     ^            ^
//!     |            SharedSet (one an arena)   numbered pages  small[0] small[1] ..  large[0] large[1] ..
//!     |              ^                        that every space of the arena may map
//!   Reservation ---- | ---- addresses, and the pages mapped there (each mapping holds a Pin)
//! ```
//!
//! A page lives while it has an owner or a [`Pin`]. Handing a page over is a change of owner, never a copy. An owner that no
//! longer wants a page *dooms* it; the memory goes back to the driver with the last pin. What a failing driver would not take
//! back is kept on a list and tried again by [`PagePool::retry`], so that nothing is ever lost.

mod budget;
mod ledger;
mod pool;
mod reservation;
mod shared;

pub use ledger::Holding;
pub use pool::{Owner, PagePool, Pin, PoolStats};
pub use reservation::{NotReplaced, Reservation};
pub use shared::{Acquired, SharedSet, SharedStats};

slotmap::new_key_type! {
    /// A page of the pool. Never reused for another page.
    pub struct PageId;
}

/// The size class of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Slabs, retained blocks, and what fills the addresses between those.
    Small,
    /// All other blocks: few driver calls.
    Large,
}

/// A numbered page of an arena's shared set.
///
/// Numbers, not handles, are what allocation policy deals in: a space that behaves the same uses the same numbers, whatever
/// was captured before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo {
    /// The size class.
    pub class: Class,
    /// The number within the class, from 0.
    pub index: u32,
}
