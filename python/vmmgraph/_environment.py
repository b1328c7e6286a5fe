"""The environment variables of VmmGraph: one table, and the functions that read a value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

ON, OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")
FLAG = (*ON, *OFF)


class Variable(NamedTuple):
    """One variable: its accepted values (`None`: any text, `int`: a number) and its meaning."""

    values: tuple[str, ...] | type[int] | None
    text: str


VARIABLES = {
    "VMMGRAPH": Variable(FLAG, "enables VmmGraph in vLLM and SGLang"),
    "VMMGRAPH_ASCEND_LIBRARY": Variable(None, "path of libascendcl.so"),
    "VMMGRAPH_CACHE": Variable(None, "folder of libraries made by `vmmgraph build`"),
    "VMMGRAPH_CAPTURE": Variable(("ahead", "behind"), "behind: vLLM serves at once and captures between steps"),
    "VMMGRAPH_CAPTURE_HISTOGRAM": Variable(None, "file of the traffic's histogram, for the order of captures"),
    "VMMGRAPH_CAPTURE_MS": Variable(int, "milliseconds of captures a step, on average; default: 5"),
    "VMMGRAPH_CAPTURE_STAND_IN": Variable(FLAG, "0: no larger graph runs a step while its own is missing"),
    "VMMGRAPH_CORE_LIBRARY": Variable(None, "path of libvmmgraph.so"),
    "VMMGRAPH_CUDA_LIBRARY": Variable(None, "path of libcuda.so.1"),
    "VMMGRAPH_DRIVER": Variable(("cuda", "hip", "ascend", "mlu", "host"), "selects the platform"),
    "VMMGRAPH_EXECUTABLES": Variable(int, "number of graphs which have executables at a time; 0: no limit"),
    "VMMGRAPH_EXECUTABLE_BYTES": Variable(int, "bytes of all executables; 0: no limit"),
    "VMMGRAPH_HIP_LIBRARY": Variable(None, "path of libamdhip64.so"),
    "VMMGRAPH_INSTANTIATE": Variable(("capture", "replay"), "when a captured graph is instantiated"),
    "VMMGRAPH_KV": Variable(FLAG, "vLLM or SGLang sizes its KV cache after the captures"),
    "VMMGRAPH_KV_GUARD": Variable(FLAG, "0: the KV cache keeps its size while the engine runs"),
    "VMMGRAPH_LIBRARY": Variable(None, "path of libvmmgraph_torch.so, or its folder"),
    "VMMGRAPH_LOG": Variable(("off", "error", "warn", "info", "debug", "trace"), "log level of the library"),
    "VMMGRAPH_MAP": Variable(None, "file for the page map, written at exit"),
    "VMMGRAPH_MEMORY_SAVER_LIBRARY": Variable(None, "path of libvmmgraph_memory_saver.so"),
    "VMMGRAPH_MLU_LIBRARY": Variable(None, "path of libcndrv.so"),
    "VMMGRAPH_POISON": Variable(("0", "1"), "fills freed memory, to find stale reads"),
    "VMMGRAPH_SELF_TEST": Variable(("0", "1"), "0 skips the driver test at the first open"),
    "VMMGRAPH_SHARING": Variable(("none", "fd", "fabric"), "handles by which other processes open pages"),
    "VMMGRAPH_SLEEP": Variable(FLAG, "vLLM's sleep mode uses regions, and graphs sleep"),
    "VMMGRAPH_TRACE_BLOCKS": Variable(("0", "1"), "the page map lists every block"),
    "VMMGRAPH_TRACE_EVENTS": Variable(("0", "1"), "the page map has the timeline of every capture"),
}


def problem(name: str, value: str) -> str | None:
    """Returns a full sentence about an invalid variable; `None` if name and value are valid."""
    variable = VARIABLES.get(name)
    if variable is None:
        import difflib

        near = difflib.get_close_matches(name, VARIABLES, 1)
        remedy = f"set {near[0]} if you meant it" if near else "unset it"
        return f"cannot use {name}: no such variable; {remedy}"
    if variable.values is int:
        valid, accepted = value.isdecimal() or not value, "a whole number"
    elif isinstance(variable.values, tuple):
        valid, accepted = value.lower() in ("", *variable.values), ", ".join(text for text in variable.values if text)
    else:
        return None
    return None if valid else f"cannot use {name}={value}: the value is unknown; set one of: {accepted}"


def problems(environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns a sentence for each invalid `VMMGRAPH` variable, except variables of tests."""
    given = os.environ if environment is None else environment
    found = (name for name in sorted(given) if name == "VMMGRAPH" or name.startswith("VMMGRAPH_"))
    return [text for name in found if not name.startswith("VMMGRAPH_TEST") and (text := problem(name, given[name]))]


def flag(name: str) -> bool:
    """Returns whether a variable is on. Raises ValueError for an invalid value."""
    value = os.environ.get(name, "")
    text = problem(name, value)
    if text:
        raise ValueError(text)
    return value.lower() in ON
