"""Elastic memory: a range of addresses whose pages are committed and decommitted (``vmmgraph_elastic_buffer_*``)."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from . import _c

if TYPE_CHECKING:
    import torch

    from ._arena import Device


class ElasticBuffer:
    """Addresses for ``size`` bytes on a device, without memory until `commit`. Pages have ``page_bytes`` each.

    Raises `Error` if the library has no elastic memory or the addresses cannot be reserved.
    """

    #: Null in the class: ``__del__`` runs also when ``__init__`` fails early.
    handle = _c.Handle()

    def __init__(self, device: Device, size: int, page_bytes: int, name: str) -> None:
        library = device.library
        if not library.has("elastic_buffer_create"):
            raise _c.Error(
                f"cannot reserve elastic memory: {library.path} has no elastic buffers; build the library again", _c.WRONG_STATE
            )
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
        """Maps the absent pages of ``size`` bytes from ``offset``, rounded outward: all of them or none. Returns the bytes that were mapped.

        Raises `OutOfMemory` and changes nothing if the device has no room.
        """
        done = _c.Committed()
        self.library.elastic_buffer_commit(self.handle, offset, size, byref(done))
        return done.bytes

    def decommit(self, offset: int, size: int, streams: list[int] | None = None) -> int:
        """Gives back the pages within ``size`` bytes from ``offset``, rounded inward, after the work given to ``streams`` so far. Returns their
        bytes. Does not wait: `settle` unmaps pages whose streams are done."""
        gone = c_uint64()
        handles = (c_void_p * len(streams or ()))(*(streams or ()))
        fence = _c.Fence(streams=ctypes.cast(handles, ctypes.POINTER(c_void_p)), stream_count=len(handles))
        self.library.elastic_buffer_decommit(self.handle, offset, size, byref(fence) if streams else None, byref(gone))
        return gone.value

    def settle(self) -> int:
        """Unmaps decommitted pages that no stream uses any more; their bytes."""
        gone = c_uint64()
        self.library.elastic_buffer_settle(self.handle, byref(gone))
        return gone.value

    def stats(self) -> dict[str, int]:
        """What the buffer holds now (``vmmgraph_elastic_stats_t``)."""
        stats = _c.ElasticStats()
        self.library.elastic_buffer_stats(self.handle, byref(stats))
        return stats.as_dict()

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """An int8 tensor over ``size`` bytes from ``offset``, which keeps the buffer alive. The first page must be committed, since torch asks
        the driver which device the first address is on. Bytes without memory must not be accessed."""
        import torch

        return torch.as_tensor(_Bytes(self, offset, size), device=torch.device("cuda", self.device.number))

    def __del__(self) -> None:
        self.handle.end()


class _Bytes:
    """Hands a range of a buffer to torch by CUDA's array interface, and is kept by the tensor."""

    def __init__(self, owner: ElasticBuffer, offset: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|i1",
            "data": (owner.base + offset, False),
            "version": 3,
        }
