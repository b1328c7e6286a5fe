"""Workspace of FlashAttention 3 in eager steps of vLLM and SGLang.

FlashAttention 3 splits the keys of a long sequence and adds float32 partial results, in a workspace
of ``splits * heads * tokens * (head size + 1)`` floats. In eager steps the engines leave the number
of splits to the kernel, which expects one long sequence beside short queries: 15 splits, 3.8 GiB
for 16,384 tokens of Qwen3-8B (source: ``hopper/heuristics.h`` and ``hopper/flash_api.cpp`` of
vllm-project/flash-attention). Stock vLLM leaves 8 % of the device free, SGLang 10 GiB. Here a
step's splits are limited to `WORKSPACE_BYTES`, a part of the reserve.

Only steps whose workspace would be larger change. Such a step has many tokens, so its tiles nearly
fill the device without splits.
"""

from __future__ import annotations

import functools
import math
import threading
from types import ModuleType
from typing import Any

from .kv_plan import MIB

#: Workspace of all splits of one eager step.
WORKSPACE_BYTES = 256 * MIB
#: Limits of the kernel: splits, and sequences beyond which it never splits.
MOST_SPLITS, MOST_SEQUENCES = 128, 992


@functools.lru_cache
def splits(query: int, keys: int, ratio: int, kv_heads: int, head: int, processors: int) -> int:
    """Returns the number of splits which FlashAttention 3 chooses.

    ``query`` and ``keys``: length of the longest query and sequence. ``ratio``: query heads per KV
    head. ``head``: head size. ``processors``: multiprocessors of the device.
    """
    rows, columns = (192, 64) if head <= 96 else (128, 64 if head > 128 else 128)
    tiles = kv_heads * -(-query * ratio // rows)
    columns = -(-keys // columns)
    if tiles >= 0.8 * processors or columns <= 4:
        return 1
    waves = [tiles * count / processors for count in range(1, min(MOST_SPLITS, processors, columns) + 1)]
    efficiency = [one / math.ceil(one) for one in waves]
    return next(count for count, one in enumerate(efficiency, 1) if one >= 0.85 * max(efficiency))


def limit(tokens: int, sequences: int, chosen: int, heads: int, head: int) -> int:
    """Returns the limit of the splits of a step; 0 if the ``chosen`` number has room."""
    split = tokens * heads * (head + 1) * 4
    # One split needs no workspace.
    if chosen == 1 or sequences > MOST_SEQUENCES or chosen * split <= WORKSPACE_BYTES:
        return 0
    return max(1, WORKSPACE_BYTES // split)


class State:
    """State of this process."""

    #: Whether a step used FlashAttention 3.
    used = False
    #: Multiprocessors of the current device; 0: not read yet.
    processors = 0
    #: ``splits``: limit of the step which this thread prepares; 0: none.
    step = threading.local()


def workspace_bytes() -> int:
    """Returns the reserve for FlashAttention 3; 0 if no step used it."""
    return WORKSPACE_BYTES if State.used else 0


def limit_of(tokens: int, sequences: int, query: int, keys: int, heads: int, kv_heads: int, head: int) -> int:
    """Returns the limit of the splits of a step on the current device."""
    import torch

    State.used = True
    if not State.processors:
        State.processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    chosen = splits(query, keys, -(-heads // kv_heads), kv_heads, head, State.processors)
    return limit(tokens, sequences, chosen, heads, head)


def limit_extend(module: ModuleType) -> None:
    """Limits the splits of prefills in SGLang's FlashAttention backend."""
    backend = getattr(module, "FlashAttentionBackend", None)
    if backend is None:
        return
    extend = backend.forward_extend

    @functools.wraps(extend)
    def limited(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_splits or self.fa_impl_ver != 3:
            return extend(self, q, k, v, layer, forward_batch, *args, **kwargs)
        step = self.forward_metadata
        self.num_splits = limit_of(
            q.shape[0],
            forward_batch.batch_size,
            step.max_seq_len_q,
            step.max_seq_len_k,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.v_head_dim,
        )
        try:
            return extend(self, q, k, v, layer, forward_batch, *args, **kwargs)
        finally:
            self.num_splits = 0

    backend.forward_extend = limited


def limit_splits(module: ModuleType) -> None:
    """Limits the splits of eager steps in vLLM's FlashAttention backend.

    A builder schedules steps ahead (``aot_schedule``) only with version 3.
    """
    builder, schedule = getattr(module, "FlashAttentionMetadataBuilder", None), getattr(module, "get_scheduler_metadata", None)
    if builder is None or schedule is None:
        return
    build = builder.build

    @functools.wraps(build)
    def limited(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        # The first call may turn the schedule off, and the version stays.
        if not getattr(self, "_vmmgraph_is_version_3", self.aot_schedule):
            return build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        self._vmmgraph_is_version_3 = True
        step, heads = common_attn_metadata, self.num_heads_q * self.dcp_world_size
        most = limit_of(
            step.num_actual_tokens,
            step.num_reqs,
            step.max_query_len,
            step.max_seq_len,
            heads,
            self.num_heads_kv,
            self.headdim,
        )
        State.step.splits = most
        try:
            metadata = build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        finally:
            State.step.splits = 0
        # 0: the kernel chooses. Captures have a number of their own.
        if most and metadata.max_num_splits == 0:
            metadata.max_num_splits = most
        return metadata

    @functools.wraps(schedule)
    def scheduled(*args: Any, **kwargs: Any) -> Any:
        most = getattr(State.step, "splits", 0)
        # The kernel must get the number of its schedule.
        if most and kwargs.get("num_splits", 0) == 0:
            kwargs["num_splits"] = most
        return schedule(*args, **kwargs)

    builder.build, module.get_scheduler_metadata = limited, scheduled  # type: ignore[attr-defined]
