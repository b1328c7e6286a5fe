"""`sleep` returns a process's device memory in one call, and `wake` restores it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from . import _c, _enable, _executables, _session
from ._ledger import Ledger, driver_memory, library_bytes, used_by_all, used_by_process

#: 1: memory; 2: executables, too.
LEVELS = (1, 2)


def sleep(level: int = 2) -> list[Ledger]:
    """Returns the device memory of graphs and of regions (:mod:`vmmgraph.memory_saver`) to the
    device until `wake`. Addresses stay, and so do graphs and their tensors; regions keep or lose
    their contents by their policy. Replays raise meanwhile.

    Also frees cuBLAS workspaces, torch's cache and idle pages. ``level`` 2 destroys executables;
    `wake` instantiates again, or the next replay with ``instantiate="replay"``. Waits for the
    devices. A second call is harmless.

    Returns a `Ledger` for each device, with the bytes that stay by name. Raises `Error` during a
    capture and RuntimeError on the MemPool route, without effect. After another error, call `wake`.
    """
    if level not in LEVELS:
        raise ValueError(f"cannot sleep at level {level!r}: no such level; pass 1 or 2")
    devices = _used_devices()
    if not devices:
        return []
    import torch

    _check_possible()
    for device in devices:
        torch.cuda.synchronize(device)
    saver = _saver()
    if saver is not None:
        saver.pause(None)
    sleep_graphs(level)
    return [_left(device, saver) for device in devices]


def wake(tags: Sequence[str] | None = None) -> None:
    """Restores everything, or only regions and arenas with these tags, at the same addresses.

    Without ``tags`` also instantiates the graphs again, ahead of the next step. Resumed memory is
    unchanged. Raises `vmmgraph.OutOfMemory` or `memory_saver.OutOfMemory` if the device is full:
    the rest stays paused, and the call can be repeated.
    """
    saver = _saver()
    if saver is not None:
        for tag in [None] if tags is None else tags:
            saver.resume(tag)
    if tags is None:
        wake_graphs()


def sleep_graphs(level: int) -> None:
    """Pauses all arenas and frees all memory that can be made again."""
    import torch

    session, arenas = _session.opened(), _session.arenas()
    for arena in arenas:
        arena.pause()
    if level == 2 and session is not None:
        _executables.evict()
        session.evicted = True
    gc.collect()
    _free_workspaces()
    torch.cuda.empty_cache()
    for device in {arena._device for arena in arenas}:
        device.trim()


def wake_graphs() -> None:
    for arena in _session.arenas():
        arena.resume()
    session = _session.opened()
    if session is not None and session.evicted and session.instantiate == "capture":
        _executables.instantiate()
        session.evicted = False


def _saver() -> Any:
    """Returns the memory saver if the process uses it."""
    module = sys.modules.get("vmmgraph.memory_saver")
    return module.torch_memory_saver._impl if module is not None else None


def _used_devices() -> list[int]:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    import torch

    return [device for device in range(cuda.device_count()) if torch._C._cuda_hasPrimaryContext(device)]


def _check_possible() -> None:
    import torch

    status = _enable.status()
    if status is not None and status.route == "mempool":
        raise RuntimeError("cannot sleep: the arenas of the MemPool route are not paused; build the library for this torch")
    capturing = any(group.capturing for arena in _session.arenas() for group in arena._open)
    saver = _saver()
    if capturing or torch.cuda.is_current_stream_capturing() or (saver is not None and saver.c.tms_is_capturing()):
        raise _c.Error("cannot sleep: a stream is under capture; call sleep after the capture", _c.WRONG_STATE)


def _free_workspaces() -> None:
    """Clears torch's table of cuBLAS workspaces, unless a graph in torch's memory may contain an
    address of these. Graphs of arenas own their workspaces from torch 2.8 on."""
    import torch

    old = hasattr(torch.cuda.memory, "MemPoolContext")
    if not old and not _torch_has_graphs():
        torch._C._cuda_clearCublasWorkspaces()


def _torch_has_graphs() -> bool:
    """Whether a graph may be in torch's memory. Graphs are unknown unless `enable` is active."""
    session, status = _session.opened(), _enable.status()
    if session is None or status is None or status.route != "blocks":
        return True
    return session.torch_has_graphs()


def _left(device: int, saver: Any) -> Ledger:
    """Returns the ledger of a device after `sleep`."""
    import torch

    free, total = driver_memory(device)
    rows: list[tuple[str, int]] = []
    arena = next((arena for arena in _session.arenas() if arena.device == device), None)
    if arena is not None:
        held = library_bytes(arena._device)
        rows.append(("pages of graphs and regions", held["physical"] - held["idle"]))
        rows.append(("idle pages of the library", held["idle"]))
        rows.append(("executables, memory kept by the driver", arena.executables().get("bytes", 0)))
    own = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device]
    if saver is not None:
        own = [segment for segment in own if not saver.has(segment)]
    tensors = sum(segment["active_size"] for segment in own)
    rows.append(("torch's tensors and workspaces of graphs", tensors))
    rows.append(("torch's cache", sum(segment["total_size"] for segment in own) - tensors))
    everyone, mine = used_by_all(device), used_by_process(device)
    if everyone is not None and mine is not None:
        rows.append(("other processes", max(0, everyone - mine)))
    rest = total - free - sum(size for _, size in rows)
    rows.append(("CUDA context, kernels, communicators, other libraries", rest))
    return Ledger(device, total, free, rows)
