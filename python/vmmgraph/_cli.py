"""The command ``vmmgraph``. Only ``build`` needs torch; no command needs a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import _c, _library, _maps
from ._files import Unfit, read, reading, say
from ._maps import mib
from ._progress import Progress

#: Exit statuses of diff(1), and of a shell for a closed pipe and an interrupt.
OK, DIFFERENT, TROUBLE, NO_READER, STOPPED = 0, 1, 2, 141, 130


def core() -> _c.Library:
    """Returns the library for drawing maps and for the host driver. Raises `Unfit`."""
    path = _library.find_core()
    if path is None:
        given = os.environ.get("VMMGRAPH_CORE_LIBRARY")
        raise Unfit(
            f"VMMGRAPH_CORE_LIBRARY names {given}, which does not exist"
            if given
            else "this vmmgraph was installed without libvmmgraph.so; VMMGRAPH_CORE_LIBRARY may name one"
        )
    try:
        return _c.Library(path, with_torch=False)
    except (OSError, AttributeError) as error:
        raise Unfit(f"{path} is no libvmmgraph.so of this release: {error}") from None


def drawn(library: _c.Library, function: str, text: bytes, name: str) -> str:
    try:
        return library.text(function, text)
    except _c.Error as error:
        raise Unfit(f"{name}: {error}") from None


def write(path: str, data: bytes, *sources: str) -> None:
    if path == "-":
        sys.stdout.buffer.write(data)
        return
    target = Path(path)
    for source in sources:
        if source != "-" and target.exists() and target.samefile(source):
            raise Unfit(f"cannot write {path}: it is also the input; choose another -o")
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    target = target.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.")
    try:
        with open(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _beside(given: str, source: str, ending: str) -> str:
    if given:
        return given
    if source == "-":
        raise Unfit("cannot name the output of a map from standard input; pass -o")
    return str(Path(source).with_suffix(ending))


def report(arguments: argparse.Namespace) -> int:
    path = arguments.map or os.environ.get("VMMGRAPH_MAP") or ("-" if not sys.stdin.isatty() else "")
    if not path:
        raise Unfit(
            "no map is named; pass a file or set VMMGRAPH_MAP (a program writes a map with vmmgraph.save_map, or at exit with VMMGRAPH_MAP=map.json)"
        )
    _, text = _maps.open_map(path)
    say(*drawn(core(), "map_report", text, path).rstrip("\n").split("\n"))
    return OK


def draw(arguments: argparse.Namespace) -> int:
    _, text = _maps.open_map(arguments.map)
    output = _beside(arguments.output, arguments.map, ".html")
    write(output, drawn(core(), "map_html", text, arguments.map).encode(), arguments.map)
    return OK


def diff(arguments: argparse.Namespace) -> int:
    if arguments.before == arguments.after == "-":
        raise Unfit("cannot read two maps from standard input; name a file")
    both = []
    for path in (arguments.before, arguments.after):
        both.append(_maps.open_map(path)[0])
    with reading(f"{arguments.before} or {arguments.after}", "whole page map"):
        lines = _maps.diff(*both)
    say(*lines)
    return DIFFERENT if lines else OK


def export(arguments: argparse.Namespace) -> int:
    page_map, text = _maps.open_map(arguments.map)
    if arguments.perfetto:
        output = _beside(arguments.output, arguments.map, ".perfetto.json")
        write(output, drawn(core(), "map_perfetto", text, arguments.map).encode(), arguments.map)
        return OK
    from . import _snapshot

    if _library.find_core() is not None:
        # Validates every number in the map.
        drawn(core(), "map_report", text, arguments.map)
    output = _beside(arguments.output, arguments.map, ".pickle")
    with reading(arguments.map, "whole page map"):
        whole, lost = _snapshot.snapshot(page_map)
    write(output, _snapshot.dumps(whole), arguments.map)
    if all(space["events"] is None for space in page_map["spaces"]):
        say("the map has no events: each shape is shown at its peak (docs/map.md explains how to trace events)", file=sys.stderr)
    if lost:
        say(f"{mib(lost)} of blocks are left out, since their pages have left the map", file=sys.stderr)
    return OK


def doctor(arguments: argparse.Namespace) -> int:
    from . import _doctor

    lines = _doctor.examine(_doctor.gather())
    if arguments.json:
        say(json.dumps([line._asdict() for line in lines]))
    else:
        say(*_doctor.as_text(lines))
    return TROUBLE if any(line.state == _doctor.ERROR for line in lines) else OK


def build(arguments: argparse.Namespace) -> int:
    from . import _build

    progress = Progress(lines=True)
    try:
        path = _build.build(arguments.source, arguments.archive, arguments.jobs, arguments.define, arguments.force, say=progress)
    finally:
        progress.end()
    print(path)
    return OK


def replay(arguments: argparse.Namespace) -> int:
    from . import _replay, _traces

    progress = Progress()
    try:
        data = read(arguments.trace)
        progress(f"reading {len(data) >> 20} MiB")
        trace = _traces.read(
            data,
            arguments.trace,
            pools=arguments.pools,
            device=arguments.device,
            split=arguments.split,
            gap_ms=arguments.gap_ms,
            progress=progress,
        )
        del data
        events = arguments.events or ("largest" if arguments.output else "none")
        try:
            run = _replay.Run(
                core(), trace, kept=arguments.kept, expected_bytes=arguments.expected_bytes, events=events, progress=progress
            )
            if arguments.output:
                progress("the map")
                text = run.map_json(arguments.title or Path(arguments.trace).name).encode()
        except _c.Error as error:
            raise Unfit(f"{arguments.trace}: {error}") from None
    finally:
        progress.end()
    if arguments.output:
        if not arguments.output.endswith((".json", ".html")):
            raise Unfit(f"cannot write {arguments.output}: the name ends neither in .json nor in .html")
        page = text if arguments.output.endswith(".json") else drawn(run.library, "map_html", text, arguments.trace).encode()
        write(arguments.output, page, arguments.trace)
    if arguments.json:
        say(json.dumps({**_replay.as_json(run.cost), "recorded_bytes": trace.recorded_bytes, "source": trace.source}))
    else:
        say(*_table(run.cost, trace))
    return OK


def _table(cost: Any, trace: Any) -> list[str]:
    rows = [
        (
            "floor",
            cost.floor_bytes,
            f"the largest capture at its peak, {cost.largest}, and the outputs alive after the other captures",
        ),
        ("peaks", cost.peaks_bytes, "the peaks of all captures together"),
        ("private", cost.private_bytes, "one pool for each capture in torch, computed by the rules of torch's allocator"),
    ]
    if trace.recorded_bytes is not None:
        rows.append(("recorded", trace.recorded_bytes, "held by torch's pools at the snapshot"))
    times = f"{cost.held_bytes / cost.floor_bytes:.3f} x floor" if cost.floor_bytes else "nothing is allocated"
    rows.append(("shared", cost.held_bytes, f"in an arena: {times}; {mib(cost.retained_bytes)} are private to single captures"))
    if cost.most_held_bytes > cost.held_bytes:
        rows.append(("at most", cost.most_held_bytes, "during the captures"))
    lines = [f"{cost.captures} captures, {cost.allocations} allocations ({trace.source}), {cost.maps} map calls"]
    lines += [f"{name:9} {size / (1 << 20):10.1f} MiB  {what}" for name, size, what in rows]
    return [*lines, *trace.notes]


def plan(arguments: argparse.Namespace) -> int:
    from . import _histogram

    shapes = _histogram.parse(read(arguments.histogram).decode("utf-8", "replace"), arguments.histogram)
    graph_bytes = max(1, arguments.graph_bytes)
    try:
        planned, waste = _histogram.plan(core(), shapes, arguments.budget, graph_bytes, arguments.graphs)
    except _c.Error as error:
        raise Unfit(f"{arguments.histogram}: {error}") from None
    if arguments.json:
        say(json.dumps([{**one.shape._asdict(), "padding": one.padding} for one in planned]))
        return OK
    say(f"{'mode':9} {'variant':>7} {'tokens':>7} {'batch':>6} {'pages':>6} {'steps':>10} {'padding a step':>14}")
    for one in planned:
        tokens, batch, pages, _ = one.shape.extents
        each = one.padding / one.shape.steps
        say(f"{one.shape.mode:9} {one.shape.variant:7} {tokens:7} {batch:6} {pages:6} {one.shape.steps:10} {each:14.2f}")
    steps = waste.graph_steps + waste.eager_steps
    say(
        f"{len(planned)} graphs, {mib(len(planned) * graph_bytes)} at {mib(graph_bytes)} each, run {waste.graph_steps} of {steps} steps; "
        f"the traffic had {sum(one.steps > 0 for one in shapes)} shapes"
    )
    return OK


def _size(text: str) -> int:
    """Parses a number of bytes with an optional suffix K, M or G."""
    scale = {"k": 10, "m": 20, "g": 30}.get(text[-1:].lower())
    value = int(text[:-1]) << scale if scale else int(text)
    if not 0 <= value < 1 << 46:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^46 bytes")
    return value


_size.__name__ = "size"


class _Print(argparse.Action):
    def __init__(self, *arguments: Any, say: Callable[[], str], **more: Any) -> None:
        super().__init__(*arguments, nargs=0, default=argparse.SUPPRESS, **more)
        self._say = say

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            print(self._say())
        except FileNotFoundError as error:
            raise Unfit(str(error)) from None
        parser.exit()


def version() -> str:
    """Returns the versions of the installed package and of the library."""
    import importlib.metadata

    try:
        package = importlib.metadata.version("vmmgraph")
    except importlib.metadata.PackageNotFoundError:
        package = "(not installed)"
    try:
        library = core()
        return f"vmmgraph {package}, libvmmgraph {library.version()} ({library.path})"
    except (Unfit, _c.Error) as error:
        return f"vmmgraph {package}, {error}"


def parser() -> argparse.ArgumentParser:
    from . import _package, _traces

    top = argparse.ArgumentParser(
        prog="vmmgraph",
        description="Checks an installation, and shows or estimates the memory of CUDA graphs. Only doctor and build use torch.",
    )
    top.add_argument("--version", action=_Print, say=version, help="prints the versions of the package and its library")
    top.add_argument(
        "--cmake-dir", action=_Print, say=lambda: str(_package.cmake_dir()), help="prints the folder for find_package(VmmGraph)"
    )
    top.add_argument(
        "--include-dir", action=_Print, say=lambda: str(_package.include_dir()), help="prints the folder of the headers"
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = "") -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip())
        one.set_defaults(run=run)
        return one

    a_map = "a page map: JSON, or an HTML page with a map; - for standard input"
    one = command("report", report, "print a page map as a table for logs")
    one.add_argument("map", nargs="?", help=f"{a_map}. Default: the file in VMMGRAPH_MAP, or standard input")
    one = command("map", draw, "draw a page map as one self-contained HTML page")
    one.add_argument("map", help=a_map)
    one.add_argument("-o", "--output", metavar="FILE", default="", help="default: the map's name with .html")
    one = command(
        "diff",
        diff,
        "print the difference of two page maps: shapes, pages, bytes",
        "Exit status: 0 if equal, 1 if different, 2 for an error.",
    )
    one.add_argument("before", help=a_map)
    one.add_argument("after", help=a_map)
    one = command("export", export, "convert a page map for other viewers")
    formats = one.add_mutually_exclusive_group(required=True)
    formats.add_argument("--torch-snapshot", action="store_true", help="for memory_viz: a segment is a physical page")
    formats.add_argument("--perfetto", action="store_true", help="for ui.perfetto.dev: a timeline of captures")
    one.add_argument("map", help=a_map)
    one.add_argument("-o", "--output", metavar="FILE", default="", help="default: the map's name with .pickle or .perfetto.json")
    one = command(
        "doctor",
        doctor,
        "check GPU, driver, torch, library, engine and environment, with a remedy for each problem",
        "Exit status: 0 if no check is an error, 2 otherwise.",
    )
    one.add_argument("--json", action="store_true", help="prints the checks as one JSON array")
    one = command(
        "build",
        build,
        "compile the library for the installed torch",
        "Needs a C++20 compiler and CMake; a checkout needs cargo, too. Prints the path of the library, where vmmgraph finds it.",
    )
    one.add_argument(
        "--source", metavar="FOLDER", default="", help="a checkout; default: the package's sources, or the checkout it is in"
    )
    one.add_argument(
        "--archive",
        metavar="FILE",
        default="",
        help="an existing core (libvmmgraph.a with the bridge), for a checkout without cargo",
    )
    one.add_argument(
        "-j",
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="number of files compiled at once; default: limited by processors and memory",
    )
    one.add_argument(
        "-D", "--define", action="append", default=[], metavar="NAME=VALUE", help="a CMake variable, set after the command's own"
    )
    one.add_argument("--force", action="store_true", help="build even if the library exists")
    one = command(
        "plan",
        plan,
        "the graphs worth capturing for a histogram of traffic",
        "Prints the graphs with the least padding within the limits, most used first. An executor with ExecutorOptions::histogram and "
        "the vLLM plugin with VMMGRAPH_CAPTURE_HISTOGRAM write histograms.",
    )
    one.add_argument("histogram", help="a histogram, JSON; - for standard input")
    one.add_argument(
        "--budget", type=_size, default=0, metavar="BYTES", help="limit of all graphs' own memory: 64M; default: no limit"
    )
    one.add_argument(
        "--graph-bytes",
        type=_size,
        default=1 << 20,
        metavar="BYTES",
        help="own memory of one graph (executables, retained blocks); default: 1M",
    )
    one.add_argument("--graphs", type=_size, default=0, metavar="N", help="maximum number of graphs; default: no limit")
    one.add_argument("--json", action="store_true", help="prints the graphs as one JSON array")
    one = command(
        "replay",
        replay,
        "estimate the memory of recorded captures, without a GPU",
        "Repeats the allocations and frees of a trace in an arena on the host driver. Runs no code of a pickle.",
    )
    one.add_argument(
        "trace",
        metavar="TRACE",
        help="a torch memory snapshot with history (a pickle), or a trace as in tests/data; - for standard input",
    )
    one.add_argument("-o", "--output", metavar="FILE", default="", help="writes the page map: .json or .html")
    one.add_argument("--json", action="store_true", help="prints the numbers as one JSON object, in bytes")
    one.add_argument(
        "--kept", action="store_true", help="allocates tensors alive after their capture as kept blocks, packed on common pages"
    )
    one.add_argument("--expected-bytes", type=_size, default=0, metavar="SIZE", help="expected bytes of the arena: 1056M, 4G")
    one.add_argument(
        "--events",
        choices=("none", "largest", "all"),
        help="captures with a timeline in the map; default: the largest capture",
    )
    one.add_argument("--title", default="", help="the map's title; default: the trace's name")
    snapshots = one.add_argument_group("of a torch snapshot")
    snapshots.add_argument(
        "--pools", choices=("graph", "all"), default="graph", help="memory of graph pools (default), or all memory"
    )
    snapshots.add_argument("--device", type=int, help="default: the first with captures")
    snapshots.add_argument(
        "--split",
        choices=_traces.SPLITS,
        default="auto",
        help="the start of a capture: a new pool, a new label (torch.cuda.memory._set_memory_metadata), or an allocation outside "
        "graph pools; default: labels if the trace has labels, else pools and outside allocations",
    )
    snapshots.add_argument("--gap-ms", type=float, metavar="MS", help="a pause of MS without an allocation also starts a capture")
    return top


def main(arguments: Sequence[str]) -> int:
    try:
        try:
            given = parser().parse_args(arguments)
            status: int = given.run(given)
        finally:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Prevents the interpreter's error when flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except KeyboardInterrupt:
        return STOPPED
    except (Unfit, _c.Error, OSError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        say(f"vmmgraph: {what}", file=sys.stderr)
        return TROUBLE
    except MemoryError:
        say("vmmgraph: out of memory", file=sys.stderr)
        return TROUBLE
