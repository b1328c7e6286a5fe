"""The interface of vLLM's ``CuMemAllocator``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ._interface import TorchMemorySaver, torch_memory_saver
from ._library import DEFAULT_TAG

_GRAPHS = "cudagraph"
#: Tags that a wake of other tags leaves asleep.
_DEFERRABLE = ("weights", "kv_cache")


def _tuple(tags: Collection[str] | str) -> tuple[str, ...]:
    return (tags,) if isinstance(tags, str) else tuple(tags)


class CuMemAllocator:
    """The interface of vLLM's ``CuMemAllocator`` (0.24 to 0.33), on `torch_memory_saver` in either
    hook mode.

    Backup is chosen at allocation, not at `sleep`: tags in `discarded` (initially ``kv_cache`` and
    ``workspace``) have none. So `sleep` also keeps tags not named for offload, which costs host
    memory, and refuses to offload a tag without backup.
    """

    default_tag = DEFAULT_TAG
    instance: CuMemAllocator | None = None

    def __init__(self, saver: TorchMemorySaver | None = None) -> None:
        self.discarded: set[str] = {"kv_cache", "workspace"}
        self._saver = saver or torch_memory_saver
        self._backup: dict[str, bool] = {}

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """Returns the process's instance."""
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance

    def _has_backup(self, tag: str) -> bool:
        return self._backup.setdefault(tag, tag not in self.discarded)

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Makes this thread's allocations pausable under `tag` (default "default")."""
        tag = self.default_tag if tag is None else tag
        with self._saver.region(tag, enable_cpu_backup=self._has_backup(tag)):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[Any]:
        """Yields a pool id: this thread's captures with this ``pool=`` have the tag "cudagraph".
        Raises RuntimeError on the MemPool route of `vmmgraph.enable`."""
        with self._saver._ready().graph_pool(_GRAPHS, self._has_backup(_GRAPHS)) as pool:
            yield pool

    def sleep(self, offload_tags: Collection[str] | str | None = None) -> None:
        """Pauses all tags; `wake_up` restores the contents of `offload_tags` (None: "default"). A
        second call does nothing.

        Raises ValueError, without effect, for a tag without a backup, and the errors of
        `TorchMemorySaver.pause`.
        """
        tags = (self.default_tag,) if offload_tags is None else _tuple(offload_tags)
        lost = sorted(tag for tag in tags if self._backup.get(tag) is False)
        if lost:
            raise ValueError(
                f"sleep: {lost} have no backup; take them out of CuMemAllocator.discarded before memory is allocated"
            )
        self.discard(self._backup)
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def discard(self, tags: Collection[str] | str) -> None:
        """Pauses `tags`; ignores unknown tags. Tags with a backup still keep their contents in host
        memory. Raises like `TorchMemorySaver.pause`."""
        for tag in _tuple(tags):
            if tag in self._backup:
                self._saver.pause(tag)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resumes all tags, or of "weights" and "kv_cache" only those in `tags`. Ignores resumed
        tags. Raises like `TorchMemorySaver.resume`; tags before the failed one are then resumed."""
        for tag in self._backup:
            if tags is None or tag in tags or tag not in _DEFERRABLE:
                self._saver.resume(tag)

    def get_current_usage(self) -> int:
        """Returns the bytes of torch's segments in this saver's pools, paused or not."""
        return self._saver._ready().pools.segment_bytes()

    def release_pools(self) -> None:
        """Returns the freed memory of the pools to the device, as before the end of a process.
        Tensors and graphs stay valid, and later allocations use new pools."""
        if self._saver._impl is not None:
            self._saver._impl.pools.retire(None)

    close = release_pools
