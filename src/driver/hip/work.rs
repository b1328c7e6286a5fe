use std::ffi::{c_int, c_void};
use std::ptr;

use super::api::{self, Api, CaptureStatus, CopyKind, DevicePointer, EventHandle, StreamHandle};
use super::{HipDriver, check, pointer, with_device};
use crate::driver::{Event, StreamState, Timeline, Transfer};
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

fn stream(stream: Stream) -> StreamHandle {
    StreamHandle(stream.raw() as *mut c_void)
}

fn event(event: Event) -> EventHandle {
    EventHandle(event.0 as *mut c_void)
}

impl HipDriver {
    fn copy_and_wait(&self, to: *mut c_void, from: *const c_void, len: usize, kind: c_int) -> Result<()> {
        // SAFETY: valid for `len` bytes until the wait below (callers).
        self.call("hipMemcpyAsync", |api| unsafe {
            (api.hipMemcpyAsync)(to, from, len, CopyKind(kind), self.copies)
        })?;
        // SAFETY: our own stream, never captured.
        self.call("hipStreamSynchronize", |api| unsafe { (api.hipStreamSynchronize)(self.copies) })
    }
}

// SAFETY: the runtime follows the contract, by its sources (tests/platforms/hip.rs).
unsafe impl Timeline for HipDriver {
    unsafe fn stream_state(&self, asked: Stream) -> Result<StreamState> {
        let mut status = CaptureStatus(api::CAPTURE_NONE);
        // SAFETY: valid out pointer, existing stream.
        let mut ask = |api: &Api| unsafe { (api.hipStreamIsCapturing)(stream(asked), &raw mut status) };
        let answer = if asked == Stream::LEGACY || asked == Stream::PER_THREAD {
            // Default streams belong to the current device.
            with_device(self.api, self.info.ordinal, "hipStreamIsCapturing", ask)
        } else {
            // Allowed in every capture mode. A created stream knows its device.
            let code = ask(self.api);
            check(self.api, "hipStreamIsCapturing", code)
        };
        match answer {
            // An invalidated capture also blocks the stream.
            Ok(()) if status.0 == api::CAPTURE_NONE => Ok(StreamState::Ready),
            // The null stream, while a synchronizing stream is captured.
            Ok(()) | Err(Error::Driver { code: api::CAPTURE_IMPLICIT, .. }) => Ok(StreamState::Capturing),
            Err(error) => Err(error),
        }
    }

    fn other_context(&self) -> Option<u64> {
        None
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }

    fn event_create(&self) -> Result<Event> {
        let mut created = EventHandle(ptr::null_mut());
        // SAFETY: valid out pointer.
        self.call("hipEventCreate", |api| unsafe {
            (api.hipEventCreateWithFlags)(&raw mut created, api::EVENT_DISABLE_TIMING)
        })?;
        Ok(Event(created.0 as u64))
    }

    unsafe fn event_destroy(&self, destroyed: Event) -> Result<()> {
        // SAFETY: our event, destroyed once.
        self.give_back("hipEventDestroy", |api| unsafe { (api.hipEventDestroy)(event(destroyed)) })
    }

    unsafe fn event_record(&self, recorded: Event, on: Stream) -> Result<()> {
        // SAFETY: our event, an existing stream.
        self.call("hipEventRecord", |api| unsafe { (api.hipEventRecord)(event(recorded), stream(on)) })
    }

    unsafe fn event_wait(&self, awaited: Event, by: Stream) -> Result<()> {
        // SAFETY: as above.
        self.call("hipStreamWaitEvent", |api| unsafe {
            (api.hipStreamWaitEvent)(stream(by), event(awaited), 0)
        })
    }

    unsafe fn event_query(&self, asked: Event) -> Result<bool> {
        // SAFETY: our event.
        match self.call("hipEventQuery", |api| unsafe { (api.hipEventQuery)(event(asked)) }) {
            Ok(()) => Ok(true),
            Err(Error::Driver { code: api::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    unsafe fn event_synchronize(&self, awaited: Event) -> Result<()> {
        // SAFETY: our event.
        self.call("hipEventSynchronize", |api| unsafe { (api.hipEventSynchronize)(event(awaited)) })
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut created = StreamHandle(ptr::null_mut());
        // SAFETY: valid out pointer.
        self.call("hipStreamCreate", |api| unsafe {
            (api.hipStreamCreateWithFlags)(&raw mut created, api::STREAM_NON_BLOCKING)
        })?;
        // SAFETY: a new stream.
        Ok(unsafe { Stream::from_raw(created.0 as u64) })
    }

    unsafe fn stream_destroy(&self, destroyed: Stream) -> Result<()> {
        // SAFETY: our stream, destroyed once.
        self.give_back("hipStreamDestroy", |api| unsafe { (api.hipStreamDestroy)(stream(destroyed)) })
    }
}

// SAFETY: as above.
unsafe impl Transfer for HipDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, on: Stream) -> Result<()> {
        // SAFETY: the range is mapped and accessible.
        self.call("hipMemsetD32Async", |api| unsafe {
            (api.hipMemsetD32Async)(
                DevicePointer(pointer(at)),
                value.cast_signed(),
                len as usize / 4,
                stream(on),
            )
        })
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        self.copy_and_wait(into.as_mut_ptr().cast(), pointer(at), into.len(), api::DEVICE_TO_HOST)
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        self.copy_and_wait(pointer(at), from.as_ptr().cast(), from.len(), api::HOST_TO_DEVICE)
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: process memory, mapped until unregistered.
        self.call("hipHostRegister", |api| unsafe {
            (api.hipHostRegister)(at.cast::<c_void>(), len, api::REGISTER_PORTABLE)
        })
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: our registration, without a running copy.
        self.give_back("hipHostUnregister", |api| unsafe { (api.hipHostUnregister)(at.cast::<c_void>()) })
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: both mapped until the copy ends.
        self.call("hipMemcpyAsync", |api| unsafe {
            let kind = CopyKind(api::DEVICE_TO_HOST);
            (api.hipMemcpyAsync)(to.cast::<c_void>(), pointer(from), len, kind, stream(on))
        })
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, on: Stream) -> Result<()> {
        // SAFETY: as above.
        self.call("hipMemcpyAsync", |api| unsafe {
            let kind = CopyKind(api::HOST_TO_DEVICE);
            (api.hipMemcpyAsync)(pointer(to), from.cast::<c_void>(), len, kind, stream(on))
        })
    }
}
