"""See `torch_memory_saver`."""

from __future__ import annotations

from abc import ABC
from typing import Any

from vmmgraph.memory_saver import HookMode

__all__ = ["HookMode", "HookUtilBase"]


class HookUtilBase(ABC):
    """A hook mode: its library, and the allocator of its pools (None: torch's own)."""

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """Returns the hook of a mode. Raises ValueError for an unknown mode."""
        if hook_mode == "preload":
            from .mode_preload import HookUtilModePreload

            return HookUtilModePreload()
        if hook_mode == "torch":
            from .mode_torch import HookUtilModeTorch

            return HookUtilModeTorch()
        raise ValueError(f"cannot use hook mode {hook_mode!r}: no such mode; set 'preload' or 'torch'")

    def get_path_binary(self) -> str:
        raise NotImplementedError

    def get_allocator(self) -> Any:
        return None
