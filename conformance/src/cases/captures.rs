//! Driver calls during a capture, and graphs. The [`Plug`] makes the captures.

use vmmgraph::driver::{CopyNode, Executable, Graph, GraphCopy, Graphs, StreamState};
use vmmgraph::{Address, Stream};

use super::transfer::Registered;
use crate::ground::{Ground, ensure};
use crate::{Launch, Plug, Stop, Subject, Verdict};

fn plug<'p>(subject: &Subject<'p>) -> Result<&'p dyn Plug, Stop> {
    subject.plug.ok_or_else(|| Stop::NotOffered("nobody can make a capture here".to_owned()))
}

/// Captures `body` on a separate stream and returns the graph. Ends the capture in any case.
fn captured(
    subject: &Subject,
    ground: &Ground,
    stream: Stream,
    body: impl FnOnce() -> Verdict,
) -> Result<Graph, Stop> {
    let plug = plug(subject)?;
    ground.driver.capture_begins();
    let begun = plug.begin(stream).map_err(|why| Stop::Failed(format!("the capture does not begin: {why}")));
    let verdict = begun.map(|()| {
        let verdict = body();
        (verdict, plug.end(stream))
    });
    ground.driver.capture_ends();
    let (verdict, ended) = verdict?;
    if let (Err(stop), Ok(graph)) = (&verdict, &ended) {
        plug.destroy(*graph);
        return Err(stop.clone());
    }
    verdict?;
    let graph = ended.map_err(|why| Stop::Failed(format!("the capture is broken: {why}")))?;
    ground.settle(stream)?;
    Ok(graph)
}

/// Skips the case if the driver forbids waiting for the device now.
fn waits(ground: &Ground) -> Verdict {
    let not_offered =
        |_| Stop::NotOffered("the device is not waited for while something is captured".to_owned());
    ground.driver.may_wait().map_err(not_offered)
}

/// Captures one fill and runs `body` during the capture; discards the graph.
fn beside(subject: &Subject, ground: &Ground, body: impl FnOnce() -> Verdict) -> Verdict {
    let plug = plug(subject)?;
    let (at, _) = ground.single_pages(1)?;
    let stream = ground.stream()?;
    let graph = captured(subject, ground, stream, || {
        ground.fill(at, ground.granule, 1, stream)?;
        body()
    })?;
    plug.destroy(graph);
    Ok(())
}

pub(super) fn seen(subject: &Subject, ground: &Ground) -> Verdict {
    let plug = plug(subject)?;
    let (stream, other) = (ground.stream()?, ground.stream()?);
    // SAFETY: streams of this case.
    let state = |stream| unsafe { ground.driver.stream_state(stream) };
    let ready = |stream, when: &str| {
        let state = state(stream)?;
        ensure(state == StreamState::Ready, || format!("a stream {when} is {state:?}"))
    };
    ready(stream, "before its capture")?;
    let graph = captured(subject, ground, stream, || {
        let now = state(stream)?;
        ensure(now == StreamState::Capturing, || format!("a stream that is captured is {now:?}"))?;
        ready(other, "beside a capture")
    })?;
    plug.destroy(graph);
    ready(stream, "after its capture")
}

pub(super) fn memory(subject: &Subject, ground: &Ground) -> Verdict {
    if !ground.driver.capabilities().map_while_capturing {
        return Err(Stop::NotOffered("pages are not mapped while a stream is captured".to_owned()));
    }
    beside(subject, ground, || {
        ground.driver.free_bytes()?;
        let (at, pages) = ground.single_pages(3)?;
        ground.unmap(at.plus(ground.granule), 1)?;
        ground.map(at.plus(ground.granule), &[pages[1]])?;
        ground.unmap(at, 3)?;
        for page in pages {
            ground.release(page)?;
        }
        Ok(ground.free(at)?)
    })
}

pub(super) fn events(subject: &Subject, ground: &Ground) -> Verdict {
    let (first, second) = (ground.stream()?, ground.stream()?);
    let (at, _) = ground.single_pages(1)?;
    beside(subject, ground, || {
        waits(ground)?;
        let event = ground.event()?;
        ground.fill(at, ground.granule, 3, first)?;
        ground.record(event, first)?;
        ground.wait(event, second)?;
        ground.happened(event)?;
        ground.synchronise(event)?;
        ground.settle(second)?;
        ensure(ground.happened(event)?, || "an event that was waited for has not happened".to_owned())?;
        ground.destroy_event(event)?;
        let own = ground.stream()?;
        Ok(ground.destroy_stream(own)?)
    })
}

pub(super) fn copies(subject: &Subject, ground: &Ground) -> Verdict {
    let (at, _) = ground.single_pages(1)?;
    let stream = ground.stream()?;
    beside(subject, ground, || {
        waits(ground)?;
        let bytes = ground.noise(ground.granule);
        ground.write(at, &bytes)?;
        ground.expect(at, &bytes, "bytes written and read beside a capture")?;
        let mut found = vec![0; bytes.len()];
        ground.copy_from_host(at, &bytes, stream)?;
        ground.copy_to_host(at, &mut found, stream)?;
        Ok(ground.settle(stream)?)
    })
}

struct Ready<'c> {
    plug: &'c dyn Plug,
    graphs: Option<&'c dyn Graphs>,
    graph: Graph,
    executable: Option<Executable>,
}

impl<'c> Ready<'c> {
    fn new(ground: &'c Ground, plug: &'c dyn Plug, graph: Graph) -> Result<Self, Stop> {
        let mut ready = Self { plug, graphs: ground.driver.graphs(), graph, executable: None };
        if let Some(graphs) = ready.graphs {
            // SAFETY: a graph of this case.
            ready.executable = Some(unsafe { graphs.instantiate(graph) }?);
        }
        Ok(ready)
    }

    fn launch(&self, ground: &Ground, stream: Stream) -> Verdict {
        let what = self.executable.map_or(Launch::Graph(self.graph), Launch::Executable);
        self.plug
            .launch(what, stream)
            .map_err(|why| Stop::Failed(format!("the graph is not launched: {why}")))?;
        Ok(ground.settle(stream)?)
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        if let (Some(graphs), Some(executable)) = (self.graphs, self.executable) {
            // SAFETY: made in `new`, and every launch was waited for.
            let _ = unsafe { graphs.executable_destroy(executable) };
        }
        self.plug.destroy(self.graph);
    }
}

fn fill_graph(
    subject: &Subject,
    ground: &Ground,
    at: Address,
    byte: u8,
    stream: Stream,
) -> Result<Graph, Stop> {
    captured(subject, ground, stream, || Ok(ground.fill(at, ground.granule, byte, stream)?))
}

pub(super) fn replay_after_replace(subject: &Subject, ground: &Ground) -> Verdict {
    if !ground.driver.capabilities().replace_under_graph {
        return Err(Stop::NotOffered("no page is replaced under a graph".to_owned()));
    }
    let plug = plug(subject)?;
    let (at, pages) = ground.single_pages(1)?;
    let stream = ground.stream()?;
    let graph = fill_graph(subject, ground, at, 0x11, stream)?;
    let ready = Ready::new(ground, plug, graph)?;
    let filled = vec![0x11; ground.granule as usize];
    ready.launch(ground, stream)?;
    ground.expect(at, &filled, "memory that a graph filled")?;
    let old = ground.noise(ground.granule);
    ground.write(at, &old)?;
    let page = ground.create(1)?;
    ground.unmap(at, 1)?;
    ground.map(at, &[page])?;
    ready.launch(ground, stream)?;
    ground.expect(at, &filled, "the page that came under a graph, after its replay")?;
    let elsewhere = ground.reserve(1)?;
    ground.map(elsewhere, &pages)?;
    ground.expect(elsewhere, &old, "the page that was under a graph before, after its replay")?;
    ground.unmap(at, 1)?;
    ground.unmap(elsewhere, 1)?;
    ground.map(at, &pages)?;
    ready.launch(ground, stream)?;
    ground.expect(at, &filled, "the page that came back under a graph, after its replay")
}

pub(super) fn executables(subject: &Subject, ground: &Ground) -> Verdict {
    let Some(graphs) = ground.driver.graphs() else {
        return Err(Stop::NotOffered("the driver has no graphs".to_owned()));
    };
    let plug = plug(subject)?;
    let (at, _) = ground.single_pages(2)?;
    let stream = ground.stream()?;
    let there = at.plus(ground.granule);
    let first = Ready::new(ground, plug, fill_graph(subject, ground, at, 0x11, stream)?)?;
    let second = Ready::new(ground, plug, fill_graph(subject, ground, there, 0x22, stream)?)?;
    for graph in [first.graph, second.graph] {
        // SAFETY: graphs of this case, used by this thread only.
        let nodes = unsafe { graphs.graph_nodes(graph) }?;
        ensure(nodes.count == 1 && !nodes.may_allocate, || format!("a graph of one fill is {nodes:?}"))?;
    }
    let filled = |value: u8| vec![value; ground.granule as usize];
    ground.write(at, &[filled(0), filled(0)].concat())?;
    first.launch(ground, stream)?;
    ground.expect(
        at,
        &[filled(0x11), filled(0)].concat(),
        "memory after the launch of one of two executables",
    )?;
    second.launch(ground, stream)?;
    ground.expect(
        at,
        &[filled(0x11), filled(0x22)].concat(),
        "memory after the launches of two executables",
    )?;
    ground.write(at, &[filled(0), filled(0)].concat())?;
    // SAFETY: as above; the executable is destroyed once.
    let again = unsafe { graphs.instantiate(first.graph) }?;
    // SAFETY: as above.
    unsafe { graphs.executable_destroy(again) }?;
    first.launch(ground, stream)?;
    ground.expect(
        at,
        &[filled(0x11), filled(0)].concat(),
        "memory after another executable of the graph was destroyed",
    )
}

/// Captures a copy on a forked and joined stream; returns the graph and the copy node.
fn copy_graph(
    subject: &Subject,
    ground: &Ground,
    graphs: &dyn Graphs,
    copy: GraphCopy,
) -> Result<(Graph, CopyNode), Stop> {
    let (stream, branch) = (ground.stream()?, ground.stream()?);
    let (fork, join) = (ground.event()?, ground.event()?);
    let mut node = None;
    let graph = captured(subject, ground, stream, || {
        ground.record(fork, stream)?;
        ground.wait(fork, branch)?;
        // SAFETY: a capture of this case; the memory is registered and mapped until the graph is
        // destroyed.
        node = Some(unsafe { graphs.capture_copy(copy, branch) }?);
        ground.record(join, branch)?;
        Ok(ground.wait(join, stream)?)
    })?;
    let node = node.ok_or_else(|| Stop::Failed("a captured copy has no node".to_owned()))?;
    Ok((graph, node))
}

pub(super) fn graph_copies(subject: &Subject, ground: &Ground) -> Verdict {
    let Some(graphs) = ground.driver.graphs() else {
        return Err(Stop::NotOffered("the driver has no graphs".to_owned()));
    };
    let plug = plug(subject)?;
    let len = ground.granule as usize;
    let refused = || Stop::NotOffered("the operating system registers no memory here".to_owned());
    let mut host = Registered::new(ground, 2 * len).ok_or_else(refused)?;
    let (at, _) = ground.single_pages(2)?;
    let (zeros, old) = (vec![0; 2 * len], ground.noise(2 * len as u64));
    ground.write(at, &zeros)?;
    host.bytes().copy_from_slice(&old);
    let first = GraphCopy { to: at, from: host.bytes().as_ptr(), bytes: len };
    let (graph, node) = copy_graph(subject, ground, graphs, first)?;
    ground.expect(at, &zeros, "what a copy that was only captured goes to")?;
    let stream = ground.stream()?;
    let ready = Ready::new(ground, plug, graph)?;
    let Some(executable) = ready.executable else { return Ok(()) };
    let new = ground.noise(2 * len as u64);
    host.bytes().copy_from_slice(&new);
    ready.launch(ground, stream)?;
    ground.expect(at, &[&new[..len], &zeros[len..]].concat(), "what a graph copied")?;

    ground.write(at, &zeros)?;
    let from = host.bytes()[len..].as_ptr();
    let second = GraphCopy { to: at.plus(ground.granule), from, bytes: len / 2 };
    // SAFETY: an executable and a node of this case, and no launch is running.
    unsafe { graphs.executable_set_copy(executable, node, second) }?;
    ready.launch(ground, stream)?;
    let moved = [&zeros[..len], &new[len..len + len / 2], &zeros[..len / 2]].concat();
    ground.expect(at, &moved, "what a graph copied that was told another copy")?;

    ground.write(at, &zeros)?;
    // SAFETY: as above.
    unsafe { graphs.executable_enable_copy(executable, node, false) }?;
    ready.launch(ground, stream)?;
    ground.expect(at, &zeros, "what a copy that is left out goes to")?;
    // SAFETY: as above.
    unsafe { graphs.executable_enable_copy(executable, node, true) }?;
    ready.launch(ground, stream)?;
    ground.expect(at, &moved, "what a graph copied whose copy was left out before")?;
    drop(ready);
    let after = host.end()?;
    ensure(after == new, || "host memory that was only read has changed".to_owned())
}
