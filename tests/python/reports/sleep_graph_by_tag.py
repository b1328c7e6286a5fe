"""A graph is captured by the memory saver's cuda_graph(graph, tag=...), and the tag is paused.

Three graphs of one pool hold intermediate tensors and outputs. Pausing their tag must free at least
0.9 of their captures' memory and preserve another tag's bytes. A replay meanwhile must raise, and
replays after the resume must be right. In the stock way nothing is paused. `mib` is the memory of
the captures.
"""

from __future__ import annotations

from typing import Any

import kit
import torch

COUNT = 32 << 20


def body() -> dict[str, Any]:
    saver = kit.saver()
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    x = torch.arange(COUNT, device="cuda", dtype=torch.float32) % 13
    with saver.region("other", enable_cpu_backup=True):
        other = torch.full((COUNT,), 5.0, device="cuda")
    y = torch.empty(COUNT, device="cuda")

    def work(number: int) -> torch.Tensor:
        parts = [x * (number + part) for part in range(4)]
        total = parts[0] + parts[1] + parts[2] + parts[3]
        y.copy_(total)
        return total[: 1 << 20] + 1

    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        work(0)
    start = kit.settle()
    made = []
    for number in range(3):
        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, pool=pool, stream=stream, tag="graphs"):
            out = work(number)
        made.append((graph, out))
    for graph, _ in made:
        graph.replay()
    held = start - kit.settle()
    pages = kit.graph_pages() if kit.OURS else 0
    before = kit.free()
    saver.pause("graphs")
    given = kit.free() - before
    said = "nothing is paused"
    if kit.OURS:
        try:
            made[0][0].replay()
            said = "no exception"
        except Exception as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {str(error)[:200]}"
    kept = bool((other == 5).all())
    saver.resume("graphs")
    wrong = 0
    for number, (graph, out) in enumerate(made):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        want = x * (4 * number + 6)
        wrong += not (torch.allclose(y, want) and torch.allclose(out, want[: 1 << 20] + 1))
    ok = kept and not wrong
    if kit.OURS:
        ok = ok and given >= 0.95 * pages > 0 and said != "no exception"
    detail = {"wrong": wrong, "other_kept": kept, "given_mib": kit.mib(given), "replay_while_paused": said}
    return {"ok": ok, "mib": kit.mib(held), "gpu_ms": kit.gpu_ms(made[0][0].replay), "detail": detail}


if __name__ == "__main__":
    kit.run("sleep_graph_by_tag", body)
