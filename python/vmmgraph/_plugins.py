"""What engines call at their start, by entry points: nothing happens without ``VMMGRAPH=1``.

========================  =======================
group                     function
========================  =======================
``vllm.general_plugins``  ``vmmgraph._plugins:vllm``
``sglang.srt.plugins``    ``vmmgraph._plugins:sglang``
========================  =======================
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

log = logging.getLogger("vmmgraph")


def _set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "on", "true", "yes")


def wanted() -> bool:
    """Whether the environment asks for VmmGraph."""
    return _set("VMMGRAPH")


def _enable_for(engine: str) -> Any:
    """The door, if it could be opened."""
    from . import _door, _enable

    if not log.handlers and not logging.getLogger().handlers:
        # An engine that logs by handlers of its own would not show what was chosen.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    chosen = _enable.enable(share=False)
    log.info("vmmgraph: under %s, %s route", engine, chosen.route)
    return _door.opened() if chosen.route == "blocks" else None


def vllm_shape() -> tuple[object, str] | None:
    """The shape that vLLM runs on this thread: its forward context, in which all pieces of it are captured."""
    module = sys.modules.get("vllm.forward_context")
    context = getattr(module, "_forward_context", None)
    descriptor = getattr(context, "batch_descriptor", None)
    if descriptor is None:
        return None
    mode = getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "")
    tokens = getattr(descriptor, "num_tokens", None)
    more = [name for name in ("uniform", "uniform_decode", "has_lora") if getattr(descriptor, name, False) is True]
    label = " ".join(str(part) for part in (mode.lower(), descriptor if tokens is None else tokens, *more) if str(part))
    return context, label


def _without_custom_all_reduce(module: ModuleType) -> None:
    """It opens graph memory in other processes, which pages of an arena cannot be."""
    kind = getattr(module, "CustomAllreduce", None)
    if kind is None:
        return

    def off(self: Any, *args: Any, **kwargs: Any) -> None:
        self._IS_CAPTURING = False
        self.disabled = True
        log.info("vmmgraph: custom all-reduce is off, since graph memory cannot be opened by other processes; NCCL's is used")

    kind.__init__ = off


def _sleep_by_regions(module: ModuleType) -> None:
    """Puts `vmmgraph.memory_saver`'s allocator in the place of the one that vLLM's sleep mode uses."""
    from . import memory_saver

    if not os.path.exists(memory_saver.library_path()):
        log.warning("vmmgraph: vLLM sleeps by its own allocator: %s is not there", memory_saver.library_path())
        return
    if not memory_saver._preloaded():
        memory_saver.torch_memory_saver.hook_mode = "torch"
    module.CuMemAllocator = memory_saver.CuMemAllocator  # type: ignore[attr-defined]
    log.info("vmmgraph: vLLM sleeps by regions")


def vllm() -> None:
    """Enables VmmGraph in a process of vLLM's. May be called any number of times. With ``VMMGRAPH_SLEEP=1`` its sleep mode is over regions."""
    if not wanted():
        return
    door = _enable_for("vLLM")
    if door is None or vllm_shape in door.namers:
        return
    door.namers.append(vllm_shape)
    from ._trees import when_imported

    when_imported("vllm.distributed.device_communicators.custom_all_reduce", _without_custom_all_reduce)
    if _set("VMMGRAPH_SLEEP"):
        when_imported("vllm.device_allocator.cumem", _sleep_by_regions)


#: SGLang's own ways around holes in torch's graph pool: one looks for free runs in torch's statistics, where an arena's are not, the other
#: allocates all at once in the first capture, which would count as what that needs.
_SGLANG_OFF = ("SGLANG_ENABLE_GRAPH_POOL_BORROW", "SGLANG_ENABLE_GRAPH_POOL_PRECARVE")


def sglang() -> None:
    """Enables VmmGraph in a process of SGLang's. May be called any number of times."""
    if not wanted():
        return
    door = _enable_for("SGLang")
    if door is None or getattr(door, "sglang", False):
        return
    door.sglang = True
    for name in _SGLANG_OFF:
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            log.info("vmmgraph: %s is off, since graph memory is not torch's", name)
        os.environ[name] = "0"
    from ._trees import when_imported

    for name in ("full_cuda_graph_backend", "breakable_cuda_graph_backend", "tc_piecewise_cuda_graph_backend"):
        when_imported(f"sglang.srt.model_executor.runner_backend.{name}", _name_sglangs)
    when_imported("sglang.srt.distributed.device_communicators.custom_all_reduce", _without_custom_all_reduce)


def _name_sglangs(module: ModuleType) -> None:
    """Makes what a backend captures for one size the pieces of one shape."""
    import functools

    from ._scopes import shape

    for kind in list(vars(module).values()):
        capture = vars(kind).get("capture_one") if isinstance(kind, type) and kind.__module__ == module.__name__ else None
        if capture is None:
            continue

        def captured(self: Any, *args: Any, _capture: Any = capture, **kwargs: Any) -> Any:
            key = args[0] if args else next(iter(kwargs.values()), "")
            with shape(str(getattr(key, "size", key))):
                return _capture(self, *args, **kwargs)

        kind.capture_one = functools.wraps(capture)(captured)
