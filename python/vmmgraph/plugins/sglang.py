"""SGLang's plugin: names the shapes of its captures, and switches off what does not work over arenas."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from ._common import enable_for, log, wanted, without_custom_all_reduce

#: SGLang's own ways around holes in torch's graph pool: one looks for free runs in torch's statistics, where an arena's are not, the other
#: allocates all at once in the first capture, which would count as memory that this capture needs.
_OFF = ("SGLANG_ENABLE_GRAPH_POOL_BORROW", "SGLANG_ENABLE_GRAPH_POOL_PRECARVE")


def enable() -> None:
    """Enables VmmGraph in a process of SGLang's. May be called any number of times."""
    if not wanted():
        return
    door = enable_for("SGLang")
    if door is None or getattr(door, "sglang", False):
        return
    door.sglang = True
    for name in _OFF:
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            log.info("vmmgraph: %s is off, since graph memory is not torch's", name)
        os.environ[name] = "0"
    from .._trees import when_imported

    for name in ("full_cuda_graph_backend", "breakable_cuda_graph_backend", "tc_piecewise_cuda_graph_backend"):
        when_imported(f"sglang.srt.model_executor.runner_backend.{name}", name_shapes)
    when_imported("sglang.srt.distributed.device_communicators.custom_all_reduce", without_custom_all_reduce)


def name_shapes(module: ModuleType) -> None:
    """Makes the captures of a backend for one size the pieces of one shape."""
    from .._scopes import shape

    for kind in list(vars(module).values()):
        capture = vars(kind).get("capture_one") if isinstance(kind, type) and kind.__module__ == module.__name__ else None
        if capture is None:
            continue

        def captured(self: Any, *args: Any, _capture: Any = capture, **kwargs: Any) -> Any:
            key = args[0] if args else next(iter(kwargs.values()), "")
            with shape(str(getattr(key, "size", key))):
                return _capture(self, *args, **kwargs)

        kind.capture_one = functools.wraps(capture)(captured)
