"""vLLM's KV cache, sized after the captures (``VMMGRAPH_KV=1``), for both model runners.

vLLM sizes the cache before the captures, from a profile and an estimate, and leaves 8 % of the
device unused. This module reserves KV tensor addresses for the largest possible number of blocks,
and maps only the few blocks used by warm-up and captures. After all captures, the largest eager
step runs once with attention. The cache then takes the driver's free memory except a reserve. The
scheduler is created later, with the number of blocks for which every rank has room.

Wrapped methods:

    EngineCore._initialize_kv_caches
        vLLM's method over tensors of maximum size; then `Worker.vmmgraph_kv_fit` on all ranks, and
        `Worker.vmmgraph_kv_commit` of the smallest result on all ranks
    Worker.determine_available_memory
        profile run, without vLLM's captures for an estimate of graph memory
    EngineCore.step
        the guard of the cache polls before each step (`kv_guard`)
    the allocation of the KV tensors
        tensors over an `ElasticBuffer`

`vllm_kv_024` and `vllm_kv_033` have the names and KV layouts of their releases (`release`). If
``kv_cache_memory_bytes`` or ``num_gpu_blocks_override`` is set, vLLM allocates the cache.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from .. import _c, _ledger, _session
from .._arena import device_of
from .._elastic import ElasticBuffer
from . import flash_attention, kv_guard, kv_plan
from ._common import log
from .kv_plan import MIB

#: vLLM releases with the names of 0.24.
RELEASES = ("0.24.",)
#: Specifications of layers whose blocks stay until their request ends. With other specifications
#: vLLM frees the blocks before a window, and kernels that load whole tiles read a part of these.
WHOLE_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "TQFullAttentionSpec")


def install(when_imported: Callable[[str, Callable[[ModuleType], None]], Any]) -> None:
    """Wraps vLLM's methods when their modules are imported."""
    when_imported("vllm.v1.engine.core", patch_engine)
    when_imported("vllm.v1.worker.gpu_worker", patch_worker)
    when_imported("vllm.v1.worker.gpu_model_runner", patch_runner)
    when_imported("vllm.v1.worker.gpu.model_runner", patch_captures)
    when_imported("vllm.v1.worker.gpu.attn_utils", patch_second_allocation)
    when_imported("vllm.v1.attention.backends.flash_attn", flash_attention.limit_splits)


def known_release(action: str, releases: tuple[str, ...]) -> bool:
    """Returns whether the vLLM release is one of these; logs a warning with the action if not."""
    from vllm.version import __version__

    if str(__version__).startswith(releases):
        return True
    log.warning(
        "vmmgraph: cannot %s: vLLM %s is not one of %s; vLLM does so by itself",
        action,
        __version__,
        ", ".join(f"{release}x" for release in releases),
    )
    return False


def release() -> Any:
    """Returns the module with the names of the installed vLLM release; ``None``, with a warning in
    the log: the release is unknown."""
    from vllm.version import __version__

    from . import vllm_kv_024, vllm_kv_033

    known = known_release("size the KV cache after the captures", RELEASES + vllm_kv_033.RELEASES)
    if known and str(__version__).startswith(vllm_kv_033.RELEASES):
        return vllm_kv_033
    return vllm_kv_024 if known else None


def declined(config: Any, names: Any) -> str:
    """Returns why vLLM keeps the allocation of the KV cache; empty if VmmGraph takes over."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes is set"
    if cache.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override is set"
    if config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None) is not None:
        return "a KV connector registers the whole cache before it has memory"
    if any(getattr(config.model_config, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator")):
        return "sleep mode pauses torch's memory"
    return str(names.declined(config))


def utilization_default() -> float:
    """Returns vLLM's default of ``gpu_memory_utilization``."""
    from vllm.config import CacheConfig

    return float(CacheConfig.gpu_memory_utilization)


# The engine.


def patch_engine(module: ModuleType) -> None:
    """Sizes the cache after vLLM's initialization, before the scheduler is created."""
    names = release()
    if names is None:
        return
    original = module.EngineCore._initialize_kv_caches

    @functools.wraps(original)
    def initialize(self: Any, vllm_config: Any) -> Any:
        why = declined(vllm_config, names)
        if why:
            log.info("vmmgraph: vLLM allocates the KV cache, since %s", why)
            return original(self, vllm_config)
        with dropped("vllm.v1.core.kv_cache_utils", *names.SIZE_LINES) as lines:
            kv_cache_config = original(self, vllm_config)
        if not size_cache(self, vllm_config, kv_cache_config, names):
            for line in lines:
                logging.getLogger(line.name).handle(line)
        return kv_cache_config

    module.EngineCore._initialize_kv_caches = initialize
    guard_steps(module.EngineCore, names)


def guard_steps(kind: Any, names: Any) -> None:
    """Installs the guard at an engine's first step.

    ``EngineCore.__init__`` itself loads plugins, so a wrapper of ``__init__`` may come too late.
    """

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "_vmmgraph_guard"):
                self._vmmgraph_guard = install_guard(self, names)
            return original(self, *args, **kwargs)

        return step

    for name in ("step", "step_with_batch_queue"):
        setattr(kind, name, guarded(getattr(kind, name)))


def keeps_size(vllm_config: Any, groups: Any) -> str:
    """Returns why the cache keeps its size while the engine runs; empty if a guard may change
    it."""
    if getattr(vllm_config.parallel_config, "data_parallel_size", 1) > 1:
        return "idle data parallel ranks run steps over blocks of ended requests"
    for group in groups:
        spec = group.kv_cache_spec
        for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if type(one).__name__ not in WHOLE_SPECS:
                return f"kernels may read blocks that {type(one).__name__} has freed"
    return ""


def install_guard(engine: Any, names: Any) -> kv_guard.Guard | None:
    """Makes a guard of the KV cache poll before each step of an engine (`kv_guard`).

    The guard needs scheduler and worker in one process. With one rank, vLLM's ``UniProcExecutor``
    runs in the process of ``EngineCore``.
    """
    executor = getattr(engine, "model_executor", None)
    wrapper = getattr(executor, "driver_worker", None)
    kv = kv_of(getattr(wrapper, "worker", None))
    ranks = engine.vllm_config.parallel_config.world_size if executor is not None else 1
    if not kv_guard.wanted(ranks) or kv is None or kv.layout is None:
        return None
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    why = keeps_size(engine.vllm_config, groups)
    if why:
        log.info("vmmgraph: the KV cache keeps its size, since %s", why)
        return None
    manager = engine.scheduler.kv_cache_manager
    # The longest request's blocks, and the null block.
    keep = names.request_blocks(engine.vllm_config, groups) + 1 + manager.watermark_blocks
    pool = kv_guard.Pool(manager.block_pool, kv.layout.group(), keep)
    guard = kv_guard.Guard(pool, kv, kv_guard.Need(kv.eager), kv.available, kv.release)
    execute = executor.execute_model

    @functools.wraps(execute)
    def guarded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Scheduling is done: a block in the free list belongs to no request of this step.
        scheduled = scheduler_output.num_scheduled_tokens
        guard.look(scheduler_output.total_num_scheduled_tokens > len(scheduled))
        return execute(scheduler_output, *args, **kwargs)

    executor.execute_model = guarded
    return guard


def size_cache(engine: Any, vllm_config: Any, kv_cache_config: Any, names: Any) -> bool:
    """Commits the same number of blocks on all ranks: the smallest `fit` result.

    Returns whether the workers' caches are elastic.
    """
    fits = engine.collective_rpc("vmmgraph_kv_fit")
    if any(fit is None for fit in fits):
        return False
    start = time.perf_counter()
    blocks = kv_plan.agreed([int(fit["blocks"]) for fit in fits])
    while True:
        # If the driver of one rank refuses pages, all ranks shrink to the blocks of this rank.
        got = kv_plan.agreed(engine.collective_rpc("vmmgraph_kv_commit", args=(blocks,)))
        if got == blocks:
            break
        blocks = got
    seconds = time.perf_counter() - start
    for rank, fit in enumerate(fits):
        log.info("vmmgraph: rank %d: %s", rank, fit["said"])
    before = vllm_config.model_config.max_model_len
    for tensor in kv_cache_config.kv_cache_tensors:
        tensor.size = tensor.size // kv_cache_config.num_blocks * blocks
    kv_cache_config.num_blocks = vllm_config.cache_config.num_gpu_blocks = blocks
    names.resize(vllm_config, kv_cache_config)
    if vllm_config.model_config.max_model_len != before:
        engine.collective_rpc("update_max_model_len", args=(vllm_config.model_config.max_model_len,))
    log.info(
        "vmmgraph: KV cache of %d blocks, %.2f GiB a rank, committed in %.2f s after the captures",
        blocks,
        min(int(fit["block_bytes"]) for fit in fits) * blocks / (1 << 30),
        seconds,
    )
    for table in engine.collective_rpc("vmmgraph_kv_ledger"):
        log.info("vmmgraph: %s", table)
    return True


@contextlib.contextmanager
def dropped(logger: str, *beginnings: str) -> Iterator[list[logging.LogRecord]]:
    """Drops log lines with preliminary sizes, selected by their first words. Yields their list."""
    lines: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        drop = str(record.msg).startswith(beginnings)
        if drop:
            lines.append(record)
        return not drop

    of = logging.getLogger(logger)
    of.addFilter(keep)
    try:
        yield lines
    finally:
        of.removeFilter(keep)


# The workers.


class WorkerKv:
    """KV cache of one worker: memory, and measurements of the start."""

    #: Name of the address range.
    label = "vLLM's KV cache"

    def __init__(self, device: int, others: int | None, sequences: int = 1, largest_graph: int = 0) -> None:
        self.device = device
        #: Sequences of the largest step, and tokens of the largest graph.
        self.sequences, self.largest_graph = sequences, largest_graph
        #: Device bytes in use before this process created a context; ``None``: unknown.
        self.others = others
        self.phases = _ledger.Phases(device)
        #: Peaks in bytes: torch's tensors in the profile run, then torch's reserved memory in the
        #: profile run, from its end to the end of warm-up, and in the rehearsed step. 0: not run.
        self.profile_allocated = self.profile_held = self.warm_held = self.step_held = 0
        self.layout: kv_plan.Layout | None = None
        self.buffer: ElasticBuffer | None = None
        self.tensors: list[Any] = []
        self.blocks = 0
        self.weights = 0
        #: Bytes when the cache was sized: growth of torch in the largest eager step, and idle
        #: memory of torch.
        self.eager = self.unused = 0
        #: Expected bytes of graphs captured after the cache is sized (`vllm_behind`).
        self.later_graphs = 0

    def begin(self, device: int) -> None:
        """Starts the measurements, once the process has a context on its device."""
        if device != self.device:
            # With several engines, `others` was measured on a different device.
            self.device, self.phases, self.others = device, _ledger.Phases(device), None
        self.open()
        if self.others:
            self.phases.add("other processes, when this one began", self.others)
        self.phases.mark("CUDA's context")

    def warm_blocks(self, groups: int) -> int:
        """Returns the number of blocks used by warm-up and captures.

        The larger of two needs: the null block and two blocks per sequence and group (warm-up of
        the second runner), or the blocks of vLLM's graph profile (first runner).
        """
        return max(1 + 2 * groups * self.sequences, self.largest_graph)

    def open(self) -> Any:
        """Returns the library's device. The first call opens the device permanently."""
        if self.phases.library_device is None:
            session = _session.need()
            self.phases.library_device = device_of(session.library, self.device, session.sharing, session.peers)
        return self.phases.library_device

    def peaks(self) -> tuple[int, int]:
        """Returns torch's peaks of allocated and reserved bytes since the last call."""
        import torch

        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(stats.get("allocated_bytes.all.peak", 0)), int(stats.get("reserved_bytes.all.peak", 0))

    def peak(self) -> int:
        """Returns the expected peak of torch's reserved memory in an eager step.

        Compilers raise the reserved peak of the profile run. If the step was rehearsed, only the
        tensor peak of the profile run counts.
        """
        return max(self.step_held or self.profile_held, self.warm_held, self.profile_allocated)

    def make(self, block_bytes: list[int], most: int, first: int) -> list[Any]:
        """Reserves addresses for ``most`` blocks and maps the first ``first`` blocks.

        Returns one int8 tensor per entry of ``block_bytes``.
        """
        # Frees the cache of an earlier configuration.
        self.tensors, self.buffer, self.blocks = [], None, 0
        self.layout = kv_plan.Layout(tuple(block_bytes), most)
        self.buffer = ElasticBuffer(self.open(), self.layout.reserved(), self.layout.page_bytes, self.label)
        self.map(first)
        for number, size in enumerate(block_bytes):
            self.tensors.append(self.buffer.tensor(self.layout.offset(number), size * most))
        self.zero(0, first)
        self.blocks = first
        return self.tensors

    def first_tensors(self, kv_cache_config: Any, block_bytes: list[int]) -> list[Any]:
        """Makes the tensors of a runner's configuration, with addresses for all its blocks.

        ``kv_cache_config`` is the runner's own object. Until the cache is committed, its
        ``num_blocks`` is the number of mapped blocks, respected by the second runner's warm-up.
        """
        most = kv_cache_config.num_blocks
        free, _ = _ledger.driver_memory(self.device)
        wanted = self.warm_blocks(len(kv_cache_config.kv_cache_groups))
        first = kv_plan.first_blocks(wanted, most, sum(block_bytes), free)
        tensors = self.make(block_bytes, most, first)
        kv_cache_config.num_blocks = first
        return tensors

    def map(self, blocks: int) -> None:
        """Maps the blocks below ``blocks`` in every tensor.

        Raises `OutOfMemory`; some tensors may be mapped then.
        """
        assert self.layout is not None and self.buffer is not None
        for number, size in enumerate(self.layout.block_bytes):
            self.buffer.commit(self.layout.offset(number), size * blocks)

    def unmap(self, kept: int, had: int) -> None:
        """Unmaps blocks ``kept`` to ``had`` (exclusive), and returns the memory to the driver."""
        assert self.layout is not None and self.buffer is not None
        for number in range(len(self.layout.block_bytes)):
            begin, size = self.layout.tail(number, kept, had)
            if size:
                self.buffer.decommit(begin, size)
        self.buffer.reap()
        self.open().trim()

    def zero(self, first: int, end: int) -> None:
        """Zeroes new blocks, as vLLM does.

        Kernels may read a block beyond a sequence's end, and a NaN would spread.
        """
        assert self.layout is not None
        for tensor, size in zip(self.tensors, self.layout.block_bytes, strict=True):
            tensor[first * size : end * size].zero_()

    def commit(self, blocks: int) -> int:
        """Resizes the cache to ``blocks`` blocks, fewer if the driver refuses pages.

        Returns the number of mapped blocks.
        """
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
        """Unmaps the pages inside runs of blocks and returns the memory to the driver.

        No request may use the blocks. Returns the freed bytes.
        """
        import torch

        assert self.layout is not None and self.buffer is not None
        # Steps in progress may still use blocks of ended requests.
        torch.cuda.synchronize(self.device)
        gone = sum(self.buffer.decommit(*part) for run in runs for part in self.parts(run))
        self.buffer.reap()
        self.open().trim()
        return gone

    def restore(self, runs: Sequence[tuple[int, int]]) -> int:
        """Maps and zeroes runs of blocks in order, until the driver refuses pages.

        Returns the number of complete runs.
        """
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
        """Returns offset and bytes of a run's whole pages in each tensor."""
        assert self.layout is not None
        every = (self.layout.inside(number, *run) for number in range(len(self.layout.block_bytes)))
        return [part for part in every if part[1]]

    def available(self) -> tuple[int, int]:
        """Returns the driver's free bytes, and torch's idle bytes beyond the idle bytes at sizing.

        Does not wait for the device.
        """
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free), max(0, self.idle() - self.unused)

    def idle(self) -> int:
        """Returns the bytes reserved by torch and used by no tensor."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(stats["reserved_bytes"]["all"]["current"]) - int(stats["active_bytes"]["all"]["current"])

    def release(self) -> None:
        """Makes torch return idle memory to the driver."""
        import torch

        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def held(self) -> int:
        """Returns the bytes of the cache's pages."""
        return self.buffer.stats()["committed_bytes"] if self.buffer is not None else 0

    def ledger(self) -> _ledger.Ledger:
        """Returns the current memory ledger of the device."""
        import torch

        device = self.open()
        # Must be first: `driver_memory` waits for the device.
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
    """Returns the `WorkerKv` of a worker or runner; ``None`` if vLLM allocates the cache."""
    return getattr(owner, "_vmmgraph_kv", None)


def patch_worker(module: ModuleType) -> None:
    """Measures the phases of a worker's start, and adds the methods called by the engine."""
    names = release()
    if names is None:
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
        if not declined(self.vllm_config, names):
            # Must precede `init_device`, which creates a context.
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
        why = names.unsupported(self) if kv is not None else ""
        if why:
            # All ranks have the same layers and backends.
            log.info("vmmgraph: vLLM allocates the KV cache, since %s", why)
            kv = self._vmmgraph_kv = self.model_runner._vmmgraph_kv = None
        return determine(self, *args, **kwargs) if kv is None else most_bytes(self, kv, determine)

    #: The worker in `init_device`, before creation of its communicators.
    starting: list[WorkerKv] = []
    module.init_worker_distributed_environment = initialize_distributed
    worker.initialize_from_config = initialize_from_config
    worker.init_device, worker.load_model, worker.determine_available_memory = initialize_device, loaded, determined
    worker.vmmgraph_kv_fit, worker.vmmgraph_kv_commit, worker.vmmgraph_kv_ledger = fit, commit, ledger


def bytes_of_weights(runner: Any) -> int:
    """Returns the bytes of the models' weights on the device."""
    models = [runner.get_model()]
    for name in ("drafter", "speculator"):
        drafter = getattr(getattr(runner, name, None), "model", None)
        if drafter is not None:
            models.append(drafter)
    return bytes_of_models(models)


def bytes_of_models(models: Sequence[Any]) -> int:
    """Returns the bytes of parameters and buffers on the device, each storage once."""
    storages = {}
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_cuda:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def most_bytes(worker: Any, kv: WorkerKv, determine: Callable[[Any], int]) -> int:
    """Runs vLLM's profile. Returns the largest possible KV cache: free bytes before captures."""
    runner = worker.model_runner
    # vLLM captures graphs at this point to estimate graph memory. No estimate is needed: the cache
    # is sized after the captures.
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
    """Returns the blocks for which this rank has room after the captures.

    ``None``: vLLM allocated the cache. Added to vLLM's ``Worker``.
    """
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
    reserve = kv_plan.reserve_of(
        kv.peak(), held, self.vllm_config.parallel_config.world_size, kv.later_graphs, flash_attention.workspace_bytes()
    )
    kv.eager, kv.unused = reserve.eager + reserve.splits, kv.idle()
    ceiling = kv_plan.ceiling_of(total, self.cache_config.gpu_memory_utilization, utilization_default())
    own = kv_plan.own_bytes(total - free, _ledger.used_by_process(kv.device), kv.others)
    room = kv_plan.kv_bytes(free, kv.held(), reserve, ceiling, own)
    limit = (
        "the whole device" if ceiling is None else f"at most {ceiling / MIB:.0f} MiB for this process, which uses {own / MIB:.0f}"
    )
    return {
        "blocks": kv.layout.blocks_within(room),
        "block_bytes": sum(kv.layout.block_bytes),
        "said": f"{free / MIB:.0f} MiB are free after the captures, {limit}; {reserve.total() / MIB:.0f} MiB stay free: {reserve}; torch holds {held / MIB:.0f} MiB, at most {kv.step_held / MIB:.0f} in the "
        f"largest step, {kv.warm_held / MIB:.0f} in warm-up and {kv.profile_held / MIB:.0f} ({kv.profile_allocated / MIB:.0f} of tensors) in the profile run",
    }


def rehearse(runner: Any, kv: WorkerKv, second: bool) -> None:
    """Runs the largest eager step once with attention and sampling, and measures torch's peak.

    vLLM's profile run omits attention. The rehearsal loads the kernels and allocates their memory.
    The step writes no block and reads only blocks used by warm-up. ``second``: the runner is vLLM's
    second model runner.
    """
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.distributed.parallel_state import get_pp_group

    tokens = runner.max_num_tokens
    sequences = min(tokens, runner.scheduler_config.max_num_seqs)
    # The last sequence gets the remainder. No sequence may exceed its row of the block table.
    longest = tokens // sequences + tokens % sequences
    if longest > runner.max_model_len:
        log.info("vmmgraph: the largest eager step is not rehearsed, since %d tokens are longer than a sequence may be", longest)
        return
    torch.cuda.synchronize(kv.device)
    torch.cuda.empty_cache()
    kv.peaks()
    # The second runner of 0.33 counts the load of experts in dummy runs, too.
    experts = getattr(runner, "eplb", None)
    with getattr(experts, "suppress", contextlib.nullcontext)():
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
    """Commits ``blocks`` blocks. Returns the number committed. Added to vLLM's ``Worker``."""
    kv = kv_of(self)
    assert kv is not None
    got = kv.commit(blocks)
    # Every process has its own copy of both values.
    self.cache_config.num_gpu_blocks = self.model_runner.kv_cache_config.num_blocks = got
    return got


def ledger(self: Any) -> str:
    """Returns the ledger table of the worker's device. Added to vLLM's ``Worker``.

    Also adds the ledger to `vmmgraph.report`.
    """
    kv = kv_of(self)
    if kv is None:
        return ""
    _ledger.keep(kv.device, kv.ledger)
    return kv.ledger().table()


# The runners.

#: KV caches under initialization, innermost last. The second runner's allocation function has no
#: reference to the worker.
_initializing: list[WorkerKv] = []


def patch_runner(module: ModuleType) -> None:
    """Allocates the first runner's KV tensors over elastic memory."""
    names = release()
    if names is not None:
        names.patch_first_allocation(module, initializing)
        patch_captures(module)


def patch_second_allocation(module: ModuleType) -> None:
    """Allocates the second runner's KV tensors over elastic memory."""
    names = release()
    if names is not None:
        names.patch_second_allocation(module, initializing)


def initializing() -> WorkerKv | None:
    """Returns the KV cache under initialization; ``None`` if vLLM allocates the cache."""
    return _initializing[-1] if _initializing else None


def patch_captures(module: ModuleType) -> None:
    """Names the memory taken by captures outside torch and arenas."""
    names = release()
    if names is None:
        return
    runner = module.GPUModelRunner
    for name in names.SHAPE_METHODS:
        if hasattr(runner, name):
            setattr(runner, name, with_all_blocks(getattr(runner, name)))
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


def with_all_blocks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a runner's method that divides the first dimension of KV tensors by the number of
    blocks: the tensors have addresses for more blocks than the cache has."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        kv = kv_of(self)
        if kv is None or kv.layout is None:
            return method(self, *args, **kwargs)
        config = self.kv_cache_config
        blocks, config.num_blocks = config.num_blocks, kv.layout.most
        try:
            return method(self, *args, **kwargs)
        finally:
            config.num_blocks = blocks

    return wrapped
