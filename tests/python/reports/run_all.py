#!/usr/bin/env python3
"""Runs the report programs under stock torch and under vmmgraph.enable(), and prints one table.

    OUT=out PYTHONPATH=python VMMGRAPH_LIBRARY=... python3 tests/python/reports/run_all.py
    ... run_all.py --jobs 3 --part 1/3 --ways stock,ours NAME...
    ... run_all.py --ways stock,tms,ours sleep rl_   # tms: with the installed torch_memory_saver

Each run is a separate process with a limit of 90 s. Each result is also a line of JSON in
$OUT/reports.jsonl. The device must be otherwise idle: most programs measure its free memory. The
other programs may run in parallel (--jobs). Exit status 1: a program fails under vmmgraph but not
under stock torch.

| verdict | meaning |
|---|---|
| as stock | right in both ways, memory <= 1.05 and GPU time <= 1.05 of stock's |
| better than stock | right under vmmgraph only |
| MORE MEMORY, SLOWER | right in both ways, above those bounds |
| BREAKS HERE ONLY | right under stock only |
| both fail | the program's bound is missed in both ways |
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 90
#: Programs that measure neither free device memory nor times.
BESIDE = {"pinned_in_capture", "profiler_replays", "ipc_weights", "sleep_alloc_while_paused"}
#: Seconds of both ways, if far from 25, to balance the parts.
LONG = {
    "recapture_churn": 90,
    "failed_captures": 50,
    "compile_trees_and_graphs": 90,
    "multiscale_training": 50,
    "vllm_profile": 40,
    "full_device": 40,
}
MEMORY, TIME = 1.05, 1.05


def cases() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("kit", "paged", "run_all"))


def one(name: str, way: str) -> dict[str, Any]:
    env = dict(os.environ, WAY=way, PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1")
    env.pop("LD_PRELOAD", None)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(HERE / f"{name}.py")],
        env=env,
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: object
    try:
        out, err = process.communicate(timeout=LIMIT)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        code = f"no end within {LIMIT} s"
    last = next((text for text in reversed(err.splitlines()) if text.strip()), "")
    line: dict[str, Any] = {"case": name, "way": way, "ok": False, "detail": f"no result line: {last[:400]}"}
    for text in out.splitlines():
        if text.startswith('{"case"'):
            with contextlib.suppress(ValueError):
                line |= json.loads(text)
    if code != 0:
        line["ok"], line["exit"] = False, code
    if not line["ok"]:
        line["stderr"] = err[-1500:]
    warned = [text for text in err.splitlines() if text.startswith("vmmgraph") or "vmmgraph:" in text]
    if warned:
        line["said"] = warned[:3]
    line["wall"] = round(time.monotonic() - began, 1)
    return line


def ratio(ours: Any, stock: Any) -> float | None:
    return ours / stock if ours and stock and stock > 0 else None


def verdict(stock: dict[str, Any], ours: dict[str, Any]) -> str:
    if not ours:
        return ""
    if not ours["ok"]:
        return "BREAKS HERE ONLY" if stock.get("ok") else "both fail"
    if not stock.get("ok", True):
        return "better than stock"
    more = [
        said
        for said, measure, bound in (("MORE MEMORY", "mib", MEMORY), ("SLOWER", "gpu_ms", TIME))
        if (ratio(ours.get(measure), stock.get(measure)) or 0) > bound
    ]
    return ", ".join(more) or "as stock"


def table(names: list[str], ways: list[str], lines: dict[str, dict[str, Any]]) -> list[str]:
    columns = ("MiB stock", "ours", "ratio", "GPU ms stock", "ours", "ratio")
    widths = (10, 8, 6, 13, 9, 6)
    heads = "".join(f"{head:>{width}}" for head, width in zip(columns, widths, strict=True))
    rows = [f"{'program':28}" + "".join(f"{way:>7}" for way in ways) + heads + "  verdict"]
    for name in names:
        got = lines[name]
        stock, ours = got.get("stock", {}), got.get("ours", {})
        cells: list[object] = []
        for measure in ("mib", "gpu_ms"):
            there = ratio(ours.get(measure), stock.get(measure))
            cells += [stock.get(measure), ours.get(measure), f"{there:.2f}" if there else None]
        marks = "".join(f"{'ok' if got.get(way, {}).get('ok') else 'no':>7}" for way in ways)
        shown = "".join(f"{'' if cell is None else cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))
        rows.append(f"{name:28}{marks}{shown}  {verdict(stock, ours)}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the report programs in both ways and prints one table.")
    parser.add_argument("names", nargs="*", help="parts of names; none: all programs")
    parser.add_argument("--part", default="1/1", help="such as 2/3: the second of three parts of equal length")
    parser.add_argument("--jobs", type=int, default=1, help="programs beside each other, of those that measure nothing")
    parser.add_argument("--ways", default="stock,ours")
    asked = parser.parse_args()
    names = [name for name in cases() if not asked.names or any(part in name for part in asked.names)]
    part, parts = map(int, asked.part.split("/"))
    heaps: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(names, key=lambda name: (-LONG.get(name, 25), name)):
        min(heaps, key=lambda heap: sum(LONG.get(each, 25) for each in heap)).append(name)
    names, ways = sorted(heaps[part - 1]), asked.ways.split(",")
    target = pathlib.Path(os.environ.get("OUT", ".")) / "reports.jsonl"
    lines: dict[str, dict[str, Any]] = collections.defaultdict(dict)

    def note(line: dict[str, Any]) -> None:
        lines[line["case"]][line["way"]] = line
        with target.open("a") as f:
            f.write(json.dumps(line) + "\n")
        detail = line["detail"] if isinstance(line["detail"], str) else json.dumps(line["detail"])
        ended = f"  exit {line['exit']}" if "exit" in line else ""
        mark = "ok   " if line["ok"] else "WRONG"
        print(f"{mark} {line['case']:28} {line['way']:6} {line['wall']:6.1f} s  {detail[:420]}{ended}", flush=True)

    tasks = [(name, way) for name in names for way in ways]
    beside = [task for task in tasks if task[0] in BESIDE] if asked.jobs > 1 else []
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, *task) for task in beside]):
            note(done.result())
    for task in tasks:
        if task not in beside:
            note(one(*task))
    print("\n" + "\n".join(table(names, ways, lines)))
    broken = [name for name in names if verdict(lines[name].get("stock", {}), lines[name].get("ours", {})) == "BREAKS HERE ONLY"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
