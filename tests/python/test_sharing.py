"""Page sharing from Python: two processes over the host driver with real aliasing. SKIPPED without
VMMGRAPH_CORE_LIBRARY."""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import subprocess
import sys
from ctypes import byref, c_void_p
from pathlib import Path
from types import SimpleNamespace

import pytest
from vmmgraph import _c, sharing
from vmmgraph._arena import Device, bits, sharing_asked

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not os.environ.get("VMMGRAPH_CORE_LIBRARY"), reason="SKIPPED: VMMGRAPH_CORE_LIBRARY names no library"
)


class HostArena:
    """The interface used by `sharing`."""

    def __init__(self, how: str = "fd") -> None:
        self._library = _c.Library(Path(os.environ["VMMGRAPH_CORE_LIBRARY"]), with_torch=False)
        self._device = Device(self._library, 0, how)
        self.handle = c_void_p()
        self._library.arena_create(self._device.handle, byref(_c.ArenaOptions()), byref(self.handle))

    def space(self) -> SimpleNamespace:
        space = c_void_p()
        self._library.space_open(self.handle, byref(space))
        return SimpleNamespace(library=self._library, space=space)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMGRAPH_DRIVER", "host")


OTHER = """
import ctypes, pickle, socket, sys
sys.path.insert(0, sys.argv[2])
from test_sharing import HostArena
from vmmgraph import sharing
peer = socket.socket(fileno=int(sys.argv[1]))
message, descriptors, _, _ = socket.recv_fds(peer, 65536, 16)
parts = pickle.loads(message)
arena = HostArena()
pages = {}
for part, descriptor in zip(parts, descriptors, strict=True):
    pages[part[0]] = sharing.PeerPage(arena, descriptor, part[4])
span = sharing.PeerMap(arena, [(pages[part[0]], part[1], part[2]) for part in parts])
seen = ctypes.string_at(span.address, span.bytes)
ctypes.memset(span.address, 0x5A, span.bytes)
peer.send(seen[:1] + seen[-1:] + bytes([seen.count(seen[0]) == len(seen)]))
assert peer.recv(1) == b"."
"""


def test_a_block_is_the_other_processes_too(host: None) -> None:
    arena = HostArena()
    library, shape = arena._library, arena.space()
    block, size = c_void_p(), 40 * MIB
    library.space_allocate(shape.space, size, None, byref(block))
    library.space_seal(shape.space, _c.RETAIN["shared_pages"], byref(_c.SealReport()))
    ctypes.memset(block.value, 0x33, size)
    parts = sharing.extents(shape, (block.value, size))
    assert sum(part.bytes for part in parts) == size and len(parts) > 1
    assert parts[0].address == block.value
    pages = [sharing.ExportedPage(arena, part.page) for part in parts]
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(theirs.fileno()), str(Path(__file__).parent)], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    socket.send_fds(mine, [pickle.dumps([tuple(part) for part in parts])], [page.descriptor for page in pages])
    assert mine.recv(16) == b"\x33\x33\x01"
    assert ctypes.string_at(block.value, size) == b"\x5a" * size
    mine.send(b".")
    assert child.wait(60) == 0
    for page in pages:
        page.close()
        page.close()
    with pytest.raises(_c.Error):
        library.device_page_exported(arena._device.handle, parts[0].page, -1)
    library.space_destroy(shape.space)
    library.arena_destroy(arena.handle)


def test_a_device_without_sharing_says_so(host: None) -> None:
    arena = HostArena("none")
    library, shape = arena._library, arena.space()
    block = c_void_p()
    library.space_allocate(shape.space, MIB, None, byref(block))
    part = sharing.extents(shape, (block.value, MIB))[0]
    with pytest.raises(_c.Error, match="shar"):
        sharing.ExportedPage(arena, part.page)
    with pytest.raises(_c.Error):
        sharing.PeerPage(arena, 0, part.page_bytes)
    library.space_destroy(shape.space)
    library.arena_destroy(arena.handle)


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VMMGRAPH_SHARING", raising=False)
    assert sharing_asked(None) == "none"
    monkeypatch.setenv("VMMGRAPH_SHARING", "fd")
    assert sharing_asked(None) == "fd"
    assert sharing_asked("none") == "none"
    with pytest.raises(ValueError, match="pigeons"):
        sharing_asked("pigeons")
    assert bits([1, 3, 1]) == 0b1010


def test_a_graph_of_torchs_own_has_no_pages() -> None:
    with pytest.raises(_c.Error, match="torch's own"):
        sharing.extents(SimpleNamespace(_group=None), (0, 1))
