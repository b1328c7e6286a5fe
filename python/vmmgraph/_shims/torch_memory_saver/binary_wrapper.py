"""See `torch_memory_saver`."""

from vmmgraph.memory_saver._library import BinaryWrapper
from vmmgraph.memory_saver._library import declare as _setup_function_signatures

__all__ = ["BinaryWrapper", "_setup_function_signatures"]
