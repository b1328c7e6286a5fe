"""The ledger of a device: where its memory went, by name, against what the driver says is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

from . import _c, _door
from ._arena import Device

MIB = 1 << 20


class Ledger:
    """Names and bytes of everything on a device, and the driver's numbers."""

    def __init__(self, device: int, total: int, free: int, rows: Sequence[tuple[str, int]]) -> None:
        self.device = device
        self.total = total
        self.free = free
        #: Name and bytes, without free memory.
        self.rows = [(name, size) for name, size in rows if size]

    def named(self) -> int:
        """Bytes that have a name, free ones included."""
        return sum(size for _, size in self.rows) + self.free

    def share(self) -> float:
        """The share of the device that has a name. Names that come to more than the device lower it too."""
        return 1.0 - abs(self.total - self.named()) / self.total if self.total else 1.0

    def table(self) -> str:
        """A line for each name, the largest first, then free memory and memory without a name."""
        lines = [f"memory of cuda:{self.device}, MiB", f"  {'total, as the driver says':<52}{self.total / MIB:>11.1f}"]
        for name, size in sorted(self.rows, key=lambda row: -row[1]):
            lines.append(f"  {name:<52}{size / MIB:>11.1f}")
        lines.append(f"  {'free':<52}{self.free / MIB:>11.1f}")
        lines.append(f"  {'without a name':<52}{(self.total - self.named()) / MIB:>11.1f}")
        lines.append(f"  {100 * self.share():.2f} % has a name")
        return "\n".join(lines)


#: Makes the ledger of a device; `vmmgraph.report` asks each.
_sources: dict[int, Callable[[], Ledger]] = {}


def keep(device: int, source: Callable[[], Ledger]) -> None:
    """From now on `vmmgraph.report` shows this ledger of the device."""
    _sources[device] = source


def drop(device: int) -> None:
    """`vmmgraph.report` shows no ledger of the device any more."""
    _sources.pop(device, None)


def ledgers() -> list[Ledger]:
    """The ledgers of all devices that have one, as of now."""
    return [_sources[device]() for device in sorted(_sources)]


def driver_memory(device: int) -> tuple[int, int]:
    """Free and total bytes, as the driver says, after the work that is under way."""
    import torch

    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def library_bytes(device: Device) -> dict[str, int]:
    """What the library's page pool holds of the device: physical bytes, and those of them that are mapped nowhere."""
    stats = _c.DeviceStats()
    device.library.device_stats(device.handle, byref(stats))
    return {"physical": stats.physical_bytes, "idle": stats.free_bytes}


def graph_rows(device: Device) -> list[tuple[str, int]]:
    """The rows of the library: pages of graphs and idle pages."""
    pages = sum(arena.stats()["physical_bytes"] for arena in _door.arenas() if arena.device == device.number)
    return [("graphs' pages", pages), ("idle pages of the library", library_bytes(device)["idle"])]


class Phases:
    """Bytes that neither torch nor the library holds, by the phase of a start in which they came: the context, communicators, kernels.

    They cannot be asked for by name: the driver only says what is free. So a mark at the end of each phase gives the phase's name to the growth.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.library_device: Device | None = None
        #: Bytes by name, in the order of the phases.
        self.rows: dict[str, int] = {}
        self.last = 0

    def outside(self) -> int:
        """Bytes in use on the device that are neither torch's nor the library's."""
        import torch

        free, total = driver_memory(self.device)
        held = library_bytes(self.library_device)["physical"] if self.library_device is not None else 0
        return total - free - torch.cuda.memory_reserved(self.device) - held

    def mark(self, name: str) -> int:
        """Gives the growth since the last mark a name, also where that is negative; returns it."""
        grown = self.outside() - self.last
        self.add(name, grown)
        return grown

    def add(self, name: str, size: int) -> None:
        """Gives so many bytes a name, which may have some already."""
        self.last += size
        self.rows[name] = self.rows.get(name, 0) + size


def nvml(device: int) -> Any:
    """NVML's module and its handle of a device; ``None`` where there is none. Makes no context."""
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
    """Bytes in use on a device before this process has a context there, without what the driver reserves; ``None`` where NVML does not say."""
    with contextlib.suppress(Exception):
        pynvml, handle = nvml(device)
        with contextlib.suppress(Exception):
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
        return sum(int(one.usedGpuMemory) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return None


def used_by_process(device: int) -> int | None:
    """Bytes that NVML counts for this process; ``None`` where it does not know the process, as in some containers."""
    with contextlib.suppress(Exception):
        pynvml, handle = nvml(device)
        for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if one.pid == os.getpid() and one.usedGpuMemory:
                return int(one.usedGpuMemory)
    return None
