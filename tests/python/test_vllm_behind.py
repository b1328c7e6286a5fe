"""Captures behind the traffic of stand-ins of vLLM 0.24 and 0.33: order, budget, larger graphs,
failures.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import json
import queue
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vmmgraph import _histogram, _session
from vmmgraph._histogram import Shape
from vmmgraph.plugins import kv_plan, vllm, vllm_behind
from vmmgraph.plugins.capture_queue import SAVED_STEPS, Budget, Queue

MIB = 1 << 20


# The queue.


def shapes(*sizes: int, mode: str = "full") -> list[tuple[str, Shape]]:
    return [(f"{mode} {size}", Shape(mode, 1, (size, size, 0, 0), 0)) for size in sizes]


def test_the_most_used_missing_graph_is_next_and_unused_ones_wait_for_idle_time() -> None:
    queue = Queue(shapes(8, 4, 2, 1))
    assert queue.next(unused=False) is None and queue.next(unused=True) == "full 8"
    for one in ("full 2", "full 4", "full 2"):
        assert queue.choose(one, True, list) is None
    assert queue.next(unused=False) == "full 2"
    queue.ready.add("full 2")
    assert queue.next(unused=False) == "full 4"
    queue.failed.add("full 4")
    assert queue.next(unused=False) is None and queue.next(unused=True) == "full 8"
    assert queue.choose("full 2", True, list) == "full 2"
    assert queue.choose("full 1", True, lambda: ["full 4", "full 2"]) == "full 2", "only an existing graph stands in"
    assert queue.choose("full 4", False, list) is None
    assert (queue.by_graph, queue.eager, queue.steps["full 4"]) == (2, 3, 1), "a dummy run is no traffic"


def test_no_step_searches_if_all_used_graphs_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(shapes(8, 4))
    queue.choose("full 4", True, list)
    assert queue.next(unused=False) == "full 4"
    queue.ready.add("full 4")
    assert queue.next(unused=False) is None
    searches: list[str] = []
    monkeypatch.setattr(queue, "missing", lambda: searches.append("a search") or ["full 8"])
    queue.choose("full 4", True, list)
    assert queue.next(unused=False) is None and not searches
    queue.choose("full 8", True, lambda: ["full 4"])
    assert queue.next(unused=False) == "full 8" and searches


def test_a_histogram_orders_the_next_start(tmp_path: Path) -> None:
    first = Queue(shapes(4, 2) + shapes(512, mode="piecewise"))
    for one in ("full 2", "full 2", "piecewise 512"):
        first.choose(one, True, list)
    path = tmp_path / "histogram.json"
    _histogram.save(str(path), first.histogram())
    assert [name.name for name in tmp_path.iterdir()] == ["histogram.json"]
    second = Queue(shapes(4, 2, 1) + shapes(512, mode="piecewise"), _histogram.parse(path.read_text(), "a file"))
    assert second.next(unused=False) == "full 2"
    assert second.steps == {"full 4": 0, "full 2": 2, "full 1": 0, "piecewise 512": 1}


def test_a_budget_is_kept_on_average() -> None:
    budget = Budget(5)
    ran = 0
    for _ in range(200):
        budget.step()
        while budget.allows(20):
            budget.spend(20)
            ran += 1
    assert ran == 200 * 5 // 20
    longer = Budget(1)
    for _ in range(SAVED_STEPS - 1):
        longer.step()
        assert not longer.allows(300)
    longer.step()
    assert longer.allows(300), "a unit longer than all that is saved runs at last"
    nothing = Budget(0)
    nothing.step()
    assert not nothing.allows(0)


# The stand-in of vLLM.


class Mode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2

    def __bool__(self) -> bool:
        return self is not Mode.NONE


@dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


def compatible(one: Any, num_reqs: int, num_tokens: int, uniform_token_count: int | None, _: int) -> bool:
    uniform = one.uniform_token_count is None or one.uniform_token_count == uniform_token_count
    return uniform and (one.num_reqs is None or one.num_reqs >= num_reqs) and one.num_tokens >= num_tokens


FULL, PIECEWISE = (1, 2, 4, 8, 16), (16, 32)
SIZES = sorted({*FULL, *PIECEWISE})


class Device:
    """What kernels and captures did: names of streams, and waits."""

    def __init__(self) -> None:
        self.current = "step"
        self.log: list[Any] = []
        #: Raised by a capture of this many tokens.
        self.fails: dict[int, Exception] = {}
        self.modes: list[str] = []
        self.in_graph = False

    def take(self) -> list[Any]:
        log, self.log = self.log, []
        return log


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append((self.name, "waits for", other.name))

    def synchronize(self) -> None:
        self.device.log.append(("host", "waits for", self.name))


class Table:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.rows = "of requests"

    def zero_(self) -> None:
        self.rows = "zero"


class Wrapper:
    """A ``CUDAGraphWrapper``."""

    _all_instances: list[Wrapper] = []  # noqa: RUF012

    def __init__(self, mode: Mode) -> None:
        self.runtime_mode = mode
        self.concrete_cudagraph_entries: dict[Any, str] = {}
        Wrapper._all_instances.append(self)


class Runner:
    """Parts of both runners."""

    def __init__(self, start: Start) -> None:
        self.start, self.at = start, start.device
        self.vllm_config = start.config
        self.compilation_config = start.config.compilation_config
        self.kv_cache_config = start.kv_cache_config
        self.device = "cuda:0"
        self.execute_model_state: Any = None
        self.table = Table(self.at)
        self.wrappers = [Wrapper(Mode.PIECEWISE), Wrapper(Mode.FULL)]

    def forward(self, mode: Mode, tokens: int, entry: Any, captures: bool) -> None:
        """Runs or captures; a step sees the block tables of its requests."""
        stream, cuda = self.at.current, sys.modules["torch"].cuda
        if captures:
            assert Start.capturing, "captures are off"
            if mode is Mode.PIECEWISE:
                next(one for one in self.wrappers if one.runtime_mode is mode).concrete_cudagraph_entries[entry] = "a piece"
            if self.start.breakable and mode is Mode.PIECEWISE:
                for _ in ("a segment", "a segment"):
                    cuda.CUDAGraph().capture_begin(pool="pool")
            with contextlib.nullcontext() if self.at.in_graph or self.start.breakable else cuda.graph(cuda.CUDAGraph(), "pool"):
                if tokens in self.at.fails:
                    raise self.at.fails[tokens]
        self.at.log.append((stream, "captures" if captures else "runs", mode.name, tokens, self.table.rows))


class FirstRunner(Runner):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.cudagraph_dispatcher = self.dispatcher = FirstDispatcher()
        # Of the requests of the last step.
        self.input_batch = SimpleNamespace(
            block_table=Tables(self.table), num_computed_tokens_cpu_tensor="7", num_prompt_tokens_cpu_tensor="9"
        )
        self.encoder_cudagraph_manager = None
        self.prepare_inputs_event = start.event

    def _maybe_init_encoder_cudagraph_manager(self) -> None:
        pass

    def capture_model(self) -> int:
        raise AssertionError("vLLM captures before it serves")

    def _dummy_run(self, tokens: int, cudagraph_runtime_mode: Any = None, uniform_decode: bool = False, **how: Any) -> None:
        invalid = {} if cudagraph_runtime_mode is not Mode.NONE else {"valid_modes": {Mode.NONE}}
        mode, entry = self.cudagraph_dispatcher.dispatch(tokens, uniform_decode, **invalid)
        assert mode is cudagraph_runtime_mode
        if how.get("force_attention") or mode is Mode.FULL:
            self.input_batch.block_table.commit_block_table(tokens)
            # Rows of requests would choose other kernels.
            assert self.input_batch.num_computed_tokens_cpu_tensor == self.input_batch.num_prompt_tokens_cpu_tensor == "0"
        assert how["skip_eplb"] and how["remove_lora"] is False
        self.forward(mode, tokens, entry, how.get("is_graph_capturing", False))

    def _warmup_and_capture(self, descriptor: BatchDescriptor, cudagraph_runtime_mode: Mode, num_warmups: int) -> None:
        assert num_warmups == 0
        self._dummy_run(
            descriptor.num_tokens,
            cudagraph_runtime_mode,
            descriptor.uniform,
            skip_eplb=True,
            remove_lora=False,
            is_graph_capturing=True,
        )

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> tuple[str, int]:
        self.table.rows = "of requests"
        assert (self.input_batch.num_computed_tokens_cpu_tensor, self.input_batch.num_prompt_tokens_cpu_tensor) == ("7", "9")
        tokens = output.total_num_scheduled_tokens
        mode, entry = self.cudagraph_dispatcher.dispatch(tokens, output.uniform)
        self.forward(mode, entry.num_tokens, entry, False)
        return mode.name, entry.num_tokens


class Tables:
    def __init__(self, table: Table) -> None:
        self.table = table
        self.block_tables = [SimpleNamespace(block_table=SimpleNamespace(gpu=table))]

    def commit_block_table(self, _: int) -> None:
        self.table.rows = "of requests"


class FirstDispatcher:
    def get_capture_descs(self) -> list[Any]:
        piecewise = [BatchDescriptor(size) for size in reversed(PIECEWISE)]
        return [(Mode.PIECEWISE, piecewise), (Mode.FULL, [BatchDescriptor(size, size, True) for size in reversed(FULL)])]

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, valid_modes: Any = None, invalid_modes: Any = None) -> Any:
        allowed = set(valid_modes or Mode) - set(invalid_modes or ())
        size = next((size for size in SIZES if size >= num_tokens), None)
        if size is not None and uniform_decode and Mode.FULL in allowed and size in FULL:
            return Mode.FULL, BatchDescriptor(size, size, True)
        if size is not None and Mode.PIECEWISE in allowed and size in PIECEWISE:
            return Mode.PIECEWISE, BatchDescriptor(size)
        return Mode.NONE, BatchDescriptor(num_tokens)


class Manager:
    """A ``CudaGraphManager``."""

    pool = "pool"

    def __init__(self, runner: Runner) -> None:
        self.runner, self.start = runner, runner.start
        self.device = "cuda:0"
        self.graphs: dict[Any, Any] = {}
        self._graphs_captured = False
        piecewise = [BatchExecutionDescriptor(Mode.PIECEWISE, size, None) for size in reversed(PIECEWISE)]
        full = [BatchExecutionDescriptor(Mode.FULL, size, size, 1) for size in reversed(FULL)]
        self._capture_descs = {Mode.FULL: full, Mode.PIECEWISE: piecewise}

    def capture(self, factory: Any, progress: str = "Capturing CUDA graphs") -> dict[Any, Any]:
        """As vLLM: a warm-up run of each shape, then its capture."""
        utils, cuda = sys.modules["vllm.v1.worker.gpu.cudagraph_utils"], sys.modules["torch"].cuda
        assert sum(map(len, self._capture_descs.values())) == 1, "vLLM captures before it serves"
        with utils.graph_capture(device=self.device):
            for mode, shapes in self._capture_descs.items():
                for one in utils.tqdm(shapes, desc=progress):
                    forward = self.forward_of(factory(one, warmup=True))
                    forward(Mode.NONE)
                    if mode is Mode.FULL or self.start.breakable:
                        forward = self.forward_of(factory(one, warmup=False))
                    if mode is Mode.PIECEWISE:
                        forward(mode)
                        continue
                    assert one not in self.graphs
                    graph = cuda.CUDAGraph()
                    with cuda.graph(graph, self.pool):
                        forward(Mode.NONE)
                    self.graphs[one] = graph
        self._graphs_captured = True
        return {}

    def forward_of(self, made: Any) -> Any:
        if self.start.release == "0.33.0":
            return made
        forward, _attention_state = made
        return forward

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int, **of_033: int | None
    ) -> Any:
        assert self.start.release == "0.33.0" or not of_033
        size = next((size for size in SIZES if size >= num_tokens), None)
        for mode in (Mode.FULL, Mode.PIECEWISE):
            for one in self._capture_descs[mode]:
                if (
                    one.num_tokens == size
                    and compatible(one, num_reqs, num_tokens, uniform_token_count, 0)
                    and self._graphs_captured
                ):
                    return one
        return BatchExecutionDescriptor(Mode.NONE, num_tokens, num_reqs)


class ModelManager(Manager):
    def capture(self, runner: Any) -> dict[Any, Any]:  # type: ignore[override]
        def factory(one: Any, warmup: bool) -> Any:
            def forward(mode: Mode) -> None:
                captures = mode is Mode.PIECEWISE or not warmup
                assert mode is not Mode.PIECEWISE or warmup is not self.start.breakable
                runner.forward(one.cg_mode if captures else mode, one.num_tokens, BatchDescriptor(one.num_tokens), captures)

            return forward if self.start.release == "0.33.0" else (forward, "attention state")

        return super().capture(factory)


class ModelState:
    def capture_inner_cudagraphs(self) -> None:
        pass


class SecondRunner(Runner):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.cudagraph_manager = ModelManager(self)
        self.block_tables = SimpleNamespace(input_block_tables=[self.table])
        self.model_state = ModelState()

    def capture_model(self, **of_033: bool) -> int:
        assert self.start.release == "0.33.0" or not of_033
        if of_033.get("profile_only"):
            self.at.log.append("throwaway captures")
            return 5
        self.cudagraph_manager.capture(self)
        return 7

    def execute_model(self, output: Any, intermediate_tensors: Any = None, dummy_run: bool = False) -> tuple[str, int]:
        if not dummy_run:
            self.table.rows = "of requests"
        tokens = output.total_num_scheduled_tokens
        reqs = tokens if output.uniform else 1
        more = {"max_query_len": tokens // reqs} if self.start.release == "0.33.0" else {}
        one = self.cudagraph_manager.dispatch(reqs, tokens, 1 if output.uniform else None, num_active_loras=0, **more)
        assert one.num_reqs in (None, reqs) or one.cg_mode is Mode.FULL
        self.forward(one.cg_mode, one.num_tokens, one, False)
        return one.cg_mode.name, one.num_tokens


class Start:
    """Patched stand-in with one worker."""

    capturing = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second: bool, release: str = "0.24.0", breakable: bool = False) -> None:
        self.monkeypatch, self.second = monkeypatch, second
        self.release, self.breakable = release, breakable
        self.device = device = Device()
        self.event: Any = object()
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        self.config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0),
            compilation_config=SimpleNamespace(
                cudagraph_mode=Mode.FULL, cudagraph_num_of_warmups=1, cudagraph_capture_sizes=SIZES
            ),
            model_config=SimpleNamespace(),
            cache_config=SimpleNamespace(),
            speculative_config=None,
            lora_config=None,
            kv_transfer_config=None,
        )
        if release == "0.33.0":
            vars(self.config.parallel_config).update(
                enable_eplb=False, prefill_context_parallel_size=1, decode_context_parallel_size=1
            )
            self.config.model_config.is_mm_prefix_lm = False
            self.config.attention_config = SimpleNamespace(hisparse_config=None)
            self.config.aux_output_config = SimpleNamespace(enabled=False)
            self.config.observability_config = SimpleNamespace(jit_monitor_mode="warn")
        self.envs = SimpleNamespace(VLLM_ENABLE_STARTUP_PLAN=False, VLLM_GPU_SYNC_CHECK=None)
        Start.capturing = False
        Wrapper._all_instances = []
        kind = type("GPUModelRunner", (SecondRunner if second else FirstRunner,), {})
        self.kind = kind
        self.install(device)
        vllm_behind.patch_runner(module_of("runner", GPUModelRunner=kind), vllm_behind.Second if second else vllm_behind.First)
        start = self

        class Worker:
            def __init__(self) -> None:
                self.model_runner = kind(start)

            def compile_or_warm_up_model(self) -> None:
                self.model_runner.capture_model()
                # Warm-up steps are no traffic.
                self.model_runner.execute_model(step(4))

        vllm_behind.patch_worker(module_of("vllm.v1.worker.gpu_worker", Worker=Worker))
        self.worker = Worker()
        self.runner = self.worker.model_runner

    def install(self, device: Device) -> None:
        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            stream.wait_stream(Stream(device, device.current))
            before, device.current = device.current, stream.name
            try:
                yield
            finally:
                device.current = before

        class CUDAGraph:
            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                assert pool == "pool"
                device.modes.append(capture_error_mode)

        @contextlib.contextmanager
        def graph(graph: CUDAGraph, pool: str, capture_error_mode: str = "global") -> Iterator[None]:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            gc.collect()
            graph.capture_begin(pool, capture_error_mode=capture_error_mode)
            assert not gc.isenabled(), "a collection would free tensors inside a capture"
            device.in_graph = True
            try:
                yield
            finally:
                device.in_graph = False

        def unused(*_: Any, **__: Any) -> Any:
            raise AssertionError("a unit has no stream and no progress bar of its own")

        def wait(*_: Any) -> None:
            device.log.append("the host waits for the device")

        numbers = itertools.count()
        torch = types.ModuleType("torch")
        torch.cuda = SimpleNamespace(
            Stream=lambda device=None: Stream(self.device, f"captures {next(numbers)}"),
            current_stream=lambda: Stream(device, device.current),
            synchronize=wait,
            empty_cache=wait,
            graph=graph,
            CUDAGraph=CUDAGraph,
        )
        torch.accelerator = SimpleNamespace(synchronize=wait, empty_cache=wait)
        torch._C = SimpleNamespace(_host_emptyCache=wait)
        torch.inference_mode = contextlib.nullcontext
        torch.zeros_like = lambda _: "0"

        def group() -> Any:
            return SimpleNamespace(graph_capture=lambda context: on(context.stream))

        def enable(enabled: bool) -> None:
            Start.capturing = enabled

        for module in (
            torch,
            module_of("vllm", envs=self.envs),
            module_of("vllm.version", __version__=self.release),
            module_of("vllm.config", CUDAGraphMode=Mode),
            module_of("vllm.forward_context", BatchDescriptor=BatchDescriptor),
            module_of("vllm.compilation"),
            module_of("vllm.compilation.monitor", set_cudagraph_capturing_enabled=enable),
            module_of("vllm.compilation.cuda_graph", CUDAGraphWrapper=Wrapper),
            module_of("vllm.compilation.breakable_cudagraph", is_breakable_cudagraph_enabled=lambda: self.breakable),
            module_of("vllm.distributed"),
            module_of(
                "vllm.distributed.parallel_state",
                GraphCaptureContext=lambda stream: SimpleNamespace(stream=stream),
                get_tp_group=group,
                get_pp_group=lambda: SimpleNamespace(graph_capture=lambda _: contextlib.nullcontext()),
            ),
            module_of("vllm.v1"),
            module_of("vllm.v1.worker"),
            module_of("vllm.v1.worker.workspace", lock_workspace=lambda: device.log.append("the workspace is locked")),
            module_of("vllm.v1.worker.gpu"),
            module_of("vllm.v1.worker.gpu.cudagraph_utils", CudaGraphManager=Manager, graph_capture=unused, tqdm=unused),
            module_of("vllm.v1.worker.gpu.model_states"),
            module_of("vllm.v1.worker.gpu.model_states.interface", ModelState=ModelState),
        ):
            self.monkeypatch.setitem(sys.modules, module.__name__, module)
        utils = sys.modules["vllm.v1.worker.gpu.cudagraph_utils"]
        self.monkeypatch.setattr(sys.modules["vllm.v1.worker.gpu"], "cudagraph_utils", utils, raising=False)

    def begin(self) -> list[Any]:
        """Starts the worker. Returns the work of the start."""
        self.worker.compile_or_warm_up_model()
        return self.device.take()

    def steps(self, *tokens: int, uniform: bool = True) -> list[Any]:
        return [self.runner.execute_model(step(one, uniform)) for one in tokens]

    @property
    def behind(self) -> vllm_behind.Behind:
        found = vllm_behind.behind_of(self.runner)
        assert found is not None
        return found


def step(tokens: int, uniform: bool = True) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, uniform=uniform)


def module_of(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(values)
    return module


KINDS = {
    "first runner": (False, "0.24.0", False),
    "second runner": (True, "0.24.0", False),
    "first runner of 0.33": (False, "0.33.0", False),
    "second runner of 0.33": (True, "0.33.0", False),
    "breakable graphs of 0.33": (True, "0.33.0", True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    return started(monkeypatch, *request.param)


def started(monkeypatch: pytest.MonkeyPatch, second: bool, release: str, breakable: bool = False) -> Start:
    monkeypatch.setattr(_session, "arenas", list)
    for name in ("VMMGRAPH_CAPTURE_HISTOGRAM", "VMMGRAPH_CAPTURE_MS", "VMMGRAPH_CAPTURE_STAND_IN"):
        monkeypatch.delenv(name, raising=False)
    return Start(monkeypatch, second, release, breakable)


def captured(log: list[Any]) -> list[tuple[str, int]]:
    return [(one[2], one[3]) for one in log if isinstance(one, tuple) and one[1] == "captures"]


def test_the_start_runs_few_shapes_eagerly_and_captures_nothing(start: Start) -> None:
    log = start.begin()
    assert captured(log) == []
    eager = [one[3] for one in log if isinstance(one, tuple) and one[1] == "runs"]
    assert eager == [32, 16, 8, 1, 4], "the largest shape of each mode, and kernel variants; then vLLM's own warm-up step"
    assert "the host waits for the device" not in log
    assert ("the workspace is locked" in log) == (not start.second)
    assert start.behind.queue.eager == 0, "a warm-up step is no traffic"
    assert Start.capturing is False


def test_every_kernel_variant_of_the_graphs_runs_at_the_start() -> None:
    sizes = [*range(512, 255, -16), *range(248, 15, -8), 8, 4, 2, 1]
    names = dict(shapes(*sizes, mode="piecewise") + shapes(*sizes))
    ran = vllm_behind.first_runs(names)
    assert ran == ["piecewise 512", "full 512", "full 248", "full 16", "full 8", "full 1"]
    piecewise = dict(shapes(*sizes, mode="piecewise"))
    assert vllm_behind.first_runs(piecewise) == ["piecewise 512"], "attention is not in these graphs"


def test_steps_run_at_once_and_the_most_used_shapes_are_captured_between_them(start: Start) -> None:
    start.begin()
    start.behind.budget.each = 0
    assert start.steps(3) == [("NONE", 4)], "eager, with the padding of its graph"
    assert start.steps(7, 7) == [("NONE", 8)] * 2
    assert start.steps(20, uniform=False) == [("NONE", 32)]
    assert start.steps(40, uniform=False) == [("NONE", 40)], "larger than every graph"
    assert captured(start.device.take()) == []
    start.behind.budget.each = 1000
    assert start.steps(7) == [("FULL", 8)]
    assert captured(start.device.log)[0] == ("FULL", 8)
    assert set(captured(start.device.take())) == {("FULL", 8), ("FULL", 4), ("PIECEWISE", 32)}, "only shapes with steps"
    assert start.steps(3, 8) == [("FULL", 4), ("FULL", 8)]
    assert start.steps(20, uniform=False) == [("PIECEWISE", 32)]
    assert captured(start.device.take()) == []
    assert Start.capturing is False and set(start.device.modes) == {"thread_local"}
    assert gc.isenabled()


def test_a_larger_graph_stands_in_of_at_most_twice_the_tokens(start: Start) -> None:
    start.begin()
    start.behind.budget.each = 0
    names = {(shape.mode, shape.extents[0]): one for one, shape in start.behind.queue.shapes.items()}
    start.behind.queue.ready.add(names["full", 8])
    assert start.steps(3, 2) == [("FULL", 8), ("NONE", 2)]
    start.behind.queue.ready.add(names["piecewise", 16])
    assert start.steps(16) == [("PIECEWISE", 16)], "of the same tokens"
    assert start.behind.queue.steps[names["full", 4]] == 1, "the step counts for its own graph"


def test_stand_ins_can_be_turned_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMGRAPH_CAPTURE_STAND_IN", "0")
    start.begin()
    start.behind.budget.each = 0
    names = {(shape.mode, shape.extents[0]): one for one, shape in start.behind.queue.shapes.items()}
    start.behind.queue.ready.add(names["full", 8])
    assert start.steps(3, 8) == [("NONE", 4), ("FULL", 8)]


# A dummy run between steps sees the null block, is ordered after the last step and before the next
# one, and the next step has its own block tables again.
def test_a_unit_is_ordered_between_steps_and_disturbs_none(start: Start) -> None:
    start.begin()
    start.steps(4)
    start.behind.budget.each = 1000
    start.device.take()
    start.steps(4)
    log = start.device.take()
    side = "captures 0"
    begin = log.index((side, "waits for", "step"))
    runs = [one for one in log if isinstance(one, tuple) and one[1] in ("runs", "captures")]
    assert [one[0] for one in runs] == [side, side, "step"]
    assert [one[4] for one in runs] == ["zero", "zero", "of requests"]
    end = len(log) - 1 - log[::-1].index(("step", "waits for", side))
    assert begin < log.index(runs[0]) and log.index(runs[1]) < end < log.index(runs[2])
    assert not any(isinstance(one, str) for one in log), "the host waits for nothing"


def test_without_an_event_for_host_buffers_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_session, "arenas", list)
    start = Start(monkeypatch, False)
    start.runner.prepare_inputs_event = None
    start.begin()
    start.steps(4)
    start.device.take()
    start.behind.budget.each = 1000
    start.steps(4)
    assert ("host", "waits for", "step") in start.device.take()


def test_no_unit_while_a_step_is_in_flight(start: Start) -> None:
    start.begin()
    start.steps(4)
    start.behind.budget.each = 1000
    start.runner.execute_model_state = "launched, and not sampled"
    start.device.take()
    start.steps(4)
    assert captured(start.device.take()) == []
    start.runner.execute_model_state = None
    start.steps(4)
    assert captured(start.device.take()) == [("FULL", 4)]


def test_dummy_runs_of_the_second_runner_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_session, "arenas", list)
    start = Start(monkeypatch, True)
    start.begin()
    start.runner.execute_model(step(4), dummy_run=True)
    start.runner.execute_model(step(4), None, True)
    assert start.behind.queue.eager == 0


def test_a_failed_capture_leaves_its_shape_eager(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start.begin()
    start.device.fails = {4: MemoryError("planted"), 32: RuntimeError("planted")}
    start.steps(4, 4, 8)
    start.steps(32, uniform=False)
    start.behind.budget.each = 1000
    assert start.steps(3, 8) == [("FULL", 8), ("FULL", 8)], "a larger one stands in"
    assert start.steps(32, uniform=False) == [("NONE", 32)]
    assert sum("cannot capture" in message for message in caplog.messages) == 2
    assert all(not one.concrete_cudagraph_entries for one in start.runner.wrappers), "pieces are dropped"
    start.device.take()
    start.steps(4, 4)
    assert captured(start.device.take()) == [], "not tried again"
    assert gc.isenabled() and Start.capturing is False


def test_idle_time_is_for_all_shapes_and_says_when_it_is_done(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "vmmgraph")
    assert start.worker.vmmgraph_capture_unit() == 0, "not before the worker has started"
    start.begin()
    start.behind.budget.each = 0
    start.steps(4)
    engine = engine_over(start, monkeypatch)
    start.device.take()
    engine.asleep = True
    engine._process_input_queue()
    assert start.device.take() == [], "the weights of a sleeping engine have no memory"
    engine.asleep = False
    engine.input_queue.put("a request")
    engine._process_input_queue()
    assert start.device.take() == [], "requests come first"
    engine.input_queue.get()
    engine._idle_state_callbacks.append("a pause")
    engine._process_input_queue()
    assert start.device.take() == [], "a pause comes first"
    engine._idle_state_callbacks.clear()
    engine._process_input_queue()
    made = captured(start.device.take())
    assert made[0] == ("FULL", 4) and len(made) == len(FULL) + len(PIECEWISE)
    assert any("7 shapes are captured, 0 failed" in message for message in caplog.messages)
    calls = engine.calls
    engine._process_input_queue()
    assert engine.calls == calls, "nothing is left"


def engine_over(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    class EngineCoreProc:
        asleep = False
        calls = 0

        def __init__(self) -> None:
            self.input_queue: queue.Queue[str] = queue.Queue()
            self.model_executor = self
            self._idle_state_callbacks: list[str] = []

        @property
        def is_sleeping(self) -> bool:
            return self.asleep

        def has_work(self) -> bool:
            return False

        def is_running(self) -> bool:
            return True

        def collective_rpc(self, name: str) -> list[Any]:
            self.calls += 1
            return [getattr(start.worker, name)()]

        def _process_input_queue(self) -> None:
            pass

    vllm_behind.patch_engine(module_of("vllm.v1.engine.core", EngineCoreProc=EngineCoreProc))
    return EngineCoreProc()


def test_ranks_do_one_unit_a_step_and_use_no_stand_ins(start: Start) -> None:
    start.config.parallel_config.world_size = 2
    start.begin()
    start.steps(4)
    start.device.take()
    units = []
    for _ in range(4):
        start.steps(4)
        units.append(
            sum(one[0] != "step" for one in start.device.take() if isinstance(one, tuple) and one[1] in ("runs", "captures"))
        )
    assert units == [1, 1, 0, 0], "a warm-up run, then the capture, whatever the time"
    assert start.steps(3) == [("FULL", 4)]
    assert start.steps(2) == [("NONE", 2)], "the same number of tokens on a rank whose capture failed"


def test_the_histogram_of_the_first_start_orders_the_second(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "histogram.json"
    monkeypatch.setenv("VMMGRAPH_CAPTURE_HISTOGRAM", str(path))
    start.begin()
    start.steps(1, 1, 8)
    vllm_behind.save(str(path), start.behind.queue)
    assert [one["extents"][0] for one in json.loads(path.read_text())["shapes"]] == [8, 1]
    again = Start(monkeypatch, start.second, start.release, start.breakable)
    again.begin()
    again.behind.budget.each = 1000
    again.steps(4)
    assert captured(again.device.take()) == [], "the first step waits for no capture"
    again.steps(4)
    assert captured(again.device.take())[:2] == [("FULL", 1), ("FULL", 8)]
    path.write_text("{}")
    third = Start(monkeypatch, start.second, start.release, start.breakable)
    third.begin()
    assert sum(third.behind.queue.steps.values()) == 0


def test_a_kv_cache_sized_before_the_captures_leaves_room_for_them(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = SimpleNamespace(later_graphs=0)
    start.runner._vmmgraph_kv = kv
    held = {"bytes": 0}
    made = {32: 6 * MIB, 16: 4 * MIB}
    graph_capture = start.runner.forward

    def forward(mode: Mode, tokens: int, entry: Any, captures: bool) -> None:
        graph_capture(mode, tokens, entry, captures)
        held["bytes"] += made[tokens] if captures else 0

    monkeypatch.setattr(start.runner, "forward", forward)
    arena = SimpleNamespace(
        stats=lambda: {"retained_bytes": held["bytes"] // 2}, executables=lambda: {"bytes": held["bytes"] // 2}
    )
    monkeypatch.setattr(_session, "arenas", lambda: [arena])
    log = start.begin()
    assert captured(log) == [("PIECEWISE", 32), ("FULL", 16)], "the largest shape of each mode is measured"
    assert kv.later_graphs == (len(PIECEWISE) - 1) * 6 * MIB + (len(FULL) - 1) * 4 * MIB
    reserve = kv_plan.reserve_of(10 * MIB, 10 * MIB, 1, kv.later_graphs)
    assert reserve.total() == kv_plan.KERNELS_BYTES + kv.later_graphs and "22 MiB for graphs captured later" in str(reserve)
    assert start.steps(16) == [("FULL", 16)]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("", "speculative_config", object()),
        ("", "lora_config", object()),
        ("", "kv_transfer_config", object()),
        ("model_config", "is_encoder_decoder", True),
        ("cache_config", "kv_sharing_fast_prefill", True),
    ],
)
def test_configurations_with_more_state_are_left_to_vllm(start: Start, owner: str, name: str, value: Any) -> None:
    setattr(getattr(start.config, owner) if owner else start.config, name, value)
    with pytest.raises(AssertionError, match="vLLM captures before it serves"):
        start.begin()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("envs", "VLLM_ENABLE_STARTUP_PLAN", True),
        ("envs", "VLLM_GPU_SYNC_CHECK", "warn"),
        ("observability_config", "jit_monitor_mode", "error"),
        ("parallel_config", "enable_eplb", True),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("attention_config", "hisparse_config", object()),
        ("aux_output_config", "enabled", True),
        ("model_config", "is_mm_prefix_lm", True),
        ("", "model_state", type("State", (ModelState,), {"capture_inner_cudagraphs": len})()),
    ],
)
def test_options_of_033_that_a_dummy_run_would_disturb_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: str, name: str, value: Any
) -> None:
    caplog.set_level("INFO", "vmmgraph")
    start = started(monkeypatch, True, "0.33.0")
    assert vllm_behind.declined(start.runner) == ""
    config = start.envs if owner == "envs" else getattr(start.config, owner) if owner else start.runner
    setattr(config, name, value)
    with pytest.raises(AssertionError, match="vLLM captures before it serves"):
        start.begin()
    assert caplog.text.count("vLLM captures before it serves, since") == 1


def test_throwaway_captures_for_an_estimate_stay_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    start = started(monkeypatch, True, "0.33.0")
    assert start.runner.capture_model(profile_only=True) == 5
    assert start.device.take() == ["throwaway captures"] and vllm_behind.behind_of(start.runner) is None
    assert captured(start.begin()) == [] and len(start.behind.queue.missing()) == len(FULL) + len(PIECEWISE)


def test_breakable_graphs_of_024_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    start = started(monkeypatch, True, "0.24.0", breakable=True)
    with pytest.raises(AssertionError, match="vLLM captures before it serves"):
        start.begin()


def test_recurrent_states_are_left_to_vllm(start: Start) -> None:
    start.kv_cache_config.kv_cache_groups[0].kv_cache_spec = type("MambaSpec", (), {})()
    with pytest.raises(AssertionError, match="vLLM captures before it serves"):
        start.begin()


def test_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", module_of("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", module_of("vllm.version", __version__="0.99.1"))
    kind = type("GPUModelRunner", (), {"capture_model": len, "execute_model": len})
    vllm_behind.patch_runner(module_of("runner", GPUModelRunner=kind), vllm_behind.First)
    assert kind.capture_model is len
    assert "cannot capture behind the traffic" in caplog.text


@pytest.mark.parametrize("asked", ["behind", "ahead", ""])
def test_the_plugin_captures_behind_only_when_asked(session: Any, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmmgraph import _trees

    monkeypatch.setenv("VMMGRAPH", "1")
    monkeypatch.setenv("VMMGRAPH_CAPTURE", asked)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    vllm.enable()
    waits = {finder.name for finder in sys.meta_path if isinstance(finder, _trees.WhenImported)}
    assert ("vllm.v1.engine.core" in waits) == (asked == "behind")
