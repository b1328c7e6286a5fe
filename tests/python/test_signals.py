"""An exception from a signal (``KeyboardInterrupt``, a timeout) between any two lines or after any
call, or a refused call, leaves nothing under way."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import stub
import vmmgraph
from vmmgraph import _c

PACKAGE = str(Path(vmmgraph.__file__).parent)


class Signal(BaseException):
    pass


def between(session, work: Callable[[], None], number: int, ending: bool = False) -> object:
    """Signals before the package's n-th line. Returns the line, or ``None`` at the end."""
    passed, where = 0, None

    def lines(frame, event, argument):
        nonlocal passed, where
        name, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in spared(name):
            passed += 1
            if passed == number:
                where = Path(name).name, line
                raise Signal
        return lines

    def calls(frame, event, argument):
        return lines if frame.f_code.co_filename.startswith(PACKAGE) and collected(frame) == ending else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        work()
    except Signal:
        pass
    finally:
        sys.settrace(before)
    return where


def as_it_ends(session, work: Callable[[], None], number: int) -> object:
    """Like `between`, in finalizers, whose exceptions are dropped."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        where = between(session, lambda: (work(), gc.collect()), number, ending=True)
    finally:
        sys.unraisablehook = hook
    return where


def behind(session, work: Callable[[], None], number: int) -> object:
    """Like `between`, after the n-th call."""
    session.library.interrupt = stub.BaseGraph.interrupt = interrupt = Interrupt(number)
    try:
        work()
    except Signal:
        pass
    finally:
        session.library.interrupt = stub.BaseGraph.interrupt = None
    return interrupt.where


def refused(session, work: Callable[[], None], number: int) -> object:
    """Refuses the n-th call, except cleanup calls."""
    library, passed, where = session.library, 0, None
    call = library.call

    def refuse(name: str, *arguments: object) -> int:
        nonlocal passed, where
        passed += name not in ("torch_drop", "torch_eager_leave_of", "space_leave", "torch_remote_leave")
        if passed == number and where is None:
            where = name
            # A fallback to torch's memory, or a driver error.
            return _c.WRONG_STATE if number % 2 else 200
        return call(name, *arguments)

    library.call = refuse
    try:
        work()
    except _c.Error:
        pass
    finally:
        library.call = call
    return where


@functools.cache
def spared(name: str) -> set[int]:
    """Lines CPython traces without checking signals (`try`, and the end of `with`), and `finally`
    blocks, because no interrupted cleanup can be repaired."""
    lines = set()
    for node in ast.walk(ast.parse(Path(name).read_text())):
        if isinstance(node, (ast.Try, ast.With)):
            lines.add(node.lineno)
        for last in getattr(node, "finalbody", ()):
            lines.update(range(last.lineno, last.end_lineno + 1))
    return lines


def collected(frame: types.FrameType | None) -> bool:
    """Inside a finalizer, whose exceptions are dropped."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Interrupt:
    def __init__(self, number: int) -> None:
        self.left = number
        self.where: str | None = None

    def __call__(self, name: str) -> None:
        if not collected(sys._getframe()):
            self.left -= 1
            if self.left == 0:
                self.where = name
                raise Signal


def one(session) -> None:
    graph = session.torch.cuda.CUDAGraph()
    with session.torch.cuda.graph(graph, pool=(0, 50)):
        pass
    graph.replay()
    graph.reset()


def pieces(session) -> None:
    with vmmgraph.shape("pieces"):
        graphs = [session.torch.cuda.CUDAGraph() for _ in range(2)]
        for graph in graphs:
            with session.torch.cuda.graph(graph, pool=(0, 50)):
                pass
    graphs[0].replay()


def named(session) -> None:
    graph = session.torch.cuda.CUDAGraph()
    with vmmgraph.graph(graph, arena=next(iter(session.all_arenas)), label="named"):
        pass
    graph.replay()


def eager(session) -> None:
    """Captures and replays leave the scope."""
    with vmmgraph.eager(next(iter(session.all_arenas))):
        named(session)


def pool(session) -> None:
    with session.torch.cuda.use_mem_pool(session.mempool):
        graph = session.torch.cuda.CUDAGraph()
        with session.torch.cuda.graph(graph, pool=session.mempool.id):
            pass
        graph.replay()


def remote(session) -> None:
    with vmmgraph.remote(), vmmgraph.remote():
        one(session)


def in_turn(session) -> None:
    """Replays through torch."""
    session.library.replayable = False
    try:
        named(session)
    finally:
        session.library.replayable = True


@pytest.mark.parametrize("work", [one, pieces, named, eager, pool, remote, in_turn])
@pytest.mark.parametrize("way", [between, as_it_ends, behind, refused])
def test_what_comes_in_between_leaves_nothing_under_way(session, request, way, work) -> None:
    session.mempool = session.torch.cuda.MemPool()
    held = [session.torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, pool_id in zip(held, ((0, 50), session.mempool.id), strict=True):
        with session.torch.cuda.graph(graph, pool=pool_id):
            pass
    # Limits collections to new objects.
    gc.freeze()
    request.addfinalizer(gc.unfreeze)
    groups = set(session.library.groups)
    for number in itertools.count(1):
        session.log.clear()
        where = way(session, lambda: work(session), number)
        gc.collect()
        assert session.library.under_way == set(), (number, where)
        # The library refused its close.
        left = session.library.groups - groups
        assert len(left) == (way is refused and where == "torch_group_close"), (number, where)
        session.library.groups -= left
        # Its shape may query the graph.
        names = [entry[0] for entry in session.log]
        assert names.count("torch_capture_end") <= names.count("torch_drop"), (number, where)
        assert session.library.turns == [] and session.library.remote == 0, (number, where)
        assert session.eager.scopes.all == [], (number, where)
        assert session.thread_state.piece_groups == session.thread_state.disabled == [], (number, where)
        assert [group for arena in session.all_arenas for group in arena._open] == [], (number, where)
        # The same work succeeds afterwards.
        session.log.clear()
        work(session)
        gc.collect()
        assert "torch_capture_end" in [entry[0] for entry in session.log], (number, where)
        if where is None:
            break
    assert number > 5
