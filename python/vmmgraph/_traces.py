"""Reads the allocations of captures from a file: a memory snapshot of torch with history, or a
trace of this project."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ._files import PICKLE, Unfit, load, reading

#: The largest block size of the library.
MAX_BYTES = 1 << 46

SPLITS = ("auto", "pool", "label", "warm-up")


@dataclass
class Capture:
    """One capture: in order, ``(block, bytes)`` for an allocation and ``(block, -1)`` for a free.

    Blocks are numbered across all captures; a capture may free blocks of an earlier one.
    """

    label: str
    steps: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Trace:
    captures: list[Capture]
    source: str
    #: Bytes of the graph pools when the snapshot was taken; ``None``: unknown.
    recorded_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


def read(data: bytes, name: str, **options: Any) -> Trace:
    """Reads a trace from the bytes of a file. Raises `Unfit`."""
    if data[:1] == PICKLE:
        snapshot = load(data, name, "snapshot of torch's")
        with reading(name, "snapshot of torch's"):
            return from_snapshot(snapshot, name, **options)
    if any(value for key, value in options.items() if key in ("device", "gap_ms") or (key == "split" and value != "auto")):
        raise Unfit(f"{name} is no snapshot of torch's, which --device, --split and --gap-ms are for")
    return from_text(data, name)


def from_text(data: bytes, name: str) -> Trace:
    """Reads traces of ``tests/data``: ``shape KIND TOKENS``, ``a ID BYTES``, ``f ID``."""
    captures: list[Capture] = []
    first: dict[int, int] = {}
    blocks = 0
    for number, raw in enumerate(data.split(b"\n"), 1):
        line = raw.decode("utf-8", "replace")
        words = line.split()
        try:
            if not words or words[0].startswith("#"):
                continue
            match words:
                case ["shape", kind, tokens]:
                    captures.append(Capture(f"{'decode' if kind.startswith('d') else 'prefill'} {int(tokens)}"))
                    first = {}
                case ["a", block, size] if captures and int(size) > 0 and int(block) not in first:
                    first[int(block)] = blocks
                    captures[-1].steps.append((blocks, _bytes(int(size))))
                    blocks += 1
                case ["f", block] if captures:
                    captures[-1].steps.append((first.pop(int(block)), -1))
                case _:
                    raise ValueError
        except (KeyError, ValueError):
            shown = line if len(line) <= 60 else line[:60] + "..."
            raise Unfit(f"{name}:{number}: {shown!r} is no line of a trace") from None
    if not captures:
        raise Unfit(f"{name} has no captures in it")
    return Trace(captures, "trace")


def _pool_of_entry(entry: dict[str, Any]) -> tuple[int, int] | None:
    for key in ("segment_pool_id", "pool_id", "mempool_id"):
        if key in entry:
            first, second = entry[key]
            return first, second
    return None


class _Pools:
    """Maps an address at the time of an event to a pool, using the final segments and the times of
    their last allocation."""

    def __init__(self, segments: Iterable[dict[str, Any]], device: int, events: Iterable[dict[str, Any]]) -> None:
        self._there = sorted(
            (each["address"], each["address"] + each["total_size"], tuple(each["segment_pool_id"]))
            for each in segments
            if each.get("device", 0) == device and "segment_pool_id" in each
        )
        self._starts = [each[0] for each in self._there]
        #: The driver reuses addresses: before this event they belonged to an earlier segment.
        self._began = {each["addr"]: index for index, each in enumerate(events) if each["action"] == "segment_alloc"}

    def of(self, index: int, entry: dict[str, Any]) -> tuple[int, int]:
        named = _pool_of_entry(entry)
        if named is not None:
            return named
        at = bisect.bisect_right(self._starts, entry["addr"]) - 1
        if at >= 0 and entry["addr"] < self._there[at][1] and index > self._began.get(self._starts[at], -1):
            return self._there[at][2]
        return (0, 0)


def from_snapshot(
    snapshot: Any,
    name: str,
    *,
    pools: str = "graph",
    device: int | None = None,
    split: str = "auto",
    gap_ms: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Trace:
    """Returns the captures in a snapshot's history.

    ``pools``: ``graph`` for allocations in graph pools, ``all`` for all allocations. ``split``
    selects the start of a new capture: a different pool, a different label
    (``torch.cuda.memory._set_memory_metadata``), an allocation outside graph pools (engines warm up
    before each capture), or ``gap_ms`` milliseconds without events. ``auto``: by label if any
    exist, else by pool and warm-up.
    """
    traces = snapshot["device_traces"]
    if not any(traces):
        raise Unfit(f"{name} has no history: call torch.cuda.memory._record_memory_history() before the captures")

    def wanted(pool: tuple[int, int]) -> bool:
        return pools == "all" or pool != (0, 0)

    numbers = range(len(traces)) if device is None else [device]
    if device is not None and not 0 <= device < len(traces):
        raise Unfit(f"{name} has {len(traces)} devices, and no {device}")
    for number in numbers:
        events = traces[number]
        where = _Pools(snapshot["segments"], number, events)
        if any(each["action"] == "alloc" and each["size"] and wanted(where.of(i, each)) for i, each in enumerate(events)):
            break
    else:
        raise Unfit(f"{name} has no allocations in a graph's pool; --pools all takes those in all pools")

    labelled = split == "label" or (split == "auto" and any(entry.get("user_metadata") for entry in events))
    by_pool = split == "pool" or (split == "auto" and not labelled)
    by_warm_up = split == "warm-up" or (split == "auto" and not labelled)
    captures: list[Capture] = []
    live: dict[int, int] = {}
    #: Freed while in use on a second stream: free at the end of the capture.
    waiting: dict[int, int] = {}
    pool_now, label_now, last_us, warm_up, blocks, missing = None, None, None, False, 0, 0
    for index, entry in enumerate(events):
        if index % 50_000 == 0:
            progress(f"{index} of {len(events)} events")
        action, address = entry["action"], entry.get("addr")
        if action == "alloc":
            pool, label, now_us, size = (
                where.of(index, entry),
                entry.get("user_metadata") or "",
                entry.get("time_us", 0),
                entry["size"],
            )
            if not wanted(pool):
                warm_up = True
                continue
            if size == 0:
                continue
            far = gap_ms is not None and last_us is not None and now_us - last_us > gap_ms * 1000
            other = (by_warm_up and warm_up) or (by_pool and pool != pool_now) or (labelled and label != label_now)
            if not captures or far or other:
                if captures:
                    captures[-1].steps += [(block, -1) for block in waiting.values()]
                    waiting.clear()
                captures.append(Capture(" ".join(str(label).split()) or f"capture {len(captures) + 1}"))
            pool_now, label_now, last_us, warm_up = pool, label, now_us, False
            if address in live:
                missing += 1
                captures[-1].steps.append((live[address], -1))
            captures[-1].steps.append((blocks, _bytes(size)))
            live[address] = blocks
            blocks += 1
        elif action == "free_requested" and address in live:
            waiting[address] = live.pop(address)
        elif action in ("free_completed", "free") and (address in live or address in waiting):
            captures[-1].steps.append((live.pop(address) if address in live else waiting.pop(address), -1))
    captures[-1].steps += [(block, -1) for block in waiting.values()]
    rule = ["label"] * labelled + ["pool"] * by_pool + ["warm-up"] * by_warm_up + ["gap"] * (gap_ms is not None)
    held = [
        segment["total_size"]
        for segment in snapshot["segments"]
        if segment.get("device", 0) == number and wanted(tuple(segment.get("segment_pool_id", (0, 0))))
    ]
    notes = [f"{missing} frees are not in the history: it was begun too late, or is too short"] if missing else []
    return Trace(captures, f"snapshot of device {number}, captures by {' and '.join(rule)}", sum(held), notes)


def _bytes(size: Any) -> int:
    if not isinstance(size, int) or not 0 <= size <= MAX_BYTES:
        raise ValueError(f"an allocation of {size!r} bytes")
    return size
