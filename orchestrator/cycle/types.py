"""Value types of a cycle: calls to workers, the levels that were tested, and the cycle's result."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.blocks import Shape, TokenLogprobs, VerifyTiming
from gammaray.errors import GammarayError
from gammaray.types import DrafterKind, FinishReason, Proposal, TokenOrigin

PLAIN = Shape(0)
EMPTY = Proposal()

Level = tuple[int, int]
"""Number of children at one tested level, and the index of the accepted one; -1 if none was."""


@dataclass(frozen=True, slots=True)
class DraftHere:
    """Asks the target worker to draft with its head, within `shape`, and to verify that in the same call."""

    shape: Shape


Draft = Proposal | DraftHere
"""What a verifier is given: tokens to verify, or the order to draft them itself."""


class Call:
    """The blocks sent to one worker in one cycle, and its answers.

    Args:
        parent: The `traceparent` of the blocks; None if the session is not sampled: no clock is read then.

    Attributes:
        address: host:port of the worker that was called last.
        error: Class name of the last failure, or empty.
        began: `time.perf_counter()` when the first block was sent.
        ended: `time.perf_counter()` when the last answer came.
        is_notice: Whether the block only notifies the worker that its lookahead proposal was used.
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
        """Whether the last block was answered or abandoned."""
        return self.is_notice or len(self.results) == len(self.blocks)

    def sent(self, block: Any) -> None:
        """Record a sent block and set its trace context."""
        if self._parent is not None:
            block.trace.traceparent = self._parent
            self.began = self.began or time.perf_counter()
        self.blocks.append(block)

    def notified(self, notice: Any) -> None:
        """Record a block that gets no answer."""
        self.sent(notice)
        self.is_notice = True

    def answered(self, result: Any) -> None:
        self.results.append(result)
        if self._parent is not None:
            self.ended = time.perf_counter()

    def failed(self, error: GammarayError) -> None:
        """Record that the last block failed or was answered with an error."""
        self.error = type(error).__name__
        if not self.is_over:
            self.answered(None)


def levels_of(proposal: Proposal, accepted_path: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels that verification visited, from the root down: its evidence about acceptance.

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
class Match:
    """A chain of tokens that a look-up found.

    Args:
        kind: Kind of the drafter that found it.
        token_ids: The chain, at least one token.
        length: Latest tokens of the session that occur before the chain in the text where it was found.
        probabilities: The drafter's own estimate, per token, that it follows the ones before; 1.0 where the
            drafter has none.
    """

    kind: DrafterKind
    token_ids: tuple[int, ...]
    length: int
    probabilities: tuple[float, ...]

    @property
    def expected_tokens(self) -> float:
        """Expected number of accepted tokens, if the probabilities are right."""
        paths: Iterator[float] = itertools.accumulate(self.probabilities, operator.mul)
        return sum(paths)


@dataclass(frozen=True)
class Candidates:
    """What could be proposed in a cycle.

    Args:
        model: Kind of the model that can propose; None if none can.
        matches: What look-ups found; at most one match of each.
        num_forced: Tokens that the grammar forces.
        is_fallback: Whether the request allows a model, and none is there.
    """

    model: DrafterKind | None = None
    matches: Sequence[Match] = ()
    num_forced: int = 0
    is_fallback: bool = False


@dataclass(frozen=True)
class Cycle:
    """The result of one cycle.

    Args:
        gamma: Depth of the requested proposal.
        num_drafted: Nodes of the verified proposal; 0 if the drafter failed.
        num_accepted: Proposed tokens that the target accepted, also those after the end of the completion.
        token_ids: The emitted tokens, at least one.
        logprobs: One per emitted token if requested, else empty.
        text: Text that became complete in this cycle.
        finish_reason: Set when this cycle ended the completion.
        draft_s: Seconds waited for the proposal.
        verify_s: Seconds waited for the verdict.
        is_first: Whether it was the session's first cycle, whose waits include the prefill.
        draft_failed: Whether the drafter failed or was late.
        shape: The requested shape with the controller's reason; its depth is `gamma`.
        levels: The levels of the proposal that verification visited, see `levels_of`.
        timing: Timing of the target worker's step; None if it did not report any.
        drafter: Drafter kind that proposed; NONE if nothing was proposed.
        drafter_version: Version of the head or draft model that proposed, see `Proposal`.
        draft_worker: Address of the draft worker that proposed, "" for none.
        is_fallback: Whether the drafter that the request allows could not propose.
        is_prepared: Whether the proposal had arrived before it was requested.
        started: `time.perf_counter()` at the start of the cycle.
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
    shape: Shape = PLAIN
    levels: tuple[Level, ...] = ()
    timing: VerifyTiming | None = None
    drafter: DrafterKind = DrafterKind.NONE
    drafter_version: int = 0
    draft_worker: str = ""
    is_fallback: bool = False
    is_prepared: bool = False
    started: float = 0.0

    @property
    def first_children(self) -> tuple[int, int]:
        """How many first children were tested and how many of them were accepted, up to the first failure.

        The first children of a tree form the chain that it contains; of a chain they are all tokens.
        """
        accepted = 0
        for _, rank in self.levels:
            if rank != 0:
                return accepted + 1, accepted
            accepted += 1
        return accepted, accepted

    @property
    def has_fallen_back(self) -> bool:
        """Whether the chosen drafter failed in this cycle, which is evidence for no drafter."""
        return self.draft_failed or (self.is_fallback and not self.shape.is_fallback)
