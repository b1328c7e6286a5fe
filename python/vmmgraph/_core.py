"""The core of this process: one library for all users.

Two copies would be two page pools for one device. The session, the MemPool route and the memory
saver all ask this module: a loaded library first, then the one for the installed torch, then
``libvmmgraph.so``. The memory saver's C++ part uses the same order (``cpp/memory_saver/core.cpp``).
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from . import _c, _library

_lock = threading.RLock()
_kept: _c.Library | None = None


def for_torch() -> _c.Library:
    """Returns the core with the torch part. Raises `Error` if there is none for the installed
    torch, or if a different core is loaded; OSError and AttributeError for an invalid file."""
    with _lock:
        there = _there()
        if there is not None and there.with_torch:
            return there
        path, why = _library.find()
        if path is None:
            raise _c.Error(why, _c.WRONG_STATE)
        if there is not None:
            raise _c.Error(f"{there.path} is this process's core already, and {path} would be a second one", _c.WRONG_STATE)
        # Load torch's libraries first, so they are found by name.
        import torch  # noqa: F401

        return _keep(_c.Library(path, with_torch=True))


def any_one() -> _c.Library:
    """Returns the core, with the torch part if available. Raises `Error` without any library."""
    with _lock:
        with contextlib.suppress(_c.Error, OSError, ImportError, AttributeError):
            return for_torch()
        there = _there()
        if there is not None:
            return there
        path = _library.find_core()
        if path is None:
            raise _c.Error("there is no libvmmgraph.so in the package", _c.WRONG_STATE)
        return _keep(_c.Library(path, with_torch=False))


def _keep(library: _c.Library) -> _c.Library:
    global _kept
    _kept = library
    return library


def _there() -> _c.Library | None:
    """Returns the core already in use or loaded."""
    if _kept is not None:
        return _kept
    for path in _loaded():
        # The library may work without its torch part.
        for with_torch in (True, False):
            with contextlib.suppress(_c.Error, OSError, AttributeError):
                return _keep(_c.Library(path, with_torch=with_torch))
    return None


def _loaded() -> list[Path]:
    """Returns the paths of cores loaded in this process, those with a torch part first."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(Path(parts[5]) for line in lines if len(parts := line.split(maxsplit=5)) == 6)
    cores = [path for path in paths if path.name.startswith(("libvmmgraph.so", "libvmmgraph_torch.so"))]
    return sorted(cores, key=lambda path: not path.name.startswith("libvmmgraph_torch.so"))
