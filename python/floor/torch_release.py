#!/usr/bin/env python3
"""Prints the release and CUDA major version of the installed torch, such as ``2.11-cu13``, for
VMMGRAPH_RELEASES.

Reads torch's files without an import: pip builds in an environment that hides installed packages.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

REMEDY = "install torch first, or pass --config-settings=cmake.define.VMMGRAPH_RELEASES=2.11-cu13 to pip"


def release(folders: Iterable[Path]) -> str:
    """Returns the release of the torch in one of the folders. Raises ValueError without one."""
    looked = list(dict.fromkeys(folders))
    for folder in looked:
        version = folder / "torch" / "version.py"
        if version.is_file():
            text = version.read_text(encoding="utf8")
            number = re.search(r"^__version__ = '(\d+\.\d+)", text, re.MULTILINE)
            cuda = re.search(r"^cuda\b.*= '(\d+)", text, re.MULTILINE)
            if number is None or cuda is None:
                raise ValueError(f"cannot build for {folder}/torch: it is built without CUDA; {REMEDY}")
            return f"{number[1]}-cu{cuda[1]}"
    raise ValueError(f"cannot choose a torch release: no torch in {', '.join(map(str, looked))}; {REMEDY}")


if __name__ == "__main__":
    try:
        print(release([Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]))
    except ValueError as error:
        sys.exit(str(error))
