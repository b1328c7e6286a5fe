"""Reads files written by other programs, and prints text from such files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

PICKLE = b"\x80"

#: Limit on numbers: no address, size or time is larger, and Python cannot convert every integer to
#: a float.
_LARGEST_NUMBER = 1 << 64


class Unfit(ValueError):
    """An invalid file; the message is one line."""


@contextlib.contextmanager
def reading(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except Unfit:
        raise
    except RecursionError:
        raise Unfit(f"{name} is no {what}: nested too deep") from None
    except UnicodeDecodeError as error:
        raise Unfit(f"{name} is no {what}: byte {error.start} is no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise Unfit(f"{name} is no {what}: line {error.lineno}, column {error.colno} is no JSON ({error.msg})") from None
    except KeyError as error:
        raise Unfit(f"{name} is no {what}: {error} is missing") from None
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise Unfit(f"{name} is no {what}: {type(error).__name__} {error}") from None


def is_pickle(data: bytes) -> bool:
    """Whether the file looks like a pickle, of any protocol. Protocols 0 and 1 have no first byte
    of
    their own, but no text that this package reads begins and ends so."""
    return data[:1] == PICKLE or (data[:1] in (b"(", b"]", b"}", b")") and data[-1:] == b".")


def read(path: str) -> bytes:
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def load(data: bytes | str, name: str, what: str) -> Any:
    """Returns the value in a pickle (bytes) or in JSON (text): lists, dicts, tuples, texts and
    numbers.

    Executes no code of a pickle. Raises `Unfit`.
    """
    with reading(name, what):
        value = json.loads(data) if isinstance(data, str) else _unpickle(data, name)
        _check(value, name)
        return value
    raise AssertionError


class _Plain(pickle.Unpickler):
    """Refuses references to classes or functions, which could execute code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Unfit(f"names {module}.{name}: only plain lists, dicts, texts and numbers are read, since a pickle can run code")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise Unfit("has persistent references: only plain lists, dicts, texts and numbers are read")


def _unpickle(data: bytes, name: str) -> Any:
    try:
        with _little_memory(_MOST_BYTES + _MOST_TIMES * len(data)):
            return _Plain(io.BytesIO(data)).load()
    except Unfit as error:
        raise Unfit(f"{name} is refused: it {error}") from None
    except MemoryError:
        raise Unfit(f"{name} is refused: it wants more memory than a snapshot of its size does") from None
    except _BROKEN as error:
        raise Unfit(f"{name} is no pickle: {type(error).__name__} {error}") from None


#: Errors of an unpickler for invalid bytes.
_BROKEN = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
#: Memory limit while reading a pickle: a constant, plus a multiple of the file's size.
_MOST_BYTES, _MOST_TIMES = 1 << 29, 128


@contextlib.contextmanager
def _little_memory(more: int) -> Iterator[None]:
    """Limits further memory of the process to ``more`` bytes: five bytes of a pickle can request 64
    GiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [now + more, *(each for each in before if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _check(value: Any, name: str) -> None:
    """Refuses numbers out of range. Not recursive: containers may nest deeply and contain
    themselves."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        kind = type(each)
        if kind is int:
            if not -_LARGEST_NUMBER <= each <= _LARGEST_NUMBER:
                raise Unfit(f"{name} is refused: it holds a number of {each.bit_length()} bits, and 64 is the most")
        elif kind is float:
            if not math.isfinite(each):
                raise Unfit(f"{name} is refused: it holds the number {each}")
        elif kind in (list, tuple, dict) and id(each) not in seen:
            seen.add(id(each))
            if kind is dict:
                todo.extend(each)
                todo.extend(each.values())
            else:
                todo.extend(each)


def printable(text: str) -> str:
    """Returns the text on one line, without control characters of a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def say(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines with text from files: each stays one line without terminal control characters.
    Missing characters of the encoding are escaped."""
    stream = sys.stdout if file is None else file
    encoding = stream.encoding or "utf-8"
    for line in lines:
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding), file=stream)
