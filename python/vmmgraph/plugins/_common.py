"""Functions shared by the engine plugins."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from types import ModuleType
from typing import Any

from .._environment import flag, problem

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


def choice(name: str) -> str:
    """Returns the lower-case value of a variable; empty for an invalid value, which is logged."""
    value = os.environ.get(name, "")
    wrong = problem(name, value)
    if wrong:
        log.error("vmmgraph: %s", wrong)
    return "" if wrong else value.lower()


def wanted() -> bool:
    """Returns whether ``VMMGRAPH`` is on."""
    return is_set("VMMGRAPH")


def enable_for(engine: str) -> Any:
    """Enables VmmGraph in this process. Returns the session, or ``None`` if the chosen route is not
    "blocks"."""
    from .. import _enable, _engines, _session

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
        return _session.opened()
    for name in ("VMMGRAPH_KV", "VMMGRAPH_SLEEP"):
        if is_set(name):
            log.warning(
                "vmmgraph: cannot use %s on the %s route: only the blocks route has it; run `vmmgraph doctor`", name, chosen.route
            )
    return None


def captures_ended(serving: bool = False) -> None:
    """Fits each arena's pages to its graphs, returns idle pages and the memory of warm-ups to the
    driver, and logs the memory of the graphs.

    ``serving``: pages keep their sizes, since results of the last replay may still be read, and
    torch keeps its cache for the next step.
    """
    import torch

    from .. import _c, _session

    if not serving:
        torch.cuda.empty_cache()
    for arena in _session.arenas():
        try:
            if not serving:
                arena.shrink_to_fit()
        except _c.Error as error:
            log.info("vmmgraph: the graphs' pages keep their sizes: %s", error)
        arena.trim()
        stats, groups = arena.stats(), arena.spaces()
        if groups:
            # Lower bound: torch's pools round sizes up.
            alone = sum(group["peak_live_bytes"] for group in groups)
            log.info(
                "vmmgraph: %d graph groups share %.0f MiB on cuda:%d; the largest alone needs %.0f MiB, a pool for each %.0f MiB; "
                "executables take %.0f MiB",
                len(groups),
                stats["physical_bytes"] / MIB,
                arena.device,
                stats["high_water_bytes"] / MIB,
                alone / MIB,
                arena.executables().get("bytes", 0) / MIB,
            )


def after_captures(kind: type | None, name: str) -> None:
    """Calls `captures_ended` after the method that captures all graphs."""
    capture = getattr(kind, name, None)
    if capture is None:
        return

    @functools.wraps(capture)
    def captured(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = capture(self, *args, **kwargs)
        captures_ended()
        return result

    setattr(kind, name, captured)


def without_custom_all_reduce(module: ModuleType) -> None:
    """Keeps custom all-reduce from opening graph memory in other processes through CUDA IPC: arena
    pages have no CUDA IPC handles.

    If its constructor has ``register_graph_buffers`` (vLLM 0.33), graphs copy their inputs to its
    own shared buffer. Otherwise custom all-reduce is off.
    """
    kind = getattr(module, "CustomAllreduce", None)
    if kind is None:
        return
    original = kind.__init__

    def off(self: Any, *args: Any, **kwargs: Any) -> None:
        self._IS_CAPTURING = False
        self.disabled = True
        log.info("vmmgraph: custom all-reduce is off, since graph memory cannot be opened by other processes; NCCL's is used")

    @functools.wraps(original)
    def copying(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "register_graph_buffers": False})
        if not self.disabled:
            log.info("vmmgraph: custom all-reduce copies its inputs in graphs, since other processes cannot open graph memory")

    kind.__init__ = copying if "register_graph_buffers" in inspect.signature(original).parameters else off
