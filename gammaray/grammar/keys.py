"""Keeps the keys of JSON objects apart while a completion is generated, which no context-free grammar can.

llguidance writes each property that a schema lists at most once. It does not compare keys that a schema
leaves open (`additionalProperties`, `patternProperties`) and does not decode escapes: `"a"` may come twice,
and so may `"a"` and `"\\u0061"`. A parser then keeps the last value, which may match another schema, and
counts fewer properties. The guard forbids the token that completes a repeated key, and escapes in keys unless
JSON requires them, as in `json.dumps(..., ensure_ascii=False)`. So equal keys have equal texts.

Like the state of a grammar, that of the guard is a function of the tokens of the completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

from gammaray.grammar.schemas import BOUNDED_KEYS, FREE_KEYS, KEYS_KEYWORD
from gammaray.grammar.texts import THOUGHT_RULE

_THINK, _END_THINK = b"<think>", b"</think>"
_SPECIAL = b"\xff"  # before the text of a special token, as llguidance decodes it

_KEY = re.compile(rb'(?:[^"\\]+|\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f])))*')
_PART_OF_ESCAPE = re.compile(rb"\\(?:u(?:0(?:0[01]?)?)?)?")
_TEXT = re.compile(rb'(?:[^"\\]+|\\.)*', re.DOTALL)
_STRUCTURE = re.compile(rb'["{}\[\],]')


class _Open(NamedTuple):
    """Objects and arrays that are open at a place, innermost first."""

    keys: frozenset[bytes] | None  # those of the object so far; None: an array
    outer: _Open | None


class _Place(NamedTuple):
    """Where a text is in JSON. What is between two JSON texts has no structure and no quotes."""

    open: _Open | None = None
    is_key_next: bool = False  # a string that begins now is a key
    string: bytes | None = None  # the key or string that is open; of a string that is no key, its end only
    is_thought: bool = False

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys of the object that is open here."""
        return frozenset() if self.open is None or self.open.keys is None else self.open.keys

    @property
    def taken(self) -> list[bytes]:
        """How keys of the object go on that begin as the next one does."""
        if not self.is_key_next:
            return []
        string = self.string or b""
        return [key[len(string) :] for key in self.keys if key.startswith(string)]


class KeyTokens:
    """What the tokens of one vocabulary, given by their bytes, do to keys."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self._closing: dict[bytes, list[int]] = {}  # tokens with one quote, by what is before it
        self._escapes = [token_id for token_id, piece in enumerate(pieces) if b"\\" in piece]
        several: list[int] = []  # tokens that may have a whole key in them
        for token_id, piece in enumerate(pieces):
            head, quote, tail = piece.partition(b'"')
            if quote and (b'"' in tail or b"\\" in tail):
                several.append(token_id)
            elif quote:
                self._closing.setdefault(head, []).append(token_id)
        self._several = several
        self._misspelt = cache(self._find_misspelt)

    def restrict(self, place: _Place, mask: bytes) -> bytes:
        """Return a mask, a bit per token id, without the tokens that would repeat or misspell a key."""
        if place.is_thought:
            return mask
        found = self._repeating(place) if place.is_key_next and place.string is not None else []
        for token_id in _chosen(self._several, mask):
            if _after(place, self.pieces[token_id]) is None:
                found.append(token_id)
        return without(mask, found) if found else mask

    def doubtful(self, place: _Place, mask: bytes) -> list[int]:
        """Return the tokens of a mask after which all keys that can follow may be taken.

        They begin the next key as a key of its object begins, or come before a next key.
        """
        if place.is_thought:
            return []
        if place.is_key_next and place.string is not None:
            starts = {rest[:end] for rest in place.taken for end in range(1, len(rest) + 1)}
            found = [token_id for start in starts for token_id in self._by_piece.get(start, ())]
            return _chosen(found, mask)
        candidates = _ids_of(mask) if place.is_key_next else _chosen(self._commas, mask)
        return [token_id for token_id in candidates if self._is_doubtful(place, token_id)]

    def _is_doubtful(self, place: _Place, token_id: int) -> bool:
        following = _after(place, self.pieces[token_id])
        return following is not None and bool(following.taken)

    def _repeating(self, place: _Place) -> list[int]:
        """Return the tokens that misspell the key that is open, or complete one that its object has."""
        found = list(self._misspelt(_escape_of(place.string or b"")))
        for rest in place.taken:
            found += self._closing.get(rest, ())
        return found

    @cached_property
    def _by_piece(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token_id, piece in enumerate(self.pieces):
            found.setdefault(piece, []).append(token_id)
        return found

    @cached_property
    def _commas(self) -> list[int]:
        return [token_id for token_id, piece in enumerate(self.pieces) if b"," in piece]

    def _find_misspelt(self, escape: bytes) -> list[int]:
        """Return the tokens that put an escape into a key, or end a begun one, that JSON does not require."""
        candidates = self._escapes
        if escape:
            # What else follows a begun escape is no JSON, or right.
            follow = b"/u" if escape == b"\\" else b"0123456789abcdefABCDEF"
            candidates = [token_id for token_id, piece in enumerate(self.pieces) if piece[:1] in follow]
        pieces = self.pieces
        return [token_id for token_id in candidates if _part_of_key(escape, pieces[token_id]) is None]


class KeyGuard:
    """Follows one completion. Not thread-safe.

    Args:
        is_bounded: Whether all keys that can follow may be taken.
        is_thought: Whether the completion begins in a thinking part.
    """

    def __init__(self, tokens: KeyTokens, *, is_bounded: bool = False, is_thought: bool = False) -> None:
        self._tokens, self._is_bounded = tokens, is_bounded
        self._place = _Place(is_thought=is_thought)

    @classmethod
    def of(cls, grammar: str, tokens: Callable[[], KeyTokens]) -> KeyGuard | None:
        """Return the guard that a grammar asks for, if any.

        Where a grammar starts with the rule `thought`, the completion begins in a thinking part, which ends
        with the token </think>.
        """
        is_bounded = _mark(BOUNDED_KEYS) in grammar
        if not is_bounded and _mark(FREE_KEYS) not in grammar:
            return None
        is_thought = grammar.startswith(f"start: {THOUGHT_RULE} ")
        return cls(tokens(), is_bounded=is_bounded, is_thought=is_thought)

    @property
    def key(self) -> bytes | None:
        return self._place.string if self._place.is_key_next else None

    def copy(self) -> KeyGuard:
        copy = KeyGuard(self._tokens, is_bounded=self._is_bounded)
        copy._place = self._place
        return copy

    def extend(self, token_ids: Sequence[int]) -> int:
        """Add tokens up to the first one that repeats or misspells a key; return how many."""
        for count, token_id in enumerate(token_ids):
            place = _after(self._place, self._tokens.pieces[token_id])
            if place is None:
                return count
            self._place = place
        return len(token_ids)

    def restrict(self, mask: bytes) -> bytes:
        return self._tokens.restrict(self._place, mask)

    def doubtful(self, mask: bytes) -> list[int]:
        """Return the tokens of a mask after which there may be no key that is not taken."""
        return self._tokens.doubtful(self._place, mask) if self._is_bounded else []


def without(mask: bytes, token_ids: Sequence[int]) -> bytes:
    bits = bytearray(mask)
    for token_id in token_ids:
        bits[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(bits)


def _chosen(token_ids: Sequence[int], mask: bytes) -> list[int]:
    return [token_id for token_id in token_ids if mask[token_id >> 3] >> (token_id & 7) & 1]


def _ids_of(mask: bytes) -> list[int]:
    """Return the tokens of a mask, which are few."""
    set_bytes = ((at, byte) for at, byte in enumerate(mask) if byte)
    return [at * 8 + bit for at, byte in set_bytes for bit in range(8) if byte >> bit & 1]


def _mark(value: str) -> str:
    return f'"{KEYS_KEYWORD}": "{value}"'


def _after(place: _Place, piece: bytes) -> _Place | None:
    """Return the place after the bytes of a token; None if they repeat or misspell a key."""
    if piece.endswith(b"think>"):
        marker = piece.removeprefix(_SPECIAL)
        if marker in (_THINK, _END_THINK) and place.string is None:
            return _Place(is_thought=marker == _THINK)
    if place.is_thought:
        return place
    opened, is_key_next, string = place.open, place.is_key_next, place.string
    rest = piece
    while rest:
        if string is None:
            found = _STRUCTURE.search(rest)
            if found is None:
                break
            rest = rest[found.end() :]
            match found.group():
                case b'"':
                    string = b""
                case b"{":
                    opened, is_key_next = _Open(frozenset(), opened), True
                case b"[":
                    opened, is_key_next = _Open(None, opened), False
                case b",":
                    is_key_next = opened is not None and opened.keys is not None
                case _:
                    opened, is_key_next = None if opened is None else opened.outer, False
        elif not is_key_next:
            end = _TEXT.match(string + rest).end()  # type: ignore[union-attr]
            rest = (string + rest)[end:]
            if rest in (b"", b"\\"):
                string, rest = rest, b""
            else:
                string, rest = None, rest[1:]
        else:
            read = _part_of_key(string, rest)
            if read is None:
                return None
            key, is_closed, rest = read
            if not is_closed:
                string = key
                break
            if opened is None or opened.keys is None or key in opened.keys:
                return None
            opened = _Open(opened.keys | {key}, opened.outer)
            string, is_key_next = None, False
    return _Place(opened, is_key_next, string)


def _part_of_key(start: bytes, more: bytes) -> tuple[bytes, bool, bytes] | None:
    """Read on in a key.

    Returns:
        The key so far, whether it is closed, and what comes after that; None if an escape is not needed.
    """
    text = start + more
    end = _KEY.match(text).end()  # type: ignore[union-attr]
    if text[end : end + 1] == b'"':
        return text[:end], True, text[end + 1 :]
    if end == len(text) or _PART_OF_ESCAPE.fullmatch(text, end):
        return text, False, b""
    return None


def _escape_of(key: bytes) -> bytes:
    """Return the escape that a key breaks off in, empty if it does not."""
    return key[_KEY.match(key).end() :]  # type: ignore[union-attr]
