"""Converts a page map to a memory snapshot of torch for memory_viz, in physical coordinates.

Torch's snapshots have virtual addresses, where a page shared by n graphs would count n times. Here
a page is a segment, at an address made of its class and number, and a block lies where its bytes
are. Captures follow each other in time. Blocks alive at the end stay if their page is private, and
are freed if other graph groups share it.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Iterator
from typing import Any

from . import _maps
from ._files import Unfit

#: Each class of pages begins at a multiple of this; a viewer's numbers are exact up to 2^53.
_CLASS_BYTES = 1 << 44
_CLASSES = ("large", "tape", "slab", "filler", "spare", "own", "kept", "exclusive")
_DEVICES = 1024
#: The newest protocol memory_viz reads; tests/python/test_cli.py has the opcodes it supports.
PROTOCOL = 4


def _base(page_map: dict[str, Any]) -> list[int]:
    stride: dict[str, int] = {}
    for page in page_map["pages"]:
        stride[page["class"]] = max(stride.get(page["class"], 0), page["bytes"])
    counted: dict[str, int] = {}
    found, seen = [], set()
    for page in page_map["pages"]:
        kind = page["class"]
        # Other classes have numbers per space, or none.
        number = page["number"] if kind in _maps._NUMBERED else counted.setdefault(kind, 0)
        counted[kind] = counted.get(kind, 0) + 1
        offset = number * stride[kind]
        if not 0 <= offset <= _CLASS_BYTES - page["bytes"] or page["bytes"] <= 0 or (kind, number) in seen:
            raise Unfit(f"the map has a page {kind} {number} of {page['bytes']} bytes, which has no place beside the others")
        seen.add((kind, number))
        found.append((_CLASSES.index(kind) + 1) * _CLASS_BYTES + offset)
    return found


def _file(label: str) -> str:
    """Torch's tools show only the part after the last slash, and a semicolon ends a frame."""
    return label.replace("/", "|").replace(";", ",")


def _captured_at(site: str | None) -> list[dict[str, Any]]:
    if not site:
        return []
    file, _, line = site.rpartition(":")
    known = bool(file) and line.isascii() and line.isdigit() and len(line) < 10
    return [{"filename": _file(file if known else site), "line": int(line) if known else 0, "name": "capture"}]


class _Places:
    def __init__(self, tiles: list[tuple[int, int, int]]) -> None:
        self._tiles = sorted(tiles)
        self._starts = [tile[0] for tile in self._tiles]

    def parts(self, address: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yields page, offset in the page and bytes of each part of a block; parts without a page
        are omitted."""
        at = max(bisect.bisect_right(self._starts, address) - 1, 0)
        for index in range(at, len(self._tiles)):
            start, length, page = self._tiles[index]
            if start >= address + size:
                break
            low, high = max(start, address), min(start + length, address + size)
            if low < high:
                yield page, low - start, high - low


def _steps(space: dict[str, Any]) -> list[tuple[int, int, dict[str, Any]]]:
    """Returns the events of a capture in order: time, 0 (end) or 1 (beginning), and block. Without
    recorded events, the blocks of the peak."""
    if space["events"] is not None:
        steps = [(block["begin"], 1, block) for block in space["events"]]
        steps += [(block["end"], 0, block) for block in space["events"] if block["end"] is not None]
        return sorted(steps, key=lambda step: step[:2])
    return [(block["allocation"], 1, block) for block in sorted(space["blocks"], key=lambda block: block["allocation"])]


def snapshot(page_map: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the snapshot in the format of ``torch.cuda.memory._snapshot()``, and the bytes of
    blocks on no page of the map."""
    pages, device = page_map["pages"], page_map["device"]
    if not 0 <= device < _DEVICES:
        raise Unfit(f"the map is of device {device}")
    base = _base(page_map)
    trace: list[dict[str, Any]] = []
    live: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    lost = 0

    def note(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": len(trace), "frames": frames})

    def come(parts: list[tuple[int, int, int]], frames: list[dict[str, Any]]) -> None:
        for page, offset, size in parts:
            if base[page] + offset in live:
                raise Unfit("the map has two live blocks in one place")
            note("alloc", base[page] + offset, size, frames)
            live[base[page] + offset] = (size, frames)

    def go(parts: list[tuple[int, int, int]]) -> None:
        for page, offset, _ in parts:
            size, frames = live.pop(base[page] + offset)
            note("free_requested", base[page] + offset, size, frames)
            note("free_completed", base[page] + offset, size, frames)

    for name, space in zip(_maps.names(page_map), page_map["spaces"], strict=True):
        kept = _Places([(pages[page]["address"], pages[page]["bytes"], page) for page in space["kept_pages"]])
        places = _Places([(tile["address"], pages[tile["page"]]["bytes"], tile["page"]) for tile in space["maps"]])
        shared: dict[int, list[tuple[int, int, int]]] = {}
        site = _captured_at(space.get("site"))

        def parts_of(
            block: dict[str, Any], where: _Places, name: str = name, site: list[dict[str, Any]] = site
        ) -> tuple[list[tuple[int, int, int]], list[dict[str, Any]]]:
            nonlocal lost
            found = list(where.parts(block["address"], block["bytes"]))
            lost += block["bytes"] - sum(size for _, _, size in found)
            return found, [{"filename": _file(name), "line": block["allocation"], "name": f"block {block['allocation']}"}, *site]

        for block in space["kept"]:
            come(*parts_of(block, kept))
        for _, begins, block in _steps(space):
            key = block["allocation"]
            if begins:
                found, frames = parts_of(block, places)
                come(found, frames)
                shared[key] = found
            else:
                go(shared.pop(key, []))
        for found in shared.values():
            go([part for part in found if pages[part[0]]["class"] != "own"])
    by_address = sorted(live)
    segments = []
    for page, address in sorted(zip(pages, base, strict=True), key=lambda both: both[1]):
        first, last = (bisect.bisect_left(by_address, edge) for edge in (address, address + page["bytes"]))
        blocks = [(start, *live[start]) for start in by_address[first:last]]
        segments.append(_segment(page, address, blocks, device, page_map["arena"]))
    whole = {
        "segments": segments,
        "device_traces": [trace if each == device else [] for each in range(device + 1)],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return whole, lost


def _segment(
    page: dict[str, Any], address: int, live: list[tuple[int, int, list[dict[str, Any]]]], device: int, arena: int
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    at, end = address, address + page["bytes"]

    def gap(to: int) -> None:
        if to > at:
            blocks.append({"address": at, "size": to - at, "requested_size": 0, "state": "inactive", "frames": []})

    for start, size, frames in live:
        if start < at:
            raise Unfit("the map has two live blocks in one place")
        gap(start)
        blocks.append({"address": start, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames})
        at = start + size
    gap(end)
    used = sum(size for _, size, _ in live)
    return {
        "device": device,
        "address": address,
        "total_size": page["bytes"],
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large" if page["bytes"] > 2 << 20 else "small",
        "segment_pool_id": (0, arena),
        "is_expandable": False,
        "frames": [{"filename": page["class"], "line": page["number"], "name": f"page on {page['spaces']} shapes"}],
        "blocks": blocks,
    }


def dumps(whole: dict[str, Any]) -> bytes:
    """Without categories: a viewer that finds one requires a category "unknown"."""
    return pickle.dumps(whole, protocol=PROTOCOL)
