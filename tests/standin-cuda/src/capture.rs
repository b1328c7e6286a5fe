//! Streams, events and graphs, and what is being captured: the state behind `stream` and `graph`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::{Mutex, MutexGuard};

use crate::code::{
    Answer, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT, INVALID_HANDLE, refused,
};
use crate::state;

/// A node of a graph. Addresses are looked at when it runs, not when it is made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Node {
    Fill { at: u64, len: u64, value: u32 },
    Copy { to: u64, from: u64, len: u64 },
}

impl Node {
    /// Whether everything it touches is mapped now.
    pub(crate) fn mapped(self) -> bool {
        let accessible =
            |at, len| state::device_at(at).is_ok_and(|(_, device)| device.memory.accessible(at, len));
        match self {
            Self::Fill { at, len, .. } => accessible(at, len),
            Self::Copy { to, from, len } => accessible(to, len) && accessible(from, len),
        }
    }

    /// Does the work on what is mapped now.
    pub(crate) fn run(self) -> Answer {
        match self {
            Self::Fill { len: 0, .. } | Self::Copy { len: 0, .. } => Ok(()),
            Self::Fill { at, len, value } => {
                state::device_at(at)?.1.memory.fill(at, len, value).map_err(refused)
            }
            Self::Copy { to, from, len } => state::copy(to, from, len).map_err(refused),
        }
    }
}

/// A stream as a caller names it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// The legacy stream of the current context.
    Legacy { device: usize },
    /// One that was created, or a thread's default stream, which is created when the thread first names it.
    Created(u64),
}

struct Stream {
    device: usize,
    blocking: bool,
}

#[derive(Clone, Copy)]
enum Recorded {
    /// Never, or in work that is done.
    Happened,
    /// In a capture, by this stream of it.
    Captured { capture: u64, by: u64 },
}

struct Event {
    device: usize,
    recorded: Recorded,
}

pub(crate) struct Capture {
    pub(crate) device: usize,
    pub(crate) origin: u64,
    pub(crate) thread: ThreadId,
    pub(crate) mode: c_int,
    pub(crate) valid: bool,
    pub(crate) nodes: Vec<Node>,
    /// The streams in it: the origin and those that waited for an event of it.
    members: BTreeSet<u64>,
    /// Members whose work nothing of the capture waits for yet.
    pub(crate) unjoined: BTreeSet<u64>,
    blocking: bool,
}

/// Everything with a handle, by handle. Handles are never used twice, so a stale one is always noticed.
pub(crate) struct Table {
    last: u64,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: BTreeMap<u64, Arc<[Node]>>,
    pub(crate) execs: BTreeMap<u64, Arc<[Node]>>,
}

static TABLE: Mutex<Table> = Mutex::new(Table {
    last: 0,
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
    captures: BTreeMap::new(),
    graphs: BTreeMap::new(),
    execs: BTreeMap::new(),
});

/// The table, locked.
pub(crate) fn table() -> MutexGuard<'static, Table> {
    TABLE.lock()
}

/// A thread's default streams, by device. They go with the thread.
#[derive(Default)]
struct Own(BTreeMap<usize, u64>);

impl Drop for Own {
    fn drop(&mut self) {
        let mut table = table();
        for id in self.0.values() {
            // A capture that began on one of them can never be ended.
            table.captures.retain(|_, capture| capture.origin != *id);
            table.streams.remove(id);
        }
    }
}

thread_local! {
    static OWN: RefCell<Own> = RefCell::default();
}

/// What a stream handle names: null and 1 the legacy stream, 2 the thread's own, else a created one.
pub(crate) fn target(stream: *mut c_void) -> Answer<Target> {
    state::devices()?;
    match stream as u64 {
        0 | 1 => Ok(Target::Legacy { device: state::current()?.0 }),
        2 => own(state::current()?.0).map(Target::Created),
        created => Ok(Target::Created(created)),
    }
}

/// The calling thread's default stream on a device, which is a blocking one. A context that came back has new ones.
fn own(device: usize) -> Answer<u64> {
    let found = OWN.try_with(|own| {
        let mut table = table();
        let id = own.borrow().0.get(&device).copied().filter(|id| table.has_stream(*id));
        id.unwrap_or_else(|| {
            let id = table.add_stream(device, true);
            own.borrow_mut().0.insert(device, id);
            id
        })
    });
    // A thread that is ending has none.
    found.map_err(|_| INVALID_HANDLE)
}

impl Table {
    /// A new handle, which looks like an aligned pointer.
    pub(crate) fn next(&mut self) -> u64 {
        self.last += 1;
        0xE000_0000 + self.last * 16
    }

    pub(crate) fn events(&self) -> u64 {
        self.events.len() as u64
    }

    pub(crate) fn streams(&self) -> u64 {
        self.streams.len() as u64
    }

    /// Drops everything of a context that is gone.
    pub(crate) fn forget(&mut self, device: usize) {
        self.captures.retain(|_, c| c.device != device);
        self.streams.retain(|_, s| s.device != device);
        self.events.retain(|_, e| e.device != device);
    }

    pub(crate) fn add_stream(&mut self, device: usize, blocking: bool) -> u64 {
        let id = self.next();
        self.streams.insert(id, Stream { device, blocking });
        id
    }

    pub(crate) fn remove_stream(&mut self, id: u64) -> Answer {
        if self.capture_of(id).is_some() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        self.streams.remove(&id).map(drop).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn add_event(&mut self, device: usize) -> u64 {
        let id = self.next();
        self.events.insert(id, Event { device, recorded: Recorded::Happened });
        id
    }

    pub(crate) fn remove_event(&mut self, id: u64) -> Answer {
        self.events.remove(&id).map(drop).ok_or(INVALID_HANDLE)
    }

    /// The capture that a stream takes part in.
    pub(crate) fn capture_of(&self, stream: u64) -> Option<(u64, &Capture)> {
        self.captures.iter().find(|(_, c)| c.members.contains(&stream)).map(|(id, c)| (*id, c))
    }

    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.valid = false;
        }
    }

    /// Spoils every capture of a device; whether there was one.
    pub(crate) fn invalidate_device(&mut self, device: usize) -> bool {
        let mut any = false;
        for capture in self.captures.values_mut().filter(|c| c.device == device) {
            capture.valid = false;
            any = true;
        }
        any
    }

    /// Whether the legacy stream would have to wait for a stream under capture.
    pub(crate) fn legacy_blocked(&self, device: usize) -> bool {
        self.captures.values().any(|c| c.device == device && c.blocking)
    }

    fn stream_device(&self, target: Target) -> Answer<usize> {
        match target {
            Target::Legacy { device } => Ok(device),
            Target::Created(id) => self.streams.get(&id).map(|s| s.device).ok_or(INVALID_HANDLE),
        }
    }

    /// What every piece of work for a stream begins with: the capture it goes to, if one is open on that stream.
    pub(crate) fn enter(&mut self, target: Target) -> Answer<Option<u64>> {
        let device = self.stream_device(target)?;
        match target {
            Target::Legacy { .. } => {
                if self.legacy_blocked(device) {
                    for capture in self.captures.values_mut().filter(|c| c.device == device && c.blocking) {
                        capture.valid = false;
                    }
                    return Err(CAPTURE_IMPLICIT);
                }
                Ok(None)
            }
            Target::Created(id) => match self.capture_of(id) {
                None => Ok(None),
                Some((capture, Capture { valid: true, .. })) => Ok(Some(capture)),
                Some(_) => Err(CAPTURE_INVALIDATED),
            },
        }
    }

    /// Adds work of a stream to its capture.
    pub(crate) fn push(&mut self, capture: u64, target: Target, nodes: &[Node]) {
        let (Some(capture), Target::Created(stream)) = (self.captures.get_mut(&capture), target) else {
            return;
        };
        capture.nodes.extend_from_slice(nodes);
        if stream != capture.origin {
            capture.unjoined.insert(stream);
        }
    }

    pub(crate) fn begin(&mut self, stream: u64, thread: ThreadId, mode: c_int) -> Answer {
        let Stream { device, blocking } = *self.streams.get(&stream).ok_or(INVALID_HANDLE)?;
        let id = self.next();
        let capture = Capture {
            device,
            origin: stream,
            thread,
            mode,
            valid: true,
            nodes: Vec::new(),
            members: BTreeSet::from([stream]),
            unjoined: BTreeSet::new(),
            blocking,
        };
        self.captures.insert(id, capture);
        Ok(())
    }

    pub(crate) fn finish(&mut self, capture: u64) -> Option<Capture> {
        self.captures.remove(&capture)
    }

    pub(crate) fn has_stream(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream)
    }

    /// `cuEventRecord`: on a stream under capture the event marks a place in the graph, otherwise work that is done already.
    pub(crate) fn record(&mut self, event: u64, target: Target) -> Answer {
        let device = self.stream_device(target)?;
        if self.events.get(&event).is_none_or(|e| e.device != device) {
            return Err(INVALID_HANDLE);
        }
        let recorded = match (self.enter(target)?, target) {
            (Some(capture), Target::Created(by)) => Recorded::Captured { capture, by },
            _ => Recorded::Happened,
        };
        if let Some(event) = self.events.get_mut(&event) {
            event.recorded = recorded;
        }
        Ok(())
    }

    /// `cuStreamWaitEvent`: a stream that waits for an event of an open capture joins it; nothing else crosses the boundary.
    pub(crate) fn wait(&mut self, target: Target, event: u64, external: bool) -> Answer {
        let recorded = self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded;
        let waiting = self.enter(target)?;
        match (waiting, recorded) {
            (None, Recorded::Happened) => Ok(()),
            (Some(_), Recorded::Happened) if external => Ok(()),
            (Some(capture), Recorded::Happened) => {
                self.invalidate(capture);
                Err(CAPTURE_ISOLATION)
            }
            (Some(mine), Recorded::Captured { capture, by }) if mine == capture => {
                if let Some(capture) = self.captures.get_mut(&mine) {
                    capture.unjoined.remove(&by);
                }
                Ok(())
            }
            (Some(mine), Recorded::Captured { capture, .. }) => {
                self.invalidate(mine);
                self.invalidate(capture);
                Err(if self.captures.contains_key(&capture) { CAPTURE_MERGE } else { CAPTURE_ISOLATION })
            }
            (None, Recorded::Captured { capture, .. }) => {
                let Target::Created(stream) = target else { return Err(CAPTURE_IMPLICIT) };
                let capture = self.captures.get_mut(&capture).ok_or(CAPTURE_ISOLATION)?;
                if !capture.valid {
                    return Err(CAPTURE_INVALIDATED);
                }
                capture.members.insert(stream);
                capture.unjoined.insert(stream);
                Ok(())
            }
        }
    }

    /// `cuEventQuery` and `cuEventSynchronize`: an event in a graph is nothing that happens, and asking spoils the capture.
    pub(crate) fn happened(&mut self, event: u64) -> Answer {
        match self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded {
            Recorded::Happened => Ok(()),
            Recorded::Captured { capture, .. } => {
                self.invalidate(capture);
                Err(CAPTURED_EVENT)
            }
        }
    }

    /// `cuStreamSynchronize` and the like: refused on a stream under capture, which is then lost.
    pub(crate) fn synchronise(&mut self, target: Target) -> Answer {
        match self.enter(target)? {
            None => Ok(()),
            Some(capture) => {
                self.invalidate(capture);
                Err(CAPTURE_UNSUPPORTED)
            }
        }
    }
}
