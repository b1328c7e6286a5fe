"""What a program says around its captures and its eager work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import _c, _door
from ._arena import Arena
from ._door import Pool, Unit
from ._pools import Scope


@contextlib.contextmanager
def _listed(among: list[Any], one: object) -> Iterator[None]:
    # Signals' exceptions come between any two steps, and generators end in any order.
    try:
        among.append(one)
        yield
    finally:
        if one in among:
            among.remove(one)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Captures inside, on this thread, are torch's own."""
    with _listed(_door.local().disabled, object()):
        yield


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
    among = door.local.remote
    first, ended = not among, False
    try:
        with _listed(among, object()):
            # The thread is in the library's scope once, from the first one's beginning to the last one's end, in whatever order they end.
            if first:
                library.torch_remote_enter()
            yield
        ended = True
    finally:
        if not among:
            # Behind an exception it may not have come to the enter, and is refused.
            (library.torch_remote_leave if ended else library.raw["torch_remote_leave"])()


@contextlib.contextmanager
def eager(arena: Arena, bytes: int | None = None) -> Iterator[None]:
    """Eager work of this thread whose tensors lie on the pages of an arena's graphs: what it makes inside on torch's current stream of now. It
    is in the order of the arena's replays, as one of them: those of other threads wait for its end. So activations take as much as eager work
    or the graphs need, whichever is more. Contents are real: a tensor that is alive at the end stays as it is until it is freed. Replays and
    captures of the arena inside are behind what was made so far. With ``bytes``, the most that it needs at once, pages of the arena that are on
    lease stay there if that does without them. Raises `Error` where an arena is paused, or under capture on this stream."""
    door = _door.need()
    scope = Scope(arena, bytes)
    try:
        door.eager.begin(scope)
        yield
    finally:
        door.eager.end(scope)


@contextlib.contextmanager
def shape(label: str) -> Iterator[None]:
    """Captures inside, on this thread, are the pieces of one shape with this name: they share one space, so that what is live between
    two of them costs no pages of its own. They are replayed in the order of their captures."""
    unit = Unit(label)
    try:
        with _listed(_door.local().units, unit):
            yield
    finally:
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

    ours = hasattr(cuda_graph, "_named")
    if arena is not None and not ours:
        raise _c.Error("the graph is none of ours: make it after vmmgraph.enable()", _c.WRONG_STATE)
    context = torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode)
    try:
        if ours:
            cuda_graph._named = arena, label
        with context:
            yield
    finally:
        if ours:
            # Where it did not come to a capture.
            cuda_graph._named = None, ""
