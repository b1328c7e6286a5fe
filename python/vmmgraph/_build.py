"""``python -m vmmgraph build``: builds libvmmgraph_torch for the installed torch, in the folder
`_library.find` searches first.

Uses the package's sources with the precompiled core, or a checkout's with cargo. Only cargo
downloads anything. The library is moved into place atomically, so several processes may build at
once.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import _files, _library, _package
from ._files import Unfit

#: Minimum version for CMakeLists.txt.
CMAKE = (3, 24)
EACH = 2 << 30

Say = Callable[[str], None]


class Torch(NamedTuple):
    folder: Path
    version: str
    cuda: str

    @property
    def cuda_major(self) -> str:
        return self.cuda.split(".")[0]


class Cuda(NamedTuple):
    include: Path
    crt: Path
    runtime: Path


def torch_at_hand() -> Torch:
    """Raises `Unfit` for an unsupported torch."""
    try:
        import torch
    except ImportError as error:
        raise Unfit(f"cannot build a library: {error}; run `vmmgraph doctor`") from None
    version = torch.__version__
    if not torch.version.cuda:
        raise Unfit(f"cannot build for torch {version}: it is built without CUDA; install a CUDA build of torch")
    if not torch._C._GLIBCXX_USE_CXX11_ABI:
        raise Unfit(f"cannot build for torch {version}: it has the old C++ ABI; install torch 2.7 or later")
    return Torch(Path(torch.__file__).resolve().parent, version, torch.version.cuda)


def _tool(*names: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    return next((found for name in names if name and (found := shutil.which(name, path=path))), None)


def _cmake() -> tuple[str | None, str]:
    """Returns CMake, or a description of the missing version."""
    needed = ".".join(map(str, CMAKE))
    there = _tool("cmake")
    if there is None:
        return None, f"cmake {needed} or later (pip install cmake)"
    said = subprocess.run([there, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < CMAKE:
        return None, f"cmake {needed} or later: {there} is {found[0] if found else 'none'} (pip install cmake)"
    return there, ""


def _cuda(torch: Torch) -> tuple[Cuda | None, str]:
    """Returns the CUDA of torch's major version, or a description of the missing part."""
    major = torch.cuda_major
    packages = torch.folder.parent / "nvidia"
    folders = [packages / f"cu{major}", packages / "cuda_runtime"]
    folders += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [Path(f"/usr/local/cuda-{major}"), Path("/usr/local/cuda")]
    new = int(major) >= 13 if major.isdigit() else True
    ending = "" if new else f"-cu{major}"
    for folder in folders:
        header = folder / "include" / "cuda_runtime_api.h"
        if not header.is_file():
            continue
        version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
        if version is None or str(int(version[1]) // 1000) != major:
            continue
        candidates = [folder / "include", packages / "cuda_nvcc" / "include"]
        crt = next((each for each in candidates if (each / "crt" / "host_defines.h").is_file()), None)
        if crt is None:
            package = "nvidia-cuda-crt" if new else f"nvidia-cuda-nvcc{ending}"
            return (
                None,
                f"CUDA's headers crt/ beside {header.parent} (pip install {package}, of the release of {header.parent.parent.name})",
            )
        names = (f"libcudart.so.{major}", "libcudart.so")
        libraries = [folder / part / name for part in ("lib", "lib64") for name in names]
        runtime = next((each for each in libraries if each.exists()), None)
        if runtime is None:
            return None, f"libcudart.so.{major} in {folder}/lib or lib64 (pip install nvidia-cuda-runtime{ending})"
        return Cuda(header.parent, crt, runtime), ""
    return (
        None,
        f"CUDA {major}'s headers: cuda_runtime_api.h beside torch, in CUDA_HOME or /usr/local/cuda (pip install nvidia-cuda-runtime{ending})",
    )


def source_folder(given: str) -> Path:
    """Returns the folder with the sources: the given one, the package's, or the checkout's."""
    here = Path(__file__).resolve()
    candidates = [Path(given).resolve()] if given else [_package.source_dir(), here.parents[2]]
    for folder in candidates:
        if (folder / "CMakeLists.txt").is_file() and (folder / "cpp" / "torch").is_dir():
            return folder
    why = f"{given} has no CMakeLists.txt and cpp/torch" if given else "this vmmgraph was installed without its sources"
    raise Unfit(f"cannot build a library: {why}; name a checkout with --source")


class Tools(NamedTuple):
    cmake: str
    cuda: Cuda
    generator: list[str]


def tools(torch: Torch, needs_cargo: bool) -> Tools:
    """Raises `Unfit` with all missing tools and their packages."""
    lacking = []
    if not (torch.folder / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        lacking.append(f"torch's headers in {torch.folder}/include")
    cmake, why = _cmake()
    if cmake is None:
        lacking.append(why)
    ninja = _tool("ninja")
    if ninja is None and _tool("make") is None:
        lacking.append("ninja or make (pip install ninja)")
    if _tool(os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++") is None:
        lacking.append("a C++20 compiler (g++ 10 or later, apt install g++; CXX names another)")
    if _tool(os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang") is None:
        lacking.append("a C compiler (apt install gcc; CC names another)")
    if needs_cargo and _tool("cargo") is None:
        lacking.append("cargo, since these sources have no compiled core (rustup.rs, Rust 1.88 or later; --archive names a core)")
    cuda, why = _cuda(torch)
    if cuda is None:
        lacking.append(why)
    if lacking or cmake is None or cuda is None:
        raise Unfit(f"cannot build for torch {torch.version}, since tools are missing: " + "; ".join(lacking))
    return Tools(cmake, cuda, ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"])


def _prepare(source: Path, archive: Path | None, work: Path) -> tuple[Path, Path | None]:
    """Returns sources and core for CMake. In the package, the headers are in a different folder and
    the core is packed."""
    packed = source / "core" / "libvmmgraph.a.xz"
    if not packed.is_file():
        return source, archive
    whole = work / "source"
    shutil.copytree(source, whole, ignore=shutil.ignore_patterns("core"))
    shutil.copytree(_package.include_dir(), whole / "include")
    shutil.copytree(source / "core" / "cxxbridge", work / "core" / "cxxbridge")
    if archive is None:
        archive = work / "core" / "libvmmgraph.a"
        with lzma.open(packed) as compressed, archive.open("wb") as file:
            shutil.copyfileobj(compressed, file, 1 << 20)
    return whole, archive


def jobs_at_once() -> int:
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(len(os.sched_getaffinity(0)), memory // EACH))
    return 1


_STEP = re.compile(r"^\[\s*(\d+/\d+|\d+%)\]")


def _run(command: Sequence[str], log: Path, say: Say, what: str) -> None:
    """Runs a program with its output in the log. Raises `Unfit` on failure."""
    tail: list[str] = []
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, command))}\n")
            for line in process.stdout:
                file.write(line)
                step = _STEP.match(line)
                if step:
                    say(f"{what} {step[1]}")
                tail = [*tail[-24:], line.rstrip()]
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        _files.say(*tail, file=sys.stderr)
        raise Unfit(f"cannot build the library: {what}: {Path(command[0]).name} ended with status {status}")


#: Run in a child process, since a loaded library stays loaded.
_TRY = """
import ctypes, sys, torch
library = ctypes.CDLL(sys.argv[1])
library.vmmgraph_torch_built_for.restype = ctypes.c_char_p
print(library.vmmgraph_torch_built_for().decode())
"""


def _try(library: Path, torch: Torch) -> str:
    """Loads the library beside torch; returns its torch release. Raises `Unfit`."""
    done = subprocess.run([sys.executable, "-c", _TRY, str(library)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise Unfit(f"cannot load the built library beside torch {torch.version}: {said[-1] if said else done.returncode}")
    return done.stdout.strip()


@contextlib.contextmanager
def _workplace(folder: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Yields a build folder, and a log that is kept only on failure."""
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
    log = work / "build.log"
    try:
        yield work, log
    except Unfit as error:
        kept = folder / f"{name}.log"
        if log.exists():
            os.replace(log, kept)
            raise Unfit(f"{error}; read {kept}") from None
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def build(
    source: str = "",
    archive: str = "",
    jobs: int = 0,
    defines: Sequence[str] = (),
    force: bool = False,
    say: Say = lambda _: None,
) -> Path:
    """Builds the library and returns its path. Keeps an existing library unless `force`. Raises
    `Unfit`."""
    torch = torch_at_hand()
    place = _library.built_path()
    if place.exists() and not force:
        return place
    folder = source_folder(source)
    given = Path(archive).resolve() if archive else None
    if given is not None and not given.is_file():
        raise Unfit(f"cannot read the archive {archive}: no such file")
    has_core = given is not None or (folder / "core" / "libvmmgraph.a.xz").is_file()
    found = tools(torch, needs_cargo=not has_core)
    with _workplace(place.parent.parent, place.parent.name) as (work, log):
        say("unpacking")
        whole, core = _prepare(folder, given, work)
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_SHARED_LINKER_FLAGS": "-s",
            "CMAKE_CXX_FLAGS": f"{os.environ.get('CXXFLAGS', '')} -isystem {found.cuda.crt}".strip(),
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
            "VMMGRAPH_TORCH": "ON",
            "VMMGRAPH_TORCH_ROOT": torch.folder,
            "VMMGRAPH_TORCH_RPATH": "OFF",
            "VMMGRAPH_TORCH_PRECOMPILE": "ON",
            "VMMGRAPH_CUDA_INCLUDE": found.cuda.include,
            "VMMGRAPH_CUDART": found.cuda.runtime,
            "VMMGRAPH_SONAME_VERSION": "OFF",
        }
        options |= dict.fromkeys(
            (f"VMMGRAPH_{part}" for part in ("MEMORY_SAVER", "INSTALL", "TESTS", "EXAMPLES", "WERROR")), "OFF"
        )
        if core is not None:
            options |= {"VMMGRAPH_PREBUILT_ARCHIVE": core, "VMMGRAPH_PREBUILT_TORCH_ARCHIVE": core}
        arguments = [f"-D{name}={value}" for name, value in options.items()] + [f"-D{define}" for define in defines]
        say("configuring")
        _run([found.cmake, "-S", str(whole), "-B", str(work / "build"), *found.generator, *arguments], log, say, "configuring")
        begun = time.monotonic()
        parallel = str(jobs or jobs_at_once())
        say(f"compiling, {parallel} at once")
        _run(
            [found.cmake, "--build", str(work / "build"), "--target", "vmmgraph_torch", "--parallel", parallel],
            log,
            say,
            "compiling",
        )
        say(f"loading, after {time.monotonic() - begun:.0f} s of compiling")
        library = work / "build" / _library.NAME
        _try(library, torch)
        place.parent.mkdir(exist_ok=True)
        os.replace(library, place)
    return place
