"""Arenas, and the graph groups captured into them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from . import _c
from ._site import call_site

if TYPE_CHECKING:
    import torch

    from ._c import Library


log = logging.getLogger("vmmgraph")
#: Warn after this many captures that left this many bytes alive.
MANY, MUCH = 12, 64 << 20


#: Opens the process's session (`_session.need`), for arenas made by a program. Set by `_session`.
_open_session: Callable[[], Any]


def sessions_come_from(need: Callable[[], Any]) -> None:
    """Sets the function which opens the process's session."""
    global _open_session
    _open_session = need


class Device:
    """An open device; closed when this object is destroyed."""

    #: Class default: ``__del__`` may run before ``__init__`` is done.
    handle = _c.Handle()

    def __init__(self, library: Library, number: int, sharing: str = "none", peers: int = 0) -> None:
        self.library = library
        self.number = number
        self.handle = _c.Handle(library.raw["device_close"])
        options = _c.DeviceOptions(device=number, sharing=_c.SHARING[sharing], peers=peers)
        library.device_open(byref(options), byref(self.handle))

    def trim(self) -> int:
        """Returns free pages to the driver; returns their bytes."""
        released = c_uint64()
        self.library.device_trim(self.handle, byref(released))
        return released.value

    def __del__(self) -> None:
        self.handle.end()


_devices: weakref.WeakValueDictionary[tuple[int, int], Device] = weakref.WeakValueDictionary()
_devices_lock = threading.Lock()


def device_of(library: Library, number: int, sharing: str = "none", peers: int = 0) -> Device:
    with _devices_lock:
        key = (id(library), number)
        device = _devices.get(key)
        if device is None:
            device = _devices[key] = Device(library, number, sharing, peers)
        return device


def bits(devices: Sequence[int]) -> int:
    """Returns a mask with one bit per device."""
    return sum(1 << device for device in set(devices))


def sharing_asked(given: str | None) -> str:
    asked = given if given is not None else os.environ.get("VMMGRAPH_SHARING") or "none"
    if asked not in _c.SHARING:
        raise ValueError(f"cannot use sharing={asked!r}: the value is unknown; pass one of: {', '.join(_c.SHARING)}")
    return asked


class Arena:
    """Pages on one device, shared by graphs that never run at the same time.

    ``budget``: limit in bytes (0: none). ``retain``: policy for tensors alive after a capture.
    ``own_pages`` keeps their contents, as in a private pool. ``shared_pages`` lets the next graph
    overwrite them. ``shared_remote`` is ``own_pages``, except for tensors made within
    :func:`vmmgraph.remote`. ``in_place`` never moves a tensor.

    ``expected_bytes``: approximate need of the peak graph, for the page size. ``poison``: fills
    shared pages before every replay, to find dependencies on other graphs. ``serial``: refuses
    replays on a second stream or thread. ``remote_peers``: devices of this process that access
    remote blocks (:func:`vmmgraph.remote`) and exclusive blocks. ``tag``: selects the arena for a
    pause, such as a tag of :mod:`vmmgraph.memory_saver`.

    Thread-safe. The memory returns to the device when the arena, its graphs and their tensors are
    gone.
    """

    handle = _c.Handle()

    def __init__(
        self,
        device: int | torch.device | None = None,
        budget: int = 0,
        *,
        retain: str = "default",
        expected_bytes: int = 0,
        small_page_bytes: int = 0,
        large_page_bytes: int = 0,
        poison: bool = False,
        trace_blocks: bool = False,
        serial: bool = False,
        remote_peers: Sequence[int] = (),
        label: str = "",
        tag: str = "",
    ) -> None:
        if retain not in _c.RETAIN:
            raise ValueError(f"cannot use retain={retain!r}: the value is unknown; pass one of: {', '.join(_c.RETAIN)}")
        session = _open_session()
        self._library: Library = session.library
        self._device = device_of(self._library, session.device_number(device), session.sharing, session.peers)
        tag_text = ctypes.c_char_p(tag.encode()) if tag else None
        flags = _c.FLAGS["poison"] * poison | _c.FLAGS["trace_blocks"] * trace_blocks | _c.FLAGS["serial"] * serial
        self.handle = _c.Handle(self._library.raw["arena_destroy"])
        options = _c.ArenaOptions(
            small_page_bytes=small_page_bytes,
            large_page_bytes=large_page_bytes,
            retain=_c.RETAIN[retain],
            flags=flags,
            budget_bytes=budget,
            expected_bytes=expected_bytes,
            remote_peers=bits(remote_peers),
            tag=ctypes.cast(tag_text, c_void_p) if tag_text is not None else None,
        )
        self._library.arena_create(self._device.handle, byref(options), byref(self.handle))
        self.label = label
        self.tag = tag
        self.pool: tuple[int, int] = session.new_pool()
        #: Whether a capture's end instantiates, as in torch; otherwise the first replay.
        self.instantiates = session.instantiate == "capture"
        #: True if the program named the pool.
        self._pool_is_named = False
        #: True once torch has seen this pool id. `_pool_users` holds one token per live capture
        #: that uses it.
        self._pool_given = False
        self._pool_users: set[object] = set()
        #: Graph groups before their seal.
        self._open: list[GraphGroup] = []
        self._left = (0, 0)
        self._last: weakref.ref[GraphGroup] | None = None
        self._lock = threading.RLock()
        session.register(self)

    @property
    def device(self) -> int:
        """Device number."""
        return self._device.number

    def stats(self) -> dict[str, int]:
        """Returns sizes in bytes and counts of the arena (``vmmgraph_arena_stats_t``)."""
        stats = _c.ArenaStats()
        self._library.arena_stats(self.handle, byref(stats))
        return stats.as_dict()

    def executables(self) -> dict[str, int]:
        """Returns statistics of the device's executables (``vmmgraph_torch_executables_t``); empty
        up to torch 2.7."""
        stats = _c.Executables()
        if not self._library.with_torch or self._library.raw["torch_executable_stats"](self.handle, byref(stats)) != _c.OK:
            return {}
        return stats.as_dict()

    def spaces(self) -> list[dict[str, Any]]:
        """Returns the library's statistics of each graph group."""
        return json.loads(self._library.text("arena_stats_json", self.handle)).get("spaces", [])

    def set_budget(self, budget: int) -> None:
        """Sets the limit in bytes; 0: none. Frees nothing."""
        self._library.arena_set_budget(self.handle, budget)

    def allocate_exclusive(self, size: int, granularity: int = 0) -> int:
        """Allocates a block of ``size`` bytes not shared with graphs, initially zero, for data
        written by peers at any time, or kept across replays. Returns the address, a multiple of
        ``granularity`` (0: small page)."""
        block = c_void_p()
        self._library.arena_allocate_exclusive(self.handle, size, granularity, byref(block))
        return block.value or 0

    def free_exclusive(self, address: int) -> None:
        """Frees an exclusive block. Its memory is reused after the arena's current replays."""
        self._library.arena_free_exclusive(self.handle, address)

    def trim(self) -> int:
        """Waits for the arena's replays and returns free pages to the driver. Returns the bytes."""
        released = c_uint64()
        self._library.arena_trim(self.handle, byref(released))
        return released.value

    def shrink_to_fit(self) -> int:
        """Replaces large pages with little use by small pages, once all graphs are captured, if
        this saves at least a thirty-second. Returns the bytes, freed by the next `trim`."""
        saved = c_uint64()
        self._library.arena_shrink_to_fit(self.handle, None, byref(saved))
        return saved.value

    def mark(self) -> None:
        """Records a mark. Call before the program captures or destroys the stream of the last
        replay."""
        self._library.arena_mark(self.handle)

    def pause(self) -> None:
        """Returns the arena's memory to the device, at the same addresses, until `resume`. Replays
        raise meanwhile. Tensors alive after their captures keep their contents in host memory, and
        exclusive blocks stay. Waits for the replays. Raises `Error` during a capture."""
        self.seal()
        self._library.arena_pause(self.handle, None, None)

    def resume(self) -> None:
        """Raises `OutOfMemory` if the device is full: the arena stays paused, and the call can be
        repeated."""
        self._library.arena_resume(self.handle, 0, None)

    def seal(self) -> None:
        """Seals all open graph groups. Replays, eager work and captures do this automatically."""
        self._seal_open(None)

    def _captured(self, group: GraphGroup) -> None:
        """Called at the end of a capture. Seals unlabelled groups at once, before the program
        writes to their tensors, so no contents are copied."""
        with self._lock:
            group.capturing = False
            if group.unnamed:
                self._look_at_last()
                self._end(group, unwritten=True)
                self._last = weakref.ref(group)

    def _ended(self, key: object) -> None:
        """Called when no further piece of this key follows. The program may launch or write without
        a replay that seals."""
        with self._lock:
            for opened in list(self._open):
                if opened.key is key and not opened.capturing:
                    if opened.by_hand:
                        self._seal(opened)
                    else:
                        self._end(opened)

    def _abandoned(self, group: GraphGroup, unwritten: bool) -> None:
        """Called if no graph of the group will be replayed: the seal protects its live tensors from
        other graphs."""
        with self._lock:
            if group in self._open:
                self._end(group, unwritten)
                self._close(group)

    def _end(self, group: GraphGroup, unwritten: bool = False) -> None:
        # The next replay retries and reports a failed seal.
        with contextlib.suppress(_c.Error):
            self._seal(group, unwritten)

    def _seal_open(self, group: GraphGroup | None) -> None:
        """Seals the open groups that are not under capture, and `group`."""
        with self._lock:
            for opened in list(self._open):
                if not opened.capturing:
                    self._seal(opened)
            if group is not None and not group.sealed:
                group.seal()

    def _seal(self, group: GraphGroup, unwritten: bool = False) -> None:
        group.seal(unwritten)
        self._close(group)

    def _close(self, group: GraphGroup) -> None:
        # The garbage collector may have removed it already.
        if group in self._open:
            self._open.remove(group)

    def _look_at_last(self) -> None:
        """Warns once if unlabelled captures leave much memory alive, as pieces of one graph group
        do."""
        last = self._last() if self._last is not None else None
        left = last.retained() if last is not None else 0
        if left:
            self._left = (self._left[0] + 1, self._left[1] + left)
            if self._left[0] == MANY and self._left[1] >= MUCH:
                log.warning(
                    "vmmgraph: %d captures left %d MiB alive at their end, which nobody shares; if they are pieces of one group, "
                    "capture them within vmmgraph.shape(label)",
                    self._left[0],
                    self._left[1] >> 20,
                )

    def map(self) -> dict[str, Any]:
        """Returns the page map: the pages of each graph group (docs/python.md)."""
        return json.loads(self.map_json())

    def map_json(self) -> str:
        """Returns the page map as JSON."""
        options = _c.MapOptions(executables_bytes=self.executables().get("bytes", 0), title=self.label.encode())
        return self._library.text("arena_map_json", self.handle, byref(options))

    def what_if_dropped(self, label: str) -> int:
        """Bytes freed by dropping the graph group with this label (the maximum, if several have
        it), from the page map."""
        found = [space["drop_gives_bytes"] for space in self.map()["spaces"] if space["label"] == label]
        if not found:
            raise KeyError(f"no graph group {label!r} in the arena")
        return max(found)

    def __repr__(self) -> str:
        return f"<vmmgraph.Arena {self.label or hex(self.handle.value or 0)} on cuda:{self._device.number}>"

    def __del__(self) -> None:
        if self.handle:
            self.handle.end()
            # An engine's memory measurement must not count the device's free pages.
            self._library.raw["device_trim"](self._device.handle, None)


class GraphGroup:
    handle = _c.Handle()

    def __init__(self, arena: Arena, key: object, label: str) -> None:
        self.arena = arena
        self.library = arena._library
        self.handle = _c.Handle(self.library.raw["torch_group_close"])
        #: Common key of all pieces; ``None`` for a single graph.
        self.key = key
        self.unnamed = key is None
        self.label = label
        #: One token per live graph, including one under capture.
        self.captures: set[object] = set()
        self.capturing = False
        self.sealed = False
        #: True if the program may launch the graphs itself.
        self.by_hand = False
        self._sealed_as: _c.SealReport | None = None
        self.library.torch_group_open(arena.handle, byref(self.handle))
        self.space = c_void_p()
        self.library.torch_group_space(self.handle, byref(self.space))
        #: File and line where the first capture began.
        self.site = call_site()
        self._say("space_set_label", label)
        self._say("space_set_site", self.site)

    def _say(self, function: str, text: str) -> None:
        """Passes a label to the library; a refusal must not prevent the capture."""
        if text:
            short = text.encode(errors="replace")[:1000].decode(errors="ignore").replace("\0", " ")
            self.library.raw[function](self.space, short.encode())

    def seal(self, unwritten: bool = False) -> None:
        """``unwritten``: the program has not written to the tensors since the capture."""
        report = _c.SealReport()
        if unwritten:
            self.library.torch_group_seal_unwritten(self.handle, byref(report))
        else:
            self.library.torch_group_seal(self.handle, _c.RETAIN["default"], byref(report))
        self.sealed = True
        # May be an engine's context, which keeps a step's tensors alive.
        self.key = None
        self._sealed_as = report
        if self.arena.instantiates and not self.by_hand:
            # The first replay retries after out of memory, with evictions.
            self.library.raw["torch_group_instantiate"](self.handle, None)

    @property
    def report(self) -> dict[str, int]:
        """Returns the seal report (``vmmgraph_seal_report_t``); empty before the seal."""
        return self._sealed_as.as_dict() if self._sealed_as is not None else {}

    def instantiate(self) -> bool:
        """Instantiates ahead of the first replay. False if the limits leave no room."""
        instantiated = c_int32()
        self.library.torch_group_instantiate(self.handle, byref(instantiated))
        return bool(instantiated.value)

    def retained(self) -> int:
        stats = _c.SpaceStats()
        self.library.raw["space_stats"](self.space, byref(stats))
        return stats.retained_bytes

    def launched_by_hand(self) -> None:
        self.by_hand = True
        self.library.torch_launched_by_hand(self.handle)

    def verify(self, piece: int, tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        outputs = (_c.Output * len(tensors))()
        for output, tensor in zip(outputs, tensors, strict=True):
            storage = tensor.untyped_storage()
            output.address, output.bytes = storage.data_ptr(), storage.nbytes()
        difference = _c.Difference()
        self.library.torch_verify(self.handle, piece, outputs, len(tensors), byref(difference))
        return (difference.output, difference.offset) if difference.found else None

    def __del__(self) -> None:
        self.handle.end()


def address_of(graph: object) -> int:
    """Returns the address of the ``at::cuda::CUDAGraph`` in torch's Python object; 0 for an unknown
    layout.

    A pybind11 instance begins with a pointer to the C++ object; flags follow after two words for
    its owner and one for weak references. The library checks the object before use.
    """
    head = id(graph) + object.__basicsize__
    word = ctypes.sizeof(c_void_p)
    if type(graph).__basicsize__ < object.__basicsize__ + 5 * word:
        return 0
    flags = ctypes.c_ubyte.from_address(head + 4 * word).value
    address = c_void_p.from_address(head).value or 0
    # owned, simple layout, holder made, registered
    return address if flags & 0b1111 == 0b1111 and address % 8 == 0 else 0
