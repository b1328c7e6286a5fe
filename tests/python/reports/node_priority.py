"""Work captured on a high-priority stream keeps its priority when replayed on another stream
(pytorch/pytorch#167346).

A short chain of kernels is captured on a stream of the highest priority and on a stream of the
lowest. Each is replayed on an ordinary stream beside a row of large kernels. The high-priority
chain must take less than 0.35 of the other's time. `gpu_ms` is the time of the high-priority chain
beside the row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import kit
import torch


def body() -> dict[str, Any]:
    lowest, highest = torch.cuda.Stream.priority_range()
    x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(24):
            y = y * 0.5 + 1
        return y

    want = chain()
    made = {}
    for name, priority in (("high", highest), ("low", lowest)):
        stream = torch.cuda.Stream(priority=priority)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = chain()
        made[name] = graph, out
    big = torch.rand(1 << 29, device="cuda") + 1
    sink = torch.empty_like(big)
    crowd, ordinary = torch.cuda.Stream(priority=lowest), torch.cuda.Stream(priority=lowest)
    torch.cuda.synchronize()

    def row() -> None:
        for _ in range(8):
            torch.lgamma(big, out=sink)

    def alone(work: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    with torch.cuda.stream(crowd):
        row()
    torch.cuda.synchronize()
    with torch.cuda.stream(crowd):
        whole = alone(row)
    took: dict[str, list[float]] = {name: [] for name in made}
    quiet = {}
    for name, (graph, out) in made.items():
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want), name
        with torch.cuda.stream(ordinary):
            quiet[name] = alone(graph.replay)
    for _ in range(7):
        for name, (graph, out) in made.items():
            out.zero_()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(crowd):
                row()
            with torch.cuda.stream(ordinary):
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            took[name].append(begin.elapsed_time(end))
            assert torch.equal(out, want), name
    high, low = statistics.median(took["high"]), statistics.median(took["low"])
    detail = {
        "high_ms": round(high, 3),
        "low_ms": round(low, 3),
        "quiet_ms": {name: round(value, 3) for name, value in quiet.items()},
        "crowd_ms": round(whole, 2),
        "priorities": [lowest, highest],
        "all_high": [round(value, 2) for value in took["high"]],
    }
    return {"ok": high < 0.35 * low, "gpu_ms": round(high, 3), "detail": detail}


if __name__ == "__main__":
    kit.run("node_priority", body)
