"""Limit of FlashAttention 3's splits in eager steps, over stand-ins of the engines' backends."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vmmgraph.plugins import flash_attention, kv_plan
from vmmgraph.plugins.kv_plan import MIB

#: Qwen3-8B on an H200.
HEADS, KV_HEADS, HEAD, PROCESSORS = 32, 8, 128, 132


@pytest.mark.parametrize(
    ("query", "keys", "splits"),
    [(1, 40960, 15), (32, 4096, 14), (32, 513, 5), (64, 4096, 7), (32, 512, 1), (512, 40960, 1), (16384, 40960, 1)],
)
def test_the_kernel_splits_short_queries_beside_long_keys(query: int, keys: int, splits: int) -> None:
    assert flash_attention.splits(query, keys, HEADS // KV_HEADS, KV_HEADS, HEAD, PROCESSORS) == splits


@pytest.mark.parametrize(
    ("tokens", "sequences", "chosen", "limit"),
    [(16384, 512, 15, 1), (4096, 128, 15, 3), (1024, 32, 15, 0), (16384, 512, 1, 0), (8192, 512, 1, 0), (16384, 993, 15, 0)],
)
def test_the_workspace_of_a_step_fits_the_reserve(tokens: int, sequences: int, chosen: int, limit: int) -> None:
    assert flash_attention.limit(tokens, sequences, chosen, HEADS, HEAD) == limit
    assert limit < 2 or limit * tokens * HEADS * (HEAD + 1) * 4 <= flash_attention.WORKSPACE_BYTES


class Builder:
    """vLLM's ``FlashAttentionMetadataBuilder``."""

    num_heads_q, num_heads_kv, headdim, dcp_world_size, device = HEADS, KV_HEADS, HEAD, 1, "cuda:0"
    max_cudagraph_size, max_num_splits = 512, 32

    def __init__(self, module: ModuleType, version: int) -> None:
        self.module, self.aot_schedule = module, version == 3

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> SimpleNamespace:
        if common.num_actual_tokens < 0:
            raise ValueError("a step failed")
        number = self.max_num_splits if common.num_actual_tokens <= self.max_cudagraph_size else 0
        scheduled = (
            self.module.get_scheduler_metadata(batch_size=common.num_reqs, num_splits=number) if self.aot_schedule else None
        )
        # Layers with several windows: no schedule, and the kernel still splits.
        self.aot_schedule = self.aot_schedule and not common.windows
        return SimpleNamespace(max_num_splits=number, scheduled=scheduled)


def step(tokens: int, sequences: int = 512, query: int = 32, windows: bool = False) -> SimpleNamespace:
    return SimpleNamespace(num_actual_tokens=tokens, num_reqs=sequences, max_query_len=query, max_seq_len=40960, windows=windows)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        current_device=lambda: 0, get_device_properties=lambda _: SimpleNamespace(multi_processor_count=PROCESSORS)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(flash_attention.State, "used", False)
    module = ModuleType("flash_attn")
    module.FlashAttentionMetadataBuilder = type("FlashAttentionMetadataBuilder", (Builder,), {"build": Builder.build})
    module.get_scheduler_metadata = lambda **given: given["num_splits"]
    flash_attention.limit_splits(module)
    return module


def test_schedule_and_kernel_get_the_same_limit(backend: ModuleType) -> None:
    builder = backend.FlashAttentionMetadataBuilder(backend, 3)
    for given, splits in (
        (step(16384), 1),
        (step(4096, 128), 3),
        (step(600, 20), 0),
        (step(512), 32),
        (step(16384, query=512), 0),
    ):
        metadata = builder.build(0, given)
        assert metadata.max_num_splits == metadata.scheduled == splits
    assert flash_attention.workspace_bytes() == flash_attention.WORKSPACE_BYTES


def test_the_limit_stays_when_the_schedule_is_off(backend: ModuleType) -> None:
    builder = backend.FlashAttentionMetadataBuilder(backend, 3)
    builder.build(0, step(16384, windows=True))
    metadata = builder.build(0, step(16384))
    assert metadata.scheduled is None and metadata.max_num_splits == 1


def test_a_limit_ends_with_its_step_and_thread(backend: ModuleType) -> None:
    builder = backend.FlashAttentionMetadataBuilder(backend, 3)
    with pytest.raises(ValueError, match="a step failed"):
        builder.build(0, step(-1))
    assert backend.get_scheduler_metadata(num_splits=0) == 0
    flash_attention.State.step.splits = 7
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(backend.get_scheduler_metadata(num_splits=0)))
    thread.start()
    thread.join()
    flash_attention.State.step.splits = 0
    assert seen == [0]


def test_other_versions_stay_as_they_are(backend: ModuleType) -> None:
    builder = backend.FlashAttentionMetadataBuilder(backend, 2)
    assert builder.build(0, step(16384)).max_num_splits == 0 and flash_attention.workspace_bytes() == 0
    nothing = ModuleType("flash_attn")
    flash_attention.limit_splits(nothing)
    assert not hasattr(nothing, "get_scheduler_metadata")


@pytest.mark.parametrize(
    ("version", "given", "tokens", "splits"), [(3, 0, 16384, 1), (3, 0, 600, 0), (3, 1, 16384, 1), (4, 0, 16384, 0)]
)
def test_prefills_of_sglang_are_limited(backend: ModuleType, version: int, given: int, tokens: int, splits: int) -> None:
    class FlashAttentionBackend:
        num_splits, fa_impl_ver = given, version
        forward_metadata = SimpleNamespace(max_seq_len_q=32, max_seq_len_k=40960)

        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> int:
            if not save_kv_cache:
                raise ValueError("a step failed")
            return self.num_splits

    module = SimpleNamespace(FlashAttentionBackend=FlashAttentionBackend)
    flash_attention.limit_extend(module)
    layer = SimpleNamespace(tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, v_head_dim=HEAD)
    engine, q, batch = FlashAttentionBackend(), SimpleNamespace(shape=(tokens, 4096)), SimpleNamespace(batch_size=512)
    assert engine.forward_extend(q, None, None, layer, batch) == splits
    with pytest.raises(ValueError, match="a step failed"):
        engine.forward_extend(q, None, None, layer, batch, save_kv_cache=False)
    assert engine.num_splits == given
    assert (flash_attention.workspace_bytes() > 0) == (version == 3 and not given)
    flash_attention.limit_extend(SimpleNamespace())


def test_the_workspace_is_a_part_of_the_reserve() -> None:
    reserve = kv_plan.reserve_of(100 * MIB, 60 * MIB, 1, splits=256 * MIB)
    assert reserve.total() == 40 * MIB + kv_plan.KERNELS_BYTES + 256 * MIB
    assert "256 MiB for FlashAttention's splits" in str(reserve)
