"""As alloc_nodes, in a process that has used cuBLAS before.

vmmgraph makes cuBLAS's handle and workspace (32 MiB on an H200) before its first capture, so that
no warm-up is needed. Stock torch makes them at the first product, which alloc_nodes never has. Here
both ways have them before memory is measured, so this program shows how much of alloc_nodes'
difference they are.
"""

from __future__ import annotations

from typing import Any

import alloc_nodes
import kit
import torch


def body() -> dict[str, Any]:
    x = torch.ones(64, 64, device="cuda")
    start = kit.settle()
    x @ x
    cublas = start - kit.free()
    found = alloc_nodes.body()
    found["detail"]["cublas_mib"] = kit.mib(cublas)
    return found


if __name__ == "__main__":
    kit.run("alloc_nodes_with_cublas", body)
