//! Pause and resume: one pipeline for regions and arenas, which release their pages at a pause and
//! get memory at the same addresses at a resume.
//!
//! ```text
//!   pause    enter the section -> wait for fence and users -> before_unmap
//!            -> copy pages to the host on one stream; a second thread unmaps and releases each
//!               page after its copy -> paused; a failed page stays and is reported
//!   resume   enter the sections of all objects, by number -> take memory -> map -> copy, zero
//!            -> commit -> after_map; without memory leave all sections, reclaim, begin again
//! ```
//!
//! An object (`Pausable`) supplies pages, their contents and their users, and records which pages
//! left and arrived. The pipeline owns the steps, copies, driver calls, undo, hooks and reports.
//!
//! A page of a region is released, and a resume maps a new page at its address
//! (`PageKey::Place`). A page of an arena stays in the pool without memory (`PageKey::Page`),
//! because spaces refer to the page.
//!
//! The mutex of `PauseState` is taken after the locks of its object; only locks of the host pool
//! and page pool are taken under it. No lock is held while pages move or hooks run: the exclusive
//! section of the object is entered instead.

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
