//! Pause and resume: one pipeline for regions and arenas.
//!
//! ```text
//!   pause    enter the section -> wait for fence and users -> before_unmap
//!            -> copy pages to the host on one stream; a second thread unmaps and releases each
//!               page after its copy -> paused; a failed page stays and is reported
//!   resume   enter the sections of all objects, by number -> take memory -> map -> copy, zero
//!            -> commit -> after_map; without memory leave all sections, reclaim, begin again
//! ```
//!
//! An object (`Pausable`) supplies pages, their contents and their users. A page of a region is
//! released, and a resume maps a new page at its address (`PageKey::Place`); a page of an arena
//! stays in the pool without memory (`PageKey::Page`), because spaces refer to it.
//!
//! The mutex of `PauseState` is taken after the locks of its object; only locks of the host pool
//! and page pool are taken under it. While pages move or hooks run, no lock is held, but the
//! object's exclusive section.

mod copies;
mod move_out;
mod object;
mod page;
mod registry;
mod report;
mod resume;
mod state;

pub(crate) use copies::HostCopy;
pub(crate) use move_out::{exclude_users, pause};
pub(crate) use object::Pausable;
pub(crate) use page::{MovedPage, PageKey, PausePage};
pub(crate) use registry::{HookGuard, Pausables};
pub use registry::{Moved, PauseHooks};
pub use report::{PauseReport, ResumeReport};
pub(crate) use resume::resume;
pub(crate) use state::{Opened, PauseState, Phase};
