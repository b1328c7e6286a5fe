"""GPU memory that steps aside and comes back at the same addresses: the names of ``torch_memory_saver``, over VmmGraph's regions.

    from vmmgraph.memory_saver import torch_memory_saver, configure_subprocess

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.empty(...)
    torch_memory_saver.pause("weights")     # the memory is the device's, the contents are in host memory
    torch_memory_saver.resume("weights")    # and back, at the same addresses

``vmmgraph.memory_saver.take_over()`` makes ``import torch_memory_saver`` mean this module. Where the original ends the process (no memory at a
resume, pausing twice, a pointer that is not its own), a call here raises `MemorySaverError` or does nothing, and can be repeated. There is
no backup on disk. `CuMemAllocator` has the calls of vLLM's.

Two ways to come to the memory, chosen by ``torch_memory_saver.hook_mode`` before the first use:

* ``"preload"`` (the default): ``libvmmgraph_memory_saver.so`` is in ``LD_PRELOAD``, which `configure_subprocess` sees to. Its ``cudaMalloc``
  answers torch, also during captures.
* ``"torch"``: as a pluggable allocator of a ``torch.cuda.MemPool``. Nothing is preloaded; captures are not covered.

Settings of a region belong to the thread. Pause and resume may be called from any; the caller submits nothing that uses the memory meanwhile.
During a capture they are refused and the capture goes on, if it is on one of torch's streams or the library is preloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "CuMemAllocator",
    "MemorySaverError",
    "OutOfMemory",
    "TorchMemorySaver",
    "configure_subprocess",
    "library_path",
    "take_over",
    "torch_memory_saver",
]

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["pinned", "mmap"]

_FILE = "libvmmgraph_memory_saver.so"
_DEFAULT_TAG = "default"
_OUT_OF_MEMORY = 2
#: From so many cached bytes on, a region's pool is replaced.
_MUCH_UNUSED = 64 << 20
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class MemorySaverError(RuntimeError):
    """A call that changed nothing, or nothing more. `code` is a ``cudaError_t``, such as 900: a stream is being captured."""

    def __init__(self, what: str, code: int, why: str) -> None:
        super().__init__(f"{what}: {why or 'no reason is known'} (cudaError_t {code})")
        self.code = code


class OutOfMemory(MemorySaverError):
    """There is no memory; what was paused is paused as before, and the call can be repeated."""


def library_path() -> str:
    """The path of ``libvmmgraph_memory_saver.so``: the package's, or that which ``VMMGRAPH_MEMORY_SAVER_LIBRARY`` names. The file may be absent."""
    named = os.environ.get("VMMGRAPH_MEMORY_SAVER_LIBRARY")
    return named or str(pathlib.Path(__file__).resolve().parent / "_lib" / _FILE)


def _preloaded() -> list[str]:
    """The entries of LD_PRELOAD that are this library."""
    return [path for path in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if os.path.basename(path) == _FILE]


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started meanwhile have the library in ``LD_PRELOAD``, before what is there already. For the hook mode "preload".

    Raises FileNotFoundError if there is no library. The environment is the process's: two threads at once are the caller's to order.
    """
    path = library_path()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} is not there: this vmmgraph was installed without its libraries")
    before = os.environ.get("LD_PRELOAD")
    entries = [path] + [entry for entry in (before or "").split(":") if entry and os.path.basename(entry) != _FILE]
    try:
        os.environ["LD_PRELOAD"] = ":".join(entries)
        yield
    finally:
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


class _Library:
    """The C functions (include/vmmgraph/memory_saver.h), and what torch needs to come to them. Calls release the GIL."""

    def __init__(self, mode: HookMode) -> None:
        if mode == "preload":
            found = _preloaded()
            if len(found) != 1:
                raise RuntimeError(
                    f"hook mode 'preload', and {len(found)} entries of LD_PRELOAD are {_FILE}: start the process inside "
                    "vmmgraph.memory_saver.configure_subprocess(), or set torch_memory_saver.hook_mode = 'torch' before its first use "
                    f"(LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r}, process {os.getpid()})"
                )
            self.path = found[0]
        elif mode == "torch":
            self.path = library_path()
        else:
            raise ValueError(f"hook_mode {mode!r}: there are 'preload' and 'torch'")
        self.c = ctypes.CDLL(self.path)
        text, flag, integer, size = ctypes.c_char_p, ctypes.c_bool, ctypes.c_int, ctypes.c_uint64
        for name, result, arguments in (
            ("tms_set_interesting_region", None, [flag]),
            ("tms_get_interesting_region", flag, []),
            ("tms_set_current_tag", None, [text]),
            ("tms_get_current_tag", text, []),
            ("tms_set_enable_cpu_backup", None, [flag]),
            ("tms_get_enable_cpu_backup", flag, []),
            ("tms_set_cpu_backup_backend", None, [text]),
            ("tms_get_cpu_backup_backend", text, []),
            ("tms_pause", integer, [text]),
            ("tms_resume", integer, [text]),
            ("tms_get_cpu_backup_pointer", ctypes.c_void_p, [ctypes.c_void_p, size]),
            ("tms_set_retain_cpu_backup", None, [flag]),
            ("tms_get_retain_cpu_backup", flag, []),
            ("set_memory_margin_bytes", None, [size]),
            ("tms_torch_malloc", ctypes.c_void_p, [ctypes.c_ssize_t, integer, ctypes.c_void_p]),
            ("tms_torch_free", None, [ctypes.c_void_p, ctypes.c_ssize_t, integer, ctypes.c_void_p]),
            ("tms_watch_streams", integer, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]),
            ("tms_include_arenas", integer, [text, integer]),
            ("tms_is_capturing", flag, []),
            ("tms_last_error", integer, [ctypes.POINTER(text)]),
        ):
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments
        self.mode = mode

    def last_error(self) -> tuple[int, str]:
        """This thread's last failure, which is forgotten."""
        text = ctypes.c_char_p()
        code = self.c.tms_last_error(ctypes.byref(text))
        return code, (text.value or b"").decode(errors="replace")

    def check(self, what: str, code: int) -> None:
        if code != 0:
            _, why = self.last_error()
            raise (OutOfMemory if code == _OUT_OF_MEMORY else MemorySaverError)(what, code, why)

    def backup(self, address: int, count: int) -> int | None:
        """Where the host has `count` bytes of paused memory; None while the memory is there."""
        self.last_error()
        at = self.c.tms_get_cpu_backup_pointer(address, count)
        if not at:
            code, why = self.last_error()
            if code != 0:
                raise MemorySaverError("get_cpu_backup", code, why)
        return at


class _Settings:
    """What a thread's next allocations are: read, changed, put back."""

    def __init__(self, c: Any) -> None:
        self.interesting = c.tms_get_interesting_region()
        self.tag = c.tms_get_current_tag()
        self.backup = c.tms_get_enable_cpu_backup()
        self.backend = c.tms_get_cpu_backup_backend()

    def put_back(self, c: Any) -> None:
        c.tms_set_current_tag(self.tag)
        c.tms_set_enable_cpu_backup(self.backup)
        c.tms_set_cpu_backup_backend(self.backend)
        c.tms_set_interesting_region(self.interesting)


class _ExpandableSegments:
    """Turns torch's expandable segments off while any thread is inside a region, and on again
    afterwards, as vLLM does around its pool.

    Torch maps expandable segments itself, so they cannot be paused. Segments that exist already
    stay as they are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        # The whole text, since torch up to 2.9 resets every setting that a text does not name.
        self._on = next((text for name in _SETTINGS if _EXPANDABLE.search(text := os.environ.get(name, ""))), None)

    @staticmethod
    def _set(text: str) -> None:
        import torch

        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(text)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        on = self._on
        if on is None:
            yield
            return
        with self._lock:
            if self._inside == 0:
                self._set(_EXPANDABLE.sub("expandable_segments:False", on))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._set(on)


class _PoolUse:
    """One thread's allocations to a pool. `make` gives a new context manager for each entry."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]], key: tuple[Any, ...] | None) -> None:
        self.make = make
        #: The region's pool key; None for ordinary memory.
        self.key = key
        self._entered: contextlib.AbstractContextManager[Any] | None = None

    def enter(self) -> None:
        made = self.make()
        made.__enter__()
        self._entered = made

    def leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


class _PoolUses(threading.local):
    """The pools that one thread allocates to, the innermost last."""

    def __init__(self) -> None:
        self.all: list[_PoolUse] = []


@contextlib.contextmanager
def _allocating_to(device: int, pool: Any) -> Iterator[None]:
    """This thread allocates to torch's pool of that number, for which no MemPool object is needed."""
    import torch

    _begin_allocating_to(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _begin_allocating_to(device: int, pool: Any) -> None:
    import torch

    # Of one thread from torch 2.8 on.
    begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None) or torch._C._cuda_beginAllocateToPool
    begin(device, pool)


def _choose_core() -> None:
    """Loads what `vmmgraph.enable` would, which the C functions then find: regions and arenas have one page pool, whichever is used first."""
    from . import _c, _core

    # Without one in the package, the C functions look beside their own library.
    with contextlib.suppress(_c.Error, OSError, AttributeError):
        _core.any_one()


class _Saver:
    """What there is from the first use on."""

    def __init__(self, mode: HookMode) -> None:
        _choose_core()
        self.library = _Library(mode)
        self.c = self.library.c
        self._pools: dict[tuple[Any, ...], Any] = {}
        self._uses = _PoolUses()
        self._expandable_segments = _ExpandableSegments()
        self._allocator: Any = None
        self._watched: set[int] = set()
        #: Pools in which nothing more is allocated; tensors may be alive there.
        self._retired: list[Any] = []
        self._lock = threading.Lock()

    def pool(self, key: tuple[Any, ...]) -> Any:
        """The MemPool of a tag, a policy and a device: a tag belongs to a segment, so tensors of two must not share one."""
        import torch

        with self._lock:
            if key not in self._pools:
                if self.library.mode == "preload":
                    self._pools[key] = torch.cuda.MemPool()
                else:
                    if self._allocator is None:
                        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
                            self.library.path, "tms_torch_malloc", "tms_torch_free"
                        )
                    self._pools[key] = torch.cuda.MemPool(self._allocator.allocator())
            return self._pools[key]

    def _empty_cache(self) -> None:
        """Gives back the cached memory of pools that were released. A free would break a capture, so
        during one the memory is left to the next call."""
        import torch

        if not self.c.tms_is_capturing():
            torch.cuda.empty_cache()

    def _retire(self, key: tuple[Any, ...]) -> None:
        """Releases a pool: nothing more is allocated in it, its tensors stay, and its cached memory
        can go back.

        Its destructor would do the same. But it asserts that no thread allocates to any pool (torch
        2.6 to 2.15), and aborts otherwise.
        """
        import torch

        with self._lock:
            pool = self._pools.pop(key, None)
            if pool is None:
                return
            self._retired.append(pool)
        # Up to torch 2.7 a released pool gives its segments to cudaFree, which knows nothing of this memory.
        if not hasattr(torch.cuda.memory, "MemPoolContext"):
            # Never destroyed: the destructor would release the pool a second time.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
            torch._C._cuda_releasePool(key[-1], pool.id)

    def retire_if_unused(self, key: tuple[Any, ...]) -> None:
        """After a region: retires its pool if much of it is cached, as when weights are quantized
        while they are loaded."""
        with self._lock:
            pool = self._pools.get(key)
        if pool is None:
            return
        unused = sum(segment["total_size"] for segment in pool.snapshot() if segment["active_size"] == 0)
        if unused >= _MUCH_UNUSED:
            self._retire(key)
            self._empty_cache()

    def retire(self, tag: str | None) -> None:
        """Before a pause of the tag, or of all: freed memory goes back instead of being paused, and
        torch never hands out parts of it.

        Regions that this thread is inside go on with other pools.
        """
        with self._lock:
            keys = [key for key in self._pools if tag is None or key[0] == tag]
        uses = self._uses.all
        first = next((place for place, use in enumerate(uses) if use.key in keys), len(uses))
        # In order, since torch takes the pool that was begun last.
        for use in reversed(uses[first:]):
            use.leave()
        for key in keys:
            self._retire(key)
        for use in uses[first:]:
            use.enter()
        if self._retired:
            self._empty_cache()

    @contextlib.contextmanager
    def _use(self, use: _PoolUse) -> Iterator[None]:
        uses = self._uses.all
        try:
            uses.append(use)
            use.enter()
            yield
        finally:
            uses.remove(use)
            use.leave()

    @contextlib.contextmanager
    def ordinary_memory(self) -> Iterator[None]:
        """This thread's allocations on its current device are memory of cudaMalloc, in a pool that
        ends afterwards."""
        import torch

        device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
        # One more use, so that the pool lasts where a pause leaves it and enters it again.
        _begin_allocating_to(device, pool)
        torch._C._cuda_endAllocateToPool(device, pool)
        try:
            with self._use(_PoolUse(lambda: _allocating_to(device, pool), None)):
                yield
        finally:
            torch._C._cuda_releasePool(device, pool)
            self._empty_cache()

    def arena_of(self, graph: Any, pool: Any, tag: str) -> Any:
        """The arena that the graph's capture is to lie in; None: its memory is torch's."""
        import torch

        from . import _door

        door = _door.opened()
        if _door.local().disabled:
            return None
        if hasattr(graph, "_mempool"):
            raise RuntimeError(
                "cannot capture a graph under a tag: the MemPool route of vmmgraph.enable() has arenas that are not paused; capture it "
                "within vmmgraph.disabled()"
            )
        if door is None or not hasattr(graph, "_named"):
            return None
        device, pool = torch.cuda.current_device(), getattr(pool, "id", pool)
        named = None if pool is None or not any(pool) else (int(pool[0]), int(pool[1]))
        arena = door.tagged_arena(device, named, tag)
        self.library.check("cuda_graph", self.c.tms_include_arenas(tag.encode(), device))
        return arena

    @staticmethod
    def seal_arenas(tag: str | None) -> None:
        """Ends what is open in the arenas with the tag, or any tag: an arena with an open shape is not paused."""
        from . import _door

        for arena in _door.arenas():
            if arena.tag and tag in (None, arena.tag):
                arena.seal()

    def segment_bytes(self) -> int:
        import torch

        with self._lock:
            pools = {tuple(pool.id) for pool in (*self._pools.values(), *self._retired)}
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in pools)

    def watch_torchs_streams(self) -> None:
        """Names torch's own streams to the library, which then sees captures on them. They are as many as torch ever makes."""
        if self.library.mode == "preload" or "torch" not in sys.modules:
            return
        import torch

        # Streams are not made while something is captured, nor for a device that nobody uses.
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        for device in range(torch.cuda.device_count()):
            if device not in self._watched and torch._C._cuda_hasPrimaryContext(device):
                found = torch_streams(device)
                self.library.check(
                    "watching torch's streams", self.c.tms_watch_streams((ctypes.c_void_p * len(found))(*found), len(found))
                )
                self._watched.add(device)

    @contextlib.contextmanager
    def settings(self, tag: str, backup: bool, backend: str | None) -> Iterator[None]:
        before = _Settings(self.c)
        # A signal's exception comes between any two steps.
        try:
            self.c.tms_set_current_tag(tag.encode())
            self.c.tms_set_enable_cpu_backup(backup)
            if backend is not None:
                self.c.tms_set_cpu_backup_backend(backend.encode())
            self.c.tms_set_interesting_region(True)
            yield
        finally:
            before.put_back(self.c)

    @contextlib.contextmanager
    def region(self, tag: str, backup: bool, backend: str | None) -> Iterator[None]:
        import torch

        self.watch_torchs_streams()
        _explain_sharing()
        key = (tag, backup, backend, torch.cuda.current_device())
        use = _PoolUse(lambda: torch.cuda.use_mem_pool(self.pool(key)), key)
        try:
            with self._expandable_segments.off(), self._use(use), self.settings(tag, backup, backend):
                yield
        finally:
            # Again, since a program's first use of the device may have been inside: it may capture before it pauses.
            self.watch_torchs_streams()
            self.retire_if_unused(key)


def _explain_sharing() -> None:
    """Makes torch's IPC say which memory can be sent: of a region's memory CUDA says only "invalid argument"."""
    import torch

    storage = getattr(torch, "UntypedStorage", None)
    torchs = getattr(storage, "_share_cuda_", None)
    if torchs is None or hasattr(torchs, "__wrapped__"):
        return

    @functools.wraps(torchs)
    def share_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return torchs(self, *args, **kwargs)
        except RuntimeError as error:
            if "invalid argument" not in str(error):
                raise
            raise RuntimeError(
                f"cannot share the memory at {self.data_ptr():#x} with another process: CUDA exports no handle for it, as for memory of "
                "a region of the memory saver; send a copy that is made outside regions, or inside disable()"
            ) from error

    storage._share_cuda_ = share_cuda


def torch_streams(device: int) -> list[int]:
    """The handles of all streams that torch has on a device for those who ask for one. It hands them out in turn, a fixed number for each
    priority, so asking until one comes again leaves its turn where it was."""
    import torch

    least, greatest = torch.cuda.Stream.priority_range()
    handles: list[int] = []
    for priority in range(greatest, least + 1):
        seen: list[int] = []
        while len(seen) < 256:
            handle = torch.cuda.Stream(device, priority=priority).cuda_stream
            if handle in seen:
                break
            seen.append(handle)
        # One more was taken than there are: take the rest of the round too.
        for _ in range(len(seen) - 1):
            torch.cuda.Stream(device, priority=priority)
        handles += seen
    return handles


class TorchMemorySaver:
    """See the module. One a process, `torch_memory_saver`; nothing is loaded before its first use."""

    def __init__(self) -> None:
        self._mode: HookMode = "preload"
        self._saver: _Saver | None = None
        self._first = threading.Lock()

    @property
    def enabled(self) -> bool:
        """True, for those who ask."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """ "preload" or "torch"; to be set before the first use."""
        return self._mode

    @hook_mode.setter
    def hook_mode(self, mode: HookMode) -> None:
        if mode not in ("preload", "torch"):
            raise ValueError(f"hook_mode {mode!r}: there are 'preload' and 'torch'")
        if self._saver is not None and mode != self._mode:
            raise RuntimeError(f"hook_mode is {self._mode!r} since the first use, and cannot become {mode!r}")
        self._mode = mode

    def _ready(self) -> _Saver:
        with self._first:
            if self._saver is None:
                self._saver = _Saver(self._mode)
            return self._saver

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """What this thread allocates on its current device meanwhile can step aside, under `tag`.

        With `enable_cpu_backup` contents come back, else they are lost. Regions nest; the inner one's settings hold inside it. There is
        one pool of host memory, pinned where that is granted, whatever `cpu_backup_backend` says. Raises ValueError for a backend that is
        none or has nothing to back up, NotImplementedError for `enable_disk_backup`.
        """
        _check_region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self._ready().region(tag, enable_cpu_backup, cpu_backup_backend):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """``torch.cuda.graph`` with the capture's memory in a region. Needs the hook mode "preload" (RuntimeError).

        The graph's addresses stay valid over a pause; a replay while its memory is paused is an error of the GPU. Without backup what the
        capture computed once, such as constants, is lost.

        A graph of `vmmgraph.enable()` is captured into an arena with that tag, in either hook mode:
        tensors that outlive the capture keep their contents, and a replay while its memory is paused
        raises. Raises `Error` if `pool` has graphs of another tag, RuntimeError on the MemPool route.
        """
        import torch

        _check_region(tag, enable_cpu_backup, False, cpu_backup_backend)
        saver = self._ready()
        arena = saver.arena_of(cuda_graph, pool, tag)
        if arena is not None:
            from . import _scopes

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
        """Inside a region: what is allocated meanwhile is ordinary memory, in a pool that goes afterwards.

        Raises RuntimeError outside a region, and ValueError for anything but True.
        """
        if not dispose_mem_pool_after_use:
            raise ValueError("disable(dispose_mem_pool_after_use=False): the pool always goes")
        saver = self._ready()
        if not saver.c.tms_get_interesting_region():
            raise RuntimeError("disable() outside a region")
        try:
            saver.c.tms_set_interesting_region(False)
            with saver.ordinary_memory():
                yield
        finally:
            saver.c.tms_set_interesting_region(True)

    def pause(self, tag: str | None = None) -> None:
        """The memory of `tag`, or all of it, steps aside on every device, behind what they do. What is paused stays so.

        Raises `MemorySaverError`: of several failures the first, after all was tried; what failed keeps its contents, and the next call
        tries it again. Code 900: a stream is being captured, and nothing was paused.
        """
        saver = self._ready()
        saver.watch_torchs_streams()
        saver.seal_arenas(tag or None)
        saver.retire(tag or None)
        saver.library.check(f"pause({tag!r})", saver.c.tms_pause(tag.encode() if tag else None))

    def resume(self, tag: str | None = None) -> None:
        """The memory of `tag`, or all of it, comes back, with its contents where there is a backup. What is there stays.

        On each device all of it or nothing. Raises `OutOfMemory` while others have the memory: all is paused as before, to be tried again.
        """
        saver = self._ready()
        saver.library.check(f"resume({tag!r})", saver.c.tms_resume(tag.encode() if tag else None))

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """The contents of a paused tensor, as a tensor of the host's; None while its memory is there.

        With `zero_copy` it shows the library's own copy, which lives until the memory is resumed or freed (with `retain_cpu_backup`: until it
        is freed). `x` is contiguous (ValueError). Raises `MemorySaverError` for memory that is not in a region or has no backup.
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
        """To be set only: an allocation in a region that leaves fewer bytes of the device free is out of memory; 0, the default: none is."""
        raise NotImplementedError("memory_margin_bytes can be set only")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"memory_margin_bytes {value}: from 0 to 2**64 - 1")
        self._ready().c.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether what `get_cpu_backup` gave with `zero_copy` stays when memory is resumed; it has the new contents after the next pause."""
        return self._ready().c.tms_get_retain_cpu_backup()

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ready().c.tms_set_retain_cpu_backup(value)

    def set_disk_backup_dir(self, path: str) -> None:
        """There is no backup on disk: NotImplementedError."""
        raise NotImplementedError(f"set_disk_backup_dir({path!r}): there is no backup on disk")


def _check_region(tag: str, backup: bool, disk: bool, backend: str | None) -> None:
    if not isinstance(tag, str) or "\0" in tag or not tag:
        raise ValueError(f"tag {tag!r}: a text that is not empty and has no zero byte is meant")
    if disk:
        raise NotImplementedError("enable_disk_backup: there is no backup on disk")
    if backend is None:
        return
    if not backup:
        raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")
    if backend not in ("pinned", "mmap"):
        raise ValueError(f"cpu_backup_backend {backend!r}: there are 'pinned' and 'mmap'")


torch_memory_saver = TorchMemorySaver()


def take_over() -> None:
    """From now on ``import torch_memory_saver`` is this module, in this process. Raises RuntimeError if the original is loaded already."""
    there = sys.modules.get("torch_memory_saver")
    if there is not None and there is not sys.modules[__name__]:
        raise RuntimeError(
            f"torch_memory_saver is loaded already, from {getattr(there, '__file__', None)}: take over before it is imported"
        )
    sys.modules["torch_memory_saver"] = sys.modules[__name__]


class CuMemAllocator:
    """The calls of vLLM's ``CuMemAllocator``, over `torch_memory_saver` in either hook mode.

    Whether contents can go to the host is said at allocation here, not at `sleep`: tags in `discarded` (at first ``{"kv_cache"}``) have no
    backup, all others do. So `sleep` keeps the contents of a tag that it was not told to offload, which costs host memory, and refuses to offload one that
    has no backup.
    """

    default_tag = _DEFAULT_TAG
    _instance: CuMemAllocator | None = None

    def __init__(self, saver: TorchMemorySaver | None = None) -> None:
        self.discarded: set[str] = {"kv_cache"}
        self._saver = saver or torch_memory_saver
        # Of tags that were used: whether they have a backup.
        self._backup: dict[str, bool] = {}

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """The one of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What this thread allocates meanwhile can sleep, under `tag`, or under "default"."""
        tag = self.default_tag if tag is None else tag
        backup = self._backup.setdefault(tag, tag not in self.discarded)
        with self._saver.region(tag, enable_cpu_backup=backup):
            yield

    def sleep(self, offload_tags: Collection[str] | str | None = None) -> None:
        """All tags step aside; the contents of `offload_tags` (None: of "default") come back at `wake_up`. Sleeping twice is sleeping once.

        Raises ValueError, with nothing changed, for a tag whose memory has no backup, and what `TorchMemorySaver.pause` does.
        """
        tags = (
            (self.default_tag,)
            if offload_tags is None
            else (offload_tags,)
            if isinstance(offload_tags, str)
            else tuple(offload_tags)
        )
        lost = sorted(tag for tag in tags if self._backup.get(tag) is False)
        if lost:
            raise ValueError(
                f"sleep: {lost} have no backup; take them out of CuMemAllocator.discarded before memory is allocated"
            )
        for tag in self._backup:
            self._saver.pause(tag)
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def get_current_usage(self) -> int:
        """Bytes of the segments that torch has in the pools of this saver, asleep or awake."""
        return self._saver._ready().segment_bytes()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """`tags`, or all, are there again. Tags that are not known or awake are nothing to do. Raises as `TorchMemorySaver.resume` does;
        tags before the one that failed are awake then."""
        for tag in self._backup if tags is None else tags:
            if tag in self._backup:
                self._saver.resume(tag)
