"""Guard of SGLang's KV cache, over stand-ins of SGLang's allocator and of the part of torch used by
the guard. No test needs torch or a device."""

from __future__ import annotations

import random
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
from vmmgraph.plugins import kv_guard, sglang_guard
from vmmgraph.plugins.kv_plan import MIB, Layout
from vmmgraph.plugins.sglang_guard import TokenPool

#: A token has 64 KiB in each of two tensors: 64 tokens a page of 4 MiB.
TOKEN, GROUP = 64 << 10, 64


class Ids(list):
    """A tensor of numbers. The device of an allocator's list has no memory for further tensors."""

    device = "cpu"

    def cpu(self) -> Ids:
        return Ids(self)

    def to(self, device: str) -> Ids:
        return Ids(self) if device == "cpu" else DeviceIds(self)

    def __floordiv__(self, size: int) -> Ids:
        return Ids(one // size for one in self)

    def __eq__(self, other: object) -> Any:
        return Ids(one == other for one in self) if isinstance(other, int) else list.__eq__(self, other)

    def __invert__(self) -> Ids:
        return Ids(not one for one in self)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Ids):
            return type(self)(one for one, inside in zip(self, key, strict=True) if inside)
        found = list.__getitem__(self, key)
        return type(self)(found) if isinstance(key, slice) else found

    def tolist(self) -> list[int]:
        return list(self)


class DeviceIds(Ids):
    device = "cuda:0"

    def __floordiv__(self, size: int) -> Ids:
        raise MemoryError("out of device memory")


def bincount(ids: Ids, minlength: int) -> Ids:
    return Ids(ids.count(number) for number in range(max([minlength, *(one + 1 for one in ids)])))


class Allocator:
    """SGLang's ``TokenToKVPoolAllocator``."""

    def __init__(self, size: int, page_size: int = 1) -> None:
        self.size, self.page_size = size, page_size
        self.clear()

    def clear(self) -> None:
        self.free_pages, self.release_pages = DeviceIds(range(1, self.size // self.page_size + 1)), DeviceIds()

    def alloc(self, count: int) -> Ids:
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        assert len(taken) == count
        return taken

    def free(self, pages: Ids) -> None:
        self.release_pages = DeviceIds(self.release_pages + pages)

    def available(self) -> int:
        return (len(self.free_pages) + len(self.release_pages)) * self.page_size


class Account:
    """A device with other work, and the cache's pages on it."""

    def __init__(self, size: int, page_size: int = 1, keep: int = 64) -> None:
        self.layout, self.blocks = Layout((TOKEN, TOKEN), size + page_size), size
        self.free, self.idle, self.now, self.mapped = 64 * MIB, 0, 0.0, True
        self.dropped: set[tuple[int, int]] = set()
        self.evicted: list[int] = []
        self.allocator = Allocator(size, page_size)
        self.sizes = [size]
        self.pool = TokenPool(self.allocator, self.layout.group(), keep, self.evicted.append, self.sizes.append)
        need = kv_guard.Need(32 * MIB, spare=8 * MIB, least=2 * MIB)
        self.guard = kv_guard.Guard(self.pool, self, need, lambda: (self.free, self.idle), lambda: None, lambda: self.now)

    def drop(self, runs: Any) -> int:
        gone = sum(self.layout.inside_bytes(*run) for run in runs)
        in_use = (
            set(range(1, self.blocks + 1)) - self.tokens(self.allocator.free_pages) - self.tokens(self.allocator.release_pages)
        )
        out = set().union(*(self.tokens(pages) for pages in self.pool.out.values()))
        for first, end in runs:
            assert set(range(first, end)) <= in_use & out, "a token without pages is free or in use"
        self.dropped |= set(runs)
        self.free += gone
        return gone

    def tokens(self, pages: Ids) -> set[int]:
        size = self.allocator.page_size
        return {page * size + number for page in pages for number in range(size)}

    def restore(self, runs: Any) -> int:
        self.dropped -= set(runs)
        self.free -= sum(self.layout.inside_bytes(*run) for run in runs)
        return len(runs)

    def look(self, free: int | None = None) -> None:
        self.free = self.free if free is None else free
        self.now += 2.0
        self.guard.look(True)


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("torch")
    stand_in.cat = lambda parts: type(parts[0])(one for part in parts for one in part)
    stand_in.bincount = bincount
    monkeypatch.setitem(sys.modules, "torch", stand_in)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_cache_gives_up_free_tokens_and_gets_them_back(page_size: int) -> None:
    account = Account(1024, page_size)
    account.look()
    assert account.pool.blocks_out() == 0 and account.sizes == [1024]
    # 40 MiB are needed and 16 are free: three groups of 8 MiB from the end of the cache.
    account.look(16 * MIB)
    assert account.dropped == {(832, 896), (896, 960), (960, 1024)} and account.free == 40 * MIB
    assert account.sizes[-1] == 1024 - 3 * GROUP == account.allocator.available()
    # SGLang's flush lists all tokens again.
    account.allocator.clear()
    assert account.allocator.available() == account.sizes[-1]
    account.look(256 * MIB)
    assert not account.dropped and account.sizes[-1] == 1024 == account.allocator.available()
    assert sorted(account.allocator.free_pages) == list(range(1, 1024 // page_size + 1))


def test_tokens_of_requests_stay_until_the_requests_end() -> None:
    account = Account(512, keep=64)
    taken = account.allocator.alloc(512)
    kept = Ids(taken[64:])
    account.allocator.free(taken[:64])
    account.look(8 * MIB)
    # One token of the second group is free. The first group has the padding token.
    assert not account.dropped and account.pool.blocks_out() == 1
    assert account.evicted and account.allocator.available() == 63
    account.allocator.free(kept)
    account.look()
    assert len(account.dropped) == 4 and account.free == 40 * MIB


def test_the_longest_request_keeps_its_tokens() -> None:
    account = Account(512, keep=400)
    account.look(0)
    assert len(account.dropped) == 1 and account.allocator.available() == 512 - GROUP >= 400
    account.look(0)
    assert len(account.dropped) == 1


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_never_lost_or_given_twice(seed: int) -> None:
    pick, account, held = random.Random(seed), Account(1024, keep=128), []
    for _ in range(300):
        free = account.allocator.available()
        if free and pick.random() < 0.5:
            account.allocator.free_pages = DeviceIds(sorted(account.allocator.free_pages + account.allocator.release_pages))
            account.allocator.release_pages = DeviceIds()
            held.append(account.allocator.alloc(pick.randrange(1, min(free, 200) + 1)))
        elif held:
            account.allocator.free(held.pop(pick.randrange(len(held))))
        account.look(pick.choice([None, None, 4 * MIB, 20 * MIB, 60 * MIB, 200 * MIB]))
        lists = [account.allocator.free_pages, account.allocator.release_pages, *account.pool.out.values(), *held]
        assert sorted(one for part in lists for one in part) == list(range(1, 1025))
        assert account.sizes[-1] == 1024 - account.pool.blocks_out()
        unmapped = {token for first, end in account.dropped for token in range(first, end)}
        assert not unmapped & {one for part in held for one in part}


@pytest.mark.parametrize(("ranks", "value", "guarded"), [(1, None, False), (1, "1", True), (1, "0", False), (2, "1", False)])
def test_the_guard_polls_before_each_batch(monkeypatch: pytest.MonkeyPatch, ranks: int, value: str | None, guarded: bool) -> None:
    if value is not None:
        monkeypatch.setenv("VMMGRAPH_KV_GUARD", value)
    monkeypatch.setitem(
        sys.modules, "sglang.srt.mem_cache.common", SimpleNamespace(evict_from_tree_cache=lambda tree, count: None)
    )
    account = Account(1024)
    counters = SimpleNamespace(max_total_num_tokens=1024), SimpleNamespace(max_total_num_tokens=1024)

    class Scheduler:
        invariant_checker, pool_stats_observer = counters
        tree_cache, max_req_len = None, 64
        tp_worker = SimpleNamespace(
            model_runner=SimpleNamespace(
                tp_size=ranks,
                server_args=SimpleNamespace(chunked_prefill_size=-1, page_size=1),
                token_to_kv_pool_allocator=Allocator(1024),
            )
        )

        def run_batch(self, batch: Any, proxies: Any = None) -> str:
            return f"{batch.name} {proxies}"

    kv = SimpleNamespace(
        layout=account.layout,
        blocks=1024,
        eager=32 * MIB,
        available=lambda: (1 * MIB, 0),
        release=lambda: None,
        drop=lambda runs: sum(account.layout.inside_bytes(*run) for run in runs),
        restore=lambda runs: 0,
    )
    sglang_guard.patch_scheduler(SimpleNamespace(Scheduler=Scheduler), lambda runner: kv)
    scheduler = Scheduler()
    batch = SimpleNamespace(name="batch", forward_mode=SimpleNamespace(is_extend=lambda: True))
    assert scheduler.run_batch(batch, "proxies") == "batch proxies"
    assert (scheduler._vmmgraph_guard is not None) == guarded
    assert (counters[0].max_total_num_tokens < 1024) == guarded
    assert counters[0].max_total_num_tokens == counters[1].max_total_num_tokens
