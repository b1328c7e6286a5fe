"""The saver behind `TorchMemorySaver`: regions, arenas with a tag, and the streams to watch."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

from ._library import CAPTURING, BinaryWrapper, HookMode, Library, MemorySaverError, preloaded
from ._pools import Pools, PoolUse
from ._torch import ExpandableSegments, cuda_is_used, explain_sharing, torch_streams


class Settings:
    """Settings of a thread's next allocations: saves and restores them."""

    def __init__(self, c: Any) -> None:
        self.interesting = c.tms_get_interesting_region()
        self.tag = c.tms_get_current_tag()
        self.backup = c.tms_get_enable_cpu_backup()
        self.disk = c.tms_get_enable_disk_backup()
        self.backend = c.tms_get_cpu_backup_backend()

    def put_back(self, c: Any) -> None:
        c.tms_set_current_tag(self.tag)
        c.tms_set_enable_cpu_backup(self.backup)
        c.tms_set_enable_disk_backup(self.disk)
        c.tms_set_cpu_backup_backend(self.backend)
        c.tms_set_interesting_region(self.interesting)


def _choose_core() -> None:
    from .. import _c, _core

    # Without a core in the package, the C functions search the folder of their own library.
    with contextlib.suppress(_c.Error, OSError, AttributeError):
        _core.any_one()


class Saver:
    def __init__(self, hook_mode: HookMode = "preload") -> None:
        _choose_core()
        self.library = Library(hook_mode)
        self.c = self.library.c
        self.pools = Pools(self.library)
        #: Tag of memory outside regions, under TMS_INIT_ENABLE.
        self._plain_tag = self.c.tms_get_current_tag().decode() if preloaded() and self.c.tms_get_interesting_region() else None
        self._expandable_segments = ExpandableSegments()
        self._watched: set[int] = set()
        #: Arena of `graph_pool`, by tag and device.
        self._graph_arenas: dict[tuple[str, int], Any] = {}
        if self._plain_tag is not None and "torch" in sys.modules:
            explain_sharing()

    @property
    def _binary_wrapper(self) -> BinaryWrapper:
        return self.library.binary_wrapper

    def arena_of(self, graph: Any, pool: Any, tag: str) -> Any:
        """Returns the arena for captures of a graph, or of a class of graphs; None for torch's
        memory."""
        import torch

        from .. import _session

        session = _session.opened()
        if _session.thread_state().disabled:
            return None
        if hasattr(graph, "_mempool"):
            raise RuntimeError(
                "cannot capture a graph under a tag: the MemPool route of vmmgraph.enable() has arenas that are not paused; capture it "
                "within vmmgraph.disabled()"
            )
        if session is None or not hasattr(graph, "_named"):
            return None
        device, pool = torch.cuda.current_device(), getattr(pool, "id", pool)
        named = None if pool is None or not any(pool) else (int(pool[0]), int(pool[1]))
        arena = session.tagged_arena(device, named, tag)
        self.library.check("cuda_graph", self.c.tms_include_arenas(tag.encode(), device))
        return arena

    @contextlib.contextmanager
    def graph_pool(self, tag: str, backup: bool) -> Iterator[Any]:
        """Yields a pool id for captures of this thread, whose memory has the tag."""
        import torch

        device = torch.cuda.current_device()
        known = self._graph_arenas.get((tag, device))
        arena = self.arena_of(torch.cuda.CUDAGraph, known and known.pool, tag)
        if arena is not None:
            self._graph_arenas[tag, device] = arena
            yield arena.pool
            return
        with self._expandable_segments.off(), self.settings(tag, backup, None):
            # Own key: torch refuses a capture into a pool that a thread allocates to.
            yield self.pools.pool((tag, backup, "graphs", device)).id

    def pause(self, tag: str | None) -> None:
        self.watch_torchs_streams()
        self._seal_arenas(tag)
        diverted = self.pools.diverted
        self.pools.retire(tag, self._covers_plain(tag))
        try:
            self.library.check(f"pause({tag!r})", self.c.tms_pause(tag.encode() if tag else None))
        except MemorySaverError as error:
            if error.code == CAPTURING and not diverted:
                self.pools.end_diversion()
            raise

    def resume(self, tag: str | None) -> None:
        self.library.check(f"resume({tag!r})", self.c.tms_resume(tag.encode() if tag else None))
        if self._covers_plain(tag):
            self.pools.end_diversion()

    def has(self, segment: Any) -> bool:
        """Whether a segment of torch's snapshot is in a region."""
        return self._plain_tag is not None or self.pools.has(segment)

    def _covers_plain(self, tag: str | None) -> bool:
        return self._plain_tag is not None and tag in (None, self._plain_tag) and cuda_is_used()

    @staticmethod
    def _seal_arenas(tag: str | None) -> None:
        """An arena with an open graph group cannot be paused."""
        from .. import _session

        for arena in _session.arenas():
            if arena.tag and tag in (None, arena.tag):
                arena.seal()

    def watch_torchs_streams(self) -> None:
        """Passes torch's own streams, a fixed number, to the library, which then detects captures
        on them."""
        if self.library.mode == "preload" or "torch" not in sys.modules:
            return
        import torch

        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        for device in range(torch.cuda.device_count()):
            if device not in self._watched and torch._C._cuda_hasPrimaryContext(device):
                found = torch_streams(device)
                self.library.check(
                    "watching torch's streams", self.c.tms_watch_streams((ctypes.c_void_p * len(found))(*found), len(found))
                )
                self._watched.add(device)

    @contextlib.contextmanager
    def settings(self, tag: str, backup: bool, backend: str | None, disk: bool = False) -> Iterator[None]:
        before = Settings(self.c)
        try:
            self.c.tms_set_current_tag(tag.encode())
            self.c.tms_set_enable_cpu_backup(backup)
            self.c.tms_set_enable_disk_backup(disk)
            if backend is not None:
                self.c.tms_set_cpu_backup_backend(backend.encode())
            self.c.tms_set_interesting_region(True)
            yield
        finally:
            before.put_back(self.c)

    @contextlib.contextmanager
    def region(self, tag: str, backup: bool, backend: str | None, disk: bool) -> Iterator[None]:
        import torch

        self.watch_torchs_streams()
        explain_sharing()
        key = (tag, backup, backend, disk, torch.cuda.current_device())
        use = PoolUse(lambda: torch.cuda.use_mem_pool(self.pools.pool(key)), key)
        try:
            with self._expandable_segments.off(), self.pools.use(use), self.settings(tag, backup, backend, disk):
                yield
        finally:
            # The program may first use the device inside the region.
            self.watch_torchs_streams()
            self.pools.retire_if_unused(key)
