"""Engine releases: the pins are covered by libraries, the page follows its data, and every recorded
run has a record."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

import pytest
from vmmgraph import _engines
from vmmgraph.plugins import _common

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = (ROOT / "docs/performance.md").read_text()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "scripts/compatibility.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pinned_torch_has_a_library(script) -> None:
    pins = script.pins()
    assert len(pins) > 20 and {engine for engine, *_ in pins} == {"vllm", "sglang"}
    assert [pin for pin in pins if script.library(pin[2]) is None] == []
    assert script.library("2.14.0") == "2.14.1" and script.library("2.9.0") is None


def test_the_page_follows_its_data(script) -> None:
    assert script.PAGE.read_text() == script.page(), "run scripts/compatibility.py"


@pytest.mark.parametrize("run", _engines.RUNS, ids=lambda run: f"{run.engine}-{run.version}-{run.record}")
def test_a_recorded_run_has_its_record(run: _engines.Run) -> None:
    sections = re.split(r"^##+ (.*)$", PERFORMANCE, flags=re.MULTILINE)
    record = dict(zip(sections[1::2], sections[2::2], strict=True))[run.record]
    day = run.date.removeprefix("by ")
    assert day in record or "2026-11-27, and 2.12.1 again on 2026-11-28" in record
    if run.engine == "torch":
        assert run.version in record or run.version == "2.11.0"
    for number in re.findall(r"[\d,]{2,}\d", run.result):
        assert number in record, number


@pytest.mark.parametrize(
    ("engine", "version", "known"),
    [
        ("vllm", "0.24.0", True),
        ("vllm", "0.24.1", True),
        ("vllm", "0.240.0", False),
        ("vllm", "0.34.0", False),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.20", False),
        ("transformers", "5.1.0", True),
        ("transformers", "4.57.0", False),
    ],
)
def test_a_release_without_a_run_is_named(engine: str, version: str, known: bool) -> None:
    sentence = _engines.outside(engine, version)
    assert (sentence is None) is known
    assert known or f"{_engines.NAMES[engine]} {version} was never run" in sentence


@pytest.mark.parametrize(("version", "lines"), [("0.24.0", 0), ("0.34.0", 1), (None, 0)])
def test_a_plugin_warns_in_one_line(
    version: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vmmgraph import _enable

    monkeypatch.setattr(_engines, "installed", lambda engine: version if engine == "vllm" else None)
    monkeypatch.setattr(_enable, "enable", lambda **_: _enable.Status("mempool", "a test", None))
    with caplog.at_level(logging.WARNING, "vmmgraph"):
        assert _common.enable_for("vLLM") is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == lines
    assert all("vLLM 0.34.0 was never run" in line and _engines.REMEDY in line and "\n" not in line for line in warnings)


def test_a_plugin_names_each_variable_without_effect_on_its_route(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vmmgraph import _enable

    monkeypatch.setattr(_engines, "installed", lambda engine: "0.24.0")
    monkeypatch.setattr(_enable, "enable", lambda **_: _enable.Status("mempool", "a test", None))
    monkeypatch.setenv("VMMGRAPH_KV", "1")
    monkeypatch.setenv("VMMGRAPH_SLEEP", "0")
    with caplog.at_level(logging.WARNING, "vmmgraph"):
        assert _common.enable_for("vLLM") is None
    assert [line.split(":")[1] for line in caplog.messages] == [" cannot use VMMGRAPH_KV on the mempool route"]
