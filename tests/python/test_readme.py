"""README.md: its commands, programs and numbers.

The commands for C++ run in a copy of the tree, with the core of `make test` instead of cargo.
`make demo`, `make test` and `make wheel` are steps of .ci/run, which runs this file after the demo.
`pip install .` is run by test_sdist.py, `vllm serve` by bench/python/vllm_run.py on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ARCHIVE = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/libvmmgraph.a"
MIB = 1 << 20


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_each_command_is_run_by_a_test() -> None:
    steps = (ROOT / ".ci/run").read_text()
    lines = [line.split(" #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    other = [line for line in lines if not line.startswith("cmake")]
    assert other == [
        "pip install .",
        "VMMGRAPH=1 VMMGRAPH_KV=1 vllm serve Qwen/Qwen3-8B",
        "make demo",
        "make test",
        "make wheel RELEASES=2.11-cu13",
    ]
    for line in other[2:]:
        assert line.split("=")[0] in steps, line


def test_the_python_program_runs(session) -> None:
    (program,) = blocks("python")
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102, the page is ours


@pytest.mark.skipif(not ARCHIVE.exists(), reason="SKIPPED: no core (scripts/test.sh)")
def test_the_commands_for_cpp_build_a_package_and_the_program_prints_its_line(tmp_path: Path) -> None:
    for name in ("CMakeLists.txt", "CMakePresets.json", "Cargo.toml", "LICENSE", "cmake", "cpp", "include", "examples"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (commands,) = (block for block in blocks("sh") if "cmake" in block)
    first, rest = commands.split("--preset release", 1)
    run = f"{first}--preset release -DVMMGRAPH_PREBUILT_ARCHIVE={ARCHIVE}{rest}"
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-ec", run], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    engine = tmp_path / "engine"
    engine.mkdir()
    (program,), (snippet,) = blocks("cpp"), blocks("cmake")
    (engine / "main.cpp").write_text(program)
    head = "cmake_minimum_required(VERSION 3.16)\nproject(engine CXX)\nadd_executable(engine main.cpp)\n"
    (engine / "CMakeLists.txt").write_text(head + snippet)
    build = f"cmake -S . -B b -DCMAKE_PREFIX_PATH={tmp_path}/vmmgraph && cmake --build b && b/engine"
    done = subprocess.run(["bash", "-ec", build], cwd=engine, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (printed,) = re.findall(r"^It prints `(.*?)`", README, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == printed


def test_the_table_of_the_demo_is_what_the_demo_measured() -> None:
    file = ROOT / "build/demo.json"
    if not file.exists():
        pytest.skip("SKIPPED: no build/demo.json (make demo)")
    measured = set()
    for row in json.loads(file.read_text()):
        if row["way"] == "VmmGraph" and row["order"] == "ascending":
            floor, held = row["floor_bytes"], row["physical_bytes"]
            measured.add((round(floor / MIB), round(held / MIB), f"{held / floor:.3f}", row["wrong_blocks"]))
    found = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d\.\d+) \| (\d+) \|$", README, re.MULTILINE)
    assert len(found) == 4
    assert {(int(floor), int(held), ratio, int(wrong)) for floor, held, ratio, wrong in found} <= measured


def test_the_memory_of_each_way_is_that_of_the_recorded_run() -> None:
    rows = [row for row in json.loads((ROOT / "docs/performance/h200-shootout.json").read_text()) if row["set"] == "mixed"]
    held = {
        way: sorted({round(row["physical_mib"]) for row in rows if row["way"] == way}) for way in ("private", "shared", "blocks")
    }
    floor = {round(row["floor_mib"]) for row in rows}
    assert not any(row["wrong_replays"] for row in rows) and "No replay was wrong" in README
    for text in (
        f"65 graphs of 12 layers of 8B shape in {held['blocks'][0]:,} MiB; torch's shared pool takes {held['shared'][0]:,} to {held['shared'][-1]:,} MiB",
        f"A private pool for each graph takes {held['private'][0]:,} MiB",
        f"VmmGraph {held['blocks'][-1]:,} MiB, minimum {floor.pop():,} MiB",
    ):
        assert text in " ".join(README.split()), text


def test_a_sentence_has_at_most_14_words_in_the_mean() -> None:
    text = re.sub(r"^(```.*?^```|#.*?$|\|.*?$)", "", README, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    sentences = [
        " ".join(one.split()) for part in text.split("\n\n") for one in re.split(r"(?<=[.:])\s+(?=[A-Z`*\[])|\n\* ", part)
    ]
    lengths = sorted(len(one.split()) for one in sentences if len(one.split()) > 2)
    assert len(lengths) > 25
    assert sum(lengths) / len(lengths) <= 14 and lengths[len(lengths) * 9 // 10] <= 25, lengths
