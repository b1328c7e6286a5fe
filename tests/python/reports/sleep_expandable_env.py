"""A process with expandable_segments:True in its environment pauses weights and cache
(vllm-project/vllm#40812, OpenRLHF/OpenRLHF#1274, huggingface/trl#5794).

vLLM disables the setting around its own pool. Here weights and cache are allocated in regions, a
graph reads both, and both are paused and resumed five times: replays must be right, and each pause
must free at least 500 MiB. In the stock way nothing is paused.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from typing import Any

import kit
import torch


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    allocator = kit.sleeper()
    x = torch.randn(64, 2048, device="cuda")
    with allocator.use_memory_pool(tag="weights"):
        w = [torch.randn(2048, 2048, device="cuda") / 45 for _ in range(6)]
    with allocator.use_memory_pool(tag="kv_cache"):
        kv = torch.zeros(512 << 20, device="cuda", dtype=torch.uint8)

    def model() -> torch.Tensor:
        y = x
        for one in w:
            y = torch.tanh(y @ one)
        return y + kv[:1].float()

    want = model()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        y = model()
    given, right = [], []
    for _ in range(5):
        before = kit.free()
        allocator.sleep("weights")
        given.append(kit.mib(kit.free() - before))
        trainer = [torch.randn(n << 18, device="cuda") for n in range(1, 40)]
        del trainer
        torch.cuda.empty_cache()
        allocator.wake_up()
        kv.zero_()
        graph.replay()
        torch.cuda.synchronize()
        right.append(kit.rel(y, want) < 1e-4)
    ok = all(right) and (not kit.OURS or min(given) >= 500)
    return {"ok": ok, "gpu_ms": kit.gpu_ms(graph.replay), "detail": {"right": right, "given_mib": given}}


if __name__ == "__main__":
    kit.run("sleep_expandable_env", body)
