"""Recording stand-ins for the library and the parts of torch used by the session."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar


class Graph:
    def __new__(cls, keep_graph: bool = False):
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self.pool_id: Any = None
        self.ended = False

    def _do(self, what: str, *details: Any) -> None:
        BaseGraph.log.append((what, *details))
        if what in BaseGraph.fail:
            raise RuntimeError(f"{what} failed")
        if BaseGraph.interrupt is not None:
            BaseGraph.interrupt(what)

    def noted_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._do("capture_begin", pool, capture_error_mode)
        self.pool_id = pool

    def noted_end(self) -> None:
        self.ended = "capture_end" not in BaseGraph.fail
        self._do("capture_end")

    def instantiate(self) -> None:
        self._do("instantiate")

    def replay(self) -> None:
        self._do("replay")

    def reset(self) -> None:
        self._do("reset")

    def pool(self) -> Any:
        if not self.ended:
            raise RuntimeError("no capture")
        return self.pool_id

    def raw_cuda_graph(self) -> int:
        return 0x1000

    def raw_cuda_graph_exec(self) -> int:
        self._do("raw_cuda_graph_exec")
        return 0x2000


class EarlierCore(Graph):
    """Torch's C++ class as of 2.8, but not bound by pybind, so its address is unknown."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.noted_begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        self.noted_end()


class BaseGraph(EarlierCore):
    """``torch.cuda.CUDAGraph`` as of 2.8, which only forwards."""

    log: ClassVar[list[Any]] = []
    fail: ClassVar[set[str]] = set()
    #: Called after each call, like a signal handler.
    interrupt: ClassVar[Callable[[str], None] | None] = None

    def replay(self) -> None:
        super().replay()


class LaterCore(Graph):
    """Torch's C++ class as of 2.15: capture_end in two steps, executables on request."""

    has_exec = False

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        self.halfway = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.noted_begin(pool, capture_error_mode)

    def capture_end_pre(self) -> None:
        self.noted_end()
        self.halfway = True

    def capture_end_post(self) -> None:
        assert self.keep_graph or self.has_exec
        self.halfway = False

    def instantiate(self) -> None:
        super().instantiate()
        self.has_exec = True

    def replay(self) -> None:
        assert self.has_exec
        super().replay()

    def reset(self) -> None:
        super().reset()
        self.has_exec = False

    def pools(self) -> list[Any]:
        return [self.pool()]

    def raw_cuda_graph(self) -> int:
        assert self.keep_graph or self.halfway
        return super().raw_cuda_graph()

    def raw_cuda_graph_exec(self) -> int:
        assert self.has_exec
        return super().raw_cuda_graph_exec()

    @property
    def _has_graph_exec(self) -> bool:
        return self.has_exec


class LaterGraph(LaterCore):
    """``torch.cuda.CUDAGraph`` as of 2.15, which runs Python hooks around captures and replays."""

    def __new__(cls, keep_graph: bool = False):
        graph = super().__new__(cls, keep_graph)
        graph._keep_graph = keep_graph
        graph._post_instantiate_hooks, graph.end_hooks, graph.replay_hooks = {}, {}, {}
        return graph

    def __del__(self) -> None:
        """Stops its trackers."""

    def capture_end(self) -> None:
        self.capture_end_pre()
        self._call(self.end_hooks)
        if not self._keep_graph:
            self.instantiate()
        self.capture_end_post()

    def instantiate(self) -> None:
        super().instantiate()
        self._call(sys.modules["torch.cuda.graphs"]._global_instantiate_hooks)
        self._call(self._post_instantiate_hooks)

    def replay(self) -> None:
        if not self._has_graph_exec:
            self.instantiate()
        self._call(self.replay_hooks)
        super().replay()

    def _call(self, hooks: dict[Any, Any]) -> None:
        for hook in list(hooks.values()):
            hook(self)

    def capture_end_pre(self) -> None:
        super().capture_end_pre()

    def capture_end_post(self) -> None:
        super().capture_end_post()

    def reset(self) -> None:
        super().reset()

    def pool(self) -> Any:
        return super().pool()

    def pools(self) -> list[Any]:
        return super().pools()


class MemPool:
    """``torch.cuda.MemPool`` as of 2.11."""

    numbers = itertools.count(1000)

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.id = (0, next(self.numbers))


class Stream:
    cuda_stream = 77


def torch_module(graph: type[Graph] = BaseGraph) -> types.ModuleType:
    """A fake torch of release 2.11, or the class's, with CUDA 13."""
    torch = types.ModuleType("torch")
    torch.__version__ = "2.11.0+cu130" if graph is BaseGraph else "2.15.0+cu130"
    torch.version = types.SimpleNamespace(cuda="13.0")
    torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
    cuda = types.ModuleType("torch.cuda")
    graphs = types.ModuleType("torch.cuda.graphs")
    cuda.CUDAGraph = graphs.CUDAGraph = graph
    if graph is not BaseGraph:
        graphs._global_instantiate_hooks = {}
    cuda.graphs = graphs
    numbers = itertools.count(1)
    cuda.graph_pool_handle = lambda: (0, next(numbers))
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda device=None: Stream
    torch.cuda = cuda

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        BaseGraph.log.append(("use_mem_pool", pool.id))
        yield
        BaseGraph.log.append(("mem_pool_used", pool.id))

    cuda.MemPool, cuda.use_mem_pool = type("MemPool", (MemPool,), {}), use_mem_pool

    class Scope:
        def __init__(self, cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> None:
            self.graph, self.pool, self.mode = cuda_graph, () if pool is None else (pool,), capture_error_mode

        def __enter__(self) -> None:
            self.graph.capture_begin(*self.pool, capture_error_mode=self.mode)

        def __exit__(self, *exception: object) -> None:
            self.graph.capture_end()

    cuda.graph = graphs.graph = Scope
    return torch


def use_torch(monkeypatch: Any, graph: type[Graph] = BaseGraph) -> types.ModuleType:
    torch = torch_module(graph)
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.cuda", torch.cuda)
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", torch.cuda.graphs)
    return torch


class Library:
    """Replaces `vmmgraph._c.Library`. Returns the statuses in `answers` (default 0)."""

    with_torch = True
    path = "stub"

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.answers: dict[str, int] = {}
        #: Functions whose calls are not logged.
        self.quiet = {"space_set_label", "space_set_site"}
        self.handles = itertools.count(0x100)
        self.pieces: dict[int, int] = {}
        self.interrupt: Callable[[str], None] | None = None
        #: Graph groups under capture; `turns`: entered arenas and spaces, innermost last.
        self.under_way: set[int] = set()
        #: Depth of remote scopes.
        self.remote = 0
        #: Open graph groups.
        self.groups: set[int] = set()
        self.turns: list[Any] = []
        self.replayable = True
        self.retained = 0
        self.retain = 0
        self.raw = Raw(self)

    def call(self, name: str, *arguments: Any) -> int:
        values = [value.value if isinstance(value, (ctypes.c_void_p, ctypes.c_uint64)) else value for value in arguments]
        if name not in self.quiet:
            self.log.append((name, *(value for value in values if value is None or isinstance(value, (int, bytes)))))
        status = self.answers.get(name, 0)
        if name == "torch_remote_leave" and self.remote == 0:
            status = 100
        if status:
            return status
        if name == "arena_create":
            self.retain = arguments[1]._obj.retain
        if name in ("torch_group_open", "torch_group_space", "arena_create", "device_open"):
            arguments[-1]._obj.value = next(self.handles)
            if name == "torch_group_open":
                self.groups.add(arguments[-1]._obj.value)
        elif name == "torch_capture_end":
            captured = arguments[-1]._obj
            captured.piece = self.pieces.get(values[0], 0)
            self.pieces[values[0]] = captured.piece + 1
            captured.replayable = captured.lent = int(self.replayable)
        elif name == "space_stats":
            arguments[-1]._obj.retained_bytes = self.retained
        self._note(name, values)
        if self.interrupt is not None:
            self.interrupt(name)
        return 0

    def _note(self, name: str, values: list[Any]) -> None:
        if name in ("torch_remote_enter", "torch_remote_leave"):
            self.remote += 1 if name == "torch_remote_enter" else -1
        elif name == "torch_group_close":
            self.groups.discard(values[0])
        elif name == "torch_capture_begin":
            self.under_way.add(values[0])
        elif name in ("torch_capture_end", "torch_capture_abandon"):
            self.under_way.discard(values[0])
        elif name in ("torch_eager_enter", "torch_eager_enter_of", "space_enter"):
            self.turns.append(values[0])
        elif name in ("torch_eager_leave_of", "torch_eager_end", "space_leave") and values[0] in self.turns:
            self.turns.remove(values[0])

    def prepared(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            # ctypes would truncate a plain number to an int.
            assert all(isinstance(value, (ctypes.c_void_p, ctypes.c_uint64)) for value in arguments), arguments
            return self.call(name, *arguments)

        return call

    def fail(self, name: str, status: int) -> None:
        raise self.error(name, status)

    def error(self, name: str, status: int) -> Exception:
        from vmmgraph import _c

        # The library forgets the reason at the next call.
        last = self.log[-1][0] if self.log else ""
        return _c.Error("a reason" if last == name else f"{name} answered {status}", status)

    def _text(self, name: str) -> str:
        return "a reason"

    def version(self) -> str:
        return "0.1.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> None:
            status = self.call(name, *arguments)
            if status:
                self.fail(name, status)

        return call


class Raw:
    def __init__(self, library: Library) -> None:
        self.library = library

    def __getitem__(self, name: str) -> Any:
        return lambda *arguments: self.library.call(name, *arguments)
