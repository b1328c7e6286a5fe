"""vLLM 0.33's KV cache, custom all-reduce and breakable graphs: starts of a stand-in with the names
of 0.33.

The stand-in runs over the host driver: its tests are SKIPPED without VMMGRAPH_CORE_LIBRARY.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import logging
import sys
from ctypes import byref, c_void_p
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_vllm_kv
from test_vllm_kv import (
    BLOCK,
    GIB,
    LAYERS,
    FullAttentionSpec,
    HostDevice,
    Tensor,
    configuration,
    module_of,
    needs_driver,
    torch_over,
)
from vmmgraph import _c, _ledger, _session
from vmmgraph._elastic import ElasticBuffer
from vmmgraph.plugins import _common, kv_plan, vllm, vllm_kv, vllm_kv_033
from vmmgraph.plugins.kv_plan import MIB

#: The fixture of `test_vllm_kv`.
device = test_vllm_kv.device


@dataclasses.dataclass
class KVCacheTensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


def kv_config(blocks: int, *tensors: KVCacheTensor) -> SimpleNamespace:
    group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=FullAttentionSpec(block_size=16))
    one = KVCacheTensor(len(LAYERS) * BLOCK * blocks, list(LAYERS), BLOCK * blocks, BLOCK)
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=list(tensors) or [one], kv_cache_groups=[group])


def kv_layout(name: str) -> SimpleNamespace:
    outermost, compact = name.startswith("B"), name[:2] in ("LB", "BL")
    return SimpleNamespace(name=name, is_block_outermost=outermost, is_block_compact=compact)


def create_kv_cache_views(raw: Any, spec: Any, blocks: int, layout: Any, tensor: Any, kernel_block_size: Any) -> list[Any]:
    """Returns address and number of blocks of each layer."""
    del spec, layout, kernel_block_size
    begins = [tensor.offset + number * tensor.layer_stride for number in range(len(tensor.layers))]
    return [(raw.address + begin, blocks) for begin in begins]


def configuration_of_033() -> SimpleNamespace:
    config = configuration()
    config.attention_config = SimpleNamespace(hisparse_config=None)
    config.parallel_config.enable_elastic_ep = False
    config.model_config.multimodal_config = None
    config.observability_config = SimpleNamespace(jit_monitor_mode="warn")
    return config


class Start:
    """Patched stand-in of vLLM 0.33 with one worker, in layout ``layout``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        device: HostDevice,
        second: bool,
        layout: str = "LBNHC",
        backend: str = "TRITON_ATTN",
    ) -> None:
        self.said: list[Any] = []
        self.config = configuration_of_033()
        self.config.cache_config.get_resolved_kv_cache_layout = lambda: kv_layout(layout)
        self.stock: list[int] = []
        start = self
        planning_log = logging.getLogger("vllm.v1.core.kv_cache_utils")

        class Runner:
            max_num_tokens, max_model_len, is_pooling_model = 64, 64, False
            scheduler_config = start.config.scheduler_config

            def get_model(self) -> Any:
                return SimpleNamespace(parameters=list, buffers=list)

            def profile_cudagraph_memory(self) -> int:
                start.said.append("graphs are estimated")
                return 0

            def initialize_kv_cache(self, config: Any) -> None:
                self.kv_cache_config = copy.deepcopy(config)
                module = attention_module if second else runner_module
                self.views = module.allocate_kv_cache(self.kv_cache_config, "cuda:0", kv_layout(layout), [16])

            def _init_kv_zero_meta(self) -> None:
                self.zeroed_blocks = self.kv_cache_config.num_blocks

            def update_requests(self, error: Exception | None = None) -> int:
                if error is not None:
                    raise error
                return self.kv_cache_config.num_blocks  # type: ignore[no-any-return]

            def _dummy_run(self, tokens: int, **how: Any) -> tuple[int, int]:
                start.said.append(("step", tokens, how.get("force_attention"), how.get("profile_seq_lens")))
                return tokens, tokens

            def _dummy_sampler_run(self, hidden: int) -> None:
                start.said.append(("sampler", hidden))

            def capture_model(self) -> int:
                device.outside += 10 * MIB
                return 0

        class Worker:
            use_v2_model_runner = second
            local_rank = 0

            def __init__(self) -> None:
                self.vllm_config = start.config
                self.cache_config, self.scheduler_config = start.config.cache_config, start.config.scheduler_config

            def init_device(self) -> None:
                device.outside += 20 * MIB
                worker_module.init_worker_distributed_environment()
                self.model_runner = Runner()

            def load_model(self, *, load_dummy_weights: bool = False) -> None:
                device.hold(100 * MIB)

            def get_kv_cache_spec(self) -> dict[str, Any]:
                return {name: SimpleNamespace(has_layer_views=True) for name in LAYERS}

            def determine_available_memory(self) -> int:
                self.model_runner.profile_cudagraph_memory()
                return 64 * MIB

            def initialize_from_config(self, config: Any) -> None:
                self.model_runner.initialize_kv_cache(config)
                self.model_runner._init_kv_zero_meta()

        class EngineCore:
            def __init__(self) -> None:
                self.worker = Worker()
                self.worker.init_device()
                self.worker.load_model(load_dummy_weights=False)
                self.scheduled = self._initialize_kv_caches(start.config)

            def step(self) -> None:
                raise AssertionError("no step runs")

            step_with_batch_queue = step

            def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
                return [getattr(self.worker, name)(*args)]

            def _initialize_kv_caches(self, vllm_config: Any) -> Any:
                (available,) = self.collective_rpc("determine_available_memory")
                start.most = available // (BLOCK * len(LAYERS))
                update_kv_cache_capacity(vllm_config, kv_config(start.most))
                self.worker.initialize_from_config(kv_config(start.most))
                self.worker.model_runner.capture_model()
                return kv_config(start.most)

        def update_kv_cache_capacity(_: Any, config: Any) -> None:
            planning_log.info("%s KV cache size: %s tokens", "GPU", config.num_blocks * 16)

        def allocate_kv_cache(config: Any, *_: Any) -> dict[str, Any]:
            start.stock.append(config.num_blocks)
            return {}

        def init_worker_distributed_environment() -> None:
            device.outside += 5 * MIB

        planning = module_of(
            "vllm.v1.core.kv_cache_planning",
            _pool_bytes_per_block_from_builder=lambda builder, config, groups: BLOCK * len(LAYERS),
            _max_memory_usage_bytes_from_groups=lambda builder, config, groups: 7 * BLOCK * len(LAYERS),
            _estimate_max_model_len_from_groups=lambda builder, config, groups, size: 0,
            _check_enough_kv_cache_memory=lambda size, needed, length, estimate: start.said.append(("checked", size, needed())),
        )
        kv_utils = module_of("vllm.v1.core.kv_cache_utils", update_kv_cache_capacity=update_kv_cache_capacity)
        worker_module = module_of("vllm.v1.worker.gpu_worker", Worker=Worker)
        worker_module.init_worker_distributed_environment = init_worker_distributed_environment  # type: ignore[attr-defined]
        runner_module = module_of("vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner, allocate_kv_cache=allocate_kv_cache)
        attention_module = module_of("vllm.v1.worker.gpu.attn_utils", allocate_kv_cache=allocate_kv_cache)
        backends = [SimpleNamespace(get_name=lambda: backend)]
        modules = [
            *modules_of_033(),
            planning,
            kv_utils,
            module_of("vllm.v1.core", kv_cache_planning=planning, kv_cache_utils=kv_utils),
            module_of("vllm.v1.core.kv_cache_config_builder", get_kv_cache_config_builder=lambda config: None),
            module_of("vllm.v1.kv_cache_interface", create_kv_cache_views=create_kv_cache_views),
            module_of("vllm.distributed.kv_transfer"),
            module_of("vllm.distributed.kv_transfer.kv_connector"),
            module_of("vllm.distributed.kv_transfer.kv_connector.utils", get_current_attn_backends=lambda config: backends),
            torch_over(device),
        ]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vllm_kv.patch_worker(worker_module)
        if second:
            vllm_kv.patch_captures(module_of("vllm.v1.worker.gpu.model_runner", GPUModelRunner=Runner))
            vllm_kv.patch_second_allocation(attention_module)
        else:
            vllm_kv.patch_runner(runner_module)
        vllm_kv.patch_engine(module_of("vllm.v1.engine.core", EngineCore=EngineCore))
        monkeypatch.setattr(_session, "need", lambda: SimpleNamespace(library=device.library, sharing="none", peers=0))
        monkeypatch.setattr(vllm_kv, "device_of", lambda *_: device)
        monkeypatch.setattr(_ledger, "used_by_all", lambda _: device.outside)
        monkeypatch.setattr(_ledger, "used_by_process", lambda _: None)
        monkeypatch.setattr(ElasticBuffer, "tensor", lambda self, at, size: Tensor(self.base + at, size, self))
        self.run = EngineCore


def modules_of_033(plan: bool = False) -> list[ModuleType]:
    envs = SimpleNamespace(VLLM_ENABLE_STARTUP_PLAN=plan)
    return [
        module_of("vllm", envs=envs),
        module_of("vllm.version", __version__="0.33.0"),
        module_of("vllm.config", CacheConfig=SimpleNamespace(gpu_memory_utilization=0.92), CUDAGraphMode=SimpleNamespace(NONE=0)),
        module_of("vllm.distributed"),
        module_of("vllm.distributed.parallel_state", get_pp_group=lambda: SimpleNamespace(is_last_rank=True)),
        module_of("vllm.v1"),
    ]


# A start.


@needs_driver
@pytest.mark.parametrize("second", [False, True])
def test_the_cache_takes_what_the_captures_leave(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, second: bool
) -> None:
    caplog.set_level(logging.INFO)
    start = Start(monkeypatch, device, second)
    engine = start.run()
    blocks, runner = engine.scheduled.num_blocks, engine.worker.model_runner
    assert kv_plan.KERNELS_BYTES <= device.free() < kv_plan.KERNELS_BYTES + 2 * kv_plan.PAGE_BYTES
    assert start.config.cache_config.num_gpu_blocks == runner.kv_cache_config.num_blocks == blocks < start.most
    assert start.stock == [] and "graphs are estimated" not in start.said
    # The longest request must fit beside the null block.
    assert ("checked", (blocks - 1) * BLOCK * len(LAYERS), 7 * BLOCK * len(LAYERS)) in start.said
    assert start.said[:2] == [("step", 64, None if second else True, None if second else 16), ("sampler", 64)]
    # Views begin at pages and have addresses for all blocks; the last block is mapped and zero.
    assert set(runner.views) == set(LAYERS)
    for address, seen in runner.views.values():
        assert (address - engine.worker._vmmgraph_kv.buffer.base) % kv_plan.PAGE_BYTES == 0 and seen == start.most
        assert ctypes.string_at(address + BLOCK * (blocks - 1), BLOCK) == bytes(BLOCK)
    sizes = [record.getMessage() for record in caplog.records if "KV cache size" in record.getMessage()]
    assert sizes == [f"GPU KV cache size: {blocks * 16} tokens"]


@needs_driver
def test_methods_that_divide_the_views_see_all_their_blocks(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, device, True)
    engine = start.run()
    runner = engine.worker.model_runner
    assert runner.zeroed_blocks == start.most == runner.update_requests()
    with pytest.raises(KeyError):
        runner.update_requests(KeyError())
    assert runner.kv_cache_config.num_blocks == engine.scheduled.num_blocks < start.most


@needs_driver
@pytest.mark.parametrize(
    ("layout", "backend", "why"),
    [
        ("LHBNC", "TRITON_ATTN", "heads are outside of blocks in layout LHBNC"),
        ("LBNHC", "FLEX_ATTENTION", "FLEX_ATTENTION views the whole cache"),
    ],
)
def test_layers_that_cannot_grow_leave_the_cache_to_vllm(
    device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    layout: str,
    backend: str,
    why: str,
) -> None:
    caplog.set_level(logging.INFO)
    start = Start(monkeypatch, device, False, layout, backend)
    engine = start.run()
    assert start.stock == [start.most] == [64 * MIB // (BLOCK * len(LAYERS))]
    assert start.said == ["graphs are estimated"]
    assert engine.worker.model_runner.update_requests() == start.most == engine.scheduled.num_blocks
    assert caplog.text.count(f"vLLM allocates the KV cache, since {why}") == 1
    assert "KV cache size: 2048 tokens" in caplog.text


def mm(reserved: float, backend: bool) -> SimpleNamespace:
    return SimpleNamespace(mm_ipc_gpu_memory_gb=reserved, use_gpu_video_backend=lambda: backend)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("", "", None),
        ("attention_config", "hisparse_config", object()),
        ("parallel_config", "enable_elastic_ep", True),
        ("model_config", "multimodal_config", mm(1.0, False)),
        ("model_config", "multimodal_config", mm(0, True)),
        ("observability_config", "jit_monitor_mode", "error"),
        ("cache_config", "kv_cache_memory_bytes", 1 << 30),
    ],
)
def test_features_that_need_vllms_allocation_keep_it(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: object
) -> None:
    for plan in (False, True):
        for module in modules_of_033(plan):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        config = configuration_of_033()
        if owner:
            setattr(getattr(config, owner), name, value)
        assert bool(vllm_kv.declined(config, vllm_kv_033)) == (plan or bool(owner))


def test_a_release_is_found_by_its_version(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for version, name in (("0.24.1", "vllm_kv_024"), ("0.33.0", "vllm_kv_033"), ("0.33.0+cu130", "vllm_kv_033")):
        monkeypatch.setitem(sys.modules, "vllm.version", module_of("vllm.version", __version__=version))
        monkeypatch.setitem(sys.modules, "vllm", module_of("vllm"))
        assert vllm_kv.release().__name__.endswith(name)
    assert caplog.text == ""
    for version in ("0.25.0", "0.32.4", "0.34.0", "0.330.0"):
        monkeypatch.setitem(sys.modules, "vllm.version", module_of("vllm.version", __version__=version))
        assert vllm_kv.release() is None
        assert f"vLLM {version} is not one of" in caplog.text


# Planes.


def test_layers_with_a_run_of_blocks_are_planes() -> None:
    assert vllm_kv_033.planes(kv_config(10)) == ([0, 10 * BLOCK], [BLOCK, BLOCK])
    # Three groups over each other, and layers of two sizes in one group.
    size = 5 * 10 * BLOCK
    config = kv_config(
        10,
        KVCacheTensor(size, ["a", "b"], 10 * BLOCK, BLOCK),
        KVCacheTensor(size, ["c"], 30 * BLOCK, 3 * BLOCK, 20 * BLOCK),
        KVCacheTensor(size, ["d"], 10 * BLOCK, BLOCK),
    )
    assert vllm_kv_033.planes(config) == ([0, 10 * BLOCK, 20 * BLOCK], [BLOCK, BLOCK, 3 * BLOCK])


def test_packed_layers_are_one_plane() -> None:
    size = 10 * 5 * BLOCK
    config = kv_config(
        10,
        KVCacheTensor(size, ["a", "b"], BLOCK, 5 * BLOCK),
        KVCacheTensor(size, ["c"], BLOCK, 5 * BLOCK, 2 * BLOCK),
    )
    assert vllm_kv_033.planes(config) == ([0], [5 * BLOCK])


@pytest.mark.parametrize(
    "tensors",
    [
        # Blocks inside of heads: a layer is two runs of half blocks.
        [KVCacheTensor(10 * BLOCK, ["a"], 10 * BLOCK, BLOCK // 2)],
        [KVCacheTensor(20 * BLOCK, ["a", "b"], 10 * BLOCK, BLOCK // 2)],
        [KVCacheTensor(40 * BLOCK, ["a", "b"], 20 * BLOCK, BLOCK)],
        [KVCacheTensor(15 * BLOCK, ["a", "b"], 5 * BLOCK, BLOCK)],
    ],
)
def test_layers_with_other_runs_are_refused(tensors: list[KVCacheTensor]) -> None:
    with pytest.raises(RuntimeError, match="cannot lay out the KV cache"):
        vllm_kv_033.planes(kv_config(10, *tensors))


# Graphs.


def test_custom_all_reduce_copies_in_graphs_instead_of_opening_them() -> None:
    made = []

    class CustomAllreduce:
        def __init__(self, group: object, device: object, max_size: int = 8, *, register_graph_buffers: bool = True) -> None:
            made.append((group, device, max_size, register_graph_buffers))
            self.disabled = False

    module = module_of("custom_all_reduce", CustomAllreduce=CustomAllreduce)
    _common.without_custom_all_reduce(module)
    assert not CustomAllreduce("group", device=0, register_graph_buffers=True).disabled
    assert made == [("group", 0, 8, False)]


def test_all_segments_of_a_breakable_graph_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures the segments of a breakable graph in one forward context. Full graphs of the
    second runner begin without a context."""
    module = module_of("vllm.forward_context", _forward_context=None)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    seen: list[Any] = []

    class CUDAGraph:
        def capture_begin(self, pool: object) -> None:
            seen.append(vllm.shape())

        def capture_end(self) -> None:
            pass

    def capture(tokens: int, layers: int) -> None:
        graph, breaks = CUDAGraph(), layers - 1
        module._forward_context = SimpleNamespace(  # type: ignore[attr-defined]
            batch_descriptor=SimpleNamespace(num_tokens=tokens, uniform=False, has_lora=False),
            cudagraph_runtime_mode=SimpleNamespace(name="PIECEWISE"),
        )
        graph.capture_begin(pool=(0, 1))
        for _ in range(breaks):
            graph.capture_end()
            graph = CUDAGraph()
            graph.capture_begin(pool=(0, 1))
        graph.capture_end()
        module._forward_context = None  # type: ignore[attr-defined]

    capture(512, 29)
    capture(256, 29)
    CUDAGraph().capture_begin(pool=(0, 1))
    assert len({id(key) for key, _ in seen[:29]}) == len({id(key) for key, _ in seen[29:58]}) == 1
    assert seen[0][0] is not seen[29][0] and seen[58] is None
    assert {label for _, label in seen[:58]} == {"piecewise 512", "piecewise 256"}


#: vLLM's default sizes up to 512 tokens, and a Qwen3-1.7B: layers, and bytes of a hidden state.
SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
DEPTH, HIDDEN = 28, 4096


def captured(device: HostDevice, grouped: bool) -> int:
    """Returns the MiB of an arena after captures of breakable graphs for all `SIZES`.

    Attention ends a segment, and residual, queries, keys, values and output live on.
    """
    library, arena = device.library, _c.Handle(device.library.raw["arena_destroy"])
    library.arena_create(device.handle, byref(_c.ArenaOptions()), byref(arena))
    spaces: list[_c.Handle] = []

    def begin() -> None:
        spaces.append(_c.Handle(library.raw["space_destroy"]))
        library.space_open(arena, byref(spaces[-1]))

    def end() -> None:
        library.space_seal(spaces[-1], _c.RETAIN["default"], None)

    def block(size: int) -> tuple[_c.Handle, c_void_p]:
        at = c_void_p()
        library.space_allocate(spaces[-1], size, c_void_p(1), byref(at))
        return spaces[-1], at

    def free(*blocks: tuple[_c.Handle, c_void_p]) -> None:
        for space, at in blocks:
            library.space_free(space, at)

    for tokens in reversed(SIZES):
        one = tokens * HIDDEN
        begin()
        residual, heads, output = block(one), block(2 * one), block(one)
        for layer in range(DEPTH):
            if not grouped:
                end()
                begin()
            projected, normed, added = block(one), block(one), block(one)
            free(heads, output, residual, projected)
            wide = block(6 * one)
            free(normed)
            half = block(3 * one)
            free(wide)
            down = block(one)
            free(half)
            hidden, residual = block(one), block(one)
            free(down, added)
            if layer + 1 < DEPTH:
                heads, output = block(2 * one), block(one)
            free(hidden)
        free(residual)
        end()
    stats = _c.ArenaStats()
    library.arena_trim(arena, None)
    library.arena_stats(arena, byref(stats))
    return stats.physical_bytes // MIB  # type: ignore[no-any-return]


@needs_driver
def test_segments_in_a_group_cost_one_step_and_without_a_group_all_tensors_between_them(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device  # Selects the host driver.
    assert captured(HostDevice(8 * GIB), grouped=True) <= 34
    assert 7000 <= captured(HostDevice(8 * GIB), grouped=False) <= 7600
