"""The core of this process: one library, whoever asks first.

Two copies would be two page pools for one device, and arenas of one mean nothing to the other. So the door, the MemPool route and the memory
saver all ask here, and which library it is does not depend on who comes first: one that the process has loaded already, else that for the
torch at hand, else ``libvmmgraph.so``. The memory saver's C++ half looks in the same order (``cpp/memory_saver/core.cpp``).
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from . import _c, _library

_lock = threading.RLock()
_kept: _c.Library | None = None


def for_torch() -> _c.Library:
    """The core with the part for torch. Raises `Error` where there is none for the torch at hand, or the process has another core; OSError
    and AttributeError for a file that is no such library."""
    with _lock:
        there = _there()
        if there is not None and there.with_torch:
            return there
        path, why = _library.find()
        if path is None:
            raise _c.Error(why, _c.WRONG_STATE)
        if there is not None:
            raise _c.Error(f"{there.path} is this process's core already, and {path} would be a second one", _c.WRONG_STATE)
        # Torch's libraries first, so that they are found by name.
        import torch  # noqa: F401

        return _keep(_c.Library(path, with_torch=True))


def any_one() -> _c.Library:
    """The core, with the part for torch if that can be had. Raises `Error` where there is no library at all, and as `for_torch`."""
    with _lock:
        # No torch, or a stand-in of one, is no reason to have no core.
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
    """The core that was given out before, or that somebody else has loaded: a C++ engine, the memory saver."""
    if _kept is not None:
        return _kept
    for path in _loaded():
        # One that is loaded and refused here may still serve without its part for torch.
        for with_torch in (True, False):
            with contextlib.suppress(_c.Error, OSError, AttributeError):
                return _keep(_c.Library(path, with_torch=with_torch))
    return None


def _loaded() -> list[Path]:
    """The files of cores in this process, those with a part for torch first."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(Path(parts[5]) for line in lines if len(parts := line.split(maxsplit=5)) == 6)
    cores = [path for path in paths if path.name.startswith(("libvmmgraph.so", "libvmmgraph_torch.so"))]
    return sorted(cores, key=lambda path: not path.name.startswith("libvmmgraph_torch.so"))
