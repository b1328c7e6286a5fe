#!/usr/bin/env python3
"""Prints the third-party notices of libvmmgraph: every linked crate with its licence and licence
texts.

scripts/notices.py [PACKAGE] > THIRD_PARTY_NOTICES.txt

Omits crates used only by build scripts, procedural macros, tests or non-Linux platforms: they are
not distributed.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXTS = re.compile(r"(?i)^(licen[cs]e|copying|notice|unlicense|copyright)")


def metadata():
    command = [
        "cargo",
        "metadata",
        "--locked",
        "--format-version",
        "1",
        "--filter-platform",
        "x86_64-unknown-linux-gnu",
    ]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def linked(resolved, name):
    """Returns the crates linked into the archive of a package."""
    packages = {package["id"]: package for package in resolved["packages"]}
    nodes = {node["id"]: node for node in resolved["resolve"]["nodes"]}
    root = next(id for id, package in packages.items() if package["name"] == name and package["source"] is None)
    seen, todo = set(), [root]
    while todo:
        id = todo.pop()
        macro = any("proc-macro" in target["kind"] for target in packages[id]["targets"])
        if id in seen or macro:
            continue
        seen.add(id)
        for dependency in nodes[id]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                todo.append(dependency["pkg"])
    foreign = (packages[id] for id in seen if packages[id]["source"] is not None)
    return sorted(foreign, key=lambda package: (package["name"], package["version"]))


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "vmmgraph"
    crates = linked(metadata(), name)
    print("libvmmgraph contains the Rust standard library (MIT OR Apache-2.0) and these crates:\n")
    for crate in crates:
        print(
            f"  {crate['name']} {crate['version']}: {crate['license'] or 'see its text'} ({crate['repository'] or 'no repository named'})"
        )
    without = []
    for crate in crates:
        folder = pathlib.Path(crate["manifest_path"]).parent
        texts = sorted(path for path in folder.iterdir() if path.is_file() and TEXTS.match(path.name))
        if not texts:
            without.append(crate["name"])
        for path in texts:
            print(f"\n{'=' * 80}\n{crate['name']} {crate['version']}: {path.name}\n{'=' * 80}\n")
            print(path.read_text(errors="replace").strip())
    if without:
        print(f"crates without a licence text in their package: {', '.join(without)}", file=sys.stderr)


if __name__ == "__main__":
    main()
