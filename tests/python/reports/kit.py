"""Common parts of the report programs: the result line, memory readings, GPU times and a watchdog.

Importing this module enables vmmgraph if the environment has ``WAY=ours``; else torch stays stock.
With ``WAY=tms`` the programs that pause use the installed torch_memory_saver. A program that sets
``PYTORCH_CUDA_ALLOC_CONF`` or another variable of torch does so before importing this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import math
import os
import pathlib
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

WAY = os.environ.get("WAY", "stock")
OURS = WAY == "ours"
MIB, GIB = 1 << 20, 1 << 30
#: Seconds until the watchdog ends the process with a traceback.
LIMIT = 80
START = time.monotonic()

if OURS:
    import vmmgraph

    vmmgraph.enable(strict=True)


def left(limit: float = 45.0) -> float:
    return limit - (time.monotonic() - START)


def free() -> int:
    """Waits for the device and returns its free bytes."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def settle() -> int:
    """Frees unused memory first, as engines do."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return free()


def rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mib(n: float) -> float:
    return round(n / MIB, 1)


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative difference of norms."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def gpu_ms(work: Callable[[], object], times: int = 21) -> float:
    spans = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return round(statistics.median(spans), 4)


def back_to_default() -> None:
    """torch.cuda.graph leaves its own stream current if its end raises."""
    torch.cuda.set_stream(torch.cuda.default_stream())


def driver() -> Any:
    torch.cuda.init()
    return ctypes.CDLL("libcuda.so.1")


class Awake:
    """Pauses nothing: the memory savers' interface in the stock way."""

    @contextlib.contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        yield

    def disable(self) -> Any:
        return contextlib.nullcontext()

    configure_subprocess = disable

    def cuda_graph(self, graph: torch.cuda.CUDAGraph, pool: Any = None, stream: Any = None, tag: str = "default") -> Any:
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        return x.cpu()

    def pause(self, tag: str | None = None) -> None:
        pass

    resume = pause

    def use_memory_pool(self, tag: str | None = None) -> Any:
        return contextlib.nullcontext()

    def sleep(self, offload_tags: Any = None) -> None:
        pass

    wake_up = sleep


def saver() -> Any:
    """Over a pluggable allocator."""
    found = drop_in().torch_memory_saver
    found.hook_mode = "torch"
    return found


def drop_in() -> Any:
    """The package ``torch_memory_saver``: vmmgraph's or the installed one. Nothing is paused in the
    stock way."""
    if WAY == "stock":
        one = Awake()
        return types.SimpleNamespace(torch_memory_saver=one, configure_subprocess=one.configure_subprocess)
    if OURS:
        from vmmgraph import memory_saver

        memory_saver.take_over()
    import torch_memory_saver

    return torch_memory_saver


def sleeper() -> Any:
    """vLLM's CuMemAllocator."""
    if not OURS:
        return Awake()
    from vmmgraph import memory_saver

    saver()
    return memory_saver.CuMemAllocator.get_instance()


class Hog:
    """Fills the device outside torch and vmmgraph."""

    def __init__(self) -> None:
        self.cu = driver()
        self.held: list[int] = []
        self.cu.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        self.cu.cuMemFree_v2.argtypes = [ctypes.c_uint64]

    def take(self, size: int) -> bool:
        at = ctypes.c_uint64()
        if size <= 0 or self.cu.cuMemAlloc_v2(ctypes.byref(at), size) != 0:
            return False
        self.held.append(at.value)
        return True

    def leave(self, rest: int) -> int:
        """Returns the bytes left free."""
        for step in (8 * GIB, GIB, 128 * MIB, 16 * MIB, 2 * MIB):
            while torch.cuda.mem_get_info()[0] - step >= rest and self.take(step):
                pass
        return torch.cuda.mem_get_info()[0]

    def give_back(self) -> None:
        while self.held:
            self.cu.cuMemFree_v2(self.held.pop())


class Decoder:
    """A decoder on integers, exact in float32: its tokens depend on weights and cache only."""

    VOCABULARY, HIDDEN, LAYERS, BATCH, STEPS = 512, 1024, 8, 4, 12

    def __init__(self) -> None:
        self.weights = [torch.zeros(self.HIDDEN, self.HIDDEN, device="cuda") for _ in range(self.LAYERS)]
        self.embedding = torch.zeros(self.VOCABULARY, self.HIDDEN, device="cuda")

    def parameters(self) -> list[torch.Tensor]:
        return [*self.weights, self.embedding]

    @torch.no_grad()
    def learn(self, seed: int) -> None:
        """A training step: the new weights depend on all steps so far."""
        for number, weight in enumerate(self.parameters()):
            generator = torch.Generator("cuda").manual_seed(1000 * seed + number)
            weight += torch.randint(-1, 2, weight.shape, device="cuda", generator=generator)
            weight.clamp_(-1, 1)

    def cache(self, size: int = 0) -> torch.Tensor:
        shape = (self.BATCH, self.STEPS, self.HIDDEN)
        return torch.zeros(max(size // 4, math.prod(shape)), device="cuda")[: math.prod(shape)].view(shape)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(self.BATCH, device="cuda", dtype=torch.long), torch.zeros(1, device="cuda", dtype=torch.long)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> None:
        """Replaces the tokens by the next ones, and increments the position."""
        cache.index_copy_(1, position, self.embedding[tokens].unsqueeze(1))
        h = cache.sum(1).clamp(-8, 8)
        for weight in self.weights:
            h = (h @ weight).clamp(-8, 8)
        logits = (h @ self.embedding.T).long() * self.VOCABULARY
        tokens.copy_((logits - torch.arange(self.VOCABULARY, device="cuda")).argmax(-1))
        position += 1

    def generate(
        self, inputs: tuple[torch.Tensor, torch.Tensor], cache: torch.Tensor, step: Callable[[], object]
    ) -> list[list[int]]:
        """Greedy tokens of each sequence, by calls of `step` on the inputs and the cache."""
        tokens, position = inputs
        cache.zero_()
        tokens.copy_(torch.arange(self.BATCH, device="cuda"))
        position.zero_()
        found = []
        for _ in range(self.STEPS):
            step()
            found.append(tokens.tolist())
        return found


def flat(sizes: list[int], most: int) -> bool:
    """Returns whether the later half of a series stays within `most` of its first value."""
    later = sizes[len(sizes) // 2 :]
    return max(later) - min(later) <= most


def graph_pages() -> int:
    import vmmgraph

    return sum(arena.stats()["physical_bytes"] for arena in vmmgraph.arenas())


def use_examples(folder: str) -> None:
    """Makes the modules of an example importable, from the repository or from ``gpu.sh build``."""
    here = pathlib.Path(__file__).resolve()
    sys.path[:0] = [str(here.parents[3] / "examples" / folder), str(here.parents[1] / folder)]


def one_pool_and_private(measure: Callable[[bool], Any]) -> dict[str, Any]:
    """Measures one pool for all graphs, and private pools too under stock torch.

    ``measure`` is a function of `examples/shared_pool`.
    """
    one = measure(False)
    if OURS:
        return {"ok": one.wrong == 0, "mib": round(one.mib, 1), "detail": one.as_dict()}
    private = measure(True)
    detail = {"one pool": one.as_dict(), "private pools": private.as_dict()}
    return {"ok": one.wrong == private.wrong == 0, "mib": round(private.mib, 1), "detail": detail}


def run(name: str, body: Callable[[], dict[str, Any]]) -> None:
    """Runs a program and prints its line of JSON.

    `body` returns `ok` and `detail`, and, if measured, `mib` (device memory) and `gpu_ms` (GPU time
    of its replay).
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        out = dict(body())
    except BaseException as error:  # noqa: BLE001  # Any end of the program is a result.
        traceback.print_exc()
        out = {"ok": False, "detail": f"{type(error).__name__}: {str(error)[:700]}"}
    out["ok"] = bool(out["ok"])
    line = {"case": name, "way": WAY, **out, "seconds": round(time.monotonic() - START, 1)}
    print(json.dumps(line, default=str), flush=True)
