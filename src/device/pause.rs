//! Pause and resume by tag, for regions and arenas. A pause continues past failures; a resume is
//! all or nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Device;
use crate::error::Result;
use crate::pages::Fence;
use crate::pause::{PauseHooks, PauseReport, ResumeReport, pause, resume};
use crate::units::Stream;

/// Contents of one tag still being copied by a resume without waiting.
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

    /// Returns true if the contents are complete.
    ///
    /// # Errors
    /// Driver errors.
    pub fn done(&mut self) -> Result<bool> {
        self.contents.done(self.device.pool().events())
    }

    /// Makes later work of a stream wait for the contents. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing); driver errors.
    pub fn before(&mut self, stream: Stream) -> Result<()> {
        self.contents.before(self.device.pool().events(), stream)
    }

    /// Blocks until the contents are complete.
    ///
    /// # Errors
    /// [`DeviceCapturing`](crate::Error::DeviceCapturing) if the platform forbids waits during a
    /// capture; driver errors.
    pub fn wait(&mut self) -> Result<()> {
        self.device.driver().may_wait()?;
        self.device.host_pool().wait(&mut self.contents)
    }
}

impl Device {
    /// Pauses regions and arenas with one of these tags, one by one; no tags: all of them.
    ///
    /// Waits for the fence and for the streams recorded for blocks, then frees pages by policy. In
    /// arenas, shared pages are discarded, and pages of live-out and persistent blocks are backed
    /// up. The fence must include all other streams, and no more work may be submitted meanwhile.
    ///
    /// Continues past failures and reports all: failed pages stay with their contents, and the next
    /// pause retries. Free pages of the device are also released, but not reported.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing) if a stream of the fence or of a
    /// block is under capture; [`Error::WrongState`](crate::Error::WrongState) for an arena with an
    /// open space, and in a hook of the same region; driver errors of the fence. Regions paused
    /// before the error stay paused.
    pub fn pause(self: &Arc<Self>, tags: &[&str], fence: Fence) -> Result<PauseReport> {
        let start = Instant::now();
        let mut report = PauseReport::default();
        for pausable in self.pausables().tagged(tags) {
            report.join(pause(&*pausable, fence.clone())?);
        }
        // Memory is needed elsewhere, so free pages are released too.
        self.pool().release_free(u64::MAX);
        report.micros = start.elapsed().as_micros() as u64;
        Ok(report)
    }

    /// Resumes regions and arenas with one of these tags: all or none; no tags: all of them.
    /// Returns when the contents are complete.
    ///
    /// Without memory, retries until the deadline, at least once. Between attempts everything stays
    /// paused, so other threads may pause, resume or free memory. Each attempt calls reclaimers,
    /// and waits at most two seconds for each pending release, even beyond the deadline.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) or
    /// [`Error::OverBudget`](crate::Error::OverBudget), driver errors: everything stays paused with
    /// its contents, and the call can be repeated. [`Error::WrongState`](crate::Error::WrongState)
    /// in a hook.
    pub fn resume(self: &Arc<Self>, tags: &[&str], deadline: Duration) -> Result<ResumeReport> {
        let all = self.pausables().tagged(tags);
        let all: Vec<_> = all.iter().map(|known| &**known).collect();
        resume(self.pausables(), &all, deadline, true)
    }

    /// As [`resume`](Self::resume), but returns once all pages are mapped. Contents are copied in
    /// the order of the tags, with one event a tag, so the first tag is usable early. Waits if the
    /// host memory is not registered.
    ///
    /// # Errors
    /// As [`resume`](Self::resume). The driver reports copies failing later, as for any work.
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

    /// Calls `hooks` before memory with this tag is paused and after a resume, until the hooks are
    /// dropped. An empty tag: all memory.
    pub fn add_pause_hooks(&self, tag: &str, hooks: &Arc<dyn PauseHooks>) {
        self.pausables().add_hooks(tag, hooks);
    }
}
