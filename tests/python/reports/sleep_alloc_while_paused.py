"""Memory of a paused region is freed, and more is allocated in the region (vllm-project/vllm#36651,
fzyzcjy/torch_memory_saver#92).

Torch caches freed memory and reuses it. Parts of a paused region have no memory, so a new tensor of
the region must not use these addresses. New tensors must be right while the region is paused and
after two more cycles. In the stock way nothing is paused.
"""

from __future__ import annotations

import gc
from typing import Any

import kit
import torch


def body() -> dict[str, Any]:
    saver, said = kit.saver(), {}

    def new(count: int, value: int) -> torch.Tensor:
        with saver.region("adapters", enable_cpu_backup=True):
            return torch.full((count,), value, device="cuda", dtype=torch.uint8)

    sizes = {"large": 64 << 20, "middle": 3 << 20, "small": 4096}
    kept = {name: new(size, 1) for name, size in sizes.items()}
    gone = {name: new(size, 2) for name, size in sizes.items()}
    torch.cuda.synchronize()
    saver.pause("adapters")
    gone.clear()
    gc.collect()
    fresh: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        try:
            fresh[name] = new(size, 3)
            torch.cuda.synchronize()
            said[name] = "right" if bool((fresh[name] == 3).all()) else "WRONG"
        except Exception as error:  # noqa: BLE001
            said[name] = f"{type(error).__name__}: {str(error)[:120]}"
            if "illegal" in str(error) or "launch failure" in str(error):
                said["device"] = "lost"
                return {"ok": False, "detail": said}
    saver.resume("adapters")
    torch.cuda.synchronize()

    def all_are(tensors: dict[str, torch.Tensor], value: int) -> bool:
        return all(bool((tensor == value).all()) for tensor in tensors.values())

    said["kept"], said["fresh after resume"] = all_are(kept, 1), all_are(fresh, 3)
    saver.pause("adapters")
    saver.resume("adapters")
    said["both after another sleep"] = all_are(kept, 1) and all_are(fresh, 3)
    ok = said["kept"] and said["fresh after resume"] and said["both after another sleep"]
    return {"ok": ok and not any(said[name] == "WRONG" for name in sizes), "detail": said}


if __name__ == "__main__":
    kit.run("sleep_alloc_while_paused", body)
