"""Fixtures of the Python package's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = str(ROOT / "python") + os.pathsep + os.environ.get("PYTHONPATH", "")


@pytest.fixture(params=["BaseGraph", "LaterGraph"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Enables VmmGraph over stand-ins. `door.log` records calls, `door.torch` is the module,
    `door.base` torch's graph class."""
    import stub
    from vmmgraph import _door, _enable, _graph

    base = getattr(stub, request.param)
    torch = stub.use_torch(monkeypatch, base)
    log: list[object] = []
    monkeypatch.setattr(stub.BaseGraph, "log", log)
    monkeypatch.setattr(stub.BaseGraph, "fail", set())
    door = _door.Door(stub.Library(log))
    door.log, door.torch, door.base = log, torch, base
    monkeypatch.setattr(_door, "_door", door)
    monkeypatch.setattr(_enable, "_status", None)
    monkeypatch.setattr(_enable, "_installed", None)
    monkeypatch.setattr(_graph, "address_of", lambda graph: 0x3000)
    assert _enable.enable().route == "blocks"
    log.clear()
    yield door
    _enable.disable_all()
