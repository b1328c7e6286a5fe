"""A decoder with a paged KV cache, and a decoding loop that checks every token, for programs in the
shape of an engine's graph runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import kit
import torch
from torch.nn import functional as F

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MIDDLE, VOCABULARY = 16, 1024, 16, 8, 64, 3072, 32000
#: Sequences, tokens per sequence, and tokens per block of the cache.
MOST, LENGTH, BLOCK = 256, 128, 16

Step = Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]


class Decoder:
    """One decode step: attends over the paged cache up to `positions`. Returns the next tokens."""

    def __init__(self) -> None:
        torch.manual_seed(0)

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

    def before_attention(self, number: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns queries, keys and values of a layer."""
        x = F.rms_norm(x, (HIDDEN,)) @ self.layers[number][0].T
        return x.view(-1, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)

    def after_attention(self, number: int, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        _, out, up, down = self.layers[number]
        x = x + seen.reshape(-1, HEADS * DIM) @ out.T
        gate, wide = (F.rms_norm(x, (HIDDEN,)) @ up.T).chunk(2, -1)
        return x + (F.silu(gate) * wide) @ down.T

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        x, rows = self.embedding[tokens], torch.arange(len(tokens), device="cuda")
        mask = (torch.arange(LENGTH, device="cuda")[None] <= positions[:, None])[:, None, None]
        for number in range(LAYERS):
            q, k, v = self.before_attention(number, x)
            keys, values = self.cache[number]
            here = tables[rows, positions]
            keys[here], values[here] = k, v
            read = [part[tables].transpose(1, 2) for part in (keys, values)]
            seen = F.scaled_dot_product_attention(q[:, :, None], *read, attn_mask=mask, enable_gqa=True)
            x = self.after_attention(number, x, seen)
        return self.head(x)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,)) @ self.embedding.T

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        return self.logits(*values).argmax(-1)


def weak(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor at the same address which keeps no memory alive."""
    storage = tensor.untyped_storage()
    raw = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def decode(
    model: Decoder, step: Step, ahead: Iterable[int] = (), between: Callable[[int], int] = lambda turn: 0
) -> dict[str, Any]:
    """Decodes batches of random sizes, and compares every token with an eager step.

    ``step`` takes tokens, positions and slots of a batch. It returns the next tokens and the padded
    inputs. ``ahead``: batch sizes captured first; `mib` is the memory of these captures, or of all
    captures if none is captured ahead. ``between`` runs after every step and returns wrong results.
    """
    # Padding rows use slot 0 of the cache.
    tables = torch.arange(BLOCK, BLOCK + MOST * LENGTH, device="cuda").view(MOST, LENGTH)
    tables = tables[torch.randperm(MOST, device="cuda")]
    zeros = torch.zeros(MOST, device="cuda", dtype=torch.long)
    model(zeros, zeros, tables)
    start = kit.settle()
    for size in ahead:
        step(zeros[:size], zeros[:size], torch.zeros(size, LENGTH, device="cuda", dtype=torch.long))
    held = start - kit.settle()

    tokens, wrong, kinds = 0, 0, set()
    for seed in range(6):
        torch.manual_seed(seed)
        batch = int(torch.randint(1, MOST + 1, ()))
        now = torch.randint(0, VOCABULARY, (batch,), device="cuda")
        for position in range(24):
            values = (now, torch.full((batch,), position, device="cuda"), tables[:batch])
            now, inputs = step(*values)
            want = model(*inputs)[:batch]
            wrong += int((now != want).sum()) + between(24 * seed + position)
            tokens += batch
            kinds.update(now.tolist()[:32])
    if not ahead:
        held = start - kit.settle()
    detail = {"tokens": tokens, "wrong": wrong, "kinds": len(kinds)}
    return {"ok": wrong == 0 and len(kinds) > 100, "mib": kit.mib(held), "detail": detail}
