"""`vmmgraph doctor`: every problem has a remedy, and any error sets the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vmmgraph import _cli, _doctor, _environment

HEALTHY = {
    "driver": {"version": 13000, "devices": ["NVIDIA H200"]},
    "torch": {
        "version": "2.11.0+cu130",
        "cuda": "13.0",
        "route": "prebuilt",
        "library": "/lib/libvmmgraph_torch.so",
        "built_for": "2.11.0",
        "library_version": "0.1.0",
    },
    "core": "/lib/libvmmgraph.so",
    "saver": {"path": "/lib/libvmmgraph_memory_saver.so", "exists": True},
    "engines": {"vllm": "0.24.0"},
    "plugins": {"vllm": True, "sglang": False},
    "environment": {"VMMGRAPH": "1"},
}
NO_SAVER = {
    "saver": {"path": "/lib/libvmmgraph_memory_saver.so", "exists": False},
    "environment": {"VMMGRAPH": "1", "VMMGRAPH_SLEEP": "1"},
}
KV_WITHOUT_EFFECT = {
    "engines": {"sglang": "0.5.23"},
    "plugins": {"vllm": True, "sglang": True},
    "environment": {"VMMGRAPH": "1", "VMMGRAPH_KV": "1"},
}


def test_the_quickstart_of_vllm_shows_a_healthy_machine() -> None:
    library = ".../vmmgraph/_lib/torch-2.11-cu13/libvmmgraph_torch.so"
    changes = {"torch": HEALTHY["torch"] | {"library": library}, "environment": {"VMMGRAPH": "1", "VMMGRAPH_KV": "1"}}
    *lines, last = _doctor.as_text(_doctor.examine(HEALTHY | changes))
    page = (Path(__file__).resolve().parents[2] / "docs/quickstart-vllm.md").read_text()
    assert "```text\n" + "\n".join([*lines, last.split(" (")[0]]) in page


def states(**changes: Any) -> dict[str, tuple[str, str, str]]:
    return {line.subject: line[1:] for line in _doctor.examine(HEALTHY | changes)}


def test_a_healthy_machine_has_no_remedy() -> None:
    found = states()
    assert list(found) == ["driver", "GPU", "torch", "library", "vllm", "vllm plugin", "environment"]
    assert all(state == "ok" and not remedy for state, _, remedy in found.values())


@pytest.mark.parametrize(
    ("subject", "state", "text", "changes"),
    [
        ("GPU", "error", "no CUDA driver: libcuda.so.1", {"driver": {"error": "libcuda.so.1: no such file"}}),
        ("GPU", "error", "no device", {"driver": {"version": 13000, "devices": []}}),
        ("driver", "error", "CUDA 11.8", {"driver": {"version": 11080, "devices": ["A"]}}),
        ("torch", "error", "cannot be imported", {"torch": {"error": "No module named 'torch'"}}),
        ("torch", "error", "libcudnn", {"torch": {"error": "libcudnn.so.9: no such file", "installed": "2.11.0"}}),
        ("torch", "error", "without CUDA", {"torch": {"version": "2.11.0", "cuda": None}}),
        ("library", "warning", "no library for torch 2.15", {"torch": HEALTHY["torch"] | {"route": "no library for torch 2.15"}}),
        ("library", "error", "is refused: wrong", {"torch": HEALTHY["torch"] | {"refused": "wrong ABI"}}),
        ("vllm", "warning", "0.34.0 was never run", {"engines": {"vllm": "0.34.0"}}),
        ("vllm plugin", "error", "has no vmmgraph", {"plugins": {"vllm": False, "sglang": False}}),
        ("vllm plugin", "error", "VLLM_PLUGINS", {"environment": {"VMMGRAPH": "1", "VLLM_PLUGINS": "other"}}),
        ("vllm plugin", "warning", "off", {"environment": {}}),
        ("KV cache", "warning", "changes nothing with SGLang 0.5.23", KV_WITHOUT_EFFECT),
        ("memory saver", "error", "saver.so does not exist, so vLLM sleeps by its own", NO_SAVER),
        ("engine", "warning", "neither vLLM nor SGLang", {"engines": {}}),
        ("environment", "error", "VMMGRAPH=yes-please", {"environment": {"VMMGRAPH": "yes-please"}}),
        ("environment", "error", "cannot use VMMGRAPH_SLEP", {"environment": {"VMMGRAPH_SLEP": "1"}}),
        ("environment", "error", "cudaMallocAsync", {"environment": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}}),
        ("limits", "warning", "or is off (vLLM 0.24)", {"driver": {"version": 13000, "devices": ["A", "B"]}}),
    ],
)
def test_each_problem_has_a_remedy(subject: str, state: str, text: str, changes: dict[str, Any]) -> None:
    if state == "warning" and subject == "library":
        changes["torch"] = {name: value for name, value in changes["torch"].items() if name != "library"}
    found = states(**changes)[subject]
    assert found[0] == state and text in found[1] and found[2]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("on", True), ("YES", True), ("0", False), ("", False), ("off", False)])
def test_flags(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("VMMGRAPH", value)
    assert _environment.flag("VMMGRAPH") is on


def test_an_unknown_value_is_an_error_and_leaves_the_plugin_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VMMGRAPH", "yes-please")
    with pytest.raises(ValueError, match=r"cannot use VMMGRAPH=yes-please: the value is unknown; set one of: 1, on"):
        _environment.flag("VMMGRAPH")
    from vmmgraph.plugins import _common

    assert not _common.wanted() and "yes-please" in caplog.text


def test_the_status_and_the_json_say_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for facts, status in ((HEALTHY, 0), (HEALTHY | {"torch": {"error": "none"}}, 2)):
        monkeypatch.setattr(_doctor, "gather", lambda facts=facts: facts)
        assert _cli.main(["doctor", "--json"]) == status
        lines = json.loads(capsys.readouterr().out)
        assert any(line["state"] == "error" for line in lines) is bool(status)
        assert _cli.main(["doctor"]) == status
        assert f"{int(bool(status))} error" in capsys.readouterr().out


def test_this_machine_is_examined_without_a_traceback() -> None:
    assert {line.subject for line in _doctor.examine(_doctor.gather())} >= {"GPU", "torch"}
