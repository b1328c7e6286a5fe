"""Torch's own memory snapshot tools (torch/cuda/_memory_viz.py, which needs neither CUDA nor the
rest of torch) over exported maps.

Also MemoryViz.js, the browser part, which torch's wheel lacks: scripts/memory-viz.sh fetches it.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_cli import VIEWER
from vmmgraph import _maps, _snapshot

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "tests" / "data" / "capture-trace-65-retained.txt"
#: A path, flame graph frames, a trailing count, an omitted frame of torch.
LABELS = ["a/b/prefill 8192", "one;two", "decode 64 1000", "x/Register", "\N{GREEK SMALL LETTER ALPHA}"]


@pytest.fixture(scope="module")
def viz() -> ModuleType:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        pytest.skip("SKIPPED: no torch")
    path = Path(found.submodule_search_locations[0]) / "cuda/_memory_viz.py"
    spec = importlib.util.spec_from_file_location("memory_viz", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """With retained blocks and every event."""
    if not os.environ.get("VMMGRAPH_CORE_LIBRARY"):
        pytest.skip("SKIPPED: VMMGRAPH_CORE_LIBRARY names no library")
    out = tmp_path_factory.mktemp("map") / "map.json"
    command = [sys.executable, "-m", "vmmgraph", "replay", TRACE, "--events", "all", "-o", out]
    subprocess.run([str(each) for each in command], check=True, capture_output=True, timeout=300)
    found = json.loads(out.read_text())
    for space, label in zip(found["spaces"], LABELS, strict=False):
        space["label"] = label
    return found


@pytest.fixture
def snapshot(drawn: dict) -> dict:
    return pickle.loads(_snapshot.dumps(_snapshot.snapshot(copy.deepcopy(drawn))[0]))


def flames(lines: str) -> list[tuple[list[str], int]]:
    """Returns a flame graph's stacks and bytes, parsed like flamegraph.pl."""
    found = []
    for line in lines.splitlines():
        stack, _, count = line.rpartition(" ")
        found.append((stack.split(";"), int(count)))
    return found


@pytest.mark.parametrize("tool", ["segments", "memory"])
def test_flame_graphs_have_every_byte_and_every_shape(viz: ModuleType, drawn: dict, snapshot: dict, tool: str) -> None:
    found = flames(getattr(viz, tool)(snapshot, format_flamegraph=lambda lines: lines))
    assert sum(count for _, count in found) == drawn["held_bytes"]
    alive = sum(segment["active_size"] for segment in snapshot["segments"])
    assert sum(count for stack, count in found if "active_allocated" in stack) == alive > 0
    depth = 4 if tool == "segments" else 3
    assert {len(stack) for stack, _ in found} == {depth}, "one frame each"
    shown = {stack[-1].rsplit(":", 2)[0] for stack, _ in found if "active_allocated" in stack}
    names = dict(zip((space["id"] for space in drawn["spaces"]), _maps.names(drawn), strict=True))
    living = {names[space["id"]] for space in drawn["spaces"] if space["retained_bytes"] or space["kept"]}
    assert shown == {name.replace("/", "|").replace(";", ",") for name in living}
    assert {"a|b|prefill 8192", "one,two", "x|Register"} <= shown


def test_what_came_and_went_between_two_maps(viz: ModuleType, drawn: dict, snapshot: dict, capsys: pytest.CaptureFixture) -> None:
    assert viz.compare(snapshot["segments"], snapshot["segments"], format_flamegraph=lambda lines: lines) == ""
    less = copy.deepcopy(snapshot)
    gone = less["segments"].pop()
    found = flames(viz.compare(snapshot["segments"], less["segments"], format_flamegraph=lambda lines: lines))
    assert sum(count for _, count in found) == gone["total_size"]
    assert {stack[0] for stack, _ in found} == {"only_before"}
    assert f"only_before = [{gone['address']}]" in capsys.readouterr().out


def test_tables_add_up(viz: ModuleType, drawn: dict, snapshot: dict) -> None:
    table = viz.segsum(snapshot)
    assert f"segments: {len(drawn['pages'])}\n" in table
    assert f"total_reserved: {viz.Bytes(drawn['held_bytes'])}\n" in table
    events = snapshot["device_traces"][0]
    lines = viz.trace(snapshot).splitlines()
    assert lines[1] == f"{len(events)} entries"
    came = [line for line in lines if re.fullmatch(r"\w+ = \w+\[\d+:\S+\]", line)]
    assert len(came) == sum(event["action"] == "alloc" for event in events)
    assert sum(line.startswith("del ") for line in lines) == sum(event["action"] == "free_requested" for event in events)


@pytest.mark.parametrize("plot", ["trace_plot", "segments", "segment_plot", "filtered"])
def test_plots_carry_the_snapshot(viz: ModuleType, snapshot: dict, plot: str) -> None:
    ways = {
        "trace_plot": lambda: viz.trace_plot(snapshot),
        "segments": lambda: viz.trace_plot(snapshot, plot_segments=True),
        "segment_plot": lambda: viz.segment_plot(snapshot),
        "filtered": lambda: viz.trace_plot(copy.deepcopy(snapshot), filter_freed=True),
    }
    page = ways[plot]()
    inside = json.loads(re.search(r"const local_files = (.*)\n", page)[1])[0]["base64"]
    data = base64.b64decode(inside)
    carried = pickle.loads(data)
    if plot == "filtered":
        left = carried["device_traces"][0]
        alive = sum(segment["active_size"] for segment in snapshot["segments"])
        assert {event["action"] for event in left} == {"alloc"} and sum(event["size"] for event in left) == alive
    else:
        assert carried == snapshot
    written = data[: pickle.dumps(carried).__len__()]
    if sys.version_info < (3, 14):
        # Torch uses Python's default protocol, which is 5 from 3.14 on.
        assert {opcode.name for opcode, *_ in pickletools.genops(written)} <= VIEWER


def test_torchs_viewer_draws_it(drawn: dict, snapshot: dict, tmp_path: Path) -> None:
    """In headless Chromium without a network."""
    viewer, chromium = ROOT / "build/memory-viz", shutil.which("chromium")
    if not (viewer / "complete").exists() or chromium is None:
        pytest.skip("SKIPPED: no MemoryViz.js (scripts/memory-viz.sh fetches it) or no Chromium")
    script = (viewer / "MemoryViz.js").read_text()
    script, imports = re.subn(r"(?m)^import .*\n", "", script)
    assert imports == 5
    script = script.replace("export function", "function")
    d3 = (viewer / "d3.v5.min.js").read_text().replace("</", "<\\/")
    data = base64.b64encode(_snapshot.dumps(_snapshot.snapshot(copy.deepcopy(drawn))[0])).decode()
    page = tmp_path / "page.html"
    page.write_text(
        f"""<!doctype html><meta charset="utf-8"><body><script>const errors = [];
        addEventListener("error", event => errors.push(String(event.message)));</script><script>{d3}</script>
        <script>const {{axisLeft, scaleLinear, zoom, zoomIdentity, brushX}} = d3; const SNAPSHOT = "{data}";
        {script}
        {(ROOT / "tests/data/memory_viz_probe.js").read_text()}</script>"""
    )
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"]
    ways = ["--virtual-time-budget=30000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    dom = subprocess.run([chromium, *quiet, *ways], capture_output=True, text=True, timeout=240, check=True).stdout
    said = re.search(r"PROBE\[(.*?)\]PROBE", dom)
    assert said is not None, dom[-2000:]
    found = json.loads(base64.b64decode(said[1]))
    assert found["errors"] == []
    events = snapshot["device_traces"][0]
    came = sum(event["action"] == "alloc" for event in events)
    views = found["views"]
    # The 15,000 largest, one for the rest, and one for the small map below.
    assert came > 1000 and views["Active Memory Timeline"]["polygons"] == min(came, 15000) + 2
    assert views["Allocator State History"]["segments"] == len(drawn["pages"])
    assert views["Allocator State History"]["events"] >= len(events) // 2, "a line for each, where two of a free are one"
    assert views["Active Cached Segment Timeline"]["polygons"] == len(drawn["pages"]) + 2
    assert "a|b|prefill 8192" in views["Active Memory Timeline"]["told"]
