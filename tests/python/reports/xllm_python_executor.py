"""Decode graphs in the shape of xLLM's Python executor (xLLM-AI/xllm, ``decode_cuda_graph.py``).

Each batch bucket (1, 2, 4, 8, then every multiple of 16 up to 256) is captured without ``pool=``,
so stock torch gives each graph a private pool. Ours calls ``vmmgraph.enable(share=True)`` first. A
16-layer decoder with a paged KV cache then decodes batches of random sizes. Every token must equal
the token of an eager step of the same padded batch. `mib` is the memory of all captures, `gpu_ms`
the time of a replay of the largest bucket, and the detail has the number of tokens.
"""

from __future__ import annotations

import os
from typing import Any

OURS = os.environ.get("WAY") == "ours"
if OURS:
    import vmmgraph

    vmmgraph.enable(share=True)

import kit
import paged
import torch


def bucket(batch: int) -> int:
    return next((size for size in (1, 2, 4, 8) if batch <= size), (batch + 15) // 16 * 16)


class Runner:
    """Captures a bucket at its first step and replays the graph at later steps."""

    def __init__(self, model: paged.Decoder) -> None:
        self.model, self.stream = model, torch.cuda.Stream()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor]] = {}

    def step(self, *values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the next tokens, and the padded inputs of the step."""
        batch, size = len(values[0]), bucket(len(values[0]))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if size not in self.graphs:
                inputs = [torch.zeros(size, *value.shape[1:], device="cuda", dtype=value.dtype) for value in values]
                for _ in range(2):
                    self.model(*inputs)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream):
                    output = self.model(*inputs)
                self.graphs[size] = graph, inputs, output
            graph, inputs, output = self.graphs[size]
            for to, value in zip(inputs, values, strict=True):
                to.zero_()
                to[:batch].copy_(value)
            graph.replay()
            result = output[:batch].clone()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result, inputs


@torch.no_grad()
def body() -> dict[str, Any]:
    model = paged.Decoder()
    runner = Runner(model)
    result = paged.decode(model, runner.step, ahead=[1, 2, 4, 8, *range(16, paged.MOST + 1, 16)])
    result["gpu_ms"] = kit.gpu_ms(runner.graphs[paged.MOST][0].replay)
    result["detail"]["graphs"] = len(runner.graphs)
    return result


if __name__ == "__main__":
    kit.run("xllm_python_executor", body)
