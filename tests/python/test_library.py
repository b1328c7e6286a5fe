"""Choice of a library by the version strings of torch builds."""

from __future__ import annotations

import pytest
from vmmgraph import _library

THERE = ["torch-2.6-cu12", "torch-2.10-cu13", "torch-2.11-cu12", "torch-2.11-cu13", "torch-2.12.1-cu13", "torch-2.12-cu13"]


@pytest.mark.parametrize(
    ("version", "cuda", "name"),
    [
        ("2.11.0", "13.0", "torch-2.11-cu13"),
        ("2.11.0+cu130", "13.0", "torch-2.11-cu13"),
        ("2.11.0+cu128", "12.8", "torch-2.11-cu12"),
        ("2.11.0+cu126", "12.6", "torch-2.11-cu12"),
        ("2.11.0+cu131", "13.1", "torch-2.11-cu13"),
        ("2.11.1+cu130", "13.0", "torch-2.11-cu13"),
        ("2.11", "13.0", "torch-2.11-cu13"),
        (" 2.11.0+cu130 ", "13.0", "torch-2.11-cu13"),
        ("2.11.0+cu130.post1", "13.0", "torch-2.11-cu13"),
        ("2.10.0+cu130", "13.0", "torch-2.10-cu13"),
        ("2.6.0+cu126", "12.6", "torch-2.6-cu12"),
        ("2.6.0+cu124", "12.4", "torch-2.6-cu12"),
        ("2.12.1+cu130", "13.0", "torch-2.12.1-cu13"),
        ("2.12.0+cu130", "13.0", "torch-2.12-cu13"),
        # No library for this release or CUDA version.
        ("2.1.0+cu121", "12.1", None),
        ("2.10.0+cu128", "12.8", None),
        ("2.6.0+cu118", "11.8", None),
        ("2.13.0+cu130", "13.0", None),
        ("2.11.0+cu140", "14.0", None),
        ("3.0.0+cu130", "13.0", None),
        # Without CUDA.
        ("2.11.0+cpu", None, None),
        ("2.11.0", None, None),
        ("2.11.0+rocm6.4", None, None),
        ("2.11.0+xpu", None, None),
        # Not releases.
        ("2.11.0a0+git1a2b3c4", "13.0", None),
        ("2.11.0+git1a2b3c4", "13.0", None),
        ("2.12.0.dev20260101+cu130", "13.0", None),
        ("2.11.0rc1+cu130", "13.0", None),
        ("2.11.0a0+145a3a7bda.nv26.03", "13.0", None),
        ("2.11.0+145a3a7bda.nv26.03", "13.0", None),
        ("2.11.0b2", "13.0", None),
        # Not versions.
        ("", "13.0", None),
        ("unknown", "13.0", None),
        ("torch-2.11", "13.0", None),
    ],
)
def test_the_choice(version: str, cuda: str | None, name: str | None) -> None:
    choice = _library.choose(version, cuda, True, THERE)
    assert choice.name == name
    assert choice.why
    if version.strip() and name is None:
        assert version.strip().split("+")[0][:3] in choice.why


def test_the_old_abi_has_no_library() -> None:
    choice = _library.choose("2.6.0+cu124", "12.4", False, THERE)
    assert choice.name is None
    assert "ABI" in choice.why


def test_nothing_is_there() -> None:
    assert _library.choose("2.11.0", "13.0", True, []).name is None


def test_the_variable_names_a_file_or_a_folder(tmp_path, monkeypatch) -> None:
    library = tmp_path / _library.NAME
    monkeypatch.setenv(_library.VARIABLE, str(tmp_path))
    path, why = _library.find()
    assert path is None
    assert str(library) in why
    library.touch()
    assert _library.find() == (library, _library.VARIABLE)
    monkeypatch.setenv(_library.VARIABLE, str(library))
    assert _library.find() == (library, _library.VARIABLE)


def test_what_the_package_has(tmp_path) -> None:
    for name in ("torch-2.11-cu13", "torch-2.10-cu12", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "torch-2.11-cu13" / _library.NAME).touch()
    assert _library.available(tmp_path) == ["torch-2.11-cu13"]
