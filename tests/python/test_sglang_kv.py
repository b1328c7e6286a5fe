"""SGLang's KV cache sized after captures: starts of an SGLang 0.5.14 stand-in.

The stand-in runs over the host driver: its tests are SKIPPED without VMMGRAPH_CORE_LIBRARY.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_kv import GIB, HostDevice, module_of, needs_driver, torch_over
from vmmgraph import _ledger, _session
from vmmgraph._elastic import ElasticBuffer
from vmmgraph.plugins import kv_plan, sglang_kv, vllm_kv
from vmmgraph.plugins.kv_plan import MIB

LAYERS, HEADS, DIM, SIZE = 2, 8, 128, 2
#: Bytes of a token in one tensor.
ROW = HEADS * DIM * SIZE


class Tensor:
    """Stand-in for a tensor over host memory: rows of ``row`` bytes."""

    def __init__(self, address: int, rows: int, row: int, owner: object) -> None:
        self.address, self.rows, self.row, self.owner = address, rows, row, owner

    def __getitem__(self, part: slice) -> Tensor:
        start = part.start or 0
        return Tensor(self.address + start * self.row, part.stop - start, self.row, self.owner)

    def view(self, *shape: Any) -> Tensor:
        return self if len(shape) == 1 else Tensor(self.address, shape[0], self.rows * self.row // shape[0], self.owner)

    def data_ptr(self) -> int:
        return self.address

    def zero_(self) -> None:
        ctypes.memset(self.address, 0, self.rows * self.row)


def arguments(**changes: Any) -> SimpleNamespace:
    values = {
        "vmmgraph_fraction_given": False,
        "mem_fraction_static": 0.9,
        "max_total_tokens": None,
        "enable_memory_saver": False,
        "enable_hierarchical_cache": False,
        "disaggregation_mode": "null",
        "prefill_only_disable_kv_cache": False,
        "pp_size": 1,
        "page_size": 1,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 128,
        "max_running_requests": 8,
    }
    return SimpleNamespace(**{**values, **changes})


class Pool:
    """Requests or free tokens."""

    def __init__(self, size: int) -> None:
        self.size, self.clears = size, []

    def available_size(self) -> int:
        return self.size

    def clear(self) -> None:
        self.clears.append(self.size)


class Start:
    """Patched SGLang stand-in with one scheduler. Its parts use host device memory as in SGLang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: HostDevice, given: SimpleNamespace, fails: bool = False) -> None:
        start = self
        self.given, self.steps = given, []

        class ModelRunnerKVCacheMixin:
            def _profile_available_bytes(self, before: float) -> int:
                return 100 * MIB

        class MHATokenToKVPool:
            kv_cache_layout, device, page_size = "nhd", "cuda:0", given.page_size
            layer_num, head_num, head_dim, v_head_dim = LAYERS, HEADS, DIM, DIM
            store_dtype = SimpleNamespace(itemsize=SIZE)

            def __init__(self, size: int) -> None:
                self.size = size
                self._create_buffers()

            def _create_buffers(self) -> None:
                self.k_buffer = "torch's"

        class Runner(ModelRunnerKVCacheMixin):
            gpu_id, tp_size, use_mla_backend, is_hybrid_swa, enable_hisparse = 0, 1, False, False, False
            mambaish_config, kv_cache_dtype = None, "torch.bfloat16"
            server_args = given
            spec_algorithm = SimpleNamespace(is_none=lambda: True)
            model_config = SimpleNamespace(context_len=4096)
            model = SimpleNamespace(parameters=list, buffers=list)
            prefill_cuda_graph_runner, eager_runner = "graphs", "eager"

            def alloc(self) -> None:
                tokens = self._profile_available_bytes(0.0) // (2 * LAYERS * ROW) // given.page_size * given.page_size
                start.most = self.max_total_num_tokens = tokens
                self.memory_pool_config = SimpleNamespace(max_total_num_tokens=tokens)
                device.hold(24 * MIB)
                self.req_to_token_pool = Pool(16)
                self.token_to_kv_pool = MHATokenToKVPool(tokens)
                self.token_to_kv_pool_allocator = Pool(tokens)
                self.token_to_kv_pool_allocator.num_pages = tokens // given.page_size

        class Scheduler:
            def __init__(self) -> None:
                device.outside += 20 * MIB
                device.hold(100 * MIB)
                self.tp_worker = SimpleNamespace(model_runner=Runner())
                self.tp_worker.model_runner.alloc()
                self.init_all_cuda_graphs()

            def init_all_cuda_graphs(self) -> None:
                device.outside += 10 * MIB

            def run_batch(self, batch: Any) -> None:
                raise AssertionError("no batch runs at the start")

        def extend(requests: list[Any], runner: Any) -> None:
            start.steps.append(([request.fill_len for request in requests], runner.prefill_cuda_graph_runner))
            if fails:
                raise TypeError("extend() got another argument")
            device.hold(48 * MIB)
            device.torch_held -= 48 * MIB
            device.outside += 3 * MIB

        class Request(SimpleNamespace):
            def set_extend_input_len(self, length: int) -> None:
                assert length == len(self.origin_input_ids)

        torch = torch_over(device)
        torch.uint64 = torch.int64 = None
        torch.tensor = lambda values, **_: list(values)
        torch.cuda.OutOfMemoryError = MemoryError
        group = SimpleNamespace(world_size=1)
        for module in (
            torch,
            module_of("sglang"),
            module_of("sglang.version", __version__="0.5.14"),
            module_of("sglang.bench_one_batch", extend=extend),
            module_of("sglang.srt.managers.schedule_batch", Req=Request),
            module_of("sglang.srt.sampling.sampling_params", SamplingParams=SimpleNamespace),
            module_of("sglang.srt.distributed.parallel_state", get_world_group=lambda: group),
        ):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        sglang_kv.patch_runner(module_of("mixin", ModelRunnerKVCacheMixin=ModelRunnerKVCacheMixin))
        sglang_kv.patch_pool(module_of("pool", MHATokenToKVPool=MHATokenToKVPool))
        sglang_kv.patch_scheduler(module_of("scheduler", Scheduler=Scheduler))
        monkeypatch.setattr(_session, "need", lambda: SimpleNamespace(library=device.library, sharing="none", peers=0))
        monkeypatch.setattr(vllm_kv, "device_of", lambda *_: device)
        monkeypatch.setattr(ElasticBuffer, "tensor", lambda self, at, size: Tensor(self.base + at, size, 1, self))
        self.scheduler = Scheduler

    def run(self) -> Any:
        return self.scheduler().tp_worker.model_runner


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VMMGRAPH_DRIVER", "host")
    gc.collect()
    one = HostDevice(GIB)
    assert one.free() == GIB, "an earlier test left memory on the device"
    yield one
    _ledger.drop(0)
    sglang_kv._initializing.clear()


@needs_driver
@pytest.mark.parametrize("page", [1, 16])
def test_the_cache_takes_what_the_captures_leave(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, page: int
) -> None:
    caplog.set_level(logging.INFO)
    start = Start(monkeypatch, device, arguments(page_size=page))
    runner = start.run()
    tokens = runner.max_total_num_tokens
    # Torch grows by 48 MiB in the largest step. The rest of the reserve is for kernels.
    reserve = 48 * MIB + kv_plan.KERNELS_BYTES
    assert reserve <= device.free() < reserve + 2 * LAYERS * kv_plan.PAGE_BYTES
    assert 0 < tokens < start.most and tokens % page == 0
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    assert runner.memory_pool_config.max_total_num_tokens == pool.size == allocator.size == tokens
    assert allocator.num_pages == tokens // page
    # The free tokens are listed again after the new size.
    assert allocator.clears[-1] == tokens
    # The step is rehearsed without prefill graphs: a chunk's tokens in as many requests as run.
    assert start.steps == [([8] * 8, "eager")] and runner.prefill_cuda_graph_runner == "graphs"
    # The last token is mapped and zero, in every tensor.
    assert [one.data_ptr() for one in pool.k_buffer + pool.v_buffer] == pool.data_ptrs
    assert pool.data_strides == [ROW] * 2 * LAYERS
    for one in pool.k_buffer + pool.v_buffer:
        assert one.rows == tokens + page and one.row == ROW
        assert ctypes.string_at(one.address + ROW * (one.rows - 1), ROW) == bytes(ROW)
    (ledger,) = _ledger.ledgers()
    assert ledger.share() == 1.0
    rows = dict(ledger.rows)
    assert rows["graphs' executables, and kernels of captures"] == 10 * MIB
    assert rows["KV cache"] == sum(
        -(-ROW * (tokens + page) // kv_plan.PAGE_BYTES) * kv_plan.PAGE_BYTES for _ in range(2 * LAYERS)
    )


@needs_driver
@pytest.mark.parametrize("fails", [True, False])
def test_the_reserve_is_at_most_sglangs(device: HostDevice, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    Start(monkeypatch, device, arguments(mem_fraction_static=0.98), fails=fails).run()
    rule = GIB * 2 // 100
    assert rule <= device.free() - kv_plan.KERNELS_BYTES < rule + 2 * LAYERS * kv_plan.PAGE_BYTES


@needs_driver
def test_a_step_that_cannot_be_rehearsed_leaves_sglangs_reserve(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Start(monkeypatch, device, arguments(mem_fraction_static=0.75), fails=True).run()
    assert GIB // 4 <= device.free() - kv_plan.KERNELS_BYTES < GIB // 4 + 32 * MIB
    assert "got another argument" in caplog.text and runner.max_total_num_tokens > 0


@needs_driver
def test_a_device_without_room_is_an_error(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, device, arguments(mem_fraction_static=0.05), fails=True)
    with pytest.raises(RuntimeError, match="cannot size the KV cache: .* lower chunked_prefill_size"):
        start.run()


@needs_driver
def test_a_size_that_the_user_set_wins(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, device, arguments(vmmgraph_fraction_given=True))
    runner = start.run()
    assert runner.token_to_kv_pool.k_buffer == "torch's"
    assert runner.max_total_num_tokens == 100 * MIB // (2 * LAYERS * ROW) and start.steps == []


@needs_driver
def test_another_pool_class_is_an_error_and_not_a_small_cache(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, device, arguments())
    monkeypatch.setattr(sglang_kv, "elastic_buffers", lambda *_: None)
    with pytest.raises(RuntimeError, match="SGLang created no MHATokenToKVPool"):
        start.run()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vmmgraph_fraction_given", True),
        ("max_total_tokens", 1000),
        ("enable_memory_saver", True),
        ("enable_hierarchical_cache", True),
        ("disaggregation_mode", "prefill"),
        ("prefill_only_disable_kv_cache", True),
        ("pp_size", 2),
        ("use_mla_backend", True),
        ("is_hybrid_swa", True),
        ("kv_cache_dtype", "torch.float4_e2m1fn_x2"),
        ("spec_algorithm", SimpleNamespace(is_none=lambda: False)),
    ],
)
def test_what_is_not_supported_is_sglangs(name: str, value: object) -> None:
    runner = SimpleNamespace(
        server_args=arguments(),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        use_mla_backend=False,
        is_hybrid_swa=False,
        mambaish_config=None,
        enable_hisparse=False,
        kv_cache_dtype="torch.bfloat16",
    )
    assert sglang_kv.declined(runner) == ""
    setattr(runner if hasattr(runner, name) else runner.server_args, name, value)
    assert sglang_kv.declined(runner)


@pytest.mark.parametrize("fraction", [None, 0.8])
def test_a_fraction_that_the_user_set_is_noted(monkeypatch: pytest.MonkeyPatch, fraction: float | None) -> None:
    class ServerArgs:
        mem_fraction_static = fraction

        def _handle_gpu_memory_settings(self, memory: int) -> None:
            if self.mem_fraction_static is None:
                self.mem_fraction_static = 0.88

    monkeypatch.setitem(sys.modules, "sglang.version", module_of("sglang.version", __version__="0.5.14"))
    sglang_kv.patch_arguments(module_of("server_args", ServerArgs=ServerArgs))
    given = ServerArgs()
    for _ in range(2):
        given._handle_gpu_memory_settings(1)
    assert given.vmmgraph_fraction_given == (fraction is not None)


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.5.13", "SGLang 0.5.13 is not 0.5.14"),
        ("0.5.15.post1", "SGLang 0.5.15.post1 is not 0.5.14"),
        ("0.5.16", "SGLang 0.5.16 sizes its KV cache after the captures by itself"),
        ("0.5.23", "VMMGRAPH_KV changes nothing: SGLang 0.5.23 sizes"),
    ],
)
def test_an_unknown_release_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.version", module_of("sglang.version", __version__=version))
    kind = type("Scheduler", (), {"init_all_cuda_graphs": 1})
    with caplog.at_level(logging.INFO, "vmmgraph"):
        sglang_kv.patch_scheduler(module_of("scheduler", Scheduler=kind))
    assert kind.init_all_cuda_graphs == 1 and line in caplog.text


@pytest.mark.parametrize(("chunk", "limit", "step"), [(8192, None, (8192, 4096)), (-1, 64, (16384, 64)), (32, 64, (64, 64))])
def test_the_largest_step(chunk: int, limit: int | None, step: tuple[int, int]) -> None:
    given = arguments(chunked_prefill_size=chunk, max_running_requests=limit, max_prefill_tokens=16384)
    assert sglang_kv.largest_step(SimpleNamespace(server_args=given, model_config=SimpleNamespace(context_len=4096))) == step
