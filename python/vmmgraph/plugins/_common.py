"""Functions that the plugins of all engines use."""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Any

log = logging.getLogger("vmmgraph")


def is_set(name: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(name, "").lower() in ("1", "on", "true", "yes")


def wanted() -> bool:
    """Whether the environment asks for VmmGraph."""
    return is_set("VMMGRAPH")


def enable_for(engine: str) -> Any:
    """Enables VmmGraph in this process. Returns the door, or ``None`` if another route than "blocks" was chosen."""
    from .. import _door, _enable

    if not log.handlers and not logging.getLogger().handlers:
        # An engine whose handlers are its own would not show the lines of this logger.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    chosen = _enable.enable(share=False)
    log.info("vmmgraph: under %s, %s route", engine, chosen.route)
    return _door.opened() if chosen.route == "blocks" else None


def without_custom_all_reduce(module: ModuleType) -> None:
    """Switches custom all-reduce off: it opens graph memory in other processes by CUDA's IPC handles, which pages of an arena have not."""
    kind = getattr(module, "CustomAllreduce", None)
    if kind is None:
        return

    def off(self: Any, *args: Any, **kwargs: Any) -> None:
        self._IS_CAPTURING = False
        self.disabled = True
        log.info("vmmgraph: custom all-reduce is off, since graph memory cannot be opened by other processes; NCCL's is used")

    kind.__init__ = off
