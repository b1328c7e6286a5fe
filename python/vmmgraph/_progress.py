"""Progress output on stderr while a command runs."""

from __future__ import annotations

import sys
import time

from ._files import printable, say


class Progress:
    """A progress line on stderr, shown on a terminal if the command takes long."""

    def __init__(self, lines: bool = False) -> None:
        self._on = sys.stderr.isatty()
        self._next = time.monotonic() + 0.3
        self._shown = False
        #: Without a terminal: prints a line from time to time.
        self._lines = lines and not self._on

    def __call__(self, text: str) -> None:
        if self._lines and time.monotonic() >= self._next:
            self._next = time.monotonic() + 10
            say(f"vmmgraph: {text}", file=sys.stderr)
            sys.stderr.flush()
        if self._on and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.1
            sys.stderr.write(f"\r\033[K{printable(text)[:100]}")
            sys.stderr.flush()
            self._shown = True

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            self._shown = False
