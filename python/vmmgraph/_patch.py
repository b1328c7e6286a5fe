"""Replaces names in torch, and restores them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Installed:
    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.undo.append(lambda: setattr(owner, name, before))

    def undo_all(self) -> None:
        while self.undo:
            self.undo.pop()()


def put_in_place(cls: type, base: type) -> Installed:
    """Replaces torch's class, in torch and in modules with an imported name for the class."""
    import torch

    installed = Installed()
    installed.replace(torch.cuda, "CUDAGraph", cls)
    installed.replace(torch.cuda.graphs, "CUDAGraph", cls)
    for module in list(sys.modules.values()):
        # Not getattr: some modules load further modules on attribute access.
        if getattr(module, "__dict__", {}).get("CUDAGraph") is base:
            installed.replace(module, "CUDAGraph", cls)
    return installed
