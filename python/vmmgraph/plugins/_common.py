"""Functions shared by the engine plugins."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from .._environment import flag

log = logging.getLogger("vmmgraph")

MIB = 1 << 20


def is_set(name: str) -> bool:
    """Returns whether a variable is on.

    An invalid value is logged and counts as off: a plugin must not end the engine.
    """
    try:
        return flag(name)
    except ValueError as error:
        log.error("vmmgraph: %s", error)
        return False


def wanted() -> bool:
    """Returns whether ``VMMGRAPH`` is on."""
    return is_set("VMMGRAPH")


def enable_for(engine: str) -> Any:
    """Enables VmmGraph in this process. Returns the session, or ``None`` if the chosen route is not
    "blocks"."""
    from .. import _door, _enable, _engines

    if not log.handlers and not logging.getLogger().handlers:
        # The engine has handlers for its own loggers only; without one, these lines are lost.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    version = _engines.installed(engine.lower())
    outside = _engines.outside(engine.lower(), version) if version else None
    if outside:
        log.warning("vmmgraph: %s; %s", outside, _engines.REMEDY)
    chosen = _enable.enable(share=False)
    log.info("vmmgraph: under %s, %s route", engine, chosen.route)
    if chosen.route == "blocks":
        return _door.opened()
    for name in ("VMMGRAPH_KV", "VMMGRAPH_SLEEP"):
        if is_set(name):
            log.warning(
                "vmmgraph: cannot use %s on the %s route: only the blocks route has it; run `vmmgraph doctor`", name, chosen.route
            )
    return None


def after_captures(kind: type | None, name: str) -> None:
    """Wraps the method that captures all graphs: afterwards idle pages return to the driver, and
    the log has the memory of each arena's graphs."""
    capture = getattr(kind, name, None)
    if capture is None:
        return

    @functools.wraps(capture)
    def captured(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .. import _door

        result = capture(self, *args, **kwargs)
        for arena in _door.arenas():
            arena.trim()
            stats = arena.stats()
            if stats["spaces"]:
                log.info(
                    "vmmgraph: %d graph groups share %.0f MiB on cuda:%d; the largest alone needs %.0f MiB",
                    stats["spaces"],
                    stats["physical_bytes"] / MIB,
                    arena.device,
                    stats["high_water_bytes"] / MIB,
                )
        return result

    setattr(kind, name, captured)


def without_custom_all_reduce(module: ModuleType) -> None:
    """Disables custom all-reduce, which opens graph memory in other processes through CUDA IPC.

    Arena pages have no CUDA IPC handles.
    """
    kind = getattr(module, "CustomAllreduce", None)
    if kind is None:
        return

    def off(self: Any, *args: Any, **kwargs: Any) -> None:
        self._IS_CAPTURING = False
        self.disabled = True
        log.info("vmmgraph: custom all-reduce is off, since graph memory cannot be opened by other processes; NCCL's is used")

    kind.__init__ = off
