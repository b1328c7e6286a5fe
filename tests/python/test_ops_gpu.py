"""Every operator and module of torch's own test databases, captured in arenas and replayed,
compared with eager work, on a GPU.

Under pytest, or standalone: ``python3 tests/python/test_ops_gpu.py [DTYPE...]``, twelve processes
per dtype (default float32). Up to three samples per entry, forward, in place and with gradients, a
graph for each. Results that eager work does not reproduce are replayed but not compared. Captures
refused by torch are counted and must have no side effects. Needs a GPU, torch with its testing
package, and VMMGRAPH_LIBRARY or a package with libraries; prints SKIPPED otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import types
import unittest
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

PROCESSES = 12
KEPT = 60
#: With undefined contents.
UNDEFINED = "empty"


class Sweep:
    def __init__(self, number: int, dtype: str) -> None:
        import vmmgraph

        vmmgraph.enable(strict=True)
        self.dtype = getattr(torch, dtype)
        self.random = random.Random(number)
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        #: Name, graph, inputs, outputs, expected, and whether eager work does not reproduce them.
        self.kept: list[tuple] = []
        self.done = {"captured": 0, "not compared": 0, "elsewhere": 0, "refused": 0, "not run": 0, "replays": 0, "wrong": []}
        # Torch refuses a pool whose graphs are destroyed.
        self.first, self.ones = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
        with torch.cuda.graph(self.first, pool=self.pool):
            self.twos = self.ones + 1

    def samples(self, entry, gradients: bool):
        """Yields calls and differentiable inputs."""
        if hasattr(entry, "sample_inputs"):
            found = list(itertools.islice(entry.sample_inputs("cuda", self.dtype, requires_grad=gradients), 12))
            for one in found[:1] + found[5:6] + found[11:12] if len(found) > 5 else found[:2]:
                leaves = [t for t in tensors((one.input, one.args, one.kwargs)) if t.requires_grad]
                yield (lambda one=one: entry.op(one.input, *one.args, **one.kwargs)), leaves
                if getattr(entry, "inplace_variant", None) is not None:
                    yield (lambda one=one: in_place(entry, one)), leaves
            return
        for one in entry.module_inputs_func(entry, device="cuda", dtype=self.dtype, requires_grad=gradients, training=True)[:2]:
            made, given = one.constructor_input, one.forward_input
            if given is not None:
                module = entry.module_cls(*made.args, **made.kwargs).to("cuda", self.dtype)
                # Initializes lazy parameters.
                module(*given.args, **given.kwargs)
                leaves = [t for t in tensors((given.args, given.kwargs)) if t.requires_grad] + list(module.parameters())
                yield (lambda module=module, given=given: module(*given.args, **given.kwargs)), leaves

    def entry(self, number: int, entry) -> None:
        name = f"{entry.name}.{getattr(entry, 'variant_test_name', '')}"
        if hasattr(entry, "supports_dtype") and not entry.supports_dtype(self.dtype, "cuda"):
            return
        for gradients in (False, True):
            if gradients and not (self.dtype.is_floating_point or self.dtype.is_complex):
                continue
            torch.manual_seed(number)
            try:
                calls = list(self.samples(entry, gradients))
            except Exception:  # noqa: BLE001, whatever torch's database says of an entry that it has nothing for
                self.done["not run"] += 1
                continue
            for call, leaves in calls:
                self.capture(name, call, leaves if gradients else None)
        for _ in range(5):
            if self.kept:
                self.replay(*self.random.choice(self.kept))
        while len(self.kept) > KEPT:
            self.kept.pop(self.random.randrange(len(self.kept)))

    def capture(self, name: str, call, leaves) -> None:
        def body():
            result = call()
            if leaves is None:
                return result
            outputs = [t for t in tensors(result) if t.requires_grad]
            total = sum(t.abs().sum() if t.is_complex() else t.sum() for t in outputs)
            return result, torch.autograd.grad(total, leaves, allow_unused=True) if outputs else ()

        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                expected = [values(body()) for _ in range(3)]
        except Exception:  # noqa: BLE001, eager work that fails is torch's
            self.done["not run"] += 1
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool if self.random.random() < 0.7 else None):
                outputs = body()
        except Exception:  # noqa: BLE001, what torch refuses to capture it says in many ways
            self.done["refused"] += 1
            return
        self.done["captured"] += 1
        self.done["elsewhere"] += graph._group is None
        graph.replay()
        first = values(outputs)
        drawn = UNDEFINED in name or any(self.differ(one, expected[0]) for one in expected)
        self.done["not compared"] += drawn
        kept = (name, graph, call, outputs, first, drawn)
        if not drawn and self.differ(first, expected[0]):
            self.done["wrong"].append(f"{name}: the first replay")
        self.replay(*kept)
        self.kept.append(kept)

    def replay(self, name: str, graph, call, outputs, first, drawn: bool) -> None:
        graph.replay()
        self.done["replays"] += 1
        if not drawn and self.differ(values(outputs), first):
            self.done["wrong"].append(f"{name}: a later replay")

    def differ(self, some: list, others: list) -> bool:
        """Tolerates the rounding of atomic sums."""
        exact = not (self.dtype.is_floating_point or self.dtype.is_complex)
        return differ(some, others, 1e-3 if exact else max(1e-3, 4 * torch.finfo(self.dtype).eps))


def in_place(entry, one):
    several = isinstance(one.input, (list, tuple))
    copied = [tensor.clone() for tensor in one.input] if several else one.input.clone()
    return entry.inplace_variant(copied, *one.args, **one.kwargs), copied


def tensors(tree) -> list:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def values(tree) -> list:
    def dense(tensor):
        if tensor.layout != torch.strided:
            tensor = tensor.values() if tensor.is_nested else tensor.to_dense()
        return tensor.detach().resolve_conj().resolve_neg().cpu().clone()

    # uint64 tensors are attention seeds, meaningless without random numbers.
    return [dense(tensor) for tensor in tensors(tree) if tensor.dtype != torch.uint64]


def differ(some: list, others: list, most: float) -> bool:
    def same(one, other) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return bool(torch.equal(one, other))
        scale = float(other[other.isfinite()].abs().max()) if bool(other.isfinite().any()) else 1.0
        return bool(torch.allclose(one, other, rtol=most, atol=most * scale, equal_nan=True))

    return len(some) != len(others) or not all(map(same, some, others))


def entries() -> list:
    # The database imports this for torch's own tests.
    with contextlib.suppress(ImportError):
        import expecttest  # noqa: F401
    if "expecttest" not in sys.modules:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
        sys.modules["expecttest"].assert_expected_inline = None
    from torch.testing._internal import common_methods_invocations as of_torch
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.custom_op_db import custom_op_db
    from torch.testing._internal.hop_db import hop_db

    lists = [getattr(of_torch, f"foreach_{kind}_op_db") for kind in ("unary", "binary", "pointwise", "reduce", "other")]
    others = [custom_op_db, autograd_function_db, hop_db, of_torch.python_ref_db]
    return list(itertools.chain(of_torch.op_db, module_db, *lists, *others))


def swept(dtype: str) -> dict:
    command = [sys.executable, __file__, "--one", dtype]
    # Some samples depend on set order.
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    children = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True, env=env) for n in range(PROCESSES)]
    total: dict = {}
    for child in children:
        said, _ = child.communicate(timeout=300)
        assert child.returncode == 0, said[-2000:]
        for key, value in json.loads(said.splitlines()[-1]).items():
            total[key] = total.get(key, [] if isinstance(value, list) else 0) + value
    wrong = total.pop("wrong")
    print(f"RESULT operators, {dtype}: {total}, wrong: {wrong}", flush=True)
    assert not wrong
    assert total["captured"] > 1000
    assert total["elsewhere"] == 0, "captures in torch's own memory"
    return total


def test_operators() -> None:
    swept("float32")


if __name__ == "__main__":
    if not HAS_GPU:
        print("SKIPPED: needs a GPU")
        sys.exit(77)
    if sys.argv[1:2] == ["--one"]:
        number = int(sys.argv[3])
        sweep = Sweep(number, sys.argv[2])
        for at, one in list(enumerate(entries()))[number::PROCESSES]:
            sweep.entry(at, one)
        print(json.dumps(sweep.done))
        # Skips teardown of operators' leftovers.
        sys.stdout.flush()
        os._exit(0)
    for name in sys.argv[1:] or ["float32"]:
        swept(name)
    print("passed")
