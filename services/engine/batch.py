"""What one forward is made of: the sessions' shares of a packed row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.engine.session_cache import SessionCache

__all__ = ["Batch", "Feed", "Segment", "allowed_slots", "node_path"]


@dataclass(frozen=True)
class Feed:
    """One session's share of a step.

    Attributes:
        session_id: Name of the session.
        start: Absolute position of `token_ids[0]`; cached entries from `start` on are dropped first.
        token_ids: Committed tokens that are not cached yet, then the proposal's nodes. At least one.
        num_logits: Logits are wanted for the last `num_logits` tokens; 0 for pure prefill.
        parents: For a tree: the parent of each of the LAST len(parents) tokens, as an index into those
            last tokens, -1 for the token just before them, -2 for the one before that. None: a chain.
        num_kept: How many cached nodes of the session's tree stay; `token_ids` are nodes that join them.
            Then `start` is the chain's length, and indices in `parents` count the kept nodes first.
    """

    session_id: str
    start: int
    token_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None
    num_kept: int = 0


@dataclass(slots=True)
class Segment:
    """A feed as the forward sees it.

    Attributes:
        cache: The session's cache, with room for the new slots.
        row: First row in the pack.
        count: Number of rows.
        start: How many tokens of the chain stay.
        parents: Of the last nodes, as in Feed; None for a chain.
        positions: Absolute position of each row.
        num_kept: Nodes that stay in the slots behind the chain; the new slots follow them.
    """

    cache: SessionCache
    row: int
    count: int
    start: int
    parents: Sequence[int] | None
    positions: Sequence[int]
    num_kept: int = 0

    @property
    def slot(self) -> int:
        """First new slot."""
        return self.start + self.num_kept


@dataclass(slots=True)
class Batch:
    """One forward over all feeds of a step.

    Attributes:
        segments: In the order of the feeds.
        token_ids: All tokens, packed.
        positions: Their absolute positions.
        logit_rows: Rows whose logits are wanted; None for all of them.
        masks: Attention masks by (segment index, window), made on first use and shared by the layers.
    """

    segments: list[Segment]
    token_ids: list[int]
    positions: list[int]
    logit_rows: list[int] | None
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    def mask(self, index: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the segment's `allowed_slots`, None when every row sees every slot."""
        key = (index, window)
        if key not in self.masks:
            mask = allowed_slots(self.segments[index], window)
            self.masks[key] = None if mask is None else mask.to(device)
        return self.masks[key]


def allowed_slots(segment: Segment, window: int | None, num_slots: int | None = None) -> Tensor | None:
    """Which slots each row of a segment may see.

    A row sees the committed slots, its ancestors and itself, as far as they lie less than `window`
    positions back. A tree's siblings share positions, so the window counts positions and not slots.

    Args:
        segment: The rows.
        window: How many positions a row sees, itself included; None for all.
        num_slots: Columns of the result; None for the slots up to the segment's last.

    Returns:
        Boolean [count, num_slots], or None when all is allowed.
    """
    count, start = segment.count, segment.start
    used = segment.slot + count
    if segment.parents is None:
        if count == 1 and (window is None or start < window) and num_slots in (None, used):
            return None
        slots = torch.arange(num_slots or used)
        positions = torch.arange(start, used)[:, None]
        allowed = slots <= positions
        return allowed if window is None else allowed & (slots > positions - window)
    first = count - len(segment.parents)
    # Row by row in numpy, whose slices cost a tenth of torch's.
    seen = np.zeros((count, num_slots or used), dtype=bool)
    for row in range(first):
        seen[row, : start + row + 1] = True
    for row in range(first, count):
        num_chain, nodes = node_path(segment, segment.num_kept + row - first)
        seen[row, :num_chain] = True
        seen[row, nodes] = True
    allowed = torch.from_numpy(seen)
    if window is not None:
        positions = torch.tensor(segment.positions)
        allowed &= _slot_positions(segment, allowed.shape[1]) > (positions - window)[:, None]
    return allowed


def node_path(segment: Segment, node: int) -> tuple[int, list[int]]:
    """Return how many slots of the chain a tree's node sees, and those of its ancestors and itself."""
    assert segment.parents is not None
    num_kept, kept_parents = segment.num_kept, segment.cache.tree_parents
    chain_length = segment.start + segment.count - len(segment.parents)
    slots = []
    while node >= 0:
        slots.append(chain_length + node)
        node = segment.parents[node - num_kept] if node >= num_kept else kept_parents[node]
    return chain_length + 1 + node, slots[::-1]


def _slot_positions(segment: Segment, num_slots: int) -> Tensor:
    """Position of the token in each slot; in slots that are free, of a chain."""
    positions = torch.arange(num_slots)
    chain_length = segment.slot - segment.num_kept
    for node in range(segment.num_kept):
        num_chain, nodes = node_path(segment, node)
        positions[chain_length + node] = num_chain + len(nodes) - 1
    positions[segment.slot : segment.slot + segment.count] = torch.tensor(segment.positions)
    return positions
