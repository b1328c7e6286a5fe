"""Pauses weights, KV cache and a captured graph for a training step, and resumes all three."""

import torch
import vmmgraph
from vmmgraph.memory_saver import torch_memory_saver as saver

saver.hook_mode = "torch"  # needs no LD_PRELOAD
vmmgraph.enable()  # before the first region: graphs and regions share one page pool


def used_mib() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 64


with torch.inference_mode():
    with saver.region("weights", enable_cpu_backup=True):  # a resume restores the contents
        weights = [random(4096, 4096) for _ in range(32)]  # 1 GiB
    with saver.region("kv"):  # a pause discards the contents
        cache = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")

    x = random(1024, 4096)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graphs"):
        y = x
        for weight in weights:
            y = torch.relu(y @ weight)
    graph.replay()
    expected, addresses = y.clone(), [weight.data_ptr() for weight in weights]

    before = used_mib()
    saver.pause()  # or by tag: saver.pause("kv")
    freed = before - used_mib() >= 3072
    print("paused:", freed, "(at least 3 GiB are free for the trainer)")

    saver.resume()
    cache.zero_()  # its contents are undefined after a resume
    graph.replay()  # the graph of before: nothing is captured again
    same = torch.equal(y, expected) and addresses == [weight.data_ptr() for weight in weights]
    print("resumed:", same, "(the same addresses, weights and result)")
    assert freed and same
