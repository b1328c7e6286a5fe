"""Small graphs are captured, dropped and captured again, 2,000 times (vllm-project/vllm#57899,
newton-physics/newton#2563).

First 1,000 graphs without a pool, each dropped before the next. Then 1,000 graphs in one pool, with
eight alive: a random one is dropped, and its output is sometimes held longer. Neither device nor
host memory may grow, captures may not become slower, and every tenth replay is compared with eager
work. The detail has the milliseconds of a capture.
"""

from __future__ import annotations

import random
import time
from typing import Any

import kit
import torch


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    ws = [torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) / 23 for _ in range(6)]
    lora = [torch.randn(512, 16, device="cuda", dtype=torch.bfloat16) / 23 for _ in range(4)]
    stream = torch.cuda.Stream()
    xs = {n: torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) for n in (1, 4, 16, 64, 200)}

    def model(x: torch.Tensor, adapter: int) -> torch.Tensor:
        for w in ws:
            x = torch.nn.functional.silu(x @ w) + (x @ lora[adapter]) @ lora[adapter].T
        return x.float().softmax(-1)

    with torch.no_grad():
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            wants = {(n, adapter): model(x, adapter) for n, x in xs.items() for adapter in range(4)}
        torch.cuda.synchronize()
        pick, wrong, gpu_ms = random.Random(11), 0, None
        times: dict[str, list[float]] = {"no pool": [], "one pool": []}
        marks: dict[str, list[tuple[int, float, float]]] = {"no pool": [], "one pool": []}

        def capture(pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, tuple[int, int], float]:
            n, adapter = pick.choice(list(wants))
            graph = torch.cuda.CUDAGraph()
            began = time.perf_counter()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                y = model(xs[n], adapter)
            return graph, y, (n, adapter), time.perf_counter() - began

        for kind in ("no pool", "one pool"):
            pool, began, count = torch.cuda.graph_pool_handle(), time.monotonic(), 0
            alive: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, tuple[int, int]]] = []
            held: list[torch.Tensor] = []
            while count < 1000 and time.monotonic() - began < 23:
                graph, y, key, took = capture(pool if kind == "one pool" else None)
                times[kind].append(took)
                alive.append((graph, y, key))
                if count % 10 == 0:
                    graph, y, key = pick.choice(alive)
                    graph.replay()
                    torch.cuda.synchronize()
                    wrong += not kit.rel(y, wants[key]) < 1e-2
                del graph, y
                while len(alive) > (8 if kind == "one pool" else 0):
                    graph, y, key = alive.pop(pick.randrange(len(alive)))
                    if kind == "one pool":
                        held.append(y)
                        del held[: max(0, len(held) - 5)]
                    del graph, y
                count += 1
                if count % 100 == 0:
                    used = torch.cuda.mem_get_info()[1] - kit.free()
                    marks[kind].append((count, kit.mib(used), kit.mib(kit.rss())))
            if alive:
                gpu_ms = kit.gpu_ms(alive[0][0].replay)
            alive.clear()
            held.clear()
    ok, seen = not wrong, {}
    for kind, rows in marks.items():
        part = max(1, len(times[kind]) // 5)
        early, late = sorted(times[kind][part : 2 * part])[part // 2], sorted(times[kind][-part:])[part // 2]
        grown = (rows[-1][1] - rows[1][1], rows[-1][2] - rows[1][2]) if len(rows) > 2 else (0, 0)
        seen[kind] = {
            "captures": len(times[kind]),
            "ms_early": round(1e3 * early, 2),
            "ms_late": round(1e3 * late, 2),
            "device_grew_mib": round(grown[0], 1),
            "host_grew_mib": round(grown[1], 1),
        }
        ok = ok and len(times[kind]) >= 300 and grown[0] <= 16 and grown[1] <= 48 and late <= 1.5 * early
    used = marks["one pool"][-1][1] if marks["one pool"] else None
    return {"ok": ok, "mib": used, "gpu_ms": gpu_ms, "detail": {"wrong": wrong, **seen}}


if __name__ == "__main__":
    kit.run("recapture_churn", body)
