"""Keys and values of many sessions, with rollback, forks, tree paths and eviction under a byte budget.

Each session owns one buffer [num_layers, rows, capacity, dim]: slot s holds what position s left behind in
every layer. What a row is, the runner decides: a key head with its value head, or either. Appending writes
into the buffer; rollback only lowers a length; nothing is ever concatenated. A tree's nodes wait in the
slots after the committed ones until `keep_path` compacts the path that stood.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.errors import CacheFullError, CacheGapError

__all__ = ["BLOCK", "CacheShape", "CacheStore", "SessionCache"]

# Buffers come in whole blocks of slots, zeros at first: attention may read to a block's end, behind a mask.
BLOCK = 64


@dataclass(frozen=True)
class CacheShape:
    """What one token leaves behind: `rows` vectors of `dim` numbers in each of `num_layers` layers."""

    num_layers: int
    rows: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_layers * self.rows * self.dim * self.dtype.itemsize


@dataclass
class SessionCache:
    """One session's slots.

    Attributes:
        data: [num_layers, rows, capacity, dim].
        tokens: The cached chain; token i is in slot i.
        tree_tokens: Nodes in the slots after the chain, waiting for `keep_path`.
        tree_parents: Index of each node's parent among the nodes; -k for the k-th last token of the chain.
        views: Views into `data` that a runner wants to keep; emptied when `data` is replaced.
    """

    data: Tensor
    tokens: list[int] = field(default_factory=list)
    tree_tokens: list[int] = field(default_factory=list)
    tree_parents: list[int] = field(default_factory=list)
    views: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """How many slots the buffer has."""
        return self.data.shape[2]

    @property
    def num_slots(self) -> int:
        """How many slots are in use, tree nodes included."""
        return len(self.tokens) + len(self.tree_tokens)

    def truncate(self, length: int, num_nodes: int = 0) -> None:
        """Keep the first `length` tokens of the chain and the first `num_nodes` nodes of the tree."""
        del self.tokens[length:]
        del self.tree_tokens[num_nodes:], self.tree_parents[num_nodes:]

    def keep_path(self, base: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Make the chain its first `base` tokens and the nodes `path`, root first; drop all other nodes.

        Args:
            base: Position of the path's first node.
            path: Indices of nodes, each the child of the one before.
            keep: Indices, ascending, of nodes that stay beside the new chain.

        Raises:
            ValueError: `base` is past the chain, `path` is no path from there, or the parent of a node in
                `keep` does not stay.
        """
        if not self.tree_tokens:
            self._keep_chain(base, path)
            return
        length, num_nodes = len(self.tokens), len(self.tree_tokens)
        if not 0 <= base <= length or (not path and base < length and not keep):
            raise ValueError(f"base: got {base}, the tree's nodes start at {length}")
        previous = base - 1 - length
        for node in path:
            if not 0 <= node < num_nodes or self.tree_parents[node] != previous:
                raise ValueError(f"path: got {list(path)}, not a path from position {base}")
            previous = node
        parents = self._parents_after(base, path, keep)
        staying = [*path, *keep]
        if base != length or staying != list(range(len(staying))):
            slots = torch.tensor(staying, device=self.data.device) + length
            self.data[:, :, base : base + len(staying)] = self.data.index_select(2, slots)
        del self.tokens[base:]
        self.tokens.extend(self.tree_tokens[node] for node in path)
        self.tree_tokens, self.tree_parents = [self.tree_tokens[node] for node in keep], parents

    def _parents_after(self, base: int, path: Sequence[int], keep: Sequence[int]) -> list[int]:
        """The parents of `keep`, counted as they will be."""
        length, new_length = len(self.tokens), base + len(path)
        places = {node: base + index - new_length for index, node in enumerate(path)}
        parents = []
        for index, node in enumerate(keep):
            parent = self.tree_parents[node]
            if parent in places:
                parents.append(places[parent])
            elif parent < 0 and length + parent < base:
                parents.append(length + parent - new_length)
            else:
                raise ValueError(f"keep: the parent of node {node} does not stay")
            places[node] = index
        return parents

    def _keep_chain(self, base: int, path: Sequence[int]) -> None:
        end = base + len(path)
        if list(path) != list(range(len(path))) or not 0 <= base <= end <= len(self.tokens):
            raise ValueError(
                f"path: got {list(path)} from base {base}, not a path of the {len(self.tokens)} cached tokens"
            )
        self.truncate(end)


class CacheStore:
    """All sessions' caches under one byte budget; the least recently used go first."""

    def __init__(self, shape: CacheShape, budget_bytes: int) -> None:
        self.shape = shape
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_evictions = 0
        self._sessions: OrderedDict[str, SessionCache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> SessionCache | None:
        """Return a session's cache, None when it is unknown or was evicted."""
        return self._sessions.get(session_id)

    def reserve(self, session_id: str, num_slots: int, keep: frozenset[str] | None = None) -> SessionCache:
        """Return the session's cache with room for `num_slots`; see `reserve_all`."""
        return self.reserve_all({session_id: num_slots}, keep)[0]

    def reserve_all(self, wanted: dict[str, int], keep: frozenset[str] | None = None) -> list[SessionCache]:
        """Make room for each session's slots, evicting sessions outside `wanted` and `keep` if need be.

        Args:
            wanted: Slots needed by session id.
            keep: More sessions that must stay.

        Raises:
            CacheFullError: They exceed the budget even alone; nothing was changed then.
        """
        growing = False
        for session_id, slots in wanted.items():
            session = self._sessions.get(session_id)
            if session is None or session.capacity < slots:
                growing = True
            else:
                self._sessions.move_to_end(session_id)
        if growing:
            self._make_room(wanted, keep or frozenset())
        return [self._sessions[session_id] for session_id in wanted]

    def has_room(self, session_id: str, num_slots: int) -> bool:
        """Whether the session can have that many slots and every other session stays."""
        session = self._sessions.get(session_id)
        held = 0 if session is None else session.capacity
        missing = max(0, _round_up(num_slots, BLOCK) - held)
        return self.used_bytes + missing * self.shape.slot_bytes <= self.budget_bytes

    def release(self, session_id: str) -> None:
        """Forget a session; unknown ones are ignored."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.used_bytes -= session.capacity * self.shape.slot_bytes

    def longest_prefix(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the session whose chain shares the longest prefix with `token_ids`, and its length.

        ("", 0) when none shares a token.
        """
        best, best_length = "", 0
        wanted = list(token_ids)
        for session_id, session in self._sessions.items():
            length = _common_prefix(session.tokens, wanted)
            if length > best_length:
                best, best_length = session_id, length
        return best, best_length

    def fork(self, source: str, copy: str, length: int) -> None:
        """Make `copy` hold the first `length` tokens of `source`'s chain.

        Raises:
            CacheGapError: `source` holds fewer.
            CacheFullError: The two do not fit the budget.
        """
        origin = self._sessions.get(source)
        held = len(origin.tokens) if origin is not None else 0
        if origin is None or length > held:
            raise CacheGapError(source, held)
        if copy == source:
            origin.truncate(length)
            return
        target = self.reserve(copy, length, frozenset({source}))
        target.truncate(0)
        target.data[:, :, :length] = origin.data[:, :, :length]
        target.tokens.extend(origin.tokens[:length])

    def _make_room(self, wanted: dict[str, int], keep: frozenset[str]) -> None:
        slot_bytes = self.shape.slot_bytes
        pinned = {name: s.capacity for name, s in self._sessions.items() if name in keep or name in wanted}
        tight, roomy = dict(pinned), dict(pinned)
        for session_id, slots in wanted.items():
            held = pinned.get(session_id, 0)
            if held < slots:
                tight[session_id] = _round_up(slots, BLOCK)
                roomy[session_id] = _round_up(max(slots, held * 3 // 2), BLOCK)
        if sum(tight.values()) * slot_bytes > self.budget_bytes:
            raise CacheFullError(sum(tight.values()) * slot_bytes, self.budget_bytes)
        chosen = roomy if sum(roomy.values()) * slot_bytes <= self.budget_bytes else tight
        self._evict(self.budget_bytes - sum(chosen.values()) * slot_bytes, set(chosen))
        for session_id in wanted:
            self._grow(session_id, chosen[session_id])

    def _evict(self, allowed_bytes: int, pinned: set[str]) -> None:
        """Drop the least recently used sessions until all that are not pinned fit `allowed_bytes`."""
        others = [name for name in self._sessions if name not in pinned]
        held = sum(self._sessions[name].capacity for name in others) * self.shape.slot_bytes
        for name in others:
            if held <= allowed_bytes:
                return
            held -= self._sessions[name].capacity * self.shape.slot_bytes
            self.release(name)
            self.num_evictions += 1

    def _grow(self, session_id: str, capacity: int) -> None:
        shape = self.shape
        session = self._sessions.get(session_id)
        if session is None or session.capacity < capacity:
            data = torch.zeros(
                shape.num_layers, shape.rows, capacity, shape.dim, dtype=shape.dtype, device=shape.device
            )
            self.used_bytes += capacity * shape.slot_bytes
            if session is None:
                session = self._sessions[session_id] = SessionCache(data)
            else:
                self.used_bytes -= session.capacity * shape.slot_bytes
                data[:, :, : session.num_slots] = session.data[:, :, : session.num_slots]
                session.data, session.views = data, {}
        self._sessions.move_to_end(session_id)


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the common prefix; slices compare at C speed, so a binary search beats a loop."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
