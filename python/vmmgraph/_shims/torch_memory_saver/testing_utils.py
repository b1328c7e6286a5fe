"""Functions of torch_memory_saver's own tests. See `torch_memory_saver`."""

from .utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    return "xpu" if is_xpu() else "cuda"


def empty_cache() -> None:
    import torch

    (torch.xpu if is_xpu() else torch.cuda).empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Returns the used bytes of a device, of all its processes, and prints these."""
    import torch

    free, total = (torch.xpu if is_xpu() else torch.cuda).mem_get_info(gpu_id)
    print(f"GPU {gpu_id} memory: {(total - free) / (1 << 30):.2f} GB ({message})")
    return total - free
