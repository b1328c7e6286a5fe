"""See `torch_memory_saver`."""

from vmmgraph.memory_saver import configure_subprocess
from vmmgraph.memory_saver._library import Library

from ..utils import change_env, get_binary_path_from_package
from .base import HookUtilBase

__all__ = ["HookUtilBase", "HookUtilModePreload", "change_env", "configure_subprocess", "get_binary_path_from_package"]


class HookUtilModePreload(HookUtilBase):
    def get_path_binary(self) -> str:
        """Returns the library in LD_PRELOAD. Raises RuntimeError unless there is exactly one."""
        return Library("preload").path
