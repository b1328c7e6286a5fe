"""KV cache of vLLM 0.24 (`vllm_kv`): names, and one raw tensor a layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: First words of the log lines with the size of the cache.
SIZE_LINES = ("GPU KV cache size", "Maximum concurrency")
#: Methods of runners for `vllm_kv.with_all_blocks`.
SHAPE_METHODS = ()


def declined(_: Any) -> str:
    """Returns a reason of this release why vLLM keeps the allocation; empty: none."""
    return ""


def unsupported(worker: Any) -> str:
    """Returns why the layers of a worker need vLLM's allocation; empty if the cache can grow."""
    from vllm.config import set_current_vllm_config

    layers = worker.vllm_config.compilation_config.static_forward_context
    for name, spec in worker.get_kv_cache_spec().items():
        heads, size = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
        if heads is None or size is None:
            continue
        backend = layers[name].get_attn_backend()
        kind = worker.cache_config.cache_dtype
        outermost = backend.get_kv_cache_block_dim(spec.block_size, heads, size, cache_dtype_str=kind) == 0
        with contextlib.suppress(AttributeError, NotImplementedError), set_current_vllm_config(worker.vllm_config):
            outermost = outermost and backend.get_kv_cache_stride_order()[0] == 0
        if not outermost:
            # A prefix of the tensor would be no prefix of the blocks.
            return f"blocks are not the outermost dimension of {backend.get_name()}'s tensors"
    return ""


def request_blocks(vllm_config: Any, groups: Any) -> int:
    """Returns the blocks of a request of maximum length."""
    from vllm.v1.core import kv_cache_utils

    size = kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups)
    return int(-(-size // kv_cache_utils._pool_bytes_per_block(vllm_config, groups)))


def resize(vllm_config: Any, kv_cache_config: Any) -> None:
    """Checks a new number of blocks, and logs the size as vLLM does.

    Raises vLLM's error if a request of maximum length does not fit.
    """
    from vllm.v1.core import kv_cache_utils

    groups = kv_cache_config.kv_cache_groups
    size = kv_cache_config.num_blocks * kv_cache_utils._pool_bytes_per_block(vllm_config, groups)
    if vllm_config.model_config.original_max_model_len == -1:
        kv_cache_utils._auto_fit_max_model_len(vllm_config, [groups], [size])
    kv_cache_utils._check_enough_kv_cache_memory(
        size,
        functools.partial(kv_cache_utils._max_memory_usage_bytes_from_groups, vllm_config, groups),
        vllm_config.model_config.max_model_len,
        functools.partial(kv_cache_utils._estimate_max_model_len_from_groups, vllm_config, groups),
    )
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(vllm_config, kv_cache_config)
    cache = vllm_config.cache_config
    cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency = tokens, concurrency
    kv_cache_utils.logger.info("GPU KV cache size: %s tokens", f"{tokens:,}")
    kv_cache_utils.logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx", f"{vllm_config.model_config.max_model_len:,}", concurrency
    )


def patch_first_allocation(module: ModuleType, initializing: Callable[[], Any]) -> None:
    """Allocates the first runner's KV tensors over elastic memory of ``initializing()``, if any."""
    runner = module.GPUModelRunner
    allocate = runner._allocate_kv_cache_tensors

    @functools.wraps(allocate)
    def allocated(self: Any, kv_cache_config: Any) -> Any:
        kv = initializing()
        if kv is None:
            return allocate(self, kv_cache_config)
        return elastic_tensors(kv, kv_cache_config, set(self.runner_only_attn_layers))

    runner._allocate_kv_cache_tensors = allocated


def patch_second_allocation(module: ModuleType, initializing: Callable[[], Any]) -> None:
    """Allocates the second runner's KV tensors over elastic memory of ``initializing()``, if any.

    The second runner supports only backends with blocks as the outermost dimension.
    """
    allocate = module._allocate_kv_cache

    @functools.wraps(allocate)
    def allocated(kv_cache_config: Any, shared_layers: Any, device: Any) -> Any:
        kv = initializing()
        if kv is None:
            return allocate(kv_cache_config, shared_layers, device)
        return elastic_tensors(kv, kv_cache_config, set(shared_layers))

    module._allocate_kv_cache = allocated  # type: ignore[attr-defined]


def elastic_tensors(kv: Any, kv_cache_config: Any, without: set[str]) -> dict[str, Any]:
    """Returns the raw KV tensors by layer. Layers in ``without`` have no tensor."""
    sizes, numbers = tensor_sizes(kv_cache_config)
    expected = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names} - without
    if expected != set(numbers) - without:
        raise RuntimeError(
            f"cannot lay out the KV cache: {len(expected)} layers need tensors and {len(numbers)} have one; unset VMMGRAPH_KV and report this"
        )
    tensors = kv.first_tensors(kv_cache_config, sizes)
    return {name: tensors[number] for name, number in numbers.items()}


def tensor_sizes(kv_cache_config: Any) -> tuple[list[int], dict[str, int]]:
    """Returns the block bytes of each tensor, and the tensor number of each layer.

    All packed layers share one tensor.
    """
    sizes: list[int] = []
    numbers: dict[str, int] = {}
    packed: int | None = None
    for tensor in kv_cache_config.kv_cache_tensors:
        stride = getattr(tensor, "block_stride", 0)
        if stride > 0:
            if packed is None:
                packed = len(sizes)
                sizes.append(stride)
            number = packed
        else:
            number = len(sizes)
            sizes.append(tensor.size // kv_cache_config.num_blocks)
        numbers.update(dict.fromkeys(tensor.shared_by, number))
    return sizes, numbers
