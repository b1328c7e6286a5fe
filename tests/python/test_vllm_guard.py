"""Guard of vLLM's KV cache, over vLLM's own block pool and a stand-in.

Tests with device memory use the host driver, and are SKIPPED without VMMGRAPH_CORE_LIBRARY. Tests
with vLLM's pool read ``block_pool.py`` and ``kv_cache_utils.py`` of vLLM 0.24 or 0.33 from the
folder VLLM_SOURCE names, or from an installed vLLM, and are SKIPPED without both. No test needs
torch.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import importlib.util
import logging
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_vllm_kv
from test_vllm_kv import BLOCK, GIB, LAYERS, HostDevice, Start, needs_driver
from vmmgraph import _ledger
from vmmgraph.plugins import kv_plan, vllm_kv
from vmmgraph.plugins.kv_guard import Guard, Need, Pool
from vmmgraph.plugins.kv_plan import MIB, Layout

#: The fixture of `test_vllm_kv`.
device = test_vllm_kv.device

# vLLM's block pool, and a stand-in of the part used by the guard.


class Block:
    def __init__(self, number: int) -> None:
        self.block_id, self.ref_cnt, self.is_null = number, 0, False
        self.block_hash: Any = None
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class Queue:
    """Doubly linked list of free blocks, with permanent head and tail."""

    def __init__(self, blocks: list[Block]) -> None:
        self.head, self.tail, self.num_free_blocks = Block(-1), Block(-1), 0
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head
        for block in blocks:
            self.insert(block, self.tail)

    def insert(self, block: Block, before: Block) -> None:
        block.prev_free_block, block.next_free_block = before.prev_free_block, before
        before.prev_free_block.next_free_block = before.prev_free_block = block
        self.num_free_blocks += 1

    def remove(self, block: Block) -> None:
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def prepend_n(self, blocks: list[Block]) -> None:
        first = self.head.next_free_block
        for block in blocks:
            self.insert(block, first)


class StandIn:
    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [Block(number) for number in range(num_gpu_blocks)]
        self.free_block_queue = Queue(self.blocks)
        self.cached_block_hash_to_block: Any = {}
        self.free_block_queue.remove(self.blocks[0])
        self.blocks[0].is_null = True

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def get_new_blocks(self, count: int) -> list[Block]:
        if count > self.get_num_free_blocks():
            raise ValueError("Cannot get free blocks")
        taken = []
        for _ in range(count):
            block = self.free_block_queue.head.next_free_block
            self.free_block_queue.remove(block)
            self.evict_blocks({block.block_id})
            block.ref_cnt += 1
            taken.append(block)
        return taken

    def _insert_block_hash(self, key: Any, block: Block, num_tokens: int) -> None:
        block.block_hash = key
        self.cached_block_hash_to_block[key] = block

    def get_cached_block(self, key: Any, groups: list[int]) -> Any:
        block = self.cached_block_hash_to_block.get(key + groups[0].to_bytes(4, "big"))
        return [block] if block else None

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                queue = self.free_block_queue
                queue.insert(block, queue.tail if block.block_hash else queue.head.next_free_block)

    def evict_blocks(self, numbers: set[int]) -> None:
        for number in numbers:
            self.cached_block_hash_to_block.pop(self.blocks[number].block_hash, None)
            self.blocks[number].block_hash = None

    def reset_prefix_cache(self) -> bool:
        if self.num_gpu_blocks - self.get_num_free_blocks() != 1:
            return False
        self.evict_blocks(set(range(len(self.blocks))))
        return True


def source_of_vllm() -> Path | None:
    named = os.environ.get("VLLM_SOURCE")
    spec = None if named else importlib.util.find_spec("vllm")
    folder = Path(named) if named else Path(spec.origin).parents[1] if spec and spec.origin else None
    return folder if folder and (folder / "vllm/v1/core/block_pool.py").exists() else None


def vllm_pool() -> Any:
    """Returns ``BlockPool`` from vLLM's source, without its imports."""
    folder = source_of_vllm()
    if folder is None:
        pytest.skip("SKIPPED: VLLM_SOURCE names no folder with vLLM's source")
    wanted = ("KVCacheBlock", "FreeKVCacheBlockQueue", "BlockHashToBlockMap", "BlockPool", "make_block_hash_with_group_id")
    body: list[Any] = [ast.parse("from __future__ import annotations").body[0]]
    for name in ("kv_cache_utils", "block_pool"):
        tree = ast.parse((folder / f"vllm/v1/core/{name}.py").read_text())
        body += [node for node in tree.body if getattr(node, "name", "") in wanted]
    values: dict[str, Any] = {
        "__name__": __name__,
        "dataclass": dataclasses.dataclass,
        "field": dataclasses.field,
        "MEDIUM_GPU": "GPU",
        "BlockHashWithGroupId": bytes,
        "logger": logging.getLogger("vllm"),
    }
    exec(compile(ast.Module(body, []), "block_pool", "exec"), values)  # noqa: S102, vLLM's own source
    return values["BlockPool"]


@pytest.fixture(params=["stand-in", "vllm"])
def make_pool(request: pytest.FixtureRequest) -> Any:
    kind = StandIn if request.param == "stand-in" else vllm_pool()
    return lambda blocks: kind(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)


def cache(pool: Any, blocks: list[Any], name: bytes) -> None:
    """Enters blocks into the prefix cache under a key of group 0."""
    for number, block in enumerate(blocks):
        key = name + number.to_bytes(4, "big") + (0).to_bytes(4, "big")
        pool._insert_block_hash(key, block, num_tokens=16)


def cached(pool: Any, name: bytes, number: int) -> bool:
    return pool.get_cached_block(name + number.to_bytes(4, "big"), [0]) is not None


# Plain functions.


def test_a_group_of_blocks_is_whole_pages_in_every_tensor() -> None:
    layout = Layout((64 << 10, MIB), 1000, 4 * MIB)
    assert layout.group() == 64
    assert layout.inside_bytes(64, 128) == 4 * MIB + 64 * MIB
    assert layout.inside(1, 64, 128) == (layout.offset(1) + 64 * MIB, 64 * MIB)
    # Without a short exact run, a part of a page stays at each end.
    odd = Layout((41 << 10,), 100000, 4 * MIB)
    group = odd.group()
    assert group == 4 * odd.step()
    assert 3 * odd.page_bytes <= odd.inside_bytes(group, 2 * group) <= (41 << 10) * group
    for first in range(0, 20 * group, group):
        begin, size = odd.inside(0, first, first + group)
        assert begin % odd.page_bytes == size % odd.page_bytes == 0
        assert first * (41 << 10) <= begin and begin + size <= (first + group) * (41 << 10)
    assert odd.inside(0, 1, 2)[1] == 0


def test_memory_of_torch_counts_for_eager_steps_only() -> None:
    need = Need(eager=1000 * MIB, spare=128 * MIB, least=32 * MIB)
    assert need.short(1128 * MIB, 0) == 0
    assert need.short(128 * MIB, 1000 * MIB) == 0
    # A part of the spare memory may be used up.
    assert need.short(1032 * MIB, 0) == 0
    assert need.short(1031 * MIB, 0) == 97 * MIB
    assert need.short(64 * MIB, 500 * MIB) == 564 * MIB
    # Kernels and libraries cannot use torch's memory.
    assert need.short(MIB, 5000 * MIB) == 127 * MIB
    assert need.room(200 * MIB, 1000 * MIB) == 72 * MIB
    assert need.room(200 * MIB, 0) < 0


def test_free_blocks_leave_the_pool_and_its_prefix_cache(make_pool: Any) -> None:
    pool = make_pool(64)
    held = pool.get_new_blocks(10)  # Blocks 1 to 10.
    old = pool.get_new_blocks(20)  # Blocks 11 to 30, which stay in the prefix cache.
    cache(pool, old, b"old")
    pool.free_blocks(reversed(old))
    groups = Pool(pool, 8, keep=16)
    assert pool.get_num_free_blocks() == 53
    # Uncached groups from the end, then cached groups, then groups with a used block.
    assert groups.candidates(99) == [7, 6, 5, 4, 3, 2]
    assert cached(pool, b"old", 19)
    for number in (7, 3):
        groups.take(number)
        assert groups.whole(number)
    # Group 3 is blocks 24 to 31: prefixes 13 to 19.
    assert not any(cached(pool, b"old", number) for number in range(13, 20))
    assert all(cached(pool, b"old", number) for number in range(13))
    assert pool.get_num_free_blocks() == 37 and pool.num_gpu_blocks == 48
    assert pool.get_usage() == pytest.approx(10 / 47)
    # All remaining blocks are available, and none is out of use.
    taken = pool.get_new_blocks(37)
    assert not {block.block_id // 8 for block in taken} & {7, 3}
    with pytest.raises(ValueError):
        pool.get_new_blocks(1)
    pool.free_blocks(taken)
    pool.free_blocks(held)
    # vLLM's check for used blocks passes with blocks out of use.
    assert pool.reset_prefix_cache()
    for number in (7, 3):
        groups.give(number)
    assert pool.num_gpu_blocks == 64 and pool.get_num_free_blocks() == 63
    # New requests use blocks without prefixes first.
    assert pool.get_new_blocks(1)[0].block_id // 8 in (7, 3)


def test_the_longest_request_keeps_its_blocks(make_pool: Any) -> None:
    groups = Pool(make_pool(64), 8, keep=41)
    for number in groups.candidates(99):
        groups.take(number)
    assert groups.pool.num_gpu_blocks == 48
    assert groups.candidates(1) == []


class Account:
    """Counters in place of KV memory, idle memory and free memory."""

    def __init__(self, free: int, blocks: int) -> None:
        self.layout, self.blocks = Layout((MIB,), blocks, 4 * MIB), blocks
        self.free, self.idle, self.refused, self.now = free, 0, 0, 0.0
        self.dropped: set[tuple[int, int]] = set()

    def drop(self, runs: Any) -> int:
        assert not self.dropped & set(runs)
        self.dropped |= set(runs)
        gone = sum(self.layout.inside_bytes(*run) for run in runs)
        self.free += gone
        return gone

    def restore(self, runs: Any) -> int:
        done = 0
        for run in runs:
            if self.layout.inside_bytes(*run) > self.free - self.refused:
                break
            self.dropped.remove(run)
            self.free -= self.layout.inside_bytes(*run)
            done += 1
        return done

    def release(self) -> None:
        self.free, self.idle = self.free + self.idle, 0

    def guard(self, pool: Any, keep: int = 20, eager: int = 32 * MIB) -> Guard:
        need = Need(eager, spare=8 * MIB, least=2 * MIB)
        return Guard(
            Pool(pool, self.layout.group(), keep), self, need, lambda: (self.free, self.idle), self.release, lambda: self.now
        )

    def after(self, guard: Guard, seconds: float = 2.0) -> None:
        self.now += seconds
        guard.look(True)


def test_the_cache_shrinks_under_pressure_and_grows_afterwards(make_pool: Any) -> None:
    pool, account = make_pool(128), Account(40 * MIB, 128)
    guard = account.guard(pool)
    account.after(guard)
    assert guard.pool.blocks_out() == 0
    account.free -= 30 * MIB  # A LoRA adapter.
    account.after(guard)
    # 30 MiB are 8 groups of 4 MiB.
    assert guard.pool.blocks_out() == 32 and pool.num_gpu_blocks == 96
    assert account.free >= 40 * MIB
    account.after(guard)
    assert guard.pool.blocks_out() == 32
    account.free += 30 * MIB
    account.after(guard)
    assert guard.pool.blocks_out() == 0 and not account.dropped and pool.get_num_free_blocks() == 127
    assert account.free == 40 * MIB
    # Spare memory absorbs a small loss.
    account.free -= 6 * MIB
    account.after(guard)
    assert guard.pool.blocks_out() == 0


def test_memory_that_torch_keeps_returns_to_the_cache(make_pool: Any) -> None:
    pool, account = make_pool(128), Account(10 * MIB, 128)
    guard = account.guard(pool)
    account.after(guard)
    assert guard.pool.blocks_out() == 32
    # Torch frees other tensors and caches their memory.
    account.free, account.idle = account.free - 32 * MIB, 80 * MIB
    account.after(guard)
    assert guard.pool.blocks_out() == 0 and account.idle == 0


def test_groups_of_running_requests_follow_when_these_end(make_pool: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool, account = make_pool(64), Account(36 * MIB, 64)
    guard = account.guard(pool)
    held = pool.get_new_blocks(63)
    pool.free_blocks([block for block in held if block.block_id % 4])
    last = [block for block in held if block.block_id % 4 == 0]
    account.free -= 12 * MIB
    account.after(guard)
    # Four groups are taken, all but one block of each.
    assert guard.pool.blocks_out() == 12 and not account.dropped
    assert "no free KV blocks are left" in caplog.text
    account.after(guard)
    assert guard.pool.blocks_out() == 12
    pool.free_blocks(last)
    account.after(guard)
    assert guard.pool.blocks_out() == 16 and len(account.dropped) == 4
    # If memory is freed before the requests end, the blocks return.
    other, account = make_pool(64), Account(24 * MIB, 64)
    guard = account.guard(other)
    held = other.get_new_blocks(63)
    other.free_blocks([block for block in held if block.block_id % 4])
    account.after(guard)
    assert guard.pool.blocks_out() == 12
    account.free = 40 * MIB
    account.after(guard)
    assert guard.pool.blocks_out() == 0 and other.num_gpu_blocks == 64


def test_pages_that_the_driver_refuses_leave_the_rest_out_of_use(make_pool: Any) -> None:
    pool, account = make_pool(128), Account(10 * MIB, 128)
    guard = account.guard(pool)
    account.after(guard)
    assert guard.pool.blocks_out() == 32
    account.free += 60 * MIB
    account.refused = account.free - 9 * MIB
    account.after(guard)
    assert guard.pool.blocks_out() == 24 and len(account.dropped) == 6


def test_looks_are_rare(make_pool: Any) -> None:
    account = Account(100 * MIB, 64)
    guard = account.guard(make_pool(64))
    seen = []

    def slow() -> tuple[int, int]:
        seen.append(account.now)
        account.now += 50e-6
        return account.free, 0

    guard.memory = slow
    for _ in range(100000):
        guard.look(True)
        account.now += 10e-6
    # At most 0.5 % of the time, also when every step has a prefill.
    assert 90 <= len(seen) <= 101
    seen.clear()
    for _ in range(100000):
        guard.look(False)
        account.now += 10e-6
    assert 9 <= len(seen) <= 11


def test_mixed_traffic_under_changing_pressure_never_uses_a_block_without_memory(make_pool: Any) -> None:
    pick = random.Random(7)
    pool, account = make_pool(256), Account(44 * MIB, 256)
    guard = account.guard(pool, keep=40)
    running: list[list[Any]] = []
    taken = 0
    for step in range(3000):
        if step % 50 == 0:
            change = pick.randrange(0, 120) * MIB - taken
            account.free, taken = account.free - change, taken + change
        account.after(guard, 0.5)
        while running and (pick.random() < 0.4 or pool.get_num_free_blocks() < 20):
            pool.free_blocks(reversed(running.pop(pick.randrange(len(running)))))
        if pool.get_num_free_blocks() >= 20:
            blocks = pool.get_new_blocks(pick.randrange(1, 20))
            if pick.random() < 0.5:
                cache(pool, blocks, step.to_bytes(4, "big"))
            running.append(blocks)
        for block in (one for blocks in running for one in blocks):
            number = block.block_id // 4
            assert number not in guard.unmapped
        used = sum(map(len, running))
        assert pool.num_gpu_blocks == 256 - guard.pool.blocks_out() == 1 + used + pool.get_num_free_blocks()
    for blocks in running:
        pool.free_blocks(blocks)
    account.free += taken
    for _ in range(20):
        account.after(guard)
    assert guard.pool.blocks_out() == 0 and pool.get_num_free_blocks() == 255 and pool.reset_prefix_cache()


# An engine over the host driver.


class Engine:
    """vLLM 0.24 stand-in of `test_vllm_kv`, with a scheduler's pool and an executor."""

    def __init__(self, device: HostDevice, monkeypatch: pytest.MonkeyPatch, make_pool: Any, ranks: int = 1) -> None:
        start = Start(monkeypatch, device, True, 0.92)
        utils = sys.modules["vllm.v1.core.kv_cache_utils"]
        utils._max_memory_usage_bytes_from_groups = lambda *_: BLOCK * len(LAYERS) * 40
        start.scheduled = SimpleNamespace(num_scheduled_tokens={"a": 60, "b": 4}, total_num_scheduled_tokens=64)
        core = start.run()
        start.config.parallel_config.world_size = ranks
        self.blocks = core.scheduled.num_blocks
        self.pool = make_pool(self.blocks)
        core.vllm_config = start.config
        core.scheduler = SimpleNamespace(
            kv_cache_config=core.scheduled,
            kv_cache_manager=SimpleNamespace(block_pool=self.pool, watermark_blocks=0),
        )
        self.steps = 0
        core.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=core.worker), execute_model=self.execute_model)
        self.core, self.device = core, device
        self.raw = core.worker.model_runner.raw

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> str:
        self.steps += 1
        # An eager step: torch fails without the measured memory.
        assert self.device.free() >= 48 * MIB, "torch.OutOfMemoryError"
        return "output"

    def step(self) -> str:
        return self.core.step_with_batch_queue()


@needs_driver
def test_eager_steps_survive_the_loss_of_the_reserve(device: HostDevice, monkeypatch: pytest.MonkeyPatch, make_pool: Any) -> None:
    engine = Engine(device, monkeypatch, make_pool)
    used = engine.pool.get_new_blocks(100)
    assert engine.step() == "output"
    guard = engine.core._vmmgraph_guard
    assert guard.pool.keep == 41 and guard.need.eager == 48 * MIB
    now = [guard.clock() + 1]
    guard.clock = lambda: now[0]
    kv = engine.core.worker._vmmgraph_kv
    held, free = kv.held(), device.free()
    last = used[-1].block_id
    for name in LAYERS:
        ctypes.memset(engine.raw[name].address + BLOCK * last, 0x5A, BLOCK)
    assert engine.step() == "output" and guard.pool.blocks_out() == 0 and engine.core._vmmgraph_guard is guard

    device.outside += free - 4 * MIB  # Another allocation takes the reserve.
    now[0] += 1
    assert engine.step() == "output" and engine.steps == 3
    out = guard.pool.blocks_out()
    assert out > 0 and out % guard.pool.group == 0
    assert kv.held() == held - out * BLOCK * len(LAYERS)
    assert device.free() >= 48 * MIB + kv_plan.KERNELS_BYTES
    assert engine.pool.num_gpu_blocks == engine.blocks - out
    for name in LAYERS:
        assert ctypes.string_at(engine.raw[name].address + BLOCK * last, BLOCK) == b"\x5a" * BLOCK

    device.outside -= free - 4 * MIB
    for _ in range(5):
        now[0] += 2
        engine.step()
    assert guard.pool.blocks_out() == 0 and kv.held() == held
    for number in range(engine.blocks - 64, engine.blocks):
        assert ctypes.string_at(engine.raw[LAYERS[0]].address + BLOCK * number, BLOCK) == bytes(BLOCK)


@needs_driver
def test_without_a_guard_the_next_eager_step_fails(device: HostDevice, monkeypatch: pytest.MonkeyPatch, make_pool: Any) -> None:
    monkeypatch.setenv("VMMGRAPH_KV_GUARD", "0")
    engine = Engine(device, monkeypatch, make_pool)
    device.outside += device.free() - 4 * MIB
    with pytest.raises(AssertionError, match="OutOfMemory"):
        engine.step()
    assert engine.core._vmmgraph_guard is None


@needs_driver
def test_several_ranks_keep_the_size_of_the_cache(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, make_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine(device, monkeypatch, make_pool, ranks=2)
    engine.step()
    assert engine.core._vmmgraph_guard is None
    assert "2 ranks would have to change it together" in caplog.text


@needs_driver
def test_a_refused_run_keeps_no_page(device: HostDevice, monkeypatch: pytest.MonkeyPatch, make_pool: Any) -> None:
    kv = Engine(device, monkeypatch, make_pool).core.worker._vmmgraph_kv
    group = kv.layout.group()
    runs = [(group * number, group * (number + 1)) for number in (3, 5, 6)]
    held = kv.held()
    assert kv.drop(runs) == held - kv.held() == 3 * group * BLOCK * len(LAYERS)
    # Room for one and a half runs. The driver counts the library's memory only.
    rest = device.size - _ledger.library_bytes(device)["physical"] - int(1.5 * group * BLOCK * len(LAYERS))
    other = vllm_kv.ElasticBuffer(device, GIB, 2 * MIB, "another's")
    other.commit(0, rest // (2 * MIB) * (2 * MIB))
    assert kv.restore(runs) == 1
    assert kv.held() == held - 2 * group * BLOCK * len(LAYERS)
