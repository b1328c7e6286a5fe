"""A target model verifies the tokens of a draft model; both models' graphs share one pool.

Engines give the graphs of both models one pool (vllm-project/vllm#44078, SGLang), and capture the
target first. Torch then gives memory of the target's dead tensors to tensors which the draft's
graphs hand to the verification: here the probabilities of drafted tokens. The replay of the target
overwrites these probabilities before the verification reads them. Reports of the kind:
sgl-project/sglang#22930 (illegal address), NVIDIA/TensorRT-LLM#17010 (another graph on top of a
live graph's output).

Drafted tokens are accepted by rejection sampling with fixed random numbers. Each result (number of
accepted tokens, next token) is compared with the same step without graphs. VmmGraph gives tensors
alive at the end of a capture their own pages.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from three_ways import Result, main, settled
from torch.nn import functional as F

WIDTH, MIDDLE, VOCABULARY, DRAFTED = 1024, 4096, 32000, 3
#: Sequences of the captured sizes, in order of capture.
SIZES = (128, 96, 64, 48)
STEPS = 12

Tensors = tuple[torch.Tensor, ...]


class Model:
    """Next-token probabilities by a running mean of embeddings. The draft has the first layer."""

    def __init__(self) -> None:
        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * gain * rows**-0.5

        self.embedding = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.layers = [(weight(WIDTH, MIDDLE), weight(MIDDLE, WIDTH, 0.5)) for _ in range(4)]
        # Logits with a deviation of 4: some drafted tokens are accepted, some are not.
        self.head = weight(WIDTH, VOCABULARY, 4.0)

    def probabilities(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for up, down in self.layers[:layers]:
            x = x + F.silu(F.rms_norm(x, (WIDTH,)) @ up) @ down
        return (F.rms_norm(x, (WIDTH,)) @ self.head).float().softmax(-1)

    def read(self, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return context * 0.7 + self.embedding[token] * 0.7

    def draft(self, token: torch.Tensor, context: torch.Tensor) -> list[Tensors]:
        """Returns drafted tokens with their probabilities, one pair a step."""
        steps = []
        for _ in range(DRAFTED):
            context = self.read(context, token)
            chances = self.probabilities(context, 1)
            token = chances.argmax(-1)
            steps.append((token, chances))
        return steps

    def verify(self, tokens: torch.Tensor, context: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
        """Writes the target's probabilities after each token to ``chances``.

        Returns the contexts.
        """
        contexts = []
        for token in tokens.unbind(1):
            context = self.read(context, token)
            contexts.append(context)
        hidden = torch.stack(contexts, 1)
        chances.copy_(self.probabilities(hidden, 4))
        return hidden


def accept(drafted: list[Tensors], chances: torch.Tensor, random: torch.Tensor) -> Tensors:
    """Returns the number of accepted tokens and the next token of each sequence."""
    asked = torch.stack([one.gather(1, token[:, None])[:, 0] for token, one in drafted], 1)
    tokens = torch.stack([token for token, _ in drafted], 1)
    given = chances[:, :-1].gather(2, tokens[..., None])[..., 0]
    accepted = (random * asked <= given).long().cumprod(1).sum(1)
    rows = torch.arange(len(accepted), device="cuda")
    none = torch.zeros_like(chances[:, 0])
    asked_all = torch.stack([*(one for _, one in drafted), none], 1)
    return accepted, (chances[rows, accepted] - asked_all[rows, accepted]).argmax(-1)


class Graphs:
    """Draft and target graphs of one size. The target's probabilities are in a static buffer."""

    def __init__(self, size: int, chances: torch.Tensor) -> None:
        self.token = torch.zeros(size, device="cuda", dtype=torch.long)
        self.context = torch.zeros(size, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.tokens = torch.zeros(size, DRAFTED + 1, device="cuda", dtype=torch.long)
        self.chances = chances[:size]

    def capture_target(self, model: Model, stream: torch.cuda.Stream, pool: Any) -> None:
        self.target = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.target, pool=pool, stream=stream):
            self.hidden = model.verify(self.tokens, self.context, self.chances)

    def capture_draft(self, model: Model, stream: torch.cuda.Stream, pool: Any) -> None:
        self.draft = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.draft, pool=pool, stream=stream):
            self.drafted = model.draft(self.token, self.context)

    def step(self, token: torch.Tensor, context: torch.Tensor, random: torch.Tensor) -> Tensors:
        self.token.copy_(token)
        self.context.copy_(context)
        self.draft.replay()
        # An overwritten token may be any number: it must be wrong, not an index outside a tensor.
        drafted = [(one.clamp(0, VOCABULARY - 1), chances) for one, chances in self.drafted]
        self.tokens.copy_(torch.stack([token, *(one for one, _ in drafted)], 1))
        self.target.replay()
        return accept([(one.clamp(0, VOCABULARY - 1), chances) for one, chances in self.drafted], self.chances, random)


def eager(model: Model, token: torch.Tensor, context: torch.Tensor, random: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The step without graphs. Also returns the contexts of the accepted tokens."""
    drafted = model.draft(token, context)
    tokens = torch.stack([token, *(one for one, _ in drafted)], 1)
    chances = torch.empty(len(token), DRAFTED + 1, VOCABULARY, device="cuda")
    hidden = model.verify(tokens, context, chances)
    result = accept(drafted, chances, random)
    return result, hidden[torch.arange(len(token), device="cuda"), result[0]]


@torch.no_grad()
def measure(private: bool) -> Result:
    torch.manual_seed(0)
    model, stream = Model(), torch.cuda.Stream()
    chances = torch.empty(max(SIZES), DRAFTED + 1, VOCABULARY, device="cuda")
    made = [Graphs(size, chances) for size in SIZES]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for one in made:
            eager(model, one.token, one.context, torch.rand(len(one.token), DRAFTED, device="cuda"))
    free, shared = settled(), torch.cuda.graph_pool_handle()
    for capture in (Graphs.capture_target, Graphs.capture_draft):
        for one in made:
            capture(one, model, stream, torch.cuda.graph_pool_handle() if private else shared)
    mib = (free - settled()) / (1 << 20)

    results = wrong = accepted = 0
    with torch.cuda.stream(stream):
        for one, size in zip(made, SIZES, strict=True):
            token = torch.randint(0, VOCABULARY, (size,), device="cuda")
            context = torch.zeros(size, WIDTH, device="cuda", dtype=torch.bfloat16)
            for _ in range(STEPS):
                random = torch.rand(size, DRAFTED, device="cuda")
                found = one.step(token, context, random)
                expected, context = eager(model, token, context, random)
                wrong += int(((found[0] != expected[0]) | (found[1] != expected[1])).sum())
                results, accepted = results + size, accepted + int(expected[0].sum())
                # A wrong step does not make later steps wrong.
                token = expected[1]
    if not 0 < accepted < results * DRAFTED:
        raise AssertionError(f"{accepted} of {results * DRAFTED} drafted tokens are accepted: the results say little")
    return Result(results, wrong, mib)


if __name__ == "__main__":
    sys.exit(main(measure))
