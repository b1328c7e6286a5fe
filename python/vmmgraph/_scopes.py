"""Context managers for captures and eager work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import _c, _session
from ._arena import Arena
from ._pools import Scope
from ._session import PieceGroup, Pool


@contextlib.contextmanager
def _listed(among: list[Any], one: object) -> Iterator[None]:
    try:
        among.append(one)
        yield
    finally:
        if one in among:
            among.remove(one)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Captures of this thread inside the context use torch's memory."""
    with _listed(_session.thread_state().disabled, object()):
        yield


@contextlib.contextmanager
def remote() -> Iterator[None]:
    """Allocations of this thread's captures inside are remote blocks: buffers accessed by peers, as
    in collectives registered by NCCL.

    The seal keeps the pages of remote blocks freed before. With ``retain="shared_remote"`` the
    program promises to mark all buffers of collectives. In other arenas, captures with collectives
    are sealed in place. No effect outside captures.
    """
    session = _session.opened()
    library = session.library if session is not None else None
    if library is None:
        yield
        return
    among = session.thread_state.remote
    first, ended = not among, False
    try:
        with _listed(among, object()):
            # The thread is in the library's scope once, from the first begin to the last end.
            if first:
                library.torch_remote_enter()
            yield
        ended = True
    finally:
        if not among:
            # After an exception the leave may be refused.
            (library.torch_remote_leave if ended else library.raw["torch_remote_leave"])()


@contextlib.contextmanager
def eager(arena: Arena, bytes: int | None = None) -> Iterator[None]:
    """Eager work of this thread on the pages of an arena's graphs: tensors made inside on torch's
    current stream at the beginning.

    Counts as one replay of the arena; other threads' replays wait. So activations need the maximum
    of eager work and graphs, not the sum. A tensor alive at the end keeps its contents until freed.
    Replays and captures inside are ordered after the work so far.

    ``bytes``: the maximum needed at once; leased pages beyond this stay on lease. Raises `Error` if
    the arena is paused or under capture on this stream.
    """
    session = _session.need()
    scope = Scope(arena, bytes)
    try:
        session.eager.begin(scope)
        yield
    finally:
        session.eager.end(scope)


@contextlib.contextmanager
def shape(label: str) -> Iterator[None]:
    """Captures of this thread inside are pieces of one graph group with this label, in one space:
    tensors alive between pieces cost no separate pages. Replay them in the order of capture."""
    group = PieceGroup(label)
    try:
        with _listed(_session.thread_state().piece_groups, group):
            yield
    finally:
        for arena in _session.arenas():
            arena._ended(group)


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
    """``torch.cuda.graph`` with an arena in place of a pool, and a label for the graph group."""
    import torch

    ours = hasattr(cuda_graph, "_named")
    if arena is not None and not ours:
        raise _c.Error(
            "cannot capture into the arena: the graph was made before vmmgraph.enable(); make it afterwards", _c.WRONG_STATE
        )
    context = torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode)
    try:
        if ours:
            cuda_graph._named = arena, label
        with context:
            yield
    finally:
        if ours:
            cuda_graph._named = None, ""
