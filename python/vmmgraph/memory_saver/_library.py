"""The library of the memory saver: file, LD_PRELOAD, C functions, errors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["pinned", "mmap"]

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FILE = "libvmmgraph_memory_saver.so"
ORIGINAL = "torch_memory_saver"
DEFAULT_TAG = "default"
_OUT_OF_MEMORY = 2
#: Nothing was paused.
CAPTURING = 900


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
    return named or str(_PACKAGE / "_lib" / _FILE)


def shim_path() -> str:
    """Returns the folder of the package ``torch_memory_saver`` that `take_over` puts on the path. A
    process with this folder first in ``PYTHONPATH`` imports it without a call."""
    return str(_PACKAGE / "_shims")


def is_library(path: str) -> bool:
    """Whether the file is the library, by its own name or by one of torch_memory_saver's names."""
    folder, name = os.path.split(path)
    return name == _FILE or (name.startswith(ORIGINAL) and os.path.realpath(folder) == os.path.realpath(shim_path()))


def preloaded() -> list[str]:
    return [path for path in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if is_library(path)]


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
    with first_in_preload(path):
        yield


@contextlib.contextmanager
def first_in_preload(path: str) -> Iterator[None]:
    """Puts a library first in ``LD_PRELOAD``, in place of the saver's library."""
    before = os.environ.get("LD_PRELOAD")
    entries = [path] + [entry for entry in (before or "").split(":") if entry and not is_library(entry)]
    try:
        os.environ["LD_PRELOAD"] = ":".join(entries)
        yield
    finally:
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before


def check_region(tag: str, backup: bool, disk: bool, backend: str | None) -> None:
    if not isinstance(tag, str) or "\0" in tag or not tag:
        raise ValueError(f"tag {tag!r}: a text that is not empty and has no zero byte is meant")
    if backup and disk:
        raise ValueError("enable_cpu_backup and enable_disk_backup: a region has one backup")
    if backend is None:
        return
    if not backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if backend not in ("pinned", "mmap"):
        raise ValueError(f"cpu_backup_backend {backend!r}: there are 'pinned' and 'mmap'")


def declare(c: Any) -> None:
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


class BinaryWrapper:
    """torch_memory_saver's wrapper of the library. Programs call C functions by its `cdll`."""

    def __init__(self, path_binary: str) -> None:
        self.cdll = ctypes.CDLL(path_binary)
        declare(self.cdll)

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Sets all settings of the calling thread."""
        check_region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())


class Library:
    """The library in a hook mode."""

    def __init__(self, mode: HookMode) -> None:
        found = preloaded()
        if mode == "preload":
            if len(found) != 1:
                raise RuntimeError(
                    f"cannot use hook mode 'preload': {len(found)} entries of LD_PRELOAD are {_FILE}; start the process inside "
                    "vmmgraph.memory_saver.configure_subprocess(), or set torch_memory_saver.hook_mode = 'torch' before its first use "
                    f"(LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r}, process {os.getpid()})"
                )
            self.path = found[0]
        elif mode == "torch":
            # A preloaded library may be a copy of the package's, which would be a second saver.
            self.path = found[0] if found else library_path()
        else:
            raise ValueError(f"cannot use hook mode {mode!r}: no such mode; set 'preload' or 'torch'")
        self.binary_wrapper = BinaryWrapper(self.path)
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
