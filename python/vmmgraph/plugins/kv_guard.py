"""Guard of an engine's KV cache: takes free KV blocks out of use while the device is short of
memory.

The KV cache has all memory except a reserve for the next eager step. If other work takes the
reserve (a LoRA adapter, a new communicator, a second process), the next eager step would fail. The
guard compares free memory with the measured need before a step. If memory is short, the guard
removes groups of free blocks from the engine's pool and unmaps their pages. Once memory is free
again, the guard maps and zeroes the pages and returns the blocks.

This module imports neither torch nor an engine. `vllm_kv` and `sglang_guard` connect the guard.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ._common import is_set, log
from .kv_plan import KERNELS_BYTES, MIB, Layout

#: Seconds between two polls while no step has a prefill.
INTERVAL = 0.1
#: Minimum pause after a poll as a multiple of the poll's duration, at most `INTERVAL`: polls take
#: at most 0.5 % of the time.
PAUSE = 199
#: Seconds between two returns of blocks, and block groups in one return (about 1 ms each).
RETURN_INTERVAL = 1.0
RETURN_GROUPS = 16


@dataclass(frozen=True)
class Need:
    """Memory that must be available before a step."""

    #: Measured growth of torch in the largest eager step.
    eager: int
    #: Free memory for kernels loaded later: restored when blocks are taken out of use.
    spare: int = KERNELS_BYTES
    #: Part of `spare` below which blocks are taken out of use.
    least: int = 32 * MIB

    def short(self, free: int, idle: int) -> int:
        """Returns the bytes which the KV cache must give up now.

        ``free`` is the driver's free memory. ``idle`` is unused memory of torch's cache, available
        to eager steps only.
        """
        if free >= self.least and free + idle >= self.eager + self.least:
            return 0
        return max(self.spare - free, self.eager + self.spare - free - idle)

    def room(self, free: int, idle: int) -> int:
        """Returns the bytes above the need; negative if memory is below the need."""
        return free + idle - self.eager - self.spare


class Memory(Protocol):
    """KV memory of a worker (`vllm_kv.WorkerKv`)."""

    layout: Layout
    blocks: int

    def drop(self, runs: Sequence[tuple[int, int]]) -> int:
        """Unmaps the pages inside runs of blocks; returns their bytes."""

    def restore(self, runs: Sequence[tuple[int, int]]) -> int:
        """Maps and zeroes runs of blocks in order; returns the number of complete runs."""


class Groups(Protocol):
    """Free blocks of an engine, in groups. Called between two steps, when no scheduling runs."""

    #: Blocks per group, and the blocks out of use by group.
    group: int
    out: dict[int, Any]

    def run(self, number: int) -> tuple[int, int]: ...

    def whole(self, number: int) -> bool: ...

    def candidates(self, count: int) -> list[int]: ...

    def take(self, number: int) -> None: ...

    def give(self, number: int) -> None: ...

    def blocks_out(self) -> int:
        """Returns the number of blocks out of use."""


def wanted(ranks: int) -> bool:
    """Returns whether a cache is guarded; logs why not."""
    value = os.environ.get("VMMGRAPH_KV_GUARD")
    if ranks > 1:
        log.info("vmmgraph: the KV cache keeps its size, since %d ranks would have to change it together", ranks)
    elif value and not is_set("VMMGRAPH_KV_GUARD"):
        log.info("vmmgraph: the KV cache keeps its size, since VMMGRAPH_KV_GUARD is %s", value)
    else:
        return True
    return False


def is_free(block: Any) -> bool:
    """Returns whether a block is in the pool's free list. The null block never is."""
    linked = block.prev_free_block is not None and block.next_free_block is not None
    return linked and block.ref_cnt == 0 and not block.is_null


class Pool:
    """vLLM's ``BlockPool`` as groups of blocks, with the list of blocks out of use.

    Methods must be called between two steps, when no scheduling is in progress: a block in the free
    list then belongs to no request.
    """

    def __init__(self, pool: Any, group: int, keep: int) -> None:
        self.pool = pool
        #: Blocks per group.
        self.group = group
        #: Minimum of blocks in use: the need of the longest request.
        self.keep = keep
        self.groups = len(pool.blocks) // group
        #: Blocks out of use, by group.
        self.out: dict[int, list[Any]] = {}

    def run(self, number: int) -> tuple[int, int]:
        """Returns the first block of a group, and the end (exclusive)."""
        return number * self.group, (number + 1) * self.group

    def members(self, number: int) -> list[Any]:
        first, end = self.run(number)
        return self.pool.blocks[first:end]  # type: ignore[no-any-return]

    def whole(self, number: int) -> bool:
        """Returns whether all blocks of a group are out of use."""
        return len(self.out[number]) == self.group

    def candidates(self, count: int) -> list[int]:
        """Returns at most ``count`` groups to take out of use; `keep` limits the number.

        Order: fewest used blocks, then fewest cached prefixes, then from the end of the cache.
        """
        fit = (len(self.pool.blocks) - self.keep) // self.group - len(self.out)
        count = min(count, fit)
        if count <= 0:
            return []
        ranked = []
        for number in range(self.groups):
            if number in self.out:
                continue
            free = [block for block in self.members(number) if is_free(block)]
            if free:
                cached = sum(block.block_hash is not None for block in free)
                ranked.append((self.group - len(free), cached, -number))
        return [-number for _, _, number in sorted(ranked)[:count]]

    def take(self, number: int) -> None:
        """Takes the free blocks of a group out of use. Evicts their prefixes from the cache.

        Blocks of requests stay in use until a later call finds the blocks free.
        """
        blocks = [block for block in self.members(number) if is_free(block)]
        self.pool.evict_blocks({block.block_id for block in blocks})
        for block in blocks:
            self.pool.free_block_queue.remove(block)
        self.pool.num_gpu_blocks -= len(blocks)
        self.out.setdefault(number, []).extend(blocks)

    def blocks_out(self) -> int:
        return sum(map(len, self.out.values()))

    def give(self, number: int) -> None:
        """Returns the blocks of a group to the free list, before blocks with cached prefixes."""
        blocks = self.out.pop(number)
        self.pool.free_block_queue.prepend_n(blocks)
        self.pool.num_gpu_blocks += len(blocks)


class Guard:
    """Guard of one engine's KV cache. `look` polls memory and must be called between steps.

    ``memory`` returns free and idle bytes (`Need.short`). ``release`` makes torch return idle
    memory to the driver.
    """

    def __init__(
        self,
        pool: Groups,
        kv: Memory,
        need: Need,
        memory: Callable[[], tuple[int, int]],
        release: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kv, self.need, self.memory, self.release, self.clock = kv, need, memory, release, clock
        self.pool = pool
        #: Bytes returned to the driver by one group.
        self.group_bytes = max(1, kv.layout.inside_bytes(*self.pool.run(0)))
        #: Groups without mapped pages.
        self.unmapped: set[int] = set()
        self.looked = self.returned = float("-inf")
        self.pause = 0.0
        #: True once a shortage beyond all free blocks was logged.
        self.warned = False

    def look(self, prefill: bool) -> None:
        """Compares memory with the need, and takes or returns blocks. Most calls return at once.

        ``prefill``: the next step has a prefill.
        """
        start = self.clock()
        if start - self.looked < (self.pause if prefill else INTERVAL):
            return
        free, idle = self.memory()
        short = self.need.short(free, idle)
        if short:
            self.shrink(short)
        elif self.pool.out:
            self.grow(free, idle)
        self.looked = self.clock()
        self.pause = min(INTERVAL, PAUSE * (self.looked - start))

    def shrink(self, short: int) -> None:
        """Takes blocks out of use until ``short`` bytes are free or no candidate is left.

        Without enough free groups, groups with few used blocks are taken in part. A later call
        unmaps these groups, once their requests have ended.
        """
        for number in self.partial():
            self.pool.take(number)
        wanted = -(-short // self.group_bytes)
        for number in self.pool.candidates(wanted - len(self.pool.out) + len(self.unmapped)):
            self.pool.take(number)
        whole = sorted(number for number in self.pool.out if self.pool.whole(number) and number not in self.unmapped)
        gone = self.kv.drop([self.pool.run(number) for number in whole]) if whole else 0
        self.unmapped.update(whole)
        if whole:
            log.info(
                "vmmgraph: KV cache gives up %d blocks (%d MiB) for %d MiB that the next step lacks; %d blocks are out of use",
                len(whole) * self.pool.group,
                gone / MIB,
                short / MIB,
                self.pool.blocks_out(),
            )
        missing = short - gone
        if missing > 0 and not self.warned:
            self.warned = True
            log.warning(
                "vmmgraph: %d MiB are missing for the next eager step, and no free KV blocks are left to give up; "
                "blocks follow when their requests end",
                missing / MIB,
            )

    def partial(self) -> list[int]:
        """Returns the groups taken in part."""
        return [number for number in self.pool.out if not self.pool.whole(number)]

    def grow(self, free: int, idle: int) -> None:
        """Returns blocks as far as memory allows."""
        self.warned = False
        # Groups with mapped pages need no memory.
        for number in [number for number in self.pool.out if number not in self.unmapped]:
            self.pool.give(number)
        room = self.need.room(free, idle)
        now = self.clock()
        # Hysteresis: `Need.least` is below `Need.spare`, so small changes move no blocks.
        count = min(RETURN_GROUPS, len(self.unmapped), room // self.group_bytes)
        if count <= 0 or now - self.returned < RETURN_INTERVAL:
            return
        self.returned = now
        if free - self.need.spare < count * self.group_bytes:
            # Torch still caches the memory of freed tensors.
            self.release()
        numbers = sorted(self.unmapped)[:count]
        done = self.kv.restore([self.pool.run(number) for number in numbers])
        for number in numbers[:done]:
            self.unmapped.remove(number)
            self.pool.give(number)
        if done:
            log.info(
                "vmmgraph: %d KV blocks are back in use; %d blocks are out of use",
                done * self.pool.group,
                self.pool.blocks_out(),
            )
