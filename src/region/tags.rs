//! Regions and arenas by tag: several step aside one after the other, and come back together or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Region, RegionOptions};
use crate::device::Device;
use crate::error::Result;
use crate::pages::{Fence, Pausable, PauseHooks, PauseReport, ResumeReport, resume, resume_into};
use crate::units::Stream;

/// The contents of one tag, on their way after a resume without waiting.
#[derive(Clone, Debug)]
pub struct Ready {
    tag: String,
    device: Arc<Device>,
    contents: Fence,
}

impl Ready {
    /// The tag.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Whether they are there.
    ///
    /// # Errors
    /// What the driver says.
    pub fn done(&mut self) -> Result<bool> {
        self.contents.done(self.device.pool().events())
    }

    /// Makes later work of a stream wait for them. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing), or what the driver says.
    pub fn before(&mut self, stream: Stream) -> Result<()> {
        self.contents.before(self.device.pool().events(), stream)
    }

    /// Blocks the caller until they are there.
    ///
    /// # Errors
    /// [`DeviceCapturing`](crate::Error::DeviceCapturing) where nobody may wait just now, or what the driver says.
    pub fn wait(&mut self) -> Result<()> {
        self.device.driver().may_wait()?;
        self.device.host_pool().wait(&mut self.contents)
    }
}

impl Device {
    /// A region: memory with a tag that can step aside. Several may have one tag.
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`](crate::Error::InvalidPageSize) for a page size that the device cannot map.
    pub fn region(self: &Arc<Self>, tag: &str, options: RegionOptions) -> Result<Arc<Region>> {
        Region::new(self, tag, options)
    }

    /// Pauses what has one of these tags, one after the other; none: everything that can be paused. Behind the fence, which the
    /// caller waits for here, and behind what the streams noted for blocks were given, pages go as their policy says; an arena's
    /// shared ones as they are, and those of retained and kept blocks with a backup. What was given
    /// to the device by other streams and is not in the fence, the library cannot see; nothing more is submitted meanwhile.
    ///
    /// Goes on past failures and reports all of them: what failed stays, with its contents, and the next pause tries it again.
    /// What is paused already stays so. The device's free pages go back to the driver too, and are not in the report.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing): a stream of the fence or of a block is being captured, and nothing more was paused;
    /// [`Error::WrongState`](crate::Error::WrongState) for an arena with an open space, and in a hook of the same region; what the driver says of the fence. What was paused before stays so.
    pub fn pause(self: &Arc<Self>, tags: &[&str], fence: Fence) -> Result<PauseReport> {
        let start = Instant::now();
        let mut report = PauseReport::default();
        for pausable in self.pausables().tagged(tags) {
            report.join(pausable.pause(fence.clone())?);
        }
        // Memory is wanted elsewhere: what nobody uses goes as well.
        self.pool().release_free(u64::MAX);
        report.micros = start.elapsed().as_micros() as u64;
        Ok(report)
    }

    /// Resumes what has one of these tags, all of it or none; no tag: everything. Returns when the contents are there. While there
    /// is no memory it asks again, at least once, until the deadline, and everything is paused between two tries, so that others may pause, resume or free
    /// it; the pool's reclaimers are asked as for any allocation, and what only
    /// waits for the device is waited for, two seconds at most each time, also beyond the deadline.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) or [`Error::OverBudget`](crate::Error::OverBudget), or what the driver says: everything is paused as before, the host has the
    /// contents, and the call can be repeated. [`Error::WrongState`](crate::Error::WrongState) in a hook.
    pub fn resume(self: &Arc<Self>, tags: &[&str], deadline: Duration) -> Result<ResumeReport> {
        let all = self.pausables().tagged(tags);
        let all: Vec<_> = all.iter().map(|known| &**known).collect();
        resume(self.pool(), self.host_pool(), &all, deadline)
    }

    /// As [`resume`](Self::resume), but returns as soon as everything is mapped; the contents come behind an event for each tag, in the
    /// order of the tags, so that the first can be used while others are copied. Where host memory is not registered, it waits
    /// all the same.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume). A copy that fails later is the driver's to tell, as for any work.
    pub fn resume_async(
        self: &Arc<Self>,
        tags: &[&str],
        deadline: Duration,
    ) -> Result<(ResumeReport, Vec<Ready>)> {
        let all = self.pausables().tagged(tags);
        let mut names: Vec<&str> = tags.to_vec();
        if names.is_empty() {
            names = all.iter().map(|known| known.tag()).collect();
        }
        names.dedup();
        let place = |known: &Arc<dyn Pausable>| names.iter().position(|name| *name == known.tag());
        let mut ordered = all.clone();
        ordered.sort_by_key(|known| place(known));
        let mut contents: Vec<(usize, Fence)> = Vec::new();
        let known: Vec<_> = ordered.iter().map(|known| &**known).collect();
        let report = resume_into(self.pool(), self.host_pool(), &known, deadline, false, &mut contents)?;
        let mut ready: Vec<Ready> = Vec::new();
        for name in names {
            let mut fence = Fence::default();
            for (index, behind) in &contents {
                if ordered[*index].tag() == name {
                    fence.join(behind.clone());
                }
            }
            if ready.iter().all(|known| known.tag != name) {
                ready.push(Ready { tag: name.to_owned(), device: Arc::clone(self), contents: fence });
            }
        }
        Ok((report, ready))
    }

    /// Tells `hooks` before memory with this tag goes and after it has come, as long as they live; an empty tag: of all.
    pub fn add_pause_hooks(&self, tag: &str, hooks: &Arc<dyn PauseHooks>) {
        self.pausables().add_hooks(tag, hooks);
    }
}
