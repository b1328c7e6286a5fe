"""Graph memory for other processes: what is behind a tensor, a page exported and pinned, another process's range mapped.

The device is opened for it once: ``vmmgraph.enable(sharing="fd")``, or ``VMMGRAPH_SHARING=fd`` in the environment. Then::

    parts = sharing.extents(graph, tensor)                       # after the capture has ended and its shape is sealed
    pages = {part.page: sharing.ExportedPage(arena, part.page) for part in parts}
    socket.send_fds(peer, [payload], [page.descriptor for page in pages.values()])

and in the other process, for descriptors in the order in which they were sent::

    page = sharing.PeerPage(arena, descriptor, part.page_bytes)
    span = sharing.PeerMap(arena, [(page, part.offset, part.bytes)])
    theirs = span.tensor((batch, hidden), torch.bfloat16)        # memory of both

Descriptors travel over a unix socket by ``socket.send_fds`` and ``socket.recv_fds``. What may be shared so, and when peers may read, is in docs/guarantees.md.
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
    """A part of a page, and where it shows: ``page`` is a number that no other page of the device has or had; the rest is in bytes."""

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
    """The pages behind ``memory``, which is a contiguous tensor or an address and bytes, in order: of a graph that captured it, or of an
    arena if it is an :meth:`exclusive block <vmmgraph.Arena.allocate_exclusive>`. A seal may exchange pages under tensors that stay: ask after it. Pins nothing."""
    from ._arena import Arena

    if isinstance(of, Arena):
        library, function, handle = of._library, "arena_export", of.handle
    else:
        shape = getattr(of, "_shape", of)
        if shape is None:
            raise _c.Error("the graph was captured in torch's own memory", _c.WRONG_STATE)
        library, function, handle = shape.library, "space_export", shape.space
    address, size = _range(memory)
    count, found = c_size_t(), (_c.PageExtent * 0)()
    while True:
        getattr(library, function)(handle, address, size, found, len(found), byref(count))
        if count.value <= len(found):
            return [PageExtent(one.page, one.offset, one.bytes, one.address or 0, one.page_bytes) for one in found[: count.value]]
        found = (_c.PageExtent * count.value)()


class ExportedPage:
    """A page that other processes have: while this lives it is not given back, lent, paused, or exchanged for another. Close it when every process
    that has the page has closed it. ``descriptor`` is this object's, and is not needed once it was sent: :meth:`close_descriptor`."""

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
        """Takes the pin away."""
        self.close_descriptor()
        if getattr(self, "_pinned", False):
            self._pinned = False
            self._device.library.raw["device_page_exported"](self._device.handle, self.page, -1)

    def __del__(self) -> None:
        self.close()


class PeerPage:
    """A page of another process, imported once, however many ranges show it. Its memory stays as long as this or a :class:`PeerMap` of it does.
    ``page_bytes`` is what its owner's :class:`PageExtent` says. The descriptor stays the caller's and is not needed afterwards."""

    #: Null in the class: ``__del__`` runs whatever happens before there is one.
    handle = _c.Handle()

    def __init__(self, arena: Arena, descriptor: int, page_bytes: int) -> None:
        self._device = arena._device
        self.handle = _c.Handle(self._device.library.raw["peer_page_close"])
        self._device.library.device_import(self._device.handle, descriptor, page_bytes, byref(self.handle))

    def __del__(self) -> None:
        self.handle.end()


class PeerMap:
    """A range of another process at addresses of this one's, in one piece, from parts ``(page, offset, bytes)``: all but the first begin where
    their page does, and all but the last end there. At its end its pages go behind what the noted streams were given by then."""

    #: As a page's.
    handle = _c.Handle()

    def __init__(self, arena: Arena, parts: Sequence[tuple[PeerPage, int, int]]) -> None:
        self._device = arena._device
        self.handle = _c.Handle(self._device.library.raw["peer_map_destroy"])
        given = (_c.PeerExtent * len(parts))()
        for one, (page, offset, size) in zip(given, parts, strict=True):
            one.page, one.offset, one.bytes = page.handle, offset, size
        address = c_void_p()
        self._device.library.peer_map_create(self._device.handle, given, len(parts), byref(self.handle), byref(address))
        #: Where the range begins, and its bytes.
        self.address: int = address.value or 0
        self.bytes: int = sum(size for _, _, size in parts)

    def used_by(self, stream: Any) -> None:
        """Notes that work of a stream, torch's or its handle, uses the range. Other work is done when this ends."""
        self._device.library.peer_map_used_by(self.handle, getattr(stream, "cuda_stream", stream))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The range from its beginning on as a tensor, which keeps this alive. Note the streams that use it."""
        import torch

        size = math.prod(shape) * dtype.itemsize
        if size > self.bytes:
            raise ValueError(f"a tensor of {size} bytes over {self.bytes} of a peer's")
        raw = torch.as_tensor(_Bytes(self, size), device=torch.device("cuda", self._device.number))
        return raw.view(dtype).view(*shape)

    def __del__(self) -> None:
        self.handle.end()


class _Bytes:
    """What torch takes memory from, and keeps."""

    def __init__(self, owner: PeerMap, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (owner.address, False), "version": 3}
