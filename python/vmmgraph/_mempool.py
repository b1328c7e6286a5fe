"""MemPool route: unmodified torch with a MemPool per capture, and the library without torch.

Needs no library for a torch release. Saves less, because it sees segments instead of tensors.
Memory is returned only with the arena, after all graphs of a pool are gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from ctypes import byref
from typing import Any

from . import _base, _c, _core
from ._patch import put_in_place

log = logging.getLogger("vmmgraph")


def possible() -> str | None:
    """Returns the reason why the installed torch cannot use this route; ``None`` if possible."""
    import os

    import torch

    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    if not all(hasattr(torch.cuda, name) for name in ("MemPool", "CUDAGraph")):
        return f"torch {torch.__version__} has no MemPools"
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native")()
    if backend != "native":
        return f"torch's allocator is {backend}, which has no MemPools"
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if "expandable_segments:true" in settings.replace(" ", "").lower() and release < (2, 10):
        return f"expandable_segments is on, which keeps MemPools of torch {torch.__version__} from their allocators"
    return None


class PoolArena:
    #: Class default: ``__del__`` may run before ``__init__`` is done.
    handle = turn = _c.Handle()

    def __init__(self, library: _c.Library, device: int) -> None:
        from ._arena import device_of

        self.library = library
        self.handle = _c.Handle(library.raw["arena_destroy"])
        self.device = device_of(library, device)
        library.arena_create(self.device.handle, byref(_c.ArenaOptions(retain=_c.RETAIN["shared_pages"])), byref(self.handle))
        #: An empty sealed space: entering and leaving it orders a replay.
        self.turn = _c.Handle(library.raw["space_destroy"])
        library.space_open(self.handle, byref(self.turn))
        library.space_seal(self.turn, 0, None)

    def __del__(self) -> None:
        if self.handle:
            self.turn.end()
            self.handle.end()
            self.library.raw["device_trim"](self.device.handle, None)


def graph_class(library: _c.Library, base: type) -> type:
    import torch

    plug = torch.cuda.memory.CUDAPluggableAllocator(str(library.path), "vmmgraph_torch_alloc", "vmmgraph_torch_free")
    arenas: weakref.WeakValueDictionary[tuple[int, tuple[int, int]], PoolArena] = weakref.WeakValueDictionary()
    lock = threading.RLock()
    raw = library.raw
    # Pools without graphs: torch can destroy a pool only while no capture runs.
    graves: list[Any] = []
    # Running captures: device numbers for arena captures, tokens for captures in torch's memory.
    under_way: set[object] = set()

    def bury(mempool: Any = None) -> None:
        with lock:
            if mempool is not None:
                graves.append(mempool)
            if not under_way:
                graves.clear()

    def arena_for(graph: Captured, device: int, asked: tuple[int, int]) -> PoolArena | None:
        """Returns the arena for the beginning capture; ``None`` while a capture uses the device."""
        with lock:
            if device in under_way:
                graph._capturing = object()
                under_way.add(graph._capturing)
                return None
            arena = arenas.get((device, asked))
            if arena is None:
                arena = arenas[device, asked] = PoolArena(library, device)
            library.arena_mark(arena.handle)
            library.arena_switch_to_new_virtual_space(arena.handle)
            library.torch_set_arena(device, arena.handle)
            graph._capturing = device
            under_way.add(device)
            return arena

    class Captured(_base.core_of(base)):  # type: ignore[misc]
        """Torch's C++ graph, capturing into MemPools over an arena."""

        _arena: PoolArena | None = None
        _mempool: Any = None
        _capturing: object = None
        _asked: tuple[int, int] | None = None

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            from . import _session

            if _session.thread_state().disabled:
                return super().capture_begin(*args, **kwargs)
            asked = args[0] if args else kwargs.get("pool")
            # From torch 2.14 on the argument may be a pool object.
            asked = getattr(asked, "id", asked)
            asked = tuple(torch.cuda.graph_pool_handle()) if asked is None or not any(asked) else tuple(asked)
            device = torch.cuda.current_device()
            bury()
            # A signal's exception may occur between any two steps.
            try:
                arena = arena_for(self, device, asked)
                if arena is None:
                    log.warning(
                        "vmmgraph: a capture in torch's own memory: another one of the MemPool route is under way on its device"
                    )
                    return super().capture_begin(*args, **kwargs)
                kwargs.pop("pool", None)
                mempool = torch.cuda.MemPool(plug.allocator())
                # Otherwise the next graph would use a cuBLAS workspace on this graph's pages.
                torch._C._cuda_clearCublasWorkspaces()
                super().capture_begin(mempool.id, *args[1:], **kwargs)
            except BaseException:
                self._end()
                raise
            self._arena, self._mempool, self._asked = arena, mempool, asked

        def capture_end(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().capture_end(*args, **kwargs)
            finally:
                self._ended()

        def capture_end_pre(self) -> None:
            """Called by torch's `capture_end` from 2.14 on, or by the program."""
            try:
                super().capture_end_pre()
            finally:
                self._ended()

        def _ended(self) -> None:
            if self._end() and self._arena is not None:
                torch._C._cuda_clearCublasWorkspaces()

        def _end(self) -> bool:
            """Ends the capture. Returns whether one was running."""
            capturing, self._capturing = self._capturing, None
            under_way.discard(capturing)
            return capturing is not None

        def replay(self) -> None:
            arena = self._arena
            if arena is None:
                return super().replay()
            status = None
            try:
                status = raw["space_enter"](arena.turn, torch.cuda.current_stream(arena.device.number).cuda_stream)
                if status == _c.OK:
                    super().replay()
            finally:
                if not status:
                    raw["space_leave"](arena.turn)
            if status:
                library.fail("space_enter", status)

        def pool(self) -> Any:
            return self._asked if self._asked is not None else super().pool()

        def reset(self, *args: Any, **kwargs: Any) -> None:
            super().reset(*args, **kwargs)
            self._end()
            mempool, self._mempool = self._mempool, None
            self._asked = None
            # After the graph, which uses the pool, and before the arena.
            bury(mempool)
            del mempool
            self._arena = None

        def _let_go(self) -> None:
            try:
                if self._mempool is not None:
                    self.reset()
            finally:
                self._end()

    class CUDAGraph(*_base.over(base, Captured, "capture_end_pre")):  # type: ignore[misc]
        """``torch.cuda.CUDAGraph`` with captures in MemPools over an arena."""

    return _base.in_place_of(base, CUDAGraph)


def install() -> Any:
    """Installs the class in torch. Raises `Error` if this route is impossible."""
    why = possible()
    if why is not None:
        raise _c.Error(why, _c.WRONG_STATE)
    import torch

    from . import _trees

    library = _core.any_one()
    base = torch.cuda.CUDAGraph
    installed = put_in_place(graph_class(library, base), base)
    with contextlib.suppress(Exception):
        installed.undo.append(_trees.keep_out())
    return installed
