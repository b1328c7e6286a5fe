"""Guard of SGLang's KV cache (`kv_guard`): takes free tokens out of use while the device is short
of memory. `sglang_kv` installs the guard if ``VMMGRAPH_KV_GUARD=1`` is set: the guard was never run
on a GPU.

SGLang's allocator lists its free pages in two tensors. The guard removes the pages of whole groups
from the lists, before a batch runs: all tokens of the batch are then allocated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import kv_guard
from ._common import is_set

#: Parts of a scheduler which compare the free tokens with the total.
_COUNTERS = ("invariant_checker", "pool_stats_observer")


class TokenPool:
    """SGLang's free pages as groups, with the pages out of use. A block is a token."""

    def __init__(
        self, allocator: Any, group: int, keep: int, evict: Callable[[int], None], resized: Callable[[int], None]
    ) -> None:
        """``group``: tokens of a group. ``keep``: minimum of tokens in use. ``evict`` makes SGLang
        free cached prefixes until a number of tokens is free. ``resized`` gets the tokens in use.
        """
        self.allocator, self.evict, self.resized = allocator, evict, resized
        self.page = allocator.page_size
        self.group = math.lcm(group, self.page)
        self.keep, self.total = keep, allocator.size
        #: Page 0 is padding, and never free.
        self.groups = (self.total + self.page) // self.group
        #: Pages out of use, by group.
        self.out: dict[int, Any] = {}
        clear = allocator.clear

        @functools.wraps(clear)
        def cleared() -> None:
            # Lists all pages as free.
            clear()
            for number in list(self.out):
                self.out[number] = self.removed(number)

        allocator.clear = cleared

    def run(self, number: int) -> tuple[int, int]:
        """Returns the first token of a group, and the end (exclusive)."""
        return number * self.group, (number + 1) * self.group

    def whole(self, number: int) -> bool:
        """Returns whether all pages of a group are out of use."""
        return len(self.out[number]) * self.page == self.group

    def blocks_out(self) -> int:
        return self.page * sum(map(len, self.out.values()))

    def group_of(self, pages: Any) -> Any:
        return pages // (self.group // self.page)

    def candidates(self, count: int) -> list[int]:
        """Returns at most ``count`` groups to take out of use; `keep` limits the number.

        Order: most free pages, then from the end of the cache. Cached prefixes are freed first if
        too few tokens are free.
        """
        import torch

        count = min(count, (self.total - self.keep) // self.group - len(self.out))
        if count <= 0:
            return []
        self.evict(count * self.group)
        free = torch.cat((self.allocator.free_pages.cpu(), self.allocator.release_pages.cpu()))
        pages = torch.bincount(self.group_of(free), minlength=self.groups).tolist()
        # Group 0 has the padding page, and would never be whole.
        ranked = [(-pages[number], -number) for number in range(1, self.groups) if pages[number] and number not in self.out]
        return [-number for _, number in sorted(ranked)[:count]]

    def removed(self, number: int) -> Any:
        """Removes the free pages of a group from the lists. Returns the pages, in host memory.

        The device has no memory for copies of the lists (8 bytes a token): the old list is freed
        before the new one is made.
        """
        import torch

        parts = []
        for name in ("free_pages", "release_pages"):
            device = getattr(self.allocator, name).device
            pages = getattr(self.allocator, name).cpu()
            inside = self.group_of(pages) == number
            parts.append(pages[inside])
            if len(parts[-1]):
                setattr(self.allocator, name, None)
                setattr(self.allocator, name, pages[~inside].to(device))
        return torch.cat(parts)

    def take(self, number: int) -> None:
        """Takes the free pages of a group out of use. Other pages follow in a later call."""
        import torch

        pages = self.removed(number)
        self.out[number] = torch.cat((self.out[number], pages)) if number in self.out else pages
        self.resized(self.total - self.blocks_out())

    def give(self, number: int) -> None:
        """Returns the pages of a group to the free list."""
        import torch

        free = self.allocator.free_pages
        self.allocator.free_pages = torch.cat((free, self.out.pop(number).to(free.device)))
        self.resized(self.total - self.blocks_out())


def install(scheduler: Any, kv: Any) -> kv_guard.Guard | None:
    """Makes a guard of a scheduler's KV cache. Returns ``None`` if the cache keeps its size."""
    runner = scheduler.tp_worker.model_runner
    if not is_set("VMMGRAPH_KV_GUARD") or not kv_guard.wanted(runner.tp_size):
        return None

    def evict(tokens: int) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(scheduler.tree_cache, tokens)

    def resized(tokens: int) -> None:
        for name in _COUNTERS:
            getattr(scheduler, name).max_total_num_tokens = tokens

    # The longest request, and a chunk of another one.
    keep = scheduler.max_req_len + max(runner.server_args.chunked_prefill_size or 0, 0) + runner.server_args.page_size
    pool = TokenPool(runner.token_to_kv_pool_allocator, kv.layout.group(), keep, evict, resized)
    return kv_guard.Guard(pool, kv, kv_guard.Need(kv.eager), kv.available, kv.release)


def patch_scheduler(module: ModuleType, kv_of: Callable[[Any], Any]) -> None:
    """Makes the guard poll before each batch. The first batch creates the guard."""
    original = module.Scheduler.run_batch

    @functools.wraps(original)
    def run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_vmmgraph_guard"):
            kv = kv_of(self.tp_worker.model_runner)
            self._vmmgraph_guard = install(self, kv) if kv is not None else None
        if self._vmmgraph_guard is not None:
            self._vmmgraph_guard.look(batch.forward_mode.is_extend())
        return original(self, batch, *args, **kwargs)

    module.Scheduler.run_batch = run_batch
