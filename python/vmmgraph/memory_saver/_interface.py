"""The interface of torch_memory_saver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._library import DEFAULT_TAG, CpuBackupBackend, HookMode, check_region
from ._saver import Saver

if TYPE_CHECKING:
    import torch


class TorchMemorySaver:
    """See the module. One object per process, `torch_memory_saver`; loads nothing before its first
    use."""

    def __init__(self) -> None:
        self._mode: HookMode = "preload"
        self._saver: Saver | None = None
        self._first = threading.Lock()

    @property
    def enabled(self) -> bool:
        """True, for callers that check."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """Hook of the allocations: "preload" or "torch". Set before the first use."""
        return self._mode

    @hook_mode.setter
    def hook_mode(self, mode: HookMode) -> None:
        if mode not in ("preload", "torch"):
            raise ValueError(f"cannot use hook mode {mode!r}: no such mode; set 'preload' or 'torch'")
        if self._saver is not None and mode != self._mode:
            raise RuntimeError(
                f"cannot change hook_mode to {mode!r}: it is {self._mode!r} since the first use; set hook_mode before"
            )
        self._mode = mode

    def _ready(self) -> Saver:
        with self._first:
            if self._saver is None:
                self._saver = Saver(self._mode)
            return self._saver

    @property
    def _impl(self) -> Saver | None:
        """For programs that call the C functions: ``_impl._binary_wrapper.cdll``. None before the
        first use."""
        return self._saver

    def _ensure_initialized(self) -> None:
        """As `_impl`: opens the library."""
        self._ready()

    @contextlib.contextmanager
    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Makes this thread's allocations on its current device pausable, under `tag`.

        With `enable_cpu_backup` a resume restores the contents; otherwise they are lost. Regions
        nest; the inner region's settings apply. All backups use one pool of host memory, pinned if
        possible. With the `cpu_backup_backend` "mmap" a resume returns unused host memory to the
        system. With `enable_disk_backup` the contents are in files
        while paused (`set_disk_backup_dir`). Raises ValueError for an unknown backend, a backend
        without backup, or two backups.
        """
        check_region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self._ready().region(tag, enable_cpu_backup, cpu_backup_backend, enable_disk_backup):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """``torch.cuda.graph`` with the capture's memory in a region. Needs the hook mode "preload"
        (RuntimeError).

        The graph's addresses stay valid across a pause; a replay while paused is a GPU error.
        Without backup, data computed once in the capture is lost.

        A graph of `vmmgraph.enable()` is captured into an arena with the tag, in either hook mode.
        Tensors alive after the capture keep their contents, and a replay while paused raises.
        Raises `Error` if `pool` has graphs with a different tag, RuntimeError on the MemPool route.
        """
        import torch

        check_region(tag, enable_cpu_backup, False, cpu_backup_backend)
        saver = self._ready()
        arena = saver.arena_of(cuda_graph, pool, tag)
        if arena is not None:
            from .. import _scopes

            with _scopes.graph(cuda_graph, stream=stream, capture_error_mode=capture_error_mode, arena=arena):
                yield
            return
        if self._mode != "preload":
            raise RuntimeError(f"cuda_graph needs hook_mode 'preload', and it is {self._mode!r}")
        with (
            torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
            saver.settings(tag, enable_cpu_backup, cpu_backup_backend),
        ):
            yield

    @contextlib.contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        """Inside a region: allocations use ordinary memory, in a pool released afterwards.

        Raises RuntimeError outside a region, and ValueError for anything but True.
        """
        if not dispose_mem_pool_after_use:
            raise ValueError("disable(dispose_mem_pool_after_use=False): the pool always goes")
        saver = self._ready()
        if not saver.c.tms_get_interesting_region():
            raise RuntimeError("disable() outside a region")
        try:
            saver.c.tms_set_interesting_region(False)
            with saver.pools.ordinary_memory():
                yield
        finally:
            saver.c.tms_set_interesting_region(True)

    def pause(self, tag: str | None = None) -> None:
        """Pauses the memory of `tag`, or all memory, on every device, after all work of the device.
        Paused memory stays paused.

        Raises `MemorySaverError` for the first failure, after trying all devices. Failed memory
        keeps its contents, and the next call retries. Code 900: a stream is under capture, and
        nothing was paused. Code 401: another thread is inside a region of the tag, and nothing was
        paused.
        """
        self._ready().pause(tag or None)

    def resume(self, tag: str | None = None) -> None:
        """Resumes the memory of `tag`, or all memory, with its contents if a backup exists. Memory
        not paused is unchanged.

        Resumes all or nothing on each device. Raises `OutOfMemory` if the device is full:
        everything stays paused, and the call can be repeated.
        """
        self._ready().resume(tag or None)

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Returns the contents of a paused tensor as a host tensor; None if not paused.

        With `zero_copy` the result shares the library's copy, which is freed by a resume or a free
        (with `retain_cpu_backup`: only by a free). `x` must be contiguous (ValueError). Raises
        `MemorySaverError` for memory outside regions or without a backup.
        """
        import torch

        if not x.is_cuda or not x.is_contiguous():
            raise ValueError(
                f"get_cpu_backup: a contiguous tensor of a GPU is meant, and this one is on {x.device}, strides {x.stride()}"
            )
        count = x.numel() * x.element_size()
        at = self._ready().library.backup(x.data_ptr(), count)
        if at is None:
            return None
        if count == 0:
            return torch.empty(x.shape, dtype=x.dtype)
        held = torch.frombuffer((ctypes.c_uint8 * count).from_address(at), dtype=torch.uint8)
        shown = held.view(x.dtype).view(x.shape)
        return shown if zero_copy else shown.clone()

    @property
    def memory_margin_bytes(self) -> int:
        """Write-only: an allocation in a region that would leave fewer free bytes on the device
        fails with out of memory; 0, the default: no limit."""
        raise NotImplementedError("memory_margin_bytes can be set only")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"memory_margin_bytes {value}: from 0 to 2**64 - 1")
        self._ready().c.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether `get_cpu_backup` results with `zero_copy` survive a resume, until the next pause
        updates them."""
        return self._ready().c.tms_get_retain_cpu_backup()

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ready().c.tms_set_retain_cpu_backup(value)

    def set_disk_backup_dir(self, path: str) -> None:
        """Names the folder of backups of later pauses, and makes the folder if needed. Initially
        ``TMS_DISK_BACKUP_DIR``, else ``TMPDIR``, else ``/tmp``."""
        os.makedirs(path, exist_ok=True)
        self._ready().c.tms_set_disk_backup_dir(os.fsencode(path))


torch_memory_saver = TorchMemorySaver()
