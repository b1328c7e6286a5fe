"""The memory of all graphs is estimated from a trial of the two largest, as in vLLM
(vllm-project/vllm#45178, #53013, #57475).

The trial's graphs are dropped, all graphs are captured, and all are replayed. The trial may leave
at most 16 MiB, the estimate must cover the memory finally held, and memory measured after the
captures must remain true after each graph has run: first replays may add at most 16 MiB, or a
quarter. `gpu_ms` is a replay of the smallest size.
"""

from __future__ import annotations

import random
from typing import Any

import kit
import torch

SIZES = [512, 448, 384, 320, 256, 224, 192, 160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    width = 2048

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * rows**-0.5

    layers = [(weight(width, 2 * width), weight(width, 2 * width), weight(2 * width, width)) for _ in range(28)]
    head = torch.randn(width, 32000, device="cuda", dtype=torch.bfloat16) * width**-0.5

    def model(x: torch.Tensor) -> torch.Tensor:
        for gate, up, down in layers:
            h = x / x.float().pow(2).mean(-1, keepdim=True).add(1e-6).sqrt().to(x.dtype)
            q = h.view(len(h), 16, -1).float().softmax(-1).to(h.dtype)
            k = torch.nn.functional.silu(h @ gate)
            x = x + (k * (h @ up)) @ down + q.reshape(len(h), -1) * 0.01
        return x @ head

    stream = torch.cuda.Stream()
    xs = {n: torch.randn(n, width, device="cuda", dtype=torch.bfloat16) for n in SIZES}
    logits = torch.empty(max(SIZES), 32000, device="cuda", dtype=torch.bfloat16)
    wants = {}
    with torch.no_grad():
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            for n in SIZES:
                wants[n] = model(xs[n])[:, :64].clone()
        torch.cuda.synchronize()

        def capture(n: int, pool: Any) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits[:n].copy_(model(xs[n]))
            return graph

        start = kit.settle()
        pool, trial, samples = torch.cuda.graph_pool_handle(), [], []
        for n in SIZES[:2]:
            before = kit.free()
            trial.append(capture(n, pool))
            samples.append(before - kit.free())
        trial.clear()
        left_over = start - kit.settle()
        estimate = samples[0] + max(samples[1], kit.MIB) * (len(SIZES) - 1)
        start = kit.settle()
        pool = torch.cuda.graph_pool_handle()
        graphs = {n: capture(n, pool) for n in SIZES}
        captured = start - kit.settle()
    order, wrong = SIZES * 2, 0
    random.Random(1).shuffle(order)
    for n in order:
        logits.fill_(7)
        graphs[n].replay()
        torch.cuda.synchronize()
        wrong += not kit.rel(logits[:n, :64], wants[n]) < 2e-2
    replayed = start - kit.settle()
    grew = replayed - captured
    covered = replayed <= estimate + 8 * kit.MIB and grew <= max(16 * kit.MIB, captured // 4)
    detail = {
        "wrong": wrong,
        "samples_mib": [kit.mib(sample) for sample in samples],
        "estimate_mib": kit.mib(estimate),
        "trial_left_mib": kit.mib(left_over),
        "captured_mib": kit.mib(captured),
        "after_replays_mib": kit.mib(replayed),
        "grew_at_replay_mib": kit.mib(grew),
    }
    ok = not wrong and left_over <= 16 * kit.MIB and covered
    return {"ok": ok, "mib": kit.mib(replayed), "gpu_ms": kit.gpu_ms(graphs[1].replay), "detail": detail}


if __name__ == "__main__":
    kit.run("vllm_profile", body)
