"""What the package opens once a process: the library, and the arenas, pools and threads that use it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import _c, _core
from ._arena import Arena, Device, Shape, sharing_asked
from ._pools import Eager, Pools, Scope

log = logging.getLogger("vmmgraph")

#: When a captured graph is instantiated.
INSTANTIATE = ("capture", "replay")
#: What an arena of `enable` is laid out for unless it is told otherwise: pages of 2 MiB, since decode graphs may need less than 30 MiB. vLLM's
#: 51 and 102 shapes, of which the hungriest need 26 and 24, take 28 and 26 then, and 34 on pages of 16; captures took as long.
EXPECTED_BYTES = 128 << 20

Pool = tuple[int, int]
#: Names the shape of the capture that begins: what its pieces have in common, and a label; or ``None``.
Namer = Callable[[], "tuple[object, str] | None"]


class Unit:
    """What `shape` gives to the captures inside."""

    def __init__(self, label: str) -> None:
        self.label = label


class Local(threading.local):
    """Of one thread."""

    #: Those within which captures are torch's own.
    disabled: list[object]
    units: list[Unit]
    #: Those within which captures allocate remote blocks.
    remote: list[object]

    def __init__(self) -> None:
        self.disabled = []
        self.units = []
        self.remote = []


class Capture:
    """What stands for a graph from the beginning of its capture on, and what is known of it so far: an exception of a signal's may come between any
    two steps. The graph has it alone, and so it ends before torch's part of the graph, also where CPython drops what the graph's own end raised."""

    shape: Shape | None = None
    #: The id that torch is given, and the one that the program sees.
    pool: Pool = (0, 0)
    shown: Pool = (0, 0)
    #: Scopes that the thread steps into again behind it.
    left: Sequence[Scope] = ()
    under_way = True

    def __init__(self, door: Door, named: Arena | None, label: str) -> None:
        self.door = door
        #: What the program said of it.
        self.named, self.label = named, label
        #: What the library says of its end; until then it is no piece of the shape.
        self.captured = _c.Captured(piece=_c.NO_PIECE)
        #: What stands for it in its shape.
        self.token = object()

    def let_go(self) -> None:
        """The shape asks the graph for nothing from now on."""
        if self.shape is not None and self.captured.piece != _c.NO_PIECE:
            self.door.library.raw["torch_drop"](self.shape.handle, self.captured.piece)

    def step_in(self) -> None:
        """The thread goes on with what it stepped out of."""
        self.door.eager.step_in(self.left)
        self.left = ()

    def close(self) -> None:
        """The graph goes, or is none of the shape's. As often as one likes, and where nothing began."""
        self.let_go()
        if self.under_way:
            if self.shape is not None:
                self.door.library.raw["torch_capture_abandon"](self.shape.handle, *self.pool)
            self.step_in()
        self.door.leave(self)

    def __del__(self) -> None:
        if self.shape is not None:
            with contextlib.suppress(Exception):
                self.close()


class Door:
    """The library, and what was put over torch."""

    def __init__(self, library: _c.Library) -> None:
        self.library = library
        self.eager = Eager(library)
        self.pools = Pools(self)
        self.local = Local()
        self.lock = threading.RLock()
        #: By device and pool: a pool that several graphs are captured into is an arena.
        self.arenas: weakref.WeakValueDictionary[tuple[int, Pool], Arena] = weakref.WeakValueDictionary()
        self.all_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Devices that stay open between captures while `enable` is on: a graph without a pool has an arena of its own, which opened the
        #: device and closed it again.
        self.devices: set[Device] = set()
        self.defaults: dict[int, Arena] = {}
        #: In the place of an arena's pool for captures that are torch's own.
        self.shadows: dict[tuple[int, Pool], Pool] = {}
        self.namers: list[Namer] = []
        self.share = False
        self.memset_kernels = True
        self.instantiate = INSTANTIATE[0]
        self.executables = 0
        self.executable_bytes = 0
        self.expected_bytes = EXPECTED_BYTES
        self.budget = 0
        self.retain = "default"
        self.sharing = sharing_asked(None)
        self.peers = 0
        self.said: set[str] = set()
        #: The process that made its arenas.
        self.process: int | None = None

    def device_number(self, device: Any) -> int:
        import torch

        if device is None:
            return torch.cuda.current_device()
        index = device if isinstance(device, int) else torch.device(device).index
        return torch.cuda.current_device() if index is None else index

    def new_pool(self) -> Pool:
        import torch

        first, second = torch.cuda.graph_pool_handle()
        return int(first), int(second)

    def register(self, arena: Arena) -> None:
        with self.lock:
            if self.process is None:
                self.process = os.getpid()
                if multiprocessing.parent_process() is not None:
                    # Workers that were forked end without their atexit functions.
                    multiprocessing.util.Finalize(None, save_map_at_exit, exitpriority=0)
            self.arenas[arena.device, arena.pool] = arena
            self.all_arenas.add(arena)
        if self.executables or self.executable_bytes:
            # Refused up to torch 2.7, which instantiates each graph itself.
            self.library.raw["torch_set_executable_limits"](arena.handle, self.executables, self.executable_bytes)

    def make(self, device: int, tag: str = "") -> Arena:
        arena = Arena(device, self.budget, expected_bytes=self.expected_bytes, retain=self.retain, tag=tag)
        self.devices.add(arena._device)
        return arena

    def tagged_arena(self, device: int, pool: Pool | None, tag: str) -> Arena:
        """The arena of a capture whose memory is to be paused by that tag.

        Raises `Error` if the pool's arena has another tag or none.
        """
        with self.lock:
            arena = self.arena_for(device, pool, None, tag) if pool is not None else self.make(device, tag)
        if arena.tag != tag:
            has = f"tag {arena.tag!r}" if arena.tag else "no tag"
            raise _c.Error(
                f"cannot capture into pool {pool} under tag {tag!r}: graphs with {has} have that pool; give each tag a pool of its own",
                _c.WRONG_STATE,
            )
        return arena

    def arena_for(self, device: int, pool: Pool | None, arena: Arena | None, tag: str = "") -> Arena:
        """The arena of a capture, which may be named. One that is made for the pool has the tag."""
        with self.lock:
            if arena is not None:
                if arena.device != device:
                    raise ValueError(f"the arena is on cuda:{arena.device}, and cuda:{device} is being captured")
                return arena
            if pool is None:
                arena = self.defaults.get(device) if self.share else None
                if arena is None:
                    arena = self.make(device)
                    if self.share:
                        self.defaults[device] = arena
                return arena
            arena = self.pools.arena(device, pool, tag) or self.arenas.get((device, pool))
            if arena is None:
                arena = self.make(device, tag)
                # The one that it made for itself is of no use.
                del self.arenas[device, arena.pool]
                arena.pool, arena._pool_is_named = pool, True
                self.arenas[device, pool] = arena
            return arena

    def shadow(self, device: int, pool: Pool | None) -> Pool | None:
        """The pool for a capture that is torch's own: another one, if that is an arena's."""
        if pool is None:
            return None
        with self.lock:
            if (device, pool) not in self.arenas and (device, pool) not in self.shadows:
                return pool
            return self.shadows.setdefault((device, pool), self.new_pool())

    def name(self, label: str) -> tuple[object, str]:
        """What the capture that begins is a piece of, and its label, if it has none yet."""
        units = self.local.units
        if units:
            return units[-1], units[-1].label
        for namer in self.namers:
            named = namer()
            if named is not None:
                return named[0], label or named[1]
        return None, label

    def begin(self, capture: Capture, device: int, asked: Pool | None) -> None:
        """Gives a capture its shape: the open one if this is another piece of it, else a new one."""
        arena = self.arena_for(device, asked, capture.named)
        key, label = self.name(capture.label)
        capture.left = self.eager.step_out(arena)
        with arena._lock:
            mine = (opened for opened in arena._open if key is not None and opened.key is key and not opened.capturing)
            shape = next(mine, None)
            if shape is None:
                arena._settle(None)
                shape = Shape(arena, key, label)
            # Torch takes one capture at a time for an id, and none for one whose graphs are all gone, which is the program's affair
            # where the id is its own.
            named = arena.pool == asked and (arena._pool_is_named or arena._pool_users)
            given = arena.pool if named or not arena._pool_given else self.new_pool()
            # From here on there is something to withdraw.
            capture.shape, capture.pool = shape, given
            if given == arena.pool:
                arena._pool_given = True
                arena._pool_users.add(capture.token)
            capture.shown = asked if asked is not None and capture.named is None else arena.pool
            shape.captures.add(capture.token)
            shape.capturing = True
            if shape not in arena._open:
                arena._open.append(shape)

    @staticmethod
    def leave(capture: Capture) -> None:
        """One of a shape's graphs is gone; or it was not captured."""
        shape = capture.shape
        if shape is None:
            return
        with shape.arena._lock:
            shape.captures.discard(capture.token)
            shape.arena._pool_users.discard(capture.token)
            shape.capturing = shape.capturing and not capture.under_way
            if not shape.captures:
                shape.arena._abandoned(shape, unwritten=shape.unnamed and capture.under_way)
        capture.shape = None

    def once(self, what: str, text: str, **more: Any) -> None:
        if what not in self.said:
            self.said.add(what)
            log.warning("vmmgraph: %s", text, **more)

    def close(self) -> None:
        """Drops every graph, while the driver is there."""
        for graph in list(self.graphs):
            with contextlib.suppress(Exception):
                graph._forget()
                graph._reset_torchs()
        self.defaults.clear()
        self.devices.clear()


_door: Door | None = None
_lock = threading.RLock()
#: Of a process whose door was never opened.
_none = Local()


def need() -> Door:
    """The door of the library for the torch at hand; opened if it is not. Raises as `_core.for_torch`."""
    global _door
    with _lock:
        if _door is None:
            _door = Door(_core.for_torch())
        return _door


def opened() -> Door | None:
    """The door, if it is open."""
    return _door


def arenas() -> list[Arena]:
    """Those that are there now."""
    return list(_door.all_arenas) if _door is not None else []


def local() -> Local:
    """Of the calling thread."""
    return _door.local if _door is not None else _none


def save_map_at_exit() -> None:
    path = os.environ.get("VMMGRAPH_MAP")
    if path:
        from . import save_map

        with contextlib.suppress(Exception):
            save_map(path.replace("%p", str(os.getpid())))
