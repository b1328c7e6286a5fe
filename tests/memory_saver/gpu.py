#!/usr/bin/env python3
"""gpu.py LIBRARY: the memory saver under a real torch, in both modes. Needs a GPU and torch;
scripts/gpu.sh runs it.

Runs itself twice: with LIBRARY (libvmmgraph_memory_saver.so) preloaded, and with LIBRARY as a
pluggable allocator. Prints results, RESULT lines, and finally "passed" or "failed".
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import time

MIB, GIB = 1 << 20, 1 << 30
wrong = []


def check(holds, what, detail=""):
    print(f"{'ok    ' if holds else 'WRONG '} {what} {detail}".rstrip(), flush=True)
    if not holds:
        wrong.append(what)


class Saver:
    def __init__(self, library):
        self.c = library
        library.tms_set_current_tag.argtypes = library.tms_pause.argtypes = library.tms_resume.argtypes = [ctypes.c_char_p]
        for name in ("tms_set_interesting_region", "tms_set_enable_cpu_backup"):
            getattr(library, name).argtypes = [ctypes.c_bool]
        library.set_memory_margin_bytes.argtypes = [ctypes.c_uint64]
        library.tms_get_cpu_backup_pointer.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.tms_get_cpu_backup_pointer.restype = ctypes.c_void_p
        library.tms_last_error.argtypes = [ctypes.POINTER(ctypes.c_char_p)]

    @contextlib.contextmanager
    def region(self, tag, backup=False):
        self.c.tms_set_current_tag(tag.encode())
        self.c.tms_set_enable_cpu_backup(backup)
        self.c.tms_set_interesting_region(True)
        try:
            yield
        finally:
            self.c.tms_set_interesting_region(False)

    def timed(self, call, tag=None):
        start = time.perf_counter()
        code = getattr(self.c, call)(tag.encode() if tag else None)
        return code, time.perf_counter() - start

    def words(self):
        text = ctypes.c_char_p()
        code = self.c.tms_last_error(ctypes.byref(text))
        return code, (text.value or b"").decode()


def free_bytes():
    import torch

    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def both_modes(saver, allocating, mode):
    """`allocating(tag, backup)`: a context in which torch allocates from a region."""
    import torch

    start = free_bytes()
    torch.cuda.empty_cache()
    with allocating("weights", True):
        weights = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    with allocating("kv", False):
        kv = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    weights.random_(0, 256)
    kv.fill_(7)
    expected = weights[:: 4 * MIB + 1].cpu()
    total = weights.view(torch.int32).sum().item()
    torch.cuda.empty_cache()
    at = weights.data_ptr(), kv.data_ptr()
    before = free_bytes()

    code, took = saver.timed("tms_pause", "kv")
    rose = free_bytes() - before
    check(
        code == 0 and rose >= 2 * GIB - 64 * MIB, f"{mode}: pausing kv frees it", f"{rose / GIB:.2f} GiB in {took * 1e3:.1f} ms"
    )
    check((weights[:: 4 * MIB + 1].cpu() == expected).all().item(), f"{mode}: weights stay")
    code, first = saver.timed("tms_pause", "weights")
    rose = free_bytes() - before
    check(code == 0 and rose >= 6 * GIB - 128 * MIB, f"{mode}: pausing weights frees them too", f"{rose / GIB:.2f} GiB")
    check(saver.timed("tms_pause")[0] == 0 and free_bytes() - before == rose, f"{mode}: pausing twice does nothing")

    pointer = saver.c.tms_get_cpu_backup_pointer(at[0] + MIB + 3, 4096)
    held = bytes((ctypes.c_ubyte * 4096).from_address(pointer)) if pointer else b""
    check(saver.c.tms_get_cpu_backup_pointer(at[1], 16) is None, f"{mode}: what has no backup has no pointer", str(saver.words()))

    other = torch.full((3 * GIB,), 3, dtype=torch.uint8, device="cuda")
    check(other[-1].item() == 3, f"{mode}: others can have the memory")
    del other
    torch.cuda.empty_cache()
    code, took = saver.timed("tms_resume")
    check(code == 0, f"{mode}: all comes back", str(saver.words()))
    check((weights.data_ptr(), kv.data_ptr()) == at, f"{mode}: at the same addresses")
    check(weights.view(torch.int32).sum().item() == total, f"{mode}: with the same bytes")
    check(held == weights[MIB + 3 : MIB + 3 + 4096].cpu().numpy().tobytes(), f"{mode}: which the backup pointer had too")
    kv.fill_(9)
    check(kv.view(torch.int64)[-1].item() == 0x0909090909090909, f"{mode}: kv can be written")
    check(saver.timed("tms_resume")[0] == 0, f"{mode}: resuming twice does nothing")

    code, out = saver.timed("tms_pause", "weights")
    code, back = saver.timed("tms_resume", "weights")
    check(weights.view(torch.int32).sum().item() == total, f"{mode}: and again")
    print(f"RESULT {mode} backup of 4 GiB: first pause {4 / first:.1f} GiB/s, second {4 / out:.1f}, resume {4 / back:.1f}")
    code, out = saver.timed("tms_pause", "kv")
    code, back = saver.timed("tms_resume", "kv")
    print(f"RESULT {mode} discard of 2 GiB: pause {out * 1e3:.1f} ms, resume {back * 1e3:.1f} ms")
    saver.timed("tms_pause", "kv")
    del weights, kv
    return start


def graph(saver):
    """Allocated during the capture."""
    import torch

    weight = torch.randn(1024, 1024, device="cuda")
    with saver.region("graph", True):
        given = torch.randn(64, 1024, device="cuda")
        captured = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        for _ in range(2):
            torch.relu(given @ weight) @ weight
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = free_bytes()
        with torch.cuda.graph(captured):
            output = torch.relu(given @ weight) @ weight
            large = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda") + 5
    captured.replay()
    torch.cuda.synchronize()
    expected = output.clone()
    check(before - free_bytes() >= 200 * MIB, "graph: captured memory is there")
    at_pause = free_bytes()
    check(saver.timed("tms_pause", "graph")[0] == 0, "graph: its memory steps aside", str(saver.words()))
    rose = free_bytes() - at_pause
    check(rose >= 200 * MIB, "graph: and is free for others", f"{rose // MIB} MiB")
    check(saver.timed("tms_resume", "graph")[0] == 0, "graph: it comes back", str(saver.words()))
    given.normal_()
    captured.replay()
    check(not torch.equal(output, expected), "graph: other input, other output")
    eager = torch.relu(given @ weight) @ weight
    check(torch.allclose(output, eager, rtol=1e-3, atol=1e-1), "graph: replays as eager")
    check((large == 5).all().item(), "graph: all of its memory")


def runtime():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libcudart" in line}
    return ctypes.CDLL(paths.pop())


def out_of_memory(saver):
    import torch

    cudart, block = runtime(), ctypes.c_void_p()
    before = free_bytes()
    with saver.region("too much", False):
        code = saver.c.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(1 << 45))
        last = cudart.cudaGetLastError(), cudart.cudaGetLastError()
        check(
            code == 2 and last == (2, 0),
            "out of memory is a value, and the runtime's last error once",
            f"{code} {last} {saver.words()}",
        )
        try:
            torch.empty(before + GIB, dtype=torch.uint8, device="cuda")
            check(False, "torch is out of memory")
        except torch.cuda.OutOfMemoryError:
            check(torch.ones(8, device="cuda").sum().item() == 8, "torch is out of memory, and goes on")
        saver.c.set_memory_margin_bytes(before - GIB)
        try:
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
            check(False, "the margin stays free")
        except torch.cuda.OutOfMemoryError:
            check(True, "the margin stays free")
        saver.c.set_memory_margin_bytes(0)
    foreign = ctypes.c_void_p()
    check(cudart.cudaMalloc(ctypes.byref(foreign), ctypes.c_size_t(MIB)) == 0, "the runtime's own memory")
    check(saver.c.cudaFree(foreign) == 0, "is freed through the library")


def devices(saver):
    import torch

    if torch.cuda.device_count() < 2:
        print("one GPU only: several are not looked at")
        return
    with saver.region("both", True):
        there = torch.full((GIB,), 4, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(1)
    before = torch.cuda.mem_get_info(1)[0]
    check(
        saver.timed("tms_pause", "both")[0] == 0 and torch.cuda.mem_get_info(1)[0] - before >= GIB - 64 * MIB,
        "device 1: steps aside",
    )
    check(saver.timed("tms_resume", "both")[0] == 0 and (there == 4).all().item(), "device 1: comes back")


def in_a_capture(saver):
    """Runs last: a device wait would end any capture."""
    import torch

    with saver.region("captured", True):
        block = torch.full((64 * MIB,), 6, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    codes = []
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            codes.append(saver.timed("tms_pause", "captured")[0])
    except RuntimeError as error:
        print(f"       the capture: {str(error).splitlines()[0]}")
    check(codes and codes[0] != 0, "a pause in a capture is refused", f"{codes} {saver.words()}")
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    check((block == 6).all().item(), "and nothing went")


def preloaded():
    import torch

    saver = Saver(ctypes.CDLL(None))
    # Initializes cuBLAS, whose workspaces stay.
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    start = both_modes(saver, saver.region, "preload")
    torch.cuda.empty_cache()
    left = start - free_bytes()
    check(
        left <= 64 * MIB,
        "preload: freed memory is the device's again, also what was paused",
        f"{left // MIB} MiB less than at the beginning",
    )
    saver.timed("tms_resume")
    graph(saver)
    out_of_memory(saver)
    devices(saver)
    in_a_capture(saver)


def hooked(path):
    import torch

    saver = Saver(ctypes.CDLL(path))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "tms_torch_malloc", "tms_torch_free")
    pools = []

    @contextlib.contextmanager
    def allocating(tag, backup):
        pools.append(torch.cuda.MemPool(allocator.allocator()))
        with saver.region(tag, backup), torch.cuda.use_mem_pool(pools[-1]):
            yield

    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    start = both_modes(saver, allocating, "hook")
    pools.clear()
    torch.cuda.empty_cache()
    left = start - free_bytes()
    print(f"RESULT hook: {left // MIB} MiB less free than at the beginning")
    saver.timed("tms_resume")


def main(path, mode=None):
    if mode:
        preloaded() if mode == "preload" else hooked(path)
        print(f"{len(wrong)} wrong: {wrong}" if wrong else f"{mode}: all as it should be")
        return 1 if wrong else 0
    codes = []
    for each, preload in (("preload", path), ("hook", None)):
        environment = dict(os.environ)
        environment.pop("LD_PRELOAD", None)
        if preload:
            environment["LD_PRELOAD"] = preload
        codes.append(subprocess.run([sys.executable, __file__, path, each], check=False, env=environment).returncode)
    print("failed" if any(codes) else "passed")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(os.path.abspath(sys.argv[1]), *sys.argv[2:]))
