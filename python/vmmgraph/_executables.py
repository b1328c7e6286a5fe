"""Executables of all graphs: made ahead of a replay, and destroyed."""

from __future__ import annotations

from . import _session


def instantiate() -> int:
    """Instantiates every graph without an executable, within the limits. Returns the number of
    graph groups still without executables."""
    session = _session.opened()
    for arena in _session.arenas():
        arena.seal()
    groups = (
        {graph._group for graph in list(session.graphs) if graph._lent and graph._group is not None}
        if session is not None
        else set()
    )
    return sum(not group.instantiate() for group in groups if group.sealed)


def evict() -> None:
    """Destroys the executables of all graphs; the graphs stay. No effect up to torch 2.7, which has
    its own executables."""
    for arena in {arena.device: arena for arena in _session.arenas()}.values():
        if arena.executables():
            arena._library.torch_evict_executables(arena.handle)
