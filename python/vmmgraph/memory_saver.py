"""Pausable GPU memory at stable addresses: the interface of ``torch_memory_saver``, on VmmGraph's
regions.

    from vmmgraph.memory_saver import torch_memory_saver, configure_subprocess

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.empty(...)
    torch_memory_saver.pause("weights")   # frees the device memory, saves the contents on the host
    torch_memory_saver.resume("weights")  # restores both at the same addresses

``vmmgraph.memory_saver.take_over()`` makes ``import torch_memory_saver`` import a package on this
module, in this process and in processes that it starts. The original terminates the process on some
errors: no memory at a resume, pausing twice, a foreign
pointer. The same call in this module raises `MemorySaverError` or does nothing, and can be
repeated. Backup on disk is not supported. `CuMemAllocator` has the interface of vLLM's class.

The program chooses one of two hooks by ``torch_memory_saver.hook_mode`` before the first use:

* ``"preload"`` (the default): ``libvmmgraph_memory_saver.so`` is in ``LD_PRELOAD``, set by
  `configure_subprocess`. Its ``cudaMalloc`` serves torch, also during captures.
* ``"torch"``: a pluggable allocator of a ``torch.cuda.MemPool``. Nothing is preloaded; captures are
  not covered.

Settings of a region belong to the thread. Any thread may pause and resume; meanwhile the caller
must submit no work that uses the memory. During a capture both are refused and the capture
continues, if its stream is torch's or the library is preloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
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
    "shim_path",
    "take_over",
    "torch_memory_saver",
    "undo_take_over",
]

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["pinned", "mmap"]

_FILE = "libvmmgraph_memory_saver.so"
_ORIGINAL = "torch_memory_saver"
_DEFAULT_TAG = "default"
_OUT_OF_MEMORY = 2
#: A region's pool is replaced once it caches this many bytes.
_MUCH_UNUSED = 64 << 20
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class MemorySaverError(RuntimeError):
    """`code` is a ``cudaError_t``, such as 900: a stream is under capture."""

    def __init__(self, what: str, code: int, why: str) -> None:
        super().__init__(f"{what}: {why or 'no reason is known'} (cudaError_t {code})")
        self.code = code


class OutOfMemory(MemorySaverError):
    """Out of memory. Paused memory stays paused, and the call can be repeated."""


def library_path() -> str:
    """Returns the path of ``libvmmgraph_memory_saver.so``: the package's, or
    ``VMMGRAPH_MEMORY_SAVER_LIBRARY``. The file may be absent."""
    named = os.environ.get("VMMGRAPH_MEMORY_SAVER_LIBRARY")
    return named or str(pathlib.Path(__file__).resolve().parent / "_lib" / _FILE)


def shim_path() -> str:
    """Returns the folder of the package ``torch_memory_saver`` that `take_over` puts on the path. A
    process with this folder first in ``PYTHONPATH`` imports it without a call."""
    return str(pathlib.Path(__file__).resolve().parent / "_shims")


def _is_library(path: str) -> bool:
    """Whether the file is the library, by its own name or by one of torch_memory_saver's names."""
    folder, name = os.path.split(path)
    return name == _FILE or (name.startswith(_ORIGINAL) and os.path.realpath(folder) == os.path.realpath(shim_path()))


def _preloaded() -> list[str]:
    return [path for path in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if _is_library(path)]


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes started inside the context have the library first in ``LD_PRELOAD``. For the hook
    mode "preload".

    Raises FileNotFoundError without a library. Changes the process's environment: the caller must
    serialise threads.
    """
    path = library_path()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} is not there: this vmmgraph was installed without its libraries")
    before = os.environ.get("LD_PRELOAD")
    entries = [path] + [entry for entry in (before or "").split(":") if entry and not _is_library(entry)]
    try:
        os.environ["LD_PRELOAD"] = ":".join(entries)
        yield
    finally:
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


def _declare(c: Any) -> None:
    """Declares the library's C functions (include/vmmgraph/memory_saver.h). Calls release the
    GIL."""
    text, flag, integer, size = ctypes.c_char_p, ctypes.c_bool, ctypes.c_int, ctypes.c_uint64
    for name, result, arguments in (
        ("tms_set_interesting_region", None, [flag]),
        ("tms_get_interesting_region", flag, []),
        ("tms_set_current_tag", None, [text]),
        ("tms_get_current_tag", text, []),
        ("tms_set_enable_cpu_backup", None, [flag]),
        ("tms_get_enable_cpu_backup", flag, []),
        ("tms_set_enable_disk_backup", None, [flag]),
        ("tms_get_enable_disk_backup", flag, []),
        ("tms_set_disk_backup_dir", None, [text]),
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
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments


class _BinaryWrapper:
    """torch_memory_saver's wrapper of the library. Programs call C functions by its `cdll`."""

    def __init__(self, path_binary: str) -> None:
        self.cdll = ctypes.CDLL(path_binary)
        _declare(self.cdll)

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Sets all settings of the calling thread. Raises NotImplementedError for
        `enable_disk_backup`."""
        _check_region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())


class _Library:
    """The library in a hook mode."""

    def __init__(self, mode: HookMode) -> None:
        found = _preloaded()
        if mode == "preload":
            if len(found) != 1:
                raise RuntimeError(
                    f"hook mode 'preload', and {len(found)} entries of LD_PRELOAD are {_FILE}: start the process inside "
                    "vmmgraph.memory_saver.configure_subprocess(), or set torch_memory_saver.hook_mode = 'torch' before its first use "
                    f"(LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r}, process {os.getpid()})"
                )
            self.path = found[0]
        elif mode == "torch":
            # A preloaded library may be a copy of the package's, which would be a second saver.
            self.path = found[0] if found else library_path()
        else:
            raise ValueError(f"hook_mode {mode!r}: there are 'preload' and 'torch'")
        self.binary_wrapper = _BinaryWrapper(self.path)
        self.c = self.binary_wrapper.cdll
        self.mode = mode

    def last_error(self) -> tuple[int, str]:
        text = ctypes.c_char_p()
        code = self.c.tms_last_error(ctypes.byref(text))
        return code, (text.value or b"").decode(errors="replace")

    def check(self, what: str, code: int) -> None:
        if code != 0:
            _, why = self.last_error()
            raise (OutOfMemory if code == _OUT_OF_MEMORY else MemorySaverError)(what, code, why)

    def backup(self, address: int, count: int) -> int | None:
        self.last_error()
        at = self.c.tms_get_cpu_backup_pointer(address, count)
        if not at:
            code, why = self.last_error()
            if code != 0:
                raise MemorySaverError("get_cpu_backup", code, why)
        return at


class _Settings:
    """Settings of a thread's next allocations: saves and restores them."""

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
    """Disables torch's expandable segments, which cannot be paused, while any thread is inside a
    region, as vLLM does around its pool. Existing segments stay unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
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
    def __init__(self) -> None:
        self.all: list[_PoolUse] = []


@contextlib.contextmanager
def _allocating_to(device: int, pool: Any) -> Iterator[None]:
    """Makes this thread allocate to torch's pool with this id, without a MemPool object."""
    import torch

    _begin_allocating_to(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _begin_allocating_to(device: int, pool: Any) -> None:
    import torch

    begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None) or torch._C._cuda_beginAllocateToPool
    begin(device, pool)


def _choose_core() -> None:
    from . import _c, _core

    # Without a core in the package, the C functions search the folder of their own library.
    with contextlib.suppress(_c.Error, OSError, AttributeError):
        _core.any_one()


class _Saver:
    def __init__(self, hook_mode: HookMode = "preload") -> None:
        _choose_core()
        self.library = _Library(hook_mode)
        self.c = self.library.c
        self._pools: dict[tuple[Any, ...], Any] = {}
        self._uses = _PoolUses()
        self._expandable_segments = _ExpandableSegments()
        self._allocator: Any = None
        self._watched: set[int] = set()
        #: Pools without further allocations, possibly with live tensors.
        self._retired: list[Any] = []
        self._lock = threading.Lock()

    @property
    def _binary_wrapper(self) -> _BinaryWrapper:
        return self.library.binary_wrapper

    def pool(self, key: tuple[Any, ...]) -> Any:
        """Per tag, policy and device: a segment has one tag."""
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
        """During a capture a free would break the capture, so the next call does it."""
        import torch

        if not self.c.tms_is_capturing():
            torch.cuda.empty_cache()

    def _retire(self, key: tuple[Any, ...]) -> None:
        """Releases a pool: its tensors stay, and its cached memory can be freed. Torch's destructor
        has the same effect, but aborts if any thread allocates to any pool (torch 2.6 to 2.15)."""
        import torch

        with self._lock:
            pool = self._pools.pop(key, None)
            if pool is None:
                return
            self._retired.append(pool)
        # Up to torch 2.7 a released pool passes its segments to cudaFree, which does not know them.
        if not hasattr(torch.cuda.memory, "MemPoolContext"):
            # Never destroyed: the destructor would release the pool a second time.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
            torch._C._cuda_releasePool(key[-1], pool.id)

    def retire_if_unused(self, key: tuple[Any, ...]) -> None:
        """Retires a region's pool with much cached memory, as after quantizing weights while
        loading."""
        with self._lock:
            pool = self._pools.get(key)
        if pool is None:
            return
        unused = sum(segment["total_size"] for segment in pool.snapshot() if segment["active_size"] == 0)
        if unused >= _MUCH_UNUSED:
            self._retire(key)
            self._empty_cache()

    def retire(self, tag: str | None) -> None:
        """Retires the pools of a tag, or all, before a pause: cached memory is freed instead of
        paused. Regions open on this thread continue with new pools."""
        with self._lock:
            keys = [key for key in self._pools if tag is None or key[0] == tag]
        uses = self._uses.all
        first = next((place for place, use in enumerate(uses) if use.key in keys), len(uses))
        # In reverse order, since torch uses the pool begun last.
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
        """Allocations of this thread come from cudaMalloc, in a pool released afterwards."""
        import torch

        device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
        # Keeps the pool alive while a pause leaves and re-enters it.
        _begin_allocating_to(device, pool)
        torch._C._cuda_endAllocateToPool(device, pool)
        try:
            with self._use(_PoolUse(lambda: _allocating_to(device, pool), None)):
                yield
        finally:
            torch._C._cuda_releasePool(device, pool)
            self._empty_cache()

    def arena_of(self, graph: Any, pool: Any, tag: str) -> Any:
        """Returns the arena for the graph's capture; None for torch's memory."""
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
        """An arena with an open graph group cannot be paused."""
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
        """Passes torch's own streams, a fixed number, to the library, which then detects captures
        on them."""
        if self.library.mode == "preload" or "torch" not in sys.modules:
            return
        import torch

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
            # The program may first use the device inside the region.
            self.watch_torchs_streams()
            self.retire_if_unused(key)


def _explain_sharing() -> None:
    """Explains torch's IPC error: for a region's memory CUDA only reports "invalid argument"."""
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
    """Returns all torch streams of a device. Torch returns a fixed number per priority in turn;
    complete rounds keep its position."""
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
        for _ in range(len(seen) - 1):
            torch.cuda.Stream(device, priority=priority)
        handles += seen
    return handles


class TorchMemorySaver:
    """See the module. One object per process, `torch_memory_saver`; loads nothing before its first
    use."""

    def __init__(self) -> None:
        self._mode: HookMode = "preload"
        self._saver: _Saver | None = None
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
            raise ValueError(f"hook_mode {mode!r}: there are 'preload' and 'torch'")
        if self._saver is not None and mode != self._mode:
            raise RuntimeError(f"hook_mode is {self._mode!r} since the first use, and cannot become {mode!r}")
        self._mode = mode

    def _ready(self) -> _Saver:
        with self._first:
            if self._saver is None:
                self._saver = _Saver(self._mode)
            return self._saver

    @property
    def _impl(self) -> _Saver | None:
        """For programs that call the C functions: ``_impl._binary_wrapper.cdll``. None before the
        first use."""
        return self._saver

    def _ensure_initialized(self) -> None:
        """As `_impl`: opens the library."""
        self._ready()

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Makes this thread's allocations on its current device pausable, under `tag`.

        With `enable_cpu_backup` a resume restores the contents; otherwise they are lost. Regions
        nest; the inner region's settings apply. All backups use one pool of host memory, pinned if
        possible, for any `cpu_backup_backend`. Raises ValueError for an unknown backend or a
        backend without backup, NotImplementedError for `enable_disk_backup`.
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
        """``torch.cuda.graph`` with the capture's memory in a region. Needs the hook mode "preload"
        (RuntimeError).

        The graph's addresses stay valid across a pause; a replay while paused is a GPU error.
        Without backup, data computed once in the capture is lost.

        A graph of `vmmgraph.enable()` is captured into an arena with the tag, in either hook mode.
        Tensors alive after the capture keep their contents, and a replay while paused raises.
        Raises `Error` if `pool` has graphs with a different tag, RuntimeError on the MemPool route.
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
            with saver.ordinary_memory():
                yield
        finally:
            saver.c.tms_set_interesting_region(True)

    def pause(self, tag: str | None = None) -> None:
        """Pauses the memory of `tag`, or all memory, on every device, after all work of the device.
        Paused memory stays paused.

        Raises `MemorySaverError` for the first failure, after trying all devices. Failed memory
        keeps its contents, and the next call retries. Code 900: a stream is under capture, and
        nothing was paused.
        """
        saver = self._ready()
        saver.watch_torchs_streams()
        saver.seal_arenas(tag or None)
        saver.retire(tag or None)
        saver.library.check(f"pause({tag!r})", saver.c.tms_pause(tag.encode() if tag else None))

    def resume(self, tag: str | None = None) -> None:
        """Resumes the memory of `tag`, or all memory, with its contents if a backup exists. Memory
        not paused is unchanged.

        Resumes all or nothing on each device. Raises `OutOfMemory` if the device is full:
        everything stays paused, and the call can be repeated.
        """
        saver = self._ready()
        saver.library.check(f"resume({tag!r})", saver.c.tms_resume(tag.encode() if tag else None))

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
        """Not supported: raises NotImplementedError."""
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


def _loaded_shim() -> list[str]:
    """Returns the names of the loaded modules of torch_memory_saver. Raises RuntimeError if the
    package is not the shim."""
    package = sys.modules.get(_ORIGINAL)
    if package is None:
        return []
    file = getattr(package, "__file__", None)
    if file is None or os.path.realpath(file) != os.path.realpath(os.path.join(shim_path(), _ORIGINAL, "__init__.py")):
        raise RuntimeError(f"{_ORIGINAL} is loaded already, from {file}: take over before it is imported")
    return [name for name in sys.modules if name == _ORIGINAL or name.startswith(f"{_ORIGINAL}.")]


def _entries_without_shim() -> list[str]:
    entries = os.environ.get("PYTHONPATH", "")
    return [entry for entry in entries.split(os.pathsep) if entry != shim_path()] if entries else []


def take_over() -> None:
    """Makes ``import torch_memory_saver`` import a package on this module, with the original's
    submodules and the version 0.0.10: in this process, and in Python processes that inherit its
    environment from now on. A second call does nothing. `undo_take_over` is the counterpart.

    Puts `shim_path` first on ``sys.path`` and in ``PYTHONPATH``; ``LD_PRELOAD`` is unchanged, so
    the hook mode "preload" still needs `configure_subprocess`. Raises RuntimeError if the original
    is already loaded, or if an import hook finds it first. Changes the process's environment: the
    caller must serialise threads.
    """
    _loaded_shim()
    folder = shim_path()
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *_entries_without_shim()])
    importlib.invalidate_caches()
    try:
        importlib.import_module(_ORIGINAL)
        _loaded_shim()
    except BaseException:
        _remove_shim()
        raise


def _remove_shim() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != shim_path()]
    entries = _entries_without_shim()
    if entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    else:
        os.environ.pop("PYTHONPATH", None)
    importlib.invalidate_caches()


def undo_take_over() -> None:
    """Undoes `take_over`, also an inherited one: the next ``import torch_memory_saver`` imports the
    original. Objects imported before stay those of this module."""
    with contextlib.suppress(RuntimeError):
        for name in _loaded_shim():
            del sys.modules[name]
    _remove_shim()


class CuMemAllocator:
    """The interface of vLLM's ``CuMemAllocator``, on `torch_memory_saver` in either hook mode.

    Backup is chosen at allocation, not at `sleep`: tags in `discarded` (initially ``{"kv_cache"}``)
    have none. So `sleep` also keeps tags not named for offload, which costs host memory, and
    refuses to offload a tag without backup.
    """

    default_tag = _DEFAULT_TAG
    _instance: CuMemAllocator | None = None

    def __init__(self, saver: TorchMemorySaver | None = None) -> None:
        self.discarded: set[str] = {"kv_cache"}
        self._saver = saver or torch_memory_saver
        self._backup: dict[str, bool] = {}

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """Returns the process's instance."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Makes this thread's allocations pausable under `tag` (default "default")."""
        tag = self.default_tag if tag is None else tag
        backup = self._backup.setdefault(tag, tag not in self.discarded)
        with self._saver.region(tag, enable_cpu_backup=backup):
            yield

    def sleep(self, offload_tags: Collection[str] | str | None = None) -> None:
        """Pauses all tags; `wake_up` restores the contents of `offload_tags` (None: "default"). A
        second call does nothing.

        Raises ValueError, without effect, for a tag without a backup, and the errors of
        `TorchMemorySaver.pause`.
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
        """Returns the bytes of torch's segments in this saver's pools, paused or not."""
        return self._saver._ready().segment_bytes()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resumes `tags`, or all. Ignores unknown or resumed tags. Raises like
        `TorchMemorySaver.resume`; tags before the failed one are then resumed."""
        for tag in self._backup if tags is None else tags:
            if tag in self._backup:
                self._saver.resume(tag)
