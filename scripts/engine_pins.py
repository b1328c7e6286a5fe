#!/usr/bin/env python3
"""Writes scripts/engine-pins.txt: the torch release pinned by each release of vLLM and SGLang.

Run it with a python that has pip, in a checkout. pip reads the metadata of each wheel from the
package index. The JSON interface of PyPI has no page for some releases.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).with_name("engine-pins.txt")
#: Each engine, and its first release in the list.
FIRST = {"vllm": "0.22.0", "sglang": "0.5.14"}
HEADER = "# Torch pinned by each engine release. Written by scripts/engine_pins.py from the package index.\n"


def pip(*arguments):
    return subprocess.run([sys.executable, "-m", "pip", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def key(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def releases(engine):
    """Returns the engine's releases without pre-releases, oldest first."""
    listed = re.search(r"^Available versions: (.*)$", pip("index", "versions", engine), re.MULTILINE)[1].split(", ")
    return sorted((one for one in listed if key(one) >= key(FIRST[engine])), key=key)


def pinned(engine, version):
    """Returns the torch release in the requirements of one wheel. No wheel is downloaded whole."""
    wheels = ["--only-binary=:all:", "--python-version=3.12", "--target=unused", "--use-feature=fast-deps"]
    wheels += [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (17, 28, 31, 34, 35)]
    report = pip("install", "--dry-run", "--ignore-installed", "--no-deps", "-qq", "--report=-", *wheels, f"{engine}=={version}")
    requirements = json.loads(report)["install"][0]["metadata"].get("requires_dist", [])
    return next(found[1] for one in requirements if (found := re.match(r"torch ?==([0-9.]+)", one)))


def main():
    rows = []
    for engine in FIRST:
        for version in releases(engine):
            rows.append(f"{engine} {version} {pinned(engine, version)}\n")
            print(rows[-1], end="", flush=True)
    PINS.write_text(HEADER + "".join(rows))


if __name__ == "__main__":
    main()
