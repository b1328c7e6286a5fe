"""One core per process, for any first user: the memory saver, the session, the MemPool route, or a
program with its own copy.

Torch and its library are stand-ins, the library linked from the core's archive. SKIPPED if the
archive is not built.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from test_memory_saver import LIBRARY, ROOT, child

ARCHIVE = LIBRARY.parent / "cargo" / "release" / "libvmmgraph.a"
pytestmark = pytest.mark.skipif(not (LIBRARY.exists() and ARCHIVE.exists()), reason=f"SKIPPED: {LIBRARY.parent} is not built")

# Extends test_memory_saver's prelude.
MORE = """
import logging
logging.disable(logging.WARNING)
torch.__version__, torch.version = "2.11.0+cu130", types.SimpleNamespace(cuda="13.0")
torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True, _cuda_clearCublasWorkspaces=lambda: None)
graphs = types.ModuleType("torch.cuda.graphs")
torch.cuda.CUDAGraph = graphs.CUDAGraph = type("CUDAGraph", (), {})
torch.cuda.graphs = graphs
torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(cuda_stream=0)
torch.cuda.memory.CUDAPluggableAllocator = lambda *arguments: Allocator(arguments[0], "tms_torch_malloc", "tms_torch_free")
torch.cuda.graph_pool_handle = lambda: (0, 1)
sys.modules["torch.cuda"], sys.modules["torch.cuda.graphs"] = torch.cuda, graphs

def use_the_saver():
    with saver.region("weights"):
        return allocate(2 * MIB)

def cores():
    paths = {line.split()[-1] for line in open("/proc/self/maps") if "/libvmmgraph" in line}
    return sorted(os.path.basename(path) for path in paths if "memory_saver" not in path)

def held_by_regions():
    from vmmgraph import _c, _core
    import json
    library = _core.any_one()
    arena = ctypes.c_void_p()
    from vmmgraph._arena import device_of
    device = device_of(library, 0)
    library.arena_create(device.handle, ctypes.byref(_c.ArenaOptions()), ctypes.byref(arena))
    found = json.loads(library.text("arena_map_json", arena, None))["holders"]
    library.arena_destroy(arena)
    return sum(holder["bytes"] for holder in found if holder["kind"] == "region")
"""


@pytest.fixture(scope="module")
def for_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The functions of torch_c.h return success."""
    folder = tmp_path_factory.mktemp("core")
    header = (ROOT / "include/vmmgraph/torch_c.h").read_text()
    names = sorted(set(re.findall(r"\b(vmmgraph_torch_\w+)\(", header)) - {"vmmgraph_torch_built_for"})
    source = folder / "torch.c"
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    source.write_text(f'{functions}const char* vmmgraph_torch_built_for(void) {{ return "2.11.0"; }}\n')
    library = folder / "libvmmgraph_torch.so"
    link = ["-Wl,--whole-archive", ARCHIVE, "-Wl,--no-whole-archive", "-Wl,--gc-sections", "-Wl,-s", "-Wl,-z,nodelete"]
    version_script = ROOT / "cmake/vmmgraph.map"
    system = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"]
    command = ["cc", "-shared", "-fPIC", "-o", library, source, f"-Wl,--version-script={version_script}", *link, *system]
    subprocess.run([str(each) for each in command], check=True)
    return library


def run(body: str, for_torch: Path | None, mode: str = "torch") -> None:
    # A missing path hides the package's own library.
    child(MORE + body, mode, VMMGRAPH_LIBRARY=str(for_torch or "/nowhere/libvmmgraph_torch.so"), VMMGRAPH_CORE_LIBRARY="/nowhere")


@pytest.mark.parametrize("mode", ["torch", "preload"])
@pytest.mark.parametrize("first", ["saver", "session"])
def test_regions_and_arenas_have_one_core(for_torch: Path, first: str, mode: str) -> None:
    calls = ["use_the_saver()", "assert vmmgraph.enable(strict=True).route == 'blocks'"]
    body = "\n".join(calls if first == "saver" else calls[::-1])
    run(
        f"""
import vmmgraph
{body}
assert cores() == ["libvmmgraph_torch.so"], cores()
assert held_by_regions() >= 2 * MIB
""",
        for_torch,
        mode,
    )


@pytest.mark.parametrize("first", ["saver", "route"])
def test_the_mempool_route_has_the_savers(first: str) -> None:
    calls = ["use_the_saver()", "assert vmmgraph.enable().route == 'mempool', vmmgraph.status()"]
    core = next(LIBRARY.parent.glob("libvmmgraph.so*"))
    run(
        f"""
import vmmgraph
os.environ["VMMGRAPH_CORE_LIBRARY"] = {str(core)!r}
{chr(10).join(calls if first == "saver" else calls[::-1])}
assert len(cores()) == 1 and cores()[0].startswith("libvmmgraph.so"), cores()
assert held_by_regions() >= 2 * MIB
""",
        None,
    )


def test_a_core_that_is_there_stays_the_only_one(for_torch: Path) -> None:
    """A C++ engine has loaded the plain core."""
    core = next(LIBRARY.parent.glob("libvmmgraph.so*"))
    run(
        f"""
ctypes.CDLL({str(core)!r})
import vmmgraph
with raises(vmmgraph.Error, "would be a second one", "libvmmgraph.so"):
    vmmgraph.enable(strict=True)
use_the_saver()
assert vmmgraph.enable().route == "mempool"
assert len(cores()) == 1 and cores()[0].startswith("libvmmgraph.so"), cores()
""",
        for_torch,
    )


def test_one_for_another_torch_serves_without_its_part_for_torch(for_torch: Path, tmp_path: Path) -> None:
    """The library was loaded before it proved incompatible."""
    old = tmp_path / for_torch.name
    data = for_torch.read_bytes()
    # As in an older release.
    assert data.count(b"vmmgraph_torch_keep\0") == 1
    old.write_bytes(data.replace(b"vmmgraph_torch_keep\0", b"vmmgraph_torch_kapt\0"))
    run(
        """
import vmmgraph
use_the_saver()
assert vmmgraph.enable().route == "mempool", vmmgraph.status()
assert cores() == ["libvmmgraph_torch.so"], cores()
assert held_by_regions() >= 2 * MIB
""",
        old,
    )


def test_without_any_the_first_that_is_needed_says_so() -> None:
    run(
        """
import vmmgraph
with raises(vmmgraph.Error, "/nowhere/libvmmgraph_torch.so"):
    vmmgraph.enable(strict=True)
assert vmmgraph.enable().route == "none" and cores() == []
""",
        None,
    )
    assert os.path.exists(LIBRARY)
