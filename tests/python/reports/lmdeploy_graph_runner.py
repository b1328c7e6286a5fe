"""Decode graphs and prefill pieces in the shape of LMDeploy's runner (InternLM/lmdeploy 0.18,
``lmdeploy/pytorch/backends/cuda/graph_runner``).

Decode graphs of one pool are captured at the first step of a batch size, between other replays, on
the current stream. Prefills are cut at attention: each token bucket is a plan with its own pool,
and each piece is replayed right after its capture. Eager attention reads queries, keys and values
through weak views, and writes to a buffer outside the pool. Plans and decode graphs then replay in
any order. Every token must equal the token of an eager step or prefill.
"""

from __future__ import annotations

from typing import Any

import kit
import paged
import torch
from torch.nn import functional as F

BUCKETS = (512, 1024, 1536, 2048)


def decode_size(batch: int) -> int:
    return 1 << (batch - 1).bit_length()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over the rows of one prefill."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def prefill(model: paged.Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the token after each row."""
    x = model.embedding[tokens]
    for number in range(paged.LAYERS):
        x = model.after_attention(number, x, attend(*model.before_attention(number, x)))
    return model.head(x).argmax(-1)


class Plan:
    """Captured pieces of one bucket, with eager attention between the pieces."""

    def __init__(self, model: paged.Decoder, rows: int) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.tokens = torch.zeros(rows, device="cuda", dtype=torch.long)
        self.seen = torch.empty(rows, paged.HEADS, paged.DIM, device="cuda", dtype=torch.bfloat16)
        self.pieces: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = []
        handed: tuple[torch.Tensor, ...] = ()
        graph = self.begin()
        x = model.embedding[self.tokens]
        for number in range(paged.LAYERS):
            handed = model.before_attention(number, x)
            self.end(graph, handed)
            graph = self.begin()
            # Freed while the next piece is captured.
            handed = ()
            x = model.after_attention(number, x, self.seen)
        self.output = model.head(x).argmax(-1)
        self.end(graph, handed)

    def begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph, handed: tuple[torch.Tensor, ...]) -> None:
        graph.capture_end()
        self.pieces.append((graph, [paged.weak(one) for one in handed]))
        self.replay(len(self.pieces) - 1)

    def replay(self, number: int) -> None:
        graph, handed = self.pieces[number]
        graph.replay()
        if handed:
            self.seen.copy_(attend(*handed))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        for number in range(len(self.pieces)):
            self.replay(number)
        return self.output


class Runner:
    def __init__(self, model: paged.Decoder) -> None:
        self.model, self.pool = model, torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor]] = {}

    def step(self, *values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the next tokens, and the padded inputs of the step."""
        batch = len(values[0])
        size = decode_size(batch)
        if size not in self.graphs:
            inputs = [torch.zeros(size, *value.shape[1:], device="cuda", dtype=value.dtype) for value in values]
            self.model.logits(*inputs)
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                output = self.model.logits(*inputs)
            self.graphs[size] = graph, inputs, output
        graph, inputs, output = self.graphs[size]
        for to, value in zip(inputs, values, strict=True):
            to.zero_()
            to[:batch].copy_(value)
        graph.replay()
        return output.argmax(-1)[:batch], inputs


@torch.no_grad()
def body() -> dict[str, Any]:
    with torch.cuda.stream(torch.cuda.Stream()):
        model = paged.Decoder()
        runner = Runner(model)
        tokens = torch.randint(0, paged.VOCABULARY, (max(BUCKETS),), device="cuda")
        expected = [prefill(model, tokens[:rows]) for rows in BUCKETS]
        start = kit.settle()
        plans = [Plan(model, rows) for rows in BUCKETS]
        plans_mib = kit.mib(start - kit.settle())

        def between(turn: int) -> int:
            number = (turn * 7 + turn // 5) % len(BUCKETS)
            return int((plans[number](tokens[: BUCKETS[number]]) != expected[number]).sum())

        result = paged.decode(model, runner.step, between=between)
        result["detail"] |= {"graphs": len(runner.graphs), "plans_mib": plans_mib, "decode_mib": result["mib"]}
        result["mib"] = round(result["mib"] + plans_mib, 1)
        result["gpu_ms"] = kit.gpu_ms(lambda: plans[-1](tokens), times=11)
    return result


if __name__ == "__main__":
    kit.run("lmdeploy_graph_runner", body)
