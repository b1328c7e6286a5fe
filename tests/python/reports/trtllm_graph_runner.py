"""Decode graphs in the shape of TensorRT-LLM's PyTorch runner (NVIDIA/TensorRT-LLM,
``tensorrt_llm/_torch/pyexecutor/cuda_graph_runner.py``).

All batch sizes are captured ahead, the largest first, each into the pool of the graph before.
Inputs are slices of tensors shared by all graphs. The runner keeps only weak references to outputs:
the logits are freed right after their capture, and read after each replay. A 16-layer decoder with
a paged KV cache then decodes batches of random sizes. Every token must equal an eager step's.
"""

from __future__ import annotations

from typing import Any

import kit
import paged
import torch

SIZES = [256, *range(248, 0, -8), 4, 2, 1]


class Runner:
    def __init__(self, model: paged.Decoder) -> None:
        self.model, self.pool = model, None
        long = {"device": "cuda", "dtype": torch.long}
        most = paged.MOST
        self.static = [torch.ones(most, **long), torch.zeros(most, **long), torch.zeros(most, paged.LENGTH, **long)]
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self, size: int) -> None:
        inputs = [one[:size] for one in self.static]
        for _ in range(2):
            self.model.logits(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = self.model.logits(*inputs)
        self.graphs[size] = graph, paged.weak(output)
        self.pool = graph.pool()

    def step(self, *values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the next tokens, and the padded inputs of the step."""
        batch = len(values[0])
        size = min(size for size in SIZES if size >= batch)
        if size not in self.graphs:
            self.capture(size)
        inputs = [one[:size] for one in self.static]
        for to, value in zip(inputs, values, strict=True):
            to.zero_()
            to[:batch].copy_(value)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits.argmax(-1)[:batch], inputs


@torch.no_grad()
def body() -> dict[str, Any]:
    model = paged.Decoder()
    runner = Runner(model)
    result = paged.decode(model, runner.step, ahead=SIZES)
    result["gpu_ms"] = kit.gpu_ms(runner.graphs[paged.MOST][0].replay)
    result["detail"]["graphs"] = len(runner.graphs)
    return result


if __name__ == "__main__":
    kit.run("trtllm_graph_runner", body)
