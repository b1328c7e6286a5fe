"""Program location at which a capture begins: file and line of the nearest frame of the program."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

#: Number of path parts shown: in most projects a file is known by its folder.
PARTS = 2


@functools.cache
def _machinery(file: str) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [str(Path(__file__).parent), *([str(Path(torch).parent)] if torch else [])]
    return file == contextlib.__file__ or file.startswith("<frozen ") or any(file.startswith(f"{folder}/") for folder in folders)


@functools.cache
def _shown(file: str) -> str:
    return "/".join([part for part in Path(file).parts if part != "/"][-PARTS:])


def call_site() -> str:
    """Returns a location like ``engine/capture.py:120``; empty without a frame of the program.
    Reads no sources."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _machinery(file):
            return f"{_shown(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
