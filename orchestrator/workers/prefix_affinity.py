"""Which worker has read which beginnings: a session goes where most of its prompt is cached, unless many do.

What is remembered are hashes of a text's first 32, 64, 96, ... tokens, each of which contains the one before.
They are this orchestrator's guess: a worker may have dropped a cache since, and has others from elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BLOCK", "MAX_KEYS", "PrefixIndex", "prefix_keys"]

BLOCK = 32
"""Tokens between two lengths that are remembered."""

MAX_KEYS = 1 << 16
"""Remembered per worker, the latest: those of two million tokens."""


def prefix_keys(token_ids: Sequence[int], salt: str) -> list[int]:
    """Return a key for each multiple of `BLOCK` tokens that `token_ids` begins with, the shortest first."""
    key, keys = hash(salt), []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        key = hash((key, *token_ids[end - BLOCK : end]))
        keys.append(key)
    return keys


class PrefixIndex:
    """The beginnings that one worker has read."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Sequence[int]) -> None:
        """It has read a text."""
        for key in reversed(keys):  # the shortest is the last to go: without it the others are of no use
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def count(self, keys: Sequence[int]) -> int:
        """Return how many of the keys of a text are known, from the first on; 0 when it is less than half."""
        known = 0
        for key in keys:
            if key not in self._keys:
                break
            known += 1
        return known if 2 * known >= len(keys) else 0

    def clear(self) -> None:
        """It is another process now."""
        self._keys.clear()
