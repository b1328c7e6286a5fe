use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError};

use super::api::{
    self, AclEvent, AclStream, CaptureStatus, Code, CopyKind, EventStatus, Model, StreamStatus,
};
use super::{AscendDriver, WAITING, check, errors};
use crate::driver::{Event, StreamState, Timeline, Transfer};
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

/// Host pattern for fills, if the device cannot repeat 32 bits.
const PATTERN: usize = 64 << 10;

/// By value; never freed, as a copy may be running.
#[derive(Debug, Default)]
pub(super) struct Patterns(Mutex<HashMap<u32, Arc<[u32]>>>);

impl Patterns {
    fn of(&self, value: u32) -> Arc<[u32]> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(value).or_insert_with(|| vec![value; PATTERN / 4].into()))
    }
}

fn event(event: Event) -> AclEvent {
    AclEvent(event.raw() as *mut c_void)
}

fn pointer(at: Address) -> *mut c_void {
    at.0 as *mut c_void
}

impl AscendDriver {
    fn capturing(&self) -> Error {
        Error::DeviceCapturing { device: self.info.ordinal }
    }

    /// `None` if queries are forbidden.
    fn idle_stream(&self) -> Result<Option<u64>> {
        if self.must_not_wait() {
            return Ok(None);
        }
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        for place in 0..spare.len() {
            let (stream, mut status) =
                (AclStream(spare[place] as *mut c_void), StreamStatus(api::STREAM_COMPLETE));
            // SAFETY: our stream; valid out pointer.
            self.call("aclrtStreamQuery", |api| unsafe { (api.aclrtStreamQuery)(stream, &raw mut status) })?;
            if status == StreamStatus(api::STREAM_COMPLETE) {
                return Ok(Some(spare.swap_remove(place)));
            }
        }
        Ok(None)
    }

    /// # Safety
    /// Both are memory of the given kind until the copy ends.
    unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
        kind: u32,
        on: Stream,
    ) -> Result<()> {
        let on = self.stream(on)?;
        // SAFETY: the caller's contract.
        self.call("aclrtMemcpyAsync", |api| unsafe {
            (api.aclrtMemcpyAsync)(to, len, from, len, CopyKind(kind), on)
        })
    }

    /// Copies a host pattern, then doubles the filled part on the device.
    ///
    /// # Safety
    /// As [`Transfer::fill`].
    unsafe fn repeat(&self, at: Address, len: u64, value: u32, on: Stream) -> Result<()> {
        let pattern = self.patterns.of(value);
        let mut done = len.min(PATTERN as u64);
        // SAFETY: as the caller's; the driver keeps the pattern.
        unsafe {
            self.copy(pointer(at), pattern.as_ptr().cast(), done as usize, api::HOST_TO_DEVICE, on)?;
            while done < len {
                let more = done.min(len - done);
                let to = pointer(at.plus(done));
                self.copy(to, pointer(at), more as usize, api::DEVICE_TO_DEVICE, on)?;
                done += more;
            }
        }
        Ok(())
    }
}

// SAFETY: ACL's functions follow the contract, by its documentation (stand-in only).
unsafe impl Timeline for AscendDriver {
    unsafe fn stream_state(&self, asked: Stream) -> Result<StreamState> {
        let stream = self.stream(asked)?;
        if stream.0.is_null() {
            // The default stream is forbidden during other captures (documentation).
            let open = self.captures.load(SeqCst) > 0;
            return Ok(if open { StreamState::Capturing } else { StreamState::Ready });
        }
        let (mut status, mut model) = (CaptureStatus(api::CAPTURE_NONE), Model(ptr::null_mut()));
        // SAFETY: valid out pointers, existing stream; needs no context (source).
        let code = unsafe { (self.api.aclmdlRICaptureGetInfo)(stream, &raw mut status, &raw mut model) };
        if code == Code(errors::FEATURE_NOT_SUPPORTED) {
            // The chip has no captures.
            return Ok(StreamState::Ready);
        }
        check(self.api, "aclmdlRICaptureGetInfo", code)?;
        // An invalidated capture also blocks the stream.
        let ready = status == CaptureStatus(api::CAPTURE_NONE);
        Ok(if ready { StreamState::Ready } else { StreamState::Capturing })
    }

    fn other_context(&self) -> Option<u64> {
        // Null belongs to the context set for each call.
        None
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }

    fn event_create(&self) -> Result<Event> {
        let mut made = AclEvent(ptr::null_mut());
        // SAFETY: valid out pointer.
        self.call("aclrtCreateEventExWithFlag", |api| unsafe {
            (api.aclrtCreateEventExWithFlag)(&raw mut made, api::EVENT_SYNC)
        })?;
        // SAFETY: a new event.
        Ok(unsafe { Event::from_raw(made.0 as u64) })
    }

    unsafe fn event_destroy(&self, destroyed: Event) -> Result<()> {
        // SAFETY: our event, destroyed once.
        self.give_back("aclrtDestroyEvent", |api| unsafe { (api.aclrtDestroyEvent)(event(destroyed)) })
    }

    unsafe fn event_record(&self, recorded: Event, on: Stream) -> Result<()> {
        let on = self.stream(on)?;
        // SAFETY: our event, an existing stream.
        self.call("aclrtRecordEvent", |api| unsafe { (api.aclrtRecordEvent)(event(recorded), on) })
    }

    unsafe fn event_wait(&self, awaited: Event, by: Stream) -> Result<()> {
        let by = self.stream(by)?;
        // SAFETY: as above.
        self.call("aclrtStreamWaitEvent", |api| unsafe { (api.aclrtStreamWaitEvent)(by, event(awaited)) })
    }

    unsafe fn event_query(&self, asked: Event) -> Result<bool> {
        if self.must_not_wait() {
            return Ok(false);
        }
        let mut status = EventStatus(api::EVENT_COMPLETE);
        // SAFETY: our event; valid out pointer.
        self.call("aclrtQueryEventStatus", |api| unsafe {
            (api.aclrtQueryEventStatus)(event(asked), &raw mut status)
        })?;
        Ok(status == EventStatus(api::EVENT_COMPLETE))
    }

    unsafe fn event_synchronize(&self, awaited: Event) -> Result<()> {
        self.may_wait()?;
        // SAFETY: our event.
        self.call("aclrtSynchronizeEvent", |api| unsafe { (api.aclrtSynchronizeEvent)(event(awaited)) })
    }

    fn stream_create(&self) -> Result<Stream> {
        let made = match self.idle_stream()? {
            Some(idle) => idle,
            None => {
                let mut made = AclStream(ptr::null_mut());
                // SAFETY: valid out pointer.
                self.call("aclrtCreateStream", |api| unsafe { (api.aclrtCreateStream)(&raw mut made) })?;
                made.0 as u64
            }
        };
        // SAFETY: a stream of the runtime.
        Ok(unsafe { Stream::from_raw(made) })
    }

    unsafe fn stream_destroy(&self, destroyed: Stream) -> Result<()> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(destroyed.raw());
        Ok(())
    }

    fn capture_begins(&self) {
        self.captures.fetch_add(1, SeqCst);
    }

    fn capture_ends(&self) {
        self.captures.fetch_sub(1, SeqCst);
    }

    fn may_wait(&self) -> Result<()> {
        if self.must_not_wait() { Err(self.capturing()) } else { Ok(()) }
    }

    fn wait_begins(&self) {
        WAITING.set(WAITING.get() + 1);
    }

    fn wait_ends(&self) {
        WAITING.set(WAITING.get().saturating_sub(1));
    }
}

// SAFETY: as above.
unsafe impl Transfer for AscendDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, on: Stream) -> Result<()> {
        let stream = self.stream(on)?;
        let [byte, rest @ ..] = value.to_ne_bytes();
        if rest.iter().all(|other| *other == byte) {
            // SAFETY: mapped and writable by the caller; the stream exists.
            return self.call("aclrtMemsetAsync", |api| unsafe {
                (api.aclrtMemsetAsync)(pointer(at), len as usize, c_int::from(byte), len as usize, stream)
            });
        }
        if let Some(fill) = self.api.aclrtMemsetD32Async {
            // SAFETY: as above.
            let filled = self.call("aclrtMemsetD32Async", |_| unsafe {
                fill(pointer(at), len as usize, value, len as usize / 4, stream)
            });
            // Documented for memory of aclrtMalloc only.
            if !matches!(&filled, Err(Error::Driver { code, .. }) if errors::unsupported(*code)) {
                return filled;
            }
        }
        // SAFETY: as above.
        unsafe { self.repeat(at, len, value, on) }
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        let len = into.len();
        // SAFETY: a slice of this length; mapped memory.
        self.call("aclrtMemcpy", |api| unsafe {
            let kind = CopyKind(api::DEVICE_TO_HOST);
            (api.aclrtMemcpy)(into.as_mut_ptr().cast(), len, pointer(at), len, kind)
        })
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        let len = from.len();
        // SAFETY: a slice of this length; mapped memory.
        self.call("aclrtMemcpy", |api| unsafe {
            let kind = CopyKind(api::HOST_TO_DEVICE);
            (api.aclrtMemcpy)(pointer(at), len, from.as_ptr().cast(), len, kind)
        })
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        let missing = Error::SymbolMissing { driver: super::NAME, name: "aclrtHostRegisterV2" };
        let register = self.api.aclrtHostRegisterV2.ok_or(missing)?;
        // SAFETY: process memory, mapped until unregistered.
        self.call("aclrtHostRegisterV2", |_| unsafe { register(at.cast(), len as u64, api::REGISTER_PINNED) })
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        let missing = Error::SymbolMissing { driver: super::NAME, name: "aclrtHostUnregister" };
        let unregister = self.api.aclrtHostUnregister.ok_or(missing)?;
        // SAFETY: our registration, without a running copy.
        self.give_back("aclrtHostUnregister", |_| unsafe { unregister(at.cast()) })
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: both mapped until the copy ends.
        unsafe { self.copy(to.cast(), pointer(from), len, api::DEVICE_TO_HOST, on) }
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.copy(pointer(to), from.cast(), len, api::HOST_TO_DEVICE, on) }
    }
}
