"""Keys and values of many sessions, with rollback, forks, tree paths and eviction under a byte budget.

Each session owns one buffer [num_layers, rows, capacity, dim]: slot s holds the keys and values of position s
in every layer. The runner defines a row: a key head with its value head, or either. Appending writes into the
buffer; rollback only lowers a length; nothing is ever concatenated. A tree's nodes stay in the slots after
the committed ones until `keep_path` compacts the accepted path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.core.errors import CacheFullError, CacheGapError
from services.engine.core.prefix_cache import MIN_PREFIX, PrefixCache
from services.engine.core.session_cache import SessionCache, common_prefix

Source = str | int
"""Source of a copy: a session's id, or the number of a retained cache."""

# Buffers have whole blocks of slots, initially zero: attention may read, masked, up to the end of a block.
BLOCK = 64


@dataclass(frozen=True)
class CacheShape:
    """The entry of one token: `rows` vectors of `dim` numbers in each of `num_layers` layers."""

    num_layers: int
    rows: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_layers * self.rows * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class CacheStats:
    num_sessions: int  # sessions with a cache
    cache_bytes: int  # bytes allocated for them
    cache_budget_bytes: int  # upper bound of these and `retained_bytes` together
    num_evictions: int  # sessions evicted since the start
    retained_bytes: int  # bytes retained of ended sessions, which are freed when sessions need them


class CacheStore:
    """All sessions' caches under one budget, of `budget_bytes`.

    Caches of ended sessions use the rest of the budget. When room is needed these are dropped first, and then
    the least recently used sessions are evicted.
    """

    def __init__(self, shape: CacheShape, budget_bytes: int) -> None:
        self.shape = shape
        self.budget_bytes = budget_bytes
        self._used_slots = 0
        self.num_evictions = 0
        self._sessions: OrderedDict[str, SessionCache] = OrderedDict()
        self._retained = PrefixCache()
        self._salts: dict[str, str] = {}

    def stats(self) -> CacheStats:
        used = self._used_slots * self.shape.slot_bytes
        retained = self._retained.num_slots * self.shape.slot_bytes
        return CacheStats(len(self._sessions), used, self.budget_bytes, self.num_evictions, retained)

    def get(self, session_id: str) -> SessionCache | None:
        """Return a session's cache, None when it is unknown or was evicted."""
        return self._sessions.get(session_id)

    def length(self, session_id: str) -> int:
        """Return how many tokens of the session's chain are cached; 0 when unknown or evicted."""
        return len(self.tokens(session_id))

    def tokens(self, session_id: str) -> Sequence[int]:
        """Return the session's cached tokens in chain order; a view that the next call may change."""
        cache = self.get(session_id)
        return () if cache is None else cache.tokens

    def num_nodes(self, session_id: str) -> int:
        """Return how many tree nodes are cached after the session's chain."""
        cache = self.get(session_id)
        return 0 if cache is None else len(cache.tree_tokens)

    def truncate(self, session_id: str, length: int, num_nodes: int = 0) -> None:
        """Keep the first `length` tokens of a session, and `num_nodes` tree nodes if that is the whole chain.

        The cost depends only on the tokens dropped. ValueError if `length` is negative.
        """
        if length < 0:
            raise ValueError(f"length: got {length}, allowed: at least 0")
        cache = self.get(session_id)
        if cache is not None:
            cache.truncate(length, num_nodes)

    def keep_path(self, session_id: str, base: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Make the nodes of `path`, after they were fed, positions base, base + 1, ... of the chain.

        `base` is the number of tokens before them, and each is the child of the one before. The nodes of
        `keep`, ascending, stay as a tree after the new chain; all others are dropped. CacheGapError if the
        session has no cache, ValueError if `base`, `path` or `keep` do not match the fed tokens.
        """
        cache = self.get(session_id)
        if cache is None:
            raise CacheGapError(session_id, 0)
        cache.keep_path(base, path, keep)

    def reserve_all(self, wanted: dict[str, int], keep: frozenset[str] = frozenset()) -> list[SessionCache]:
        """Make room for each session's slots, evicting sessions outside `wanted` and `keep` if necessary.

        `wanted` has slots by session id. CacheFullError if they alone exceed the budget; nothing was changed.
        """
        growing = False
        for session_id, slots in wanted.items():
            session = self._sessions.get(session_id)
            if session is None or session.capacity < slots:
                growing = True
            else:
                self._sessions.move_to_end(session_id)
        if growing:
            self._make_room(wanted, keep)
        return [self._sessions[session_id] for session_id in wanted]

    def has_room(self, session_id: str, num_slots: int, num_retained: int = 0) -> bool:
        """Whether a session can have the slots without evicting others or `num_retained` retained slots."""
        session = self._sessions.get(session_id)
        capacity = 0 if session is None else session.capacity
        missing = max(0, _round_up(num_slots, BLOCK) - capacity)
        return (self._used_slots + missing + num_retained) * self.shape.slot_bytes <= self.budget_bytes

    def share(self, session_id: str, salt: str | None) -> None:
        """Let only sessions with this salt copy this session's cache, now and later; None: no session."""
        if salt is None:
            self._salts.pop(session_id, None)
        else:
            self._salts[session_id] = salt

    def release(self, session_id: str) -> None:
        """Forget a session; unknown ones are ignored."""
        self._salts.pop(session_id, None)
        self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._used_slots -= session.capacity

    def retain(self, session_id: str, salt: str) -> None:
        """End a session and retain its chain for this salt and prefix; unknown sessions are ignored."""
        session = self._sessions.get(session_id)
        if session is not None and len(session.tokens) >= MIN_PREFIX:
            self._drop(session_id)
            self._retained.add(session_id, salt, session)
        self.release(session_id)

    def drop_retained(self) -> None:
        self._retained.clear()

    def forget(self, session_id: str) -> None:
        """Free a session's cache and all retained caches under its id."""
        self.release(session_id)
        self._retained.forget(session_id)

    def longest_prefix(self, token_ids: Sequence[int], salt: str) -> tuple[Source, int]:
        """Return the cache with this salt that shares the longest prefix with `token_ids`, and its length.

        Returns ("", 0) when none shares a token.
        """
        best: Source
        best, best_length = self._retained.longest_prefix(token_ids, salt)
        wanted = list(token_ids)
        for session_id, session in self._sessions.items():
            if self._salts.get(session_id) != salt:
                continue
            length = common_prefix(session.tokens, wanted, best_length)
            if length > best_length:
                best, best_length = session_id, length
        return (best, best_length) if best_length else ("", 0)

    def fork(self, source: Source, copy: str, length: int, keep: frozenset[str] = frozenset()) -> None:
        """Make `copy` hold the first `length` tokens of `source`'s chain; CacheGapError if it has fewer.

        If both do not fit, a retained source is dropped to make room, or becomes the copy if that needs most
        of it; CacheFullError if the two, and the sessions to `keep`, do not fit the budget.
        """
        origin = self._retained.get(source) if isinstance(source, int) else self._sessions.get(source)
        num_cached = len(origin.tokens) if origin is not None else 0
        if origin is None or length > num_cached:
            raise CacheGapError(str(source), num_cached)
        if copy == source:
            origin.truncate(length)
        else:
            self._copy(source, origin, copy, length, keep)

    def _copy(
        self, source: Source, origin: SessionCache, copy: str, length: int, keep: frozenset[str]
    ) -> None:
        if isinstance(source, int):
            self._retained.touch(source)
            if not self.has_room(copy, length, num_retained=origin.capacity):
                self._retained.pop(source)
                if origin.capacity <= 2 * _round_up(length, BLOCK):
                    self._drop(copy)
                    self._sessions[copy] = origin
                    self._used_slots += origin.capacity
                    origin.truncate(length)
                    return
        pinned = keep | {source} if isinstance(source, str) else keep
        (target,) = self.reserve_all({copy: length}, pinned)
        target.truncate(0)
        target.data[:, :, :length] = origin.data[:, :, :length]
        target.tokens.extend(origin.tokens[:length])
        target.first = min(origin.first, length)

    def _make_room(self, wanted: dict[str, int], keep: frozenset[str]) -> None:
        slot_bytes = self.shape.slot_bytes
        pinned = {name: s.capacity for name, s in self._sessions.items() if name in keep or name in wanted}
        tight, roomy = dict(pinned), dict(pinned)
        for session_id, slots in wanted.items():
            capacity = pinned.get(session_id, 0)
            if capacity < slots:
                tight[session_id] = _round_up(slots, BLOCK)
                roomy[session_id] = _round_up(max(slots, capacity * 3 // 2), BLOCK)
        if sum(tight.values()) * slot_bytes > self.budget_bytes:
            raise CacheFullError(sum(tight.values()) * slot_bytes, self.budget_bytes)
        chosen = roomy if sum(roomy.values()) * slot_bytes <= self.budget_bytes else tight
        self._evict(self.budget_bytes - sum(chosen.values()) * slot_bytes, set(chosen))
        for session_id in wanted:
            self._grow(session_id, chosen[session_id])

    def _evict(self, allowed_bytes: int, pinned: set[str]) -> None:
        """Drop retained caches, then unpinned sessions, until the rest of them fits `allowed_bytes`."""
        others = [name for name in self._sessions if name not in pinned]
        slot_bytes = self.shape.slot_bytes
        used = sum(self._sessions[name].capacity for name in others) * slot_bytes
        while self._retained and used + self._retained.num_slots * slot_bytes > allowed_bytes:
            self._retained.drop_oldest()
        for name in others:
            if used <= allowed_bytes:
                return
            used -= self._sessions[name].capacity * slot_bytes
            self._drop(name)
            self.num_evictions += 1

    def _new_slots(self, capacity: int) -> Tensor:
        shape = self.shape
        size = (shape.num_layers, shape.rows, capacity, shape.dim)
        try:
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)
        except RuntimeError:  # The budget exceeds the actual memory.
            if not self._retained:
                raise
            self.drop_retained()
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _grow(self, session_id: str, capacity: int) -> None:
        session = self._sessions.get(session_id)
        if session is None or session.capacity < capacity:
            data = self._new_slots(capacity)
            self._used_slots += capacity
            if session is None:
                session = self._sessions[session_id] = SessionCache(data)
            else:
                self._used_slots -= session.capacity
                data[:, :, : session.num_slots] = session.data[:, :, : session.num_slots]
                session.data = data
        self._sessions.move_to_end(session_id)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
