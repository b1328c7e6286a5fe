"""A trainer and an engine in one process and on one GPU take turns for 50 steps, as verl's hybrid
engine with vLLM.

Each step: the engine's weights wake, get the trainer's, and the trainer's memory moves to the host;
the cache wakes, and captured graphs generate tokens; the engine sleeps, and the trainer learns.
Tokens must equal the trainer's own in every step. Free device memory and the process's host memory
must not change over the later 25 steps. In the stock way the engine stays awake. `mib` is the
engine's memory that stays on the device during training.
"""

from __future__ import annotations

from typing import Any

import kit
import torch

STEPS, CACHE = 50, 256 << 20


def to(model: kit.Decoder, device: str) -> None:
    """As FSDP's offload: the tensors get new memory."""
    model.weights = [weight.to(device) for weight in model.weights]
    model.embedding = model.embedding.to(device)


def body() -> dict[str, Any]:
    package = kit.drop_in()
    saver = package.torch_memory_saver
    saver.hook_mode = "torch"
    trainer = kit.Decoder()
    start = kit.settle()
    with saver.region("weights", enable_cpu_backup=False):
        engine = kit.Decoder()
    with saver.region("kv_cache"):
        cache = engine.cache(CACHE)
    inputs = engine.inputs()

    def step() -> None:
        engine.step(*inputs, cache)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    held = start - kit.settle()
    own_cache, own_inputs = trainer.cache(), trainer.inputs()
    wrong, device, host, stays = 0, [], [], 0
    for number in range(STEPS):
        saver.pause("kv_cache")
        saver.pause("weights")
        trainer.learn(number)
        want = trainer.generate(own_inputs, own_cache, lambda: trainer.step(*own_inputs, own_cache))
        device.append(kit.settle())
        stays = start - device[-1]
        host.append(kit.rss())
        saver.resume("weights")
        for mine, its in zip(engine.parameters(), trainer.parameters(), strict=True):
            mine.copy_(its)
        to(trainer, "cpu")
        kit.settle()
        saver.resume("kv_cache")
        wrong += engine.generate(inputs, cache, graph.replay) != want
        to(trainer, "cuda")

    def first_token() -> None:
        inputs[1].zero_()
        graph.replay()

    steady = kit.flat(device, 4 << 20) and kit.flat(host, 64 << 20)
    asleep = kit.WAY == "stock" or stays <= held - 0.9 * CACHE
    spread = {name: kit.mib(max(each[25:]) - min(each[25:])) for name, each in (("device", device), ("host", host))}
    detail = {"wrong": wrong, "changes_mib": spread, "engine_mib": kit.mib(held), "asleep_mib": kit.mib(stays)}
    return {
        "ok": not wrong and steady and asleep,
        "mib": kit.mib(max(stays, 0)),
        "gpu_ms": kit.gpu_ms(first_token),
        "detail": detail,
    }


if __name__ == "__main__":
    kit.run("rl_one_process", body)
