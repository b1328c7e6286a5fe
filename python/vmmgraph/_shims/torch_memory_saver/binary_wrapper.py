"""See `torch_memory_saver`."""

from vmmgraph.memory_saver import _BinaryWrapper as BinaryWrapper
from vmmgraph.memory_saver import _declare as _setup_function_signatures

__all__ = ["BinaryWrapper", "_setup_function_signatures"]
