"""Selects and finds the library for the installed torch."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import _package

#: Path to libvmmgraph_torch.so or its folder; overrides the selection.
VARIABLE = "VMMGRAPH_LIBRARY"
NAME = "libvmmgraph_torch.so"
#: Folder for libraries of ``python -m vmmgraph build`` (default ``~/.cache/vmmgraph``).
CACHE = "VMMGRAPH_CACHE"
FOLDER = Path(__file__).parent / "_lib"

_RELEASE = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?(?P<pre>(?:a|b|rc|\.dev)\d*.*?)?(?:\+(?P<local>.*))?$")


class Choice(NamedTuple):
    """``name`` is one of ``available`` or ``None``."""

    name: str | None
    why: str


def choose(torch_version: str, cuda_version: str | None, cxx11abi: bool, available: Iterable[str]) -> Choice:
    """Selects the library for a torch, from folders named like ``torch-2.11-cu13`` or
    ``torch-2.11.1-cu13``.

    Arguments are ``torch.__version__``, ``torch.version.cuda`` and
    ``torch._C._GLIBCXX_USE_CXX11_ABI``. A minor release's library is tried for all patch releases,
    and checks the whole version when installed.
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
    """Returns the names of the libraries in the package."""
    return sorted(path.parent.name for path in folder.glob(f"torch-*/{NAME}"))


def cache_folder() -> Path:
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmmgraph"


def built_path() -> Path:
    """Returns the path of a locally built library for the imported torch, existing or not. The name
    identifies the exact build of torch and VmmGraph."""
    import torch

    version = torch.__version__
    facts = (version, getattr(torch.version, "git_version", ""), torch.version.cuda, platform.machine(), _package.version())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    cuda = str(torch.version.cuda).split(".")[0]
    return cache_folder() / f"torch-{re.sub(r'[^0-9A-Za-z.]', '-', version)}-cu{cuda}-{digest}" / NAME


def _built() -> Path | None:
    """Returns the locally built library, if it exists and belongs to this user or root."""
    try:
        path = built_path()
        return path if path.stat().st_uid in (os.getuid(), 0) else None
    except (OSError, RuntimeError):
        return None


def find() -> tuple[Path | None, str]:
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
    """Returns the library without torch, for the MemPool route and the drawing of maps."""
    given = os.environ.get("VMMGRAPH_CORE_LIBRARY")
    path = Path(given) if given else FOLDER / "libvmmgraph.so"
    return path if path.exists() else None
