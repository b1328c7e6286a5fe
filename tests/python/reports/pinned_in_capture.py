"""Captured copies read pinned host memory allocated and freed within the capture
(pytorch/pytorch#161583 and #166765, microsoft/onnxruntime#32121).

Afterwards much pinned memory is allocated and freed, caches are emptied, and half of the graphs are
dropped. Each replay must copy the values of its capture, and pinned memory must be released with
the graphs.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import kit
import torch

COUNT = 1 << 18


def pinned_bytes() -> int:
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def body() -> dict[str, Any]:
    x, stream = torch.ones(COUNT, device="cuda"), torch.cuda.Stream()
    host_before = pinned_bytes()

    def work(k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = torch.empty(COUNT, pin_memory=True)
        h.fill_(k)
        d = h.to("cuda", non_blocking=True)
        del h
        table = torch.arange(64, dtype=torch.int64).mul_(k + 1).pin_memory()
        picked = table.to("cuda", non_blocking=True)
        del table
        back = torch.empty(64, dtype=torch.int64, pin_memory=True)
        back.copy_(picked * 2, non_blocking=True)
        return torch.cat([part + 0 for part in d.chunk(4)]) * 2 + x, picked, back

    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        work(0)
    torch.cuda.synchronize()
    pool, made = torch.cuda.graph_pool_handle(), []
    for k in range(10):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool if k % 2 else None, stream=stream, capture_error_mode="relaxed"):
            y, picked, back = work(k)
        made.append((k, graph, y, picked, back))
    bad: dict[str, int] = {}

    def sweep(when: str) -> None:
        for k, graph, y, picked, back in random.Random(len(when)).sample(made, len(made)):
            y.zero_()
            picked.zero_()
            torch.cuda.synchronize()
            back.zero_()
            graph.replay()
            torch.cuda.synchronize()
            numbers = torch.arange(64) * (k + 1)
            right = bool((y == 2 * k + 1).all()) and torch.equal(picked.cpu(), numbers)
            if not (right and torch.equal(back, numbers * 2)):
                bad[when] = bad.get(when, 0) + 1

    def churn() -> list[torch.Tensor]:
        for size in (COUNT, 64 * 2, COUNT, COUNT // 2):
            held = [torch.full((size,), -5.0, pin_memory=True) for _ in range(12)]
            for h in held:
                h.to("cuda", non_blocking=True)
            del held
        torch.cuda.synchronize()
        torch._C._host_emptyCache()
        torch.cuda.empty_cache()
        return [torch.full((COUNT,), -9.0, pin_memory=True) for _ in range(24)]

    sweep("at once")
    held = churn()
    sweep("others took pinned memory")
    for at in (8, 6, 3, 1, 0):
        made[at][1].reset()
        made.pop(at)
    gc.collect()
    held += churn()
    sweep("half of the graphs are gone")
    made.clear()
    held.clear()
    kit.settle()
    torch._C._host_emptyCache()
    left_over = pinned_bytes() - host_before
    detail = {"wrong": bad, "pinned_left_mib": kit.mib(left_over)}
    return {"ok": not bad and left_over <= 8 * kit.MIB, "detail": detail}


if __name__ == "__main__":
    kit.run("pinned_in_capture", body)
