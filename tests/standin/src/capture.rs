//! Streams, events and graphs, and what is being captured.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::{Mutex, MutexGuard};

use crate::state::{self, GLOBAL, RELAXED};
use crate::{Answer, Why, refused};

/// A node of a graph. Addresses are looked at when it runs, not when it is made.
#[derive(Clone, Copy, Debug)]
pub enum Node {
    /// Repeats a 32-bit value.
    Fill {
        /// From here on.
        at: u64,
        /// Bytes.
        len: u64,
        /// The value.
        value: u32,
    },
    /// Copies within device memory.
    Copy {
        /// The destination.
        to: u64,
        /// The source.
        from: u64,
        /// Bytes.
        len: u64,
    },
    /// From host memory, which is read when it runs. Only [`graph::load`](crate::graph::load) makes it.
    #[non_exhaustive]
    Load {
        /// The destination.
        to: u64,
        /// The source, an address of the host.
        from: usize,
        /// Bytes.
        len: u64,
    },
}

/// The nodes of a graph, in the order in which they were captured.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    /// The nodes.
    pub all: Vec<Node>,
    /// By node: those that it is behind, which are earlier ones.
    pub after: Vec<Vec<usize>>,
    /// Nodes of an executable that it leaves out.
    pub off: BTreeSet<usize>,
}

/// An executable graph.
#[derive(Clone, Debug)]
pub struct Executable {
    /// What it runs.
    pub nodes: Arc<Nodes>,
    /// The graph it was made of: the one whose nodes name its own.
    pub of: u64,
}

impl Nodes {
    /// A node alone.
    #[must_use]
    pub fn one(node: Node) -> Self {
        Self { all: vec![node], after: vec![Vec::new()], off: BTreeSet::new() }
    }

    /// Adds nodes behind some; those that nothing of them is behind.
    fn append(&mut self, more: &Self, behind: &[usize]) -> Vec<usize> {
        let first = self.all.len();
        self.all.extend_from_slice(&more.all);
        for after in &more.after {
            let moved: Vec<usize> = after.iter().map(|node| first + node).collect();
            self.after.push(if moved.is_empty() { behind.to_vec() } else { moved });
        }
        let inner: BTreeSet<usize> = more.after.iter().flatten().map(|node| first + node).collect();
        (first..self.all.len()).filter(|node| !inner.contains(node)).collect()
    }

    /// Edges, by the node that is behind.
    #[must_use]
    pub fn edges(&self) -> Vec<(usize, usize)> {
        let behind = self.after.iter().enumerate();
        behind.flat_map(|(to, after)| after.iter().map(move |from| (*from, to))).collect()
    }

    /// Whether everything is mapped now that they touch.
    #[must_use]
    pub fn mapped(&self) -> bool {
        let on = self.all.iter().enumerate().filter(|(place, _)| !self.off.contains(place));
        on.map(|(_, node)| node).all(|node| node.mapped())
    }

    /// Whether everything is among these or before them.
    fn all_before(&self, tips: &[usize]) -> bool {
        let mut seen: BTreeSet<usize> = tips.iter().copied().collect();
        let mut open: Vec<usize> = tips.to_vec();
        while let Some(node) = open.pop() {
            open.extend(self.after[node].iter().filter(|before| seen.insert(**before)));
        }
        seen.len() == self.all.len()
    }

    /// Runs all of it: as captured, or in any order that the edges allow.
    ///
    /// # Errors
    /// [`Why::Invalid`] where nothing is mapped.
    pub fn run(&self, mut random: Option<impl FnMut() -> u64>) -> Answer {
        let mut open: Vec<usize> = self.after.iter().map(Vec::len).collect();
        let mut behind = vec![Vec::new(); self.all.len()];
        self.edges().into_iter().for_each(|(from, to)| behind[from].push(to));
        let mut ready: BTreeSet<usize> = (0..self.all.len()).filter(|node| open[*node] == 0).collect();
        while !ready.is_empty() {
            // Without chance the first one: captured order is an order that the edges allow.
            let pick = random.as_mut().map_or(0, |random| (random() % ready.len() as u64) as usize);
            let Some(node) = ready.iter().nth(pick).copied() else { break };
            ready.remove(&node);
            if !self.off.contains(&node) {
                self.all[node].run()?;
            }
            for next in &behind[node] {
                open[*next] -= 1;
                if open[*next] == 0 {
                    ready.insert(*next);
                }
            }
        }
        Ok(())
    }
}

impl Node {
    /// Whether everything it touches is mapped now.
    #[must_use]
    pub fn mapped(self) -> bool {
        let accessible =
            |at, len| state::device_at(at).is_ok_and(|(_, device)| device.memory.accessible(at, len));
        match self {
            Self::Fill { at, len, .. } => accessible(at, len),
            Self::Copy { to, from, len } => accessible(to, len) && accessible(from, len),
            Self::Load { to, len, .. } => accessible(to, len),
        }
    }

    /// Does the work on what is mapped now.
    ///
    /// # Errors
    /// [`Why::Invalid`] where nothing is.
    pub fn run(self) -> Answer {
        match self {
            Self::Fill { len: 0, .. } | Self::Copy { len: 0, .. } | Self::Load { len: 0, .. } => Ok(()),
            Self::Fill { at, len, value } => {
                state::device_at(at)?.1.memory.fill(at, len, value).map_err(refused)
            }
            Self::Copy { to, from, len } => state::copy(to, from, len).map_err(refused),
            Self::Load { to, from, len } => {
                // SAFETY: host memory that stays as long as the graph may run, by the contract of the copy that was captured.
                let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, len as usize) };
                state::device_at(to)?.1.memory.write(to, bytes).map_err(refused)
            }
        }
    }
}

/// A stream as a caller names it.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// The legacy stream of the current context.
    Legacy {
        /// The context's device.
        device: usize,
    },
    /// One that was created, or a thread's default stream, which is created when the thread first names it.
    Created(u64),
}

struct Stream {
    device: usize,
    blocking: bool,
}

#[derive(Clone)]
enum Recorded {
    /// Never, or in work that is done.
    Happened,
    /// In a capture, by this stream of it, behind these nodes.
    Captured { capture: u64, by: u64, behind: Vec<usize> },
}

struct Event {
    device: usize,
    recorded: Recorded,
}

/// A capture that is open.
pub struct Capture {
    device: usize,
    origin: u64,
    thread: ThreadId,
    mode: c_int,
    /// It was not lost.
    pub valid: bool,
    nodes: Nodes,
    /// The streams in it, the origin and those that waited for an event of it: the nodes that a stream's next work is behind.
    members: BTreeMap<u64, Vec<usize>>,
    /// Members whose work nothing of the capture waits for yet.
    unjoined: BTreeSet<u64>,
    blocking: bool,
}

impl Capture {
    /// Whether something was given to another stream that the origin is not behind.
    fn is_unjoined(&self) -> bool {
        let tips = self.members.get(&self.origin).map_or(&[][..], Vec::as_slice);
        !self.unjoined.is_empty() || !self.nodes.all_before(tips)
    }

    /// A stream's next work is behind these too.
    fn wait(&mut self, stream: u64, behind: &[usize]) {
        let tips = self.members.entry(stream).or_default();
        for node in behind {
            if !tips.contains(node) {
                tips.push(*node);
            }
        }
    }
}

/// Everything with a handle, by handle. Handles are never used twice, so a stale one is always noticed.
pub struct Table {
    last: u64,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    captures: BTreeMap<u64, Capture>,
    /// Graphs.
    pub graphs: BTreeMap<u64, Arc<Nodes>>,
    /// Executable ones.
    pub execs: BTreeMap<u64, Executable>,
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
pub fn table() -> MutexGuard<'static, Table> {
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

/// What a stream handle names on platforms that take CUDA's: null and 1 the legacy stream, 2 the thread's own, else a created one. `current` tells the
/// device of the first two.
///
/// # Errors
/// [`Why::NotInitialised`], or what `current` says.
pub fn target(stream: *mut c_void, current: impl FnOnce() -> Answer<usize>) -> Answer<Target> {
    state::devices()?;
    match stream as u64 {
        0 | 1 => Ok(Target::Legacy { device: current()? }),
        2 => own(current()?).map(Target::Created),
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
    found.map_err(|_| Why::InvalidHandle)
}

impl Table {
    /// A new handle, which looks like an aligned pointer.
    pub fn next_handle(&mut self) -> u64 {
        self.last += 1;
        0xE000_0000 + self.last * 16
    }

    /// How many events are alive.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events.len() as u64
    }

    /// How many streams are alive, threads' default ones included.
    #[must_use]
    pub fn streams(&self) -> u64 {
        self.streams.len() as u64
    }

    /// Drops everything of a context that is gone.
    pub fn forget(&mut self, device: usize) {
        self.captures.retain(|_, c| c.device != device);
        self.streams.retain(|_, s| s.device != device);
        self.events.retain(|_, e| e.device != device);
    }

    /// A new stream, which waits for the legacy stream and that for it if it is a blocking one.
    pub fn add_stream(&mut self, device: usize, blocking: bool) -> u64 {
        let id = self.next_handle();
        self.streams.insert(id, Stream { device, blocking });
        id
    }

    /// Destroys a stream.
    ///
    /// # Errors
    /// [`Why::CaptureUnsupported`] for one that is captured, [`Why::InvalidHandle`] for none.
    pub fn remove_stream(&mut self, id: u64) -> Answer {
        if self.capture_of(id).is_some() {
            return Err(Why::CaptureUnsupported);
        }
        self.streams.remove(&id).map(drop).ok_or(Why::InvalidHandle)
    }

    /// A new event, in which nothing is recorded.
    pub fn add_event(&mut self, device: usize) -> u64 {
        let id = self.next_handle();
        self.events.insert(id, Event { device, recorded: Recorded::Happened });
        id
    }

    /// Destroys an event.
    ///
    /// # Errors
    /// [`Why::InvalidHandle`].
    pub fn remove_event(&mut self, id: u64) -> Answer {
        self.events.remove(&id).map(drop).ok_or(Why::InvalidHandle)
    }

    /// The capture that a stream takes part in.
    #[must_use]
    pub fn capture_of(&self, stream: u64) -> Option<(u64, &Capture)> {
        self.captures.iter().find(|(_, c)| c.members.contains_key(&stream)).map(|(id, c)| (*id, c))
    }

    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.valid = false;
        }
    }

    /// Spoils every capture of a device; whether there was one.
    pub fn invalidate_device(&mut self, device: usize) -> bool {
        let mut any = false;
        for capture in self.captures.values_mut().filter(|c| c.device == device) {
            capture.valid = false;
            any = true;
        }
        any
    }

    /// Spoils every capture of the process; whether there was one.
    pub fn invalidate_all(&mut self) -> bool {
        self.captures.values_mut().for_each(|capture| capture.valid = false);
        !self.captures.is_empty()
    }

    /// How many captures are open.
    #[must_use]
    pub fn captures(&self) -> u64 {
        self.captures.len() as u64
    }

    /// Whether the legacy stream would have to wait for a stream under capture.
    #[must_use]
    pub fn legacy_blocked(&self, device: usize) -> bool {
        self.captures.values().any(|c| c.device == device && c.blocking)
    }

    fn stream_device(&self, target: Target) -> Answer<usize> {
        match target {
            Target::Legacy { device } => Ok(device),
            Target::Created(id) => self.streams.get(&id).map(|s| s.device).ok_or(Why::InvalidHandle),
        }
    }

    /// What every piece of work for a stream begins with: the capture it goes to, if one is open on that stream.
    ///
    /// # Errors
    /// [`Why::CaptureImplicit`], which spoils the captures in the way; [`Why::CaptureInvalidated`]; [`Why::InvalidHandle`].
    pub fn enter(&mut self, target: Target) -> Answer<Option<u64>> {
        let device = self.stream_device(target)?;
        match target {
            Target::Legacy { .. } => {
                if self.legacy_blocked(device) {
                    for capture in self.captures.values_mut().filter(|c| c.device == device && c.blocking) {
                        capture.valid = false;
                    }
                    return Err(Why::CaptureImplicit);
                }
                Ok(None)
            }
            Target::Created(id) => match self.capture_of(id) {
                None => Ok(None),
                Some((capture, Capture { valid: true, .. })) => Ok(Some(capture)),
                Some(_) => Err(Why::CaptureInvalidated),
            },
        }
    }

    /// Adds work of a stream to its capture.
    pub fn push(&mut self, capture: u64, target: Target, nodes: &Nodes) {
        let (Some(capture), Target::Created(stream)) = (self.captures.get_mut(&capture), target) else {
            return;
        };
        let behind = capture.members.remove(&stream).unwrap_or_default();
        let tips = capture.nodes.append(nodes, &behind);
        capture.members.insert(stream, if tips.is_empty() { behind } else { tips });
        if stream != capture.origin {
            capture.unjoined.insert(stream);
        }
    }

    /// Begins to capture a stream. The modes differ in what they forbid other calls; VMM calls none of them does (measured on CUDA).
    ///
    /// # Errors
    /// [`Why::CaptureUnsupported`] for the legacy stream, [`Why::IllegalState`] for one that is captured, [`Why::Invalid`] for a mode that is none.
    pub fn begin(&mut self, target: Target, mode: c_int) -> Answer {
        if !(0..=RELAXED).contains(&mode) {
            return Err(Why::Invalid);
        }
        let Target::Created(stream) = target else { return Err(Why::CaptureUnsupported) };
        if self.capture_of(stream).is_some() {
            return Err(Why::IllegalState);
        }
        let Stream { device, blocking } = *self.streams.get(&stream).ok_or(Why::InvalidHandle)?;
        let id = self.next_handle();
        let capture = Capture {
            device,
            origin: stream,
            thread: std::thread::current().id(),
            mode,
            valid: true,
            nodes: Nodes::default(),
            members: BTreeMap::from([(stream, Vec::new())]),
            unjoined: BTreeSet::new(),
            blocking,
        };
        self.captures.insert(id, capture);
        Ok(())
    }

    /// Ends a capture; the handle of its graph.
    ///
    /// # Errors
    /// Why there is none.
    pub fn end(&mut self, target: Target) -> Answer<u64> {
        let Target::Created(id) = target else { return Err(Why::IllegalState) };
        let (number, capture) = self.capture_of(id).ok_or(Why::IllegalState)?;
        if capture.origin != id {
            return Err(Why::CaptureUnmatched);
        }
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(Why::CaptureWrongThread);
        }
        let capture = self.captures.remove(&number).ok_or(Why::IllegalState)?;
        if !capture.valid {
            return Err(Why::CaptureInvalidated);
        }
        if capture.is_unjoined() {
            return Err(Why::CaptureUnjoined);
        }
        // The capture's own number, by which its nodes were known before it was over.
        self.graphs.insert(number, Arc::new(capture.nodes));
        Ok(number)
    }

    /// The graph that a stream is captured into, and the nodes that its next work is behind; `None`: it is not captured.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn capture_info(&mut self, target: Target) -> Answer<Option<(u64, Vec<usize>)>> {
        let (Some(number), Target::Created(stream)) = (self.enter(target)?, target) else { return Ok(None) };
        let capture = self.captures.get(&number).ok_or(Why::InvalidHandle)?;
        Ok(Some((number, capture.members.get(&stream).cloned().unwrap_or_default())))
    }

    /// Says in which order a captured stream's next work is behind the nodes that it is behind.
    ///
    /// # Errors
    /// [`Why::Invalid`] for other nodes than those, and for a stream that is not captured; as [`enter`](Self::enter).
    pub fn set_behind(&mut self, target: Target, nodes: Vec<usize>) -> Answer<()> {
        let (Some(number), Target::Created(stream)) = (self.enter(target)?, target) else {
            return Err(Why::Invalid);
        };
        let capture = self.captures.get_mut(&number).ok_or(Why::InvalidHandle)?;
        let tips = capture.members.entry(stream).or_default();
        let same: BTreeSet<usize> = nodes.iter().copied().collect();
        if nodes.len() != tips.len() || same != tips.iter().copied().collect() {
            return Err(Why::Invalid);
        }
        *tips = nodes;
        Ok(())
    }

    /// Whether a stream is captured: 0 no, 1 yes, 2 yes but the capture is lost: the numbers of every vendor.
    ///
    /// # Errors
    /// [`Why::CaptureImplicit`] for a legacy stream that must not be used now; [`Why::InvalidHandle`].
    pub fn status(&self, target: Target) -> Answer<c_int> {
        match target {
            Target::Legacy { device } if self.legacy_blocked(device) => Err(Why::CaptureImplicit),
            Target::Legacy { .. } => Ok(0),
            Target::Created(id) if !self.has_stream(id) => Err(Why::InvalidHandle),
            Target::Created(id) => Ok(self.capture_of(id).map_or(0, |(_, c)| if c.valid { 1 } else { 2 })),
        }
    }

    /// Whether there is such a stream.
    #[must_use]
    pub fn has_stream(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Records an event: on a stream under capture it marks a place in the graph, otherwise work that is done already.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn record(&mut self, event: u64, target: Target) -> Answer {
        let device = self.stream_device(target)?;
        if self.events.get(&event).is_none_or(|e| e.device != device) {
            return Err(Why::InvalidHandle);
        }
        let recorded = match (self.enter(target)?, target) {
            (Some(capture), Target::Created(by)) => {
                let members = self.captures.get(&capture).map(|capture| &capture.members);
                let behind = members.and_then(|members| members.get(&by)).cloned().unwrap_or_default();
                Recorded::Captured { capture, by, behind }
            }
            _ => Recorded::Happened,
        };
        if let Some(event) = self.events.get_mut(&event) {
            event.recorded = recorded;
        }
        Ok(())
    }

    /// Makes a stream wait for an event: a stream that waits for an event of an open capture joins it; nothing else crosses the boundary.
    ///
    /// # Errors
    /// What would cross it.
    pub fn wait(&mut self, target: Target, event: u64, external: bool) -> Answer {
        let recorded = self.events.get(&event).ok_or(Why::InvalidHandle)?.recorded.clone();
        let waiting = self.enter(target)?;
        match (waiting, recorded) {
            (None, Recorded::Happened) => Ok(()),
            (Some(_), Recorded::Happened) if external => Ok(()),
            (Some(capture), Recorded::Happened) => {
                self.invalidate(capture);
                Err(Why::CaptureIsolation)
            }
            (Some(mine), Recorded::Captured { capture, by, behind }) if mine == capture => {
                if let (Some(capture), Target::Created(stream)) = (self.captures.get_mut(&mine), target) {
                    capture.unjoined.remove(&by);
                    capture.wait(stream, &behind);
                }
                Ok(())
            }
            (Some(mine), Recorded::Captured { capture, .. }) => {
                self.invalidate(mine);
                self.invalidate(capture);
                Err(if self.captures.contains_key(&capture) {
                    Why::CaptureMerge
                } else {
                    Why::CaptureIsolation
                })
            }
            (None, Recorded::Captured { capture, behind, .. }) => {
                let Target::Created(stream) = target else { return Err(Why::CaptureImplicit) };
                let capture = self.captures.get_mut(&capture).ok_or(Why::CaptureIsolation)?;
                if !capture.valid {
                    return Err(Why::CaptureInvalidated);
                }
                capture.wait(stream, &behind);
                capture.unjoined.insert(stream);
                Ok(())
            }
        }
    }

    /// Whether an event has happened, which it has unless it is in a graph: that is nothing that happens, and asking spoils the capture.
    ///
    /// # Errors
    /// [`Why::CapturedEvent`], [`Why::InvalidHandle`].
    pub fn happened(&mut self, event: u64) -> Answer {
        match self.events.get(&event).ok_or(Why::InvalidHandle)?.recorded.clone() {
            Recorded::Happened => Ok(()),
            Recorded::Captured { capture, .. } => {
                self.invalidate(capture);
                Err(Why::CapturedEvent)
            }
        }
    }

    /// Refuses what may wait, or make what launches a graph, on a thread that captures under way forbid it, and spoils these: its own, and in the mode
    /// GLOBAL, which every thread has that sets none, also others' that began in it. A thread in the mode RELAXED may. So CUDA says of
    /// `cuThreadExchangeStreamCaptureMode`; of others' in the mode GLOBAL it was seen (H200, driver 580, 2026-11-28: `cudaEventQuery`,
    /// `cudaEventSynchronize`, `cudaStreamSynchronize`, `cudaGraphInstantiate`; relaxed, none of these).
    ///
    /// # Errors
    /// [`Why::CaptureUnsupported`].
    pub fn permit(&mut self) -> Answer {
        let (mode, me) = (state::capture_mode(), std::thread::current().id());
        let forbids = |capture: &Capture| {
            capture.mode != RELAXED && (capture.thread == me || (mode == GLOBAL && capture.mode == GLOBAL))
        };
        if mode == RELAXED || !self.captures.values().any(forbids) {
            return Ok(());
        }
        self.captures
            .values_mut()
            .filter(|capture| forbids(capture))
            .for_each(|capture| capture.valid = false);
        Err(Why::CaptureUnsupported)
    }

    /// Waits for a stream: refused on one under capture, which is then lost.
    ///
    /// # Errors
    /// As [`enter`](Self::enter), and [`Why::CaptureUnsupported`].
    pub fn synchronise(&mut self, target: Target) -> Answer {
        match self.enter(target)? {
            None => Ok(()),
            Some(capture) => {
                self.invalidate(capture);
                Err(Why::CaptureUnsupported)
            }
        }
    }
}
