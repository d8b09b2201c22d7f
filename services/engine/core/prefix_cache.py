"""Caches of ended sessions, retained for others that begin with the same tokens.

They use memory that no session needs; when a session needs it, the least recently used cache is dropped. Only
sessions with the same salt may use one: otherwise the time to first token would reveal others' prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.engine.core.session_cache import SessionCache, common_prefix

MIN_PREFIX = 16
"""Least number of shared leading tokens for which a cache is copied rather than computed again."""

MAX_RETAINED = 256
"""Upper bound of retained caches: each new session is compared with all of them."""


@dataclass(frozen=True)
class Retained:
    """One retained cache: the slots of `session_id`, which only sessions with `salt` may use."""

    session_id: str
    salt: str
    cache: SessionCache


class PrefixCache:
    """Retained caches by number, least recently used first."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._caches: OrderedDict[int, Retained] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._caches)

    def get(self, number: int) -> SessionCache | None:
        """Return a cache, None when it was dropped."""
        retained = self._caches.get(number)
        return None if retained is None else retained.cache

    def add(self, session_id: str, salt: str, cache: SessionCache) -> None:
        """Retain a cache unless a retained one already covers it; drop retained caches that it covers."""
        cache.truncate(len(cache.tokens))
        for number, other in list(self._alike(salt, cache.tokens)):
            if _begins_with(other.cache.tokens, cache.tokens):
                self.touch(number)
                return
            if _begins_with(cache.tokens, other.cache.tokens):
                self.pop(number)
        if len(self) >= MAX_RETAINED:
            self.drop_oldest()
        self._next += 1
        self._caches[self._next] = Retained(session_id, salt, cache)
        self.num_slots += cache.capacity

    def touch(self, number: int) -> None:
        """Mark a cache as recently used."""
        self._caches.move_to_end(number)

    def pop(self, number: int) -> SessionCache:
        cache = self._caches.pop(number).cache
        self.num_slots -= cache.capacity
        return cache

    def drop_oldest(self) -> None:
        """Drop the least recently used cache."""
        self.pop(next(iter(self._caches)))

    def clear(self) -> None:
        while self._caches:
            self.drop_oldest()

    def forget(self, session_id: str) -> None:
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
        """Yield the caches with this salt that share the first `MIN_PREFIX` tokens."""
        begin = token_ids[:MIN_PREFIX]
        for number, retained in self._caches.items():
            if retained.salt == salt and retained.cache.tokens[:MIN_PREFIX] == begin:
                yield number, retained


def _begins_with(tokens: list[int], prefix: list[int]) -> bool:
    last = len(prefix) - 1
    return len(tokens) > last and tokens[last] == prefix[last] and tokens[:last] == prefix[:last]
