"""`vmmgraph doctor`: checks all parts between GPU and engine, with a remedy for each problem.

`gather` reads facts from the machine; `examine` judges facts without machine access.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _c, _engines, _environment, _library
from .memory_saver import _library as memory_saver
from .plugins import sglang_kv, vllm_kv, vllm_kv_033

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
#: Releases whose KV cache ``VMMGRAPH_KV`` sizes.
KV_RELEASES = {"vllm": vllm_kv.RELEASES + vllm_kv_033.RELEASES, "sglang": sglang_kv.RELEASES}
#: CUDA 12.0, the first driver whose virtual memory calls the library uses throughout.
OLDEST_DRIVER = 12000
OK, WARNING, ERROR = "ok", "warning", "error"


class Line(NamedTuple):
    """One result: subject, state (`ok`, `warning` or `error`), finding, and remedy unless `ok`."""

    subject: str
    state: str
    text: str
    remedy: str = ""


def _driver() -> dict[str, Any]:
    """Reads CUDA driver version and devices through ctypes (torch may be missing). Creates no
    context."""
    try:
        cuda = ctypes.CDLL(os.environ.get("VMMGRAPH_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    version, count = ctypes.c_int(), ctypes.c_int()
    code = cuda.cuInit(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if code:
        return {"error": f"cuInit returned {code}", "version": version.value}
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, 128, device)
        names.append(name.value.decode(errors="replace"))
    return {"version": version.value, "devices": names}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"error": str(error), "installed": _engines.installed("torch")}
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    path, facts["route"] = _library.find()
    if path is None:
        return facts
    facts["library"] = str(path)
    try:
        from . import _session

        library = _session.need().library
        facts["built_for"], facts["library_version"] = library.built_for(), library.version()
        # Refuses a torch which the library does not serve. Makes no CUDA call.
        library.torch_install()
    except (_c.Error, OSError, AttributeError, RuntimeError) as error:
        facts["refused"] = str(error)
    return facts


def gather() -> dict[str, Any]:
    """Reads the facts that `examine` judges."""
    engines = {name: version for name in _engines.NAMES if (version := _engines.installed(name))}
    seen = {
        name: any(point.value.startswith("vmmgraph.") for point in importlib.metadata.entry_points(group=group))
        for name, group in GROUPS.items()
    }
    core = _library.find_core()
    saver = memory_saver.library_path()
    return {
        "driver": _driver(),
        "torch": _torch(),
        "core": str(core) if core else None,
        "saver": {"path": saver, "exists": os.path.exists(saver)},
        "engines": engines,
        "plugins": seen,
        "environment": dict(os.environ),
    }


def _gpu(facts: Mapping[str, Any]) -> list[Line]:
    driver = facts["driver"]
    if "error" in driver:
        remedy = "install the NVIDIA driver, and start the container with the GPU (docker run --gpus all)"
        return [Line("GPU", ERROR, f"no CUDA driver: {driver['error']}", remedy)]
    number = driver["version"]
    text = f"supports CUDA {number // 1000}.{number % 1000 // 10}"
    lines = [
        Line("driver", OK, text)
        if number >= OLDEST_DRIVER
        else Line("driver", ERROR, text, "install a driver of CUDA 12 or later")
    ]
    devices = driver["devices"]
    if devices:
        lines.append(Line("GPU", OK, ", ".join(devices)))
    else:
        lines.append(Line("GPU", ERROR, "the driver shows no device", "check CUDA_VISIBLE_DEVICES and the container's GPUs"))
    return lines


def _torch_lines(facts: Mapping[str, Any]) -> list[Line]:
    torch = facts["torch"]
    if "error" in torch:
        installed = torch.get("installed")
        remedy = (
            f"pip install --force-reinstall torch=={installed}, with its dependencies"
            if installed
            else "pip install torch==2.11.0"
        )
        return [Line("torch", ERROR, f"cannot be imported: {torch['error']}", remedy)]
    if not torch["cuda"]:
        return [Line("torch", ERROR, f"{torch['version']} is built without CUDA", "install a CUDA build of torch")]
    lines = [Line("torch", OK, f"{torch['version']}, CUDA {torch['cuda']}")]
    if "library" not in torch:
        remedy = "run `vmmgraph build`, which compiles the library for this torch"
        if facts["core"]:
            lines.append(Line("library", WARNING, f"{torch['route']}; captures use torch's MemPools", remedy))
        else:
            lines.append(Line("library", ERROR, torch["route"], remedy))
    elif "refused" in torch:
        remedy = "run `vmmgraph build --force`, or unset VMMGRAPH_LIBRARY"
        lines.append(Line("library", ERROR, f"{torch['library']} ({torch['route']}) is refused: {torch['refused']}", remedy))
    else:
        text = f"{torch['library']} ({torch['route']}), vmmgraph {torch['library_version']} for torch {torch['built_for']}"
        lines.append(Line("library", OK, text))
    return lines


def _engine_lines(facts: Mapping[str, Any]) -> list[Line]:
    lines = []
    environment = facts["environment"]
    on = environment.get("VMMGRAPH", "").lower() in _environment.ON
    for name, version in sorted(facts["engines"].items()):
        outside = _engines.outside(name, version)
        if outside is None:
            lines.append(Line(name, OK, f"{version}, a version which was run on a GPU"))
        else:
            lines.append(Line(name, WARNING, outside, _engines.REMEDY))
        if name not in GROUPS:
            continue
        if not facts["plugins"][name]:
            remedy = "pip install the vmmgraph wheel into the environment of the engine"
            lines.append(Line(f"{name} plugin", ERROR, f"the entry point group {GROUPS[name]} has no vmmgraph", remedy))
        elif name == "vllm" and "vmmgraph" not in environment.get("VLLM_PLUGINS", "vmmgraph").split(","):
            lines.append(Line("vllm plugin", ERROR, "VLLM_PLUGINS leaves vmmgraph out", "add vmmgraph to VLLM_PLUGINS"))
        elif not on:
            lines.append(Line(f"{name} plugin", WARNING, "installed and off", "set VMMGRAPH=1"))
        else:
            lines.append(Line(f"{name} plugin", OK, "installed and on"))
        if environment.get("VMMGRAPH_KV", "").lower() in _environment.ON and not version.startswith(KV_RELEASES[name]):
            text = f"VMMGRAPH_KV changes nothing with {_engines.NAMES[name]} {version}"
            lines.append(Line("KV cache", WARNING, text, "unset VMMGRAPH_KV; the quickstarts name the releases with an effect"))
    saver = facts["saver"]
    if environment.get("VMMGRAPH_SLEEP", "").lower() in _environment.ON and not saver["exists"]:
        remedy = "install the vmmgraph wheel again, or unset VMMGRAPH_MEMORY_SAVER_LIBRARY"
        lines.append(Line("memory saver", ERROR, f"{saver['path']} does not exist, so vLLM sleeps by its own allocator", remedy))
    if on and not facts["engines"].keys() & GROUPS.keys():
        remedy = "run `pip install .` in a checkout of vmmgraph, with the engine's pip; then its vmmgraph doctor"
        lines.append(Line("engine", WARNING, "VMMGRAPH is on, and this environment has neither vLLM nor SGLang", remedy))
    return lines


def _variables(facts: Mapping[str, Any]) -> list[Line]:
    environment = facts["environment"]
    lines = []
    for sentence in _environment.problems(environment):
        text, _, remedy = sentence.partition("; ")
        lines.append(Line("environment", ERROR, text, remedy))
    ours = [f"{name}={environment[name]}" for name in _environment.VARIABLES if name in environment]
    if ours and not lines:
        lines.append(Line("environment", OK, ", ".join(ours)))
    torchs = " ".join(environment.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "backend:cudaMallocAsync" in torchs:
        remedy = "remove backend:cudaMallocAsync from PYTORCH_ALLOC_CONF"
        lines.append(Line("environment", ERROR, "torch's allocator is cudaMallocAsync, which has no graph pools", remedy))
    if "expandable_segments:True" in torchs and "vmmgraph_memory_saver" in environment.get("LD_PRELOAD", ""):
        remedy = "remove expandable_segments:True from PYTORCH_ALLOC_CONF"
        lines.append(Line("environment", ERROR, "the memory saver cannot pause expandable segments", remedy))
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING") is not None:
        remedy = "unset PYTORCH_NO_CUDA_MEMORY_CACHING"
        lines.append(Line("environment", ERROR, "torch's caching allocator is off, so captures have no pools", remedy))
    if len(facts["driver"].get("devices", ())) > 1 and facts["engines"].keys() & GROUPS.keys():
        text = "with tensor parallelism custom all-reduce copies its inputs in graphs, or is off (vLLM 0.24)"
        lines.append(Line("limits", WARNING, text, "compare the speed of two ranks with and without VMMGRAPH=1"))
    return lines


def examine(facts: Mapping[str, Any]) -> list[Line]:
    """Judges gathered facts."""
    return [*_gpu(facts), *_torch_lines(facts), *_engine_lines(facts), *_variables(facts)]


def as_text(lines: list[Line]) -> list[str]:
    """Returns the lines for a terminal, each remedy below its finding."""
    width = max(len(line.subject) for line in lines)
    text = []
    for line in lines:
        text.append(f"{line.state:8} {line.subject:{width}}  {line.text}")
        if line.remedy:
            text.append(f"{'':8} {'':{width}}  -> {line.remedy}")
    errors, warnings = (sum(line.state == state for line in lines) for state in (ERROR, WARNING))
    counts = ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((errors, "error"), (warnings, "warning")))
    return [*text, f"{counts} (python {sys.version.split()[0]})"]
