"""Weights are quantized while loading, in a pausable pool, as in vLLM's online quantization.

Each original of 128 MiB becomes a weight of 64 MiB and is freed. Finally 32 weights are alive,
2,048 MiB. The pool must then hold at most 2,304 MiB (`mib`), a pause must free all of it, and the
host must hold no more than the weights. In the stock way nothing is paused.
"""

from __future__ import annotations

from typing import Any

import kit
import torch

COUNT, BYTES = 32, 64 << 20


def body() -> dict[str, Any]:
    allocator = kit.sleeper()
    torch.zeros(1, device="cuda")
    start, host = kit.settle(), kit.rss()
    weights = []
    with allocator.use_memory_pool(tag="weights"):
        for number in range(COUNT):
            original = torch.full((BYTES,), float(number), device="cuda", dtype=torch.bfloat16)
            weights.append((original * 2 / 2).to(torch.int8))
            del original
    held = start - kit.settle()
    before = kit.free()
    allocator.sleep("weights")
    given, on_host = kit.free() - before, kit.rss() - host
    allocator.wake_up()
    right = all(bool((weight == number).all()) for number, weight in enumerate(weights))
    ok = right and held <= 1.125 * COUNT * BYTES
    if kit.OURS:
        ok = ok and given >= 0.95 * held and on_host <= 1.25 * COUNT * BYTES
    detail = {"right": right, "given_mib": kit.mib(given), "host_mib": kit.mib(on_host), "alive_mib": kit.mib(COUNT * BYTES)}
    return {"ok": ok, "mib": kit.mib(held), "detail": detail}


if __name__ == "__main__":
    kit.run("sleep_quantized_weights", body)
