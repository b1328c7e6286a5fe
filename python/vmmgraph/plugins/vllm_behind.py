"""vLLM serves at once and captures between steps (``VMMGRAPH_CAPTURE=behind``), for both model
runners of vLLM 0.24 and 0.33.

`capture_model` runs a few shapes eagerly, for kernels compiled at their first run, and for buffers
with the size of their first use (`first_runs`). Graphs are then captured in units of work: a
warm-up run, or a capture. Until a graph exists, a larger graph of at most twice the tokens runs the
step, or the step runs eagerly with the padding of its graph.

Times of the units:

    between two steps       most used shapes first, for ``VMMGRAPH_CAPTURE_MS`` milliseconds a step
                            on average; with several ranks, one unit a step
    while the engine is idle    also shapes without steps

Safety. A unit begins before `execute_model`, when no step is between `execute_model` and
`sample_tokens`. Its dummy run uses vLLM's input buffers, in stream order after the last step; the
next step writes all of them again. Slots are padding, so no KV block is written. Block tables are
zero, so only the null block is read: blocks of ended requests may have no memory (`kv_guard`).
Captures use the thread's own mode, since other threads wait for events meanwhile.

With ``VMMGRAPH_KV=1`` the cache is sized before the captures. So `capture_model` also captures the
largest shape of each mode, and the reserve of the cache has the measured bytes of these graphs for
every later one (`kv_plan.Reserve.graphs`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

from .. import _histogram, _session
from .._files import Unfit
from .._histogram import Shape
from . import vllm_behind_033, vllm_kv_033
from ._common import captures_ended, choice, is_set, log
from .capture_queue import STAND_IN, Budget, Queue
from .kv_plan import MIB
from .vllm_kv import RELEASES, known_release, kv_of

#: Milliseconds of captures a step, on average.
MILLISECONDS = 5


def install(when_imported: Callable[[str, Callable[[ModuleType], None]], Any]) -> None:
    """Wraps vLLM's methods when their modules are imported."""
    when_imported("vllm.v1.engine.core", patch_engine)
    when_imported("vllm.v1.worker.gpu_worker", patch_worker)
    when_imported("vllm.v1.worker.gpu_model_runner", functools.partial(patch_runner, adapter=First))
    when_imported("vllm.v1.worker.gpu.model_runner", functools.partial(patch_runner, adapter=Second))


def supported() -> bool:
    return known_release("capture behind the traffic", RELEASES + vllm_kv_033.RELEASES)


def declined(runner: Any) -> str:
    """Returns why vLLM captures before it serves; empty if VmmGraph captures behind the traffic."""
    config = runner.vllm_config
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1 or getattr(parallel, "use_ubatching", False):
        return "data parallel, pipeline parallel and split batches need the same shape on all ranks"
    if config.speculative_config is not None:
        return "draft models have graphs of their own"
    if config.lora_config is not None:
        return "a dummy run would replace the adapters"
    if config.kv_transfer_config is not None:
        return "a dummy run would call the KV connector"
    if getattr(runner, "calculate_kv_scales", False) or getattr(runner, "is_encoder_decoder", False):
        return "a dummy run would write state of the model"
    if getattr(config.model_config, "is_encoder_decoder", False) or getattr(runner, "routed_experts_initialized", False):
        return "a dummy run would write state of the model"
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "a fast prefill needs a second graph in one step"
    if getattr(runner, "is_mm_prefix_lm", False):
        return "attention depends on the images of requests"
    for group in runner.kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
        if any("Mamba" in type(spec).__name__ for spec in specs.values()):
            return "a dummy run would write recurrent states of requests"
    from vllm.version import __version__

    if str(__version__).startswith(vllm_kv_033.RELEASES):
        return vllm_behind_033.declined(runner)
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return "breakable graphs are on" if is_breakable_cudagraph_enabled() else ""


# The runners.


class First:
    """Shapes and captures of vLLM's first model runner. A graph is named by mode and descriptor."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.dispatcher = runner.cudagraph_dispatcher
        self.warm_ups = runner.compilation_config.cudagraph_num_of_warmups
        self.original = self.dispatcher.dispatch

    def declined(self) -> str:
        self.runner._maybe_init_encoder_cudagraph_manager()
        return "" if self.runner.encoder_cudagraph_manager is None else "the encoder has graphs of its own"

    def take(self, capture: Callable[[Any], int], begin: Callable[[], None]) -> int:
        """Calls `begin` in place of vLLM's captures. Returns the graphs' bytes."""
        del capture
        begin()
        from vllm.v1.worker.workspace import lock_workspace

        # Graphs keep the address of the workspace, which the largest shapes have sized.
        lock_workspace()
        return 0

    def shapes(self) -> list[tuple[Any, Shape]]:
        listed = []
        for mode, descriptors in self.dispatcher.get_capture_descs():
            for one in descriptors:
                extents = (one.num_tokens, one.num_reqs or 0, 0, 0)
                listed.append(((mode, one), Shape(mode.name.lower(), int(one.uniform), extents, 0)))
        return listed

    def dispatch(self, queue: Queue, count: Callable[[], bool], stand_in: bool) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor

        sizes = sorted(self.runner.compilation_config.cudagraph_capture_sizes or ())

        def dispatch(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            own = self.original(num_tokens, *args, **kwargs)
            if own[0] == CUDAGraphMode.NONE:
                return own

            def larger() -> Iterator[Any]:
                if not stand_in:
                    return
                if own[0] == CUDAGraphMode.FULL and not kwargs.get("valid_modes"):
                    yield self.original(num_tokens, *args, **{**kwargs, "invalid_modes": {CUDAGraphMode.FULL}})
                for size in sizes:
                    if own[1].num_tokens < size <= STAND_IN * own[1].num_tokens:
                        yield self.original(size, *args, **kwargs)

            chosen = queue.choose(own, count(), larger)
            return chosen if chosen is not None else (CUDAGraphMode.NONE, BatchDescriptor(own[1].num_tokens))

        return dispatch

    def set_dispatch(self, dispatch: Any) -> None:
        self.dispatcher.dispatch = dispatch

    def waits(self) -> bool:
        """Returns whether no event protects the host buffers of a dummy run from the next step."""
        return self.runner.prepare_inputs_event is None

    def warm(self, one: Any) -> None:
        from vllm.config import CUDAGraphMode

        mode, descriptor = one
        with self.empty_batch():
            self.runner._dummy_run(
                descriptor.num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                force_attention=mode == CUDAGraphMode.FULL,
                uniform_decode=descriptor.uniform,
                skip_eplb=True,
                remove_lora=False,
            )

    def capture(self, one: Any) -> None:
        mode, descriptor = one
        with self.empty_batch():
            self.runner._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode, num_warmups=0)

    @contextlib.contextmanager
    def empty_batch(self) -> Iterator[None]:
        """A dummy run sees a batch without requests, as before the first step.

        Its block tables name the null block only, and its requests have no tokens. The next step
        copies the block tables again.
        """
        import torch

        batch = self.runner.input_batch

        def zero(_: int) -> None:
            for table in batch.block_table.block_tables:
                table.block_table.gpu.zero_()

        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(batch.block_table, "commit_block_table", zero))
            for name in ("num_computed_tokens_cpu_tensor", "num_prompt_tokens_cpu_tensor"):
                stack.enter_context(patch.object(batch, name, torch.zeros_like(getattr(batch, name))))
            yield

    def forget(self, one: Any) -> None:
        """Drops the pieces of a failed capture."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        for wrapper in list(CUDAGraphWrapper._all_instances):
            if wrapper.runtime_mode == one[0]:
                wrapper.concrete_cudagraph_entries.pop(one[1], None)


class Second:
    """Shapes and captures of vLLM's second model runner. A graph is named by its descriptor."""

    warm_ups = 1

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils

        self.runner, self.utils = runner, cudagraph_utils
        self.manager = runner.cudagraph_manager
        #: Captures the manager's shapes. `take` replaces vLLM's attribute.
        self.capture_shapes = cudagraph_utils.CudaGraphManager.capture
        self.original = self.manager.dispatch
        self.factory: Any = None

    def declined(self) -> str:
        return ""

    def take(self, capture: Callable[[Any], int], begin: Callable[[], None]) -> int:
        """Calls `begin` in place of vLLM's captures. Returns the graphs' bytes."""

        def taken(manager: Any, factory: Any, *_: Any, **__: Any) -> dict[Any, Any]:
            # Prepares a shape's inputs, and returns its forward function.
            self.factory = factory
            manager._graphs_captured = True
            begin()
            return {}

        with patch.object(self.utils.CudaGraphManager, "capture", taken):
            return capture(self.runner)

    def shapes(self) -> list[tuple[Any, Shape]]:
        from vllm.config import CUDAGraphMode

        listed = []
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            for one in self.manager._capture_descs.get(mode, ()):
                extents = (one.num_tokens, one.num_reqs or 0, 0, 0)
                listed.append((one, Shape(mode.name.lower(), int(one.uniform_token_count is not None), extents, 0)))
        return listed

    def dispatch(self, queue: Queue, count: Callable[[], bool], stand_in: bool) -> Any:
        from vllm.config import CUDAGraphMode

        ascending = sorted(queue.shapes, key=lambda one: (one.num_tokens, -one.cg_mode.value))  # type: ignore[attr-defined]

        def dispatch(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any) -> Any:
            own = self.original(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
            if own.cg_mode == CUDAGraphMode.NONE:
                return own

            def larger() -> Iterator[Any]:
                for one in ascending if stand_in else ():
                    near = own.num_tokens <= one.num_tokens <= STAND_IN * own.num_tokens
                    holds = one.num_reqs is None or one.num_reqs >= num_reqs
                    if near and holds and one.uniform_token_count in (None, uniform_token_count):
                        yield one

            chosen = queue.choose(own, count(), larger)
            if chosen is not None:
                return chosen
            # Padded tokens and unpadded sequences, as in a step with piecewise graphs.
            return replace(own, cg_mode=CUDAGraphMode.NONE, num_reqs=num_reqs, uniform_token_count=None)

        return dispatch

    def set_dispatch(self, dispatch: Any) -> None:
        self.manager.dispatch = dispatch

    def waits(self) -> bool:
        """Returns false: each dummy run has host buffers of its own."""
        return False

    def warm(self, one: Any) -> None:
        from vllm.config import CUDAGraphMode

        self.zero_tables()
        forward_of(self.factory(one, warmup=True))(CUDAGraphMode.NONE)

    def capture(self, one: Any) -> None:
        """Runs `CudaGraphManager.capture` for one shape, without its warm-up run."""
        from vllm.config import CUDAGraphMode

        def factory(one: Any, warmup: bool) -> Any:
            made = self.factory(one, warmup=warmup)
            if not warmup:
                return made

            def captures(mode: Any) -> None:
                if mode != CUDAGraphMode.NONE:
                    forward_of(made)(mode)

            return (captures, *made[1:]) if isinstance(made, tuple) else captures

        self.zero_tables()
        with (
            patch.object(self.manager, "_capture_descs", {one.cg_mode: [one]}),
            patch.object(self.utils, "graph_capture", lambda device: contextlib.nullcontext()),
            patch.object(self.utils, "tqdm", lambda shapes, desc: shapes),
        ):
            self.capture_shapes(self.manager, factory)

    def zero_tables(self) -> None:
        """A dummy run sees the null block only. The next step gathers the block tables again."""
        for table in self.runner.block_tables.input_block_tables:
            table.zero_()

    def forget(self, one: Any) -> None:
        """Drops the pieces of a failed capture."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        self.manager.graphs.pop(one, None)
        for wrapper in list(CUDAGraphWrapper._all_instances):
            entries = wrapper.concrete_cudagraph_entries
            for key in [key for key in entries if key.num_tokens == one.num_tokens and wrapper.runtime_mode == one.cg_mode]:
                del entries[key]


class Behind:
    """Captures of one runner behind the traffic."""

    def __init__(self, runner: Any, adapter: Any) -> None:
        self.runner, self.adapter = runner, adapter
        self.several_ranks = runner.vllm_config.parallel_config.world_size > 1
        self.path = os.environ.get("VMMGRAPH_CAPTURE_HISTOGRAM", "")
        self.queue = Queue(adapter.shapes(), read_histogram(self.path))
        self.budget = Budget(milliseconds())
        #: Set after the worker's warm-up, whose steps are no traffic.
        self.started = False
        #: True in a live step.
        self.live = False
        #: The graph in work, and its warm-up runs still to do.
        self.current: Any = None
        self.warm_ups = 0
        #: Milliseconds of the last warm-up run and of the last capture.
        self.took = {True: 0.0, False: 0.0}
        self.seconds = 0.0
        self.stream: Any = None
        # Ranks with different graphs must run a step with the same number of tokens.
        off = os.environ.get("VMMGRAPH_CAPTURE_STAND_IN") and not is_set("VMMGRAPH_CAPTURE_STAND_IN")
        self.dispatch = adapter.dispatch(self.queue, lambda: self.live, not off and not self.several_ranks)

    def begin(self) -> None:
        """Prepares the captures: eager runs, and the reserve of a KV cache sized before them."""
        start = time.perf_counter()
        for one in first_runs(self.queue.shapes):
            with self.working():
                self.adapter.warm(one)
        kv = kv_of(self.runner)
        later = 0
        for mode, one in largest(self.queue.shapes).items() if kv is not None else ():
            before = graph_bytes()
            with self.working():
                self.adapter.capture(one)
            self.queue.ready.add(one)
            each = max(MIB, graph_bytes() - before)
            later += each * (sum(shape.mode == mode for shape in self.queue.shapes.values()) - 1)
        if kv is not None:
            kv.later_graphs = later
        self.adapter.set_dispatch(self.dispatch)
        if self.path and getattr(self.runner.vllm_config.parallel_config, "rank", 0) == 0:
            # Must not keep the runner alive.
            atexit.register(save, self.path, self.queue)
        log.info(
            "vmmgraph: %d shapes are captured behind the traffic, %.1f ms a step; ready after %.2f s",
            len(self.queue.missing()),
            self.budget.each,
            time.perf_counter() - start,
        )

    def between(self) -> None:
        """Works before a step, except the first one. No step may be in flight."""
        served = self.queue.by_graph + self.queue.eager
        if not served or getattr(self.runner, "execute_model_state", None) is not None:
            return
        if self.several_ranks:
            # The ranks' clocks differ, and warm-up runs have collectives.
            self.unit(unused=False)
            return
        self.budget.step()
        while self.budget.allows(self.took[self.warms()]):
            spent = self.unit(unused=False)
            if spent is None:
                break
            self.budget.spend(spent)

    def idle(self) -> int:
        """Does one unit of work while the engine is idle. Returns the number of missing graphs."""
        if self.started:
            self.unit(unused=True)
        return len(self.queue.missing()) if self.started else 0

    def warms(self) -> bool:
        """Returns whether the next unit is a warm-up run."""
        return bool(self.adapter.warm_ups if self.current is None else self.warm_ups)

    def unit(self, unused: bool) -> float | None:
        """Does one unit of work. Returns its milliseconds; ``None`` if nothing is left."""
        if self.current is None:
            self.current = self.queue.next(unused)
            self.warm_ups = self.adapter.warm_ups
        one = self.current
        if one is None:
            return None
        start = time.perf_counter()
        warms = self.warms()
        try:
            with self.working():
                if warms:
                    self.adapter.warm(one)
                    self.warm_ups -= 1
                else:
                    self.adapter.capture(one)
                    self.queue.ready.add(one)
        except Exception as error:  # noqa: BLE001 - of any kernel: the shape stays eager
            self.queue.failed.add(one)
            self.adapter.forget(one)
            log.warning("vmmgraph: cannot capture %s: %s; its steps run eagerly", one, error)
        if one in self.queue.ready or one in self.queue.failed:
            self.current = None
        spent = 1e3 * (time.perf_counter() - start)
        self.took[warms] = spent
        self.seconds += spent / 1e3
        if not self.queue.missing():
            log.info(
                "vmmgraph: %d shapes are captured, %d failed; %.2f s between steps, in which graphs ran %d of %d steps",
                len(self.queue.ready),
                len(self.queue.failed),
                self.seconds,
                self.queue.by_graph,
                self.queue.by_graph + self.queue.eager,
            )
            captures_ended(serving=True)
        return spent

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Surrounds warm-up runs and captures, on one stream, after the work of the current stream.

        Later work of the current stream is ordered after them. If the runner's next step would
        write host buffers which the device still reads, the host waits.
        """
        import torch
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.distributed.parallel_state import GraphCaptureContext, get_pp_group, get_tp_group

        if self.stream is None:
            # One stream: libraries keep workspaces by stream.
            self.stream = torch.cuda.Stream(device=self.runner.device)
        context = GraphCaptureContext(self.stream)
        current = torch.cuda.current_stream()
        live, self.live = self.live, False
        collects = gc.isenabled()
        gc.disable()
        set_cudagraph_capturing_enabled(True)
        self.adapter.set_dispatch(self.adapter.original)
        try:
            with (
                torch.inference_mode(),
                without_waits(torch),
                get_tp_group().graph_capture(context),
                get_pp_group().graph_capture(context),
            ):
                yield
        finally:
            current.wait_stream(self.stream)
            self.adapter.set_dispatch(self.dispatch)
            set_cudagraph_capturing_enabled(False)
            self.live = live
            if collects:
                gc.enable()
        if self.adapter.waits():
            current.synchronize()


def forward_of(made: Any) -> Any:
    """Returns the forward function of a shape. vLLM 0.24 makes a tuple with the attention state."""
    return made[0] if isinstance(made, tuple) else made


def largest(shapes: dict[Any, Shape]) -> dict[str, Any]:
    """Returns the largest shape of each mode. ``shapes`` has the larger shapes of a mode first."""
    found: dict[str, Any] = {}
    for one, shape in shapes.items():
        found.setdefault(shape.mode, one)
    return found


def first_runs(shapes: dict[Any, Shape]) -> list[Any]:
    """Returns the shapes that run eagerly at the start.

    The largest of each mode, for the size of buffers. Full graphs also contain attention, so also
    one for each variant of its kernels: Triton compiles other code for one sequence and for
    multiples of 16, and up to 16 sequences have a kernel of their own.
    """
    variants: dict[tuple[bool, bool, bool], Any] = {}
    for one, shape in shapes.items():
        if shape.mode == "full":
            size = shape.extents[1] or shape.extents[0]
            variants.setdefault((size == 1, size % 16 == 0, size <= 16), one)
    return list(dict.fromkeys([*largest(shapes).values(), *variants.values()]))


def save(path: str, queue: Queue) -> None:
    """Writes the histogram."""
    try:
        _histogram.save(path, queue.histogram())
    except OSError as error:
        log.warning("vmmgraph: cannot write the histogram %s: %s", path, error)


@contextlib.contextmanager
def without_waits(torch: Any) -> Iterator[None]:
    """Captures in the thread's own mode, without the waits and collections of ``torch.cuda.graph``.

    A step may still run, and other threads may wait for its events.
    """
    original = torch.cuda.CUDAGraph.capture_begin

    def nothing(*_: Any, **__: Any) -> None:
        pass

    # vLLM begins each segment of a breakable graph without `torch.cuda.graph`.
    def begin(graph: Any, *pool: Any, **kwargs: Any) -> None:
        original(graph, *pool[:1], **{**kwargs, "capture_error_mode": "thread_local"})

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (gc, "collect"),
            (torch.cuda, "synchronize"),
            (torch.cuda, "empty_cache"),
            (torch.accelerator, "synchronize"),
            (torch.accelerator, "empty_cache"),
            (torch._C, "_host_emptyCache"),
        ):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, nothing))
        stack.enter_context(patch.object(torch.cuda.CUDAGraph, "capture_begin", begin))
        yield


def graph_bytes() -> int:
    """Returns the bytes of all graphs which each graph adds: executables and retained blocks."""
    return sum(arena.stats()["retained_bytes"] + arena.executables().get("bytes", 0) for arena in _session.arenas())


def milliseconds() -> float:
    """Returns the milliseconds of captures a step, on average."""
    return int(choice("VMMGRAPH_CAPTURE_MS") or MILLISECONDS)


def read_histogram(path: str) -> Iterable[Shape]:
    """Returns the shapes of a file; empty if there is none. An invalid file is logged."""
    if not path or not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf8", errors="replace") as file:
            return _histogram.parse(file.read(), path)
    except (Unfit, OSError) as error:
        log.warning("vmmgraph: the order of captures is unknown: %s", error)
        return []


def behind_of(runner: Any) -> Behind | None:
    """Returns the captures behind the traffic of a runner; ``None`` if vLLM captured before."""
    return getattr(runner, "_vmmgraph_behind", None)


def patch_runner(module: ModuleType, adapter: type) -> None:
    """Replaces the captures of a runner, and works before its steps."""
    if not supported():
        return
    runner = module.GPUModelRunner
    capture, execute = runner.capture_model, runner.execute_model

    @functools.wraps(capture)
    def captured(self: Any, **kwargs: Any) -> int:
        # vLLM 0.33 estimates the memory of its graphs by throwaway captures.
        if kwargs.get("profile_only"):
            return int(capture(self, **kwargs))
        why = ""
        if behind_of(self) is None:
            why = "graphs are off" if not self.vllm_config.compilation_config.cudagraph_mode else declined(self)
            one = adapter(self) if not why else None
            if one is not None:
                why = one.declined() or ("" if one.shapes() else "no graphs are to be captured")
            if one is not None and not why:
                self._vmmgraph_behind = Behind(self, one)
                taken: int = one.take(capture, self._vmmgraph_behind.begin)
                return taken
            log.info("vmmgraph: vLLM captures before it serves, since %s", why)
        return int(capture(self, **kwargs))

    @functools.wraps(execute)
    def executed(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        behind = behind_of(self)
        # The second runner's dummy runs are steps, too.
        if behind is None or kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            return execute(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            behind.between()
        behind.live = behind.started
        try:
            return execute(self, scheduler_output, *args, **kwargs)
        finally:
            behind.live = False

    runner.capture_model, runner.execute_model = captured, executed


# The worker and the engine.


def patch_worker(module: ModuleType) -> None:
    """Begins the captures after a worker's warm-up, and adds the unit of an idle engine."""
    if not supported():
        return
    worker = module.Worker
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warmed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = warm_up(self, *args, **kwargs)
        behind = behind_of(self.model_runner)
        if behind is not None:
            behind.started = True
        return result

    def unit(self: Any) -> int:
        """Does one unit of captures. Returns the number of missing graphs."""
        behind = behind_of(self.model_runner)
        return 0 if behind is None else behind.idle()

    worker.compile_or_warm_up_model = warmed
    worker.vmmgraph_capture_unit = unit


def patch_engine(module: ModuleType) -> None:
    """Captures while an engine waits for requests."""
    if not supported():
        return
    engine = module.EngineCoreProc
    process = engine._process_input_queue

    @functools.wraps(process)
    def processed(self: Any) -> Any:
        # Weights and cache of a sleeping engine have no memory.
        while (
            not getattr(self, "_vmmgraph_captured", False)
            and not self.has_work()
            and self.is_running()
            and self.input_queue.empty()
            # A pause waits for the idle engine.
            and not self._idle_state_callbacks
            and not self.model_executor.is_sleeping
        ):
            self._vmmgraph_captured = not any(self.model_executor.collective_rpc("vmmgraph_capture_unit"))
        return process(self)

    engine._process_input_queue = processed
