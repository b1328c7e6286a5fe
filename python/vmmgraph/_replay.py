"""Computes the memory of captures without a GPU: replays a trace's allocations and frees in an
arena on the host driver."""

from __future__ import annotations

import bisect
import resource
from collections.abc import Callable
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

from . import _c
from ._traces import MAX_BYTES, Trace

_MIB = 1 << 20
_GRANULE = 512
_LEAST_DEVICE_BYTES = 8 << 30


@dataclass
class Cost:
    captures: int
    allocations: int
    #: Lower bound, and the label of its capture: peak live bytes plus bytes left alive by others.
    floor_bytes: int
    largest: str
    peaks_bytes: int
    #: Reserved bytes of torch's allocator with one pool per capture.
    private_bytes: int
    #: Bytes of the arena at the end, and at its maximum.
    held_bytes: int
    most_held_bytes: int
    retained_bytes: int
    #: Map calls of the driver in all captures.
    maps: int


def _rounded(size: int) -> int:
    return -(-size // _GRANULE) * _GRANULE


def floors(trace: Trace) -> tuple[int, int, int, int]:
    """Returns the lower bound, its capture, the sum of all peaks, and the bytes left alive."""
    sizes: dict[int, int] = {}
    peaks, kept = [], []
    for capture in trace.captures:
        live: dict[int, int] = {}
        now = peak = 0
        for block, size in capture.steps:
            if size >= 0:
                live[block] = sizes[block] = _rounded(size)
                now += live[block]
                peak = max(peak, now)
            elif block in live:
                now -= live.pop(block)
        peaks.append(peak)
        kept.append(now)
    left = sum(kept)
    need = [peak - own + left for peak, own in zip(peaks, kept, strict=True)]
    most = max(range(len(need)), key=need.__getitem__)
    return need[most], most, sum(peaks), left


class TorchPool:
    """Reserved memory of torch's caching allocator for one graph: segment and best-fit rules of the
    native backend, 2.6 to 2.11.

    Sizes are rounded to 512 bytes. Up to 1 MiB: segments of 2 MiB; up to 10 MiB: segments of 20
    MiB; above: separate segments rounded up to 2 MiB. An allocation takes the smallest free piece
    that fits, and splits it if the rest is usable. Free neighbours are merged.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._segments = 0
        #: Free pieces of small and of large segments as (bytes, segment, start), sorted; and all
        #: free pieces by (segment, start).
        self._free: tuple[list[tuple[int, int, int]], ...] = ([], [])
        self._ends: tuple[dict[tuple[int, int], tuple[int, int, int]], ...] = ({}, {})
        self._live: dict[int, tuple[int, int, int, int]] = {}

    def allocate(self, block: int, size: int) -> None:
        size = _rounded(size)
        large = size > _MIB
        free = self._free[large]
        at = bisect.bisect_left(free, (size, 0, 0))
        if at < len(free):
            length, segment, start = free[at]
            self._take(large, free[at])
        else:
            length = 2 * _MIB if not large else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
            self._segments += 1
            segment, start = self._segments, 0
            self.reserved_bytes += length
        if length - size >= _GRANULE if not large else length - size > _MIB:
            self._give(large, (length - size, segment, start + size))
            length = size
        self._live[block] = (large, length, segment, start)

    def free(self, block: int) -> None:
        large, length, segment, start = self._live.pop(block)
        ends = self._ends[large]
        # `ends` has each free piece by its start and, as a negative number, by its end.
        behind = ends.get((segment, start + length))
        if behind is not None:
            self._take(large, behind)
            length += behind[0]
        before = ends.get((segment, -start - 1))
        if before is not None:
            self._take(large, before)
            length, start = length + before[0], before[2]
        self._give(large, (length, segment, start))

    def _give(self, large: int, piece: tuple[int, int, int]) -> None:
        length, segment, start = piece
        bisect.insort(self._free[large], piece)
        self._ends[large][segment, start] = self._ends[large][segment, -(start + length) - 1] = piece

    def _take(self, large: int, piece: tuple[int, int, int]) -> None:
        length, segment, start = piece
        del self._free[large][bisect.bisect_left(self._free[large], piece)]
        del self._ends[large][segment, start], self._ends[large][segment, -(start + length) - 1]


def private_bytes(trace: Trace) -> int:
    total = 0
    for capture in trace.captures:
        pool, own = TorchPool(), set()
        for block, size in capture.steps:
            if size >= 0:
                pool.allocate(block, size)
                own.add(block)
            elif block in own:
                pool.free(block)
        total += pool.reserved_bytes
    return total


class Run:
    """An arena on the host driver with a trace's captures. Its memory is freed with this object."""

    def __init__(
        self,
        library: _c.Library,
        trace: Trace,
        *,
        kept: bool = False,
        expected_bytes: int = 0,
        events: str = "none",
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.library = library
        self._device, self._arena = c_void_p(), c_void_p()
        self._spaces: list[c_void_p] = []
        floor, most, peaks, left = floors(trace)
        progress("torch's pools")
        private = private_bytes(trace)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
        device_bytes = min(max(_LEAST_DEVICE_BYTES, 4 * (floor + left)), MAX_BYTES)
        library.device_open(byref(_c.DeviceOptions(driver=2, host_memory_bytes=device_bytes)), byref(self._device))
        library.arena_create(self._device, byref(_c.ArenaOptions(expected_bytes=expected_bytes)), byref(self._arena))
        stays = _left_alive(trace) if kept else set()
        live: dict[int, tuple[c_void_p, int]] = {}
        # Called for every block, so without the checked wrappers.
        take, take_kept, give = (library.raw[name] for name in ("space_allocate", "space_allocate_kept", "space_free"))
        address, stats, report = c_void_p(), _c.ArenaStats(), _c.SealReport()
        most_held = maps = 0
        for number, capture in enumerate(trace.captures):
            progress(f"capture {number + 1} of {len(trace.captures)}: {capture.label}")
            space = c_void_p()
            library.arena_trace_events(self._arena, int(events == "all" or (events == "largest" and number == most)))
            library.space_open(self._arena, byref(space))
            self._spaces.append(space)
            library.space_set_label(space, _label(capture.label))
            for block, size in capture.steps:
                if size >= 0:
                    status = (take_kept if block in stays else take)(space, size, None, byref(address))
                    live[block] = (space, address.value or 0)
                else:
                    owner, at = live.pop(block)
                    status = give(owner, at)
                if status != _c.OK:
                    library.fail("space_allocate", status)
            library.space_seal(space, _c.RETAIN["default"], byref(report))
            maps += report.maps
            library.arena_stats(self._arena, byref(stats))
            most_held = max(most_held, stats.physical_bytes)
        library.arena_trim(self._arena, None)
        library.arena_stats(self._arena, byref(stats))
        self.cost = Cost(
            captures=len(trace.captures),
            allocations=sum(size >= 0 for capture in trace.captures for _, size in capture.steps),
            floor_bytes=floor,
            largest=trace.captures[most].label,
            peaks_bytes=peaks,
            private_bytes=private,
            held_bytes=stats.physical_bytes,
            most_held_bytes=most_held,
            retained_bytes=stats.retained_bytes,
            maps=maps,
        )

    def map_json(self, title: str) -> str:
        options = _c.MapOptions(title=title.encode("utf-8", "replace").replace(b"\0", b" "))
        return self.library.text("arena_map_json", self._arena, byref(options))

    def __del__(self) -> None:
        for space in self._spaces:
            self.library.raw["space_destroy"](space)
        if self._arena:
            self.library.raw["arena_destroy"](self._arena)
        if self._device:
            self.library.raw["device_close"](self._device)


def _left_alive(trace: Trace) -> set[int]:
    """Returns the blocks alive at the end of their capture."""
    left: set[int] = set()
    for capture in trace.captures:
        live: set[int] = set()
        for block, size in capture.steps:
            if size >= 0:
                live.add(block)
            else:
                live.discard(block)
        left |= live
    return left


def _label(text: str) -> bytes:
    """Encodes a label for the library: at most 1024 bytes."""
    return text.replace("\0", " ").encode("utf-8", "replace")[:1000].decode("utf-8", "ignore").encode()


def as_json(cost: Cost) -> dict[str, Any]:
    return {**vars(cost), "held_by_floor": round(cost.held_bytes / cost.floor_bytes, 4) if cost.floor_bytes else None}
