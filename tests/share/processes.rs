//! Two processes share memory: both directions, and the end of either process. Aliases of the host
//! driver are real across processes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::pages::{Extent, Fence, PageId};
use vmmgraph::{
    Address, Device, DeviceOptions, DriverChoice, Error, Handles, HostOptions, Options, PagePin, PeerExtent,
    PeerMap, PeerPage, SharedVmmAllocator, Space, Stream, receive_descriptors, send_descriptors,
};
use vmmgraph_testkit::{FaultyDriver, MIB, Stamps, child};

const A: Stream = Stream::LEGACY;
const PAGE: u64 = 16 * MIB;
const CHILD: &str = "VMMGRAPH_TEST_CHILD";

fn shared(ordinal: i32) -> Arc<Device> {
    let options = DeviceOptions { sharing: Handles::Fd, ..DeviceOptions::default() };
    Device::open(DriverChoice::HOST, ordinal, options).unwrap()
}

/// Sends a range: number of extents, then for each its page index, offset, bytes and page bytes.
fn send(socket: &UnixStream, extents: &[Extent], fds: &HashMap<PageId, OwnedFd>) {
    let mut pages: Vec<PageId> = Vec::new();
    let mut words: Vec<u64> = vec![extents.len() as u64];
    for extent in extents {
        let place = pages.iter().position(|page| *page == extent.page).unwrap_or_else(|| {
            pages.push(extent.page);
            pages.len() - 1
        });
        words.extend([place as u64, extent.offset, extent.bytes, extent.page_bytes]);
    }
    let fds: Vec<BorrowedFd> = pages.iter().map(|page| fds[page].as_fd()).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    assert_eq!(send_descriptors(socket.as_fd(), &fds, &bytes).unwrap(), bytes.len());
}

/// Imports each page once and maps the range contiguously.
fn receive(device: &Arc<Device>, socket: &UnixStream) -> (Vec<PeerPage>, PeerMap) {
    let mut bytes = [0; 4096];
    let (count, fds) = receive_descriptors(socket.as_fd(), &mut bytes).unwrap();
    let words: Vec<u64> =
        bytes[..count].chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    let parts: Vec<&[u64]> = words[1..].chunks_exact(4).collect();
    assert_eq!(parts.len() as u64, words[0]);
    let bytes_of = |place: usize| parts.iter().find(|part| part[0] == place as u64).unwrap()[3];
    let pages: Vec<PeerPage> = fds
        .iter()
        .enumerate()
        .map(|(place, fd)| device.import(fd.as_fd(), bytes_of(place)).unwrap())
        .collect();
    let extents: Vec<PeerExtent> = parts
        .iter()
        .map(|part| PeerExtent { page: &pages[part[0] as usize], offset: part[1], bytes: part[2] })
        .collect();
    let map = device.map_peer(&extents).unwrap();
    (pages, map)
}

/// Runs one test of this file in a child process with a socket as its input.
fn other_process(test: &str) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut command = child!(test);
    command.env(CHILD, "1").stdin(OwnedFd::from(theirs));
    (command.stdout(Stdio::null()).spawn().unwrap(), ours)
}

fn parent() -> Option<UnixStream> {
    std::env::var_os(CHILD)?;
    Some(UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap()))
}

fn tell(mut socket: &UnixStream, word: u32) {
    socket.write_all(&word.to_ne_bytes()).unwrap();
}

fn hear(mut socket: &UnixStream) -> Option<u32> {
    let mut word = [0; 4];
    socket.read_exact(&mut word).ok().map(|()| u32::from_ne_bytes(word))
}

/// Child of every test: returns the range's first word, or fills the range with a given word.
fn serve(socket: &UnixStream) {
    let device = shared(1);
    let (pages, map) = receive(&device, socket);
    let stamps = Stamps::new(device.driver(), A);
    let first = || {
        // SAFETY: mapped memory of this process.
        unsafe { (map.address().0 as *const u32).read_volatile() }
    };
    while let Some(word) = hear(socket) {
        match word {
            0 => {
                let stamp = first();
                tell(
                    socket,
                    if stamps.holds(map.address(), map.bytes(), stamp).unwrap() { stamp } else { 1 },
                );
            }
            1 => std::process::abort(),
            stamp => {
                stamps.write(map.address(), map.bytes(), stamp).unwrap();
                tell(socket, stamp);
            }
        }
    }
    drop((map, pages));
    assert_eq!((device.stats().physical_bytes, device.stats().pending), (0, 0));
}

fn seen(socket: &UnixStream) -> u32 {
    tell(socket, 0);
    hear(socket).unwrap()
}

fn export(device: &Arc<Device>, extents: &[Extent]) -> (HashMap<PageId, OwnedFd>, Vec<PagePin>) {
    let (mut fds, mut pins) = (HashMap::new(), Vec::new());
    for extent in extents {
        if let Entry::Vacant(place) = fds.entry(extent.page) {
            let exported = device.export_page(extent.page).unwrap();
            place.insert(exported.fd);
            pins.push(exported.pin);
        }
    }
    (fds, pins)
}

fn graph(arena: &SharedVmmAllocator, bytes: u64) -> (Arc<Space>, Address) {
    let space = arena.open_space().unwrap();
    let block = space.allocate(bytes, A).unwrap();
    space.free(block).unwrap();
    space.seal().unwrap();
    (space, block)
}

#[test]
fn another_process_reads_what_a_graph_writes_and_writes_back() {
    if let Some(socket) = parent() {
        return serve(&socket);
    }
    let (mut child, socket) = other_process("another_process_reads_what_a_graph_writes_and_writes_back");
    let device = shared(0);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let stamps = Stamps::new(device.driver(), A);
    // Two graphs over the same pages; the range begins and ends within pages.
    let (first, block) = graph(&arena, 3 * PAGE);
    let (second, other) = graph(&arena, 3 * PAGE);
    let (from, bytes) = (block.plus(PAGE / 2), 2 * PAGE);
    let extents = first.export(from, bytes).unwrap();
    assert_eq!(extents.iter().map(|extent| extent.bytes).collect::<Vec<_>>(), [PAGE / 2, PAGE, PAGE / 2]);
    let (fds, pins) = export(&device, &extents);
    assert_eq!((fds.len(), device.stats().exported_bytes), (3, 3 * PAGE));
    send(&socket, &extents, &fds);
    drop(fds);

    first.replay(A, || stamps.write(from, bytes, 0x0101_0101)).unwrap().unwrap();
    assert_eq!(seen(&socket), 0x0101_0101);
    let parts = [(0, PAGE / 2), (PAGE / 2, 2 * PAGE), (5 * PAGE / 2, PAGE / 2)];
    let write = |(at, bytes): (u64, u64)| stamps.write(other.plus(at), bytes, 0x0202_0202);
    second.replay(A, || parts.into_iter().try_for_each(write)).unwrap().unwrap();
    assert_eq!(seen(&socket), 0x0202_0202);
    tell(&socket, 0x0303_0303);
    assert_eq!(hear(&socket), Some(0x0303_0303));
    first.replay(A, || assert!(stamps.holds(from, bytes, 0x0303_0303).unwrap())).unwrap();
    assert!(stamps.holds(block, PAGE / 2, 0x0202_0202).unwrap());

    drop(socket);
    assert!(child.wait().unwrap().success());
    drop(pins);
    drop((first, second, arena));
    assert_eq!(device.trim(), Ok(0));
    assert_eq!(device.stats().physical_bytes, 0);
}

#[test]
fn what_a_peer_was_told_of_during_a_capture_is_the_graphs_after_the_seal_if_it_is_marked() {
    const TEST: &str =
        "what_a_peer_was_told_of_during_a_capture_is_the_graphs_after_the_seal_if_it_is_marked";
    if let Some(socket) = parent() {
        return serve(&socket);
    }
    for remote in [true, false] {
        let (mut child, socket) = other_process(TEST);
        let device = shared(6);
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let stamps = Stamps::new(device.driver(), A);
        let (another, _) = graph(&arena, 3 * MIB);
        let space = arena.open_space().unwrap();
        let bytes = MIB;
        let buffer = if remote { space.allocate_remote(bytes, A) } else { space.allocate(bytes, A) }.unwrap();
        // An equal output, placed beside the buffer.
        space.allocate(bytes, A).unwrap();
        // As by a library that registers memory during a capture: not pinned.
        let extents = space.export(buffer, bytes).unwrap();
        let (fds, pins) = export(&device, &extents);
        send(&socket, &extents, &fds);
        drop((fds, pins));
        space.free(buffer).unwrap();
        space.seal().unwrap();
        space.replay(A, || stamps.write(buffer, bytes, 0x0101_0101)).unwrap().unwrap();
        assert_eq!(seen(&socket) == 0x0101_0101, remote, "what the peer reads");
        tell(&socket, 0x0202_0202);
        assert_eq!(hear(&socket), Some(0x0202_0202));
        let found = || stamps.holds(buffer, bytes, 0x0202_0202).unwrap();
        assert_eq!(space.replay(A, found).unwrap(), remote, "what the peer wrote");
        drop(socket);
        assert!(child.wait().unwrap().success());
        drop((space, another, arena));
    }
}

#[test]
fn a_peer_writes_to_an_exclusive_block_while_its_arena_is_paused() {
    if let Some(socket) = parent() {
        return serve(&socket);
    }
    let (mut child, socket) = other_process("a_peer_writes_to_an_exclusive_block_while_its_arena_is_paused");
    let device = shared(7);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let stamps = Stamps::new(device.driver(), A);
    let (space, _) = graph(&arena, PAGE);
    let block = arena.allocate_exclusive(2 * MIB, 0).unwrap();
    let extents = arena.export(block, 2 * MIB).unwrap();
    let (fds, pins) = export(&device, &extents);
    send(&socket, &extents, &fds);
    assert_eq!(seen(&socket), 0);
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    tell(&socket, 0x0303_0303);
    assert_eq!(hear(&socket), Some(0x0303_0303));
    assert!(stamps.holds(block, 2 * MIB, 0x0303_0303).unwrap());
    arena.resume(Duration::ZERO).unwrap();
    assert!(stamps.holds(block, 2 * MIB, 0x0303_0303).unwrap());
    drop(socket);
    assert!(child.wait().unwrap().success());
    drop((pins, space, arena));
}

#[test]
fn what_another_process_has_stays_what_it_was_whatever_becomes_of_its_graph() {
    if let Some(socket) = parent() {
        return serve(&socket);
    }
    let (mut child, socket) =
        other_process("what_another_process_has_stays_what_it_was_whatever_becomes_of_its_graph");
    let device = shared(2);
    let options = Options { tag: "graphs".to_owned(), ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let stamps = Stamps::new(device.driver(), A);
    let (space, block) = graph(&arena, PAGE);
    let extents = space.export(block, PAGE).unwrap();
    let (fds, pins) = export(&device, &extents);
    send(&socket, &extents, &fds);
    drop(fds);
    space.replay(A, || stamps.write(block, PAGE, 0x0a0a_0a0a)).unwrap().unwrap();
    assert_eq!(seen(&socket), 0x0a0a_0a0a);

    let page = extents[0].page.number();
    let refused = Err(Error::Exported { pages: vec![page] });
    assert_eq!(arena.pause(Fence::default()).map(drop), refused);
    let report = device.pause(&["graphs"], Fence::default());
    assert!(report.is_err() || report.as_ref().is_ok_and(|report| report.complete().is_err()), "{report:?}");
    assert_eq!(arena.lendable_bytes(), 0);
    drop(space);
    assert_eq!(device.trim(), Ok(0));
    let (others, there) = graph(&arena, 2 * PAGE);
    stamps.write(there, 2 * PAGE, 0x0b0b_0b0b).unwrap();
    let more = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (third, elsewhere) = graph(&more, 2 * PAGE);
    stamps.write(elsewhere, 2 * PAGE, 0x0c0c_0c0c).unwrap();
    assert_eq!(seen(&socket), 0x0a0a_0a0a, "another graph's bytes");
    assert_eq!(device.stats().physical_bytes, 5 * PAGE);

    // After the end of the peer, the page is free.
    drop(socket);
    assert!(child.wait().unwrap().success());
    drop(pins);
    assert_eq!(device.stats().exported_bytes, 0);
    assert_eq!(device.trim(), Ok(PAGE));
    drop((others, third, arena, more));
}

#[test]
fn another_process_dies_in_the_middle() {
    if let Some(socket) = parent() {
        return serve(&socket);
    }
    let (mut child, socket) = other_process("another_process_dies_in_the_middle");
    let device = shared(3);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let stamps = Stamps::new(device.driver(), A);
    let (space, block) = graph(&arena, PAGE);
    let extents = space.export(block, PAGE).unwrap();
    let (fds, pins) = export(&device, &extents);
    send(&socket, &extents, &fds);
    stamps.write(block, PAGE, 0x0d0d_0d0d).unwrap();
    assert_eq!(seen(&socket), 0x0d0d_0d0d);
    tell(&socket, 1);
    assert_eq!(hear(&socket), None);
    assert!(!child.wait().unwrap().success());
    let gone = send_descriptors(socket.as_fd(), &[], &[1]);
    assert!(matches!(gone, Err(Error::Driver { call: "sendmsg", .. })), "{gone:?}");
    // The memory stays pinned until its owner drops the pin.
    space.replay(A, || assert!(stamps.holds(block, PAGE, 0x0d0d_0d0d).unwrap())).unwrap();
    assert!(arena.pause(Fence::default()).is_err());
    drop((pins, fds));
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
    drop((space, arena));
}

/// An importing device with injectable failures, and pages exported by a second driver.
struct Importer {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
    fds: Vec<(OwnedFd, u64)>,
}

fn importer(lengths: &[u64]) -> Importer {
    let owner = HostDriver::new(0, HostOptions::default()).unwrap().with_sharing(Handles::Fd);
    let owner: SharedDriver = Arc::new(owner);
    let export = |bytes: &u64| {
        let page = owner.create(*bytes).unwrap();
        // SAFETY: a live page, released once.
        let fd = unsafe { owner.sharing().unwrap().export(page) }.unwrap();
        // SAFETY: as above.
        unsafe { owner.release(page) }.unwrap();
        (fd, *bytes)
    };
    let fds = lengths.iter().map(export).collect();
    let host = Arc::new(HostDriver::new(1, HostOptions::default()).unwrap().with_sharing(Handles::Fd));
    let faulty = FaultyDriver::new(host.clone());
    Importer { device: Device::with_driver(faulty.clone()), host, faulty, fds }
}

impl Importer {
    fn import(&self, number: usize) -> vmmgraph::Result<PeerPage> {
        self.device.import(self.fds[number].0.as_fd(), self.fds[number].1)
    }
}

fn whole(page: &PeerPage) -> PeerExtent<'_> {
    PeerExtent { page, offset: 0, bytes: page.bytes() }
}

#[test]
fn imports_and_spans_fail_without_a_trace_at_every_call() {
    let bench = importer(&[2 * MIB, 4 * MIB]);
    let run = || -> vmmgraph::Result<()> {
        let pages = [bench.import(0)?, bench.import(1)?];
        let once = bench.device.map_peer(&[whole(&pages[0]), whole(&pages[1])])?;
        let twice = bench.device.map_peer(&[whole(&pages[1])])?;
        let stamps = Stamps::new(bench.device.driver(), A);
        stamps.write(twice.address(), twice.bytes(), 0x41).unwrap();
        assert!(stamps.holds(once.address().plus(2 * MIB), 4 * MIB, 0x41).unwrap());
        drop(pages);
        assert!(stamps.holds(once.address().plus(2 * MIB), 4 * MIB, 0x41).unwrap());
        Ok(())
    };
    bench.faulty.arm(&[]);
    run().unwrap();
    let calls = bench.faulty.calls();
    assert!(calls > 10, "{calls}");
    let mut refused = 0;
    for call in 1..=calls {
        bench.faulty.arm(&[call]);
        refused += u64::from(run().is_err());
        bench.faulty.arm(&[]);
        // The trim retries refused work.
        bench.device.trim().unwrap();
        assert_eq!(bench.host.leftovers(), [0; 4], "call {call}");
        assert_eq!(bench.device.stats().pending, 0, "call {call}");
    }
    assert!(refused > 4 && refused < calls, "{refused} of {calls}");
}

#[test]
fn a_span_goes_behind_the_streams_that_use_it() {
    let bench = importer(&[2 * MIB]);
    let page = bench.import(0).unwrap();
    let map = bench.device.map_peer(&[whole(&page)]).unwrap();
    map.used_by(A);
    map.used_by(A);
    bench.faulty.set_busy(true);
    drop((map, page));
    assert_eq!(bench.device.stats().pending, 1);
    assert_eq!(bench.host.leftovers()[..3], [1, 1, 1]);
    bench.faulty.set_busy(false);
    bench.device.trim().unwrap();
    assert_eq!(bench.host.leftovers()[..3], [0, 0, 0]);
    // A closed device leaves the unmap to its next opening.
    let page = bench.import(0).unwrap();
    let map = bench.device.map_peer(&[whole(&page)]).unwrap();
    map.used_by(A);
    bench.faulty.set_busy(true);
    let Importer { host, faulty, device, .. } = bench;
    drop((map, page, device));
    assert_eq!(host.leftovers()[..3], [1, 1, 1]);
    faulty.set_busy(false);
    drop(Device::with_driver(faulty));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn what_is_no_page_and_no_range_is_refused() {
    let bench = importer(&[2 * MIB, 4 * MIB]);
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let (socket, _) = UnixStream::pair().unwrap();
    for (fd, bytes) in [(file.as_fd(), 2 * MIB), (socket.as_fd(), 2 * MIB), (bench.fds[1].0.as_fd(), 2 * MIB)]
    {
        let refused = bench.device.import(fd, bytes);
        assert!(matches!(refused, Err(Error::Driver { call: "import", .. })), "{refused:?}");
    }
    for bytes in [0, 1, 3 * MIB, u64::MAX, u64::MAX << 21] {
        let refused = bench.device.import(bench.fds[0].0.as_fd(), bytes);
        assert!(matches!(refused, Err(Error::InvalidSize { .. })), "{bytes}: {refused:?}");
    }
    let plain = Device::with_driver(Arc::new(HostDriver::new(5, HostOptions::default()).unwrap()));
    let refused = plain.import(bench.fds[0].0.as_fd(), 2 * MIB);
    assert!(matches!(refused, Err(Error::WrongState { .. })), "{refused:?}");

    let (first, second) = (bench.import(0).unwrap(), bench.import(1).unwrap());
    let part = |page, offset, bytes| PeerExtent { page, offset, bytes };
    let wrong: [&[PeerExtent]; 8] = [
        &[],
        &[part(&first, 0, 0)],
        &[part(&first, 0, 4 * MIB)],
        &[part(&first, u64::MAX, 2)],
        &[part(&first, MIB, MIB), part(&second, MIB, MIB)],
        &[part(&first, 0, MIB), whole(&second)],
        &[whole(&first), part(&second, 0, MIB), whole(&first)],
        &[whole(&first), part(&second, MIB, 3 * MIB), whole(&first)],
    ];
    for extents in wrong {
        let refused = bench.device.map_peer(extents);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    let other = importer(&[2 * MIB]);
    let refused = other.device.map_peer(&[whole(&first)]);
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    let map = bench.device.map_peer(&[part(&first, MIB, MIB), whole(&second), part(&first, 0, MIB)]).unwrap();
    assert_eq!(map.bytes(), 6 * MIB);
    let stamps = Stamps::new(bench.device.driver(), A);
    stamps.write(map.address().plus(5 * MIB), MIB, 0x51).unwrap();
    stamps.write(map.address(), 5 * MIB, 0x52).unwrap();
    assert!(stamps.holds(map.address().plus(5 * MIB), MIB, 0x51).unwrap());
    drop((map, first, second));
    assert_eq!(bench.host.leftovers(), [0; 4]);
}

#[test]
fn descriptors_go_with_bytes_over_a_socket() {
    let (one, other) = UnixStream::pair().unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let many = vec![file.as_fd(); vmmgraph::MOST_DESCRIPTORS];
    assert_eq!(send_descriptors(one.as_fd(), &many, b"all"), Ok(3));
    let mut bytes = [0; 8];
    let (count, fds) = receive_descriptors(other.as_fd(), &mut bytes).unwrap();
    assert_eq!((&bytes[..count], fds.len()), (&b"all"[..], many.len()));
    drop(fds);
    let more = vec![file.as_fd(); vmmgraph::MOST_DESCRIPTORS + 1];
    for (fds, bytes) in [(&more[..], &b"x"[..]), (&many[..1], &b""[..])] {
        let refused = send_descriptors(one.as_fd(), fds, bytes);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    assert_eq!(send_descriptors(one.as_fd(), &[], b"none"), Ok(4));
    let (count, fds) = receive_descriptors(other.as_fd(), &mut bytes).unwrap();
    assert_eq!((count, fds.len()), (4, 0));
    drop(one);
    assert!(matches!(receive_descriptors(other.as_fd(), &mut bytes), Ok((0, none)) if none.is_empty()));
    let nowhere = receive_descriptors(other.as_fd(), &mut []);
    assert!(matches!(nowhere, Err(Error::InvalidArgument { .. })), "{nowhere:?}");
    let none = send_descriptors(file.as_fd(), &[], b"x");
    assert!(matches!(none, Err(Error::Driver { call: "sendmsg", .. })), "{none:?}");
}
