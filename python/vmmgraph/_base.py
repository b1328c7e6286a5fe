"""Derives the package's graph class from the C++ base of torch's ``CUDAGraph``.

torch's Python layer around captures and replays (hooks, trackers, annotations; 2.12 and later)
stays above the package's class.
"""

from __future__ import annotations

import contextlib
from typing import Any


def core_of(base: type) -> type:
    """Returns the capturing class: torch's C++ class, below all Python layers of torch and of other
    libraries."""
    return next((cls for cls in reversed(base.__mro__) if "capture_begin" in vars(cls)), base)


def over(base: type, captured: type, *later: str) -> tuple[type, ...]:
    """Returns the bases of the replacement of ``base``. ``later``: methods missing in some torch
    releases."""
    core = core_of(base)
    for name in later:
        if not hasattr(core, name):
            delattr(captured, name)
    # The capturing class may be a Python class of a third library.
    return (captured,) if base is core else (base, captured)


def passes_on(base: type, name: str) -> bool:
    """Returns True if the method only calls its super method, like torch's Python ``replay`` up to
    2.13."""
    code = getattr(vars(base).get(name), "__code__", None)
    return code is not None and set(code.co_names) == {"super", name}


def in_place_of(base: type, cls: Any) -> type:
    """Finishes the class. Its destructor calls ``_let_go`` before torch's destructor."""

    def __del__(self: Any) -> None:
        with contextlib.suppress(Exception):
            self._let_go()
        torchs = getattr(super(cls, self), "__del__", None)
        if torchs is not None:
            torchs()

    cls.__del__ = __del__
    cls.__module__, cls.__qualname__ = base.__module__, "CUDAGraph"
    return cls
