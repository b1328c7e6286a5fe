"""Installs `enable`'s replacements in torch, and removes them."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
from collections.abc import Sequence

from . import _c, _session
from ._arena import bits, sharing_asked
from ._base import core_of
from ._graph import graph_class
from ._patch import Installed, put_in_place
from ._session import EXPECTED_BYTES, INSTANTIATE

log = logging.getLogger("vmmgraph")

_lock = threading.RLock()
_status: Status | None = None
_installed: Installed | None = None


class Status:
    """Result of :func:`enable`: ``route`` is ``"blocks"``, ``"mempool"`` or ``"none"``; ``why`` is
    an explanation for people."""

    def __init__(self, route: str, why: str, path: str | None = None) -> None:
        self.route = route
        self.why = why
        self.library = path

    def __bool__(self) -> bool:
        return self.route != "none"

    def __repr__(self) -> str:
        return f"<vmmgraph: {self.route} route, {self.why}>"


def _limit(name: str, given: int | None) -> int:
    return int(os.environ.get(name) or 0) if given is None else given


def enable(
    share: bool = False,
    strict: bool = False,
    *,
    instantiate: str | None = None,
    executables: int | None = None,
    executable_bytes: int | None = None,
    expected_bytes: int = EXPECTED_BYTES,
    budget: int = 0,
    retain: str = "default",
    memset_kernels: bool = True,
    sharing: str | None = None,
    peers: Sequence[int] = (),
) -> Status:
    """Makes graphs captured from now on use VmmGraph's memory: ``torch.cuda.CUDAGraph`` becomes a
    subclass that captures into arenas.

    Captures with the same ``pool=`` share an arena: the program thereby promises that they never
    overlap. A capture without a pool gets its own arena, or with ``share`` the device's. A graph is
    instantiated when its capture ends, as in torch, or at its first replay
    (``instantiate="replay"``).

    At most ``executables`` graph groups have executables at a time, of at most ``executable_bytes``
    bytes (0: no limit). Beyond a limit, the least recently replayed group's executables are
    destroyed until its next replay. Defaults: ``VMMGRAPH_INSTANTIATE``, ``VMMGRAPH_EXECUTABLES``
    and ``VMMGRAPH_EXECUTABLE_BYTES``, else ``"capture"``, 0 and 0.

    ``expected_bytes``, ``budget`` and ``retain`` apply to new arenas (:class:`Arena`).
    ``memset_kernels`` replaces memset nodes by fill kernels. ``sharing`` (``"fd"`` or ``"fabric"``,
    default ``VMMGRAPH_SHARING``) exports pages to other processes (:mod:`vmmgraph.sharing`).
    ``peers`` are devices of this process that may access all pages. Both apply to devices opened
    from now on.

    A missing library raises only if ``strict``; otherwise logs one line and falls back to torch's
    MemPools, or leaves torch unchanged. A second call does nothing. Returns the choice.
    """
    global _installed, _status
    if retain not in _c.RETAIN:
        raise ValueError(f"cannot use retain={retain!r}: the value is unknown; pass one of: {', '.join(_c.RETAIN)}")
    sharing = sharing_asked(sharing)
    instantiate = instantiate or os.environ.get("VMMGRAPH_INSTANTIATE") or INSTANTIATE[0]
    if instantiate not in INSTANTIATE:
        raise ValueError(f"cannot use instantiate={instantiate!r}: the value is unknown; pass one of: {', '.join(INSTANTIATE)}")
    with _lock:
        if _status is not None and _status:
            return _status
        try:
            session = _session.need()
            session.library.torch_install()
        except (_c.Error, OSError, ImportError, AttributeError) as error:
            if strict:
                raise
            _status = _fall_back(str(error))
            return _status
        session.share = share
        session.memset_kernels = memset_kernels
        session.instantiate = instantiate
        session.executables = _limit("VMMGRAPH_EXECUTABLES", executables)
        session.executable_bytes = _limit("VMMGRAPH_EXECUTABLE_BYTES", executable_bytes)
        session.expected_bytes, session.budget, session.retain = expected_bytes, budget, retain
        session.sharing, session.peers = sharing, bits(peers)
        import torch

        from . import _trees

        base = torch.cuda.CUDAGraph
        # Here, since a program may hide its objects from this list later (gc.freeze).
        core = core_of(base)
        session.torchs_graphs.update(one for one in gc.get_objects() if issubclass(type(one), core))
        _installed = put_in_place(graph_class(session, base), base)
        session.pools.install(_installed)
        _installed.undo.append(_trees.keep_out())
        _installed.undo.append(session.devices.clear)
        # Last, because a running capture makes this call fail.
        _installed.undo.insert(0, session.library.torch_uninstall)
        atexit.register(_at_exit)
        why = f"torch {torch.__version__}, {session.library.path}"
        _status = Status("blocks", why, str(session.library.path))
        log.info("vmmgraph %s: blocks route, %s", session.library.version(), why)
        return _status


def _fall_back(why: str) -> Status:
    from . import _mempool

    global _installed
    try:
        _installed = _mempool.install()
    except (_c.Error, OSError, AttributeError, ImportError) as error:
        why = "; ".join(dict.fromkeys((why, str(error))))
        log.warning("vmmgraph: cannot change torch's graphs: %s; run `vmmgraph doctor`", why)
        return Status("none", why)
    log.warning("vmmgraph: cannot use the blocks route: %s; captures use torch's MemPools; run `vmmgraph doctor`", why)
    return Status("mempool", why)


def status() -> Status | None:
    """Returns `enable`'s result; ``None`` before the first call."""
    return _status


def disable_all() -> None:
    """Undoes `enable`: later captures use torch's memory. Existing graphs are unchanged."""
    global _installed, _status
    with _lock:
        if _installed is not None:
            _installed.undo_all()
            _installed = None
        _status = None
        atexit.unregister(_at_exit)


def _at_exit() -> None:
    # A forked child must not drop the graphs inherited from its parent.
    session = _session.opened()
    if session is not None and session.process in (None, os.getpid()):
        _session.save_map_at_exit()
        session.close()
