"""Histograms of traffic: the file shared with the C++ executor, and plans for a budget."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path
from typing import Any, NamedTuple

from . import _c
from ._files import Unfit, load, reading

VERSION = 1
MODES = ("full", "piecewise")
#: Marks keys of piecewise graphs in a plan, which knows variants and no modes.
PIECEWISE = 1 << 31


class Shape(NamedTuple):
    """Steps of a graph: sizes are tokens, sequences, KV pages and a fourth axis; 0: no part."""

    mode: str
    variant: int
    extents: tuple[int, int, int, int]
    steps: int


def parse(text: str, name: str) -> list[Shape]:
    """Returns the shapes of a histogram. Raises `Unfit`."""
    what = "histogram of vmmgraph"
    whole = load(text, name, what)
    with reading(name, what):
        if whole["vmmgraph_histogram"] != VERSION:
            raise Unfit(
                f"{name} is a histogram of version {whole['vmmgraph_histogram']}, and this vmmgraph reads version {VERSION}"
            )
        return [_shape(one) for one in whole["shapes"]]
    raise AssertionError


def _shape(one: dict[str, Any]) -> Shape:
    shape = Shape(str(one["mode"]), one["variant"], tuple(one["extents"]), one["steps"])  # type: ignore[arg-type]
    numbers = [shape.variant, *shape.extents]
    if shape.mode not in MODES or len(shape.extents) != 4:
        raise ValueError(f"in {one}")
    if any(type(number) is not int or not 0 <= number < 1 << 31 for number in numbers):
        raise ValueError(f"in {one}")
    if type(shape.steps) is not int or not 0 <= shape.steps < 1 << 64:
        raise ValueError(f"in {one}")
    return shape


def save(path: str, shapes: Sequence[Shape]) -> None:
    """Replaces a file atomically. Raises OSError."""
    lines = ",\n".join(json.dumps({**one._asdict(), "extents": list(one.extents)}) for one in shapes if one.steps)
    beside = Path(f"{path}.{os.getpid()}.new")
    try:
        beside.write_text(f'{{"vmmgraph_histogram": {VERSION}, "shapes": [\n{lines}]}}\n')
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


class Planned(NamedTuple):
    """A graph to capture: the steps it runs, and their padding in tokens."""

    shape: Shape
    padding: int


def plan(
    library: _c.Library, shapes: Sequence[Shape], budget: int, graph_bytes: int, graphs: int
) -> tuple[list[Planned], _c.Waste]:
    """Returns the graphs with the least padding within the limits (0: none), most used first, and
    the waste of this choice.

    ``budget``: limit of the graphs' own bytes, of which each graph needs ``graph_bytes``.
    """
    used = [one for one in shapes if one.steps]
    keys = (_c.Key * len(used))(
        *(_c.Key(one.variant | (PIECEWISE if one.mode == "piecewise" else 0), (c_uint32 * 4)(*one.extents)) for one in used)
    )
    steps = (c_uint64 * len(used))(*(one.steps for one in used))
    options = _c.PlanOptions(most_graphs=graphs, most_graph_bytes=budget, graph_bytes=graph_bytes if budget else 0)
    buckets = (_c.PlannedBucket * len(used))()
    result = _c.PlanResult(waste=_c.Waste())
    library.plan(keys, steps, len(used), ctypes.byref(options), buckets, len(used), ctypes.byref(result))
    found = []
    for one in buckets[: result.buckets]:
        mode = MODES[bool(one.key.variant & PIECEWISE)]
        shape = Shape(mode, one.key.variant & ~PIECEWISE, tuple(one.key.extents), one.steps)
        found.append(Planned(shape, one.padding))
    return sorted(found, key=lambda one: -one.shape.steps), result.waste
