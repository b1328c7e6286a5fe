"""The package ``torch_memory_saver`` of the shims, on and off the path."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from ._library import ORIGINAL, shim_path


def _loaded_shim() -> list[str]:
    """Returns the names of the loaded modules of torch_memory_saver. Raises RuntimeError if the
    package is not the shim."""
    package = sys.modules.get(ORIGINAL)
    if package is None:
        return []
    file = getattr(package, "__file__", None)
    if file is None or os.path.realpath(file) != os.path.realpath(os.path.join(shim_path(), ORIGINAL, "__init__.py")):
        raise RuntimeError(f"cannot take over {ORIGINAL}: it was imported from {file}; call take_over() before the import")
    return [name for name in sys.modules if name == ORIGINAL or name.startswith(f"{ORIGINAL}.")]


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
        importlib.import_module(ORIGINAL)
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
