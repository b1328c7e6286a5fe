"""SGLang 0.5.14's KV cache, sized after the captures (``VMMGRAPH_KV=1``).

SGLang sizes the cache before the captures, and leaves memory for activations and graphs by a rule:
at least 10 GiB on devices above 60 GiB. This module reserves KV tensor addresses for the largest
possible number of tokens, and maps the few tokens used by captures and by one rehearsed step. After
all captures, the largest eager step runs once. The cache then takes the driver's free memory except
a reserve. The scheduler reads the number of tokens later.

Wrapped methods:

    ServerArgs._handle_gpu_memory_settings
        notes whether the user set ``mem_fraction_static``
    ModelRunnerKVCacheMixin._profile_available_bytes
        returns the free memory: the largest possible cache
    MHATokenToKVPool._create_buffers
        tensors over an `ElasticBuffer`
    Scheduler.init_all_cuda_graphs
        SGLang's method, then the sizing
    Scheduler.run_batch
        the guard of the cache polls before each batch (`sglang_guard`)

If the user set a size, or the pool is another class than ``MHATokenToKVPool``, SGLang allocates the
cache (`declined`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import time
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import _ledger
from . import flash_attention, kv_plan, sglang_guard
from ._common import log
from .kv_plan import MIB
from .vllm_kv import WorkerKv, bytes_of_models, dropped

#: Supported SGLang releases.
RELEASES = ("0.5.14",)
#: From this release on SGLang itself sizes its cache after the captures.
SIZED_BY_SGLANG = (0, 5, 16)
#: SGLang's largest number of running requests, if the user sets none.
MOST_REQUESTS = 4096


def install(when_imported: Callable[[str, Callable[[ModuleType], None]], Any]) -> None:
    """Wraps SGLang's methods when their modules are imported."""
    when_imported("sglang.srt.server_args", patch_arguments)
    when_imported("sglang.srt.model_executor.model_runner_kv_cache_mixin", patch_runner)
    when_imported("sglang.srt.mem_cache.memory_pool", patch_pool)
    when_imported("sglang.srt.managers.scheduler", patch_scheduler)
    when_imported("sglang.srt.layers.attention.flashattention_backend", patch_attention)


def known_release() -> bool:
    """Returns whether the SGLang release is supported; logs a warning if not."""
    from sglang.version import __version__

    if str(__version__) in RELEASES:
        return True
    if tuple(int(part) for part in re.findall(r"\d+", str(__version__))[:3]) >= SIZED_BY_SGLANG:
        log.info("vmmgraph: VMMGRAPH_KV changes nothing: SGLang %s sizes its KV cache after the captures by itself", __version__)
        return False
    log.warning(
        "vmmgraph: cannot size the KV cache after the captures: SGLang %s is not %s; SGLang allocates it",
        __version__,
        " or ".join(RELEASES),
    )
    return False


def declined(runner: Any) -> str:
    """Returns why SGLang keeps the allocation of the KV cache; empty if VmmGraph takes over."""
    arguments = runner.server_args
    if getattr(arguments, "vmmgraph_fraction_given", True):
        return "mem_fraction_static is set"
    if arguments.max_total_tokens is not None:
        return "max_total_tokens is set"
    if arguments.enable_memory_saver:
        return "the memory saver pauses torch's memory"
    if arguments.enable_hierarchical_cache or arguments.disaggregation_mode != "null":
        return "a cache on the host or on another server registers the whole cache"
    if not runner.spec_algorithm.is_none():
        return "a draft model has a cache of the same size"
    if runner.use_mla_backend or runner.is_hybrid_swa or runner.mambaish_config is not None or runner.enable_hisparse:
        return "the model's cache is not one MHATokenToKVPool"
    if "float4" in str(runner.kv_cache_dtype) or arguments.prefill_only_disable_kv_cache:
        return "the cache is not one MHATokenToKVPool"
    if arguments.pp_size > 1:
        return "pipeline ranks have caches of different layers"
    return ""


def patch_attention(module: ModuleType) -> None:
    """Limits the memory of prefills by FlashAttention 3."""
    if known_release():
        flash_attention.limit_extend(module)


# In the engine's process, before the scheduler's process starts.


def patch_arguments(module: ModuleType) -> None:
    """Notes whether the user set ``mem_fraction_static``, before SGLang fills in its default.

    The note is an attribute of the arguments, and travels with them to the scheduler's process.
    """
    if not known_release():
        return
    original = module.ServerArgs._handle_gpu_memory_settings

    @functools.wraps(original)
    def handled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "vmmgraph_fraction_given"):
            self.vmmgraph_fraction_given = self.mem_fraction_static is not None
        return original(self, *args, **kwargs)

    module.ServerArgs._handle_gpu_memory_settings = handled


# In the scheduler's process.


class SglangKv(WorkerKv):
    """KV cache of a model runner. A block of the layout is one token."""

    label = "SGLang's KV cache"

    def __init__(self, device: int, warm_tokens: int) -> None:
        super().__init__(device, None)
        #: Tokens with memory before the captures, the padding page included.
        self.warm_tokens = warm_tokens
        #: Ends the filter of SGLang's log lines with the largest size.
        self.lines = contextlib.ExitStack()


#: The cache of the runner that creates its pools. A pool has no reference to its runner.
_initializing: list[SglangKv] = []


def kv_of(runner: Any) -> SglangKv | None:
    """Returns the `SglangKv` of a runner; ``None`` if SGLang allocates the cache."""
    return getattr(runner, "_vmmgraph_kv", None)


def patch_runner(module: ModuleType) -> None:
    """Sizes the pools for all free memory: addresses, not pages."""
    if not known_release():
        return
    mixin = module.ModelRunnerKVCacheMixin
    original = mixin._profile_available_bytes

    @functools.wraps(original)
    def profiled(self: Any, pre_model_load_memory: Any) -> int:
        why = declined(self)
        if why:
            log.info("vmmgraph: SGLang allocates the KV cache, since %s", why)
            return original(self, pre_model_load_memory)
        page = self.server_args.page_size
        tokens, sequences = largest_step(self)
        # A request begins on a page of its own. The first page is padding.
        kv = SglangKv(self.gpu_id, tokens + (sequences + 2) * page)
        kv.open()
        kv.weights = bytes_of_models([self.model])
        kv.phases.mark("context, communicators, and kernels of loading")
        kv.lines.enter_context(dropped("sglang.srt.mem_cache.memory_pool", "KV Cache is allocated"))
        self._vmmgraph_kv = kv
        _initializing[:] = [kv]
        free, _ = _ledger.driver_memory(kv.device)
        return free

    mixin._profile_available_bytes = profiled


def largest_step(runner: Any) -> tuple[int, int]:
    """Returns tokens and sequences of the largest eager step: a chunk, for all running requests.

    A decode step beyond the largest graph samples for as many requests.
    """
    arguments = runner.server_args
    chunk = arguments.chunked_prefill_size
    tokens = chunk if chunk and chunk > 0 else max(arguments.max_prefill_tokens, runner.model_config.context_len)
    sequences = getattr(runner, "max_running_requests", None) or arguments.max_running_requests or MOST_REQUESTS
    return max(tokens, sequences), sequences


def patch_pool(module: ModuleType) -> None:
    """Creates the K and V tensors of every layer over elastic memory."""
    if not known_release():
        return
    kind = module.MHATokenToKVPool
    original = kind._create_buffers

    @functools.wraps(original)
    def created(self: Any) -> None:
        if not _initializing or type(self) is not kind or self.kv_cache_layout != "nhd":
            original(self)
            return
        elastic_buffers(self, _initializing.pop())

    kind._create_buffers = created


def elastic_buffers(pool: Any, kv: SglangKv) -> None:
    """Sets the attributes of ``MHATokenToKVPool._create_buffers``, over elastic memory."""
    import torch

    rows, size = pool.size + pool.page_size, pool.store_dtype.itemsize
    shapes = [(pool.head_num, pool.head_dim)] * pool.layer_num + [(pool.head_num, pool.v_head_dim)] * pool.layer_num
    strides = [heads * dim * size for heads, dim in shapes]
    raw = kv.make(strides, rows, min(rows, kv.warm_tokens))
    tensors = [one.view(pool.store_dtype).view(rows, *shape) for one, shape in zip(raw, shapes, strict=True)]
    pool.k_buffer, pool.v_buffer = tensors[: pool.layer_num], tensors[pool.layer_num :]
    pointers = [one.data_ptr() for one in tensors]
    pool.data_ptrs = torch.tensor(pointers, dtype=torch.uint64, device=pool.device)
    pool.k_data_ptrs, pool.v_data_ptrs = pool.data_ptrs[: pool.layer_num], pool.data_ptrs[pool.layer_num :]
    pool.data_strides = torch.tensor(strides, device=pool.device)


def patch_scheduler(module: ModuleType) -> None:
    """Sizes the cache after the captures, before the scheduler reads the number of tokens."""
    if not known_release():
        return
    original = module.Scheduler.init_all_cuda_graphs

    @functools.wraps(original)
    def captured(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.tp_worker.model_runner
        kv = kv_of(runner)
        if kv is not None:
            if kv.layout is None:
                raise RuntimeError(
                    "cannot size the KV cache: SGLang created no MHATokenToKVPool; unset VMMGRAPH_KV and report this"
                )
            kv.lines.close()
            kv.phases.mark("attention backends")
        result = original(self, *args, **kwargs)
        if kv is not None:
            kv.phases.mark("graphs' executables, and kernels of captures")
            size_cache(runner, kv)
        return result

    module.Scheduler.init_all_cuda_graphs = captured
    sglang_guard.patch_scheduler(module, kv_of)


def size_cache(runner: Any, kv: SglangKv) -> None:
    """Commits the same number of tokens on all ranks: as many as every rank has room for."""
    import torch

    assert kv.layout is not None
    page = runner.server_args.page_size
    kv.warm_held = kv.peaks()[1]
    rehearsed = rehearse(runner, kv)
    torch.cuda.synchronize(kv.device)
    gc.collect()
    torch.cuda.empty_cache()
    kv.open().trim()
    kv.phases.mark("kernels and local memory of the largest eager step")
    free, total = _ledger.driver_memory(kv.device)
    held = torch.cuda.memory_reserved(kv.device)
    # SGLang's rule is the limit: the cache is never smaller than SGLang's.
    peak = held + int(total * (1 - runner.server_args.mem_fraction_static))
    peak = min(peak, kv.peak()) if rehearsed else peak
    reserve = kv_plan.reserve_of(peak, held, runner.tp_size, splits=flash_attention.workspace_bytes())
    room = kv_plan.kv_bytes(free, kv.held(), reserve, None, 0)
    start = time.perf_counter()
    rows = smallest(kv.layout.blocks_within(room) // page * page)
    while True:
        # If the driver of one rank refuses pages, all ranks shrink to the tokens of this rank.
        got = smallest(kv.commit(rows) // page * page)
        if got == rows:
            break
        rows = got
    seconds = time.perf_counter() - start
    if rows <= 2 * page:
        raise RuntimeError(
            f"cannot size the KV cache: {free / MIB:.0f} MiB are free after the captures and {reserve.total() / MIB:.0f} MiB "
            "are kept for eager steps; lower chunked_prefill_size or max_running_requests"
        )
    resize(runner, kv, rows - page)
    kv.eager, kv.unused = reserve.eager + reserve.splits, kv.idle()
    log.info("vmmgraph: %.0f MiB are free after the captures; %.0f MiB stay free: %s", free / MIB, reserve.total() / MIB, reserve)
    log.info(
        "vmmgraph: KV cache of %d tokens, %.2f GiB, committed in %.2f s after the captures",
        rows - page,
        kv.held() / (1 << 30),
        seconds,
    )
    _ledger.keep(kv.device, kv.ledger)
    log.info("vmmgraph: %s", kv.ledger().table())


def smallest(rows: int) -> int:
    """Returns the smallest value of all ranks."""
    import torch
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return rows
    value = torch.tensor(rows, dtype=torch.int64)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(value.item())


def rehearse(runner: Any, kv: SglangKv) -> bool:
    """Runs the largest eager step once, with sampling, and measures torch's peak.

    Returns whether the step could run.
    """
    import torch

    pools = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    prefill = runner.prefill_cuda_graph_runner
    torch.cuda.synchronize(kv.device)
    torch.cuda.empty_cache()
    kv.peaks()
    try:
        runner.prefill_cuda_graph_runner = runner.eager_runner
        prefill_step(runner, *largest_step(runner))
        kv.step_held = kv.peaks()[1]
        return True
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # SGLang's rule then sizes the reserve.
        log.warning("vmmgraph: cannot rehearse the largest eager step: %s; memory stays free by SGLang's rule", error)
        return False
    finally:
        runner.prefill_cuda_graph_runner = prefill
        for pool in pools:
            pool.clear()


def prefill_step(runner: Any, tokens: int, sequences: int) -> None:
    """Runs one prefill of ``tokens`` tokens in ``sequences`` requests, and samples."""
    from sglang.bench_one_batch import extend
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sequences = min(sequences, runner.req_to_token_pool.available_size())
    longest = runner.model_config.context_len - 1
    requests = []
    for number in range(sequences):
        length = min(longest, tokens // sequences + (number < tokens % sequences))
        ids = array("q", [1]) * length
        sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=1)
        request = Req(rid=f"vmmgraph-{number}", origin_input_text="", origin_input_ids=ids, sampling_params=sampling)
        request.full_untruncated_fill_ids = ids
        request.fill_len = length
        request.logprob_start_len = -1
        request.set_extend_input_len(length)
        requests.append(request)
    extend(requests, runner)


def resize(runner: Any, kv: SglangKv, tokens: int) -> None:
    """Sets the number of tokens in SGLang's objects. No request exists yet."""
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    rows = tokens + pool.page_size
    runner.max_total_num_tokens = runner.memory_pool_config.max_total_num_tokens = tokens
    pool.size = allocator.size = tokens
    pool.k_buffer = [one[:rows] for one in pool.k_buffer]
    pool.v_buffer = [one[:rows] for one in pool.v_buffer]
    pool.mem_usage = kv.held() / (1 << 30)
    if hasattr(allocator, "num_pages"):
        allocator.num_pages = tokens // pool.page_size
    allocator.clear()
