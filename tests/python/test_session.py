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
from vmmgraph import _base, _c, _enable, _session, _site

#: Releases with hooks around captures and replays.
later = pytest.mark.parametrize("session", ["LaterGraph"], indirect=True)


def calls(session) -> list[str]:
    left_out = ("torch_set_executable_limits", "space_stats", "torch_group_instantiate")
    names = [entry[0] for entry in session.log if entry[0] not in left_out]
    session.log.clear()
    return names


def capture(session, pool=None, keep=False, **more):
    graph = session.torch.cuda.CUDAGraph(keep_graph=keep) if keep else session.torch.cuda.CUDAGraph()
    with session.torch.cuda.graph(graph, pool=pool, **more):
        pass
    return graph


def opened(session) -> int:
    return sum(entry[0] == "torch_group_open" for entry in session.log)


def test_the_class_is_a_subclass_in_every_place(session):
    cuda = session.torch.cuda
    assert issubclass(cuda.CUDAGraph, session.base)
    assert cuda.CUDAGraph is cuda.graphs.CUDAGraph
    assert cuda.CUDAGraph.__name__ == "CUDAGraph"
    assert isinstance(cuda.CUDAGraph(), session.base)
    assert cuda.CUDAGraph(True)._kept
    vmmgraph.disable_all()
    assert cuda.CUDAGraph is cuda.graphs.CUDAGraph is session.base


def test_the_device_stays_open_between_captures_without_a_pool(session):
    for _ in range(3):
        graph = capture(session)
        del graph
        gc.collect()
    names = [entry[0] for entry in session.log]
    assert (names.count("arena_create"), names.count("arena_destroy")) == (3, 3)
    assert (names.count("device_open"), names.count("device_close")) == (1, 0)
    vmmgraph.disable_all()
    gc.collect()
    assert [entry[0] for entry in session.log].count("device_close") == 1


def test_a_name_that_was_imported_before_is_replaced_too(monkeypatch, session):
    vmmgraph.disable_all()
    engine = types.ModuleType("some_engine")
    engine.CUDAGraph = session.base
    monkeypatch.setitem(sys.modules, "some_engine", engine)
    vmmgraph.enable()
    assert engine.CUDAGraph is session.torch.cuda.CUDAGraph is not session.base
    vmmgraph.disable_all()
    assert engine.CUDAGraph is session.base


def test_a_capture_and_its_replays(session):
    graph = capture(session, (0, 50))
    assert calls(session) == [
        "device_open", "arena_create", "torch_group_open", "torch_group_space",
        "torch_capture_begin", "capture_begin", "torch_capture_begun", "capture_end", "torch_capture_end",
        "torch_group_seal_unwritten",
    ]  # fmt: skip
    for _ in range(3):
        graph.replay()
        assert calls(session) == ["torch_replay"]
    graph.reset()
    assert calls(session)[:3] == ["torch_drop", "reset", "torch_group_close"]
    calls(session)
    graph.replay()
    # Later releases create an executable first.
    assert calls(session)[-1] == "replay"


def test_a_replay_passes_over_a_class_that_only_passes_on(monkeypatch, session):
    # As in torch up to 2.13.
    graph = capture(session)
    graph.replay()
    passed = []
    with monkeypatch.context() as patched:
        patched.setattr(session.base, "replay", lambda self: passed.append(self))
        graph.replay()
    assert passed == ([] if session.base is stub.BaseGraph else [graph])


def test_a_class_that_captures_by_itself_is_the_one_below(session):
    vmmgraph.disable_all()
    session.torch.cuda.CUDAGraph = session.torch.cuda.graphs.CUDAGraph = stub.EarlierCore
    vmmgraph.enable()
    graph = capture(session)
    calls(session)
    graph.replay()
    assert isinstance(graph, stub.EarlierCore) and calls(session) == ["torch_replay"]


def test_what_others_do_around_a_replay_is_done(session):
    vmmgraph.disable_all()
    seen = []

    class Counting(session.base):
        def replay(self) -> None:
            seen.append(self)
            super().replay()

    session.torch.cuda.CUDAGraph = session.torch.cuda.graphs.CUDAGraph = Counting
    vmmgraph.enable()
    graph = capture(session)
    calls(session)
    graph.replay()
    assert seen == [graph] and calls(session) == ["torch_replay"]
    vmmgraph.disable_all()


def test_the_engines_pool_reaches_torch_and_names_the_arena(session):
    pool = (0, 50)
    first, second, other = capture(session, pool), capture(session, pool), capture(session, (0, 51))
    assert [entry[1] for entry in session.log if entry[0] == "capture_begin"] == [pool, pool, (0, 51)]
    assert first.arena is second.arena is not other.arena
    assert first.pool() == pool
    # TensorRT-LLM passes the last graph's pool.
    last = capture(session)
    assert capture(session, last.pool()).arena is last.arena
    assert capture(session).arena is not last.arena


def test_without_a_pool_share_means_one_arena(session):
    session.share = True
    graphs = [capture(session) for _ in range(3)]
    assert len({graph.arena for graph in graphs}) == 1
    assert {graph.pool() for graph in graphs} == {graphs[0].arena.pool}
    assert len(session.arenas) == 1

    def given() -> list[tuple[int, int]]:
        return [entry[1] for entry in session.log if entry[0] == "capture_begin"]

    pool = graphs[0].arena.pool
    graphs.append(capture(session, graphs[1].pool()))
    assert given()[-1] == pool
    # Torch may have freed this pool id, which other graphs still report.
    for at in (3, 0):
        graphs[at].reset()
    graphs.append(capture(session, graphs[1].pool()))
    assert given()[-1] not in given()[:-1]
    assert graphs[-1].arena is graphs[1].arena
    assert graphs[-1].pool() == pool


def test_an_arena_goes_with_its_last_graph_and_gives_its_pages_back(session):
    first, second = capture(session, (0, 50)), capture(session, (0, 50))
    del first
    gc.collect()
    assert "arena_destroy" not in calls(session)
    del second
    gc.collect()
    assert calls(session)[-2:] == ["arena_destroy", "device_trim"]


def test_a_graph_that_was_never_replayed_leaves_nothing_open(session):
    graph = capture(session, (0, 50))
    gc.disable()
    try:
        del graph
        # By reference counting alone, without a collection.
        assert calls(session)[-3:] == ["torch_group_close", "arena_destroy", "device_trim"]
    finally:
        gc.enable()


def adopted(session):
    """Returns a MemPool warmed up and captured into, and the graph."""
    pool = session.torch.cuda.MemPool()
    calls(session)
    with session.torch.cuda.use_mem_pool(pool):
        pass
    assert calls(session) == ["use_mem_pool", "mem_pool_used"]
    graph = capture(session, pool.id)
    return pool, graph


def test_a_mempool_that_is_captured_into_is_an_arena(session):
    pool, graph = adopted(session)
    assert calls(session)[:2] == ["torch_pool_empty", "device_open"]
    # Internally another pool.
    assert graph._capture.pool != pool.id == graph.pool()
    assert capture(session, pool.id).arena is capture(session, graph.pool()).arena is graph.arena
    assert "torch_pool_empty" not in calls(session)
    with session.torch.cuda.use_mem_pool(pool):
        assert calls(session) == ["torch_eager_enter"]
    assert calls(session) == ["torch_eager_leave_of"]
    with session.torch.cuda.use_mem_pool(pool, 0):
        pass
    with vmmgraph.disabled(), session.torch.cuda.use_mem_pool(pool):
        pass
    assert calls(session) == ["torch_eager_enter", "torch_eager_leave_of", "use_mem_pool", "mem_pool_used"]
    del graph
    gc.collect()
    assert "arena_destroy" not in calls(session)
    with session.torch.cuda.use_mem_pool(pool):
        pass
    assert calls(session) == ["torch_eager_enter", "torch_eager_leave_of"]
    del pool
    gc.collect()
    assert "arena_destroy" in calls(session)


def test_captures_and_replays_step_out_of_eager_work(session):
    pool, graph = adopted(session)
    graph.replay()
    other = capture(session, (0, 50))
    other.replay()
    calls(session)
    with session.torch.cuda.use_mem_pool(pool):
        graph.replay()
        other.replay()
        assert calls(session) == [
            "torch_eager_enter", "torch_eager_leave_of", "torch_replay", "torch_eager_enter", "torch_replay"
        ]  # fmt: skip
        capture(session, pool.id)
        names = calls(session)
        assert names[0] == "torch_eager_leave_of"
        assert names.index("torch_capture_end") < names.index("torch_eager_enter")
        for place in ("capture_begin", "capture_end"):
            stub.BaseGraph.fail = {place}
            with pytest.raises(RuntimeError):
                capture(session, pool.id)
            names = calls(session)
            assert names.count("torch_eager_leave_of") == names.count("torch_eager_enter") == 1, place
        stub.BaseGraph.fail = set()
        # A refused scope falls back to torch's memory.
        session.library.answers["torch_eager_enter"] = _c.WRONG_STATE
        graph.replay()
        assert "torch_eager_enter" in calls(session)
        session.library.answers.clear()
    assert calls(session) == []


def test_eager_work_of_several_arenas_is_left_from_within(session):
    (first, graph), (second, other) = adopted(session), adopted(session)
    graph.replay()
    other.replay()
    calls(session)
    with session.torch.cuda.use_mem_pool(first), session.torch.cuda.use_mem_pool(second):
        graph.replay()
    enter, leave = "torch_eager_enter", "torch_eager_leave_of"
    assert calls(session) == [enter, enter, leave, leave, "torch_replay", enter, enter, leave, leave]
    with session.torch.cuda.use_mem_pool(first):
        thread = threading.Thread(target=graph.replay)
        thread.start()
        thread.join()
    assert calls(session) == [enter, "torch_replay", leave]


def test_eager_work_that_another_thread_ends_is_over(session):
    (pool, graph), (other, second) = adopted(session), adopted(session)
    graph.replay()
    second.replay()
    calls(session)

    def work(pool):
        with session.torch.cuda.use_mem_pool(pool):
            yield

    def elsewhere(close):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    begun = work(pool)
    next(begun)
    elsewhere(begun.close)
    assert calls(session) == ["torch_eager_enter", "torch_eager_end"]
    # Neither left again nor re-entered.
    graph.replay()
    assert calls(session) == ["torch_replay"]
    with vmmgraph.eager(graph.arena):
        inner = work(other)
        next(inner)
        elsewhere(inner.close)
        assert calls(session) == ["torch_eager_enter", "torch_eager_enter", "torch_eager_end"]
        graph.replay()
        assert calls(session) == ["torch_eager_leave_of", "torch_replay", "torch_eager_enter"]
    assert calls(session) == ["torch_eager_leave_of"]


def test_eager_work_of_several_arenas_ends_in_any_order(session):
    """Like interleaved tasks of one thread."""
    arenas = [vmmgraph.Arena(0) for _ in range(3)]
    scopes = [contextlib.ExitStack() for _ in arenas]
    for scope, arena in zip(scopes, arenas, strict=True):
        scope.enter_context(vmmgraph.eager(arena))
    handles = [arena.handle.value for arena in arenas]
    assert session.library.turns == handles
    scopes[1].close()
    assert session.library.turns == [handles[0], handles[2]]
    # Its own and all inner scopes are left and re-entered.
    graph = session.torch.cuda.CUDAGraph()
    with vmmgraph.graph(graph, arena=arenas[0]):
        assert session.library.turns == []
    assert session.library.turns == [handles[0], handles[2]]
    scopes[0].close()
    assert session.library.turns == [handles[2]]
    scopes[2].close()
    assert session.library.turns == []


def test_eager_work_says_what_it_needs(session):
    graph = capture(session, (0, 50))
    graph.replay()
    session.log.clear()
    with vmmgraph.eager(graph.arena, bytes=5 << 20):
        graph.replay()
    eager = [(entry[0], *entry[2:]) for entry in session.log if entry[0].startswith("torch_eager")]
    enter, leave = ("torch_eager_enter_of", 5 << 20), ("torch_eager_leave_of",)
    assert eager == [enter, leave, enter, leave]


def test_eager_work_that_is_refused_is_torchs(session, caplog):
    pool, graph = adopted(session)
    graph.replay()
    session.library.answers["torch_eager_enter"] = _c.WRONG_STATE
    calls(session)
    for _ in range(2):
        with session.torch.cuda.use_mem_pool(pool):
            pass
    assert calls(session) == ["torch_eager_enter", "use_mem_pool", "mem_pool_used"] * 2
    assert sum("torch's own memory" in record.message for record in caplog.records) == 1
    with pytest.raises(_c.Error), vmmgraph.eager(graph.arena):
        pass
    session.library.answers.clear()
    calls(session)
    with vmmgraph.eager(graph.arena):
        pass
    assert calls(session) == ["torch_eager_enter", "torch_eager_leave_of"]


def test_a_mempool_with_something_alive_or_options_stays_torchs(session):
    cuda = session.torch.cuda
    pool = cuda.MemPool()
    session.library.answers["torch_pool_empty"] = session.library.answers["torch_capture_begin"] = _c.WRONG_STATE
    assert capture(session, pool.id).arena is None
    with cuda.use_mem_pool(pool):
        pass
    assert "use_mem_pool" in calls(session)
    session.library.answers.clear()
    for options in ({"allocator": object()}, {"use_on_oom": True}, {"no_split": True}):
        capture(session, cuda.MemPool(**options).id)
        assert "torch_pool_empty" not in calls(session)
    vmmgraph.disable_all()
    before = cuda.MemPool()
    vmmgraph.enable()
    capture(session, before.id)
    assert "torch_pool_empty" not in calls(session)


def test_a_mempool_that_torch_lost_never_ends(session):
    pool = session.torch.cuda.MemPool()
    session.library.answers["torch_pool_empty"] = _c.INTERNAL
    count = sys.getrefcount(pool)
    graph = capture(session, pool.id)
    assert sys.getrefcount(pool) == count + 1
    assert graph.arena is not None


def test_a_capture_is_sealed_when_it_ends(session):
    """Later writes meet no seal."""
    pool = (0, 50)
    first = capture(session, pool)
    assert calls(session)[-2:] == ["torch_capture_end", "torch_group_seal_unwritten"]
    second = capture(session, pool)
    assert sealed(session) == ["torch_group_seal_unwritten"]
    for graph in (first, second):
        graph.replay()
        with vmmgraph.eager(graph.arena):
            pass
        assert calls(session) == ["torch_replay", "torch_eager_enter", "torch_eager_leave_of"]
    # A replay repeats a refused seal.
    session.library.answers.update(torch_group_seal=200, torch_group_seal_unwritten=200)
    third = capture(session, pool)
    with pytest.raises(_c.Error, match="a reason"):
        third.replay()
    session.library.answers.clear()
    calls(session)
    third.replay()
    assert calls(session) == ["torch_group_seal", "torch_replay"]


def test_pieces_are_sealed_when_none_will_follow_or_somebody_else_uses_the_arena(session):
    pool = (0, 50)
    with vmmgraph.shape("prefill"):
        pieces = [capture(session, pool) for _ in range(2)]
        assert not sealed(session)
    assert sealed(session) == ["torch_group_seal"]
    assert pieces[0]._group is pieces[1]._group
    # For a graph with exposed handle, the refusal raises at once.
    for keep in (False, True):
        with pytest.raises(_c.Error) if keep else contextlib.nullcontext(), vmmgraph.shape("prefill"):
            tried = capture(session, pool, keep=keep)
            if keep:
                tried.raw_cuda_graph()
            session.library.answers["torch_group_seal"] = 200
        session.library.answers.clear()
        assert not tried._group.sealed
        tried.replay()
        assert tried._group.sealed
    # The end of an engine's context is unknown: a replay or eager work of the arena seals.
    context, other = object(), capture(session, pool)
    session.label_providers.append(lambda: (context, "decode 8"))
    third = capture(session, pool)
    calls(session)
    other.replay()
    assert calls(session) == ["torch_group_seal", "torch_replay"]
    third.replay()
    assert calls(session) == ["torch_replay"]
    context = object()
    fourth = capture(session, pool)
    session.library.answers["torch_group_seal"] = 200
    calls(session)
    with pytest.raises(_c.Error), vmmgraph.eager(other.arena):
        pass
    assert calls(session) == ["torch_group_seal"]
    session.library.answers.clear()
    with vmmgraph.eager(other.arena):
        assert calls(session) == ["torch_group_seal", "torch_eager_enter"]
        context = object()
        fifth = capture(session, pool)
        assert calls(session)[-3:] == ["torch_capture_end", "torch_group_seal", "torch_eager_enter"]
    assert fourth._group.sealed and fifth._group.sealed
    # Also by an unrelated capture, before its space opens.
    context = object()
    sixth = capture(session, pool)
    context = object()
    calls(session)
    seventh = capture(session, pool)
    assert sixth._group is not seventh._group
    names = calls(session)
    assert names.index("torch_group_seal") < names.index("torch_group_open")


def test_shapes_that_threads_capture_at_once_are_sealed_each(session):
    pool = (0, 50)
    first, second = session.torch.cuda.CUDAGraph(), session.torch.cuda.CUDAGraph()
    first.capture_begin(pool)

    def elsewhere(graph):
        thread = threading.Thread(target=graph.capture_begin, args=(pool,))
        thread.start()
        thread.join()

    elsewhere(second)
    calls(session)
    first.capture_end()
    assert sealed(session) == ["torch_group_seal_unwritten"]
    assert (first._group.sealed, second._group.sealed) == (True, False)
    first.replay()
    assert not sealed(session)
    second.capture_end()
    assert sealed(session) == ["torch_group_seal_unwritten"]
    # Interleaved pieces of two shapes: the other's capture ends a shape.
    with vmmgraph.shape("mine"):
        mine = [capture(session, pool)]
        third = session.torch.cuda.CUDAGraph()
        elsewhere(third)
        mine.append(capture(session, pool))
        third.capture_end()
    assert mine[0]._group is not third._group
    first.replay()
    assert all(graph._group.sealed for graph in (*mine, third))
    assert first.arena._open == []


def test_captures_into_an_arena_that_no_pool_names_have_an_id_each(session):
    """Torch allows one capture at a time per id, and none into an id whose graphs are destroyed."""
    arena = vmmgraph.Arena(0)

    def begun(**more):
        graph = session.torch.cuda.CUDAGraph()
        graph._named = more.pop("arena", None), ""
        graph.capture_begin(**more)
        return graph

    session.log.clear()
    graphs = [begun(arena=arena), begun(arena=arena)]
    ids = [entry[1] for entry in session.log if entry[0] == "capture_begin"]
    assert ids[0] == arena.pool
    assert ids[1] != arena.pool
    for graph in graphs:
        graph.capture_end()
    # The program sees one id.
    assert [graph.pool() for graph in graphs] == [arena.pool] * 2
    assert capture(session, arena.pool).arena is arena
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
    session.log.clear()
    kept = [begun(pool=(0, 50)), begun(pool=(0, 50))]
    assert [entry[1] for entry in session.log if entry[0] == "capture_begin"] == [(0, 50)] * 2
    assert kept[0].arena is kept[1].arena


def sealed(session) -> list[str]:
    return [name for name in calls(session) if name.startswith("torch_group_seal")]


def test_what_outlives_a_shape_that_is_never_replayed_is_nobody_elses(session):
    """Tensors may be alive, and other replays would overwrite these."""
    pool, context = (0, 50), object()
    session.label_providers.append(lambda: (context, "prefill"))
    pieces = [capture(session, pool) for _ in range(2)]
    calls(session)
    pieces.pop().reset()
    assert "torch_group_seal" not in calls(session)
    pieces.pop().reset()
    names = calls(session)
    assert names.index("torch_group_seal") < names.index("torch_group_close")
    session.label_providers.clear()
    stub.BaseGraph.fail = {"capture_end"}
    with pytest.raises(RuntimeError) as failed:
        capture(session, pool)
    # Although the traceback holds the graph.
    assert failed.value.__traceback__ is not None
    names = calls(session)
    assert names.index("torch_capture_abandon") < names.index("torch_group_seal_unwritten")
    # Earlier pieces may have been written.
    with vmmgraph.shape("prefill"):
        stub.BaseGraph.fail = set()
        first = capture(session, pool)
        stub.BaseGraph.fail = {"capture_end"}
        first.reset()
        with pytest.raises(RuntimeError):
            capture(session, pool)
    assert calls(session).count("torch_group_seal") == 2
    stub.BaseGraph.fail = set()


def test_pieces_of_one_shape_have_one_space(session):
    pool = (0, 50)
    with vmmgraph.shape("prefill 2048"):
        pieces = [capture(session, pool) for _ in range(3)]
    assert opened(session) == 1
    assert [piece._piece for piece in pieces] == [0, 1, 2]
    assert {piece.label for piece in pieces} == {"prefill 2048"}
    with vmmgraph.shape("prefill 2048"):
        again = capture(session, pool)
    assert opened(session) == 2
    for piece in pieces:
        piece.replay()
    assert sum(name == "torch_group_seal" for name in calls(session)) == 2
    assert again.arena is pieces[0].arena


def test_an_engines_context_names_pieces(session):
    context, other = object(), object()
    current = [(context, "decode 8")]
    session.label_providers.append(lambda: current[0])
    graphs = [capture(session, (0, 50)) for _ in range(2)]
    current[0] = (other, "decode 4")
    graphs.append(capture(session, (0, 50)))
    current[0] = None
    graphs.append(capture(session, (0, 50)))
    assert opened(session) == 3
    assert [graph.label for graph in graphs] == ["decode 8", "decode 8", "decode 4", ""]


def test_an_engines_context_goes_when_its_shape_is_sealed(session):
    import weakref

    class Context:
        pass

    context = Context()
    gone = weakref.ref(context)
    session.label_providers.append(lambda: (context, "decode 8"))
    graph = capture(session, (0, 50))
    session.label_providers.clear()
    context = None
    assert gone() is not None
    graph.replay()
    assert gone() is None


def test_captures_that_are_disabled_are_torchs_and_never_in_an_arenas_pool(session):
    pool = (0, 50)
    ours = capture(session, pool)
    session.log.clear()
    with vmmgraph.disabled():
        theirs = capture(session, pool)
        untouched = capture(session, (0, 99))
    begun = [entry[1] for entry in session.log if entry[0] == "capture_begin"]
    assert begun[0] != pool
    assert begun[1] == (0, 99)
    assert not [name for name in calls(session) if name.startswith("torch_")]
    theirs.replay()
    untouched.replay()
    assert calls(session) == ["replay", "replay"]
    assert ours.arena is not None
    assert theirs.arena is None


def test_disabled_is_of_one_thread(session):
    graphs = []
    with vmmgraph.disabled():
        thread = threading.Thread(target=lambda: graphs.append(capture(session)))
        thread.start()
        thread.join()
    assert graphs[0].arena is not None


def test_what_peers_use_is_marked_while_the_scope_lasts(session):
    with vmmgraph.remote(), vmmgraph.remote():
        pass
    with contextlib.suppress(KeyError), vmmgraph.remote():
        raise KeyError
    enter, leave = "torch_remote_enter", "torch_remote_leave"
    assert calls(session) == [enter, leave, enter, leave]


def test_scopes_of_remote_blocks_end_in_any_order(session):
    outer, inner = vmmgraph.remote(), vmmgraph.remote()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert session.library.remote == 1
    inner.__exit__(None, None, None)
    assert session.library.remote == 0


def test_a_scope_that_another_thread_has_ended_says_so(session):
    scope = vmmgraph.remote()
    scope.__enter__()
    session.library.answers["torch_remote_leave"] = 100
    with pytest.raises(vmmgraph.Error):
        scope.__exit__(None, None, None)


def test_arenas_are_made_with_the_policy_that_was_asked_for(session):
    session.retain = "shared_remote"
    graph = capture(session, (0, 50))
    assert session.library.retain == 4
    assert graph.arena is not None
    with pytest.raises(ValueError, match="cannot use retain="):
        vmmgraph.enable(retain="for ever")


def test_a_begin_that_throws_is_withdrawn(session):
    stub.BaseGraph.fail.add("capture_begin")
    graph = session.torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capture_begin failed"):
        graph.capture_begin()
    names = calls(session)
    assert names.index("capture_begin") < names.index("torch_capture_abandon")
    stub.BaseGraph.fail.clear()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()


def test_an_end_that_throws_is_cleaned_up_and_the_graph_can_be_captured_again(session):
    graph = session.torch.cuda.CUDAGraph()
    stub.BaseGraph.fail.add("capture_end")
    with pytest.raises(RuntimeError, match="capture_end failed"), session.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    abandoned = [entry for entry in session.log if entry[0] == "torch_capture_abandon"]
    assert [entry[2:] for entry in abandoned] == [(0, 50)]
    assert graph.arena is None
    stub.BaseGraph.fail.clear()
    with session.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    graph.replay()
    assert graph.arena is not None


def test_an_exception_in_the_body_leaves_a_graph_as_torch_does(session):
    graph = session.torch.cuda.CUDAGraph()
    with pytest.raises(ZeroDivisionError), session.torch.cuda.graph(graph, pool=(0, 50)):
        raise ZeroDivisionError
    graph.replay()
    assert "torch_replay" in calls(session)


def test_what_the_library_refuses_of_a_capture_is_torchs_own(session, caplog):
    session.library.answers["torch_capture_begin"] = _c.WRONG_STATE
    with caplog.at_level(logging.WARNING):
        graph, again = capture(session, (0, 50)), capture(session, (0, 50))
    assert graph.arena is again.arena is None
    # Logged once.
    assert [record.message for record in caplog.records] == ["vmmgraph: a capture in torch's own memory: a reason"]
    session.library.answers["torch_capture_begin"] = 200
    with pytest.raises(_c.Error, match="a reason"):
        capture(session, (0, 50))


def test_where_the_address_is_not_known_replays_go_through_torch_in_turn(session):
    session.library.replayable = False
    graph = capture(session)
    session.log.clear()
    graph.replay()
    # Later releases create the executable in Python.
    made = [] if session.base is stub.BaseGraph else ["instantiate"]
    assert calls(session) == [*made, "space_enter", "replay", "space_leave"]
    stub.BaseGraph.fail.add("replay")
    with pytest.raises(RuntimeError, match="replay failed"):
        graph.replay()
    # Otherwise replays would block.
    assert calls(session) == ["space_enter", "replay", "space_leave"]


def test_a_shape_says_where_it_was_captured(session, monkeypatch, tmp_path):
    session.library.quiet.clear()
    graph = session.torch.cuda.CUDAGraph()
    line = sys._getframe().f_lineno + 1
    graph.capture_begin(pool=(0, 50))
    graph.capture_end()
    here = f"python/test_session.py:{line}"
    assert [entry for entry in session.log if entry[0] == "space_set_site"] == [
        ("space_set_site", graph._group.space.value, here.encode())
    ]
    # Skips frames of torch, this package and context managers.
    program, engine = tmp_path / "torch/cuda/graphs.py", tmp_path / "engine/runner.py"
    monkeypatch.setattr(session.torch, "__file__", str(tmp_path / "torch/__init__.py"), raising=False)
    scope = {"contextlib": contextlib, "site": _site.call_site}
    exec(compile("def inner():\n    with contextlib.ExitStack() as stack:\n        return site()", str(program), "exec"), scope)  # noqa: S102
    exec(compile("\n\ndef outer():\n    return inner()", str(engine), "exec"), scope)  # noqa: S102
    _site._machinery.cache_clear()
    assert scope["outer"]() == "engine/runner.py:4"
    _site._machinery.cache_clear()


def test_a_graph_that_the_program_keeps_is_not_touched(session):
    given = []
    call = session.library.call

    def look(name, *arguments):
        if name == "torch_capture_end":
            given.append(arguments[1]._obj)
        return call(name, *arguments)

    session.library.call = look
    capture(session, keep=True)
    capture(session)
    assert [(graph.raw, graph.lend, graph.memset_kernels) for graph in given] == [(0x1000, 0, 0), (0x1000, 1, 1)]


def test_who_asks_for_the_executable_gets_torchs_own(session):
    graph = capture(session)
    session.log.clear()
    assert graph.raw_cuda_graph_exec() == 0x2000
    assert calls(session) == ["torch_launched_by_hand", "torch_keep", "instantiate", "raw_cuda_graph_exec"]


@later
def test_what_torch_does_around_a_replay_is_done(session):
    graph = capture(session)
    seen = []
    graph.replay_hooks["hook"] = seen.append
    graph.replay()
    assert seen == [graph]
    assert calls(session)[-1] == "torch_replay"


@later
def test_an_executable_is_torchs_own_only_where_somebody_is_told_of_it(session):
    graph = capture(session)
    assert "instantiate" not in calls(session)
    graph.replay()
    assert calls(session) == ["torch_replay"]
    seen = []
    session.torch.cuda.graphs._global_instantiate_hooks["hook"] = lambda graph: seen.append(graph.raw_cuda_graph_exec())
    watched = capture(session)
    assert seen == [0x2000]
    names = calls(session)
    assert names.index("torch_capture_end") < names.index("torch_keep") < names.index("instantiate")
    del session.torch.cuda.graphs._global_instantiate_hooks["hook"]
    watched.replay()
    assert calls(session) == ["torch_replay"]


@later
def test_a_capture_that_is_torchs_own_makes_its_executable_as_it_ends(session):
    with vmmgraph.disabled():
        graph = capture(session)
    assert calls(session) == ["capture_begin", "capture_end", "instantiate"]
    graph.replay()
    assert calls(session) == ["replay"]


@later
def test_an_end_in_two_halves(session):
    graph, other = session.torch.cuda.CUDAGraph(), session.torch.cuda.CUDAGraph()
    graph.capture_begin((0, 50))
    graph.capture_end_pre()
    assert graph.raw_cuda_graph() == 0x1000
    with session.torch.cuda.graph(other, pool=(0, 50)):
        pass
    graph.instantiate()
    graph.capture_end_post()
    assert graph.pools() == [graph.pool()] == [(0, 50)]
    calls(session)
    graph.replay()
    assert calls(session) == ["torch_replay"]


@later
def test_a_first_half_that_fails_leaves_nothing(session):
    stub.BaseGraph.fail.add("capture_end")
    graph = session.torch.cuda.CUDAGraph()
    graph.capture_begin((0, 50))
    with pytest.raises(RuntimeError, match="capture_end failed"):
        graph.capture_end_pre()
    names = calls(session)
    assert names.index("reset") < names.index("torch_capture_abandon") < names.index("torch_group_close")
    assert graph.arena is None
    stub.BaseGraph.fail.clear()


@later
def test_a_hook_that_fails_at_the_end_leaves_a_graph_that_goes(session):
    graph = session.torch.cuda.CUDAGraph()

    def fail(graph):
        raise ZeroDivisionError

    graph.end_hooks["hook"] = fail
    with pytest.raises(ZeroDivisionError), session.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    assert calls(session)[-1] == "torch_group_seal_unwritten"
    del graph
    gc.collect()
    assert calls(session)[-3:] == ["torch_group_close", "arena_destroy", "device_trim"]


@later
def test_what_torch_does_as_a_graph_goes_is_done(session, monkeypatch):
    gone = []
    monkeypatch.setattr(session.base, "__del__", lambda graph: gone.append(graph._capture))
    graph = capture(session)
    del graph
    gc.collect()
    # After the package's cleanup.
    assert gone == [None]


def test_a_graph_that_others_may_launch_keeps_its_pages(session):
    """The graph may run at any time."""
    graph = capture(session, keep=True)
    assert calls(session)[-1] == "torch_group_seal_unwritten"
    graph.raw_cuda_graph()
    assert calls(session) == ["torch_launched_by_hand"]
    with vmmgraph.shape("decode 8"):
        pieces = []
        for _ in range(3):
            pieces.append(capture(session, (0, 50), keep=True))
            pieces[-1].raw_cuda_graph()
        names = calls(session)
        assert names.count("torch_group_open") == 1
        assert names.count("torch_launched_by_hand") == 3
        assert "torch_group_seal" not in names
    assert calls(session) == ["torch_group_seal"]


def test_many_captures_that_leave_much_alive_are_told_of_names_once(session, caplog):
    session.library.retained = 10 << 20
    pool = (0, 50)
    with caplog.at_level(logging.WARNING):
        with vmmgraph.shape("named"):
            kept = [capture(session, pool) for _ in range(20)]
        assert not caplog.records
        kept += [capture(session, pool) for _ in range(30)]
    assert [record.message.split(" alive")[0] for record in caplog.records] == ["vmmgraph: 12 captures left 120 MiB"]


def instantiated(session) -> int:
    return sum(entry[0] == "torch_group_instantiate" for entry in session.log)


def test_a_graph_is_instantiated_when_its_shape_is_sealed(session):
    graph = capture(session, (0, 50))
    assert instantiated(session) == 1
    graph.replay()
    assert instantiated(session) == 1
    # Not an error yet.
    session.library.answers["torch_group_instantiate"] = 200
    capture(session, (0, 50)).replay()
    with pytest.raises(_c.Error):
        vmmgraph.instantiate()


def test_graphs_are_instantiated_later_where_that_is_asked_for(session, monkeypatch):
    for given in ({"instantiate": "replay"}, {}):
        vmmgraph.disable_all()
        monkeypatch.setenv("VMMGRAPH_INSTANTIATE", "capture" if given else "replay")
        vmmgraph.enable(**given)
        session = _session.opened()
        graph = capture(session, (0, 60))
        graph.replay()
        assert instantiated(session) == 0
        vmmgraph.instantiate()
        assert instantiated(session) == 1
        session.log.clear()
    with pytest.raises(ValueError, match="capture, replay"):
        vmmgraph.enable(instantiate="never")


def test_a_failed_seal_can_be_tried_again(session):
    session.library.answers.update(torch_group_seal=200, torch_group_seal_unwritten=200)
    graph = capture(session)
    with pytest.raises(_c.Error):
        graph.replay()
    session.library.answers.clear()
    graph.replay()
    assert calls(session)[-2:] == ["torch_group_seal", "torch_replay"]


def test_a_replay_while_another_thread_captures_does_not_seal_its_shape(session):
    graph = capture(session, (0, 50))
    graph.replay()
    other = session.torch.cuda.CUDAGraph()
    other.capture_begin((0, 50))
    session.log.clear()
    graph.replay()
    assert calls(session) == ["torch_replay"]
    other.capture_end()
    assert sealed(session) == ["torch_group_seal_unwritten"]
    other.replay()
    assert calls(session) == ["torch_replay"]


def test_the_explicit_form(session):
    arena = vmmgraph.Arena(0, budget=1 << 30)
    graph = session.torch.cuda.CUDAGraph()
    with vmmgraph.graph(graph, arena=arena, label="decode 64"):
        pass
    assert graph.arena is arena
    assert graph.label == "decode 64"
    assert capture(session).arena is not arena
    with pytest.raises(ValueError, match="retain"):
        vmmgraph.Arena(0, retain="everything")


def test_the_explicit_form_wants_a_graph_of_ours(session):
    arena = vmmgraph.Arena(0)
    with pytest.raises(_c.Error, match="enable"), vmmgraph.graph(stub.BaseGraph(), arena=arena):
        pass


def test_the_explicit_form_names_one_capture(session, monkeypatch):
    arena, graph = vmmgraph.Arena(0), session.torch.cuda.CUDAGraph()

    class Refuses(session.torch.cuda.graph):
        def __enter__(self):
            raise RuntimeError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(session.torch.cuda, "graph", Refuses)
        with pytest.raises(RuntimeError, match="not now"), vmmgraph.graph(graph, arena=arena, label="first"):
            pass
    with session.torch.cuda.graph(graph):
        pass
    assert graph.arena is not arena
    assert graph.label == ""


def test_the_explicit_form_passes_exceptions_on(session):
    graph = session.torch.cuda.CUDAGraph()
    with pytest.raises(ZeroDivisionError), vmmgraph.graph(graph):
        raise ZeroDivisionError
    assert "capture_end" in calls(session)


def test_at_exit_every_graph_is_dropped_before_torch_goes(session):
    graphs = [capture(session, (0, 50)) for _ in range(3)]
    session.log.clear()
    _enable._at_exit()
    names = calls(session)
    assert names.count("torch_drop") == names.count("reset") == 3
    del graphs


def test_a_forked_child_drops_nothing_of_its_parents(session, monkeypatch):
    graph = capture(session, (0, 50))
    session.log.clear()
    monkeypatch.setattr(os, "getpid", lambda: session.process + 1)
    _enable._at_exit()
    assert not calls(session)
    del graph


def test_a_forked_worker_saves_the_map_of_what_it_captured(session, monkeypatch, tmp_path):
    def save_map(path, arena=None):
        Path(path).write_text("a map")

    monkeypatch.setattr("vmmgraph._session.save_map", save_map)
    monkeypatch.setenv("VMMGRAPH_MAP", str(tmp_path / "%p.json"))
    context = multiprocessing.get_context("fork")

    def work(captures):
        graphs = [capture(session, (0, 50)) for _ in range(captures)]
        del graphs

    workers = [context.Process(target=work, args=(captures,)) for captures in (1, 2, 0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{worker.pid}.json" for worker in workers[:2]}


def test_arguments_that_a_later_torch_has_are_passed_on(session, monkeypatch):
    seen = []
    core = _base.core_of(session.base)
    monkeypatch.setattr(core, "capture_begin", lambda self, *args, **kwargs: seen.append((args, kwargs)))
    graph = session.torch.cuda.CUDAGraph()
    graph.capture_begin(pool=(0, 50), capture_error_mode="thread_local", check_input_liveness=True)
    assert seen == [(((0, 50),), {"capture_error_mode": "thread_local", "check_input_liveness": True})]


def test_enabling_twice_is_once(session):
    cls = session.torch.cuda.CUDAGraph
    assert vmmgraph.enable() is vmmgraph.status()
    assert session.torch.cuda.CUDAGraph is cls


def test_no_library_is_one_line_or_an_error(monkeypatch, caplog):
    stub.use_torch(monkeypatch)
    monkeypatch.setattr(_session, "_session", None)
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


def test_a_reason_of_both_routes_is_named_once(monkeypatch, caplog):
    def refused():
        raise OSError("libcudnn.so.9 is missing")

    monkeypatch.setattr(_session, "need", refused)
    monkeypatch.setattr("vmmgraph._mempool.install", refused)
    monkeypatch.setattr(_enable, "_status", None)
    assert vmmgraph.enable().why == "libcudnn.so.9 is missing"
    assert caplog.text.count("libcudnn.so.9") == 1
