"""docs/reference-environment.md lists exactly the variables of the sources."""

from __future__ import annotations

import re
from pathlib import Path

from vmmgraph import _environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference-environment.md").read_text()
#: Name and values of each row whose first cell is one variable.
ROWS = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
#: Names in the sources without a row: options of CMake, variables of the library's tests.
OTHERS = {
    "VMMGRAPH_CUDART",
    "VMMGRAPH_CUDA_INCLUDE",
    "VMMGRAPH_PREBUILT_ARCHIVE",
    "VMMGRAPH_PREBUILT_TORCH_ARCHIVE",
    "VMMGRAPH_SONAME_VERSION",
    "VMMGRAPH_TEST",
    "VMMGRAPH_TEST_LIBRARY",
    "VMMGRAPH_TORCH",
    "VMMGRAPH_TORCH_PRECOMPILE",
    "VMMGRAPH_TORCH_ROOT",
    "VMMGRAPH_TORCH_RPATH",
}


SOURCES = [
    path
    for folder in ("src", "cpp", "python/vmmgraph")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".rs", ".cpp", ".py")
]


def values(variable: _environment.Variable) -> str:
    if variable.values is None:
        return "text"
    if variable.values is int:
        return "number"
    if variable.values == _environment.FLAG:
        return "flag"
    return ", ".join(f"`{value}`" for value in variable.values)


def test_the_page_lists_every_variable_with_its_values() -> None:
    listed = {name: text for name, text in ROWS.items() if name.startswith("VMMGRAPH")}
    assert listed == {name: values(variable) for name, variable in _environment.VARIABLES.items()}
    assert list(listed) == sorted(listed)


def test_the_page_lists_every_variable_that_the_sources_read() -> None:
    assert len(SOURCES) > 100
    read = {name for path in SOURCES for name in re.findall(r'"((?:VMMGRAPH|TMS)(?:_[A-Z]+)*)"', path.read_text())}
    assert read - OTHERS == {name for name in ROWS if name.startswith(("VMMGRAPH", "TMS"))}


def test_the_page_lists_the_variables_of_other_software() -> None:
    calls = r'(?:env::var(?:_os)?|getenv|environ\.get)\("([A-Z_]+)"|environ\["([A-Z_]+)"\]'
    read = {first or second for path in SOURCES for first, second in re.findall(calls, path.read_text())}
    missing = {name for name in read if f"`{name}`" not in PAGE and not name.startswith("VMMGRAPH_TEST")}
    assert not missing
