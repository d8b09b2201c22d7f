"""Chooses which tokens of which blocks the next forward takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gammaray.errors import InvalidArgumentError
from services.engine.engine import SequenceInput
from services.scheduling.block_queue import TaskT, Work

__all__ = ["Limits", "Running", "plan"]


@dataclass(frozen=True)
class Limits:
    """Bounds of one forward.

    Args:
        max_batch_tokens: Of all sessions together.
        prefill_chunk: Committed tokens of one session.
        max_scored_rows: Committed tokens whose logits are returned, of all sessions together.
    """

    max_batch_tokens: int
    prefill_chunk: int
    max_scored_rows: int = 2**31

    def check_proposal(self, num_nodes: int) -> None:
        """Check that a proposal and the token before it fit into one forward.

        Raises:
            InvalidArgumentError: They do not.
        """
        if num_nodes >= self.max_batch_tokens:
            allowed = f"fewer than max_batch_tokens ({self.max_batch_tokens})"
            raise InvalidArgumentError("proposal", f"{num_nodes} nodes", allowed)


@dataclass(slots=True, eq=False)
class Running(Work[TaskT]):
    """A block being worked on.

    Args:
        tail: Tokens after the committed ones: the proposal's nodes, or the tokens drafted so far.
        num_logits: How many of the last tokens need logits, all in one forward.
        parents: Parents of the tail's nodes; None for a chain.
        is_scored: Whether every forward returns the logits of all tokens it is fed.
        fed_from: Position of the first token of its last feed.
    """

    tail: list[int]
    num_logits: int
    parents: Sequence[int] | None = None
    is_scored: bool = False
    fed_from: int = 0

    @property
    def num_tokens(self) -> int:
        """Length of the committed tokens and the tail."""
        return self.task.base_position + len(self.tail)

    def feed(self, start: int, size: int, *, is_last: bool) -> SequenceInput:
        """Return the feed of `size` tokens from position `start`; the last feed requests the logits."""
        base, self.fed_from = self.task.base_position, start
        if start >= base:
            token_ids = self.tail[start - base : start - base + size]
        else:
            token_ids = self.session.tokens[start : start + size]
            token_ids += self.tail[: size - len(token_ids)]
        num_logits = size if self.is_scored else self.num_logits if is_last else 0
        return SequenceInput(
            self.task.session_id, start, token_ids, num_logits, self.parents if is_last else None
        )


def plan(
    blocks: Iterable[Running[TaskT]], num_cached: Callable[[str], int], limits: Limits
) -> list[tuple[Running[TaskT], SequenceInput]]:
    """Choose the feeds of the next forward.

    The oldest block is always included, so that none starves; then the blocks that one forward completes, so
    that long prompts do not stall them; the rest of the budget goes to long prompts, one chunk each.

    Args:
        blocks: Oldest first.
        num_cached: Returns how many tokens of a session are cached.
        limits: Bounds of the forward.
    """
    first: list[tuple[Running[TaskT], int, int]] = []
    long: list[tuple[Running[TaskT], int, int]] = []
    for running in blocks:
        # Tokens whose logits are needed are fed again even if they are cached.
        start = min(num_cached(running.task.session_id), running.num_tokens - running.num_logits)
        todo = running.num_tokens - start
        is_short = todo <= max(_chunk(running, limits), running.num_logits)
        (first if is_short or not first else long).append((running, start, todo))
    budget, scored = limits.max_batch_tokens, limits.max_scored_rows
    batch = []
    for running, start, todo in first + long:
        chunk = _chunk(running, limits)
        if running.is_scored:
            chunk = min(chunk, scored)
        is_last = todo <= min(budget, max(chunk, running.num_logits))
        size = todo if is_last else min(chunk, budget, todo - running.num_logits)
        if size > 0:
            batch.append((running, running.feed(start, size, is_last=is_last)))
            budget -= size
            scored -= size if running.is_scored else 0
            scored = max(scored, 0)
    return batch


def _chunk(running: Running[TaskT], limits: Limits) -> int:
    """Return how many committed tokens of a block one forward may feed."""
    if running.is_scored:
        return min(limits.prefill_chunk, limits.max_scored_rows)
    return limits.prefill_chunk
