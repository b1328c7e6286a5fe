"""The MemPool route, over stand-ins of torch and of the library."""

from __future__ import annotations

import contextlib
import gc
import itertools
import types

import pytest
import stub
import vmmgraph
from test_signals import Interrupt, Signal
from vmmgraph import _mempool, _session


@pytest.fixture(params=[stub.BaseGraph, stub.LaterGraph])
def torch(monkeypatch, request):
    # Objects of an earlier test would write to this test's log.
    gc.collect()
    torch = stub.use_torch(monkeypatch, request.param)
    log: list[object] = []
    monkeypatch.setattr(stub.BaseGraph, "log", log)
    monkeypatch.setattr(stub.BaseGraph, "fail", set())

    class MemPool:
        count = 0

        def __init__(self, allocator: object) -> None:
            MemPool.count += 1
            self.id = (0, 1000 + MemPool.count)
            log.append(("mempool", self.id))

        def __del__(self) -> None:
            log.append(("mempool ends", self.id))

    class Pluggable:
        def __init__(self, path: str, allocate: str, free: str) -> None:
            log.append(("pluggable", allocate, free))

        def allocator(self) -> object:
            return self

    torch.cuda.MemPool = MemPool
    torch.cuda.memory = types.SimpleNamespace(CUDAPluggableAllocator=Pluggable)
    torch._C._cuda_clearCublasWorkspaces = lambda: log.append(("clear",))
    library = stub.Library(log)
    library.with_torch = False
    torch.log, torch.library = log, library
    # Created in Python by the later release only.
    torch.passed_over = {"instantiate"} if request.param is stub.LaterGraph else set()
    torch.cuda.CUDAGraph = _mempool.graph_class(library, request.param)
    return torch


def capture(torch, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        pass
    return graph


def names(torch) -> list[str]:
    found = [entry[0] for entry in torch.log if entry[0] not in torch.passed_over]
    torch.log.clear()
    return found


def test_each_capture_has_a_pool_and_an_arenas_current_space(torch) -> None:
    first, second = capture(torch, (0, 50)), capture(torch, (0, 50))
    assert first._arena is second._arena
    begun = [entry for entry in torch.log if entry[0] == "capture_begin"]
    assert begun[0][1] != begun[1][1]
    assert first.pool() == second.pool() == (0, 50)
    called = names(torch)
    assert called.count("arena_create") == 1
    assert called.count("arena_switch_to_new_virtual_space") == 2
    # Around each capture.
    assert called.count("clear") == 4
    first.replay()
    assert names(torch) == ["space_enter", "replay", "space_leave"]
    stub.BaseGraph.fail.add("replay")
    with pytest.raises(RuntimeError):
        first.replay()
    assert names(torch) == ["space_enter", "replay", "space_leave"]


def test_a_pool_ends_behind_its_graph_and_not_during_a_capture(torch) -> None:
    gone, other = capture(torch, (0, 50)), torch.cuda.CUDAGraph()
    other.capture_begin((0, 50))
    torch.log.clear()
    del gone
    gc.collect()
    assert names(torch) == ["reset"]
    other.capture_end()
    torch.log.clear()
    capture(torch, (0, 50)).reset()
    assert names(torch)[0:4] == ["mempool ends", "arena_mark", "arena_switch_to_new_virtual_space", "torch_set_arena"]
    other.reset()
    assert names(torch)[:2] == ["reset", "mempool ends"]


def test_a_second_capture_at_once_is_torchs_own(torch, caplog) -> None:
    """The library allocates from one arena per device, so the captures would mix their memory."""
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    first.capture_begin((0, 50))
    torch.log.clear()
    second.capture_begin(pool=(0, 51))
    assert [entry[:2] for entry in torch.log] == [("capture_begin", (0, 51))]
    assert [record.message.split(":")[1] for record in caplog.records] == [" a capture in torch's own memory"]
    torch.log.clear()
    second.capture_end()
    # Its end does not end the arena's capture.
    third = torch.cuda.CUDAGraph()
    third.capture_begin((0, 50))
    third.capture_end()
    assert third._arena is None
    first.capture_end()
    assert "clear" not in names(torch)[:-1]
    for graph in (second, third):
        torch.log.clear()
        graph.replay()
        graph.reset()
        assert names(torch) == ["replay", "reset"]
    # Failed and dropped captures end, too.
    for fails in ("capture_begin", "capture_end", None):
        stub.BaseGraph.fail = {fails}
        fourth = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            fourth.capture_begin((0, 50))
            if fails:
                fourth.capture_end()
        del fourth
        gc.collect()
        stub.BaseGraph.fail = set()
        assert capture(torch, (0, 50))._arena is not None


def test_what_torch_does_around_a_replay_is_not_within_its_turn(torch) -> None:
    """A hook may replay another graph of the arena."""
    first, second = capture(torch, (0, 50)), capture(torch, (0, 50))
    if not hasattr(first, "replay_hooks"):
        pytest.skip("this torch has no hooks")
    first.replay_hooks["other"] = lambda graph: second.replay()
    torch.log.clear()
    first.replay()
    assert names(torch) == ["space_enter", "replay", "space_leave"] * 2


def test_disabled_captures_are_torchs(torch, monkeypatch) -> None:
    monkeypatch.setattr(_session, "_session", None)
    with vmmgraph.disabled():
        graph = capture(torch, (0, 50))
    assert names(torch) == ["pluggable", "capture_begin", "capture_end"]
    graph.replay()
    assert names(torch) == ["replay"]


def test_a_signal_leaves_the_route_as_it_is(torch) -> None:
    for number in itertools.count(1):
        interrupt = Interrupt(number)
        torch.library.interrupt = stub.BaseGraph.interrupt = interrupt
        with contextlib.suppress(Signal):
            capture(torch, (0, 50)).replay()
        torch.library.interrupt = stub.BaseGraph.interrupt = None
        gc.collect()
        assert torch.library.turns == [], (number, interrupt.where)
        graph = capture(torch, (0, 50))
        assert graph._arena is not None, (number, interrupt.where)
        graph.replay()
        if interrupt.where is None:
            break
    assert number > 5


@pytest.mark.parametrize(
    ("version", "settings", "possible"),
    [
        ("2.11.0+cu130", "", True),
        ("2.11.0+cu130", "expandable_segments:True", True),
        ("2.9.1+cu128", "expandable_segments:True", False),
        ("2.9.1+cu128", "max_split_size_mb:64, expandable_segments: true", False),
        ("2.9.1+cu128", "expandable_segments:False", True),
    ],
)
def test_where_it_is_possible(torch, monkeypatch, version: str, settings: str, possible: bool) -> None:
    torch.__version__ = version
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert (_mempool.possible() is None) == possible


@pytest.mark.parametrize(("backend", "possible"), [("native", True), ("cudaMallocAsync", False), ("pluggable", False)])
def test_it_needs_torchs_native_allocator(torch, monkeypatch, backend: str, possible: bool) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    torch._C._cuda_getAllocatorBackend = lambda: backend
    assert (_mempool.possible() is None) == possible
