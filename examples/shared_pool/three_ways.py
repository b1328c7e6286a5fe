"""Runs a program under stock torch with one pool, with private pools, and under VmmGraph.

Each way runs in its own process. Prints the wrong results and the memory of the graphs.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

WAYS = {
    "one": "stock torch, one pool for all graphs",
    "private": "stock torch, private pools",
    "ours": "VmmGraph, one pool for all graphs",
}


@dataclass(frozen=True)
class Result:
    """Compared results, the wrong ones of these, and MiB of all captures."""

    results: int
    wrong: int
    mib: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def settled() -> int:
    """Returns the free bytes of the device after torch has released its unused memory."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def main(measure: Callable[[bool], Result]) -> int:
    """Measures one way if an argument names it, else all ways in child processes.

    The argument of ``measure`` asks for private pools.
    """
    if len(sys.argv) == 1:
        return max(subprocess.run([sys.executable, sys.argv[0], way], check=False).returncode for way in WAYS)
    way = sys.argv[1]
    if way == "ours":
        import vmmgraph

        vmmgraph.enable(strict=True)
    found = measure(way == "private")
    print(f"{WAYS[way]:40} {found.wrong:7,} of {found.results:,} wrong, {found.mib:6.0f} MiB", flush=True)
    return int(way == "ours" and found.wrong > 0)
