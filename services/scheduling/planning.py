"""Chooses which tokens of which blocks the next forward takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import SequenceInput
from services.scheduling.scheduler import TaskT, Work

MIN_STEP_TOKENS = 32
"""A step may always take as many tokens, so that its fixed costs (weights read, threads woken) are shared."""

_MAX_RATIO = 2.0
"""A step may always take as many times the duration of one of `MIN_STEP_TOKENS`: smaller steps of a slow
model, or on a busy machine, would cost much throughput and shorten the waits of others little."""

_RATE = 0.125
"""Weight of the last step in the mean duration of small steps."""

_NEAR = 0.75
"""Share of its budget from which on a short step shows that more tokens would fit."""

_MAX_CHANGE = 2.0
"""Factor by which one step may change the budget: single steps are late on a busy machine."""


@dataclass(frozen=True)
class Limits:
    max_batch_tokens: int  # of all sessions together
    prefill_chunk: int  # committed tokens of one session
    max_scored_rows: int = 2**31  # committed tokens whose logits are returned, of all sessions together
    max_step_s: float = math.inf  # seconds while several sessions are served; see `StepBudget`

    def check_proposal(self, num_nodes: int) -> None:
        """Check that a proposal and the token before it fit into one forward."""
        if num_nodes >= self.max_batch_tokens:
            allowed = f"fewer than max_batch_tokens ({self.max_batch_tokens})"
            raise InvalidArgumentError("proposal", f"{num_nodes} nodes", allowed)


@dataclass(slots=True, eq=False)
class Running(Work[TaskT]):
    tail: list[int]  # tokens after the committed ones: the proposal's nodes, or the tokens drafted so far
    num_logits: int  # how many of the last tokens need logits, all in one forward
    parents: Sequence[int] | None = None  # parents of the tail's nodes; None for a chain
    is_scored: bool = False  # whether every forward returns the logits of all tokens it is fed
    fed_from: int = 0  # position of the first token of its last feed

    @property
    def is_ready(self) -> bool:
        """Whether the next forward may include it."""
        return True

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
        parents = self.parents if is_last else None
        return SequenceInput(self.task.session_id, start, token_ids, num_logits, parents)


RunningT = TypeVar("RunningT", bound=Running[Any])


class StepBudget:
    """Learns how many tokens one step may take, so that no session waits long for the work of others.

    A step that takes longer than the limit lowers the budget in proportion; a short one that used most of the
    budget raises it. With a limit the first budget is `MIN_STEP_TOKENS`, as nothing is known of the model.

    Attributes:
        num_tokens: Tokens that the next step may take.
        token_s: Seconds per token of the last step of many tokens; 0 before the first one.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._least = limits, min(MIN_STEP_TOKENS, limits.max_batch_tokens)
        self.num_tokens = limits.max_batch_tokens if math.isinf(limits.max_step_s) else self._least
        self.token_s = self._small_s = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= self._least:
            last_s = self._small_s or seconds
            self._small_s = last_s + _RATE * (seconds - last_s)
        if num_tokens < self._least or seconds <= 0:
            return
        self.token_s = seconds / num_tokens
        fitting = num_tokens * max(self._limits.max_step_s, _MAX_RATIO * self._small_s) / seconds
        if fitting < num_tokens or num_tokens >= _NEAR * self.num_tokens:
            low, high = self.num_tokens / _MAX_CHANGE, self.num_tokens * _MAX_CHANGE
            fitting = max(min(max(fitting, low), high), self._least)
            self.num_tokens = round(min(fitting, self._limits.max_batch_tokens))


def plan(
    blocks: Iterable[RunningT],
    num_cached: Callable[[str], int],
    limits: Limits,
    budget: StepBudget | None = None,
) -> list[tuple[RunningT, SequenceInput]]:
    """Choose the feeds of the next forward.

    The oldest block is always included, so that none starves. Then come the blocks that one forward
    completes, so that long prompts do not stall them, in the order in which they would end if all requests
    progressed at the same rate, and the choices of one request one after another. So neither many large
    blocks nor many choices of one request stall a small one. The rest goes to long prompts, one chunk each.

    Args:
        blocks: Oldest first.
        num_cached: Returns how many tokens of a session are cached.
        budget: A further bound of its tokens; the tokens of the oldest block that need logits may exceed it.
    """
    wanted = []
    for running in blocks:
        # Tokens whose logits are needed are fed again even if they are cached.
        start = min(num_cached(running.task.session_id), running.num_tokens - running.num_logits)
        wanted.append((running, start, running.num_tokens - start))
    if not wanted:
        return []
    oldest, tokens, scored = wanted[0][0], limits.max_batch_tokens, limits.max_scored_rows
    token_s = 0.0
    if budget is not None:
        token_s, tokens = budget.token_s, min(tokens, max(budget.num_tokens, oldest.num_logits))
    short = [feed for feed in wanted[1:] if feed[2] <= max(_chunk(feed[0], limits), feed[0].num_logits)]
    long = [feed for feed in wanted[1:] if feed[2] > max(_chunk(feed[0], limits), feed[0].num_logits)]
    round_s = token_s * max(1, sum(_choice(running) == 0 for running, _, _ in wanted))
    short.sort(key=lambda feed: feed[0].task.arrived + feed[2] * round_s * (1 + _choice(feed[0])))
    share = max(tokens // 2, tokens - sum(todo for _, _, todo in short))
    batch = []
    for running, start, todo in [wanted[0], *short, *long]:
        chunk = _chunk(running, limits)
        if running is oldest:
            chunk = min(chunk, share)
        if running.is_scored:
            chunk = min(chunk, scored)
        is_last = todo <= min(tokens, max(chunk, running.num_logits))
        size = todo if is_last else min(chunk, tokens, todo - running.num_logits)
        if size > 0:
            batch.append((running, running.feed(start, size, is_last=is_last)))
            tokens -= size
            scored = max(0, scored - size) if running.is_scored else scored
    return batch


def _choice(running: Running[Any]) -> int:
    """Return which choice of its request the block's session is."""
    return running.session.spec.params.sample_index


def _chunk(running: Running[Any], limits: Limits) -> int:
    """Return how many committed tokens of a block one forward may feed."""
    if running.is_scored:
        return min(limits.prefill_chunk, limits.max_scored_rows)
    return limits.prefill_chunk
