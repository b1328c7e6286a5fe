#!/usr/bin/env python3
"""vllm_run.py MODEL [--mode full|piecewise|default|breakable] [--requests 300]: measures unmodified
vLLM, with VmmGraph if VMMGRAPH=1 is set.

MODEL is a folder with a config.json. Weights are random, and scaled so that every token depends on
attention and the KV cache. Prints RESULT lines. Tokens: their number and a hash, equal with and
without VmmGraph. Capture: its memory by free bytes. Speed: tokens a second (median of later rounds
of the same requests), and the time per token of 1, 8 and 64 sequences. Arenas: their memory on each
rank, and the peak shape's need. With VMMGRAPH=1 vLLM finds the plugin by its entry point; this
script writes the metadata of an installation. Needs a GPU and vllm; prints SKIPPED otherwise.

--then names operations between further rounds, which must give the tokens of the first round.
`evict` drops every second graph and captures again. `recapture` drops all graphs but the first
(torch cannot capture into a pool after all its graphs are gone). `sleep` puts the engine to sleep
and wakes it by tags (vLLM's own allocator, or regions with VMMGRAPH_SLEEP=1), then 20 times at
once.

VLLM_RUN_UNNAMED=1 captures without labels: each segment of a breakable graph is then its own group.

--compare runs the script for every mode, with and without VmmGraph, and prints a table and the
failures.

--kv measures the size of the KV cache with vLLM's defaults (no memory flag, no length), and adds
VMMGRAPH_KV=1 to VMMGRAPH=1. Further RESULT lines: tokens of the KV cache, seconds from the start of
the process to the first token, and free memory at the end. --size gives MODEL's config.json another
shape: 8b is Qwen3-8B, 6b has 28 of its layers, moe has 32 experts. --then pressure allocates the
free memory of the device between two steps, serves, frees the memory and serves again. --then mixed
serves bursts of short and long prompts with aborts, and takes and frees memory meanwhile.

--lora, --ngram, --prefix-caching and --length 32768 run a feature: eight adapters with random
weights, drafts from the prompts, shared prefixes, and vLLM's max_model_len. --attention FLASH_ATTN
runs another attention backend than Triton's. --after FILE imports vLLM and waits for FILE, so that
the imports of an engine overlap with the engine before.

--behind adds VMMGRAPH_CAPTURE=behind to VMMGRAPH=1. Further RESULT lines, also of stock: seconds
from the loaded weights to the first request, and of them in warm-up and captures; time of engine
steps while graphs are missing, and after; steps run by graphs. The tokens after the last capture
must be equal. Tokens before may differ: eager steps and larger graphs round other bits.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine_run import MIB, can_run, digest, install_entry_points, ms_a_token, widen

MODES = {
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {"mode": 3, "cudagraph_mode": "PIECEWISE"},
    "default": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "breakable": {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"},
}
#: Entry points of vLLM's general plugins, loaded by every vLLM process: the package's, and
#: measure() of this script.
PLUGINS = {"vmmgraph": "vmmgraph.plugins.vllm:enable", "vllm_run_measure": "vllm_run:measure"}
THEN = ("evict", "recapture", "sleep", "mixed", "pressure")
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
SIZES = {
    "8b": QWEN3_8B,
    "6b": {**QWEN3_8B, "num_hidden_layers": 28},
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
ADAPTERS = 8
RANK = 16
#: Start of this process, used unless VLLM_RUN_STARTED has the start time.
began = time.time()


def measure() -> None:
    """vLLM plugin: records the memory of this process's captures, for both model runners."""
    import importlib

    import torch

    def patch(runner: type) -> None:
        capture, load = runner.capture_model, runner.load_model

        def loaded(self, *args, **kwargs):
            result = load(self, *args, **kwargs)
            widen(self.model)
            return result

        def measured(self, *args, **kwargs):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before, start = torch.cuda.mem_get_info()[0], time.perf_counter()
            if os.environ.get("VLLM_RUN_UNNAMED"):
                forget_names()
            try:
                return capture(self, *args, **kwargs)
            finally:
                torch.cuda.synchronize()
                worker.seconds["captures"] = time.perf_counter() - start
                # vLLM 0.33 captures some graphs before, to estimate their memory.
                if not kwargs.get("profile_only"):
                    runner.capture_seconds.append(time.perf_counter() - start)
                    runner.taken.append(before - torch.cuda.mem_get_info()[0])

        runner.taken, runner.capture_seconds = [], []
        runner.capture_model, runner.load_model = measured, loaded

    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    if not hasattr(worker, "seconds"):
        time_start(worker)
    for name in ("gpu_model_runner", "gpu.model_runner"):
        try:
            runner = importlib.import_module(f"vllm.v1.worker.{name}").GPUModelRunner
        except ImportError:
            continue
        if not hasattr(runner, "taken"):
            patch(runner)


def forget_names() -> None:
    """Captures get no labels from here on: each segment of a breakable graph is its own group."""
    from vmmgraph import _session

    _session.need().label_providers.clear()


def time_start(worker: type) -> None:
    """Records the time of the loaded weights, and the seconds of warm-up and captures."""
    load, warm_up = worker.load_model, worker.compile_or_warm_up_model

    def loaded(self, *args, **kwargs):
        result = load(self, *args, **kwargs)
        worker.seconds["loaded_at"] = time.time()
        return result

    def warmed(self, *args, **kwargs):
        start = time.perf_counter()
        result = warm_up(self, *args, **kwargs)
        worker.seconds["warm_up"] = time.perf_counter() - start
        return result

    worker.seconds, worker.load_model, worker.compile_or_warm_up_model = {}, loaded, warmed


def start_seconds(worker) -> dict:
    # The executor passes a wrapper of the worker.
    return dict(worker.seconds)


def missing_graphs(worker) -> tuple[int, int, int]:
    """Returns the missing graphs behind the traffic, and the steps run by graphs and eagerly."""
    behind = getattr(worker.model_runner, "_vmmgraph_behind", None)
    queue = getattr(behind, "queue", None)
    if queue is None:
        return 0, 0, 0
    wanted = sum(1 for one in queue.missing() if queue.steps[one])
    return wanted, queue.by_graph, queue.eager


def time_units(worker) -> None:
    """Records the milliseconds of each unit of captures between steps."""
    behind = getattr(worker.model_runner, "_vmmgraph_behind", None)
    if behind is None:
        return
    unit, behind.units = behind.unit, []

    def timed(*args, **kwargs):
        spent = unit(*args, **kwargs)
        if spent is not None:
            behind.units.append(spent)
        return spent

    behind.unit = timed


def units(worker) -> list[float]:
    return list(getattr(getattr(worker.model_runner, "_vmmgraph_behind", None), "units", ()))


def time_steps(llm) -> list[float]:
    """Returns a list which receives the milliseconds of each further engine step."""
    core = llm.llm_engine.engine_core.engine_core
    step, took = core.step_fn, []

    def timed():
        start = time.perf_counter()
        result = step()
        took.append(1e3 * (time.perf_counter() - start))
        return result

    core.step_fn = timed
    return took


def behind_rows(mode: str, llm, serve, ready: float) -> tuple[list[str], str]:
    """Serves until no used graph is missing, then once more. Returns RESULT lines and the hash."""
    seconds = llm.collective_rpc(start_seconds)[0]
    lines = [
        f"RESULT {mode} ready_after_weights_s {ready - seconds['loaded_at']:.2f}",
        f"RESULT {mode} warm_up_and_captures_s {seconds['warm_up']:.2f}",
    ]
    took = time_steps(llm)
    llm.collective_rpc(time_units)
    start, rounds, late = time.time(), 0, (0, 0)
    while rounds < 2 or (llm.collective_rpc(missing_graphs)[0][0] and time.time() - start < 20):
        serve()
        rounds += 1
        _, graphs, eager = llm.collective_rpc(missing_graphs)[0]
        if time.time() - start < 10:
            late = (graphs, eager)
    captured = time.time() - start
    during, took[:] = list(took), []
    hashed = ""
    while time.time() - start < 14 or not hashed:
        hashed = serve()[1]
    _, graphs, eager = llm.collective_rpc(missing_graphs)[0]
    graphs, eager = graphs - late[0], eager - late[1]
    for name, steps in (("while_capturing", during), ("after", took)):
        steps = sorted(steps)
        lines.append(
            f"RESULT {mode} steps_{name}_ms median {statistics.median(steps):.2f} p99 {steps[int(0.99 * len(steps))]:.2f} "
            f"longest {steps[-1]:.2f} of {len(steps)}"
        )
    each = sorted(llm.collective_rpc(units)[0])
    if each:
        lines.append(
            f"RESULT {mode} units_ms sum {sum(each):.0f} median {statistics.median(each):.1f} longest {each[-1]:.1f} of {len(each)}"
        )
    lines.append(f"RESULT {mode} captured_after_s {captured:.1f} rounds {rounds}")
    if graphs + eager:
        lines.append(f"RESULT {mode} by_graphs_after_10_s {graphs / (graphs + eager):.4f}")
    return [*lines, f"RESULT {mode} last_hash {hashed}"], hashed


def time_a_token(llm, sequences: int, rounds: int) -> float:
    """Returns the milliseconds of a decode step."""
    from vllm import SamplingParams

    pick = random.Random(sequences)
    prompts = [{"prompt_token_ids": [pick.randrange(10, 150000) for _ in range(32)]} for _ in range(sequences)]

    def seconds(count: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    return ms_a_token(seconds, rounds)


def model_of_size(model: str, size: str) -> str:
    """Returns a folder with the model's config.json in the shape of ``size``."""
    import json

    config = json.loads((Path(model) / "config.json").read_text())
    folder = Path(tempfile.gettempdir()) / f"vllm_run_{size}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **SIZES[size]}))
    return str(folder)


def adapters(model: str) -> list:
    """Returns requests for ADAPTERS adapters with random weights, written once for a model."""
    import json

    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    config = json.loads((Path(model) / "config.json").read_text())
    hidden, size = config["hidden_size"], config["head_dim"]
    query, key, inner = config["num_attention_heads"] * size, config["num_key_value_heads"] * size, config["intermediate_size"]
    linears = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    requests = []
    for number in range(1, ADAPTERS + 1):
        folder = Path(tempfile.gettempdir()) / f"vllm_run_adapters_{hidden}_{config['num_hidden_layers']}" / str(number)
        if not (folder / "adapter_config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            generator, tensors = torch.Generator().manual_seed(number), {}
            for layer in range(config["num_hidden_layers"]):
                for name, (inputs, outputs) in linears.items():
                    at = f"base_model.model.model.layers.{layer}.{name}"
                    a, b = torch.empty(RANK, inputs), torch.empty(outputs, RANK)
                    tensors[f"{at}.lora_A.weight"] = a.normal_(0.0, inputs**-0.5, generator=generator).bfloat16()
                    tensors[f"{at}.lora_B.weight"] = b.normal_(0.0, 0.25 * RANK**-0.5, generator=generator).bfloat16()
            save_file(tensors, folder / "adapter_model.safetensors")
            modules = [name.split(".")[1] for name in linears]
            said = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
            (folder / "adapter_config.json").write_text(json.dumps(said))
        requests.append(LoRARequest(f"adapter {number}", number, str(folder)))
    return requests


def use_last_block(worker, blocks: int) -> str:
    """Writes and reads the last block of every KV tensor. Returns the error, or an empty string."""
    import torch

    for number, tensor in enumerate(worker.model_runner.kv_caches):
        block = tensor[blocks - 1]
        before = block.clone()
        if before.float().abs().sum().item() != 0:
            return f"the last block of KV tensor {number} is not zero"
        block.fill_(1)
        torch.cuda.synchronize()
        if block.float().sum().item() != block.numel():
            return f"the last block of KV tensor {number} does not keep what is written"
        block.copy_(before)
    return ""


#: Memory left free by `pressure`: less than an eager step needs.
LEFT_FREE = 64 << 20


def take_memory(worker) -> int:
    """Allocates all free memory but LEFT_FREE. Returns the allocated bytes."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    size = torch.cuda.mem_get_info()[0] - LEFT_FREE
    worker._vllm_run_taken = torch.empty(size, dtype=torch.int8, device="cuda")
    return size


def return_memory(worker) -> None:
    """Frees the tensor of `take_memory`. Torch caches the memory for other tensors."""
    del worker._vllm_run_taken


def kv_bytes(worker) -> int:
    """Returns the bytes of the KV cache; 0 if vLLM allocated the cache."""
    kv = getattr(worker, "_vmmgraph_kv", None)
    return kv.held() if kv else 0


def pressure(llm, serve, hashes) -> tuple[list[str], str]:
    """Serves with too little memory for eager steps, then with enough memory again.

    Returns result lines, and the error or an empty string.
    """
    before = llm.collective_rpc(kv_bytes)[0]
    taken = llm.collective_rpc(take_memory)[0]
    seen = [serve()[1]]
    under = llm.collective_rpc(kv_bytes)[0]
    llm.collective_rpc(return_memory)
    after, rounds = under, 0
    while after < before and rounds < 12:
        seen.append(serve()[1])
        after, rounds = llm.collective_rpc(kv_bytes)[0], rounds + 1
    said = [
        f"{taken / MIB:.0f} MiB taken",
        f"KV cache {before / MIB:.0f} -> {under / MIB:.0f} -> {after / MIB:.0f} MiB, {rounds} rounds after the return",
    ]
    wrong = "" if set(seen) <= set(hashes) else "under pressure the tokens are others"
    if not wrong and not under < before:
        wrong = "the KV cache did not shrink under pressure"
    if not wrong and after < before:
        wrong = f"{(before - after) / MIB:.0f} MiB of the KV cache did not come back"
    return said, wrong


def mixed(llm, seconds: float) -> tuple[list[str], str]:
    """Serves bursts of prompts and aborts some. Returns result lines, and the error or an empty
    string.

    Up to 0.4 of the time, a quarter of the prompts has up to the maximum length, so that requests
    wait for blocks. Sampling begins at 0.2, log-probabilities of prompts at 0.5. From 0.6 on, once
    half the cache is free, the free memory of the device is taken until the end. All requests must
    end.
    """
    from vllm import SamplingParams

    engine, pick = llm.llm_engine, random.Random(7)
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    longest = engine.vllm_config.model_config.max_model_len - 300
    greedy = {"temperature": 0.0}
    sampled = ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "logprobs": 5}, greedy)
    running: set[str] = set()
    counts = dict.fromkeys(("sent", "aborted", "ended", "ended early", "prompt tokens"), 0)
    taken, fullest, took = 0, 0.0, []
    least = llm.collective_rpc(kv_bytes)[0]
    start = time.time()
    while (now := time.time() - start) < seconds or running:
        if now < seconds and len(running) < 250 and pick.random() < 0.2:
            for _ in range(pick.choice((1, 4, 16, 64))):
                low, high = (
                    (4, 512)
                    if now > 0.4 * seconds
                    else pick.choice(((4, 512), (4, 512), (512, longest // 4), (longest // 4, longest)))
                )
                how = greedy if now < 0.2 * seconds else pick.choice(sampled)
                if now > 0.5 * seconds and pick.random() < 0.1:
                    how = {"temperature": 0.0, "prompt_logprobs": 1}
                prompt = [pick.randrange(10, 150000)] * pick.randrange(low, high)
                name = f"mixed-{counts['sent']}"
                params = SamplingParams(max_tokens=pick.randrange(8, 256), ignore_eos=True, detokenize=False, **how)
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
                running.add(name)
                counts["sent"] += 1
                counts["prompt tokens"] += len(prompt)
        if running and pick.random() < 0.02:
            gone = [one for one in sorted(running) if pick.random() < 0.1]
            engine.abort_request(gone)
            running.difference_update(gone)
            counts["aborted"] += len(gone)
        if not taken and 0.6 * seconds < now < seconds and manager.usage < 0.5:
            taken = llm.collective_rpc(take_memory)[0]
        before = time.perf_counter()
        try:
            outputs = engine.step()
        except Exception as error:  # noqa: BLE001 - counted
            return [f"{counts}, failed after {now:.1f} s"], f"a step failed: {type(error).__name__}: {str(error)[:300]}"
        took.append(time.perf_counter() - before)
        for one in outputs:
            if one.finished and one.request_id in running:
                running.discard(one.request_id)
                counts["ended"] += 1
                counts["ended early"] += one.outputs[0].finish_reason != "length"
        if len(took) % 50 == 0:
            least, fullest = min(least, llm.collective_rpc(kv_bytes)[0]), max(fullest, manager.usage)
        if now > seconds + 30:
            return [str(counts)], f"{len(running)} requests have not ended"
    if taken:
        llm.collective_rpc(return_memory)
    free, held, peak = llm.collective_rpc(torch_memory)[0]
    lines = [
        f"{counts} in {time.time() - start:.1f} s",
        f"{len(took)} steps, the longest {max(took):.2f} s",
        f"cache at most {100 * fullest:.0f} % full",
        f"{taken / MIB:.0f} MiB taken",
        f"KV cache {llm.collective_rpc(kv_bytes)[0] / MIB:.0f} MiB, at least {least / MIB:.0f}",
        f"free {free / MIB:.0f} MiB, torch holds {held / MIB:.0f}, at most {peak / MIB:.0f}",
    ]
    return lines, f"{counts['ended early']} requests ended early" if counts["ended early"] else ""


def torch_memory(worker) -> tuple[int, int, int]:
    import torch

    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()


def ledger(worker) -> list[str]:
    """Returns the ledgers of the process, as in vmmgraph.report()."""
    import sys

    module = sys.modules.get("vmmgraph._ledger")
    return [] if module is None else [line for one in module.ledgers() for line in one.table().splitlines()]


def look(worker) -> dict:
    import sys

    import torch

    vmmgraph = sys.modules.get("vmmgraph")
    on = vmmgraph is not None and bool(vmmgraph.status())
    torch.cuda.synchronize()
    pooled = [one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    return {
        "on": on,
        "pooled": sum(pooled),
        "taken": list(getattr(type(worker.model_runner), "taken", [])),
        "capture_seconds": list(getattr(type(worker.model_runner), "capture_seconds", [])),
        "free": torch.cuda.mem_get_info()[0],
        "arenas": [(arena.stats(), arena.executables()) for arena in vmmgraph.arenas()] if on else [],
        "named": sum(bool(group["label"]) for arena in vmmgraph.arenas() for group in arena.spaces()) if on else 0,
    }


def drop_and_capture(worker, each: int) -> tuple[list[int], float]:
    """Drops every `each`-th graph except the first and captures again.

    Returns free bytes before, between and after, and the seconds of the captures, whose kernels
    are compiled already.
    """
    import gc
    import time

    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    runner = worker.model_runner
    # The newer runner owns its full graphs, and captures each listed descriptor once.
    manager = getattr(runner, "cudagraph_manager", None)
    seen = [free()]
    kept = [wrapper.concrete_cudagraph_entries for wrapper in list(CUDAGraphWrapper._all_instances)]
    for graphs in kept + ([manager.graphs] if manager else []):
        for descriptor in list(graphs)[1::each]:
            del graphs[descriptor]
    seen.append(free())
    if manager:
        listed = manager._capture_descs
        manager._capture_descs = {mode: [one for one in listed[mode] if one not in manager.graphs] for mode in listed}
    start = time.perf_counter()
    try:
        runner.capture_model()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    finally:
        if manager:
            manager._capture_descs = listed
    seen.append(free())
    return seen, seconds


def free_bytes(worker) -> int:
    import torch

    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def used_bytes(worker) -> int:
    import torch

    return torch.cuda.mem_get_info()[1] - free_bytes(worker)


def host_bytes(worker) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sleep_and_wake(llm, cycles: int = 20) -> list[str]:
    """Returns time and memory of sleep and of each wake-up, then of whole cycles with one token."""
    from vllm import SamplingParams

    one_token = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    said = []
    before = sum(llm.collective_rpc(free_bytes))
    for name, act in (
        ("sleep", lambda: llm.sleep(level=1)),
        ("wake weights", lambda: llm.wake_up(tags=["weights"])),
        ("wake kv_cache", lambda: llm.wake_up(tags=["kv_cache"])),
    ):
        start = time.perf_counter()
        act()
        seconds = time.perf_counter() - start
        after = sum(llm.collective_rpc(free_bytes))
        said.append(f"{name}: {seconds:.3f} s, {(after - before) / MIB:+.0f} MiB free")
        before = after
    asleep, host, seconds = [], [], []
    for _ in range(cycles):
        llm.sleep(level=1)
        asleep.append(llm.collective_rpc(used_bytes)[0])
        start = time.perf_counter()
        llm.wake_up()
        llm.generate({"prompt_token_ids": list(range(10, 42))}, one_token, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        host.append(llm.collective_rpc(host_bytes)[0])
    said.append(f"{cycles} cycles: {statistics.median(seconds):.3f} s from the wake-up to a token, {max(seconds):.3f} at most")
    said.append(
        f"asleep {asleep[-1] / MIB:.0f} MiB used on the device, {(asleep[-1] - asleep[0]) / MIB:+.0f} since the first cycle"
    )
    said.append(f"host memory {(host[-1] - host[0]) / MIB:+.0f} MiB since the first cycle")
    return said


def run(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # torch's symmetric memory uses multicast objects, unsupported on some machines.
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    if arguments.mode == "breakable":
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    install_entry_points("vllm.general_plugins", PLUGINS)
    from vllm import LLM, SamplingParams

    measure()
    model = model_of_size(arguments.model, arguments.size) if arguments.size else arguments.model
    features: dict = {"max_model_len": arguments.length} if arguments.length else {}
    if arguments.blocks:
        features["num_gpu_blocks_override"] = arguments.blocks
    loras: list = [None]
    if arguments.lora:
        loras += adapters(model)
        features |= {"enable_lora": True, "max_loras": ADAPTERS, "max_cpu_loras": ADAPTERS, "max_lora_rank": RANK}
    if arguments.ngram:
        features["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    started = float(os.environ.get("VLLM_RUN_STARTED") or began)
    if arguments.after:
        from vllm.engine.arg_utils import EngineArgs

        # Looks at the model's class in a process of its own, the first time.
        EngineArgs(model=model, skip_tokenizer_init=True).create_model_config()
        while not os.path.exists(arguments.after):
            time.sleep(0.02)
        started = time.time()
        limit = min(arguments.limit, arguments.until - started)
        if limit < 10:
            sys.exit("WRONG  no time is left")
        if limit != float("inf"):
            faulthandler.dump_traceback_later(limit, exit=True)
        print(f"RESULT {arguments.mode} waited_s {started - began:.1f}", flush=True)

    then = [name for name in arguments.then.split(",") if name]
    memory: dict = {} if arguments.kv else {"max_model_len": 4096, "kv_cache_memory_bytes": 16 << 30}
    if arguments.utilization:
        memory["gpu_memory_utilization"] = arguments.utilization
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        attention_config={"backend": arguments.attention},
        enable_prefix_caching=arguments.prefix_caching,
        **{**memory, **features},
        tensor_parallel_size=arguments.ranks,
        disable_custom_all_reduce=arguments.no_custom_all_reduce,
        enable_sleep_mode="sleep" in then,
        compilation_config=MODES[arguments.mode],
    )
    mode = arguments.mode
    wrong = ""
    ready = time.time()
    llm.generate(
        {"prompt_token_ids": list(range(10, 42))}, SamplingParams(temperature=0.0, max_tokens=1, detokenize=False), use_tqdm=False
    )
    first_token = time.time() - started
    print(f"RESULT {mode} captures_s {llm.collective_rpc(start_seconds)[0].get('captures', 0):.3f}")
    if arguments.kv:
        cache = llm.llm_engine.vllm_config.cache_config
        print(f"RESULT {mode} kv_tokens {cache.kv_cache_size_tokens}")
        print(f"RESULT {mode} kv_blocks {cache.num_gpu_blocks}")
        print(f"RESULT {mode} first_token_s {first_token:.2f}")
        wrong = next((said for said in llm.collective_rpc(use_last_block, args=(cache.num_gpu_blocks,)) if said), "")
    pick = random.Random(11)
    prompts = [
        {"prompt_token_ids": [pick.randrange(10, 150000) for _ in range(pick.randrange(4, 512))]}
        for _ in range(arguments.requests)
    ]
    if arguments.prefix_caching:
        prefix = [pick.randrange(10, 150000) for _ in range(512)]
        for prompt in prompts[::2]:
            prompt["prompt_token_ids"][:0] = prefix
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=pick.randrange(16, 112), ignore_eos=True, detokenize=False) for _ in prompts
    ]

    time.sleep(arguments.idle)
    adapted = [loras[number % len(loras)] for number in range(len(prompts))]

    def serve() -> tuple[float, str, int]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapted if arguments.lora else None)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return seconds, digest(tokens), sum(map(len, tokens))

    if arguments.behind:
        lines, _ = behind_rows(mode, llm, serve, ready)
        print(*lines, sep="\n")
    seconds, hashes, counts = zip(*(serve() for _ in range(arguments.rounds)), strict=True)
    count = counts[0]
    seen = llm.collective_rpc(look)
    print(f"RESULT {mode} tokens {count} hash {hashes[0]} again {' '.join(sorted(set(hashes[1:])))}")
    print(f"RESULT {mode} capture_mib {sum(seen[0]['taken']) / MIB:.1f}")
    print(f"RESULT {mode} capture_s {sum(seen[0]['capture_seconds']):.2f}")
    print(f"RESULT {mode} torch_pools_mib {seen[0]['pooled'] / MIB:.1f}")
    # A round takes about a second. The first is a warm-up.
    print(f"RESULT {mode} rounds {' '.join(f'{count / one:.0f}' for one in seconds)}")
    print(f"RESULT {mode} tokens_per_second {count / statistics.median(seconds[1:]):.0f}")
    for sequences in (1, 8, 64) if arguments.timed else ():
        print(f"RESULT {mode} ms_a_token_{sequences} {time_a_token(llm, sequences, arguments.timed):.4f}")
    print(f"RESULT {mode} free_after_mib {llm.collective_rpc(free_bytes)[0] / MIB:.0f}")
    for rank, one in enumerate(seen):
        if bool(os.environ.get("VMMGRAPH")) != one["on"]:
            wrong = f"VMMGRAPH is {os.environ.get('VMMGRAPH')!r}, and rank {rank} has it {'on' if one['on'] else 'off'}"
        for stats, executables in one["arenas"]:
            ratio = stats["physical_bytes"] / max(stats["high_water_bytes"], 1)
            print(
                f"RESULT {mode} arena_mib {stats['physical_bytes'] / MIB:.1f} floor_mib {stats['high_water_bytes'] / MIB:.1f} "
                f"ratio {ratio:.3f} shapes {stats['spaces']} named {one['named']} retained_mib {stats['retained_bytes'] / MIB:.1f} rank {rank}"
            )
            print("RESULT", mode, "executables", {name: executables[name] for name in executables if name != "nodes"})
    for name in then:
        if name == "sleep":
            said = sleep_and_wake(llm)
        elif name == "mixed":
            said, failed = mixed(llm, arguments.seconds)
            print(f"RESULT {mode} mixed failed {failed or 'nothing'}:", "; ".join(said), flush=True)
            wrong = wrong or failed
            if failed:
                break
        elif name == "pressure":
            said, failed = pressure(llm, serve, hashes)
            wrong = wrong or failed
        else:
            free, seconds = llm.collective_rpc(drop_and_capture, args=(2 if name == "evict" else 1,))[0]
            said = [f"{(free[1] - free[0]) / MIB:+.0f} MiB free without, {(free[2] - free[1]) / MIB:+.0f} with, {seconds:.2f} s"]
            for stats, _ in llm.collective_rpc(look)[0]["arenas"]:
                said.append(f"arena {stats['physical_bytes'] / MIB:.1f} MiB of {stats['spaces']} shapes")
        _, now, _ = serve()
        print(f"RESULT {mode} then_{name} hash {now}:", "; ".join(said))
        if now not in hashes:
            wrong = f"after {name} the tokens are others"
    if arguments.kv:
        for rank, lines in enumerate(llm.collective_rpc(ledger)):
            for line in lines:
                print(f"LEDGER {rank} {line}")
    if wrong:
        sys.exit(f"WRONG  {wrong}")


def compare(arguments: argparse.Namespace) -> int:
    """Runs every mode in turn with and without VmmGraph. Returns the exit status."""
    wrong = 0
    for mode in arguments.modes.split(","):
        seen: dict[str, list[dict[str, str]]] = {"": [], "1": []}
        for on in ("", "1") * arguments.turns:
            command = [sys.executable, __file__, arguments.model, "--mode", mode, "--requests", str(arguments.requests)]
            # Without VMMGRAPH_KV nothing gives memory back under pressure.
            then = ",".join(name for name in arguments.then.split(",") if on or name != "pressure")
            command += ["--rounds", str(arguments.rounds), "--ranks", str(arguments.ranks), "--then", then]
            command += ["--no-custom-all-reduce"] * arguments.no_custom_all_reduce
            command += ["--behind"] * arguments.behind + ["--lora"] * arguments.lora + ["--ngram"] * arguments.ngram
            command += ["--prefix-caching"] * arguments.prefix_caching
            command += ["--length", str(arguments.length)] if arguments.length else []
            command += ["--kv"] * arguments.kv + ["--timed", str(arguments.timed), "--attention", arguments.attention]
            command += ["--size", arguments.size] if arguments.size else []
            command += ["--utilization", str(arguments.utilization)] if arguments.utilization else []
            start = time.monotonic()
            child = subprocess.run(
                command,
                env={
                    **os.environ,
                    "VMMGRAPH": on,
                    "VMMGRAPH_KV": on if arguments.kv else "",
                    "VMMGRAPH_CAPTURE": "behind" if on and arguments.behind else "",
                    "VLLM_RUN_STARTED": str(time.time()),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            lines = [
                line
                for line in child.stdout.splitlines()
                if line.startswith(("RESULT", "LEDGER"))
                or "vmmgraph" in line
                or "Graph capturing" in line
                or "KV cache size" in line
            ]
            took = f"{time.monotonic() - start:.0f} s"
            print(f"--- {mode}, VMMGRAPH={on or 'off'}: exit {child.returncode}, {took}", *lines, sep="\n", flush=True)
            if child.returncode:
                print(child.stdout[-6000:])
                return 1
            seen[on].append({line.split()[2]: line for line in lines if line.startswith("RESULT")})

        def median(name: str, on: str, seen: dict[str, list[dict[str, str]]] = seen) -> float:
            return statistics.median(float(one[name].split()[-1]) for one in seen[on])

        same = len({tuple(one["tokens"].split()[2:]) for way in seen.values() for one in way}) == 1
        wrong += not same
        ratios = {name: median(name, "1") / median(name, "") for name in seen[""][0] if name.startswith(("ms_", "tokens_per"))}
        print(
            f"{'ok    ' if same else 'WRONG '} {mode}: tokens {'equal' if same else 'differ'}, "
            f"capture {median('capture_mib', ''):.0f} -> {median('capture_mib', '1'):.0f} MiB, "
            f"{median('capture_s', ''):.1f} -> {median('capture_s', '1'):.1f} s, ours / stock: "
            + ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items()),
            flush=True,
        )
        if arguments.behind:
            rows = ("ready_after_weights_s", "warm_up_and_captures_s")
            said = ", ".join(f"{name} {median(name, ''):.2f} -> {median(name, '1'):.2f}" for name in rows)
            print(f"       {mode}: {said}, by graphs after 10 s {median('by_graphs_after_10_s', '1'):.4f}", flush=True)
        if arguments.kv:
            tokens = {on: median("kv_tokens", on) for on in ("", "1")}
            # The first start compiles for all later starts.
            start = {on: min(float(one["first_token_s"].split()[-1]) for one in seen[on]) for on in ("", "1")}
            print(
                f"       {mode}: KV tokens {tokens['']:,.0f} -> {tokens['1']:,.0f}, {tokens['1'] / tokens['']:.4f} x; "
                f"first token after {start['']:.1f} -> {start['1']:.1f} s (the quickest of {arguments.turns}); "
                f"free at the end {median('free_after_mib', ''):.0f} -> {median('free_after_mib', '1'):.0f} MiB",
                flush=True,
            )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a config.json")
    parser.add_argument("--mode", choices=MODES, default="full")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=12, help="how often the same requests are served; at least 2")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument(
        "--no-custom-all-reduce", action="store_true", help="vLLM's own all-reduce is off, as VmmGraph's plugin has it"
    )
    parser.add_argument("--then", default="", help=f"after the rounds, in this order: {', '.join(THEN)}")
    parser.add_argument("--turns", type=int, default=2, help="with --compare, how often each way runs")
    parser.add_argument("--compare", action="store_true", help="run every mode with and without")
    parser.add_argument("--modes", default="full,piecewise,default", help="which, with --compare")
    parser.add_argument("--kv", action="store_true", help="vLLM's defaults of memory, and the size of its KV cache")
    parser.add_argument("--behind", action="store_true", help="vmmgraph captures behind the traffic")
    parser.add_argument("--size", choices=SIZES, help="the shape of another model")
    parser.add_argument("--utilization", type=float, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--timed", type=int, default=7, help="rounds of each time a token; 0: not measured")
    parser.add_argument("--lora", action="store_true", help=f"{ADAPTERS} adapters of rank {RANK} with random weights")
    parser.add_argument("--ngram", action="store_true", help="speculative decoding with drafts from the prompts")
    parser.add_argument("--prefix-caching", action="store_true", help="half of the prompts begin with the same 512 tokens")
    parser.add_argument("--length", type=int, help="vLLM's max_model_len")
    parser.add_argument("--seconds", type=float, default=60, help="of --then mixed")
    parser.add_argument("--after", default="", help="a file; the engine starts once the file exists")
    never = float("inf")
    parser.add_argument("--limit", type=float, default=never, help="with --after, seconds from then until the process is ended")
    parser.add_argument("--until", type=float, default=never, help="with --after, the time at which the process is ended")
    parser.add_argument("--idle", type=float, default=0, help="seconds without requests after the first")
    parser.add_argument("--blocks", type=int, help="vLLM's num_gpu_blocks_override")
    parser.add_argument("--attention", default="TRITON_ATTN", help="vLLM's attention backend")
    arguments = parser.parse_args()
    if not can_run("vllm"):
        return 77
    if arguments.compare:
        return compare(arguments)
    run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
