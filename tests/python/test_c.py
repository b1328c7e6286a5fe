"""The ctypes declarations, compared with the C headers and with a library over the host driver.

VMMGRAPH_CORE_LIBRARY names the library; scripts/test.sh sets it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from ctypes import byref, c_void_p
from pathlib import Path

import pytest
from vmmgraph import _c

INCLUDE = Path(__file__).resolve().parents[2] / "include" / "vmmgraph"
TYPES = {
    "vmmgraph_peer_page_t": c_void_p,
    "vmmgraph_account_t": c_void_p,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
    "int32_t": ctypes.c_int32,
}
STRUCTS = {
    "vmmgraph_device_options_t": _c.DeviceOptions,
    "vmmgraph_arena_options_t": _c.ArenaOptions,
    "vmmgraph_arena_stats_t": _c.ArenaStats,
    "vmmgraph_seal_report_t": _c.SealReport,
    "vmmgraph_page_extent_t": _c.PageExtent,
    "vmmgraph_peer_extent_t": _c.PeerExtent,
    "vmmgraph_output_t": _c.Output,
    "vmmgraph_difference_t": _c.Difference,
    "vmmgraph_torch_graph_t": _c.Graph,
    "vmmgraph_torch_captured_t": _c.Captured,
    "vmmgraph_torch_executables_t": _c.Executables,
    "vmmgraph_map_options_t": _c.MapOptions,
}


@pytest.fixture(scope="module")
def headers() -> str:
    text = "".join((INCLUDE / name).read_text() for name in ("vmmgraph.h", "torch_c.h"))
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_is_the_headers(headers: str, name: str) -> None:
    body = re.search(rf"typedef struct {name} \{{(.*?)\}}", headers, re.DOTALL)[1]
    declared = []
    for line in filter(None, (part.strip() for part in body.split(";"))):
        kind, field = re.match(r"(?:const )?(?:struct )?(\w+ ?\*?) ?\*?(\w+)$", line).groups()
        declared.append((field, c_void_p if "*" in line else TYPES[kind.strip()]))
    given = [(field, c_void_p if kind is ctypes.c_char_p else kind) for field, kind in STRUCTS[name]._fields_]
    assert given == declared


def test_every_function_is_declared_with_as_many_arguments(headers: str) -> None:
    for name, arguments in {**_c._CORE, **_c._TORCH}.items():
        found = re.search(rf"\b{name}\(([^)]*)\)", headers)
        assert found, name
        given = [one for one in found[1].split(",") if one.strip() not in ("", "void")]
        assert len(given) == len(arguments), name


def test_numbers_are_the_headers(headers: str) -> None:
    numbers = dict(re.findall(r"#define VMMGRAPH_(\w+) (\d+)", headers))
    assert int(numbers["ABI_VERSION"]) == _c.ABI_VERSION
    assert int(numbers["ERROR_WRONG_STATE"]) == _c.WRONG_STATE
    assert int(numbers["ERROR_INTERNAL"]) == _c.INTERNAL
    assert {name.lower(): int(numbers["RETAIN_" + name.upper()]) for name in _c.RETAIN} == _c.RETAIN
    assert {name: int(numbers["SHARING_" + name.upper()]) for name in _c.SHARING} == _c.SHARING
    # All flags of the header, to detect new ones.
    assert {name[6:].lower(): int(number) for name, number in numbers.items() if name.startswith("ARENA_")} == _c.FLAGS
    assert int(numbers["ERROR_OUT_OF_MEMORY"]) == _c.OUT_OF_MEMORY.start
    assert int(numbers["ERROR_OUT_OF_HOST_MEMORY"]) == _c.OUT_OF_MEMORY.stop - 1


@pytest.fixture
def library() -> _c.Library:
    path = os.environ.get("VMMGRAPH_CORE_LIBRARY")
    if not path:
        pytest.skip("SKIPPED: VMMGRAPH_CORE_LIBRARY names no library")
    return _c.Library(Path(path), with_torch=False)


def test_without_a_gpu_the_error_names_each_platform_and_no_host_memory_is_taken(library: _c.Library) -> None:
    """In a process of its own, which sees no GPU."""
    body = """
import os, sys
from pathlib import Path
from vmmgraph import _arena, _c
library = _c.Library(Path(sys.argv[1]), with_torch=False)
try:
    _arena.device_of(library, 0)
except _c.Error as error:
    print(error)
os.environ["VMMGRAPH_DRIVER"] = "host"
assert _arena.device_of(library, 0)
os.environ["VMMGRAPH_DRIVER"] = "foo"
try:
    _arena.Device(library, 1)
except _c.Error as error:
    print(error)
"""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "VMMGRAPH_DRIVER": ""}
    said = subprocess.run(
        [sys.executable, "-c", body, str(library.path)], env=os.environ | hidden, capture_output=True, text=True, check=True
    ).stdout
    none, unknown = said.splitlines()
    assert "cannot open device 0: no platform has a usable device (cuda: " in none
    assert all(f"; {name}: " in none for name in ("hip", "ascend", "mlu")) and "host: " not in none
    assert none.endswith("set VMMGRAPH_DRIVER=host to use host memory instead")
    assert (
        'cannot open a device of platform "foo": this library has no such platform; use one of cuda, hip, ascend, mlu, host'
        in unknown
    )


def test_an_arena_over_the_host_driver(library: _c.Library) -> None:
    device, arena, space = c_void_p(), c_void_p(), c_void_p()
    library.device_open(byref(_c.DeviceOptions(driver=2, host_memory_bytes=1 << 30)), byref(device))
    library.arena_create(device, byref(_c.ArenaOptions(budget_bytes=1 << 28, expected_bytes=192 << 20)), byref(arena))
    stats = _c.ArenaStats()
    library.arena_stats(arena, byref(stats))
    assert stats.as_dict()["budget_bytes"] == 1 << 28
    library.space_open(arena, byref(space))
    with pytest.raises(_c.Error, match="cannot use the space: it is open; seal it first") as refused:
        library.space_enter(space, None)
    assert refused.value.status == _c.WRONG_STATE
    report = _c.SealReport()
    library.space_seal(space, 0, byref(report))
    library.space_enter(space, None)
    # Not twice.
    with pytest.raises(_c.Error):
        library.space_enter(space, None)
    library.space_leave(space)
    with pytest.raises(_c.Error, match="cannot leave"):
        library.space_leave(space)
    text = json.loads(library.text("arena_stats_json", arena))
    assert isinstance(text, dict)
    given = _c.MapOptions(title=b"here", executables_bytes=1 << 20)
    drawn = json.loads(library.text("arena_map_json", arena, byref(given)))
    assert (drawn["title"], drawn["executables_bytes"]) == ("here", 1 << 20)
    library.space_destroy(space)
    library.arena_destroy(arena)
    library.device_close(device)
    with pytest.raises(_c.Error) as gone:
        library.arena_stats(arena, byref(stats))
    assert gone.value.status == 4


def test_an_arena_fits_its_pages_to_its_graphs(library: _c.Library) -> None:
    device, arena, space, block = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    library.device_open(byref(_c.DeviceOptions(driver=2, host_memory_bytes=1 << 30)), byref(device))
    library.arena_create(device, byref(_c.ArenaOptions()), byref(arena))
    library.space_open(arena, byref(space))
    library.space_allocate(space, 20 << 20, c_void_p(1), byref(block))
    library.space_free(space, block)
    library.space_seal(space, 0, None)
    stats, saved = _c.ArenaStats(), ctypes.c_uint64()
    library.arena_stats(arena, byref(stats))
    # Two large pages of 16 MiB.
    assert stats.as_dict()["physical_bytes"] == 32 << 20
    library.arena_shrink_to_fit(arena, None, byref(saved))
    library.arena_trim(arena, None)
    library.arena_stats(arena, byref(stats))
    assert stats.as_dict()["physical_bytes"] == 20 << 20 == (32 << 20) - saved.value
    library.space_destroy(space)
    library.arena_destroy(arena)
    library.device_close(device)


def test_a_missing_function_is_an_attribute_error(library: _c.Library) -> None:
    with pytest.raises(AttributeError):
        library.no_such_function()
