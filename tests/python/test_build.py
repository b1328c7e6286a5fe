"""``python -m vmmgraph build`` over a fake torch and single-file sources.
tests/python/test_wheel.py uses the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vmmgraph import _build, _library
from vmmgraph._maps import Unfit

ROOT = Path(__file__).resolve().parents[2]

TORCH = """
from types import SimpleNamespace
__version__ = "2.99.1+cu130"
version = SimpleNamespace(cuda="13.0", git_version="abc")
_C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
"""
LISTS = """
cmake_minimum_required(VERSION 3.24)
project(sources C CXX)
if(NOT VMMGRAPH_TORCH OR VMMGRAPH_TESTS OR NOT EXISTS "${VMMGRAPH_CUDART}" OR NOT EXISTS "${VMMGRAPH_PREBUILT_TORCH_ARCHIVE}")
  message(FATAL_ERROR "${VMMGRAPH_TORCH} ${VMMGRAPH_TESTS} ${VMMGRAPH_CUDART} ${VMMGRAPH_PREBUILT_TORCH_ARCHIVE}")
endif()
add_library(vmmgraph_torch SHARED cpp/torch/one.cpp)
target_compile_definitions(vmmgraph_torch PRIVATE "SAYS=\\"${SAYS}\\"")
"""
SOURCE = """
#include <c10/cuda/CUDACachingAllocator.h>
#include <crt/host_defines.h>
extern "C" const char* vmmgraph_torch_built_for() { return SAYS; }
"""


class Place:
    """A machine with a torch and sources."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.sources = folder / "sources"
        self.site = folder / "site"
        for path, text in {
            self.site / "torch/__init__.py": TORCH,
            self.site / "torch/include/c10/cuda/CUDACachingAllocator.h": "",
            self.site / "nvidia/cu13/include/cuda_runtime_api.h": "#define CUDART_VERSION  13000\n",
            self.site / "nvidia/cu13/include/crt/host_defines.h": "",
            self.site / "nvidia/cu13/lib/libcudart.so.13": "",
            self.sources / "CMakeLists.txt": LISTS,
            self.sources / "cpp/torch/one.cpp": SOURCE,
            self.sources / "libvmmgraph.a": "",
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def run(self, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            key: value for key, value in os.environ.items() if key not in (_library.VARIABLE, "CUDA_HOME", "CUDA_PATH")
        }
        environment |= {
            "PYTHONPATH": f"{self.site}:{ROOT / 'python'}",
            "VMMGRAPH_CACHE": str(self.cache),
            "CPLUS_INCLUDE_PATH": str(self.site / "torch/include"),
        }
        command = ["-c", code] if code else ["-m", "vmmgraph", *arguments]
        return subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def build(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        given = ["--source", str(self.sources), "--archive", str(self.sources / "libvmmgraph.a"), "-j1", "-D", "SAYS=2.99.1"]
        return self.run("build", *given, *arguments)

    def found(self, version: str = "") -> str:
        other = f"import torch; torch.__version__ = {version!r}\n" if version else ""
        return self.run(code=f"{other}from vmmgraph import _library; print(*_library.find())").stdout.strip()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_it_is_built_and_found(place: Place) -> None:
    assert "no library for torch 2.99" in place.found()
    done = place.build()
    assert done.returncode == 0, done.stderr
    library = Path(done.stdout.strip())
    assert place.found() == f"{library} built here"
    assert [path.relative_to(place.cache) for path in place.cache.rglob("*") if path.is_file()] == [
        library.relative_to(place.cache)
    ]
    assert "no library" in place.found("2.99.2+cu130"), "it belongs to that torch"
    (place.sources / "cpp/torch/one.cpp").write_text("#error spoilt\n")
    assert place.build().stdout.strip() == str(library), "it is there already"

    # A failure keeps the log and the old library.
    done = place.build("--force")
    assert done.returncode == 2
    log = next(place.cache.glob("*.log"))
    assert f"read {log}" in done.stderr and "spoilt" in done.stderr
    assert "#error spoilt" in log.read_text()
    assert place.found() == f"{library} built here"
    assert not [path for path in place.cache.iterdir() if path.name.startswith(".")], "nothing is left over"

    (place.sources / "cpp/torch/one.cpp").write_text('extern "C" int nowhere(); int x = nowhere();\n')
    done = place.build("--force")
    assert done.returncode == 2
    assert "cannot load the built library beside torch 2.99.1+cu130" in done.stderr and "nowhere" in done.stderr
    assert place.found() == f"{library} built here"

    if os.getuid() == 0:
        os.chown(library, 12345, -1)
        assert "no library" in place.found()


def test_what_is_missing_is_said_at_once_and_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    torch = _build.Torch(tmp_path / "torch", "2.99.1+cu120", "12.0")
    with pytest.raises(Unfit) as missing:
        _build.tools(torch, needs_cargo=True)
    for word in ("torch's headers", "cmake 3.24", "ninja or make", "C++20 compiler", "C compiler", "cargo", "cuda_runtime_api.h"):
        assert word in str(missing.value), word
    assert "nvidia-cuda-runtime-cu12" in str(missing.value)
    with pytest.raises(Unfit) as missing:
        _build.tools(torch, needs_cargo=False)
    assert "cargo" not in str(missing.value)
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho cmake version 3.18.4\n")
    old.chmod(0o755)
    with pytest.raises(Unfit, match=r"cmake 3\.24 or later: .* is 3\.18"):
        _build.tools(torch, needs_cargo=False)


def test_headers_of_another_cuda_are_not_taken(place: Place) -> None:
    torch = _build.Torch(place.site / "torch", "2.99.1", "12.0")
    there = place.site / "nvidia/cu13"
    assert _build._cuda(torch._replace(cuda="13.1"))[0] == _build.Cuda(
        there / "include", there / "include", there / "lib/libcudart.so.13"
    )
    there.rename(place.site / "nvidia/cuda_runtime")
    assert "CUDA 12's headers" in _build._cuda(torch)[1]
    there = place.site / "nvidia/cuda_runtime"
    (there / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    assert "libcudart.so.12" in _build._cuda(torch)[1]
    (there / "lib/libcudart.so.13").rename(there / "lib/libcudart.so.12")
    (there / "include/crt").rename(place.site / "crt")
    assert "nvidia-cuda-nvcc-cu12" in _build._cuda(torch)[1]
    (place.site / "nvidia/cuda_nvcc/include").mkdir(parents=True)
    (place.site / "crt").rename(place.site / "nvidia/cuda_nvcc/include/crt")
    assert _build._cuda(torch)[0] == _build.Cuda(
        there / "include", place.site / "nvidia/cuda_nvcc/include", there / "lib/libcudart.so.12"
    )


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("raise ImportError('torch is not here')", "cannot build a library: torch is not here; run `vmmgraph doctor`"),
        ("version.cuda = None", "built without CUDA"),
        ("_C._GLIBCXX_USE_CXX11_ABI = False", "old C++ ABI"),
    ],
)
def test_a_torch_that_none_can_be_built_for(place: Place, spoil: str, why: str) -> None:
    with (place.site / "torch/__init__.py").open("a") as file:
        file.write(spoil + "\n")
    done = place.build()
    assert done.returncode == 2 and why in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_sources_are_the_packages_or_the_checkouts(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _build.source_folder("") == ROOT
    with pytest.raises(Unfit, match="name a checkout with --source"):
        _build.source_folder(str(tmp_path))
    packed = _build._package.source_dir()
    assert not packed.exists(), "a checkout has none"
    monkeypatch.setattr(_build._package, "source_dir", lambda: place.sources)
    assert _build.source_folder("") == place.sources
