"""vLLM's KV cache sized after captures: plan functions, and starts of a vLLM 0.24 stand-in.

The stand-in runs over the host driver: its tests are SKIPPED without VMMGRAPH_CORE_LIBRARY.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import sys
import types
from ctypes import byref, c_uint64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vmmgraph import _c, _ledger, _session
from vmmgraph._elastic import ElasticBuffer
from vmmgraph.plugins import kv_plan, vllm_kv, vllm_kv_024
from vmmgraph.plugins.kv_plan import MIB, Layout, Reserve

GIB = 1 << 30
needs_driver = pytest.mark.skipif(
    not os.environ.get("VMMGRAPH_CORE_LIBRARY"), reason="SKIPPED: VMMGRAPH_CORE_LIBRARY names no library"
)


# The plan.


def test_blocks_fill_what_there_is_to_the_page() -> None:
    # Qwen3-8B: 36 tensors of 64 KiB a block of 16 tokens.
    layout = Layout((64 << 10,) * 36, 60000)
    size = 119 * GIB + 5 * MIB
    blocks = layout.blocks_within(size)
    assert layout.committed(blocks) <= size < layout.committed(blocks + 1)
    # At most a page for each tensor stays unused.
    assert size - blocks * 36 * (64 << 10) < 36 * layout.page_bytes
    assert layout.blocks_within(0) == 0
    assert layout.blocks_within(1 << 60) == layout.most


def test_tensors_begin_at_pages_and_do_not_overlap() -> None:
    layout = Layout((48 << 10, 1 << 20, 100), 77)
    ends = [layout.offset(number) + layout.extent(number) for number in range(3)]
    assert [layout.offset(number) for number in range(3)] == [0, *ends[:2]]
    assert ends[-1] == layout.reserved()
    for number, size in enumerate(layout.block_bytes):
        assert layout.offset(number) % layout.page_bytes == 0
        assert layout.extent(number) >= size * layout.most


def test_a_tail_is_the_pages_that_no_kept_block_is_on() -> None:
    layout = Layout((MIB, 3 * MIB), 64, 4 * MIB)
    for kept in range(17):
        for had in range(kept, 17):
            for number in range(2):
                begin, size = layout.tail(number, kept, had)
                assert begin % layout.page_bytes == size % layout.page_bytes == 0
                assert begin >= layout.offset(number) + kept * layout.block_bytes[number]
            given = sum(layout.tail(number, kept, had)[1] for number in range(2))
            assert given == layout.committed(had) - layout.committed(kept)


def test_the_reserve_is_growth_that_was_measured() -> None:
    one = kv_plan.reserve_of(peak=19 * GIB, held=16 * GIB + 1, ranks=1)
    assert one.eager == 3 * GIB and one.nccl == 0
    assert kv_plan.reserve_of(peak=15 * GIB, held=16 * GIB, ranks=1).eager == 0
    several = kv_plan.reserve_of(peak=19 * GIB, held=16 * GIB, ranks=2)
    assert several.nccl > 0 and several.total() == several.eager + several.kernels + several.nccl
    assert "3072 MiB for eager steps" in str(several) and "NCCL" in str(several) and "NCCL" not in str(one)


def test_a_ceiling_is_only_what_the_user_set() -> None:
    assert kv_plan.ceiling_of(140 * GIB, 0.92, 0.92) is None
    assert kv_plan.ceiling_of(140 * GIB, 0.5, 0.92) == 70 * GIB


def test_the_cache_takes_all_but_the_reserve_or_stays_under_the_ceiling() -> None:
    reserve = Reserve(2 * GIB, GIB)
    assert kv_plan.kv_bytes(free=100 * GIB, has=4 * GIB, reserve=reserve, ceiling=None, own=40 * GIB) == 101 * GIB
    # With the full cache and the whole reserve in use, the process is at its ceiling.
    size = kv_plan.kv_bytes(free=100 * GIB, has=4 * GIB, reserve=reserve, ceiling=70 * GIB, own=40 * GIB)
    assert 40 * GIB - 4 * GIB + size + reserve.total() == 70 * GIB
    # Another process has most of the device.
    assert kv_plan.kv_bytes(free=5 * GIB, has=4 * GIB, reserve=reserve, ceiling=70 * GIB, own=40 * GIB) == 6 * GIB
    assert kv_plan.kv_bytes(free=GIB, has=0, reserve=reserve, ceiling=None, own=0) == 0


def test_own_bytes_are_the_drivers_word_else_what_others_leave() -> None:
    assert kv_plan.own_bytes(50, 30, 10) == 30
    assert kv_plan.own_bytes(50, None, 10) == 40
    assert kv_plan.own_bytes(50, None, None) == 50


def test_few_blocks_have_memory_before_the_captures() -> None:
    assert kv_plan.first_blocks(2049, 60000, 2 * MIB, 100 * GIB) == 2049
    assert kv_plan.first_blocks(2049, 60000, 2 * MIB, GIB) == 128
    assert kv_plan.first_blocks(2049, 100, 2 * MIB, 100 * GIB) == 100
    assert kv_plan.first_blocks(2049, 60000, GIB, GIB) == 2


def test_the_least_of_all_ranks_counts() -> None:
    assert kv_plan.agreed([7, 5, 9]) == 5


@pytest.mark.parametrize(
    ("what", "set_to"),
    [
        ("kv_cache_memory_bytes", 1 << 30),
        ("num_gpu_blocks_override", 100),
        ("kv_transfer_config", object()),
        ("enable_sleep_mode", True),
    ],
)
def test_the_users_own_sizes_win(what: str, set_to: object) -> None:
    config = configuration()
    assert vllm_kv.declined(config, vllm_kv_024) == ""
    for owner in (config, config.cache_config, config.model_config):
        if hasattr(owner, what):
            setattr(owner, what, set_to)
    assert vllm_kv.declined(config, vllm_kv_024)


def test_packed_layers_have_one_tensor() -> None:
    def tensor(size: int, shared_by: list[str], stride: int = 0) -> SimpleNamespace:
        return SimpleNamespace(size=size, shared_by=shared_by, block_stride=stride)

    config = SimpleNamespace(num_blocks=10, kv_cache_tensors=[tensor(50, ["a", "b"]), tensor(70, ["c"])])
    assert vllm_kv_024.tensor_sizes(config) == ([5, 7], {"a": 0, "b": 0, "c": 1})
    config = SimpleNamespace(num_blocks=10, kv_cache_tensors=[tensor(120, ["a"], 12), tensor(120, ["b"], 12)])
    assert vllm_kv_024.tensor_sizes(config) == ([12], {"a": 0, "b": 0})


def test_a_ledger_names_everything() -> None:
    ledger = _ledger.Ledger(0, 1000 * MIB, 100 * MIB, [("weights", 300 * MIB), ("KV cache", 597 * MIB), ("nothing", 0)])
    assert ledger.share() == pytest.approx(0.997)
    table = ledger.table()
    assert table.index("KV cache") < table.index("weights") and "nothing" not in table
    assert "99.70 % has a name" in table


# A start.


class Tensor:
    """Stand-in for an int8 tensor over host memory."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.address, self.size, self.owner = address, size, owner

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self.address + part.start, part.stop - part.start, self.owner)

    def zero_(self) -> None:
        ctypes.memset(self.address, 0, self.size)


class HostDevice:
    """Host driver device of a given size, with bytes of torch and of other processes."""

    #: Tests rotate through the eight devices of the host driver.
    numbers = itertools.cycle(range(8))

    def __init__(self, size: int) -> None:
        self.library = _c.Library(Path(os.environ["VMMGRAPH_CORE_LIBRARY"]), with_torch=False)
        self.number = 0
        self.handle = _c.Handle(self.library.raw["device_close"])
        self.options = _c.DeviceOptions(device=next(self.numbers), host_memory_bytes=size, host_granularity_bytes=2 * MIB)
        self.library.device_open(byref(self.options), byref(self.handle))
        self.size = size
        self.outside = 0
        self.torch_held = self.torch_peak = 0

    def trim(self) -> int:
        released = c_uint64()
        self.library.device_trim(self.handle, byref(released))
        return released.value

    def free(self) -> int:
        return self.size - self.outside - self.torch_held - _ledger.library_bytes(self)["physical"]

    def hold(self, size: int) -> None:
        self.torch_held += size
        self.torch_peak = max(self.torch_peak, self.torch_held)


def torch_over(device: HostDevice) -> types.ModuleType:
    torch = types.ModuleType("torch")

    def reset(_: int) -> None:
        device.torch_peak = device.torch_held

    torch.cuda = SimpleNamespace(
        synchronize=lambda _=None: None,
        mem_get_info=lambda _=None: (device.free(), device.size),
        memory_reserved=lambda _=None: device.torch_held,
        memory_allocated=lambda _=None: device.torch_held,
        memory_stats=lambda _=None: {
            "allocated_bytes.all.peak": device.torch_peak,
            "reserved_bytes.all.peak": device.torch_peak,
        },
        memory_stats_as_nested_dict=lambda _=None: {
            name: {"all": {"current": device.torch_held}} for name in ("reserved_bytes", "active_bytes")
        },
        reset_peak_memory_stats=reset,
        empty_cache=lambda: None,
        current_device=lambda: 0,
    )
    return torch


class Backend:
    """vLLM's ``AttentionBackend``."""

    shape, order = ("blocks", "heads"), (0, 1)

    @staticmethod
    def get_name() -> str:
        return "STAND_IN"

    @classmethod
    def get_kv_cache_block_dim(cls, *_: int, cache_dtype_str: str) -> int:
        return cls.shape.index("blocks")

    @classmethod
    def get_kv_cache_stride_order(cls) -> tuple[int, ...]:
        if not cls.order:
            raise NotImplementedError
        return cls.order


def configuration(utilization: float = 0.92) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            kv_cache_memory_bytes=None,
            num_gpu_blocks_override=None,
            kv_offloading_size=None,
            gpu_memory_utilization=utilization,
            num_gpu_blocks=None,
            cache_dtype="auto",
        ),
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False, max_model_len=64, original_max_model_len=64),
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=8,
            static_forward_context={LAYERS[0]: SimpleNamespace(get_attn_backend=lambda: Backend)},
        ),
    )


#: Bytes of a block in each of the stand-in's two tensors.
BLOCK = 256 << 10
LAYERS = ("layer.0", "layer.1")


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


def kv_config(blocks: int) -> SimpleNamespace:
    group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=FullAttentionSpec(block_size=16))
    tensors = [SimpleNamespace(size=BLOCK * blocks, shared_by=[name], block_stride=0) for name in LAYERS]
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=[group])


class Start:
    """Patched vLLM stand-in with one worker. Its parts use host device memory as in vLLM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: HostDevice, second: bool, utilization: float) -> None:
        self.device, self.said = device, []
        self.config = configuration(utilization)
        start = self

        class Runner:
            runner_only_attn_layers: tuple[str, ...] = ()
            max_num_tokens, max_model_len, is_pooling_model = 64, 64, False
            scheduler_config = start.config.scheduler_config

            def get_model(self) -> Any:
                return SimpleNamespace(parameters=list, buffers=list)

            def profile_cudagraph_memory(self) -> int:
                raise AssertionError("graphs are captured to estimate their memory")

            def _allocate_kv_cache_tensors(self, config: Any) -> Any:
                raise AssertionError("torch allocates the cache")

            def _dummy_run(self, tokens: int, **how: Any) -> tuple[int, int]:
                start.said.append(("step", tokens, how.get("force_attention"), how.get("profile_seq_lens")))
                # Activations are transient; attention kernels stay loaded.
                device.hold(48 * MIB)
                device.torch_held -= 48 * MIB
                device.outside += 3 * MIB
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

            def load_model(self) -> None:
                device.hold(100 * MIB)

            def get_kv_cache_spec(self) -> dict[str, Any]:
                spec = SimpleNamespace(block_size=16, num_kv_heads=8, head_size=128)
                return {LAYERS[0]: spec, LAYERS[1]: SimpleNamespace(block_size=16)}

            def determine_available_memory(self) -> int:
                assert self.model_runner.profile_cudagraph_memory() == 0
                device.hold(32 * MIB)
                device.torch_held -= 32 * MIB
                return 7

            def initialize_from_config(self, config: Any) -> None:
                self.model_runner.kv_cache_config = config
                if second:
                    self.model_runner.raw = attention_module._allocate_kv_cache(config, {}, "cuda:0")
                else:
                    self.model_runner.raw = self.model_runner._allocate_kv_cache_tensors(config)

        class EngineCore:
            def __init__(self) -> None:
                self.worker = Worker()
                self.worker.init_device()
                self.worker.load_model()
                self.scheduled = self._initialize_kv_caches(start.config)

            def step(self) -> str:
                return self.model_executor.execute_model(start.scheduled, non_block=True)

            step_with_batch_queue = step

            def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
                return [getattr(self.worker, name)(*args)]

            def _initialize_kv_caches(self, vllm_config: Any) -> Any:
                (available,) = self.collective_rpc("determine_available_memory")
                blocks = available // (BLOCK * len(LAYERS))
                start.most = blocks
                kv_utils.logger.info("GPU KV cache size: %s tokens", blocks * 16)
                self.worker.initialize_from_config(kv_config(blocks))
                self.worker.model_runner.capture_model()
                vllm_config.cache_config.num_gpu_blocks = blocks
                return kv_config(blocks)

        def init_worker_distributed_environment() -> None:
            device.outside += 5 * MIB

        def refused(*_: Any) -> Any:
            raise AssertionError("torch allocates the cache")

        kv_utils = types.ModuleType("vllm.v1.core.kv_cache_utils")
        kv_utils.logger = logging.getLogger("vllm.v1.core.kv_cache_utils")
        kv_utils._check_enough_kv_cache_memory = lambda size, *_: start.said.append(("checked", size))
        kv_utils._pool_bytes_per_block = lambda *_: BLOCK * len(LAYERS)
        kv_utils._max_memory_usage_bytes_from_groups = kv_utils._estimate_max_model_len_from_groups = lambda *_: 0
        kv_utils.get_kv_cache_capacity = lambda _, config: (config.num_blocks * 16, config.num_blocks * 16 / 64)
        worker_module = module_of("vllm.v1.worker.gpu_worker", Worker=Worker)
        worker_module.init_worker_distributed_environment = init_worker_distributed_environment
        attention_module = module_of("vllm.v1.worker.gpu.attn_utils", _allocate_kv_cache=refused)
        modules = [
            kv_utils,
            worker_module,
            attention_module,
            module_of("vllm"),
            module_of("vllm.version", __version__="0.24.0"),
            module_of(
                "vllm.config",
                CacheConfig=SimpleNamespace(gpu_memory_utilization=0.92),
                CUDAGraphMode=SimpleNamespace(NONE=0),
                set_current_vllm_config=contextlib.nullcontext,
            ),
            module_of("vllm.distributed"),
            module_of("vllm.distributed.parallel_state", get_pp_group=lambda: SimpleNamespace(is_last_rank=True)),
            module_of("vllm.v1"),
            module_of("vllm.v1.core", kv_cache_utils=kv_utils),
            torch_over(device),
        ]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vllm_kv.patch_worker(worker_module)
        if second:
            vllm_kv.patch_captures(module_of("vllm.v1.worker.gpu.model_runner", GPUModelRunner=Runner))
            vllm_kv.patch_second_allocation(attention_module)
        else:
            vllm_kv.patch_runner(module_of("vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner))
        core = module_of("vllm.v1.engine.core", EngineCore=EngineCore)
        vllm_kv.patch_engine(core)
        monkeypatch.setattr(_session, "need", lambda: SimpleNamespace(library=device.library, sharing="none", peers=0))
        monkeypatch.setattr(vllm_kv, "device_of", lambda *_: device)
        monkeypatch.setattr(_ledger, "used_by_all", lambda _: device.outside)
        monkeypatch.setattr(_ledger, "used_by_process", lambda _: None)
        monkeypatch.setattr(ElasticBuffer, "tensor", lambda self, at, size: Tensor(self.base + at, size, self))
        self.engine_core = EngineCore

    def run(self) -> Any:
        return self.engine_core()


def module_of(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(values)
    return module


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VMMGRAPH_DRIVER", "host")
    gc.collect()
    one = HostDevice(GIB)
    assert one.free() == GIB, "an earlier test left memory on the device"
    yield one
    _ledger.drop(0)


@needs_driver
@pytest.mark.parametrize("second", [False, True])
def test_the_cache_takes_what_the_captures_leave(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, second: bool
) -> None:
    caplog.set_level(logging.INFO)
    start = Start(monkeypatch, device, second, 0.92)
    engine = start.run()
    blocks = engine.scheduled.num_blocks
    # Torch grows by 48 MiB in the largest step. The rest of the reserve is for kernels.
    reserve = 48 * MIB + kv_plan.KERNELS_BYTES
    assert reserve <= device.free() < reserve + 2 * kv_plan.PAGE_BYTES
    assert start.config.cache_config.num_gpu_blocks == blocks < start.most
    assert engine.worker.model_runner.kv_cache_config.num_blocks == blocks
    assert [tensor.size for tensor in engine.scheduled.kv_cache_tensors] == [BLOCK * blocks] * 2
    assert ("checked", BLOCK * 2 * blocks) in start.said
    # The step is rehearsed with attention, after the captures.
    assert start.said[:2] == [("step", 64, None if second else True, None if second else 16), ("sampler", 64)]
    # The last block is mapped and zero.
    for name in LAYERS:
        raw = engine.worker.model_runner.raw[name]
        assert ctypes.string_at(raw.address + BLOCK * (blocks - 1), BLOCK) == bytes(BLOCK)
    sizes = [record.getMessage() for record in caplog.records if "KV cache size" in record.getMessage()]
    assert sizes == [f"GPU KV cache size: {blocks * 16:,} tokens"]
    (ledger,) = _ledger.ledgers()
    assert ledger.share() == 1.0
    rows = dict(ledger.rows)
    assert rows["CUDA's context"] == 20 * MIB and rows["NCCL and other communicators"] == 5 * MIB
    assert rows["graphs' executables, and kernels of captures"] == 10 * MIB
    assert rows["KV cache"] == kv_plan.Layout((BLOCK, BLOCK), start.most).committed(blocks)


@needs_driver
def test_a_utilization_that_the_user_sets_holds(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.outside = 50 * MIB  # Another process's.
    engine = Start(monkeypatch, device, False, 0.5).run()
    used = device.size - device.free() - 50 * MIB
    grows = 48 * MIB + kv_plan.KERNELS_BYTES
    assert device.size // 2 - 2 * kv_plan.PAGE_BYTES < used + grows <= device.size // 2
    assert engine.scheduled.num_blocks > 0


@needs_driver
def test_ranks_agree_and_give_back_what_one_has_no_room_for(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, device, False, 0.92)
    ask = start.engine_core.collective_rpc

    def of_two_ranks(self: Any, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        mine = ask(self, name, args)
        if name == "vmmgraph_kv_fit":
            return [*mine, {**mine[0], "blocks": 100}]
        # The other rank's driver refuses some pages.
        return [*mine, min(args[0], 90)] if name == "vmmgraph_kv_commit" else mine

    monkeypatch.setattr(start.engine_core, "collective_rpc", of_two_ranks)
    engine = start.run()
    assert engine.scheduled.num_blocks == start.config.cache_config.num_gpu_blocks == 90
    assert engine.worker._vmmgraph_kv.held() == kv_plan.Layout((BLOCK, BLOCK), start.most).committed(90)


@needs_driver
def test_pages_that_the_driver_refuses_make_the_cache_smaller(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    Start(monkeypatch, device, False, 0.92)
    kv = vllm_kv.WorkerKv(0, None)
    kv.make([BLOCK, BLOCK], 5000, 2)
    got = kv.commit(4000)
    assert 2 <= got < 4000
    assert kv.held() == kv_plan.Layout((BLOCK, BLOCK), 5000).committed(got)


@needs_driver
def test_a_configuration_that_says_how_much_is_left_to_vllm(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, device, False, 0.92)
    start.config.cache_config.num_gpu_blocks_override = 12
    with pytest.raises(AssertionError, match="graphs are captured to estimate"):
        start.run()


@pytest.mark.parametrize(
    ("specs", "ranks", "why"),
    [
        ([FullAttentionSpec()], 1, ""),
        ([UniformTypeKVCacheSpecs(kv_cache_specs={"a": FullAttentionSpec(), "b": FullAttentionSpec()})], 1, ""),
        ([FullAttentionSpec(), SlidingWindowSpec()], 1, "kernels may read blocks that SlidingWindowSpec has freed"),
        ([UniformTypeKVCacheSpecs(kv_cache_specs={"a": SlidingWindowSpec()})], 1, "SlidingWindowSpec has freed"),
        ([FullAttentionSpec()], 2, "idle data parallel ranks run steps over blocks of ended requests"),
    ],
)
def test_a_cache_with_blocks_that_are_read_after_their_end_keeps_its_size(specs: list[Any], ranks: int, why: str) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=ranks))
    found = vllm_kv.keeps_size(config, [SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    assert found.endswith(why) and bool(found) == bool(why)


@needs_driver
@pytest.mark.parametrize(
    ("shape", "order", "kept"),
    [(("blocks", "heads"), (), False), (("heads", "blocks"), (0, 1), True), (("blocks", "heads"), (1, 0), True)],
)
def test_a_layout_without_blocks_outermost_is_left_to_vllm(
    device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shape: tuple[str, ...],
    order: tuple[int, ...],
    kept: bool,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Backend, "shape", shape)
    monkeypatch.setattr(Backend, "order", order)
    start = Start(monkeypatch, device, False, 0.92)
    if kept:
        with pytest.raises(AssertionError, match="graphs are captured to estimate"):
            start.run()
    else:
        start.run()
    assert (
        "vLLM allocates the KV cache, since blocks are not the outermost dimension of STAND_IN's tensors" in caplog.text
    ) == kept


def test_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", module_of("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", module_of("vllm.version", __version__="0.99.1"))
    core = module_of("core", EngineCore=type("EngineCore", (), {"_initialize_kv_caches": len}))
    vllm_kv.patch_engine(core)
    assert core.EngineCore._initialize_kv_caches is len
    assert "cannot size the KV cache" in caplog.text


@needs_driver
def test_elastic_memory_comes_and_goes_by_the_page(device: HostDevice) -> None:
    buffer = ElasticBuffer(device, 64 * MIB, 2 * MIB, "test")
    assert buffer.commit(MIB, 4 * MIB) == 6 * MIB
    ctypes.memset(buffer.base, 0x5A, 6 * MIB)
    assert buffer.commit(0, 6 * MIB) == 0
    assert buffer.decommit(0, 5 * MIB) == 4 * MIB
    buffer.reap()
    assert buffer.stats()["committed_bytes"] == 2 * MIB
    assert ctypes.string_at(buffer.base + 4 * MIB, 4) == b"ZZZZ"
    with pytest.raises(_c.OutOfMemory):
        ElasticBuffer(device, 4 * GIB, 2 * MIB, "too much").commit(0, 4 * GIB)
