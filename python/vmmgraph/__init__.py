"""GPU memory for graph-mode LLM engines: CUDA graphs that share their memory, in any order of
capture and replay.

    import vmmgraph
    vmmgraph.enable()

After `enable`, captures of ``torch.cuda.CUDAGraph`` allocate from arenas. Graphs with the same
``pool=`` share pages and cost the memory of the peak graph. Engines with plugins (vLLM, SGLang)
need no code: set ``VMMGRAPH=1``. See docs/python.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import _session
from ._arena import Arena
from ._c import Error, OutOfMemory
from ._enable import Status, disable_all, enable, status
from ._executables import instantiate
from ._library import find as _find
from ._scopes import disabled, eager, graph, remote, shape
from ._session import save_map
from ._sleep import sleep, wake

__all__ = [
    "Arena",
    "Error",
    "OutOfMemory",
    "Status",
    "arenas",
    "disable_all",
    "disabled",
    "eager",
    "enable",
    "graph",
    "instantiate",
    "library_path",
    "remote",
    "report",
    "save_map",
    "shape",
    "sleep",
    "status",
    "verify",
    "wake",
]


def library_path() -> Path | None:
    """Returns the library for the installed torch, or ``None``."""
    return _find()[0]


def arenas() -> list[Arena]:
    """Returns the existing arenas, by device and then by age of their pool."""
    return sorted(_session.arenas(), key=lambda arena: (arena.device, arena.pool))


def verify(cuda_graph: Any, outputs: Any) -> tuple[int, int] | None:
    """``cuda_graph.verify(outputs)``: returns the output and offset that depends on data of other
    graphs, or ``None``."""
    return cuda_graph.verify(outputs)


def _mib(value: int) -> str:
    return f"{value / (1 << 20):.1f} MiB"


def _line(arena: Arena) -> str:
    stats = arena.stats()
    text = (
        f"arena {arena.label or arena.pool} on cuda:{arena.device}: {_mib(stats['physical_bytes'])} for {stats['spaces']} shapes, "
        f"of which {_mib(stats['retained_bytes'])} retained; largest shape {_mib(stats['high_water_bytes'])}, "
        f"{stats['replays']} replays"
    )
    executables = arena.executables()
    if executables:
        text += f"; {executables['executables']} executables of the device take {_mib(executables['bytes'])}"
    return text


def report() -> str:
    """Returns the memory of all graphs as text.

    A line per arena, the page map's table, and the ledger of each device with one
    (`VMMGRAPH_KV=1` under vLLM and SGLang).
    """
    from . import _ledger

    chosen = status()
    lines = [repr(chosen) if chosen is not None else "<vmmgraph: not enabled>"]
    session = _session.opened()
    for arena in arenas():
        lines.append(_line(arena))
        if session is not None:
            lines.append(session.library.text("map_report", arena.map_json().encode()).rstrip())
    lines += [ledger.table() for ledger in _ledger.ledgers()]
    return "\n".join(lines)
