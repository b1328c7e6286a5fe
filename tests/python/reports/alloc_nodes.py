"""Graphs contain allocation nodes: a library calls cudaMallocAsync within a capture
(NVIDIA/warp#1429 and #1157, NVIDIA/cccl#9394).

Some of this memory is freed within the graph, some is not. Eighteen graphs, a third with tensors
only, are replayed 1,200 times in random order. Held memory must not grow, results must be right,
and dropping the graphs must free the memory.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import kit
import torch

COUNT = 16 << 20


def body() -> dict[str, Any]:
    cu = kit.driver()
    cu.cuMemAllocAsync.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p]
    cu.cuMemFreeAsync.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    cu.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def fine(status: int) -> None:
        assert status == 0, f"CUresult {status}"

    def capture(number: int, foreign: bool, frees: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, float]:
        x = torch.full((COUNT,), float(number), device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            y = x + 1
            if foreign:
                at = ctypes.c_uint64()
                fine(cu.cuMemAllocAsync(ctypes.byref(at), COUNT * 4, stream.cuda_stream))
                fine(cu.cuMemcpyDtoDAsync_v2(at.value, y.data_ptr(), COUNT * 4, stream.cuda_stream))
                y.zero_()
                fine(cu.cuMemcpyDtoDAsync_v2(y.data_ptr(), at.value, COUNT * 4, stream.cuda_stream))
                if frees:
                    fine(cu.cuMemFreeAsync(at.value, stream.cuda_stream))
            z = y.view(-1, 1 << 20).sum(-1) + number
        # Keeps the graph's input alive.
        return graph, x, z, (number + 1.0) * (1 << 20) + number

    start = kit.settle()
    made = [capture(number, number % 3 != 2, number % 2 == 0) for number in range(18)]
    pick, wrong, marks = random.Random(9), 0, []
    for turn in range(1200):
        graph, x, z, want = made[pick.randrange(len(made))]
        graph.replay()
        if turn % 6 == 0:
            torch.cuda.synchronize()
            wrong += not bool((z == want).all())
        if turn in (100, 600, 1199):
            torch.cuda.synchronize()
            marks.append(kit.mib(start - torch.cuda.mem_get_info()[0]))
    gpu_ms = kit.gpu_ms(made[0][0].replay)
    again = capture(50, True, False)
    again[0].replay()
    torch.cuda.synchronize()
    wrong += not bool((again[2] == again[3]).all())
    made.clear()
    del graph, x, z, again
    kit.settle()
    cu.cuDeviceGraphMemTrim(0)
    left_over = start - kit.settle()
    ok = not wrong and marks[-1] - marks[0] <= 128 and left_over <= 64 * kit.MIB
    detail = {"wrong": wrong, "held_mib": marks, "left_mib": kit.mib(left_over)}
    return {"ok": ok, "mib": marks[-1], "gpu_ms": gpu_ms, "detail": detail}


if __name__ == "__main__":
    kit.run("alloc_nodes", body)
