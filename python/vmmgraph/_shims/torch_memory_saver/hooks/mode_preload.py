"""See `torch_memory_saver`."""

import contextlib
from collections.abc import Iterator

from vmmgraph.memory_saver._library import Library, first_in_preload

from ..utils import change_env, get_binary_path_from_package
from .base import HookUtilBase

__all__ = ["HookUtilBase", "HookUtilModePreload", "change_env", "configure_subprocess", "get_binary_path_from_package"]


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """As `vmmgraph.memory_saver.configure_subprocess`, with the path of
    `get_binary_path_from_package`."""
    with first_in_preload(str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))):
        yield


class HookUtilModePreload(HookUtilBase):
    def get_path_binary(self) -> str:
        """Returns the library in LD_PRELOAD. Raises RuntimeError unless there is exactly one."""
        return Library("preload").path
