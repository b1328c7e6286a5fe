"""Random single-program use of the session compared with eager work, on a GPU: captures on streams
of three kinds, replays on five, eager work, tensors and graphs dropped in any order, exceptions,
collections, and two concurrent replaying threads.

Under pytest, or standalone: ``python3 tests/python/test_soak_gpu.py [SECONDS] [SEED...]``, one
process per seed. Needs a GPU, torch with green contexts, and VMMGRAPH_LIBRARY or a package with
libraries; prints SKIPPED otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

try:
    import torch
    from torch.cuda import green_contexts

    HAS_GPU = bool(torch.version.cuda) and torch.cuda.is_available() and getattr(green_contexts, "SUPPORTED", True)
except ImportError:
    HAS_GPU = False
with contextlib.suppress(ImportError):
    import pytest

    pytestmark = pytest.mark.skipif(not HAS_GPU, reason="SKIPPED: needs a GPU")
if HAS_GPU:
    import vmmgraph

WIDTH = 512
SIZES = (2048, 1024, 256, 64, 8, 1)
#: Operations and their relative frequency.
WORK = {"capture": 3, "replay": 12, "drop": 1, "drop_graph": 1, "drop_tensors": 1, "reset": 1, "eager": 3, "clean": 1, "look": 1}


def same(tensors, expected) -> bool:
    """Not bit for bit: fewer multiprocessors may select other kernels."""
    return all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(tensors, expected, strict=False))


class Captured:
    graph = None

    def __init__(self, x, depth: int, more: bool, expected) -> None:
        self.x, self.depth, self.more, self.expected = x, depth, more, expected
        self.outputs: tuple = ()


class Soak:
    """`wrong` lists differences."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        torch.backends.cuda.matmul.allow_tf32 = False
        vmmgraph.enable(strict=True, executables=self.random.choice((1, 2, 4, 16)))
        scale = WIDTH**-0.5
        self.weights = [
            (torch.randn(WIDTH, 2 * WIDTH, device="cuda") * scale, torch.randn(2 * WIDTH, WIDTH, device="cuda") * scale)
            for _ in range(3)
        ]
        self.pool = torch.cuda.graph_pool_handle()
        self.streams = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.Stream(priority=-1)]
        self.contexts = [green_contexts.GreenContext.create(num_sms=size) for size in (16, 32)]
        self.context_streams = [context.Stream() for context in self.contexts]
        self.runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        self.made: list[Captured] = []
        self.kept: list[tuple] = []
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self.now = ""

    def body(self, x, depth: int, more: bool) -> tuple:
        others = []
        for number in range(depth):
            up, down = self.weights[number % 3]
            x = x + torch.relu(x @ up) @ down
            x = x / (1 + x.abs().amax(-1, keepdim=True))
            if more and number % 2:
                others.append(x * 2)
        return (x, *others)

    def check(self, tensors, expected, what: str) -> None:
        if not same(tensors, expected):
            self.wrong.append(f"{what}, turn {sum(self.done.values())}")

    def captured(self, sizes) -> Captured | None:
        """One body in ten throws."""
        depth, more = self.random.randrange(1, 6), self.random.random() < 0.4
        x = torch.randn(self.random.choice(sizes), WIDTH, device="cuda")
        one = Captured(x, depth, more, [tensor.clone() for tensor in self.body(x, depth, more)])
        one.graph = torch.cuda.CUDAGraph()
        stream = self.random.choice(self.streams + self.context_streams)
        throws = self.random.random() < 0.1
        try:
            with torch.cuda.graph(one.graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                one.outputs = self.body(x, depth, more)
                if throws:
                    raise InterruptedError
        except InterruptedError:
            return None
        return one

    @contextlib.contextmanager
    def somewhere(self, *more: str):
        """Makes a random stream current: torch's, the default, a green context's or its default;
        "going": a destroyed one."""
        kind = self.random.choice(("torch's", "default", "context's", "in context", *more))
        if kind == "default":
            yield kind
        elif kind == "in context":
            context = self.random.choice(self.contexts)
            context.set_context()
            try:
                yield kind
            finally:
                context.pop_context()
        elif kind == "going":
            raw = ctypes.c_void_p()
            assert self.runtime.cudaStreamCreateWithFlags(ctypes.byref(raw), 1) == 0
            with torch.cuda.stream(torch.cuda.ExternalStream(raw.value)):
                yield kind
            torch.cuda.synchronize()
            assert self.runtime.cudaStreamDestroy(raw) == 0
        else:
            with torch.cuda.stream(self.random.choice(self.streams if kind == "torch's" else self.context_streams)):
                yield kind
                torch.cuda.current_stream().synchronize()

    def capture(self) -> None:
        if len(self.made) < 40 and (one := self.captured(SIZES)):
            self.made.append(one)

    def any(self) -> Captured | None:
        return self.random.choice(self.made) if self.made else None

    def replay(self) -> None:
        if one := self.any():
            with self.somewhere("going") as where:
                one.graph.replay()
                copies = [tensor.clone() for tensor in one.outputs]
            torch.cuda.synchronize()
            self.check(copies, one.expected, f"a replay {where}")

    def drop(self) -> None:
        if one := self.any():
            self.made.remove(one)

    def drop_graph(self) -> None:
        if one := self.any():
            self.made.remove(one)
            one.graph.replay()
            self.kept.append((one.outputs, one.expected))
            del self.kept[:-6]

    def drop_tensors(self) -> None:
        if one := self.any():
            one.outputs = one.outputs[:1]

    def reset(self) -> None:
        if one := self.any():
            self.made.remove(one)
            one.graph.reset()

    def eager(self) -> None:
        x = torch.randn(self.random.choice((1024, 128, 4)), WIDTH, device="cuda")
        expected = [tensor.clone() for tensor in self.body(x, 3, True)]
        torch.cuda.synchronize()
        with self.somewhere() as where:
            with vmmgraph.eager(self.arena):
                outputs = self.body(x, 3, True)
            copies = [tensor.clone() for tensor in outputs]
        torch.cuda.synchronize()
        self.check(copies, expected, f"eager work {where}")
        if self.random.random() < 0.3:
            self.kept.append((outputs, expected))

    def clean(self) -> None:
        self.random.choice((gc.collect, torch.cuda.empty_cache, vmmgraph.report, self.arena.trim))()

    def look(self) -> None:
        for tensors, expected in self.kept:
            self.check(tensors, expected, "what was kept")

    def differs(self, one: Captured, copies) -> str:
        """Whether the outputs themselves differ now and after another replay."""
        torch.cuda.current_stream().synchronize()
        wrong = [(a - b).abs() > 1e-4 for a, b in zip(copies, one.expected, strict=True)]
        where = [f"{int(w.sum())} of {w.numel()} from {int(w.flatten().int().argmax())}" for w in wrong]
        now = same(one.outputs, one.expected)
        one.graph.replay()
        return f"{where}, outputs right now: {now}, after another replay: {same(one.outputs, one.expected)}"

    def beside(self, mine: list[Captured], stop: threading.Event) -> None:
        stream = torch.cuda.Stream()
        # All on this stream: torch's allocator confuses two contexts' default streams.
        with torch.cuda.stream(stream):
            while not stop.wait(0.001):
                for one in mine:
                    began = self.now
                    one.graph.replay()
                    launched = self.now
                    copies = [tensor.clone() for tensor in one.outputs]
                    if not same(copies, one.expected):
                        at = f"from turn {began} to {launched}, depth {one.depth}"
                        self.wrong.append(f"a replay of another thread, {at}: {self.differs(one, copies)}")
                    stream.synchronize()

    def run(self, seconds: float) -> None:
        fixed: list[Captured] = []
        while len(fixed) < 4:
            if one := self.captured((512,)):
                fixed.append(one)
        self.arena = arena = fixed[0].graph.arena
        torch.cuda.synchronize()
        stop = threading.Event()
        threads = [threading.Thread(target=self.beside, args=(fixed[at : at + 2], stop)) for at in (0, 2)]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self.wrong:
                work = self.random.choices(list(WORK), list(WORK.values()))[0]
                self.now = f"{sum(self.done.values())} {work}"
                getattr(self, work)()
                self.done[work] += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        torch.cuda.synchronize()
        self.made.clear()
        self.kept.clear()
        fixed.clear()
        one = None
        gc.collect()
        torch.cuda.synchronize()
        arena.trim()
        left = arena.stats()["physical_bytes"]
        print(f"RESULT soak: {dict(self.done)}, {left} bytes left, wrong: {self.wrong}", flush=True)
        assert not self.wrong
        assert left == 0


def soaked(seconds: float, seeds: list[int]) -> None:
    command = [sys.executable, __file__, "--one", str(seconds)]
    children = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True, env=os.environ) for seed in seeds]
    for child in children:
        said, _ = child.communicate(timeout=seconds + 120)
        print(said, end="", flush=True)
    assert [child.returncode for child in children] == [0] * len(seeds)


def test_random_use() -> None:
    soaked(20, [1, 2, 3])


if __name__ == "__main__":
    if not HAS_GPU:
        print("SKIPPED: needs a GPU")
        sys.exit(77)
    if sys.argv[1:2] == ["--one"]:
        Soak(int(sys.argv[3])).run(float(sys.argv[2]))
    else:
        soaked(float((sys.argv[1:2] or ["20"])[0]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
        print("passed")
