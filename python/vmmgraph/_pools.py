"""Eager work in arenas, and a program's ``MemPool`` as an arena.

An engine may run its model within ``torch.cuda.use_mem_pool(pool)`` and then capture with
``pool=pool.id``, to reuse the eager run's memory (transformers' continuous batching). Here the pool
becomes an arena at its first capture, and eager work in the pool an eager scope on the same pages.

Applies to pools made after `vmmgraph.enable`, without allocator or options, and without live
tensors at their first capture.
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
    from ._enable import Installed
    from ._session import Session

Pool = tuple[int, int]
_ARENAS = "_vmmgraph_arenas"


class Scope:
    def __init__(self, arena: Arena, most: int | None) -> None:
        self.arena = arena
        #: Maximum bytes needed at once; ``None``: unknown.
        self.most = most
        self.thread = threading.get_ident()
        self.entered = False
        self.over = False


class Scopes(threading.local):
    def __init__(self) -> None:
        self.all: list[Scope] = []


class Eager:
    def __init__(self, library: _c.Library) -> None:
        self.library = library
        self.scopes = Scopes()
        #: Reentrant, since the garbage collector may end a scope at any time.
        self.lock = threading.RLock()

    def _enter(self, scope: Scope) -> int:
        try:
            # Eager work would overwrite contents of an unsealed capture.
            scope.arena._seal_open(None)
        except _c.Error as error:
            return error.status
        try:
            if scope.most is None:
                status = self.library.raw["torch_eager_enter"](scope.arena.handle)
            else:
                status = self.library.raw["torch_eager_enter_of"](scope.arena.handle, scope.most)
            scope.entered = status == _c.OK
        except BaseException:
            self._leave(scope)
            raise
        if scope.over:
            self._leave(scope)
        return status

    def _leave(self, scope: Scope) -> None:
        """Leaves the scope on its thread. May be called repeatedly."""
        with self.lock:
            self.library.raw["torch_eager_leave_of"](scope.arena.handle)
            scope.entered = False

    def begin(self, scope: Scope) -> None:
        """Raises `Error` if refused. Call `end` in either case."""
        name = "torch_eager_enter" if scope.most is None else "torch_eager_enter_of"
        self._forget()
        self.scopes.all.append(scope)
        status = self._enter(scope)
        if status != _c.OK:
            self.library.fail(name, status)

    def end(self, scope: Scope) -> None:
        """On any thread: a generator may be closed by a different thread, and replays would wait
        forever."""
        try:
            self._end(scope)
        except BaseException:
            self._end(scope)
            raise

    def _end(self, scope: Scope) -> None:
        scope.over = True
        if scope in self.scopes.all:
            if scope.entered:
                self._leave(scope)
            self.scopes.all.remove(scope)
        else:
            with self.lock:
                if scope.entered:
                    scope.entered = False
                    self.library.raw["torch_eager_end"](scope.arena.handle)

    def _forget(self) -> None:
        """Drops scopes of this thread that other threads have ended."""
        self.scopes.all[:] = [scope for scope in self.scopes.all if not scope.over]

    def step_out(self, arena: Arena) -> list[Scope]:
        """Leaves this thread's scopes of the arena, and inner scopes, before a replay or capture.
        Returns them for `step_in`."""
        stack = self.scopes.all
        first = next((place for place, scope in enumerate(stack) if scope.arena is arena and scope.entered), len(stack))
        left = [scope for scope in stack[first:] if scope.entered]
        for scope in reversed(left):
            self._leave(scope)
        return left

    def step_in(self, left: Sequence[Scope]) -> None:
        """Enters the scopes again; if refused, the work continues in torch's memory."""
        for scope in left:
            # A capture may end on a different thread, or never.
            if not scope.over and not scope.entered and scope.thread == threading.get_ident():
                self._enter(scope)


class Pools:
    """Replacements of torch's ``MemPool`` and ``use_mem_pool``."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.plain: weakref.WeakValueDictionary[Pool, Any] = weakref.WeakValueDictionary()

    def install(self, installed: Installed) -> None:
        """Does nothing if torch has no pools."""
        import torch

        kind = getattr(torch.cuda, "MemPool", None)
        torchs = getattr(torch.cuda, "use_mem_pool", None)
        if kind is None or torchs is None:
            return
        make = kind.__init__

        def init(pool: Any, *args: Any, **kwargs: Any) -> None:
            make(pool, *args, **kwargs)
            if not any(args) and not any(kwargs.values()):
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
                    self.session.eager.end(scope)

        init.__doc__, init.__wrapped__ = make.__doc__, make  # type: ignore[attr-defined]
        use_mem_pool.__doc__ = torchs.__doc__
        installed.replace(kind, "__init__", init)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("use_mem_pool") is torchs:
                installed.replace(module, "use_mem_pool", use_mem_pool)

    def arena(self, device: int, pool: Pool, tag: str = "") -> Arena | None:
        """Returns the arena replacing a pool at its first capture; ``None`` if the pool stays
        torch's."""
        mempool = self.plain.get(pool)
        if mempool is None:
            return None
        with self.session.lock:
            arenas = vars(mempool).setdefault(_ARENAS, {})
            if device not in arenas:
                status = self.session.library.raw["torch_pool_empty"](device, *pool)
                if status == _c.INTERNAL:
                    # Torch would terminate the process when destroying the pool.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mempool))
                elif status != _c.OK:
                    return None
                arenas[device] = self.session.make(device, tag)
            return arenas[device]

    def scope(self, pool: Any, device: Any) -> Scope | None:
        arenas = getattr(pool, _ARENAS, None)
        if not arenas or self.session.thread_state.disabled:
            return None
        arena = arenas.get(self.session.device_number(device))
        return Scope(arena, None) if arena is not None else None

    def begun(self, scope: Scope | None) -> bool:
        """Begins the scope. Returns whether it succeeded."""
        if scope is None:
            return False
        try:
            self.session.eager.begin(scope)
        except _c.Error as error:
            self.session.once("eager", f"eager work of a MemPool in torch's own memory: {error}")
            return False
        return True


def _id(pool: Any) -> Pool:
    first, second = pool.id
    return int(first), int(second)
