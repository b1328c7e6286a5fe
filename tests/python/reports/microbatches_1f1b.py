"""Micro-batches of a pipeline stage run forward and backward graphs in the 1F1B order, over one
pool.

Each of eight micro-batches has a forward and a backward graph, captured in the order of a
four-stage pipeline, so at most four micro-batches keep activations. The backward graphs accumulate
gradients, which must equal eager work. `mib` is the memory of all graphs, and `gpu_ms` one step of
all micro-batches.
"""

from __future__ import annotations

from typing import Any

import kit
import torch
from torch import nn

COUNT, STAGES, ROWS, WIDTH = 8, 4, 4096, 1024


def order() -> list[tuple[str, int]]:
    steps = [("forward", number) for number in range(STAGES - 1)]
    for number in range(STAGES - 1, COUNT):
        steps += [("forward", number), ("backward", number - STAGES + 1)]
    return steps + [("backward", number) for number in range(COUNT - STAGES + 1, COUNT)]


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*layers).cuda()
    parameters = list(model.parameters())
    inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(COUNT)]
    given = [torch.randn(ROWS, WIDTH, device="cuda") / ROWS for _ in range(COUNT)]
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def backward(number: int, out: torch.Tensor) -> None:
        for total, gradient in zip(sums, torch.autograd.grad(out, parameters, given[number]), strict=True):
            total.add_(gradient)

    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        for number in range(COUNT):
            backward(number, model(inputs[number]))
    torch.cuda.synchronize()
    wants = [total.clone() for total in sums]
    start = kit.settle()
    outs: dict[int, torch.Tensor] = {}
    graphs = []
    for kind, number in order():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            if kind == "forward":
                outs[number] = model(inputs[number])
            else:
                backward(number, outs[number])
        if kind == "backward":
            # The next stage has read the output by address.
            del outs[number]
        graphs.append(graph)
    held = start - kit.settle()

    def step() -> None:
        for graph in graphs:
            graph.replay()

    worst = 0.0
    for _ in range(5):
        for total in sums:
            total.zero_()
        step()
        torch.cuda.synchronize()
        worst = max(worst, max(kit.rel(total, want) for total, want in zip(sums, wants, strict=True)))
    after = start - kit.settle()
    detail = {"worst": worst, "graphs": len(graphs), "after_replays_mib": kit.mib(after)}
    return {"ok": worst < 1e-4, "mib": kit.mib(held), "gpu_ms": kit.gpu_ms(step), "detail": detail}


if __name__ == "__main__":
    kit.run("microbatches_1f1b", body)
