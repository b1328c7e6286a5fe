"""Entry points through real importlib.metadata in a child process, and the names set and features
disabled by plugins."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vmmgraph import _c, _trees
from vmmgraph.plugins import _common, sglang, vllm

POINTS = """[vllm.general_plugins]
vmmgraph = vmmgraph.plugins.vllm:enable

[sglang.srt.plugins]
vmmgraph = vmmgraph.plugins.sglang:enable
"""

CHILD = """
import sys
from importlib.metadata import entry_points

for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (point,) = [point for point in entry_points(group=group) if point.name == "vmmgraph"]
    plugin = point.load()
    plugin()
    plugin()
import vmmgraph
print("torch" in sys.modules, len(sys.meta_path) - META, vmmgraph.status())
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    metadata = tmp_path / "vmmgraph-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vmmgraph\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    return tmp_path


def child(site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VMMGRAPH")}
    path = os.pathsep.join([str(site), clean["PYTHONPATH"]])
    code = "import sys; META = len(sys.meta_path)\n" + CHILD
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_without_the_variable_nothing_happens(site: Path, value: str | None) -> None:
    run = child(site, **({} if value is None else {"VMMGRAPH": value}))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False", "0", "None"]
    assert run.stderr == ""


def test_with_the_variable_and_no_library_it_says_so_in_one_line(site: Path) -> None:
    run = child(site, VMMGRAPH="1", VMMGRAPH_LIBRARY="/nowhere/at/all.so")
    assert run.returncode == 0, run.stderr
    off = [line for line in run.stderr.splitlines() if "/nowhere/at/all.so" in line]
    assert off, run.stderr


def test_vllm_names_a_shape_by_its_forward_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm.shape() is None
    module = types.ModuleType("vllm.forward_context")
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    assert vllm.shape() is None
    module._forward_context = None
    assert vllm.shape() is None
    mode = types.SimpleNamespace(name="PIECEWISE")
    descriptor = types.SimpleNamespace(num_tokens=512, uniform=True, has_lora=False)
    module._forward_context = types.SimpleNamespace(batch_descriptor=descriptor, cudagraph_runtime_mode=mode)
    key, label = vllm.shape()
    assert key is module._forward_context
    assert label == "piecewise 512 uniform"
    module._forward_context = types.SimpleNamespace(batch_descriptor=None)
    assert vllm.shape() is None


def test_custom_all_reduce_is_off() -> None:
    module = types.ModuleType("custom_all_reduce")

    class CustomAllreduce:
        def __init__(self, group: object, device: object) -> None:
            raise AssertionError("it opens memory")

    module.CustomAllreduce = CustomAllreduce
    _common.without_custom_all_reduce(module)
    assert module.CustomAllreduce(None, device=None).disabled
    _common.without_custom_all_reduce(types.ModuleType("another"))


class Registers:
    """Registers the addresses of graph inputs, as SGLang's ``CustomAllReduceV2``."""

    def __init__(self, group: object, works: bool = True) -> None:
        self.disabled, self.registers, self.inputs = not works, False, []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.registers = True
        yield
        self.registers = False


class Registers14(Registers):
    """SGLang 0.5.14 and 0.5.15."""

    def custom_all_reduce(self, tensor: str) -> str:
        try:
            self.registers = False
            return self._all_reduce(tensor)
        finally:
            self.registers = True

    def _all_reduce(self, tensor: str) -> str:
        self.inputs += [tensor] if self.registers else []
        return f"sum of {tensor}"


class Registers16(Registers):
    """SGLang 0.5.16 and later."""

    def custom_all_reduce(self, tensor: str) -> str:
        if self.registers:
            self._allocate_graph_row(tensor)
        return f"sum of {tensor}"

    def _allocate_graph_row(self, tensor: str) -> None:
        self.inputs.append(tensor)


@pytest.mark.parametrize("release", [Registers14, Registers16])
def test_sglangs_custom_all_reduce_copies_in_graphs(release: type, caplog: pytest.LogCaptureFixture) -> None:
    kind = type("CustomAllReduceV2", (release,), {})
    sglang.copying_all_reduce(types.SimpleNamespace(CustomAllReduceV2=kind))
    with caplog.at_level("INFO", "vmmgraph"):
        one, off = kind("group"), kind("group", works=False)
    assert len(caplog.messages) == 1 and off.disabled and not one.disabled
    # The second capture comes after an all-reduce of compiled pieces, outside captures.
    for _ in range(2):
        with one.capture():
            assert one.custom_all_reduce("x") == "sum of x"
        assert one.custom_all_reduce("y") == "sum of y"
    assert one.inputs == [] and not one.registers
    sglang.copying_all_reduce(types.SimpleNamespace())


def test_vllm_sleeps_by_regions_where_there_is_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmmgraph import memory_saver

    monkeypatch.setattr(memory_saver, "torch_memory_saver", memory_saver.TorchMemorySaver())
    monkeypatch.setenv("VMMGRAPH_MEMORY_SAVER_LIBRARY", str(tmp_path / "none.so"))
    own = type("CuMemAllocator", (), {})
    module = types.SimpleNamespace(CuMemAllocator=own)
    vllm.sleep_by_regions(module)
    assert module.CuMemAllocator is own, "without the library vLLM's own stays"
    (tmp_path / "none.so").touch()
    vllm.sleep_by_regions(module)
    assert issubclass(module.CuMemAllocator, memory_saver.CuMemAllocator)
    assert memory_saver.torch_memory_saver.hook_mode == "torch", "nothing is preloaded"


@pytest.mark.parametrize("asked", ["1", ""])
def test_the_plugin_changes_vllms_sleep_only_when_asked(session, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMGRAPH", "1")
    monkeypatch.setenv("VMMGRAPH_SLEEP", asked)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    vllm.enable()
    waits = {finder.name for finder in sys.meta_path if isinstance(finder, _trees.WhenImported)}
    assert ("vllm.device_allocator.cumem" in waits) == bool(asked)
    assert "vllm.distributed.device_communicators.custom_all_reduce" in waits


@pytest.mark.parametrize(
    ("owner", "method", "patch"),
    [("GPUModelRunner", "capture_model", vllm.runner_captures), ("Scheduler", "init_all_cuda_graphs", sglang.scheduler_captures)],
)
def test_after_the_captures_idle_pages_go_and_each_arena_has_a_line(
    owner: str, method: str, patch: Callable[[object], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trimmed: list[object] = []
    monkeypatch.setitem(
        sys.modules,
        "torch",
        types.SimpleNamespace(cuda=types.SimpleNamespace(empty_cache=lambda: trimmed.append("torch's cache"))),
    )

    def shrink(device: int) -> None:
        trimmed.append(("shrink", device))
        if device:
            raise _c.Error("the arena is paused", _c.WRONG_STATE)

    def arena(device: int, spaces: int) -> types.SimpleNamespace:
        stats = {"spaces": spaces, "physical_bytes": 50 << 20, "high_water_bytes": 48 << 20}
        return types.SimpleNamespace(
            device=device,
            stats=lambda: stats,
            spaces=lambda: [{"peak_live_bytes": 20 << 20}] * spaces,
            executables=lambda: {"bytes": 12 << 20},
            shrink_to_fit=lambda: shrink(device),
            trim=lambda: trimmed.append(("trim", device)),
        )

    kind = type(owner, (), {method: lambda self: 7})
    monkeypatch.setattr("vmmgraph._session.arenas", lambda: [arena(0, 102), arena(1, 0)])
    patch(types.SimpleNamespace(**{owner: kind}))
    with caplog.at_level("INFO", "vmmgraph"):
        assert getattr(kind(), method)() == 7
    line, refused = caplog.messages
    assert refused == "vmmgraph: the graphs' pages keep their sizes: the arena is paused"
    assert line == (
        "vmmgraph: 102 graph groups share 50 MiB on cuda:0; the largest alone needs 48 MiB, a pool for each 2040 MiB; "
        "executables take 12 MiB"
    )
    assert trimmed == ["torch's cache", ("shrink", 0), ("trim", 0), ("shrink", 1), ("trim", 1)]
    trimmed.clear()
    _common.captures_ended(serving=True)
    assert trimmed == [("trim", 0), ("trim", 1)]
    patch(types.SimpleNamespace())


def test_sglangs_captures_of_one_size_are_pieces_of_one_shape(session) -> None:
    import vmmgraph

    module = types.ModuleType("full_cuda_graph_backend")

    class Backend:
        def capture_one(self, size: int, times: int = 1):
            graphs = []
            for _ in range(times):
                graph = session.torch.cuda.CUDAGraph()
                graph.capture_begin((0, 50))
                graph.capture_end()
                graphs.append(graph)
            return graphs

    Backend.__module__ = module.__name__
    module.Backend = Backend
    sglang.name_shapes(module)
    first = module.Backend().capture_one(8, times=3)
    second = module.Backend().capture_one(size=4)
    assert {graph.label for graph in first} == {"8"}
    assert {graph.label for graph in second} == {"4"}
    assert sum(entry[0] == "torch_group_open" for entry in session.log) == 2
    assert vmmgraph.arenas()


@pytest.mark.parametrize("ours", [True, False])
def test_sglangs_breakable_graphs_are_paused_by_the_tag_of_graphs(session, monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    from vmmgraph import memory_saver
    from vmmgraph.memory_saver import _saver

    module = types.ModuleType("breakable_cuda_graph_backend")

    class BreakableCudaGraphBackend:
        def __init__(self, runner: object, *, enable_memory_saver: bool = False, debug_eager: bool = False) -> None:
            if enable_memory_saver and os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
                raise NotImplementedError("Breakable CUDA graph is not compatible with memory saver mode")
            self._pool = None

        @contextlib.contextmanager
        def capture_session(self, stream: object):
            self._pool = session.torch.cuda.graph_pool_handle()
            yield

        def capture_one(self, size: int):
            graphs = [session.torch.cuda.CUDAGraph() for _ in range(3)]
            for graph in graphs:
                graph.capture_begin(pool=self._pool)
                graph.capture_end()
            return graphs

    BreakableCudaGraphBackend.__module__ = module.__name__
    module.BreakableCudaGraphBackend = BreakableCudaGraphBackend
    sglang.name_shapes(module)
    saver = object.__new__(_saver.Saver)
    saver.c = types.SimpleNamespace(tms_include_arenas=lambda tag, device: 0)
    saver.library = types.SimpleNamespace(check=lambda what, code: None)
    monkeypatch.setattr(memory_saver.torch_memory_saver, "_saver", saver)
    package = types.SimpleNamespace(torch_memory_saver=memory_saver.torch_memory_saver if ours else object())
    monkeypatch.setitem(sys.modules, "torch_memory_saver", package)
    for tagged in (False, True):
        if tagged:
            monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
        if tagged and not ours:
            with pytest.raises(NotImplementedError, match="not compatible"):
                BreakableCudaGraphBackend(None, enable_memory_saver=True)
            return
        backend = BreakableCudaGraphBackend(None, enable_memory_saver=True)
        with backend.capture_session(None):
            graphs = backend.capture_one(8)
        assert {graph.arena.tag for graph in graphs} == {"cuda_graph" if tagged else ""}
        assert len({graph._group for graph in graphs}) == 1


def test_sglang_carves_and_borrows_nothing(session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMMGRAPH", "1")
    monkeypatch.setenv("SGLANG_ENABLE_GRAPH_POOL_BORROW", "1")
    monkeypatch.setenv("SGLANG_ENABLE_GRAPH_POOL_PRECARVE", "1")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sglang.enable()
    sglang.enable()
    assert os.environ["SGLANG_ENABLE_GRAPH_POOL_BORROW"] == os.environ["SGLANG_ENABLE_GRAPH_POOL_PRECARVE"] == "0"
    assert sum(getattr(finder, "name", "").startswith("sglang.") for finder in sys.meta_path) == 6


def test_what_is_imported_later_is_patched_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module_of_an_engine.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    before = list(sys.meta_path)
    off = _trees.when_imported("some_module_of_an_engine", lambda module: seen.append(module.value))
    assert seen == []
    import some_module_of_an_engine

    assert seen == [1]
    # Already imported.
    _trees.when_imported("some_module_of_an_engine", lambda module: seen.append(module.__name__))
    assert seen == [1, "some_module_of_an_engine"]
    off()
    off()
    assert sys.meta_path == before
    monkeypatch.delitem(sys.modules, "some_module_of_an_engine")
    assert some_module_of_an_engine.value == 1


def test_trees_capture_in_torchs_own_memory(session, monkeypatch: pytest.MonkeyPatch) -> None:
    import vmmgraph

    trees = types.ModuleType(_trees.TREES)

    class CUDAGraphNode:
        def __init__(self) -> None:
            self.graph = session.torch.cuda.CUDAGraph()
            self._record()

        def _record(self) -> None:
            self.graph.capture_begin((0, 70))
            self.graph.capture_end()

    trees.CUDAGraphNode = CUDAGraphNode
    monkeypatch.setitem(sys.modules, _trees.TREES, trees)
    undo = _trees.keep_out()
    assert trees.CUDAGraphNode().graph.arena is None
    undo()
    assert trees.CUDAGraphNode().graph.arena is not None
    assert vmmgraph.status()
