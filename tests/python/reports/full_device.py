"""Decode graphs are captured and replayed on a nearly full device.

Thirteen graphs share one pool and four have none. Before the captures, other memory fills the
device except for 256 MiB. Captures and replays must work, and results must equal eager work. `mib`
is the memory taken by captures and replays, and `gpu_ms` a replay of the largest batch.
"""

from __future__ import annotations

import random
from typing import Any

import kit
import torch

SIZES = [128, 112, 96, 80, 64, 48, 40, 32, 24, 16, 8, 4, 1]
WIDTH, REST = 1024, 256 << 20


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(12)]
    xs = {n: torch.randn(n, WIDTH, device="cuda", dtype=torch.bfloat16) for n in SIZES}
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def model(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.nn.functional.silu(x @ weight) + x
        return x.float().softmax(-1)

    with torch.no_grad():
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            wants = {n: model(x) for n, x in xs.items()}
        kit.settle()
        hog = kit.Hog()
        start = hog.leave(REST)
        made = []
        for number, n in enumerate(SIZES + [SIZES[at] for at in (0, 4, 8, 12)]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool if number < len(SIZES) else None, stream=stream):
                y = model(xs[n])
            made.append((graph, y, n))
        captured = start - kit.free()
        wrong, pick = 0, random.Random(5)
        for _ in range(4):
            for graph, y, n in pick.sample(made, len(made)):
                graph.replay()
                torch.cuda.synchronize()
                wrong += not kit.rel(y, wants[n]) < 1e-2
        held = start - kit.free()
    gpu_ms = kit.gpu_ms(made[0][0].replay)
    hog.give_back()
    detail = {"wrong": wrong, "graphs": len(made), "captured_mib": kit.mib(captured), "rest_mib": kit.mib(start)}
    return {"ok": not wrong, "mib": kit.mib(held), "gpu_ms": gpu_ms, "detail": detail}


if __name__ == "__main__":
    kit.run("full_device", body)
