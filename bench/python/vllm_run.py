#!/usr/bin/env python3
"""vllm_run.py MODEL [--mode full|piecewise|default] [--requests 300]: vLLM itself, with VMMGRAPH=1 in the environment or without.

MODEL is a folder with a config.json; weights are random. Prints, as RESULT lines: how many tokens came out and a hash of them (the same
with and without VmmGraph), what "Graph capturing took" by free memory, tokens a second (the median of later rounds of the same requests), and what the
arenas hold beside the hungriest shape's need. Nothing of vLLM is changed: with VMMGRAPH=1 the plugin is found by its entry point, for which this
writes the metadata that an installation has. Needs a GPU and vllm; says SKIPPED without.

With --compare it runs itself for every mode, with and without, and prints the table and what is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODES = {
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {"mode": 3, "cudagraph_mode": "PIECEWISE"},
    "default": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
}
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: vmmgraph\nVersion: 0.1.0\n",
    "entry_points.txt": "[vllm.general_plugins]\nvmmgraph = vmmgraph._plugins:vllm\n",
}
MIB = 1 << 20


def install_entry_point() -> None:
    """What pip would have written, on this process's path."""
    from importlib.metadata import entry_points

    if any(point.name == "vmmgraph" for point in entry_points(group="vllm.general_plugins")):
        return
    folder = Path(tempfile.mkdtemp()) / "vmmgraph-0.1.0.dist-info"
    folder.mkdir()
    for name, text in METADATA.items():
        (folder / name).write_text(text)
    sys.path.append(str(folder.parent))
    # Workers of several ranks are processes of their own.
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(folder.parent)) if part)


def run(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    install_entry_point()
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.worker import gpu_model_runner

    taken: list[int] = []
    capture = gpu_model_runner.GPUModelRunner.capture_model

    def measured(self, *args, **kwargs):
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        try:
            return capture(self, *args, **kwargs)
        finally:
            torch.cuda.synchronize()
            taken.append(before - torch.cuda.mem_get_info()[0])

    gpu_model_runner.GPUModelRunner.capture_model = measured
    llm = LLM(
        model=arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=4096,
        attention_config={"backend": "TRITON_ATTN"},
        kv_cache_memory_bytes=16 << 30,
        enable_prefix_caching=False,
        tensor_parallel_size=arguments.ranks,
        compilation_config=MODES[arguments.mode],
    )
    pick = random.Random(11)
    prompts = [
        {"prompt_token_ids": [pick.randrange(10, 150000) for _ in range(pick.randrange(4, 512))]}
        for _ in range(arguments.requests)
    ]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=pick.randrange(16, 112), ignore_eos=True, detokenize=False) for _ in prompts
    ]
    seconds, hashes, count = [], [], 0
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        count = sum(map(len, tokens))
        hashes.append(hashlib.sha256(repr(tokens).encode()).hexdigest()[:16])
    torch.cuda.synchronize()
    print(f"RESULT {arguments.mode} tokens {count} hash {hashes[0]} again {' '.join(sorted(set(hashes[1:])))}")
    print(f"RESULT {arguments.mode} capture_mib {sum(taken) / MIB:.1f}")
    # A round takes about a second, so that one alone says nothing to a hundredth; the first one warms up.
    print(f"RESULT {arguments.mode} rounds {' '.join(f'{count / one:.0f}' for one in seconds)}")
    print(f"RESULT {arguments.mode} tokens_per_second {count / statistics.median(seconds[1:]):.0f}")
    print(f"RESULT {arguments.mode} free_after_mib {torch.cuda.mem_get_info()[0] / MIB:.0f}")
    if "vmmgraph" in sys.modules and sys.modules["vmmgraph"].status():
        import vmmgraph

        for arena in vmmgraph.arenas():
            stats = arena.stats()
            ratio = stats["physical_bytes"] / max(stats["high_water_bytes"], 1)
            print(
                f"RESULT {arguments.mode} arena_mib {stats['physical_bytes'] / MIB:.1f} floor_mib {stats['high_water_bytes'] / MIB:.1f} "
                f"ratio {ratio:.3f} shapes {stats['spaces']} retained_mib {stats['retained_bytes'] / MIB:.1f}"
            )
            executables = arena.executables()
            print("RESULT", arguments.mode, "executables", {name: executables[name] for name in executables if name != "nodes"})
    elif os.environ.get("VMMGRAPH"):
        sys.exit("WRONG  VMMGRAPH is set, and the plugin was not called")


def compare(arguments: argparse.Namespace) -> int:
    """Every mode with and without; the exit status."""
    wrong = 0
    for mode in arguments.modes.split(","):
        seen: dict[str, dict[str, str]] = {}
        for on in ("", "1"):
            command = [sys.executable, __file__, arguments.model, "--mode", mode, "--requests", str(arguments.requests)]
            command += ["--rounds", str(arguments.rounds)]
            child = subprocess.run(
                [*command, "--ranks", str(arguments.ranks)],
                env={**os.environ, "VMMGRAPH": on},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            lines = [
                line
                for line in child.stdout.splitlines()
                if line.startswith("RESULT") or "vmmgraph" in line or "Graph capturing" in line
            ]
            print(f"--- {mode}, VMMGRAPH={on or 'off'}: exit {child.returncode}", *lines, sep="\n", flush=True)
            if child.returncode:
                print(child.stdout[-6000:])
                return 1
            seen[on] = {line.split()[2]: line for line in lines if line.startswith("RESULT")}
        off, on = seen[""], seen["1"]
        same = off["tokens"].split()[2:] == on["tokens"].split()[2:]
        rate = float(on["tokens_per_second"].split()[-1]) / float(off["tokens_per_second"].split()[-1])
        took = [float(one["capture_mib"].split()[-1]) for one in (off, on)]
        wrong += not same
        print(
            f"{'ok    ' if same else 'WRONG '} {mode}: tokens {'equal' if same else 'differ'}, "
            f"capture {took[0]:.0f} -> {took[1]:.0f} MiB, throughput {rate:.3f}",
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
    parser.add_argument("--compare", action="store_true", help="run every mode with and without")
    parser.add_argument("--modes", default="full,piecewise,default", help="which, with --compare")
    arguments = parser.parse_args()
    try:
        import torch
        import vllm  # noqa: F401

        there = torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        print("SKIPPED: needs a GPU and vllm")
        return 77
    if arguments.compare:
        return compare(arguments)
    run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
