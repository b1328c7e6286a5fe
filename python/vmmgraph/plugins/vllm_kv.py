"""vLLM's KV cache behind its captures (``VMMGRAPH_KV=1``), for both model runners of vLLM 0.24.

vLLM sizes the cache before it captures, from a profile and an estimate, and 8 % of the device stay unused. Here the KV tensors lie at addresses
for the most blocks that may ever fit, and have memory for the few blocks that warm-up and captures use. When all graphs are captured, the
largest eager step runs once with attention; then the driver says what is free, a reserve stays free, and the cache takes the rest. The
scheduler is made after that, with the blocks that every rank has room for.

    EngineCore._initialize_kv_caches      vLLM's own, over tensors for the most blocks; then `Worker.vmmgraph_kv_fit` on all ranks, the
                                          least of the answers, `Worker.vmmgraph_kv_commit` on all ranks
    Worker.determine_available_memory     the profile run, without the graphs that vLLM captures only to estimate their memory
    EngineCore.step                       a guard of the cache looks before each step (`kv_guard`)
    GPUModelRunner._allocate_kv_cache_tensors    the tensors, over an `ElasticBuffer`; in the second runner `attn_utils._allocate_kv_cache`

``kv_cache_memory_bytes`` and ``num_gpu_blocks_override`` win: with one of them vLLM allocates as ever.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from .. import _c, _door, _ledger
from .._arena import device_of
from .._elastic import ElasticBuffer
from . import kv_guard, kv_plan
from ._common import is_set, log
from .kv_plan import MIB

#: The releases whose methods these are.
RELEASES = ("0.24.",)


def install(when_imported: Callable[[str, Callable[[ModuleType], None]], Any]) -> None:
    """Wraps vLLM's methods when their modules are imported."""
    when_imported("vllm.v1.engine.core", patch_engine)
    when_imported("vllm.v1.worker.gpu_worker", patch_worker)
    when_imported("vllm.v1.worker.gpu_model_runner", patch_runner)
    when_imported("vllm.v1.worker.gpu.model_runner", patch_captures)
    when_imported("vllm.v1.worker.gpu.attn_utils", patch_second_allocation)


def known_release() -> bool:
    """Whether this is a vLLM that the wrappers were written for; says so once where it is not."""
    from vllm.version import __version__

    if str(__version__).startswith(RELEASES):
        return True
    log.warning(
        "vmmgraph: cannot size the KV cache behind the captures: vLLM %s is not one of %s; vLLM allocates it",
        __version__,
        ", ".join(f"{release}x" for release in RELEASES),
    )
    return False


def declined(config: Any) -> str:
    """Why the KV cache stays vLLM's with this configuration; empty: it does not."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes is set"
    if cache.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override is set"
    if config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None) is not None:
        return "a KV connector registers the whole cache before it has memory"
    if any(getattr(config.model_config, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator")):
        return "sleep mode pauses torch's memory"
    return ""


def utilization_default() -> float:
    """``gpu_memory_utilization`` where the user sets none."""
    from vllm.config import CacheConfig

    return float(CacheConfig.gpu_memory_utilization)


# The engine.


def patch_engine(module: ModuleType) -> None:
    """Sizes the cache after vLLM has initialized it, before the scheduler is made."""
    if not known_release():
        return
    original = module.EngineCore._initialize_kv_caches

    @functools.wraps(original)
    def initialize(self: Any, vllm_config: Any) -> Any:
        why = declined(vllm_config)
        if why:
            log.info("vmmgraph: vLLM allocates the KV cache, since %s", why)
            return original(self, vllm_config)
        with dropped("vllm.v1.core.kv_cache_utils", "GPU KV cache size", "Maximum concurrency"):
            kv_cache_config = original(self, vllm_config)
        return size_cache(self, vllm_config, kv_cache_config)

    module.EngineCore._initialize_kv_caches = initialize
    guard_steps(module.EngineCore)


def guard_steps(kind: Any) -> None:
    """Installs the guard at an engine's first step. A process may load this plugin within ``EngineCore.__init__``, which calls the plugins: a
    wrapper of ``__init__`` would come too late."""

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "_vmmgraph_guard"):
                self._vmmgraph_guard = install_guard(self)
            return original(self, *args, **kwargs)

        return step

    for name in ("step", "step_with_batch_queue"):
        setattr(kind, name, guarded(getattr(kind, name)))


def install_guard(engine: Any) -> kv_guard.Guard | None:
    """Lets a guard of the KV cache look before each step of an engine (`kv_guard`).

    The guard needs the scheduler and the worker in one process, as vLLM has them with one rank:
    ``UniProcExecutor`` is part of the process of ``EngineCore``.
    """
    executor = getattr(engine, "model_executor", None)
    wrapper = getattr(executor, "driver_worker", None)
    kv = kv_of(getattr(wrapper, "worker", None))
    ranks = engine.vllm_config.parallel_config.world_size if executor is not None else 1
    if kv is None or kv.layout is None or ranks > 1:
        if ranks > 1:
            log.info("vmmgraph: the KV cache keeps its size, since %d ranks would have to change it together", ranks)
        return None
    if os.environ.get("VMMGRAPH_KV_GUARD") and not is_set("VMMGRAPH_KV_GUARD"):
        log.info("vmmgraph: the KV cache keeps its size, since VMMGRAPH_KV_GUARD is %s", os.environ["VMMGRAPH_KV_GUARD"])
        return None
    manager = engine.scheduler.kv_cache_manager
    keep = longest_request(engine.vllm_config, engine.scheduler.kv_cache_config) + manager.watermark_blocks
    guard = kv_guard.Guard(manager.block_pool, kv, kv_guard.Need(kv.eager), keep, kv.available, kv.release)
    execute = executor.execute_model

    @functools.wraps(execute)
    def guarded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Scheduling is done: a block in the free list belongs to no request of this step.
        scheduled = scheduler_output.num_scheduled_tokens
        guard.look(scheduler_output.total_num_scheduled_tokens > len(scheduled))
        return execute(scheduler_output, *args, **kwargs)

    executor.execute_model = guarded
    return guard


def longest_request(vllm_config: Any, kv_cache_config: Any) -> int:
    """Blocks that a request of the longest length needs, and the null block."""
    from vllm.v1.core import kv_cache_utils

    groups = kv_cache_config.kv_cache_groups
    size = kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups)
    return -(-size // kv_cache_utils._pool_bytes_per_block(vllm_config, groups)) + 1


def size_cache(engine: Any, vllm_config: Any, kv_cache_config: Any) -> Any:
    """Lets all ranks say how many blocks they have room for, and commits the least of them on each."""
    fits = engine.collective_rpc("vmmgraph_kv_fit")
    if any(fit is None for fit in fits):
        return kv_cache_config
    start = time.perf_counter()
    blocks = kv_plan.agreed([int(fit["blocks"]) for fit in fits])
    while True:
        # A rank whose driver refused some pages has fewer, and then all have.
        got = kv_plan.agreed(engine.collective_rpc("vmmgraph_kv_commit", args=(blocks,)))
        if got == blocks:
            break
        blocks = got
    seconds = time.perf_counter() - start
    for rank, fit in enumerate(fits):
        log.info("vmmgraph: rank %d: %s", rank, fit["said"])
    before = vllm_config.model_config.max_model_len
    resize(vllm_config, kv_cache_config, blocks)
    if vllm_config.model_config.max_model_len != before:
        engine.collective_rpc("update_max_model_len", args=(vllm_config.model_config.max_model_len,))
    log.info(
        "vmmgraph: KV cache of %d blocks, %.2f GiB a rank, committed in %.2f s behind the captures",
        blocks,
        min(int(fit["block_bytes"]) for fit in fits) * blocks / (1 << 30),
        seconds,
    )
    for table in engine.collective_rpc("vmmgraph_kv_ledger"):
        log.info("vmmgraph: %s", table)
    return kv_cache_config


def resize(vllm_config: Any, kv_cache_config: Any, blocks: int) -> None:
    """Makes vLLM's configuration one of so many blocks, checks that a request of the longest length fits, and logs as vLLM does."""
    from vllm.v1.core import kv_cache_utils

    most = kv_cache_config.num_blocks
    for tensor in kv_cache_config.kv_cache_tensors:
        tensor.size = tensor.size // most * blocks
    kv_cache_config.num_blocks = blocks
    cache = vllm_config.cache_config
    cache.num_gpu_blocks = blocks
    groups = kv_cache_config.kv_cache_groups
    size = blocks * kv_cache_utils._pool_bytes_per_block(vllm_config, groups)
    if vllm_config.model_config.original_max_model_len == -1:
        kv_cache_utils._auto_fit_max_model_len(vllm_config, [groups], [size])
    kv_cache_utils._check_enough_kv_cache_memory(
        size,
        functools.partial(kv_cache_utils._max_memory_usage_bytes_from_groups, vllm_config, groups),
        vllm_config.model_config.max_model_len,
        functools.partial(kv_cache_utils._estimate_max_model_len_from_groups, vllm_config, groups),
    )
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(vllm_config, kv_cache_config)
    cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency = tokens, concurrency
    kv_cache_utils.logger.info("GPU KV cache size: %s tokens", f"{tokens:,}")
    kv_cache_utils.logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx", f"{vllm_config.model_config.max_model_len:,}", concurrency
    )


@contextlib.contextmanager
def dropped(logger: str, *beginnings: str) -> Iterator[None]:
    """Drops lines of a logger that would name sizes which are not the last word."""

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(beginnings)

    of = logging.getLogger(logger)
    of.addFilter(keep)
    try:
        yield
    finally:
        of.removeFilter(keep)


# The workers.


class WorkerKv:
    """The KV cache of one worker: its memory, and what was measured on the way."""

    def __init__(self, device: int, others: int | None, sequences: int = 1, largest_graph: int = 0) -> None:
        self.device = device
        #: Sequences of the largest step, and tokens of the largest graph.
        self.sequences, self.largest_graph = sequences, largest_graph
        #: Bytes in use before this process had a context; ``None``: unknown.
        self.others = others
        self.phases = _ledger.Phases(device)
        #: The most that torch's tensors came to in the profile run, and the most that torch held in it, from then to the end of warm-up, and
        #: in the rehearsed step; 0: not run.
        self.profile_allocated = self.profile_held = self.warm_held = self.step_held = 0
        self.layout: kv_plan.Layout | None = None
        self.buffer: ElasticBuffer | None = None
        self.tensors: list[Any] = []
        self.blocks = 0
        self.weights = 0
        #: When the cache was sized: growth of torch in the largest eager step, and torch's memory that no tensor used.
        self.eager = self.unused = 0

    def begin(self, device: int) -> None:
        """Begins to measure, when the process has a context on its device."""
        if device != self.device:
            # One of several engines: `others` is that of another device.
            self.device, self.phases, self.others = device, _ledger.Phases(device), None
        self.open()
        if self.others:
            self.phases.add("other processes, when this one began", self.others)
        self.phases.mark("CUDA's context")

    def warm_blocks(self, groups: int) -> int:
        """Blocks that warm-up and captures may use: the null block and, of each group, two for each sequence, as the second runner's warm-up
        takes; and as many as vLLM's own profile of the first runner's graphs has."""
        return max(1 + 2 * groups * self.sequences, self.largest_graph)

    def open(self) -> Any:
        """The library's device, which stays open from here on."""
        if self.phases.library_device is None:
            door = _door.need()
            self.phases.library_device = device_of(door.library, self.device, door.sharing, door.peers)
        return self.phases.library_device

    def peaks(self) -> tuple[int, int]:
        """The most that torch's tensors came to since the last call, and the most that torch held for them."""
        import torch

        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(stats.get("allocated_bytes.all.peak", 0)), int(stats.get("reserved_bytes.all.peak", 0))

    def peak(self) -> int:
        """The most that torch is to hold in an eager step. Compilers run within the profile run, and torch holds more then; so of that run only
        the tensors count where the step was rehearsed."""
        return max(self.step_held or self.profile_held, self.warm_held, self.profile_allocated)

    def make(self, block_bytes: list[int], most: int, first: int) -> list[Any]:
        """Reserves addresses for ``most`` blocks, backs the ``first`` ones, and returns an int8 tensor for each size of block."""
        # Of a cache that was made before, for another configuration.
        self.tensors, self.buffer, self.blocks = [], None, 0
        self.layout = kv_plan.Layout(tuple(block_bytes), most)
        self.buffer = ElasticBuffer(self.open(), self.layout.reserved(), self.layout.page_bytes, "vLLM's KV cache")
        self.map(first)
        for number, size in enumerate(block_bytes):
            self.tensors.append(self.buffer.tensor(self.layout.offset(number), size * most))
        self.zero(0, first)
        self.blocks = first
        return self.tensors

    def map(self, blocks: int) -> None:
        """Backs the blocks below ``blocks`` in every tensor. Raises `OutOfMemory` with some tensors backed."""
        assert self.layout is not None and self.buffer is not None
        for number, size in enumerate(self.layout.block_bytes):
            self.buffer.commit(self.layout.offset(number), size * blocks)

    def unmap(self, kept: int, had: int) -> None:
        """Gives back the pages of the blocks from ``kept`` to below ``had``, and lets the driver have them."""
        assert self.layout is not None and self.buffer is not None
        for number in range(len(self.layout.block_bytes)):
            begin, size = self.layout.tail(number, kept, had)
            if size:
                self.buffer.decommit(begin, size)
        self.buffer.settle()
        self.open().trim()

    def zero(self, first: int, end: int) -> None:
        """Zeroes new blocks, as vLLM does: kernels may read a block beyond a sequence's end, where a NaN would spread."""
        assert self.layout is not None
        for tensor, size in zip(self.tensors, self.layout.block_bytes, strict=True):
            tensor[first * size : end * size].zero_()

    def commit(self, blocks: int) -> int:
        """Gives the cache so many blocks; fewer if the driver refuses pages. Returns how many it has."""
        import torch

        assert self.layout is not None
        had, wanted = self.blocks, blocks
        while blocks > had:
            try:
                self.map(blocks)
                break
            except _c.OutOfMemory as error:
                log.warning("vmmgraph: %d KV blocks do not fit: %s", blocks, error)
                self.unmap(had, wanted)
                blocks = max(had, blocks - max(self.layout.step(), blocks // 256))
        if blocks < had:
            torch.cuda.synchronize(self.device)
            self.unmap(blocks, had)
        elif blocks > had:
            self.zero(had, blocks)
        self.blocks = blocks
        torch.cuda.synchronize(self.device)
        return blocks

    def drop(self, runs: Sequence[tuple[int, int]]) -> int:
        """Unmaps the pages inside runs of blocks, and returns their bytes to the driver. No request may use the blocks."""
        import torch

        assert self.layout is not None and self.buffer is not None
        # Steps under way may still use the blocks of requests that have ended.
        torch.cuda.synchronize(self.device)
        gone = sum(self.buffer.decommit(*part) for run in runs for part in self.parts(run))
        self.buffer.settle()
        self.open().trim()
        return gone

    def restore(self, runs: Sequence[tuple[int, int]]) -> int:
        """Maps and zeroes runs of blocks in order. Returns the number of complete runs: fewer if the driver refuses pages."""
        import torch

        assert self.buffer is not None
        done = 0
        for run in runs:
            try:
                for part in self.parts(run):
                    self.buffer.commit(*part)
            except _c.OutOfMemory as error:
                log.info("vmmgraph: KV blocks %d to %d stay out of use: %s", *run, error)
                self.drop([run])
                break
            self.zero(*run)
            done += 1
        torch.cuda.synchronize(self.device)
        return done

    def parts(self, run: tuple[int, int]) -> list[tuple[int, int]]:
        """Offset and bytes of a run's pages in each tensor."""
        assert self.layout is not None
        every = (self.layout.inside(number, *run) for number in range(len(self.layout.block_bytes)))
        return [part for part in every if part[1]]

    def available(self) -> tuple[int, int]:
        """Free bytes of the driver, and bytes that torch holds for the next eager step. Does not wait for the device."""
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free), max(0, self.idle() - self.unused)

    def idle(self) -> int:
        """Bytes that torch holds and no tensor uses."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(stats["reserved_bytes"]["all"]["current"]) - int(stats["active_bytes"]["all"]["current"])

    def release(self) -> None:
        """Lets torch return idle memory to the driver."""
        import torch

        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def held(self) -> int:
        """Bytes of the cache's pages."""
        return self.buffer.stats()["committed_bytes"] if self.buffer is not None else 0

    def ledger(self) -> _ledger.Ledger:
        """Where the device's memory went, as of now."""
        import torch

        device = self.open()
        # First, since it waits for the device.
        free, total = _ledger.driver_memory(self.device)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        weights = min(self.weights, allocated)
        rows = [
            ("weights", weights),
            ("KV cache", self.held()),
            ("torch: other tensors and workspaces", allocated - weights),
            ("torch: cache", reserved - allocated),
            *_ledger.graph_rows(device),
            *self.phases.rows.items(),
        ]
        return _ledger.Ledger(self.device, total, free, rows)


def kv_of(owner: Any) -> WorkerKv | None:
    """The KV cache that a worker or a runner has from here."""
    return getattr(owner, "_vmmgraph_kv", None)


def patch_worker(module: ModuleType) -> None:
    """Measures the phases of a worker's start, and adds the methods that the engine calls."""
    if not known_release():
        return
    worker = module.Worker
    from_config = worker.initialize_from_config
    init_device, load_model, determine = worker.init_device, worker.load_model, worker.determine_available_memory
    init_distributed = module.init_worker_distributed_environment

    @functools.wraps(init_distributed)
    def initialize_distributed(*args: Any, **kwargs: Any) -> Any:
        kv = starting.pop() if starting else None
        if kv is not None:
            import torch

            kv.begin(torch.cuda.current_device())
        result = init_distributed(*args, **kwargs)
        if kv is not None:
            kv.phases.mark("NCCL and other communicators")
        return result

    @functools.wraps(init_device)
    def initialize_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not declined(self.vllm_config):
            # Now, as `init_device` makes a context.
            self._vmmgraph_kv = WorkerKv(self.local_rank, _ledger.used_by_all(self.local_rank))
            starting.append(self._vmmgraph_kv)
        result = init_device(self, *args, **kwargs)
        starting.clear()
        if kv_of(self) is not None:
            self.model_runner._vmmgraph_kv = self._vmmgraph_kv
        return result

    @functools.wraps(load_model)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        kv = kv_of(self)
        if kv is not None:
            kv.weights = bytes_of_weights(self.model_runner)
            kv.phases.mark("kernels and library handles of loading")
        return result

    @functools.wraps(from_config)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        kv = kv_of(self)
        if kv is None:
            return from_config(self, *args, **kwargs)
        kv.sequences = self.scheduler_config.max_num_seqs
        kv.largest_graph = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        _initializing.append(kv)
        try:
            return from_config(self, *args, **kwargs)
        finally:
            _initializing.pop()

    @functools.wraps(determine)
    def determined(self: Any, *args: Any, **kwargs: Any) -> int:
        kv = kv_of(self)
        return determine(self, *args, **kwargs) if kv is None else most_bytes(self, kv, determine)

    #: The worker whose communicators come next.
    starting: list[WorkerKv] = []
    module.init_worker_distributed_environment = initialize_distributed
    worker.initialize_from_config = initialize_from_config
    worker.init_device, worker.load_model, worker.determine_available_memory = initialize_device, loaded, determined
    worker.vmmgraph_kv_fit, worker.vmmgraph_kv_commit, worker.vmmgraph_kv_ledger = fit, commit, ledger


def bytes_of_weights(runner: Any) -> int:
    """Bytes of the model's parameters and buffers on the device, each storage once."""
    models = [runner.get_model()]
    for name in ("drafter", "speculator"):
        drafter = getattr(getattr(runner, name, None), "model", None)
        if drafter is not None:
            models.append(drafter)
    storages = {}
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_cuda:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def most_bytes(worker: Any, kv: WorkerKv, determine: Callable[[Any], int]) -> int:
    """Runs vLLM's profile, and returns the most that the KV cache may ever have: what is free before any graph is captured."""
    runner = worker.model_runner
    # vLLM captures graphs here only to estimate what they take, which is not needed: they are captured before the cache is sized.
    runner.profile_cudagraph_memory = lambda: 0
    try:
        with dropped("vllm.v1.worker.gpu_worker", "Available KV cache memory"):
            determine(worker)
    finally:
        del runner.profile_cudagraph_memory
    kv.profile_allocated, kv.profile_held = kv.peaks()
    kv.phases.mark("kernels and library handles of the profile run")
    free, total = _ledger.driver_memory(kv.device)
    ceiling = kv_plan.ceiling_of(total, worker.cache_config.gpu_memory_utilization, utilization_default())
    if ceiling is not None:
        free = min(free, ceiling - kv_plan.own_bytes(total - free, _ledger.used_by_process(kv.device), kv.others))
    return max(0, free)


def fit(self: Any) -> dict[str, Any] | None:
    """How many blocks this rank has room for, behind the captures; ``None``: its cache is vLLM's. A method of vLLM's ``Worker``."""
    import torch

    kv = kv_of(self)
    if kv is None or kv.layout is None:
        return None
    kv.phases.mark("kernels and library handles of warm-up")
    kv.warm_held = kv.peaks()[1]
    rehearse(self.model_runner, kv, bool(self.use_v2_model_runner))
    torch.cuda.synchronize(kv.device)
    gc.collect()
    torch.cuda.empty_cache()
    kv.open().trim()
    kv.phases.mark("kernels and local memory of the largest eager step")
    free, total = _ledger.driver_memory(kv.device)
    held = torch.cuda.memory_reserved(kv.device)
    reserve = kv_plan.reserve_of(kv.peak(), held, self.vllm_config.parallel_config.world_size)
    kv.eager, kv.unused = reserve.eager, kv.idle()
    ceiling = kv_plan.ceiling_of(total, self.cache_config.gpu_memory_utilization, utilization_default())
    own = kv_plan.own_bytes(total - free, _ledger.used_by_process(kv.device), kv.others)
    room = kv_plan.kv_bytes(free, kv.held(), reserve, ceiling, own)
    limit = (
        "the whole device" if ceiling is None else f"at most {ceiling / MIB:.0f} MiB for this process, which uses {own / MIB:.0f}"
    )
    return {
        "blocks": kv.layout.blocks_within(room),
        "block_bytes": sum(kv.layout.block_bytes),
        "said": f"{free / MIB:.0f} MiB are free behind the captures, {limit}; {reserve.total() / MIB:.0f} MiB stay free: {reserve}; torch holds {held / MIB:.0f} MiB, at most {kv.step_held / MIB:.0f} in the "
        f"largest step, {kv.warm_held / MIB:.0f} in warm-up and {kv.profile_held / MIB:.0f} ({kv.profile_allocated / MIB:.0f} of tensors) in the profile run",
    }


def rehearse(runner: Any, kv: WorkerKv, second: bool) -> None:
    """Runs the largest eager step once with attention and sampling, as vLLM's profile run does without attention: what its kernels need is
    taken then, and torch's peak is measured. It writes no block and reads those that warm-up used. ``second``: of the second model runner."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.distributed.parallel_state import get_pp_group

    tokens = runner.max_num_tokens
    sequences = min(tokens, runner.scheduler_config.max_num_seqs)
    # The last sequence gets what does not divide; no sequence may be longer than its row of the block table.
    longest = tokens // sequences + tokens % sequences
    if longest > runner.max_model_len:
        log.info("vmmgraph: the largest eager step is not rehearsed, since %d tokens are longer than a sequence may be", longest)
        return
    torch.cuda.synchronize(kv.device)
    torch.cuda.empty_cache()
    kv.peaks()
    if second:
        hidden, last = runner._dummy_run(tokens, skip_eplb=True)
    else:
        hidden, last = runner._dummy_run(
            tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=True, skip_eplb=True, profile_seq_lens=longest
        )
    if get_pp_group().is_last_rank:
        if runner.is_pooling_model:
            runner._dummy_pooler_run(hidden)
        else:
            runner._dummy_sampler_run(last)
    kv.step_held = kv.peaks()[1]


def commit(self: Any, blocks: int) -> int:
    """Commits so many blocks; returns how many there are. A method of vLLM's ``Worker``."""
    kv = kv_of(self)
    assert kv is not None
    got = kv.commit(blocks)
    # Every process has these of its own.
    self.cache_config.num_gpu_blocks = self.model_runner.kv_cache_config.num_blocks = got
    return got


def ledger(self: Any) -> str:
    """The table of the worker's device, which `vmmgraph.report` shows from now on. A method of vLLM's ``Worker``."""
    kv = kv_of(self)
    if kv is None:
        return ""
    _ledger.keep(kv.device, kv.ledger)
    return kv.ledger().table()


# The runners.

#: The KV cache of the worker that is initializing it on this thread; the second runner's allocation is a function that knows no worker.
_initializing: list[WorkerKv] = []


def patch_runner(module: ModuleType) -> None:
    """Allocates the first runner's KV tensors over elastic memory."""
    if not known_release():
        return
    runner = module.GPUModelRunner
    allocate = runner._allocate_kv_cache_tensors

    @functools.wraps(allocate)
    def allocated(self: Any, kv_cache_config: Any) -> dict[str, Any]:
        kv = kv_of(self)
        if kv is None:
            return allocate(self, kv_cache_config)
        check_layout(self)
        return elastic_tensors(kv, kv_cache_config, set(self.runner_only_attn_layers))

    runner._allocate_kv_cache_tensors = allocated
    patch_captures(module)


def patch_second_allocation(module: ModuleType) -> None:
    """Allocates the second runner's KV tensors over elastic memory. It only takes backends whose blocks are outermost."""
    if not known_release():
        return
    allocate = module._allocate_kv_cache

    @functools.wraps(allocate)
    def allocated(kv_cache_config: Any, shared_layers: Any, device: Any) -> dict[str, Any]:
        if not _initializing:
            return allocate(kv_cache_config, shared_layers, device)
        return elastic_tensors(_initializing[-1], kv_cache_config, set(shared_layers))

    module._allocate_kv_cache = allocated


def patch_captures(module: ModuleType) -> None:
    """Names what captures take that is neither torch's nor an arena's."""
    if not known_release():
        return
    runner = module.GPUModelRunner
    capture = runner.capture_model

    @functools.wraps(capture)
    def captured(self: Any, *args: Any, **kwargs: Any) -> Any:
        kv = kv_of(self)
        if kv is not None:
            kv.phases.mark("kernels and library handles of warm-up")
        result = capture(self, *args, **kwargs)
        if kv is not None:
            kv.phases.mark("graphs' executables, and kernels of captures")
        return result

    runner.capture_model = captured


def elastic_tensors(kv: WorkerKv, kv_cache_config: Any, without: set[str]) -> dict[str, Any]:
    """The raw KV tensors by layer, as vLLM allocates them, at addresses for all blocks of the configuration.

    Layers of ``without`` have no tensor. ``kv_cache_config`` is the runner's own: until the cache is committed, its ``num_blocks`` says how
    many blocks have memory, which the warm-up of the second runner keeps to.
    """
    most = kv_cache_config.num_blocks
    sizes, numbers = tensor_sizes(kv_cache_config)
    expected = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names} - without
    if expected != set(numbers) - without:
        raise RuntimeError(
            f"cannot lay out the KV cache: {len(expected)} layers need tensors and {len(numbers)} have one; unset VMMGRAPH_KV and report this"
        )
    free, _ = _ledger.driver_memory(kv.device)
    first = kv_plan.first_blocks(kv.warm_blocks(len(kv_cache_config.kv_cache_groups)), most, sum(sizes), free)
    tensors = kv.make(sizes, most, first)
    kv_cache_config.num_blocks = first
    return {name: tensors[number] for name, number in numbers.items()}


def tensor_sizes(kv_cache_config: Any) -> tuple[list[int], dict[str, int]]:
    """Bytes of a block of each tensor, and which tensor each layer has. Packed layers all have one tensor."""
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


def check_layout(runner: Any) -> None:
    """Refuses a backend whose blocks are not the outermost dimension, since a prefix of its tensor is no prefix of its blocks."""
    for group in runner._attn_group_iterator():
        spec = group.kv_cache_spec
        heads, size = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
        if heads is None or size is None:
            continue
        backend = group.backend
        outermost = (
            backend.get_kv_cache_block_dim(spec.block_size, heads, size, cache_dtype_str=runner.cache_config.cache_dtype) == 0
        )
        with contextlib.suppress(AttributeError, NotImplementedError):
            outermost = outermost and backend.get_kv_cache_stride_order()[0] == 0
        if not outermost:
            raise RuntimeError(
                f"cannot grow the KV cache of {backend.get_name()}: blocks are not the outermost dimension of its tensors; "
                "unset VMMGRAPH_KV"
            )
