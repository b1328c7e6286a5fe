#!/usr/bin/env python3
"""vmmgraph.memory_saver under a real torch on a GPU: the assertions of torch_memory_saver's
examples, and more.

Each case runs in a separate process, in both hook modes where supported. Under pytest, or
standalone: prints a line for each case and finally "passed" or "failed".
VMMGRAPH_MEMORY_SAVER_LIBRARY names the library if the package has none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
HERE = Path(__file__).resolve()
MODES = ("preload", "torch")
#: Cases whose measurements are printed.
SHOWN = ("asleep_and_awake", "disk_backup", "two_hundred_cycles_are_flat", "a_checkpoint_is_small_while_asleep")
CASES: dict[str, tuple[tuple[str, ...], dict[str, str], int, object]] = {}


def case(modes=MODES, gpus=1, **environment):
    def note(function):
        CASES[function.__name__] = modes, environment, gpus, function
        return function

    return note


def free(device=None):
    import torch

    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def new(count, value=None, device="cuda"):
    import torch

    made = torch.empty(count, dtype=torch.uint8, device=device)
    return made if value is None else made.fill_(value)


def refused(call, *words):
    from vmmgraph.memory_saver import MemorySaverError

    try:
        call()
    except MemorySaverError as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError("not refused")


@case()
def simple(saver):
    with saver.region():
        x = new(GIB, 1)
    at, before = x.data_ptr(), free()
    saver.pause()
    assert free() - before > 0.9 * GIB
    saver.resume()
    assert x.data_ptr() == at and before - free() < 0.1 * GIB
    assert (x.fill_(2) == 2).all()


@case()
def cpu_backup(saver):
    import torch

    for backend in ("pinned", "mmap", None):
        with saver.region("kept", enable_cpu_backup=True, cpu_backup_backend=backend):
            kept = torch.randint(-1000, 1000, (20 * MIB,), device="cuda", dtype=torch.int32)
        with saver.region("lost"):
            lost = new(64 * MIB, 9)
        expected = kept.cpu()
        assert saver.get_cpu_backup(kept) is None
        saver.pause("lost")
        assert torch.equal(kept.cpu(), expected), "tags are independent"
        saver.pause("kept")
        assert torch.equal(saver.get_cpu_backup(kept), expected)
        assert torch.equal(saver.get_cpu_backup(kept[5:4000], zero_copy=True), expected[5:4000])
        refused(lambda lost=lost: saver.get_cpu_backup(lost), "without a backup")
        saver.resume("kept")
        # `resume` returns after the contents are restored.
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.equal(kept.cpu(), expected)
        assert saver.get_cpu_backup(kept) is None
        saver.resume()
        lost.fill_(1)
        del kept, lost
    outside = new(MIB)
    refused(lambda: saver.get_cpu_backup(outside), "no block of a region")


@case()
def disk_backup(saver):
    """Contents, bounded host memory, and speed beside a plain direct write and read. The medium's
    speed decides the size: a disk may write 0.1 GiB/s."""
    import shutil
    import tempfile
    import time

    import torch

    folder = tempfile.mkdtemp(dir=os.environ.get("VMMGRAPH_TEST_FOLDER"))
    saver.set_disk_backup_dir(folder)

    def plain(size, *arguments):
        """Returns GiB/s of dd."""
        count, began = size // (32 * MIB), time.perf_counter()
        subprocess.run(["dd", "bs=32M", f"count={count}", *arguments], check=True, capture_output=True)
        return size / GIB / (time.perf_counter() - began)

    # tmpfs has no direct I/O.
    direct = subprocess.run(
        ["dd", "if=/dev/zero", f"of={folder}/plain", "count=8", "oflag=direct"], capture_output=True, check=False
    )
    to, back = (["oflag=direct"], ["iflag=direct"]) if direct.returncode == 0 else ([], [])
    probe = plain(128 * MIB, "if=/dev/zero", f"of={folder}/plain", "conv=fsync", *to)
    size = min(4 * GIB, max(128 * MIB, int(probe * GIB) // (64 * MIB) * (64 * MIB)))
    written = plain(size, "if=/dev/zero", f"of={folder}/plain", "conv=fsync", *to)
    read = plain(size, f"if={folder}/plain", "of=/dev/null", *back)
    os.unlink(f"{folder}/plain")
    with saver.region("files", enable_disk_backup=True):
        large = torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8)
        small = new(7, 5)
    expected, before = large.clone(), free()
    for _ in range(2):
        began = time.perf_counter()
        saver.pause()
        paused = time.perf_counter()
        assert free() - before > 0.9 * size and len(os.listdir(folder)) >= 2
        held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        resumed = time.perf_counter()
        saver.resume()
        awake = time.perf_counter()
        assert torch.equal(large, expected) and (small == 5).all() and not os.listdir(folder)
    pause, resume = size / GIB / (paused - began), size / GIB / (awake - resumed)
    print(
        f"{size / GIB:.2f} GiB in {folder}: pause {pause:.2f} GiB/s, {pause / written:.2f} x dd; "
        f"resume {resume:.2f} GiB/s, {resume / read:.2f} x dd; {held / MIB:.0f} MiB on the host"
    )
    shutil.rmtree(folder)


@case()
def retained_backup(saver):
    saver.retain_cpu_backup = True
    with saver.region(enable_cpu_backup=True):
        x = new(32 * MIB, 1)
    saver.pause()
    shown = saver.get_cpu_backup(x, zero_copy=True)
    saver.resume()
    assert (shown == 1).all() and saver.get_cpu_backup(x, zero_copy=True).data_ptr() == shown.data_ptr()
    x.fill_(2)
    saver.pause()
    assert saver.get_cpu_backup(x, zero_copy=True).data_ptr() == shown.data_ptr() and (shown == 2).all()
    saver.resume()


@case(modes=("preload",))
def cuda_graph(saver):
    import torch

    with saver.region("kv"):
        cache = torch.full((500 * MIB,), 1, dtype=torch.uint8, device="cuda")
    given, graph = torch.tensor([100.0], device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with saver.cuda_graph(graph, tag="graph"):
        large = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda").fill_(1)
        output = given + large[-1].float()
    graph.replay()
    assert output.item() == 101
    before = free()
    saver.pause("kv")
    middle = free()
    assert middle - before > 400 * MIB
    saver.pause("graph")
    assert free() - middle > 2.9 * GIB
    other = new(5 * GIB // 2, 4)
    del other
    torch.cuda.empty_cache()
    saver.resume()
    given.fill_(201)
    cache.fill_(1)
    graph.replay()
    assert output.item() == 202


@case()
def granularity_and_free_while_paused(saver):
    with saver.region(enable_cpu_backup=True):
        small = [new(6912, number) for number in range(3)]
        large = [new(64 * MIB, 10 + number) for number in range(3)]
    saver.pause()
    del small[1], large[1]
    import torch

    torch.cuda.empty_cache()
    saver.resume()
    assert [each.unique().tolist() for each in small + large] == [[0], [2], [10], [12]]


@case()
def nested_regions(saver):
    with saver.region("outer", enable_cpu_backup=True):
        first = new(64 * MIB, 1)
        with saver.region("inner"):
            inner = new(64 * MIB, 2)
        second = new(64 * MIB, 3)
    saver.pause("outer")
    assert (inner == 2).all()
    saver.pause("inner")
    saver.resume()
    inner.fill_(0)
    assert (first == 1).all() and (second == 3).all()


@case(modes=("preload",), TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")
def training_engine(saver):
    import torch

    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    at_first = free()
    parameters = new(2 * GIB, 5)
    with saver.disable():
        start = free()
        workspace = new(4 * GIB, 1)
        assert start - free() > 3.9 * GIB
        saver.pause()
        assert (workspace[::MIB] == 1).all(), "what is disabled stays"
        saver.resume()
        del workspace
    assert start - free() < 200 * MIB, "and its pool goes"
    there = free()
    saver.pause()
    assert at_first - free() < 200 * MIB
    saver.resume()
    assert abs(free() - there) < 50 * MIB and (parameters == 5).all()
    del parameters
    for _ in range(3):
        new(GIB, 1)
        torch.cuda.empty_cache()
    assert at_first - free() < 200 * MIB


@case(modes=("preload",), TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")
def allocation_while_everything_is_paused(saver):
    """Torch's default pool caches parts of paused memory, of each size class."""
    import gc

    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        print("SKIPPED: torch up to 2.9 uses the pool begun first")
        return
    sizes = (64 * MIB, 3 * MIB, 4096)
    kept, gone = [new(size, 1) for size in sizes], [new(size, 2) for size in sizes]
    for _ in range(3):
        saver.pause()
        gone.clear()
        gc.collect()
        gone = [new(size, 3) for size in sizes]
        with saver.disable():
            assert (new(MIB, 4) == 4).all()
        with saver.region("other", enable_cpu_backup=True):
            other = new(MIB, 5)
        assert all((each == 3).all() for each in gone)
        saver.resume()
        assert all((each == 3).all() for each in gone) and all((each == 1).all() for each in kept) and (other == 5).all()


@case()
def disable_inside_a_region(saver):
    """Its pool ends while the region's is in use."""
    with saver.region("weights", enable_cpu_backup=True):
        weights = new(64 * MIB, 1)
        with saver.disable():
            kept = new(64 * MIB, 2)
            start = free()
            workspace = new(GIB, 3)
            del workspace
        assert free() - start > -64 * MIB, "and its pool goes"
        more = new(64 * MIB, 4)
    saver.pause()
    assert (kept == 2).all(), "what is disabled stays"
    saver.resume()
    assert (weights == 1).all() and (more == 4).all()


@case(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
def expandable_segments(saver):
    with saver.region("weights", enable_cpu_backup=True):
        weights = new(GIB, 1)
    before = free()
    saver.pause()
    assert free() - before > 0.9 * GIB
    others = new(64 * MIB, 2)
    saver.resume()
    assert (weights == 1).all() and (others == 2).all()


@case()
def quantized_as_loaded(saver):
    """Only the quantized weights stay, also on the host."""
    import torch

    # The CUDA context grows at its first streams (70 MiB) and kernels.
    torch.cuda.Stream()
    torch.full((4,), 1.0, dtype=torch.bfloat16, device="cuda").to(torch.int8)
    torch.cuda.empty_cache()
    before, weights = free(), []
    for number in range(16):
        with saver.region("weights", enable_cpu_backup=True):
            original = torch.full((64 * MIB,), float(number), dtype=torch.bfloat16, device="cuda")
            weights.append(original.to(torch.int8))
            del original
    assert before - free() < 1.2 * GIB
    saver.pause()
    remain = before - free()
    assert remain < 64 * MIB, f"{remain / MIB:.0f} MiB remain"
    saver.resume()
    assert all((weight == number).all() for number, weight in enumerate(weights))


@case()
def allocation_while_paused(saver):
    """Torch caches freed parts of paused memory."""
    import gc

    def fresh(size, value):
        with saver.region("adapters", enable_cpu_backup=True):
            return new(size, value)

    sizes = (64 * MIB, 3 * MIB, 4096)
    kept, gone = [fresh(size, 1) for size in sizes], [fresh(size, 2) for size in sizes]
    for _ in range(3):
        saver.pause("adapters")
        gone.clear()
        gc.collect()
        gone = [fresh(size, 3) for size in sizes]
        assert all((each == 3).all() for each in gone)
        saver.resume("adapters")
        assert all((each == 3).all() for each in gone) and all((each == 1).all() for each in kept)


@case(TMS_INIT_CPU_BACKUP_BACKEND="mmap", TMS_RETAIN_CPU_BACKUP="1")
def environment(saver):
    assert saver.retain_cpu_backup and saver._ready().c.tms_get_cpu_backup_backend() == b"mmap"
    with saver.region(enable_cpu_backup=True):
        x = new(MIB, 1)
    saver.pause()
    shown = saver.get_cpu_backup(x, zero_copy=True)
    saver.resume()
    assert (shown == 1).all()


@case(gpus=2)
def two_devices(saver):
    import torch

    tensors = []
    for device in (1, 0):
        with torch.cuda.device(device), saver.region("both", enable_cpu_backup=True):
            tensors.append(new(GIB, device + 1, "cuda"))
    torch.cuda.set_device(0)
    before = [free(0), free(1)]
    saver.pause("both")
    assert torch.cuda.current_device() == 0
    assert all(free(device) - before[device] > 0.8 * GIB for device in (0, 1))
    saver.resume("both")
    assert torch.cuda.current_device() == 0 and (tensors[0] == 2).all() and (tensors[1] == 1).all()


@case()
def pausing_in_a_capture_harms_nothing(saver):
    """Not in torch_memory_saver's tests."""
    import torch

    with saver.region("captured", enable_cpu_backup=True):
        block = new(64 * MIB, 6)
    given, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    (given + 1).sum()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = given + 1
        first = refused(saver.pause)
        others = []
        thread = threading.Thread(target=lambda: others.append(refused(lambda: saver.pause("captured"))))
        thread.start()
        thread.join()
        output += 1
    assert first.code == 900 and others[0].code == 900
    given.fill_(5)
    graph.replay()
    assert output.tolist() == [7.0] * 8 and (block == 6).all()
    saver.pause()
    saver.resume()
    assert (block == 6).all()


@case()
def no_memory_at_a_resume_is_a_value(saver):
    import torch
    from vmmgraph.memory_saver import OutOfMemory

    with saver.region(enable_cpu_backup=True):
        x = new(4 * GIB, 3)
    saver.pause()
    torch.cuda.empty_cache()
    others = new(free() - GIB)
    for _ in range(2):
        assert isinstance(refused(saver.resume), OutOfMemory)
        assert (saver.get_cpu_backup(x)[:: 16 * MIB] == 3).all(), "still paused, and whole"
    del others
    torch.cuda.empty_cache()
    saver.resume()
    assert (x == 3).all()


@case()
def margin(saver):
    import torch

    torch.zeros(1, device="cuda")
    saver.memory_margin_bytes = free() - GIB
    with saver.region(), contextlib.suppress(torch.cuda.OutOfMemoryError):
        new(2 * GIB)
        raise AssertionError("the margin is not kept")
    saver.memory_margin_bytes = 0
    with saver.region():
        new(2 * GIB, 1)


@case()
def work_in_flight(saver):
    """A pause waits for any stream."""
    import torch

    with saver.region(enable_cpu_backup=True):
        x = torch.zeros(64 * MIB, dtype=torch.float32, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for cycle in range(10):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                part = x[number * 16 * MIB : (number + 1) * 16 * MIB]
                for _ in range(50):
                    part += 1
        saver.pause()
        saver.resume()
        assert x[: 48 * MIB].unique().tolist() == [50.0 * (cycle + 1)]


@case()
def threads(saver):
    def cycles(tag, value):
        with saver.region(tag, enable_cpu_backup=True):
            x = new(128 * MIB, value)
        for _ in range(20):
            saver.pause(tag)
            saver.resume(tag)
        wrong.extend([] if (x == value).all() else [tag])

    wrong: list[str] = []
    running = [threading.Thread(target=cycles, args=(f"tag {number}", number)) for number in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


@case()
def calls_of_vllm(saver):
    from vmmgraph.memory_saver import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = new(GIB, 1)
    with allocator.use_memory_pool("kv_cache"):
        cache = new(2 * GIB, 2)
    assert allocator.get_current_usage() >= 3 * GIB
    before = free()
    allocator.sleep("weights")
    assert free() - before > 2.9 * GIB
    allocator.wake_up(["weights"])
    assert free() - before > 1.9 * GIB
    assert (weights == 1).all()
    allocator.wake_up()
    assert (cache.fill_(4) == 4).all()


@case()
def beside_arenas(saver):
    """One core with one pool, and a graph over memory paused in between."""
    import torch
    import vmmgraph

    if not os.environ.get("VMMGRAPH_LIBRARY") and vmmgraph.library_path() is None:
        print("SKIPPED: no library for this torch")
        return
    with saver.region("weights", enable_cpu_backup=True):
        weights = new(64 * MIB, 3)
    assert vmmgraph.enable(strict=True).route == "blocks"
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libvmmgraph" in line}
    cores = {path for path in paths if "memory_saver" not in path}
    assert len(cores) == 1, cores
    graph, output = torch.cuda.CUDAGraph(), torch.empty(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output.copy_((weights[:MIB] + 1) * 2)
    assert graph.arena.map()["held_bytes"] > 0
    assert any(holder["kind"] == "region" for holder in graph.arena.map()["holders"])
    saver.pause("weights")
    saver.resume("weights")
    graph.replay()
    assert (output == 8).all()
    graph.reset()


def engine(saver, graphs=24, cache_bytes=2 * GIB):
    """Returns graphs of one pool over weights and a cache in regions, a function that checks their
    outputs and keeps their inputs alive, and the free bytes before."""
    import gc

    import torch
    import vmmgraph

    if not os.environ.get("VMMGRAPH_LIBRARY") and vmmgraph.library_path() is None:
        print("SKIPPED: no library for this torch")
        sys.exit(0)
    vmmgraph.enable(strict=True)
    torch.manual_seed(0)
    step = min(16, 512 // graphs)
    sizes = [step * (number + 1) for number in range(graphs)]

    def run(x, weights, cache):
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.sum(1) + cache[0]

    def warm_up():
        """The CUDA context grows at the first launch of each kernel, capture and mapped page."""
        weight = torch.randn(2048, 2048, device="cuda")
        for size in sizes:
            y = run(torch.randn(512, 2048, device="cuda")[:size], [weight], new(1, 0))
            torch.equal(y, y.clone().zero_())
        with saver.region("weights", enable_cpu_backup=True):
            weight = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weight += 1
        saver.pause()
        saver.resume()
        graph.replay()
        torch.cuda.synchronize()

    at_first = free()
    warm_up()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    saver.pause()
    saver.resume()
    torch.cuda.empty_cache()
    start = free()
    print(f"the context has grown by {(at_first - start) / MIB:.1f} MiB")
    with saver.region("weights", enable_cpu_backup=True):
        weights = [torch.randn(2048, 2048, device="cuda") / 45 for _ in range(16)]
        x = torch.randn(512, 2048, device="cuda")
    with saver.region("kv"):
        cache = new(cache_bytes, 0)
    pool, made = torch.cuda.graph_pool_handle(), []
    for size in sizes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = run(x[:size], weights, cache)
        graph.replay()
        made.append((graph, y, y.clone()))
    torch.cuda.synchronize()

    def check(inputs=(x, weights)):
        """A graph keeps no tensor alive: without `inputs` a pause would free the weights."""
        assert inputs
        cache.zero_()
        for graph, y, expected in reversed(made):
            y.zero_()
            graph.replay()
            assert torch.equal(y, expected)

    check()
    return made, check, start


@case()
def asleep_and_awake(saver):
    """Bytes that stay by name, times of both levels, and replays that are refused."""
    import time

    import torch
    import vmmgraph

    made, check, start = engine(saver)
    held = start - free()
    for level in (1, 2):
        began = time.perf_counter()
        (ledger,) = vmmgraph.sleep(level)
        slept = time.perf_counter()
        stays = start - free()
        try:
            made[0][0].replay()
            raise AssertionError("a replay while asleep")
        except vmmgraph.Error as error:
            assert "paused" in str(error), error
        woken = time.perf_counter()
        vmmgraph.wake()
        awake = time.perf_counter()
        made[0][0].replay()
        torch.cuda.synchronize()
        first = time.perf_counter()
        check()
        print(
            f"level {level}: {held / MIB:.1f} MiB awake, {stays / MIB:.1f} asleep; sleep {slept - began:.3f} s, wake {awake - woken:.3f} s, "
            f"first replay {first - awake:.4f} s"
        )
        print(ledger.table())
        assert stays <= 64 * MIB and ledger.named() == ledger.total
    vmmgraph.sleep()
    vmmgraph.wake(["weights"])
    assert start - free() < 0.5 * held
    vmmgraph.wake()
    check()


@case(modes=("torch",))
def workspaces_of_earlier_graphs_stay(saver):
    """Torch frees the workspaces in its table with the table, and a captured product has one's
    address."""
    import torch
    import vmmgraph

    x, weight = torch.randn(16, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        x @ weight
    torch.cuda.synchronize()

    def workspaces():
        segments = torch.cuda.memory_snapshot()
        return {each["address"] for each in segments if each["stream"] == stream.cuda_stream and each["active_size"] > 0}

    with torch.cuda.graph(graph, stream=stream):
        y = x @ weight
    graph.replay()
    expected, before = y.clone(), workspaces()
    assert before
    vmmgraph.enable(strict=True)
    vmmgraph.sleep()
    assert workspaces() == before
    vmmgraph.wake()
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)


@case(modes=("torch",))
def pieces_are_paused_by_their_tag(saver):
    """Pieces of breakable and piecewise graphs, with eager work between them."""
    import torch
    import vmmgraph

    vmmgraph.enable(strict=True)
    with saver.region("weights", enable_cpu_backup=True):
        weights = [torch.randn(2048, 2048, device="cuda") / 45 for _ in range(6)]
    inputs, pool, made = torch.randn(4096, 2048, device="cuda"), torch.cuda.graph_pool_handle(), []

    def between(h):
        h += h.mean()

    # Workspaces and kernels.
    between(torch.relu(inputs @ weights[0]))
    torch.cuda.synchronize()
    before = free()
    for size in (4096, 2048, 1024):
        h, pieces = inputs[:size], []
        with vmmgraph.shape(str(size)):
            for weight in weights:
                graph = torch.cuda.CUDAGraph()
                with saver.cuda_graph(graph, pool=pool, tag="graphs"):
                    h = torch.relu(h @ weight)
                between(h)
                pieces.append((graph, h))
        made.append((pieces, inputs[:size]))
    assert len({graph.arena for pieces, _ in made for graph, _ in pieces}) == 1
    held = before - free()

    def check():
        for pieces, h in made:
            for (graph, output), weight in zip(pieces, weights, strict=True):
                graph.replay()
                between(output)
                h = torch.relu(h @ weight)
                between(h)
            assert torch.allclose(output, h, rtol=1e-3, atol=1e-3)

    check()
    torch.cuda.empty_cache()
    awake = free()
    for tag in ("graphs", None):
        saver.pause(tag)
        # A workspace of 32 MiB and executables stay.
        assert free() - awake > held - 64 * MIB, (free() - awake, held)
        assert tag is None or (weights[0] == weights[0]).all()
        try:
            made[0][0][0][0].replay()
            raise AssertionError("a replay of paused pieces")
        except vmmgraph.Error as error:
            assert "paused" in str(error), error
        saver.resume(tag)
        check()


SLEEPER = """
import sys
sys.path.insert(0, sys.argv[1])
import test_memory_saver_gpu as cases, vmmgraph
from vmmgraph.memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
made, check, start = cases.engine(saver, 65, int(sys.argv[2]))
for asleep in (False, True):
    if asleep:
        vmmgraph.sleep()
    print("ready", flush=True)
    input()
    if asleep:
        vmmgraph.wake()
    check()
print("right")
"""


@case(modes=("torch",))
def a_checkpoint_is_small_while_asleep(saver):
    """The driver keeps a checkpoint in the process's host memory. 65 graphs, a cache of 16 GiB."""
    import ctypes
    import time

    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuCheckpointProcessLock"):
        print("SKIPPED: the driver makes no checkpoints")
        return
    cache_bytes = 16 * GIB
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(HERE.parent), str(cache_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(name):
        began = time.perf_counter()
        code = getattr(driver, f"cuCheckpointProcess{name}")(child.pid, None)
        assert code == 0, (name, code)
        return time.perf_counter() - began

    def resident():
        return int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    images = []
    try:
        for name in ("awake", "asleep"):
            for line in child.stdout:
                if line.startswith("SKIPPED"):
                    print(line)
                    return
                if line == "ready\n":
                    break
            call("Lock")
            before = resident()
            out = call("Checkpoint")
            images.append(resident() - before)
            back = call("Restore")
            call("Unlock")
            child.stdin.write("on\n")
            child.stdin.flush()
            print(f"checkpoint {name}: {images[-1] / MIB:.0f} MiB, {out:.2f} s, restore {back:.2f} s")
        assert child.stdout.readline() == "right\n" and child.wait(timeout=30) == 0
    finally:
        child.kill()
    assert images[1] + cache_bytes <= images[0]


@case()
def two_hundred_cycles_are_flat(saver):
    """Device, host and file descriptors."""
    import vmmgraph

    def state():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return free(), pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    _, check, _ = engine(saver)
    for cycle in range(200):
        vmmgraph.sleep(1 + cycle % 2)
        vmmgraph.wake()
        if cycle % 20 == 0:
            check()
        if cycle == 20:
            early = state()
    late = state()
    print(f"after 20 and 200 cycles: {early}, {late}")
    assert abs(late[0] - early[0]) <= 4 * MIB and late[1] - early[1] <= 16 * MIB and late[2] == early[2]


def no_gpu(count=1):
    """Returns the reason to skip, or None."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
    except (OSError, subprocess.CalledProcessError):
        found = 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = min(found, sum(bool(device.strip()) for device in visible.split(",")))
    return None if found >= count else f"SKIPPED: needs {count} GPU{'s' * (count > 1)}"


def library():
    named = os.environ.get("VMMGRAPH_MEMORY_SAVER_LIBRARY")
    return os.path.abspath(named) if named else None


def run(name, mode):
    own = os.environ | CASES[name][1]
    package = os.environ.get("VMMGRAPH_TEST_PACKAGE", str(HERE.parents[2] / "python") if len(HERE.parents) > 2 else "")
    own["PYTHONPATH"] = os.pathsep.join(each for each in (package, os.environ.get("PYTHONPATH")) if each)
    own.pop("LD_PRELOAD", None)
    if library():
        own["VMMGRAPH_MEMORY_SAVER_LIBRARY"] = library()
    done = subprocess.run([sys.executable, HERE, name, mode], env=own, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def test_cases():
    """Parametrized under pytest."""


try:
    import pytest
except ImportError:
    pytest = None
else:

    @pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, entry in CASES.items() for mode in entry[0]])
    def test_cases(name, mode):
        why = no_gpu(CASES[name][2])
        if why:
            pytest.skip(why)
        status, said = run(name, mode)
        assert status == 0, said


def main(arguments):
    if len(arguments) == 2:
        from vmmgraph import memory_saver

        name, mode = arguments
        if mode == "preload" and not memory_saver._library.preloaded():
            with memory_saver.configure_subprocess():
                return subprocess.run([sys.executable, HERE, name, mode], check=False).returncode
        saver = memory_saver.torch_memory_saver
        saver.hook_mode = mode
        CASES[name][3](saver)
        return 0
    if no_gpu():
        print(no_gpu())
        return 0
    wrong = 0
    for name, (modes, _, gpus, _) in CASES.items():
        for mode in modes:
            if no_gpu(gpus):
                print(f"       {name}, {mode}: {no_gpu(gpus)}", flush=True)
                continue
            status, said = run(name, mode)
            print(f"{'ok    ' if status == 0 else 'WRONG '} {name}, {mode}", flush=True)
            wrong += status != 0
            if status or name in SHOWN:
                print(said, flush=True)
    print("failed" if wrong else "passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
