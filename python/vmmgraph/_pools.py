"""Eager work in arenas, and the program's ``MemPool`` as one.

An engine may run its model once within ``torch.cuda.use_mem_pool(pool)`` and then capture it with ``pool=pool.id``, so that the capture is given
what the eager run has left in the pool (transformers' continuous batching). The same here: from its first capture on such a pool is an arena,
and eager work in it a scope of that, so that both lie on the same pages.

That is so for pools that were made without an allocator or an option of their own after `vmmgraph.enable`, and that hold nothing alive at their
first capture. Every other one stays torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _c

if TYPE_CHECKING:
    from ._arena import Arena
    from ._door import Door
    from ._enable import Installed

Pool = tuple[int, int]
#: The attribute by which a pool of the program's holds its arenas, by device.
_ARENAS = "_vmmgraph_arenas"


class Scope:
    """Eager work of one thread in an arena."""

    def __init__(self, arena: Arena, most: int | None) -> None:
        self.arena = arena
        #: Bytes that it needs at once at most; ``None``: not said.
        self.most = most
        self.thread = threading.get_ident()
        self.entered = False
        self.over = False


class Scopes(threading.local):
    """Those of one thread, the innermost last."""

    def __init__(self) -> None:
        self.all: list[Scope] = []


class Eager:
    """Scopes of eager work."""

    def __init__(self, library: _c.Library) -> None:
        self.library = library
        self.scopes = Scopes()
        #: Reentrant, since a collector may end a scope at any time.
        self.lock = threading.RLock()

    def _enter(self, scope: Scope) -> int:
        try:
            # Eager work would overwrite what the program wrote to tensors of a capture that is not sealed.
            scope.arena._settle(None)
        except _c.Error as error:
            return error.status
        try:
            if scope.most is None:
                status = self.library.raw["torch_eager_enter"](scope.arena.handle)
            else:
                status = self.library.raw["torch_eager_enter_of"](scope.arena.handle, scope.most)
            scope.entered = status == _c.OK
        except BaseException:
            # A signal's comes as the call returns, whatever it did.
            self._leave(scope)
            raise
        if scope.over:
            self._leave(scope)
        return status

    def _leave(self, scope: Scope) -> None:
        """On its thread, as often as one likes."""
        with self.lock:
            self.library.raw["torch_eager_leave_of"](scope.arena.handle)
            scope.entered = False

    def begin(self, scope: Scope) -> None:
        """Raises `Error` where it is refused. It is to be ended in either case."""
        name = "torch_eager_enter" if scope.most is None else "torch_eager_enter_of"
        if not self.library.has(name) or not self.library.has("torch_eager_leave_of"):
            raise _c.Error(f"{self.library.path} has no such eager scopes", _c.WRONG_STATE)
        self._forget()
        self.scopes.all.append(scope)
        status = self._enter(scope)
        if status != _c.OK:
            self.library.fail(name, status)

    def end(self, scope: Scope) -> None:
        """On any thread: a generator may be closed by another one than its own, and replays would wait for ever."""
        try:
            self._end(scope)
        except BaseException:
            # A signal's, between two steps.
            self._end(scope)
            raise

    def _end(self, scope: Scope) -> None:
        scope.over = True
        if scope in self.scopes.all:
            if scope.entered:
                self._leave(scope)
            self.scopes.all.remove(scope)
        elif self.library.has("torch_eager_end"):
            with self.lock:
                if scope.entered:
                    scope.entered = False
                    self.library.raw["torch_eager_end"](scope.arena.handle)

    def _forget(self) -> None:
        """Those of this thread that others have ended."""
        self.scopes.all[:] = [scope for scope in self.scopes.all if not scope.over]

    def step_out(self, arena: Arena) -> list[Scope]:
        """This thread is about to replay or capture in the arena, which its scopes of it would refuse: ends them, and those inside them. What
        they have made stays."""
        stack = self.scopes.all
        first = next((place for place, scope in enumerate(stack) if scope.arena is arena and scope.entered), len(stack))
        left = [scope for scope in stack[first:] if scope.entered]
        for scope in reversed(left):
            self._leave(scope)
        return left

    def step_in(self, left: Sequence[Scope]) -> None:
        """That is done: begins them again. Where that is refused the rest of the work is in torch's memory."""
        for scope in left:
            # A capture may end on another thread, or never.
            if not scope.over and not scope.entered and scope.thread == threading.get_ident():
                self._enter(scope)


class Pools:
    """``MemPool`` and ``use_mem_pool`` of torch's, and what stands over them."""

    def __init__(self, door: Door) -> None:
        self.door = door
        #: Those that may become arenas.
        self.plain: weakref.WeakValueDictionary[Pool, Any] = weakref.WeakValueDictionary()

    def install(self, installed: Installed) -> None:
        """Puts them over torch's; nothing where torch has none, or the library no eager scopes."""
        import torch

        kind = getattr(torch.cuda, "MemPool", None)
        torchs = getattr(torch.cuda, "use_mem_pool", None)
        if kind is None or torchs is None or not self.door.library.has("torch_pool_empty"):
            return
        make = kind.__init__

        def init(pool: Any, *args: Any, **kwargs: Any) -> None:
            make(pool, *args, **kwargs)
            if not any(args) and not any(kwargs.values()):
                # No weak references to it, or no number: it stays torch's.
                with contextlib.suppress(TypeError, AttributeError):
                    self.plain[_id(pool)] = pool

        @contextlib.contextmanager
        def use_mem_pool(pool: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            scope = self.scope(pool, args[0] if args else kwargs.get("device"))
            try:
                with contextlib.nullcontext() if self.begun(scope) else torchs(pool, *args, **kwargs):
                    yield
            finally:
                if scope is not None:
                    self.door.eager.end(scope)

        init.__doc__, init.__wrapped__ = make.__doc__, make  # type: ignore[attr-defined]
        use_mem_pool.__doc__ = torchs.__doc__
        installed.replace(kind, "__init__", init)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("use_mem_pool") is torchs:
                installed.replace(module, "use_mem_pool", use_mem_pool)

    def arena(self, device: int, pool: Pool, tag: str = "") -> Arena | None:
        """The arena that is in the place of a pool which is about to be captured into, made with the tag; ``None``: it is torch's."""
        mempool = self.plain.get(pool)
        if mempool is None:
            return None
        with self.door.lock:
            arenas = vars(mempool).setdefault(_ARENAS, {})
            if device not in arenas:
                status = self.door.library.raw["torch_pool_empty"](device, *pool)
                if status == _c.INTERNAL:
                    # Torch would end the process with it.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mempool))
                elif status != _c.OK:
                    return None
                arenas[device] = self.door.make(device, tag)
            return arenas[device]

    def scope(self, pool: Any, device: Any) -> Scope | None:
        """For eager work in what has become of a pool; ``None``: it is torch's."""
        arenas = getattr(pool, _ARENAS, None)
        if not arenas or self.door.local.disabled:
            return None
        arena = arenas.get(self.door.device_number(device))
        return Scope(arena, None) if arena is not None else None

    def begun(self, scope: Scope | None) -> bool:
        """Begins it; whether that could be."""
        if scope is None:
            return False
        try:
            self.door.eager.begin(scope)
        except _c.Error as error:
            self.door.once("eager", f"eager work of a MemPool in torch's own memory: {error}")
            return False
        return True


def _id(pool: Any) -> Pool:
    first, second = pool.id
    return int(first), int(second)
