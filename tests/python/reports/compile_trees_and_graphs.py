"""Compiled models with graphs of their own run beside graphs captured by hand
(pytorch/pytorch#160281 and #123177, huggingface/transformers#48199, OpenBMB/VoxCPM#269).

Two models under torch.compile(mode="reduce-overhead") exchange tensors, and a third one is compiled
with graphs but without trees. Graphs captured by hand, whose products need cuBLAS's workspace, are
captured and replayed between their runs. All results must equal eager work, also after a reset of
the compiled models.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import gc
from typing import Any

import kit
import torch
import torch._inductor.config as inductor


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    w1, w2, w3 = (torch.randn(512, 512, device="cuda") / 23 for _ in range(3))
    narrow = torch.randn(16384, 64, device="cuda", dtype=torch.bfloat16) / 128

    def first(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w1) + x

    def second(x: torch.Tensor) -> torch.Tensor:
        return (x @ w2).softmax(-1) * x.sum(-1, keepdim=True)

    def third(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w3).cumsum(-1)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        return ((x @ narrow).float() * 3).softmax(-1)

    a, b = torch.compile(first, mode="reduce-overhead"), torch.compile(second, mode="reduce-overhead")
    stream, made, bad, marks = torch.cuda.Stream(), [], {}, []

    def check(what: str, got: torch.Tensor, want: torch.Tensor, most: float = 1e-3) -> None:
        if not kit.rel(got, want) < most:
            bad[what] = bad.get(what, 0) + 1

    def capture(n: int) -> None:
        x = torch.randn(n, 16384, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            want = by_hand(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = by_hand(x)
        # Keeps the graph's input alive.
        made.append((graph, x, y, want))

    def replay_all(when: str) -> None:
        for graph, _, y, want in made:
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            check(f"by hand, {when}", y, want, 1e-2)

    with torch.no_grad():
        capture(8)
        rounds = 0
        start = kit.settle()
        while rounds < 40 and kit.left(42) > 0:
            x = torch.randn(32, 512, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            h = a(x).clone()
            y = b(h).clone()
            check("compiled", y, second(first(x)))
            if rounds % 8 == 4:
                capture(8 + 8 * (rounds // 8 % 4))
            if rounds % 4 == 2:
                replay_all("between compiled ones")
            rounds += 1
            if rounds in (10, 40):
                marks.append(kit.mib(start - kit.free()))
        trees = inductor.triton.cudagraph_trees
        if kit.left(42) > 8:
            inductor.triton.cudagraph_trees = False
            try:
                c = torch.compile(third, mode="reduce-overhead")
                x = torch.randn(32, 512, device="cuda")
                for _ in range(6):
                    x.normal_()
                    got = c(x).clone()
                    check("without trees", got, third(x))
                    replay_all("beside one without trees")
            finally:
                inductor.triton.cudagraph_trees = trees
        torch._dynamo.reset()
        gc.collect()
        kit.settle()
        replay_all("after a reset")
        torch._C._cuda_clearCublasWorkspaces()
        replay_all("after workspaces were forgotten")
    detail = {"wrong": bad, "rounds": rounds, "graphs_by_hand": len(made), "held_mib": marks}
    out = {"ok": not bad and rounds >= 12, "mib": marks[-1] if marks else None, "detail": detail}
    return out | {"gpu_ms": kit.gpu_ms(made[0][0].replay)}


if __name__ == "__main__":
    kit.run("compile_trees_and_graphs", body)
