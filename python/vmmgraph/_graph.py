"""The replacement of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from ctypes import byref, c_uint64
from typing import Any

from . import _base, _c
from ._arena import Arena, GraphGroup, address_of
from ._session import Capture, Pool, Session

#: Value of `_ready` while the arena may have open graph groups.
NEVER_READY = (True, None, None)


def graph_class(session: Session, base: type) -> type:
    core = _base.core_of(base)
    keeps = hasattr(core, "raw_cuda_graph") and hasattr(core, "instantiate")
    raw = session.library.raw
    enter, leave = raw["space_enter"], raw["space_leave"]
    launch = session.library.prepared("torch_replay")
    thread_state = session.thread_state
    scopes, step_out, step_in = session.eager.scopes, session.eager.step_out, session.eager.step_in

    class Captured(core):  # type: ignore[misc, valid-type]
        """Torch's C++ graph, capturing into VmmGraph's memory."""

        # `None`: captured in torch's memory.
        _group: GraphGroup | None = None
        _piece = 0
        # Whether the library can replay the graph, because torch's object has the expected layout.
        _replayable = False
        # Open groups of the graph's arena, and the arguments of a replay while none are open.
        _ready: Any = NEVER_READY
        _capture: Capture | None = None
        _named: tuple[Arena | None, str] = (None, "")
        _lent = False
        _kept = False
        _keeps = False

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            import torch

            asked = args[0] if args else kwargs.get("pool")
            pool = None if asked is None or not any(asked) else (int(asked[0]), int(asked[1]))
            device = torch.cuda.current_device()
            (arena, label), self._named = self._named, (None, "")
            if thread_state.disabled:
                return self._begin_own(device, pool, args, kwargs)
            capture = Capture(session, arena, label)
            try:
                self._begin(capture, device, pool, args, kwargs)
            except BaseException:
                capture.close()
                raise

        def _begin(self, capture: Capture, device: int, pool: Pool | None, args: Any, kwargs: Any) -> None:
            session.begin(capture, device, pool)
            group = capture.group
            assert group is not None
            # From here on torch may run Python code and destroy graphs.
            status = raw["torch_capture_begin"](group.handle, *capture.pool, int(not session.torch_has_graphs()))
            if status != _c.OK:
                error = session.library.error("torch_capture_begin", status)
                if status != _c.WRONG_STATE:
                    raise error
                capture.close()
                session.torchs_graphs.add(self)
                session.once(str(error), f"a capture in torch's own memory: {error}")
                del group
                return super().capture_begin(*args, **kwargs)
            given, more = self._with_pool(capture.pool, args, kwargs)
            super().capture_begin(*given, **more)
            status = raw["torch_capture_begun"](group.handle)
            if status != _c.OK:
                error = session.library.error("torch_capture_begun", status)
                capture.close()
                session.torchs_graphs.add(self)
                session.once("ignored", f"a capture in torch's own memory: {error}")
                return
            session.graphs.add(self)
            self._group, self._capture = group, capture

        def _begin_own(self, device: int, pool: Pool | None, args: Any, kwargs: Any) -> None:
            session.torchs_graphs.add(self)
            alias = session.alias(device, pool)
            if alias is not None:
                args, kwargs = self._with_pool(alias, args, kwargs)
            super().capture_begin(*args, **kwargs)

        @staticmethod
        def _with_pool(pool: Pool, args: Any, kwargs: Any) -> Any:
            return (pool, *args[1:]), {name: value for name, value in kwargs.items() if name != "pool"}

        def capture_end(self, *args: Any, **kwargs: Any) -> None:
            self._end(super().capture_end, *args, **kwargs)

        def capture_end_pre(self) -> None:
            """First half of a two-part end (2.14 and later): the graph can be inspected and
            edited."""
            self._end(super().capture_end_pre)

        def _end(self, torchs: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            capture = self._under_way()
            if capture is None:
                return torchs(*args, **kwargs)
            try:
                torchs(*args, **kwargs)
                self._captured(capture)
            except BaseException:
                self._abandon(capture)
                raise
            finally:
                capture.step_in()

        def _under_way(self) -> Capture | None:
            capture = self._capture
            return capture if capture is not None and capture.under_way else None

        def _captured(self, capture: Capture) -> None:
            group = capture.group
            assert group is not None
            lend = self._keeps and not self._kept
            graph = _c.Graph(
                graph=address_of(self),
                pool_first=capture.pool[0],
                pool_second=capture.pool[1],
                raw=super().raw_cuda_graph() if self._keeps else None,
                lend=lend,
                memset_kernels=lend and session.memset_kernels,
            )
            captured = capture.captured
            session.library.torch_capture_end(group.handle, byref(graph), byref(captured))
            if not captured.replayable:
                session.once("indirect", "torch's graph objects are laid out in an unknown way: replays go through torch")
            group.arena._captured(group)
            self._piece, self._lent, capture.under_way = captured.piece, bool(captured.lent), False
            self._replayable = bool(captured.replayable)

        def _abandon(self, capture: Capture) -> None:
            capture.let_go()
            with contextlib.suppress(RuntimeError):
                super().pool()
                # torch treats the graph as captured, and reset() releases the pool.
                capture.pool = (0, 0)
            with contextlib.suppress(Exception):
                super().reset()
            # The capture may be complete when a signal's exception arrives: discard the graph.
            capture.under_way = True
            capture.close()
            self._group = self._capture = None

        def replay(self) -> None:
            opened, handle, piece = self._ready
            if opened or scopes.all:
                return self._prepare_and_replay()
            status = launch(handle, piece)
            if status:
                session.library.fail("torch_replay", status)

        def _prepare_and_replay(self) -> None:
            group = self._group
            if group is None:
                return super().replay()
            left = step_out(group.arena) if scopes.all else None
            try:
                if group.arena._open or not group.sealed:
                    group.arena._seal_open(group)
                if not self._replayable:
                    return self._replay_in_turn(group)
                self._ready = (group.arena._open, group.handle, c_uint64(self._piece))
                status = launch(*self._ready[1:])
                if status:
                    session.library.fail("torch_replay", status)
            finally:
                if left:
                    step_in(left)

        def pool(self) -> Any:
            own, capture = super().pool(), self._capture
            return own if capture is None else capture.shown

        def pools(self) -> list[Any]:
            capture, own = self._capture, super().pools()
            return own if capture is None else [capture.shown if tuple(pool) == capture.pool else pool for pool in own]

        @property
        def _has_graph_exec(self) -> bool:
            """Tells torch that no executable is needed for a replay (2.14 and later)."""
            return self._lent or super()._has_graph_exec

        def _replay_in_turn(self, group: GraphGroup) -> None:
            import torch

            status = None
            try:
                status = enter(group.space, torch.cuda.current_stream(group.arena.device).cuda_stream)
                if status == _c.OK:
                    super().replay()
            finally:
                # None: a signal's exception arrived as the call returned.
                if not status:
                    leave(group.space)
            if status:
                session.library.fail("space_enter", status)

        def _own(self) -> None:
            """Switches to torch's own executable."""
            if self._lent and self._group is not None:
                self._lent = False
                session.library.torch_keep(self._group.handle, self._piece)

        def instantiate(self, *args: Any, **kwargs: Any) -> None:
            self._own()
            super().instantiate(*args, **kwargs)

        def raw_cuda_graph(self, *args: Any, **kwargs: Any) -> int:
            graph = super().raw_cuda_graph(*args, **kwargs)
            self._by_hand()
            return graph

        def _by_hand(self) -> None:
            """Marks the graph as launched by the program: no replay would seal its group."""
            group = self._group
            if group is None or self._capture is None or self._capture.under_way:
                return
            group.launched_by_hand()
            if group.key is None:
                group.arena._seal_open(group)

        def raw_cuda_graph_exec(self, *args: Any, **kwargs: Any) -> int:
            if self._group is not None:
                session.once(
                    "exec", "raw_cuda_graph_exec(): what launches it by itself keeps it on one stream with the arena's replays"
                )
                self._by_hand()
            if self._lent:
                self.instantiate()
            return super().raw_cuda_graph_exec(*args, **kwargs)

        def _forget(self) -> None:
            if self._capture is not None:
                self._capture.close()
                self._group, self._capture, self._lent = None, None, False
                self._replayable, self._ready = False, NEVER_READY

        def reset(self, *args: Any, **kwargs: Any) -> None:
            # The space must be destroyed after the graph.
            group, arena = self._group, self.arena
            self._forget()
            super().reset(*args, **kwargs)
            del group
            if arena is not None:
                # The next trim returns memory still in use.
                raw["arena_trim"](arena.handle, None)

        def _reset_torchs(self) -> None:
            super().reset()

        @property
        def arena(self) -> Arena | None:
            """The arena with the graph's tensors; ``None`` for torch's memory."""
            return self._group.arena if self._group is not None else None

    class CUDAGraph(*_base.over(base, Captured, "capture_end_pre", "pools", "_has_graph_exec")):  # type: ignore[misc]
        """``torch.cuda.CUDAGraph`` with VmmGraph's captures: tensors lie on pages of the arena
        named by ``pool=``."""

        def __new__(cls, keep_graph: bool = False, *args: Any, **kwargs: Any) -> Any:
            # Torch must not make an executable: the library lends one.
            keep = keeps and (bool(keep_graph) or not thread_state.disabled)
            graph = super().__new__(cls, keep, *args, **kwargs) if keeps else super().__new__(cls, *args, **kwargs)
            graph._kept, graph._keeps = bool(keep_graph), keep
            return graph

        def __init__(self, keep_graph: bool = False, *args: Any, **kwargs: Any) -> None:
            if keeps:
                super().__init__(self._keeps, *args, **kwargs)
            else:
                super().__init__(*args, **kwargs)

        def capture_end(self, *args: Any, **kwargs: Any) -> None:
            ours = self._under_way() is not None
            super().capture_end(*args, **kwargs)
            if self._keeps and not self._kept and (not ours or self._is_watched()):
                # As torch does.
                self.instantiate()

        def _is_watched(self) -> bool:
            """Returns whether hooks see the executable right after the capture (2.14 and later)."""
            import torch

            return bool(
                getattr(torch.cuda.graphs, "_global_instantiate_hooks", None)
                or getattr(self, "_post_instantiate_hooks", None)
                or getattr(self, "_capture_graph_id", None) is not None
            )

        def _let_go(self) -> None:
            self._forget()

        @property
        def label(self) -> str:
            return self._group.label if self._group is not None else ""

        def verify(self, outputs: Any) -> tuple[int, int] | None:
            """Replays twice with differently filled shared pages, and compares the outputs.

            Returns ``None`` if equal, otherwise the first different output and byte: the graph
            depends on data of other graphs. Waits for the device. Replays must not change the
            inputs or draw random numbers.
            """
            if self._group is None or not self._replayable:
                raise _c.Error(
                    "cannot verify the graph: no arena has its tensors, or torch replays it; capture it into an arena",
                    _c.WRONG_STATE,
                )
            self._group.arena._seal_open(self._group)
            return self._group.verify(self._piece, list(outputs))

    if _base.passes_on(base, "replay"):
        CUDAGraph.replay = Captured.replay  # type: ignore[method-assign]
    return _base.in_place_of(base, CUDAGraph)
