"""Random use of the session by independent threads compared with eager work, on a GPU: each thread
captures, replays, drops and writes captured memory, works eagerly in its arena, and replays shared
graphs of other threads.

Under pytest, or standalone: ``python3 tests/python/test_threads_gpu.py [SECONDS] [SEED...]``, two
processes per seed: one pool per thread, and all in the device's arena. ``--stock`` runs without
VmmGraph, with wrong results (see `Threads`). Needs a GPU, torch, and VMMGRAPH_LIBRARY or a package
with libraries; prints SKIPPED otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

try:
    import torch

    HAS_GPU = bool(torch.version.cuda) and torch.cuda.is_available()
except ImportError:
    HAS_GPU = False
with contextlib.suppress(ImportError):
    import pytest

    pytestmark = pytest.mark.skipif(not HAS_GPU, reason="SKIPPED: needs a GPU")
if HAS_GPU:
    import vmmgraph

WIDTH = 512
SIZES = (2048, 512, 64, 8, 1)
DEPTHS = (1, 2, 4)
#: Operations and their relative frequency.
WORK = {
    "capture": 3,
    "throw": 1,
    "replay": 12,
    "others": 3,
    "fill": 2,
    "drop": 1,
    "keep": 1,
    "eager": 3,
    "collect": 0.3,
    "let_go": 2,
}


class Captured:
    """If shared, other threads replay it, one at a time."""

    def __init__(self, key: tuple, x) -> None:
        self.key, self.x = key, x
        self.graph = torch.cuda.CUDAGraph()
        # Another piece of the same shape.
        self.second: torch.cuda.CUDAGraph | None = None
        self.turn = threading.Lock()
        self.shared = False
        self.value = 0
        self.outputs: tuple = ()


class Threads:
    """One program. In stock torch each graph has its own pool, but graphs captured on one stream
    share a cuBLAS workspace: concurrent replays by two threads are wrong (on an H200, 26 to 292
    times in 10 to 15 s; never if workspaces are cleared before each capture)."""

    def __init__(self, mode: str, seed: int, count: int = 3) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self.ours, self.seed = mode != "stock", seed
        if self.ours:
            vmmgraph.enable(strict=True, share=mode == "share", executables=random.Random(seed).choice((1, 2, 4, 16)))
        # Other threads' captures use the default generator.
        generator = torch.Generator(device="cuda")
        generator.manual_seed(seed)
        scale = WIDTH**-0.5
        self.weights = [
            [torch.randn(shape, device="cuda", generator=generator) * scale for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))]
            for _ in range(3)
        ]
        self.inputs = {size: torch.randn(size, WIDTH, device="cuda", generator=generator) for size in SIZES}
        torch.cuda.synchronize()
        self.pools = [torch.cuda.graph_pool_handle() if mode == "pools" else None for _ in range(count)]
        self.shared: list[Captured] = []
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()

    def body(self, x, depth: int, more: bool) -> tuple:
        others = []
        for number in range(depth):
            up, down = self.weights[number % 3]
            x = x + torch.relu(x @ up) @ down
            x = x / (1 + x.abs().amax(-1, keepdim=True))
            if more and number % 2:
                others.append(x * 2)
        return (x, *others)

    def begin(self, graph, number: int) -> None:
        # torch.cuda.graph would wait for the device, while other threads capture.
        pool = {"pool": self.pools[number]} if self.pools[number] else {}
        graph.capture_begin(**pool, capture_error_mode="thread_local")

    def run(self, seconds: float) -> None:
        threads = [threading.Thread(target=Worker(self, number).run, daemon=True) for number in range(len(self.pools))]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join(60)
        hung = sum(thread.is_alive() for thread in threads)
        print(
            f"RESULT threads, seed {self.seed}: {dict(self.done)}, hung {hung}, wrong {len(self.wrong)}: {self.wrong[:3]}",
            flush=True,
        )
        assert not hung
        assert not self.wrong or not self.ours


class Worker:
    def __init__(self, program: Threads, number: int) -> None:
        self.program, self.number = program, number
        self.random = random.Random(program.seed * 100 + number)
        self.made: list[Captured] = []
        self.kept: list[tuple] = []
        self.bare: list[Captured] = []
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        program = self.program
        try:
            self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(self.stream):
                self.expected = {
                    (size, depth, more): [tensor.clone() for tensor in program.body(program.inputs[size], depth, more)]
                    for size in SIZES
                    for depth in DEPTHS
                    for more in (False, True)
                }
                # Torch refuses a pool whose graphs are destroyed.
                anchor = torch.cuda.CUDAGraph()
                program.begin(anchor, self.number)
                anchored = program.inputs[8] * 2
                anchor.capture_end()
                while not program.stop.is_set():
                    work = self.random.choices(list(WORK), list(WORK.values()))[0]
                    getattr(self, work)()
                    self.done[work] += 1
                    self.look()
                    self.stream.synchronize()
                del anchored
        except BaseException:  # noqa: BLE001, what a thread throws is reported
            program.wrong.append(f"thread {self.number}: {traceback.format_exc()[-900:]}")
            program.stop.set()
        with program.lock:
            program.done.update(self.done)

    def check(self, tensors, key: tuple, what: str) -> None:
        same = all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(tensors, self.expected[key], strict=True))
        if not same:
            self.program.wrong.append(f"{what} of {key}, {sum(self.done.values())}")

    def any(self) -> Captured | None:
        return self.random.choice(self.made) if self.made else None

    def captured(self) -> Captured:
        key = (self.random.choice(SIZES), self.random.choice(DEPTHS), self.random.random() < 0.4)
        one = Captured(key, self.program.inputs[key[0]].clone())
        pieces = self.random.random() < 0.3
        with vmmgraph.shape("pieces") if pieces and self.program.ours else contextlib.nullcontext():
            self.program.begin(one.graph, self.number)
            one.static = torch.empty(key[0], WIDTH, device="cuda")
            one.outputs = self.program.body(one.x, *key[1:])
            last = one.graph
            if pieces:
                last.capture_end()
                one.second = last = torch.cuda.CUDAGraph()
                self.program.begin(last, self.number)
            one.doubled = one.static * 2
            last.capture_end()
        return one

    def capture(self) -> None:
        if len(self.made) < 12:
            one = self.captured()
            one.value = self.random.randrange(1000)
            one.static.fill_(one.value)
            self.made.append(one)
            if self.random.random() < 0.3:
                one.shared = True
                with self.program.lock:
                    self.program.shared.append(one)

    def throw(self) -> None:
        """Tensors and graph are destroyed at once."""
        self.captured()

    def let_go(self) -> None:
        """Like engines with weak outputs. The graph's later writes must not hit other tensors."""
        if len(self.bare) < 6:
            one = self.captured()
            one.static.fill_(7)
            first = one.outputs[0]
            first.record_stream(self.side)
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(self.random.randrange(400_000))
                first.add_(1)
            del first
            one.outputs = one.static = one.doubled = None
            self.bare.append(one)
        one = self.random.choice(self.bare)
        if self.random.random() < 0.7:
            self.launch(one)
        if self.random.random() < 0.2:
            self.bare.remove(one)

    @staticmethod
    def launch(one: Captured) -> None:
        one.graph.replay()
        if one.second:
            one.second.replay()

    def replayed(self, one: Captured, what: str) -> None:
        with one.turn:
            self.launch(one)
            copies, doubled = [tensor.clone() for tensor in one.outputs], one.doubled.clone()
            self.stream.synchronize()
        self.check(copies, one.key, what)
        if what == "a replay" and not bool((doubled == 2 * one.value).all()):
            self.program.wrong.append(f"what was written before {what} of {one.key}")

    def replay(self) -> None:
        if one := self.any():
            self.replayed(one, "a replay")

    def others(self) -> None:
        with self.program.lock:
            one = self.random.choice(self.program.shared) if self.program.shared else None
        if one:
            self.replayed(one, "another's replay")

    def fill(self) -> None:
        if (one := self.any()) and not one.shared:
            one.value = self.random.randrange(1000)
            one.static.fill_(one.value)

    def drop(self) -> None:
        if one := self.any():
            self.made.remove(one)

    def keep(self) -> None:
        """Outputs outlive their graph."""
        if one := self.any():
            self.made.remove(one)
            if not one.shared:
                self.launch(one)
                self.kept.append((one.outputs, one.key))
                del self.kept[:-4]

    def eager(self) -> None:
        if self.program.ours and self.made:
            key = (self.random.choice(SIZES), 2, True)
            with vmmgraph.eager(self.made[0].graph.arena):
                outputs = self.program.body(self.program.inputs[key[0]], *key[1:])
            self.check(outputs, key, "eager work")
            if self.random.random() < 0.3:
                self.kept.append((outputs, key))
                del self.kept[:-4]

    def collect(self) -> None:
        gc.collect()

    def look(self) -> None:
        for tensors, key in self.kept:
            self.check(tensors, key, "what was kept")


def used(seconds: float, seeds: list[int], modes: tuple[str, ...] = ("pools", "share")) -> None:
    command = [sys.executable, __file__, "--one", str(seconds)]
    children = [
        subprocess.Popen([*command, mode, str(seed)], stdout=subprocess.PIPE, text=True, env=os.environ)
        for seed in seeds
        for mode in modes
    ]
    for child in children:
        said, _ = child.communicate(timeout=seconds + 180)
        print(said, end="", flush=True)
    assert [child.returncode for child in children] == [0] * len(children)


def test_random_use_by_threads() -> None:
    used(15, [1, 2])


if __name__ == "__main__":
    if not HAS_GPU:
        print("SKIPPED: needs a GPU")
        sys.exit(77)
    if sys.argv[1:2] == ["--one"]:
        Threads(sys.argv[3], int(sys.argv[4])).run(float(sys.argv[2]))
        # Hung daemons must not block the exit.
        sys.stdout.flush()
        os._exit(0)
    given = [one for one in sys.argv[1:] if one != "--stock"]
    used(
        float((given or ["15"])[0]),
        [int(seed) for seed in given[1:]] or [1, 2],
        ("stock",) if "--stock" in sys.argv else ("pools", "share"),
    )
    print("passed")
