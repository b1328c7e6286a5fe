"""Runs the examples of docs/python.md over stand-ins."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_examples_run(door) -> None:
    import vmmgraph

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names = {"torch": door.torch, "vmmgraph": vmmgraph, "model": lambda x: x, "x": object(), "print": lambda *values: None}
    names |= {"project": lambda x: x, "all_reduce": lambda x: None}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102, the page is ours
    called = [entry[0] for entry in door.log]
    assert called.count("torch_shape_open") == 4
    assert called.count("torch_replay") == 4
    assert called.count("torch_eager_enter") == called.count("torch_eager_leave_of") == 1
    assert called.count("torch_remote_enter") == called.count("torch_remote_leave") == 1


def test_every_public_name_is_explained() -> None:
    import vmmgraph

    for name in vmmgraph.__all__:
        assert getattr(vmmgraph, name).__doc__, name
