//! Streams, events and copies of a [`BrokenDriver`].

use vmmgraph::driver::{Event, StreamState, Timeline, Transfer};
use vmmgraph::{Address, Result, Stream};

use super::{BrokenDriver, Flaw, refused};

// SAFETY: as above.
unsafe impl Timeline for BrokenDriver {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        if self.state.lock().capturing == Some(stream) && !self.is(Flaw::CaptureUnseen) {
            return Ok(StreamState::Capturing);
        }
        // SAFETY: the caller's contract.
        let state = unsafe { self.inner.stream_state(stream) }?;
        Ok(if self.is(Flaw::CaptureUnseen) { StreamState::Ready } else { state })
    }

    fn other_context(&self) -> Option<u64> {
        self.inner.other_context()
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        self.inner.in_primary(work)
    }

    fn event_create(&self) -> Result<Event> {
        self.enter("event_create")?;
        self.inner.event_create()
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        self.state.lock().recorded.remove(&event.raw());
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_destroy(event) }
    }

    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        self.state.lock().recorded.insert(event.raw());
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_record(event, stream) }
    }

    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        if self.is(Flaw::NeverRecordedIsAnError) && !self.state.lock().recorded.contains(&event.raw()) {
            return Err(refused("event_wait", "never recorded"));
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_wait(event, stream) }
    }

    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_query(event) }
    }

    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        self.disturbs(Flaw::WaitBreaksCapture);
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_synchronize(event) }
    }

    fn stream_create(&self) -> Result<Stream> {
        self.enter("stream_create")?;
        self.inner.stream_create()
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.stream_destroy(stream) }
    }
}

// SAFETY: as above.
unsafe impl Transfer for BrokenDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        self.enter("fill")?;
        let value = if self.is(Flaw::FillsBytes) { value & 0xff | (value & 0xff) << 8 } else { value };
        {
            let mut state = self.state.lock();
            if state.capturing == Some(stream) {
                state.nodes.push((at.0, len, value));
                return Ok(());
            }
        }
        if self.is(Flaw::FillsTooFar) {
            // SAFETY: the following bytes are mapped, or the inner driver refuses the fill.
            let _ = unsafe { self.inner.fill(at, len + 4, value, stream) };
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.fill(at, len, value, stream) }
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        self.enter("read")?;
        self.disturbs(Flaw::CopyBreaksCapture);
        if self.state.lock().fresh.remove(&at.0) && self.is(Flaw::FreshMapReadsZero) {
            into.fill(0);
            return Ok(());
        }
        let len = if self.is(Flaw::ReadsWords) { into.len() / 4 * 4 } else { into.len() };
        // SAFETY: the caller's contract.
        unsafe { self.inner.read(at, &mut into[..len]) }
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        self.disturbs(Flaw::CopyBreaksCapture);
        let len = if self.is(Flaw::WritesWords) { from.len() / 4 * 4 } else { from.len() };
        // SAFETY: the caller's contract.
        unsafe { self.inner.write(at, &from[..len]) }
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        self.state.lock().registered.push((at as usize, len));
        // SAFETY: the caller's contract.
        unsafe { self.inner.host_register(at, len) }
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        self.state.lock().registered.retain(|(start, _)| *start != at as usize);
        // SAFETY: the caller's contract.
        unsafe { self.inner.host_unregister(at) }
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        let at = to as usize;
        let registered =
            self.state.lock().registered.iter().any(|(start, len)| (*start..start + len).contains(&at));
        let lost = if registered { Flaw::LosesRegisteredCopies } else { Flaw::LosesCopiesToHost };
        if self.is(lost) {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.copy_to_host(from, to, len, stream) }
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        if self.is(Flaw::LosesCopiesFromHost) {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.copy_from_host(to, from, len, stream) }
    }
}
