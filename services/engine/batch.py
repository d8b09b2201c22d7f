"""What one forward is made of: the sessions' shares of a packed row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.kv_cache import SessionCache

__all__ = ["Batch", "Feed", "Segment", "allowed_slots"]


@dataclass(frozen=True)
class Feed:
    """One session's share of a step.

    Attributes:
        session_id: Name of the session.
        start: Absolute position of `token_ids[0]`; cached entries from `start` on are dropped first.
        token_ids: Committed tokens that are not cached yet, then the proposal's nodes. At least one.
        num_logits: Logits are wanted for the last `num_logits` tokens; 0 for pure prefill.
        parents: For a tree: the parent of each of the LAST len(parents) tokens, as an index into those
            last tokens, -1 for the token just before them. None: a chain.
    """

    session_id: str
    start: int
    token_ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None


@dataclass(slots=True)
class Segment:
    """A feed as the forward sees it.

    Attributes:
        cache: The session's cache, with room for the new slots.
        row: First row in the pack.
        count: Number of rows.
        start: First new slot; equals the position of the first token.
        parents: Of the last nodes, as in Feed; None for a chain.
        positions: Absolute position of each row.
    """

    cache: SessionCache
    row: int
    count: int
    start: int
    parents: Sequence[int] | None
    positions: Sequence[int]


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


def allowed_slots(segment: Segment, window: int | None) -> Tensor | None:
    """Which slots each row of a segment may see.

    A row sees the committed slots, its ancestors and itself, as far as they lie less than `window`
    positions back. A tree's siblings share positions, so the window counts positions and not slots.

    Returns:
        Boolean [count, start + count], or None when all is allowed.
    """
    end = segment.start + segment.count
    if segment.count == 1 and (window is None or segment.start < window):
        return None
    slots = torch.arange(end)
    if segment.parents is None:
        positions = slots[segment.start :]
        allowed = slots <= positions[:, None]
        if window is not None:
            allowed &= slots > (positions - window)[:, None]
        return allowed
    positions = torch.tensor(segment.positions)
    allowed = torch.zeros(segment.count, end, dtype=torch.bool)
    allowed[:, : segment.start] = True
    allowed[:, segment.start :] = _ancestors(segment.count, segment.parents)
    if window is not None:
        slot_positions = torch.cat((slots[: segment.start], positions))
        allowed &= slot_positions > (positions - window)[:, None]
    return allowed


def _ancestors(count: int, parents: Sequence[int]) -> Tensor:
    """Boolean [count, count]: row i descends from column j, or is it."""
    seen = torch.zeros(count, count, dtype=torch.bool)
    first = count - len(parents)
    for row in range(count):
        node = row - first
        parent = row - 1 if node < 0 else first + parents[node] if parents[node] >= 0 else first - 1
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row] = True
    return seen
