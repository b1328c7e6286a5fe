"""The package ``torch_memory_saver`` (0.0.10) on `vmmgraph.memory_saver`. Active only if its folder
is on the path: `vmmgraph.memory_saver.take_over`."""

import sys
from pathlib import Path

try:
    import vmmgraph as _vmmgraph  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "vmmgraph":
        raise
    # The process inherited PYTHONPATH, and its parent found vmmgraph by sys.path only.
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from vmmgraph.memory_saver import (
    CuMemAllocator,
    MemorySaverError,
    OutOfMemory,
    TorchMemorySaver,
    torch_memory_saver,
)

from .hooks.mode_preload import configure_subprocess

__all__ = [
    "CuMemAllocator",
    "MemorySaverError",
    "OutOfMemory",
    "TorchMemorySaver",
    "configure_subprocess",
    "torch_memory_saver",
]
