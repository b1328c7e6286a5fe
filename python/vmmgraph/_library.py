"""Which library serves the torch at hand: the choice as a plain function, and loading it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import _package

#: A path to libvmmgraph_torch.so, or to its folder, in place of the choice.
VARIABLE = "VMMGRAPH_LIBRARY"
NAME = "libvmmgraph_torch.so"
#: A folder for libraries that ``python -m vmmgraph build`` makes, in place of ``~/.cache/vmmgraph``.
CACHE = "VMMGRAPH_CACHE"
FOLDER = Path(__file__).parent / "_lib"

_RELEASE = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?(?P<pre>(?:a|b|rc|\.dev)\d*.*?)?(?:\+(?P<local>.*))?$")


class Choice(NamedTuple):
    """What :func:`choose` found: a name of ``available``, or ``None``; and why, for people."""

    name: str | None
    why: str


def choose(torch_version: str, cuda_version: str | None, cxx11abi: bool, available: Iterable[str]) -> Choice:
    """The library for a torch, among folders named like ``torch-2.11-cu13`` or ``torch-2.11.1-cu13``.

    Arguments are ``torch.__version__``, ``torch.version.cuda`` and ``torch._C._GLIBCXX_USE_CXX11_ABI``. A library belongs to one
    release of torch; that of a minor release is tried for all its patches, and looks at the whole version itself when it is installed.
    """
    found = _RELEASE.match(torch_version.strip())
    if found is None:
        return Choice(None, f"torch {torch_version!r} has no version that can be read")
    if not cuda_version:
        return Choice(None, f"torch {torch_version} is built without CUDA")
    local = found["local"] or ""
    if found["pre"] or ".nv" in local or "git" in local or local.startswith("nv"):
        return Choice(None, f"torch {torch_version} is no release: only a library that is built for it fits")
    if not cxx11abi:
        return Choice(None, f"torch {torch_version} is built with the old C++ ABI")
    major, minor, patch = found[1], found[2], found[3] or "0"
    cuda = cuda_version.split(".")[0]
    names = set(available)
    for release in (f"{major}.{minor}.{patch}", f"{major}.{minor}"):
        if (name := f"torch-{release}-cu{cuda}") in names:
            return Choice(name, "prebuilt")
    others = sorted(name.removeprefix("torch-") for name in names if name.startswith("torch-"))
    return Choice(None, f"no library for torch {major}.{minor} with CUDA {cuda} (there is {', '.join(others) or 'none'})")


def available(folder: Path = FOLDER) -> list[str]:
    """The names of the libraries in the package."""
    return sorted(path.parent.name for path in folder.glob(f"torch-*/{NAME}"))


def cache_folder() -> Path:
    """Where libraries that were built here are. It may not exist."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmmgraph"


def built_path() -> Path:
    """Where the library is, or would be, that ``python -m vmmgraph build`` makes for the torch that is imported: it belongs to that very
    build of torch, and to this release of VmmGraph."""
    import torch

    version = torch.__version__
    facts = (version, getattr(torch.version, "git_version", ""), torch.version.cuda, platform.machine(), _package.version())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    cuda = str(torch.version.cuda).split(".")[0]
    return cache_folder() / f"torch-{re.sub(r'[^0-9A-Za-z.]', '-', version)}-cu{cuda}-{digest}" / NAME


def _built() -> Path | None:
    """The library that was built here for this torch, if it is there and nobody else's."""
    try:
        path = built_path()
        return path if path.stat().st_uid in (os.getuid(), 0) else None
    except (OSError, RuntimeError):
        return None


def find() -> tuple[Path | None, str]:
    """The path of the library for the torch that is imported, and why it is that one or none."""
    given = os.environ.get(VARIABLE)
    if given:
        path = Path(given)
        path = path / NAME if path.is_dir() else path
        return (path, VARIABLE) if path.exists() else (None, f"{VARIABLE} names {path}, which does not exist")
    import torch

    built = _built()
    if built is not None:
        return built, "built here"
    choice = choose(torch.__version__, torch.version.cuda, torch._C._GLIBCXX_USE_CXX11_ABI, available())
    return (FOLDER / choice.name / NAME if choice.name else None), choice.why


def find_core() -> Path | None:
    """The library without torch, which the MemPool route and the pictures need."""
    given = os.environ.get("VMMGRAPH_CORE_LIBRARY")
    path = Path(given) if given else FOLDER / "libvmmgraph.so"
    return path if path.exists() else None
