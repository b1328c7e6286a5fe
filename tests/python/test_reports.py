"""The report programs without a GPU: names, and the runner's verdicts. `reports/run_all.py` runs
the programs on a GPU."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

REPORTS = Path(__file__).parent / "reports"
PROGRAMS = sorted(path for path in REPORTS.glob("*.py") if path.stem not in ("kit", "paged", "run_all"))


@pytest.fixture
def runner():
    spec = importlib.util.spec_from_file_location("run_all", REPORTS / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_what_it_does_and_prints_its_own_name(path: Path) -> None:
    source = path.read_text()
    assert len(ast.get_docstring(ast.parse(source)).split()) >= 25
    assert source.endswith(f'if __name__ == "__main__":\n    kit.run("{path.stem}", body)\n')


@pytest.mark.parametrize(
    ("stock", "ours", "verdict"),
    [
        ({"ok": True, "mib": 100, "gpu_ms": 1.0}, {"ok": True, "mib": 105, "gpu_ms": 1.05}, "as stock"),
        ({"ok": True, "mib": 100}, {"ok": True, "mib": 106}, "MORE MEMORY"),
        ({"ok": True, "mib": 100, "gpu_ms": 1.0}, {"ok": True, "mib": 106, "gpu_ms": 1.2}, "MORE MEMORY, SLOWER"),
        ({"ok": False}, {"ok": True, "mib": 1}, "better than stock"),
        ({"ok": True}, {"ok": False}, "BREAKS HERE ONLY"),
        ({"ok": False}, {"ok": False}, "both fail"),
        ({}, {"ok": True}, "as stock"),
        ({"ok": True}, {}, ""),
    ],
)
def test_verdicts(runner, stock: dict, ours: dict, verdict: str) -> None:
    assert runner.verdict(stock, ours) == verdict
    lines = {"one": {way: line for way, line in (("stock", stock), ("ours", ours)) if line}}
    heads, row = runner.table(["one"], ["stock", "ours"], lines)
    assert heads.endswith("verdict") and row.rstrip().endswith(verdict)


def test_a_program_that_ends_without_a_line_or_badly_is_wrong(runner, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "HERE", tmp_path)
    ends = "import os; os.abort()"
    good = f"print({json.dumps({'case': 'good', 'ok': True, 'detail': 'fine'})!r})"
    said = "import sys; print('vmmgraph: a warning', file=sys.stderr)"
    for name, source in {"aborts": ends, "good": f"{good}\n{said}", "late": f"{good}\n{ends}", "silent": "1 / 0"}.items():
        (tmp_path / f"{name}.py").write_text(source)
    assert runner.one("aborts", "ours")["exit"] == -6
    assert runner.one("good", "stock") | {"wall": 0} == {
        "case": "good",
        "way": "stock",
        "ok": True,
        "detail": "fine",
        "said": ["vmmgraph: a warning"],
        "wall": 0,
    }
    late = runner.one("late", "ours")
    assert not late["ok"] and late["exit"] == -6
    assert "ZeroDivisionError" in runner.one("silent", "ours")["detail"]


def test_parts_cover_all_programs(runner) -> None:
    assert runner.cases() == [path.stem for path in PROGRAMS]
    assert runner.BESIDE <= set(runner.cases()) and set(runner.LONG) <= set(runner.cases())
    done = subprocess.run([sys.executable, REPORTS / "run_all.py", "--help"], capture_output=True, text=True, check=True)
    assert "--part" in done.stdout
