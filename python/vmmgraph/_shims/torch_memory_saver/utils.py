"""See `torch_memory_saver`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from vmmgraph.memory_saver import library_path

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]

_SUPPORTED_CUDA_MAJORS = (13, 12)
_STEMS = ("torch_memory_saver_hook_mode_preload", "torch_memory_saver_hook_mode_torch")


def _is_rocm_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(getattr(torch.version, "hip", None))


def is_xpu() -> bool:
    """Returns False: the library serves no Intel GPU."""
    return False


def _detect_cuda_major() -> int:
    """Returns the CUDA major version of torch, else of the first CUDA runtime that loads. Raises
    RuntimeError if there is none."""
    version = None
    with contextlib.suppress(ImportError, AttributeError):
        import torch

        version = torch.version.cuda
    if version and version.split(".")[0].isdigit():
        return int(version.split(".")[0])
    for major in _SUPPORTED_CUDA_MAJORS:
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"libcudart.so.{major}")
            return major
    raise RuntimeError(
        "cannot detect the CUDA major version: torch names none and no CUDA runtime "
        f"({', '.join(f'libcudart.so.{major}' for major in _SUPPORTED_CUDA_MAJORS)}) loads; install torch with CUDA"
    )


def get_binary_path_from_package(stem: str) -> Path:
    """Returns the library for LD_PRELOAD under the original's name of this stem, which ends in the
    CUDA major version. One library serves all versions: the names are copies.

    In a checkout, or with VMMGRAPH_MEMORY_SAVER_LIBRARY, returns `library_path`. Raises
    RuntimeError
    for an unknown stem or a missing file.
    """
    if stem not in _STEMS:
        raise RuntimeError(f"cannot find a library named {stem!r}: torch_memory_saver has {' and '.join(_STEMS)}")
    found = Path(library_path())
    if not os.environ.get("VMMGRAPH_MEMORY_SAVER_LIBRARY"):
        endings = [".abi3.so"]
        with contextlib.suppress(RuntimeError):
            endings.insert(0, f"_cu{_detect_cuda_major()}.abi3.so")
        copies = [Path(__file__).resolve().parents[1] / (stem + ending) for ending in endings]
        found = next((copy for copy in copies if copy.is_file()), found)
    if not found.is_file():
        raise RuntimeError(
            f"cannot find the library {found.name}: {found} does not exist; install a wheel of vmmgraph, or name the file in "
            "VMMGRAPH_MEMORY_SAVER_LIBRARY"
        )
    return found


@contextlib.contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the context."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
