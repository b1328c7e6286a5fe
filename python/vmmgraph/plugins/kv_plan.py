"""Size of a KV cache: blocks, reserve and ceiling, computed by functions without device access."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
#: Page size of the cache. Mapping costs about 33 us a page at any page size (H200,
#: docs/performance.md): a cache of 120 GiB takes about 1 s with pages of 4 MiB. Each KV tensor
#: leaves half a page unused on average.
PAGE_BYTES = 4 * MIB
#: Reserve for kernels first run after the start: code, and local memory allocated by the driver.
#: Assumed, not measured.
KERNELS_BYTES = 128 * MIB
#: Reserve per rank if several ranks run: NCCL connects channels at the first collective. Assumed,
#: not measured.
NCCL_BYTES = 256 * MIB
#: Minimum size of a torch segment. Larger segments are multiples of 2 MiB (CUDACachingAllocator).
SEGMENT_BYTES = 20 * MIB


def rounded_up(value: int, multiple: int) -> int:
    """Rounds a value up to the next multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Consecutive page-aligned KV tensors in one address range, of ``most`` blocks each.

    ``block_bytes`` holds the bytes per block of each tensor. Block ``i`` of a tensor begins
    ``i * block_bytes`` bytes after the tensor's start.
    """

    block_bytes: tuple[int, ...]
    most: int
    page_bytes: int = PAGE_BYTES

    def extent(self, tensor: int) -> int:
        """Returns the address bytes of a tensor, in whole pages."""
        return rounded_up(self.block_bytes[tensor] * self.most, self.page_bytes)

    def offset(self, tensor: int) -> int:
        """Returns the offset of a tensor."""
        return sum(self.extent(before) for before in range(tensor))

    def reserved(self) -> int:
        """Returns the address bytes of all tensors."""
        return self.offset(len(self.block_bytes))

    def committed(self, blocks: int) -> int:
        """Returns the page bytes needed for ``blocks`` blocks."""
        return sum(rounded_up(one * blocks, self.page_bytes) for one in self.block_bytes)

    def blocks_within(self, size: int) -> int:
        """Returns the largest number of blocks with at most ``size`` bytes of pages."""
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            if self.committed(middle) <= size:
                low = middle
            else:
                high = middle - 1
        return low

    def step(self) -> int:
        """Returns the blocks per page of the tensor with the smallest blocks, rounded up.

        A reduction by fewer blocks may free no page.
        """
        return max(1, -(-self.page_bytes // min(self.block_bytes)))

    def tail(self, tensor: int, kept: int, had: int) -> tuple[int, int]:
        """Returns offset and bytes of the pages freed by a tensor.

        The tensor shrinks from ``had`` to ``kept`` blocks.
        """
        begin = self.offset(tensor) + rounded_up(self.block_bytes[tensor] * kept, self.page_bytes)
        end = self.offset(tensor) + rounded_up(self.block_bytes[tensor] * had, self.page_bytes)
        return begin, max(0, end - begin)

    def group(self) -> int:
        """Returns the blocks of the shortest run with a whole number of pages in every tensor.

        The length is capped at four times `step`. A capped run leaves partial pages mapped at both
        ends.
        """
        exact = math.lcm(*(self.page_bytes // math.gcd(self.page_bytes, one) for one in self.block_bytes))
        return min(exact, 4 * self.step())

    def inside(self, tensor: int, first: int, end: int) -> tuple[int, int]:
        """Returns offset and bytes of a tensor's whole pages inside blocks ``first`` to ``end``
        (exclusive)."""
        one = self.block_bytes[tensor]
        begin = rounded_up(one * first, self.page_bytes)
        size = max(0, one * end // self.page_bytes * self.page_bytes - begin)
        return self.offset(tensor) + begin, size

    def inside_bytes(self, first: int, end: int) -> int:
        """Returns the bytes of all tensors' whole pages inside a run of blocks."""
        return sum(self.inside(tensor, first, end)[1] for tensor in range(len(self.block_bytes)))


@dataclass(frozen=True)
class Reserve:
    """Memory kept free beside the KV cache, by purpose."""

    #: Eager steps: torch's measured peak, minus the memory torch holds when the cache is sized.
    eager: int
    #: Kernels loaded later.
    kernels: int
    #: Communicators; 0 with one rank.
    nccl: int = 0
    #: Graphs captured later, behind the traffic; 0 if all exist.
    graphs: int = 0
    #: Workspace of FlashAttention 3 in eager steps (`flash_attention`).
    splits: int = 0

    def total(self) -> int:
        return self.eager + self.kernels + self.nccl + self.graphs + self.splits

    def __str__(self) -> str:
        parts = [
            f"{self.eager / MIB:.0f} MiB for eager steps (torch's peak in the largest step less what torch holds now)",
            f"{self.kernels / MIB:.0f} MiB for kernels that load later",
        ]
        if self.nccl:
            parts.append(f"{self.nccl / MIB:.0f} MiB for NCCL's channels")
        if self.splits:
            parts.append(f"{self.splits / MIB:.0f} MiB for FlashAttention's splits")
        if self.graphs:
            parts.append(f"{self.graphs / MIB:.0f} MiB for graphs captured later")
        return ", ".join(parts)


def reserve_of(peak: int, held: int, ranks: int, graphs: int = 0, splits: int = 0) -> Reserve:
    """Returns the reserve.

    ``peak``: torch's peak in the largest eager steps. ``held``: memory held by torch now.
    ``graphs``: bytes of graphs captured later. ``splits``: workspace of FlashAttention 3.
    """
    grows = max(0, peak - held)
    return Reserve(rounded_up(grows, 2 * MIB) if grows else 0, KERNELS_BYTES, NCCL_BYTES if ranks > 1 else 0, graphs, splits)


def ceiling_of(total: int, utilization: float, default: float) -> int | None:
    """Returns the byte limit of the process set by ``gpu_memory_utilization``.

    ``None`` (the default utilization): no limit.
    """
    return None if utilization == default else int(total * utilization)


def kv_bytes(free: int, has: int, reserve: Reserve, ceiling: int | None, own: int) -> int:
    """Returns the size limit of the KV cache in bytes.

    ``free``: the driver's free bytes. ``has``: bytes of the cache now. ``own``: bytes in use by
    this process, cache included. With the reserve used up, the process stays within device and
    ceiling.
    """
    room = free - reserve.total()
    if ceiling is not None:
        room = min(room, ceiling - own - reserve.total())
    return max(0, has + room)


def first_blocks(wanted: int, most: int, block_bytes: int, free: int) -> int:
    """Returns the number of blocks mapped before the captures.

    The blocks of warm-up, at most a quarter of free memory and at least two.
    """
    return max(1, min(most, max(2, min(wanted, free // 4 // max(1, block_bytes)))))


def agreed(blocks: Sequence[int]) -> int:
    """Returns the number of blocks for which every rank has room."""
    return min(blocks, default=0)


def own_bytes(used: int, by_process: int | None, others: int | None) -> int:
    """Returns the bytes of ``used`` device bytes which belong to this process.

    Preferred source: the driver's number for the process. Otherwise: ``used`` minus the bytes other
    processes used before this process started, if known.
    """
    if by_process is not None:
        return min(by_process, used)
    return max(0, used - (others or 0))
