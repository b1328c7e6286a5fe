#!/usr/bin/env python3
"""Measures pauses and resumes of a region: 4 GiB with a backup, and 8 GiB without one.

    memory_saver_speeds.py preload|torch            # vmmgraph.memory_saver
    memory_saver_speeds.py preload|torch --stock    # the installed torch_memory_saver

Needs a GPU with 14 GiB of free memory. Exit status 1: a resume did not restore the contents.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

GIB = 1 << 30


def main() -> int:
    mode, stock = sys.argv[1], "--stock" in sys.argv
    if not stock:
        from vmmgraph import memory_saver

        memory_saver.take_over()
    import torch_memory_saver

    if mode == "preload" and not os.environ.get("SPEEDS_STARTED"):
        with torch_memory_saver.configure_subprocess():
            return subprocess.run([sys.executable, *sys.argv], env=os.environ | {"SPEEDS_STARTED": "1"}, check=False).returncode
    saver = torch_memory_saver.torch_memory_saver
    saver.hook_mode = mode

    def seconds(call: Callable[[str], object], tag: str) -> float:
        start = time.perf_counter()
        call(tag)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    with saver.region("weights", enable_cpu_backup=True):
        weights = [torch.full((GIB // 4,), value, dtype=torch.uint8, device="cuda") for value in range(16)]
    with saver.region("kv_cache"):
        cache = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for _ in range(4):
        pause, resume = seconds(saver.pause, "weights"), seconds(saver.resume, "weights")
        print(f"RESULT {mode} 4 GiB: pause {4 / pause:.1f} GiB/s, resume {4 / resume:.1f} GiB/s")
    for _ in range(3):
        pause, resume = seconds(saver.pause, "kv_cache"), seconds(saver.resume, "kv_cache")
        print(f"RESULT {mode} 8 GiB discarded: pause {1e3 * pause:.1f} ms, resume {1e3 * resume:.1f} ms")
    wrong = sum(bool((weight != value).any()) for value, weight in enumerate(weights))
    print(
        f"{'WRONG' if wrong else 'ok'}     {wrong} of {len(weights)} tensors changed, {cache.numel() // GIB} GiB without a backup"
    )
    sys.stdout.flush()
    # torch_memory_saver may end the process with an error at its exit.
    os._exit(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
