"""``python -m vmmgraph check``: which library serves the torch at hand, by which route, and why."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Runs a command; its exit status."""
    import vmmgraph

    if arguments == ["check"]:
        print(vmmgraph.check())
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
