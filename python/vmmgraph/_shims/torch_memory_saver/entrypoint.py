"""See `torch_memory_saver`."""

from vmmgraph.memory_saver import CpuBackupBackend, TorchMemorySaver
from vmmgraph.memory_saver._library import DEFAULT_TAG as _TAG_DEFAULT
from vmmgraph.memory_saver._saver import Saver as _TorchMemorySaverImpl

from .binary_wrapper import BinaryWrapper
from .hooks.base import HookMode, HookUtilBase
from .utils import is_xpu

__all__ = [
    "_TAG_DEFAULT",
    "BinaryWrapper",
    "CpuBackupBackend",
    "HookMode",
    "HookUtilBase",
    "TorchMemorySaver",
    "_TorchMemorySaverImpl",
    "is_xpu",
]


def _sanity_checks() -> None:
    """Checks nothing: regions switch expandable segments off."""
