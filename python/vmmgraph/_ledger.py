"""Memory ledger of a device: bytes by named use, checked against the driver's numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

from . import _c, _session
from ._arena import Device

MIB = 1 << 20


class Ledger:
    """Memory uses of a device by name, and the driver's total and free bytes."""

    def __init__(self, device: int, total: int, free: int, rows: Sequence[tuple[str, int]]) -> None:
        self.device = device
        self.total = total
        self.free = free
        #: Name and bytes of each use; free memory is excluded.
        self.rows = [(name, size) for name, size in rows if size]

    def named(self) -> int:
        """Returns the bytes with a name, free bytes included."""
        return sum(size for _, size in self.rows) + self.free

    def share(self) -> float:
        """Returns the named share of the device. An excess of named bytes lowers the share too."""
        return 1.0 - abs(self.total - self.named()) / self.total if self.total else 1.0

    def table(self) -> str:
        """Returns a line per name, largest first, then free memory and memory without a name."""
        lines = [f"memory of cuda:{self.device}, MiB", f"  {'total, as the driver says':<52}{self.total / MIB:>11.1f}"]
        for name, size in sorted(self.rows, key=lambda row: -row[1]):
            lines.append(f"  {name:<52}{size / MIB:>11.1f}")
        lines.append(f"  {'free':<52}{self.free / MIB:>11.1f}")
        lines.append(f"  {'without a name':<52}{(self.total - self.named()) / MIB:>11.1f}")
        lines.append(f"  {100 * self.share():.2f} % has a name")
        return "\n".join(lines)


#: Ledger function of each device, called by `vmmgraph.report`.
_sources: dict[int, Callable[[], Ledger]] = {}


def keep(device: int, source: Callable[[], Ledger]) -> None:
    """Adds a device's ledger to `vmmgraph.report`."""
    _sources[device] = source


def drop(device: int) -> None:
    """Removes a device's ledger from `vmmgraph.report`."""
    _sources.pop(device, None)


def ledgers() -> list[Ledger]:
    """Returns the current ledgers of all devices added by `keep`."""
    return [_sources[device]() for device in sorted(_sources)]


def driver_memory(device: int) -> tuple[int, int]:
    """Waits for the device, then returns the driver's free and total bytes."""
    import torch

    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def library_bytes(device: Device) -> dict[str, int]:
    """Returns the bytes of the library's page pool: ``physical`` (all) and ``idle`` (unmapped)."""
    stats = _c.DeviceStats()
    device.library.device_stats(device.handle, byref(stats))
    return {"physical": stats.physical_bytes, "idle": stats.free_bytes}


def graph_rows(device: Device) -> list[tuple[str, int]]:
    """Returns the ledger rows of the library: pages of graphs and idle pages."""
    pages = sum(arena.stats()["physical_bytes"] for arena in _session.arenas() if arena.device == device.number)
    return [("graphs' pages", pages), ("idle pages of the library", library_bytes(device)["idle"])]


class Phases:
    """Bytes held by neither torch nor the library, by start phase: context, communicators, kernels.

    The driver reports free bytes only, without names. A mark at the end of each phase therefore
    assigns the growth to the phase's name.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.library_device: Device | None = None
        #: Bytes by name, in phase order.
        self.rows: dict[str, int] = {}
        self.last = 0

    def outside(self) -> int:
        """Returns the device bytes in use by neither torch nor the library."""
        import torch

        free, total = driver_memory(self.device)
        held = library_bytes(self.library_device)["physical"] if self.library_device is not None else 0
        return total - free - torch.cuda.memory_reserved(self.device) - held

    def mark(self, name: str) -> int:
        """Assigns the growth since the last mark to a name. Returns the growth, maybe negative."""
        grown = self.outside() - self.last
        self.add(name, grown)
        return grown

    def add(self, name: str, size: int) -> None:
        """Adds bytes to a name."""
        self.last += size
        self.rows[name] = self.rows.get(name, 0) + size


def nvml(device: int) -> Any:
    """Returns NVML's module and device handle; ``None`` without NVML. Creates no context."""
    with contextlib.suppress(Exception):
        import pynvml

        return pynvml, _nvml_handle(pynvml, device)
    with contextlib.suppress(Exception):
        from vllm.third_party import pynvml

        return pynvml, _nvml_handle(pynvml, device)
    return None


def _nvml_handle(pynvml: Any, device: int) -> Any:
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        name = visible.split(",")[device].strip()
        return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name.encode())
    return pynvml.nvmlDeviceGetHandleByIndex(device)


def used_by_all(device: int) -> int | None:
    """Returns NVML's bytes in use on a device, without the driver's reserve; ``None`` if unknown.

    To count other processes only, call before this process creates a context.
    """
    with contextlib.suppress(Exception):
        pynvml, handle = nvml(device)
        with contextlib.suppress(Exception):
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
        return sum(int(one.usedGpuMemory) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return None


def used_by_process(device: int) -> int | None:
    """Returns NVML's bytes of this process; ``None`` if unknown to NVML, as in some containers."""
    with contextlib.suppress(Exception):
        pynvml, handle = nvml(device)
        for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if one.pid == os.getpid() and one.usedGpuMemory:
                return int(one.usedGpuMemory)
    return None
