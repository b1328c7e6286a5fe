"""vLLM plugin: labels the graph groups of captures, and replaces features arenas do not support.

Environment: ``VMMGRAPH=1`` enables the plugin. ``VMMGRAPH_SLEEP=1`` runs vLLM's sleep mode over
regions. ``VMMGRAPH_KV=1`` sizes the KV cache after the captures (`vllm_kv`), and
``VMMGRAPH_KV_GUARD=0`` keeps this size while the engine runs (`kv_guard`).
``VMMGRAPH_CAPTURE=behind`` serves at once and captures between steps (`vllm_behind`).
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from ._common import after_captures, choice, enable_for, is_set, log, wanted, without_custom_all_reduce


def shape() -> tuple[object, str] | None:
    """Returns key and label of the graph group vLLM runs on this thread, or ``None``.

    The key is the forward context: all pieces of the group are captured in one context.
    """
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


def with_graphs(allocator: type) -> type:
    """Returns the allocator class, with graphs that sleep and wake, too."""
    from .. import _sleep
    from .._c import Error

    class Allocator(allocator):  # type: ignore[misc, valid-type]
        def sleep(self, offload_tags: Any = None) -> None:
            super().sleep(offload_tags)
            try:
                _sleep.sleep_graphs(1)
            except Error as error:
                log.warning("vmmgraph: graphs keep their memory while vLLM sleeps: %s", error)

        def wake_up(self, tags: Any = None) -> None:
            super().wake_up(tags)
            _sleep.wake_graphs()

    Allocator.__name__ = Allocator.__qualname__ = allocator.__name__
    return Allocator


def sleep_by_regions(module: ModuleType) -> None:
    """Replaces the allocator of vLLM's sleep mode by `vmmgraph.memory_saver`'s."""
    from .. import memory_saver

    if not os.path.exists(memory_saver.library_path()):
        log.warning("vmmgraph: vLLM sleeps by its own allocator: %s does not exist", memory_saver.library_path())
        return
    if not memory_saver._library.preloaded():
        memory_saver.torch_memory_saver.hook_mode = "torch"
    module.CuMemAllocator = with_graphs(memory_saver.CuMemAllocator)  # type: ignore[attr-defined]
    log.info("vmmgraph: vLLM sleeps by regions")


def runner_captures(module: ModuleType) -> None:
    """Returns idle pages and logs the memory of the graphs when a runner's captures end."""
    after_captures(getattr(module, "GPUModelRunner", None), "capture_model")


def enable() -> None:
    """Enables VmmGraph in a vLLM process. Repeated calls have no effect."""
    if not wanted():
        return
    session = enable_for("vLLM")
    if session is None or shape in session.label_providers:
        return
    session.label_providers.append(shape)
    from .._trees import when_imported

    for runner in ("gpu_model_runner", "gpu.model_runner"):
        when_imported(f"vllm.v1.worker.{runner}", runner_captures)
    when_imported("vllm.distributed.device_communicators.custom_all_reduce", without_custom_all_reduce)
    if is_set("VMMGRAPH_SLEEP"):
        when_imported("vllm.device_allocator.cumem", sleep_by_regions)
    if choice("VMMGRAPH_CAPTURE") == "behind":
        from . import vllm_behind

        vllm_behind.install(when_imported)
    if is_set("VMMGRAPH_KV"):
        from . import vllm_kv

        vllm_kv.install(when_imported)
