"""Torch's allocator settings, pools, IPC and streams, as regions need them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class ExpandableSegments:
    """Disables torch's expandable segments, which cannot be paused, while any thread is inside a
    region, as vLLM does around its pool. Existing segments stay unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        #: Settings to restore; None: expandable segments are off anyway.
        self._on: str | None = None

    @staticmethod
    def _now() -> str:
        """Returns torch's settings, which a program may change at any time."""
        import torch

        get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        if get is not None:
            return str(get())
        snapshot = getattr(torch._C, "_cuda_memorySnapshot", None)
        if snapshot is None:
            return next((text for name in _SETTINGS if (text := os.environ.get(name))), "")
        try:
            # Without traces, where torch has this choice.
            found = snapshot((0, 0, False))
        except (TypeError, RuntimeError):
            found = snapshot(None)
        return next((text for name in _SETTINGS if (text := found["allocator_settings"].get(name))), "")

    @staticmethod
    def _set(text: str) -> None:
        import torch

        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(text)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                now = self._now()
                self._on = now if _EXPANDABLE.search(now) else None
                if self._on is not None:
                    self._set(_EXPANDABLE.sub("expandable_segments:False", now))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and self._on is not None:
                    self._set(self._on)


@contextlib.contextmanager
def allocating_to(device: int, pool: Any) -> Iterator[None]:
    """Makes this thread allocate to torch's pool with this id, without a MemPool object."""
    import torch

    begin_allocating_to(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def begin_allocating_to(device: int, pool: Any) -> None:
    import torch

    begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None) or torch._C._cuda_beginAllocateToPool
    begin(device, pool)


def cuda_is_used() -> bool:
    """Whether this process has used CUDA by torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized()


def begun_last_is_used() -> bool:
    """Whether torch allocates to the pool begun last; up to 2.9 to the one begun first."""
    import torch

    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def explain_sharing() -> None:
    """Explains torch's IPC error: for a region's memory CUDA only reports "invalid argument"."""
    import torch

    storage = getattr(torch, "UntypedStorage", None)
    torchs = getattr(storage, "_share_cuda_", None)
    if torchs is None or hasattr(torchs, "__wrapped__"):
        return

    @functools.wraps(torchs)
    def share_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return torchs(self, *args, **kwargs)
        except RuntimeError as error:
            if "invalid argument" not in str(error):
                raise
            raise RuntimeError(
                f"cannot share the memory at {self.data_ptr():#x} with another process: CUDA exports no handle for it, as for memory of "
                "a region of the memory saver; send a copy that is made outside regions, or inside disable()"
            ) from error

    storage._share_cuda_ = share_cuda


def torch_streams(device: int) -> list[int]:
    """Returns all torch streams of a device. Torch returns a fixed number per priority in turn;
    complete rounds keep its position."""
    import torch

    least, greatest = torch.cuda.Stream.priority_range()
    handles: list[int] = []
    for priority in range(greatest, least + 1):
        seen: list[int] = []
        while len(seen) < 256:
            handle = torch.cuda.Stream(device, priority=priority).cuda_stream
            if handle in seen:
                break
            seen.append(handle)
        for _ in range(len(seen) - 1):
            torch.cuda.Stream(device, priority=priority)
        handles += seen
    return handles
