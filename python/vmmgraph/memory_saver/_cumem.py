"""The interface of vLLM's ``CuMemAllocator``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from ._interface import TorchMemorySaver, torch_memory_saver
from ._library import DEFAULT_TAG


class CuMemAllocator:
    """The interface of vLLM's ``CuMemAllocator``, on `torch_memory_saver` in either hook mode.

    Backup is chosen at allocation, not at `sleep`: tags in `discarded` (initially ``{"kv_cache"}``)
    have none. So `sleep` also keeps tags not named for offload, which costs host memory, and
    refuses to offload a tag without backup.
    """

    default_tag = DEFAULT_TAG
    _instance: CuMemAllocator | None = None

    def __init__(self, saver: TorchMemorySaver | None = None) -> None:
        self.discarded: set[str] = {"kv_cache"}
        self._saver = saver or torch_memory_saver
        self._backup: dict[str, bool] = {}

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """Returns the process's instance."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Makes this thread's allocations pausable under `tag` (default "default")."""
        tag = self.default_tag if tag is None else tag
        backup = self._backup.setdefault(tag, tag not in self.discarded)
        with self._saver.region(tag, enable_cpu_backup=backup):
            yield

    def sleep(self, offload_tags: Collection[str] | str | None = None) -> None:
        """Pauses all tags; `wake_up` restores the contents of `offload_tags` (None: "default"). A
        second call does nothing.

        Raises ValueError, without effect, for a tag without a backup, and the errors of
        `TorchMemorySaver.pause`.
        """
        tags = (
            (self.default_tag,)
            if offload_tags is None
            else (offload_tags,)
            if isinstance(offload_tags, str)
            else tuple(offload_tags)
        )
        lost = sorted(tag for tag in tags if self._backup.get(tag) is False)
        if lost:
            raise ValueError(
                f"sleep: {lost} have no backup; take them out of CuMemAllocator.discarded before memory is allocated"
            )
        for tag in self._backup:
            self._saver.pause(tag)
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def get_current_usage(self) -> int:
        """Returns the bytes of torch's segments in this saver's pools, paused or not."""
        return self._saver._ready().pools.segment_bytes()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resumes `tags`, or all. Ignores unknown or resumed tags. Raises like
        `TorchMemorySaver.resume`; tags before the failed one are then resumed."""
        for tag in self._backup if tags is None else tags:
            if tag in self._backup:
                self._saver.resume(tag)
