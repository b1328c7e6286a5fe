"""What a program says around its captures and its eager work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import _c, _door
from ._arena import Arena
from ._door import Pool, Unit


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Captures inside, on this thread, are torch's own."""
    local = _door.local()
    local.disabled += 1
    try:
        yield
    finally:
        local.disabled -= 1


@contextlib.contextmanager
def remote() -> Iterator[None]:
    """What this thread allocates inside, in captures, are buffers that peers use too: those of collectives that NCCL registers. The seal
    of a shape exchanges no page of those that are gone by then. In an arena with ``retain="shared_remote"`` that is the promise that all of
    a capture's are made so; in every other one captures with collectives are sealed in place, marked or not. Without effect outside
    captures, and where graphs are torch's own."""
    door = _door.opened()
    library = door.library if door is not None else None
    if library is None or not library.has("torch_remote_enter"):
        yield
        return
    library.torch_remote_enter()
    try:
        yield
    finally:
        library.torch_remote_leave()


@contextlib.contextmanager
def eager(arena: Arena, bytes: int | None = None) -> Iterator[None]:
    """Eager work of this thread whose tensors lie on the pages of an arena's graphs: what it makes inside on torch's current stream of now. It
    is in the order of the arena's replays, as one of them: those of other threads wait for its end. So activations take as much as eager work
    or the graphs need, whichever is more. Contents are real: a tensor that is alive at the end stays as it is until it is freed. Replays and
    captures of the arena inside are behind what was made so far. With ``bytes``, the most that it needs at once, pages of the arena that are on
    lease stay there if that does without them. Raises `Error` where an arena is paused, or under capture on this stream."""
    door = _door.need()
    scope = door.eager.begin(arena, bytes)
    try:
        yield
    finally:
        door.eager.end(scope)


@contextlib.contextmanager
def shape(label: str) -> Iterator[None]:
    """Captures inside, on this thread, are the pieces of one shape with this name: they share one space, so that what is live between
    two of them costs no pages of its own. They are replayed in the order of their captures."""
    units = _door.local().units
    unit = Unit(label)
    units.append(unit)
    try:
        yield
    finally:
        units.remove(unit)
        for arena in _door.arenas():
            arena._ended(unit)


@contextlib.contextmanager
def graph(
    cuda_graph: Any,
    pool: Pool | None = None,
    stream: Any = None,
    capture_error_mode: str = "global",
    *,
    arena: Arena | None = None,
    label: str = "",
) -> Iterator[None]:
    """``torch.cuda.graph``, with an arena in the place of a pool, and a name for the shape."""
    import torch

    if arena is not None and not hasattr(cuda_graph, "_shape"):
        raise _c.Error("the graph is none of ours: make it after vmmgraph.enable()", _c.WRONG_STATE)
    local = _door.local()
    before = local.arena, local.label
    local.arena, local.label = arena, label
    try:
        context = torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode)
        context.__enter__()
    finally:
        local.arena, local.label = before
    with contextlib.ExitStack() as stack:
        stack.push(context.__exit__)
        yield
