//! Pause and resume by tag. A pause continues past failures; a resume is all or nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Device;
use crate::error::Result;
use crate::pages::Fence;
use crate::pause::{PauseHooks, PauseReport, ResumeReport, pause, resume};
use crate::units::Stream;

/// Contents of one tag still being copied by [`Device::resume_async`].
#[derive(Clone, Debug)]
pub struct Ready {
    tag: String,
    device: Arc<Device>,
    contents: Fence,
}

impl Ready {
    /// Returns the tag.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Whether the contents are complete.
    pub fn done(&mut self) -> Result<bool> {
        self.contents.done(self.device.pool().events())
    }

    /// Makes later work of a stream wait for the contents. Does not block.
    pub fn before(&mut self, stream: Stream) -> Result<()> {
        self.contents.before(self.device.pool().events(), stream)
    }

    /// Blocks until the contents are complete; refused during a capture if the platform forbids
    /// waits then ([`DeviceCapturing`](crate::Error::DeviceCapturing)).
    pub fn wait(&mut self) -> Result<()> {
        self.device.driver().may_wait()?;
        self.device.host_pool().wait(&mut self.contents)
    }
}

impl Device {
    /// Pauses regions and arenas with one of these tags: `vmmgraph_device_pause`. The report has
    /// all failures.
    pub fn pause(self: &Arc<Self>, tags: &[&str], fence: Fence) -> Result<PauseReport> {
        let start = Instant::now();
        let mut report = PauseReport::default();
        for pausable in self.pausables().tagged(tags) {
            report.join(pause(&*pausable, fence.clone())?);
        }
        self.pool().release_free(u64::MAX);
        report.micros = start.elapsed().as_micros() as u64;
        Ok(report)
    }

    /// Resumes regions and arenas with one of these tags: `vmmgraph_device_resume`. Between
    /// attempts other threads may pause, resume or free memory.
    pub fn resume(self: &Arc<Self>, tags: &[&str], deadline: Duration) -> Result<ResumeReport> {
        let all = self.pausables().tagged(tags);
        let all: Vec<_> = all.iter().map(|known| &**known).collect();
        resume(self.pausables(), &all, deadline, true)
    }

    /// Like [`resume`](Self::resume), but returns once all pages are mapped:
    /// `vmmgraph_device_resume_async`.
    pub fn resume_async(
        self: &Arc<Self>,
        tags: &[&str],
        deadline: Duration,
    ) -> Result<(ResumeReport, Vec<Ready>)> {
        let found = self.pausables().tagged(tags);
        let mut all: Vec<_> = found.iter().map(|known| &**known).collect();
        let names =
            if tags.is_empty() { all.iter().map(|known| known.tag()).collect() } else { tags.to_vec() };
        all.sort_by_key(|known| names.iter().position(|name| *name == known.tag()));
        let report = resume(self.pausables(), &all, deadline, false)?;
        let mut ready: Vec<Ready> = Vec::new();
        for name in names {
            if ready.iter().any(|known| known.tag == name) {
                continue;
            }
            let mut contents = Fence::default();
            let named = all.iter().filter(|known| known.tag() == name);
            named.for_each(|known| contents.join(known.pause_state().contents()));
            ready.push(Ready { tag: name.to_owned(), device: Arc::clone(self), contents });
        }
        Ok((report, ready))
    }

    /// Calls `hooks` before memory with this tag is paused and after a resume, until they are
    /// dropped. Empty: all memory.
    pub fn add_pause_hooks(&self, tag: &str, hooks: &Arc<dyn PauseHooks>) {
        self.pausables().add_hooks(tag, hooks);
    }
}
