"""Pausable GPU memory at stable addresses: the interface of ``torch_memory_saver``, on VmmGraph's
regions.

    from vmmgraph.memory_saver import torch_memory_saver, configure_subprocess

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.empty(...)
    torch_memory_saver.pause("weights")   # frees the device memory, saves the contents on the host
    torch_memory_saver.resume("weights")  # restores both at the same addresses

``vmmgraph.memory_saver.take_over()`` makes ``import torch_memory_saver`` import a package on this
module, in this process and in processes that it starts. The original terminates the process on some
errors: no memory at a resume, pausing twice, a foreign pointer. The same call in this module raises
`MemorySaverError` or does nothing, and can be repeated. `CuMemAllocator` has the interface of
vLLM's class.

The program chooses one of two hooks by ``torch_memory_saver.hook_mode`` before the first use:

* ``"preload"`` (the default): ``libvmmgraph_memory_saver.so`` is in ``LD_PRELOAD``, set by
  `configure_subprocess`. Its ``cudaMalloc`` serves torch, also during captures.
* ``"torch"``: a pluggable allocator of a ``torch.cuda.MemPool``. Nothing is preloaded. Graphs
  are paused if they were captured under `vmmgraph.enable`.

Settings of a region belong to the thread. Any thread may pause and resume; meanwhile the caller
must submit no work that uses the memory. During a capture both are refused and the capture
continues, if its stream is torch's or the library is preloaded.
"""

from __future__ import annotations

from ._cumem import CuMemAllocator
from ._interface import TorchMemorySaver, torch_memory_saver
from ._library import CpuBackupBackend, HookMode, MemorySaverError, OutOfMemory, configure_subprocess, library_path, shim_path
from ._take_over import take_over, undo_take_over

__all__ = [
    "CpuBackupBackend",
    "CuMemAllocator",
    "HookMode",
    "MemorySaverError",
    "OutOfMemory",
    "TorchMemorySaver",
    "configure_subprocess",
    "library_path",
    "shim_path",
    "take_over",
    "torch_memory_saver",
    "undo_take_over",
]
