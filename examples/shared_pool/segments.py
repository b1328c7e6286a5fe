"""Two batches replay in turns, segment by segment, with eager work between the segments.

Engines cut a prefill graph at attention: each segment is a graph, and hands a tensor to eager
attention and to the next segment (SGLang's breakable graphs, vLLM's and SGLang's piecewise graphs).
This program holds every handed tensor, as sgl-project/sglang#37448 does after wrong greedy output
in sgl-project/sglang#37606. The scratch tensors of a segment die in Python during its capture.

Torch then gives memory of dead scratch tensors to the handed tensors of later captures. Replayed
alone, each size is right. If the segments of two sizes alternate (two batches overlap), the larger
size writes its scratch tensors over a tensor that the smaller size has handed to its next segment.
VmmGraph gives tensors alive at the end of a capture their own pages.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from three_ways import Result, main, settled
from torch.nn import functional as F

WIDTH, MIDDLE, VOCABULARY, LAYERS = 1024, 8192, 8192, 3
#: Rows of the captured sizes, in order of capture. All tensors but tokens are above 10 MiB, where
#: torch's segments have no unused ends, or fit into a larger dead tensor.
SIZES = (8192, 6144, 4096, 2048)
ROUNDS = 3


class Model:
    """Layers with attention between, then a head with greedy sampling."""

    def __init__(self) -> None:
        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * gain * rows**-0.5

        # The gain restores the variance after SiLU.
        self.layers = [(weight(WIDTH, MIDDLE), weight(MIDDLE, WIDTH, 1.7)) for _ in range(LAYERS)]
        self.head = weight(WIDTH, VOCABULARY)

    def segment(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if number == LAYERS:
            return (x @ self.head).argmax(-1)
        up, down = self.layers[number]
        return F.silu(x @ up, inplace=True) @ down

    def attend(self, x: torch.Tensor) -> None:
        """Stands for attention: mixes the rows in place."""
        x.add_(x.roll(1, 0)).mul_(0.7)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(LAYERS):
            x = self.segment(number, x)
            self.attend(x)
        return self.segment(LAYERS, x)


class Prefill:
    """Captured segments of one size."""

    def __init__(self, model: Model, x: torch.Tensor, stream: torch.cuda.Stream, pool: Any) -> None:
        self.model, self.x, self.graphs = model, x, []
        #: Holds what each segment hands to attention and to the next segment; last the tokens.
        self.handed = [x]
        for number in range(LAYERS + 1):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.handed.append(model.segment(number, self.handed[-1]))
            self.graphs.append(graph)

    def steps(self) -> Iterator[None]:
        for number, graph in enumerate(self.graphs):
            graph.replay()
            if number < LAYERS:
                self.model.attend(self.handed[number + 1])
            yield

    def wrong(self, expected: torch.Tensor) -> int:
        return int((self.handed[-1] != expected).sum())


@torch.no_grad()
def measure(private: bool) -> Result:
    torch.manual_seed(0)
    model, stream = Model(), torch.cuda.Stream()
    inputs = [torch.randn(size, WIDTH, device="cuda", dtype=torch.bfloat16) for size in SIZES]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [model(x) for x in inputs]
    free = settled()
    pools = [torch.cuda.graph_pool_handle() for _ in SIZES] if private else [torch.cuda.graph_pool_handle()] * len(SIZES)
    made = [Prefill(model, x, stream, pool) for x, pool in zip(inputs, pools, strict=True)]
    mib = (free - settled()) / (1 << 20)

    results = wrong = alone = 0
    with torch.cuda.stream(stream):
        for one, tokens in zip(made, expected, strict=True):
            for _ in one.steps():
                pass
            alone += one.wrong(tokens)
        for first, second in list(itertools.permutations(range(len(SIZES)), 2)) * ROUNDS:
            for _ in zip(made[first].steps(), made[second].steps(), strict=True):
                pass
            for number in (first, second):
                results += SIZES[number]
                wrong += made[number].wrong(expected[number])
    if alone:
        raise AssertionError(f"{alone} tokens are wrong if each size replays alone")
    return Result(results, wrong, mib)


if __name__ == "__main__":
    sys.exit(main(measure))
