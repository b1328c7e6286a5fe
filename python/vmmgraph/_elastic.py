"""Elastic memory: an address range with pages on demand (``vmmgraph_elastic_buffer_*``)."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from . import _c

if TYPE_CHECKING:
    import torch

    from ._arena import Device


class ElasticBuffer:
    """Address range of ``size`` bytes on a device, without memory until `commit`.

    Raises `Error` if the addresses cannot be reserved.
    """

    #: Null at class level: ``__del__`` also runs if ``__init__`` fails early.
    handle = _c.Handle()

    def __init__(self, device: Device, size: int, page_bytes: int, name: str) -> None:
        library = device.library
        self.device = device
        self.library = library
        self.bytes = size
        self.page_bytes = page_bytes
        self.handle = _c.Handle(library.raw["elastic_buffer_destroy"])
        options = _c.ElasticOptions(name=name.encode(), page_bytes=page_bytes)
        library.elastic_buffer_create(device.handle, size, byref(options), byref(self.handle))
        base = c_void_p()
        library.elastic_buffer_base(self.handle, byref(base))
        #: The first address. It never changes.
        self.base: int = base.value or 0

    def commit(self, offset: int, size: int) -> int:
        """Maps the unmapped pages of ``size`` bytes at ``offset``, rounded outward to whole pages.

        Returns the bytes mapped by this call. If the device has no room, raises `OutOfMemory` and
        maps no page.
        """
        done = _c.Committed()
        self.library.elastic_buffer_commit(self.handle, offset, size, byref(done))
        return done.bytes

    def decommit(self, offset: int, size: int, streams: list[int] | None = None) -> int:
        """Decommits the pages of ``size`` bytes at ``offset``, rounded inward to whole pages.

        Pages are unmapped after the work submitted to ``streams`` so far. Does not wait: `reap`
        unmaps pages once their streams are done. Returns the decommitted bytes.
        """
        gone = c_uint64()
        handles = (c_void_p * len(streams or ()))(*(streams or ()))
        fence = _c.Fence(streams=ctypes.cast(handles, ctypes.POINTER(c_void_p)), stream_count=len(handles))
        self.library.elastic_buffer_decommit(self.handle, offset, size, byref(fence) if streams else None, byref(gone))
        return gone.value

    def reap(self) -> int:
        """Unmaps decommitted pages no longer used by a stream. Returns their bytes."""
        gone = c_uint64()
        self.library.elastic_buffer_reap(self.handle, byref(gone))
        return gone.value

    def stats(self) -> dict[str, int]:
        """Returns the buffer's statistics (``vmmgraph_elastic_stats_t``)."""
        stats = _c.ElasticStats()
        self.library.elastic_buffer_stats(self.handle, byref(stats))
        return stats.as_dict()

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """Returns an int8 tensor over ``size`` bytes at ``offset``.

        The tensor keeps the buffer alive. The first page must be committed: torch asks the driver
        for the device of the first address. Bytes without memory must not be accessed.
        """
        import torch

        return torch.as_tensor(_Bytes(self, offset, size), device=torch.device("cuda", self.device.number))

    def __del__(self) -> None:
        self.handle.end()


class _Bytes:
    """CUDA array interface of a buffer range. The tensor holds a reference to this object."""

    def __init__(self, owner: ElasticBuffer, offset: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|i1",
            "data": (owner.base + offset, False),
            "version": 3,
        }
