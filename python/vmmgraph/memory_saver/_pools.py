"""Torch's pools whose memory is in regions."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ._library import Library, MemorySaverError
from ._torch import allocating_to, begin_allocating_to, begun_last_is_used

#: A region's pool is replaced once it caches this many bytes.
_MUCH_UNUSED = 64 << 20
_ILLEGAL_STATE = 401


class PoolUse:
    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]], key: tuple[Any, ...] | None) -> None:
        self.make = make
        #: The region's pool key; None for ordinary memory.
        self.key = key
        self._entered: contextlib.AbstractContextManager[Any] | None = None

    def enter(self) -> None:
        made = self.make()
        made.__enter__()
        self._entered = made

    def leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


class Pools:
    """Torch's pools of regions: one for each tag, policy and device."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pools: dict[tuple[Any, ...], Any] = {}
        #: Open uses by thread.
        self._uses: dict[int, list[PoolUse]] = {}
        self._allocator: Any = None
        #: Pools without further allocations, possibly with live tensors.
        self._retired: list[Any] = []
        #: Devices and pools of `_divert`.
        self._diverted: list[tuple[int, Any]] = []
        self._lock = threading.Lock()

    def pool(self, key: tuple[Any, ...]) -> Any:
        """Per tag, policy and device: a segment has one tag."""
        import torch

        with self._lock:
            if key not in self._pools:
                if self._library.mode == "preload":
                    self._pools[key] = torch.cuda.MemPool()
                else:
                    if self._allocator is None:
                        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
                            self._library.path, "tms_torch_malloc", "tms_torch_free"
                        )
                    self._pools[key] = torch.cuda.MemPool(self._allocator.allocator())
            return self._pools[key]

    def _empty_cache(self) -> None:
        """During a capture a free would break the capture, so the next call does it."""
        import torch

        if not self._library.c.tms_is_capturing():
            torch.cuda.empty_cache()

    def _take(self, keys: Iterable[tuple[Any, ...]]) -> list[tuple[int, Any]]:
        """Takes pools away from later regions, and returns them by device. Call with the lock."""
        taken = [(key[-1], self._pools.pop(key)) for key in list(keys)]
        self._retired += [pool for _, pool in taken]
        return taken

    @staticmethod
    def _release(device: int, pool: Any) -> None:
        """Tensors of the pool stay, and its cached memory can be freed. Torch's destructor has the
        same effect, but aborts if any thread allocates to any pool (torch 2.6 to 2.15)."""
        import torch

        # Up to torch 2.7 a released pool passes its segments to cudaFree, which does not know them.
        if not hasattr(torch.cuda.memory, "MemPoolContext"):
            # Never destroyed: the destructor would release the pool a second time.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
            torch._C._cuda_releasePool(device, pool.id)

    def retire_if_unused(self, key: tuple[Any, ...]) -> None:
        """Retires a region's pool with much cached memory, as after quantizing weights while
        loading."""
        with self._lock:
            pool = self._pools.get(key)
        if pool is None:
            return
        unused = sum(segment["total_size"] for segment in pool.snapshot() if segment["active_size"] == 0)
        if unused >= _MUCH_UNUSED:
            with self._lock:
                taken = self._take([key] if self._pools.get(key) is pool else [])
            for each in taken:
                self._release(*each)
            self._empty_cache()

    def retire(self, tag: str | None, plain: bool = False) -> None:
        """Retires the pools of a tag, or all, before a pause: cached memory is freed instead of
        paused. Regions open on this thread continue with new pools.

        `plain`: so does memory outside regions, until `end_diversion`. Raises `MemorySaverError`,
        without effect, if another thread can allocate paused memory.
        """
        me = threading.get_ident()

        def covered(use: PoolUse) -> bool:
            return plain or (use.key is not None and tag in (None, use.key[0]))

        with self._lock:
            others = [thread for thread, uses in self._uses.items() if thread != me and any(map(covered, uses))]
            # Regions that begin from here on have new pools.
            taken = self._take([] if others else [key for key in self._pools if tag in (None, key[0])])
        if others:
            raise MemorySaverError(
                f"cannot pause {'all memory' if tag is None else f'tag {tag!r}'}",
                _ILLEGAL_STATE,
                f"thread {others[0]} is inside a region and could allocate paused memory; pause after its region ends",
            )
        uses = self._uses.get(me, [])
        left = uses[next((place for place, use in enumerate(uses) if covered(use)), len(uses)) :]
        # In reverse order, since torch uses the pool begun last.
        for use in reversed(left):
            use.leave()
        try:
            for each in taken:
                self._release(*each)
            if plain:
                self.end_diversion()
            if plain or self._retired:
                self._empty_cache()
            if plain:
                self._divert()
        finally:
            for use in left:
                use.enter()

    @property
    def diverted(self) -> bool:
        return bool(self._diverted)

    def _divert(self) -> None:
        """Makes all threads allocate to new pools, because torch's default pool caches memory that
        is about to be paused."""
        import torch

        if not begun_last_is_used() or self._library.c.tms_is_capturing():
            return
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):
                pool = torch.cuda.graph_pool_handle()
                torch._C._cuda_beginAllocateToPool(device, pool)
                self._diverted.append((device, pool))

    def end_diversion(self) -> None:
        """Tensors of the pools stay."""
        import torch

        while self._diverted:
            device, pool = self._diverted.pop()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)

    @contextlib.contextmanager
    def use(self, use: PoolUse) -> Iterator[None]:
        me = threading.get_ident()
        try:
            with self._lock:
                self._uses.setdefault(me, []).append(use)
            use.enter()
            yield
        finally:
            with self._lock:
                uses = self._uses.get(me, [])
                if use in uses:
                    uses.remove(use)
                if not uses:
                    self._uses.pop(me, None)
            use.leave()

    @contextlib.contextmanager
    def ordinary_memory(self) -> Iterator[None]:
        """Allocations of this thread come from cudaMalloc, in a pool released afterwards."""
        import torch

        device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
        # Keeps the pool alive while a pause leaves and re-enters it.
        begin_allocating_to(device, pool)
        torch._C._cuda_endAllocateToPool(device, pool)
        try:
            with self.use(PoolUse(lambda: allocating_to(device, pool), None)):
                yield
        finally:
            torch._C._cuda_releasePool(device, pool)
            self._empty_cache()

    def has(self, segment: Any) -> bool:
        """Whether a segment of torch's snapshot belongs to a pool of regions."""
        with self._lock:
            return any(tuple(segment["segment_pool_id"]) == tuple(pool.id) for pool in (*self._pools.values(), *self._retired))

    def segment_bytes(self) -> int:
        import torch

        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if self.has(segment))
