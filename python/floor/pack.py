#!/usr/bin/env python3
"""pack.py ARCHIVE BRIDGE OUT LEVEL: packs the precompiled core for `python -m vmmgraph build`: the
archive without debug information, compressed by xz with level 0 to 9, and the bridge's headers.
Keeps an OUT newer than ARCHIVE."""

import lzma
import pathlib
import shutil
import subprocess
import sys


def main(archive: str, bridge: str, folder: str, level: str) -> None:
    source, out = pathlib.Path(archive), pathlib.Path(folder)
    packed, stripped = out / "libvmmgraph.a.xz", out.parent / "stripped.a"
    if packed.exists() and packed.stat().st_mtime > source.stat().st_mtime:
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for header in sorted(pathlib.Path(bridge).rglob("*.h")):
        to = out / "cxxbridge" / header.relative_to(bridge)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header, to)
    subprocess.run(["strip", "--strip-debug", "-o", str(stripped), str(source)], check=True)
    part = out.parent / packed.name
    with stripped.open("rb") as file, lzma.open(part, "wb", preset=int(level)) as compressed:
        shutil.copyfileobj(file, compressed, 1 << 20)
    stripped.unlink()
    part.rename(packed)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
