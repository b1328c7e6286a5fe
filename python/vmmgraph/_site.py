"""Where in the program a capture begins: file and line of the nearest frame that is the program's own."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

#: Of a path so many parts are shown: a file is known by its folder in most projects.
PARTS = 2


@functools.cache
def _machinery(file: str) -> bool:
    """Whether a file is of this package, torch's, or what runs context managers."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [str(Path(__file__).parent), *([str(Path(torch).parent)] if torch else [])]
    return file == contextlib.__file__ or file.startswith("<frozen ") or any(file.startswith(f"{folder}/") for folder in folders)


@functools.cache
def _shown(file: str) -> str:
    """The parts of a path that are shown."""
    return "/".join([part for part in Path(file).parts if part != "/"][-PARTS:])


def call_site() -> str:
    """Such as ``engine/capture.py:120``; empty where nobody but torch and this package is on the stack. Takes no longer than the walk up
    to there: no source is read."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _machinery(file):
            return f"{_shown(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
