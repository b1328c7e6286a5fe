"""`vmmgraph.sleep` and `wake` without a GPU: calls over stand-ins, memory over the host driver."""

from __future__ import annotations

import logging
import types

import pytest
import vmmgraph
from test_memory_saver import LIBRARY, both, child
from vmmgraph import _c, _enable, _ledger, memory_saver
from vmmgraph.memory_saver import _saver
from vmmgraph.plugins import vllm

MIB = 1 << 20


@pytest.fixture
def asleep(session, monkeypatch: pytest.MonkeyPatch):
    """The session over stand-ins, with a device of 1,000 MiB of which 400 are free."""
    cuda = session.torch.cuda
    cuda.is_initialized, cuda.device_count = (lambda: True), (lambda: 2)
    cuda.is_current_stream_capturing = lambda: False
    cuda.synchronize = lambda device: session.log.append(("synchronize", device))
    cuda.empty_cache = lambda: session.log.append(("empty_cache",))
    cuda.mem_get_info = lambda device: (400 * MIB, 1000 * MIB)
    cuda.memory = types.SimpleNamespace()
    segment = {"device": 0, "segment_pool_id": (0, 0), "total_size": 30 * MIB, "active_size": 20 * MIB}
    cuda.memory_snapshot = lambda: [segment, segment | {"device": 1}]
    session.torch._C._cuda_hasPrimaryContext = lambda device: device == 0
    session.torch._C._cuda_clearCublasWorkspaces = lambda: session.log.append(("clear",))
    monkeypatch.setattr(_ledger, "used_by_all", lambda device: None)
    call = session.library.call

    def answered(name: str, *arguments: object) -> int:
        status = call(name, *arguments)
        if name == "torch_executable_stats":
            arguments[-1]._obj.bytes = 7 * MIB
        elif name == "device_stats":
            arguments[-1]._obj.physical_bytes, arguments[-1]._obj.free_bytes = 5 * MIB, 2 * MIB
        return status

    monkeypatch.setattr(session.library, "call", answered)
    return session


def capture(session, **more: object):
    graph = session.torch.cuda.CUDAGraph()
    with session.torch.cuda.graph(graph, **more):
        pass
    return graph


def names(session, *wanted: str) -> list[str]:
    found = [entry[0] for entry in session.log if entry[0] in wanted]
    session.log.clear()
    return found


STEPS = (
    "synchronize",
    "arena_pause",
    "torch_evict_executables",
    "clear",
    "empty_cache",
    "device_trim",
    "arena_resume",
    "torch_group_instantiate",
)


def test_everything_sleeps_and_what_stays_has_a_name(asleep) -> None:
    graphs = [capture(asleep), capture(asleep)]
    asleep.log.clear()
    (ledger,) = vmmgraph.sleep()
    assert names(asleep, *STEPS)[:7] == [
        "synchronize",
        "arena_pause",
        "arena_pause",
        "torch_evict_executables",
        "clear",
        "empty_cache",
        "device_trim",
    ]
    assert dict(ledger.rows) == {
        "pages of graphs and regions": 3 * MIB,
        "idle pages of the library": 2 * MIB,
        "executables, memory kept by the driver": 7 * MIB,
        "torch's tensors and workspaces of graphs": 20 * MIB,
        "torch's cache": 10 * MIB,
        "CUDA context, kernels, communicators, other libraries": 558 * MIB,
    }
    assert ledger.named() == ledger.total and "CUDA context" in ledger.table()
    vmmgraph.wake()
    assert names(asleep, *STEPS) == ["arena_resume", "arena_resume", "torch_group_instantiate", "torch_group_instantiate"]
    vmmgraph.wake()
    assert names(asleep, *STEPS) == ["arena_resume", "arena_resume"], "executables exist already"
    del graphs


def test_level_1_keeps_executables(asleep) -> None:
    graph = capture(asleep)
    asleep.log.clear()
    vmmgraph.sleep(level=1)
    assert "torch_evict_executables" not in names(asleep, *STEPS)
    vmmgraph.wake()
    assert names(asleep, *STEPS) == ["arena_resume"]
    with pytest.raises(ValueError, match="cannot sleep at level 3"):
        vmmgraph.sleep(3)
    del graph


def test_executables_are_made_when_the_session_makes_them(asleep) -> None:
    asleep.instantiate = "replay"
    graph = capture(asleep)
    vmmgraph.sleep()
    asleep.log.clear()
    vmmgraph.wake()
    assert "torch_group_instantiate" not in names(asleep, *STEPS), "the next replay does"
    del graph


def test_workspaces_stay_if_graphs_of_torch_may_use_them(asleep) -> None:
    with vmmgraph.disabled():
        graph = capture(asleep)
    vmmgraph.sleep()
    assert "clear" not in names(asleep, *STEPS)
    del graph


def test_workspaces_stay_if_graphs_were_made_before(asleep) -> None:
    _enable.disable_all()
    vmmgraph.sleep()
    assert "clear" not in names(asleep, *STEPS), "graphs are unknown"
    graph = asleep.base()
    vmmgraph.enable(strict=True)
    vmmgraph.sleep()
    assert "clear" not in names(asleep, *STEPS)
    del graph
    vmmgraph.sleep()
    assert "clear" in names(asleep, *STEPS)


def test_a_capture_is_refused_and_goes_on(asleep) -> None:
    graph = asleep.torch.cuda.CUDAGraph()
    with asleep.torch.cuda.graph(graph), pytest.raises(_c.Error, match="cannot sleep: a stream is under capture"):
        vmmgraph.sleep()
    assert names(asleep, *STEPS) == ["torch_group_instantiate"], "no effect"
    asleep.torch.cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(_c.Error, match="under capture"):
        vmmgraph.sleep()
    asleep.torch.cuda.is_initialized = lambda: False
    assert vmmgraph.sleep() == []


def test_pieces_of_a_group_have_the_tag_of_their_captures(asleep, monkeypatch: pytest.MonkeyPatch) -> None:
    """As breakable and piecewise graphs under the memory saver."""
    saver = memory_saver.TorchMemorySaver()
    included = []
    core = types.SimpleNamespace(tms_include_arenas=lambda tag, device: included.append((tag, device)) or 0)
    monkeypatch.setattr(saver, "_saver", object.__new__(_saver.Saver))
    saver._saver.c, saver._saver.library = core, types.SimpleNamespace(check=lambda what, code: None)
    pool, made = asleep.torch.cuda.graph_pool_handle(), {}
    for label in ("2048", "1024"):
        with vmmgraph.shape(label):
            made[label] = [asleep.torch.cuda.CUDAGraph() for _ in range(3)]
            for graph in made[label]:
                with saver.cuda_graph(graph, pool=pool, tag="graphs"):
                    pass
    graphs = [graph for pieces in made.values() for graph in pieces]
    assert {graph.arena for graph in graphs} == {graphs[0].arena} and graphs[0].arena.tag == "graphs"
    assert len({graph._group for graph in graphs}) == 2 and [graph.label for graph in graphs[2:4]] == ["2048", "1024"]
    assert included == [(b"graphs", 0)] * 6


def test_vllms_sleep_includes_the_graphs_and_survives_a_refusal(asleep, caplog: pytest.LogCaptureFixture) -> None:
    class CuMemAllocator:
        def sleep(self, offload_tags: object = None) -> None:
            asleep.log.append(("sleep", offload_tags))

        def wake_up(self, tags: object = None) -> None:
            asleep.log.append(("wake_up", tags))

    allocator = vllm.with_graphs(CuMemAllocator)()
    assert type(allocator).__name__ == "CuMemAllocator"
    graph = capture(asleep)
    asleep.log.clear()
    allocator.sleep(("weights",))
    assert names(asleep, "sleep", *STEPS)[:2] == ["sleep", "arena_pause"]
    allocator.wake_up(["weights"])
    assert names(asleep, "wake_up", *STEPS) == ["wake_up", "arena_resume"]
    asleep.library.answers["arena_pause"] = _c.WRONG_STATE
    with caplog.at_level(logging.WARNING, "vmmgraph"):
        allocator.sleep()
    assert "graphs keep their memory" in caplog.text
    del graph


@pytest.mark.skipif(not LIBRARY.exists(), reason=f"SKIPPED: {LIBRARY} is not built")
@both
def test_memory_of_graphs_and_regions_goes_and_comes_back(mode: str) -> None:
    """Over the host driver: graphs of two arenas, and regions with and without a backup."""
    child(
        """
        import vmmgraph
        from vmmgraph import _core, _session, _ledger
        torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), lambda device: None
        torch.cuda.mem_get_info = lambda device: (400 * MIB, 1000 * MIB)
        torch.cuda.Stream = type("Stream", (), {"priority_range": staticmethod(lambda: (0, 0)), "cuda_stream": 5, "__init__": lambda *_, **__: None})
        torch._C._cuda_clearCublasWorkspaces = lambda: log.append("clear")
        vmmgraph._enable._status = vmmgraph.Status("blocks", "the test's")
        def snapshot():
            return [{"device": 0, "total_size": count, "active_size": count, "segment_pool_id": pool} for pool, count in owners.values()]
        torch.cuda.memory_snapshot = snapshot
        _ledger.used_by_all = lambda device: 0

        session = _session._session = _session.Session(_core.any_one())
        plain, tagged = session.make(0), session.make(0, "graphs")
        kept = plain.allocate_exclusive(MIB)
        with saver.region("weights", enable_cpu_backup=True):
            weights = new(2 * MIB)
        with saver.region("kv"):
            new(4 * MIB)
        fill(weights, 2 * MIB, 3); fill(kept, MIB, 4)
        ledger, = vmmgraph.sleep()
        rows = dict(ledger.rows)
        assert plain.stats()["paused"] and tagged.stats()["paused"] and log[-1] == "clear"
        assert backup(weights, 1) and holds(kept, MIB, 4)
        assert "torch's tensors and workspaces of graphs" not in rows, "only memory of regions"
        assert ledger.named() == ledger.total
        vmmgraph.sleep(1)
        vmmgraph.wake(["weights"])
        assert holds(weights, 2 * MIB, 3) and plain.stats()["paused"] and tagged.stats()["paused"]
        vmmgraph.wake(["graphs", "never heard of"])
        vmmgraph.wake(); vmmgraph.wake()
        assert not plain.stats()["paused"] and not tagged.stats()["paused"]
        assert holds(kept, MIB, 4) and holds(weights, 2 * MIB, 3)
        """,
        mode,
        VMMGRAPH_CORE_LIBRARY=str(next(LIBRARY.parent.glob("libvmmgraph.so*"))),
    )
