"""Session of the process: the library, and the arenas, pools and thread state that use it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import _c, _core
from ._arena import Arena, Device, GraphGroup, sessions_come_from, sharing_asked
from ._c import Error
from ._pools import Eager, Pools, Scope

log = logging.getLogger("vmmgraph")

INSTANTIATE = ("capture", "replay")
#: Gives pages of 2 MiB, since decode graphs may need less than 30 MiB. vLLM's 51 and 102 graph
#: groups with peaks of 26 and 24 MiB take 28 and 26 MiB; on pages of 16 MiB, 34. Capture times are
#: equal.
EXPECTED_BYTES = 128 << 20

Pool = tuple[int, int]
#: Label provider: returns the common key of a capture's pieces and a label, or ``None``.
LabelProvider = Callable[[], "tuple[object, str] | None"]


class PieceGroup:
    """Piece group: identifies the captures within one `shape` context."""

    def __init__(self, label: str) -> None:
        self.label = label


class ThreadState(threading.local):
    """State of one thread."""

    #: Open `disabled` contexts, in which captures use torch's memory.
    disabled: list[object]
    piece_groups: list[PieceGroup]
    #: Open `remote` contexts, in which captures allocate remote blocks.
    remote: list[object]

    def __init__(self) -> None:
        self.disabled = []
        self.piece_groups = []
        self.remote = []


class Capture:
    """State of a graph's capture, updated step by step: a signal's exception may occur between any
    two steps. Destroyed before torch's part of the graph, even if CPython discards the graph's own
    destructor exception."""

    group: GraphGroup | None = None
    #: Pool id given to torch, and (`shown`) the id seen by the program.
    pool: Pool = (0, 0)
    shown: Pool = (0, 0)
    #: Scopes to enter again after the capture.
    left: Sequence[Scope] = ()
    under_way = True

    def __init__(self, session: Session, named: Arena | None, label: str) -> None:
        self.session = session
        self.named, self.label = named, label
        self.captured = _c.Captured(piece=_c.NO_PIECE)
        #: Token of this graph in its group.
        self.token = object()

    def let_go(self) -> None:
        if self.group is not None and self.captured.piece != _c.NO_PIECE:
            self.session.library.raw["torch_drop"](self.group.handle, self.captured.piece)

    def step_in(self) -> None:
        self.session.eager.step_in(self.left)
        self.left = ()

    def close(self) -> None:
        """Abandons the capture or drops the graph. May be called at any time, repeatedly."""
        self.let_go()
        if self.under_way:
            if self.group is not None:
                self.session.library.raw["torch_capture_abandon"](self.group.handle, *self.pool)
            self.step_in()
        self.session.leave(self)

    def __del__(self) -> None:
        if self.group is not None:
            with contextlib.suppress(Exception):
                self.close()


class Session:
    """Session: the library, and the replacements installed in torch."""

    def __init__(self, library: _c.Library) -> None:
        self.library = library
        self.eager = Eager(library)
        self.pools = Pools(self)
        self.thread_state = ThreadState()
        self.lock = threading.RLock()
        self.arenas: weakref.WeakValueDictionary[tuple[int, Pool], Arena] = weakref.WeakValueDictionary()
        self.all_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Graphs in torch's memory, and graphs made before `enable`. Both may contain addresses of
        #: torch's cuBLAS workspaces.
        self.torchs_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Kept open while `enable` is active, or each arena of a graph without a pool would open
        #: and close the device.
        self.devices: set[Device] = set()
        self.defaults: dict[int, Arena] = {}
        #: Private pool aliases: replace an arena's pool for captures in torch's memory.
        self.aliases: dict[tuple[int, Pool], Pool] = {}
        self.label_providers: list[LabelProvider] = []
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
        #: Whether `sleep` destroyed executables that `wake` makes again.
        self.evicted = False
        #: Process that created the arenas.
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
                    # Forked workers exit without running atexit functions.
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
        """Returns the arena of a capture whose memory can be paused by the tag.

        Raises `Error` if the pool's arena has a different tag or none.
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
        with self.lock:
            if arena is not None:
                if arena.device != device:
                    raise ValueError(
                        f"cannot capture on cuda:{device}: the arena is on cuda:{arena.device}; pass an arena of the captured device"
                    )
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
                del self.arenas[device, arena.pool]
                arena.pool, arena._pool_is_named = pool, True
                self.arenas[device, pool] = arena
            return arena

    def alias(self, device: int, pool: Pool | None) -> Pool | None:
        if pool is None:
            return None
        with self.lock:
            if (device, pool) not in self.arenas and (device, pool) not in self.aliases:
                return pool
            return self.aliases.setdefault((device, pool), self.new_pool())

    def name(self, label: str) -> tuple[object, str]:
        """Returns the key and the label of the beginning capture."""
        piece_groups = self.thread_state.piece_groups
        if piece_groups:
            return piece_groups[-1], piece_groups[-1].label
        for provider in self.label_providers:
            named = provider()
            if named is not None:
                return named[0], label or named[1]
        return None, label

    def begin(self, capture: Capture, device: int, asked: Pool | None) -> None:
        arena = self.arena_for(device, asked, capture.named)
        key, label = self.name(capture.label)
        capture.left = self.eager.step_out(arena)
        with arena._lock:
            mine = (opened for opened in arena._open if key is not None and opened.key is key and not opened.capturing)
            group = next(mine, None)
            if group is None:
                arena._seal_open(None)
                group = GraphGroup(arena, key, label)
            # Torch allows one capture at a time per pool id, and none after all graphs of the id
            # are gone. A program that chose the id must follow this rule.
            named = arena.pool == asked and (arena._pool_is_named or arena._pool_users)
            given = arena.pool if named or not arena._pool_given else self.new_pool()
            capture.group, capture.pool = group, given
            if given == arena.pool:
                arena._pool_given = True
                arena._pool_users.add(capture.token)
            capture.shown = asked if asked is not None and capture.named is None else arena.pool
            group.captures.add(capture.token)
            group.capturing = True
            if group not in arena._open:
                arena._open.append(group)

    @staticmethod
    def leave(capture: Capture) -> None:
        group = capture.group
        if group is None:
            return
        with group.arena._lock:
            group.captures.discard(capture.token)
            group.arena._pool_users.discard(capture.token)
            group.capturing = group.capturing and not capture.under_way
            if not group.captures:
                group.arena._abandoned(group, unwritten=group.unnamed and capture.under_way)
        capture.group = None

    def torch_has_graphs(self) -> bool:
        """Returns whether a known graph is in torch's memory."""
        return any(getattr(graph, "_group", None) is None for graph in list(self.torchs_graphs))

    def once(self, what: str, text: str, **more: Any) -> None:
        if what not in self.said:
            self.said.add(what)
            log.warning("vmmgraph: %s", text, **more)

    def close(self) -> None:
        """Drops every graph while the driver still exists."""
        for graph in list(self.graphs):
            with contextlib.suppress(Exception):
                graph._forget()
                graph._reset_torchs()
        self.defaults.clear()
        self.devices.clear()


_session: Session | None = None
_lock = threading.RLock()
_none = ThreadState()


def need() -> Session:
    """Returns the session, opening it if needed. Raises like `_core.for_torch`."""
    global _session
    with _lock:
        if _session is None:
            _session = Session(_core.for_torch())
        return _session


sessions_come_from(need)


def opened() -> Session | None:
    return _session


def arenas() -> list[Arena]:
    return list(_session.all_arenas) if _session is not None else []


def thread_state() -> ThreadState:
    return _session.thread_state if _session is not None else _none


def save_map(path: str | Path, arena: Arena | None = None) -> Path:
    """Writes the page map of an arena (default: the largest) as a self-contained web page, or as
    JSON for a name with ``.json``."""
    path = Path(path)
    session = need()
    chosen = arena or max(arenas(), key=lambda one: one.stats()["physical_bytes"], default=None)
    if chosen is None:
        raise Error("there is no arena", 100)
    text = chosen.map_json()
    path.write_text(text if path.suffix == ".json" else session.library.text("map_html", text.encode()), encoding="utf-8")
    return path


def save_map_at_exit() -> None:
    path = os.environ.get("VMMGRAPH_MAP")
    if path:
        with contextlib.suppress(Exception):
            save_map(path.replace("%p", str(os.getpid())))
