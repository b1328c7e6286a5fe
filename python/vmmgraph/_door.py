"""What stands in the place of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from typing import Any

from . import _c, _core
from ._arena import Arena, Shape, address_of, bits
from ._pools import Eager, Pools, Scope

log = logging.getLogger("vmmgraph")

#: How many shapes have executables of their own at a time, unless `enable` is told otherwise.
EXECUTABLES = 16
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

    disabled = 0
    units: list[Unit]
    arena: Arena | None = None
    label = ""

    def __init__(self) -> None:
        self.units = []


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
        self.defaults: dict[int, Arena] = {}
        #: In the place of an arena's pool for captures that are torch's own.
        self.shadows: dict[tuple[int, Pool], Pool] = {}
        self.namers: list[Namer] = []
        self.share = False
        self.memset_kernels = True
        self.executables = EXECUTABLES
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
                    multiprocessing.util.Finalize(None, _save_map_at_exit, exitpriority=0)
            self.arenas[arena.device, arena.pool] = arena
            self.all_arenas.add(arena)
        if self.executables or self.executable_bytes:
            # Refused up to torch 2.7, where each graph has its own.
            self.library.raw["torch_set_executable_limits"](arena.handle, self.executables, self.executable_bytes)

    def make(self, device: int) -> Arena:
        return Arena(device, self.budget, expected_bytes=self.expected_bytes, retain=self.retain)

    def arena_for(self, device: int, pool: Pool | None) -> tuple[Arena, Pool]:
        """The arena of a capture, and the pool that torch is given."""
        with self.lock:
            arena = self.local.arena
            if arena is not None:
                if arena.device != device:
                    raise ValueError(f"the arena is on cuda:{arena.device}, and cuda:{device} is being captured")
                return arena, arena.pool
            if pool is None:
                arena = self.defaults.get(device) if self.share else None
                if arena is None:
                    arena = self.make(device)
                    if self.share:
                        self.defaults[device] = arena
                return arena, arena.pool
            arena = self.pools.arena(device, pool)
            if arena is not None:
                return arena, arena.pool
            arena = self.arenas.get((device, pool))
            if arena is None:
                arena = self.make(device)
                # The one that it made for itself is of no use.
                del self.arenas[device, arena.pool]
                arena.pool = pool
                self.arenas[device, pool] = arena
            return arena, pool

    def shadow(self, device: int, pool: Pool | None) -> Pool | None:
        """The pool for a capture that is torch's own: another one, if that is an arena's."""
        if pool is None:
            return None
        with self.lock:
            if (device, pool) not in self.arenas and (device, pool) not in self.shadows:
                return pool
            return self.shadows.setdefault((device, pool), self.new_pool())

    def name(self) -> tuple[object, str]:
        """What the capture that begins is a piece of, and its label."""
        local = self.local
        if local.units:
            return local.units[-1], local.units[-1].label
        for namer in self.namers:
            named = namer()
            if named is not None:
                return named[0], local.label or named[1]
        return None, local.label

    def begin(self, device: int, pool: Pool | None) -> tuple[Shape, Pool, list[Scope]]:
        """The shape for a capture: the open one if this is another piece of it, else a new one. And the scopes that this thread steps into
        again behind it."""
        asked = pool
        arena, pool = self.arena_for(device, pool)
        key, label = self.name()
        left = self.eager.step_out(arena)
        try:
            with arena._lock:
                mine = (opened for opened in arena._open if key is not None and opened.key is key and not opened.capturing)
                shape = next(mine, None)
                if shape is None:
                    arena._settle(None)
                    shape = Shape(arena, key, label)
                    arena._open.append(shape)
                if pool != asked and any(opened.capturing for opened in arena._open):
                    # Torch takes one capture at a time for each id, and the program has named none.
                    pool = self.new_pool()
                    self.arenas[device, pool] = arena
                shape.graphs += 1
                shape.capturing = True
                return shape, pool, left
        except BaseException:
            self.eager.step_in(left)
            raise

    @staticmethod
    def leave(shape: Shape, captured: bool = False) -> None:
        """One of a shape's graphs is gone; or it was not captured."""
        arena = shape.arena
        with arena._lock:
            shape.graphs -= 1
            shape.capturing = shape.capturing and captured
            if shape.graphs <= 0:
                arena._abandoned(shape, unwritten=shape.unnamed and not captured)

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


_door: Door | None = None
_status: Status | None = None
_lock = threading.RLock()


def need() -> Door:
    """The door; opened if it is not."""
    if _door is None:
        _open_door()
    assert _door is not None
    return _door


class Status:
    """What :func:`enable` chose: ``route`` is ``"blocks"``, ``"mempool"`` or ``"none"``; ``why`` is for people."""

    def __init__(self, route: str, why: str, path: str | None = None) -> None:
        self.route = route
        self.why = why
        self.library = path

    def __bool__(self) -> bool:
        return self.route != "none"

    def __repr__(self) -> str:
        return f"<vmmgraph: {self.route} route, {self.why}>"


def _open_door() -> Door:
    """Opens the door of the library for the torch at hand. Raises as `_core.for_torch`."""
    global _door
    with _lock:
        if _door is None:
            _door = Door(_core.for_torch())
        return _door


def graph_class(door: Door, base: type) -> type:
    """A subclass of torch's graph class."""
    keeps = hasattr(base, "raw_cuda_graph") and hasattr(base, "instantiate")
    raw = door.library.raw
    replay_piece, enter, leave = raw["torch_replay"], raw["space_enter"], raw["space_leave"]
    local = door.local
    scopes, step_out, step_in = door.eager.scopes, door.eager.step_out, door.eager.step_in

    class CUDAGraph(base):  # type: ignore[misc, valid-type]
        """``torch.cuda.CUDAGraph``, whose captures are VmmGraph's: tensors lie on the pages of the arena that ``pool=`` names."""

        # Where it was captured; `None`: in torch's own memory.
        _shape: Shape | None = None
        _piece = 0
        # Its handle while `replay` is one call.
        _direct: int | None = None
        _capturing = False
        _lent = False
        # Whether the program asked for a graph that is kept.
        _kept = False
        # Whether torch was told to keep it.
        _keeps = False
        _pool: Pool | None = None
        # What the program asked for where torch was given another one.
        _asked: Pool | None = None
        # Scopes of the thread that captures.
        _left: Sequence[Scope] = ()
        _stream = None

        def __new__(cls, keep_graph: bool = False, *args: Any, **kwargs: Any) -> Any:
            if keeps:
                return super().__new__(cls, keep_graph, *args, **kwargs)
            return super().__new__(cls, *args, **kwargs)

        def __init__(self, keep_graph: bool = False, *args: Any, **kwargs: Any) -> None:
            self._kept = bool(keep_graph)
            if keeps:
                # Torch must not make an executable: it is borrowed at the first replay.
                self._keeps = self._kept or not local.disabled
                super().__init__(self._keeps, *args, **kwargs)
            else:
                super().__init__(*args, **kwargs)

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            import torch

            asked = args[0] if args else kwargs.get("pool")
            pool = None if asked is None or not any(asked) else (int(asked[0]), int(asked[1]))
            device = torch.cuda.current_device()
            if local.disabled:
                return self._begin_own(device, pool, args, kwargs)
            shape, given, left = door.begin(device, pool)
            self._asked, pool = (pool if given != pool and local.arena is None else None), given
            # Torch may run Python, and end graphs, from here on.
            status = raw["torch_capture_begin"](shape.handle, *pool)
            if status != _c.OK:
                error = door.library.error("torch_capture_begin", status)
                door.leave(shape)
                step_in(left)
                if status != _c.WRONG_STATE:
                    raise error
                door.once(str(error), f"a capture in torch's own memory: {error}")
                del shape
                return super().capture_begin(*args, **kwargs)
            args, kwargs = self._with_pool(pool, args, kwargs)
            try:
                super().capture_begin(*args, **kwargs)
            except BaseException:
                raw["torch_capture_abandon"](shape.handle, *pool)
                door.leave(shape)
                step_in(left)
                raise
            status = raw["torch_capture_begun"](shape.handle)
            if status != _c.OK:
                error = door.library.error("torch_capture_begun", status)
                door.leave(shape)
                step_in(left)
                door.once("ignored", f"a capture in torch's own memory: {error}")
                return
            self._shape, self._pool, self._capturing, self._left = shape, pool, True, left
            door.graphs.add(self)

        def _begin_own(self, device: int, pool: Pool | None, args: Any, kwargs: Any) -> None:
            shadow = door.shadow(device, pool)
            if shadow is not None:
                args, kwargs = self._with_pool(shadow, args, kwargs)
            super().capture_begin(*args, **kwargs)

        @staticmethod
        def _with_pool(pool: Pool, args: Any, kwargs: Any) -> Any:
            return (pool, *args[1:]), {name: value for name, value in kwargs.items() if name != "pool"}

        def capture_end(self, *args: Any, **kwargs: Any) -> None:
            shape = self._shape
            if not self._capturing or shape is None:
                super().capture_end(*args, **kwargs)
                if self._keeps and not self._kept:
                    # As torch would have.
                    super().instantiate()
                return
            self._capturing = False
            left, self._left = self._left, ()
            try:
                try:
                    super().capture_end(*args, **kwargs)
                except BaseException:
                    self._abandon(shape)
                    raise
                try:
                    self._captured(shape)
                except BaseException:
                    raw["torch_capture_abandon"](shape.handle, 0, 0)
                    self._shape = None
                    door.leave(shape)
                    raise
                shape.arena._captured(shape)
            finally:
                step_in(left)

        def _captured(self, shape: Shape) -> None:
            assert self._pool is not None
            lend = self._keeps and not self._kept
            graph = _c.Graph(
                graph=address_of(self),
                pool_first=self._pool[0],
                pool_second=self._pool[1],
                raw=super().raw_cuda_graph() if self._keeps else None,
                lend=lend,
                memset_kernels=lend and door.memset_kernels,
            )
            captured = _c.Captured()
            door.library.torch_capture_end(shape.handle, byref(graph), byref(captured))
            self._piece = captured.piece
            self._lent = bool(captured.lent)
            self._direct = shape.handle.value if captured.replayable else None
            if not captured.replayable:
                door.once("indirect", "torch's graph objects are laid out in an unknown way: replays go through torch")

        def _abandon(self, shape: Shape) -> None:
            """After an end that threw: what torch did not clean up."""
            pool = self._pool or (0, 0)
            with contextlib.suppress(RuntimeError):
                super().pool()
                # It has one: torch counts the graph as captured, and releases its pool when it is reset.
                pool = (0, 0)
            with contextlib.suppress(Exception):
                super().reset()
            raw["torch_capture_abandon"](shape.handle, *pool)
            self._shape = None
            door.leave(shape)

        def replay(self) -> None:
            shape = self._shape
            if shape is None:
                return super().replay()
            left = step_out(shape.arena) if scopes.all else None
            try:
                arena = shape.arena
                if arena._open or not shape.sealed:
                    arena._settle(shape)
                direct = self._direct
                if direct is not None:
                    status = replay_piece(direct, self._piece)
                    if status:
                        door.library.fail("torch_replay", status)
                    return None
                return self._replay_in_turn(shape)
            finally:
                if left:
                    step_in(left)

        def pool(self) -> Any:
            own = super().pool()
            return own if self._asked is None else self._asked

        def _replay_in_turn(self, shape: Shape) -> None:
            import torch

            status = enter(shape.space, torch.cuda.current_stream(shape.arena.device).cuda_stream)
            if status:
                door.library.fail("space_enter", status)
            try:
                super().replay()
            finally:
                leave(shape.space)

        def _own(self) -> None:
            """Torch's own executable is what is launched from now on."""
            if self._lent and self._shape is not None:
                self._lent = False
                door.library.torch_keep(self._shape.handle, self._piece)

        def instantiate(self, *args: Any, **kwargs: Any) -> None:
            self._own()
            super().instantiate(*args, **kwargs)

        def raw_cuda_graph(self, *args: Any, **kwargs: Any) -> int:
            graph = super().raw_cuda_graph(*args, **kwargs)
            self._by_hand()
            return graph

        def _by_hand(self) -> None:
            """It may be launched by others from now on, who tell nobody: no replay of ours will seal its shape."""
            shape = self._shape
            if shape is None or self._capturing:
                return
            shape.launched_by_hand()
            if shape.key is None:
                shape.arena._settle(shape)

        def raw_cuda_graph_exec(self, *args: Any, **kwargs: Any) -> int:
            if self._shape is not None:
                door.once(
                    "exec", "raw_cuda_graph_exec(): what launches it by itself keeps it on one stream with the arena's replays"
                )
                self._by_hand()
            if self._lent:
                self._own()
                super().instantiate()
            return super().raw_cuda_graph_exec(*args, **kwargs)

        def _forget(self) -> None:
            shape, self._shape, self._direct = self._shape, None, None
            if shape is None:
                return
            captured = not self._capturing
            if captured:
                raw["torch_drop"](shape.handle, self._piece)
            else:
                self._capturing = False
                raw["torch_capture_abandon"](shape.handle, *(self._pool or (0, 0)))
                step_in(self._left)
                self._left = ()
            self._lent = False
            door.leave(shape, captured)

        def reset(self, *args: Any, **kwargs: Any) -> None:
            # Its space goes after the graph.
            shape = self._shape
            arena = shape.arena if shape is not None else None
            self._forget()
            super().reset(*args, **kwargs)
            del shape
            if arena is not None:
                # What cannot be given back now is by the next.
                raw["arena_trim"](arena.handle, None)

        def _reset_torchs(self) -> None:
            super().reset()

        def __del__(self) -> None:
            # Its executable is borrowed: it goes before torch's destructor.
            with contextlib.suppress(Exception):
                self._forget()

        @property
        def arena(self) -> Arena | None:
            """The arena that its tensors lie in; ``None``: they are torch's own."""
            return self._shape.arena if self._shape is not None else None

        @property
        def label(self) -> str:
            """Its shape's name."""
            return self._shape.label if self._shape is not None else ""

        def verify(self, outputs: Any) -> tuple[int, int] | None:
            """Replays twice over shared pages that are filled in two ways, and compares the outputs.

            ``None`` if they are the same; else which one differs, and its first byte that does: the graph relies on what others left.
            Waits for the device. The inputs must be as they are after the replay, and no random numbers drawn.
            """
            if self._shape is None or self._direct is None:
                raise _c.Error("only a graph in an arena can be verified", _c.WRONG_STATE)
            self._shape.arena._settle(self._shape)
            return self._shape.verify(self._piece, list(outputs))

    CUDAGraph.__module__ = base.__module__
    CUDAGraph.__qualname__ = "CUDAGraph"
    return CUDAGraph


class Installed:
    """What was replaced, and how to undo it."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.undo.append(lambda: setattr(owner, name, before))

    def undo_all(self) -> None:
        while self.undo:
            self.undo.pop()()


_installed: Installed | None = None


def put_in_place(cls: type, base: type) -> Installed:
    """Puts a class where torch's is: in torch, and where somebody has imported it by name."""
    import torch

    installed = Installed()
    installed.replace(torch.cuda, "CUDAGraph", cls)
    installed.replace(torch.cuda.graphs, "CUDAGraph", cls)
    for module in list(sys.modules.values()):
        # Not getattr: modules may load others when they are asked.
        if getattr(module, "__dict__", {}).get("CUDAGraph") is base:
            installed.replace(module, "CUDAGraph", cls)
    return installed


def sharing_asked(given: str | None) -> str:
    """What a device's pages can be shared by: what is given, else what the environment says."""
    asked = given if given is not None else os.environ.get("VMMGRAPH_SHARING") or "none"
    if asked not in _c.SHARING:
        raise ValueError(f"sharing is {asked!r}, none of {', '.join(_c.SHARING)}")
    return asked


def enable(
    share: bool = False,
    strict: bool = False,
    *,
    executables: int | None = None,
    executable_bytes: int = 0,
    expected_bytes: int = EXPECTED_BYTES,
    budget: int = 0,
    retain: str = "default",
    memset_kernels: bool = True,
    sharing: str | None = None,
    peers: Sequence[int] = (),
) -> Status:
    """Puts VmmGraph under every graph that is captured from now on: ``torch.cuda.CUDAGraph`` is a subclass that captures into arenas.

    Captures with the same ``pool=`` share an arena, since that is a program's promise that they do not overlap. A capture without one has
    an arena of its own, or, with ``share``, the device's. At most ``executables`` shapes have executables at a time (0: no limit; 16
    unless ``VMMGRAPH_EXECUTABLES`` says otherwise), and ``executable_bytes`` limits what those take; shapes beyond that borrow one
    when they are replayed. ``expected_bytes``, ``budget`` and ``retain`` are those of the arenas that are made (:class:`Arena`). With
    ``memset_kernels`` fill kernels stand in the place of memset nodes. ``sharing`` is what other processes can be given pages by, ``"fd"`` or
    ``"fabric"`` (:mod:`vmmgraph.sharing`; ``VMMGRAPH_SHARING`` unless it is given), and ``peers`` the numbers of other devices that may read all
    pages in this process: of devices that are opened from now on.

    Never raises for a missing library unless ``strict``: it says so in one line, and falls back to torch's MemPools, or leaves torch as
    it is. Called again it does nothing. Returns what it chose.
    """
    global _installed, _status
    if retain not in _c.RETAIN:
        raise ValueError(f"retain is {retain!r}, none of {', '.join(_c.RETAIN)}")
    sharing = sharing_asked(sharing)
    with _lock:
        if _status is not None and _status:
            return _status
        try:
            door = _open_door()
            door.library.torch_install()
        except (_c.Error, OSError, ImportError, AttributeError) as error:
            if strict:
                raise
            _status = _fall_back(str(error))
            return _status
        door.share = share
        door.memset_kernels = memset_kernels
        door.executables = int(os.environ.get("VMMGRAPH_EXECUTABLES") or EXECUTABLES) if executables is None else executables
        door.executable_bytes = executable_bytes
        door.expected_bytes, door.budget, door.retain = expected_bytes, budget, retain
        door.sharing, door.peers = sharing, bits(peers)
        import torch

        from . import _trees

        base = torch.cuda.CUDAGraph
        _installed = put_in_place(graph_class(door, base), base)
        door.pools.install(_installed)
        _installed.undo.append(_trees.keep_out())
        # Last: it is refused while a capture is under way.
        _installed.undo.insert(0, door.library.torch_uninstall)
        atexit.register(_at_exit)
        why = f"torch {torch.__version__}, {door.library.path}"
        _status = Status("blocks", why, str(door.library.path))
        log.info("vmmgraph %s: blocks route, %s", door.library.version(), why)
        return _status


def _fall_back(why: str) -> Status:
    from . import _mempool

    global _installed
    hint = '"python -m vmmgraph build" makes one, VMMGRAPH_LIBRARY names one'
    try:
        _installed = _mempool.install()
    except (_c.Error, OSError, AttributeError, ImportError) as error:
        log.warning("vmmgraph: off, torch's graphs stay as they are: %s (%s)", why, error)
        return Status("none", f"{why}; {error}")
    log.warning("vmmgraph: MemPool route, %s; %s", why, hint)
    return Status("mempool", why)


def status() -> Status | None:
    """What `enable` chose; ``None`` if it was not called."""
    return _status


def disable_all() -> None:
    """Undoes `enable`: graphs that are captured from now on are torch's own. Those that were captured stay as they are."""
    global _installed, _status
    with _lock:
        if _installed is not None:
            _installed.undo_all()
            _installed = None
        _status = None
        atexit.unregister(_at_exit)


def _save_map_at_exit() -> None:
    path = os.environ.get("VMMGRAPH_MAP")
    if path:
        from . import save_map

        with contextlib.suppress(Exception):
            save_map(path.replace("%p", str(os.getpid())))


def _at_exit() -> None:
    # A child that was forked has its parent's graphs too, which are the parent's to drop.
    if _door is not None and _door.process in (None, os.getpid()):
        _save_map_at_exit()
        _door.close()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Captures inside, on this thread, are torch's own."""
    local = _door.local if _door is not None else _none
    local.disabled += 1
    try:
        yield
    finally:
        local.disabled -= 1


_none = Local()


@contextlib.contextmanager
def remote() -> Iterator[None]:
    """What this thread allocates inside, in captures, are buffers that peers use too: those of collectives that NCCL registers. The seal
    of a shape exchanges no page of those that are gone by then. In an arena with ``retain="shared_remote"`` that is the promise that all of
    a capture's are made so; in every other one captures with collectives are sealed in place, marked or not. Without effect outside
    captures, and where graphs are torch's own."""
    library = _door.library if _door is not None else None
    if library is None or not library.has("torch_remote_enter"):
        yield
        return
    library.torch_remote_enter()
    try:
        yield
    finally:
        library.torch_remote_leave()


@contextlib.contextmanager
def eager(arena: Arena, bytes: int | None = None) -> Iterator[None]:
    """Eager work of this thread whose tensors lie on the pages of an arena's graphs: what it makes inside on torch's current stream of now. It
    is in the order of the arena's replays, as one of them: those of other threads wait for its end. So activations take as much as eager work
    or the graphs need, whichever is more. Contents are real: a tensor that is alive at the end stays as it is until it is freed. Replays and
    captures of the arena inside are behind what was made so far. With ``bytes``, the most that it needs at once, pages of the arena that are on
    lease stay there if that does without them. Raises `Error` where an arena is paused, or under capture on this stream."""
    door = need()
    scope = door.eager.begin(arena, bytes)
    try:
        yield
    finally:
        door.eager.end(scope)


@contextlib.contextmanager
def shape(label: str) -> Iterator[None]:
    """Captures inside, on this thread, are the pieces of one shape with this name: they share one space, so that what is live between
    two of them costs no pages of its own. They are replayed in the order of their captures."""
    units = (_door.local if _door is not None else _none).units
    unit = Unit(label)
    units.append(unit)
    try:
        yield
    finally:
        units.remove(unit)
        for arena in list(_door.all_arenas) if _door is not None else []:
            arena._ended(unit)


@contextlib.contextmanager
def graph(
    cuda_graph: Any,
    pool: Pool | None = None,
    stream: Any = None,
    capture_error_mode: str = "global",
    *,
    arena: Arena | None = None,
    label: str = "",
) -> Iterator[None]:
    """``torch.cuda.graph``, with an arena in the place of a pool, and a name for the shape."""
    import torch

    if arena is not None and not hasattr(cuda_graph, "_shape"):
        raise _c.Error("the graph is none of ours: make it after vmmgraph.enable()", _c.WRONG_STATE)
    local = _door.local if _door is not None else _none
    before = local.arena, local.label
    local.arena, local.label = arena, label
    try:
        context = torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode)
        context.__enter__()
    finally:
        local.arena, local.label = before
    with contextlib.ExitStack() as stack:
        stack.push(context.__exit__)
        yield
