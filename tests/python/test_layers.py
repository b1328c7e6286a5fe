"""Imports among the package's modules form no circle, imports inside functions included."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python/vmmgraph"


def modules() -> dict[str, Path]:
    """Returns the package's modules by name. The shims are programs of their own."""
    paths = (path for path in PACKAGE.rglob("*.py") if "_shims" not in path.parts)
    return {
        ".".join(("vmmgraph", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path for path in paths
    }


def imported(name: str, source: str, package: bool, known: set[str]) -> Iterator[str]:
    """Yields the package's modules imported by a module, except for type checkers."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in for_types:
            continue
        parts = name.split(".")
        base = ".".join(parts[: len(parts) - node.level + package])
        base = f"{base}.{node.module}" if node.module else base
        for alias in node.names:
            yield full if (full := f"{base}.{alias.name}") in known else base


def graph() -> dict[str, set[str]]:
    known = modules()
    return {
        name: set(imported(name, path.read_text(encoding="utf8"), path.name == "__init__.py", set(known))) - {name}
        for name, path in known.items()
    }


def test_imports_form_no_circle() -> None:
    found = graph()
    assert "vmmgraph._arena" in found["vmmgraph._session"] and "vmmgraph._doctor" in found["vmmgraph._cli"]
    graphlib.TopologicalSorter(found).prepare()


def test_a_circle_is_found() -> None:
    known = {"vmmgraph.a", "vmmgraph.b"}
    sources = {"vmmgraph.a": "def f():\n    from . import b", "vmmgraph.b": "from .a import f"}
    found = {name: set(imported(name, source, False, known)) for name, source in sources.items()}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(found).prepare()
