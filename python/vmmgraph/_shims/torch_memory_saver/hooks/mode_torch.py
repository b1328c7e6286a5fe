"""See `torch_memory_saver`."""

from typing import Any

from vmmgraph.memory_saver._library import Library

from ..utils import get_binary_path_from_package, is_xpu
from .base import HookUtilBase

__all__ = ["HookUtilBase", "HookUtilModeTorch", "get_binary_path_from_package", "is_xpu"]


class HookUtilModeTorch(HookUtilBase):
    def __init__(self) -> None:
        import torch

        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(self.get_path_binary(), "tms_torch_malloc", "tms_torch_free")

    def get_path_binary(self) -> str:
        return Library("torch").path

    def get_allocator(self) -> Any:
        return self.allocator.allocator()
