"""Decoding of JSON bodies with bounded time and memory, and encoding of large responses in slices.

A decoder holds the GIL for the whole of a body: 8 MiB of `{},{},...` would take a tenth of a second and
200 MB. `decode` therefore counts the values of a large body first, slice by slice.

An encoder holds the GIL as well, even in a thread, so `encode` calls it on short lists only. A list that
grows with a response, such as its log-probabilities, is encoded as it grows (`EncodedList`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import InvalidArgumentError

MAX_VALUES = 3 * 2**16
"""Texts, lists and objects in one body, keys included: 16,384 messages of one text part have 163,840."""

MAX_ENTRIES = MAX_TOKEN_IDS + MAX_VALUES
"""Entries of all lists and objects of one body: as many as the longest prompt of token ids has, and more."""

MAX_DIGITS = 1024
"""Digits of a number: the time to convert them grows with their square."""

SMALL_BYTES = 2**16
"""Bodies up to this size hold too little to take long."""

SLICE_BYTES = 2**16
"""Bytes from which the pieces of a JSON text are sent, and by which the values of a body are counted."""

_SLICE_ITEMS = 64
"""Items of a long list per encoding call, which takes a few milliseconds with 20 alternatives each."""

INLINE_ENTRIES = 1024
"""Values up to this many tokens or items are encoded on the event loop, in some milliseconds."""

_MAX_SPLIT_ITEMS = 128
"""A list up to this length, such as the list of choices, is encoded item by item instead."""

_AFTER_ESCAPE = re.compile(rb"\\*.?", re.DOTALL)
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def decode(body: bytes) -> Any:
    """Return the value of a JSON document; InvalidArgumentError if it is wrong, too deep or too large."""
    is_small = len(body) <= SMALL_BYTES
    if not is_small:
        _check_values(body)
    try:
        return from_json(body, cache_strings=is_small)  # many different keys would evict each other
    except ValueError as error:
        raise InvalidArgumentError("body", f"malformed JSON ({error})", "a JSON object in UTF-8") from None


def _check_values(body: bytes) -> None:
    """Check the numbers of values and of digits, which bound the cost of decoding."""
    num_values, num_entries, start = 0.0, 0, 0
    in_text = False
    while start < len(body):
        found = _AFTER_ESCAPE.match(body, min(start + SLICE_BYTES, len(body)) - 1)
        end = len(body) if found is None else found.end()  # no slice ends within an escape
        texts = body[start:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(texts[in_text::2])
        in_text ^= len(texts) % 2 == 0
        num_values += (len(texts) - 1) / 2 + outside.count(b"[") + outside.count(b"{")
        num_entries += outside.count(b",")
        if num_values > MAX_VALUES:
            raise InvalidArgumentError("body", f"more than {MAX_VALUES} JSON values", f"at most {MAX_VALUES}")
        if num_entries > MAX_ENTRIES:
            raise InvalidArgumentError("body", f"more than {MAX_ENTRIES} entries", f"at most {MAX_ENTRIES}")
        if b"0" * MAX_DIGITS in outside.translate(_ZEROS):
            raise InvalidArgumentError("body", f"{MAX_DIGITS} digits in a number", "fewer digits")
        start = end


class EncodedList:
    """A list that is kept as JSON, of `num_bytes` without brackets; items are encoded once, when added."""

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
        yield b"["
        for index, part in enumerate(self._parts):
            if index:
                yield b","
            yield part
        yield b"]"


def encode(value: Any) -> bytes:
    """Return a value as JSON, the same bytes as starlette's `JSONResponse`, encoded in many short calls."""
    return b"".join(encode_pieces(value))


def encode_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces, see `encode`; lists in it may be `EncodedList`s."""
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
        yield from EncodedList(value).pieces()
    else:
        yield _encode(value).encode()


def sliced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in fewer pieces, each of some `SLICE_BYTES`."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
