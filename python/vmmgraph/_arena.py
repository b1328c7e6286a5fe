"""Arenas, and the shapes that are captured into them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from . import _c
from ._site import call_site

if TYPE_CHECKING:
    import torch

    from ._c import Library


log = logging.getLogger("vmmgraph")
#: From so many captures that leave so much on, somebody should know.
MANY, MUCH = 12, 64 << 20


class Device:
    """A device that is open for as long as this object lives."""

    #: Null in the class: ``__del__`` runs whatever happens before there is one.
    handle = _c.Handle()

    def __init__(self, library: Library, number: int, sharing: str = "none", peers: int = 0) -> None:
        self.library = library
        self.number = number
        self.handle = _c.Handle(library.raw["device_close"])
        options = _c.DeviceOptions(device=number, sharing=_c.SHARING[sharing], peers=peers)
        library.device_open(byref(options), byref(self.handle))

    def trim(self) -> int:
        """Gives pages that nobody uses back to the driver; their bytes."""
        released = c_uint64()
        self.library.device_trim(self.handle, byref(released))
        return released.value

    def __del__(self) -> None:
        self.handle.end()


_devices: weakref.WeakValueDictionary[tuple[int, int], Device] = weakref.WeakValueDictionary()
_devices_lock = threading.Lock()


def device_of(library: Library, number: int, sharing: str = "none", peers: int = 0) -> Device:
    """The device, as it is if it is open; else opened with ``sharing`` and ``peers``, one bit a device."""
    with _devices_lock:
        key = (id(library), number)
        device = _devices.get(key)
        if device is None:
            device = _devices[key] = Device(library, number, sharing, peers)
        return device


def bits(devices: Sequence[int]) -> int:
    """A bit for each of some devices."""
    return sum(1 << device for device in set(devices))


def sharing_asked(given: str | None) -> str:
    """What a device's pages can be shared by: what is given, else what the environment says."""
    asked = given if given is not None else os.environ.get("VMMGRAPH_SHARING") or "none"
    if asked not in _c.SHARING:
        raise ValueError(f"sharing is {asked!r}, none of {', '.join(_c.SHARING)}")
    return asked


class Arena:
    """Pages on one device, shared by graphs that never run at the same time.

    ``budget`` limits its bytes (0: none). ``retain`` says what becomes of tensors that live when a capture has ended: ``own_pages``
    (they keep their contents, as in a private pool), ``shared_pages`` (the next graph may overwrite them), ``shared_remote`` (as
    ``own_pages``, but what was made within :func:`vmmgraph.remote` stays where it is, shared) or ``in_place``. ``expected_bytes`` is about
    what the hungriest graph needs, from which the size of a page follows. ``poison`` fills shared pages before every replay, which shows
    graphs that rely on what others left. ``serial`` refuses replays on another stream or thread than the first. ``remote_peers`` are the numbers of other
    devices that read, in this process, what is made within :func:`vmmgraph.remote`, and exclusive blocks. ``tag`` is what a pause finds the
    arena by, such as that of :mod:`vmmgraph.memory_saver`.

    Any thread. Memory goes back to the device when the arena, its graphs and their tensors are gone.
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
        from . import _door

        if retain not in _c.RETAIN:
            raise ValueError(f"retain is {retain!r}, none of {', '.join(_c.RETAIN)}")
        door = _door.need()
        self._library: Library = door.library
        self._device = device_of(self._library, door.device_number(device), door.sharing, door.peers)
        # The library copies the text.
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
        #: The token that `torch.cuda.graph(pool=...)` takes for this arena.
        self.pool: tuple[int, int] = door.new_pool()
        #: Its shapes are instantiated at the end of their capture, as torch's own graphs are; else at their first replay.
        self.instantiates = door.instantiate == "capture"
        #: The program made it.
        self._pool_is_named = False
        #: Torch was given it, and what stands for the captures for which it was that are there.
        self._pool_given = False
        self._pool_users: set[object] = set()
        #: Shapes that are not sealed: under capture, on several threads perhaps, or more pieces may come to them.
        self._open: list[Shape] = []
        #: Captures without a name that left something alive until the next one, and its bytes; the last of them.
        self._left = (0, 0)
        self._last: weakref.ref[Shape] | None = None
        self._lock = threading.RLock()
        door.register(self)

    @property
    def device(self) -> int:
        """The device's number."""
        return self._device.number

    def stats(self) -> dict[str, int]:
        """What the arena holds now, in bytes and counts (``vmmgraph_arena_stats_t``)."""
        stats = _c.ArenaStats()
        self._library.arena_stats(self.handle, byref(stats))
        return stats.as_dict()

    def executables(self) -> dict[str, int]:
        """The executables of the device's graphs (``vmmgraph_torch_executables_t``); empty up to torch 2.7."""
        stats = _c.Executables()
        if not self._library.with_torch or self._library.raw["torch_executable_stats"](self.handle, byref(stats)) != _c.OK:
            return {}
        return stats.as_dict()

    def spaces(self) -> list[dict[str, Any]]:
        """What each shape uses, as the library says it."""
        return json.loads(self._library.text("arena_stats_json", self.handle)).get("spaces", [])

    def set_budget(self, budget: int) -> None:
        """Limits the arena's bytes; 0: no limit. Takes nothing away."""
        self._library.arena_set_budget(self.handle, budget)

    def allocate_exclusive(self, size: int, granularity: int = 0) -> int:
        """A block of ``size`` bytes that no graph shares, zero at first, for what peers write without waiting for this device or what keeps its contents from
        replay to replay; its address, a multiple of ``granularity`` (0: of a small page)."""
        block = c_void_p()
        self._library.arena_allocate_exclusive(self.handle, size, granularity, byref(block))
        return block.value or 0

    def free_exclusive(self, address: int) -> None:
        """Frees an exclusive block. Its memory goes behind the arena's replays so far."""
        self._library.arena_free_exclusive(self.handle, address)

    def trim(self) -> int:
        """Waits for the arena's replays and gives what nobody uses back to the driver; bytes."""
        released = c_uint64()
        self._library.arena_trim(self.handle, byref(released))
        return released.value

    def mark(self) -> None:
        """Before the stream of the last replay is captured or destroyed by somebody else."""
        self._library.arena_mark(self.handle)

    def seal(self) -> None:
        """Ends what is open. A replay, eager work and the next capture in the arena do so by themselves."""
        self._settle(None)

    def _captured(self, shape: Shape) -> None:
        """A capture into the shape has ended. What is no piece is sealed while nobody has written to it, so that what the program does there from
        then on is its own; what goes before the first replay costs nothing all the same."""
        with self._lock:
            shape.capturing = False
            if shape.unnamed:
                self._look_at_last()
                self._end(shape, unwritten=True)
                self._last = weakref.ref(shape)

    def _ended(self, key: object) -> None:
        """No piece of that key will follow. Others may launch what they have seen, or write to it, and meet no seal then."""
        with self._lock:
            for opened in list(self._open):
                if opened.key is key and not opened.capturing:
                    if opened.by_hand:
                        self._seal(opened)
                    else:
                        self._end(opened)

    def _abandoned(self, shape: Shape, unwritten: bool) -> None:
        """None of its graphs will be replayed. Tensors of theirs may live on, and no graph may write to those."""
        with self._lock:
            if shape in self._open:
                self._end(shape, unwritten)
                self._close(shape)

    def _end(self, shape: Shape, unwritten: bool = False) -> None:
        # What fails is tried again before the next replay, which says so; of what is abandoned, the next replay overwrites it.
        with contextlib.suppress(_c.Error):
            self._seal(shape, unwritten)

    def _settle(self, shape: Shape | None) -> None:
        """Seals what is open, but for captures that other threads have under way, and `shape`, which is to be replayed."""
        with self._lock:
            for opened in list(self._open):
                if not opened.capturing:
                    self._seal(opened)
            if shape is not None and not shape.sealed:
                shape.seal()

    def _seal(self, shape: Shape, unwritten: bool = False) -> None:
        shape.seal(unwritten)
        self._close(shape)

    def _close(self, shape: Shape) -> None:
        # A collector may have done so meanwhile.
        if shape in self._open:
            self._open.remove(shape)

    def _look_at_last(self) -> None:
        """Says it once if many captures without a name leave much alive until the next one, as pieces of one shape do."""
        last = self._last() if self._last is not None else None
        left = last.retained() if last is not None else 0
        if left:
            self._left = (self._left[0] + 1, self._left[1] + left)
            if self._left[0] == MANY and self._left[1] >= MUCH:
                log.warning(
                    "vmmgraph: %d captures left %d MiB alive at their end, which nobody shares; if they are pieces of one shape, "
                    "capture them within vmmgraph.shape(label)",
                    self._left[0],
                    self._left[1] >> 20,
                )

    def map(self) -> dict[str, Any]:
        """Which shape shows which page (docs/python.md)."""
        return json.loads(self.map_json())

    def map_json(self) -> str:
        """The page map as the library writes it. Raises `Error` where it has none."""
        if not self._library.has("arena_map_json"):
            raise _c.Error(f"{self._library.path} has no page map", _c.WRONG_STATE)
        options = _c.MapOptions(executables_bytes=self.executables().get("bytes", 0), title=self.label.encode())
        return self._library.text("arena_map_json", self.handle, byref(options))

    def what_if_dropped(self, label: str) -> int:
        """Bytes that come back when the shape of that label goes (that which gives most, if several have it), from the page map."""
        found = [space["drop_gives_bytes"] for space in self.map()["spaces"] if space["label"] == label]
        if not found:
            raise KeyError(f"no shape {label!r} in the arena")
        return max(found)

    def __repr__(self) -> str:
        return f"<vmmgraph.Arena {self.label or hex(self.handle.value or 0)} on cuda:{self._device.number}>"

    def __del__(self) -> None:
        if self.handle:
            self.handle.end()
            # Pages belong to the device, and nobody may ask it again: what an engine measures must not be there.
            self._library.raw["device_trim"](self._device.handle, None)


class Shape:
    """The graphs of one shape: one space, until it is sealed open for more of them."""

    handle = _c.Handle()

    def __init__(self, arena: Arena, key: object, label: str) -> None:
        self.arena = arena
        self.library = arena._library
        self.handle = _c.Handle(self.library.raw["torch_shape_close"])
        #: What pieces of the same shape have in common; ``None``: there is one graph.
        self.key = key
        self.unnamed = key is None
        self.label = label
        #: What stands for its graphs that are alive, one under capture included.
        self.captures: set[object] = set()
        self.capturing = False
        self.sealed = False
        #: Somebody has seen its graphs and may launch them himself: no replay of ours would seal it.
        self.by_hand = False
        self._sealed_as: _c.SealReport | None = None
        self.library.torch_shape_open(arena.handle, byref(self.handle))
        self.space = c_void_p()
        self.library.torch_shape_space(self.handle, byref(self.space))
        #: Where in the program its first capture began.
        self.site = call_site()
        self._say("space_set_label", label)
        self._say("space_set_site", self.site)

    def _say(self, function: str, text: str) -> None:
        """Gives the library a text for people. One that is refused is no reason to capture nothing."""
        if text and self.library.has(function):
            short = text.encode(errors="replace")[:1000].decode(errors="ignore").replace("\0", " ")
            self.library.raw[function](self.space, short.encode())

    def seal(self, unwritten: bool = False) -> None:
        """``unwritten``: the program has not touched what lives in it since its capture."""
        report = _c.SealReport()
        if unwritten and self.library.has("torch_shape_seal_unwritten"):
            self.library.torch_shape_seal_unwritten(self.handle, byref(report))
        else:
            self.library.torch_shape_seal(self.handle, _c.RETAIN["default"], byref(report))
        self.sealed = True
        # An engine's context, which keeps a step's tensors.
        self.key = None
        self._sealed_as = report
        if self.arena.instantiates and not self.by_hand:
            # Out of memory now is no error: the first replay tries again, and evicts.
            self.library.raw["torch_shape_instantiate"](self.handle, None)

    @property
    def report(self) -> dict[str, int]:
        """What its seal said (``vmmgraph_seal_report_t``); empty before."""
        return self._sealed_as.as_dict() if self._sealed_as is not None else {}

    def instantiate(self) -> bool:
        """Instantiates its graphs ahead of their first replay. Returns whether they have executables: the limits may leave no room."""
        instantiated = c_int32()
        self.library.torch_shape_instantiate(self.handle, byref(instantiated))
        return bool(instantiated.value)

    def retained(self) -> int:
        """Bytes of pages that are its own."""
        stats = _c.SpaceStats()
        self.library.raw["space_stats"](self.space, byref(stats))
        return stats.retained_bytes

    def launched_by_hand(self) -> None:
        self.by_hand = True
        if self.library.has("torch_launched_by_hand"):
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
    """The address of the ``at::cuda::CUDAGraph`` in a Python object of torch's; 0 where the object is laid out in no known way.

    Torch binds it by pybind11, whose instances begin with a pointer to the C++ object, and flags behind two words for its owner and one
    for weak references. The library compares what is there with what torch says of the graph before it uses it.
    """
    head = id(graph) + object.__basicsize__
    word = ctypes.sizeof(c_void_p)
    if type(graph).__basicsize__ < object.__basicsize__ + 5 * word:
        return 0
    flags = ctypes.c_ubyte.from_address(head + 4 * word).value
    address = c_void_p.from_address(head).value or 0
    # owned, simple layout, holder made, registered
    return address if flags & 0b1111 == 0b1111 and address % 8 == 0 else 0
