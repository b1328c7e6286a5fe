"""The graph class's calls around torch's, over stand-ins of torch and of the library."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import threading
import types
from pathlib import Path

import pytest
import stub
import vmmgraph
from vmmgraph import _below, _c, _door, _enable, _site

#: Releases with hooks around captures and replays.
later = pytest.mark.parametrize("door", ["LaterGraph"], indirect=True)


def calls(door) -> list[str]:
    left_out = ("torch_set_executable_limits", "space_stats", "torch_group_instantiate")
    names = [entry[0] for entry in door.log if entry[0] not in left_out]
    door.log.clear()
    return names


def capture(door, pool=None, keep=False, **more):
    graph = door.torch.cuda.CUDAGraph(keep_graph=keep) if keep else door.torch.cuda.CUDAGraph()
    with door.torch.cuda.graph(graph, pool=pool, **more):
        pass
    return graph


def opened(door) -> int:
    return sum(entry[0] == "torch_group_open" for entry in door.log)


def test_the_class_is_a_subclass_in_every_place(door):
    cuda = door.torch.cuda
    assert issubclass(cuda.CUDAGraph, door.base)
    assert cuda.CUDAGraph is cuda.graphs.CUDAGraph
    assert cuda.CUDAGraph.__name__ == "CUDAGraph"
    assert isinstance(cuda.CUDAGraph(), door.base)
    assert cuda.CUDAGraph(True)._kept
    vmmgraph.disable_all()
    assert cuda.CUDAGraph is cuda.graphs.CUDAGraph is door.base


def test_the_device_stays_open_between_captures_without_a_pool(door):
    for _ in range(3):
        graph = capture(door)
        del graph
        gc.collect()
    names = [entry[0] for entry in door.log]
    assert (names.count("arena_create"), names.count("arena_destroy")) == (3, 3)
    assert (names.count("device_open"), names.count("device_close")) == (1, 0)
    vmmgraph.disable_all()
    gc.collect()
    assert [entry[0] for entry in door.log].count("device_close") == 1


def test_a_name_that_was_imported_before_is_replaced_too(monkeypatch, door):
    vmmgraph.disable_all()
    engine = types.ModuleType("some_engine")
    engine.CUDAGraph = door.base
    monkeypatch.setitem(sys.modules, "some_engine", engine)
    vmmgraph.enable()
    assert engine.CUDAGraph is door.torch.cuda.CUDAGraph is not door.base
    vmmgraph.disable_all()
    assert engine.CUDAGraph is door.base


def test_a_capture_and_its_replays(door):
    graph = capture(door, (0, 50))
    assert calls(door) == [
        "device_open", "arena_create", "torch_group_open", "torch_group_space",
        "torch_capture_begin", "capture_begin", "torch_capture_begun", "capture_end", "torch_capture_end",
        "torch_group_seal_unwritten",
    ]  # fmt: skip
    for _ in range(3):
        graph.replay()
        assert calls(door) == ["torch_replay"]
    graph.reset()
    assert calls(door)[:3] == ["torch_drop", "reset", "torch_group_close"]
    calls(door)
    graph.replay()
    # Later releases create an executable first.
    assert calls(door)[-1] == "replay"


def test_a_replay_passes_over_a_class_that_only_passes_on(monkeypatch, door):
    # As in torch up to 2.13.
    graph = capture(door)
    graph.replay()
    passed = []
    with monkeypatch.context() as patched:
        patched.setattr(door.base, "replay", lambda self: passed.append(self))
        graph.replay()
    assert passed == ([] if door.base is stub.BaseGraph else [graph])


def test_a_class_that_captures_by_itself_is_the_one_below(door):
    vmmgraph.disable_all()
    door.torch.cuda.CUDAGraph = door.torch.cuda.graphs.CUDAGraph = stub.EarlierCore
    vmmgraph.enable()
    graph = capture(door)
    calls(door)
    graph.replay()
    assert isinstance(graph, stub.EarlierCore) and calls(door) == ["torch_replay"]


def test_what_others_do_around_a_replay_is_done(door):
    vmmgraph.disable_all()
    seen = []

    class Counting(door.base):
        def replay(self) -> None:
            seen.append(self)
            super().replay()

    door.torch.cuda.CUDAGraph = door.torch.cuda.graphs.CUDAGraph = Counting
    vmmgraph.enable()
    graph = capture(door)
    calls(door)
    graph.replay()
    assert seen == [graph] and calls(door) == ["torch_replay"]
    vmmgraph.disable_all()


def test_the_engines_pool_reaches_torch_and_names_the_arena(door):
    pool = (0, 50)
    first, second, other = capture(door, pool), capture(door, pool), capture(door, (0, 51))
    assert [entry[1] for entry in door.log if entry[0] == "capture_begin"] == [pool, pool, (0, 51)]
    assert first.arena is second.arena is not other.arena
    assert first.pool() == pool
    # TensorRT-LLM passes the last graph's pool.
    last = capture(door)
    assert capture(door, last.pool()).arena is last.arena
    assert capture(door).arena is not last.arena


def test_without_a_pool_share_means_one_arena(door):
    door.share = True
    graphs = [capture(door) for _ in range(3)]
    assert len({graph.arena for graph in graphs}) == 1
    assert {graph.pool() for graph in graphs} == {graphs[0].arena.pool}
    assert len(door.arenas) == 1

    def given() -> list[tuple[int, int]]:
        return [entry[1] for entry in door.log if entry[0] == "capture_begin"]

    pool = graphs[0].arena.pool
    graphs.append(capture(door, graphs[1].pool()))
    assert given()[-1] == pool
    # Torch may have freed this pool id, which other graphs still report.
    for at in (3, 0):
        graphs[at].reset()
    graphs.append(capture(door, graphs[1].pool()))
    assert given()[-1] not in given()[:-1]
    assert graphs[-1].arena is graphs[1].arena
    assert graphs[-1].pool() == pool


def test_an_arena_goes_with_its_last_graph_and_gives_its_pages_back(door):
    first, second = capture(door, (0, 50)), capture(door, (0, 50))
    del first
    gc.collect()
    assert "arena_destroy" not in calls(door)
    del second
    gc.collect()
    assert calls(door)[-2:] == ["arena_destroy", "device_trim"]


def test_a_graph_that_was_never_replayed_leaves_nothing_open(door):
    graph = capture(door, (0, 50))
    gc.disable()
    try:
        del graph
        # By reference counting alone, without a collection.
        assert calls(door)[-3:] == ["torch_group_close", "arena_destroy", "device_trim"]
    finally:
        gc.enable()


def adopted(door):
    """Returns a MemPool warmed up and captured into, and the graph."""
    pool = door.torch.cuda.MemPool()
    calls(door)
    with door.torch.cuda.use_mem_pool(pool):
        pass
    assert calls(door) == ["use_mem_pool", "mem_pool_used"]
    graph = capture(door, pool.id)
    return pool, graph


def test_a_mempool_that_is_captured_into_is_an_arena(door):
    pool, graph = adopted(door)
    assert calls(door)[:2] == ["torch_pool_empty", "device_open"]
    # Internally another pool.
    assert graph._capture.pool != pool.id == graph.pool()
    assert capture(door, pool.id).arena is capture(door, graph.pool()).arena is graph.arena
    assert "torch_pool_empty" not in calls(door)
    with door.torch.cuda.use_mem_pool(pool):
        assert calls(door) == ["torch_eager_enter"]
    assert calls(door) == ["torch_eager_leave_of"]
    with door.torch.cuda.use_mem_pool(pool, 0):
        pass
    with vmmgraph.disabled(), door.torch.cuda.use_mem_pool(pool):
        pass
    assert calls(door) == ["torch_eager_enter", "torch_eager_leave_of", "use_mem_pool", "mem_pool_used"]
    del graph
    gc.collect()
    assert "arena_destroy" not in calls(door)
    with door.torch.cuda.use_mem_pool(pool):
        pass
    assert calls(door) == ["torch_eager_enter", "torch_eager_leave_of"]
    del pool
    gc.collect()
    assert "arena_destroy" in calls(door)


def test_captures_and_replays_step_out_of_eager_work(door):
    pool, graph = adopted(door)
    graph.replay()
    other = capture(door, (0, 50))
    other.replay()
    calls(door)
    with door.torch.cuda.use_mem_pool(pool):
        graph.replay()
        other.replay()
        assert calls(door) == [
            "torch_eager_enter", "torch_eager_leave_of", "torch_replay", "torch_eager_enter", "torch_replay"
        ]  # fmt: skip
        capture(door, pool.id)
        names = calls(door)
        assert names[0] == "torch_eager_leave_of"
        assert names.index("torch_capture_end") < names.index("torch_eager_enter")
        for place in ("capture_begin", "capture_end"):
            stub.BaseGraph.fail = {place}
            with pytest.raises(RuntimeError):
                capture(door, pool.id)
            names = calls(door)
            assert names.count("torch_eager_leave_of") == names.count("torch_eager_enter") == 1, place
        stub.BaseGraph.fail = set()
        # A refused scope falls back to torch's memory.
        door.library.answers["torch_eager_enter"] = _c.WRONG_STATE
        graph.replay()
        assert "torch_eager_enter" in calls(door)
        door.library.answers.clear()
    assert calls(door) == []


def test_eager_work_of_several_arenas_is_left_from_within(door):
    (first, graph), (second, other) = adopted(door), adopted(door)
    graph.replay()
    other.replay()
    calls(door)
    with door.torch.cuda.use_mem_pool(first), door.torch.cuda.use_mem_pool(second):
        graph.replay()
    enter, leave = "torch_eager_enter", "torch_eager_leave_of"
    assert calls(door) == [enter, enter, leave, leave, "torch_replay", enter, enter, leave, leave]
    with door.torch.cuda.use_mem_pool(first):
        thread = threading.Thread(target=graph.replay)
        thread.start()
        thread.join()
    assert calls(door) == [enter, "torch_replay", leave]


def test_eager_work_that_another_thread_ends_is_over(door):
    (pool, graph), (other, second) = adopted(door), adopted(door)
    graph.replay()
    second.replay()
    calls(door)

    def work(pool):
        with door.torch.cuda.use_mem_pool(pool):
            yield

    def elsewhere(close):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    begun = work(pool)
    next(begun)
    elsewhere(begun.close)
    assert calls(door) == ["torch_eager_enter", "torch_eager_end"]
    # Neither left again nor re-entered.
    graph.replay()
    assert calls(door) == ["torch_replay"]
    with vmmgraph.eager(graph.arena):
        inner = work(other)
        next(inner)
        elsewhere(inner.close)
        assert calls(door) == ["torch_eager_enter", "torch_eager_enter", "torch_eager_end"]
        graph.replay()
        assert calls(door) == ["torch_eager_leave_of", "torch_replay", "torch_eager_enter"]
    assert calls(door) == ["torch_eager_leave_of"]


def test_eager_work_of_several_arenas_ends_in_any_order(door):
    """Like interleaved tasks of one thread."""
    arenas = [vmmgraph.Arena(0) for _ in range(3)]
    scopes = [contextlib.ExitStack() for _ in arenas]
    for scope, arena in zip(scopes, arenas, strict=True):
        scope.enter_context(vmmgraph.eager(arena))
    handles = [arena.handle.value for arena in arenas]
    assert door.library.turns == handles
    scopes[1].close()
    assert door.library.turns == [handles[0], handles[2]]
    # Its own and all inner scopes are left and re-entered.
    graph = door.torch.cuda.CUDAGraph()
    with vmmgraph.graph(graph, arena=arenas[0]):
        assert door.library.turns == []
    assert door.library.turns == [handles[0], handles[2]]
    scopes[0].close()
    assert door.library.turns == [handles[2]]
    scopes[2].close()
    assert door.library.turns == []


def test_eager_work_says_what_it_needs(door):
    graph = capture(door, (0, 50))
    graph.replay()
    door.log.clear()
    with vmmgraph.eager(graph.arena, bytes=5 << 20):
        graph.replay()
    eager = [(entry[0], *entry[2:]) for entry in door.log if entry[0].startswith("torch_eager")]
    enter, leave = ("torch_eager_enter_of", 5 << 20), ("torch_eager_leave_of",)
    assert eager == [enter, leave, enter, leave]


def test_eager_work_that_is_refused_is_torchs(door, caplog):
    pool, graph = adopted(door)
    graph.replay()
    door.library.answers["torch_eager_enter"] = _c.WRONG_STATE
    calls(door)
    for _ in range(2):
        with door.torch.cuda.use_mem_pool(pool):
            pass
    assert calls(door) == ["torch_eager_enter", "use_mem_pool", "mem_pool_used"] * 2
    assert sum("torch's own memory" in record.message for record in caplog.records) == 1
    with pytest.raises(_c.Error), vmmgraph.eager(graph.arena):
        pass
    door.library.answers.clear()
    calls(door)
    with vmmgraph.eager(graph.arena):
        pass
    assert calls(door) == ["torch_eager_enter", "torch_eager_leave_of"]


def test_a_mempool_with_something_alive_or_options_stays_torchs(door):
    cuda = door.torch.cuda
    pool = cuda.MemPool()
    door.library.answers["torch_pool_empty"] = door.library.answers["torch_capture_begin"] = _c.WRONG_STATE
    assert capture(door, pool.id).arena is None
    with cuda.use_mem_pool(pool):
        pass
    assert "use_mem_pool" in calls(door)
    door.library.answers.clear()
    for options in ({"allocator": object()}, {"use_on_oom": True}, {"no_split": True}):
        capture(door, cuda.MemPool(**options).id)
        assert "torch_pool_empty" not in calls(door)
    vmmgraph.disable_all()
    before = cuda.MemPool()
    vmmgraph.enable()
    capture(door, before.id)
    assert "torch_pool_empty" not in calls(door)


def test_a_mempool_that_torch_lost_never_ends(door):
    pool = door.torch.cuda.MemPool()
    door.library.answers["torch_pool_empty"] = _c.INTERNAL
    count = sys.getrefcount(pool)
    graph = capture(door, pool.id)
    assert sys.getrefcount(pool) == count + 1
    assert graph.arena is not None


def test_a_capture_is_sealed_when_it_ends(door):
    """Later writes meet no seal."""
    pool = (0, 50)
    first = capture(door, pool)
    assert calls(door)[-2:] == ["torch_capture_end", "torch_group_seal_unwritten"]
    second = capture(door, pool)
    assert sealed(door) == ["torch_group_seal_unwritten"]
    for graph in (first, second):
        graph.replay()
        with vmmgraph.eager(graph.arena):
            pass
        assert calls(door) == ["torch_replay", "torch_eager_enter", "torch_eager_leave_of"]
    # A replay repeats a refused seal.
    door.library.answers.update(torch_group_seal=200, torch_group_seal_unwritten=200)
    third = capture(door, pool)
    with pytest.raises(_c.Error, match="a reason"):
        third.replay()
    door.library.answers.clear()
    calls(door)
    third.replay()
    assert calls(door) == ["torch_group_seal", "torch_replay"]


def test_pieces_are_sealed_when_none_will_follow_or_somebody_else_uses_the_arena(door):
    pool = (0, 50)
    with vmmgraph.shape("prefill"):
        pieces = [capture(door, pool) for _ in range(2)]
        assert not sealed(door)
    assert sealed(door) == ["torch_group_seal"]
    assert pieces[0]._group is pieces[1]._group
    # For a graph with exposed handle, the refusal raises at once.
    for keep in (False, True):
        with pytest.raises(_c.Error) if keep else contextlib.nullcontext(), vmmgraph.shape("prefill"):
            tried = capture(door, pool, keep=keep)
            if keep:
                tried.raw_cuda_graph()
            door.library.answers["torch_group_seal"] = 200
        door.library.answers.clear()
        assert not tried._group.sealed
        tried.replay()
        assert tried._group.sealed
    # The end of an engine's context is unknown: a replay or eager work of the arena seals.
    context, other = object(), capture(door, pool)
    door.namers.append(lambda: (context, "decode 8"))
    third = capture(door, pool)
    calls(door)
    other.replay()
    assert calls(door) == ["torch_group_seal", "torch_replay"]
    third.replay()
    assert calls(door) == ["torch_replay"]
    context = object()
    fourth = capture(door, pool)
    door.library.answers["torch_group_seal"] = 200
    calls(door)
    with pytest.raises(_c.Error), vmmgraph.eager(other.arena):
        pass
    assert calls(door) == ["torch_group_seal"]
    door.library.answers.clear()
    with vmmgraph.eager(other.arena):
        assert calls(door) == ["torch_group_seal", "torch_eager_enter"]
        context = object()
        fifth = capture(door, pool)
        assert calls(door)[-3:] == ["torch_capture_end", "torch_group_seal", "torch_eager_enter"]
    assert fourth._group.sealed and fifth._group.sealed
    # Also by an unrelated capture, before its space opens.
    context = object()
    sixth = capture(door, pool)
    context = object()
    calls(door)
    seventh = capture(door, pool)
    assert sixth._group is not seventh._group
    names = calls(door)
    assert names.index("torch_group_seal") < names.index("torch_group_open")


def test_shapes_that_threads_capture_at_once_are_sealed_each(door):
    pool = (0, 50)
    first, second = door.torch.cuda.CUDAGraph(), door.torch.cuda.CUDAGraph()
    first.capture_begin(pool)

    def elsewhere(graph):
        thread = threading.Thread(target=graph.capture_begin, args=(pool,))
        thread.start()
        thread.join()

    elsewhere(second)
    calls(door)
    first.capture_end()
    assert sealed(door) == ["torch_group_seal_unwritten"]
    assert (first._group.sealed, second._group.sealed) == (True, False)
    first.replay()
    assert not sealed(door)
    second.capture_end()
    assert sealed(door) == ["torch_group_seal_unwritten"]
    # Interleaved pieces of two shapes: the other's capture ends a shape.
    with vmmgraph.shape("mine"):
        mine = [capture(door, pool)]
        third = door.torch.cuda.CUDAGraph()
        elsewhere(third)
        mine.append(capture(door, pool))
        third.capture_end()
    assert mine[0]._group is not third._group
    first.replay()
    assert all(graph._group.sealed for graph in (*mine, third))
    assert first.arena._open == []


def test_captures_into_an_arena_that_no_pool_names_have_an_id_each(door):
    """Torch allows one capture at a time per id, and none into an id whose graphs are destroyed."""
    arena = vmmgraph.Arena(0)

    def begun(**more):
        graph = door.torch.cuda.CUDAGraph()
        graph._named = more.pop("arena", None), ""
        graph.capture_begin(**more)
        return graph

    door.log.clear()
    graphs = [begun(arena=arena), begun(arena=arena)]
    ids = [entry[1] for entry in door.log if entry[0] == "capture_begin"]
    assert ids[0] == arena.pool
    assert ids[1] != arena.pool
    for graph in graphs:
        graph.capture_end()
    # The program sees one id.
    assert [graph.pool() for graph in graphs] == [arena.pool] * 2
    assert capture(door, arena.pool).arena is arena
    for graph in graphs:
        graph.reset()
    other = begun(arena=arena)
    assert other._capture.pool not in (arena.pool, *ids)
    with vmmgraph.shape("pieces"):
        pieces = [begun(arena=arena)]
        pieces[0].capture_end()
        pieces.append(begun(arena=arena))
    assert pieces[0]._group is pieces[1]._group
    assert len({other._capture.pool, pieces[0]._capture.pool, pieces[1]._capture.pool}) == 3
    door.log.clear()
    kept = [begun(pool=(0, 50)), begun(pool=(0, 50))]
    assert [entry[1] for entry in door.log if entry[0] == "capture_begin"] == [(0, 50)] * 2
    assert kept[0].arena is kept[1].arena


def sealed(door) -> list[str]:
    return [name for name in calls(door) if name.startswith("torch_group_seal")]


def test_what_outlives_a_shape_that_is_never_replayed_is_nobody_elses(door):
    """Tensors may be alive, and other replays would overwrite these."""
    pool, context = (0, 50), object()
    door.namers.append(lambda: (context, "prefill"))
    pieces = [capture(door, pool) for _ in range(2)]
    calls(door)
    pieces.pop().reset()
    assert "torch_group_seal" not in calls(door)
    pieces.pop().reset()
    names = calls(door)
    assert names.index("torch_group_seal") < names.index("torch_group_close")
    door.namers.clear()
    stub.BaseGraph.fail = {"capture_end"}
    with pytest.raises(RuntimeError) as failed:
        capture(door, pool)
    # Although the traceback holds the graph.
    assert failed.value.__traceback__ is not None
    names = calls(door)
    assert names.index("torch_capture_abandon") < names.index("torch_group_seal_unwritten")
    # Earlier pieces may have been written.
    with vmmgraph.shape("prefill"):
        stub.BaseGraph.fail = set()
        first = capture(door, pool)
        stub.BaseGraph.fail = {"capture_end"}
        first.reset()
        with pytest.raises(RuntimeError):
            capture(door, pool)
    assert calls(door).count("torch_group_seal") == 2
    stub.BaseGraph.fail = set()


def test_pieces_of_one_shape_have_one_space(door):
    pool = (0, 50)
    with vmmgraph.shape("prefill 2048"):
        pieces = [capture(door, pool) for _ in range(3)]
    assert opened(door) == 1
    assert [piece._piece for piece in pieces] == [0, 1, 2]
    assert {piece.label for piece in pieces} == {"prefill 2048"}
    with vmmgraph.shape("prefill 2048"):
        again = capture(door, pool)
    assert opened(door) == 2
    for piece in pieces:
        piece.replay()
    assert sum(name == "torch_group_seal" for name in calls(door)) == 2
    assert again.arena is pieces[0].arena


def test_an_engines_context_names_pieces(door):
    context, other = object(), object()
    current = [(context, "decode 8")]
    door.namers.append(lambda: current[0])
    graphs = [capture(door, (0, 50)) for _ in range(2)]
    current[0] = (other, "decode 4")
    graphs.append(capture(door, (0, 50)))
    current[0] = None
    graphs.append(capture(door, (0, 50)))
    assert opened(door) == 3
    assert [graph.label for graph in graphs] == ["decode 8", "decode 8", "decode 4", ""]


def test_an_engines_context_goes_when_its_shape_is_sealed(door):
    import weakref

    class Context:
        pass

    context = Context()
    gone = weakref.ref(context)
    door.namers.append(lambda: (context, "decode 8"))
    graph = capture(door, (0, 50))
    door.namers.clear()
    context = None
    assert gone() is not None
    graph.replay()
    assert gone() is None


def test_captures_that_are_disabled_are_torchs_and_never_in_an_arenas_pool(door):
    pool = (0, 50)
    ours = capture(door, pool)
    door.log.clear()
    with vmmgraph.disabled():
        theirs = capture(door, pool)
        untouched = capture(door, (0, 99))
    begun = [entry[1] for entry in door.log if entry[0] == "capture_begin"]
    assert begun[0] != pool
    assert begun[1] == (0, 99)
    assert not [name for name in calls(door) if name.startswith("torch_")]
    theirs.replay()
    untouched.replay()
    assert calls(door) == ["replay", "replay"]
    assert ours.arena is not None
    assert theirs.arena is None


def test_disabled_is_of_one_thread(door):
    graphs = []
    with vmmgraph.disabled():
        thread = threading.Thread(target=lambda: graphs.append(capture(door)))
        thread.start()
        thread.join()
    assert graphs[0].arena is not None


def test_what_peers_use_is_marked_while_the_scope_lasts(door):
    with vmmgraph.remote(), vmmgraph.remote():
        pass
    with contextlib.suppress(KeyError), vmmgraph.remote():
        raise KeyError
    enter, leave = "torch_remote_enter", "torch_remote_leave"
    assert calls(door) == [enter, leave, enter, leave]


def test_scopes_of_remote_blocks_end_in_any_order(door):
    outer, inner = vmmgraph.remote(), vmmgraph.remote()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert door.library.remote == 1
    inner.__exit__(None, None, None)
    assert door.library.remote == 0


def test_a_scope_that_another_thread_has_ended_says_so(door):
    scope = vmmgraph.remote()
    scope.__enter__()
    door.library.answers["torch_remote_leave"] = 100
    with pytest.raises(vmmgraph.Error):
        scope.__exit__(None, None, None)


def test_arenas_are_made_with_the_policy_that_was_asked_for(door):
    door.retain = "shared_remote"
    graph = capture(door, (0, 50))
    assert door.library.retain == 4
    assert graph.arena is not None
    with pytest.raises(ValueError, match="cannot use retain="):
        vmmgraph.enable(retain="for ever")


def test_a_begin_that_throws_is_withdrawn(door):
    stub.BaseGraph.fail.add("capture_begin")
    graph = door.torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture_begin failed"):
        graph.capture_begin()
    names = calls(door)
    assert names.index("capture_begin") < names.index("torch_capture_abandon")
    stub.BaseGraph.fail.clear()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()


def test_an_end_that_throws_is_cleaned_up_and_the_graph_can_be_captured_again(door):
    graph = door.torch.cuda.CUDAGraph()
    stub.BaseGraph.fail.add("capture_end")
    with pytest.raises(RuntimeError, match="capture_end failed"), door.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    abandoned = [entry for entry in door.log if entry[0] == "torch_capture_abandon"]
    assert [entry[2:] for entry in abandoned] == [(0, 50)]
    assert graph.arena is None
    stub.BaseGraph.fail.clear()
    with door.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    graph.replay()
    assert graph.arena is not None


def test_an_exception_in_the_body_leaves_a_graph_as_torch_does(door):
    graph = door.torch.cuda.CUDAGraph()
    with pytest.raises(ZeroDivisionError), door.torch.cuda.graph(graph, pool=(0, 50)):
        raise ZeroDivisionError
    graph.replay()
    assert "torch_replay" in calls(door)


def test_what_the_library_refuses_of_a_capture_is_torchs_own(door, caplog):
    door.library.answers["torch_capture_begin"] = _c.WRONG_STATE
    with caplog.at_level(logging.WARNING):
        graph, again = capture(door, (0, 50)), capture(door, (0, 50))
    assert graph.arena is again.arena is None
    # Logged once.
    assert [record.message for record in caplog.records] == ["vmmgraph: a capture in torch's own memory: a reason"]
    door.library.answers["torch_capture_begin"] = 200
    with pytest.raises(_c.Error, match="a reason"):
        capture(door, (0, 50))


def test_where_the_address_is_not_known_replays_go_through_torch_in_turn(door):
    door.library.replayable = False
    graph = capture(door)
    door.log.clear()
    graph.replay()
    # Later releases create the executable in Python.
    made = [] if door.base is stub.BaseGraph else ["instantiate"]
    assert calls(door) == [*made, "space_enter", "replay", "space_leave"]
    stub.BaseGraph.fail.add("replay")
    with pytest.raises(RuntimeError, match="replay failed"):
        graph.replay()
    # Otherwise replays would block.
    assert calls(door) == ["space_enter", "replay", "space_leave"]


def test_a_shape_says_where_it_was_captured(door, monkeypatch, tmp_path):
    door.library.quiet.clear()
    graph = door.torch.cuda.CUDAGraph()
    line = sys._getframe().f_lineno + 1
    graph.capture_begin(pool=(0, 50))
    graph.capture_end()
    here = f"python/test_door.py:{line}"
    assert [entry for entry in door.log if entry[0] == "space_set_site"] == [
        ("space_set_site", graph._group.space.value, here.encode())
    ]
    # Skips frames of torch, this package and context managers.
    program, engine = tmp_path / "torch/cuda/graphs.py", tmp_path / "engine/runner.py"
    monkeypatch.setattr(door.torch, "__file__", str(tmp_path / "torch/__init__.py"), raising=False)
    scope = {"contextlib": contextlib, "site": _site.call_site}
    exec(compile("def inner():\n    with contextlib.ExitStack() as stack:\n        return site()", str(program), "exec"), scope)  # noqa: S102
    exec(compile("\n\ndef outer():\n    return inner()", str(engine), "exec"), scope)  # noqa: S102
    _site._machinery.cache_clear()
    assert scope["outer"]() == "engine/runner.py:4"
    _site._machinery.cache_clear()


def test_a_graph_that_the_program_keeps_is_not_touched(door):
    given = []
    call = door.library.call

    def look(name, *arguments):
        if name == "torch_capture_end":
            given.append(arguments[1]._obj)
        return call(name, *arguments)

    door.library.call = look
    capture(door, keep=True)
    capture(door)
    assert [(graph.raw, graph.lend, graph.memset_kernels) for graph in given] == [(0x1000, 0, 0), (0x1000, 1, 1)]


def test_who_asks_for_the_executable_gets_torchs_own(door):
    graph = capture(door)
    door.log.clear()
    assert graph.raw_cuda_graph_exec() == 0x2000
    assert calls(door) == ["torch_launched_by_hand", "torch_keep", "instantiate", "raw_cuda_graph_exec"]


@later
def test_what_torch_does_around_a_replay_is_done(door):
    graph = capture(door)
    seen = []
    graph.replay_hooks["hook"] = seen.append
    graph.replay()
    assert seen == [graph]
    assert calls(door)[-1] == "torch_replay"


@later
def test_an_executable_is_torchs_own_only_where_somebody_is_told_of_it(door):
    graph = capture(door)
    assert "instantiate" not in calls(door)
    graph.replay()
    assert calls(door) == ["torch_replay"]
    seen = []
    door.torch.cuda.graphs._global_instantiate_hooks["hook"] = lambda graph: seen.append(graph.raw_cuda_graph_exec())
    watched = capture(door)
    assert seen == [0x2000]
    names = calls(door)
    assert names.index("torch_capture_end") < names.index("torch_keep") < names.index("instantiate")
    del door.torch.cuda.graphs._global_instantiate_hooks["hook"]
    watched.replay()
    assert calls(door) == ["torch_replay"]


@later
def test_a_capture_that_is_torchs_own_makes_its_executable_as_it_ends(door):
    with vmmgraph.disabled():
        graph = capture(door)
    assert calls(door) == ["capture_begin", "capture_end", "instantiate"]
    graph.replay()
    assert calls(door) == ["replay"]


@later
def test_an_end_in_two_halves(door):
    graph, other = door.torch.cuda.CUDAGraph(), door.torch.cuda.CUDAGraph()
    graph.capture_begin((0, 50))
    graph.capture_end_pre()
    assert graph.raw_cuda_graph() == 0x1000
    with door.torch.cuda.graph(other, pool=(0, 50)):
        pass
    graph.instantiate()
    graph.capture_end_post()
    assert graph.pools() == [graph.pool()] == [(0, 50)]
    calls(door)
    graph.replay()
    assert calls(door) == ["torch_replay"]


@later
def test_a_first_half_that_fails_leaves_nothing(door):
    stub.BaseGraph.fail.add("capture_end")
    graph = door.torch.cuda.CUDAGraph()
    graph.capture_begin((0, 50))
    with pytest.raises(RuntimeError, match="capture_end failed"):
        graph.capture_end_pre()
    names = calls(door)
    assert names.index("reset") < names.index("torch_capture_abandon") < names.index("torch_group_close")
    assert graph.arena is None
    stub.BaseGraph.fail.clear()


@later
def test_a_hook_that_fails_at_the_end_leaves_a_graph_that_goes(door):
    graph = door.torch.cuda.CUDAGraph()

    def fail(graph):
        raise ZeroDivisionError

    graph.end_hooks["hook"] = fail
    with pytest.raises(ZeroDivisionError), door.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    assert calls(door)[-1] == "torch_group_seal_unwritten"
    del graph
    gc.collect()
    assert calls(door)[-3:] == ["torch_group_close", "arena_destroy", "device_trim"]


@later
def test_what_torch_does_as_a_graph_goes_is_done(door, monkeypatch):
    gone = []
    monkeypatch.setattr(door.base, "__del__", lambda graph: gone.append(graph._capture))
    graph = capture(door)
    del graph
    gc.collect()
    # After the package's cleanup.
    assert gone == [None]


def test_a_graph_that_others_may_launch_keeps_its_pages(door):
    """The graph may run at any time."""
    graph = capture(door, keep=True)
    assert calls(door)[-1] == "torch_group_seal_unwritten"
    graph.raw_cuda_graph()
    assert calls(door) == ["torch_launched_by_hand"]
    with vmmgraph.shape("decode 8"):
        pieces = []
        for _ in range(3):
            pieces.append(capture(door, (0, 50), keep=True))
            pieces[-1].raw_cuda_graph()
        names = calls(door)
        assert names.count("torch_group_open") == 1
        assert names.count("torch_launched_by_hand") == 3
        assert "torch_group_seal" not in names
    assert calls(door) == ["torch_group_seal"]


def test_many_captures_that_leave_much_alive_are_told_of_names_once(door, caplog):
    door.library.retained = 10 << 20
    pool = (0, 50)
    with caplog.at_level(logging.WARNING):
        with vmmgraph.shape("named"):
            kept = [capture(door, pool) for _ in range(20)]
        assert not caplog.records
        kept += [capture(door, pool) for _ in range(30)]
    assert [record.message.split(" alive")[0] for record in caplog.records] == ["vmmgraph: 12 captures left 120 MiB"]


def instantiated(door) -> int:
    return sum(entry[0] == "torch_group_instantiate" for entry in door.log)


def test_a_graph_is_instantiated_when_its_shape_is_sealed(door):
    graph = capture(door, (0, 50))
    assert instantiated(door) == 1
    graph.replay()
    assert instantiated(door) == 1
    # Not an error yet.
    door.library.answers["torch_group_instantiate"] = 200
    capture(door, (0, 50)).replay()
    with pytest.raises(_c.Error):
        vmmgraph.instantiate()


def test_graphs_are_instantiated_later_where_that_is_asked_for(door, monkeypatch):
    for given in ({"instantiate": "replay"}, {}):
        vmmgraph.disable_all()
        monkeypatch.setenv("VMMGRAPH_INSTANTIATE", "capture" if given else "replay")
        vmmgraph.enable(**given)
        door = _door.opened()
        graph = capture(door, (0, 60))
        graph.replay()
        assert instantiated(door) == 0
        vmmgraph.instantiate()
        assert instantiated(door) == 1
        door.log.clear()
    with pytest.raises(ValueError, match="capture, replay"):
        vmmgraph.enable(instantiate="never")


def test_a_failed_seal_can_be_tried_again(door):
    door.library.answers.update(torch_group_seal=200, torch_group_seal_unwritten=200)
    graph = capture(door)
    with pytest.raises(_c.Error):
        graph.replay()
    door.library.answers.clear()
    graph.replay()
    assert calls(door)[-2:] == ["torch_group_seal", "torch_replay"]


def test_a_replay_while_another_thread_captures_does_not_seal_its_shape(door):
    graph = capture(door, (0, 50))
    graph.replay()
    other = door.torch.cuda.CUDAGraph()
    other.capture_begin((0, 50))
    door.log.clear()
    graph.replay()
    assert calls(door) == ["torch_replay"]
    other.capture_end()
    assert sealed(door) == ["torch_group_seal_unwritten"]
    other.replay()
    assert calls(door) == ["torch_replay"]


def test_the_explicit_form(door):
    arena = vmmgraph.Arena(0, budget=1 << 30)
    graph = door.torch.cuda.CUDAGraph()
    with vmmgraph.graph(graph, arena=arena, label="decode 64"):
        pass
    assert graph.arena is arena
    assert graph.label == "decode 64"
    assert capture(door).arena is not arena
    with pytest.raises(ValueError, match="retain"):
        vmmgraph.Arena(0, retain="everything")


def test_the_explicit_form_wants_a_graph_of_ours(door):
    arena = vmmgraph.Arena(0)
    with pytest.raises(_c.Error, match="enable"), vmmgraph.graph(stub.BaseGraph(), arena=arena):
        pass


def test_the_explicit_form_names_one_capture(door, monkeypatch):
    arena, graph = vmmgraph.Arena(0), door.torch.cuda.CUDAGraph()

    class Refuses(door.torch.cuda.graph):
        def __enter__(self):
            raise RuntimeError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(door.torch.cuda, "graph", Refuses)
        with pytest.raises(RuntimeError, match="not now"), vmmgraph.graph(graph, arena=arena, label="first"):
            pass
    with door.torch.cuda.graph(graph):
        pass
    assert graph.arena is not arena
    assert graph.label == ""


def test_the_explicit_form_passes_exceptions_on(door):
    graph = door.torch.cuda.CUDAGraph()
    with pytest.raises(ZeroDivisionError), vmmgraph.graph(graph):
        raise ZeroDivisionError
    assert "capture_end" in calls(door)


def test_at_exit_every_graph_is_dropped_before_torch_goes(door):
    graphs = [capture(door, (0, 50)) for _ in range(3)]
    door.log.clear()
    _enable._at_exit()
    names = calls(door)
    assert names.count("torch_drop") == names.count("reset") == 3
    del graphs


def test_a_forked_child_drops_nothing_of_its_parents(door, monkeypatch):
    graph = capture(door, (0, 50))
    door.log.clear()
    monkeypatch.setattr(os, "getpid", lambda: door.process + 1)
    _enable._at_exit()
    assert not calls(door)
    del graph


def test_a_forked_worker_saves_the_map_of_what_it_captured(door, monkeypatch, tmp_path):
    def save_map(path, arena=None):
        Path(path).write_text("a map")

    monkeypatch.setattr("vmmgraph._door.save_map", save_map)
    monkeypatch.setenv("VMMGRAPH_MAP", str(tmp_path / "%p.json"))
    context = multiprocessing.get_context("fork")

    def work(captures):
        graphs = [capture(door, (0, 50)) for _ in range(captures)]
        del graphs

    workers = [context.Process(target=work, args=(captures,)) for captures in (1, 2, 0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{worker.pid}.json" for worker in workers[:2]}


def test_arguments_that_a_later_torch_has_are_passed_on(door, monkeypatch):
    seen = []
    core = _below.core_of(door.base)
    monkeypatch.setattr(core, "capture_begin", lambda self, *args, **kwargs: seen.append((args, kwargs)))
    graph = door.torch.cuda.CUDAGraph()
    graph.capture_begin(pool=(0, 50), capture_error_mode="thread_local", check_input_liveness=True)
    assert seen == [(((0, 50),), {"capture_error_mode": "thread_local", "check_input_liveness": True})]


def test_enabling_twice_is_once(door):
    cls = door.torch.cuda.CUDAGraph
    assert vmmgraph.enable() is vmmgraph.status()
    assert door.torch.cuda.CUDAGraph is cls


def test_no_library_is_one_line_or_an_error(monkeypatch, caplog):
    stub.use_torch(monkeypatch)
    monkeypatch.setattr(_door, "_door", None)
    monkeypatch.setattr(_enable, "_status", None)
    monkeypatch.setenv("VMMGRAPH_LIBRARY", "/nowhere/at/all.so")
    monkeypatch.delenv("VMMGRAPH_CORE_LIBRARY", raising=False)
    with pytest.raises(vmmgraph.Error, match="/nowhere/at/all.so"):
        vmmgraph.enable(strict=True)
    with caplog.at_level(logging.WARNING):
        chosen = vmmgraph.enable()
    assert not chosen
    assert chosen.route == "none"
    assert len(caplog.records) == 1
    assert "/nowhere/at/all.so" in caplog.records[0].message
