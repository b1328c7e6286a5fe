"""The command in separate processes: maps of the traces in tests/data with the core on the host
driver, and invalid files."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import pickletools
import random
import re
import subprocess
import sys
from ctypes import byref, c_void_p
from pathlib import Path

import pytest
from vmmgraph import _c, _cli, _files, _maps, _package, _progress, _replay, _snapshot, _traces

DATA = Path(__file__).resolve().parents[1] / "data"
MIB = 1 << 20
CORE = os.environ.get("VMMGRAPH_CORE_LIBRARY")
with_core = pytest.mark.skipif(not CORE, reason="SKIPPED: VMMGRAPH_CORE_LIBRARY names no library")

#: Trace, floor in MiB, maximum held bytes over the floor: as in tests/arena/trace.rs.
TRACES = [
    ("capture-trace-65", 1056, 1.01),
    ("capture-trace-llama-70b-tp8", 1432, 1.03),
    ("capture-trace-qwen3-0.6b", 453, 1.03),
    ("capture-trace-vision", 920, 1.03),
]

#: Opcodes known to the pickle reader of torch's MemoryViz.js; others are an "UNKNOWN OPCODE" error.
VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT",
    "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


def vmmgraph(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vmmgraph", *map(str, arguments)]
    given = {"input": ""} if "stdin" not in more and "input" not in more else {}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **given, **more)  # type: ignore[call-overload]


def output(*arguments: object, status: int = 0, **more: object) -> str:
    done = vmmgraph(*arguments, **more)
    assert (done.returncode, done.stderr) == (status, ""), done.stdout + done.stderr
    return done.stdout


def refused(*arguments: object, **more: object) -> str:
    done = vmmgraph(*arguments, **more)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert done.stderr.startswith("vmmgraph: ") and done.stderr.count("\n") == 1 and done.stderr.endswith("\n"), done.stderr
    return done.stderr


def refused_here(*arguments: object) -> str:
    """Like `refused`, in this process."""
    said, meant = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(meant):
        status = _cli.main([*map(str, arguments)])
    text = meant.getvalue()
    assert (status, said.getvalue()) == (2, "") and text.startswith("vmmgraph: ") and text.index("\n") == len(text) - 1, text
    return text


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Maps and numbers of all traces."""
    if not CORE:
        pytest.skip("SKIPPED: VMMGRAPH_CORE_LIBRARY names no library")
    folder = tmp_path_factory.mktemp("maps")
    for name in [*(name for name, *_ in TRACES), "capture-trace-65-retained"]:
        said = output("replay", DATA / f"{name}.txt", "--json", "--events", "all", "-o", folder / f"{name}.json")
        (folder / f"{name}.cost").write_text(said)
    return folder


def page_map(maps: Path, name: str = "capture-trace-65") -> dict:
    return json.loads((maps / f"{name}.json").read_text())


def held_by_the_c_functions(name: str) -> int:
    """By calling the C functions line by line."""
    library = _c.Library(Path(CORE), with_torch=False)
    device, arena, space, at = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    library.device_open(byref(_c.DeviceOptions(driver=2, host_memory_bytes=8 << 30)), byref(device))
    library.arena_create(device, None, byref(arena))
    spaces, blocks = [], {}
    for line in (DATA / f"{name}.txt").read_text().splitlines():
        match line.split():
            case ["shape", _, _]:
                if spaces:
                    library.space_seal(spaces[-1], 0, None)
                library.space_open(arena, byref(space))
                spaces.append(c_void_p(space.value))
            case ["a", block, size]:
                library.space_allocate(spaces[-1], int(size), None, byref(at))
                blocks[block] = at.value
            case ["f", block]:
                library.space_free(spaces[-1], blocks[block])
    library.space_seal(spaces[-1], 0, None)
    stats = _c.ArenaStats()
    library.arena_stats(arena, byref(stats))
    for each in spaces:
        library.space_destroy(each)
    library.arena_destroy(arena)
    library.device_close(device)
    return stats.physical_bytes


@with_core
@pytest.mark.parametrize(("name", "floor", "limit"), TRACES)
def test_replay_says_what_the_statistics_say(maps: Path, name: str, floor: int, limit: float) -> None:
    cost, drawn = json.loads((maps / f"{name}.cost").read_text()), page_map(maps, name)
    assert cost["floor_bytes"] // MIB == floor
    assert 1 <= cost["held_bytes"] / cost["floor_bytes"] <= limit
    assert cost["held_bytes"] == cost["most_held_bytes"] == held_by_the_c_functions(name)
    assert (cost["held_bytes"], cost["floor_bytes"]) == (drawn["held_bytes"], drawn["floor_bytes"])
    assert (cost["captures"], cost["peaks_bytes"]) == (len(drawn["spaces"]), drawn["apart_bytes"])
    assert cost["allocations"] == sum(space["allocations"] for space in drawn["spaces"])
    assert cost["private_bytes"] >= cost["peaks_bytes"] and cost["retained_bytes"] == 0
    largest = max(drawn["spaces"], key=lambda space: space["peak_live_bytes"])
    assert cost["largest"] == largest["label"]


def test_replay_of_65_is_what_was_measured(maps: Path) -> None:
    # tests/arena/trace.rs: computed by torch's rules; an H200 had 17154 MiB.
    cost = json.loads((maps / "capture-trace-65.cost").read_text())
    assert cost["private_bytes"] == 17152 * MIB and cost["floor_bytes"] == 1056 * MIB
    assert 1 <= cost["held_by_floor"] <= 1.006
    text = output("replay", DATA / "capture-trace-65.txt")
    assert "65 captures, 12193 allocations" in text and re.search(r"floor +1056\.0 MiB .*prefill 8192", text)
    assert re.search(r"private +17152\.0 MiB", text) and f"{cost['held_bytes'] / MIB:.1f} MiB" in text


def test_what_outlives_its_capture_costs_its_bytes_if_it_is_marked(maps: Path) -> None:
    trace = DATA / "capture-trace-65-retained.txt"
    cost = json.loads((maps / "capture-trace-65-retained.cost").read_text())
    marked = json.loads(output("replay", trace, "--kept", "--json"))
    assert cost["floor_bytes"] == marked["floor_bytes"] and cost["floor_bytes"] // MIB == 1088
    assert marked["held_bytes"] <= 1.03 * marked["floor_bytes"] and marked["retained_bytes"] == 0
    assert cost["retained_bytes"] >= 65 * 2 * MIB
    # One command writes both texts: the map compares with the largest shape, which is no floor.
    shown = output("report", maps / "capture-trace-65-retained.json")
    assert "x the largest shape (1056 MiB)" in shown and "floor" not in shown
    told = json.loads(output("replay", DATA / "capture-trace-65.txt", "--json", "--expected-bytes", "1056M"))
    assert told["held_bytes"] <= 1.035 * told["floor_bytes"]


def test_a_report_is_the_librarys_from_json_from_a_page_and_from_standard_input(maps: Path, tmp_path: Path) -> None:
    source = maps / "capture-trace-65.json"
    page = tmp_path / "graphs.html"
    assert output("map", source, "-o", page) == ""
    text = output("report", source)
    assert "65 shapes" in text and "prefill 8192" in text and text.count("\n") < 60
    assert output("report", page) == text == output("report", "-", input=source.read_text())
    assert output("report", env={**os.environ, "VMMGRAPH_MAP": str(page)}) == text
    html = page.read_text()
    assert (
        "<script" in html
        and "http://" not in html.replace("http://www.w3.org", "")
        and json.loads(_maps.parse(html.encode(), "page")[1])
    )
    here = tmp_path / "a.json"
    here.write_bytes(source.read_bytes())
    output("map", here)
    assert (tmp_path / "a.html").read_text() == html
    assert (tmp_path / "a.html").stat().st_mode & 0o777 == here.stat().st_mode & 0o777


def test_equal_maps_have_no_difference_and_another_run_is_none(maps: Path, tmp_path: Path) -> None:
    source, again = maps / "capture-trace-65.json", tmp_path / "again.html"
    assert output("diff", source, source) == ""
    output("replay", DATA / "capture-trace-65.txt", "-o", again)
    assert output("diff", source, again) == ""


def test_a_difference_names_shapes_pages_and_bytes(maps: Path, tmp_path: Path) -> None:
    lines = (DATA / "capture-trace-65.txt").read_text().split("shape ")
    without, changed = tmp_path / "trace.txt", tmp_path / "changed.json"
    without.write_text("shape ".join(each for each in lines if not each.startswith("p 8192\n")))
    output("replay", without, "-o", changed)
    before, after = page_map(maps), json.loads(changed.read_text())
    text = output("diff", maps / "capture-trace-65.json", changed, status=1)
    there = {space["label"]: space for space in before["spaces"]}
    gave = there["prefill 8192"]["drop_gives_bytes"]
    # As predicted by the map.
    assert gave == before["held_bytes"] - after["held_bytes"] > 0
    assert (
        f"- shape prefill 8192: peak 1056 MiB, retained 0 MiB, mapped {there['prefill 8192']['mapped_bytes'] // MIB} MiB" in text
    )
    assert f"~ held {before['held_bytes'] // MIB} MiB -> {after['held_bytes'] // MIB} MiB (-{gave // MIB} MiB)" in text
    gone = re.findall(r"^- pages: large .* each, (\d+) MiB in all$", text, re.MULTILINE)
    assert sum(map(int, gone)) == gave // MIB and "+ " not in text.replace("+ -", "")
    back = output("diff", changed, maps / "capture-trace-65.json", status=1)
    assert "+ shape prefill 8192" in back and f"(+{gave // MIB} MiB)" in back and "- shape" not in back


def test_shapes_of_one_name_are_told_apart() -> None:
    spaces = [{"label": label} for label in ("a", "a #2", "a", "a", None, None, "b\n", "shape #1", "shape")]
    wanted = ["a", "a #2", "a #3", "a #4", "shape #1", "shape #2", "b", "shape #1 #2", "shape"]
    assert _maps.names({"spaces": spaces}) == wanted
    assert _maps.mib(3 * MIB) == "3 MiB" and _maps.mib(MIB + 1) == "1.0 MiB" and _maps.mib(512) == "512 bytes"


def look(snapshot: dict) -> tuple[int, list[int]]:
    """Walks a snapshot like memory_viz. Returns the peak of live bytes and the blocks live at the
    end."""
    (device,) = {segment["device"] for segment in snapshot["segments"]}
    trace = snapshot["device_traces"][device]
    assert all(not others for number, others in enumerate(snapshot["device_traces"]) if number != device)
    segments = sorted((each["address"], each["address"] + each["total_size"]) for each in snapshot["segments"])
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(segments)) and segments[-1][1] < 1 << 53
    within = {}
    for low, high in segments:
        within[low] = high
    starts = sorted(within)

    def on_one_page(address: int, size: int) -> bool:
        import bisect

        low = starts[bisect.bisect_right(starts, address) - 1]
        return low <= address and address + size <= within[low]

    live: dict[int, int] = {}
    most = now = 0
    for entry, behind in zip(trace, [*trace[1:], None], strict=True):
        address, size = entry["addr"], entry["size"]
        assert size > 0 and on_one_page(address, size) and entry["stream"] == 0
        assert set(entry["frames"][0]) == {"filename", "line", "name"}
        match entry["action"]:
            case "alloc":
                assert address not in live
                live[address] = size
                now += size
                most = max(most, now)
            case "free_requested":
                assert (behind["action"], behind["addr"], behind["size"]) == ("free_completed", address, size)
            case "free_completed":
                assert live.pop(address) == size
                now -= size
    at_end: dict[int, int] = {}
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            if block["state"] == "active_allocated":
                at_end[at] = block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        used = sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
        assert used == segment["allocated_size"] == segment["active_size"] == segment["requested_size"]
    assert at_end == live
    return most, sorted(live.values())


def overlaps(trace: list[dict]) -> int:
    import bisect

    live: list[tuple[int, int]] = []
    found = 0
    for entry in trace:
        block = (entry["addr"], entry["addr"] + entry["size"])
        if entry["action"] == "alloc":
            at = bisect.bisect_left(live, block)
            found += at > 0 and live[at - 1][1] > block[0]
            found += at < len(live) and live[at][0] < block[1]
            live.insert(at, block)
        elif entry["action"] == "free_completed":
            live.remove(block)
    return found


@pytest.mark.parametrize("events", ["all", "largest", "none"])
@pytest.mark.parametrize("name", ["capture-trace-65", "capture-trace-65-retained", "capture-trace-vision"])
def test_a_torch_snapshot_has_each_page_once_and_each_block_on_its_page(
    maps: Path, tmp_path: Path, name: str, events: str
) -> None:
    source, out = tmp_path / "map.json", tmp_path / "map.pickle"
    kept = ["--kept"] if events == "largest" else []
    if events == "all":
        source.write_bytes((maps / f"{name}.json").read_bytes())
    else:
        output("replay", DATA / f"{name}.txt", "-o", source, "--events", events, *kept)
    done = vmmgraph("export", "--torch-snapshot", source)
    assert done.returncode == 0 and done.stdout == "" and ("at its peak" in done.stderr) == (events == "none")
    data = out.read_bytes()
    snapshot, drawn = _files.load(data, "ours", "snapshot"), json.loads(source.read_text())
    assert {opcode.name for opcode, *_ in pickletools.genops(data)} <= VIEWER and data[:2] == b"\x80\x04"
    most, left = look(snapshot)
    assert len(snapshot["segments"]) == len(drawn["pages"])
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == drawn["held_bytes"]
    assert {segment["segment_pool_id"] for segment in snapshot["segments"]} == {(0, drawn["arena"])}
    # The plotted peak is the floor plus retained memory; shared bytes count once.
    floor = json.loads((maps / f"{name}.cost").read_text())["floor_bytes"]
    own = sum(space["retained_bytes"] > 0 or bool(space["kept"]) for space in drawn["spaces"])
    if events == "all" or not name.endswith("retained"):
        assert most == drawn["floor_bytes"] if own == 0 else drawn["floor_bytes"] <= most <= floor
    if own == 0:
        assert not left
    elif events != "none":
        # A shape's peak may precede its output.
        assert len(left) >= own
    assert overlaps(snapshot["device_traces"][0]) == 0
    labels = {entry["frames"][0]["filename"] for entry in snapshot["device_traces"][0]}
    assert labels == {space["label"] for space in drawn["spaces"]}
    categories = [entry["category"] for entry in snapshot["device_traces"][0] if "category" in entry]
    assert not categories or "unknown" in categories


def test_blocks_over_two_pages_are_two_and_lie_where_the_page_is(tmp_path: Path) -> None:
    tile = {"covered_bytes": 0}
    pages = [{"class": "large", "number": n, "bytes": 4096, "owner": None, "address": None, "spaces": 1} for n in (3, 0)]
    space = {
        "id": 7, "label": "x", "kept": [], "kept_pages": [], "blocks": [],
        "maps": [{"page": 0, "address": 0x10000, **tile}, {"page": 1, "address": 0x11000, **tile}],
        "events": [
            {"allocation": 1, "address": 0x10800, "bytes": 4096, "begin": 0, "end": 2},
            {"allocation": 2, "address": 0x11800, "bytes": 1024, "begin": 1, "end": None},
            {"allocation": 3, "address": 0x10800, "bytes": 512, "begin": 3, "end": 4},
            {"allocation": 4, "address": 0x20000, "bytes": 512, "begin": 5, "end": 6},
        ],
    }  # fmt: skip
    drawn = {"arena": 9, "device": 2, "pages": pages, "spaces": [space]}
    snapshot, lost = _snapshot.snapshot(drawn)
    base = 1 << 44
    found = [(each["action"], each["addr"] - base, each["size"]) for each in snapshot["device_traces"][2]]
    assert found[:3] == [("alloc", 3 * 4096 + 0x800, 2048), ("alloc", 0, 2048), ("alloc", 0x800, 1024)]
    # Freed with its capture, because other users share its page.
    assert found[-1] == ("free_completed", 0x800, 1024) and lost == 512 and look(snapshot) == (5120, [])
    assert {len(each["frames"]) for each in snapshot["device_traces"][2]} == {1}
    for site, file, line in (("engine/run.py:12", "engine|run.py", 12), ("somewhere", "somewhere", 0), ("a:b", "a:b", 0)):
        space["site"] = site
        frames = _snapshot.snapshot(drawn)[0]["device_traces"][2][0]["frames"]
        assert frames[1:] == [{"filename": file, "line": line, "name": "capture"}] and frames[0]["filename"] == "x"
    pages[1]["class"] = "own"
    snapshot, _ = _snapshot.snapshot(drawn)
    assert look(snapshot) == (5120, [1024])
    space["events"][1]["end"] = None
    space["events"][2]["begin"], space["events"][2]["end"] = 1, None
    with pytest.raises(_files.Unfit, match="two live blocks"):
        _snapshot.snapshot(drawn)


def test_perfetto_is_the_librarys(maps: Path, tmp_path: Path) -> None:
    out = tmp_path / "line.json"
    output("export", "--perfetto", maps / "capture-trace-65.json", "-o", out)
    slices = [event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert slices == [space["label"] for space in page_map(maps)["spaces"]]
    assert output("export", "--perfetto", maps / "capture-trace-65.json", "-o", "-") == out.read_text()


# --- torch snapshots


def snapshot_of(
    name: str, pools: str = "own", labels: bool = False, warm_up: bool = False, gap_us: int = 10, completed: bool = True
) -> dict:
    """Simulates torch's history. `completed`: frees complete at once, otherwise at the end of the
    capture."""
    history: list[dict] = []
    segments: dict[tuple[int, int], list[int]] = {}
    free: dict[tuple, list[int]] = {}
    top, clock = 0x7F00_0000_0000, 0

    def note(action: str, address: int, size: int, label: str = "") -> None:
        nonlocal clock
        clock += 10
        history.append(
            {"action": action, "addr": address, "size": size, "stream": 5, "time_us": clock, "frames": [], "user_metadata": label}
        )

    for number, capture in enumerate(_traces.read((DATA / f"{name}.txt").read_bytes(), name).captures):
        pool = (number + 1, 0) if pools == "own" else (0, 1)
        label = capture.label if labels else ""
        clock += gap_us
        if warm_up:
            note("alloc", 0x6F00_0000_0000, 512)
            note("free_requested", 0x6F00_0000_0000, 512)
            note("free_completed", 0x6F00_0000_0000, 512)
        live, waiting = {}, []
        for block, size in capture.steps:
            if size >= 0:
                spare = free.setdefault((pool, size), [])
                live[block] = (spare.pop() if spare else top, size)
                if live[block][0] == top:
                    segments.setdefault(pool, [top, top])
                    top += -(-size // 512) * 512
                    segments[pool][1] = top
                note("alloc", *live[block], label)
            else:
                address, size = live.pop(block)
                note("free_requested", address, size, label)
                if completed:
                    note("free_completed", address, size, label)
                    free[pool, size].append(address)
                else:
                    waiting.append((address, size))
        for address, size in waiting:
            note("free_completed", address, size, label)
            free[pool, size].append(address)
    there = [
        {"device": 0, "address": low, "total_size": high - low, "segment_pool_id": pool, "blocks": [], "stream": 5}
        for pool, (low, high) in segments.items()
    ]
    return {"segments": there, "device_traces": [history, []], "allocator_settings": {}}


def save(path: Path, value: object) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=4))
    return path


WAYS = {
    "a pool each": ({}, []),
    "labels in one pool": ({"pools": "one", "labels": True}, []),
    "warm-ups in one pool": ({"pools": "one", "warm_up": True}, []),
    "gaps in one pool": ({"pools": "one", "gap_us": 50_000}, ["--gap-ms", "20"]),
    "pools where labels lie": ({"labels": True}, ["--split", "pool"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_torch_snapshot_costs_what_its_captures_cost(maps: Path, tmp_path: Path, way: str) -> None:
    given, options = WAYS[way]
    snapshot = snapshot_of("capture-trace-vision", **given)
    said = json.loads(output("replay", save(tmp_path / "s.pickle", snapshot), "--json", *options))
    cost = json.loads((maps / "capture-trace-vision.cost").read_text())
    assert said.pop("recorded_bytes") == sum(each["total_size"] for each in snapshot["segments"])
    assert "snapshot of device 0" in said.pop("source")
    for names in ("source", "recorded_bytes"):
        cost.pop(names)
    if "labels" not in given or options:
        said["largest"] = cost["largest"]
    assert said == cost


def test_one_pool_without_a_sign_is_one_capture_and_pools_can_be_all(tmp_path: Path) -> None:
    path = save(tmp_path / "s.pickle", snapshot_of("capture-trace-vision", pools="one"))
    with path.open("rb") as file:
        trace = _traces.read(file.read(), "s")
    assert len(trace.captures) == 1
    snapshot = snapshot_of("capture-trace-vision", pools="one")
    for segment in snapshot["segments"]:
        segment["segment_pool_id"] = (0, 0)
    assert "--pools all" in refused("replay", save(path, snapshot)) if CORE else True
    assert len(_traces.read(path.read_bytes(), "s", pools="all").captures) == 1
    # Newer torch records pools, also of freed segments.
    snapshot["device_traces"][0][0]["segment_pool_id"] = (3, 0)
    assert _traces.from_snapshot(snapshot, "s").captures[0].steps == [(0, snapshot["device_traces"][0][0]["size"]), (0, -1)]


def test_frees_that_wait_for_a_stream_and_frees_after_the_capture() -> None:
    def entry(action: str, address: int, size: int = 1024) -> dict:
        return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0}

    segments = [{"device": 0, "address": 0, "total_size": 1 << 20, "segment_pool_id": (0, 1)}, ]  # fmt: skip
    warm_up = entry("alloc", 1 << 40)
    events = [
        entry("alloc", 0), entry("free_requested", 0), entry("alloc", 4096), entry("alloc", 8192), entry("free_requested", 4096),
        entry("free_completed", 4096), warm_up, entry("alloc", 16384), entry("free_completed", 0), entry("free", 8192),
        entry("alloc", 16384), entry("oom", 0), {"action": "snapshot"},
    ]  # fmt: skip
    trace = _traces.from_snapshot({"segments": segments, "device_traces": [events]}, "s")
    # The third outlives its capture; the last reuses an address without a recorded free.
    assert [capture.steps for capture in trace.captures] == [
        [(0, 1024), (1, 1024), (2, 1024), (1, -1), (0, -1)],
        [(3, 1024), (2, -1), (3, -1), (4, 1024)],
    ]
    assert "1 frees" in trace.notes[0]
    assert _replay.floors(trace) == (3072 - 1024 + 2048, 0, 3072 + 1024, 2048)


def test_addresses_that_were_of_other_segments_before() -> None:
    def entry(action: str, address: int, size: int = 1024) -> dict:
        return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0}

    # The driver gave a freed eager segment's addresses to the graphs' pool.
    segments = [{"device": 0, "address": 0, "total_size": 1 << 20, "segment_pool_id": (0, 1)}]
    events = [
        entry("segment_alloc", 0, 2 << 20), entry("alloc", 0), entry("alloc", 4096), entry("free_completed", 0), entry("free_completed", 4096),
        entry("segment_free", 0, 2 << 20), entry("segment_alloc", 0, 1 << 20), entry("alloc", 0), entry("free_completed", 0),
    ]  # fmt: skip
    (capture,) = _traces.from_snapshot({"segments": segments, "device_traces": [events]}, "s").captures
    assert capture.steps == [(0, 1024), (0, -1)]
    # Without a recorded allocation, a segment existed throughout.
    rest = [each for each in events if not each["action"].startswith("segment")]
    (capture,) = _traces.from_snapshot({"segments": segments, "device_traces": [rest]}, "s").captures
    assert len(capture.steps) == 6


def test_a_torch_pool_reuses_splits_and_merges() -> None:
    pool = _replay.TorchPool()
    pool.allocate(0, 3 * MIB)
    pool.allocate(1, 3 * MIB)
    assert pool.reserved_bytes == 20 * MIB
    pool.allocate(2, 12 * MIB)
    assert pool.reserved_bytes == 20 * MIB
    pool.allocate(3, 5 * MIB)
    assert pool.reserved_bytes == 40 * MIB
    pool.free(0)
    pool.free(2)
    pool.free(1)
    # 18 MiB in one piece and the 2 MiB after it.
    pool.allocate(4, 20 * MIB)
    assert pool.reserved_bytes == 40 * MIB
    pool.allocate(5, 100)
    pool.allocate(6, 31 * MIB)
    assert pool.reserved_bytes == (40 + 2 + 32) * MIB


# --- invalid files


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = save(tmp_path / "evil.pickle", {"device_traces": [[Runs(f"touch {mark}")]], "segments": []})
    assert "posix.system" in refused("replay", path)
    # The old opcode for globals, and persistent references.
    path.write_bytes(b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00trueRtR.")
    assert "os.system" in refused("replay", path)
    path.write_bytes(b"\x80\x02(X\x04\x00\x00\x00trueios\nsystem\n.")
    assert "os.system" in refused("replay", path)
    path.write_bytes(b"\x80\x02X\x01\x00\x00\x00aQ.")
    assert "persistent" in refused("replay", path)
    assert not mark.exists()


def test_a_pickle_that_wants_the_machines_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.pickle"
    path.write_bytes(b"\x80\x02Nr\xff\xff\xff\xff.")
    assert "more memory" in refused("replay", path)
    path.write_bytes(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.")
    done = vmmgraph("replay", path)
    # Python 3.11 prints its own message.
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.endswith("does\n")


def test_damaged_pickles_are_refused_or_read() -> None:
    good = pickle.dumps(
        {"device_traces": [[{"action": "alloc", "addr": 1 << 40, "size": 512}]], "segments": [(1, None, True, 0.5, "x")]}, 4
    )
    chance = random.Random(7)
    refusals = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(1, len(data))] = chance.randrange(256)
        try:
            _traces.read(bytes(data), "damaged")
        except _files.Unfit as error:
            assert str(error).startswith("damaged ")
            refusals += 1
    assert refusals > 2000


def test_broken_files_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "file\x1b[2Jwith a\nname"
    commands = (
        ["report"],
        ["map", "-o", tmp_path / "out.html"],
        ["export", "--torch-snapshot", "-o", tmp_path / "out"],
        ["diff", path],
    )
    wrong = {
        b"": "no page map", b"{": "no page map", b"[1]": "no format", b'{"format": 2}': "format 2", b'{"format": 1}': "pages",
        b'{"format": 1, "pages": [], "spaces": [{"id": 1, "maps": [{"page": -1}], "kept_pages": []}]}': "page -1",
        b'{"format": 1, "pages": [], "spaces": 3}': "no page map", b"<html></html>": "without a map", b"\xff\xfe\x00": "no page map",
        b'{"format": 1, "x": ' + b"[" * 200_000: "deep", b'{"format": ' + b"9" * 10_000 + b"}": "no page map",
    }  # fmt: skip
    for data, why in wrong.items():
        path.write_bytes(data)
        for command in commands:
            assert why in refused_here(*command, path), (data[:60], command)
    assert sorted(tmp_path.iterdir()) == [path]
    for command in (["report"], ["map"], ["diff", tmp_path / "nothing"], ["export", "--perfetto"], ["replay"]):
        assert "No such file" in refused_here(*command, tmp_path / "nothing")
    for command in (["report"], ["map"], ["diff", tmp_path], ["export", "--perfetto"], ["replay"]):
        assert "directory" in refused_here(*command, tmp_path)
    path.write_bytes(b"{")
    assert "no page map" in refused("report", path) and "No such file" in refused("diff", tmp_path / "nothing", path)
    assert "cannot read two maps" in refused_here("diff", "-", "-")


@with_core
def test_what_the_library_refuses_is_one_line_too(maps: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    for change in ({"held_bytes": -1}, {"pages": [], "spaces": [], "curve": [{}]}, {"device": "x"}):
        path.write_text(json.dumps({**page_map(maps), **change}))
        for command in (["report"], ["map"], ["export", "--perfetto"], ["export", "--torch-snapshot"]):
            assert "vmmgraph: " in refused_here(*command, path)
    drawn = page_map(maps)
    drawn["pages"][0]["number"] = 1 << 60
    path.write_text(json.dumps(drawn))
    assert "no place" in refused_here("export", "--torch-snapshot", path)
    assert "it is also the input" in refused_here("map", maps / "capture-trace-65.json", "-o", maps / "capture-trace-65.json")
    assert "No such file" in refused_here("map", maps / "capture-trace-65.json", "-o", tmp_path / "no" / "folder.html")
    assert "pass -o" in refused("map", "-", input=(maps / "capture-trace-65.json").read_text())
    assert "neither in .json nor in .html" in refused_here(
        "replay", DATA / "capture-trace-vision.txt", "-o", tmp_path / "out.txt"
    )


def test_broken_traces_and_snapshots_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    wrong = {
        b"": "no captures", b"# only words\n": "no captures", b"a 0 512\n": ":1:", b"shape d 1\na 0 x": ":2:", b"shape d 1\nf 3": ":2:",
        b"shape d 1\na 0 1\na 0 1": ":3:", b"shape d 1\na 0 0": ":2:", b"shape d\n": ":1:", b"\x00\xff" * 999: ":1:",
        b"\x80\x04": "no pickle", b"\x80\x04N.": "no snapshot", b"\x80\x04]\x94.": "no snapshot", b"\x80\xff.": "no pickle",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f": "is", b"\x80\x04h\x00.": "no pickle", b"\x80\x04(((((.": "is",
    }  # fmt: skip
    for data, why in wrong.items():
        path.write_bytes(data)
        assert why in refused_here("replay", path), data[:40]
    good = snapshot_of("capture-trace-vision")
    for change, why in (
        ({"device_traces": [[], []]}, "no history"),
        ({"device_traces": None}, "no snapshot"),
        ({"device_traces": [[{"action": "alloc"}]]}, "no snapshot"),
        ({"segments": [{"address": "x"}]}, "graph's pool"),
        ({"segments": [{"address": "x", "total_size": 1, "segment_pool_id": (1, 0)}]}, "no snapshot"),
    ):
        assert why in refused_here("replay", save(path, {**good, **change}))
    good["device_traces"][0][0]["size"] = -5
    assert "-5" in refused_here("replay", save(path, good))
    assert "no 7" in refused_here("replay", save(path, good), "--device", 7)
    assert "--split" in refused_here("replay", DATA / "capture-trace-vision.txt", "--split", "pool")


#: Not addresses, sizes or times.
BEYOND = (10**400, -(10**400), 1 << 65, float("inf"), float("nan"))


@pytest.mark.parametrize("number", BEYOND)
def test_numbers_beyond_a_float_are_refused_wherever_they_stand(tmp_path: Path, number: float) -> None:
    """The sum raised a traceback."""
    good = snapshot_of("capture-trace-vision")
    entry, segment = good["device_traces"][0][0], good["segments"][0]
    changes: list[tuple[dict, object]] = [(segment, "total_size"), (segment, "address"), (entry, "size"), (entry, "addr")]
    changes += [(entry, "time_us"), (entry, "user_metadata"), (good, "unknown"), (good, number)]
    for where, key in changes:
        before = dict(where)
        where[key] = number
        said = refused_here("replay", save(tmp_path / "s.pickle", good), "--gap-ms", 1)
        assert "is refused: it holds" in said, (key, said)
        where.clear()
        where.update(before)
    wrong = {"format": 1, "pages": [], "spaces": [], "held_bytes": [{"deep": number}]}
    (tmp_path / "map.json").write_text(json.dumps(wrong))
    for command in (
        ["report"],
        ["map"],
        ["diff", tmp_path / "map.json"],
        ["export", "--torch-snapshot"],
        ["export", "--perfetto"],
    ):
        assert "is refused: it holds" in refused_here(*command, tmp_path / "map.json")


def test_values_that_contain_themselves_are_read_once(tmp_path: Path) -> None:
    """The check of numbers must end."""
    within: list = [1]
    within += [within, {"x": within}, (within,)]
    assert "no snapshot" in refused_here("replay", save(tmp_path / "s.pickle", within))
    within.append(1 << 70)
    assert "71 bits" in refused_here("replay", save(tmp_path / "s.pickle", within))


def test_a_block_larger_than_the_library_takes_is_refused(tmp_path: Path) -> None:
    """2^64 + 512 bytes became 512 in C."""
    trace = tmp_path / "trace"
    for size in ((1 << 64) + 512, (1 << 46) + 1):
        trace.write_text(f"shape d 1\na 0 {size}\n")
        assert ":2:" in refused_here("replay", trace)
    snapshot = snapshot_of("capture-trace-vision")
    snapshot["device_traces"][0][0]["size"] = (1 << 46) + 1
    assert "an allocation of" in refused_here("replay", save(trace, snapshot))


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pickle", snapshot_of("capture-trace-vision"))
    for command in (["report"], ["map"], ["diff", path], ["export", "--torch-snapshot"], ["export", "--perfetto"]):
        assert "x.pickle is no page map: it is a pickle; vmmgraph replay reads torch's memory snapshots" in refused_here(
            *command, path
        )
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for value in ({"segments": ["\xff\u1234"]}, ["\xe4"], ("\xe4", 1), {}):
            path.write_bytes(pickle.dumps(value, protocol=protocol))
            assert "is no page map: it is a pickle; " in refused_here("report", path)
    for data, why in (
        (b'{"format": \xff}', "byte 11 is no UTF-8 text"),
        (b"\x7fELF\x02\xff", "byte 5 is no UTF-8 text"),
        (b'{"format": 1,\n oops}', "line 2, column 2 is no JSON (Expecting property name enclosed in double quotes)"),
        (b"", "line 1, column 1 is no JSON (Expecting value)"),
    ):
        path.write_bytes(data)
        assert refused_here("report", path) == f"vmmgraph: {path} is no page map: {why}\n"


#: An escape, a C1 control, a change of direction, and line ends.
OBEYED = "\x1b[2J\x9b31m\u202e\r\n\x07"


def hostile_map(title: str = "x") -> dict:
    sums = dict.fromkeys(("peak_live_bytes", "live_bytes", "kept_bytes", "retained_bytes", "shown_bytes", "mapped_bytes"), 0)
    space = {
        "id": 1, "label": f"a{OBEYED}b{title}", "maps": [], "kept_pages": [], "phase": f"p{OBEYED}{title}", "allocations": 1,
        "alone_bytes": 0, "drop_gives_bytes": 0, **sums,
    }  # fmt: skip
    page = {"class": f"class{OBEYED}{title}", "number": 0, "bytes": 512}
    holder = {"kind": f"kind{OBEYED}", "name": title, "pages": 1, "bytes": 512}
    return {"format": 1, "pages": [page], "spaces": [space], "holders": [holder]}


def test_what_diff_prints_is_nothing_that_a_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one, two = tmp_path / f"one{OBEYED[:4]}.json", tmp_path / "two.json"
    one.write_text(json.dumps(hostile_map("before")))
    two.write_text(json.dumps({**hostile_map("after"), "held_bytes": 1}))
    assert _cli.main(["diff", str(one), str(two)]) == 1
    printed = capsys.readouterr().out
    lines = printed.split("\n")
    assert len(lines) == 8 and all(line.isprintable() for line in lines), printed
    assert sum("before" in line or "after" in line for line in lines) == 6


def test_what_the_streams_encoding_lacks_is_printed_as_an_escape(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(hostile_map("\u00e9")))
    two.write_text(json.dumps(hostile_map("e")))
    said = output("diff", one, two, status=1, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "b\\xe9: peak" in said


@with_core
def test_no_command_prints_what_a_terminal_obeys(maps: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    drawn = page_map(maps, "capture-trace-vision")
    drawn["title"] = drawn["spaces"][0]["label"] = f"vision{OBEYED}!"
    (tmp_path / "map.json").write_text(json.dumps(drawn))
    assert _cli.main(["report", str(tmp_path / "map.json")]) == 0
    snapshot = snapshot_of("capture-trace-vision", labels=True)
    for entry in snapshot["device_traces"][0]:
        entry["user_metadata"] = f"vision{OBEYED}!"
    assert _cli.main(["replay", str(save(tmp_path / "s.pickle", snapshot))]) == 0
    printed = capsys.readouterr().out
    assert printed.count("vision") >= 3 and all(line.isprintable() for line in printed.split("\n")), printed


@with_core
def test_maps_with_one_thing_wrong_are_refused_or_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("shape d 1\na 0 4096\na 1 99999999\nf 0\na 2 512\nf 1\nshape p 2\na 0 5000000\na 1 512\nf 0\n")
    output("replay", trace, "-o", tmp_path / "map.json", "--events", "all")
    text = (tmp_path / "map.json").read_text()
    good, chance = json.loads(text), random.Random(11)
    strange = (None, True, -1, 1 << 70, 0.5, "x", "", [], {}, [None], {"page": 0}, 0, 1 << 44)
    refusals = 0
    for _ in range(1500):
        bad = json.loads(text)
        at = bad
        while True:
            key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], (dict, list)) or not at[key] or chance.random() < 0.1:
                break
            at = at[key]
        if chance.random() < 0.2:
            del at[key]
        else:
            at[key] = chance.choice(strange)
        try:
            with _files.reading("map", "map"):
                drawn, _ = _maps.parse(json.dumps(bad).encode(), "map")
                _maps.diff(good, drawn)
                _snapshot.dumps(_snapshot.snapshot(drawn)[0])
        except _files.Unfit:
            refusals += 1
    assert 300 < refusals < 1500


@with_core
def test_more_than_can_be_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"shape d 1\na 0 {1 << 45}\n")
    assert "trace: " in refused("replay", path)


def test_without_a_library_and_with_a_wrong_one(tmp_path: Path) -> None:
    wrong = tmp_path / "libvmmgraph.so"
    trace = DATA / "capture-trace-vision.txt"
    assert "does not exist" in refused("replay", trace, env={**os.environ, "VMMGRAPH_CORE_LIBRARY": str(wrong)})
    wrong.write_text("no library")
    assert str(wrong) in refused("replay", trace, env={**os.environ, "VMMGRAPH_CORE_LIBRARY": str(wrong)})
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    assert "no libvmmgraph.so" in refused("replay", trace, env={**os.environ, "VMMGRAPH_CORE_LIBRARY": libc})


@with_core
@pytest.mark.parametrize(
    "command", [["report"], ["map", "-o", "-"], ["export", "--perfetto", "-o", "-"], ["export", "--torch-snapshot", "-o", "-"]]
)
def test_a_reader_that_goes_is_no_traceback(maps: Path, command: list[str]) -> None:
    arguments = [sys.executable, "-m", "vmmgraph", command[0], *command[1:], str(maps / "capture-trace-65.json")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(arguments, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_console_script_and_what_it_prints(capsys: pytest.CaptureFixture) -> None:
    code = "import sys; sys.argv = ['vmmgraph', '--version']; from vmmgraph.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("vmmgraph ") and (not CORE or f"({CORE})" in done.stdout)
    assert output("--version") == done.stdout
    everything = output("--help")
    for command in ("report", "map", "diff", "export", "doctor", "replay"):
        assert command in everything
        with pytest.raises(SystemExit):
            _cli.main([command, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: vmmgraph {command}")
    for wrong in ([], ["no-such"], ["export", "map.json"], ["replay", "x", "--expected-bytes", "-1"]):
        done = vmmgraph(*wrong)
        assert done.returncode == 2 and done.stderr.startswith("usage: vmmgraph") and "Traceback" not in done.stderr


@pytest.mark.parametrize(("option", "folder"), [("--cmake-dir", "_lib/cmake/VmmGraph"), ("--include-dir", "include")])
def test_folders_for_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture, option: str, folder: str
) -> None:
    monkeypatch.setattr(_package, "_HERE", tmp_path)
    assert _cli.main([option]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        _cli.main([option])
    assert not ended.value.code and capsys.readouterr().out == f"{tmp_path / folder}\n"


def test_progress_is_for_terminals_and_for_long_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        progress = _progress.Progress()
        progress("at once")
        now[0] += 1
        progress("capture \x1b[31m 1")
        progress("too soon")
        progress.end()
        assert capsys.readouterr().err == ("\r\033[Kcapture  [31m 1\r\033[K" if terminal else "")


HISTOGRAM = """{"vmmgraph_histogram": 1, "shapes": [
{"mode": "full", "variant": 1, "extents": [8, 8, 0, 0], "steps": 1200},
{"mode": "full", "variant": 1, "extents": [16, 16, 0, 0], "steps": 10},
{"mode": "full", "variant": 1, "extents": [32, 32, 0, 0], "steps": 0},
{"mode": "piecewise", "variant": 0, "extents": [512, 0, 0, 0], "steps": 300}]}"""


@with_core
def test_a_plan_names_the_graphs_worth_capturing_most_used_first(tmp_path: Path) -> None:
    path = tmp_path / "histogram.json"
    path.write_text(HISTOGRAM)
    everything = output("plan", path).splitlines()
    assert [line.split()[0:3:2] for line in everything[1:-1]] == [["full", "8"], ["piecewise", "512"], ["full", "16"]]
    assert everything[-1].startswith("3 graphs, 3 MiB at 1 MiB each, run 1510 of 1510 steps; the traffic had 3 shapes")
    two = json.loads(output("plan", path, "--budget", "2M", "--json"))
    assert [(one["mode"], one["extents"][0], one["steps"]) for one in two] == [("full", 16, 1210), ("piecewise", 512, 300)]
    assert two[0]["padding"] == 1200 * 8
    assert json.loads(output("plan", path, "--graphs", "2", "--json")) == two
    assert json.loads(output("plan", "-", "--budget", "8M", "--graph-bytes", "4M", "--json", input=HISTOGRAM)) == two
    nothing = output("plan", path, "--budget", "1", "--graph-bytes", "2M")
    assert "0 graphs" in nothing and "run 0 of 1510 steps" in nothing


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"vmmgraph_histogram": 2, "shapes": []}',
        '{"vmmgraph_histogram": 1, "shapes": [{"mode": "eager", "variant": 0, "extents": [1, 0, 0, 0], "steps": 1}]}',
        '{"vmmgraph_histogram": 1, "shapes": [{"mode": "full", "variant": 0, "extents": [1, 0, 0], "steps": 1}]}',
        '{"vmmgraph_histogram": 1, "shapes": [{"mode": "full", "variant": 0, "extents": [-1, 0, 0, 0], "steps": 1}]}',
        '{"vmmgraph_histogram": 1, "shapes": [{"mode": "full", "variant": 0, "extents": [1, 0, 0, 0], "steps": -1}]}',
    ],
)
def test_what_is_no_histogram_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "histogram.json"
    path.write_text(text)
    said = refused("plan", path)
    assert str(path) in said and "KeyError" not in said


def test_limits_of_a_plan_are_natural_numbers(tmp_path: Path) -> None:
    assert vmmgraph("plan", tmp_path, "--graphs", "-1").returncode == 2
