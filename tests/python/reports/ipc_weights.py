"""Tensors are sent to another process by torch's own CUDA IPC (THUDM/slime#2188).

A trainer sends four tensors: ordinary memory, memory of a memory saver's region, memory allocated
inside disable() within the region, and a graph's output. An engine in another process copies each
into weights read by its graph, replays the graph and answers with a sum. Ordinary memory and memory
of disable() must arrive. Memory of the region and of the graph may be refused by an exception with
an alternative. Neither process may end, and the trainer's tensors must be unchanged.
"""

from __future__ import annotations

import contextlib
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import kit
import torch
import torch.multiprocessing as mp

N = 3 << 20


def serve(pipe: Any) -> None:
    torch.cuda.set_device(0)
    weight, x, y = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(torch.sin(weight * x) + weight)
    while (sent := pipe.recv()) is not None:
        try:
            bucket = pickle.loads(sent)
            weight.copy_(bucket)
            torch.cuda.synchronize()
            del bucket
            graph.replay()
            torch.cuda.synchronize()
            pipe.send(("got", float(y.double().sum())))
        except Exception as error:  # noqa: BLE001
            pipe.send(("engine failed", f"{type(error).__name__}: {str(error)[:200]}"))


def engine(pipe: Any) -> None:
    try:
        serve(pipe)
    except Exception as error:  # noqa: BLE001
        pipe.send(("engine failed", f"{type(error).__name__}: {str(error)[:200]}"))


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    here, there = mp.get_context("spawn").Pipe()
    child = mp.get_context("spawn").Process(target=engine, args=(there,), daemon=True)
    child.start()
    there.close()
    saver = kit.saver()
    source = torch.randn(N, device="cuda")
    want = float((torch.sin(source) + source).double().sum())
    made = {"ordinary": source + 0}
    with saver.region("train", enable_cpu_backup=True):
        made["in a region"] = source + 0
        with saver.disable():
            made["within disable"] = source + 0
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        z = source + 0
    graph.replay()
    made["output of a graph"] = z
    torch.cuda.synchronize()
    said: dict[str, Any] = {}
    for name, tensor in made.items():
        try:
            here.send(bytes(ForkingPickler.dumps(tensor)))
        except Exception as error:  # noqa: BLE001
            said[name] = f"refused: {type(error).__name__}: {str(error)[:240]}"
            continue
        if not here.poll(40):
            said[name] = "no answer"
            break
        kind, value = here.recv()
        right = kind == "got" and abs(value - want) <= 1e-5 * abs(want) + 1e-2
        said[name] = "right" if right else f"{kind}: {value}, not {want}"
    said["trainer lives"] = bool(torch.equal(made["in a region"], source))
    with contextlib.suppress(OSError):
        here.send(None)
    child.join(10)

    def fine(name: str) -> bool:
        answer = said.get(name, "")
        return answer == "right" or (answer.startswith("refused") and "send a copy" in answer)

    ok = said.get("ordinary") == "right" and said.get("within disable") == "right" and said["trainer lives"]
    return {"ok": ok and all(fine(name) for name in made), "detail": said}


if __name__ == "__main__":
    kit.run("ipc_weights", body)
