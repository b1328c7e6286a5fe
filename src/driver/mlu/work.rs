//! Streams are queues, events are notifiers.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;

use super::api::{self, CaptureStatus, CnAddress, Notifier, Queue};
use super::{MluDriver, NAME};
use crate::driver::{Event, StreamState, Timeline, Transfer};
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

impl MluDriver {
    /// `None`: our event was never placed, so it counts as reached, as on other platforms. Callers
    /// place their own notifiers.
    fn asked(&self, event: Event) -> Option<Notifier> {
        (!self.unplaced.lock().contains(&event.raw())).then_some(notifier(event))
    }
}

fn notifier(event: Event) -> Notifier {
    Notifier(event.raw() as *mut c_void)
}

// SAFETY: CNDrv's functions follow the contract, by its header (stand-in only).
unsafe impl Timeline for MluDriver {
    unsafe fn stream_state(&self, asked: Stream) -> Result<StreamState> {
        let queue = self.queue(asked)?;
        if queue.0.is_null() {
            // The null queue cannot be captured (header); its effect on captures is undocumented.
            let open = self.captures.load(SeqCst) > 0;
            return Ok(if open { StreamState::Capturing } else { StreamState::Ready });
        }
        let mut status = CaptureStatus(api::CAPTURE_NONE);
        // SAFETY: valid out pointer, existing queue.
        self.call("cnQueueIsCapturing", |api| unsafe { (api.cnQueueIsCapturing)(queue, &raw mut status) })?;
        // An invalidated capture also blocks the queue.
        let ready = status == CaptureStatus(api::CAPTURE_NONE);
        Ok(if ready { StreamState::Ready } else { StreamState::Capturing })
    }

    fn other_context(&self) -> Option<u64> {
        // Queues of other contexts are undocumented.
        None
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }

    fn event_create(&self) -> Result<Event> {
        let mut notifier = Notifier(ptr::null_mut());
        // SAFETY: valid out pointer.
        self.call("cnCreateNotifier", |api| unsafe {
            (api.cnCreateNotifier)(&raw mut notifier, api::NO_TIMING)
        })?;
        let made = notifier.0 as u64;
        self.unplaced.lock().insert(made);
        // SAFETY: a new notifier.
        Ok(unsafe { Event::from_raw(made) })
    }

    unsafe fn event_destroy(&self, destroyed: Event) -> Result<()> {
        // First: CNDrv may reuse the value at once.
        let unplaced = self.unplaced.lock().remove(&destroyed.raw());
        let gone = self.give_back("cnDestroyNotifier", |api| {
            // SAFETY: our notifier, destroyed once; a pending one is released later.
            unsafe { (api.cnDestroyNotifier)(notifier(destroyed)) }
        });
        if gone.is_err() && unplaced {
            // The event still exists.
            self.unplaced.lock().insert(destroyed.raw());
        }
        gone
    }

    unsafe fn event_record(&self, recorded: Event, on: Stream) -> Result<()> {
        let queue = self.queue(on)?;
        // SAFETY: our notifier, an existing queue.
        self.call("cnPlaceNotifier", |api| unsafe { (api.cnPlaceNotifier)(notifier(recorded), queue) })?;
        self.unplaced.lock().remove(&recorded.raw());
        Ok(())
    }

    unsafe fn event_wait(&self, awaited: Event, by: Stream) -> Result<()> {
        let queue = self.queue(by)?;
        let Some(notifier) = self.asked(awaited) else { return Ok(()) };
        // SAFETY: the notifier and the queue exist.
        self.call("cnQueueWaitNotifier", |api| unsafe { (api.cnQueueWaitNotifier)(queue, notifier) })
    }

    unsafe fn event_query(&self, asked: Event) -> Result<bool> {
        let Some(notifier) = self.asked(asked) else { return Ok(true) };
        // SAFETY: the notifier exists.
        match self.call("cnQueryNotifier", |api| unsafe { (api.cnQueryNotifier)(notifier) }) {
            Ok(()) => Ok(true),
            Err(Error::Driver { code: api::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    unsafe fn event_synchronize(&self, awaited: Event) -> Result<()> {
        let Some(notifier) = self.asked(awaited) else { return Ok(()) };
        // SAFETY: the notifier exists.
        self.call("cnWaitNotifier", |api| unsafe { (api.cnWaitNotifier)(notifier) })
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut made = Queue(ptr::null_mut());
        // SAFETY: valid out pointer; flags must be 0.
        self.call("cnCreateQueue", |api| unsafe { (api.cnCreateQueue)(&raw mut made, 0) })?;
        // SAFETY: a new queue.
        Ok(unsafe { Stream::from_raw(made.0 as u64) })
    }

    unsafe fn stream_destroy(&self, destroyed: Stream) -> Result<()> {
        let queue = Queue(destroyed.raw() as *mut _);
        // SAFETY: our queue, destroyed once.
        self.give_back("cnDestroyQueue", |api| unsafe { (api.cnDestroyQueue)(queue) })
    }

    fn capture_begins(&self) {
        self.captures.fetch_add(1, SeqCst);
    }

    fn capture_ends(&self) {
        self.captures.fetch_sub(1, SeqCst);
    }
}

// SAFETY: as above.
unsafe impl Transfer for MluDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, on: Stream) -> Result<()> {
        let queue = self.queue(on)?;
        // SAFETY: mapped and writable by the caller; the queue exists.
        self.call("cnMemsetD32Async", |api| unsafe {
            (api.cnMemsetD32Async)(CnAddress(at.0), value, len / 4, queue)
        })
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: a slice of this length; mapped memory.
        self.call("cnMemcpyDtoH", |api| unsafe {
            (api.cnMemcpyDtoH)(into.as_mut_ptr().cast(), CnAddress(at.0), into.len() as u64)
        })
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: a slice of this length; mapped memory.
        self.call("cnMemcpyHtoD", |api| unsafe {
            (api.cnMemcpyHtoD)(CnAddress(at.0), from.as_ptr().cast(), from.len() as u64)
        })
    }

    unsafe fn host_register(&self, _at: *mut u8, _len: usize) -> Result<()> {
        Err(no_registration())
    }

    unsafe fn host_unregister(&self, _at: *mut u8) -> Result<()> {
        Err(no_registration())
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, on: Stream) -> Result<()> {
        let queue = self.queue(on)?;
        // SAFETY: both mapped until the copy ends.
        self.call("cnMemcpyDtoHAsync_V2", |api| unsafe {
            (api.cnMemcpyDtoHAsync_V2)(to.cast::<c_void>(), CnAddress(from.0), len as u64, queue)
        })
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, on: Stream) -> Result<()> {
        let queue = self.queue(on)?;
        // SAFETY: as above.
        self.call("cnMemcpyHtoDAsync_V2", |api| unsafe {
            (api.cnMemcpyHtoDAsync_V2)(CnAddress(to.0), from.cast::<c_void>(), len as u64, queue)
        })
    }
}

fn no_registration() -> Error {
    let problem = "CNDrv 2.15 has no function that registers host memory of others";
    Error::UnfitDriver { driver: NAME, problem: problem.to_owned() }
}
