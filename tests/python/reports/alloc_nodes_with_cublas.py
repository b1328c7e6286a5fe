"""Repeats alloc_nodes in a process with initialized cuBLAS.

vmmgraph creates cuBLAS's handle and workspace (32 MiB on an H200) before its first capture, so no
warm-up is needed. Stock torch creates both at the first product, which alloc_nodes lacks. Here both
ways create handle and workspace before the measurement, so this program shows their share of
alloc_nodes' difference.
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
