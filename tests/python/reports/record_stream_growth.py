"""Tensors read by a second stream in a capture (record_stream) are reused in this capture
(pytorch/pytorch#155398).

Torch's setting graph_capture_record_stream_reuse requests the reuse and is on in both ways. A
capture of 48 steps over two streams must hold no more than a dozen tensors, and replays must be
right.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "graph_capture_record_stream_reuse:True"

from typing import Any

import kit
import torch

STEPS, COUNT = 48, 8 << 20


def body() -> dict[str, Any]:
    x = torch.arange(COUNT, device="cuda", dtype=torch.float32) % 17
    total, main, side = torch.zeros_like(x), torch.cuda.Stream(), torch.cuda.Stream()

    def steps(number: int) -> None:
        here = torch.cuda.current_stream()
        total.zero_()
        for step in range(number):
            t = x * (step + 1)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                u = t + 1
                t.record_stream(side)
            del t
            here.wait_stream(side)
            total.add_(u)
            u.record_stream(here)
            del u

    with torch.cuda.stream(main):
        main.wait_stream(torch.cuda.default_stream())
        steps(3)
    torch.cuda.synchronize()
    want = x * (STEPS * (STEPS + 1) // 2) + STEPS
    before = kit.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        steps(STEPS)
    held = before - kit.free()
    total.zero_()
    graph.replay()
    graph.replay()
    right = torch.allclose(total, want, rtol=1e-6)
    detail = {"right": right, "tensor_mib": kit.mib(COUNT * 4), "steps": STEPS}
    ok = right and held <= 12 * COUNT * 4
    return {"ok": ok, "mib": kit.mib(held), "gpu_ms": kit.gpu_ms(graph.replay), "detail": detail}


if __name__ == "__main__":
    kit.run("record_stream_growth", body)
