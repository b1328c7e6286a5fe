"""vmmgraph.memory_saver without a GPU: over the host driver, in separate processes.
test_memory_saver_gpu.py covers the GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("VMMGRAPH_MEMORY_SAVER_LIBRARY", ROOT / "build/cmake/libvmmgraph_memory_saver.so"))

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason=f"SKIPPED: {LIBRARY} is not built")

# Host driver memory is readable. `torch` has the part used by memory_saver, over tms_torch_malloc:
# pools count uses and cache freed memory.
PRELUDE = """
import collections, contextlib, ctypes, gc, itertools, os, sys, threading, types
from vmmgraph import memory_saver
from vmmgraph.memory_saver import MemorySaverError, CuMemAllocator, torch_memory_saver as saver
MIB = 1 << 20
log = []

numbers, uses, under_way = itertools.count(1), collections.Counter(), []
cached, owners = collections.defaultdict(list), {}

def begin(device, pool):
    assert pool not in under_way, "already recording"
    assert uses[pool] > 0 or pool not in uses, "a pool that nobody uses any more"
    uses[pool] += 1
    under_way.append(pool)

def release(device, pool):
    uses[pool] -= 1
    assert uses[pool] >= 0

def empty_cache():
    for pool in [pool for pool in cached if uses[pool] == 0]:
        for at, count in cached.pop(pool):
            c().tms_torch_free(at, count, 0, None)

class MemPool:
    def __init__(self, allocator=None):
        self.allocator, self.id = allocator, (0, next(numbers))
        uses[self.id] = 1
        log.append("pool")
    def __del__(self):
        release(0, self.id)
        if uses[self.id] == 0 and under_way:
            os.abort()
    def snapshot(self):
        live = [{"total_size": count, "active_size": count} for pool, count in owners.values() if pool == self.id]
        return live + [{"total_size": count, "active_size": 0} for _, count in cached[self.id]]

@contextlib.contextmanager
def use_mem_pool(pool):
    log.append(("in", pool.allocator is not None))
    begin(0, pool.id)
    try:
        yield
    finally:
        under_way.remove(pool.id)
        release(0, pool.id)
    log.append("out")

def new(count):
    "A tensor of torch's: from the cache of the pool that the thread allocates to, else from the pool's allocator."
    pool = under_way[-1] if under_way else None
    found = next((block for block in cached[pool] if block[1] == count), None)
    if found:
        cached[pool].remove(found)
        at = found[0]
    else:
        at = allocate(count)
    owners[at] = pool, count
    return at

def drop(at):
    pool, count = owners.pop(at)
    cached[pool].append((at, count))

def snapshot():
    return [{"total_size": count, "segment_pool_id": pool} for pool, count in owners.values()]

class Allocator:
    def __init__(self, path, malloc, free):
        assert (malloc, free) == ("tms_torch_malloc", "tms_torch_free") and os.path.exists(path)
    def allocator(self):
        return self

torch = types.ModuleType("torch")
torch.__version__ = "2.11.0+cu130"
torch.cuda = types.SimpleNamespace(
    MemPool=MemPool, use_mem_pool=use_mem_pool, current_device=lambda: 0, device_count=lambda: 1, is_initialized=lambda: False, empty_cache=empty_cache,
    is_current_stream_capturing=lambda: False, graph_pool_handle=lambda: (0, next(numbers)), memory_snapshot=snapshot,
    memory=types.SimpleNamespace(CUDAPluggableAllocator=Allocator))
torch._C = types.SimpleNamespace(
    _cuda_beginAllocateCurrentThreadToPool=begin, _cuda_beginAllocateToPool=begin, _cuda_hasPrimaryContext=lambda device: device == 0,
    _cuda_endAllocateToPool=lambda device, pool: under_way.remove(pool),
    _cuda_releasePool=release)
sys.modules["torch"] = torch

def c():
    return saver._ready().c

def allocate(count):
    at = c().tms_torch_malloc(count, 0, None)
    assert at, saver._ready().library.last_error()
    return at

def fill(at, count, value):
    ctypes.memset(at, value, count)

def holds(at, count, value):
    return ctypes.string_at(at, count) == bytes([value]) * count

def backup(at, count):
    return saver._ready().library.backup(at, count)

@contextlib.contextmanager
def raises(error, *words):
    try:
        yield
    except error as found:
        assert all(word in str(found) for word in words), found
        return
    raise AssertionError(f"no {error.__name__}")
"""


def child(body: str, mode: str = "torch", **environment: str) -> str:
    own = {key: value for key, value in os.environ.items() if not key.startswith("TMS_")}
    own |= {
        "PYTHONPATH": f"{os.environ.get('VMMGRAPH_TEST_PACKAGE', ROOT / 'python')}",
        "VMMGRAPH_DRIVER": "host",
        "VMMGRAPH_LOG": "off",
        "VMMGRAPH_MEMORY_SAVER_LIBRARY": str(LIBRARY),
    }
    own.pop("LD_PRELOAD", None)
    if mode == "preload":
        own["LD_PRELOAD"] = str(LIBRARY)
    own |= environment
    code = PRELUDE + f"saver.hook_mode = {mode!r}\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


both = pytest.mark.parametrize("mode", ["torch", "preload"])


@both
def test_memory_steps_aside_and_comes_back(mode: str) -> None:
    child(
        """
        with saver.region("weights", enable_cpu_backup=True):
            weights = allocate(6 * MIB)
        with saver.region(tag="kv"):
            kv = allocate(4 * MIB)
        fill(weights, 6 * MIB, 1); fill(kv, 4 * MIB, 2)
        assert backup(weights, 10) is None
        saver.pause("kv")
        assert holds(weights, 6 * MIB, 1)
        saver.pause("weights"); saver.pause("weights"); saver.pause()
        assert ctypes.string_at(backup(weights + 100, 1000), 1000) == b"\\1" * 1000
        with raises(MemorySaverError, "without a backup"):
            backup(kv, 1)
        with raises(MemorySaverError, "no block of a region"):
            backup(12345, 1)
        saver.resume("weights")
        assert holds(weights, 6 * MIB, 1) and backup(weights, 1) is None
        saver.resume(); saver.resume(); saver.pause("nobody's"); saver.resume("nobody's")
        fill(kv, 4 * MIB, 3)
        assert holds(weights, 6 * MIB, 1) and holds(kv, 4 * MIB, 3)
        """,
        mode,
    )


@both
def test_free_while_paused_keeps_the_others(mode: str) -> None:
    child(
        """
        with saver.region(enable_cpu_backup=True):
            blocks = [allocate(6912) for _ in range(3)]
        for number, at in enumerate(blocks):
            fill(at, 6912, number + 1)
        saver.pause()
        c().tms_torch_free(blocks[1], 6912, 0, None)
        saver.resume()
        assert holds(blocks[0], 6912, 1) and holds(blocks[2], 6912, 3)
        """,
        mode,
    )


@both
def test_regions_nest_and_give_settings_back(mode: str) -> None:
    child(
        """
        def settings():
            return c().tms_get_interesting_region(), c().tms_get_current_tag(), c().tms_get_enable_cpu_backup(), c().tms_get_cpu_backup_backend()
        outside = settings()
        with saver.region("outer", enable_cpu_backup=True, cpu_backup_backend="mmap"):
            outer = settings()
            kept = allocate(MIB)
            with contextlib.suppress(KeyError), saver.region("inner"):
                assert settings() == (True, b"inner", False, b"mmap")
                lost = allocate(MIB)
                raise KeyError
            assert settings() == outer == (True, b"outer", True, b"mmap")
            with saver.disable():
                assert not settings()[0] and c().tms_torch_malloc(MIB, 0, None) is None
            assert settings() == outer
            other = []
            thread = threading.Thread(target=lambda: other.append(settings())); thread.start(); thread.join()
            assert other == [outside], "settings are a thread's own"
        assert settings() == outside
        fill(kept, MIB, 5)
        saver.pause(); saver.resume()
        assert holds(kept, MIB, 5)
        with raises(RuntimeError, "outside a region"), saver.disable():
            pass
        with raises(ValueError), saver.region(), saver.disable(dispose_mem_pool_after_use=False):
            pass
        """,
        mode,
    )


def test_a_pool_for_each_tag_and_policy() -> None:
    child(
        """
        for tag, keep in (("a", True), ("a", False), ("b", True), ("a", True), ("b", True)):
            with saver.region(tag, enable_cpu_backup=keep):
                pass
        assert log.count("pool") == 3 and log.count(("in", True)) == 5
        """
    )
    child('with saver.region("a"): pass\nassert log == ["pool", ("in", False), "out"]', "preload")


@both
def test_the_environment_begins_settings(mode: str) -> None:
    body = """
        assert c().tms_get_interesting_region() and c().tms_get_enable_cpu_backup() and c().tms_get_cpu_backup_backend() == b"mmap"
        assert saver.retain_cpu_backup
        at = allocate(MIB); fill(at, MIB, 4)
        saver.pause()
        kept = backup(at, MIB)
        saver.resume()
        assert backup(at, MIB) == kept and holds(kept, MIB, 4)
        fill(at, MIB, 6)
        saver.pause()
        assert backup(at, MIB) == kept and holds(kept, MIB, 6)
        saver.resume()
        saver.retain_cpu_backup = False
        saver.pause(); saver.resume()
        assert backup(at, MIB) is None
        """
    on = {
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "yes",
        "TMS_INIT_CPU_BACKUP_BACKEND": "mmap",
        "TMS_RETAIN_CPU_BACKUP": "true",
    }
    child(body, mode, **on)


def test_what_is_not_offered_or_wrong_is_said() -> None:
    child(
        """
        with raises(ValueError, "one backup"), saver.region(enable_cpu_backup=True, enable_disk_backup=True):
            pass
        with raises(OSError, "/proc/x"):
            saver.set_disk_backup_dir("/proc/x")
        with raises(ValueError, "enable_cpu_backup"), saver.region(cpu_backup_backend="mmap"):
            pass
        with raises(ValueError, "'disk'"), saver.region(enable_cpu_backup=True, cpu_backup_backend="disk"):
            pass
        for tag in ("", "a\\0b", None):
            with raises(ValueError, "tag"), saver.region(tag):
                pass
        with raises(NotImplementedError):
            saver.memory_margin_bytes
        for value in (-1, 1 << 64):
            with raises(ValueError, str(value)):
                saver.memory_margin_bytes = value
        saver.memory_margin_bytes = 0
        with raises(RuntimeError, "since the first use"):
            saver.hook_mode = "preload"
        with raises(ValueError, "'other'"):
            saver.hook_mode = "other"
        assert saver.hook_mode == "torch" and saver.enabled
        with raises(RuntimeError, "'preload'"), saver.cuda_graph(None):
            pass
        """
    )
    child('with raises(RuntimeError, "0 entries of LD_PRELOAD"):\n    memory_saver._saver.Saver("preload")')


@both
def test_ordinary_memory_within_a_region_ends_its_pool_there(mode: str) -> None:
    """Torch asserts in the destructor of a MemPool used by a thread."""
    child(
        """
        with saver.region("weights", enable_cpu_backup=True):
            kept = new(MIB)
            with saver.disable():
                (pool,) = under_way[1:]
            assert uses[pool] == 0 and under_way == [owners[kept][0]]
            assert new(2 * MIB)
        assert not under_way
        """,
        mode,
    )


@both
def test_memory_asked_for_while_its_region_is_paused_is_there(mode: str) -> None:
    """Torch's cache must not reuse memory freed in the region."""
    child(
        """
        def region():
            return saver.region("adapters", enable_cpu_backup=True)
        with region():
            kept, before, after, other = new(2 * MIB), new(4 * MIB), new(6 * MIB), new(8 * MIB)
        with saver.region("others"):
            others = new(MIB)
        fill(kept, 2 * MIB, 1)
        drop(before)
        for cycle in range(3):
            saver.pause("adapters")
            assert not any(cached.values()), "what was freed went back and is not paused"
            if cycle == 0:
                drop(after)
            with region():
                fresh = [new(count * MIB) for count in (2, 4, 6)]
                for number, at in enumerate(fresh):
                    fill(at, (2, 4, 6)[number] * MIB, 3 + number)
            with saver.region("others"):
                assert owners[others][0] == under_way[-1], "this one is not paused"
            saver.resume("adapters")
            assert holds(kept, 2 * MIB, 1) and all(holds(at, MIB, 3 + number) for number, at in enumerate(fresh))
            for at in fresh:
                drop(at)
        saver.pause()
        assert not any(cached.values()) and sum(uses.values()) == 0, "no pool of an earlier cycle can be used"
        """,
        mode,
    )


@pytest.mark.parametrize("everything", [False, True])
def test_memory_that_cannot_be_sent_says_what_can(everything: bool) -> None:
    """Like torch's storages, with the C++ method in a base class. Under TMS_INIT_ENABLE without any
    region."""
    child(
        f"""
        class Base:
            def _share_cuda_(self):
                if self.why:
                    raise RuntimeError(self.why)
                return "handle"
            def data_ptr(self):
                return 0x7000
        class UntypedStorage(Base):
            why = None
        torch.UntypedStorage = UntypedStorage
        for _ in range(2):
            with contextlib.nullcontext() if {everything} else saver.region("weights"):
                saver.resume()
        storage = UntypedStorage()
        assert storage._share_cuda_() == "handle"
        storage.why = "CUDA error: invalid argument"
        with raises(RuntimeError, "0x7000", "send a copy that is made outside regions, or inside disable()"):
            storage._share_cuda_()
        storage.why = "CUDA error: out of memory"
        with raises(RuntimeError, "out of memory"):
            storage._share_cuda_()
        assert UntypedStorage._share_cuda_.__wrapped__ is Base._share_cuda_
        """,
        "preload" if everything else "torch",
        TMS_INIT_ENABLE="1" if everything else "0",
    )


@both
def test_what_a_region_leaves_cached_goes_back(mode: str) -> None:
    """Quantization during loading."""
    child(
        """
        def load(count):
            with saver.region("weights", enable_cpu_backup=True):
                original, quantized = new(count), new(MIB)
                fill(quantized, MIB, 1)
                pool = under_way[-1]
                drop(original)
            return quantized, pool
        small, first = load(2 * MIB)
        assert cached[first], "the next region takes little from the cache"
        large, second = load(64 * MIB)
        assert second == first and not cached[first]
        assert holds(small, MIB, 1) and holds(large, MIB, 1)
        other, third = load(2 * MIB)
        assert third != first
        saver.pause(); saver.resume()
        assert holds(small, MIB, 1) and holds(large, MIB, 1) and holds(other, MIB, 1)
        """,
        mode,
    )


@both
def test_nothing_is_freed_during_a_capture(mode: str) -> None:
    child(
        """
        with saver.region("weights"):
            drop(new(64 * MIB))
            saver._ready().c.tms_is_capturing = lambda: True
        assert any(cached.values()), "the next one does that"
        saver._ready().c.tms_is_capturing = lambda: False
        saver.pause()
        assert not any(cached.values())
        """,
        mode,
    )


@both
def test_a_pause_within_a_region_gives_other_memory_from_then_on(mode: str) -> None:
    child(
        """
        with saver.region("a", enable_cpu_backup=True):
            first = new(2 * MIB)
            drop(first)
            with saver.region("b"):
                inner = under_way[-1]
                saver.pause("a")
                assert under_way[-1] == inner, "the inner one stays the inner one"
            again = new(2 * MIB)
            fill(again, 2 * MIB, 7)
            saver.pause()
            with saver.disable():
                ordinary = under_way[-1]
                saver.pause()
                assert under_way[-1] == ordinary
            assert new(2 * MIB) and under_way[-1] not in (inner, ordinary)
        assert not under_way
        saver.resume()
        assert holds(again, 2 * MIB, 7)
        """,
        mode,
    )


@both
def test_a_pause_is_refused_while_another_thread_could_allocate_paused_memory(mode: str) -> None:
    child(
        """
        first = threading.Barrier(2); second = threading.Barrier(2)
        def other():
            with saver.region("a"), saver.disable(), saver.region("b", enable_cpu_backup=True):
                first.wait(); second.wait()
                wrong = new(MIB)
                fill(wrong, MIB, 6)
                first.wait(); second.wait()
        with saver.region("c", enable_cpu_backup=True):
            kept = new(MIB)
        fill(kept, MIB, 5)
        thread = threading.Thread(target=other)
        thread.start(); first.wait()
        for tag in "a", "b", None:
            with raises(MemorySaverError, "401", f"thread {thread.ident} is inside a region"):
                saver.pause(tag)
        saver.pause("c"); saver.resume("c")
        assert holds(kept, MIB, 5)
        second.wait(); first.wait(); second.wait(); thread.join()
        saver.pause(); saver.resume()
        assert holds(kept, MIB, 5)
        """,
        mode,
    )


@pytest.mark.parametrize(("version", "diverted"), [("2.11.0+cu130", True), ("2.9.1", False)])
def test_memory_outside_regions_is_paused_and_new_memory_is_not(version: str, diverted: bool) -> None:
    """As slime's trainer: TMS_INIT_ENABLE covers all memory of the process."""
    child(
        f"""
        torch.__version__, torch.cuda.is_initialized = {version!r}, lambda: True
        kept, gone, late = new(MIB), new(2 * MIB), new(3 * MIB)
        fill(kept, MIB, 1)
        drop(gone)
        pause, c().tms_pause = c().tms_pause, lambda tag: 900
        with raises(MemorySaverError, "900"):
            saver.pause()
        assert not under_way, "nothing is paused"
        c().tms_pause = pause
        saver.pause()
        assert gone not in owners and not cached[None], "freed memory is not paused"
        assert bool(under_way) == {diverted}
        drop(late)
        if not {diverted}:
            sys.exit()
        fresh = new(3 * MIB)
        assert fresh != late
        fill(fresh, 3 * MIB, 3)
        with saver.disable():
            assert len(set(under_way)) == 2
        with saver.region("weights", enable_cpu_backup=True):
            weights = new(MIB)
        fill(weights, MIB, 4)
        drop(fresh)
        saver.pause(); saver.pause("nobody's"); saver.resume("weights")
        assert len(under_way) == 1 and holds(weights, MIB, 4)
        again = new(3 * MIB)
        fill(again, 3 * MIB, 5)
        saver.resume()
        assert not under_way
        assert holds(kept, MIB, 1) and holds(again, 3 * MIB, 5) and holds(weights, MIB, 4)
        saver.pause(); saver.resume()
        assert holds(kept, MIB, 1) and holds(again, 3 * MIB, 5)
        assert all(count >= 0 for count in uses.values())
        """,
        "preload",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


@both
@pytest.mark.parametrize("setter", ["torch._C._accelerator_setAllocatorSettings", "torch.cuda.memory._set_allocator_settings"])
def test_expandable_segments_are_off_within_regions(mode: str, setter: str) -> None:
    child(
        f"""
        settings = []
        {setter} = settings.append
        on, off = "max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64,expandable_segments:False"
        with saver.region("weights"):
            assert settings == [off]
            with saver.region("kv"), contextlib.suppress(KeyError):
                assert allocate(MIB)
                raise KeyError
            assert settings == [off]
        assert settings == [off, on]
        with raises(KeyError), saver.region("weights"):
            raise KeyError
        assert settings == [off, on] * 2
        """,
        mode,
        PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64,expandable_segments:True",
    )
    child(
        f"""
        {setter} = lambda text: 1 / 0
        with saver.region("weights"):
            assert allocate(MIB)
        """,
        mode,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False",
    )


@pytest.mark.parametrize("release", ["2.15", "2.11", "2.10"])
def test_expandable_segments_switched_on_by_the_program_are_off_within_regions(release: str) -> None:
    """As verl does. The environment says nothing."""
    child(
        f"""
        now = ["max_split_size_mb:64"]
        torch._C._accelerator_setAllocatorSettings = now.append
        def snapshot(pool):
            if {release == "2.10"} and pool is not None:
                raise TypeError(pool)
            return {{"allocator_settings": {{"PYTORCH_CUDA_ALLOC_CONF": now[-1], "expandable_segments": False}}}}
        if {release == "2.15"}:
            torch._C._accelerator_getAllocatorSettings = lambda: now[-1]
        else:
            torch._C._cuda_memorySnapshot = snapshot
        with saver.region("weights"):
            assert len(now) == 1
        on, off = "expandable_segments:True,max_split_size_mb:32", "expandable_segments:False,max_split_size_mb:32"
        now.append(on)
        with saver.region("weights"), saver.region("kv"):
            assert now[-1] == off
        assert now[2:] == [off, on]
        """
    )


@both
def test_a_graph_of_an_arena_is_paused_by_its_tag(mode: str) -> None:
    """With `vmmgraph.enable`'s graph class, over stand-ins."""
    child(
        """
        from vmmgraph import _arena, _c, _core, _session
        session = _session._session = _session.Session(_core.any_one())
        session.executables = 0
        class Graph:
            _named = None, ""
        @contextlib.contextmanager
        def graph(cuda_graph, pool, stream, capture_error_mode):
            assert pool is None
            cuda_graph.arena, _ = cuda_graph._named
            yield
        torch.cuda.graph = graph
        def capture(tag, pool=None):
            made = Graph()
            with saver.cuda_graph(made, pool=pool, tag=tag):
                pass
            return made
        def paused(graph):
            return bool(graph.arena.stats()["paused"])
        one, other, named = capture("graphs"), capture("others"), capture("graphs", (0, 77))
        assert len({id(each.arena) for each in (one, other, named)}) == 3
        assert capture("graphs", (0, 77)).arena is named.arena
        with raises(_c.Error, "(0, 77)", "'graphs'", "'others'"):
            capture("others", (0, 77))
        saver.pause("graphs")
        assert paused(one) and paused(named) and not paused(other)
        saver.pause()
        assert paused(other)
        saver.resume("others")
        assert paused(one) and not paused(other)
        saver.resume()
        assert not paused(one)
        class OfMemPools:
            _mempool = None
        with raises(RuntimeError, "MemPool route"), saver.cuda_graph(OfMemPools(), tag="graphs"):
            pass
        """,
        mode,
        VMMGRAPH_CORE_LIBRARY=str(next(LIBRARY.parent.glob("libvmmgraph.so*"))),
    )


def test_a_capture_refuses_a_pause_and_goes_on() -> None:
    """A fake runtime answers for torch's streams."""
    runtime = next((ROOT / "build/cmake/tests/memory_saver").glob("libcudart.so.99*"), None) or os.environ.get(
        "VMMGRAPH_FAKE_CUDART"
    )
    if runtime is None:
        pytest.skip("SKIPPED: the tests' CUDA runtime is not built")
    child(
        f"""
        fake = ctypes.CDLL({str(runtime)!r}, mode=ctypes.RTLD_GLOBAL)
        fake.fake_begin_capture.argtypes = [ctypes.c_void_p]
        fake.cudaStreamEndCapture.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        fake.fake_broken_captures.restype = ctypes.c_ulong
        turn = [7]
        class Stream:
            def __init__(self, device, priority=0):
                turn[0] = (turn[0] + 1) % 32
                self.cuda_stream = 0x1000 * (1 - priority) + turn[0]
            @staticmethod
            def priority_range():
                return 0, -1
        torch.cuda.Stream, torch.cuda.device_count = Stream, lambda: 2
        torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = (lambda: True), (lambda: False)
        torch._C._cuda_hasPrimaryContext = lambda device: device == 0
        assert sorted(memory_saver._torch.torch_streams(0)) == [0x1000 + n for n in range(32)] + [0x2000 + n for n in range(32)]
        assert turn == [7], "torch's turn is where it was"
        with saver.region(enable_cpu_backup=True):
            at = allocate(MIB)
        fill(at, MIB, 8)
        assert fake.fake_begin_capture(0x2005) == 0
        with raises(MemorySaverError, "900", "under capture"):
            saver.pause()
        assert fake.fake_broken_captures() == 0 and holds(at, MIB, 8)
        graph = ctypes.c_void_p()
        assert fake.cudaStreamEndCapture(0x2005, ctypes.byref(graph)) == 0
        saver.pause(); saver.resume()
        assert holds(at, MIB, 8) and fake.fake_broken_captures() == 0
        """
    )


DISK = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
saver.set_disk_backup_dir(str(folder / "made"))
folder = folder / "made"
def pattern(count, seed):
    return bytes((seed + number * 7) % 251 for number in range(count % 4093 + 4093)) * (count // 4093 + 1)
def write(at, count, seed):
    ctypes.memmove(at, pattern(count, seed), count)
def right(at, count, seed):
    return ctypes.string_at(at, count) == pattern(count, seed)[:count]
def files():
    return sorted(folder.iterdir())
"""


@both
def test_contents_are_in_files_while_paused(mode: str) -> None:
    """Over several chunks, with a rest that is no multiple of a page."""
    child(
        DISK
        + textwrap.dedent("""
        sizes = (3 * MIB + 5000, MIB, 7)
        with saver.region("weights", enable_disk_backup=True):
            assert c().tms_get_enable_disk_backup()
            weights = [allocate(size) for size in sizes]
        assert not c().tms_get_enable_disk_backup()
        with saver.region("weights", enable_cpu_backup=True):
            other = allocate(MIB)
        for seed, (at, size) in enumerate(zip(weights, sizes)):
            write(at, size, seed)
        fill(other, MIB, 9)
        for cycle in range(3):
            saver.pause("weights"); saver.pause("weights")
            assert len(files()) == 3 and sum(file.stat().st_size for file in files()) >= sum(sizes)
            assert all(file.stat().st_mode & 0o777 == 0o600 for file in files())
            assert backup(weights[0], 1) is None and backup(other, 1)
            saver.resume()
            assert not files() and holds(other, MIB, 9)
            assert all(right(at, size, seed) for seed, (at, size) in enumerate(zip(weights, sizes)))
        saver.pause()
        c().tms_torch_free(weights.pop(1), sizes[1], 0, None)
        assert len(files()) == 2, "a freed block needs no file"
        with saver.region("weights", enable_disk_backup=True):
            late = allocate(MIB)
        write(late, MIB, 5)
        saver.pause()
        assert len(files()) == 3
        saver.resume()
        assert right(weights[0], sizes[0], 0) and right(weights[1], sizes[2], 2) and right(late, MIB, 5)
        saver.pause()
        assert len(files()) == 3
        """),
        mode,
        TMS_DISK_BACKUP_CHUNK_MB="1",
    )


def test_files_end_with_the_process() -> None:
    folder = child(
        DISK
        + textwrap.dedent("""
        with saver.region(enable_disk_backup=True):
            allocate(MIB)
        saver.pause()
        if os.fork() == 0:
            sys.exit()
        os.wait()
        assert len(files()) == 1, "a forked child removes nothing"
        print(folder)
        """)
    ).strip()
    assert Path(folder).is_dir() and not list(Path(folder).iterdir())


@both
def test_a_wrong_file_resumes_nothing(mode: str) -> None:
    child(
        DISK
        + textwrap.dedent("""
        with saver.region("a", enable_disk_backup=True):
            at = allocate(2 * MIB)
        with saver.region("a", enable_cpu_backup=True):
            other = allocate(MIB)
        write(at, 2 * MIB, 3)
        fill(other, MIB, 9)
        saver.pause()
        file, = files()
        os.truncate(file, MIB)
        for _ in range(2):
            with raises(MemorySaverError, "301", str(file), "nothing was resumed"):
                saver.resume()
            assert backup(other, 1), "nothing is resumed"
        """),
        mode,
    )
    for change, said in (
        ("file.unlink()", "No such file"),
        ("file.write_bytes(bytes(2 * MIB))", "changed"),
        ("(folder / 'x').write_bytes(bytes(2 * MIB)); os.replace(folder / 'x', file)", "replaced"),
    ):
        child(
            DISK
            + textwrap.dedent(f"""
            with saver.region(enable_disk_backup=True):
                at = allocate(2 * MIB)
            saver.pause()
            file, = files()
            {change}
            with raises(MemorySaverError, "301", {said!r}):
                saver.resume()
            c().tms_torch_free(at, 2 * MIB, 0, None)
            saver.resume()
            """),
            mode,
        )


def test_a_file_that_cannot_be_read_pauses_again() -> None:
    """The resume maps the memory, and then the process has no descriptor left for the file."""
    child(
        DISK
        + textwrap.dedent("""
        import resource
        def limit(most):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with saver.region(enable_disk_backup=True):
            at, small = allocate(2 * MIB), allocate(MIB)
        with saver.region(enable_cpu_backup=True):
            other = allocate(MIB)
        write(at, 2 * MIB, 3); write(small, MIB, 4)
        fill(other, MIB, 9)
        saver.pause()
        asleep = files()
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (first := os.dup(0)) <= highest:
            pass
        found = []
        for extra in range(12):
            limit(first + 1 + extra)
            try:
                saver.resume()
                break
            except MemorySaverError as error:
                found.append(error.code)
            finally:
                limit(usual)
            assert files() == asleep and backup(other, 1), "paused as before"
        assert 304 in found, found
        assert not files() and right(at, 2 * MIB, 3) and right(small, MIB, 4) and holds(other, MIB, 9)
        saver.pause(); saver.resume()
        assert right(at, 2 * MIB, 3) and holds(other, MIB, 9)
        """)
    )


def test_a_pause_that_cannot_write_leaves_the_memory() -> None:
    child(
        DISK
        + textwrap.dedent("""
        import resource, shutil, signal
        with saver.region(enable_disk_backup=True):
            first, second = allocate(MIB), allocate(4 * MIB)
        write(first, MIB, 1); write(second, 4 * MIB, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, resource.RLIM_INFINITY))
        with raises(MemorySaverError, "304", "File too large"):
            saver.pause()
        assert not files() and right(first, MIB, 1) and right(second, 4 * MIB, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        shutil.rmtree(folder)
        with raises(MemorySaverError, "304", "No such file"):
            saver.pause()
        assert right(first, MIB, 1)
        folder.mkdir()
        write(first, MIB, 4)
        saver.pause()
        assert len(files()) == 2
        saver.resume()
        assert right(first, MIB, 4) and right(second, 4 * MIB, 2)
        """)
    )


@both
def test_host_memory_of_the_backend_mmap_goes_back(mode: str) -> None:
    child(
        """
        def host():
            with open("/proc/self/status") as f:
                return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon"))
        def cycle(backend):
            with saver.region(backend, enable_cpu_backup=True, cpu_backup_backend=backend):
                at = allocate(64 * MIB)
            fill(at, 64 * MIB, 7)
            before = host()
            saver.pause(backend)
            paused = host()
            assert paused - before > 60 * MIB
            saver.resume(backend)
            assert holds(at, 64 * MIB, 7)
            return before, host()
        before, after = cycle("mmap")
        assert after - before < 8 * MIB
        before, after = cycle("pinned")
        assert after - before > 60 * MIB, "kept for the next pause"
        """,
        mode,
    )


def test_calls_of_vllm() -> None:
    child(
        """
        allocator = CuMemAllocator.get_instance()
        assert allocator is CuMemAllocator.get_instance() is CuMemAllocator.instance
        with allocator.use_memory_pool("weights"):
            weights = new(2 * MIB)
        with allocator.use_memory_pool("kv_cache"):
            kv = new(2 * MIB)
        with allocator.use_memory_pool("workspace"):
            scratch = new(MIB)
        with allocator.use_memory_pool():
            default = new(MIB)
        assert allocator.get_current_usage() == 6 * MIB
        fill(weights, 2 * MIB, 1); fill(default, MIB, 2)
        with raises(ValueError, "kv_cache"):
            allocator.sleep(("weights", "kv_cache"))
        assert backup(weights, 1) is None, "nothing sleeps"
        allocator.sleep("weights"); allocator.sleep(("weights",))
        assert backup(weights, 1)
        allocator.wake_up(["weights", "never heard of"])
        assert holds(weights, 2 * MIB, 1)
        with raises(MemorySaverError, "without a backup"):
            backup(kv, 1)
        assert holds(default, MIB, 2), "only weights and kv_cache can stay asleep"
        fill(scratch, MIB, 4)
        allocator.wake_up(); allocator.wake_up()
        fill(kv, 2 * MIB, 3)

        allocator.discard("kv_cache"); allocator.discard(("kv_cache", "never heard of"))
        with raises(MemorySaverError, "without a backup"):
            backup(kv, 1)
        assert holds(weights, 2 * MIB, 1) and backup(weights, 1) is None
        allocator.wake_up(["kv_cache"])
        fill(kv, 2 * MIB, 3)

        with allocator.use_memory_pool("weights"):
            drop(new(3 * MIB))
        assert sum(map(len, cached.values())) == 1
        allocator.release_pools(); allocator.close()
        assert not any(cached.values())
        assert holds(weights, 2 * MIB, 1) and allocator.get_current_usage() == 6 * MIB
        """
    )


@both
def test_captures_in_vllms_graph_pool_sleep(mode: str) -> None:
    """In torch's memory, then in an arena of `vmmgraph.enable`."""
    child(
        """
        torch.cuda.CUDAGraph = type("CUDAGraph", (), {})
        allocator = CuMemAllocator.get_instance()
        def capture():
            with allocator.cudagraph_pool() as pool:
                begin(0, pool)
                at = new(2 * MIB)
                under_way.remove(pool)
            return pool, at
        (pool, at), (again, other) = capture(), capture()
        assert pool == again and not c().tms_get_interesting_region()
        fill(at, 2 * MIB, 1); fill(other, 2 * MIB, 2)
        allocator.sleep(("weights", "cudagraph"))
        assert backup(at, 1) and backup(other, 1)
        allocator.wake_up(["weights"])
        assert holds(at, 2 * MIB, 1) and holds(other, 2 * MIB, 2)

        from vmmgraph import _core, _session
        session = _session._session = _session.Session(_core.any_one())
        session.executables = 0
        torch.cuda.CUDAGraph._named = None, ""
        with allocator.cudagraph_pool() as first, allocator.cudagraph_pool() as second:
            assert first == second != pool
        arena, = _session.arenas()
        assert arena.tag == "cudagraph" and session.arena_for(0, first, None) is arena
        allocator.sleep()
        assert arena.stats()["paused"]
        allocator.wake_up([])
        assert not arena.stats()["paused"]
        torch.cuda.CUDAGraph._mempool = None
        with raises(RuntimeError, "MemPool route"), allocator.cudagraph_pool():
            pass
        """,
        mode,
        VMMGRAPH_CORE_LIBRARY=str(next(LIBRARY.parent.glob("libvmmgraph.so*"))),
    )


def test_it_takes_the_place_of_torch_memory_saver() -> None:
    child(
        """
        before = list(sys.path), os.environ.get("PYTHONPATH")
        memory_saver.take_over(); memory_saver.take_over()
        import torch_memory_saver
        from torch_memory_saver import configure_subprocess, torch_memory_saver as one
        assert one is saver and torch_memory_saver.torch_memory_saver is saver
        folder = memory_saver.shim_path()
        assert sys.path[0] == folder and sys.path.count(folder) == 1
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [folder, before[1]]
        import importlib.metadata as metadata, torch_memory_saver.hooks.base, torch_memory_saver.utils
        assert metadata.version("torch_memory_saver") == metadata.version("torch-memory-saver") == "0.0.10"

        memory_saver.undo_take_over()
        assert (sys.path, os.environ.get("PYTHONPATH")) == before
        assert not [name for name in sys.modules if name.split(".")[0] == "torch_memory_saver"]
        with raises(ModuleNotFoundError):
            import torch_memory_saver
        with raises(metadata.PackageNotFoundError):
            metadata.version("torch_memory_saver")
        memory_saver.undo_take_over()
        assert (sys.path, os.environ.get("PYTHONPATH")) == before

        os.environ.pop("PYTHONPATH")
        memory_saver.take_over()
        assert os.environ["PYTHONPATH"] == folder
        memory_saver.undo_take_over()
        assert "PYTHONPATH" not in os.environ

        original = sys.modules["torch_memory_saver"] = types.ModuleType("torch_memory_saver")
        with raises(RuntimeError, "call take_over() before the import"):
            memory_saver.take_over()
        assert sys.path == before[0] and "PYTHONPATH" not in os.environ
        memory_saver.undo_take_over()
        assert sys.modules["torch_memory_saver"] is original
        """
    )


def test_nothing_is_taken_over_without_the_call() -> None:
    child(
        """
        import importlib.metadata as metadata
        assert memory_saver.shim_path() not in sys.path and memory_saver.shim_path() not in os.environ["PYTHONPATH"]
        with raises(ModuleNotFoundError):
            import torch_memory_saver
        with raises(metadata.PackageNotFoundError):
            metadata.version("torch_memory_saver")
        """
    )


#: Run by workers: exits unless torch_memory_saver is the shim.
WORKER = """
import importlib.metadata, os, sys
import torch_memory_saver
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.hooks.mode_preload import configure_subprocess
from torch_memory_saver.utils import get_binary_path_from_package
from vmmgraph import memory_saver
fits = (saver is memory_saver.torch_memory_saver, torch_memory_saver.__file__.startswith(memory_saver.shim_path()),
        importlib.metadata.version("torch_memory_saver") == "0.0.10",
        str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload")) == memory_saver.library_path())
sys.exit(0 if all(fits) else f"{fits} {torch_memory_saver.__file__}")
"""

STARTS = {
    # multiprocessing passes sys.path on.
    "spawn": "status = run_by('spawn')",
    "forkserver": "status = run_by('forkserver')",
    "fork": "status = run_by('fork')",
    # These get the environment only, as Ray's workers do.
    "subprocess": "status = subprocess.run([sys.executable, '-c', WORKER]).returncode",
    "grandchild": "status = subprocess.run(['sh', '-c', '\"$0\" -c \"$1\"', sys.executable, WORKER], cwd='/').returncode",
    # The program found vmmgraph by its sys.path, which a subprocess does not inherit.
    "vmmgraph_by_sys_path": "os.environ['PYTHONPATH'] = memory_saver.shim_path()\n"
    "status = subprocess.run([sys.executable, '-c', WORKER], cwd='/').returncode",
}


@pytest.mark.parametrize("how", STARTS)
def test_workers_import_the_shim(how: str) -> None:
    child(
        f"""
        import multiprocessing, subprocess
        WORKER = {WORKER!r}
        def run_by(context):
            worker = multiprocessing.get_context(context).Process(target=exec, args=(WORKER,))
            worker.start(); worker.join()
            return worker.exitcode
        memory_saver.take_over()
        exec({STARTS[how]!r})
        assert status == 0, status
        """
    )


def test_workers_of_a_process_without_the_call_import_the_original(tmp_path: Path) -> None:
    original = tmp_path / "torch_memory_saver"
    original.mkdir()
    (original / "__init__.py").write_text("original = True")
    child(
        f"""
        import multiprocessing, subprocess
        WORKER = "import torch_memory_saver; assert torch_memory_saver.original"
        def status():
            worker = multiprocessing.get_context("spawn").Process(target=exec, args=(WORKER,))
            worker.start(); worker.join()
            return worker.exitcode, subprocess.run([sys.executable, "-c", WORKER], stderr=subprocess.DEVNULL).returncode
        sys.path.append({str(tmp_path)!r})
        os.environ["PYTHONPATH"] += ":" + {str(tmp_path)!r}
        assert status() == (0, 0)
        memory_saver.take_over()
        assert status() == (1, 1)
        memory_saver.undo_take_over()
        assert status() == (0, 0)
        """
    )


#: Names of torch_memory_saver 0.0.10, by module.
SURFACE = {
    "": "TorchMemorySaver configure_subprocess torch_memory_saver",
    ".binary_wrapper": "BinaryWrapper _setup_function_signatures",
    ".entrypoint": "BinaryWrapper CpuBackupBackend HookMode HookUtilBase TorchMemorySaver _TAG_DEFAULT _TorchMemorySaverImpl "
    "_sanity_checks is_xpu",
    ".hooks": "",
    ".hooks.base": "HookMode HookUtilBase",
    ".hooks.mode_preload": "HookUtilBase HookUtilModePreload change_env configure_subprocess get_binary_path_from_package",
    ".hooks.mode_torch": "HookUtilBase HookUtilModeTorch get_binary_path_from_package is_xpu",
    ".testing_utils": "empty_cache get_and_print_gpu_memory get_device is_xpu",
    ".utils": "_SUPPORTED_CUDA_MAJORS _detect_cuda_major _is_rocm_torch change_env get_binary_path_from_package is_xpu",
}


@both
def test_the_shim_has_every_module_and_name(mode: str) -> None:
    child(
        f"""
        import importlib
        memory_saver.take_over()
        for module, names in {SURFACE!r}.items():
            module = importlib.import_module("torch_memory_saver" + module)
            assert not (missing := [name for name in names.split() if not hasattr(module, name)]), (module, missing)
        methods = ("region", "cuda_graph", "disable", "pause", "resume", "enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup",
                   "get_cpu_backup", "set_disk_backup_dir", "_impl", "_ensure_initialized")
        assert not [name for name in methods if name not in dir(memory_saver.TorchMemorySaver)]

        from torch_memory_saver.hooks.base import HookUtilBase
        from torch_memory_saver.utils import change_env
        hook = HookUtilBase.create({mode!r})
        assert hook.get_path_binary() == memory_saver.library_path()
        assert (hook.get_allocator() is not None) == ({mode!r} == "torch")
        with raises(ValueError, "'other'"):
            HookUtilBase.create("other")
        with change_env("VMMGRAPH_TEST_OF_ENV", "1"):
            assert os.environ["VMMGRAPH_TEST_OF_ENV"] == "1"
        assert "VMMGRAPH_TEST_OF_ENV" not in os.environ

        # slime and SGLang call the C functions.
        assert saver._impl is None
        saver._ensure_initialized()
        cdll = saver._impl._binary_wrapper.cdll
        with saver.region("weights"):
            assert cdll.tms_get_interesting_region() and cdll.tms_get_current_tag() == b"weights"
            cdll.tms_set_interesting_region(False)
            assert not c().tms_get_interesting_region()
            cdll.tms_set_interesting_region(True)
        wrapper = saver._impl._binary_wrapper
        wrapper.set_config(tag="kv", interesting_region=True, enable_cpu_backup=True, cpu_backup_backend="mmap")
        assert cdll.tms_get_current_tag() == b"kv" and cdll.tms_get_enable_cpu_backup() and cdll.tms_get_cpu_backup_backend() == b"mmap"
        wrapper.set_config(tag="kv", interesting_region=True, enable_cpu_backup=False, enable_disk_backup=True)
        assert cdll.tms_get_enable_disk_backup() and not cdll.tms_get_enable_cpu_backup()
        with raises(ValueError, "one backup"):
            wrapper.set_config(tag="kv", interesting_region=True, enable_cpu_backup=True, enable_disk_backup=True)
        """,
        mode,
    )


#: A worker as slime starts it: LD_PRELOAD is a library of the shim, and TMS_INIT_ENABLE covers all
#: memory.
PRELOADED_WORKER = """
import ctypes, os, sys, types
sys.modules["torch"] = types.ModuleType("torch")
from vmmgraph import memory_saver
from torch_memory_saver import torch_memory_saver as saver
preloaded = os.environ["LD_PRELOAD"]
assert "torch_memory_saver" in preloaded and memory_saver._library.preloaded() == [preloaded] and saver._ready().library.path == preloaded
c = saver._ready().c
assert c.tms_get_interesting_region()
at = c.tms_torch_malloc(1 << 20, 0, None)
assert at, saver._ready().library.last_error()
ctypes.memset(at, 5, 1 << 20)
saver.pause(); saver.resume()
assert ctypes.string_at(at, 1 << 20) == bytes([5]) * (1 << 20)
with memory_saver.configure_subprocess():
    assert os.environ["LD_PRELOAD"] == memory_saver.library_path(), "once"
assert memory_saver._library.Library("torch").path == preloaded, "no second saver"
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "memory_saver" in line}
assert loaded == {preloaded}, loaded
"""


def test_the_shim_names_a_library_for_the_cuda_of_torch(tmp_path: Path) -> None:
    """As in a wheel: copies of the library are beside the shim, and the core is in _lib."""
    package = tmp_path / "vmmgraph"
    shutil.copytree(ROOT / "python/vmmgraph", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (package / "_lib").mkdir()
    for core in LIBRARY.parent.glob("libvmmgraph.so*"):
        (package / "_lib" / core.name).symlink_to(core.resolve())
    for name in (
        f"torch_memory_saver_hook_mode_{mode}{cuda}" for mode in ("preload", "torch") for cuda in ("", "_cu12", "_cu13")
    ):
        shutil.copy(LIBRARY, package / "_shims" / f"{name}.abi3.so")
    shutil.copy(LIBRARY, package / "_lib")
    child(
        f"""
        import pathlib, subprocess
        memory_saver.take_over()
        from torch_memory_saver.utils import get_binary_path_from_package as path_of
        stem = "torch_memory_saver_hook_mode_preload"
        for cuda, ending in ("12.8", "_cu12.abi3.so"), ("13.0", "_cu13.abi3.so"), ("14.0", ".abi3.so"):
            torch.version = types.SimpleNamespace(cuda=cuda)
            assert path_of(stem) == pathlib.Path(memory_saver.shim_path(), stem + ending)
        with raises(RuntimeError, "'other'"):
            path_of("other")
        environment = os.environ | {{"LD_PRELOAD": str(path_of(stem)), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}}
        environment.pop("VMMGRAPH_CORE_LIBRARY", None)
        subprocess.run([sys.executable, "-c", {PRELOADED_WORKER!r}], env=environment, check=True)
        """,
        PYTHONPATH=str(tmp_path),
        VMMGRAPH_MEMORY_SAVER_LIBRARY="",
    )


@pytest.mark.parametrize("before", [None, "", "/one.so", "/one.so:/two.so"])
def test_subprocesses_get_the_library_first(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT / "python"))
    from vmmgraph import memory_saver

    monkeypatch.setenv("VMMGRAPH_MEMORY_SAVER_LIBRARY", str(LIBRARY))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("LD_PRELOAD", before)
    with pytest.raises(KeyError), memory_saver.configure_subprocess():
        inside = os.environ["LD_PRELOAD"]
        with memory_saver.configure_subprocess():
            assert os.environ["LD_PRELOAD"] == inside, "once"
        raise KeyError
    assert inside == ":".join([str(LIBRARY), *(before.split(":") if before else [])])
    assert os.environ.get("LD_PRELOAD") == before
    monkeypatch.setenv("VMMGRAPH_MEMORY_SAVER_LIBRARY", "/nowhere.so")
    with pytest.raises(FileNotFoundError, match="/nowhere.so"), memory_saver.configure_subprocess():
        pass


def test_the_core_that_is_loaded_is_used() -> None:
    """A process has one page pool."""
    core = next(LIBRARY.parent.glob("libvmmgraph.so*"))
    child(
        f"""
        import shutil, tempfile
        folder = tempfile.mkdtemp()
        alone = shutil.copy({str(LIBRARY)!r}, folder)
        memory_saver._library.library_path = lambda: alone
        os.environ["LD_LIBRARY_PATH"] = ""
        os.environ.pop("VMMGRAPH_CORE_LIBRARY", None)
        with saver.region():
            assert c().tms_torch_malloc(MIB, 0, None) is None
        code, why = saver._ready().library.last_error()
        assert code == 302 and "libvmmgraph.so" in why, why
        ctypes.CDLL({str(core)!r})
        with saver.region():
            allocate(MIB)
        paths = {{line.split()[-1] for line in open("/proc/self/maps") if "libvmmgraph.so" in line}}
        assert len(paths) == 1, paths
        """
    )


def test_the_shims_subprocesses_get_the_library_of_its_names() -> None:
    """Programs replace `get_binary_path_from_package`, as torch_memory_saver's tests do."""
    child(
        """
        memory_saver.take_over()
        from torch_memory_saver import configure_subprocess
        from torch_memory_saver.hooks import mode_preload
        os.environ["LD_PRELOAD"] = "/other.so"
        with configure_subprocess():
            assert os.environ["LD_PRELOAD"].split(":") == [memory_saver.library_path(), "/other.so"]
        mode_preload.get_binary_path_from_package = lambda stem: f"/elsewhere/{stem}.so"
        with configure_subprocess():
            assert os.environ["LD_PRELOAD"] == "/elsewhere/torch_memory_saver_hook_mode_preload.so:/other.so"
        assert os.environ["LD_PRELOAD"] == "/other.so"
        """
    )
