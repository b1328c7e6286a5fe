"""The source distribution: its files, and the choice of the torch release that it is built for.

VMMGRAPH_TEST_SDIST=1 also installs it with pip, as a user does: many minutes, with cargo and the
network. .ci/full does so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("build", reason="SKIPPED: scripts/setup.sh test installs the Python package build")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("vmmgraph-*.tar.gz"))


def test_it_has_every_source_of_the_build_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "PKG-INFO", "LICENSE", "Cargo.lock", "CMakeLists.txt", "python/CMakeLists.txt"} <= names
    assert {"scripts/torch-headers.sh", "scripts/wheels.bash", "scripts/torch-releases.txt"} <= names
    # Cargo reads the manifest of each member of the workspace.
    members = re.search(r"^members = \[(.*?)\]", (ROOT / "Cargo.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert members
    for member in re.findall(r'"([^"]+)"', members[1]):
        assert os.path.normpath(f"{member}/Cargo.toml") in names
    for folder in ("src", "cpp", "cmake", "include", "python"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        missing = {name for name in files if "__pycache__" not in name} - names
        assert len(files) > 10 and not missing, missing
    assert not [name for name in names if name.split("/")[0] in ("target", "build", ".venv", ".tools", ".git")]
    assert sdist.stat().st_size < 4 << 20


def torch_in(folder: Path, version: str, cuda: str | None) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda!r}\n"
    )
    return folder


def test_it_is_built_for_the_installed_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "python/floor"))
    import torch_release

    assert torch_release.release([tmp_path, torch_in(tmp_path / "a", "2.11.0+cu130", "13.0")]) == "2.11-cu13"
    assert torch_release.release([torch_in(tmp_path / "b", "2.9.1", "12.8")]) == "2.9-cu12"
    with pytest.raises(ValueError, match=r"without CUDA; install torch first, or pass --config-settings"):
        torch_release.release([torch_in(tmp_path / "c", "2.11.0+cpu", None)])
    with pytest.raises(ValueError, match=rf"^cannot choose a torch release: no torch in {tmp_path}; install torch"):
        torch_release.release([tmp_path, tmp_path])


@pytest.mark.skipif(os.environ.get("VMMGRAPH_TEST_SDIST") != "1", reason="SKIPPED: VMMGRAPH_TEST_SDIST=1 installs the sdist")
def test_pip_installs_it_for_the_installed_torch(sdist: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    packages = next((tmp_path / "venv/lib").glob("python3*")) / "site-packages"
    torch_in(packages, "2.11.0+cu130", "13.0")
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--no-cache-dir", "--no-deps", str(sdist)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.parent.name for path in packages.glob("vmmgraph/_lib/*/libvmmgraph_torch.so")] == ["torch-2.11-cu13"]
