"""`scripts/reference.py`: the reference of the site has every public name of C, C++ and Python."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include/vmmgraph"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "docs/SUMMARY.md", folder)
    subprocess.run([sys.executable, ROOT / "scripts/reference.py", folder], check=True, capture_output=True)
    return folder


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


def test_every_c_function_type_and_number_is_there(site: Path) -> None:
    header = (INCLUDE / "vmmgraph.h").read_text()
    page = (site / "reference-c.md").read_text()
    functions = re.findall(r"^(?:VMMGRAPH_API )?[\w ]+[ *](vmmgraph_\w+)\(", header, re.MULTILINE)
    types = re.findall(r"^} (vmmgraph_\w+);$", header, re.MULTILINE)
    numbers = re.findall(r"^#define (VMMGRAPH_(?!VERSION|API)\w+) \S+$", header, re.MULTILINE)
    assert len(functions) == header.count("\nVMMGRAPH_API") > 200 and len(types) > 40 and len(numbers) > 80
    assert [name for name in functions + types if name not in headings(site / "reference-c.md")] == []
    assert [name for name in numbers if f"| `{name}` |" not in page] == []


def test_every_class_of_cpp_is_there(site: Path) -> None:
    shown = headings(site / "reference-cpp.md")
    for path in INCLUDE.glob("*.hpp"):
        text = re.sub(
            r"^namespace (vmmgraph::)?detail \{.*?^\}  // namespace", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        names = re.findall(r"^(?:class|struct|enum class) (?:VMMGRAPH_API )?(\w+)[^;\n]*\{", text, re.MULTILINE)
        assert [name for name in names if name not in shown] == [], path.name
        assert f"vmmgraph/{path.name}" in shown
    assert (
        "- `` void* allocate(std::size_t bytes, void* stream = nullptr); ``<br>Allocates at least"
        in (site / "reference-cpp.md").read_text()
    )


def test_every_public_name_of_python_is_there(site: Path) -> None:
    shown = headings(site / "reference-python.md")
    tree = ast.parse((ROOT / "python/vmmgraph/__init__.py").read_text())
    names = next(
        ast.literal_eval(one.value) for one in tree.body if isinstance(one, ast.Assign) and one.targets[0].id == "__all__"
    )
    assert len(names) > 15
    assert [name for name in names if f"vmmgraph.{name}" not in shown] == []


def test_the_pages_are_in_the_summary_and_their_links_lead_somewhere(site: Path) -> None:
    summary = (site / "SUMMARY.md").read_text()
    pages = sorted(site.glob("reference-*.md"))
    assert len(pages) == 4
    for page in pages:
        text = page.read_text()
        assert f"({page.name})" in summary and text.count("```") % 2 == 0
        for name, anchor in re.findall(
            r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", re.sub(r"`[^`\n]*`|^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        ):
            assert not name or name.startswith("rust/") or (site / name).exists() or (ROOT / "docs" / name).exists(), (
                page.name,
                name,
            )
            assert not anchor or any(
                re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") == anchor for one in headings(page)
            ), anchor
