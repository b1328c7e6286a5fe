"""Keeps inductor's CUDA graph trees in torch's memory: the trees checkpoint their pool, which
arenas do not support."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TREES = "torch._inductor.cudagraph_trees"
#: Methods that make and capture graphs.
_METHODS = {"CUDAGraphTreeManager": ("__init__",), "CUDAGraphNode": ("__init__", "_record")}


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        from ._scopes import disabled

        with disabled():
            return method(*args, **kwargs)

    return guarded


def _patch(module: ModuleType, undo: list[Callable[[], None]]) -> None:
    for name, methods in _METHODS.items():
        owner = getattr(module, name, None)
        for method in methods:
            before = getattr(owner, method, None)
            if owner is not None and before is not None:
                setattr(owner, method, _guarded(before))
                undo.append(functools.partial(setattr, owner, method, before))


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls `then(module)` after a module was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then
        self.looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        execute, then = spec.loader.exec_module, self.then

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Calls `then(module)` now, or after the module's import. Returns a function to cancel the
    call."""
    if name in sys.modules:
        then(sys.modules[name])
        return lambda: None
    finder = WhenImported(name, then)
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None


def keep_out() -> Callable[[], None]:
    """Makes the trees' captures use torch's memory, also if imported later. Returns a function to
    undo the change."""
    undo: list[Callable[[], None]] = []
    undo.append(when_imported(TREES, lambda module: _patch(module, undo)))

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all
