"""One packed forward: the feeds of sessions, their validation, and the segments of the packed row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from services.engine.core.errors import CacheGapError
from services.engine.core.kv_cache import CacheStore
from services.engine.core.session_cache import SessionCache


@dataclass(frozen=True)
class SequenceInput:
    """One session's share of a step."""

    session_id: str
    start: int  # absolute position of `token_ids[0]`; cached entries from `start` on are dropped first
    # Committed tokens that are not cached yet, then the proposal's nodes. At least one.
    token_ids: Sequence[int]
    num_logits: int  # logits are returned for the last `num_logits` tokens; 0 for pure prefill
    # For a tree: the parent of each of the LAST len(parents) tokens, as an index into those last tokens, -1
    # for the token just before them, -2 for the one before that. None: a chain.
    parents: Sequence[int] | None = None
    # How many cached nodes of the session's tree are kept; `token_ids` are nodes added to them. Then `start`
    # is the chain's length, and indices in `parents` count the kept nodes first.
    num_kept: int = 0
    # Of a head: features of the position before each of the first tokens, [tokens, width]; the states that it
    # computed itself stand in for the others.
    features: Tensor | None = field(default=None, compare=False)


@dataclass(slots=True)
class Segment:
    """A feed, laid out for the forward."""

    cache: SessionCache  # the session's cache, with room for the new slots
    row: int  # first row in the pack
    count: int  # how many rows there are
    start: int  # how many tokens of the chain are kept
    parents: Sequence[int] | None  # parents of the last nodes, as in SequenceInput; None for a chain
    positions: Sequence[int]  # absolute position of each row
    num_kept: int = 0  # nodes kept in the slots after the chain; the new slots follow them
    features: Tensor | None = None  # as in SequenceInput

    @property
    def slot(self) -> int:
        return self.start + self.num_kept


@dataclass(frozen=True, slots=True)
class Taps:
    """Hidden states that a forward records, see `Engine.tap`."""

    layers: tuple[int, ...]  # ids of the layers; the model's depth for what enters its final norm
    states: Tensor  # [rows, len(layers), hidden_size], where the runner writes them


@dataclass(slots=True)
class Batch:
    """One forward over all feeds of a step.

    With `idle_until` the compiled kernel runs at idle CPU priority until another thread sets that to a
    nonzero value, and then restores its priority. With `until` it ends early then. Other runners ignore both.
    """

    segments: list[Segment]  # in the order of the feeds
    token_ids: list[int]  # all tokens, packed
    positions: list[int]  # their absolute positions
    logit_rows: list[int] | None  # rows whose logits are returned; None for all of them
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)  # see `mask`
    taps: Taps | None = None  # the hidden states to record; None for none
    idle_until: c_int32 | None = None
    until: c_int32 | None = None

    @property
    def num_first(self) -> int:
        """Of a single chain: how many tokens there are up to the first one with logits."""
        num_logits = len(self.token_ids) if self.logit_rows is None else len(self.logit_rows)
        return len(self.token_ids) - num_logits + 1

    def mask(self, index: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the segment's `allowed_slots`, which layers share; None when every row sees every slot."""
        key = (index, window)
        if key not in self.masks:
            mask = allowed_slots(self.segments[index], window)
            self.masks[key] = None if mask is None else mask.to(device)
        return self.masks[key]


class Runner(ABC):
    """Computes packed forwards. Only `forward` must be defined; the defaults say what a runner cannot do.

    Attributes:
        has_kernel: Whether the compiled CPU kernel computes the forwards, which also has `chain`.
        target_taps: Of a head: the hidden states of its target that it reads, by the ids of `Engine.tap`.
    """

    has_kernel: ClassVar[bool] = False
    target_taps: Sequence[int] = ()

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state; only where there is no `tap_obstacle`."""
        raise NotImplementedError

    def tap_obstacle(self) -> str:
        """Return why hidden states cannot be recorded; empty if `forward` fills the taps of its batches."""
        return f"{type(self).__name__} records no hidden states"

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Return the requested rows' logits [rows, vocab_size] in float32 and fill the new slots."""

    def chain(
        self, batch: Batch, noise: Tensor | None, scale: float, stop: c_int32, target_ids: Tensor | None
    ) -> tuple[list[int], Tensor]:
        """Feed a chain, see `Engine.chain`; `target_ids`: int32 tokens of a row's logits, None: in order."""
        raise NotImplementedError

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features of the target's states, see `Engine.fuse`."""
        raise NotImplementedError


def allowed_slots(segment: Segment, window: int | None) -> Tensor | None:
    """Return which slots each row of a segment may attend to: boolean [count, slots to its last]; None: all.

    A row sees the committed slots, its ancestors and itself, if they are less than `window` positions back
    and not before the cache's first slot. A tree's siblings share positions, so the window, None for all,
    counts positions, not slots.
    """
    count, start, first = segment.count, segment.start, segment.cache.first
    if segment.parents is None and count == 1 and first == 0 and (window is None or start < window):
        return None
    num_nodes = len(segment.parents or ())
    # In numpy, whose slices cost a tenth of torch's.
    seen = np.tri(count, segment.slot + count, start, dtype=bool)
    for row in range(count - num_nodes, count):
        num_chain, nodes = node_path(segment, segment.num_kept + row - (count - num_nodes))
        seen[row, num_chain:] = False
        seen[row, nodes] = True
    seen[:, :first] = False
    allowed = torch.from_numpy(seen)
    if window is not None:
        positions = torch.tensor(segment.positions)
        allowed &= _slot_positions(segment) > (positions - window)[:, None]
    return allowed


def node_path(segment: Segment, node: int) -> tuple[int, list[int]]:
    """Return how many slots of the chain a tree node sees, and the slots of its ancestors and itself."""
    assert segment.parents is not None
    num_kept, kept_parents = segment.num_kept, segment.cache.tree_parents
    chain_length = segment.start + segment.count - len(segment.parents)
    slots = []
    while node >= 0:
        slots.append(chain_length + node)
        node = segment.parents[node - num_kept] if node >= num_kept else kept_parents[node]
    return chain_length + 1 + node, slots[::-1]


def _slot_positions(segment: Segment) -> Tensor:
    positions = torch.arange(segment.slot + segment.count)
    chain_length = segment.slot - segment.num_kept
    for node in range(segment.num_kept):
        num_chain, nodes = node_path(segment, node)
        positions[chain_length + node] = num_chain + len(nodes) - 1
    positions[segment.slot : segment.slot + segment.count] = torch.tensor(segment.positions)
    return positions


def plan_batch(feeds: Sequence[SequenceInput], store: CacheStore, vocab_size: int, max_context: int) -> Batch:
    """Validate all feeds, reserve slots, drop replaced entries and lay the feeds out as one packed row.

    Raises:
        ValueError: A feed is malformed, or a session is fed twice; nothing was changed.
        CacheGapError: A feed starts past its session's cache; nothing was changed.
        CacheFullError: The feeds do not fit the cache budget; nothing was changed.
    """
    wanted: dict[str, int] = {}
    for feed in feeds:
        if feed.session_id in wanted:
            raise ValueError(f"feeds: session {feed.session_id!r} is fed twice in one step")
        check_feed(feed, store.get(feed.session_id), vocab_size, max_context)
        wanted[feed.session_id] = feed.start + feed.num_kept + len(feed.token_ids)
    caches = store.reserve_all(wanted)
    segments: list[Segment] = []
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for feed, cache in zip(feeds, caches, strict=True):
        cache.truncate(feed.start, feed.num_kept)
        count, row = len(feed.token_ids), len(token_ids)
        where = feed_positions(feed, cache.tree_parents)
        parents = None if feed.num_kept == 0 and is_chain(feed.parents) else feed.parents
        segments.append(Segment(cache, row, count, feed.start, parents, where, feed.num_kept, feed.features))
        token_ids.extend(feed.token_ids)
        positions.extend(where)
        logit_rows.extend(range(row + count - feed.num_logits, row + count))
    everything = len(logit_rows) == len(token_ids)
    return Batch(segments, token_ids, positions, None if everything else logit_rows)


def check_feed(feed: SequenceInput, cache: SessionCache | None, vocab_size: int, max_context: int) -> None:
    """Raise ValueError for a malformed feed, CacheGapError for one that starts past the session's cache."""
    count = len(feed.token_ids)
    if count == 0:
        raise ValueError(f"token_ids: session {feed.session_id!r} feeds no token, allowed: at least one")
    if min(feed.token_ids) < 0 or max(feed.token_ids) >= vocab_size:
        wrong = next(t for t in feed.token_ids if not 0 <= t < vocab_size)
        raise ValueError(f"token_ids: got {wrong}, allowed: [0, {vocab_size})")
    if not 0 <= feed.num_logits <= count:
        raise ValueError(f"num_logits: got {feed.num_logits}, allowed: [0, {count}]")
    if feed.start < 0:
        raise ValueError(f"start: got {feed.start}, allowed: at least 0")
    last = feed.start + count - 1
    if feed.parents is not None or feed.num_kept:
        _check_tree(feed, cache)
        last = max(feed_positions(feed, cache.tree_parents if cache is not None else ()))
    if last >= max_context:
        raise ValueError(f"token_ids: reach position {last}, allowed: [0, {max_context})")
    num_cached = 0 if cache is None else len(cache.tokens)
    if feed.start > num_cached:
        raise CacheGapError(feed.session_id, num_cached)


def _check_tree(feed: SequenceInput, cache: SessionCache | None) -> None:
    count, parents, num_kept = len(feed.token_ids), feed.parents or (), feed.num_kept
    if len(parents) > count:
        raise ValueError(f"parents: got {len(parents)} nodes, but only {count} tokens are fed")
    num_nodes = 0 if cache is None else len(cache.tree_tokens)
    if not 0 <= num_kept <= num_nodes:
        raise ValueError(f"num_kept: got {num_kept}, allowed: [0, {num_nodes}]")
    if num_kept and cache is not None and (len(parents) < count or feed.start != len(cache.tokens)):
        raise ValueError("num_kept: only nodes may be fed to a tree, after the whole chain")
    first = -(feed.start + count - len(parents))
    for node, parent in enumerate(parents):
        if not first <= parent < num_kept + node:
            raise ValueError(f"parents[{node}]: got {parent}, allowed: [{first}, {num_kept + node})")


def feed_positions(feed: SequenceInput, kept_parents: Sequence[int]) -> Sequence[int]:
    """Return the absolute position of each token of a feed; for tree nodes it follows from their depth."""
    count = len(feed.token_ids)
    if feed.parents is None:
        return range(feed.start, feed.start + count)
    base = feed.start + count - len(feed.parents)
    nodes: list[int] = []
    for parent in (*kept_parents[: feed.num_kept], *feed.parents):
        nodes.append(base + parent + 1 if parent < 0 else nodes[parent] + 1)
    return [*range(feed.start, base), *nodes[feed.num_kept :]]


def is_chain(parents: Sequence[int] | None) -> bool:
    """Return whether each node is the child of the one before it."""
    return parents is None or all(parent == node - 1 for node, parent in enumerate(parents))
