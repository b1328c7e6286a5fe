"""`vmmgraph replay` on torch's own histories, on a GPU: detected captures, and numbers equal to
torch's.

Under pytest, or standalone: ``python3 tests/python/test_cli_gpu.py``. Needs a GPU, torch, and
VMMGRAPH_CORE_LIBRARY or a package with libvmmgraph.so; prints SKIPPED otherwise. RESULT lines are
measurements.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_PACKAGE = os.environ.get("VMMGRAPH_TEST_PACKAGE") or str(Path(__file__).resolve().parents[2] / "python")
sys.path.insert(0, _PACKAGE)

try:
    import torch

    HAS_GPU = bool(torch.version.cuda) and torch.cuda.is_available()
except ImportError:
    HAS_GPU = False
if HAS_GPU:
    from vmmgraph import _library

    HAS_GPU = _library.find_core() is not None
with contextlib.suppress(ImportError):
    import pytest

    pytestmark = pytest.mark.skipif(not HAS_GPU, reason="SKIPPED: needs a GPU and libvmmgraph.so")

MIB = 1 << 20
SIZES = [4096, 1024, 256, 64]


def model(x, weights):
    for weight in weights:
        x = torch.nn.functional.silu(x @ weight) @ weight.T
    return x


def history(path: Path, one_pool: bool, warm_up: bool, labels: bool) -> list[int]:
    """Stock torch with its history enabled. Returns the peak of live bytes per capture."""
    weights = [torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(4)]
    inputs = {size: torch.randn(size, 1024, device="cuda", dtype=torch.bfloat16) for size in SIZES}
    # Creates workspaces outside captures.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in inputs.values():
            model(x, weights)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(stacks="python")
    pool = torch.cuda.graph_pool_handle() if one_pool else None
    graphs, peaks = [], []
    for size, x in inputs.items():
        if warm_up:
            model(x, weights)
        graph = torch.cuda.CUDAGraph()
        if labels:
            torch.cuda.memory._set_memory_metadata(f"decode {size}")
        before = torch.cuda.memory_allocated()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            torch.cuda.reset_peak_memory_stats()
            out = model(x, weights)
            del out
        peaks.append(torch.cuda.max_memory_allocated() - before)
        if labels:
            torch.cuda.memory._set_memory_metadata("")
        graphs.append(graph)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    del graphs, graph
    gc.collect()
    torch.cuda.empty_cache()
    return peaks


def replayed(path: Path, *options: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": _PACKAGE + os.pathsep + os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-m", "vmmgraph", "replay", str(path), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(one_pool: bool, warm_up: bool, labels: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.pickle"
        peaks = history(path, one_pool, warm_up, labels)
        cost = replayed(path)
    print(f"RESULT replay of torch's history ({one_pool=}, {warm_up=}, {labels=}): {cost}, peaks by torch {peaks}", flush=True)
    assert cost["captures"] == len(SIZES), cost
    # Both round up to 512 bytes.
    assert abs(cost["floor_bytes"] - max(peaks)) <= MIB, (cost, peaks)
    assert abs(cost["peaks_bytes"] - sum(peaks)) <= len(SIZES) * MIB, (cost, peaks)
    if not one_pool:
        # Torch's reserved bytes follow its allocator's rules.
        assert cost["recorded_bytes"] == cost["private_bytes"], cost
    if labels:
        assert cost["largest"] == f"decode {max(SIZES)}"


def test_a_pool_for_each_graph() -> None:
    check(one_pool=False, warm_up=False, labels=False)


def test_one_pool_and_warm_ups() -> None:
    check(one_pool=True, warm_up=True, labels=False)


def test_one_pool_and_labels() -> None:
    if not HAS_GPU or not hasattr(torch.cuda.memory, "_set_memory_metadata"):
        print("SKIPPED: this torch has no labels for memory")
        return
    check(one_pool=True, warm_up=False, labels=True)


def main() -> int:
    if not HAS_GPU:
        print("SKIPPED: needs a GPU, torch and libvmmgraph.so")
        return 77
    failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
            print(f"ok     {name}", flush=True)
        except Exception:  # noqa: BLE001, what a test throws is reported
            failed += 1
            print(f"WRONG  {name}", flush=True)
            traceback.print_exc()
    print("failed" if failed else "passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
