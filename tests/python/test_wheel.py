"""The wheel, inspected and installed. Needs a wheel in build/wheels (`make wheel`) or
VMMGRAPH_WHEEL; skipped otherwise."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = [Path(os.environ["VMMGRAPH_WHEEL"])] if "VMMGRAPH_WHEEL" in os.environ else sorted((ROOT / "build/wheels").glob("*.whl"))

pytestmark = pytest.mark.skipif(not WHEELS, reason="SKIPPED: no wheel in build/wheels; make wheel builds one")

# Maximum versions of manylinux_2_28 (PEP 600), as in auditwheel.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
SYSTEM = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libutil.so.1", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
}  # fmt: skip
TORCH = {"libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so"}
VARIANT = re.compile(r"vmmgraph/_lib/torch-(\d+\.\d+)-cu(\d+)/libvmmgraph_torch\.so")


def output(*command: object, **more: object) -> str:
    # Hides the package next to these tests.
    more.setdefault("env", {key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(WHEELS[-1])


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    output(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    output(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", WHEELS[-1])
    return python


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("vmmgraph/_lib/**/*.so"))


def stripped(library: Path) -> bool:
    """Neither a static symbol table nor debug sections."""
    sections = re.findall(r"^ *\[ *\d+\] (\S+)", output("readelf", "-SW", library), re.MULTILINE)
    assert ".text" in sections and ".dynsym" in sections, sections
    return not [name for name in sections if name == ".symtab" or name.startswith(".debug_")]


def dynamic(library: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\)[^\[\n]*\[(.*)\]", output("readelf", "-dW", library))


def test_one_wheel_for_every_python(wheel: zipfile.ZipFile) -> None:
    name = WHEELS[-1].name
    assert re.fullmatch(r"vmmgraph-[0-9.]+-py3-none-manylinux_2_28_x86_64\.whl", name)
    text = next(wheel.read(each).decode() for each in wheel.namelist() if re.fullmatch(r"vmmgraph-[^/]*\.dist-info/WHEEL", each))
    assert re.findall("^Tag: (.*)$", text, re.MULTILINE) == ["py3-none-manylinux_2_28_x86_64"]
    assert "Root-Is-Purelib: false" in text
    version = re.search(r'^\[workspace\.package\]\nversion = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert version and name.split("-")[1] == version[1]
    metadata = next(
        wheel.read(each).decode() for each in wheel.namelist() if re.fullmatch(r"vmmgraph-[^/]*\.dist-info/METADATA", each)
    )
    assert "Requires-Dist: torch" in metadata and not re.search("^Requires-Dist: (?!.*extra ==)", metadata, re.MULTILINE), (
        "torch is optional"
    )


def test_record_says_what_is_there(wheel: zipfile.ZipFile) -> None:
    record = next(each for each in wheel.namelist() if re.fullmatch(r"vmmgraph-[^/]*\.dist-info/RECORD", each))
    rows = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(wheel.read(record).decode()))}
    files = [each for each in wheel.namelist() if not each.endswith("/")]
    assert sorted(rows) == sorted(files) and len(set(files)) == len(files)
    for path, (digest, size) in rows.items():
        if path != record:
            data = wheel.read(path)
            ours = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={ours}", str(len(data))), path


def test_its_libraries_and_nothing_of_the_machine(wheel: zipfile.ZipFile, unpacked: Path) -> None:
    names = set(wheel.namelist())
    assert {
        "vmmgraph/_lib/libvmmgraph.so",
        "vmmgraph/_lib/libvmmgraph_memory_saver.so",
        "vmmgraph/memory_saver/__init__.py",
    } <= names
    assert {"vmmgraph/include/vmmgraph/vmmgraph.h", "vmmgraph/include/vmmgraph/torch.hpp"} <= names
    assert "vmmgraph/_lib/cmake/VmmGraph/VmmGraphConfig.cmake" in names
    assert {name.split("/")[0] for name in names} == {"vmmgraph", WHEELS[-1].name.rsplit("-", 3)[0] + ".dist-info"}
    variants = [found.groups() for name in names if (found := VARIANT.fullmatch(name))]
    assert variants, "no library for any torch"
    known = {
        (release.rsplit(".", 1)[0], major)
        for release, *majors in (
            line.split() for line in (ROOT / "scripts/torch-releases.txt").read_text().splitlines() if line[0] != "#"
        )
        for major in majors
    }
    assert set(variants) <= known
    assert not [name for name in names if name.endswith((".a", ".o", ".pyc"))]
    assert WHEELS[-1].stat().st_size < (2 + 8 + 2 * len(variants)) << 20
    for name in names:
        assert str(ROOT).encode() not in wheel.read(name) or name.endswith(".so"), name
    # .ci/run builds without LTO, which adds a quarter of a MiB.
    limit = (6 if os.environ.get("CARGO_PROFILE_RELEASE_LTO") == "off" else 5) << 20
    for library in libraries(unpacked):
        assert stripped(library), f"{library.name} is not stripped"
        assert library.stat().st_size < limit, f"{library.name} has grown"
        assert os.access(library, os.R_OK)


def test_libraries_need_what_they_should(unpacked: Path) -> None:
    for library in libraries(unpacked):
        assert dynamic(library, "SONAME") == [library.name]
        assert dynamic(library, "RUNPATH") == ["$ORIGIN"] and not dynamic(library, "RPATH"), library
        needed = dynamic(library, "NEEDED")
        if library.name == "libvmmgraph_torch.so":
            major = library.parent.name.rsplit("-cu", 1)[1]
            assert set(needed) - SYSTEM == TORCH | {f"libcudart.so.{major}"}, library
            versions = re.findall(r"Name: (libcudart\.so\.\d+)", output("readelf", "-VW", library))
            assert versions == [f"libcudart.so.{major}"], "the runtime's symbols have its version"
        else:
            assert set(needed) <= SYSTEM, library
            undefined = output("nm", "-D", "--undefined-only", library)
            assert not re.search(r" U cuda|_ZN3c10", undefined)
        assert not [name for name in needed if "python" in name]


def test_the_platform_tag_is_true(unpacked: Path) -> None:
    for library in libraries(unpacked):
        asked = set(re.findall(r"Name: ([A-Z]+)_([0-9.]+) ", output("readelf", "-VW", library)))
        assert ("GLIBC", "2.2.5") in asked
        late = [(name, version) for name, version in asked if tuple(map(int, version.split("."))) > NEWEST.get(name, ())]
        assert not late, f"{library} asks for {late}"
        # Only torch and CUDA define unversioned symbols.
        strong = re.findall(r"^ +U ([^@\s]+)$", output("nm", "-D", "--undefined-only", library), re.MULTILINE)
        foreign = [name for name in strong if not re.match(r"_Z\w*(2at|3c10|5torch|6caffe2)", name)]
        assert not foreign, f"{library} asks for {foreign}"


def test_it_installs_and_needs_no_torch(installed: Path) -> None:
    body = """
import ctypes, importlib.metadata as metadata, os, pathlib, subprocess, sys
from vmmgraph import memory_saver, _package
from vmmgraph.memory_saver import torch_memory_saver as saver
assert "torch" not in sys.modules
groups = {point.group: point.value for point in metadata.distribution("vmmgraph").entry_points}
assert groups == {"console_scripts": "vmmgraph.__main__:main", "vllm.general_plugins": "vmmgraph.plugins.vllm:enable",
                  "sglang.srt.plugins": "vmmgraph.plugins.sglang:enable"}, groups
assert (_package.cmake_dir() / "VmmGraphConfig.cmake").exists() and (_package.include_dir() / "vmmgraph/vmmgraph.hpp").exists()
core = ctypes.CDLL(str(pathlib.Path(memory_saver.__file__).parents[1] / "_lib/libvmmgraph.so"))
core.vmmgraph_version.restype = ctypes.c_char_p
assert core.vmmgraph_version().decode() == metadata.version("vmmgraph")
saver.hook_mode = "torch"
c = saver._ready().c
with saver._ready().settings("weights", True, None):
    at = c.tms_torch_malloc(1 << 20, 0, None)
ctypes.memset(at, 7, 1 << 20)
saver.pause(); saver.resume()
assert ctypes.string_at(at, 1 << 20) == bytes([7]) * (1 << 20)
with memory_saver.configure_subprocess():
    subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL(None).tms_pause"], check=True)
print("fine")
"""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "LD_PRELOAD", "VMMGRAPH_MEMORY_SAVER_LIBRARY")
    }
    assert output(installed, "-c", body, env=environment | {"VMMGRAPH_DRIVER": "host"}) == "fine\n"


SHIM = """
import importlib.metadata as metadata, importlib.util, os, pathlib, subprocess, sys
from vmmgraph import memory_saver
assert importlib.util.find_spec("torch_memory_saver") is None, "nothing is called so by accident"
memory_saver.take_over()
worker = '''
import ctypes, os, torch_memory_saver.hooks.mode_torch
from torch_memory_saver import torch_memory_saver as saver
assert saver._ready().library.path == os.environ["LD_PRELOAD"]
c = saver._ready().c
at = c.tms_torch_malloc(1 << 20, 0, None)
ctypes.memset(at, 7, 1 << 20)
saver.pause(); saver.resume()
assert ctypes.string_at(at, 1 << 20) == bytes([7]) * (1 << 20)
'''
from torch_memory_saver.utils import get_binary_path_from_package
assert metadata.version("torch_memory_saver") == "0.0.10"
folder = pathlib.Path(memory_saver.shim_path())
for mode in "preload", "torch":
    stem = f"torch_memory_saver_hook_mode_{mode}"
    assert get_binary_path_from_package(stem).parent == folder
    for name in (f"{stem}.abi3.so", f"{stem}_cu12.abi3.so", f"{stem}_cu13.abi3.so"):
        environment = os.environ | {"LD_PRELOAD": str(folder / name), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        subprocess.run([sys.executable, "-c", worker], env=environment, check=True)
print("fine")
"""


def test_it_replaces_torch_memory_saver_only_if_asked(installed: Path) -> None:
    unset = ("PYTHONPATH", "LD_PRELOAD", "VMMGRAPH_MEMORY_SAVER_LIBRARY", "VMMGRAPH_CORE_LIBRARY")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    assert output(installed, "-c", SHIM, env=environment | {"VMMGRAPH_DRIVER": "host"}) == "fine\n"


def test_cmake_finds_it(installed: Path, tmp_path: Path) -> None:
    folder = output(installed.parent / "vmmgraph", "--cmake-dir").strip()
    variant = max(each.name for each in Path(folder, "../..").glob("torch-*")).removeprefix("torch-")
    (tmp_path / "main.c").write_text(
        "#include <vmmgraph/vmmgraph.h>\nint main(void) { return vmmgraph_abi_version() != VMMGRAPH_ABI_VERSION; }\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(VmmGraph REQUIRED COMPONENTS core torch)\n"
        "add_executable(user main.c)\ntarget_link_libraries(user PRIVATE VmmGraph::vmmgraph)\n"
        "get_target_property(where VmmGraph::torch IMPORTED_LOCATION)\nmessage(STATUS where=${where})\n"
    )
    said = output("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DVmmGraph_DIR={folder}", f"-DVmmGraph_TORCH={variant}")
    assert f"torch-{variant}/libvmmgraph_torch.so" in said
    output("cmake", "--build", tmp_path / "b")
    output(tmp_path / "b/user")
    with pytest.raises(AssertionError) as error:
        output("cmake", "-S", tmp_path, "-B", tmp_path / "without", f"-DVmmGraph_DIR={folder}")
    said = " ".join(str(error.value).split())
    assert "set VmmGraph_TORCH to the torch of your program, one of" in said and variant in said


def test_a_program_over_torch_builds_with_it(installed: Path, tmp_path: Path) -> None:
    """The CMakeLists.txt of examples/libtorch, with a program that includes no header of torch."""
    torch = next(iter(ROOT.glob(".venv/lib/python3*/site-packages/torch")), None)
    folder = output(installed.parent / "vmmgraph", "--cmake-dir").strip()
    if torch is None or not Path(folder, "../../torch-2.11-cu13").exists():
        pytest.skip("SKIPPED: no torch in .venv (scripts/setup.sh test), or a wheel without the library for 2.11-cu13")
    shutil.copy(ROOT / "examples/libtorch/CMakeLists.txt", tmp_path)
    (tmp_path / "quickstart.cpp").write_text(
        "#include <vmmgraph/torch.hpp>\nint main(int argc, char**) { return argc > 9 ? vmmgraph::torch::built_for()[0] : 0; }\n"
    )
    options = [f"-DVmmGraph_DIR={folder}", "-DVmmGraph_TORCH=2.11-cu13", f"-DVMMGRAPH_TORCH_ROOT={torch}"]
    output("cmake", "-S", tmp_path, "-B", tmp_path / "b", *options)
    output("cmake", "--build", tmp_path / "b")
    assert {"libvmmgraph_torch.so", "libtorch_cuda.so"} <= set(dynamic(tmp_path / "b/quickstart", "NEEDED"))


def test_the_sources_are_whole(unpacked: Path) -> None:
    """All files included or compiled."""
    sources = unpacked / "vmmgraph/_src"
    include = unpacked / "vmmgraph/include"
    bridge = sources / "core/cxxbridge"
    looked = 0
    for path in [*sources.glob("cpp/**/*.?pp"), *include.glob("vmmgraph/*")]:
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            folders = (path.parent, include, bridge)
            assert any((folder / name).is_file() for folder in folders), f"{path.name} includes {name}"
            looked += 1
        for name in re.findall(r"#include <(vmmgraph/[^>]+)>", path.read_text()):
            assert (include / name).is_file(), f"{path.name} includes {name}"
            looked += 1
    assert looked > 50
    compiled = re.findall(r"cpp/(?:torch|engine)/\w+\.cpp", (sources / "cmake/VmmGraphTorch.cmake").read_text())
    assert len(compiled) > 20
    assert {sources / each for each in compiled} == set(sources.glob("cpp/**/*.cpp"))
    # For builds with another torch. Wheels have no torch_npu library.
    ours = {path.name for path in (ROOT / "include/vmmgraph").iterdir()} - {"torch_npu.hpp"}
    assert {path.name for path in (include / "vmmgraph").iterdir()} == ours


@pytest.fixture(scope="module")
def beside_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Imports .venv's pip torch with stand-in CUDA libraries."""
    site = next(iter((ROOT / ".venv/lib").glob("python3*/site-packages")), None)
    if site is None or not (site / "torch").exists() or not (site / "sympy").exists():
        pytest.skip("SKIPPED: no torch in .venv that can be imported (scripts/setup.sh test)")
    folder = tmp_path_factory.mktemp("standins")
    cudart = site / "nvidia/cu13/lib"
    output(sys.executable, ROOT / "tests/torch/standins.py", folder, site / "torch/lib", cudart)
    return os.environ | {"LD_LIBRARY_PATH": f"{folder}:{cudart}", "PYTHONPATH": str(site), "VMMGRAPH_DRIVER": "host"}


def test_a_library_is_built_from_the_package(installed: Path, beside_torch: dict[str, str], tmp_path: Path) -> None:
    """Compilation reuses build/torch. No Rust on the path."""
    objects = ROOT / "build/torch"
    if not any((objects / "CMakeFiles/vmmgraph_torch.dir").rglob("*.o")):
        pytest.skip("SKIPPED: no build/torch (scripts/test.sh)")
    path = tmp_path / "path"
    path.mkdir()
    for tool in ("cmake", "ninja", "c++", "cc", "ld", "as", "ar", "ranlib", "nm", "strip", "uname", "sh"):
        found = shutil.which(tool)
        if found is not None:
            (path / tool).symlink_to(found)
    environment = beside_torch | {"PATH": str(path), "VMMGRAPH_CACHE": str(tmp_path / "cache")}
    environment.pop("VMMGRAPH_LIBRARY", None)
    said = output(
        installed, "-W", "ignore", "-m", "vmmgraph", "build", "-j1", "-D", f"VMMGRAPH_TORCH_OBJECTS={objects}", env=environment
    )
    library = Path(said.strip())
    assert library.is_file() and stripped(library) and library.stat().st_size < 5 << 20
    assert dynamic(library, "RUNPATH") == ["$ORIGIN"] and dynamic(library, "SONAME") == ["libvmmgraph_torch.so"]
    report = subprocess.run(
        [str(installed), "-W", "ignore", "-m", "vmmgraph", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {line["subject"]: line for line in json.loads(report.stdout)}
    assert report.returncode == 2 and found["GPU"]["state"] == "error", "no GPU here"
    assert found["library"]["state"] == "ok" and f"{library} (built here)" in found["library"]["text"]


def test_beside_a_torch_without_a_gpu(installed: Path, beside_torch: dict[str, str]) -> None:
    """Every symbol resolves."""
    body = """
import ctypes, pathlib, torch
from vmmgraph import memory_saver
folder = pathlib.Path(memory_saver.__file__).parents[1] / "_lib"
minor = ".".join(torch.__version__.split(".")[:2])
path = folder / f"torch-{minor}-cu{torch.version.cuda.split('.')[0]}" / "libvmmgraph_torch.so"
if not path.exists():
    print("SKIPPED: the wheel has no library for torch", torch.__version__)
else:
    library = ctypes.CDLL(str(path))
    assert library.vmmgraph_abi_version() > 0
    built_for = getattr(library, "_ZN8vmmgraph5torch9built_forEv")
    built_for.restype = ctypes.c_char_p
    print("torch", torch.__version__, "library for", built_for().decode())
    assert torch.ones(3).sum() == 3
"""
    said = output(installed, "-W", "ignore", "-c", body, env=beside_torch)
    if "SKIPPED" in said:
        pytest.skip(said.strip())
    torch, library = re.search(r"torch (\S+) library for (\S+)", said).groups()  # type: ignore[union-attr]
    assert torch.split("+")[0] == library
