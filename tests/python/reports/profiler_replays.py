"""A profiler observes replays, and a dispatch mode observes captures (pytorch/kineto#1165,
pytorch/pytorch#143577, sgl-project/sglang#38439).

For replays of 24 graphs the profiler must show as many kernels, copies and fills as for the same
eager work, whichever graph had the executable before. A dispatch mode active during a capture must
see the operators of the program and no others.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import kit
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def kind(name: str) -> str:
    return "memcpy" if name.startswith("Memcpy") else "memset" if name.startswith("Memset") else "kernel"


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    narrow = torch.randn(16384, 64, device="cuda", dtype=torch.bfloat16) / 128
    stream = torch.cuda.Stream()

    def work(x: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
        # A fill; then a split-K product, which needs a fill or a second kernel.
        acc.zero_()
        y = (x @ narrow).float()
        acc.add_(y)
        z = torch.zeros(len(x), 64, device="cuda")
        return torch.cat([acc.softmax(-1), z + y.relu()], 1)

    def given(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 16384, device="cuda", dtype=torch.bfloat16), torch.empty(n, 64, device="cuda")

    inputs = [given(8 + 8 * n) for n in range(24)]
    with torch.no_grad():
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            wants = [work(*one) for one in inputs]
        torch.cuda.synchronize()
        pool, made, ops = torch.cuda.graph_pool_handle(), [], []
        for one in inputs:
            graph = torch.cuda.CUDAGraph()
            with Seen() as seen, torch.cuda.graph(graph, pool=pool, stream=stream):
                y = work(*one)
            made.append((graph, y))
            ops.append(tuple(seen.names))
        with Seen() as seen:
            work(*inputs[0])
        eager_ops = tuple(seen.names)
    torch.cuda.synchronize()

    def shown(do: Callable[[], None]) -> dict[str, int]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            do()
            torch.cuda.synchronize()
        events = (event for event in found.events() if "CUDA" in str(event.device_type))
        return dict(collections.Counter(kind(event.name) for event in events))

    def eagerly() -> None:
        for one in inputs:
            work(*one)

    def replays() -> None:
        for graph, _ in made:
            graph.replay()

    with torch.no_grad():
        shown(eagerly)
        eager = shown(eagerly)
        first = shown(replays)
        later = shown(replays)
    wrong = sum(not kit.rel(y, want) < 1e-2 for (_, y), want in zip(made, wants, strict=True))
    extra = []
    if ops[0] != eager_ops:
        extra = [name for name in ops[0] if name not in eager_ops] + [f"{len(ops[0])} instead of {len(eager_ops)}"]
    total = [sum(one.values()) for one in (eager, first, later)]
    counts = total[0] > 0 and abs(total[1] - total[0]) <= 4 and abs(total[2] - total[0]) <= 4
    detail = {
        "wrong": wrong,
        "eager": eager,
        "first_replays": first,
        "later_replays": later,
        "operators_nobody_called": extra,
        "note": "" if total[0] else "the profiler shows nothing of the device here",
    }
    return {"ok": not wrong and counts and not extra, "gpu_ms": kit.gpu_ms(replays), "detail": detail}


if __name__ == "__main__":
    kit.run("profiler_replays", body)
