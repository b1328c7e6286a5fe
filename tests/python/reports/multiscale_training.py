"""One model is trained by make_graphed_callables at several resolutions, over one pool
(roboflow/rf-detr#1490).

The issue reports 38 GiB with a pool per resolution. Here one model is graphed for eight input sizes
over one pool. Steps of random sizes run forward and backward by graphs and the optimizer eagerly.
Losses and parameters must follow an eager twin. `mib` is the memory of all graphs, and `gpu_ms` one
forward and backward of the largest size.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import kit
import torch
from torch import nn

SIDES = [40, 36, 32, 28, 24, 20, 16, 12]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        a = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int = 384, depth: int = 4) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(48, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.into(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sized(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.model(patches)


def body() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model().cuda()
    twin = copy.deepcopy(model)
    start = kit.settle()
    pool, graphed = torch.cuda.graph_pool_handle(), {}
    for side in SIDES:
        sample = torch.randn(4, side * side, 48, device="cuda")
        graphed[side] = torch.cuda.make_graphed_callables(Sized(model), (sample,), pool=pool)
    held = start - kit.settle()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, twin))
    pick, worst, losses = random.Random(13), 0.0, 0
    rng = torch.Generator("cuda").manual_seed(3)
    steps = 0
    while steps < 60 and kit.left(35) > 0:
        side = pick.choice(SIDES)
        x = torch.randn(4, side * side, 48, device="cuda", generator=rng)
        want = torch.randn(4, side * side, 16, device="cuda", generator=rng)
        values = []
        for each, update in ((graphed[side], optimizer), (twin, other)):
            update.zero_grad(set_to_none=True)
            loss = (each(x) - want).square().mean()
            loss.backward()
            update.step()
            values.append(loss.detach())
        losses += not kit.rel(values[0], values[1]) < 1e-3
        steps += 1
        if steps % 10 == 0:
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            worst = max(worst, max(kit.rel(one, same) for one, same in pairs))
    x = torch.randn(4, SIDES[0] ** 2, 48, device="cuda")
    gpu_ms = kit.gpu_ms(lambda: graphed[SIDES[0]](x).sum().backward())
    detail = {"wrong_losses": losses, "worst_parameter": worst, "steps": steps, "graphs": 2 * len(SIDES)}
    ok = not losses and worst < 1e-3 and steps >= 20
    return {"ok": ok, "mib": kit.mib(held), "gpu_ms": gpu_ms, "detail": detail}


if __name__ == "__main__":
    kit.run("multiscale_training", body)
