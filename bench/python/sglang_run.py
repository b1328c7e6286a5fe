#!/usr/bin/env python3
"""sglang_run.py MODEL [--mode MODE]: measures unmodified SGLang, or VmmGraph with VMMGRAPH=1.

MODEL is a folder with a config.json. Weights are random, and scaled so that every token depends on
attention and the KV cache. The requests of a round are scheduled only once all have arrived, so
batches do not depend on timing. Prints RESULT lines: tokens with a hash, equal with and without
VmmGraph; memory and seconds of captures; tokens of the KV cache; time per token of 1, 8 and 64
sequences; GPU time and host time of a decode replay; arenas. With VMMGRAPH=1 SGLang finds the
plugin by its entry point; this script writes the metadata of an installation. Needs a GPU and
sglang; prints SKIPPED otherwise.

Control: the small decode graphs then skip their replays. The tokens must differ, and must be the
first ones again with the graphs back in place.

The modes ngram, standalone and eagle decode speculatively. The draft of `standalone` has the
target's weights with noise, so most of its tokens are accepted. The draft of `eagle` is random.
Drafts of `ngram` are earlier tokens: rounds are served in pairs, and the second round of a pair
repeats the requests of the first. RESULT accept_length is the number of tokens per verified step.

--compare runs every mode as stock, with VmmGraph, and as stock again, and prints ratios to the mean
of both stock runs, and the ratio of the stock runs. --together starts stock and VmmGraph of all
modes at once and compares tokens only: for runs without times. There the engines of the first mode
start one after the other, before all others, so that their capture memory is measured alone.
--kv measures the size of the KV cache with SGLang's defaults (no memory flag, no length) for 512
running requests, and adds VMMGRAPH_KV=1 to VMMGRAPH=1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from engine_run import MIB, can_run, digest, install_entry_points, ms_a_token, widen

MODES: dict[str, dict[str, Any]] = {
    "decode": {"cuda_graph_backend_prefill": "disabled"},
    "breakable": {"cuda_graph_backend_prefill": "breakable"},
    # SGLang 0.5.14, not 0.5.23.
    "piecewise": {"cuda_graph_backend_prefill": "tc_piecewise"},
    # SGLang 0.5.23, not 0.5.14.
    "full": {"cuda_graph_backend_prefill": "full"},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "standalone": {"speculative_algorithm": "STANDALONE"},
    "eagle": {"speculative_algorithm": "EAGLE"},
}
#: Steps, branches and tokens of a draft model.
DRAFT = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
#: Size of the noise of a draft's weights, relative to the weights.
NOISE = 0.02
#: KV tokens of an engine that shares the device with other engines (--together).
POOL = 50000
#: Entry points of SGLang's plugins, loaded by every SGLang process: the package's, and measure() of
#: this script.
PLUGINS = {"vmmgraph": "vmmgraph.plugins.sglang:enable", "sglang_run_measure": "sglang_run:measure"}
#: Sequences of the timed decode steps.
SEQUENCES = (1, 8, 64)
#: Sequences of the largest graph which the control skips.
SKIPPED_SIZE = 8


# In the scheduler's process.


class State:
    #: Requests that the next round waits for.
    expected = 0
    #: MiB and seconds of each capture.
    captures: ClassVar[dict[str, dict[str, float]]] = {}
    #: Sequences, GPU events and host seconds of each decode replay while timing is on.
    replays: ClassVar[list[tuple[int, Any, Any, float]]] = []
    #: Replays counted outside timing.
    calls = 0
    #: Tensor which takes the reserve of the KV cache (--press).
    pressure: Any = None


def measure() -> None:
    """SGLang plugin: measures captures, widens weights, and adds methods to the scheduler.

    The patches of runners wait until the scheduler makes its worker: SGLang imports runners no
    earlier, and VmmGraph's plugin waits for these imports.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    if hasattr(Scheduler, "run_look"):
        return
    init, pull = Scheduler.init_model_worker, SchedulerRequestReceiver._pull_raw_reqs

    def init_model_worker(self, *args, **kwargs):
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
        from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

        for owner, name in ((PrefillCudaGraphRunner, "prefill"), (DecodeCudaGraphRunner, "decode")):
            owner._capture_one_stream = measured(owner._capture_one_stream, name)
        # Around the plugin's wrapper, which returns idle pages.
        self.init_all_cuda_graphs = measured(self.init_all_cuda_graphs, "all")
        load = ModelRunner.load_model

        def load_model(self, *args, **kwargs):
            load(self, *args, **kwargs)
            widen(self.model)
            if self.is_draft_worker:
                disturb(self.model)

        ModelRunner.load_model = load_model
        wait_for_turn()
        result = init(self, *args, **kwargs)
        end_turn()
        return result

    def pull_all(self):
        got = pull(self)
        if State.expected and any(map(requests_in, got or ())):
            deadline = time.monotonic() + 20
            while sum(map(requests_in, got)) < State.expected and time.monotonic() < deadline:
                time.sleep(0.001)
                got += pull(self)
            State.expected = 0
        return got

    Scheduler.init_model_worker, SchedulerRequestReceiver._pull_raw_reqs = init_model_worker, pull_all
    Scheduler.run_look, Scheduler.run_expect, Scheduler.run_press = look, expect, press
    Scheduler.run_time, Scheduler.run_skip = time_replays, skip_graph


def wait_for_turn() -> None:
    """Waits for the engines that start before this one (--together)."""
    folder, number, alone = os.environ.get("SGLANG_RUN_TURN", ":0:0").split(":")
    deadline = time.monotonic() + 150
    before = [Path(folder) / str(other) for other in range(min(int(number), int(alone)))]
    while not all(map(Path.exists, before)) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_turn() -> None:
    folder, number, _ = os.environ.get("SGLANG_RUN_TURN", "::").split(":")
    if folder:
        (Path(folder) / number).touch()


def disturb(model: Any) -> None:
    """Adds noise to a draft's weights."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(6)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                noise = torch.empty_like(parameter).normal_(0.0, float(parameter.std()) * NOISE, generator=generator)
                parameter.add_(noise)


def requests_in(received: Any) -> int:
    name = type(received).__name__
    if name == "BatchTokenizedGenerateReqInput":
        return len(received)
    return int(name == "TokenizedGenerateReqInput")


def measured(method, name: str):
    import torch

    def used() -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free, torch.cuda.memory_reserved()

    def capture(*args, **kwargs):
        before, start = used(), time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            device, reserved = (now - then for now, then in zip(used(), before, strict=True))
            arenas = sum(arena.stats()["physical_bytes"] for arena in arenas_here())
            State.captures[name] = {
                "mib": device / MIB,
                "torch_mib": reserved / MIB,
                "arenas_mib": arenas / MIB,
                "seconds": seconds,
            }

    return capture


def arenas_here() -> list[Any]:
    """Returns VmmGraph's arenas of this process."""
    vmmgraph = sys.modules.get("vmmgraph")
    return list(vmmgraph.arenas()) if vmmgraph is not None and vmmgraph.status() else []


def expect(self, count: int) -> None:
    State.expected = count


def decode_backend(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner.decode_cuda_graph_runner.backend


def time_replays(self, on: bool) -> None:
    """Records GPU events and host time of every decode replay, or ends this."""
    import torch

    backend = decode_backend(self)
    if not on:
        del backend.replay
        return
    State.replays.clear()
    replay = backend.replay

    def timed(shape_key, *args, **kwargs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        result = replay(shape_key, *args, **kwargs)
        host = time.perf_counter() - start
        end.record()
        State.replays.append((shape_key.size, begin, end, host))
        return result

    backend.replay = timed


class Skipped:
    """A graph whose replays do nothing."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def replay(self) -> None:
        State.calls += 1


def skip_graph(self, on: bool) -> None:
    """Replaces the decode graphs of at most SKIPPED_SIZE sequences, or puts the graphs back."""
    graphs = decode_backend(self)._graphs
    State.calls = 0
    for key, graph in graphs.items():
        if key.size <= SKIPPED_SIZE:
            graphs[key] = Skipped(graph) if on else graph.graph


def press(self, on: bool) -> None:
    """Takes all free memory but 64 MiB, or returns it."""
    import torch

    State.pressure = None
    torch.cuda.empty_cache()
    if on:
        State.pressure = torch.empty(torch.cuda.mem_get_info()[0] - 64 * MIB, dtype=torch.uint8, device="cuda")


def look(self, path: str) -> None:
    """Writes the state of the first rank to a file: an RPC returns no value."""
    import torch

    if torch.distributed.get_rank():
        return
    torch.cuda.synchronize()
    by_size: dict[int, list[tuple[float, float]]] = {}
    for size, begin, end, host in State.replays:
        by_size.setdefault(size, []).append((begin.elapsed_time(end), 1e6 * host))
    State.replays.clear()
    vmmgraph = sys.modules.get("vmmgraph")
    ledger = sys.modules.get("vmmgraph._ledger")
    seen = {
        "on": vmmgraph is not None and bool(vmmgraph.status()),
        "captures": State.captures,
        "calls": State.calls,
        "kv_tokens": self.max_total_num_tokens,
        "free": torch.cuda.mem_get_info()[0],
        "replays": {
            size: [statistics.median(gpu for gpu, _ in rows), statistics.median(host for _, host in rows), len(rows)]
            for size, rows in by_size.items()
        },
        "arenas": [(arena.stats(), arena.executables()) for arena in arenas_here()],
        "ledger": [line for one in ledger.ledgers() for line in one.table().splitlines()] if ledger else [],
    }
    Path(path).write_text(json.dumps(seen, default=str))


# In the engine's process.


def settle() -> None:
    """Sets the environment before sglang is imported."""
    for name, value in (
        ("SGLANG_IS_FLASHINFER_AVAILABLE", "false"),
        ("HF_HUB_OFFLINE", "1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ):
        os.environ.setdefault(name, value)
    install_entry_points("sglang.srt.plugins", PLUGINS)


class Run:
    """An engine and its generations."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import sglang

        self.mode = arguments.mode
        #: Tokens per verified step, by round; empty without speculation.
        self.accepted: list[float] = []
        memory = {"mem_fraction_static": 0.3, "context_length": 4096, "max_running_requests": 160}
        if arguments.kv:
            memory = {"max_running_requests": 512}
        elif arguments.pool:
            memory |= {"mem_fraction_static": 0.95, "max_total_tokens": arguments.pool}
        if "speculative_algorithm" in MODES[self.mode]:
            memory["cuda_graph_backend_prefill"] = "disabled"
        if self.mode == "standalone":
            memory |= {"speculative_draft_model_path": arguments.model, **DRAFT}
        elif self.mode == "eagle":
            memory |= {"speculative_draft_model_path": draft_of(arguments.model), **DRAFT}
        self.engine = sglang.Engine(
            model_path=arguments.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_radix_cache=True,
            disable_flashinfer_autotune=True,
            skip_server_warmup=True,
            random_seed=7,
            chunked_prefill_size=4096,
            cuda_graph_max_bs_decode=160,
            host="127.0.0.1",
            log_level="info",
            tp_size=arguments.ranks,
            **memory,
            **MODES[arguments.mode],
        )

    def rpc(self, method: str, **parameters: Any) -> None:
        self.engine.collective_rpc(method, **parameters)

    def seen(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "seen"
            self.rpc("run_look", path=str(path))
            return json.loads(path.read_text())

    def forget(self) -> None:
        """Drops the n-gram drafts. SGLang refuses while its last batch is under way."""
        deadline = time.monotonic() + 10
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise RuntimeError("cannot drop the n-gram drafts: SGLang is not idle after 10 s")
            time.sleep(0.02)

    def generate(self, prompts: list[list[int]], counts: list[int]) -> tuple[float, list[list[int]]]:
        """Returns the seconds and the tokens of one wave of requests."""
        self.rpc("run_expect", count=len(prompts))
        sampling = [{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in counts]
        start = time.perf_counter()
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        steps = sum(output["meta_info"].get("spec_verify_ct") or 0 for output in outputs)
        if steps:
            self.accepted.append(sum(counts) / steps)
        return time.perf_counter() - start, [list(output["output_ids"]) for output in outputs]

    def time_a_token(self, sequences: int, rounds: int) -> float:
        """Returns the milliseconds of a decode step."""
        pick = random.Random(sequences)
        prompts = [[pick.randrange(10, 150000) for _ in range(32)] for _ in range(sequences)]
        return ms_a_token(lambda count: self.generate(prompts, [count] * sequences)[0], rounds)


def draft_of(model: str) -> str:
    """Writes the configuration of an EAGLE draft for a model. Returns the folder."""
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(arguments: argparse.Namespace) -> None:
    began = float(os.environ.get("SGLANG_RUN_STARTED") or time.time())
    settle()
    one, mode, wrong = Run(arguments), arguments.mode, []
    with_others()
    one.generate([list(range(10, 42))], [1])
    print(f"RESULT {mode} first_token_s {time.time() - began:.2f}")
    pick = random.Random(11)
    prompts = [[pick.randrange(10, 150000) for _ in range(pick.randrange(10, 800))] for _ in range(arguments.requests)]
    # Batches shrink one by one, through every captured size.
    counts = [pick.randrange(8, 41) for _ in prompts]

    def serve() -> tuple[float, str]:
        seconds, tokens = one.generate(prompts, counts)
        if [len(made) for made in tokens] != counts:
            wrong.append("a request has another length than asked for")
        kinds.update(token for made in tokens for token in made)
        return seconds, digest(tokens)

    kinds: set[int] = set()

    def serve_round(number: int) -> tuple[float, str]:
        if mode == "ngram" and number % 2 == 0:
            one.forget()
        return serve()

    one.accepted.clear()
    seconds, hashes = zip(*map(serve_round, range(arguments.rounds)), strict=True)
    started = one.seen()
    count = sum(counts)
    print(f"RESULT {mode} tokens {count} hash {hashes[0]} again {' '.join(hashes[1:])} kinds {len(kinds)}")
    print(f"RESULT {mode} tokens_per_second {count / statistics.median(seconds[1:]):.0f}")
    if one.accepted:
        print(f"RESULT {mode} accept_length {' '.join(f'{length:.2f}' for length in one.accepted)}")
    for name, took in started["captures"].items():
        print(f"RESULT {mode} capture_mib_{name} {took['mib']:.1f}")
        rest = took["mib"] - took["torch_mib"] - took["arenas_mib"]
        print(f"RESULT {mode} parts_mib_{name} torch {took['torch_mib']:.1f} arenas {took['arenas_mib']:.1f} rest {rest:.1f}")
        print(f"RESULT {mode} capture_s_{name} {took['seconds']:.3f}")
    print(f"RESULT {mode} kv_tokens {started['kv_tokens']}")
    timed = SEQUENCES if arguments.timed else ()
    for sequences in timed:
        print(f"RESULT {mode} ms_a_token_{sequences} {one.time_a_token(sequences, arguments.timed):.4f}")
    for sequences in timed:
        # Apart from the times above: events take host time.
        one.rpc("run_time", on=True)
        one.time_a_token(sequences, 1)
        one.rpc("run_time", on=False)
        gpu, host, replays = one.seen()["replays"][str(sequences)]
        print(f"RESULT {mode} replay_gpu_ms_{sequences} {gpu:.4f}")
        print(f"RESULT {mode} replay_host_us_{sequences} {host:.2f}")
        if replays < 100:
            wrong.append(f"only {replays} replays of {sequences} sequences were timed")
    one.rpc("run_skip", on=True)
    skipped = serve_round(0)[1]
    calls = one.seen()["calls"]
    one.rpc("run_skip", on=False)
    restored = serve_round(0)[1]
    print(f"RESULT {mode} control hash {skipped} skipped {calls} restored {restored}")
    pressed = set()
    for on in (True, False) if arguments.press else ():
        one.rpc("run_press", on=on)
        pressed.add(serve_round(0)[1])
        # Groups of tokens return once a second.
        time.sleep(1)
        pressed.add(serve_round(0)[1])
        print(f"RESULT {mode} pressure {on} hashes {' '.join(pressed)} free_mib {one.seen()['free'] / MIB:.0f}")
    if not pressed <= {hashes[0]}:
        wrong.append("tokens under pressure differ")
    ended = one.seen()
    print(f"RESULT {mode} free_after_mib {ended['free'] / MIB:.0f}")
    for stats, executables in ended["arenas"]:
        ratio = stats["physical_bytes"] / max(stats["high_water_bytes"], 1)
        print(
            f"RESULT {mode} arena_mib {stats['physical_bytes'] / MIB:.1f} floor_mib {stats['high_water_bytes'] / MIB:.1f} "
            f"ratio {ratio:.3f} shapes {stats['spaces']} retained_mib {stats['retained_bytes'] / MIB:.1f}"
        )
        print("RESULT", mode, "executables", {name: executables[name] for name in executables if name != "nodes"})
    for line in ended["ledger"]:
        print(f"LEDGER {line}")
    if bool(os.environ.get("VMMGRAPH")) != ended["on"]:
        wrong.append(f"VMMGRAPH is {os.environ.get('VMMGRAPH')!r}, and VmmGraph is {'on' if ended['on'] else 'off'}")
    period = 2 if mode == "ngram" else 1
    if restored != hashes[0] or any(one != hashes[number % period] for number, one in enumerate(hashes)):
        wrong.append("rounds differ")
    if skipped == hashes[0] or not calls:
        wrong.append(f"a graph that skipped {calls} replays changed no token: the comparison says nothing")
    if len(kinds) < count // 2:
        wrong.append(f"only {len(kinds)} different tokens of {count}: the comparison says little")
    sys.stdout.flush()
    one.engine.shutdown()
    if wrong:
        sys.exit("WRONG  " + "; ".join(dict.fromkeys(wrong)))


def with_others() -> None:
    """Serves only when all engines that are measured alone have started (--together)."""
    folder, _, alone = os.environ.get("SGLANG_RUN_TURN", "::0").split(":")
    os.environ["SGLANG_RUN_TURN"] = f"{folder}:{alone}:{alone}"
    wait_for_turn()


def child(arguments: argparse.Namespace, mode: str, on: str, turn: str = "") -> tuple[int, dict[str, str]]:
    """Runs a mode in a further process. Returns the exit status and the RESULT lines by name.

    ``turn``: the shared folder, the number of this engine and the number of engines which start one
    after the other (--together).
    """
    command = [sys.executable, __file__, arguments.model, "--mode", mode, "--requests", str(arguments.requests)]
    command += ["--rounds", str(arguments.rounds), "--timed", str(arguments.timed), "--ranks", str(arguments.ranks)]
    command += ["--kv"] * arguments.kv + ["--pool", str(arguments.pool)]
    environment = {"VMMGRAPH": on, "VMMGRAPH_KV": on if arguments.kv else "", "SGLANG_RUN_STARTED": str(time.time())}
    if arguments.press:
        environment["VMMGRAPH_KV_GUARD"] = "1"
    if turn:
        environment["SGLANG_RUN_TURN"] = turn
    start = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    shown = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("RESULT", "LEDGER", "WRONG")) or "vmmgraph:" in line or "max_total_num_tokens=" in line
    ]
    took = f"{time.monotonic() - start:.0f} s"
    print(f"--- {mode}, VMMGRAPH={on or 'off'}: exit {done.returncode}, {took}", *shown, sep="\n", flush=True)
    if done.returncode:
        print(done.stdout[-5000:], flush=True)
    return done.returncode, {line.split()[2]: line for line in shown if line.startswith("RESULT")}


def compare(arguments: argparse.Namespace) -> int:
    """Runs every mode as stock, with VmmGraph, and as stock again. Returns the exit status."""
    wrong = 0
    for mode in arguments.modes.split(","):
        runs = [child(arguments, mode, on) for on in ("", "1", "")]
        if any(status for status, _ in runs):
            wrong += 1
            continue
        stock, ours, again = (lines for _, lines in runs)

        def value(lines: dict[str, str], name: str) -> float:
            return float(lines[name].split()[-1])

        same = len({tuple(lines["tokens"].split()[2:]) for _, lines in runs}) == 1
        wrong += not same
        print(f"{'ok    ' if same else 'WRONG '} {mode}: tokens {'equal' if same else 'differ'}", flush=True)
        for name in stock:
            if name.startswith(("capture_", "ms_", "replay_", "tokens_per", "kv_", "free_", "first_")):
                both = (value(stock, name), value(again, name))
                mean = statistics.mean(both)
                print(
                    f"       {mode} {name}: stock {both[0]:g} and {both[1]:g}, ours {value(ours, name):g}; "
                    f"ours / stock {value(ours, name) / mean if mean else 0:.4f}, "
                    f"stock / stock {both[1] / both[0] if both[0] else 0:.4f}",
                    flush=True,
                )
    return 1 if wrong else 0


def together(arguments: argparse.Namespace) -> int:
    """Runs stock and VmmGraph of all modes at once. Compares tokens. Returns the exit status."""
    modes, wrong = arguments.modes.split(","), 0
    alone = 2
    arguments.timed, arguments.pool = 0, arguments.pool or POOL
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2 * len(modes)) as workers:

        def started(number: int) -> tuple[int, dict[str, str]]:
            try:
                return child(arguments, modes[number // 2], "1" if number % 2 else "", f"{folder}:{number}:{alone}")
            finally:
                # An engine that failed keeps no other engine waiting.
                (Path(folder) / str(number)).touch()

        runs = list(workers.map(started, range(2 * len(modes))))
    for mode, (status, stock), (other, ours) in zip(modes, runs[::2], runs[1::2], strict=True):
        same = not (status or other) and stock["tokens"] == ours["tokens"]
        wrong += not same
        print(f"{'ok    ' if same else 'WRONG '} {mode}: tokens {'equal' if same else 'differ'}")
        for name in filter(ours.get, stock) if mode == modes[0] else ():
            if name.startswith(("capture_mib", "parts_mib")):
                print(f"       {mode} {name}: stock {' '.join(stock[name].split()[3:])}, ours {' '.join(ours[name].split()[3:])}")
    sys.stdout.flush()
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a config.json")
    parser.add_argument("--mode", choices=MODES, default="decode")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=4, help="how often the same requests are served; at least 2")
    parser.add_argument("--timed", type=int, default=5, help="rounds of each time a token; 0: no times")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--compare", action="store_true", help="run every mode as stock, with VmmGraph, and as stock")
    parser.add_argument("--modes", default="decode,breakable", help="which, with --compare")
    parser.add_argument("--together", action="store_true", help="all engines at once, tokens only")
    parser.add_argument("--pool", type=int, default=0, help="KV tokens; 0: by SGLang")
    parser.add_argument("--press", action="store_true", help="take the reserve of the KV cache for two rounds")
    parser.add_argument("--kv", action="store_true", help="SGLang's defaults of memory, and the size of its KV cache")
    arguments = parser.parse_args()
    if not can_run("sglang"):
        return 77
    if arguments.together:
        return together(arguments)
    if arguments.compare:
        return compare(arguments)
    run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
