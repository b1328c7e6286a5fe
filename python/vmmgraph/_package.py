"""Files of the wheel for C and C++."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def cmake_dir() -> Path:
    """Returns the folder for ``find_package(VmmGraph)``: ``-DVmmGraph_DIR=$(python -m vmmgraph
    --cmake-dir)``.

    ``VmmGraph_TORCH``, such as ``2.11-cu13``, selects the library of the component ``torch``.
    Raises FileNotFoundError if installed without libraries.
    """
    return _there("_lib/cmake/VmmGraph")


def include_dir() -> Path:
    """Returns the include folder of ``#include <vmmgraph/vmmgraph.h>``. Raises like `cmake_dir`."""
    return _there("include")


def source_dir() -> Path:
    """Returns the sources for ``python -m vmmgraph build``. Exists in a wheel, not in a
    checkout."""
    return _HERE / "_src"


def version() -> str:
    """Returns the version of this package, from its checkout or its installation; empty if
    unknown."""
    cargo = _HERE.parents[1] / "Cargo.toml"
    if cargo.is_file():
        found = re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"', cargo.read_text(), re.MULTILINE)
        if found:
            return found[1]
    try:
        return importlib.metadata.version("vmmgraph")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _there(name: str) -> Path:
    folder = _HERE / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there: this vmmgraph was installed without its libraries")
    return folder
