"""SGLang plugin: labels the graph groups of captures, disables features unsupported by arenas.

Environment: ``VMMGRAPH=1`` enables the plugin. ``VMMGRAPH_KV=1`` sizes the KV cache after the
captures (`sglang_kv`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ._common import after_captures, enable_for, is_set, log, wanted, without_custom_all_reduce

#: SGLang's workarounds for holes in torch's graph pool. BORROW searches free runs in torch's
#: statistics, which exclude arenas. PRECARVE allocates all memory in the first capture, which would
#: count as the capture's need.
_OFF = ("SGLANG_ENABLE_GRAPH_POOL_BORROW", "SGLANG_ENABLE_GRAPH_POOL_PRECARVE")


def enable() -> None:
    """Enables VmmGraph in an SGLang process. Repeated calls have no effect."""
    if not wanted():
        return
    session = enable_for("SGLang")
    if session is None or getattr(session, "sglang", False):
        return
    session.sglang = True
    for name in _OFF:
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            log.info("vmmgraph: %s is off, since graph memory is not torch's", name)
        os.environ[name] = "0"
    from .._trees import when_imported

    for name in ("full_cuda_graph_backend", "breakable_cuda_graph_backend", "tc_piecewise_cuda_graph_backend"):
        when_imported(f"sglang.srt.model_executor.runner_backend.{name}", name_shapes)
    when_imported("sglang.srt.managers.scheduler", scheduler_captures)
    communicators = "sglang.srt.distributed.device_communicators"
    when_imported(f"{communicators}.custom_all_reduce", without_custom_all_reduce)
    when_imported(f"{communicators}.custom_all_reduce_v2", copying_all_reduce)
    if is_set("VMMGRAPH_KV"):
        from . import sglang_kv

        sglang_kv.install(when_imported)


def scheduler_captures(module: ModuleType) -> None:
    """Returns idle pages and logs the memory of the graphs when a scheduler's captures end."""
    after_captures(getattr(module, "Scheduler", None), "init_all_cuda_graphs")


def copying_all_reduce(module: ModuleType) -> None:
    """Makes ``CustomAllReduceV2`` copy its inputs to its own shared buffer in graphs, as it does
    outside graphs: other processes cannot open graph memory."""
    kind = getattr(module, "CustomAllReduceV2", None)
    if kind is None:
        return
    original = kind.__init__

    @functools.wraps(original)
    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.disabled:
            log.info("vmmgraph: custom all-reduce copies its inputs in graphs, since other processes cannot open graph memory")

    kind.__init__ = created
    # Turns the registration of graph inputs on.
    kind.capture = lambda self: contextlib.nullcontext()
    if not hasattr(kind, "_allocate_graph_row"):
        # Before SGLang 0.5.16: turns the registration on after an all-reduce of compiled pieces.
        kind.custom_all_reduce = kind._all_reduce


def name_shapes(module: ModuleType) -> None:
    """Makes the captures of one size in a backend pieces of one graph group."""
    from .._scopes import shape

    pieces_under_saver(module)
    for kind in list(vars(module).values()):
        capture = vars(kind).get("capture_one") if isinstance(kind, type) and kind.__module__ == module.__name__ else None
        if capture is None:
            continue

        def captured(self: Any, *args: Any, _capture: Any = capture, **kwargs: Any) -> Any:
            key = args[0] if args else next(iter(kwargs.values()), "")
            with shape(str(getattr(key, "size", key))):
                return _capture(self, *args, **kwargs)

        kind.capture_one = functools.wraps(capture)(captured)


def pieces_under_saver(module: ModuleType) -> None:
    """Gives breakable graphs the memory saver's tag of graphs, where SGLang refuses its memory
    saver (``SGLANG_MEMORY_SAVER_CUDA_GRAPH``)."""
    kind = getattr(module, "BreakableCudaGraphBackend", None)
    if kind is None:
        return
    create, session = kind.__init__, kind.capture_session

    @functools.wraps(create)
    def created(self: Any, *args: Any, enable_memory_saver: bool = False, **kwargs: Any) -> None:
        self._vmmgraph_saver = _saver_of_graphs() if enable_memory_saver else None
        create(self, *args, enable_memory_saver=enable_memory_saver and self._vmmgraph_saver is None, **kwargs)

    @functools.wraps(session)
    @contextlib.contextmanager
    def tagged(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        import torch

        with session(self, *args, **kwargs) as inside:
            if self._vmmgraph_saver is not None:
                # All captures of the pool use this arena, as long as the arena exists.
                self._vmmgraph_arena = self._vmmgraph_saver.arena_of(torch.cuda.CUDAGraph, self._pool, "cuda_graph")
            yield inside

    kind.__init__, kind.capture_session = created, tagged


def _saver_of_graphs() -> Any:
    """Returns VmmGraph's memory saver if graphs are paused by this saver; otherwise ``None``."""
    package = sys.modules.get("torch_memory_saver")
    if os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() not in ("1", "true") or package is None:
        return None
    from ..memory_saver import torch_memory_saver

    return torch_memory_saver._ready() if package.torch_memory_saver is torch_memory_saver else None
