"""Shares graph memory with other processes: finds the pages behind a tensor, exports and pins a
page, maps a peer's range.

Open the device for sharing: ``vmmgraph.enable(sharing="fd")``, or ``VMMGRAPH_SHARING=fd`` in the
environment. Then::

    parts = sharing.extents(graph, tensor)                       # after the seal of the graph group
    pages = {part.page: sharing.ExportedPage(arena, part.page) for part in parts}
    socket.send_fds(peer, [payload], [page.descriptor for page in pages.values()])

and in the peer, for descriptors in the order of sending::

    page = sharing.PeerPage(arena, descriptor, part.page_bytes)
    span = sharing.PeerMap(arena, [(page, part.offset, part.bytes)])
    theirs = span.tensor((batch, hidden), torch.bfloat16)        # memory of both processes

Send descriptors over a unix socket with ``socket.send_fds`` and ``socket.recv_fds``.
docs/guarantees.md states which memory may be shared and when peers may read.
"""

from __future__ import annotations

import math
import os
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _c

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ._arena import Arena


class PageExtent(NamedTuple):
    """A part of a page and its address, in bytes. ``page`` is never reused on the device."""

    page: int
    offset: int
    bytes: int
    address: int
    page_bytes: int


def _range(of: Any) -> tuple[int, int]:
    if isinstance(of, tuple):
        address, size = of
        return int(address), int(size)
    return of.data_ptr(), of.numel() * of.element_size()


def extents(of: Any, memory: Any) -> list[PageExtent]:
    """Returns the pages behind ``memory``, a contiguous tensor or (address, size). ``of`` is the
    graph that captured it, or the arena of an :meth:`exclusive block
    <vmmgraph.Arena.allocate_exclusive>`. Call after the seal, which may replace pages. Pins
    nothing."""
    from ._arena import Arena

    if isinstance(of, Arena):
        library, function, handle = of._library, "arena_export", of.handle
    else:
        group = getattr(of, "_group", of)
        if group is None:
            raise _c.Error(
                "cannot share the graph's pages: it was captured in torch's own memory; capture it into an arena", _c.WRONG_STATE
            )
        library, function, handle = group.library, "space_export", group.space
    address, size = _range(memory)
    count, found = c_size_t(), (_c.PageExtent * 0)()
    while True:
        getattr(library, function)(handle, address, size, found, len(found), byref(count))
        if count.value <= len(found):
            return [PageExtent(one.page, one.offset, one.bytes, one.address or 0, one.page_bytes) for one in found[: count.value]]
        found = (_c.PageExtent * count.value)()


class ExportedPage:
    """Exports and pins a page: until closed, it is not freed, lent, paused or replaced. Close after
    every importing process has. ``descriptor`` is not needed after sending:
    :meth:`close_descriptor`."""

    def __init__(self, arena: Arena, page: int) -> None:
        self.descriptor = -1
        self._device = arena._device
        self.page = page
        descriptor = c_int(-1)
        self._device.library.device_export_page(self._device.handle, page, byref(descriptor))
        self.descriptor = descriptor.value
        self._pinned = True

    def close_descriptor(self) -> None:
        """Closes the descriptor. The page stays pinned."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Unpins the page."""
        self.close_descriptor()
        if getattr(self, "_pinned", False):
            self._pinned = False
            self._device.library.raw["device_page_exported"](self._device.handle, self.page, -1)

    def __del__(self) -> None:
        self.close()


class PeerPage:
    """A page imported from another process. The memory stays until this object and every
    :class:`PeerMap` of the page are gone. ``page_bytes`` is from the owner's :class:`PageExtent`.
    The caller keeps the descriptor, not needed after the import."""

    #: Class default: ``__del__`` may run before ``__init__`` is done.
    handle = _c.Handle()

    def __init__(self, arena: Arena, descriptor: int, page_bytes: int) -> None:
        self._device = arena._device
        self.handle = _c.Handle(self._device.library.raw["peer_page_close"])
        self._device.library.device_import(self._device.handle, descriptor, page_bytes, byref(self.handle))

    def __del__(self) -> None:
        self.handle.end()


class PeerMap:
    """A peer's range mapped contiguously, from parts ``(page, offset, bytes)``. Only the first part
    may begin inside its page, and only the last may end inside. Destruction unmaps the pages after
    current work of the noted streams."""

    handle = _c.Handle()

    def __init__(self, arena: Arena, parts: Sequence[tuple[PeerPage, int, int]]) -> None:
        self._device = arena._device
        self.handle = _c.Handle(self._device.library.raw["peer_map_destroy"])
        given = (_c.PeerExtent * len(parts))()
        for one, (page, offset, size) in zip(given, parts, strict=True):
            one.page, one.offset, one.bytes = page.handle, offset, size
        address = c_void_p()
        self._device.library.peer_map_create(self._device.handle, given, len(parts), byref(self.handle), byref(address))
        self.address: int = address.value or 0
        self.bytes: int = sum(size for _, _, size in parts)

    def used_by(self, stream: Any) -> None:
        """Notes a stream that uses the range. All other work must be done before destruction."""
        self._device.library.peer_map_used_by(self.handle, getattr(stream, "cuda_stream", stream))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor over the range from its beginning, which keeps this object alive. Note
        the streams that use the tensor."""
        import torch

        size = math.prod(shape) * dtype.itemsize
        if size > self.bytes:
            raise ValueError(f"a tensor of {size} bytes over {self.bytes} of a peer's")
        raw = torch.as_tensor(_Bytes(self, size), device=torch.device("cuda", self._device.number))
        return raw.view(dtype).view(*shape)

    def __del__(self) -> None:
        self.handle.end()


class _Bytes:
    def __init__(self, owner: PeerMap, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (owner.address, False), "version": 3}
