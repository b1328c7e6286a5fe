"""How a class of ours comes below torch's ``CUDAGraph``.

What torch does in Python around a capture and a replay stays torch's: hooks, trackers of inputs, annotations (2.12 and later). So ours stands
below that, on the class in C++, and only what no torch has is on top.
"""

from __future__ import annotations

import contextlib
from typing import Any


def core_of(base: type) -> type:
    """The class that captures: torch's own in C++, below what torch, and whoever came before us, does around it in Python."""
    return next((cls for cls in reversed(base.__mro__) if "capture_begin" in vars(cls)), base)


def over(base: type, captured: type, *later: str) -> tuple[type, ...]:
    """The classes that the one in place of ``base`` is derived from, ``captured`` being ours. ``later``: what not every torch has."""
    core = core_of(base)
    for name in later:
        # What this torch lacks is not ours to promise.
        if not hasattr(core, name):
            delattr(captured, name)
    # Another library's class may be the one that captures.
    return (captured,) if base is core else (base, captured)


def passes_on(base: type, name: str) -> bool:
    """Whether all that ``base`` does under that name is to call what stands below it, as torch's ``replay`` in Python up to 2.13: its code names nothing
    else."""
    code = getattr(vars(base).get(name), "__code__", None)
    return code is not None and set(code.co_names) == {"super", name}


def in_place_of(base: type, cls: Any) -> type:
    """The class, under the name that programs know; what it makes lets go of what is ours (``_let_go``) before torch's destructor."""

    def __del__(self: Any) -> None:
        with contextlib.suppress(Exception):
            self._let_go()
        torchs = getattr(super(cls, self), "__del__", None)
        if torchs is not None:
            torchs()

    cls.__del__ = __del__
    cls.__module__, cls.__qualname__ = base.__module__, "CUDAGraph"
    return cls
