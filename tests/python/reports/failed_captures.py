"""Captures fail repeatedly in a process that continues (pytorch/pytorch#190308 and #190348,
triton-lang/triton#10596, vllm-project/vllm#57785).

Captures fail in six ways in turn, with a pool that has a good graph and without a pool: an
exception, a forbidden wait, an unjoined side stream, a nested capture, out of memory, and a failing
backward pass. After each, the good graph, random numbers and eager work must be right. Finally at
most 64 MiB may be held, and a new capture must be right.
"""

from __future__ import annotations

from typing import Any

import kit
import torch


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("backward")


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    x, w = torch.randn(1024, 1024, device="cuda"), torch.randn(1024, 1024, device="cuda") / 32
    leaf = torch.randn(64, 64, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    bad: dict[str, int] = {}

    def note(what: str) -> None:
        bad[what] = bad.get(what, 0) + 1

    def work() -> torch.Tensor:
        return torch.tanh(x @ w) @ w + torch.nn.functional.dropout(x, 0.0)

    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        want = work()
        Broken.apply(leaf @ leaf).detach()
    torch.cuda.synchronize()
    pool, good = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(good, pool=pool, stream=stream):
        y = work()

    def raises() -> None:
        raise KeyError("mine")

    def waits() -> None:
        (x @ w).sum().item()

    def never_joins() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = x @ w
            z.record_stream(torch.cuda.current_stream())

    def nests() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x + 1

    def wants_too_much() -> None:
        torch.empty(1 << 42, device="cuda", dtype=torch.uint8)

    def fails_backward() -> None:
        Broken.apply(leaf @ leaf).sum().backward()

    kinds, raised = [raises, waits, never_joins, nests, wants_too_much, fails_backward], {}
    checks = {
        "synchronize": torch.cuda.synchronize,
        "random numbers": lambda: torch.rand(16, device="cuda").sum().item(),
        "eager": lambda: (x @ w).sum().item(),
        "empty_cache": torch.cuda.empty_cache,
        "replay": good.replay,
    }
    start, marks, turn = kit.settle(), [], 0
    while turn < 96 and kit.left(40) > 0:
        kind = kinds[turn % len(kinds)]
        keep = []
        try:
            into = pool if turn // len(kinds) % 2 else None
            with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=into, stream=stream):
                keep.append(torch.empty(48 << 20, device="cuda", dtype=torch.uint8).fill_(turn))
                work()
                kind()
            raised.setdefault(kind.__name__, "nothing raised")
        except Exception as error:  # noqa: BLE001
            raised.setdefault(kind.__name__, type(error).__name__)
        kit.back_to_default()
        for what, check in checks.items():
            try:
                check()
            except Exception as error:  # noqa: BLE001
                note(f"{what} after {kind.__name__}: {type(error).__name__} {str(error)[:60]}")
        keep.clear()
        try:
            torch.cuda.synchronize()
            if not kit.rel(y, want) < 1e-4:
                note(f"good graph wrong after {kind.__name__}")
        except Exception as error:  # noqa: BLE001
            note(f"good graph after {kind.__name__}: {type(error).__name__}")
        turn += 1
        if turn % 24 == 0:
            marks.append(kit.mib(start - kit.settle()))
    torch.cuda.manual_seed(7)
    more = torch.cuda.CUDAGraph()
    with torch.cuda.graph(more, pool=pool, stream=stream):
        r = torch.rand(4096, device="cuda") + 0 * work()[0, 0]
    torch.cuda.manual_seed(7)
    more.replay()
    torch.cuda.synchronize()
    first = r.clone()
    torch.cuda.manual_seed(7)
    if not torch.equal(first, torch.rand(4096, device="cuda")):
        note("random numbers of a new graph")
    del more, r
    detail = {"bad": dict(list(bad.items())[:12]), "kinds": raised, "failures": turn, "lost_mib": marks}
    ok = not bad and bool(marks) and marks[-1] <= 64
    return {"ok": ok, "mib": marks[-1] if marks else None, "gpu_ms": kit.gpu_ms(good.replay), "detail": detail}


if __name__ == "__main__":
    kit.run("failed_captures", body)
