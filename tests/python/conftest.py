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
def session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Enables VmmGraph over stand-ins. `session.log` records calls, `session.torch` is the module,
    `session.base` torch's graph class."""
    import stub
    from vmmgraph import _enable, _graph, _session

    base = getattr(stub, request.param)
    torch = stub.use_torch(monkeypatch, base)
    log: list[object] = []
    monkeypatch.setattr(stub.BaseGraph, "log", log)
    monkeypatch.setattr(stub.BaseGraph, "fail", set())
    session = _session.Session(stub.Library(log))
    session.log, session.torch, session.base = log, torch, base
    monkeypatch.setattr(_session, "_session", session)
    monkeypatch.setattr(_enable, "_status", None)
    monkeypatch.setattr(_enable, "_installed", None)
    monkeypatch.setattr(_graph, "address_of", lambda graph: 0x3000)
    assert _enable.enable().route == "blocks"
    log.clear()
    yield session
    _enable.disable_all()
