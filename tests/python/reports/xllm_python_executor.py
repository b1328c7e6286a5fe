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
import torch
from torch.nn import functional as F

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, VOCABULARY = 16, 1024, 16, 8, 64, 3072, 32000
MOST, LENGTH, BLOCK = 256, 128, 16


def bucket(batch: int) -> int:
    return next((size for size in (1, 2, 4, 8) if batch <= size), (batch + 15) // 16 * 16)


class Decoder:
    """One decode step: attends over the paged cache up to `positions`. Returns the next tokens."""

    def __init__(self) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

        self.embedding = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.layers = [
            (
                weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                weight(HIDDEN, HEADS * DIM),
                weight(2 * MIDDLE, HIDDEN),
                weight(HIDDEN, MIDDLE),
            )
            for _ in range(LAYERS)
        ]
        slots = (MOST * LENGTH // BLOCK + 1) * BLOCK
        self.cache = torch.zeros(LAYERS, 2, slots, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        x, rows = self.embedding[tokens], torch.arange(len(tokens), device="cuda")
        mask = (torch.arange(LENGTH, device="cuda")[None] <= positions[:, None])[:, None, None]
        for number, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = (F.rms_norm(x, (HIDDEN,)) @ qkv.T).view(-1, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
            keys, values = self.cache[number]
            here = tables[rows, positions]
            keys[here], values[here] = k, v
            read = [part[tables].transpose(1, 2) for part in (keys, values)]
            seen = F.scaled_dot_product_attention(q[:, :, None], *read, attn_mask=mask, enable_gqa=True)
            x = x + seen.reshape(-1, HEADS * DIM) @ out.T
            gate, wide = (F.rms_norm(x, (HIDDEN,)) @ up.T).chunk(2, -1)
            x = x + (F.silu(gate) * wide) @ down.T
        return (F.rms_norm(x, (HIDDEN,)) @ self.embedding.T).argmax(-1)


class Runner:
    """Captures a bucket at its first step and replays the graph at later steps."""

    def __init__(self, model: Decoder) -> None:
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
    torch.manual_seed(0)
    model = Decoder()
    runner = Runner(model)
    # Padding rows use slot 0 of the cache.
    tables = torch.arange(BLOCK, BLOCK + MOST * LENGTH, device="cuda").view(MOST, LENGTH)
    tables = tables[torch.randperm(MOST, device="cuda")]
    model(torch.zeros(MOST, device="cuda", dtype=torch.long), torch.zeros(MOST, device="cuda", dtype=torch.long), tables)
    start = kit.settle()
    for size in [1, 2, 4, 8, *range(16, MOST + 1, 16)]:
        none = torch.zeros(size, device="cuda", dtype=torch.long)
        runner.step(none, none, torch.zeros(size, LENGTH, device="cuda", dtype=torch.long))
    held = start - kit.settle()

    tokens, wrong, kinds = 0, 0, set()
    for seed in range(6):
        torch.manual_seed(seed)
        batch = int(torch.randint(1, MOST + 1, ()))
        now = torch.randint(0, VOCABULARY, (batch,), device="cuda")
        for position in range(24):
            values = (now, torch.full((batch,), position, device="cuda"), tables[:batch])
            now, inputs = runner.step(*values)
            want = model(*inputs)[:batch]
            wrong += int((now != want).sum())
            tokens += batch
            kinds.update(now.tolist()[:32])
    return {
        "ok": wrong == 0 and len(kinds) > 100,
        "mib": kit.mib(held),
        "gpu_ms": kit.gpu_ms(runner.graphs[MOST][0].replay),
        "detail": {"graphs": len(runner.graphs), "tokens": tokens, "wrong": wrong, "kinds": len(kinds)},
    }


if __name__ == "__main__":
    kit.run("xllm_python_executor", body)
