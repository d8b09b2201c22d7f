"""Decoding of JSON bodies with bounded time and memory, and encoding of large responses in slices.

`json.loads` creates an object for every value before anything is checked, in one call that holds the GIL:
8 MiB of `{},{},...` take a second and 500 MB. `decode` stops after `MAX_VALUES` values and returns what it
has read so far, which is enough to name the first wrong field. Integers in lists are cheap and not limited: a
prompt of token ids has hundreds of thousands.

`json.dumps` holds the GIL as well, even in a thread, so `encode` calls it on short lists only. A list that
grows with a response, such as its log-probabilities, is encoded as it grows (`EncodedList`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_VALUES = 2**17
"""Values in one body, not counting integers in lists: 16,384 messages of one text part have 98,304."""

_RUN_CHARS = 2**16
"""Characters per slice of a list of integers, which decodes in about a millisecond."""

_SLICE_ITEMS = 64
"""Items of a long list per encoding call, which takes a few milliseconds with 20 alternatives each."""

_SLICE_BYTES = 2**16
"""Bytes from which the pieces of a JSON text are sent, so that joining and sending take little time."""

_MAX_SPLIT_ITEMS = 128
"""A list up to this length, such as the list of choices, is encoded item by item instead."""

_RUN = re.compile(rf"[-0-9, \t\n\r]{{1,{_RUN_CHARS}}}")
_SPACE = re.compile(r"[ \t\n\r]*")
_scalar = json.JSONDecoder().raw_decode
_integers = json.JSONDecoder().decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Decoded:
    """A decoded body.

    Args:
        value: The value, of Python's types.
        open_path: None for a whole document. Else decoding stopped after `MAX_VALUES` values, and this is the
            path (keys and indices) of the innermost list or object that was not read to its end.
    """

    value: Any
    open_path: tuple[str | int, ...] | None = None


def decode(text: str) -> Decoded:
    """Return the value of a JSON document, or of its beginning if it has more than `MAX_VALUES` values.

    Raises:
        ValueError: The text read is not JSON; the same error that `json.loads` raises.
        RecursionError: The nesting is too deep.
    """
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    reader = _Reader(text)
    value, end = reader.value(_after_space(text, 0))
    if reader.has_stopped:
        return Decoded(value, tuple(reversed(reader.open_path)))
    end = _after_space(text, end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return Decoded(value)


class EncodedList:
    """A list that is kept as JSON; its items are encoded once, when they are added.

    Args:
        items: The first items.

    Attributes:
        num_bytes: Bytes of its JSON, without the brackets.
    """

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self._parts: list[bytes] = []
        self.num_bytes = 0
        self.extend(items)

    def extend(self, items: Sequence[Any] | EncodedList) -> None:
        """Add items; another list's are not encoded again."""
        if isinstance(items, EncodedList):
            parts: Iterable[bytes] = items._parts
        else:
            starts = range(0, len(items), _SLICE_ITEMS)
            parts = (_encode(items[start : start + _SLICE_ITEMS])[1:-1].encode() for start in starts)
        for part in parts:
            self.num_bytes += len(part) + (1 if self._parts else 0)
            self._parts.append(part)

    def pieces(self) -> Iterator[bytes]:
        """Yield its JSON in pieces."""
        yield b"["
        for index, part in enumerate(self._parts):
            if index:
                yield b","
            yield part
        yield b"]"

    def __bool__(self) -> bool:
        return bool(self._parts)


def encode(value: Any) -> bytes:
    """Return a value as JSON, the same bytes as starlette's `JSONResponse`, encoded in many short calls.

    Raises:
        ValueError: A number is not finite.
    """
    return b"".join(encode_pieces(value))


def encode_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces, see `encode`; lists in it may be `EncodedList`s.

    Raises:
        ValueError: A number is not finite.
    """
    nested = (dict, list, EncodedList)
    if isinstance(value, EncodedList):
        yield from value.pieces()
    elif isinstance(value, dict) and any(isinstance(entry, nested) for entry in value.values()):
        yield b"{"
        for index, (name, entry) in enumerate(value.items()):
            yield f"{',' if index else ''}{_encode(name)}:".encode()
            yield from encode_pieces(entry)
        yield b"}"
    elif isinstance(value, list) and len(value) <= _MAX_SPLIT_ITEMS:
        yield b"["
        for index, entry in enumerate(value):
            if index:
                yield b","
            yield from encode_pieces(entry)
        yield b"]"
    elif isinstance(value, list):
        for start in range(0, len(value), _SLICE_ITEMS):
            yield b"," if start else b"["
            yield _encode(value[start : start + _SLICE_ITEMS])[1:-1].encode()
        yield b"]"
    else:
        yield _encode(value).encode()


def sliced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in fewer pieces, each of some `_SLICE_BYTES`."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _SLICE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


class _Reader:
    """Reads one document. Errors are those of the `json` module, with its positions."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._num_values = self._slow_until = 0
        self.has_stopped = False
        self.open_path: list[str | int] = []  # innermost first

    def value(self, start: int) -> tuple[Any, int]:
        """Return the value that begins at `start`, and its end position."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            self.has_stopped = True
        head = self._text[start : start + 1]
        if head == "{":
            return self._object(start + 1)
        if head == "[":
            return self._array(start + 1)
        return _scalar(self._text, start)

    def _object(self, start: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        text = self._text
        at = _after_space(text, start)
        if text[at : at + 1] == "}":
            return found, at + 1
        while not self.has_stopped:
            if text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = _scalar(text, at)
            at = _after_space(text, at)
            if text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            found[key], at = self.value(_after_space(text, at + 1))
            if self.has_stopped:
                self.open_path.append(key)
                return found, at
            at = _after_space(text, at)
            delimiter = text[at : at + 1]
            if delimiter == "}":
                return found, at + 1
            if delimiter != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _after_space(text, at + 1)
        return found, at

    def _array(self, start: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        text = self._text
        at = _after_space(text, start)
        if text[at : at + 1] == "]":
            return found, at + 1
        while not self.has_stopped:
            integers, at = self._run_of_integers(at)
            found += integers
            value, at = self.value(at)
            found.append(value)
            if self.has_stopped:
                self.open_path.append(len(found) - 1)
                return found, at
            at = _after_space(text, at)
            delimiter = text[at : at + 1]
            if delimiter == "]":
                return found, at + 1
            if delimiter != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _after_space(text, at + 1)
        return found, at

    def _run_of_integers(self, start: int) -> tuple[list[int], int]:
        """Return the integers of a list from `start` on that are each followed by a comma, and the position
        of the value after the last of these commas."""
        found: list[int] = []
        text, at = self._text, start
        while at >= self._slow_until and (run := _RUN.match(text, at)) is not None:
            comma = text.rfind(",", at, run.end())
            if comma < 0 or not text[at:comma].strip():
                break
            try:
                found += _integers(f"[{text[at:comma]}]")
            except ValueError:
                self._slow_until = comma  # reading value by value finds the error's position
                break
            at = _after_space(text, comma + 1)
        return found, at


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None, "the pattern matches the empty text"
    return found.end()
