"""``python -m vmmgraph``, and the console script ``vmmgraph``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command (default: the process's arguments) and returns its exit status."""
    from ._cli import main as run

    return run(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
