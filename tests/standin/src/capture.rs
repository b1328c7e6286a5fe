//! Streams, events, graphs and open captures.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::{Mutex, MutexGuard};

use crate::state::{self, GLOBAL, RELAXED};
use crate::{Answer, Why, refused};

/// A node of a graph. Addresses are resolved when the node runs.
#[derive(Clone, Copy, Debug)]
pub enum Node {
    /// Repeats a 32-bit value.
    Fill {
        /// First address.
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
    /// Copies from host memory, which is read when the node runs. Created by
    /// [`graph::load`](crate::graph::load) only.
    #[non_exhaustive]
    Load {
        /// The destination.
        to: u64,
        /// The source, a host address.
        from: usize,
        /// Bytes.
        len: u64,
    },
}

/// The nodes of a graph, in capture order.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    /// The nodes.
    pub all: Vec<Node>,
    /// Predecessors of each node, which are earlier nodes.
    pub after: Vec<Vec<usize>>,
    /// Disabled nodes of an executable.
    pub off: BTreeSet<usize>,
}

/// An executable graph.
#[derive(Clone, Debug)]
pub struct Executable {
    /// The nodes to run.
    pub nodes: Arc<Nodes>,
    /// Handle of the source graph, which names the nodes.
    pub of: u64,
}

impl Nodes {
    /// Returns a single node.
    #[must_use]
    pub fn one(node: Node) -> Self {
        Self { all: vec![node], after: vec![Vec::new()], off: BTreeSet::new() }
    }

    /// Appends nodes after the nodes `behind`. Returns the appended nodes without successors.
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

    /// Returns the edges as (predecessor, node).
    #[must_use]
    pub fn edges(&self) -> Vec<(usize, usize)> {
        let behind = self.after.iter().enumerate();
        behind.flat_map(|(to, after)| after.iter().map(move |from| (*from, to))).collect()
    }

    /// Returns true if all addresses of the enabled nodes are mapped.
    #[must_use]
    pub fn mapped(&self) -> bool {
        let on = self.all.iter().enumerate().filter(|(place, _)| !self.off.contains(place));
        on.map(|(_, node)| node).all(|node| node.mapped())
    }

    fn all_before(&self, tips: &[usize]) -> bool {
        let mut seen: BTreeSet<usize> = tips.iter().copied().collect();
        let mut open: Vec<usize> = tips.to_vec();
        while let Some(node) = open.pop() {
            open.extend(self.after[node].iter().filter(|before| seen.insert(**before)));
        }
        seen.len() == self.all.len()
    }

    /// Runs all nodes: in capture order, or in a random order that respects the edges.
    ///
    /// # Errors
    /// [`Why::Invalid`] for an unmapped address.
    pub fn run(&self, mut random: Option<impl FnMut() -> u64>) -> Answer {
        let mut open: Vec<usize> = self.after.iter().map(Vec::len).collect();
        let mut behind = vec![Vec::new(); self.all.len()];
        self.edges().into_iter().for_each(|(from, to)| behind[from].push(to));
        let mut ready: BTreeSet<usize> = (0..self.all.len()).filter(|node| open[*node] == 0).collect();
        while !ready.is_empty() {
            // Without random numbers, capture order, which respects the edges.
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
    /// Returns true if all addresses of the node are mapped.
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

    /// Runs the node on the current mappings.
    ///
    /// # Errors
    /// [`Why::Invalid`] for an unmapped address.
    pub fn run(self) -> Answer {
        match self {
            Self::Fill { len: 0, .. } | Self::Copy { len: 0, .. } | Self::Load { len: 0, .. } => Ok(()),
            Self::Fill { at, len, value } => {
                state::device_at(at)?.1.memory.fill(at, len, value).map_err(refused)
            }
            Self::Copy { to, from, len } => state::copy(to, from, len).map_err(refused),
            Self::Load { to, from, len } => {
                // SAFETY: by the contract of the captured copy, the host memory lives as long as
                // the graph may run.
                let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, len as usize) };
                state::device_at(to)?.1.memory.write(to, bytes).map_err(refused)
            }
        }
    }
}

/// A stream as named by the caller.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    /// The legacy stream of the current context.
    Legacy {
        /// The context's device.
        device: usize,
    },
    /// A created stream, or a thread's default stream, which is created at first use.
    Created(u64),
}

struct Stream {
    device: usize,
    blocking: bool,
}

#[derive(Clone)]
enum Recorded {
    /// Never recorded, or after finished work.
    Happened,
    /// Recorded in a capture by the stream `by`, after the nodes `behind`.
    Captured { capture: u64, by: u64, behind: Vec<usize> },
}

struct Event {
    device: usize,
    recorded: Recorded,
}

/// An open capture.
pub struct Capture {
    device: usize,
    origin: u64,
    thread: ThreadId,
    mode: c_int,
    /// False once the capture is invalidated.
    pub valid: bool,
    nodes: Nodes,
    /// Streams of the capture and the predecessors of their next work.
    members: BTreeMap<u64, Vec<usize>>,
    /// Members with work that no other stream of the capture waits for.
    unjoined: BTreeSet<u64>,
    blocking: bool,
}

impl Capture {
    /// Returns true if the origin does not follow all work of the capture.
    fn is_unjoined(&self) -> bool {
        let tips = self.members.get(&self.origin).map_or(&[][..], Vec::as_slice);
        !self.unjoined.is_empty() || !self.nodes.all_before(tips)
    }

    fn wait(&mut self, stream: u64, behind: &[usize]) {
        let tips = self.members.entry(stream).or_default();
        for node in behind {
            if !tips.contains(node) {
                tips.push(*node);
            }
        }
    }
}

/// All objects by handle. Handles are never reused, so stale ones are detected.
pub struct Table {
    last: u64,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    captures: BTreeMap<u64, Capture>,
    /// Graphs.
    pub graphs: BTreeMap<u64, Arc<Nodes>>,
    /// Executable graphs.
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

/// Locks the table.
pub fn table() -> MutexGuard<'static, Table> {
    TABLE.lock()
}

/// Default streams of a thread, by device; destroyed with the thread.
#[derive(Default)]
struct Own(BTreeMap<usize, u64>);

impl Drop for Own {
    fn drop(&mut self) {
        let mut table = table();
        for id in self.0.values() {
            table.captures.retain(|_, capture| capture.origin != *id);
            table.streams.remove(id);
        }
    }
}

thread_local! {
    static OWN: RefCell<Own> = RefCell::default();
}

/// Resolves a stream handle of CUDA's form: null and 1 are the legacy stream, 2 is the thread's
/// stream. `current` returns their device.
///
/// # Errors
/// [`Why::NotInitialised`], or the error of `current`.
pub fn target(stream: *mut c_void, current: impl FnOnce() -> Answer<usize>) -> Answer<Target> {
    state::devices()?;
    match stream as u64 {
        0 | 1 => Ok(Target::Legacy { device: current()? }),
        2 => own(current()?).map(Target::Created),
        created => Ok(Target::Created(created)),
    }
}

/// Returns the calling thread's default stream on a device, a blocking stream. A context created
/// again has new ones.
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
    // A thread that is ending has no default stream.
    found.map_err(|_| Why::InvalidHandle)
}

impl Table {
    /// Returns a new handle, which looks like an aligned pointer.
    pub fn next_handle(&mut self) -> u64 {
        self.last += 1;
        0xE000_0000 + self.last * 16
    }

    /// Returns the number of live events.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events.len() as u64
    }

    /// Returns the number of live streams, default streams of threads included.
    #[must_use]
    pub fn streams(&self) -> u64 {
        self.streams.len() as u64
    }

    /// Drops all objects of a destroyed context.
    pub fn forget(&mut self, device: usize) {
        self.captures.retain(|_, c| c.device != device);
        self.streams.retain(|_, s| s.device != device);
        self.events.retain(|_, e| e.device != device);
    }

    /// Creates a stream. A blocking stream and the legacy stream wait for each other.
    pub fn add_stream(&mut self, device: usize, blocking: bool) -> u64 {
        let id = self.next_handle();
        self.streams.insert(id, Stream { device, blocking });
        id
    }

    /// Destroys a stream.
    ///
    /// # Errors
    /// [`Why::CaptureUnsupported`] for a captured stream, [`Why::InvalidHandle`] for a stale
    /// handle.
    pub fn remove_stream(&mut self, id: u64) -> Answer {
        if self.capture_of(id).is_some() {
            return Err(Why::CaptureUnsupported);
        }
        self.streams.remove(&id).map(drop).ok_or(Why::InvalidHandle)
    }

    /// Creates an event without a record.
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

    /// Returns the capture of a stream.
    #[must_use]
    pub fn capture_of(&self, stream: u64) -> Option<(u64, &Capture)> {
        self.captures.iter().find(|(_, c)| c.members.contains_key(&stream)).map(|(id, c)| (*id, c))
    }

    fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.valid = false;
        }
    }

    /// Invalidates every capture of a device; returns true if one existed.
    pub fn invalidate_device(&mut self, device: usize) -> bool {
        let mut any = false;
        for capture in self.captures.values_mut().filter(|c| c.device == device) {
            capture.valid = false;
            any = true;
        }
        any
    }

    /// Invalidates every capture of the process; returns true if one existed.
    pub fn invalidate_all(&mut self) -> bool {
        self.captures.values_mut().for_each(|capture| capture.valid = false);
        !self.captures.is_empty()
    }

    /// Returns the number of open captures.
    #[must_use]
    pub fn captures(&self) -> u64 {
        self.captures.len() as u64
    }

    /// Returns true if the legacy stream would have to wait for a captured stream.
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

    /// Checks any work for a stream and returns the open capture of the stream.
    ///
    /// # Errors
    /// [`Why::CaptureImplicit`], which invalidates the captures involved;
    /// [`Why::CaptureInvalidated`]; [`Why::InvalidHandle`].
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

    /// Begins a capture. Modes differ in the calls they forbid; none forbids VMM calls (measured on
    /// CUDA).
    ///
    /// # Errors
    /// [`Why::CaptureUnsupported`] for the legacy stream, [`Why::IllegalState`] for a captured
    /// stream, [`Why::Invalid`] for an unknown mode.
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

    /// Ends a capture and returns the handle of its graph.
    ///
    /// # Errors
    /// The reason why no graph exists.
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
        self.graphs.insert(number, Arc::new(capture.nodes));
        Ok(number)
    }

    /// Returns the graph of a stream's capture and the predecessors of its next work; `None`
    /// outside a capture.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn capture_info(&mut self, target: Target) -> Answer<Option<(u64, Vec<usize>)>> {
        let (Some(number), Target::Created(stream)) = (self.enter(target)?, target) else { return Ok(None) };
        let capture = self.captures.get(&number).ok_or(Why::InvalidHandle)?;
        Ok(Some((number, capture.members.get(&stream).cloned().unwrap_or_default())))
    }

    /// Sets the order of the predecessors of a captured stream's next work.
    ///
    /// # Errors
    /// [`Why::Invalid`] for a different set of nodes and for a stream without capture; as
    /// [`enter`](Self::enter).
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

    /// Returns the capture status of a stream: 0 none, 1 active, 2 invalidated: the numbers of
    /// every vendor.
    ///
    /// # Errors
    /// [`Why::CaptureImplicit`] for a blocked legacy stream; [`Why::InvalidHandle`].
    pub fn status(&self, target: Target) -> Answer<c_int> {
        match target {
            Target::Legacy { device } if self.legacy_blocked(device) => Err(Why::CaptureImplicit),
            Target::Legacy { .. } => Ok(0),
            Target::Created(id) if !self.has_stream(id) => Err(Why::InvalidHandle),
            Target::Created(id) => Ok(self.capture_of(id).map_or(0, |(_, c)| if c.valid { 1 } else { 2 })),
        }
    }

    /// Returns true if the stream exists.
    #[must_use]
    pub fn has_stream(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Records an event. On a captured stream, the event marks a place in the graph; otherwise,
    /// finished work.
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

    /// Makes a stream wait for an event. A stream that waits for an event of an open capture joins
    /// the capture; no other wait crosses its boundary.
    ///
    /// # Errors
    /// The boundary that the wait would cross.
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

    /// Succeeds if an event has happened: always, except for an event of a graph, whose query
    /// invalidates the capture.
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

    /// Refuses waits and instantiations forbidden by an open capture, and invalidates this capture.
    /// A thread is bound by its own captures; in the mode GLOBAL, its default, also by GLOBAL
    /// captures of all threads; in the mode RELAXED by none. CUDA documents this at
    /// `cuThreadExchangeStreamCaptureMode`; other threads' GLOBAL captures: seen on H200, driver
    /// 580, 2026-11-28, with `cudaEventQuery`, `cudaEventSynchronize`, `cudaStreamSynchronize`,
    /// `cudaGraphInstantiate`; relaxed, none of these.
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

    /// Waits for a stream. A captured stream refuses and its capture is invalidated.
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
