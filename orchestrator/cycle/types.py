"""The values of a cycle: shape of a proposal, verdict, calls to workers, and the cycle's result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gammaray.errors import GammarayError
from gammaray.types import DrafterKind, FinishReason, Proposal, TokenOrigin

__all__ = [
    "Call",
    "Cycle",
    "Level",
    "Shape",
    "TokenLogprobs",
    "Verdict",
    "VerifyTiming",
    "walk",
]


class Call:
    """The blocks that one worker was sent in one cycle, and its answers.

    Args:
        parent: The `traceparent` that they carry; None when the session is not sampled, and no clock is read.

    Attributes:
        address: host:port of the worker that was asked last.
        error: Class of the last failure, or empty.
        began: `time.perf_counter()` of the first block.
        ended: The same of the end.
        is_notice: Whether the worker was only told that what it had sent ahead is taken.
    """

    __slots__ = ("_parent", "address", "began", "blocks", "ended", "error", "is_notice", "results")

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self.address = self.error = ""
        self.blocks: list[Any] = []
        self.results: list[Any] = []
        self.began = self.ended = 0.0
        self.is_notice = False

    @property
    def is_over(self) -> bool:
        """Whether the last block was answered or given up."""
        return self.is_notice or len(self.results) == len(self.blocks)

    def sent(self, block: Any) -> None:
        """Note a block and give it the trace context."""
        if self._parent is not None:
            block.trace.traceparent = self._parent
            self.began = self.began or time.perf_counter()
        self.blocks.append(block)

    def told(self, notice: Any) -> None:
        """Note a block that is not answered."""
        self.sent(notice)
        self.is_notice = True

    def answered(self, result: Any) -> None:
        """Note the answer to the last block."""
        self.results.append(result)
        if self._parent is not None:
            self.ended = time.perf_counter()

    def failed(self, error: GammarayError) -> None:
        """Note that the last block came to nothing, or its answer was a failure."""
        self.error = type(error).__name__
        if not self.is_over:
            self.answered(None)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position.

    Args:
        logprob: Of the emitted token.
        top: The most likely tokens and their log-probabilities, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class VerifyTiming:
    """What the target worker says of the step that served a block.

    Args:
        queue_s: Seconds between the block's arrival and the step.
        compute_s: Seconds of the step, which the sessions of the batch share.
        batch_size: Sessions in the batch.
        batch_tokens: Tokens fed, over the whole batch.
    """

    queue_s: float
    compute_s: float
    batch_size: int
    batch_tokens: int


@dataclass(frozen=True)
class Verdict:
    """Which proposed tokens stand, and what the target says next.

    Args:
        accepted_path: Indexes of the accepted nodes, from the root down; for a chain 0, 1, ... .
        next_token_id: The target's token after them: correction or bonus.
        next_origin: Which of the two.
        num_tested: Proposed tokens put to the test.
        logprobs: One per emitted token when asked for, else empty.
        timing: Where the worker's time went; None when it did not say.
    """

    accepted_path: tuple[int, ...]
    next_token_id: int
    next_origin: TokenOrigin
    num_tested: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    timing: VerifyTiming | None = None


Level = tuple[int, int]
"""Children that stood at one level of the walk, and which of them was accepted; -1 when none was."""


def walk(proposal: Proposal, accepted_path: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels that were walked, from the root down: all that the walk tells about acceptance.

    Args:
        proposal: A chain or a tree; children are ranked by their order in it.
        accepted_path: Indexes of the accepted nodes.
    """
    if proposal.parents is None:
        levels: list[Level] = [(1, 0)] * len(accepted_path)
        return tuple(levels) if len(levels) == len(proposal) else (*levels, (1, -1))
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(node)
    levels, parent = [], -1
    for node in accepted_path:
        siblings = children[parent]
        levels.append((len(siblings), siblings.index(node)))
        parent = node
    if parent in children:
        levels.append((len(children[parent]), -1))
    return tuple(levels)


@dataclass(frozen=True)
class Shape:
    """What a proposal may look like.

    Args:
        depth: Upper bound of the longest path, in tokens: gamma. 0 is plain decoding.
        max_nodes: Upper bound of nodes; up to `depth` it means a chain, above it a tree may come.
        reason: Why the controller chose it.
        is_fallback: Whether the drafter that the request allows cannot propose.
        stop_threshold: A chain ends before a token that the draft believes is less likely accepted; 0: never.
    """

    depth: int
    max_nodes: int = 0
    reason: str = field(default="", compare=False)
    is_fallback: bool = field(default=False, compare=False)
    stop_threshold: float = field(default=0.0, compare=False)

    def clipped(self, depth: int) -> Shape:
        """Return the shape with at most `depth` levels."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True)
class Cycle:
    """What one cycle did.

    Args:
        gamma: Depth of the proposal that was asked for.
        num_drafted: Nodes of the proposal that was verified; 0 after a failed propose.
        num_tested: Proposed tokens put to the test.
        num_accepted: Proposed tokens that the target agreed with, those behind the cut included.
        token_ids: The emitted tokens, at least one.
        origins: Where each came from.
        logprobs: One per emitted token when asked for, else empty.
        text: Text that became complete.
        finish_reason: Set when this cycle ended the completion.
        draft_s: Seconds waited for the proposal.
        verify_s: Seconds waited for the verdict.
        total_s: Seconds of the whole cycle.
        is_first: Whether it was the session's first cycle, whose waits contain the prefill.
        draft_failed: Whether the drafter failed or was late.
        shape: What was asked for, with the controller's reason; its depth is `gamma`.
        levels: What verification met on its way down the proposal.
        timing: Where the target worker's time went; None when it did not say.
        drafter: Who proposed; NONE when nothing was proposed.
        draft_worker: Address of the draft worker that proposed, "" for none.
        is_fallback: Whether the drafter that the request allows could not propose.
        is_prepared: Whether the proposal was there before it was asked for.
        started: `time.perf_counter()` at its beginning.
    """

    gamma: int
    num_drafted: int
    num_tested: int
    num_accepted: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...]
    text: str
    finish_reason: FinishReason | None
    draft_s: float
    verify_s: float
    total_s: float
    is_first: bool
    draft_failed: bool
    shape: Shape = Shape(0)
    levels: tuple[Level, ...] = ()
    timing: VerifyTiming | None = None
    drafter: DrafterKind = DrafterKind.NONE
    draft_worker: str = ""
    is_fallback: bool = False
    is_prepared: bool = False
    started: float = 0.0
