"""KV cache of vLLM 0.33 (`vllm_kv`): names, and layers as views of one buffer.

vLLM 0.33 allocates one buffer, and each layer is a view with strides. Block ``b`` of layer ``l``
begins at ``offset + l * layer_stride + b * block_stride`` (``KVCacheTensor``). Each run of all
blocks becomes a plane: one a layer, or one of all layers if blocks are outermost. Here planes begin
at pages, so offsets and layer strides change, and vLLM makes the views from the changed values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: Releases with these names.
RELEASES = ("0.33.",)
#: First words of the log line with the size of the cache.
SIZE_LINES = ("%s KV cache size",)
#: Methods of runners for `vllm_kv.with_all_blocks`: addresses for the zeroing of blocks, and copies
#: of blocks.
SHAPE_METHODS = ("_init_kv_zero_meta", "_update_states", "update_requests")


def declined(config: Any) -> str:
    """Returns a reason of this release why vLLM keeps the allocation; empty: none."""
    from vllm import envs

    if envs.VLLM_ENABLE_STARTUP_PLAN:
        return "a startup plan may set its size"
    if config.attention_config.hisparse_config is not None:
        return "HiSparse has KV blocks on the host"
    if config.parallel_config.enable_elastic_ep:
        return "elastic expert parallelism changes the ranks of a running engine"
    media = config.model_config.multimodal_config
    if media is not None and (media.mm_ipc_gpu_memory_gb > 0 or media.use_gpu_video_backend()):
        return "frontend processes decode media on the GPU"
    if config.observability_config.jit_monitor_mode == "error":
        return "the rehearsed step may compile kernels, and jit_monitor_mode is error"
    return ""


def unsupported(worker: Any) -> str:
    """Returns why the layers of a worker need vLLM's allocation; empty if the cache can grow."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    layout = worker.cache_config.get_resolved_kv_cache_layout()
    if not (layout.is_block_outermost or layout.is_block_compact):
        return f"heads are outside of blocks in layout {layout.name}"
    if not all(spec.has_layer_views for spec in worker.get_kv_cache_spec().values()):
        return "a layer lays out the buffer itself"
    for backend in get_current_attn_backends(worker.vllm_config):
        if backend.get_name() == "FLEX_ATTENTION":
            return "FLEX_ATTENTION views the whole cache by its final number of blocks"
    return ""


def request_blocks(vllm_config: Any, groups: Any) -> int:
    """Returns the blocks of a request of maximum length."""
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(vllm_config)
    size = planning._max_memory_usage_bytes_from_groups(builder, vllm_config, groups)
    return int(-(-size // planning._pool_bytes_per_block_from_builder(builder, vllm_config, groups)))


def resize(vllm_config: Any, kv_cache_config: Any) -> None:
    """Checks a new number of blocks, and logs the size as vLLM does.

    Raises vLLM's error if a request of maximum length does not fit beside the null block.
    """
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder, groups = get_kv_cache_config_builder(vllm_config), kv_cache_config.kv_cache_groups
    size = (kv_cache_config.num_blocks - 1) * planning._pool_bytes_per_block_from_builder(builder, vllm_config, groups)
    if vllm_config.model_config.original_max_model_len == -1:
        planning._auto_fit_max_model_len(builder, vllm_config, [groups], [size])
    planning._check_enough_kv_cache_memory(
        size,
        functools.partial(planning._max_memory_usage_bytes_from_groups, builder, vllm_config, groups),
        vllm_config.model_config.max_model_len,
        functools.partial(planning._estimate_max_model_len_from_groups, builder, vllm_config, groups),
    )
    kv_cache_utils.update_kv_cache_capacity(vllm_config, kv_cache_config)


def patch_first_allocation(module: ModuleType, initializing: Callable[[], Any]) -> None:
    """Allocates a runner's KV cache over elastic memory of ``initializing()``, if any."""
    allocate = module.allocate_kv_cache

    @functools.wraps(allocate)
    def allocated(kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None) -> Any:
        kv = initializing()
        if kv is None or not kv_cache_config.kv_cache_tensors:
            return allocate(kv_cache_config, device, layout, kernel_block_sizes)
        return elastic_views(kv, kv_cache_config, layout, kernel_block_sizes or [])

    module.allocate_kv_cache = allocated  # type: ignore[attr-defined]


#: The second runner imports the same function.
patch_second_allocation = patch_first_allocation


def planes(kv_cache_config: Any) -> tuple[list[int], list[int]]:
    """Returns the first bytes of the planes in vLLM's buffer, and their block bytes.

    Raises RuntimeError if planes overlap or leave gaps.
    """
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    size = tensors[0].size
    if all(tensor.block_stride * blocks == size for tensor in tensors):
        return [0], [size // blocks]
    # Groups lie over each other from the first byte.
    found = {
        tensor.offset + layer * tensor.layer_stride: tensor.block_stride
        for tensor in tensors
        for layer in range(len(tensor.layers))
    }
    starts = sorted(found)
    ends = [start + found[start] * blocks for start in starts]
    if starts != [0, *ends[:-1]] or ends[-1] != size:
        raise RuntimeError("cannot lay out the KV cache: layers overlap or leave gaps; unset VMMGRAPH_KV and report this")
    return starts, [found[start] for start in starts]


def elastic_views(kv: Any, kv_cache_config: Any, layout: Any, kernel_block_sizes: list[int]) -> dict[str, Any]:
    """Returns the layers' views of an elastic buffer, as vLLM's ``allocate_kv_cache`` does."""
    from vllm.v1.kv_cache_interface import create_kv_cache_views

    most = kv_cache_config.num_blocks
    starts, sizes = planes(kv_cache_config)
    kv.first_tensors(kv_cache_config, sizes)
    raw = kv.buffer.tensor(0, kv.layout.reserved())
    views: dict[str, Any] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        name = tensor.layers[0]
        number, group = next(
            (number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups) if name in group.layer_names
        )
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        if len(starts) > 1:
            plane = starts.index(tensor.offset)
            tensor = dataclasses.replace(tensor, offset=kv.layout.offset(plane), layer_stride=kv.layout.extent(plane))
        kernel_block = kernel_block_sizes[number] if number < len(kernel_block_sizes) else None
        made = create_kv_cache_views(raw, spec, most, layout, tensor, kernel_block_size=kernel_block)
        views.update(zip(tensor.layers, made, strict=True))
    return views
