#!/usr/bin/env python3
"""Writes docs/compatibility.md from the recorded runs of python/vmmgraph/_engines.py, from
scripts/engine-pins.txt and from scripts/torch-releases.txt."""

import importlib.util
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/compatibility.md"
SPEC = importlib.util.spec_from_file_location("_engines", ROOT / "python/vmmgraph/_engines.py")
engines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(engines)

TEXT = """\
# Compatibility

<!-- Written by scripts/compatibility.py. Do not edit. -->

Which engine releases fit which library, and which were run. `vmmgraph doctor` and the engine
plugins warn about an engine release without a recorded run. The quickstarts say which features ran
([vLLM](quickstart-vllm.md#which-features-ran), [SGLang](quickstart-sglang.md)).

## Releases of the engines

*Library* names the build that serves the pinned torch: `make wheel RELEASES=...`. Every library is
compiled for CUDA 12 and 13 where torch has such wheels.

{releases}

`scripts/engine_pins.py` reads the pins from the package index. A test compares the pins with
`scripts/torch-releases.txt`.

## Recorded runs

Each row was run on a GPU and has a record on the [performance page](performance.md). VmmGraph's
developers made every run so far.

{runs}

{never}Please report your runs as issues, with the command, the versions and whether the tokens were
equal.
"""


def lines(path):
    return [line.split() for line in path.read_text().splitlines() if line and line[0] != "#"]


def equal_releases():
    """Returns the pairs of torch releases which share a library."""
    return dict(
        pair
        for one, other in re.findall(
            r'^ *\{"([0-9.]+)", "([0-9.]+)"\},$', (ROOT / "cpp/torch/release.hpp").read_text(), re.MULTILINE
        )
        for pair in ((one, other), (other, one))
    )


def library(torch):
    """Returns the release of the library that serves a torch release, or None."""
    built = [line[0] for line in lines(ROOT / "scripts/torch-releases.txt")]
    return next((one for one in (torch, equal_releases().get(torch)) if one in built), None)


def table(head, rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def pins():
    """Returns (engine, version, torch) of every release in scripts/engine-pins.txt."""
    return [tuple(line) for line in lines(ROOT / "scripts/engine-pins.txt")]


def page():
    releases = []
    for (engine, torch), group in groupby(pins(), lambda pin: (pin[0], pin[2])):
        versions = [version for _, version, _ in group]
        ran = [version for version in versions if engines.outside(engine, version) is None]
        between = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        built = library(torch)
        serves = f"`{built.rpartition('.')[0]}`" + ("" if built == torch else f", built for {built}") if built else "**none**"
        releases.append((engines.NAMES[engine], between, torch, serves, ", ".join(ran) or "never run"))
    runs = []
    for run in engines.RUNS:
        anchor = re.sub(r"[^\w\- ]", "", run.record.lower()).replace(" ", "-")
        name = engines.NAMES.get(run.engine, "torch alone")
        version = run.version if run.engine in engines.NAMES else ""
        runs.append(
            (
                name,
                version,
                run.torch,
                f"{run.device}, {run.date}, {run.who}",
                f"`{run.command}`",
                f"[{run.result}](performance.md#{anchor})",
            )
        )
    never = " or ".join(name for engine, name in engines.NAMES.items() if not engines.ran(engine))
    return TEXT.format(
        never=f"No run of {never} is recorded.\n" if never else "",
        releases=table(("engine", "releases", "torch", "library", "run"), releases),
        runs=table(("engine", "version", "torch", "where, when, by whom", "command", "result"), runs),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
