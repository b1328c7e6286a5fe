"""See `torch_memory_saver`."""
