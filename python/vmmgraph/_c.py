"""The C functions, by ctypes.

Always ``CDLL``, which releases the interpreter's lock during a call: destroying a graph waits for
the GPU with a library lock held, which a thread freeing a tensor may need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

ABI_VERSION = 1
OK = 0
WRONG_STATE = 100
OUT_OF_MEMORY = range(200, 205)
INTERNAL = 900

RETAIN = {"default": 0, "own_pages": 1, "shared_pages": 2, "in_place": 3, "shared_remote": 4}
#: How a device's pages can be exported to other processes.
SHARING = {"none": 0, "fd": 1, "fabric": 2}
FLAGS = {"poison": 1, "trace_blocks": 2, "serial": 4}


class Error(RuntimeError):
    """Error of the library; ``status`` is one of ``VMMGRAPH_ERROR_*``."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OutOfMemory(Error, MemoryError):
    """Memory, budget, addresses or descriptors are exhausted. The call had no effect."""


class Handle(c_void_p):
    """A library handle with its release function, called by the owner's ``__del__`` and again by
    its own: CPython discards a signal's exception in ``__del__`` with the rest of the method."""

    def __init__(self, give_back: Callable[..., int] | None = None) -> None:
        super().__init__()
        self._give_back = give_back

    def end(self) -> None:
        """Releases the handle. Repeatable: the library refuses an already released handle."""
        if self and self._give_back is not None:
            self._give_back(self)
            self.value = None

    def __del__(self) -> None:
        self.end()


class Struct(ctypes.Structure):
    def __init__(self, **values: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **values)

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name, *_ in self._fields_ if name != "struct_size"}


def _fields(*names: str) -> list[tuple[str, Any]]:
    return [("struct_size", c_size_t), *((name, c_uint64) for name in names)]


class DeviceOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("driver", c_int32),
        ("device", c_int32),
        ("budget_bytes", c_uint64),
        ("host_granularity_bytes", c_uint64),
        ("host_memory_bytes", c_uint64),
        ("sharing", c_int32),
        ("rdma", c_int32),
        ("peers", c_uint64),
    ]


class ArenaOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("small_page_bytes", c_uint64),
        ("large_page_bytes", c_uint64),
        ("retain", c_int32),
        ("flags", c_int32),
        ("budget_bytes", c_uint64),
        ("reserve_bytes", c_uint64),
        ("expected_bytes", c_uint64),
        ("peers", c_uint64),
        ("tag", c_void_p),
        ("least_bytes", c_uint64),
        ("remote_peers", c_uint64),
        ("account", c_void_p),
    ]


class ArenaStats(Struct):
    _fields_ = _fields(
        "physical_bytes",
        "shared_bytes",
        "free_bytes",
        "retained_bytes",
        "reserved_bytes",
        "mapped_bytes",
        "live_bytes",
        "high_water_bytes",
        "current_offset_bytes",
        "blocks",
        "spaces",
        "shared_pages",
        "kept_bytes",
        "closed",
        "charged_bytes",
        "budget_bytes",
        "replays",
        "paused",
        "exclusive_bytes",
        "lent_bytes",
    )


class SealReport(Struct):
    _fields_ = _fields(
        "peak_live_bytes",
        "small_pages",
        "large_pages",
        "maps",
        "retained_bytes",
        "retained_blocks",
        "driver_calls",
        "driver_ns",
        "allocations",
        "layout_hash",
        "remote_blocks",
        "remote_bytes",
        "executable_bytes",
    )


class SpaceStats(Struct):
    _fields_ = [
        *_fields("id"),
        ("phase", c_int32),
        ("retain", c_int32),
        *_fields("blocks", "live_bytes", "peak_live_bytes", "reserved_bytes", "mapped_bytes", "retained_bytes", "maps")[1:],
    ]


class PageExtent(ctypes.Structure):
    _fields_ = [("page", c_uint64), ("offset", c_uint64), ("bytes", c_uint64), ("address", c_void_p), ("page_bytes", c_uint64)]


class PeerExtent(ctypes.Structure):
    _fields_ = [("page", c_void_p), ("offset", c_uint64), ("bytes", c_uint64)]


class Output(ctypes.Structure):
    _fields_ = [("address", c_void_p), ("bytes", c_uint64)]


class Difference(Struct):
    _fields_ = _fields("found", "space", "output", "offset")


class Graph(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("graph", c_void_p),
        ("pool_first", c_uint64),
        ("pool_second", c_uint64),
        ("raw", c_void_p),
        ("lend", c_int32),
        ("memset_kernels", c_int32),
    ]


NO_PIECE = 2**64 - 1


class Captured(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("piece", c_uint64),
        ("memset_kernels", c_uint64),
        ("replayable", c_int32),
        ("lent", c_int32),
    ]


class Executables(Struct):
    _fields_ = _fields(
        "max_groups",
        "max_bytes",
        "groups",
        "instantiated",
        "executables",
        "nodes",
        "template_nodes",
        "bytes",
        "instantiations",
        "ahead",
        "evictions",
        "hits",
        "misses",
    )


class ElasticOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("page_bytes", c_uint64),
        ("budget_bytes", c_uint64),
        ("least_bytes", c_uint64),
        ("account", c_void_p),
    ]


class Committed(Struct):
    _fields_ = _fields("bytes", "pages", "created", "revived")


class ElasticStats(Struct):
    _fields_ = _fields(
        "id",
        "page_bytes",
        "reserved_bytes",
        "committed_bytes",
        "peak_committed_bytes",
        "coming_bytes",
        "pending_unmap_bytes",
        "commits",
        "refused",
        "decommits",
        "pages_mapped",
        "pages_created",
        "pages_revived",
        "pages_unmapped",
        "charged_bytes",
        "budget_bytes",
    )


class Fence(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("streams", POINTER(c_void_p)),
        ("stream_count", c_size_t),
        ("events", POINTER(c_void_p)),
        ("event_count", c_size_t),
    ]


class DeviceStats(Struct):
    _fields_ = _fields(
        "physical_bytes",
        "peak_physical_bytes",
        "retained_bytes",
        "free_bytes",
        "budget_bytes",
        "pages",
        "pages_created",
        "pages_released",
        "mappings",
        "maps",
        "unmaps",
        "reserved_bytes",
        "reservations",
        "pending",
        "pages_reused",
        "exported_bytes",
    )


class MapOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("executables_bytes", c_uint64),
        ("title", c_char_p),
    ]


class Key(ctypes.Structure):
    _fields_ = [("variant", c_uint32), ("extents", c_uint32 * 4)]


class PlanOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("weights", c_uint16 * 4),
        ("most_graphs", c_uint32),
        ("reserved", c_uint32),
        ("most_graph_bytes", c_uint64),
        ("graph_bytes", c_uint64),
        ("most_pool_bytes", c_uint64),
        ("pool_base_bytes", c_uint64),
        ("pool_unit_bytes", c_uint64),
        ("eager_step", c_uint64),
        ("streams", c_void_p),
    ]


class PlannedBucket(ctypes.Structure):
    _fields_ = [("key", Key), ("reserved", c_uint32), ("steps", c_uint64), ("padding", c_uint64), ("saves", c_uint64)]


class Waste(Struct):
    _fields_ = _fields("padding", "graph_steps", "eager_steps")


class PlanResult(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("curve", c_void_p),
        ("curve_capacity", c_size_t),
        ("curve_count", c_size_t),
        ("buckets", c_size_t),
        ("most_graphs", c_uint32),
        ("limited_by", c_int32),
        ("heaviest", c_uint64),
        ("waste", Waste),
    ]


_TEXT = (c_void_p, c_size_t, POINTER(c_size_t))
#: Arguments of each function; all return a status except those in _OTHERS.
_CORE: dict[str, tuple[Any, ...]] = {
    "vmmgraph_abi_version": (),
    "vmmgraph_version": (),
    "vmmgraph_last_error_message": _TEXT,
    "vmmgraph_device_open": (POINTER(DeviceOptions), POINTER(c_void_p)),
    "vmmgraph_device_close": (c_void_p,),
    "vmmgraph_device_trim": (c_void_p, POINTER(c_uint64)),
    "vmmgraph_device_export_page": (c_void_p, c_uint64, POINTER(c_int)),
    "vmmgraph_device_page_exported": (c_void_p, c_uint64, c_int32),
    "vmmgraph_device_import": (c_void_p, c_int, c_uint64, POINTER(c_void_p)),
    "vmmgraph_peer_page_close": (c_void_p,),
    "vmmgraph_peer_map_create": (c_void_p, POINTER(PeerExtent), c_size_t, POINTER(c_void_p), POINTER(c_void_p)),
    "vmmgraph_peer_map_used_by": (c_void_p, c_void_p),
    "vmmgraph_peer_map_destroy": (c_void_p,),
    "vmmgraph_arena_create": (c_void_p, POINTER(ArenaOptions), POINTER(c_void_p)),
    "vmmgraph_arena_destroy": (c_void_p,),
    "vmmgraph_arena_trim": (c_void_p, POINTER(c_uint64)),
    "vmmgraph_arena_shrink_to_fit": (c_void_p, POINTER(Fence), POINTER(c_uint64)),
    "vmmgraph_arena_mark": (c_void_p,),
    "vmmgraph_arena_pause": (c_void_p, c_void_p, c_void_p),
    "vmmgraph_arena_resume": (c_void_p, c_uint64, c_void_p),
    "vmmgraph_arena_set_budget": (c_void_p, c_uint64),
    "vmmgraph_arena_stats": (c_void_p, POINTER(ArenaStats)),
    "vmmgraph_arena_stats_json": (c_void_p, *_TEXT),
    "vmmgraph_arena_switch_to_new_virtual_space": (c_void_p,),
    "vmmgraph_arena_allocate_exclusive": (c_void_p, c_uint64, c_uint64, POINTER(c_void_p)),
    "vmmgraph_arena_free_exclusive": (c_void_p, c_void_p),
    "vmmgraph_arena_export": (c_void_p, c_void_p, c_uint64, POINTER(PageExtent), c_size_t, POINTER(c_size_t)),
    "vmmgraph_space_export": (c_void_p, c_void_p, c_uint64, POINTER(PageExtent), c_size_t, POINTER(c_size_t)),
    "vmmgraph_space_open": (c_void_p, POINTER(c_void_p)),
    "vmmgraph_space_seal": (c_void_p, c_int32, POINTER(SealReport)),
    "vmmgraph_space_destroy": (c_void_p,),
    "vmmgraph_space_stats": (c_void_p, POINTER(SpaceStats)),
    "vmmgraph_space_enter": (c_void_p, c_void_p),
    "vmmgraph_space_leave": (c_void_p,),
    "vmmgraph_torch_set_arena": (c_int32, c_void_p),
    "vmmgraph_device_stats": (c_void_p, POINTER(DeviceStats)),
    "vmmgraph_elastic_buffer_create": (c_void_p, c_uint64, POINTER(ElasticOptions), POINTER(c_void_p)),
    "vmmgraph_elastic_buffer_destroy": (c_void_p,),
    "vmmgraph_elastic_buffer_base": (c_void_p, POINTER(c_void_p)),
    "vmmgraph_elastic_buffer_commit": (c_void_p, c_uint64, c_uint64, POINTER(Committed)),
    "vmmgraph_elastic_buffer_decommit": (c_void_p, c_uint64, c_uint64, POINTER(Fence), POINTER(c_uint64)),
    "vmmgraph_elastic_buffer_reap": (c_void_p, POINTER(c_uint64)),
    "vmmgraph_elastic_buffer_stats": (c_void_p, POINTER(ElasticStats)),
    "vmmgraph_space_set_label": (c_void_p, c_char_p),
    "vmmgraph_space_set_site": (c_void_p, c_char_p),
    "vmmgraph_space_allocate": (c_void_p, c_uint64, c_void_p, POINTER(c_void_p)),
    "vmmgraph_space_allocate_kept": (c_void_p, c_uint64, c_void_p, POINTER(c_void_p)),
    "vmmgraph_space_free": (c_void_p, c_void_p),
    "vmmgraph_arena_trace_events": (c_void_p, c_int32),
    "vmmgraph_arena_map_json": (c_void_p, POINTER(MapOptions), *_TEXT),
    "vmmgraph_map_html": (c_char_p, *_TEXT),
    "vmmgraph_map_report": (c_char_p, *_TEXT),
    "vmmgraph_map_perfetto": (c_char_p, *_TEXT),
    "vmmgraph_plan": (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p),
}
_TORCH: dict[str, tuple[Any, ...]] = {
    "vmmgraph_torch_built_for": (),
    "vmmgraph_torch_last_error_message": _TEXT,
    "vmmgraph_torch_install": (),
    "vmmgraph_torch_uninstall": (),
    "vmmgraph_torch_installed": (),
    "vmmgraph_torch_group_open": (c_void_p, POINTER(c_void_p)),
    "vmmgraph_torch_group_space": (c_void_p, POINTER(c_void_p)),
    "vmmgraph_torch_group_close": (c_void_p,),
    "vmmgraph_torch_capture_begin": (c_void_p, c_uint64, c_uint64, c_int32),
    "vmmgraph_torch_capture_begun": (c_void_p,),
    "vmmgraph_torch_capture_end": (c_void_p, POINTER(Graph), POINTER(Captured)),
    "vmmgraph_torch_capture_abandon": (c_void_p, c_uint64, c_uint64),
    "vmmgraph_torch_group_seal": (c_void_p, c_int32, POINTER(SealReport)),
    "vmmgraph_torch_replay": (c_void_p, c_uint64),
    "vmmgraph_torch_verify": (c_void_p, c_uint64, POINTER(Output), c_size_t, POINTER(Difference)),
    "vmmgraph_torch_drop": (c_void_p, c_uint64),
    "vmmgraph_torch_keep": (c_void_p, c_uint64),
    "vmmgraph_torch_group_instantiate": (c_void_p, POINTER(c_int32)),
    "vmmgraph_torch_set_executable_limits": (c_void_p, c_uint64, c_uint64),
    "vmmgraph_torch_evict_executables": (c_void_p,),
    "vmmgraph_torch_executable_stats": (c_void_p, POINTER(Executables)),
    "vmmgraph_torch_group_seal_unwritten": (c_void_p, POINTER(SealReport)),
    "vmmgraph_torch_launched_by_hand": (c_void_p,),
    "vmmgraph_torch_remote_enter": (),
    "vmmgraph_torch_remote_leave": (),
    "vmmgraph_torch_eager_enter": (c_void_p,),
    "vmmgraph_torch_eager_enter_of": (c_void_p, c_uint64),
    "vmmgraph_torch_eager_leave_of": (c_void_p,),
    "vmmgraph_torch_eager_end": (c_void_p,),
    "vmmgraph_torch_pool_empty": (c_int32, c_uint64, c_uint64),
}
_OTHERS = {"vmmgraph_version": c_char_p, "vmmgraph_torch_built_for": c_char_p}


class Library:
    """A loaded library: ``library.arena_trim(...)`` calls ``vmmgraph_arena_trim`` and raises
    :class:`Error`."""

    def __init__(self, path: Path, with_torch: bool) -> None:
        self.path = path
        self.with_torch = with_torch
        self._c = ctypes.CDLL(str(path))
        self.raw: dict[str, Callable[..., int]] = {}
        for name, arguments in {**_CORE, **(_TORCH if with_torch else {})}.items():
            self._declare(name, arguments)
        abi = self.raw["abi_version"]()
        if abi != ABI_VERSION:
            raise Error(f"{path} has ABI version {abi}, and this package needs {ABI_VERSION}", 9)

    def _declare(self, name: str, arguments: tuple[Any, ...]) -> None:
        function = getattr(self._c, name)
        function.argtypes = arguments
        function.restype = _OTHERS.get(name, c_int32)
        self.raw[name.removeprefix("vmmgraph_")] = function

    def prepared(self, name: str) -> Callable[..., int]:
        """Returns a function without argument conversion, for frequent calls: pass handles or
        ``c_uint64``, not numbers."""
        function = self._c["vmmgraph_" + name]
        function.restype = c_int32
        return function

    def __getattr__(self, name: str) -> Callable[..., None]:
        try:
            function = self.raw[name]
        except KeyError:
            raise AttributeError(name) from None

        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status != OK:
                self.fail(name, status)

        setattr(self, name, call)
        return call

    def fail(self, name: str, status: int) -> None:
        raise self.error(name, status)

    def error(self, name: str, status: int) -> Error:
        """Returns the error of a status. Call before this thread's next library call."""
        which = "torch_last_error_message" if name.startswith("torch_") and self.with_torch else "last_error_message"
        kind = OutOfMemory if status in OUT_OF_MEMORY else Error
        return kind(self._text(which) or f"vmmgraph_{name} returned {status}", status)

    def text(self, name: str, *arguments: Any) -> str:
        needed = c_size_t()
        capacity = 0
        buffer = ctypes.create_string_buffer(1)
        while True:
            getattr(self, name)(*arguments, buffer if capacity else None, capacity, ctypes.byref(needed))
            if needed.value <= capacity:
                return buffer.value.decode("utf-8", "replace")
            # With some spare bytes, since the text may grow before the next call.
            capacity = needed.value + 64
            buffer = ctypes.create_string_buffer(capacity)

    def _text(self, name: str) -> str:
        buffer = ctypes.create_string_buffer(2048)
        self.raw[name](buffer, len(buffer), None)
        return buffer.value.decode("utf-8", "replace")

    def version(self) -> str:
        return self.raw["version"]().decode()  # type: ignore[attr-defined]

    def built_for(self) -> str:
        """Returns the torch release the library was built for."""
        return self.raw["torch_built_for"]().decode()  # type: ignore[attr-defined]
