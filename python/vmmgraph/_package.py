"""What the wheel brings for C and C++."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def cmake_dir() -> Path:
    """The folder for ``find_package(VmmGraph)``: ``-DVmmGraph_DIR=$(python -m vmmgraph --cmake-dir)``.

    Its component ``torch`` is the library for the torch that ``VmmGraph_TORCH`` names, such as ``2.11-cu13``. Raises FileNotFoundError where
    the package was installed without its libraries.
    """
    return _there("_lib/cmake/VmmGraph")


def include_dir() -> Path:
    """The folder that ``#include <vmmgraph/vmmgraph.h>`` is relative to. Raises as `cmake_dir`."""
    return _there("include")


def source_dir() -> Path:
    """The folder of what ``python -m vmmgraph build`` compiles. It is there in a wheel, and not in a checkout."""
    return _HERE / "_src"


def version() -> str:
    """The version of this package: of the checkout that it lies in, else as it was installed; empty where nobody says."""
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
