"""Prefix affinity: a session goes to the worker that caches most of its prompt, unless that one is crowded.

The index holds hashes of a text's first 32, 64, 96, ... tokens, each chained to the previous one. It is an
estimate: a worker may have evicted a cache since, and may have caches from other orchestrators.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 32
"""Tokens between two indexed prefix lengths."""

MAX_KEYS = 1 << 16
"""Most recent keys that are kept per worker: those of two million tokens."""


def prefix_keys(token_ids: Sequence[int], salt: str) -> list[int]:
    """Return a key for each prefix of `token_ids` whose length is a multiple of `BLOCK`, shortest first."""
    key, keys = hash(salt), []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        key = hash((key, *token_ids[end - BLOCK : end]))
        keys.append(key)
    return keys


class PrefixIndex:
    """The prefixes that one worker has processed."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the shortest is evicted last: the longer ones need it
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def count(self, keys: Sequence[int]) -> int:
        """Return how many leading keys of a text are known; 0 if less than half."""
        known = 0
        for key in keys:
            if key not in self._keys:
                break
            known += 1
        return known if 2 * known >= len(keys) else 0

    def clear(self) -> None:
        """Forget the prefixes of a worker that restarted."""
        self._keys.clear()
