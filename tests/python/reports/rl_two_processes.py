"""A trainer and an engine in two processes take turns on one GPU for 50 steps, as slime's colocated
training.

All memory of the trainer is pausable, by LD_PRELOAD and TMS_INIT_ENABLE. Each step: the engine
pauses, the trainer resumes, learns and pauses; the engine's weights and graphs resume; the trainer
sends its backups by torch's IPC, from memory of disable(); the engine's cache resumes, and its
graph generates tokens. Tokens must equal the trainer's own in every step. Free device memory and
both processes' host memory must not change over the later 25 steps. In the stock way nothing is
paused.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

import kit
import torch
import torch.multiprocessing as mp

STEPS, CACHE = 50, 256 << 20
#: Seconds to wait for the other side.
PATIENCE = 60


def get(pipe: Any) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"no answer within {PATIENCE} s")
    return pipe.recv()


def train(engine: Any, report: Any) -> None:
    saver = kit.drop_in().torch_memory_saver
    model = kit.Decoder()
    cache, inputs = model.cache(), model.inputs()
    saver.pause()
    for number in range(STEPS):
        get(engine)
        saver.resume()
        model.learn(number)
        tokens = model.generate(inputs, cache, lambda: model.step(*inputs, cache))
        free = kit.settle()
        saver.pause()
        report.send((tokens, kit.rss(), kit.free() - free, free))
        engine.send("asleep")
        get(engine)
        for weight in model.parameters():
            with saver.disable():
                bucket = saver.get_cpu_backup(weight, zero_copy=True).to("cuda")
                engine.send(bucket)
                get(engine)
                del bucket
                torch.cuda.ipc_collect()


def serve(trainer: Any, report: Any) -> None:
    saver = kit.drop_in().torch_memory_saver
    with saver.region("weights"):
        model = kit.Decoder()
    with saver.region("kv_cache"):
        cache = model.cache(CACHE)
    inputs = model.inputs()

    def step() -> None:
        model.step(*inputs, cache)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with saver.cuda_graph(graph, stream=stream, tag="cuda_graph"):
        step()
    for _ in range(STEPS):
        free = kit.settle()
        for tag in ("kv_cache", "weights", "cuda_graph"):
            saver.pause(tag)
        given = kit.free() - free
        trainer.send("asleep")
        get(trainer)
        saver.resume("cuda_graph")
        saver.resume("weights")
        trainer.send("awake")
        for weight in model.parameters():
            sent = get(trainer)
            weight.copy_(sent)
            torch.cuda.synchronize()
            del sent
            trainer.send("copied")
        saver.resume("kv_cache")
        report.send((model.generate(inputs, cache, graph.replay), kit.rss(), given, 0))


def worker(work: Any, other: Any, report: Any) -> None:
    try:
        work(other, report)
    except BaseException:
        report.send(traceback.format_exc()[-700:])
        raise


def started(context: Any, work: Any, other: Any) -> Any:
    mine, its = context.Pipe()
    context.Process(target=worker, args=(work, other, its), daemon=True).start()
    return mine


def both() -> tuple[Any, Any]:
    context = mp.get_context("spawn")
    trainers, engines = context.Pipe()
    with kit.drop_in().configure_subprocess():
        engine = started(context, serve, engines)
        os.environ |= {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        return started(context, train, trainers), engine


def line(pipe: Any) -> Any:
    found = get(pipe)
    if isinstance(found, str):
        raise RuntimeError(found)  # noqa: TRY004
    return found


def body() -> dict[str, Any]:
    trainer, engine = both()
    wrong, device, host, given = 0, [], [], ([], [])
    for _ in range(STEPS):
        (want, mine, trainers, free), (tokens, its, engines, _) = line(trainer), line(engine)
        wrong += tokens != want
        device.append(free)
        host.append(mine + its)
        given[0].append(trainers)
        given[1].append(engines)
    steady = kit.flat(device, 4 << 20) and kit.flat(host, 64 << 20)
    weights = 4 * kit.Decoder.LAYERS * kit.Decoder.HIDDEN**2
    asleep = kit.WAY == "stock" or (min(given[0]) >= 0.9 * weights and min(given[1]) >= 0.9 * (weights + CACHE))
    spread = {name: kit.mib(max(each[25:]) - min(each[25:])) for name, each in (("device", device), ("host", host))}
    freed = [kit.mib(min(each)) for each in given]
    return {"ok": not wrong and steady and asleep, "detail": {"wrong": wrong, "changes_mib": spread, "freed_mib": freed}}


if __name__ == "__main__":
    kit.run("rl_two_processes", body)
