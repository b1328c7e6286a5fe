"""Reads page maps from files, and compares two of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ._files import Unfit, is_pickle, load, read, reading

FORMAT = 1
_DATA = re.compile(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
_MIB = 1 << 20


def parse(data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    """Returns a map and its JSON text, from JSON or a page with embedded JSON. Checks only fields
    used by this package. Raises `Unfit`."""
    with reading(name, "page map"):
        if is_pickle(data):
            raise Unfit(f"{name} is no page map: it is a pickle; vmmgraph replay reads torch's memory snapshots")
        text = data.decode("utf-8-sig")
        if text.lstrip()[:1] == "<":
            found = _DATA.search(text)
            if found is None:
                raise Unfit(f"{name} is a page without a map in it")
            text = found[1]
        whole = load(text, name, "page map")
        if not isinstance(whole, dict) or "format" not in whole:
            raise Unfit(f"{name} is no page map: it has no format")
        if whole["format"] != FORMAT:
            raise Unfit(f"{name} has format {whole['format']!r}, and this vmmgraph reads {FORMAT}")
        pages = len(whole["pages"])
        for space in whole["spaces"]:
            for page in (*(tile["page"] for tile in space["maps"]), *space["kept_pages"]):
                if not 0 <= page < pages:
                    raise Unfit(f"{name}: space {space['id']} shows page {page}, and there are {pages}")
        return whole, text.encode()
    raise AssertionError


def mib(value: int) -> str:
    """Formats bytes, exactly if a tenth of a MiB would hide a difference."""
    if value % _MIB == 0:
        return f"{value // _MIB} MiB"
    return f"{value} bytes" if abs(value) < _MIB else f"{value / _MIB:.1f} MiB"


def names(page_map: dict[str, Any]) -> list[str]:
    """Returns a unique name for each graph group: its label, with a number in order of capture if
    needed."""
    found: dict[str, None] = {}
    counts: dict[str, int] = {}
    for space in page_map["spaces"]:
        label = " ".join(str(space["label"] or "").split())
        name, label = label, label or "shape"
        while not name or name in found:
            counts[label] = counts.get(label, bool(name)) + 1
            name = f"{label} #{counts[label]}"
        found[name] = None
    return list(found)


#: Sums over the whole map. Excludes the driver's free memory, which is no property of the arena.
_SUMS = ("held_bytes", "floor_bytes", "apart_bytes", "budget_bytes", "executables_bytes", "small_page_bytes", "large_page_bytes")
_OF_SPACE = ("peak_live_bytes", "live_bytes", "kept_bytes", "retained_bytes", "shown_bytes", "mapped_bytes", "alone_bytes")
_NUMBERED = ("large", "tape", "slab", "filler")


def _title(field: str) -> str:
    return field.removesuffix("_bytes").replace("_", " ")


def _change(name: str, before: int | None, after: int | None) -> str:
    one, two = (("none" if value is None else mib(value)) for value in (before, after))
    if one == two:
        one, two = f"{before} bytes", f"{after} bytes"
    by = "" if before is None or after is None else f" ({'+' if after > before else ''}{mib(after - before)})"
    return f"{name} {one} -> {two}{by}"


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in parts)


def _pages(one: dict[str, Any], other: dict[str, Any], sign: str) -> Iterator[str]:
    there = {(page["class"], page["number"], page["bytes"]) for page in other["pages"]}
    gone: dict[tuple[str, int], list[int]] = {}
    for page in one["pages"]:
        if page["class"] in _NUMBERED and (page["class"], page["number"], page["bytes"]) not in there:
            gone.setdefault((page["class"], page["bytes"]), []).append(page["number"])
    for (kind, size), numbers in gone.items():
        yield f"{sign} pages: {kind} {_ranges(numbers)}, {mib(size)} each, {mib(size * len(numbers))} in all"


def _counts(page_map: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns pages and bytes of classes without numbers, and of owners outside the arena."""
    found: dict[str, tuple[int, int]] = {}
    for page in page_map["pages"]:
        if page["class"] not in _NUMBERED:
            key = f"{page['class']} pages"
            count, size = found.get(key, (0, 0))
            found[key] = (count + 1, size + page["bytes"])
    for holder in page_map["holders"]:
        key = f"{holder['kind']} {holder['name']}".strip() + " beside the arena"
        count, size = found.get(key, (0, 0))
        found[key] = (count + holder["pages"], size + holder["bytes"])
    return found


def diff(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns additions (``+``), removals (``-``) and changes (``~``) between two maps. Ignores
    properties of the process: addresses, space numbers and the driver's free memory."""
    lines = []
    for field in _SUMS:
        if before.get(field) != after.get(field):
            lines.append(f"~ {_change(_title(field), before.get(field), after.get(field))}")
    olds, news = (dict(zip(names(each), each["spaces"], strict=True)) for each in (before, after))
    for sign, some, others in (("-", olds, news), ("+", news, olds)):
        for name, space in some.items():
            if name not in others:
                gives = ("dropping it gave" if sign == "-" else "dropping it gives") + f" {mib(space['drop_gives_bytes'])} back"
                lines.append(
                    f"{sign} shape {name}: peak {mib(space['peak_live_bytes'])}, retained {mib(space['retained_bytes'])}, "
                    f"mapped {mib(space['mapped_bytes'])}, {gives}"
                )
    for name, old in olds.items():
        new = news.get(name)
        if new is None:
            continue
        changed = [
            _change(_title(field), old[field], new[field])
            for field in (*_OF_SPACE, "drop_gives_bytes")
            if old[field] != new[field]
        ]
        if old["phase"] != new["phase"]:
            changed.append(f"{old['phase']} -> {new['phase']}")
        if old["allocations"] != new["allocations"]:
            changed.append(f"{old['allocations']} -> {new['allocations']} allocations")
        if changed:
            lines.append(f"~ shape {name}: {', '.join(changed)}")
    lines += [*_pages(before, after, "-"), *_pages(after, before, "+")]
    old_counts, new_counts = _counts(before), _counts(after)
    for key in {**old_counts, **new_counts}:
        (old_count, old_size), (new_count, new_size) = old_counts.get(key, (0, 0)), new_counts.get(key, (0, 0))
        if (old_count, old_size) != (new_count, new_size):
            lines.append(f"~ {_change(key, old_size, new_size)}, {old_count} -> {new_count} pages")
    return lines


def open_map(path: str) -> tuple[dict[str, Any], bytes]:
    return parse(read(path), path)
