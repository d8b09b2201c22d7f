"""Caches of sessions that have ended, kept for others that begin with the same tokens.

They take the room that nobody else needs; when a session needs it, the one that was of use longest ago goes.
Only who has the same salt may use one: how soon a first token comes would tell what others have asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.engine.core.session_cache import SessionCache, common_prefix

__all__ = ["MAX_RETAINED", "MIN_PREFIX", "PrefixCache"]

MIN_PREFIX = 16
"""Shared leading tokens, from which on a cache is copied rather than computed again."""

MAX_RETAINED = 256
"""Caches kept at most: each new session is compared with all of them."""


@dataclass(frozen=True)
class Retained:
    """One of them: the slots of `session_id`, which only sessions of `salt` may use."""

    session_id: str
    salt: str
    cache: SessionCache


class PrefixCache:
    """Numbered, least recently used first.

    Attributes:
        num_slots: Slots that they hold.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self._caches: OrderedDict[int, Retained] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._caches)

    def get(self, number: int) -> SessionCache | None:
        """Return one, None when it is gone."""
        retained = self._caches.get(number)
        return None if retained is None else retained.cache

    def add(self, session_id: str, salt: str, cache: SessionCache) -> None:
        """Keep a cache, unless one that is kept says it all; what it says all of goes."""
        cache.truncate(len(cache.tokens))
        for number, other in list(self._alike(salt, cache.tokens)):
            if _begins_with(other.cache.tokens, cache.tokens):
                self.touch(number)
                return
            if _begins_with(cache.tokens, other.cache.tokens):
                self.pop(number)
        if len(self) >= MAX_RETAINED:
            self.pop_oldest()
        self._next += 1
        self._caches[self._next] = Retained(session_id, salt, cache)
        self.num_slots += cache.capacity

    def touch(self, number: int) -> None:
        """It was of use."""
        self._caches.move_to_end(number)

    def pop(self, number: int) -> SessionCache:
        """Take one out."""
        cache = self._caches.pop(number).cache
        self.num_slots -= cache.capacity
        return cache

    def pop_oldest(self) -> None:
        """Drop the one that was of use longest ago."""
        self.pop(next(iter(self._caches)))

    def clear(self) -> None:
        """Drop all."""
        self._caches.clear()
        self.num_slots = 0

    def forget(self, session_id: str) -> None:
        """Drop what a session left."""
        for number, retained in list(self._caches.items()):
            if retained.session_id == session_id:
                self.pop(number)

    def longest_prefix(self, token_ids: Sequence[int], salt: str) -> tuple[int, int]:
        """Return the number of the cache that shares the longest prefix, and its length; (0, 0) for none."""
        wanted, best, best_length = list(token_ids), 0, 0
        for number, retained in self._alike(salt, wanted):
            length = common_prefix(retained.cache.tokens, wanted, best_length)
            if length > best_length:
                best, best_length = number, length
        return best, best_length

    def _alike(self, salt: str, token_ids: list[int]) -> Iterator[tuple[int, Retained]]:
        """Those that share at least `MIN_PREFIX` tokens; all others are told apart by these."""
        begin = token_ids[:MIN_PREFIX]
        for number, retained in self._caches.items():
            if retained.salt == salt and retained.cache.tokens[:MIN_PREFIX] == begin:
                yield number, retained


def _begins_with(tokens: list[int], prefix: list[int]) -> bool:
    last = len(prefix) - 1
    return len(tokens) > last and tokens[last] == prefix[last] and tokens[:last] == prefix[:last]
