"""How large a KV cache becomes: sizes, blocks, reserve and ceiling as plain functions. Nothing here asks a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
#: Mapping costs about 33 us a page whatever its size (H200, docs/performance.md), so a cache of 120 GiB takes about 1 s with pages of 4 MiB.
#: Each KV tensor leaves half a page unused on average.
PAGE_BYTES = 4 * MIB
#: Kept free for kernels that first run after the start: their code, and local memory that the driver makes for them. Assumed.
KERNELS_BYTES = 128 * MIB
#: Kept free for each rank of several: NCCL connects channels when a collective first runs. Assumed.
NCCL_BYTES = 256 * MIB
#: torch takes at least this much from the driver for a tensor, and rounds longer ones up to a multiple of 2 MiB (CUDACachingAllocator).
SEGMENT_BYTES = 20 * MIB


def rounded_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """KV tensors behind each other in one range of addresses, each with room for ``most`` blocks, each beginning at a page.

    ``block_bytes`` are the bytes of one block in each tensor. Block ``i`` of a tensor lies ``i * block_bytes`` behind its beginning.
    """

    block_bytes: tuple[int, ...]
    most: int
    page_bytes: int = PAGE_BYTES

    def extent(self, tensor: int) -> int:
        """Bytes of addresses of a tensor, in whole pages."""
        return rounded_up(self.block_bytes[tensor] * self.most, self.page_bytes)

    def offset(self, tensor: int) -> int:
        """Where a tensor begins."""
        return sum(self.extent(before) for before in range(tensor))

    def reserved(self) -> int:
        """Bytes of addresses of all tensors."""
        return self.offset(len(self.block_bytes))

    def committed(self, blocks: int) -> int:
        """Bytes of pages that so many blocks need."""
        return sum(rounded_up(one * blocks, self.page_bytes) for one in self.block_bytes)

    def blocks_within(self, size: int) -> int:
        """The most blocks whose pages come to at most ``size`` bytes."""
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            if self.committed(middle) <= size:
                low = middle
            else:
                high = middle - 1
        return low

    def step(self) -> int:
        """Blocks after which every tensor needs at least one page more: fewer blocks less may free no page."""
        return max(1, -(-self.page_bytes // min(self.block_bytes)))

    def tail(self, tensor: int, kept: int, had: int) -> tuple[int, int]:
        """Offset and bytes of what a tensor gives back when it keeps ``kept`` blocks of ``had``; whole pages."""
        begin = self.offset(tensor) + rounded_up(self.block_bytes[tensor] * kept, self.page_bytes)
        end = self.offset(tensor) + rounded_up(self.block_bytes[tensor] * had, self.page_bytes)
        return begin, max(0, end - begin)

    def group(self) -> int:
        """Blocks of a run that can be unmapped alone: a whole number of pages in every tensor.

        If such a run is longer than four times `step`, the answer is that length, and the run
        leaves a part of a page mapped at its ends.
        """
        exact = math.lcm(*(self.page_bytes // math.gcd(self.page_bytes, one) for one in self.block_bytes))
        return min(exact, 4 * self.step())

    def inside(self, tensor: int, first: int, end: int) -> tuple[int, int]:
        """Offset and bytes of the pages of a tensor that lie inside the blocks ``first`` to below
        ``end``."""
        one = self.block_bytes[tensor]
        begin = rounded_up(one * first, self.page_bytes)
        size = max(0, one * end // self.page_bytes * self.page_bytes - begin)
        return self.offset(tensor) + begin, size

    def inside_bytes(self, first: int, end: int) -> int:
        """Bytes of the pages of all tensors inside a run of blocks."""
        return sum(self.inside(tensor, first, end)[1] for tensor in range(len(self.block_bytes)))


@dataclass(frozen=True)
class Reserve:
    """What stays free beside the KV cache, each part with its reason."""

    #: Eager steps: torch's measured peak less what torch holds when the cache is sized.
    eager: int
    #: Kernels that load later.
    kernels: int
    #: Communicators; 0 with one rank.
    nccl: int = 0

    def total(self) -> int:
        return self.eager + self.kernels + self.nccl

    def __str__(self) -> str:
        parts = [
            f"{self.eager / MIB:.0f} MiB for eager steps (torch's peak in the largest step less what torch holds now)",
            f"{self.kernels / MIB:.0f} MiB for kernels that load later",
        ]
        if self.nccl:
            parts.append(f"{self.nccl / MIB:.0f} MiB for NCCL's channels")
        return ", ".join(parts)


def reserve_of(peak: int, held: int, ranks: int) -> Reserve:
    """The reserve, from torch's peak in the largest eager steps and what torch holds now."""
    grows = max(0, peak - held)
    return Reserve(rounded_up(grows, 2 * MIB) if grows else 0, KERNELS_BYTES, NCCL_BYTES if ranks > 1 else 0)


def ceiling_of(total: int, utilization: float, default: float) -> int | None:
    """The most bytes that the process may use, from ``gpu_memory_utilization``; ``None`` for its default: the whole device."""
    return None if utilization == default else int(total * utilization)


def kv_bytes(free: int, has: int, reserve: Reserve, ceiling: int | None, own: int) -> int:
    """The bytes that the KV cache may have.

    ``free`` is what the driver says is free, ``has`` what the cache has already, ``own`` what this process uses with it. Neither the device
    nor the ceiling is exceeded when the reserve is used up.
    """
    room = free - reserve.total()
    if ceiling is not None:
        room = min(room, ceiling - own - reserve.total())
    return max(0, has + room)


def first_blocks(wanted: int, most: int, block_bytes: int, free: int) -> int:
    """The blocks that have memory before the captures: those that warm-up uses, and no more than a quarter of what is free; two at least."""
    return max(1, min(most, max(2, min(wanted, free // 4 // max(1, block_bytes)))))


def agreed(blocks: Sequence[int]) -> int:
    """The blocks that every rank has room for."""
    return min(blocks, default=0)


def own_bytes(used: int, by_process: int | None, others: int | None) -> int:
    """What this process uses of a device of which ``used`` bytes are in use: as the driver says of the process, else all but what others had
    before this process came, else all."""
    if by_process is not None:
        return min(by_process, used)
    return max(0, used - (others or 0))
