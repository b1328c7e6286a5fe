"""`scripts/setup.sh` on a machine without tools: which packages each purpose installs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[2] / "scripts/setup.sh"
USED = ("bash", "dirname", "sha256sum", "cut", "touch", "mkdir", "ln")
#: Logs its arguments. As python3 it makes an environment whose python is this program.
STUB = """#!/bin/bash
[ "$1" = -c ] || echo "${0##*/} $*" >>"$LOG"
[ "$2" != venv ] || { mkdir -p "$3/bin" && ln -sf "$0" "$3/bin/python"; }
[ "${0##*/}" != id ] || echo 0
"""


@pytest.fixture
def installed(tmp_path: Path):
    """Returns a function that runs the set-up for a purpose and returns the log of the tools."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in USED:
        (tools / name).symlink_to(shutil.which(name))
    for name in ("cargo", "apt-get", "id", "python3"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SETUP, tmp_path / "scripts")
    (tmp_path / "scripts/memory-viz.sh").write_text("#!/bin/bash\n")
    (tmp_path / "scripts/memory-viz.sh").chmod(0o755)

    def run(purpose: str) -> str:
        log = tmp_path / f"{purpose}.log"
        log.touch()
        environment = {"PATH": str(tools), "LOG": str(log)}
        subprocess.run([tmp_path / "scripts/setup.sh", purpose], env=environment, check=True, capture_output=True)
        return log.read_text()

    return run


def test_a_wheel_needs_neither_a_browser_nor_tests_nor_torch(installed) -> None:
    log = installed("wheel")
    assert all(name in log for name in ("g++", "cmake", "ninja-build", "binutils", "build==", "scikit-build-core=="))
    assert not [
        name for name in ("chromium", "gtest", "pkg-config", "torch", "pytest", "ruff", "clang-format", "sympy") if name in log
    ]


def test_tests_need_more_than_a_wheel_and_a_second_set_up_nothing_from_the_index(installed) -> None:
    first = installed("wheel")
    log = installed("test")
    assert all(name in log for name in ("chromium", "torch==2.11.0", "pytest==", "build==", "cmake"))
    assert "pip install" in first and "pip install" in log
    assert "pip install" not in installed("wheel").removeprefix(first)


@pytest.mark.parametrize("purpose", ["demo", "docs"])
def test_the_demo_and_the_site_need_no_environment(installed, purpose: str) -> None:
    log = installed(purpose)
    assert "gcc" in log and "venv" not in log and "cmake" not in log
