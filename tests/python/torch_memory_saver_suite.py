#!/usr/bin/env python3
"""Runs torch_memory_saver's own Python tests, unchanged, against vmmgraph.memory_saver.

    VMMGRAPH_MEMORY_SAVER_LIBRARY=... PYTHONPATH=python torch_memory_saver_suite.py CHECKOUT
    torch_memory_saver_suite.py CHECKOUT --stock     # against the installed torch_memory_saver

CHECKOUT is a checkout of github.com/fzyzcjy/torch_memory_saver (0.0.10). Needs a GPU and pytest;
tests of two devices are skipped without a second GPU. Each test runs in a separate process. Exit
status 1: a test fails, except at the place listed in DIFFERENT (docs/memory_saver.md).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 300
#: Tests that fail on purpose: name without parameters, expected output, and the difference.
DIFFERENT = {
    "test_cpu_backup": (r"cudaHostGetFlags|_mem_pools", "the last part looks into torch_memory_saver's private tables"),
    "test_training_engine": (r"assert delta_expect", "a pause frees torch's cache instead of pausing its memory"),
    "test_cpu_backup_backend_rejected_on_xpu": (r"MemorySaver|RuntimeError|DID NOT RAISE", "no Intel GPUs"),
    "test_cpu_backup_backend_rejects_mmap_on_rocm": (r"MemorySaver|RuntimeError|DID NOT RAISE", "no AMD GPUs"),
}
#: Tests of the release scripts.
LEFT_OUT = ("test_merge_cuda_wheels.py",)


def pytest(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
        return -1, f"{said if isinstance(said, str) else said.decode(errors='replace')}\nno end within {LIMIT} s"
    return done.returncode, done.stdout


def installed(place: Path) -> Path:
    """Returns a folder with the package as in a wheel: with its library under all names."""
    from vmmgraph import memory_saver

    package = Path(memory_saver.shim_path()).parent
    named = os.environ.get("VMMGRAPH_MEMORY_SAVER_LIBRARY")
    if not named:
        return package.parent
    shutil.copytree(package, place / "vmmgraph", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "vmmgraph/_lib").mkdir(exist_ok=True)
    stems = [
        f"torch_memory_saver_hook_mode_{mode}{cuda}.abi3" for mode in ("preload", "torch") for cuda in ("", "_cu12", "_cu13")
    ]
    for name in ("_lib/libvmmgraph_memory_saver", *(f"_shims/{stem}" for stem in stems)):
        shutil.copy(named, place / f"vmmgraph/{name}.so")
    for core in Path(named).resolve().parent.glob("libvmmgraph.so*"):
        for folder in ("_lib", "_shims"):
            shutil.copy(core, place / "vmmgraph" / folder)
    return place


def environment_of(ours: bool, place: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TMS_")}
    own.pop("LD_PRELOAD", None)
    if ours:
        folder = installed(place)
        own.pop("VMMGRAPH_MEMORY_SAVER_LIBRARY", None)
        inherited = own.get("PYTHONPATH")
        own["PYTHONPATH"] = os.pathsep.join([str(folder / "vmmgraph/_shims"), str(folder), *([inherited] if inherited else [])])
    return own


def verdict(name: str, status: int, said: str, ours: bool) -> tuple[str, str]:
    """Returns a word and an explanation."""
    if status == 0:
        return ("skipped", "") if re.search(r"\b1 skipped\b", said) else ("passed", "")
    pattern, why = DIFFERENT.get(name, ("", ""))
    if ours and pattern and re.search(pattern, said):
        return "differs", why
    return "FAILED", ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs torch_memory_saver's own tests.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("-k", default="", help="a part of the tests' names")
    parser.add_argument("--stock", action="store_true", help="against the installed torch_memory_saver")
    asked = parser.parse_args()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        own = environment_of(not asked.stock, Path(place))
        # Without the checkout's own package beside the tests.
        folder = Path(place) / "test"
        shutil.copytree(asked.checkout / "test", folder)
        for name in LEFT_OUT:
            (folder / name).unlink(missing_ok=True)
        status, said = pytest(folder, own, "--collect-only")
        tests = [line for line in said.splitlines() if "::" in line and asked.k in line]
        if status or not tests:
            print(said)
            return 1
        for test in tests:
            began = time.monotonic()
            status, said = pytest(folder, own, test)
            word, why = verdict(test.split("::")[-1].split("[")[0], status, said, not asked.stock)
            counts[word] = counts.get(word, 0) + 1
            print(f"{word:8} {time.monotonic() - began:5.1f} s  {test}{f': {why}' if why else ''}", flush=True)
            if word == "FAILED":
                print(said[-6000:], flush=True)
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return 1 if counts.get("FAILED") else 0


if __name__ == "__main__":
    sys.exit(main())
